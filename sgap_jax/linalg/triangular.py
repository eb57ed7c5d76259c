"""Solutions with a triangular sparse matrix, and incomplete factorizations as preconditioners."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from sgap_jax.formats import checks
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR
from sgap_jax.formats.structure import concrete, varying_together
from sgap_jax.linalg.operands import check_right_side, check_square, floating, product
from sgap_jax.primitives import triangular_solve as primitive

_TRANSPOSED = {0: "N", 1: "T", 2: "C", "N": "N", "T": "T", "C": "C"}


def triangular_solve(
    A: SparseArray,
    b: Any,
    *,
    lower: bool = True,
    trans: Literal[0, 1, 2, "N", "T", "C"] = 0,
    unit_diagonal: bool = False,
) -> jax.Array:
    """x with T x = b, where T is the lower or the upper triangle of A, diagonal included.

        x[i] = (b[i] - sum_{j < i} A[i, j] x[j]) / A[i, i]      (j > i in the upper triangle)

    Entries of the other triangle are not looked at. Differentiable in b and in the values of A, to
    any order, by implicit differentiation: db = T^-T dx, and -db x^T at the entries of T. On the
    CPU rows that do not need each other run side by side; which those are is found once for each
    structure and kept, and the bits do not depend on the number of threads.

    Args:
      A: sparse [n, n] of any format, values may be traced.
      b: dense [n], or [n, k] for k right-hand sides.
      lower: which triangle of A, also where `trans` transposes it.
      trans: 0 or "N": T x = b, 1 or "T": T^T x = b, 2 or "C": T^H x = b.
      unit_diagonal: the diagonal is ones, and what A stores there is not looked at.

    Returns x as b, in the promoted dtype of A and b; sums are carried in float32 at least. Where
    the diagonal is zero x is not finite.

    Raises:
      TypeError: A is not a SparseArray, or b not dense. ValueError: shapes that do not match,
        another `trans`, a concrete structure without an entry on the diagonal.

    Source: `jax.scipy.linalg.solve_triangular`, `scipy.sparse.linalg.spsolve_triangular`; Saltz
    (1990) for levels.
    """
    op = "triangular_solve"
    A = check_square(op, A)
    lower = checks.check_flag(lower, "lower", op)
    unit_diagonal = checks.check_flag(unit_diagonal, "unit_diagonal", op)
    if isinstance(trans, bool) or not isinstance(trans, int | str) or trans not in _TRANSPOSED:
        raise ValueError(f"{op}: trans: expected 0, 1, 2, 'N', 'T' or 'C', got {trans!r}")
    b = check_right_side(op, A, b)
    if not unit_diagonal:
        check_diagonal(op, A, "unit_diagonal=True takes ones")
    if _TRANSPOSED[trans] != "N":
        A, lower = A.T, not lower
    if _TRANSPOSED[trans] == "C":
        A = A.with_values(jnp.conj(A.values))
    return _solved(A, b, lower=lower, unit_diagonal=unit_diagonal)


def check_diagonal(op: str, A: SparseArray, advice: str) -> None:
    """ValueError for a concrete structure in which a row has no entry on the diagonal."""
    if checks.is_traced(*jax.tree.leaves((A.index_arrays, A.transposed))):
        return
    with concrete():
        row, column = (np.asarray(x) for x in A.coordinates())
    stored = np.zeros(A.shape[0] + 1, bool)
    stored[row[row == column]] = True
    missing = np.flatnonzero(~stored[:-1])
    if missing.size:
        raise ValueError(
            f"{op}: A: expected an entry on the diagonal of each row, got none in {missing.size}, "
            f"row {missing[0]} first; {advice}"
        )


@partial(jax.jit, static_argnames=("lower", "unit_diagonal"))
def _solved(A: SparseArray, b: jax.Array, *, lower: bool, unit_diagonal: bool) -> jax.Array:
    A, b = varying_together((A, b))
    wide = jnp.float32 if jnp.finfo(b.dtype).bits < 32 else b.dtype
    T = _triangle(A.asformat(CSR).astype(wide), lower, unit_diagonal)
    columns = b.astype(wide).reshape(b.shape[0], 1 if b.ndim == 1 else b.shape[1])

    def times(T: SparseArray, x: jax.Array) -> jax.Array:
        return product(T, x) + x if unit_diagonal else product(T, x)

    def solve(T: SparseArray, lower: bool, b: jax.Array) -> jax.Array:
        offsets, indices = T.index_arrays[1]
        options = dict(lower=lower, unit_diagonal=unit_diagonal)
        return primitive.triangular_solve(offsets, indices, T.values, b, **options)

    def transposed(_: Any, b: jax.Array) -> jax.Array:
        return solve(T.T.asformat(CSR), not lower, b)

    x = jax.lax.custom_linear_solve(
        partial(times, T), columns, lambda _, b: solve(T, lower, b), transposed
    )
    return x.reshape(b.shape).astype(b.dtype)


def _triangle(A: SparseArray, lower: bool, unit_diagonal: bool) -> SparseArray:
    """A CSR array with zeros in place of values outside of the triangle."""
    row, column = A.coordinates()
    inside = (column <= row) if lower else (column >= row)
    if unit_diagonal:
        inside &= row != column
    return A.with_values(jnp.where(inside, A.values, jnp.zeros((), A.dtype)))


def ilu(A: SparseArray) -> Partial:
    """r -> U^-1 L^-1 r with the incomplete factors of A of level 0: for any A that elimination
    without pivoting takes, such as one whose diagonal dominates.

    L U = A at the entries of A, with L and U stored there alone; entries of one place are summed.
    One pass over A makes them, each use takes two triangular solves. Values may be traced, and
    structures too.

    Args:
      A: sparse [n, n] of any format, with all of its diagonal stored.

    Raises ValueError unless A is square, and for a concrete structure without an entry on the
    diagonal. Source: Saad, Iterative Methods for Sparse Linear Systems (2003), algorithm 10.4.
    """
    return Partial(_of_lu, _factors("ilu", A))


def ichol(A: SparseArray, *, shift: float = 0.0) -> Partial:
    """r -> L^-H D^-1 L^-1 r with the incomplete Cholesky factors L D L^H of A of level 0: a
    Hermitian preconditioner, for `cg`.

    Args:
      A: sparse [n, n] of any format, Hermitian positive definite, with both triangles stored and
        all of its diagonal; values may be traced.
      shift: the factors are those of A + shift diagonal(A). Where A is no M-matrix a pivot may
        otherwise be negative, which makes the preconditioner indefinite.

    Raises ValueError as `ilu`. Source: Meijerink and van der Vorst (1977); Manteuffel (1980) for
    the shift.
    """
    A = check_square("ichol", A).sum_duplicates()
    shift = checks.check_share(shift, "shift", "ichol", math.inf)
    A = A.astype(floating("ichol", A)).asformat(CSR)
    row, column = A.coordinates()
    scale = jnp.where(row == column, 1 + jnp.asarray(shift), jnp.ones(()))
    return Partial(_of_cholesky, _factors("ichol", A.with_values(A.values * scale.astype(A.dtype))))


def _factors(op: str, A: SparseArray) -> SparseArray:
    A = check_square(op, A).sum_duplicates()
    check_diagonal(op, A, "jacobi takes ones there")
    return _factored(A.astype(floating(op, A)).asformat(CSR))


@jax.jit
def _factored(A: SparseArray) -> SparseArray:
    A = varying_together(A)
    values = jax.lax.stop_gradient(A.values)
    if jnp.finfo(A.dtype).bits < 32:
        values = values.astype(jnp.float32)
    offsets, indices = A.index_arrays[1]
    return A.with_values(primitive.incomplete_lu(offsets, indices, values, A.shape[0]))


def _promoted(op: str, factors: SparseArray, r: Any) -> tuple[SparseArray, jax.Array]:
    """Both in the dtype of the result: that of r, complex where the factors are."""
    given = jnp.asarray(r)
    r = check_right_side(op, factors, given, "r")
    if jnp.issubdtype(given.dtype, jnp.inexact) and not jnp.iscomplexobj(factors.values):
        r = given  # the factors of 16-bit matrices are wider than these
    return factors.astype(r.dtype), r


def _of_lu(factors: SparseArray, r: Any) -> jax.Array:
    factors, r = _promoted("ilu", factors, r)
    below = _solved(factors, r, lower=True, unit_diagonal=True)
    return _solved(factors, below, lower=False, unit_diagonal=False)


def _of_cholesky(factors: SparseArray, r: Any) -> jax.Array:
    L, r = _promoted("ichol", factors, r)
    below = _solved(L, r, lower=True, unit_diagonal=True)
    pivots = L.diagonal().reshape(-1, *[1] * (r.ndim - 1))
    adjoint = L.with_values(jnp.conj(L.values)).T
    return _solved(adjoint, below / pivots, lower=False, unit_diagonal=True)
