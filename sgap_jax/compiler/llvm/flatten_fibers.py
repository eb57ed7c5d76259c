"""Short fibers in LLVM IR: the nest over them flat (flatten.py), and the lists that it reads."""

from __future__ import annotations

from collections.abc import Sequence

from sgap_jax.compiler.llvm.accumulators import Sums
from sgap_jax.compiler.llvm.fiber_nest import ORIGIN, Listed, Parent, list_name, listed
from sgap_jax.compiler.llvm.instructions import Value
from sgap_jax.compiler.llvm.memory import Elements
from sgap_jax.compiler.llvm.statements import ROLLED
from sgap_jax.compiler.loop_ir.arithmetic import ONE, add, multiply
from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, For, Int, Let, Load, Var
from sgap_jax.compiler.loop_ir.patterns import replaced

# Positions of a list: it stays in the L1 cache.
_LISTED = 2048

# Fibers with fewer entries than this, in the mean over a task's rows, are walked flat. A list costs
# a store for each fiber and an operand more for each entry; a loop costs a branch that is often
# mispredicted. Measured on fibers of random lengths (Zen 5, ranks 16 to 64), both take the same
# time at a mean of 10 to 14.
_SHORT = 8

# The branches of so few fibers are learned when the loops run again and again, as those of a
# decomposition do: the nest is quicker then (0.75x on one thread, Zen 5). A thread learns 12,000 of
# random lengths and not 16,000, but two have a half each, the same one in every call.
_LEARNED = 16384


# Vectors of a row from which a loop over a fiber, inside of one over fibers, asks for rows ahead.
# Measured on short fibers and tables of 1 to 64 MB: 0.95x with one or two vectors, 1.05x with four.
_WORTH_ASKING = 4

# And that loop over fibers asks for rows of its own so many ahead. On fibers of two entries in the
# mean: 0.95x with tables of 3 MB, 0.93x of 16 and 64 MB, 0.7x where rows have eight vectors (Zen 5,
# one thread).
_FIBERS_AHEAD = 8


class Lists(Sums):
    def serial(self, loop: For, begin: Value, end: Value) -> None:
        if self.width > 1 and any(isinstance(s, For) for s in loop.body):
            return self._nest(loop, begin, end)
        found = listed(loop) if self.width == 1 and loop.unit is None else None
        if found is None or self._fibers(found) <= _LEARNED:
            return super().serial(loop, begin, end)
        scalars, arrays = dict(self.scalars), dict(self.arrays)
        flat, nested, done = (self.fresh(name) for name in ("flat", "nested", "done"))
        self.branch_if(self.value(_are_short(found)).text, flat, nested)
        self.place(flat)
        self._lists(found)
        self.chained = False  # rows are short too
        super().serial(found.loop, begin, end)
        self.chained = True
        self.scalars, self.arrays = scalars, arrays
        self.branch(done)
        self.place(nested)
        super().serial(loop, begin, end)
        self.branch(done)
        self.place(done)

    def _nest(self, loop: For, begin: Value, end: Value) -> None:
        before, self.ahead = self.ahead, self.width >= _WORTH_ASKING * self.native_lanes

        def body() -> None:
            if self.ahead:
                self.ask(loop, _FIBERS_AHEAD)
            self.statements(loop.body)

        try:
            self.count(loop.var, begin, end, loop.step, body, self.note(loop))
        finally:
            self.ahead = before

    def _fibers(self, found: Listed) -> int:
        """How many the operand has room for."""
        match found.parents[-1].children:
            case Load(offsets, _):
                return self.arrays[offsets].count - 1
        return 0

    def _lists(self, found: Listed) -> None:
        size = _LISTED + self.native_lanes
        for parent in found.parents:
            if parent.scalar is not None:
                pointer = self.place_workspace(size)
                self.arrays[list_name(parent.scalar)] = Elements(pointer, "int32", size, True)
        self.statement(Let(ORIGIN, found.below(found.begin, len(found.parents))))
        self._fill(found.begin, found.end, found.parents, ())

    def _fill(
        self, begin: Expr, end: Expr, parents: Sequence[Parent], above: Sequence[Parent]
    ) -> None:
        """The positions of the first of `parents`, and all below; `above` are done."""
        first, last = self.value(begin), self.value(end)
        if not parents:
            return self._fill_fiber(first, last, above)
        parent, rest = parents[0], parents[1:]

        def each() -> None:
            if parent.scalar is not None:
                self.statement(Let(parent.scalar, Load(parent.coordinates, Var(parent.var))))
            follow = replaced(parent.children, Var(parent.var), add(Var(parent.var), ONE))
            self._fill(parent.children, follow, rest, (*above, parent))

        self.count(parent.var, first, last, 1, each, ROLLED)

    def _fill_fiber(self, first: Value, last: Value, parents: Sequence[Parent]) -> None:
        """Vectors, whole: what is beyond the fiber is of the next one, which comes later. The first
        one always, as most fibers have no other, so that the branch after it is well predicted."""
        place = self.binary("-", first, self.value(Var(ORIGIN)))
        stop = self.binary("-", last, self.value(Var(ORIGIN)))
        values = {
            list_name(parent.scalar): self.value(Var(parent.scalar))
            for parent in parents
            if parent.scalar is not None
        }

        def vectors(at: Value) -> None:
            self.width = self.native_lanes
            for name, value in values.items():
                to = Value(at.kind, at.text, stride=1)
                self.store(self.arrays[name], to, value, None, False)
            self.width = 1

        vectors(place)
        lanes = self.native_lanes
        more = self.binary("+", place, Value(place.kind, str(lanes)))
        self.count("listed", more, stop, lanes, lambda: vectors(self.value(Var("listed"))), ROLLED)


def _are_short(found: Listed) -> Expr:
    """Whether a list holds all the positions, and fibers have few entries."""
    depth = len(found.parents)
    fibers, entries = (
        Binary("-", found.below(found.end, levels), found.below(found.begin, levels))
        for levels in (depth - 1, depth)
    )
    fits = Binary("<=", entries, Int(_LISTED))
    short = Binary("<", entries, multiply(fibers, Int(_SHORT)))
    return Binary("and", found.some, Binary("and", fits, short))
