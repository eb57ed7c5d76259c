"""compiler*.csv -> the tables and the plot of docs/compiled_loops.md."""

import pathlib
import re

from benchmarks import plots
from benchmarks.ratios import Row, mean, numbers

PEERS = {
    "hand": "our hand-written kernel",
    "taco": "TACO's C",
    "scipy": "SciPy",
    "torch": "torch",
    "jax_gather": "gather in plain JAX",
}


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """The mean ratios of each operation; with several cases also the lowest ratio."""
    ops: dict[str, list[Row]] = {}
    for row in rows:
        op = row["schedule"].split()[0]
        case = op if row["n"] == "1" else f"{op}, n = {row['n']}"
        case += ", donated" * row["schedule"].endswith("donated")
        ops.setdefault(case, []).append(row)
    body = []
    for op, own in ops.items():
        cells = [_ratios(numbers(own, f"x_{peer}")) for peer in PEERS]
        first = sorted(numbers(own, "first_ms"))[len(own) // 2]
        body.append([op, str(len(own)), *cells, f"{first:.0f}"])
    return ["", "cases", *(f"x {title}" for title in PEERS.values()), "first call, ms"], body


def _ratios(found: list[float]) -> str:
    lowest = f" ({min(found):.2f})" if len(found) > 1 else ""
    return f"{mean(found):.2f}{lowest}" if found else "-"


def studies(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    head = ["study", "case", "one schedule, ms", "the other, ms", "ratio"]
    body = [
        [row["study"], row["case"], *(f"{float(row[x]):.2f}" for x in ("first_ms", "second_ms"))]
        + [f"{float(row['first_ms']) / float(row['second_ms']):.2f}"]
        for row in rows
    ]
    return head, body


# The parameter that a study varies, by the study's first word.
CHANGED = {
    "load balance": ("8.4: load balance", "base of the rows' lengths"),
    "parallelism": ("8.5: parallelism", "rows"),
    "reuse": ("8.6: reuse, one thread", "dense columns"),
    "locality": ("8.6: locality", "dense columns"),
}


def plot(rows: list[Row], path: pathlib.Path) -> None:
    """Plots both schedules' times, one panel for each study: sections 8.4 to 8.6 of the paper."""
    panels = {}
    for study in dict.fromkeys(row["study"] for row in rows):
        own = [row for row in rows if row["study"] == study]
        word, names = study.split(": ")
        title, label = CHANGED[word]
        x = [float(re.search(r"\d[\d.]*", row["case"])[0]) for row in own]
        curves = zip(names.split(", "), ("first_ms", "second_ms"), strict=True)
        panels[title] = label, x, {name: numbers(own, column) for name, column in curves}
    plots.curves(panels, path)
