"""One launch of one CUDA kernel, as a value: what to compile and with what to run it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A launch. The kernel's arguments are the inputs, the outputs, then the scalars as int64.

    Attributes:
      source: a translation unit that includes headers of cuda/ and instantiates one kernel.
      kernel: the name of that kernel in the source, for messages; the compiler mangles it.
      grid: blocks in x, y, z; a function of shapes and capacities only.
      block: threads of a block in x, y, z.
      shared_bytes: dynamic shared memory of a block.
      scalars: arguments after the pointers.
      zero: indices of the outputs that start as zeros.
    """

    source: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    scalars: tuple[int, ...] = ()
    zero: tuple[int, ...] = ()
