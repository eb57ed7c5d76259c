"""Vectors of edges on CUDA: messages with values [nnz, n] and vectors of entries, run by the
emulator and compared with the CPU's kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax import Schedule, aggregate, gsddmm, gspmm
from sgap_jax.schedules.emulated import Emulated

MESSAGES = [
    ("mul", "sum", False),
    ("sub", "max", True),
    ("mul", "sum", True),
    ("add", "min", False),
]
POINTS = [None, "{<4 nnz, 2 col>, 8}", "{<1/8 row, 1 col>, 8}", "{<2 row, 4 col>, 1}"]
ENTRIES = [None, "{<4 nnz, 1 col>, 2}", "{<2 nnz, 4 col>, 1}"]
NAMES = ["every_length", "padded", "one_heavy_row", "empty_rows_at_both_ends"]


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


def drawn(dtype, seed=0):
    """draw(*shape): small integers, of which every sum is exact."""
    rng = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(rng.integers(-3, 4, shape), dtype)


def on_emulator(point):
    return Emulated(emulate, None if point is None else Schedule.parse(point))


def same_as_on_the_cpu(results, point):
    found, expected = results(on_emulator(point)), results(None)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert any(len(np.unique(x)) > 5 for x in jax.tree.leaves(found))


def check_messages(name, point, op, reduce, transpose, dtype, n):
    case, draw = BATTERY[name], drawn(dtype)
    A = array(case, dtype)
    m, k = case.shape[::-1] if transpose else case.shape
    V, X, D = draw(case.nnz, n), draw(2, k, n), draw(2, m, n)
    of = dict(op=op, reduce=reduce, transpose=transpose)

    def results(schedule):
        one = lambda V, X: gspmm(A, X, values=V, schedule=schedule, **of)
        both = lambda V, X: jax.vmap(one, (None, 0))(V, X)
        out, pull = jax.vjp(both, V, X)
        return out, pull(D), jax.jvp(both, (V, X), (V + 1, X + 1))[1]

    same_as_on_the_cpu(results, point)


def check_entries(name, point, op, dtype, n):
    case, draw = BATTERY[name], drawn(dtype)
    A, (m, k) = array(case, dtype), case.shape
    X, Y, D = draw(2, m, n), draw(k, n), draw(2, case.nnz, n)

    def results(schedule):
        one = lambda X, Y: gsddmm(A, X, Y, op=op, reduce=None, schedule=schedule)
        both = lambda X, Y: jax.vmap(one, (0, None))(X, Y)
        out, pull = jax.vjp(both, X, Y)
        return out, pull(D)

    same_as_on_the_cpu(results, point)


@pytest.mark.tier("test")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("op", "reduce", "transpose"), MESSAGES)
def test_messages_are_those_of_the_cpu(op, reduce, transpose, point):
    turn = POINTS.index(point) + MESSAGES.index((op, reduce, transpose))
    dtype = ("float32", "bfloat16", "float64", "float16")[turn % 4]
    with jax.enable_x64(dtype == "float64"):
        check_messages(NAMES[turn % 4], point, op, reduce, transpose, dtype, (4, 7)[turn % 2])


@pytest.mark.parametrize("point", ENTRIES)
@pytest.mark.parametrize("op", ["mul", "sub"])
def test_vectors_of_entries_are_those_of_the_cpu(op, point):
    turn = ENTRIES.index(point) + 2 * (op == "sub")
    dtype = ("float32", "bfloat16", "float16")[turn % 3]
    check_entries(NAMES[turn % 4], point, op, dtype, (8, 5)[turn % 2])


@pytest.mark.parametrize(
    ("header", "right", "wrong", "point"),
    [
        ("gspmm.cuh", "own.at[kVectors ? j : 0]", "own.at[0]", POINTS[3]),
        ("gspmm.cuh", "kVectors ? values + column : values", "values", POINTS[3]),
        ("gspmm.cuh", "values(values + column)", "values(values)", POINTS[3]),
        ("gsddmm.cuh", "read = valid ? left : 0", "read = left", ENTRIES[1]),
        ("gsddmm.cuh", "add ? p + r : p * r", "p * r", ENTRIES[1]),
        ("gsddmm.cuh", "batch * x_stride", "0 * x_stride", ENTRIES[1]),
    ],
)
def test_planted_bugs_are_caught(header, right, wrong, point, planted):
    def check():
        if header == "gsddmm.cuh":
            check_entries("padded", point, "add", "float32", 5)
        else:
            check_messages("padded", point, "mul", "sum", True, "float32", 7)
            check_messages("padded", point, "mul", "max", False, "float32", 7)

    planted(header, right, wrong, check)


def test_vectors_lower_to_launches(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    A = array(BATTERY["every_length"], "float32")
    (m, k), n = A.shape, 8
    V, X, Y = (jnp.ones((rows, n), jnp.float32) for rows in (A.nnz, k, m))

    def launches(f, *operands):
        loss = lambda *x: jnp.sum(f(*x) ** 2)
        lowered = [
            jax.jit(g).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
            for g in (f, jax.grad(loss, tuple(range(len(operands)))))
        ]
        return [text.count("custom_call @sgap_launch_v1") for text in lowered]

    # Of a sum of products: the sums, and by values the products of ends, by X sums once more.
    assert launches(lambda V, X: gspmm(A, X, values=V), V, X) == [1, 3]
    # Of products of ends: their vectors, and sums of products along both.
    assert launches(lambda X, Y: gsddmm(A, Y, X, reduce=None), X, Y) == [1, 3]
    assert launches(lambda V: aggregate(A, V), V) == [1, 2]
