import numpy as np
import pytest
from emulator import Memory, Program
from emulator.compile import available, compile_ptx


@pytest.fixture(params=["compute_80", "compute_90"])
def launch(request):
    """launch(source, grid, block, *arguments) -> the arrays among the arguments, afterwards."""
    if not available():
        pytest.skip("neither NVRTC (pip install nvidia-cuda-nvrtc) nor nvcc is here")

    def run(source, grid, block, *arguments, options=(), **keywords):
        program, memory = Program(compile_ptx(source, request.param, options)), Memory()
        arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
        addresses = {id(array): memory.put(array) for array in arrays}
        passed = [addresses.get(id(argument), argument) for argument in arguments]
        program.run(program.entries[0], grid, block, passed, memory, **keywords)
        return [memory.get(addresses[id(array)], array) for array in arrays]

    run.architecture = request.param
    return run
