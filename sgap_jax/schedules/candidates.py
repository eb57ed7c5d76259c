"""The schedules worth timing for a problem: what `tune` tries when the caller names none."""

import dataclasses
import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.attention_tile import BLOCK, AttentionTile
from sgap_jax.schedules.cpu import CpuTile, scatter
from sgap_jax.schedules.octet import OctetTile
from sgap_jax.schedules.problem import TILED, Problem
from sgap_jax.schedules.schedule import Schedule, ScheduleError
from sgap_jax.schedules.select import choose_schedule
from sgap_jax.schedules.subwarp import LENGTHS, SubwarpTile
from sgap_jax.schedules.unfused import Unfused


def candidate_schedules(problem: Problem, *, deterministic: bool = True) -> tuple[Schedule, ...]:
    """Legal schedules of a problem, the default first; some tens at most.

    On the CPU: chunks of 1024 to 32768 nonzeros; for spmm also tiles of 16 to 128 columns, packed
    and not; each program once, as where one chunk has everything. On CUDA: for entries the points
    that Sgap found best somewhere (its Tables 1 and 5: 4, 8 and 32 lanes to a row or a window, by
    themselves or in tiles of 8 columns, and sequential sums) with blocks of 128 and 256 threads;
    for column vectors octet tiles and subwarps; for attention the lanes and shares of
    `AttentionTile`, and `Unfused`.

    Args:
      problem: what is asked.
      deterministic: only schedules that give the same bits at each call.
    """
    kinds = {"cpu": _on_cpu, "cuda": _on_cuda}
    found = [choose_schedule(problem), *kinds.get(problem.platform, lambda _: ())(problem)]
    programs: dict[Any, Schedule] = {}
    for schedule in found:
        programs.setdefault(_program(schedule, problem), schedule)
    return tuple(
        schedule
        for schedule in programs.values()
        if _legal(schedule, problem) and (_same_bits(schedule, problem) or not deterministic)
    )


def _legal(schedule: Schedule, problem: Problem) -> bool:
    try:
        schedule.check(problem)
    except (NotImplementedError, ScheduleError):
        return False
    return True


def _same_bits(schedule: Schedule, problem: Problem) -> bool:
    """Only sums of a product are added up by several groups."""
    return problem.op != "spmm" or getattr(schedule, "deterministic", True)


def _program(schedule: Schedule, problem: Problem) -> Any:
    """The same for schedules that are one program for a problem."""
    if not isinstance(schedule, CpuTile) or problem.symbolic:
        return schedule
    length = problem.vector_length or 1
    if problem.op == "spmm" and problem.vector_length and all(found := scatter(problem, schedule)):
        return found
    # A chunk has entries and rows: one of all of them is the only task. Vectors may go beyond.
    whole = problem.nnz + max(problem.shape) + length
    return dataclasses.replace(schedule, nonzeros=min(schedule.nonzeros, whole))


def _on_cpu(problem: Problem) -> Iterator[Schedule]:
    if problem.op == "attention":
        yield Unfused()
        return
    for nonzeros in (1 << i for i in range(10, 16)):
        yield CpuTile(nonzeros=nonzeros)
    if problem.op == "spmm":
        columns = [c for c in (16, 32, 64, 128) if c < problem.n]
        for tile, packed, nonzeros in itertools.product(columns, (False, True), (8192, 32768)):
            yield CpuTile(columns=tile, nonzeros=nonzeros, packed=packed)


def _on_cuda(problem: Problem) -> Iterator[Schedule]:
    if problem.op == "attention":
        yield Unfused()
        for lanes, share, octet in itertools.product((8, 16, 32), (1, 2, 4, 8), (False, True)):
            if lanes * share <= BLOCK:
                yield AttentionTile(lanes, share, octet)
    elif problem.vector_length in LENGTHS and problem.op in ("spmm", "sddmm"):
        yield from _tiles(problem, problem.vector_length)
    else:
        yield from _points(problem)


def _points(problem: Problem) -> Iterator[Schedule]:
    widest = next(col for col in (4, 2, 1) if problem.n % col == 0)
    for col, block_size in itertools.product(sorted({widest, 1}, reverse=True), (256, 128)):
        of_lane: dict[str, Any] = dict(col=col, block_size=block_size)
        yield AtomicParallelism(row=1, **of_lane)
        for group in (4, 8, 32):
            share: dict[str, Any] = dict(row=Fraction(1, group), group=group, **of_lane)
            yield AtomicParallelism(**share)
            yield AtomicParallelism(nnz=1, group=group, **of_lane)
            yield AtomicParallelism(nnz=4, group=group, **of_lane)
            if problem.op in TILED and problem.n > 8 and 8 // col * group <= block_size:
                yield AtomicParallelism(tile_size=8, worker_dim_r=Fraction(1, 2), **share)


def _tiles(problem: Problem, length: int) -> Iterator[Schedule]:
    if length in (2, 4, 8, 16, 32):
        wide, steps = ((64, 128), (16, 32)) if problem.op == "spmm" else ((16, 32, 64), (32, 64))
        for tile_n, tile_k, stages in itertools.product(wide, steps, (1, 2, 3)):
            yield OctetTile(length, tile_n=tile_n, tile_k=tile_k, stages=stages)
        if problem.op == "spmm":
            for warps, swizzle in itertools.product((1, 2, 4, 8), (False, True)):
                yield OctetTile(length, stages=2, row_warps=warps, swizzle=swizzle)
    for subwarp, split in itertools.product((4, 8, 16, 32), (1, 2, 4, 8)):
        if split <= subwarp and (split == 1 or problem.op == "spmm"):
            yield SubwarpTile(length, subwarp=subwarp, split=split)
