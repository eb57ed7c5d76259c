"""Reductions over the stored entries of each row, and the transpose of the sum: the broadcast of a
value for each row to its entries."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import require_arrays
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.formats.stored import StoredArray
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.row_reduce import launch_plan
from sgap_jax.primitives._batch import joined
from sgap_jax.primitives._define import (
    accumulator,
    bind,
    by_default,
    check_dense,
    check_schedule,
    check_sparse,
    define,
    ffi_lowering,
    jax_lowering,
    launch_lowering,
    out_aval,
    resolve,
    row_of_entry,
)
from sgap_jax.primitives._incidence import in_order, incidence
from sgap_jax.primitives._partition import Axes
from sgap_jax.primitives.spmm import spmm
from sgap_jax.schedules import AtomicParallelism, CpuTile, Problem, Reference, Schedule
from sgap_jax.schedules.schedule import KERNEL_DTYPES

LONGEST = 1024  # features of a vector of an entry that the kernels take


def row_sum(
    A: SparseArray, *, values: Any = None, schedule: Schedule | str | None = None
) -> jax.Array:
    """Sum of the stored entries of each row: s[i] = sum over stored (i, j) of A[i, j].

    Differentiable to any order in A.values.

    Args:
      A: sparse [m, k] in CSR, CSC, COO, CVS or BCSR; float32, float64, bfloat16 or float16.
      values: [nnz] or, of a matrix in CSR, CSC or COO, vectors [nnz, d], in place of A.values and
        in their order; of vectors the result is [m, d].
      schedule: how to run, or its text; None lets `choose_schedule` pick.

    Returns:
      s [m] in A's dtype, zero for a row without entries. Accumulates in float32 (float64 for
      float64); the same bits at each call, on the CPU for any number of threads.

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      NotImplementedError: no kernel for this dtype or platform with this schedule.

    Source: Sgap, section 2.1 (segment reduction over the rows).
    """
    return _reduce("row_sum", row_sum_p, A, values, schedule)


def _row_sums(A: StoredArray, dtype: np.dtype, wide: np.dtype) -> jax.Array:
    """`row_sum` of values of any numeric dtype, for a result in `dtype`: computed in A's dtype
    where that is `dtype` and has a kernel, else in `wide`."""
    carried = A.dtype if A.dtype == dtype and dtype.name in KERNEL_DTYPES else wide
    schedule = None if carried.name in KERNEL_DTYPES else Reference()
    return row_sum(cast(SparseArray, A.astype(carried)), schedule=schedule)


StoredArray._row_sums = _row_sums


def row_max(
    A: SparseArray, *, values: Any = None, schedule: Schedule | str | None = None
) -> jax.Array:
    """Maximum of the stored entries of each row: s[i] = max over stored (i, j) of A[i, j].

    Entries that are not stored do not take part (SciPy counts them as zeros). NaN propagates.
    Differentiable to any order in A.values; entries that tie share the gradient equally, as in
    `jnp.max`.

    Args:
      A: sparse [m, k] in CSR, CSC, COO, CVS or BCSR; float32, float64, bfloat16 or float16.
      values: [nnz] or, of a matrix in CSR, CSC or COO, vectors [nnz, d], in place of A.values and
        in their order; of vectors the result is [m, d].
      schedule: how to run, or its text; None lets `choose_schedule` pick.

    Returns:
      s [m] in A's dtype, -infinity for a row without entries. Exact, hence reproducible.

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      NotImplementedError: no kernel for this dtype or platform with this schedule.

    Source: Sgap, section 2.1 (segment reduction over the rows).
    """
    return _reduce("row_max", row_max_p, A, values, schedule)


def _reduce(
    op: str, primitive: Any, A: SparseArray, values: Any, schedule: Schedule | str | None
) -> jax.Array:
    check_sparse(op, "A", A)
    schedule = check_schedule(op, schedule)
    if values is not None and jnp.ndim(values) == 1:
        A, values = A.with_values(values), None
    options = dict(nothing=-math.inf if primitive is row_max_p else 0.0, schedule=schedule)
    if values is None:
        return _rows(vectors.split_blocks(A), primitive=primitive, **options)
    values = check_entry_values(op, "values", A, values, ("d",))
    return _rows_of_vectors(A, values, primitive=primitive, **options)


@partial(jax.jit, static_argnames=("primitive", "nothing", "schedule"), inline=True)
def _rows(
    A: SparseArray, *, primitive: Any, nothing: float, schedule: Schedule | None
) -> jax.Array:
    A, _ = entries_of_rows(row_vectors(A), nothing)
    found = bind(primitive, A.values[None], A.row_offsets, **of_rows(A), schedule=schedule)[0]
    return found if found.ndim == 1 else joined(found)


def sums_of_vectors(A: SparseArray, values: jax.Array, schedule: Schedule | None) -> jax.Array:
    """`row_sum` of vectors [nnz, d] of any dtype: in one pass over them where they are in the order
    of the rows, else a product with the incidence matrix of rows and entries."""
    (m, _), d = A.shape, values.shape[1]
    schedule = by_default(schedule, values.dtype)
    in_order = A.format == CSR and A._every_entry_counts and schedule is None
    if not (in_order and isinstance(m, int) and isinstance(d, int) and 0 < d <= LONGEST):
        return spmm(incidence(A, values.dtype), values, schedule=schedule)
    of = dict(rows=m * d, vector_length=d, schedule=None, one_pass=True)
    return bind_row_sum(values[None], A.row_offsets, **of)[0]


def largest_or_zero(A: SparseArray, values: jax.Array) -> jax.Array:
    """`row_max` of vectors [nnz, d], but zero for a row without entries. Without derivatives."""
    (m, _), d = A.shape, values.shape[1]
    of = dict(rows=m * d, vector_length=d, schedule=None, or_zero=True)

    def masked(A: SparseArray, values: jax.Array) -> jax.Array:
        found = row_max(A, values=values)
        return jnp.where(A.row_lengths[:, None] > 0, found, jnp.zeros((), values.dtype))

    def as_they_are(A: SparseArray, values: jax.Array) -> jax.Array:
        return bind(row_max_p, values[None], A.row_offsets, **of)[0]

    if d == 0 or (not A._every_entry_counts and A.format != CSR):
        return masked(A, values)
    if not A._every_entry_counts:  # if all take part: no copy that masks some
        offsets, indices = vectors.well_formed(A).index_arrays[1]
        B = replace(A, index_arrays=((), (offsets, indices)))
        used = jnp.arange(A.nnz, dtype=jnp.int32) < offsets[-1]
        every = jnp.all((indices >= 0) | ~used)
        return jax.lax.cond(every, as_they_are, masked, B, values)
    A, order = in_row_order(A)
    return as_they_are(A, in_order(values, order))


@partial(jax.jit, static_argnames=("primitive", "nothing", "schedule"), inline=True)
def _rows_of_vectors(
    A: SparseArray, values: Any, *, primitive: Any, nothing: float, schedule: Schedule | None
) -> jax.Array:
    if primitive is row_sum_p:
        return sums_of_vectors(A, values, schedule)
    A, order = in_row_order(A)
    A, _ = entries_of_rows(replace(A, values=values if order is None else values[order]), nothing)
    (m, _), d = A.shape, values.shape[1]
    if d == 0:
        return jnp.zeros((m, 0), values.dtype)
    of = dict(rows=m * d, vector_length=d, schedule=schedule)
    return bind(primitive, A.values[None], A.row_offsets, **of)[0]


def in_row_order(A: SparseArray) -> tuple[SparseArray, Any]:
    """(S, order): the structure of A in CSR; its entry p is entry order[p] of A. None if both have
    the same order. To the primitives on rows, vectors [nnz, d] are those of a matrix of m d rows in
    CVS(d): lane l of block row i is feature l of row i."""
    if A.format == CSR:
        return A, None
    S = replace(A, values=jnp.arange(A.nnz, dtype=jnp.int32)).asformat(CSR)
    return S, S.values


def check_entry_values(op: str, name: str, A: SparseArray, values: Any, tail: tuple) -> Any:
    """`values` as an array [nnz, *tail], in which a string stands for any size, in the order of A's
    values; A is in CSR, CSC or COO."""
    if A.format.block_shape:
        raise NotImplementedError(
            f"{op}: {name}: vectors of entries need a matrix in CSR, CSC or COO, got {A.format}; "
            "use A.asformat(CSR)"
        )
    return check_dense(op, name, values, (A.nnz, *tail))


def row_vectors(A: SparseArray) -> SparseArray:
    """A if it is in CSR or CVS(V), else its entries in CSR: of vectors along columns a row has only
    single elements."""
    by_rows = require_arrays(A).format.vector_length is not None and A.format.modes[0] == 0
    return A if by_rows else A.asformat(CSR)


def entries_of_rows(A: SparseArray, nothing: float) -> tuple[SparseArray, Any]:
    """(A, part): an array of `row_vectors` as the primitives on rows need it, and the mask of the
    entries that take part, or None if all are known to.

    These primitives read no column indices. Hence the returned array has valid offsets, and the
    value `nothing` at entries that take no part.
    """
    if A._every_entry_counts:
        return A, None
    offsets, indices = vectors.well_formed(A).index_arrays[1]
    part = (indices >= 0).reshape(-1, *[1] * (A.values.ndim - 1))
    if jnp.issubdtype(A.dtype, jnp.integer):  # without an infinity
        nothing = min(max(nothing, jnp.iinfo(A.dtype).min), jnp.iinfo(A.dtype).max)
    values = jnp.where(part, A.values, jnp.asarray(nothing, A.dtype))
    return replace(A, values=values, index_arrays=((), (offsets, indices))), part


def of_rows(A: SparseArray) -> dict[str, Any]:
    """The parameters `rows` and `vector_length` of the primitives on rows, for an array of
    `row_vectors`."""
    return dict(rows=A.shape[0], vector_length=A.format.vector_length)


def bind_row_sum(values: Any, offsets: Any, **params: Any) -> Any:
    return bind(row_sum_p, values, offsets, **params)


def bind_row_broadcast(data: Any, offsets: Any, count: int, **params: Any) -> Any:
    return bind(row_broadcast_p, data, offsets, count=count, **params)


# row_sum_p, row_max_p: values [B, nnz], offsets [m+1] -> [B, m]
# With `or_zero` row_max_p gives zero, in place of -infinity, for a row without entries; that has no
# derivative here. With `one_pass` row_sum_p adds up vectors in one pass, in other bits on the CPU.
# row_broadcast_p: data [B, m], offsets [m+1] -> [B, nnz], `count` being nnz; padding gets zero
# `rows` is m. With `vector_length` V the arrays are those of CVS(V): values [B, vectors, V],
# offsets [ceil(m/V)+1], and `count` is the number of vectors. Where V divides m, rows are
# [B, m/V, V] in place of [B, m], since devices may split the lanes. Else rows past m, in the
# vectors of the last block row, are not read and get zero.


def value_shape(count: Any, vector_length: int | None) -> tuple:
    """The shape of the values of one element of the batch."""
    return (count,) if vector_length is None else (count, vector_length)


def _row_shape(rows: int, vector_length: int | None) -> tuple:
    """The shape of the rows of one element of the batch."""
    if vector_length is None or rows % vector_length:
        return (rows,)
    return rows // vector_length, vector_length


def axes_of_vectors(operands: Sequence, results: Sequence, params: dict) -> Axes:
    """The axes of an operation on the rows of a matrix: lanes of vectors are apart from each other,
    and split where V divides m."""
    data, rows, length = len(operands) - 1, params["rows"], params["vector_length"]
    if length is None or rows % length:
        return Axes.of(f"{', '.join('b' * data)} -> b", operands, results)

    def local(sizes: Mapping[str, int]) -> dict:
        own = sizes.get("h", 1)
        return params | dict(rows=rows // length * own, vector_length=own)

    vectors = ", ".join(["b _ h"] * data)
    return Axes.of(f"{vectors} -> b _ h", operands, results, local=local)


def _row_problem(
    op: str, ctx: Any, count: int, platform: str, *, rows: int, vector_length: int | None
) -> Problem:
    (out,) = ctx.avals_out
    return Problem(
        op,
        (rows, 0),  # the number of columns does not matter
        nnz=count * (vector_length or 1),
        batch=out.shape[0],
        dtype=out.dtype.name,
        format=CSR if vector_length is None else CVS(vector_length),
        platform=platform,
    )


def row_lowering(
    op: str, stem: str, ctx: Any, operands: tuple, count: int, schedule: Any, of: dict, **attrs: Any
) -> Any:
    """Lowers an operation on rows to its CPU kernel; the schedule says how large tasks are, and
    `of` is `of_rows`."""
    tile = resolve(schedule, _row_problem(op, ctx, count, "cpu", **of), CpuTile)
    attrs["chunk_nonzeros"] = tile.nonzeros
    target = f"sgap_{stem}_csr_v1"
    if of["vector_length"] is not None:
        target, attrs["rows"] = f"sgap_{stem}_cvs_v1", of["rows"]
    return ffi_lowering(target, ctx, operands, **attrs)


def row_launch_lowering(
    op: str,
    ctx: Any,
    operands: tuple,
    count: int,
    schedule: Any,
    of: dict,
    plan: Callable[[Problem, AtomicParallelism], KernelCall],
) -> Any:
    """Lowers an operation on rows to its CUDA kernel, with the launch plan that `plan` makes."""
    problem = _row_problem(op, ctx, count, "cuda", **of)
    call = plan(problem, resolve(schedule, problem, AtomicParallelism))
    return launch_lowering(ctx, call, operands)


def _reduce_abstract_eval(
    values: Any,
    offsets: Any,
    *,
    rows: int,
    vector_length: int | None,
    schedule: Any,
    or_zero: bool = False,
    one_pass: bool = False,
) -> Any:
    assert values.shape[2:] == value_shape(0, vector_length)[1:]
    return out_aval(values, (values.shape[0], *_row_shape(rows, vector_length)), values.dtype)


def _broadcast_abstract_eval(
    data: Any, offsets: Any, *, count: int, rows: int, vector_length: int | None, schedule: Any
) -> Any:
    assert data.shape[1:] == _row_shape(rows, vector_length)
    return out_aval(data, (data.shape[0], *value_shape(count, vector_length)), data.dtype)


def row_segments(reduce: Any, values: Any, offsets: Any) -> Any:
    """Reduces values [B, count, ...] over each block row: [B, block rows, ...], in the dtype of
    values; padding is left out."""
    blocks = offsets.shape[0] - 1
    block = row_of_entry(offsets, values.shape[1])
    return jax.vmap(lambda v: reduce(v, block, num_segments=blocks, indices_are_sorted=True))(
        values
    )


def row_spread(blocks: Any, offsets: Any, count: int) -> Any:
    """Broadcasts [B, block rows, ...] to the entries or vectors: [B, count, ...], zero in the
    padding."""
    if blocks.shape[1] == 0:
        return jnp.zeros((blocks.shape[0], count, *blocks.shape[2:]), blocks.dtype)
    block = row_of_entry(offsets, count)
    last = blocks.shape[1] - 1
    stored = (block <= last).reshape(1, -1, *[1] * (blocks.ndim - 2))
    return jnp.where(stored, blocks[:, jnp.minimum(block, last)], 0).astype(blocks.dtype)


def _reduce_reference(
    reduce: Any,
    values: Any,
    offsets: Any,
    *,
    rows: int,
    vector_length: int | None,
    schedule: Any,
    or_zero: bool = False,
    one_pass: bool = False,
) -> Any:
    out = row_segments(reduce, values.astype(accumulator(values.dtype)), offsets)
    if or_zero:
        filled = (jnp.diff(offsets) > 0).reshape(-1, *[1] * (out.ndim - 2))
        out = jnp.where(filled, out, jnp.zeros((), out.dtype))
    if vector_length is not None and rows % vector_length:
        out = out.reshape(out.shape[0], math.prod(out.shape[1:]))[:, :rows]
    return out.astype(values.dtype)


def _row_broadcast_reference(
    data: Any, offsets: Any, *, count: int, rows: int, vector_length: int | None, schedule: Any
) -> Any:
    if vector_length is not None and rows % vector_length:
        blocks = offsets.shape[0] - 1
        data = jnp.pad(data, ((0, 0), (0, blocks * vector_length - rows)))
        data = data.reshape(data.shape[0], blocks, vector_length)
    return row_spread(data, offsets, count)


def _reduce_cpu(op: str) -> Any:
    def cpu(
        ctx: Any,
        *operands: Any,
        schedule: Schedule | None,
        or_zero: bool = False,
        one_pass: bool = False,
        **of: Any,
    ) -> Any:
        stem = f"{op}_or_zero" if or_zero else f"{op}_one_pass" if one_pass else op
        return row_lowering(op, stem, ctx, operands, ctx.avals_in[0].shape[1], schedule, of)

    return cpu


def _reduce_cuda(op: str) -> Any:
    def cuda(
        ctx: Any,
        *operands: Any,
        schedule: Schedule | None,
        or_zero: bool = False,
        one_pass: bool = False,
        **of: Any,
    ) -> Any:
        count = ctx.avals_in[0].shape[1]
        found = row_launch_lowering(op, ctx, operands, count, schedule, of, launch_plan)
        if not or_zero:
            return found
        (out,) = ctx.avals_out

        def filled(rows: Any, offsets: Any) -> Any:
            own = (jnp.diff(offsets) > 0)[:, None]
            each = jnp.broadcast_to(own, (own.shape[0], of["vector_length"] or 1))
            each = each.reshape(-1)[: of["rows"]].reshape(out.shape[1:])
            return jnp.where(each, rows, jnp.zeros((), out.dtype))

        (found,) = found
        return jax_lowering(ctx, filled, [found, operands[1]], [out, ctx.avals_in[1]])

    return cuda


def _broadcast_cpu(
    ctx: Any, *operands: Any, count: int, schedule: Schedule | None, **of: Any
) -> Any:
    return row_lowering("row_broadcast", "row_broadcast", ctx, operands, count, schedule, of)


def _broadcast_cuda(
    ctx: Any, *operands: Any, count: int, schedule: Schedule | None, **of: Any
) -> Any:
    op = "row_broadcast"
    return row_launch_lowering(op, ctx, operands, count, schedule, of, launch_plan)


def _row_sum_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    values, offsets = primals
    (dvalues,) = tangents
    out = bind_row_sum(values, offsets, **params)
    return out, None if dvalues is None else bind_row_sum(dvalues, offsets, **params)


def _row_sum_transpose(
    cotangent: Any, values: Any, offsets: Any, *, one_pass: bool = False, **params: Any
) -> tuple[int, Any]:
    return 0, bind_row_broadcast(cotangent, offsets, values.aval.shape[1], **params)


def _row_broadcast_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    data, offsets = primals
    (ddata,) = tangents
    out = bind_row_broadcast(data, offsets, **params)
    return out, None if ddata is None else bind_row_broadcast(ddata, offsets, **params)


def _row_broadcast_transpose(
    cotangent: Any, data: Any, offsets: Any, *, count: int, **params: Any
) -> tuple[int, Any]:
    return 0, bind_row_sum(cotangent, offsets, **params)


def _row_max_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    # Entries that tie for the maximum share its derivative equally. In a row with NaN the
    # derivative is NaN at every entry, as that of jnp.max.
    values, offsets = primals
    (dvalues,) = tangents
    out = bind(row_max_p, values, offsets, **params)
    if dvalues is None:
        return out, None
    spread = bind_row_broadcast(out, offsets, values.shape[1], **params)
    attains = (values == spread) | jnp.isnan(spread)
    wide = accumulator(values.dtype)  # float16 cannot count beyond 65504
    ties = bind_row_sum(attains.astype(wide), offsets, **params)
    gathered = bind_row_sum(jnp.where(attains, dvalues, 0).astype(wide), offsets, **params)
    shares = jnp.where(jnp.isnan(out), jnp.nan, jnp.maximum(ties, 1))
    return out, (gathered / shares).astype(values.dtype)


row_sum_p = define(
    "row_sum",
    data=1,
    axes=axes_of_vectors,
    abstract_eval=_reduce_abstract_eval,
    reference=partial(_reduce_reference, jax.ops.segment_sum),
    cpu=_reduce_cpu("row_sum"),
    jvp=_row_sum_jvp,
    transpose=_row_sum_transpose,
    cuda=_reduce_cuda("row_sum"),
)
row_max_p = define(
    "row_max",
    data=1,
    axes=axes_of_vectors,
    abstract_eval=_reduce_abstract_eval,
    reference=partial(_reduce_reference, jax.ops.segment_max),
    cpu=_reduce_cpu("row_max"),
    jvp=_row_max_jvp,
    transpose=None,
    cuda=_reduce_cuda("row_max"),
)
row_broadcast_p = define(
    "row_broadcast",
    data=1,
    axes=axes_of_vectors,
    abstract_eval=_broadcast_abstract_eval,
    reference=_row_broadcast_reference,
    cpu=_broadcast_cpu,
    jvp=_row_broadcast_jvp,
    transpose=_row_broadcast_transpose,
    cuda=_broadcast_cuda,
)
