"""Oracles of the row operations on a case of the battery, with bounds on the rounding error."""

import jax.numpy as jnp
import numpy as np
from battery import rounded
from tolerance import accumulator_roundoff, sum_bound, unit_roundoff

from sgap_jax import reference


def row_sum_oracle(case, dtype, values=None):
    values = rounded(case.values if values is None else values, dtype)
    expected = reference.row_sum(values, case.row_offsets)
    magnitude = reference.row_sum(np.abs(values), case.row_offsets)
    return expected, sum_bound(expected, magnitude, np.diff(case.row_offsets), dtype)


def softmax_oracle(case, dtype, scale=1.0, values=None):
    """The softmax and its error bound, which is relative: the rounding |scale v| u of the exponent,
    the exponential, the sum and the quotient."""
    values = rounded(case.values if values is None else values, dtype)
    expected = reference.sparse_softmax(values, case.row_offsets, scale)
    stored = np.abs(values[: case.stored])
    exponent = 2 * abs(scale) * (stored.max() if len(stored) else 0)
    terms = np.diff(case.row_offsets).max(initial=0)
    relative = (2 * exponent + terms + 16) * (
        accumulator_roundoff(dtype) + unit_roundoff("float64")
    )
    tiny = float(jnp.finfo(dtype).smallest_normal)
    return expected, (relative + 1.01 * unit_roundoff(dtype)) * expected + tiny


def softmax_jacobian_oracle(case, dtype, p, t, scale=1.0):
    """The Jacobian's product and its error bound; p and t are exact in the dtype."""
    p, t = (np.asarray(x).astype(np.float64) for x in (p, t))
    expected = reference.sparse_softmax_jacobian(p, t, case.row_offsets, scale)
    size = np.abs(scale) * p * (np.abs(t) + _row_dot(p, t, case))
    terms = np.diff(case.row_offsets).max(initial=0)
    slack = (terms + 8) * (accumulator_roundoff(dtype) + unit_roundoff("float64"))
    bound = slack * size + 1.01 * unit_roundoff(dtype) * np.abs(expected)
    return expected, bound + float(jnp.finfo(dtype).smallest_normal)


def _row_dot(p, t, case):
    """sum over each row of |p t|, at the row's entries."""
    dots = reference.row_sum(np.abs(p * t), case.row_offsets)
    out = np.zeros(case.nnz)
    out[: case.stored] = dots[case.rows]
    return out
