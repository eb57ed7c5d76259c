"""How a matrix is cut into parts: NumPy, one part at a time.

Part p has the rows of its range and, of a dense operand, the rows of a range of columns, its own.
Entries in other columns are foreign: the rows that they name are received from their owners
(exchange.py). `piece` cuts one part and needs no other; `Sizes` is what the parts must agree on,
since a program has one size for all of them; `padded` then gives the arrays of a part.

An entry here is one value, a column vector or a block, and a row or a column of `Piece` one of the
grid of vectors or blocks; `Sizes`, `Exchange` and what `padded` says of dense operands count rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sgap_jax.parallel.exchange import Exchange

NONE = np.zeros(0, np.int64)


def bounds_of(rows: Any, weights: np.ndarray, parts: int) -> np.ndarray:
    """[parts + 1]: the first row of each part, from `rows` of `partition`; `weights` are the
    entries of each row."""
    size = weights.shape[0]
    if isinstance(rows, str) and rows == "even":
        each = -(-size // parts)
        return np.minimum(np.arange(parts + 1) * each, size)
    if isinstance(rows, str) and rows == "balanced":
        # A row costs about as much as one entry more.
        upto = np.concatenate([[0], np.cumsum(weights + 1.0)])
        cuts = np.searchsorted(upto, upto[-1] * np.arange(1, parts) / parts)
        return np.concatenate([[0], cuts, [size]])
    counts = None if isinstance(rows, str) else np.asarray(rows)
    whole = counts is not None and np.issubdtype(counts.dtype, np.integer)
    if counts is None or not whole or counts.shape != (parts,):
        raise ValueError(
            f"partition: rows: expected 'balanced', 'even' or {parts} numbers of rows, got {rows!r}"
        )
    if (counts < 0).any() or counts.sum() != size:
        raise ValueError(f"partition: rows: expected {size} in all, got {counts.tolist()}")
    return np.concatenate([[0], np.cumsum(counts)])


class Compressed(NamedTuple):
    """The arrays of a CSR, CVS or BCSR matrix."""

    values: np.ndarray
    offsets: np.ndarray
    indices: np.ndarray


@dataclass(frozen=True)
class Piece:
    """One part of a matrix.

    Attributes:
      part: which.
      matrix: its rows (of the grid), with the columns of the whole matrix.
      near: for each entry, whether the part owns its column.
      wanted: the foreign columns, ascending: those of one owner follow each other.
      ends: [parts + 1] where in `wanted` the columns of each owner begin.
    """

    part: int
    matrix: Compressed
    near: np.ndarray
    wanted: np.ndarray
    ends: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.matrix.offsets) - 1

    def counts(self, column_bounds: np.ndarray) -> np.ndarray:
        """[4 + parts]: what `Sizes` needs to know of the part, then how many rows it needs of each
        owner."""
        near = int(self.near.sum())
        far = len(self.near) - near
        columns = int(column_bounds[self.part + 1] - column_bounds[self.part])
        return np.array([near, far, self.rows, columns + len(self.wanted), *np.diff(self.ends)])


def piece(part: int, matrix: Compressed, column_bounds: np.ndarray) -> Piece:
    """A part, from its rows with the columns of the whole matrix, ascending in each row."""
    begin, end = column_bounds[part : part + 2]
    near = (matrix.indices >= begin) & (matrix.indices < end)
    wanted = np.unique(matrix.indices[~near])
    return Piece(part, matrix, near, wanted, np.searchsorted(wanted, column_bounds))


@dataclass(frozen=True)
class Sizes:
    """What all parts are padded to.

    Attributes:
      rows, columns: rows of the matrix, and of the dense operand, that a part has.
      own, foreign, entries: entries of own columns, of foreign ones, of both.
      table: rows of the dense operand that a part uses, own and received.
    """

    rows: int
    columns: int
    own: int
    foreign: int
    entries: int
    table: int

    @classmethod
    def of(
        cls, counts: np.ndarray, column_bounds: np.ndarray, tile: tuple[int, int] = (1, 1)
    ) -> Sizes:
        """From the counts of all parts, whose entries are vectors or blocks of this size."""
        near, far, rows, table = (int(x) for x in counts[:, :4].max(0))
        entries = int(counts[:, :2].sum(1).max())
        columns = int(np.diff(column_bounds).max())
        high, wide = tile
        rows, columns, table = max(rows, 1) * high, max(columns, 1) * wide, max(table, 1) * wide
        return cls(rows, columns, near, far, entries, table)


class Padded(NamedTuple):
    """The arrays of one part, padded.

    Attributes:
      own, foreign: entries of own columns, and of foreign ones, whose columns are places in the
        buffer that the part receives.
      merged: all entries; the columns are places in the table of own and received rows, in the
        order of the whole matrix, and the values say where the entry is among those of own and then
        of foreign columns.
      table: [table] for each row of that table its place among own and then received rows.
      names: [table] its column in the order of the parts; of padding, the largest int32.
      requests: which row of its owner each row is that the part receives and that is for it alone.
    """

    own: Compressed
    foreign: Compressed
    merged: Compressed
    table: np.ndarray
    names: np.ndarray
    requests: np.ndarray


def padded(
    found: Piece,
    sizes: Sizes,
    exchange: Exchange,
    column_bounds: np.ndarray,
    tile: tuple[int, int] = (1, 1),
    shared: np.ndarray = NONE,
) -> Padded:
    """The arrays of a part, in the sizes of all; `shared` are the columns that go to all."""
    part, (values, offsets, columns), near = found.part, found.matrix, found.near
    high, wide = tile
    rows = sizes.rows // high
    begin, end = (int(x) for x in column_bounds[part : part + 2])
    row = np.repeat(np.arange(found.rows), np.diff(offsets))
    # Where each wanted column is received.
    buffer = np.zeros(len(found.wanted), np.int64)
    alone = ~np.isin(found.wanted, shared)
    asked = found.wanted[alone]
    ends = np.searchsorted(asked, column_bounds)
    owner = np.repeat(np.arange(exchange.parts), np.diff(ends))
    buffer[alone] = exchange.received_at(part)[owner] // wide + np.arange(len(owner)) - ends[owner]
    buffer[~alone] = shared_places(shared, exchange, column_bounds, wide)[
        np.searchsorted(shared, found.wanted[~alone])
    ]
    there = buffer[np.searchsorted(found.wanted, columns[~near])]
    order = np.lexsort((there, row[~near]))
    own = compressed(row[near], columns[near] - begin, values[near], rows)
    foreign = compressed(row[~near][order], there[order], values[~near][order], rows)
    place = np.zeros(len(columns), np.int64)  # of each entry among those of own and foreign columns
    place[near] = np.arange(near.sum())
    place[np.flatnonzero(~near)[order]] = sizes.own + np.arange(len(order))
    names = np.concatenate([found.wanted, np.arange(begin, end)])
    table = np.concatenate([sizes.columns // wide + buffer, np.arange(end - begin)])
    by_name = np.argsort(names)
    names, table = names[by_name], table[by_name]
    merged = compressed(row, np.searchsorted(names, columns), place, rows)
    # Padding is behind all places, each somewhere else: a scatter drops it.
    beyond = sizes.own + sizes.foreign + np.arange(sizes.entries - len(place))
    rest = sizes.table - len(names) * wide
    requests = np.zeros(exchange.between_two, np.int32)
    requests[rows_of(buffer[alone], wide)] = rows_of(asked - column_bounds[owner], wide)
    return Padded(
        enlarged(own, sizes.own),
        enlarged(foreign, sizes.foreign),
        Compressed(
            np.concatenate([place, beyond]).astype(np.int32),
            *enlarged(merged, sizes.entries)[1:],
        ),
        np.concatenate([rows_of(table, wide), np.zeros(rest)]).astype(np.int32),
        np.concatenate([rows_of(names, wide), np.full(rest, np.iinfo(np.int32).max)]).astype(
            np.int32
        ),
        requests,
    )


def shared_places(
    shared: np.ndarray, exchange: Exchange, column_bounds: np.ndarray, width: int
) -> np.ndarray:
    """Where the columns that go to all are received, in blocks of `width` rows."""
    ends = np.searchsorted(shared, column_bounds)
    owner = np.repeat(np.arange(exchange.parts), np.diff(ends))
    begins = np.array([exchange.shared_at(q) // width for q in range(exchange.parts)])
    return begins[owner] + np.arange(len(shared)) - ends[owner]


def sent_rows(
    part: int,
    told: np.ndarray,
    shared: np.ndarray,
    exchange: Exchange,
    column_bounds: np.ndarray,
    width: int,
) -> np.ndarray:
    """[received]: which of its rows a part sends: what the others have asked for (`told`), and what
    goes to all."""
    mine = shared[(shared >= column_bounds[part]) & (shared < column_bounds[part + 1])]
    rows = np.zeros(exchange.received, np.int32)
    rows[: exchange.between_two] = told
    begin = exchange.shared_at(part)
    rows[begin : begin + len(mine) * width] = rows_of(mine - column_bounds[part], width)
    return rows


def rows_of(blocks: np.ndarray, width: int) -> np.ndarray:
    """The rows of a dense operand that columns of a grid of blocks name, block after block."""
    return (blocks[:, None] * width + np.arange(width)).reshape(-1)


def compressed(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, size: int) -> Compressed:
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=size))])
    return Compressed(values, offsets.astype(np.int32), columns.astype(np.int32))


def enlarged(matrix: Compressed, entries: int, value: int = 0) -> Compressed:
    """With padding after its entries."""
    values, offsets, indices = matrix
    rest = entries - len(values)
    return Compressed(
        np.concatenate([values, np.full((rest, *values.shape[1:]), value, values.dtype)]),
        offsets,
        np.concatenate([indices, np.zeros(rest, indices.dtype)]),
    )


def explanation(
    exchange: Exchange,
    entries: Sequence[int],
    k: int,
    n: int,
    size: int,
    notes: Sequence[str] = (),
    whole_row: int | None = None,
) -> str:
    """What one product with n columns of `size` bytes sends, as text; an all-gather would send all
    k rows of the dense operand, of `whole_row` bytes, split evenly."""
    parts, row = exchange.parts, n * size
    whole_row = row if whole_row is None else whole_row
    sent, everything = exchange.sent_by, (parts - 1) * -(-k // parts)
    useful = exchange.needed_of_others.sum(0).tolist()
    between_two = replace(exchange, to_all=()).total
    balance = max(entries) * parts / max(sum(entries), 1)
    share = 0.0 if between_two == 0 else 1 - int(exchange.needed.sum()) / between_two
    lines = [
        f"{parts} parts, {exchange.how}, {n} columns",
        f"sent by a device, at most {max(sent) * row:>14,} bytes",
        f"  on the mean             {sum(sent) * row // parts:>14,} bytes",
        f"  padding                 {share:>14.0%}",
        f"by an all-gather          {everything * whole_row:>14,} bytes",
        f"largest part              {balance:>14.2f} times the mean of the entries",
        *notes,
        "",
        "part        entries    needed by others          sent",
    ]
    lines += [
        f"{q:>4} {entries[q]:>14,} {useful[q] * row:>13,} bytes {sent[q] * row:>13,} bytes"
        for q in range(parts)
    ]
    return "\n".join(lines)
