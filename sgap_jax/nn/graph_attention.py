"""Graph attention (GAT) on a sparse adjacency matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from sgap_jax.formats import structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_concrete, check_count, check_flag
from sgap_jax.nn.adjacency import (
    check_edges,
    check_format_of_edges,
    stored_edges,
    stored_values,
    with_stored_values,
)
from sgap_jax.nn.graph_conv import GLOROT
from sgap_jax.nn.linear import NO_METADATA, ZEROS, with_bias
from sgap_jax.nn.sage import ends_of, sizes_of_ends
from sgap_jax.primitives._define import check_schedule
from sgap_jax.primitives.gsddmm import gsddmm
from sgap_jax.primitives.sparse_softmax import sparse_softmax
from sgap_jax.primitives.spmm import spmm
from sgap_jax.schedules import Schedule


class GraphAttention(nnx.Module):
    """Graph attention: each node's mean over its neighbours, weighted by the features of both.

        h = X W,   e[i, j] = LeakyReLU(a . h[i] + b . h[j] (+ c . E f[i, j]))
        p = softmax over stored (i, j) of e,   y[i] = sum_j p[i, j] h[j]

    for each head with its own W, a, b, c and E; the heads are concatenated, or averaged. The logits
    are a `gsddmm`, the weights a `sparse_softmax`, the sums an `spmm`: no array has the size of
    edges x features.

    Args:
      in_features: columns of X; a pair where nodes that send and nodes that receive have other
        numbers of them.
      out_features: features of each head.
      heads: number of heads.
      edge_features: columns of the vectors f of the edges (PyG's `edge_dim`); None: without.
      concat: Y holds heads x out_features columns, one head after another; else their mean, in
        out_features columns (the last layer of a classifier).
      negative_slope: of the LeakyReLU.
      dropout_rate: of the weights p.
      feature_dropout_rate: of X (of its stored values where it is sparse).
      deterministic: no dropout; `model.train()` and `model.eval()` set it.
      use_bias, dtype, param_dtype, kernel_init, bias_init, promote_dtype: as in `nnx.Linear`, with
        Glorot's uniform distribution as in the paper.
      schedule: of the operations on the graph; None lets `choose_schedule` pick.
      rngs: of the parameters (stream `params`) and of the dropout (stream `dropout`).
      kernel_metadata, bias_metadata: of the parameters, a sharding for example.

    Called with (graph, x, edges=None) and the keywords deterministic, rngs and
    return_attention_weights: graph is a SparseArray [m, n] of which only the structure is read, x
    is [..., n, in_features], dense or a SparseArray, or a pair as for `SAGEConv`; edges are
    [..., nnz, edge_features] ([nnz] for one feature) in the order of the values of a graph in CSR,
    CSC or COO. The nodes that receive are
    the first m of the n, or those of the pair. Add the nodes themselves with `add_self_loops`, as
    the paper does; with its `return_perm=True` edges follow. A node without neighbours gets the
    bias. The parameters are `kernel` (W), `to_attention` (a), `from_attention` (b), `bias`, of
    edges `edge_kernel` (E) and `edge_attention` (c), and of a pair of in_features `to_kernel`, the
    W of those that receive.

    Returns:
      Y [..., m, heads * out_features] or [..., m, out_features], in `dtype` or the promoted dtype
      of x, edges and the parameters. With `return_attention_weights=True` (Y, p): the weights of
      the sums, after dropout as in PyG, [..., nnz, heads] in the order of the graph's values, zero
      in the padding.

    Raises:
      TypeError: graph is not a SparseArray. ValueError: x or edges do not fit it, or edges are
        given without edge_features or the other way round. NotImplementedError: edges or weights of
        a graph in another format than CSR, CSC and COO.

    Values of the graph are ignored, as by `SAGEConv`: `duplicates="keep"` counts repeated edges.

    Source: Velickovic et al., ICLR 2018, equations 1 to 6; the term of the edges as in PyG's
    GATConv.
    """

    bias: nnx.Param | None

    def __init__(
        self,
        in_features: int | tuple[int, int],
        out_features: int,
        *,
        heads: int = 1,
        edge_features: int | None = None,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout_rate: float = 0.0,
        feature_dropout_rate: float = 0.0,
        deterministic: bool | None = False,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = GLOROT,
        bias_init: Initializer = ZEROS,
        promote_dtype: PromoteDtypeFn = flax_promote_dtype,
        schedule: Schedule | str | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        schedule = check_schedule("GraphAttention", schedule)
        check_concrete(heads, "heads", "GraphAttention", "it says how many parameters there are")
        if heads < 1:
            raise ValueError(f"GraphAttention: heads must be positive, got {heads}")
        width = heads * out_features
        pair = isinstance(in_features, tuple | list)
        sending, receiving = sizes_of_ends("GraphAttention", in_features)
        self.kernel = nnx.Param(
            kernel_init(rngs.params(), (sending, width), param_dtype), **kernel_metadata
        )
        ends = [kernel_init(rngs.params(), (heads, out_features), param_dtype) for _ in range(2)]
        self.to_attention, self.from_attention = (nnx.Param(end) for end in ends)
        size = width if concat else out_features
        bias = bias_init(rngs.params(), (size,), param_dtype) if use_bias else None
        self.bias = nnx.data(None) if bias is None else nnx.Param(bias, **bias_metadata)

        def new(*shape: int) -> nnx.Param:
            return nnx.Param(kernel_init(rngs.params(), shape, param_dtype))

        # Drawn last: a layer without them has the parameters that it always had.
        self.to_kernel = new(receiving, width) if pair else nnx.data(None)
        self.edge_kernel = self.edge_attention = nnx.data(None)
        if edge_features is not None:
            edge_features = check_count(edge_features, "edge_features", "GraphAttention", 1)
            self.edge_kernel = new(edge_features, width)
            self.edge_attention = new(heads, out_features)
        # Without dropout the state has no random keys, as in nnx.MultiHeadAttention.
        self.dropout, self.feature_dropout = (
            nnx.Dropout(rate, deterministic=deterministic, rngs=rngs if rate > 0 else None)
            for rate in (dropout_rate, feature_dropout_rate)
        )
        self.in_features = (sending, receiving) if pair else sending
        self.out_features = out_features
        self.edge_features = edge_features
        self.heads = heads
        self.concat = concat
        self.negative_slope = negative_slope
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.schedule = schedule

    @overload
    def __call__(
        self,
        graph: SparseArray,
        x: Any,
        edges: Any = ...,
        *,
        deterministic: bool | None = ...,
        rngs: Any = ...,
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
        return_attention_weights: Literal[True],
    ) -> tuple[jax.Array, jax.Array]: ...
    def __call__(
        self,
        graph: SparseArray,
        x: Any,
        edges: Any = None,
        *,
        deterministic: bool | None = None,
        rngs: Any = None,
        return_attention_weights: bool = False,
    ) -> Any:
        names = "kernel", "to_kernel", "to_attention", "from_attention", "bias"
        params = [getattr(self, name) for name in (*names, "edge_kernel", "edge_attention")]
        drop = dict(deterministic=deterministic, rngs=rngs)
        return graph_attention(
            graph,
            x,
            edges,
            [None if param is None else param[...] for param in params],
            lambda arrays: self.promote_dtype(arrays, dtype=self.dtype),
            concat=self.concat,
            negative_slope=self.negative_slope,
            dropout=lambda p: self.dropout(p, **drop),
            feature_dropout=lambda x: self.feature_dropout(x, **drop),
            schedule=self.schedule,
            return_weights=return_attention_weights,
        )


def graph_attention(
    graph: SparseArray,
    x: Any,
    edges: Any,
    params: Any,
    promote: Callable,
    *,
    concat: bool,
    negative_slope: float,
    dropout: Callable[[jax.Array], jax.Array],
    feature_dropout: Callable[[jax.Array], jax.Array],
    schedule: Schedule | str | None,
    return_weights: bool,
) -> Any:
    """The layer; `params` are kernel, to_kernel, to_attention, from_attention, bias, edge_kernel
    and edge_attention, or None."""
    op = "GraphAttention"
    return_weights = check_flag(return_weights, "return_attention_weights", op)
    kernel, to_kernel = params[:2]
    receiving = kernel if to_kernel is None else to_kernel
    source, own = ends_of(op, graph, x, (kernel.shape[0], receiving.shape[0]))
    if return_weights:
        check_format_of_edges(op, graph, "return_attention_weights")
    one = not isinstance(x, tuple | list)  # of which those that receive are a part
    edges = check_edges(op, graph, edges, params[5])
    arrays = (stored_values(source), None if one else stored_values(own), edges, *params)
    sent, kept, edges, kernel, to_kernel, to, frm, bias, of_edges, c = promote(arrays)

    def projected(x: Any, values: jax.Array, kernel: jax.Array) -> jax.Array:
        x = with_stored_values(x, feature_dropout(values))
        return structure.whole(spmm(x, kernel) if isinstance(x, SparseArray) else x @ kernel)

    h, m, (heads, size) = projected(source, sent, kernel), graph.shape[0], to.shape
    left = h if one else projected(own, kept, kernel if to_kernel is None else to_kernel)
    leading = jnp.broadcast_shapes(left.shape[:-2], h.shape[:-2])
    if edges is not None:
        # The attention goes into the matrix: no array has the size of edges x features.
        matrix = jnp.einsum("khf,hf->kh", of_edges.reshape(-1, heads, size), c)
        of_edges = stored_edges(graph, edges) @ matrix
        leading = jnp.broadcast_shapes(leading, of_edges.shape[:-2])
    batch = math.prod(leading)

    def of_heads(x: jax.Array) -> jax.Array:
        """[batch * heads, n, ...]: the heads are a batch axis like any other."""
        x = jnp.broadcast_to(x, (*leading, *x.shape[-2:]))
        x = jnp.moveaxis(x.reshape(batch, x.shape[-2], heads, x.shape[-1] // heads), 2, 1)
        return x.reshape(batch * heads, *x.shape[2:])

    def of_ends(x: jax.Array, attention: jax.Array) -> jax.Array:
        by_head = x.reshape(batch, heads, *x.shape[1:])
        return jnp.einsum("bhnf,hf->bhn", by_head, attention).reshape(x.shape[:2])

    def weights(left: jax.Array, right: jax.Array, *of_edges: jax.Array) -> jax.Array:
        logits = gsddmm(graph, left, right, op="add", schedule=schedule)
        values = logits.values + of_edges[0] if of_edges else logits.values
        logits = logits.with_values(jax.nn.leaky_relu(values, negative_slope))
        return sparse_softmax(logits, schedule=schedule).values

    h = of_heads(h)
    terms = [of_ends(h[:, :m] if one else of_heads(left), to), of_ends(h, frm)]
    if edges is not None:
        terms.append(of_heads(of_edges)[..., 0])
    p = dropout(jax.vmap(weights)(*terms))
    y = jax.vmap(lambda p, h: spmm(graph.with_values(p), h, schedule=schedule))(p, h)
    y = jnp.moveaxis(y.reshape(batch, heads, m, size), 1, 2)
    y = y.reshape(*leading, m, heads * size) if concat else y.mean(2).reshape(*leading, m, size)
    y = with_bias(y, bias)
    if not return_weights:
        return y
    return y, jnp.moveaxis(p.reshape(*leading, heads, graph.nnz), -2, -1)
