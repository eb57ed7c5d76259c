"""A pytest plugin: JAX's own CSR and BCSR products run on ours while JAX's own tests look on."""

import jax
import jax.numpy as jnp
from jax.experimental import sparse
from jax.experimental.sparse import csr

from sgap_jax import Reference, SparseArray, spmm, spmv
from sgap_jax.schedules.schedule import KERNEL_DTYPES

calls = {"kernel": 0, "reference": 0}


def _schedule(*operands):
    name = jnp.result_type(*operands).name
    calls["kernel" if name in KERNEL_DTYPES else "reference"] += 1
    return None if name in KERNEL_DTYPES else Reference()


def _product(A, B, transpose=False):
    with jax.numpy_dtype_promotion("standard"):
        product = spmv if B.ndim == 1 else spmm
        return product(A, B, transpose=transpose, schedule=_schedule(A.values, B))


def _csr(data, indices, indptr, x, *, shape, transpose=False):
    @jax.jit  # the structure is traced, as it is in most of these tests
    def run(data, indices, indptr, x):
        A = SparseArray.from_arrays(data, indptr, indices, shape=shape)
        return _product(A, x, transpose)

    return run(data, indices, indptr, x)


_bcsr_matmul = sparse.BCSR.__matmul__


def _bcsr(self, other):
    if self.n_batch or self.n_dense or jnp.ndim(other) not in (1, 2) or self.ndim != 2:
        return _bcsr_matmul(self, other)
    return _product(SparseArray.from_bcsr(self), jnp.asarray(other))


csr._csr_matvec = csr._csr_matmat = _csr
sparse.BCSR.__matmul__ = _bcsr


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(
        f"products: {calls['kernel']} kernel, {calls['reference']} reference"
    )
