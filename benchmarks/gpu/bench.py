"""One case, an operation on a matrix at a width: checks and times all contenders, and gives
rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import jax.numpy as jnp
import numpy as np

from benchmarks import bench_sddmm, bench_softmax, bench_spmm, harness
from benchmarks.gpu import ours, peers, timing
from benchmarks.problems import Unavailable
from sgap_jax import (
    AtomicParallelism,
    Problem,
    SparseArray,
    choose_schedule,
    legal_points,
    sddmm,
    sparse_softmax,
    spmm,
)
from sgap_jax.launch.defaults import LAUNCH_PLANS

Row = dict[str, object]
OURS = ("ours", "point", "vectors", "ours_jax")
MOST_POINTS = 32  # of a search over schedules
LOST = "the device is lost"  # the notes of rows after a lost device begin so
MOST_CHECKED = 1 << 22  # elements of a result that are checked
_FAILURES = (ImportError, Unavailable, RuntimeError, MemoryError, ValueError, NotImplementedError)


def operands(op: str, A, n: int) -> tuple[np.ndarray, ...]:
    if op == "softmax":
        return ()
    if op == "spmm":
        return (harness.dense(A.shape[1], n),)
    return harness.dense(A.shape[0], n), harness.dense(A.shape[1], n, seed=3)


def spmm_checker(A, B):
    """Checks all rows, or a sample that includes the longest: the oracle takes longer than the
    GPU."""
    m, most = A.shape[0], MOST_CHECKED // B.shape[1]
    if m <= most:
        return bench_spmm.checker(A, B)
    rows = np.random.default_rng(0).choice(m, most, replace=False)
    rows[0] = np.argmax(np.diff(A.indptr))
    wrong = bench_spmm.checker(A[rows], B)
    return lambda result: wrong(np.asarray(result).reshape(m, -1)[rows])


CHECKERS = {
    "spmm": spmm_checker,
    "sddmm": bench_sddmm.checker,
    "softmax": bench_softmax.checker,
}
OPERATIONS = {
    "spmm": lambda A, B, schedule: spmm(A, B, schedule=schedule),
    "sddmm": lambda A, X, Y, schedule: sddmm(A, X, Y, schedule=schedule).values,
    "softmax": lambda A, schedule: sparse_softmax(A, schedule=schedule).values,
}


def problem_of(op: str, A, n: int) -> Problem:
    op = "sparse_softmax" if op == "softmax" else op
    return Problem(op, A.shape, A.nnz, n=n, platform="cuda")


def points(op: str, n: int, most: int = MOST_POINTS) -> list:
    """An evenly spread sample of the legal points for a width: the same for every matrix."""
    found = list(legal_points(Problem(op, (10_000, 10_000), 100_000, n=n)))
    return found[:: -(-len(found) // most)]


class Case:
    """An operation on a matrix, with its operands, its oracle and its bound.

    bound: seconds to read every operand and write the result once, at the speed of a copy.
    """

    def __init__(self, op: str, A, n: int, device, bandwidth: float, arch: str) -> None:
        self.op, self.A, self.n, self.device, self.arch = op, A, n, device, arch
        dense = operands(op, A, n)
        m, k = A.shape
        # Bytes of values and columns (or values and results), of offsets, of dense operands and
        # results.
        moved = 8 * A.nnz + 4 * (m + 1) + (4 * n * (m + k) if dense else 0)
        self.moved, self.bound = moved, moved / bandwidth
        self.flops = 2 * A.nnz * n if dense else 4 * A.nnz
        self.sets = peers.Sets(A, dense, device.sets(moved))
        self.wrong = CHECKERS[op](A, *dense)
        self._recorded: ours.Launch | None = None

    def rows(self) -> Iterator[Row]:
        """Ours with the default point, the peers' kernels, then programs of JAX."""
        point = choose_schedule(problem_of(self.op, self.A, self.n))
        yield self._row("ours", self._ours, str(point))
        for name, plan in peers.KERNELS[self.op].items():
            yield self._row(name, lambda plan=plan: plan(self.device, self.sets))
        for name, plan in peers.PROGRAMS[self.op].items():
            few = self.op == "spmm" and name not in peers.EVERY_WIDTH
            if few and self.n not in peers.FEW_WIDTHS:
                continue
            yield self._row(name, lambda plan=plan: plan(self.device, self.sets), program=True)

    def search(self, most: int = MOST_POINTS) -> Iterator[Row]:
        """A sample of the legal points, each measured like a contender."""
        yield from self.of_points(points(self.op, self.n, most))

    def of_points(self, points: Iterable[AtomicParallelism]) -> Iterator[Row]:
        rotating = self._rotating()
        problem = problem_of(self.op, self.A, self.n)
        for point in points:

            def plan(point=point):
                call = LAUNCH_PLANS[self.op][1](problem, point)
                return rotating.run(call, ours.compiled(call, self.arch)), rotating.result

            yield self._row("point", plan, str(point))

    def _rotating(self) -> ours.Rotating:
        A, dense, run = self.A, self.sets.dense, OPERATIONS[self.op]

        def function(schedule):
            return run(SparseArray.from_scipy(A), *map(jnp.asarray, dense), schedule)

        self._recorded = self._recorded or ours.launch_of(function)
        return ours.Rotating(self.device, self._recorded, self.sets.count)

    def _ours(self) -> peers.Plan:
        rotating = self._rotating()
        assert self._recorded is not None
        call = self._recorded.call
        return rotating.run(call, ours.compiled(call, self.arch)), rotating.result

    def _row(
        self,
        name: str,
        plan: Callable[[], peers.Plan],
        schedule: str = "",
        program: bool = False,
    ) -> Row:
        """Measures a contender; a row without a time, and why, where it cannot run or is wrong."""
        row: Row = {"n": self.n, "contender": name, "schedule": schedule}
        if self.device.lost:
            return row | {"notes": f"{LOST}: {self.device.lost}"}
        start = time.perf_counter()
        try:
            call, result = plan()
            call(0)
            found = result()
            row["plan_ms"] = 1e3 * (time.perf_counter() - start)  # the first call included
            if not (error := self.wrong(found)) <= 1:
                raise Unavailable(f"wrong, error {error:.3g} times the rounding bound")
            measure = timing.of_program if program else self.device.measure
            timed = measure(call, self.sets.count)
        except _FAILURES as reason:
            self.device.check()
            why = (str(reason) or type(reason).__name__).splitlines()[0]
            return row | {"notes": f"{LOST}: {why}" if self.device.lost else why}
        return row | {
            "method": timed.method,
            "us": 1e6 * timed.seconds,
            "gflops": 1e-9 * self.flops / timed.seconds,
            "gb_per_s": 1e-9 * self.moved / timed.seconds,
            "bound_us": 1e6 * self.bound,
            "spread": timed.spread,
            "sets": self.sets.count,
        }
