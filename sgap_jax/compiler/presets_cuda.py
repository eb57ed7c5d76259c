"""Schedules for CUDA where the caller gives none: for any expression with a sparse factor, whose
stored entries are divided evenly among groups of threads.

They are of the atomic-parallelism space (Sgap, section 3.2), chosen as `choose_schedule` does for
matrices with skewed rows, since nothing is known here of how entries are distributed. Not measured
on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from sgap_jax.compiler.cuda.print_cuda import launch_plan
from sgap_jax.compiler.loop_ir.loopir import GPU_BLOCK, GPU_THREAD, GPU_WARP, Function
from sgap_jax.compiler.notation.cin import (
    ATOMICS,
    IGNORE_RACES,
    NO_RACES,
    PARALLEL_REDUCTION,
    SEGMENT,
)
from sgap_jax.compiler.notation.expr import Assign, IndexVar
from sgap_jax.compiler.notation.nest import level_indices, loops
from sgap_jax.compiler.notation.spaces import stored_indices
from sgap_jax.compiler.transform.points import lanes_of, on_warps, warps_of_columns
from sgap_jax.compiler.transform.schedule import LoopSchedule
from sgap_jax.schedules.schedule import ScheduleError

_WARP, _BLOCK = 32, 256
_FEW = 32  # the most columns for which the lanes of a warp have entries, and not columns
_IN_TURN = 32  # entries that a warp of columns goes through in turn
_COORDINATES = 8  # of a thread's tile, where those of the outermost index are merged
_OF_MERGES = ("tile", "within", "block", "thread")
_OF_LANE = 4  # entries that a lane adds up, where all lanes have the same element


def cuda(expression: Assign, sizes: Mapping[str, int]) -> Iterator[Callable[[], LoopSchedule]]:
    """What makes schedules for CUDA, the best first. Call them in turn until one gives a schedule
    that lowers to a kernel: each raises ScheduleError or NotImplementedError where it does not fit.

    "Columns" are all elements of the output for one entry: its indices that the sparse factor
    lacks.

    - The output is stored at the entries: an entry belongs to the lanes of a group, which share the
      sum over a dense index and reduce together, or, without such an index, to one thread.
    - The output has no sparse index: lanes have neighbouring entries, add up some of them, and
      reduce together.
    - Up to 32 columns, and the output's sparse indices are those of outer levels, in their order
      (MTTKRP, TTM, TTV): lanes have neighbouring entries and reduce by segments.
    - Otherwise the lanes of a warp have neighbouring columns and go through 32 entries in turn, or
      without columns each thread has an entry. They add atomically: once for each run of entries of
      one element if the output's sparse indices are those of outer levels, else for each entry.

    Args:
      expression: with a sparse factor.
      sizes: the extent of each index, by name.

    Raises:
      ScheduleError: no factor is sparse.

    Source: Sgap, sections 3.2, 5 and 6; Senanayake et al., OOPSLA 2020, section 8.4.
    """
    nest = _Entries(expression, sizes)
    if nest.at_entries:
        yield nest.sampled if nest.summed else nest.owned
    elif not nest.kept_sparse:
        yield nest.one_element
    elif nest.columns <= _FEW:
        yield nest.segments
    if nest.columns > 1 and not nest.at_entries:
        yield nest.runs_of_columns
        yield nest.columns_of_entries
    yield nest.entries


def first(
    expression: Assign,
    sizes: Mapping[str, int],
    lowered: Callable[[LoopSchedule], Function],
) -> LoopSchedule:
    """The first schedule of `cuda` that is one launch of a kernel.

    Args:
      expression, sizes: as of `cuda`.
      lowered: lowers a schedule for the shapes of the operands.

    Raises:
      NotImplementedError: there is none; names each schedule, and why not.
    """
    refused = []
    try:  # loops over all entries need a last level that has positions
        builds = list(cuda(expression, sizes))
    except ScheduleError as error:
        raise NotImplementedError(str(error)) from error
    for build in builds:
        try:
            schedule = build()
            launch_plan(lowered(schedule))
            return schedule
        except (ScheduleError, NotImplementedError) as error:
            refused.append(f"{build.__name__}: {str(error).splitlines()[0]}")
    raise NotImplementedError(
        f"{expression}: no schedule is one launch of a kernel ({'; '.join(refused)})"
    )


def merged(expression: Assign, sizes: Mapping[str, int]) -> LoopSchedule:
    """The schedule for coordinates that are merged: each thread has one coordinate of the outermost
    index, or a tile of them if its coordinates are merged too, whose beginning is searched for.

    Threads whose index the output has own its elements. If it is summed over, each thread adds to
    them atomically, in no fixed order.

    Raises:
      ScheduleError: no loop.

    Source: Senanayake et al., OOPSLA 2020, sections 3 and 6.
    """
    s = LoopSchedule(expression)
    nest = loops(s.statement.body)
    if not nest:
        raise ScheduleError(f"{expression}: no loop that threads could share")
    outer = nest[0].var
    taken = {index.name for index in expression.indices}
    taken |= {x.tensor for x in (expression.output, *expression.accesses)}
    tile, within, block, thread = (_free(name, taken) for name in _OF_MERGES)
    shared = outer.name
    if outer in stored_indices(expression):
        threads = -(-sizes[outer.name] // _COORDINATES)
        s, shared = s.split(outer, tile, within, _COORDINATES), tile
    else:
        threads = sizes[outer.name]
    s = s.split(shared, block, thread, min(_BLOCK, max(-(-threads // _WARP) * _WARP, _WARP)))
    if outer in expression.output.indices:
        return s.parallelize(block, GPU_BLOCK, NO_RACES).parallelize(thread, GPU_THREAD, NO_RACES)
    return s.parallelize(block, GPU_BLOCK, IGNORE_RACES).parallelize(thread, GPU_THREAD, ATOMICS)


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


class _Entries:
    """An expression's loops, with one loop, `fpos`, over all stored entries (vectors, blocks).

    Attributes:
      nest: the schedule. Its loops are fpos, `within`, `column`, `summed`.
      within: indices inside a vector or block.
      column: the index of the columns, all in one; None if there are none.
      columns: their number.
      summed: dense indices that are summed over.
      at_entries: the output is stored at the entries.
      kept_sparse: indices of the output that the sparse factor has.
    """

    def __init__(self, expression: Assign, sizes: Mapping[str, int]):
        sparse, output = expression.sparse, expression.output
        if sparse is None or sparse.format is None:
            raise ScheduleError(f"{expression}: no factor is sparse")
        levels = level_indices(sparse.format, sparse.indices)
        kept = [i.name for i in output.indices if i not in levels]
        self.summed = tuple(i.name for i in expression.reduced if i not in levels)
        self.kept_sparse = tuple(i for i in output.indices if i in levels)
        self.sizes = sizes
        self.at_entries = output.format is not None and output.format == sparse.format
        self.columns = 1
        s = LoopSchedule(expression).reorder(*levels, *kept, *self.summed)
        names, within = [i.name for i in levels], list[str]()
        for n, side in enumerate(sparse.format.block_shape):
            outer, inner = f"{names[n]}_block", f"{names[n]}_within"
            s, names[n] = s.split(names[n], outer, inner, side), outer
            within.append(inner)
        self.within = tuple(within)
        s = s.reorder(*names, *self.within, *kept, *self.summed)
        fused = names[-1]
        for n, name in enumerate(reversed(names[:-1])):
            s, fused = s.fuse(name, fused, f"f{n}"), f"f{n}"
        s = s.pos(fused, "fpos", sparse)
        for name in kept:
            self.columns *= sizes[name]
        for n in range(len(kept) - 1):
            s = s.fuse(kept[-2], kept[-1], f"column{n}")
            kept[-2:] = [f"column{n}"]
        self.nest, self.column = s, (kept[0] if kept else None)

    def sampled(self) -> LoopSchedule:
        """A group of lanes for each entry, which share a dense index that is summed over."""
        *others, last = self.summed
        lanes = self._lanes_of_sum
        s = self.nest.split("fpos", "block", "warp", _BLOCK // lanes)
        s = s.split(last, "step", "thread", lanes)
        s = s.reorder("block", "warp", *self.within, "thread", *others, "step")
        s = s.parallelize("block", GPU_BLOCK, NO_RACES).parallelize("warp", GPU_WARP, NO_RACES)
        s = s.parallelize("thread", GPU_THREAD, PARALLEL_REDUCTION)
        return s.group("thread", lanes, PARALLEL_REDUCTION)

    def owned(self) -> LoopSchedule:
        """A thread for each entry."""
        s = self.nest.split("fpos", "block", "thread", _BLOCK)
        s = s.parallelize("block", GPU_BLOCK, NO_RACES)
        return s.parallelize("thread", GPU_THREAD, NO_RACES)

    def one_element(self) -> LoopSchedule:
        """Lanes of neighbouring entries, which all add to one element in each column."""
        s, around, lanes = self._beside_columns(_OF_LANE)
        s = s.split("fpos1", "nnz", "thread", lanes)
        s = s.reorder(*around, "thread", "nnz", *self.within, *self.summed)
        s = s.scalar_promote("nnz")
        s = s.parallelize("block", GPU_BLOCK, ATOMICS)
        s = s.parallelize("warp", GPU_WARP, NO_RACES) if "warp" in around else s
        s = s.parallelize("thread", GPU_THREAD, PARALLEL_REDUCTION)
        return s.group("thread", _WARP, PARALLEL_REDUCTION)

    def segments(self) -> LoopSchedule:
        """Lanes of neighbouring entries, which reduce by segments: {<1 nnz, 1 col>, r}."""
        s, around, _ = self._beside_columns(1)
        s = s.reorder(*around, *self.within, "fpos1", *self.summed)
        s = s.precompute(s.expression.factors, (), (), "product")
        s = s.parallelize("block", GPU_BLOCK, IGNORE_RACES)
        s = s.parallelize("warp", GPU_WARP, NO_RACES) if "warp" in around else s
        s = s.parallelize("fpos1", GPU_THREAD, ATOMICS)
        return s.group("fpos1", _WARP if self.columns <= 4 else 8, SEGMENT)

    def runs_of_columns(self) -> LoopSchedule:
        """A warp for a run of entries, its lanes side by side along the columns, with a sum for
        each run of entries of one element: {<32 nnz, c col>, 1}."""
        s, around = self._warps_of_columns()
        s = s.reorder(*around, *self.within, "nnz", *self.summed)
        return on_warps(s.scalar_promote("nnz"))

    def columns_of_entries(self) -> LoopSchedule:
        """The same, but each entry is added to the output by itself."""
        s, around = self._warps_of_columns()
        return on_warps(s.reorder(*around, "nnz", *self.within, *self.summed))

    def entries(self) -> LoopSchedule:
        """A thread for each entry, which adds it to the output."""
        s = self.nest.split("fpos", "block", "thread", _BLOCK)
        s = s.parallelize("block", GPU_BLOCK, IGNORE_RACES)
        return s.parallelize("thread", GPU_THREAD, ATOMICS)

    @property
    def _lanes_of_sum(self) -> int:
        return lanes_of(self.sizes[self.summed[-1]], 1)

    def _beside_columns(self, each: int) -> tuple[LoopSchedule, tuple[str, ...], int]:
        """Loops over blocks of entries, and inside them over columns, which the warps of a block
        share: (schedule, loops around that of a block's entries `fpos1`, lanes)."""
        s = self.nest
        if self.column is None:
            return s.split("fpos", "block", "fpos1", _BLOCK * each), ("block",), _BLOCK
        warps = min(lanes_of(self.columns, 1), _BLOCK // _WARP)
        lanes = _BLOCK // warps
        s = s.split("fpos", "block", "fpos1", lanes * each)
        s = s.split(self.column, "tile", "warp", warps)
        return s, ("block", "warp", "tile"), lanes

    def _warps_of_columns(self) -> tuple[LoopSchedule, tuple[str, ...]]:
        assert self.column is not None
        lanes = lanes_of(self.columns, 1)
        col = next(c for c in (4, 2, 1) if self.columns % (c * lanes) == 0 or c == 1)
        columns = (lanes, col, self.columns)
        return warps_of_columns(self.nest, IndexVar(self.column), _IN_TURN, columns, _BLOCK)
