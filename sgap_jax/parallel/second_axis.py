"""A second axis of the mesh, of c devices: NumPy, one part at a time.

Each part is on c devices then. A product uses them in one of two ways, whichever sends less:

    columns   each device has n / c columns of the dense operand and of the result, and sends those
    copies    each device has all columns, and of each message 1 / c of the rows: it multiplies the
              entries that name them, and its share of the part's own ones; the results are summed
              over the axis

The second is the 1.5D algorithm of replication (Koanantakool et al., IPDPS 2016; Bharadwaj, Buluc
and Demmel, arXiv 2203.07673; CAGNET, arXiv 2005.03300), with the messages of a plan in place of
whole blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgap_jax.parallel.exchange import Exchange
from sgap_jax.parallel.plan import Compressed, Padded, Piece, Sizes, compressed, enlarged

BEYOND = np.iinfo(np.int32).max  # the place of padding, which has no value


class Costs(NamedTuple):
    """Bytes that the busiest device sends in one product, by how it uses the second axis.

    Attributes:
      alone: every device has and sends all columns, and the second axis does nothing.
      columns, copies: the two ways above; copies is None where they never send less.
    """

    alone: int
    columns: int
    copies: int | None

    @property
    def choice(self) -> str:
        return "copies" if self.copies is not None and self.copies < self.columns else "columns"


def summed_bytes(copies: int, numbers: int, size: int) -> int:
    """What a device sends in an all-reduce over the copies: a reduce-scatter and an all-gather, in
    each of which it sends all but one of `copies` pieces."""
    return 2 * (copies - 1) * -(-numbers // copies) * size


def shared_exchange(exchange: Exchange, copies: int, rows: int) -> Exchange | None:
    """The messages of one copy; None if they and the sum of `rows` rows are never fewer than the
    messages of one column, the case that is worst for splitting columns."""
    found = Exchange.of(-(-exchange.needed // copies))
    return found if found.sent + summed_bytes(copies, rows, 1) < exchange.sent else None


class Shares(NamedTuple):
    """The arrays of one part, of each of its copies.

    Attributes:
      own, foreign: entries of own columns, and of foreign ones, whose columns are places in what
        the copy receives; values are places among those of the part's own and foreign matrices.
      requests: [received, copies] which row of its owner each row that a copy receives is.
    """

    own: list[Compressed]
    foreign: list[Compressed]
    requests: np.ndarray


class Shared:
    """How the copies of one part share its messages and entries."""

    def __init__(self, found: Piece, arrays: Padded, whole: Exchange, exchange: Exchange, c: int):
        self.arrays, self.exchange, self.copies = arrays, exchange, c
        self.near = int(found.near.sum())
        counts = whole.needed[found.part]
        owner = np.repeat(np.arange(len(counts)), counts)
        in_message = np.arange(len(owner)) - found.ends[owner]
        width = -(-counts // c)[owner]
        # Of each place in what the part receives: which copy receives it, and where.
        self.slots = whole.received_at(found.part)[owner] + in_message
        self.copy = np.zeros(max(whole.received, 1), np.int64)
        self.place = np.zeros(max(whole.received, 1), np.int64)
        self.copy[self.slots] = in_message // width
        self.place[self.slots] = exchange.received_at(found.part)[owner] + in_message % width
        self.far = len(found.near) - self.near

    def counts(self) -> np.ndarray:
        """[copies] foreign entries."""
        columns = self.arrays.foreign.indices[: self.far]
        return np.bincount(self.copy[columns], minlength=self.copies)

    def padded(self, sizes: Sizes, entries: int) -> Shares:
        """In the sizes that all parts have, `entries` of them foreign."""
        own, foreign = [], []
        row = np.repeat(np.arange(sizes.rows), np.diff(self.arrays.foreign.offsets))
        columns = self.arrays.foreign.indices[: self.far]
        each = -(-self.near // self.copies)
        for j in range(self.copies):
            begin, end = (min(x * each, self.near) for x in (j, j + 1))
            part = Compressed(
                np.arange(begin, end, dtype=np.int32),
                (np.clip(self.arrays.own.offsets, begin, end) - begin).astype(np.int32),
                self.arrays.own.indices[begin:end],
            )
            own.append(enlarged(part, -(-sizes.own // self.copies), BEYOND))
            mine = np.flatnonzero(self.copy[columns] == j)
            place = self.place[columns[mine]]
            order = np.lexsort((place, row[mine]))
            mine, place = mine[order], place[order]
            part = compressed(row[mine], place, mine.astype(np.int32), sizes.rows)
            foreign.append(enlarged(part, entries, BEYOND))
        requests = np.zeros((self.exchange.received, self.copies), np.int32)
        requests[self.place[self.slots], self.copy[self.slots]] = self.arrays.requests[self.slots]
        return Shares(own, foreign, requests)
