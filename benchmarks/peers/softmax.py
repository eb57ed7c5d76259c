"""Softmax over the stored entries of each row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import common


@functools.partial(jax.jit, static_argnums=0)
def segment_softmax(m, rows, values):
    ordered = dict(num_segments=m, indices_are_sorted=True)
    largest = jax.ops.segment_max(values, rows, **ordered)
    exponentials = jnp.exp(values - largest[rows])
    return exponentials / jax.ops.segment_sum(exponentials, rows, **ordered)[rows]


@jax.jit
def masked_softmax(mask, values):
    return jax.nn.softmax(values, axis=-1, where=mask)


def with_jax_segments(A):
    rows, values = jnp.asarray(common.rows_of(A)), jnp.asarray(A.data)
    return common.ready(segment_softmax, A.shape[0], rows, values)


def with_jax_dense(A):
    """The result stays dense."""
    values = common.dense_of(A)
    return common.ready(masked_softmax, values != 0, values)


def with_numpy(A):
    lengths = np.diff(A.indptr)
    starts, lengths = A.indptr[:-1][lengths > 0], lengths[lengths > 0]

    def call():
        largest = np.maximum.reduceat(A.data, starts)
        exponentials = np.exp(A.data - np.repeat(largest, lengths))
        return exponentials / np.repeat(np.add.reduceat(exponentials, starts), lengths)

    return call


def with_torch(A):
    torch, matrix = common.torch_module(), common.torch_csr(A).to_sparse_coo().coalesce()
    return lambda: torch.sparse.softmax(matrix, 1).values()


def with_numba(A):
    from benchmarks import numba_loops as loops

    def call():
        result = common.aligned(A.nnz)
        loops.sparse_softmax(A.indptr, A.data, result)
        return result

    return call


PEERS = {
    "jax_segments": with_jax_segments,
    "jax_dense": with_jax_dense,
    "numpy": with_numpy,
    "torch": with_torch,
    "numba": with_numba,
}
GOAL = tuple(PEERS)
