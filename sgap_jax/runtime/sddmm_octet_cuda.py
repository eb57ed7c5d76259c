"""From an octet tile to the launch of its SDDMM kernel (cuda/sddmm_octet.cuh)."""

from sgap_jax.runtime.kernel_call import KernelCall
from sgap_jax.runtime.kernel_source import TYPES, grid_z, instantiation
from sgap_jax.schedules.octet import OctetTile
from sgap_jax.schedules.octet_sddmm import WARPS, blocks_of, features_of_load
from sgap_jax.schedules.problem import Problem

KERNEL = "SddmmOctetKernel"


def launch_plan(
    problem: Problem, tile: OctetTile, products: tuple[int, int] = (1, 1)
) -> KernelCall:
    """The launch of values = X Y^T at column vectors, for operands as the kernel takes them.

    Inputs: row_offsets [ceil(m / V) + 1], column_indices [vectors], X [Bx, m, d], Y [By, k, d] with
    d = problem.n. Output: values [batch, vectors, V] in the operands' dtype, rounded once from
    float32; nothing needs to be zeroed.

    Args:
      problem: op "sddmm" on "cuda"; `nnz` counts numbers, `batch` is that of the result.
      tile: a tile with a kernel, else as `OctetTile.check` raises.
      products: (Bx, By), each 1 or the batch.

    Operands start at multiples of 16 bytes, as all XLA buffers do.
    """
    tile.check(problem)
    (m, k), d, length = problem.shape, problem.n, tile.vector_length
    operand, threads = TYPES[problem.dtype], 32 * WARPS
    aligned = d % features_of_load(tile, problem.dtype) == 0
    sizes = (length, tile.tile_n, tile.tile_k, tile.stages, threads, aligned)
    pointers = ["const int", "const int", f"const {operand}", f"const {operand}", operand]
    scalars = (
        m,
        problem.nnz // length,
        d,
        m * d if products[0] > 1 else 0,
        k * d if products[1] > 1 else 0,
        problem.batch,
    )
    return KernelCall(
        source=instantiation("sddmm_octet.cuh", KERNEL, [operand, *sizes], pointers, len(scalars)),
        kernel=KERNEL,
        grid=(blocks_of(tile, problem), 1, grid_z(problem.batch)),
        block=(threads, 1, 1),
        scalars=scalars,
    )
