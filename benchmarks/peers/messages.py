"""Messages x * a along the stored entries, reduced by maximum or mean over each row; zero in rows
without entries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import common


def limit(A, X) -> None:
    common.limit(4 * A.nnz * X.shape[1], "its nnz x n messages")


@functools.partial(jax.jit, static_argnums=(0, 1))
def segments(reduce, m, rows, columns, values, lengths, X):
    messages, ordered = values[:, None] * X[columns], dict(num_segments=m, indices_are_sorted=True)
    if reduce == "mean":
        return jax.ops.segment_sum(messages, rows, **ordered) / jnp.maximum(lengths, 1)
    return jnp.where(lengths > 0, jax.ops.segment_max(messages, rows, **ordered), 0)


def with_jax_segments(A, X, reduce):
    limit(A, X)
    index = (jnp.asarray(common.rows_of(A)), jnp.asarray(A.indices))
    lengths = jnp.asarray(np.diff(A.indptr), jnp.float32)[:, None]
    operands = (*index, jnp.asarray(A.data), lengths, jnp.asarray(X))
    return common.ready(segments, reduce, A.shape[0], *operands)


def with_torch_sparse(A, X, reduce):
    """torch's product of a sparse and a dense matrix with a reduction."""
    torch, T = common.torch_module(), common.torch_csr(A, "int64")
    X, name = torch.from_numpy(X), {"max": "amax", "mean": "mean"}[reduce]
    return lambda: torch.sparse.mm(T, X, name)


def torch_messages(A, X):
    limit(A, X)
    torch = common.torch_module()
    columns, values = torch.from_numpy(A.indices.astype(np.int64)), torch.from_numpy(A.data)
    X = torch.from_numpy(X)
    return torch, lambda: X[columns] * values[:, None]


def with_torch_scatter(A, X, reduce):
    torch, messages = torch_messages(A, X)
    rows = torch.from_numpy(common.rows_of(A).astype(np.int64))[:, None].expand(-1, X.shape[1])
    name = {"max": "amax", "mean": "mean"}[reduce]

    def call():
        zeros = torch.zeros(A.shape[0], X.shape[1])
        return zeros.scatter_reduce(0, rows, messages(), name, include_self=False)

    return call


def with_torch_segments(A, X, reduce):
    torch, messages = torch_messages(A, X)
    offsets = torch.from_numpy(A.indptr.astype(np.int64))
    empty = torch.from_numpy(np.diff(A.indptr) == 0)[:, None]

    def call():
        return torch.segment_reduce(messages(), reduce, offsets=offsets).masked_fill(empty, 0)

    return call


def with_numba(A, X, reduce):
    from benchmarks import numba_loops as loops

    loop = {"max": loops.message_max, "mean": loops.message_mean}[reduce]

    def call():
        C = common.aligned((A.shape[0], X.shape[1]))
        loop(A.indptr, A.indices, A.data, X, C)
        return C

    return call


PEERS = {
    "jax_segments": with_jax_segments,
    "torch_sparse": with_torch_sparse,
    "torch_scatter": with_torch_scatter,
    "torch_segments": with_torch_segments,
    "numba": with_numba,
}
GOAL = tuple(PEERS)
