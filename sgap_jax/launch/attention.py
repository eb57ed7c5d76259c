"""Launch plans of fused attention and its gradients, from a problem and an `AttentionTile`
(cuda/attention: attention.cuh, attention_backward.cuh, _pieces.cuh and _terms.cuh)."""

from __future__ import annotations

import dataclasses

from sgap_jax.launch import attention_octet as octets
from sgap_jax.launch.attention_shapes import (
    AttentionShapes,
    AttentionTerms,
    checked,
    scalars,
    term_pointers,
    types,
)
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.row_pieces import WorkList, merging_blocks, sum_plan
from sgap_jax.schedules.attention import BLOCK, AttentionTile
from sgap_jax.schedules.problem import Problem

_COLUMNS = 4
_MERGING_WARPS = 4  # that share the pieces of a row


def rows_work(problem: Problem, schedule: AttentionTile) -> WorkList | None:
    """The sizes of the work list by rows, for a tile that cuts long rows; None for one that does
    not, or if no row can be longer than its chunk. With a list the launches by rows have it in the
    place of the row offsets, and further results, which `merge_plan` and `rows_merge_plan` take."""
    length = problem.vector_length or 1
    return _work(problem, schedule, -(-problem.shape[0] // length))


def keys_work(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes
) -> WorkList | None:
    """As `rows_work`, of the transposed structure, whose rows are keys, or `keys_of_piece` keys
    with as many entries as the one that has most: of these pieces are shorter, down to
    `octets.PIECES_BY_KEYS` of a chunk. `keys_merge_plans` take the further results."""
    group, least = keys_of_piece(problem, schedule, shapes), None
    if group > 1 and schedule.chunk is not None:
        least = schedule.chunk // octets.PIECES_BY_KEYS
    return _work(problem, schedule, -(-problem.shape[1] // group), least)


def keys_of_piece(problem: Problem, schedule: AttentionTile, shapes: AttentionShapes) -> int:
    """The keys of a row of the list: 1 on CUDA cores. In octets those of a warp, whose launch has
    the list before the column offsets."""
    octet = schedule.octet_backward(problem.n, shapes.value_depth)
    return octets.keys_of_warp(problem, shapes) if octet else 1


def _work(
    problem: Problem, schedule: AttentionTile, rows: int, least: int | None = None
) -> WorkList | None:
    if schedule.chunk is None:
        return None
    work = WorkList(rows, problem.nnz // (problem.vector_length or 1), schedule.chunk, least)
    return work if work.merged else None


def check_terms(schedule: AttentionTile) -> None:
    """Raises NotImplementedError for a tile whose kernels have no `AttentionTerms`."""
    if schedule.octet or schedule.chunk is not None:
        kind = "tensor cores" if schedule.octet else "pieces of rows"
        raise NotImplementedError(
            f"attention: {schedule}: the kernels of {kind} have no soft cap, distances, segments "
            "or dropout; schedule=None or an AttentionTile without octet and chunk has them"
        )


def forward_plan(
    problem: Problem,
    schedule: AttentionTile,
    shapes: AttentionShapes,
    scale: float,
    terms: AttentionTerms | None = None,
) -> KernelCall:
    """The launch that computes out and lse, the logarithm of each row's sum of exponentials.

    Inputs: q [B, m, heads, d], k [B, keys, key_heads, d], v [B, keys, key_heads, dv], bias
    [B, heads, nnz] and sinks [B, heads] in the accumulator's dtype, lengths [B], row_offsets,
    column_indices. An operand that `shapes` says is shared has a leading axis of 1; an absent one
    is any array. With `terms` their arrays follow the lengths: slopes [B, heads] and table
    [B, heads, range] in the accumulator's dtype, query_segments [B, m], key_segments [B, keys],
    offset [B], seeds [B, heads, 2] uint32. Outputs: out [B, m, heads, dv], and lse [B, m, heads] in
    the accumulator's dtype.

    Args:
      problem: op "attention" on "cuda"; n is the number of features of a head of q and k, and nnz
        counts every row of a vector.
      schedule: one that `AttentionTile.check` accepts.
      shapes: heads, batch, and which operands are present or shared.
      scale: the factor of the scores; an argument of the kernel.
      terms: soft cap, distances, segments and dropout; None for a call without.
    """
    operand, wide = types(problem)
    reads = [operand, operand, operand, wide, wide, "int", "int", "int"]
    if terms is not None:
        check_terms(schedule)
        reads[6:6] = term_pointers(wide)
    pointers = [*(f"const {x}" for x in reads), operand, wide]
    work = rows_work(problem, schedule)
    if schedule.octet:
        pointers = pointers if work is None else [*pointers, wide, wide]
        return octets.forward_plan(problem, schedule, shapes, scale, pointers, work)
    constants, groups = _by_rows(problem, schedule, shapes, work, held=1)
    return _call(
        *_kernel("Attention", "", work, terms),
        constants,
        pointers if work is None else [*pointers, wide, wide],
        groups,
        shapes.heads,
        scalars(problem, shapes, scale) + _further(work, terms),
        shapes.batch,
    )


def _kernel(
    before: str, after: str, work: WorkList | None, terms: AttentionTerms | None
) -> tuple[str, str]:
    """The header and the name of a kernel of CUDA cores: with terms, with pieces, or plain."""
    if terms is not None:
        return "attention_terms.cuh", f"{before}Terms{after}Kernel"
    if work is not None:
        return "attention_pieces.cuh", f"{before}{after}PiecesKernel"
    return "attention_backward.cuh" if after else "attention.cuh", f"{before}{after}Kernel"


def _further(work: WorkList | None, terms: AttentionTerms | None) -> tuple[int, ...]:
    return terms.scalars if terms is not None else () if work is None else work.scalars


def merge_plan(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes, scale: float
) -> KernelCall:
    """The launch that merges the results of pieces into out and lse, for a tile with `rows_work`.

    Inputs: partial [B, places, V, heads, dv] and states [B, places, V, heads, 2], the further
    results of the forward launch, both in the accumulator's dtype; sinks, the work list, out and
    lse, which are changed in place.
    """
    work, length = rows_work(problem, schedule), problem.vector_length or 1
    assert work is not None
    operand, wide = types(problem)
    steps = max(-(-shapes.value_depth // (32 * _COLUMNS)), 1)
    reads = (wide, wide, wide, "int", operand, wide)
    call = KernelCall.of(
        "attention_pieces.cuh",
        "AttentionMergeKernel",
        [
            *(operand, length, steps, _COLUMNS, _MERGING_WARPS),
            shapes.value_depth % _COLUMNS == 0,
        ],
        [*(f"const {x}" for x in reads), operand, wide],
        (*scalars(problem, shapes, scale), *work.scalars),
        blocks=(
            merging_blocks(work.merged * length, shapes.heads * shapes.batch),
            shapes.heads,
        ),
        threads=32 * _MERGING_WARPS,
        batch=shapes.batch,
    )
    return dataclasses.replace(call, in_place=((4, 0), (5, 1)))


def rows_backward_plan(
    problem: Problem,
    schedule: AttentionTile,
    shapes: AttentionShapes,
    scale: float,
    wrt_bias: bool,
    terms: AttentionTerms | None = None,
) -> KernelCall:
    """The launch that computes dq and, with `wrt_bias`, dbias: the gradient of all that is added to
    the scores after a soft cap.

    Inputs: dout [B, m, heads, dv], delta [B, m, heads] in the accumulator's dtype, q, k, v, bias,
    lengths, lse [B, m, heads], the arrays of `terms`, row_offsets, column_indices. Outputs: dq
    [B, m, heads, d], and dbias [B, heads, nnz] in the accumulator's dtype (any array, not written,
    without `wrt_bias`).
    """
    operand, wide = types(problem)
    reads = [operand, wide, operand, operand, operand, wide, "int", wide, "int", "int"]
    if terms is not None:
        check_terms(schedule)
        reads[8:8] = term_pointers(wide)
    pointers = [*(f"const {x}" for x in reads), operand, wide]
    work = rows_work(problem, schedule)
    if work is not None:
        pointers.append(wide)
    if schedule.octet_backward(problem.n, shapes.value_depth):
        return octets.rows_backward_plan(problem, schedule, shapes, scale, wrt_bias, pointers, work)
    constants, groups = _by_rows(problem, schedule, shapes, work, held=2)
    return _call(
        *_kernel("Attention", "RowsBackward", work, terms),
        constants,
        pointers,
        groups,
        shapes.heads,
        (
            *scalars(problem, shapes, scale),
            int(wrt_bias),
            *_further(work, terms),
        ),
        shapes.batch,
        zero=(1,) if wrt_bias else (),
    )


def rows_merge_plan(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes
) -> KernelCall:
    """The launch that adds partial [B, places, V, heads, d], the further result of the launch by
    rows, into dq (`sum_plan`), for a tile with `rows_work`."""
    work = rows_work(problem, schedule)
    assert work is not None
    width, length = shapes.heads * problem.n, problem.vector_length or 1
    size = problem.shape[0] * width
    return sum_plan(work, problem.dtype, length * width, size, shapes.batch, _COLUMNS)


def keys_backward_plan(
    problem: Problem,
    schedule: AttentionTile,
    shapes: AttentionShapes,
    scale: float,
    terms: AttentionTerms | None = None,
) -> KernelCall:
    """The launch that computes dk and dv.

    Inputs: those of `rows_backward_plan` up to the terms, then column_offsets, row_indices and
    permutation, the transposed structure. Outputs: dk [B, keys, key_heads, d], dv
    [B, keys, key_heads, dv].
    """
    operand, wide = types(problem)
    reads = [operand, wide, operand, operand, operand, wide, "int", wide, "int", "int", "int"]
    if terms is not None:
        check_terms(schedule)
        reads[8:8] = term_pointers(wide)
    pointers = [*(f"const {x}" for x in reads), operand, operand]
    work = keys_work(problem, schedule, shapes)
    if work is not None:
        pointers += [wide, wide]
    if schedule.octet_backward(problem.n, shapes.value_depth):
        if work is not None:
            pointers.insert(len(reads), "const int")
        return octets.keys_backward_plan(problem, schedule, shapes, scale, pointers, work)
    length, steps, value_steps = _steps(problem, schedule, shapes)
    registers = 2 * (steps + value_steps) * _COLUMNS * (2 if operand == "double" else 1)
    at_once = 4 if registers <= 16 else 2 if registers <= 32 else 1
    constants = [operand, length, at_once, schedule.lanes, steps, value_steps, _COLUMNS]
    constants += [schedule.share, BLOCK, _aligned(problem, shapes)]
    columns = problem.shape[1] if work is None else work.pieces
    return _call(
        *_kernel("Attention", "KeysBackward", work, terms),
        constants,
        pointers,
        columns * schedule.share * schedule.lanes,
        shapes.key_heads,
        scalars(problem, shapes, scale) + _further(work, terms),
        shapes.batch,
    )


def keys_merge_plans(
    problem: Problem, schedule: AttentionTile, shapes: AttentionShapes
) -> tuple[KernelCall, KernelCall]:
    """The launches that add partial [B, places, key_heads, d] into dk and [B, places, key_heads,
    dv] into dv (`sum_plan`), for a tile with `keys_work`."""
    work = keys_work(problem, schedule, shapes)
    assert work is not None
    plans, group = [], keys_of_piece(problem, schedule, shapes)
    for depth in (problem.n, shapes.value_depth):
        width = group * shapes.key_heads * depth
        size = problem.shape[1] * shapes.key_heads * depth
        plans.append(sum_plan(work, problem.dtype, width, size, shapes.batch, _COLUMNS))
    return plans[0], plans[1]


def _by_rows(
    problem: Problem,
    schedule: AttentionTile,
    shapes: AttentionShapes,
    work: WorkList | None,
    held: int,
) -> tuple[list, int]:
    """Template constants of a kernel whose warps take rows, and its number of lanes in x. `held` is
    how many vectors of d and of dv features a lane keeps in registers for each row."""
    length, steps, value_steps = _steps(problem, schedule, shapes)
    operand, _ = types(problem)
    numbers = held * (steps + value_steps) * _COLUMNS * (2 if operand == "double" else 1)
    rows = schedule.rows(length, numbers)
    constants = [operand, length, rows, schedule.lanes, steps, value_steps, _COLUMNS]
    constants += [schedule.share, BLOCK, _aligned(problem, shapes)]
    block_rows = -(-problem.shape[0] // length) if work is None else work.pieces
    parts = block_rows * (length // rows)
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
