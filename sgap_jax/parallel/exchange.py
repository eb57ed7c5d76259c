"""What travels between the parts of a matrix: the plan of an exchange, and its messages.

The sizes of a program are static, so messages are padded. Either one `all_to_all`, padded to the
most rows that any part sends to any other; or rounds of `ppermute`: in a round a part sends to one
part at most and receives from one at most, and pairs that exchange about as many rows share a
round. `Exchange.of` takes what sends less. JAX derives the way back (a gradient, a product with the
transpose), and that sends as much.
"""

from __future__ import annotations

import hashlib
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
      needed: [parts, parts] rows that part p (first) needs of part q.
      rounds: those of ppermute; () for all_to_all.
      width: padded rows for each pair of parts of all_to_all; 0 for ppermute.
    """

    needed: np.ndarray = field(repr=False)
    rounds: tuple[Round, ...] = field(repr=False)
    width: int

    @classmethod
    def of(cls, needed: np.ndarray, width: int = 1) -> Exchange:
        """Of the blocks of `width` rows, which stay together, that part p needs of part q."""
        needed = np.array(needed, np.int64) * width
        needed.setflags(write=False)
        parts, width = len(needed), int(needed.max(initial=0))
        found = cls(needed, _rounds(needed), 0)
        # One message to everybody at once, unless rounds send less.
        if width and sum(found.sent_by) * 1.02 >= parts * (parts - 1) * width:
            return cls(needed, (), width)
        return found

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(
            repr((self.needed.shape, self.rounds, self.width)).encode() + self.needed.tobytes()
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
    def received(self) -> int:
        """The rows of the buffer that a part receives, and of the one that it sends, padding
        included."""
        return self.width * self.parts + sum(each.rows for each in self.rounds)

    @cached_property
    def sent_by(self) -> list[int]:
        """The rows that each part sends to others, padding included."""
        if self.width:
            return [self.width * (self.parts - 1)] * self.parts
        sent = np.zeros(self.parts, np.int64)
        for rows, pairs in self.rounds:
            sent[[sender for sender, _ in pairs]] += rows
        return sent.tolist()

    @property
    def sent(self) -> int:
        """The rows that the part sends that sends most."""
        return max(self.sent_by)

    @property
    def how(self) -> str:
        """The messages, in words."""
        if not self.received:
            return "nothing travels"
        return "all_to_all" if self.width else f"{len(self.rounds)} rounds of ppermute"

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
        """[parts] where in what a part receives the rows of each owner begin."""
        if self.width:
            return np.arange(self.parts) * self.width
        return self._begins[part]

    @cached_property
    def back(self) -> Exchange:
        """The same messages the other way: what was received is sent from the same places."""
        rounds = tuple(Round(rows, tuple((q, p) for p, q in pairs)) for rows, pairs in self.rounds)
        return Exchange(np.ascontiguousarray(self.needed.T), rounds, self.width)

    def swap(self, axis: str, x: jax.Array, dimension: int = 0) -> jax.Array:
        """On each device, what the others send here, from what this one sends: both with `received`
        rows along a dimension."""
        if self.width:
            shape = x.shape
            x = x.reshape(*shape[:dimension], self.parts, self.width, *shape[dimension + 1 :])
            return jax.lax.all_to_all(x, axis, dimension, dimension).reshape(shape)
        found, begin = [], 0
        for rows, pairs in self.rounds:
            sent = jax.lax.slice_in_dim(x, begin, begin + rows, axis=dimension)
            found.append(jax.lax.ppermute(sent, axis, pairs))
            begin += rows
        return jnp.concatenate(found, axis=dimension) if found else x


def swapped(exchange: Exchange, sent: list[np.ndarray]) -> list[np.ndarray]:
    """`swap` along the first axis of NumPy arrays, those of all parts: a plan that one process
    makes needs no program for its messages."""
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


# Pairs share a round if the padding of the smaller one is at most this share of it.
_PADDING = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, np.inf)


def _rounds(needed: np.ndarray) -> tuple[Round, ...]:
    """Rounds for all pairs, from the largest down: of the least padding that needs no more than two
    rounds for each part that a part may receive from, as a round has a latency."""
    receivers, senders = np.nonzero(needed)
    order = np.argsort(-needed[receivers, senders], kind="stable")
    pairs = list(
        zip(
            needed[receivers, senders][order].tolist(),
            senders[order].tolist(),
            receivers[order].tolist(),
            strict=True,
        )
    )
    for padding in _PADDING:
        found = _packed(pairs, len(needed), padding)
        if found is not None:
            return found
    raise AssertionError("each pair meets fewer than 2 parts - 1 others, and there is a free round")


def _packed(
    pairs: list[tuple[int, int, int]], parts: int, padding: float
) -> tuple[Round, ...] | None:
    """Each pair (rows, sender, receiver) in the last round of its size in which both are free; None
    if that makes too many rounds."""
    sizes: list[int] = []
    members: list[list[tuple[int, int]]] = []
    sends, receives = [0] * parts, [0] * parts  # bits: the rounds in which a part does
    first = 0  # earlier rounds are too large
    for rows, sender, receiver in pairs:
        while first < len(sizes) and sizes[first] - rows > max(padding * rows, 1):
            first += 1
        taken = (sends[sender] | receives[receiver]) >> first
        free = ~taken & ((1 << len(sizes) - first) - 1)
        at = first + free.bit_length() - 1 if free else len(sizes)
        if at == len(sizes):
            if at == 2 * (parts - 1):
                return None
            sizes.append(rows)
            members.append([])
        members[at].append((sender, receiver))
        sends[sender] |= 1 << at
        receives[receiver] |= 1 << at
    return tuple(Round(rows, tuple(of)) for rows, of in zip(sizes, members, strict=True))
