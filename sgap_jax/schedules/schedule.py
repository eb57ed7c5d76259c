"""`Schedule`, the base class of schedules, and `Reference`. A schedule says how an operation runs;
it never changes what the operation computes."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from sgap_jax.schedules.problem import Problem

# Limits of every GPU: blocks of a launch along each axis of its grid, and threads of a block.
GRID_X = 2**31 - 1
GRID_Y = 65535
GRID_Z = 65535
THREADS = 1024  # in a block altogether, and along x and y
THREADS_Z = 64

# The dtypes the kernels are built for, by name; all accumulate in float32 at least.
KERNEL_DTYPES = ("float32", "float64", "bfloat16", "float16")


class ScheduleError(ValueError):
    """An illegal schedule. The message names the rule that it breaks."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How an operation runs: a frozen, hashable, picklable, printable value.

    Pass one as `schedule=` to an operation, or None to let `choose_schedule` pick.
    """

    @staticmethod
    def parse(text: str) -> Schedule:
        """The schedule that prints as `text`, such as {<1/8 row, 4 col>, 8}; else ScheduleError."""
        if not isinstance(text, str):
            raise ScheduleError(f"expected the text of a schedule, got {text!r}")
        # Classes without `explain` are abstract bases, which no text denotes. Of two classes with
        # one name the dict keeps the last: that of this package, which sorts last, else the one
        # defined last.
        kinds = {
            kind.__name__: kind
            for kind in sorted(_derived(Schedule), key=_is_ours)
            if kind.explain is not Schedule.explain
        }
        for kind in kinds.values():
            if (schedule := kind._read(text)) is not None:
                return schedule
        raise ScheduleError(
            f"{text!r} is not a schedule; expected a point such as {{<1/8 row, 4 col>, 8}}, "
            f"or one of {', '.join(kinds)} with named fields, such as CpuTile(columns=64)"
        )

    @classmethod
    def _read(cls, text: str) -> Schedule | None:
        """The schedule of this class that prints as `text`, or None. This reads a call with named
        fields, as dataclasses print, or the name of the class alone; a class with another `__str__`
        overrides it."""
        try:
            call = ast.parse(text.strip(), mode="eval").body
            if isinstance(call, ast.Name):
                call = ast.Call(call, [], [])
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                return None
            if call.func.id != cls.__name__:
                return None
            fields = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
        except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
            return None  # not a call, not constants, or nested too deep for Python's parser
        if len(fields) < len(call.keywords):
            raise ScheduleError(f"a field twice in {text!r}")
        try:
            return cls(**fields)
        except ScheduleError:
            raise
        except (TypeError, ValueError) as error:
            raise ScheduleError(f"{text!r} is not a schedule: {error}") from error

    def check(self, problem: Problem) -> None:
        """Raises ScheduleError (illegal) or NotImplementedError (legal, but not available here)."""
        raise NotImplementedError(f"{type(self).__name__} is not a schedule that can run")

    def check_expression(self, expression: Any) -> None:
        """What `check` is for problems of kernels: an operation that compiles loops for an
        expression in index notation calls it before it refuses a schedule that is no chain of
        transformations. It may raise; by default it does nothing."""

    @staticmethod
    def check_sizes(problem: Problem) -> None:
        """Raises NotImplementedError for a problem on CUDA with a size that is a symbol."""
        if problem.platform == "cuda" and problem.symbolic:
            sizes = (*problem.shape, problem.nnz, problem.n, problem.batch)
            raise NotImplementedError(
                f"{problem.op}: a launch on CUDA has the program's sizes, got {sizes}; export with "
                "concrete sizes, or pass schedule=Reference()"
            )

    def check_kernel(self, problem: Problem, platform: str) -> None:
        """Raises NotImplementedError if the problem's platform is not `platform`, which has the
        kernels, or if no kernel takes its dtype."""
        if problem.platform != platform:
            raise NotImplementedError(
                f"{problem.op}: {self} runs on the platform {platform}, not on {problem.platform}; "
                "schedule=None or Reference() runs there"
            )
        if problem.dtype not in KERNEL_DTYPES:
            others = " or pass schedule=Reference()"
            if problem.op in ("spmm", "sddmm"):
                others += ", or use einsum"
            elif problem.op in ("row_sum", "row_max"):
                others += ", or use aggregate, which takes it"
            if problem.dtype == "bool":  # JAX cannot add and multiply them
                others = ""
            raise NotImplementedError(
                f"{problem.op}: no kernel for dtype {problem.dtype}; "
                f"cast to one of {', '.join(KERNEL_DTYPES)}{others}"
            )

    def _check_tensor_cores(self, problem: Problem) -> None:
        """Raises NotImplementedError if the GPU lacks the tensor-core instructions."""
        if not problem.has_tensor_cores:
            raise NotImplementedError(
                f"{problem.op}: {self} runs on tensor cores of sm_80 and later, got "
                f"{problem.arch}; leave the schedule out"
            )

    def derived(self) -> Schedule | None:
        """The schedule that a derivative rule passes to the other operations it calls. None lets
        `choose_schedule` pick, since a tile of one operation does not suit another."""
        return None

    def transposed(self) -> Schedule | None:
        """The schedule for the product with the transpose that a derivative rule calls."""
        return self

    def explain(self, problem: Problem) -> str:
        """The equivalent loops, as text."""
        raise NotImplementedError(f"{type(self).__name__} is not a schedule that can run")

    def _repr_without(self, optional: str) -> str:
        """As dataclasses print, but without the field `optional` where it is None."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if fields[optional] is None:
            del fields[optional]
        values = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        return f"{type(self).__name__}({values})"

    # A schedule may wrap another one and run its CUDA kernels elsewhere; `Emulated` does. These
    # names are not public: a schedule of a user may have fields of any other name.

    @property
    def _inner(self) -> Schedule | None:
        """The schedule that kernels obey: the wrapped one, or this one."""
        return self

    def _around(self, inner: Schedule | None) -> Schedule | None:
        """A wrapper gives itself around `inner`; a schedule that wraps none gives `inner`."""
        return inner

    def _host_launches(self) -> AbstractContextManager[Callable] | None:
        """A context for lowering an operation. It yields a function (call, inputs, outputs) ->
        arrays that runs launches of CUDA kernels on the host. None: the platform's own kernels
        run."""
        return None


def _is_ours(kind: type[Schedule]) -> bool:
    return kind.__module__.startswith("sgap_jax.")


def _derived(kind: type[Schedule]) -> Iterator[type[Schedule]]:
    """All subclasses, direct or not: the package's __init__ has imported every schedule of its
    own."""
    for below in kind.__subclasses__():
        yield below
        yield from _derived(below)


@dataclasses.dataclass(frozen=True)
class Reference(Schedule):
    """Gather, multiply and segment-reduce in plain JAX: runs on every platform and for every dtype.

    It allocates nnz x n products, so it serves as an oracle and a fallback, not as a fast path.
    """

    def check(self, problem: Problem) -> None:
        return None

    def derived(self) -> Schedule:
        return self

    def explain(self, problem: Problem) -> str:
        return {
            "spmm": (
                "products[p, :] = values[p] * B[column_indices[p], :]   for all p at once\n"
                "C = segment_sum(products, row of p)"
            ),
            "sddmm": (
                "products[p, :] = X[row of p, :] * Y[column_indices[p], :]   for all p at once\n"
                "values = sum(products, axis=1) * weights * scale       where these are given"
            ),
        }.get(problem.op, "segment reductions over the row of each entry")

    def __str__(self) -> str:
        return "Reference()"
