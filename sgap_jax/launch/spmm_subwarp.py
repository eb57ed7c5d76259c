"""From a SubwarpTile to the launch of its SpMM kernel (cuda/spmm/spmm_subwarp.cuh)."""

from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.kernel_source import TYPES, grid_z, instantiation
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.tiles import BYTES, SubwarpTile

# Bytes in registers of a lane, which has 128 of them in all (cuda/common/types.cuh: kTileThreads).
_ROWS = 64  # rows of B under way
_VALUES = 128  # numbers of A that multiply them
_MOST_ROWS = 8  # of B, where they are short


def launch_plan(
    problem: Problem, tile: SubwarpTile, products: tuple[int, int] = (1, 1)
) -> KernelCall:
    """The launch of C = A B for operands as the kernel takes them.

    Inputs: values [Bv, vectors, V], row_offsets [ceil(m/V)+1], column_indices [vectors],
    permutation [vectors] (of any size where `problem.permuted` is false; it is not read), B
    [Bb, k, n]. Output: C [batch, m, n] in the operands' dtype; nothing needs to be zeroed. For
    A^T B: column_offsets [m+1], row_indices [vectors] of block rows; (m, k) are those of A^T.

    Args:
      problem: op "spmm" on "cuda"; `nnz` counts numbers, `batch` is that of the result.
      tile: as `SubwarpTile.check` lets pass, else as that raises.
      products: (Bv, Bb), each 1 or the batch.

    Operands start at multiples of 16 bytes, as all XLA buffers do.
    """
    tile.check(problem)
    (m, k), n, V = problem.shape, problem.n, tile.vector_length
    columns, rows = tile.lane_columns(problem), tile.lane_rows(problem)
    vector, operand = n % columns == 0, TYPES[problem.dtype]
    # One by one, even 16-bit numbers take a register each.
    wide = max(BYTES[problem.dtype], 4)
    size = BYTES[problem.dtype] if vector else wide
    fit = min(_ROWS // max(columns * size, 4), _MOST_ROWS)
    at_once = max(fit // V, 1) if problem.permuted else min(fit, _VALUES // (rows * wide))
    if tile.tile_k is not None:
        at_once = min(at_once, max(tile.tile_k // tile.split, 1))
    lanes = [columns, tile.split, tile.subwarp, at_once]
    constants: list = [operand, V]
    if problem.permuted:
        kernel, last = "SpmmSubwarpTransposedKernel", [vector, k % V == 0]
    else:
        kernel, last = "SpmmSubwarpKernel", [vector]
        constants.append(rows)
    constants += [*lanes, tile.block_size, *last]
    index, reads = "const int", f"const {operand}"
    scalars = (
        m,
        n,
        *((k,) if problem.permuted else ()),
        problem.nnz if products[0] > 1 else 0,
        k * n if products[1] > 1 else 0,
        tile.tiles_of_block(problem).bit_length() - 1,
        problem.batch,
    )
    pointers = [reads, index, index, index, reads, operand]
    return KernelCall(
        source=instantiation("spmm_subwarp.cuh", kernel, constants, pointers, len(scalars)),
        kernel=kernel,
        grid=(*tile.blocks(problem), grid_z(problem.batch)),
        block=(tile.block_size, 1, 1),
        scalars=scalars,
    )
