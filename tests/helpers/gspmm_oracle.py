"""The oracle of gspmm on a case of the battery, with a bound on the rounding error."""

import itertools

import numpy as np
from battery import rounded
from tolerance import sum_bound

from sgap_jax import reference
from sgap_jax.primitives.gspmm import OPS, REDUCTIONS

PAIRS = list(itertools.product(OPS, REDUCTIONS))


def away_from_zero(values):
    """Values that can be divided by, in float16 too."""
    return values + np.copysign(0.5, values)


def oracle(case, dtype, X, op, reduce, transpose=False, values=None):
    values = away_from_zero(case.values) if values is None else values
    values, X = rounded(values, dtype), rounded(X, dtype)
    arrays = (case.row_offsets, case.column_indices, case.shape)
    expected = reference.gspmm(values, *arrays, X, op, reduce, transpose)
    # Sums of x + a are bounded by sums of |x| and of |a|; an extremum has the error of one message.
    size_op, size_reduce = {"sub": "add"}.get(op, op), {"min": "max"}.get(reduce, reduce)
    size = reference.gspmm(np.abs(values), *arrays, np.abs(X), size_op, size_reduce, transpose)
    lengths = reference.gspmm(values, *arrays, np.ones((len(X), 1)), "copy", "sum", transpose)
    terms = 2 * lengths if reduce in ("sum", "mean") else 0
    return expected, sum_bound(expected, size, terms + 3, dtype)  # 3: 1 / a, message, mean
