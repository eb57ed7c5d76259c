"""Norms, the dominant eigenvalue, powers, and the action of the exponential of a sparse matrix."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import checks
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.compose import eye
from sgap_jax.formats.levels import CSC, CSR
from sgap_jax.linalg.operands import (
    check_right_side,
    check_square,
    check_start,
    floating,
    power_of_two,
    product,
)
from sgap_jax.primitives._define import accumulator, check_sparse
from sgap_jax.primitives.spgemm import spgemm


def norm(
    A: SparseArray,
    ord: float | Literal["fro"] | None = None,
    axis: int | None = None,
    *,
    keepdims: bool = False,
) -> jax.Array:
    """A norm of a sparse matrix, or of each column (axis=0) or row (axis=1).

    Args:
      A: sparse [m, n] of any format.
      ord: of the matrix None or "fro" (root of the sum of squares), 1 and inf (greatest sum of
        absolute values of a column, of a row), -1 and -inf (least); of vectors None or 2, 1, inf.
      axis: None, 0 or 1 (-1, -2).
      keepdims: keep the axes along which norms are taken, with size 1.

    Returns [], or [n] or [m], real and floating. Differentiable in the values; the derivative of a
    root at zero is zero. Sums are in float32 at least. ValueError for another ord or axis,
    NotImplementedError for the spectral norm.

    Source: `scipy.sparse.linalg.norm`.
    """
    op = "norm"
    check_sparse(op, "A", A)
    if checks.check_flag(keepdims, "keepdims", op):
        found = norm(A, ord, axis)
        return found.reshape(1, 1) if axis is None else jnp.expand_dims(found, axis)
    dtype = floating(op, A)
    real = jnp.finfo(dtype).dtype
    if isinstance(ord, np.generic | np.ndarray | jax.Array):  # a number of NumPy's or JAX's
        checks.check_concrete(ord, "ord", op, "it is a choice")
        ord = np.asarray(ord).tolist()
    A = abs(A.sum_duplicates().astype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype))
    if axis is None:
        if ord == 2 or ord == -2:
            raise NotImplementedError(
                f"{op}: ord={ord!r}: the singular values; the nearest is the root of "
                "power_iteration(A.T @ A)[0], which is the greatest"
            )
        if ord is None or ord == "fro":
            return _root((A**2).sum()).astype(real)
        if isinstance(ord, int | float) and abs(ord) in (1, math.inf):
            sums = A.sum(axis=0 if abs(ord) == 1 else 1)
            if not sums.size:
                return jnp.zeros((), real)
            return (sums.max() if ord > 0 else sums.min()).astype(real)
    elif axis in (0, 1, -1, -2):
        if ord is None or ord == 2:
            return _root((A**2).sum(axis)).astype(real)
        if ord == 1:
            return A.sum(axis).astype(real)
        if ord == math.inf:
            empty = A.shape[axis] == 0  # of which there is no greatest
            return (A.sum if empty else A.max)(axis).astype(real)
    else:
        raise ValueError(f"{op}: axis: expected None, 0 or 1, got {axis!r}")
    raise ValueError(
        f"{op}: ord: expected None, 'fro', 1, -1, inf or -inf of a matrix and None, 1, 2 or inf "
        f"along an axis, got {ord!r} with axis={axis!r}"
    )


def _root(squares: jax.Array) -> jax.Array:
    """The square root, whose derivative at zero is zero."""
    zero = squares == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, squares))).astype(squares.dtype)


def power_iteration(
    A: SparseArray,
    *,
    v0: Any = None,
    tol: float = 1e-6,
    maxiter: int = 1000,
    symmetric: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The eigenvalue of greatest magnitude, and its eigenvector: x <- A x / norm(A x).

    The value is differentiable in A's values, once: its derivative is u^H dA x / (u^H x) for the
    left and right eigenvectors u and x, where it is a single eigenvalue. The vector has none.

    Args:
      A: sparse [n, n] of any format; its dominant eigenvalue is real, or A complex.
      v0: [n], where to begin; None: a fixed pseudo-random vector.
      tol: stops at norm(A x - value x) <= `tol |value|`, or after `maxiter` products (static).
      symmetric: A is Hermitian, so that u = x; otherwise A^H is iterated too.

    Returns (value [], x [n] of norm 1), floating. TypeError, ValueError for an A that is not a
    square SparseArray, a v0 of another shape or of zeros, and a tol that is negative or NaN.

    Source: Golub and Van Loan, Matrix Computations, section 7.3.1.
    """
    op = "power_iteration"
    A = check_square(op, A)
    dtype = floating(op, A)
    maxiter = checks.check_count(maxiter, "maxiter", op, 1)
    symmetric = checks.check_flag(symmetric, "symmetric", op)
    tol = checks.check_share(tol, "tol", op, math.inf)
    if A.shape[0] == 0:
        raise ValueError(f"{op}: A: expected at least one row, got shape {A.shape}")
    if v0 is None:
        v0 = np.random.default_rng(0).standard_normal(A.shape[0])
    v0 = check_start(op, v0, "v0", A.shape[:1], dtype)
    if not checks.is_traced(v0) and not np.any(np.asarray(v0)):
        raise ValueError(f"{op}: v0: expected a vector that is not zero")
    return _dominant(A.astype(dtype), v0, tol, maxiter, symmetric)


@partial(jax.jit, static_argnames=("maxiter", "symmetric"))
def _dominant(
    A: SparseArray, v0: jax.Array, tol: Any, maxiter: int, symmetric: bool
) -> tuple[jax.Array, jax.Array]:
    fixed = _in_range(A)
    v0 = jax.lax.stop_gradient(v0)
    right = _iterated(fixed, v0 / power_of_two(v0), tol, maxiter)
    left = right
    if not symmetric:
        adjoint = fixed.with_values(jnp.conj(fixed.values)).T
        if fixed.format == CSR:  # once, for products of rows in all steps
            adjoint = adjoint.tocsr()
        left = _iterated(adjoint, right, tol, maxiter)
        # Of a defective eigenvalue, such as that of a nilpotent matrix, they are orthogonal.
        left = jnp.where(jnp.vdot(left, right) == 0, right, left)
    return jnp.vdot(left, A @ right) / jnp.vdot(left, right), right


def _in_range(A: SparseArray) -> SparseArray:
    """A times a power of two, so that squares of what it gives are in range; no derivative."""
    values = jax.lax.stop_gradient(A.values)
    return A.with_values(values / power_of_two(values.reshape(-1)) if values.size else values)


def _iterated(A: SparseArray, start: jax.Array, tol: Any, maxiter: int) -> jax.Array:
    def unit(x: jax.Array) -> jax.Array:
        size = jnp.linalg.norm(x)
        return x / jnp.where(size == 0, 1, size).astype(x.dtype)

    def going(state: tuple) -> jax.Array:
        x, image, step = state
        value = jnp.vdot(x, image)
        error = jnp.linalg.norm(image - value * x)
        return (step < maxiter) & (error > tol * jnp.abs(value))

    def body(state: tuple) -> tuple:
        _, image, step = state
        x = unit(image)
        return x, A @ x, step + 1

    x = unit(start)
    return jax.lax.while_loop(going, body, (x, A @ x, jnp.zeros((), jnp.int32)))[0]


def lobpcg(
    A: SparseArray, X: Any, *, largest: bool = True, tol: float | None = None, maxiter: int = 100
) -> tuple[jax.Array, jax.Array]:
    """(values [k], vectors [n, k]): the k greatest or least eigenvalues of a symmetric matrix, by
    the locally optimal block preconditioned conjugate gradient method.

    Values are in descending order, ascending for the least. They are differentiable in A's values,
    once: where they differ, d values[i] = u_i^T dA u_i. The vectors have no derivative.

    Args:
      A: sparse [n, n] of any format, real and symmetric; values may be traced.
      X: dense [n, k], where to begin, of linearly independent columns; 5 k < n.
      largest: static; False finds the least, as those of c I - A with c the 1-norm of A.
      tol: stops where the residual is as small, relative to the norms of A and its value; None is a
        multiple of the rounding.
      maxiter: static.

    Raises TypeError, ValueError for an A that is not square and real, an X that does not match, and
    a tol that is negative or NaN. Source: `jax.experimental.sparse.linalg.lobpcg_standard`,
    `scipy.sparse.linalg.lobpcg`; Knyazev (2001).
    """

    op = "lobpcg"
    A = check_square(op, A)
    X = check_right_side(op, A, X, "X")
    if X.ndim != 2 or not 0 < 5 * X.shape[1] < A.shape[0]:
        raise ValueError(
            f"{op}: X: expected shape [{A.shape[0]}, k] with 0 < 5 k < {A.shape[0]}, got "
            f"{list(X.shape)}"
        )
    if not jnp.issubdtype(X.dtype, jnp.floating):
        raise ValueError(f"{op}: A: expected a real matrix, got {A.dtype}, and X of {X.dtype}")
    if not checks.is_traced(X) and not np.asarray(X).any(0).all():
        raise ValueError(f"{op}: X: expected linearly independent columns, got one of zeros")
    largest = checks.check_flag(largest, "largest", op)
    maxiter = checks.check_count(maxiter, "maxiter", op, 1)
    tol = None if tol is None else checks.check_share(tol, "tol", op, math.inf)
    wide = jnp.float32 if jnp.finfo(X.dtype).bits < 32 else X.dtype
    values, vectors = _lobpcg(A.astype(wide), X.astype(wide), tol, largest, maxiter)
    return values.astype(X.dtype), vectors.astype(X.dtype)


@partial(jax.jit, static_argnames=("largest", "maxiter"))
def _lobpcg(
    A: SparseArray, X: jax.Array, tol: Any, largest: bool, maxiter: int
) -> tuple[jax.Array, jax.Array]:
    fixed = _in_range(A)
    X = X / power_of_two(X)[None]
    bound = norm(fixed, 1)

    from jax.experimental.sparse.linalg import lobpcg_standard  # takes 0.2 s

    # JAX's bases may have columns of zeros, which it takes for vectors of the eigenvalue 0 where
    # those that it looks for are not greater: then they are NaN. A greater shift makes them so.
    enough = jnp.where(bound == 0, 1, 1.25 * bound).astype(X.dtype)
    shifts = jnp.stack([jnp.zeros_like(enough) if largest else bound, enough])

    def lost(state: tuple) -> jax.Array:
        turn, vectors = state
        return (turn < 2) & jnp.isnan(vectors).any()

    def found(state: tuple) -> tuple:
        """The vectors of the greatest eigenvalues of shift I + A, or of shift I - A."""
        turn, _ = state

        def times(X: jax.Array) -> jax.Array:
            image = product(fixed, X)
            return shifts[turn] * X + (image if largest else -image)

        return turn + 1, lobpcg_standard(times, jax.lax.stop_gradient(X), maxiter, tol)[1]

    start = jnp.zeros((), jnp.int32), jnp.full_like(X, jnp.nan)
    _, vectors = jax.lax.while_loop(lost, found, jax.lax.stop_gradient(start))
    return jnp.sum(vectors * product(A, vectors), axis=0), vectors


# For each number of terms of the Taylor series the greatest norm at which they give e^A to 2^-53:
# Al-Mohy and Higham (2011), table 3.1. With at most 30 terms no sum cancels more than e^3.5.
_LARGEST_NORM = {5: 2.4e-3, 10: 1.4e-1, 15: 6.4e-1, 20: 1.4, 25: 2.4, 30: 3.5}


def expm_multiply(
    A: SparseArray,
    B: Any,
    start: float | None = None,
    stop: float | None = None,
    num: int = 50,
    endpoint: bool = True,
    *,
    norm_bound: float | None = None,
) -> jax.Array:
    """The action of the matrix exponential, e^A B, without e^A: the solution at time 1 of
    dX/dt = A X from X(0) = B; or its solutions e^(tA) B at evenly spaced times t.

    Truncated Taylor series in equal steps, s of them with m terms each: s m products with A. Both
    numbers are static and follow from the 1-norm of A. Differentiable in the values of A and in B,
    forward and reverse (which holds s arrays as B and computes each step once more).

    Args:
      A: sparse [n, n] of any format.
      B: dense [n] or [n, k].
      start, stop, num, endpoint: the times, as of `numpy.linspace`: numbers that are known. Without
        start and stop it is time 1 alone.
      norm_bound: of a traced A (an argument of `jit`, or values of which a derivative is taken), a
        number that its 1-norm does not exceed: needed there. Where the norm is greater by more than
        1%, the result and its derivatives are NaN, as there are too few terms.

    Returns an array as B, or [num, ...] of them, in the promoted dtype of A and B, floating; sums
    are carried in float32 at least. TypeError or ValueError for an A that is not a square
    SparseArray, a B that does not match, one of start and stop, and a traced A without a bound.

    Source: Al-Mohy and Higham, SIAM J. Sci. Comput. 33 (2011); `scipy.sparse.linalg.expm_multiply`.
    """
    op = "expm_multiply"
    A = check_square(op, A)
    B = check_right_side(op, A, B, "B")
    dtype, wide = B.dtype, accumulator(B.dtype)
    given = norm_bound
    if given is None:
        if checks.is_traced(*jax.tree.leaves(A)):
            raise ValueError(
                f"{op}: norm_bound: A is traced, so its 1-norm is not known, and the number of "
                "steps is static; pass a number that the norm does not exceed"
            )
        with jax.ensure_compile_time_eval():  # A may be a constant of a program
            norm_bound = float(norm(A.astype(wide), 1))
    checks.check_concrete(norm_bound, "norm_bound", op, "the number of steps is static")
    bound = float(checks.check_share(norm_bound, "norm_bound", op, math.inf))
    if bound == math.inf:
        raise ValueError(f"{op}: norm_bound: expected a finite number, got inf")
    A, B = A.astype(wide), B.astype(wide)
    if given is not None:
        fixed = A.with_values(jax.lax.stop_gradient(A.values))
        # A factor, as the derivative of a choice between B and NaN would be zero.
        B = B * jnp.where(norm(fixed, 1) <= 1.01 * bound, 1, jnp.nan).astype(B.real.dtype)
    if start is None and stop is None:
        return _exponential(A, B, 1.0, *_steps_and_terms(op, bound)).astype(dtype)
    checks.check_concrete((start, stop), "start and stop", op, "the number of steps is static")
    begin, end = _finite(op, start, stop)
    num = checks.check_count(num, "num", op)
    endpoint = checks.check_flag(endpoint, "endpoint", op)
    _, step = np.linspace(begin, end, max(num, 2), endpoint=endpoint, retstep=True)
    apart = float(step)  # of no dtype
    first = _exponential(A, B, begin, *_steps_and_terms(op, abs(begin) * bound))
    steps, terms = _steps_and_terms(op, abs(apart) * bound)

    def later(X: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
        return _exponential(A, X, apart, steps, terms), X.astype(dtype)

    return jax.lax.scan(later, first, None, length=num)[1]


def _finite(op: str, *times: Any) -> list[float]:
    try:
        found = [math.nan if isinstance(x, str) else float(x) for x in times]
    except (TypeError, ValueError, OverflowError):
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        got = " and ".join(map(repr, times))
        raise ValueError(f"{op}: expected both start and stop, finite, got {got}")
    return found


def _steps_and_terms(op: str, bound: float) -> tuple[int, int]:
    """The numbers of steps and of terms that take the fewest products, for a norm."""
    if bound > checks.INT32_MAX:
        raise NotImplementedError(
            f"{op}: a norm of {bound:.3g} for each time takes as many steps; the nearest is one up "
            "to 2^31"
        )
    choices = [(m * max(math.ceil(bound / most), 1), m) for m, most in _LARGEST_NORM.items()]
    products, terms = min(choices)
    return products // terms, terms


@partial(jax.jit, static_argnames=("steps", "terms"))
def _exponential(A: SparseArray, B: jax.Array, time: Any, steps: int, terms: int) -> jax.Array:
    @jax.checkpoint
    def step(X: jax.Array, _: Any) -> tuple[jax.Array, None]:
        def term(carried: tuple, order: jax.Array) -> tuple[tuple, None]:
            total, last = carried
            last = product(A, last) * (time / (steps * order)).astype(last.dtype)
            return (total + last, last), None

        orders = jnp.arange(1, terms + 1).astype(X.real.dtype).astype(X.dtype)
        (total, _), _ = jax.lax.scan(term, (X, X), orders)
        return total, None

    return jax.lax.scan(step, B, None, length=steps)[0]


def matrix_power(A: SparseArray, n: int, *, nse: int | None = None) -> SparseArray:
    """A A ... A, n factors: a sparse product for each bit of n, and for each that is set.

    Args:
      A: sparse [k, k] in CSR, CSC, COO or CSF; its structure is concrete, or nse is given.
      n: from 0 on; the power 0 is the identity.
      nse: how many entries each product can store (static), as of `spgemm`; `overflow` of the
        result counts those of the last product that did not fit. If entries of a product before
        that did not fit inside jit, the values are NaN; integers have no NaN, and are wrong.

    Returns a SparseArray [k, k] in A's dtype: A itself for n = 1, else in CSR, or CSC of a CSC
    array. Differentiable in the values, to any order. Each product rounds once, from sums in
    float32 at least.

    Raises ValueError for another n, a matrix that is not square, and a traced structure without
    nse; NotImplementedError for vectors and blocks.

    Source: `scipy.sparse.linalg.matrix_power`; products by `spgemm`.
    """
    op = "matrix_power"
    A = check_square(op, A)
    checks.check_concrete(n, "n", op, "the number of products is static")
    n = checks.check_count(n, "n", op)
    if n == 0:
        return eye(A.shape[0], dtype=A.dtype, format=CSC if A.format == CSC else CSR)
    found, square = None, A
    products = [A]  # the factors: A and, in order, all products
    while n:
        if n & 1 and found is not None:
            products.append(spgemm(found, square, nse=nse))
            found = products[-1]
        elif n & 1:
            found = square
        n >>= 1
        if n:
            products.append(spgemm(square, square, nse=nse))
            square = products[-1]
    assert found is products[-1]
    lossy = [C for C in products[1:-1] if not C.is_checked]
    if not lossy or not jnp.issubdtype(A.dtype, jnp.inexact):
        return found
    lost = sum(jnp.minimum(C.overflow, 1) for C in lossy)
    return found.with_values(found.values * jnp.where(lost > 0, jnp.nan, 1).astype(A.dtype))
