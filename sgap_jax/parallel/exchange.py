"""What travels between the parts of a matrix: the plan of an exchange, its sending, and its return.

A part receives the rows that its foreign columns name, each once, from the parts that own them.
The sizes of a program are static, so what is sent is padded: `all_to_all` to the most rows that any
part sends to any other; rounds of `ppermute` (part p sends to part p + shift) each to the most rows
of that shift, and only between the pairs that have rows to send. `Exchange.of` takes the one that
sends less. `send` moves rows of any operand so; JAX derives the way back (a gradient, a product
with the transpose) from it, and that sends as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


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
        found = cls(tuple(map(tuple, needed.tolist())), shifts, 0)
        width = max(most, default=0)
        # One message to everybody at once, unless a round of ppermute is shorter or a pair idle.
        if shifts and sum(found.sent_by) == parts * (parts - 1) * width:
            return cls(found.needed, (), width)
        return found

    @property
    def parts(self) -> int:
        return len(self.needed)

    @property
    def received(self) -> int:
        """The rows of the buffer that a part receives, padding included."""
        return self.width * self.parts + sum(rows for _, rows in self.shifts)

    @property
    def sent_by(self) -> list[int]:
        """The rows that each part sends to others, padding included."""
        if self.width:
            return [self.width * (self.parts - 1)] * self.parts
        return [
            sum(rows for shift, rows in self.shifts if self.needed[(q + shift) % self.parts][q])
            for q in range(self.parts)
        ]

    @property
    def sent(self) -> int:
        """The rows that the part sends that sends most."""
        return max(self.sent_by)

    @property
    def messages(self) -> int:
        """How many asked-for row lists a part has: one for all_to_all, one for each round."""
        return 1 if self.width else len(self.shifts)

    def pairs(self, shift: int) -> list[tuple[int, int]]:
        """(sender, receiver) of the round of a shift: those with rows to send."""
        ends = [(q, (q + shift) % self.parts) for q in range(self.parts)]
        return [(q, p) for q, p in ends if self.needed[p][q]]

    def begin(self, part: int, owner: int) -> int:
        """Where in the buffer of a part the rows of an owner begin."""
        if self.width:
            return owner * self.width
        shift, begin = (part - owner) % self.parts, 0
        for each, rows in self.shifts:
            if each == shift:
                return begin
            begin += rows
        raise AssertionError("no round has this shift")

    def requests(self, part: int, rows: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """What a part asks for in each message: of rows[q], which it needs of part q, padded."""

        def padded(x: np.ndarray, size: int) -> np.ndarray:
            return np.concatenate([x, np.zeros(size - len(x))]).astype(np.int32)

        if self.width:
            return (np.stack([padded(x, self.width) for x in rows]),)
        return tuple(padded(rows[(part - shift) % self.parts], size) for shift, size in self.shifts)


def ask(exchange: Exchange, axis: str, requests: tuple) -> tuple:
    """On each device, from what it asks for, what it is asked for: the `sends` of `send`."""
    if exchange.width:
        return tuple(jax.lax.all_to_all(x, axis, 0, 0) for x in requests)
    return tuple(
        jax.lax.ppermute(x, axis, [(p, q) for q, p in exchange.pairs(shift)])
        for (shift, _), x in zip(exchange.shifts, requests, strict=True)
    )


def send(
    exchange: Exchange, axis: str, sends: tuple, x: jax.Array, dimension: int = 0
) -> jax.Array:
    """On each device, the rows of x that the other parts send here, in place of its own: x has its
    rows along `dimension`."""
    before = (slice(None),) * dimension
    if exchange.width:
        (rows,) = sends
        found = jax.lax.all_to_all(x[(*before, rows)], axis, dimension, dimension)
        return found.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 1 :])
    rounds = [
        jax.lax.ppermute(x[(*before, rows)], axis, exchange.pairs(shift))
        for (shift, _), rows in zip(exchange.shifts, sends, strict=True)
    ]
    return jnp.concatenate(rounds, axis=dimension) if rounds else x[(*before, slice(0))]
