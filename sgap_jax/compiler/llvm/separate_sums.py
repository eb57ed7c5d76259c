"""Loops in which each iteration stores a sum over lanes of its own, in LLVM IR.

To add up the lanes of one vector takes more instructions than a short sum itself. The vectors of
several sums, side by side, take fewer, and one instruction stores the results. Here are the pattern
and the strategy for CPUVector loops of this kind; unroll_and_jam.py has the one for serial loops.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

from sgap_jax.compiler.llvm import memory
from sgap_jax.compiler.llvm.accumulators import lane_sums
from sgap_jax.compiler.llvm.builder import Builder, NotVector
from sgap_jax.compiler.llvm.instructions import INDEX, NUMBER, ROLLED, Cell, Value, constant
from sgap_jax.compiler.llvm.vectorize import last_lanes, whole_vectors
from sgap_jax.compiler.loop_ir.loopir import CPU_VECTOR, Float, For, Int, Let, Store, Var
from sgap_jax.compiler.loop_ir.patterns import gathers, only_sums


@dataclasses.dataclass(frozen=True)
class SeparateSum:
    """What one iteration of such a loop does.

    Attributes:
      lets: constants, which come first.
      initial: the mutable scalar of the sum, with its initial value.
      op: of the reduction: +, max or min.
      inner: the CPUVector loop that reduces into the scalar.
      store: of the result.
    """

    lets: tuple[Let, ...]
    initial: Let
    op: str
    inner: For
    store: Store


def separate_sum(loop: For) -> SeparateSum | None:
    match loop.body:
        case (*lets, Let(name, Float(), True) as initial, For() as inner, Store() as store):
            constants = [s for s in lets if isinstance(s, Let) and not s.mutable]
            summed = inner.unit == CPU_VECTOR and only_sums(inner) and not gathers(inner)
            stored = (store.value, store.op) == (Var(name), None)
            if len(constants) == len(lets) and summed and stored:
                with contextlib.suppress(NotVector):
                    sums = lane_sums(inner)
                    if list(sums) == [name]:
                        return SeparateSum(tuple(constants), initial, sums[name], inner, store)
    return None


def separate_sums(builder: Builder, loop: For) -> bool:
    """Takes a CPUVector loop of 2, 4 or 8 iterations that each store a sum over lanes: the rows
    that `presets.cpu_entries` adds up at a time from staged products. The iterations run one after
    another, in vectors of their own, until each has one vector of partial sums. Then these are
    added up together."""
    separate = separate_sum(loop) if builder.vectorizable(loop) else None
    if separate is None or (loop.begin, loop.step) != (Int(0), 1) or not isinstance(loop.end, Int):
        return False
    count, width = loop.end.value, builder.native_lanes
    if count not in (2, 4, 8) or count > width:
        return False
    inner, outer, vectors = separate.inner, builder.scalars, []
    with builder.scope():
        for lane in range(count):
            write_constants(builder, separate, {**outer, loop.var: constant(lane)})
            begin, end = builder.bounds(inner)
            with builder.in_lanes(width):
                cell = initial_cell(builder, separate)
                builder.scalars[separate.initial.name] = cell
                rest = whole_vectors(builder, inner, begin, end, ROLLED)
                last_lanes(builder, inner, rest, end, always=True)
                vectors.append(builder.read(cell))
        with builder.in_lanes(width):
            total = builder.fold_each(separate.op, vectors)
        with builder.in_lanes(count):
            write_constants(builder, separate, {**outer, loop.var: Value(INDEX, "0", stride=1)})
            store_sums(builder, separate, total)
    return True


def write_constants(
    builder: Builder, separate: SeparateSum, scalars: Mapping[str, Value | Cell]
) -> None:
    """`separate.lets`, in the scope of `scalars` and no other; the builder stays in it."""
    builder.scalars = dict(scalars)
    for let in separate.lets:
        builder.statement(let)


def initial_cell(builder: Builder, separate: SeparateSum) -> Cell:
    """The partial sums of the lanes, before the first term."""
    return builder.cell(NUMBER, builder.neutral(separate.op, NUMBER), True)


def store_sums(builder: Builder, separate: SeparateSum, totals: Value) -> None:
    """Stores the sums of several iterations, one in each lane, with their initial value."""
    totals = builder.binary(separate.op, builder.value(separate.initial.value), totals)
    array, place = builder.element(separate.store.array, separate.store.index)
    memory.store(builder, array, place, totals, None, False)
