"""The launch plan of gsddmm without a sum: a vector of each entry (cuda/gsddmm/gsddmm.cuh)."""

from collections.abc import Sequence

from sgap_jax.launch.kernel_call import TYPES, KernelCall
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.problem import Problem


def entries_plan(
    problem: Problem,
    schedule: AtomicParallelism,
    *,
    add: bool = False,
    batches: Sequence[int] = (1, 1),
) -> KernelCall:
    """The launch that computes x op y at the stored entries, with g entries, c columns and r lanes
    of {<g nnz, c col>, r}.

    Inputs: row_offsets [m+1], column_indices [nnz], x [Bx, m, n], y [By, k, n]. Output:
    [batch, nnz, n] in the dtype of the operands, zeros for entries of the padding.

    Args:
      problem: op "sddmm" on "cuda", with n columns; `batch` is that of the result.
      schedule: a point with a kernel that `AtomicParallelism.check` accepts.
      add: op is a sum, else a product; an argument of the kernel.
      batches: (Bx, By), each 1 or the batch.
    """
    (m, k), n, operand, col = problem.shape, problem.n, TYPES[problem.dtype], int(schedule.col)
    nonzeros = max(int(schedule.nnz or 1), 1) * schedule.walk  # 1 for a point of rows
    groups = -(-problem.nnz // nonzeros)
    reads = f"const {operand}"
    strides = [
        size if batch > 1 else 0 for batch, size in zip(batches, (m * n, k * n), strict=True)
    ]
    return KernelCall.of(
        "gsddmm.cuh",
        "GsddmmKernel",
        [operand, nonzeros, schedule.group, col, schedule.block_size, n % col == 0],
        ["const int", "const int", reads, reads, operand],
        [m, problem.nnz, n, *strides, problem.batch, int(add)],
        blocks=(-(-groups * schedule.group // schedule.block_size), 1),
        threads=schedule.block_size,
        batch=problem.batch,
    )
