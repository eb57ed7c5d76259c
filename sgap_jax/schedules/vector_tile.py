"""Tiles of column vectors: what they check, and their text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule, ScheduleError


@dataclasses.dataclass(frozen=True)
class VectorTile(Schedule):
    """A tile of a product with column vectors, by kernels of CUDA; the classes beneath say which.

    Attributes:
      vector_length: V of the format.
    """

    vector_length: int = 8

    @property
    def deterministic(self) -> bool:
        """Whether a product has the same bits at each call."""
        return True

    def check_field(self, name: str, allowed: Sequence) -> None:
        """Raises ScheduleError for a field whose value is none of the allowed, type and all."""
        value = getattr(self, name)
        if any(type(value) is type(one) and value == one for one in allowed):
            return
        if isinstance(allowed, range) and len(allowed) > 1:
            step = f" multiple of {allowed.step}" if allowed.step > 1 else "n int"
            words = f"a{step} from {allowed[0]} to {allowed[-1]}"
        else:
            words = f"one of {', '.join(map(repr, allowed))}"
        raise ScheduleError(f"{type(self).__name__}: {name} must be {words}, got {value!r}")

    def check_default(self, problem: Problem, name: str, why: str) -> None:
        """Raises ScheduleError for a field that the problem's operation has no use for."""
        default = next(field.default for field in dataclasses.fields(self) if field.name == name)
        if getattr(self, name) != default:
            raise ScheduleError(f"{problem.op}: {self}: {why}; leave {name} out")

    def check_vectors(self, problem: Problem) -> None:
        """Raises where the problem is not a product with vectors of the tile's length on a GPU."""
        if problem.op not in ("spmm", "sddmm"):
            raise NotImplementedError(
                f"{problem.op}: {self} has kernels of spmm and sddmm; leave the schedule out here"
            )
        if problem.vector_length is None:
            raise NotImplementedError(
                f"{problem.op}: {self} runs on column vectors, not on {problem.format}; "
                f"convert with A.asformat(CVS({self.vector_length}))"
            )
        if problem.vector_length != self.vector_length:
            raise ScheduleError(
                f"{problem.op}: {self} is for vectors of {self.vector_length}, got {problem.format}"
            )
        self.check_kernel(problem, "cuda")

    def __str__(self) -> str:
        """As a call, with the vector length and the fields that are not the defaults."""
        given = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name == "vector_length" or getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__}({given})"
