"""Softmax over the stored entries of each row, where A consists of column vectors; only our
contender uses this, ours_csr and the peers do not."""

import jax

from benchmarks.peers import common, softmax
from sgap_jax import SparseArray, sparse_softmax

entries = jax.jit(lambda A: sparse_softmax(A).values)


def with_ours_csr(A):
    return common.ready(entries, SparseArray.from_scipy(A))


PEERS = {**softmax.PEERS, "ours_csr": with_ours_csr}
GOAL = softmax.GOAL
