"""Messages x * a along the stored entries, reduced by maximum or mean over each row; zero in rows
without entries. And operations on vectors of edges, by name."""

import functools
import importlib.util
import sys
from unittest import mock

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


# ---- vectors of edges: name of an operation, its two operands -> the call ------------------------


def edges_with_torch(A, operation, first, second):
    """What PyG runs without the wheels of its own kernels: `scatter_add_`, `scatter_reduce_` and
    indexing."""
    torch, m = common.torch_module(), A.shape[0]
    rows, columns = (torch.from_numpy(x.astype(np.int64)) for x in (common.rows_of(A), A.indices))

    def scattered(V, name):
        index, zeros = rows[:, None].expand_as(V), torch.zeros(m, V.shape[1])
        if name == "sum":
            return zeros.scatter_add_(0, index, V)
        return zeros.scatter_reduce_(0, index, V, "amax", include_self=False)

    def softmax(V):
        e = torch.exp(V - scattered(V, "amax")[rows])
        return e / scattered(e, "sum")[rows]

    functions = {
        "sum": lambda V, _: scattered(V, "sum"),
        "max": lambda V, _: scattered(V, "amax"),
        "u_mul_e": lambda V, X: scattered(X[columns] * V, "sum"),
        "u_add_v": lambda Y, X: Y[rows] + X[columns],
        "softmax": lambda V, _: softmax(V),
    }
    return torch_call(torch, functions, operation, first, second)


def edges_with_torch_segments(A, operation, first, second):
    """`torch.segment_reduce` over the row offsets: sums and maxima alone."""
    torch = common.torch_module()
    offsets = torch.from_numpy(A.indptr.astype(np.int64))
    empty = torch.from_numpy(np.diff(A.indptr) == 0)[:, None]
    reduce = lambda V, name: torch.segment_reduce(V, name, offsets=offsets)  # noqa: E731
    functions = {
        "sum": lambda V, _: reduce(V, "sum"),
        "max": lambda V, _: reduce(V, "max").masked_fill(empty, 0),
    }
    return torch_call(torch, functions, operation, first, second)


def edges_with_dgl(A, operation, first, second):
    dgl, torch = dgl_module(), common.torch_module()
    m, k = A.shape
    ends = (torch.from_numpy(x.astype(np.int64)) for x in (A.indices, common.rows_of(A)))
    graph = dgl.heterograph({("u", "e", "v"): tuple(ends)}, {"u": k, "v": m})
    graph.create_formats_()
    functions = {
        "sum": lambda V, _: dgl.ops.copy_e_sum(graph, V),
        "max": lambda V, _: dgl.ops.copy_e_max(graph, V),
        "u_mul_e": lambda V, X: dgl.ops.u_mul_e_sum(graph, X, V),
        "u_add_v": lambda Y, X: dgl.ops.u_add_v(graph, X, Y),
        "softmax": lambda V, _: dgl.ops.edge_softmax(graph, V),
    }
    return torch_call(torch, functions, operation, first, second)


def torch_call(torch, functions, operation, first, second):
    name, _, gradients = operation.partition(", ")
    function = functions.get(name.split(" ")[0])
    if function is None:
        raise common.Unavailable(f"no {operation}")
    a, b = torch.from_numpy(first), torch.from_numpy(second)
    if not gradients:
        return lambda: function(a, b)

    def call():
        x, y = a.detach().requires_grad_(), b.detach().requires_grad_()
        return torch.autograd.grad((function(x, y) ** 2).sum(), (x, y))

    return call


@functools.cache
def dgl_module():
    """DGL without the parts that want libraries of one version of torch, or data sets: those of
    its modules that its kernels do not need are empty."""
    if importlib.util.find_spec("dgl") is None:
        raise ImportError("no dgl")
    parts = ("graphbolt", "distributed", "data", "data.utils", "dataloading", "cuda", "sampling")
    parts += ("transforms", "optim", "homophily", "label_informativeness")
    names = {f"dgl.{part}": mock.MagicMock(__all__=[]) for part in parts}
    names["pandas"] = mock.MagicMock()
    with mock.patch.dict(sys.modules, names):
        return importlib.import_module("dgl")


EDGE_PEERS = {
    "torch_scatter": edges_with_torch,
    "torch_segments": edges_with_torch_segments,
    "dgl": edges_with_dgl,
}
