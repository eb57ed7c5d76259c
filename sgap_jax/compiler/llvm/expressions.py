"""Expressions of the loop IR in LLVM IR, of one lane or of many at a time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from sgap_jax.compiler.llvm.instructions import INT, TRUTH, Cell, NotVector, Value
from sgap_jax.compiler.llvm.memory import Elements, Memory
from sgap_jax.compiler.loop_ir.arithmetic import ZERO, add
from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, Float, Int, Load, Search, Select, Var
from sgap_jax.compiler.loop_ir.patterns import pure


class Expressions(Memory):
    def __init__(self, index: str, accumulator: str, vector_bytes: int) -> None:
        super().__init__(index, accumulator, vector_bytes)
        self.arrays: dict[str, Elements] = {}
        self.scalars: dict[str, Value | Cell] = {}

    def value(self, expr: Expr) -> Value:
        match expr:
            case Int(value):
                return Value(INT, str(value))
            case Float(value):
                return self.literal(value)
            case Var(name):
                found = self.scalars[name]
                return self.read(found) if isinstance(found, Cell) else found
            case Load(array, index):
                return self.load(*self.place_in(array, index))
            case Binary("and" | "or", _, _):
                return self._logic(expr)
            case Binary(op, left, right):
                return self.binary(op, self.value(left), self.value(right))
            case Select(condition, yes, no):
                return self._select(self.value(condition), yes, no)
            case Search():
                return self._search(expr)

    def place_in(self, array: str, index: Expr) -> tuple[Elements, Value]:
        """An array and a place in it, or a part of it and a place in that: its pointer stays the
        same in the loops within, where the place is as in an array without parts."""
        found = self.arrays[array]
        if found.parts > 1:
            part, rest = _first_addends(index, found.count // found.parts)
            # Where an extent is 1, a gathered coordinate is multiplied by as much.
            if part != ZERO and (place := self.value(part)).uniform:
                return dataclasses.replace(found, pointer=self._at(found, place)), self.value(rest)
        return found, self.value(index)

    def _logic(self, expr: Binary) -> Value:
        left = self.value(expr.left)
        no = Value(TRUTH, "false" if expr.op == "and" else "true")
        if pure(expr.right):
            right = self.value(expr.right)
            lanes = max(left.lanes, right.lanes)
            a, b = (v.text if lanes == 1 else self.spread(v) for v in (left, right))
            return Value(TRUTH, self.op(f"{expr.op} {self.type(TRUTH, lanes)} {a}, {b}"), lanes)
        where = left if expr.op == "and" else self.invert(left)
        return self._choice(where, lambda: self.value(expr.right), lambda: no)

    def _select(self, test: Value, yes: Expr, no: Expr) -> Value:
        if not (pure(yes) and pure(no)):
            return self._choice(test, lambda: self.value(yes), lambda: self.value(no))
        sides = [self.value(yes), self.value(no)]
        lanes = 1 if all(value.uniform for value in (test, *sides)) else self.width
        each = (v.text if lanes == 1 else self.spread(v) for v in (test, *sides))
        (which, first, second), kind = each, sides[0].kind
        text = self.choose(TRUTH, which, self.type(kind, lanes), first, second, lanes)
        return Value(kind, text, lanes)

    def _choice(self, test: Value, yes: Callable[[], Value], no: Callable[[], Value]) -> Value:
        """One side, or in vectors each side in its lanes, where there are any."""
        if not test.uniform:
            first = self._side(self.both(self.mask, test.text), yes)
            second = self._side(self.both(self.mask, self.invert(test).text), no)
            type = self.type(first.kind, self.width)
            text = self.choose(TRUTH, test.text, type, first.text, second.text, self.width)
            return Value(first.kind, text, self.width)
        then, other, end = self.fresh("then"), self.fresh("else"), self.fresh("end")
        self.branch_if(test.text, then, other)
        ends = []
        for label, side in ((then, yes), (other, no)):
            self.place(label)
            ends.append((side(), self.block, len(self.lines)))
            self.branch(end)
        lanes = 1 if all(value.uniform for value, _, _ in ends) else self.width
        parts = []
        for value, block, stop in reversed(ends):  # the later one moves the lines of none
            rest, self.lines[stop:] = self.lines[stop:], []
            text = value.text if lanes == 1 else self.spread(value)
            self.lines += rest
            parts.append(f"[ {text}, %{block} ]")
        self.place(end)
        text = self.op(f"phi {self.type(value.kind, lanes)} {', '.join(parts)}")
        return Value(value.kind, text, lanes)

    def _side(self, mask: str, side: Callable[[], Value]) -> Value:
        inside, end, before = self.fresh("some"), self.fresh("end"), self.block
        self.branch_if(self.any_lane(mask), inside, end)
        self.place(inside)
        with self.masked(mask):
            value = side()
            text = self.spread(value)
        last = self.block
        self.branch(end)
        self.place(end)
        type = self.type(value.kind, self.width)
        text = self.op(f"phi {type} [ {text}, %{last} ], [ zeroinitializer, %{before} ]")
        return Value(value.kind, text, self.width)

    def _search(self, expr: Search) -> Value:
        """Bisection; `low` holds array[low] <= target, and `high` is beyond."""
        low, high, target = self.value(expr.low), self.value(expr.high), self.value(expr.target)
        if not (low.uniform and high.uniform and target.uniform):
            raise NotVector
        type = self.type(INT)
        bottom, size = self.cell(INT, low), self.cell(INT, self.binary("-", high, low))
        head, body, end = self.fresh("search"), self.fresh("halve"), self.fresh("found")
        self.branch(head)
        self.place(head)
        left = self.read(size)
        self.branch_if(self.binary(">", left, Value(INT, "1")).text, body, end)
        self.place(body)
        half = Value(INT, self.op(f"lshr {type} {left.text}, 1"))
        at = self.read(bottom)
        middle = self.binary("+", at, half)
        below = self.binary("<=", self.load(self.arrays[expr.array], middle), target)
        self.write(
            bottom, Value(INT, self.choose(TRUTH, below.text, type, middle.text, at.text, 1))
        )
        self.write(size, self.binary("-", left, half))
        self.branch(head)
        self.place(end)
        return self.read(bottom)

    @contextlib.contextmanager
    def masked(self, mask: str | None) -> Iterator[None]:
        before, self.mask = self.mask, mask
        yield
        self.mask = before

    def cell(self, kind: str, value: Value, wide: bool = False) -> Cell:
        lanes = self.width if wide else 1
        pointer = self.slot(self.type(kind, lanes))
        cell = Cell(kind, pointer, lanes)
        text = self.spread(value) if wide else value.text
        self.emit(f"store {self.type(kind, lanes)} {text}, ptr {pointer}")
        return cell


def _first_addends(index: Expr, size: int) -> tuple[Expr, Expr]:
    """What is before the rest of a sum: numbers of parts, times how long these are."""
    match index:
        case Binary("+", first, rest):
            part, left = _first_addends(first, size)
            if left != ZERO:
                return part, add(left, rest)
            more, left = _first_addends(rest, size)
            return add(part, more), left
        case Binary("*", Var(), Int(length)) if length >= size:
            return index, ZERO
    return ZERO, index
