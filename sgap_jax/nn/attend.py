"""Attention of projected inputs, for the attention layers of nnx and linen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import as_array, check_count, is_traced
from sgap_jax.formats.vectors import split_blocks
from sgap_jax.nn.structure import check_format
from sgap_jax.primitives._define import accumulator, check_sparse
from sgap_jax.primitives.attention import sparse_attention
from sgap_jax.schedules import Schedule

Pattern = SparseArray | Sequence[SparseArray]


def check_inputs(op: str, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """The inputs of keys and values; keys default to the input of the queries, values to that of
    the keys."""
    if k is None and v is not None:
        raise ValueError(f"{op}: inputs_k: expected with inputs_v, got None")
    k = q if k is None else k
    return k, k if v is None else v


def check_patterns(op: str, pattern: Pattern | None) -> list[SparseArray]:
    """The patterns as a list, in CSR or CVS(V): one, one for each head, or none."""
    if pattern is None:
        return []
    patterns = list(pattern) if isinstance(pattern, Sequence) else [pattern]
    for one in patterns:
        check_sparse(op, "pattern", one)
        check_format(op, one.format)
    return [split_blocks(one) for one in patterns]


def alibi_slopes(heads: int) -> jax.Array:
    """The slopes of ALiBi, float32 [heads]: 2^(-8 / n), 2^(-16 / n), ... for n heads, a power of
    two; for others those of the next lower power n, and every second one of 2 n.

    Source: Press et al. 2022, section 3 and the authors' code.
    """
    # An array of JAX: a score_mod indexes it with a traced head.
    return jnp.asarray(_slopes(check_count(heads, "heads", "alibi_slopes", 1)))


def _slopes(heads: int) -> np.ndarray:
    n = 2 ** int(math.log2(heads))
    own = 2.0 ** (-8 / n * np.arange(1, n + 1))
    between = 2.0 ** (-4 / n * np.arange(1, 2 * (heads - n) + 1, 2))
    return np.concatenate([own, between]).astype(np.float32)


def as_slopes(op: str, alibi: Any, heads: int) -> tuple[float, ...] | None:
    """The slopes of a layer from its argument: a flag, or a number for each head."""
    if alibi is None or alibi is False:
        return None
    slopes = _slopes(heads) if alibi is True else np.asarray(alibi, np.float32)
    if slopes.shape != (heads,):
        raise ValueError(f"{op}: alibi must be a bool or {heads} slopes, got {list(slopes.shape)}")
    return tuple(float(x) for x in slopes)


def has_sinks(op: str, sinks: Any) -> bool:
    """The argument `sinks` of a layer, whose values are a parameter."""
    if not isinstance(sinks, bool | np.bool_):
        raise TypeError(
            f"{op}: sinks: expected True or False, got {sinks!r}; their values are the layer's "
            "parameter `sinks`"
        )
    return bool(sinks)


def rotary_embedding(x: Any, positions: Any, *, base: float = 10000.0) -> jax.Array:
    """Rotates features of queries or keys by angles that grow with their positions:

        (y[f], y[f + D / 2]) = rotation by position / base^(2 f / D) of (x[f], x[f + D / 2])

    so that products of queries and keys depend on the difference of their positions.

    Args:
      x: [..., length, heads, D], D even.
      positions: numbers that broadcast to [..., length].
      base: of the wave lengths.

    Returns:
      An array as x, computed in float32 (float64 for float64).

    Raises:
      ValueError: an odd D.

    Source: RoFormer (Su et al. 2021), section 3.2.2, with the halves of GPT-NeoX and Llama.
    """
    x = jnp.asarray(x)
    if x.ndim < 3 or x.shape[-1] % 2:
        raise ValueError(
            f"rotary_embedding: x must have shape [..., length, heads, an even D], got "
            f"{list(x.shape)}"
        )
    wide, half = accumulator(x.dtype), x.shape[-1] // 2
    rates = jnp.asarray(base ** (-np.arange(half) / max(half, 1)), wide)
    angles = jnp.asarray(positions).astype(wide)[..., None, None]
    angles = angles * rates.reshape(*(1,) * (angles.ndim - 1), half)
    angles = jnp.broadcast_to(angles, (*x.shape[:-2], 1, half))
    a, b = jnp.split(x.astype(wide), 2, axis=-1)
    cos, sin = (jnp.broadcast_to(f(angles), a.shape) for f in (jnp.cos, jnp.sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotated(
    op: str, projected: Any, rotary: bool | float, positions: Any, index: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value with the first two rotated, where a layer has `rotary` embeddings: by
    `positions`, or those from `index` on."""
    query, key, value = projected
    if rotary is False:
        if positions is not None:
            raise ValueError(f"{op}: input_positions: the layer has no rotary embeddings")
        return query, key, value
    base = 10000.0 if rotary is True else float(rotary)
    if positions is None:
        first = 0 if index is None else index
        of_query, of_key = (jnp.arange(x.shape[-3]) + first for x in (query, key))
    else:
        of_query = of_key = jnp.asarray(positions)
        if key.shape[-3] != query.shape[-3]:
            raise ValueError(f"{op}: input_positions: expected as many queries as keys")
    query, key = (
        rotary_embedding(x, at, base=base) for x, at in ((query, of_query), (key, of_key))
    )
    return query, key, value


def attend(
    op: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    patterns: list[SparseArray],
    mask: Any,
    is_causal: bool,
    schedule: Schedule | None,
    *,
    sow: Callable[[Any], None] | None = None,
    bias: Any = None,
    segment_ids: Any = None,
    kv_segment_ids: Any = None,
    **options: Any,
) -> jax.Array:
    """Attention of q [..., L, H, D], k and v [..., S, Hk, D], for any leading axes; `options` are
    those of sparse_attention. `sow` gets the weights of the entries."""
    leading, H = query.shape[:-3], query.shape[-2]
    q, k, v = (x.reshape(math.prod(leading), *x.shape[-3:]) for x in (query, key, value))
    if len(patterns) not in (1, H):
        raise ValueError(f"{op}: pattern: expected one or {H}, got {len(patterns)}")
    for pattern in patterns:
        if pattern.shape != (q.shape[1], k.shape[1]):
            want = [q.shape[1], k.shape[1]]
            raise ValueError(f"{op}: pattern must have shape {want}, got {list(pattern.shape)}")
    shared = len(patterns) == 1
    biases: Any = [None] * len(patterns)
    if bias is not None:
        biases = [bias] if shared else list(bias)
    if mask is not None:
        whole = _whole_mask(op, mask, (*leading, H, q.shape[1], k.shape[1]))
        parts = [whole] if shared or whole.shape[1] == 1 else jnp.split(whole, H, axis=1)
        parts = parts * (len(patterns) // len(parts))
        given, wide = biases, accumulator(q.dtype)
        biases = [_mask_bias(m, p, wide) for m, p in zip(parts, patterns, strict=True)]
        if bias is not None:
            with jax.numpy_rank_promotion("allow"):
                biases = [
                    jnp.asarray(x).astype(wide) + y for x, y in zip(given, biases, strict=True)
                ]
    ids = [("segment_ids", segment_ids), ("kv_segment_ids", kv_segment_ids)]
    options |= {name: _of_sequences(op, name, x, leading) for name, x in ids if x is not None}

    def of(biases: Any) -> Any:
        return sparse_attention(
            *(q, k, v, patterns[0] if shared else patterns),
            bias=biases[0] if shared else None if biases[0] is None else biases,
            is_causal=is_causal,
            schedule=schedule,
            return_lse=True,
            **options,
        )

    if sow is None:
        out, _ = of(biases)
        return out.reshape(*leading, *out.shape[1:])
    # The derivatives of a row's lse in the scores of its entries are their weights.
    heads, wide = (H if shared else 1), accumulator(q.dtype)
    added = [jnp.zeros((q.shape[0], heads, *p.values.shape), wide) for p in patterns]

    def moved(added: list) -> Any:
        with jax.numpy_rank_promotion("allow"):
            pairs = zip(biases, added, strict=True)
            return of([y if x is None else jnp.asarray(x).astype(wide) + y for x, y in pairs])

    (out, lse), pull = jax.vjp(moved, added)
    (weights,) = pull((jnp.zeros_like(out), jnp.ones_like(lse)))
    weights = [x.reshape(*leading, *x.shape[1:]) for x in weights]
    sow(weights[0] if shared else weights)
    return out.reshape(*leading, *out.shape[1:])


def _of_sequences(op: str, name: str, ids: Any, leading: tuple[int, ...]) -> Any:
    """Segments [length], or [..., length] with the leading axes of the inputs, as [B, length]."""
    ids = as_array(ids)
    if ids.ndim > 1:
        if ids.shape[:-1] != leading:
            want = ", ".join(map(str, (*leading, "length")))
            raise ValueError(f"{op}: {name} must have shape [{want}], got {list(ids.shape)}")
        ids = ids.reshape(math.prod(leading), ids.shape[-1])
    return ids


def _whole_mask(op: str, mask: Any, full: tuple[int, ...]) -> jax.Array:
    """A mask that broadcasts to `full` ([..., H, L, S]), as bool [B|1, H|1, L|1, S|1]."""
    mask = as_array(mask)
    _check_no_bias(op, mask)
    mask = jnp.asarray(mask).astype(bool)
    fits = mask.ndim <= len(full) and all(
        got in (1, want) for got, want in zip(mask.shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"{op}: mask must broadcast to {list(full)}, got {list(mask.shape)}")
    mask = mask.reshape((1,) * (len(full) - mask.ndim) + mask.shape)
    leading, last = mask.shape[:-3], mask.shape[-3:]
    if math.prod(leading) > 1:
        mask = jnp.broadcast_to(mask, (*full[:-3], *last))
    return mask.reshape(math.prod(mask.shape[:-3]), *last)


def _check_no_bias(op: str, mask: Any) -> None:
    """ValueError for a mask of numbers other than 0 and 1, as one of 0 and -infinity or -10000 that
    others add to the scores: as bools it would be its own opposite. Flax's masks are floats 0 and
    1, those of tokenizers integers."""
    if mask.dtype == jnp.bool_ or is_traced(mask):
        return
    if isinstance(mask, jax.Array) and not mask.is_fully_addressable:
        return
    values = np.asarray(mask)
    odd = values[(values != 0) & (values != 1)]
    if odd.size:
        raise ValueError(
            f"{op}: mask: expected bools, or numbers 0 and 1, got {odd[0]}; pass bias= for numbers "
            "that are added to the scores"
        )


def _mask_bias(mask: jax.Array, pattern: SparseArray, dtype: Any) -> jax.Array:
    """The mask as a bias [B|1, H|1, *pattern.values.shape]: 0 where it is true at a stored entry,
    -infinity where it is false."""
    places = (
        jnp.where(size > 1, index, jnp.zeros_like(index))
        for size, index in zip(mask.shape[2:], pattern.coordinates(), strict=True)
    )
    rows, columns = places
    # Padding has coordinates past the end: clipped, it gets any value.
    seen = mask.at[:, :, rows, columns].get(mode="clip")
    seen = seen.reshape(*mask.shape[:2], *pattern.values.shape)
    return jnp.where(seen, jnp.zeros((), dtype), -jnp.inf)
