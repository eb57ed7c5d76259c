"""From a point of the atomic-parallelism space to the launch of its SDDMM kernel
(cuda/sddmm/sddmm.cuh)."""

from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.kernel_source import TYPES
from sgap_jax.launch.sddmm_operands import PLAIN, OperandShapes, sddmm_call
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.point import algorithm
from sgap_jax.schedules.problem import Problem

_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
# Bytes in registers of a lane, which has 64 of them in all (cuda/common/types.cuh: kThreads). With
# more of these ptxas spills, for sm_100 first.
_KEPT = 64  # features of a row of X, widened
_HELD = 168  # these, and what the nonzeros under way take
_NONZERO = 16  # an address, a sum, an index to come
_LOADS = 64  # of X and Y under way where no row of X is kept
_AT_ONCE = 4  # nonzeros under way, at most
_INT = 2**31 - 1


def launch_plan(
    problem: Problem, schedule: AtomicParallelism, shapes: OperandShapes = PLAIN
) -> KernelCall:
    """The launch of values = X Y^T at the entries, times weights and scale (`sddmm_call`).

    Inputs: row_offsets [m+1], column_indices [nnz], X [Bx, m, d], Y [By, k, d] with d = problem.n.
    Output: values [batch, nnz] in the operands' dtype.

    Args:
      problem: op "sddmm" on "cuda"; `batch` is that of the result.
      schedule: a point with a kernel, else as `AtomicParallelism.check` raises.
      shapes: those of the operands of `sddmm_call`.
    """
    schedule.check(problem)
    d, col = problem.n, int(schedule.col)
    kernel, constants = _kernel(schedule, problem)
    constants += [schedule.block_size, d % col == 0]
    return sddmm_call(
        "sddmm.cuh",
        kernel,
        constants,
        problem,
        problem.nnz,
        shapes,
        blocks=(schedule.blocks(problem), 1),
        threads=schedule.block_size,
    )


def _kernel(schedule: AtomicParallelism, problem: Problem) -> tuple[str, list]:
    """The kernel's name and its first constants."""
    col, group, d = int(schedule.col), schedule.group, problem.n
    operand, size = TYPES[problem.dtype], _BYTES[problem.dtype]
    wide = col * max(size, 4)  # one by one, even 16-bit numbers take a register each
    load = max(col * size, 4) if d % col == 0 else wide
    at_once = min(_AT_ONCE, _LOADS // (2 * load))
    if algorithm(schedule, "sddmm") == "nnz":
        nonzeros = int(schedule.nnz or 1)
        owned = min(nonzeros * schedule.walk, _INT)
        at_once = min(at_once, _power_of_two(nonzeros))
        return "SddmmNnzKernel", [operand, owned, col, group, at_once]
    kept = -(-d // (group * col))
    if 0 < kept * wide <= _KEPT:
        at_once = min(_AT_ONCE, _power_of_two((_HELD - kept * wide) // (kept * load + _NONZERO)))
    else:
        kept = 0
    share = schedule.workers_in_row
    rows = min(max(int(schedule.row or 1), 1) * schedule.walk, _INT)
    return "SddmmRowKernel", [operand, rows, share, col, group, kept, at_once]


def _power_of_two(limit: int) -> int:
    return 1 << limit.bit_length() - 1
