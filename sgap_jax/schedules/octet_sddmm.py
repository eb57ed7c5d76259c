"""Octet tiles as SDDMM: which have a kernel (cuda/sddmm_octet.cuh), and the loops in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import ScheduleError

if TYPE_CHECKING:
    from sgap_jax.schedules.octet import OctetTile

WARPS = 4  # of a block: windows that follow each other read the same rows of X
_WINDOW = 128  # vectors, at most
_HELD = 160  # registers of a lane for sums, what is under way and addresses: beyond them it spills


def check_sddmm(tile: OctetTile, problem: Problem) -> None:
    """Raises ScheduleError where no kernel obeys the tile; vectors and dtype are checked before."""
    if tile.row_warps != 1 or tile.swizzle:
        raise ScheduleError(
            f"sddmm: {tile}: row_warps and swizzle are of spmm; a warp has tile_n vectors here, "
            "whatever their block rows"
        )
    if tile.tile_n > _WINDOW:
        raise ScheduleError(
            f"sddmm: {tile}: tile_n is the vectors of a warp, up to {_WINDOW}; give a smaller one"
        )
    if (held := registers(tile, problem.dtype)) > _HELD:
        raise ScheduleError(
            f"sddmm: {tile} holds {held} registers of a lane, more than {_HELD}; give a smaller "
            "tile_n or tile_k, or fewer stages"
        )


def features_of_load(tile: OctetTile, dtype: str) -> int:
    """c: features that a lane loads at once: 16 bytes where four lanes' loads divide a step."""
    in_16_bytes = 4 if dtype == "float32" else 8
    return in_16_bytes if tile.tile_k % (4 * in_16_bytes) == 0 else in_16_bytes // 2


def registers(tile: OctetTile, dtype: str) -> int:
    """What a lane holds: sums, words of the steps under way, the address of each row."""
    words = tile.tile_k // (8 if dtype == "float32" else 16) * 2
    columns = max(tile.vector_length // 8, 1)
    return tile.tile_n // 4 * columns + (tile.stages * words + 2) * (columns + tile.tile_n // 8)


def blocks_of(tile: OctetTile, problem: Problem) -> int:
    """Blocks along the vectors: a function of their capacity only."""
    return max(-(-(problem.nnz // tile.vector_length) // (WARPS * tile.tile_n)), 1)


def explain_sddmm(tile: OctetTile, problem: Problem) -> str:
    """What a block, a warp and a lane own, who writes, and the equivalent loops."""
    (m, k), d, length = problem.shape, problem.n, tile.vector_length
    vectors, blocks = problem.nnz // length, blocks_of(tile, problem)
    c, stages = features_of_load(tile, problem.dtype), tile.stages
    depth = 8 if problem.dtype == "float32" else 16
    batch = f", for each of {problem.batch} products" if problem.batch > 1 else ""
    under_way = f", {stages} such steps" if stages > 1 else ""
    idle = f" ({8 - length} of 8 columns idle)" if length < 8 else ""
    return "\n".join(
        [
            f"{tile}: sddmm of [{m}, {k}] with {vectors} vectors of {length}, d = {d}",
            f"grid:  {blocks} blocks along the vectors{batch}",
            f"block: {32 * WARPS} threads, {WARPS} warps with neighbouring windows",
            f"warp:  a window of {tile.tile_n} vectors, block row after block row; an mma is 16 "
            f"vectors x {min(length, 8)} rows x {depth} features{idle}",
            f"lane:  {c} consecutive features of every {4 * c}, of {tile.tile_n // 8} rows of Y "
            f"and {max(length // 8, 1)} of X; loads of {tile.tile_k} features under way{under_way}",
            f"write: {min(length // 2, 4)} lanes for each vector, plain stores; all lanes, zeros "
            "in the padding",
            f"parallel for p0 in range(0, vectors, {tile.tile_n}):  # warps",
            f"  for b in block rows with vectors p in range(p0, p0 + {tile.tile_n}):",
            "    acc[p, v] = 0",
            f"    for l0 in range(0, d, {tile.tile_k}):  # l = l0..l0 + {tile.tile_k - 1}, below d",
            f"      acc[p, v] += X[{length} * b + v, l] * Y[column_indices[p], l]  # mma",
            "    values[p, v] = acc[p, v] * weights[p, v] * scale  # where given; zero for rows "
            "past the end",
        ]
    )
