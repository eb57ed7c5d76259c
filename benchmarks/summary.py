"""CSV files -> tables in docs/*.md and README.md, and plots.

    python -m benchmarks.summary [--print]

Ratios are peer time over our time in the same run; "best" is over the peers that the goal names
(GOAL of each module in benchmarks/peers), case by case. Means are geometric. Rows with donated
results compare other contenders and are kept apart.
"""

import argparse
import csv
import json
import math
import pathlib
import re

from benchmarks import attention_table, compiler_table, machine, plots, vector_goals
from benchmarks.peers import (
    attention,
    dlmc,
    dlmc_sddmm,
    dlmc_softmax,
    gradient,
    messages,
    sddmm,
    softmax,
    spmm,
)
from benchmarks.ratios import Row, fresh, mean, numbers

OPS = {
    "spmm": ("SpMM", spmm),
    "sddmm": ("SDDMM", sddmm),
    "gradient": ("value and gradient of SpMM", gradient),
    "softmax": ("sparse softmax", softmax),
    "dlmc": ("SpMM with column vectors", dlmc),
    "dlmc_sddmm": ("SDDMM with column vectors", dlmc_sddmm),
    "dlmc_softmax": ("sparse softmax with column vectors", dlmc_softmax),
    "attention": ("attention with a sparse mask", attention),
    "messages_max": ("messages, maximum", messages),
    "messages_mean": ("messages, mean", messages),
}
DOCS = machine.ROOT / "docs"
PLOT = DOCS / "img" / "performance.svg"
VECTORS_PLOT = DOCS / "img" / "vectors.svg"
ATTENTION_PLOT = DOCS / "img" / "attention.svg"
STUDIES_PLOT = DOCS / "img" / "compiler_studies.svg"
VECTORS = ("dlmc", "dlmc_sddmm", "dlmc_softmax")
WITHOUT_COLUMNS = ("softmax", "dlmc_softmax")
MARKED = re.compile(r"(<!-- benchmarks:begin[^>]*-->\n).*?(<!-- benchmarks:end -->)", re.DOTALL)

# What the overview compares: operation, title, peers of whom the fastest counts in each case.
COMPARISONS = (
    ("spmm", "SpMM", spmm.GOAL),
    ("sddmm", "SDDMM", sddmm.GOAL),
    ("gradient", "value and gradient, against torch", gradient.GOAL),
    ("gradient", "value and gradient, against JAX BCSR", ("jax_bcsr",)),
    ("softmax", "sparse softmax", softmax.GOAL),
    ("dlmc", "SpMM with column vectors", dlmc.GOAL),
    ("dlmc", "SpMM with column vectors, against dense", ("jax_dense",)),
    ("dlmc_sddmm", "SDDMM with column vectors", dlmc_sddmm.GOAL),
    ("dlmc_sddmm", "SDDMM with column vectors, against dense and gather", ("jax_dense",)),
    ("dlmc_softmax", "sparse softmax with column vectors", dlmc_softmax.GOAL),
    ("dlmc_softmax", "sparse softmax with column vectors, against dense", ("jax_dense",)),
    ("attention", "attention, against jax.nn", ("jax_nn",)),
    ("attention", "attention, against torch", ("torch_sdpa", "flex_attention")),
    ("messages_max", "message passing, maximum", messages.GOAL),
    ("messages_mean", "message passing, mean", messages.GOAL),
)


def load(folder: pathlib.Path) -> dict[str, list[Row]]:
    found = {}
    for op in OPS:
        if (path := folder / f"{op}.csv").exists():
            with path.open(newline="") as file:
                found[op] = list(csv.DictReader(file))
    if not found:
        raise SystemExit(f"no results in {folder}: run python -m benchmarks.run first")
    return found


def short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def table(head: list[str], body: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


def best(row: Row, peers: tuple[str, ...]) -> float:
    """Time of the fastest of these peers over ours; infinite where none of them ran."""
    return min((float(row[x]) for name in peers if row.get(x := f"x_{name}")), default=math.inf)


def overview(results: dict[str, list[Row]]) -> list[str]:
    """One line for each comparison: what the README shows too."""
    body = []
    for op, title, peers in COMPARISONS:
        rows = fresh(results.get(op, []))
        compared = [row for row in rows if best(row, peers) < math.inf]
        if not compared:
            continue
        ratios = [best(row, peers) for row in compared]
        worst = compared[ratios.index(min(ratios))]
        where = worst["problem"] + (f", n = {worst['n']}" if op not in WITHOUT_COLUMNS else "")
        share = sum(x >= 1 for x in ratios) / len(ratios)
        fraction = mean(numbers(rows, "fraction_of_bound"))
        everyone = mean([best(row, tuple(OPS[op][1].PEERS)) for row in compared])
        body.append(
            [title, str(len(ratios)), f"**{short(mean(ratios))}**", f"{100 * share:.0f}%"]
            + [f"{short(min(ratios))} ({where})", short(everyone), f"{100 * fraction:.0f}%"]
        )
    head = ["operation", "cases", "x best peer (mean)", "cases at least as fast"]
    head += ["worst case", "x best of all measured (mean)", "of the machine's bound (mean)"]
    return table(head, body)


def by_family(rows: list[Row], op: str) -> list[str]:
    body = []
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        for n in sorted({int(row["n"]) for row in own}):
            part = [row for row in own if int(row["n"]) == n]
            ratios, rates = numbers(part, "x_best"), numbers(part, "gflops")
            lows = short(min(ratios)) if ratios else "-"
            body.append(
                [family, str(n), str(len(part)), f"{min(rates):.0f} - {max(rates):.0f}"]
                + [f"{100 * mean(numbers(part, 'fraction_of_bound')):.0f}%"]
                + [short(mean(ratios)), lows]
            )
    head = ["family", "n", "problems", "useful GFLOP/s", "of the bound"]
    return table([*head, "x best peer (mean)", "worst"], body)


def by_peer(rows: list[Row], module) -> list[str]:
    body = []
    for name in module.PEERS:
        if ratios := numbers(rows, f"x_{name}"):
            counted = "yes" if name in module.GOAL else "no"
            cells = (mean(ratios), min(ratios), max(ratios))
            body.append([f"`{name}`", counted, str(len(ratios)), *map(short, cells)])
    return table(["x peer", "counts as best peer", "cases", "mean", "least", "most"], body)


def donated(rows: list[Row]) -> list[str]:
    """Large results: a fresh array each time against memory that exists."""
    fresh_us = {(row["problem"], row["n"]): row["us"] for row in fresh(rows)}
    body = []
    for row in rows:
        if row["schedule"].endswith("donated"):
            us = float(fresh_us.get((row["problem"], row["n"]), "nan"))
            megabytes = 4e-6 * int(row["m"]) * int(row["n"])
            ratio = short(float(row["x_best"])) if row["x_best"] else "-"
            body.append(
                [row["problem"], row["n"], f"{megabytes:.0f}", f"{1e-3 * us:.1f}"]
                + [f"{1e-3 * float(row['us']):.1f}", f"{ratio} ({row['best_peer']})"]
            )
    head = ["problem", "n", "result, MB", "fresh, ms", "donated, ms"]
    return table([*head, "x best peer that also writes in place"], body) if body else []


def source(results: dict[str, list[Row]], folder: pathlib.Path) -> list[str]:
    about = json.loads((folder / "machine.json").read_text())
    rows = [row for found in results.values() for row in found]
    commits, dates = ({row[key] for row in rows} for key in ("commit", "date"))
    reads = ", ".join(f"{level} {rate:.0f}" for level, rate in about["gb_per_s"].items())
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    inside = folder.resolve().is_relative_to(machine.ROOT)
    place = folder.resolve().relative_to(machine.ROOT) if inside else folder.name
    return [
        f"{about['device']}, {about['cores']} threads; float32; commit "
        f"{', '.join(sorted(commits))}, {', '.join(sorted(dates))}; rows in `{place}`. "
        f"Measured limits of the machine: sgemm {about['fma_gflops']:.0f} GFLOP/s; "
        f"reads in GB/s: {reads}. {versions}.",
        "",
    ]


def attention_page(rows: list[Row], folder: pathlib.Path) -> list[str]:
    lines = source({"attention": rows}, folder) + table(*attention_table.table(rows, folder))
    return [*lines, f"![attention](img/{ATTENTION_PLOT.name})", ""]


def compiler_page(folder: pathlib.Path) -> list[str]:
    """What bench_compiler and bench_compiler_studies left; nothing where they have not run."""
    found = {}
    for name in ("compiler", "compiler_tensors", "compiler_studies"):
        if (path := folder / f"{name}.csv").exists():
            with path.open(newline="") as file:
                found[name] = list(csv.DictReader(file))
    studies = found.pop("compiler_studies", [])
    rows = [row for own in found.values() for row in own]
    lines = source({"compiler": rows + studies}, folder) if rows or studies else []
    if rows:
        of = "Ratios are the other's time over that of the compiled loops: their geometric mean"
        lines += [f"{of}, and in brackets the lowest of a case.", ""]
        lines += table(*compiler_table.table(rows))
    if studies:
        compiler_table.plot(studies, STUDIES_PLOT)
        lines += [*table(*compiler_table.studies(studies))]
        lines += [f"![studies](img/{STUDIES_PLOT.name})", ""]
    return lines


def put(path: pathlib.Path, lines: list[str]) -> None:
    """Replaces what stands between the two marks."""
    text = path.read_text() if path.exists() else ""
    filled, count = MARKED.subn(lambda found: found[1] + "\n".join(lines) + found[2], text)
    if count:
        path.write_text(filled)
    else:
        print(f"no benchmarks:begin / benchmarks:end in {path.name}: left alone")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=machine.results_dir())
    parser.add_argument("--print", action="store_true", help="print the tables, write no file")
    args = parser.parse_args(argv)
    results = load(args.results)
    summary = source(results, args.results) + overview(results)
    pages = list(summary)
    for op, rows in results.items():
        title, module = OPS[op]
        pages += [f"### {title}", "", *by_family(fresh(rows), op), *by_peer(fresh(rows), module)]
        pages += donated(rows)
        if op == "dlmc" and (goals := vector_goals.table(rows))[1]:
            pages += table(*goals)
    if args.print:
        print("\n".join(pages))
        return
    titles = {op: title for op, (title, _) in OPS.items()}
    apart = (*VECTORS, "attention")
    if others := {op: rows for op, rows in results.items() if op not in apart}:
        plots.scatter(others, titles, PLOT)
        pages += [f"![ratios](img/{PLOT.name})", ""]
    if of_vectors := {op: rows for op, rows in results.items() if op in VECTORS}:
        plots.boxes(of_vectors, titles, VECTORS_PLOT)
        pages += [
            "Column vectors: time of the dense form over ours by sparsity; boxes over problems and "
            "widths, whiskers to the least and the greatest, lines through the geometric means.",
            "",
            f"![column vectors](img/{VECTORS_PLOT.name})",
            "",
        ]
    if rows := results.get("attention"):
        attention_table.plot(rows, ATTENTION_PLOT)
        pages += [f"![attention](img/{ATTENTION_PLOT.name})", ""]
        put(DOCS / "attention.md", attention_page(rows, args.results))
    if lines := compiler_page(args.results):
        put(DOCS / "compiled_loops.md", lines)
    put(DOCS / "performance.md", pages)
    put(machine.ROOT / "README.md", summary)


if __name__ == "__main__":
    main()
