"""What the choice of a schedule for the CPU knows of the processor."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


@dataclasses.dataclass(frozen=True)
class Machine:
    """The processor of this process, as far as `choose_schedule` depends on it.

    Attributes:
      matrix_tiles: whether kernels may use a matrix unit for bfloat16 (Intel AMX).
    """

    matrix_tiles: bool = False


_assumed: ContextVar[Machine | None] = ContextVar("machine", default=None)


def machine() -> Machine:
    """The processor of this process, or the one that `assuming` names."""
    if (assumed := _assumed.get()) is not None:
        return assumed
    # Here, because schedules of CUDA kernels are chosen without the native library in a build.
    from sgap_jax.runtime.native import native

    return Machine(matrix_tiles=native.isa() == "amx")


@contextmanager
def assuming(other: Machine) -> Iterator[None]:
    """A context in which schedules are chosen as on another processor."""
    token = _assumed.set(other)
    try:
        yield
    finally:
        _assumed.reset(token)
