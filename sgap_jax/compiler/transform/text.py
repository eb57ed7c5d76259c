"""The text of a schedule: loops as C, CUDA C++ or LLVM IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sgap_jax.compiler.cuda import print_cuda
from sgap_jax.compiler.llvm import print_llvm
from sgap_jax.compiler.loop_ir import print_c
from sgap_jax.compiler.loop_ir.batches import in_turns, of_batch
from sgap_jax.compiler.loop_ir.loopir import Function
from sgap_jax.compiler.lowering.lower import Scheduled, lower
from sgap_jax.compiler.lowering.storage import array_name, capacities
from sgap_jax.compiler.notation.cin import Bound, Relation, Split
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar
from sgap_jax.compiler.notation.nest import without_pairs

EXAMPLE_SIZE, EXAMPLE_ENTRIES = 1000, 10_000


PRINTERS: dict[str, Callable[[Function], str]] = {
    "c": print_c.print_c,
    "cuda": print_cuda.print_cuda,
    "llvm": lambda function: print_llvm.print_llvm(function).text,
}


def source(
    schedule: Scheduled,
    target: str,
    sizes: Mapping[str, int] | None,
    nnz: int | None,
    dtype: str,
    batch: Mapping[str, int] | None,
) -> str:
    """The text for a target and sizes; see `Schedule.source`."""
    if target not in PRINTERS:
        names = ", ".join(map(repr, PRINTERS))
        raise ValueError(f"Schedule.source: target: expected one of {names}, got {target!r}")
    found = function(schedule, sizes, nnz, dtype)
    return PRINTERS[target](_of_batch(schedule.expression, found, batch) if batch else found)


def _of_batch(expression: Assign, function: Function, batch: Mapping[str, int]) -> Function:
    """The function for a batch: the operands named in `batch`, and the output, have one part for
    each element."""
    accesses = {x.tensor: x for x in expression.accesses if not x.pattern}
    if unknown := sorted(set(batch) - set(accesses)):
        raise ValueError(
            f"Schedule.source: batch: no operand {unknown[0]!r}; there are {', '.join(accesses)}"
        )
    length, *others = set(batch.values())
    if others or length < 1:
        raise ValueError(f"Schedule.source: batch: expected one length from 1 on, got {batch}")
    parts = {array_name(accesses[name], expression) for name in batch}
    dense = {name for name in batch if accesses[name].format is None}
    turns = in_turns(function, length, dense)
    return of_batch(function, length, {*parts, expression.output.tensor}, turns)


def function(
    schedule: Scheduled, sizes: Mapping[str, int] | None, nnz: int | None, dtype: str
) -> Function:
    """The function for these sizes; sizes that are not given are those of an example, which agree
    with the schedule's `bound`s."""
    relations = without_pairs(schedule.statement).relations
    sparse = schedule.expression.sparse
    every = {
        index.name: _extent(index, relations) or EXAMPLE_SIZE
        for index in schedule.expression.indices
    }
    positions: tuple[int, ...] | dict[str, tuple[int, ...]] = ()
    if sparse is not None and sparse.format is not None:
        format, block = sparse.format, sparse.format.block_shape
        for mode, side in zip(format.modes, block, strict=False):
            name = sparse.indices[mode].name
            every[name] = -(-every[name] // side) * side
    if unknown := sorted(set(sizes or {}) - set(every)):
        raise ValueError(
            f"Schedule.source: sizes: no index {unknown[0]!r}; there are {', '.join(every)}"
        )
    every |= sizes or {}
    entries = EXAMPLE_ENTRIES if nnz is None else nnz
    if schedule.expression.merges:
        positions = {x.tensor: _capacities(x, every, entries) for x in schedule.expression.merged}
    if sparse is not None and sparse.format is not None:
        for side in block:
            entries = -(-entries // side)
        positions = _capacities(sparse, every, entries)
    return lower(schedule, every, positions, dtype)


def _capacities(access: Access, sizes: Mapping[str, int], entries: int) -> tuple[int, ...]:
    """The positions at each level of an operand with so many entries."""
    assert access.format is not None
    modes = [sizes[access.indices[mode].name] for mode in access.format.modes]
    return capacities(access.format, modes, [entries] * len(modes))


def _extent(var: IndexVar, relations: tuple[Relation, ...]) -> int | None:
    """The extent of a variable that follows from a `bound` of it or of the outer part of its split;
    None if there is none."""
    for relation in relations:
        match relation:
            case Bound(parent=parent, size=size) if parent == var:
                return size
            case Split(parent=parent, outer=outer, size=size) if parent == var:
                tiles = _extent(outer, relations)
                return None if tiles is None else tiles * size
    return None
