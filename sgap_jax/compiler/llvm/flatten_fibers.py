"""Nests over the fibers of a sparse operand, flattened to one loop (fiber_nest.py), in LLVM IR.

Which is faster, the nest or the flattened loop, depends on the lengths of the fibers: both are
written, and each task takes one of them at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgap_jax.compiler.llvm import memory
from sgap_jax.compiler.llvm.builder import Builder
from sgap_jax.compiler.llvm.fiber_nest import ORIGIN, FiberNest, Level, fiber_nest, list_name
from sgap_jax.compiler.llvm.instructions import ROLLED, Value, constant
from sgap_jax.compiler.llvm.memory import Elements
from sgap_jax.compiler.loop_ir.arithmetic import ONE, add, multiply
from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, For, Int, Let, Load, Var
from sgap_jax.compiler.loop_ir.patterns import replaced

# Positions for which a list has room: it stays in the L1 cache.
_LIST_SIZE = 2048

# Fibers are short with fewer entries than this, in the mean over a task's rows. A list costs a
# store for each fiber and an operand more for each entry; a loop costs a branch that is often
# mispredicted. Measured on fibers of random lengths (Zen 5, ranks 16 to 64), both take the same
# time at a mean of 10 to 14.
_SHORT = 8

# The branches of so few fibers are learned by the predictor when the loops run again and again, as
# those of a decomposition do: the nest is faster then (0.75x on one thread, Zen 5). A thread learns
# 12,000 fibers of random lengths and not 16,000, but two threads have a half each, the same one in
# every call.
_PREDICTED_FIBERS = 16384


def flatten_fibers(builder: Builder, loop: For) -> bool:
    """Takes a serial loop over segments of a sparse operand (rows), whose body has a nest over the
    fibers of a segment in a CPUVector loop, if the operand has room for more fibers than a branch
    predictor learns. The flattened loop is preceded by one that lists coordinates."""
    nest = fiber_nest(loop) if builder.width == 1 and loop.unit is None else None
    if nest is None or _most_fibers(builder, nest) <= _PREDICTED_FIBERS:
        return False
    begin, end = builder.bounds(loop)
    scalars, arrays = dict(builder.scalars), dict(builder.arrays)
    flat, nested, done = (builder.fresh(name) for name in ("flat", "nested", "done"))
    builder.branch_if(builder.value(_are_short(nest)).text, flat, nested)
    builder.start_block(flat)
    _list_coordinates(builder, nest)
    builder.several_accumulators = False  # as rows are short too
    builder.scalar_loop(nest.loop, begin, end)
    builder.several_accumulators = True
    builder.scalars, builder.arrays = scalars, arrays
    builder.branch(done)
    builder.start_block(nested)
    builder.scalar_loop(loop, begin, end)
    builder.branch(done)
    builder.start_block(done)
    return True


def _most_fibers(builder: Builder, nest: FiberNest) -> int:
    """The capacity of the operand for fibers."""
    match nest.levels[-1].children:
        case Load(offsets, _):
            return builder.arrays[offsets].count - 1
    return 0


def _are_short(nest: FiberNest) -> Expr:
    """Whether a list has room for all positions of a task, and its fibers have few entries."""
    depth = len(nest.levels)
    fibers, entries = (
        Binary("-", nest.below(nest.end, levels), nest.below(nest.begin, levels))
        for levels in (depth - 1, depth)
    )
    fits = Binary("<=", entries, Int(_LIST_SIZE))
    short = Binary("<", entries, multiply(fibers, Int(_SHORT)))
    return Binary("and", nest.any_segment, Binary("and", fits, short))


def _list_coordinates(builder: Builder, nest: FiberNest) -> None:
    """Walks the levels above the last and stores their coordinates at each position of the last."""
    size = _LIST_SIZE + builder.native_lanes  # as whole vectors are stored
    for level in nest.levels:
        if level.scalar is not None:
            elements = Elements(builder.allocate(size), "int32", size, True)
            builder.arrays[list_name(level.scalar)] = elements
    builder.statement(Let(ORIGIN, nest.below(nest.begin, len(nest.levels))))
    _walk(builder, nest.begin, nest.end, nest.levels, ())


def _walk(
    builder: Builder, begin: Expr, end: Expr, levels: Sequence[Level], above: Sequence[Level]
) -> None:
    """Positions [begin, end) of the first of `levels`, and all below; `above` are the levels whose
    positions are given."""
    first, last = builder.value(begin), builder.value(end)
    if not levels:
        return _list_fiber(builder, first, last, above)
    level, rest = levels[0], levels[1:]

    def each() -> None:
        if level.scalar is not None:
            builder.statement(Let(level.scalar, Load(level.coordinates, Var(level.var))))
        following = replaced(level.children, Var(level.var), add(Var(level.var), ONE))
        _walk(builder, level.children, following, rest, (*above, level))

    builder.count(level.var, first, last, 1, each, ROLLED)


def _list_fiber(builder: Builder, first: Value, last: Value, levels: Sequence[Level]) -> None:
    """Stores the coordinates of one fiber at positions [first, last), in whole vectors: what is
    beyond `last` belongs to the next fiber, which is stored later. The first vector is stored even
    if there are no positions: most fibers have no other vector, so that the branch that follows is
    well predicted."""
    place = builder.binary("-", first, builder.value(Var(ORIGIN)))
    stop = builder.binary("-", last, builder.value(Var(ORIGIN)))
    values = {
        list_name(level.scalar): builder.value(Var(level.scalar))
        for level in levels
        if level.scalar is not None
    }
    lanes = builder.native_lanes

    def vectors(at: Value) -> None:
        with builder.in_lanes(lanes):
            for name, value in values.items():
                to = Value(at.kind, at.text, stride=1)
                memory.store(builder, builder.arrays[name], to, value, None, False)

    vectors(place)
    more = builder.binary("+", place, constant(lanes))
    at = "listed position"
    builder.count(at, more, stop, lanes, lambda: vectors(builder.value(Var(at))), ROLLED)
