"""What a loop variable makes known (Senanayake et al., OOPSLA 2020, section 6.2).

An index from its parts, a coordinate from its position, a position from its parent's: each is
defined as soon as it can be. What is defined may be out of range: it is guarded there and then, or
where a collective follows and lanes may differ, masked.
"""

from __future__ import annotations

from typing import Protocol

from sgap_jax.compiler.loop_ir.arithmetic import (
    ZERO,
    add,
    both,
    divide,
    modulo,
    multiply,
    reads_memory,
)
from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, Int, Let, Load, Select, Var
from sgap_jax.compiler.lowering.output_loops import Movement
from sgap_jax.compiler.lowering.ranges import Range, Ranges, Scope
from sgap_jax.compiler.lowering.reductions import Plan
from sgap_jax.compiler.notation.cin import (
    Bound,
    Divide,
    Forall,
    Fuse,
    Pos,
    Precompute,
    Relation,
    Split,
)
from sgap_jax.compiler.notation.expr import IndexVar


class Ascent(Protocol):
    def recover(self, pos: Pos, scope: Scope, loop: Forall) -> None:
        """The coordinates above a position that has become known."""


class Recovery:
    def __init__(self, ranges: Ranges, movement: Movement, plan: Plan, names: set[str]):
        self.ranges, self.relations = ranges, ranges.relations
        self.storage = ranges.storage
        self.movement, self.plan = movement, plan
        self.names = names  # taken
        self.above: Ascent  # set by Tracking

    def fresh(self, name: str) -> str:
        number, unique = 2, name
        while unique in self.names:
            number, unique = number + 1, f"{name}_{number}"
        self.names.add(unique)
        return unique

    def name_range(self, var: IndexVar, scope: Scope) -> None:
        """Names for the ends of the positions that a loop runs over or tiles."""
        while not isinstance(relation := self.relations.source(var), Pos):
            match relation:
                case (
                    Split(parent=parent)
                    | Divide(parent=parent)
                    | Bound(parent=parent)
                    | Precompute(var=parent)
                ):
                    var = parent
                case _:
                    return
        if var in scope.ranges:
            return
        first, _ = self.relations.levels_of(relation)
        if first > 0 and first - 1 not in scope.positions:
            return
        found = self.ranges.of(var, scope)
        low = self._end(f"{var}_begin", found.low, scope)
        high = self._end(f"{var}_end", found.high, scope)
        scope.ranges[var] = Range(low, high, found.bound)

    def _end(self, name: str, value: Expr, scope: Scope) -> Expr:
        if not reads_memory(value):
            return value
        name = self.fresh(name)
        scope.emit(Let(name, value))
        return Var(name)

    def define(self, var: IndexVar, value: Expr, scope: Scope, name: str | None = None) -> None:
        scope.known[var] = self.named(name or var.name, value, scope, self.by_lane(var))

    def by_lane(self, var: IndexVar) -> bool:
        """Whether the lanes of a group have different values of a variable."""
        group = self.plan.group
        return group is None or self.movement.depends(var, group.var)

    def named(self, name: str, value: Expr, scope: Scope, masked: bool = True) -> Expr:
        if isinstance(value, Var | Int):
            return value
        if scope.live is not None and masked and reads_memory(value):
            value = Select(scope.live, value, ZERO)
        name = self.fresh(name)
        scope.emit(Let(name, value))
        return Var(name)

    def only_if(self, var: IndexVar, condition: Expr | None, scope: Scope) -> None:
        """A guard; where a collective follows, and lanes may differ, a mask."""
        if condition is None:
            return
        if not scope.masked or not self.by_lane(var):
            scope.only_if(condition)
            return
        condition = both(scope.live, condition)
        assert condition is not None
        name = self.fresh("live")
        scope.emit(Let(name, Select(condition, Int(1), ZERO)))
        scope.live = Binary("!=", Var(name), ZERO)

    def guard(self, var: IndexVar, parts: int, scope: Scope) -> None:
        """What is put together from `parts` may be beyond the range."""
        if var in scope.unguarded:
            return
        extent, value = self.ranges.of(var, scope), scope.known[var]
        low = None if extent.low == ZERO else Binary("<=", extent.low, value)
        high = None if fits(extent, parts) else Binary("<", value, extent.high)
        self.only_if(var, both(low, high), scope)

    def recover(self, scope: Scope, loop: Forall) -> None:
        while any([self._apply(r, scope, loop) for r in self.relations.all]) or any(
            [self._locate(level, scope) for level in range(len(self.relations.levels))]
        ):
            pass

    def _apply(self, relation: Relation, scope: Scope, loop: Forall) -> bool:
        known = scope.known
        match relation:
            case Split(parent, outer, inner, size):
                if outer in known and inner in known and parent not in known:
                    base = multiply(known[outer], Int(size))
                    self.define(parent, add(base, known[inner]), scope)
                    self.guard(parent, size, scope)
                    return True
                blocks = self.storage is not None and relation in self.storage.splits
                if blocks and parent in known and not (outer in known or inner in known):
                    self.define(outer, divide(known[parent], size), scope)
                    self.define(inner, modulo(known[parent], size), scope)
                    return True
            case Divide(parent, outer, inner, parts):
                if outer in known and inner in known and parent not in known:
                    self.define(parent, self.ranges.value(parent, scope), scope)
                    self.guard(parent, parts, scope)
                    return True
            case Fuse(outer, inner, fused):
                if fused in known and outer not in known and not self.relations.is_sparse(fused):
                    extent = max(self.ranges.extent(inner, scope), 1)
                    self.define(outer, divide(known[fused], extent), scope)
                    self.define(inner, modulo(known[fused], extent), scope)
                    return True
            case Bound(parent, same) | Precompute(parent, same):
                if same in known and parent not in known:
                    known[parent] = known[same]
                    return True
            case Pos():
                _, last = self.relations.levels_of(relation)
                if relation.position in known and last not in scope.positions:
                    scope.positions[last] = known[relation.position]
                    self.above.recover(relation, scope, loop)
                    return True
                if last in scope.positions and relation.position not in known:
                    known[relation.position] = scope.positions[last]
                    return True
        return False

    def _locate(self, level: int, scope: Scope) -> bool:
        """A position from its parent's, or a coordinate from its position."""
        storage = self.storage
        assert storage is not None
        var, parent = storage.variables[level], scope.positions.get(level - 1)
        if level == 0:
            parent = ZERO
        if level in scope.positions:
            if storage.is_dense(level) or var in scope.known:
                return False
            array = storage.coordinates(level)
            self.define(var, Load(array, scope.positions[level]), scope)
            return True
        if parent is None or storage.is_compressed(level):
            return False
        if storage.is_dense(level):
            if var not in scope.known:
                return False
            place = add(multiply(parent, Int(storage.extents[level])), scope.known[var])
            name = f"{storage.name}_at" if level == len(storage.levels) - 1 else f"{var}_pos"
            scope.positions[level] = self.named(name, place, scope)
            return True
        scope.positions[level] = parent
        return True


def fits(extent: Range, parts: int) -> bool:
    return extent.exact is not None and parts > 0 and extent.exact % parts == 0
