"""Message passing: C[i, :] = reduce over the stored (i, j) of (X[j, :] op A[i, j])."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from sgap_jax.formats import vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag
from sgap_jax.formats.levels import CSR
from sgap_jax.launch.gspmm import extremum_plan, merge_plan, places, sums_plan
from sgap_jax.primitives._define import (
    accumulator,
    bind,
    by_default,
    check_dense,
    check_schedule,
    check_sparse,
    compact_structure,
    define,
    derived,
    entries_that_count,
    ffi_lowering,
    is_linear_operand,
    joint_batch,
    launch_lowering,
    out_aval,
    resolve,
    row_of_entry,
    static_of,
    structure,
    transposed,
)
from sgap_jax.primitives._incidence import (
    entries_by_rows,
    in_order,
    incidence,
)
from sgap_jax.primitives._partition import Axes
from sgap_jax.primitives._vectors import by_rows
from sgap_jax.primitives.gspmm_arg_gather import bind_arg_gather, elements
from sgap_jax.primitives.row_reduce import check_entry_values, row_sum
from sgap_jax.primitives.spmm import direction, kernel_operands, spmm
from sgap_jax.schedules import AtomicParallelism, CpuTile, Schedule

Op = Literal["mul", "add", "sub", "div", "copy"]
Reduction = Literal["sum", "mean", "max", "min"]
OPS: tuple[str, ...] = get_args(Op)
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


def gspmm(
    A: SparseArray,
    X: Any,
    *,
    values: Any = None,
    op: Op = "mul",
    reduce: Reduction = "sum",
    transpose: bool = False,
    schedule: Schedule | str | None = None,
) -> jax.Array:
    """Messages along the stored entries, reduced over each row.

        C[i, l] = reduce over the stored entries (i, j) of (X[j, l] op A[i, j])

    With `transpose` the messages go the other way: C[j, l] reduces X[i, l] op A[i, j] over the
    stored entries (i, j) of column j. With `values` [nnz, n] an entry has a vector, and its message
    is X[j, l] op values[e, l]. Nodes and entries may have more axes, or fewer, that broadcast from
    the last one on, as in DGL and NumPy: X [k, heads, d] with values [nnz, heads, 1] has one weight
    for each head.

    Differentiable to any order in `A.values`, values and X, forward and reverse. The gradient of a
    maximum or minimum goes to the first entry (in the order of the values) that attains it, as in
    DGL; `row_max` and `einsum` share it.

    Args:
      A: sparse [m, k] in CSR, CSC, COO, CVS or BCSR; every element of a vector or block is an
        entry, zeros too; float32, float64, bfloat16 or float16 have kernels, other dtypes run in
        plain JAX.
      X: dense [k, n], or [m, n] with `transpose`; any n, zero included. Or [k, ...] with any other
        axes: none, for one number of each node, or heads and columns.
      values: [nnz] or, of a matrix in CSR, CSC or COO, [nnz, n] or [nnz, ...], in place of A.values
        and in their order. The messages are not stored, and a value for several columns is not
        repeated: each head is a product of its own, of one batch.
      op: "mul" (X * a), "add" (X + a), "sub" (X - a), "div" (X / a, as a product with the rounded
        1 / a) or "copy" (X alone; A.values are not read).
      reduce: "sum", "mean" (the sum over the number of stored entries), "max" or "min".
      transpose: pass messages along A^T.
      schedule: how to run, or its text; None lets `choose_schedule` pick. Sums and means run as
        `spmm` does and take its schedules.

    Returns:
      C [m, n] ([k, n] with `transpose`), or [m, ...] with the axes that X and values have jointly
      (those of X for "copy"), in the promoted dtype of A and X (that of X for "copy").
      Sums are carried in float32 (float64 for float64), messages are compared there, and the result
      is rounded once; "add" and "sub" sum X and A.values separately. On the CPU the result is the
      same bits for any number of threads. Rows without entries are zero for every reduction, as in
      DGL and PyG (`row_max` and `einsum` give -infinity). NaN propagates, in "max" and "min" too,
      and only to rows that store an entry for it.

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      ValueError: an op or a reduction that is not one of these, or X or values
        have the wrong shape; ScheduleError for an illegal schedule.
      NotImplementedError: no kernel for this dtype, format or platform with this schedule.

    Source: Sgap, section 2.1 (the message-passing form of SpMM).
    """
    check_sparse("gspmm", "A", A)
    schedule = check_schedule("gspmm", schedule)
    check_choice("gspmm", "op", op, OPS)
    check_choice("gspmm", "reduce", reduce, REDUCTIONS)
    transpose = check_flag(transpose, "transpose", "gspmm")
    rows = A.shape[0] if transpose else A.shape[1]
    options: Any = dict(op=op, reduce=reduce, transpose=transpose, schedule=schedule)
    X = check_dense("gspmm", "X", X, (rows, "n" if jnp.ndim(X) == 2 else "..."))
    if values is not None:
        if jnp.ndim(values) == 1:
            A, values = A.with_values(values), None
        else:
            values = _broadcasting("gspmm", A, values, X.shape[1:])
        if op == "copy":  # the values are not read
            values = None
    if X.ndim != 2 or (values is not None and values.shape[1:] != X.shape[1:]):
        return _gspmm_of_axes(A, X, values, **options)
    if values is None:
        return _gspmm(A, X, **options)
    return _gspmm_vectors(A, X, values, **options)


def _broadcasting(op: str, A: SparseArray, values: Any, tail: tuple) -> Any:
    """`values` as an array [nnz, ...] whose axes after the first broadcast with `tail`."""
    own = jnp.shape(values)[1:]
    if joint_axes(own, tail) is not None:
        return check_entry_values(op, "values", A, values, own)
    if own == tail[:-1]:
        want = ", ".join(map(str, (A.nnz, *tail)))
        raise ValueError(
            f"{op}: values must have shape [{want}], or axes that broadcast with these, got "
            f"{list(jnp.shape(values))}; values[..., None] is one for all "
            f"{tail[-1]} columns"
        )
    return check_entry_values(op, "values", A, values, tail)


def joint_axes(*tails: tuple) -> tuple | None:
    """The shape with which all of these broadcast, or None."""
    try:
        return tuple(jnp.broadcast_shapes(*tails))
    except ValueError:
        return None


# Of PyG, DGL and PyTorch.
_NAMES_ELSEWHERE = {
    **{"add": "sum", "amax": "max", "amin": "min", "avg": "mean"},
    **{"copy_u": "copy", "copy_src": "copy", "copy_lhs": "copy"},
    **{f"u_{op}_e": op for op in ("mul", "add", "sub", "div")},
    **{"u_mul_v": "mul", "u_dot_v": "mul", "u_add_v": "add", "v_sub_u": "sub", "v_div_u": "div"},
}


def check_choice(op: str, name: str, choice: Any, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        known = _NAMES_ELSEWHERE.get(choice) if isinstance(choice, str) else None
        same = f"; the name here is {known!r}" if known in choices else ""
        raise ValueError(f"{op}: {name} must be one of {', '.join(choices)}, got {choice!r}{same}")


def _dtypes(promoted: Any, op: str, reduce: str) -> tuple[Any, Any]:
    """The dtypes of the result and of its steps: several are in the accumulator's, and so rounded
    once."""
    divides = op == "div" or reduce == "mean"
    dtype = promoted
    if divides and not jnp.issubdtype(promoted, jnp.inexact):
        dtype = jnp.result_type(float)
    adds_up = op in ("add", "sub") and reduce in ("sum", "mean")
    return dtype, accumulator(dtype) if divides or adds_up else dtype


@partial(jax.jit, static_argnames=("op", "reduce", "transpose", "schedule"), inline=True)
def _gspmm(
    A: SparseArray, X: Any, *, op: str, reduce: str, transpose: bool, schedule: Schedule | None
) -> jax.Array:
    if A.format.block_shape:
        A = vectors.expand(A)
    elif not A.is_checked and A.format.levels[:2] != CSR.levels:
        A = A.asformat(CSR)  # sorted, so that positions in its values are those of the kernels
    adds, sums = op in ("add", "sub"), reduce in ("sum", "mean")
    dtype, wide = _dtypes(X.dtype if op == "copy" else jnp.result_type(A.values, X), op, reduce)
    A, X = A.with_values(message_values(A, op, wide)), X.astype(wide)
    if not sums:
        C = _extremum(A, X, adds, reduce == "min", transpose, schedule)
    elif adds:
        ones = A.with_values(jnp.ones(A.nnz, wide))
        # sum (x + a) = sum x + sum a
        added = row_sum(A.T if transpose else A, schedule=derived(schedule))
        C = spmm(ones, X, transpose=transpose, schedule=schedule) + added[:, None]
    else:
        C = spmm(A, X, transpose=transpose, schedule=schedule)
    if reduce == "mean":
        lengths = (A.T if transpose else A).row_lengths
        C = C / jnp.maximum(lengths, 1)[:, None].astype(wide)
    return C.astype(dtype)


@partial(jax.jit, static_argnames=("op", "reduce", "transpose", "schedule"), inline=True)
def _gspmm_vectors(
    A: SparseArray,
    X: Any,
    values: Any,
    *,
    op: str,
    reduce: str,
    transpose: bool,
    schedule: Schedule | None,
) -> jax.Array:
    adds, sums = op in ("add", "sub"), reduce in ("sum", "mean")
    dtype, wide = _dtypes(jnp.result_type(values, X), op, reduce)
    S, swapped, order = entries_by_rows(A)
    v, X, transpose = in_order(values, order).astype(wide), X.astype(wide), transpose != swapped
    if op == "sub":
        v = -v
    elif op == "div":  # the padding may hold zeros or NaN
        v = 1 / jnp.where(entries_that_count(S)[:, None], v, jnp.ones((), wide))
    schedule = by_default(schedule, wide)
    if adds and sums:
        ones = S.with_values(jnp.ones(S.nnz, wide))
        # sum (x + a) = sum x + sum a
        B = incidence(S.T if transpose else S, wide)
        C = spmm(ones, X, transpose=transpose, schedule=schedule)
        C += spmm(B, v, schedule=derived(schedule))
    else:
        params: dict = dict(transpose=transpose, add=adds, minimum=reduce == "min", sums=sums)
        params |= dict(shape=S.shape, positions=False, checked=S.is_checked, schedule=schedule)
        C = bind(gspmm_p, v[None], X[None], *structure(S), **params, **static_of(S))[0][0]
    if reduce == "mean":
        lengths = (S.T if transpose else S).row_lengths
        C = C / jnp.maximum(lengths, 1)[:, None].astype(wide)
    return C.astype(dtype)


@partial(jax.jit, static_argnames=("op", "reduce", "transpose", "schedule"), inline=True)
def _gspmm_of_axes(A: SparseArray, X: Any, values: Any, **options: Any) -> jax.Array:
    """Of nodes [k, ...] and, unless they are A's, values [nnz, ...] of any axes that broadcast."""
    if values is None:
        C = _gspmm(A, X.reshape(X.shape[0], math.prod(X.shape[1:])), **options)
        return C.reshape(C.shape[0], *X.shape[1:])
    tail = jnp.broadcast_shapes(X.shape[1:], values.shape[1:])
    X, values = (
        x.reshape(x.shape[0], *[1] * (len(tail) - x.ndim + 1), *x.shape[1:]) for x in (X, values)
    )
    # The axes along which the values of an entry differ, and the others.
    of_values = [i for i, size in enumerate(values.shape) if i > 0 and size != 1]
    others = [i for i in range(1, X.ndim) if i not in of_values]
    sizes, columns = ([tail[i - 1] for i in axes] for axes in (of_values, others))
    values = values.reshape(A.nnz, math.prod(sizes))
    if not of_values:
        return _gspmm_of_axes(A.with_values(values[:, 0]), X, None, **options)
    if math.prod(columns) == 1:
        X = jnp.broadcast_to(X, (X.shape[0], *tail)).reshape(X.shape[0], values.shape[1])
        C = _gspmm_vectors(A, X, values, **options)
        return C.reshape(C.shape[0], *tail)
    # One weight for many columns, those of a head say: a batch of products.
    order = [*of_values, 0, *others]
    shared = all(X.shape[i] == 1 for i in of_values)
    if not shared:
        X = jnp.broadcast_to(X, (X.shape[0], *tail))
    X = X.transpose(order)
    batch = () if shared else (values.shape[1],)
    X = X.reshape(*batch, X.shape[len(sizes)], math.prod(columns))
    product = lambda v, x: _gspmm(A.with_values(v), x, **options)  # noqa: E731
    C = jax.vmap(product, in_axes=(0, None if shared else 0))(values.T, X)
    return C.reshape(*sizes, C.shape[1], *columns).transpose(np.argsort(order))


def message_values(A: SparseArray, op: str, dtype: Any) -> jax.Array:
    """Values v, of the shape of A's, for which each message is X * v ("mul", "div", "copy") or
    X + v ("add", "sub")."""
    if op == "copy":
        return jnp.ones(A.values.shape, dtype)
    values = A.values.astype(dtype)
    if op == "div":
        # The padding may hold zeros or NaN, whose reciprocals would reach gradients.
        stored = entries_that_count(A if A.format.block_shape else by_rows(A)[0])
        stored = stored.reshape(-1, *(1,) * (values.ndim - 1))
        return 1 / jnp.where(stored, values, jnp.ones((), dtype))
    return -values if op == "sub" else values


def _extremum(
    A: SparseArray, X: Any, add: bool, minimum: bool, transpose: bool, schedule: Schedule | None
) -> Any:
    base, swapped = by_rows(A)
    schedule = by_default(schedule, X.dtype)
    (C,) = bind(
        gspmm_p,
        base.values[None],
        X[None],
        *structure(base),
        shape=base.shape,
        transpose=transpose != swapped,
        add=add,
        minimum=minimum,
        positions=False,
        checked=base.is_checked,
        schedule=schedule,
        **static_of(base),
    )
    return C[0]


# The primitive: values [B|1, nnz], x [B|1, k, n], row_offsets [m+1], column_indices [nnz],
# column_offsets [k+1], row_indices [nnz], permutation [nnz] -> the extrema [B, m, n] and, with
# `positions` (for the derivative), the arg-extrema [B, m, n] int32: the positions in the values,
# also for A^T, of the entries that attain them, -1 where there is none. Messages are x * v, or
# x + v with `add`. Values may be vectors, [B|1, nnz, n]; only then with `sums` the result is the
# sum of the products. `statistics`, which may be left out, as of spmm_p.


def _abstract_eval(
    values: Any, x: Any, *arrays: Any, shape: Any, transpose: bool, positions: bool, **params: Any
) -> tuple:
    (m, k), *_ = direction(shape, transpose, arrays)
    assert values.dtype == x.dtype and x.ndim == 3 and x.shape[1] == k
    assert values.ndim == 2 or values.shape[2] == x.shape[2]
    shape = (joint_batch(values.shape[0], x.shape[0]), m, x.shape[2])
    out, arg = out_aval(x, shape, x.dtype), out_aval(x, shape, jnp.dtype(jnp.int32))
    return (out, arg) if positions else (out,)


def _reference(
    values: Any,
    x: Any,
    *arrays: Any,
    shape: Any,
    transpose: bool,
    add: bool,
    minimum: bool,
    positions: bool,
    checked: bool,
    schedule: Any,
    sums: bool = False,
    statistics: tuple | None = None,
) -> tuple:
    (m, _), offsets, indices, permutation = direction(shape, transpose, arrays)
    nnz, batch = indices.shape[0], joint_batch(values.shape[0], x.shape[0])
    if nnz == 0 or m == 0 or x.shape[1] == 0:
        empty = jnp.zeros((batch, m, x.shape[2]), x.dtype)
        return (empty, jnp.full(empty.shape, -1, jnp.int32))[: 1 + positions]
    order = jnp.arange(nnz, dtype=jnp.int32) if permutation is None else permutation
    rows = row_of_entry(offsets, nnz)
    wide = accumulator(x.dtype)
    v = (values[..., None] if values.ndim == 2 else values)[:, order].astype(wide)
    gathered = x[:, indices].astype(wide)
    messages = v + gathered if add else v * gathered
    if sums:
        total = partial(jax.ops.segment_sum, segment_ids=rows, num_segments=m)
        return (jax.vmap(total)(messages).astype(x.dtype),)
    reduce = jax.ops.segment_min if minimum else jax.ops.segment_max
    segments = dict(num_segments=m, indices_are_sorted=True)

    def one(messages: Any) -> tuple:
        best = reduce(messages, rows, **segments)
        attains = (messages == best[rows]) | jnp.isnan(messages)
        arg = jax.ops.segment_min(jnp.where(attains, order[:, None], nnz), rows, **segments)
        found = arg < nnz
        return jnp.where(found, best, 0).astype(x.dtype), jnp.where(found, arg, -1)

    return jax.vmap(one)(messages)[: 1 + positions]


def _compact(values: Any, x: Any, *arrays: Any, shape: Any, **params: Any) -> list:
    arrays, entry, _ = compact_structure(shape, None, arrays)
    params |= dict(shape=shape, checked=True)
    best, *arg = bind(gspmm_p, values[:, entry], x, *arrays, **params)
    return [best, *(jnp.where(a < 0, a, entry[a]) for a in arg)]


def _cpu(
    ctx: Any,
    *operands: Any,
    shape: Any,
    transpose: bool,
    add: bool,
    minimum: bool,
    positions: bool,
    checked: bool,
    schedule: Schedule | None,
    sums: bool = False,
    statistics: tuple | None = None,
) -> Any:
    values, *avals = ctx.avals_in
    vectors = values.ndim == 3
    avals = [values.update(shape=values.shape[:2]), *avals]
    problem, operands, _ = kernel_operands("gspmm", avals, operands, shape, transpose, "cpu")
    tile = resolve(schedule, problem, CpuTile)
    out = ctx.avals_out[0]
    places = out.update(dtype=jnp.dtype(jnp.int32))
    if sums or not (positions or vectors):
        places = jax.core.ShapedArray((0,), places.dtype)
    attrs: dict = dict(add=add, minimum=minimum, chunk_nonzeros=tile.nonzeros)
    target = "sgap_gspmm_csr_v1"
    if vectors:
        target, attrs["sum"] = "sgap_gspmm_vectors_csr_v1", sums
    found = ffi_lowering(target, ctx.replace(avals_out=[out, places]), operands, **attrs)
    return found[: 1 + positions]


def _cuda(
    ctx: Any,
    *operands: Any,
    shape: Any,
    transpose: bool,
    add: bool,
    minimum: bool,
    positions: bool,
    checked: bool,
    schedule: Schedule | None,
    sums: bool = False,
    statistics: tuple | None = None,
) -> Any:
    values, *avals = ctx.avals_in
    vectors = values.ndim == 3
    problem, operands, avals = kernel_operands(
        "gspmm",
        (values.update(shape=values.shape[:2]), *avals),
        operands,
        shape,
        transpose,
        "cuda",
        statistics,
    )
    avals = (values, *avals[1:])
    point = resolve(schedule, problem, AtomicParallelism)
    batches = (values.shape[0], avals[-1].shape[0])
    out = ctx.avals_out[0]
    results = [out, out.update(dtype=jnp.dtype(jnp.int32))]
    if sums:
        call, results = sums_plan(problem, point, batches), results[:1]
    else:
        how: dict = dict(add=add, minimum=minimum, vectors=vectors, batches=batches)
        call = extremum_plan(problem, point, **how)
    if (count := places(problem, point)) is None:
        return launch_lowering(ctx, call, operands, avals, results)[: 1 + positions]
    parts = [x.update(shape=(problem.batch, count, problem.n)) for x in results]
    parts[0] = parts[0].update(dtype=jnp.dtype(accumulator(out.dtype)))
    found = launch_lowering(ctx, call, operands, avals, [*results, *parts])
    found, partial = found[: len(results)], found[len(results) :]
    merge = merge_plan(problem, point, minimum=None if sums else minimum)
    operands, avals = (*partial, operands[1], *found), (*parts, avals[1], *results)
    return launch_lowering(ctx, merge, operands, avals, results)[: 1 + positions]


def _jvp(
    primals: Any,
    tangents: Any,
    *,
    shape: Any,
    transpose: bool,
    add: bool,
    positions: bool,
    checked: bool,
    schedule: Any,
    minimum: bool,
    sums: bool = False,
    **of: Any,
) -> tuple:
    # The tangent of the message at the arg-extremum: d(x v) = dx v + x dv, d(x + v) = dx + dv.
    values, x, *arrays = primals
    dvalues, dx = tangents
    params: dict = dict(shape=shape, transpose=transpose, checked=checked, **of)
    params_of_it = dict(add=add, minimum=minimum, positions=True, schedule=schedule)
    if sums:
        params |= dict(params_of_it, positions=False, sums=True)
        product = lambda v, x: list(bind(gspmm_p, v, x, *arrays, **params))  # noqa: E731
        along_values = None if dvalues is None else product(dvalues, x)
        return product(values, x), along_values, None if dx is None else product(values, dx)
    out = bind(gspmm_p, *primals, **params, **params_of_it)
    params |= dict(schedule=derived(schedule))
    if values.ndim == 3:
        sources = jnp.asarray(arrays[1])
        if transpose:
            sources = jnp.minimum(row_of_entry(arrays[0], values.shape[1]), shape[0] - 1)
        return (
            out[: 1 + positions],
            *_attained(values, x, dvalues, dx, out[1], sources, add=add),
        )
    v, u = values, x
    if add:  # ones for all of a batch, which may be split
        v, u = (jnp.ones((1, *y.shape[1:]), y.dtype) for y in (values, x))
    return (
        out[: 1 + positions],
        None if dvalues is None else bind_arg_gather(dvalues, u, out[1], arrays, **params),
        None if dx is None else bind_arg_gather(v, dx, out[1], arrays, **params),
    )


def _attained(
    values: Any, x: Any, dvalues: Any, dx: Any, arg: Any, sources: Any, *, add: bool
) -> tuple[Any, Any]:
    """The tangents of the message of vectors at each arg-extremum: gathers of one element each."""
    if 0 in arg.shape or 0 in values.shape or 0 in x.shape:
        return None, None
    q = jnp.maximum(arg, 0)
    own = elements(sources[None, :, None], q)
    tangents: list = []
    for d, place, other, other_place in ((dvalues, q, x, own), (dx, own, values, q)):
        if d is None:
            tangents.append(None)
            continue
        moved = elements(d, place)
        if not add:
            moved *= elements(other, other_place)
        tangents.append(jnp.where(arg < 0, 0, moved).astype(x.dtype))
    return tangents[0], tangents[1]


def _transpose(cotangent: Any, values: Any, x: Any, *arrays: Any, **params: Any) -> tuple[int, Any]:
    """Of sums of products."""
    (d,) = cotangent
    shape, transpose, schedule = (params[name] for name in ("shape", "transpose", "schedule"))
    if is_linear_operand(x):
        params |= dict(transpose=not transpose, schedule=transposed(schedule))
        return 1, bind(gspmm_p, values, d, *arrays, **params)[0]
    ends = (x, d) if transpose else (d, x)
    of = dict(shape=shape, checked=params["checked"], schedule=derived(schedule))
    return 0, bind(gsddmm_p, *ends, *arrays, **of, add=False)


def _axes(operands: Sequence, results: Sequence, params: dict) -> Axes:
    values = "b" if len(operands[0].shape) == 2 else "b _ n"
    return Axes.of(f"{values}, b _ n -> b _ n, b _ n", operands, results)


# Its rules are in gsddmm.py, which imports this module.
gsddmm_p = Primitive("gsddmm")

gspmm_p = define(
    "gspmm",
    data=2,
    axes=_axes,
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=_cpu,
    jvp=_jvp,
    transpose=_transpose,
    cuda=_cuda,
    compact=_compact,
    multiple_results=True,
)
