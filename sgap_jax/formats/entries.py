"""The entries of a `SparseArray` listed otherwise: reshaped, each once, without zeros."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import capacity, checks, construct, convert
from sgap_jax.formats.levels import COO, CSC, CSR, Format, require_stored
from sgap_jax.formats.row_statistics import PatternStatistics
from sgap_jax.formats.stored import Array, StoredArray


def reshape(A: Array, shape: tuple[Any, ...], order: str) -> Array:
    """See `SparseArray.reshape`."""
    what = "SparseArray.reshape"
    if order != "C":
        raise NotImplementedError(
            f"{what}: order: expected 'C', got {order!r}; the nearest is A.T.reshape(...).T"
        )
    sizes = _sizes(shape, A.shape, what)
    if sizes == A.shape:
        return A
    coordinates, values = convert.entries(A, f"{what}: A")
    total = math.prod(A.shape)
    format = A.format
    if len(sizes) != A.ndim or format.block_shape or format.dense_modes:
        format = CSR if len(sizes) == 2 else COO
    if checks.is_traced(*coordinates):
        if total > checks.INT32_MAX:
            raise NotImplementedError(
                f"{what}: a traced structure of {total} places, of which int32 holds "
                f"{checks.INT32_MAX}; the nearest is to reshape outside jit"
            )
        inside = coordinates[0] < A.shape[0]
        flat = _flat([jnp.where(inside, x, 0) for x in coordinates], A.shape)
        found = [jnp.where(inside, x, -1) for x in _unflat(flat, sizes)]
        return _listed(A, found, values, sizes, format, what)
    if total > np.iinfo(np.int64).max:
        raise NotImplementedError(f"{what}: a tensor of {total} places, of which int64 holds fewer")
    found = _unflat(_flat([x.astype(np.int64) for x in coordinates], A.shape), sizes)
    return _listed(A, found, values, sizes, format, what)


def _sizes(shape: tuple[Any, ...], before: tuple[int, ...], what: str) -> tuple[int, ...]:
    given = shape[0] if len(shape) == 1 and not hasattr(shape[0], "__index__") else shape
    checks.check_concrete(given, "shape", what, "shapes are static")
    try:
        sizes = [operator.index(size) for size in given]
    except TypeError:
        raise ValueError(f"{what}: shape: expected integers, got {shape}") from None
    total, known = math.prod(before), math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known and total % known == 0:
        sizes = [total // known if size == -1 else size for size in sizes]
    if min(sizes, default=-1) < 0 or math.prod(sizes) != total:
        raise ValueError(f"{what}: shape: expected one of {total} places, got {given}")
    return checks.check_shape(sizes, what)


def _flat(coordinates: Any, shape: tuple[int, ...]) -> Any:
    flat = coordinates[0]
    for index, size in zip(coordinates[1:], shape[1:], strict=True):
        flat = flat * size + index
    return flat


def _unflat(flat: Any, shape: tuple[int, ...]) -> list[Any]:
    found = []
    for size in reversed(shape[1:]):
        found.append(flat % max(size, 1))
        flat = flat // max(size, 1)
    return [flat, *reversed(found)]


def sum_duplicates(A: Array, what: str = "SparseArray.sum_duplicates") -> Array:
    """See `SparseArray.sum_duplicates`; `what` is the operation that needs it."""
    if A.is_checked:
        return A
    coordinates, values = convert.entries(A, f"{what}: A")
    return _listed(A, coordinates, values, A.shape, A.format, what)


def asformat(A: Array, format: Format | str, max_fill_in: Any = None) -> Array:
    """`convert.asformat`; formats that store each coordinate once get the sum of those that repeat
    in a concrete A."""
    format = require_stored(format, A.ndim, "SparseArray.asformat")
    by_entry = A.ndim == 2 and (format in (CSR, CSC) or format.is_coordinate)
    once = A.is_checked or A.format.block_shape or A.format.dense_modes
    index_arrays = [x for level in A.index_arrays for x in level]
    if not (once or by_entry or format == A.format or checks.is_traced(*index_arrays)):
        A = sum_duplicates(A)
    return convert.asformat(A, format, max_fill_in)


def eliminate_zeros(A: Array, nse: Any) -> Array:
    """See `SparseArray.eliminate_zeros`."""
    what = "SparseArray.eliminate_zeros"
    nse = None if nse is None else checks.check_count(nse, "nse", what)
    coordinates, values = convert.entries(sum_duplicates(A, what), f"{what}: A")
    if checks.is_traced(values, *coordinates):
        kept = values != 0
        coordinates = [jnp.where(kept, x, -1) for x in coordinates]
        return _listed(A, coordinates, values, A.shape, A.format, what, nse)
    kept = np.flatnonzero(values)
    coordinates = [x[kept] for x in coordinates]
    return _listed(A, coordinates, values[kept], A.shape, A.format, what, nse)


def nonzero(A: StoredArray) -> tuple[jax.Array, ...]:
    """See `SparseArray.nonzero`."""
    what = "SparseArray.nonzero"
    coordinates, values = convert.entries(A, f"{what}: A")
    if checks.is_traced(values, *coordinates):
        raise ValueError(
            f"{what}: how many entries are not zero is not known, since A is traced; "
            "A.coordinates() lists all that are stored"
        )
    coordinates, values = convert.entries(sum_duplicates(A, what), f"{what}: A")
    kept = np.flatnonzero(values)
    found = [x[kept] for x in coordinates]
    order = np.lexsort(found[::-1])
    return tuple(checks.to_device(x[order].astype(np.int32)) for x in found)


def _listed(
    A: Array,
    coordinates: list[Any],
    values: Any,
    shape: tuple[int, ...],
    format: Format,
    what: str,
    nse: int | None = None,
) -> Array:
    """An array of these entries, equal coordinates summed; traced ones out of range are padding."""
    format = require_stored(format, len(shape), what)
    if checks.is_traced(*coordinates):
        if format.block_shape:
            raise NotImplementedError(
                f"{what}: {format} of a traced structure: how many of its places are stored is no "
                "static size; the nearest is that of A.asformat(CSR)"
            )
        capacity.require_sortable(format, len(shape), what)
        made = capacity.of_coordinates(
            coordinates,
            jnp.asarray(values),
            shape=shape,
            format=format,
            nse=A.nnz if nse is None else nse,
            merge=True,
        )
    else:
        made = construct.assemble(
            coordinates, values, shape, format, duplicates="sum", dtype=None, what=what
        )
        if nse is not None:
            capacity.require_sortable(format, len(shape), what)
            made = capacity.padded(made, nse, what)
    fields = {"statistics": PatternStatistics()} | made | {"shape": shape, "format": format}
    return replace(A, **fields)
