"""Maxima and minima of a matrix, and where they are: zeros that are not stored count, as in SciPy.

They are found by rows: the greatest stored value of each row, and the first column that it does not
store. `row_max` of primitives/row_reduce.py knows the stored entries only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from sgap_jax.formats import capacity, checks, convert, entries, parts, structure
from sgap_jax.formats.levels import CSR
from sgap_jax.formats.row_statistics import PatternStatistics
from sgap_jax.formats.stored import StoredArray


def extremum(A: StoredArray, name: str, axis: Any, keepdims: bool) -> jax.Array:
    """See `SparseArray.max`; `name` is max or min."""
    kept, values, *_ = _along(A, name, axis)
    if kept is None:
        whole = values[_first(values, name)]
        return whole.reshape(1, 1) if keepdims else whole
    if not keepdims:
        return values
    return values[:, None] if kept == 0 else values[None]


def position(A: StoredArray, name: str, axis: Any, keepdims: bool) -> jax.Array:
    """See `SparseArray.argmax`; `name` is argmax or argmin."""
    kept, values, columns, row_numbers = _along(A, name, axis)
    integer = jnp.argmax(jnp.zeros(1)).dtype  # as jnp.argmax: int64 with x64
    if kept is None:
        rows, across = A.shape
        if rows * across - 1 > jnp.iinfo(integer).max:  # type: ignore[no-untyped-call]
            raise ValueError(
                f"SparseArray.{name}: a position in {A.shape} exceeds {integer}; enable x64, or "
                "take it along an axis"
            )
        row = _first(values, name)
        number = row if row_numbers is None else row_numbers[row]
        flat = number.astype(integer) * across + columns[row].astype(integer)
        return flat.reshape(1, 1) if keepdims else flat
    columns = columns.astype(integer)
    if not keepdims:
        return columns
    return columns[:, None] if kept == 0 else columns[None]


def _first(values: jax.Array, name: str) -> jax.Array:
    return (jnp.argmax if "max" in name else jnp.argmin)(values)


def _along(A: StoredArray, name: str, axis: Any) -> tuple[int | None, Any, Any, Any]:
    """The axis that is kept (None: neither), and for each index of it (for None, each row) the
    extremum and where it is; for None also the number of each row, or None where that is its
    position."""
    what = f"SparseArray.{name}"
    axes = parts.axes(axis, A.ndim, what)
    if A.ndim != 2:
        raise NotImplementedError(
            f"{what}: of a tensor of {A.ndim} dimensions; the nearest is A.todense().{name}(...), "
            "or that of A.reshape(m, n)"
        )
    if not axes:
        raise NotImplementedError(f"{what}: along no axis; the nearest is A itself")
    if jnp.issubdtype(A.dtype, jnp.complexfloating):
        raise ValueError(f"{what}: {A.dtype}: complex numbers have no order")
    if any(A.shape[axis] == 0 for axis in axes):
        raise ValueError(f"{what}: no element along an axis of size 0, shape {A.shape}")
    kept = None if len(axes) == 2 else 1 - axes[0]
    if kept is not None and A.shape[kept] == checks.INT32_MAX:
        raise NotImplementedError(
            f"{what}: axis={axes[0]} of shape {A.shape} has {A.shape[kept]} elements, one more "
            f"than int32 offsets allow; the nearest is A.{name}(), or along the other axis"
        )
    A = A.T if axes == (0,) else A
    long = tuple(A.format.is_coordinate and _is_long(A, n) for n in A.shape)
    long = (kept is None and long[0], long[1])
    if not any(long):
        A = entries.sum_duplicates(convert.by_entries(A))
        found = _of_rows(convert.asformat(A, CSR), greatest="max" in name)
        return kept, *found, None
    return kept, *_of_few(A, long, greatest="max" in name)


def _is_long(A: StoredArray, size: int) -> bool:
    symbolic = any(map(export.is_symbolic_dim, (A.nnz, size)))
    return not symbolic and size > 4 * A.nnz + 65536


@partial(jax.jit, static_argnames=("long", "greatest"))
def _of_few(A: StoredArray, long: tuple[bool, bool], greatest: bool) -> tuple[Any, Any, Any]:
    """`_of_rows`, and the number of each row or None, of a matrix in which few rows or columns
    store an entry: of those and of the first one that stores none, which has the first zero of all
    that store none."""
    found, shape = list(convert.coordinates(A)), list(A.shape)
    numbers: list[jax.Array | None] = []
    for axis, size in enumerate(A.shape):
        if not long[axis]:
            numbers.append(None)
            continue
        place, count = structure.positions(A.nnz), A.nnz
        stored = jnp.unique(found[axis], size=count, fill_value=size) if count else place
        empty = jnp.min(jnp.where(stored != place, place, count), initial=count)
        listed = jnp.append(stored, empty).astype(jnp.int32)
        number = jnp.unique(listed, size=count + 1, fill_value=size)
        real, shape[axis] = found[axis] < size, count + 1
        found[axis] = jnp.where(real, jnp.searchsorted(number, found[axis]), count + 1)
        numbers.append(number)
    few, format = tuple(shape), CSR
    made = capacity.of_coordinates(found, A.values, shape=few, format=format, nse=A.nnz, merge=True)
    values, columns = _of_rows(
        replace(A, **made, shape=few, format=format, statistics=PatternStatistics()), greatest
    )
    rows, across = numbers
    return values, columns if across is None else across[columns], rows


@partial(jax.jit, static_argnames="greatest")
def _of_rows(A: StoredArray, greatest: bool) -> tuple[jax.Array, jax.Array]:
    """[rows] the extremum of each row of a valid matrix in CSR, and its first column."""
    offsets, indices = structure.unfolded(A.index_arrays[1])
    (rows, columns), nnz = A.shape, A.nnz
    if 0 in (rows, nnz):
        return jnp.zeros(rows, A.dtype), jnp.zeros(rows, jnp.int32)
    place, values = structure.positions(nnz), structure.whole(A.values)
    row = jnp.where(place < offsets[-1], structure.segment_of_entry(offsets, nnz), rows)
    at = jnp.minimum(row, rows - 1)
    ordered = jax.lax.stop_gradient(values)
    ordered = ordered.astype(jnp.int32) if values.dtype == jnp.bool_ else ordered
    reduce = jax.ops.segment_max if greatest else jax.ops.segment_min
    first = partial(jax.ops.segment_min, segment_ids=row, num_segments=rows)
    best = reduce(ordered, row, num_segments=rows)
    found = (ordered == best[at]) | (ordered != ordered)  # NaN, where there is one
    entry = first(jnp.where(found, place, nnz))
    stored, rank = jnp.diff(offsets), place - offsets[at]
    absent = jnp.minimum(first(jnp.where(indices != rank, rank, columns)), stored)
    entry = jnp.where(stored > 0, jnp.minimum(entry, nnz - 1), 0)
    value, column = values[entry], indices[entry]
    known, zero = ordered[entry], jnp.zeros((), ordered.dtype)
    less = known < zero if greatest else known > zero
    earlier = (known == zero) & (absent < column)
    implicit = (stored < columns) & ((stored == 0) | less | earlier)
    return (
        jnp.where(implicit, jnp.zeros((), A.dtype), value),
        jnp.where(implicit, absent, column),
    )
