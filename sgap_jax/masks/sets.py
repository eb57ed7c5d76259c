"""Masks made from other masks: `causal`, `union` and `intersection`."""

from collections.abc import Callable

import numpy as np

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import stored_levels
from sgap_jax.formats.interop import to_numpy
from sgap_jax.formats.levels import CVS, Format
from sgap_jax.masks.build import of_block_rows, rows_of_vectors


def causal(pattern: SparseArray, *, format: Format | None = None) -> SparseArray:
    """The entries (i, j) of a mask with j <= i.

    In CVS(V) a vector is stored if any of its rows has such an entry, so up to V - 1 entries above
    the diagonal are stored in each row. `sparse_attention(..., is_causal=True)` leaves those out:
    this mask saves the work, that argument makes the result exact.

    Args:
      pattern: a concrete matrix of any format.
      format: of the result; None is the format of `pattern`.
    """
    rows, columns = entries("causal", pattern)
    kept = columns <= rows
    return _of_entries("causal", rows[kept], columns[kept], pattern, format)


def union(*patterns: SparseArray, format: Format | None = None) -> SparseArray:
    """The union of the entries of masks of one shape; `format` None is that of the first mask."""
    return _combined("union", np.union1d, patterns, format)


def intersection(*patterns: SparseArray, format: Format | None = None) -> SparseArray:
    """The intersection of the entries of masks of one shape; `format` None is that of the first.

    For two masks in CVS(V) it has the vectors that both store.
    """
    return _combined("intersection", np.intersect1d, patterns, format)


def _combined(
    op: str, combine: Callable, patterns: tuple[SparseArray, ...], format: Format | None
) -> SparseArray:
    if not patterns:
        raise ValueError(f"masks.{op}: expected at least one mask")
    for pattern in patterns:
        if not isinstance(pattern, SparseArray):
            raise ValueError(
                f"masks.{op}: expected SparseArrays, each an argument of its own, as in "
                f"{op}(a, b); got a {type(pattern).__name__}"
            )
    first = patterns[0]
    keys = None
    for pattern in patterns:
        if pattern.shape != first.shape:
            raise ValueError(
                f"masks.{op}: expected masks of one shape, got {first.shape} and {pattern.shape}"
            )
        rows, columns = entries(op, pattern)
        own = rows.astype(np.int64) * max(first.shape[1], 1) + columns
        keys = np.unique(own) if keys is None else combine(keys, own)
    assert keys is not None
    return _of_entries(op, *divmod(keys, max(first.shape[1], 1)), first, format)


def entries(op: str, pattern: SparseArray) -> list[np.ndarray]:
    """[rows, columns] of the stored entries."""
    if not isinstance(pattern, SparseArray) or pattern.ndim != 2:
        raise ValueError(f"masks.{op}: expected a SparseArray of 2 dimensions")
    length = pattern.format.vector_length
    if length is None or pattern.format != CVS(length):
        return to_numpy(pattern, f"masks.{op}")[1]
    block, column = stored_levels(pattern, f"masks.{op}")
    rows = block[:, None] * length + np.arange(length)
    inside = rows < pattern.shape[0]
    return [rows[inside], np.broadcast_to(column[:, None], rows.shape)[inside]]


def _of_entries(
    op: str, rows: np.ndarray, columns: np.ndarray, like: SparseArray, format: Format | None
) -> SparseArray:
    format = like.format if format is None else format
    length, m, k = rows_of_vectors(op, format), *like.shape
    blocks = -(-m // length)
    key = np.unique(rows.astype(np.int64) // length * max(k, 1) + columns)
    block, column = divmod(key, max(k, 1))
    ends = np.searchsorted(block, np.arange(blocks), side="right")
    return of_block_rows(op, np.split(column, ends[:-1]) if blocks else [], (m, k), format)
