"""Plots of the ratios in the CSV files."""

import pathlib
import re
import statistics
from collections.abc import Callable

from benchmarks.ratios import Row, fresh, mean, numbers


def scatter(results: dict[str, list[Row]], titles: dict[str, str], path: pathlib.Path) -> None:
    """Plots the best peer's time over ours, one panel for each operation."""
    matplotlib, pyplot = plotting()
    figure, axes = pyplot.subplots(1, len(results), figsize=(3.4 * len(results), 3.6), sharey=True)
    axes = [axes] if len(results) == 1 else axes
    for axis, (op, rows) in zip(axes, results.items(), strict=True):
        rows = [row for row in fresh(rows) if row["x_best"]]
        families = list(dict.fromkeys(row["family"] for row in rows))
        widths = sorted({int(row["n"]) for row in rows})
        colours = matplotlib.colormaps["viridis"].resampled(max(len(widths), 2))
        for place, n in enumerate(widths):
            part = [row for row in rows if int(row["n"]) == n]
            shift = 0.6 * ((place + 0.5) / len(widths) - 0.5)
            x = [families.index(row["family"]) + shift for row in part]
            axis.plot(x, numbers(part, "x_best"), "o", ms=3.5, color=colours(place), label=f"n={n}")
        axis.axhline(1, color="black", lw=0.8)
        average = mean(numbers(rows, "x_best"))
        axis.axhline(average, color="tab:red", lw=1, ls="--")
        axis.set_title(f"{titles[op]}\nmean {average:.2f}x", fontsize=9)
        axis.set_xticks(range(len(families)), families, rotation=45, ha="right")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}x")
        axis.yaxis.set_minor_formatter(lambda x, _: f"{x:g}x" if 0.3 <= x < 6 else "")
        axis.grid(axis="y", which="both", lw=0.3)
        if len(widths) > 1:
            axis.legend(fontsize=6, ncols=2, handletextpad=0.1, columnspacing=0.6)
    axes[0].set_ylabel("time of the best peer / our time")
    save(figure, path)


def boxes(results: dict[str, list[Row]], titles: dict[str, str], path: pathlib.Path) -> None:
    """Plots the dense product's time over ours by sparsity, a box of all problems and widths for
    each V: figures 17 and 19 of the vectorSparse paper."""
    matplotlib, pyplot = plotting()
    figure, axes = pyplot.subplots(1, len(results), figsize=(4.2 * len(results), 3.6))
    axes = [axes] if len(results) == 1 else axes
    for axis, (op, rows) in zip(axes, results.items(), strict=True):
        groups: dict[tuple[int, int], list[float]] = {}
        for row in rows:
            length, percent = re.fullmatch(r"V=(\d+) (\d+)%", row["family"]).groups()
            if row.get("x_jax_dense"):
                groups.setdefault((int(length), int(percent)), []).append(float(row["x_jax_dense"]))
        lengths, percents = (sorted({key[i] for key in groups}) for i in (0, 1))
        colours = matplotlib.colormaps["viridis"].resampled(max(len(lengths), 2))
        for place, length in enumerate(lengths):
            shift = 0.8 * ((place + 0.5) / len(lengths) - 0.5)
            own = [percent for percent in percents if (length, percent) in groups]
            drawn = axis.boxplot(
                [groups[length, percent] for percent in own],
                positions=[percents.index(percent) + shift for percent in own],
                widths=0.7 / len(lengths),
                patch_artist=True,
                showfliers=False,
                whis=(0, 100),
                medianprops=dict(color="white", lw=0.8),
            )
            for box in drawn["boxes"]:
                box.set_facecolor(colours(place))
            means = [mean(groups[length, percent]) for percent in own]
            middle = [percents.index(percent) + shift for percent in own]
            axis.plot(middle, means, "-", lw=0.8, color=colours(place), label=f"V={length}")
        axis.axhline(1, color="black", lw=0.8)
        axis.set_xticks(range(len(percents)), [f"{percent}%" for percent in percents])
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}x")
        axis.grid(axis="y", which="both", lw=0.3)
        axis.set_title(titles[op], fontsize=9)
        axis.set_xlabel("sparsity")
        axis.legend(fontsize=6, ncols=2)
    axes[0].set_ylabel("time of the dense form / our time")
    save(figure, path)


def ranges(ratios: dict[str, list[float]], label: str, path: pathlib.Path) -> None:
    """Plots a line for each title from the least to the greatest ratio, thick over the middle half,
    with a dot at the geometric mean, whose value is printed at the line's right end."""
    _, pyplot = plotting()
    figure, axis = pyplot.subplots(figsize=(5.6, 0.5 * len(ratios) + 0.8))
    for place, (title, found) in enumerate(ratios.items()):
        low, high = middle_half(found)
        axis.plot([min(found), max(found)], [place, place], "-", lw=1, color="tab:blue")
        axis.plot([low, high], [place, place], "-", lw=6, color="tab:blue", alpha=0.45)
        axis.plot([mean(found)], [place], "o", ms=5, color="tab:blue")
        above = dict(xytext=(0, 8), textcoords="offset points", fontsize=8)
        axis.annotate(title, (min(found), place), **above)
        beside = dict(xytext=(5, 0), textcoords="offset points", fontsize=8, va="center")
        axis.annotate(f"{mean(found):.3g}x", (max(found), place), **beside)
    every = [value for found in ratios.values() for value in found]
    axis.set_xlim(min(every) / 1.3, max(every) * 2)
    axis.set_ylim(len(ratios) - 0.5, -0.9)
    axis.axvline(1, color="black", lw=0.8)
    axis.set_yticks([])
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}x")
    axis.grid(axis="x", lw=0.3)
    axis.set_xlabel(label)
    save(figure, path)


def middle_half(found: list[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(found) == 1:
        return found[0], found[0]
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    return low, high


def bars(
    panels: dict[str, list[Row]], peers: dict[str, str], label: Callable, path: pathlib.Path
) -> None:
    """Plots each peer's time over ours: a group of bars for each row, a panel for each set of
    rows."""
    matplotlib, pyplot = plotting()
    widths = [len(rows) + 1 for rows in panels.values()]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(0.9 * sum(widths), 3.6), sharey=True, width_ratios=widths
    )
    axes = [axes] if len(panels) == 1 else axes
    colours = matplotlib.colormaps["viridis"].resampled(max(len(peers), 2))
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        for place, (peer, name) in enumerate(peers.items()):
            x = [i + 0.8 * ((place + 0.5) / len(peers) - 0.5) for i in range(len(rows))]
            heights = [float(row.get(f"x_{peer}") or "nan") for row in rows]
            axis.bar(x, heights, 0.75 / len(peers), color=colours(place), label=name)
        axis.axhline(1, color="black", lw=0.8)
        axis.set_xticks(range(len(rows)), [label(row) for row in rows], rotation=45, ha="right")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}x")
        axis.grid(axis="y", which="both", lw=0.3)
        axis.set_title(title, fontsize=9)
    axes[0].set_ylabel("time of the peer / our time")
    axes[-1].margins(y=0.3)  # for the legend
    axes[-1].legend(fontsize=6, ncols=2)
    save(figure, path)


def curves(
    panels: dict[str, tuple[str, list[float], dict[str, list[float]]]], path: pathlib.Path
) -> None:
    """Plots milliseconds over a parameter, two curves to a panel, with dashes where they cross:
    {title: (name of the parameter, its values, curves by name)}."""
    _, pyplot = plotting()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.4))
    axes = [axes] if len(panels) == 1 else axes
    for axis, (title, (label, x, curves)) in zip(axes, panels.items(), strict=True):
        places = range(len(x))  # evenly spaced: bases crowd near 1, rows near 0
        for marker, (name, y) in zip("os", curves.items(), strict=True):
            axis.plot(places, y, marker=marker, ms=3.5, lw=1, label=name)
        for place in crossings(*curves.values()):
            value = x[int(place)] + place % 1 * (x[int(place) + 1] - x[int(place)])
            label_of = f"cross near {value:.7g}" if max(x) < 2 else f"cross near {value:.0f}"
            axis.axvline(place, color="black", lw=0.8, ls="--", label=label_of)
        axis.set_xticks(
            places, [f"{value:.10g}" for value in x], rotation=60, ha="right", fontsize=7
        )
        every = [value for y in curves.values() for value in y]
        if max(every) > 10 * min(every):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(axis="y", which="both", lw=0.3)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(label)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("ms")
    save(figure, path)


def crossings(first: list[float], second: list[float]) -> list[float]:
    """Where two curves cross, in steps from the first value, interpolated linearly. A crossing
    counts if the curves differ by 2% on either side: less is noise."""
    found, last = [], 0.0
    at = 0
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        apart = one / other - 1
        if abs(apart) < 0.02:
            continue
        if last * apart < 0:
            found.append(at + (place - at) * last / (last - apart))
        last, at = apart, place
    return found


def plotting():
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "sgap_jax", "font.size": 9})
    from matplotlib import pyplot

    return matplotlib, pyplot


def save(figure, path: pathlib.Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
