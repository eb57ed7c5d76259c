"""Multi-head attention over a sparse pattern, the counterpart of `nnx.MultiHeadAttention`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgap_jax.formats.array import SparseArray
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
from sgap_jax.nn.paged import PagedCache, attend_paged, check_paged
from sgap_jax.nn.structure import of_index_arrays, stored_arrays, structure_of
from sgap_jax.primitives._define import check_schedule
from sgap_jax.schedules import Schedule

# Attributes of a dense layer that are arguments of a new one.
_OPTIONS = (
    *("num_heads", "in_features", "qkv_features", "out_features", "num_kv_heads", "in_kv_features"),
    *("dtype", "param_dtype", "broadcast_dropout", "dropout_rate", "deterministic", "precision"),
    *("use_bias", "decode", "normalize_qk"),
)


class ProjectedAttention(nnx.MultiHeadAttention):
    """The parameters, projections and cache of `nnx.MultiHeadAttention`, for layers whose attention
    is another."""

    @classmethod
    def _from_dense(cls, layer: Any, rngs: nnx.Rngs | None, **own: Any) -> Any:
        """A layer with the options of `layer`, copies of its parameters, and arguments of its
        own."""
        if not isinstance(layer, nnx.MultiHeadAttention):
            raise TypeError(
                f"{cls.__name__}.from_dense: layer must be an nnx.MultiHeadAttention, got "
                f"{type(layer).__name__}"
            )
        if rngs is None and layer.dropout_rate > 0:
            raise ValueError(f"{cls.__name__}.from_dense: rngs: expected, for the dropout")
        # Newer versions of Flax have it, as the function of a partial that holds the angles.
        rotated = getattr(nnx, "dot_product_attention_with_rope", None)
        if rotated is not None and getattr(layer.attention_fn, "func", None) is rotated:
            raise NotImplementedError(
                f"{cls.__name__}.from_dense: layer has rotary embeddings; the nearest is to rotate "
                "query and key and call sparse_attention"
            )
        options = {name: getattr(layer, name) for name in _OPTIONS}
        made = cls(rngs=rngs or nnx.Rngs(0), **options, **own)
        state = jax.tree.map(jnp.copy, nnx.state(layer, nnx.Param))
        for name in set(state) - set(nnx.state(made, nnx.Param)):
            del state[name]  # of an option that the new layer does without
        nnx.update(made, state)
        return made

    def _project(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, sharding: Any = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value [..., length, heads, features]."""
        op = type(self).__name__
        widths = (self.in_features, self.in_kv_features, self.in_kv_features)
        given = (("inputs_q", inputs_q), ("inputs_k", inputs_k), ("inputs_v", inputs_v))
        for (name, x), width in zip(given, widths, strict=True):
            if x.ndim < 2 or x.shape[-1] != width:
                want = f"[..., length, {width}]"
                raise ValueError(f"{op}: {name} must have shape {want}, got {list(x.shape)}")
        query = self.query(inputs_q, out_sharding=sharding)
        key = self.key(inputs_k, out_sharding=sharding)
        value = self.value(inputs_v, out_sharding=sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        return query, key, value

    def _cache(self) -> tuple[nnx.Cache[jax.Array], ...]:
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            op = type(self).__name__
            raise ValueError(f"{op}: decode: no cache yet; init_cache(inputs.shape) makes one")
        return self.cached_key, self.cached_value, self.cache_index


class SparseMultiHeadAttention(ProjectedAttention):
    """`nnx.MultiHeadAttention` in which a query sees the keys that a sparse pattern stores.

        out = concat over heads of sparse_attention(q, k, v, pattern) W_out + b_out

    with q, k, v the projections of the inputs. The parameters are those of
    `nnx.MultiHeadAttention`, by name and shape: either layer loads the other's. The pattern is
    state of the type `Structure`, saved and not trained. Attention is the fused `sparse_attention`,
    dropout included.

    Args:
      num_heads, in_features, rngs and the options of `nnx.MultiHeadAttention`, among them
        num_kv_heads (grouped queries), dropout_rate, normalize_qk and decode.
      pattern: SparseArray [query length, key length] in CSR, CVS(V) or BCSR(r, c) (kept as CVS(r)),
        values not read, or one for each head. None: the pattern is given with each call; so layers
        can share one.
      schedule: of `sparse_attention`, over whole sequences; decoding has the default.
      softcap: of the scores, as `sparse_attention` has it.
      alibi: True for the slopes of `alibi_slopes(num_heads)`, or one for each head; not trained.
      relative_bias: R for a learned table [num_heads, R] of biases by the distance of key and query
        (a parameter `relative_bias`, zero at first).
      rotary: True, or the base of the wave lengths, rotates queries and keys by their positions
        (`rotary_embedding`).
      scale: a number, of the scores; None is 1 / sqrt(features of a head).
      sinks: True for a learned logit of each head that takes part in the normalisation of its rows
        and nothing else (a parameter `sinks` [num_heads], zero at first).
      score_mod: a function as `sparse_attention` has it, of whole sequences; runs unfused.

    Called with (inputs_q, inputs_k=None, inputs_v=None) and the keywords pattern, mask, bias,
    is_causal, segment_ids, kv_segment_ids, input_positions, sow_weights, deterministic, rngs:
    inputs [..., length, features] as in `nnx.MultiHeadAttention`; `pattern` in
    place of the layer's own; `mask`, bool and broadcastable to [..., num_heads, query length, key
    length], leaves out the entries of the pattern where it is false ([..., 1, 1, key length] masks
    padding; numbers 0 and 1 are taken, as Flax makes them, others refused unless traced); `bias` is
    added to the scores of stored entries, in the shapes of `sparse_attention` (with one pattern for
    each head a sequence of these); `is_causal` leaves out keys after the query; `segment_ids` [...,
    length] (or [length]), which may be traced, keep queries to the keys of their own segment;
    `input_positions` [..., length] are for rotary embeddings, 0, 1, ... if None; `sow_weights` sows
    the weights of the stored entries, [..., num_heads, entries], before dropout, as
    `attention_weights` in `nnx.Intermediate` (with one pattern for each head a list).

    With `decode` (of the layer, of a call, or by `nnx.view`) a call takes the next positions of a
    sequence, one or several, and adds their keys and values to a cache, which `init_cache(shape of
    the whole input, dtype)` makes; `cache_index` is the position of the first of them. The pattern
    is that of the whole sequence, [length, length]; the query at position i sees the keys of row i
    up to i. The outputs are those of one call over the whole sequence with a causal pattern, or
    with `is_causal`. The cache is state of the type `nnx.Cache` with its own dtype; attention is
    computed in the dtype of the query. Positions past the end of the cache overwrite its last one,
    as in Flax; where one call has several of these, the queries of the overwritten ones see no key.

    With `paged_cache`, a `PagedCache`, a call takes the next positions of each of its sequences,
    inputs [B, T, features], and returns (out, cache): a query sees all positions of its sequence up
    to itself, or the last `window` of these. The layer's pattern is not used, nor dropout.

    Returns:
      [..., query length, out_features]. A query that sees no key gets b_out (Flax: the mean of all
      values).

    Raises:
      TypeError: a pattern is not a SparseArray. ValueError: no pattern, or shapes that do not fit;
        when decoding, no cache, or a pattern that is not causal without `is_causal` (under jit with
        a traced pattern, keys after the query are left out instead).
      NotImplementedError: a pattern in another format; `score_mod` with a cache; `from_dense` of a
        layer with rotary embeddings of its own angles.

    Source: vectorSparse, section 7.4 (the sparse transformer).
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        pattern: Pattern | None = None,
        schedule: Schedule | str | None = None,
        softcap: float | None = None,
        alibi: Any = False,
        relative_bias: int | None = None,
        rotary: bool | float = False,
        scale: float | None = None,
        sinks: bool = False,
        score_mod: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        op = "SparseMultiHeadAttention"
        if "attention_fn" in options:
            raise ValueError(f"{op}: attention_fn is sparse_attention; nnx.MultiHeadAttention asks")
        schedule = check_schedule(op, schedule)
        options = {"decode": False} | options
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            rngs=rngs,
            **options,
        )
        patterns = check_patterns(op, pattern)
        self.structures = nnx.List([structure_of(one) for one in patterns])
        self.kinds = tuple(((one.shape[0], one.shape[1]), one.format) for one in patterns)
        self.schedule = schedule
        self.softcap, self.rotary = softcap, rotary
        self.scale = None if scale is None else float(scale)
        self.score_mod = score_mod
        zeros = jnp.zeros(num_heads, self.param_dtype)
        self.sinks: Any = nnx.Param(zeros) if has_sinks(op, sinks) else nnx.data(None)
        self.alibi = as_slopes(op, alibi, num_heads)
        if relative_bias is None:
            self.relative_bias: Any = nnx.data(None)
        else:
            self.relative_bias = nnx.Param(jnp.zeros((num_heads, relative_bias), self.param_dtype))

    @classmethod
    def from_dense(
        cls,
        layer: nnx.MultiHeadAttention,
        pattern: Pattern | None = None,
        *,
        schedule: Schedule | str | None = None,
        rngs: nnx.Rngs | None = None,
        **own: Any,
    ) -> SparseMultiHeadAttention:
        """A layer with the options of `layer` and copies of its parameters; `rngs` is for dropout,
        and needed if `layer` has dropout. `own` are softcap, alibi, relative_bias, rotary, scale,
        sinks and score_mod. If `layer` is sparse, its pattern, schedule and these are the
        defaults."""
        if isinstance(layer, SparseMultiHeadAttention):
            pattern = layer.pattern if pattern is None else pattern
            schedule = layer.schedule if schedule is None else schedule
            table = layer.relative_bias
            of: dict[str, Any] = dict(softcap=layer.softcap, alibi=layer.alibi)
            of["rotary"] = layer.rotary
            of |= dict(scale=layer.scale, score_mod=layer.score_mod, sinks=layer.sinks is not None)
            own = of | dict(relative_bias=None if table is None else table.shape[1]) | own
        return cls._from_dense(layer, rngs, pattern=pattern, schedule=schedule, **own)

    @property
    def pattern(self) -> list[SparseArray]:
        """The layer's patterns, one or one for each head; the arrays are not copied."""
        found = []
        for structure, (shape, format) in zip(self.structures, self.kinds, strict=True):
            arrays = stored_arrays(structure)
            size = (*arrays["column_indices"].shape, *format.block_shape)
            values = jnp.zeros(size, jnp.float32)
            found.append(of_index_arrays(arrays, values, shape, format))
        return found

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
        rngs: Any = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Any = None,
        paged_cache: PagedCache | None = None,
        window: int | None = None,
    ) -> Any:
        op = type(self).__name__
        decode = self.decode if decode is None else decode
        inputs_k, inputs_v = check_inputs(op, inputs_q, inputs_k, inputs_v)
        if paged_cache is not None:
            refused = dict(pattern=pattern, mask=mask, bias=bias, segment_ids=segment_ids)
            refused |= dict(kv_segment_ids=kv_segment_ids, input_positions=input_positions)
            refused |= dict(sow_weights=sow_weights or None, score_mod=self.score_mod)
            check_paged(op, inputs_q, refused)
            projected = self._project(inputs_q, inputs_k, inputs_v, qkv_sharding)
            table = None if self.relative_bias is None else self.relative_bias[...]
            own = dict(softcap=self.softcap, alibi_slopes=self.alibi, relative_bias=table)
            own |= dict(scale=self.scale, sinks=None if self.sinks is None else self.sinks[...])
            x, paged_cache = attend_paged(
                op, paged_cache, projected, self.rotary, window=window, **own
            )
            return self.out(x, out_sharding=out_sharding), paged_cache
        if window is not None:
            raise ValueError(
                f"{op}: window: expected with paged_cache; a pattern says it otherwise"
            )
        patterns = check_patterns(op, pattern) or self.pattern
        if not patterns:
            raise ValueError(f"{op}: pattern: expected with the layer or with the call")
        projected = self._project(inputs_q, inputs_k, inputs_v, qkv_sharding)
        deterministic = self.deterministic if deterministic is None else deterministic
        if self.dropout_rate > 0 and deterministic is None:
            raise ValueError(f"{op}: deterministic: expected with the layer or the call (dropout)")
        options = dict(softcap=self.softcap, alibi_slopes=self.alibi, bias=bias)
        options |= dict(segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)
        options |= dict(scale=self.scale, score_mod=self.score_mod)
        if self.relative_bias is not None:
            options["relative_bias"] = self.relative_bias[...]
        if self.sinks is not None:
            options["sinks"] = self.sinks[...]
        if self.dropout_rate > 0 and not deterministic:
            options |= dict(dropout_rate=self.dropout_rate, dropout_rng=self._dropout_key(rngs))
            options["broadcast_dropout"] = self.broadcast_dropout
        if sow_weights:
            options["sow"] = partial(self.sow, nnx.Intermediate, "attention_weights")
        if decode:
            variables = self._cache()
            cache: Any = tuple(one[...] for one in variables)
            projected = rotated(op, projected, self.rotary, input_positions, cache[2])
            x, cache = attend_next(op, cache, *projected, patterns, mask, is_causal, **options)
            for variable, now in zip(variables, cache, strict=True):
                variable[...] = now
        else:
            projected = rotated(op, projected, self.rotary, input_positions)
            x = attend(op, *projected, patterns, mask, is_causal, self.schedule, **options)
        return self.out(x, out_sharding=out_sharding)

    def _dropout_key(self, rngs: Any) -> Any:
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError(f"{type(self).__name__}: rngs: expected, for the dropout")
        return rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs()


class SparseSelfAttention(SparseMultiHeadAttention):
    """`SparseMultiHeadAttention` with one input for queries, keys and values: called with (inputs)
    and keywords."""

    def __call__(self, inputs: Any, **options: Any) -> jax.Array:  # type: ignore[override]
        return super().__call__(inputs, **options)
