"""Lowering: concrete index notation to the loop IR.

With one sparse operand and only products, each loop runs over a dimension or over stored positions
(Senanayake et al., OOPSLA 2020, section 6). With several, or several terms, loops over an index
that operands store merge its coordinates (merge_loops.py). The steps:

    position_loops    loops over stored levels become loops over their positions
    output_loops      which loops change the element of the output
    reductions        where sums are, and how they reach the output
    clearing          which loop clears what is not stored
    loop_nest         the statements, from the outside in, in a Context
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

from sgap_jax.compiler.loop_ir.loopir import Array, Function, Stmt
from sgap_jax.compiler.loop_ir.passes import copies, without_unused
from sgap_jax.compiler.loop_ir.widths import accumulator_of, index_dtype
from sgap_jax.compiler.lowering.clearing import clear_padding, clear_rest, cleared_row
from sgap_jax.compiler.lowering.context import Context
from sgap_jax.compiler.lowering.loop_nest import lower_body
from sgap_jax.compiler.lowering.merge_loops import with_sized_tiles, without_positions
from sgap_jax.compiler.lowering.octet import name_tile, warp_loops
from sgap_jax.compiler.lowering.output_loops import OutputLoops
from sgap_jax.compiler.lowering.position_loops import with_position_loops
from sgap_jax.compiler.lowering.ranges import range_of
from sgap_jax.compiler.lowering.reductions import Plan, plan_sums
from sgap_jax.compiler.lowering.storage import Storage
from sgap_jax.compiler.notation.cin import Body, Fuse, Split, SuchThat
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar
from sgap_jax.compiler.notation.nest import without_pairs
from sgap_jax.schedules.schedule import ScheduleError

MOST_COPIES = 256  # a few thousand take LLVM minutes, and its stack


class Scheduled(Protocol):
    """What a transform.schedule.Schedule has."""

    @property
    def expression(self) -> Assign: ...
    @property
    def statement(self) -> SuchThat: ...


def lower(
    schedule: Scheduled,
    sizes: dict[str, int],
    positions: tuple[int, ...] | Mapping[str, tuple[int, ...]],
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
      positions: the number of positions that each level of the sparse operand has memory for, from
        the outermost level on: (m, nnz) of CSR, (nnz, nnz) of COO, (m / V, blocks, blocks * V) of
        CVS(V). () where all operands are dense. Where coordinates of several operands are merged,
        such a tuple for each of them, by name.
      dtype: of the values of all operands.
      name: of the function.
      repeated: levels of the sparse operand, from 0 on, of which a coordinate may come more than
        once under its parent, although the format says that none does: nobody has checked.

    Raises:
      ScheduleError: the loops cannot run so, or would race; the message names the store.
      NotImplementedError: they could, but not here; or tensor cores are to multiply another dtype
        than theirs.
      ValueError: sizes or positions that do not fit the expression.
    """
    expression, statement = schedule.expression, schedule.statement
    for index in expression.indices:
        if index.name not in sizes:
            raise ValueError(f"lower: sizes: no size of {index}, got {sizes}")
    merged: dict[Access, Storage] = {}
    leaders: dict[IndexVar, Access] = {}
    if expression.merges:
        statement = with_sized_tiles(without_pairs(statement), expression, sizes)
        statement, leaders = without_positions(statement)
    if isinstance(positions, Mapping):
        merged, positions = _merged(expression, sizes, positions, repeated), ()
    elif expression.merged:
        several = ", ".join(access.tensor for access in expression.merged)
        raise ValueError(f"lower: positions: expected those of {several} by name, got {positions}")
    storage = Storage(expression.sparse, sizes, positions, statement.relations, repeated)
    body, relations = with_position_loops(statement, storage)
    nest = OutputLoops(expression, body, relations)
    plan = plan_sums(nest, warp_loops(statement))
    if expression.merges and (plan.group is not None or plan.warp):
        raise NotImplementedError(
            f"{expression}: threads that merge coordinates are at different ones, and reach no "
            "reduction of a group together; Atomics is available"
        )
    inputs = _inputs(expression, sizes, storage, merged, dtype)
    output = _output(expression, sizes, storage, merged, dtype, plan)
    names = {array.name for array in (*inputs, output)}
    ctx = Context(nest, plan, sizes, names, cleared_row(nest, plan), merged, leaders)
    if plan.warp:
        name_tile(ctx, dtype)
    if clear_padding(ctx, output):
        output = dataclasses.replace(output, fill=None)
    if ctx.cleared_row is not None:
        clear_rest(ctx)
        output = dataclasses.replace(output, fill=None)
    statements = _statements(ctx, body)
    integers = index_dtype(_largest_index(ctx, (*inputs, output)))
    return Function(name, inputs, (output,), statements, accumulator_of(dtype), integers)


def _merged(
    expression: Assign,
    sizes: dict[str, int],
    positions: Mapping[str, tuple[int, ...]],
    repeated: tuple[int, ...],
) -> dict[Access, Storage]:
    """The operands whose coordinates are merged, with their levels."""
    names = [access.tensor for access in expression.merged]
    if sorted(positions) != sorted(names):
        raise ValueError(
            f"lower: positions: expected those of {', '.join(names) or 'no operand'} by name, got "
            f"those of {', '.join(positions) or 'none'}"
        )
    if repeated:
        raise NotImplementedError(f"{expression}: coordinates that may repeat are not merged")
    return {
        access: Storage(access, sizes, positions[access.tensor], ()) for access in expression.merged
    }


def _inputs(
    expression: Assign,
    sizes: dict[str, int],
    storage: Storage,
    merged: Mapping[Access, Storage],
    dtype: str,
) -> tuple[Array, ...]:
    arrays: dict[str, Array] = {}
    for access in expression.accesses:
        if access in merged or access == expression.sparse:
            own = merged.get(access, storage).arrays(dtype)
        else:
            size = _size(access, expression, sizes, storage)
            own = [Array(access.tensor, dtype, size, holds_values=True)]
        if same := sorted(arrays.keys() & {array.name for array in own}):
            raise ValueError(f"{expression}: two operands have an array {same[0]}; rename one")
        arrays |= {array.name: array for array in own}
    return tuple(arrays.values())


def _output(
    expression: Assign,
    sizes: dict[str, int],
    storage: Storage,
    merged: Mapping[Access, Storage],
    dtype: str,
    plan: Plan,
) -> Array:
    access, dtype = expression.output, dtype if plan.op is None else accumulator_of(dtype)
    if (holder := expression.holder) is not None and access.format is not None:
        size = merged[holder].positions[-1]
    else:
        size = _size(access, expression, sizes, storage)
    return Array(access.tensor, dtype, size, plan.fill, holds_values=True)


def _size(access: Access, expression: Assign, sizes: dict[str, int], storage: Storage) -> int:
    """The elements of an array; of one that shares outer levels of the sparse operand, those at
    each position that these have memory for."""
    if access.format is None:
        return math.prod(sizes[var.name] for var in access.indices)
    positions = storage.positions[expression.shares(access) - 1]
    return positions * math.prod(sizes[var.name] for var in expression.dense_indices(access))


def _statements(ctx: Context, body: Body) -> tuple[Stmt, ...]:
    lower_body(ctx, body)
    statements = without_unused(ctx.scope.close())
    if (count := copies(statements)) > MOST_COPIES:
        raise ScheduleError(
            f"unroll: {count} copies of a body, and compilers take at most {MOST_COPIES}; "
            "split the loop, and unroll the inner one"
        )
    return statements


def _largest_index(ctx: Context, arrays: tuple[Array, ...]) -> int:
    """What the index dtype must hold: places in arrays, dense fusions, and the last tile of a
    split, which goes beyond."""
    relations = ctx.relations
    fused = [r.fused for r in relations.all if isinstance(r, Fuse)]
    dense = [var for var in fused if not relations.is_sparse(var)]
    largest = max([array.size for array in arrays] + [range_of(ctx, v).bound or 0 for v in dense])
    return largest + sum(r.size for r in relations.all if isinstance(r, Split))
