"""Multi-head attention over a sparse pattern for linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.typing import Dtype, Initializer

from sgap_jax.nn.attend import Pattern, attend, check_patterns, weight_dropout
from sgap_jax.nn.linear import ZEROS
from sgap_jax.schedules import Schedule


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
