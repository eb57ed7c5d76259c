"""From the schedule of fused attention to the launches of its kernels (cuda/attention.cuh)."""

from __future__ import annotations

import dataclasses
import struct

from sgap_jax.runtime.kernel_call import KernelCall
from sgap_jax.runtime.kernel_source import TYPES, grid_z, instantiation
from sgap_jax.schedules.attention_tile import BLOCK, AttentionTile
from sgap_jax.schedules.grid import GRID_Y
from sgap_jax.schedules.problem import Problem

_COLUMNS = 4


@dataclasses.dataclass(frozen=True)
class AttentionShapes:
    """What the launches need to know beside the problem.

    Attributes:
      heads, key_heads: of q and out, and of k and v; the second divides the first.
      value_depth: features of v.
      batch: sequences of the results.
      many: which of "q", "k", "v", "bias", "sinks", "lengths", "dout", "delta", "lse" differ from
        sequence to sequence (have a leading axis of `batch`).
      bias: none, "shared" by the heads, or of each ("heads").
      sinks, lengths: whether there are any.
      is_causal: entries (i, j) with j > i are masked.
    """

    heads: int
    key_heads: int
    value_depth: int
    batch: int = 1
    many: frozenset[str] = frozenset()
    bias: str | None = None
    sinks: bool = False
    lengths: bool = False
    is_causal: bool = False

    @property
    def flags(self) -> int:
        """As enum AttentionFlag of cuda/attention.cuh counts."""
        bits = [
            self.is_causal,
            self.bias is not None,
            self.bias == "heads",
            self.sinks,
            self.lengths,
        ]
        names = ("q", "k", "v", "bias", "sinks", "lengths", "dout", "delta", "lse")
        return sum(1 << i for i, bit in enumerate([*bits, *(n in self.many for n in names)]) if bit)


def forward_plan(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes, scale: float
) -> KernelCall:
    """The launch of out and lse.

    Inputs: q [B, m, heads, d], k [B, keys, key_heads, d], v [B, keys, key_heads, dv], bias [B,
    heads, nnz] and sinks [B, heads] of accumulators, lengths [B], row_offsets, column_indices, with
    leading axes of 1 where `shapes` says that they are shared, and any array for what is absent.
    Outputs: out [B, m, heads, dv], lse [B, m, heads] of accumulators.

    Args:
      problem: op "attention" on "cuda", with n the features of a head of q and k, and nnz counting
        every row of a vector.
      schedule: as `AttentionTile.check` takes it.
      scale: of the scores; an argument of the kernel.
    """
    operand, wide = _types(problem)
    pointers = [f"const {x}" for x in (operand, operand, operand, wide, wide, "int", "int", "int")]
    if schedule.octet:
        return _octet_call(problem, schedule, shapes, [*pointers, operand, wide], scale)
    constants, groups = _by_rows(problem, schedule, shapes, held=1)
    return _call(
        "attention.cuh",
        "AttentionKernel",
        constants,
        [*pointers, operand, wide],
        groups,
        shapes.heads,
        _scalars(problem, shapes, scale),
        shapes.batch,
    )


def _octet_call(
    problem: Problem,
    schedule: AttentionTile,
    shapes: AttentionShapes,
    pointers: list[str],
    scale: float,
) -> KernelCall:
    length, *_ = _steps(problem, schedule, shapes)
    steps, panels = max(-(-problem.n // 32), 1), max(-(-shapes.value_depth // 64), 1)
    # Tiles of 8 rows: their queries and sums stay within half the registers of a lane.
    tiles = max(n for n in (1, 2, 4) if n == 1 or n * (4 * steps + 16 * panels) <= 128)
    rows = min(length, 8 * tiles)
    group = shapes.heads // max(shapes.key_heads, 1)
    heads = max(n for n in (1, 2, 4) if n == 1 or (group % n == 0 and n * rows <= 8 * tiles))
    aligned = problem.n % 8 == 0 and shapes.value_depth % 8 == 0
    operand, _ = _types(problem)
    scalars = _scalars(problem, shapes, scale)
    constants: list = [operand, length, rows, heads, steps, panels, schedule.share, aligned]
    kernel = "AttentionOctetKernel"
    return KernelCall(
        source=instantiation("attention_octet.cuh", kernel, constants, pointers, len(scalars)),
        kernel=kernel,
        grid=(
            max(-(-problem.shape[0] // length) * (length // rows), 1),
            max(shapes.heads // heads, 1),
            grid_z(shapes.batch),
        ),
        block=(32 * schedule.share, 1, 1),
        scalars=scalars,
    )


def rows_backward_plan(
    problem: Problem,
    schedule: AttentionTile,
    shapes: AttentionShapes,
    scale: float,
    wrt_bias: bool,
) -> KernelCall:
    """The launch of dq, and of dbias where it is asked for.

    Inputs: dout [B, m, heads, dv], delta [B, m, heads] of accumulators, q, k, v, bias, lengths, lse
    [B, m, heads], row_offsets, column_indices. Outputs: dq [B, m, heads, d] and dbias [B, heads,
    nnz] of accumulators (any array, not written, without `wrt_bias`).
    """
    constants, groups = _by_rows(problem, schedule, shapes, held=2)
    operand, wide = _types(problem)
    reads = (operand, wide, operand, operand, operand, wide, "int", wide, "int", "int")
    return _call(
        "attention_backward.cuh",
        "AttentionRowsBackwardKernel",
        constants,
        [*(f"const {x}" for x in reads), operand, wide],
        groups,
        shapes.heads,
        (*_scalars(problem, shapes, scale), int(wrt_bias)),
        shapes.batch,
        zero=(1,) if wrt_bias else (),
    )


def keys_backward_plan(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes, scale: float
) -> KernelCall:
    """The launch of dk and dv.

    Inputs: those of `rows_backward_plan` up to lse, then column_offsets, row_indices, permutation
    of the transpose. Outputs: dk [B, keys, key_heads, d], dv [B, keys, key_heads, dv].
    """
    length, steps, value_steps = _steps(problem, schedule, shapes)
    operand, wide = _types(problem)
    registers = 2 * (steps + value_steps) * _COLUMNS * (2 if operand == "double" else 1)
    at_once = 4 if registers <= 16 else 2 if registers <= 32 else 1
    constants = [operand, length, at_once, schedule.lanes, steps, value_steps, _COLUMNS]
    constants += [schedule.share, BLOCK, _aligned(problem, shapes)]
    reads = (operand, wide, operand, operand, operand, wide, "int", wide, "int", "int", "int")
    return _call(
        "attention_backward.cuh",
        "AttentionKeysBackwardKernel",
        constants,
        [*(f"const {x}" for x in reads), operand, operand],
        problem.shape[1] * schedule.share * schedule.lanes,
        shapes.key_heads,
        _scalars(problem, shapes, scale),
        shapes.batch,
    )


def _by_rows(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes, held: int
) -> tuple[list, int]:
    """Template constants of a kernel by rows, and its lanes in x."""
    length, steps, value_steps = _steps(problem, schedule, shapes)
    operand, _ = _types(problem)
    numbers = held * (steps + value_steps) * _COLUMNS * (2 if operand == "double" else 1)
    rows = schedule.rows(length, numbers)
    constants = [operand, length, rows, schedule.lanes, steps, value_steps, _COLUMNS]
    constants += [schedule.share, BLOCK, _aligned(problem, shapes)]
    parts = -(-problem.shape[0] // length) * (length // rows)
    return constants, parts * schedule.share * schedule.lanes


def _steps(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes
) -> tuple[int, int, int]:
    schedule.check(problem)
    schedule.check_depth(shapes.value_depth)
    if shapes.heads > GRID_Y:
        raise NotImplementedError(f"attention: a launch has up to {GRID_Y} heads")
    length = problem.vector_length or 1
    return length, schedule.steps(problem.n), schedule.steps(shapes.value_depth)


def _aligned(problem: Problem, shapes: AttentionShapes) -> bool:
    return problem.n % _COLUMNS == 0 and shapes.value_depth % _COLUMNS == 0


def _types(problem: Problem) -> tuple[str, str]:
    return TYPES[problem.dtype], "double" if problem.dtype == "float64" else "float"


def _scalars(problem: Problem, shapes: AttentionShapes, scale: float) -> tuple[int, ...]:
    (m, keys), length = problem.shape, problem.vector_length or 1
    bits = int(struct.unpack("<q", struct.pack("<d", scale))[0])
    return (
        m,
        keys,
        shapes.heads,
        shapes.key_heads,
        problem.n,
        shapes.value_depth,
        problem.nnz // length,
        shapes.batch,
        bits,
        shapes.flags,
    )


def _call(
    header: str,
    kernel: str,
    constants: list,
    pointers: list[str],
    lanes: int,
    heads: int,
    scalars: tuple[int, ...],
    batch: int,
    zero: tuple[int, ...] = (),
) -> KernelCall:
    return KernelCall(
        source=instantiation(header, kernel, constants, pointers, len(scalars)),
        kernel=kernel,
        grid=(max(-(-lanes // BLOCK), 1), max(heads, 1), grid_z(batch)),
        block=(BLOCK, 1, 1),
        scalars=scalars,
        zero=zero,
    )
