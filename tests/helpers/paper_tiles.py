"""Runs vectorSparse's own kernels on the emulator, on the vectors of vector_cases."""

import numpy as np
import sddmm_oracle
from battery import BATTERY, cast
from emulated_launch import emulate
from tolerance import assert_within
from vector_cases import encoded

from sgap_jax import Problem
from sgap_jax.launch import sddmm as sddmm_cuda
from sgap_jax.launch import spmm as spmm_cuda


def problem_of(op, case, tile, arrays, dtype, n, batch):
    nnz = arrays[1].size * tile.vector_length
    name = f"CVS({tile.vector_length})"
    return Problem(op, case.shape, nnz, n, batch, dtype, name, platform="cuda")


def product(case, arrays, tile, dtype, B, values=None, change=None, **where):
    """Runs the kernel; returns C [batch, m, n]. values [Bv, vectors, V] and B [Bb, k, n] are
    rounded first."""
    offsets, indices, own = arrays
    values, B = cast(own[None] if values is None else values, dtype), cast(B, dtype)
    batch = max(len(values), len(B))
    problem = problem_of("spmm", case, tile, arrays, dtype, B.shape[2], batch)
    call = spmm_cuda.launch_plan(problem, tile, (len(values), len(B)))
    call = call if change is None else change(call)
    shape = (batch, case.shape[0], B.shape[2])
    (C,) = emulate(call, (values, offsets, indices, B), [(shape, B.dtype)], **where)
    return C


def sampled(case, arrays, tile, dtype, X, Y, weights=None, scale=None, change=None, **where):
    """Runs the kernel; returns values [batch, vectors, V]. X [Bx, m, d] and Y [By, k, d] are
    rounded first."""
    offsets, indices, _ = arrays
    dense, shapes = sddmm_oracle.launched(dtype, X, Y, weights, scale)
    batch = max(len(x) for x in dense)
    problem = problem_of("sddmm", case, tile, arrays, dtype, X.shape[2], batch)
    call = sddmm_cuda.launch_plan(problem, tile, shapes)
    call = call if change is None else change(call)
    shape = (batch, len(indices), tile.vector_length)
    (values,) = emulate(call, (offsets, indices, *dense), [(shape, dense[0].dtype)], **where)
    return values


def check_sampled_factors(tile, dtype):
    arrays, entries, place = encoded(BATTERY["every_length"], tile.vector_length)
    run = lambda *operands: sampled(entries, arrays, tile, dtype, *operands)
    X, Y = sddmm_oracle.operands(entries, 9)
    sddmm_oracle.check_factors(entries, place, arrays[2], dtype, X, Y, run)


def assert_sampled(values, entries, place, dtype, X, Y):
    values = np.asarray(values).reshape(-1)
    assert_within(values[place], *sddmm_oracle.oracle(entries, dtype, X, Y))
    assert not np.delete(values, place).any()  # rows past the end, and padding: zeros, not NaN
