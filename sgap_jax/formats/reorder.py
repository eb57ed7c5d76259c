"""The fill-in of column vectors and blocks, and row orders that reduce it."""

from __future__ import annotations

import numpy as np

from sgap_jax.formats import interop, vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CVS, Format

_HASHES = 4
# Odd multipliers from the golden ratio: any fixed odd ones would do.
_MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15) * np.arange(1, 2 * _HASHES, 2, dtype=np.uint64)


def fill_in(A: SparseArray, format: Format | str) -> float:
    """Stored values of A in a format of vectors or blocks, over its entries: 1 if no zeros are
    added.

        fill-in = r c size({(i // r, j // c) : (i, j) stored}) / nnz   (r = V and c = 1 for CVS(V))

    Args:
      A: a concrete matrix of any format.
      format: CVS(V) or BCSR(r, c), or the transpose of one.

    Returns:
      A number from 1 (no zeros are added) to r c; 1.0 for an array without entries.
      `A.asformat(format, max_fill_in=...)` refuses to store more than a limit.

    Raises:
      ValueError: not a matrix, traced structure, or a format without vectors or blocks.

    Source: vectorSparse, section 4.2.
    """
    format = vectors.check_blocked(A, format, "fill_in")
    coordinates = interop.to_numpy(A, "fill_in")[1]
    outer, inner = (coordinates[mode] for mode in format.modes)
    return vectors.fill_in_ratio(len(vectors.encode(outer, inner, format)[0]), len(outer), format)


def cluster_rows(A: SparseArray, format: Format | str) -> np.ndarray:
    """A permutation p of the rows such that A[p] needs fewer vectors or blocks than A, if it can.

    Rows are sorted by the minima of four hashes over their columns (for BCSR(r, c), over their
    block columns). Two rows agree in one minimum with probability (columns in both) / (columns in
    either), so similar rows become neighbours. The result is the best of three orders: this one,
    the order by first column, and the given order.

        B = SparseArray.from_scipy(A.to_scipy()[p], format=CVS(8));  C[p] = B X  where  C = A X

    Args:
      A: a concrete matrix of any format.
      format: CVS(V) or BCSR(r, c).

    Returns:
      p [m]: row i of the reordered matrix is row p[i] of A; arange(m) where nothing is better.

    Raises:
      ValueError: not a matrix, traced structure, or a format without vectors or blocks by rows.

    Source: MinHash is Broder's (1997); that row order matters to fill-in: vectorSparse, section 8.
    """
    format = vectors.check_blocked(A, format, "cluster_rows")
    if format.order is not None:
        raise ValueError(f"cluster_rows: format: expected CVS(V) or BCSR(r, c), got {format}")
    rows, columns = interop.to_numpy(A, "cluster_rows")[1]
    columns = columns // vectors.tile(format)[1]  # entries of one row in one block count once
    height = vectors.tile(format)[0]
    m = A.shape[0]
    hashes = np.full((_HASHES + 1, m), np.iinfo(np.uint64).max, np.uint64)
    for i, multiplier in enumerate(_MULTIPLIERS):
        # The high bits of the product depend on all bits of the column, so shift them down.
        mixed = columns.astype(np.uint64) * multiplier
        np.minimum.at(hashes[i], rows, mixed ^ (mixed >> np.uint64(29)))
    np.minimum.at(hashes[-1], rows, columns.astype(np.uint64))
    candidates = [np.arange(m), np.lexsort(hashes[:-1]), np.argsort(hashes[-1], kind="stable")]
    return min(candidates, key=lambda order: _tiles(order, rows, columns, height))


def _tiles(order: np.ndarray, rows: np.ndarray, columns: np.ndarray, height: int) -> int:
    """How many vectors (blocks, if `columns` are block columns) this order of the rows needs."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return len(vectors.encode(place[rows], columns, CVS(height))[0])
