"""From a SubwarpTile to the launch of its SDDMM kernel (cuda/sddmm_subwarp.cuh)."""

from sgap_jax.runtime.kernel_call import KernelCall
from sgap_jax.runtime.kernel_source import TYPES, grid_z, instantiation
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.subwarp import SubwarpTile

_AT_ONCE = 4  # vectors of which a lane has the sums


def launch_plan(
    problem: Problem, tile: SubwarpTile, products: tuple[int, int] = (1, 1)
) -> KernelCall:
    """The launch of values = X Y^T at the vectors, for operands as the kernel takes them.

    Inputs: row_offsets [ceil(m/V)+1], column_indices [vectors], X [Bx, m, d], Y [By, k, d] with
    d = problem.n. Output: values [batch, vectors, V] in the operands' dtype; nothing needs to be
    zeroed.

    Args:
      problem: op "sddmm" on "cuda"; `nnz` counts numbers, `batch` is that of the result.
      tile: as `SubwarpTile.check` lets pass, else as that raises.
      products: (Bx, By), each 1 or the batch.

    Operands start at multiples of 16 bytes, as all XLA buffers do.
    """
    tile.check(problem)
    (m, k), d, V = problem.shape, problem.n, tile.vector_length
    columns, rows = tile.lane_columns(problem), tile.lane_rows(problem)
    at_once = min(_AT_ONCE, tile.windows())
    operand = TYPES[problem.dtype]
    constants: list = [operand, V, rows, tile.windows(), columns, tile.subwarp, at_once]
    constants += [tile.block_size, d % columns == 0]
    scalars = (
        m,
        problem.nnz // V,
        d,
        m * d if products[0] > 1 else 0,
        k * d if products[1] > 1 else 0,
        problem.batch,
    )
    pointers = ["const int", "const int", f"const {operand}", f"const {operand}", operand]
    kernel = "SddmmSubwarpKernel"
    return KernelCall(
        source=instantiation("sddmm_subwarp.cuh", kernel, constants, pointers, len(scalars)),
        kernel=kernel,
        grid=(*tile.blocks(problem), grid_z(problem.batch)),
        block=(tile.block_size, 1, 1),
        scalars=scalars,
    )
