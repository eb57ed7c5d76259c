"""Points with other coarsenings than 1, 2 and 4, whole rows with a group, and parts of columns: the
operations that have kernels for them give exact results and do not spill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import require_nvrtc, resources
from emulated_launch import emulate

from sgap_jax import (
    Reference,
    Schedule,
    SparseArray,
    gspmm,
    row_max,
    row_sum,
    sddmm,
    sparse_softmax,
    spmm,
)
from sgap_jax.schedules.emulated import Emulated

M, K = 37, 29
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def values(seed, *shape):
    """Small integers: every sum is exact."""
    return np.random.default_rng(seed).integers(-3, 4, shape)


def matrix(dtype):
    dense = np.where(np.random.default_rng(0).random((M, K)) < 0.3, values(1, M, K), 0)
    dense[5], dense[11] = 0, 2
    return SparseArray.from_dense(dense.astype(dtype))


OPS = {
    "spmm": lambda A, X, B, s: spmm(A, B, schedule=s),
    "transposed": lambda A, X, B, s: spmm(A, X, transpose=True, schedule=s),
    "sddmm": lambda A, X, B, s: sddmm(A, X, B, schedule=s).values,
    "gspmm": lambda A, X, B, s: gspmm(A, B, reduce="max", schedule=s),
    "row_sum": lambda A, X, B, s: row_sum(A, schedule=s),
    "row_max": lambda A, X, B, s: row_max(A, schedule=s),
    "sparse_softmax": lambda A, X, B, s: sparse_softmax(A, schedule=s).values,
}
POINTS = {
    "spmm": (
        "{<1 row, 3 col>, 1}",
        "{<2 row, 12 col>, 1}",
        "{<1 row, 32 col>, 1}",
        "{<1/8 row, 6 col>, 4}",
        "{<4 nnz, 3 col>, 1}",
        "{<2 nnz, 8 col>, 1}",
        "{<4 nnz, 16 col>, 8}",
        "{<3 nnz, 7 col>, 4}",
        "{<3 row, 4 col>, 8}",
        "{<2 row, 1/8 col>, 4}",
        "{<3 row, 1/32 col>, 32}",
    ),
    "transposed": ("{<1/4 row, 5 col>, 4}", "{<4 nnz, 10 col>, 2}"),
    "sddmm": (
        "{<4 nnz, 3 col>, 8}",
        "{<1 nnz, 8 col>, 4}",
        "{<4 nnz, 16 col>, 2}",
        "{<2 row, 6 col>, 4}",
        "{<1/8 row, 7 col>, 4}",
        "{<2 row, 12 col>, 1}",
    ),
    "gspmm": (
        "{<1 row, 3 col>, 1}",
        "{<2 row, 8 col>, 8}",
        "{<3 row, 1/8 col>, 8}",
        "{<1/16 row, 2 col>, 4}",
    ),
    "row_sum": ("{<3 row, 1 col>, 8}", "{<1/8 row, 1 col>, 2}"),
    "row_max": ("{<3 row, 1/8 col>, 8}",),
    "sparse_softmax": ("{<2 row, 1/4 col>, 4}", "{<3 row, 1/16 col>, 2}"),
}
NOT_OF_DOUBLES = (
    "{<1 row, 32 col>, 1}",
    "{<4 nnz, 16 col>, 8}",
    "{<4 nnz, 16 col>, 2}",
    "{<2 row, 12 col>, 1}",
)
CASES = [(op, point) for op, points in POINTS.items() for point in points]


@pytest.mark.tier("test")
@pytest.mark.parametrize("op, point", CASES)
def test_results_are_exact_and_stay_in_registers(op, point):
    n = CASES.index((op, point))
    for i, columns in enumerate((5, 24)):  # 24 is a multiple of many coarsenings
        dtype = ("float32", "float16", "float64")[(n + i) % 3]
        dtype = "float32" if dtype == "float64" and point in NOT_OF_DOUBLES else dtype
        A = matrix(dtype)
        X, B = (jnp.asarray(values(2, rows, columns), dtype) for rows in (M, K))
        calls = []

        def run(call, inputs, outputs, calls=calls):
            calls.append(call)
            return emulate(call, inputs, outputs)

        found = OPS[op](A, X, B, Emulated(run, Schedule.parse(point)))
        want = OPS[op](A, X, B, Reference())
        assert found.dtype == want.dtype and len(calls) == 1
        if op == "sparse_softmax":
            np.testing.assert_allclose(found, want, rtol=1e-3)
        else:
            np.testing.assert_array_equal(found, want)
        arch = ARCHITECTURES[(n + i) % 3]
        assert resources(calls[0].source, arch)[1:] == (0, 0), (arch, calls[0].source)


@pytest.mark.parametrize(
    "op, point", [("spmm", "{<2 nnz, 6 col>, 4}"), ("gspmm", "{<2 row, 8 col>, 8}")]
)
def test_gradients(op, point):
    A, B = matrix("float32"), jnp.asarray(values(2, K, 24), "float32")

    def loss(numbers, B, schedule):
        return jnp.sum(OPS[op](A.with_values(numbers), None, B, schedule) ** 2)

    grads = jax.grad(loss, (0, 1))
    ours = grads(A.values, B, Emulated(emulate, Schedule.parse(point)))
    for found, want in zip(ours, grads(A.values, B, Reference()), strict=True):
        np.testing.assert_array_equal(found, want)
