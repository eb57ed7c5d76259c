"""Graph convolution (GCN) on a sparse adjacency matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from sgap_jax.formats.array import SparseArray
from sgap_jax.nn.adjacency import check_features, stored_values, with_stored_values
from sgap_jax.nn.linear import NO_METADATA, ZEROS, with_bias
from sgap_jax.primitives._define import check_schedule
from sgap_jax.primitives.spmm import spmm
from sgap_jax.schedules import Schedule

GLOROT = nnx.initializers.glorot_uniform()


class GraphConv(nnx.Module):
    """A graph convolution: features of the neighbours, weighted by the graph, through one matrix.

        Y = G X W + b

    with G the graph's propagation matrix: `normalize_adjacency(A)` makes this the layer of GCN; any
    other sparse matrix (a mean over neighbours, a sample of them) is allowed. G is multiplied with
    the narrower of X and X W (with X W for a sparse X).

    Args:
      in_features: columns of X.
      out_features: columns of Y.
      use_bias, dtype, param_dtype, kernel_init, bias_init, promote_dtype: as in `nnx.Linear`, with
        Glorot's uniform distribution as in the paper.
      schedule: of the product with G; None lets `choose_schedule` pick.
      rngs: of the parameters (stream `params`).
      kernel_metadata, bias_metadata: of the parameters, a sharding for example.

    Called with (graph, x): graph is a SparseArray [m, n], x is [..., n, in_features] or a
    SparseArray [n, in_features] (a bag of words, say).

    Returns:
      Y [..., m, out_features] in `dtype`, or the promoted dtype of all operands.

    Raises:
      TypeError: graph is not a SparseArray. ValueError: x does not fit the graph or in_features.

    Source: Kipf and Welling, ICLR 2017, equation 2.
    """

    bias: nnx.Param | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
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
        schedule = check_schedule("GraphConv", schedule)
        self.kernel = nnx.Param(
            kernel_init(rngs.params(), (in_features, out_features), param_dtype), **kernel_metadata
        )
        bias = bias_init(rngs.params(), (out_features,), param_dtype) if use_bias else None
        self.bias = nnx.data(None) if bias is None else nnx.Param(bias, **bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.schedule = schedule

    def __call__(self, graph: SparseArray, x: Any) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        promote = lambda arrays: self.promote_dtype(arrays, dtype=self.dtype)  # noqa: E731
        return graph_conv("GraphConv", graph, x, self.kernel[...], bias, promote, self.schedule)


def graph_conv(
    op: str,
    graph: SparseArray,
    x: Any,
    kernel: jax.Array,
    bias: jax.Array | None,
    promote: Callable,
    schedule: Schedule | str | None,
) -> jax.Array:
    x = check_features(op, graph, x, kernel.shape[0])
    values, kernel, bias, weights = promote((stored_values(x), kernel, bias, graph.values))
    graph, x = graph.with_values(weights), with_stored_values(x, values)
    if isinstance(x, SparseArray):
        y = spmm(graph, spmm(x, kernel), schedule=schedule)
    elif kernel.shape[0] < kernel.shape[1]:
        y = _propagate(graph, x, schedule) @ kernel
    else:
        y = _propagate(graph, x @ kernel, schedule)
    return with_bias(y, bias)


def _propagate(graph: SparseArray, x: jax.Array, schedule: Schedule | str | None) -> jax.Array:
    """G X over the last two axes of X; its leading axes become columns of one product."""
    if x.ndim == 2:
        return spmm(graph, x, schedule=schedule)
    flat = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    y = jax.vmap(lambda x: spmm(graph, x, schedule=schedule))(flat)
    return y.reshape(*x.shape[:-2], *y.shape[1:])
