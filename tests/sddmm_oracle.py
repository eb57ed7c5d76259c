"""What X Y^T is at the entries of a case, and how far from it rounding may lead."""

import numpy as np
from battery import rounded
from octet_oracle import tf32
from tolerance import sum_bound

from sgap_jax import reference


def operands(case, d, seed=5):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((case.shape[0], d)), rng.standard_normal((case.shape[1], d))


def oracle(case, dtype, X, Y):
    X, Y = rounded(X, dtype), rounded(Y, dtype)
    arrays = (case.row_offsets, case.column_indices)
    expected = reference.sddmm(*arrays, X, Y)
    magnitude = reference.sddmm(*arrays, np.abs(X), np.abs(Y))
    return expected, sum_bound(expected, magnitude, X.shape[1], dtype)


def vector_oracle(case, place, size, dtype, X, Y):
    """The same for vectors of `size` numbers, as vector_cases.encoded gives them; float32 is tf32.

    What is no entry must be exactly zero.
    """
    if dtype == "float32":
        X, Y = tf32(X), tf32(Y)
    whole = np.zeros((2, size))
    whole[:, place] = oracle(case, dtype, X, Y)
    return whole
