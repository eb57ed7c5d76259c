"""Which rows name so many columns that attention sends their queries instead of the keys, as those
of global tokens do. NumPy, one part at a time.

The query of a global row goes to all parts, by an all-reduce to which its owner alone adds
something; each part attends with the keys that are its own, and the results are merged by their
log-sum-exp. So no part receives all keys, and the work of such a row is shared. A bias, one number
for each entry, travels from the part that has the row to those that own the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from sgap_jax.parallel.exchange import Exchange
from sgap_jax.parallel.global_columns import to_all
from sgap_jax.parallel.plan import (
    NONE,
    Compressed,
    Padded,
    Piece,
    Sizes,
    compressed,
    enlarged,
    padded,
    piece,
    rows_of,
    sent_rows,
)

# A row may be global if it names at least one of these shares of the columns of other parts.
_SHARES = (0.75, 0.5, 0.25)
BEYOND = np.iinfo(np.int32).max  # the place of padding, which has no bias, and its name


class GlobalPlan(NamedTuple):
    """What all parts must agree on, in rows and columns of the grid of vectors or blocks.

    Attributes:
      rows: the global rows, ascending.
      keys, to_each: what the other rows need, and the columns of it that go to all.
      sizes: of the other rows.
      queries: of the global rows, which go to all.
      counts: [parts, parts] entries that the global rows of part p (first) have in columns of q.
      biases: of those entries, from p to q.
    """

    rows: np.ndarray
    keys: Exchange
    to_each: np.ndarray
    sizes: Sizes
    queries: Exchange
    counts: np.ndarray
    biases: Exchange


def global_rows(
    pieces: Mapping[int, Piece],
    exchange: Exchange,
    row_bounds: np.ndarray,
    column_bounds: np.ndarray,
    tile: tuple[int, int],
    told: Callable[[Exchange, Mapping[int, np.ndarray]], Mapping[int, np.ndarray]],
    from_all: Callable[[Mapping[int, np.ndarray], int], np.ndarray],
) -> GlobalPlan | None:
    """The plan, None where keys alone send no more; decided as `to_all` does, by the rows that the
    device sends that sends most, then by those of the buffers: a key and its value are two rows,
    and so are a query and its result.

    Args:
      pieces: the parts of this process; `exchange`, what their keys send.
      told, from_all: as of `to_all`.
    """
    parts, (high, wide) = exchange.parts, tile
    if exchange.sent == 0:
        return None
    named: dict[int, list[np.ndarray]] = {}
    for p, x in pieces.items():
        of_others = np.bincount(_row_of_entry(x)[~x.near], minlength=x.rows)
        others = column_bounds[-1] - (column_bounds[p + 1] - column_bounds[p])
        named[p] = [np.flatnonzero(of_others >= max(share * others, 1)) for share in _SHARES]
    how_many = from_all({p: np.array([len(x) for x in each]) for p, each in named.items()}, parts)
    least, best = (exchange.sent, exchange.received), None
    for i, of_parts in enumerate(how_many.T):
        queries = Exchange.of(np.zeros((parts, parts)), high, of_parts.tolist())
        if not of_parts.any() or (i and (of_parts == how_many[:, i - 1]).all()):
            continue
        if queries.sent >= least[0]:
            break
        rest = {p: _without(x, named[p][i], column_bounds)[0] for p, x in pieces.items()}
        known = from_all({p: x.counts(column_bounds) for p, x in rest.items()}, parts)
        keys, to_each = to_all(rest, known[:, 4:], column_bounds, wide, told, from_all)
        found = keys.sent + queries.sent, keys.received + queries.received
        if found < least:
            least, best = found, (i, keys, to_each, Sizes.of(known, column_bounds, tile), queries)
    if best is None:
        return None
    i, keys, to_each, sizes, queries = best
    filled = {p: np.full(int(how_many[:, i].max()), -1) for p in pieces}
    of_owners = {}
    for p, x in pieces.items():
        rows = named[p][i]
        filled[p][: len(rows)] = rows + row_bounds[p]
        columns = x.matrix.indices[np.isin(_row_of_entry(x), rows)]
        owner = np.searchsorted(column_bounds, columns, side="right") - 1
        of_owners[p] = np.bincount(owner, minlength=parts)
    rows = from_all(filled, parts)
    counts = from_all(of_owners, parts)
    biases = Exchange.of(counts.T * (1 - np.eye(parts, dtype=np.int64)))
    return GlobalPlan(rows[rows >= 0], keys, to_each, sizes, queries, counts, biases)


class PaddedGlobal(NamedTuple):
    """The arrays of one part, padded.

    Attributes:
      other: those of the other rows; the values of `merged` are places of the whole part.
      own: [3, entries] of its global rows in its own columns: which global row, which of its
        columns, and the place among own entries.
      entries: [2, ...] what it tells the owners of the other columns (`GlobalPlan.biases`): row
        and column of each.
      bias_sends: places of these entries among the foreign ones.
      query_sends: which of its rows a part sends to all.
      row_names, column_names: of the global rows and of its own columns.
    """

    other: Padded
    own: np.ndarray
    entries: np.ndarray
    bias_sends: np.ndarray
    query_sends: np.ndarray
    row_names: np.ndarray
    column_names: np.ndarray


def padded_global(
    found: Piece,
    arrays: Padded,
    plan: GlobalPlan,
    sizes: Sizes,
    row_bounds: np.ndarray,
    column_bounds: np.ndarray,
    tile: tuple[int, int],
) -> PaddedGlobal:
    """Of the part `found`, whose arrays in the sizes of all rows are `arrays`."""
    part, (high, wide) = found.part, tile
    mine = plan.rows[(plan.rows >= row_bounds[part]) & (plan.rows < row_bounds[part + 1])]
    rest, kept = _without(found, mine - row_bounds[part], column_bounds)
    place = arrays.merged.values[: len(kept)]  # in the order of the matrix, as `found` is
    other = padded(rest, plan.sizes, plan.keys, column_bounds, tile, plan.to_each)
    beyond = sizes.own + sizes.foreign + np.arange(plan.sizes.entries - int(kept.sum()))
    values = np.concatenate([place[kept], beyond]).astype(np.int32)
    other = other._replace(merged=other.merged._replace(values=values))

    row = np.searchsorted(plan.rows, _row_of_entry(found)[~kept] + row_bounds[part])
    columns, place = found.matrix.indices[~kept], place[~kept]
    owner = np.searchsorted(column_bounds, columns, side="right") - 1
    column = columns - column_bounds[owner]
    near = owner == part
    away = np.flatnonzero(~near)
    away = away[np.argsort(owner[away], kind="stable")]
    of_owners = plan.counts[part] * (np.arange(len(plan.counts)) != part)
    ends = np.cumsum(of_owners)
    at = np.arange(len(away)) + np.repeat(
        plan.biases.back.received_at(part) - ends + of_owners, of_owners
    )
    entries = np.zeros((2, plan.biases.received), np.int32)
    entries[:, at] = row[away], column[away]
    bias_sends = np.zeros(plan.biases.received, np.int32)
    bias_sends[at] = place[away] - sizes.own
    names = np.full(sizes.columns, BEYOND, np.int32)
    begin, end = column_bounds[part : part + 2] * wide
    names[: end - begin] = np.arange(begin, end)
    return PaddedGlobal(
        other,
        np.stack([row[near], column[near], place[near]]),
        entries,
        bias_sends,
        sent_rows(part, NONE, plan.rows, plan.queries, row_bounds, high),
        rows_of(plan.rows, high).astype(np.int32),
        names,
    )


def entries_of(part: int, plan: GlobalPlan, own: np.ndarray, told: np.ndarray, sizes: Sizes) -> Any:
    """The entries of all global rows in the columns of a part; `told` is what the other parts have
    told it, and the values are the places of `GlobalRows.entries`."""
    begins = plan.biases.received_at(part)
    counts = plan.counts[:, part] * (np.arange(len(begins)) != part)
    ends = np.cumsum(counts)
    at = np.arange(ends[-1]) + np.repeat(begins - ends + counts, counts)
    row = np.concatenate([own[0], told[0, at]])
    column = np.concatenate([own[1], told[1, at]])
    place = np.concatenate([own[2], sizes.own + at])
    order = np.lexsort((column, row))
    found = compressed(row[order], column[order], place[order].astype(np.int32), len(plan.rows))
    return enlarged(found, int(plan.counts.sum(0).max()), BEYOND)


def _row_of_entry(x: Piece) -> np.ndarray:
    return np.repeat(np.arange(x.rows), np.diff(x.matrix.offsets))


def _without(x: Piece, rows: np.ndarray, column_bounds: np.ndarray) -> tuple[Piece, np.ndarray]:
    """A part in which these rows have no entries, and which entries it has kept."""
    kept = ~np.isin(_row_of_entry(x), rows)
    lengths = np.diff(x.matrix.offsets)
    lengths[rows] = 0
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    matrix = Compressed(x.matrix.values[kept], offsets, x.matrix.indices[kept])
    return piece(x.part, matrix, column_bounds), kept
