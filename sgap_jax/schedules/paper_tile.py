"""What the tiles of vectorSparse that its figures compare have in common."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sgap_jax.schedules.grid import GRID_Y
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.vector_tile import VectorTile

LENGTHS = (2, 4, 8)  # of vectors: the 8 rows of wmma m8n32k16, or columns of mma.m8n8k4
COLUMNS = 64  # of a tile in spmm: the fewest that fill a line of 128 bytes
VECTORS = 32  # of a tile in sddmm
FEATURES = 64  # of a step in sddmm, likewise


@dataclasses.dataclass(frozen=True)
class PaperTile(VectorTile):
    """A warp computes V rows x 64 columns of a product, or 32 vectors of a sampled one.

    `choose_schedule` never picks one. Source: vectorSparse, sections 5 and 6.

    Attributes:
      tile_k: vectors of a step of spmm. sddmm takes 64 features a step.
    """

    tile_k: int = 16

    dtypes: ClassVar[tuple[str, ...]] = ()

    def check(self, problem: Problem) -> None:
        self.check_vectors(problem)
        if problem.dtype not in self.dtypes:
            raise NotImplementedError(
                f"{problem.op}: {self} runs on {' and '.join(self.dtypes)}, not on "
                f"{problem.dtype}; cast, or leave the schedule out"
            )
        if problem.permuted:
            raise NotImplementedError(
                f"{problem.op}: {self} has no kernel of A^T B: transposed, column vectors are row "
                "vectors, which share no gathered row; leave the schedule out"
            )
        if problem.op == "sddmm":
            self.check_default(problem, "tile_k", f"sddmm takes {FEATURES} features a step")

    def transposed(self) -> None:
        """The transpose of column vectors is row vectors, which share no gathered row."""
        return None

    def blocks(self, problem: Problem) -> tuple[int, int]:
        """Blocks, of a warp each: along the block rows, and along dense columns (spmm) or a block
        row's vectors (sddmm), of which it has at most as many as A has columns."""
        (m, k), vectors = problem.shape, problem.nnz // self.vector_length
        tiles = -(-problem.n // COLUMNS) if problem.op == "spmm" else -(-min(k, vectors) // VECTORS)
        return max(-(-m // self.vector_length), 1), min(max(tiles, 1), GRID_Y)

    def heading(self, problem: Problem) -> list[str]:
        """What it is, the grid, and what a warp owns."""
        along, across = self.blocks(problem)
        (m, k), spmm = problem.shape, problem.op == "spmm"
        size = f"n = {problem.n}" if spmm else f"d = {problem.n}"
        each = f"tiles of {COLUMNS} columns" if spmm else f"windows of {VECTORS} vectors of one"
        computed = f"{COLUMNS} columns" if spmm else f"{VECTORS} vectors"
        return [
            f"{self}: {problem.op} of [{m}, {k}] with {problem.nnz} nonzeros, {size}",
            f"grid:  {along} x {across} blocks: block rows x {each}"
            + (f", for each of {problem.batch} products" if problem.batch > 1 else ""),
            f"warp:  one a block: {self.vector_length} rows x {computed}",
        ]

    def product_loops(self) -> list[str]:
        return [
            f"parallel for i in block rows, for j0 in range(0, n, {COLUMNS}):  # j = j0..j0 + "
            f"{COLUMNS - 1}, below n",
            f"  acc[v, j] = 0  # rows = {self.vector_length} * i + v, below m",
            f"  for p in range(row_offsets[i], row_offsets[i + 1], {self.tile_k}):  "
            f"# {self.tile_k} vectors",
        ]

    def sampled_loops(self) -> list[str]:
        return [
            f"parallel for i in block rows, for windows q of {VECTORS} of its vectors:",
            f"  acc[v, q] = 0  # rows = {self.vector_length} * i + v, columns = column_indices[q]",
            f"  for l0 in range(0, d, {FEATURES}):  # l = l0..l0 + {FEATURES - 1}, below d",
        ]
