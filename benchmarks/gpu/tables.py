"""Sgap's Tables 1 to 3: python -m benchmarks.gpu.tables [--results DIR] [--dry-run]

SpMM with 4 dense columns, as in Sgap, section 7.1, in float32, with the points that the tables
name, each by our hand-written kernel (block_size 256). Also four points by compiled loops with the
schedules of its section 6 (S1 to S4), compared with the hand-written kernels of the same points.

SGAP_GPU_SECONDS: no case starts after that many seconds; cases that did not start are listed.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator
from fractions import Fraction

import jax.numpy as jnp

from benchmarks import problems
from benchmarks.gpu import bench, ours, peers
from benchmarks.gpu.bench import Row
from benchmarks.gpu.session import Session, about_case, heading, said
from benchmarks.summary import table
from sgap_jax import CSR, AtomicParallelism, SparseArray, einsum
from sgap_jax.compiler import assign
from sgap_jax.compiler.presets import spmm_point
from sgap_jax.schedules.emulated import Emulated

COLUMNS = 4
EACH = (1, 2, 4)  # c, columns of a thread
GROUPS = (4, 8, 16, 32)  # r
HAND, COMPILED = "point", "compiled"


def shared(g: int, c: int, r: int) -> AtomicParallelism:
    """{<1/g row, c col>, r}"""
    return AtomicParallelism(row=Fraction(1, g), col=c, group=r)


def segments(c: int, r: int) -> AtomicParallelism:
    """{<1 nnz, c col>, r}"""
    return AtomicParallelism(nnz=1, col=c, group=r)


SHARED = {(c, r): [shared(g, c, r) for g in GROUPS if g % r == 0] for c in EACH for r in GROUPS}
SEGMENTS = {(c, r): segments(c, r) for c in EACH for r in GROUPS}
BEFORE = [AtomicParallelism(nnz=g, col=c) for g in (8, 16, 32) for c in EACH]  # TACO's own
BEFORE += [AtomicParallelism(row=x, col=c) for x in (1, 2, 4) for c in EACH]
NEW = [*itertools.chain(*SHARED.values()), *SEGMENTS.values()]
CHAINS = {
    "S1": AtomicParallelism(nnz=16, col=4),
    "S2": AtomicParallelism(row=4, col=2),
    "S3": shared(32, 2, 4),
    "S4": segments(2, 32),
}
POINTS = tuple(dict.fromkeys([*CHAINS.values(), *BEFORE, *NEW]))


class Case(bench.Case):
    """A product by its points, and by the compiled schedules of four of them."""

    def rows(self) -> Iterator[Row]:
        yield from self.of_points(POINTS)
        for point in CHAINS.values():
            yield self._row(COMPILED, lambda point=point: self._chain(point), str(point))

    def _chain(self, point: AtomicParallelism) -> peers.Plan:
        schedule = spmm_point(assign("ij,jk->ik", {"A": CSR}), point, self.n)
        A, (B,) = SparseArray.from_scipy(self.A), self.sets.dense

        def function(recorder: Emulated):
            asked = dataclasses.replace(recorder, schedule=schedule)
            return einsum("ij,jk->ik", A, jnp.asarray(B), schedule=asked)

        recorded = ours.launch_of(function)
        rotating = ours.Rotating(self.device, recorded, self.sets.count)
        compiled = ours.compiled(recorded.call, self.arch)
        return rotating.run(recorded.call, compiled), rotating.whole


Times = dict[str, float]  # schedule -> us, for one matrix


def times(rows: list[Row], contender: str) -> dict[str, Times]:
    """Problem -> times by schedule."""
    found: dict[str, Times] = {}
    for row in rows:
        if row["contender"] == contender and "us" in row:
            of = found.setdefault(str(row["problem"]), {})
            of[str(row["schedule"])] = float(str(row["us"]))
    return found


def best(of: Times, points: Iterable[AtomicParallelism]) -> float | None:
    """The least time of the points; None if one is missing."""
    found = [of.get(str(point)) for point in points]
    return None if None in found or not found else min(x for x in found if x is not None)


def ratio(found: dict[str, Times], slow, fast) -> list[float]:
    """Speedup of the best of `fast` over the best of `slow`, by matrix."""
    pairs = [(best(of, slow), best(of, fast)) for of in found.values()]
    return [a / b for a, b in pairs if a is not None and b is not None]


def normalized(speedups: list[float]) -> list[float]:
    """A user takes the better of the two schedules (section 7.1), so ratios below 1 become 1."""
    return [max(x, 1.0) for x in speedups]


def mean(speedups: list[float]) -> str:
    if not speedups:
        return "not measured"
    return f"{statistics.geometric_mean(speedups):.3f} ({len(speedups)})"


def summary(rows: list[Row], about: dict) -> str:
    found = times(rows, HAND)
    lines = heading(about, "geometric means of speedups (matrices); SpMM, 4 columns, float32.")
    lines += ["### Table 1: {<1/32 row, c col>, r} over r = 32", ""]
    body = []
    for c in EACH:
        by_group = {r: ratio(found, [shared(32, c, 32)], [shared(32, c, r)]) for r in (8, 4)}
        cells = [f(x) for x in by_group.values() for f in (mean, lambda x: mean(normalized(x)))]
        body.append([str(c), *cells])
    lines += table(["c", "r = 8", "r = 8 normalized", "r = 4", "r = 4 normalized"], body)
    lines += [
        "### Table 2: {<1 nnz, c col>, r} over the best {<1/g row, c col>, r}, normalized",
        "",
    ]
    body = [
        [str(c)] + [mean(normalized(ratio(found, SHARED[c, r], [SEGMENTS[c, r]]))) for r in GROUPS]
        for c in EACH
    ]
    lines += table(["c", *(f"r = {r}" for r in GROUPS)], body)
    lines += ["### Table 3: the best point of both over the best with one thread a reduction", ""]
    gain = ratio(found, BEFORE, NEW)
    lines += table(["normalized", "as it is"], [[mean(normalized(gain)), mean(gain)]])
    lines += ["### S1 to S4: compiled loops over the hand-written kernel of the point", ""]
    compiled = times(rows, COMPILED)
    body = []
    for name, point in CHAINS.items():
        pairs = [
            (found.get(p, {}).get(str(point)), of.get(str(point))) for p, of in compiled.items()
        ]
        body.append([name, str(point), mean([a / b for a, b in pairs if a and b])])
    return "\n".join([*lines, *table(["", "point", "speedup"], body)])


def main(argv: list[str] | None = None) -> None:
    session = Session(__doc__, "default", argv)
    matrices = session.matrices(problems.select("ci" if session.dry else "default", session.names))
    rows: list[Row] = []
    for problem, A in matrices:
        if session.starts(problem.name):
            case = Case("spmm", A, COLUMNS, *session.where)
            rows += [said(about_case(problem, A) | row, "tables") for row in case.rows()]
            session.write({"tables": rows})
    (session.folder / "tables.md").write_text(summary(rows, session.record("tables")))
    session.end(rows)


if __name__ == "__main__":
    main()
