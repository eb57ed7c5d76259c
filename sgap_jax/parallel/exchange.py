"""What travels between the parts of a matrix: the plan of an exchange, and its messages.

Rows that (nearly) all parts need, those of a global token for example, may go to all at once, by an
all-reduce to which their owners alone add something: each device sends about two rows for each.

The sizes of a program are static, so messages are padded. Either one `all_to_all`, padded to the
most rows that any part sends to any other; or rounds of `ppermute`: in a round a part sends to one
part at most and receives from one at most, and pairs that exchange about as many rows share a
round. `Exchange.of` takes what sends less. JAX derives the way back (a gradient, a product with the
transpose), and that sends as much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Round(NamedTuple):
    """One ppermute: padded rows, and the (sender, receiver) pairs."""

    rows: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Exchange:
    """What each part sends: static, and shared by all devices. Equal if the contents are, which are
    hashed once: every call of a compiled function compares its static arguments.

    Attributes:
      needed: [parts, parts] rows that part p (first) needs of part q, but for those that go to all.
      rounds: those of ppermute; () for all_to_all.
      width: padded rows for each pair of parts of all_to_all; 0 for ppermute.
      to_all: the rows of each part that go to all others; () for none.
    """

    needed: np.ndarray = field(repr=False)
    rounds: tuple[Round, ...] = field(repr=False)
    width: int
    to_all: tuple[int, ...] = ()

    @classmethod
    def of(cls, needed: np.ndarray, width: int = 1, to_all: Sequence[int] = ()) -> Exchange:
        """Of the blocks of `width` rows, which stay together, that part p needs of part q, and of
        those of each part that go to all."""
        needed = np.array(needed, np.int64) * width
        needed.setflags(write=False)
        shared = tuple(int(x) * width for x in to_all) if any(to_all) else ()
        width = int(needed.max(initial=0))
        found = cls(needed, _rounds(needed), 0, shared)
        # One message to everybody at once, unless rounds send less.
        at_once = cls(needed, (), width, shared)
        return at_once if width and found.total * 1.02 >= at_once.total else found

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(
            repr((self.needed.shape, self.rounds, self.width, self.to_all)).encode()
            + self.needed.tobytes()
        ).digest()

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Exchange) and self._digest == other._digest

    @property
    def parts(self) -> int:
        return len(self.needed)

    @property
    def between_two(self) -> int:
        """The rows of the buffer for what goes from one part to one other, padding included: first
        in what a part sends, and in what it receives."""
        return self.width * self.parts + sum(each.rows for each in self.rounds)

    @property
    def received(self) -> int:
        """The rows of the buffer that a part sends, and of the one that it receives, padding
        included: those between two, and then those that go to all."""
        return self.between_two + sum(self.to_all)

    def shared_at(self, part: int) -> int:
        """Where in these buffers the rows of a part that go to all begin."""
        return self.between_two + sum(self.to_all[:part])

    @property
    def owner_of_shared(self) -> np.ndarray:
        """The part that has each of the rows that go to all."""
        return np.repeat(np.arange(self.parts, dtype=np.int32), self.to_all)

    @cached_property
    def sent_by(self) -> list[int]:
        """The rows that each part sends to others, padding included: of an all-reduce those of its
        two halves, a reduce-scatter and an all-gather in a ring."""
        to_all = -(-2 * sum(self.to_all) * (self.parts - 1) // self.parts)
        if self.width:
            return [self.width * (self.parts - 1) + to_all] * self.parts
        sent = np.full(self.parts, to_all, np.int64)
        for rows, pairs in self.rounds:
            sent[[sender for sender, _ in pairs]] += rows
        return sent.tolist()

    @property
    def sent(self) -> int:
        """The rows that the part sends that sends most."""
        return max(self.sent_by)

    @property
    def needed_of_others(self) -> np.ndarray:
        """[parts, parts] rows that part p (first) needs of part q, also those that go to all."""
        to_all = np.array(self.to_all or (0,) * self.parts)
        return self.needed + to_all * (1 - np.eye(self.parts, dtype=np.int64))

    @property
    def total(self) -> int:
        """The rows that all parts send."""
        return sum(self.sent_by)

    @property
    def how(self) -> str:
        """The messages, in words."""
        found = ["all_to_all"] if self.width else []
        found += [f"{len(self.rounds)} rounds of ppermute"] if self.rounds else []
        if self.to_all:
            found.append(f"one all-reduce of {sum(self.to_all):,} rows")
        return " and ".join(found) or "nothing travels"

    @cached_property
    def _begins(self) -> np.ndarray:
        """[parts, parts] where the rows that a part (first) needs of another begin in the buffers
        of rounds, which are the same where they are sent and where they are received."""
        begins, begin = np.zeros((self.parts, self.parts), np.int64), 0
        for rows, pairs in self.rounds:
            for sender, receiver in pairs:
                begins[receiver, sender] = begin
            begin += rows
        return begins

    def received_at(self, part: int) -> np.ndarray:
        """[parts] where in what a part receives the rows of each owner begin, that are for it."""
        if self.width:
            return np.arange(self.parts) * self.width
        return self._begins[part]

    @cached_property
    def back(self) -> Exchange:
        """The messages between two the other way: what was received is sent from the same
        places."""
        rounds = tuple(Round(rows, tuple((q, p) for p, q in pairs)) for rows, pairs in self.rounds)
        return Exchange(np.ascontiguousarray(self.needed.T), rounds, self.width)

    def swap(self, axis: str, x: jax.Array, dimension: int = 0) -> jax.Array:
        """On each device, what the others send here, from what this one sends: both with `received`
        rows along a dimension."""
        return self.joined(self.messages(axis, x, dimension), dimension)

    def messages(self, axis: str, x: jax.Array, dimension: int = 0) -> list[jax.Array]:
        """What `swap` puts together: of all_to_all one array, else one for each round; and one of
        what goes to all."""
        ends = [*np.cumsum([each.rows for each in self.rounds]).tolist(), self.between_two]
        *sent, to_all = jnp.split(x, ends, axis=dimension)
        if self.width:
            shape = sent[0].shape
            each = (*shape[:dimension], self.parts, self.width, *shape[dimension + 1 :])
            found = jax.lax.all_to_all(sent[0].reshape(each), axis, dimension, dimension)
            received = [found.reshape(shape)]
        else:
            received = [
                jax.lax.ppermute(message, axis, pairs)
                for message, (_, pairs) in zip(sent, self.rounds, strict=False)
            ]
        if self.to_all:
            received.append(self._to_all(axis, to_all, dimension))
        return received or [x]

    @staticmethod
    def joined(messages: list[jax.Array], dimension: int = 0) -> jax.Array:
        return messages[0] if len(messages) == 1 else jnp.concatenate(messages, axis=dimension)

    def _to_all(self, axis: str, x: jax.Array, dimension: int) -> jax.Array:
        mine = jax.lax.expand_dims(
            self.owner_of_shared == jax.lax.axis_index(axis),
            [i for i in range(x.ndim) if i != dimension],
        )
        # The sum of one number and zeros: exact, but that a zero may lose its sign.
        one = jnp.where(mine, x, jnp.zeros_like(x))
        if x.dtype == bool:
            return jax.lax.psum(one.astype(jnp.int8), axis).astype(bool)
        return jax.lax.psum(one, axis)


def swapped(exchange: Exchange, sent: list[np.ndarray]) -> list[np.ndarray]:
    """`swap` along the first axis of NumPy arrays, those of all parts: a plan that one process
    makes needs no program for its messages."""
    assert not exchange.to_all
    if exchange.width:
        shape = (exchange.parts, exchange.width, *sent[0].shape[1:])
        blocks = np.stack([x.reshape(shape) for x in sent]).swapaxes(0, 1)
        return [x.reshape(sent[0].shape) for x in blocks]
    received, begin = [np.zeros_like(x) for x in sent], 0
    for rows, pairs in exchange.rounds:
        for sender, receiver in pairs:
            received[receiver][begin : begin + rows] = sent[sender][begin : begin + rows]
        begin += rows
    return received


# Messages are padded by at most this share of what is needed, and there are at most so many rounds
# for each part that a part may receive from, as a round has a latency.
_PADDING, _ROUNDS = 0.1, 4


def _rounds(needed: np.ndarray) -> tuple[Round, ...]:
    """Rounds for all pairs, from the largest down. Pairs of about one size make a class, whose rows
    are those of its largest pair, and a class as many rounds as the part that sends or receives
    most in it has pairs (Koenig's theorem on the edges of a bipartite graph)."""
    receivers, senders = np.nonzero(needed)
    rows = needed[receivers, senders]
    if not len(rows):
        return ()
    found: list[Round] = []
    smaller = 0
    for size in _classes(rows, senders, receivers, len(needed)):
        of = (rows > smaller) & (rows <= size)
        pairs = list(zip(senders[of].tolist(), receivers[of].tolist(), strict=True))
        found += [Round(size, tuple(x)) for x in _matchings(pairs, len(needed))]
        smaller = size
    return tuple(reversed(found))


def _classes(rows: np.ndarray, senders: np.ndarray, receivers: np.ndarray, parts: int) -> list[int]:
    """The largest size of each class, ascending. Of all ways to cut (up to 64) sizes into ranges,
    by dynamic programming: the one of the smallest buffer, which is as long as all rounds together,
    whose padding is small enough."""
    sizes = np.unique(rows)
    if len(sizes) > 64:
        some = np.quantile(rows, np.linspace(0, 1, 32), method="higher")
        even = sizes[np.searchsorted(sizes, np.geomspace(sizes[0], sizes[-1], 32)[:-1])]
        sizes = np.unique(np.concatenate([some, even, sizes[-1:]]).astype(np.int64))
    count, at = len(sizes), np.searchsorted(sizes, rows)
    # Up to each size: the pairs of each sender and of each receiver, of all, and their rows.
    ends = np.zeros((count + 1, 2 * parts), np.int64)
    np.add.at(ends, (at + 1, senders), 1)
    np.add.at(ends, (at + 1, parts + receivers), 1)
    ends = ends.cumsum(0)
    pairs = np.append(0, np.bincount(at, minlength=count).cumsum())
    useful = np.append(0, np.bincount(at, rows, count).cumsum())
    # Of the class of the sizes [i : j], for each j and all i < j.
    rounds = [(ends[j] - ends[:j]).max(1) for j in range(count + 1) if j]
    padding = [
        sizes[j - 1] * (pairs[j] - pairs[:j]) - (useful[j] - useful[:j])
        for j in range(1, count + 1)
    ]
    best, least = [int(sizes[-1])], np.inf  # one class needs fewest rounds
    for weight in (0, *np.geomspace(0.25, 1024, 25) / parts):  # of padding beside the buffer
        cost, begin = np.zeros(count + 1), np.zeros(count + 1, int)
        for j in range(1, count + 1):
            each = cost[:j] + sizes[j - 1] * rounds[j - 1] + weight * padding[j - 1]
            begin[j] = np.argmin(each)
            cost[j] = each[begin[j]]
        found, j, padded, taken = [], count, 0.0, 0
        while j:
            i = begin[j]
            found.append(int(sizes[j - 1]))
            padded, taken = padded + padding[j - 1][i], taken + rounds[j - 1][i]
            j = i
        if padded < least and taken <= _ROUNDS * (parts - 1):
            best, least = found[::-1], padded
        if least <= _PADDING * useful[-1]:
            break
    return best


def _matchings(pairs: list[tuple[int, int]], parts: int) -> list[list[tuple[int, int]]]:
    """The (sender, receiver) pairs in rounds in which each sends once at most and receives once at
    most, as many as the pairs of the part that has most. Where no round is free on both sides, the
    pairs along a path of two rounds change places."""
    degree = max(np.bincount([x[side] for x in pairs], minlength=parts).max() for side in (0, 1))
    free = [[(1 << int(degree)) - 1] * parts for _ in range(2)]  # bits: of senders, of receivers
    partner = [[[-1] * int(degree) for _ in range(parts)] for _ in range(2)]
    for sender, receiver in pairs:
        both = free[0][sender] & free[1][receiver]
        if both:
            at = _lowest(both)
        else:
            at, other = _lowest(free[0][sender]), _lowest(free[1][receiver])
            path, side, part, step = [], 1, receiver, at
            while (next_part := partner[side][part][step]) >= 0:
                path.append((part, next_part, step) if side == 0 else (next_part, part, step))
                side, part, step = 1 - side, next_part, at + other - step
            for x, y, step in path:
                partner[0][x][step] = partner[1][y][step] = -1
            for x, y, step in path:
                step = at + other - step
                partner[0][x][step], partner[1][y][step] = y, x
            swap = 1 << at | 1 << other
            free[1][receiver] ^= swap
            free[side][part] ^= swap
        partner[0][sender][at], partner[1][receiver][at] = receiver, sender
        free[0][sender] &= ~(1 << at)
        free[1][receiver] &= ~(1 << at)
    return [
        [(x, partner[0][x][at]) for x in range(parts) if partner[0][x][at] >= 0]
        for at in range(int(degree))
    ]


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
