"""CPUVector loops in LLVM IR.

Such a loop runs its body once for as many iterations as there are lanes. What lanes share stays
scalar; what differs by a constant step becomes vectors of neighbours; the rest is gathered. Where a
body has something that needs lanes one by one, the loop is a plain one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from sgap_jax.compiler.llvm.flatten_fibers import Lists
from sgap_jax.compiler.llvm.instructions import INT, NUMBER, Cell, NotVector, Value
from sgap_jax.compiler.llvm.patterns import lane_sums
from sgap_jax.compiler.llvm.statements import ROLLED, Widen
from sgap_jax.compiler.loop_ir.loopir import For, Int, Let, Var
from sgap_jax.compiler.loop_ir.patterns import gathers, only_sums

# Of the vectors that a loop over lanes holds at a time: enough to hide the latency of a
# multiply-add, and they leave registers for the operands.
MOST_VECTORS = 8


class Lanes(Lists):
    def __init__(self, index: str, accumulator: str, vector_bytes: int) -> None:
        super().__init__(index, accumulator, vector_bytes)
        self.registers = 32 if vector_bytes == 64 else 16

    def vector_loop(self, loop: For) -> None:
        state = len(self.lines), len(self.slots), self.block, dict(self.scalars)
        while True:
            try:
                return self._lanes(loop)
            except Widen as again:
                self.wide.add(again.args[0])
                plain = False
            except NotVector:
                plain = True
            del self.lines[state[0] :]
            del self.slots[state[1] :]
            self.block, self.scalars, self.width, self.mask = state[2], dict(state[3]), 1, None
            if plain:
                return self.loop(loop)

    def _lanes(self, loop: For) -> None:
        if loop.step != 1:
            raise NotVector
        sums = lane_sums(loop)
        for name in sums:
            if not isinstance(self.scalars[name], Cell):
                raise NotVector
        if isinstance(loop.begin, Int) and isinstance(loop.end, Int):
            self._constant(loop, sums, loop.begin.value, loop.end.value)
        else:
            self._any_extent(loop, sums)

    def _constant(self, loop: For, sums: dict[str, str], begin: int, end: int) -> None:
        held = max(sum(isinstance(s, Let) and s.mutable for s in loop.body), 1)
        vectors = 1 if gathers(loop) else MOST_VECTORS  # those have enough to wait for
        while vectors > 1 and vectors * held > self.registers * 3 // 4:
            vectors //= 2
        width = self.native_lanes * vectors
        if end - begin >= 2 * width:
            last = begin + (end - begin) // width * width
            with self._wide_as(width, sums):
                body = functools.partial(self.statements, loop.body)
                self.count(loop.var, _int(begin), _int(last), width, body, stride=1)
            begin = last
        walks, most = any(isinstance(s, For) for s in loop.body), width
        while begin < end:
            left = end - begin
            while width > max(left, 1):
                width //= 2
            if walks and self.native_lanes <= width < min(left, most):
                width *= 2  # lanes that idle cost less than another walk
            if width < self.native_lanes and width < left:  # not all lanes of one vector
                width *= 2
            with self._wide_as(width, sums):
                if width > left:
                    self.mask = self._first(_int(left))
                self._block(loop, _int(begin))
            begin += width

    def _any_extent(self, loop: For, sums: dict[str, str]) -> None:
        begin, end = self.value(loop.begin), self.value(loop.end)
        simple = bool(sums) and only_sums(loop)
        if simple and gathers(loop):
            return self._gathered_sums(loop, sums, begin, end)
        with self._wide_as(self.native_lanes, sums, looped=True):
            whole = self._sums if simple else self._whole
            self._last(loop, whole(loop, begin, end), end, always=simple)

    def _gathered_sums(self, loop: For, sums: dict[str, str], begin: Value, end: Value) -> None:
        """What does not fill a vector goes one by one: quicker than a gather under a mask."""
        position = self.cell(INT, begin)
        many, rest = self.fresh("many"), self.fresh("rest")
        enough = self.binary("<=", _int(self.native_lanes), self.binary("-", end, begin))
        self.branch_if(enough.text, many, rest)
        self.place(many)
        with self._wide_as(self.native_lanes, sums, looped=True):
            self.write(position, self._whole(loop, begin, end, ROLLED))
        self.branch(rest)
        self.place(rest)
        body = functools.partial(self.statements, loop.body)
        self.count(loop.var, self.read(position), end, 1, body, ROLLED)

    def _sums(self, loop: For, begin: Value, end: Value) -> Value:
        """As `_whole`; a loop that is too short for a vector is told by one branch."""
        position = self.cell(INT, begin)
        many, rest = self.fresh("many"), self.fresh("rest")
        enough = self.binary("<=", _int(self.width), self.binary("-", end, begin))
        self.branch_if(enough.text, many, rest)
        self.place(many)
        begin = self.by_chains(loop, begin, end, self.width)
        self.write(position, self._whole(loop, begin, end, ROLLED))
        self.branch(rest)
        self.place(rest)
        return self.read(position)

    def _whole(self, loop: For, begin: Value, end: Value, note: str = "") -> Value:
        """Vectors without a mask; where the rest begins."""
        position, full = self.cell(INT, begin), self.binary("-", end, _int(self.width - 1))
        head, body, rest = self.fresh("for"), self.fresh("body"), self.fresh("rest")
        self.branch(head)
        self.place(head)
        now = self.read(position)
        self.branch_if(self.binary("<", now, full).text, body, rest)
        self.place(body)
        self._block(loop, now)
        self.write(position, self.binary("+", now, _int(self.width)))
        self.branch(head, note)
        self.place(rest)
        return self.read(position)

    def _last(self, loop: For, now: Value, end: Value, always: bool) -> None:
        """The last lanes, fewer than a vector has; `always`: even if there are none."""
        some, none = self.fresh("some"), self.fresh("end")
        if always:
            self.branch(some)
        else:
            self.branch_if(self.binary("<", now, end).text, some, none)
        self.place(some)
        self.mask = self._first(self.binary("-", end, now))
        self._block(loop, now)
        self.mask = None
        self.branch(none)
        self.place(none)

    def _block(self, loop: For, begin: Value) -> None:
        before = dict(self.scalars)
        self.scalars[loop.var] = Value(INT, begin.text, stride=int(self.width > 1))
        self.statements(loop.body)
        self.scalars = before

    def _first(self, count: Value) -> str:
        return self.binary("<", Value(INT, "0", stride=1), count).text

    @contextlib.contextmanager
    def _wide_as(self, width: int, sums: dict[str, str], looped: bool = False) -> Iterator[None]:
        """Lanes, each with sums of its own, which come together at the end. What is added to once
        starts at -0, so that LLVM drops the addition; in a loop at 0, and so may the result."""
        outer = dict(self.scalars)
        self.width = width
        floats = looped and self.wrapping is None
        for name, op in sums.items():
            cell = outer[name]
            zero = floats and op == "+" and cell.kind == NUMBER
            start = self.literal(0.0) if zero else self.neutral(op, cell.kind)
            self.scalars[name] = self.cell(cell.kind, start, True)
        yield
        self.mask = None
        totals = [self.fold(op, self.value(Var(name))) for name, op in sums.items()]
        self.width, self.scalars = 1, outer
        for (name, op), total in zip(sums.items(), totals, strict=True):
            cell = outer[name]
            assert isinstance(cell, Cell)
            before = self.read(cell)
            if floats and op == "+" and cell.kind == NUMBER:
                sum = self.op(f"fadd nsz {self.number} {before.text}, {total.text}")
                self.write(cell, Value(NUMBER, sum))
            else:
                self.write(cell, self.binary(op, before, total))


def _int(value: int) -> Value:
    return Value(INT, str(value))
