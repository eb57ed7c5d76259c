"""Arg-extremum gather and its derivatives: the derivatives of `gspmm`'s maximum or minimum.

arg[i, l] = q is the position in the values of the entry that attains element (i, l), or -1. With
(i, j) the coordinates of entry q in the matrix that the messages go along (A, or A^T), consider the
trilinear form

    phi(w, X, D) = sum over i, l of w[q] X[j, l] D[i, l]

Its three partial derivatives are the primitives here: `arg_gather` [m, n] is d phi / dD,
`arg_gather_to_x` [k, n] d phi / dX and `arg_gather_to_values` [nnz] d phi / dw. Each is bilinear,
and its derivatives are the other two.

Where values are vectors, w[q] is w[q, l]: those derivatives are products of single elements of each
column, which `elements` takes and `add_elements`, its transpose, puts back.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.structure import positions
from sgap_jax.launch.gspmm import (
    arg_gather_plan,
    arg_gather_to_values_plan,
    arg_gather_to_x_plan,
    merge_plan,
    places,
)
from sgap_jax.primitives._define import (
    accumulator,
    at_places,
    bind,
    compact_structure,
    define,
    ffi_lowering,
    is_linear_operand,
    joint_batch,
    launch_lowering,
    out_aval,
    resolve,
    row_of_entry,
)
from sgap_jax.primitives.spmm import direction, kernel_operands
from sgap_jax.schedules import AtomicParallelism, CpuTile, Problem

# Operands: two of w [B|1, nnz], x [B|1, k, n] and d [B|1, m, n], in this order, then
# arg [B|1, m, n] int32 and the index arrays of spmm. With `transpose` the messages go along A^T:
# then x is [B|1, m, n] and d, arg are [B|1, k, n].


def bind_arg_gather(w: Any, x: Any, arg: Any, arrays: Sequence, **params: Any) -> Any:
    return bind(arg_gather_p, w, x, arg, *arrays, **params)


def _bind_to_x(w: Any, d: Any, arg: Any, arrays: Sequence, **params: Any) -> Any:
    return bind(arg_gather_to_x_p, w, d, arg, *arrays, **params)


def _bind_to_values(x: Any, d: Any, arg: Any, arrays: Sequence, **params: Any) -> Any:
    return bind(arg_gather_to_values_p, x, d, arg, *arrays, **params)


def _batch(*operands: Any) -> int:
    return joint_batch(*(x.shape[0] for x in operands))


def _ends_of_entries(arrays: Sequence, transpose: bool) -> tuple[Any, Any]:
    """For each entry its row of the result and its row of x; any row in the padding, to which no
    arg points."""
    row_offsets, column_indices, *_ = arrays
    nnz, m = column_indices.shape[0], row_offsets.shape[0] - 1
    rows = jnp.minimum(row_of_entry(row_offsets, nnz), max(m - 1, 0))
    return (column_indices, rows) if transpose else (rows, column_indices)


def _arg_gather_abstract_eval(
    w: Any, x: Any, arg: Any, *arrays: Any, shape: Any, transpose: bool, schedule: Any, **of: Any
) -> Any:
    (m, k), *_ = direction(shape, transpose, arrays)
    assert w.dtype == x.dtype and arg.shape[1:] == (m, x.shape[2]) and x.shape[1] == k
    return out_aval(x, (_batch(w, x, arg), *arg.shape[1:]), x.dtype)


def _to_x_abstract_eval(
    w: Any, d: Any, arg: Any, *arrays: Any, shape: Any, transpose: bool, schedule: Any, **of: Any
) -> Any:
    (m, k), *_ = direction(shape, transpose, arrays)
    assert w.dtype == d.dtype and d.shape[1:] == arg.shape[1:] and d.shape[1] == m
    return out_aval(d, (_batch(w, d, arg), k, d.shape[2]), d.dtype)


def _to_values_abstract_eval(x: Any, d: Any, arg: Any, *arrays: Any, **params: Any) -> Any:
    assert x.dtype == d.dtype and d.shape[1:] == arg.shape[1:] and x.shape[2] == d.shape[2]
    return out_aval(d, (_batch(x, d, arg), arrays[1].shape[0]), d.dtype)


def _over_batch(function: Any, *operands: Any) -> Any:
    size = _batch(*operands)
    return jax.vmap(function)(*(jnp.broadcast_to(x, (size, *x.shape[1:])) for x in operands))


def _arg_gather_reference(
    w: Any, x: Any, arg: Any, *arrays: Any, shape: Any, transpose: bool, schedule: Any, **of: Any
) -> Any:
    if w.shape[1] == 0 or 0 in x.shape:
        return jnp.zeros((_batch(w, x, arg), *arg.shape[1:]), x.dtype)
    _, sources = _ends_of_entries(arrays, transpose)
    wide = accumulator(x.dtype)

    def one(w: Any, x: Any, arg: Any) -> Any:
        q = jnp.maximum(arg, 0)
        product = w[q].astype(wide) * x[sources[q], jnp.arange(x.shape[1])[None]].astype(wide)
        return jnp.where(arg < 0, 0, product).astype(x.dtype)

    return _over_batch(one, w, x, arg)


def _to_x_reference(
    w: Any, d: Any, arg: Any, *arrays: Any, shape: Any, transpose: bool, schedule: Any, **of: Any
) -> Any:
    (_, k), *_ = direction(shape, transpose, arrays)
    if w.shape[1] == 0 or 0 in d.shape:
        return jnp.zeros((_batch(w, d, arg), k, d.shape[2]), d.dtype)
    rows, sources = _ends_of_entries(arrays, transpose)
    wide = accumulator(d.dtype)

    def one(w: Any, d: Any, arg: Any) -> Any:
        attains = arg[rows] == positions(w.shape[0])[:, None]
        products = jnp.where(attains, w[:, None].astype(wide) * d[rows].astype(wide), 0)
        return jax.ops.segment_sum(products, sources, num_segments=k).astype(d.dtype)

    return _over_batch(one, w, d, arg)


def _to_values_reference(
    x: Any, d: Any, arg: Any, *arrays: Any, shape: Any, transpose: bool, schedule: Any, **of: Any
) -> Any:
    nnz = arrays[1].shape[0]
    if nnz == 0 or 0 in d.shape or 0 in x.shape:
        return jnp.zeros((_batch(x, d, arg), nnz), d.dtype)
    rows, sources = _ends_of_entries(arrays, transpose)
    wide = accumulator(d.dtype)

    def one(x: Any, d: Any, arg: Any) -> Any:
        attains = arg[rows] == positions(nnz)[:, None]
        products = x[sources].astype(wide) * d[rows].astype(wide)
        return jnp.where(attains, products, 0).sum(-1).astype(d.dtype)

    return _over_batch(one, x, d, arg)


# With a compact structure, each `arg` becomes the place of its entry there, or -1 where the entry
# takes no part.


def _arg_gather_compact(w: Any, x: Any, arg: Any, *arrays: Any, **params: Any) -> Any:
    arrays, entry, place = compact_structure(params["shape"], None, arrays)
    return bind_arg_gather(
        w[:, entry], x, _placed(arg, place), arrays, **params | {"checked": True}
    )


def _to_x_compact(w: Any, d: Any, arg: Any, *arrays: Any, **params: Any) -> Any:
    arrays, entry, place = compact_structure(params["shape"], None, arrays)
    return _bind_to_x(w[:, entry], d, _placed(arg, place), arrays, **params | {"checked": True})


def _to_values_compact(x: Any, d: Any, arg: Any, *arrays: Any, **params: Any) -> Any:
    arrays, _, place = compact_structure(params["shape"], None, arrays)
    params |= {"checked": True}
    return at_places(_bind_to_values(x, d, _placed(arg, place), arrays, **params), place)


def _placed(arg: Any, place: Any) -> Any:
    return place.at[jnp.where(arg < 0, place.shape[0], arg)].get(mode="fill", fill_value=-1)


def _along(ctx: Any, op: str, platform: str, shape: Any, n: int, transpose: bool) -> Problem:
    (out,) = ctx.avals_out
    nnz, dtype = ctx.avals_in[4].shape[0], out.dtype.name
    return Problem(op, shape, nnz, n, out.shape[0], dtype, platform=platform, permuted=transpose)


def _arg_gather_cpu(
    ctx: Any,
    w: Any,
    x: Any,
    arg: Any,
    *arrays: Any,
    shape: Any,
    transpose: bool,
    schedule: Any,
    **_: Any,
) -> Any:
    problem = _along(ctx, "gspmm", "cpu", shape, ctx.avals_in[1].shape[2], transpose)
    return ffi_lowering(
        "sgap_gspmm_arg_gather_csr_v1",
        ctx,
        (w, *arrays[:2], x, arg),
        transposed=transpose,
        chunk_nonzeros=resolve(schedule, problem, CpuTile).nonzeros,
    )


def _to_x_operands(
    ctx: Any,
    operands: Sequence,
    shape: Any,
    transpose: bool,
    platform: str,
    statistics: tuple | None = None,
) -> tuple[Problem, tuple, tuple]:
    # The result has the rows of x, so the kernel goes along the transpose of the messages' matrix.
    w, d, arg, *arrays = operands
    w_aval, d_aval, arg_aval, *avals = ctx.avals_in
    problem, operands, avals = kernel_operands(
        "gspmm",
        (w_aval, d_aval, *avals),
        (w, d, *arrays),
        shape,
        not transpose,
        platform,
        statistics,
    )
    problem = replace(problem, batch=ctx.avals_out[0].shape[0])
    return problem, (*operands, arg), (*avals, arg_aval)


def _to_x_cpu(
    ctx: Any, *operands: Any, shape: Any, transpose: bool, schedule: Any, **of: Any
) -> Any:
    problem, operands, _ = _to_x_operands(ctx, operands, shape, transpose, "cpu")
    tile = resolve(schedule, problem, CpuTile)
    target = "sgap_gspmm_arg_gather_to_x_csr_v1"
    return ffi_lowering(target, ctx, operands, chunk_nonzeros=tile.nonzeros)


def _to_values_cpu(
    ctx: Any,
    x: Any,
    d: Any,
    arg: Any,
    *arrays: Any,
    shape: Any,
    transpose: bool,
    schedule: Any,
    **_: Any,
) -> Any:
    problem = _along(ctx, "sddmm", "cpu", shape, ctx.avals_in[0].shape[2], transpose)
    return ffi_lowering(
        "sgap_gspmm_arg_gather_to_values_csr_v1",
        ctx,
        (*arrays[:2], x, d, arg),
        transposed=transpose,
        chunk_nonzeros=resolve(schedule, problem, CpuTile).nonzeros,
    )


def _arg_gather_cuda(
    ctx: Any,
    w: Any,
    x: Any,
    arg: Any,
    *arrays: Any,
    shape: Any,
    transpose: bool,
    schedule: Any,
    **_: Any,
) -> Any:
    w_aval, x_aval, arg_aval, *avals = ctx.avals_in
    problem = _along(ctx, "gspmm", "cuda", shape, x_aval.shape[2], transpose)
    resolve(schedule, problem, AtomicParallelism)  # refuses dtypes without a kernel
    operands, avals = (w, *arrays[:2], x, arg), (w_aval, *avals[:2], x_aval, arg_aval)
    call = arg_gather_plan(problem, [a.shape[0] for a in (w_aval, x_aval, arg_aval)])
    return launch_lowering(ctx, call, operands, avals)


def _to_x_cuda(
    ctx: Any,
    *operands: Any,
    shape: Any,
    transpose: bool,
    schedule: Any,
    statistics: tuple | None = None,
    **of: Any,
) -> Any:
    problem, operands, avals = _to_x_operands(ctx, operands, shape, transpose, "cuda", statistics)
    point = resolve(schedule, problem, AtomicParallelism)
    batches = [avals[i].shape[0] for i in (0, -2, -1)]
    call = arg_gather_to_x_plan(problem, point, batches)
    if (count := places(problem, point)) is None:
        return launch_lowering(ctx, call, operands, avals)
    (out,) = ctx.avals_out
    sums = out.update(
        shape=(problem.batch, count, problem.n), dtype=jnp.dtype(accumulator(out.dtype))
    )
    found, partial = launch_lowering(ctx, call, operands, avals, [out, sums])
    merge = merge_plan(problem, point)
    return launch_lowering(ctx, merge, (partial, operands[1], found), (sums, avals[1], out), [out])


def _to_values_cuda(
    ctx: Any,
    x: Any,
    d: Any,
    arg: Any,
    *arrays: Any,
    shape: Any,
    transpose: bool,
    schedule: Any,
    **_: Any,
) -> Any:
    x_aval, d_aval, arg_aval, *avals = ctx.avals_in
    problem = _along(ctx, "sddmm", "cuda", shape, x_aval.shape[2], transpose)
    point = resolve(schedule, problem, AtomicParallelism)
    call = arg_gather_to_values_plan(
        problem, point, [a.shape[0] for a in (x_aval, d_aval, arg_aval)]
    )
    operands, avals = (*arrays[:2], x, d, arg), (*avals[:2], x_aval, d_aval, arg_aval)
    return launch_lowering(ctx, call, operands, avals)


def _bilinear_jvp(bind: Callable) -> Callable:
    def jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
        first, second, arg, *arrays = primals
        dfirst, dsecond, _ = tangents  # arg is integer
        return (
            bind(first, second, arg, arrays, **params),
            None if dfirst is None else bind(dfirst, second, arg, arrays, **params),
            None if dsecond is None else bind(first, dsecond, arg, arrays, **params),
        )

    return jvp


def _arg_gather_transpose(
    d: Any, w: Any, x: Any, arg: Any, *arrays: Any, **params: Any
) -> tuple[int, Any]:
    if is_linear_operand(x):
        return 1, _bind_to_x(w, d, arg, arrays, **params)
    return 0, _bind_to_values(x, d, arg, arrays, **params)


def _to_x_transpose(
    x: Any, w: Any, d: Any, arg: Any, *arrays: Any, **params: Any
) -> tuple[int, Any]:
    if is_linear_operand(d):
        return 1, bind_arg_gather(w, x, arg, arrays, **params)
    return 0, _bind_to_values(x, d, arg, arrays, **params)


def _to_values_transpose(
    w: Any, x: Any, d: Any, arg: Any, *arrays: Any, **params: Any
) -> tuple[int, Any]:
    if is_linear_operand(d):
        return 1, bind_arg_gather(w, x, arg, arrays, **params)
    return 0, _bind_to_x(w, d, arg, arrays, **params)


arg_gather_p = define(
    "gspmm_arg_gather",
    data=3,
    axes="b, b _ n, b _ n -> b _ n",
    abstract_eval=_arg_gather_abstract_eval,
    reference=_arg_gather_reference,
    cpu=_arg_gather_cpu,
    compact=_arg_gather_compact,
    jvp=_bilinear_jvp(bind_arg_gather),
    transpose=_arg_gather_transpose,
    cuda=_arg_gather_cuda,
)
arg_gather_to_x_p = define(
    "gspmm_arg_gather_to_x",
    data=3,
    axes="b, b _ n, b _ n -> b _ n",
    abstract_eval=_to_x_abstract_eval,
    reference=_to_x_reference,
    cpu=_to_x_cpu,
    compact=_to_x_compact,
    jvp=_bilinear_jvp(_bind_to_x),
    transpose=_to_x_transpose,
    cuda=_to_x_cuda,
)
arg_gather_to_values_p = define(
    "gspmm_arg_gather_to_values",
    data=3,
    axes="b _ n, b _ n, b _ n -> b",
    abstract_eval=_to_values_abstract_eval,
    reference=_to_values_reference,
    cpu=_to_values_cpu,
    compact=_to_values_compact,
    jvp=_bilinear_jvp(_bind_to_values),
    transpose=_to_values_transpose,
    cuda=_to_values_cuda,
)


# elements: a [B|1, r, n] or [B|1, r, 1], at [B|1, m, n] int32 -> a[at[i, l], l], [B, m, n]
# add_elements: d [B|1, m, n], at [B|1, m, n] -> the sums [B, count, n] of the d[i, l] with
# at[i, l] = q, at [q, l]
# Each is linear, and the transpose of the other.


def elements(a: Any, at: Any) -> Any:
    return bind(elements_p, a, at, schedule=None)


def _add_elements(d: Any, at: Any, count: int) -> Any:
    return bind(add_elements_p, d, at, count=count, schedule=None)


def _elements_abstract_eval(a: Any, at: Any, *, schedule: None) -> Any:
    assert a.ndim == 3 and a.shape[2] in (1, at.shape[2])
    return out_aval(a, (_batch(a, at), *at.shape[1:]), a.dtype)


def _add_elements_abstract_eval(d: Any, at: Any, *, count: int, schedule: None) -> Any:
    assert d.shape[1:] == at.shape[1:]
    return out_aval(d, (_batch(d, at), count, d.shape[2]), d.dtype)


def _elements_reference(a: Any, at: Any, *, schedule: None) -> Any:
    def one(a: Any, at: Any) -> Any:
        a = jnp.broadcast_to(a, (a.shape[0], at.shape[1]))
        return jnp.take_along_axis(a, at, axis=0)

    return _over_batch(one, a, at)


def _add_elements_reference(d: Any, at: Any, *, count: int, schedule: None) -> Any:
    wide = accumulator(d.dtype)

    def one(d: Any, at: Any) -> Any:
        zeros = jnp.zeros((count, d.shape[1]), wide)
        sums = zeros.at[at, jnp.arange(d.shape[1])[None]].add(d.astype(wide))
        return sums.astype(d.dtype)

    return _over_batch(one, d, at)


def _elements_jvp(primals: Any, tangents: Any, **_: Any) -> tuple:
    a, at = primals
    return elements(a, at), None if tangents[0] is None else elements(tangents[0], at)


def _elements_transpose(d: Any, a: Any, at: Any, **_: Any) -> tuple[int, Any]:
    found = _add_elements(d, at, a.aval.shape[1])
    return 0, found if a.aval.shape[2] == d.shape[2] else found.sum(2, keepdims=True)


def _add_elements_jvp(primals: Any, tangents: Any, *, count: int, **_: Any) -> tuple:
    d, at = primals
    out = _add_elements(d, at, count)
    return out, None if tangents[0] is None else _add_elements(tangents[0], at, count)


def _add_elements_transpose(a: Any, d: Any, at: Any, **_: Any) -> tuple[int, Any]:
    return 0, elements(a, at)


elements_p = define(
    "gspmm_elements",
    data=2,
    axes="b _ n, b _ n -> b _ n",
    abstract_eval=_elements_abstract_eval,
    reference=_elements_reference,
    cpu=None,
    jvp=_elements_jvp,
    transpose=_elements_transpose,
)
add_elements_p = define(
    "gspmm_add_elements",
    data=2,
    axes="b _ n, b _ n -> b _ n",
    abstract_eval=_add_elements_abstract_eval,
    reference=_add_elements_reference,
    cpu=None,
    jvp=_add_elements_jvp,
    transpose=_add_elements_transpose,
)
