"""Runs the PTX of CUDA kernels with NumPy, and faults where a GPU might only go wrong quietly."""

from .memory import Memory
from .parse import Fault
from .program import Program

__all__ = ["Fault", "Memory", "Program"]
