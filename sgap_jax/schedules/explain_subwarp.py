"""A tile of column vectors on CUDA cores, in words and loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgap_jax.schedules.problem import Problem

if TYPE_CHECKING:
    from sgap_jax.schedules.subwarp import SubwarpTile


def explain_subwarp(tile: SubwarpTile, problem: Problem) -> str:
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
