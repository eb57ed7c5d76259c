"""Maps loops of GPUBlock, GPUWarp and GPUThread to the grid and the threads of one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.loopir import GPU_BLOCK, GPU_THREAD, GPU_WARP, For, Function
from sgap_jax.compiler.loop_ir.patterns import statements

GPU = (GPU_BLOCK, GPU_WARP, GPU_THREAD)
LANES = 32
MOST_THREADS = 1024

# For each unit the lists of units that may be around its loop, from the outermost on.
AROUND: dict[str, tuple[list[str], ...]] = {
    GPU_BLOCK: ([],),
    GPU_WARP: ([GPU_BLOCK],),
    GPU_THREAD: ([GPU_BLOCK], [GPU_BLOCK, GPU_WARP]),
}


class Units:
    """The launch dimensions of a kernel's parallel loops.

    Attributes:
      blocks, warps: their numbers; 1 warp if there is no loop of warps.
      threads: of a block.
      stride: threads from one GPUWarp iteration to the next; if it is less than 32, a hardware warp
        has several of them.
      path: the units of the loops around the statement that is being printed.

    Raises:
      NotImplementedError: no loop of blocks, or more than one; loops of a unit that differ.
      ValueError: more threads than a block has.
    """

    def __init__(self, function: Function, whole_warps: bool):
        """`whole_warps`: all lanes of a warp execute the same statements, without a loop of
        threads (tensor cores)."""
        self.function = function
        self.extents = self._extents()
        self.path: list[str] = []
        self.blocks = max(self.extents[GPU_BLOCK], 1)
        self.warps, lanes = self.extents.get(GPU_WARP, 1), self.extents.get(GPU_THREAD, 1)
        filled = GPU_WARP not in self.extents or LANES % max(lanes, 1) == 0
        self.stride = lanes if filled and not whole_warps else LANES
        self.threads = max(self.stride * self.warps, 1)
        if self.threads > MOST_THREADS or (GPU_WARP in self.extents and lanes > LANES):
            raise ValueError(f"{function.name}: {self.warps} warps of {lanes} threads in a block")

    def _extents(self) -> dict[str, int]:
        """The extent of each unit's loops, which must be the same for all loops of a unit."""
        name, body, found = self.function.name, self.function.body, dict[str, int]()
        blocks = [s for s in body if isinstance(s, For) and s.unit == GPU_BLOCK]
        if len(blocks) != 1:
            raise NotImplementedError(
                f"{name}: a launch is one loop of GPUBlock, got {len(blocks)} at the top; "
                "a schedule for CUDA parallelizes its outermost loop over GPUBlock"
            )
        for loop in statements(body):
            if isinstance(loop, For) and loop.unit in GPU:
                extent = found.setdefault(loop.unit, loopir.extent(loop))
                if extent != loopir.extent(loop):
                    raise NotImplementedError(
                        f"{name}: loops of {loop.unit} with {extent} and {loopir.extent(loop)} "
                        "iterations in one kernel"
                    )
        return found

    def fits(self, loop: For) -> bool:
        """Whether a loop is in a place where its unit is allowed."""
        top = bool(self.path) or loop in self.function.body
        return top and self.path in AROUND[loop.unit or ""]

    @contextlib.contextmanager
    def inside(self, unit: str) -> Iterator[None]:
        self.path.append(unit)
        yield
        self.path.pop()

    @property
    def innermost(self) -> bool:
        """Whether the current statement is inside loops of all units of the kernel."""
        return set(self.path) == set(self.extents)

    def index(self, unit: str) -> str:
        """C++ text of a thread's iteration of the loops of a unit."""
        alone = GPU_WARP not in self.extents
        return {
            GPU_BLOCK: "blockIdx.x",
            GPU_WARP: f"threadIdx.x / {self.stride}",
            GPU_THREAD: "threadIdx.x" if alone else f"threadIdx.x % {self.stride}",
        }[unit]

    def idle(self, loop: For) -> bool:
        """Whether a warp has more lanes than a loop has iterations."""
        return loop.unit == GPU_THREAD and loopir.extent(loop) < self.stride
