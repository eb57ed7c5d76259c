"""Graph attention (GAT) on a sparse adjacency matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from sgap_jax.formats import structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_concrete
from sgap_jax.nn.adjacency import (
    check_features,
    check_graph,
    check_square,
    stored_values,
    with_stored_values,
)
from sgap_jax.nn.graph_conv import GLOROT
from sgap_jax.nn.linear import NO_METADATA, ZEROS, with_bias
from sgap_jax.primitives._define import check_schedule
from sgap_jax.primitives.gsddmm import gsddmm
from sgap_jax.primitives.sparse_softmax import sparse_softmax
from sgap_jax.primitives.spmm import spmm
from sgap_jax.schedules import Schedule


class GraphAttention(nnx.Module):
    """Graph attention: each node's mean over its neighbours, weighted by the features of both.

        h = X W,   e[i, j] = LeakyReLU(a . h[i] + b . h[j]),   p = softmax over stored (i, j) of e
        y[i] = sum_j p[i, j] h[j]

    for each head with its own W, a and b; the heads are concatenated, or averaged. The logits are a
    `gsddmm`, the weights a `sparse_softmax`, the sums an `spmm`: no array has the size of edges x
    features.

    Args:
      in_features: columns of X.
      out_features: features of each head.
      heads: number of heads.
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

    Called with (graph, x) and the keywords deterministic and rngs: graph is a SparseArray [n, n] of
    which only the structure is read, x is [..., n, in_features] or a SparseArray [n, in_features].
    Add the nodes themselves with `add_self_loops`, as the paper does. A node without neighbours
    gets the bias.

    Returns:
      Y [..., n, heads * out_features] or [..., n, out_features], in `dtype` or the promoted dtype
      of x and the parameters.

    Raises:
      TypeError: graph is not a SparseArray. ValueError: graph is not square, or x does not fit it
        or in_features.

    Values of the graph are ignored, as by `SAGEConv`: `duplicates="keep"` counts repeated edges.

    Source: Velickovic et al., ICLR 2018, equations 1 to 6.
    """

    bias: nnx.Param | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        heads: int = 1,
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
        self.kernel = nnx.Param(
            kernel_init(rngs.params(), (in_features, width), param_dtype), **kernel_metadata
        )
        ends = [kernel_init(rngs.params(), (heads, out_features), param_dtype) for _ in range(2)]
        self.to_attention, self.from_attention = (nnx.Param(end) for end in ends)
        size = width if concat else out_features
        bias = bias_init(rngs.params(), (size,), param_dtype) if use_bias else None
        self.bias = nnx.data(None) if bias is None else nnx.Param(bias, **bias_metadata)
        # Without dropout the state has no random keys, as in nnx.MultiHeadAttention.
        self.dropout, self.feature_dropout = (
            nnx.Dropout(rate, deterministic=deterministic, rngs=rngs if rate > 0 else None)
            for rate in (dropout_rate, feature_dropout_rate)
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
        self.schedule = schedule

    def __call__(
        self,
        graph: SparseArray,
        x: Any,
        *,
        deterministic: bool | None = None,
        rngs: Any = None,
    ) -> jax.Array:
        check_graph("GraphAttention", graph, x)
        check_square("GraphAttention", graph, "graph")
        x = check_features("GraphAttention", graph, x, self.in_features)
        bias = None if self.bias is None else self.bias[...]
        to, frm = self.to_attention[...], self.from_attention[...]
        stored, kernel, to, frm, bias = self.promote_dtype(
            (stored_values(x), self.kernel[...], to, frm, bias), dtype=self.dtype
        )
        drop = dict(deterministic=deterministic, rngs=rngs)
        return graph_attention(
            graph,
            with_stored_values(x, self.feature_dropout(stored, **drop)),
            kernel,
            to,
            frm,
            bias,
            concat=self.concat,
            negative_slope=self.negative_slope,
            dropout=lambda p: self.dropout(p, **drop),
            schedule=self.schedule,
        )


def graph_attention(
    graph: SparseArray,
    x: Any,
    kernel: jax.Array,
    to: jax.Array,
    frm: jax.Array,
    bias: jax.Array | None,
    *,
    concat: bool,
    negative_slope: float,
    dropout: Callable[[jax.Array], jax.Array],
    schedule: Schedule | str | None,
) -> jax.Array:
    h = structure.whole(spmm(x, kernel) if isinstance(x, SparseArray) else x @ kernel)
    leading, n, (heads, size) = h.shape[:-2], h.shape[-2], to.shape
    batch = math.prod(leading)
    # [batch * heads, n, size]: the heads are a batch axis like any other.
    h = jnp.moveaxis(h.reshape(batch, n, heads, size), 2, 1)
    ends = [jnp.einsum("bhnf,hf->bhn", h, end).reshape(batch * heads, n) for end in (to, frm)]
    h = h.reshape(batch * heads, n, size)

    def weights(left: jax.Array, right: jax.Array) -> jax.Array:
        logits = gsddmm(graph, left, right, op="add", schedule=schedule)
        logits = logits.with_values(jax.nn.leaky_relu(logits.values, negative_slope))
        return sparse_softmax(logits, schedule=schedule).values

    p = dropout(jax.vmap(weights)(*ends))
    y = jax.vmap(lambda p, h: spmm(graph.with_values(p), h, schedule=schedule))(p, h)
    y = jnp.moveaxis(y.reshape(batch, heads, n, size), 1, 2)
    y = y.reshape(*leading, n, heads * size) if concat else y.mean(2).reshape(*leading, n, size)
    return with_bias(y, bias)
