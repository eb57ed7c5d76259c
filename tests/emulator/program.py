"""The public interface: a parsed module, and its launches."""

from array import array as int_list

import numpy as np

from .access import granules_of
from .blocks import Blocks
from .execute import execute
from .memory import LocalLayout, SharedLayout, align_up
from .parse import Fault, parse_module
from .shadow import Shadow
from .values import bits, is_float

BLOCKS_AT_ONCE = 64
LANES_AT_ONCE = 1 << 16
STEP_LIMIT = 20_000_000
GRID_LIMIT = (2**31 - 1, 65535, 65535)
BLOCK_LIMIT = (1024, 1024, 64)
SHARED_LIMIT = 227 << 10  # bytes of a block on sm_90, static and dynamic


class Program:
    """A PTX module. `entries` are the names of its kernels."""

    def __init__(self, ptx):
        self._entries, self.variables = parse_module(ptx)
        self.entries = tuple(self._entries)

    def shared_bytes(self, entry):
        """Bytes of static shared memory that a block of a kernel has."""
        variables = [*self.variables, *self._entries[entry].variables]
        return sum(variable.nbytes for variable in variables if variable.space == "shared")

    def run(
        self,
        entry,
        grid,
        block,
        arguments,
        memory,
        shared_bytes=0,
        step_limit=STEP_LIMIT,
        order=None,
        blocks=None,
        traffic=None,
        timeline=None,
    ):
        """Runs a kernel to completion.

        `arguments` are scalars (addresses are integers) in the order of the parameters, or bytes
        for structures by value. `order`, a permutation of the blocks (counted along x first), runs
        them one after another; by default up to 64 advance together, in order. `blocks`, ascending
        numbers of some of them, runs these alone. `traffic`, a new `Traffic`, counts the requests
        to global memory; `timeline`, a new `Timeline`, instructions and cycles.

        Raises Fault if the kernel makes an error, ValueError for an invalid launch,
        NotImplementedError for PTX that the emulator does not know.
        """
        if entry not in self._entries:
            raise ValueError(f"no entry {entry!r}; this module has {', '.join(self.entries)}")
        launch = Launch(self, self._entries[entry], extents(grid), extents(block), shared_bytes)
        launch.prepare(arguments, memory, step_limit)
        launch.traffic, launch.timeline = traffic, timeline
        for counter in filter(None, (traffic, timeline)):
            counter.start(launch)
        total = int(np.prod(launch.grid))
        together = max(1, min(BLOCKS_AT_ONCE, LANES_AT_ONCE // launch.padded))
        if order is not None:
            if blocks is not None:
                raise ValueError(f"{entry}: either an order of all blocks or some blocks")
            if sorted(order) != list(range(total)):
                raise ValueError(f"{entry}: order must be a permutation of {total} blocks")
            together = 1
        numbers = np.asarray(
            order if order is not None else range(total) if blocks is None else blocks
        )
        if order is None and (np.diff(numbers, prepend=-1, append=total) < 1).any():
            raise ValueError(f"{entry}: blocks must be ascending numbers of {total} blocks")
        with np.errstate(all="ignore"):
            for first in range(0, len(numbers), together):
                blocks = Blocks(launch, numbers[first : first + together])
                execute(blocks)
                if timeline is not None:
                    blocks.clock.finish(numbers[first : first + together])


def extents(value):
    value = tuple(int(extent) for extent in np.atleast_1d(value))
    if not 1 <= len(value) <= 3 or min(value) < 1:
        raise ValueError(f"grid and block are 1 to 3 positive extents, got {value}")
    return value + (1,) * (3 - len(value))


class Launch:
    """The state that all blocks of a launch share."""

    def __init__(self, program, entry, grid, block, shared_bytes):
        self.program, self.entry, self.grid, self.block = program, entry, grid, block
        self.threads = block[0] * block[1] * block[2]
        self.padded = align_up(self.threads, 32)
        self.shared_bytes = shared_bytes
        for name, sizes, most in (("grid", grid, GRID_LIMIT), ("block", block, BLOCK_LIMIT)):
            if any(size > by for size, by in zip(sizes, most, strict=True)):
                raise ValueError(f"{entry.name}: a {name} of {sizes}, at most {most}")
        limit = entry.max_threads or 1024
        if self.threads > limit:
            raise ValueError(f"{entry.name}: {self.threads} threads a block, at most {limit}")
        variables = [*program.variables, *entry.variables]
        shared = [variable for variable in variables if variable.space == "shared"]
        local = [variable for variable in variables if variable.space == "local"]
        if sum(variable.nbytes for variable in shared) + shared_bytes > SHARED_LIMIT:
            raise ValueError(f"{entry.name}: more than {SHARED_LIMIT} bytes of shared memory")
        self.shared_layout = SharedLayout(shared, shared_bytes)
        self.local_layout = LocalLayout(local)
        self.granules, self.tables = granules_of(entry), {}
        self.traffic = self.timeline = None

    def prepare(self, arguments, memory, step_limit):
        self.memory, self.step_limit = memory, step_limit
        self.parameters, offsets = pack_arguments(self.entry, arguments)
        self.addresses = {
            **memory.variables_of(self.program),
            **self.shared_layout.offsets,
            **self.local_layout.offsets,
            **offsets,
        }
        size, granule = len(memory.space.bytes), self.granules["global"]
        memory.space.shadow = Shadow(size, granule)
        self.history = int_list("i", [0])  # the instruction of each step; steps count from 1

    @property
    def now(self):
        return len(self.history) - 1

    def tick(self, pc):
        self.history.append(pc)
        if len(self.history) > self.step_limit:
            instruction = self.entry.instructions[pc]
            raise Fault(f"{self.entry.name}: more than {self.step_limit} steps, at {instruction}")

    def thread_coordinates(self, index):
        x, y, _ = self.block
        return index % x, index // x % y, index // (x * y)

    def block_coordinates(self, index):
        x, y, _ = self.grid
        return index % x, index // x % y, index // (x * y)

    def describe(self, index):
        block, thread = divmod(index, self.padded)
        thread, block = self.thread_coordinates(thread), self.block_coordinates(block)
        return f"thread {thread} of block {block}"


def pack_arguments(entry, arguments):
    """Packs the arguments: (the parameters' bytes, the offset of each)."""
    if len(arguments) != len(entry.parameters):
        expected = [parameter.kind for parameter in entry.parameters]
        raise ValueError(f"{entry.name} takes {expected}, got {len(arguments)} arguments")
    packed, offsets = b"", {}
    for i, (parameter, value) in enumerate(zip(entry.parameters, arguments, strict=True)):
        packed += bytes(-len(packed) % max(parameter.align, 1))
        offsets[parameter.name] = len(packed)
        packed += argument_bytes(f"{entry.name}: argument {i}", parameter, value)
    return np.frombuffer(packed + bytes(16), np.uint8), offsets


def argument_bytes(where, parameter, value):
    if parameter.kind == "b8":
        data = value if isinstance(value, bytes) else np.asarray(value).tobytes()
        if len(data) != parameter.nbytes:
            raise ValueError(f"{where}: a structure of {parameter.nbytes} bytes, got {len(data)}")
        return data
    number = np.asarray(value)
    accepted = "iubf" if is_float(parameter.kind) else "iub"
    if number.shape != () or number.dtype.kind not in accepted:
        raise ValueError(f"{where}: a .{parameter.kind}, got {value!r}")
    number = float(number) if is_float(parameter.kind) else int(number)
    return bits(number, parameter.kind).tobytes()
