"""Conversions between `SparseArray` and NumPy, SciPy, BCOO and BCSR.

The `from_*` functions return the fields of a SparseArray as a dict; the classmethods of SparseArray
document them. `jax.experimental.sparse` is imported only where it is needed: that takes 0.2 s.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse

from sgap_jax.formats import capacity, checks, construct, convert, structure, vectors
from sgap_jax.formats.levels import COO, CSC, CSR, Format, require_stored
from sgap_jax.formats.stored import StoredArray


def from_dense(x: Any, *, format: Format | str, dtype: Any, nse: Any = None) -> dict[str, Any]:
    what = "SparseArray.from_dense"
    nse = None if nse is None else checks.check_count(nse, "nse", what)
    if nse is None:
        checks.check_concrete(
            x,
            "x",
            what,
            "the number of entries is a static size: give nse, how many can be stored, or build "
            "the structure outside jit and use with_values inside",
        )
    if hasattr(x, "todense"):
        raise ValueError(
            f"{what}: x: expected a dense array, got a {type(x).__name__}; from_scipy, from_bcoo "
            "and from_bcsr take those of others, asformat is for a SparseArray"
        )
    try:
        x = checks.as_array(x)
    except ValueError as error:
        raise ValueError(f"{what}: x: expected an array, got {error}") from None
    checks.check_numeric(x.dtype, what, "x")
    if not x.ndim:
        raise ValueError(f"{what}: x: expected one dimension or more, got shape []")
    shape = checks.check_shape(x.shape, what)
    format = require_stored(format, x.ndim, what)
    if nse is not None:
        capacity.require_sortable(format, x.ndim, what)
        checks.check_nnz(nse, what)
    if checks.is_traced(x):
        checks.check_nnz(x.size, what)
        x = checks.to_jax_values(x, dtype, what)
        made = capacity.of_dense(x, shape=shape, format=format, nse=nse)
        return made | {"shape": shape, "format": format}
    x = np.asarray(x)
    # np.nonzero of the transpose to the format's mode order finds the entries already sorted.
    found = np.nonzero(np.transpose(x, format.modes) != 0)
    coordinates = [found[format.modes.index(mode)] for mode in range(x.ndim)]
    fields = construct.assemble(
        coordinates,
        x[tuple(coordinates)],
        shape,
        format,
        duplicates="error",
        dtype=dtype,
        what=what,
    )
    return fields if nse is None else capacity.padded(fields, nse, what)


def from_coordinates(
    coordinates: Any,
    values: Any,
    shape: Any,
    *,
    format: Format | str,
    dtype: Any,
    duplicates: str,
    nse: Any = None,
    what: str = "SparseArray.from_coordinates",
) -> dict[str, Any]:
    coordinates = checks.check_indices(_stacked(coordinates, what), "coordinates", 2, what)
    shape = checks.check_shape(_least_shape(coordinates, what) if shape is None else shape, what)
    format = require_stored(format, len(shape), what)
    if coordinates.shape[1] != len(shape):
        raise ValueError(
            f"{what}: coordinates: expected shape [nnz, {len(shape)}] for shape {shape}, "
            f"got {list(coordinates.shape)}"
        )
    values = np.ones(coordinates.shape[:1], np.float32) if values is None else values
    values = checks.check_values(values, coordinates.shape[0], what)
    traced = checks.is_traced(coordinates)
    if nse is not None or traced:
        capacity.require_sortable(format, len(shape), what)
        nse = coordinates.shape[0] if nse is None else checks.check_count(nse, "nse", what)
        checks.check_nnz(nse, what)
        checks.check_nnz(coordinates.shape[0], what)
    if not traced:
        fields = construct.assemble(
            list(coordinates.T),
            values,
            shape,
            format,
            duplicates=duplicates,
            dtype=dtype,
            what=what,
        )
        return fields if nse is None else capacity.padded(fields, nse, what)
    construct.check_duplicates(duplicates, what)
    made = capacity.of_coordinates(
        list(coordinates.T),
        checks.to_jax_values(values, dtype, what),
        shape=shape,
        format=format,
        nse=nse,
        merge=duplicates == "sum",
    )
    return made | {"shape": shape, "format": format}


def _stacked(coordinates: Any, what: str) -> Any:
    """[nnz, ndim] of a tuple of index arrays; anything else as it is."""
    arrays = isinstance(coordinates, tuple) and any(getattr(x, "ndim", 0) for x in coordinates)
    if not arrays:
        return coordinates
    expected = "coordinates: expected a tuple of index arrays [nnz], one for each dimension"
    try:
        coordinates = [checks.as_array(x) for x in coordinates]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {expected}, got {error}") from None
    shapes = [list(x.shape) for x in coordinates]
    if any(shape != shapes[0] or len(shape) != 1 for shape in shapes):
        raise ValueError(f"{what}: {expected}, got shapes {', '.join(map(str, shapes))}")
    coordinates = [checks.check_indices(x, "coordinates", 1, what) for x in coordinates]
    if checks.is_traced(*coordinates):
        return jnp.stack([checks.saturated(x) for x in coordinates], axis=1)
    if len({x.dtype for x in coordinates}) > 1:  # int64 and uint64 would be float64
        most = np.uint64(2**63 - 1)
        clipped = [np.minimum(x, most) if x.dtype == np.uint64 else x for x in coordinates]
        coordinates = [x.astype(np.int64) for x in clipped]
    return np.stack(coordinates, axis=1)


def _least_shape(coordinates: Any, what: str) -> tuple[int, ...]:
    checks.check_concrete(coordinates, "coordinates", what, "pass shape, which is static")
    if not coordinates.size:
        raise ValueError(f"{what}: shape: expected one, since there are no coordinates")
    return tuple(int(size) + 1 for size in coordinates.max(axis=0))


def from_topk(
    indices: Any, values: Any, *, shape: Any, format: Format | str, dtype: Any, nse: Any
) -> dict[str, Any]:
    what = "SparseArray.from_topk"
    shape = checks.check_shape(shape, what)
    indices = checks.check_indices(indices, "indices", 2, what)
    (m, k), columns = indices.shape, indices.reshape(-1)
    if len(shape) != 2 or shape[0] != m:
        raise ValueError(
            f"{what}: shape: expected ({m}, columns), the rows of indices {[m, k]}, got {shape}"
        )
    values = jnp.ones((m, k), dtype) if values is None else checks.as_array(values)
    rows: Any = np.repeat(np.arange(m, dtype=np.int32), k)
    if values.shape != (m, k):
        raise ValueError(f"{what}: values: expected shape [{m}, {k}], got {list(values.shape)}")
    values = values.reshape(-1)
    if not checks.is_traced(columns):
        real = (columns >= 0) & (columns < shape[1])
        rows, columns, values = rows[real], columns[real], values[np.flatnonzero(real)]
    stack: Any = jnp if checks.is_traced(columns) else np
    return from_coordinates(
        stack.stack([rows, columns], axis=1),
        values,
        shape,
        format=format,
        dtype=dtype,
        duplicates="sum",
        nse=m * k if nse is None else nse,
        what=what,
    )


def from_scipy(a: Any, *, format: Format | str, dtype: Any, duplicates: str) -> dict[str, Any]:
    what = "SparseArray.from_scipy"
    if not scipy.sparse.issparse(a):
        raise ValueError(
            f"{what}: a: expected a SciPy sparse array or matrix, got {type(a).__name__}; "
            "SparseArray.from_dense takes dense arrays"
        )
    shape = checks.check_shape(a.shape, what)
    format = require_stored(format, len(shape), what)
    if a.format in ("csr", "csc") and len(shape) == 2:
        modes = (0, 1) if a.format == "csr" else (1, 0)
        coordinates = construct.expand_compressed(
            a.indptr, a.indices, shape, modes, ("indptr", "indices"), what
        )
        values = a.data[: coordinates[0].shape[0]]
    else:
        a = a.tocoo()
        # SciPy before 1.13 has no .coords.
        coordinates = list(a.coords if hasattr(a, "coords") else (a.row, a.col))
        values = a.data
    values = checks.check_values(values, coordinates[0].shape[0], what)
    return construct.assemble(
        coordinates, values, shape, format, duplicates=duplicates, dtype=dtype, what=what
    )


def from_bcoo(
    a: Any, *, format: Format | str, dtype: Any, duplicates: str, nse: Any = None
) -> dict[str, Any]:
    what = "SparseArray.from_bcoo"
    from jax.experimental.sparse import BCOO

    if not isinstance(a, BCOO):
        raise ValueError(f"{what}: a: expected a BCOO, got {type(a).__name__}")
    _check_unbatched(a, what)
    indices: Any = a.indices
    values = a.data
    if not checks.is_traced(indices):
        indices = np.asarray(indices)
        real = (indices < np.asarray(a.shape)).all(axis=1)
        if not real.all():  # BCOO marks padding by indices past the end
            indices, values = indices[real], values[np.flatnonzero(real)]
    return from_coordinates(
        indices,
        values,
        a.shape,
        format=format,
        dtype=dtype,
        duplicates=duplicates,
        nse=nse,
        what=what,
    )


def from_bcsr(a: Any, *, format: Format | str, dtype: Any, duplicates: str) -> dict[str, Any]:
    what = "SparseArray.from_bcsr"
    check_bcsr(a)
    shape = checks.check_shape(a.shape, what)
    coordinates = construct.expand_compressed(
        a.indptr, a.indices, shape, (0, 1), ("indptr", "indices"), what
    )
    return construct.assemble(
        coordinates,
        checks.check_values(a.data[: coordinates[0].shape[0]], None, what),
        shape,
        require_stored(format, 2, what),
        duplicates=duplicates,
        dtype=dtype,
        what=what,
    )


def check_bcsr(a: Any) -> None:
    from jax.experimental.sparse import BCSR

    if not isinstance(a, BCSR):
        raise ValueError(f"SparseArray.from_bcsr: a: expected a BCSR, got {type(a).__name__}")
    _check_unbatched(a, "SparseArray.from_bcsr")


def _check_unbatched(a: Any, what: str) -> None:
    if a.n_batch or a.n_dense:
        raise NotImplementedError(
            f"{what}: n_batch = {a.n_batch} and n_dense = {a.n_dense}; the nearest is 0 and 0, "
            "with vmap over the values"
        )


def to_numpy(A: StoredArray, what: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Values and one index array per dimension, without padding."""
    if checks.is_traced(A.values, *(x for level in A.index_arrays for x in level)):
        raise ValueError(f"{what}: expected concrete arrays, got tracers; call it outside jit")
    convert.require_unbatched(A, f"{what}: A")
    with structure.concrete():  # under jit too
        if A.format.block_shape:
            A = vectors.expand(A)
        if A.format.dense_modes:
            A = convert.asformat(A, COO)
    levels = convert.stored_levels(A, what)
    coordinates = [levels[A.format.modes.index(mode)] for mode in range(A.ndim)]
    return np.asarray(A.values)[: len(levels[0])], coordinates


def widen(values: np.ndarray) -> np.ndarray:
    """Casts floats narrower than float32, which SciPy and text files do not support, to float32."""
    narrow = jnp.issubdtype(values.dtype, jnp.floating) and values.dtype.itemsize < 4
    return values.astype(np.float32) if narrow else values


def to_scipy(A: StoredArray) -> Any:
    values, coordinates = to_numpy(A, "SparseArray.to_scipy")
    values = widen(values)
    if is_bsr(A):
        return scipy.sparse.bsr_array(bsr_arrays(A), shape=A.shape)
    if A.format.block_shape:
        with structure.concrete():
            A = vectors.expand(A)
    if A.format in (CSR, CSC):
        cls = scipy.sparse.csr_array if A.format == CSR else scipy.sparse.csc_array
        offsets, indices = (np.array(x) for x in A.index_arrays[1])
        return cls((values.copy(), indices[: values.shape[0]], offsets), shape=A.shape)
    try:
        return scipy.sparse.coo_array(
            (values.copy(), tuple(index.copy() for index in coordinates)), shape=A.shape
        )
    except (TypeError, ValueError):
        if A.ndim == 2:
            raise
        raise NotImplementedError(
            f"SparseArray.to_scipy: this SciPy has matrices only, got shape {A.shape}"
        ) from None


def is_bsr(A: StoredArray) -> bool:
    """Whether SciPy's BSR would have the same arrays: A stores blocks by rows, and the block shape
    divides A's shape."""
    if not A.format.block_shape or A.format.order is not None:
        return False
    return all(size % side == 0 for size, side in zip(A.shape, vectors.tile(A.format), strict=True))


def bsr_arrays(A: StoredArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies of the blocks [blocks, r, c], block columns and offsets, without padding."""
    offsets, indices = (np.array(x) for x in A.index_arrays[1])
    used = int(offsets[-1])
    blocks = widen(np.asarray(A.values))[:used].copy()
    return blocks.reshape(-1, *vectors.tile(A.format)), indices[:used], offsets


def to_bcsr(A: StoredArray) -> Any:
    from jax.experimental.sparse import BCSR

    if A.ndim != 2:
        raise ValueError(f"SparseArray.to_bcsr: expected a matrix, got shape {A.shape}")
    convert.require_unbatched(A, "SparseArray.to_bcsr: A")
    csr = convert.asformat(A, CSR)
    values, columns, offsets = csr.values, csr.column_indices, csr.row_offsets
    if not csr._every_entry_counts:  # BCSR's offsets begin at 0 and never fall
        offsets, columns, entry, _ = structure.compacted(offsets, columns, A.shape[1])
        stored = structure.positions(csr.nnz) < offsets[-1]
        values = jnp.where(stored, values[entry], jnp.zeros_like(values))
    return BCSR(
        (values, columns, offsets),
        shape=A.shape,
        indices_sorted=csr.is_checked,
        unique_indices=csr.is_checked,
    )


def to_bcoo(A: StoredArray) -> Any:
    from jax.experimental.sparse import BCOO

    indices = jnp.stack(convert.coordinates(A), axis=1)
    natural = A.format.order is None and not A.format.block_shape
    # Of an unchecked array entries may be in any order and repeat, as the edges of a multigraph do:
    # JAX applies a function to each value where it is told that no index repeats.
    return BCOO(
        (A.values.reshape(-1), indices),
        shape=A.shape,
        indices_sorted=natural and A.is_checked,
        unique_indices=A.is_checked,
    )
