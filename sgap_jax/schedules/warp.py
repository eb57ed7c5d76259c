"""Tiles of column vectors as vectorSparse computes them with wmma: its baseline on tensor cores."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from sgap_jax.schedules.grid import GRID_Y
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule
from sgap_jax.schedules.vector_tile import check_default, check_field, check_vectors, tile_text

if TYPE_CHECKING:
    from sgap_jax.schedules.paper_octet import PaperOctetTile

LENGTHS = (2, 4, 8)  # of vectors: the 8 rows of wmma m8n32k16, or columns of mma.m8n8k4
COLUMNS = 64  # of a tile in spmm: the fewest that fill a line of 128 bytes
VECTORS = 32  # of a tile in sddmm
FEATURES = 64  # of a step in sddmm, likewise


@dataclasses.dataclass(frozen=True)
class WarpTile(Schedule):
    """The classic tiling on tensor cores: a warp computes V rows x 64 columns by wmma m8n32k16.

    Vectors are the left operand and gathered rows the right one, both through shared memory; with
    V < 8 rows of the tile are zeros. float16 and bfloat16, sums in float32, the same bits at each
    call. A row to compare with, to repeat the paper's figures: `choose_schedule` never picks it.

    Attributes:
      vector_length: V of the format, 2, 4 or 8.
      tile_k: vectors of a step of spmm, 16, 32, 48 or 64. sddmm takes 64 features a step.

    Raises:
      ScheduleError: a field is out of its range.

    Source: vectorSparse, sections 5.2 and 6.2 (TCU-based 1-D warp tiling).
    """

    vector_length: int = 8
    tile_k: int = 16

    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")

    def __post_init__(self) -> None:
        check_field(self, "vector_length", LENGTHS)
        check_field(self, "tile_k", range(16, 65, 16))

    @property
    def deterministic(self) -> bool:
        """Whether a product has the same bits at each call."""
        return True

    def check(self, problem: Problem) -> None:
        check_paper(self, problem)
        if problem.op == "sddmm":
            check_default(self, problem, "tile_k", f"sddmm takes {FEATURES} features a step")

    def transposed(self) -> None:
        """The transpose of column vectors is row vectors, which share no gathered row."""
        return None

    def explain(self, problem: Problem) -> str:
        self.check(problem)
        if problem.op == "sddmm":
            return "\n".join(
                [
                    *tile_heading(self, problem),
                    "lane:  loads 16 bytes of 2 rows of X and 8 of Y; one vector at the end",
                    "write: every lane, its vector, a plain store; zeros in the padding",
                    *sampled_loops(self.vector_length),
                    "    XS, YS = X[rows, l], Y[columns, l]  # in shared memory, zeros where none",
                    "    for s in range(0, 64, 16):          # wmma m8n32k16",
                    "      acc[v, q] += XS[v, s : s + 16] @ YS[q, s : s + 16].T",
                    "  values[q, v] = acc[v, q] * weights[q, v] * scale  # where given",
                ]
            )
        return "\n".join(
            [
                *tile_heading(self, problem),
                f"lane:  loads 8 columns of {self.tile_k // 4} rows of B; stores 8 columns of 2 "
                "rows of C",
                "write: every lane, plain stores",
                *product_loops(self.vector_length, self.tile_k),
                "    AS, BS = values[p], B[column_indices[p], j]  # in shared memory, zeros where "
                "none",
                f"    for s in range(0, {self.tile_k}, 16):  # wmma m8n32k16, for both halves of j",
                "      acc[v, j] += AS[s : s + 16, v].T @ BS[s : s + 16, j]",
                "  C[rows, j] = acc[v, j]",
            ]
        )

    def __str__(self) -> str:
        return tile_text(self)


def check_paper(tile: WarpTile | PaperOctetTile, problem: Problem) -> None:
    """Raises where no kernel of a tile of the paper takes the problem."""
    check_vectors(tile, problem)
    if problem.dtype not in tile.dtypes:
        raise NotImplementedError(
            f"{problem.op}: {tile} runs on {' and '.join(tile.dtypes)}, not on {problem.dtype}; "
            "cast, or leave the schedule out"
        )
    if problem.permuted:
        raise NotImplementedError(
            f"{problem.op}: {tile} has no kernel of A^T B: transposed, column vectors are row "
            "vectors, which share no gathered row; leave the schedule out"
        )


def tile_blocks(problem: Problem, vector_length: int) -> tuple[int, int]:
    """Blocks, of a warp each: along the block rows, and along dense columns (spmm) or a block row's
    vectors (sddmm), of which it has at most as many as A has columns."""
    (m, k), vectors = problem.shape, problem.nnz // vector_length
    tiles = -(-problem.n // COLUMNS) if problem.op == "spmm" else -(-min(k, vectors) // VECTORS)
    return max(-(-m // vector_length), 1), min(max(tiles, 1), GRID_Y)


def tile_heading(tile: WarpTile | PaperOctetTile, problem: Problem) -> list[str]:
    """What it is, the grid, and what a warp owns."""
    along, across = tile_blocks(problem, tile.vector_length)
    (m, k), spmm = problem.shape, problem.op == "spmm"
    size = f"n = {problem.n}" if spmm else f"d = {problem.n}"
    each = f"tiles of {COLUMNS} columns" if spmm else f"windows of {VECTORS} vectors of one"
    computed = f"{COLUMNS} columns" if spmm else f"{VECTORS} vectors"
    return [
        f"{tile}: {problem.op} of [{m}, {k}] with {problem.nnz} nonzeros, {size}",
        f"grid:  {along} x {across} blocks: block rows x {each}"
        + (f", for each of {problem.batch} products" if problem.batch > 1 else ""),
        f"warp:  one a block: {tile.vector_length} rows x {computed}",
    ]


def product_loops(vector_length: int, step: int) -> list[str]:
    return [
        f"parallel for i in block rows, for j0 in range(0, n, {COLUMNS}):  # j = j0..j0 + "
        f"{COLUMNS - 1}, below n",
        f"  acc[v, j] = 0  # rows = {vector_length} * i + v, below m",
        f"  for p in range(row_offsets[i], row_offsets[i + 1], {step}):  # {step} vectors",
    ]


def sampled_loops(vector_length: int) -> list[str]:
    return [
        f"parallel for i in block rows, for windows q of {VECTORS} of its vectors:",
        f"  acc[v, q] = 0  # rows = {vector_length} * i + v, columns = column_indices[q]",
        f"  for l0 in range(0, d, {FEATURES}):  # l = l0..l0 + {FEATURES - 1}, below d",
    ]
