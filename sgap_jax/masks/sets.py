"""Masks made from other masks: `causal`, `union` and `intersection`."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import stored_levels
from sgap_jax.formats.interop import to_numpy
from sgap_jax.formats.levels import CVS, Format
from sgap_jax.masks.build import of_block_rows, rows_of_vectors


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
    length, (stored,), format = _levels("causal", (pattern,), format)
    last = np.minimum(np.arange(stored.shape[0]) * length + length, pattern.shape[0]) - 1
    kept = stored.indices <= last.repeat(np.diff(stored.indptr))
    stored.indptr = np.concatenate([[0], np.cumsum(kept)])[stored.indptr]
    stored.indices, stored.data = stored.indices[kept], stored.data[kept]
    return _mask("causal", stored, length, pattern.shape, format)


def union(*patterns: SparseArray, format: Format | str | None = None) -> SparseArray:
    """The union of the entries of masks of one shape; `format` None is that of the first mask."""
    return _combined("union", lambda a, b: a.maximum(b), patterns, format)


def intersection(*patterns: SparseArray, format: Format | str | None = None) -> SparseArray:
    """The intersection of the entries of masks of one shape; `format` None is that of the first.

    For two masks in CVS(V) it has the vectors that both store.
    """
    return _combined("intersection", lambda a, b: a.multiply(b), patterns, format)


def _combined(
    op: str, combine: Callable, patterns: tuple[SparseArray, ...], format: Format | str | None
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
    return _mask(op, functools.reduce(combine, stored), length, patterns[0].shape, format)


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
) -> tuple[int, list[Any], Format]:
    """(V, each mask as a SciPy matrix of its vectors of V rows, the format of the result): V is 1
    unless all masks and the result are in one CVS(V)."""
    format = patterns[0].format if format is None else format
    format, length = rows_of_vectors(op, format)
    if any(p.format != format for p in patterns):
        length = 1
    found = [entries(op, p) if length == 1 else stored_levels(p, f"masks.{op}") for p in patterns]
    m, k = patterns[0].shape
    return length, [_matrix(rows, columns, (-(-m // length), k)) for rows, columns in found], format


def _matrix(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> Any:
    """A SciPy matrix in CSR, sorted and without repeats."""
    stored = scipy.sparse.csr_array((np.ones(len(columns), bool), (rows, columns)), shape)
    stored.sum_duplicates()
    return stored


def _mask(op: str, stored: Any, length: int, shape: tuple[int, ...], format: Format) -> SparseArray:
    """The mask that stores the vectors of `length` rows of a SciPy matrix, in `format`."""
    (format, wanted), (m, k) = rows_of_vectors(op, format), shape
    if wanted != length:  # from entries
        rows = np.repeat(np.arange(m) // wanted, np.diff(stored.indptr))
        stored = _matrix(rows, stored.indices, (-(-m // wanted), k))
    return of_block_rows(op, np.diff(stored.indptr), stored.indices, (m, k), format)
