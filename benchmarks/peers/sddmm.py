"""values[p] = X[i, :] . Y[j, :] for each entry p = (i, j) of A."""

import jax
import jax.numpy as jnp
from jax.experimental import sparse as jsparse

from benchmarks.peers import common


@jax.jit
def gather_multiply_sum(rows, columns, X, Y):
    return (X[rows] * Y[columns]).sum(-1)


@jax.jit
def dot_general_sampled(indices, X, Y):
    contract_last = (((1,), (1,)), ((), ()))
    return jsparse.bcoo_dot_general_sampled(X, Y, indices, dimension_numbers=contract_last)


@jax.jit
def dense_then_mask(mask, X, Y):
    return jnp.where(mask, X @ Y.T, 0)


def with_jax_gather(A, X, Y):
    common.limit(8 * A.nnz * X.shape[1], "its nnz x d intermediates")
    return common.ready(
        gather_multiply_sum, *map(jnp.asarray, (common.rows_of(A), A.indices, X, Y))
    )


def with_jax_sampled(A, X, Y):
    common.limit(8 * A.nnz * X.shape[1], "its nnz x d intermediates")
    return common.ready(dot_general_sampled, common.bcoo_indices(A), jnp.asarray(X), jnp.asarray(Y))


def with_torch(A, X, Y):
    torch, T = common.torch_module(), common.torch_csr(A)
    X, Yt = torch.from_numpy(X), torch.from_numpy(Y).t()
    return lambda: torch.sparse.sampled_addmm(T, X, Yt, beta=0).values()


def calls_numba(kernel, A, X, Y):
    def call():
        values = common.aligned(A.nnz)
        kernel(A.indptr, A.indices, X, Y, values)
        return values

    return call


def with_numba(A, X, Y):
    from benchmarks import numba_loops as loops

    return calls_numba(loops.sddmm, A, X, Y)


def with_numba_fixed(A, X, Y):
    """Compiled again for each d."""
    from benchmarks import numba_loops as loops

    return calls_numba(loops.sddmm_fixed(X.shape[1]), A, X, Y)


def with_jax_dense(A, X, Y):
    """The result stays dense: collecting the entries would only add time."""
    mask = common.dense_of(A) != 0
    return common.ready(dense_then_mask, mask, jnp.asarray(X), jnp.asarray(Y))


PEERS = {
    "jax_gather": with_jax_gather,
    "jax_sampled": with_jax_sampled,
    "torch_sampled": with_torch,
    "numba": with_numba,
    "jax_dense_mask": with_jax_dense,
    "numba_fixed_d": with_numba_fixed,
}
GOAL = ("jax_gather", "jax_sampled", "torch_sampled", "numba", "jax_dense_mask")
