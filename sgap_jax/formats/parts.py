"""Sums and means of a `SparseArray`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import construct, convert
from sgap_jax.formats.stored import StoredArray


def total(A: StoredArray, axis: Any, dtype: Any, keepdims: bool) -> jax.Array:
    """See `SparseArray.sum`."""
    what = "SparseArray.sum"
    found, dtype = axes(axis, A.ndim, what), _dtype(jnp.sum, A, dtype)
    return _shaped(A, _sums(A, found, dtype, what), found, keepdims)


def mean(A: StoredArray, axis: Any, dtype: Any, keepdims: bool) -> jax.Array:
    """See `SparseArray.mean`."""
    what = "SparseArray.mean"
    found, dtype = axes(axis, A.ndim, what), _dtype(jnp.mean, A, dtype)
    if dtype == np.bool_:
        raise TypeError(f"{what}: dtype: expected numbers, got bool; astype(bool) after it")
    sums = _sums(A, found, construct.accumulator(dtype), what)
    count = math.prod(A.shape[axis] for axis in found)  # may exceed int32
    means = sums / 1 / float(count)  # sums / 1 turns integers into floats
    return _shaped(A, means.astype(dtype), found, keepdims)


def _sums(A: StoredArray, axes: tuple[int, ...], dtype: np.dtype, what: str) -> jax.Array:
    """Dense sums of A over `axes` in `dtype`; accumulated in float32 at least, rounded once."""
    convert.require_unbatched(A, f"{what}: A")
    if dtype == np.bool_:
        A = A.astype(dtype)
    wide = construct.accumulator(dtype)
    if len(axes) == A.ndim:
        return _total(A, wide).astype(dtype)
    if A.ndim != 2 or not axes:
        return _scattered(A, axes, wide).astype(dtype)
    return (A if axes == (1,) else A.T)._row_sums(dtype, wide).astype(dtype)


@partial(jax.jit, static_argnames="dtype")
def _total(A: StoredArray, dtype: np.dtype) -> jax.Array:
    mode = A.format.modes[-1]  # the innermost level stores its coordinates
    stored = convert.coordinates(A)[mode] < A.shape[mode]
    return jnp.sum(A.values.astype(dtype), where=stored.reshape(A.values.shape), dtype=dtype)


@partial(jax.jit, static_argnames=("axes", "dtype"))
def _scattered(A: StoredArray, axes: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    kept = [mode for mode in range(A.ndim) if mode not in axes]
    found = convert.coordinates(A)
    shape = tuple(A.shape[mode] for mode in kept)
    return convert.scattered(A.values.astype(dtype), tuple(found[mode] for mode in kept), shape)


def _shaped(A: StoredArray, sums: jax.Array, axes: tuple[int, ...], keepdims: bool) -> jax.Array:
    if not keepdims:
        return sums
    return sums.reshape([1 if mode in axes else size for mode, size in enumerate(A.shape)])


def _dtype(op: Callable, A: StoredArray, dtype: Any) -> np.dtype:
    """`dtype` if given, else the result dtype of the dense `op`: finding it takes 110 us, so
    `_asked` is cached."""
    if dtype is not None:
        return np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return _asked(op, A.dtype, jax.dtypes.canonicalize_dtype(np.int64))


@cache
def _asked(op: Callable, dtype: np.dtype, integers: np.dtype) -> np.dtype:
    return jax.eval_shape(op, jax.ShapeDtypeStruct((1,), dtype)).dtype


_NEAREST = {
    "out": "out[...] = the result",
    "initial": "the result + initial",
    "where": "that of A.with_values(jnp.where(mask, A.values, 0)) for a mask of the entries, or of "
    "A.todense()",
}


def refuse(what: str, **options: Any) -> None:
    """NotImplementedError for an option that is not None: np.sum(A, ...) and the like pass them
    on to A's methods."""
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"{what}: {name}: the nearest is {_NEAREST[name]}")


def axes(axis: Any, ndim: int, what: str) -> tuple[int, ...]:
    """`axis` as a sorted tuple of distinct axes in 0 .. ndim - 1; ValueError otherwise."""
    if axis is None:
        return tuple(range(ndim))
    try:
        numbers = [operator.index(x) for x in (axis if isinstance(axis, tuple) else (axis,))]
    except TypeError:
        numbers = [ndim]
    found = sorted(number % ndim for number in numbers if -ndim <= number < ndim)
    if len(set(found)) != len(numbers):
        raise ValueError(
            f"{what}: axis: expected None, an integer in {-ndim} .. {ndim - 1} or a tuple of them, "
            f"each once, got {axis!r}"
        )
    return tuple(found)
