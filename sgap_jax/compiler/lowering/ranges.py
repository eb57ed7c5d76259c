"""Ranges and values of variables, from those that they are derived from or that derive from them
(Senanayake et al., OOPSLA 2020, section 6.1).

    split(i, i0, i1, 16), 0 <= i < m:    0 <= i0 < (m + 15) / 16, 0 <= i1 < 16, i = i0 * 16 + i1
    pos(j, p, A(i,j)), A in CSR:         A2_pos[i] <= p < A2_pos[i + 1]

Nothing here emits a statement.
"""

from __future__ import annotations

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
from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, Int, Load, Search, Select
from sgap_jax.compiler.lowering.context import Context, Range
from sgap_jax.compiler.notation.cin import Bound, Coord, Divide, Fuse, Pos, Precompute, Split
from sgap_jax.compiler.notation.expr import IndexVar
from sgap_jax.schedules.schedule import ScheduleError


def range_of(ctx: Context, var: IndexVar) -> Range:
    if var in ctx.scope.ranges:
        return ctx.scope.ranges[var]
    match ctx.relations.source(var):
        case Split(parent, outer, _, size):
            return _tiles(range_of(ctx, parent), size) if var == outer else _first(size)
        case Divide(parent, outer, _, parts):
            if var == outer:
                return _first(parts)
            whole, chunk = range_of(ctx, parent), _chunk(ctx, parent, parts)
            return Range(ZERO, chunk, _static(chunk, whole, parts))
        case Fuse(outer, inner):
            return _first(extent_of(ctx, outer) * extent_of(ctx, inner))
        case Pos() as pos:
            if pos.position in ctx.relations.tiles:
                return _coordinate_tile(ctx, pos)
            return positions_below(ctx, *ctx.relations.levels_of(pos))
        case Bound(parent, _, size):
            whole = range_of(ctx, parent)
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
            return range_of(ctx, parent)
    return _first(ctx.sizes[var.name])


def extent_of(ctx: Context, var: IndexVar) -> int:
    exact = range_of(ctx, var).exact
    if exact is None:
        raise NotImplementedError(f"the extent of {var} must be known to fuse or unroll it")
    return exact


def positions_below(ctx: Context, first: int, last: int) -> Range:
    """The positions of level `last` under the one known position of the level above `first`."""
    storage = ctx.storage
    if first == 0:
        high = storage.descend(ONE, 0, last)
        return Range(ZERO, high, storage.positions[last])
    parent = ctx.scope.positions.get(first - 1)
    if parent is None:
        raise ScheduleError(
            f"the positions of {storage.variables[last]} are those under one position of "
            f"{storage.variables[first - 1]}, whose loop must be outside"
        )
    low = storage.descend(parent, first, last)
    return Range(low, storage.descend(add(parent, ONE), first, last))


def value_of(ctx: Context, var: IndexVar) -> Expr:
    """The value of a variable in terms of what is known."""
    found = try_value(ctx, var)
    if found is None:
        raise ScheduleError(f"the loops so far do not know {var}")
    return found


def try_value(ctx: Context, var: IndexVar) -> Expr | None:
    """As `value_of`; None where the loops so far do not determine it."""
    if var in ctx.scope.known:
        return ctx.scope.known[var]
    for relation in ctx.relations.all:
        match relation:
            case Split(parent, outer, inner, size) if parent == var:
                chunk: Expr = Int(size)
                low: Expr = ZERO
            case Divide(parent, outer, inner, parts) if parent == var:
                chunk = _chunk(ctx, parent, parts)
                low = range_of(ctx, parent).low
            case Fuse(outer, inner, fused) if var in (outer, inner):
                value = try_value(ctx, fused)
                if value is None or ctx.relations.is_sparse(fused):
                    continue
                extent = max(extent_of(ctx, inner), 1)
                return divide(value, extent) if var == outer else modulo(value, extent)
            case Bound(parent, same) | Precompute(parent, same) if parent == var:
                value = try_value(ctx, same)
                if value is not None:
                    return value
                continue
            case _:
                continue
        a, b = try_value(ctx, outer), try_value(ctx, inner)
        if a is not None and b is not None:
            return add(low, add(multiply(a, chunk), b))
    return None


def _chunk(ctx: Context, parent: IndexVar, parts: int) -> Expr:
    whole = range_of(ctx, parent)
    return ceil_divide(subtract(whole.high, whole.low), parts)


def _coordinate_tile(ctx: Context, pos: Pos) -> Range:
    """The positions whose coordinates lie in a tile: two searches in their segment."""
    level = ctx.relations.levels.index(pos.coordinate)
    segment = positions_below(ctx, level, level)
    var = ctx.relations.tiles[pos.position]
    low: Expr = ZERO
    high = range_of(ctx, var).high
    while var != pos.coordinate:
        match ctx.relations.source(var):
            case Split(parent, outer, _, size):
                base = multiply(value_of(ctx, outer), Int(size))
                low, high = add(base, low), add(base, high)
                high = least(high, range_of(ctx, parent).high)
                var = parent
            case Bound(parent):
                var = parent
    array = ctx.storage.coordinates(level)
    return Range(lower_bound(array, segment, low), lower_bound(array, segment, high))


def _first(count: int) -> Range:
    return Range(ZERO, Int(count), count)


def _tiles(whole: Range, size: int) -> Range:
    bound = None if whole.bound is None else -(-whole.bound // size)
    return Range(divide(whole.low, size), ceil_divide(whole.high, size), bound)


def _static(chunk: Expr, whole: Range, parts: int) -> int | None:
    if isinstance(chunk, Int):
        return chunk.value
    return None if whole.bound is None else -(-whole.bound // parts)


def lower_bound(array: str, segment: Range, coordinate: Expr) -> Expr:
    """The first position of a segment whose coordinate is not below `coordinate`."""
    if coordinate == ZERO:
        return segment.low
    some = Binary("<", segment.low, segment.high)
    below = Binary("<", Load(array, segment.low), coordinate)
    target = subtract(coordinate, ONE)
    found = add(Search(array, segment.low, segment.high, target), ONE)
    return Select(Binary("and", some, below), found, segment.low)
