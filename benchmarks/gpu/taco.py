"""Figures 16, 18 and 20 of TACO's scheduling paper, and the study of its section 8.3:
python -m benchmarks.gpu.taco [--results DIR] [--dry-run]

Compiled loops with the paper's own schedules (appendix A.2, A.4, A.6): SpMV (16), SpMM with 128
columns (18) and MTTKRP of rank 32 (20), in float32, against our default kernel or schedule and the
peers. The paper's matrices and tensors are of SuiteSparse and FROSTT; here those of the data set.
Its peers for MTTKRP have no Python interface: plain JAX stands there.

The study compares four schedules of SpMV on a matrix with four million entries at random places: a
thread for each row (A.7), a warp for each row (A.8), and equal shares of the entries for each
thread, as they are (A.9) or with loads in an unrolled loop of their own (A.2).

SGAP_GPU_SECONDS: no case starts after that many seconds; cases that did not start are listed.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

from benchmarks import bench_compiler_studies, harness, problems, tensors
from benchmarks.gpu import bench, ours, peers
from benchmarks.gpu.bench import Row
from benchmarks.gpu.session import Session, about_case, heading, said
from benchmarks.problems import ROOT, BenchmarkProblem
from benchmarks.summary import table
from sgap_jax import COO, CSF, Reference, SparseArray, einsum
from sgap_jax.compiler import Schedule

SUBSCRIPTS = {"spmv": "ij,j->i", "spmm": "ij,jk->ik", "mttkrp": "ikl,lj,kj->ij"}
# Figure, operation, dense columns. By the names of the tests' list of the papers' schedules.
FIGURES = {"figure16": ("spmv", 1), "figure18": ("spmm", 128), "figure20": ("mttkrp", 32)}
OF_PAPER = {"spmv": "11 workspace", "spmm": "12", "mttkrp": "15 MTTKRP"}
STUDY = {"thread": "9", "warp": "10", "entries": "11", "unrolled": "11 workspace"}
# What the paper measured on a V100: (slower, faster, their times' ratio).
PUBLISHED = (("thread", "warp", 6.9), ("entries", "unrolled", 1.36))
COMPILED, DEFAULT, PLAIN = "compiled", "ours", "jax"
FAMILY = "random"


def schedule_of(name: str) -> Schedule:
    """A schedule of the papers, as the tests have it."""
    if (folder := str(ROOT / "tests/helpers")) not in sys.path:
        sys.path.append(folder)
    from compiler_chains import rows

    return rows()[name]


class Case(bench.Case):
    """Einsum with schedules. A subclass sets what `bench.Case` has, and `sparse`, `dense` and
    `places`: the operands and the shape of the result."""

    sparse: SparseArray
    dense: list
    places: tuple[int, ...]

    def compiled(self, name: str, contender: str) -> Row:
        """A row for the paper's schedule of this name."""
        return self._row(contender, lambda: self._of(schedule_of(name)), name)

    def _of(self, schedule: Schedule | None) -> peers.Plan:
        def function(recorder):
            asked = dataclasses.replace(recorder, schedule=schedule)
            return einsum(SUBSCRIPTS[self.op], self.sparse, *self.dense, schedule=asked)

        recorded = ours.launch_of(function)
        rotating = ours.Rotating(self.device, recorded, self.sets.count)
        call = rotating.run(recorded.call, ours.compiled(recorded.call, self.arch))
        return call, lambda: rotating.whole().reshape(self.places)


class Product(Case):
    """SpMV or SpMM: the default kernel, cuSPARSE's algorithms, and the paper's schedule."""

    def __init__(self, op: str, A: sp.csr_matrix, n: int, *where) -> None:
        super().__init__("spmm", A, n, *where)
        (B,) = self.sets.dense
        self.op, self.sparse = op, SparseArray.from_scipy(A)
        self.dense, self.places = [jnp.asarray(B[:, 0] if op == "spmv" else B)], (A.shape[0], n)

    def rows(self) -> Iterator[Row]:
        op, self.op = self.op, "spmm"  # whose kernels have one column too
        yield self._row(DEFAULT, self._ours)
        for name in peers.CUSPARSE:
            plan = peers.KERNELS["spmm"][name]
            yield self._row(name, lambda plan=plan: plan(self.device, self.sets))
        self.op = op
        yield self.compiled(OF_PAPER[op], COMPILED)


class Mttkrp(Case):
    """A(i, j) += B(i, k, l) C(l, j) D(k, j): the default schedule, the paper's, and plain JAX."""

    def __init__(self, T: SparseArray, n: int, device, bandwidth: float, arch: str) -> None:
        self.op, self.n, self.device, self.arch = "mttkrp", n, device, arch
        self.sparse, self.places = T.asformat(CSF(3)), (T.shape[0], n)
        of_k, of_l = (harness.dense(size, n, seed=i) for i, size in enumerate(T.shape[1:]))
        self.dense = [jnp.asarray(of_l), jnp.asarray(of_k)]
        self.moved = 16 * T.nnz + 4 * n * sum(T.shape)
        self.bound, self.flops = self.moved / bandwidth, 4 * T.nnz * n
        self.sets = peers.Sets(None, (of_l, of_k), device.sets(self.moved))
        coordinates = np.stack([np.asarray(x) for x in T.coordinates()])
        rows = tensors.rows_of(coordinates, self.places)
        values = np.asarray(T.values)
        self.wrong = tensors.checker(coordinates, values, [of_k, of_l], rows, self.places)

    def rows(self) -> Iterator[Row]:
        yield self._row(DEFAULT, lambda: self._of(None))
        yield self._row(PLAIN, self._plain, program=True)
        yield self.compiled(OF_PAPER["mttkrp"], COMPILED)

    def _plain(self) -> peers.Plan:
        function = lambda *x: einsum(SUBSCRIPTS["mttkrp"], *x, schedule=Reference())  # noqa: E731
        return peers._program(function, (self.sparse, *self.dense), self.sets)


def study_rows(A: sp.csr_matrix, *where) -> Iterator[Row]:
    case = Product("spmv", A, 1, *where)
    for contender, name in STUDY.items():
        yield case.compiled(name, contender)


def ratios(rows: list[Row], slow: Callable[[Row], bool], fast: Callable[[Row], bool]) -> list:
    """Of each problem the least time of the rows of `slow` over the least of `fast`."""
    found: dict[object, tuple[list[float], list[float]]] = {}
    for row in rows:
        if "us" in row:
            of = found.setdefault(row["problem"], ([], []))
            for times, wanted in zip(of, (slow, fast), strict=True):
                times += [float(str(row["us"]))] if wanted(row) else []
    return [min(a) / min(b) for a, b in found.values() if a and b]


def is_a(*contenders: str) -> Callable[[Row], bool]:
    return lambda row: row["contender"] in contenders


def summary(rows: dict[str, list[Row]], about: dict) -> str:
    lines = heading(about, "geometric means of speedups (problems), float32.")

    def mean(found: list[float]) -> str:
        return f"{statistics.geometric_mean(found):.2f} ({len(found)})" if found else "not measured"

    body = []
    for name, (op, n) in FIGURES.items():
        others = (PLAIN,) if op == "mttkrp" else peers.CUSPARSE
        cells = [
            mean(ratios(rows[name], is_a(*others), is_a(contender)))
            for contender in (COMPILED, DEFAULT)
        ]
        body.append([name[-2:], f"{op}, n = {n}", *cells])
    what = "over the best of cuSPARSE, or over plain JAX"
    lines += [f"### Figures 16, 18 and 20: {what}", ""]
    lines += table(["figure", "operation", "the paper's schedule", "our default"], body)
    lines += ["### Section 8.3: schedules of SpMV, four million entries at random places", ""]
    body = [
        [f"{fast} over {slow}", mean(ratios(rows["study83"], is_a(slow), is_a(fast))), str(paper)]
        for slow, fast, paper in PUBLISHED
    ]
    return "\n".join([*lines, *table(["", "speedup", "published, V100"], body)])


def small_tensor() -> SparseArray:
    """For the emulator."""
    places = np.unique(np.random.default_rng(0).integers(0, 12, (60, 3)), axis=0)
    values = harness.dense(len(places))
    return SparseArray.from_coordinates(places, values, (12, 12, 12), format=COO)


def of_random(dry: bool) -> tuple[BenchmarkProblem, Callable[[], sp.csr_matrix]]:
    """The study's matrix; the paper gives its entries alone, not its shape."""
    scale = 1 << 12 if dry else 1
    rows = max(bench_compiler_studies.ROWS // scale, 8)

    def make() -> sp.csr_matrix:
        A = bench_compiler_studies.skewed(1.0, rows, bench_compiler_studies.ENTRIES // scale)
        arrays = (np.asarray(x) for x in (A.values, A.column_indices, A.row_offsets))
        return sp.csr_matrix(tuple(arrays), A.shape)

    name = "random_4m" if scale == 1 else "random_small"
    return BenchmarkProblem(name, FAMILY, "generated", make, frozenset()), make


def main(argv: list[str] | None = None) -> None:
    session = Session(__doc__, "default, and the tensors", argv)
    rows: dict[str, list[Row]] = {name: [] for name in (*FIGURES, "study83")}

    def add(name: str, problem, A, found: Iterator[Row]) -> None:
        for row in found:
            rows[name].append(said(about_case(problem, A) | row, name))
        session.write(rows)

    study, make = of_random(session.dry)
    every = {tensor.name: tensor for tensor in tensors.select("", None)}
    names = [name for name in session.names or () if name not in {study.name, *every}]
    chosen = problems.select("ci" if session.dry else "default", names)
    if (not session.names or study.name in session.names) and session.starts(study.name):
        A = make()
        add("study83", study, A, study_rows(A, *session.where))
    for problem, A in session.matrices(chosen if names or not session.names else []):
        for name, (op, n) in list(FIGURES.items())[:2]:
            if session.starts(f"{op} {problem.name}"):
                add(name, problem, A, Product(op, A, n, *session.where).rows())
    _, rank = FIGURES["figure20"]
    named = [tensor for name, tensor in every.items() if name in (session.names or every)]
    found = session.matrices(named)
    if session.dry:
        small = BenchmarkProblem("small_tensor", "tensors", "generated", small_tensor, frozenset())
        found = [(small, small_tensor())]
    for problem, T in found:
        if session.starts(f"mttkrp {problem.name}"):
            add("figure20", problem, T, Mttkrp(T, rank, *session.where).rows())
    (session.folder / "taco.md").write_text(summary(rows, session.record("taco")))
    own = (COMPILED, DEFAULT, *STUDY)
    session.end([row for found in rows.values() for row in found if row["contender"] in own])


if __name__ == "__main__":
    main()
