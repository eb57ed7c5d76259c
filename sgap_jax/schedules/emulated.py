"""The CUDA kernels without a GPU: how tests run them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Emulated(Schedule):
    """The kernels of platform "cuda", each launch handed to a function on the CPU.

    Choice of schedule, instantiation, arguments, grids and zeroing are those of a GPU, and so are
    the derivatives'; who computes is `run`.

    Attributes:
      run: (call: KernelCall, inputs, outputs: [(shape, dtype)]) -> NumPy arrays of the outputs.
      schedule: what the GPU would be asked for.
    """

    run: Callable
    schedule: Schedule | None = None

    def check(self, problem: Problem) -> None:
        if self.schedule is not None:
            self.schedule.check(dataclasses.replace(problem, platform="cuda"))

    def derived(self) -> Schedule:
        inner = None if self.schedule is None else self.schedule.derived()
        return dataclasses.replace(self, schedule=inner)

    def __str__(self) -> str:
        return f"Emulated({self.schedule})"
