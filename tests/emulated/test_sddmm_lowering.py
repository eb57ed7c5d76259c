"""The CUDA lowering of sddmm_p, alone and as part of derivatives: as text, and emulated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax import CSC, Schedule, sddmm, spmm
from sgap_jax.schedules.emulated import Emulated

POINTS = [
    "{<4 nnz, 1 col>, 8}",
    "{<3 nnz, 2 col>, 4}",
    "{<1 row, 2 col>, 4}",
    "{<1/8 row, 1 col>, 8}",
]
CASE = BATTERY["every_length"]
DEFAULT = Emulated(emulate)


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


def integers(rng, shape, dtype):
    return jnp.asarray(rng.integers(-3, 4, shape), dtype)  # every sum is exact


def operands(A, d, dtype, batch=()):
    rng = np.random.default_rng(0)
    return tuple(integers(rng, (*batch, rows, d), dtype) for rows in A.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("point", POINTS)
def test_a_launch_gets_the_operands_that_its_kernel_takes(point, dtype):
    A, schedule = array(CASE, dtype), Emulated(emulate, Schedule.parse(point))
    X, Y = operands(A, 6, dtype, batch=(2,))
    product = lambda A, X, Y: sddmm(A, X, Y, schedule=schedule).values
    both = jax.vmap(product, (None, 0, 0))(A, X, Y)
    shared = jax.vmap(product, (None, None, 0))(A, X[0], Y)
    assert both.dtype == dtype
    for b in range(2):
        np.testing.assert_array_equal(both[b], sddmm(A, X[b], Y[b]).values)
        np.testing.assert_array_equal(shared[b], sddmm(A, X[0], Y[b]).values)


@pytest.mark.parametrize("point", [None, *POINTS[::2]])
def test_value_and_gradients_are_those_of_the_cpu(point):
    A = array(CASE, "float32").asformat(CSC)
    X, Y = operands(A, 4, "float32")
    schedule = Emulated(emulate, point and Schedule.parse(point))
    weights = integers(np.random.default_rng(1), A.nnz, "float32")

    def loss(X, Y, scale, schedule):
        values = sddmm(A.with_values(weights), X, Y, scale=scale, weighted=True, schedule=schedule)
        return jnp.sum(values.values**2)

    run = jax.value_and_grad(loss, (0, 1, 2))
    found, expected = (run(X, Y, jnp.float32(2), s) for s in (schedule, None))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def loss_of_product(values, B, A, schedule):
    return jnp.sum(spmm(A.with_values(values), B, schedule=schedule) ** 2)


def test_the_gradient_of_spmm_in_its_values_is_our_kernel():
    A = array(CASE, "float32")
    rng = np.random.default_rng(2)
    values, B = integers(rng, A.nnz, "float32"), integers(rng, (A.shape[1], 6), "float32")
    calls = []

    def recorded(call, inputs, outputs):
        calls.append(call.kernel)
        return emulate(call, inputs, outputs)

    run = jax.value_and_grad(loss_of_product, (0, 1))
    found = run(values, B, A, Emulated(recorded))
    assert [kernel[:4] for kernel in sorted(calls)] == ["Sddm", "Spmm", "Spmm"]
    jax.tree.map(np.testing.assert_array_equal, found, run(values, B, A, None))


def test_second_derivatives_too():
    A = array(CASE, "float32")
    X, Y = operands(A, 3, "float32")
    loss = lambda X, s: jnp.sum(sddmm(A, X, Y, schedule=s).values ** 3)
    product = lambda s: jax.jvp(lambda X: jax.grad(loss)(X, s), (X,), (X,))
    jax.tree.map(np.testing.assert_array_equal, product(DEFAULT), product(None))


def test_programs_for_a_gpu_hold_launches_and_no_scatter(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    A = array(CASE, "float32")
    X, Y = operands(A, 4, "float32")

    def text(function, *arguments):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
        return lowered.as_text()

    sampled = lambda X, Y: jnp.sum(sddmm(A, X, Y).values ** 2)
    product = lambda values, B: loss_of_product(values, B, A, None)
    for loss, arguments in ((sampled, (X, Y)), (product, (A.values, Y))):
        program = text(jax.value_and_grad(loss, (0, 1)), *arguments)
        assert program.count("custom_call @sgap_launch_v1") == program.count("custom_call") == 3
        assert "scatter" not in program and "gather" not in program
    point = Schedule.parse(POINTS[2])
    program = text(lambda X, Y: sddmm(A, X, Y, schedule=point).values, X, Y)
    assert program.count("custom_call @sgap_launch_v1") == 1 and "SddmmRowKernel" in program
    with pytest.raises(NotImplementedError, match="runs on the platform cuda, not on cpu"):
        sddmm(A, X, Y, schedule=point)
