"""The default schedules on CUDA, for `choose_schedule`."""

import dataclasses
import os
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from sgap_jax.formats.levels import CSR
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.attention import Unfused, default_tile
from sgap_jax.schedules.point import LANES_UNDER_WAY, WARPS_UNDER_WAY, chunk_of
from sgap_jax.schedules.problem import TILED, Problem
from sgap_jax.schedules.schedule import GRID_Y, KERNEL_DTYPES, Schedule
from sgap_jax.schedules.subwarp import BYTES, LENGTHS, SubwarpTile, widest_load
from sgap_jax.schedules.tiles import OctetTile, octet_chunk

_MOST_COLUMNS = 1 << 20  # dense columns in tiles of 32: a launch has 65535 tiles
_MOST_OF_VECTORS = 1 << 19  # dense columns in tiles of 16
_LINE = 128  # bytes that a gather reads at once
# XLA's flags by which programs ask for the same bits at each call.
_SAME_BITS = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")


def on_cuda(problem: Problem, same_bits: bool) -> Iterator[Schedule]:
    """The schedules of a problem on CUDA, the best first, each of another family of kernels; with
    `same_bits` only those that give the same bits at each call."""
    for schedule in _every(problem):
        if not same_bits or has_same_bits(schedule, problem):
            yield schedule


def has_same_bits(schedule: Schedule, problem: Problem) -> bool:
    """Whether results have the same bits at each call; only in spmm can several groups add to one
    element."""
    return problem.op != "spmm" or getattr(schedule, "deterministic", True)


def _every(problem: Problem) -> Iterator[Schedule]:
    if problem.op == "attention":
        if (tile := default_tile(problem)) is not None:
            yield tile
            if tile.chunk is not None:
                yield dataclasses.replace(tile, chunk=None)
            if tile.octet:
                yield dataclasses.replace(tile, octet=False, chunk=None)
        yield Unfused()
        return
    yield from _tiles(problem)
    yield from _balanced(problem)
    point = _point(problem)
    yield point
    col = int(point.col)
    if problem.op == "sddmm":
        yield AtomicParallelism(row=1, col=col, group=point.group)
    elif point.group > 1:
        yield _rows(col, 1)
    elif problem.n <= _MOST_COLUMNS:
        side_by_side = 1 if problem.op in TILED else problem.vector_length or 1
        yield _rows(col, next((r for r in (8, 4, 2) if r * side_by_side <= 32), 1))


def _tiles(problem: Problem) -> Iterator[Schedule]:
    """The tiles for column vectors on CUDA, the default first; none if no kernel takes them: then
    the operation runs on their entries, with a point.

    Not measured here yet.

    - spmm of 16-bit values: tensor cores for V of 4, 8, 16 and 32, 1.34x to 4.51x as fast as CUDA
      cores in the paper (vectorSparse, section 7.2.1, a V100).
    - sddmm of 16-bit values: the same, 1.27x to 3.03x there (section 7.3.1).
    - All else, including products with the transpose of vectors and GPUs before sm_80: CUDA cores.
      (Those with the transpose of blocks are products with its own vectors: primitives/spmm.py.)
    """
    V = problem.vector_length
    if problem.op not in ("spmm", "sddmm") or problem.dtype not in KERNEL_DTYPES or V is None:
        return
    half = problem.dtype in ("float16", "bfloat16") and problem.has_tensor_cores
    if half and V in (4, 8, 16, 32) and not problem.permuted:
        octets = _sampled_octets(problem, V) if problem.op == "sddmm" else _octets(problem, V)
        if octets is not None:
            yield octets
            if octets.chunk is not None:
                yield dataclasses.replace(octets, chunk=None)
    if V in LENGTHS and problem.n <= _MOST_OF_VECTORS:
        yield _subwarp(problem)


def _octets(problem: Problem, length: int) -> OctetTile | None:
    """The tile for spmm on tensor cores: 64 columns, as in vectorSparse, section 5.4. None if there
    are more tiles than a grid can have. Not from the paper:

    - Two steps of 16 vectors are under way. One step is 2 KB of gathered rows for each warp, and a
      multiprocessor needs some 30 KB under way to use its share of the second-level cache's
      bandwidth.
    - Four warps share a block row if it has two steps for each of them, and if there are too few
      block rows to fill a device with 16 warps on each of 128 multiprocessors.
    - Long block rows of a skewed pattern are cut into pieces (`octet_chunk`).
    """
    tile = OctetTile(length, stages=2)
    rows, tiles = -(-problem.shape[0] // length), -(-problem.n // tile.tile_n)
    if tiles > GRID_Y:
        return None
    few = rows * tiles * problem.batch < WARPS_UNDER_WAY
    long = problem.nnz // length >= 4 * 2 * tile.tile_k * rows
    tile = dataclasses.replace(tile, row_warps=4) if few and long else tile
    return dataclasses.replace(tile, chunk=octet_chunk(tile, problem))


def _sampled_octets(problem: Problem, length: int) -> OctetTile:
    """The tile for sddmm on tensor cores: windows and steps of vectorSparse, section 6.4, as far as
    row lengths, alignment and registers allow.

    - 32 vectors for each warp (the paper's TileN); 16 if block rows have fewer than 32 on average,
      because a window takes its block rows one after the other (not from the paper).
    - 64 features for each step (the paper's TileK), a line of 128 bytes, in loads of 16 bytes; 48
      if only loads of 8 bytes are aligned, 32 if none is. 32, 16 and 16 for V = 32, whose sums
      take more registers.
    """
    d = problem.n
    step, half = (64, 32) if d % 8 == 0 else (48, 16) if d % 4 == 0 else (32, 16)
    short = problem.nnz < 32 * problem.shape[0]
    return OctetTile(length, tile_n=16 if short else 32, tile_k=half if length == 32 else step)


def _subwarp(problem: Problem) -> SubwarpTile:
    """The tile on CUDA cores, with the same bits at each call. Not measured here yet.

    - A lane loads up to 16 bytes of a row of B at once, as alignment allows, and a subwarp a line
      of 128 bytes (vectorSparse, sections 5.1 and 6.1: 8 lanes of LDG.128, its guideline V).
    - If B has too few columns for all lanes, the remaining ones share the vectors of a row, at most
      as many lanes as a row has vectors on average (not from the paper; as `_point` does). In sddmm
      fewer features have fewer lanes.
    """
    V, n, load = problem.vector_length, problem.n, widest_load(problem)
    assert V is not None
    lanes = min(_LINE // (load * BYTES[problem.dtype]), 32)
    across = min(1 << (max(-(-n // load), 1) - 1).bit_length(), lanes)
    if problem.op == "sddmm":
        return SubwarpTile(V, subwarp=across)
    rows = problem.shape[0] if problem.permuted else -(-problem.shape[0] // V)
    vectors = max(problem.nnz // V // max(rows, 1), 1)
    split = min(lanes // across, 1 << vectors.bit_length() - 1)
    return SubwarpTile(V, subwarp=across * split, split=split)


def _balanced(problem: Problem) -> Iterator[AtomicParallelism]:
    """The points for spmm and gspmm with skewed rows on CUDA, the best first; none where a point
    that walks whole rows is expected to be as fast.

    Where rows are walked whole, the program takes as long as the lanes of its longest row need. So
    the work is divided otherwise if these lanes take twice the steps that all of the work would
    take, divided evenly among the lanes that an H200 runs at once. Not measured here yet.

    - n > 32: the sequential sums of `_point`, with long rows cut into pieces (`chunk_of`). Rows
      that fit in a piece, most of a skewed pattern, are walked as before and stored without an
      atomic addition.
    - n <= 32: segment reductions, whose groups have equal shares of the nonzeros: {<1 nnz, c col>,
      32}, EB+PR of DA-SpMM in Sgap, section 3.2, for n <= 4, else the same with 8 lanes, as
      `_point` has. Several groups of a warp have a row each where rows are split, and wait for the
      longest of these; that equal shares pay for skewed rows: the load-balance study of TACO's
      scheduling paper (section 8.4), and Sgap (section 3.2, after DA-SpMM). Several groups add to
      one row, in any order: the bits of a sum may differ from call to call. Where XLA_FLAGS ask for
      determinism (xla_gpu_deterministic_ops or xla_gpu_exclude_nondeterministic_ops) rows are cut
      into pieces here too; `schedule=` chooses for one call.
    - gspmm: sequential over nonzeros, 32 to a lane, 8 for n <= 4, with a second launch for the rows
      of several lanes and no atomic addition. Predicted for an R-MAT graph of 131,000 vertices and
      a million edges on an H100 (benchmarks/gpu/model.py): 33.0 us for n = 16 and 18.3 for n = 4,
      where rows that are walked whole take 102 and 47, and segment reductions over 8 and 32 lanes
      72 and 18.
    """
    rows, n = problem.rows, problem.n
    if problem.op not in TILED or rows is None or problem.format != CSR:
        return
    if not 0 < n <= _MOST_COLUMNS:
        return
    point = _point(problem)
    steps = problem.nnz * problem.batch * n / int(point.col) / LANES_UNDER_WAY
    if rows.longest / point.group < 2 * steps:
        return
    if problem.op == "gspmm":
        yield AtomicParallelism(nnz=8 if n <= 4 else 32, col=point.col)
        return
    if n <= 32:
        yield AtomicParallelism(nnz=1, col=point.col, group=32 if n <= 4 else 8)
    if (chunk := chunk_of(steps, point.group, rows.longest)) is not None:
        yield dataclasses.replace(point, worker_dim_r=1, chunk=chunk)
    if n > 32:
        yield AtomicParallelism(nnz=32, col=point.col)


def same_bits_asked() -> bool:
    """Whether XLA_FLAGS ask for programs that have the same bits at each call."""
    flags = (flag.lstrip("-").partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    return any(
        name in _SAME_BITS and value.lower() not in ("false", "0") for name, _, value in flags
    )


def _point(problem: Problem) -> AtomicParallelism:
    """The default point on CUDA. It has the same bits at each call, because no two groups add to
    one output.

    Not measured here yet. The rules are from the papers, restricted to what is known before the
    index arrays are read; what is known of skewed rows is for `_balanced`.

    - A lane takes 4, 2 or 1 columns, the most that divide n: vector loads (dgSPARSE's coarsenSz;
      Sgap, section 7.2).
    - r = g lanes share a row, 4, 8 or 32. 4 and 8 are the best of Sgap's Tables 1 and 5, 32 is what
      dgSPARSE had (section 7.2). At most as many lanes as a row has entries on average, as the rest
      would idle (not from the papers).
    - n <= 4: a parallel reduction (dgSPARSE's rule), one row at a time: <8, 256, 8, 1> is the best
      static choice for N = 4 (Table 5, RTX 3090 and V100).
    - spmm, n <= 32, a multiple of 4: all columns of a row in loads of 16 bytes, and 4 lanes that
      share a row, 2 for rows of fewer than 32 entries. For float32 and n = 32 a request then
      touches 2.0 and 1.7 lines where the next rule has 5.2 and 3.7, and the product is predicted
      (not measured) to take 0.97 and 0.37 of its time on 2048 x 1024 weights at 90% sparsity and on
      10,000 rows of 10 entries; for n = 8, 0.87 and 0.49. With one lane a row the weights take 1.8
      and 5.6 times as long as with that rule.
    - other n <= 32: <8, 256, 8, 1/2>, a tile of 8 columns and two rows in turn, the best for N = 16
      (Table 5, RTX 3090). dgSPARSE sums sequentially from N = 5 on, but lacks the tuned reduction,
      which is twice as fast as dgSPARSE's own there (Table 4). The RTX 2080's <4, 256, 8, 1/2> lets
      two groups add to one output; here 4 lanes are used for short rows.
    - n > 32: sequential sums (dgSPARSE's rule, there with rows cached in shared memory). The lanes
      of a row lie side by side along the dense columns and read the same entries at once. Beyond a
      million columns a block has its widest tile, because a grid has at most 65535 tiles.
    - sddmm: as dgSPARSE's kernels (csrsddmm_ebalance.cuh): windows of 4 nonzeros, with one search
      for a row in each; 32 features a step, fewer lanes if there are fewer features.
    - The operations on rows: as n <= 4. For column vectors, the V rows lie side by side in a warp,
      in groups of at most 32/V lanes, so that a warp reads consecutive values (not from the
      papers).
    """
    n, row_length = problem.n, problem.nnz / max(problem.shape[0], 1)
    col = 4 if n % 4 == 0 else 2 if n % 2 == 0 else 1
    if problem.op == "sddmm":
        return AtomicParallelism(nnz=4, col=col, group=min(_lanes(n / col), 32 // col))
    if problem.op not in TILED:
        most = max(32 // (problem.vector_length or 1), 1)
        return _rows(1, min(_lanes(row_length), 1 << most.bit_length() - 1))
    if n <= 4:
        return _rows(col, _lanes(row_length))
    if n <= 32 and col == 4 and problem.op == "spmm":
        return _rows(col, 4 if row_length >= 32 else 2)
    if n <= 32:
        group = 8 if row_length >= 8 else 4
        return _rows(col, group, tile_size=8, worker_dim_r=Fraction(1, 2))
    if n <= _MOST_COLUMNS:
        return _rows(col, 1)
    return _rows(4, 1, block_size=1024, tile_size=4096)


def _lanes(work: float) -> int:
    """The most lanes, 1, 4, 8 or 32, that do not exceed `work`."""
    return max(lanes for lanes in (1, 4, 8, 32) if lanes <= max(work, 1))


def _rows(col: int, group: int, **tunables: Any) -> AtomicParallelism:
    row = 1 if group == 1 else Fraction(1, group)
    return AtomicParallelism(row=row, col=col, group=group, **tunables)
