"""A sparse matrix whose stored groups move: the structure behind `nn.rigl_step`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats import structure
from sgap_jax.primitives._define import accumulator
from sgap_jax.primitives.top_k import bind_top_k

_COLUMNS = 256


def regrow(
    offsets: jax.Array, indices: jax.Array, norms: jax.Array, scores: jax.Array, fraction: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(offsets [m + 1], indices [groups], source [groups]): the structure after a step.

        drop   the round(fraction stored) stored groups of smallest |norm|
        grow   cells of greatest |score| that hold no group that is kept, until `groups` are stored

    source[p] is the position in the old `indices` of the group that position p of the new ones
    keeps, -1 for one that grew and for padding. Of equal ones the first in row-major order are
    kept and grown; NaN is less than every number, and an infinite score the greatest finite one.

    Args:
      offsets, indices: [m + 1] and [groups] int32, with any contents; of groups in one cell the
        first counts.
      norms: [groups]. scores: [m, n]. Floats of any dtype. Neither has a derivative here.
      fraction: float32 [], clamped to 0 .. 1.

    On the CPU a few passes over the scores; the result depends on neither sample nor threads.
    """
    from sgap_jax.runtime import native as native  # registers the FFI targets

    groups, (m, _) = indices.shape[0], scores.shape
    norms, scores = (jax.lax.stop_gradient(structure.whole(x)) for x in (norms, scores))

    def kernel(*operands: Any) -> tuple[Any, ...]:
        int32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        results = int32((m + 1,)), int32((groups,)), int32((groups,))
        call = jax.ffi.ffi_call("sgap_regrow_csr_v1", results, vmap_method="broadcast_all")
        return tuple(structure.varying_like(x, *operands) for x in call(*operands))

    operands = offsets, indices, norms, scores, fraction
    found = jax.lax.platform_dependent(*operands, cpu=kernel, default=regrow_by_ranks)
    return found[0], found[1], found[2]


def regrow_by_ranks(
    offsets: Any, indices: Any, norms: Any, scores: Any, fraction: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`regrow` in plain JAX."""
    (down, across), groups = scores.shape, indices.shape[0]
    cells = down * across
    norms, ranked = (jnp.abs(x.astype(accumulator(x.dtype))) for x in (norms, scores))
    place, entry = _places(offsets, indices, down, across)
    stored = place < cells
    count = jnp.sum(stored, dtype=jnp.int32)
    kept = _greatest(norms[entry], stored, count - _dropped(fraction, count))
    ranked = jnp.minimum(ranked, jnp.finfo(ranked.dtype).max).reshape(-1)
    infinity = jnp.asarray(jnp.inf, ranked.dtype)
    ranked = ranked.at[jnp.where(kept, place, cells)].set(infinity, mode="drop")
    # What is kept comes first, and as many of the others as there is room for; all ascending.
    used = min(groups, cells)
    all_columns = jnp.full((1, 1), cells, jnp.int32)
    values, _, flat = bind_top_k(ranked[None, None], all_columns, used, None)
    old, flat = (jnp.pad(x[0], (0, groups - used)) for x in (values, flat))
    row, column = jnp.divmod(flat, max(across, 1))
    new_offsets = structure.offsets_of_indices(row, down, jnp.asarray(used, jnp.int32))
    # The kept groups are in the same order before and after.
    at = jnp.where(kept, _rank(kept), groups)
    before = jnp.zeros(groups, jnp.int32).at[at].set(entry, mode="drop")
    known = old == infinity
    source = before[jnp.where(known, _rank(known), 0)] if groups else before
    return new_offsets, column, jnp.where(known, source, -1)


def _places(offsets: Any, indices: Any, down: int, across: int) -> tuple[jax.Array, jax.Array]:
    """(place, entry): the cell of each stored group in the grid, in row-major order, and the
    group's position. Padding, groups that take no part and second ones in a cell come with the
    place down * across."""
    offsets, indices = structure.well_formed(offsets, indices, across)
    groups, none = indices.shape[0], down * across

    def placed(offsets: jax.Array, indices: jax.Array) -> jax.Array:
        row = structure.segment_of_entry(offsets, groups)
        stored = (structure.positions(groups) < offsets[-1]) & (indices >= 0)
        return jnp.where(stored, row * across + indices, none)

    def in_order(place: jax.Array) -> tuple[jax.Array, jax.Array]:
        return place, structure.varying_like(structure.positions(groups), place)

    def sorted_(_: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Unchecked columns may be in any order; two stable counting sorts bring them into that of
        # rows.
        columns, rows, first = structure.transpose_structure(offsets, indices, across)
        ends, again, second = structure.transpose_structure(columns, rows, down)
        place = placed(ends, again)
        twice = jnp.append(jnp.zeros(1, bool), place[1:] == place[:-1])[:groups]
        return jnp.where(twice, none, place), first[second]

    place = placed(offsets, indices)
    rises = (place[1:] > place[:-1]) | (place[:-1] == none) & (place[1:] == none)
    return jax.lax.cond(jnp.all(rises), in_order, sorted_, place)


def _rank(mask: jax.Array) -> jax.Array:
    return jnp.cumsum(mask, dtype=jnp.int32) - 1


def _dropped(fraction: Any, count: jax.Array) -> jax.Array:
    """How many groups a fraction of `count` are."""
    share = jnp.clip(fraction, 0, 1)
    dropped = jnp.round(share * count.astype(jnp.float32)).astype(jnp.int32)
    return jnp.clip(dropped, 0, count)


def _greatest(norms: jax.Array, among: jax.Array, count: jax.Array) -> jax.Array:
    """Which are the `count` greatest of the norms in `among`, of equal ones the first."""
    integer = jnp.dtype(jnp.int32 if norms.dtype == jnp.float32 else jnp.int64)
    # Bits of numbers that are not negative are in their order. One: of NaN; zero: of the others.
    keys = jax.lax.bitcast_convert_type(norms, integer) + jnp.asarray(2, integer)
    keys = jnp.where(jnp.isnan(norms), jnp.ones((), integer), keys)
    keys = jnp.where(among, keys, jnp.zeros((), integer))
    # XLA sums columns in vectors, and a long row number by number.
    lines = jnp.pad(keys, (0, -keys.size % _COLUMNS)).reshape(-1, _COLUMNS)

    def reach(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sum(lines >= threshold, axis=0, dtype=jnp.int32), dtype=jnp.int32)

    Ends = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def narrow(step: int, ends: Ends) -> Ends:
        """At least `count` keys reach `low`, and fewer than that exceed `high`."""
        low, high, from_low, above_high = ends
        if step == 0:
            middle = low + (high - low + 1) // 2
        else:  # on a straight line between the counts
            numbers = from_low - count, from_low - above_high, high - low
            too_many, between, span = (x.astype(norms.dtype) for x in numbers)
            middle = jnp.clip(low + (too_many / between * span).astype(integer), low + 1, high)
        found = reach(middle)
        enough = found >= count
        # Where just `count` keys reach it, it is the threshold.
        low, high = jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)
        high = jnp.where(found == count, low, high)
        return low, high, jnp.where(enough, found, from_low), jnp.where(enough, above_high, found)

    def narrow_twice(ends: Ends) -> Ends:
        ends = narrow(0, ends)
        return jax.lax.cond(ends[0] < ends[1], partial(narrow, 1), lambda ends: ends, ends)

    one = structure.varying_like(jnp.ones((), integer), keys)
    none = structure.varying_like(jnp.zeros((), jnp.int32), keys)
    ends = one, jnp.maximum(jnp.max(keys, initial=0), one), reach(one), none
    threshold = jax.lax.while_loop(lambda ends: ends[0] < ends[1], narrow_twice, ends)[0]
    above, equal = keys > threshold, keys == threshold
    left = count - jnp.sum(above, dtype=jnp.int32)
    ties = jnp.sum(equal, dtype=jnp.int32) > left
    first = jax.lax.cond(ties, lambda x: x & (_rank(x) < left), lambda x: x, equal)
    return above | first
