"""SDDMM by octet tiles: python -m benchmarks.gpu.octets_sddmm [--results DIR] [--dry-run]

Column vectors in float16, sums in float32: our default tile and variants of its fields, our kernel
for CSR on the entries of the vectors, and dense products of which only the entries are needed.

SGAP_GPU_SECONDS: no case starts after that many seconds; cases that did not start are listed.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.bench_sddmm import dots_at
from benchmarks.gpu import bench, octets, peers
from sgap_jax import CSR, CVS, OctetTile, Problem, Schedule, choose_schedule

FIELDS = (
    {"tile_n": 16, "tile_k": 64},
    {"tile_n": 64, "tile_k": 32},
    {"tile_n": 32, "tile_k": 32},
    {"tile_n": 32, "tile_k": 32, "stages": 2},
    {"tile_n": 32, "tile_k": 16, "stages": 2},
)


@jax.jit
def _dense(X, Y):
    return jnp.matmul(X, Y.T, preferred_element_type=jnp.float32).astype(X.dtype)


class Case(octets.Case):
    """A sampled product in float16; A repeats each row of a pattern V times."""

    def __init__(self, A, n: int, hardware, bandwidth: float, arch: str) -> None:
        m, k = A.shape
        dense = octets.half(harness.dense(m, n)), octets.half(harness.dense(k, n, seed=3))
        self._begin("sddmm", A, n, dense, hardware, bandwidth, arch)
        self.wrong = checker(A, self.length, *dense)

    def rows(self) -> Iterator[bench.Row]:
        default, entries = self._default(CVS(self.length)), self._default(CSR)
        yield self._row("ours", lambda: self._of(default), str(default))
        for fields in FIELDS:
            tile = OctetTile(self.length, **fields)
            yield self._row("tile", lambda tile=tile: self._of(tile), str(tile))
        yield self._row("entries", lambda: self._of(entries, CSR))
        yield self._row("cublas", self._cublas)
        yield self._row("jax_dense", self._jax_dense, program=True)

    def _default(self, format) -> Schedule:
        shape, nnz = self.A.shape, self.A.nnz
        return choose_schedule(
            Problem("sddmm", shape, nnz, self.n, 1, "float16", str(format), "cuda")
        )

    def _cublas(self) -> peers.Plan:
        data = self.sets.put(self.device, *self.sets.dense)
        matmul = self.device.torch.backends.cuda.matmul
        matmul.allow_fp16_reduced_precision_reduction = False
        return peers.kept(self.device, len(data), lambda i: data[i][0] @ data[i][1].T)

    def _jax_dense(self) -> peers.Plan:
        data = [
            tuple(jnp.array(x, copy=True) for x in self.sets.dense) for _ in range(self.sets.count)
        ]
        return lambda i: _dense(*data[i % len(data)]), lambda: np.asarray(_dense(*data[0]))


def places(A, length: int) -> np.ndarray:
    """The place of each entry of A in the flat values of its vectors."""
    row = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    within = np.arange(A.nnz) - A.indptr[row]
    return (A.indptr[row // length * length] // length + within) * length + row % length


def checker(A, length: int, X: np.ndarray, Y: np.ndarray):
    """Checks a sample of the entries: error over its bound, as octets.checker does. The result may
    be dense, the values of vectors, or the values of entries."""
    chosen = np.random.default_rng(0).permutation(A.nnz)[: bench.MOST_CHECKED // X.shape[1]]
    row = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))[chosen]
    column, place = A.indices[chosen], places(A, length)[chosen]
    expected = dots_at(row, column, X, Y)
    magnitude = dots_at(row, column, np.abs(X), np.abs(Y))
    allowed = octets.allowed(expected, magnitude, X.shape[1])

    def wrong(result: object) -> float:
        found = np.asarray(result)
        if found.shape == A.shape:
            found = found[row, column]
        else:
            found = found.reshape(-1)[place if found.ndim == 2 else chosen]
        error = np.abs(found.astype(np.float64) - expected)
        return float(np.max(error / allowed, initial=0.0))

    return wrong


def widths(_) -> tuple[int, ...]:
    return 64, 128, 256


def rows_of(A, n: int, *where) -> Iterator[bench.Row]:
    return Case(A, n, *where).rows()


def main(argv: list[str] | None = None) -> None:
    octets.measure("octets_sddmm", __doc__, widths, rows_of, argv)


if __name__ == "__main__":
    main()
