"""How long a call takes on the device.

Kernels (`graph`): the calls are captured into a CUDA graph that goes round a set of operands larger
than the second-level cache, and events around replays of the graph give the time: no launch and
no host in it, the same for everyone whose calls can be put on a stream. Where capture fails, events
around the calls themselves (`events`).

Programs of JAX (`jax`) run on XLA's own streams, which graphs and events of ours do not reach. They
are called one after the other without waiting, round the same operands, and the wall clock is read
when the last is ready; dispatch is hidden where kernels take longer than it (some 20 us).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks.gpu.driver import Driver
from benchmarks.peers import common
from benchmarks.problems import ROOT
from sgap_jax.launch.cache import Cubin
from sgap_jax.launch.kernel_call import KernelCall

ROTATE_BYTES = 192 << 20  # three times the 60 MB of an H200
MOST_SETS = 256
ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Timed:
    """seconds of a call: the median; spread: (slowest - fastest round) / median."""

    seconds: float
    spread: float
    method: str


def _timed(rounds: list[float], calls: int, method: str) -> Timed:
    middle = statistics.median(rounds)
    return Timed(middle / calls, (max(rounds) - min(rounds)) / middle, method)


def of_program(call: Callable[[int], object], sets: int, least: float = 0.02) -> Timed:
    """A JAX program: call(i) dispatches it on set i and returns what to wait for."""
    jax.block_until_ready([call(i) for i in range(sets)])
    start = time.perf_counter()
    jax.block_until_ready(call(0))
    calls = int(max(sets, min(1000, least / max(time.perf_counter() - start, 1e-6))))
    rounds = []
    for _ in range(ROUNDS):
        start, last = time.perf_counter(), None
        for i in range(calls):
            last = call(i % sets)
        jax.block_until_ready(last)
        rounds.append(time.perf_counter() - start)
    return _timed(rounds, calls, "jax")


def to_torch(torch, array: np.ndarray):
    """The tensor of an array, on the host; NumPy's bfloat16 is unknown to torch but by its bits."""
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(torch, tensor) -> np.ndarray:
    """The array of a tensor; bfloat16 widened to float32, which holds all of its numbers."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


class Cuda:
    """The first GPU, through torch: memory, streams, events, graphs."""

    dry = False
    lost = ""  # what the device was lost by

    def __init__(self) -> None:
        self.torch = common.torch_module()
        self.torch.zeros(1, device="cuda")  # makes the context that JAX uses too current
        self._driver = Driver()

    def sets(self, moved: float) -> int:
        """Copies of the operands that it takes to keep them out of the cache."""
        return int(min(max(-(-ROTATE_BYTES // max(moved, 1)), 2), MOST_SETS))

    def put(self, array: np.ndarray):
        return to_torch(self.torch, array).to("cuda")

    tensor = put

    def poisoned(self, shape: tuple[int, ...], dtype: str):
        nan, kind = float("nan"), getattr(self.torch, dtype)
        return self.torch.full(shape, nan, dtype=kind, device="cuda")

    def get(self, tensor) -> np.ndarray:
        return from_torch(self.torch, tensor)

    def kernel(self, call: KernelCall, cubin: Cubin) -> Callable[[list, list], None]:
        """enqueue(inputs, outputs) of a launch, on the current stream."""
        launch, torch = self._driver.kernel(call, cubin), self.torch

        def enqueue(inputs: list, outputs: list) -> None:
            sizes = [(x.data_ptr(), x.numel() * x.element_size()) for x in outputs]
            stream = torch.cuda.current_stream().cuda_stream
            launch(stream, [x.data_ptr() for x in inputs], sizes)

        return enqueue

    def measure(self, enqueue: Callable[[int], object], sets: int) -> Timed:
        """enqueue(i) puts the i-th call on the current stream."""
        torch = self.torch

        def all_sets() -> None:
            for i in range(sets):
                enqueue(i)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as torch asks for before a capture
            all_sets()
            once = self._elapsed(all_sets)
            turns = int(min(max(1e-3 / max(once, 1e-7), 1), max(1024 // sets, 1)))

            def run() -> None:
                for _ in range(turns):
                    all_sets()

            graph, method = self._captured(run), "graph"
        torch.cuda.current_stream().wait_stream(side)
        if graph is None:
            method = "events"
        else:
            run = graph.replay
        run()
        return _timed([self._elapsed(run) for _ in range(ROUNDS)], turns * sets, method)

    def _captured(self, run: Callable[[], None]):
        """A graph of what `run` enqueues; None where it cannot be captured: it waits, say.

        torch.cuda.graph would collect garbage at each capture, which takes longer than all else.
        """
        graph = self.torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            run()
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            self.torch.cuda.synchronize()
            return None
        return graph

    def _elapsed(self, run: Callable[[], None]) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end)

    def check(self) -> None:
        """Sets `lost` where the device answers no more: a kernel's fault ends all calls to come."""
        try:
            self.torch.cuda.synchronize()
        except RuntimeError as error:
            self.lost = self.lost or str(error).splitlines()[0]

    def bandwidth(self, nbytes: int = 2 << 30) -> float:
        """Bytes per second of a copy, read and written ones counted."""
        source = self.torch.zeros(nbytes // 4, device="cuda")
        copies = [self.torch.empty_like(source)]
        timed = self.measure(lambda i: copies[i].copy_(source), 1)
        return 2 * nbytes / timed.seconds


class DryRun:
    """NumPy and the emulator in place of a GPU: runs the benchmarks' code, measures nothing."""

    dry = True
    lost = ""

    def __init__(self) -> None:
        sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
        from emulated_launch import emulate

        self._emulate = emulate

    def sets(self, moved: float) -> int:
        return 2

    @functools.cached_property
    def torch(self):
        return common.torch_module()

    def put(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def tensor(self, array: np.ndarray):
        return self.torch.from_numpy(np.array(array))

    def poisoned(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.full(shape, np.nan, dtype)

    def get(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array)

    def kernel(self, call: KernelCall, cubin: Cubin) -> Callable[[list, list], None]:
        def enqueue(inputs: list, outputs: list) -> None:
            results = self._emulate(call, inputs, [(x.shape, x.dtype) for x in outputs])
            for output, result in zip(outputs, results, strict=True):
                output[...] = result

        return enqueue

    def measure(self, enqueue: Callable[[int], object], sets: int) -> Timed:
        start = time.perf_counter()
        for i in range(sets):
            enqueue(i)
        return Timed((time.perf_counter() - start) / sets, 0.0, "dry")

    def check(self) -> None:
        pass

    def bandwidth(self) -> float:
        return 1e10
