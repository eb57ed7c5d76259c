"""Decides which serial loops of the loop IR the interpreter can run with all iterations at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.arithmetic import children
from sgap_jax.compiler.loop_ir.loopir import Expr, For, Stmt
from sgap_jax.compiler.loop_ir.mma import declared


def independent(loop: For) -> bool:
    """Whether running each statement for all iterations at once is equivalent to the loop.

    This holds if iterations share only arrays that they load, and arrays to which one statement
    stores, or several that combine with the same operation. Threads that reduce together are not
    considered.
    """
    body = _Body()
    if not body.private(loop.body):
        return False
    for array in {array for array, _ in body.stores}:
        ops = [op for stored, op in body.stores if stored == array]
        if array in body.loaded or (len(ops) > 1 and (None in ops or len(set(ops)) > 1)):
            return False
    return True


class _Body:
    """The names that the statements of a loop load, store and define."""

    def __init__(self) -> None:
        self.own: set[str] = set()
        self.loaded: set[str] = set()
        self.stores: list[tuple[str, str | None]] = []

    def private(self, statements: Sequence[Stmt]) -> bool:
        """Whether no outer scalar is set, and no inner loop is parallel."""
        return all(self._private(statement) for statement in statements)

    def _private(self, statement: Stmt) -> bool:
        match statement:
            case loopir.Let(name, value):
                self.own.add(name)
                self._load(value)
            case loopir.Set(name, value):
                self._load(value)
                return name in self.own
            case loopir.Workspace(name):
                self.own.add(name)
            case For(begin=begin, end=end, body=body, unit=unit):
                self._load(begin, end)
                if unit not in (None, "unroll", loopir.CPU_VECTOR):
                    return False
                before = len(self.stores)
                if not self.private(body):
                    return False
                return self._mixes(before) or independent(statement)
            case loopir.While(condition, body):
                self._load(condition)
                before = len(self.stores)
                return self.private(body) and self._mixes(before)
            case loopir.If(condition, then, otherwise):
                self._load(condition)
                return self.private(then) and self.private(otherwise)
            case loopir.Store(array, index, value, op):
                self._load(index, value)
                if array not in self.own:
                    self.stores.append((array, op))
            case loopir.GroupReduce() | loopir.SegReduce():
                return False
            case loopir.Mma() | loopir.MmaStore():
                return self._private(declared(statement))
        return True

    def _mixes(self, before: int) -> bool:
        """Whether iterations of an inner loop may interleave: not if the last store determines the
        result."""
        return all(op is not None for _, op in self.stores[before:])

    def _load(self, *expressions: Expr) -> None:
        self.loaded.update(array for e in expressions for array in _arrays(e))


def _arrays(expr: Expr) -> Iterator[str]:
    if isinstance(expr, loopir.Load | loopir.Search):
        yield expr.array
    for child in children(expr):
        yield from _arrays(child)
