"""Assignments: loads of the operands, products, stores to the output, and temporaries."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sgap_jax.compiler.loop_ir.arithmetic import linear, reads_memory
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_VECTOR,
    Binary,
    Expr,
    Float,
    GroupReduce,
    Int,
    Let,
    Load,
    SegReduce,
    Select,
    Set,
    Store,
    Var,
    Workspace,
)
from sgap_jax.compiler.lowering.context import Context
from sgap_jax.compiler.lowering.ranges import extent_of, range_of, value_of
from sgap_jax.compiler.lowering.reductions import IDENTITY
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.cin import Assignment, Body, Where
from sgap_jax.compiler.notation.expr import Access, Attained, IndexVar
from sgap_jax.compiler.notation.nest import paths
from sgap_jax.schedules.schedule import ScheduleError


def assign(ctx: Context, statement: Assignment) -> None:
    """To the output or the scalar that holds its sum, or to a temporary."""
    merges = ctx.expression.merges
    target, value = statement.target.tensor, (_total if merges else _term)(ctx, statement)
    total: Expr
    if target == ctx.expression.output.tensor:
        if ctx.sum is None:
            store(ctx, value)
        else:
            total = Binary(ctx.expression.reduction, Var(ctx.sum), value)
            ctx.emit(Set(ctx.sum, total))
        return
    place = ctx.scope.temporaries[target]
    if isinstance(place, tuple):
        name, extents = place
        indices = [value_of(ctx, var) for var in statement.target.indices]
        ctx.emit(Store(name, linear(indices, extents), value, statement.op))
    else:
        total = Binary(statement.op, place, value) if statement.op else value
        ctx.emit(Set(place.name, total))


def _total(ctx: Context, statement: Assignment) -> Expr:
    """The right side where terms are added up: the sum of those whose factors are all stored
    here."""
    total: Expr | None = None
    for term in statement.products:
        if term.factors not in ctx.scope.alive:
            continue
        read = [x for x in term.factors if isinstance(x, Access) and not x.pattern]
        value: Expr = _product(ctx, read) if read else Float(1.0)
        if total is None:
            total = Binary("-", Float(0.0), value) if term.negative else value
        else:
            total = Binary("-" if term.negative else "+", total, value)
    assert total is not None  # a loop has cases with terms only
    return total


def _term(ctx: Context, statement: Assignment) -> Expr:
    """The right side: a product; 0 where an `Attained` factor says that another term is best."""
    every = statement.factors
    read = [factor for factor in every if isinstance(factor, Access) and not factor.pattern]
    term = _product(ctx, read) if read else Float(1.0)
    for factor in every:
        if isinstance(factor, Attained):
            best = _load(ctx, factor.best)
            worse = "<" if factor.reduction == "max" else ">"
            is_worse = Binary(worse, _product(ctx, factor.factors), best)
            term = Select(is_worse, Float(0.0), _evaluated(ctx, term))
    return term


def _product(ctx: Context, factors: Sequence[Access]) -> Expr:
    product, *others = (_load(ctx, factor) for factor in factors)
    for factor in others:
        product = Binary("*", product, factor)
    return product


def _evaluated(ctx: Context, value: Expr) -> Expr:
    """In any case: a lane that loads in vain costs less than a branch. Not where a lane that takes
    no part would load."""
    if ctx.scope.live is not None or not reads_memory(value):
        return value
    name = ctx.fresh("term")
    ctx.emit(Let(name, value))
    return Var(name)


def _load(ctx: Context, access: Access) -> Expr:
    if access == ctx.expression.sparse:
        return Load(ctx.storage.values, _position(ctx, len(ctx.storage.levels) - 1))
    if access in ctx.merged:
        storage = ctx.merged[access]
        return Load(storage.values, ctx.located(access, len(storage.levels) - 1))
    place = None if access.along else ctx.scope.temporaries.get(access.tensor)
    if isinstance(place, Var):
        return place
    if place is None:
        return Load(access.tensor, _place(ctx, access, bool(access.along)))
    name, extents = place
    return Load(name, linear([value_of(ctx, var) for var in access.indices], extents))


def _place(ctx: Context, access: Access, shares: bool) -> Expr:
    """Where an element is in its array. `shares`: the array has the structure of the outer levels
    of the sparse operand, with dense indices under each position."""
    indices = ctx.expression.dense_indices(access) if shares else access.indices
    coordinates, extents = [], [ctx.sizes[var.name] for var in indices]
    if shares:
        coordinates.append(_position(ctx, ctx.expression.shares(access) - 1))
        extents = [1, *extents]
    coordinates += [value_of(ctx, var) for var in indices]
    return linear(coordinates, extents)


def _position(ctx: Context, level: int) -> Expr:
    positions, storage = ctx.scope.positions, ctx.storage
    if level not in positions:
        missing = min(set(range(level + 1)) - set(positions))
        raise ScheduleError(
            f"the loops do not locate level {missing + 1} of {storage.access} "
            f"({storage.variables[missing]})"
        )
    return positions[level]


def store(ctx: Context, value: Expr, exclusive: bool = False) -> None:
    """A value into its element of the output, by the plan; `exclusive`: nothing else is stored
    there, so that `=` does without an atomic."""
    plan, output = ctx.plan, ctx.expression.output
    holder = ctx.expression.holder if output.format is not None else None
    if holder is None:
        index = _place(ctx, output, output.format is not None)
    else:
        index = ctx.located(holder, len(ctx.merged[holder].levels) - 1)
    if plan.group is None:
        op, atomic = (None, False) if exclusive else (plan.op, plan.atomic)
        ctx.emit(Store(output.tensor, index, value, op, atomic))
        return
    group, op, live = plan.group, ctx.expression.reduction, ctx.scope.live
    if live is not None and ctx.sum is None:
        value = Select(live, value, Float(IDENTITY[op]))
    size, several = _group_size(ctx, group.var, group.size)
    if group.strategy == cin.SEGMENT:
        if live is not None:
            index = Select(live, index, Int(-1))
        ctx.emit(SegReduce(output.tensor, index, value, size, op))
    else:
        ctx.emit(GroupReduce(output.tensor, index, value, size, op, group.atomic or several))


def _group_size(ctx: Context, var: IndexVar, size: int) -> tuple[int, bool]:
    """Of a group, and whether several groups of the loop meet in one element."""
    threads = range_of(ctx, var).bound or 0
    if size == 0:
        size = threads
        if size not in (1, 2, 4, 8, 16, 32):
            raise ScheduleError(
                f"{var}: {threads} threads cannot reduce together: 1, 2, 4, 8, 16 or 32 can; "
                f"group({var}, size, ParallelReduction) makes groups of them"
            )
    if threads % size:
        raise ScheduleError(f"group({var}, {size}): {size} does not divide {threads}")
    return size, threads > size


def declare_temporaries(ctx: Context, where: Where, filled: bool = True) -> None:
    """What the producer fills: a scalar, or a workspace (Kjolstad et al., CGO 2019), whose elements
    have their initial value if it is to be `filled`."""
    for producer in _assigned(where.producer):
        target, fill = producer.target, IDENTITY[producer.op or "+"]
        if target.tensor in ctx.scope.temporaries:
            continue
        name = ctx.fresh(target.tensor)
        if target.indices:
            _check_private(where, target)
            with ctx.block(ranges={}):  # for a whole tile, also where this one is cut off
                extents = [extent_of(ctx, var) for var in target.indices]
            size = max(math.prod(extents), 1)
            ctx.emit(Workspace(name, size, fill if filled else None))
            ctx.scope.temporaries[target.tensor] = (name, extents)
        else:
            ctx.emit(Let(name, Float(fill), mutable=True))
            ctx.scope.temporaries[target.tensor] = Var(name)


def _assigned(body: Body) -> list[Assignment]:
    """What a producer fills; the temporaries of a producer of its own are that one's."""
    match body:
        case Assignment():
            return [body]
        case Where():
            return _assigned(body.consumer)
    return _assigned(body.body)


def _check_private(where: Where, target: Access) -> None:
    for path, _ in paths(where):
        for loop in path:
            if loop.unit not in (None, CPU_VECTOR):
                raise NotImplementedError(
                    f"the workspace {target} is outside of the loop of {loop.var} ({loop.unit}), "
                    "whose iterations have no memory in common; precompute inside of it"
                )
