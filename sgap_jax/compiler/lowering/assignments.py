"""Assignments: what is read, and how a value reaches its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
from sgap_jax.compiler.lowering.ranges import Ranges, Scope
from sgap_jax.compiler.lowering.reductions import IDENTITY, Plan
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.cin import Assignment, Body, Where
from sgap_jax.compiler.notation.expr import Access, Assign, Attained
from sgap_jax.compiler.notation.nest import paths
from sgap_jax.schedules.schedule import ScheduleError


class Statements:
    def __init__(self, expression: Assign, ranges: Ranges, plan: Plan):
        self.expression, self.ranges, self.plan = expression, ranges, plan
        self.storage = ranges.storage
        self.fresh: Callable[[str], str]  # a new name: of Recovery, which comes later
        self.sum: str | None = None  # the scalar that the output's assignment adds to
        # A scalar, or a workspace with its extents.
        self.temporaries: dict[str, Var | tuple[str, list[int]]] = {}

    def extents(self, access: Access) -> list[int]:
        return [self.ranges.sizes[var.name] for var in access.indices]

    def assign(self, statement: Assignment, scope: Scope) -> None:
        target, value = statement.target.tensor, self._term(statement, scope)
        total: Expr
        if target == self.expression.output.tensor:
            if self.sum is None:
                self.store(scope, value)
            else:
                total = Binary(self.expression.reduction, Var(self.sum), value)
                scope.emit(Set(self.sum, total))
            return
        place = self.temporaries[target]
        if isinstance(place, tuple):
            name, extents = place
            indices = [self.ranges.value(var, scope) for var in statement.target.indices]
            scope.emit(Store(name, linear(indices, extents), value, statement.op))
        else:
            total = Binary(statement.op, place, value) if statement.op else value
            scope.emit(Set(place.name, total))

    def _term(self, statement: Assignment, scope: Scope) -> Expr:
        """What an assignment puts at its place."""
        every = statement.factors
        read = [factor for factor in every if isinstance(factor, Access) and not factor.pattern]
        term = self._product(read, scope) if read else Float(1.0)
        for factor in every:
            if isinstance(factor, Attained):
                best = self._read(factor.best, scope)
                short = "<" if factor.reduction == "max" else ">"
                short_of_it = Binary(short, self._product(factor.factors, scope), best)
                term = Select(short_of_it, Float(0.0), self._evaluated(term, scope))
        return term

    def _product(self, factors: Sequence[Access], scope: Scope) -> Expr:
        product, *others = (self._read(factor, scope) for factor in factors)
        for factor in others:
            product = Binary("*", product, factor)
        return product

    def _evaluated(self, value: Expr, scope: Scope) -> Expr:
        """In any case: a lane that loads in vain costs less than a branch. Not where a lane that
        takes no part would load."""
        if scope.live is not None or not reads_memory(value):
            return value
        name = self.fresh("term")
        scope.emit(Let(name, value))
        return Var(name)

    def _read(self, access: Access, scope: Scope) -> Expr:
        if self.storage is not None and access == self.storage.access:
            return Load(self.storage.values, self.entry(scope))
        if access.along:
            return Load(access.tensor, self._shared(access, scope))
        coordinates = [self.ranges.value(var, scope) for var in access.indices]
        if access.tensor in self.temporaries:
            place = self.temporaries[access.tensor]
            if isinstance(place, Var):
                return place
            name, extents = place
            return Load(name, linear(coordinates, extents))
        return Load(access.tensor, linear(coordinates, self.extents(access)))

    def _shared(self, access: Access, scope: Scope) -> Expr:
        """The element of what has the structure of the sparse factor's outer levels."""
        place = self.position(self.expression.shares(access) - 1, scope)
        dense = self.expression.dense_indices(access)
        extents = [self.ranges.sizes[var.name] for var in dense]
        return linear([place, *(self.ranges.value(var, scope) for var in dense)], [1, *extents])

    def room(self, access: Access) -> int:
        """The elements of an array."""
        if access.format is None or self.storage is None:
            return math.prod(self.extents(access))
        places = self.storage.positions[self.expression.shares(access) - 1]
        dense = self.expression.dense_indices(access)
        return math.prod([places, *(self.ranges.sizes[var.name] for var in dense)])

    def entry(self, scope: Scope) -> Expr:
        """The position of the last level."""
        assert self.storage is not None
        return self.position(len(self.storage.levels) - 1, scope)

    def position(self, last: int, scope: Scope) -> Expr:
        assert self.storage is not None
        if last not in scope.positions:
            missing = min(set(range(last + 1)) - set(scope.positions))
            raise ScheduleError(
                f"the loops do not locate level {missing + 1} of {self.storage.access} "
                f"({self.storage.variables[missing]})"
            )
        return scope.positions[last]

    def store(self, scope: Scope, value: Expr, alone: bool = False) -> None:
        """A value into its element of the output; `alone`: it is all that goes there."""
        plan, output = self.plan, self.expression.output
        if output.format is not None:
            index = self._shared(output, scope)
        else:
            coordinates = [self.ranges.value(var, scope) for var in output.indices]
            index = linear(coordinates, self.extents(output))
        if plan.group is None:
            op, atomic = (None, False) if alone else (plan.op, plan.atomic)
            scope.emit(Store(output.tensor, index, value, op, atomic))
            return
        group, op = plan.group, self.expression.reduction
        if scope.live is not None and self.sum is None:
            value = Select(scope.live, value, Float(IDENTITY[op]))
        size, atomic = self._group_size(scope)
        if group.strategy == cin.SEGMENT:
            if scope.live is not None:
                index = Select(scope.live, index, Int(-1))
            scope.emit(SegReduce(output.tensor, index, value, size, op))
        else:
            scope.emit(GroupReduce(output.tensor, index, value, size, op, group.atomic or atomic))

    def _group_size(self, scope: Scope) -> tuple[int, bool]:
        """Of the group, and whether several groups of the loop meet in one element."""
        assert self.plan.group is not None
        var, size = self.plan.group.var, self.plan.group.size
        threads = self.ranges.of(var, scope).bound or 0
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

    def declare(self, where: Where, scope: Scope) -> None:
        """What the producer fills: a scalar, or a workspace."""
        for producer in _assigned(where.producer):
            target, fill = producer.target, IDENTITY[producer.op or "+"]
            if target.tensor in self.temporaries:
                continue
            name = self.fresh(target.tensor)
            if target.indices:
                _check_private(where, target)
                whole = scope.child(ranges={})  # a tile that is cut off has room as others have
                extents = [self.ranges.extent(var, whole) for var in target.indices]
                scope.emit(Workspace(name, max(math.prod(extents), 1), fill))
                self.temporaries[target.tensor] = (name, extents)
            else:
                scope.emit(Let(name, Float(fill), mutable=True))
                self.temporaries[target.tensor] = Var(name)

    def forget(self, where: Where) -> None:
        for producer in _assigned(where.producer):
            self.temporaries.pop(producer.target.tensor, None)


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
