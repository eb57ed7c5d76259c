"""Clearing what a function does not store: a dense output row by row, and padding.

A dense output of which only some elements are stored holds the identity elsewhere. To fill all of
it first is a pass of its own over memory, which the stores come back to when it has left the cache.
Where a thread visits the coordinates of the outermost level one by one, it clears what belongs to
each of them right before, with the gap between it and the stored coordinate before.
"""

from __future__ import annotations

import itertools
import math

from sgap_jax.compiler.loop_ir.arithmetic import ONE, ZERO, add, multiply, subtract
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_THREAD,
    CPU_VECTOR,
    Array,
    Binary,
    Expr,
    Float,
    For,
    Int,
    Load,
    Select,
    Store,
    Var,
)
from sgap_jax.compiler.lowering.derived_variables import Recovery
from sgap_jax.compiler.lowering.output_loops import Movement
from sgap_jax.compiler.lowering.ranges import Ranges, Scope
from sgap_jax.compiler.lowering.reductions import IDENTITY, Plan
from sgap_jax.compiler.notation.expr import IndexVar

# One coordinate in so many is stored, or the gaps are filled beforehand: in tiles of equal size,
# where those of a few rows may all be in the hands of one thread.
_STORED = 2

# Cleared elements for each part that is stored into them, from which the caches have little of the
# use of clearing: a line that comes back is read from memory. For a tensor with 93,000 fibers (Zen
# 5, 2 threads) 294 take 0.65x the time past the caches, 147 take 1.5x.
_APART = 256


class Clearing:
    """`row`: the loop that makes a coordinate of the outermost level known, and none beside; None
    where the output is not cleared by its rows."""

    def __init__(self, movement: Movement, plan: Plan, ranges: Ranges, recovery: Recovery):
        self.expression, self.plan = movement.expression, plan
        self.storage, self.ranges, self.recovery = ranges.storage, ranges, recovery
        self.row = self._row(movement)
        extents = [ranges.sizes[index.name] for index in self.expression.output.indices[1:]]
        self.size = math.prod(extents)  # of a row

    def padding(self, output: Array) -> For | None:
        """What clears the positions without an entry of an output that shares the structure, where
        tasks of a CPU store each of the others once; None where the whole output is to be filled.
        """
        tasks = [loop.unit for loop in self.plan.path[:1]] == [CPU_THREAD]
        if not tasks or not self.expression.shared or self.plan.op is not None:
            return None
        if self.storage is not None and self.storage.ragged:
            return None  # what is beyond the matrix is not stored
        used = self.ranges.level_range(0, self.expression.shared - 1, Scope()).high
        dense = self.expression.dense_indices(self.expression.output)
        each = math.prod(self.ranges.sizes[index.name] for index in dense)
        name = self.recovery.fresh("padding")
        clear = Store(output.name, Var(name), Float(IDENTITY[self.expression.reduction]))
        begin = multiply(used, Int(each))
        return For(name, begin, Int(output.size), (clear,), unit=CPU_VECTOR)

    def _row(self, movement: Movement) -> IndexVar | None:
        storage, output = self.storage, self.expression.output
        if storage is None or output.format is not None or self.plan.fill is None:
            return None
        first, path = storage.variables[0], self.plan.path
        if self.plan.op is not None or output.indices[:1] != (first,) or storage.repeats[0]:
            return None
        if storage.is_compressed(0):
            if _STORED * storage.positions[0] < storage.extents[0]:
                return None
        elif not storage.is_dense(0):
            return None
        loops = movement.leaves(first)
        around = list(itertools.takewhile(lambda loop: loop.var in loops, path))
        if not path or path[0].unit != CPU_THREAD or {loop.var for loop in around} != loops:
            return None
        if any(loop.unit == CPU_VECTOR for loop in around):
            return None  # rows side by side are cleared one after the other
        others = {*storage.variables, *self.expression.indices} - {first}
        if any(not loops.isdisjoint(movement.leaves(other)) for other in others):
            return None  # a row is visited more than once, maybe by several threads
        return around[-1].var

    def clear(self, scope: Scope) -> None:
        """Before the stores of a row."""
        assert self.storage is not None
        coordinate = self.ranges.value(self.storage.variables[0], scope)
        end = begin = multiply(coordinate, Int(self.size))
        if not self._whole():
            end = add(end, Int(self.size))
        if self.storage.is_compressed(0):
            begin = self._after(scope.positions[0])
        scope.emit(self._fill(begin, end))

    def rest(self) -> tuple[For, ...]:
        """What is behind the last row."""
        assert self.storage is not None
        if not self.storage.is_compressed(0):
            return ()
        used = self.ranges.level_range(0, 0, Scope()).high
        return (self._fill(self._after(used), Int(self.storage.extents[0] * self.size)),)

    def _fill(self, begin: Expr, end: Expr) -> For:
        name = self.recovery.fresh("gap")
        assert self.plan.fill is not None
        store = Store(self.expression.output.tensor, Var(name), Float(self.plan.fill))
        return For(name, begin, end, (store,), unit=CPU_VECTOR, stream=self._is_apart())

    def _is_apart(self) -> bool:
        """Whether parts that are stored into what is cleared are far from each other."""
        assert self.storage is not None
        modes, outputs = self.storage.modes, self.expression.output.indices
        parts = self.storage.positions[max(n for n, var in enumerate(modes) if var in outputs)]
        size = self.storage.extents[0] * self.size
        return not self._whole() and size >= _APART * max(parts, 1)

    def _after(self, place: Expr) -> Expr:
        """Where the row before a stored position ends."""
        assert self.storage is not None
        before = add(Load(self.storage.coordinates(0), subtract(place, ONE)), ONE)
        return Select(Binary("<", ZERO, place), multiply(before, Int(self.size)), ZERO)

    def _whole(self) -> bool:
        """Whether all of a row is stored."""
        assert self.storage is not None
        stored = {
            var for level, var in enumerate(self.storage.modes) if not self.storage.is_dense(level)
        }
        return stored.isdisjoint(self.expression.output.indices[1:])
