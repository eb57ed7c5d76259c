"""Column vectors (vectorSparse, section 4): into the encoding, and out of it again.

The structure of CVS(V) is that of a CSR matrix of ceil(m / V) block rows, whose entries are vectors
of V rows; `values` are [vectors, V]. Out of it is arithmetic on traced or concrete arrays, without
a sort: block row b holds o[b] .. o[b+1]-1, so its V rows hold V times as many entries from V o[b]
on, row after row. Rows past the end of the matrix come last, as padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import checks, structure
from sgap_jax.formats.levels import Compressed, Dense, Format, require_stored

if TYPE_CHECKING:
    from sgap_jax.formats.array import SparseArray


def entries_format(format: Format) -> Format:
    """CSR for CVS(V), CSC for its transpose: the same order of modes, entry by entry."""
    return Format((Dense(), Compressed()), format.order)


def block_rows(rows: int, vector_length: int) -> int:
    return -(-rows // vector_length)


def encode(
    rows: np.ndarray, columns: np.ndarray, vector_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors wherever one of their rows has an entry: block row and column of each, in order, and
    for each entry its place in the flat values [vectors * V]."""
    key = (rows // vector_length).astype(np.int64) << 32 | columns
    vectors, vector = np.unique(key, return_inverse=True)
    place = vector.reshape(-1) * vector_length + rows % vector_length
    checks.check_nnz(vectors.shape[0] * vector_length, f"CVS({vector_length})")
    return (vectors >> 32).astype(np.int32), vectors.astype(np.uint32).astype(np.int32), place


def fill_values(values: Any, place: np.ndarray, vectors: int, vector_length: int) -> jax.Array:
    """[vectors, V]: the entries' values at their places, zero elsewhere."""
    flat = jnp.zeros(vectors * vector_length, values.dtype)
    return flat.at[place].set(values, unique_indices=True).reshape(vectors, vector_length)


def fill_in(A: SparseArray, format: Format) -> float:
    """What A stores in a CVS format over what it stores now: 1 where its entries form vectors.

        fill-in = V * |{(i // V, j) : (i, j) stored}| / nnz

    Args:
      A: a concrete matrix of any format.
      format: CVS(V).

    Returns:
      A number from 1 (no zeros are added) to V; 1.0 for an array without entries.

    Raises:
      ValueError: not a matrix, traced structure, or a format without vectors.

    Source: vectorSparse, section 4.2.
    """
    length = check_vectors(A, format, "fill_in")
    rows, columns = concrete_coordinates(A, "fill_in")[:: 1 if format.order is None else -1]
    stored = len(rows)
    return len(encode(rows, columns, length)[0]) * length / stored if stored else 1.0


def check_vectors(A: Any, format: Any, what: str) -> int:
    """V of a CVS format that fits a matrix."""
    if getattr(A, "ndim", None) != 2 or not hasattr(A, "format"):
        kind = f"one of shape {A.shape}" if hasattr(A, "format") else type(A).__name__
        raise ValueError(f"{what}: A: expected a SparseArray of 2 dimensions, got {kind}")
    length = format.vector_length if isinstance(format, Format) else None
    if length is None:
        raise ValueError(f"{what}: format: expected CVS(V), got {format}")
    require_stored(format, 2, what)
    return length


def concrete_coordinates(A: SparseArray, what: str) -> list[np.ndarray]:
    """Rows and columns of the stored entries of a matrix, without padding."""
    from sgap_jax.formats import interop  # it converts arrays of vectors by this module

    return interop.to_numpy(A, what)[1]


def _widths(offsets: Any) -> Any:
    """Vectors of each block row; one more, so that it can be indexed where there are no rows."""
    return jnp.diff(offsets, append=offsets[-1:])


@jax.jit
def positions(A: SparseArray) -> tuple[Any, Any]:
    """Of each number in the flat values: its place among the entries of `expand(A)`, and its row.

    "Row" is the outer mode; numbers past the end of the matrix, and padding, get ceil(m / V) V.
    """
    offsets, indices = A.index_arrays[1]
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


def _sources(A: SparseArray) -> Any:
    """Of each entry of `expand(A)`: where it is in the flat values."""
    offsets, indices = A.index_arrays[1]
    length, count = A.format.vector_length, indices.shape[0]
    assert length is not None
    # The entries V o[b] .. V o[b+1] - 1 are those of block row b, and so are the vectors that their
    # positions divided by V name.
    block = jnp.repeat(structure.segment_of_entry(offsets, count), length)
    entry = structure.positions(count * length)
    start, width = offsets[block], jnp.maximum(_widths(offsets)[block], 1)
    local = entry - start * length
    source = (start + local % width) * length + local // width
    return jnp.where(entry < offsets[-1] * length, source, entry)


@jax.jit
def expand(A: SparseArray) -> SparseArray:
    """CSR of CVS(V) (CSC of its transpose): every number of a vector an entry, zeros included."""
    offsets, indices = A.index_arrays[1]
    length = A.format.vector_length
    assert length is not None
    rows = A.shape[A.format.modes[0]]
    source = _sources(A)
    lane = structure.positions(length)[None]
    starts = offsets[:-1, None] * length + lane * jnp.diff(offsets)[:, None]
    row_offsets = jnp.append(starts.reshape(-1), offsets[-1] * length)[: rows + 1]
    return replace(
        A,
        values=A.values.reshape(-1)[source],
        index_arrays=((), (row_offsets, indices[source // length])),
        transposed=_expand_transposed(A),
        format=entries_format(A.format),
    )


def _expand_transposed(A: SparseArray) -> tuple[Any, Any, Any]:
    """The transpose of the entries from that of the vectors: a vector's rows follow each other."""
    assert A.transposed is not None
    offsets, blocks, permutation = A.transposed
    length, rows = A.format.vector_length, A.shape[A.format.modes[0]]
    assert length is not None
    count, beyond = blocks.shape[0], -rows % length
    place = positions(A)[0].reshape(count, length)[permutation].reshape(-1)
    row = (blocks[:, None] * length + structure.positions(length)[None]).reshape(-1)
    if not beyond:
        return offsets * length, row, place
    # The last block row has `beyond` rows too many: a vector of it, the last of its column, gives
    # them up, and what follows moves up. They themselves go behind everything, as padding.
    stored = structure.positions(count) < offsets[-1]
    ragged = stored & (blocks == block_rows(rows, length) - 1)
    removed = ragged.astype(jnp.int32) * beyond
    before = jnp.cumsum(removed, dtype=jnp.int32) - removed
    entry = structure.positions(count * length)
    lane = entry % length
    kept = offsets[-1] * length - jnp.sum(removed, dtype=jnp.int32)
    shift = jnp.repeat(before, length)
    outside = jnp.repeat(ragged, length) & (lane >= length - beyond)
    to = jnp.where(outside, kept + shift + lane - (length - beyond), entry - shift)
    to = jnp.where(jnp.repeat(stored, length), to, entry)
    column = structure.segment_of_entry(offsets, count)
    ends = jnp.zeros(offsets.shape[0], jnp.int32).at[column + 1].add(removed, mode="drop")
    move = lambda x: jnp.zeros_like(x).at[to].set(x, unique_indices=True)  # noqa: E731
    return (
        offsets * length - jnp.cumsum(ends, dtype=jnp.int32),
        jnp.where(move(row) < rows, move(row), 0),
        move(place),
    )


def collect(A: SparseArray, values: Any) -> Any:
    """Values in the order of `expand(A)` as A stores them: [vectors, V]."""
    return values[positions(A)[0]].reshape(A.values.shape)
