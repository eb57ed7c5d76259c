"""`A[...]` and `A.rows` against NumPy: any index on any format, traced ones, what is compiled,
derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_invariants import dense_of, integers
from jax.test_util import check_grads

from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, SparseArray, spmm

FORMATS = [CSR, CSC, COO, COO.transposed, CSF(2), CVS(2), BCSR(3, 2).transposed]
INDICES = [
    np.s_[3],
    np.s_[-1],
    np.s_[:, 2],
    np.s_[..., -1],
    np.s_[1:5:2, 1],
    np.s_[::2],
    np.s_[::-1, 1:6],
    np.s_[-3:99, -3:],
    np.s_[5:2, ::3],
    np.s_[[4, 0, 0, -1]],
    np.s_[:, [5, 5, 1]],
    np.s_[::-2, np.array([0, 3], np.uint8)],
    np.s_[[2, 3], 1],
    np.s_[[]],
    np.s_[np.arange(7) % 3 == 0],
    np.s_[1:, np.arange(6) > 3],
    np.s_[range(6, 0, -3)],
    np.s_[()],
    np.s_[...],
]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_as_numpy(format):
    a = integers(7, 6)
    A = SparseArray.from_dense(a, format=format)
    for index in INDICES:
        found = A[index]
        expected = a[list(index) if isinstance(index, range) else index]
        found.checked()
        assert found.shape == expected.shape and found.dtype == a.dtype
        got = dense_of(found) if found.ndim == 2 else found.todense()
        np.testing.assert_array_equal(got, expected, err_msg=str(index))
        if not format.block_shape and found.ndim == 2:
            assert found.format == format
    assert A[0:6].format == A[6:7].format == format or format.modes == (1, 0)
    for i, j in ((0, 0), (-1, 4), (3, -2), (np.int8(6), jnp.array(5))):
        assert A[i, j].shape == () and A[i, j] == a[int(i), int(j)]
    for mask in (a > 0, jnp.asarray(a == 0), np.zeros(a.shape, bool)):
        np.testing.assert_array_equal(A[mask], a[np.asarray(mask)])


@pytest.mark.parametrize("format", [COO, CSF(3)], ids=str)
def test_tensors(format):
    a = integers(24, 5).reshape(4, 6, 5)
    A = SparseArray.from_dense(a, format=format)
    for index in (1, np.s_[1:3], np.s_[:, ::2, -1], np.s_[..., [4, 1, 1]], np.s_[1, :, 2], [3, 0]):
        found = A[index]
        found.checked()
        np.testing.assert_array_equal(found.todense(), a[index])
        assert str(found.format) == (str(format) if found.ndim == 3 else "COO")
    assert A[1, 3, 4] == a[1, 3, 4] and A[2, 2].ndim == 1
    v = A[0, 3]
    np.testing.assert_array_equal(v[[4, 0]].todense(), a[0, 3][[4, 0]])
    assert v[1:].checked()[-1] == a[0, 3, -1]


@pytest.mark.parametrize("format", [CSR, COO, CVS(4)], ids=str)
def test_pairs_of_positions(format):
    a = integers(7, 6)
    A = SparseArray.from_dense(a, format=format)
    i, j = np.array([0, 6, -1, 3, 3]), np.array([5, -6, 1, 2, 2])
    np.testing.assert_array_equal(A[i, j], a[i, j])
    np.testing.assert_array_equal(jax.jit(lambda i, j: A[i, j])(i, j), a[i, j])
    mask = a[:, 2] > 0
    np.testing.assert_array_equal(A[mask, list(range(mask.sum()))], a[mask, range(mask.sum())])
    beyond = jax.jit(lambda i, j: A[i, j])(np.array([0, 7, -8, 2]), np.array([6, 0, 0, -7]))
    np.testing.assert_array_equal(beyond, np.zeros(4))  # as of one element
    of_values = jax.grad(lambda v: (A.with_values(v)[i, j] ** 2).sum())(A.values * 1.0)
    expected = jax.jit(jax.grad(lambda a: (a[i, j] ** 2).sum()))(jnp.asarray(a * 1.0))
    np.testing.assert_allclose(A.with_values(of_values).todense(), expected)
    with pytest.raises(IndexError, match=r"that broadcast, got shapes \[5\] and \[2\]; A"):
        A[i, [0, 1]]
    with pytest.raises(IndexError, match="out of range"):
        A[i, i]


@pytest.mark.parametrize("format", [CSR, COO, CVS(4)], ids=str)
def test_index_arrays_broadcast(format):
    """As in NumPy and SciPy; a column and a row of indices (np.ix_) select a submatrix."""
    a = integers(7, 6)
    A = SparseArray.from_dense(a, format=format)
    i, j = np.array([0, 5, -1, 3]), np.array([5, -6, 1])
    square = np.arange(4).reshape(2, 2)
    for index in (
        ([2], j),
        (i, [4]),
        (square, 5 - square),
        (square, [1, 0]),
        (np.zeros(0, int), [1]),
    ):
        got = A[index]
        expected = a[tuple(map(np.asarray, index))]
        assert isinstance(got, jax.Array) and got.dtype == a.dtype
        np.testing.assert_array_equal(got, expected, err_msg=str(index))
    for index in (np.ix_(i, j), (i[:, None], j), (j, i[:, None]), (i[None], j[:, None])):
        got = A[index]
        assert isinstance(got, SparseArray)
        np.testing.assert_array_equal(dense_of(got.checked()), a[index], err_msg=str(index))
    traced = jax.jit(lambda x, y: (A[x, 5 - x], A[y[:1], y]))(square, j)
    np.testing.assert_array_equal(traced[0], a[square, 5 - square])
    np.testing.assert_array_equal(traced[1], a[j[:1], j])
    for wrong in (square, (square, slice(None)), (0, square)):
        with pytest.raises(IndexError, match=r"one dimension at most, got int64 of shape \[2, 2\]"):
            A[wrong]


def test_pairs_of_a_traced_structure():
    """What an index array may hold twice is summed, and what is out of range takes no part."""
    values = jnp.array([1.0, 2, 3, 4, 5, 6])
    offsets, columns = jnp.array([0, 3, 4, 9]), jnp.array([1, 1, 9, 0, -1, 2])

    @jax.jit
    def elements(values, offsets, columns, i, j):
        return SparseArray.from_arrays(values, offsets, columns, shape=(3, 4))[i, j]

    i, j = np.array([0, 1, 2, 0, 0, -1, 3, 2, 0]), np.array([1, 0, 2, 1, 9, -2, 0, -1, -9])
    expected = [3, 4, 6, 3, 0, 6, 0, 0, 0]
    np.testing.assert_array_equal(elements(values, offsets, columns, i, j), expected)
    gradient = jax.grad(lambda v: elements(v, offsets, columns, i, j).sum())(values)
    np.testing.assert_array_equal(gradient, [2, 2, 0, 1, 0, 2])


@pytest.mark.parametrize("format", [CSR, CSC, COO], ids=str)
def test_traced_structure(format):
    """Slices and single rows of a matrix that is an argument of jit."""
    a = integers(7, 6)
    A = SparseArray.from_dense(a, format=format, nse=40)
    indices = (np.s_[::2], np.s_[5:0:-2, 1:4], np.s_[2], np.s_[:, -2], np.s_[3:3])
    made = jax.jit(lambda A: [A[index] for index in indices] + [A[3, 4]])(A)
    for index, found in zip(indices, made, strict=False):
        if found.ndim == 2:
            found.checked()
            assert found.format == format
        np.testing.assert_array_equal(found.todense(), a[index], err_msg=str(index))
    assert made[-1] == a[3, 4]


def test_traced_indices_and_no_new_program():
    a = integers(7, 6)
    A = SparseArray.from_dense(a)

    @jax.jit
    def parts(idx, i):
        return A[idx], A[i], A[:, i], A[i, i], A[idx, i], A.rows(i + jnp.arange(2))

    for idx in ([0, 6, -1], [3, 3, 3]):
        for i in (0, -2, 5):
            R, row, column, element, both, two = parts(jnp.array(idx), i)
            assert R.is_checked and int(R.overflow) == 0  # the capacity is enough for any
            R.checked()
            np.testing.assert_array_equal(dense_of(R), a[idx])
            np.testing.assert_array_equal(row.todense(), a[i])
            np.testing.assert_array_equal(column.todense(), a[:, i])
            np.testing.assert_array_equal(both.todense(), a[idx, i])
            np.testing.assert_array_equal(two.todense(), a[[i, i + 1]])
            assert element == a[i, i]
    assert parts._cache_size() == 1


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
def test_indices_that_are_out_of_range(dtype):
    """In NumPy an error; inside jit an empty row, whatever they hold."""
    a = integers(7, 6)
    A = SparseArray.from_dense(a)
    limits = np.iinfo(dtype)
    idx = np.array([limits.min, limits.max, 7, 3, limits.max - 7 + 1, limits.min // 2], dtype)
    R = jax.jit(lambda idx: A.rows(idx))(idx)
    inside = (idx.astype(object) < 7) & (idx.astype(object) >= -7)
    expected = np.where(inside[:, None], a[np.where(inside, idx, 0).astype(int)], 0)
    np.testing.assert_array_equal(R.checked().todense(), expected)
    with pytest.raises(IndexError, match="out of range"):
        A.rows(idx)
    beyond = jnp.array([7, -8, 2**31 - 1, -(2**31)])
    elements = jax.jit(jax.vmap(lambda i: A[i, i] + A[0, i] + A[i, 0]))(beyond)
    np.testing.assert_array_equal(elements, np.zeros(4))


def test_rows_in_a_capacity():
    a = integers(40, 9)
    A = SparseArray.from_dense(a)
    shapes = set()
    for i in range(0, 40, 5):
        R = A.rows(slice(i, i + 5))
        assert R.format == CSR and R.is_checked
        R.checked()
        np.testing.assert_array_equal(dense_of(R), a[i : i + 5])
        shapes.add((R.shape, R.nnz))
    lengths = (a != 0).sum(1)
    most = max(lengths[i : i + 5].sum() for i in range(36))
    assert shapes == {((5, 9), most)}
    assert A.rows([1, 2, 3]).nnz == 3 * lengths.max()
    assert A.rows([1, 2], nse=50).nnz == 50
    assert A.asformat(COO).rows([0]).format == COO and A.asformat(CSC).rows([0]).format == CSR
    mask = np.arange(40) % 7 == 1
    np.testing.assert_array_equal(dense_of(A.rows(mask)), a[mask])
    np.testing.assert_array_equal(A.T.rows([3, 3]).T.todense(), a[:, [3, 3]])


@pytest.mark.parametrize("format", [CSR, CSC, COO, CVS(2)], ids=str)
def test_a_capacity_that_is_too_small(format):
    a = integers(7, 6)
    A = SparseArray.from_dense(a, format=format)
    R, many = jax.jit(lambda A, idx: (A.rows(idx, nse=5), A.rows(idx, nse=60)))(
        A, jnp.array([0, 3, 0, -1])
    )
    np.testing.assert_array_equal(many.checked().todense(), a[[0, 3, 0, -1]])
    stored = np.asarray(A.asformat(CSR).row_lengths)
    beyond = stored[[0, 3, 0, 6]].sum() - 5
    assert beyond > 0 and int(R.overflow) == beyond and int(many.overflow) == 0
    with pytest.raises(ValueError, match="more than fit"):
        R.checked()
    # What fits is right.
    flat = np.concatenate([np.flatnonzero(a[i]) for i in (0, 3, 0, 6)])[:5]
    if not format.block_shape:
        np.testing.assert_array_equal(np.asarray(R.column_indices), flat)


def test_structures_that_nobody_checked():
    """Index arrays that hold anything: what takes part is what A.todense() has."""
    rng = np.random.default_rng(1)

    @jax.jit
    def parts(values, offsets, columns):
        A = SparseArray.from_arrays(values, offsets, columns, shape=(5, 4))
        picked = A.rows(jnp.array([4, 1, 1, 9]), nse=30)
        return A.todense(), picked.todense(), A[1:4].todense(), A[2].todense(), A[2, 1]

    for _ in range(20):
        offsets, columns = rng.integers(-3, 12, 6), rng.integers(-2, 6, 8)
        dense, picked, some, row, element = parts(np.arange(1.0, 9), offsets, columns)
        np.testing.assert_array_equal(picked[:3], dense[jnp.array([4, 1, 1])])
        assert not picked[3].any()
        np.testing.assert_array_equal(some, dense[1:4])
        np.testing.assert_array_equal(row, dense[2])
        assert element == dense[2, 1]


def test_the_sum_of_lengths_stops_at_the_greatest_integer():
    A = SparseArray.from_dense(np.ones((1, 2**15)))
    R = jax.jit(lambda idx: A.rows(idx, nse=3))(jnp.zeros(2**16 + 8, int))
    assert int(R.overflow) == 2**31 - 1 - 3


def test_a_loop_over_batches_compiles_one_program():
    a = np.random.default_rng(0).random((96, 20))
    A = SparseArray.from_dense(a * (a > 0.7))
    x = jnp.ones((20, 3))
    step = jax.jit(spmm)
    A[0:32], A.rows(slice(0, 32))  # the first use of a helper of JAX may compile
    with jax.log_compiles(False):
        compiled = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
        )
        for i in range(0, 96, 32):
            A[i : i + 32], A[[i, 1]], A[i + 1]
        assert not compiled
        for i in range(0, 65, 8):
            step(A.rows(slice(i, i + 32)), x)
        assert step._cache_size() == 1 and len(compiled) == 1
        slices = [A[i : i + 32] for i in range(0, 65, 8)]  # SciPy's: a program for each nnz
        for B in slices:
            step(B, x)
        assert step._cache_size() == 1 + len({B.nnz for B in slices}) > 4


@pytest.mark.parametrize("format", [CSR, CSC, CVS(2)], ids=str)
def test_derivatives(format):
    a = integers(7, 6)
    A = SparseArray.from_dense(a, format=format)
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(3, 6)))
    idx = np.array([3, 0, 3])

    def parts(v, idx, i):
        X = A.with_values(v)
        total = jnp.sum(weights * X[idx].todense()) + jnp.sum(X[2:6].todense()[1:] * weights)
        return total + X[i, 3] ** 2 + jnp.sum(X[:, i].todense() ** 3)

    def dense(a):
        total = jnp.sum(weights * a[idx]) + jnp.sum(a[3:6] * weights)
        return total + a[3, 3] ** 2 + jnp.sum(a[:, 3] ** 3)

    expected = (
        jax.jit(jax.grad(dense))(jnp.asarray(a)).at[A.coordinates()].get(mode="fill", fill_value=0)
    )
    known = lambda v: parts(v, idx, 3)
    for f in (known, lambda v: jax.jit(parts)(v, idx, 3)):
        found = jax.jit(jax.grad(f))(A.values)
        np.testing.assert_allclose(found.reshape(-1), expected, rtol=1e-12)
    check_grads(jax.jit(known), (A.values,), order=2, rtol=1e-4)


def test_vmap_over_rows():
    a = integers(7, 6)
    A = SparseArray.from_dense(a)
    idx = jnp.array([[0, 1], [6, -1], [2, 2]])
    found = jax.jit(jax.vmap(lambda i: A.rows(i).todense()))(idx)
    np.testing.assert_array_equal(found, a[np.asarray(idx)])


def test_slices_of_entries_in_any_order_and_more_than_once():
    columns, values = np.int32([3, 0, 1, 2, 2, 1]), np.float32([1, 2, 3, 1, 2, 4])
    made = jax.jit(lambda *arrays: SparseArray.from_arrays(*arrays, shape=(2, 4)))
    A = made(values, np.int32([0, 3, 6]), columns)
    dense = np.zeros((2, 4), np.float32)
    np.add.at(dense, (np.repeat([0, 1], 3), columns), values)
    for index in (np.s_[0:1], np.s_[1:], np.s_[:, 1:3], np.s_[0:1, 1:3]):
        found = A[index]
        np.testing.assert_array_equal(found.todense(), dense[index])
        found.checked()
    for mine, right in zip(A.nonzero(), np.nonzero(dense), strict=True):
        np.testing.assert_array_equal(mine, right)
    # What is not linear is of elements, not of the parts that are stored.
    np.testing.assert_array_equal((A * A).todense(), dense**2)
    np.testing.assert_array_equal((A**2).todense(), dense**2)
    signed = A.with_values(jnp.float32([1, 2, -3, 1, -1, 4]))
    np.testing.assert_array_equal(abs(signed).todense(), abs(signed.todense()))
    assert signed.eliminate_zeros().nnz == np.count_nonzero(signed.todense())
