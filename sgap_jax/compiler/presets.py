"""Presets: functions that give the schedule of a well-known loop nest, such as the CPU's default or
a point of the atomic-parallelism space."""

from __future__ import annotations

from sgap_jax.compiler.loop_ir.loopir import CPU_THREAD, CPU_VECTOR
from sgap_jax.compiler.notation.cin import (
    ATOMICS,
    IGNORE_RACES,
    NO_RACES,
    PARALLEL_REDUCTION,
)
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar
from sgap_jax.compiler.notation.nest import level_indices, loops
from sgap_jax.compiler.notation.spaces import stored_indices
from sgap_jax.compiler.transform.points import spmm_point as spmm_point
from sgap_jax.compiler.transform.schedule import LoopSchedule
from sgap_jax.formats.levels import Compressed, Dense
from sgap_jax.schedules.schedule import ScheduleError


def cpu(expression: Assign, rows: int = 16) -> LoopSchedule:
    """The CPU's schedule where the caller gives none.

    Threads divide the outermost level of the sparse operand, `rows` coordinates for each task; the
    innermost dense index is vectorized. If the innermost level is summed over, the loops of the
    output's dense indices are outside of it, so that sums stay in registers. For a tensor these
    loops are outside of all inner levels, and a factor that a whole fiber shares is multiplied with
    the fiber's sum (Kjolstad et al., CGO 2019, section 6). Without a dense index, vector lanes
    share the entries of the innermost level.

    Where two threads could write one element of the output (the rows of COO, the columns of CSC),
    threads divide the dense index in tiles instead; without one, a single thread computes it.

    Where coordinates are merged, loops stay in their order. Threads divide the coordinates of the
    outermost one if the output has that index, and the innermost one is vectorized if nothing is
    merged in it.
    """
    s, sparse = LoopSchedule(expression), expression.sparse
    if expression.merges:
        return _merged(s, rows)
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


def cpu_entries(expression: Assign, entries: int = 2048, staged: bool = False) -> LoopSchedule:
    """Tasks of `entries` stored entries each, for y(i) += A(i,j) * ... where the rows of A differ
    in length; vector lanes share the entries of a row. Where tasks share a row, their partial sums
    are added in no fixed order.

    Args:
      expression: the sparse operand in a format of two levels of which the second is Compressed,
        the output indexed by the first; the other index is reduced, and there are no others.
      entries: of a task.
      staged: write all products of a task to a workspace first, in a loop without a branch at the
        ends of rows. That pays where rows are shorter than two vectors or so.

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
    s = LoopSchedule(expression).fuse(row, column, f).pos(f, entry, sparse)
    s = s.split(entry, task, inner, entries)
    if staged:
        product, products = _free(expression, "product", "products")
        s = s.precompute(expression.factors, inner, product, products)
        s = s.parallelize(product, CPU_VECTOR, IGNORE_RACES)
    s = s.parallelize(task, CPU_THREAD, ATOMICS)
    return s.parallelize(inner, CPU_VECTOR, PARALLEL_REDUCTION)


def cpu_fibers(expression: Assign, fibers: int = 256) -> LoopSchedule:
    """Tasks of `fibers` fibers each, where the slices of a tensor (the rows of a matrix) differ in
    their numbers of fibers: D(i,r) += A(i,j,k) * B(j,r) * C(k,r), and such products of any order
    from two on. The index r is vectorized, and sums are formed as in `cpu`. Where tasks share a
    slice, their partial sums are added in no fixed order.

    Args:
      expression: the sparse operand in a format of stored levels (the outermost may be Dense); the
        output is dense, with the index of the outermost level, no other sparse one, and one dense
        index.
      fibers: positions of the second level for each task. Each task adds to two rows of the output
        with one atomic operation per element: choose tasks no smaller than balance needs.

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
    s = LoopSchedule(expression).reorder(row, fiber, *dense, *inner).fuse(row, fiber, f)
    s = s.pos(f, position, sparse).split(position, task, within, fibers)
    s = _summed_first(s.reorder(task, *dense, within, *inner), stored, 1)
    return s.parallelize(task, CPU_THREAD, ATOMICS).parallelize(dense[0], CPU_VECTOR, NO_RACES)


def cpu_workspace(expression: Assign, rows: int = 16) -> LoopSchedule:
    """Gustavson's product of sparse matrices and its like: one product, reduced over an index whose
    loop is outside that of the result's innermost index. Each row of the result is summed in a
    dense workspace, from which the elements that a sparse result stores are read; `cpu` merges the
    row with each row that is added instead. Threads divide the outermost index.

    Args:
      expression: with merged coordinates, such as C(i,k) += C_(i,k) * A(i,j) * B(j,k) in CSR.
      rows: coordinates of the outermost index for each task.

    Raises:
      ScheduleError: another expression.

    Source: Kjolstad et al., CGO 2019, sections 2 and 6.
    """
    s = LoopSchedule(expression)
    order = [loop.var for loop in loops(s.statement.body)]
    inner = [index for index in order if index in expression.output.indices][-1:]
    outside = order[: order.index(inner[0])] if inner else []
    one = expression.merges and not expression.terms
    if not one or not inner or set(outside).isdisjoint(expression.reduced):
        raise ScheduleError(
            f"{expression}: not one product of merged coordinates that is reduced over an index "
            "outside of the innermost one of the result"
        )
    held = (expression.holder,) if expression.output.format is not None else ()
    factors = tuple(x for x in expression.factors if x not in held)
    fresh, name = _free(expression, f"{inner[0]}_w", "w")
    return _by_tasks(s.precompute(factors, inner[0], fresh, name), rows)


def _by_tasks(s: LoopSchedule, rows: int) -> LoopSchedule:
    """Threads for tiles of the outermost index, if the result has it."""
    (chunk, in_chunk), nest = _free(s.expression, "chunk", "row"), loops(s.statement.body)
    if not nest or nest[0].var not in s.expression.output.indices:
        return s
    return s.split(nest[0].var, chunk, in_chunk, rows).parallelize(chunk, CPU_THREAD, NO_RACES)


def _merged(s: LoopSchedule, rows: int) -> LoopSchedule:
    nest, expression = loops(s.statement.body), s.expression
    if not nest or nest[0].var not in expression.output.indices:
        return s
    outer, inner = nest[0].var, nest[-1].var
    s = _by_tasks(s, rows)
    several = sum(loop.var == inner for loop in nest) > 1
    if inner == outer or inner in stored_indices(expression) or several:
        return s
    race = NO_RACES if inner in expression.output.indices else PARALLEL_REDUCTION
    return s.parallelize(inner, CPU_VECTOR, race)


def _free(expression: Assign, *names: str) -> tuple[str, ...]:
    """Names that are not used in the expression: the given ones, or longer ones."""
    taken = {index.name for index in expression.indices}
    taken |= {access.tensor for access in (expression.output, *expression.accesses)}
    found = []
    for name in names:
        while name in taken:
            name += "_"
        found.append(name)
    return tuple(found)


def _fibers(
    s: LoopSchedule, sparse: Access, stored: tuple[IndexVar, ...], dense: IndexVar, rows: int
) -> LoopSchedule | None:
    """The schedule with vectors of the dense index outside of the levels that are summed over; None
    where these are not the inner levels."""
    output, format = s.expression.output, sparse.format
    kept = [i in output.indices for i in stored]
    depth = kept.index(False) if False in kept else 0
    inner, row = stored[depth:], stored[0]
    plain = format is not None and not format.block_shape and Dense() not in format.levels[1:]
    if format is None or not plain or depth == 0 or any(kept[depth:]):
        return None
    chunk, in_chunk, position = _free(s.expression, "chunk", "row", "rows")
    outer, together = stored[1:depth], output.format is not None and depth > 1
    if together:  # the output is stored by fibers: their positions are enough, without coordinates
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


def _summed_first(s: LoopSchedule, stored: tuple[IndexVar, ...], depth: int) -> LoopSchedule:
    """Precomputes, at each level from `depth` on, the sum over the levels below it; the factors
    that do not depend on those levels are multiplied with the sum."""
    factors = s.expression.factors
    for n in range(depth, len(stored)):
        below = tuple(f for f in factors if not set(f.indices).isdisjoint(stored[n:]))
        if below != factors and s.expression.is_multilinear:
            (name,) = _free(s.expression, f"w{stored[n - 1]}")
            s, factors = s.precompute(below, (), (), name), below
    return s
