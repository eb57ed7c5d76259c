import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, from_row_lengths, rounded
from conftest import row_schedule
from row_oracle import row_sum_oracle
from tolerance import DTYPES, assert_within

from sgap_jax import COO, CSC, reference, row_max, row_sum


@pytest.mark.seconds(check=1, test=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATTERY)
def test_row_sum(name, dtype, backend):
    case = BATTERY[name]
    s = row_sum(array(case, dtype), schedule=row_schedule(backend))
    assert s.dtype == dtype
    assert_within(s, *row_sum_oracle(case, dtype))


@pytest.mark.seconds(check=1, test=4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATTERY)
def test_row_max(name, dtype, backend):
    case = BATTERY[name]
    s = row_max(array(case, dtype), schedule=row_schedule(backend))
    assert s.dtype == dtype
    expected = reference.row_max(rounded(case.values, dtype), case.row_offsets)
    np.testing.assert_array_equal(np.asarray(s).astype(np.float64), expected)


def test_nan_and_infinity(backend):
    case = from_row_lengths("rows", 4, [2, 2, 2, 0])
    values = jnp.asarray([np.nan, 1, -np.inf, -np.inf, np.inf, 0], jnp.float32)
    A = array(case, jnp.float32).with_values(values)
    schedule = row_schedule(backend)
    np.testing.assert_array_equal(row_max(A, schedule=schedule), [np.nan, -np.inf, np.inf, -np.inf])
    np.testing.assert_array_equal(row_sum(A, schedule=schedule), [np.nan, -np.inf, np.inf, 0])


@pytest.mark.parametrize("format", [CSC, COO], ids=str)
def test_formats_agree(format):
    A = array(BATTERY["every_length"], jnp.float32)
    np.testing.assert_array_equal(row_max(A.asformat(format)), row_max(A))
    np.testing.assert_array_equal(row_sum(A.asformat(format)), row_sum(A))
