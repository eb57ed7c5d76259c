"""`Emulated`: runs the CUDA kernels on the CPU, for tests without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule
from sgap_jax.schedules.select import choose_schedule, choosing


@dataclasses.dataclass(frozen=True)
class Emulated(Schedule):
    """Passes each launch of a CUDA kernel to a Python function on the CPU.

    The choice of schedules, the sources, arguments, grids and zeroing are the same as on a GPU, in
    derivatives too; only the computation is done by `run`.

    Attributes:
      run: (call: KernelCall, inputs, outputs: [(shape, dtype)]) -> NumPy arrays of the outputs.
      schedule: the schedule for platform "cuda".
      choose: (problem) -> a schedule, used if `schedule` is None, in derivatives too.
    """

    run: Callable
    schedule: Schedule | None = None
    choose: Callable[[Problem], Schedule] = choose_schedule

    def check(self, problem: Problem) -> None:
        if self.schedule is not None:
            self.schedule.check(dataclasses.replace(problem, platform="cuda"))

    @property
    def _inner(self) -> Schedule | None:
        return self.schedule

    def _around(self, inner: Schedule | None) -> Schedule:
        return dataclasses.replace(self, schedule=inner)

    @contextlib.contextmanager
    def _host_launches(self) -> Iterator[Callable]:
        with choosing(self.choose):
            yield self.run

    def derived(self) -> Schedule:
        return self._around(None if self.schedule is None else self.schedule.derived())

    def transposed(self) -> Schedule:
        return self._around(None if self.schedule is None else self.schedule.transposed())

    def __str__(self) -> str:
        return f"Emulated({self.schedule})"
