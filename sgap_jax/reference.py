"""The oracle of each operation, which defines what it computes: plain loops in NumPy and float64.

Every function takes the structure as CSR arrays and returns float64. `row_offsets` and
`column_indices` may carry padding: entries from row_offsets[m] on are ignored.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Offsets = Sequence[int] | NDArray


def spmm(
    values: ArrayLike,
    row_offsets: Offsets,
    column_indices: Offsets,
    shape: tuple[int, int],
    B: ArrayLike,
    transpose: bool = False,
) -> NDArray:
    """C = A B, or A^T B: C[i, :] = sum over stored (i, l) of A[i, l] B[l, :]."""
    m, k = shape
    values, B = np.asarray(values, np.float64), np.asarray(B, np.float64)
    C = np.zeros((k if transpose else m, B.shape[1]))
    for i in range(m):
        for p in range(row_offsets[i], row_offsets[i + 1]):
            j = column_indices[p]
            if transpose:
                C[j] += values[p] * B[i]
            else:
                C[i] += values[p] * B[j]
    return C


def sddmm(
    row_offsets: Offsets,
    column_indices: Offsets,
    X: ArrayLike,
    Y: ArrayLike,
    weights: ArrayLike | None = None,
    scale: float = 1.0,
) -> NDArray:
    """c[p] = scale * weights[p] * (X[i, :] . Y[j, :]) for the p-th stored entry (i, j); zero in the
    padding, and everywhere if X and Y have no columns."""
    X, Y = np.asarray(X, np.float64), np.asarray(Y, np.float64)
    out = np.zeros(len(column_indices))
    if X.shape[1] == 0:
        return out
    for i in range(len(row_offsets) - 1):
        for p in range(row_offsets[i], row_offsets[i + 1]):
            weight = 1.0 if weights is None else np.asarray(weights, np.float64)[p]
            out[p] = scale * weight * np.sum(X[i] * Y[column_indices[p]])
    return out


MESSAGES: dict[str, Callable] = {
    "mul": np.multiply,
    "add": np.add,
    "sub": np.subtract,
    "div": np.divide,
    "copy": lambda x, other: x,
}
REDUCTIONS: dict[str, Callable] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def gspmm(
    values: ArrayLike,
    row_offsets: Offsets,
    column_indices: Offsets,
    shape: tuple[int, int],
    X: ArrayLike,
    op: str,
    reduce: str,
    transpose: bool = False,
) -> NDArray:
    """C[i, :] = reduce over stored (i, j) of X[j, :] op A[i, j], along A or A^T; zero in a row
    without entries."""
    values, X = np.asarray(values, np.float64), np.asarray(X, np.float64)
    messages: list[list] = [[] for _ in range(shape[1] if transpose else shape[0])]
    for i in range(shape[0]):
        for p in range(row_offsets[i], row_offsets[i + 1]):
            j = column_indices[p]
            row, source = (j, i) if transpose else (i, j)
            messages[row].append(MESSAGES[op](X[source], values[p]))
    C = np.zeros((len(messages), X.shape[1]))
    for row, received in enumerate(messages):
        if received:
            C[row] = REDUCTIONS[reduce](received, axis=0)
    return C


def gsddmm(
    row_offsets: Offsets, column_indices: Offsets, X: ArrayLike, Y: ArrayLike, op: str
) -> NDArray:
    """c[p] = sum over l of X[i, l] op Y[j, l] for the p-th stored entry (i, j); zero in the
    padding."""
    X, Y = np.asarray(X, np.float64), np.asarray(Y, np.float64)
    out = np.zeros(len(column_indices))
    for i in range(len(row_offsets) - 1):
        for p in range(row_offsets[i], row_offsets[i + 1]):
            out[p] = np.sum(MESSAGES[op](X[i], Y[column_indices[p]]))
    return out


def sparse_softmax(values: ArrayLike, row_offsets: Offsets, scale: float = 1.0) -> NDArray:
    """Softmax of scale * values over the entries of each row; zeros where all are -infinity."""
    values = scale * np.asarray(values, np.float64)
    out = np.zeros(len(values))
    for i in range(len(row_offsets) - 1):
        row = values[row_offsets[i] : row_offsets[i + 1]]
        if len(row) == 0 or np.max(row) == -np.inf:
            continue
        e = np.exp(row - np.max(row))
        out[row_offsets[i] : row_offsets[i + 1]] = e / np.sum(e)
    return out


def sparse_softmax_jacobian(
    p: ArrayLike, t: ArrayLike, row_offsets: Offsets, scale: float = 1.0
) -> NDArray:
    """The derivative of the softmax with probabilities p along t: scale p (t - sum_row p t)."""
    p, t = np.asarray(p, np.float64), np.asarray(t, np.float64)
    out = np.zeros(len(p))
    for i in range(len(row_offsets) - 1):
        row = slice(row_offsets[i], row_offsets[i + 1])
        out[row] = scale * p[row] * (t[row] - np.sum(p[row] * t[row]))
    return out


def row_sum(values: ArrayLike, row_offsets: Offsets) -> NDArray:
    """Sum of the entries of each row."""
    values = np.asarray(values, np.float64)
    m = len(row_offsets) - 1
    return np.array([np.sum(values[row_offsets[i] : row_offsets[i + 1]]) for i in range(m)])


def row_max(values: ArrayLike, row_offsets: Offsets) -> NDArray:
    """Maximum of the entries of each row; -infinity for an empty row."""
    values = np.asarray(values, np.float64)
    m = len(row_offsets) - 1
    rows = [values[row_offsets[i] : row_offsets[i + 1]] for i in range(m)]
    return np.array([np.max(row, initial=-np.inf) for row in rows])


def attention(
    row_offsets: Offsets,
    column_indices: Offsets,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    scale: float,
    bias: ArrayLike | None = None,
    sink: float = -np.inf,
    seen: Callable[[int, int], bool] = lambda i, j: True,
) -> tuple[NDArray, NDArray]:
    """One head, over the stored entries p = (i, j) with seen(i, j) and bias[p] > -infinity:

        s_p    = scale Q[i] . K[j] + bias[p]
        lse[i] = log(sum over p of exp(s_p) + exp(sink))
        O[i]   = sum over p of exp(s_p - lse[i]) V[j]

    A row without such entries has O = 0 and lse = sink."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    added = np.zeros(len(column_indices)) if bias is None else np.asarray(bias, np.float64)
    m = len(row_offsets) - 1
    out, lse = np.zeros((m, v.shape[1])), np.full(m, sink)
    for i in range(m):
        stored = range(row_offsets[i], row_offsets[i + 1])
        entries = [p for p in stored if seen(i, column_indices[p]) and added[p] > -np.inf]
        scores = [scale * np.sum(q[i] * k[column_indices[p]]) + added[p] for p in entries]
        if not entries:
            continue
        lse[i] = np.logaddexp(np.logaddexp.reduce(scores), sink)
        for p, s in zip(entries, scores, strict=True):
            out[i] += np.exp(s - lse[i]) * v[column_indices[p]]
    return out, lse


def top_k(
    scores: ArrayLike, k: int, limits: Sequence[int] | None = None
) -> tuple[NDArray, NDArray]:
    """(row_offsets, column_indices) of the k greatest scores of each row, without padding. Of row i
    the columns before limits[i] exist, if their score is not -infinity; of equal scores the lower
    column comes first, and NaN after all numbers."""
    scores = np.asarray(scores, np.float64)
    offsets, indices = [0], []
    for i, row in enumerate(scores):
        limit = len(row) if limits is None else limits[i]
        exist = [j for j in range(min(limit, len(row))) if row[j] != -np.inf]
        exist.sort(key=lambda j: (True, 0.0, j) if np.isnan(row[j]) else (False, -row[j], j))
        indices += sorted(exist[:k])
        offsets.append(len(indices))
    return np.array(offsets, np.int32), np.array(indices, np.int32)


def route(
    experts_of_tokens: ArrayLike, experts: int, block: int, capacity: int | None = None
) -> tuple[list[int], list[int], int]:
    """(rows, starts, dropped): for each row the flattened choice (t, c) in it, -1 for padding; the
    rows starts[e] .. starts[e + 1] - 1 are those of expert e, the choices of it in their order and
    then padding up to a multiple of `block`. Of an expert's choices the first `capacity` are kept,
    and `dropped` are not."""
    rows: list[int] = []
    starts, dropped = [0], 0
    for e in range(experts):
        own = [p for p, x in enumerate(np.ravel(experts_of_tokens).tolist()) if x == e]
        kept = own if capacity is None else own[:capacity]
        dropped += len(own) - len(kept)
        rows += kept + [-1] * (-len(kept) % block)
        starts.append(len(rows))
    return rows, starts, dropped


def top_p(
    scores: ArrayLike,
    p: ArrayLike,
    most: int,
    limits: Sequence[int] | None = None,
    keep: ArrayLike | None = None,
) -> tuple[NDArray, NDArray]:
    """(row_offsets, column_indices) of the columns of each row before which, in the order of
    `top_k`, lies less than p of softmax(row), at most `most`; kept columns come first, whatever p
    is."""
    scores = np.asarray(scores, np.float64)
    p = np.broadcast_to(p, len(scores))
    offsets, indices = [0], []
    for i, row in enumerate(scores):
        limit = len(row) if limits is None else limits[i]
        kept = np.zeros(len(row), bool) if keep is None else np.asarray(keep)[i]
        exist = range(min(limit, len(row)))
        numbers = {j: row[j] for j in exist if row[j] > -np.inf}
        peak = max(numbers.values(), default=0.0)
        weights = {j: 1.0 if x == peak else np.exp(x - peak) for j, x in numbers.items()}
        total, before, stored = sum(weights.values()), 0.0, []
        first = [j for j in exist if kept[j]]
        then = sorted((j for j in numbers if not kept[j]), key=lambda j: (-row[j], j))
        last = [j for j in exist if np.isnan(row[j]) and not kept[j]]
        for j in (first + then + last)[:most]:
            if kept[j] or before < p[i] * total or p[i] >= 1:
                stored.append(j)
            before += weights.get(j, 0.0)
        indices += sorted(stored)
        offsets.append(len(indices))
    return np.array(offsets, np.int32), np.array(indices, np.int32)


def threshold(
    scores: ArrayLike,
    at: ArrayLike,
    limits: Sequence[int] | None = None,
    keep: ArrayLike | None = None,
) -> tuple[NDArray, NDArray]:
    """(row_offsets, column_indices) of the scores of at least at[i] and above -infinity, and of
    kept columns."""
    scores = np.asarray(scores, np.float64)
    at = np.broadcast_to(np.asarray(at, np.float64), len(scores))
    offsets, indices = [0], []
    for i, row in enumerate(scores):
        for j in range(len(row) if limits is None else min(limits[i], len(row))):
            kept = keep is not None and np.asarray(keep)[i, j]
            if kept or (row[j] >= at[i] and row[j] > -np.inf):
                indices.append(j)
        offsets.append(len(indices))
    return np.array(offsets, np.int32), np.array(indices, np.int32)
