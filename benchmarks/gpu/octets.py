"""SpMM by octet tiles: python -m benchmarks.gpu.octets [--results DIR] [--dry-run]

Column vectors in float16, sums in float32: our default tile and variants of its fields, dense
products, and cuSPARSE. Blocked-ELL gets a matrix of its own, with as many values in square blocks
at random places, as in section 7.1 of vectorSparse.

SGAP_GPU_SECONDS: no case starts after that many seconds; cases that did not start are listed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

from benchmarks import harness, problems
from benchmarks.bench_dlmc import vector_length
from benchmarks.gpu import bench, cusparse, ours, peers
from benchmarks.gpu.session import Session, about_case, heading, said, tiny_vectors
from benchmarks.problems import Unavailable
from benchmarks.summary import table
from sgap_jax import CVS, Format, OctetTile, Problem, SparseArray, choose_schedule

# Variants of the default tile's fields; the time of a swizzle's sort is not included.
FIELDS = (
    {"stages": 1},
    {"stages": 2},
    {"stages": 4},
    {"stages": 2, "tile_n": 128},
    {"tile_k": 32},
    {"stages": 2, "row_warps": 4},
    {"stages": 2, "swizzle": True},
)
_ROUNDINGS = 4  # a tensor core sums several products at once and rounds toward zero


@jax.jit
def _dense(A, B):
    return jnp.matmul(A, B, preferred_element_type=jnp.float32).astype(A.dtype)


def half(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float16)


class Case(bench.Case):
    """A product in float16; A repeats each row of a pattern V times."""

    def __init__(self, A, n: int, hardware, bandwidth: float, arch: str) -> None:
        A = A.copy()
        A.data = half(A.data).astype(np.float32)
        dense = (half(harness.dense(A.shape[1], n)),)
        self._begin("spmm", A, n, dense, hardware, bandwidth, arch)
        self.wrong = checker(A, *dense)

    def _begin(self, op, A, n: int, dense: tuple, hardware, bandwidth: float, arch: str) -> None:
        self.op, self.n, self.device, self.arch = op, n, hardware, arch
        self.length, (m, k) = vector_length(A), A.shape
        if self.length == 1:
            raise ValueError("octets: the matrix has no column vectors")
        self.moved = 2 * A.nnz + 4 * A.nnz // self.length + 4 * (m // self.length + 1)
        self.moved += 2 * n * (m + k)
        self.bound, self.flops = self.moved / bandwidth, 2 * A.nnz * n
        self.A, self.sets = A, peers.Sets(A, dense, hardware.sets(self.moved))
        self._recorded = None

    def rows(self) -> Iterator[bench.Row]:
        format = CVS(self.length)
        problem = Problem(
            "spmm", self.A.shape, self.A.nnz, self.n, 1, "float16", str(format), "cuda"
        )
        default = choose_schedule(problem)
        yield self._row("ours", lambda: self._of(default), str(default))
        for fields in FIELDS:
            tile = OctetTile(self.length, **fields)
            yield self._row("tile", lambda tile=tile: self._of(tile), str(tile))
        yield self._row("cublas", self._cublas)
        for name in cusparse.ALGORITHMS:
            plan = functools.partial(self._cusparse, name)
            yield self._row(f"cusparse_{name}", plan)
        yield self._row("jax_dense", self._jax_dense, program=True)

    def _of(self, schedule, format: Format | None = None) -> peers.Plan:
        format = CVS(self.length) if format is None else format
        A = SparseArray.from_scipy(self.A, format=format).astype(jnp.float16)
        dense = [jnp.asarray(x) for x in self.sets.dense]

        def function(recorder):
            chosen = dataclasses.replace(recorder, schedule=schedule)
            return bench.OPERATIONS[self.op](A, *dense, chosen)

        recorded = ours.launch_of(function)
        rotating = ours.Rotating(self.device, recorded, self.sets.count)
        return rotating.run(recorded.call, ours.compiled(recorded.call, self.arch)), rotating.result

    def _cublas(self) -> peers.Plan:
        data = self.sets.put(self.device, half(self.A.toarray()), *self.sets.dense)
        matmul = self.device.torch.backends.cuda.matmul
        matmul.allow_fp16_reduced_precision_reduction = False
        return peers.kept(self.device, len(data), lambda i: data[i][0] @ data[i][1])

    def _cusparse(self, algorithm: str) -> peers.Plan:
        values, offsets, indices = self.sets.csr()
        return self._library(algorithm, half(values), offsets, indices)

    def _library(self, algorithm: str, *arrays: np.ndarray) -> peers.Plan:
        return library(self.device, self.sets, algorithm, *arrays)

    def _jax_dense(self) -> peers.Plan:
        data = [
            tuple(jnp.array(x, copy=True) for x in (half(self.A.toarray()), *self.sets.dense))
            for _ in range(self.sets.count)
        ]
        return lambda i: _dense(*data[i % len(data)]), lambda: np.asarray(_dense(*data[0]))


def library(device, sets: peers.Sets, algorithm: str, *arrays: np.ndarray) -> peers.Plan:
    """A product of cuSPARSE; `arrays` are those of A in the form that the algorithm takes."""
    if device.dry:
        raise Unavailable("cuSPARSE needs a GPU; left out of a dry run")
    (B,), torch = sets.dense, device.torch
    data = sets.put(device, *arrays, B, np.empty((sets.A.shape[0], B.shape[1]), np.float16))
    products = [cusparse.Product(torch, algorithm, x[:-2], *x[-2:]) for x in data]
    return lambda i: products[i].enqueue(), lambda: device.get(data[0][-1])


def blocked_ell(A, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cuSPARSE's blocked-ELL of a matrix of `in_blocks`: values of the rows, and the columns of the
    blocks of each block row."""
    blocks = A.tobsr((length, length))
    each = blocks.nnz // length**2 // (A.shape[0] // length)
    indices = blocks.indices.reshape(-1, each).astype(np.int32)
    values = blocks.data.reshape(-1, each, length, length).transpose(0, 2, 1, 3)
    return half(values).reshape(A.shape[0], each * length), indices


def checker(A, B: np.ndarray):
    """Checks a sample of the rows: error over its bound."""
    A, B = A.astype(np.float64), B.astype(np.float64)
    rows = np.random.default_rng(0).permutation(A.shape[0])[
        : max(bench.MOST_CHECKED // B.shape[1], 1)
    ]
    A = A[rows]
    expected, magnitude = A @ B, abs(A) @ np.abs(B)
    most = allowed(expected, magnitude, np.diff(A.indptr)[:, None])

    def wrong(result: object) -> float:
        found = np.asarray(result, np.float64).reshape(-1, B.shape[1])[rows]
        return float(np.max(np.abs(found - expected) / most, initial=0.0))

    return wrong


def allowed(expected: np.ndarray, magnitude: np.ndarray, terms: np.ndarray | int) -> np.ndarray:
    """The bound: float32 sums of `terms` products in any order, rounded once to float16."""
    half_float, sums = np.finfo(np.float16), float(np.finfo(np.float32).eps)
    of_sums = _ROUNDINGS * (terms + 1) * sums * magnitude
    rounded = float(half_float.eps) * np.abs(expected)
    return of_sums + rounded + float(half_float.smallest_subnormal)


def in_blocks(A, length: int) -> sp.csr_matrix:
    """A matrix of square blocks with as many values as A, the same number in each block row."""
    (m, k), rng = A.shape, np.random.default_rng(4)
    rows, columns = m // length, k // length
    each = min(max(round(A.nnz / length**2 / rows), 1), columns)
    chosen = np.sort(np.argsort(rng.random((rows, columns)), axis=1)[:, :each])
    data = rng.standard_normal((rows * each, length, length)).astype(np.float32)
    offsets = np.arange(rows + 1) * each
    blocks = sp.bsr_matrix((data, chosen.reshape(-1), offsets), shape=(m, columns * length))
    return blocks.tocsr()


def summary(rows: list[bench.Row], about: dict) -> str:
    """Useful TFLOP/s by problem and contender; of the tile variants only the fastest, with its
    name."""
    lines = heading(about, "float16, useful TFLOP/s.")
    names = [
        name for name in dict.fromkeys(str(row["contender"]) for row in rows) if name != "tile"
    ]
    body = []
    for problem, n in dict.fromkeys((row["problem"], row["n"]) for row in rows):
        found = [row for row in rows if (row["problem"], row["n"]) == (problem, n) and "us" in row]
        speed = {
            name: f"{1e-3 * row['gflops']:.1f}" for row in found for name in [row["contender"]]
        }
        best = min((row for row in found if row["schedule"]), key=lambda row: row["us"], default={})
        cells = [speed.get(name, "not measured") for name in names]
        body.append([str(problem), str(n), *cells, f"`{best.get('schedule', 'not measured')}`"])
    return "\n".join([*lines, *table(["problem", "n", *names, "fastest tile"], body)])


def chosen(session: Session) -> list[problems.BenchmarkProblem]:
    if session.dry:
        return [tiny_vectors()]
    found = problems.select("octets", session.names)
    return found if session.names else found + problems.select("vectors")


def widths(problem: problems.BenchmarkProblem) -> tuple[int, ...]:
    return (4096,) if problem.name.startswith("weights_4096_") else (256,)


def rows_of(A, n: int, *where) -> Iterator[bench.Row]:
    """The rows of a matrix, and of the block matrix that blocked-ELL gets."""
    case = Case(A, n, *where)
    yield from case.rows()
    yield of_blocks(A, case.length, n, *where)


def of_blocks(A, length: int, n: int, *where) -> bench.Row:
    """The row of cuSPARSE's blocked-ELL, of a matrix of square blocks with as many values as A."""
    blocks = Case(in_blocks(A, length), n, *where)
    arrays = blocked_ell(blocks.A, blocks.length)
    row = blocks._row("cusparse_blocked_ell", lambda: blocks._library("blocked_ell", *arrays))
    return row | {"k": blocks.A.shape[1], "nnz": blocks.A.nnz}


def main(argv: list[str] | None = None) -> None:
    measure("octets", __doc__, widths, rows_of, argv)


def measure(
    name: str,
    about_it: str | None,
    widths: Callable[[problems.BenchmarkProblem], tuple[int, ...]],
    rows_of: Callable[..., Iterator[bench.Row]],
    argv: list[str] | None,
) -> None:
    """Runs the cases of all problems and writes `name`.csv, .json and .md.

    rows_of(A, n, hardware, bandwidth, arch) gives the rows of a case.
    """
    session = Session(about_it, "all with vectors", argv)
    rows: list[bench.Row] = []
    for problem, A in session.matrices(chosen(session)):
        for n in (8,) if session.dry else widths(problem):
            if not session.starts(f"{problem.name} n={n}"):
                continue
            for row in rows_of(A, n, *session.where):
                rows.append(said(about_case(problem, A) | row))
            session.write({name: rows})
    (session.folder / f"{name}.md").write_text(summary(rows, session.record(name)))
    session.end([row for row in rows if row["contender"] in ("ours", "tile")])


if __name__ == "__main__":
    main()
