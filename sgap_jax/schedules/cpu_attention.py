"""How the fused attention kernels of the CPU lay out their work."""

from __future__ import annotations

import dataclasses
import math
import os
from numbers import Integral

from sgap_jax.schedules.problem import Problem

_LANES = {"float64": 8}  # of the widest vector, else 16
_COPIED_USES = 8  # of a key by vectors, in all heads that share it
_PAGE = 4096  # bytes: rows so far apart meet in the same sets of a first-level cache
_TASKS = 8  # at most, that the pieces of few heads are made for
_PIECE_COST = 1 / 16  # of the time: each further piece loads the rows once more


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """packed: copy K and V of some heads at a time to rows that follow each other, widened;
    backward_packed: in the backward pass, where dK and dV are added up likewise; pieces: of the
    rows and of the keys, there."""

    packed: bool
    backward_packed: bool
    pieces: int


def attention_plan(
    problem: Problem, key_heads: int, key_batch: int, batch: int, widths: tuple[int, int]
) -> AttentionPlan:
    """For `problem.batch` heads in `batch` sequences, each with `key_heads` heads of keys;
    key_batch is 1 where the sequences share them.

    The kernels read whole vectors of the accumulator, so what is narrower or ends within a vector
    is copied. Else K and V are read, and dK and dV added up, where they are, but for rows of a head
    that crowd into a part of a cache's sets: where they lie a multiple of a page apart and a key is
    used 8 times, or, in the backward pass, half a page and 16 times. With 16 heads of 64 numbers or
    8 of 128 and 13 to 26 uses copies then take 0.8 to 1.0 of the time forward and 0.5 to 0.7
    backward; half a page apart (8 of 64, 16 of 32) and 26 uses 1.0 and 0.7; a quarter apart (4, 12
    and 20 of 64) 1.0 and 1.0. Rows of half the distance (2 of 512) have nothing to gain, nor keys
    that are used less (in float32 on Zen 5, one thread).
    """
    rows, keys = problem.shape
    length, wide = problem.vector_length or 1, 8 if problem.dtype == "float64" else 4
    lanes = _LANES.get(problem.dtype, 16)
    if problem.symbolic:  # as for one sequence of few entries
        uses, batch = 0, 1
    else:
        uses = problem.nnz // length * problem.batch // max(keys * key_heads * key_batch, 1)
    whole = not any(width % lanes for width in widths) and not problem.dtype.endswith("16")
    apart = [math.gcd(key_heads * width * wide, _PAGE) for width in widths]
    apart = [x if 2 * width * wide < x else 0 for x, width in zip(apart, widths, strict=True)]
    packed = max(apart) == _PAGE and uses >= _COPIED_USES
    backward = 2 * max(apart) >= _PAGE and max(apart) * uses >= _PAGE * _COPIED_USES
    known = isinstance(rows, Integral) and isinstance(keys, Integral)
    pieces = _pieces(max(batch * key_heads, 1), min(rows // length, keys) if known else 1)
    return AttentionPlan(not whole or packed, not whole or backward, pieces)


def _pieces(heads: int, most: int) -> int:
    """Pieces in which the tasks of `heads` heads fill the machine's processors (not the threads of
    a process, so that its number of threads does not decide how sums round).

    With 4 heads on 2 processors one piece takes 0.88 to 0.99 of the time of two, with one head two
    take 0.63 of the time of one and 0.83 of that of eight, with 3 heads two take 0.86 of the time
    of one (lengths 2048 and 4096, 90% and 95%, float32 on Zen 5).
    """
    threads = min(os.cpu_count() or 1, _TASKS)

    def time(pieces: int) -> float:  # of a phase's rounds
        return -(-heads * pieces // threads) / pieces * (1 + _PIECE_COST * (pieces - 1))

    return min(range(1, max(min(most, _TASKS), 1) + 1), key=time)
