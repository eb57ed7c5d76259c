"""Masks made from other masks: `causal`, `union` and `intersection`."""

from collections.abc import Iterator

import jax
import numpy as np
import scipy.sparse

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_nnz, check_offsets, check_range, is_traced
from sgap_jax.formats.convert import require_unbatched, stored_levels
from sgap_jax.formats.direct import merged_pattern
from sgap_jax.formats.interop import to_numpy
from sgap_jax.formats.levels import CSR, CVS, Format
from sgap_jax.masks.build import (
    joined,
    of_arrays,
    of_slices,
    row_chunks,
    rows_of_slices,
    rows_of_vectors,
)

Rows = tuple[np.ndarray, np.ndarray]


def causal(pattern: SparseArray, *, format: Format | str | None = None) -> SparseArray:
    """The entries (i, j) of a mask with j <= i.

    In CVS(V) a vector is stored if any of its rows has such an entry, so up to V - 1 entries above
    the diagonal are stored in each row. `sparse_attention(..., is_causal=True)` leaves those out:
    this mask saves the work, that argument makes the result exact.

    Args:
      pattern: a concrete matrix of any format.
      format: of the result; None is the format of `pattern`.
    """
    if not isinstance(pattern, SparseArray):
        size = isinstance(pattern, int | np.integer) and not isinstance(pattern, bool)
        whole = (
            f"; causal(band({pattern}, {2 * int(pattern)})) sees all keys before" if size else ""
        )
        raise ValueError(
            f"masks.causal: expected a SparseArray, got a {type(pattern).__name__}{whole}"
        )
    length, ((offsets, columns),), format = _levels("causal", (pattern,), format)
    last = np.minimum(np.arange(len(offsets) - 1) * length + length, pattern.shape[0]) - 1

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for rows in row_chunks(offsets[1:]):
            ends = offsets[rows.start : rows.stop + 1]
            own = columns[ends[0] : ends[-1]]
            kept = own <= last[rows].repeat(np.diff(ends))
            before = np.concatenate([[0], np.cumsum(kept)])
            yield np.diff(before[ends - ends[0]]), own[kept]

    stored = joined("causal", chunks(), length, len(columns))
    return _mask("causal", *stored, length, pattern.shape, format)


def union(*patterns: SparseArray, format: Format | str | None = None) -> SparseArray:
    """The union of the entries of masks of one shape; `format` None is that of the first mask."""
    return _combined("union", "+", patterns, format)


def intersection(*patterns: SparseArray, format: Format | str | None = None) -> SparseArray:
    """The intersection of the entries of masks of one shape; `format` None is that of the first.

    For two masks in CVS(V) it has the vectors that both store.
    """
    return _combined("intersection", "*", patterns, format)


def _combined(
    op: str, sign: str, patterns: tuple[SparseArray, ...], format: Format | str | None
) -> SparseArray:
    if not patterns:
        raise ValueError(f"masks.{op}: expected at least one mask")
    for pattern in patterns:
        if not isinstance(pattern, SparseArray):
            raise ValueError(
                f"masks.{op}: expected SparseArrays, each an argument of its own, as in "
                f"{op}(a, b); got a {type(pattern).__name__}"
            )
    for pattern in patterns:
        if pattern.shape != patterns[0].shape:
            raise ValueError(
                f"masks.{op}: expected masks of one shape, got {patterns[0].shape} and "
                f"{pattern.shape}"
            )
    length, stored, format = _levels(op, patterns, format)
    (m, k), found = patterns[0].shape, stored[0]
    for other in stored[1:]:
        merged = merged_pattern(found, other, k, sign)
        if merged is None:  # of arrays that were written to after their check
            raise ValueError(f"masks.{op}: expected masks whose columns ascend in each row")
        found = merged
    return _mask(op, *found, length, (m, k), format)


def entries(op: str, pattern: SparseArray) -> list[np.ndarray]:
    """[rows, columns] of the stored entries."""
    if not isinstance(pattern, SparseArray) or pattern.ndim != 2:
        raise ValueError(f"masks.{op}: expected a SparseArray of 2 dimensions")
    length = pattern.format.vector_length
    if length is None or pattern.format != CVS(length):
        return to_numpy(pattern, f"masks.{op}")[1]
    blocks, columns = stored_levels(pattern, f"masks.{op}")
    rows = blocks[:, None] * length + np.arange(length)
    inside = rows < pattern.shape[0]
    return [rows[inside], np.broadcast_to(columns[:, None], rows.shape)[inside]]


def _levels(
    op: str, patterns: tuple[SparseArray, ...], format: Format | str | None
) -> tuple[int, list[Rows], Format]:
    """(V, offsets and ascending columns of each mask's vectors of V rows, the format of the
    result): V is that of the result, but 1 for masks of other formats where that has fewer
    entries."""
    format = patterns[0].format if format is None else format
    format, length = rows_of_vectors(op, format)
    if op != "union" and any(p.format != format for p in patterns):
        length = 1
    return length, [_rows(op, p, length) for p in patterns], format


def _rows(op: str, pattern: SparseArray, length: int) -> Rows:
    known = pattern.is_checked and np.ndim(pattern.values) == 1 + len(pattern.format.block_shape)
    if known and not is_traced(*jax.tree.leaves(pattern.index_arrays)):
        require_unbatched(pattern, f"masks.{op}: A")
        if pattern.format == _of_length(length):
            return _arrays(pattern)
        own = pattern.format.vector_length or 1
        if pattern.format == _of_length(own):
            offsets, columns = _arrays(pattern)
            first, stop = (x.repeat(own)[: pattern.shape[0]] for x in (offsets[:-1], offsets[1:]))
            shape = pattern.shape[0], pattern.shape[1]
            return rows_of_slices(op, [(first, stop)], shape, length, columns)
    if pattern.format == CVS(length):
        rows, columns = stored_levels(pattern, f"masks.{op}")
    else:
        rows, columns = entries(op, pattern)
        rows = rows // length
    blocks = -(-pattern.shape[0] // length), pattern.shape[1]
    stored = scipy.sparse.csr_array((np.ones(len(columns), bool), (rows, columns)), blocks)
    stored.sum_duplicates()
    return stored.indptr.astype(np.int32), stored.indices.astype(np.int32)


def _of_length(length: int) -> Format:
    return CSR if length == 1 else CVS(length)


def _arrays(mask: SparseArray) -> Rows:
    """Offsets, and the columns up to the last of them: behind are none but in a capacity."""
    offsets, columns = (np.asarray(x) for x in mask.index_arrays[1])
    check_offsets(offsets, len(offsets) - 1, len(columns), "offsets", "masks")
    columns = columns[: int(offsets[-1])]
    check_range(columns, mask.shape[1], "columns", "masks")
    return offsets, columns


def _mask(
    op: str,
    offsets: np.ndarray,
    columns: np.ndarray,
    length: int,
    shape: tuple[int, ...],
    format: Format,
) -> SparseArray:
    """The mask that stores these vectors of `length` rows, in `format`."""
    (format, wanted), (m, k) = rows_of_vectors(op, format), shape
    if wanted != length:  # from entries
        return of_slices(op, [(offsets[:-1], offsets[1:])], (m, k), format, columns)
    check_nnz(len(columns) * length, f"masks.{op}")
    return of_arrays(offsets, columns, (m, k), format)
