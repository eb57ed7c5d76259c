"""How the fused attention kernels of the CPU lay out their work."""

from __future__ import annotations

import dataclasses
import math

from sgap_jax.schedules.problem import Problem

_LANES = {"float64": 8}  # of the widest vector, else 16
_COPIED_USES = 8  # of a key by vectors, in all heads that share it
_PAGE = 4096  # bytes: rows so far apart meet in the same sets of a first-level cache
_LEAST_SHARE = 8  # of which a head's rows reach at least an eighth
_TASKS = 8  # at once, and not more: rows are loaded once more for each further piece


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """packed: copy K and V of some heads at a time to rows that follow each other, widened, and
    add dK and dV up likewise. pieces: of the rows and of the keys, in the backward pass."""

    packed: bool
    pieces: int


def attention_plan(
    problem: Problem, key_heads: int, key_batch: int, batch: int, widths: tuple[int, int]
) -> AttentionPlan:
    """For `problem.batch` heads in `batch` sequences, each with `key_heads` heads of keys;
    key_batch is 1 where the sequences share them.

    The kernels read whole vectors of the accumulator, so what is narrower or ends within a vector
    is copied. Else K and V are read, and dK and dV added up, where they are, but for heads that
    crowd into few sets of a cache: with 16 heads of 64 numbers the forward pass took 1.3 times and
    the backward pass 1.9 times as long as with copies, with 8 as long (measured on Zen 5).
    """
    rows, keys = problem.shape
    length, wide = problem.vector_length or 1, 8 if problem.dtype == "float64" else 4
    lanes = _LANES.get(problem.dtype, 16)
    if problem.symbolic:  # as for one sequence of few entries
        uses, batch = 0, 1
    else:
        uses = problem.nnz // length * problem.batch // max(keys * key_heads * key_batch, 1)
    whole = not any(width % lanes for width in widths) and not problem.dtype.endswith("16")
    crowded = any(
        _LEAST_SHARE * width * wide < math.gcd(key_heads * width * wide, _PAGE) for width in widths
    )
    pieces = min(-(-_TASKS // max(batch * key_heads, 1)), rows // length, keys)
    return AttentionPlan(not whole or (crowded and uses >= _COPIED_USES), max(pieces, 1))
