"""Launch plans of gspmm with a maximum or minimum and of its derivatives, and of its sums where the
values are vectors, from points of the atomic-parallelism space (cuda/gspmm: gspmm.cuh,
gspmm_arg_gather.cuh, gspmm_nnz.cuh).

Points of rows are one launch. Points of nonzeros are two (`places` is not None): the first leaves
partial results of the rows that several windows of nonzeros have, which `merge_plan` combines.
"""

import dataclasses
from collections.abc import Sequence

from sgap_jax.launch.kernel_call import TYPES, KernelCall
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.point import for_kernels
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import GRID_Y

_ARG_GATHER_BLOCK = 256
_MERGE_BLOCK = 128
_INDEX = "const int"


def places(problem: Problem, schedule: AtomicParallelism) -> int | None:
    """The partial results of each column that the first of two launches leaves, two for each window
    of nonzeros; None for a point of rows, which is one launch."""
    if schedule.row is not None:
        return None
    return 2 * max(-(-problem.nnz // _window(schedule)), 1)


def _window(schedule: AtomicParallelism) -> int:
    return int(schedule.nnz or 1) * schedule.group


def extremum_plan(
    problem: Problem,
    schedule: AtomicParallelism,
    *,
    add: bool,
    minimum: bool,
    vectors: bool = False,
    batches: Sequence[int] = (1, 1),
) -> KernelCall:
    """The launch that computes the extremum of each row's messages and its position.

    Inputs: values [Bv, nnz], row_offsets [m+1], column_indices [nnz], permutation [nnz] (of any
    size if not `problem.permuted`; then it is not read), x [Bx, k, n]. Outputs: the extrema
    [batch, m, n] in the dtype of the operands, and the arg-extrema [batch, m, n] int32; of two
    launches also the same of the parts, [batch, places, n] in the accumulator's dtype and int32.
    For A^T the index arrays, the permutation and (m, k) are those of A^T.

    Args:
      problem: op "gspmm" on "cuda"; `batch` is that of the result.
      schedule: a point with a kernel that `AtomicParallelism.check` accepts.
      add: messages are x + value, else x * value; an argument of the kernel, as is `minimum`.
      minimum: the extremum is the minimum, else the maximum.
      vectors: values are [Bv, nnz, n], one for each column.
      batches: (Bv, Bx), each 1 or the batch.
    """
    schedule = for_kernels(schedule, problem.op)
    (m, k), n, operand = problem.shape, problem.n, TYPES[problem.dtype]
    reads = f"const {operand}"
    strides = _strides(batches, (problem.nnz * (n if vectors else 1), k * n))
    scalars = [m, n, *strides, problem.batch, int(add), int(minimum), problem.nnz]
    pointers = [reads, _INDEX, _INDEX, _INDEX, reads, operand, "int"]
    header, kernel = "gspmm.cuh", "GspmmRowKernel"
    if (count := places(problem, schedule)) is not None:
        header, kernel = "gspmm_nnz.cuh", "GspmmNnzKernel"
        pointers += [_wide(problem), "int"]
        scalars.append(count)
    return KernelCall.of(
        header,
        kernel,
        [operand, *_walks(problem, schedule), *[True] * vectors],
        pointers,
        scalars,
        blocks=_blocks(problem, schedule),
        threads=schedule.block_size,
        batch=problem.batch,
    )


def sums_plan(
    problem: Problem, schedule: AtomicParallelism, batches: Sequence[int] = (1, 1)
) -> KernelCall:
    """The launch that sums the products of vectors [Bv, nnz, n] and rows of x.

    Inputs as in `extremum_plan`. Output: [batch, m, n]; of two launches also the sums of the parts,
    [batch, places, n] in the accumulator's dtype (`merge_plan` without a minimum).
    """
    schedule = for_kernels(schedule, problem.op)
    (m, k), n, operand = problem.shape, problem.n, TYPES[problem.dtype]
    reads = f"const {operand}"
    scalars = [m, n, *_strides(batches, (problem.nnz * n, k * n)), problem.batch, problem.nnz]
    pointers = [reads, _INDEX, _INDEX, _INDEX, reads, operand]
    header, kernel = "gspmm.cuh", "GspmmSumsKernel"
    if (count := places(problem, schedule)) is not None:
        header, kernel = "gspmm_nnz.cuh", "GspmmSumsNnzKernel"
        pointers.append(_wide(problem))
        scalars.append(count)
    return KernelCall.of(
        header,
        kernel,
        [operand, *_walks(problem, schedule)],
        pointers,
        scalars,
        blocks=_blocks(problem, schedule),
        threads=schedule.block_size,
        batch=problem.batch,
    )


def arg_gather_to_x_plan(
    problem: Problem, schedule: AtomicParallelism, batches: Sequence[int] = (1, 1, 1)
) -> KernelCall:
    """The launch of `arg_gather_to_x`, the derivative by x along d (equations:
    gspmm_arg_gather.cuh).

    `problem` and the structure are the transpose of those of the forward pass. Inputs: w [Bw, nnz],
    offsets, indices and permutation as in `extremum_plan`, d [Bd, k, n], arg [Ba, k, n]. Output:
    [batch, m, n]; of two launches also the sums of the parts, [batch, places, n] in the
    accumulator's dtype.
    """
    schedule = for_kernels(schedule, problem.op)
    (m, k), n, operand = problem.shape, problem.n, TYPES[problem.dtype]
    reads = f"const {operand}"
    strides = _strides(batches, (problem.nnz, k * n, k * n))
    scalars = [m, n, *strides, problem.batch, problem.nnz]
    pointers = [reads, _INDEX, _INDEX, _INDEX, reads, _INDEX, operand]
    header, kernel = "gspmm_arg_gather.cuh", "GspmmArgGatherToXKernel"
    if (count := places(problem, schedule)) is not None:
        header, kernel = "gspmm_nnz.cuh", "GspmmArgGatherToXNnzKernel"
        pointers.append(_wide(problem))
        scalars.append(count)
    return KernelCall.of(
        header,
        kernel,
        [operand, *_walks(problem, schedule)],
        pointers,
        scalars,
        blocks=_blocks(problem, schedule),
        threads=schedule.block_size,
        batch=problem.batch,
    )


def merge_plan(
    problem: Problem, schedule: AtomicParallelism, *, minimum: bool | None = None
) -> KernelCall:
    """The second launch of a point of nonzeros: combines the parts of each row that several windows
    have, in their order, and writes zeros (and positions of -1) to rows without entries.

    Inputs: the parts (of extrema [batch, places, n] and their positions; of sums [batch, places,
    n]), row_offsets [m+1], and the first launch's result (results), which is changed in place.

    Args:
      problem, schedule: of the first launch.
      minimum: what `extremum_plan` had; None after `arg_gather_to_x_plan` and `sums_plan`.
    """
    count, (m, _), n = places(problem, schedule), problem.shape, problem.n
    assert count is not None
    operand, wide, sums = TYPES[problem.dtype], _wide(problem), minimum is None
    col = 1 << min(int(schedule.col), 4).bit_length() - 1
    col = col if n % col == 0 else 1
    lanes = min(1 << (max(-(-n // col), 1) - 1).bit_length(), 32)
    parts, found = [f"const {wide}"], [f"const {operand}"]
    results, extremum = [operand], [] if sums else [int(bool(minimum))]
    if not sums:
        parts, found, results = [*parts, _INDEX], [*found, _INDEX], [*results, "int"]
    first = len(parts) + 1
    call = KernelCall.of(
        "gspmm_nnz.cuh",
        "GspmmMergeSumsKernel" if sums else "GspmmMergeKernel",
        [operand, col, lanes, _MERGE_BLOCK // lanes, n % col == 0],
        [*parts, _INDEX, *found, *results],
        [m, n, *extremum, _window(schedule), count, problem.batch],
        blocks=(-(-m // 32), min(-(-n // (lanes * col)), GRID_Y)),
        threads=_MERGE_BLOCK,
        batch=problem.batch,
    )
    pairs = tuple((first + i, i) for i in range(len(results)))
    return dataclasses.replace(call, in_place=pairs)


def arg_gather_plan(problem: Problem, batches: Sequence[int] = (1, 1, 1)) -> KernelCall:
    """The launch of `arg_gather`, with a lane for each element of the result.

    Inputs: w [Bw, nnz], row_offsets [rows+1], column_indices [nnz] of A, x [Bx, k, n], arg
    [Ba, m, n]. Output: [batch, m, n]. `problem.shape` is that of A. `problem.permuted` says that
    the forward pass used A^T: then m is the number of A's columns, and k of its rows.
    """
    n, operand = problem.n, TYPES[problem.dtype]
    m, k = problem.shape[::-1] if problem.permuted else problem.shape
    reads = f"const {operand}"
    strides = _strides(batches, (problem.nnz, k * n, m * n))
    return KernelCall.of(
        "gspmm_arg_gather.cuh",
        "GspmmArgGatherKernel",
        [operand, _ARG_GATHER_BLOCK, problem.permuted],
        [reads, _INDEX, _INDEX, reads, _INDEX, operand],
        (problem.shape[0], m, n, *strides, problem.batch, problem.nnz),
        blocks=(-(-m * n // _ARG_GATHER_BLOCK), 1),
        threads=_ARG_GATHER_BLOCK,
        batch=problem.batch,
    )


def arg_gather_to_values_plan(
    problem: Problem, schedule: AtomicParallelism, batches: Sequence[int] = (1, 1, 1)
) -> KernelCall:
    """The launch of `arg_gather_to_values`, the derivative by the values along d (equations:
    gspmm_arg_gather.cuh), with g entries, c columns and r lanes of {<g nnz, c col>, r}.

    Inputs: row_offsets [rows+1], column_indices [nnz] of A, x [Bx, k, n], d [Bd, m, n], arg
    [Ba, m, n]. Output: [batch, nnz]. `problem` has op "sddmm", otherwise as in `arg_gather_plan`.
    """
    n, operand, col = problem.n, TYPES[problem.dtype], int(schedule.col)
    m, k = problem.shape[::-1] if problem.permuted else problem.shape
    nonzeros = max(int(schedule.nnz or 1), 1) * schedule.walk  # 1 for a point of rows
    groups = -(-problem.nnz // nonzeros)
    reads = f"const {operand}"
    constants: list = [operand, nonzeros, schedule.group, col, schedule.block_size]
    strides = _strides(batches, (k * n, m * n, m * n))
    return KernelCall.of(
        "gspmm_arg_gather.cuh",
        "GspmmArgGatherToValuesKernel",
        [*constants, n % col == 0, problem.permuted],
        [_INDEX, _INDEX, reads, reads, _INDEX, operand],
        (problem.shape[0], problem.nnz, n, *strides, problem.batch),
        blocks=(-(-groups * schedule.group // schedule.block_size), 1),
        threads=schedule.block_size,
        batch=problem.batch,
    )


def _wide(problem: Problem) -> str:
    return "double" if problem.dtype == "float64" else "float"


def _walks(problem: Problem, schedule: AtomicParallelism) -> list:
    """The template constants, after the dtype, of a kernel whose groups walk rows or windows."""
    col, tile = int(schedule.col), schedule.columns_of_block(problem.n)
    walk = max(int(schedule.row or 1), 1) * schedule.walk
    each = [] if schedule.row is not None else [int(schedule.nnz or 1)]
    constants = [*each, schedule.group, walk, col, tile // col, schedule.block_size]
    return [*constants, problem.n % col == 0, problem.permuted]


def _blocks(problem: Problem, schedule: AtomicParallelism) -> tuple[int, int]:
    return schedule.blocks(problem), -(-problem.n // schedule.columns_of_block(problem.n))


def _strides(batches: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Strides from one element of the batch to the next; 0 for an operand that all share."""
    return [size if batch > 1 else 0 for batch, size in zip(batches, sizes, strict=True)]
