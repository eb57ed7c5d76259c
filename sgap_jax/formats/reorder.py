"""Orders of the rows in which column vectors and blocks hold fewer zeros."""

from __future__ import annotations

import numpy as np

from sgap_jax.formats import vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CVS, Format

_HASHES = 4
# Odd multipliers from the golden ratio: any would do, these are the same in every process.
_MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15) * np.arange(1, 2 * _HASHES, 2, dtype=np.uint64)


def cluster_rows(A: SparseArray, format: Format) -> np.ndarray:
    """A permutation p of the rows such that A[p] needs fewer vectors or blocks than A, if it can.

    Rows are sorted by the minima of four hashes over their columns (for BCSR(r, c), over their
    block columns): two rows agree in one with the probability (columns in both) / (columns in
    either), so that similar rows become neighbours. Of that order, the order by first column and
    the given order the best is returned.

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
    vectors.check_blocked(A, format, "cluster_rows")
    if format.order is not None:
        raise ValueError(f"cluster_rows: format: expected CVS(V) or BCSR(r, c), got {format}")
    rows, columns = vectors.concrete_coordinates(A, "cluster_rows")
    columns = columns // vectors.tile(format)[1]  # that two entries are in one block costs nothing
    height = vectors.tile(format)[0]
    m = A.shape[0]
    hashes = np.full((_HASHES + 1, m), np.iinfo(np.uint64).max, np.uint64)
    for i, multiplier in enumerate(_MULTIPLIERS):
        # The high half of a product mixes all bits of a factor; the low bits break ties.
        mixed = columns.astype(np.uint64) * multiplier
        np.minimum.at(hashes[i], rows, mixed ^ (mixed >> np.uint64(29)))
    np.minimum.at(hashes[-1], rows, columns.astype(np.uint64))
    candidates = [np.arange(m), np.lexsort(hashes[:-1]), np.argsort(hashes[-1], kind="stable")]
    return min(candidates, key=lambda order: _tiles(order, rows, columns, height))


def _tiles(order: np.ndarray, rows: np.ndarray, columns: np.ndarray, height: int) -> int:
    """Vectors, or blocks where `columns` are block columns."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return len(vectors.encode(place[rows], columns, CVS(height))[0])
