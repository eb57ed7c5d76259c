"""From an octet tile to the launch of its SpMM kernel (cuda/spmm/spmm_octet.cuh)."""

from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.kernel_source import TYPES, grid_z, instantiation
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.tiles import QUAD, OctetTile, blocks_of_multiprocessor, spmm_grid


def launch_plan(
    problem: Problem, tile: OctetTile, products: tuple[int, int] = (1, 1)
) -> KernelCall:
    """The launch of C = A B for A of column vectors.

    Inputs: values [Bv, vectors, V], row_offsets [ceil(m / V) + 1], column_indices [vectors], order
    [ceil(m / V)] of the block rows (of any size where the tile does not swizzle; it is not read),
    B [Bb, k, n]. Output: C [batch, m, n].

    Args:
      problem: op "spmm" on "cuda" with format CVS(V); `nnz` counts numbers, V for each vector, and
        `batch` is that of the result.
      tile: a tile with a kernel, else as `OctetTile.check` raises.
      products: (Bv, Bb), each 1 or the batch.

    Operands start at multiples of 16 bytes, as all XLA buffers do.
    """
    tile.check(problem)
    (m, k), n, kernel = problem.shape, problem.n, "SpmmOctetKernel"
    operand, chunk = TYPES[problem.dtype], 4 if problem.dtype == "float32" else 8
    panels, quads = tile.tile_n // (8 * chunk), tile.tile_k // QUAD
    constants: list = [operand, tile.vector_length, panels, quads, tile.stages, tile.row_warps]
    constants += [blocks_of_multiprocessor(tile, problem.dtype), n % chunk == 0, tile.swizzle]
    index, reads = "const int", f"const {operand}"
    pointers = [reads, index, index, index, reads, operand]
    scalars = (
        m,
        n,
        problem.nnz if products[0] > 1 else 0,
        k * n if products[1] > 1 else 0,
        problem.batch,
    )
    return KernelCall(
        source=instantiation("spmm_octet.cuh", kernel, constants, pointers, len(scalars)),
        kernel=kernel,
        grid=(*spmm_grid(tile, problem), grid_z(problem.batch)),
        block=(32 * tile.row_warps, 1, 1),
        scalars=scalars,
    )
