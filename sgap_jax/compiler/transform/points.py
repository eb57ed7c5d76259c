"""Points of the atomic-parallelism space as schedules of the compiler (Sgap, section 6)."""

from __future__ import annotations

from fractions import Fraction

from sgap_jax.compiler.loop_ir.loopir import GPU_BLOCK, GPU_THREAD, GPU_WARP
from sgap_jax.compiler.notation.cin import (
    ATOMICS,
    IGNORE_RACES,
    NO_RACES,
    PARALLEL_REDUCTION,
    SEGMENT,
)
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar
from sgap_jax.compiler.transform.schedule import LoopSchedule
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.schedule import ScheduleError

_WARP = 32


def spmm_point(expression: Assign, point: AtomicParallelism, columns: int) -> LoopSchedule:
    """The schedule of a point of Sgap's space for C(i,k) += A(i,j) * B(j,k)::

        {<g nnz, c col>, 1}    Listing 3: each thread processes g nonzeros
        {<g nnz, c col>, r}    Listing 6 (there g = 1): r threads reduce by segments, g times
        {<x row, c col>, 1}    Listing 4: each thread processes x rows
        {<1/g row, c col>, r}  Listing 5: g threads share a row, r reduce together

    A block has `point.block_size` threads, or fewer where the dense columns do not fill them. Where
    a block does not cover all `columns`, its threads go over them in tiles.

    Args:
      expression: of that form, A in a format whose levels are (i, j): CSR, COO, CSF(2). By rows i
        is a Dense level.
      columns: extent of k, at least 1.

    Raises:
      ScheduleError: another expression, or a format to which the transformations do not apply.
      NotImplementedError: a legal point without a schedule here; names the nearest that has one.

    Source: Sgap, section 6.
    """
    i, j, k, sparse = _product(expression)
    _check_point(point)
    lanes = lanes_of(columns, int(point.col))
    if point.row is not None and point.row < 1:
        return _shared_row(LoopSchedule(expression), (i, j, k, sparse), point)
    if point.row is not None:
        return _whole_rows(LoopSchedule(expression), (i, j, k), point, lanes, columns)
    s = LoopSchedule(expression).reorder(i, j, k).fuse(i, j, "f").pos("f", "fpos", sparse)
    if point.group == 1:
        return _nonzeros(s, k, point, lanes, columns)
    return _segments(s, k, point, columns)


def _product(expression: Assign) -> tuple[IndexVar, IndexVar, IndexVar, Access]:
    """(i, j, k, A) of the expression C(i,k) += A(i,j) * B(j,k)."""
    sparse, dense = expression.sparse, expression.factors[-1]
    if (
        sparse is not None
        and len(expression.factors) == 2
        and len(sparse.indices) == len(dense.indices) == 2
        and expression.output.format is None
    ):
        (i, j), (inner, k) = sparse.indices, dense.indices
        if inner == j and expression.output.indices == (i, k):
            return i, j, k, sparse
    raise ScheduleError(
        f"{expression}: a point of the space is of C(i,k) += A(i,j) * B(j,k) with A sparse"
    )


def _check_point(point: AtomicParallelism) -> None:
    share = Fraction(point.row or 1).denominator
    plain: dict = {"col": max(point.col, 1)}
    if point.row is not None and point.row >= 1 and point.group > 1 or point.col < 1:
        plain["group"] = 1
    elif share > _WARP:
        plain |= {"row": Fraction(1, _WARP), "group": point.group}
    elif point.worker_dim_r == 1 and point.tile_size is None:
        return
    given: dict = {"nnz": point.nnz, "row": point.row, "group": point.group} | plain
    raise NotImplementedError(
        f"spmm: no chain for the legal point {point}; the nearest is {AtomicParallelism(**given)}"
    )


def lanes_of(columns: int, col: int) -> int:
    """Threads side by side along the dense columns."""
    return min(1 << (-(-columns // col) - 1).bit_length(), _WARP)


def _nonzeros(
    s: LoopSchedule, k: IndexVar, point: AtomicParallelism, lanes: int, n: int
) -> LoopSchedule:
    size, each = point.block_size, int(point.nnz or 1)
    if lanes == 1:
        s = s.split("fpos", "block", "fpos1", size * each).split("fpos1", "thread", "nnz", each)
        s = s.reorder("block", "thread", k, "nnz").scalar_promote("nnz")
        s = s.parallelize("block", GPU_BLOCK, IGNORE_RACES)
        return s.parallelize("thread", GPU_THREAD, ATOMICS)
    s, outer = warps_of_columns(s, k, each, (lanes, int(point.col), n), size)
    s = s.reorder(*outer, "nnz").scalar_promote("nnz")
    return on_warps(s)


def warps_of_columns(
    s: LoopSchedule, k: IndexVar, each: int, columns: tuple[int, int, int], size: int
) -> tuple[LoopSchedule, tuple[str, ...]]:
    """Each warp has `each` neighbours among the positions `fpos`, which its lanes go through
    together, in a loop of `nnz`; `columns` are (lanes, columns of a lane, extent of k). Returns the
    schedule, and the loops around that of `nnz` in their order."""
    lanes, col, n = columns
    s = s.split("fpos", "block", "fpos1", size // lanes * each).split("fpos1", "warp", "nnz", each)
    s, tiles = _strided(s, k, lanes, col, n)
    return s, ("block", "warp", *tiles, "thread", "col")


def on_warps(s: LoopSchedule) -> LoopSchedule:
    """Loops of block, warp and thread on those units, with atomic stores."""
    s = s.parallelize("block", GPU_BLOCK, IGNORE_RACES).parallelize("warp", GPU_WARP, IGNORE_RACES)
    return s.parallelize("thread", GPU_THREAD, ATOMICS)


def _whole_rows(
    s: LoopSchedule,
    indices: tuple[IndexVar, IndexVar, IndexVar],
    point: AtomicParallelism,
    lanes: int,
    n: int,
) -> LoopSchedule:
    (i, j, k), size, each = indices, point.block_size, int(point.row or 1)
    s = s.split(i, "block", "block_row", size // lanes * each)
    if lanes == 1:
        s = s.split("block_row", "thread", "row", each).reorder("block", "thread", "row", k, j)
        s = s.scalar_promote(j).parallelize("block", GPU_BLOCK, NO_RACES)
        return s.parallelize("thread", GPU_THREAD, NO_RACES)
    s = s.split("block_row", "warp", "row", each)
    s, tiles = _strided(s, k, lanes, int(point.col), n)
    s = s.reorder("block", "warp", "row", *tiles, "thread", "col", j).scalar_promote(j)
    s = s.parallelize("block", GPU_BLOCK, NO_RACES).parallelize("warp", GPU_WARP, NO_RACES)
    return s.parallelize("thread", GPU_THREAD, NO_RACES)


def _strided(
    s: LoopSchedule, k: IndexVar, lanes: int, col: int, n: int
) -> tuple[LoopSchedule, tuple[str, ...]]:
    """k in tiles of `lanes` threads with `col` columns each, at a distance of `lanes`."""
    if n == lanes * col:
        return s.split(k, "strides", "thread", lanes).bound("strides", "col", col), ()
    s = s.split(k, "tile", "tile_col", lanes * col)
    return s.split("tile_col", "strides", "thread", lanes).bound("strides", "col", col), ("tile",)


def _shared_row(
    s: LoopSchedule, of: tuple[IndexVar, IndexVar, IndexVar, Access], point: AtomicParallelism
) -> LoopSchedule:
    (i, j, k, sparse), col = of, int(point.col)
    share = Fraction(point.row or 1).denominator
    s = s.fuse(i, k, "io").split("io", "block", "ki", max(point.block_size // share, 1) * col)
    s = s.split("ki", "warp", "kii", col)
    s = s.pos(j, "jpos", sparse).split("jpos", "jpos0", "jpos1", share)
    s = s.reorder("block", "warp", "kii", "jpos1", "jpos0")
    s = s.scalar_promote("jpos1" if point.group > 1 else "jpos0")
    s = s.parallelize("block", GPU_BLOCK, NO_RACES).parallelize("warp", GPU_WARP, NO_RACES)
    if point.group == 1:
        return s.parallelize("jpos1", GPU_THREAD, ATOMICS)
    s = s.parallelize("jpos1", GPU_THREAD, PARALLEL_REDUCTION)
    return s.group("jpos1", point.group, PARALLEL_REDUCTION)


def _segments(s: LoopSchedule, k: IndexVar, point: AtomicParallelism, n: int) -> LoopSchedule:
    each, col = int(point.nnz or 1), int(point.col)
    warps = min(lanes_of(n, col), point.block_size // _WARP)
    lanes = point.block_size // warps // _WARP * _WARP
    walk: tuple[str, ...] = ()
    s, lane = s.split("fpos", "block", "fpos1", lanes * each), "fpos1"
    if each > 1:
        # At each step neighbouring lanes have neighbouring nonzeros, which they reduce at once.
        s, lane, walk = s.split("fpos1", "nnz", "thread", lanes), "thread", ("nnz",)
    tiles: tuple[str, ...] = ()
    if n != warps * col:
        s, k, tiles = s.split(k, "tile", "tile_col", warps * col), IndexVar("tile_col"), ("tile",)
    s = s.split(k, "chunk", "col", col).bound("chunk", "warp", warps)
    s = s.reorder("block", "warp", *tiles, "col", *walk, lane)
    s = s.precompute(s.expression.factors, (), (), "product")
    s = s.parallelize("block", GPU_BLOCK, IGNORE_RACES).parallelize("warp", GPU_WARP, NO_RACES)
    return s.parallelize(lane, GPU_THREAD, ATOMICS).group(lane, point.group, SEGMENT)
