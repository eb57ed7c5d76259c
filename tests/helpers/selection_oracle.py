"""Scores with what a selection can stumble over, and what `top_k` must store of them."""

import numpy as np

from sgap_jax import reference

INF, NAN = np.inf, np.nan


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape)


def scores_of(kind, m, n):
    """Scores with what a selection can stumble over."""
    rng = np.random.default_rng((m, n))
    x = rng.standard_normal((m, n))
    few = rng.random((m, n))
    return {
        "normal": x,
        "ties": np.round(x),
        "equal": np.full((m, n), 0.5),
        "zeros": np.where(few < 0.5, 0.0, -0.0),
        "nan": np.where(few < 0.3, NAN, x),
        "only nan": np.full((m, n), NAN),
        "masked": np.where(few < 0.99, -INF, x),
        "nothing": np.full((m, n), -INF),
        "infinite": np.where(few < 0.1, INF, np.where(few < 0.2, NAN, x)),
        "rising": np.sort(x, axis=1),
        "falling": -np.sort(x, axis=1),
        "periodic": np.cos(np.arange(n) * (np.arange(m)[:, None] % 3 + 1) * np.pi / 4),
        "tiny": x * 1e-310,
    }[kind]


KINDS = ["normal", "ties", "equal", "zeros", "nan", "only nan", "masked", "nothing", "infinite"]
KINDS += ["rising", "falling", "periodic", "tiny"]


def same(found, right, message=""):
    """Exactly: NaN equals NaN, and 0 is not -0."""
    for got, want in zip(found, right, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        np.testing.assert_array_equal(got, want, message)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want), message)


def expected(scores, k, limits=None):
    """The arrays of capacity m k, padded as the kernel does."""
    m = scores.shape[0]
    offsets, indices = reference.top_k(scores, k, limits)
    rows = np.repeat(np.arange(m), np.diff(offsets))
    values = np.zeros(m * k, scores.dtype)
    values[: len(indices)] = scores[rows, indices]
    return values, offsets, np.pad(indices, (0, m * k - len(indices)))
