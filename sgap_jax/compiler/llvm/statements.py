"""Statements of the loop IR in LLVM IR. What a loop over lanes contains runs in all lanes at once;
a branch or a loop that they take differently runs under a mask."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence

from sgap_jax.compiler.llvm.expressions import Expressions
from sgap_jax.compiler.llvm.instructions import INT, TRUTH, Cell, NotVector, Value
from sgap_jax.compiler.llvm.memory import Elements
from sgap_jax.compiler.llvm.patterns import overwrites
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.loopir import (
    Binary,
    Expr,
    Float,
    For,
    If,
    Int,
    Let,
    Set,
    Stmt,
    Store,
    Var,
    While,
)

# How a loop's last branch asks for it; print_llvm.py says what the numbers mean.
UNROLLED, ROLLED = ", !llvm.loop !0", ", !llvm.loop !2"


class Widen(Exception):
    """A scalar that was taken to be the same in all lanes is not."""


class Statements(Expressions, abc.ABC):
    def __init__(self, index: str, accumulator: str, vector_bytes: int) -> None:
        super().__init__(index, accumulator, vector_bytes)
        self.accumulator = accumulator
        self.wide: set[str] = set()  # scalars of each lane

    @abc.abstractmethod
    def vector_loop(self, loop: For) -> None:
        """A CPUVector loop that is in no other: lanes.py."""

    @abc.abstractmethod
    def place_workspace(self, size: int) -> str:
        """A pointer to so many numbers: print_llvm.py."""

    def statements(self, body: Sequence[Stmt]) -> None:
        before = dict(self.scalars)
        for statement, following in zip(body, (*body[1:], None), strict=False):
            if isinstance(statement, loopir.Workspace):
                self._workspace(statement, filled=overwrites(following, statement))
            else:
                self.statement(statement)
        self.scalars = before

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
            case For(unit=loopir.CPU_VECTOR) if self.width == 1:
                self.vector_loop(statement)
            case For():
                self.loop(statement)
            case While(condition, body):
                self._while(condition, body)
            case If():
                self._if(statement)
            case Store(array, index, value, op, atomic):
                into, place = self.place_in(array, index)
                number = self.value(value)
                if self.width > 1 and place.uniform and op is None and not number.uniform:
                    raise NotVector
                self.store(into, place, number, op, atomic)
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

    def _workspace(self, workspace: loopir.Workspace, filled: bool) -> None:
        """`filled`: by what follows, before it is read."""
        if self.width > 1:
            raise NotVector
        pointer = self.place_workspace(workspace.size)
        self.arrays[workspace.name] = Elements(pointer, self.accumulator, workspace.size)
        if filled:
            return
        element = Store(workspace.name, Var("fill"), Float(workspace.fill))
        size = Int(workspace.size)
        self.statement(For("fill", Int(0), size, (element,), unit=loopir.CPU_VECTOR))

    def loop(self, loop: For) -> None:
        begin, end = self.value(loop.begin), self.value(loop.end)
        if not (begin.uniform and end.uniform):
            last = f"{loop.var} end"
            self.wide.add(loop.var)
            step = Set(loop.var, Binary("+", Var(loop.var), Int(loop.step)))
            inside = Binary("<", Var(loop.var), Var(last))
            lets = (Let(loop.var, loop.begin, mutable=True), Let(last, loop.end))
            return self.statements((*lets, While(inside, (*loop.body, step))))
        self.serial(loop, begin, end)

    def serial(self, loop: For, begin: Value, end: Value) -> None:
        body = functools.partial(self.statements, loop.body)
        self.count(loop.var, begin, end, loop.step, body, self.note(loop))

    def note(self, loop: For) -> str:
        return UNROLLED if loop.unit == "unroll" else ""

    def count(
        self,
        var: str,
        begin: Value,
        end: Value,
        step: int,
        body: Callable[[], None],
        note: str = "",
        stride: int = 0,
    ) -> None:
        """for (var = begin; var < end; var += step); `stride` of its lanes."""
        head, inside, after = self.fresh("for"), self.fresh("body"), self.fresh("end")
        before = dict(self.scalars)
        counter = self.cell(INT, begin)
        self.branch(head)
        self.place(head)
        now = self.read(counter)
        self.scalars[var] = Value(INT, now.text, stride=stride if self.width > 1 else 0)
        self.branch_if(self.binary("<", now, end).text, inside, after)
        self.place(inside)
        body()
        self.write(counter, self.binary("+", now, Value(INT, str(step))))
        self.branch(head, note)
        self.place(after)
        self.scalars = before

    def _while(self, condition: Expr, body: Sequence[Stmt]) -> None:
        head, inside, after = self.fresh("while"), self.fresh("body"), self.fresh("end")
        lanes = self.cell(TRUTH, Value(TRUTH, "true"), wide=True) if self.width > 1 else None
        if lanes is not None and self.mask is not None:
            self.emit(f"store {self.type(TRUTH, self.width)} {self.mask}, ptr {lanes.pointer}")
        self.branch(head)
        self.place(head)
        start = len(self.lines)
        test = self.value(condition)
        if test.uniform:
            self.branch_if(test.text, inside, after)
            self.place(inside)
            self.statements(body)
        else:  # until all lanes are done; those that are take no part
            assert lanes is not None
            del self.lines[start:]
            self.block = head
            with self.masked(self.read(lanes).text):
                test = self.value(condition)
                left = self.both(self.mask, self.spread(test))
            self.emit(f"store {self.type(TRUTH, self.width)} {left}, ptr {lanes.pointer}")
            self.branch_if(self.any_lane(left), inside, after)
            self.place(inside)
            with self.masked(left):
                self.statements(body)
        self.branch(head)
        self.place(after)

    def _if(self, statement: If) -> None:
        test = self.value(statement.condition)
        sides = [(test, statement.then)]
        if test.uniform:
            then, other, end = self.fresh("then"), self.fresh("else"), self.fresh("end")
            self.branch_if(test.text, then, other)
            for label, body in ((then, statement.then), (other, statement.otherwise)):
                self.place(label)
                self.statements(body)
                self.branch(end)
            self.place(end)
            return
        if statement.otherwise:
            sides.append((self.invert(test), statement.otherwise))
        for truth, body in sides:
            mask = self.both(self.mask, truth.text)
            then, end = self.fresh("some"), self.fresh("end")
            self.branch_if(self.any_lane(mask), then, end)
            self.place(then)
            with self.masked(mask):
                self.statements(body)
            self.branch(end)
            self.place(end)
