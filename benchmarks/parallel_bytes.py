"""Rows that products of graphs in parts send, counted from their plans and not timed.

    python -m benchmarks.parallel_bytes FOLDER CSV SVG

FOLDER has the graphs as .npz. Each is made symmetric and cut into 2 to 1,024 parts in the order
given and in that of METIS; an R-MAT graph is drawn beside them. Columns of the CSV, in rows of a
dense operand that one device sends in one product (times 4 n for bytes of n columns in float32):

    ours_most    of the device that sends most, padding included
    ours_mean    of the mean device, padding included
    rows_of_b    as ours_most if only rows of B travel
    cover        the mean of smallest vertex covers of the entries between each two parts, without
                 padding: fewer rows cannot travel for that cut (SHIRO, arXiv 2512.20178)
    one_d        of an all-gather
    cagnet       of CAGNET's 1.5D algorithm (Tripathy, Yelick and Buluc, SC 2020), the mean device,
                 counted from the program of its authors (PASSIONLab/CAGNET at d603d53, `broad_func`
                 of gcn_distr_15d.py), with the replication c that sends least; its memory is c
                 times as large
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from benchmarks.plots import plotting, save
from sgap_jax.parallel.cover import cover
from sgap_jax.parallel.exchange import Exchange
from sgap_jax.parallel.metis import by_metis
from sgap_jax.parallel.plan import Compressed, bounds_of, piece

PARTS = (2, 4, 16, 64, 256, 1024)
COLUMNS = 256  # of the dense operand, when the values that a cover moves are weighed


def rmat(scale: int, degree: int, seed: int = 0) -> scipy.sparse.csr_array:
    """A symmetric R-MAT graph with the parameters of Graph500, its vertices in random order."""
    rng, count = np.random.default_rng(seed), degree << scale
    ends = np.zeros((2, count), np.int64)
    for _ in range(scale):
        quarter = rng.choice(4, count, p=(0.57, 0.19, 0.19, 0.05))
        ends = 2 * ends + (quarter >> 1, quarter & 1)
    ends = rng.permutation(1 << scale)[ends]
    ones = np.ones(count, np.float32)
    return scipy.sparse.coo_array((ones, tuple(ends)), shape=(1 << scale,) * 2).tocsr()


def cagnet(k: int, parts: int) -> tuple[int, int]:
    """(the rows that a device sends on the mean, c) of the replication c that sends least, where
    c^2 divides the parts. A block of c k / P rows is on c devices; those of one column of the
    P / c by c grid get P / c^2 blocks, one after the other, each by a broadcast from the device of
    the column that has it; an all-reduce of the c results of a row of the grid follows:
    k / c - k / P rows and 2 (c - 1) k / P."""
    found = []
    for c in range(1, parts + 1):
        if parts % (c * c) == 0:
            block = c * k / parts
            found.append((round((parts // c**2 - 1 / c + 2 * (c - 1) / c) * block), c))
    return min(found)


def counted(matrix: scipy.sparse.csr_array, parts: int, order: str) -> dict[str, Any]:
    rows: Any = "balanced"
    if order == "metis":
        permutation, counts = by_metis(matrix, parts, rows)
        matrix, rows = matrix[permutation][:, permutation].tocsr(), counts.tolist()
    matrix.sum_duplicates()
    bounds = bounds_of(rows, np.diff(matrix.indptr), parts)
    of_b, covers, away = [], [], []
    for p in range(parts):
        own = slice(*matrix.indptr[bounds[p : p + 2]])
        offsets = matrix.indptr[bounds[p] : bounds[p + 1] + 1] - matrix.indptr[bounds[p]]
        found = piece(p, Compressed(matrix.data[own], offsets, matrix.indices[own]), bounds)
        of_b.append(np.diff(found.ends))
        rows_of_b, partial_rows, entries = np.split(cover(found, bounds).counts(), 3)
        covers.append(rows_of_b + partial_rows)
        away.append(entries)
    alone, covered = Exchange.of(np.stack(of_b)), Exchange.of(np.stack(covers))
    values = Exchange.of(np.stack(away).T).total / COLUMNS
    # As PartitionedArray._covered decides.
    ours = covered if covered.total + values < alone.total else alone
    k = matrix.shape[0]
    cagnet_rows, replication = cagnet(k, parts)
    return {
        "ours_most": ours.sent,
        "ours_mean": ours.total // parts,
        "rows_of_b": alone.sent,
        "cover": int(np.sum(covers)) // parts,
        "one_d": (parts - 1) * -(-k // parts),
        "cagnet": cagnet_rows,
        "c": replication,
    }


def problems(folder: Path) -> Iterator[tuple[str, scipy.sparse.csr_array]]:
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            if "format" not in file:
                continue
        matrix = scipy.sparse.load_npz(path).tocsr()
        if matrix.shape[0] >= 4 * max(PARTS):
            yield path.stem, (matrix + matrix.T).tocsr()
    matrix = rmat(15, 8)
    yield "rmat_15", (matrix + matrix.T).tocsr()


def main(folder: str, table: str, picture: str) -> None:
    lines = []
    with open(table, "w", newline="") as file:
        writer = None
        for name, matrix in problems(Path(folder)):
            for parts in PARTS:
                for order in ("given", "metis"):
                    line = {"graph": name, "vertices": matrix.shape[0], "entries": matrix.nnz}
                    line |= {"parts": parts, "order": order, **counted(matrix, parts, order)}
                    if writer is None:
                        writer = csv.DictWriter(file, line)
                        writer.writeheader()
                    writer.writerow(line)
                    file.flush()
                    lines.append(line)
    draw(lines, Path(picture))


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Rows sent over those of an all-gather, with METIS: a panel for each graph."""
    _, pyplot = plotting()
    names = list(dict.fromkeys(line["graph"] for line in lines))
    across, down = 5, -(-len(names) // 5)
    figure, axes = pyplot.subplots(down, across, figsize=(11, 2.3 * down), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    curves = {"ours_most": "sent by the busiest device", "cover": "bound of the cut (mean)"}
    curves |= {"cagnet": "CAGNET 1.5D"}
    for axis, name in zip(axes.flat, names, strict=False):
        for order, dash in (("metis", "-"), ("given", ":")):
            own = [line for line in lines if line["graph"] == name and line["order"] == order]
            x = [line["parts"] for line in own]
            for marker, (column, label) in zip("os^", curves.items(), strict=True):
                if order == "given" and column == "cagnet":
                    continue
                y = [line[column] / line["one_d"] for line in own]
                colour = f"C{'os^'.index(marker)}"
                label = f"{label}, {order}" if column != "cagnet" else label
                axis.plot(x, y, dash, marker=marker, ms=3, lw=1, color=colour, label=label)
        axis.axhline(1, color="black", lw=0.8)
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(PARTS, [str(x) for x in PARTS], fontsize=7)
        axis.minorticks_off()
        axis.grid(lw=0.3)
        axis.set_title(name, fontsize=9)
    axes[0][0].set_ylabel("rows / all-gather's")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="lower right")  # where panels are left over
    save(figure, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
