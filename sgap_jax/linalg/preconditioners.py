"""Approximations of a sparse matrix's inverse, for the argument `M` of the solvers: functions of a
vector [n], or of columns [n, k], that are pytrees, and so may be arguments of jitted functions.

A solution does not depend on its preconditioner, so nothing is differentiated in them.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from sgap_jax.formats import checks
from sgap_jax.formats.array import SparseArray
from sgap_jax.linalg.operands import check_square, floating, product
from sgap_jax.linalg.spectral import power_iteration


def jacobi(A: SparseArray) -> Partial:
    """r -> r / diagonal(A), with 1 in place of zeros: for diagonals that vary much.

    A: sparse [n, n] of any format, values may be traced. ValueError unless it is square.
    Source: Saad, Iterative Methods for Sparse Linear Systems (2003), section 10.2.
    """
    return Partial(_jacobi, _inverse_diagonal(check_square("jacobi", A)))


def chebyshev(A: SparseArray, *, degree: int = 3, bounds: tuple[Any, Any] | None = None) -> Partial:
    """r -> p(A) r: `degree` steps of Chebyshev's iteration for A x = r from zero, with Jacobi.

    Each use takes degree - 1 products with A. A Hermitian positive definite, of any format, values
    may be traced.

    Args:
      degree: static, at least 1 (which is Jacobi, scaled).
      bounds: (a, b), an interval that holds the eigenvalues of diagonal(A)^-1 A that are to be
        damped; larger ones than b make M indefinite. None: (b / 30, b) with b 1.1 times the
        greatest by `power_iteration`, as multigrid smoothers take it.

    Raises ValueError for an A that is not square, and a degree below 1.
    Source: Saad (2003), algorithm 12.1; Adams et al., J. Comput. Phys. 188 (2003), for the bounds.
    """
    op = "chebyshev"
    A = _fixed(check_square(op, A))
    degree = checks.check_count(degree, "degree", op, 1)
    inverse = _inverse_diagonal(A)
    if bounds is not None:
        low, high = _interval(op, bounds)
    elif A.shape[0]:
        high = 1.1 * jnp.abs(power_iteration(A * inverse[:, None], maxiter=20)[0])
        high = jnp.where(high == 0, 1, high)  # of a matrix of zeros any interval will do
        low = high / 30
    else:
        low, high = 1, 1
    low, high = (jnp.asarray(x).astype(inverse.dtype) for x in (low, high))
    return Partial(Partial(_chebyshev, degree), A, inverse, low, high)


def _interval(op: str, bounds: Any) -> tuple[Any, Any]:
    """(a, b) with 0 <= a <= b and 0 < b, as far as they are known."""
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise ValueError(f"{op}: bounds: expected (a, b) or None, got {bounds!r}") from None
    low, high = (checks.check_share(x, "bounds", op, math.inf) for x in (low, high))
    known = not checks.is_traced(low, high)
    if known and not (low <= high and 0 < high < math.inf):
        raise ValueError(
            f"{op}: bounds: expected 0 <= a <= b with a finite b > 0, got {low} and {high}"
        )
    return low, high


def _inverse_diagonal(A: SparseArray) -> jax.Array:
    diagonal = _fixed(A).diagonal()
    diagonal = diagonal.astype(floating("jacobi", A))
    return 1 / jnp.where(diagonal == 0, jnp.ones((), diagonal.dtype), diagonal)


def _right_side(op: str, inverse: jax.Array, r: Any) -> jax.Array:
    """r [n] or [n, k] in its own dtype, or in A's where that is of integers, or real beside complex
    values."""
    r = jnp.asarray(r)
    n = inverse.shape[0]
    if r.ndim not in (1, 2) or r.shape[0] != n:
        raise ValueError(f"{op}: r: expected shape [{n}] or [{n}, k], got {list(r.shape)}")
    lossy = jnp.iscomplexobj(inverse) and not jnp.iscomplexobj(r)
    own = jnp.issubdtype(r.dtype, jnp.inexact) and not lossy
    return r if own else r.astype(inverse.dtype)


def _jacobi(inverse: jax.Array, r: Any) -> jax.Array:
    return _scaled(inverse, _right_side("jacobi", inverse, r))


def _scaled(inverse: jax.Array, r: jax.Array) -> jax.Array:
    return inverse.astype(r.dtype).reshape(-1, *[1] * (r.ndim - 1)) * r


def _chebyshev(degree: int, A: SparseArray, inverse: Any, low: Any, high: Any, r: Any) -> jax.Array:
    r = _right_side("chebyshev", inverse, r)
    low, high = low.astype(r.dtype), high.astype(r.dtype)
    middle, half = (high + low) / 2, (high - low) / 2
    rho = half / middle
    step = _scaled(inverse, r) / middle
    x = step
    for _ in range(degree - 1):
        r = r - product(A, step)
        size = 1 / (2 * middle - rho * half)  # of an interval of one point too, where half is zero
        after = half * size
        step = after * rho * step + 2 * size * _scaled(inverse, r)
        x, rho = x + step, after
    return x


def _fixed(A: SparseArray) -> SparseArray:
    return A.with_values(jax.lax.stop_gradient(A.values))
