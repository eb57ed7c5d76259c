"""Multi-head attention over a sparse pattern for linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.typing import Dtype, Initializer, PrecisionLike

from sgap_jax.nn.attend import Pattern, attend, check_inputs, check_patterns, weight_dropout
from sgap_jax.nn.decoding import attend_next
from sgap_jax.nn.linear import ZEROS
from sgap_jax.schedules import Schedule


class SparseMultiHeadAttention(linen.Module):
    """Multi-head attention over a sparse pattern: see `sgap_jax.nn.SparseMultiHeadAttention`.

    Parameters, and names, defaults and order of the arguments, are those of
    `linen.MultiHeadDotProductAttention`, without `attention_fn` and the arguments of dense
    attention only. The pattern is given with each call: pass it into `jit` as an argument. With
    `decode` the collection "cache" has `cached_key`, `cached_value` and `cache_index`: `init` makes
    it in the shape of the whole input, `apply(..., mutable=["cache"])` takes the next positions.
    """

    num_heads: int
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: PrecisionLike = None
    kernel_init: Initializer = linen.initializers.lecun_normal()
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = ZEROS
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    decode: bool = False
    normalize_qk: bool = False
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
        patterns = check_patterns(op, pattern)
        if not patterns:
            raise ValueError(f"{op}: pattern: expected with the call, got {pattern}")
        inputs_k, inputs_v = check_inputs(op, inputs_q, inputs_k, inputs_v)
        width = self.qkv_features or inputs_q.shape[-1]
        if width % self.num_heads:
            raise ValueError(f"{op}: {self.num_heads} heads do not divide {width} features")
        shape = (self.num_heads, width // self.num_heads)
        options: dict[str, Any] = dict(
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )
        inits: dict[str, Any] = dict(kernel_init=self.kernel_init, bias_init=self.bias_init)
        query, key, value = (
            linen.DenseGeneral(shape, name=name, **inits, **options)(inputs)
            for name, inputs in (("query", inputs_q), ("key", inputs_k), ("value", inputs_v))
        )
        if self.normalize_qk:
            norm: Any = dict(use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
            query = linen.LayerNorm(name="query_ln", **norm)(query)
            key = linen.LayerNorm(name="key_ln", **norm)(key)
        drop = None
        if self.dropout_rate > 0:
            deterministic = linen.merge_param("deterministic", self.deterministic, deterministic)
            if not deterministic:
                rng = self.make_rng("dropout")
                drop = weight_dropout(rng, self.dropout_rate, self.broadcast_dropout)
        projected = (query, key, value)
        if self.decode and self.has_variable("cache", "cached_key"):
            variables = self._cache(key, value)
            cache: Any = tuple(one.value for one in variables)
            x, cache = attend_next(op, cache, *projected, patterns, mask, is_causal, drop)
            for variable, now in zip(variables, cache, strict=True):
                variable.value = now
        else:
            if self.decode:
                self._cache(key, value)
            x = attend(op, *projected, patterns, mask, is_causal, drop, self.schedule)
        features = self.out_features or inputs_q.shape[-1]
        inits = dict(
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
        )
        return linen.DenseGeneral(features, axis=(-2, -1), name="out", **inits, **options)(x)

    def _cache(self, key: jax.Array, value: jax.Array) -> list[linen.Variable[Any]]:
        """The cache; if there is none, it is made in the shape of these keys and values."""
        made = [
            self.variable("cache", name, jnp.zeros, x.shape, x.dtype)
            for name, x in (("cached_key", key), ("cached_value", value))
        ]
        return [*made, self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)]


class SparseSelfAttention(SparseMultiHeadAttention):
    """`SparseMultiHeadAttention` with one input for queries, keys and values: called with (inputs)
    and keywords."""

    @linen.compact
    def __call__(self, inputs: Any, **options: Any) -> jax.Array:  # type: ignore[override]
        return super().__call__(inputs, **options)
