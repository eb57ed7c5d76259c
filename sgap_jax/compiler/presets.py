"""Schedules by name: points of the atomic-parallelism space as chains, and the CPU's default."""

from __future__ import annotations

from sgap_jax.compiler.loop_ir.loopir import CPU_THREAD, CPU_VECTOR
from sgap_jax.compiler.notation.cin import (
    ATOMICS,
    IGNORE_RACES,
    NO_RACES,
    PARALLEL_REDUCTION,
)
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar
from sgap_jax.compiler.notation.nest import level_indices
from sgap_jax.compiler.transform.points import spmm_point as spmm_point
from sgap_jax.compiler.transform.schedule import Schedule
from sgap_jax.formats.levels import Compressed, Dense
from sgap_jax.schedules.schedule import ScheduleError


def cpu(expression: Assign, rows: int = 16) -> Schedule:
    """What runs on a CPU where no schedule is given: the outermost level of the sparse operand to
    threads, `rows` of its coordinates at a time, the innermost dense index to vectors. Those of the
    output stand outside of the innermost level where that is summed over: sums stay in registers.
    Of a tensor they do over all inner levels, and a factor that a fiber shares waits for its sum
    (Kjolstad et al., CGO 2019, section 6). Without a dense index, lanes share the entries of the
    innermost level.

    Where threads would meet in one element of the output (the rows of COO, the columns of CSC), the
    dense index is what they divide, in tiles; an output without one is computed by one thread.
    """
    s, sparse = Schedule(expression), expression.sparse
    stored: tuple[IndexVar, ...] = ()
    top: Dense | object = Dense()
    if sparse is not None and sparse.format is not None:
        stored, top = level_indices(sparse.format, sparse.indices), sparse.format.levels[0]
    kept = [i for i in expression.output.indices if i not in stored]
    summed = [i for i in expression.reduced if i not in stored]
    if sparse is not None and not summed and len(kept) == 1 and len(stored) > 2:
        by_fibers = _fibers(s, sparse, stored, kept[0], rows)
        if by_fibers is not None:
            return by_fibers
    chunk, in_chunk, position, column = _free(expression, "chunk", "row", "rows", "column")
    outer = stored if stored else tuple(kept[:1])
    inner = [i for i in (*summed, *kept) if i not in outer]
    if not outer:
        return s.reorder(*inner) if inner else s
    held = [i for i in inner if i in kept] if stored and outer[-1] in expression.reduced else []
    row = outer[0]
    if row not in expression.reduced and top in (Dense(), Compressed()):
        rest = [i for i in inner if i not in held]
        s = s.reorder(*outer[:-1], *held, outer[-1], *rest)
        if top == Compressed():
            assert sparse is not None
            s, row = s.pos(row, position, sparse), IndexVar(position)
        s = s.split(row, chunk, in_chunk, rows).parallelize(chunk, CPU_THREAD, NO_RACES)
        if not inner and len(outer) > 1 and outer[-1] in expression.reduced:
            return s.parallelize(outer[-1], CPU_VECTOR, PARALLEL_REDUCTION)
    elif kept:
        last = inner[-1]
        s = s.reorder(*outer, *inner).split(last, chunk, column, 64)
        s = s.reorder(chunk, *outer, *inner[:-1], column)
        s = s.parallelize(chunk, CPU_THREAD, NO_RACES)
        return s.parallelize(column, CPU_VECTOR, NO_RACES)
    else:
        s = s.reorder(*outer, *inner)
    if not inner:
        return s
    race = PARALLEL_REDUCTION if inner[-1] in summed else NO_RACES
    return s.parallelize(inner[-1], CPU_VECTOR, race)


def cpu_entries(expression: Assign, entries: int = 2048, staged: bool = False) -> Schedule:
    """Equal numbers of stored entries to threads, `entries` at a time, for y(i) += A(i,j) * ...
    where the rows of A have unlike lengths: lanes share the entries of a row. Parts of a row that
    tasks share are added up in no fixed order.

    Args:
      expression: the sparse operand in a format of two levels of which the second is Compressed,
        the output indexed by the first, all else reduced and of these two indices.
      entries: of a task.
      staged: all products of a task go to a workspace first, which takes no branch at the ends of
        rows. That pays where rows are shorter than two vectors or so.

    Raises:
      ScheduleError: another expression.

    Source: Senanayake et al., OOPSLA 2020, section 2 and Figure 2.
    """
    sparse = expression.sparse
    if sparse is None or sparse.format is None or len(sparse.format.levels) != 2:
        raise ScheduleError(f"{expression}: no operand is a matrix of rows and their entries")
    row, column = level_indices(sparse.format, sparse.indices)
    whole = {row, column} == set(expression.indices)
    if expression.output.indices != (row,) or not whole or sparse.format.levels[1] != Compressed():
        raise ScheduleError(f"{expression}: not a sum for each row of {sparse}")
    f, entry, task, inner = _free(expression, "f", "entry", "task", "inner")
    s = Schedule(expression).fuse(row, column, f).pos(f, entry, sparse)
    s = s.split(entry, task, inner, entries)
    if staged:
        product, products = _free(expression, "product", "products")
        s = s.precompute(expression.factors, inner, product, products)
        s = s.parallelize(product, CPU_VECTOR, IGNORE_RACES)
    s = s.parallelize(task, CPU_THREAD, ATOMICS)
    return s.parallelize(inner, CPU_VECTOR, PARALLEL_REDUCTION)


def cpu_fibers(expression: Assign, fibers: int = 256) -> Schedule:
    """Equal numbers of fibers to threads, `fibers` at a time, where the slices of a tensor, or the
    rows of a matrix, have unlike numbers of them: D(i,r) += A(i,j,k) * B(j,r) * C(k,r), and the
    like of any order from two on. Vectors of r, and the sums of `cpu`. Parts of a slice that tasks
    share are added up in no fixed order.

    Args:
      expression: the sparse operand in a format of stored levels (the outermost may be Dense), of
        which the output has the outermost and no other, beside one dense index; it has no format.
      fibers: positions of the second level that a task has. Each task adds to two rows of the
        output atomically, number by number: no fewer than evens out the tasks.

    Raises:
      ScheduleError: another expression.

    Source: Senanayake et al., OOPSLA 2020, sections 2 and 8.4.
    """
    sparse, output = expression.sparse, expression.output
    if sparse is None or sparse.format is None or output.format is not None:
        raise ScheduleError(f"{expression}: no sparse operand, or no dense output")
    stored = level_indices(sparse.format, sparse.indices)
    dense = [i for i in expression.indices if i not in stored]
    plain = not sparse.format.block_shape and set(sparse.format.levels[1:]) == {Compressed()}
    top = sparse.format.levels[0] in (Dense(), Compressed())
    if not (plain and top) or len(dense) != 1 or output.indices != (stored[0], *dense):
        raise ScheduleError(f"{expression}: not a sum of vectors for each slice of {sparse}")
    (row, fiber), inner = stored[:2], stored[2:]
    f, position, task, within = _free(expression, "f", "fiber", "task", "within")
    s = Schedule(expression).reorder(row, fiber, *dense, *inner).fuse(row, fiber, f)
    s = s.pos(f, position, sparse).split(position, task, within, fibers)
    s = _summed_first(s.reorder(task, *dense, within, *inner), stored, 1)
    return s.parallelize(task, CPU_THREAD, ATOMICS).parallelize(dense[0], CPU_VECTOR, NO_RACES)


def _free(expression: Assign, *names: str) -> tuple[str, ...]:
    """Names that the expression does not have: these, or longer ones."""
    taken = {index.name for index in expression.indices}
    taken |= {access.tensor for access in (expression.output, *expression.accesses)}
    found = []
    for name in names:
        while name in taken:
            name += "_"
        found.append(name)
    return tuple(found)


def _fibers(
    s: Schedule, sparse: Access, stored: tuple[IndexVar, ...], dense: IndexVar, rows: int
) -> Schedule | None:
    """Vectors of the dense index outside of the levels that are summed over; None where those are
    not the inner ones."""
    output, format = s.expression.output, sparse.format
    kept = [i in output.indices for i in stored]
    depth = kept.index(False) if False in kept else 0
    inner, row = stored[depth:], stored[0]
    plain = format is not None and not format.block_shape and Dense() not in format.levels[1:]
    if format is None or not plain or depth == 0 or any(kept[depth:]):
        return None
    chunk, in_chunk, position = _free(s.expression, "chunk", "row", "rows")
    outer, together = stored[1:depth], output.format is not None and depth > 1
    if together:  # no coordinates are needed: fibers in a row
        s = s.reorder(*stored[:depth], dense, *inner)
        for n, index in enumerate(outer):
            (fiber,) = _free(s.expression, f"fiber{n or ''}")
            s, row = s.fuse(row, index, fiber), IndexVar(fiber)
        outer = ()
    if format.levels[0] == Compressed() or together:
        s, row = s.pos(row, position, sparse), IndexVar(position)
    elif format.levels[0] != Dense():
        return None
    s = s.split(row, chunk, in_chunk, rows).reorder(chunk, in_chunk, *outer, dense, *inner)
    s = _summed_first(s, stored, depth)
    s = s.parallelize(chunk, CPU_THREAD, NO_RACES)
    return s.parallelize(dense, CPU_VECTOR, NO_RACES)


def _summed_first(s: Schedule, stored: tuple[IndexVar, ...], depth: int) -> Schedule:
    """What the levels from `depth` on share waits for the sums of those below it."""
    factors = s.expression.factors
    for n in range(depth, len(stored)):
        below = tuple(f for f in factors if not set(f.indices).isdisjoint(stored[n:]))
        if below != factors and s.expression.is_multilinear:
            (name,) = _free(s.expression, f"w{stored[n - 1]}")
            s, factors = s.precompute(below, (), (), name), below
    return s
