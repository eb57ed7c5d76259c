"""What a call of the CPU takes for itself has a bound, whatever its operands: each in a process of
its own, without JAX, whose greatest size is looked at before and after."""

import subprocess
import sys

import pytest

from sgap_jax.runtime.native import native

SETUP = """
import importlib.machinery, importlib.util, resource, sys
import numpy as np

loader = importlib.machinery.ExtensionFileLoader("_native", sys.argv[1])
native = importlib.util.module_from_spec(importlib.util.spec_from_loader("_native", loader))
loader.exec_module(native)
TYPES = {"int32": 4, "float16": 10, "float32": 11}
UNIT = 1 if sys.platform == "darwin" else 1024


def described(arrays):
    return [(x.ctypes.data, TYPES[x.dtype.name], list(x.shape)) for x in arrays]


def taken(target, operands, *results, **attributes):
    for result in results:
        result[:] = 7  # its pages are there
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arrays, to = described(operands), described(results)
    native._test_call(native.targets()[target], arrays, to, attributes, native.isa(), 1)
    return UNIT * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""

CASES = {
    "long vectors, of which a block of X would be widened": """
machine = native.machine()
V, d, uses = 64, machine["l2_bytes"] // 8, 8 * machine["cores"]  # of Y's one row
offsets, indices = np.int32([0, uses]), np.zeros(uses, np.int32)
x, y, none = np.ones((1, V, d), np.float16), np.ones((1, 1, d), np.float16), np.ones((1, 0))
out = np.empty((1, uses, V), np.float16)
operands = (offsets, indices, x, y, none.astype(np.float16), none.astype(np.float32))
more = taken("sgap_sddmm_cvs_v1", operands, out, chunk_nonzeros=8192)
assert (out == np.inf if d > 65504 else out == d).all()
assert more <= 4 * machine["l2_bytes"], more
""",
    "a row in pieces of one entry": """
nnz, n = 3000, 1 << 15  # 400 MB of sums
offsets, indices = np.int32([0, nnz]), np.zeros(nnz, np.int32)
values, x, y = np.ones((1, nnz), np.float32), np.ones((1, 1, n), np.float32), np.empty((1, 1, n))
y = y.astype(np.float32)
attributes = dict(tile_columns=0, chunk_nonzeros=1, pack=False)
more = taken("sgap_spmm_csr_v1", (values, offsets, indices, indices[:0], x), y, **attributes)
assert (y == nnz).all()
assert more <= (1 << 28) + (1 << 24), more
""",
    "extrema of a row in pieces of one entry, with their positions": """
nnz, n = 3000, 1 << 15
offsets, indices = np.int32([0, nnz]), np.zeros(nnz, np.int32)
values, x = np.ones((1, nnz), np.float32), np.ones((1, 1, n), np.float32)
y, positions = np.empty((1, 1, n), np.float32), np.empty((1, 1, n), np.int32)
attributes = dict(add=False, minimum=False, chunk_nonzeros=1)
operands = (values, offsets, indices, indices[:0], x)
more = taken("sgap_gspmm_csr_v1", operands, y, positions, **attributes)
assert (y == 1).all() and (positions == 0).all()
assert more <= (1 << 28) + (1 << 24), more
""",
}


@pytest.mark.parametrize("case", CASES.values(), ids=[name.replace(" ", "-") for name in CASES])
def test_what_a_call_takes(case):
    command = [sys.executable, "-c", SETUP + case, native.__file__]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


# The last index is wrong: on two threads, tasks find it and copy what takes part, for which 64 MB
# are too many; then there is memory again.
NO_MEMORY = """
rows, nnz = 1 << 10, 1 << 23
offsets, indices = np.linspace(0, nnz, rows + 1).astype(np.int32), np.zeros(nnz, np.int32)
indices[-1] = -1
values, x = np.ones((1, nnz), np.float32), np.ones((1, 1, 1), np.float32)
y = np.empty((1, rows, 1), np.float32)
arrays = described((values, offsets, indices, indices[:0], x))
attributes = dict(tile_columns=0, chunk_nonzeros=8192, pack=False)
call = native.targets()["sgap_spmm_csr_v1"], arrays, described([y]), attributes, native.isa(), 2
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (40 << 20), -1))
try:
    native._test_call(*call)
    raise AssertionError("there was memory")
except ValueError as error:
    assert str(error) == "out of memory", error
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
native._test_call(*call)
assert (y[0, :-1] == nnz // rows).all() and y[0, -1] == nnz // rows - 1
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_task_that_finds_no_memory_fails_the_call():
    """And not the process, which an exception in a thread of XLA's pool would end."""
    command = [sys.executable, "-c", SETUP + NO_MEMORY, native.__file__]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
