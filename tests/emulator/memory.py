"""Memory with validity flags per byte: device memory, shared memory of blocks, local memory of
threads."""

import math

import numpy as np

from .parse import Fault
from .values import UNSIGNED, WIDTHS

RED_ZONE = 256
ALL_SET = {width: UNSIGNED[width](int.from_bytes(b"\x01" * width, "little")) for width in UNSIGNED}


def align_up(value, alignment):
    return -(-value // alignment) * alignment


def all_flags(flags, positions, width):
    """Whether the `width` flags from each (aligned) position are all set; outside of the array none
    is."""
    part = min(width, 8)
    shift = part.bit_length() - 1
    words = flags.view(UNSIGNED[part])
    good = words.take(positions >> shift, mode="clip") == ALL_SET[part]
    for further in range(8, width, 8):
        good &= words.take((positions + further) >> shift, mode="clip") == ALL_SET[part]
    return good


class Space:
    """Bytes with flags: only `valid` bytes may be accessed, and only `written` ones may be read.

    The first and the last bytes are never valid, so that clipped positions are invalid.
    """

    def __init__(self, name, size, fill=0):
        size = align_up(size, 16)
        self.name = name
        self.bytes = np.full(size, fill, np.uint8)
        self.valid = np.zeros(size, np.bool_)
        self.written = None  # None: every valid byte may be read
        self.shadow = None

    def track_writes(self):
        self.written = np.zeros(len(self.bytes), np.bool_)

    def view(self, dtype):
        return self.bytes.view(dtype)

    def mark_written(self, positions, width):
        if self.written is not None:
            part = min(width, 8)
            words = self.written.view(UNSIGNED[part])
            for further in range(0, width, 8):
                words[(positions + further) >> (part.bit_length() - 1)] = ALL_SET[part]


class Memory:
    """Device memory: buffers at multiples of 256 bytes, with a red zone after each."""

    BASE = 1 << 20  # first address; null and small offsets from it are invalid

    def __init__(self, capacity=1 << 20):
        self.space = Space("global", capacity)
        self._top = RED_ZONE
        self._variables = {}

    def put(self, array):
        """Copies an array to the device and returns its address."""
        data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        start, end = self._top, self._top + len(data)
        self._reserve(end + 2 * RED_ZONE)
        self.space.bytes[start:end] = data
        self.space.valid[start:end] = True
        self._top = align_up(end + RED_ZONE, RED_ZONE)
        return self.BASE + start

    def get(self, address, like):
        """The array at `address`, with the shape and dtype of `like`."""
        dtype = np.dtype(like.dtype)
        nbytes = dtype.itemsize * math.prod(like.shape)
        start = address - self.BASE
        end = start + nbytes
        if start < 0 or not self.space.valid[start:end].all() or end > len(self.space.valid):
            raise Fault(f"no buffer of {nbytes} bytes at address {address:#x}")
        return self.space.bytes[start:end].copy().view(dtype).reshape(like.shape)

    def variables_of(self, program):
        """Addresses of a module's .global and .const variables; they live as long as the memory."""
        if program not in self._variables:
            self._variables[program] = {
                variable.name: self.put(initial_bytes(variable))
                for variable in program.variables
                if variable.space in ("global", "const")
            }
        return self._variables[program]

    def _reserve(self, size):
        capacity = len(self.space.bytes)
        if size > capacity:
            grown = Space("global", max(size, 2 * capacity))
            grown.bytes[:capacity] = self.space.bytes
            grown.valid[:capacity] = self.space.valid
            self.space = grown


def initial_bytes(variable):
    width = WIDTHS[variable.kind]
    words = np.zeros(variable.count, UNSIGNED[width])
    for i, literal in enumerate(variable.initial):
        words[i] = literal.bits & ((1 << 8 * width) - 1)
    return words


class SharedLayout:
    """Offsets of the shared arrays of one block, each followed by a red zone."""

    START = 1024  # a null shared pointer is out of bounds

    def __init__(self, variables, dynamic_bytes):
        self.offsets, self.extents, top = {}, [], self.START
        dynamic = [variable for variable in variables if variable.count == 0]
        for variable in variables:
            if variable.count:
                top = align_up(top, variable.align)
                self.offsets[variable.name] = top
                self.extents.append((top, top + variable.nbytes))
                top += variable.nbytes + RED_ZONE
        top = align_up(top, max([16, *(variable.align for variable in dynamic)]))
        self.offsets.update({variable.name: top for variable in dynamic})
        self.extents.append((top, top + dynamic_bytes))
        self.stride = align_up(top + dynamic_bytes + RED_ZONE, 1024)

    def allocate(self, blocks):
        space = Space("shared", blocks * self.stride, fill=0xDE)
        valid = space.valid.reshape(blocks, self.stride)
        for start, end in self.extents:
            valid[:, start:end] = True
        space.track_writes()
        return space


class LocalLayout:
    """Offsets of the .local arrays of one thread."""

    START = 64

    def __init__(self, variables):
        self.offsets, self.extents, top = {}, [], self.START
        for variable in variables:
            top = align_up(top, max(variable.align, 16))
            self.offsets[variable.name] = top
            self.extents.append((top, top + variable.nbytes))
            top += variable.nbytes + 16
        self.stride = align_up(top + 16, 64)

    def allocate(self, lanes):
        space = Space("local", lanes * self.stride, fill=0xDE)
        valid = space.valid.reshape(lanes, self.stride)
        for start, end in self.extents:
            valid[:, start:end] = True
        space.track_writes()
        return space
