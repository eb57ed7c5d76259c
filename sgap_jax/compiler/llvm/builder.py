"""Statements and expressions of the loop IR as LLVM IR, in one lane or in several at once.

In a vectorized loop, what is written runs in `width` lanes. A value that they share stays a scalar;
a branch or a `while` loop that they take differently runs under a mask. How a `for` loop is written
is up to strategies (loops.py): functions (builder, loop) -> bool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sgap_jax.compiler.llvm import memory
from sgap_jax.compiler.llvm.instructions import (
    INDEX,
    SERIAL,
    SERIAL_NODES,
    TRUTH,
    UNROLLED,
    Cell,
    Instructions,
    Value,
    constant,
)
from sgap_jax.compiler.llvm.memory import Elements
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.arithmetic import ZERO, add
from sgap_jax.compiler.loop_ir.loopir import (
    Binary,
    Expr,
    Float,
    For,
    If,
    Int,
    Let,
    Load,
    Search,
    Select,
    Set,
    Stmt,
    Store,
    Var,
    While,
)
from sgap_jax.compiler.loop_ir.patterns import parts, pure

Strategy = Callable[["Builder", For], bool]

# Workspaces of a kernel that together are no larger are on the stack, which others use as well.
_STACK_BYTES = 32 << 10


class NotVector(Exception):
    """The body of a loop has something that lanes cannot do together."""


class Widen(Exception):
    """A mutable scalar that was taken to be the same in all lanes is not."""

    def __init__(self, name: str) -> None:
        self.name = name


class _BoundsDiffer(Exception):
    """A loop begins or ends at another place in each lane."""


class Builder(Instructions):
    """Writes the statements of one kernel of a function.

    Attributes:
      arrays: by their names in the loop IR, workspaces included.
      scalars: loop variables and what `Let` names, where they are in scope.
      wide: mutable scalars that differ from lane to lane.
      strategies: each writes a loop and returns True, or writes nothing and returns False.
      several_accumulators: whether loops may have them now (accumulators.py).
      prefetches: whether loops over entries prefetch now what they gather (prefetch.py).
      streamed: the array, if any, that the kernel clears past the caches (stream_fill.py).
      scratch: bytes of the workspaces that are not on the stack.
    """

    def __init__(
        self, function: loopir.Function, vector_bytes: int, strategies: Sequence[Strategy]
    ) -> None:
        super().__init__(function.index, function.accumulator, vector_bytes)
        self.arrays = {
            a.name: Elements(f'%"{a.name}"', a.dtype, a.size, a.is_index, a.parts)
            for a in (*function.inputs, *function.outputs)
        }
        self.scalars: dict[str, Value | Cell] = {}
        self.wide: set[str] = set()
        self.strategies = strategies
        self.several_accumulators = True
        self.prefetches = True
        self.streamed: Elements | None = None
        self.scratch = 0
        self._stack = 0
        self._accumulator = function.accumulator

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Names of scalars that are given within mean afterwards what they did before."""
        before = dict(self.scalars)
        try:
            yield
        finally:
            self.scalars = before

    # Expressions.

    def value(self, expr: Expr) -> Value:
        match expr:
            case Int(value):
                return constant(value)
            case Float(value):
                return self.literal(value)
            case Var(name):
                found = self.scalars[name]
                return self.read(found) if isinstance(found, Cell) else found
            case Load(array, index):
                return memory.load(self, *self.element(array, index))
            case Binary("and" | "or", _, _):
                return self._logic(expr)
            case Binary(op, left, right):
                return self.binary(op, self.value(left), self.value(right))
            case Select(condition, yes, no):
                return self._select(self.value(condition), yes, no)
            case Search():
                return self._search(expr)

    def element(self, array: str, index: Expr) -> tuple[Elements, Value]:
        """An array and a place in it. Of an array with parts, the part and the place in that: the
        pointer to the part stays the same in the loops within."""
        found = self.arrays[array]
        if found.parts > 1:
            part, rest = _split_index(index, found.count // found.parts)
            # Where an extent is 1, a gathered coordinate is multiplied by as much as a part has.
            if part != ZERO and (place := self.value(part)).uniform:
                pointer = memory.address(self, found, place)
                return dataclasses.replace(found, pointer=pointer), self.value(rest)
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
        return Value(kind, self.choose(which, self.type(kind, lanes), first, second, lanes), lanes)

    def _choice(self, test: Value, yes: Callable[[], Value], no: Callable[[], Value]) -> Value:
        """The value of one side, of which only that is evaluated. Where lanes choose differently,
        each side is evaluated in its lanes, if there are any."""
        if not test.uniform:
            first = self._side(self.both(self.mask, test.text), yes)
            second = self._side(self.both(self.mask, self.invert(test).text), no)
            type = self.type(first.kind, self.width)
            text = self.choose(test.text, type, first.text, second.text, self.width)
            return Value(first.kind, text, self.width)
        then, other, end = self.fresh("then"), self.fresh("else"), self.fresh("end")
        self.branch_if(test.text, then, other)
        sides = []  # each value, its last block and where the lines of that end
        for label, side in ((then, yes), (other, no)):
            self.start_block(label)
            sides.append((side(), self.block, len(self.lines)))
            self.branch(end)
        lanes = 1 if all(value.uniform for value, _, _ in sides) else self.width
        incoming = []
        for value, block, stop in reversed(sides):  # from the end, so that `stop` stays right
            rest, self.lines[stop:] = self.lines[stop:], []
            text = value.text if lanes == 1 else self.spread(value)
            self.lines += rest
            incoming.append(f"[ {text}, %{block} ]")
        self.start_block(end)
        text = self.op(f"phi {self.type(value.kind, lanes)} {', '.join(incoming)}")
        return Value(value.kind, text, lanes)

    def _side(self, mask: str, side: Callable[[], Value]) -> Value:
        inside, end, before = self.fresh("some"), self.fresh("end"), self.block
        self.branch_if(self.any_lane(mask), inside, end)
        self.start_block(inside)
        with self.in_lanes(self.width, mask):
            value = side()
            text = self.spread(value)
        last = self.block
        self.branch(end)
        self.start_block(end)
        type = self.type(value.kind, self.width)
        text = self.op(f"phi {type} [ {text}, %{last} ], [ zeroinitializer, %{before} ]")
        return Value(value.kind, text, self.width)

    def _search(self, expr: Search) -> Value:
        """Bisection of `size` elements from `low` on, where array[low] <= target."""
        low, high, target = self.value(expr.low), self.value(expr.high), self.value(expr.target)
        if not (low.uniform and high.uniform and target.uniform):
            raise NotVector
        type = self.type(INDEX)
        bottom, size = self.cell(INDEX, low), self.cell(INDEX, self.binary("-", high, low))
        head, body, end = self.fresh("search"), self.fresh("halve"), self.fresh("found")
        self.branch(head)
        self.start_block(head)
        left = self.read(size)
        self.branch_if(self.binary(">", left, constant(1)).text, body, end)
        self.start_block(body)
        half = Value(INDEX, self.op(f"lshr {type} {left.text}, 1"))
        at = self.read(bottom)
        middle = self.binary("+", at, half)
        below = self.binary("<=", memory.load(self, self.arrays[expr.array], middle), target)
        self.write(bottom, Value(INDEX, self.choose(below.text, type, middle.text, at.text, 1)))
        self.write(size, self.binary("-", left, half))
        self.branch(head)
        self.start_block(end)
        return self.read(bottom)

    # Statements.

    def statements(self, body: Sequence[Stmt]) -> None:
        """A body, whose scalars end with it."""
        with self.scope():
            for statement, following in zip(body, (*body[1:], None), strict=False):
                if isinstance(statement, loopir.Workspace):
                    self._workspace(statement, following)
                else:
                    self.statement(statement)

    def statement(self, statement: Stmt) -> None:
        match statement:
            case Let(name, value, mutable):
                found = self.value(value)
                wide = name in self.wide or not found.uniform
                self.scalars[name] = self.cell(found.kind, found, wide) if mutable else found
            case Set(name, value):
                self._set(name, self.value(value))
            case For(unit=loopir.GPU_BLOCK | loopir.GPU_WARP | loopir.GPU_THREAD as unit):
                raise NotImplementedError(f"llvm: a {unit} loop does not run on a CPU")
            case For():
                self.loop(statement)
            case While(condition, body):
                self._while(condition, body)
            case If():
                self._if(statement)
            case Store(array, index, value, op, atomic):
                into, place = self.element(array, index)
                number = self.value(value)
                if self.width > 1 and place.uniform and op is None and not number.uniform:
                    raise NotVector  # the last lane's value is to stay
                memory.store(self, into, place, number, op, atomic)
            case loopir.Comment(text):
                self.lines += [f"  ; {line}" for line in text.splitlines()]
            case loopir.GroupReduce() | loopir.SegReduce():
                raise NotImplementedError(
                    "llvm: threads of a GPU reduce together, those of a CPU do not; a CPUVector "
                    "loop with ParallelReduction adds up lanes"
                )

    def _set(self, name: str, value: Value) -> None:
        cell = self.scalars[name]
        assert isinstance(cell, Cell), f"{name} is not mutable"
        if self.width > 1 and cell.lanes == 1 and not (value.uniform and self.mask is None):
            raise Widen(name)
        self.write(cell, value)

    def _workspace(self, workspace: loopir.Workspace, following: Stmt | None) -> None:
        """Elements start as the workspace's `fill`, if it has one, unless the next statement stores
        them all."""
        if self.width > 1:
            raise NotVector
        pointer = self.allocate(workspace.size)
        self.arrays[workspace.name] = Elements(pointer, self._accumulator, workspace.size)
        if workspace.fill is not None and not _overwrites(following, workspace):
            element = Store(workspace.name, Var("fill"), Float(workspace.fill))
            size = Int(workspace.size)
            self.statement(For("fill", Int(0), size, (element,), unit=loopir.CPU_VECTOR))

    def allocate(self, size: int) -> str:
        """A pointer to memory for `size` numbers, on the stack or in the kernel's scratch."""
        bytes = size * self.number_bytes
        if self._stack + bytes <= _STACK_BYTES:
            self._stack += bytes
            return self.slot("i32" if self.number == "i8" else self.number, max(size, 1))
        at = self.scratch
        self.scratch += -(-bytes // 64) * 64
        return self.op(f"getelementptr i8, ptr %scratch, i64 {at}")

    def _if(self, statement: If) -> None:
        test = self.value(statement.condition)
        if test.uniform:
            then, other, end = self.fresh("then"), self.fresh("else"), self.fresh("end")
            self.branch_if(test.text, then, other)
            for label, body in ((then, statement.then), (other, statement.otherwise)):
                self.start_block(label)
                self.statements(body)
                self.branch(end)
            self.start_block(end)
            return
        sides = [(test, statement.then)]
        if statement.otherwise:
            sides.append((self.invert(test), statement.otherwise))
        for truth, body in sides:
            mask = self.both(self.mask, truth.text)
            then, end = self.fresh("some"), self.fresh("end")
            self.branch_if(self.any_lane(mask), then, end)
            self.start_block(then)
            with self.in_lanes(self.width, mask):
                self.statements(body)
            self.branch(end)
            self.start_block(end)

    def _while(self, condition: Expr, body: Sequence[Stmt]) -> None:
        head, inside, after = self.fresh("while"), self.fresh("body"), self.fresh("end")
        running = self.cell(TRUTH, Value(TRUTH, "true"), wide=True) if self.width > 1 else None
        type = self.type(TRUTH, self.width)
        if running is not None and self.mask is not None:
            self.emit(f"store {type} {self.mask}, ptr {running.pointer}")
        self.branch(head)
        self.start_block(head)
        start = len(self.lines)
        test = self.value(condition)
        if test.uniform:
            self.branch_if(test.text, inside, after)
            self.start_block(inside)
            self.statements(body)
        else:  # until no lane runs any more: the condition again, in those that do
            assert running is not None
            del self.lines[start:]
            self.block = head
            with self.in_lanes(self.width, self.read(running).text):
                test = self.value(condition)
                left = self.both(self.mask, self.spread(test))
            self.emit(f"store {type} {left}, ptr {running.pointer}")
            self.branch_if(self.any_lane(left), inside, after)
            self.start_block(inside)
            with self.in_lanes(self.width, left):
                self.statements(body)
        self.branch(head)
        self.start_block(after)

    # Loops.

    def loop(self, loop: For) -> None:
        try:
            any(strategy(self, loop) for strategy in self.strategies)
        except _BoundsDiffer:
            last = f"{loop.var} end"
            self.wide.add(loop.var)
            step = Set(loop.var, Binary("+", Var(loop.var), Int(loop.step)))
            inside = Binary("<", Var(loop.var), Var(last))
            lets = (Let(loop.var, loop.begin, mutable=True), Let(last, loop.end))
            self.statements((*lets, While(inside, (*loop.body, step))))

    def bounds(self, loop: For) -> tuple[Value, Value]:
        """Where a loop begins and ends, for a strategy that takes it and has written nothing yet.
        Where that differs from lane to lane, the strategy does not go on: the loop is written as a
        `while` loop under a mask instead."""
        begin, end = self.value(loop.begin), self.value(loop.end)
        if not (begin.uniform and end.uniform):
            raise _BoundsDiffer
        return begin, end

    def vectorizable(self, loop: For) -> bool:
        """Whether it is a CPUVector loop, and in no other one."""
        return loop.unit == loopir.CPU_VECTOR and self.width == 1

    def scalar_loop(
        self, loop: For, begin: Value, end: Value, body: Callable[[], None] | None = None
    ) -> None:
        """One iteration after another, of which all lanes take part in each; `body` writes another
        body than that of `loop`."""
        metadata = UNROLLED if loop.unit == "unroll" else ""
        around = any(isinstance(x, For) and _stays(x) for x in parts(loop.body))
        if not metadata and not around and _divides(loop.body):
            # LLVM 22.1 read A[k * 4 + f % 4] as neighbours along f, past the end of A. So it may in
            # a loop around others that are so short that it unrolls them first.
            metadata = SERIAL
            self.declared.add(SERIAL_NODES)
        own = functools.partial(self.statements, loop.body)
        self.count(loop.var, begin, end, loop.step, body or own, metadata)

    def count(
        self,
        var: str,
        begin: Value,
        end: Value,
        step: int,
        body: Callable[[], None],
        metadata: str = "",
        stride: int = 0,
    ) -> None:
        """for (var = begin; var < end; var += step); lane l has `var` plus l * `stride`."""
        head, inside, after = self.fresh("for"), self.fresh("body"), self.fresh("end")
        with self.scope():
            counter = self.cell(INDEX, begin)
            self.branch(head)
            self.start_block(head)
            now = self.read(counter)
            self.scalars[var] = Value(INDEX, now.text, stride=stride if self.width > 1 else 0)
            self.branch_if(self.binary("<", now, end).text, inside, after)
            self.start_block(inside)
            body()
            self.write(counter, self.binary("+", now, constant(step)))
            self.branch(head, metadata)
            self.start_block(after)


def _divides(node: Any) -> bool:
    return any(isinstance(x, Binary) and x.op in ("//", "%") for x in parts(node))


def _stays(loop: For) -> bool:
    """Whether LLVM vectorizes nothing around the loop: it is in vectors, or has bounds that are no
    constants, so that it is not unrolled."""
    match loop:
        case For(_, Int(begin), Int(end), unit=loopir.CPU_VECTOR):
            return end - begin > 1
    return loop.unit == loopir.CPU_VECTOR or _divides((loop.begin, loop.end))


def _split_index(index: Expr, size: int) -> tuple[Expr, Expr]:
    """The addends of an index that say which part it is in, and the rest: those are the first ones,
    each a variable times the length of one part (`size`) or more."""
    match index:
        case Binary("+", first, rest):
            part, left = _split_index(first, size)
            if left != ZERO:
                return part, add(left, rest)
            more, left = _split_index(rest, size)
            return add(part, more), left
        case Binary("*", Var(), Int(length)) if length >= size:
            return index, ZERO
    return ZERO, index


def _overwrites(statement: Stmt | None, workspace: loopir.Workspace) -> bool:
    """Whether it is a loop that stores every element of a workspace and reads none of them."""
    match statement:
        case For(var, Int(0), Int(end), (*before, Store(array, Var(place), value, None)), step=1):
            others = [*before, value]
            return (
                (array, place, end) == (workspace.name, var, workspace.size)
                and all(isinstance(s, Let) for s in before)
                and not any(isinstance(x, Load) and x.array == array for x in parts(tuple(others)))
            )
    return False
