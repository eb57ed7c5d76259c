"""From an octet tile to the launch of its SDDMM kernel (cuda/sddmm/sddmm_octet.cuh)."""

from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.kernel_source import TYPES
from sgap_jax.launch.sddmm_operands import PLAIN, OperandShapes, sddmm_call
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.tiles import WARPS, OctetTile, features_of_load, sddmm_blocks

KERNEL = "SddmmOctetKernel"


def launch_plan(problem: Problem, tile: OctetTile, shapes: OperandShapes = PLAIN) -> KernelCall:
    """The launch of values = X Y^T at column vectors, times weights and scale (`sddmm_call`).

    Inputs: row_offsets [ceil(m / V) + 1], column_indices [vectors], X [Bx, m, d], Y [By, k, d] with
    d = problem.n. Output: values [batch, vectors, V] in the operands' dtype, rounded once from
    float32.

    Args:
      problem: op "sddmm" on "cuda"; `nnz` counts numbers, `batch` is that of the result.
      tile: a tile with a kernel, else as `OctetTile.check` raises.
      shapes: those of the operands of `sddmm_call`.
    """
    tile.check(problem)
    d, length = problem.n, tile.vector_length
    operand, threads = TYPES[problem.dtype], 32 * WARPS
    aligned = d % features_of_load(tile, problem.dtype) == 0
    sizes = (length, tile.tile_n, tile.tile_k, tile.stages, threads, aligned)
    return sddmm_call(
        "sddmm_octet.cuh",
        KERNEL,
        [operand, *sizes],
        problem,
        problem.nnz // length,
        shapes,
        blocks=(sddmm_blocks(tile, problem), 1),
        threads=threads,
    )
