import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast, from_row_lengths
from conftest import row_schedule
from gspmm_oracle import PAIRS, away_from_zero, oracle
from spmm_oracle import dense_operand
from tolerance import DTYPES, assert_within

from sgap_jax import COO, CSC, CpuTile, Reference, gspmm, row_sum, spmm
from sgap_jax.primitives._define import bind, structure
from sgap_jax.primitives.gspmm import gspmm_p

COLUMNS = [0, 1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 100, 130, 200]


def schedule_of(backend, reduce):
    """Sums and means take the schedules of products, other reductions those of row operations."""
    return backend if reduce in ("sum", "mean") else row_schedule(backend)


def check(case, dtype, n, op, reduce, transpose, schedule):
    values, X = away_from_zero(case.values), dense_operand(case, n, transpose)
    A = array(case, dtype).with_values(cast(values, dtype))
    options = dict(op=op, reduce=reduce, transpose=transpose)
    C = gspmm(A, cast(X, dtype), schedule=schedule, **options)
    assert C.dtype == dtype
    assert_within(C, *oracle(case, dtype, X, **options))
    return C


@pytest.mark.seconds(check=3, test=10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATTERY)
def test_gspmm(name, dtype, backend):
    """Some of the pairs of op and reduction for each matrix and dtype."""
    turn = list(BATTERY).index(name) + DTYPES.index(dtype)
    for i, (op, reduce) in enumerate(PAIRS[turn % 7 :: 7]):
        n = COLUMNS[(turn + 3 * i) % 9]
        schedule = schedule_of(backend, reduce)
        check(BATTERY[name], dtype, n, op, reduce, transpose=(turn + i) % 2 == 1, schedule=schedule)


@pytest.mark.seconds(check=2, test=5)
@pytest.mark.parametrize(("op", "reduce"), PAIRS)
def test_every_op_and_reduction(op, reduce, backend):
    for transpose in (False, True):
        schedule = schedule_of(backend, reduce)
        check(BATTERY["every_length"], "float32", 6, op, reduce, transpose, schedule)


@pytest.mark.parametrize("schedule", [None, CpuTile(nonzeros=64)], ids=str)
@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extrema_of_every_width(dtype, n, schedule):
    for reduce, name in (("max", "one_heavy_row"), ("min", "heavy_first_and_last")):
        check(BATTERY[name], dtype, n, "mul", reduce, False, schedule)
        check(BATTERY[name], dtype, n, "add", reduce, True, schedule)


def extrema(A, X, transpose, add, minimum, schedule):
    options = dict(transpose=transpose, add=add, minimum=minimum, positions=True)
    options |= dict(checked=True, schedule=schedule)
    C, arg = bind(gspmm_p, A.values[None], X[None], *structure(A), shape=A.shape, **options)
    return np.asarray(C[0]), np.asarray(arg[0])


@pytest.mark.parametrize("minimum", [False, True], ids=["max", "min"])
@pytest.mark.parametrize("add", [False, True], ids=["mul", "add"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", ["one_heavy_row", "skewed", "padded"])
def test_positions_are_those_of_the_first_of_equals_or_nans(name, dtype, add, minimum, backend):
    case, rng = BATTERY[name], np.random.default_rng(1)
    values = rng.integers(-2, 3, case.nnz).astype(float)
    values[case.stored :] = np.nan
    A = array(case, dtype).with_values(cast(values, dtype))
    for transpose in (False, True):
        X = rng.integers(-2, 3, (case.shape[0 if transpose else 1], 19)).astype(float)
        X[len(X) // 2 : len(X) // 2 + 2, :5] = np.nan
        schedule = row_schedule(backend)
        C, arg = extrema(A, jnp.asarray(cast(X, dtype)), transpose, add, minimum, schedule)
        expected, first = np.zeros(C.shape), np.full(C.shape, -1)
        for q in range(case.stored):
            i, j = case.rows[q], case.column_indices[q]
            row, source = (j, i) if transpose else (i, j)
            message = X[source] + values[q] if add else X[source] * values[q]
            better = message < expected[row] if minimum else message > expected[row]
            better |= np.isnan(message) & ~np.isnan(expected[row])
            taken = better | (first[row] < 0)
            expected[row] = np.where(taken, message, expected[row])
            first[row] = np.where(taken, q, first[row])
        np.testing.assert_array_equal(C.astype(np.float64), expected)
        np.testing.assert_array_equal(arg, first)


@pytest.mark.parametrize("n", [1, 4, 17, 64])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_nan_wins_where_it_is_stored_and_only_there(reduce, n, backend):
    case = BATTERY["every_length"]
    X = dense_operand(case, n).astype(np.float32)
    X[3] = np.nan
    C = gspmm(array(case, "float32"), jnp.asarray(X), reduce=reduce, schedule=row_schedule(backend))
    touched = case.dense()[:, 3] != 0
    assert touched.any() and not touched.all()
    np.testing.assert_array_equal(np.isnan(C), np.broadcast_to(touched[:, None], C.shape))


@pytest.mark.parametrize("op", ["mul", "add", "sub", "div", "copy"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_infinities_as_in_the_loops(op, reduce, backend):
    case, rng = BATTERY["every_length"], np.random.default_rng(2)
    values = rng.choice(
        [1.0, 2.0, np.inf, -np.inf, 0.0, -1.0], case.nnz, p=[0.4, 0.3, *[0.075] * 4]
    )
    X = rng.choice([1.0, -2.0, np.inf, -np.inf, 0.0], (case.shape[1], 5), p=[0.4, 0.3, *[0.1] * 3])
    A = array(case, "float32").with_values(cast(values, "float32"))
    with np.errstate(all="ignore"):
        expected, _ = oracle(case, "float32", X, op, reduce, values=values)
    schedule = schedule_of(backend, reduce)
    C = gspmm(A, cast(X, "float32"), op=op, reduce=reduce, schedule=schedule)
    assert np.isfinite(expected).any() and not np.isfinite(expected).all()
    np.testing.assert_allclose(C, expected, rtol=1e-6)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_rows_of_infinities_are_not_empty_rows(reduce, backend):
    case = from_row_lengths("infinities", 3, [3, 0, 1])
    sign = -np.inf if reduce == "max" else np.inf
    A = array(case, "float32").with_values(np.full(4, sign, np.float32))
    C = gspmm(A, jnp.ones((3, 2), jnp.float32), reduce=reduce, schedule=row_schedule(backend))
    np.testing.assert_array_equal(C, [[sign] * 2, [0, 0], [sign] * 2])


@pytest.mark.parametrize("format", [CSC, COO], ids=str)
@pytest.mark.parametrize(("op", "reduce"), [("mul", "max"), ("div", "mean"), ("add", "sum")])
def test_formats_agree(op, reduce, format):
    case = BATTERY["every_length"]
    A = array(case, "float32")
    for transpose in (False, True):  # fewer columns of A^T B are summed in another order
        X = jnp.asarray(dense_operand(case, 19, transpose), jnp.float32)
        product = lambda A, t=transpose, X=X: gspmm(A, X, op=op, reduce=reduce, transpose=t)
        np.testing.assert_array_equal(product(A.asformat(format)), product(A))
        np.testing.assert_array_equal(product(A.T, not transpose), product(A))


def test_the_default_is_spmm_and_copy_does_not_read_the_values():
    case = BATTERY["skewed"]
    A, X = array(case, "float32"), jnp.asarray(dense_operand(case, 5), jnp.float32)
    np.testing.assert_array_equal(gspmm(A, X), spmm(A, X))
    for reduce in ("sum", "mean", "max", "min"):
        bools = A.with_values(jnp.zeros(A.nnz, bool))
        nan = A.with_values(jnp.full(A.nnz, jnp.nan, jnp.float32))
        C = gspmm(A, X, op="copy", reduce=reduce)
        assert np.isfinite(C).all()
        np.testing.assert_array_equal(gspmm(bools, X, op="copy", reduce=reduce), C)
        np.testing.assert_array_equal(gspmm(nan, X, op="copy", reduce=reduce), C)
    mean = gspmm(A, X, op="copy", reduce="mean")
    rows = row_sum(A.with_values(jnp.ones(A.nnz, jnp.float32)))[:, None]
    total = gspmm(A, X, op="copy")
    np.testing.assert_allclose(mean, total / jnp.maximum(rows, 1), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_round_once(dtype):
    # The sum of the values overflows float16, or the integer dtype; the whole result does not.
    case = from_row_lengths("many", 256, [256])
    A = array(case, dtype).with_values(jnp.full(256, 300, dtype))
    X = jnp.full((256, 3), -299, dtype) if dtype == "float16" else jnp.full((256, 3), -298, dtype)
    difference = 1 if dtype == "float16" else 2
    assert (gspmm(A, X, op="add") == 256 * difference).all()
    assert (gspmm(A, -X, op="sub", reduce="mean") == -difference).all()
    assert (gspmm(A, X, op="copy", reduce="mean") == X[0, 0]).all()


def test_integers_run_by_the_reference():
    case = BATTERY["every_length"]
    A = array(case, "float32").with_values(np.arange(case.nnz, dtype=np.int32))
    X = jnp.ones((case.shape[1], 2), jnp.int32)
    C = gspmm(A, X, reduce="max")
    ends = np.where(np.diff(case.row_offsets) > 0, case.row_offsets[1:] - 1, 0)
    np.testing.assert_array_equal(C, np.repeat(ends[:, None], 2, 1))
    assert gspmm(A, X, reduce="mean", schedule=Reference()).dtype == jnp.float64
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match=r"schedule=Reference\(\)"):
            gspmm(A, X, reduce="max", schedule=CpuTile())


def test_one_number_of_each_node():
    """X [k] gives [m], with the values of entries too, as A @ x does."""
    case = BATTERY["every_length"]
    A, x = array(case, "float32"), jnp.arange(float(case.shape[1]), dtype=jnp.float32)
    for options in (dict(op="add", reduce="max"), dict(op="copy"), dict(values=2 * A.values)):
        np.testing.assert_array_equal(gspmm(A, x, **options), gspmm(A, x[:, None], **options)[:, 0])
    back = gspmm(A, jnp.ones(case.shape[0], jnp.float32), transpose=True)
    np.testing.assert_allclose(back, A.sum(axis=0), rtol=1e-5)
    with pytest.raises(ValueError, match="X must have shape"):
        gspmm(A, x[1:])
    with pytest.raises(ValueError, match="values must have shape"):
        gspmm(A, x, values=jnp.ones((A.nnz + 1, 2), jnp.float32))


def test_mixed_dtypes_promote():
    case = BATTERY["skewed"]
    with jax.numpy_dtype_promotion("standard"):
        A, X = array(case, jnp.bfloat16), jnp.ones((case.shape[1], 3), jnp.float32)
        C = gspmm(A, X, reduce="max")
        assert C.dtype == jnp.float32
        np.testing.assert_array_equal(C, gspmm(A.astype(jnp.float32), X, reduce="max"))
        assert gspmm(A.astype(jnp.float32), X.astype(jnp.bfloat16), op="copy").dtype == jnp.bfloat16


def test_a_corrupted_output_fails_the_oracle():
    case = BATTERY["every_length"]
    for op, reduce in (("mul", "max"), ("add", "mean")):
        C = np.array(check(case, "float32", 16, op, reduce, False, None))
        X = dense_operand(case, 16)
        for wrong in (C[5, 3] * (1 + 1e-4), 0.0, np.nan):
            corrupted = C.copy()
            corrupted[5, 3] = wrong
            with pytest.raises(AssertionError, match=r"first at \(5, 3\)"):
                assert_within(corrupted, *oracle(case, "float32", X, op, reduce))
