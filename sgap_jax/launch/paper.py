"""Launch plans of SpMM and SDDMM with the tiles of vectorSparse exactly as published
(cuda/paper/)."""

from sgap_jax.launch.kernel_call import TYPES, KernelCall
from sgap_jax.launch.sddmm_operands import PLAIN, OperandShapes, sddmm_call
from sgap_jax.schedules.paper import PaperOctetTile, PaperTile, WarpTile
from sgap_jax.schedules.problem import Problem


def spmm_plan(problem: Problem, tile: PaperTile, batches: tuple[int, int] = (1, 1)) -> KernelCall:
    """The launch of C = A B.

    Inputs: values [Bv, vectors, V], row_offsets [ceil(m/V)+1], column_indices [vectors],
    B [Bb, k, n]. Output: C [batch, m, n] in the operands' dtype; nothing needs to be zeroed.

    Args:
      problem: op "spmm" on "cuda", of format CVS(V); `nnz` counts values, V for each vector, and
        `batch` is that of the result.
      tile: one that its `check` accepts.
      batches: (Bv, Bb), each 1 or the batch.
    """
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
        problem.nnz if batches[0] > 1 else 0,
        k * n if batches[1] > 1 else 0,
        problem.batch,
        problem.nnz // tile.vector_length,
    )
    return KernelCall.of(
        header,
        kernel,
        constants,
        pointers,
        scalars,
        blocks=tile.blocks(problem),
        threads=32,
        batch=problem.batch,
    )


def sddmm_plan(
    problem: Problem, tile: WarpTile | PaperOctetTile, shapes: OperandShapes = PLAIN
) -> KernelCall:
    """The launch of values = X Y^T at the stored vectors, times weights and scale (`sddmm_call`).

    Inputs: row_offsets [ceil(m/V)+1], column_indices [vectors], X [Bx, m, d], Y [By, k, d] with
    d = problem.n. Output: values [batch, vectors, V] in the operands' dtype.

    Args:
      problem: op "sddmm" on "cuda", of format CVS(V); `nnz` counts values, V for each vector, and
        `batch` is that of the result.
      tile: one that its `check` accepts.
      shapes: those of the operands of `sddmm_call`.
    """
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
