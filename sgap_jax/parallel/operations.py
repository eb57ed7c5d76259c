"""Operations on a matrix in parts: those of `sgap_jax` of the same names, on each device with the
rows of dense operands that the other parts send it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag
from sgap_jax.parallel.exchange import Exchange
from sgap_jax.parallel.part import Part
from sgap_jax.parallel.partitioned import PartitionedArray
from sgap_jax.parallel.second_axis import summed_bytes
from sgap_jax.primitives._define import accumulator, as_numbers, check_scale, check_schedule
from sgap_jax.primitives.gsddmm import gsddmm as local_gsddmm
from sgap_jax.primitives.gspmm import OPS, REDUCTIONS, Op, Reduction, check_choice, message_values
from sgap_jax.primitives.gspmm import gspmm as local_gspmm
from sgap_jax.primitives.row_reduce import row_max as local_row_max
from sgap_jax.primitives.row_reduce import row_sum as local_row_sum
from sgap_jax.primitives.sddmm import sddmm as local_sddmm
from sgap_jax.primitives.sparse_softmax import sparse_softmax as local_sparse_softmax
from sgap_jax.primitives.spmm import spmm as local_spmm
from sgap_jax.schedules import Schedule


def check_parts(op: str, A: Any, name: str = "A") -> None:
    if not isinstance(A, PartitionedArray):
        raise TypeError(
            f"parallel.{op}: {name} must be a PartitionedArray, got {type(A).__name__}; "
            f"sgap_jax.{op} takes a SparseArray, parallel.partition spreads it"
        )


def _operand(
    op: str, name: str, A: PartitionedArray, x: Any, of_columns: bool, features: int = 1
) -> tuple[jax.Array, bool]:
    """(x in parts, whether it came so): x has one row for each column or row of A, and one axis of
    features, or none if `features` is 0."""
    if isinstance(x, SparseArray | PartitionedArray) or hasattr(x, "todense"):
        raise TypeError(f"parallel.{op}: {name} must be dense, got a {type(x).__name__}")
    x = as_numbers(f"parallel.{op}", name, x)
    A._check_devices(f"parallel.{op}: {name}", x)
    rows = A._layout(of_columns)[1]
    last = ", n" if features else ""
    if x.ndim == 2 + features:
        if x.shape[:2] != (A.parts, rows):
            raise ValueError(
                f"parallel.{op}: {name}: expected [{A.parts}, {rows}{last}], as "
                f"to_parts gives it, got {list(x.shape)}"
            )
        return x, True
    size = A.shape[1 if of_columns else 0]
    if x.ndim != 1 + features or x.shape[0] != size:
        raise ValueError(
            f"parallel.{op}: {name}: expected [{size}{last}] or in parts "
            f"[{A.parts}, {rows}{last}], got {list(x.shape)}"
        )
    return A.to_parts(x, transpose=not of_columns), False


def spmm(
    A: PartitionedArray,
    B: Any,
    *,
    transpose: bool = False,
    in_order: bool = False,
    schedule: Schedule | str | None = None,
) -> jax.Array:
    """The product of a matrix in parts with a dense one: C = A B, or C = A^T B with `transpose`.

        C[i, j] = sum over the stored entries (i, l) of A[i, l] B[l, j]

    Every device multiplies its own columns, receives the rows of B that its foreign columns name,
    and adds their product. With `transpose` partial sums travel the other way. Differentiable to
    any order in `A.values` and B: the exchange of a gradient is the transposed one, and sends as
    much.

    Args:
      A: [m, k] in parts.
      B: in parts, [parts, rows, n] as `A.to_parts(B)`; or [k, n] ([m, n] with `transpose`), which
        is put in parts first and the result back, at the cost of moving both.
      transpose: multiply by A^T.
      in_order: add the entries of a row in the order of the matrix, as one device does, so that C
        has the same bits for any number of devices, in the given order of rows and with the
        schedule that a part has. The product then waits for all rows that it needs, and rows of B
        travel alone (no partial rows, no copies). Gradients are sums over devices as before.
      schedule: of the products on each device; None lets `choose_schedule` pick.

    Returns:
      C, in parts if B is, [parts, rows, n]; else [m, n] ([k, n] with `transpose`). Own and foreign
      columns are summed as in `sgap_jax.spmm`, each rounded once, and added in the result's dtype:
      the order of the sum is another one than on one device, the same at each call.

    Raises:
      TypeError: A is not a PartitionedArray; a SparseArray goes to `sgap_jax.spmm`.
      ValueError: B has the wrong shape.
      NotImplementedError: `in_order` with `transpose`, whose sums go over devices; partition A.T.

    Source: the 1D products of CAGNET (Tripathy et al., SC 2020), of which only the rows travel
    that are needed.
    """
    check_parts("spmm", A)
    schedule = check_schedule("parallel.spmm", schedule)
    transpose = check_flag(transpose, "transpose", "parallel.spmm")
    in_order = check_flag(in_order, "in_order", "parallel.spmm")
    if transpose and in_order:
        raise NotImplementedError(
            "parallel.spmm: in_order: products with the transpose add up what devices have; "
            "parallel.partition(A.T, mesh, axis) has its rows in order"
        )
    B, apart = _operand("spmm", "B", A, B, not transpose)
    C = _product(A, B, transpose, schedule, in_order)
    return C if apart else A.from_parts(C, transpose=transpose)


PartitionedArray._products = spmm


def _product(
    A: PartitionedArray,
    B: jax.Array,
    transpose: bool,
    schedule: Schedule | str | None,
    in_order: bool = False,
) -> jax.Array:
    """The product of operands in parts."""
    n, over = B.shape[2], A._columns_axis(B)
    copies = A.second is not None and not in_order and A.choose(n, B.dtype) == "copies"
    devices = 1 if copies or not over or n < 2 else _devices(A, over)
    each = -(-n // devices)  # columns on a device
    if each * devices != n:
        B = jnp.pad(A._split(B), ((0, 0), (0, 0), (0, each * devices - n)))

    def local(part: Part, B: jax.Array) -> jax.Array:
        if in_order:
            return local_spmm(part.matrix(), part.table(B), schedule=schedule)
        C = local_spmm(part.own, B, schedule=schedule)
        if part.alone:
            return C
        if not covered:
            C, received = _beside(part, C, part.exchange, B[part.sends])
            return C + local_spmm(part.foreign, received, schedule=schedule)
        assert part.cover is not None
        sent = local_spmm(part.cover.out, B, schedule=schedule)
        C, received = _beside(part, C, part.cover.exchange, sent)
        return C + local_spmm(part.into(), received, schedule=schedule)

    def shared(part: Part, B: jax.Array) -> jax.Array:
        assert part.share is not None
        own, foreign = part.share.matrices(part)
        C = local_spmm(own, B, schedule=schedule)
        C, received = _beside(part, C, part.share.exchange, B[part.share.sends])
        C = C + local_spmm(foreign, received, schedule=schedule)
        return jax.lax.psum(C.astype(accumulator(C.dtype)), part.second).astype(C.dtype)

    covered = A._covered(each, B.dtype)
    columns = over if devices > 1 else None
    spec = A._columns_spec(B, columns)
    product = partial(A._on_each, shared if copies else local, columns=columns, out_specs=spec)
    if not transpose:
        C = product(B)
    else:
        shape = (A.parts, A.own.shape[1], B.shape[2])
        dtype = jnp.result_type(A.dtype, B)
        given = jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
        (C,) = jax.linear_transpose(product, given)(A._split(B.astype(dtype), spec))
    return C if each * devices == n else A._split(C)[:, :, :n]


def _beside(part: Part, C: jax.Array, exchange: Exchange, sent: jax.Array) -> tuple:
    """(C, what a part receives): neither waits for the other. XLA's GPU compiler would wait for all
    rounds of ppermute before it starts C, if they could be put together before C is there."""
    messages = exchange.messages(part.axis, sent)
    if len(messages) > 1:
        C, *messages = jax.lax.optimization_barrier((C, *messages))
    return C, exchange.joined(messages)


def _devices(A: PartitionedArray, axes: Any) -> int:
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(A.mesh.shape[name] for name in names)


def _whole_columns(A: PartitionedArray, *arrays: jax.Array) -> Any:
    """The axes over which columns of [parts, rows, n] may be split without padding, which an
    operation that is not linear would see; None if there are none."""
    found = {over for x in arrays if x.ndim == 3 and (over := A._columns_axis(x))}
    if len(found) != 1:
        return None
    (over,) = found
    return over if all(x.shape[2] % _devices(A, over) == 0 for x in arrays) else None


def sddmm(
    A: PartitionedArray,
    X: Any,
    Y: Any,
    *,
    scale: Any = None,
    weighted: bool = False,
    schedule: Schedule | str | None = None,
) -> PartitionedArray:
    """`sgap_jax.sddmm` of a matrix in parts: C = (X Y^T) at the stored entries of A.

        C[i, j] = scale * sum_l X[i, l] Y[j, l]      (times A[i, j] with `weighted`)

    The rows of Y travel that other parts have entries for. Differentiable to any order in X, Y,
    scale and, with `weighted`, in `A.values`.

    Args:
      A: [m, k] in parts.
      X: in parts, [parts, rows, d] as `A.to_parts(X, transpose=True)` or as a result of `A @ B`; or
        [m, d].
      Y: in parts, [parts, rows, d] as `A.to_parts(Y)`; or [k, d].
      scale, weighted, schedule: as of `sgap_jax.sddmm`.

    Returns:
      A PartitionedArray of A's structure, with the dtype, the sums and the bits of
      `sgap_jax.sddmm` with the schedule that a part has.

    Raises:
      TypeError: A is not a PartitionedArray.
      ValueError: X, Y or scale has the wrong shape.

    Source: vectorSparse, section 2.2 (SDDMM).
    """
    check_parts("sddmm", A)
    schedule = check_schedule("parallel.sddmm", schedule)
    X, Y = _both("sddmm", A, X, Y)
    number = scale is None or not isinstance(scale, jax.Array)
    shared = () if number else (check_scale("parallel.sddmm", scale),)

    def sampled(A: Any, X: Any, Y: Any, *factor: Any) -> jax.Array:
        options: dict = dict(weighted=weighted, schedule=schedule)
        return local_sddmm(A, X, Y, scale=factor[0] if factor else scale, **options).values

    return _sampled(A, X, Y, sampled, shared)


def gsddmm(
    A: PartitionedArray, X: Any, Y: Any, *, op: Op = "mul", schedule: Schedule | str | None = None
) -> PartitionedArray:
    """`sgap_jax.gsddmm` of a matrix in parts: features of both ends of each stored entry, combined.

        C[i, j] = sum_l (X[i, l] op Y[j, l])   at the stored entries (i, j) of A

    Differentiable to any order in X and Y.

    Args:
      A: [m, k] in parts; only its structure is read.
      X: in parts, [parts, rows, d] as `A.to_parts(X, transpose=True)`; or [m, d], or [m].
      Y: in parts, [parts, rows, d] as `A.to_parts(Y)`; or [k, d], or [k].
      op, schedule: as of `sgap_jax.gsddmm`.

    Returns:
      A PartitionedArray of A's structure, with the dtype, the sums and the bits of
      `sgap_jax.gsddmm` with the schedule that a part has.

    Raises:
      TypeError: A is not a PartitionedArray.
      ValueError: an op that is not one of these, or X or Y has the wrong shape.

    Source: Sgap, section 2.1 (SDDMM as message passing).
    """
    check_parts("gsddmm", A)
    schedule = check_schedule("parallel.gsddmm", schedule)
    check_choice("parallel.gsddmm", "op", op, OPS)
    X, Y = (jnp.asarray(x)[:, None] if jnp.ndim(x) == 1 else x for x in (X, Y))
    X, Y = _both("gsddmm", A, X, Y)

    def sampled(A: Any, X: Any, Y: Any) -> jax.Array:
        return local_gsddmm(A, X, Y, op=op, schedule=schedule).values

    return _sampled(A, X, Y, sampled, ())


def _both(op: str, A: PartitionedArray, X: Any, Y: Any) -> tuple[jax.Array, jax.Array]:
    X, _ = _operand(op, "X", A, X, False)
    Y, _ = _operand(op, "Y", A, Y, True)
    if X.shape[2] != Y.shape[2]:
        raise ValueError(
            f"parallel.{op}: X and Y must have the same features, got {X.shape[2]} and {Y.shape[2]}"
        )
    return X, Y


def _sampled(
    A: PartitionedArray, X: jax.Array, Y: jax.Array, sampled: Any, shared: tuple
) -> PartitionedArray:
    over = _summed_over(A, X, Y)

    def local(part: Part, X: jax.Array, Y: jax.Array, *shared: Any) -> tuple:
        own = sampled(part.own, X, Y, *shared)
        if part.alone:
            return own, part.foreign.values.astype(own.dtype)
        return own, sampled(part.foreign, X, part.received(Y), *shared)

    def summed(part: Part, X: jax.Array, Y: jax.Array, *shared: Any) -> tuple:
        like = jax.eval_shape(sampled, part.own, X, Y, *shared)
        wide = [x.astype(accumulator(x.dtype)) for x in (X, Y)]  # rounded once, after the sum
        found = local(part, *wide, *shared)
        return tuple(jax.lax.psum(x, over).astype(like.dtype) for x in found)

    return A.with_values(A._on_each(summed if over else local, X, Y, shared=shared, columns=over))


def _summed_over(A: PartitionedArray, X: jax.Array, Y: jax.Array) -> Any:
    """The axes that split the features of a sampled product, where that sends less than each device
    with all features: of those travel 1 / c, and the values are summed over the axes."""
    over = _whole_columns(A, X, Y)
    if over is None:
        return None
    n, devices = X.shape[2], _devices(A, over)
    size = jnp.result_type(X, Y).itemsize
    numbers = A.own.values.shape[1] + A.foreign.values.shape[1]
    split = A.exchange.sent * (n // devices) * size
    split += summed_bytes(devices, numbers, accumulator(jnp.result_type(X, Y)).itemsize)
    # Operands that are split, as products give them, are gathered for it.
    gathered = (X.shape[1] + Y.shape[1]) * (n - n // devices)
    return over if split < (A.exchange.sent * n + gathered) * size else None


def gspmm(
    A: PartitionedArray,
    X: Any,
    *,
    op: Op = "mul",
    reduce: Reduction = "sum",
    transpose: bool = False,
    schedule: Schedule | str | None = None,
) -> jax.Array:
    """`sgap_jax.gspmm` of a matrix in parts: messages along the entries, reduced over each row.

        C[i, l] = reduce over the stored entries (i, j) of (X[j, l] op A[i, j])

    Differentiable to any order in `A.values` and X.

    Args:
      A: [m, k] in parts.
      X: in parts, [parts, rows, n] as `A.to_parts(X)`; or [k, n] ([m, n] with `transpose`).
      op, reduce: as of `sgap_jax.gspmm`.
      transpose: pass messages along A^T.
      schedule: of the operation on each device; None lets `choose_schedule` pick.

    Returns:
      C, in parts if X is, [parts, rows, n]; else [m, n] ([k, n] with `transpose`). Sums of "mul"
      and "copy" are those of `parallel.spmm`, and with `transpose` sums and means are made of such
      products in the accumulation dtype. All else has the bits of `sgap_jax.gspmm` with the
      schedule that a part has (of extrema with `transpose` a zero may lose its sign); entries that
      attain an extremum have the same order, so the gradient goes to the same one, if `partition`
      has kept the given order. For extrema with `transpose` each part sends its own one of each
      column that another part owns, as a product does.

    Raises:
      TypeError: A is not a PartitionedArray.
      ValueError: an op or a reduction that is not one of these, or X has the wrong shape.

    Source: Sgap, section 2.1 (the message-passing form of SpMM).
    """
    check_parts("gspmm", A)
    schedule = check_schedule("parallel.gspmm", schedule)
    check_choice("parallel.gspmm", "op", op, OPS)
    check_choice("parallel.gspmm", "reduce", reduce, REDUCTIONS)
    transpose = check_flag(transpose, "transpose", "parallel.gspmm")
    X, apart = _operand("gspmm", "X", A, X, not transpose)
    if transpose and reduce in ("max", "min"):
        C = _extremum_back(A, X, op, reduce, schedule)
    elif transpose:
        C = _messages_back(A, X, op, reduce, schedule)
    elif reduce == "sum" and op in ("mul", "copy"):
        C = _product(A if op == "mul" else _ones(A, X.dtype), X, False, schedule)
    else:

        def local(part: Part, X: jax.Array) -> jax.Array:
            options: dict = dict(op=op, reduce=reduce, schedule=schedule)
            return local_gspmm(part.matrix(), part.table(X), **options)

        over = _whole_columns(A, X)
        C = A._on_each(local, X, columns=over, out_specs=A._columns_spec(X, over))
    return C if apart else A.from_parts(C, transpose=transpose)


def _ones(A: PartitionedArray, dtype: Any) -> PartitionedArray:
    return A._filled(lambda x: jnp.ones_like(x, dtype))


def _extremum_back(
    A: PartitionedArray, X: jax.Array, op: str, reduce: str, schedule: Schedule | None
) -> jax.Array:
    """Extrema along A^T: those of each part's rows go to the owners of the columns, which take of
    them that of the first part that attains it."""
    extremum = jax.ops.segment_max if reduce == "max" else jax.ops.segment_min

    def local(part: Part, X: jax.Array) -> jax.Array:
        options: dict = dict(op=op, reduce=reduce, transpose=True, schedule=schedule)
        found = local_gspmm(part.matrix(), X, **options)
        here = jnp.full((found.shape[0], 1), jax.lax.axis_index(part.axis) + 1, jnp.int32)
        candidates, rows = part.to_owners(found, part.own.shape[1])
        numbers, _ = part.to_owners(here, part.own.shape[1])
        numbers = numbers[:, 0]  # 0 where there is none
        rows = jnp.where(numbers > 0, rows, part.own.shape[1])
        of_rows: dict = dict(num_segments=part.own.shape[1])
        fixed = jax.lax.stop_gradient(candidates)
        best = extremum(fixed, rows, **of_rows).at[rows].get(mode="fill", fill_value=0)
        attains = (fixed == best) | (fixed != fixed)
        last = jnp.iinfo(jnp.int32).max
        first = jax.ops.segment_min(jnp.where(attains, numbers[:, None], last), rows, **of_rows)
        chosen = numbers[:, None] == first.at[rows].get(mode="fill", fill_value=-1)
        return jax.ops.segment_sum(jnp.where(chosen, candidates, 0), rows, **of_rows)

    return A._on_each(local, X)


def _messages_back(
    A: PartitionedArray, X: jax.Array, op: str, reduce: str, schedule: Schedule | None
) -> jax.Array:
    """Sums and means along A^T, of products in the dtype that sums are carried in."""
    dtype = X.dtype if op == "copy" else jnp.result_type(A.dtype, X)
    if not jnp.issubdtype(dtype, jnp.inexact) and (op == "div" or reduce == "mean"):
        dtype = jnp.result_type(float)
    wide = accumulator(dtype)
    column = jnp.ones((*X.shape[:2], 1), wide)
    ones = _ones(A, wide)

    def values(part: Part) -> tuple:
        return tuple(message_values(each, op, wide) for each in (part.own, part.foreign))

    weights = A.with_values(A._on_each(values))
    if op in ("add", "sub"):
        C = _product(ones, X.astype(wide), True, schedule)
        C = C + _product(weights, column, True, schedule)
    else:
        C = _product(weights, X.astype(wide), True, schedule)
    if reduce == "mean":
        C = C / jnp.maximum(_product(ones, column, True, schedule), 1)
    return C.astype(dtype)


def sparse_softmax(
    A: PartitionedArray, *, scale: Any = 1.0, schedule: Schedule | str | None = None
) -> PartitionedArray:
    """`sgap_jax.sparse_softmax` of a matrix in parts: softmax over the stored entries of each row.

        P[i, j] = exp(scale A[i, j]) / sum over stored (i, l) of exp(scale A[i, l])

    A part has whole rows, so nothing travels. Differentiable to any order in `A.values`, and in
    `scale` if it is an array.

    Args:
      A: [m, k] in parts.
      scale, schedule: as of `sgap_jax.sparse_softmax`.

    Returns:
      A PartitionedArray of A's structure and dtype, with the sums of `sgap_jax.sparse_softmax` and,
      in the given order of rows, its bits with the schedule that a part has. Padding is zero.

    Raises:
      TypeError: A is not a PartitionedArray.
      ValueError: scale is not a scalar.

    Source: vectorSparse, section 7.4 (the softmax of the sparse transformer).
    """
    check_parts("sparse_softmax", A)
    schedule = check_schedule("parallel.sparse_softmax", schedule)
    array = check_scale("parallel.sparse_softmax", scale)
    shared = (array,) if isinstance(scale, jax.Array) else ()

    def local(part: Part, *factor: Any) -> tuple:
        matrix, by = part.matrix(), factor[0] if factor else scale
        return part.apart(local_sparse_softmax(matrix, scale=by, schedule=schedule).values)

    return A.with_values(A._on_each(local, shared=shared))


def row_sum(A: PartitionedArray, *, schedule: Schedule | str | None = None) -> jax.Array:
    """`sgap_jax.row_sum` of a matrix in parts: s[i] = sum over stored (i, j) of A[i, j].

    Nothing travels. Differentiable to any order in `A.values`.

    Returns:
      s in parts, [parts, rows], in A's dtype; `A.from_parts(s)` is [m]. Sums, zeros of empty rows
      and, in the given order of rows, the bits with a part's schedule are those of
      `sgap_jax.row_sum`.

    Raises TypeError if A is not a PartitionedArray.

    Source: Sgap, section 2.1 (segment reduction over the rows).
    """
    return _reduced("row_sum", A, schedule)


def row_max(A: PartitionedArray, *, schedule: Schedule | str | None = None) -> jax.Array:
    """`sgap_jax.row_max` of a matrix in parts: s[i] = max over stored (i, j) of A[i, j].

    Nothing travels. Differentiable to any order in `A.values`; entries that tie share the gradient.

    Returns:
      s in parts, [parts, rows], in A's dtype, exact; `A.from_parts(s)` is [m]. Rows without entries
      are -infinity.

    Raises TypeError if A is not a PartitionedArray.

    Source: Sgap, section 2.1 (segment reduction over the rows).
    """
    return _reduced("row_max", A, schedule)


def _reduced(op: str, A: PartitionedArray, schedule: Schedule | str | None) -> jax.Array:
    check_parts(op, A)
    schedule = check_schedule(f"parallel.{op}", schedule)
    reduce = {"row_sum": local_row_sum, "row_max": local_row_max}[op]
    return A._on_each(lambda part: reduce(part.matrix(), schedule=schedule))
