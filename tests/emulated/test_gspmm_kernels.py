"""The kernels of gspmm with a maximum or minimum, and of its derivatives, run by the emulator."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax import CpuTile, Problem, Schedule, legal_points
from sgap_jax.launch.gspmm import (
    arg_gather_plan,
    arg_gather_to_values_plan,
    arg_gather_to_x_plan,
    extremum_plan,
    merge_plan,
    places,
)
from sgap_jax.primitives._define import bind, structure
from sgap_jax.primitives.gspmm import gspmm_p
from sgap_jax.primitives.gspmm_arg_gather import (
    arg_gather_p,
    arg_gather_to_values_p,
    arg_gather_to_x_p,
)

LEGAL = list(legal_points(Problem("gspmm", (100, 90), 1000, n=128)))
# Every eighteenth of the many points of nonzeros, which are one kernel.
POINTS = [p for p in LEGAL if p.nnz is None] + [p for p in LEGAL if p.nnz is not None][5::18]
SDDMM_POINTS = [
    Schedule.parse(text)
    for text in ("{<1 nnz, 4 col>, 8}", "{<4 nnz, 1 col>, 2}", "{<2 nnz, 2 col>, 1}")
]
REPRESENTATIVES = [
    Schedule.parse("{<2 row, 2 col>, 1}"),
    Schedule.parse("{<1/8 row, 4 col>, 8} worker_dim_r=1/2"),
    Schedule.parse("{<3 nnz, 2 col>, 4} worker_dim_r=1/2 block_size=32"),
]
NNZ = "gspmm_nnz.cuh"
ARG_GATHER = "gspmm_arg_gather.cuh"
DTYPES = ["float32", "float64", "bfloat16", "float16"]


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


@dataclasses.dataclass
class Operands:
    """Small integers, so that every sum is exact and ties are frequent; arg comes from the CPU
    kernels."""

    case: object
    dtype: str
    n: int
    transpose: bool
    batch: int = 1
    seed: int = 0

    def __post_init__(self):
        rng, case = np.random.default_rng(self.seed), self.case
        self.m, self.k = case.shape[::-1] if self.transpose else case.shape
        draw = lambda *shape: cast(rng.integers(-3, 4, shape), self.dtype)
        self.values = draw(self.batch, case.nnz)
        self.values[:, case.stored :] = np.nan
        self.x, self.d = draw(self.batch, self.k, self.n), draw(self.batch, self.m, self.n)
        A = array(case, self.dtype)
        self.arrays = [np.asarray(a) for a in structure(A)]
        self.params = dict(shape=A.shape, transpose=self.transpose, checked=True, schedule=None)

    def along(self, transpose):
        row_offsets, column_indices, column_offsets, row_indices, permutation = self.arrays
        if transpose:
            return column_offsets, row_indices, permutation
        return row_offsets, column_indices, np.zeros(0, np.int32)

    def on_the_cpu(self, primitive, *operands, **params):
        operands = [jnp.asarray(x) for x in (*operands, *self.arrays)]
        return jax.tree.map(np.asarray, bind(primitive, *operands, **self.params, **params))

    def problem(self, op, shape, permuted):
        return Problem(
            op,
            shape,
            self.case.nnz,
            self.n,
            self.batch,
            self.dtype,
            platform="cuda",
            permuted=permuted,
        )


def launched(of, problem, point, call, inputs, shape, change, **merged):
    """Results [batch, m, n] of one launch, or of two for a point of nonzeros: of the sums, or with
    `minimum` of the extrema and their positions."""
    dtypes = [jnp.dtype(of.dtype)] + [np.int32] * len(merged)
    results = [(shape, dtype) for dtype in dtypes]
    count = places(problem, point)
    if count is None:
        return emulate(change(call), inputs, results)
    wide = np.float64 if of.dtype == "float64" else np.float32
    parts = [((of.batch, count, of.n), dtype) for dtype in [wide, np.int32][: len(results)]]
    found = emulate(change(call), inputs, results + parts)
    first, partial = found[: len(results)], found[len(results) :]
    call = change(merge_plan(problem, point, **merged))
    return emulate(call, (*partial, inputs[1], *first), results)


def check_extrema(of, point, add, minimum, change=lambda call: call):
    C, arg = of.on_the_cpu(gspmm_p, of.values, of.x, add=add, minimum=minimum, positions=True)
    problem = of.problem("gspmm", (of.m, of.k), of.transpose)
    call = extremum_plan(problem, point, add=add, minimum=minimum, batches=(of.batch, of.batch))
    inputs = (of.values, *of.along(of.transpose), of.x)
    outputs = launched(of, problem, point, call, inputs, C.shape, change, minimum=minimum)
    np.testing.assert_array_equal(outputs[0], C)
    np.testing.assert_array_equal(outputs[1], arg)


def check_derivatives(of, rows_point, entries_point, change=lambda call: call):
    _, arg = of.on_the_cpu(gspmm_p, of.values, of.x, add=False, minimum=False, positions=True)
    batches, out = (of.batch,) * 3, jnp.dtype(of.dtype)

    expected = of.on_the_cpu(arg_gather_to_x_p, of.values, of.d, arg)
    problem = of.problem("gspmm", (of.k, of.m), not of.transpose)
    call = arg_gather_to_x_plan(problem, rows_point, batches)
    inputs = (of.values, *of.along(not of.transpose), of.d, arg)
    (result,) = launched(of, problem, rows_point, call, inputs, expected.shape, change)
    np.testing.assert_array_equal(result, expected)

    if rows_point.nnz is not None:
        return  # the other derivatives do not depend on it
    expected = of.on_the_cpu(arg_gather_p, of.values, of.x, arg)
    problem = of.problem("gspmm", of.case.shape, of.transpose)
    inputs = (of.values, *of.arrays[:2], of.x, arg)
    (result,) = emulate(change(arg_gather_plan(problem, batches)), inputs, [(expected.shape, out)])
    np.testing.assert_array_equal(result, expected)

    expected = of.on_the_cpu(arg_gather_to_values_p, of.x, of.d, arg)
    problem = of.problem("sddmm", of.case.shape, of.transpose)
    call = change(arg_gather_to_values_plan(problem, entries_point, batches))
    inputs = (*of.arrays[:2], of.x, of.d, arg)
    (result,) = emulate(call, inputs, [(expected.shape, out)])
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_point(point):
    i = POINTS.index(point)
    names = ("every_length", "padded", "empty_rows_at_both_ends", "one_heavy_row")
    for turn, name in enumerate((names[i % 4], names[(i + 1) % 4])):
        dtype, n = DTYPES[(i + turn) % 4], (1, 4, 7)[(i + turn) % 3]
        of = Operands(BATTERY[name], dtype, n, transpose=(i + turn) % 2 == 1)
        check_extrema(of, point, add=i % 3 == 0, minimum=turn == 1)
        check_derivatives(of, point, SDDMM_POINTS[i % 3])


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", BATTERY)
def test_every_matrix(name):
    for i, point in enumerate(REPRESENTATIVES):
        for n, transpose in ((4, i % 2 == 0), (5, i % 2 == 1)):
            of = Operands(BATTERY[name], "float32", n, transpose)
            check_extrema(of, point, add=n == 4, minimum=transpose)
            check_derivatives(of, point, SDDMM_POINTS[transpose])


@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_batches(point):
    # A grid with fewer blocks in z than batch members, as for batches beyond the grid's limit.
    few = lambda call: dataclasses.replace(call, grid=(*call.grid[:2], 2))
    for transpose in (False, True):
        of = Operands(BATTERY["padded"], "float32", 4, transpose, batch=5)
        check_extrema(of, point, add=False, minimum=False, change=few)
        check_derivatives(of, point, SDDMM_POINTS[0], change=few)


@pytest.mark.parametrize("minimum", [False, True], ids=["max", "min"])
@pytest.mark.parametrize("point", REPRESENTATIVES, ids=str)
def test_the_first_nan_wins(point, minimum):
    of = Operands(BATTERY["every_length"], "float32", 5, transpose=False)
    of.x[0, [3, 9, 30]] = np.nan
    of.x[0, 12] = -np.inf
    check_extrema(of, point, add=True, minimum=minimum)


@pytest.mark.parametrize("point", REPRESENTATIVES[1:], ids=str)
def test_zeros_have_the_signs_of_sums(point):
    """1 - 1 is 0, and only -0 + -0 is -0: of a minimum too."""
    of = Operands(BATTERY["every_length"], "float32", 4, transpose=False)
    rng = np.random.default_rng(0)
    of.x[:] = rng.choice([0.0, -0.0, 1.0], of.x.shape)
    of.values[:] = rng.choice([0.0, -0.0, -1.0], of.values.shape)
    for add in (True, False):
        C, arg = of.on_the_cpu(gspmm_p, of.values, of.x, add=add, minimum=True, positions=True)
        problem = of.problem("gspmm", (of.m, of.k), False)
        call = extremum_plan(problem, point, add=add, minimum=True)
        inputs = (of.values, *of.along(False), of.x)
        same = lambda call: call
        found = launched(of, problem, point, call, inputs, C.shape, same, minimum=True)
        np.testing.assert_array_equal(np.signbit(found[0]), np.signbit(C))
        zero = (C == 0) & (arg >= 0)
        assert (zero & ~np.signbit(C)).any() and (zero & np.signbit(C)).any()


@pytest.mark.parametrize(
    ("header", "right", "wrong", "point"),
    [
        # ties won by the last entry, NaN treated as a number, an empty lane that wins, a group cut
        # in half
        ("gspmm.cuh", "!(message <= best)", "!(message < best)", REPRESENTATIVES[0]),
        ("gspmm.cuh", "(unsigned(other.at) < unsigned(found.at))", "false", REPRESENTATIVES[1]),
        (
            "gspmm.cuh",
            "unsigned(other.at) < unsigned(found.at)",
            "other.at < found.at",
            REPRESENTATIVES[1],
        ),
        ("gspmm.cuh", "(found[j].at < 0) |", "", REPRESENTATIVES[1]),
        ("group.cuh", "distance = kLanes / 2", "distance = kLanes / 4", REPRESENTATIVES[1]),
        ("gspmm.cuh", "kPermuted ? permutation[p] : Index(p)", "Index(p)", REPRESENTATIVES[0]),
        ("gspmm.cuh", "inside && row < m", "row < m", REPRESENTATIVES[1]),
        ("gspmm.cuh", "= add ? A(1) : value", "= add ? value : A(1)", REPRESENTATIVES[0]),
        ("gspmm.cuh", "minimum ? A(-1) : A(1)", "minimum ? A(1) : A(-1)", REPRESENTATIVES[1]),
        (
            NNZ,
            "AddNext<Combine>(head, found);",
            "AddNext<Combine>(found, found);",
            REPRESENTATIVES[2],
        ),
        (NNZ, "2 * number + begins", "2 * number", REPRESENTATIVES[2]),
        (NNZ, "w <= to; ++w", "w < to; ++w", REPRESENTATIVES[2]),
        (NNZ, "w <= to; w += kShare", "w < to; w += kShare", REPRESENTATIVES[2]),
        (NNZ, "(none || low < high)", "low < high", REPRESENTATIVES[2]),
        (
            ARG_GATHER,
            "kPermuted ? permutation[p] : Index(p)",
            "Index(p)",
            REPRESENTATIVES[0],
        ),
        (ARG_GATHER, "attaining.at[j] == q", "true", REPRESENTATIVES[0]),
        (ARG_GATHER, "attaining.at[c] == Index(q)", "true", REPRESENTATIVES[0]),
        (ARG_GATHER, "if (q >= 0)", "if (true)", REPRESENTATIVES[0]),
        (
            ARG_GATHER,
            "const bool valid = q < stored;",
            "const bool valid = true;",
            REPRESENTATIVES[0],
        ),
    ],
)
def test_planted_bugs_are_caught(header, right, wrong, point, planted):
    def check():
        for transpose in (False, True):
            of = Operands(
                BATTERY["heavy_first_and_last" if header == NNZ else "padded"],
                "float32",
                9,
                transpose,
            )
            check_extrema(of, point, add=False, minimum=False)
            check_derivatives(of, point, SDDMM_POINTS[1])
        of = Operands(BATTERY["empty_rows_at_both_ends"], "float32", 4, transpose=False)
        of.x[:] = -np.inf
        check_extrema(of, point, add=True, minimum=False)

    planted(header, right, wrong, check)


def test_the_cpu_operands_of_these_tests_are_not_all_alike():
    of = Operands(BATTERY["every_length"], "float32", 7, transpose=False)
    C, arg = of.on_the_cpu(gspmm_p, of.values, of.x, add=False, minimum=False, positions=True)
    assert len(np.unique(C)) > 3 and len(np.unique(arg)) > 50 and (arg == -1).any()
    of.params["schedule"] = CpuTile(nonzeros=64)
    again = of.on_the_cpu(gspmm_p, of.values, of.x, add=False, minimum=False, positions=True)
    np.testing.assert_array_equal(again[1], arg)
