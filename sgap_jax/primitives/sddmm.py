"""SDDMM: the dense-dense product X Y^T, sampled at the entries of a sparse array."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.primitives._define import (
    accumulator,
    bind,
    check_dense,
    check_scale,
    check_schedule,
    check_sparse,
    define,
    derived,
    ffi_lowering,
    is_linear_operand,
    joint_batch,
    out_aval,
    resolve,
    row_of_entry,
    structure,
)
from sgap_jax.primitives._vectors import Entries, by_rows, stored_values
from sgap_jax.runtime import launch, nvrtc
from sgap_jax.runtime.sddmm_cuda import launch_plan
from sgap_jax.runtime.vector_plans import VECTOR_PLANS
from sgap_jax.schedules import AtomicParallelism, CpuTile, Problem, Schedule


def sddmm(
    A: SparseArray,
    X: Any,
    Y: Any,
    *,
    scale: Any = None,
    weighted: bool = False,
    schedule: Schedule | None = None,
) -> SparseArray:
    """Sampled dense-dense matrix product: C = (X Y^T) at the stored entries of A.

        C[i, j] = scale * sum_l X[i, l] Y[j, l]      (times A[i, j] with `weighted`)

    Differentiable to any order in X, Y, scale and, with `weighted`, in A.values; the gradients in X
    and Y are products of SpMM.

    Args:
      A: sparse [m, k] in CSR, CSC, COO or CVS(V). Its structure says which entries are computed;
        its values are read only with `weighted`.
      X: dense [m, d]; float32, float64, bfloat16 or float16.
      Y: dense [k, d].
      scale: a scalar factor, or None.
      weighted: multiply each entry by A's value there.
      schedule: how to run; None lets `choose_schedule` pick.

    Returns:
      A SparseArray with A's structure and format, in the promoted dtype of X and Y (and A with
      `weighted`). Sums over d are carried in float32 (float64 for float64) and rounded once, before
      `scale` and the weights multiply them; the result is the same bits at each call, on the CPU
      for any number of threads. Padding entries of A get zero.

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      ValueError: X, Y or scale has the wrong shape; ScheduleError for an illegal schedule.
      NotImplementedError: no kernel for this dtype or platform with this schedule.

    Source: vectorSparse, section 2.2 (SDDMM); Sgap, section 2.1; the CUDA schedules are
    `AtomicParallelism` and, with CVS(V), `SubwarpTile`; the CPU schedule is `CpuTile`.
    """
    check_sparse("sddmm", "A", A)
    check_schedule("sddmm", schedule)
    X = check_dense("sddmm", "X", X, (A.shape[0], "d"))
    Y = check_dense("sddmm", "Y", Y, (A.shape[1], X.shape[1]))
    if scale is not None:
        scale = check_scale("sddmm", scale)
    return A.with_values(_sddmm(A, X, Y, scale, weighted=bool(weighted), schedule=schedule))


@partial(jax.jit, static_argnames=("weighted", "schedule"), inline=True)
def _sddmm(
    A: SparseArray, X: Any, Y: Any, scale: Any, *, weighted: bool, schedule: Schedule | None
) -> jax.Array:
    dtype = jnp.result_type(X, Y, A.values) if weighted else jnp.result_type(X, Y)
    base, swapped = by_rows(A)
    left, right = (Y, X) if swapped else (X, Y)
    values = bind_sddmm(
        left[None].astype(dtype),
        right[None].astype(dtype),
        *structure(base),
        shape=base.shape,
        vector_length=base.format.vector_length,
        schedule=schedule,
    )[0]
    if scale is not None:
        values = values * scale.astype(dtype)
    if weighted:
        values = values * stored_values(base).astype(dtype)
    return values


# Operands of the primitive: x [B|1, m, d], y [B|1, k, d], row_offsets [m+1], column_indices [nnz],
# column_offsets [k+1], row_indices [nnz], permutation [nnz]; the last three serve the derivatives.
# With `vector_length` V they are those of CVS(V), and the result is [B, vectors, V].


def bind_sddmm(*operands: Any, **params: Any) -> Any:
    return bind(sddmm_p, *operands, **params)


def _abstract_eval(
    x: Any,
    y: Any,
    *arrays: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    schedule: Any,
) -> Any:
    assert x.dtype == y.dtype and x.ndim == y.ndim == 3 and x.shape[2] == y.shape[2]
    assert (x.shape[1], y.shape[1]) == shape
    vector = () if vector_length is None else (vector_length,)
    stored = (joint_batch(x.shape[0], y.shape[0]), arrays[1].shape[0])
    return out_aval(x, stored + vector, x.dtype)


def _entries(
    x: Any, y: Any, *arrays: Any, shape: tuple[int, int], vector_length: int, schedule: Any
) -> Any:
    entries = Entries(arrays, shape, vector_length)
    params = dict(shape=shape, vector_length=None, schedule=schedule)
    return entries.vectors(bind_sddmm(x, y, *structure(entries.array), **params))


def _reference(
    x: Any, y: Any, *arrays: Any, shape: tuple[int, int], vector_length: None, schedule: Any
) -> Any:
    offsets, indices, *_ = arrays
    nnz = indices.shape[0]
    if nnz == 0 or 0 in shape:
        return jnp.zeros((joint_batch(x.shape[0], y.shape[0]), nnz), x.dtype)
    rows = row_of_entry(offsets, nnz)
    wide = accumulator(x.dtype)
    products = x[:, jnp.minimum(rows, shape[0] - 1)].astype(wide) * y[:, indices].astype(wide)
    stored = rows < shape[0]
    return jnp.where(stored, products.sum(-1), 0).astype(x.dtype)


def _kernel_operands(
    ctx: Any, x: Any, y: Any, arrays: Any, shape: tuple[int, int], length: int | None, platform: str
) -> tuple[Problem, tuple, tuple]:
    """What the kernels of all platforms are asked, their operands, and the avals of these."""
    x_aval, y_aval, *avals = ctx.avals_in
    problem = Problem(
        "sddmm",
        shape,
        nnz=avals[1].shape[0] * (length or 1),
        n=x_aval.shape[2],
        batch=joint_batch(x_aval.shape[0], y_aval.shape[0]),
        dtype=x_aval.dtype.name,
        format=str(CSR if length is None else CVS(length)),
        platform=platform,
    )
    return problem, (*arrays[:2], x, y), (*avals[:2], x_aval, y_aval)


def _cpu(
    ctx: Any,
    x: Any,
    y: Any,
    *arrays: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    schedule: Schedule | None,
) -> Any:
    problem, operands, avals = _kernel_operands(ctx, x, y, arrays, shape, vector_length, "cpu")
    tile = resolve(schedule, problem, CpuTile)
    target = f"sgap_sddmm_{'csr' if vector_length is None else 'cvs'}_v1"
    return ffi_lowering(target, ctx, operands, avals, chunk_nonzeros=tile.nonzeros)


def _cuda(
    ctx: Any,
    x: Any,
    y: Any,
    *arrays: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    schedule: Schedule | None,
) -> Any:
    problem, operands, avals = _kernel_operands(ctx, x, y, arrays, shape, vector_length, "cuda")
    plans, products = VECTOR_PLANS["sddmm"], (avals[2].shape[0], avals[3].shape[0])
    point = resolve(schedule, problem, AtomicParallelism, *plans)
    if not isinstance(point, AtomicParallelism):
        call = plans[type(point)](problem, point, products)
        return launch.lower(ctx, call, operands, avals, compiler=nvrtc)
    if vector_length is not None:
        return None  # points are of entries
    call = launch_plan(problem, point, products)
    return launch.lower(ctx, call, operands, avals, compiler=nvrtc)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    # d(X Y^T) = dX Y^T + X dY^T
    x, y, *arrays = primals
    dx, dy = tangents
    return (
        bind_sddmm(x, y, *arrays, **params),
        None if dx is None else bind_sddmm(dx, y, *arrays, **params),
        None if dy is None else bind_sddmm(x, dy, *arrays, **params),
    )


def _transpose(
    cotangent: Any, x: Any, y: Any, *arrays: Any, schedule: Any, **of: Any
) -> tuple[int, Any]:
    # With the sparse dC: dX = dC Y and dY = dC^T X
    from sgap_jax.primitives import spmm  # the pair is closed under transposition

    to_y = is_linear_operand(y)
    params = dict(transpose=to_y, schedule=derived(schedule))
    dense = x if to_y else y
    return int(to_y), bind(spmm.spmm_p, cotangent, dense, *arrays, **of, **params)


sddmm_p = define(
    "sddmm",
    data=2,
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=_cpu,
    jvp=_jvp,
    transpose=_transpose,
    cuda=_cuda,
    entries=_entries,
)
