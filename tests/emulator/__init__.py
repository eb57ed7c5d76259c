"""Runs the PTX of CUDA kernels with NumPy, and faults where a GPU might only go wrong quietly.

    program, memory = Program(ptx), Memory()
    address = memory.put(array)
    program.run("kernel", grid, block, [address, 5], memory)
    array = memory.get(address, array)

A Fault is: an access out of bounds or misaligned; a load of shared memory that nobody wrote, or
that a cp.async has yet to write; a race (shadow.py); a collective or barrier that not all of its
lanes reach, exited ones included; a trap; too many steps. An instruction or modifier that is not
known raises NotImplementedError. Wrong lanes, widths and fragments are legal: compare the results.

Threads of up to 64 blocks advance together, always those with the lowest program counter, and lanes
that meet at an atomic take turns in their order: one of the schedules that a GPU might choose. Not
modelled: approximate functions to the last bit (rcp, ex2, ... are NumPy's), how tensor cores round,
fences, bulk copies, wgmma, calls, barriers for a part of a block.
"""

from .memory import Memory
from .parse import Fault
from .program import Program

__all__ = ["Fault", "Memory", "Program"]
