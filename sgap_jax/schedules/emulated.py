"""The CUDA kernels without a GPU: how tests run them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule
from sgap_jax.schedules.select import choose_schedule

_choose: ContextVar[Callable[[Problem], Schedule]] = ContextVar("choose", default=choose_schedule)


def default_schedule(problem: Problem) -> Schedule:
    """What `choose_schedule` says, or an emulation's own choice while that is being lowered."""
    return _choose.get()(problem)


@dataclasses.dataclass(frozen=True)
class Emulated(Schedule):
    """The kernels of platform "cuda", each launch handed to a function on the CPU.

    Choice of schedule, instantiation, arguments, grids and zeroing are those of a GPU, and so are
    the derivatives'; who computes is `run`.

    Attributes:
      run: (call: KernelCall, inputs, outputs: [(shape, dtype)]) -> NumPy arrays of the outputs.
      schedule: what the GPU would be asked for.
      choose: (problem) -> the schedule where `schedule` is None, in derivatives too.
    """

    run: Callable
    schedule: Schedule | None = None
    choose: Callable[[Problem], Schedule] = choose_schedule

    def check(self, problem: Problem) -> None:
        if self.schedule is not None:
            self.schedule.check(dataclasses.replace(problem, platform="cuda"))

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        """Within, `default_schedule` is `choose`."""
        token = _choose.set(self.choose)
        try:
            yield
        finally:
            _choose.reset(token)

    def derived(self) -> Schedule:
        inner = None if self.schedule is None else self.schedule.derived()
        return dataclasses.replace(self, schedule=inner)

    def transposed(self) -> Schedule:
        inner = None if self.schedule is None else self.schedule.transposed()
        return dataclasses.replace(self, schedule=inner)

    def __str__(self) -> str:
        return f"Emulated({self.schedule})"
