"""Times contenders against each other in one process.

Contenders alternate in short blocks, over several rounds, in a rotating order. A block is a pause
in which the previous contender's threads stop spinning, calls that are not timed (they wake the
thread pool and load the operands into the cache), then timed calls. A contender's time is the
median over rounds of the median over a block's calls.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable

ROUNDS = 5
BLOCK_SECONDS = 0.02
CAP_SECONDS = 0.6  # a slow contender gets the rounds that fit, or one call
PAUSE_SECONDS = 0.003


@dataclasses.dataclass(frozen=True)
class Timing:
    """seconds: the median; spread: (slowest - fastest round) / median; calls: timed ones."""

    seconds: float
    spread: float
    calls: int
    capped: bool


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _block(call: Callable[[], object], guess: float) -> list[float]:
    """Times the calls of one block; `guess` is the approximate time of a call."""
    time.sleep(PAUSE_SECONDS)
    for _ in range(max(1, min(3, int(0.002 / guess)))):
        call()
    repeats = max(1, min(100, int(BLOCK_SECONDS / guess)))
    return [_once(call) for _ in range(repeats)]


def measure(contenders: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Times zero-argument callables that return when their result is ready.

    Each must have run once before, so that nothing is left to compile.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    spent = dict.fromkeys(contenders, 0.0)
    calls = dict.fromkeys(contenders, 0)
    guess = {name: max(_once(call), 1e-7) for name, call in contenders.items()}
    for name, call in contenders.items():
        if CAP_SECONDS < guess[name] < 5 * CAP_SECONDS:
            guess[name] = min(guess[name], _once(call))  # may have been slow by accident
        if guess[name] > CAP_SECONDS:
            samples[name], calls[name] = [guess[name]], 1
    order = list(contenders)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in order:
                if samples[name] and spent[name] + 2 * guess[name] > CAP_SECONDS:
                    continue
                start = time.perf_counter()
                times = _block(contenders[name], guess[name])
                spent[name] += time.perf_counter() - start
                guess[name] = statistics.median(times)
                samples[name].append(guess[name])
                calls[name] += len(times)
            order = order[1:] + order[:1]
    finally:
        gc.enable()
    result = {}
    for name, found in samples.items():
        middle = statistics.median(found)
        spread = (max(found) - min(found)) / middle
        result[name] = Timing(middle, spread, calls[name], len(found) < rounds)
    return result
