"""Bounds on rounding errors per entry, derived from the sums."""

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ["float32", "float64", "bfloat16", "float16"]


def unit_roundoff(dtype):
    return float(jnp.finfo(dtype).eps) / 2


def accumulator_roundoff(dtype):
    return min(unit_roundoff(dtype), unit_roundoff("float32"))


def sum_bound(expected, magnitude, terms, dtype):
    """A bound on |computed - exact| for a sum of `terms` products carried in the accumulator and
    rounded once.

    (terms + 1) u_acc sum |a| |b| for the products and additions in any order (Higham, Accuracy and
    Stability, section 4.2), u_out |c| for the final rounding, and the smallest subnormal.
    """
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    u_acc, u_out = accumulator_roundoff(dtype), unit_roundoff(dtype)
    slack = (np.asarray(terms) + 1) * (u_acc + unit_roundoff("float64"))  # the oracle rounds too
    return slack * magnitude * (1 + 2 * u_out) + 1.01 * u_out * np.abs(expected) + tiny


def assert_within(actual, expected, bound):
    actual = np.asarray(actual).astype(np.float64)
    expected = np.asarray(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    error = np.abs(actual - expected)
    wrong = ~(error <= bound)  # a NaN is wrong
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} entries out of bound; first at {where}: got "
            f"{actual[where]}, expected {expected[where]}, "
            f"bound {np.broadcast_to(bound, error.shape)[where]:.3g}"
        )


def close(a, b, tolerance=1e-9):
    """Two trees of arrays, leaf by leaf, in float64."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance
        ),
        a,
        b,
    )
