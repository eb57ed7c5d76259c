"""A Poisson problem with coefficients, solved by conjugate gradients with a multigrid cycle.

-div(c grad u) = f on the unit square, u = 0 at its boundary; cells of n x n, finite volumes: what
flows through a face is the harmonic mean of both coefficients times the difference of u. Coarse
matrices are the Galerkin products P^T A P, made of A's values inside the program: derivatives pass
through them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from sgap_jax import SparseArray, spgemm, spgemm_plan

SMOOTHING = 2  # steps of Jacobi's method before, and after, each correction
DAMPING = 0.7
COARSEST = 8  # cells on a side of the grid that is solved by a dense factorization


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["interpolation", "half", "coarse"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Coarsening:
    """From a grid to the next one: the interpolation P, and the structures of A P and P^T A P."""

    interpolation: SparseArray
    half: SparseArray
    coarse: SparseArray

    def galerkin(self, A: SparseArray) -> SparseArray:
        """P^T A P."""
        P = self.interpolation
        return spgemm(P.T, spgemm(A, P, plan=self.half), plan=self.coarse)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pattern", "order", "coarsenings"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Grids:
    """What does not depend on the coefficients: the fine pattern, where its values come from, and
    the way down."""

    pattern: SparseArray
    order: Any
    coarsenings: tuple[Coarsening, ...]


def interpolation(n: int) -> scipy.sparse.csr_array:
    """[n^2, (n / 2)^2]: a cell has 3/4 of the coarse cell it lies in and 1/4 of the next, in each
    direction; beyond the boundary is nothing."""
    fine = np.arange(n)
    own, next_one = fine // 2, fine // 2 + np.where(fine % 2, 1, -1)
    inside = (next_one >= 0) & (next_one < n // 2)
    rows = np.concatenate([fine, fine[inside]])
    columns = np.concatenate([own, next_one[inside]])
    weights = np.repeat([0.75, 0.25], [n, inside.sum()]).astype(np.float32)
    line = scipy.sparse.csr_array((weights, (rows, columns)), shape=(n, n // 2))
    return scipy.sparse.csr_array(scipy.sparse.kron(line, line))


def make_grids(n: int) -> Grids:
    """Structures and interpolations for n x n cells, n a power of two from 16 on."""
    if n < 2 * COARSEST or n & (n - 1):
        raise ValueError(f"n: expected a power of two from {2 * COARSEST} on, got {n}")
    cell = np.arange(n * n).reshape(n, n)
    pairs = [(cell, cell)]
    for a, b in ((cell[:, :-1], cell[:, 1:]), (cell[:-1], cell[1:])):
        pairs += [(a, b), (b, a)]
    rows, columns = (np.concatenate([np.ravel(p[i]) for p in pairs]) for i in (0, 1))
    order = np.lexsort((columns, rows)).astype(np.int32)
    offsets = np.append(0, np.cumsum(np.bincount(rows, minlength=n * n)))
    pattern = SparseArray.from_arrays(
        np.ones(len(rows), np.float32), offsets, columns[order], shape=(n * n, n * n)
    )
    coarsenings, A = [], pattern
    while n > COARSEST:
        P = SparseArray.from_scipy(interpolation(n))
        half = spgemm_plan(A, P)
        coarsenings.append(Coarsening(P, half, spgemm_plan(P.T, half)))
        A, n = coarsenings[-1].coarse, n // 2
    return Grids(pattern, jnp.asarray(order), tuple(coarsenings))


def matrix(grids: Grids, c: jax.Array) -> SparseArray:
    """A, [n^2, n^2], of the coefficients c [n, n]."""

    def mean(x: jax.Array, y: jax.Array) -> jax.Array:
        return 2 * x * y / (x + y)

    across, down = mean(c[:, :-1], c[:, 1:]), mean(c[:-1], c[1:])
    sides = jnp.pad(across, ((0, 0), (1, 0))) + jnp.pad(across, ((0, 0), (0, 1)))
    sides += jnp.pad(down, ((1, 0), (0, 0))) + jnp.pad(down, ((0, 1), (0, 0)))
    # The boundary is half a cell away.
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        sides = sides.at[edge].add(2 * c[edge])
    faces = [-x.ravel() for x in (across, across, down, down)]
    return grids.pattern.with_values(jnp.concatenate([sides.ravel(), *faces])[grids.order])


def hierarchy(grids: Grids, c: jax.Array) -> list[SparseArray]:
    """A and its Galerkin products, from fine to coarse."""
    matrices = [matrix(grids, c)]
    for coarsening in grids.coarsenings:
        matrices.append(coarsening.galerkin(matrices[-1]))
    return matrices


def cycle(grids: Grids, matrices: list[SparseArray]) -> Callable[[jax.Array], jax.Array]:
    """One V-cycle for A x = b, a function of b [cells, k]: symmetric in b, as conjugate gradients
    need. What does not depend on b is computed here, once for a solver."""
    inverses = [DAMPING / A.diagonal()[:, None] for A in matrices[:-1]]
    factor = jax.scipy.linalg.cho_factor(matrices[-1].todense())

    def level(i: int, b: jax.Array) -> jax.Array:
        if i == len(matrices) - 1:
            return jax.scipy.linalg.cho_solve(factor, b)
        A, P = matrices[i], grids.coarsenings[i].interpolation
        x = inverses[i] * b
        for _ in range(SMOOTHING - 1):
            x = x + inverses[i] * (b - A @ x)
        x = x + P @ level(i + 1, P.T @ (b - A @ x))
        for _ in range(SMOOTHING):
            x = x + inverses[i] * (b - A @ x)
        return x

    return partial(level, 0)


def conjugate_gradients(
    apply: Any, precondition: Any, b: jax.Array, tol: float, most: int
) -> tuple[jax.Array, jax.Array]:
    """x with apply(x) = b for each column of b, and how many steps that took."""

    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(x * y, axis=0)

    enough = tol**2 * dot(b, b)

    def going(state: tuple) -> jax.Array:
        _, r, _, _, step = state
        return (step < most) & jnp.any(dot(r, r) > enough)

    def step(state: tuple) -> tuple:
        x, r, p, before, count = state
        image = apply(p)
        length = before / jnp.maximum(dot(p, image), 1e-30)
        x, r = x + length * p, r - length * image
        z = precondition(r)
        now = dot(r, z)
        return x, r, z + now / jnp.maximum(before, 1e-30) * p, now, count + 1

    z = precondition(b)
    state = jnp.zeros_like(b), b, z, dot(b, z), jnp.zeros((), jnp.int32)
    x, *_, count = jax.lax.while_loop(going, step, state)
    return x, count


def solve(
    grids: Grids, matrices: list[SparseArray], b: jax.Array, *, tol: float = 1e-5, most: int = 100
) -> jax.Array:
    """x [cells, k] with A x = b for the first of `matrices`; the derivative in its values takes one
    solve more, of the adjoint problem."""
    precondition = cycle(grids, jax.lax.stop_gradient(matrices))

    def run(apply: Any, b: jax.Array) -> jax.Array:
        return conjugate_gradients(apply, precondition, b, tol, most)[0]

    return jax.lax.custom_linear_solve(lambda x: matrices[0] @ x, b, run, symmetric=True)


def solution(
    grids: Grids, c: jax.Array, f: jax.Array, level: int = 0, tol: float = 1e-5
) -> jax.Array:
    """u for the sources f [n^2, k]: of the fine problem, or of the Galerkin problem `level` grids
    further down, [cells there, k]."""
    matrices = hierarchy(grids, c)
    for coarsening in grids.coarsenings[:level]:
        f = coarsening.interpolation.T @ f
    below = dataclasses.replace(grids, coarsenings=grids.coarsenings[level:])
    return solve(below, matrices[level:], f, tol=tol)
