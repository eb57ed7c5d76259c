"""Lowering: concrete index notation to the loop IR.

With one sparse factor and only products, each loop runs over a dimension or over stored positions
(Senanayake et al., OOPSLA 2020, section 6, without merge lattices). At each loop, whatever its
variable makes known is defined at once: an index from its parts, a coordinate from its position, a
position from its parent's; what is defined may be out of range, and is guarded there and then.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

from sgap_jax.compiler import cin
from sgap_jax.compiler.arithmetic import (
    ZERO,
    add,
    both,
    divide,
    linear,
    modulo,
    multiply,
    reads_memory,
    subtract,
)
from sgap_jax.compiler.cin import (
    Assignment,
    Body,
    Bound,
    Divide,
    Forall,
    Fuse,
    Pos,
    Precompute,
    Relation,
    Split,
    SuchThat,
    Where,
)
from sgap_jax.compiler.expr import Access, Assign, IndexVar
from sgap_jax.compiler.loopir import (
    CPU_VECTOR,
    GPU_THREAD,
    GPU_WARP,
    Array,
    Binary,
    Expr,
    Float,
    For,
    Function,
    GroupReduce,
    If,
    Int,
    Let,
    Load,
    SegReduce,
    Select,
    Set,
    Stmt,
    Store,
    Var,
    Workspace,
)
from sgap_jax.compiler.passes import without_unused
from sgap_jax.compiler.ranges import Range, Ranges, Scope
from sgap_jax.compiler.reductions import IDENTITY, Planner
from sgap_jax.compiler.relations import paths, positions_explicit
from sgap_jax.compiler.storage import Storage
from sgap_jax.compiler.tracking import Tracking
from sgap_jax.schedules import ScheduleError

WARP = 32


class Scheduled(Protocol):
    """What a compiler.schedule.Schedule has."""

    @property
    def expression(self) -> Assign: ...
    @property
    def statement(self) -> SuchThat: ...


def lower(
    schedule: Scheduled,
    sizes: dict[str, int],
    positions: tuple[int, ...],
    dtype: str,
    name: str = "kernel",
) -> Function:
    """The loops of a scheduled expression.

    The output's array is of `dtype` where each element is stored once, and of the accumulator's
    dtype (float32, or float64 for float64) where the function adds in memory: the caller rounds.
    Elements that no stored entry reaches hold the identity of the reduction.

    Args:
      schedule: an expression, and its loops.
      sizes: the extent of each index of the expression, by name.
      positions: the number of positions that each level of the sparse factor has room for, from the
        outermost level on: (m, nnz) of CSR, (nnz, nnz) of COO, (m / V, blocks, blocks * V) of
        CVS(V). () where all factors are dense.
      dtype: of the numbers in all inputs.
      name: of the function.

    Raises:
      ScheduleError: the loops cannot run so, or would race; the message names the store.
      NotImplementedError: they could, but not here.
      ValueError: sizes or positions that do not fit the expression.
    """
    return _Lowering(schedule, sizes, positions, dtype, name).function()


class _Lowering:
    def __init__(
        self,
        schedule: Scheduled,
        sizes: dict[str, int],
        positions: tuple[int, ...],
        dtype: str,
        name: str,
    ):
        self.expression = schedule.expression
        self.sizes, self.dtype, self.name = sizes, dtype, name
        statement, sparse = schedule.statement, self.expression.sparse
        self.storage = (
            None if sparse is None else Storage(sparse, sizes, positions, statement.relations)
        )
        self.body, self.provenance = positions_explicit(statement, self.storage)
        self.ranges = Ranges(self.provenance, sizes)
        self.planner = Planner(self.expression, self.body, self.provenance)
        self.plan = self.planner.plan()
        self.tracking = Tracking(self)
        self.names = {array.name for array in self._inputs()} | {self.expression.output.tensor}
        self.sum: str | None = None  # the scalar that the output's assignment adds to
        self.temporaries: dict[str, Expr | list[int]] = {}  # a scalar, or a workspace's extents
        self.threads: tuple[IndexVar, Expr, int] | None = None  # warps and threads in one loop

    # The function around the loops.

    def function(self) -> Function:
        output, wide = self._output(), "float64" if self.dtype == "float64" else "float32"
        inputs = self._inputs()
        scope = Scope()
        if output.size > 0:
            self._lower(self.body, scope)
        largest = max([array.size for array in (*inputs, output)] + [self._largest_fusion()])
        return Function(
            self.name,
            inputs,
            (output,),
            without_unused(scope.close()),
            wide,
            "int64" if largest >= 2**31 - 2**16 else "int32",
        )

    def _inputs(self) -> tuple[Array, ...]:
        arrays: dict[str, Array] = {}
        for factor in self.expression.factors:
            if self.storage is not None and factor == self.storage.access:
                arrays |= {array.name: array for array in self.storage.arrays(self.dtype)}
            else:
                size = math.prod(self.extents(factor))
                arrays[factor.tensor] = Array(factor.tensor, self.dtype, size)
        return tuple(arrays.values())

    def _output(self) -> Array:
        access, plan = self.expression.output, self.plan
        size = math.prod(self.extents(access))
        if access.format is not None and self.storage is not None:
            size = self.storage.positions[-1]
        added = plan.op is not None or plan.group is not None
        wide = "float64" if self.dtype == "float64" else "float32"
        return Array(access.tensor, wide if added else self.dtype, size, plan.fill)

    def extents(self, access: Access) -> list[int]:
        return [self.sizes[var.name] for var in access.indices]

    def _largest_fusion(self) -> int:
        fused = [r.fused for r in self.provenance.relations if isinstance(r, Fuse)]
        dense = [var for var in fused if not self.provenance.is_sparse(var)]
        return max((self.ranges.of(var, Scope()).bound or 0 for var in dense), default=0)

    def fresh(self, name: str) -> str:
        number, unique = 2, name
        while unique in self.names:
            number, unique = number + 1, f"{name}_{number}"
        self.names.add(unique)
        return unique

    # Statements.

    def _lower(self, body: Body, scope: Scope) -> None:
        match body:
            case Assignment():
                self._assign(body, scope)
            case Where():
                self._where(body, scope)
            case Forall():
                if body.var in scope.known:  # one position, known from its parent's
                    if body.unit is not None:
                        raise ScheduleError(f"{body.var} has one value here: no loop to parallelize")
                    self._lower(body.body, scope)
                elif body.var == self.plan.start:
                    self._sum(body, scope)
                else:
                    self._for(body, scope)

    def _assign(self, statement: Assignment, scope: Scope) -> None:
        target, value = statement.target.tensor, self._product(statement, scope)
        if target == self.expression.output.tensor:
            if self.sum is None:
                self.store(scope, value)
            else:
                total = combine(self.expression.reduction, Var(self.sum), value)
                scope.emit(Set(self.sum, total))
            return
        place = self.temporaries[target]
        if isinstance(place, list):
            index = linear([self.ranges.value(v, scope) for v in statement.target.indices], place)
            scope.emit(Store(target, index, value, statement.op))
        elif isinstance(place, Var):
            total = combine(statement.op, place, value) if statement.op else value
            scope.emit(Set(place.name, total))

    def _product(self, statement: Assignment, scope: Scope) -> Expr:
        factors = [self._read(factor, scope) for factor in statement.factors]
        product = factors[0]
        for factor in factors[1:]:
            product = Binary("*", product, factor)
        return product

    def _read(self, access: Access, scope: Scope) -> Expr:
        if self.storage is not None and access == self.storage.access:
            return Load(self.storage.values, self.entry(scope))
        coordinates = [self.ranges.value(var, scope) for var in access.indices]
        if access.tensor in self.temporaries:
            place = self.temporaries[access.tensor]
            if not isinstance(place, list):
                return place
            return Load(access.tensor, linear(coordinates, place))
        return Load(access.tensor, linear(coordinates, self.extents(access)))

    def entry(self, scope: Scope) -> Expr:
        """The position of the last level."""
        assert self.storage is not None
        last = len(self.storage.levels) - 1
        if last not in scope.positions:
            missing = min(set(range(last + 1)) - set(scope.positions))
            raise ScheduleError(
                f"the loops do not locate level {missing + 1} of {self.storage.access} "
                f"({self.storage.variables[missing]})"
            )
        return scope.positions[last]

    def store(self, scope: Scope, value: Expr) -> None:
        """A value into its element of the output."""
        plan, output = self.plan, self.expression.output
        if output.format is not None:
            index = self.entry(scope)
        else:
            coordinates = [self.ranges.value(var, scope) for var in output.indices]
            index = linear(coordinates, self.extents(output))
        if plan.group is None:
            scope.emit(Store(output.tensor, index, value, plan.op, plan.atomic))
            return
        group, op = plan.group, self.expression.reduction
        if scope.live is not None and self.sum is None:
            value = Select(scope.live, value, Float(IDENTITY[op]))
        if group.strategy == cin.SEGMENT:
            if scope.live is not None:
                index = Select(scope.live, index, Int(-1))
            scope.emit(SegReduce(output.tensor, index, value, group.size, op))
        else:
            size, atomic = self._group_size(scope)
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

    def _where(self, where: Where, scope: Scope) -> None:
        inner = scope.child(masked=False, live=None)
        for producer in dict.fromkeys(_assigned(where.producer)):
            target = producer.target
            if target.tensor in self.temporaries:
                continue
            fill = IDENTITY[producer.op or "+"]
            name = self.fresh(target.tensor) if not target.indices else target.tensor
            if target.indices:
                _check_private(where, target)
                extents = [self.ranges.extent(var, scope) for var in target.indices]
                scope.emit(Workspace(name, max(math.prod(extents), 1), fill))
                self.temporaries[target.tensor] = extents
            else:
                scope.emit(Let(name, Float(fill), mutable=True))
                self.temporaries[target.tensor] = Var(name)
        kept, self.sum = self.sum, None
        self._lower(where.producer, inner)
        self.sum = kept
        self._emit_live(inner.close(), scope)
        self._lower(where.consumer, scope)
        for producer in _assigned(where.producer):
            self.temporaries.pop(producer.target.tensor, None)

    def _emit_live(self, statements: tuple[Stmt, ...], scope: Scope) -> None:
        """Statements without a collective: a lane that takes no part skips them."""
        if scope.live is None:
            scope.emit(*statements)
        elif statements:
            scope.emit(If(scope.live, statements))

    # Loops.

    def _sum(self, loop: Forall, scope: Scope) -> None:
        name = self.sum = self.fresh("sum")
        start = Float(IDENTITY[self.expression.reduction])
        scope.emit(Let(name, start, mutable=True))
        inner = scope.child(masked=False, live=None)
        self._for(loop, inner)
        self._emit_live(inner.close(), scope)
        if self.plan.tracked is None:
            self.store(scope, Var(name))
        self.sum = None

    def _for(self, loop: Forall, scope: Scope) -> None:
        for index in self.expression.indices:
            if index in scope.known and self._makes({loop.var}, index):
                raise NotImplementedError(f"{loop.var} is a loop over {index}, which is known there")
        self._name_range(loop.var, scope)
        around = scope.child()
        tracked = self.tracking.start(loop, around)
        inner = around.child()
        if self.plan.group is not None and loop.var == self.plan.group.var and self.sum is None:
            inner.masked = True
        head = self._head(loop, around, inner)
        self._recover(inner, loop)
        self._lower_tiles(loop, inner)
        statements = inner.close()
        if head is None:
            around.emit(*statements)
        elif statements:
            around.emit(dataclasses.replace(head, body=statements))
        if tracked and self.plan.tracked == loop.var and self.sum is not None:
            self.tracking.finish(loop, around)
        scope.emit(*around.close())

    def _head(self, loop: Forall, scope: Scope, inner: Scope) -> For | None:
        """The loop without its body; None where it is one with the loop of the warps."""
        var, extent = loop.var, self.ranges.of(loop.var, scope)
        if self.threads is not None and self.threads[0] == var:
            _, thread, count = self.threads
            self.define(var, modulo(thread, count), inner)
            self._beyond(var, extent, inner)
            return None
        unit = loop.unit or ("unroll" if loop.unroll else None)
        name = self.fresh(var.name)
        inner.known[var] = Var(name)
        if unit is None:
            return For(name, extent.low, extent.high, ())
        if extent.exact is None and unit == CPU_VECTOR:
            inner.known[var] = add(extent.low, Var(name))
            return For(name, ZERO, subtract(extent.high, extent.low), (), unit=unit)
        if extent.bound is None or (unit == "unroll" and extent.exact is None):
            raise ScheduleError(
                f"{var} ({unit}): the extent of this loop is known at run time only; split it, and "
                "take the loop of constant extent"
            )
        if unit == GPU_WARP and (joined := self._join_threads(loop, extent, inner)) is not None:
            return joined
        self._beyond(var, extent, inner)
        return For(name, ZERO, Int(extent.bound), (), unit=unit)

    def _beyond(self, var: IndexVar, extent: Range, inner: Scope) -> None:
        """The loop goes on to what is known statically: the rest is out of range. Whole tiles out
        of range are left to the guard of what they tile."""
        match self.provenance.source(var):
            case Split(outer=outer) if outer == var and extent.low == ZERO:
                return
        if extent.exact is None:
            self._only_if(var, Binary("<", inner.known[var], extent.high), inner)

    def _join_threads(self, loop: Forall, extent: Range, inner: Scope) -> For | None:
        """Warps are tiles (Sgap, section 5.1): where they are not of 32 threads, warps and threads
        are one loop of threads."""
        thread = _thread_loop(loop.body)
        if thread is None or extent.bound is None:
            return None
        count = self.ranges.of(thread, inner).bound
        if count is None or count == WARP:
            return None
        name = self.fresh("thread")
        self.threads = (thread, Var(name), count)
        del inner.known[loop.var]
        self.names.discard(loop.var.name)
        self.define(loop.var, divide(Var(name), count), inner)
        self._beyond(loop.var, extent, inner)
        return For(name, ZERO, Int(extent.bound * count), (), unit=GPU_THREAD)

    def _name_range(self, var: IndexVar, scope: Scope) -> None:
        """Names for the ends of the positions that a loop runs over or tiles."""
        while not isinstance(relation := self.provenance.source(var), Pos):
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
        first, _ = self.provenance.levels_of(relation)
        if first > 0 and first - 1 not in scope.positions:
            return
        found = self.ranges.of(var, scope)
        low = self._named(f"{var}_begin", found.low, scope)
        high = self._named(f"{var}_end", found.high, scope)
        scope.ranges[var] = Range(low, high, found.bound)

    def _named(self, name: str, value: Expr, scope: Scope) -> Expr:
        if not reads_memory(value):
            return value
        name = self.fresh(name)
        scope.emit(Let(name, value))
        return Var(name)

    def _lower_tiles(self, loop: Forall, scope: Scope) -> None:
        """The body of a loop; where it has vectors in a tile that may be cut off, twice: whole
        tiles without guards, and others without vectors."""
        tile = self._tile(loop, scope)
        if tile is None:
            self._lower(loop.body, scope)
            return
        parent, whole = tile
        names = set(self.names)
        full = scope.child(unguarded=scope.unguarded | {parent})
        self._lower(loop.body, full)
        self.names, after = names, self.names
        rest = scope.child()
        self._lower(_without_vectors(loop.body), rest)
        self.names |= after
        scope.emit(If(whole, full.close(), rest.close()))

    def _tile(self, loop: Forall, scope: Scope) -> tuple[IndexVar, Expr] | None:
        if scope.masked:
            return None
        for relation in self.provenance.relations:
            match relation:
                case Split(parent, outer, inner, size) if self._opens(loop, outer, inner, scope):
                    first = self.provenance.source(parent)
                    if parent in scope.unguarded or (
                        isinstance(first, Pos) and parent not in scope.ranges
                    ):
                        continue
                    extent = self.ranges.of(parent, scope)
                    base = multiply(self.ranges.value(outer, scope), Int(size))
                    whole = None if extent.low == ZERO else Binary("<=", extent.low, base)
                    if not _fits(extent, size):
                        end = Binary("<=", add(base, Int(size)), extent.high)
                        whole = both(whole, end)
                    if whole is not None:
                        return parent, whole
        return None

    def _opens(self, loop: Forall, outer: IndexVar, inner: IndexVar, scope: Scope) -> bool:
        """Whether the tile is known from here on, and its guard would be within a vector loop."""
        if inner in scope.known or self.ranges.try_value(outer, scope) is None:
            return False
        return self._makes({loop.var}, outer) and self._makes(_in_vectors(loop.body), inner)

    def _makes(self, loops: set[IndexVar], var: IndexVar) -> bool:
        return bool(self.provenance.leaves(var, loops))

    # What a loop variable makes known.

    def define(self, var: IndexVar, value: Expr, scope: Scope, name: str | None = None) -> None:
        scope.known[var] = self.named(name or var.name, value, scope, self._by_lane(var))

    def _by_lane(self, var: IndexVar) -> bool:
        """Whether the lanes of a group have different values of a variable."""
        group = self.plan.group
        return group is None or self.planner.depends(var, group.var)

    def named(self, name: str, value: Expr, scope: Scope, by_lane: bool = True) -> Expr:
        if isinstance(value, Var | Int):
            return value
        if scope.live is not None and by_lane and reads_memory(value):
            value = Select(scope.live, value, ZERO)
        name = self.fresh(name)
        scope.emit(Let(name, value))
        return Var(name)

    def _only_if(self, var: IndexVar, condition: Expr | None, scope: Scope) -> None:
        """A guard; where a collective follows, and lanes may differ, a mask."""
        if condition is None:
            return
        if not scope.masked or not self._by_lane(var):
            scope.only_if(condition)
            return
        condition = both(scope.live, condition)
        assert condition is not None
        name = self.fresh("live")
        scope.emit(Let(name, Select(condition, Int(1), ZERO)))
        scope.live = Binary("!=", Var(name), ZERO)

    def _guard(self, var: IndexVar, parts: int, scope: Scope) -> None:
        """What is put together from `parts` may be beyond the range."""
        if var in scope.unguarded:
            return
        extent, value = self.ranges.of(var, scope), scope.known[var]
        low = None if extent.low == ZERO else Binary("<=", extent.low, value)
        high = None if _fits(extent, parts) else Binary("<", value, extent.high)
        self._only_if(var, both(low, high), scope)

    def _recover(self, scope: Scope, loop: Forall) -> None:
        while any([self._apply(r, scope, loop) for r in self.provenance.relations]) or any(
            [self._locate(level, scope) for level in range(len(self.provenance.levels))]
        ):
            pass

    def _apply(self, relation: Relation, scope: Scope, loop: Forall) -> bool:
        known = scope.known
        match relation:
            case Split(parent, outer, inner, size):
                if outer in known and inner in known and parent not in known:
                    base = multiply(known[outer], Int(size))
                    self.define(parent, add(base, known[inner]), scope)
                    self._guard(parent, size, scope)
                    return True
                blocks = self.storage is not None and relation in self.storage.splits
                if blocks and parent in known and not (outer in known or inner in known):
                    self.define(outer, divide(known[parent], size), scope)
                    self.define(inner, modulo(known[parent], size), scope)
                    return True
            case Divide(parent, outer, inner, parts):
                if outer in known and inner in known and parent not in known:
                    self.define(parent, self.ranges.value(parent, scope), scope)
                    self._guard(parent, parts, scope)
                    return True
            case Fuse(outer, inner, fused):
                if fused in known and outer not in known and not self.provenance.is_sparse(fused):
                    extent = self.ranges.extent(inner, scope)
                    self.define(outer, divide(known[fused], extent), scope)
                    self.define(inner, modulo(known[fused], extent), scope)
                    return True
            case Bound(parent, same) | Precompute(parent, same):
                if same in known and parent not in known:
                    known[parent] = known[same]
                    return True
            case Pos():
                _, last = self.provenance.levels_of(relation)
                if relation.position in known and last not in scope.positions:
                    scope.positions[last] = known[relation.position]
                    self.tracking.recover(relation, scope, loop)
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


def combine(op: str, left: Expr, right: Expr) -> Expr:
    return Binary(op, left, right)


def _fits(extent: Range, parts: int) -> bool:
    return extent.exact is not None and extent.exact % parts == 0


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


def _thread_loop(body: Body) -> IndexVar | None:
    match body:
        case Forall(var, inside, unit):
            return var if unit == GPU_THREAD else _thread_loop(inside)
        case Where():
            return _thread_loop(body.consumer) or _thread_loop(body.producer)
    return None


def _in_vectors(body: Body, within: bool = False) -> set[IndexVar]:
    """The variables of CPUVector loops, and of the loops inside of these."""
    match body:
        case Forall(var, inside, unit):
            within = within or unit == CPU_VECTOR
            return _in_vectors(inside, within) | ({var} if within else set())
        case Where():
            return _in_vectors(body.consumer, within) | _in_vectors(body.producer, within)
    return set()


def _without_vectors(body: Body) -> Body:
    match body:
        case Forall():
            unit = None if body.unit == CPU_VECTOR else body.unit
            return dataclasses.replace(body, unit=unit, body=_without_vectors(body.body))
        case Where():
            return Where(_without_vectors(body.consumer), _without_vectors(body.producer))
    return body
