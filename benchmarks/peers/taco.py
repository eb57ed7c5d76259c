"""The C that TACO generates with the schedules of its paper, compiled with the C compiler's best
flags and OpenMP. The executable `taco` must be on PATH, or named by the variable TACO."""

import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np

from benchmarks import machine
from benchmarks.problems import Unavailable

FLAGS = ("-std=gnu99", "-O3", "-ffast-math", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w")
DYNAMIC = 2  # omp_sched_dynamic

ROWS = "split(i,i0,i1,32),reorder(i0,i1,{}),parallelize(i0,CPUThread,NoRaces)"
# name -> (expression, format of each tensor, schedule): the paper's CPU kernels.
KERNELS = {
    "spmv": ("C(i)=A(i,j)*B(j)", {"A": "ds", "B": "d", "C": "d"}, ROWS.format("j")),
    "spmm": (
        "C(i,k)=A(i,j)*B(j,k)",
        {"A": "ds", "B": "dd", "C": "dd"},
        "split(i,i0,i1,32),pos(j,jpos,A),split(jpos,jpos0,jpos1,8),reorder(i0,i1,jpos0,k,jpos1),"
        "parallelize(i0,CPUThread,NoRaces),parallelize(k,CPUVector,IgnoreRaces)",
    ),
    "sddmm": (
        "D(i,k)=A(i,k)*B(i,j)*C(j,k)",
        {"A": "ds", "B": "dd", "C": "dd:1,0", "D": "dd"},
        "split(i,i0,i1,32),pos(k,kpos,A),split(kpos,kpos0,kpos1,8),reorder(i0,i1,kpos0,j,kpos1),"
        "parallelize(i0,CPUThread,NoRaces),parallelize(kpos1,CPUVector,ParallelReduction)",
    ),
    "mttkrp": (
        "D(i,r)=A(i,j,k)*B(j,r)*C(k,r)",
        {"A": "sss", "B": "dd", "C": "dd", "D": "dd"},
        "pos(i,ipos,A),split(ipos,ipos0,ipos1,16),reorder(ipos0,ipos1,j,k,r),"
        "parallelize(ipos0,CPUThread,NoRaces)",
    ),
    "mttkrp4": (
        "E(i,r)=A(i,j,k,l)*B(j,r)*C(k,r)*D(l,r)",
        {"A": "ssss", "B": "dd", "C": "dd", "D": "dd", "E": "dd"},
        "pos(i,ipos,A),split(ipos,ipos0,ipos1,16),reorder(ipos0,ipos1,j,k,l,r),"
        "parallelize(ipos0,CPUThread,NoRaces)",
    ),
    # The result is stored by the fibers of A. TACO parallelizes no loop over a sparse output ("must
    # support inserts").
    "ttm_fibers": ("C(i,j,r)=A(i,j,k)*B(k,r)", {"A": "sss", "B": "dd", "C": "ssd"}, ""),
    "ttm": (
        "C(i,j,r)=A(i,j,k)*B(k,r)",
        {"A": "sss", "B": "dd", "C": "ddd"},
        "pos(i,ipos,A),split(ipos,ipos0,ipos1,16),reorder(ipos0,ipos1,j,k,r),"
        "parallelize(ipos0,CPUThread,NoRaces)",
    ),
    # Rows in a workspace, and a result that is assembled first.
    "spgemm": (
        "C(i,j)=A(i,k)*B(k,j)",
        {"A": "ds", "B": "ds", "C": "ds"},
        "reorder(i,k,j),precompute(A(i,k)*B(k,j),j,j),assemble(C,Insert),"
        "parallelize(i,CPUThread,NoRaces)",
    ),
}


class Tensor(ctypes.Structure):
    """taco_tensor_t."""

    _fields_ = [
        ("order", ctypes.c_int32),
        ("dimensions", ctypes.POINTER(ctypes.c_int32)),
        ("csize", ctypes.c_int32),
        ("mode_ordering", ctypes.c_void_p),
        ("mode_types", ctypes.c_void_p),
        ("indices", ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))),
        ("vals", ctypes.c_void_p),
        ("fill_value", ctypes.c_void_p),
        ("vals_size", ctypes.c_int32),
    ]


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Raises Unavailable without TACO or a C compiler."""
    taco, cc = os.environ.get("TACO") or shutil.which("taco"), shutil.which("cc")
    if not taco or not cc:
        raise Unavailable("no taco on PATH (or TACO names it)" if cc else "no C compiler")
    expression, formats, schedule = KERNELS[name]
    kinds = [x for tensor, f in formats.items() for x in (f"-f={tensor}:{f}", f"-t={tensor}:float")]
    folder = pathlib.Path(tempfile.mkdtemp())
    source, built = folder / "kernel.c", folder / "kernel.so"
    scheduled = [f"-s={schedule}"] if schedule else []
    command = [taco, expression, *kinds, *scheduled, f"-write-source={source}"]
    for step in (command, [cc, *FLAGS, str(source), "-o", str(built)]):
        found = subprocess.run(step, capture_output=True, text=True)
        if found.returncode:
            raise Unavailable(f"{pathlib.Path(step[0]).name}: {found.stderr.strip()[-200:]}")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:8]
    kept = folder / f"{name}_{digest}.so"  # a unique name: dlopen identifies libraries by name
    built.rename(kept)
    return ctypes.CDLL(str(kept))


def _with_threads(name: str) -> ctypes.CDLL:
    kernels, threads = library(name), ctypes.CDLL("libgomp.so.1")
    threads.omp_set_num_threads(machine.threads())
    threads.omp_set_schedule(DYNAMIC, 1)
    return kernels


def tensor(values: np.ndarray, shape, levels=(), keep: list | None = None) -> Tensor:
    """`levels`: (offsets, coordinates) of each compressed level, () of a dense one."""
    keep = [] if keep is None else keep
    dimensions = (ctypes.c_int32 * len(shape))(*shape)
    rows = []
    for level in levels or [()] * len(shape):
        arrays = [np.ascontiguousarray(x, np.int32) for x in level]
        rows.append((ctypes.c_void_p * 2)(*(x.ctypes.data for x in arrays)))
        keep += [*arrays, rows[-1]]
    pointer = ctypes.POINTER(ctypes.c_void_p)
    indices = (pointer * len(rows))(*(ctypes.cast(row, pointer) for row in rows))
    keep += [dimensions, indices, values]
    found = Tensor(len(shape), dimensions, 32, None, None, indices, values.ctypes.data, None, 0)
    keep.append(found)
    return found


def plan(name: str, sparse, levels, dense, shape, shared: int = 0, fresh: bool = False):
    """A call that computes into an existing array, which is TACO's best case.

    Args:
      name: a key of KERNELS.
      sparse: (values, shape) of A.
      levels: its index arrays.
      dense: arrays of B, C, ..., in their memory layout.
      shape: the result's shape.
      shared: number of A's levels that the result shares; below them it is dense.
      fresh: each call makes a new array, as needed if results are kept.
    """
    from benchmarks.peers.common import aligned

    kernels = _with_threads(name)
    places = (len(levels[shared - 1][1]), *shape[shared:]) if shared else shape
    out, keep = aligned(places), []
    out[...] = 0
    values, extents = sparse
    outer = [*levels[:shared], *[()] * (len(shape) - shared)] if shared else ()
    operands = [tensor(out, shape, outer, keep), tensor(values, extents, levels, keep)]
    columns = [letter for letter, f in KERNELS[name][1].items() if f.endswith(":1,0")]
    for letter, x in zip("BCDE", dense, strict=False):
        # The array of a matrix stored by columns has the transposed shape.
        operands.append(tensor(x, x.shape[::-1] if letter in columns else x.shape, keep=keep))
    pointers = [ctypes.byref(x) for x in operands]

    def call(alive=(keep, kernels)):
        kernels.compute(*pointers)
        return out

    def afresh(alive=(keep, kernels)):
        new = aligned(places)
        kernels.compute(ctypes.byref(tensor(new, shape, outer)), *pointers[1:])
        return new

    return afresh if fresh else call


class Product:
    """A sparse result in memory of its own, which TACO's code takes from the heap."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape, self.alive = shape, []
        nothing = np.zeros(0, np.int32)
        levels = (), (nothing, nothing)
        self.tensor = tensor(np.zeros(0, np.float32), shape, levels, self.alive)
        for i in (0, 1):
            self.tensor.indices[1][i] = None
        self.tensor.vals = None

    def _arrays(self):
        return (*(self.tensor.indices[1][i] for i in (0, 1)), self.tensor.vals)

    def to_csr(self):
        offsets, indices, values = self._arrays()
        int32, float32 = (ctypes.POINTER(x) for x in (ctypes.c_int32, ctypes.c_float))
        offsets = np.ctypeslib.as_array(ctypes.cast(offsets, int32), (self.shape[0] + 1,)).copy()
        count = (int(offsets[-1]),)
        indices = np.ctypeslib.as_array(ctypes.cast(indices, int32), count).copy()
        return offsets, indices, np.ctypeslib.as_array(ctypes.cast(values, float32), count).copy()

    def __del__(self):
        free = ctypes.CDLL(None).free
        for array in self._arrays():
            free(ctypes.c_void_p(array))


def product(A, B):
    """A call that makes A B of two matrices in CSR: TACO's `assemble` and `compute`."""
    kernels, keep = _with_threads("spgemm"), []
    operands = [
        ctypes.byref(tensor(X.data, X.shape, ((), (X.indptr, X.indices)), keep)) for X in (A, B)
    ]

    def call(alive=keep):
        found = Product((A.shape[0], B.shape[1]))
        for step in (kernels.assemble, kernels.compute):
            step(ctypes.byref(found.tensor), *operands)
        return found

    return call


def product_values(A, B):
    """A call that computes A B of two matrices in CSR in memory that TACO's `assemble` made before:
    `compute` alone, which writes columns too."""
    kernels, keep = _with_threads("spgemm"), []
    operands = [
        ctypes.byref(tensor(X.data, X.shape, ((), (X.indptr, X.indices)), keep)) for X in (A, B)
    ]
    found = Product((A.shape[0], B.shape[1]))
    kernels.assemble(ctypes.byref(found.tensor), *operands)

    def call(alive=keep):
        kernels.compute(ctypes.byref(found.tensor), *operands)
        return found

    return call
