"""Counts of the requests to global memory of a launch, and of the bytes that caches would pass on.

    traffic = Traffic()
    program.run("kernel", grid, block, arguments, memory, traffic=traffic)
    traffic.load.sectors / traffic.load.requests
    replay(traffic, multiprocessors=132, resident=8, l1_bytes=200 << 10, l2_bytes=50 << 20)

A request is one execution of a memory instruction by a warp. It costs the 32-byte sectors that its
lanes touch, each once, and lookups of the 128-byte lines that these lie in; lanes that are switched
off cost nothing. Requests that are served elsewhere (shared, local, parameters) are not counted.
wmma.load and wmma.store of global memory are refused: their fragments have a layout of the
emulator's own.

Lanes of a warp that have diverged make requests of their own, as they do here: the lanes at the
lowest program counter run first. A GPU may join them earlier or later.
"""

import collections
from dataclasses import astuple, dataclass, fields

import numpy as np

SECTOR, LINE = 32, 128
KINDS = ("load", "store", "atomic")
# Loads that L2 serves, not L1 (PTX ISA, cache operators; strong loads of a wider scope than the
# block).
PAST_L1 = ("cg", "cv", "volatile", "relaxed", "acquire", "mmio", "L1::no_allocate")


@dataclass
class Count:
    """Requests, the sectors and lines that they touch, lanes at work, bytes that these ask for."""

    requests: int = 0
    sectors: int = 0
    lines: int = 0
    lanes: int = 0
    bytes: int = 0

    def __add__(self, other):
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Count(*(one + two for one, two in pairs))

    def per_request(self):
        """{field: mean for a request}; zeros if there was none."""
        most = max(self.requests, 1)
        return {field.name: getattr(self, field.name) / most for field in fields(self)[1:]}


class Traffic:
    """The requests of one launch.

    Attributes:
      instructions: {(kind, instruction): Count}, where kind is one of KINDS.
      load, store, atomic: the sums of these; cp.async from global memory is a load.
    """

    def __init__(self):
        self.instructions = collections.defaultdict(Count)
        self._turns = np.zeros(0, np.int64)  # requests of each warp until now
        self._warps_of_block = 1
        self._parts = []

    def start(self, launch):
        self._warps_of_block = launch.padded // 32
        self._turns = np.zeros(int(np.prod(launch.grid)) * self._warps_of_block, np.int64)

    def record(self, instruction, warps, positions, width):
        """One instruction: the warp of each lane (counted through the launch), and the position
        that it accesses `width` bytes at, a multiple of `width`."""
        if not len(positions):
            return
        kind = kind_of(instruction)
        touched = np.unique(warps << 40 | positions >> 5)  # no access spans two sectors
        lines = touched >> 2
        first = np.flatnonzero(np.r_[True, lines[1:] != lines[:-1]])
        masks = np.bitwise_or.reduceat(1 << (touched & 3), first)
        warp = lines[first] >> 38
        requesting = np.unique(warp)
        self.instructions[kind, str(instruction)] += Count(
            requesting.size, touched.size, first.size, positions.size, positions.size * width
        )
        past = any(modifier in PAST_L1 for modifier in instruction.modifiers)
        how = KINDS.index(kind) if not (past and kind == "load") else len(KINDS)
        turn = self._turns[warp]
        self._turns[requesting] += 1
        line = lines[first] & ((1 << 38) - 1)
        self._parts.append((warp, turn, line, masks, np.full(warp.size, how)))

    def _sum(self, kind):
        found = (count for (of, _), count in self.instructions.items() if of == kind)
        return sum(found, Count())

    @property
    def load(self):
        return self._sum("load")

    @property
    def store(self):
        return self._sum("store")

    @property
    def atomic(self):
        return self._sum("atomic")

    @property
    def all(self):
        return sum(self.instructions.values(), Count())

    def stream(self):
        """Arrays with an element for each line of each request: (block, warp, turn, line, mask of
        its sectors, how). `turn` counts the requests of a warp; `how` is a position in KINDS, or
        len(KINDS) for a load past L1."""
        parts = zip(*self._parts, strict=True) if self._parts else [[np.zeros(0, np.int64)]] * 5
        warp, turn, line, masks, how = (np.concatenate(list(part)) for part in parts)
        return warp // self._warps_of_block, warp, turn, line, masks, how


def kind_of(instruction):
    if instruction.opcode in ("atom", "red"):
        return "atomic"
    if instruction.opcode == "wmma":
        raise NotImplementedError(
            f"requests of a fragment, whose layout is not known: {instruction}"
        )
    return "store" if instruction.opcode == "st" else "load"


class Cache:
    """Lines of 128 bytes with a valid bit for each sector; fully associative, the line that was
    used longest ago goes first."""

    def __init__(self, nbytes):
        self._most, self._lines = nbytes // LINE, collections.OrderedDict()
        self._dirty = {}
        self.written_back = 0  # sectors

    def read(self, line, sectors):
        """The sectors of a line that are missing; they are there afterwards."""
        present = self._lines.get(line, 0)
        if present:
            self._lines.move_to_end(line)
        if self._most:
            self._lines[line] = present | sectors
            self._evict()
        return sectors & ~present

    def write(self, line, sectors):
        """Keeps written sectors until they are evicted."""
        self.read(line, sectors)
        self._dirty[line] = self._dirty.get(line, 0) | sectors
        if line not in self._lines:
            self._write_back(line)

    def flush(self):
        for line in list(self._dirty):
            self._write_back(line)

    def _evict(self):
        while len(self._lines) > self._most:
            line, _ = self._lines.popitem(last=False)
            self._write_back(line)

    def _write_back(self, line):
        self.written_back += self._dirty.pop(line, 0).bit_count()


@dataclass(frozen=True)
class Passed:
    """Bytes that each cache passes on: L1s to L2, and L2 to the memory."""

    l2_read: int
    l2_written: int
    memory_read: int
    memory_written: int


def replay(traffic, *, multiprocessors, resident, l1_bytes, l2_bytes):
    """Runs the requests of a launch through an L1 for each multiprocessor and one L2.

    Block b runs on multiprocessor b % multiprocessors. Each runs `resident` blocks at a time and
    then the next ones; the warps of these blocks take turns, a request each. Caches begin empty.

    Both caches are as `Cache` says. An L1 serves loads but those past it (PAST_L1); stores and
    atomics go to L2 and leave it as it is. L2 keeps what is written and writes it back when it
    is evicted or at the end, whole sectors; an atomic reads first.
    """
    block, warp, turn, line, masks, how = traffic.stream()
    wave = block // (multiprocessors * resident)
    order = np.lexsort((line, warp, turn, wave))
    places = (block % multiprocessors)[order].tolist()
    sequence = zip(places, *(x[order].tolist() for x in (line, masks, how)), strict=True)
    l1s = collections.defaultdict(lambda: Cache(l1_bytes))
    l2, read, written, filled = Cache(l2_bytes), 0, 0, 0
    for place, line, sectors, kind in sequence:
        if kind == KINDS.index("store"):
            written += sectors.bit_count()
            l2.write(line, sectors)
        elif kind == KINDS.index("atomic"):
            written += sectors.bit_count()
            filled += l2.read(line, sectors).bit_count()
            l2.write(line, sectors)
        else:
            missing = l1s[place].read(line, sectors) if kind < len(KINDS) else sectors
            if missing:
                read += missing.bit_count()
                filled += l2.read(line, missing).bit_count()
    l2.flush()
    return Passed(*(SECTOR * n for n in (read, written, filled, l2.written_back)))
