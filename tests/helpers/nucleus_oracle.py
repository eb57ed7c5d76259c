"""Operands of the nucleus, as `select.top_p` passes them, and the check of what comes out."""

import numpy as np

from sgap_jax import reference

INF, NAN = np.inf, np.nan
LARGE = 1e300  # above every finite score


def wide_of(dtype):
    return np.float64 if dtype == "float64" else np.float32


def probabilities(scores, limits):
    """p for each row: between two sums of the greatest probabilities, so that rounding decides
    nothing; 0, 1 and others on the way."""
    rng = np.random.default_rng(scores.shape)
    p = np.empty(len(scores))
    for i, (row, limit) in enumerate(zip(np.float64(scores), limits, strict=True)):
        row = np.sort(row[:limit][row[:limit] > -INF])[::-1]
        with np.errstate(invalid="ignore"):
            weights = np.where(row == row[:1], 1.0, np.exp(row - row[:1]))
        shares = weights / max(weights.sum(), 1e-300)
        clear = np.flatnonzero(shares > 1e-4)
        chosen = rng.choice(clear) if len(clear) else -1
        p[i] = shares[:chosen].sum() + shares[chosen] / 2 if chosen >= 0 else 0.5
    special = [0.0, 1.0, -1.0, 7.0, NAN]
    few = rng.random(len(p)) < 0.2
    return np.where(few, rng.choice(special, len(p)), p)


def operands_of(scores, p, k, limits, keep=None):
    """What `select.top_p` passes to the kernel for one matrix."""
    m = len(scores)
    wide = np.float64(scores)
    ranked = wide if keep is None else np.where(keep, INF, np.minimum(wide, LARGE))
    offsets, indices = reference.top_k(ranked, k, limits)
    rows, room = np.repeat(np.arange(m), np.diff(offsets)), m * k - len(indices)
    values = np.pad(scores[rows, indices], (0, room))
    order = values
    if keep is not None:
        first = np.pad(ranked[rows, indices] == INF, (0, room))
        order = np.where(first, INF, 0).astype(scores.dtype)
    exists = (np.arange(scores.shape[1]) < limits[:, None]) & ~np.isnan(wide)
    numbers = np.where(exists, wide, -INF)
    greatest = numbers.max(1, initial=-INF)
    with np.errstate(invalid="ignore"):
        weights = np.where(numbers == greatest[:, None], 1, np.exp(numbers - greatest[:, None]))
    total = np.where(numbers > -INF, weights, 0).sum(1)
    rows_of = [x.astype(wide_of(scores.dtype)) for x in (greatest, total, p)]
    return values, order, *rows_of, offsets, np.pad(indices, (0, room))


def check(found, operands, want, message):
    """Offsets and indices are `want`, the entries where these were, and all else is 0."""
    offsets, indices, entries = (x[0] for x in found)
    before, columns = operands[5:]
    stored = len(want[1])
    np.testing.assert_array_equal(offsets, want[0], message)
    np.testing.assert_array_equal(indices[:stored], want[1], message)
    np.testing.assert_array_equal(columns[entries[:stored]], want[1], message)
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    inside = (entries[:stored] >= before[rows]) & (entries[:stored] < before[rows + 1])
    assert inside.all() and not indices[stored:].any() and not entries[stored:].any(), message
