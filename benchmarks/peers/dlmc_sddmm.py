"""values[p] = X[i, :] . Y[j, :] where A consists of column vectors; only our contender uses this,
ours_csr and the peers do not."""

import jax
import jax.numpy as jnp

from benchmarks.peers import common, sddmm
from sgap_jax import SparseArray
from sgap_jax import sddmm as sampled

entries = jax.jit(lambda A, X, Y: sampled(A, X, Y).values)


@jax.jit
def dense_then_gather(rows, columns, X, Y):
    return (X @ Y.T)[rows, columns]


def with_jax_dense(A, X, Y):
    """The dense product, from which the entries are gathered."""
    common.limit(4 * A.shape[0] * A.shape[1], "the dense product", common.MAX_DENSE_BYTES)
    operands = map(jnp.asarray, (common.rows_of(A), A.indices, X, Y))
    return common.ready(dense_then_gather, *operands)


def with_ours_csr(A, X, Y):
    return common.ready(entries, SparseArray.from_scipy(A), jnp.asarray(X), jnp.asarray(Y))


PEERS = {
    "jax_dense": with_jax_dense,
    "jax_dense_mask": sddmm.with_jax_dense,
    "torch_sampled": sddmm.with_torch,
    "jax_gather": sddmm.with_jax_gather,
    "numba": sddmm.with_numba,
    "ours_csr": with_ours_csr,
}
GOAL = ("jax_dense", "jax_dense_mask", "torch_sampled", "jax_gather", "numba")
