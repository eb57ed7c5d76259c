"""Rows of a run on a GPU -> summary.md: each goal of the project with its measured value."""

from __future__ import annotations

import csv
import itertools
import json
import math
import pathlib
import statistics

from benchmarks.gpu import peers
from benchmarks.gpu.session import not_started
from benchmarks.summary import table
from sgap_jax.launch.defaults import OF_VECTORS

Row = dict[str, str]
GOALS = (
    ("SpMM over the best cuSPARSE algorithm (mean; n = 4, 16, 64, 128)", "1.3"),
    ("best point per matrix over the best static point (mean; n = 4)", "1.3"),
    ("best point per matrix over the best cuSPARSE algorithm (mean; n = 4)", "-"),
    ("SpMM over JAX BCOO, as programs of JAX (mean; n = 4, 16, 64, 128)", "10"),
    ("SpMV, time over the bandwidth bound (worst; over 1 million nonzeros)", "at most 1.2"),
)
WIDTHS = (4, 16, 64, 128)
PREDICTED = pathlib.Path(__file__).with_name("predicted.csv")


def load(path: pathlib.Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file)]


def times(rows: list[Row], key: str = "contender") -> dict[tuple[str, int], dict[str, float]]:
    """(problem, n) -> contender (or schedule) -> us, for rows with a time."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row.get("us"):
            found.setdefault((row["problem"], int(row["n"])), {})[row[key]] = float(row["us"])
    return found


def mean(values: list[float]) -> float:
    return statistics.geometric_mean(values) if values else math.nan


def ratios(cases: dict, whose: tuple[str, ...], over: str = "ours", widths=WIDTHS) -> list[float]:
    """The time of the fastest of `whose` over that of `over`, case by case."""
    return [
        min(found[name] for name in whose if name in found) / found[over]
        for (_, n), found in cases.items()
        if n in widths and over in found and any(name in found for name in whose)
    ]


def dynamic_over_static(points: list[Row], n: int = 4) -> tuple[float, str]:
    """The gain of the best point of each matrix over the one point that is best for all
    matrices."""
    cases = [found for (_, width), found in times(points, "schedule").items() if width == n]
    common = set.intersection(*(set(found) for found in cases)) if cases else set()
    if not common:
        return math.nan, "-"
    static = min(sorted(common), key=lambda point: mean([found[point] for found in cases]))
    return mean([found[static] / min(found.values()) for found in cases]), static


def measured(folder: pathlib.Path) -> list[tuple[str, str]]:
    """(value, what it is taken over) for each goal; "not measured" where rows are missing."""
    rows, points = load(folder / "spmm.csv"), load(folder / "points.csv")
    cases = times(rows)
    library = ratios(cases, peers.CUSPARSE)
    gain, static = dynamic_over_static(points)
    best = {
        case: cases.get(case, {}) | {"best": min(found.values())}
        for case, found in times(points, "schedule").items()
    }
    searched = ratios(best, peers.CUSPARSE, "best", (4,))
    programs = ratios(cases, ("jax_bcoo",), "ours_jax")
    vectors = [
        float(row["us"]) / float(row["bound_us"])
        for row in rows
        if row["contender"] == "ours"
        and row["n"] == "1"
        and row.get("us")
        and int(row["nnz"]) > 1_000_000
    ]
    return [
        (_number(mean(library)), f"{len(library)} cases"),
        (_number(gain), f"static: `{static}`"),
        (_number(mean(searched)), f"{len(searched)} matrices"),
        (_number(mean(programs)), f"{len(programs)} cases"),
        (_number(max(vectors, default=math.nan)), f"{len(vectors)} matrices"),
    ]


def _number(value: float) -> str:
    return "not measured" if math.isnan(value) else f"{value:.2f}"


def by_contender(rows: list[Row], over: str) -> list[str]:
    """Mean time of each contender over ours, for each width."""
    cases = times(rows)
    names = list(dict.fromkeys(row["contender"] for row in rows))
    widths = sorted({n for _, n in cases})
    body = []
    for name in names:
        found = [ratios(cases, (name,), over, (n,)) for n in widths]
        if any(found):
            cells = [f"{mean(x):.2f} ({len(x)})" if x else "-" for x in found]
            body.append([f"`{name}`", *cells])
    return table(["contender", *(f"n = {n}" for n in widths)], body) if body else []


def beside_predictions(folder: pathlib.Path, device: str) -> list[str]:
    """A table of our kernels' times beside those that were predicted for this GPU
    (benchmarks/gpu/predicted.csv); nothing for a GPU without predictions."""
    gpus = {row["gpu"] for row in load(PREDICTED)}
    name = next((gpu for gpu in sorted(gpus) if gpu.split()[0] in device), None)
    body, over = [], []
    for row in load(PREDICTED):
        case = row["problem"], int(row["n"])
        found = times(load(folder / f"{row['op']}.csv")).get(case, {})
        if row["gpu"] != name or row["dtype"] != "float32" or "ours" not in found:
            continue
        us, expected = found["ours"], float(row["us"])
        over.append(us / expected)
        cells = [f"{expected:.2f}", row["bound_by"], f"{us:.2f}", f"{us / expected:.2f}"]
        body.append([row["op"], row["problem"], row["n"], *cells])
    if not body:
        return []
    body.append(["mean", "", "", "", "", "", f"{mean(over):.2f}"])
    header = ["operation", "problem", "n", "predicted us", "bound by", "measured us"]
    title = f"### Predicted for {name}, and measured on {device}"
    return [title, "", *table([*header, "measured over predicted"], body)]


def write(folder: pathlib.Path) -> pathlib.Path:
    """Fills summary.md of a folder from its CSV files and run.json."""
    about = json.loads((folder / "run.json").read_text())
    lines = [
        f"{about['device']}, driver {about['driver']}, commit {about['commit']}, {about['date']}; "
        f"copies at {about['gb_per_s']:.0f} GB/s; float32.",
        "",
    ]
    if about["dry_run"]:
        lines += ["A dry run on the emulator: no figure here says anything about a GPU.", ""]
    lines += not_started(about)
    values = measured(folder)
    lines += table(
        ["goal", "aim", "measured", "over"],
        [[*goal, *value] for goal, value in zip(GOALS, values, strict=True)],
    )
    titles = {"spmm": "SpMM", "sddmm": "SDDMM", "softmax": "Sparse softmax"}
    for name, over in itertools.product(titles, ("ours", "ours_jax")):
        what = "as programs of JAX" if over == "ours_jax" else "kernels"
        title = f"{titles[name]}, {what}: time over ours (cases)"
        kind = peers.PROGRAMS if over == "ours_jax" else peers.KERNELS
        rows = [
            row for row in load(folder / f"{name}.csv") if row["contender"] in (over, *kind[name])
        ]
        if body := by_contender(rows, over):
            lines += [f"### {title}", "", *body]
    for name, op in OF_VECTORS.items():
        kernels = ("vectors", "ours", *peers.KERNELS[op])
        rows = [row for row in load(folder / f"{name}.csv") if row["contender"] in kernels]
        if body := by_contender(rows, "vectors"):
            title = f"{titles[op]} of column vectors, kernels: time over that of the vectors"
            lines += [f"### {title} (`ours`: their entries)", "", *body]
    lines += beside_predictions(folder, about["device"])
    path = folder / "summary.md"
    path.write_text("\n".join(lines))
    return path
