"""Launch plans of fused attention and its gradients, from a problem and an `AttentionTile`
(cuda/attention/attention.cuh, attention_backward.cuh)."""

from __future__ import annotations

from sgap_jax.launch import attention_octet as octets
from sgap_jax.launch.attention_shapes import AttentionShapes, checked, scalars, types
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.schedules.attention import BLOCK, AttentionTile
from sgap_jax.schedules.problem import Problem

_COLUMNS = 4


def forward_plan(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes, scale: float
) -> KernelCall:
    """The launch that computes out and lse, the logarithm of each row's sum of exponentials.

    Inputs: q [B, m, heads, d], k [B, keys, key_heads, d], v [B, keys, key_heads, dv], bias
    [B, heads, nnz] and sinks [B, heads] in the accumulator's dtype, lengths [B], row_offsets,
    column_indices. An operand that `shapes` says is shared has a leading axis of 1; an absent one
    is any array. Outputs: out [B, m, heads, dv], and lse [B, m, heads] in the accumulator's dtype.

    Args:
      problem: op "attention" on "cuda"; n is the number of features of a head of q and k, and nnz
        counts every row of a vector.
      schedule: one that `AttentionTile.check` accepts.
      shapes: heads, batch, and which operands are present or shared.
      scale: the factor of the scores; an argument of the kernel.
    """
    operand, wide = types(problem)
    reads = (operand, operand, operand, wide, wide, "int", "int", "int")
    pointers = [*(f"const {x}" for x in reads), operand, wide]
    if schedule.octet:
        return octets.forward_plan(problem, schedule, shapes, scale, pointers)
    constants, groups = _by_rows(problem, schedule, shapes, held=1)
    return _call(
        "attention.cuh",
        "AttentionKernel",
        constants,
        pointers,
        groups,
        shapes.heads,
        scalars(problem, shapes, scale),
        shapes.batch,
    )


def rows_backward_plan(
    problem: Problem,
    schedule: AttentionTile,
    shapes: AttentionShapes,
    scale: float,
    wrt_bias: bool,
) -> KernelCall:
    """The launch that computes dq and, with `wrt_bias`, dbias.

    Inputs: dout [B, m, heads, dv], delta [B, m, heads] in the accumulator's dtype, q, k, v, bias,
    lengths, lse [B, m, heads], row_offsets, column_indices. Outputs: dq [B, m, heads, d], and dbias
    [B, heads, nnz] in the accumulator's dtype (any array, not written, without `wrt_bias`).
    """
    operand, wide = types(problem)
    reads = (operand, wide, operand, operand, operand, wide, "int", wide, "int", "int")
    pointers = [*(f"const {x}" for x in reads), operand, wide]
    if schedule.octet_backward(problem.n, shapes.value_depth):
        return octets.rows_backward_plan(problem, schedule, shapes, scale, wrt_bias, pointers)
    constants, groups = _by_rows(problem, schedule, shapes, held=2)
    return _call(
        "attention_backward.cuh",
        "AttentionRowsBackwardKernel",
        constants,
        pointers,
        groups,
        shapes.heads,
        (*scalars(problem, shapes, scale), int(wrt_bias)),
        shapes.batch,
        zero=(1,) if wrt_bias else (),
    )


def keys_backward_plan(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes, scale: float
) -> KernelCall:
    """The launch that computes dk and dv.

    Inputs: those of `rows_backward_plan` up to lse, then column_offsets, row_indices and
    permutation, the transposed structure. Outputs: dk [B, keys, key_heads, d], dv
    [B, keys, key_heads, dv].
    """
    operand, wide = types(problem)
    reads = (operand, wide, operand, operand, operand, wide, "int", wide, "int", "int", "int")
    pointers = [*(f"const {x}" for x in reads), operand, operand]
    if schedule.octet_backward(problem.n, shapes.value_depth):
        return octets.keys_backward_plan(problem, schedule, shapes, scale, pointers)
    length, steps, value_steps = _steps(problem, schedule, shapes)
    registers = 2 * (steps + value_steps) * _COLUMNS * (2 if operand == "double" else 1)
    at_once = 4 if registers <= 16 else 2 if registers <= 32 else 1
    constants = [operand, length, at_once, schedule.lanes, steps, value_steps, _COLUMNS]
    constants += [schedule.share, BLOCK, _aligned(problem, shapes)]
    return _call(
        "attention_backward.cuh",
        "AttentionKeysBackwardKernel",
        constants,
        pointers,
        problem.shape[1] * schedule.share * schedule.lanes,
        shapes.key_heads,
        scalars(problem, shapes, scale),
        shapes.batch,
    )


def _by_rows(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes, held: int
) -> tuple[list, int]:
    """Template constants of a kernel whose warps take rows, and its number of lanes in x. `held` is
    how many vectors of d and of dv features a lane keeps in registers for each row."""
    length, steps, value_steps = _steps(problem, schedule, shapes)
    operand, _ = types(problem)
    numbers = held * (steps + value_steps) * _COLUMNS * (2 if operand == "double" else 1)
    rows = schedule.rows(length, numbers)
    constants = [operand, length, rows, schedule.lanes, steps, value_steps, _COLUMNS]
    constants += [schedule.share, BLOCK, _aligned(problem, shapes)]
    parts = -(-problem.shape[0] // length) * (length // rows)
    return constants, parts * schedule.share * schedule.lanes


def _steps(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes
) -> tuple[int, int, int]:
    length = checked(problem, schedule, shapes)
    return length, schedule.steps(problem.n), schedule.steps(shapes.value_depth)


def _aligned(problem: Problem, shapes: AttentionShapes) -> bool:
    return problem.n % _COLUMNS == 0 and shapes.value_depth % _COLUMNS == 0


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
    return KernelCall.of(
        header,
        kernel,
        constants,
        pointers,
        scalars,
        blocks=(-(-lanes // BLOCK), heads),
        threads=BLOCK,
        batch=batch,
        zero=zero,
    )
