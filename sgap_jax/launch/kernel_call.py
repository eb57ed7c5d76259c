"""`KernelCall`, the description of a launch of a CUDA kernel, and the headers that its source
includes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from sgap_jax.schedules.schedule import GRID_Z

# The C++ types of the operands, by dtype (cuda/common/types.cuh).
TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "sgap::float16",
    "bfloat16": "sgap::bfloat16",
}
TENSOR_CORES = "sm_80"  # the least architecture with the instructions of cuda/common/mma.cuh


@dataclass(frozen=True)
class KernelCall:
    """One launch: the source, the kernel in it, the grid, and all arguments but the operands.

    A kernel's arguments are pointers to the operands, pointers to the results, then `scalars`.
    Pointers are aligned to 16 bytes, as all of XLA's buffers are.

    Attributes:
      source: CUDA C++ that includes a header of `cuda/` and instantiates one kernel.
      kernel: the kernel's name in `source`.
      grid, block: numbers of blocks and of threads, one to three each. They depend on shapes only.
      shared_bytes: dynamic shared memory of a block.
      scalars: the kernel's int64 arguments.
      zero: positions of the results that are zeroed before the launch.
      in_place: pairs (operand, result): the result takes the operand's memory and initial contents.
      requires: the least architecture that has the kernel's instructions, such as "sm_80"; with an
        "a", such as "sm_90a", those of this architecture alone. Empty: every GPU.
    """

    source: str
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int = 0
    scalars: tuple[int, ...] = ()
    zero: tuple[int, ...] = ()
    in_place: tuple[tuple[int, int], ...] = ()
    requires: str = ""

    @classmethod
    def of(
        cls,
        header: str,
        kernel: str,
        constants: Sequence[str | int],
        pointers: Sequence[str],
        scalars: Sequence[int],
        *,
        blocks: tuple[int, int],
        threads: int,
        batch: int,
        zero: tuple[int, ...] = (),
        structure: bool = True,
        requires: str = "",
    ) -> KernelCall:
        """The launch of one kernel of a header of `cuda/`, for a batch that shares a structure. Its
        last int64 argument says which elements of the batch share one (`of_structures`), unless it
        has no `structure`.

        Args:
          header: the header's file name.
          kernel: the kernel's name in namespace sgap.
          constants: its template arguments: types as text, integers and bools.
          pointers: the element types of its pointers, in order, const where it only reads.
          scalars: its int64 arguments between the pointers and that one.
          blocks: the grid in x and y; at least one block each. z is the batch.
          threads: of a block.
          zero: positions of the results that are zeroed before the launch.
          structure: whether the kernel reads index arrays of one structure or several.
          requires: as the attribute.
        """
        scalars = (*scalars, 0) if structure else tuple(scalars)
        return cls(
            source=instantiation(header, kernel, constants, pointers, len(scalars)),
            kernel=kernel,
            grid=(max(blocks[0], 1), max(blocks[1], 1), min(max(batch, 1), GRID_Z)),
            block=(threads, 1, 1),
            scalars=scalars,
            zero=zero,
            requires=requires,
        )

    def target(self, arch: str) -> str:
        """The architecture to compile for, to run on a GPU of `arch`.

        Raises NotImplementedError if such a GPU lacks the kernel's instructions.
        """
        if not self.requires:
            return arch
        needed, given = arch_number(self.requires), arch_number(arch)
        if self.requires.endswith("a"):
            if needed == given and arch.startswith("sm_"):
                return self.requires
            raise NotImplementedError(
                f"launch: {self.kernel} has instructions of {self.requires} alone, got {arch}; "
                "leave the schedule out"
            )
        if given < needed:
            raise NotImplementedError(
                f"launch: {self.kernel} has instructions of {self.requires} and later, got {arch}; "
                "leave the schedule out"
            )
        return arch

    def of_structures(self, count: int) -> KernelCall:
        """This launch for `count` structures of one capacity: each index array has that leading
        axis, and of the batch, at most GRID_Z elements, each structure has an equal number of
        neighbours. The call must be from `KernelCall.of`.

        The last argument (cuda/common/types.cuh, StructureOfBlock) is 2^32 / neighbours, rounded
        up.
        """
        if count == 1:
            return self
        neighbours, left = divmod(self.grid[2], count)
        assert left == 0
        return replace(
            self,
            source=f"#define SGAP_SEVERAL_STRUCTURES 1\n\n{self.source}",
            scalars=(*self.scalars[:-1], -(-(2**32) // neighbours)),
        )


def arch_number(arch: str) -> int:
    """90 for "sm_90", "sm_90a" and the virtual "compute_90"."""
    return int(arch.partition("_")[2].rstrip("af"))


def instantiation(
    header: str,
    kernel: str,
    constants: Sequence[str | int],
    pointers: Sequence[str],
    scalars: int,
) -> str:
    """CUDA C++ that instantiates one kernel of a header; `scalars` is how many int64 arguments
    follow its pointers."""
    written = (str(c).lower() if isinstance(c, bool) else str(c) for c in constants)
    arguments = [*(f"{pointer}*" for pointer in pointers), *["long long"] * scalars]
    return (
        f'#include "{header}"\n\n'
        f"template __global__ void sgap::{kernel}<{', '.join(written)}>"
        f"({', '.join(arguments)});\n"
    )


_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def header_folder() -> Path:
    """The folder of the device code: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "cuda"
    return installed if installed.is_dir() else package.parent / "cuda"


@cache
def header_paths(folder: Path) -> dict[str, Path]:
    """{file name: path} of the headers below a folder, which include each other by file name."""
    return {path.name: path for path in sorted(folder.rglob("*.cuh"))}


@cache
def header_texts(folder: Path) -> dict[str, str]:
    """{file name: text} of the headers below a folder."""
    return {name: path.read_text() for name, path in header_paths(folder).items()}


def include_options(folder: Path) -> tuple[str, ...]:
    """The options by which NVRTC finds the headers below a folder."""
    folders = sorted({path.parent for path in header_paths(folder).values()})
    return tuple(f"--include-path={path}" for path in folders)


def included_headers(source: str, folder: Path) -> tuple[str, ...]:
    """(name, text, name, text, ...) of the headers that a source includes, directly or not.

    They are part of the cache key of a kernel: a changed header changes the keys of the kernels
    that include it.
    """
    texts = header_texts(folder)
    found, left = set[str](), _INCLUDE.findall(source)
    while left:
        name = left.pop()
        if name in texts and name not in found:
            found.add(name)
            left += _INCLUDE.findall(texts[name])
    return tuple(text for name in sorted(found) for text in (name, texts[name]))
