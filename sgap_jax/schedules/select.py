"""Which schedule an operation gets when the caller names none."""

from sgap_jax.schedules.cpu import CpuTile
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Reference, Schedule


def choose_schedule(problem: Problem) -> Schedule:
    """The default schedule of a problem; pure Python, reads no array.

    Off the CPU there are no kernels yet: the plain-JAX lowering runs there.
    """
    return CpuTile() if problem.platform == "cpu" else Reference()
