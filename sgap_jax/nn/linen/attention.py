"""Multi-head attention over a sparse pattern for linen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.typing import Dtype, Initializer, PrecisionLike

from sgap_jax.nn.attend import (
    Pattern,
    as_slopes,
    attend,
    check_inputs,
    check_patterns,
    has_sinks,
    rotated,
)
from sgap_jax.nn.decoding import attend_next
from sgap_jax.nn.linear import ZEROS
from sgap_jax.nn.paged import PagedCache, attend_paged, check_paged
from sgap_jax.primitives._define import check_schedule
from sgap_jax.schedules import Schedule


class ProjectedAttention(linen.Module):
    """The options, parameters and cache of `linen.MultiHeadDotProductAttention`, for layers whose
    attention is another."""

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
    schedule: Schedule | str | None = None

    def _project(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, kv_heads: int | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value [..., length, heads, features]."""
        op, width = type(self).__name__, self.qkv_features or inputs_q.shape[-1]
        if width % self.num_heads:
            raise ValueError(f"{op}: {self.num_heads} heads do not divide {width} features")
        kv_heads = self.num_heads if kv_heads is None else kv_heads
        if kv_heads < 1 or self.num_heads % kv_heads:
            raise ValueError(f"{op}: {kv_heads} heads of keys do not divide {self.num_heads}")
        inits: dict[str, Any] = dict(kernel_init=self.kernel_init, bias_init=self.bias_init)
        given = (
            ("query", inputs_q, self.num_heads),
            ("key", inputs_k, kv_heads),
            ("value", inputs_v, kv_heads),
        )
        query, key, value = (
            linen.DenseGeneral(
                (heads, width // self.num_heads), name=name, **inits, **self._options()
            )(inputs)
            for name, inputs, heads in given
        )
        if self.normalize_qk:
            norm: Any = dict(use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
            query = linen.LayerNorm(name="query_ln", **norm)(query)
            key = linen.LayerNorm(name="key_ln", **norm)(key)
        return query, key, value

    def _output(self, x: jax.Array, features: int) -> jax.Array:
        inits: dict[str, Any] = dict(
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
        )
        features = self.out_features or features
        dense = linen.DenseGeneral(features, axis=(-2, -1), name="out", **inits, **self._options())
        return dense(x)

    def _options(self) -> dict[str, Any]:
        return dict(
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )

    def _cache(self, **arrays: Any) -> list[linen.Variable[Any]]:
        """The cache; if there is none, it is made of zeros in the shapes of these arrays."""
        made = [
            self.variable("cache", name, jnp.zeros, x.shape, x.dtype) for name, x in arrays.items()
        ]
        return [*made, self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)]


class SparseMultiHeadAttention(ProjectedAttention):
    """Multi-head attention over a sparse pattern: see `sgap_jax.nn.SparseMultiHeadAttention`.

    Parameters, and names, defaults and order of the arguments, are those of
    `linen.MultiHeadDotProductAttention`, without `attention_fn` and the arguments of dense
    attention only. The pattern is given with each call: pass it into `jit` as an argument. With
    `decode` the collection "cache" has `cached_key`, `cached_value` and `cache_index`: `init` makes
    it in the shape of the whole input, `apply(..., mutable=["cache"])` takes the next positions.
    `sow_weights` sows into "intermediates".
    """

    softcap: float | None = None
    alibi: Any = False
    relative_bias: int | None = None
    rotary: bool | float = False
    scale: float | None = None
    sinks: bool = False
    score_mod: Callable[..., Any] | None = None

    @linen.compact
    def __call__(
        self,
        inputs_q: Any,
        inputs_k: Any = None,
        inputs_v: Any = None,
        *,
        pattern: Pattern | None = None,
        mask: Any = None,
        bias: Any = None,
        is_causal: bool = False,
        segment_ids: Any = None,
        kv_segment_ids: Any = None,
        deterministic: bool | None = None,
        sow_weights: bool = False,
        input_positions: Any = None,
        paged_cache: PagedCache | None = None,
        window: int | None = None,
    ) -> Any:
        op = type(self).__name__
        table = None
        if self.relative_bias is not None:
            shape = (self.num_heads, self.relative_bias)
            table = self.param("relative_bias", ZEROS, shape, self.param_dtype)
        own: dict[str, Any] = dict(softcap=self.softcap, relative_bias=table)
        own["scale"] = self.scale
        if has_sinks(op, self.sinks):
            own["sinks"] = self.param("sinks", ZEROS, (self.num_heads,), self.param_dtype)
        own["alibi_slopes"] = as_slopes(op, self.alibi, self.num_heads)
        if paged_cache is not None:
            refused = dict(pattern=pattern, mask=mask, bias=bias, segment_ids=segment_ids)
            refused |= dict(kv_segment_ids=kv_segment_ids, input_positions=input_positions)
            refused |= dict(sow_weights=sow_weights or None, score_mod=self.score_mod)
            check_paged(op, inputs_q, refused)
            inputs_k, inputs_v = check_inputs(op, inputs_q, inputs_k, inputs_v)
            projected = self._project(inputs_q, inputs_k, inputs_v)
            x, paged_cache = attend_paged(
                op, paged_cache, projected, self.rotary, window=window, **own
            )
            return self._output(x, inputs_q.shape[-1]), paged_cache
        if window is not None:
            raise ValueError(
                f"{op}: window: expected with paged_cache; a pattern says it otherwise"
            )
        patterns = check_patterns(op, pattern)
        if not patterns:
            raise ValueError(f"{op}: pattern: expected with the call, got {pattern}")
        inputs_k, inputs_v = check_inputs(op, inputs_q, inputs_k, inputs_v)
        projected = self._project(inputs_q, inputs_k, inputs_v)
        options: dict[str, Any] = own | dict(bias=bias, score_mod=self.score_mod)
        options |= dict(segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)
        if self.dropout_rate > 0:
            deterministic = linen.merge_param("deterministic", self.deterministic, deterministic)
            if not deterministic:
                options |= dict(dropout_rate=self.dropout_rate)
                options["dropout_rng"] = self.make_rng("dropout")
                options["broadcast_dropout"] = self.broadcast_dropout
        if sow_weights:
            options["sow"] = partial(self.sow, "intermediates", "attention_weights")
        cached = dict(cached_key=projected[1], cached_value=projected[2])
        if self.decode and self.has_variable("cache", "cached_key"):
            variables = self._cache(**cached)
            cache: Any = tuple(one.value for one in variables)
            projected = rotated(op, projected, self.rotary, input_positions, cache[2])
            x, cache = attend_next(op, cache, *projected, patterns, mask, is_causal, **options)
            for variable, now in zip(variables, cache, strict=True):
                variable.value = now
        else:
            if self.decode:
                self._cache(**cached)
            schedule = check_schedule(op, self.schedule)
            projected = rotated(op, projected, self.rotary, input_positions)
            x = attend(op, *projected, patterns, mask, is_causal, schedule, **options)
        return self._output(x, inputs_q.shape[-1])


class SparseSelfAttention(SparseMultiHeadAttention):
    """`SparseMultiHeadAttention` with one input for queries, keys and values: called with (inputs)
    and keywords."""

    @linen.compact
    def __call__(self, inputs: Any, **options: Any) -> jax.Array:  # type: ignore[override]
        return super().__call__(inputs, **options)
