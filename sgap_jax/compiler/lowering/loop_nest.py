"""Statements of concrete index notation to statements of the loop IR, from the outside in.

forall     a loop; its body knows what its variable makes known (derived_variables.py)
where      the producer, then the consumer
=, +=      loads, products and a store (assignments.py)
"""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.loop_ir.arithmetic import ZERO, divide, modulo
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_VECTOR,
    GPU_THREAD,
    GPU_WARP,
    Binary,
    Float,
    For,
    If,
    Int,
    Let,
    Stmt,
    Var,
)
from sgap_jax.compiler.lowering.assignments import assign, declare_temporaries, store
from sgap_jax.compiler.lowering.clearing import clear_row
from sgap_jax.compiler.lowering.context import Context, JoinedThreads, Range
from sgap_jax.compiler.lowering.derived_variables import define_derived, name_ends
from sgap_jax.compiler.lowering.merge_loops import lower_merge, lower_where_terms, merged_index
from sgap_jax.compiler.lowering.octet import declare_tile, multiply_tile, store_tile
from sgap_jax.compiler.lowering.parent_positions import store_sum, track_parents
from sgap_jax.compiler.lowering.partial_tiles import opened_tile, trim, without_vectors
from sgap_jax.compiler.lowering.ranges import range_of
from sgap_jax.compiler.lowering.reductions import IDENTITY
from sgap_jax.compiler.lowering.segment_loops import lower_segments
from sgap_jax.compiler.notation.cin import Assignment, Body, Forall, Split, Where
from sgap_jax.compiler.notation.expr import IndexVar
from sgap_jax.schedules.schedule import ScheduleError

WARP = 32


def lower_body(ctx: Context, body: Body) -> None:
    match body:
        case Assignment():
            assign(ctx, body)
        case Where():
            _lower_where(ctx, body)
        case Forall():
            if body.var in ctx.scope.known:  # one position, known from its parent's
                if body.unit is not None:
                    raise ScheduleError(f"{body.var} has one value here: no loop to parallelize")
                lower_body(ctx, body.body)
            elif body.var != ctx.plan.sum_loop:
                _lower_loop(ctx, body)
            elif ctx.plan.warp:
                declare_tile(ctx)
                _lower_loop(ctx, body)
                store_tile(ctx)
            elif ctx.plan.by_segment and ctx.nest.segment_steps(body):
                lower_segments(ctx, body, _lower_inside)
            else:
                _lower_sum(ctx, body)


def _lower_where(ctx: Context, where: Where) -> None:
    if ctx.expression.merges:
        lower_where_terms(ctx, where, lower_body)
        return
    declare_temporaries(ctx, where)
    with ctx.block(masked=False, live=None) as producer, ctx.adding_to(None):
        lower_body(ctx, where.producer)
    _emit_live(ctx, producer.close())
    lower_body(ctx, where.consumer)


def _lower_sum(ctx: Context, loop: Forall) -> None:
    """sum = 0, the loop that adds to it, and the store unless the loop itself stores by segment."""
    name = ctx.fresh("sum")
    ctx.emit(Let(name, Float(IDENTITY[ctx.expression.reduction]), mutable=True))
    with ctx.adding_to(name):
        with ctx.block(masked=False, live=None) as inner:
            _lower_loop(ctx, loop)
        _emit_live(ctx, inner.close())
        if not ctx.plan.by_segment:
            store(ctx, Var(name))


def _emit_live(ctx: Context, statements: tuple[Stmt, ...]) -> None:
    """Statements without a collective: a lane that takes no part skips them."""
    if ctx.scope.live is None:
        ctx.emit(*statements)
    elif statements:
        ctx.emit(If(ctx.scope.live, statements))


def _lower_loop(ctx: Context, loop: Forall) -> None:
    """A loop, with what its variable makes known at the beginning of the body. Before it come names
    for the ends of its positions and the parents of the first one, after it their last sum."""
    plan = ctx.plan
    if loop.var in plan.warp[:1]:
        multiply_tile(ctx)
        return
    if (index := merged_index(ctx, loop.var)) is not None:
        lower_merge(ctx, loop, index, lower_body)
        return
    for index in ctx.expression.indices:
        if index in ctx.scope.known and ctx.relations.loops_of(index, {loop.var}):
            raise NotImplementedError(f"{loop.var} is a loop over {index}, which is known there")
    name_ends(ctx, loop.var)
    with ctx.block() as around:
        tracked = track_parents(ctx, loop)
        with ctx.block() as inner:
            if plan.group is not None and loop.var == plan.group.var and ctx.sum is None:
                inner.masked = True  # the collective store is inside
            header = _header(ctx, loop)
            define_derived(ctx, loop)
            if loop.var == ctx.cleared_row:
                clear_row(ctx)
            _lower_inside(ctx, loop)
        statements = inner.close()
        if header is None:
            ctx.emit(*statements)
        elif statements:
            ctx.emit(dataclasses.replace(header, body=statements))
        if tracked and plan.by_segment and plan.sum_loop == loop.var and ctx.sum is not None:
            store_sum(ctx, tracked)
    ctx.emit(*around.close())


def _lower_inside(ctx: Context, loop: Forall) -> None:
    """The body of a loop; twice where it opens a tile that may be cut off (partial_tiles.py)."""
    tile = opened_tile(ctx, loop)
    if tile is None:
        lower_body(ctx, loop.body)
        return
    parent, whole = tile
    unguarded = ctx.scope.unguarded | {parent}
    with ctx.reusable_names() as taken, ctx.block(unguarded=unguarded) as full:
        lower_body(ctx, loop.body)
    with ctx.block() as rest:
        trimmed = trim(ctx, loop.body, parent)
        lower_body(ctx, loop.body if trimmed else without_vectors(loop.body))
    ctx.names |= taken
    ctx.emit(If(whole, full.close(), rest.close()))


# Loop headers: the unit, and how far the loop goes.


def _header(ctx: Context, loop: Forall) -> For | None:
    """The loop without its body, whose variable becomes known; None where it is one with the loop
    of the warps. A loop of a unit has a constant extent: what is beyond its range is guarded."""
    var, extent, threads = loop.var, range_of(ctx, loop.var), ctx.scope.threads
    if threads is not None and threads.var == var:
        ctx.define(var, modulo(threads.thread, threads.count))
        _guard_extent(ctx, var, extent)
        return None
    unit = loop.unit or ("unroll" if loop.unroll else None)
    name = ctx.fresh(var.name)
    ctx.scope.known[var] = Var(name)
    if unit is None or unit == CPU_VECTOR and extent.exact is None:
        return For(name, extent.low, extent.high, (), unit=unit)
    if extent.bound is None or (unit == "unroll" and extent.exact is None):
        raise ScheduleError(
            f"{var} ({unit}): the extent of this loop is known at run time only; split it, and "
            "take the loop of constant extent"
        )
    count = extent.bound
    if unit == GPU_WARP and (joined := _joined_threads(ctx, loop)) is not None:
        ctx.names.discard(name)  # of a scalar in the loop of threads, not of a loop
        ctx.define(var, divide(joined.thread, joined.count))
        name, unit, count = joined.thread.name, GPU_THREAD, count * joined.count
    _guard_extent(ctx, var, extent)
    return For(name, ZERO, Int(count), (), unit=unit)


def _joined_threads(ctx: Context, loop: Forall) -> JoinedThreads | None:
    """Warps are tiles (Sgap, section 5.1): a loop of warps of other than 32 threads is one with
    that of the threads."""
    var = _thread_loop(loop.body)
    count = None if var is None else range_of(ctx, var).bound
    if var is None or count is None or count == WARP:
        return None
    ctx.scope.threads = JoinedThreads(var, Var(ctx.fresh("thread")), count)
    return ctx.scope.threads


def _guard_extent(ctx: Context, var: IndexVar, extent: Range) -> None:
    """Where the loop goes on to what is known statically. Whole tiles out of range are left to the
    guard of what they tile."""
    match ctx.relations.source(var):
        case Split(outer=outer) if outer == var and extent.low == ZERO:
            return
    if extent.exact is None:
        ctx.guard(var, Binary("<", ctx.scope.known[var], extent.high))


def _thread_loop(body: Body) -> IndexVar | None:
    match body:
        case Forall(var, inside, unit):
            return var if unit == GPU_THREAD else _thread_loop(inside)
        case Where():
            return _thread_loop(body.consumer) or _thread_loop(body.producer)
    return None
