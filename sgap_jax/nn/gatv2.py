"""GATv2: graph attention whose ranking of the neighbours depends on the node."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_count, check_flag
from sgap_jax.nn.adjacency import check_edges, stored_edges, stored_values, with_stored_values
from sgap_jax.nn.graph_conv import GLOROT
from sgap_jax.nn.linear import ZEROS, with_bias
from sgap_jax.nn.sage import ends_of, sizes_of_ends
from sgap_jax.primitives._define import check_schedule
from sgap_jax.primitives.gsddmm import gsddmm
from sgap_jax.primitives.sparse_softmax import sparse_softmax
from sgap_jax.primitives.spmm import spmm
from sgap_jax.schedules import Schedule


class GATv2Conv(nnx.Module):
    """Graph attention in which the logit of an edge is a network of both of its ends.

        l = L x[i],   r = R x[j],   e[i, j] = a . LeakyReLU(l[i] + r[j] (+ E f[i, j]))
        p = softmax over stored (i, j) of e,   y[i] = sum_j p[i, j] r[j]

    for each head with its own L, R, a and E; the heads are concatenated, or averaged. The hidden
    vectors of the edges are one `gsddmm`, the softmax of all heads is one `sparse_softmax`.

    Args:
      in_features: columns of X; a pair where nodes that send and nodes that receive have other
        numbers of them.
      out_features: features of each head.
      heads: number of heads.
      edge_features: columns of the vectors f of the edges; None: without.
      concat: Y holds heads x out_features columns, one head after another; else their mean, in
        out_features columns (the last layer of a classifier).
      share_weights: R is L.
      negative_slope: of the LeakyReLU.
      dropout_rate: of the weights p.
      deterministic: no dropout; `model.train()` and `model.eval()` set it.
      use_bias, dtype, param_dtype, kernel_init, bias_init, promote_dtype: as in `nnx.Linear`, with
        Glorot's uniform distribution.
      schedule: of the operations on the graph; None lets `choose_schedule` pick.
      rngs: of the parameters (stream `params`) and of the dropout (stream `dropout`).

    Called with (graph, x, edges=None) and the keywords deterministic, rngs, return_edges and
    return_attention_weights: graph is a SparseArray [m, n] in CSR, CSC or COO of which only the
    structure is read, x is [..., n, in_features], dense or a SparseArray, or a pair as for
    `SAGEConv`, edges [..., nnz, edge_features] ([nnz] for one feature) in the order of the graph's
    values. Add the nodes themselves with `add_self_loops`, as the paper does; with its
    `return_perm=True` edges follow. The parameters
    are `to_kernel` (L), `from_kernel` (R), `attention` (a), `edge_kernel` (E), `bias`.

    Returns:
      Y [..., m, heads * out_features] or [..., m, out_features], in `dtype` or the promoted dtype
      of x, edges and the parameters. A node without neighbours gets the bias. With
      `return_edges=True` (Y, the vectors under the attention: LeakyReLU(...)
      [..., nnz, heads * out_features], zero in the padding), which DGL's EGATConv hands on to the
      next layer as the features of the edges. With `return_attention_weights=True` also, as the
      last, the weights p as `GraphAttention` returns them, [..., nnz, heads].

    Raises:
      TypeError: graph is not a SparseArray. ValueError: x or edges do not fit it, or edges are
        given without edge_features or the other way round. NotImplementedError: a graph in another
        format.

    Values of the graph are ignored, so an edge with a value of 2 counts once. Edges that repeat
    count as often if `graphs.from_edges(..., duplicates="keep")` made the graph.

    Source: Brody et al., ICLR 2022, equation 7.
    """

    def __init__(
        self,
        in_features: int | tuple[int, int],
        out_features: int,
        *,
        heads: int = 1,
        edge_features: int | None = None,
        concat: bool = True,
        share_weights: bool = False,
        negative_slope: float = 0.2,
        dropout_rate: float = 0.0,
        deterministic: bool | None = False,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = GLOROT,
        bias_init: Initializer = ZEROS,
        promote_dtype: PromoteDtypeFn = flax_promote_dtype,
        schedule: Schedule | str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        heads = check_count(heads, "heads", "GATv2Conv", 1)
        width = heads * out_features
        sending, receiving = sizes_of_ends("GATv2Conv", in_features)
        if share_weights and sending != receiving:
            raise ValueError(
                f"GATv2Conv: share_weights: expected one number of in_features, got {in_features}"
            )

        def new(init: Initializer, *shape: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), shape, param_dtype))

        none = nnx.data(None)
        self.to_kernel = new(kernel_init, receiving, width)
        self.from_kernel = none if share_weights else new(kernel_init, sending, width)
        self.attention = new(kernel_init, heads, out_features)
        edges = edge_features is not None
        self.edge_kernel = new(kernel_init, edge_features or 0, width) if edges else none
        self.bias = new(bias_init, width if concat else out_features) if use_bias else none
        self.dropout = nnx.Dropout(
            dropout_rate, deterministic=deterministic, rngs=rngs if dropout_rate > 0 else None
        )
        self.in_features = in_features
        self.out_features = out_features
        self.heads = heads
        self.concat = concat
        self.negative_slope = negative_slope
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.schedule = check_schedule("GATv2Conv", schedule)

    @overload
    def __call__(
        self,
        graph: SparseArray,
        x: Any,
        edges: Any = ...,
        *,
        deterministic: bool | None = ...,
        rngs: Any = ...,
        return_edges: Literal[False] = ...,
        return_attention_weights: Literal[False] = ...,
    ) -> jax.Array: ...
    @overload
    def __call__(
        self,
        graph: SparseArray,
        x: Any,
        edges: Any = ...,
        *,
        deterministic: bool | None = ...,
        rngs: Any = ...,
        return_edges: Literal[True],
        return_attention_weights: Literal[False] = ...,
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self,
        graph: SparseArray,
        x: Any,
        edges: Any = ...,
        *,
        deterministic: bool | None = ...,
        rngs: Any = ...,
        return_edges: Literal[False] = ...,
        return_attention_weights: Literal[True],
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self,
        graph: SparseArray,
        x: Any,
        edges: Any = ...,
        *,
        deterministic: bool | None = ...,
        rngs: Any = ...,
        return_edges: Literal[True],
        return_attention_weights: Literal[True],
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...
    def __call__(
        self,
        graph: SparseArray,
        x: Any,
        edges: Any = None,
        *,
        deterministic: bool | None = None,
        rngs: Any = None,
        return_edges: bool = False,
        return_attention_weights: bool = False,
    ) -> Any:
        kernels = self.to_kernel, self.from_kernel, self.attention, self.edge_kernel, self.bias
        return gatv2_conv(
            graph,
            x,
            edges,
            [None if kernel is None else kernel[...] for kernel in kernels],
            lambda arrays: self.promote_dtype(arrays, dtype=self.dtype),
            concat=self.concat,
            negative_slope=self.negative_slope,
            dropout=lambda p: self.dropout(p, deterministic=deterministic, rngs=rngs),
            schedule=self.schedule,
            return_edges=return_edges,
            return_weights=return_attention_weights,
        )


def gatv2_conv(
    graph: SparseArray,
    x: Any,
    edges: Any,
    kernels: Any,
    promote: Callable,
    *,
    concat: bool,
    negative_slope: float,
    dropout: Callable[[jax.Array], jax.Array],
    schedule: Schedule | str | None,
    return_edges: bool,
    return_weights: bool,
) -> Any:
    op = "GATv2Conv"
    return_edges = check_flag(return_edges, "return_edges", op)
    return_weights = check_flag(return_weights, "return_attention_weights", op)
    sizes = [kernel.shape[0] for kernel in kernels[:2] if kernel is not None]
    source, own = ends_of(op, graph, x, (sizes[-1], sizes[0]))
    edges = check_edges(op, graph, edges, kernels[3])
    same = own is source
    arrays = (stored_values(source), stored_values(own), edges, *kernels)
    sent, kept, edges, to, frm, a, of_edges, bias = promote(arrays)
    heads, size = a.shape
    left = with_stored_values(own, kept) @ to
    if same and frm is None:
        right = left
    else:
        right = with_stored_values(source, sent) @ (to if frm is None else frm)
    # Leading axes are more columns, as heads are.
    leading = jnp.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    if edges is not None:
        of_edges = stored_edges(graph, edges) @ of_edges
        leading = jnp.broadcast_shapes(leading, of_edges.shape[:-2])
    batch = math.prod(leading)
    left, right = (_in_columns(x, leading) for x in (left, right))
    hidden = gsddmm(graph, left, right, op="add", reduce=None, schedule=schedule)
    if edges is not None:
        hidden = hidden + _in_columns(of_edges, leading)
    hidden = jax.nn.leaky_relu(hidden, negative_slope).reshape(graph.nnz, batch, heads, size)
    logits = jnp.einsum("ebhf,hf->ebh", hidden, a).reshape(graph.nnz, batch * heads)
    p = dropout(sparse_softmax(graph, values=logits, schedule=schedule))
    # The heads are a batch axis like any other.
    of_heads = jnp.moveaxis(right.reshape(graph.shape[1], batch * heads, size), 1, 0)
    y = jax.vmap(lambda p, h: spmm(graph.with_values(p), h, schedule=schedule))(p.T, of_heads)
    y = jnp.moveaxis(y.reshape(*leading, heads, graph.shape[0], size), -3, -2)
    y = with_bias(y.reshape(*y.shape[:-2], heads * size) if concat else y.mean(-2), bias)
    found = [y]
    if return_edges:
        vectors = jnp.moveaxis(hidden.reshape(graph.nnz, batch, heads * size), 1, 0)
        found.append(vectors.reshape(*leading, graph.nnz, heads * size))
    if return_weights:
        weights = jnp.moveaxis(p.reshape(graph.nnz, batch, heads), 1, 0)
        found.append(weights.reshape(*leading, graph.nnz, heads))
    return tuple(found) if len(found) > 1 else y


def _in_columns(x: jax.Array, leading: tuple) -> jax.Array:
    """[..., n, width] of these leading axes as [n, width of all]."""
    x = jnp.broadcast_to(x, (*leading, *x.shape[-2:]))
    batch, (n, width) = math.prod(leading), x.shape[-2:]
    return jnp.moveaxis(x.reshape(batch, n, width), 0, 1).reshape(n, batch * width)
