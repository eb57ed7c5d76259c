"""Recovers the coefficients of a Poisson problem from what its solutions are.

Examples:
    python recover.py                        # 1024 x 1024 cells
    python recover.py --cells 128 --steps 40
    python recover.py --assembly             # only times the Galerkin products, beside SciPy
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import poisson

from sgap_jax import SparseArray


def truth(n: int) -> np.ndarray:
    """[n, n]: two inclusions, one that conducts ten times better and one ten times worse."""
    y, x = (np.mgrid[:n, :n] + 0.5) / n
    field = np.ones((n, n), np.float32)
    field[(x - 0.35) ** 2 + (y - 0.6) ** 2 < 0.15**2] = 10
    field[(abs(x - 0.7) < 0.12) & (abs(y - 0.3) < 0.15)] = 0.1
    return field


def sources(n: int) -> np.ndarray:
    """[n^2, 3]: from everywhere, and twice from a half, each of which has mean 1 / n^2."""
    y, x = (np.mgrid[:n, :n] + 0.5) / n
    f = np.stack([np.ones((n, n)), 2 * (x < 0.5), 2 * (y < 0.5)], axis=-1) / n**2
    return f.reshape(n * n, 3).astype(np.float32)


def coefficients(theta: jax.Array, n: int) -> jax.Array:
    """exp of what theta [m, m] is between its points."""
    return jnp.exp(jax.image.resize(theta, (n, n), "linear"))


@partial(jax.jit, static_argnames=("optimizer", "level"))
def step(
    theta: Any, memory: Any, grids: Any, f: Any, seen: Any, *, optimizer: Any, level: int
) -> tuple:
    def loss(theta: jax.Array) -> jax.Array:
        c = coefficients(theta, round(grids.pattern.shape[0] ** 0.5))
        u = poisson.solution(grids, c, f, level)
        return jnp.sum((u - seen) ** 2) / jnp.sum(seen**2)

    value, gradient = jax.value_and_grad(loss)(theta)
    updates, memory = optimizer.update(gradient, memory, theta)
    return optax.apply_updates(theta, updates), memory, value


def recover(
    n: int, *, steps: int, level: int = 0, points: int = 32, rate: float = 0.3, quiet: bool = False
) -> tuple[jax.Array, list[float], np.ndarray]:
    """The coefficients [n, n] that were found, the loss of each step, and what was seen."""
    grids, f = poisson.make_grids(n), jnp.asarray(sources(n))
    seen = jax.jit(poisson.solution, static_argnames="level")(grids, truth(n), f, level=level)
    theta = jnp.zeros((points, points), jnp.float32)
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    memory, losses = optimizer.init(theta), []
    for i in range(steps):
        began = time.perf_counter()
        theta, memory, value = step(theta, memory, grids, f, seen, optimizer=optimizer, level=level)
        losses.append(float(value))
        if not quiet and (i < 3 or i % 10 == 9):
            seconds = time.perf_counter() - began
            print(f"step {i + 1}: loss {losses[-1]:.2e}, {seconds:.2f} s", flush=True)
    return coefficients(theta, n), losses, np.asarray(seen)


def seconds_of(call: Any, repeats: int = 5) -> float:
    """The least of several."""
    jax.block_until_ready(call())
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - began)
    return min(found)


def time_assembly(n: int) -> dict[str, float]:
    """Seconds of all Galerkin products of n x n cells: ours inside jit, with the structures known;
    value and gradient of their sum of squares; ours from scratch; SciPy's."""
    grids, c = poisson.make_grids(n), jnp.asarray(truth(n))
    A = jax.jit(poisson.matrix)(grids, c)
    interpolations = [x.interpolation for x in grids.coarsenings]

    @jax.jit
    def products(grids: Any, A: SparseArray) -> list[jax.Array]:
        found = []
        for coarsening in grids.coarsenings:
            A = coarsening.galerkin(A)
            found.append(A.values)
        return found

    def squares(values: Any, grids: Any, A: SparseArray) -> jax.Array:
        return sum(jnp.sum(x**2) for x in products(grids, A.with_values(values)))

    gradient = jax.jit(jax.value_and_grad(squares))

    def from_scratch() -> Any:
        found = A
        for P in interpolations:
            found = P.T @ (found @ P)
        return found.values

    theirs = [P.to_scipy() for P in interpolations]
    first = A.to_scipy()

    def scipys() -> Any:
        found = first
        for P in theirs:
            found = P.T @ (found @ P)
        return found.data

    np.testing.assert_allclose(
        products(grids, A)[-1].sum(), scipys().sum(), rtol=1e-2, atol=1e-3 * abs(scipys()).max()
    )
    return {
        "ours, structures known": seconds_of(lambda: products(grids, A)),
        "ours, value and gradient": seconds_of(lambda: gradient(A.values, grids, A)),
        "ours, from scratch": seconds_of(from_scratch),
        "SciPy": seconds_of(scipys),
    }


def draw(path: Path, found: np.ndarray, seen: np.ndarray, losses: list[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n, side = len(found), round(len(seen) ** 0.5)
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    images = [np.log10(truth(n)), np.log10(found), seen[:, 0].reshape(side, side)]
    titles = ["log10 of the coefficients", "recovered", "a solution that was seen"]
    for ax, image, title in zip(axes, images, titles, strict=False):
        limits = {} if image is images[2] else {"vmin": -1.1, "vmax": 1.1}
        figure.colorbar(ax.imshow(image, **limits), ax=ax)
        ax.set(title=title, xticks=[], yticks=[])
    axes[3].semilogy(losses)
    axes[3].set(title="loss", xlabel="step")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=1024, help="on a side, a power of two")
    parser.add_argument("--steps", type=int, default=150, help="of Adam")
    parser.add_argument("--level", type=int, default=0, help="fit the Galerkin problem so far down")
    parser.add_argument("--picture", type=Path, default=Path("recovered.png"))
    parser.add_argument("--assembly", action="store_true", help="time the Galerkin products only")
    args = parser.parse_args(argv)
    if args.assembly:
        for name, seconds in time_assembly(args.cells).items():
            print(f"{name}: {1e3 * seconds:.1f} ms")
        return
    found, losses, seen = recover(args.cells, steps=args.steps, level=args.level)
    off = np.abs(np.log10(np.asarray(found)) - np.log10(truth(args.cells)))
    print(f"loss {losses[0]:.2e} -> {losses[-1]:.2e}; mean error of log10 {off.mean():.3f}")
    draw(args.picture, np.asarray(found), seen, losses)


if __name__ == "__main__":
    main()
