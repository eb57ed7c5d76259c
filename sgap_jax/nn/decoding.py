"""Decoding: the next positions of a sequence attend over a cache of its keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import is_traced
from sgap_jax.formats.levels import CSR


def next_positions(
    op: str,
    cached: Sequence[jax.Array],
    index: jax.Array,
    query: jax.Array,
    new: Sequence[jax.Array],
    patterns: Sequence[SparseArray],
    is_causal: bool,
) -> tuple[list[jax.Array], list[SparseArray]]:
    """The caches [..., S, Hk, D] with keys and values `new` [..., T, Hk, D] from position `index`
    on, and the rows [T, S] of the patterns [S, S] that their queries see.

    Positions past the end are the last ones, as in Flax.
    """
    size, count = cached[0].shape[-3], query.shape[-3]
    for cache, x in zip(cached, new, strict=True):
        *leading, _, heads, width = cache.shape
        if x.shape != (*leading, count, heads, width) or count > size:
            want = ", ".join(map(str, (*leading, f"up to {size}", heads, width)))
            raise ValueError(
                f"{op}: decode: the cache takes a key and a value for each query, [{want}], got "
                f"{list(x.shape)} for {count} queries; it is made in the shape of a whole sequence"
            )
    first = jnp.clip(index, 0, size - count)
    written = [
        jax.lax.dynamic_update_slice_in_dim(cache, x.astype(cache.dtype), first, cache.ndim - 3)
        for cache, x in zip(cached, new, strict=True)
    ]
    return written, [_rows_seen(op, one, first, count, size, is_causal) for one in patterns]


def _rows_seen(
    op: str, pattern: SparseArray, first: jax.Array, count: int, keys: int, is_causal: bool
) -> SparseArray:
    """Rows `first` .. `first` + count - 1 of a pattern, each up to its query, in CSR.

    What comes after a query would be seen without a cache: where the structure can be looked at
    that is an error, unless `is_causal` leaves it out there too.
    """
    if pattern.shape != (keys, keys):
        raise ValueError(
            f"{op}: decode: pattern must have shape [{keys}, {keys}] for a cache of {keys} "
            f"positions, got {list(pattern.shape)}"
        )
    offsets, indices = pattern.row_offsets, pattern.column_indices
    length, longest = pattern.format.vector_length or 1, keys
    if not is_traced(offsets, indices):
        ends = np.asarray(offsets)
        stored = np.flatnonzero(np.diff(ends))
        last = np.asarray(indices)[ends[stored + 1] - 1]
        if not is_causal and (last > stored * length).any():
            raise ValueError(
                f"{op}: decode: pattern: expected no key after its query, as the cache has none; "
                "is_causal=True leaves such keys out, masks.causal(pattern) does not store them"
            )
        longest = int(np.diff(ends).max(initial=0))
    capacity = min(count * longest, indices.shape[0] * length)
    levels, transposed = _rows(
        offsets, indices, first, count=count, length=length, keys=keys, capacity=capacity
    )
    return SparseArray(jnp.zeros(capacity), levels, transposed, (count, keys), CSR)


@partial(jax.jit, static_argnames=("count", "length", "keys", "capacity"))
def _rows(
    offsets: Any, indices: Any, first: Any, *, count: int, length: int, keys: int, capacity: int
) -> tuple[Any, Any]:
    query = first + structure.positions(count)
    begin, end = (offsets[query // length + step] for step in (0, 1))

    def gather(widths: Any) -> tuple[Any, Any, Any, Any]:
        """Offsets, columns and rows of the first entries of each row, and which are not padding."""
        ends = jnp.append(jnp.zeros(1, jnp.int32), jnp.cumsum(widths, dtype=jnp.int32))
        place, row = structure.positions(capacity), structure.segment_of_entry(ends, capacity)
        used = place < ends[-1]
        source = jnp.where(used, begin[row] + place - ends[row], 0)
        return ends, jnp.where(used, indices[source], 0), row, used

    # Columns rise in a row: what a query sees of it comes first.
    _, columns, row, used = gather(end - begin)
    seen = used & (columns <= query[row])
    ends, columns, _, _ = gather(jnp.zeros(count, jnp.int32).at[row].add(seen.astype(jnp.int32)))
    return ((), (ends, columns)), structure.transpose_structure(ends, columns, keys)
