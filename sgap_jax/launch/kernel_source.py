"""What the launch plans of all operations share: the program of one kernel, and limits of grids."""

from collections.abc import Sequence

from sgap_jax.schedules.schedule import GRID_Z

# The C++ types of the operands, by dtype (cuda/common/types.cuh).
TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "sgap::float16",
    "bfloat16": "sgap::bfloat16",
}


def instantiation(
    header: str,
    kernel: str,
    constants: Sequence[str | int],
    pointers: Sequence[str],
    scalars: int,
) -> str:
    """CUDA C++ that instantiates one kernel of a header of `cuda/`.

    Args:
      header: the header's name.
      kernel: the kernel's name in namespace sgap.
      constants: its template arguments: types as text, numbers, and bools.
      pointers: the element types of its pointers, in order, const where it only reads.
      scalars: how many int64 follow them.
    """
    written = (str(c).lower() if isinstance(c, bool) else str(c) for c in constants)
    arguments = [*(f"{pointer}*" for pointer in pointers), *["long long"] * scalars]
    return (
        f'#include "{header}"\n\n'
        f"template __global__ void sgap::{kernel}<{', '.join(written)}>"
        f"({', '.join(arguments)});\n"
    )


def grid_z(batch: int) -> int:
    """Blocks in z for products that share a structure; where they are fewer, each takes several."""
    return min(max(batch, 1), GRID_Z)
