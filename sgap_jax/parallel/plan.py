"""How a matrix is cut into parts, and which rows of a dense operand travel between them: NumPy.

Part p has the rows of its range and, of a dense operand, the rows of a range of columns, its own.
Entries in other columns are foreign: the rows that they name are received from their owners. An
exchange pads what is sent, since the sizes of a program are static: `all_to_all` to the most rows
that any part sends to any other, rounds of `ppermute` (part p sends to part p + shift) each to the
most rows of that shift. `Exchange.of` takes the one that sends less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


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


@dataclass(frozen=True)
class Exchange:
    """What each part sends: static, and shared by all devices.

    Attributes:
      needed: [parts][parts] rows that part p (first) needs of part q.
      shifts: (shift, padded rows) of each round of ppermute; () for all_to_all.
      width: padded rows for each pair of parts of all_to_all; 0 for ppermute.
    """

    needed: tuple[tuple[int, ...], ...]
    shifts: tuple[tuple[int, int], ...]
    width: int

    @classmethod
    def of(cls, needed: np.ndarray) -> Exchange:
        parts = len(needed)
        most = [
            max(int(needed[p][(p - shift) % parts]) for p in range(parts))
            for shift in range(1, parts)
        ]
        shifts = tuple((shift, rows) for shift, rows in enumerate(most, 1) if rows)
        width = max(most, default=0)
        if shifts and sum(most) == (parts - 1) * width:  # no round of ppermute would be shorter
            shifts = ()
        else:
            width = 0
        return cls(tuple(map(tuple, needed.tolist())), shifts, width)

    @property
    def received(self) -> int:
        """The rows of the buffer that a part receives, padding included."""
        return self.width * len(self.needed) + sum(rows for _, rows in self.shifts)

    @property
    def sent(self) -> int:
        """The rows that each part sends to others, padding included."""
        return self.width * (len(self.needed) - 1) + sum(rows for _, rows in self.shifts)

    def begin(self, part: int, owner: int) -> int:
        """Where in the buffer of a part the rows of an owner begin."""
        if self.width:
            return owner * self.width
        shift, begin = (part - owner) % len(self.needed), 0
        for each, rows in self.shifts:
            if each == shift:
                return begin
            begin += rows
        raise AssertionError("no round has this shift")


@dataclass(frozen=True)
class Cut:
    """The parts of a matrix, padded alike.

    Attributes:
      own, foreign: CSR arrays of each part: values, offsets, column indices.
      columns: rows of the dense operand that a part owns, padding included.
      rows: rows of the matrix that a part has, padding included.
      sends: for each message of the exchange, [parts, rows]: which of its rows a part sends.
    """

    own: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    foreign: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    rows: int
    columns: int
    exchange: Exchange
    sends: tuple[np.ndarray, ...]


def cut(
    offsets: np.ndarray,
    indices: np.ndarray,
    values: np.ndarray,
    row_bounds: np.ndarray,
    column_bounds: np.ndarray,
) -> Cut:
    """Cuts a CSR matrix, whose rows and columns are in the order of the parts."""
    parts = len(row_bounds) - 1
    owner = np.searchsorted(column_bounds, indices, side="right") - 1
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    spans = [slice(*offsets[row_bounds[p : p + 2]]) for p in range(parts)]
    away = [owner[span] != p for p, span in enumerate(spans)]
    # The foreign columns of each part, ascending: those of one owner follow each other.
    wanted = [np.unique(indices[span][far]) for span, far in zip(spans, away, strict=True)]
    ends = [np.searchsorted(columns, column_bounds) for columns in wanted]
    exchange = Exchange.of(np.array([np.diff(end) for end in ends]))
    most = max(int(np.diff(row_bounds).max()), 1)
    own, foreign = [], []
    for p, (span, far) in enumerate(zip(spans, away, strict=True)):
        at, columns = row[span] - row_bounds[p], indices[span]
        place = np.zeros(len(wanted[p]), np.int64)  # of each foreign column in the buffer
        for q in np.flatnonzero(np.diff(ends[p])).tolist():
            theirs = slice(*ends[p][q : q + 2])
            place[theirs] = exchange.begin(p, int(q)) + np.arange(theirs.stop - theirs.start)
        there = place[np.searchsorted(wanted[p], columns[far])]
        order = np.lexsort((there, at[far]))
        near = at[~far], columns[~far] - column_bounds[p]
        own.append(_compressed(*near, values[span][~far], most))
        foreign.append(_compressed(at[far][order], there[order], values[span][far][order], most))
    widest = max(int(np.diff(column_bounds).max()), 1)
    sends = _sends(wanted, ends, column_bounds, exchange)
    return Cut(_alike(own), _alike(foreign), most, widest, exchange, sends)


def _compressed(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, size: int) -> tuple:
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=size))])
    return values, offsets.astype(np.int32), columns.astype(np.int32)


def _alike(parts: Sequence[tuple]) -> list:
    """Pads the entries of all parts to those of the largest one."""
    most = max(len(indices) for _, _, indices in parts)

    def padded(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros(most - len(x), x.dtype)])

    return [(padded(values), offsets, padded(indices)) for values, offsets, indices in parts]


def _sends(
    wanted: list, ends: list, column_bounds: np.ndarray, exchange: Exchange
) -> tuple[np.ndarray, ...]:
    parts = len(wanted)

    def rows(p: int, q: int, size: int) -> np.ndarray:
        """Which of its rows part q sends to part p, padded."""
        mine = wanted[p][slice(*ends[p][q : q + 2])] - column_bounds[q]
        return np.concatenate([mine, np.zeros(size - len(mine))]).astype(np.int32)

    if exchange.width:
        width = exchange.width
        return (np.array([[rows(p, q, width) for p in range(parts)] for q in range(parts)]),)
    return tuple(
        np.array([rows((q + shift) % parts, q, size) for q in range(parts)])
        for shift, size in exchange.shifts
    )


def explanation(exchange: Exchange, entries: Sequence[int], columns: int, n: int, size: int) -> str:
    """What one product with n columns of `size` bytes sends, as text."""
    parts, row = len(exchange.needed), n * size
    useful = [sum(exchange.needed[p][q] for p in range(parts)) for q in range(parts)]
    how = "all_to_all" if exchange.width else f"{len(exchange.shifts)} rounds of ppermute"
    total, sent, everything = sum(useful), exchange.sent * parts, (parts - 1) * columns * parts
    balance = max(entries) * parts / max(sum(entries), 1)
    share = 0.0 if sent == 0 else 1 - total / sent
    lines = [
        f"{parts} parts, {how if sent else 'nothing travels'}",
        f"sent by each device   {exchange.sent * row:>14,} bytes for {n} columns",
        f"  needed, at most     {max(useful) * row:>14,} bytes",
        f"  padding             {share:>14.0%}",
        f"an all-gather         {everything // parts * row:>14,} bytes",
        f"largest part          {balance:>14.2f} times the mean of the entries",
    ]
    return "\n".join(lines)
