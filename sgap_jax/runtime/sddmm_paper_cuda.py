"""From vectorSparse's own tiles to the launch of their SDDMM kernels (cuda/sddmm_warp.cuh,
cuda/sddmm_paper_octet.cuh)."""

from sgap_jax.runtime.kernel_call import KernelCall
from sgap_jax.runtime.kernel_source import TYPES, grid_z, instantiation
from sgap_jax.schedules.paper_octet import PaperOctetTile
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.warp import WarpTile, tile_blocks


def launch_plan(
    problem: Problem, tile: WarpTile | PaperOctetTile, products: tuple[int, int] = (1, 1)
) -> KernelCall:
    """The launch of values = X Y^T at the vectors, for operands as the kernel takes them.

    Inputs: row_offsets [ceil(m/V)+1], column_indices [vectors], X [Bx, m, d], Y [By, k, d] with
    d = problem.n. Output: values [batch, vectors, V] in the operands' dtype; nothing needs to be
    zeroed.

    Args:
      problem: op "sddmm" on "cuda", of format CVS(V); `nnz` counts numbers, `batch` is that of the
        result.
      tile: as its `check` allows.
      products: (Bx, By), each 1 or the batch.

    Operands start at multiples of 16 bytes, as all XLA buffers do.
    """
    tile.check(problem)
    (m, k), d = problem.shape, problem.n
    constants: list[str | int] = [tile.vector_length, d % 8 == 0]
    if isinstance(tile, WarpTile):
        header, kernel = "sddmm_warp.cuh", "SddmmWarpKernel"
        constants.insert(0, TYPES[problem.dtype])
    else:
        header, kernel = "sddmm_paper_octet.cuh", "SddmmPaperOctetKernel"
        constants.insert(1, tile.partials == "shuffle")
    reads = f"const {TYPES[problem.dtype]}"
    pointers = ["const int", "const int", reads, reads, TYPES[problem.dtype]]
    scalars = (
        m,
        problem.nnz,
        d,
        m * d if products[0] > 1 else 0,
        k * d if products[1] > 1 else 0,
        problem.batch,
    )
    return KernelCall(
        source=instantiation(header, kernel, constants, pointers, len(scalars)),
        kernel=kernel,
        grid=(*tile_blocks(problem, tile.vector_length), grid_z(problem.batch)),
        block=(32, 1, 1),
        scalars=scalars,
    )
