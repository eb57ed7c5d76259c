"""Our kernels outside of JAX: the launch that an operation lowers to, for a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from benchmarks.problems import Unavailable
from sgap_jax import Schedule
from sgap_jax.launch import launch, nvrtc
from sgap_jax.launch.cache import Cubin
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.schedules.emulated import Emulated


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch, its operands on the host, and (shape, dtype) of its results."""

    call: KernelCall
    inputs: list[np.ndarray]
    outputs: list[tuple[tuple[int, ...], str]]


def launches_of(function: Callable[[Schedule], object]) -> list[Launch]:
    """The launches of function(schedule), recorded in place of the emulator; their results are
    zeros."""
    found: list[Launch] = []

    def record(call, inputs, outputs):
        names = [(tuple(shape), np.dtype(dtype).name) for shape, dtype in outputs]
        found.append(Launch(call, [np.asarray(x) for x in inputs], names))
        return [np.zeros(shape, dtype) for shape, dtype in outputs]

    with jax.default_device(jax.devices("cpu")[0]):
        jax.block_until_ready(function(Emulated(record)))
    return found


def launch_of(function: Callable[[Schedule], object]) -> Launch:
    """The single launch of function(schedule), as `launches_of`.

    Raises Unavailable where the operation has no CUDA kernel, or launches several.
    """
    found = launches_of(function)
    if len(found) != 1:
        raise Unavailable(f"{len(found)} launches of CUDA kernels, expected one")
    return found[0]


class Rotating:
    """A launch's operands on a device, in several copies."""

    def __init__(self, device, recorded: Launch, sets: int) -> None:
        self.device, self.sets = device, sets
        self._results = recorded.outputs
        self.inputs = [[device.put(x) for x in recorded.inputs] for _ in range(sets)]
        self.outputs: list[list] = []

    def run(self, call: KernelCall, cubin: Cubin) -> Callable[[int], None]:
        """call(i), which runs a kernel on set i; results start as NaN, so that none comes from
        another kernel."""
        enqueue = self.device.kernel(call, cubin)
        self.outputs = [
            [self.device.poisoned(*out) for out in self._results] for _ in range(self.sets)
        ]
        return lambda i: enqueue(self.inputs[i], self.outputs[i])

    def whole(self) -> np.ndarray:
        """The result of the first set."""
        return self.device.get(self.outputs[0][0])

    def result(self) -> np.ndarray:
        """The result of the first set without its batch axis."""
        return self.whole()[0]


def compiled(call: KernelCall, arch: str) -> Cubin:
    return launch.compile_call(call, nvrtc, arch)
