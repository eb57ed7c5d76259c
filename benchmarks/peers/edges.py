"""Operations on vectors of edges [nnz, n], by name: "sum" and "max" over each row, "u_mul_e" the
sum of x[column] * v over each row, "u_add_v" y[row] + x[column] of each edge, "softmax" of each
column of v over each row; "u_mul_e, gradients" the gradient of the sum of squares by both operands.
Zero in rows without entries."""

import functools
import importlib.util
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import common


def loss(function):
    """The gradient of the sum of squares by both operands."""
    return jax.grad(lambda a, b, *index: (function(a, b, *index) ** 2).sum(), (0, 1))


def with_jax_segments(A, operation, first, second):
    """Plain JAX: gather and `jax.ops.segment_*`, told that the edges are sorted."""
    segments = dict(num_segments=A.shape[0], indices_are_sorted=True)
    total = functools.partial(jax.ops.segment_sum, **segments)
    largest = functools.partial(jax.ops.segment_max, **segments)
    filled = np.diff(A.indptr)[:, None] > 0

    def softmax(V, _, r, c):
        e = jnp.exp(V - largest(V, r)[r])
        return e / total(e, r)[r]

    functions = {
        "sum": lambda V, _, r, c: total(V, r),
        "max": lambda V, _, r, c: jnp.where(filled, largest(V, r), 0),
        "u_mul_e": lambda V, X, r, c: total(X[c] * V, r),
        "u_add_v": lambda Y, X, r, c: Y[r] + X[c],
        "softmax": softmax,
    }
    name, _, gradients = operation.partition(", ")
    function = functions[name.split(" ")[0]]
    function = jax.jit(loss(function) if gradients else function)
    operands = (first, second, common.rows_of(A), A.indices)
    return common.ready(function, *map(jnp.asarray, operands))


def with_torch_scatter(A, operation, first, second):
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


def with_torch_segments(A, operation, first, second):
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


def with_pyg(A, operation, first, second):
    """The kernels of torch_scatter, which PyG takes where edges are sorted."""
    import torch_scatter

    torch = common.torch_module()
    offsets, rows, columns = (
        torch.from_numpy(x.astype(np.int64)) for x in (A.indptr, common.rows_of(A), A.indices)
    )

    def softmax(V):
        e = torch.exp(
            V - torch_scatter.gather_csr(torch_scatter.segment_max_csr(V, offsets)[0], offsets)
        )
        return e / torch_scatter.gather_csr(torch_scatter.segment_sum_csr(e, offsets), offsets)

    total = torch_scatter.segment_sum_csr
    functions = {
        "sum": lambda V, _: total(V, offsets),
        "max": lambda V, _: torch_scatter.segment_max_csr(V, offsets)[0],
        "u_mul_e": lambda V, X: total(X.index_select(0, columns) * V, offsets),
        "u_add_v": lambda Y, X: torch_scatter.gather_csr(Y, offsets) + X.index_select(0, columns),
        "softmax": lambda V, _: softmax(V),
    }
    return torch_call(torch, functions, operation, first, second)


def with_dgl(A, operation, first, second):
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
    common.torch_module()  # before DGL
    later = ("dgl.sampling", "dgl.transforms")
    parts = ("graphbolt", "distributed", "data", "data.utils", "dataloading", "cuda")
    parts += ("optim", "homophily", "label_informativeness")
    names = (*(f"dgl.{part}" for part in parts), "pandas")
    for name in (*names, *later):
        sys.modules.setdefault(name, mock.MagicMock(__all__=[]))
    dgl = importlib.import_module("dgl")
    for name in later:  # which read the whole of dgl
        del sys.modules[name]
    for name in later[::-1]:
        importlib.import_module(name)
    return dgl


PEERS = {
    "jax_segments": with_jax_segments,
    "torch_scatter": with_torch_scatter,
    "torch_segments": with_torch_segments,
    "pyg": with_pyg,
    "dgl": with_dgl,
}
GOAL = tuple(PEERS)
LIBRARIES = GOAL[1:]  # what PyG and DGL run
