"""Loops that sum up vectors, in LLVM IR: with several accumulators for each sum.

An addition waits for the one before it where both are of one sum. Iterations in a row that add to
different accumulators do not; these are added up after the loop.
"""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.llvm.builder import Builder, NotVector
from sgap_jax.compiler.llvm.instructions import INDEX, NUMBER, ROLLED, Cell, Value, constant
from sgap_jax.compiler.llvm.prefetch import ENTRIES_LATER, prefetch_gathers
from sgap_jax.compiler.loop_ir.loopir import Binary, For, Let, Set, Var
from sgap_jax.compiler.loop_ir.patterns import only_sums, parts

# Vectors that are added to in turn: they hide the latency of a multiply-add (4 cycles, two of them
# in each). And accumulators: with more, the few entries of a row would be spread over sums that are
# to be added up in the end.
_VECTORS_IN_TURN = 8
_MOST_ACCUMULATORS = 4


def accumulators_in_lanes(builder: Builder, loop: For) -> bool:
    """Takes a serial loop, in lanes, that does nothing but reduce into scalars of each lane: a loop
    over the entries of a row. Iterations that are no group of accumulators follow one by one."""
    if builder.width == 1 or loop.step != 1 or loop.unit is not None or not only_sums(loop):
        return False
    begin, end = builder.bounds(loop)
    begin = several_accumulators(builder, loop, begin, end)
    # Rows are short: more copies of the body would mostly be branches around them.
    builder.count(loop.var, begin, end, 1, lambda: _iteration(builder, loop), ROLLED)
    return True


def several_accumulators(
    builder: Builder, loop: For, begin: Value, end: Value, lanes: int = 1
) -> Value:
    """Writes a loop over groups of iterations, in which each iteration reduces into another
    accumulator; returns where the rest begins. `lanes`: of this loop, 1 if a loop around it has
    them. A group is that many iterations for each accumulator."""
    sets = _accumulators(builder, loop)
    if len(sets) < 2:
        return begin
    count, each = len(sets), len(sets) * lanes
    position = builder.cell(INDEX, begin)
    many, body, fold, rest = (builder.fresh("chains") for _ in range(4))
    fewest = each if lanes > 1 else 4 * count
    enough = builder.binary("<=", constant(fewest), builder.binary("-", end, begin))
    builder.branch_if(enough.text, many, rest)
    builder.start_block(many)
    full = builder.binary("-", end, constant(each - 1))
    builder.branch(body)
    builder.start_block(body)
    now = builder.read(position)
    with builder.scope():
        for i, accumulators in enumerate(sets):
            builder.scalars |= accumulators
            place = builder.binary("+", now, constant(i * lanes))
            builder.scalars[loop.var] = dataclasses.replace(place, stride=int(lanes > 1))
            _iteration(builder, loop)
    after = builder.binary("+", now, constant(each))
    builder.write(position, after)
    builder.branch_if(builder.binary("<", after, full).text, body, fold, ROLLED)
    builder.start_block(fold)
    operations = lane_sums(loop)
    for accumulators in sets[1:]:
        for name, cell in accumulators.items():
            total = sets[0][name]
            both = builder.binary(operations[name], builder.read(total), builder.read(cell))
            builder.write(total, both)
    builder.branch(rest)
    builder.start_block(rest)
    return builder.read(position)


def _accumulators(builder: Builder, loop: For) -> list[dict[str, Cell]]:
    """Sets of accumulators by the names of the sums: first the sums' own cells, then new ones."""
    if not builder.several_accumulators:
        return []
    try:
        sums = lane_sums(loop)
    except NotVector:
        return []
    scalars = [builder.scalars[name] for name in sums]
    cells = [c for c in scalars if isinstance(c, Cell) and c.lanes == builder.width]
    if not cells or len(cells) < len(sums) or any(c.kind != NUMBER for c in cells):
        return []
    vectors = max(len(cells) * builder.width // builder.native_lanes, 1)
    sets = [dict(zip(sums, cells, strict=True))]
    for _ in range(min(_VECTORS_IN_TURN // vectors, _MOST_ACCUMULATORS) - 1):
        starts = {name: builder.neutral(op, NUMBER) for name, op in sums.items()}
        sets.append({name: builder.cell(NUMBER, start, True) for name, start in starts.items()})
    return sets


def _iteration(builder: Builder, loop: For) -> None:
    if builder.prefetches:
        prefetch_gathers(builder, loop, ENTRIES_LATER)
    builder.statements(loop.body)


def lane_sums(loop: For) -> dict[str, str]:
    """The scalars from outside that the body reduces into, with the operation of each.

    Such a scalar occurs as `s = s op value` and nowhere else, so that each lane may have one of its
    own.

    Raises:
      NotVector: the body sets a scalar from outside otherwise.
    """
    nodes = list(parts(loop.body))
    own = {node.name for node in nodes if isinstance(node, Let)}
    sums: dict[str, str] = {}
    uses: dict[str, int] = {}
    for node in nodes:
        if isinstance(node, Set) and node.name not in own:
            match node.value:
                case Binary("+" | "max" | "min" as op, Var(name), _) if name == node.name:
                    pass
                case Binary("+" | "max" | "min" as op, _, Var(name)) if name == node.name:
                    pass
                case _:
                    raise NotVector
            if sums.setdefault(name, op) != op:
                raise NotVector
            uses[name] = uses.get(name, 0) + 1
    for name, count in uses.items():
        if sum(isinstance(node, Var) and node.name == name for node in nodes) != count:
            raise NotVector
    return sums
