"""Launch plans of SDDMM: for points (cuda/sddmm/sddmm.cuh), and for tiles of column vectors on
tensor cores (sddmm_octet.cuh), on CUDA cores (sddmm_subwarp.cuh) and exactly as vectorSparse
published them (launch/paper.py).
"""

from collections.abc import Callable
from dataclasses import replace

from sgap_jax.launch import paper
from sgap_jax.launch.kernel_call import TENSOR_CORES, TYPES, KernelCall
from sgap_jax.launch.sddmm_operands import PLAIN, OperandShapes, sddmm_call
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.paper import PaperOctetTile, WarpTile
from sgap_jax.schedules.point import algorithm
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule
from sgap_jax.schedules.subwarp import SubwarpTile
from sgap_jax.schedules.tiles import WARPS, OctetTile, features_of_load, sddmm_blocks


def launch_plan(problem: Problem, schedule: Schedule, shapes: OperandShapes = PLAIN) -> KernelCall:
    """The launch of values = X Y^T at the entries or column vectors, times weights and scale.

    Args:
      problem: op "sddmm" on "cuda"; `batch` is that of the result, and `nnz` counts all values of
        column vectors.
      schedule: a point with a kernel or a tile of column vectors that its `check` accepts.
      shapes: those of the operands of `sddmm_call`.
    """
    plan = next(plan for kind, plan in PLANS.items() if isinstance(schedule, kind))
    return plan(problem, schedule, shapes)


_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
# Limits in bytes on what a lane holds in its 64 registers (cuda/common/types.cuh: kThreads). Beyond
# them ptxas spills, first for sm_100.
_KEPT = 64  # the features of a row of X that stay in registers, widened
_HELD = 168  # these features, and all that the nonzeros under way need
_NONZERO = 16  # needed for a nonzero beside its features: an address, a sum, the next index
_LOADS = 64  # loads of X and Y under way, if no row of X stays in registers
_AT_ONCE = 4  # not bytes: the most nonzeros under way
_INT = 2**31 - 1


def _point_plan(
    problem: Problem, schedule: AtomicParallelism, shapes: OperandShapes = PLAIN
) -> KernelCall:
    """The launch of values = X Y^T at the stored entries, times weights and scale (`sddmm_call`).

    Inputs: row_offsets [m+1], column_indices [nnz], X [Bx, m, d], Y [By, k, d] with d = problem.n.
    Output: values [batch, nnz] in the operands' dtype.

    Args:
      problem: op "sddmm" on "cuda"; `batch` is that of the result.
      schedule: a point with a kernel that `AtomicParallelism.check` accepts.
      shapes: those of the operands of `sddmm_call`.
    """
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
    """The kernel's name and its first template constants."""
    col, group, d = int(schedule.col), schedule.group, problem.n
    operand, size = TYPES[problem.dtype], _BYTES[problem.dtype]
    wide = col * max(size, 4)  # loaded one by one, even 16-bit values take a register each
    load = max(col * size, 4) if d % col == 0 else wide
    at_once = min(_AT_ONCE, _power_of_two(max(_LOADS // (2 * load), 1)))
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


def _octet_plan(problem: Problem, tile: OctetTile, shapes: OperandShapes = PLAIN) -> KernelCall:
    """The launch of values = X Y^T at the stored vectors, times weights and scale (`sddmm_call`),
    on tensor cores.

    Inputs: row_offsets [ceil(m / V) + 1], column_indices [vectors], X [Bx, m, d], Y [By, k, d] with
    d = problem.n. Output: values [batch, vectors, V] in the operands' dtype, rounded once from
    float32.

    Args:
      problem: op "sddmm" on "cuda"; `nnz` counts values, V for each vector, and `batch` is that of
        the result.
      tile: a tile with a kernel that `OctetTile.check` accepts.
      shapes: those of the operands of `sddmm_call`.
    """
    d, length = problem.n, tile.vector_length
    operand, threads = TYPES[problem.dtype], 32 * WARPS
    aligned = d % features_of_load(tile, problem.dtype) == 0
    sizes = (length, tile.tile_n, tile.tile_k, tile.stages, threads, aligned)
    call = sddmm_call(
        "sddmm_octet.cuh",
        "SddmmOctetKernel",
        [operand, *sizes],
        problem,
        problem.nnz // length,
        shapes,
        blocks=(sddmm_blocks(tile, problem), 1),
        threads=threads,
    )
    return replace(call, requires=TENSOR_CORES)


_VECTORS_AT_ONCE = 4  # a lane holds the sums of so many vectors at most


def _subwarp_plan(problem: Problem, tile: SubwarpTile, shapes: OperandShapes = PLAIN) -> KernelCall:
    """The launch of values = X Y^T at the stored vectors, times weights and scale (`sddmm_call`),
    on CUDA cores.

    Inputs: row_offsets [ceil(m/V)+1], column_indices [vectors], X [Bx, m, d], Y [By, k, d] with
    d = problem.n. Output: values [batch, vectors, V] in the operands' dtype.

    Args:
      problem: op "sddmm" on "cuda"; `nnz` counts values, V for each vector, and `batch` is that of
        the result.
      tile: a tile with a kernel that `SubwarpTile.check` accepts.
      shapes: those of the operands of `sddmm_call`.
    """
    d, V = problem.n, tile.vector_length
    columns, rows = tile.lane_columns(problem), tile.lane_rows(problem)
    at_once = min(_VECTORS_AT_ONCE, tile.windows())
    operand = TYPES[problem.dtype]
    constants: list = [operand, V, rows, tile.windows(), columns, tile.subwarp, at_once]
    constants += [tile.block_size, d % columns == 0]
    return sddmm_call(
        "sddmm_subwarp.cuh",
        "SddmmSubwarpKernel",
        constants,
        problem,
        problem.nnz // V,
        shapes,
        blocks=tile.blocks(problem),
        threads=tile.block_size,
    )


PLANS: dict[type[Schedule], Callable[..., KernelCall]] = {
    AtomicParallelism: _point_plan,
    OctetTile: _octet_plan,
    SubwarpTile: _subwarp_plan,
    WarpTile: paper.sddmm_plan,
    PaperOctetTile: paper.sddmm_plan,
}
