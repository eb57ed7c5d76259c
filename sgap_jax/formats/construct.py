"""Builds concrete index arrays in NumPy and SciPy: sort, merge duplicates, transpose.

There is no Python loop over entries. SciPy's conversion from CSR to CSC serves as a stable counting
sort; it is given positions instead of values, so that any dtype works (bfloat16 too), duplicates
are not summed silently and explicit zeros stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from sgap_jax.formats import checks, row_statistics, structure, vectors
from sgap_jax.formats.levels import CSR, Dense, Format, require_stored

DUPLICATES = ("sum", "error")


# Offsets of a matrix may exceed its entries by this factor, unless they are fewer than the first.
_FREE_OFFSETS = 1 << 24
_OFFSETS_PER_ENTRY = 64


def out_of_proportion(shape: Sequence[int], nnz: int) -> bool:
    """Whether offsets over the rows and columns of a matrix are far more than its entries: a few
    entries may have a shape whose offsets alone would fill the memory."""
    return len(shape) == 2 and sum(shape) > max(_FREE_OFFSETS, _OFFSETS_PER_ENTRY * nnz)


def spares_offsets(format: Format, shape: Sequence[int], nnz: int) -> bool:
    """Whether an array does without offsets over its rows and columns, which its format does not
    need and which would be out of proportion."""
    return not isinstance(format.levels[0], Dense) and out_of_proportion(shape, nnz)


def check_proportion(shape: Sequence[int], nnz: int, format: Format, what: str, near: str) -> None:
    """ValueError for offsets out of proportion that the format needs."""
    if isinstance(format.levels[0], Dense) and out_of_proportion(shape, nnz):
        raise ValueError(
            f"{what}: expected a shape in proportion to {nnz} entries, got {tuple(shape)}, which "
            f"needs {sum(shape) * 4 / 2**30:.1f} GiB of offsets in {format}; {near}"
        )


def expand_offsets(offsets: np.ndarray, nnz: int) -> np.ndarray:
    """[offsets[-1]]: the segment of each entry that is not padding, of a capacity of `nnz`.

    Checks the offsets again, as an array can be written to after its check: ValueError if corrupt.
    """
    checks.check_offsets(offsets, offsets.shape[0] - 1, nnz, "offsets", "SparseArray")
    return np.repeat(np.arange(offsets.shape[0] - 1, dtype=np.int32), np.diff(offsets))


def expand_compressed(
    offsets: Any,
    indices: Any,
    shape: tuple[int, ...],
    modes: tuple[int, int],
    names: tuple[str, str],
    what: str,
) -> list[np.ndarray]:
    """[rows, columns] of the entries of compressed arrays, which may be unsorted; ValueError if the
    offsets are corrupt."""
    offsets = checks.check_indices(offsets, names[0], 1, what)
    indices = checks.check_indices(indices, names[1], 1, what)
    checks.check_offsets(offsets, shape[modes[0]], indices.shape[0], names[0], what)
    levels = expand_offsets(offsets, indices.shape[0]), indices[: int(offsets[-1])]
    return [levels[modes.index(mode)] for mode in (0, 1)]


def count_offsets(indices: np.ndarray, size: int) -> np.ndarray:
    """[size + 1] offsets of sorted indices."""
    # Not np.bincount: its int64 counts would triple the memory if `size` is large.
    offsets = np.zeros(size + 1, np.int32)
    if indices.size:
        starts = np.flatnonzero(indices[1:] != indices[:-1]) + 1
        ends = np.append(starts, indices.size)
        offsets[indices[ends - 1] + 1] = np.diff(ends, prepend=0)
        np.cumsum(offsets, out=offsets)
    return offsets


def transpose_structure(
    offsets: np.ndarray, indices: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offsets [size + 1], indices [nnz], permutation [nnz]) of the other orientation.

    Entry p there is entry permutation[p] here; segments ascend within each index; padding (entries
    past offsets[-1]) goes last and gets index 0.
    """
    nnz, used = indices.shape[0], int(offsets[-1])
    # SciPy trusts its arguments, and these may have been written to after their check.
    checks.check_offsets(offsets, offsets.shape[0] - 1, nnz, "offsets", "SparseArray")
    checks.check_range(indices[:used], size, "indices", "SparseArray")
    where = np.arange(nnz, dtype=np.int32)
    rows = offsets.shape[0] - 1
    other = scipy.sparse.csr_array(
        (where[:used], indices[:used], offsets), shape=(rows, size)
    ).tocsc()
    segments = np.zeros(nnz, np.int32)
    segments[:used] = other.indices
    where[:used] = other.data
    return other.indptr.astype(np.int32, copy=False), segments, where


def sort_rows(
    offsets: np.ndarray, indices: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(order, indices, transposed) of entries without padding, whose indices are in any order
    within their segment: entry order[p] becomes entry p, and of these `transpose_structure`.
    Linear: the transpose of the transpose is sorted."""
    across, segments, entry = transpose_structure(offsets, indices, size)
    _, columns, place = transpose_structure(across, segments, offsets.shape[0] - 1)
    permutation = np.empty_like(place)
    permutation[place] = np.arange(place.shape[0], dtype=np.int32)
    return entry[place], columns, (across, segments, permutation)


def _stable_order(keys: np.ndarray, size: int, order: np.ndarray | None) -> np.ndarray:
    """`order` (None: 0, 1, ...) sorted stably by keys[order]."""
    nnz = keys.shape[0]
    moved = keys if order is None else keys[order]
    if size > 4 * nnz + 65536:  # a counting sort needs an array of `size`: too large here
        sort = np.argsort(moved, kind="stable")
        return sort if order is None else order[sort]
    carried = np.arange(nnz, dtype=np.int32) if order is None else order
    one_row = scipy.sparse.csr_array(
        (carried, moved, np.array([0, nnz], np.int32)), shape=(1, size)
    )
    return np.asarray(one_row.tocsc().data)


def lexicographic_order(levels: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    """The stable order of entries by their level coordinates, the first level first."""
    order = None
    for index, size in zip(reversed(levels), reversed(sizes), strict=True):
        order = _stable_order(index, size, order)
    assert order is not None
    return order


def strictly_sorted(coordinates: Sequence[np.ndarray]) -> bool:
    """True if the coordinates are in strictly increasing lexicographic order."""
    rises = np.zeros(max(coordinates[0].shape[0] - 1, 0), bool)
    for index in reversed(coordinates):
        rises &= index[1:] == index[:-1]
        rises |= index[1:] > index[:-1]
    return bool(rises.all())


def accumulator(dtype: np.dtype) -> np.dtype:
    """The dtype in which values of this dtype are summed."""
    if dtype == np.bool_:
        return np.dtype(np.int32)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if narrow else dtype


def _merge_duplicates(values: Any, first: np.ndarray) -> Any:
    """Sums each run of values with equal coordinates; `first` marks where a run starts. The
    accumulator is float32 at least."""
    dtype = values.dtype
    wide = accumulator(dtype)
    if not checks.is_traced(values):
        summed = np.add.reduceat(values.astype(wide), np.flatnonzero(first))
        return summed.astype(dtype)
    run = np.cumsum(first, dtype=np.int32) - 1
    runs = int(run[-1]) + 1
    return jax.ops.segment_sum(values.astype(wide), run, num_segments=runs).astype(dtype)


def check_duplicates(duplicates: Any, what: str) -> None:
    if duplicates not in DUPLICATES:
        raise ValueError(f"{what}: duplicates: expected one of {DUPLICATES}, got {duplicates!r}")


def assemble(
    coordinates: Sequence[np.ndarray],
    values: Any,
    shape: tuple[int, ...],
    format: Format,
    *,
    duplicates: str,
    dtype: Any,
    what: str,
    max_fill_in: float | None = None,
) -> dict[str, Any]:
    """The fields of a SparseArray from one index array per mode, in any order of entries.

    `coordinates` are concrete integers (range checked here), `values` [nnz] NumPy or traced.
    """
    check_duplicates(duplicates, what)
    checks.check_nnz(values.shape[0], what)
    if not checks.is_traced(values):
        values = np.asarray(values)
    for mode, index in enumerate(coordinates):
        checks.check_range(index, shape[mode], f"coordinates of dimension {mode}", what)
    levels = [coordinates[mode].astype(np.int32, copy=False) for mode in format.modes]
    sizes = [shape[mode] for mode in format.modes]
    if not strictly_sorted(levels):
        order = lexicographic_order(levels, sizes)
        levels = [index[order] for index in levels]
        values = values[order]
        first = np.ones(values.shape[0], bool)
        first[1:] = np.logical_or.reduce([index[1:] != index[:-1] for index in levels])
        if not first.all():
            if duplicates == "error":
                p = int(np.flatnonzero(~first)[0])
                where = tuple(int(levels[format.modes.index(m)][p]) for m in range(len(shape)))
                raise ValueError(
                    f"{what}: coordinates: expected each once, got {where} more than once "
                    f"({int((~first).sum())} duplicates in all); duplicates='sum' adds them"
                )
            values = _merge_duplicates(values, first)
            levels = [index[first] for index in levels]
    values = checks.to_jax_values(values, dtype, what)
    if format.block_shape:
        *levels, place = vectors.encode(levels[0], levels[1], format)
        vectors.check_fill_in(len(levels[0]), len(place), format, max_fill_in, what)
        values = vectors.fill_values(values, place, len(levels[0]), format)
        sizes = vectors.grid(shape, format)
    return {
        "values": values,
        **index_fields(levels, sizes, format),
        "shape": shape,
        "format": format,
    }


def index_fields(levels: list[np.ndarray], sizes: list[int], format: Format) -> dict[str, Any]:
    """The fields `index_arrays`, `transposed` and `statistics` from sorted, unique level
    coordinates. There is no transpose where offsets are spared: conversions make it."""
    offsets = None
    if len(levels) == 2 and not spares_offsets(format, sizes, levels[0].shape[0]):
        offsets = count_offsets(levels[0], sizes[0])
    if format.is_coordinate:
        bounds = np.array([0, levels[0].shape[0]], np.int32)
        index_arrays: tuple[Any, ...] = ((bounds, levels[0]), *((index,) for index in levels[1:]))
    elif format.is_fiber_tree:
        index_arrays = _fiber_tree(levels, sizes, format)
    else:
        index_arrays = ((), (offsets, levels[1]))
    transposed = None
    if offsets is not None:
        transposed = transpose_structure(offsets, levels[1], sizes[1])
    fields = structure.as_fields(index_arrays, transposed, checked=True)
    statistics = row_statistics.PatternStatistics()
    if transposed is not None:
        statistics = row_statistics.of_pattern(offsets, transposed[0])
        statistics = statistics.T if format.modes[0] == 1 else statistics
    # `placed` copies: an index array may be a view of an array that the caller writes to later.
    # The structure is concrete under jit and in shard_map too, so that (A + B) + C works there.
    with structure.concrete():
        return structure.placed(fields) | {"statistics": statistics}


def _fiber_tree(
    levels: list[np.ndarray], sizes: list[int], format: Format
) -> tuple[tuple[np.ndarray, ...], ...]:
    """The index arrays of sorted, unique level coordinates: see formats/fibers.py."""
    index_arrays: list[tuple[np.ndarray, ...]] = []
    starts = np.zeros(levels[0].shape[0], bool)  # whether an entry opens a node
    starts[:1] = True
    parent, parents = np.zeros(levels[0].shape[0], np.int32), 1
    for coordinates, size, level in zip(levels, sizes, format.levels, strict=True):
        starts[1:] |= coordinates[1:] != coordinates[:-1]
        if isinstance(level, Dense):
            index_arrays.append(())
            parent, parents = coordinates, size
            continue
        first = np.flatnonzero(starts)
        offsets = count_offsets(parent[first], parents)
        index_arrays.append((offsets, coordinates[first]))
        parent, parents = np.cumsum(starts, dtype=np.int32) - 1, first.shape[0]
    return tuple(index_arrays)


def from_arrays(
    values: Any, offsets: Any, indices: Any, shape: tuple[int, ...], format: Format | str
) -> dict[str, Any]:
    """See `SparseArray.from_arrays`."""
    what = "SparseArray.from_arrays"
    shape = checks.check_shape(shape, what)
    format = require_stored(format, len(shape), what)
    if format.levels[:2] != CSR.levels or len(shape) != 2:
        raise ValueError(
            f"{what}: format: expected CSR, CSC, CVS(V) or BCSR(r, c), got {format}; "
            "use from_coordinates"
        )
    names = ("row_offsets", "column_indices")
    if format.order is not None:
        names = ("column_offsets", "row_indices")
    outer, inner = vectors.grid(shape, format)
    given = offsets, indices
    offsets = checks.check_indices(offsets, names[0], 1, what)
    indices = checks.check_indices(indices, names[1], 1, what)
    if offsets.shape[0] != outer + 1:
        raise ValueError(
            f"{what}: {names[0]}: expected shape [{outer + 1}], got {list(offsets.shape)}"
        )
    checks.check_nnz(indices.shape[0] * math.prod(format.block_shape), what)
    stored = indices.shape[0], *format.block_shape
    values = np.ones(stored, np.float32) if values is None else values
    values = checks.check_values(values, indices.shape[0], what, format.block_shape)
    if checks.is_traced(offsets, indices):
        # Indices out of range stay so, for `checked()` to find.
        arrays = [checks.saturated(a) for a in given]
        transposed = structure.transpose_structure(arrays[0], arrays[1], inner)
        statistics = row_statistics.PatternStatistics()
        fields: dict[str, Any] = {"index_arrays": ((), tuple(arrays)), "transposed": transposed}
    else:
        checks.check_compressed(offsets, indices, (outer, inner), names, what)
        with structure.concrete():  # for the reason given in index_fields
            arrays = [
                a
                if isinstance(a, jax.Array) and a.dtype == jnp.int32
                else structure.placed(c.astype(np.int32, copy=False))
                for a, c in zip(given, (offsets, indices), strict=True)
            ]
            offsets, indices = (x.astype(np.int32, copy=False) for x in (offsets, indices))
            other = transpose_structure(offsets, indices, inner)
            statistics = row_statistics.of_pattern(offsets, other[0])
            statistics = statistics if format.order is None else statistics.T
            transposed = structure.placed(other)
        fields = structure.as_fields(((), arrays), transposed, checked=True)
    return {
        "values": checks.to_jax_values(values, None, what),
        **fields,
        "statistics": statistics,
        "shape": shape,
        "format": format,
    }
