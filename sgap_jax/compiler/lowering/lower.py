"""Lowering: concrete index notation to the loop IR.

With one sparse factor and only products, each loop runs over a dimension or over stored positions
(Senanayake et al., OOPSLA 2020, section 6, without merge lattices). At each loop, whatever its
variable makes known is defined at once: an index from its parts, a coordinate from its position, a
position from its parent's; what is defined may be out of range, and is guarded there and then.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from sgap_jax.compiler.loop_ir.loopir import (
    Array,
    Float,
    Function,
    If,
    Let,
    Stmt,
    Var,
)
from sgap_jax.compiler.loop_ir.passes import copies, without_unused
from sgap_jax.compiler.loop_ir.widths import accumulator_of, index_dtype
from sgap_jax.compiler.lowering.assignments import Statements
from sgap_jax.compiler.lowering.clearing import Clearing
from sgap_jax.compiler.lowering.derived_variables import Recovery
from sgap_jax.compiler.lowering.loop_headers import Heads
from sgap_jax.compiler.lowering.octet import OctetNest, warp_nest
from sgap_jax.compiler.lowering.output_loops import Movement
from sgap_jax.compiler.lowering.parent_positions import Tracking
from sgap_jax.compiler.lowering.partial_tiles import Tiles, without_vectors
from sgap_jax.compiler.lowering.position_loops import positions_explicit
from sgap_jax.compiler.lowering.ranges import Ranges, Scope
from sgap_jax.compiler.lowering.reductions import IDENTITY, plan_sums
from sgap_jax.compiler.lowering.segment_loops import Runs
from sgap_jax.compiler.lowering.storage import Storage
from sgap_jax.compiler.notation.cin import (
    Assignment,
    Body,
    Forall,
    Fuse,
    Split,
    SuchThat,
    Where,
)
from sgap_jax.compiler.notation.expr import Assign
from sgap_jax.schedules.schedule import ScheduleError

MOST_COPIES = 256  # a few thousand take LLVM minutes, and its stack


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
    repeated: tuple[int, ...] = (),
) -> Function:
    """The loops of a scheduled expression.

    The output's array is of `dtype` where each element is stored once, and of the accumulator's
    dtype (float32 for halves) where the function adds in memory: the caller rounds.
    Elements that no stored entry reaches hold the identity of the reduction.

    Args:
      schedule: an expression, and its loops.
      sizes: the extent of each index of the expression, by name.
      positions: the number of positions that each level of the sparse factor has room for, from the
        outermost level on: (m, nnz) of CSR, (nnz, nnz) of COO, (m / V, blocks, blocks * V) of
        CVS(V). () where all factors are dense.
      dtype: of the numbers in all inputs.
      name: of the function.
      repeated: levels of the sparse factor, from 0 on, of which a coordinate may come more than
        once under its parent, although the format says that none does: nobody has checked.

    Raises:
      ScheduleError: the loops cannot run so, or would race; the message names the store.
      NotImplementedError: they could, but not here; or tensor cores are to multiply another dtype
        than theirs.
      ValueError: sizes or positions that do not fit the expression.
    """
    return _Lowering(schedule, sizes, positions, dtype, name, repeated).function()


class _Lowering:
    def __init__(
        self,
        schedule: Scheduled,
        sizes: dict[str, int],
        positions: tuple[int, ...],
        dtype: str,
        name: str,
        repeated: tuple[int, ...],
    ):
        self.expression = schedule.expression
        self.sizes, self.dtype, self.name = sizes, dtype, name
        statement, sparse = schedule.statement, self.expression.sparse
        for index in self.expression.indices:
            if index.name not in sizes:
                raise ValueError(f"lower: sizes: no size of {index}, got {sizes}")
        self.storage = (
            None
            if sparse is None
            else Storage(sparse, sizes, positions, statement.relations, repeated)
        )
        self.body, self.relations = positions_explicit(statement, self.storage)
        self.ranges = Ranges(self.relations, sizes)
        warp = warp_nest(statement)
        self.movement = movement = Movement(self.expression, self.body, self.relations)
        self.plan = plan_sums(movement, warp)
        self.statements = Statements(self.expression, self.ranges, self.plan)
        names = {array.name for array in self._inputs()} | {self.expression.output.tensor}
        self.recovery = Recovery(self.ranges, movement, self.plan, names)
        self.statements.fresh = self.recovery.fresh
        self.tiles = Tiles(self.ranges, movement)
        self.clearing = Clearing(movement, self.plan, self.ranges, self.recovery)
        self.tracking = Tracking(self.recovery, self.statements)
        self.runs = Runs(self.tracking)
        self.heads = Heads(self.ranges, self.recovery)
        self.octet: OctetNest | None = None
        if warp:
            self.octet = OctetNest(self.expression, warp, self.recovery, self.plan, dtype)

    # The function around the loops.

    def function(self) -> Function:
        output, wide = self._output(), accumulator_of(self.dtype)
        inputs = self._inputs()
        scope = Scope()
        if (padding := self.clearing.padding(output)) is not None:
            scope.emit(padding)
            output = dataclasses.replace(output, fill=None)
        if self.clearing.row is not None:
            scope.emit(*self.clearing.rest())
            output = dataclasses.replace(output, fill=None)
        self._lower(self.body, scope)
        body = without_unused(scope.close())
        if (count := copies(body)) > MOST_COPIES:
            raise ScheduleError(
                f"unroll: {count} copies of a body, and compilers take at most {MOST_COPIES}; "
                "split the loop, and unroll the inner one"
            )
        largest = max([array.size for array in (*inputs, output)] + [self._largest_fusion()])
        # The last tile of a split goes beyond.
        largest += sum(r.size for r in self.relations.all if isinstance(r, Split))
        return Function(
            self.name,
            inputs,
            (output,),
            body,
            wide,
            index_dtype(largest),
        )

    def _inputs(self) -> tuple[Array, ...]:
        arrays: dict[str, Array] = {}
        for access in self.expression.accesses:
            if self.storage is not None and access == self.storage.access:
                arrays |= {array.name: array for array in self.storage.arrays(self.dtype)}
            else:
                room = self.statements.room(access)
                arrays[access.tensor] = Array(access.tensor, self.dtype, room, numbers=True)
        return tuple(arrays.values())

    def _output(self) -> Array:
        access, plan = self.expression.output, self.plan
        added = plan.op is not None or plan.group is not None
        dtype = accumulator_of(self.dtype) if added else self.dtype
        return Array(access.tensor, dtype, self.statements.room(access), plan.fill, numbers=True)

    def _largest_fusion(self) -> int:
        fused = [r.fused for r in self.relations.all if isinstance(r, Fuse)]
        dense = [var for var in fused if not self.relations.is_sparse(var)]
        return max((self.ranges.of(var, Scope()).bound or 0 for var in dense), default=0)

    # Statements.

    def _lower(self, body: Body, scope: Scope) -> None:
        match body:
            case Assignment():
                self.statements.assign(body, scope)
            case Where():
                self._where(body, scope)
            case Forall():
                if body.var in scope.known:  # one position, known from its parent's
                    if body.unit is not None:
                        raise ScheduleError(
                            f"{body.var} has one value here: no loop to parallelize"
                        )
                    self._lower(body.body, scope)
                elif body.var != self.plan.start:
                    self._for(body, scope)
                elif body.var == self.plan.tracked and self.movement.run_steps(body):
                    self.runs.loop(body, scope, self._lower_tiles)
                else:
                    self._sum(body, scope)

    def _where(self, where: Where, scope: Scope) -> None:
        inner = scope.child(masked=False, live=None)
        self.statements.declare(where, scope)
        kept, self.statements.sum = self.statements.sum, None
        self._lower(where.producer, inner)
        self.statements.sum = kept
        self._emit_live(inner.close(), scope)
        self._lower(where.consumer, scope)
        self.statements.forget(where)

    def _emit_live(self, statements: tuple[Stmt, ...], scope: Scope) -> None:
        """Statements without a collective: a lane that takes no part skips them."""
        if scope.live is None:
            scope.emit(*statements)
        elif statements:
            scope.emit(If(scope.live, statements))

    # Loops.

    def _sum(self, loop: Forall, scope: Scope) -> None:
        if self.octet is not None:
            self.octet.declare(scope)
            self._for(loop, scope)
            self.octet.store(scope)
            return
        name = self.statements.sum = self.recovery.fresh("sum")
        start = Float(IDENTITY[self.expression.reduction])
        scope.emit(Let(name, start, mutable=True))
        inner = scope.child(masked=False, live=None)
        self._for(loop, inner)
        self._emit_live(inner.close(), scope)
        if self.plan.tracked is None:
            self.statements.store(scope, Var(name))
        self.statements.sum = None

    def _for(self, loop: Forall, scope: Scope) -> None:
        if self.octet is not None and loop.var == self.octet.first:
            self.octet.multiply(scope)
            return
        for index in self.expression.indices:
            if index in scope.known and self.tiles.makes({loop.var}, index):
                raise NotImplementedError(
                    f"{loop.var} is a loop over {index}, which is known there"
                )
        self.recovery.name_range(loop.var, scope)
        around = scope.child()
        tracked = self.tracking.start(loop, around)
        inner = around.child()
        if (
            self.plan.group is not None
            and loop.var == self.plan.group.var
            and self.statements.sum is None
        ):
            inner.masked = True
        head = self.heads.of(loop, around, inner)
        self.recovery.recover(inner, loop)
        if loop.var == self.clearing.row:
            self.clearing.clear(inner)
        self._lower_tiles(loop, inner)
        statements = inner.close()
        if head is None:
            around.emit(*statements)
        elif statements:
            around.emit(dataclasses.replace(head, body=statements))
        if tracked and self.plan.tracked == loop.var and self.statements.sum is not None:
            self.tracking.finish(loop, around)
        scope.emit(*around.close())

    def _lower_tiles(self, loop: Forall, scope: Scope) -> None:
        """The body of a loop; where it has vectors in a tile that may be cut off, twice: whole
        tiles of constant extent, and others that end earlier, or have guards and no vectors."""
        tile = self.tiles.of(loop, scope)
        if tile is None:
            self._lower(loop.body, scope)
            return
        parent, whole = tile
        names = set(self.recovery.names)
        full = scope.child(unguarded=scope.unguarded | {parent})
        self._lower(loop.body, full)
        self.recovery.names, after = names, self.recovery.names
        rest = scope.child()
        trimmed = self.tiles.trim(loop.body, parent, rest)
        self._lower(loop.body if trimmed else without_vectors(loop.body), rest)
        self.recovery.names |= after
        scope.emit(If(whole, full.close(), rest.close()))
