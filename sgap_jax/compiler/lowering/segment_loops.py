"""Loops over the positions of several levels, segment by segment.

A serial loop that has a sum for each parent (parent_positions.py) asks at each position whether the
parent's segment ends. On a CPU it becomes a loop over segments, and in it one over the positions of
each: nothing else is asked there, and lanes may share a segment. For the entries of rows i:

    while ((stop = A2_pos[i + 1]) < last) { for (p = begin; p < stop; p++) ...; begin = stop; i++; }
    for (p = begin; p < last; p++) ...  // the last segment, which the tile may cut off
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
from sgap_jax.compiler.lowering.context import Context, TrackedParents
from sgap_jax.compiler.lowering.derived_variables import define_derived, name_ends
from sgap_jax.compiler.lowering.parent_positions import store_sum, track_parents
from sgap_jax.compiler.lowering.ranges import range_of, value_of
from sgap_jax.compiler.lowering.reductions import IDENTITY
from sgap_jax.compiler.notation.cin import Forall
from sgap_jax.compiler.notation.expr import IndexVar

# Segments whose sums are computed together: a vector of their values has parts for each.
TOGETHER = 4

Lower = Callable[[Context, Forall], None]  # makes the body of a loop


def lower_segments(ctx: Context, loop: Forall, lower: Lower) -> None:
    """The loops and stores that a loop over positions becomes."""
    position = ctx.nest.segment_steps(loop)[-1]
    name_ends(ctx, loop.var)
    with ctx.block() as around:
        tracked = track_parents(ctx, loop)
        assert tracked is not None
        ((level, parent),) = tracked.scalars
        last = ctx.let(f"{position}_last", _last(ctx, loop))
        begin, stop = (ctx.fresh(f"{position}_{end}") for end in ("begin", "stop"))
        ctx.emit(Let(begin, tracked.begin, mutable=True))
        end = Load(ctx.storage.offsets(level), add(Var(parent), ONE))
        with ctx.reusable_names() as taken:
            with ctx.block() as segment:
                ctx.emit(Let(stop, end))
                total = _lower_segment(ctx, loop, Var(begin), Var(stop), lower)
                with ctx.adding_to(total):
                    _store_whole(ctx, tracked, Binary("==", Var(begin), tracked.begin))
                ctx.emit(Set(begin, Var(stop)), Set(parent, add(Var(parent), ONE)))
                with ctx.reusable_names():
                    _lower_together(ctx, loop, tracked, begin, last, lower)
            ctx.emit(While(Binary("<", end, last), segment.close()))
        total = _lower_segment(ctx, loop, Var(begin), last, lower)
        ctx.names |= taken
        with ctx.adding_to(total):
            store_sum(ctx, tracked)
    ctx.emit(*around.close())


def _lower_segment(ctx: Context, loop: Forall, begin: Expr, end: Expr, lower: Lower) -> str:
    """A loop over the positions [begin, end), and the name of its sum."""
    steps, total = ctx.nest.segment_steps(loop), ctx.fresh("sum")
    position, place = steps[-1], ctx.fresh(steps[-1].name)
    starts = {var: _position_at(ctx, position, var, ZERO) for var in steps}
    with ctx.block(unguarded=ctx.scope.unguarded | set(steps)) as inner, ctx.adding_to(total):
        inner.known |= {var: subtract(Var(place), start) for var, start in starts.items()}
        define_derived(ctx, loop)
        lower(ctx, loop)
    ctx.emit(Let(total, Float(IDENTITY[ctx.expression.reduction]), mutable=True))
    ctx.emit(For(place, begin, end, inner.close(), unit=loop.unit))
    return total


def _store_whole(ctx: Context, tracked: TrackedParents, first: Expr) -> None:
    """The sum of a segment that ends here. All but the first of a task, which another task may have
    begun, have their element to themselves."""
    if not (ctx.plan.atomic and ctx.nest.owns_segments(tracked.pos)):
        store_sum(ctx, tracked)
        return
    with ctx.block() as shared:
        store_sum(ctx, tracked)
    with ctx.block() as own:
        store_sum(ctx, tracked, exclusive=True)
    ctx.emit(If(first, shared.close(), own.close()))


def _lower_together(
    ctx: Context, loop: Forall, tracked: TrackedParents, begin: str, last: Expr, lower: Lower
) -> None:
    """After the first segment, several at a time: lanes over segments whose own lanes are side by
    side in memory. Their sums take fewer steps together than one by one."""
    storage, position = ctx.storage, tracked.pos.position
    ((level, parent),) = tracked.scalars
    owned = ctx.plan.atomic and ctx.nest.owns_segments(tracked.pos)
    counted = all(storage.is_dense(above) for above in range(level))
    if loop.unit != CPU_VECTOR or not owned or not counted:
        return
    lane, row = ctx.fresh("lane"), ctx.fresh(parent)
    offsets = storage.offsets(level)
    own = dataclasses.replace(tracked, scalars=((level, row),))
    with ctx.block() as group:
        ctx.emit(Let(row, add(Var(parent), Var(lane))))
        ends = [ctx.fresh(f"{position}_{end}") for end in ("begin", "stop")]
        for end, place in zip(ends, (Var(row), add(Var(row), ONE)), strict=True):
            ctx.emit(Let(end, Load(offsets, place)))
        group.tracked[position] = own
        with ctx.adding_to(_lower_segment(ctx, loop, Var(ends[0]), Var(ends[1]), lower)):
            store_sum(ctx, own, exclusive=True)
    body = group.close()
    if any(gathers(inner) for inner in body if isinstance(inner, For)):
        return
    after = add(Var(parent), Int(TOGETHER))
    there = Binary("<=", after, Int(storage.positions[level - 1]))
    inside = Binary("<", Load(offsets, after), last)
    lanes = For(lane, ZERO, Int(TOGETHER), body, unit=CPU_VECTOR)
    onward = (Set(begin, Load(offsets, after)), Set(parent, after))
    ctx.emit(While(Binary("and", there, inside), (lanes, *onward)))


def _position_at(ctx: Context, position: IndexVar, var: IndexVar, value: Expr) -> Expr:
    """The position where a variable has a value."""
    with ctx.block() as there:
        there.known[var] = value
        return value_of(ctx, position)


def _last(ctx: Context, loop: Forall) -> Expr:
    """The position behind the last one."""
    steps, last = ctx.nest.segment_steps(loop), None
    for var, inner in zip(steps, (None, *steps), strict=False):
        extent = range_of(ctx, var)
        tile = None if inner is None else range_of(ctx, inner).exact
        if var in ctx.scope.unguarded or (tile is not None and extent.fits(tile)):
            continue
        end = _position_at(ctx, steps[-1], var, extent.high)
        last = end if last is None else least(last, end)
    assert last is not None  # of a tile at least its own size
    return last
