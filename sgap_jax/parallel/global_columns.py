"""Which columns nearly all parts need, so that their rows of a dense operand go to all at once: the
keys of global tokens, the hubs of a graph. NumPy, one part at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sgap_jax.parallel.exchange import Exchange
from sgap_jax.parallel.plan import NONE, Piece, rows_of

# A column may go to all if at least one of these shares of the other parts needs it.
_SHARES = (1.0, 0.75, 0.5)


def to_all(
    pieces: Mapping[int, Piece],
    needed: np.ndarray,
    column_bounds: np.ndarray,
    width: int,
    told: Callable[[Exchange, Mapping[int, np.ndarray]], Mapping[int, np.ndarray]],
    from_all: Callable[[Mapping[int, np.ndarray], int], np.ndarray],
) -> tuple[Exchange, np.ndarray]:
    """The exchange of the columns that parts need, and the columns that go to all, ascending.

    That is decided by the rows that the device sends that sends most, and if they are as many by
    those of the buffer: between two, a global column is sent by its owner once for each other part,
    and by an all-reduce about twice by each device. Of the shares of the parts that must need a
    column the best is taken.

    Args:
      pieces: the parts of this process.
      needed: [parts, parts] how many columns part p (first) needs of part q.
      told: swaps what each part has for each other, as `Exchange.back` says.
      from_all: [parts, n] of what the processes know of their parts.
    """
    parts = len(needed)
    exchange = Exchange.of(needed, width)
    # No column can be needed by half of the parts if no owner is.
    if parts < 4 or (needed > 0).sum(0).max() < min(_SHARES) * (parts - 1):
        return exchange, NONE
    asked = _asked_for(pieces, exchange, column_bounds, width, told)
    few = min(_SHARES) * (parts - 1)
    lists = {q: np.stack([np.flatnonzero(x >= few), x[x >= few]]) for q, x in asked.items()}
    longest = int(from_all({q: np.array([x.shape[1]]) for q, x in lists.items()}, parts).max())
    if longest == 0:
        return exchange, NONE
    filled = {q: np.full((2, longest), -1) for q in lists}
    for q, x in lists.items():
        filled[q][:, : x.shape[1]] = x
    # [parts, 2, longest]: the column among those of its owner, and how many parts need it.
    table = from_all({q: x.reshape(-1) for q, x in filled.items()}, parts).reshape(parts, 2, -1)
    there = table[:, 0] >= 0
    columns = (table[:, 0] + column_bounds[:-1, None])[there]
    count, owner = table[:, 1][there], np.nonzero(there)[0]
    best, shared = exchange, NONE
    for share in _SHARES:
        mine = count >= share * (parts - 1)
        if not mine.any():
            continue
        some = columns[mine]
        without = {
            p: needed[p] - np.diff(np.searchsorted(np.intersect1d(x.wanted, some), column_bounds))
            for p, x in pieces.items()
        }
        of_owners = np.bincount(owner[mine], minlength=parts).tolist()
        found = Exchange.of(from_all(without, parts), width, of_owners)
        if (found.sent, found.received) < (best.sent, best.received):
            best, shared = found, some
    return best, shared


def _asked_for(
    pieces: Mapping[int, Piece],
    exchange: Exchange,
    column_bounds: np.ndarray,
    width: int,
    told: Any,
) -> dict[int, np.ndarray]:
    """For each part here, how many others need each of its columns."""
    requests = {}
    for p, x in pieces.items():
        owner = np.repeat(np.arange(exchange.parts), np.diff(x.ends))
        at = exchange.received_at(p)[owner] // width + np.arange(len(owner)) - x.ends[owner]
        requests[p] = np.zeros(exchange.between_two, np.int32)  # 0 where nothing is asked for
        requests[p][rows_of(at, width)] = np.repeat(x.wanted - column_bounds[owner] + 1, width)
    sizes = np.diff(column_bounds)
    # A request is there once for each row of a block.
    return {
        q: np.bincount(x, minlength=sizes[q] + 1)[1:] // width
        for q, x in told(exchange.back, requests).items()
    }
