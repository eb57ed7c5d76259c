"""Softmax over the stored entries of each row."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR
from sgap_jax.formats.vectors import entries_format, join_blocks, split_blocks
from sgap_jax.primitives._define import (
    accumulator,
    bind,
    check_scale,
    check_schedule,
    check_sparse,
    define,
    joint_batch,
    out_aval,
    row_of_entry,
)
from sgap_jax.primitives._vectors import as_stored, stored_values
from sgap_jax.primitives.row_reduce import (
    bind_row_broadcast,
    bind_row_sum,
    row_launch_lowering,
    row_lowering,
)
from sgap_jax.runtime.sparse_softmax_cuda import jacobian_launch_plan, launch_plan
from sgap_jax.schedules import Schedule


def sparse_softmax(
    A: SparseArray, *, scale: Any = 1.0, schedule: Schedule | None = None
) -> SparseArray:
    """Softmax over the stored entries of each row.

        P[i, j] = exp(scale A[i, j]) / sum over stored (i, l) of exp(scale A[i, l])

    An entry that is not stored has probability zero. Rows without entries, and rows whose entries
    are all -infinity, give zeros and zero gradients rather than NaN; NaN or +infinity in a row
    gives NaN in that row. Differentiable to any order in A.values, and in `scale` if it is an
    array.

    Args:
      A: sparse [m, k] in CSR, CSC, COO, CVS or BCSR; float32, float64, bfloat16 or float16.
      scale: scalar factor inside the exponential; a Python number is fused into the kernel, an
        array multiplies the values first, in A's dtype.
      schedule: how to run; None lets `choose_schedule` pick.

    Returns:
      A SparseArray with A's structure, format and dtype. The maximum is subtracted first; sums are
      carried in float32 (float64 for float64); the same bits at each call, on the CPU for any
      number of threads. Padding entries of A get zero.

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      ValueError: scale is not a scalar.
      NotImplementedError: no kernel for this dtype or platform with this schedule.

    Source: vectorSparse, section 7.4 (the softmax of the sparse transformer).
    """
    check_sparse("sparse_softmax", "A", A)
    check_schedule("sparse_softmax", schedule)
    array = check_scale("sparse_softmax", scale)
    factor, scale = (array, 1.0) if isinstance(scale, jax.Array) else (None, float(scale))
    values = _softmax(split_blocks(A), factor, scale=scale, schedule=schedule)
    return A.with_values(join_blocks(A, values))


@partial(jax.jit, static_argnames=("scale", "schedule"), inline=True)
def _softmax(A: SparseArray, factor: Any, *, scale: float, schedule: Schedule | None) -> jax.Array:
    vectors = A.format.vector_length is not None
    csr = A.asformat(CSR)
    if factor is not None:
        csr = csr.with_values(stored_values(csr) * factor.astype(A.dtype))
    params = dict(scale=scale, schedule=schedule)
    values = bind(sparse_softmax_p, csr.values[None], csr.row_offsets, **params)[0]
    entries = csr.with_values(values).asformat(entries_format(A.format) if vectors else A.format)
    return as_stored(A, entries.values)


# sparse_softmax_p: values [B, nnz], offsets [m+1] -> [B, nnz]
# sparse_softmax_jacobian_p: p [B|1, nnz], t [B|1, nnz], offsets [m+1]
#   -> scale p (t - sum_row p t) [B, nnz]
# The Jacobian diag(p) - p p^T is symmetric, so one primitive serves forward and reverse.


def _abstract_eval(values: Any, offsets: Any, *, scale: float, schedule: Any) -> Any:
    return out_aval(values, values.shape, values.dtype)


def _jacobian_abstract_eval(p: Any, t: Any, offsets: Any, *, scale: float, schedule: Any) -> Any:
    assert p.dtype == t.dtype and p.shape[1] == t.shape[1]
    return out_aval(p, (joint_batch(p.shape[0], t.shape[0]), p.shape[1]), p.dtype)


def _reference(values: Any, offsets: Any, *, scale: float, schedule: Any) -> Any:
    m = offsets.shape[0] - 1
    if m == 0 or values.shape[1] == 0:
        return jnp.zeros_like(values)
    row = row_of_entry(offsets, values.shape[1])
    inside = jnp.minimum(row, m - 1)
    options = dict(num_segments=m, indices_are_sorted=True)

    def one(v: Any) -> Any:
        v = v.astype(accumulator(v.dtype)) * scale
        peak = jax.ops.segment_max(v, row, **options)
        # An all -infinity row would subtract infinities; shifting by zero makes it exp(-inf) = 0.
        e = jnp.exp(v - jnp.where(jnp.isneginf(peak), 0, peak)[inside])
        total = jax.ops.segment_sum(e, row, **options)[inside]
        return jnp.where((row < m) & (total != 0), e / jnp.where(total == 0, 1, total), 0)

    return jax.vmap(one)(values).astype(values.dtype)


def _jacobian_reference(p: Any, t: Any, offsets: Any, *, scale: float, schedule: Any) -> Any:
    m = offsets.shape[0] - 1
    shape = (joint_batch(p.shape[0], t.shape[0]), p.shape[1])
    if m == 0 or p.shape[1] == 0:
        return jnp.zeros(shape, p.dtype)
    row = row_of_entry(offsets, p.shape[1])
    wide = accumulator(p.dtype)
    dtype = p.dtype
    p, t = (jnp.broadcast_to(x.astype(wide), shape) for x in (p, t))
    dots = jax.vmap(lambda x: jax.ops.segment_sum(x, row, num_segments=m, indices_are_sorted=True))(
        p * t
    )
    out = scale * p * (t - dots[:, jnp.minimum(row, m - 1)])
    return jnp.where(row < m, out, 0).astype(dtype)


# The Jacobian has the schedules of the softmax.


def _cpu(ctx: Any, *operands: Any, scale: float, schedule: Schedule | None) -> Any:
    nnz, op = ctx.avals_in[0].shape[1], "sparse_softmax"
    return row_lowering(op, op, ctx, operands, nnz, schedule, scale=scale)


def _jacobian_cpu(ctx: Any, *operands: Any, scale: float, schedule: Schedule | None) -> Any:
    nnz, op = ctx.avals_in[0].shape[1], "sparse_softmax"
    return row_lowering(op, f"{op}_jacobian", ctx, operands, nnz, schedule, scale=scale)


def _cuda(ctx: Any, *operands: Any, scale: float, schedule: Schedule | None) -> Any:
    plan = partial(launch_plan, scale=scale)
    nnz = ctx.avals_in[0].shape[1]
    return row_launch_lowering("sparse_softmax", ctx, operands, nnz, schedule, plan)


def _jacobian_cuda(ctx: Any, *operands: Any, scale: float, schedule: Schedule | None) -> Any:
    p, t, _ = ctx.avals_in
    plan = partial(jacobian_launch_plan, scale=scale, batches=(p.shape[0], t.shape[0]))
    return row_launch_lowering("sparse_softmax", ctx, operands, p.shape[1], schedule, plan)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    values, offsets = primals
    (dvalues,) = tangents
    p = bind(sparse_softmax_p, values, offsets, **params)
    if dvalues is None:
        return p, None
    return p, bind(sparse_softmax_jacobian_p, p, dvalues, offsets, **params)


def _jacobian_jvp(primals: Any, tangents: Any, *, scale: float, schedule: Any) -> tuple:
    # J(p, t) = scale (p t - p sum(p t)), hence
    # dJ = scale (dp t - dp sum(p t) - p sum(dp t)) + J(p, dt)
    p, t, offsets = primals
    dp, dt = tangents
    params = dict(scale=scale, schedule=schedule)
    out = bind(sparse_softmax_jacobian_p, p, t, offsets, **params)

    def row_dot(a: Any, b: Any) -> Any:
        return bind_row_broadcast(
            bind_row_sum(a * b, offsets, schedule), offsets, p.shape[1], schedule
        )

    along_p = along_t = None
    if dp is not None:
        along_p = scale * (dp * t - dp * row_dot(p, t) - p * row_dot(dp, t))
    if dt is not None:
        along_t = bind(sparse_softmax_jacobian_p, p, dt, offsets, **params)
    return out, along_p, along_t


def _jacobian_transpose(
    cotangent: Any, p: Any, t: Any, offsets: Any, **params: Any
) -> tuple[int, Any]:
    return 1, bind(sparse_softmax_jacobian_p, p, cotangent, offsets, **params)


sparse_softmax_p = define(
    "sparse_softmax",
    data=1,
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
    abstract_eval=_jacobian_abstract_eval,
    reference=_jacobian_reference,
    cpu=_jacobian_cpu,
    jvp=_jacobian_jvp,
    transpose=_jacobian_transpose,
    cuda=_jacobian_cuda,
)
