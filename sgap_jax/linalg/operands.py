"""Checks of the operands of `sgap_jax.linalg`, and products with a dense vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats import checks
from sgap_jax.formats.array import SparseArray
from sgap_jax.primitives._define import check_sparse

Operator = SparseArray | Callable[[jax.Array], jax.Array]


def check_square(op: str, A: Any, name: str = "A") -> SparseArray:
    check_sparse(op, name, A)
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"{op}: {name}: expected a square matrix, got shape {A.shape}")
    return A


def check_operator(op: str, A: Any, name: str) -> Operator:
    """A square SparseArray, or a function of a vector."""
    if isinstance(A, SparseArray):
        return check_square(op, A, name)
    if not callable(A):
        raise TypeError(
            f"{op}: {name} must be a SparseArray or a function of a vector, got "
            f"{type(A).__name__}; jnp.linalg.solve is for dense matrices"
        )
    return A


def product(A: Operator, x: jax.Array) -> jax.Array:
    """A x, in the dtype of x."""
    if isinstance(A, SparseArray):
        return A.astype(x.dtype) @ x
    return A(x)


def applied(op: str, name: str, A: Operator, x: jax.Array) -> jax.Array:
    """`product`; ValueError where a function gives anything but a vector as x."""
    y = product(A, x)
    if getattr(y, "shape", None) != x.shape:
        raise ValueError(
            f"{op}: {name}: expected a function of a vector {list(x.shape)} that gives one of that "
            f"shape, got {jax.tree.map(lambda y: list(jnp.shape(y)), y)}"
        )
    return y


def floating(op: str, *arrays: Any) -> Any:
    """The promoted dtype of all, and for integers that of floats."""
    dtype = jnp.result_type(*(x.dtype for x in arrays))
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def check_dense(op: str, x: Any, name: str) -> jax.Array:
    """x as an array of numbers."""
    if x is None or isinstance(x, str | Mapping) or hasattr(x, "todense"):
        raise TypeError(f"{op}: {name} must be a dense array, got {type(x).__name__}")
    try:
        x = checks.as_array(x)
    except ValueError as error:
        raise ValueError(f"{op}: {name}: expected an array, got {error}") from None
    checks.check_numeric(x.dtype, op, name)
    return jnp.asarray(x)


def check_start(op: str, x: Any, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Where to begin, an array of this shape, in the dtype of the result."""
    x = check_dense(op, x, name)
    if x.shape != shape:
        raise ValueError(f"{op}: {name}: expected shape {list(shape)}, got {list(x.shape)}")
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"{op}: {name}: expected real numbers for a result of {dtype}, got complex"
        )
    return x.astype(dtype)


def check_right_side(op: str, A: Operator, b: Any, name: str = "b") -> jax.Array:
    """b [n] or [n, k], in the dtype of the result."""
    b = check_dense(op, b, name)
    rows = A.shape[0] if isinstance(A, SparseArray) else None
    if b.ndim not in (1, 2) or rows not in (None, b.shape[0]):
        size = "n" if rows is None else rows
        raise ValueError(
            f"{op}: {name}: expected shape [{size}] or [{size}, k], got {list(b.shape)}"
        )
    return b.astype(floating(op, b, *([A] if isinstance(A, SparseArray) else [])))


def power_of_two(b: jax.Array) -> jax.Array:
    """[] or [k]: the power of two near the greatest magnitude of each column, normal and with a
    normal inverse, by which XLA multiplies in place of a division; 1 of a column of zeros, and of
    NaN or infinity."""
    # Of the parts of complex numbers: their absolute values may overflow.
    parts = jnp.maximum(jnp.abs(b.real), jnp.abs(b.imag)) if jnp.iscomplexobj(b) else jnp.abs(b)
    greatest = jnp.max(parts, axis=0)
    usual = jnp.isfinite(greatest) & (greatest > 0)
    exponent = jnp.frexp(jnp.where(usual, greatest, 1))[1] - 1
    limit = -jnp.finfo(b.dtype).minexp
    exponent = jnp.clip(exponent, -limit, limit)
    return jnp.ldexp(jnp.ones_like(greatest), exponent).astype(b.dtype)


def lineax_operator(A: SparseArray, tags: Any = ()) -> Any:
    """A as an operator of lineax, for its solvers::

        operator = linalg.lineax_operator(A, lineax.positive_semidefinite_tag)
        x = lineax.linear_solve(operator, b, lineax.CG(rtol=1e-6, atol=1e-6)).value

    Args:
      A: sparse [m, n] of any format; values may be traced, and are differentiated through a solve.
      tags: what lineax may rely on, such as `lineax.positive_semidefinite_tag`.

    Returns a `lineax.FunctionLinearOperator` from [n] to [m] of A's dtype. Raises ImportError where
    lineax is not installed, TypeError for an A that is not a SparseArray.
    Source: https://docs.kidger.site/lineax.
    """
    op = "lineax_operator"
    check_sparse(op, "A", A)
    try:
        import lineax  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        if error.name != "lineax":
            raise
        raise ImportError(f"{op} needs lineax: pip install lineax") from error
    A = A.astype(floating(op, A))
    like = jax.ShapeDtypeStruct((A.shape[1],), A.dtype)
    return lineax.FunctionLinearOperator(jax.tree_util.Partial(product, A), like, tags)
