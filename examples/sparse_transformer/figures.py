"""Figures: a mask, the curves of a run, sparse against dense, the parts of a layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sgap_jax import SparseArray, masks


def save_mask(mask: SparseArray, path: str | Path) -> None:
    """Plots a mask; stored entries are dark."""
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    masks.plot(mask, axes, title=f"Attention mask, {1 - mask.density:.1%} sparse, 8 x 1 vectors")
    figure.savefig(path, dpi=160)


def save_curves(metrics: list[dict], path: str | Path, title: str = "") -> None:
    """Plots loss, accuracy on the batches and on held-out examples, and the majority class."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [line["step"] for line in metrics]
    held = [line for line in metrics if "held_out_accuracy" in line]
    left.plot(steps, [line["loss"] for line in metrics], color="0.75", linewidth=0.8)
    left.plot(*_smooth(steps, [line["loss"] for line in metrics]), label="training loss")
    left.set(xlabel="step", ylabel="cross-entropy")
    right.plot(*_smooth(steps, [line["accuracy"] for line in metrics]), label="training batches")
    right.plot(
        [x["step"] for x in held], [x["held_out_accuracy"] for x in held], "o-", label="held out"
    )
    if held:
        right.axhline(held[-1]["majority"], color="0.4", linestyle="--", label="majority class")
    right.set(xlabel="step", ylabel="accuracy", ylim=(0, None))
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=160)


def _smooth(steps: list[int], values: list[float]) -> tuple[list[int], np.ndarray]:
    """A running mean over a tenth of the lines, at most nine."""
    window = min(9, max(len(values) // 10, 1))
    return steps[window - 1 :], np.convolve(values, np.ones(window) / window, "valid")


def save_comparison(rows: list[dict], path: str | Path) -> None:
    """Plots time and memory of a step against length, one line per implementation."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    grid = figure.subplots(2, 2, squeeze=False)
    for line, what in zip(grid, dict.fromkeys(row["step"] for row in rows), strict=True):
        chosen = [row for row in rows if row["step"] == what]
        for axes, (key, unit) in zip(line, (("ms", "ms"), ("MB", "MB")), strict=True):
            for name in chosen[0][key]:
                axes.loglog(
                    [r["length"] for r in chosen], [r[key][name] for r in chosen], "o-", label=name
                )
            axes.set(xlabel="length", ylabel=f"{what}, {unit}")
            axes.set_xticks(
                [r["length"] for r in chosen], [str(r["length"]) for r in chosen], minor=False
            )
            axes.minorticks_off()
            axes.legend(frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


PARTS = {  # of a layer, from the bottom of a bar to its top
    "projections": "projections",
    "scores": "scores: $QK^T$, SDDMM",
    "softmax": "softmax",
    "product": "product with $V$, SpMM",
    "attention": "attention as the model runs it",
    "others": "MLP, norms, sums",
}


def save_layers(rows: list[dict], path: str | Path) -> None:
    """Plots the time of a layer's parts: two bars for each sparsity, attention in steps and
    fused."""
    lengths = sorted({row["length"] for row in rows})
    figure = Figure(figsize=(max(3.6 * len(lengths) + 0.6, 7.5), 4.4), layout="constrained")
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for axes, length in zip(panels, lengths, strict=True):
        chosen = [row for row in rows if row["length"] == length]
        for place, row in enumerate(chosen):
            for shift, left_out in ((-0.2, {"attention"}), (0.2, {"scores", "softmax", "product"})):
                bottom = 0.0
                for number, part in enumerate(PARTS):
                    if part not in left_out:
                        ms = row["ms"][part]
                        axes.bar(place + shift, ms, 0.36, bottom, color=f"C{number}")
                        bottom += ms
        names = ["dense" if r["sparsity"] is None else f"{r['sparsity']:.0%}" for r in chosen]
        axes.set_xticks(range(len(chosen)), names)
        axes.set(title=f"length {length}", xlabel="sparsity of the mask")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ms")
    patches = [
        Patch(color=f"C{number}", label=label) for number, label in enumerate(PARTS.values())
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"One layer, one sequence, {rows[0]['dtype']}, on {rows[0]['device']}")
    figure.savefig(path, dpi=160)
