"""The lowerings of attention and its gradients to launches of CUDA kernels."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from sgap_jax.launch import launch, nvrtc
from sgap_jax.launch.attention import (
    forward_plan,
    keys_backward_plan,
    rows_backward_plan,
)
from sgap_jax.launch.attention_shapes import AttentionShapes
from sgap_jax.primitives._define import jax_lowering, joint_batch, resolve
from sgap_jax.primitives.attention_arguments import attention_problem
from sgap_jax.primitives.attention_unfused import absent, delta
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
    names = ("q", "k", "v", "bias", "sinks", "lengths")
    avals = dict(zip(names, ctx.avals_in[:6], strict=True))
    shapes = _shapes(avals, ctx.avals_out[0].shape[0], is_causal)
    problem = attention_problem(
        avals["q"], ctx.avals_in[7], shapes.batch, shape, vector_length, "cuda"
    )
    tile = _tile(schedule, problem, shapes)
    if tile is None:
        return None
    call = forward_plan(problem, tile, shapes, scale)
    return launch.lower(ctx, call, operands[:8], ctx.avals_in[:8], compiler=nvrtc)


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
    dout, dlse, *rest, out, lse = ctx.avals_in[:9]
    sizes = (joint_batch(*(x.shape[0] for x in (dout, out, dlse))), *lse.shape[1:])
    deltas = jax.core.ShapedArray(sizes, lse.dtype)
    given = [dout, deltas, *rest, lse, *ctx.avals_in[9:]]
    names = ("dout", "delta", "q", "k", "v", "bias", "lengths", "lse")
    avals = dict(zip(names, given[:8], strict=True))
    shapes = _shapes(avals, ctx.avals_out[0].shape[0], is_causal)
    problem = attention_problem(avals["q"], given[9], shapes.batch, shape, vector_length, "cuda")
    tile = _tile(schedule, problem, shapes)
    if tile is None:
        return None
    of_delta = ([operands[i] for i in (0, 7, 1)], (dout, out, dlse))
    inner = ctx.replace(avals_out=[deltas])
    values = [operands[0], *jax_lowering(inner, delta, *of_delta), *operands[2:7], *operands[8:]]
    dq, dk, dv, dbias = ctx.avals_out
    call = rows_backward_plan(problem, tile, shapes, scale, wrt_bias)
    rows = launch.lower(ctx, call, values[:10], given[:10], [dq, dbias], compiler=nvrtc)
    by_keys = ((*values[:8], *values[10:]), (*given[:8], *given[10:]))
    call = keys_backward_plan(problem, tile, shapes, scale)
    keys = launch.lower(ctx, call, *by_keys, [dk, dv], compiler=nvrtc)
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
