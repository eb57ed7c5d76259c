import functools
import pathlib
import re
import shutil

import numpy as np
import pytest
from cuda_sources import ptx, require_nvrtc
from emulator import Fault, Memory, Program

from sgap_jax.launch.kernel_call import header_paths

HEADERS = pathlib.Path(__file__).resolve().parents[2] / "cuda"


@pytest.fixture(params=["compute_80", "compute_90"])
def launch(request):
    """launch(source, grid, block, *arguments) -> the array arguments as they are after the
    launch."""
    require_nvrtc()

    def run(source, grid, block, *arguments, options=(), **keywords):
        program, memory = Program(ptx(source, request.param, options)), Memory()
        arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
        addresses = {id(array): memory.put(array) for array in arrays}
        passed = [addresses.get(id(argument), argument) for argument in arguments]
        program.run(program.entries[0], grid, block, passed, memory, **keywords)
        return [memory.get(addresses[id(array)], array) for array in arrays]

    run.architecture = request.param
    return run


@pytest.fixture
def caught(launch):
    """caught(source, says, *arguments): with BUG defined the kernel must fault; the message must
    name the place and contain `says`."""

    def run(source, says, *arguments, grid=2, block=64):
        with pytest.raises(Fault) as fault:
            launch(source, grid, block, *arguments, options=("-DBUG",))
        message = str(fault.value)
        where = r"thread \(\d+, \d+, \d+\) of block \(\d+, \d+, \d+\) at `.+` \(.*\w+\.cu:\d+\)"
        assert re.match(where, message)
        assert re.search(says, message), message

    return run


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """planted(header, right, wrong, check): check() must pass, and must fail once `right` is
    replaced by `wrong` in the header."""

    def run(header, right, wrong, check):
        folder = shutil.copytree(HEADERS, tmp_path / "cuda")
        path = header_paths(folder)[header]
        text = path.read_text()
        assert text.count(right) == 1
        path.write_text(text.replace(right, wrong))

        check()
        monkeypatch.setattr("emulated_launch.ptx", functools.partial(ptx, headers=folder))
        with pytest.raises((Fault, AssertionError)):
            check()

    return run
