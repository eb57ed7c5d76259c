"""Launch plans of SpMM: for points (cuda/spmm/spmm.cuh, spmm_pieces.cuh), and for tiles of column
vectors on tensor cores (spmm_octet.cuh), on CUDA cores (spmm_subwarp.cuh) and exactly as
vectorSparse published them (cuda/paper/).
"""

import dataclasses
import math
from collections.abc import Callable

from sgap_jax.launch import paper
from sgap_jax.launch.kernel_call import TENSOR_CORES, TYPES, KernelCall
from sgap_jax.launch.row_pieces import WorkList, sum_plan
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.paper import PaperOctetTile, WarpTile
from sgap_jax.schedules.point import algorithm, for_kernels
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule
from sgap_jax.schedules.subwarp import BYTES, SubwarpTile
from sgap_jax.schedules.tiles import (
    QUAD,
    OctetTile,
    blocks_of_multiprocessor,
    neighbours,
    spmm_grid,
)


def launch_plan(
    problem: Problem,
    schedule: Schedule,
    batches: tuple[int, int] = (1, 1),
    structures: int = 1,
) -> KernelCall:
    """The launch of C = A B; the inputs depend on the schedule's type, see the functions below.

    Args:
      problem: op "spmm" on "cuda"; `batch` is that of the result, and `nnz` counts all values of
        column vectors.
      schedule: a point with a kernel or a tile of column vectors that its `check` accepts.
      batches: the leading axes of A's values and of B, each 1 or the batch of the result.
      structures: how many the call is for (`KernelCall.of_structures`).
    """
    plan = next(plan for kind, plan in PLANS.items() if isinstance(schedule, kind))
    if plan is _point_plan:
        return plan(problem, schedule, batches, structures)
    return plan(problem, schedule, batches)


def output_dtype(schedule: AtomicParallelism, dtype: str) -> str:
    """The dtype of the kernel's output. If several groups add to one element: the accumulator's
    (float32 for 16-bit types), to be rounded once afterwards. Else: that of the operands."""
    return dtype if schedule.deterministic or dtype == "float64" else "float32"


def work_of(problem: Problem, schedule: Schedule) -> WorkList | None:
    """The sizes of the work list, for a schedule that cuts long rows (or block rows); None for one
    that does not, or if no row can be longer than its chunk. With a list the launch has it in the
    place of the row offsets, and a second result, partial [batch, places, V, n] in the
    accumulator's dtype, which `merge_plan` adds up."""
    if not isinstance(schedule, AtomicParallelism | OctetTile) or schedule.chunk is None:
        return None
    length = problem.vector_length or 1
    work = WorkList(-(-problem.shape[0] // length), problem.nnz // length, schedule.chunk)
    return work if work.merged else None


def merge_plan(problem: Problem, schedule: Schedule) -> KernelCall:
    """The launch that adds the partial sums of rows of several pieces into C (`sum_plan`)."""
    work, n, m = work_of(problem, schedule), problem.n, problem.shape[0]
    assert work is not None
    columns = int(schedule.col) if isinstance(schedule, AtomicParallelism) else 4
    width = (problem.vector_length or 1) * n
    return sum_plan(work, problem.dtype, width, m * n, problem.batch, columns)


def _point_plan(
    problem: Problem, schedule: AtomicParallelism, batches: tuple[int, int], structures: int
) -> KernelCall:
    """The launch of C = A B for a point.

    Inputs: values [Bv, nnz], row_offsets [m+1], column_indices [nnz], permutation [nnz] (of any
    size if not `problem.permuted`; then it is not read), B [Bb, k, n]. Output: C [batch, m, n]
    in `output_dtype`. For A^T B the index arrays, the permutation and (m, k) are those of A^T.

    Args:
      problem: op "spmm" on "cuda"; `batch` is that of the result.
      schedule: a point with a kernel that `AtomicParallelism.check` accepts.
      batches: (Bv, Bb), each 1 or the batch.
      structures: entries that are loaded together must be aligned in each of them.
    """
    schedule = for_kernels(schedule, problem.op)
    work = work_of(problem, schedule)
    if work is None and schedule.chunk is not None:
        schedule = dataclasses.replace(schedule, chunk=None)
    (m, k), n, col = problem.shape, problem.n, int(schedule.col)
    tile = schedule.columns_of_block(n)
    operand, out = TYPES[problem.dtype], TYPES[output_dtype(schedule, problem.dtype)]
    values_stride = problem.nnz if batches[0] > 1 else 0
    strides = (values_stride, problem.nnz if structures > 1 else 0)
    kernel, constants = _kernel(schedule, problem, strides)
    constants += [col, tile // col, schedule.block_size, n % col == 0, problem.permuted]
    index, reads = "const int", f"const {operand}"
    pointers = [reads, index, index, index, reads, out]
    scalars: tuple[int, ...] = (
        m,
        n,
        values_stride,
        k * n if batches[1] > 1 else 0,
        problem.batch,
        problem.nnz,
    )
    if work is not None:
        pointers.append("double" if problem.dtype == "float64" else "float")
        scalars += work.scalars
    return KernelCall.of(
        "spmm.cuh" if work is None else "spmm_pieces.cuh",
        kernel,
        constants,
        pointers,
        scalars,
        blocks=(schedule.blocks(problem), -(-n // tile)),
        threads=schedule.block_size,
        batch=problem.batch,
        zero=() if schedule.deterministic else (0,),
    )


def _kernel(
    schedule: AtomicParallelism, problem: Problem, strides: tuple[int, int]
) -> tuple[str, list]:
    """The kernel's name and its first template constants. `strides`: those of values and of index
    arrays, where there are several."""
    operand, out = TYPES[problem.dtype], TYPES[output_dtype(schedule, problem.dtype)]
    match algorithm(schedule, "spmm"):
        case "row":
            return "SpmmRowKernel", [operand, schedule.row]
        case "row_group":
            groups = schedule.workers_in_row
            return "SpmmRowGroupKernel", [operand, out, groups, schedule.group, schedule.walk]
        case "row_pieces":
            return "SpmmPiecesKernel", [operand, schedule.group]
        case "nnz":
            return "SpmmNnzKernel", [operand, schedule.nnz]
        case family:
            assert family == "nnz_group"  # `check` refuses the points without a kernel
            nonzeros, col = int(schedule.nnz or 1), int(schedule.col)
            # Entries loaded at once: as many as are aligned, and as rows of B fit in registers.
            fit = 4 // col if problem.dtype == "float64" else 2 if problem.n % col else 4
            fit = fit if col <= 4 else 2 if col <= 8 and fit else 1
            load = math.gcd(nonzeros, *strides, fit)
            lanes = [nonzeros, schedule.group, schedule.walk, load]
            return "SpmmNnzGroupKernel", [operand, *lanes]


def _octet_plan(problem: Problem, tile: OctetTile, batches: tuple[int, int]) -> KernelCall:
    """The launch of C = A B for A of column vectors, on tensor cores.

    Inputs: values [Bv, vectors, V], row_offsets [ceil(m / V) + 1], column_indices [vectors], order
    [ceil(m / V)] of the block rows (of any size if the tile does not swizzle; then it is not read),
    B [Bb, k, n]. Output: C [batch, m, n]. With a work list (`work_of`): values, the list,
    column_indices, B; C and the partial sums.

    Args:
      problem: op "spmm" on "cuda" with format CVS(V); `nnz` counts values, V for each vector, and
        `batch` is that of the result.
      tile: a tile with a kernel that `OctetTile.check` accepts.
      batches: (Bv, Bb), each 1 or the batch.
    """
    (m, k), n = problem.shape, problem.n
    work, near = work_of(problem, tile), neighbours(tile, problem)
    operand, chunk = TYPES[problem.dtype], 4 if problem.dtype == "float32" else 8
    panels, quads = tile.tile_n // (8 * chunk), tile.tile_k // QUAD
    constants: list = [operand, tile.vector_length, panels, quads, tile.stages, tile.row_warps]
    constants += [near, blocks_of_multiprocessor(tile, problem), n % chunk == 0]
    index, reads = "const int", f"const {operand}"
    pointers = [reads, index, index, index, reads, operand]
    if work is None:
        constants.append(tile.swizzle)
    else:
        pointers = [reads, index, index, reads, operand, "float"]
    scalars: tuple[int, ...] = (
        m,
        n,
        problem.nnz if batches[0] > 1 else 0,
        k * n if batches[1] > 1 else 0,
        problem.batch,
        problem.nnz // tile.vector_length,
    )
    return KernelCall.of(
        "spmm_octet.cuh",
        "SpmmOctetKernel" if work is None else "SpmmOctetPiecesKernel",
        constants,
        pointers,
        scalars + (() if work is None else work.scalars),
        blocks=spmm_grid(tile, problem),
        threads=32 * tile.row_warps * near,
        batch=problem.batch,
        requires=TENSOR_CORES,
    )


# Limits in bytes on what a lane holds in its 128 registers (cuda/common/types.cuh: kTileThreads).
_ROWS = 64  # its columns of the rows of B under way
_VALUES = 128  # the values of A that multiply these rows
_MOST_ROWS = 8  # not bytes: the most rows of B under way, which limits short ones


def _subwarp_plan(problem: Problem, tile: SubwarpTile, batches: tuple[int, int]) -> KernelCall:
    """The launch of C = A B for A of column vectors, on CUDA cores.

    Inputs: values [Bv, vectors, V], row_offsets [ceil(m/V)+1], column_indices [vectors],
    permutation [vectors] (of any size if not `problem.permuted`; then it is not read), B
    [Bb, k, n]. Output: C [batch, m, n] in the operands' dtype; nothing needs to be zeroed. For
    A^T B the index arrays are column_offsets [m+1] and row_indices [vectors], which count block
    rows, and (m, k) is the shape of A^T.

    Args:
      problem: op "spmm" on "cuda"; `nnz` counts values, V for each vector, and `batch` is that of
        the result.
      tile: a tile with a kernel that `SubwarpTile.check` accepts.
      batches: (Bv, Bb), each 1 or the batch.
    """
    (m, k), n, V = problem.shape, problem.n, tile.vector_length
    columns, rows = tile.lane_columns(problem), tile.lane_rows(problem)
    vector, operand = n % columns == 0, TYPES[problem.dtype]
    # Loaded one by one, even 16-bit values take a register each.
    wide = max(BYTES[problem.dtype], 4)
    size = BYTES[problem.dtype] if vector else wide
    fit = min(_ROWS // max(columns * size, 4), _MOST_ROWS)
    at_once = max(fit // V, 1) if problem.permuted else min(fit, _VALUES // (rows * wide))
    if tile.tile_k is not None:
        at_once = min(at_once, max(tile.tile_k // tile.split, 1))
    lanes = [columns, tile.split, tile.subwarp, at_once]
    constants: list = [operand, V]
    if problem.permuted:
        kernel, last = "SpmmSubwarpTransposedKernel", [vector, k % V == 0]
    else:
        kernel, last = "SpmmSubwarpKernel", [vector]
        constants.append(rows)
    constants += [*lanes, tile.block_size, *last]
    index, reads = "const int", f"const {operand}"
    scalars = (
        m,
        n,
        *((k,) if problem.permuted else ()),
        problem.nnz if batches[0] > 1 else 0,
        k * n if batches[1] > 1 else 0,
        tile.tiles_of_block(problem).bit_length() - 1,
        problem.batch,
        problem.nnz // V,
    )
    pointers = [reads, index, index, index, reads, operand]
    return KernelCall.of(
        "spmm_subwarp.cuh",
        kernel,
        constants,
        pointers,
        scalars,
        blocks=tile.blocks(problem),
        threads=tile.block_size,
        batch=problem.batch,
    )


PLANS: dict[type[Schedule], Callable[..., KernelCall]] = {
    AtomicParallelism: _point_plan,
    OctetTile: _octet_plan,
    SubwarpTile: _subwarp_plan,
    WarpTile: paper.spmm_plan,
    PaperOctetTile: paper.spmm_plan,
}
