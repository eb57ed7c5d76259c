"""Triangular solves, incomplete factors and what uses them, against SciPy and dense solves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp
import scipy.sparse.linalg as spl
from format_invariants import integers
from jax.test_util import check_grads
from native_call import run

from sgap_jax import BCSR, COO, CSC, CSR, SparseArray, linalg
from sgap_jax.primitives import triangular_solve as primitive
from sgap_jax.runtime.native import native

RNG = np.random.default_rng(0)
N = 12
SQUARE = integers(N, N) * 0.1 + np.diag(np.linspace(1, 3, N))
b, B = RNG.normal(size=N), RNG.normal(size=(N, 13))


def of(a, format=CSR, **options):
    return SparseArray.from_dense(a, format=format, **options)


def grid(n, dtype=np.float64):
    """The Poisson matrix of a square grid, in SciPy."""
    one = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    return sp.csr_array(sp.kronsum(one, one)).astype(dtype)


@pytest.mark.parametrize("unit_diagonal", [False, True])
@pytest.mark.parametrize("lower", [True, False])
def test_solutions(lower, unit_diagonal):
    options = dict(lower=lower, unit_diagonal=unit_diagonal)
    for trans, right in ((0, b), ("T", B)):
        want = scipy.linalg.solve_triangular(SQUARE, right, trans, **options)
        got = linalg.triangular_solve(of(SQUARE), right, trans=trans, **options)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
        T = primitive.triangular_solve_by_levels(
            *of(SQUARE.T if trans else SQUARE).index_arrays[1],
            of(SQUARE.T if trans else SQUARE).values,
            jnp.asarray(right.reshape(N, -1)),
            lower=lower != (trans == "T"),
            unit_diagonal=unit_diagonal,
        )
        np.testing.assert_allclose(T.reshape(want.shape), want, rtol=1e-12, atol=1e-13)


def test_formats_dtypes_and_traced_structures():
    want = scipy.linalg.solve_triangular(SQUARE, b, lower=True)
    for format in (CSC, COO, BCSR(3, 4)):
        got = linalg.triangular_solve(of(SQUARE, format), b)
        np.testing.assert_allclose(got, want, rtol=1e-12)
    padded = jax.jit(lambda A, b: linalg.triangular_solve(A, b))(of(SQUARE, nse=N * N + 5), b)
    np.testing.assert_allclose(padded, want, rtol=1e-12)
    for dtype, rtol in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.05)):
        got = linalg.triangular_solve(of(SQUARE).astype(dtype), jnp.asarray(b, dtype))
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=rtol, atol=rtol)
    c = SQUARE + 0.1j * integers(N, N)
    want = scipy.linalg.solve_triangular(c, b, "C", lower=True)
    np.testing.assert_allclose(linalg.triangular_solve(of(c), b + 0j, trans="C"), want, rtol=1e-12)
    batch = jnp.stack([of(SQUARE).values, 2 * of(SQUARE).values])
    got = jax.vmap(lambda v: linalg.triangular_solve(of(SQUARE).with_values(v), b))(batch)
    np.testing.assert_allclose(got[1], got[0] / 2, rtol=1e-12)


@pytest.mark.parametrize("options", [dict(), dict(lower=False, trans="T", unit_diagonal=True)])
def test_derivatives(options):
    A = of(SQUARE[:5, :5])

    def solve(values, b):
        return linalg.triangular_solve(A.with_values(values), b, **options)

    check_grads(
        jax.jit(solve), (A.values, jnp.asarray(b[:5])), order=2, modes=["fwd", "rev"], eps=1e-5
    )


def arrays(A, *rest):
    return [np.asarray(A.indptr, np.int32), np.asarray(A.indices, np.int32), A.data, *rest]


def solved(operands, threads=1, **flags):
    result = operands[-1].shape, operands[-1].dtype
    target = "sgap_triangular_solve_csr_v1"
    return run(target, operands, [result], flags, native.isa(), threads)[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_wide_levels_have_the_bits_of_rows_in_order(dtype):
    # 60,000 rows in 3 levels: the first is wide, and so is the second.
    n = 20_000
    below = sp.random_array((n, n), density=3 / n, rng=np.random.default_rng(1))
    T = (
        sp.block_array(
            [
                [sp.eye_array(n), None, None],
                [below, sp.eye_array(n), None],
                [below, below.T, sp.eye_array(n)],
            ]
        )
        .tocsr()
        .astype(dtype)
    )
    T.sort_indices()
    right = RNG.normal(size=(3 * n, 5)).astype(dtype)
    flags = dict(lower=True, unit_diagonal=False)
    one, many = (solved(arrays(T, right), threads, **flags) for threads in (1, 5))
    assert one.tobytes() == many.tobytes()
    np.testing.assert_allclose(one, spl.spsolve_triangular(T, right), rtol=1e-4, atol=1e-4)
    # A kept plan is of this structure alone.
    T.indices[T.indptr[2 * n]] = (T.indices[T.indptr[2 * n]] + 1) % 7
    again = solved(arrays(T, right), 5, **flags)
    np.testing.assert_allclose(T @ again, right, rtol=1e-3, atol=1e-3)


def test_any_index_arrays_are_safe():
    rng = np.random.default_rng(2)
    for seed in range(12):
        offsets = rng.integers(-5, 60, 21).astype(np.int32)
        offsets = np.sort(offsets) if seed % 2 else offsets
        indices = rng.integers(-3, 24, 50).astype(np.int32)
        values, right = rng.normal(size=50), rng.normal(size=(20, 3))
        operands = [offsets, indices, values, right]
        for lower in (True, False):
            flags = dict(lower=lower, unit_diagonal=True)
            want = primitive.triangular_solve_by_levels(*map(jnp.asarray, operands), **flags)
            np.testing.assert_allclose(solved(operands, **flags), want, rtol=1e-9, atol=1e-12)
        (factors,) = run(
            "sgap_incomplete_lu_csr_v1", operands[:3], [((50,), "float64")], {}, native.isa()
        )
        assert factors.shape == values.shape


def test_no_rows_and_a_capacity():
    def solved(values, b, at):
        return linalg.triangular_solve(SparseArray.from_coordinates(at, values, (0, 0)), b).sum()

    given = jnp.ones(3), jnp.ones(0), jnp.zeros((3, 2), int)
    gradients = jax.jit(jax.grad(solved, (0, 1)))(*given)
    assert [g.tolist() for g in gradients] == [[0, 0, 0], []]


def test_incomplete_factors():
    a = grid(5)
    A = SparseArray.from_scipy(a)
    factors = np.asarray(linalg.ilu(A).args[0].todense())
    L, U = np.tril(factors, -1) + np.eye(25), np.triu(factors)
    kept = a.toarray() != 0
    np.testing.assert_allclose((L @ U)[kept], a.toarray()[kept], atol=1e-12)
    plain = primitive.incomplete_lu_by_entries(*A.index_arrays[1], A.values, n=25)
    np.testing.assert_allclose(plain, linalg.ilu(A).args[0].values, rtol=1e-12)
    # Of a matrix whose factors fill nothing in, they are those of the matrix.
    band = sp.diags_array([-1.0, 3.0, -1.5], offsets=[-1, 0, 1], shape=(30, 30)).tocsr()
    r = RNG.normal(size=30)
    for M in (
        linalg.ilu(SparseArray.from_scipy(band)),
        linalg.ichol(of((band + band.T).toarray())),
    ):
        matrix = band if M.func.__name__ == "_of_lu" else band + band.T
        np.testing.assert_allclose(M(jnp.asarray(r)), spl.spsolve(matrix.tocsc(), r), rtol=1e-10)


def test_incomplete_factors_of_complex_and_repeated_entries():
    """Of a tridiagonal matrix they are the factors themselves."""
    a = np.diag(np.full(6, 4.0)) + np.diag(np.full(5, -1j), 1) + np.diag(np.full(5, 1j), -1)
    for of_factors in (linalg.ilu, linalg.ichol):
        for right in (b[:6], list(range(6))):
            with jax.numpy_dtype_promotion("standard"):  # of a real vector
                got = of_factors(of(a))(right)
            np.testing.assert_allclose(got, np.linalg.solve(a, right), rtol=1e-12)
    row, column = np.nonzero(a)
    halves = (a.real + a.imag)[row, column].repeat(2) / 2
    offsets = np.searchsorted(row.repeat(2), np.arange(7)).astype(np.int32)
    made = jax.jit(lambda v, c: SparseArray.from_arrays(v, offsets, c, shape=(6, 6), format=CSR))
    twice = made(halves, column.repeat(2).astype(np.int32))
    want = np.linalg.solve(a.real + a.imag, b[:6])
    np.testing.assert_allclose(linalg.ilu(twice)(b[:6]), want, rtol=1e-12)


@pytest.mark.parametrize("precondition, solver", [("ichol", "cg"), ("ilu", "bicgstab")])
def test_preconditioners_save_products(precondition, solver):
    A = SparseArray.from_scipy(grid(24))
    right = jnp.asarray(RNG.normal(size=576))

    @jax.jit
    def solve(values, b):
        X = A.with_values(values)
        M = getattr(linalg, precondition)(X)
        return getattr(linalg, solver)(X, b, M=M, tol=1e-10, maxiter=30)[0]

    x = solve(A.values, right)
    np.testing.assert_allclose(A @ x, right, atol=1e-7)
    few = getattr(linalg, solver)(A, right, tol=1e-10, maxiter=30)[0]
    assert np.linalg.norm(A @ few - right) > 1e3 * np.linalg.norm(A @ x - right)
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(solve(v, right) ** 2)))(A.values)
    direction = jnp.asarray(RNG.normal(size=A.nnz))
    dense = lambda t: jnp.sum(
        jnp.linalg.solve(A.with_values(A.values + t * direction).todense(), right) ** 2
    )
    np.testing.assert_allclose(gradient @ direction, jax.grad(dense)(0.0), rtol=1e-4)


def test_eigenvalues():
    a = grid(9).toarray() + np.diag(np.linspace(0, 0.5, 81))
    A, X = of(a), jnp.asarray(RNG.normal(size=(81, 3)))
    every = np.linalg.eigvalsh(a)
    for largest, want in ((True, every[:-4:-1]), (False, every[:3])):
        values, vectors = linalg.lobpcg(A, X, largest=largest, maxiter=200)
        np.testing.assert_allclose(values, want, rtol=1e-6)
        np.testing.assert_allclose(A @ vectors, values[None] * vectors, atol=1e-3)
    greatest = lambda v: linalg.lobpcg(A.with_values(v), X, maxiter=200)[0][0]
    dense = lambda a: jnp.linalg.eigvalsh(a)[-1]
    want = jax.jit(jax.grad(dense))(jnp.asarray(a))[np.nonzero(a)]
    np.testing.assert_allclose(jax.jit(jax.grad(greatest))(A.values), want, atol=1e-4)


@pytest.mark.parametrize("largest", [True, False])
def test_eigenvalues_of_few_and_of_one_sign(largest):
    """Of nothing, of rank one, of one value, and of the sign that is not looked for."""
    X, row = jnp.asarray(RNG.normal(size=(12, 2)), jnp.float32), np.arange(12)
    A = SparseArray.from_coordinates(np.stack([row, row], 1), np.ones(12, np.float32), (12, 12))
    for diagonal in (row * 0, row == 3, row * 0 + 1, -1 - row, 1 + row):
        own = A.with_values(
            jnp.asarray(diagonal if largest else -diagonal.astype(int), jnp.float32)
        )
        values, vectors = linalg.lobpcg(own, X, largest=largest)
        want = np.sort(np.asarray(own.values))[::-1] if largest else np.sort(np.asarray(own.values))
        np.testing.assert_allclose(values, want[:2], atol=1e-4)
        np.testing.assert_allclose(own @ vectors, values[None] * vectors, atol=1e-2)


@pytest.mark.parametrize("scale, start", [(1e-25, 1), (1e25, 1), (1e-18, 1e38), (4e37, 1e-30)])
@pytest.mark.parametrize("largest", [True, False])
def test_eigenvalues_whose_squares_leave_the_range(largest, scale, start):
    a, X = grid(9).toarray() + np.diag(np.linspace(0, 0.5, 81)), RNG.uniform(-1, 1, (81, 3))
    A, X = of(a.astype(np.float32)), jnp.asarray(X * start, jnp.float32)
    found = linalg.lobpcg(A.with_values(A.values * scale), X, largest=largest, maxiter=200)[0]
    every = np.linalg.eigvalsh(a)
    np.testing.assert_allclose(found / scale, every[:-4:-1] if largest else every[:3], rtol=1e-3)


def test_operators_of_lineax():
    lineax = pytest.importorskip("lineax")
    a = SQUARE @ SQUARE.T + np.eye(N)
    A = of(a)

    def solve(values):
        operator = linalg.lineax_operator(A.with_values(values), lineax.positive_semidefinite_tag)
        return lineax.linear_solve(operator, b, lineax.CG(rtol=1e-12, atol=1e-12)).value

    np.testing.assert_allclose(solve(A.values), np.linalg.solve(a, b), rtol=1e-8)
    got = jax.jit(jax.grad(lambda v: jnp.sum(solve(v) ** 2)))(A.values)
    want = jax.jit(jax.grad(lambda a: jnp.sum(jnp.linalg.solve(a, b) ** 2)))(jnp.asarray(a))
    np.testing.assert_allclose(got, want.reshape(-1)[np.flatnonzero(a)], rtol=1e-6)


def test_nothing_to_solve():
    none = of(np.zeros((0, 0)))
    assert linalg.triangular_solve(none, np.zeros(0)).shape == (0,)
    assert linalg.triangular_solve(none, np.zeros((0, 3))).shape == (0, 3)


@pytest.mark.tier("all")
def test_inside_of_shard_map():
    """A structure that all devices share, with values and right sides of each."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    A = of(SQUARE)

    def loss(v, b, A):
        own = A.with_values(v)
        return jnp.sum(linalg.triangular_solve(own, b) ** 2) + jnp.sum(linalg.ilu(own)(b) ** 2)

    each = jax.vmap(jax.grad(loss, (0, 1)), (0, 0, None))
    given = jnp.stack([A.values, 2 * A.values]), jnp.stack([b, -b]), A
    specs = dict(in_specs=(jax.P("x"), jax.P("x"), jax.P()), out_specs=jax.P("x"))
    split = jax.jit(jax.shard_map(each, mesh=mesh, **specs))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10), split(*given), each(*given))


def test_what_scipy_has_and_is_not_here_names_the_nearest():
    for name, words in (
        ("spsolve", "cg, gmres or bicgstab"),
        ("eigsh", "lobpcg"),
        ("spilu", "ilu"),
    ):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': the nearest is {words}"):
            getattr(linalg, name)
    assert not hasattr(linalg, "nothing")
    with pytest.raises(TypeError, match="got ArrayImpl; SparseArray.from_dense makes one"):
        linalg.ilu(jnp.eye(3))


def test_wrong_arguments_are_named():
    A = of(SQUARE)
    hollow = of(SQUARE - np.diag(np.diag(SQUARE)))
    for solve, advice in (
        (linalg.triangular_solve, "unit_diagonal=True takes ones"),
        (lambda A, b: linalg.ilu(A), "jacobi takes ones there"),
        (lambda A, b: linalg.ichol(A), "jacobi takes ones there"),
    ):
        words = f"entry on the diagonal of each row, got none in 12, row 0 first; {advice}"
        with pytest.raises(ValueError, match=words):
            solve(hollow, b)
        with pytest.raises(ValueError, match="expected a square matrix"):
            solve(of(SQUARE[:5]), b)
        with pytest.raises(TypeError, match="A must be a SparseArray"):
            solve(SQUARE, b)
    assert np.isfinite(linalg.triangular_solve(hollow, b, unit_diagonal=True)).all()
    traced = jax.jit(lambda A: linalg.triangular_solve(A, b))(hollow)
    assert not np.isfinite(traced).any()
    with pytest.raises(ValueError, match="trans: expected 0, 1, 2"):
        linalg.triangular_solve(A, b, trans="X")
    with pytest.raises(ValueError, match=r"b: expected shape \[12\]"):
        linalg.triangular_solve(A, b[:3])
    with pytest.raises(ValueError, match="X: expected shape"):
        linalg.lobpcg(A, B[:, :3])
    with pytest.raises(TypeError, match="A must be a SparseArray"):
        linalg.lineax_operator(SQUARE)
    with pytest.raises(ValueError, match="lower: expected True or False, got 'no'"):
        linalg.triangular_solve(of(SQUARE), b, lower="no")
    with pytest.raises(ValueError, match="trans: expected 0, 1, 2"):
        linalg.triangular_solve(of(SQUARE), b, trans=[1])
    with pytest.raises(ValueError, match=r"ilu: r: expected shape \[12\]"):
        linalg.ilu(of(SQUARE))(b[1:])
