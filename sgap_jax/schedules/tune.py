"""Which schedule is fastest here, by measurement; kept on disk by what was measured."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats.array import SparseArray
from sgap_jax.runtime.cache import content_key, default_folder, replace_file
from sgap_jax.schedules.candidates import candidate_schedules
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule

_SAMPLE = 1e-3  # seconds, at least: many calls of a short operation
_ROUNDS = 5  # at least, for those that stay
_SLOW = 2.0  # times the fastest: left out after the first round
_CLOSE = 1.1  # after the others
_GAIN = 1.02  # less is noise: the first candidate stays


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What `tune` found.

    Attributes:
      schedule: the fastest, to be passed as `schedule=`.
      times: (schedule, seconds of a call) of all that were timed, fastest first: the median ratio
        to the default in the same rounds, of fewer rounds for those that were behind, times the
        default's median.
      default: the first candidate.
    """

    schedule: Any
    times: tuple[tuple[Any, float], ...]
    default: Any

    @property
    def speedup(self) -> float:
        """The default's time over that of `schedule`."""
        seconds = dict(self.times)
        return seconds[self.default] / seconds[self.schedule]

    def __str__(self) -> str:
        marks = {self.default: " (default)"} | {self.schedule: " (chosen)"}
        if self.default == self.schedule:
            marks = {self.default: " (default, chosen)"}
        return "\n".join(
            f"{1e6 * seconds:10.1f} us  {schedule}{marks.get(schedule, '')}"
            for schedule, seconds in self.times
        )


def tune(
    run: Callable,
    *operands: Any,
    candidates: Iterable | None = None,
    deterministic: bool = True,
    seconds: float = 2.0,
    again: bool = False,
) -> Tuned:
    """Times schedules of an operation on these very operands, on the device where they are.

        tuned = tune(spmm, A, B)
        C = jax.jit(spmm, static_argnames="schedule")(A, B, schedule=tuned.schedule)

    Calls are jitted with the operands as arguments and timed in turns; the slow ones drop out
    early. A schedule must beat the first candidate by 2% to be chosen over it. For an operation of
    this package (also in a `functools.partial` with plain arguments) what was found is kept on disk
    beside the compiled kernels (SGAP_CACHE_DIR), for the same pattern, shapes, dtypes, machine and
    versions; a function of one's own is timed anew.

    Args:
      run: called as run(*operands, schedule=...): `spmm`, `sddmm`, `sparse_attention`, ..., or a
        function that passes `schedule` on and does more, such as taking a gradient.
      operands: concrete arrays and SparseArrays: any pytrees.
      candidates: schedules to time, any that `run` takes, such as chains of `sgap_jax.compiler`
        for `einsum`; None is a candidate too. Without them `candidate_schedules` of the problem
        that `run` first asks a kernel for.
      deterministic: of these only schedules that give the same bits at each call.
      seconds: of measurement, about, beyond compiling each candidate once.
      again: measure even where a result is kept.

    Returns:
      A `Tuned`: the schedule, and all times. Only time differs between schedules (and the order of
      sums), so any of them is right for other operands too.

    Raises:
      TypeError: an operand is traced (inside jit, grad or vmap nothing can be timed).
      ValueError: no candidates, or `seconds` is not positive.
      NotImplementedError: no kernels on this platform to choose from; or no operation in `run` is
        asked to obey `schedule`. What `run` raises for a candidate that the caller named.

    Source: Sgap, section 7.2 (tuning over group, block and tile sizes).
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(operands)):
        raise TypeError(
            "tune: operands must be concrete arrays; call it outside jit, grad and vmap"
        )
    if not (isinstance(seconds, int | float) and seconds > 0):
        raise ValueError(f"tune: seconds must be positive, got {seconds!r}")
    if candidates is not None:
        chosen = tuple(dict.fromkeys(candidates))
        if not chosen:
            raise ValueError("tune: candidates must name at least one schedule")
        return _timed(run, operands, chosen, seconds)
    problem = _problem(run, operands)
    own = candidate_schedules(problem, deterministic=deterministic)
    if not own:
        raise NotImplementedError(
            f"tune: {problem.op} has no kernels for {problem.dtype} on {problem.platform}: "
            "there is nothing to choose"
        )
    path = _path(run, operands, problem, own)
    if path is not None and not again and (kept := _read(path, own)) is not None:
        return kept
    tuned = _timed(run, operands, own, seconds)
    if path is not None:
        _write(path, tuned)
    return tuned


class _Asked(Exception):
    """Carries a problem out of a lowering."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


@dataclasses.dataclass(frozen=True)
class _Ask(Schedule):
    """In the place of a schedule: says what is asked of the first kernel that gets it."""

    def check(self, problem: Problem) -> None:
        raise _Asked(problem)

    def __str__(self) -> str:
        return "a schedule to be tuned"


def _problem(run: Callable, operands: tuple) -> Problem:
    try:
        jax.jit(lambda *x: _values(run(*x, schedule=_Ask()))).lower(*operands)
    except _Asked as asked:
        return asked.problem
    raise NotImplementedError(
        "tune: no operation in `run` asks a kernel to obey `schedule`; pass it on, or name the "
        "candidates"
    )


def _values(results: Any) -> Any:
    """Without the index arrays, which XLA copies where they go in and come out."""
    return jax.tree.map(
        lambda x: x.values if isinstance(x, SparseArray) else x,
        results,
        is_leaf=lambda x: isinstance(x, SparseArray),
    )


def _timed(run: Callable, operands: tuple, candidates: tuple, seconds: float) -> Tuned:
    def call_of(schedule: Any) -> Callable[[int], float]:
        jitted = jax.jit(lambda *x: _values(run(*x, schedule=schedule)))
        jax.block_until_ready(jitted(*operands))  # compiles it
        return functools.partial(_sample, jitted, operands)

    samples = {schedule: call_of(schedule) for schedule in candidates}
    calls = {
        schedule: math.ceil(_SAMPLE / max(sample(1), 1e-6)) for schedule, sample in samples.items()
    }
    found = {schedule: [sample(calls[schedule])] for schedule, sample in samples.items()}
    left, end = _within(found, candidates, _SLOW), time.perf_counter() + seconds
    rounds, order = 1, random.Random(0)
    while rounds < _ROUNDS or (len(left) > 1 and time.perf_counter() < end):
        order.shuffle(left)  # what a call leaves in caches and on the heap is to fall on all
        for schedule in left:
            found[schedule].append(samples[schedule](calls[schedule]))
        rounds += 1
        if rounds >= _ROUNDS:
            left = _within(found, left, _CLOSE)
    ratios, default = _ratios(found, candidates), candidates[0]
    usual = statistics.median(found[default])
    times = sorted(((x, ratio * usual) for x, ratio in ratios.items()), key=lambda item: item[1])
    best = min(ratios, key=lambda schedule: ratios[schedule])
    return Tuned(best if _GAIN * ratios[best] < 1 else default, tuple(times), default)


def _ratios(found: Mapping, left: Iterable) -> dict:
    """Time over that of the first candidate in the same rounds: a slow spell of the machine must
    not count against who was timed in it."""
    first = next(iter(found.values()))
    return {
        schedule: statistics.median(
            own / its for own, its in zip(found[schedule], first, strict=False)
        )
        for schedule in left
    }


def _within(found: Mapping, left: Iterable, factor: float) -> list:
    """Those that may still win, and the first, which they are compared with."""
    ratios, default = _ratios(found, left), next(iter(found))
    most = factor * min(ratios.values())
    return [schedule for schedule in ratios if schedule == default or ratios[schedule] <= most]


def _sample(jitted: Callable, operands: tuple, calls: int) -> float:
    """Seconds of a call. On a CPU calls that are under way together would share its cores."""
    start = time.perf_counter()
    for _ in range(calls):
        result = jitted(*operands)
        if _device(result).platform == "cpu":
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _device(arrays: Any) -> Any:
    return next(iter(jnp.asarray(jax.tree.leaves(arrays)[0]).devices()))


def _path(run: Callable, operands: tuple, problem: Problem, candidates: tuple) -> Path | None:
    """The file of what is kept for these; None where nothing can be."""
    name, folder = _name(run), default_folder()
    if name is None or folder is None:
        return None
    leaves, tree = jax.tree.flatten(operands)
    # Index arrays say which entries are stored: their content is part of the question.
    arrays = [(x.shape, str(x.dtype), _digest(x)) for x in map(jnp.asarray, leaves)]
    device = _device(leaves)
    here = (platform.node(), device.platform, device.device_kind, os.cpu_count())
    versions = (version("sgap_jax"), jax.__version__)
    question = (name, problem, [str(c) for c in candidates], str(tree), arrays, here, versions)
    return folder / "tuned" / f"{content_key('tuned', repr(question))}.json"


def _digest(x: Any) -> str:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return ""
    return hashlib.sha256(np.asarray(x).tobytes()).hexdigest()


def _name(run: Any) -> str | None:
    """A public operation, with the arguments that a partial gives it; else None."""
    given: dict[str, Any] = {}
    if isinstance(run, functools.partial):
        if run.args:
            return None
        run, given = run.func, run.keywords
    plain = all(type(x) in (bool, int, float, str, type(None)) for x in given.values())
    ours = getattr(run, "__module__", "").startswith("sgap_jax.primitives.")
    return f"{run.__qualname__}{sorted(given.items())}" if ours and plain else None


def _read(path: Path, candidates: tuple) -> Tuned | None:
    """What is kept there; None where there is nothing, or not what this module writes."""
    try:
        kept = json.loads(path.read_bytes())
        known = {str(schedule): schedule for schedule in candidates}
        times = tuple((known[name], float(seconds)) for name, seconds in kept["times"])
        return Tuned(known[kept["schedule"]], times, candidates[0])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, tuned: Tuned) -> None:
    times = [[str(schedule), seconds] for schedule, seconds in tuned.times]
    kept = {"schedule": str(tuned.schedule), "times": times}
    try:
        replace_file(path, json.dumps(kept, indent=1).encode())
    except OSError:
        return  # a folder that cannot be written: the next process measures again
