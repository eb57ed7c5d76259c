"""Matrices of the battery as column vectors, and the same numbers as entries, in NumPy."""

import numpy as np
from battery import Case, cast

from sgap_jax import CVS, SparseArray


def encoded(case, length, padding=3):
    """(row_offsets, column_indices, values) of CVS(length), the CSR case of the same entries, and
    the place of each of those in the flat values.

    Vectors form where any row has an entry, and all their numbers are random; what is no entry (the
    vectors of the padding, rows past the end of the matrix) is NaN and must not be read.
    """
    (m, k), rng = case.shape, np.random.default_rng(length)
    key = np.unique(case.rows // length * max(k, 1) + case.column_indices[: case.stored])
    block, column = key // max(k, 1), key % max(k, 1)
    count, blocks = len(key), -(-m // length)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(block, minlength=blocks))])
    indices = np.concatenate([column, rng.integers(0, k, padding) if k else []])
    values = rng.standard_normal((len(indices), length))
    rows = np.full(values.shape, m)
    rows[:count] = block[:, None] * length + np.arange(length)
    values[rows >= m] = np.nan
    columns = np.broadcast_to(indices[:, None], values.shape).reshape(-1)
    inside = np.flatnonzero(rows.reshape(-1) < m)
    place = inside[np.lexsort((columns[inside], rows.reshape(-1)[inside]))]
    lengths = np.bincount(rows.reshape(-1)[place], minlength=m)
    entries = Case(
        case.name,
        case.shape,
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        columns[place].astype(np.int32),
        values.reshape(-1)[place],
    )
    return (offsets.astype(np.int32), indices.astype(np.int32), values), entries, place


def vectors(arrays, case, dtype):
    offsets, indices, values = arrays
    return SparseArray.from_arrays(
        cast(values, dtype), offsets, indices, shape=case.shape, format=CVS(values.shape[1])
    )
