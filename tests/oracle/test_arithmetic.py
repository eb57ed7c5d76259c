"""Sums, differences and products of two sparse arrays, parts and sums of one, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from format_invariants import dense_of

from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, SparseArray, graphs, row_sum

FORMATS = [CSR, CSC, COO, COO.transposed, CSF(2), CVS(4), CVS(3).transposed, BCSR(4, 3)]
FORMATS += [BCSR(2, 5).transposed]
formats = pytest.mark.parametrize("format", FORMATS, ids=str)
# The sizes that matter: nothing, padding (NaN), rows without entries.
CASES = ["no_rows", "no_columns", "no_entries", "only_padding", "padded", "one_column"]


def pair(shape, dtype=np.float64):
    """Two matrices of small integers, so that sums are exact; one has an empty row and an empty
    column."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape) * (rng.random(shape) < 0.4) for _ in range(2))
    a[2], b[:, 1] = 0, 0
    return a.astype(dtype), b.astype(dtype)


def same(A, dense):
    A.checked()
    np.testing.assert_array_equal(dense_of(A), dense)


@formats
def test_two_patterns(format):
    a, b = pair((10, 7))
    A, B = (SparseArray.from_dense(x, format=format) for x in (a, b))
    every = lambda A, B: (A + B, A - B, A * B, A.maximum(B), A.minimum(B))
    expected = (a + b, a - b, a * b, np.maximum(a, b), np.minimum(a, b))
    for C, dense in zip(every(A, B), expected, strict=True):
        assert (C.shape, C.format, C.dtype) == (A.shape, format, A.dtype)
        same(C, dense)
    if format in (CSR, CSC, COO, COO.transposed):  # traced: in a capacity for both
        for C, dense in zip(jax.jit(every)(A, B), expected, strict=True):
            assert (C.format, C.nnz, C.is_checked) == (format, A.nnz + B.nnz, True)
            same(C, dense)
    # The stored entries are the union or the intersection; zeros that arise are stored too.
    if not format.block_shape:
        assert (A + B).nnz == (A - B).nnz == np.count_nonzero((a != 0) | (b != 0))
        assert (A * B).nnz == np.count_nonzero((a != 0) & (b != 0))
    same(A.T + B.T, (a + b).T)
    same(sum([A, B, A]), 2 * a + b)
    same(A.maximum(-0.5), np.maximum(a, -0.5))
    same(jax.jit(lambda A: A.minimum(0))(A), np.minimum(a, 0))
    same(0 - A, -a)
    same(A + 0.0, a)


def test_extrema_with_numbers_that_the_dtype_does_not_hold():
    for dtype, x in (("uint8", -1), ("uint8", 300), ("int8", 300), ("int8", np.int64(-(2**40)))):
        a = np.asarray([[100, 0], [0, 1]], dtype)
        A = SparseArray.from_dense(a)
        with jax.numpy_dtype_promotion("standard"):
            found = A.maximum(x) if x < 0 else A.minimum(x)
        np.testing.assert_array_equal(found.todense(), a)
        assert found.dtype == (np.result_type(dtype, x) if isinstance(x, np.int64) else dtype)


@pytest.mark.parametrize("format", [CSR, COO.transposed, BCSR(4, 3)], ids=str)
def test_comparisons(format):
    """With numbers of which zero compares false. A has stored zeros too."""
    a, _ = pair((10, 7))
    A = SparseArray.from_dense(a, format=format) * (a != 3).astype(float)
    a[a == 3] = 0
    for C, dense in [
        *((A > 0.1, a > 0.1), (A >= 2, a >= 2), (A < -0.1, a < -0.1), (A <= -2, a <= -2)),
        *((A == 2, a == 2), (A != 0, a != 0), (np.float64(0.1) < A, a > 0.1)),
    ]:
        assert (C.dtype, C.format, C.nnz) == (bool, format, A.nnz)
        same(C, dense)
    assert A.count_nonzero() == np.count_nonzero(a)
    counts = jax.jit(lambda A: A.count_nonzero(0))(A)
    np.testing.assert_array_equal(counts, np.count_nonzero(a, 0))


def test_methods_of_scipy():
    a, _ = pair((10, 7))
    A = SparseArray.from_dense(a)
    same(A.power(2), a**2)
    for axes in (None, (1, 0), [-1, -2], (1, -2), np.array([1, 0])):
        same(A.transpose(axes), a.T)
    same(A.transpose(1, 0), a.T)
    for B, of in ((A.tocsr(), CSR), (A.tocsc(), CSC), (A.tocoo(), COO)):
        assert B.format == of
        same(B, a)
    np.testing.assert_allclose(A.dot(np.ones(7)), a.sum(1), rtol=1e-6)
    assert +A is A and A.copy() is A


def test_entries_that_repeat_compare_as_their_sum():
    edges = np.array([[0, 0, 1], [1, 1, 0]])
    A = graphs.from_edges(edges, np.array([1.0, -1, 2]), num_nodes=2, duplicates="keep")
    assert A.nnz == 3 and int(A.count_nonzero()) == 1
    same(A != 0, A.todense() != 0)


@formats
def test_as_many_in_each_row_elsewhere(format):
    """Two patterns that differ in the last index arrays only."""
    left, right = np.zeros((2, 12, 12))
    left[:, :6], right[:, 6:] = 1, 2
    A, B = (SparseArray.from_dense(x, format=format) for x in (left, right))
    same(A + B, left + right)
    assert not dense_of(A * B).any()


def test_wide():
    A, B = (
        SparseArray.from_coordinates(np.array([[0, j], [1, 0]]), np.ones(2), (2, 1 << 17))
        for j in (0, 1 << 16)
    )
    assert (A + B).nnz == 3 and float((A + B).sum()) == 4


@formats
def test_one_pattern(format):
    a, _ = pair((10, 7))
    A = SparseArray.from_dense(a, format=format)
    C = A + A.with_values(3 * A.values)
    assert C.index_arrays is A.index_arrays and C.transposed is A.transposed
    same(C, 4 * a)
    apart = SparseArray.from_dense(a, format=format)  # equal index arrays, other objects
    D = A - apart * 3
    assert D.index_arrays is A.index_arrays
    same(D, -2 * a)
    same(A * apart, a * a)
    squared = jax.jit(lambda A: (A * A + A).values)(A)  # traced, and identical objects
    np.testing.assert_array_equal(squared, A.values**2 + A.values)


def test_traced_duplicates_are_summed():
    """What is not linear in the elements sees each once; the rest adds up."""
    offsets, columns = jnp.asarray([0, 3, 3, 5]), jnp.asarray([2, 2, 0, 1, -1])
    values, other = jnp.asarray([1.0, 2.0, 3.0, 4.0, 9.0]), SparseArray.from_dense(np.eye(3))
    a = np.array([[3.0, 0, 3], [0, 0, 0], [0, 4, 0]])

    def f(v, offsets, columns, B):
        A = SparseArray.from_arrays(v, offsets, columns, shape=(3, 3))
        every = (A * A, A**2, abs(-A), A.maximum(-A), A + B, A * B, A.with_values(-v) - A)
        return [x.todense() for x in every]

    found = jax.jit(f)(values, offsets, columns, other)
    eye = np.eye(3)
    for x, dense in zip(found, (a * a, a**2, a, a, a + eye, a * eye, -2 * a), strict=True):
        np.testing.assert_array_equal(x, dense)
    infinite = other * jnp.inf
    product = jax.jit(lambda A, B: (A * B).todense())(infinite, SparseArray.from_dense(a))
    np.testing.assert_array_equal(product, np.where((a != 0) & (eye != 0), np.inf, 0))

    def twin(v):
        x = jnp.zeros((3, 3)).at[[0, 0, 0, 2], [2, 2, 0, 1]].add(v[:4])
        return [x * x, x**2, abs(-x), jnp.maximum(x, -x), x + eye, x * eye, -2 * x]

    total = lambda found: sum(jnp.sum(x**3) for x in found)
    slope = jax.jit(jax.grad(lambda *given: total(f(*given))))(values, offsets, columns, other)
    expected = jax.jit(jax.grad(lambda v: total(twin(v))))(values)
    np.testing.assert_allclose(slope, expected, rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_padding_and_nothing(name):
    case = BATTERY[name]
    dense, A = case.dense(), array(case, jnp.float64)
    other = np.zeros(case.shape)
    other[::2] = 1
    B = SparseArray.from_dense(other)
    same(A + B, dense + other)
    same(B - A, other - dense)
    same(A * B, dense * other)
    same(A + A, 2 * dense)
    for axis in (None, 0, 1):
        np.testing.assert_allclose(A.sum(axis), dense.sum(axis), rtol=1e-14)
    for k in (0, 1, 2, 50, -1, -3, -50):
        beyond = k >= dense.shape[1] or -k >= dense.shape[0]  # NumPy: empty or an error
        expected = np.zeros(0) if beyond and k else dense.diagonal(k)
        np.testing.assert_array_equal(A.diagonal(k), expected)
    m = case.shape[0]
    for cut in (slice(1, m - 1), slice(-2, 99), slice(0, 0)):
        same(A[cut], dense[cut])


def test_sums_of_narrow_floats_are_wide_within():
    for name, total in (("float8_e4m3fn", 288), ("bfloat16", 300), ("float16", 300)):
        A = SparseArray.from_dense(np.ones((1, 300)), dtype=jnp.dtype(name))
        assert A.sum().dtype == A.sum(1).dtype == jnp.dtype(name)
        assert float(A.sum()) == float(A.sum(1)[0]) == total


def test_three_modes():
    a, b = pair((3, 4, 5))
    for format in (COO, CSF(3), CSF(3, order=(2, 0, 1))):
        A, B = (SparseArray.from_dense(x, format=format) for x in (a, b))
        same(A + B, a + b)
        same(A * B, a * b)
        same(A[1:], a[1:])
        for axis in (None, (), 1, (0, -1), (-2, 2, 0)):
            np.testing.assert_array_equal(A.sum(axis), a.sum(axis))
            assert A.sum(axis, keepdims=True).shape == a.sum(axis, keepdims=True).shape
        np.testing.assert_array_equal(A.mean((2, 1), keepdims=True), a.mean((2, 1), keepdims=True))
    v, w = (SparseArray.from_dense(x[0, 0], format=COO) for x in (a, b))
    same(v - w, (a - b)[0, 0])
    same(v[2:], a[0, 0, 2:])
    assert v.sum(0) == v.sum(-1) == a[0, 0].sum()


@pytest.mark.parametrize("format", [CSR, COO, CSF(2), CVS(3).transposed, BCSR(4, 3)], ids=str)
def test_sums_and_diagonal(format):
    a, _ = pair((10, 7))
    A = SparseArray.from_dense(a, format=format)
    for axis in (None, 0, -1):
        np.testing.assert_array_equal(A.sum(axis), a.sum(axis))
    np.testing.assert_array_equal(A.T.sum(-2), a.sum(1))
    np.testing.assert_array_equal(A.diagonal(), a.diagonal())
    np.testing.assert_array_equal(A.T.diagonal(), a.diagonal())
    with jax.enable_x64(False):  # no index dtype holds such a size
        narrow = A.astype(jnp.float32)
        assert narrow.diagonal(2**40).shape == narrow.diagonal(-(2**40)).shape == (0,)


@pytest.mark.parametrize("format", [CSR, CVS(3).transposed, BCSR(4, 3)], ids=str)
def test_numpys_sum_and_mean(format):
    a, _ = pair((10, 8))
    A = SparseArray.from_dense(a, format=format)
    for of in (np.sum, np.mean):
        for axis in (None, (), 0, (-1, 0)):
            for options in ({}, dict(keepdims=True), dict(dtype=np.float32)):
                got, want = (of(x, axis, **options) for x in (A, a))
                assert (got.shape, got.dtype) == (want.shape, want.dtype)
                np.testing.assert_allclose(got, want, rtol=1e-6)


def test_dtype_of_sums_and_means():
    x = jnp.asarray([[2, 0, -2], [100, 100, 0]], jnp.int8)
    A = SparseArray.from_dense(x)
    for axis in (None, 0):
        for dtype in (None, jnp.int8, jnp.bool_, jnp.float32, jnp.complex64):
            for got, want in ((A.sum, x.sum), (A.mean, x.mean)):
                if dtype == jnp.bool_ and got == A.mean:
                    for of in (got, want):
                        with pytest.raises(TypeError):
                            of(axis, dtype)
                    continue
                got, want = got(axis, dtype), want(axis, dtype)
                assert got.dtype == want.dtype
                np.testing.assert_allclose(got, want, rtol=1e-6)
    # Neither entries before the addition nor a sum before the division may be rounded.
    wide = SparseArray.from_dense(np.full((1, 8), 1 + 2**-11, np.float32))
    assert float(wide.sum(1, jnp.float16)[0]) == np.float16(8 * (1 + 2**-11))
    narrow = SparseArray.from_dense(np.full((1, 4), 30000, np.float16))
    assert narrow.mean() == narrow.mean(1)[0] == 30000
    assert np.isnan(SparseArray.from_dense(np.zeros((0, 3))).mean())


def test_means_over_more_numbers_than_int32_holds():
    n = 46341
    with jax.enable_x64(False):
        for dtype in (np.float32, np.int32):
            A = SparseArray.from_coordinates([[0, 0], [n - 1, 5]], np.full(2, 3, dtype), (n, n))
            np.testing.assert_allclose(A.mean(), 6 / n**2, rtol=1e-6)
            np.testing.assert_allclose(A.mean(0)[:6], [3 / n, 0, 0, 0, 0, 3 / n], rtol=1e-6)


@formats
def test_rows(format):
    a, _ = pair((10, 7))
    A = SparseArray.from_dense(a, format=format)
    assert A[:] is A and A[-99:99] is A
    side = (*format.block_shape, 1, 1)[format.modes.index(0)]
    for i, j in ((side, 2 * side), (side, 99), (-10, 5 // side * side), (9, 3), (50, 60)):
        R = A[i:j]
        assert (R.shape, R.format) == (a[i:j].shape, format)
        same(R, a[i:j])


def test_dtypes():
    a, b = pair((6, 5), np.int8)
    for dtype in (jnp.int8, jnp.bool_, jnp.complex64, jnp.bfloat16):
        x, y = (jnp.asarray(x.astype(dtype)) for x in (a, b))
        A, B = SparseArray.from_dense(x), SparseArray.from_dense(y)
        for C, expected in ((A + B, x + y), (A * B, x * y)):
            assert C.dtype == expected.dtype
            np.testing.assert_array_equal(C.todense(), expected)
        np.testing.assert_array_equal(A.diagonal(), jnp.diagonal(x))
        for axis in (None, 1):
            expected = jnp.sum(x, axis)
            assert A.sum(axis).dtype == expected.dtype
            np.testing.assert_array_equal(A.sum(axis), expected)
    with jax.numpy_dtype_promotion("standard"):
        C = SparseArray.from_dense(a) + SparseArray.from_dense(b.astype(np.float32))
    assert C.dtype == jnp.float32
    same(C, a + b.astype(np.float32))


def test_narrow_sums_are_carried_in_float32():
    # In float16 the sum would stay at 2048, and an overflow on the way would not come back.
    A = SparseArray.from_dense(np.ones((1, 4096), np.float16))
    assert A.sum() == A.sum(1)[0] == A.T.sum(0)[0] == 4096
    B = A.with_values(A.values.at[:2].set(40000).at[2:4].set(-40000))
    assert B.sum() == B.sum(-1)[0] == 4092
    T = SparseArray.from_dense(np.ones((2, 3000, 2), np.float16), format=COO)
    assert T.sum(1).dtype == jnp.float16
    np.testing.assert_array_equal(T.sum(1), np.full((2, 2), 3000))


def test_nan_stays_where_it_is_stored():
    a = np.array([[np.nan, 0, 1], [0, np.inf, 0]])
    A, B = SparseArray.from_dense(a), SparseArray.from_dense(np.eye(2, 3, 1))
    np.testing.assert_array_equal((A * B).todense(), np.zeros((2, 3)))
    np.testing.assert_array_equal((A - B).todense(), a - np.eye(2, 3, 1))
    np.testing.assert_array_equal(A.sum(0), [np.nan, np.inf, 1])
    assert np.isnan(A.sum()) and A[1:].sum() == np.inf and row_sum(A[1:])[0] == np.inf


def test_names_of_scipy():
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((4, 4)) + 1j * rng.standard_normal((4, 4))
    dense[rng.random((4, 4)) < 0.4] = 0
    A = SparseArray.from_dense(dense)
    peer = A.to_scipy()
    for name in ("H", "real", "imag"):
        expected = peer.T.conj() if name == "H" else getattr(peer, name)
        same(getattr(A, name), expected.toarray())
    same(A.conj(), peer.conj().toarray())
    np.testing.assert_allclose(A.multiply(A).todense(), dense * dense)
    np.testing.assert_array_equal(A.toarray(), dense)
    np.testing.assert_allclose([A.trace(), A.trace(1)], [dense.trace(), dense.trace(1)])
    R = A.real
    assert R.dtype == np.float64 and R.conj() is R and R.H.values is R.values
