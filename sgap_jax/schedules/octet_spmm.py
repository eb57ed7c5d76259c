"""Octet tiles as SpMM: which have a kernel (cuda/spmm_octet.cuh), and the loops in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgap_jax.schedules.grid import GRID_Y
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import ScheduleError

if TYPE_CHECKING:
    from sgap_jax.schedules.octet import OctetTile

QUAD = 16  # vectors of a quad: four of each of 4 lanes
_PANEL = 64  # columns of a tile come in multiples of this one
_REGISTERS = 65536  # of a multiprocessor
_OF_LANE = 255
# A lane's registers for a quad by a panel under way, more for each 8 rows of a vector beyond the
# first, and for addresses and the like: as many as keep NVRTC 13 from spilling on sm_80 to sm_100.
_OF_QUAD = {"float16": (26, 2), "bfloat16": (26, 2), "float32": (54, 8)}
_OTHERS = 40
_SHARED_BYTES = 48 << 10


def check_spmm(tile: OctetTile, problem: Problem) -> None:
    """Raises ScheduleError where no kernel obeys the tile; vectors and dtype are checked before."""
    if problem.permuted:
        raise NotImplementedError(
            f"spmm: {tile} multiplies by A, whose vectors share the rows of B that they gather; "
            "those of A^T do not: leave the schedule out"
        )
    if tile.tile_n % _PANEL:
        raise ScheduleError(
            f"spmm: {tile}: tile_n must be a multiple of {_PANEL}, the columns that 8 lanes load "
            "in 16 bytes each"
        )
    most = min(_OF_LANE, _REGISTERS // (32 * tile.row_warps))
    if (held := registers(tile, problem.dtype)) > most:
        raise ScheduleError(
            f"spmm: {tile} takes some {held} registers of a lane, of which there are {most}; give "
            "a smaller tile_n or tile_k, fewer stages or row_warps"
        )
    if (shared := shared_bytes(tile)) > _SHARED_BYTES:
        raise ScheduleError(
            f"spmm: {tile} sums through {shared} bytes of shared memory, of which there are "
            f"{_SHARED_BYTES}; give fewer row_warps or a smaller tile_n"
        )
    if -(-problem.n // tile.tile_n) > GRID_Y:
        raise ScheduleError(
            f"spmm: {tile}: n = {problem.n} in tiles of {tile.tile_n} columns exceeds the "
            f"{GRID_Y} tiles of a launch; give a wider tile_n"
        )


def _sums(tile: OctetTile) -> int:
    """float32 sums of a lane: 8 rows by 16 columns are four, V < 8 rows as many as 8."""
    return tile.tile_n * max(tile.vector_length, 8) // 32


def registers(tile: OctetTile, dtype: str) -> int:
    """What a lane takes, more or less."""
    quads = tile.stages * (tile.tile_k // QUAD) * (tile.tile_n // _PANEL)
    of_first, of_others = _OF_QUAD[dtype]
    of_quad = of_first + of_others * (max(tile.vector_length // 8, 1) - 1)
    return _sums(tile) + quads * of_quad + _OTHERS


def blocks_of_multiprocessor(tile: OctetTile, dtype: str) -> int:
    """Blocks that the compiler is to leave registers for: 16 warps' where that takes no spills."""
    most = _REGISTERS // (32 * 16)
    return 16 // tile.row_warps if registers(tile, dtype) <= most else 1


def shared_bytes(tile: OctetTile) -> int:
    """Where half of the warps of a row leave their sums for the other half."""
    return tile.row_warps // 2 * 32 * 4 * _sums(tile)


def grid(tile: OctetTile, problem: Problem) -> tuple[int, int]:
    """Block rows, and tiles of columns."""
    rows = -(-problem.shape[0] // tile.vector_length)
    return max(rows, 1), max(-(-problem.n // tile.tile_n), 1)


def explain_spmm(tile: OctetTile, problem: Problem) -> str:
    """What a block, a warp and a lane own, who writes, and the equivalent loops."""
    (m, k), n, length = problem.shape, problem.n, tile.vector_length
    rows, tiles = grid(tile, problem)
    chunk, depth = (4, 8) if problem.dtype == "float32" else (8, 16)
    panels = tile.tile_n // (8 * chunk)
    batch = f", for each of {problem.batch} products" if problem.batch > 1 else ""
    order = ", longest first" if tile.swizzle else ""
    idle = f" ({8 - length} of 8 columns idle)" if length < 8 else ""
    shared = tile.row_warps > 1
    warps = f"{tile.row_warps} warps, each every {tile.row_warps}-th step," if shared else "a warp"
    ahead = f", {tile.stages} such steps under way" if tile.stages > 1 else ""
    writer = "the first warp, after a sum over the warps" if shared else "every warp"
    step = tile.row_warps * tile.tile_k
    steps = f"range(row_offsets[b] + {tile.tile_k} * w, row_offsets[b + 1], {step})"
    return "\n".join(
        [
            f"{tile}: spmm of [{m}, {k}] with {problem.nnz // length} vectors of {length}, n = {n}",
            f"grid:  {rows} x {tiles} blocks: block rows{order} x tiles of {tile.tile_n} columns"
            f"{batch}",
            f"block: {32 * tile.row_warps} threads: {warps} for the block row",
            f"warp:  steps of {tile.tile_k} vectors; an mma is 16 columns x {min(length, 8)} rows "
            f"x {depth} vectors{idle}",
            f"lane:  {chunk} columns of each of {panels} panels, 2 of them an mma, of the rows of "
            f"B of {tile.tile_k // 4} vectors{ahead}",
            f"write: {writer}; a lane {chunk} columns at once of {max(length // 4, 1)} rows of C",
            f"parallel for j0 in range(0, {n}, {tile.tile_n}):  # blocks; j = j0..j0 + "
            f"{tile.tile_n - 1}, below n",
            f"  parallel for b in range({rows}):  # blocks",
            f"    parallel for w in range({tile.row_warps}):  # warps",
            "      acc[w, v, j] = 0",
            f"      for p0 in {steps}:",
            f"        for p in range(p0, min(p0 + {tile.tile_k}, row_offsets[b + 1])):  # mma",
            "          acc[w, v, j] += values[p, v] * B[column_indices[p], j]",
            f"    C[{length} * b + v, j] = sum over w of acc[w, v, j]",
        ]
    )
