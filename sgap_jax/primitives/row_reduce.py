"""Reductions over the stored entries of each row, and their adjoint, the broadcast to entries."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR
from sgap_jax.formats.vectors import split_blocks
from sgap_jax.primitives._define import (
    accumulator,
    bind,
    check_schedule,
    check_sparse,
    define,
    ffi_lowering,
    out_aval,
    resolve,
    row_of_entry,
)
from sgap_jax.runtime import launch, nvrtc
from sgap_jax.runtime.kernel_call import KernelCall
from sgap_jax.runtime.row_reduce_cuda import launch_plan
from sgap_jax.schedules import AtomicParallelism, CpuTile, Problem, Schedule


def row_sum(A: SparseArray, *, schedule: Schedule | None = None) -> jax.Array:
    """Sum of the stored entries of each row: s[i] = sum over stored (i, j) of A[i, j].

    Differentiable to any order in A.values.

    Args:
      A: sparse [m, k] in CSR, CSC, COO, CVS or BCSR; float32, float64, bfloat16 or float16.
      schedule: how to run; None lets `choose_schedule` pick.

    Returns:
      s [m] in A's dtype, zero for a row without entries. Accumulates in float32 (float64 for
      float64); the same bits at each call, on the CPU for any number of threads.

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      NotImplementedError: no kernel for this dtype or platform with this schedule.

    Source: Sgap, section 2.1 (segment reduction over the rows).
    """
    return _reduce("row_sum", row_sum_p, A, schedule)


def row_max(A: SparseArray, *, schedule: Schedule | None = None) -> jax.Array:
    """Maximum of the stored entries of each row: s[i] = max over stored (i, j) of A[i, j].

    Entries that are not stored do not take part (SciPy counts them as zeros). NaN propagates.
    Differentiable to any order in A.values; entries that tie share the gradient equally, as in
    `jnp.max`.

    Args:
      A: sparse [m, k] in CSR, CSC, COO, CVS or BCSR; float32, float64, bfloat16 or float16.
      schedule: how to run; None lets `choose_schedule` pick.

    Returns:
      s [m] in A's dtype, -infinity for a row without entries. Exact, hence reproducible.

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      NotImplementedError: no kernel for this dtype or platform with this schedule.

    Source: Sgap, section 2.1 (segment reduction over the rows).
    """
    return _reduce("row_max", row_max_p, A, schedule)


def _reduce(op: str, primitive: Any, A: SparseArray, schedule: Schedule | None) -> jax.Array:
    check_sparse(op, "A", A)
    check_schedule(op, schedule)
    return _rows(split_blocks(A), primitive=primitive, schedule=schedule)


@partial(jax.jit, static_argnames=("primitive", "schedule"), inline=True)
def _rows(A: SparseArray, *, primitive: Any, schedule: Schedule | None) -> jax.Array:
    A = A.asformat(CSR)
    return bind(primitive, A.values[None], A.row_offsets, schedule=schedule)[0]


def bind_row_sum(values: Any, offsets: Any, schedule: Schedule | None) -> Any:
    return bind(row_sum_p, values, offsets, schedule=schedule)


def bind_row_broadcast(rows: Any, offsets: Any, nnz: int, schedule: Schedule | None) -> Any:
    return bind(row_broadcast_p, rows, offsets, nnz=nnz, schedule=schedule)


# row_sum_p, row_max_p: values [B, nnz], offsets [m+1] -> [B, m]
# row_broadcast_p: rows [B, m], offsets [m+1] -> [B, nnz]; padding entries get zero


def _row_problem(op: str, ctx: Any, nnz: int, platform: str) -> Problem:
    (out,), offsets = ctx.avals_out, ctx.avals_in[-1]
    # The columns do not take part, so their number is left at zero.
    shape = (offsets.shape[0] - 1, 0)
    return Problem(op, shape, nnz, 1, out.shape[0], out.dtype.name, platform=platform)


def row_lowering(
    op: str, stem: str, ctx: Any, operands: tuple, nnz: int, schedule: Any, **attrs: Any
) -> Any:
    """The CPU kernel of an op on rows, cut into tasks as its schedule says."""
    tile = resolve(schedule, _row_problem(op, ctx, nnz, "cpu"), CpuTile)
    attrs["chunk_nonzeros"] = tile.nonzeros
    return ffi_lowering(f"sgap_{stem}_csr_v1", ctx, operands, ctx.avals_in, **attrs)


def row_launch_lowering(
    op: str,
    ctx: Any,
    operands: tuple,
    nnz: int,
    schedule: Any,
    plan: Callable[[Problem, AtomicParallelism], KernelCall],
) -> Any:
    """The CUDA kernel of an op on rows, launched as `plan` says."""
    problem = _row_problem(op, ctx, nnz, "cuda")
    call = plan(problem, resolve(schedule, problem, AtomicParallelism))
    return launch.lower(ctx, call, operands, compiler=nvrtc)


def _reduce_abstract_eval(values: Any, offsets: Any, *, schedule: Any) -> Any:
    return out_aval(values, (values.shape[0], offsets.shape[0] - 1), values.dtype)


def _broadcast_abstract_eval(rows: Any, offsets: Any, *, nnz: int, schedule: Any) -> Any:
    assert rows.shape[1] == offsets.shape[0] - 1
    return out_aval(rows, (rows.shape[0], nnz), rows.dtype)


def _segments(values: Any, offsets: Any, reduce: Any) -> Any:
    m = offsets.shape[0] - 1
    rows = row_of_entry(offsets, values.shape[1])
    wide = accumulator(values.dtype)

    def one(v: Any) -> Any:
        return reduce(v.astype(wide), rows, num_segments=m, indices_are_sorted=True)

    return jax.vmap(one)(values).astype(values.dtype)


def _row_sum_reference(values: Any, offsets: Any, *, schedule: Any) -> Any:
    return _segments(values, offsets, jax.ops.segment_sum)


def _row_max_reference(values: Any, offsets: Any, *, schedule: Any) -> Any:
    return _segments(values, offsets, jax.ops.segment_max)


def _row_broadcast_reference(rows: Any, offsets: Any, *, nnz: int, schedule: Any) -> Any:
    m = offsets.shape[0] - 1
    if m == 0:
        return jnp.zeros((rows.shape[0], nnz), rows.dtype)
    row = row_of_entry(offsets, nnz)
    return jnp.where(row < m, rows[:, jnp.minimum(row, m - 1)], 0).astype(rows.dtype)


def _reduce_cpu(op: str) -> Any:
    def cpu(ctx: Any, *operands: Any, schedule: Schedule | None) -> Any:
        return row_lowering(op, op, ctx, operands, ctx.avals_in[0].shape[1], schedule)

    return cpu


def _reduce_cuda(op: str) -> Any:
    def cuda(ctx: Any, *operands: Any, schedule: Schedule | None) -> Any:
        nnz = ctx.avals_in[0].shape[1]
        return row_launch_lowering(op, ctx, operands, nnz, schedule, launch_plan)

    return cuda


def _broadcast_cpu(ctx: Any, *operands: Any, nnz: int, schedule: Schedule | None) -> Any:
    return row_lowering("row_broadcast", "row_broadcast", ctx, operands, nnz, schedule)


def _broadcast_cuda(ctx: Any, *operands: Any, nnz: int, schedule: Schedule | None) -> Any:
    return row_launch_lowering("row_broadcast", ctx, operands, nnz, schedule, launch_plan)


def _row_sum_jvp(primals: Any, tangents: Any, *, schedule: Any) -> tuple:
    values, offsets = primals
    (dvalues,) = tangents
    out = bind_row_sum(values, offsets, schedule)
    return out, None if dvalues is None else bind_row_sum(dvalues, offsets, schedule)


def _row_sum_transpose(
    cotangent: Any, values: Any, offsets: Any, *, schedule: Any
) -> tuple[int, Any]:
    return 0, bind_row_broadcast(cotangent, offsets, values.aval.shape[1], schedule)


def _row_broadcast_jvp(primals: Any, tangents: Any, *, nnz: int, schedule: Any) -> tuple:
    rows, offsets = primals
    (drows,) = tangents
    out = bind_row_broadcast(rows, offsets, nnz, schedule)
    return out, None if drows is None else bind_row_broadcast(drows, offsets, nnz, schedule)


def _row_broadcast_transpose(
    cotangent: Any, rows: Any, offsets: Any, *, nnz: int, schedule: Any
) -> tuple[int, Any]:
    return 0, bind_row_sum(cotangent, offsets, schedule)


def _row_max_jvp(primals: Any, tangents: Any, *, schedule: Any) -> tuple:
    # The derivative picks the entries that attain the maximum, and shares it among those that tie.
    # In a row with NaN it is NaN in every entry, as that of jnp.max.
    values, offsets = primals
    (dvalues,) = tangents
    out = bind(row_max_p, values, offsets, schedule=schedule)
    if dvalues is None:
        return out, None
    spread = bind_row_broadcast(out, offsets, values.shape[1], schedule)
    attains = (values == spread) | jnp.isnan(spread)
    wide = accumulator(values.dtype)  # float16 cannot count beyond 65504
    ties = bind_row_sum(attains.astype(wide), offsets, schedule)
    picked = bind_row_sum(jnp.where(attains, dvalues, 0).astype(wide), offsets, schedule)
    shares = jnp.where(jnp.isnan(out), jnp.nan, jnp.maximum(ties, 1))
    return out, (picked / shares).astype(values.dtype)


row_sum_p = define(
    "row_sum",
    data=1,
    abstract_eval=_reduce_abstract_eval,
    reference=_row_sum_reference,
    cpu=_reduce_cpu("row_sum"),
    jvp=_row_sum_jvp,
    transpose=_row_sum_transpose,
    cuda=_reduce_cuda("row_sum"),
)
row_max_p = define(
    "row_max",
    data=1,
    abstract_eval=_reduce_abstract_eval,
    reference=_row_max_reference,
    cpu=_reduce_cpu("row_max"),
    jvp=_row_max_jvp,
    transpose=None,
    cuda=_reduce_cuda("row_max"),
)
row_broadcast_p = define(
    "row_broadcast",
    data=1,
    abstract_eval=_broadcast_abstract_eval,
    reference=_row_broadcast_reference,
    cpu=_broadcast_cpu,
    jvp=_row_broadcast_jvp,
    transpose=_row_broadcast_transpose,
    cuda=_broadcast_cuda,
)
