"""What a loop variable makes known (Senanayake et al., OOPSLA 2020, section 6.2).

An index from its parts, a coordinate from its position, a position from its parent's: each is
defined as soon as it can be. A value defined here may be out of range. What follows then goes under
an `if`; but before a group reduction, which every lane must reach, a lane with such a value is
masked instead. In the loop of i1 of split(i, i0, i1, 16):

    i = i0 * 16 + i1
    if (i < m) ...
"""

from __future__ import annotations

from sgap_jax.compiler.loop_ir.arithmetic import (
    ZERO,
    add,
    both,
    divide,
    modulo,
    multiply,
    reads_memory,
)
from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, Int, Let, Load, Var
from sgap_jax.compiler.lowering.context import Context, Range
from sgap_jax.compiler.lowering.parent_positions import define_parents
from sgap_jax.compiler.lowering.ranges import extent_of, range_of, value_of
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
from sgap_jax.compiler.notation.expr import Access, IndexVar


def name_ends(ctx: Context, var: IndexVar) -> None:
    """Before a loop: names for the ends of the positions that it runs over or tiles."""
    while not isinstance(relation := ctx.relations.source(var), Pos):
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
    if var in ctx.scope.ranges:
        return
    first, _ = ctx.relations.levels_of(relation)
    if first > 0 and first - 1 not in ctx.scope.positions:
        return
    found = range_of(ctx, var)
    low = _end(ctx, f"{var}_begin", found.low)
    high = _end(ctx, f"{var}_end", found.high)
    ctx.scope.ranges[var] = Range(low, high, found.bound)


def _end(ctx: Context, name: str, value: Expr) -> Expr:
    if not reads_memory(value):
        return value
    name = ctx.fresh(name)
    ctx.emit(Let(name, value))
    return Var(name)


def define_derived(ctx: Context, loop: Forall) -> None:
    """In a loop: all that follows from its variable and what was known outside."""
    levels = range(len(ctx.relations.levels))
    while any([_apply(ctx, r, loop) for r in ctx.relations.all]) or any(
        [_locate(ctx, level) for level in levels]
    ):
        pass
    for access, storage in ctx.merged.items():
        for level in range(len(storage.levels)):
            _locate_dense(ctx, access, level)


def _apply(ctx: Context, relation: Relation, loop: Forall) -> bool:
    """Defines the variables that a relation gives from known ones; whether there were any."""
    known, positions = ctx.scope.known, ctx.scope.positions
    match relation:
        case Split(parent, outer, inner, size):
            if outer in known and inner in known and parent not in known:
                base = multiply(known[outer], Int(size))
                ctx.define(parent, add(base, known[inner]))
                _guard_range(ctx, parent, size)
                return True
            blocks = relation in ctx.storage.splits
            if blocks and parent in known and not (outer in known or inner in known):
                ctx.define(outer, divide(known[parent], size))
                ctx.define(inner, modulo(known[parent], size))
                return True
        case Divide(parent, outer, inner, parts):
            if outer in known and inner in known and parent not in known:
                ctx.define(parent, value_of(ctx, parent))
                _guard_range(ctx, parent, parts)
                return True
        case Fuse(outer, inner, fused):
            if fused in known and outer not in known and not ctx.relations.is_sparse(fused):
                extent = max(extent_of(ctx, inner), 1)
                ctx.define(outer, divide(known[fused], extent))
                ctx.define(inner, modulo(known[fused], extent))
                return True
        case Bound(parent, same) | Precompute(parent, same):
            if same in known and parent not in known:
                known[parent] = known[same]
                return True
        case Pos():
            _, last = ctx.relations.levels_of(relation)
            if relation.position in known and last not in positions:
                positions[last] = known[relation.position]
                define_parents(ctx, relation, loop)
                return True
            if last in positions and relation.position not in known:
                known[relation.position] = positions[last]
                return True
    return False


def _guard_range(ctx: Context, var: IndexVar, size: int) -> None:
    """Guards a variable that is put together from tiles of `size` (or from `size` equal parts) and
    so may pass the end of its range."""
    if var in ctx.scope.unguarded:
        return
    extent, value = range_of(ctx, var), ctx.scope.known[var]
    low = None if extent.low == ZERO else Binary("<=", extent.low, value)
    high = None if extent.fits(size) else Binary("<", value, extent.high)
    ctx.guard(var, both(low, high))


def _locate_dense(ctx: Context, access: Access, level: int) -> None:
    """Defines the position of an operand whose coordinates are merged at a level that stores all of
    them, as soon as it can be."""
    storage, located = ctx.merged[access], ctx.scope.located
    var = storage.variables[level]
    if not storage.is_dense(level) or (access, level) in located or var not in ctx.scope.known:
        return
    parent = ZERO if level == 0 else located.get((access, level - 1))
    if parent is not None:
        place = add(multiply(parent, Int(storage.extents[level])), ctx.scope.known[var])
        innermost = level == len(storage.levels) - 1
        name = f"{access.tensor}_at" if innermost else f"{access.tensor}{level + 1}_p"
        located[access, level] = ctx.let(name, place)


def _locate(ctx: Context, level: int) -> bool:
    """Defines a level's position from its parent's, or its coordinate from its position; whether it
    defined anything."""
    storage, known, positions = ctx.storage, ctx.scope.known, ctx.scope.positions
    var, parent = storage.variables[level], ZERO if level == 0 else positions.get(level - 1)
    if level in positions:
        if storage.is_dense(level) or var in known:
            return False
        ctx.define(var, Load(storage.coordinates(level), positions[level]))
        return True
    if parent is None or storage.is_compressed(level):
        return False
    if not storage.is_dense(level):  # a singleton level
        positions[level] = parent
        return True
    if var not in known:
        return False
    place = add(multiply(parent, Int(storage.extents[level])), known[var])
    innermost = level == len(storage.levels) - 1
    name = f"{storage.access.tensor}_at" if innermost else f"{var}_pos"
    positions[level] = ctx.let(name, place)
    return True
