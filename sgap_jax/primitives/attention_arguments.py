"""Checks the arguments of sparse_attention and brings them to the shapes of its primitive."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import as_array, saturated
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.primitives._define import accumulator
from sgap_jax.primitives.attention_unfused import no_array
from sgap_jax.schedules import Problem


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
            raise ValueError(f"{op}: pattern must have shape [{L}, {S}], got {list(pattern.shape)}")
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
        raise ValueError(
            f"{op}: bias must be floats of shape [{values}], [{H}, {values}] or "
            f"[{B}, {H}, {values}], got {list(bias.shape)} of {bias.dtype}"
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
