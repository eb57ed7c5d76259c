"""A fused operation as the operations that it is made of."""

import dataclasses

from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule, ScheduleError


@dataclasses.dataclass(frozen=True)
class Unfused(Schedule):
    """Attention as sddmm, sparse_softmax and spmm, each with its default schedule.

    Runs on every platform and keeps scores and probabilities, one of each for every stored entry
    and head. What platforms without a fused kernel do, and what the kernel is compared with.
    """

    def check(self, problem: Problem) -> None:
        if problem.op != "attention":
            raise ScheduleError(
                f"Unfused: {problem.op} is one operation; only attention is several"
            )

    def explain(self, problem: Problem) -> str:
        self.check(problem)
        return (
            "S = sddmm(pattern, Q, K, scale)       # a number for each stored entry\n"
            "P = sparse_softmax(S + bias)          # another\n"
            "O = spmm(P, V)"
        )

    def __str__(self) -> str:
        return "Unfused()"
