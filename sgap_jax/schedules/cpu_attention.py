"""How the fused attention kernels of the CPU lay out their work."""

from __future__ import annotations

import dataclasses

from sgap_jax.schedules.problem import Problem

_LANES = {"float64": 8}  # of the widest vector, else 16
_PACKED_USES = 8  # of a key by vectors, in all heads that share it
_TASKS = 8  # and not more: each piece has sums to be zeroed and added up, 10% of a short call
_MOST = 24 << 20  # bytes of sums and copies, which XLA's memory analysis does not know of


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """packed: copy K and V of each head to rows that follow each other, widened.
    pieces: of the rows, in the backward pass, each with sums of its own for dK and dV."""

    packed: bool
    pieces: int


def attention_plan(
    problem: Problem, key_heads: int, sum_heads: int, widths: tuple[int, int]
) -> AttentionPlan:
    """For `problem.batch` heads of all sequences, with `key_heads` heads of keys for them, and
    `sum_heads` of their gradients: as many, unless sequences share the keys.

    The kernels read whole vectors of the accumulator, so what is narrower or ends within a vector
    is copied; and rows of one head lie apart by the width of all heads, which crowds them into few
    sets of a cache.
    """
    keys, width = problem.shape[1], sum(widths)
    length = problem.vector_length or 1
    lanes = _LANES.get(problem.dtype, 16)
    uses = problem.nnz // length * problem.batch // max(keys * key_heads, 1)
    ragged = any(width % lanes for width in widths) or problem.dtype.endswith("16")
    packed = ragged or uses >= _PACKED_USES
    rows = (8 if problem.dtype == "float64" else 4) * width * keys  # bytes, of one head
    room = (_MOST - rows * key_heads * packed) // max(rows * sum_heads, 1)
    pieces = min(-(-_TASKS // max(sum_heads, 1)), room, problem.shape[0] // length)
    return AttentionPlan(packed, max(pieces, 1))
