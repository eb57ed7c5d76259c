"""The SDDMM kernels of the legal points, run by the emulator, against the oracle."""

import dataclasses
import zlib

import numpy as np
import pytest
from battery import BATTERY
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from emulator import Fault
from sddmm_oracle import check_factors, launched, operands, oracle
from tolerance import DTYPES, assert_within

from sgap_jax import Problem, Schedule, legal_points
from sgap_jax.launch.sddmm import launch_plan
from sgap_jax.schedules.point import algorithm

FEATURES = [0, 1, 3, 4, 31, 64, 130]
# Long rows with many features in few lanes take the emulator long.
SHORT_ROWS = [name for name in BATTERY if "heavy" not in name and name not in ("skewed", "wide")]


def sample(points, share):
    return [point for point in points if zlib.crc32(str(point).encode()) % share == 0]


POINTS = sample(legal_points(Problem("sddmm", (100, 90), 1000, n=130)), 4)
TUNED = sample(legal_points(Problem("sddmm", (100, 90), 1000, n=130), tunables=True), 60)

REPRESENTATIVES = [
    Schedule.parse(text)
    for text in (
        "{<3 nnz, 2 col>, 2} worker_dim_r=1/2",  # windows that at-once pairs do not fill
        "{<4 nnz, 4 col>, 8}",
        "{<2 row, 2 col>, 8}",
        "{<1/8 row, 1 col>, 4} worker_dim_r=1/2",
    )
]


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def sampled(case, point, dtype, X, Y, weights=None, scale=None, change=None, **where):
    """values [batch, nnz] of the kernel; X [Bx, m, d] and Y [By, k, d] are rounded to dtype."""
    dense, shapes = launched(dtype, X, Y, weights, scale)
    batch, d = max(len(x) for x in dense), X.shape[2]
    problem = Problem("sddmm", case.shape, case.nnz, d, batch, dtype, platform="cuda")
    call = launch_plan(problem, point, shapes)
    call = call if change is None else change(call)
    inputs = (case.row_offsets, case.column_indices, *dense)
    (values,) = emulate(call, inputs, [((batch, case.nnz), dense[0].dtype)], **where)
    return values


def check(name, point, dtype, d, **where):
    case = BATTERY[name]
    X, Y = operands(case, d)
    values = sampled(case, point, dtype, X[None], Y[None], **where)
    assert_within(values[0], *oracle(case, dtype, X, Y))


@pytest.mark.parametrize("point", [*POINTS, *TUNED], ids=str)
def test_a_sample_of_the_space(point):
    i = zlib.crc32(str(point).encode()) // 60
    lanes = point.group * int(point.col)
    # Feature counts that the group covers in few steps, one of them for each point.
    fits = [d for d in FEATURES if d <= 16 * lanes]
    for name in SHORT_ROWS[i % 4 :: 4]:
        check(name, point, DTYPES[i % 4], fits[i % len(fits)])


@pytest.mark.parametrize("name", BATTERY)
@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_the_battery(point, name):
    check(name, point, "float32", 5)


@pytest.mark.parametrize("d", FEATURES)
@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_every_dtype_and_feature_count(point, d):
    # From no features, over less than one step, to rows of X that do not fit in registers.
    for dtype in DTYPES:
        check("padded", point, dtype, d)


@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_code_for_older_architectures(point):
    check("every_length", point, "float32", 8, arch="compute_80")


@pytest.mark.parametrize("own", ["X", "Y", "both"])
@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_batches(point, own):
    case, batch, rng = BATTERY["padded"], 5, np.random.default_rng(0)
    X = rng.standard_normal((batch if own != "Y" else 1, case.shape[0], 6))
    Y = rng.standard_normal((batch if own != "X" else 1, case.shape[1], 6))
    # A grid with fewer blocks in z than batch members, as for batches beyond the grid's limit.
    few = lambda call: dataclasses.replace(call, grid=(*call.grid[:2], 2))
    values = sampled(case, point, "float32", X, Y, change=few)
    for i in range(batch):
        assert_within(values[i], *oracle(case, "float32", X[i % len(X)], Y[i % len(Y)]))


def check_entry_factors(point, dtype, change=None):
    case = BATTERY["padded"]
    place = np.arange(case.stored)
    weights = np.full(case.nnz, np.nan)
    weights[place] = np.random.default_rng(0).standard_normal(case.stored)
    run = lambda *operands: sampled(case, point, dtype, *operands, change=change)
    check_factors(case, place, weights, dtype, *operands(case, 6), run)


@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_weights_and_scale(point):
    few = lambda call: dataclasses.replace(call, grid=(*call.grid[:2], 1))
    i = REPRESENTATIVES.index(point)
    check_entry_factors(point, DTYPES[i], few if i % 2 else None)


@pytest.mark.parametrize(
    ("header", "right", "wrong", "point"),
    [
        ("factors.cuh", "weights + position, scale", "weights, scale", 0),
        ("factors.cuh", "weights + batch * weights_stride", "weights", 0),
        ("factors.cuh", "scale + batch * scale_stride", "scale", 0),
        ("factors.cuh", "sums[j] *= Widen(own.at[j])", "sums[j] += Widen(own.at[j])", 0),
        ("factors.cuh", "sums[j] *= all", "sums[j] *= all * all", 0),
        (
            "sddmm.cuh",
            "factors.From(p), out + p, last - p);\n        p",
            "factors, out + p, last - p);\n        p",
            2,
        ),
        ("sddmm.cuh", "factors.From(i).Multiply", "factors.Multiply", 2),
    ],
)
def test_planted_bugs_of_factors_are_caught(header, right, wrong, point, planted):
    planted(header, right, wrong, lambda: check_entry_factors(REPRESENTATIVES[point], "float16"))


@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
@pytest.mark.parametrize("d", [4, 17])
def test_rows_not_sampled_do_not_touch_nan(d, point):
    case = BATTERY["every_length"]
    X, Y = operands(case, d)
    X[20], Y[3] = np.inf, np.nan
    (values,) = sampled(case, point, "float32", X[None], Y[None])
    touched = (case.rows == 20) | (case.column_indices == 3)
    assert touched.any() and np.isfinite(values[~touched]).all()
    assert not np.isfinite(values[touched]).any()


def test_padding_may_hold_any_index():
    case = BATTERY["padded"]
    junk = case.column_indices.copy()
    junk[case.stored :] = 2**31 - 1
    X, Y = operands(case, 7)
    for point in REPRESENTATIVES:
        values = sampled(
            dataclasses.replace(case, column_indices=junk), point, "float32", X[None], Y[None]
        )
        assert_within(values[0], *oracle(case, "float32", X, Y))


@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_offsets_that_nobody_checked_stay_within_bounds(point):
    # Random offsets in [0, nnz], or a matrix without rows: no defined result, but the kernel must
    # end.
    case, rng = BATTERY["padded"], np.random.default_rng(0)
    nnz, m = case.nnz, case.shape[0]
    falling = np.linspace(nnz, 0, m + 1).astype(int)
    for offsets in (falling, [nnz], *rng.integers(0, nnz + 1, (12, m + 1))):
        odd = dataclasses.replace(
            case,
            row_offsets=np.asarray(offsets, np.int32),
            shape=(len(offsets) - 1, case.shape[1]),
        )
        X, Y = operands(odd, 5)
        try:
            sampled(odd, point, "float32", X[None], Y[None])
        except Fault as fault:
            # Two groups may both treat a nonzero as theirs.
            assert str(fault).partition(": ")[2].startswith("race on global memory"), fault


def test_the_sums_of_a_group_are_the_same_bits_wherever_their_nonzeros_stand():
    # A nonzero's sum is a tree over the lanes, whatever its place among the nonzeros taken
    # together.
    case = BATTERY["full"]
    X, Y = operands(case, 33)
    X[:], Y[:] = X[0], Y[0]
    for point in REPRESENTATIVES:
        (values,) = sampled(case, point, "float32", X[None], Y[None])
        assert (values == values[0]).all()


@pytest.mark.parametrize(
    ("header", "right", "wrong", "point", "name"),
    [
        ("group.cuh", "upper ? low : high", "upper ? high : low", 1, "every_length"),
        ("group.cuh", "halves <= kGroup", "halves < kGroup", 3, "every_length"),
        ("group.cuh", "if (halves > kCount)", "if (halves > 2)", 3, "every_length"),
        ("sddmm.cuh", "at < d ? d - at : 0", "kColumns", 1, "every_length"),
        ("sddmm.cuh", "s + 1 < kKept", "s < kKept", 2, "every_length"),
        ("sddmm.cuh", "if (i < left) {", "{", 1, "every_length"),
        ("sddmm.cuh", "entries[p + i < last ? p + i : last - 1]", "entries[p + i]", 1, "full"),
        ("sddmm.cuh", "stored - first < kNonzeros ? stored :", "", 1, "padded"),
        ("sddmm.cuh", "p = stored + thread", "p = nnz", 2, "padded"),
        ("sddmm.cuh", "row = RowFrom(", "RowFrom(", 1, "every_length"),
        ("sddmm.cuh", "unsigned(group % kShare) * kAtOnce", "0", 3, "every_length"),
        ("sddmm.cuh", "p += stride", "p += kAtOnce", 3, "every_length"),
        ("sddmm.cuh", "first_row + kRows < m ? first_row + kRows : m", "m", 2, "every_length"),
        ("types.cuh", "if (j < left) pack.at", "pack.at", 2, "every_length"),
    ],
)
def test_planted_bugs_are_caught(header, right, wrong, point, name, planted):
    planted(header, right, wrong, lambda: check(name, REPRESENTATIVES[point], "float32", 9))


def test_the_representatives_have_both_kernels():
    assert {algorithm(point, "sddmm") for point in REPRESENTATIVES} == {"nnz", "row"}
    assert {algorithm(point, "sddmm") for point in POINTS} == {"nnz", "row"}
