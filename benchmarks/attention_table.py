"""attention.csv and attention_memory.csv -> the table and the plot of docs/attention.md."""

import csv
import pathlib

from benchmarks import plots
from benchmarks.ratios import Row

PEERS = {
    "jax_nn": "jax.nn",
    "torch_sdpa": "torch SDPA",
    "flex_attention": "FlexAttention",
    "unfused": "our steps, unfused",
}
HEAD = ["mask", "pass", "ms", *(f"x {title}" for title in PEERS.values())]
HEAD += ["x itself at 90%", "temporary MB, ours / jax.nn"]
PEAKS = ("ours", "jax_nn", "torch_sdpa")
PEAK_HEAD = "MB a process grows, ours / jax.nn / torch"


def is_backward(row: Row) -> bool:
    return row["schedule"].startswith("forward and backward")


def table(rows: list[Row], folder: pathlib.Path) -> tuple[list[str], list[list[str]]]:
    """The table's head and cells, one line for each row of attention.csv."""
    memory = temporaries(folder / "attention_memory.csv")
    body = []
    for row in rows:
        name, backward = row["problem"], is_backward(row)
        gain = f"{float(row['at_90pct']):.2f}" if row.get("at_90pct") else ""
        ratios = [float(row[x]) if row.get(x := f"x_{peer}") else None for peer in PEERS]
        body.append(
            [title(row), row["schedule"].split(",")[0], f"{1e-3 * float(row['us']):.2f}"]
            + ["-" if ratio is None else f"{ratio:.1f}" for ratio in ratios]
            + [gain, *memory.get((name, backward), ("", ""))]
        )
    if any(line[-1] for line in body):
        return [*HEAD, PEAK_HEAD], body
    return HEAD, [line[:-1] for line in body]


def title(row: Row) -> str:
    """`attention_2048_90pct` as `L = 2048, 90%`."""
    _, length, kind = row["problem"].split("_")
    return f"L = {length}, {'blocks' if kind == 'blocks' else kind.replace('pct', '%')}"


def temporaries(path: pathlib.Path) -> dict[tuple[str, bool], tuple[str, str]]:
    """Temporary memory of each case: by XLA's analysis, and by the growth of a process where
    measured."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    return {
        (row["problem"], row["backward"] == "True"): (
            f"{float(row['ours']):.1f} / {float(row['jax_nn']):.0f}",
            " / ".join(megabytes(row.get(f"{way}_peak")) for way in PEAKS)
            if row.get("ours_peak")
            else "",
        )
        for row in found
    }


def megabytes(cell: str | None) -> str:
    return f"{float(cell):.{int(float(cell) < 1)}f}" if cell else "-"


def plot(rows: list[Row], path: pathlib.Path) -> None:
    """Plots each peer's time over ours, one panel for each pass."""
    passes = {"forward": False, "forward and backward": True}
    panels = {name: [row for row in rows if is_backward(row) is b] for name, b in passes.items()}
    plots.bars(panels, PEERS, title, path)
