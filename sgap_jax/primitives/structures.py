"""The primitives behind `valid_offsets` and `transpose_structure` of formats/structure.py, for the
structure that each element of a batch has. As primitives they are split over devices by it."""

from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import structure
from sgap_jax.launch import launch, nvrtc
from sgap_jax.launch import transpose_structure as plans
from sgap_jax.primitives._batch import mapped_first, plain_lowering
from sgap_jax.primitives._define import (
    batch_rule,
    bind,
    define,
    ffi_lowering,
    is_launched,
    out_aval,
)
from sgap_jax.schedules import Schedule

# offsets [B, m + 1], indices [B, nnz] int32 -> offsets [B, size + 1], indices and permutation
# [B, nnz] of the transpose. Whatever the operands hold, the results are valid.


def _symbolic(ctx: Any) -> bool:
    sizes = [n for aval in (*ctx.avals_in, *ctx.avals_out) for n in aval.shape]
    return any(map(jax.export.is_symbolic_dim, sizes))


def _transposed_eval(offsets: Any, indices: Any, *, size: int, schedule: Schedule | None) -> list:
    batch, nnz = indices.shape
    assert offsets.shape[0] == batch and offsets.dtype == indices.dtype == jnp.int32
    return [out_aval(indices, (batch, n), indices.dtype) for n in (size + 1, nnz, nnz)]


def _transposed_reference(
    offsets: Any, indices: Any, *, size: int, schedule: Schedule | None
) -> list:
    sort = partial(structure.transpose_by_comparing, size=size)
    return list(jax.vmap(sort)(offsets, indices))


def _transposed_cpu(ctx: Any, *operands: Any, size: int, schedule: Schedule | None) -> Any:
    if schedule is not None or _symbolic(ctx):
        return None
    return ffi_lowering("sgap_transpose_structure_v1", ctx, operands)


def _transposed_cuda(ctx: Any, *operands: Any, size: int, schedule: Schedule | None) -> Any:
    of_offsets, of_entries = ctx.avals_in
    instead = "transposed structures are sorted in plain JAX"
    if schedule is not None or not is_launched(ctx, "transpose_structure", instead):
        return None
    before = jax.vmap(partial(structure.transpose_keys, size=size))
    offsets, keys = plain_lowering(before, True, ctx, operands)
    arrays = offsets, keys, _order(ctx, keys, size)
    ctx = ctx.replace(avals_in=[of_offsets, of_entries, of_entries])
    after = jax.vmap(partial(structure.transpose_in_order, size=size))
    return plain_lowering(after, True, ctx, arrays)


def _order(ctx: Any, keys: Any, size: int) -> Any:
    """The order [B, nnz] of keys 0 .. size, as a stable sort gives it."""
    each = ctx.avals_in[1]
    batch, nnz = each.shape
    totals = out_aval(each, (batch, plans.DIGITS), each.dtype)
    counts = out_aval(each, (batch, plans.DIGITS, plans.tiles(nnz)), each.dtype)
    lower = partial(launch.lower, ctx, compiler=nvrtc)
    order = keys  # of the first digit it is not read
    for shift in plans.shifts(size):
        found = lower(plans.count_plan(batch, nnz, shift), [keys], [each], [counts])
        starts = lower(plans.start_plan(batch, nnz), found, [counts], [counts, totals])
        given, avals = [keys, order, *starts], [each, each, counts, totals]
        keys, order = lower(plans.move_plan(batch, nnz, shift), given, avals, [each, each])
    return order


def _transposed_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    return bind(transpose_structure_p, *primals, **params), None


def _transposed_batch(args: Any, dims: Any, **params: Any) -> Any:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    every = [mapped_first(a, d, size) for a, d in zip(args, dims, strict=True)]
    return batch_rule(transpose_structure_p, 2, every, (0, 0), **params)


transpose_structure_p = define(
    "transpose_structure",
    data=2,
    axes="b, b -> b, b, b",
    abstract_eval=_transposed_eval,
    reference=_transposed_reference,
    cpu=_transposed_cpu,
    cuda=_transposed_cuda,
    jvp=_transposed_jvp,
    transpose=None,
    batch=_transposed_batch,
    multiple_results=True,
)

# offsets [B, ..., n] int32 -> the same shape: their running maximum, clamped to 0 .. nnz.


def _valid_eval(offsets: Any, *, nnz: int, schedule: None) -> Any:
    return out_aval(offsets, offsets.shape, offsets.dtype)


def _valid_reference(offsets: Any, *, nnz: int, schedule: None) -> Any:
    return jax.lax.cummax(jnp.clip(offsets, 0, nnz), axis=offsets.ndim - 1)


def _valid_cpu(ctx: Any, offsets: Any, *, nnz: int, schedule: None) -> Any:
    if jax.export.is_symbolic_dim(nnz) or _symbolic(ctx):
        return None
    return ffi_lowering("sgap_valid_offsets_v1", ctx, [offsets], nnz=np.int64(nnz))


def _valid_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    return bind(valid_offsets_p, *primals, **params), None


valid_offsets_p = define(
    "valid_offsets",
    data=1,
    axes="b -> b",
    abstract_eval=_valid_eval,
    reference=_valid_reference,
    cpu=_valid_cpu,
    jvp=_valid_jvp,
    transpose=None,
)


@partial(jax.jit, static_argnames=("size", "schedule"), inline=True)
def transposed(
    offsets: jax.Array, indices: jax.Array, size: int, schedule: Schedule | None = None
) -> tuple:
    operands = offsets[None], indices[None]
    out = bind(transpose_structure_p, *operands, size=size, schedule=schedule)
    return tuple(jnp.squeeze(x, 0) for x in out)


@partial(jax.jit, static_argnames="nnz", inline=True)
def valid(offsets: jax.Array, nnz: int) -> jax.Array:
    return jnp.squeeze(bind(valid_offsets_p, offsets[None], nnz=nnz, schedule=None), 0)
