"""The oracle of SDDMM on a case of the battery, with a bound on the rounding error."""

import numpy as np
from battery import cast, rounded
from octet_oracle import tf32
from tolerance import assert_within, sum_bound

from sgap_jax import reference
from sgap_jax.launch.sddmm_operands import OperandShapes


def operands(case, d, seed=5):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((case.shape[0], d)), rng.standard_normal((case.shape[1], d))


def oracle(case, dtype, X, Y, weights=None, scale=1.0):
    """The expected values and their error bound; weights [nnz], and a scale that is exact in every
    dtype."""
    X, Y = rounded(X, dtype), rounded(Y, dtype)
    arrays = (case.row_offsets, case.column_indices)
    factors = weights if weights is None else rounded(weights, dtype), scale
    sizes = weights if weights is None else np.abs(factors[0]), abs(scale)
    expected = reference.sddmm(*arrays, X, Y, *factors)
    magnitude = reference.sddmm(*arrays, np.abs(X), np.abs(Y), *sizes)
    # Each factor rounds once more, in the accumulator.
    terms = X.shape[1] + (weights is not None) + (scale != 1)
    return expected, sum_bound(expected, magnitude, terms, dtype)


def launched(dtype, X, Y, weights=None, scale=None):
    """The operands as kernels take them, and their shapes; weights [Bw, ...], scale [Bs, 1]."""
    absent = np.zeros((1, 0))
    X, Y, weights = (cast(absent if x is None else x, dtype) for x in (X, Y, weights))
    wide = "float64" if dtype == "float64" else "float32"
    scale = np.asarray(absent if scale is None else scale, wide)
    arrays = (X, Y, weights, scale)
    return arrays, OperandShapes(*(x.shape for x in arrays))


def check_factors(case, place, weights, dtype, X, Y, run):
    """Checks values = run(X [1, m, d], Y [1, k, d], weights, scale) with weights, with a scale and
    with both, each shared by a batch of two or not.

    `weights` have the shape of the values and are NaN except at `place`, the places of the entries.
    """
    own, scales = np.stack([weights, 2 - weights]), np.array([[0.375], [-1.5]])
    for weights, scale in (
        (own[:1], None),
        (None, scales),
        (own, scales[:1]),
        (own[:1], scales),
    ):
        found = run(X[None], Y[None], weights, scale)
        assert len(found) == max(len(x) for x in (weights, scale) if x is not None)
        for i, values in enumerate(found):
            each = None if weights is None else np.full(case.nnz, np.nan)
            if weights is not None:
                each[: len(place)] = weights[i % len(weights)].reshape(-1)[place]
            all = 1.0 if scale is None else scale[i % len(scale), 0]
            whole = np.zeros((2, values.size))
            entries = np.stack(oracle(case, dtype, X, Y, each, all))
            whole[:, place] = entries[:, : len(place)]
            assert_within(values.reshape(-1), *whole)  # places that are no entry are exactly zero


def vector_oracle(case, place, size, dtype, X, Y):
    """The oracle for `size` values in column vectors, as vector_cases.encoded gives them; float32
    operands are rounded to tf32.

    Places that are no entry must be exactly zero.
    """
    if dtype == "float32":
        X, Y = tf32(X), tf32(Y)
    whole = np.zeros((2, size))
    whole[:, place] = oracle(case, dtype, X, Y)
    return whole
