"""Matrices of the battery as column vectors and blocks, the same values as entries in NumPy, and
checks of results."""

import numpy as np
from battery import Case, cast
from conftest import row_schedule
from sddmm_oracle import oracle as sampled_oracle
from spmm_oracle import dense_operand, oracle
from tolerance import assert_within

from sgap_jax import BCSR, CVS, SparseArray, sddmm, spmm


def encoded(case, length, padding=3, width=None):
    """(row_offsets, column_indices, values) of CVS(length), or with `width` of BCSR(length, width);
    the CSR case with the same entries; and the place of each of these entries in the flat values.

    A vector or block is stored where any of its elements is an entry of the case, and all its
    elements are random. Elements that are no entry (padding, rows and columns past the end of the
    matrix) are NaN and must not be read.
    """
    (m, k), rng, block = case.shape, np.random.default_rng(length), (length, width or 1)
    down, across = -(-m // block[0]), max(-(-k // block[1]), 1)
    columns = case.column_indices[: case.stored] // block[1]
    key = np.unique(case.rows // length * across + columns)
    count = len(key)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(key // across, minlength=down))])
    indices = np.concatenate([key % across, rng.integers(0, across, padding) if k else []])
    values = rng.standard_normal((len(indices), *block))
    rows = np.full(values.shape, m)
    rows[:count] = (key // across * length)[:, None, None] + np.arange(length)[:, None]
    columns = indices[:, None, None] * block[1] + np.arange(block[1])
    columns = np.broadcast_to(columns, values.shape).reshape(-1)
    outside = (rows.reshape(-1) >= m) | (columns >= k)
    values.reshape(-1)[outside] = np.nan
    inside, rows = np.flatnonzero(~outside), rows.reshape(-1)
    place = inside[np.lexsort((columns[inside], rows[inside]))]
    lengths = np.bincount(rows[place], minlength=m)
    entries = Case(
        case.name,
        case.shape,
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        columns[place].astype(np.int32),
        values.reshape(-1)[place],
    )
    values = values if width else values[:, :, 0]
    return (offsets.astype(np.int32), indices.astype(np.int32), values), entries, place


def vectors(arrays, case, dtype):
    offsets, indices, values = arrays
    format = (CVS if values.ndim == 2 else BCSR)(*values.shape[1:])
    return SparseArray.from_arrays(
        cast(values, dtype), offsets, indices, shape=case.shape, format=format
    )


def spmm_is_right(arrays, case, dtype, n, transpose, schedule=None):
    B = dense_operand(case, n, transpose)
    A = vectors(arrays, case, dtype)
    C = spmm(A, cast(B, dtype), transpose=transpose, schedule=schedule)
    assert C.dtype == dtype
    assert_within(C, *oracle(case, dtype, B, transpose))


def sddmm_is_right(arrays, case, place, dtype, d, schedule=None, weighted=False):
    """Checks sddmm; with `weighted` the values are weights and the scale is -0.75."""
    rng = np.random.default_rng(d)
    X, Y = rng.standard_normal((case.shape[0], d)), rng.standard_normal((case.shape[1], d))
    A = vectors(arrays, case, dtype)
    X, Y, schedule = cast(X, dtype), cast(Y, dtype), row_schedule(schedule)
    scale = -0.75 if weighted else None
    C = sddmm(A, X, Y, weighted=weighted, scale=scale, schedule=schedule)
    assert C.dtype == dtype and C.format == A.format and C.values.shape == A.values.shape
    factors = (case.values, scale) if weighted else ()
    expected, bound = np.zeros(A.nnz), np.zeros(A.nnz)
    expected[place], bound[place] = sampled_oracle(case, dtype, X, Y, *factors)
    assert_within(C.values.reshape(-1), expected, bound)  # exactly zero where there is no entry


def stored_mask(dense, format):
    """The mask of the elements stored inside the matrix: whole vectors or blocks."""
    height, width = (*format.block_shape, 1, 1)[:2]
    mask = np.transpose(dense != 0, format.modes)
    (m, k), beyond = (
        mask.shape,
        [(0, -n % s) for n, s in zip(mask.shape, (height, width), strict=True)],
    )
    tiles = np.pad(mask, beyond).reshape(-(-m // height), height, -(-k // width), width)
    whole = tiles.any((1, 3)).repeat(height, 0).repeat(width, 1)[:m, :k]
    return np.transpose(whole, format.modes)


def same(A, dense, format):
    """Checks that A is valid, has this format, and equals `dense`."""
    A.checked()
    assert A.shape == dense.shape and A.format == format
    assert A.values.shape == (A.index_arrays[1][1].shape[0], *format.block_shape)
    assert A.nnz == A.values.size
    np.testing.assert_array_equal(A.todense(), dense)
    mask = stored_mask(dense, format)
    np.testing.assert_array_equal(A.row_lengths, mask.sum(1))
    np.testing.assert_array_equal(A.T.row_lengths, mask.sum(0))
