"""Measures how long a call takes on the device.

Kernels (`graph`): the calls are captured into a CUDA graph that rotates over operand sets larger
together than the second-level cache, and events around replays of the graph give the time. It
includes no launch and no host time, and is measured equally for all contenders whose calls can be
put on a stream. If capture fails, events are put around the calls themselves (`events`).

JAX programs (`jax`) run on XLA's own streams, where we can record neither graphs nor events. They
are called one after the other without waiting, rotating over the same operands, and the wall clock
is read when the last is ready; dispatch is hidden if kernels take longer than it does (some 20 us).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from benchmarks.peers import common
from benchmarks.problems import ROOT
from sgap_jax.launch.cache import Cubin
from sgap_jax.launch.driver import Driver
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
    """Times a JAX program: call(i) dispatches it on set i and returns what to wait for."""
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
    """An array as a torch tensor on the host; NumPy's bfloat16 is passed by its bits."""
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(torch, tensor) -> np.ndarray:
    """A torch tensor as an array; bfloat16 is widened to float32, which holds it exactly."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


class Cuda:
    """The first GPU, through torch: memory, streams, events, graphs."""

    dry = False
    lost = ""  # why the device was lost

    def __init__(self) -> None:
        self.torch = common.torch_module()
        self.torch.zeros(1, device="cuda")  # makes the context that JAX also uses current
        self._driver = Driver()

    def sets(self, moved: float) -> int:
        """The number of operand copies needed to exceed the cache."""
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
        """enqueue(inputs, outputs), which launches a kernel on the current stream."""
        launch, torch = self._driver.kernel(call, cubin), self.torch

        def enqueue(inputs: list, outputs: list) -> None:
            sizes = [(x.data_ptr(), x.numel() * x.element_size()) for x in outputs]
            stream = torch.cuda.current_stream().cuda_stream
            launch(stream, [x.data_ptr() for x in inputs], sizes)

        return enqueue

    def measure(self, enqueue: Callable[[int], object], sets: int) -> Timed:
        """Times enqueue(i), which puts the i-th call on the current stream."""

        def all_sets() -> None:
            for i in range(sets):
                enqueue(i)

        with contextlib.ExitStack() as until_measured:
            with self._side_stream():
                all_sets()
                once = self._elapsed(all_sets)
                turns = int(min(max(1e-3 / max(once, 1e-7), 1), max(1024 // sets, 1)))

                def run() -> None:
                    for _ in range(turns):
                        all_sets()

                replay = until_measured.enter_context(self._captured(run))
            method = "events" if replay is None else "graph"
            run = replay or run
            run()
            rounds = [self._elapsed(run) for _ in range(ROUNDS)]
        return _timed(rounds, turns * sets, method)

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """The stream that can be captured: torch does not capture the one that is current."""
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream().wait_stream(side)

    @contextlib.contextmanager
    def _captured(self, run: Callable[[], None]) -> Iterator[Callable[[], None] | None]:
        """What replays a graph of what `run` enqueues; None if it cannot be captured, for example
        because it waits.

        Not torch.cuda.graph, which collects garbage at each capture: that takes longer than all
        else.
        """
        graph = self.torch.cuda.CUDAGraph()
        replay = graph.replay
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            run()
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            self._wait()
            replay = None
        yield replay

    def _elapsed(self, run: Callable[[], None]) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end)

    def check(self) -> None:
        """Sets `lost` if the device no longer responds: after a kernel's fault all later calls
        fail."""
        try:
            self._wait()
        except RuntimeError as error:
            self.lost = self.lost or str(error).splitlines()[0]

    def _wait(self) -> None:
        self.torch.cuda.synchronize()

    def bandwidth(self, nbytes: int = 2 << 30) -> float:
        """Bytes per second of a copy, counting reads and writes."""
        source = self.torch.zeros(nbytes // 4, device="cuda")
        copies = [self.torch.empty_like(source)]
        timed = self.measure(lambda i: copies[i].copy_(source), 1)
        return 2 * nbytes / timed.seconds


class Bytes:
    """An array in a GPU's memory, which is released with it."""

    def __init__(self, driver: Driver, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        self._driver, self.shape, self.dtype = driver, array.shape, array.dtype
        self.nbytes, self.address = array.nbytes, driver.allocate(array.nbytes)
        driver.write(self.address, array)

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the device may be lost
            self._driver.release(self.address)


class WithoutTorch(Cuda):
    """As `Cuda`, through the driver alone, where torch is not installed or sees no GPU: for our own
    kernels and programs of JAX. Peers that need torch have a row that says so."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._driver = Driver(library)
        self._driver.start()
        self._driver.enter(0)
        self._stream = self._handle("cuStreamCreate", 1)  # does not wait for the default stream
        self._events = [self._handle("cuEventCreate", 0) for _ in range(2)]

    def _handle(self, name: str, *arguments: object) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._driver.call(name, ctypes.byref(handle), *arguments)
        return handle

    @property
    def torch(self):
        raise ImportError("no torch here that sees the GPU")

    def put(self, array: np.ndarray) -> Bytes:
        return Bytes(self._driver, array)

    def tensor(self, array: np.ndarray):
        return self.torch.tensor(array)

    def poisoned(self, shape: tuple[int, ...], dtype: str) -> Bytes:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        filled = np.full(size, 0xFF, np.uint8)  # NaN in every float type
        return self.put(filled.view(dtype).reshape(shape))

    def get(self, tensor: Bytes) -> np.ndarray:
        array = np.empty(tensor.shape, tensor.dtype)
        self._wait()
        self._driver.read(tensor.address, array)
        return array

    def kernel(self, call: KernelCall, cubin: Cubin) -> Callable[[list, list], None]:
        launch = self._driver.kernel(call, cubin)

        def enqueue(inputs: list, outputs: list) -> None:
            sizes = [(x.address, x.nbytes) for x in outputs]
            launch(self._stream.value, [x.address for x in inputs], sizes)

        return enqueue

    def _side_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the only stream is one of its own

    @contextlib.contextmanager
    def _captured(self, run: Callable[[], None]) -> Iterator[Callable[[], None] | None]:
        graph = ctypes.c_void_p()
        try:
            self._driver.call("cuStreamBeginCapture_v2", self._stream, 1)  # of this thread
            try:
                run()
            finally:
                self._driver.call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
            made = self._handle("cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))
        except RuntimeError:
            self._wait()
            yield None
            return
        self._driver.call("cuGraphDestroy", graph)
        yield functools.partial(self._driver.call, "cuGraphLaunch", made, self._stream)
        self._driver.call("cuGraphExecDestroy", made)

    def _elapsed(self, run: Callable[[], None]) -> float:
        start, end = self._events
        self._driver.call("cuEventRecord", start, self._stream)
        run()
        self._driver.call("cuEventRecord", end, self._stream)
        self._driver.call("cuEventSynchronize", end)
        milliseconds = ctypes.c_float()
        self._driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return 1e-3 * milliseconds.value

    def _wait(self) -> None:
        self._driver.wait()

    def bandwidth(self, nbytes: int = 2 << 30) -> float:
        nbytes = min(nbytes, self._driver.free_bytes() // 4)
        source, copy = (self._driver.allocate(nbytes) for _ in range(2))
        ends = ctypes.c_uint64(copy), ctypes.c_uint64(source)
        words = (*ends, ctypes.c_size_t(nbytes), self._stream)
        timed = self.measure(lambda i: self._driver.call("cuMemcpyDtoDAsync_v2", *words), 1)
        for address in (source, copy):
            self._driver.release(address)
        return 2 * nbytes / timed.seconds


def gpu() -> Cuda:
    """The first GPU, through torch where that is installed and sees it."""
    if importlib.util.find_spec("torch") is None or not common.torch_module().cuda.is_available():
        return WithoutTorch()
    return Cuda()


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
