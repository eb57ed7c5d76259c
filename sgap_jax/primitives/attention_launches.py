"""The lowerings of attention and its gradients to launches of CUDA kernels."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from sgap_jax.launch.attention import (
    forward_plan,
    keys_backward_plan,
    rows_backward_plan,
)
from sgap_jax.launch.attention_shapes import AttentionShapes
from sgap_jax.primitives._define import jax_lowering, joint_batch, launch_lowering, resolve
from sgap_jax.primitives.attention_arguments import attention_problem
from sgap_jax.primitives.attention_unfused import Backward, Forward, absent, data, delta, of_kernel
from sgap_jax.schedules import AttentionTile, Problem, Schedule, Unfused


def forward(
    ctx: Any,
    *operands: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    checked: bool,
    scale: float,
    is_causal: bool,
    schedule: Schedule | None,
) -> Any:
    """attention_p as one launch; None where its schedule is `Unfused`."""
    avals = Forward(*ctx.avals_in)
    named = dict(zip(Forward._fields, data(avals), strict=False))
    shapes = _shapes(named, ctx.avals_out[0].shape[0], is_causal)
    indices = avals.column_indices
    problem = attention_problem(avals.q, indices, shapes.batch, shape, vector_length, "cuda")
    tile = _tile(schedule, problem, shapes)
    if tile is None:
        return None
    call = forward_plan(problem, tile, shapes, scale)
    return launch_lowering(ctx, call, of_kernel(operands), of_kernel(avals))


def backward(
    ctx: Any,
    *operands: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    checked: bool,
    scale: float,
    is_causal: bool,
    wrt_bias: bool,
    schedule: Schedule | None,
) -> Any:
    """attention_backward_p as two launches, one by rows and one by keys; None where its schedule is
    `Unfused`."""
    x, avals = Backward(*operands), Backward(*ctx.avals_in)
    sizes = joint_batch(*(a.shape[0] for a in (avals.dout, avals.out, avals.dlse)))
    deltas = jax.core.ShapedArray((sizes, *avals.lse.shape[1:]), avals.lse.dtype)
    named = {"dout": avals.dout, "delta": deltas, "q": avals.q, "k": avals.k, "v": avals.v}
    named |= {"bias": avals.bias, "lengths": avals.lengths, "lse": avals.lse}
    shapes = _shapes(named, ctx.avals_out[0].shape[0], is_causal)
    indices = avals.column_indices
    problem = attention_problem(avals.q, indices, shapes.batch, shape, vector_length, "cuda")
    tile = _tile(schedule, problem, shapes)
    if tile is None:
        return None
    inner = ctx.replace(avals_out=[deltas])
    of_delta = (x.dout, x.out, x.dlse), (avals.dout, avals.out, avals.dlse)
    (found,) = jax_lowering(inner, delta, *of_delta)
    dense = [x.dout, found, x.q, x.k, x.v, x.bias, x.lengths, x.lse]
    dq, dk, dv, dbias = ctx.avals_out
    call = rows_backward_plan(problem, tile, shapes, scale, wrt_bias)
    by_rows = [*dense, x.row_offsets, x.column_indices]
    given = [*named.values(), avals.row_offsets, avals.column_indices]
    rows = launch_lowering(ctx, call, by_rows, given, [dq, dbias])
    call = keys_backward_plan(problem, tile, shapes, scale)
    by_keys = [*dense, x.column_offsets, x.row_indices, x.permutation]
    given = [*named.values(), avals.column_offsets, avals.row_indices, avals.permutation]
    keys = launch_lowering(ctx, call, by_keys, given, [dk, dv])
    return [rows[0], *keys, rows[1]]


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


def _tile(
    schedule: Schedule | None, problem: Problem, shapes: AttentionShapes
) -> AttentionTile | None:
    # The tile must have lanes for the wider of k and v.
    widest = dataclasses.replace(problem, n=max(problem.n, shapes.value_depth))
    tile = resolve(schedule, widest, AttentionTile, Unfused)
    return tile if isinstance(tile, AttentionTile) else None
