import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast, sizes_for
from conftest import row_schedule
from sddmm_oracle import operands, oracle
from tolerance import DTYPES, assert_within

from sgap_jax import COO, CSC, sddmm

FEATURES = [0, 1, 2, 3, 4, 7, 8, 16, 17, 31, 64, 96, 130]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATTERY)
def test_sddmm(name, dtype, backend):
    case = BATTERY[name]
    A = array(case, dtype)
    for d in sizes_for(name, FEATURES, backend):
        X, Y = operands(case, d)
        C = sddmm(A, cast(X, dtype), cast(Y, dtype), schedule=row_schedule(backend))
        assert C.dtype == dtype and C.shape == A.shape and C.format == A.format
        assert C.row_offsets is A.row_offsets and C.column_indices is A.column_indices
        assert_within(C.values, *oracle(case, dtype, X, Y))


@pytest.mark.parametrize("format", [CSC, COO], ids=str)
def test_formats_agree(format, backend):
    case = BATTERY["every_length"]
    A = array(case, jnp.float32)
    X, Y = (jnp.asarray(x, jnp.float32) for x in operands(case, 9))
    expected = sddmm(A, X, Y, schedule=row_schedule(backend))
    C = sddmm(A.asformat(format), X, Y, schedule=row_schedule(backend))
    assert C.format == format
    np.testing.assert_array_equal(C.todense(), expected.todense())
    np.testing.assert_array_equal(sddmm(A.T, Y, X).todense(), sddmm(A, X, Y).todense().T)


def test_scale_and_weights():
    case = BATTERY["skewed"]
    A = array(case, jnp.float32)
    X, Y = (jnp.asarray(x, jnp.float32) for x in operands(case, 6))
    plain = sddmm(A, X, Y).values
    np.testing.assert_allclose(sddmm(A, X, Y, scale=0.25).values, plain * 0.25, rtol=1e-6)
    np.testing.assert_allclose(
        sddmm(A, X, Y, weighted=True, scale=jnp.float32(2)).values,
        2 * plain * A.values,
        rtol=1e-6,
    )


def test_the_values_are_not_read_without_weights():
    case = BATTERY["skewed"]
    X, Y = (jnp.asarray(x, jnp.float32) for x in operands(case, 6))
    A = array(case, jnp.float32)
    mask = A.with_values(jnp.zeros(A.nnz, bool))
    np.testing.assert_array_equal(sddmm(mask, X, Y).values, sddmm(A, X, Y).values)
    nan = A.with_values(jnp.full(A.nnz, jnp.nan, jnp.float32))
    assert np.isfinite(sddmm(nan, X, Y).values).all()


@pytest.mark.parametrize("d", [1, 4, 17, 64])
def test_rows_not_sampled_do_not_touch_nan(d, backend):
    case = BATTERY["every_length"]
    X, Y = (x.astype(np.float32) for x in operands(case, d))
    Y[3] = np.nan
    C = sddmm(
        array(case, jnp.float32), jnp.asarray(X), jnp.asarray(Y), schedule=row_schedule(backend)
    )
    np.testing.assert_array_equal(np.isnan(C.values), case.column_indices == 3)


def test_a_narrow_dtype_accumulates_in_float32(backend):
    case = BATTERY["one_by_one"]
    for dtype in (jnp.bfloat16, jnp.float16):
        ones = jnp.ones((1, 4096), dtype)
        C = sddmm(array(case, dtype), ones, ones, schedule=row_schedule(backend))
        assert C.values[0] == 4096


def test_a_corrupted_output_fails_the_oracle():
    case = BATTERY["every_length"]
    X, Y = operands(case, 16)
    expected, bound = oracle(case, jnp.float32, X, Y)
    values = np.array(
        sddmm(
            array(case, jnp.float32), jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
        ).values
    )
    assert_within(values, expected, bound)
    values[7] *= 1 + 1e-4
    with pytest.raises(AssertionError, match=r"first at \(7,\)"):
        assert_within(values, expected, bound)
