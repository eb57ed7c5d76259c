"""SDDMM: the dense-dense product X Y^T, sampled at the entries of a sparse array."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.formats.vectors import join_blocks
from sgap_jax.launch.sddmm import PLANS, launch_plan
from sgap_jax.launch.sddmm_operands import OperandShapes
from sgap_jax.primitives._define import (
    accumulator,
    at_places,
    bind,
    by_default,
    check_dense,
    check_scale,
    check_schedule,
    check_sparse,
    compact_structure,
    define,
    derived,
    ffi_lowering,
    is_linear_operand,
    joint_batch,
    launch_lowering,
    out_aval,
    resolve,
    row_of_entry,
    static_of,
    structure,
)
from sgap_jax.primitives._kept_lists import lists_of
from sgap_jax.primitives._vectors import Entries, as_listed, blocks_of, by_rows
from sgap_jax.schedules import AtomicParallelism, CpuTile, OctetTile, Problem, Schedule
from sgap_jax.schedules.tiles import CPU_TASK

# The transpose of SDDMM is an SpMM and the other way round: spmm.py defines the rules of this
# primitive, and imports bind_sddmm from here.
spmm_p = Primitive("spmm")


def sddmm(
    A: SparseArray,
    X: Any,
    Y: Any,
    *,
    scale: Any = None,
    weighted: bool = False,
    schedule: Schedule | str | None = None,
) -> SparseArray:
    """Sampled dense-dense matrix product: C = (X Y^T) at the stored entries of A.

        C[i, j] = scale * sum_l X[i, l] Y[j, l]      (times A[i, j] with `weighted`)

    Differentiable to any order in X, Y, scale and, with `weighted`, in A.values, whose gradient is
    an SDDMM; those in X and Y are SpMM products with the cotangent times weights and scale, in the
    dtype of the result.

    Args:
      A: sparse [m, k] in CSR, CSC, COO, CVS or BCSR. Its structure says which entries are computed;
        its values are read only with `weighted`.
      X: dense [m, d]; float32, float64, bfloat16 and float16 have kernels, other dtypes run in
        plain JAX.
      Y: dense [k, d].
      scale: a scalar factor, or None.
      weighted: multiply each entry by A's value there.
      schedule: how to run, or its text; None lets `choose_schedule` pick.

    Returns:
      A SparseArray with A's structure and format, in the promoted dtype of X and Y (and A with
      `weighted`). Sums over d are carried in float32 (float64 for float64), multiplied there by the
      weights and then by `scale`, and rounded once; the result is the same bits at each call, on
      the CPU for any number of threads. Padding entries of A get zero, whatever their values.

    Raises:
      TypeError: A is not a SparseArray, schedule is not a Schedule, or weighted is not a bool.
      ValueError: X, Y or scale has the wrong shape; ScheduleError for an illegal schedule.
      NotImplementedError: no kernel for this dtype or platform with this schedule.

    Source: vectorSparse, section 2.2 (SDDMM); Sgap, section 2.1; the CUDA schedules are
    `AtomicParallelism` and, with CVS(V), `OctetTile`, `SubwarpTile`, `WarpTile` and
    `PaperOctetTile`; the CPU schedules are `CpuTile` and, with CVS(V) of bfloat16,
    `OctetTile`.
    """
    check_sparse("sddmm", "A", A)
    schedule = check_schedule("sddmm", schedule)
    X = check_dense("sddmm", "X", X, (A.shape[0], "d"))
    Y = check_dense("sddmm", "Y", Y, (A.shape[1], X.shape[1]))
    if not isinstance(weighted, bool | np.bool_):
        raise TypeError(
            f"sddmm: weighted must be a bool, got {type(weighted).__name__}; the weights are A's "
            "values: A.with_values(w)"
        )
    if scale is not None:
        scale = check_scale("sddmm", scale)
        dtype = jnp.result_type(X, Y, A.values) if weighted else jnp.result_type(X, Y)
        if jnp.issubdtype(dtype, jnp.integer) and not jnp.issubdtype(scale.dtype, jnp.integer):
            raise ValueError(f"sddmm: scale must be an integer for {dtype}, got {scale.dtype}")
    return A.with_values(_sddmm(A, X, Y, scale, weighted=bool(weighted), schedule=schedule))


@partial(jax.jit, static_argnames=("weighted", "schedule"), inline=True)
def _sddmm(
    A: SparseArray, X: Any, Y: Any, scale: Any, *, weighted: bool, schedule: Schedule | None
) -> jax.Array:
    dtype = jnp.result_type(X, Y, A.values) if weighted else jnp.result_type(X, Y)
    base, swapped = by_rows(A)
    left, right = (Y, X) if swapped else (X, Y)
    if X.shape[1] == 0:  # empty sums are zeros, and stay so: no kernel sees 0 * infinity
        weighted, scale = False, None
    lists, named = lists_of(base)  # for the derivatives
    values = bind_sddmm(
        left[None].astype(dtype),
        right[None].astype(dtype),
        base.values[None].astype(dtype) if weighted else None,
        None if scale is None else scale.astype(accumulator(dtype)).reshape(1, 1),
        *structure(base),
        *lists,
        shape=base.shape,
        vector_length=base.format.vector_length,
        checked=base.is_checked,
        schedule=by_default(schedule, dtype),
        **static_of(base),
        **blocks_of(A),
        **named,
    )[0]
    return as_listed(A, join_blocks(A, values))


# Operands of the primitive: x [B|1, m, d], y [B|1, k, d], weights [B|1, nnz], scale [B|1, 1] of the
# accumulator's dtype, row_offsets [m+1], column_indices [nnz], column_offsets [k+1], row_indices
# [nnz], permutation [nnz]; the last three serve the derivatives. Absent weights, or an absent
# scale, are [1, 0]. With `vector_length` V the arrays are those of CVS(V), weights and result are
# [B, vectors, V], and absent weights [1, 0, 0].


def bind_sddmm(x: Any, y: Any, weights: Any, scale: Any, *arrays: Any, **params: Any) -> Any:
    """Binds the primitive; `weights` and `scale` may be None."""
    if weights is None:
        rank = 2 if params["vector_length"] is None else 3
        weights = jnp.zeros((1,) + (0,) * (rank - 1), x.dtype)
    if scale is None:
        scale = jnp.zeros((1, 0), accumulator(x.dtype))
    return bind(sddmm_p, x, y, weights, scale, *arrays, **params)


def _absent(factor: Any) -> bool:
    return 0 in factor.shape[1:]


def _abstract_eval(
    x: Any,
    y: Any,
    weights: Any,
    scale: Any,
    *arrays: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    checked: bool,
    schedule: Any,
    **of: Any,
) -> Any:
    assert x.dtype == y.dtype == weights.dtype and scale.dtype == accumulator(x.dtype)
    assert x.ndim == y.ndim == 3 and x.shape[2] == y.shape[2]
    assert (x.shape[1], y.shape[1]) == shape
    stored = arrays[1].shape + (() if vector_length is None else (vector_length,))
    assert weights.shape[1:] in (stored, (0,) * len(stored)) and scale.shape[1:] in ((0,), (1,))
    return out_aval(x, (_batch(x, y, weights, scale), *stored), x.dtype)


def _batch(*data: Any) -> int:
    return joint_batch(*(x.shape[0] for x in data))


def _entries(
    x: Any,
    y: Any,
    weights: Any,
    scale: Any,
    *arrays: Any,
    shape: tuple[int, int],
    vector_length: int,
    checked: bool,
    schedule: Any,
    **statistics: Any,
) -> Any:
    entries = Entries(arrays, shape, vector_length, checked)
    own = None if _absent(weights) else entries.values(weights)
    params = dict(shape=shape, vector_length=None, checked=checked, schedule=schedule)
    params |= statistics
    return entries.vectors(bind_sddmm(x, y, own, scale, *structure(entries.array), **params))


def _reference(
    x: Any,
    y: Any,
    weights: Any,
    scale: Any,
    *arrays: Any,
    shape: tuple[int, int],
    vector_length: None,
    checked: bool,
    schedule: Any,
    **of: Any,
) -> Any:
    offsets, indices, *_ = arrays
    nnz = indices.shape[0]
    if nnz == 0 or 0 in shape:
        return jnp.zeros((_batch(x, y, weights, scale), nnz), x.dtype)
    rows = row_of_entry(offsets, nnz)
    wide = accumulator(x.dtype)
    products = x[:, jnp.minimum(rows, shape[0] - 1)].astype(wide) * y[:, indices].astype(wide)
    stored = rows < shape[0]
    sums = _multiplied(products.sum(-1), weights, scale)
    return jnp.where(stored, sums, 0).astype(x.dtype)


def _compact(
    x: Any,
    y: Any,
    weights: Any,
    scale: Any,
    *arrays: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    checked: bool,
    schedule: Any,
    **statistics: Any,
) -> Any:
    arrays, entry, place = compact_structure(shape, vector_length, arrays)
    own = weights if _absent(weights) else weights[:, entry]
    params = dict(shape=shape, vector_length=vector_length, checked=True, schedule=schedule)
    params |= statistics
    return at_places(bind_sddmm(x, y, own, scale, *arrays, **params), place)


def _multiplied(sums: Any, weights: Any, scale: Any) -> Any:
    """Sums [B, ...] in the accumulator's dtype, times weights and scale where they are present."""
    if not _absent(weights):
        sums = sums * weights.astype(sums.dtype)
    if not _absent(scale):
        sums = sums * scale.reshape(-1, *(1 for _ in sums.shape[1:]))
    return sums


def _kernel_operands(
    ctx: Any, data: tuple, arrays: Any, shape: tuple[int, int], length: int | None, platform: str
) -> tuple[Problem, tuple, tuple]:
    """The problem, the operands that the kernels of all platforms take, and their avals."""
    data_avals, avals = ctx.avals_in[:4], ctx.avals_in[4:]
    problem = Problem(
        "sddmm",
        shape,
        nnz=avals[1].shape[0] * (length or 1),
        n=data_avals[0].shape[2],
        batch=_batch(*data_avals),
        dtype=data_avals[0].dtype.name,
        format=CSR if length is None else CVS(length),
        platform=platform,
    )
    return problem, (*arrays[:2], *data), (*avals[:2], *data_avals)


def _cpu(
    ctx: Any,
    *operands: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    checked: bool,
    schedule: Schedule | None,
    **of: Any,
) -> Any:
    data, arrays = operands[:4], operands[4:]
    problem, operands, _ = _kernel_operands(ctx, data, arrays, shape, vector_length, "cpu")
    tile = resolve(schedule, problem, CpuTile, OctetTile)
    if isinstance(tile, OctetTile):
        return ffi_lowering("sgap_sddmm_octet_v1", ctx, operands, chunk_nonzeros=CPU_TASK)
    assert isinstance(tile, CpuTile)
    target = f"sgap_sddmm_{'csr' if vector_length is None else 'cvs'}_v1"
    attrs = dict(chunk_nonzeros=tile.nonzeros)
    if tile.columns:
        attrs |= dict(block_rows=tile.columns)
    return ffi_lowering(target, ctx, operands, **attrs)


def _cuda(
    ctx: Any,
    *operands: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    checked: bool,
    schedule: Schedule | None,
    **of: Any,
) -> Any:
    data, arrays = operands[:4], operands[4:]
    problem, operands, avals = _kernel_operands(ctx, data, arrays, shape, vector_length, "cuda")
    found = resolve(schedule, problem, *PLANS)
    if isinstance(found, AtomicParallelism) and vector_length is not None:
        return None  # AtomicParallelism has kernels for entries only
    call = launch_plan(problem, found, OperandShapes(*(aval.shape for aval in avals[2:])))
    return launch_lowering(ctx, call, operands, avals)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    # The result is linear in each of x, y, weights and scale.
    data, arrays = primals[:4], primals[4:]
    of = [(*data[:i], tangent, *data[i + 1 :]) for i, tangent in enumerate(tangents)]
    return (
        bind_sddmm(*primals, **params),
        *(
            None if tangent is None else bind_sddmm(*each, *arrays, **params)
            for tangent, each in zip(tangents, of, strict=True)
        ),
    )


def _transpose(
    cotangent: Any, x: Any, y: Any, weights: Any, scale: Any, *arrays: Any, schedule: Any, **of: Any
) -> tuple[int, Any]:
    wide = accumulator(cotangent.dtype)
    if is_linear_operand(weights):
        return 2, bind_sddmm(x, y, cotangent, scale, *arrays, schedule=schedule, **of)
    if is_linear_operand(scale):
        # As weights, which are not read in the padding; in the accumulator's dtype, in which the
        # sums that the scale multiplies fit.
        own = _multiplied(cotangent.astype(wide), weights, jnp.zeros((1, 0), wide))
        x, y, schedule = x.astype(wide), y.astype(wide), derived(schedule)
        terms = bind_sddmm(x, y, own, None, *arrays, schedule=schedule, **of)
        return 3, terms.sum(range(1, terms.ndim))[:, None]
    # With the sparse dC, times weights and scale: dX = dC Y and dY = dC^T X
    values = _multiplied(cotangent.astype(wide), weights, scale).astype(cotangent.dtype)
    to_y = is_linear_operand(y)
    params = dict(transpose=to_y, schedule=derived(schedule))
    dense = x if to_y else y
    return int(to_y), bind(spmm_p, values, dense, *arrays, **of, **params)


sddmm_p = define(
    "sddmm",
    data=4,
    axes="b _ d, b _ d, b, b -> b",
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=_cpu,
    jvp=_jvp,
    transpose=_transpose,
    cuda=_cuda,
    entries=_entries,
    compact=_compact,
    lists=True,
)
