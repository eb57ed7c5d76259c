"""C = A B where A consists of column vectors; only our contender uses this, ours_csr and the peers
do not."""

import jax
import jax.numpy as jnp

from benchmarks.peers import common, spmm
from sgap_jax import SparseArray
from sgap_jax import spmm as product

entries = jax.jit(lambda A, B: product(A, B))


def with_ours_csr(A, B):
    return common.ready(entries, SparseArray.from_scipy(A), jnp.asarray(B))


PEERS = {
    "jax_dense": spmm.with_jax_dense,
    "torch_csr": spmm.with_torch,
    "jax_bcsr": spmm.with_jax_bcsr,
    "sparse_dot_mkl": spmm.with_sparse_dot_mkl,
    "ours_csr": with_ours_csr,
}
GOAL = ("jax_dense", "torch_csr", "jax_bcsr", "sparse_dot_mkl")
