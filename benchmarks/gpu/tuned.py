"""Sgap's Tables 4 and 5 and Figure 11: python -m benchmarks.gpu.tuned [--results DIR] [--dry-run]

SpMM in float32 with N = 4, 16, 64 and 128 dense columns (section 7.2, and Figure 11 of 7.1). Table
4 compares dgSPARSE's parameters <groupSz, blockSz, tileSz, workerDimR> = <32, 256, 32, 1> of the
parallel reduction with the best ones of each matrix; Table 5 the best of each matrix with the best
single ones of all. They are those of our own kernel, {<1/r row, c col>, r}, and not of dgSPARSE's;
tiles begin at c columns where the paper's begin at r. Figure 11 is the speedup of the points with a
group over those without, by density.

SGAP_GPU_SECONDS: no case starts after that many seconds; cases that did not start are listed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from fractions import Fraction

from benchmarks import problems
from benchmarks.gpu import bench, tables
from benchmarks.gpu.bench import Row
from benchmarks.gpu.session import Session, about_case, heading, said
from benchmarks.summary import table
from sgap_jax import AtomicParallelism

COLUMNS = (4, 16, 64, 128)
COARSENING = 4  # dgSPARSE's for these N
GROUPS, BLOCKS, TILES = (2, 4, 8, 16, 32), (128, 256, 512), (4, 8, 16, 32)
WORKERS = (Fraction(1), Fraction(1, 2))


def reduction(group: int, block: int, tile: int, workers: Fraction) -> AtomicParallelism:
    """<groupSz, blockSz, tileSz, workerDimR> of the parallel reduction by rows."""
    return AtomicParallelism(
        row=Fraction(1, group),
        col=COARSENING,
        group=group,
        block_size=block,
        tile_size=tile,
        worker_dim_r=workers,
    )


def tunables(n: int) -> list[AtomicParallelism]:
    """The points that Table 4 takes the best of, dgSPARSE's first."""
    every = itertools.product(GROUPS, BLOCKS, TILES, WORKERS)
    fit = [
        reduction(*each)
        for each in every
        if each[2] <= n and each[2] // COARSENING * each[0] <= each[1]
    ]
    return list(dict.fromkeys([original(n), *fit]))


def original(n: int) -> AtomicParallelism:
    """dgSPARSE's parameters; a tile has no more columns than there are."""
    return reduction(32, 256, min(32, n), Fraction(1))


def parameters(point: AtomicParallelism) -> str:
    """As the paper's Table 5 writes them."""
    return f"<{point.group}, {point.block_size}, {point.tile_size}, {point.worker_dim_r}>"


class Case(bench.Case):
    """A product by all points of the tables and of the figure."""

    def rows(self) -> Iterator[Row]:
        figure = [*tables.BEFORE, *tables.NEW]
        yield from self.of_points(dict.fromkeys([*tunables(self.n), *figure]))


def gains(found: dict[str, tables.Times], n: int) -> list[float]:
    """Table 4: of each matrix the original's time over the best."""
    return tables.ratio(found, [original(n)], tunables(n))


def static(found: dict[str, tables.Times], n: int) -> tuple[AtomicParallelism | None, list[float]]:
    """Table 5: the single point with the least geometric mean of times over the matrices that have
    all points, and of each of these its time over the best."""
    points = tunables(n)
    whole = {name: of for name, of in found.items() if tables.best(of, points) is not None}
    if not whole:
        return None, []

    def mean(point: AtomicParallelism) -> float:
        return statistics.geometric_mean(of[str(point)] for of in whole.values())

    single = min(points, key=mean)
    return single, tables.ratio(whole, [single], points)


def figure_11(rows: list[Row]) -> list[Row]:
    """A row for each matrix and width: its density, and the speedup of the best point with a group
    over the best without."""
    found: list[Row] = []
    about = {str(row["problem"]): row for row in rows}
    for n in COLUMNS:
        for name, of in _times(rows, n).items():
            (speedup,) = tables.ratio({name: of}, tables.BEFORE, tables.NEW) or (None,)
            if speedup is None:
                continue
            nnz, m, k = (float(str(about[name][key])) for key in ("nnz", "m", "k"))
            density = nnz / (m * k) if m * k else 0.0
            found.append({"problem": name, "n": n, "density": density, "speedup": speedup})
    return found


def _times(rows: list[Row], n: int) -> dict[str, tables.Times]:
    return tables.times([row for row in rows if int(str(row["n"])) == n], tables.HAND)


def summary(rows: list[Row], about: dict) -> str:
    lines = heading(about, "geometric means of speedups (matrices); SpMM in float32.")
    fourth, fifth, eleventh = [], [], []
    for n in COLUMNS:
        found = _times(rows, n)
        gained = gains(found, n)
        most = f"{max(gained):.3f}" if gained else "not measured"
        fourth.append([str(n), tables.mean(gained), most])
        single, over = static(found, n)
        chosen = "not measured" if single is None else parameters(single)
        fifth.append([str(n), tables.mean(over), chosen])
        points = [float(str(row["speedup"])) for row in figure_11(rows) if row["n"] == n]
        eleventh.append([str(n), tables.mean(points), tables.mean(tables.normalized(points))])
    lines += ["### Table 4: the best parameters of each matrix over <32, 256, 32, 1>", ""]
    lines += table(["N", "geometric mean", "most"], fourth)
    lines += ["### Table 5: the best of each matrix over the best single ones", ""]
    lines += table(["N", "geometric mean", "best single"], fifth)
    lines += ["### Figure 11: points with a group over those without (figure11.csv)", ""]
    return "\n".join([*lines, *table(["N", "as it is", "normalized"], eleventh)])


def main(argv: list[str] | None = None) -> None:
    session = Session(__doc__, "default", argv)
    matrices = session.matrices(problems.select("ci" if session.dry else "default", session.names))
    rows: list[Row] = []
    for (problem, A), n in itertools.product(matrices, COLUMNS):
        if session.starts(f"{problem.name} n={n}"):
            case = Case("spmm", A, n, *session.where)
            rows += [said(about_case(problem, A) | row, "tuned") for row in case.rows()]
            session.write({"tuned": rows, "figure11": figure_11(rows)})
    (session.folder / "tuned.md").write_text(summary(rows, session.record("tuned")))
    session.end(rows)


if __name__ == "__main__":
    main()
