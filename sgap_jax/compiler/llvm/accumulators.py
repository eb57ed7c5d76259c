"""Loops that sum up in vectors, in LLVM IR: several sums at a time, and what they gather asked for
ahead."""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.llvm.instructions import INT, NUMBER, Cell, NotVector, Value
from sgap_jax.compiler.llvm.memory import Elements
from sgap_jax.compiler.llvm.patterns import lane_sums
from sgap_jax.compiler.llvm.statements import ROLLED, Statements
from sgap_jax.compiler.loop_ir.loopir import Binary, For, Int, Load
from sgap_jax.compiler.loop_ir.patterns import gathers, only_sums, replaced

# Vectors that are added to in turn: those of a multiply-add (4 cycles, two a cycle) and no more,
# lest the few entries of a row be spread over sums that are to be added in the end.
_CHAINED = 8
_MOST_CHAINS = 4

# Of an array beyond a cache, elements are asked for that many iterations ahead. Both as in
# cpu/spmm/spmm_kernel.cc, where they were measured.
_FAR_BYTES = 1 << 20
_AHEAD = 32


class Sums(Statements):
    chained = True  # whether a loop may have several sums
    ahead = True  # whether it asks for what it gathers later

    def serial(self, loop: For, begin: Value, end: Value) -> None:
        if self.width == 1 or loop.step != 1 or loop.unit is not None or not only_sums(loop):
            return super().serial(loop, begin, end)
        begin = self.by_chains(loop, begin, end)
        # Rows are short: more copies of the body would mostly be branches around them.
        self.count(loop.var, begin, end, 1, lambda: self._step(loop), ROLLED)

    def _chains(self, loop: For) -> list[dict[str, Cell]]:
        """The sums of each chain; of the first, those of the loop."""
        if not self.chained:
            return []
        try:
            sums = lane_sums(loop)
        except NotVector:
            return []
        first = {name: self.scalars[name] for name in sums}
        cells = {n: c for n, c in first.items() if isinstance(c, Cell) and c.lanes == self.width}
        vectors = max(len(cells) * self.width // self.native_lanes, 1)
        if not cells or len(cells) < len(first) or any(c.kind != NUMBER for c in cells.values()):
            return []
        chains = [cells]
        for _ in range(min(_CHAINED // vectors, _MOST_CHAINS) - 1):
            chains.append(
                {
                    name: self.cell(NUMBER, self.neutral(op, NUMBER), True)
                    for name, op in sums.items()
                }
            )
        return chains

    def by_chains(self, loop: For, begin: Value, end: Value, lanes: int = 1) -> Value:
        """As many iterations as there are chains at a time, each of them `lanes`; returns where the
        rest begins."""
        chains = self._chains(loop)
        if len(chains) < 2:
            return begin
        count, each = len(chains), len(chains) * lanes
        position = self.cell(INT, begin)
        many, body, fold, rest = (self.fresh("chains") for _ in range(4))
        most = each if lanes > 1 else 4 * count
        enough = self.binary("<=", Value(INT, str(most)), self.binary("-", end, begin))
        self.branch_if(enough.text, many, rest)
        self.place(many)
        full = self.binary("-", end, Value(INT, str(each - 1)))
        self.branch(body)
        self.place(body)
        now = self.read(position)
        outer = dict(self.scalars)
        for i, chain in enumerate(chains):
            self.scalars |= chain
            place = self.binary("+", now, Value(INT, str(i * lanes)))
            self.scalars[loop.var] = dataclasses.replace(place, stride=int(lanes > 1))
            self._step(loop)
        self.scalars = outer
        after = self.binary("+", now, Value(INT, str(each)))
        self.write(position, after)
        self.branch_if(self.binary("<", after, full).text, body, fold, ROLLED)
        self.place(fold)
        ops = lane_sums(loop)
        for chain in chains[1:]:
            for name, cell in chain.items():
                total = chains[0][name]
                self.write(total, self.binary(ops[name], self.read(total), self.read(cell)))
        self.branch(rest)
        self.place(rest)
        return self.read(position)

    def is_far(self, array: Elements) -> bool:
        return array.count // array.parts * array.size > _FAR_BYTES

    def _step(self, loop: For) -> None:
        if self.ahead:
            self.ask(loop, _AHEAD)
        self.statements(loop.body)

    def ask(self, loop: For, ahead: int) -> None:
        """For what the body gathers, but for loops in it, so many iterations later."""
        for load, inner in gathers(loop).items():
            array, places = self.arrays[load.array], self.arrays[inner.array]
            if not self.is_far(array) or places.kind != INT:
                continue
            later = Binary("+", inner.index, Int(ahead))
            there = Load(inner.array, Binary("min", later, Int(places.count - 1)))
            index = self.value(replaced(load.index, inner, there))
            if index.stride == 1:
                self.prefetch(array, index)
