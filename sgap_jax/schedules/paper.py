"""Tiles of column vectors exactly as vectorSparse published them, to reproduce its figures: octets
of lanes, and its baseline with wmma. `choose_schedule` never picks one.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import GRID_Y, ScheduleError
from sgap_jax.schedules.tiles import VectorTile

LENGTHS = (2, 4, 8)  # V: up to the 8 rows of wmma m8n32k16, or the 8 columns of mma.m8n8k4
COLUMNS = 64  # columns of a tile in spmm: the fewest that fill a line of 128 bytes
VECTORS = 32  # vectors of a tile in sddmm
FEATURES = 64  # features of a step in sddmm: they fill a line of 128 bytes


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
        if problem.dtype == "bfloat16":
            self._check_tensor_cores(problem)
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
        """The grid (x, y) of blocks of one warp: along the block rows, and along the dense columns
        (spmm) or along the vectors of a block row (sddmm), of which there are at most k."""
        (m, k), vectors = problem.shape, problem.nnz // self.vector_length
        tiles = -(-problem.n // COLUMNS) if problem.op == "spmm" else -(-min(k, vectors) // VECTORS)
        return max(-(-m // self.vector_length), 1), min(max(tiles, 1), GRID_Y)

    def heading(self, problem: Problem) -> list[str]:
        """The first lines of an explanation: tile and problem, the grid, what a warp owns."""
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


@dataclasses.dataclass(frozen=True)
class WarpTile(PaperTile):
    """The classic tiling on tensor cores: a warp computes V rows x 64 columns by wmma m8n32k16.

    Vectors are the left operand and gathered rows the right one, both through shared memory; if
    V < 8, some rows of the wmma tile are zeros. float16 and bfloat16, sums in float32, the same
    bits at each call. It is a baseline, to reproduce the paper's figures: `choose_schedule` never
    picks it.

    Attributes:
      vector_length: V of the format, 2, 4 or 8.
      tile_k: vectors of a step of spmm, 16, 32, 48 or 64. sddmm takes 64 features a step.

    Raises:
      ScheduleError: a field is out of its range.

    Source: vectorSparse, sections 5.2 and 6.2 (TCU-based 1-D warp tiling).
    """

    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")

    def __post_init__(self) -> None:
        self.check_field("vector_length", LENGTHS)
        self.check_field("tile_k", range(16, 65, 16))

    def explain(self, problem: Problem) -> str:
        self.check(problem)
        if problem.op == "sddmm":
            return "\n".join(
                [
                    *self.heading(problem),
                    "lane:  loads 16 bytes of 2 rows of X and 8 of Y; one vector at the end",
                    "write: every lane, its vector, a plain store; zeros in the padding",
                    *self.sampled_loops(),
                    "    XS, YS = X[rows, l], Y[columns, l]  # in shared memory, zeros where none",
                    "    for s in range(0, 64, 16):          # wmma m8n32k16",
                    "      acc[v, q] += XS[v, s : s + 16] @ YS[q, s : s + 16].T",
                    "  values[q, v] = acc[v, q] * weights[q, v] * scale  # where given",
                ]
            )
        return "\n".join(
            [
                *self.heading(problem),
                f"lane:  loads 8 columns of {self.tile_k // 4} rows of B; stores 8 columns of 2 "
                "rows of C",
                "write: every lane, plain stores",
                *self.product_loops(),
                "    AS, BS = values[p], B[column_indices[p], j]  # in shared memory, zeros where "
                "none",
                f"    for s in range(0, {self.tile_k}, 16):  # wmma m8n32k16, for both halves of j",
                "      acc[v, j] += AS[s : s + 16, v].T @ BS[s : s + 16, j]",
                "  C[rows, j] = acc[v, j]",
            ]
        )


_PARTIALS = ("registers", "shuffle")


@dataclasses.dataclass(frozen=True)
class PaperOctetTile(PaperTile):
    """The octet tiling exactly as in the paper, on mma.m8n8k4: a warp computes V rows x 64 columns.

    The operands are exchanged: gathered rows are the left one, loaded without a change of layout,
    16 bytes for each lane and a line of 128 bytes for eight lanes; vectors are the right one, which
    is partly idle if V < 8. float16, sums in float32, the same bits at each call. The instruction
    is Volta's: for sm_80 and later it compiles to shuffles and multiply-adds, without tensor cores.
    It is a baseline, to reproduce the paper's figures: `choose_schedule` never picks it, and
    `OctetTile` is the same idea for the mma of sm_80 and later.

    Attributes:
      vector_length: V of the format, 2, 4 or 8.
      tile_k: vectors of a tile of spmm, a multiple of 4 from 4 to 64. sddmm takes 64 features a
        step.
      partials: how sddmm handles the half of the products whose sums end up with low and high
        groups of lanes inverted. "registers": separate sums, exchanged at the end, "mma (reg)" in
        the paper's Figure 19. "shuffle": the lanes exchange operands before, "mma (shfl)". The
        paper's third way, "mma (arch)", needs a tensor core that was never built.

    Raises:
      ScheduleError: a field is out of its range.

    Source: vectorSparse, sections 5.3, 5.4, 6.3 and 6.4 (TCU-based 1-D octet tiling).
    """

    tile_k: int = 32
    partials: str = "registers"

    dtypes: ClassVar[tuple[str, ...]] = ("float16",)

    def __post_init__(self) -> None:
        self.check_field("vector_length", LENGTHS)
        self.check_field("tile_k", range(4, 65, 4))
        if self.partials == "arch":
            raise ScheduleError(
                "PaperOctetTile: partials='arch' needs the switch within a tensor core that "
                "vectorSparse, section 6.3, proposes and nobody built; there are "
                "'registers' and 'shuffle'"
            )
        self.check_field("partials", _PARTIALS)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.op != "sddmm":
            self.check_default(problem, "partials", "only sddmm has inverted products")

    def explain(self, problem: Problem) -> str:
        self.check(problem)
        heading = self.heading(problem)
        loops = self._sampled() if problem.op == "sddmm" else self._product()
        return "\n".join([*heading, *loops])

    def _product(self) -> list[str]:
        return [
            "lane:  columns 8g..8g + 7 of every 4th row of B from t on (g = lane / 4, t = lane % "
            "4); at the end of 2 rows of C",
            "write: every lane, plain stores",
            *self.product_loops(),
            "    AS, columns = values[p], column_indices[p]  # in shared memory, zeros where none",
            "    for s in range(0, len(AS), 4):              # 2 mma.m8n8k4; all loads first",
            "      acc[v, j].T += B[columns[s : s + 4], j].T @ AS[s : s + 4, v]",
            "  C[rows, j] = acc[v, j]",
        ]

    def _sampled(self) -> list[str]:
        remedy = {
            "registers": "acc[1] of l in 32..63, exchanged between lanes l and l + 16 at the end",
            "shuffle": "lanes l and l + 16 exchange their features 32..63 of X and Y before",
        }[self.partials]
        return [
            "lane:  features 8g..8g + 7 of row t, and 8g'..8g' + 7 of row t + 4, g' = (g + 4) % 8 "
            "(g = lane / 4, t = lane % 4); one vector at the end",
            "write: every lane, its vector, a plain store; zeros in the padding",
            *self.sampled_loops(),
            "    for s in range(0, 32, 8):  # 4 mma.m8n8k4, of 16 features in each octet",
            "      acc[v, s : s + 8].T += Y[columns[s : s + 8], l] @ X[rows, l].T",
            f"      # {remedy}",
            "  values[q, v] = (sum over 4 octets of acc[v, q]) * weights[q, v]"
            " * scale  # where given",
        ]
