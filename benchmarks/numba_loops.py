"""Loops that a careful user writes with numba: a peer with no knowledge beyond the formula.

Rows in parallel, contiguous inner loops, fastmath. LLVM's choices are hard to predict, so the
product comes in variants, and the peer takes the fastest for each case.
"""

import functools

import numba
import numpy as np

parallel = numba.njit(parallel=True, fastmath=True, error_model="numpy")


@parallel
def read_repeatedly(data, repeats, parts):
    sums = np.zeros(parts * 16, np.float32)
    length = data.shape[0] // parts
    for part in numba.prange(parts):
        own = data[part * length : (part + 1) * length]
        total = np.float32(0)
        for _ in range(repeats):
            for i in range(length):
                total += own[i]
        sums[part * 16] = total
    return sums


@parallel
def spmm(offsets, indices, values, B, C):
    for i in numba.prange(C.shape[0]):
        row = C[i]
        row[:] = 0
        for p in range(offsets[i], offsets[i + 1]):
            value, other = values[p], B[indices[p]]
            for j in range(row.shape[0]):
                row[j] += value * other[j]


@parallel
def spmm_by_four(offsets, indices, values, B, C):
    """Four nonzeros at a time: a quarter of the traffic on the row of C."""
    for i in numba.prange(C.shape[0]):
        row = C[i]
        row[:] = 0
        p, end = offsets[i], offsets[i + 1]
        while p + 4 <= end:
            a0, a1, a2, a3 = values[p], values[p + 1], values[p + 2], values[p + 3]
            b0, b1 = B[indices[p]], B[indices[p + 1]]
            b2, b3 = B[indices[p + 2]], B[indices[p + 3]]
            for j in range(row.shape[0]):
                row[j] += a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j]
            p += 4
        while p < end:
            value, other = values[p], B[indices[p]]
            for j in range(row.shape[0]):
                row[j] += value * other[j]
            p += 1


@functools.cache
def spmm_fixed(n):
    """n known to the compiler: it may keep the row of C in registers."""

    @parallel
    def kernel(offsets, indices, values, B, C):
        for i in numba.prange(C.shape[0]):
            for j in range(n):
                C[i, j] = 0
            for p in range(offsets[i], offsets[i + 1]):
                value, k = values[p], indices[p]
                for j in range(n):
                    C[i, j] += value * B[k, j]

    return kernel


@parallel
def spmv(offsets, indices, values, b, c):
    for i in numba.prange(c.shape[0]):
        total = np.float32(0)
        for p in range(offsets[i], offsets[i + 1]):
            total += values[p] * b[indices[p]]
        c[i] = total


@parallel
def sddmm(offsets, indices, X, Y, values):
    for i in numba.prange(X.shape[0]):
        x = X[i]
        for p in range(offsets[i], offsets[i + 1]):
            y = Y[indices[p]]
            total = np.float32(0)
            for j in range(x.shape[0]):
                total += x[j] * y[j]
            values[p] = total


@functools.cache
def sddmm_fixed(d):
    @parallel
    def kernel(offsets, indices, X, Y, values):
        for i in numba.prange(X.shape[0]):
            for p in range(offsets[i], offsets[i + 1]):
                k, total = indices[p], np.float32(0)
                for j in range(d):
                    total += X[i, j] * Y[k, j]
                values[p] = total

    return kernel


@parallel
def message_max(offsets, indices, values, X, C):
    for i in numba.prange(C.shape[0]):
        row, start, end = C[i], offsets[i], offsets[i + 1]
        if start == end:
            row[:] = 0
            continue
        value, other = values[start], X[indices[start]]
        for j in range(row.shape[0]):
            row[j] = value * other[j]
        for p in range(start + 1, end):
            value, other = values[p], X[indices[p]]
            for j in range(row.shape[0]):
                row[j] = max(row[j], value * other[j])


@parallel
def message_mean(offsets, indices, values, X, C):
    for i in numba.prange(C.shape[0]):
        row = C[i]
        row[:] = 0
        share = np.float32(1) / np.float32(max(offsets[i + 1] - offsets[i], 1))
        for p in range(offsets[i], offsets[i + 1]):
            value, other = values[p] * share, X[indices[p]]
            for j in range(row.shape[0]):
                row[j] += value * other[j]


@parallel
def sparse_softmax(offsets, values, result):
    for i in numba.prange(offsets.shape[0] - 1):
        start, end = offsets[i], offsets[i + 1]
        if start == end:
            continue
        largest = values[start]
        for p in range(start + 1, end):
            largest = max(largest, values[p])
        total = np.float32(0)
        for p in range(start, end):
            result[p] = np.exp(values[p] - largest)
            total += result[p]
        for p in range(start, end):
            result[p] /= total
