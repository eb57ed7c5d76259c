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
from sgap_jax.nn.attend import attend

# Keys and values [..., S, Hk, D], and the number of positions so far.
Cache = tuple[jax.Array, jax.Array, jax.Array]


def attend_next(
    op: str,
    cache: Cache,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    patterns: list[SparseArray],
    mask: Any,
    is_causal: bool,
    **options: Any,
) -> tuple[jax.Array, Cache]:
    """(out, cache): attention of the next positions, q [..., T, H, D], k and v [..., T, Hk, D],
    over the cache with their keys and values added; and that cache. Errors are raised before the
    caller stores it. `options` are those of `attend`."""
    *cached, index = cache
    if options.get("score_mod") is not None:
        raise NotImplementedError(
            f"{op}: decode: no score_mod, whose positions are those of a whole sequence; the "
            "nearest are softcap, alibi and relative_bias"
        )
    (keys, values), rows = next_positions(
        op, cached, index, query, (key, value), patterns, is_causal
    )
    wide = keys.astype(query.dtype), values.astype(query.dtype)
    if options.get("alibi_slopes") is not None or options.get("relative_bias") is not None:
        options["query_offset"] = jnp.minimum(index, keys.shape[-3] - 1)
    out = attend(op, query, *wide, rows, mask, False, None, **options)
    return out, (keys, values, next_index(index, query.shape[-3]))


def next_index(index: jax.Array, count: int) -> jax.Array:
    """The position after `count` more, or the last one that the dtype has, where it would wrap."""
    return jnp.minimum(index, jnp.iinfo(index.dtype).max - count) + count


def next_positions(
    op: str,
    cached: Sequence[jax.Array],
    index: jax.Array,
    query: jax.Array,
    new: Sequence[jax.Array],
    patterns: Sequence[SparseArray],
    is_causal: bool,
) -> tuple[list[jax.Array], list[SparseArray]]:
    """(caches, rows): the caches [..., S, Hk, D] with keys and values `new` [..., T, Hk, D] written
    from position `index` on, and for each pattern [S, S] the rows [T, S] of the new queries.

    Positions past the end overwrite the last one, as in Flax. Where one call has several of these,
    the last one stays, and the queries of the overwritten ones see no key.
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
    first = jnp.minimum(index, size - 1)
    written = [_written(cache, x, first) for cache, x in zip(cached, new, strict=True)]
    return written, [_rows_seen(op, one, first, count, size, is_causal) for one in patterns]


def _written(cache: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    """The cache with `new` written from position `first` on; if `new` reaches past the end, its
    last element is in the last position."""
    axis = cache.ndim - 3
    size, count = cache.shape[axis], new.shape[axis]
    # The window of `count` positions must end within the cache; its first `past` elements stay.
    begin = jnp.minimum(first, size - count)
    past, place = first - begin, structure.positions(count)
    old = jax.lax.dynamic_slice_in_dim(cache, begin, count, axis)
    source = jnp.where(place < count - 1, place - past, place)
    moved = jnp.take(new.astype(cache.dtype), source, axis, mode="clip")
    window = jnp.where((place < past).reshape(-1, 1, 1), old, moved)
    return jax.lax.dynamic_update_slice_in_dim(cache, window, begin, axis)


def _rows_seen(
    op: str, pattern: SparseArray, first: jax.Array, count: int, keys: int, is_causal: bool
) -> SparseArray:
    """Rows `first` .. `first` + count - 1 of a pattern [S, S], each without keys after its query,
    in CSR. Past the end, the last query has the pattern's last row, and other queries have empty
    ones, so that no row comes twice.

    Without a cache a query would see the keys after it that the pattern stores. So these are an
    error, where the structure is not traced, unless `is_causal` leaves them out there too.
    """
    if pattern.shape != (keys, keys):
        raise ValueError(
            f"{op}: decode: pattern must have shape [{keys}, {keys}] for a cache of {keys} "
            f"positions, got {list(pattern.shape)}"
        )
    offsets, indices = pattern.row_offsets, pattern.column_indices
    if not pattern.is_checked:
        offsets = structure.valid_offsets(offsets, indices.shape[0])
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
    place = structure.positions(count)
    last = place == count - 1
    query = jnp.minimum(first + place, keys - 1)
    begin, end = (offsets[query // length + step] for step in (0, 1))
    widths = jnp.where(last | (query < keys - 1), end - begin, 0)

    def gather(widths: Any) -> tuple[Any, Any, Any, Any]:
        """Offsets, columns and rows of the first `widths` entries of each row, and a mask of those
        that are not padding."""
        ends = jnp.append(jnp.zeros(1, jnp.int32), jnp.cumsum(widths, dtype=jnp.int32))
        place, row = structure.positions(capacity), structure.segment_of_entry(ends, capacity)
        used = place < ends[-1]
        source = jnp.where(used, begin[row] + place - ends[row], 0)
        return ends, jnp.where(used, indices[source], 0), row, used

    # Columns increase within a row, so those up to the query come first.
    _, columns, row, used = gather(widths)
    seen = used & (columns <= query[row])
    ends, columns, _, _ = gather(jnp.zeros(count, jnp.int32).at[row].add(seen.astype(jnp.int32)))
    return ((), (ends, columns)), structure.transpose_structure(ends, columns, keys)
