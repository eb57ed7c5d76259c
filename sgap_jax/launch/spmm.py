"""From a point of the atomic-parallelism space to the launch of its SpMM kernel
(cuda/spmm/spmm.cuh)."""

import math

from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.kernel_source import TYPES, grid_z, instantiation
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.point import algorithm
from sgap_jax.schedules.problem import Problem


def output_dtype(schedule: AtomicParallelism, dtype: str) -> str:
    """The dtype of the kernel's output: where several groups add into one number, the accumulator
    (float32 for 16-bit types), to be rounded once afterwards; else that of the operands."""
    return dtype if schedule.deterministic or dtype == "float64" else "float32"


def launch_plan(
    problem: Problem, schedule: AtomicParallelism, products: tuple[int, int] = (1, 1)
) -> KernelCall:
    """The launch of C = A B for operands as the kernel takes them.

    Inputs: values [Bv, nnz], row_offsets [m+1], column_indices [nnz], permutation [nnz] (of any
    size where `problem.permuted` is false; it is not read), B [Bb, k, n]. Output: C [batch, m, n]
    in `output_dtype`. For A^T B the index arrays, the permutation and (m, k) are those of A^T.

    Args:
      problem: op "spmm" on "cuda"; `batch` is that of the result.
      schedule: a point with a kernel, else as `AtomicParallelism.check` raises.
      products: (Bv, Bb), each 1 or the batch.

    Operands start at multiples of 16 bytes, as all XLA buffers do.
    """
    schedule.check(problem)
    (m, k), n, col = problem.shape, problem.n, int(schedule.col)
    tile = schedule.columns_of_block(n)
    operand, out = TYPES[problem.dtype], TYPES[output_dtype(schedule, problem.dtype)]
    values_stride = problem.nnz if products[0] > 1 else 0
    kernel, constants = _kernel(schedule, problem, values_stride)
    constants += [col, tile // col, schedule.block_size, n % col == 0, problem.permuted]
    index, reads = "const int", f"const {operand}"
    pointers = [reads, index, index, index, reads, out]
    scalars = (
        m,
        n,
        values_stride,
        k * n if products[1] > 1 else 0,
        problem.batch,
    )
    return KernelCall(
        source=instantiation("spmm.cuh", kernel, constants, pointers, len(scalars)),
        kernel=kernel,
        grid=(schedule.blocks(problem), max(-(-n // tile), 1), grid_z(problem.batch)),
        block=(schedule.block_size, 1, 1),
        scalars=scalars,
        zero=() if schedule.deterministic else (0,),
    )


def _kernel(schedule: AtomicParallelism, problem: Problem, values_stride: int) -> tuple[str, list]:
    """The kernel's name and its first constants."""
    operand, out = TYPES[problem.dtype], TYPES[output_dtype(schedule, problem.dtype)]
    match algorithm(schedule, "spmm"):
        case "row":
            return "SpmmRowKernel", [operand, schedule.row]
        case "row_group":
            groups = schedule.workers_in_row
            return "SpmmRowGroupKernel", [operand, out, groups, schedule.group, schedule.walk]
        case "nnz":
            return "SpmmNnzKernel", [operand, schedule.nnz]
        case family:
            assert family == "nnz_group"  # check() refuses the points without a kernel
            nonzeros, col = int(schedule.nnz or 1), int(schedule.col)
            # Entries loaded at once: as many as are aligned, and whose rows of B fit in registers.
            fit = 4 // col if problem.dtype == "float64" else 2 if problem.n % col else 4
            load = math.gcd(nonzeros, values_stride, fit)
            lanes = [nonzeros, schedule.group, schedule.walk, load]
            return "SpmmNnzGroupKernel", [operand, *lanes]
