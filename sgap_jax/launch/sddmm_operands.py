"""The operands, scalars and template constants that the launches of all SDDMM kernels share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sgap_jax.launch.kernel_call import TYPES, KernelCall
from sgap_jax.schedules.problem import Problem


@dataclass(frozen=True)
class OperandShapes:
    """Shapes of X [Bx, m, d], Y [By, k, d], weights [Bw, ...] like the values, and scale [Bs, 1].

    Each leading axis is 1 or the batch of the result. Only the leading axes of X and Y are used.
    Weights or a scale of size 0 are absent.
    """

    x: tuple[int, ...] = (1,)
    y: tuple[int, ...] = (1,)
    weights: tuple[int, ...] = (1, 0)
    scale: tuple[int, ...] = (1, 0)


PLAIN = OperandShapes()


def sddmm_call(
    header: str,
    kernel: str,
    constants: Sequence[str | int],
    problem: Problem,
    entries: int,
    shapes: OperandShapes,
    *,
    blocks: tuple[int, int],
    threads: int,
) -> KernelCall:
    """The launch of a kernel that computes values = X Y^T, times weights and scale.

    Inputs: row_offsets, column_indices, X, Y, weights in the operands' dtype, scale in the
    accumulator's. Output: values, which need not be zeroed.

    Args:
      constants: the kernel's first template constants; two bools follow, whether there are weights
        and a scale.
      entries: the kernel's argument for the number of its entries or vectors.
      shapes: those of the operands that may be shared by the batch or absent.
      blocks: the grid in x and y; z is the batch.
      threads: of a block.
    """
    (m, k), d, operand = problem.shape, problem.n, TYPES[problem.dtype]
    reads, wide = f"const {operand}", "double" if problem.dtype == "float64" else "float"
    pointers = ["const int", "const int", reads, reads, reads, f"const {wide}", operand]
    factors = [math.prod(shapes.weights) > 0, math.prod(shapes.scale) > 0]
    scalars = (
        m,
        entries,
        d,
        m * d if shapes.x[0] > 1 else 0,
        k * d if shapes.y[0] > 1 else 0,
        math.prod(shapes.weights[1:]) if shapes.weights[0] > 1 else 0,
        math.prod(shapes.scale[1:]) if shapes.scale[0] > 1 else 0,
        problem.batch,
    )
    return KernelCall.of(
        header,
        kernel,
        [*constants, *factors],
        pointers,
        scalars,
        blocks=blocks,
        threads=threads,
        batch=problem.batch,
    )
