"""Rows of a `SparseArray`, and sums of it."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import construct, convert, structure, vectors

if TYPE_CHECKING:
    from sgap_jax.formats.array import SparseArray


def rows(A: SparseArray, index: Any) -> SparseArray:
    """See `SparseArray.__getitem__`."""
    what = "SparseArray[i:j]"
    start, stop = _bounds(index, A.shape[0])
    if (start, stop) == (0, A.shape[0]):
        return A
    level = A.format.modes.index(0)
    side = vectors.tile(A.format)[level] if A.format.block_shape else 1
    if start % side or (stop % side and stop != A.shape[0]):
        raise IndexError(
            f"{what}: rows of {A.format} are cut at multiples of {side}, got {start}:{stop}; "
            "A.asformat(CSR)[i:j] cuts anywhere"
        )
    levels = convert.stored_levels(A, what)
    first, last = start // side, -(-stop // side)
    along = levels[level]
    if level == 0:
        kept: Any = slice(*map(int, np.searchsorted(along, [first, last])))
    else:
        kept = np.flatnonzero((first <= along) & (along < last)).astype(np.int32)
    levels = [x[kept] for x in levels]
    levels[level] = levels[level] - first
    shape = (stop - start, *A.shape[1:])
    sizes = convert.level_sizes(shape, A.format)
    fields = construct.index_fields(levels, sizes, A.format)
    return replace(A, values=structure.whole(A.values)[kept], shape=shape, **fields)


def _bounds(index: Any, size: int) -> tuple[int, int]:
    """Of a slice of step 1, within 0 .. size; (0, 0) where it is empty."""
    if not isinstance(index, slice):
        raise IndexError(
            f"SparseArray: expected a slice of rows, A[i:j], got {type(index).__name__}; "
            "A[i:i + 1] is one row, A.T[i:j].T cuts columns, A.todense() takes any index"
        )
    try:
        start, stop, step = index.indices(size)
    except (TypeError, ValueError) as error:  # of tracers, floats and a step of 0
        raise IndexError(f"SparseArray[i:j]: expected integers that are known: {error}") from None
    if step != 1:
        raise IndexError(f"SparseArray[i:j]: expected a slice of step 1, got step {step}")
    return (start, stop) if start < stop else (0, 0)


def total(A: SparseArray, axis: Any) -> jax.Array:
    """See `SparseArray.sum`."""
    what = "SparseArray.sum"
    if axis is not None:
        axis = _axis(axis, A.ndim, what)
    convert.require_unbatched(A, f"{what}: A")
    if axis is None or A.ndim == 1:
        return _total(A)
    if A.ndim != 2:
        raise NotImplementedError(
            f"{what}: along one axis of a tensor, {A.shape}; the nearest is einsum('ijk->ij', A)"
        )
    from sgap_jax.primitives.row_reduce import row_sum  # the primitives take arrays of this kind
    from sgap_jax.schedules.schedule import KERNEL_DTYPES, Reference

    dtype = _sum_dtype(A.dtype)
    schedule = None if dtype.name in KERNEL_DTYPES else Reference()
    return row_sum((A if axis == 1 else A.T).astype(dtype), schedule=schedule)


@jax.jit
def _total(A: SparseArray) -> jax.Array:
    mode = A.format.modes[-1]  # whose coordinates are at hand
    stored = convert.coordinates(A)[mode] < A.shape[mode]
    values = A.values.reshape(-1)
    if jnp.issubdtype(A.dtype, jnp.floating) and A.dtype.itemsize < 4:
        values = values.astype(jnp.float32)
    return jnp.sum(values, where=stored).astype(_sum_dtype(A.dtype))


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """Of `jnp.sum`, which is slow to ask: 110 us."""
    return _asked(dtype, jax.dtypes.canonicalize_dtype(np.int64))


@cache
def _asked(dtype: np.dtype, integers: np.dtype) -> np.dtype:
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((1,), dtype)).dtype


def _axis(axis: Any, ndim: int, what: str) -> int:
    try:
        number = operator.index(axis)
    except TypeError:
        number = ndim
    if not -ndim <= number < ndim:
        raise ValueError(
            f"{what}: axis: expected None or an integer in {-ndim} .. {ndim - 1}, got {axis!r}"
        )
    return number % ndim
