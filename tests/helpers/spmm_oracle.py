"""The oracle of C = A B for a case of the battery, with a bound on the rounding error."""

import numpy as np
from battery import rounded
from tolerance import sum_bound

from sgap_jax import reference


def oracle(case, dtype, B, transpose=False, values=None):
    values, B = rounded(case.values if values is None else values, dtype), rounded(B, dtype)
    arrays = (case.row_offsets, case.column_indices, case.shape)
    expected = reference.spmm(values, *arrays, B, transpose)
    magnitude = reference.spmm(np.abs(values), *arrays, np.abs(B), transpose)
    ones = np.ones((B.shape[0], 1))
    terms = reference.spmm(np.ones(case.nnz), *arrays, ones, transpose)
    return expected, sum_bound(expected, magnitude, terms, dtype)


def dense_operand(case, n, transpose=False, seed=3):
    rows = case.shape[0] if transpose else case.shape[1]
    return np.random.default_rng(seed).standard_normal((rows, n))
