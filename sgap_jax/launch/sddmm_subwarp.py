"""From a SubwarpTile to the launch of its SDDMM kernel (cuda/sddmm/sddmm_subwarp.cuh)."""

from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.kernel_source import TYPES
from sgap_jax.launch.sddmm_operands import PLAIN, OperandShapes, sddmm_call
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.tiles import SubwarpTile

_AT_ONCE = 4  # vectors of which a lane has the sums


def launch_plan(problem: Problem, tile: SubwarpTile, shapes: OperandShapes = PLAIN) -> KernelCall:
    """The launch of values = X Y^T at the vectors, times weights and scale (`sddmm_call`).

    Inputs: row_offsets [ceil(m/V)+1], column_indices [vectors], X [Bx, m, d], Y [By, k, d] with
    d = problem.n. Output: values [batch, vectors, V] in the operands' dtype.

    Args:
      problem: op "sddmm" on "cuda"; `nnz` counts numbers, `batch` is that of the result.
      tile: as `SubwarpTile.check` lets pass, else as that raises.
      shapes: those of the operands of `sddmm_call`.
    """
    tile.check(problem)
    d, V = problem.n, tile.vector_length
    columns, rows = tile.lane_columns(problem), tile.lane_rows(problem)
    at_once = min(_AT_ONCE, tile.windows())
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
