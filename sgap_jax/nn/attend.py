"""Attention of projected inputs, for the attention layers of nnx and linen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.vectors import split_blocks
from sgap_jax.nn.structure import check_format
from sgap_jax.primitives import attention_unfused as unfused
from sgap_jax.primitives._define import accumulator, check_sparse, structure
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


def weight_dropout(key: Any, rate: float, broadcast: bool) -> Callable[[jax.Array, int], jax.Array]:
    """A function drop(weights [batch, heads, ...], index of the first of these heads); with
    `broadcast` all sequences and heads of a call have the same mask."""

    def drop(weights: jax.Array, head: int) -> jax.Array:
        shape = (1, 1, *weights.shape[2:]) if broadcast else weights.shape
        kept = jax.random.bernoulli(jax.random.fold_in(key, head), 1 - rate, shape)
        kept = jnp.broadcast_to(kept, weights.shape)
        return jnp.where(kept, weights / (1 - rate), jnp.zeros_like(weights))

    return drop


def attend(
    op: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    patterns: list[SparseArray],
    mask: Any,
    is_causal: bool,
    drop: Callable[[jax.Array, int], jax.Array] | None,
    schedule: Schedule | None,
) -> jax.Array:
    """Attention of q [..., L, H, D], k and v [..., S, Hk, D], for any leading axes."""
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
    if mask is not None:
        whole = _whole_mask(op, mask, (*leading, H, q.shape[1], k.shape[1]))
        parts = [whole] if shared or whole.shape[1] == 1 else jnp.split(whole, H, axis=1)
        parts = parts * (len(patterns) // len(parts))
        biases = [_mask_bias(m, p, q.dtype) for m, p in zip(parts, patterns, strict=True)]
    if drop is not None:
        step = H // len(patterns)
        k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
        of = []
        for h, pattern, bias in zip(range(0, H, step), patterns, biases, strict=True):
            own = [x[:, :, h : h + step] for x in (q, k, v)]
            of.append(_in_steps(own, pattern, bias, is_causal, drop, h))
        out = jnp.concatenate(of, axis=2)
    else:
        out = sparse_attention(
            *(q, k, v, patterns[0] if shared else patterns),
            bias=biases[0] if shared else None if mask is None else biases,
            is_causal=is_causal,
            schedule=schedule,
        )
    return out.reshape(*leading, *out.shape[1:])


def _whole_mask(op: str, mask: Any, full: tuple[int, ...]) -> jax.Array:
    """A mask that broadcasts to `full` ([..., H, L, S]), as bool [B|1, H|1, L|1, S|1]."""
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


def _in_steps(
    operands: Sequence[jax.Array],
    pattern: SparseArray,
    bias: jax.Array | None,
    is_causal: bool,
    drop: Callable[[jax.Array, int], jax.Array],
    head: int,
) -> jax.Array:
    """Unfused attention, with dropout of the weights."""
    q, k, v = operands
    none, wide = unfused.no_array, accumulator(q.dtype)
    bias = none(wide) if bias is None else bias.astype(wide)
    out, _ = unfused.forward(
        *(q, k, v, bias, none(wide), none(jnp.int32), *structure(pattern)),
        shape=pattern.shape,
        vector_length=pattern.format.vector_length,
        checked=pattern.is_checked,
        scale=1 / math.sqrt(max(q.shape[3], 1)),
        is_causal=is_causal,
        schedule=None,
        weigh=lambda p: drop(p, head),
    )
    return out
