"""What a launch of a CUDA kernel consists of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelCall:
    """One launch: the program, the kernel in it, and every argument that is not an operand.

    A kernel's arguments are pointers to the operands, pointers to the results, then `scalars`.

    Attributes:
      source: CUDA C++ that includes a header of `cuda/` and instantiates one kernel.
      kernel: the kernel's name in `source`.
      grid, block: blocks and threads, one to three sizes. They depend on shapes only.
      shared_bytes: dynamic shared memory of a block.
      scalars: int64 each.
      zero: positions of the results that are zeroed before the launch.
      in_place: (operand, result): the result takes the memory of the operand, and starts as that.
    """

    source: str
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int = 0
    scalars: tuple[int, ...] = ()
    zero: tuple[int, ...] = ()
    in_place: tuple[tuple[int, int], ...] = ()
