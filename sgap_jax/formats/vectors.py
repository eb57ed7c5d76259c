"""Column vectors and blocks (vectorSparse, section 4): encoding entries as them, and decoding.

The index arrays of CVS(V) are those of a CSR matrix of ceil(m / V) block rows, whose entries are
vectors of V rows; `values` are [vectors, V]. Decoding is arithmetic on traced or concrete arrays,
without a sort: block row b has the vectors o[b] .. o[b+1]-1, so its V rows have the entries
V o[b] .. V o[b+1]-1, row after row. Rows past the end of the matrix come last, as padding.

BCSR(r, c) has ceil(k / c) block columns too, and `values` [blocks, r, c]. Operations treat a block
as c neighbouring vectors of r rows: see `split_blocks`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import checks, structure
from sgap_jax.formats.levels import Compressed, Dense, Format, as_format, require_stored
from sgap_jax.formats.stored import Array, PreparedTranspose, StoredArray


def entries_format(format: Format) -> Format:
    """CSR for CVS(V) and BCSR(r, c), CSC for their transposes: the same mode order, without
    vectors and blocks."""
    return Format((Dense(), Compressed()), format.order)


def block_rows(rows: int, vector_length: int) -> int:
    return -(-rows // vector_length)


def tile(format: Format) -> tuple[int, int]:
    """(height, width) of the format's vectors or blocks, along the outer and the inner mode; (V, 1)
    for CVS(V), (r, c) for BCSR(r, c), (1, 1) for CSR."""
    outer, inner, *_ = (*format.block_shape, 1, 1)
    return outer, inner


def grid(shape: tuple[int, ...], format: Format) -> list[int]:
    """How many tiles there are along the outer and the inner mode of a matrix."""
    sizes = (shape[mode] for mode in format.modes)
    return [block_rows(size, side) for size, side in zip(sizes, tile(format), strict=True)]


def encode(
    outer: np.ndarray, inner: np.ndarray, format: Format
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The vectors or blocks that cover the entries with these coordinates: the sorted outer and
    inner coordinates of the vectors or blocks in their grid, and for each entry its place in the
    flattened values."""
    height, width = tile(format)
    key = (outer // height).astype(np.int64) << 32 | inner // width
    tiles, number = np.unique(key, return_inverse=True)
    checks.check_nnz(tiles.shape[0] * height * width, str(format))
    place = (number.reshape(-1) * height + outer % height) * width + inner % width
    return (tiles >> 32).astype(np.int32), tiles.astype(np.uint32).astype(np.int32), place


@partial(jax.jit, static_argnames=("tiles", "format"), inline=True)
def fill_values(values: Any, place: np.ndarray, tiles: int, format: Format) -> jax.Array:
    """[tiles, *block]: the entries' values at their places, zero elsewhere."""
    flat = jnp.zeros(tiles * math.prod(format.block_shape), values.dtype)
    filled = flat.at[place].set(values, unique_indices=True)
    return filled.reshape(tiles, *format.block_shape)


def fill_in_ratio(tiles: int, entries: int, format: Format) -> float:
    """Fill-in: stored values per entry, if `tiles` vectors or blocks cover `entries`."""
    return tiles * math.prod(format.block_shape) / entries if entries else 1.0


def check_fill_in(tiles: int, entries: int, format: Format, limit: Any, what: str) -> None:
    """ValueError if the fill-in is above `limit`; None is no limit."""
    if limit is None:
        return
    ratio = fill_in_ratio(tiles, entries, format)
    if ratio > limit:
        raise ValueError(
            f"{what}: {format} stores {ratio:.4g} numbers for each entry, expected at most "
            f"max_fill_in = {limit:g}; cluster_rows looks for an order of the rows with less, "
            "and smaller vectors or blocks fill in less"
        )


def check_blocked(A: Any, format: Any, what: str) -> Format:
    """The format; ValueError unless A is a sparse matrix and it is one of vectors or blocks."""
    if not isinstance(A, StoredArray) or len(A.shape) != 2:
        kind = f"one of shape {A.shape}" if isinstance(A, StoredArray) else type(A).__name__
        raise ValueError(f"{what}: A: expected a SparseArray of 2 dimensions, got {kind}")
    format = as_format(format, what)
    if not format.block_shape:
        raise ValueError(f"{what}: format: expected CVS(V) or BCSR(r, c), got {format}")
    return require_stored(format, 2, what)


def _widths(offsets: Any) -> Any:
    """How many vectors each block row has; a 0 at the end lets it be indexed if there are no
    rows."""
    return jnp.diff(offsets, append=offsets[-1:])


def well_formed(A: Array) -> Array:
    """A, in a format of vectors or blocks, with valid index arrays: unchanged if they were checked,
    else as formats/structure.py defines."""
    if A._every_entry_counts:
        return A
    outer, inner = grid(A.shape, A.format)
    transposed = A.transposed
    if transposed is not None:
        transposed = structure.well_formed_transpose(transposed, outer)
    offsets, indices = A.index_arrays[1]
    levels = ((), structure.well_formed(offsets, indices, inner))
    return replace(A, index_arrays=levels, transposed=transposed)


def with_transpose(A: Array) -> Array:
    """A, a matrix in CSR, CSC, vectors or blocks, with the index arrays of its transpose, which the
    bare constructor takes as None."""
    if A.transposed is not None:
        return A
    offsets, indices = A.index_arrays[1]
    arrays = structure.transpose_structure(offsets, indices, grid(A.shape, A.format)[1])
    return replace(A, **structure.as_fields(A.index_arrays, arrays, checked=A.is_checked))


def split_blocks(A: Array) -> Array:
    """Converts BCSR(r, c) to CVS(r), and the transpose of the one to that of the other; other
    formats are unchanged.

    Columns past the end of the matrix come last, as padding, and are never read.
    """
    if len(A.format.block_shape) < 2:
        return A
    split, of = _split(A)[0], A.transposed
    if isinstance(of, PreparedTranspose):  # the lists are of vectors
        assert split.transposed is not None
        offsets, indices, permutation = split.transposed
        made = PreparedTranspose(offsets, indices, permutation, of.lists, of.keys)
        split = replace(split, transposed=made)
    return split


def join_blocks(A: StoredArray, values: Any) -> Any:
    """Reorders values of `split_blocks(A)` to the shape of A's values: [blocks, r, c] for
    BCSR(r, c)."""
    return _join(A, values) if len(A.format.block_shape) == 2 else values


@jax.jit
def _split(A: Array) -> tuple[Array, Any]:
    """(`split_blocks(A)`, to): vector j of block p, number q = p c + j, is vector to[q] of the
    result. None: the order is unchanged."""
    A = structure.unfolded_structure(well_formed(with_transpose(A)))
    assert A.transposed is not None
    (offsets, indices), (column_offsets, rows, permutation) = A.index_arrays[1], A.transposed
    (height, width), inner = tile(A.format), A.shape[A.format.modes[1]]
    lane = structure.positions(width)[None]
    columns = (indices[:, None] * width + lane).reshape(-1)
    values = jnp.swapaxes(structure.whole(A.values), 1, 2).reshape(-1, height)
    # In the transpose a block is a vector of c columns, and decodes as a vector of CVS(c) does.
    source = _sources(column_offsets, indices.shape[0], width)
    number = (permutation[:, None] * width + lane).reshape(-1)[source]
    vector_offsets, to = _cut(offsets, indices, width, inner)
    if to is not None:
        number, order = to[number], structure.invert_permutation(to)
        columns, values = columns[order], values[order]
        columns = jnp.where(columns < inner, columns, 0)
    lanes = _offsets_of_lanes(column_offsets, width, inner)
    transposed = (lanes, rows[source // width], number)
    fields = structure.as_fields(((), (vector_offsets, columns)), transposed, checked=A.is_checked)
    split = replace(A, values=values, **fields, format=Format(A.format.levels[:3], A.format.order))
    return split, to


@jax.jit
def _join(A: StoredArray, values: Any) -> Any:
    height, width = tile(A.format)
    if (to := _split(A)[1]) is not None:
        values = values[to]
    return jnp.swapaxes(values.reshape(-1, width, height), 1, 2)


@jax.jit
def positions(A: StoredArray) -> tuple[Any, Any]:
    """For each of the flattened values: its place among the entries of `expand(A)`, and its row.

    "Row" is the index of the outer mode; padding gets ceil(m / V) V, and values past the end of the
    matrix a row of m or more.
    """
    offsets, indices = structure.unfolded(well_formed(A).index_arrays[1])
    length, count = A.format.vector_length, indices.shape[0]
    assert length is not None
    block = structure.segment_of_entry(offsets, count)
    vector, lane = structure.positions(count)[:, None], structure.positions(length)[None]
    start, width = offsets[block][:, None], _widths(offsets)[block][:, None]
    stored = vector < offsets[-1]
    place = jnp.where(
        stored, start * length + lane * width + vector - start, vector * length + lane
    )
    row = jnp.where(stored, block[:, None] * length + lane, (offsets.shape[0] - 1) * length)
    return place.reshape(-1), row.reshape(-1)


def _sources(offsets: Any, count: int, length: int) -> Any:
    """For each entry of CVS(length) with these offsets, in order of rows: its place in the
    flattened values. `count` is the number of vectors."""
    # Block row b has the entries V o[b] .. V o[b+1] - 1, so entry q is in the block row of vector
    # q // V.
    block = jnp.repeat(structure.segment_of_entry(offsets, count), length)
    entry = structure.positions(count * length)
    start, width = offsets[block], jnp.maximum(_widths(offsets)[block], 1)
    local = entry - start * length
    source = (start + local % width) * length + local // width
    return jnp.where(entry < offsets[-1] * length, source, entry)


def _offsets_of_lanes(offsets: Any, length: int, rows: int) -> Any:
    """[rows + 1]: row offsets of the entries of CVS(length) with these block row offsets."""
    lane = structure.positions(length)[None]
    starts = offsets[:-1, None] * length + lane * jnp.diff(offsets)[:, None]
    return jnp.append(starts.reshape(-1), offsets[-1] * length)[: rows + 1]


def _cut(offsets: Any, indices: Any, length: int, size: int) -> tuple[Any, Any]:
    """Expands each index i of a compressed level to the coordinates i length .. (i + 1) length - 1,
    and moves those from `size` on to the end, as padding.

    Returns the offsets of the expanded level, and the new position [count * length] of each
    coordinate (None: all stay).
    """
    beyond, count = -size % length, indices.shape[0]
    if not beyond:
        return offsets * length, None
    entry, lane = structure.positions(count)[:, None], structure.positions(length)[None]
    stored = structure.positions(count) < offsets[-1]
    ragged = stored & (indices == block_rows(size, length) - 1)
    # [count + 1]: how many coordinates before those of each index are moved to the end.
    gone = jnp.cumsum(
        jnp.append(jnp.zeros(1, jnp.int32), ragged.astype(jnp.int32) * beyond), dtype=jnp.int32
    )
    kept, before = offsets[-1] * length - gone[-1], gone[:-1, None]
    outside = ragged[:, None] & (lane >= length - beyond)
    to = jnp.where(
        outside, kept + before + lane - (length - beyond), entry * length + lane - before
    )
    to = jnp.where(stored[:, None], to, entry * length + lane)
    return offsets * length - gone[offsets], to.reshape(-1)


@jax.jit
def expand(A: Array) -> Array:
    """Converts CVS(V) and BCSR(r, c) to CSR (their transposes to CSC): every value inside the
    matrix becomes an entry, zeros included."""
    A = structure.unfolded_structure(well_formed(with_transpose(split_blocks(A))))
    offsets, indices = A.index_arrays[1]
    length = A.format.vector_length
    assert length is not None
    source = _sources(offsets, indices.shape[0], length)
    row_offsets = _offsets_of_lanes(offsets, length, A.shape[A.format.modes[0]])
    levels = ((), (row_offsets, indices[source // length]))
    return replace(
        A,
        values=structure.whole(A.values).reshape(-1)[source],
        **structure.as_fields(levels, _expand_transposed(A), checked=A.is_checked),
        format=entries_format(A.format),
    )


def _expand_transposed(A: StoredArray) -> tuple[Any, Any, Any]:
    """The transpose of `expand(A)` from A's: in each column, the rows of a vector are
    consecutive."""
    assert A.transposed is not None
    offsets, blocks, permutation = A.transposed
    length, rows = A.format.vector_length, A.shape[A.format.modes[0]]
    assert length is not None
    count = blocks.shape[0]
    place = positions(A)[0].reshape(count, length)[permutation].reshape(-1)
    row = (blocks[:, None] * length + structure.positions(length)[None]).reshape(-1)
    # A vector of the last block row is the last of its column, and may end past the matrix.
    offsets, to = _cut(offsets, blocks, length, rows)
    if to is not None:
        order = structure.invert_permutation(to)
        row, place = row[order], place[order]
    return offsets, jnp.where(row < rows, row, 0), place


def collect(A: StoredArray, values: Any) -> Any:
    """Reorders values of `expand(A)` to the shape of A's values: [vectors, V] or [blocks, r, c]."""
    split = split_blocks(A)
    return join_blocks(A, values[positions(split)[0]].reshape(split.values.shape))
