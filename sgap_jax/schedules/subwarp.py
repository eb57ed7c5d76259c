"""`SubwarpTile`, the schedule for column vectors on CUDA cores (1-D subwarp tiling)."""

from __future__ import annotations

import dataclasses

from sgap_jax.schedules.explain import notes
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import GRID_X, GRID_Y, ScheduleError
from sgap_jax.schedules.tiles import VectorTile

LENGTHS = (1, 2, 4, 8, 16, 32)  # V of the vectors that kernels exist for
BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
_LOAD = 16  # the most bytes that one instruction loads
_SUBWARP_WINDOW = 16  # vectors of a subwarp in sddmm, by default
_POWERS = tuple(1 << i for i in range(11))
_ALLOWED = {
    "vector_length": LENGTHS,
    "tile_n": (None, *_POWERS),
    "tile_k": (None, *_POWERS),
    "subwarp": _POWERS[:6],
    "split": _POWERS[:6],
    "block_size": (32, 64, 128, 256, 512),  # up to kTileThreads of cuda/common/types.cuh
}


@dataclasses.dataclass(frozen=True)
class SubwarpTile(VectorTile):
    """A subwarp, neighbouring lanes of a warp, computes a tile of a product with column vectors.

    In spmm a tile is the V rows of a block row (for A^T B one row) times `tile_n` columns: each
    lane gathers its columns of a row of B in one load and keeps sums of V rows, or of some of them
    if all do not fit in registers. In sddmm the lanes share the features of `tile_n` vectors and
    reduce their partial sums by shuffles. Every dtype; the same bits at each call.

    Attributes:
      vector_length: V of the format, 1, 2, 4, 8, 16 or 32.
      tile_n: width of the tile of a subwarp, a power of two: dense columns (spmm; None: one aligned
        load of at most 16 bytes for each lane) or vectors (sddmm; None: 16).
      tile_k: length of the reduction in one step, a power of two: the most vectors, fewer if
        registers require it (spmm; None: as many as registers allow), or features (sddmm; None: one
        aligned load of at most 16 bytes for each lane).
      subwarp: lanes of a tile, 1, 2, 4, 8, 16 or 32.
      split: lanes that share the columns of a tile, each taking every split-th vector, for narrow
        B; their sums are reduced by shuffles. A power of two up to `subwarp`; spmm only.
      block_size: threads of a block, a power of two from 32 to 512.

    Raises:
      ScheduleError: a field is out of its range.

    Source: vectorSparse, sections 5.1 and 6.1 (extended there from Sputnik); `split` is not from
    the paper.
    """

    tile_n: int | None = None
    tile_k: int | None = None
    subwarp: int = 8
    split: int = 1
    block_size: int = 128

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            self.check_field(name, allowed)
        if self.split > self.subwarp:
            raise ScheduleError(
                f"SubwarpTile: split={self.split} lanes share a column, more than the "
                f"{self.subwarp} of a subwarp"
            )

    def lane_columns(self, problem: Problem) -> int:
        """How many dense columns (spmm) or features (sddmm) a lane loads at once."""
        lanes = self.subwarp // (self.split if problem.op == "spmm" else 1)
        tile = self.tile_n if problem.op == "spmm" else self.tile_k
        if tile is None:
            return widest_load(problem)
        if not lanes <= tile <= lanes * _LOAD // BYTES[problem.dtype]:
            name = "tile_n" if problem.op == "spmm" else "tile_k"
            raise ScheduleError(
                f"{problem.op}: {self}: {name} is what {lanes} lanes load, each up to {_LOAD} "
                f"bytes of {problem.dtype}: {lanes} to {lanes * _LOAD // BYTES[problem.dtype]}"
            )
        return tile // lanes

    def tile_columns(self, problem: Problem) -> int:
        """Dense columns of a tile (spmm)."""
        return self.lane_columns(problem) * self.subwarp // self.split

    def lane_rows(self, problem: Problem) -> int:
        """For how many rows of a vector a lane has sums: up to 8 rows, and 32 registers; in sddmm
        up to 4 rows, because it has the sums of 4 vectors."""
        if problem.permuted:
            return 1
        if problem.op == "sddmm":
            return min(self.vector_length, 4)
        sums = self.lane_columns(problem) * (2 if problem.dtype == "float64" else 1)
        return min(self.vector_length, 8, 32 // sums)

    def parts(self, problem: Problem) -> int:
        """How many subwarps share the rows of a vector."""
        return 1 if problem.permuted else self.vector_length // self.lane_rows(problem)

    def tiles_of_block(self, problem: Problem) -> int:
        """How many tiles lie side by side along the dense columns: enough to fill a warp, so that
        all its lanes have equally many vectors."""
        across = -(-max(problem.n, 1) // self.tile_columns(problem))
        fit = max(32 // (self.subwarp * self.parts(problem)), 1)
        return min(1 << (across - 1).bit_length(), fit)

    def windows(self) -> int:
        """How many vectors a subwarp has (sddmm)."""
        return _SUBWARP_WINDOW if self.tile_n is None else self.tile_n

    def blocks(self, problem: Problem) -> tuple[int, int]:
        """The grid (x, y): blocks along the sparse operand, and along the dense columns."""
        if problem.op == "sddmm":
            tiles, across = -(-problem.nnz // self.vector_length // self.windows()), 1
        else:
            width = self.tiles_of_block(problem)
            across = max(-(-problem.n // (width * self.tile_columns(problem))), 1)
            rows = 1 if problem.permuted else self.vector_length
            tiles = -(-problem.shape[0] // rows) * width
        lanes = tiles * self.parts(problem) * self.subwarp
        return max(-(-lanes // self.block_size), 1), across

    def check(self, problem: Problem) -> None:
        self.check_vectors(problem)
        if problem.op == "sddmm" and self.split != 1:
            raise ScheduleError(
                f"sddmm: {self}: all lanes of a subwarp share the features; leave split out"
            )
        self.lane_columns(problem)
        along, across = self.blocks(problem)
        if along > GRID_X or across > GRID_Y:
            raise ScheduleError(
                f"{problem.op}: {self}: {along} x {across} blocks exceed the {GRID_X} x {GRID_Y} "
                "of a launch; give a larger block_size or tile_n"
            )

    def explain(self, problem: Problem) -> str:
        return "\n".join([_explain(self, problem), *notes(self, problem)])


def widest_load(problem: Problem) -> int:
    """How many dense columns (features) one load can take: up to 16 bytes, aligned in every row."""
    size = BYTES[problem.dtype]
    return next(c for c in (8, 4, 2, 1) if c * size <= _LOAD and problem.n % c == 0)


def _explain(tile: SubwarpTile, problem: Problem) -> str:
    """What a block, a subwarp and a lane own, which lanes write, and the equivalent loops."""
    (m, k), V, columns = problem.shape, tile.vector_length, tile.lane_columns(problem)
    sddmm = problem.op == "sddmm"
    along, across = tile.blocks(problem)
    subwarps, parts = tile.block_size // tile.subwarp, tile.parts(problem)
    rows = tile.lane_rows(problem)
    width = "d" if sddmm else "n"
    of = "A^T B of" if problem.permuted else f"{problem.op} of"
    head = [
        f"{tile}: {of} [{m}, {k}] with {problem.nnz // V} vectors, {width} = {problem.n}",
        f"grid:  {along} x {across} blocks: sparse operand x dense columns"
        + (f", for each of {problem.batch} products" if problem.batch > 1 else ""),
    ]
    shared = f"; {parts} subwarps share the {V} rows of a vector" if parts > 1 else ""
    if sddmm:
        return "\n".join(
            [
                *head,
                f"block: {tile.block_size} threads, {subwarps} subwarps of {tile.windows()} "
                f"vectors each{shared}",
                f"lane:  {columns} features of every {tile.subwarp * columns}; sums of {rows} rows",
                "write: every lane, its share of the reduced sums; zeros in the padding",
                *_sampled(tile, columns),
            ]
        )
    wide = tile.tile_columns(problem)
    owner = "a row" if problem.permuted else "a block row"
    vectors = "all vectors" if tile.split == 1 else f"every {tile.split}-th vector"
    return "\n".join(
        [
            *head,
            f"block: {tile.block_size} threads, {subwarps} subwarps: each {owner} x {wide} "
            f"columns, {tile.tiles_of_block(problem)} side by side{shared}",
            f"lane:  {vectors} of its row; sums of {rows} x {columns} in registers",
            "write: every lane, plain stores"
            + (f", after {tile.split} lanes reduce" if tile.split > 1 else ""),
            *_product(tile, wide, columns, problem),
        ]
    )


def _product(tile: SubwarpTile, wide: int, columns: int, problem: Problem) -> list[str]:
    V, n, split = tile.vector_length, problem.n, tile.split
    step = "" if split == 1 else f", {split}"
    start = "" if split == 1 else " + lane"
    inner = [f"parallel for j0 in range(0, {n}, {wide}):  # tiles; j: {columns} columns of a lane"]
    if problem.permuted:
        inner += [
            "  parallel for i in range(m):  # subwarps",
            "    acc[j] = 0",
            f"    for q in range(column_offsets[i]{start}, column_offsets[i + 1]{step}):",
            f"      for v in range({V}):",
            f"        acc[j] += values[permutation[q], v] * B[{V} * row_indices[q] + v, j]",
            "    C[i, j] = acc[j]" + (f", summed over {split} lanes" if split > 1 else ""),
        ]
        return inner
    return inner + [
        "  parallel for b in block rows:  # subwarps",
        f"    acc[0:{V}, j] = 0",
        f"    for p in range(row_offsets[b]{start}, row_offsets[b + 1]{step}):",
        f"      for v in range({V}):",
        "        acc[v, j] += values[p, v] * B[column_indices[p], j]",
        f"    C[{V} * b : {V} * (b + 1), j] = acc[:, j]"
        + (f", summed over {split} lanes" if split > 1 else ""),
    ]


def _sampled(tile: SubwarpTile, columns: int) -> list[str]:
    V, window, step = tile.vector_length, tile.windows(), tile.subwarp * columns
    return [
        f"parallel for p0 in range(0, vectors, {window}):  # subwarps",
        f"  for p in range(p0, min(p0 + {window}, vectors)):  # of block row b",
        f"    parallel for lane in range({tile.subwarp}):",
        f"      acc[lane, 0:{V}] = 0",
        f"      for l0 in range({columns} * lane, d, {step}):  # {columns} of l, below d",
        f"        for v in range({V}):",
        f"          acc[lane, v] += X[{V} * b + v, l] * Y[column_indices[p], l]",
        f"    values[p, :] = (sum over {tile.subwarp} lanes of acc[lane, :]) * weights[p, :]"
        " * scale  # where given",
    ]
