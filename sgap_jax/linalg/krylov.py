"""Krylov solvers of A x = b with a sparse A: thin over `jax.scipy.sparse.linalg`.

Derivatives are those of the solution, by `jax.lax.custom_linear_solve`: a solve with A or A^T to
the same tolerance, and no derivative of the iteration.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.scipy.sparse import linalg

from sgap_jax.formats import checks
from sgap_jax.formats.array import SparseArray
from sgap_jax.linalg.operands import (
    Operator,
    applied,
    check_operator,
    check_right_side,
    check_start,
    power_of_two,
    product,
)


def cg(
    A: Operator,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Operator | None = None,
    rtol: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Conjugate gradients: x with A x = b, for a Hermitian positive definite A.

    Stops at norm(b - A x) <= max(tol norm(b), atol). Differentiable in b and in the values of A, to
    any order; the gradient takes one more solve, (-lambda x^T) at A's entries where A lambda = dx.

    Args:
      A: sparse [n, n] of any format, or a function of a vector.
      b: dense [n], or [n, k]: the columns are solved at once, each to its tolerance.
      x0: where to begin, as b; zeros by default, and where x0 is so large that the rounding of A x0
        exceeds the tolerance.
      tol, atol: at least 0; may be traced, and negative ones are then 0.
      maxiter: static; 10 n by default.
      M: an approximation of A's inverse: sparse or a function, such as `jacobi(A)`, `ichol(A)` and
        `chebyshev(A)`; Hermitian positive definite.
      rtol: SciPy's name of `tol`, in its place if given.

    Returns:
      (x, info): x as b, in the promoted dtype of A and b, and an int32, as in SciPy: 0 if
      norm(b - A x) <= 2 max(tol norm(b), atol) in each column, else how many iterations were
      allowed. Twice, because the iteration stops at a residual that it updates, from which rounding
      takes it. Of 16-bit operands, x before it is rounded. It costs one product with A; JAX's
      solvers give None. Where the residual of a column is NaN or infinite, x and its gradients are
      NaN there.

    Raises TypeError for an A, M or b of another kind, ValueError for shapes that do not match and a
    tolerance that is negative or NaN. Source: `jax.scipy.sparse.linalg.cg`; Hestenes and Stiefel
    (1952).
    """
    return _solved("cg", A, b, x0, M, rtol, tol=tol, atol=atol, maxiter=maxiter)


def bicgstab(
    A: Operator,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Operator | None = None,
    rtol: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Stabilized biconjugate gradients, for any invertible A; else as `cg`.

    Its gradient takes a solve with A^T. Source: `jax.scipy.sparse.linalg.bicgstab`; van der Vorst
    (1992).
    """
    return _solved("bicgstab", A, b, x0, M, rtol, tol=tol, atol=atol, maxiter=maxiter)


def gmres(
    A: Operator,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    restart: int = 20,
    maxiter: int | None = None,
    M: Operator | None = None,
    rtol: float | None = None,
    solve_method: Literal["batched", "incremental"] = "batched",
) -> tuple[jax.Array, jax.Array]:
    """Generalized minimal residuals, for any invertible A; else as `cg`.

    `restart` (static) vectors of the Krylov space are held; `solve_method` is "batched" or
    "incremental". Its gradient takes a solve with A^T. Source: `jax.scipy.sparse.linalg.gmres`;
    Saad and Schultz (1986).
    """
    own = dict(restart=restart, solve_method=solve_method)
    return _solved("gmres", A, b, x0, M, rtol, tol=tol, atol=atol, maxiter=maxiter, **own)


def _solved(
    op: str, A: Any, b: Any, x0: Any, M: Any, rtol: Any, **options: Any
) -> tuple[jax.Array, jax.Array]:
    if rtol is not None:
        options["tol"] = checks.check_share(rtol, "rtol", op, math.inf)
    for name in ("tol", "atol"):  # JAX's solvers square them, so that -1 would be 1
        limit = checks.check_share(options[name], name, op, math.inf)
        options[name] = jnp.maximum(limit, 0) if checks.is_traced(limit) else limit
    A = check_operator(op, A, "A")
    b = check_right_side(op, A, b)
    M = None if M is None else check_operator(op, M, "M")
    if isinstance(M, SparseArray) and M.shape[0] != b.shape[0]:
        raise ValueError(f"{op}: M: expected {b.shape[0]} rows, as b, got shape {M.shape}")
    for name in ("maxiter", "restart"):
        if options.get(name) is not None:
            options[name] = checks.check_count(options[name], name, op, 1)
    method = options.get("solve_method", "batched")
    if method not in ("batched", "incremental"):
        raise ValueError(f"{op}: solve_method: expected 'batched' or 'incremental', got {method!r}")
    if x0 is not None:
        x0 = check_start(op, x0, "x0", b.shape, b.dtype)
    if not b.size:
        return jnp.zeros_like(b), jnp.int32(0)
    dtype = b.dtype
    if jnp.finfo(dtype).bits < 32:  # sums in float32 at least
        b, x0 = b.astype(jnp.float32), None if x0 is None else x0.astype(jnp.float32)
    # One program for all values of A, and for others of its structure. A plain function may hold
    # tracers: it is no argument of a program.
    functions = [x for x in (A, M) if callable(x) and not isinstance(x, jax.tree_util.Partial)]
    x, info = (_solve if functions else _program)(op, A, b, x0, M, **options)
    return x.astype(dtype), info


def _solve(op: str, A: Any, b: Any, x0: Any, M: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    solver = getattr(linalg, op)
    precondition = None if M is None else partial(applied, op, "M", M)

    def solve(x0: Any, matvec: Any, b: jax.Array) -> jax.Array:
        # JAX's solvers square norms, which of small and large vectors leave the range of the dtype.
        # What is linear in b is scaled with it: x0, whose residual they square, and atol.
        scale = power_of_two(b)
        if x0 is not None:
            size = power_of_two(x0)
            part = matvec(x0 / size)
            image = part * size  # of x0 near the end of the range it may overflow
            far = _too_far(part, b / scale, size.real / scale.real, scale.real, options)
            like = jnp.concatenate([b, jnp.where(jnp.isfinite(image).all(), image, x0)])
            scale = jnp.where(far, scale, power_of_two(like))
            x0 = jnp.where(far, 0, x0)
        own = options | {"atol": options["atol"] / scale.real}
        x0 = None if x0 is None else x0 / scale
        x = scale * solver(matvec, b / scale, x0, M=precondition, **own)[0]
        return jnp.where(jnp.isfinite(b).all(), x, jnp.nan)  # for others JAX's solvers return x0

    def of_vector(b: jax.Array, x0: Any) -> jax.Array:
        x0 = None if x0 is None else jax.lax.stop_gradient(x0)
        own, of_cotangent = partial(solve, x0), partial(solve, None)  # which x0 is not near to
        symmetric = op == "cg" and not jnp.iscomplexobj(b)
        return jax.lax.custom_linear_solve(
            partial(applied, op, "A", A), b, own, of_cotangent, symmetric=symmetric
        )

    each = of_vector
    if b.ndim == 2:
        each = jax.vmap(of_vector, in_axes=(1, None if x0 is None else 1), out_axes=1)
    x = each(b, x0)
    unknown, info = _found(A, b, x, options)
    # A factor, so that cotangents are NaN too: their own solves know nothing of this one.
    return x * jnp.where(unknown if b.ndim == 1 else unknown[None], jnp.nan, 1.0), info


def _too_far(
    image: jax.Array, b: jax.Array, size: jax.Array, scale: jax.Array, options: dict[str, Any]
) -> jax.Array:
    """Whether the rounding of A x0 = size image alone is more than the residual that is allowed:
    then nothing that begins at x0 gets there, and zeros are nearer. Of b and size by `scale`."""
    eps = float(jnp.finfo(b.dtype).eps)
    enough = jnp.maximum(options["tol"], eps) * jnp.linalg.norm(b)
    enough = jnp.maximum(enough, options["atol"] / scale)
    return eps / 2 * jnp.max(jnp.abs(image)) > enough / size  # squares may be out of range


def _found(
    A: Any, b: jax.Array, x: jax.Array, options: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """[] or [k]: whether the residual is NaN or infinite; and [], int32: 0 where every column has
    converged, else the number of allowed iterations."""
    b, x = jax.lax.stop_gradient((b, x))
    if isinstance(A, SparseArray):
        A = jax.lax.stop_gradient(A)
    own = partial(product, A)
    # Of scaled b and x, because A x may overflow where b - A x does not. x / first is finite too.
    first = power_of_two(jnp.concatenate([b, x * float(jnp.finfo(b.dtype).tiny) ** 0.5]))
    b, x = b / first[None], x / first[None]
    left = b - (own(x) if b.ndim == 1 else jax.vmap(own, in_axes=1, out_axes=1)(x))
    scale = power_of_two(jnp.concatenate([b, left]))
    b, left, atol = b / scale[None], left / scale[None], options["atol"] / first.real / scale.real
    enough = jnp.maximum(options["tol"] * jnp.linalg.norm(b, axis=0), atol)
    residual = jnp.linalg.norm(left, axis=0)
    unknown = ~jnp.isfinite(residual)
    converged = jnp.all((residual <= 2 * enough) & ~unknown)
    allowed = 10 * b.shape[0] if options["maxiter"] is None else options["maxiter"]
    info = jnp.where(converged, 0, min(allowed, checks.INT32_MAX)).astype(jnp.int32)
    return unknown, info


_program = jax.jit(_solve, static_argnames=("op", "maxiter", "restart", "solve_method"))
