"""The layers of `sgap_jax.nn` for Flax linen: the same arguments, names of parameters and results.

A structure is a variable of the collection "structure", beside "params": give both to `apply`, and
"params" alone to the optimizer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Dtype, Initializer

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.formats.prune import prune
from sgap_jax.nn.adjacency import check_features, check_square, numbers, with_numbers
from sgap_jax.nn.attend import Pattern, attend, check_patterns, weight_dropout
from sgap_jax.nn.graph_attention import graph_attention
from sgap_jax.nn.graph_conv import GLOROT, graph_conv
from sgap_jax.nn.linear import ZEROS, linear, scaled_normal
from sgap_jax.nn.structure import check_format, index_arrays, of_index_arrays, random_structure
from sgap_jax.schedules import Schedule


class SparseLinear(linen.Module):
    """A linear layer with a sparse weight, y = x W^T + b: see `sgap_jax.nn.SparseLinear`.

    Parameters `values` and `bias`; variable `index_arrays` of the collection "structure". The
    number of inputs is that of the first call.
    """

    features: int
    sparsity: float
    format: Format = CSR
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    values_init: Initializer | None = None
    bias_init: Initializer = ZEROS
    schedule: Schedule | None = None

    @linen.compact
    def __call__(self, inputs: Any) -> jax.Array:
        inputs = jnp.asarray(inputs)
        shape = (self.features, inputs.shape[-1])
        format = check_format("SparseLinear", self.format)

        def places() -> dict[str, Any]:
            key = self.make_rng("params")
            return index_arrays(random_structure(key, shape, self.sparsity, format, "SparseLinear"))

        arrays = self.variable("structure", "index_arrays", places).value
        block = () if format.vector_length is None else (format.vector_length,)
        size = (arrays["column_indices"].shape[0], *block)
        init = self.values_init or scaled_normal(shape[1], self.sparsity)
        values = self.param("values", init, size, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        inputs, values, bias = promote_dtype((inputs, values, bias), dtype=self.dtype)
        W = of_index_arrays(arrays, values, shape, format)
        return linear("SparseLinear", inputs, W, bias, self.schedule)

    @staticmethod
    def variables_from_dense(
        params: Any, sparsity: float, *, format: Format = CSR
    ) -> dict[str, Any]:
        """The variables of a SparseLinear that keeps the largest weights of a `linen.Dense`.

        Args:
          params: of the dense layer: kernel [in_features, features] and perhaps bias, concrete.
          sparsity, format: which to keep, see `sgap_jax.prune`; the layer has the same ones.

        Returns:
          {"params": {values, bias}, "structure": {index_arrays}}.
        """
        op = "SparseLinear.variables_from_dense"
        if isinstance(params["kernel"], jax.core.Tracer):
            raise ValueError(f"{op}: params: expected concrete arrays; call it outside jit")
        kernel = np.asarray(params["kernel"])
        W = prune(kernel.T, check_format(op, format), sparsity=sparsity)
        kept = {name: value for name, value in params.items() if name != "kernel"}
        structure = {"index_arrays": index_arrays(W)}
        return {"params": {**kept, "values": W.values}, "structure": structure}


class SparseMultiHeadAttention(linen.Module):
    """Multi-head attention over a sparse pattern: see `sgap_jax.nn.SparseMultiHeadAttention`.

    The parameters are those of `linen.MultiHeadDotProductAttention`. The pattern is given with each
    call: pass it into `jit` as an argument.
    """

    num_heads: int
    qkv_features: int | None = None
    out_features: int | None = None
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = linen.initializers.lecun_normal()
    bias_init: Initializer = ZEROS
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True
    deterministic: bool | None = None
    schedule: Schedule | None = None

    @linen.compact
    def __call__(
        self,
        inputs_q: Any,
        inputs_k: Any = None,
        inputs_v: Any = None,
        *,
        pattern: Pattern,
        mask: Any = None,
        is_causal: bool = False,
        deterministic: bool | None = None,
    ) -> jax.Array:
        op = type(self).__name__
        if inputs_k is None and inputs_v is not None:
            raise ValueError(f"{op}: inputs_k: expected with inputs_v, got None")
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        width = self.qkv_features or inputs_q.shape[-1]
        if width % self.num_heads:
            raise ValueError(f"{op}: {self.num_heads} heads do not divide {width} features")
        shape = (self.num_heads, width // self.num_heads)
        options: dict[str, Any] = dict(
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
        )
        query, key, value = (
            linen.DenseGeneral(shape, name=name, **options)(inputs)
            for name, inputs in (("query", inputs_q), ("key", inputs_k), ("value", inputs_v))
        )
        drop = None
        if self.dropout_rate > 0:
            deterministic = linen.merge_param("deterministic", self.deterministic, deterministic)
            if not deterministic:
                rng = self.make_rng("dropout")
                drop = weight_dropout(rng, self.dropout_rate, self.broadcast_dropout)
        patterns = check_patterns(op, pattern)
        x = attend(op, query, key, value, patterns, mask, is_causal, drop, self.schedule)
        features = self.out_features or inputs_q.shape[-1]
        return linen.DenseGeneral(features, axis=(-2, -1), name="out", **options)(x)


class SparseSelfAttention(SparseMultiHeadAttention):
    """`SparseMultiHeadAttention` of a sequence with itself: (inputs) and its keywords."""

    @linen.compact
    def __call__(self, inputs: Any, **options: Any) -> jax.Array:  # type: ignore[override]
        return super().__call__(inputs, **options)


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
    schedule: Schedule | None = None

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

    Parameters `kernel`, `to_attention`, `from_attention` and `bias`; dropout draws from the stream
    "dropout".
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
    schedule: Schedule | None = None

    @linen.compact
    def __call__(
        self, graph: SparseArray, x: Any, *, deterministic: bool | None = None
    ) -> jax.Array:
        check_square("GraphAttention", graph)
        x = check_features("GraphAttention", graph, x)
        width = self.heads * self.features

        def new(name: str, init: Initializer, *shape: int) -> Any:
            return self.param(name, init, shape, self.param_dtype)

        kernel = new("kernel", self.kernel_init, x.shape[-1], width)
        to = new("to_attention", self.kernel_init, self.heads, self.features)
        frm = new("from_attention", self.kernel_init, self.heads, self.features)
        bias = None
        if self.use_bias:
            bias = new("bias", self.bias_init, width if self.concat else self.features)
        stored, kernel, to, frm, bias = promote_dtype(
            (numbers(x), kernel, to, frm, bias), dtype=self.dtype
        )
        rates = (self.dropout_rate, self.feature_dropout_rate)
        if any(rates):  # as in linen, only dropout asks whether it is to be
            deterministic = linen.merge_param("deterministic", self.deterministic, deterministic)
        else:
            deterministic = True
        drop, drop_features = (linen.Dropout(rate, deterministic=deterministic) for rate in rates)
        return graph_attention(
            graph,
            with_numbers(x, drop_features(stored)),
            kernel,
            to,
            frm,
            bias,
            concat=self.concat,
            negative_slope=self.negative_slope,
            dropout=drop,
            schedule=self.schedule,
        )
