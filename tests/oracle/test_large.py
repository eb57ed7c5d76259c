"""Cases that small matrices do not reach: wide results, long rows, operands beyond the caches,
batches of split rows. SciPy in float64 is the oracle; the plain loops of reference.py would take
minutes.
"""

import jax
import numpy as np
import pytest
import scipy.sparse
from battery import array, cast, from_row_lengths, rounded
from conftest import row_schedule
from tolerance import DTYPES, assert_within, sum_bound

from sgap_jax import CpuTile, sddmm, spmm

LONG = from_row_lengths("long rows", 9000, [5, 1500, 0, 9000, 1, 2300, *[40] * 60], seed=4)
WIDE = from_row_lengths("wide rows", 120_000, [40] * 100, seed=6)  # Y of more than 12 MB
SCHEDULES = [None, CpuTile(columns=64, nonzeros=1024)]


def scipy_of(case, values):
    arrays = (values[: case.stored], case.column_indices[: case.stored], case.row_offsets)
    return scipy.sparse.csr_array(arrays, shape=case.shape)


@pytest.mark.seconds(check=1.1, test=2)
@pytest.mark.parametrize("n", [1, 3, 113, 128, 129, 256, 300, 520])
@pytest.mark.parametrize("dtype", DTYPES)
def test_spmm(dtype, n):
    rng = np.random.default_rng(n)
    values = rounded(LONG.values, dtype)
    S = scipy_of(LONG, values)
    A = array(LONG, dtype)
    for transpose in (False, True):
        M = S.T if transpose else S
        B = rng.standard_normal((M.shape[1], n))
        results = [spmm(A, cast(B, dtype), transpose=transpose, schedule=s) for s in SCHEDULES]
        B = rounded(B, dtype)
        expected = M @ B
        terms = np.asarray((M != 0).sum(axis=1)).reshape(-1, 1)
        bound = sum_bound(expected, abs(M) @ np.abs(B), terms, dtype)
        for C in results:
            assert_within(C, expected, bound)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_short_rows(dtype, n):
    rng = np.random.default_rng(n)
    lengths = np.minimum(rng.geometric(0.2, size=33_000) - 1, 70)
    case = from_row_lengths("short rows", 500, lengths, seed=5)
    values = rounded(case.values, dtype)
    S, A = scipy_of(case, values), array(case, dtype)
    for transpose in (False, True):
        M = S.T if transpose else S
        B = rounded(rng.standard_normal((M.shape[1], n)), dtype)
        C = spmm(A, cast(B, dtype), transpose=transpose)
        expected = M @ B
        terms = np.asarray((M != 0).sum(axis=1)).reshape(-1, 1)
        assert_within(C, expected, sum_bound(expected, abs(M) @ np.abs(B), terms, dtype))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("n", [1, 4, 40])
def test_a_batch_of_split_rows(n, schedule):
    rng = np.random.default_rng(n)
    values = rng.standard_normal((3, LONG.nnz)).astype(np.float32)
    B = rng.standard_normal((3, LONG.shape[1], n)).astype(np.float32)
    A = array(LONG, "float32")
    product = jax.vmap(lambda v, B: spmm(A.with_values(v), B, schedule=schedule))
    C = product(values, B)
    for b in range(3):
        S = scipy_of(LONG, values[b].astype(np.float64))
        expected = S @ B[b].astype(np.float64)
        terms = np.diff(LONG.row_offsets)[:, None]
        assert_within(C[b], expected, sum_bound(expected, abs(S) @ np.abs(B[b]), terms, "float32"))


@pytest.mark.parametrize("schedule", [None, CpuTile(nonzeros=1000)], ids=str)
@pytest.mark.parametrize(
    ("case", "d"),
    [*((LONG, d) for d in (1, 30, 64, 129, 257)), (WIDE, 64)],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sddmm_of_operands_beyond_the_caches(dtype, case, d, schedule):
    rng = np.random.default_rng(d)
    X = rng.standard_normal((case.shape[0], d))
    Y = rng.standard_normal((case.shape[1], d))
    C = sddmm(array(case, dtype), cast(X, dtype), cast(Y, dtype), schedule=row_schedule(schedule))
    X, Y = rounded(X, dtype)[case.rows], rounded(Y, dtype)[case.column_indices]
    expected, size = (X * Y).sum(1), np.abs(X * Y).sum(1)
    assert_within(C.values, expected, sum_bound(expected, size, d, dtype))
