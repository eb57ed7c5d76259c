"""What test_without_xla.py does not call, and operands beyond the caches, on every instruction
set of this processor: all other tests run on the best one. And test_without_xla.py in the loops
that other processors take."""

import os
import pathlib
import subprocess
import sys

import pytest
from native_call import kernel_isas

from sgap_jax.runtime.native import native

FOLDER = pathlib.Path(__file__).parent
SELECTION = (
    "(test_large and (test_spmm or None or many_short_rows) and not 128 and not 520)"
    " or (test_vectors and (every_length or float32))"
    " or (test_row_vectors and (every_length or every_dtype or pieces))"
    " or (test_attention and (every_length or one_heavy_row or is_causal))"
    " or ((every_length or one_heavy_row) and cpu and not tiled and not float64 and not test_spmm"
    " and not test_sddmm and not test_row_reduce and not test_sparse_softmax)"
)


def run(*arguments, **environment):
    command = (sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *arguments)
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=FOLDER.parents[1],
        env={**os.environ, **environment},
    )
    assert found.returncode == 0 and " passed" in found.stdout, (
        found.stdout[-4000:] + found.stderr[-1000:]
    )


@pytest.mark.tier("all")
@pytest.mark.slow
@pytest.mark.parametrize("isa", [i for i in kernel_isas()[:-1] if i != native.isa()])
def test_oracles(isa):
    without_xla = str(FOLDER / "test_without_xla.py")
    run("-k", SELECTION, "--ignore", without_xla, str(FOLDER), SGAP_CPU_ISA=isa)


def processor():
    """Whose choices the kernels make here."""
    machine = native.machine()
    return "intel" if machine["intel"] else "zen5" if machine["whole"] else "zen4"


@pytest.mark.tier("all")
@pytest.mark.slow
@pytest.mark.seconds(all=60)
@pytest.mark.parametrize("other", sorted({"intel", "zen4", "zen5"} - {processor()}))
def test_loops_of_other_processors(other):
    """With registers of 64 bytes loops are chosen by the processor: here as on another one."""
    wide = [isa for isa in native.supported_isas() if isa not in ("baseline", "avx2")]
    if not wide:
        pytest.skip("no registers of 64 bytes")
    tests = str(FOLDER / "test_without_xla.py")
    run("-k", " or ".join(wide), "--tier=all", tests, SGAP_CPU_LIKE=other)
