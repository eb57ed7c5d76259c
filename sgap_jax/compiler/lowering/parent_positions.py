"""The coordinates above a position: searched for, or tracked as the positions go on (Senanayake et
al., section 6.2: recover_track).

A serial loop over the positions of several levels searches once for the parents of its first
position. From then on a parent steps where its segment ends: in a `while` if it is of a dense level
(its segments may be empty), in an `if` if it is stored (they may not). A sum that belongs to a
parent is stored before the parent steps.
"""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.loop_ir.arithmetic import ONE, ZERO, add, both, divide, greatest, modulo
from sgap_jax.compiler.loop_ir.loopir import (
    Binary,
    Expr,
    Float,
    If,
    Let,
    Load,
    Search,
    Select,
    Set,
    Stmt,
    Var,
    While,
)
from sgap_jax.compiler.lowering.assignments import Statements
from sgap_jax.compiler.lowering.derived_variables import Recovery
from sgap_jax.compiler.lowering.ranges import Scope
from sgap_jax.compiler.lowering.reductions import IDENTITY
from sgap_jax.compiler.notation.cin import Body, Forall, Pos, Split
from sgap_jax.compiler.notation.expr import IndexVar, accesses
from sgap_jax.compiler.notation.nest import paths


@dataclasses.dataclass(frozen=True)
class Tracked:
    pos: Pos
    parents: tuple[tuple[int, str], ...]  # (level, scalar with the position above it), inner first
    contiguous: bool
    begin: Expr  # the first position


class Tracking:
    def __init__(self, recovery: Recovery, statements: Statements):
        self.recovery, self.statements = recovery, statements
        recovery.above = self
        self.relations = recovery.relations
        self.ranges = recovery.ranges
        self.current: dict[IndexVar, Tracked] = {}  # by position variable

    def start(self, loop: Forall, scope: Scope) -> bool:
        """Before a loop: the parents of its first position."""
        pos = self.recovery.movement.tracking(loop.var)
        if pos is None:
            return False
        first, last = self.relations.levels_of(pos)
        levels = self._levels(pos, loop.body)
        if not levels:
            return False
        whole = self.ranges.of(pos.position, scope)
        trial = scope.child()
        trial.known[loop.var] = self.ranges.of(loop.var, scope).low
        begin = self.ranges.value(pos.position, trial)
        if loop.var == pos.position:
            begin = whole.low
        elif whole.low != ZERO:
            begin = greatest(begin, whole.low)
        begin = self.recovery.named(f"{pos.position}_first", begin, scope)
        some: Expr | None = Binary("<", begin, whole.high)
        if scope.masked and self._by_lane(pos):
            some = both(scope.live, some)
        else:
            scope.only_if(Binary("<", begin, whole.high))
            some = None
        parents: list[tuple[int, str]] = []
        place = begin
        for level in range(last, min(levels), -1):
            storage = self.recovery.storage
            assert storage is not None
            if storage.is_dense(level):
                place = divide(place, storage.extents[level])
            elif storage.is_compressed(level):
                above = self.ranges.level_range(first, level - 1, scope)
                found: Expr = Search(storage.offsets(level), above.low, above.high, place)
                # A first segment may be empty: the innermost parent steps over it at once.
                if begin == whole.low and not (parents and storage.is_dense(level - 1)):
                    found = above.low
                elif some is not None:
                    found = Select(some, found, ZERO)
                name = self.recovery.fresh(self._name(level - 1))
                scope.emit(Let(name, found, mutable=True))
                parents.append((level, name))
                place = Var(name)
        contiguous = bool(self.relations.steps(loop.var, pos.position))
        tracked = Tracked(pos, tuple(parents), contiguous, begin)
        self.current[pos.position] = tracked
        return True

    def recover(self, pos: Pos, scope: Scope, loop: Forall) -> None:
        """A position is known: the coordinates above it that are needed."""
        tracked = self.current.get(pos.position)
        if tracked is not None and self.recovery.movement.tracking(loop.var) == pos:
            if not self.recovery.movement.run_steps(loop):
                place = scope.known[pos.position]
                scope.emit(*self._advance(tracked, tracked.parents, scope, place))
        else:
            tracked = None
        self._ascend(pos, scope, loop.body, None if tracked is None else dict(tracked.parents))

    def finish(self, loop: Forall, scope: Scope) -> None:
        """After a loop: the last segment's sum."""
        pos = self.recovery.movement.tracking(loop.var)
        assert pos is not None and self.statements.sum is not None
        self.store(self.current[pos.position], scope)

    def store(self, tracked: Tracked, scope: Scope, alone: bool = False) -> None:
        """The sum of the tracked parent; `alone`: no one else adds to its element."""
        at = scope.child()
        self._above(tracked, at)
        assert self.statements.sum is not None
        self.statements.store(at, Var(self.statements.sum), alone)
        scope.emit(*at.statements)

    def _above(self, tracked: Tracked, scope: Scope) -> None:
        """Positions and coordinates in terms of the tracked parents, without new names."""
        storage = self.recovery.storage
        assert storage is not None
        first, last = self.relations.levels_of(tracked.pos)
        parents = dict(tracked.parents)
        for level in range(last, first, -1):
            if level in parents:
                scope.positions[level - 1] = Var(parents[level])
            elif level in scope.positions:
                step = scope.positions[level]
                dense = storage.is_dense(level)
                scope.positions[level - 1] = divide(step, storage.extents[level]) if dense else step
            if level - 1 in scope.positions:
                scope.known[storage.variables[level - 1]] = self._coordinate(
                    level - 1, first, scope
                )

    def _coordinate(self, level: int, first: int, scope: Scope) -> Expr:
        storage, place = self.recovery.storage, scope.positions[level]
        assert storage is not None
        if not storage.is_dense(level):
            return Load(storage.coordinates(level), place)
        return place if level == 0 else modulo(place, storage.extents[level])

    def _advance(
        self,
        tracked: Tracked,
        parents: tuple[tuple[int, str], ...],
        scope: Scope,
        place: Expr,
    ) -> list[Stmt]:
        if not parents:
            return []
        storage = self.recovery.storage
        assert storage is not None
        (level, name), rest = parents[0], parents[1:]
        end = Load(storage.offsets(level), add(Var(name), ONE))
        live = scope.live if self._by_lane(tracked.pos) else None
        condition = both(live, Binary("==" if tracked.contiguous else ">=", place, end))
        assert condition is not None
        step: list[Stmt] = []
        if self._ends_sum(tracked, level):
            assert self.statements.sum is not None
            # The sum's own scope is that of before the loop: nothing of this iteration counts.
            at = scope.child()
            self.store(tracked, at)
            start = Float(IDENTITY[self.statements.expression.reduction])
            step += [*at.statements, Set(self.statements.sum, start)]
        step.append(Set(name, add(Var(name), ONE)))
        above: Expr = Var(name)
        for between in range(level - 1, rest[0][0] if rest else level - 1, -1):
            if storage.is_dense(between):
                above = divide(above, storage.extents[between])
        onward = self._advance(tracked, rest, scope, above)
        if tracked.contiguous and not storage.is_dense(level - 1):
            return [If(condition, (*step, *onward))]
        return [While(condition, tuple(step)), *onward]

    def _ends_sum(self, tracked: Tracked, level: int) -> bool:
        """Whether the kept sum belongs to the parent above `level`, and no deeper."""
        plan, storage = self.recovery.plan, self.recovery.storage
        assert storage is not None
        if plan.tracked is None or self.statements.sum is None:
            return False
        if self.recovery.movement.tracking(plan.tracked) != tracked.pos:
            return False
        first, last = self.relations.levels_of(tracked.pos)
        outputs = self._needed_vars(self.statements.expression.output.indices)
        deepest = max(n for n in range(first, last) if storage.variables[n] in outputs)
        return level == min(n for n, _ in tracked.parents if n - 1 >= deepest)

    def _ascend(self, pos: Pos, scope: Scope, body: Body, tracked: dict[int, str] | None) -> None:
        storage = self.recovery.storage
        assert storage is not None
        first, last = self.relations.levels_of(pos)
        levels = self._levels(pos, body)
        if not levels:
            return
        for level in range(last, min(levels), -1):
            place = scope.positions[level]
            if tracked is not None and level in tracked:
                above: Expr = Var(tracked[level])
            elif storage.is_compressed(level):
                within = self.ranges.level_range(first, level - 1, scope)
                found = Search(storage.offsets(level), within.low, within.high, place)
                lanes = self._by_lane(pos)
                above = self.recovery.named(self._name(level - 1), found, scope, lanes)
            elif storage.is_dense(level):
                above = divide(place, storage.extents[level])
                above = self.recovery.named(self._name(level - 1), above, scope)
            else:
                above = place
            scope.positions[level - 1] = above
            if storage.is_dense(level - 1):
                var = storage.variables[level - 1]
                self.recovery.define(var, self._coordinate(level - 1, first, scope), scope)

    def _by_lane(self, pos: Pos) -> bool:
        """Whether the lanes of a group are at different positions. Where they are not, one that
        takes no part has the coordinates of the others: they reduce into one element."""
        storage = self.recovery.storage
        assert storage is not None
        first, _ = self.relations.levels_of(pos)
        return any(map(self.recovery.by_lane, (pos.position, *storage.variables[:first])))

    def _name(self, level: int) -> str:
        var = self.relations.levels[level].name
        storage = self.recovery.storage
        assert storage is not None
        return var if level == 0 and storage.is_dense(0) else f"{var}_pos"

    def _levels(self, pos: Pos, body: Body) -> list[int]:
        """The levels above the last whose coordinates the body uses."""
        used = set()
        storage, expression = self.recovery.storage, self.statements.expression
        assert storage is not None
        for _, statement in paths(body):
            for access in (statement.target, *accesses(statement.factors)):
                if access != storage.access and access.format is None:
                    used |= set(access.indices)
        if any(s.target == expression.output for _, s in paths(body)):
            used |= set() if expression.output.format else set(expression.output.indices)
        needed = self._needed_vars((*used, *storage.ragged))
        first, last = self.relations.levels_of(pos)
        return [n for n in range(first, last) if storage.variables[n] in needed]

    def _needed_vars(self, used: tuple[IndexVar, ...]) -> set[IndexVar]:
        """With the parts of those that the storage has in blocks."""
        needed = set(used)
        for relation in self.relations.all:
            if isinstance(relation, Split) and relation.parent in needed:
                needed |= {relation.outer, relation.inner}
        return needed
