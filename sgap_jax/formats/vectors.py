"""Column vectors and blocks (vectorSparse, section 4): into the encoding, and out of it again.

The structure of CVS(V) is that of a CSR matrix of ceil(m / V) block rows, whose entries are vectors
of V rows; `values` are [vectors, V]. Out of it is arithmetic on traced or concrete arrays, without
a sort: block row b holds o[b] .. o[b+1]-1, so its V rows hold V times as many entries from V o[b]
on, row after row. Rows past the end of the matrix come last, as padding.

BCSR(r, c) has ceil(k / c) block columns too, and `values` [blocks, r, c]. A block is c vectors of r
rows that are neighbours, and so every operation sees it: `split_blocks`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import checks, structure
from sgap_jax.formats.levels import Compressed, Dense, Format, require_stored
from sgap_jax.formats.stored import Array, StoredArray


def entries_format(format: Format) -> Format:
    """CSR for CVS(V) and BCSR(r, c), CSC for their transposes: the same order, entry by entry."""
    return Format((Dense(), Compressed()), format.order)


def block_rows(rows: int, vector_length: int) -> int:
    return -(-rows // vector_length)


def tile(format: Format) -> tuple[int, int]:
    """Sizes along the outer and the inner mode of what the format stores at once: (1, 1) of CSR."""
    outer, inner, *_ = (*format.block_shape, 1, 1)
    return outer, inner


def grid(shape: tuple[int, ...], format: Format) -> list[int]:
    """How many tiles there are along the outer and the inner mode of a matrix."""
    sizes = (shape[mode] for mode in format.modes)
    return [block_rows(size, side) for size, side in zip(sizes, tile(format), strict=True)]


def encode(
    outer: np.ndarray, inner: np.ndarray, format: Format
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors or blocks wherever one of their places has an entry: outer and inner coordinate of
    each in the grid, in order, and for each entry its place in the flat values."""
    height, width = tile(format)
    key = (outer // height).astype(np.int64) << 32 | inner // width
    tiles, number = np.unique(key, return_inverse=True)
    checks.check_nnz(tiles.shape[0] * height * width, str(format))
    place = (number.reshape(-1) * height + outer % height) * width + inner % width
    return (tiles >> 32).astype(np.int32), tiles.astype(np.uint32).astype(np.int32), place


def fill_values(values: Any, place: np.ndarray, tiles: int, format: Format) -> jax.Array:
    """[tiles, *block]: the entries' values at their places, zero elsewhere."""
    flat = jnp.zeros(tiles * math.prod(format.block_shape), values.dtype)
    filled = flat.at[place].set(values, unique_indices=True)
    return filled.reshape(tiles, *format.block_shape)


def fill_in_ratio(tiles: int, entries: int, format: Format) -> float:
    """What so many vectors or blocks store for each of their entries."""
    return tiles * math.prod(format.block_shape) / entries if entries else 1.0


def check_fill_in(tiles: int, entries: int, format: Format, limit: Any, what: str) -> None:
    """The limit on what `tiles` hold for `entries` (None: there is none)."""
    if limit is None:
        return
    ratio = fill_in_ratio(tiles, entries, format)
    if ratio > limit:
        raise ValueError(
            f"{what}: {format} stores {ratio:.4g} numbers for each entry, expected at most "
            f"max_fill_in = {limit:g}; cluster_rows looks for an order of the rows with less, "
            "and smaller vectors or blocks fill in less"
        )


def check_blocked(A: Any, format: Any, what: str) -> None:
    """A matrix, and a format of vectors or blocks that can store it."""
    if getattr(A, "ndim", None) != 2 or not hasattr(A, "format"):
        kind = f"one of shape {A.shape}" if hasattr(A, "format") else type(A).__name__
        raise ValueError(f"{what}: A: expected a SparseArray of 2 dimensions, got {kind}")
    if not isinstance(format, Format) or not format.block_shape:
        raise ValueError(f"{what}: format: expected CVS(V) or BCSR(r, c), got {format}")
    require_stored(format, 2, what)


def _widths(offsets: Any) -> Any:
    """Vectors of each block row; one more, so that it can be indexed where there are no rows."""
    return jnp.diff(offsets, append=offsets[-1:])


def well_formed(A: Array) -> Array:
    """A, of vectors or blocks, with index arrays that its entries can be computed of: as they are
    where they were checked, else see formats/structure.py."""
    if A.is_checked:
        return A
    outer, inner = grid(A.shape, A.format)
    transposed = A.transposed
    if transposed is not None:
        transposed = structure.well_formed_transpose(transposed, outer)
    offsets, indices = A.index_arrays[1]
    levels = ((), structure.well_formed(offsets, indices, inner))
    return replace(A, index_arrays=levels, transposed=transposed)


def split_blocks(A: Array) -> Array:
    """BCSR(r, c) as CVS(r), and the transpose of one as that of the other; all else as it is.

    Columns past the end of the matrix come last, as padding: nothing is read there.
    """
    return _split(A)[0] if len(A.format.block_shape) == 2 else A


def join_blocks(A: StoredArray, values: Any) -> Any:
    """Values in the order of `split_blocks(A)` as A stores them: [blocks, r, c] of BCSR(r, c)."""
    return _join(A, values) if len(A.format.block_shape) == 2 else values


@jax.jit
def _split(A: Array) -> tuple[Array, Any]:
    """See `split_blocks`; and where vector j of block p, number p c + j, went (None: nowhere)."""
    A = structure.unfolded_structure(well_formed(A))
    assert A.transposed is not None
    (offsets, indices), (column_offsets, rows, permutation) = A.index_arrays[1], A.transposed
    (height, width), inner = tile(A.format), A.shape[A.format.modes[1]]
    lane = structure.positions(width)[None]
    columns = (indices[:, None] * width + lane).reshape(-1)
    values = jnp.swapaxes(structure.whole(A.values), 1, 2).reshape(-1, height)
    # By columns, vectors are what the entries of CVS(c) are by rows.
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
    """Of each number in the flat values: its place among the entries of `expand(A)`, and its row.

    "Row" is the outer mode; numbers past the end of the matrix, and padding, get ceil(m / V) V.
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
    """Of each entry of CVS(length) of this structure, by rows: where it is in the flat values."""
    # The entries V o[b] .. V o[b+1] - 1 are those of block row b, and so are the vectors that their
    # positions divided by V name.
    block = jnp.repeat(structure.segment_of_entry(offsets, count), length)
    entry = structure.positions(count * length)
    start, width = offsets[block], jnp.maximum(_widths(offsets)[block], 1)
    local = entry - start * length
    source = (start + local % width) * length + local // width
    return jnp.where(entry < offsets[-1] * length, source, entry)


def _offsets_of_lanes(offsets: Any, length: int, rows: int) -> Any:
    """[rows + 1] offsets of those entries."""
    lane = structure.positions(length)[None]
    starts = offsets[:-1, None] * length + lane * jnp.diff(offsets)[:, None]
    return jnp.append(starts.reshape(-1), offsets[-1] * length)[: rows + 1]


def _cut(offsets: Any, indices: Any, length: int, size: int) -> tuple[Any, Any]:
    """A compressed level whose coordinates are each index times `length` and the length - 1 next
    ones, without those from `size` on, which go behind everything, as padding: its offsets, and
    where coordinate number q goes (None: it stays)."""
    beyond, count = -size % length, indices.shape[0]
    if not beyond:
        return offsets * length, None
    entry, lane = structure.positions(count)[:, None], structure.positions(length)[None]
    stored = structure.positions(count) < offsets[-1]
    ragged = stored & (indices == block_rows(size, length) - 1)
    # [count + 1]: how many have gone before each.
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
    """CSR of CVS(V) and BCSR(r, c) (CSC of transposes): every number that is inside the matrix an
    entry, zeros included."""
    A = structure.unfolded_structure(well_formed(split_blocks(A)))
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
    """The transpose of the entries from that of the vectors: a vector's rows follow each other."""
    assert A.transposed is not None
    offsets, blocks, permutation = A.transposed
    length, rows = A.format.vector_length, A.shape[A.format.modes[0]]
    assert length is not None
    count = blocks.shape[0]
    place = positions(A)[0].reshape(count, length)[permutation].reshape(-1)
    row = (blocks[:, None] * length + structure.positions(length)[None]).reshape(-1)
    # A vector of the last block row, the last of its column, may end past the matrix.
    offsets, to = _cut(offsets, blocks, length, rows)
    if to is not None:
        order = structure.invert_permutation(to)
        row, place = row[order], place[order]
    return offsets, jnp.where(row < rows, row, 0), place


def collect(A: StoredArray, values: Any) -> Any:
    """Values in the order of `expand(A)` as A stores them: [vectors, V] or [blocks, r, c]."""
    split = split_blocks(A)
    return join_blocks(A, values[positions(split)[0]].reshape(split.values.shape))
