"""Products with dense arrays by broadcasting, mixed formats, powers, extrema, reshapes, products
with leading axes: against NumPy and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from format_invariants import dense_of, integers
from jax.test_util import check_grads

from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, SparseArray, einsum
from sgap_jax.formats.stored import CheckedIndices, CheckedLevel

FORMATS = [CSR, CSC, COO, CSF(2), CVS(2), BCSR(3, 2).transposed]
formats = pytest.mark.parametrize("format", FORMATS, ids=str)
SHAPES = [(7, 1), (1, 6), (6,), (7, 6), (1, 1), (1,)]


@formats
def test_dense_factors(format):
    a, rng = integers(7, 6), np.random.default_rng(1)
    A = SparseArray.from_dense(a, format=format)
    for shape in SHAPES:
        x = rng.integers(1, 5, shape).astype(float)
        for found, expected in ((A * x, a * x), (jnp.asarray(x) * A, x * a), (A / x, a / x)):
            assert found.index_arrays is A.index_arrays and found.format == format
            np.testing.assert_array_equal(dense_of(found), expected)
    np.testing.assert_array_equal(dense_of(A * [1.0, 2, 3, 4, 5, 6]), a * np.arange(1.0, 7))
    scipys = (sp.csr_array(a) / np.zeros((7, 6))).toarray()
    np.testing.assert_array_equal(dense_of(A / np.zeros((7, 1)))[a != 0], scipys[a != 0])
    with jax.numpy_dtype_promotion("standard"):
        assert (A * np.float32([[2]])).dtype == np.float64


@pytest.mark.parametrize("format", [CSR, CVS(2)], ids=str)
def test_derivatives_of_dense_factors(format):
    """Padding holds anything, and no derivative sees it: x has a zero where padding would look."""
    a = integers(7, 6)
    A = SparseArray.from_dense(a, format=format)
    if format == CSR:
        A = SparseArray.from_dense(a, nse=30)
        A = A.with_values(A.values.at[-1].set(jnp.nan))

    def f(v, x, y, like):
        X = A.with_values(v)
        return jnp.sum(like * ((X * x[:, None]) / y).todense())

    like = jnp.asarray(np.random.default_rng(0).normal(size=(7, 6)))
    x, y = jnp.arange(7.0), jnp.arange(1.0, 7.0).at[0].set(0.5)
    of_v, of_x, of_y = jax.jit(jax.grad(f, (0, 1, 2)))(A.values, x, y, like)
    dense = lambda a, x, y: jnp.sum(like * (a * x[:, None] / y[None]))
    expected = jax.jit(jax.grad(dense, (0, 1, 2)))(jnp.asarray(a), x, y)
    at = expected[0].at[A.coordinates()].get(mode="fill", fill_value=0)
    np.testing.assert_allclose(of_v.reshape(-1), at, rtol=1e-12)
    np.testing.assert_allclose(of_x, expected[1], rtol=1e-12)
    np.testing.assert_allclose(of_y, expected[2], rtol=1e-12)
    stored = jax.jit(lambda v, x: ((A.with_values(v) * x[:, None]) * x[:, None]).sum())
    check_grads(stored, (jnp.where(jnp.isnan(A.values), 0, A.values), x), order=2, rtol=1e-4)


def test_a_factor_under_vmap_and_of_a_traced_structure():
    a = integers(7, 6)
    A = SparseArray.from_dense(a)
    X = jnp.asarray(np.random.default_rng(0).integers(1, 5, (3, 7, 1)).astype(float))
    found = jax.jit(lambda A, X: jax.vmap(lambda x: (A * x).todense())(X))(A, X)
    np.testing.assert_array_equal(found, a * np.asarray(X))


@formats
def test_mixed_formats(format):
    a, b = integers(6, 6), integers(6, 6, 1)
    A, B = SparseArray.from_dense(a, format=format), SparseArray.from_dense(b)
    for found, expected in ((A + B, a + b), (A - A.T, a - a.T), (A * B, a * b), (A + A.T, a + a.T)):
        assert found.format == format
        found.checked()
        np.testing.assert_array_equal(dense_of(found), expected)
    assert (B - A).format == CSR
    doubled = jax.jit(lambda v: (A.with_values(v) + A.T.with_values(A.values)).todense())
    if format == CSR:
        np.testing.assert_array_equal(doubled(A.values), a + a.T)
    of = jax.jit(jax.grad(lambda v: jnp.sum((B.with_values(v) + A).todense() ** 2)))(B.values)
    np.testing.assert_array_equal(of, 2 * (a + b)[np.nonzero(b)])


def test_powers():
    a = integers(7, 6)
    A = SparseArray.from_dense(a)
    for n in (2, 1, 3.0, np.int32(2), jnp.array(2)):
        np.testing.assert_array_equal(dense_of(A**n), (sp.csr_array(a) ** int(n)).toarray())
    np.testing.assert_allclose(dense_of(abs(A) ** 0.5), abs(a) ** 0.5)
    np.testing.assert_array_equal(
        jax.grad(lambda v: (A.with_values(v) ** 3).sum())(A.values), 3 * A.values**2
    )


MATRICES = {
    "mixed": integers(7, 6),
    "all negative": -np.ones((4, 3)),
    "negative but one": np.where(
        np.arange(12).reshape(4, 3) == 4, 0, -1.0 - np.arange(12.0).reshape(4, 3)
    ),
    "positive": np.ones((3, 4)),
    "empty": np.zeros((3, 4)),
    "one row": np.array([[0.0, -2, 5, 5]]),
    "nan": np.array([[0, -1, np.nan, np.nan], [np.nan, 0, 3, 0], [1, 1, 1, 2.0]]),
    "infinite": np.array([[-np.inf, -1], [-np.inf, -np.inf], [0, np.inf]]),
    "integers": integers(5, 5, 3, np.int32),
    "bools": integers(5, 5, 3) > 1,
}


@pytest.mark.parametrize("name", MATRICES)
def test_extrema(name):
    a = MATRICES[name]
    for format in (CSR, CSC) if name != "mixed" else FORMATS:
        A = SparseArray.from_dense(a, format=format)
        for axis in (None, 0, 1, -1, -2):
            for op in ("max", "min", "argmax", "argmin"):
                found, expected = getattr(A, op)(axis), getattr(a, op)(axis)
                assert found.dtype == expected.dtype, op
                np.testing.assert_array_equal(found, expected, err_msg=f"{op} {axis}")
    assert np.max(A) == A.max() or name == "nan"
    for axis in (None, 0, 1):
        assert A.max(axis, keepdims=True).shape == a.max(axis, keepdims=True).shape
        assert A.argmin(axis, keepdims=True).shape == a.argmin(axis, keepdims=True).shape


@pytest.mark.parametrize("long", [0, 1])
def test_extrema_of_few_entries_along_a_great_dimension(long):
    """Of the rows (columns) that store nothing only the first one is looked at, which has the first
    zero: `argmax` may be there. An unchecked matrix stores (0, 0) twice; one entry is padding."""
    a = np.zeros((70_000, 3))
    a[[0, 1, 5, 69_999], [0, 0, 2, 1]] = [-1.0, -2, 4, -3]
    rows, columns = np.int32([0, 0, 1, 5, 69_999, 70_000]), np.int32([0, 0, 0, 2, 1, 0])
    levels = (np.int32([0, 6]), rows), (columns,)
    A = SparseArray(jnp.array([-3.0, 2, -2, 4, -3, 9]), levels, None, a.shape, COO)
    a, A = (a.T, A.T) if long else (a, A)
    if long:
        np.testing.assert_array_equal(A.argmax(1), a.argmax(1))
    else:
        assert A.argmin() == a.argmin()
    both = (np.int32([0, 3]), np.int32([0, 5, 70_000])), (np.int32([0, 7, 0]),)
    B = SparseArray(jnp.array([-1.0, -2, 9]), both, None, (70_000, 70_000), COO)
    assert (B.max(), B.min()) == (0, -2)


def test_a_dimension_that_int32_offsets_do_not_address():
    """2^31 - 1 rows: extrema and pairs work, in memory for the entries."""
    most = 2**31 - 1
    rows, columns = np.array([0, 5, most - 1], np.int32), np.array([2, 1, 0], np.int32)
    levels = CheckedLevel(np.int32([0, 3]), rows), CheckedIndices(columns)
    A = SparseArray(jnp.array([-1.0, -2, 3]), levels, None, (most, 3), COO)
    assert A.is_checked and A.max() == 3 and A[5, 1] == -2
    np.testing.assert_array_equal(A.argmax(axis=0), [most - 1, 0, 1])
    np.testing.assert_array_equal(A[[0, -1, 7], [2, 0, 0]], [-1, 3, 0])
    for call, name in (
        (lambda: A.max(axis=1), "SparseArray.max: axis=1"),
        (lambda: A.asformat(CSR), "SparseArray.asformat: CSR"),
        (lambda: A.rows([1, 2]), "SparseArray.rows: COO"),
    ):
        with pytest.raises(NotImplementedError, match=name):
            call()


def test_extrema_of_stored_zeros_padding_and_duplicates():
    a = np.array([[-1.0, 0, -2], [-3, -4, -5]])
    A = SparseArray.from_coordinates(np.argwhere(a < 9), a.reshape(-1), (2, 3), nse=9)
    A = A.with_values(A.values.at[6:].set(jnp.nan))
    assert A.max() == 0 and A.argmax() == 1 and list(A.max(1)) == [0, -3]

    @jax.jit
    def twice(values, offsets, columns):
        """Entry (0, 1) twice, of which the sum is the greatest; one out of range, a row of none."""
        A = SparseArray.from_arrays(values, offsets, columns, shape=(3, 2))
        return A.max(), A.argmax(), A.min(1), A.sum_duplicates().todense()

    greatest, where, least, dense = twice(
        jnp.array([2.0, 2.0, 3.0, 9.0]), jnp.array([0, 3, 4, 4]), jnp.array([1, 1, 0, 7])
    )
    assert (greatest, where) == (4, 1) and list(least) == [3, 0, 0]
    np.testing.assert_array_equal(dense, [[3, 4], [0, 0], [0, 0]])


def test_derivatives_of_extrema():
    a = integers(7, 6) + np.random.default_rng(0).random((7, 6)) * (integers(7, 6) != 0)
    A = SparseArray.from_dense(a)
    for axis in (None, 0, 1):
        f = lambda v, axis=axis: jnp.sum(
            A.with_values(v).max(axis) ** 2 + A.with_values(v).min(axis)
        )
        dense = lambda a, axis=axis: jnp.sum(a.max(axis) ** 2 + a.min(axis))
        found = jax.jit(jax.grad(f))(A.values)
        expected = np.asarray(jax.jit(jax.grad(dense))(jnp.asarray(a)))[np.nonzero(a)]
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@formats
def test_reshape(format):
    a = integers(6, 8)
    A = SparseArray.from_dense(a, format=format)
    for shape in ((8, 6), (4, -1), (48,), (2, 3, 8), (1, 48), (6, 8)):
        for found in (A.reshape(shape), A.reshape(*shape)):
            found.checked()
            np.testing.assert_array_equal(found.todense(), a.reshape(shape))
    assert A.reshape(6, 8) is A
    assert A.reshape(8, 6).format == (format if not format.block_shape else CSR)
    assert A.reshape(-1).reshape(6, 8).format == CSR
    if format in (CSR, CSC, COO):
        B = SparseArray.from_dense(a, format=format, nse=60)
        found = jax.jit(lambda B: B.reshape(4, -1))(B)
        np.testing.assert_array_equal(found.checked().todense(), a.reshape(4, 12))
        of = jax.jit(jax.grad(lambda v: jnp.sum(A.with_values(v).reshape(12, 4).todense() ** 2)))(
            A.values
        )
        np.testing.assert_array_equal(of, 2 * A.values)


@pytest.mark.parametrize("format", [CSR, CSC, COO, CVS(2), BCSR(3, 2)], ids=str)
def test_zeros_and_duplicates(format):
    a = integers(7, 6)
    A = SparseArray.from_dense(a, format=format)
    zeroed = A * (np.arange(7) > 2)[:, None].astype(float)
    kept = np.where(np.arange(7)[:, None] > 2, a, 0)
    B = zeroed.eliminate_zeros()
    same = SparseArray.from_dense(kept, format=format)
    assert B.nnz == same.nnz and B.format == format and B.sum_duplicates() is B
    np.testing.assert_array_equal(dense_of(B.checked()), kept)
    rows, columns = zeroed.nonzero()
    np.testing.assert_array_equal((rows, columns), np.nonzero(kept))
    if format.block_shape:
        return
    small = jax.jit(lambda A: A.eliminate_zeros(nse=3))(zeroed)
    assert small.nnz == 3 and int(small.overflow) == np.count_nonzero(kept) - 3
    whole = jax.jit(lambda A: A.eliminate_zeros())(zeroed)
    np.testing.assert_array_equal(whole.checked().todense(), kept)
    assert int(whole.row_lengths.sum()) == np.count_nonzero(kept)
    assert zeroed.eliminate_zeros(nse=40).nnz == 40


def test_leading_axes():
    a = integers(7, 6)
    A, rng = SparseArray.from_dense(a), np.random.default_rng(0)
    x = rng.integers(-3, 4, 6).astype(float)
    assert A[3] @ x == x @ A[3] == a[3] @ x
    for shape in ((3, 6, 4), (2, 1, 6, 1), (0, 6, 4), (2, 6, 0)):
        B = rng.integers(-3, 4, shape).astype(float)
        np.testing.assert_array_equal(A @ B, a @ B)
        np.testing.assert_array_equal(
            jax.jit(lambda A, B: B.swapaxes(-1, -2) @ A.T)(A, B), B.swapaxes(-1, -2) @ a.T
        )
    B = jnp.asarray(rng.normal(size=(2, 3, 6, 2)))
    of_v, of_B = jax.jit(jax.grad(lambda v, B: jnp.sum((A.with_values(v) @ B) ** 2), (0, 1)))(
        A.values, B
    )
    dense = jax.jit(jax.grad(lambda a, B: jnp.sum((a @ B) ** 2), (0, 1)))(jnp.asarray(a), B)
    np.testing.assert_allclose(of_v, dense[0][np.nonzero(a)], rtol=1e-12)
    np.testing.assert_allclose(of_B, dense[1], rtol=1e-12)


def test_an_ellipsis_in_einsum():
    a = integers(7, 6)
    A, rng = SparseArray.from_dense(a), np.random.default_rng(0)
    B, x, C = rng.normal(size=(2, 3, 6, 4)), rng.normal(size=6), rng.normal(size=(3, 7, 4))
    for text, operands in (
        ("ij,...jk->...ik", (a, B)),
        ("...jk,ij->...ik", (B, a)),
        ("ij,...jk", (a, B)),
        ("ij,...jk,...ik->...", (a, B, C)),
        ("...j,j->...", (a, x)),
        ("...ij,...j->...i", (a, rng.normal(size=(2, 6)))),
        ("...,...->...", (a, np.ones((7, 6)))),
        ("ij,j...->i...", (a, x)),
    ):
        found = einsum(text, *(A if x is a else x for x in operands))
        if isinstance(found, SparseArray):
            found = found.todense()
        np.testing.assert_allclose(found, np.einsum(text, *operands), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "shape", "error", "words"),
    [
        ("ij,....jk->...ik", (6, 4), ValueError, ["one ellipsis", "'....jk'"]),
        ("ij,...j...->...i", (6,), ValueError, ["one ellipsis"]),
        ("ij,...jk->ik", (2, 6, 4), ValueError, ["ellipsis in the output"]),
        ("ij,...jkl->...i", (6,), ValueError, ["more indices"]),
        ("i...,...->i", (6,), ValueError, ["ellipsis in the output"]),
        ("i...,...j->i...", (1, 6), NotImplementedError, ["sizes 6 and 1", "broadcast_to"]),
        ("ij...", (6,), ValueError, ["1 operands", "got 2"]),
    ],
)
def test_ellipses_that_are_refused(text, shape, error, words):
    A = SparseArray.from_dense(integers(7, 6))
    with pytest.raises(error) as caught:
        einsum(text, A, np.ones(shape))
    for word in words:
        assert word in str(caught.value)
