"""gsddmm: C[i, j] = sum_l (X[i, l] op Y[j, l]) at the stored entries (i, j), the edges; without the
sum a vector of each entry."""

import math
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.structure import positions
from sgap_jax.launch.gsddmm import entries_plan
from sgap_jax.primitives._define import (
    accumulator,
    at_places,
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
    structure,
)
from sgap_jax.primitives._incidence import (
    as_given,
    entries_by_rows,
    entry_sums,
    incidence,
)
from sgap_jax.primitives.gspmm import OPS, Op, check_choice, gsddmm_p, gspmm_p, joint_axes
from sgap_jax.primitives.row_reduce import check_entry_values
from sgap_jax.primitives.sddmm import sddmm
from sgap_jax.primitives.spmm import spmm
from sgap_jax.schedules import AtomicParallelism, CpuTile, Problem, Schedule


@overload
def gsddmm(
    A: SparseArray,
    X: Any,
    Y: Any,
    *,
    op: Op = ...,
    reduce: Literal["sum"] = ...,
    schedule: Schedule | str | None = ...,
) -> SparseArray: ...
@overload
def gsddmm(
    A: SparseArray,
    X: Any,
    Y: Any,
    *,
    values: Any = ...,
    op: Op = ...,
    reduce: Literal["last"] | None,
    schedule: Schedule | str | None = ...,
) -> jax.Array: ...
def gsddmm(
    A: SparseArray,
    X: Any,
    Y: Any,
    *,
    values: Any = None,
    op: Op = "mul",
    reduce: Literal["sum", "last"] | None = "sum",
    schedule: Schedule | str | None = None,
) -> SparseArray | jax.Array:
    """Combines the features of the row and the column of each stored entry, and sums over them.

        C[i, j] = sum_l (X[i, l] op Y[j, l])   at the stored entries (i, j) of A

    With `reduce=None` the features are not summed, and each entry e gets a vector:

        V[e, l] = X[i, l] op Y[j, l]

    There `values` [nnz, d], vectors that entries have already, may take the place of X or of Y,
    which is None then: values[e, l] op Y[j, l], or X[i, l] op values[e, l]. Nodes and entries may
    have other axes there, [m, heads, d] and [nnz, heads, 1] say, that broadcast from the last one
    on, as in DGL and NumPy. `reduce="last"` sums over the last axis alone, as DGL's u_dot_v:

        V[e, h, 0] = sum_l (X[i, h, l] op Y[j, h, l])

    Differentiable to any order in X, Y and values.

    Args:
      A: sparse [m, k] in CSR, CSC, COO, CVS or BCSR; only its structure is read.
      X: dense [m, d], or [m] for one feature; [m, ...] unless `reduce` is "sum". float32, float64,
        bfloat16 or float16.
      Y: dense [k, d], or [k]; likewise.
      values: [nnz, d] or [nnz, ...] with `reduce=None`, in the order of A.values.
      op: "mul" (an `sddmm`), "add" (with one feature the logits of GAT), "sub", "div" (a product
        with the rounded 1 / Y) or "copy" (X alone; Y is not read).
      reduce: "sum"; or "last" or None for vectors, for which A is in CSR, CSC or COO.
      schedule: how to run, or its text, as for `sddmm`; None lets `choose_schedule` pick.

    Returns:
      A SparseArray with A's structure and format, in the promoted dtype of X and Y; with
      `reduce=None` an array [nnz, d] ([nnz] for one feature, in general [nnz, ...] with the joint
      axes, those of X for "copy"), with "last" [nnz, ..., 1], in the order of A.values. Sums are
      carried in float32 (float64 for float64) and rounded once; "add" and "sub" sum X and Y
      separately.
      On the CPU the same bits for any number of threads. Padding entries of A get zero. NaN or
      infinity in a row reaches only the entries of that row (of X) or column (of Y).

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      ValueError: an op that is not one of these, or X or Y has the wrong shape.
      NotImplementedError: no kernel for this dtype or platform with this schedule.

    Source: Sgap, section 2.1 (SDDMM as message passing).
    """
    check_sparse("gsddmm", "A", A)
    schedule = check_schedule("gsddmm", schedule)
    check_choice("gsddmm", "op", op, OPS)
    if reduce is None:
        return _vectors(A, X, Y, values, op, schedule)
    check_choice("gsddmm", "reduce", reduce, ("sum", "last"))
    if values is not None:
        raise ValueError(
            f"gsddmm: values are vectors of entries: expected reduce=None, got {reduce!r}"
        )
    if reduce == "last":
        X, Y, _ = _of_axes(A, X, Y)
        if X is None or Y is None or X.ndim == Y.ndim == 1:
            raise ValueError("gsddmm: with reduce='last' expected X [m, ..., d] and Y [k, ..., d]")
        return _sums_of_last(A, X, Y, op=op, schedule=schedule)
    if isinstance(X, np.ndarray | jax.Array) and X.ndim > 2 and X.shape[0] == A.shape[0]:
        raise ValueError(
            f"gsddmm: X must have shape [{A.shape[0]}, d] for one sum of each entry, got "
            f"{list(X.shape)}; reduce='last' sums over the last axis alone, reduce=None over none"
        )
    one = jnp.ndim(X) == 1
    X = check_dense("gsddmm", "X", X, (A.shape[0],) if one else (A.shape[0], "d"))
    Y = check_dense("gsddmm", "Y", Y, (A.shape[1], *X.shape[1:]))
    return A.with_values(_gsddmm(A, X, Y, op=op, schedule=schedule))


@partial(jax.jit, static_argnames=("op", "schedule"), inline=True)
def _gsddmm(A: SparseArray, X: Any, Y: Any, *, op: str, schedule: Schedule | None) -> jax.Array:
    dtype = X.dtype if op == "copy" else jnp.result_type(X, Y)
    if op == "div" and not jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.result_type(float)
    wide = dtype if op == "mul" else accumulator(dtype)
    X, Y = ((x[:, None] if x.ndim == 1 else x).astype(wide) for x in (X, Y))
    if op == "div":
        Y = 1 / Y
    elif op != "mul":
        # sum (x + y) = (sum x) * 1 + 1 * (sum y)
        X, Y = X.sum(1, keepdims=True), Y.sum(1, keepdims=True)
        one, other = jnp.ones_like(X), jnp.ones_like(Y)
        if op == "copy":
            Y = other
        else:
            X, Y = jnp.hstack([X, one]), jnp.hstack([other, -Y if op == "sub" else Y])
    return sddmm(A, X, Y, schedule=schedule).values.astype(dtype)


def _vectors(
    A: SparseArray, X: Any, Y: Any, values: Any, op: str, schedule: Schedule | None
) -> jax.Array:
    if sum(x is None for x in (X, Y)) != (values is not None) and op != "copy":
        raise ValueError("gsddmm: with reduce=None expected X and Y, or values and one of them")
    of = dict(op=op, schedule=schedule)
    given = [x for x in (X, Y, values) if x is not None]
    if not given:
        raise ValueError("gsddmm: expected X and Y, got None")
    if op == "copy" and X is None and values is None:
        raise ValueError("gsddmm: op='copy' copies X, or values in its place: got None for both")
    X, Y, values = _of_axes(A, X, Y, values)
    if op == "copy":  # nothing else is read
        X, Y, values = X, None, values if X is None else None
    given = [x for x in (X, Y, values) if x is not None]
    if all(x.ndim == 2 and x.shape[1] == given[0].shape[1] for x in given):
        return _vectors_of(A, X, Y, values, **of)
    return _vectors_of_axes(A, X, Y, values, **of)


def _of_axes(A: SparseArray, X: Any, Y: Any, values: Any = None) -> tuple[Any, Any, Any]:
    """X [m, ...], Y [k, ...] and values [nnz, ...] as arrays, or None, with a check that the axes
    after the first broadcast."""
    X, Y = (
        None if x is None else check_dense("gsddmm", name, x, (rows, "..."))
        for name, x, rows in zip("XY", (X, Y), A.shape, strict=True)
    )
    if values is not None:
        values = check_entry_values("gsddmm", "values", A, values, ("...",))
    else:  # for the check of A
        check_entry_values("gsddmm", "A", A, jnp.zeros((A.nnz, 0)), ("d",))
    named = {"X": X, "Y": Y, "values": values}
    named = {name: x for name, x in named.items() if x is not None}
    tails = [x.shape[1:] for x in named.values()]
    if joint_axes(*tails) is None:
        names, got = (" and ".join(map(str, x)) for x in (named, [list(tail) for tail in tails]))
        raise ValueError(f"gsddmm: the axes of {names} after the first must broadcast, got {got}")
    return X, Y, values


def _spread(x: Any, tail: tuple) -> jax.Array:
    """x [n, ...] with these axes after the first."""
    x = x.reshape(x.shape[0], *[1] * (len(tail) + 1 - x.ndim), *x.shape[1:])
    return jnp.broadcast_to(x, (x.shape[0], *tail))


@partial(jax.jit, static_argnames=("op", "schedule"), inline=True)
def _vectors_of_axes(A: SparseArray, X: Any, Y: Any, values: Any, **of: Any) -> jax.Array:
    tail = jnp.broadcast_shapes(*(x.shape[1:] for x in (X, Y, values) if x is not None))
    X, Y, values = (
        None if x is None else _spread(x, tail).reshape(x.shape[0], math.prod(tail))
        for x in (X, Y, values)
    )
    return _vectors_of(A, X, Y, values, **of).reshape(A.nnz, *tail)


@partial(jax.jit, static_argnames=("op", "schedule"), inline=True)
def _sums_of_last(A: SparseArray, X: Any, Y: Any, **of: Any) -> jax.Array:
    """[nnz, ..., 1]: a batch of sums, one for each place of the axes between."""
    *heads, d = jnp.broadcast_shapes(X.shape[1:], Y.shape[1:])
    X, Y = (
        jnp.moveaxis(_spread(x, (*heads, d)).reshape(x.shape[0], math.prod(heads), d), 1, 0)
        for x in (X, Y)
    )
    V = jax.vmap(lambda X, Y: _gsddmm(A, X, Y, **of))(X, Y)
    return V.T.reshape(A.nnz, *heads, 1)


@partial(jax.jit, static_argnames=("op", "schedule"), inline=True)
def _vectors_of(
    A: SparseArray, X: Any, Y: Any, values: Any, *, op: str, schedule: Schedule | None
) -> jax.Array:
    if op == "copy":
        if X is not None:
            return _copies(A, X, schedule)
        S, _, order = entries_by_rows(A)
        stored = as_given(entries_that_count(S), order)[:, None]
        return jnp.where(stored, values, jnp.zeros((), values.dtype))
    if values is None:
        dtype = jnp.result_type(X, Y)
        if op == "div" and not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.result_type(float)
        wide = accumulator(dtype) if op == "div" else dtype
        X, Y = X.astype(wide), Y.astype(wide)
        X, Y = (X, 1 / Y) if op == "div" else (X, -Y if op == "sub" else Y)
        S, swapped, order = entries_by_rows(A)
        ends = (Y, X) if swapped else (X, Y)
        params: dict = dict(shape=S.shape, checked=S.is_checked, add=op in ("add", "sub"))
        params |= dict(schedule=by_default(schedule, wide))
        V = bind(gsddmm_p, *(x[None] for x in ends), *structure(S), **params)[0]
        return as_given(V, order).astype(dtype)
    if A._every_entry_counts:
        return _with_values(A, X, Y, values, op, schedule)
    if Y is None:
        left, right = _copies(A, X, schedule), values
    else:
        left, right = values, _copies(A.T, Y, schedule)
    S, _, order = entries_by_rows(A)
    stored = as_given(entries_that_count(S), order)[:, None]
    if op == "div":  # what the padding holds must not reach gradients
        right = jnp.where(stored, right, jnp.ones((), right.dtype))
    combine: Any = {"mul": jnp.multiply, "add": jnp.add, "sub": jnp.subtract, "div": jnp.divide}[op]
    combined = combine(left, right)
    return jnp.where(stored, combined, jnp.zeros((), combined.dtype))


def _with_values(
    A: SparseArray, X: Any, Y: Any, values: Any, op: str, schedule: Schedule | None
) -> jax.Array:
    """values op Y, or X op values, of a structure whose entries all count: the kernel on the matrix
    that has one row, and in it one entry, for each entry of A."""
    B = incidence(A if Y is None else A.T, values.dtype)
    ends = X if Y is None else Y
    dtype = jnp.result_type(values, ends)
    if op == "div" and not jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.result_type(float)
    wide = accumulator(dtype) if op in ("div", "sub") else dtype
    v, ends = values.astype(wide), ends.astype(wide)
    assert B.transposed is not None
    offsets, indices, _ = B.transposed
    if op == "div" and Y is None:  # what the padding holds must not reach gradients
        v = 1 / jnp.where(positions(A.nnz)[:, None] < offsets[-1], v, jnp.ones((), wide))
    elif op == "div":
        ends = 1 / ends
    elif op == "sub":
        v, ends = (-v, ends) if Y is None else (v, -ends)
    # Its columns are the rows of B, whose entries are in the order of their rows.
    arrays = (offsets, indices, B.row_offsets, B.column_indices, B.column_indices)
    params: dict = dict(shape=(A.nnz, B.shape[0]), checked=True, add=op in ("add", "sub"))
    params |= dict(schedule=by_default(schedule, wide))
    return bind(gsddmm_p, v[None], ends[None], *arrays, **params)[0].astype(dtype)


def _copies(A: SparseArray, X: Any, schedule: Schedule | None) -> Any:
    """[nnz, d]: the row of X [m, d] of each entry's row."""
    return spmm(incidence(A, X.dtype), X, transpose=True, schedule=schedule)


# The primitive: x [B|1, m, n], y [B|1, k, n] and the index arrays of spmm -> [B, nnz, n], x of each
# entry's row times y of its column, or their sum with `add`; zero where an entry takes no part.


def _abstract_eval(x: Any, y: Any, *arrays: Any, shape: Any, **params: Any) -> Any:
    assert x.dtype == y.dtype and x.shape[2] == y.shape[2]
    assert (x.shape[1], y.shape[1]) == shape
    batch = joint_batch(x.shape[0], y.shape[0])
    return out_aval(x, (batch, arrays[1].shape[0], x.shape[2]), x.dtype)


def _reference(x: Any, y: Any, *arrays: Any, shape: Any, add: bool, **params: Any) -> Any:
    offsets, columns, *_ = arrays
    nnz, wide = columns.shape[0], accumulator(x.dtype)
    if nnz == 0 or 0 in shape:
        batch = joint_batch(x.shape[0], y.shape[0])
        return jnp.zeros((batch, nnz, x.shape[2]), x.dtype)
    rows = row_of_entry(offsets, nnz)
    left, right = x[:, jnp.minimum(rows, shape[0] - 1)].astype(wide), y[:, columns].astype(wide)
    both = left + right if add else left * right
    return jnp.where((rows < shape[0])[None, :, None], both, 0).astype(x.dtype)


def _compact(x: Any, y: Any, *arrays: Any, shape: Any, **params: Any) -> Any:
    arrays, _, place = compact_structure(shape, None, arrays)
    return at_places(
        bind(gsddmm_p, x, y, *arrays, shape=shape, **params | {"checked": True}), place
    )


def _problem(ctx: Any, shape: tuple[int, int], platform: str) -> Problem:
    (out,) = ctx.avals_out
    batch, nnz, n = out.shape
    return Problem("sddmm", shape, nnz, n, batch, out.dtype.name, platform=platform)


def _cpu(
    ctx: Any, x: Any, y: Any, *arrays: Any, shape: Any, checked: bool, add: bool, schedule: Any
) -> Any:
    tile = resolve(schedule, _problem(ctx, shape, "cpu"), CpuTile)
    operands = (*arrays[:2], x, y)
    return ffi_lowering("sgap_gsddmm_csr_v1", ctx, operands, add=add, chunk_nonzeros=tile.nonzeros)


def _cuda(
    ctx: Any, x: Any, y: Any, *arrays: Any, shape: Any, checked: bool, add: bool, schedule: Any
) -> Any:
    problem, (left, right, *avals) = _problem(ctx, shape, "cuda"), ctx.avals_in
    point = resolve(schedule, problem, AtomicParallelism)
    call = entries_plan(problem, point, add=add, batches=(left.shape[0], right.shape[0]))
    return launch_lowering(ctx, call, (*arrays[:2], x, y), (*avals[:2], left, right))


def _jvp(primals: Any, tangents: Any, *, add: bool, **params: Any) -> tuple:
    x, y, *arrays = primals
    dx, dy = tangents
    entries = lambda x, y: bind(gsddmm_p, x, y, *arrays, add=add, **params)  # noqa: E731
    if not add:
        along_x = None if dx is None else entries(dx, y)
        return entries(x, y), along_x, None if dy is None else entries(x, dy)
    dx = jnp.zeros_like(x[:1]) if dx is None else dx
    dy = jnp.zeros_like(y[:1]) if dy is None else dy
    return entries(x, y), entries(dx, dy)


def _transpose(d: Any, x: Any, y: Any, *arrays: Any, shape: Any, add: bool, **params: Any) -> Any:
    schedule, checked = derived(params["schedule"]), params["checked"]
    linear = [i for i, operand in enumerate((x, y)) if is_linear_operand(operand)]
    if not add:
        (i,) = linear
        of = dict(shape=shape, transpose=i == 1, add=False, minimum=False, positions=False)
        of |= dict(checked=checked, schedule=schedule, sums=True)
        return i, bind(gspmm_p, d, y if i == 0 else x, *arrays, **of)[0]
    if not checked:
        arrays, entry, _ = compact_structure(shape, None, arrays)
        d = d[:, entry]
    return {i: entry_sums(d, arrays, shape, i == 1, schedule) for i in linear}


define(
    gsddmm_p,
    data=2,
    axes="b _ n, b _ n -> b _ n",
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=_cpu,
    cuda=_cuda,
    compact=_compact,
    jvp=_jvp,
    transpose=_transpose,
)
