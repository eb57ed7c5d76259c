"""Families of CUDA kernels, and the choice of a schedule around those that fail on this machine's
GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.attention import AttentionTile
from sgap_jax.schedules.point import algorithm
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Reference, Schedule
from sgap_jax.schedules.subwarp import SubwarpTile
from sgap_jax.schedules.tiles import OctetTile

_warned: set[str] = set()


def family(op: str, schedule: Schedule) -> str | None:
    """The name of the kernels that run a schedule of an operation on CUDA, such as "spmm octet";
    None for a schedule that runs as several operations or in plain JAX."""
    match schedule:
        case AtomicParallelism():
            kind = algorithm(schedule, op)
        case OctetTile():
            kind = "octet" if schedule.chunk is None else "octet_pieces"
        case SubwarpTile():
            kind = "subwarp"
        case AttentionTile():
            cut = schedule.chunk is not None
            kind = "octet_pieces" if cut else "octet"
            if not schedule.octet:
                kind = "row_pieces" if cut else "rows"
        case _:
            kind = None
    return None if kind is None else f"{op} {kind}"


def working(problem: Problem, schedules: Iterable[Schedule]) -> Schedule:
    """The first of these schedules, best first, whose kernels are not known to fail here; a warning
    names the family that is passed over, once in a process. `Reference()` if all are."""
    failed, passed = failing(), None
    for schedule in schedules:
        name = family(problem.op, schedule)
        if name not in failed:
            break
        assert name is not None
        passed = passed or name
    else:
        schedule = Reference()
    if passed is not None:
        warn_once(passed, failed[passed], f"{problem.op} runs with {schedule}")
    return schedule


def warn_once(name: str, why: str, instead: str) -> None:
    """Warns that a family of kernels is passed over, if this process has not done so."""
    if name in _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"sgap_jax: the CUDA kernels '{name}' failed on this GPU ({why}), so {instead}. "
        "`python -m sgap_jax doctor` tests them again.",
        RuntimeWarning,
        stacklevel=3,
    )


_read: Callable[[], Mapping[str, str]] = dict


def failing() -> Mapping[str, str]:
    """{family: why} of the kernels that are known to fail on this machine's GPUs."""
    return _read()


def set_failing(read: Callable[[], Mapping[str, str]]) -> None:
    """Says how the failing families are found. The package does once, when it loads; the build of a
    wheel chooses as if none failed."""
    global _read
    _read = read


@contextmanager
def with_failing(failed: Mapping[str, str]) -> Iterator[None]:
    """A context in which these families are known to fail, for all threads: tests use it."""
    before = _read
    set_failing(lambda: failed)
    try:
        yield
    finally:
        set_failing(before)
        _warned.difference_update(failed)
