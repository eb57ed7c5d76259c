import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast, rounded
from conftest import row_schedule
from gspmm_oracle import away_from_zero
from tolerance import DTYPES, assert_within, sum_bound

from sgap_jax import COO, CSC, gsddmm, reference, sddmm
from sgap_jax.primitives.gspmm import OPS

FEATURES = [1, 2, 5, 16, 33]


def operands(case, d, seed=5):
    rng = np.random.default_rng(seed)
    X, Y = rng.standard_normal((case.shape[0], d)), rng.standard_normal((case.shape[1], d))
    return X, away_from_zero(Y)


def oracle(case, dtype, X, Y, op):
    X, Y = rounded(X, dtype), rounded(Y, dtype)
    arrays = (case.row_offsets, case.column_indices)
    expected = reference.gsddmm(*arrays, X, Y, op)
    magnitude = reference.gsddmm(*arrays, np.abs(X), np.abs(Y), {"sub": "add"}.get(op, op))
    return expected, sum_bound(expected, magnitude, 2 * X.shape[1] + 3, dtype)


@pytest.mark.seconds(check=2, test=5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATTERY)
def test_gsddmm(name, dtype, backend):
    case, A = BATTERY[name], array(BATTERY[name], dtype)
    turn = list(BATTERY).index(name) + DTYPES.index(dtype)
    for i in (0, 2):
        op = OPS[(turn + i) % 5]
        X, Y = operands(case, FEATURES[(turn + i) % 5])
        C = gsddmm(A, cast(X, dtype), cast(Y, dtype), op=op, schedule=row_schedule(backend))
        assert C.dtype == dtype and C.shape == A.shape and C.format == A.format
        assert C.row_offsets is A.row_offsets and C.column_indices is A.column_indices
        assert_within(C.values, *oracle(case, dtype, X, Y, op))


@pytest.mark.parametrize("op", OPS)
def test_a_vector_is_one_feature_and_vmap_gives_one_message_for_each(op):
    case = BATTERY["every_length"]
    A = array(case, "float32")
    X, Y = (jnp.asarray(x, jnp.float32) for x in operands(case, 3))
    each = jax.vmap(lambda x, y: gsddmm(A, x, y, op=op).values, in_axes=1, out_axes=1)(X, Y)
    assert each.shape == (A.nnz, 3)
    for l in range(3):  # noqa: E741
        column = slice(l, l + 1)
        expected = gsddmm(A, X[:, column], Y[:, column], op=op).values
        np.testing.assert_allclose(each[:, l], expected, rtol=1e-6)
    whole = gsddmm(A, X, Y, op=op).values
    assert_within(whole, *oracle(case, "float32", X, Y, op))
    np.testing.assert_allclose(each.sum(1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", [CSC, COO], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_formats_agree(op, format):
    case = BATTERY["every_length"]
    A = array(case, "float32")
    X, Y = (jnp.asarray(x, jnp.float32) for x in operands(case, 4))
    C = gsddmm(A.asformat(format), X, Y, op=op)
    assert C.format == format
    np.testing.assert_array_equal(C.todense(), gsddmm(A, X, Y, op=op).todense())


@pytest.mark.parametrize("op", OPS)
def test_infinities_as_in_the_loops(op, backend):
    case, rng = BATTERY["every_length"], np.random.default_rng(3)
    finite, special = [1.0, -2.0], [np.inf, -np.inf, 0.0]
    X, Y = (
        rng.choice(finite + special, (rows, 2), p=[0.4, 0.36, *[0.08] * 3]) for rows in case.shape
    )
    A = array(case, "float32")
    with np.errstate(all="ignore"):
        expected = reference.gsddmm(case.row_offsets, case.column_indices, X, Y, op)
    X, Y = cast(X, "float32"), cast(Y, "float32")
    C = gsddmm(A, X, Y, op=op, schedule=row_schedule(backend))
    assert np.isfinite(expected).any() and not np.isfinite(expected).all()
    np.testing.assert_allclose(C.values, expected, rtol=1e-6)


def test_what_is_not_read_does_not_matter():
    case = BATTERY["skewed"]
    A = array(case, "float32")
    X, Y = (jnp.asarray(x, jnp.float32) for x in operands(case, 6))
    np.testing.assert_array_equal(gsddmm(A, X, Y).values, sddmm(A, X, Y).values)
    nothing = jnp.full_like(Y, jnp.nan)
    C = gsddmm(A.with_values(jnp.full(A.nnz, jnp.nan, jnp.float32)), X, nothing, op="copy")
    np.testing.assert_array_equal(C.values, gsddmm(A, X, Y, op="copy").values)
    assert np.isfinite(C.values).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_round_once(dtype):
    A = array(BATTERY["one_by_one"], dtype)
    large, small = jnp.full((1, 512), 300, dtype), jnp.full((1, 512), 298, dtype)
    assert (gsddmm(A, large, small, op="sub").values == 1024).all()
    assert (gsddmm(A, large, -small, op="add").values == 1024).all()
