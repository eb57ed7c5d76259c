"""Checks the arguments of sparse_attention and brings them to the shapes of its primitive."""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import (
    INT32_MAX,
    as_array,
    check_callable,
    check_concrete,
    check_flag,
    saturated,
)
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.formats.structure import positions
from sgap_jax.primitives._define import accumulator
from sgap_jax.primitives.attention_unfused import absent, mixed, no_array, scattered
from sgap_jax.schedules import Problem, Schedule


class AttentionOptions(TypedDict, total=False):
    """The arguments of `sparse_attention` that are given by name, but `return_lse`."""

    scale: Any
    bias: Any
    sinks: Any
    is_causal: bool
    key_value_seq_lengths: Any
    softcap: float | None
    alibi_slopes: Any
    relative_bias: Any
    segment_ids: Any
    kv_segment_ids: Any
    query_offset: Any
    dropout_rate: float
    dropout_rng: Any
    broadcast_dropout: bool
    score_mod: Callable | None
    schedule: Schedule | str | None


def check_heads(
    op: str, q: Any, k: Any, v: Any, patterns: Sequence[SparseArray]
) -> tuple[Any, Any, Any, bool]:
    """(q, k, v, batched): the arrays with a batch axis and in their promoted dtype, and whether the
    caller's had that axis."""
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    if q.ndim not in (3, 4):
        raise ValueError(f"{op}: q must have shape [B, L, H, D] or [L, H, D], got {list(q.shape)}")
    if any(export.is_symbolic_dim(size) for x in (q, k, v) for size in x.shape[-2:]):
        raise NotImplementedError(
            f"{op}: heads and features have the program's sizes, got q {list(q.shape)}, "
            f"k {list(k.shape)} and v {list(v.shape)}; export with concrete ones"
        )
    batched, B = q.ndim == 4, q.shape[:-3]
    *_, L, H, D = q.shape
    for name, x in (("k", k), ("v", v)):
        last = D if name == "k" else x.shape[-1] if x.ndim else 0
        heads = k.shape[-2] if k.ndim > 2 else "Hk"
        S = k.shape[-3] if k.ndim > 2 else "S"
        if x.ndim != q.ndim or x.shape != (*B, S, heads, last):
            want = ", ".join(map(str, (*B, S, heads, D if name == "k" else "Dv")))
            raise ValueError(f"{op}: {name} must have shape [{want}], got {list(x.shape)}")
    S, Hk = k.shape[-3:-1]
    if H == 0 or Hk == 0 or H % Hk:
        raise ValueError(
            f"{op}: the heads of k and v must divide those of q, got {Hk} for {H} of q"
        )
    if len(patterns) not in (1, H):
        raise ValueError(
            f"{op}: pattern: expected one, or one for each of {H} heads, got {len(patterns)}"
        )
    for pattern in patterns:
        if pattern.shape != (L, S):
            swapped = pattern.shape == (H, Hk)
            hint = "; q, k and v are [B, L, H, D]: jnp.swapaxes(q, -2, -3) of heads first" * swapped
            got = list(pattern.shape)
            raise ValueError(f"{op}: pattern must have shape [{L}, {S}], got {got}{hint}")
    dtype = jnp.result_type(q, k, v)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{op}: q, k and v must be floating point numbers, got {dtype}")
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return (q, k, v, True) if batched else (q[None], k[None], v[None], False)


def leading_axes(A: SparseArray) -> tuple[int, ...]:
    """The axes of A's values before those of one array; () for one array."""
    return tuple(A.values.shape[: -1 - len(A.format.stored_shape(A.shape))])


def by_structures(
    op: str, pattern: SparseArray, batch: int, heads: int, key_heads: int
) -> tuple[SparseArray, int]:
    """A pattern with leading axes [H] or [B, H] as one with [B H], whose structures are those of
    all sequences, or without leading axes where all share it; and its H: of q's heads, of k's
    heads, or 1."""
    lead = leading_axes(pattern)
    arrays = jax.tree.leaves((pattern.index_arrays, pattern.transposed))
    fits = len(lead) <= 2 and lead[-1] in (1, key_heads, heads)
    fits = fits and (len(lead) == 1 or lead[0] in (1, batch))
    if not fits or any(x.shape[:-1] != lead for x in arrays):
        found = sorted({str(list(x.shape[:-1])) for x in arrays} | {str(list(lead))})
        raise ValueError(
            f"{op}: pattern: its arrays must have leading axes [H] or [B, H] with B in "
            f"{sorted({1, batch})} and H in {sorted({1, key_heads, heads})}, got {', '.join(found)}"
        )
    if math.prod(lead) == 1:
        return jax.tree.map(lambda x: x.reshape(x.shape[len(lead) :]), pattern), 1

    def joined(x: Any) -> Any:
        own = x.shape[len(lead) :]
        every = jnp.broadcast_to(x, (batch, lead[-1], *own))
        return every.reshape(batch * lead[-1], *own)

    return jax.tree.map(joined, pattern), lead[-1]


def as_bias(op: str, bias: Any, stored: tuple[int, ...], q: Any) -> jax.Array:
    """The bias [B|1, H|1, *stored] of values of shape `stored` in the accumulator's dtype; for None
    `no_array`."""
    wide = accumulator(q.dtype)
    if bias is None:
        return no_array(wide)
    bias = jnp.asarray(bias)
    B, _, H, _ = q.shape
    lead = bias.shape[: bias.ndim - len(stored)] if bias.ndim >= len(stored) else None
    fits = (
        lead is not None
        and bias.shape[len(lead) :] == stored
        and len(lead) <= 2
        and all(got in (1, want) for got, want in zip(reversed(lead), (H, B), strict=False))
    )
    if not fits or not jnp.issubdtype(bias.dtype, jnp.floating):
        values = ", ".join(map(str, stored))
        L = q.shape[1]
        dense = bias.ndim >= 2 and bias.shape[-2] == L
        advice = "; of a dense one, bias[..., *pattern.coordinates()] is that of the entries"
        if len(stored) > 1:
            advice += ", in this shape by .reshape(*bias.shape[:-2], *pattern.values.shape)"
        raise ValueError(
            f"{op}: bias must be floats of shape [{values}], [{H}, {values}] or "
            f"[{B}, {H}, {values}], got {list(bias.shape)} of {bias.dtype}{advice if dense else ''}"
        )
    assert lead is not None
    return bias.reshape(*(1,) * (2 - len(lead)), *bias.shape).astype(wide)


def as_sinks(op: str, sinks: Any, heads: int, dtype: Any) -> jax.Array:
    if sinks is None:
        return no_array(dtype)
    sinks = jnp.asarray(sinks)
    if sinks.shape != (heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"{op}: sinks must be floats of shape [{heads}], got {list(sinks.shape)} of "
            f"{sinks.dtype}"
        )
    return sinks[None].astype(dtype)


def as_lengths(op: str, lengths: Any, batch: int) -> jax.Array:
    """The lengths [B|1, 1] int32; `no_array` for None."""
    if lengths is None:
        return no_array(jnp.int32)
    lengths = as_array(lengths)
    integers = jnp.issubdtype(lengths.dtype, jnp.integer)
    if lengths.shape not in ((), (1,), (batch,)) or not integers:
        raise ValueError(
            f"{op}: key_value_seq_lengths must be integers of shape [{batch}], got "
            f"{list(lengths.shape)} of {lengths.dtype}"
        )
    # A negative length means no keys; kernels may compare it as an unsigned number.
    return jnp.maximum(saturated(lengths).reshape(-1, 1), 0)


def as_softcap(op: str, softcap: Any) -> float:
    """The cap as a number; 0 for None."""
    if softcap is None:
        return 0.0
    check_concrete(softcap, "softcap", op, "a soft cap is static: make it outside jit")
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    number = not isinstance(softcap, str) and np.ndim(softcap) == 0
    if not number or not least <= float(softcap) <= most:
        raise ValueError(f"{op}: softcap must be a positive number of float32, got {softcap!r}")
    return float(softcap)


def as_terms(
    op: str,
    q: Any,
    k: Any,
    *,
    alibi_slopes: Any,
    relative_bias: Any,
    segment_ids: Any,
    kv_segment_ids: Any,
    query_offset: Any,
    dropout_rate: float,
    dropout_rng: Any,
    broadcast_dropout: Any,
) -> dict[str, jax.Array]:
    """The operands of `attention_unfused.TERMS`, by name."""
    (B, L, H, _), S, wide = q.shape, k.shape[1], accumulator(q.dtype)
    found = {name: no_array(wide) for name in ("slopes", "table")}
    found |= {name: no_array(jnp.int32) for name in ("query_segments", "key_segments", "offset")}
    found["seeds"] = no_array(jnp.uint32)
    if alibi_slopes is not None:
        slopes = jnp.asarray(alibi_slopes)
        if slopes.shape != (H,) or not jnp.issubdtype(slopes.dtype, jnp.floating):
            got = f"{list(slopes.shape)} of {slopes.dtype}"
            raise ValueError(f"{op}: alibi_slopes must be floats of shape [{H}], got {got}")
        found["slopes"] = slopes.astype(wide).reshape(1, H, 1)
    if relative_bias is not None:
        table = jnp.asarray(relative_bias)
        fits = table.ndim in (1, 2) and table.shape[:-1] in ((), (1,), (H,)) and table.shape[-1] > 0
        if not fits or not jnp.issubdtype(table.dtype, jnp.floating):
            got = f"{list(table.shape)} of {table.dtype}"
            turned = table.ndim == 2 and table.shape[1] == H
            advice = "; relative_bias.T has a row for each head" if turned else ""
            raise ValueError(
                f"{op}: relative_bias must be floats of shape [R] or [{H}, R], got {got}{advice}"
            )
        found["table"] = jnp.broadcast_to(table.astype(wide), (1, H, table.shape[-1]))
    if segment_ids is not None:
        keys = segment_ids if kv_segment_ids is None else kv_segment_ids
        found["query_segments"] = _segments(op, "segment_ids", segment_ids, B, L, -1)
        name = "segment_ids of the keys" if kv_segment_ids is None else "kv_segment_ids"
        found["key_segments"] = _segments(op, name, keys, B, S, -2)
    elif kv_segment_ids is not None:
        raise ValueError(f"{op}: segment_ids: expected with kv_segment_ids, got None")
    if query_offset is not None:
        offset = as_array(query_offset)
        if offset.shape not in ((), (1,), (B,)) or not jnp.issubdtype(offset.dtype, jnp.integer):
            got = f"{list(offset.shape)} of {offset.dtype}"
            raise ValueError(f"{op}: query_offset must be integers of shape [{B}], got {got}")
        # Distances then fit in int32.
        clip: Any = jnp.clip if isinstance(offset, jax.Array) else np.clip
        least = 0 if jnp.issubdtype(offset.dtype, jnp.unsignedinteger) else -(2**30)
        offset = clip(_widened(offset), least, 2**30)
        found["offset"] = jnp.asarray(offset, jnp.int32).reshape(-1, 1)
    if dropout_rate > 0:
        if dropout_rng is None:
            raise ValueError(f"{op}: dropout_rng: expected with a dropout_rate of {dropout_rate}")
        shape = (1, 1) if check_flag(broadcast_dropout, "broadcast_dropout", op) else (B, H)
        found["seeds"] = _seeds(op, dropout_rng, shape, H)
    return found


def as_dropout_rate(op: str, rate: Any) -> float:
    check_concrete(rate, "dropout_rate", op, "the rate is static: make it outside jit")
    scalar = rate.ndim == 0 and jnp.isrealobj(rate) if hasattr(rate, "ndim") else None
    number = isinstance(rate, numbers.Real) if scalar is None else scalar
    if not number or not 0 <= float(rate) <= 1:
        kind = "" if number else "a number "
        raise ValueError(f"{op}: dropout_rate must be {kind}in [0, 1], got {rate!r}")
    return float(rate)


def _widened(x: Any) -> Any:
    """Integers of at least 32 bits."""
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x


def _segments(op: str, name: str, ids: Any, batch: int, size: int, nothing: int) -> jax.Array:
    """Segments [B|1, size] int32; `nothing`, which is no segment, for those that see nothing."""
    ids = as_array(ids)
    shapes = ((size,), (1, size), (batch, size))
    if ids.shape not in shapes or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"{op}: {name} must be integers of shape [{batch}, {size}] or [{size}], got "
            f"{list(ids.shape)} of {ids.dtype}"
        )
    ids = _widened(ids)
    inside = (ids >= 0) & (ids <= INT32_MAX)
    segments = jnp.where(inside, ids, nothing).astype(jnp.int32)
    return segments if ids.ndim == 2 else segments[None]


def _seeds(op: str, rng: Any, shape: tuple[int, int], heads: int) -> jax.Array:
    """Two numbers for each sequence and head, [B|1, heads, 2] uint32."""
    integer = isinstance(rng, int) and not isinstance(rng, bool)
    if hasattr(rng, "dtype"):
        integer = jnp.issubdtype(rng.dtype, jnp.integer) and rng.ndim == 0
    if integer:
        rng = jax.random.key(rng)
    base = jax.random.bits(_key(op, rng), (2,), jnp.uint32)
    place = jax.lax.iota(jnp.uint32, shape[0])[:, None] * jnp.uint32(heads)
    place = place + jax.lax.iota(jnp.uint32, shape[1])[None]
    both = [mixed(scattered(place, base[i]), jnp.uint32(i)) for i in range(2)]
    return jnp.broadcast_to(jnp.stack(both, -1), (shape[0], heads, 2))


def _key(op: str, rng: Any) -> Any:
    """One PRNG key, new-style or raw."""
    expected = f"{op}: dropout_rng: expected a PRNG key or an integer, got"
    if not hasattr(rng, "dtype"):
        call = "; a stream of nnx gives a key where it is called" if callable(rng) else ""
        raise ValueError(f"{expected} a {type(rng).__name__}{call}")
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        if rng.ndim:
            raise ValueError(f"{expected} keys of shape {list(rng.shape)}")
    elif rng.dtype != jnp.uint32 or rng.shape != jax.eval_shape(jax.random.PRNGKey, 0).shape:
        raise ValueError(f"{expected} an array {list(rng.shape)} of {rng.dtype}")
    return rng


def check_score_mod(op: str, score_mod: Any) -> None:
    what = f"{op}: score_mod: expected a function (score, b, h, i, j)"
    check_callable(score_mod, "sbhij", what, "; a mask_mod is for masks.from_function")


def of_head(terms: dict[str, jax.Array], head: int) -> dict[str, jax.Array]:
    """The operands of one head, from those of `as_terms`."""
    own = ("slopes", "table", "seeds")
    return {
        name: x[:, head : head + 1] if name in own and not absent(x) else x
        for name, x in terms.items()
    }


def of_entries(score_mod: Callable, first: int) -> Callable:
    """`score_mod` of scalars as a function of scores [B, H, ...], rows and columns [...] of the
    entries, of the heads from `first` on."""

    def modified(s: Any, rows: Any, columns: Any) -> Any:
        b, h = positions(s.shape[0]), positions(s.shape[1]) + first
        of_entries = jax.vmap(score_mod, (0, None, None, 0, 0))
        of_heads = jax.vmap(of_entries, (0, None, 0, None, None))
        of_all = jax.vmap(of_heads, (0, 0, None, None, None))
        flat = s.reshape(*s.shape[:2], rows.size)  # -1 fails if the batch is 0
        found = of_all(flat, b, h, rows.reshape(-1), columns.reshape(-1))
        if not hasattr(found, "dtype"):
            got = f"a {type(found).__name__}"
        elif found.shape != flat.shape or not jnp.issubdtype(found.dtype, jnp.floating):
            got = f"{list(found.shape[len(flat.shape) :])} of {found.dtype}"
        else:
            return found.reshape(s.shape)
        what = "sparse_attention: score_mod"
        raise ValueError(f"{what}: expected a floating point scalar for each score, got {got}")

    return modified


def attention_problem(
    q: Any, indices: Any, batch: int, shape: tuple[int, int], length: int | None, platform: str
) -> Problem:
    """The `Problem` by which a lowering chooses a schedule, from the avals of q and of the column
    indices."""
    return Problem(
        "attention",
        shape,
        nnz=indices.shape[-1] * (length or 1),
        n=q.shape[3],
        batch=batch * q.shape[2],
        dtype=q.dtype.name,
        format=CSR if length is None else CVS(length),
        platform=platform,
    )
