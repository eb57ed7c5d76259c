"""The lowerings of attention and its gradients to launches of CUDA kernels."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.row_statistics import RowStatistics
from sgap_jax.launch.attention import (
    check_terms,
    forward_plan,
    keys_backward_plan,
    keys_merge_plans,
    keys_of_piece,
    keys_work,
    merge_plan,
    rows_backward_plan,
    rows_merge_plan,
    rows_work,
)
from sgap_jax.launch.attention_octet import PIECES_BY_KEYS
from sgap_jax.launch.attention_shapes import TERM_ARRAYS, AttentionShapes, AttentionTerms
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.row_pieces import WorkList
from sgap_jax.primitives._define import (
    accumulator,
    jax_lowering,
    joint_batch,
    launch_lowering,
    resolve,
)
from sgap_jax.primitives._row_pieces import lowered_work_list
from sgap_jax.primitives.attention_arguments import attention_problem
from sgap_jax.primitives.attention_unfused import (
    STRUCTURE,
    Backward,
    Composition,
    Forward,
    absent,
    data,
    delta,
    has_terms,
    kept_numbers,
    of_kernel,
)
from sgap_jax.schedules import AttentionTile, Problem, Schedule, Unfused

# Of the rows of the pattern and of its columns, for the choice of a tile.
Statistics = tuple[RowStatistics | None, RowStatistics | None] | None


def forward(
    ctx: Any,
    *operands: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    checked: bool,
    scale: float,
    is_causal: bool,
    softcap: float,
    dropout: float,
    schedule: Schedule | None,
    statistics: Statistics = None,
) -> Any:
    """attention_p as one launch, or two where long rows are cut; None where its schedule is
    `Unfused`."""
    avals = Forward(*ctx.avals_in)
    terms = _terms(avals, softcap, dropout)
    named = dict(zip(Forward._fields, data(avals), strict=False))
    shapes = _shapes(named, ctx.avals_out[0].shape[0], is_causal)
    indices = avals.column_indices
    problem = attention_problem(avals.q, indices, shapes.batch, shape, vector_length, "cuda")
    tile = _tile(schedule, problem, shapes, statistics, 0, terms)
    if tile is None:
        return None
    call = forward_plan(problem, tile, shapes, scale, terms)
    given, types = (of_kernel(Forward, x, terms is not None) for x in (operands, avals))
    if (work := rows_work(problem, tile)) is None:
        return launch_lowering(ctx, call, given, types)
    *dense, offsets, indices = given
    *of_dense, of_offsets, of_indices = types
    made, of_made = lowered_work_list(ctx, work, offsets, of_offsets)
    out, lse = ctx.avals_out
    places = (shapes.batch, work.places, vector_length or 1, shapes.heads)
    further = [lse.update(shape=(*places, size)) for size in (shapes.value_depth, 2)]
    results = [out, lse, *further]
    found = launch_lowering(
        ctx, call, (*dense, made, indices), (*of_dense, of_made, of_indices), results
    )
    sinks, of_sinks = Forward(*operands).sinks, avals.sinks
    merged = (*found[2:], sinks, made, *found[:2])
    plan = merge_plan(problem, tile, shapes, scale)
    return launch_lowering(ctx, plan, merged, (*further, of_sinks, of_made, out, lse), [out, lse])


def backward(
    ctx: Any,
    *operands: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    checked: bool,
    scale: float,
    is_causal: bool,
    softcap: float,
    dropout: float,
    wrt_bias: bool,
    wrt_terms: bool,
    schedule: Schedule | None,
    statistics: Statistics = None,
) -> Any:
    """attention_backward_p as two launches, one by rows and one by keys, and one more for each
    gradient of which long rows are cut; None where its schedule is `Unfused`. The gradients of
    slopes and a table are sums of those of the scores, in plain JAX."""
    x, avals = Backward(*operands), Backward(*ctx.avals_in)
    terms = _terms(avals, softcap, dropout)
    sizes = joint_batch(*(a.shape[0] for a in (avals.dout, avals.out, avals.dlse)))
    deltas = jax.core.ShapedArray((sizes, *avals.lse.shape[1:]), avals.lse.dtype)
    named = {"dout": avals.dout, "delta": deltas, "q": avals.q, "k": avals.k, "v": avals.v}
    named |= {"bias": avals.bias, "lengths": avals.lengths, "lse": avals.lse}
    shapes = _shapes(named, ctx.avals_out[0].shape[0], is_causal)
    indices = avals.column_indices
    problem = attention_problem(avals.q, indices, shapes.batch, shape, vector_length, "cuda")
    tile, by_keys = (_tile(schedule, problem, shapes, statistics, i, terms) for i in range(2))
    if tile is None or by_keys is None:
        return None
    inner = ctx.replace(avals_out=[deltas])
    of_delta = (x.dout, x.out, x.dlse), (avals.dout, avals.out, avals.dlse)
    (found,) = jax_lowering(inner, delta, *of_delta)
    dense = [x.dout, found, x.q, x.k, x.v, x.bias, x.lengths, x.lse]
    dq, dk, dv, dbias, *of_terms = ctx.avals_out
    of_dense = [*named.values()]
    if terms is not None:
        dense += [getattr(x, name) for name in TERM_ARRAYS]
        of_dense += [getattr(avals, name) for name in TERM_ARRAYS]
    wrt_scores = wrt_bias or wrt_terms
    if wrt_scores:
        stored = (indices.shape[0],) if vector_length is None else (indices.shape[0], vector_length)
        dbias = dbias.update(shape=(shapes.batch, shapes.heads, *stored))
    call = rows_backward_plan(problem, tile, shapes, scale, wrt_scores, terms)
    work = rows_work(problem, tile)
    merges = [] if work is None else [rows_merge_plan(problem, tile, shapes)]
    arrays = (x.row_offsets, x.column_indices), (avals.row_offsets, avals.column_indices)
    sums = (vector_length or 1) * shapes.heads
    of_sums = [(sums, problem.n)]
    rows = _merged(ctx, call, (dense, of_dense), arrays, [dq, dbias], work, merges, of_sums)

    call = keys_backward_plan(problem, by_keys, shapes, scale, terms)
    work = keys_work(problem, by_keys, shapes)
    plans = () if work is None else keys_merge_plans(problem, by_keys, shapes)
    transposed = (
        (x.column_offsets, x.row_indices, x.permutation),
        (avals.column_offsets, avals.row_indices, avals.permutation),
    )
    group = keys_of_piece(problem, by_keys, shapes)
    of_sums = [(group * shapes.key_heads, depth) for depth in (problem.n, shapes.value_depth)]
    keys = _merged(ctx, call, (dense, of_dense), transposed, [dk, dv], work, plans, of_sums, group)
    ds = rows[1] if wrt_bias else nothing(ctx, ctx.avals_out[3:4])[0]
    if not wrt_terms:
        return [rows[0], *keys, ds, *nothing(ctx, of_terms)]

    def summed(i: int, ds: Any, *operands: Any) -> Any:
        params: dict = dict(shape=shape, vector_length=vector_length, checked=True, scale=scale)
        params |= dict(is_causal=is_causal, softcap=softcap, dropout=dropout, schedule=None)
        of = Composition(operands[-STRUCTURE:], **params)
        return of.of_terms(ds, Backward(*operands))[i]

    given = (rows[1], *operands), (dbias, *ctx.avals_in)
    inner = [ctx.replace(avals_out=[aval]) for aval in of_terms]
    of_all = [jax_lowering(own, partial(summed, i), *given)[0] for i, own in enumerate(inner)]
    return [rows[0], *keys, ds, *of_all]


def nothing(ctx: Any, avals: Iterable) -> list:
    """Lowered results that a call does not have, [1, 0], or [S, 0] for S structures."""
    return [
        jax_lowering(ctx.replace(avals_out=[a]), partial(jnp.zeros, a.shape, a.dtype), (), ())[0]
        for a in avals
    ]


def _merged(
    ctx: Any,
    call: KernelCall,
    dense: tuple,
    arrays: tuple,
    results: list,
    work: WorkList | None,
    merges: Sequence[KernelCall],
    of_sums: Sequence[tuple[int, ...]],
    group: int = 1,
) -> list:
    """The launch of a gradient, and with a work list those that add its partial sums, of the shapes
    [batch, places, *of_sums], to its first results. `dense` and `arrays` are operands and avals;
    the first of the arrays are the offsets, in whose place the list is launched; where rows of the
    list are `group` > 1 rows of the structure, it is launched before the offsets."""
    (given, types), ((offsets, *rest), (of_offsets, *of_rest)) = dense, arrays
    if work is None:
        operands, avals = [*given, offsets, *rest], [*types, of_offsets, *of_rest]
        return list(launch_lowering(ctx, call, operands, avals, results))
    made, of_made = lowered_work_list(ctx, work, offsets, of_offsets, group)
    if group > 1:
        rest, of_rest = [offsets, *rest], [of_offsets, *of_rest]
    batch, wide = results[0].shape[0], results[0].update(dtype=accumulator(results[0].dtype))
    partial = [wide.update(shape=(batch, work.places, *shape)) for shape in of_sums]
    operands, avals = [*given, made, *rest], [*types, of_made, *of_rest]
    found = list(launch_lowering(ctx, call, operands, avals, [*results, *partial]))
    for i, merge in enumerate(merges):
        sums, of = found[len(results) + i], (partial[i], of_made, results[i])
        (found[i],) = launch_lowering(ctx, merge, (sums, made, found[i]), of, [results[i]])
    return found[: len(results)]


def _shapes(avals: Mapping[str, Any], batch: int, is_causal: bool) -> AttentionShapes:
    heads, bias = avals["q"].shape[2], avals["bias"]
    return AttentionShapes(
        heads=heads,
        key_heads=avals["k"].shape[2],
        value_depth=avals["v"].shape[3],
        batch=batch,
        many=frozenset(name for name, aval in avals.items() if aval.shape[0] != 1),
        bias=None if absent(bias) else "heads" if bias.shape[1] != 1 else "shared",
        sinks="sinks" in avals and not absent(avals["sinks"]),
        lengths=not absent(avals["lengths"]),
        is_causal=is_causal,
    )


def _terms(avals: Forward | Backward, softcap: float, dropout: float) -> AttentionTerms | None:
    if not has_terms(avals, softcap):
        return None
    arrays = {name: getattr(avals, name) for name in TERM_ARRAYS}
    present = {name for name, x in arrays.items() if not absent(x)}
    if {"query_segments", "key_segments"} <= present:
        present.add("segments")
    kept, factor = kept_numbers(dropout)
    return AttentionTerms(
        present=frozenset(present),
        many=frozenset(name for name in present & {*arrays} if arrays[name].shape[0] != 1),
        softcap=softcap,
        range=arrays["table"].shape[2] if "table" in present else 0,
        kept=kept,
        factor=factor,
    )


def _tile(
    schedule: Schedule | None,
    problem: Problem,
    shapes: AttentionShapes,
    statistics: Statistics,
    axis: int,
    terms: AttentionTerms | None,
) -> AttentionTile | None:
    """The tile by rows (axis 0) or by keys (1), which must have lanes for the wider of k and v."""
    rows = None if statistics is None else statistics[axis]
    widest = dataclasses.replace(problem, n=max(problem.n, shapes.value_depth), rows=rows)
    tile = resolve(schedule, widest, AttentionTile, Unfused)
    if terms is not None and isinstance(tile, AttentionTile):
        if schedule is not None:
            check_terms(tile)
        tile = dataclasses.replace(tile, octet=False, chunk=None)
        tile.check(widest)
        return tile
    if not isinstance(tile, AttentionTile):
        return None
    if axis == 1 and rows is not None and tile.octet_backward(problem.n, shapes.value_depth):
        longest = PIECES_BY_KEYS * rows.longest  # as long as it takes, in entries by rows
        widest = dataclasses.replace(widest, rows=dataclasses.replace(rows, longest=longest))
        tile = resolve(schedule, widest, AttentionTile, Unfused)
    return tile if isinstance(tile, AttentionTile) else None
