"""`sgap_jax.linalg` against SciPy and dense solves: solutions, derivatives in A's values,
preconditioners, norms, eigenvalues, exponentials, errors."""

from fractions import Fraction
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

from sgap_jax import BCSR, COO, CSC, CSR, CVS, SparseArray, linalg

RNG = np.random.default_rng(0)
N = 12
SYMMETRIC = integers(N, N) * 0.2
SYMMETRIC = SYMMETRIC @ SYMMETRIC.T + np.diag(np.linspace(1, 30, N))
GENERAL = SYMMETRIC + 0.3 * integers(N, N, 1)
b, B = RNG.normal(size=N), RNG.normal(size=(N, 3))
SOLVERS = {"cg": SYMMETRIC, "gmres": GENERAL, "bicgstab": GENERAL}
solvers = pytest.mark.parametrize("name", SOLVERS)


def of(a, format=CSR, **options):
    return SparseArray.from_dense(a, format=format, **options)


@solvers
def test_solutions(name):
    a = SOLVERS[name]
    solve = partial(getattr(linalg, name), tol=1e-12)
    want = np.linalg.solve(a, b)
    scipys = getattr(spl, name)(sp.csr_array(a), b, rtol=1e-12)[0]
    np.testing.assert_allclose(scipys, want, rtol=1e-9)
    for format in (CSR, CSC, COO, CVS(2), BCSR(3, 4)):
        np.testing.assert_allclose(solve(of(a, format), b)[0], want, rtol=1e-9)
    A = of(a)
    np.testing.assert_allclose(solve(A, B)[0], np.linalg.solve(a, B), rtol=1e-9)
    np.testing.assert_allclose(solve(lambda x: A @ x, b)[0], want, rtol=1e-9)
    np.testing.assert_allclose(solve(A, b, want + 1e-3, M=linalg.jacobi(A))[0], want, rtol=1e-9)
    np.testing.assert_allclose(solve(A, b, M=of(np.diag(1 / np.diag(a))))[0], want, rtol=1e-9)
    np.testing.assert_allclose(solve(A, b, M=lambda r: r / 2)[0], want, rtol=1e-9)
    padded = jax.jit(lambda A, b: solve(A, b, M=linalg.jacobi(A))[0])(of(a, nse=N * N + 5), b)
    np.testing.assert_allclose(padded, want, rtol=1e-9)


@solvers
def test_right_sides_whose_squared_norm_leaves_the_range(name):
    """Columns from 1e-25 to 1e25 in float32, and the gradient at the extreme ones."""
    a = SOLVERS[name].astype(np.float32)
    solve = jax.jit(lambda A, B: getattr(linalg, name)(A, B, tol=1e-5, maxiter=200))
    scales = np.array([1e-25, 1e-8, 1, 1e25], np.float32)[None]
    columns, A = np.float32(b)[:, None] * scales, of(a)
    x, info = solve(A, columns)
    want = np.linalg.solve(a, np.float32(b))
    assert info == 0
    np.testing.assert_allclose(x / scales, np.stack([want] * 4, 1), atol=2e-4 * abs(want).max())
    d_columns = jax.jit(jax.grad(lambda B: solve(A, B)[0].sum()))(columns)
    adjoint = np.linalg.solve(a.T, np.ones(N))
    np.testing.assert_allclose(
        d_columns, np.stack([adjoint] * 4, 1), atol=2e-4 * abs(adjoint).max()
    )


@pytest.mark.parametrize("name, dtype", [*((name, "f") for name in SOLVERS), ("cg", "F")])
def test_right_sides_at_the_end_of_the_range(name, dtype):
    """Right sides and cotangents whose products with A overflow, and an x that does."""
    a, one = np.array([[2, -1], [-1, 2]], dtype), 1 if dtype == "f" else 1 + 1j
    A, solver = of(a), getattr(linalg, name)
    big = 3e38 * one * np.array([[1, 1], [1, -0.6]], dtype)
    want = 3e38 * one * np.array([[1, 1.4 / 3], [1, -0.2 / 3]])

    @jax.jit
    def found(values, b, x0):
        x0 = None if name == "gmres" else x0  # which takes long to compile
        solve = lambda b: solver(A.with_values(values), b, x0, maxiter=20)
        x, transposed, info = jax.vjp(solve, b, has_aux=True)
        return x, info, transposed(big)[0]

    x0 = np.asarray(0.9 * want, dtype)
    x, info, gradient = found(A.values, big, x0)
    assert info == 0
    np.testing.assert_allclose(x, want, rtol=1e-5)
    np.testing.assert_allclose(gradient, want, rtol=1e-5)
    x, info, _ = found(A.values / 4, big, x0)  # b - A x is infinite, or NaN
    assert np.isnan(x).all() and info == 20
    if name == "cg":  # x / |b| overflows, b - A x does not
        x, info, _ = found(A.values, 1e-37 * (big / 3e38), x0 * np.array([[1], [0.3]], dtype))
        assert np.isfinite(x).all() and info == 20


@pytest.mark.parametrize("name", ["cg", "bicgstab"])  # gmres has the same code
def test_a_start(name):
    """x0 far from the size of b or of a cotangent, and no derivative of its own."""
    a = SOLVERS[name].astype(np.float32)
    A, small, start = of(a), np.float32(1e-30) * np.float32(b), np.ones(N, np.float32)
    solve = partial(getattr(linalg, name), A, maxiter=200)

    @jax.jit
    def found(b, x0):
        def tiny(*args):
            return 1e-20 * solve(*args, tol=1e-5)[0].sum()

        gradients = [jax.grad(tiny, i)(b, x0) for i in (0, 1)]  # of one alone
        return solve(1e25 * b, 1e25 * x0), solve(1e-30 * b, x0, atol=1e-4), gradients

    (x, info), (near, near_info), (d_b, d_x0) = found(np.float32(b), start)
    want = np.linalg.solve(a, np.float32(b))
    np.testing.assert_allclose(x / 1e25, want, atol=2e-4 * abs(want).max())
    assert info == near_info == 0 and np.linalg.norm(a @ near - small) <= 2e-4
    adjoint = np.linalg.solve(a.T, np.ones(N))
    np.testing.assert_allclose(d_b * 1e20, adjoint, atol=2e-4 * abs(adjoint).max())
    np.testing.assert_array_equal(d_x0, 0)


@pytest.mark.parametrize("name", ["cg", "bicgstab"])  # gmres has the same code
def test_a_start_whose_rounding_exceeds_the_tolerance(name):
    """Nothing that begins there gets to the solution: zeros are nearer, in each column."""
    a, zero = SOLVERS[name], np.zeros((N, 1))
    far = np.outer(np.ones(N), [1e10, 1e42, 1e308, 1e5])
    columns = np.concatenate([b[:, None]] * 4 + [zero], 1)
    x, info = getattr(linalg, name)(of(a), columns, np.concatenate([far, zero + 3], 1), tol=1e-9)
    assert info == 0
    want = np.linalg.solve(a, columns)
    np.testing.assert_allclose(x, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["cg", "bicgstab"])  # gmres has the same code
def test_info(name):
    """As SciPy's: 0 where it has converged, else the iterations that were allowed."""
    solve, a = partial(getattr(linalg, name), maxiter=1), SOLVERS[name]
    scipys = getattr(spl, name)(sp.csr_array(a), b, rtol=1e-8, maxiter=1)[1]
    columns = np.stack([0 * b, b], 1)  # whether all have

    @jax.jit
    def infos(A, b):
        options = {"tol": 1e-8}, {"tol": 1e-8, "atol": 1e3}, {"tol": b[0] * np.nan}
        found = [solve(A, b, **each)[1] for each in options]
        return [*found, solve(A, columns, tol=1e-8)[1]]

    found = infos(of(a), b)
    assert all(info.dtype == jnp.int32 and info.shape == () for info in found)
    np.testing.assert_array_equal(found, [1, 0, 1, 1])
    assert scipys == 1


def test_complex_systems():
    hermitian = SYMMETRIC + 1j * (integers(N, N) - integers(N, N).T)
    c, weights = b + 1j * B[:, 0], jnp.asarray(RNG.normal(size=N))
    for name, a in (("cg", hermitian), ("gmres", GENERAL + 1j * SYMMETRIC)):
        A, solve = of(a), partial(getattr(linalg, name), tol=1e-13)
        np.testing.assert_allclose(solve(A, c)[0], np.linalg.solve(a, c), rtol=1e-8)
        loss = lambda v, A=A, solve=solve: jnp.sum(
            weights * abs(solve(A.with_values(v), c)[0]) ** 2
        )
        dense = lambda a: jnp.sum(weights * abs(jnp.linalg.solve(a, c)) ** 2)
        expected = jax.jit(jax.grad(dense))(jnp.asarray(a))[np.nonzero(a)]
        np.testing.assert_allclose(
            jax.jit(jax.grad(loss))(A.values), expected, rtol=1e-6, atol=1e-9
        )


@solvers
@pytest.mark.parametrize("preconditioned", [False, True])
def test_derivatives(name, preconditioned):
    a = SOLVERS[name]
    A, weights = of(a), jnp.asarray(RNG.normal(size=(N, 3)))

    def loss(v, b):
        X = A.with_values(v)
        M = linalg.jacobi(X) if preconditioned else None
        return jnp.sum(weights * getattr(linalg, name)(X, b, tol=1e-13, M=M)[0] ** 2)

    dense = lambda a, b: jnp.sum(weights * jnp.linalg.solve(a, b) ** 2)
    found = jax.jit(jax.grad(loss, (0, 1)))(A.values, B)
    expected = jax.jit(jax.grad(dense, (0, 1)))(jnp.asarray(a), jnp.asarray(B))
    np.testing.assert_allclose(found[0], expected[0][np.nonzero(a)], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-8)
    if name == "cg" and not preconditioned:  # forward over reverse
        check_grads(jax.jit(partial(loss, b=jnp.asarray(B))), (A.values,), order=2, rtol=1e-3)


def test_one_program_for_all_values():
    A = of(SYMMETRIC)
    programs = linalg.krylov._program._cache_size()
    for scale in (1.0, 2.0, 3.0):
        linalg.cg(A * scale, b, M=linalg.jacobi(A * scale), tol=scale * 1e-7)
    assert linalg.krylov._program._cache_size() == programs + 1


def iterations(A, M):
    """How many products with A a solve takes."""
    count = []
    product = lambda x: (jax.debug.callback(lambda: count.append(1)), A @ x)[1]
    x, _ = linalg.cg(product, jnp.ones(A.shape[0]), M=M, tol=1e-8)
    x.block_until_ready()
    jax.effects_barrier()
    np.testing.assert_allclose(A @ x, 1, atol=1e-6)
    return len(count)


def test_preconditioners_save_products():
    n = 20
    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    poisson = sp.kron(line, sp.eye_array(n)) + sp.kron(sp.eye_array(n), line)
    scales = sp.diags_array(np.exp(RNG.normal(size=n * n)))
    plain, scaled = (SparseArray.from_scipy(x) for x in (poisson, scales @ poisson @ scales))
    assert iterations(scaled, linalg.jacobi(scaled)) < 0.6 * iterations(scaled, None)
    assert iterations(plain, linalg.chebyshev(plain)) < 0.6 * iterations(plain, None)
    degree = lambda k: iterations(plain, linalg.chebyshev(plain, degree=k))
    assert degree(5) < degree(2) < degree(1)


@pytest.mark.parametrize("name", ["jacobi", "chebyshev"])
def test_preconditioners_of_columns_and_of_other_dtypes(name):
    options = {} if name == "jacobi" else {"bounds": (0.1, 3.0), "degree": 2}
    M = getattr(linalg, name)(of(SYMMETRIC), **options)
    each = np.stack([np.asarray(M(column)) for column in B.T], 1)
    np.testing.assert_allclose(M(B), each, rtol=1e-12)
    np.testing.assert_allclose(M(B[:, :1]), each[:, :1], rtol=1e-12)
    whole = np.arange(N)  # the inverse of a diagonal beyond 1 would be the integer 0
    np.testing.assert_allclose(M(whole), M(whole.astype(float)), rtol=1e-12)
    M = getattr(linalg, name)(of(GENERAL * (1 + 0.5j * np.eye(N))), **options)
    np.testing.assert_allclose(M(b), M(b.astype(complex)), rtol=1e-12)  # not the real part
    with pytest.raises(ValueError, match=rf"{name}: r: expected shape \[12\] or \[12, k\], got"):
        M(b[:1])


def test_chebyshev_is_its_polynomial():
    """The error of the k-th step is that of the scaled Chebyshev polynomial: Saad, 12.3.2."""
    low, high, degree = 0.5, 2.0, 4
    diagonal = np.linspace(1, 3, N)
    scaled = np.diag(np.linspace(low, high, N))
    root = np.diag(np.sqrt(diagonal))
    Q = np.linalg.qr(RNG.normal(size=(N, N)))[0]
    a = root @ (Q @ scaled @ Q.T) @ root
    jacobi = np.diag(1 / np.diag(a))
    r = RNG.normal(size=N)
    found = linalg.chebyshev(of(a), degree=degree, bounds=(low, high))(jnp.asarray(r))
    T = np.polynomial.chebyshev.Chebyshev([0] * degree + [1])
    at = lambda M: (high + low) / (high - low) * np.eye(N) - 2 / (high - low) * M
    values, vectors = np.linalg.eig(at(jacobi @ a))
    residual = vectors @ np.diag(T(values)) @ np.linalg.inv(vectors)
    residual = residual / T((high + low) / (high - low))
    exact = np.linalg.solve(a, r)
    np.testing.assert_allclose(found, exact - residual @ exact, rtol=1e-9)
    # An interval of one point, which holds all eigenvalues of a scaled diagonal.
    line = linalg.chebyshev(of(np.diag(diagonal)), degree=degree, bounds=(1, 1))
    np.testing.assert_allclose(line(r), r / diagonal, rtol=1e-12)
    for zeros in (np.zeros((2, 2)), np.zeros((0, 0))):  # a polynomial of zero is a number
        assert np.isfinite(linalg.chebyshev(of(zeros))(np.ones(len(zeros)))).all()


@pytest.mark.parametrize("dtype", [np.float64, np.complex128, np.int32])
def test_norms(dtype):
    a = integers(7, 5, dtype=dtype) * (2 - 1j if dtype == np.complex128 else 1)
    for A in (of(a), of(a, CSC), of(a, nse=40)):
        for ord in (None, "fro", 1, -1, np.inf, -np.inf):
            want = spl.norm(sp.csr_array(a), ord)
            np.testing.assert_allclose(linalg.norm(A, ord), want, rtol=1e-12)
        for axis in (0, 1, -1):
            for ord in (None, 2, 1, np.inf):
                want = np.linalg.norm(a, ord, axis)
                np.testing.assert_allclose(linalg.norm(A, ord, axis), want, rtol=1e-12)
    for axis in (None, 0):  # of a matrix with a column of zeros
        f = lambda v, axis=axis: jnp.sum(
            linalg.norm(of(abs(a)).astype(float).with_values(v), None, axis)
        )
        values = of(abs(a)).astype(float).values
        assert np.isfinite(jax.grad(f)(values)).all()
        check_grads(jax.jit(f), (values,), order=1)
    for one in (np.int64(1), np.float32(1), jnp.asarray(1)):
        assert linalg.norm(A, one) == linalg.norm(A, 1)
    assert linalg.norm(of(np.zeros((0, 3))), 1) == 0
    np.testing.assert_array_equal(linalg.norm(of(np.zeros((0, 3))), np.inf, 0), np.zeros(3))


def test_a_column_without_an_answer_is_nan():
    """JAX's solvers end at x0 where a residual is NaN or infinite, which nothing would show."""
    a, two = SYMMETRIC[:3, :3], np.array([[1, 2], [np.nan, 3], [1, 2.0]])
    A = of(a)

    values = jnp.stack([A.values, A.values.at[1].set(np.nan)])

    @jax.jit
    def found(values, b):
        solve = lambda v, b: linalg.cg(A.with_values(v), b, tol=1e-8)[0]
        x, transposed = jax.vjp(jax.vmap(solve), values, b)
        return x, transposed(b)[1]

    x, slope = found(values, np.stack([two, two]))
    for solved in (x, slope):
        assert np.isnan(solved[0, :, 0]).all()
        np.testing.assert_allclose(solved[0, :, 1], np.linalg.solve(a, two[:, 1]), rtol=1e-6)
    assert np.isnan(x[1]).all() and np.isnan(slope[1]).all()
    x, info = linalg.cg(A, np.array([1, np.inf, 2]))
    assert np.isnan(x).all() and info == 30


def test_dominant_eigenvalues():
    for a, symmetric in ((SYMMETRIC, True), (SYMMETRIC, False), (GENERAL, False)):
        A = of(a)
        value, vector = linalg.power_iteration(A, tol=1e-12, maxiter=5000, symmetric=symmetric)
        values = np.linalg.eigvals(a)
        want = values[np.argmax(abs(values))]
        np.testing.assert_allclose(value, want.real, rtol=1e-9)
        np.testing.assert_allclose(a @ vector, want.real * vector, rtol=1e-6, atol=1e-6)
        of_value = jax.grad(
            lambda v, A=A, symmetric=symmetric: linalg.power_iteration(
                A.with_values(v), tol=1e-12, maxiter=5000, symmetric=symmetric
            )[0]
        )(A.values)
        left, right = scipy.linalg.eig(a, left=True)[1:]
        k = np.argmax(abs(values))
        u, x = left[:, k].real, right[:, k].real
        np.testing.assert_allclose(of_value, (np.outer(u, x) / (u @ x))[np.nonzero(a)], atol=1e-7)
    hermitian = SYMMETRIC + 1j * (integers(N, N) - integers(N, N).T)
    value, _ = linalg.power_iteration(of(hermitian), tol=1e-12, symmetric=True, maxiter=5000)
    want = np.linalg.eigvalsh(hermitian)
    np.testing.assert_allclose(value.real, want[np.argmax(abs(want))], rtol=1e-8)


def test_eigenvalues_whose_squares_leave_the_range_and_of_no_vector():
    """Of a nilpotent matrix the left and the right vector are orthogonal."""
    diagonal, start = np.diag([1.0, 2, 4]), np.array([1.0, 2, 3])
    for scale in (1e300, 1e-300):
        value, vector = linalg.power_iteration(of(diagonal * scale), v0=start * scale)
        np.testing.assert_allclose(value, 4 * scale, rtol=1e-9)
        np.testing.assert_allclose(vector, [0, 0, 1], atol=1e-5)
    for a in (np.eye(3, k=1), np.zeros((3, 3))):
        assert linalg.power_iteration(of(a))[0] == 0


def test_powers():
    a = integers(9, 9) * (RNG.random((9, 9)) < 0.3)
    for format, powers in ((CSR, (0, 1, 5)), (CSC, (0, 2))):
        A = of(a, format)
        for n in powers:
            found = linalg.matrix_power(A, n)
            np.testing.assert_array_equal(found.todense(), np.linalg.matrix_power(a, n))
            assert n == 1 or found.format == (CSC if format == CSC else CSR)
    traced = jax.jit(lambda A: linalg.matrix_power(A, 3, nse=81))(A)
    np.testing.assert_array_equal(traced.todense(), np.linalg.matrix_power(a, 3))
    A = of(a * 0.1)
    f = lambda v: linalg.matrix_power(A.with_values(v), 3).todense()
    dense = jax.jit(jax.grad(lambda a: jnp.sum(jnp.linalg.matrix_power(a, 3) ** 2)))(
        jnp.asarray(a * 0.1)
    )
    found = jax.jit(jax.grad(lambda v: jnp.sum(f(v) ** 2)))(A.values)
    np.testing.assert_allclose(found, dense[np.nonzero(a)], rtol=1e-12)


def test_a_power_whose_factors_did_not_fit_is_nan():
    """A^3 has one entry, A^2 six: nobody asks A^2 for what did not fit."""
    a = np.zeros((8, 8))
    a[0, 1:4] = a[1:4, 4:7] = a[4:7, 7] = 1
    for nse, right in ((5, False), (6, True)):
        C = jax.jit(lambda A: linalg.matrix_power(A, 3, nse=nse))(of(a))  # noqa: B023
        assert C.overflow == 0
        assert np.array_equal(C.todense(), np.linalg.matrix_power(a, 3)) == right
        assert np.isnan(C.values).any() != right


@pytest.mark.parametrize(
    "times", [(0.0, 2.0, 3), (1.0, -1.0, 4, False), (0.5, 3.0, 1)], ids=lambda x: f"{x[2]}"
)
def test_exponentials_at_times(times):
    a = 0.1 * GENERAL
    found = linalg.expm_multiply(of(a), b, *times)
    want = [scipy.linalg.expm(t * a) @ b for t in np.linspace(*times)]
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-9)


def test_a_bound_that_the_norm_exceeds_gives_nan():
    A = of(np.diag(np.full(12, -40.0)))
    for bound, wrong in ((39.0, True), (40.0, False)):
        found = jax.jit(partial(linalg.expm_multiply, norm_bound=bound))(A, b)
        assert np.isnan(found).all() == wrong == np.isnan(found).any()
        f = lambda v, b: linalg.expm_multiply(A.with_values(v), b, norm_bound=bound).sum()  # noqa: B023
        for d in jax.jit(jax.grad(f, (0, 1)))(A.values, jnp.asarray(b)):
            assert np.isnan(d).all() == wrong == np.isnan(d).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_exponential_of_halves_is_rounded_once(dtype):
    A = of(np.diag([-8.0, 2.0])).astype(dtype)
    found = linalg.expm_multiply(A, jnp.ones(2, dtype), 0.0, 1.0, 2)
    assert found.dtype == dtype
    want = np.exp([[0.0, 0.0], [-8.0, 2.0]])
    np.testing.assert_allclose(np.float64(found), want, rtol=float(jnp.finfo(dtype).eps))


def test_an_exponential_of_a_captured_matrix_of_another_dtype():
    """A is a constant there: its norm is known, in B's dtype too."""
    a = integers(5, 5) * (RNG.random((5, 5)) < 0.4)
    X = RNG.standard_normal(5) * (1 + 1j)
    want = scipy.linalg.expm(a) @ X
    for A in (of(a), of(a).astype("int32")):
        with jax.numpy_dtype_promotion("standard"):
            found = jax.jit(lambda X: linalg.expm_multiply(A, X))(X)  # noqa: B023
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [0, 0.01, 1, -3])
def test_exponentials(scale):
    a = scale * 0.1 * GENERAL
    A = of(a)
    for X in (b, B):
        want = scipy.linalg.expm(a) @ X
        np.testing.assert_allclose(linalg.expm_multiply(A, X), want, rtol=1e-9, atol=1e-9)
        bound = float(linalg.norm(A, 1)) + 1
        found = jax.jit(partial(linalg.expm_multiply, norm_bound=bound))(A, X)
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-9)
        captured = jax.jit(lambda X: linalg.expm_multiply(A, X))(X)
        np.testing.assert_allclose(captured, want, rtol=1e-9, atol=1e-9)
    f = lambda v, X: jnp.sum(linalg.expm_multiply(A.with_values(v), X, norm_bound=bound) ** 2)
    dense = lambda a, X: jnp.sum((jax.scipy.linalg.expm(a) @ X) ** 2)
    if scale == 1:
        found = jax.jit(jax.grad(f, (0, 1)))(A.values, B)
        expected = jax.jit(jax.grad(dense, (0, 1)))(jnp.asarray(a), jnp.asarray(B))
        np.testing.assert_allclose(found[0], expected[0][np.nonzero(a)], rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-8)


A, WIDE = of(SYMMETRIC), of(integers(3, 4))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: linalg.cg(SYMMETRIC, b), TypeError, ["cg: A", "ndarray"]),
        (lambda: linalg.cg(WIDE, b), ValueError, ["square", "(3, 4)"]),
        (lambda: linalg.gmres(A, b[1:]), ValueError, ["gmres: b", "[12]", "[11]"]),
        (lambda: linalg.cg(A, b, B), ValueError, ["x0", "[12]", "[12, 3]"]),
        (lambda: linalg.cg(A, A), TypeError, ["b must be a dense"]),
        (lambda: linalg.cg(lambda x: x, {"x": b}), TypeError, ["cg: b must be a dense", "dict"]),
        (lambda: linalg.cg(A, np.array([1, None])), ValueError, ["cg: b", "numeric", "object"]),
        (lambda: linalg.cg(A, [[1], [2, 3]]), ValueError, ["cg: b: expected an array"]),
        (lambda: linalg.cg(A, b, "zeros"), TypeError, ["cg: x0 must be a dense array, got str"]),
        (lambda: linalg.cg(A, b, 1j * b), ValueError, ["cg: x0", "real numbers", "complex"]),
        (lambda: linalg.cg(lambda x: x[1:], b), ValueError, ["cg: A", "vector [12]", "got [11]"]),
        (lambda: linalg.cg(A, b, M=lambda x: (x, x)), ValueError, ["cg: M", "([12], [12])"]),
        (lambda: linalg.gmres(A, b, solve_method="x"), ValueError, ["gmres: solve_method", "'x'"]),
        (lambda: linalg.cg(A, b, M=SYMMETRIC), TypeError, ["cg: M"]),
        (lambda: linalg.bicgstab(A, b, M=WIDE), ValueError, ["bicgstab: M", "square"]),
        (lambda: linalg.cg(A, b, tol=-1), ValueError, ["cg: tol", "at least 0", "got -1"]),
        (lambda: linalg.gmres(A, b, rtol=np.nan), ValueError, ["gmres: rtol", "nan"]),
        (lambda: linalg.bicgstab(A, b, atol=-1e-3), ValueError, ["bicgstab: atol", "-0.001"]),
        (lambda: linalg.power_iteration(A, tol=np.nan), ValueError, ["power_iteration: tol"]),
        (lambda: linalg.lobpcg(A, B[:, :2], tol=-1.0), ValueError, ["lobpcg: tol", "-1"]),
        (lambda: linalg.jacobi(WIDE), ValueError, ["jacobi", "square"]),
        (lambda: linalg.chebyshev(A, degree=0), ValueError, ["degree", "got 0"]),
        (lambda: linalg.lobpcg(A, 0 * B[:, :2]), ValueError, ["lobpcg: X", "independent", "zeros"]),
        (lambda: linalg.ichol(A, shift="1"), ValueError, ["ichol: shift", "'1'"]),
        (lambda: linalg.chebyshev(A, degree=2.5), TypeError, ["chebyshev: degree", "got 2.5"]),
        (lambda: linalg.chebyshev(A, bounds=2), ValueError, ["chebyshev: bounds", "(a, b)"]),
        (lambda: linalg.chebyshev(A, bounds=(0, 0)), ValueError, ["bounds", "b > 0", "0.0 and"]),
        (lambda: linalg.chebyshev(A, bounds=(2, 1)), ValueError, ["bounds", "a <= b"]),
        (lambda: linalg.norm(SYMMETRIC), TypeError, ["norm: A"]),
        (lambda: linalg.norm(A, 2), NotImplementedError, ["power_iteration(A.T @ A)"]),
        (lambda: linalg.norm(A, 3), ValueError, ["ord", "got 3"]),
        (lambda: linalg.norm(A, "nuc"), ValueError, ["ord", "'nuc'"]),
        (lambda: linalg.norm(A, [1]), ValueError, ["ord", "[1]"]),
        (lambda: linalg.norm(A, axis=2), ValueError, ["axis", "got 2"]),
        (lambda: linalg.power_iteration(A, v0=b[1:]), ValueError, ["v0", "[12]", "[11]"]),
        (lambda: linalg.power_iteration(A, v0=0 * b), ValueError, ["v0", "not zero"]),
        (lambda: linalg.power_iteration(A, v0=1j * b), ValueError, ["v0", "real", "complex"]),
        (lambda: linalg.power_iteration(A, maxiter=0), ValueError, ["maxiter", "0"]),
        (
            lambda: linalg.power_iteration(of(np.zeros((0, 0)))),
            ValueError,
            ["power_iteration: A", "at least one row", "(0, 0)"],
        ),
        (lambda: linalg.expm_multiply(A, b[1:]), ValueError, ["B", "[11]"]),
        (lambda: linalg.matrix_power(WIDE, 2), ValueError, ["matrix_power", "square"]),
        (lambda: linalg.matrix_power(A, -1), ValueError, ["matrix_power: n", "-1"]),
        (lambda: jax.jit(linalg.matrix_power, static_argnums=1)(A, 2), ValueError, ["traced"]),
        (lambda: jax.jit(partial(linalg.matrix_power, A))(2), ValueError, ["products is static"]),
        (lambda: jax.jit(linalg.expm_multiply)(A, b), ValueError, ["norm_bound", "traced"]),
        (lambda: linalg.expm_multiply(A, b, norm_bound=-1), ValueError, ["norm_bound", "-1"]),
        (lambda: linalg.expm_multiply(A * np.nan, b), ValueError, ["norm_bound", "nan"]),
        (lambda: linalg.expm_multiply(A, b, norm_bound="3"), ValueError, ["norm_bound", "'3'"]),
        (lambda: linalg.expm_multiply(A, b, norm_bound=10**400), ValueError, ["no float holds"]),
        (lambda: linalg.expm_multiply(A * 1e12, b), NotImplementedError, ["norm of", "steps"]),
        (lambda: linalg.expm_multiply(A, b, "0", 1.0), ValueError, ["finite", "'0'"]),
        (lambda: linalg.expm_multiply(A, b, 0, 10**400), ValueError, ["finite", "and 1000"]),
        (lambda: linalg.expm_multiply(A, b, 0.0), ValueError, ["start and stop", "None"]),
        (lambda: linalg.expm_multiply(A, b, 0.0, np.inf), ValueError, ["finite", "inf"]),
    ],
)
def test_message(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_norms_keep_dimensions():
    dense = np.float64([[3, 0, 0], [4, 0, 1]])
    A = SparseArray.from_dense(dense)
    for axis, shape in ((None, (1, 1)), (0, (1, 3)), (1, (2, 1)), (-1, (2, 1))):
        found = linalg.norm(A, axis=axis, keepdims=True)
        assert found.shape == shape
        np.testing.assert_allclose(found, np.linalg.norm(dense, axis=axis, keepdims=True))


def test_norms_of_narrow_dtypes_are_summed_in_wider_ones():
    A = SparseArray.from_dense(np.float16([[300, 0], [0, 300]]))
    assert linalg.norm(A).dtype == np.float16
    np.testing.assert_allclose(linalg.norm(A), 300 * np.sqrt(2), rtol=1e-3)
    np.testing.assert_allclose(linalg.norm(SparseArray.from_dense(np.int8([[-128]])), 1), 128)


def test_a_traced_tolerance_below_zero_is_zero():
    """JAX squares it: -1 of `atol` would stop where the residual is 1."""
    A = SparseArray.from_dense(np.diag([1.0, 2, 4]))
    x, info = jax.jit(lambda t: linalg.cg(A, np.ones(3), tol=t, atol=t))(-1.0)
    np.testing.assert_allclose(x, [1, 0.5, 0.25], rtol=1e-6)
    assert info.dtype == np.int32


def test_solvers_of_narrow_dtypes_of_nothing_and_of_wrong_arguments():
    A, b = SparseArray.from_dense(jnp.diag(jnp.bfloat16([1, 2, 4]))), jnp.ones(3, jnp.bfloat16)
    for solver in (linalg.cg, linalg.bicgstab, linalg.gmres):
        x, _ = solver(A, b)
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x, jnp.bfloat16([1, 0.5, 0.25]))
        assert solver(SparseArray.from_dense(np.zeros((0, 0))), np.zeros(0))[0].shape == (0,)
        with pytest.raises(ValueError, match=f"{solver.__name__}: M: expected 3 rows"):
            solver(A, b, M=SparseArray.from_dense(np.eye(2)))
        with pytest.raises((TypeError, ValueError), match="maxiter"):
            solver(A, b, maxiter="a")
        far = solver(A, b, rtol=Fraction(2))[0]  # SciPy's name of tol: zeros are near enough
        assert not np.asarray(far, np.float32).any()
    with pytest.raises(ValueError, match="restart"):
        linalg.gmres(A, b, restart=0)
