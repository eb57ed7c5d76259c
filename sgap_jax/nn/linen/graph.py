"""Graph layers for linen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Dtype, Initializer

from sgap_jax.formats.array import SparseArray
from sgap_jax.nn.adjacency import check_features, edge_features
from sgap_jax.nn.gatv2 import gatv2_conv
from sgap_jax.nn.gin import gin_sums
from sgap_jax.nn.graph_attention import graph_attention
from sgap_jax.nn.graph_conv import GLOROT, graph_conv
from sgap_jax.nn.linear import ZEROS
from sgap_jax.nn.rgcn import rgcn_conv, shapes_by_kind, stacked
from sgap_jax.nn.sage import ends_of, sage_conv
from sgap_jax.primitives.gspmm import Reduction
from sgap_jax.schedules import Schedule


class GraphConv(linen.Module):
    """A graph convolution, Y = G X W + b: see `sgap_jax.nn.GraphConv`.

    Parameters `kernel` and `bias`.
    """

    features: int
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = GLOROT
    bias_init: Initializer = ZEROS
    schedule: Schedule | str | None = None

    @linen.compact
    def __call__(self, graph: SparseArray, x: Any) -> jax.Array:
        x = check_features("GraphConv", graph, x)
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        promote = lambda arrays: promote_dtype(arrays, dtype=self.dtype)  # noqa: E731
        return graph_conv("GraphConv", graph, x, kernel, bias, promote, self.schedule)


class GraphAttention(linen.Module):
    """Graph attention (GAT): see `sgap_jax.nn.GraphAttention`.

    Parameters `kernel`, `to_attention`, `from_attention` and `bias`, where edges are given
    `edge_kernel` and `edge_attention`, and `to_kernel` where the nodes of a pair have other numbers
    of features; dropout draws from the stream "dropout".
    """

    features: int
    heads: int = 1
    concat: bool = True
    negative_slope: float = 0.2
    dropout_rate: float = 0.0
    feature_dropout_rate: float = 0.0
    deterministic: bool | None = None
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = GLOROT
    bias_init: Initializer = ZEROS
    schedule: Schedule | str | None = None

    @linen.compact
    def __call__(
        self,
        graph: SparseArray,
        x: Any,
        edges: Any = None,
        *,
        deterministic: bool | None = None,
        return_attention_weights: bool = False,
    ) -> Any:
        source, own = ends_of("GraphAttention", graph, x)
        sending, receiving, width = source.shape[-1], own.shape[-1], self.heads * self.features

        def new(name: str, init: Initializer, *shape: int) -> Any:
            return self.param(name, init, shape, self.param_dtype)

        attention = self.kernel_init, self.heads, self.features
        kernel = new("kernel", self.kernel_init, sending, width)
        to, frm = (new(f"{end}_attention", *attention) for end in ("to", "from"))
        bias = to_kernel = of_edges = of_logits = None
        if self.use_bias:
            bias = new("bias", self.bias_init, width if self.concat else self.features)
        if sending != receiving:
            to_kernel = new("to_kernel", self.kernel_init, receiving, width)
        if edges is not None:
            features = edge_features("GraphAttention", graph, edges)
            of_edges = new("edge_kernel", self.kernel_init, features, width)
            of_logits = new("edge_attention", *attention)
        rates = (self.dropout_rate, self.feature_dropout_rate)
        if any(rates):  # as in linen, `deterministic` is required only where there is dropout
            deterministic = linen.merge_param("deterministic", self.deterministic, deterministic)
        else:
            deterministic = True
        drop, drop_features = (linen.Dropout(rate, deterministic=deterministic) for rate in rates)
        return graph_attention(
            graph,
            x,
            edges,
            (kernel, to_kernel, to, frm, bias, of_edges, of_logits),
            lambda arrays: promote_dtype(arrays, dtype=self.dtype),
            concat=self.concat,
            negative_slope=self.negative_slope,
            dropout=drop,
            feature_dropout=drop_features,
            schedule=self.schedule,
            return_weights=return_attention_weights,
        )


class SAGEConv(linen.Module):
    """GraphSAGE: see `sgap_jax.nn.SAGEConv`. Parameters `kernel`, `root` and `bias`."""

    features: int
    reduce: Reduction = "mean"
    normalize: bool = False
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = GLOROT
    bias_init: Initializer = ZEROS
    schedule: Schedule | str | None = None

    @linen.compact
    def __call__(self, graph: SparseArray, x: Any) -> jax.Array:
        shapes = [(end.shape[-1], self.features) for end in ends_of("SAGEConv", graph, x)]
        kernel = self.param("kernel", self.kernel_init, shapes[0], self.param_dtype)
        root = self.param("root", self.kernel_init, shapes[1], self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return sage_conv(
            graph,
            x,
            kernel,
            root,
            bias,
            lambda arrays: promote_dtype(arrays, dtype=self.dtype),
            reduce=self.reduce,
            normalize=self.normalize,
            schedule=self.schedule,
        )


class GINConv(linen.Module):
    """The graph isomorphism network: see `sgap_jax.nn.GINConv`. Parameter `eps` with `train_eps`,
    and those of the network."""

    network: Callable[[jax.Array], jax.Array]
    eps: float = 0.0
    train_eps: bool = False
    param_dtype: Dtype = jnp.float32
    schedule: Schedule | str | None = None

    @linen.compact
    def __call__(self, graph: SparseArray, x: Any) -> jax.Array:
        eps: Any = self.eps
        if self.train_eps:
            start = linen.initializers.constant(self.eps)
            eps = self.param("eps", start, (), self.param_dtype)
        return self.network(gin_sums(graph, x, eps, self.schedule))


class GATv2Conv(linen.Module):
    """GATv2: see `sgap_jax.nn.GATv2Conv`. Parameters `to_kernel`, `from_kernel`, `attention`,
    `edge_kernel` (where edges are given) and `bias`; dropout draws from the stream "dropout"."""

    features: int
    heads: int = 1
    concat: bool = True
    share_weights: bool = False
    negative_slope: float = 0.2
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = GLOROT
    bias_init: Initializer = ZEROS
    schedule: Schedule | str | None = None

    @linen.compact
    def __call__(
        self,
        graph: SparseArray,
        x: Any,
        edges: Any = None,
        *,
        deterministic: bool | None = None,
        return_edges: bool = False,
        return_attention_weights: bool = False,
    ) -> Any:
        source, own = ends_of("GATv2Conv", graph, x)
        width = self.heads * self.features

        def new(name: str, init: Initializer, *shape: int) -> Any:
            return self.param(name, init, shape, self.param_dtype)

        to = new("to_kernel", self.kernel_init, own.shape[-1], width)
        frm = of_edges = bias = None
        if not self.share_weights:
            frm = new("from_kernel", self.kernel_init, source.shape[-1], width)
        a = new("attention", self.kernel_init, self.heads, self.features)
        if edges is not None:
            features = edge_features("GATv2Conv", graph, edges)
            of_edges = new("edge_kernel", self.kernel_init, features, width)
        if self.use_bias:
            bias = new("bias", self.bias_init, width if self.concat else self.features)
        if self.dropout_rate:
            deterministic = linen.merge_param("deterministic", self.deterministic, deterministic)
        else:
            deterministic = True
        return gatv2_conv(
            graph,
            x,
            edges,
            (to, frm, a, of_edges, bias),
            lambda arrays: promote_dtype(arrays, dtype=self.dtype),
            concat=self.concat,
            negative_slope=self.negative_slope,
            dropout=linen.Dropout(self.dropout_rate, deterministic=deterministic),
            schedule=self.schedule,
            return_edges=return_edges,
            return_weights=return_attention_weights,
        )


class RGCNConv(linen.Module):
    """R-GCN: see `sgap_jax.nn.RGCNConv`. Parameters `kernel`, `coefficients` (with `bases`), `root`
    and `bias`; where kinds of nodes have other numbers of features, `kernel` and `root` are dicts.
    """

    features: int
    bases: int | None = None
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = GLOROT
    bias_init: Initializer = ZEROS
    schedule: Schedule | str | None = None

    @linen.compact
    def __call__(self, relations: Any, x: Any) -> Any:
        of_kinds = x if isinstance(x, dict) else {"": x}
        sizes, count = {kind: jnp.shape(v)[-1] for kind, v in of_kinds.items()}, len(relations.keys)

        def new(name: str, init: Initializer, *shape: int) -> Any:
            return self.param(name, init, shape, self.param_dtype)

        def of_each_kind(name: str, init: Initializer, shapes: dict) -> Any:
            def made(key: Any) -> dict:
                keys = zip(shapes, jax.random.split(key, len(shapes)), strict=True)
                return {kind: init(key, shapes[kind], self.param_dtype) for kind, key in keys}

            return self.param(name, made)

        coefficients = bias = None
        if len(set(sizes.values())) > 1:
            shapes = shapes_by_kind(relations.keys, sizes, self.features, self.bases)
            kernel = of_each_kind("kernel", stacked(self.kernel_init), shapes)
            roots = {kind: (size, self.features) for kind, size in sizes.items()}
            root = of_each_kind("root", self.kernel_init, roots)
        else:
            size = next(iter(sizes.values()))
            matrices = count if self.bases is None else self.bases
            kernel = new("kernel", stacked(self.kernel_init), matrices, size, self.features)
            root = new("root", self.kernel_init, size, self.features)
        if self.bases is not None:
            coefficients = new("coefficients", self.kernel_init, count, self.bases)
        if self.use_bias:
            bias = new("bias", self.bias_init, self.features)
        promote = lambda arrays: promote_dtype(arrays, dtype=self.dtype)  # noqa: E731
        kernels = (kernel, coefficients, root, bias)
        return rgcn_conv(relations, x, kernels, promote, self.schedule)
