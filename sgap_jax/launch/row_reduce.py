"""Launch plans of the operations on rows, row_sum, row_max and row_broadcast, from points of the
atomic-parallelism space (cuda/row_reduce/row_reduce.cuh)."""

from collections.abc import Sequence

from sgap_jax.launch.kernel_call import TYPES, KernelCall
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.point import for_kernels, side_by_side
from sgap_jax.schedules.problem import Problem

_COMBINE = {"row_sum": "sgap::Add", "row_max": "sgap::Greater"}


def launch_plan(problem: Problem, schedule: AtomicParallelism) -> KernelCall:
    """The launch of an operation between entries [batch, nnz] and rows [batch, m].

    Inputs: values [batch, nnz] (for row_broadcast: rows [batch, m]), row_offsets [m+1]. Output:
    rows [batch, m] (for row_broadcast: values [batch, nnz]). All have one dtype. With the format
    CVS(V), values are [batch, vectors, V] with V * vectors = nnz, and row_offsets [ceil(m/V)+1].

    Args:
      problem: op "row_sum", "row_max" or "row_broadcast" on "cuda".
      schedule: a point with a kernel that `AtomicParallelism.check` accepts.
    """
    if problem.op == "row_broadcast":
        return row_launch(problem, schedule, "row_reduce.cuh", "RowBroadcastKernel", inputs=1)
    constants = [_COMBINE[problem.op]]
    return row_launch(
        problem, schedule, "row_reduce.cuh", "RowReduceKernel", inputs=1, constants=constants
    )


def row_launch(
    problem: Problem,
    schedule: AtomicParallelism,
    header: str,
    kernel: str,
    *,
    inputs: int,
    constants: Sequence[str] = (),
    scalars: Sequence[int] = (),
) -> KernelCall:
    """The launch of a kernel whose groups take rows in turn.

    Its template constants are the dtype, `constants`, r, the rows of a group, the threads of a
    block and V. Its arguments are `inputs` operands, row_offsets, the output, then m, nnz, the
    batch and `scalars`.
    """
    dtype, schedule = TYPES[problem.dtype], for_kernels(schedule, problem.op)
    # {<x row, 1 col>, 1} is a group of one lane that takes x rows in turn.
    rows = max(int(schedule.row or 1), 1) * schedule.walk
    length = problem.vector_length or 1
    every: list[str | int] = [dtype, *constants, schedule.group, rows, schedule.block_size, length]
    pointers = [*[f"const {dtype}"] * inputs, "const int", dtype]
    arguments = (problem.shape[0], problem.nnz, problem.batch, *scalars)
    return KernelCall.of(
        header,
        kernel,
        every,
        pointers,
        arguments,
        blocks=(_blocks(problem.shape[0], schedule, rows, length), 1),
        threads=schedule.block_size,
        batch=problem.batch,
    )


def _blocks(m: int, schedule: AtomicParallelism, rows: int, length: int) -> int:
    side = side_by_side(length, schedule.group)
    groups = -(-m // (side * rows)) * side
    return max(-(-groups * schedule.group // schedule.block_size), 1)
