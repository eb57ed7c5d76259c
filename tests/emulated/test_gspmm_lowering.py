"""The CUDA lowerings of gspmm and its derivatives: as text, and run by the emulator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax import Schedule, gspmm
from sgap_jax.schedules.emulated import Emulated

CASE = BATTERY["every_length"]


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("transpose", "op", "reduce"), [(False, "mul", "max"), (True, "sub", "min")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("point", [None, "{<4 nnz, 2 col>, 8}", "{<1/8 row, 1 col>, 8}"])
def test_values_and_derivatives_are_those_of_the_cpu(point, dtype, transpose, op, reduce):
    emulated = Emulated(emulate, None if point is None else Schedule.parse(point))
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.integers(-3, 4, shape), dtype)  # every sum is exact
    A = array(CASE, dtype).with_values(draw(CASE.nnz))
    m, k = CASE.shape[::-1] if transpose else CASE.shape
    X, D, tangents = draw(2, k, 6), draw(2, m, 6), (draw(CASE.nnz), draw(2, k, 6))
    options = dict(op=op, reduce=reduce, transpose=transpose)

    def results(schedule):
        def f(v, X):
            one = lambda X: gspmm(A.with_values(v), X, schedule=schedule, **options)
            return jax.vmap(one)(X)

        out, pull = jax.vjp(f, A.values, X)
        return out, pull(D), jax.jvp(f, (A.values, X), tangents)[1]

    jax.tree.map(np.testing.assert_array_equal, results(emulated), results(None))


@pytest.mark.parametrize("transpose", [False, True])
def test_a_batch_of_cotangents_alone(transpose):
    # The positions are not batched: the launches get batches of 1 beside batches of 3.
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)
    A = array(CASE, "float32").with_values(draw(CASE.nnz))
    m, k = CASE.shape[::-1] if transpose else CASE.shape
    X, D = draw(k, 5), draw(3, m, 5)

    def gradients(schedule):
        def f(v, X):
            A_v = A.with_values(v)
            return gspmm(A_v, X, reduce="max", transpose=transpose, schedule=schedule)

        return jax.vmap(jax.vjp(f, A.values, X)[1])(D)

    jax.tree.map(np.testing.assert_array_equal, gradients(Emulated(emulate)), gradients(None))


def test_value_and_gradient_lower_to_launches(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    A, X = array(CASE, "float32"), jnp.ones((CASE.shape[1], 6), jnp.float32)
    loss = lambda v, X: jnp.sum(gspmm(A.with_values(v), X, reduce="max") ** 2)

    def launches(f):
        text = jax.jit(f).trace(A.values, X).lower(lowering_platforms=("cuda",)).as_text()
        assert "scatter" not in text
        return text.count("custom_call @sgap_launch_v1")

    assert launches(loss) == 1
    assert launches(jax.grad(loss, 1)) == 2  # kernels: the extrema, and arg_gather_to_x
    assert launches(jax.grad(loss, (0, 1))) == 3  # and arg_gather_to_values
    assert launches(lambda v, X: jax.jvp(loss, (v, X), (v, X))) == 3  # and two of arg_gather
    point = Schedule.parse("{<1/64 row, 1 col>, 4}")
    with pytest.raises(NotImplementedError, match="gspmm: no kernel for the legal point"):
        f = lambda X: gspmm(A, X, reduce="max", schedule=point)
        jax.jit(f).trace(X).lower(lowering_platforms=("cuda",))
