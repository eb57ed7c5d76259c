"""Matrices made of others (formats/compose.py), against SciPy; derivatives, traced structures and
errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from format_invariants import dense_of, integers
from jax.test_util import check_grads

import sgap_jax
from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, SparseArray

FORMATS = [CSR, CSC, COO, CSF(2), CVS(2), BCSR(2, 3)]


def same(A, scipys, nnz=None):
    A.checked()
    assert A.shape == scipys.shape
    np.testing.assert_array_equal(dense_of(A), np.asarray(scipys.todense()))
    if nnz is not None:
        assert A.nnz == nnz


@pytest.mark.parametrize(("m", "n", "k"), [(3, None, 0), (4, 6, 2), (5, 2, -3), (0, 2, 0)])
def test_eye(m, n, k):
    A = sgap_jax.eye(m, n, k, dtype=np.int32, format=COO)
    assert (A.dtype, A.format) == (np.int32, COO)
    same(A, sp.eye_array(m, n, k=k, dtype=np.int32))
    same(sgap_jax.eye(m, n, -(2**40)), sp.coo_array((m, m if n is None else n)), nnz=0)


@pytest.mark.parametrize(
    ("diagonals", "offsets", "shape"),
    [
        ([1.0, 2, 3], 0, None),
        ([1.0, 2, 3], -2, None),
        ([1, -2, 1], [-1, 0, 1], (5, 5)),  # one number each, integers become floats
        ([[1.0, 2, 3, 4], [5.0, 6, 7]], [0, -1], None),
        ([[1.0, 2, 3, 4], [5.0]], [1, -2], (4, 6)),  # cut, and filled
        ([np.ones(2), np.zeros(0)], [3, -4], (4, 5)),  # no place at all on the last one
    ],
)
@pytest.mark.parametrize("format", [CSR, CVS(2)], ids=str)
def test_diags(diagonals, offsets, shape, format):
    scipys = sp.diags_array(diagonals, offsets=offsets, shape=shape, dtype=np.float64)
    A = sgap_jax.diags(diagonals, offsets, shape=shape, format=format)
    assert A.format == format and A.dtype == jnp.result_type(float)
    same(A, scipys)


def test_diags_of_traced_numbers():
    """Zeros are stored, so that the structure does not depend on values; derivatives pass."""

    @jax.jit
    def product(d, e, x):
        A = sgap_jax.diags([d, e], [0, 2], shape=(4, 4))
        assert A.nnz == 6 and A.is_checked
        return A @ x

    d, x = jnp.array([1.0, 0.0, 3.0, 4.0]), jnp.arange(1.0, 5.0)
    dense = np.diag([1.0, 0, 3, 4]) + 5 * np.eye(4, k=2)
    np.testing.assert_array_equal(product(d, 5.0, x), dense @ x)
    of_d, of_e = jax.jit(jax.grad(lambda *a: product(*a, x).sum(), (0, 1)))(d, jnp.array([5.0]))
    np.testing.assert_array_equal(of_d, x)
    np.testing.assert_array_equal(of_e, [7.0])
    check_grads(lambda d, e: product(d, e, x), (d, jnp.float64(2.0)), order=2)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_blocks(format):
    a, b, c = integers(4, 6), integers(4, 3, 1), integers(2, 6, 2)
    A, B, C = (SparseArray.from_dense(x, format=format) for x in (a, b, c))
    a, b, c = map(sp.csr_array, (a, b, c))  # SciPy does not stack dense ones
    for ours, scipys in (
        (sgap_jax.vstack([A, C]), sp.vstack([a, c])),
        (sgap_jax.hstack([A, B, A]), sp.hstack([a, b, a])),
        (sgap_jax.block([[A, B], [C, None]]), sp.block_array([[a, b], [c, None]])),
        (sgap_jax.block_diag([A, B, C]), sp.block_diag([a, b, c])),
        (sgap_jax.kron(A, B), sp.kron(a, b)),
    ):
        assert ours.format == format
        same(ours, scipys)
    with jax.numpy_dtype_promotion("standard"):
        mixed = sgap_jax.block(
            [[None, A.asformat(COO)], [b[:2].toarray().astype(np.float32), C]], format=CSC
        )
    assert (mixed.format, mixed.dtype) == (CSC, np.float64)
    same(mixed, sp.block_array([[None, a], [b[:2], c]]))
    assert sgap_jax.vstack([A, C], dtype=np.float32).dtype == np.float32
    assert sgap_jax.hstack([A, A.asformat(COO if format == CSR else CSR)]).format == CSR


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("k", [0, 2, -1, -9, 2**40])
def test_triangles(format, k):
    a = integers(4, 6)
    A = SparseArray.from_dense(a, format=format)
    for name in ("tril", "triu"):
        same(getattr(sgap_jax, name)(A, k), getattr(sp, name)(a, np.clip(k, -9, 9)))
    assert sgap_jax.tril(A, k).format == format
    assert sgap_jax.triu(A, k, format=COO).format == COO


@pytest.mark.parametrize("format", [CSR, CSC, COO], ids=str)
def test_traced_structures(format):
    """The same matrices inside jit; what does not take part in an operand is nowhere."""
    a, b = integers(4, 6), integers(4, 6, 1)
    A, B = (SparseArray.from_dense(x, format=format, nse=30) for x in (a, b))
    makers = {
        "vstack": (lambda A, B: sgap_jax.vstack([A, B]), np.vstack([a, b])),
        "block_diag": (
            lambda A, B: sgap_jax.block_diag([A, B]),
            sp.block_diag([a, b]).toarray(),
        ),
        "kron": (sgap_jax.kron, np.kron(a, b)),
        "tril": (lambda A, B: sgap_jax.tril(A, -1), np.tril(a, -1)),
        "triu": (lambda A, B: sgap_jax.triu(A, 1), np.triu(a, 1)),
        "dense": (lambda A, B: sgap_jax.hstack([A, B.todense()]), np.hstack([a, b])),
    }
    made = jax.jit(lambda A, B: {name: make(A, B) for name, (make, _) in makers.items()})(A, B)
    for name, (_, dense) in makers.items():
        assert made[name].is_checked and int(made[name].overflow) == 0
        np.testing.assert_array_equal(made[name].checked().todense(), dense, err_msg=name)

    def broken(A):
        (*outer, (offsets, indices)) = A.asformat(CSR).index_arrays
        bad = indices.at[0].set(99)
        whole = SparseArray.from_arrays(A.asformat(CSR).values, offsets, bad, shape=A.shape)
        return sgap_jax.vstack([whole, whole]).todense(), whole.todense()

    stacked, whole = jax.jit(broken)(A)
    np.testing.assert_array_equal(stacked, np.vstack([whole, whole]))


def test_derivatives():
    a, b = integers(4, 6), integers(4, 6, 1)
    A, B = (SparseArray.from_dense(x) for x in (a, b))
    weights = jnp.asarray(np.random.default_rng(3).normal(size=(16, 36)))

    def f(v, w):
        X, Y = A.with_values(v), B.with_values(w)
        grid = sgap_jax.block([[X, sgap_jax.triu(Y)], [Y, None]])
        both = sgap_jax.kron(sgap_jax.tril(X), Y)
        return jnp.sum(weights * both.todense()) + jnp.sum(weights[:8, :12] * grid.todense())

    def dense(a, b):
        grid = jnp.block([[a, jnp.triu(b)], [b, jnp.zeros_like(a)]])
        both = jnp.kron(jnp.tril(a), b)
        return jnp.sum(weights * both) + jnp.sum(weights[:8, :12] * grid)

    found = jax.jit(jax.grad(f, (0, 1)))(A.values, B.values)
    expected = jax.jit(jax.grad(dense, (0, 1)))(jnp.asarray(a), jnp.asarray(b))
    for v, x, d in zip(found, (a, b), expected, strict=True):
        np.testing.assert_allclose(v, d[np.nonzero(x)], rtol=1e-12)


def test_default_values_and_shape():
    A = SparseArray.from_coordinates([[2, 1], [0, 3], [2, 1]])
    same(A, sp.coo_array((np.ones(3), ([2, 0, 2], [1, 3, 1]))))
    assert A.dtype == np.float32
    C = SparseArray.from_arrays(None, [0, 1, 2], [1, 0], shape=(2, 2))
    same(C, sp.csr_array([[0, 1], [1, 0]]))
    V = SparseArray.from_arrays(None, [0, 1], [1], shape=(2, 2), format=CVS(2))
    same(V, sp.csr_array([[0, 1], [0, 1]]))


A = SparseArray.from_dense(integers(4, 6))
T = SparseArray.from_dense(np.ones((2, 2, 2)), format=COO)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: sgap_jax.eye(-1), ValueError, ["eye: m", "-1"]),
        (lambda: sgap_jax.eye(2.5), TypeError, ["eye: m", "2.5"]),
        (lambda: jax.jit(lambda k: sgap_jax.eye(3, k=k).values)(1), ValueError, ["k:", "tracer"]),
        (lambda: sgap_jax.diags([[1.0], [2.0]]), ValueError, ["a list of offsets"]),
        (lambda: sgap_jax.diags([[1.0]], [0, 1]), ValueError, ["each of 2 offsets", "got 1"]),
        (lambda: sgap_jax.diags([], []), ValueError, ["diagonals"]),
        (lambda: sgap_jax.diags([[1.0], [2.0]], [1, 1]), ValueError, ["each once", "[1, 1]"]),
        (lambda: sgap_jax.diags([[1.0, 2]], [0], shape=(3, 3)), ValueError, ["3 numbers", "got 2"]),
        (lambda: sgap_jax.diags([[1.0]], [4], shape=(3, 3)), ValueError, ["-3 .. 3", "got 4"]),
        (lambda: sgap_jax.diags([1.0], 0, shape=(3,)), ValueError, ["(m, n)"]),
        (lambda: sgap_jax.diags(np.ones((2, 2)), 0), ValueError, ["1-d", "[2, 2]"]),
        (lambda: sgap_jax.vstack([A, A.T]), ValueError, ["blocks[1]", "6 columns", "got 4"]),
        (lambda: sgap_jax.hstack([A, A.T]), ValueError, ["blocks[1]", "4 rows", "got 6"]),
        (lambda: sgap_jax.block([[A], [A, A]]), ValueError, ["each row", "[1, 2]"]),
        (lambda: sgap_jax.block([[A, None]]), ValueError, ["column 1", "None"]),
        (lambda: sgap_jax.vstack([]), ValueError, ["vstack"]),
        (lambda: sgap_jax.block_diag([]), ValueError, ["at least one"]),
        (lambda: sgap_jax.vstack([A.to_scipy()]), TypeError, ["coo", "from_scipy"][1:]),
        (lambda: sgap_jax.kron(A, np.ones(3)), ValueError, ["kron: B", "[3]"]),
        (lambda: sgap_jax.kron(T, A), ValueError, ["kron: A", "(2, 2, 2)"]),
        (
            lambda: sgap_jax.kron(sgap_jax.eye(1, 2**20), sgap_jax.eye(1, 2**20)),
            NotImplementedError,
            ["int32"],
        ),
        (lambda: sgap_jax.tril(np.ones((2, 2))), TypeError, ["tril: A", "ndarray"]),
        (
            lambda: jax.jit(lambda A: sgap_jax.tril(A, format=CVS(2)).values)(A),
            NotImplementedError,
            ["CVS(2)"],
        ),
        (lambda: SparseArray.from_coordinates(np.zeros((0, 2), int)), ValueError, ["shape"]),
        (
            lambda: jax.jit(lambda c: SparseArray.from_coordinates(c).values)(
                np.zeros((2, 2), int)
            ),
            ValueError,
            ["coordinates", "shape"],
        ),
    ],
)
def test_message(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
