"""What a point of the loop nest knows: values of variables, positions, and the ranges of loops."""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.loop_ir.arithmetic import (
    ONE,
    ZERO,
    add,
    ceil_divide,
    divide,
    least,
    modulo,
    multiply,
    subtract,
)
from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, If, Int, Load, Search, Select, Stmt
from sgap_jax.compiler.lowering.relations import Relations
from sgap_jax.compiler.notation.cin import (
    Bound,
    Coord,
    Divide,
    Fuse,
    Pos,
    Precompute,
    Split,
)
from sgap_jax.compiler.notation.expr import IndexVar
from sgap_jax.schedules.schedule import ScheduleError


@dataclasses.dataclass(frozen=True)
class Range:
    """low <= value < high. `bound`: what high is at most, known when the loops are made, where low
    is zero; else None."""

    low: Expr
    high: Expr
    bound: int | None = None

    @property
    def exact(self) -> int | None:
        """The number of values, where it is known."""
        known = self.low == ZERO and isinstance(self.high, Int)
        return self.high.value if known and isinstance(self.high, Int) else None


@dataclasses.dataclass
class Scope:
    """A block of statements in the making."""

    known: dict[IndexVar, Expr] = dataclasses.field(default_factory=dict)
    positions: dict[int, Expr] = dataclasses.field(default_factory=dict)  # by level
    ranges: dict[IndexVar, Range] = dataclasses.field(default_factory=dict)
    unguarded: frozenset[IndexVar] = frozenset()  # in range in this clone
    masked: bool = False  # a collective follows: no lane may leave
    live: Expr | None = None  # where masked: whether this lane takes part
    statements: list[Stmt] = dataclasses.field(default_factory=list)
    opened: list[tuple[Expr, list[Stmt]]] = dataclasses.field(default_factory=list)

    def child(self, **changes: object) -> Scope:
        copy = dataclasses.replace(
            self,
            known=dict(self.known),
            positions=dict(self.positions),
            ranges=dict(self.ranges),
            statements=[],
            opened=[],
        )
        return dataclasses.replace(copy, **changes)  # type: ignore[arg-type]

    def emit(self, *statements: Stmt) -> None:
        self.statements += statements

    def only_if(self, condition: Expr) -> None:
        """All that follows in this block is under a condition."""
        self.opened.append((condition, self.statements))
        self.statements = []

    def close(self) -> tuple[Stmt, ...]:
        while self.opened:
            condition, before = self.opened.pop()
            if self.statements:
                before.append(If(condition, tuple(self.statements)))
            self.statements = before
        return tuple(self.statements)


class Ranges:
    """The ranges of variables, from those of what they derive from (Senanayake et al., 6.1)."""

    def __init__(self, relations: Relations, sizes: dict[str, int]):
        self.relations = relations
        self.storage = relations.storage
        self.sizes = sizes

    def of(self, var: IndexVar, scope: Scope) -> Range:
        if var in scope.ranges:
            return scope.ranges[var]
        match self.relations.source(var):
            case Split(parent, outer, _, size):
                return _tiles(self.of(parent, scope), size) if var == outer else _first(size)
            case Divide(parent, outer, _, parts):
                if var == outer:
                    return _first(parts)
                whole = self.of(parent, scope)
                chunk = self.chunk(parent, parts, scope)
                return Range(ZERO, chunk, _static(chunk, whole, parts))
            case Fuse(outer, inner):
                return _first(self.extent(outer, scope) * self.extent(inner, scope))
            case Pos() as pos:
                return self._positions(pos, scope)
            case Bound(parent, _, size):
                whole = self.of(parent, scope)
                if whole.bound is None:
                    raise NotImplementedError(
                        f"bound({parent}, {var}, {size}): the extent of {parent} is known at run "
                        "time only"
                    )
                if whole.bound != size:
                    raise ScheduleError(
                        f"bound({parent}, {var}, {size}): the extent of {parent} is {whole.bound}"
                    )
                return whole
            case Precompute(parent) | Coord(parent):
                return self.of(parent, scope)
        return _first(self.sizes[var.name])

    def extent(self, var: IndexVar, scope: Scope) -> int:
        exact = self.of(var, scope).exact
        if exact is None:
            raise NotImplementedError(f"the extent of {var} must be known to fuse or unroll it")
        return exact

    def chunk(self, parent: IndexVar, parts: int, scope: Scope) -> Expr:
        whole = self.of(parent, scope)
        return ceil_divide(subtract(whole.high, whole.low), parts)

    def _positions(self, pos: Pos, scope: Scope) -> Range:
        assert self.storage is not None
        if pos.position in self.relations.tiles:
            return self._coordinate_tile(pos, scope)
        first, last = self.relations.levels_of(pos)
        return self.level_range(first, last, scope)

    def level_range(self, first: int, last: int, scope: Scope) -> Range:
        """Positions of level `last` under the one known position of the level above `first`."""
        storage = self.storage
        assert storage is not None
        if first == 0:
            high = storage.descend(ONE, 0, last)
            return Range(ZERO, high, storage.positions[last])
        parent = scope.positions.get(first - 1)
        if parent is None:
            raise ScheduleError(
                f"the positions of {storage.variables[last]} are those under one position of "
                f"{storage.variables[first - 1]}, whose loop must be outside"
            )
        low = storage.descend(parent, first, last)
        return Range(low, storage.descend(add(parent, ONE), first, last))

    def _coordinate_tile(self, pos: Pos, scope: Scope) -> Range:
        """The positions whose coordinates lie in a tile: two searches."""
        assert self.storage is not None
        level = self.relations.levels.index(pos.coordinate)
        segment = self.level_range(level, level, scope)
        var = self.relations.tiles[pos.position]
        low: Expr = ZERO
        high = self.of(var, scope).high
        while var != pos.coordinate:
            match self.relations.source(var):
                case Split(parent, outer, _, size):
                    base = multiply(self.value(outer, scope), Int(size))
                    low, high = add(base, low), add(base, high)
                    high = least(high, self.of(parent, scope).high)
                    var = parent
                case Bound(parent):
                    var = parent
        array = self.storage.coordinates(level)
        return Range(_lower_bound(array, segment, low), _lower_bound(array, segment, high))

    def value(self, var: IndexVar, scope: Scope) -> Expr:
        """The value of a variable in terms of what is known, without defining anything."""
        found = self.try_value(var, scope)
        if found is None:
            raise ScheduleError(f"the loops so far do not know {var}")
        return found

    def try_value(self, var: IndexVar, scope: Scope) -> Expr | None:
        if var in scope.known:
            return scope.known[var]
        for relation in self.relations.all:
            match relation:
                case Split(parent, outer, inner, size) if parent == var:
                    chunk: Expr = Int(size)
                    low: Expr = ZERO
                case Divide(parent, outer, inner, parts) if parent == var:
                    chunk = self.chunk(parent, parts, scope)
                    low = self.of(parent, scope).low
                case Fuse(outer, inner, fused) if var in (outer, inner):
                    value = self.try_value(fused, scope)
                    if value is None or self.relations.is_sparse(fused):
                        continue
                    extent = max(self.extent(inner, scope), 1)
                    return divide(value, extent) if var == outer else modulo(value, extent)
                case Bound(parent, same) | Precompute(parent, same) if parent == var:
                    value = self.try_value(same, scope)
                    if value is not None:
                        return value
                    continue
                case _:
                    continue
            a, b = self.try_value(outer, scope), self.try_value(inner, scope)
            if a is not None and b is not None:
                return add(low, add(multiply(a, chunk), b))
        return None


def _first(count: int) -> Range:
    return Range(ZERO, Int(count), count)


def _tiles(whole: Range, size: int) -> Range:
    bound = None if whole.bound is None else -(-whole.bound // size)
    return Range(divide(whole.low, size), ceil_divide(whole.high, size), bound)


def _static(chunk: Expr, whole: Range, parts: int) -> int | None:
    if isinstance(chunk, Int):
        return chunk.value
    return None if whole.bound is None else -(-whole.bound // parts)


def _lower_bound(array: str, segment: Range, coordinate: Expr) -> Expr:
    """The first position of a segment whose coordinate is not below `coordinate`."""
    if coordinate == ZERO:
        return segment.low
    some = Binary("<", segment.low, segment.high)
    below = Binary("<", Load(array, segment.low), coordinate)
    target = subtract(coordinate, ONE)
    found = add(Search(array, segment.low, segment.high, target), ONE)
    return Select(Binary("and", some, below), found, segment.low)
