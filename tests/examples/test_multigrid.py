"""The Poisson problem: its matrix, Galerkin products and solver against SciPy, derivatives against
differences, and a small recovery."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg

pytest.importorskip("optax")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "multigrid"
sys.path.insert(0, str(FOLDER))
poisson, recover = (importlib.import_module(name) for name in ("poisson", "recover"))


@pytest.fixture(scope="module")
def grids():
    with jax.enable_x64(False):
        return poisson.make_grids(32)


def test_matrix_products_and_solution(grids):
    c = recover.truth(32)
    matrices = [A.to_scipy().astype(np.float64) for A in jax.jit(poisson.hierarchy)(grids, c)]
    assert len(matrices) == 3
    fine = matrices[0]
    assert abs(fine - fine.T).max() == 0
    # Inside, what flows out of a cell is what its neighbours get; at the boundary more.
    lost = (fine @ np.ones(1024)).reshape(32, 32)
    np.testing.assert_allclose(lost[1:-1, 1:-1], 0, atol=1e-5)
    np.testing.assert_allclose(lost[0, 1:-1], 2 * c[0, 1:-1], rtol=1e-5)
    for coarsening, above, below in zip(grids.coarsenings, matrices, matrices[1:], strict=False):
        P = coarsening.interpolation.to_scipy().astype(np.float64)
        assert abs(P.T @ above @ P - below).max() < 1e-5 * abs(below).max()
    f = recover.sources(32)
    got = jax.jit(poisson.solution)(grids, c, f)
    want = scipy.sparse.linalg.spsolve(fine.tocsc(), f.astype(np.float64))
    np.testing.assert_allclose(got, want, atol=1e-4 * abs(want).max())
    b, matrices = jnp.asarray(f), poisson.hierarchy(grids, jnp.asarray(c))
    precondition = jax.jit(poisson.cycle(grids, matrices))
    _, steps = poisson.conjugate_gradients(lambda x: matrices[0] @ x, precondition, b, 1e-5, 100)
    assert int(steps) < 15


@pytest.mark.parametrize("level", [0, 1])
def test_derivatives_are_those_of_differences(grids, level):
    """At level 1 they pass through P^T A P."""
    c, f = jnp.asarray(recover.truth(32)), jnp.asarray(recover.sources(32))

    @jax.jit
    def loss(t):
        u = poisson.solution(grids, c * (1 + t * direction), f, level, tol=1e-6)
        return 1e3 * jnp.sum(u**2)

    direction = jnp.asarray(np.random.default_rng(0).random((32, 32)), jnp.float32)
    slope = jax.jit(jax.grad(loss))(0.0)
    assert slope == pytest.approx(float((loss(0.02) - loss(-0.02)) / 0.04), rel=5e-3)


def test_coefficients_are_recovered(tmp_path):
    found, losses, seen = recover.recover(32, steps=60, points=16, quiet=True)
    assert losses[-1] < 0.05 * losses[0]
    off = np.abs(np.log10(found) - np.log10(recover.truth(32))).mean()
    assert off < 0.75 * np.abs(np.log10(recover.truth(32))).mean()
    recover.draw(tmp_path / "picture.png", np.asarray(found), seen, losses)
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_assembly_is_timed_beside_scipys_and_wrong_sizes_are_refused():
    assert set(recover.time_assembly(16)) > {"SciPy", "ours, from scratch"}
    with pytest.raises(ValueError, match="power of two"):
        poisson.make_grids(24)
