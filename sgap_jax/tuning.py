"""`tune`: finds the fastest schedule of a call by measurement, and stores the result on disk.

The file's key is a hash of everything that the measurement depends on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.compiler import presets
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.notation.expr import Assign
from sgap_jax.formats.array import SparseArray
from sgap_jax.launch import launch, nvrtc
from sgap_jax.launch.cache import content_key, default_folder, replace_file
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.runtime.native import info
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.attention import BLOCK, AttentionTile, Unfused
from sgap_jax.schedules.cpu import CpuTile, scatter
from sgap_jax.schedules.families import failing, family
from sgap_jax.schedules.problem import TILED, Problem
from sgap_jax.schedules.schedule import Schedule, ScheduleError
from sgap_jax.schedules.select import choose_same_bits, choose_schedule
from sgap_jax.schedules.select_cuda import has_same_bits
from sgap_jax.schedules.subwarp import LENGTHS, SubwarpTile
from sgap_jax.schedules.tiles import OctetTile


def candidate_schedules(
    problem: Problem, *, deterministic: bool | None = None
) -> tuple[Schedule, ...]:
    """Legal schedules of a problem, the default first; some tens at most. On CUDA none of kernels
    that are known to fail on this machine's GPU.

    On the CPU: chunks of 1024 to 32768 nonzeros; for spmm also tiles of 16 to 128 columns, packed
    and not. Schedules that run as the same program, such as chunks that all hold the whole problem,
    are listed once. On CUDA: for entries the points that Sgap found best in some case (its Tables 1
    and 5: 4, 8 and 32 lanes for a row or a window, with or without tiles of 8 columns, and
    sequential sums of a row, or of 8 or 32 nonzeros) with blocks of 128 and 256 threads; for column
    vectors octet tiles and subwarps; for attention the lanes and shares of `AttentionTile`, and
    `Unfused`; where rows are skewed (`Problem.rows`) also pieces of rows, of 32 to 256 entries.

    Args:
      problem: the call to be scheduled.
      deterministic: only schedules that give the same bits at each call. Points that split nonzeros
        do not in spmm. None: those too if the default is such a schedule, as for skewed rows.
    """
    kinds = {"cpu": _on_cpu, "cuda": _on_cuda}
    if deterministic is None:
        deterministic = has_same_bits(choose_schedule(problem), problem)
    first = (choose_same_bits if deterministic else choose_schedule)(problem)
    found = [first, *kinds.get(problem.platform, lambda _: ())(problem)]
    programs: dict[Any, Schedule] = {}
    for schedule in found:
        programs.setdefault(_program(schedule, problem), schedule)
    return tuple(
        schedule
        for schedule in programs.values()
        if _legal(schedule, problem) and (has_same_bits(schedule, problem) or not deterministic)
    )


def _legal(schedule: Schedule, problem: Problem) -> bool:
    if problem.platform == "cuda" and family(problem.op, schedule) in failing():
        return False
    try:
        schedule.check(problem)
    except (NotImplementedError, ScheduleError):
        return False
    return True


def _program(schedule: Schedule, problem: Problem) -> Any:
    """A key that is equal for schedules that run as the same program for a problem."""
    if not isinstance(schedule, CpuTile) or problem.symbolic:
        return schedule
    length = problem.vector_length or 1
    if problem.op == "spmm" and problem.vector_length and all(found := scatter(problem, schedule)):
        return found
    # Chunks count entries and rows: from `whole` on, which includes what vectors store past the end
    # of the matrix, a single chunk has them all, and larger chunks change nothing.
    whole = problem.nnz + max(problem.shape) + length
    return dataclasses.replace(schedule, nonzeros=min(schedule.nonzeros, whole))


def _on_cpu(problem: Problem) -> Iterator[Schedule]:
    if problem.op == "attention":
        yield Unfused()
        return
    for nonzeros in (1 << i for i in range(10, 16)):
        yield CpuTile(nonzeros=nonzeros)
    if problem.op == "spmm":
        columns = [c for c in (16, 32, 64, 128) if c < problem.n]
        for tile, packed, nonzeros in itertools.product(columns, (False, True), (8192, 32768)):
            yield CpuTile(columns=tile, nonzeros=nonzeros, packed=packed)
    if problem.op == "sddmm" and not problem.vector_length:
        blocks = [c for c in (1024, 4096) if c < problem.shape[1]]
        for tile, nonzeros in itertools.product(blocks, (1 << 15, 1 << 17)):
            yield CpuTile(columns=tile, nonzeros=nonzeros)


def _on_cuda(problem: Problem) -> Iterator[Schedule]:
    if problem.op == "attention":
        yield Unfused()
        for lanes, share, octet in itertools.product((8, 16, 32), (1, 2, 4, 8), (False, True)):
            if lanes * share <= BLOCK:
                yield AttentionTile(lanes, share, octet)
        for chunk, octet in itertools.product(_chunks(problem), (False, True)):
            yield AttentionTile(8, octet=octet, chunk=chunk)
    elif problem.vector_length in LENGTHS and problem.op in ("spmm", "sddmm"):
        yield from _tiles(problem, problem.vector_length)
    else:
        yield from _points(problem)


def _chunks(problem: Problem) -> tuple[int, ...]:
    """The most entries of pieces to try, for patterns with skewed rows."""
    return () if problem.rows is None else tuple(c for c in _CHUNKS if c < problem.rows.longest)


def _points(problem: Problem) -> Iterator[Schedule]:
    widest = next(col for col in (4, 2, 1) if problem.n % col == 0)
    for chunk in _chunks(problem) if problem.op == "spmm" else ():
        yield AtomicParallelism(row=1, col=widest, chunk=chunk)
        yield AtomicParallelism(row=Fraction(1, 8), col=widest, group=8, chunk=8 * chunk)
    for col, block_size in itertools.product(sorted({widest, 1}, reverse=True), (256, 128)):
        of_lane: dict[str, Any] = dict(col=col, block_size=block_size)
        yield AtomicParallelism(row=1, **of_lane)
        for nnz in (8, 32):
            yield AtomicParallelism(nnz=nnz, **of_lane)
        for group in (4, 8, 32):
            share: dict[str, Any] = dict(row=Fraction(1, group), group=group, **of_lane)
            yield AtomicParallelism(**share)
            yield AtomicParallelism(nnz=1, group=group, **of_lane)
            yield AtomicParallelism(nnz=4, group=group, **of_lane)
            if problem.op in TILED and problem.n > 8 and 8 // col * group <= block_size:
                yield AtomicParallelism(tile_size=8, worker_dim_r=Fraction(1, 2), **share)


def _tiles(problem: Problem, length: int) -> Iterator[Schedule]:
    if length in (2, 4, 8, 16, 32):
        wide, steps = ((64, 128), (16, 32)) if problem.op == "spmm" else ((16, 32, 64), (32, 64))
        for tile_n, tile_k, stages in itertools.product(wide, steps, (1, 2, 3)):
            yield OctetTile(length, tile_n=tile_n, tile_k=tile_k, stages=stages)
        if problem.op == "spmm":
            for warps, swizzle in itertools.product((1, 2, 4, 8), (False, True)):
                yield OctetTile(length, stages=2, row_warps=warps, swizzle=swizzle)
            for chunk in _chunks(problem):
                yield OctetTile(length, stages=2, chunk=chunk)
    for subwarp, split in itertools.product((4, 8, 16, 32), (1, 2, 4, 8)):
        if split <= subwarp and (split == 1 or problem.op == "spmm"):
            yield SubwarpTile(length, subwarp=subwarp, split=split)


_CHUNKS = (32, 64, 128, 256)  # about those that `chunk_of` gives
_SAMPLE = 1e-3  # the least seconds of a sample, which is many calls of a short operation
_ROUNDS = 5  # the least rounds of a candidate that does not drop out
_SLOW = 2.0  # candidates slower than the fastest by this factor drop out after the first round
_CLOSE = 1.1  # the same after round _ROUNDS and all later ones
_GAIN = 1.02  # a smaller gain is noise: then the first candidate is chosen
_THREADS = 8  # that compile at once, at most
_NEVER = np.float32(1.2345e-33)  # no sum of results is this number


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`.

    Attributes:
      schedule: the fastest schedule, to be passed as `schedule=`.
      times: (schedule, seconds of a call) for all that were timed, fastest first. The seconds are
        the median ratio to the default's time in the same rounds, times the default's median; slow
        schedules have fewer rounds.
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
    deterministic: bool | None = None,
    seconds: float = 2.0,
    again: bool = False,
) -> Tuned:
    """Times schedules of an operation on these very operands, on the device where they are.

        tuned = tune(spmm, A, B)
        C = jax.jit(spmm, static_argnames="schedule")(A, B, schedule=tuned.schedule)

    Candidates are compiled in threads, those of which JAX makes the same program once, and timed in
    turns; slow ones drop out early. A sample is one program of as many calls as take a millisecond,
    one after the other, so that dispatching is not what is timed. A schedule must beat the first
    candidate by 2% to be chosen over it. For an operation of this package (also in a
    `functools.partial` with plain arguments) the result is stored on disk, in the folder `tuned`
    beside the compiled kernels (SGAP_CACHE_DIR), and is used again for the same pattern, shapes,
    dtypes, machine, instruction set, cores and versions. Any other function is timed again at each
    call of `tune`.

    Args:
      run: called as `run(*operands, schedule=...)`: `spmm`, `sddmm`, `sparse_attention`, ..., or a
        function that passes `schedule` on and does more, such as taking a gradient.
      operands: concrete arrays and SparseArrays: any pytrees.
      candidates: schedules to time, any that `run` takes, such as those of `sgap_jax.compiler`;
        None is a candidate too. By default `candidate_schedules` of the problem of the first kernel
        that `run` calls, after None where that is attention that none of them names (block
        after block, or over pieces of a large pattern's keys); of an `einsum` or `evaluate` that
        runs as compiled loops, on the CPU, None and the presets of its expression with tasks of 1
        to 256 rows.
      deterministic: of the default candidates, only those that give the same bits at each call;
        None: those too that do not if the default is one of them (`candidate_schedules`).
      seconds: time to measure, not counting the compilation and a first sample of each candidate;
        it takes longer if five rounds of a short operation do. A stored result of a shorter
        measurement is not used.
      again: measure even if there is a stored result.

    Returns:
      A `Tuned`: the schedule, and all times. Schedules differ only in time (and in the order of
      sums), so each is correct for other operands too.

    Raises:
      TypeError: an operand is traced (inside jit, grad or vmap nothing can be timed) or not an
        array, or `candidates` is not an iterable of schedules.
      ValueError: no candidates, `run` returns no array, or `seconds` is not positive and finite.
      NotImplementedError: there are no kernels on this platform to choose from, or no operation in
        `run` uses `schedule`. Also what `run` raises for a candidate that the caller named.

    Source: Sgap, section 7.2 (tuning over group, block and tile sizes).
    """
    if not callable(run):
        raise TypeError(
            f"tune: run must be a function, such as spmm in tune(spmm, A, B), got a "
            f"{type(run).__name__}"
        )
    leaves = (*jax.tree.leaves(operands), jnp.zeros(()))  # inside a jit the last one is traced
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            "tune: operands must be concrete arrays; call it outside jit, grad and vmap"
        )
    if any(isinstance(leaf, str) for leaf in leaves):
        raise TypeError("tune: operands must be arrays; give the others by functools.partial")
    check_seconds("tune", seconds)
    if candidates is not None:
        if isinstance(candidates, Schedule) or not isinstance(candidates, Iterable):
            raise TypeError(f"tune: candidates must be several schedules, got {candidates!r}")
        chosen = tuple(dict.fromkeys(candidates))
        if not chosen:
            raise ValueError("tune: candidates must name at least one schedule")
        return _timed(run, operands, chosen, seconds)
    problem = _problem(run, operands)
    if isinstance(problem, Assign):
        own = _loops(problem, _device(operands).platform, deterministic)
    elif not (own := candidate_schedules(problem, deterministic=deterministic)):
        raise NotImplementedError(
            f"tune: {problem.op} has no kernels for {problem.dtype} on {problem.platform}: "
            "there is nothing to choose"
        )
    elif problem.op == "attention" and problem.platform == "cpu":
        own = _with_default(run, operands, own)
    path = _path(run, operands, problem, own)
    if path is not None and not again and (kept := _read(path, own, seconds)) is not None:
        return kept
    tuned = _timed(run, operands, own, seconds, all_of_them=False)
    if path is not None:
        _write(path, tuned, seconds)
    return tuned


def check_seconds(op: str, seconds: Any) -> None:
    """ValueError for a time to measure that is not positive, or has no end."""
    try:
        number, got = float(seconds) if isinstance(seconds, int | float) else math.nan, None
    except OverflowError:  # repr may refuse such an integer too
        number, got = math.copysign(math.inf, 1 if seconds > 0 else -1), "one that no float holds"
    if not number > 0:
        raise ValueError(f"{op}: seconds must be positive, got {got or repr(seconds)}")
    if math.isinf(number):
        raise ValueError(
            f"{op}: seconds must be finite, got {got or repr(seconds)}: it would never end"
        )


def _with_default(run: Callable, operands: tuple, candidates: tuple) -> tuple:
    """The candidates, after None if that runs as another program than the first of them: no
    schedule names attention block after block, or over pieces of a large pattern's keys."""
    default, first = (
        _repeated(run, schedule, 1).lower(*operands).as_text() for schedule in (None, candidates[0])
    )
    return candidates if default == first else (None, *candidates)


def _loops(expression: Assign, platform: str, deterministic: bool | None) -> tuple:
    """Schedules of compiled loops: None, which is the default, and presets that divide an
    expression otherwise; where `deterministic` is False, also those whose tasks share sums."""
    if platform != "cpu" or not llvm.available():
        raise NotImplementedError(
            f"tune: {expression} runs as compiled loops, whose presets are the candidates on the "
            "CPU with llvmlite; elsewhere name them: candidates=[None, compiler.Schedule(...), ...]"
        )
    found: dict[Any, None] = {None: None}
    for rows in (1, 4, 16, 64, 256):
        found[presets.cpu(expression, rows)] = None
    shared = () if deterministic is not False else (presets.cpu_entries, presets.cpu_fibers)
    for preset in shared:
        with contextlib.suppress(ScheduleError):  # for other expressions
            found[preset(expression)] = None
    return tuple(found)


class _Asked(Exception):
    """Raised by `_Ask`, to carry a problem, or an expression of loops, out of a lowering."""

    def __init__(self, problem: Problem | Assign) -> None:
        self.problem = problem


@dataclasses.dataclass(frozen=True)
class _Ask(Schedule):
    """A probe that is passed as a schedule: the first kernel that checks it raises its problem, the
    first operation that compiles loops its expression."""

    def check(self, problem: Problem) -> None:
        raise _Asked(problem)

    def check_expression(self, expression: Any) -> None:
        if expression is not None:
            raise _Asked(expression)

    def __str__(self) -> str:
        return "a schedule to be tuned"


def _problem(run: Callable, operands: tuple) -> Problem | Assign:
    try:
        jax.jit(lambda *x: _values(run(*x, schedule=_Ask()))).lower(*operands)
    except _Asked as asked:
        return asked.problem
    except NotImplementedError as error:
        if str(_Ask()) not in str(error):
            raise
    except TypeError as error:
        if "unexpected keyword argument 'schedule'" not in str(error):
            raise
        raise TypeError(
            "tune: `run` is called with schedule=...; it must take it and pass it on: "
            "lambda A, B, schedule: spmm(A, B, schedule=schedule)"
        ) from None
    raise NotImplementedError(
        "tune: no operation in `run` asks a kernel to obey `schedule`; pass it on, or name the "
        "candidates, as for spgemm: [None, HashRows(), HashRows(sorted=False)]"
    )


def _values(results: Any) -> Any:
    """The results with each SparseArray replaced by its values, because XLA would copy index arrays
    that are both inputs and outputs."""
    return jax.tree.map(
        lambda x: x.values if isinstance(x, SparseArray) else x,
        results,
        is_leaf=lambda x: isinstance(x, SparseArray),
    )


def _timed(
    run: Callable, operands: tuple, candidates: tuple, seconds: float, all_of_them: bool = True
) -> Tuned:
    """Times the candidates. `all_of_them`: raise if any candidate is refused; else only if the
    first is, as `run` may contain other operations, which refuse some of the others."""
    operands = jax.device_put(operands)  # once, not at each call
    default = candidates[0]
    result = jax.eval_shape(lambda *x: _values(run(*x, schedule=default)), *operands)
    if not jax.tree.leaves(result):
        raise ValueError("tune: `run` must return arrays: what is not returned does not run")
    calls = _calls(_repeated(run, default, 1).lower(*operands).compile(), operands)
    programs = _compiled(run, operands, candidates, calls, all_of_them)
    samples = {
        schedule: functools.partial(_sample, program, operands, calls)
        for schedule, program in programs.items()
    }
    for sample in samples.values():
        sample()  # not counted
    found = {schedule: [sample()] for schedule, sample in samples.items()}
    left, start = _within(found, samples, _SLOW), time.perf_counter()
    rounds, order = 1, random.Random(0)
    least = 2 if calls == 1 else _ROUNDS  # two rounds suffice for long calls
    while rounds < least or (len(left) > 1 and time.perf_counter() - start < seconds):
        # A call changes caches and the heap for the next one: spread that over all candidates.
        order.shuffle(left)
        for schedule in left:
            found[schedule].append(samples[schedule]())
        rounds += 1
        if rounds >= _ROUNDS:
            left = _within(found, left, _CLOSE)
    ratios = _ratios(found, samples)
    usual = statistics.median(found[default])
    times = sorted(((x, ratio * usual) for x, ratio in ratios.items()), key=lambda item: item[1])
    best = min(ratios, key=lambda schedule: ratios[schedule])
    return Tuned(best if _GAIN * ratios[best] < 1 else default, tuple(times), default)


def _calls(program: Callable, operands: tuple) -> int:
    """How many calls a sample has, by the time of a program of one call."""
    _sample(program, operands, 1)  # the first run of a program is a slow one
    return math.ceil(_SAMPLE / max(_sample(program, operands, 1), 1e-6))


def _repeated(run: Callable, schedule: Any, calls: int) -> Any:
    """A jitted program of `calls` calls, one after the other. Its result is a number that depends
    on each.

    XLA would run a call once if its operands did not change. So an element of each operand is
    written anew in each step: the value that it had, unless a number that the call before has made
    is one that it never is, which XLA does not know.
    """

    def program(*operands: Any) -> jax.Array:
        def step(_: Any, carry: tuple) -> tuple:
            given, token = carry
            given = jax.tree.map(lambda x: _same_again(x, token), given)
            results = jax.tree.leaves(_values(run(*given, schedule=schedule)))
            return given, _token(jax.lax.optimization_barrier(results))

        return jax.lax.fori_loop(0, calls, step, (operands, _token([])))[1]

    return jax.jit(program)


def _same_again(x: jax.Array, token: jax.Array) -> jax.Array:
    if not x.size:
        return x
    first = (0,) * x.ndim
    return x.at[first].set(jnp.where(token == _NEVER, jnp.ones((), x.dtype), x[first]))


def _token(results: list) -> jax.Array:
    """A float32 that depends on all results."""
    parts = [jnp.real(x[(0,) * x.ndim]).astype(jnp.float32) for x in results if x.size]
    return sum(parts, start=jnp.zeros((), jnp.float32))


def _compiled(
    run: Callable, operands: tuple, candidates: tuple, calls: int, all_of_them: bool
) -> dict[Any, Any]:
    """The compiled programs of the candidates, each program once: that of the first candidate that
    has it. Kernels and programs are compiled in threads."""
    lowered: dict[Any, Any] = {}
    keys: set[str] = set()
    threads = ThreadPoolExecutor(min(os.cpu_count() or 1, len(candidates), _THREADS))
    with threads:
        if _device(operands).platform in ("cuda", "gpu"):
            _compile_kernels(run, operands, candidates, threads)
        for schedule in candidates:
            try:
                program = _repeated(run, schedule, calls).lower(*operands)
            except (ScheduleError, NotImplementedError):
                if all_of_them or not lowered:
                    raise
                continue
            text = program.as_text()
            if "callback" in text:  # the text does not say which function of Python it calls
                text += f" {len(lowered)}"
            if (key := content_key("program", text)) not in keys:
                keys.add(key)
                lowered[schedule] = program
        programs = threads.map(lambda program: program.compile(), lowered.values())
        return dict(zip(lowered, programs, strict=True))


def _compile_kernels(
    run: Callable, operands: tuple, candidates: tuple, threads: ThreadPoolExecutor
) -> None:
    """Compiles the CUDA kernels that the candidates launch into the user's cache, from which
    lowering takes them; lowering itself is of one thread."""
    with launch.collected() as calls:
        for schedule in candidates:
            # A function of its own for each: JAX caches what a function is lowered to.
            program = jax.jit(lambda *x, s=schedule: _values(run(*x, schedule=s)))
            with contextlib.suppress(ScheduleError, NotImplementedError):
                program.trace(*operands).lower(lowering_platforms=("cuda",))
    if not calls:
        return
    arch = launch.device_arch()

    def compile(call: KernelCall) -> None:
        with contextlib.suppress(NotImplementedError):  # the GPU lacks it: lowering says so
            launch.compile_call(call, nvrtc, arch)

    list(threads.map(compile, calls))


def _ratios(found: Mapping, left: Iterable) -> dict:
    """For each schedule in `left`, the median ratio of its time to the first candidate's in the
    same round, so that slow phases of the machine cancel out."""
    first = next(iter(found.values()))
    return {
        schedule: statistics.median(
            own / its for own, its in zip(found[schedule], first, strict=False)
        )
        for schedule in left
    }


def _within(found: Mapping, left: Iterable, factor: float) -> list:
    """The schedules that may still win, and the first candidate, to which they are compared."""
    ratios, default = _ratios(found, left), next(iter(found))
    most = factor * min(ratios.values())
    return [schedule for schedule in ratios if schedule == default or ratios[schedule] <= most]


def _sample(program: Callable, operands: tuple, calls: int) -> float:
    """Seconds of a call, in a program of `calls` calls."""
    start = time.perf_counter()
    jax.block_until_ready(program(*operands))
    return (time.perf_counter() - start) / calls


def _device(arrays: Any) -> Any:
    leaves = jax.tree.leaves(arrays) or [jnp.zeros(())]  # if there are none: the default device
    return next(iter(jnp.asarray(leaves[0]).devices()))


def _path(
    run: Callable, operands: tuple, problem: Problem | Assign, candidates: tuple
) -> Path | None:
    """The file of a stored result for this measurement; None if results cannot be stored."""
    name, folder = _name(run), default_folder()
    if name is None or folder is None:
        return None
    leaves, tree = jax.tree.flatten(operands)
    # Times depend on the pattern, so the contents of index arrays are part of the key.
    arrays = [(x.shape, str(x.dtype), _digest(x)) for x in map(jnp.asarray, leaves)]
    devices = [str(getattr(x, "sharding", "")) for x in leaves]
    here = (platform.node(), info()["cpu_isa"], info()["cpu_threads"], _device(leaves).device_kind)
    versions = (version("sgap_jax"), jax.__version__)
    names = [str(schedule) for schedule in candidates]
    question = (name, problem, names, str(tree), arrays, devices, here, versions)
    return folder / "tuned" / f"{content_key('tuned', repr(question))}.json"


def _digest(x: Any) -> str:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return ""
    return hashlib.sha256(np.asarray(x).tobytes()).hexdigest()


def _name(run: Any) -> str | None:
    """The name of an operation of this package, with the plain arguments of a partial; None for any
    other function."""
    given: tuple = ()
    if isinstance(run, functools.partial):
        given = (*run.args, *sorted(run.keywords.items()))
        plain = (*run.args, *run.keywords.values())
        if not all(type(x) in (bool, int, float, str, type(None)) for x in plain):
            return None
        run = run.func
    module = sys.modules.get(getattr(run, "__module__", None) or "")
    name = getattr(run, "__name__", "")
    ours = module is not None and module.__name__.startswith("sgap_jax.primitives.")
    return f"{name}{given}" if ours and getattr(module, name, None) is run else None


def _read(path: Path, candidates: tuple, seconds: float) -> Tuned | None:
    """The result stored in the file; None if there is none, if it was measured for less than
    `seconds`, or if this module did not write it."""
    try:
        kept = json.loads(path.read_bytes())
        known = {str(schedule): schedule for schedule in candidates}
        times = tuple((known[name], float(each)) for name, each in kept["times"])
        tuned = Tuned(known[kept["schedule"]], times, candidates[0])
        whole = all(0 < each < math.inf for _, each in times) and tuned.speedup > 0
        return tuned if whole and kept["seconds"] >= seconds else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, tuned: Tuned, seconds: float) -> None:
    times = [[str(schedule), each] for schedule, each in tuned.times]
    kept = {"schedule": str(tuned.schedule), "times": times, "seconds": seconds}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps(kept, indent=1).encode())
    except OSError:
        return  # the folder cannot be written: the next process measures again
