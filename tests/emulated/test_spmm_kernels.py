"""The SpMM kernels of every legal point, run by the emulator, against the oracle."""

import dataclasses
import itertools
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, cast, from_row_lengths
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from spmm_oracle import dense_operand, oracle
from tolerance import DTYPES, assert_within

from sgap_jax import Problem, Schedule, legal_points
from sgap_jax.launch.spmm import launch_plan, output_dtype
from sgap_jax.schedules.point import algorithm

# All points, but a third of the windows of several nonzeros a lane.
POINTS = [
    point
    for point in legal_points(Problem("spmm", (100, 90), 1000, n=128))
    if point.group == 1 or point.nnz in (None, 1) or zlib.crc32(str(point).encode()) % 3 == 0
]
TUNED = list(legal_points(Problem("spmm", (100, 90), 1000, n=13), tunables=True))
COLUMNS = [1, 4, 7, 12, 17]
SETTINGS = [  # a float64 multiply-add in one rounding takes the emulator long
    (dtype, n, transpose)
    for dtype, n, transpose in itertools.product(DTYPES, COLUMNS, (False, True))
    if dtype != "float64" or n <= 4
]

REPRESENTATIVES = [
    Schedule.parse(text)
    for text in (
        "{<2 row, 2 col>, 1}",
        "{<1/8 row, 4 col>, 4} worker_dim_r=1/2",
        "{<4 nnz, 4 col>, 1}",
        "{<1 nnz, 1 col>, 8} worker_dim_r=1/2",
        "{<4 nnz, 2 col>, 8} worker_dim_r=1/2",
    )
]


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def by_columns(case):
    """(offsets, indices, permutation) of A^T; the padding stays at the end."""
    stored, nnz = case.stored, case.nnz
    order = np.argsort(case.column_indices[:stored], kind="stable")
    counts = np.bincount(case.column_indices[:stored], minlength=case.shape[1])
    padding = np.arange(stored, nnz)
    return (
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        np.concatenate([case.rows[order], 0 * padding]).astype(np.int32),
        np.concatenate([order, padding]).astype(np.int32),
    )


def product(case, point, dtype, B, transpose=False, values=None, change=None, **where):
    """C [batch, m, n] of the kernel; values [Bv, nnz] and B [Bb, k, n] are rounded to dtype."""
    values = cast(case.values[None] if values is None else values, dtype)
    B = cast(B, dtype)
    shape = case.shape[::-1] if transpose else case.shape
    arrays = (case.row_offsets, case.column_indices, np.zeros(0, np.int32))
    batch = max(values.shape[0], B.shape[0])
    problem = Problem(
        "spmm", shape, case.nnz, B.shape[2], batch, dtype, platform="cuda", permuted=transpose
    )
    call = launch_plan(problem, point, (values.shape[0], B.shape[0]))
    call = call if change is None else change(call)
    inputs = (values, *(by_columns(case) if transpose else arrays), B)
    out = jnp.dtype(output_dtype(point, dtype))
    (C,) = emulate(call, inputs, [((batch, shape[0], B.shape[2]), out)], **where)
    return cast(C, dtype)


def check(name, point, dtype, n, transpose):
    case = BATTERY[name]
    B = dense_operand(case, n, transpose)
    C = product(case, point, dtype, B[None], transpose)
    assert_within(C[0], *oracle(case, dtype, B, transpose))


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_point(point):
    # Every setting is compiled: two for each point, with four matrices; the next point has others.
    i = POINTS.index(point)
    for half in (0, 1):
        setting = SETTINGS[(2 * i + half * 23) % len(SETTINGS)]
        for name in list(BATTERY)[(i + 4 * half) % 8 :: 8]:
            check(name, point, *setting)


@pytest.mark.parametrize("name", BATTERY)
@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_the_battery(point, name):
    check(name, point, "float32", 5, False)


def test_the_representatives_have_every_kernel():
    families = {algorithm(point, "spmm") for point in REPRESENTATIVES}
    assert families == {"row", "row_group", "nnz", "nnz_group"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nonzeros", [2, 3, 4, 16])
def test_spmv_of_windows(nonzeros, dtype):
    # Rows that begin before, end in, and reach over windows and lanes; values loaded as vectors and
    # not.
    point = Schedule.parse(f"{{<{nonzeros} nnz, 1 col>, 4}}")
    for name, transpose in itertools.product(BATTERY, (False, True)):
        check(name, point, dtype, 1, transpose)


@pytest.mark.parametrize("i", range(40))
def test_a_sample_of_the_tuned_space(i):
    point = TUNED[(i * 1031) % len(TUNED)]
    for name in ("every_length", "padded"):
        check(name, point, DTYPES[i % 4], 13 if i % 3 else 12, bool(i % 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_every_dtype_vectors_and_transposes(point, dtype):
    for name, n, transpose in itertools.product(("every_length",), (8, 9), (False, True)):
        check(name, point, dtype, n, transpose)


@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_code_for_older_architectures(point):
    case = BATTERY["every_length"]
    B = dense_operand(case, 8)
    C = product(case, point, "float32", B[None], arch="compute_80")
    assert_within(C[0], *oracle(case, "float32", B))


@pytest.mark.parametrize("own", ["values", "B", "both"])
@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_batches(point, own):
    case, batch = BATTERY["padded"], 5
    rng = np.random.default_rng(0)
    values = np.where(
        np.isnan(case.values), np.nan, rng.standard_normal((batch if own != "B" else 1, case.nnz))
    )
    B = rng.standard_normal((batch if own != "values" else 1, case.shape[1], 4))
    # A grid with fewer blocks in z than batch members, as for batches beyond the grid's limit.
    few = lambda call: dataclasses.replace(call, grid=(*call.grid[:2], 2))
    C = product(case, point, "float32", B, values=values, change=few)
    for i in range(batch):
        expected = oracle(case, "float32", B[i % len(B)], values=values[i % len(values)])
        assert_within(C[i], *expected)


@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_entries_not_stored_do_not_touch_nan(point):
    case = BATTERY["every_length"]
    B = dense_operand(case, 4)
    B[3], B[30] = np.nan, np.inf
    (C,) = product(case, point, "float32", B[None])
    touched = case.dense()[:, [3, 30]].any(axis=1)
    assert touched.any() and not touched.all()
    assert np.isfinite(C[~touched]).all()
    assert not np.isfinite(C[touched]).any()


@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_an_entry_that_does_not_exist_is_not_row_0(point):
    case = dataclasses.replace(
        from_row_lengths("last", 9, [0, 3]), column_indices=np.array([4, 6, 7], np.int32)
    )
    B = dense_operand(case, 4)
    B[0] = np.nan
    (C,) = product(case, point, "float32", B[None])
    assert np.isfinite(C).all()


@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_entries_of_a_matrix_without_rows_are_not_read(point):
    case = dataclasses.replace(
        BATTERY["one_row"], shape=(0, 40), row_offsets=np.array([17], np.int32)
    )
    assert product(case, point, "float32", dense_operand(case, 4)[None]).shape == (1, 0, 4)


def test_a_run_of_empty_rows_is_skipped_in_steps_that_double():
    case = from_row_lengths("gap", 5, [2, *[0] * 3000, 3, 1])
    for point in REPRESENTATIVES[2:]:
        B = dense_operand(case, 4)
        (C,) = product(case, point, "float32", B[None])
        assert_within(C, *oracle(case, "float32", B))


@pytest.mark.parametrize(
    ("header", "right", "wrong", "point"),
    [
        # lanes past the group fold their own value in once more
        ("group.cuh", "lane + distance < kGroup && other", "other", REPRESENTATIVES[3]),
        ("group.cuh", "(1u << kLanes) - 1", "(1u << kLanes / 2) - 1", REPRESENTATIVES[1]),
        ("group.cuh", "distance = kLanes / 2", "distance = kLanes / 4", REPRESENTATIVES[1]),
        # a row that two lanes share is stored, not added
        ("spmm.cuh", "row_end <= last && row_offsets", "row_offsets", REPRESENTATIVES[2]),
        ("spmm.cuh", "row_offsets[row] >= window && ", "", REPRESENTATIVES[3]),
        ("spmm.cuh", "inside && own < stored", "own < stored", REPRESENTATIVES[3]),
        ("spmm.cuh", "(place.column >= n)", "(false)", REPRESENTATIVES[0]),
        ("types.cuh", "if (j < left) row[j]", "row[j]", REPRESENTATIVES[0]),
        # the parts of rows that began in the lane before
        ("group.cuh", "if (lane + 1 < kGroup) ", "", REPRESENTATIVES[4]),
        ("spmm.cuh", "if (began_before && !leading)", "if (!leading)", REPRESENTATIVES[4]),
        ("spmm.cuh", "else if (leading)", "else if (false)", REPRESENTATIVES[4]),
        ("spmm.cuh", "began_before = false;", "", REPRESENTATIVES[4]),
        ("spmm.cuh", "if (!began_before)", "if (true)", REPRESENTATIVES[4]),
        ("spmm.cuh", "p + kLoad <= last", "true", REPRESENTATIVES[4]),
        ("spmm.cuh", "group.AddNext(head, sums)", "", REPRESENTATIVES[4]),
        ("row_search.cuh", "low = middle;", "low = middle + 1;", REPRESENTATIVES[3]),
    ],
)
def test_planted_bugs_are_caught(header, right, wrong, point, planted):
    def check_both():
        for name in ("every_length", "skewed"):
            check(name, point, "float32", 9, False)

    planted(header, right, wrong, check_both)
