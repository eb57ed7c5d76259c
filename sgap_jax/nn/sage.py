"""GraphSAGE: a node's own features and a reduction of its neighbours', each through a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_count
from sgap_jax.formats.levels import CSR
from sgap_jax.nn.adjacency import check_features, check_graph, stored_values, with_stored_values
from sgap_jax.nn.graph_conv import GLOROT
from sgap_jax.nn.linear import ZEROS, with_bias
from sgap_jax.primitives._define import check_schedule
from sgap_jax.primitives.gspmm import REDUCTIONS, Reduction, check_choice, gspmm
from sgap_jax.schedules import Schedule


class SAGEConv(nnx.Module):
    """A GraphSAGE layer.

        y[i] = W reduce_j x[j] + R x[i] + b,   j over the stored (i, j) of the graph

    Args:
      in_features, out_features: columns of X and of Y; a pair of in_features where nodes that send
        and nodes that receive have other numbers of them.
      reduce: "mean", "sum", "max" or "min" of the neighbours' features; zero without neighbours.
      normalize: divide each row of Y by its Euclidean length (line 7 of the paper's algorithm 1).
      use_bias, dtype, param_dtype, kernel_init, bias_init, promote_dtype: as in `nnx.Linear`, with
        Glorot's uniform distribution.
      schedule: of the messages; None lets `choose_schedule` pick.
      rngs: of the parameters (stream `params`).

    Called with (graph, x): graph is a SparseArray [m, n] of which only the structure is read, x is
    [..., n, in_features], dense, or a SparseArray [n, in_features] (a bag of words), which goes
    through the matrices first. The nodes that receive are the first m of the n: all of them in a
    square graph, the targets of a block of `graphs.NeighborSampler`. Or x is a pair (x of the n
    that send, x of the m that receive). The parameters are `kernel` (W), `root` (R) and `bias`.

    Returns:
      Y [..., m, out_features] in `dtype`, or the promoted dtype of x and the parameters.

    Raises:
      TypeError: graph is not a SparseArray. ValueError: x does not fit the graph or in_features.

    Values of the graph are ignored, so an edge with a value of 2 counts once. Edges that repeat
    count as often if `graphs.from_edges(..., duplicates="keep")` made the graph.

    Source: Hamilton et al., NeurIPS 2017, algorithm 1 (concatenation, written as a sum of two
    products).
    """

    bias: nnx.Param | None

    def __init__(
        self,
        in_features: int | tuple[int, int],
        out_features: int,
        *,
        reduce: Reduction = "mean",
        normalize: bool = False,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = GLOROT,
        bias_init: Initializer = ZEROS,
        promote_dtype: PromoteDtypeFn = flax_promote_dtype,
        schedule: Schedule | str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_choice("SAGEConv", "reduce", reduce, REDUCTIONS)
        shapes = [(size, out_features) for size in sizes_of_ends("SAGEConv", in_features)]
        self.kernel = nnx.Param(kernel_init(rngs.params(), shapes[0], param_dtype))
        self.root = nnx.Param(kernel_init(rngs.params(), shapes[1], param_dtype))
        bias = bias_init(rngs.params(), (out_features,), param_dtype) if use_bias else None
        self.bias = nnx.data(None) if bias is None else nnx.Param(bias)
        self.in_features = in_features
        self.out_features = out_features
        self.reduce = reduce
        self.normalize = normalize
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.schedule = check_schedule("SAGEConv", schedule)

    def __call__(self, graph: SparseArray, x: Any) -> jax.Array:
        return sage_conv(
            graph,
            x,
            self.kernel[...],
            self.root[...],
            None if self.bias is None else self.bias[...],
            lambda arrays: self.promote_dtype(arrays, dtype=self.dtype),
            reduce=self.reduce,
            normalize=self.normalize,
            schedule=self.schedule,
        )


def sage_conv(
    graph: SparseArray,
    x: Any,
    kernel: jax.Array,
    root: jax.Array,
    bias: jax.Array | None,
    promote: Callable,
    *,
    reduce: Reduction,
    normalize: bool,
    schedule: Schedule | str | None,
) -> jax.Array:
    x, own = ends_of("SAGEConv", graph, x, (kernel.shape[0], root.shape[0]))
    arrays = (stored_values(x), stored_values(own), kernel, root, bias)
    values, own_values, kernel, root, bias = promote(arrays)
    x, own = with_stored_values(x, values), with_stored_values(own, own_values)
    linear, sparse = reduce in ("sum", "mean"), isinstance(x, SparseArray)
    if sparse and not linear:
        x = x.todense()
    # The narrower of the two goes along the edges.
    if linear and (sparse or kernel.shape[1] < kernel.shape[0]):
        y = received(graph, x @ kernel, reduce, schedule)
    else:
        y = received(graph, x, reduce, schedule) @ kernel
    y = with_bias(y + own @ root, bias)
    if normalize:
        square = jnp.sum(jnp.square(y), -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.maximum(square, jnp.finfo(y.dtype).tiny))
    return y


def sizes_of_ends(op: str, in_features: Any) -> tuple[int, int]:
    """How many features nodes have that send, and that receive."""
    pair = isinstance(in_features, tuple | list)
    if isinstance(in_features, dict) or (pair and len(in_features) != 2):
        raise ValueError(
            f"{op}: in_features: expected a number or a pair (of nodes that send, of nodes that "
            f"receive), got {in_features!r}"
        )
    sizes = in_features if pair else (in_features, in_features)
    sending, receiving = (check_count(size, "in_features", op, 1) for size in sizes)
    return sending, receiving


def ends_of(
    op: str, graph: Any, x: Any, in_features: tuple[int | None, int | None] = (None, None)
) -> tuple[Any, Any]:
    """The features [..., n, in] of the nodes that send along a graph [m, n], and those [..., m, in]
    of the nodes that receive: the first m, or the second of a pair x."""
    check_graph(op, graph, x)
    m, n = graph.shape
    if isinstance(x, tuple | list):
        if len(x) != 2:
            raise ValueError(f"{op}: x: expected an array or a pair, got {len(x)} arrays")
        source, own = x
        source = check_features(op, graph, source, in_features[0])
        return source, check_features(op, graph.T, own, in_features[1])
    x = check_features(op, graph, x, in_features[0])
    if in_features[0] != in_features[1]:
        raise ValueError(
            f"{op}: x: expected a pair (x of those that send, x of those that receive), of "
            f"{in_features[0]} and {in_features[1]} features, got one array"
        )
    if m > n:
        raise ValueError(
            f"{op}: x: a graph of shape {graph.shape} has more nodes that receive than that send; "
            "expected a pair (x of those that send, x of those that receive)"
        )
    if isinstance(x, SparseArray) and x.ndim != 2:
        raise ValueError(f"{op}: x: a SparseArray must have shape [n, features], got {x.shape}")
    if m == n:
        return x, x
    if not isinstance(x, SparseArray):
        return x, x[..., :m, :]
    x = x.asformat(CSR) if x.format.block_shape else x  # whose blocks m may cut
    return x, x[:m]


def received(graph: SparseArray, x: Any, reduce: Reduction, schedule: Schedule | str | None) -> Any:
    """reduce_j x[..., j, :] for each node; leading axes share the graph."""

    def messages(x: Any) -> Any:
        return gspmm(graph, x, op="copy", reduce=reduce, schedule=schedule)

    if x.ndim == 2:
        return messages(x)
    y = jax.vmap(messages)(x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]))
    return y.reshape(*x.shape[:-2], *y.shape[1:])
