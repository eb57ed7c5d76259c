"""Loops that store a sum over lanes in each iteration, in LLVM IR: several such sums at a time.

To add up the lanes of one vector takes more instructions than a short sum itself. The vectors of
several sums, side by side, take fewer, and one instruction stores them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sgap_jax.compiler.llvm.instructions import INT, NUMBER, Cell, Value
from sgap_jax.compiler.llvm.patterns import Apart, factored, sums_apart
from sgap_jax.compiler.llvm.statements import ROLLED
from sgap_jax.compiler.llvm.vectorize import Lanes
from sgap_jax.compiler.loop_ir.arithmetic import names_in
from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, For, Int, Search, Var
from sgap_jax.compiler.loop_ir.patterns import gathers, parts

# Sums at a time, as in cpu/sddmm/sddmm_dots.h: rows of a few entries have not many more.
_TOGETHER = 4

# Vectors of a sum, at most. Of a longer one the last additions are a small part, and of a table
# beyond a cache, four rows at a time are slower than one after the other (of 8 vectors up to 1.2x;
# of 4 vectors 0.9x to 1.0x; Zen 5).
_MOST, _MOST_FAR = 16, 4


class SumsApart(Lanes):
    def vector_loop(self, loop: For) -> None:
        if not self._by_lanes(loop):
            super().vector_loop(loop)

    def serial(self, loop: For, begin: Value, end: Value) -> None:
        plain = self.width == 1 and loop.unit is None and loop.step == 1
        found = sums_apart(loop) if plain else None
        if found is None or not self._may_group(found, loop):
            return super().serial(loop, begin, end)
        self._groups(found, loop.var, begin, end)

    def _by_lanes(self, loop: For) -> bool:
        """Lanes with sums over lanes of their own: one lane after the other, and what their vectors
        have is put together in the end. Whether the loop is of this kind."""
        found = sums_apart(loop)
        if found is None or (loop.begin, loop.step) != (Int(0), 1) or not isinstance(loop.end, Int):
            return False
        count, inner, outer = loop.end.value, found.inner, dict(self.scalars)
        if count not in (2, 4, 8) or count > self.native_lanes:
            return False
        vectors = []
        for lane in range(count):
            self._constants(found, outer | {loop.var: _int(lane)})
            begin, end = self.value(inner.begin), self.value(inner.end)
            self.width = self.native_lanes
            self.scalars[found.start.name] = cell = self._start(found)
            self._last(inner, self._whole(inner, begin, end, ROLLED), end, always=True)
            vectors.append(self.read(cell))
            self.width = 1
        self.width = self.native_lanes
        total = self.fold_each(found.op, vectors)
        self.width = count
        self._constants(found, outer | {loop.var: Value(INT, "0", stride=1)})
        self._store_each(found, total)
        self.width, self.scalars = 1, outer
        return True

    def _may_group(self, found: Apart, loop: For) -> bool:
        """Neighbours in the output, all of one number of terms: a part of a vector at least."""
        match found.inner.begin, found.inner.end:
            case Int(begin), Int(end) if self._together <= end - begin:
                terms = dataclasses.replace(loop, body=(*found.lets, *found.inner.body))
                far = any(self.is_far(self.arrays[load.array]) for load in gathers(terms))
                few = end - begin <= (_MOST_FAR if far else _MOST) * self.native_lanes
                searched = any(isinstance(part, Search) for part in parts(found.lets))
                return few and _next_to_each_other(found.store.index, loop.var) and not searched
        return False

    @property
    def _together(self) -> int:
        return min(_TOGETHER, self.native_lanes)

    def _groups(self, found: Apart, var: str, begin: Value, end: Value) -> None:
        """Whole groups, and one more of what is left."""
        count, position = self._together, self.cell(INT, begin)
        full = self.binary("-", end, _int(count - 1))
        head, body, rest, some, none = (self.fresh("group") for _ in range(5))
        self.branch(head)
        self.place(head)
        now = self.read(position)
        self.branch_if(self.binary("<", now, full).text, body, rest)
        self.place(body)
        self._group(found, var, now, None)
        self.write(position, self.binary("+", now, _int(count)))
        self.branch(head, ROLLED)
        self.place(rest)
        self.branch_if(self.binary("<", now, end).text, some, none)
        self.place(some)
        self._group(found, var, now, end)
        self.branch(none)
        self.place(none)

    def _group(self, found: Apart, var: str, now: Value, end: Value | None) -> None:
        """`end`: fewer iterations are left than a group has. The last of them stands in for those
        that are missing, which costs less than branches that are mispredicted at every short row,
        and the store leaves these out."""
        outer, each = dict(self.scalars), []
        inner, factor = factored(found.inner, found.start.name)
        for lane in range(self._together):
            place = self.binary("+", now, _int(lane))
            if end is not None and lane > 0:
                place = self.binary("min", place, self.binary("-", end, _int(1)))
            self._constants(found, outer | {var: place})
            each.append(dict(self.scalars))
        total = self.fold_each(found.op, self._vectors(found, inner, each))
        self.width = self._together
        if end is not None:
            self.mask = self._first(self.binary("-", end, now))
        self._constants(found, outer | {var: Value(INT, now.text, stride=1)})
        if factor is not None:
            total = self.binary("*", self.value(factor), total)
        self._store_each(found, total)
        self.width, self.mask, self.scalars = 1, None, outer

    def _vectors(
        self, found: Apart, inner: For, each: Sequence[Mapping[str, Value | Cell]]
    ) -> list[Value]:
        """A vector of each sum. They go on together, so that what they share is loaded once. Leaves
        the width that the vectors have."""
        assert isinstance(inner.begin, Int) and isinstance(inner.end, Int)
        begin, end, self.width = inner.begin.value, inner.end.value, self.native_lanes
        while self.width // 2 >= max(end - begin, self._together):
            self.width //= 2
        cells = [self._start(found) for _ in each]
        for at in range(begin, end, self.width):
            if end - at < self.width:
                self.mask = self._first(_int(end - at))
            for scalars, cell in zip(each, cells, strict=True):
                place = Value(INT, str(at), stride=1)
                self.scalars = {**scalars, inner.var: place, found.start.name: cell}
                self.statements(inner.body)
        self.mask = None
        return [self.read(cell) for cell in cells]

    def _constants(self, found: Apart, scalars: dict[str, Value | Cell]) -> None:
        self.scalars = scalars
        for let in found.lets:
            self.statement(let)

    def _start(self, found: Apart) -> Cell:
        return self.cell(NUMBER, self.neutral(found.op, NUMBER), True)

    def _store_each(self, found: Apart, total: Value) -> None:
        total = self.binary(found.op, self.value(found.start.value), total)
        self.store(*self.place_in(found.store.array, found.store.index), total, None, False)


def _next_to_each_other(index: Expr, var: str) -> bool:
    """The places of neighbouring iterations."""
    match index:
        case Binary("+", base, Var(name)) if var not in names_in(base):
            return name == var
    return index == Var(var)


def _int(value: int) -> Value:
    return Value(INT, str(value))
