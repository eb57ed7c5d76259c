"""Softmax over the stored entries of each row."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import export

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.structure import positions
from sgap_jax.formats.vectors import entries_format, join_blocks, split_blocks
from sgap_jax.launch.sparse_softmax import jacobian_launch_plan, launch_plan
from sgap_jax.primitives._define import (
    accumulator,
    bind,
    check_scale,
    check_schedule,
    check_sparse,
    define,
    entries_that_count,
    joint_batch,
    out_aval,
)
from sgap_jax.primitives._vectors import as_stored
from sgap_jax.primitives.row_reduce import (
    axes_of_vectors,
    bind_row_broadcast,
    bind_row_sum,
    check_entry_values,
    entries_of_rows,
    in_row_order,
    of_rows,
    row_launch_lowering,
    row_lowering,
    row_segments,
    row_spread,
    row_vectors,
    value_shape,
)
from sgap_jax.schedules import Schedule


@overload
def sparse_softmax(
    A: SparseArray, *, scale: Any = ..., schedule: Schedule | str | None = ...
) -> SparseArray: ...
@overload
def sparse_softmax(
    A: SparseArray, *, values: Any, scale: Any = ..., schedule: Schedule | str | None = ...
) -> jax.Array: ...
def sparse_softmax(
    A: SparseArray,
    *,
    values: Any = None,
    scale: Any = 1.0,
    schedule: Schedule | str | None = None,
) -> SparseArray | jax.Array:
    """Softmax over the stored entries of each row.

        P[i, j] = exp(scale A[i, j]) / sum over stored (i, l) of exp(scale A[i, l])

    An entry that is not stored has probability zero. Rows without entries, and rows whose entries
    are all -infinity, give zeros and zero gradients rather than NaN; NaN or +infinity in a row
    gives NaN in that row. Differentiable to any order in A.values, and in `scale` if it is an
    array.

    Args:
      A: sparse [m, k] in CSR, CSC, COO, CVS or BCSR; float32, float64, bfloat16 or float16.
      values: [nnz] or, of a matrix in CSR, CSC or COO, [nnz, ...] such as [nnz, H] or [nnz, H, 1]
        (the heads of graph attention), in place of A.values and in their order; each place of the
        other axes has a softmax of its own.
      scale: scalar factor inside the exponential; a Python number is fused into the kernel, an
        array multiplies the values first, in A's dtype.
      schedule: how to run, or its text; None lets `choose_schedule` pick.

    Returns:
      A SparseArray with A's structure, format and dtype; with `values` an array of their shape and
      dtype. The maximum is subtracted first; sums are
      carried in float32 (float64 for float64); the same bits at each call, on the CPU for any
      number of threads. Padding entries of A get zero.

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      ValueError: scale is not a scalar.
      NotImplementedError: no kernel for this dtype or platform with this schedule.

    Source: vectorSparse, section 7.4 (the softmax of the sparse transformer).
    """
    check_sparse("sparse_softmax", "A", A)
    schedule = check_schedule("sparse_softmax", schedule)
    array = check_scale("sparse_softmax", scale)
    factor, scale = (array, 1.0) if isinstance(scale, jax.Array) else (None, float(scale))
    of = dict(scale=scale, schedule=schedule)
    if values is not None:
        values = check_entry_values("sparse_softmax", "values", A, values, ("...",))
        if values.ndim == 1:
            return _softmax(A.with_values(values), factor, **of)
        vectors = math.prod(values.shape[1:])
        if export.is_symbolic_dim(vectors):
            # The length of a kernel's vectors is static, its batch is not.
            softmax = jax.vmap(lambda v: _softmax(A.with_values(v), factor, **of), 1, 1)
            return softmax(values.reshape(values.shape[0], vectors)).reshape(values.shape)
        return _softmax_of_vectors(A, values, factor, **of)
    values = _softmax(split_blocks(A), factor, **of)
    return A.with_values(join_blocks(A, values))


@partial(jax.jit, static_argnames=("scale", "schedule"), inline=True)
def _softmax(A: SparseArray, factor: Any, *, scale: float, schedule: Schedule | None) -> jax.Array:
    by_rows, zero = row_vectors(A), jnp.zeros((), A.dtype)
    of = of_rows(by_rows)
    if factor is not None:  # a NaN in the padding would reach the gradient of scale
        valid, part = entries_of_rows(by_rows, 0.0)
        stored = _stored(by_rows.values.shape[0], valid.row_offsets, **of)
        stored = stored if part is None else stored & part
        scaled = jnp.where(stored, by_rows.values, zero) * factor.astype(A.dtype)
        by_rows = by_rows.with_values(scaled)
    if scale == 0 and not A.is_checked:  # a scale of 0 would make -infinity NaN
        by_rows, scale = by_rows.with_values(by_rows.values * scale), 1.0
    by_rows, part = entries_of_rows(by_rows, -math.copysign(math.inf, scale))
    params = dict(scale=scale, **of, schedule=schedule)
    values = bind(sparse_softmax_p, by_rows.values[None], by_rows.row_offsets, **params)[0]
    if part is not None:  # a row with NaN has NaN only at entries that take part
        values = jnp.where(part, values, zero)
    if by_rows.format == A.format:
        return values
    entries = by_rows.with_values(values).asformat(entries_format(A.format))
    return as_stored(A, entries.values)


@partial(jax.jit, static_argnames=("scale", "schedule"), inline=True)
def _softmax_of_vectors(
    A: SparseArray, values: Any, factor: Any, *, scale: float, schedule: Schedule | None
) -> jax.Array:
    dtype, (m, _), shape = values.dtype, A.shape, values.shape
    if values.size == 0:
        return values
    values, H = values.reshape(shape[0], -1), math.prod(shape[1:])
    S, order = in_row_order(A)
    v, stored = values if order is None else values[order], entries_that_count(S)[:, None]
    if factor is not None:
        v = jnp.where(stored, v, 0).astype(dtype) * factor.astype(dtype)
    if scale == 0 and not S.is_checked:  # a scale of 0 would make -infinity NaN
        v, scale = v * scale, 1.0
    S, part = entries_of_rows(replace(S, values=v), -math.copysign(math.inf, scale))
    params: dict = dict(rows=m * H, vector_length=H, scale=scale, schedule=schedule)
    p = bind(sparse_softmax_p, S.values[None], S.row_offsets, **params)[0]
    if part is not None:
        p = jnp.where(part, p, jnp.zeros((), dtype))
    p = p if order is None else jnp.zeros_like(p).at[order].set(p, unique_indices=True)
    return p.reshape(shape)


# sparse_softmax_p: values [B, nnz], offsets [m+1] -> [B, nnz]
# sparse_softmax_jacobian_p: p [B|1, nnz], t [B|1, nnz], offsets [m+1]
#   -> scale p (t - sum_row p t) [B, nnz]
# With `vector_length` V the arrays are those of CVS(V), [B, vectors, V] in place of [B, nnz]: see
# row_reduce.py.
# The Jacobian diag(p) - p p^T is symmetric, so one primitive serves forward and reverse.


def _abstract_eval(
    values: Any, offsets: Any, *, scale: float, rows: int, vector_length: int | None, schedule: Any
) -> Any:
    assert values.shape[2:] == value_shape(0, vector_length)[1:]
    return out_aval(values, values.shape, values.dtype)


def _jacobian_abstract_eval(p: Any, t: Any, offsets: Any, **_: Any) -> Any:
    assert p.dtype == t.dtype and p.shape[1:] == t.shape[1:]
    return out_aval(p, (joint_batch(p.shape[0], t.shape[0]), *p.shape[1:]), p.dtype)


def _stored(count: Any, offsets: Any, rows: int, vector_length: int | None) -> Any:
    """bool [count] or [count, V]: whether a value belongs to a row, and is neither padding nor past
    the last row of the matrix."""
    vector = positions(count)
    if vector_length is None:
        return vector < offsets[-1]
    blocks = offsets.shape[0] - 1
    vector, lane = vector[:, None], positions(vector_length)[None]
    whole = (vector < offsets[blocks - 1]) | (lane < rows - (blocks - 1) * vector_length)
    return whole & (vector < offsets[-1])


def _reference(
    values: Any, offsets: Any, *, scale: float, rows: int, vector_length: int | None, schedule: Any
) -> Any:
    count = values.shape[1]
    if rows == 0 or count == 0:
        return jnp.zeros_like(values)
    v = values.astype(accumulator(values.dtype)) * scale
    peak = row_segments(jax.ops.segment_max, v, offsets)
    # An all -infinity row would subtract infinities; shifting by zero makes it exp(-inf) = 0.
    e = jnp.exp(v - row_spread(jnp.where(jnp.isneginf(peak), 0, peak), offsets, count))
    total = row_spread(row_segments(jax.ops.segment_sum, e, offsets), offsets, count)
    stored = _stored(count, offsets, rows, vector_length)[None] & (total != 0)
    return jnp.where(stored, e / jnp.where(total == 0, 1, total), 0).astype(values.dtype)


def _jacobian_reference(
    p: Any,
    t: Any,
    offsets: Any,
    *,
    scale: float,
    rows: int,
    vector_length: int | None,
    schedule: Any,
) -> Any:
    count, wide, dtype = p.shape[1], accumulator(p.dtype), p.dtype
    shape = (joint_batch(p.shape[0], t.shape[0]), *p.shape[1:])
    if rows == 0 or count == 0:
        return jnp.zeros(shape, dtype)
    p, t = (jnp.broadcast_to(x.astype(wide), shape) for x in (p, t))
    dots = row_spread(row_segments(jax.ops.segment_sum, p * t, offsets), offsets, count)
    stored = _stored(count, offsets, rows, vector_length)[None]
    return jnp.where(stored, scale * p * (t - dots), 0).astype(dtype)


# The Jacobian primitive takes the schedules of the softmax.


def _cpu(ctx: Any, *operands: Any, scale: float, schedule: Schedule | None, **of: Any) -> Any:
    count, op = ctx.avals_in[0].shape[1], "sparse_softmax"
    return row_lowering(op, op, ctx, operands, count, schedule, of, scale=scale)


def _jacobian_cpu(
    ctx: Any, *operands: Any, scale: float, schedule: Schedule | None, **of: Any
) -> Any:
    count, op = ctx.avals_in[0].shape[1], "sparse_softmax"
    return row_lowering(op, f"{op}_jacobian", ctx, operands, count, schedule, of, scale=scale)


def _cuda(ctx: Any, *operands: Any, scale: float, schedule: Schedule | None, **of: Any) -> Any:
    plan = partial(launch_plan, scale=scale)
    count, op = ctx.avals_in[0].shape[1], "sparse_softmax"
    return row_launch_lowering(op, ctx, operands, count, schedule, of, plan)


def _jacobian_cuda(
    ctx: Any, *operands: Any, scale: float, schedule: Schedule | None, **of: Any
) -> Any:
    p, t, _ = ctx.avals_in
    plan = partial(jacobian_launch_plan, scale=scale, batches=(p.shape[0], t.shape[0]))
    return row_launch_lowering("sparse_softmax", ctx, operands, p.shape[1], schedule, of, plan)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    values, offsets = primals
    (dvalues,) = tangents
    p = bind(sparse_softmax_p, values, offsets, **params)
    if dvalues is None:
        return p, None
    return p, bind(sparse_softmax_jacobian_p, p, dvalues, offsets, **params)


def _jacobian_jvp(primals: Any, tangents: Any, *, scale: float, **of: Any) -> tuple:
    # J(p, t) = scale (p t - p sum(p t)), hence
    # dJ = scale (dp t - dp sum(p t) - p sum(dp t)) + J(p, dt)
    p, t, offsets = primals
    dp, dt = tangents
    out = bind(sparse_softmax_jacobian_p, p, t, offsets, scale=scale, **of)

    def row_dot(a: Any, b: Any) -> Any:
        return bind_row_broadcast(bind_row_sum(a * b, offsets, **of), offsets, p.shape[1], **of)

    along_p = along_t = None
    if dp is not None:
        along_p = scale * (dp * t - dp * row_dot(p, t) - p * row_dot(dp, t))
    if dt is not None:
        along_t = bind(sparse_softmax_jacobian_p, p, dt, offsets, scale=scale, **of)
    return out, along_p, along_t


def _jacobian_transpose(
    cotangent: Any, p: Any, t: Any, offsets: Any, **params: Any
) -> tuple[int, Any]:
    return 1, bind(sparse_softmax_jacobian_p, p, cotangent, offsets, **params)


sparse_softmax_p = define(
    "sparse_softmax",
    data=1,
    axes=axes_of_vectors,
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=_cpu,
    jvp=_jvp,
    transpose=None,
    cuda=_cuda,
)
sparse_softmax_jacobian_p = define(
    "sparse_softmax_jacobian",
    data=2,
    axes=axes_of_vectors,
    abstract_eval=_jacobian_abstract_eval,
    reference=_jacobian_reference,
    cpu=_jacobian_cpu,
    jvp=_jacobian_jvp,
    transpose=_jacobian_transpose,
    cuda=_jacobian_cuda,
)
