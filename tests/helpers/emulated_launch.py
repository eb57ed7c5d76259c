"""Runs a KernelCall on the emulator, as the launch path does on a GPU, on NumPy arrays."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import random
from fractions import Fraction

import ml_dtypes
import numpy as np
from cuda_sources import ptx
from emulator import Memory, Program
from result_cache import cached, emulator_code

from sgap_jax import AttentionTile, ScheduleError, Unfused, choose_schedule, legal_points
from sgap_jax.compiler.cuda.print_cuda import initial_values, padded_sizes

program = functools.cache(Program)


def emulate(call, inputs, outputs, arch="compute_90", **run):
    """Returns the outputs, of the (shape, dtype) in `outputs`, of one launch; `run` goes to
    Program.run.

    Outputs that are not zeroed start as junk, NaN in every float type: a kernel must write all of
    them. An output that aliases an operand has that operand's contents and address.
    """
    given = [np.asarray(array) for array in inputs]
    code = ptx(call.source, arch)
    if run:
        return _launch(code, call, given, outputs, **run)
    described = [(array.shape, str(array.dtype)) for array in given]
    launch = (call.grid, call.block, call.scalars, call.shared_bytes, call.zero, call.in_place)
    outputs = [(tuple(shape), np.dtype(dtype)) for shape, dtype in outputs]
    question = repr((launch, described, [(shape, str(dtype)) for shape, dtype in outputs]))
    parts = ("emulated", np.__version__, emulator_code(), code, question)
    return cached(
        (*parts, *(array.tobytes() for array in given)),
        lambda: _launch(code, call, given, outputs),
    )


def _launch(code, call, given, outputs, **run):
    memory, pointers, results = placed(call, given, outputs)
    module = program(code)
    (entry,) = module.entries
    arguments = [*pointers, *call.scalars]
    run["shared_bytes"] = call.shared_bytes
    module.run(entry, call.grid, call.block, arguments, memory, **run)
    return [
        memory.get(address, like)
        for address, like in zip(pointers[len(given) :], results, strict=True)
    ]


def placed(call, given, outputs):
    """A memory with the operands and the initial results of a call, their addresses in the order of
    the arguments, and the initial results."""
    memory = Memory()
    results = [
        np.zeros(shape, dtype)
        if i in call.zero
        else np.full(math.prod(shape) * np.dtype(dtype).itemsize, 0xFF, np.uint8)
        .view(dtype)
        .reshape(shape)
        for i, (shape, dtype) in enumerate(outputs)
    ]
    pointers = [memory.put(array) for array in (*given, *results)]
    for operand, result in call.in_place:
        assert given[operand].shape == results[result].shape
        pointers[len(given) + result] = pointers[operand]
    return memory, pointers, results


def starts(function):
    """The initial contents of a compiled function's outputs, as operands of its launch."""
    room = dict(zip(function.outputs, padded_sizes(function), strict=True))
    return [
        np.full(room[array], fill, getattr(ml_dtypes, array.dtype, array.dtype))
        for array, fill in initial_values(function).items()
    ]


@functools.lru_cache
def points(problem):
    return tuple(legal_points(problem))


def tuned(point, problem, rng):
    """The point with random tunables of Sgap, section 7.2, drawn until they are legal for the
    problem."""
    while True:
        tunables = {
            "block_size": rng.choice((128, 256, 512)),
            "tile_size": rng.choice((None, 1, 2, 4, 8, 16, 32)),
            "worker_dim_r": Fraction(1, rng.choice((1, 2, 4))),
        }
        try:
            drawn = dataclasses.replace(point, **tunables)
            drawn.check(problem)
            return drawn
        except ScheduleError:
            continue


def attention_tiles(problem):
    """The attention schedules that are legal for a problem."""
    yield Unfused()
    for lanes, share, octet in itertools.product((8, 16, 32), (1, 2, 4), (False, True)):
        with contextlib.suppress(NotImplementedError):
            tile = AttentionTile(lanes, share, octet)
            tile.check(problem)
            yield tile


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Chooses a random legal point for each problem; the choice depends on `name` and the seed
    only.

    SGAP_SAMPLE_SEED changes the seed. The choice is printed: pytest shows it where a test fails.
    """

    name: str

    def __call__(self, problem):
        # The same point for A and A^T, stored by rows and by columns: their results must be equal
        # to the bit.
        shape = tuple(sorted(problem.shape))
        asked = dataclasses.replace(problem, permuted=False, shape=shape, rows=None)
        seed = os.environ.get("SGAP_SAMPLE_SEED", "0")
        rng = random.Random(f"{seed} {self.name} {asked}")
        if problem.op == "attention":
            point = rng.choice(list(attention_tiles(problem)))
        elif problem.vector_length is not None and rng.random() < 0.5:
            point = choose_schedule(problem)  # a tile of column vectors, where there is one
        else:
            point = tuned(rng.choice(points(problem)), problem, rng)
        print(f"sampled for {problem}: {point}")
        return point


class Counted:
    """The emulator with a record of the kernels that it ran, and of the threads of their blocks;
    blocks in a random order with a seed."""

    def __init__(self, seed=None):
        self.kernels, self.threads, self.seed = [], [], seed

    def __call__(self, call, inputs, outputs):
        self.kernels.append(call.kernel)
        self.threads.append(call.block[0])
        if self.seed is None:
            return emulate(call, inputs, outputs)
        order = np.random.default_rng(self.seed).permutation(np.prod(call.grid))
        return emulate(call, inputs, outputs, order=order.tolist())
