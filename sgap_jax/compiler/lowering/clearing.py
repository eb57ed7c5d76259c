"""Clearing what a function does not store: a dense output row by row, and padding.

A dense output of which only some elements are stored holds the identity elsewhere. To fill all of
it first is a pass of its own over memory, which the stores come back to when it has left the cache.
Where a thread visits the coordinates of the outermost level one by one, it clears what belongs to
each of them right before its stores, with the gap between it and the stored coordinate before:

    for (gap = i * n; gap < (i + 1) * n; gap++) C[gap] = 0;
    for (p ...) for (k ...) C[i * n + k] += ...
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
from sgap_jax.compiler.lowering.context import Context
from sgap_jax.compiler.lowering.output_loops import OutputLoops
from sgap_jax.compiler.lowering.ranges import positions_below, value_of
from sgap_jax.compiler.lowering.reductions import IDENTITY, Plan
from sgap_jax.compiler.notation.expr import IndexVar

# One coordinate in so many is stored, or the whole output is filled beforehand, in tiles of equal
# size: one thread may have all of a few stored rows, and would clear all gaps between them.
_STORED = 2

# Cleared elements for each part that is stored into them, from which the caches have little of the
# use of clearing: a line that comes back is read from memory. For a tensor with 93,000 fibers (Zen
# 5, 2 threads) 294 take 0.65x the time past the caches, 147 take 1.5x.
_FAR_BETWEEN = 256


def cleared_row(nest: OutputLoops, plan: Plan) -> IndexVar | None:
    """The loop that makes a coordinate of the outermost level known, and none beside, so that it
    can clear a row; None where the output is filled beforehand, or not at all."""
    storage, output, path = nest.relations.storage, nest.expression.output, nest.path
    if not storage.levels or output.format is not None or plan.fill is None:
        return None
    first = storage.variables[0]
    if plan.op is not None or output.indices[:1] != (first,) or storage.repeats[0]:
        return None
    if storage.is_compressed(0):
        if _STORED * storage.positions[0] < storage.extents[0]:
            return None
    elif not storage.is_dense(0):
        return None
    loops = nest.loops_of(first)
    around = list(itertools.takewhile(lambda loop: loop.var in loops, path))
    if not path or path[0].unit != CPU_THREAD or {loop.var for loop in around} != loops:
        return None
    if any(loop.unit == CPU_VECTOR for loop in around):
        return None  # rows side by side are cleared one after the other
    others = {*storage.variables, *nest.expression.indices} - {first}
    if any(not loops.isdisjoint(nest.loops_of(other)) for other in others):
        return None  # a row is visited more than once, maybe by several threads
    return around[-1].var


def clear_padding(ctx: Context, output: Array) -> bool:
    """Clears the positions without an entry of an output that shares the structure, where tasks of
    a CPU store each of the others once. False where the whole output is to be filled instead."""
    shared, dense = ctx.expression.shared, ctx.expression.dense_indices(ctx.expression.output)
    tasks = [loop.unit for loop in ctx.nest.path[:1]] == [CPU_THREAD]
    if not tasks or not shared or ctx.plan.op is not None:
        return False
    if ctx.storage.ragged:
        return False  # what is beyond the matrix is not stored
    used = positions_below(ctx, 0, shared - 1).high
    each = math.prod(ctx.sizes[index.name] for index in dense)
    name = ctx.fresh("padding")
    clear = Store(output.name, Var(name), Float(IDENTITY[ctx.expression.reduction]))
    ctx.emit(For(name, multiply(used, Int(each)), Int(output.size), (clear,), unit=CPU_VECTOR))
    return True


def clear_row(ctx: Context) -> None:
    """Before the stores of a row: the row unless all of it is stored, and the gap before it."""
    storage, size = ctx.storage, _row_size(ctx)
    end = begin = multiply(value_of(ctx, storage.variables[0]), Int(size))
    if not _stores_whole_rows(ctx):
        end = add(end, Int(size))
    if storage.is_compressed(0):
        begin = _end_before(ctx, ctx.scope.positions[0])
    _clear(ctx, begin, end)


def clear_rest(ctx: Context) -> None:
    """What is behind the last row."""
    if ctx.storage.is_compressed(0):
        used = positions_below(ctx, 0, 0).high
        _clear(ctx, _end_before(ctx, used), Int(ctx.storage.extents[0] * _row_size(ctx)))


def _clear(ctx: Context, begin: Expr, end: Expr) -> None:
    name = ctx.fresh("gap")
    assert ctx.plan.fill is not None
    store = Store(ctx.expression.output.tensor, Var(name), Float(ctx.plan.fill))
    ctx.emit(For(name, begin, end, (store,), unit=CPU_VECTOR, stream=_is_far_between(ctx)))


def _is_far_between(ctx: Context) -> bool:
    """Whether parts that are stored into what is cleared are far from each other."""
    modes, outputs = ctx.storage.modes, ctx.expression.output.indices
    parts = ctx.storage.positions[max(n for n, var in enumerate(modes) if var in outputs)]
    size = ctx.storage.extents[0] * _row_size(ctx)
    return not _stores_whole_rows(ctx) and size >= _FAR_BETWEEN * max(parts, 1)


def _end_before(ctx: Context, place: Expr) -> Expr:
    """Where the row before a stored position ends."""
    before = add(Load(ctx.storage.coordinates(0), subtract(place, ONE)), ONE)
    return Select(Binary("<", ZERO, place), multiply(before, Int(_row_size(ctx))), ZERO)


def _row_size(ctx: Context) -> int:
    return math.prod(ctx.sizes[index.name] for index in ctx.expression.output.indices[1:])


def _stores_whole_rows(ctx: Context) -> bool:
    return ctx.storage.sparse_modes.isdisjoint(ctx.expression.output.indices[1:])
