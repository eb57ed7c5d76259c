import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast, from_row_lengths
from conftest import row_schedule
from row_oracle import softmax_jacobian_oracle, softmax_oracle
from tolerance import DTYPES, assert_within

from sgap_jax import COO, CSC, reference, sparse_softmax
from sgap_jax.schedules.emulated import Emulated


def turn(name, dtype, scales):
    """Scales take turns: each meets each dtype, and another one each matrix."""
    return scales[(sorted(BATTERY).index(name) + DTYPES.index(dtype)) % len(scales)]


@pytest.mark.seconds(check=2, test=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATTERY)
def test_sparse_softmax(name, dtype, backend):
    case, scale = BATTERY[name], turn(name, dtype, (1.0, 0.125, -3.0, 0.0))
    P = sparse_softmax(array(case, dtype), scale=scale, schedule=row_schedule(backend))
    assert P.dtype == dtype
    assert_within(P.values, *softmax_oracle(case, dtype, scale))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_values_do_not_overflow(dtype, backend):
    case = from_row_lengths("two_rows", 50, [50, 50])
    A = array(case, dtype)
    for shift in (1e4, -1e4, 3e30, -3e30):
        values = np.asarray(jnp.asarray(case.values + shift, dtype)).astype(np.float64)
        P = sparse_softmax(
            A.with_values(jnp.asarray(values, dtype)), schedule=row_schedule(backend)
        )
        expected = reference.sparse_softmax(values, case.row_offsets)
        np.testing.assert_allclose(P.values, expected, rtol=1e-2 if abs(shift) == 1e4 else 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_small_scales_of_values_that_are_far_apart(dtype, backend):
    case = from_row_lengths("far_apart", 300, [2, 50, 300])
    large = float(jnp.finfo(dtype).max) * 0.9
    values = jnp.asarray(np.where(np.arange(352) % 3, -large, large), dtype)
    A = array(case, dtype).with_values(values)
    for scale in (0.0, 5 / large, -5 / large):
        P = sparse_softmax(A, scale=scale, schedule=row_schedule(backend))
        expected = reference.sparse_softmax(np.asarray(values, float) * scale, case.row_offsets)
        np.testing.assert_allclose(
            np.asarray(P.values, float), expected, rtol=1e-2 if dtype == "bfloat16" else 1e-5
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_subnormal_scales(dtype):
    A = array(from_row_lengths("pairs", 2, [2, 2]), dtype)
    for scale in (7e-39, -1e-39, 1e-41):
        P = sparse_softmax(A.with_values(jnp.asarray([-3e38, 3e38] * 2, dtype)), scale=scale)
        right = 1 / (1 + np.exp(-scale * 6e38))
        np.testing.assert_allclose(np.asarray(P.values, float), [1 - right, right] * 2, rtol=1e-2)


def test_masked_rows_are_zero_and_nan_stays_in_its_row(backend):
    case = from_row_lengths("rows", 6, [3, 0, 2, 2, 2])
    inf, nan = np.inf, np.nan
    values = jnp.asarray([-inf, 1.0, 2.0, -inf, -inf, nan, 0.0, inf, 0.0], jnp.float32)
    P = sparse_softmax(array(case, jnp.float32).with_values(values), schedule=row_schedule(backend))
    e = np.exp(-1.0)
    np.testing.assert_allclose(P.values[:5], [0, e / (1 + e), 1 / (1 + e), 0, 0], rtol=1e-6)
    assert np.isnan(P.values[5:7]).all()
    np.testing.assert_array_equal(np.isnan(P.values[7:]), np.isnan(jax.nn.softmax(values[7:])))


@pytest.mark.parametrize("format", [CSC, COO], ids=str)
def test_formats_agree(format, backend):
    A = array(BATTERY["every_length"], jnp.float32)
    expected = sparse_softmax(A, schedule=row_schedule(backend)).todense()
    P = sparse_softmax(A.asformat(format), schedule=row_schedule(backend))
    assert P.format == format
    np.testing.assert_array_equal(P.todense(), expected)


def test_against_dense_softmax():
    case = BATTERY["full"]
    A = array(case, jnp.float32)
    np.testing.assert_allclose(
        sparse_softmax(A, scale=0.5).todense(), jax.nn.softmax(0.5 * A.todense(), axis=1), rtol=2e-6
    )
    np.testing.assert_allclose(
        sparse_softmax(A, scale=jnp.float32(0.5)).values,
        sparse_softmax(A, scale=0.5).values,
        rtol=2e-6,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*BATTERY, "split"])
def test_derivative_in_every_dtype(name, dtype, backend):
    # Forward and reverse share one kernel: the Jacobian is symmetric.
    scale = -0.5 if name == "split" else turn(name, dtype, (1.0, -0.5))
    if name == "split" and isinstance(backend, Emulated):
        pytest.skip("rows as long as this are for the tasks of the CPU")
    case = BATTERY.get(name) or from_row_lengths("split", 40_000, [3, 40_000, 0, 9_000])
    A = array(case, dtype)
    schedule = row_schedule(backend)
    values = np.where(np.arange(case.nnz) < case.stored, case.values, 0)
    v = jnp.asarray(cast(values, dtype))
    t = jnp.asarray(cast(np.random.default_rng(1).standard_normal(case.nnz), dtype))

    def f(v):
        return sparse_softmax(A.with_values(v), scale=scale, schedule=schedule).values

    p, tangent = jax.jvp(f, (v,), (t,))
    (cotangent,) = jax.vjp(f, v)[1](t)
    expected = softmax_jacobian_oracle(case, dtype, p, t, scale)
    assert_within(tangent, *expected)
    assert_within(cotangent, *expected)
