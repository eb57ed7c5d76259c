"""The time that a launch would take on a GPU, from counts of its requests, instructions and bytes.

What comes out is *predicted*, not measured: no constant here was fitted to a kernel of ours. The
emulator runs the launch, or a sample of its blocks, and counts; the compiler says how many
registers and instructions the kernel has. The time is that of the resource that takes longest if
nothing else stood in the way:

    issue     4 warp instructions a clock and multiprocessor
    L1        requests in wavefronts: 4 sectors of as many lines a clock and multiprocessor
    L2        bytes that the L1s pass on
    memory    bytes of every operand and result that is touched, once: caches begin empty
    tensor    multiply-adds of tensor cores
    latency   chains of results that need each other: the longest block, or all blocks of a
              multiprocessor, as many at a time as fit
    fetch     lines of machine code, where a loop does not fit in the first instruction cache: each
              warp waits for each line, the warps of all blocks that fit for the same one

Issue, L1, latency and fetch are those of the slowest multiprocessor of the sample. Real kernels
take longer, since these overlap badly: read a prediction as a lower bound and a ranking. Only
latency may be too long, since it takes every load for a hit in L2. Launches, the driver and clocks
that drop under load are not in it.

The sample: all blocks of some multiprocessors, evenly spread, and of the one with the longest row;
block b runs on multiprocessor b mod their number. Bytes and tensor operations are scaled by the
number of all blocks over that of the sample. Where all blocks are emulated, each runs, in their
order, on the multiprocessor that is done first.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

SAMPLE = 4  # multiprocessors whose blocks are emulated
_WARP = 32
_LANES_OF_L1 = 4  # sectors, and tags, that a wavefront resolves
_ISSUE = 4  # warp instructions a clock, one for each scheduler
_L2_TO_SM = 64  # bytes a clock
_REGISTERS, _REGISTER_UNIT = 65536, 256  # of a multiprocessor; a warp takes a multiple
_SHARED_RESERVED = 1024  # bytes of shared memory of each block that the system takes
_INSTRUCTIONS_OF_LINE = 8  # of 16 bytes each, in 128 bytes


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The constants of a GPU.

    Attributes:
      name: as in the results.
      arch: whose machine code is counted.
      multiprocessors: that run blocks.
      clock: Hz, the boost clock of the data sheet.
      l1_bytes: L1 and shared memory together, of a multiprocessor.
      l2_bytes: of the second-level cache.
      l2_per_clock: bytes that all multiprocessors read from L2 in a clock.
      memory: bytes a second.
      tensor: {operands' type: multiply-adds a clock and multiprocessor}.
      dense: the same of the best dense product, for 16-bit and float32 operands.
      threads, blocks: that fit on a multiprocessor.
      memory_latency: clocks of a load that hits in L2.
      code: instructions in the first instruction cache, of a scheduler.
      lines_ahead: lines of 128 bytes of instructions that are fetched before they are missed; 1 for
        none.
      fetch_latency: clocks until the second instruction cache has given a line.
    """

    name: str
    arch: str
    multiprocessors: int
    clock: float
    l1_bytes: int
    l2_bytes: int
    l2_per_clock: int
    memory: float
    tensor: dict[str, float]
    dense: dict[str, float]
    threads: int = 2048
    blocks: int = 32
    memory_latency: int = 265
    code: int = 2048
    lines_ahead: int = 8
    fetch_latency: int = 78


# Sizes, clocks, memory and tensor cores: NVIDIA's data sheets and the whitepapers of the V100, A100
# and H100 (SXM). L2 and latencies: measured by others (gpu-benches of the University of Erlangen,
# gpu-l2-cache, cuda-cache, gpu-latency and cuda-latency). Its H200, the chip of an H100, reads 9.8
# TB/s from L2 at 1.98 GHz, its A100 5.4 TB/s at 1.41 GHz, its V100 2.54 TB/s at 1.38 GHz. That 4
# tags and 4 sectors are resolved in a clock is NVIDIA's word (its developer forum, threads 49571
# and 312884). `mma.sync` reaches 62% of the H100's peak, which takes wgmma (Luo et al., arXiv
# 2402.13499, section IV); on the others all of it.
#
# Instruction caches: 12 KiB on a V100 (vectorSparse, section 3.2). None is published for an A100 or
# H100. Theirs are those of later GPUs in the simulator of Huerta et al. (Dissecting and Modeling
# the Architecture of Modern GPU Cores, MICRO 2025): 32 KiB, 39 clocks to the second one and as many
# back, and 8 lines fetched ahead, which Volta is not taken to do.
H100 = Gpu(
    name="H100 SXM",
    arch="sm_90",
    multiprocessors=132,
    clock=1.83e9,
    l1_bytes=256 << 10,
    l2_bytes=50 << 20,
    l2_per_clock=4900,
    memory=3.35e12,
    tensor={kind: 0.62 * rate for kind, rate in (("f16", 2048), ("bf16", 2048), ("tf32", 1024))},
    dense={"f16": 2048, "f32": 128},
)
A100 = Gpu(
    name="A100 SXM 80GB",
    arch="sm_80",
    multiprocessors=108,
    clock=1.41e9,
    l1_bytes=192 << 10,
    l2_bytes=40 << 20,
    l2_per_clock=3800,
    memory=2.04e12,
    tensor={"f16": 1024, "bf16": 1024, "tf32": 512},
    dense={"f16": 1024, "f32": 64},
    memory_latency=211,
)
# NVRTC 13 compiles for no Volta: its kernels are counted in the code of sm_75.
V100 = Gpu(
    name="V100 SXM2",
    arch="sm_75",
    multiprocessors=80,
    clock=1.53e9,
    l1_bytes=128 << 10,
    l2_bytes=6 << 20,
    l2_per_clock=1840,
    memory=0.9e12,
    tensor={"f16": 512},
    dense={"f16": 512, "f32": 64},
    memory_latency=214,
    code=768,
    lines_ahead=1,
)
GPUS = {"h100": H100, "a100": A100, "v100": V100}
TERMS = ("issue", "L1", "L2", "memory", "tensor", "latency", "fetch")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is predicted for one launch.

    Attributes:
      seconds: {term: time if this resource alone set it}.
      blocks, emulated: of the grid, and those that the emulator ran.
      resident: blocks that fit on a multiprocessor at a time.
      registers, spill_bytes: of a thread.
      instructions: of machine code, that warps issue, by the launch.
      loop: instructions, loads and tensor operations of the main loop in machine code; None if
        there is no loop.
      load: sectors, lines, lanes and bytes of a mean load request.
      store: the same of a mean store or atomic.
      l2_bytes, memory_bytes: that the L1s, and L2, pass on.
    """

    seconds: dict[str, float]
    blocks: int
    emulated: int
    resident: int
    registers: int
    spill_bytes: int
    instructions: float
    loop: Any
    load: dict[str, float]
    store: dict[str, float]
    l2_bytes: float
    memory_bytes: float

    @property
    def bound(self) -> str:
        return max(TERMS, key=lambda term: self.seconds[term])

    @property
    def total(self) -> float:
        return self.seconds[self.bound]


def resident_blocks(gpu: Gpu, registers: int, threads: int, shared_bytes: int) -> int:
    """How many blocks fit on a multiprocessor."""
    warps = -(-threads // _WARP)
    of_warp = -(-max(registers, 16) * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    limits = [gpu.blocks, gpu.threads // (warps * _WARP), _REGISTERS // (of_warp * warps)]
    if shared_bytes:
        limits.append(gpu.l1_bytes // (shared_bytes + _SHARED_RESERVED))
    return max(min(limits), 1)


def sample(gpu: Gpu, total: int, longest: int = 0, most: int = SAMPLE) -> np.ndarray:
    """The numbers of the blocks of some multiprocessors, with the one that runs block `longest`."""
    busy = min(total, gpu.multiprocessors)
    chosen = np.unique([*np.linspace(0, busy - 1, most).astype(int), longest % busy])
    numbers = np.arange(total)
    return numbers[np.isin(numbers % gpu.multiprocessors, chosen)]


def wavefronts(sectors: np.ndarray) -> np.ndarray:
    """Wavefronts of requests with these many sectors (or lines)."""
    return np.maximum(-(-sectors // _LANES_OF_L1), 1)


@dataclasses.dataclass(frozen=True)
class Emulated:
    """What the emulator counted of a sample of a launch.

    Attributes:
      blocks: of the grid.
      chosen: the numbers of those that ran.
      traffic, timeline: of the emulator.
      buffers: (address, bytes) of the operands and, behind them, of the results.
      results: how many results there are.
      shared_bytes: of a block, static and dynamic.
    """

    blocks: int
    chosen: np.ndarray
    traffic: Any
    timeline: Any
    buffers: list[tuple[int, int]]
    results: int
    shared_bytes: int


def emulate(gpu: Gpu, launch: Any, longest: float, multiprocessors: int) -> Emulated:
    """Runs the sample of a launch; arguments as of `predict`."""
    total, across = math.prod(launch.call.grid), launch.call.grid[0]
    return emulate_blocks(gpu, launch, sample(gpu, total, int(longest * across), multiprocessors))


def emulate_blocks(gpu: Gpu, launch: Any, chosen: np.ndarray) -> Emulated:
    """Runs some blocks of a launch, by their numbers."""
    # From the tests; benchmarks.gpu.predict puts them on the path.
    from cuda_sources import ptx
    from emulated_launch import placed, program
    from emulator import Latencies, Timeline, Traffic

    call, given = launch.call, [np.asarray(x) for x in launch.inputs]
    memory, pointers, results = placed(call, given, launch.outputs)
    module = program(ptx(call.source, gpu.arch.replace("sm_", "compute_")))
    (entry,) = module.entries
    total = math.prod(call.grid)
    traffic, timeline = Traffic(), Timeline(Latencies(memory=gpu.memory_latency))
    module.run(
        entry,
        call.grid,
        call.block,
        [*pointers, *call.scalars],
        memory,
        shared_bytes=call.shared_bytes,
        blocks=chosen,
        traffic=traffic,
        timeline=timeline,
    )
    sizes = [array.nbytes for array in (*given, *results)]
    buffers = list(zip(pointers, sizes, strict=True))
    shared = call.shared_bytes + module.shared_bytes(entry)
    return Emulated(total, chosen, traffic, timeline, buffers, len(results), shared)


def predict(
    gpu: Gpu, launch: Any, longest: float = 0.0, multiprocessors: int = SAMPLE
) -> Prediction:
    """Predicts the time of a launch (`benchmarks.gpu.ours.Launch`).

    Args:
      gpu: one of GPUS.
      launch: the call with its operands; their values matter where the kernel looks at them.
      longest: where the longest row is, as a fraction of all rows: its block is in the sample.
      multiprocessors: how many of them are emulated.

    Raises NotImplementedError where operands and results do not fit in L2 together: what of them is
    read twice cannot be said from a sample.
    """
    from cuda_sources import machine_code, resources

    call, ran = launch.call, emulate(gpu, launch, longest, multiprocessors)
    part = ran.blocks / len(ran.chosen)
    moved = moved_bytes(call, ran.buffers, ran.results, ran.traffic, part)
    if moved > gpu.l2_bytes:
        what = f"{call.kernel}: {moved:.3g} bytes of operands, which do not fit in the L2"
        raise NotImplementedError(f"{what} of {gpu.name}")
    registers, _, spills = resources(call.source, gpu.arch)
    code = machine_code(call.source, gpu.arch)
    return time_of(gpu, ran, math.prod(call.block), moved, registers, spills, code)


def time_of(
    gpu: Gpu, ran: Emulated, threads: int, moved: float, registers: int, spills: int, code: Any
) -> Prediction:
    """The prediction for a launch that was emulated.

    Args:
      gpu: one of GPUS.
      ran: what was counted.
      threads: of a block.
      moved: bytes of `moved_bytes`.
      registers, spills: of a thread; bytes of spills.
      code: the kernel's `MachineCode`.
    """
    from emulator import replay

    resident = resident_blocks(gpu, registers, threads, ran.shared_bytes)
    shared = resident * (ran.shared_bytes + _SHARED_RESERVED) if ran.shared_bytes else 0
    passed = replay(
        ran.traffic,
        multiprocessors=gpu.multiprocessors,
        resident=resident,
        l1_bytes=max(gpu.l1_bytes - shared, 0),
        l2_bytes=gpu.l2_bytes,
    )
    ratio = instructions_for_ptx(ran.timeline, code)
    part, busy = ran.blocks / len(ran.chosen), min(ran.blocks, gpu.multiprocessors)

    def slowest(of_block: np.ndarray) -> float:
        if len(ran.chosen) == ran.blocks:
            return done_at(of_block, gpu.multiprocessors)
        places = ran.chosen % gpu.multiprocessors
        return float(np.bincount(places, of_block[ran.chosen]).max())

    def in_turn(of_block: np.ndarray) -> float:
        if len(ran.chosen) == ran.blocks:
            return done_at(of_block, gpu.multiprocessors * resident)
        return max(float(of_block.max(initial=0)), slowest(of_block) / resident)

    l2_bytes = part * (passed.l2_read + passed.l2_written)
    cycles = np.nan_to_num(ran.timeline.cycles)
    missed = missed_lines(gpu, code) * ratio * ran.timeline.issued / -(-threads // _WARP)
    fetched = missed * gpu.fetch_latency / gpu.lines_ahead
    operations = {kind: part * n for kind, n in ran.timeline.tensor_operations().items()}
    clocks = {
        "issue": ratio * slowest(ran.timeline.issued.astype(float)) / _ISSUE,
        "L1": slowest(wavefronts_of_blocks(ran.traffic, ran.blocks)),
        "L2": l2_bytes / min(gpu.l2_per_clock, _L2_TO_SM * busy),
        "memory": moved / gpu.memory * gpu.clock,
        "tensor": sum(n / (gpu.tensor[kind] * busy) for kind, n in operations.items()),
        "latency": in_turn(cycles),
        "fetch": in_turn(fetched),
    }
    return Prediction(
        seconds={term: clocks[term] / gpu.clock for term in TERMS},
        blocks=ran.blocks,
        emulated=len(ran.chosen),
        resident=resident,
        registers=registers,
        spill_bytes=spills,
        instructions=ratio * part * float(ran.timeline.issued.sum()),
        loop=code.main_loop,
        load=ran.traffic.load.per_request(),
        store=(ran.traffic.store + ran.traffic.atomic).per_request(),
        l2_bytes=l2_bytes,
        memory_bytes=moved,
    )


def done_at(work: np.ndarray, places: int) -> float:
    """When the last of some pieces of work is done, if each starts, in order, at the place that is
    done first."""
    ends = [0.0] * places
    for one in work.tolist():
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def missed_lines(gpu: Gpu, code: Any) -> float:
    """Lines that miss in the first instruction cache, for each instruction that a warp issues: none
    if the largest loop without another inside fits, else all, as of a walk in a circle through a
    cache that drops what was used longest ago."""
    innermost = (loop.instructions for loop in code.loops if loop.innermost)
    return 1 / _INSTRUCTIONS_OF_LINE if max(innermost, default=0) > gpu.code else 0.0


def wavefronts_of_blocks(traffic: Any, blocks: int) -> np.ndarray:
    """Wavefronts of all requests of each block."""
    block, warp, turn, _, masks, _ = traffic.stream()
    found = np.zeros(blocks)
    if len(block):
        _, request = np.unique(np.stack([warp, turn]), axis=1, return_inverse=True)
        request = request.reshape(-1)
        sectors = np.bincount(request, np.array([mask.bit_count() for mask in range(16)])[masks])
        of_request = np.maximum(wavefronts(sectors), wavefronts(np.bincount(request)))
        block_of_request = np.zeros(len(sectors), np.int64)
        block_of_request[request] = block
        np.add.at(found, block_of_request, of_request)
    return found


def instructions_for_ptx(timeline: Any, code: Any) -> float:
    """Instructions of machine code for each PTX instruction that was issued.

    A line of the source that has i PTX instructions, issued e times together, and s instructions of
    machine code issues s e / i of these: the compiler that makes machine code of PTX unrolls no
    loop. Lines that only machine code has, and the other way round, take the mean.
    """
    found = timeline.lines()
    machine = issued = 0.0
    for line, (many, times) in found.items():
        if line in code.lines and many:
            machine += code.lines[line] * times / many
            issued += times
    return machine / issued if issued else 1.0


def moved_bytes(
    call: Any,
    buffers: Sequence[tuple[int, int]],
    results: int,
    traffic: Any,
    part: float = 1.0,
) -> float:
    """Bytes of the operands and results that the sample touches, each once; results that are zeroed
    before the launch are written then, too. Of a result that is changed in place only the lines
    that are read or written, as many times as the launch has more blocks than the sample; of all
    operands and results where all blocks were emulated (partial sums have places that few pieces
    use).

    Args:
      buffers: (address, bytes) of the operands and, behind them, of the results.
      results: how many results there are.
      part: the number of all blocks over that of the sample.
    """
    from emulator import Memory
    from emulator.traffic import KINDS

    _, _, _, lines, _, how = traffic.stream()
    lines, store, found = lines * 128 + Memory.BASE, how == KINDS.index("store"), 0.0
    touched, operands = np.unique(lines), len(buffers) - results
    atomic = how == KINDS.index("atomic")
    kinds = {operand: ~store for operand, _ in call.in_place}
    kinds |= {operands + result: store | atomic for _, result in call.in_place}
    for i, (address, nbytes) in enumerate(buffers):
        if i in kinds:
            own = np.unique(lines[kinds[i]])
            start, end = np.searchsorted(own, [address, address + nbytes])
            found += min(nbytes, 128 * part * float(end - start))
            continue
        start, end = np.searchsorted(touched, [address, address + nbytes])
        read = min(nbytes, 128 * float(end - start)) if part == 1 else nbytes * int(end > start)
        found += read + nbytes * int(i - operands in call.zero)
    return found
