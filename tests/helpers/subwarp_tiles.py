"""Runs the CUDA-core kernels of column vectors on the emulator, and checks their results."""

import numpy as np
from battery import BATTERY, cast
from emulated_launch import emulate
from sddmm_oracle import check_factors, launched, operands
from sddmm_oracle import oracle as sampled_oracle
from spmm_oracle import dense_operand, oracle
from tolerance import assert_within
from vector_cases import encoded

from sgap_jax import CVS, Problem
from sgap_jax.launch import sddmm as sddmm_cuda
from sgap_jax.launch import spmm as spmm_cuda


def by_columns(offsets, indices, k):
    """(offsets, block rows, permutation) of A^T; the padding stays at the end."""
    stored, count = offsets[-1], len(indices)
    order = np.argsort(indices[:stored], kind="stable")
    blocks = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    padding = np.arange(stored, count)
    counts = np.bincount(indices[:stored], minlength=k)
    return (
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        np.concatenate([blocks[order], 0 * padding]).astype(np.int32),
        np.concatenate([order, padding]).astype(np.int32),
    )


def problem_of(op, shape, values, n, dtype, batch=1, permuted=False):
    count, length = values.shape[-2:]
    format = str(CVS(length))
    return Problem(op, shape, count * length, n, batch, dtype, format, "cuda", permuted)


def product(arrays, case, tile, dtype, B, transpose=False, change=None, **where):
    """Runs the kernel; returns C [batch, m, n]. values [vectors, V] or [Bv, vectors, V], B [Bb, k,
    n]."""
    offsets, indices, values = arrays
    values = cast(values if values.ndim == 3 else values[None], dtype)
    B = cast(B, dtype)
    shape = case.shape[::-1] if transpose else case.shape
    structure = (offsets, indices, np.zeros(0, np.int32))
    structure = by_columns(offsets, indices, case.shape[1]) if transpose else structure
    batch = max(len(values), len(B))
    problem = problem_of("spmm", shape, values, B.shape[2], dtype, batch, transpose)
    call = spmm_cuda.launch_plan(problem, tile, (len(values), len(B)))
    call = call if change is None else change(call)
    out = [((batch, shape[0], B.shape[2]), values.dtype)]
    return emulate(call, (values, *structure, B), out, **where)[0]


def check_product(name, tile, dtype, n, transpose, **where):
    arrays, case, _ = encoded(BATTERY[name], tile.vector_length)
    B = dense_operand(case, n, transpose)
    C = product(arrays, case, tile, dtype, B[None], transpose, **where)
    assert_within(C[0], *oracle(case, dtype, B, transpose))


def sampled(arrays, case, tile, dtype, X, Y, weights=None, scale=None, change=None, **where):
    """Runs the kernel; returns values [batch, vectors, V]. X [Bx, m, d], Y [By, k, d]."""
    offsets, indices, values = arrays
    dense, shapes = launched(dtype, X, Y, weights, scale)
    batch = max(len(x) for x in dense)
    problem = problem_of("sddmm", case.shape, values, X.shape[2], dtype, batch)
    call = sddmm_cuda.launch_plan(problem, tile, shapes)
    call = call if change is None else change(call)
    outputs = [((batch, *values.shape), dense[0].dtype)]
    return emulate(call, (offsets, indices, *dense), outputs, **where)[0]


def sampled_is_right(values, case, place, dtype, X, Y):
    """Checks the values; padding and rows past the end of the matrix must be exactly zero."""
    expected, bound = np.zeros(values.size), np.zeros(values.size)
    expected[place], bound[place] = sampled_oracle(case, dtype, X, Y)
    assert_within(values.reshape(-1), expected, bound)


def check_sampled(name, tile, dtype, d, **where):
    arrays, case, place = encoded(BATTERY[name], tile.vector_length)
    X, Y = operands(case, d)
    values = sampled(arrays, case, tile, dtype, X[None], Y[None], **where)
    sampled_is_right(values[0], case, place, dtype, X, Y)


def check_sampled_factors(tile, dtype):
    arrays, case, place = encoded(BATTERY["every_length"], tile.vector_length)
    run = lambda *operands: sampled(arrays, case, tile, dtype, *operands)
    check_factors(case, place, arrays[2], dtype, *operands(case, 5), run)


def check_infinity(tile, transpose):
    """Checks that absent entries are not multiplied by infinity."""
    (offsets, indices, values), case, _ = encoded(BATTERY["every_length"], tile.vector_length)
    B = np.full((case.shape[not transpose], 4), np.inf)
    C = product((offsets, indices, abs(values)), case, tile, "float32", B[None], transpose)
    stored = (case.dense() != 0).any(axis=int(not transpose))
    np.testing.assert_array_equal(C[0], np.where(stored[:, None], np.inf, np.zeros((1, 4))))
