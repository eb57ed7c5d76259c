"""Runs the PTX of CUDA kernels with NumPy, and raises a fault where a GPU might silently go wrong.

    program, memory = Program(ptx), Memory()
    address = memory.put(array)
    program.run("kernel", grid, block, [address, 5], memory)
    array = memory.get(address, array)

A Fault is: an access out of bounds or misaligned; a load of shared memory that was never written,
or that a cp.async has yet to write; a race (shadow.py); a collective or barrier that not all of its
lanes reach (exited lanes included); a trap; too many steps. An unknown instruction or modifier
raises NotImplementedError. Wrong lanes, widths and fragments are legal PTX: tests compare the
results.

Threads of up to 64 blocks advance together: those with the lowest program counter run next, and
lanes that update one address atomically do so in lane order. This is one of the orders that a GPU
might choose. Not modelled: the last bits of approximate functions (rcp, ex2, ... are NumPy's), the
rounding of tensor cores, fences, bulk copies, wgmma, calls, barriers for a part of a block.

With `traffic=Traffic()` a launch also counts its requests to global memory (traffic.py), with
`timeline=Timeline()` its instructions, and the cycles of the longest chain (timeline.py).
"""

from .memory import Memory
from .parse import Fault
from .program import Program
from .timeline import Latencies, Timeline
from .traffic import Traffic, replay

__all__ = ["Fault", "Latencies", "Memory", "Program", "Timeline", "Traffic", "replay"]
