import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast, sizes_for
from conftest import row_schedule
from sddmm_oracle import operands, oracle
from tolerance import DTYPES, assert_within

from sgap_jax import COO, CSC, CVS, sddmm

FEATURES = [0, 1, 2, 3, 4, 7, 8, 16, 17, 31, 64, 96, 130]


@pytest.mark.seconds(check=3, test=12)
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


def weighted_with_nan(case, dtype):
    """The case with random weights, NaN in its padding, and the weights."""
    weights = np.random.default_rng(1).standard_normal(case.nnz)
    weights[case.stored :] = np.nan
    return array(case, dtype).with_values(jnp.asarray(cast(weights, dtype))), weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_scale_multiply_before_the_one_rounding(dtype, backend):
    case = BATTERY["padded"]
    A, weights = weighted_with_nan(case, dtype)
    # Variants of the CPU kernel: few features, features that do not fill a register, rows in
    # registers.
    for d, weighted, scale in ((1, False, 0.375), (3, True, None), (17, True, -1.5), (64, True, 2)):
        X, Y = operands(case, d)
        C = sddmm(
            A,
            cast(X, dtype),
            cast(Y, dtype),
            weighted=weighted,
            scale=scale,
            schedule=row_schedule(backend),
        )
        assert C.dtype == dtype
        factors = (weights if weighted else None, 1.0 if scale is None else scale)
        assert_within(C.values, *oracle(case, dtype, X, Y, *factors))


def test_a_sum_beyond_float16_is_weighed_before_it_is_rounded(backend):
    case = BATTERY["every_length"]
    X, Y = (np.full((n, 16), 2**7, np.float16) for n in case.shape)  # sums of 2^18
    A = array(case, np.float16).with_values(jnp.full(case.nnz, 2.0**-10, jnp.float16))
    run = lambda **factors: sddmm(A, X, Y, schedule=row_schedule(backend), **factors).values
    assert np.isinf(run()).all()
    assert (run(weighted=True) == 2**8).all() and (run(scale=2**-10) == 2**8).all()
    # A gradient of the factors fits too, also if no cotangent reaches some sums.
    left = jnp.arange(case.nnz, dtype=jnp.float32) % 2
    total = lambda v, s: jnp.sum(  # noqa: E731
        left
        * sddmm(
            A.with_values(v), X, Y, weighted=True, scale=s, schedule=row_schedule(backend)
        ).values.astype(jnp.float32)
    )
    dv, ds = jax.grad(total, (0, 1))(A.values, jnp.float32(2.0**-10))
    assert (dv.astype(jnp.float32) == left * 2**8).all() and ds == 2**8 * left.sum()
    # In float16 the weights times this scale are zero.
    assert (run(weighted=True, scale=2.0**-20) == 2.0**-12).all()


@pytest.mark.parametrize("length", [None, 2])
def test_no_features_are_zeros_whatever_multiplies_them(length, backend):
    A = array(BATTERY["padded"], jnp.float32, None if length is None else CVS(length))
    A = A.with_values(jnp.full(A.values.shape, jnp.inf, jnp.float32))
    X, Y = (jnp.ones((n, 0), jnp.float32) for n in A.shape)

    def product(v, s):
        return sddmm(
            A.with_values(v), X, Y, weighted=True, scale=s, schedule=row_schedule(backend)
        ).values

    C, pull = jax.vjp(product, A.values, jnp.float32(jnp.inf))
    for zeros in (C, *pull(jnp.ones_like(C))):
        assert not np.any(zeros)


def test_weights_of_no_entries():
    for name in ("no_rows", "no_columns", "no_entries", "only_padding"):
        A, _ = weighted_with_nan(BATTERY[name], jnp.float32)
        X, Y = (jnp.ones((n, 4), jnp.float32) for n in A.shape)
        total = lambda v, s: sddmm(A.with_values(v), X, Y, weighted=True, scale=s).values.sum()  # noqa: B023
        value, (dvalues, dscale) = jax.value_and_grad(total, (0, 1))(A.values, jnp.float32(2))
        assert value == dscale == 0 and dvalues.shape == A.values.shape and not dvalues.any()


def test_weights_alone_in_a_batch_share_x_and_y_and_no_operation_follows():
    case = BATTERY["padded"]
    A, weights = weighted_with_nan(case, jnp.float32)
    X, Y = (jnp.asarray(x, jnp.float32) for x in operands(case, 6))
    product = lambda w: sddmm(A.with_values(w), X, Y, weighted=True, scale=0.5).values
    batch = jnp.asarray(np.stack([weights, 3 * weights]), jnp.float32)
    run = jax.jit(jax.vmap(product))
    text = run.lower(batch).as_text()
    assert text.count("custom_call @sgap_sddmm_csr_v1") == text.count("custom_call") == 1
    assert f"tensor<1x{case.shape[0]}x6xf32>" in text and f"2x{case.shape[0]}x6" not in text
    assert "multiply" not in text and "select" not in text
    np.testing.assert_array_equal(run(batch), jnp.stack([product(w) for w in batch]))


def test_an_exported_product_takes_weights_and_scale():
    A, _ = weighted_with_nan(BATTERY["padded"], jnp.float32)
    X, Y = (jnp.asarray(x, jnp.float32) for x in operands(BATTERY["padded"], 6))

    def weighed(values, scale, A, X, Y):
        return sddmm(A.with_values(values), X, Y, weighted=True, scale=scale).values.sum()

    run = jax.jit(jax.value_and_grad(weighed, (0, 1)))
    arguments = (A.values, jnp.float32(0.5), A, X, Y)
    trusted = [jax.export.DisabledSafetyCheck.custom_call("sgap_sddmm_csr_v1")]
    exported = jax.export.export(run, disabled_checks=trusted)(*arguments)
    restored = jax.export.deserialize(exported.serialize())
    jax.tree.map(np.testing.assert_array_equal, restored.call(*arguments), run(*arguments))


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
