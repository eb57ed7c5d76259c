"""CSV files -> tables in docs/*.md and README.md, and plots in docs/img.

    python -m benchmarks.summary [--print]

Ratios are peer time over our time in the same run; "best" is over the peers of the goal (GOAL of
each module in benchmarks/peers), case by case. Means are geometric. Rows with donated results
compare other contenders and have a table of their own. Pages show the CPU with the most rows in
full, and every CPU that has a folder of results side by side.
"""

import argparse
import json
import pathlib
import re

from benchmarks import (
    attention_table,
    compiler_table,
    every_cpu,
    machine,
    pattern_tables,
    plots,
    vector_goals,
)
from benchmarks.comparisons import IN_README, comparisons, in_short, overview
from benchmarks.peers import (
    attention,
    dlmc,
    dlmc_sddmm,
    dlmc_softmax,
    edges,
    gradient,
    messages,
    sddmm,
    softmax,
    spmm,
)
from benchmarks.ratios import Row, fresh, mean, numbers, short, table

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
    "messages_edges": ("vectors of edges", edges),
}
DOCS = machine.ROOT / "docs"
# The pictures, in docs/img.
OVERVIEW_PLOT = "overview.svg"
PLOT = "performance.svg"
VECTORS_PLOT = "vectors.svg"
ATTENTION_PLOT = "attention.svg"
STUDIES_PLOT = "compiler_studies.svg"
VECTORS = ("dlmc", "dlmc_sddmm", "dlmc_softmax")
MARKED = r"(<!-- {0}:begin[^>]*-->\n).*?(<!-- {0}:end -->)"


def load(folder: pathlib.Path) -> dict[str, list[Row]]:
    found = every_cpu.read(folder, tuple(OPS))
    if not found:
        raise SystemExit(f"no results in {folder}: run python -m benchmarks.run first")
    return found


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
    """A table of large results: a fresh array each time, or existing memory."""
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


def place_of(folder: pathlib.Path) -> str:
    inside = folder.resolve().is_relative_to(machine.ROOT)
    return str(folder.resolve().relative_to(machine.ROOT)) if inside else folder.name


def source(results: dict[str, list[Row]], folder: pathlib.Path, brief: bool = False) -> list[str]:
    """The provenance of the numbers; unless `brief` also the machine's limits and the versions."""
    about = json.loads((folder / "machine.json").read_text())
    rows = [row for found in results.values() for row in found]
    commits, dates = ({row[key] for row in rows} for key in ("commit", "date"))
    machine_and_rows = (
        f"{about['device']}, {about['cores']} threads; float32; commit "
        f"{', '.join(sorted(commits))}, {', '.join(sorted(dates))}; rows in `{place_of(folder)}`."
    )
    if brief:
        return [machine_and_rows, ""]
    reads = ", ".join(f"{level} {rate:.0f}" for level, rate in about["gb_per_s"].items())
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return [
        f"{machine_and_rows} Measured limits of the machine: sgemm "
        f"{about['fma_gflops']:.0f} GFLOP/s; reads in GB/s: {reads}. {versions}.",
        "",
    ]


def attention_page(rows: list[Row], folder: pathlib.Path) -> list[str]:
    lines = source({"attention": rows}, folder) + table(*attention_table.table(rows, folder))
    return [*lines, f"![attention](img/{ATTENTION_PLOT})", ""]


def compiler_page(folder: pathlib.Path) -> list[str]:
    """The page of bench_compiler and bench_compiler_studies; empty if they have not run."""
    found = every_cpu.read(folder, ("compiler", "compiler_tensors", "compiler_studies"))
    studies = found.pop("compiler_studies", [])
    rows = [row for own in found.values() for row in own]
    lines = source({"compiler": rows + studies}, folder) if rows or studies else []
    if rows:
        of = "Ratios are the other's time over that of the compiled loops: their geometric mean"
        lines += [f"{of}, and in brackets the lowest of a case.", ""]
        lines += table(*compiler_table.table(rows))
    if studies:
        compiler_table.plot(studies, DOCS / "img" / STUDIES_PLOT)
        lines += [*table(*compiler_table.studies(studies))]
        lines += [f"![studies](img/{STUDIES_PLOT})", ""]
    return lines


def put(path: pathlib.Path, lines: list[str], mark: str = "benchmarks") -> None:
    """Replaces the text between the two marks."""
    text = path.read_text() if path.exists() else ""
    marked = re.compile(MARKED.format(mark), re.DOTALL)
    filled, count = marked.subn(lambda found: found[1] + "\n".join(lines) + found[2], text)
    if count:
        path.write_text(filled)
    else:
        print(f"no {mark}:begin / {mark}:end in {path.name}: left alone")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    everywhere = machine.ROOT / "benchmarks" / "results"
    files = (*OPS, "half", "narrow", "octets", *pattern_tables.FILES)
    found = {x: every_cpu.read(x, files) for x in every_cpu.folders(everywhere)}
    shown = every_cpu.fullest(found) if found else machine.results_dir()
    parser.add_argument("--results", type=pathlib.Path, default=shown, help=f"default: {shown}")
    parser.add_argument("--print", action="store_true", help="print the tables, write no file")
    args = parser.parse_args(argv)
    results = load(args.results)
    about, tables = source(results, args.results), []
    for op, rows in results.items():
        title, module = OPS[op]
        tables += [f"## {title}", "", *by_family(fresh(rows), op), *by_peer(fresh(rows), module)]
        tables += donated(rows)
        if op == "dlmc" and (goals := vector_goals.table(rows))[1]:
            tables += table(*goals)
    if args.print:
        print("\n".join([*about, *overview(results), *tables, *every_cpu.beside_peers(found)]))
        return
    pictures = draw(results)
    put(DOCS / "performance.md", [*about, *overview(results), *pictures])
    everyone = [*every_cpu.limits(found), *every_cpu.beside_peers(found)]
    put(DOCS / "performance.md", everyone, "every-cpu")
    put(DOCS / "performance.md", every_cpu.narrow_products(found), "narrow")
    put(DOCS / "performance.md", every_cpu.beside_float32(found), "half")
    put(DOCS / "performance.md", every_cpu.matrix_tiles(found), "octets")
    for mark, shown in pattern_tables.SHOWN.items():
        put(DOCS / "dynamic_patterns.md", pattern_tables.side_by_side(found, shown), mark)
    put(DOCS / "results.md", [*about, *tables])
    if rows := results.get("attention"):
        put(DOCS / "attention.md", attention_page(rows, args.results))
    if lines := compiler_page(args.results):
        put(DOCS / "compiled_loops.md", lines)
    brief = source(results, args.results, brief=True) + in_short(results)
    brief += every_cpu.range_of_means(found, IN_README)
    put(machine.ROOT / "README.md", [*brief, *image("ratios", OVERVIEW_PLOT, "docs/img")])


def image(title: str, name: str, folder: str = "img") -> list[str]:
    return [f"![{title}]({folder}/{name})", ""]


def draw(results: dict[str, list[Row]]) -> list[str]:
    """Draws the plots of all operations, and returns the lines that show them."""
    titles, images = {op: title for op, (title, _) in OPS.items()}, DOCS / "img"
    ratios = {one.title: one.ratios for one in comparisons(results)}
    plots.ranges(ratios, "time of the best peer / our time", images / OVERVIEW_PLOT)
    lines = [
        "Each line goes from the worst case to the best one, thick over the middle half of the "
        "cases; the dot is their geometric mean.",
        "",
        *image("all comparisons", OVERVIEW_PLOT),
    ]
    apart = (*VECTORS, "attention")
    if others := {op: rows for op, rows in results.items() if op not in apart}:
        plots.scatter(others, titles, images / PLOT)
        lines += image("ratios", PLOT)
    if of_vectors := {op: rows for op, rows in results.items() if op in VECTORS}:
        plots.boxes(of_vectors, titles, images / VECTORS_PLOT)
        lines += [
            "Column vectors: time of the dense form over ours by sparsity; boxes over problems and "
            "widths, whiskers to the least and the greatest, lines through the geometric means.",
            "",
            *image("column vectors", VECTORS_PLOT),
        ]
    if rows := results.get("attention"):
        attention_table.plot(rows, images / ATTENTION_PLOT)
        lines += image("attention", ATTENTION_PLOT)
    return lines


if __name__ == "__main__":
    main()
