"""Loops over the positions of several levels, run by run.

A serial loop that keeps a sum for each parent (parent_positions.py) asks at each position whether
its parent ends. On a CPU it becomes a loop over runs, the positions that have one parent, and in
that one over the positions of a run: nothing else is asked there, and lanes may share them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sgap_jax.compiler.loop_ir.arithmetic import ONE, ZERO, add, least, subtract
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_VECTOR,
    Binary,
    Expr,
    Float,
    For,
    If,
    Int,
    Let,
    Load,
    Set,
    Var,
    While,
)
from sgap_jax.compiler.loop_ir.patterns import gathers
from sgap_jax.compiler.lowering.derived_variables import fits
from sgap_jax.compiler.lowering.parent_positions import Tracked, Tracking
from sgap_jax.compiler.lowering.ranges import Scope
from sgap_jax.compiler.lowering.reductions import IDENTITY
from sgap_jax.compiler.notation.cin import Forall
from sgap_jax.compiler.notation.expr import IndexVar

# Runs whose sums come together: a vector of their numbers has parts for each.
TOGETHER = 4


class Runs:
    def __init__(self, tracking: Tracking):
        self.tracking = tracking
        self.recovery, self.statements = tracking.recovery, tracking.statements
        self.storage, self.ranges = tracking.recovery.storage, tracking.ranges

    def loop(self, loop: Forall, scope: Scope, lower: Callable[[Forall, Scope], None]) -> None:
        """`lower` makes the body of a loop."""
        recovery, steps = self.recovery, self.recovery.movement.run_steps(loop)
        recovery.name_range(loop.var, scope)
        around = scope.child()
        self.tracking.start(loop, around)
        position = steps[-1]
        tracked = self.tracking.current[position]
        ((level, parent),) = tracked.parents
        last = recovery.named(f"{position}_last", self._last(steps, around), around)
        begin, stop = (recovery.fresh(f"{position}_{end}") for end in ("begin", "stop"))
        around.emit(Let(begin, tracked.begin, mutable=True))

        names = set(recovery.names)
        assert self.storage is not None
        end = Load(self.storage.offsets(level), add(Var(parent), ONE))
        run = around.child()
        run.emit(Let(stop, end))
        self._run(loop, run, Var(begin), Var(stop), lower)
        first = Binary("==", Var(begin), tracked.begin)
        self._store(tracked, run, first)
        run.emit(Set(begin, Var(stop)), Set(parent, add(Var(parent), ONE)))
        self._together(loop, tracked, run, begin, last, lower)
        around.emit(While(Binary("<", end, last), run.close()))
        recovery.names, after = names, recovery.names
        self._run(loop, around, Var(begin), last, lower)
        recovery.names |= after
        self.tracking.store(tracked, around)
        self.statements.sum = None
        scope.emit(*around.close())

    def _together(
        self,
        loop: Forall,
        tracked: Tracked,
        scope: Scope,
        begin: str,
        last: Expr,
        lower: Callable[[Forall, Scope], None],
    ) -> None:
        """After the first run, several at a time: lanes over runs whose own lanes are side by side
        in memory. They come together in fewer steps than one by one."""
        storage, position = self.storage, tracked.pos.position
        ((level, parent),) = tracked.parents
        assert storage is not None
        owned = self.recovery.plan.atomic and self.recovery.movement.owns_runs(tracked.pos)
        counted = all(storage.is_dense(above) for above in range(level))
        if loop.unit != CPU_VECTOR or not owned or not counted:
            return
        names = set(self.recovery.names)
        lane, row = self.recovery.fresh("lane"), self.recovery.fresh(parent)
        offsets = storage.offsets(level)
        group = scope.child()
        group.emit(Let(row, add(Var(parent), Var(lane))))
        ends = [self.recovery.fresh(f"{position}_{end}") for end in ("begin", "stop")]
        for end, place in zip(ends, (Var(row), add(Var(row), ONE)), strict=True):
            group.emit(Let(end, Load(offsets, place)))
        self.tracking.current[position] = own = dataclasses.replace(
            tracked, parents=((level, row),)
        )
        self._run(loop, group, Var(ends[0]), Var(ends[1]), lower)
        self.tracking.store(own, group, alone=True)
        self.tracking.current[position] = tracked
        body = group.close()
        if not any(gathers(inner) for inner in body if isinstance(inner, For)):
            after = add(Var(parent), Int(TOGETHER))
            there = Binary("<=", after, Int(storage.positions[level - 1]))
            inside = Binary("<", Load(offsets, after), last)
            lanes = For(lane, ZERO, Int(TOGETHER), body, unit=CPU_VECTOR)
            onward = (Set(begin, Load(offsets, after)), Set(parent, after))
            scope.emit(While(Binary("and", there, inside), (lanes, *onward)))
        self.recovery.names = names

    def _run(
        self,
        loop: Forall,
        scope: Scope,
        begin: Expr,
        end: Expr,
        lower: Callable[[Forall, Scope], None],
    ) -> None:
        """The sum of the positions [begin, end)."""
        recovery = self.recovery
        steps = recovery.movement.run_steps(loop)
        self.statements.sum = recovery.fresh("sum")
        identity = Float(IDENTITY[self.statements.expression.reduction])
        inner = scope.child(unguarded=scope.unguarded | set(steps))
        place = recovery.fresh(steps[-1].name)
        for var in steps:
            inner.known[var] = subtract(Var(place), self._at(steps[-1], var, ZERO, scope))
        recovery.recover(inner, loop)
        lower(loop, inner)
        scope.emit(Let(self.statements.sum, identity, mutable=True))
        scope.emit(For(place, begin, end, inner.close(), unit=loop.unit))

    def _at(self, position: IndexVar, var: IndexVar, value: Expr, scope: Scope) -> Expr:
        """The position where a variable has a value."""
        there = scope.child()
        there.known[var] = value
        return self.ranges.value(position, there)

    def _last(self, steps: list[IndexVar], scope: Scope) -> Expr:
        """The position behind the last one."""
        position, last = steps[-1], None
        for var, inner in zip(steps, (None, *steps), strict=False):
            extent = self.ranges.of(var, scope)
            tile = None if inner is None else self.ranges.of(inner, scope).exact
            if var in scope.unguarded or (tile is not None and fits(extent, tile)):
                continue
            end = self._at(position, var, extent.high, scope)
            last = end if last is None else least(last, end)
        assert last is not None  # of a tile at least its own size
        return last

    def _store(self, tracked: Tracked, scope: Scope, first: Expr) -> None:
        """The sum of a run that ends here: all but the first of a task have their element to
        themselves."""
        plan = self.recovery.plan
        if not (plan.atomic and self.recovery.movement.owns_runs(tracked.pos)):
            return self.tracking.store(tracked, scope)
        shared, own = scope.child(), scope.child()
        self.tracking.store(tracked, shared)
        self.tracking.store(tracked, own, alone=True)
        scope.emit(If(first, shared.close(), own.close()))
