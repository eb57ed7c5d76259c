"""The work list of kernels that cut long rows into pieces: which entries of which row each group of
lanes computes. Plain JAX, inside of a program too: no search and no sort."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.structure import positions, segment_of_entry, unfolded
from sgap_jax.launch.row_pieces import FIELDS, WorkList
from sgap_jax.primitives._batch import structures_of_lowering
from sgap_jax.primitives._define import jax_lowering
from sgap_jax.primitives._kept_lists import kept_list

# What is left of rows starts in four groups, the longest first: of half a chunk and more, of an
# eighth, of a thirty-second, and less (tests/emulated/test_critical_path.py has what it is for).
_GROUPS = (2, 8, 32)


def work_list(work: WorkList, offsets: Any, group: int = 1) -> jax.Array:
    """int32 [whole + rows + merged, 4], each (row, first, last, place): the chunks that are full,
    in the order of the entries; what is left of each row, which is all of most rows; and for each
    row of several pieces the first and last place of its sums. The place of a piece that is all of
    its row is -1. Elements without work have the row `work.rows`.

    Full chunks come first so that groups of one warp have pieces of one length, and the longest
    start first; what is left of rows is in four groups by its length, the longest first, for the
    same reasons, each in the order of the rows, so that neighbours stay neighbours.

    Args:
      work: the sizes.
      offsets: [rows + 1], non-decreasing, from 0 to at most `work.capacity`; made so if they are
        not, since the kernels trust the list.
      group: the rows of the list are sets of so many rows of the offsets, the last may have fewer;
        their entries are counted from 0 on, as many as the longest row of the set has.
    """
    offsets = jax.lax.cummax(jnp.clip(unfolded(offsets), 0, work.capacity))
    rows = positions(work.rows)
    starts, lengths = offsets[:-1], jnp.diff(offsets)
    if group > 1:
        each = jnp.pad(lengths, (0, work.rows * group - lengths.shape[0]))
        lengths = each.reshape(work.rows, group).max(axis=1)
        starts = jnp.zeros_like(lengths)
    chunk = _chunk(work, lengths)
    counts = lengths // chunk  # full chunks
    rest = starts + counts * chunk
    ends = starts + lengths
    left = ends - rest
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    parts = counts + (left > 0).astype(jnp.int32)
    several = parts > 1
    places = 2 * before[:-1]

    at = positions(work.whole)
    row = segment_of_entry(before, work.whole)
    nth = at - before[row]
    first, place = starts[row] + nth * chunk, jnp.where(several[row], places[row] + nth, -1)
    full = _elements(work, at < before[-1], row, first, first + chunk, place)

    own = (left > 0) | (counts == 0)  # an empty row has an empty piece
    tails = _elements(work, own, rows, rest, ends, jnp.where(several, places + counts, -1))
    of = sum((part * left < chunk).astype(jnp.int32) for part in _GROUPS)
    groups = jnp.arange(len(_GROUPS), dtype=jnp.int32)
    until = jnp.cumsum(of[None] == groups[:, None], axis=1, dtype=jnp.int32)
    begin = jnp.pad(jnp.cumsum(until[:, -1], dtype=jnp.int32), (1, 0))
    # Before a row of the last group are all of the others, and rows that are in none of these.
    last = begin[-1] + rows - jnp.sum(until, axis=0, dtype=jnp.int32)
    target = jnp.where(of < len(_GROUPS), begin[of] + until[of, rows] - 1, last)
    tails = jnp.zeros_like(tails).at[target].set(tails, unique_indices=True, mode="drop")

    merged = jnp.broadcast_to(_elements(work, False, 0, 0, 0, 0), (work.merged, FIELDS))
    target = jnp.where(several, jnp.cumsum(several, dtype=jnp.int32) - 1, work.merged)
    of_rows = _elements(work, several, rows, places, places + parts, -1)
    return jnp.concatenate([full, tails, merged.at[target].set(of_rows, mode="drop")])


def _chunk(work: WorkList, lengths: Any) -> Any:
    """The entries of a piece, for rows of these lengths: the fewest of `work.chunks` that exceed
    the mean length by a quarter, so that most rows are one piece, and that make no more full chunks
    than `work.whole`."""
    if len(work.chunks) == 1:
        return work.chunk
    mean, found = jnp.sum(lengths) // max(work.rows, 1), jnp.int32(work.chunk)
    for chunk in work.chunks[1:]:  # in descending order
        fits = (jnp.sum(lengths // chunk) <= work.whole) & (chunk >= mean + mean // 4)
        found = jnp.where(fits, jnp.int32(chunk), found)
    return found


def _elements(work: WorkList, exist: Any, *fields: Any) -> jax.Array:
    """The elements of these fields, or those without work."""
    nothing = (work.rows, 0, 0, -1)
    pairs = zip(fields, nothing, strict=True)
    return jnp.stack([jnp.where(exist, x, none).astype(jnp.int32) for x, none in pairs], axis=-1)


def lowered_work_list(
    ctx: Any, work: WorkList, offsets: Any, aval: Any, group: int = 1
) -> tuple[Any, Any]:
    """The work list as a lowered value, and its aval: the one that the structure keeps, or one that
    the program makes; `offsets` is lowered already. For several
    structures the value has the lists of all, which follow each other, as `launch_lowering` wants
    them."""
    count = structures_of_lowering()

    def every(offsets: Any) -> Any:
        each = offsets.reshape(count, -1)
        return jax.vmap(partial(work_list, work, group=group))(each).reshape(-1, FIELDS)

    made = aval.update(shape=(work.elements, FIELDS))
    if (found := kept_list(work, offsets, group)) is not None:
        flat = aval.update(shape=(count * FIELDS * work.elements,))
        (value,) = jax_lowering(ctx, lambda x: x.reshape(-1, FIELDS), [found], [flat])
        return value, made
    given = aval.update(shape=(count * aval.shape[0],))
    (value,) = jax_lowering(ctx, every, [offsets], [given])
    return value, made
