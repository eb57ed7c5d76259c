"""What the choice of CPU schedules knows of the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager


@dataclasses.dataclass(frozen=True)
class Machine:
    """The processor that schedules are chosen for; by default a Zen 5, on which most rules were
    measured.

    Attributes:
      l1_bytes: the first-level data cache of a core.
      l2_bytes: its second-level cache.
      l3_bytes: the cache that cores share; 0 where the system does not say.
      cores: how many there are.
      vector_bytes: the width of the registers that the kernels in use have.
      intel: whether it is one of Intel's.
      whole: whether it has registers of 64 bytes and takes an instruction on one in one step (Zen 4
        takes halves).
      matrix_tiles: whether kernels may use a matrix unit for bfloat16 (Intel AMX).
      pair_dots: whether kernels multiply bfloat16 in pairs (AVX512-BF16 without a matrix unit).
      slab: the largest packed slab of a dense operand that pays, in second-level caches. This and
        the next are measured by `python -m sgap_jax calibrate`.
      row_length: the least nonzeros of a row with which packing pays.
    """

    l1_bytes: int = 48 << 10
    l2_bytes: int = 1 << 20
    l3_bytes: int = 32 << 20
    cores: int = 2
    vector_bytes: int = 64
    intel: bool = False
    whole: bool = True
    matrix_tiles: bool = False
    pair_dots: bool = False
    slab: float = 1.25
    row_length: int = 24


_current = Machine()


def this_machine() -> Machine:
    """The machine that `choose_schedule` chooses for."""
    return _current


def set_machine(machine: Machine) -> None:
    """Says what the machine is. The package does once, when it loads, with what the native library
    has read; the build of a wheel, which has no native library, chooses for the default."""
    global _current
    _current = machine


@contextmanager
def on_machine(machine: Machine) -> Iterator[None]:
    """A context in which schedules are chosen for `machine`, for all threads: tests use it."""
    before = this_machine()
    set_machine(machine)
    try:
        yield
    finally:
        set_machine(before)
