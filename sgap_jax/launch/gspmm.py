"""From a point of the atomic-parallelism space to the launches of gspmm with a maximum or minimum
and of its derivatives (cuda/gspmm/gspmm.cuh, cuda/gspmm/gspmm_pick.cuh)."""

from collections.abc import Sequence

from sgap_jax.launch.kernel_call import TYPES, KernelCall
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.problem import Problem

_PICK_BLOCK = 256
_INDEX = "const int"


def extremum_plan(
    problem: Problem,
    schedule: AtomicParallelism,
    *,
    add: bool,
    minimum: bool,
    batches: Sequence[int] = (1, 1),
) -> KernelCall:
    """The launch of the extrema, for operands as the kernel takes them.

    Inputs: values [Bv, nnz], row_offsets [m+1], column_indices [nnz], permutation [nnz] (of any
    size where `problem.permuted` is false; it is not read), x [Bx, k, n]. Outputs: the extrema
    [batch, m, n] in the dtype of the operands, and positions [batch, m, n] int32. Along A^T the
    index arrays, the permutation and (m, k) are those of A^T.

    Args:
      problem: op "gspmm" on "cuda"; `batch` is that of the result.
      schedule: a point with a kernel, else as `AtomicParallelism.check` raises.
      add: messages are x + value, else x * value; an argument of the kernel, as the next.
      minimum: the least, else the greatest.
      batches: (Bv, Bx), each 1 or the batch.
    """
    (m, k), n, operand = problem.shape, problem.n, TYPES[problem.dtype]
    reads = f"const {operand}"
    strides = _strides(batches, (problem.nnz, k * n))
    scalars = (m, n, *strides, problem.batch, int(add), int(minimum))
    return KernelCall.of(
        "gspmm.cuh",
        "GspmmRowKernel",
        [operand, *_rows(problem, schedule)],
        [reads, _INDEX, _INDEX, _INDEX, reads, operand, "int"],
        scalars,
        blocks=_blocks(problem, schedule),
        threads=schedule.block_size,
        batch=problem.batch,
    )


def pick_to_x_plan(
    problem: Problem, schedule: AtomicParallelism, batches: Sequence[int] = (1, 1, 1)
) -> KernelCall:
    """The launch of `pick_to_x`, along the transpose of what the messages went along.

    Inputs: w [Bw, nnz], offsets, indices and permutation as above, d [Bd, k, n], arg [Ba, k, n].
    Output: [batch, m, n].
    """
    (m, k), n, operand = problem.shape, problem.n, TYPES[problem.dtype]
    reads = f"const {operand}"
    scalars = (m, n, *_strides(batches, (problem.nnz, k * n, k * n)), problem.batch)
    return KernelCall.of(
        "gspmm_pick.cuh",
        "GspmmPickToXKernel",
        [operand, *_rows(problem, schedule)],
        [reads, _INDEX, _INDEX, _INDEX, reads, _INDEX, operand],
        scalars,
        blocks=_blocks(problem, schedule),
        threads=schedule.block_size,
        batch=problem.batch,
    )


def pick_plan(problem: Problem, batches: Sequence[int] = (1, 1, 1)) -> KernelCall:
    """The launch of `pick`: a lane for each number.

    Inputs: w [Bw, nnz], row_offsets [rows+1], column_indices [nnz] of A, x [Bx, k, n], arg
    [Ba, m, n]. Output: [batch, m, n]. `problem.shape` is A's, and `problem.permuted` says that the
    messages went along A^T: then m counts A's columns, and k its rows.
    """
    n, operand = problem.n, TYPES[problem.dtype]
    m, k = problem.shape[::-1] if problem.permuted else problem.shape
    reads = f"const {operand}"
    strides = _strides(batches, (problem.nnz, k * n, m * n))
    return KernelCall.of(
        "gspmm_pick.cuh",
        "GspmmPickKernel",
        [operand, _PICK_BLOCK, problem.permuted],
        [reads, _INDEX, _INDEX, reads, _INDEX, operand],
        (problem.shape[0], m, n, *strides, problem.batch),
        blocks=(-(-m * n // _PICK_BLOCK), 1),
        threads=_PICK_BLOCK,
        batch=problem.batch,
    )


def pick_to_values_plan(
    problem: Problem, schedule: AtomicParallelism, batches: Sequence[int] = (1, 1, 1)
) -> KernelCall:
    """The launch of `pick_to_values`: g entries, c columns and r lanes of {<g nnz, c col>, r}.

    Inputs: row_offsets [rows+1], column_indices [nnz] of A, x [Bx, k, n], d [Bd, m, n], arg
    [Ba, m, n]. Output: [batch, nnz]. `problem` has the op "sddmm", and is otherwise as for `pick`.
    """
    schedule.check(problem)
    n, operand, col = problem.n, TYPES[problem.dtype], int(schedule.col)
    m, k = problem.shape[::-1] if problem.permuted else problem.shape
    nonzeros = max(int(schedule.nnz or 1), 1) * schedule.walk  # 1 for a point of rows
    groups = -(-problem.nnz // nonzeros)
    reads = f"const {operand}"
    constants: list = [operand, nonzeros, schedule.group, col, schedule.block_size]
    strides = _strides(batches, (k * n, m * n, m * n))
    return KernelCall.of(
        "gspmm_pick.cuh",
        "GspmmPickToValuesKernel",
        [*constants, n % col == 0, problem.permuted],
        [_INDEX, _INDEX, reads, reads, _INDEX, operand],
        (problem.shape[0], problem.nnz, n, *strides, problem.batch),
        blocks=(-(-groups * schedule.group // schedule.block_size), 1),
        threads=schedule.block_size,
        batch=problem.batch,
    )


def _rows(problem: Problem, schedule: AtomicParallelism) -> list:
    """The constants of a kernel that walks rows."""
    schedule.check(problem)
    col, tile = int(schedule.col), schedule.columns_of_block(problem.n)
    walk = max(int(schedule.row or 1), 1) * schedule.walk
    constants = [schedule.group, walk, col, tile // col, schedule.block_size]
    return [*constants, problem.n % col == 0, problem.permuted]


def _blocks(problem: Problem, schedule: AtomicParallelism) -> tuple[int, int]:
    return schedule.blocks(problem), -(-problem.n // schedule.columns_of_block(problem.n))


def _strides(batches: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """From one element of the batch to the next; 0 for an operand that all share."""
    return [size if batch > 1 else 0 for batch, size in zip(batches, sizes, strict=True)]
