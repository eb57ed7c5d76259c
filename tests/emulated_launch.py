"""A KernelCall on the emulator: what the launch path does on a GPU, on NumPy arrays."""

import dataclasses
import functools
import os
import random

import numpy as np
from cuda_sources import ptx
from emulator import Memory, Program

from sgap_jax import legal_points


@functools.cache
def program(source, arch):
    return Program(ptx(source, arch))


def emulate(call, inputs, outputs, arch="compute_90"):
    """The outputs, as `outputs` (shape, dtype) say, of one launch.

    Those that are not zeroed start as junk, NaN in every float type: a kernel must write them all.
    """
    memory = Memory()
    module = program(call.source, arch)
    results = [
        np.zeros(shape, dtype)
        if i in call.zero
        else np.full(np.prod(shape) * np.dtype(dtype).itemsize, 0xFF, np.uint8)
        .view(dtype)
        .reshape(shape)
        for i, (shape, dtype) in enumerate(outputs)
    ]
    pointers = [memory.put(np.asarray(array)) for array in (*inputs, *results)]
    (entry,) = module.entries
    arguments = [*pointers, *call.scalars]
    module.run(entry, call.grid, call.block, arguments, memory, shared_bytes=call.shared_bytes)
    return [
        memory.get(address, like)
        for address, like in zip(pointers[len(inputs) :], results, strict=True)
    ]


@functools.lru_cache
def points(problem):
    return tuple(legal_points(problem, tunables=True))


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Chooses a legal point of each problem at random, the same ones for the same name.

    SGAP_SAMPLE_SEED gives others. What is chosen is printed: pytest shows it where a test fails.
    """

    name: str

    def __call__(self, problem):
        # One point for A and for A^T stored the other way round: they agree to the bit.
        problem = dataclasses.replace(problem, permuted=False)
        seed = os.environ.get("SGAP_SAMPLE_SEED", "0")
        point = random.Random(f"{seed} {self.name} {problem}").choice(points(problem))
        print(f"sampled for {problem}: {point}")
        return point
