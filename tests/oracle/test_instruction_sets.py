"""What test_without_xla.py does not call, and operands beyond the caches, on every instruction
set of this processor: all other tests run on the best one."""

import os
import pathlib
import subprocess
import sys

import pytest
from native_call import kernel_isas

from sgap_jax.runtime.native import native

SELECTION = (
    "(test_large and (test_spmm or None or many_short_rows) and not 128 and not 520)"
    " or (test_vectors and (every_length or float32))"
    " or (test_row_vectors and (every_length or every_dtype or pieces))"
    " or (test_attention and (every_length or one_heavy_row or is_causal))"
    " or ((every_length or one_heavy_row) and cpu and not tiled and not float64 and not test_spmm"
    " and not test_sddmm and not test_row_reduce and not test_sparse_softmax)"
)


@pytest.mark.tier("all")
@pytest.mark.slow
@pytest.mark.parametrize("isa", [i for i in kernel_isas()[:-1] if i != native.isa()])
def test_oracles(isa):
    folder = pathlib.Path(__file__).parent
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider"),
            *("-k", SELECTION, "--ignore", str(folder / "test_without_xla.py"), str(folder)),
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=folder.parents[1],
        env={**os.environ, "SGAP_CPU_ISA": isa},
    )
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-1000:]
