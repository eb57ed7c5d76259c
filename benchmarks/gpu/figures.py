"""Figures 17 and 19 of vectorSparse: python -m benchmarks.gpu.figures [--results DIR] [--dry-run]

Speedup over cuBLAS in half precision of SpMM (17) and SDDMM (19) with column vectors, for each
schedule, on the pruned layers whose patterns the data set has (section 7.1: each entry of a pattern
is a vector of V rows): float16, sums in float32, widths 64, 128 and 256. "blocked-ELL" of Figure 17
is cuSPARSE's product with square blocks of V rows at random places, as many values as the vectors
have (Figure 19 has none: the paper's tensor-core baseline of SDDMM is "wmma"). "mma (arch)" of
Figure 19 needs a tensor core that was never built.

SGAP_GPU_SECONDS: no case starts after that many seconds; cases that did not start are listed.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from benchmarks import harness, problems
from benchmarks.bench_dlmc import vector_length
from benchmarks.gpu import bench, ours, peers
from benchmarks.gpu.bench import Row
from benchmarks.gpu.octets import allowed, half, of_blocks
from benchmarks.gpu.session import Session, about_case, heading, said, tiny_vectors
from benchmarks.summary import table
from sgap_jax import CVS, Schedule, SparseArray, sddmm, spmm
from sgap_jax.schedules.emulated import Emulated

FIGURES = {"figure17": "spmm", "figure19": "sddmm"}
WIDTHS = (256, 64, 128)  # the paper's profiled width first: a run may end early
MOST_DENSE = 4 << 30  # bytes of the dense matrices of all operand sets
# By the names in the paper's legends, and schedules that the paper lacks by their own.
SCHEDULES = {
    "spmm": {
        "fpu": "SubwarpTile(vector_length={V})",
        "wmma": "WarpTile(vector_length={V})",
        "mma": "PaperOctetTile(vector_length={V})",
        "octet": "OctetTile(vector_length={V})",
    },
    "sddmm": {
        "fpu": "SubwarpTile(vector_length={V})",
        "wmma": "WarpTile(vector_length={V})",
        "mma (reg)": "PaperOctetTile(vector_length={V}, partials='registers')",
        "mma (shfl)": "PaperOctetTile(vector_length={V}, partials='shuffle')",
        "octet": "OctetTile(vector_length={V})",
    },
}
DENSE, BLOCKS = "cublas", "blocked-ELL"
PEERS = {"spmm": (BLOCKS,), "sddmm": ()}


def checker(expected: np.ndarray, magnitude: np.ndarray, terms: np.ndarray | int):
    """A function from a result to its error over octets.allowed."""
    most = allowed(expected, magnitude, terms)

    def wrong(result) -> float:
        error = np.abs(np.asarray(result, np.float64).reshape(expected.shape) - expected)
        return float(np.max(error / most, initial=0.0))

    return wrong


class Case(bench.Case):
    """An operation on column vectors in float16; A repeats each row of a pattern V times."""

    def __init__(self, op: str, A, n: int, hardware, bandwidth: float, arch: str) -> None:
        self.op, self.n, self.device, self.arch = op, n, hardware, arch
        self.length, (m, k) = vector_length(A), A.shape
        if self.length == 1:
            raise ValueError("figures: the matrix has no column vectors")
        A = A.copy()
        A.data = A.data.astype(np.float16).astype(np.float32)
        self.vectors = SparseArray.from_scipy(A, format=CVS(self.length)).astype(jnp.float16)
        sizes = (k,) if op == "spmm" else (m, k)
        dense = tuple(half(harness.dense(size, n, seed=2 + i)) for i, size in enumerate(sizes))
        # Values, indices and offsets; dense operands and the result.
        self.moved = 2 * A.nnz + 4 * A.nnz // self.length + 4 * (m // self.length + 1)
        self.moved += 2 * n * (m + k)
        self.bound, self.flops = self.moved / bandwidth, 2 * A.nnz * n
        self.A, self.sets = A, peers.Sets(A, dense, hardware.sets(self.moved))
        self.wrong, self._where = self._checker(), (hardware, bandwidth, arch)

    def rows(self) -> Iterator[Row]:
        yield self._row(DENSE, self._dense)
        for name, text in SCHEDULES[self.op].items():
            text = text.format(V=self.length)
            yield self._row(name, lambda text=text: self._of_schedule(text), text)
        if BLOCKS in PEERS[self.op]:
            row = of_blocks(self.A, self.length, self.n, *self._where)
            yield row | {"contender": BLOCKS}

    def _of_schedule(self, text: str) -> peers.Plan:
        schedule = Schedule.parse(text)
        dense = [jnp.asarray(x) for x in self.sets.dense]

        def function(recorder: Emulated):
            asked = dataclasses.replace(recorder, schedule=schedule)
            if self.op == "spmm":
                return spmm(self.vectors, *dense, schedule=asked)
            return sddmm(self.vectors, *dense, schedule=asked).values

        recorded = ours.launch_of(function)
        rotating = ours.Rotating(self.device, recorded, self.sets.count)
        return rotating.run(recorded.call, ours.compiled(recorded.call, self.arch)), rotating.result

    def _dense(self) -> peers.Plan:
        """The dense product: A with its zeros times B, or all of X Y^T."""
        torch = self.device.torch
        left = half(self.A.toarray()) if self.op == "spmm" else self.sets.dense[0]
        right = self.sets.dense[-1]
        data = self.sets.put(self.device, left, right, most=max(2, MOST_DENSE // left.nbytes))
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

        def product(i: int):
            return data[i][0] @ (data[i][1] if self.op == "spmm" else data[i][1].T)

        call, result = peers.kept(self.device, len(data), product)
        if self.op == "spmm":
            return call, result
        rows, columns = self._places()
        return call, lambda: result()[rows, columns]

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, columns) of the elements of the vectors, [vectors, V] each."""
        offsets = np.asarray(self.vectors.row_offsets)
        first = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) * self.length
        rows = first[:, None] + np.arange(self.length)
        columns = np.asarray(self.vectors.column_indices)[:, None]
        return rows, np.broadcast_to(columns, rows.shape)

    def _checker(self):
        dense = [x.astype(np.float64) for x in self.sets.dense]
        if self.op == "spmm":
            A, (B,) = self.A.astype(np.float64), dense
            return checker(A @ B, abs(A) @ np.abs(B), np.diff(A.indptr)[:, None])
        rows, columns = self._places()
        expected, magnitude = (
            (f(dense[0]) @ f(dense[1]).T)[rows, columns] for f in (np.array, np.abs)
        )
        return checker(expected, magnitude, self.n)


def speedups(rows: list[Row]) -> dict[tuple[str, str], list[float]]:
    """(family of the problem, contender) -> time of the dense product over the contender's, by
    case."""
    dense = {(r["problem"], r["n"]): r["us"] for r in rows if r["contender"] == DENSE and "us" in r}
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        case = row["problem"], row["n"]
        if row["contender"] != DENSE and "us" in row and case in dense:
            key = str(row["family"]), str(row["contender"])
            found.setdefault(key, []).append(float(dense[case]) / float(row["us"]))
    return found


def summary(rows: dict[str, list[Row]], about: dict) -> str:
    lines = heading(
        about,
        "speedup over cuBLAS in half precision, geometric mean (cases). On sm_80 and later the "
        "instruction of the rows mma compiles to shuffles and multiply-adds, on no tensor core.",
    )
    for name, op in FIGURES.items():
        found, contenders = speedups(rows[name]), [*SCHEDULES[op], *PEERS[op]]
        body = []
        for family in dict.fromkeys(str(row["family"]) for row in rows[name]):
            cells = [found.get((family, contender), []) for contender in contenders]
            means = [
                f"{statistics.geometric_mean(x):.2f} ({len(x)})" if x else "not measured"
                for x in cells
            ]
            body.append([family, *means])
        lines += [f"### Figure {name[-2:]}, {op}", "", *table(["pattern", *contenders], body)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    session = Session(__doc__, "all with vectors", argv)
    chosen = [tiny_vectors()] if session.dry else problems.select("vectors", session.names)
    matrices = session.matrices(chosen)
    rows: dict[str, list[Row]] = {name: [] for name in FIGURES}
    for n in (8,) if session.dry else WIDTHS:
        for (problem, A), (name, op) in itertools.product(matrices, FIGURES.items()):
            if not session.starts(f"{op} {problem.name} n={n}"):
                continue
            for row in Case(op, A, n, *session.where).rows():
                rows[name].append(said(about_case(problem, A) | row, name))
            session.write(rows)
    (session.folder / "figures.md").write_text(summary(rows, session.record("figures")))
    of_others = (DENSE, BLOCKS)
    session.end([r for found in rows.values() for r in found if r["contender"] not in of_others])


if __name__ == "__main__":
    main()
