"""The positions above a position, of which the coordinates are asked for (Senanayake et al., OOPSLA
2020, section 6.2: recover_track). Anywhere, a search in the offsets finds them:

    i = search(A2_pos, 0, m, p)

A serial loop over the positions of several levels searches once, for the parents of its first
position. From then on a parent advances where its segment ends: in a `while` if it is of a dense
level (its segments may be empty), in an `if` if it is stored (they may not). A sum that belongs to
a parent is stored before the parent advances:

    while (p == A2_pos[i + 1]) { y[i] += sum; sum = 0; i += 1; }
"""

from __future__ import annotations

from sgap_jax.compiler.loop_ir.arithmetic import ONE, ZERO, add, both, divide, greatest, modulo
from sgap_jax.compiler.loop_ir.loopir import (
    Binary,
    Expr,
    Float,
    If,
    Int,
    Let,
    Load,
    Search,
    Select,
    Set,
    Stmt,
    Var,
    While,
)
from sgap_jax.compiler.lowering.assignments import store
from sgap_jax.compiler.lowering.context import Context, TrackedParents
from sgap_jax.compiler.lowering.ranges import positions_below, range_of, value_of
from sgap_jax.compiler.lowering.reductions import IDENTITY
from sgap_jax.compiler.notation.cin import Body, Forall, Pos, Split
from sgap_jax.compiler.notation.expr import IndexVar, accesses
from sgap_jax.compiler.notation.nest import paths


def track_parents(ctx: Context, loop: Forall) -> TrackedParents | None:
    """Before a loop: scalars for the parents of its first position; None where it has none."""
    pos = ctx.nest.tracked_positions(loop.var)
    levels = [] if pos is None else _needed_levels(ctx, pos, loop.body)
    if pos is None or not levels:
        return None
    storage, (first, last) = ctx.storage, ctx.relations.levels_of(pos)
    whole = range_of(ctx, pos.position)
    begin = ctx.let(f"{pos.position}_first", _first_position(ctx, pos, loop))
    nonempty: Expr | None = Binary("<", begin, whole.high)
    if ctx.scope.masked and _by_lane(ctx, pos):
        nonempty = both(ctx.scope.live, nonempty)
    else:
        ctx.scope.only_if(Binary("<", begin, whole.high))
        nonempty = None
    scalars: list[tuple[int, str]] = []
    place = begin
    for level in range(last, min(levels), -1):
        if storage.is_dense(level):
            place = divide(place, storage.extents[level])
        elif storage.is_compressed(level):
            above = positions_below(ctx, first, level - 1)
            found: Expr = Search(storage.offsets(level), above.low, above.high, place)
            # A first segment may be empty: the innermost parent advances past it at once.
            if begin == whole.low and not (scalars and storage.is_dense(level - 1)):
                found = above.low
            elif nonempty is not None:
                found = Select(nonempty, found, ZERO)
            name = ctx.fresh(_name(ctx, level - 1))
            ctx.emit(Let(name, found, mutable=True))
            scalars.append((level, name))
            place = Var(name)
    contiguous = bool(ctx.relations.unit_steps(loop.var, pos.position))
    tracked = TrackedParents(pos, tuple(scalars), contiguous, begin)
    ctx.scope.tracked[pos.position] = tracked
    return tracked


def _first_position(ctx: Context, pos: Pos, loop: Forall) -> Expr:
    low = range_of(ctx, pos.position).low
    if loop.var == pos.position:
        return low
    start = range_of(ctx, loop.var).low
    with ctx.block() as trial:
        trial.known[loop.var] = start
        begin = value_of(ctx, pos.position)
    return begin if low == ZERO else greatest(begin, low)


def define_parents(ctx: Context, pos: Pos, loop: Forall) -> None:
    """In a loop that makes a position known: the positions above it that its body needs."""
    tracked = ctx.scope.tracked.get(pos.position)
    if tracked is not None and ctx.nest.tracked_positions(loop.var) != pos:
        tracked = None
    scalars = {} if tracked is None else dict(tracked.scalars)
    if tracked is not None and not ctx.nest.segment_steps(loop):
        place = ctx.scope.known[pos.position]
        ctx.emit(*_advance(ctx, tracked, tracked.scalars, place))
    storage, (first, last) = ctx.storage, ctx.relations.levels_of(pos)
    levels, positions = _needed_levels(ctx, pos, loop.body), ctx.scope.positions
    for level in range(last, min(levels, default=last), -1):
        place = positions[level]
        if level in scalars:
            above: Expr = Var(scalars[level])
        elif storage.is_compressed(level):
            within = positions_below(ctx, first, level - 1)
            found = Search(storage.offsets(level), within.low, within.high, place)
            above = ctx.let(_name(ctx, level - 1), found, _by_lane(ctx, pos))
        elif storage.is_dense(level):
            above = ctx.let(_name(ctx, level - 1), divide(place, storage.extents[level]))
        else:
            above = place
        positions[level - 1] = above
        if storage.is_dense(level - 1):
            ctx.define(storage.variables[level - 1], _coordinate(ctx, level - 1, first))


def store_sum(ctx: Context, tracked: TrackedParents, exclusive: bool = False) -> None:
    """The sum of the tracked parent to its element, if that is not a part of a block beyond the
    matrix; `exclusive`: no one else adds to it."""
    assert ctx.sum is not None
    with ctx.block() as at:
        _locate_parents(ctx, tracked)
        for made in ctx.relations.all:
            match made:
                case Split(parent=index, outer=outer) if outer in ctx.storage.ragged:
                    if index in ctx.expression.output.indices:
                        at.only_if(Binary("<", value_of(ctx, index), Int(ctx.sizes[index.name])))
        store(ctx, Var(ctx.sum), exclusive)
    ctx.emit(*at.close())


def _locate_parents(ctx: Context, tracked: TrackedParents) -> None:
    """Positions and coordinates in terms of the tracked parents, without new names."""
    storage, scope, scalars = ctx.storage, ctx.scope, dict(tracked.scalars)
    first, last = ctx.relations.levels_of(tracked.pos)
    for level in range(last, first, -1):
        if level in scalars:
            scope.positions[level - 1] = Var(scalars[level])
        elif level in scope.positions:
            place = scope.positions[level]
            dense = storage.is_dense(level)
            scope.positions[level - 1] = divide(place, storage.extents[level]) if dense else place
        if level - 1 in scope.positions:
            scope.known[storage.variables[level - 1]] = _coordinate(ctx, level - 1, first)


def _coordinate(ctx: Context, level: int, first: int) -> Expr:
    storage, place = ctx.storage, ctx.scope.positions[level]
    if not storage.is_dense(level):
        return Load(storage.coordinates(level), place)
    return place if level == 0 else modulo(place, storage.extents[level])


def _advance(
    ctx: Context, tracked: TrackedParents, scalars: tuple[tuple[int, str], ...], place: Expr
) -> list[Stmt]:
    """What advances the parents to those of a position, from the innermost of `scalars` on."""
    if not scalars:
        return []
    storage, ((level, name), *rest) = ctx.storage, scalars
    end = Load(storage.offsets(level), add(Var(name), ONE))
    live = ctx.scope.live if _by_lane(ctx, tracked.pos) else None
    condition = both(live, Binary("==" if tracked.contiguous else ">=", place, end))
    assert condition is not None
    step: list[Stmt] = []
    if _ends_sum(ctx, tracked, level):
        assert ctx.sum is not None
        with ctx.block() as at:
            store_sum(ctx, tracked)
        start = Float(IDENTITY[ctx.expression.reduction])
        step += [*at.close(), Set(ctx.sum, start)]
    step.append(Set(name, add(Var(name), ONE)))
    above: Expr = Var(name)
    for between in range(level - 1, rest[0][0] if rest else level - 1, -1):
        if storage.is_dense(between):
            above = divide(above, storage.extents[between])
    onward = _advance(ctx, tracked, tuple(rest), above)
    if tracked.contiguous and not storage.is_dense(level - 1):
        return [If(condition, (*step, *onward))]
    return [While(condition, tuple(step)), *onward]


def _ends_sum(ctx: Context, tracked: TrackedParents, level: int) -> bool:
    """Whether the sum belongs to the parent above `level`, and no deeper."""
    plan, storage = ctx.plan, ctx.storage
    if plan.sum_loop is None or not plan.by_segment or ctx.sum is None:
        return False
    if ctx.nest.tracked_positions(plan.sum_loop) != tracked.pos:
        return False
    first, last = ctx.relations.levels_of(tracked.pos)
    outputs = _with_blocks(ctx, ctx.expression.output.indices)
    deepest = max(n for n in range(first, last) if storage.variables[n] in outputs)
    return level == min(n for n, _ in tracked.scalars if n - 1 >= deepest)


def _by_lane(ctx: Context, pos: Pos) -> bool:
    """Whether the lanes of a group are at different positions. Where they are not, one that takes
    no part has the coordinates of the others: they reduce into one element."""
    first, _ = ctx.relations.levels_of(pos)
    return any(map(ctx.by_lane, (pos.position, *ctx.storage.variables[:first])))


def _name(ctx: Context, level: int) -> str:
    var = ctx.storage.variables[level].name
    return var if level == 0 and ctx.storage.is_dense(0) else f"{var}_pos"


def _needed_levels(ctx: Context, pos: Pos, body: Body) -> list[int]:
    """The levels above the last whose coordinates, or positions, the body uses."""
    used, shared, storage = set(), set(), ctx.storage
    for _, statement in paths(body):
        for access in (statement.target, *accesses(statement.factors)):
            if access.format is None:
                used |= set(access.indices)
            elif access != storage.access:  # it has an element for each position of this level
                shared.add(ctx.expression.shares(access) - 1)
    needed = _with_blocks(ctx, (*used, *storage.ragged))
    first, last = ctx.relations.levels_of(pos)
    return [n for n in range(first, last) if storage.variables[n] in needed or n in shared]


def _with_blocks(ctx: Context, used: tuple[IndexVar, ...]) -> set[IndexVar]:
    """With the variables of the levels of those that are stored in blocks."""
    needed = set(used)
    for relation in ctx.relations.all:
        if isinstance(relation, Split) and relation.parent in needed:
            needed |= {relation.outer, relation.inner}
    return needed
