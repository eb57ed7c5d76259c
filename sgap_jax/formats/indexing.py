"""Rows, columns and elements of a `SparseArray`: `A[...]` as NumPy and SciPy index, and `A.rows`.

Of a concrete structure and indices the result's structure is found in NumPy: nothing is compiled,
and values may be traced. Where one of them is traced, the result has a capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import capacity, checks, construct, convert, structure, vectors
from sgap_jax.formats.entries import sum_duplicates
from sgap_jax.formats.levels import COO, CSR, Format, require_stored
from sgap_jax.formats.row_statistics import PatternStatistics
from sgap_jax.formats.stored import Array, StoredArray

_WHAT = "SparseArray[...]"


class _Selector(NamedTuple):
    """What is selected of one dimension: a range, or an array of positions, which may be traced, of
    two dimensions at most. `drops`: an integer, for which the result lacks the dimension."""

    positions: Any
    drops: bool = False


def item(A: Array, index: Any) -> Any:
    """See `SparseArray.__getitem__`."""
    convert.require_unbatched(A, f"{_WHAT}: A")
    if A.ndim == 2 and _is_mask_of(A, index):
        index = np.nonzero(np.asarray(index))
    selectors = _selectors(A, index)
    positions = [selector.positions for selector in selectors]
    if all(isinstance(x, range) and x == range(n) for x, n in zip(positions, A.shape, strict=True)):
        if not any(selector.drops for selector in selectors):
            return A
    if all(selector.drops for selector in selectors):
        return _element(A, [x[0] for x in positions])
    if A.ndim == 2 and all(map(_is_array, selectors)):
        return _joined(A, *positions)
    if _is_traced(A) or checks.is_traced(*positions):
        return _traced(A, selectors)
    return _known(A, selectors)


def _is_mask_of(A: Array, index: Any) -> bool:
    """Whether the index is one mask of all elements, whose elements are selected in row-major order
    as in NumPy."""
    if not isinstance(index, np.ndarray | jax.Array) or index.dtype != np.bool_:
        return False
    if index.shape != A.shape:
        return False
    if checks.is_traced(index):
        raise IndexError(
            f"{_WHAT}: a mask that is traced: how many it selects is a static size; the nearest is "
            "A[jnp.nonzero(mask, size=k)], with k elements"
        )
    return True


def _joined(A: Array, down: Any, across: Any) -> Any:
    """Two index arrays: the elements at the pairs to which they broadcast, or of a column [r, 1]
    and a row [c] (`np.ix_`) the submatrix."""
    for column, row, of_rows in ((down, across, True), (across, down, False)):
        if column.ndim == 2 and column.shape[1] == 1 and row.shape[-1] == row.size:
            first, second = column.reshape(-1), row.reshape(-1)
            first, second = (first, second) if of_rows else (second, first)
            found = item(item(A, first), (slice(None), second))
            return found if of_rows else found.T
    try:
        shape = np.broadcast_shapes(down.shape, across.shape)
    except ValueError:
        raise IndexError(
            f"{_WHAT}: expected index arrays that broadcast, got shapes {list(down.shape)} and "
            f"{list(across.shape)}; A[I, J] are the elements (I[n], J[n]), A[I][:, J] all of these "
            "rows and columns"
        ) from None
    known = not checks.is_traced(down, across)
    down, across = ((np if known else jnp).broadcast_to(x, shape).ravel() for x in (down, across))
    # Of more rows than that the offsets are one more than int32 addresses.
    spared = construct.spares_offsets(A.format, A.shape, A.nnz)
    if not A.is_checked or _is_traced(A) or spared or A.shape[0] == checks.INT32_MAX:
        found = _pairs_when_run(A, jnp.asarray(down), jnp.asarray(across))
    elif known:
        found = _elements(_by_rows(A), down, across)
    else:
        found = _of_each_row(rows(A, down, None), across)
    return found.reshape(shape) if len(shape) > 1 else found


def rows(A: Array, index: Any, nse: Any) -> Array:
    """See `SparseArray.rows`."""
    what = "SparseArray.rows"
    convert.require_matrix(A, "rows")
    convert.require_unbatched(A, f"{what}: A")
    (positions, drops) = _selector(index, A.shape[0], what)
    if not isinstance(positions, range):
        _require_one_dimension(positions, what)
    if drops:
        raise IndexError(f"{what}: index: expected a slice or a 1-d array, got {index!r}")
    count = len(positions) if isinstance(positions, range) else positions.shape[0]
    known = not _is_traced(A)
    if nse is None and not known and count != 1:
        raise ValueError(
            f"{what}: nse: the structure is traced, so how much these rows store is not known; "
            "pass nse, how many entries the result can store. Outside jit, "
            f"A.rows(slice(0, {count})).nnz is enough for consecutive rows, "
            f"{count} * int(A.row_lengths.max()) for any"
        )
    if A.format.is_coordinate and A.shape[0] == checks.INT32_MAX:
        raise NotImplementedError(
            f"{what}: {A.format} of {A.shape[0]} rows, one more than int32 offsets allow; "
            "the nearest is A[index] of a concrete structure and index"
        )
    nse = _most(A, positions, count, known) if nse is None else checks.check_count(nse, "nse", what)
    checks.check_nnz(nse, what)
    if known and A.is_checked and not checks.is_traced(positions):
        format = CSR if A.format != COO else COO
        levels, values = _gathered(_by_rows(A), np.asarray(positions, np.int64))
        shape = count, A.shape[1]
        fields = construct.index_fields(levels, list(shape), format)
        fields |= {"values": values, "shape": shape, "format": format}
        made = capacity.padded(fields, nse, what)
        made["statistics"] = PatternStatistics()
        return replace(A, **made)
    if isinstance(positions, range):
        positions = np.asarray(positions, np.int64)
    enough = A.is_checked and nse >= _most(A, positions, count, known)
    return _gathered_when_run(A, positions, nse=nse, enough=enough)


def _is_traced(A: StoredArray) -> bool:
    return checks.is_traced(*jax.tree.leaves((A.index_arrays, A.transposed)))


def _by_rows(A: Array) -> Array:
    return A if A.format == CSR else convert.asformat(A, CSR)


def _most(A: StoredArray, positions: Any, count: int, known: bool) -> int:
    """A capacity for as many rows, whichever they are; for a slice, for any slice of its length."""
    if not known:
        return count * (min(A.nnz, A.shape[1]) if A.is_checked else A.nnz)
    offsets = _offsets_of_rows(A)
    if isinstance(positions, range) and positions.step == 1:
        return int((offsets[count:] - offsets[: len(offsets) - count]).max(initial=0))
    return count * int(np.diff(offsets).max(initial=0))


def _offsets_of_rows(A: StoredArray) -> np.ndarray:
    """[rows + 1]: how many entries there are before each row of a concrete matrix."""
    if A.format == CSR:
        offsets = np.asarray(A.index_arrays[1][0])
        return offsets if A.is_checked else np.maximum.accumulate(offsets.clip(0, A.nnz))
    with structure.concrete():
        pattern = replace(A, values=jnp.zeros(A.values.shape, jnp.bool_))
    (found, _), _ = convert.entries(pattern, _WHAT)
    return np.append(0, np.cumsum(np.bincount(found, minlength=A.shape[0])))


# The index.


def _selectors(A: StoredArray, index: Any) -> list[_Selector]:
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1 or len(parts) - len(dots) > A.ndim:
        raise IndexError(
            f"{_WHAT}: expected up to {A.ndim} indices and one ellipsis, got {len(parts)}"
        )
    at = dots[0] if dots else len(parts)
    rest = [slice(None)] * (A.ndim - len(parts) + len(dots))
    parts[at : at + len(dots)] = rest
    selectors = [_selector(x, size, _WHAT) for x, size in zip(parts, A.shape, strict=True)]
    arrays = [s.positions for s in selectors if _is_array(s)]
    if A.ndim > 2 and (len(arrays) > 1 or (arrays and any(s.drops for s in selectors))):
        raise IndexError(
            f"{_WHAT}: expected one index array at most, got {len(arrays)} and {A.ndim} dimensions"
        )
    if len(arrays) < 2:
        for array in arrays:
            _require_one_dimension(array, _WHAT)
    return selectors


def _require_one_dimension(array: Any, what: str) -> None:
    if array.ndim > 1:
        raise IndexError(
            f"{what}: expected integers of one dimension at most, got {array.dtype} of shape "
            f"{list(array.shape)}; two index arrays of two dimensions broadcast"
        )


def _is_array(selector: _Selector) -> bool:
    return not isinstance(selector.positions, range) and not selector.drops


def _selector(x: Any, size: int, what: str) -> _Selector:
    if isinstance(x, slice):
        if checks.is_traced(x.start, x.stop, x.step):
            raise IndexError(
                f"{what}: expected bounds of a slice that are known: how long it is is a static "
                "size; the nearest is A.rows(start + jnp.arange(k), nse=n), with k rows and room "
                "for n entries; outside jit, A.rows(slice(0, k)).nnz is enough for any k "
                "consecutive rows"
            )
        try:
            return _Selector(range(*x.indices(size)))
        except (TypeError, ValueError) as error:  # floats, and a step of 0
            raise IndexError(f"{what}: expected integers in a slice: {error}") from None
    if isinstance(x, range):
        x = np.asarray(x, np.int64) if len(x) else np.zeros(0, np.int64)
    if x is None or isinstance(x, str | StoredArray) or hasattr(x, "todense"):
        raise IndexError(
            f"{what}: expected integers, slices, index arrays or masks of one dimension, got "
            f"{'None' if x is None else type(x).__name__}"
        )
    try:
        array = checks.as_array(x)
    except ValueError as error:
        raise IndexError(f"{what}: expected an index array, got {error}") from None
    if array.size == 0 and array.ndim == 1 and isinstance(x, list | tuple):
        array = np.zeros(0, np.int64)  # np.asarray([]) is float64
    if array.dtype == np.bool_:
        return _Selector(_of_mask(array, size, what))
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim > 2:
        raise IndexError(
            f"{what}: expected integers of two dimensions at most, got {array.dtype} of shape "
            f"{list(array.shape)}"
        )
    if checks.is_traced(array):
        return _Selector(jnp.atleast_1d(array), array.ndim == 0)
    found = np.atleast_1d(np.asarray(array))
    bad = found[(found < -size) | (found >= size)] if found.size else found
    if bad.size:
        raise IndexError(f"{what}: index {bad[0]} is out of range: expected {-size} .. {size - 1}")
    found = found.astype(np.int64)
    found = np.where(found < 0, found + size, found)
    if array.ndim == 0:
        return _Selector(range(int(found[0]), int(found[0]) + 1), True)
    return _Selector(found)


def _of_mask(mask: Any, size: int, what: str) -> np.ndarray:
    if mask.shape != (size,):
        raise IndexError(f"{what}: expected a mask of shape [{size}], got {list(mask.shape)}")
    if checks.is_traced(mask):
        raise IndexError(
            f"{what}: a mask that is traced: how many it selects is a static size; the nearest is "
            f"A.rows(jnp.flatnonzero(mask, size=k, fill_value={size}), nse=n), with k rows and "
            "room for n entries"
        )
    return np.flatnonzero(np.asarray(mask))


# Concrete structure, concrete indices.


def _known(A: Array, selectors: Sequence[_Selector]) -> Array:
    positions = [selector.positions for selector in selectors]
    plain = [isinstance(x, range) and x.step == 1 for x in positions]
    whole = [
        isinstance(x, range) and x == range(n) for x, n in zip(positions, A.shape, strict=True)
    ]
    if not A.is_checked and not A.format.block_shape:  # in any order, some stored more than once
        A = sum_duplicates(A)
    if all(plain) and not any(s.drops for s in selectors):
        if A.ndim == 2:
            return _between(_between(A, positions[0]).T, positions[1]).T
        if all(whole[1:]):
            return _between(A, positions[0])
    if not whole[0] and A.format == CSR and A.is_checked:
        levels, values = _gathered(A, np.asarray(positions[0], np.int64))
        found: list[Any] = list(levels)
        rest = [range(len(positions[0])), *positions[1:]]
    else:
        found, values = convert.entries(A, _WHAT)
        rest = positions
    for mode, selected in enumerate(rest):
        if whole[mode] or (mode == 0 and rest is not positions):
            continue
        found[mode], kept = _matches(found[mode], selected)
        found = [x if i == mode else x[kept] for i, x in enumerate(found)]
        values = _taken(values, kept)
    kept_modes = [mode for mode, s in enumerate(selectors) if not s.drops]
    shape = tuple(len(positions[mode]) for mode in kept_modes)
    fields = construct.assemble(
        [found[mode] for mode in kept_modes],
        values,
        shape,
        _format(A.format, len(shape), A.ndim),
        duplicates="sum",
        dtype=None,
        what=_WHAT,
    )
    return replace(A, **{"statistics": PatternStatistics()} | fields)


def _format(format: Format, ndim: int, before: int) -> Format:
    """The format of what is selected: A's where entries are stored one by one and no dimension is
    dropped, else CSR of a matrix and COO of others."""
    if ndim == before and not format.block_shape and not format.dense_modes:
        return format
    return CSR if ndim == before == 2 else require_stored(COO, ndim, _WHAT)


def _matches(coordinates: np.ndarray, selected: Any) -> tuple[np.ndarray, np.ndarray]:
    """For each selected position of each entry: the new coordinate, and which entry it is."""
    if isinstance(selected, range):
        place, beside = np.divmod(coordinates.astype(np.int64) - selected.start, selected.step)
        kept = np.flatnonzero((beside == 0) & (place >= 0) & (place < len(selected)))
        return place[kept], kept
    order = np.argsort(selected, kind="stable")
    ascending = selected[order]
    first = np.searchsorted(ascending, coordinates, side="left")
    times = np.searchsorted(ascending, coordinates, side="right") - first
    kept = np.repeat(np.arange(len(coordinates)), times)
    return order[np.repeat(first, times) + _within(times)], kept


def _within(lengths: np.ndarray) -> np.ndarray:
    """0, 1, .. length - 1 for each length."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _gathered(A: StoredArray, positions: np.ndarray) -> tuple[list[np.ndarray], Any]:
    """Level coordinates and values of these rows of a CSR matrix, in time linear in the result."""
    offsets, indices = (np.asarray(x) for x in A.index_arrays[1])
    checks.check_offsets(offsets, A.shape[0], A.nnz, "offsets", _WHAT)
    begin = offsets[positions].astype(np.int64)
    lengths = offsets[positions + 1] - begin
    checks.check_nnz(int(lengths.sum()), _WHAT)
    source = np.repeat(begin, lengths) + _within(lengths)
    found = indices[source]
    checks.check_range(found, A.shape[1], "indices", _WHAT)
    along = np.repeat(np.arange(len(positions), dtype=np.int32), lengths)
    return [along, found], _taken(A.values, source)


def _taken(values: Any, kept: Any) -> Any:
    """values[kept], in NumPy where the values are concrete and on the host: JAX would compile a
    program for each length."""
    if isinstance(values, np.ndarray):
        return values[kept]
    values = structure.whole(values)
    if checks.is_traced(values) or not structure.on_no_mesh(values) or not _on_host(values):
        return values[np.arange(kept.start, kept.stop) if isinstance(kept, slice) else kept]
    return np.asarray(values)[kept]


def _on_host(values: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in values.devices())


def _between(A: Array, selected: range) -> Array:
    """The rows of a range of step 1, in A's format."""
    start, stop = (selected.start, selected.stop) if len(selected) else (0, 0)
    if (start, stop) == (0, A.shape[0]):
        return A
    level = A.format.modes.index(0)
    side = vectors.tile(A.format)[level] if A.format.block_shape else 1
    if start % side or (stop % side and stop != A.shape[0]):
        raise IndexError(
            f"SparseArray[i:j]: rows and columns of {A.format} are cut at multiples of its sides, "
            f"here {side}, got {start}:{stop}; A.asformat(CSR)[i:j] cuts anywhere"
        )
    first, last = start // side, -(-stop // side)
    if A.format.levels[:2] == CSR.levels and level == 0 and A.is_checked:
        levels, kept = _run_of_segments(A, first, last)
    else:
        levels = convert.stored_levels(A, "SparseArray[i:j]")
        along = levels[level]
        if level == 0:
            kept = slice(*map(int, np.searchsorted(along, [first, last])))
        else:
            kept = np.flatnonzero((first <= along) & (along < last))
        levels = [x[kept] for x in levels]
        levels[level] = levels[level] - first
    shape = (stop - start, *A.shape[1:])
    sizes = convert.level_sizes(shape, A.format)
    fields = construct.index_fields(levels, sizes, A.format)
    values = _taken(A.values, kept)
    values = checks.to_device(values.copy()) if isinstance(values, np.ndarray) else values
    return replace(A, values=values, shape=shape, **fields)


def _run_of_segments(A: StoredArray, first: int, last: int) -> tuple[list[np.ndarray], Any]:
    """Level coordinates of consecutive segments of compressed arrays, and where they are stored:
    nothing else of the index arrays is read but the offsets."""
    offsets, indices = (np.asarray(x) for x in A.index_arrays[1])
    outer, inner = convert.level_sizes(A.shape, A.format)
    checks.check_offsets(offsets, outer, indices.shape[0], "offsets", _WHAT)
    kept = slice(int(offsets[first]), int(offsets[last]))
    checks.check_range(indices[kept], inner, "indices", _WHAT)
    own = offsets[first : last + 1] - offsets[first]
    return [construct.expand_offsets(own, len(indices[kept])), indices[kept]], kept


# Traced structure, or traced indices.


def _traced(A: Array, selectors: Sequence[_Selector]) -> Array:
    if A.ndim != 2:
        raise NotImplementedError(
            f"{_WHAT}: a traced tensor of {A.ndim} dimensions; the nearest is a matrix"
        )
    down, across = selectors
    A = convert.by_entries(A)
    found = _traced_rows(_traced_rows(A, down).T, across).T
    if down.drops:
        return _vector(found)
    return _vector(found.T) if across.drops else found


def _traced_rows(A: Array, selector: _Selector) -> Array:
    positions = selector.positions
    if not isinstance(positions, range):
        return rows(A, positions, None)
    if positions == range(A.shape[0]):
        return A
    if not _is_traced(A):
        every = _Selector(range(A.shape[1]))
        return _known(A, [_Selector(positions), every])
    return _of_range(A, positions)


def _of_range(A: Array, selected: range) -> Array:
    """Rows of a traced structure, with A's capacity."""
    capacity.require_sortable(A.format, A.ndim, _WHAT)
    row, column = convert.coordinates(A)
    along = (row - selected.start) if selected.step > 0 else (selected.start - row)
    place, step = along // abs(selected.step), abs(selected.step)
    kept = (row < A.shape[0]) & (place * step == along) & structure.in_range(place, len(selected))
    shape = (len(selected), A.shape[1])
    fields = capacity.of_coordinates(
        [jnp.where(kept, place, -1), column],
        A.values,
        shape=shape,
        format=A.format,
        nse=A.nnz,
        merge=True,
    )
    return replace(A, **fields, shape=shape, statistics=PatternStatistics())


@partial(jax.jit, static_argnames=("nse", "enough"), inline=True)
def _gathered_when_run(A: Array, positions: Any, *, nse: int, enough: bool) -> Array:
    """The rows of A at these positions, in a capacity; a position out of range gives an empty row.
    `enough`: nothing can be more than the capacity, whatever the arrays hold."""
    size, format = A.shape[0], COO if A.format == COO else CSR
    shape = positions.shape[0], A.shape[1]
    base = _by_rows(A)
    offsets, indices = structure.unfolded(convert.compressed(base))
    positions = _from_the_end(jnp.asarray(positions), size)
    real = structure.in_range(positions, size)
    at = jnp.where(real, positions, 0)
    begin = jnp.take(offsets, at, mode="clip")
    lengths = jnp.where(real, jnp.take(offsets, at + 1, mode="clip") - begin, 0)
    made = jnp.append(jnp.zeros(1, jnp.int32), _running_sum(lengths, base.nnz)).astype(jnp.int32)
    if 0 in (*shape, size, base.nnz, nse):
        values, found = jnp.zeros(nse, A.dtype), jnp.zeros(nse, jnp.int32)
    else:
        place = structure.positions(nse)
        row = structure.segment_of_entry(made, nse)
        inside = place < made[-1]
        source = jnp.where(inside, begin[row] + place - made[row], 0)
        taken = jnp.take(structure.whole(base.values), source, axis=0, mode="clip")
        values = jnp.where(inside, taken, jnp.zeros((), A.dtype))
        found = jnp.where(inside, jnp.take(indices, source, mode="clip"), 0)
    fields = capacity.of_offsets(values, made, found, shape, format, enough)
    return replace(A, **fields, shape=shape, format=format, statistics=PatternStatistics())


def _from_the_end(positions: jax.Array, size: int) -> jax.Array:
    """Positions of any integer dtype as int32, in which negative ones count from the end."""
    if positions.dtype.itemsize < 4:
        positions = positions.astype(jnp.int32)
    if not jnp.issubdtype(positions.dtype, jnp.unsignedinteger):
        positions = jnp.where(positions < 0, positions + size, positions)
    return checks.saturated(positions)


def _running_sum(lengths: jax.Array, longest: int) -> jax.Array:
    """Prefix sums of lengths from 0 to `longest`, which stop at 2^31 - 1."""
    if lengths.shape[0] * longest <= checks.INT32_MAX:
        return jnp.cumsum(lengths, dtype=jnp.int32)

    def add(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(a > checks.INT32_MAX - b, checks.INT32_MAX, a + b)

    return jax.lax.associative_scan(add, lengths)


def _vector(A: Array) -> Array:
    """The one row of a matrix as a sparse vector, in COO."""
    flat = convert.asformat(A, COO)
    (bounds, _), (columns,) = flat.index_arrays
    fields = structure.as_fields(((bounds, columns),), None, checked=flat.is_checked)
    shape = A.shape[1:]
    return replace(flat, **fields, shape=shape, format=require_stored(COO, 1, _WHAT))


def _element(A: StoredArray, index: Sequence[Any]) -> jax.Array:
    """[]: the element at these positions; zero where none is stored, and for a traced position
    that is out of range."""
    if checks.is_traced(*index) or _is_traced(A) or not A.is_checked or A.format != CSR:
        where = [jnp.asarray(x) for x in index]
        return _element_when_run(
            A, [_from_the_end(x, n) for x, n in zip(where, A.shape, strict=True)]
        )
    row, column = index
    offsets, indices = (np.asarray(x) for x in A.index_arrays[1])
    checks.check_offsets(offsets, A.shape[0], A.nnz, "offsets", _WHAT)
    begin, end = int(offsets[row]), int(offsets[row + 1])
    place = begin + int(np.searchsorted(indices[begin:end], column))
    if place == end or indices[place] != column:
        return jnp.zeros((), A.dtype)
    return structure.whole(A.values)[place]


@jax.jit
def _element_when_run(A: StoredArray, index: Sequence[jax.Array]) -> jax.Array:
    found = convert.coordinates(A)
    at = jnp.stack([x == i for x, i in zip(found, index, strict=True)]).all(0)
    real = jnp.stack([structure.in_range(i, n) for i, n in zip(index, A.shape, strict=True)]).all()
    values, wide = structure.whole(A.values).reshape(-1), construct.accumulator(A.dtype)
    total = jnp.sum(values.astype(wide), where=at & real, dtype=wide)
    return total.astype(A.dtype)


def _elements(A: StoredArray, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
    """[k]: the elements of a checked CSR matrix at these pairs, by a search in each row."""
    offsets, indices = (np.asarray(x) for x in A.index_arrays[1])
    checks.check_offsets(offsets, A.shape[0], A.nnz, "offsets", _WHAT)
    if not A.nnz:
        return jnp.zeros(len(rows), A.dtype)
    low, end = (offsets[x].astype(np.int64) for x in (rows, rows + 1))
    high, last = end, A.nnz - 1
    for _ in range(int((end - low).max(initial=0)).bit_length()):
        middle = (low + high) // 2
        less = (low < high) & (indices[np.minimum(middle, last)] < columns)
        low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
    place = np.minimum(low, last)
    stored = (low < end) & (indices[place] == columns)
    values = _taken(A.values, np.where(stored, place, 0))
    if isinstance(values, np.ndarray):
        return checks.to_device(np.where(stored, values, np.zeros((), values.dtype)))
    return jnp.where(stored, values, jnp.zeros((), A.dtype))


@jax.jit
def _of_each_row(R: StoredArray, columns: jax.Array) -> jax.Array:
    """[k]: of row n of R the element at `columns[n]`; zero where none is stored, and for a traced
    position that is out of range."""
    k, n = R.shape
    row, column = convert.coordinates(R)
    at = structure.in_range(row, k) & structure.in_range(column, n)
    at = at & (column == jnp.take(_from_the_end(columns, n), row, mode="clip"))
    return _sums(R, at, jnp.where(at, row, k), k)


@jax.jit
def _pairs_when_run(A: StoredArray, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """[k]: the elements (rows[n], columns[n]), as sums of whatever parts are stored. Entries and
    pairs are sorted together, so that those of one position are neighbours."""
    found = convert.coordinates(A)
    wanted = [_from_the_end(x, n) for x, n in zip((rows, columns), A.shape, strict=True)]
    joined = [jnp.concatenate([x.astype(jnp.int32), y]) for x, y in zip(found, wanted, strict=True)]
    row, column, source = jax.lax.sort(
        (*joined, jnp.arange(joined[0].size, dtype=jnp.int32)), num_keys=2
    )
    new = (jnp.diff(row, prepend=row[:1]) != 0) | (jnp.diff(column, prepend=column[:1]) != 0)
    group = jnp.zeros(source.size, jnp.int32).at[source].set(jnp.cumsum(new.astype(jnp.int32)))
    of_entry, of_pair = group[: found[0].size], group[found[0].size :]
    real, stored = (
        structure.in_range(i, A.shape[0]) & structure.in_range(j, A.shape[1])
        for i, j in (wanted, found)
    )
    sums = _sums(A, stored, of_entry, joined[0].size)
    return jnp.where(real, sums[of_pair], jnp.zeros((), A.dtype))


def _sums(A: StoredArray, at: jax.Array, segment: jax.Array, count: int) -> jax.Array:
    """[count]: sums of the values that are `at`, by segment, in A's dtype."""
    values, wide = structure.whole(A.values).reshape(-1), construct.accumulator(A.dtype)
    values = jnp.where(at, values, jnp.zeros((), A.dtype)).astype(wide)
    return jax.ops.segment_sum(values, segment, count).astype(A.dtype)
