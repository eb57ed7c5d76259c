"""The invariants of a SparseArray in any stored format: shared by the tests of formats."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY

from sgap_jax import COO, CSC, CSR

COO_BY_COLUMNS = COO.transposed
STORED = [CSR, CSC, COO, COO_BY_COLUMNS]
formats = pytest.mark.parametrize("format", STORED, ids=str)

SMALL = BATTERY["empty_rows_at_both_ends"]
PADDED = BATTERY["padded"]


def invariants(A, dense):
    """Checks the invariants of a SparseArray of any format whose dense array is `dense`."""
    A.checked()
    m, k = dense.shape
    assert A.shape == (m, k) and A.ndim == 2
    assert all(x.dtype == jnp.int32 for x in jax.tree.leaves((A.index_arrays, A.transposed)))
    np.testing.assert_array_equal(A.todense(), dense)
    np.testing.assert_array_equal(A.row_lengths, (dense != 0).sum(1))
    np.testing.assert_array_equal(A.T.row_lengths, (dense != 0).sum(0))
    assert math.isclose(A.density, A.nnz / (m * k) if m * k else 0.0)
    offsets, indices, permutation = (np.asarray(x) for x in A.transposed)
    used = int(offsets[-1])
    # Column order by its definition: a stable sort of the entries by the inner coordinate.
    outer, inner = (np.asarray(A.coordinates()[mode]) for mode in A.format.modes)
    np.testing.assert_array_equal(permutation, np.argsort(inner, kind="stable"))
    np.testing.assert_array_equal(indices[:used], outer[permutation[:used]])
    size = A.shape[A.format.modes[1]]
    np.testing.assert_array_equal(
        np.diff(offsets), np.bincount(inner[:used], minlength=size)[:size]
    )


def dense_of(A):
    """Dense A in NumPy: in JAX every shape would be compiled."""
    if not A.format.block_shape:
        return A.to_scipy().toarray()
    height, width = (*A.format.block_shape, 1)[:2]
    offsets, columns = map(np.asarray, A.index_arrays[1])
    outer, inner = (A.shape[mode] for mode in A.format.modes)
    out = np.zeros((outer + height, inner + width), A.dtype)
    for b in range(len(offsets) - 1):
        for p in range(offsets[b], offsets[b + 1]):
            block = np.asarray(A.values[p]).reshape(height, width)
            at = b * height, columns[p] * width
            out[at[0] : at[0] + height, at[1] : at[1] + width] = block
    return np.transpose(out[:outer, :inner], A.format.modes)


def integers(m, n, seed=0, dtype=np.float64):
    """A matrix of small integers, with an empty row and an empty column where there is room."""
    rng = np.random.default_rng(seed)
    a = rng.integers(-4, 5, (m, n)) * (rng.random((m, n)) < 0.5)
    if m > 2 and n > 2:
        a[1], a[:, 2] = 0, 0
    return a.astype(dtype)
