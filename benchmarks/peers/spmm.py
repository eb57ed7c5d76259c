"""C = A B.

`reuse=True` writes the result into memory of the plan, not into a fresh array.
"""

import ctypes
import ctypes.util
import os
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.peers import common
from benchmarks.problems import Unavailable

product = jax.jit(lambda a, b: a @ b)


def no_reuse(reuse: bool) -> None:
    if reuse:
        raise Unavailable("cannot write into an array of the caller")


def vector_if_one(B):
    """A single column as a vector: SciPy, MKL and torch have separate, faster code for it."""
    return np.ascontiguousarray(B[:, 0]) if B.shape[1] == 1 else B


def with_scipy(A, B, reuse=False):
    no_reuse(reuse)
    B = vector_if_one(B)
    return lambda: A @ B


def with_jax_bcsr(A, B, reuse=False):
    no_reuse(reuse)
    return common.ready(product, common.bcsr(A), jnp.asarray(B))


def with_jax_bcoo(A, B, reuse=False):
    no_reuse(reuse)
    common.limit(4 * A.nnz * B.shape[1], "its nnz x n intermediate")
    return common.ready(product, common.bcoo(A), jnp.asarray(B))


def with_jax_dense(A, B, reuse=False):
    no_reuse(reuse)
    return common.ready(product, common.dense_of(A), jnp.asarray(B))


def with_torch(A, B, reuse=False):
    torch, T = common.torch_module(), common.torch_csr(A)
    if reuse:
        B, out = torch.from_numpy(B), torch.empty(A.shape[0], B.shape[1])
        return lambda: torch.mm(T, B, out=out)
    B = torch.from_numpy(vector_if_one(B))
    return lambda: T @ B


def with_sparse_dot_mkl(A, B, reuse=False):
    from sparse_dot_mkl import dot_product_mkl, mkl_set_num_threads

    mkl_set_num_threads(machine.threads())
    if reuse:
        out = common.aligned((A.shape[0], B.shape[1]))
        return lambda: dot_product_mkl(A, B, out=out, out_scalar=0)
    B = vector_if_one(B)
    return lambda: dot_product_mkl(A, B)


class MklDescription(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("mode", ctypes.c_int), ("diagonal", ctypes.c_int)]


def with_mkl_inspector(A, B, reuse=False, transpose=False):
    """MKL's inspector-executor routines called directly, with a hint that many calls follow; A^T B
    with `transpose`, from the same arrays of A. float32 or float64."""
    from sparse_dot_mkl import mkl_set_num_threads

    mkl_set_num_threads(machine.threads())
    mkl = ctypes.CDLL(os.environ.get("MKL_RT") or ctypes.util.find_library("mkl_rt"))
    (m, k), n, dtype = A.shape, B.shape[1], A.data.dtype
    shape = (k if transpose else m, n)
    letter, number = ("d", ctypes.c_double) if dtype == np.float64 else ("s", ctypes.c_float)
    create, times_vector, times_matrix = (
        getattr(mkl, f"mkl_sparse_{letter}_{name}") for name in ("create_csr", "mv", "mm")
    )

    def pointer(array, skip=0):
        return ctypes.c_void_p(array.ctypes.data + skip)

    op, row_major, general = 11 if transpose else 10, 101, MklDescription(20, 0, 0)
    handle, one, zero = ctypes.c_void_p(), number(1), number(0)
    arrays = (pointer(A.indptr), pointer(A.indptr, 4), pointer(A.indices), pointer(A.data))
    status = [create(ctypes.byref(handle), 0, m, k, *arrays)]
    if n == 1:
        status.append(mkl.mkl_sparse_set_mv_hint(handle, op, general, 1000))
    else:
        status.append(mkl.mkl_sparse_set_mm_hint(handle, op, general, row_major, n, 1000))
    status.append(mkl.mkl_sparse_optimize(handle))
    if any(status):
        raise Unavailable(f"MKL refused the matrix: status {status}")
    kept, from_B = common.aligned(shape, dtype) if reuse else None, pointer(B)

    def call(operands=(A, B)):  # keeps alive the arrays that MKL points to
        C = common.aligned(shape, dtype) if kept is None else kept
        if n == 1:
            times_vector(op, one, handle, general, from_B, zero, pointer(C))
        else:
            sizes = (row_major, from_B, n, n, zero, pointer(C), n)
            times_matrix(op, one, handle, general, *sizes)
        return C

    weakref.finalize(call, mkl.mkl_sparse_destroy, handle)
    return call


def calls_numba(kernel, A, B, reuse):
    shape = (A.shape[0], *B.shape[1:])
    kept = common.aligned(shape) if reuse else None

    def call():
        C = common.aligned(shape) if kept is None else kept
        kernel(A.indptr, A.indices, A.data, B, C)
        return C

    return call


def with_numba(A, B, reuse=False):
    """A loop for any n, plain or four nonzeros at a time."""
    from benchmarks import numba_loops as loops

    if B.shape[1] == 1:
        return calls_numba(loops.spmv, A, B[:, 0], reuse)
    variants = (loops.spmm, loops.spmm_by_four)
    return common.fastest(*(calls_numba(kernel, A, B, reuse) for kernel in variants))


def with_numba_fixed(A, B, reuse=False):
    """A loop compiled again for each n, which lets the compiler keep a row of C in registers."""
    from benchmarks import numba_loops as loops

    return calls_numba(loops.spmm_fixed(B.shape[1]), A, B, reuse)


PEERS = {
    "scipy": with_scipy,
    "jax_bcsr": with_jax_bcsr,
    "jax_bcoo": with_jax_bcoo,
    "torch_csr": with_torch,
    "sparse_dot_mkl": with_sparse_dot_mkl,
    "numba": with_numba,
    "mkl_inspector": with_mkl_inspector,
    "numba_fixed_n": with_numba_fixed,
    "jax_dense": with_jax_dense,
}
GOAL = ("scipy", "jax_bcsr", "jax_bcoo", "torch_csr", "sparse_dot_mkl", "numba")
