"""The CUDA lowerings of the row operations: for "cuda" as text, and run by the emulator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax import COO, CSC, CVS, Reference, Schedule, row_max, row_sum, sparse_softmax
from sgap_jax.schedules.emulated import Emulated

POINTS = [None, "{<2 row, 1 col>, 1}", "{<1/4 row, 1 col>, 4} worker_dim_r=1/2"]
A = array(BATTERY["empty_rows_at_both_ends"], "float64")
FULL = jnp.asarray(np.diff(BATTERY["empty_rows_at_both_ends"].row_offsets) > 0)
OPS = {
    "sparse_softmax": lambda v, s: sparse_softmax(A.with_values(v), scale=-1.5, schedule=s).values,
    "softmax_by_array": lambda v, s: (
        sparse_softmax(A.with_values(v), scale=jnp.asarray(0.7), schedule=s).values
    ),
    "row_sum": lambda v, s: row_sum(A.with_values(v), schedule=s),
    # The maximum of an empty row is -infinity.
    "row_max": lambda v, s: jnp.where(FULL, row_max(A.with_values(v), schedule=s), 0),
}
V = A.asformat(CVS(3))  # the last vectors end past the matrix
FULL_VECTORS = jnp.asarray(np.repeat(np.diff(V.row_offsets) > 0, 3)[: V.shape[0]])
VECTOR_OPS = {
    "sparse_softmax": lambda v, s: sparse_softmax(V.with_values(v), scale=-1.5, schedule=s).values,
    "row_sum": lambda v, s: row_sum(V.with_values(v), schedule=s),
    "row_max": lambda v, s: jnp.where(FULL_VECTORS, row_max(V.with_values(v), schedule=s), 0),
}


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


def emulated(point):
    return Emulated(emulate, None if point is None else Schedule.parse(point))


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape))


def close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-13), actual, expected
    )


def derivatives(function, v, t, u):
    """Forward, second-order and third-order derivatives of a function of the values."""

    def loss(v):
        return jnp.sum(jnp.sin(function(v)))

    def second(v, u):
        return jax.jvp(jax.grad(loss), (v,), (u,))

    return jax.jvp(function, (v,), (t,)), second(v, u), jax.grad(lambda v: second(v, u)[1] @ t)(v)


@pytest.mark.tier("test")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", OPS)
def test_derivatives_to_order_2_are_those_of_the_cpu(name, point):
    v, t, u = (normal(A.nnz, seed=i) for i in range(3))

    def of(schedule):
        return derivatives(lambda v: OPS[name](v, schedule), v, t, u)

    close(jax.jit(of, static_argnums=0)(emulated(point)), of(None))


@pytest.mark.parametrize("name", VECTOR_OPS)
def test_derivatives_on_vectors_are_those_of_the_cpu(name):
    v, t, u = (normal(V.nnz, seed=i) for i in range(3))

    def of(schedule):
        function = lambda v: VECTOR_OPS[name](v.reshape(V.values.shape), schedule)
        return derivatives(function, v, t, u)

    close(jax.jit(of, static_argnums=0)(emulated(None)), of(None))


@pytest.mark.parametrize(("name", "gradient"), [("sparse_softmax", 2), ("row_sum", 2)])
def test_vectors_lower_to_launches_and_not_to_entries(name, gradient, monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    function = jax.value_and_grad(lambda v: jnp.sum(VECTOR_OPS[name](v, None) ** 2))
    lowered = jax.jit(function).trace(V.values).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("custom_call @sgap_launch_v1") == gradient
    assert "stablehlo.scatter" not in text and "stablehlo.gather" not in text


@pytest.mark.parametrize("name", OPS)
def test_batches_of_values_and_of_tangents(name):
    v, t = normal(3, A.nnz), normal(3, A.nnz, seed=1)

    def tangent(v, t, schedule):
        return jax.jvp(lambda v: OPS[name](v, schedule), (v,), (t,))[1]

    for axes, operands in (((0, 0), (v, t)), ((None, 0), (v[0], t)), ((0, None), (v, t[0]))):
        batched = jax.vmap(tangent, (*axes, None))
        close(batched(*operands, emulated(None)), batched(*operands, None))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", [CSC, COO], ids=str)
def test_formats_and_dtypes(format, dtype):
    case = BATTERY["every_length"]
    S = array(case, dtype, format)
    S = S.with_values(jnp.asarray(np.random.default_rng(0).integers(-3, 4, S.nnz), dtype))
    for op in (row_sum, row_max):
        out = op(S, schedule=emulated(None))
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, op(S))
    P = sparse_softmax(S, schedule=emulated(None))
    assert P.format == format and P.dtype == dtype
    expected = np.asarray(sparse_softmax(S).values, np.float64)
    precision = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(P.values, np.float64), expected, rtol=8 * precision)


def launches(name, schedule, differentiate):
    """The launches in the program of an operation for "cuda"."""
    function = lambda v: OPS[name](v, schedule)
    if differentiate:
        value = function
        function = jax.value_and_grad(lambda v: jnp.sum(value(v) ** 2))
    lowered = jax.jit(function).trace(A.values).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [("sparse_softmax", 1, 2), ("softmax_by_array", 1, 2), ("row_sum", 1, 2), ("row_max", 1, 4)],
)
def test_values_and_gradients_lower_to_launches(name, value, gradient, monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    for differentiate, count in ((False, value), (True, gradient)):
        text = launches(name, None, differentiate)
        assert text.count("custom_call @sgap_launch_v1") == count
        assert "stablehlo.scatter" not in text and "stablehlo.gather" not in text
        assert "stablehlo.scatter" in launches(name, Reference(), differentiate)


def test_one_program_serves_every_scale(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    for scale in (1.0, 0.125):
        softmax = jax.jit(lambda v, c=scale: sparse_softmax(A.with_values(v), scale=c).values)
        softmax.trace(A.values).lower(lowering_platforms=("cuda",))
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
