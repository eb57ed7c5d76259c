"""A case of column vectors: our kernels for vectors, our kernels for their entries, and the
peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.bench_dlmc import vector_length
from benchmarks.gpu import ours, peers
from benchmarks.gpu.bench import OPERATIONS, Case, Row, problem_of
from sgap_jax import CSR, CVS, SparseArray, choose_schedule


class VectorCase(Case):
    """A matrix made of vectors, for "spmm" or "sddmm"; `ours` are the kernels on its entries.

    bound: as for `Case`, with one column index for each vector.
    """

    def __init__(self, op: str, A, n: int, device, bandwidth: float, arch: str) -> None:
        super().__init__(op, A, n, device, bandwidth, arch)
        (m, k), length = A.shape, vector_length(A)
        self.format = CVS(length)
        self.moved = 4 * A.nnz + 4 * (A.nnz // length + m // length + 1) + 4 * n * (m + k)
        self.bound = self.moved / bandwidth

    def rows(self) -> Iterator[Row]:
        """The default schedule for vectors, then the rows of `Case`."""
        problem = problem_of(self.op, self.A, self.n)
        schedule = choose_schedule(dataclasses.replace(problem, format=self.format))
        yield self._row("vectors", self._vectors, f"{schedule}, {self.format}")
        yield from super().rows()

    def _vectors(self) -> peers.Plan:
        A, dense = SparseArray.from_scipy(self.A, format=self.format), self.sets.dense

        def function(schedule):
            return OPERATIONS[self.op](A, *map(jnp.asarray, dense), schedule)

        recorded = ours.launch_of(function)
        rotating = ours.Rotating(self.device, recorded, self.sets.count)
        call = rotating.run(recorded.call, ours.compiled(recorded.call, self.arch))

        def entries():
            return A.with_values(jnp.asarray(rotating.result())).asformat(CSR).values

        return call, rotating.result if self.op == "spmm" else entries
