"""How many instructions the warps of a launch issue, and how long each block takes at least.

    timeline = Timeline()
    program.run("kernel", grid, block, arguments, memory, timeline=timeline)
    timeline.issued, timeline.cycles     # for each block

The time of a warp is that of its longest chain of results that need each other, as if it were alone
on the GPU: an instruction begins when its operands are there, and in a run of instructions without
a branch the order does not matter, since the compiler moves loads to the front. A branch waits for
its predicate, and for its turn: a warp issues one instruction a cycle. Barriers wait for the
slowest warp, and for what was stored before. A block takes as long as its slowest warp.

Every load from global memory takes the same time, that of a hit in L2. What is counted are PTX
instructions; `lines` says how often each line of the source ran, to count those of machine code.
"""

import collections
import math
import re
from dataclasses import dataclass

import numpy as np

from .access import space_of
from .parse import Address, Pair, Register, Vector


@dataclass(frozen=True)
class Latencies:
    """Cycles from the issue of an instruction to its result.

    Of arithmetic, special functions (MUFU), shared memory, shuffles and votes, one matrix
    instruction, global memory. The defaults are those of an H100, rounded: hits in L2 as measured
    by gpu-benches (gpu-latency/h100_pcie.txt), shared memory and matrices by Luo et al. (arXiv
    2402.13499), the others those of Volta by Jia et al. (arXiv 1804.06826), taken as unchanged.
    """

    arithmetic: int = 4
    special: int = 18
    shared: int = 29
    shuffle: int = 23
    matrix: int = 33
    memory: int = 265


SPECIAL = ("sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh", "div")
CROSS_LANE = ("shfl", "vote", "match", "redux", "movmatrix")
MATRIX = ("mma", "wmma")
SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
NO_WAIT = ("st", "red", "bra", "brx", "ret", "exit", "prefetch", "prefetchu", "membar", "fence")


class Timeline:
    """Instructions and cycles of one launch.

    Attributes:
      issued: instructions that the warps of each block issued.
      cycles: of each block; NaN for one that did not run.
      executions: {instruction's number: how often a warp issued it}.
    """

    def __init__(self, latencies=None):
        self.latencies = latencies or Latencies()
        self.executions = collections.Counter()
        self.issued = self.cycles = None
        self._entry = None

    def start(self, launch):
        total = int(np.prod(launch.grid))
        self.issued, self.cycles = np.zeros(total, np.int64), np.full(total, np.nan)
        self._entry, self._plans = launch.entry, {}

    def tensor_operations(self):
        """{type of the operands: multiply-adds of tensor cores}."""
        found = collections.Counter()
        for pc, count in self.executions.items():
            instruction = self._entry.instructions[pc]
            shape = next(filter(None, map(SHAPE.fullmatch, instruction.modifiers)), None)
            if instruction.opcode in MATRIX and "load" not in instruction.modifiers and shape:
                kinds = [kind for kind in instruction.types if kind != "f32"] or ["f16"]
                # Volta's: a warp computes four such products.
                each = 4 if (shape[0], kinds[0]) == ("m8n8k4", "f16") else 1
                found[kinds[0]] += each * count * math.prod(map(int, shape.groups()))
        return dict(found)

    def lines(self):
        """{"file:line": (PTX instructions, times that a warp issued one of these)}, of a line with
        all its inlined copies, as a disassembler names it."""
        found = {}
        for pc, instruction in enumerate(self._entry.instructions):
            line = instruction.source.split(", inlined at")[0]
            many, times = found.get(line, (0, 0))
            found[line] = many + 1, times + self.executions[pc]
        return found

    def begin(self, blocks):
        """The clock of blocks that begin to run."""
        return Clock(blocks, self)

    def plan(self, pc):
        """(operands, results, cycles) of an instruction, operands and results by name."""
        if pc not in self._plans:
            instruction = self._entry.instructions[pc]
            self._plans[pc] = plan_of(instruction, self.latencies)
        return self._plans[pc]


def plan_of(instruction, latencies):
    opcode, operands = instruction.opcode, instruction.operands
    barrier = opcode in ("bar", "barrier") and "red" not in instruction.modifiers
    none = opcode in NO_WAIT or opcode == "cp" or barrier
    results = () if none or isinstance(operands[0], Address) else operands[:1]
    reads = [*operands[len(results) :], *filter(None, [instruction.guard])]
    return registers(reads), registers(results), cycles_of(instruction, latencies)


def registers(operands):
    found = []
    for operand in operands:
        if isinstance(operand, Register):
            found.append(operand.name)
        elif isinstance(operand, Address):
            found += registers([operand.base])
        elif isinstance(operand, Vector | Pair):
            found += registers(operand.parts)
    return tuple(dict.fromkeys(found))


def cycles_of(instruction, latencies):
    opcode, space = instruction.opcode, space_of(instruction)
    if opcode == "cp":
        return latencies.memory
    if opcode in ("ld", "atom", "ldmatrix") or "load" in instruction.modifiers:
        if space in ("shared", "local"):
            return latencies.shared
        return 0 if space in ("param", "const") else latencies.memory
    if opcode in MATRIX:
        return 1 if "store" in instruction.modifiers else latencies.matrix
    if opcode in CROSS_LANE:
        return latencies.shuffle
    if opcode in SPECIAL:
        return latencies.special
    if opcode in ("mov", "cvta"):
        return 0  # a name for a register, which the compiler merges with the other
    return 1 if opcode in NO_WAIT else latencies.arithmetic


class Clock:
    """The times of the warps of blocks that run together."""

    def __init__(self, blocks, timeline):
        self._blocks, self._timeline = blocks, timeline
        warps = blocks.n // 32
        self._ready = {}  # register -> when each warp has it
        self._start = np.zeros(warps)  # of the instructions since the last branch
        self._count = np.zeros(warps)  # of these
        self._end, self._stored = np.zeros(warps), np.zeros(warps)
        self._issued = np.zeros(warps, np.int64)
        self._copied, self._groups = np.zeros((0, warps)), np.zeros(warps, np.int64)
        self._copying = np.zeros(warps)

    def issue(self, pc, instruction, active):
        """One instruction that these lanes have come to: a warp issues it and waits for its guard
        whether or not the guard holds."""
        warps = slice(None)
        if not active.all:
            warps = np.flatnonzero(active.mask.reshape(-1, 32).any(axis=1))
        reads, results, cycles = self._timeline.plan(pc)
        begin = self._start[warps].copy()
        for name in reads:
            if name in self._ready:
                np.maximum(begin, self._ready[name][warps], out=begin)
        self._issued[warps] += 1
        self._count[warps] += 1
        self._timeline.executions[pc] += len(begin)
        opcode = instruction.opcode
        if opcode in ("bar", "barrier"):
            self._barrier(instruction, warps)
        elif opcode == "cp":
            self._copy(instruction, warps, begin + cycles)
        elif opcode in ("bra", "brx"):
            self._restart(warps, begin)
        end = begin + cycles
        for name in results:
            if name not in self._ready:
                self._ready[name] = np.zeros(len(self._start))
            self._ready[name][warps] = end
        if opcode == "st" and space_of(instruction) != "global":
            self._stored[warps] = np.maximum(self._stored[warps], end)
        self._end[warps] = np.maximum(self._end[warps], end)

    def _restart(self, warps, begin):
        """What follows begins after `begin`, and after all that was issued before."""
        issued = self._start[warps] + self._count[warps]
        self._start[warps] = np.maximum(begin, issued)
        self._count[warps] = 0

    def _barrier(self, instruction, warps):
        self._restart(warps, np.maximum(self._start, self._stored)[warps])
        if "warp" in instruction.modifiers:
            return
        together = self._start.reshape(self._blocks.count, -1)
        arrived = np.zeros(len(self._start), np.bool_)
        arrived[warps] = True
        arrived = arrived.reshape(together.shape)
        last = np.where(arrived, together, 0).max(axis=1, keepdims=True)
        np.copyto(together, last, where=arrived)

    def _copy(self, instruction, warps, end):
        """cp.async: a wait waits for all groups but the last ones, in order."""
        if "commit_group" in instruction.modifiers:
            self._commit(warps)
        elif "wait_group" in instruction.modifiers:
            self._wait(warps, instruction.operands[0].bits)
        elif "wait_all" in instruction.modifiers:
            self._commit(warps)
            self._wait(warps, 0)
        else:
            self._copying[warps] = np.maximum(self._copying[warps], end)

    def _commit(self, warps):
        where = np.arange(len(self._start))[warps]
        group = self._groups[where]
        if group.max(initial=-1) >= len(self._copied):
            more = np.zeros((len(self._copied) + 16, len(self._start)))
            self._copied = np.concatenate([self._copied, more])
        self._copied[group, where] = self._copying[where]
        self._groups[where] += 1

    def _wait(self, warps, kept):
        where = np.arange(len(self._start))[warps]
        group = self._groups[where] - kept - 1
        done = (
            np.where(group >= 0, self._copied[np.maximum(group, 0), where], 0)
            if len(self._copied)
            else 0
        )
        self._restart(warps, np.maximum(self._start[where], done))

    def finish(self, numbers):
        """Adds these blocks, which have ended, to the launch's."""
        count = self._blocks.count
        self._end = np.maximum(self._end, self._start + self._count)
        self._timeline.issued[numbers] = self._issued.reshape(count, -1).sum(axis=1)
        self._timeline.cycles[numbers] = self._end.reshape(count, -1).max(axis=1)
