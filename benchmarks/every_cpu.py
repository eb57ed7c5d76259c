"""The CPUs that results are of, side by side: what of each operation was measured on which."""

import csv
import json
import pathlib

from benchmarks.comparisons import comparisons
from benchmarks.ratios import Row, mean, short, table

# Results of every CPU: folder -> operation -> rows.
Results = dict[pathlib.Path, dict[str, list[Row]]]
HALF_OPS = {
    "spmm": "spmm",
    "spmm_transposed": "spmm, A^T B",
    "sddmm": "sddmm",
    "gspmm_max": "gspmm, max",
    "softmax": "sparse softmax",
    "row_sum": "row sum",
    "attention": "attention",
    "attention_backward": "attention and gradients",
}

NARROW_KINDS = {
    "product": "A B",
    "transposed": "A^T B",
    "converted": "A^T B, with A^T in CSR beforehand",
    "float64": "A B, float64",
    "float64_transposed": "A^T B, float64",
    "float64_converted": "A^T B, with A^T in CSR beforehand, float64",
    "loop": "100 products in a loop inside `jit`",
    "lobpcg": "LOBPCG, float64",
}

TILE_OPS = {
    "layers": "spmm in a program",
    "spmm": "spmm, a call",
    "transposed": "A^T B",
    "sddmm": "sddmm",
}


def read(folder: pathlib.Path, names: tuple[str, ...]) -> dict[str, list[Row]]:
    """The rows of those of the named files that the folder has."""
    found = {}
    for name in names:
        if (path := folder / f"{name}.csv").exists():
            with path.open(newline="") as file:
                found[name] = list(csv.DictReader(file))
    return found


def folders(results: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.parent for path in results.glob("*/machine.json"))


def device(folder: pathlib.Path) -> str:
    about = json.loads((folder / "machine.json").read_text())
    return f"{about['device']}, {about['cores']} threads"


def limits(found: Results) -> list[str]:
    """A line for each CPU: what it can do at most, and how many rows each of its files has."""
    body = []
    for folder in found:
        about = json.loads((folder / "machine.json").read_text())
        reads = ", ".join(f"{level} {rate:.0f}" for level, rate in about["gb_per_s"].items())
        sizes = "/".join(f"{size >> 10}" for size in about["cache_bytes"].values())
        counts = []
        for path in sorted(folder.glob("*.csv")):
            with path.open(newline="") as file:
                counts.append(f"{path.stem} {sum(1 for _ in csv.DictReader(file))}")
        cells = [f"{about['fma_gflops']:.0f}", reads or "-", sizes, ", ".join(counts)]
        body.append([device(folder), *cells])
    head = ["CPU", "sgemm, GFLOP/s", "reads, GB/s", "L1/L2/L3, KiB", "rows of each file"]
    return table(head, body)


def cell(ratios: list[float], all_cases: int) -> str:
    cases = f"{len(ratios)}" if len(ratios) == all_cases else f"{len(ratios)} of {all_cases}"
    return f"**{short(mean(ratios))}** (worst {short(min(ratios))}; {cases})"


def beside_peers(found: Results) -> list[str]:
    """A line for each comparison with a cell for each CPU."""
    ratios: dict[str, dict[pathlib.Path, list[float]]] = {}
    for folder, results in found.items():
        for one in comparisons(results):
            ratios.setdefault(one.title, {})[folder] = one.ratios
    shown = [folder for folder in found if any(folder in of for of in ratios.values())]
    body = []
    for title, of in ratios.items():
        most = max(map(len, of.values()))
        body.append([title, *(cell(of[x], most) if x in of else "-" for x in shown)])
    return table(["x best peer: mean (worst; cases)", *map(device, shown)], body)


def range_of_means(found: Results, titles: tuple[str, ...]) -> list[str]:
    """For each of the comparisons, the least and the greatest mean over the CPUs that have it;
    nothing while one CPU has them all."""
    means: dict[str, list[float]] = {title: [] for title in titles}
    for results in found.values():
        for one in comparisons(results):
            if one.title in means:
                means[one.title].append(mean(one.ratios))
    if max(map(len, means.values()), default=0) < 2:
        return []
    cells = {title: f"{short(min(of))} to {short(max(of))}" for title, of in means.items() if of}
    body = [[title, str(len(means[title])), cell] for title, cell in cells.items()]
    return table(["operation", "CPUs", "x best peer, least and greatest mean"], body)


def beside_float32(found: Results) -> list[str]:
    """Of bench_half: time of 16-bit floats over that of float32, a pair of columns for each CPU."""
    rows = {folder: results["half"] for folder, results in found.items() if "half" in results}

    def of(folder: pathlib.Path, op: str, format: str, dtype: str) -> str:
        own = [row for row in rows[folder] if row["schedule"] == format]
        own = [row for row in own if row["problem"].partition(": ")[0] == op]
        ratios = [float(row[f"x_{dtype}"]) for row in own if row.get(f"x_{dtype}")]
        if not ratios:
            return "-"
        worst = own[ratios.index(max(ratios))]
        case = worst["problem"].partition(": ")[2].partition("_")[0]
        named = f" ({case}, n = {worst['n']})" if len(ratios) > 1 else ""
        return f"{mean(ratios):.2f}, {max(ratios):.2f}{named}"

    head = ["operation", "format"]
    for folder in rows:
        head += [f"{dtype}: {device(folder)}" for dtype in ("bfloat16", "float16")]
    body = []
    for op, title in HALF_OPS.items():
        for format in ("CSR", "CVS(2)", "CVS(8)"):
            cells = [of(x, op, format, d) for x in rows for d in ("bfloat16", "float16")]
            if set(cells) != {"-"}:
                body.append([title, format, *cells])
    return table(head, body)


def narrow_products(found: Results) -> list[str]:
    """Of bench_narrow, for each CPU that has it: time of the fastest peer over ours."""
    rows = {folder: results["narrow"] for folder, results in found.items() if "narrow" in results}

    def of(folder: pathlib.Path, kind: str, n: str) -> str:
        ratios = {}
        for row in rows[folder]:
            own, _, problem = row["problem"].partition(": ")
            peers = [float(x) for name, x in row.items() if name.startswith("x_") and x]
            if (own, row["n"]) == (kind, n) and peers:
                ratios[problem] = min(peers)
        if not ratios:
            return "-"
        worst = min(ratios, key=lambda problem: ratios[problem])
        return f"{mean(list(ratios.values())):.2f}, {ratios[worst]:.2f} ({worst})"

    body = []
    for kind, title in NARROW_KINDS.items():
        for n in ("1", "4", "8"):
            cells = [of(folder, kind, n) for folder in rows]
            if any(cell != "-" for cell in cells):
                body.append([title, n, *cells])
    return table(["", "columns", *map(device, rows)], body)


def matrix_tiles(found: Results) -> list[str]:
    """Of bench_octets, for each CPU that has it: torch's dense product and SDPA over ours, and ours
    in float32 over ours."""
    lines: list[str] = []
    for folder, results in found.items():
        rows = [
            (op, case, row)
            for row in results.get("octets", [])
            for op, _, case in [row["problem"].partition(": ")]
        ]
        products: dict[tuple[str, str], dict[str, Row]] = {}
        for op, case, row in rows:
            if op in TILE_OPS:
                sparsity = case.split("_")[2].removesuffix("pct") + "%"
                products.setdefault((row["schedule"], sparsity), {})[op] = row
        if not products:
            continue
        head = ["format", "sparsity"]
        for title in TILE_OPS.values():
            head += [f"{title}: dense", "float32"]
        body = [
            [*key, *(short(float(own[op][x])) for op in TILE_OPS for x in ("x_torch", "x_float32"))]
            for key, own in products.items()
            if own.keys() == TILE_OPS.keys()
        ]
        lines += [f"{device(folder)}:", "", *table(head, body)]
        head = ["", "ms", "x torch, added mask", "boolean mask", "x float32 of ours"]
        ratios = ("x_torch", "x_torch_boolean", "x_float32")
        body = [
            [
                op + "," + case.partition(",")[2],
                short(float(row["us"]) / 1000),
                *(short(float(row[x])) for x in ratios),
            ]
            for op, case, row in rows
            if op not in TILE_OPS
        ]
        lines += table(head, body)
    return lines


def fullest(found: Results) -> pathlib.Path:
    """The CPU with the most rows, which is the one that pages show in full."""
    return max(found, key=lambda folder: sum(map(len, found[folder].values())))
