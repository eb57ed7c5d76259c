"""The kernels of the row operations, at every legal point, run by the emulator."""

import dataclasses
import itertools

import numpy as np
import pytest
from battery import BATTERY, Case, cast, from_row_lengths, rounded
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from emulator import Fault
from row_oracle import row_sum_oracle, softmax_jacobian_oracle, softmax_oracle
from tolerance import DTYPES, assert_within
from vector_cases import encoded

from sgap_jax import Problem, Schedule, legal_points, reference
from sgap_jax.launch import row_reduce as row_reduce_cuda
from sgap_jax.launch import sparse_softmax as sparse_softmax_cuda

OPS = ["row_sum", "row_max", "row_broadcast", "sparse_softmax", "sparse_softmax_jacobian"]
POINTS = list(legal_points(Problem("row_sum", (100, 0), 1000)))
TUNED = list(legal_points(Problem("row_sum", (100, 0), 1000), tunables=True))
EIGHT = Schedule.parse("{<1/8 row, 1 col>, 8} worker_dim_r=1/2")
POINT_OPS = list(itertools.product(POINTS, OPS))
SCALE = -0.75
LENGTHS = [2, 3, 4, 8, 12, 16, 32, 64]
INF, NAN = np.inf, np.nan


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def launched(op, case, point, dtype, *data, scale=SCALE, change=None, of="CSR", **where):
    """The output [batch, m or nnz] of the kernel for data operands [1 or batch, nnz or m]."""
    batch, m = max(len(x) for x in data), case.shape[0]
    problem_op = op.removesuffix("_jacobian")
    problem = Problem(problem_op, (m, 0), case.nnz, 1, batch, dtype, of, platform="cuda")
    if op == "sparse_softmax_jacobian":
        batches = (len(data[0]), len(data[1]))
        call = sparse_softmax_cuda.jacobian_launch_plan(problem, point, scale, batches)
    elif op == "sparse_softmax":
        call = sparse_softmax_cuda.launch_plan(problem, point, scale)
    else:
        call = row_reduce_cuda.launch_plan(problem, point)
    call = call if change is None else change(call)
    data = [cast(x, dtype) for x in data]
    size = m if op in ("row_sum", "row_max") else case.nnz
    (out,) = emulate(call, (*data, case.row_offsets), [((batch, size), data[0].dtype)], **where)
    return out


def operands(op, case, dtype, batch=1, seed=0):
    """Data operands [batch, ...]; per-entry operands have NaN in the padding."""
    rng = np.random.default_rng(seed)
    if op == "row_broadcast":
        return [rng.standard_normal((batch, case.shape[0]))]
    junk = np.arange(case.nnz) >= case.stored
    values = rng.standard_normal((batch, case.nnz))
    if op != "sparse_softmax_jacobian":
        return [np.where(junk, np.nan, values)]
    logits = rng.standard_normal((batch, case.nnz))
    p = [reference.sparse_softmax(row, case.row_offsets) for row in logits]
    return [np.where(junk, np.nan, x) for x in (rounded(p, dtype), rounded(values, dtype))]


def expected(op, case, dtype, *data, scale=SCALE):
    """(exact result, error bound) of one batch member."""
    if op == "row_sum":
        return row_sum_oracle(case, dtype, *data)
    if op == "row_max":
        return reference.row_max(rounded(data[0], dtype), case.row_offsets), 0
    if op == "sparse_softmax":
        return softmax_oracle(case, dtype, scale, *data)
    if op == "sparse_softmax_jacobian":
        return softmax_jacobian_oracle(case, dtype, *np.nan_to_num(data), scale)
    out = np.zeros(case.nnz)
    out[: case.stored] = rounded(data[0], dtype)[case.rows]
    return out, 0


def assert_right(out, exact, bound):
    infinite = np.isinf(exact)
    np.testing.assert_array_equal(np.float64(out)[infinite], exact[infinite])
    assert_within(np.where(infinite, 0, out), np.where(infinite, 0, exact), bound)


def check(op, name, point, dtype, **where):
    case = name if not isinstance(name, str) else BATTERY[name]
    data = operands(op, case, dtype)
    (out,) = launched(op, case, point, dtype, *data, **where)
    assert_right(out, *expected(op, case, dtype, *(x[0] for x in data)))


@pytest.mark.parametrize("point, op", POINT_OPS, ids=str)
def test_every_point(point, op):
    i = POINT_OPS.index((point, op))
    names = [name for name in BATTERY if point.group >= 4 or max(BATTERY[name].shape) < 300]
    for name in ["every_length", *names[i % 3 :: 3]]:
        check(op, name, point, DTYPES[i % 4])


@pytest.mark.parametrize("i", range(20))
def test_a_sample_of_the_tuned_space(i):
    point = TUNED[(i * 37) % len(TUNED)]
    for name in ("every_length", "padded"):
        check(OPS[i % 5], name, point, DTYPES[i // 5])


@pytest.mark.parametrize("name", BATTERY)
@pytest.mark.parametrize("op", OPS)
def test_the_battery(op, name):
    check(op, name, EIGHT, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_dtype(op, dtype):
    for name in ("every_length", "padded"):
        check(op, name, EIGHT, dtype)


@pytest.mark.parametrize("op", OPS)
def test_code_for_older_architectures(op):
    check(op, "every_length", EIGHT, "float32", arch="compute_80")


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16, 32])
def test_rows_about_as_long_as_the_registers_hold(group):
    point = Schedule.parse(f"{{<1/{group} row, 1 col>, {group}}}" if group > 1 else str(POINTS[0]))
    window = 4 * group
    lengths = [window - 1, window, window + 1, 2 * window, 2 * window + 1, 0, 5 * window]
    case = from_row_lengths("window", 5 * window, lengths)
    for op in OPS[3:]:
        check(op, case, point, "float32")


@pytest.mark.parametrize("own", ["p", "t", "both"])
def test_batches_of_the_jacobian(own):
    case, op, batch = BATTERY["padded"], OPS[4], 5
    p, t = operands(op, case, "float32", batch)
    p, t = p[: 1 if own == "t" else batch], t[: 1 if own == "p" else batch]
    # A grid with fewer blocks in z than batch members, as for batches beyond the grid's limit.
    few = lambda call: dataclasses.replace(call, grid=(*call.grid[:2], 2))
    out = launched(op, case, EIGHT, "float32", p, t, change=few)
    for i in range(batch):
        assert_right(out[i], *expected(op, case, "float32", p[i % len(p)], t[i % len(t)]))


@pytest.mark.parametrize("op", OPS[:4])
def test_batches(op):
    case, batch = BATTERY["padded"], 5
    (data,) = operands(op, case, "float32", batch)
    few = lambda call: dataclasses.replace(call, grid=(*call.grid[:2], 2))
    out = launched(op, case, EIGHT, "float32", data, change=few)
    for i in range(batch):
        assert_right(out[i], *expected(op, case, "float32", data[i]))


def check_vectors(op, case, length, point, dtype, **where):
    """Runs a case as vectors that hold the entries' values, with NaN at places that must not be
    read."""
    (offsets, indices, values), case, place = encoded(case, length)

    def in_place(x, fill):
        out = np.full((len(x), values.size), fill)
        out[:, place] = x
        return out

    data = operands(op, case, dtype)
    stored = data if op == "row_broadcast" else [in_place(x, NAN) for x in data]
    flat = Case("flat", case.shape, offsets, np.zeros(values.size), None)
    out = launched(op, flat, point, dtype, *stored, of=f"CVS({length})", **where)
    exact, bound = expected(op, case, dtype, *(x[0] for x in data))
    if op not in ("row_sum", "row_max"):
        exact = in_place(exact[None], 0.0)[0]
        bound = in_place(np.broadcast_to(bound, exact[place].shape)[None], 0.0)[0]
    assert_right(out[0], exact, bound)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("op", OPS)
def test_vectors_at_every_point(op, length):
    for i, point in enumerate(POINTS):
        turn = i + LENGTHS.index(length) + OPS.index(op)
        name = ("every_length", "padded", "empty_rows_at_both_ends", "full")[turn % 4]
        check_vectors(op, BATTERY[name], length, point, DTYPES[turn // 2 % 4])


@pytest.mark.parametrize("name", BATTERY)
def test_the_battery_as_vectors(name):
    for i, op in enumerate(OPS):
        length = LENGTHS[(list(BATTERY).index(name) + i) % len(LENGTHS)]
        check_vectors(op, BATTERY[name], length, EIGHT, "float32")


@pytest.mark.parametrize("point", [POINTS[1], POINTS[4], EIGHT], ids=str)
@pytest.mark.parametrize("length", [2, 8])
def test_a_row_of_vectors_sees_nothing_of_its_neighbours(length, point):
    vectors = max(len(row) for row in SPECIAL_ROWS)
    offsets = np.array([0, vectors], np.int32)
    for first in range(0, len(SPECIAL_ROWS) - length + 1, length):
        # A vector stores a value for each of its rows: shorter rows are filled with -infinity.
        rows = np.full((length, vectors), -INF)
        for row, special in zip(rows, SPECIAL_ROWS[first:], strict=False):
            row[: len(special)] = special
        flat = Case("flat", (length, 0), offsets, np.zeros(rows.size), None)
        stored = (rows.T.reshape(1, -1),)
        of = f"CVS({length})"
        (out,) = launched("sparse_softmax", flat, point, "float32", *stored, scale=1.0, of=of)
        entries = np.arange(length + 1) * vectors
        with np.errstate(invalid="ignore"):
            exact = reference.sparse_softmax(np.float32(rows.reshape(-1)), entries, 1.0)
        np.testing.assert_allclose(
            out.reshape(vectors, length).T.reshape(-1), exact, rtol=2e-5, atol=1e-37
        )


SPECIAL_ROWS = [
    [-INF, 1, 2],
    [],
    [-INF] * 3,
    [NAN, 0],
    [INF, 0],
    [-INF] * 4 + [NAN],
    [*range(7), -INF, INF],
    [-INF] * 40,  # several windows: all masked, all but the last masked
    [-INF] * 40 + [5],
    [5] + [-INF] * 40,
    [0.0] * 20 + [NAN] + [0.0] * 20,
    [-1e30, -2e30, -1e30],
    [200.0] * 3 + [-200.0] * 30,
    [float(x) for x in range(-50, 50)],  # the greatest in every window
    [-300.0],
]


def special_case():
    lengths = [len(row) for row in SPECIAL_ROWS]
    case = from_row_lengths("special", max(lengths), lengths, padding=3)
    return case, np.concatenate([*SPECIAL_ROWS, [NAN] * 3])


@pytest.mark.parametrize("scale", [1.0, 0.0, -2.0])
@pytest.mark.parametrize("point", [POINTS[1], POINTS[4], POINTS[7]], ids=str)
def test_nan_infinity_and_masked_rows_of_the_softmax(point, scale):
    case, values = special_case()
    (out,) = launched("sparse_softmax", case, point, "float32", values[None], scale=scale)
    with np.errstate(invalid="ignore"):
        exact = reference.sparse_softmax(np.float32(values), case.row_offsets, scale)
    if scale == 0:  # 0 * -infinity is NaN, but a fully masked row gives zeros
        masked = [len(row) > 0 and np.max(row) == -INF for row in SPECIAL_ROWS]
        exact[: case.stored][np.repeat(masked, np.diff(case.row_offsets))] = 0
    np.testing.assert_allclose(out, exact, rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("point", [POINTS[1], POINTS[4], POINTS[7]], ids=str)
def test_nan_and_infinity_of_reductions(point, dtype):
    case, values = special_case()
    (greatest,) = launched("row_max", case, point, dtype, values[None])
    rows = [np.array(row, dtype) for row in SPECIAL_ROWS]
    np.testing.assert_array_equal(greatest, [np.max(row, initial=-INF) for row in rows])
    (total,) = launched("row_sum", case, point, dtype, values[None])
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(total, [row.sum() for row in rows], rtol=1e-6)


def test_the_jacobian_of_masked_rows_is_zero_and_nan_stays_in_its_row():
    case = from_row_lengths("rows", 40, [3, 40, 0, 2, 3])
    p, t = np.zeros(case.nnz), np.ones(case.nnz)
    p[:3], t[1], p[45:] = [0.2, 0.3, 0.5], 2, [NAN, 0, 1]
    (out,) = launched(OPS[4], case, EIGHT, "float32", p[None], t[None], scale=1.0)
    np.testing.assert_allclose(out[:3], [-0.06, 0.21, -0.15], rtol=1e-5)
    assert not out[3:45].any() and np.isnan(out[45:]).all()


@pytest.mark.parametrize("op", OPS)
def test_offsets_in_any_order_end_and_stay_within_bounds(op):
    rng = np.random.default_rng(0)
    for offsets in ([90, 60, 30, 0, 0], [90] * 5, [0, 90, 0, 90, 0], *rng.integers(0, 91, (5, 5))):
        case = Case("unchecked", (4, 0), np.asarray(offsets, np.int32), np.zeros(90), np.zeros(90))
        size = 4 if op == "row_broadcast" else 90
        data = [np.ones((1, size))] * (2 if op.endswith("jacobian") else 1)
        try:
            launched(op, case, EIGHT, "float32", *data)
        except Fault as fault:  # two rows may claim one entry
            assert "race on global memory" in str(fault)


def check_special(op, name, point, dtype):
    if op == "row_max":
        return test_nan_and_infinity_of_reductions(point, dtype)
    test_nan_infinity_and_masked_rows_of_the_softmax(point, 1.0)


def check_without_scale(op, name, point, dtype):
    case = BATTERY[name]
    (data,) = operands(op, case, dtype)
    (out,) = launched(op, case, point, dtype, data, scale=0.0)
    assert_right(out, *expected(op, case, dtype, data[0], scale=0.0))


def check_padded(op, name, point, dtype):
    check(op, "padded", point, dtype)


def check_as_vectors(op, name, point, dtype):
    check_vectors(op, BATTERY[name], 8, point, dtype)  # 34 rows end within a vector


PLANTED = [
    ("group.cuh", "(1u << kLanes) - 1", "(1u << kLanes / 2) - 1", "row_sum", check),
    ("group.cuh", "distance = kLanes / 2", "distance = kLanes / 4", "row_max", check),
    ("group.cuh", "max.NaN.f32", "max.f32", "row_max", check_special),
    ("row_reduce.cuh", "return Least<A>();", "return 0;", "row_max", check),
    ("row_reduce.cuh", "begin + kRows < rows", "begin + kRows < 2 * rows", "row_sum", check),
    ("row_reduce.cuh", "j * kGroup < left ?", "j * kGroup <= left ?", "row_sum", check),
    ("row_reduce.cuh", "if (j * kGroup < left)", "if (j < left)", "sparse_softmax", check),
    ("row_reduce.cuh", "p < lane.left; p += kGroup)", "p + 1 < lane.left; p += kGroup)")
    + ("row_broadcast", check),
    ("row_reduce.cuh", "entries[lane.first + Size(p) * kLength]", "entries[lane.first]")
    + (OPS[2], check),
    (
        "row_reduce.cuh",
        "p < capacity; p += threads) out[p] = T{};",
        "p < capacity; p += threads) {}",
    )
    + ("row_broadcast", check_padded),
    ("row_reduce.cuh", "p = stored + thread", "p = thread", "row_broadcast", check_padded),
    ("sparse_softmax.cuh", "A peak = Least<A>()", "A peak = 0", OPS[3], check_special),
    ("sparse_softmax.cuh", "sum[0] *= terms.Term(before, peak)", "", OPS[3], check_special),
    ("sparse_softmax.cuh", "kept ? share * inverse : inverse", "inverse", OPS[3], check),
    ("sparse_softmax.cuh", " && peak != Least<A>()", "", OPS[3], check_special),
    ("sparse_softmax.cuh", "sum[0] == 0 ? A(0) :", "", OPS[3], check_special),
    ("sparse_softmax.cuh", "lane.length <= window.kEntries", "true", OPS[3], check),
    ("sparse_softmax.cuh", "lane.length <= p.kEntries", "true", OPS[4], check),
    ("sparse_softmax.cuh", "peak, j * kGroup < left)", "peak)", OPS[3], check_without_scale),
    ("group.cuh", "distance >= kSide", "distance > 0", "row_sum", check_as_vectors),
    ("group.cuh", "threadIdx.x / kSide % kGroup", "threadIdx.x % kGroup", "row_sum")
    + (check_as_vectors,),
    ("group.cuh", "side = threadIdx.x % kSide", "side = 0", "row_max", check_as_vectors),
    ("row_reduce.cuh", "+ row % kLength", "", OPS[3], check_as_vectors),
    ("row_reduce.cuh", "kStride = kGroup * kLength", "kStride = kGroup", OPS[4], check_as_vectors),
    ("row_reduce.cuh", "kLength == 1 || row < m", "true", "row_sum", check_as_vectors),
    ("row_reduce.cuh", "vector < end && Exists(m)", "vector < end", OPS[3], check_as_vectors),
    ("row_reduce.cuh", "p % kLength >= last", "p % kLength > last", OPS[3], check_as_vectors),
    ("row_reduce.cuh", "(m + kSide - 1) / kSide", "m / kSide", "row_max", check_as_vectors),
    ("row_reduce.cuh", "row_offsets[block_rows]", "row_offsets[m]", OPS[4], check_as_vectors),
    ("sparse_softmax.cuh", "Write(write + Size(p) * kLength", "Write(write + p", OPS[3])
    + (check_as_vectors,),
]


@pytest.mark.parametrize(("header", "right", "wrong", "op", "checked"), PLANTED)
def test_planted_bugs_are_caught(header, right, wrong, op, checked, planted):
    arguments = (op, "every_length", EIGHT, "float32")
    planted(header, right, wrong, lambda: checked(*arguments))
