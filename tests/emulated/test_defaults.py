"""Every default schedule of every operation on CUDA, run by the emulator against the CPU."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from battery import array, from_row_lengths
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from tolerance import DTYPES, unit_roundoff

from sgap_jax import Schedule, choose_schedule, row_max, row_sum, sddmm, sparse_softmax, spmm
from sgap_jax.schedules.emulated import Emulated
from sgap_jax.schedules.problem import TILED

K = 90
ROWS = {1: [1, 0, 2, 1], 5: [5, 0, 9, 6, 5], 9: [9, 1, 20, 7, 10, 7], 40: [40, 81, 0, 39]}
COLUMNS = (
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    16,
    32,
    33,
    34,
    64,
    100,
    130,
)  # one for each kind of default of spmm
# The default from 2^20 columns on; here run on fewer columns.
WIDEST = "{<1 row, 4 col>, 1} block_size=1024 tile_size=4096"


def integers(dtype, *shape):
    """Integers so small that every sum is exact in the accumulator, in any order."""
    return jnp.asarray(np.random.default_rng(len(shape)).integers(-3, 4, shape), dtype)


RUN = {
    "spmm": lambda A, n, s: spmm(A, integers(A.dtype, K, n), schedule=s),
    "spmm_transpose": lambda A, n, s: spmm(
        A, integers(A.dtype, A.shape[0], n), transpose=True, schedule=s
    ),
    "sddmm": lambda A, n, s: (
        sddmm(A, integers(A.dtype, A.shape[0], n), integers(A.dtype, K, n), schedule=s).values
    ),
    "sparse_softmax": lambda A, n, s: sparse_softmax(A, schedule=s).values,
    "row_sum": lambda A, n, s: row_sum(A, schedule=s),
    "row_max": lambda A, n, s: row_max(A, schedule=s),
}


def operand(row_length, dtype):
    case = from_row_lengths("default", K, ROWS[row_length])
    return array(case, dtype).with_values(integers(dtype, case.nnz))


def agree(actual, expected, op):
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    if op == "sparse_softmax":
        np.testing.assert_allclose(actual, expected, rtol=100 * unit_roundoff("float32"))
    else:
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("row_length", ROWS)
@pytest.mark.parametrize("op", RUN)
def test_every_default(op, row_length):
    require_nvrtc()
    columns = COLUMNS if op.startswith("spmm") or op == "sddmm" else (1,)
    for i, n in enumerate(columns):
        dtype = "float32" if op == "sparse_softmax" else DTYPES[i % 4]
        A = operand(row_length, dtype)
        agree(RUN[op](A, n, Emulated(emulate)), RUN[op](A, n, None), op)


def test_these_are_all():
    chosen = set()

    def choose(problem):
        point = choose_schedule(problem)
        tile = point.columns_of_block(problem.n) if problem.op in TILED else None
        chosen.add((point.row, point.col, point.group, tile))
        return point

    require_nvrtc()
    schedule = Emulated(lambda call, inputs, out: [np.zeros(*o) for o in out], choose=choose)
    for row_length, n in itertools.product(ROWS, COLUMNS):
        RUN["spmm"](operand(row_length, "float32"), n, schedule)
    # of 31 (tests/conformance/test_select.py): all but WIDEST
    assert len(chosen) == 30


@pytest.mark.parametrize("n", [5, 4100])
def test_the_widest_tile(n):
    require_nvrtc()
    A = operand(5, "float32")
    agree(RUN["spmm"](A, n, Emulated(emulate, Schedule.parse(WIDEST))), RUN["spmm"](A, n, None), "")
