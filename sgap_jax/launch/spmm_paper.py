"""From vectorSparse's own tiles to the launch of their SpMM kernels (cuda/paper/spmm_warp.cuh,
cuda/paper/spmm_paper_octet.cuh)."""

from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.kernel_source import TYPES, grid_z, instantiation
from sgap_jax.schedules.paper import PaperTile, WarpTile
from sgap_jax.schedules.problem import Problem


def launch_plan(
    problem: Problem, tile: PaperTile, products: tuple[int, int] = (1, 1)
) -> KernelCall:
    """The launch of C = A B for operands as the kernel takes them.

    Inputs: values [Bv, vectors, V], row_offsets [ceil(m/V)+1], column_indices [vectors],
    B [Bb, k, n]. Output: C [batch, m, n] in the operands' dtype; nothing needs to be zeroed.

    Args:
      problem: op "spmm" on "cuda", of format CVS(V); `nnz` counts numbers, `batch` is that of the
        result.
      tile: as its `check` allows.
      products: (Bv, Bb), each 1 or the batch.

    Operands start at multiples of 16 bytes, as all XLA buffers do.
    """
    tile.check(problem)
    (m, k), n = problem.shape, problem.n
    constants: list[str | int] = [tile.vector_length, tile.tile_k, n % 8 == 0]
    if isinstance(tile, WarpTile):
        header, kernel = "spmm_warp.cuh", "SpmmWarpKernel"
        constants.insert(0, TYPES[problem.dtype])
    else:
        header, kernel = "spmm_paper_octet.cuh", "SpmmPaperOctetKernel"
    reads = f"const {TYPES[problem.dtype]}"
    pointers = [reads, "const int", "const int", reads, TYPES[problem.dtype]]
    scalars = (
        m,
        n,
        problem.nnz if products[0] > 1 else 0,
        k * n if products[1] > 1 else 0,
        problem.batch,
    )
    return KernelCall(
        source=instantiation(header, kernel, constants, pointers, len(scalars)),
        kernel=kernel,
        grid=(*tile.blocks(problem), grid_z(problem.batch)),
        block=(32, 1, 1),
        scalars=scalars,
    )
