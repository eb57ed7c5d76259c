"""Figures: the keys that a layer chose, and the curves of training."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from recall import Model

from sgap_jax import SparseArray


@nnx.jit
def _stored(model: Model, events: jax.Array) -> jax.Array:
    def of_one(pattern: SparseArray) -> jax.Array:
        return pattern.with_values(jnp.ones_like(pattern.values)).todense()

    return jax.vmap(jax.vmap(of_one))(model.chosen(events)).any(1)


def seen_keys(model: Model, events: np.ndarray) -> np.ndarray:
    """bool [batch, length, length]: the keys that a query sees, in some group of heads."""
    return np.tril(np.asarray(_stored(model, events)))


def save_seen(model: Model, events: np.ndarray, where: np.ndarray, path: str | Path) -> None:
    """Draws the keys that the queries of one sequence see, and for each question its answer."""
    seen = seen_keys(model, events[None])[0]
    questions = np.arange(len(events) - len(where), len(events))
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    axes.imshow(seen, cmap="Greys", vmax=1.5, interpolation="nearest")
    ring: dict = dict(markerfacecolor="none", color="C3", markersize=5)
    axes.plot(where, questions, "o", **ring, label="the pair that answers")
    axes.axhline(questions[0] - 0.5, color="C0", linewidth=0.8, label="questions from here on")
    kind, share = type(model.attention).__name__, seen.sum() / np.tri(len(events)).sum()
    axes.set(xlabel="key", ylabel="query", title=f"{kind} sees {share:.1%} of the keys so far")
    axes.legend(loc="upper right", frameon=False)
    figure.savefig(path, dpi=160)


def save_curves(lines: list[dict], path: str | Path) -> None:
    """Plots loss and accuracy on the batches, one line for each kind of attention."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    panels = figure.subplots(1, 2)
    for name in dict.fromkeys(line["attention"] for line in lines):
        own = [line for line in lines if line["attention"] == name]
        for axes, what in zip(panels, ("loss", "accuracy"), strict=True):
            axes.plot([line["step"] for line in own], [line[what] for line in own], label=name)
    for axes, what in zip(panels, ("loss", "accuracy"), strict=True):
        axes.set(xlabel="step", ylabel=what)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
