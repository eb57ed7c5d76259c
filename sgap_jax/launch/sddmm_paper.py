"""From vectorSparse's own tiles to the launch of their SDDMM kernels (cuda/paper/sddmm_warp.cuh,
cuda/paper/sddmm_paper_octet.cuh)."""

from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.kernel_source import TYPES
from sgap_jax.launch.sddmm_operands import PLAIN, OperandShapes, sddmm_call
from sgap_jax.schedules.paper import PaperOctetTile, WarpTile
from sgap_jax.schedules.problem import Problem


def launch_plan(
    problem: Problem, tile: WarpTile | PaperOctetTile, shapes: OperandShapes = PLAIN
) -> KernelCall:
    """The launch of values = X Y^T at the vectors, times weights and scale (`sddmm_call`).

    Inputs: row_offsets [ceil(m/V)+1], column_indices [vectors], X [Bx, m, d], Y [By, k, d] with
    d = problem.n. Output: values [batch, vectors, V] in the operands' dtype.

    Args:
      problem: op "sddmm" on "cuda", of format CVS(V); `nnz` counts numbers, `batch` is that of the
        result.
      tile: as its `check` allows.
      shapes: those of the operands of `sddmm_call`.
    """
    tile.check(problem)
    constants: list[str | int] = [tile.vector_length, problem.n % 8 == 0]
    if isinstance(tile, WarpTile):
        header, kernel = "sddmm_warp.cuh", "SddmmWarpKernel"
        constants.insert(0, TYPES[problem.dtype])
    else:
        header, kernel = "sddmm_paper_octet.cuh", "SddmmPaperOctetKernel"
        constants.insert(1, tile.partials == "shuffle")
    return sddmm_call(
        header,
        kernel,
        constants,
        problem,
        problem.nnz,
        shapes,
        blocks=tile.blocks(problem),
        threads=32,
    )
