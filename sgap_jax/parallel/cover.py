"""Which rows of B and which partial rows of C travel, so that they are few: NumPy, one part at a
time.

An entry (i, j) of part p whose column part q owns needs one message from q to p: row j of B, which
p multiplies, or a partial row i of C, which q has multiplied and which serves all of p's entries in
row i whose columns q owns. The fewest rows are a smallest vertex cover of the bipartite graph of
those entries (Koenig; SHIRO, arXiv 2512.20178), found by its largest matching (Hopcroft and Karp).
Of all smallest covers it is the one of most rows of B, which cost no work elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.sparse

from sgap_jax.parallel.exchange import Exchange
from sgap_jax.parallel.plan import Compressed, Padded, Piece, Sizes, compressed, enlarged

ONE = np.iinfo(np.int32).max  # the place of a value that is one


@dataclass(frozen=True)
class CoverOfPart:
    """What other parts send to one part.

    Attributes:
      columns: the foreign columns whose rows of B are sent, ascending.
      column_ends: [parts + 1] where those of each owner begin.
      rows: the rows of the part whose partial rows are sent, by owner and then ascending.
      row_ends: [parts + 1] where those of each owner begin.
      away: for each foreign entry, in the order of the matrix, whether its owner multiplies it.
      away_ends: [parts + 1] where the entries of each owner that are away begin, in the order of
        owner, row and column.
    """

    columns: np.ndarray
    column_ends: np.ndarray
    rows: np.ndarray
    row_ends: np.ndarray
    away: np.ndarray
    away_ends: np.ndarray

    def counts(self) -> np.ndarray:
        """[3 * parts]: of each owner the rows of B, the partial rows, and the entries away."""
        ends = self.column_ends, self.row_ends, self.away_ends
        return np.concatenate([np.diff(x) for x in ends])


def cover(found: Piece, column_bounds: np.ndarray) -> CoverOfPart:
    """The fewest rows that others must send to the part `found`; part q owns the columns from
    column_bounds[q] to column_bounds[q + 1]."""
    columns = found.matrix.indices[~found.near]
    row = np.repeat(np.arange(found.rows), np.diff(found.matrix.offsets))[~found.near]
    owner = np.searchsorted(column_bounds, columns, side="right") - 1
    # One vertex for each row and owner, and one for each column: the graphs of all owners at once.
    partial, partial_of = np.unique(owner * np.int64(found.rows) + row, return_inverse=True)
    column_of = np.searchsorted(found.wanted, columns)
    by_partial, by_column = smallest_vertex_cover(
        partial_of, column_of, len(partial), len(found.wanted)
    )
    away = ~by_column[column_of]
    kept, partial = found.wanted[by_column], partial[by_partial]
    parts = len(column_bounds) - 1
    return CoverOfPart(
        kept,
        np.searchsorted(kept, column_bounds),
        partial % max(found.rows, 1),
        np.searchsorted(partial, np.arange(parts + 1) * found.rows),
        away,
        np.concatenate([[0], np.cumsum(np.bincount(owner[away], minlength=parts))]),
    )


def smallest_vertex_cover(
    left: np.ndarray, right: np.ndarray, lefts: int, rights: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which vertices on the left and on the right cover all edges (left[e], right[e]): of the
    smallest covers the one of most vertices on the right that have an edge."""
    from scipy.sparse import csgraph  # takes long to import

    if len(left) == 0:
        return np.zeros(lefts, bool), np.zeros(rights, bool)
    ones = np.ones(len(left), np.int8)
    graph = scipy.sparse.csr_array((ones, (left, right)), shape=(lefts, rights))
    mate = csgraph.maximum_bipartite_matching(graph, perm_type="row")  # of each on the right
    free, matched = np.flatnonzero(mate < 0), np.flatnonzero(mate >= 0)
    # What alternating paths reach from the free vertices on the right: from right to left along any
    # edge, back along those of the matching.
    start = lefts + rights
    tail = np.concatenate([lefts + right, mate[matched], np.full(len(free), start)])
    head = np.concatenate([left, lefts + matched, lefts + free])
    paths = scipy.sparse.csr_array(
        (np.ones(len(tail), np.int8), (tail, head)), shape=(start + 1, start + 1)
    )
    reached = np.zeros(start + 1, bool)
    reached[csgraph.breadth_first_order(paths, start, return_predecessors=False)] = True
    return reached[:lefts], ~reached[lefts:start]


@dataclass(frozen=True)
class CoverPlan:
    """What all parts must agree on.

    Attributes:
      exchange: of rows, those of B before partial ones in each message.
      values: of the values of entries that are away, the other way, to where they are multiplied.
      entries: likewise of all entries of `out` (`PaddedCover`), to tell an owner what it sends.
      rows_of_b, partial_rows: [parts, parts] how many part p (first) receives.
      out, into: the entries of the matrices that a part is padded to.
    """

    exchange: Exchange
    values: Exchange
    entries: Exchange
    rows_of_b: np.ndarray
    partial_rows: np.ndarray
    out: int
    into: int

    @classmethod
    def of(cls, counts: np.ndarray, far: np.ndarray) -> CoverPlan:
        """From the counts of all parts, and the foreign entries of each."""
        rows_of_b, partial_rows, away = np.split(counts, 3, axis=1)
        entries = rows_of_b + away
        return cls(
            Exchange.of(rows_of_b + partial_rows),
            Exchange.of(away).back,
            Exchange.of(entries).back,
            rows_of_b,
            partial_rows,
            int(entries.sum(0).max()),
            int((far - away.sum(1) + partial_rows.sum(1)).max()),
        )


class PaddedCover(NamedTuple):
    """The arrays of one part, padded.

    Attributes:
      into: its rows times what it receives: the entries that are not away, whose values are places
        among those of the foreign matrix, and a one for each partial row, whose place is ONE.
      value_sends: for each value that travels (`CoverPlan.values`) its place among those of the
        foreign matrix; of padding ONE.
      entries: [2, ...] what it tells the owners (`CoverPlan.entries`): of each entry of `out` the
        row in the message, and the column among the owner's.
    """

    into: Compressed
    value_sends: np.ndarray
    entries: np.ndarray


def padded_cover(
    found: Piece,
    arrays: Padded,
    cover: CoverOfPart,
    plan: CoverPlan,
    sizes: Sizes,
    column_bounds: np.ndarray,
) -> PaddedCover:
    """What the part `found` computes with and sends, in the sizes of `plan`; `arrays` are its own
    and foreign matrices, `cover` what it receives."""
    columns = found.matrix.indices[~found.near]
    row = np.repeat(np.arange(found.rows), np.diff(found.matrix.offsets))[~found.near]
    place = arrays.merged.values[: len(found.near)][~found.near] - sizes.own
    owner = np.searchsorted(column_bounds, columns, side="right") - 1
    begins = plan.exchange.received_at(found.part)
    per_owner = np.diff(cover.column_ends)
    slots_of_b = _runs(begins, per_owner)
    owner_of_partial = np.repeat(np.arange(len(begins)), np.diff(cover.row_ends))
    in_message = np.arange(len(cover.rows)) - cover.row_ends[owner_of_partial]
    in_message += per_owner[owner_of_partial]  # after the rows of B
    slots_of_partial = begins[owner_of_partial] + in_message
    stay = ~cover.away
    into_row = np.concatenate([row[stay], cover.rows])
    into_slot = np.concatenate(
        [slots_of_b[np.searchsorted(cover.columns, columns[stay])], slots_of_partial]
    )
    into_place = np.concatenate([place[stay], np.full(len(cover.rows), ONE)])
    order = np.lexsort((into_slot, into_row))
    into = compressed(
        into_row[order], into_slot[order], into_place[order].astype(np.int32), sizes.rows
    )

    # The entries away, by owner, row and column; `np.unique` of cover() has sorted the rows so.
    away = np.flatnonzero(cover.away)
    away = away[np.argsort(owner[away], kind="stable")]
    key = owner_of_partial * np.int64(found.rows) + cover.rows
    partial_of = np.searchsorted(key, owner[away] * np.int64(found.rows) + row[away])
    value_sends = np.full(plan.values.received, ONE, np.int32)
    value_sends[_runs(plan.values.back.received_at(found.part), np.diff(cover.away_ends))] = place[
        away
    ]
    told = np.zeros((2, plan.entries.received), np.int32)
    begins = plan.entries.back.received_at(found.part)
    at = _runs(begins, per_owner)
    owner_of_column = np.repeat(np.arange(len(begins)), per_owner)
    told[0, at] = np.arange(len(cover.columns)) - cover.column_ends[owner_of_column]
    told[1, at] = cover.columns - column_bounds[owner_of_column]
    at = _runs(begins + per_owner, np.diff(cover.away_ends))
    told[0, at] = in_message[partial_of]
    told[1, at] = columns[away] - column_bounds[owner[away]]
    return PaddedCover(enlarged(into, plan.into, ONE), value_sends, told)


def out_of(part: int, plan: CoverPlan, told: np.ndarray) -> Compressed:
    """The matrix of what a part sends, its rows those of the buffer: of each row of B a one, of
    each partial row the entries that are away. Its values are places among the values that the part
    receives, or ONE. `told` is what the other parts have told it."""
    slots, columns, places = [], [], []
    message_at = plan.exchange.back.received_at(part)
    told_at, value_at = plan.entries.received_at(part), plan.values.received_at(part)
    ones = plan.rows_of_b[:, part]
    for p in np.flatnonzero(plan.entries.needed[part]):
        span = slice(told_at[p], told_at[p] + plan.entries.needed[part, p])
        slots.append(message_at[p] + told[0, span])
        columns.append(told[1, span])
        away = np.arange(plan.entries.needed[part, p] - ones[p])
        places.append(np.concatenate([np.full(ones[p], ONE), value_at[p] + away]))
    slot, column, place = (
        np.concatenate([*x, np.zeros(0)]).astype(np.int64) for x in (slots, columns, places)
    )
    order = np.argsort(slot, kind="stable")
    rows = max(plan.exchange.received, 1)
    return enlarged(
        compressed(slot[order], column[order], place[order].astype(np.int32), rows), plan.out, ONE
    )


def _runs(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """begins[0], begins[0] + 1, ... lengths[0] of them, then those of the next."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(begins - ends + lengths, lengths)
