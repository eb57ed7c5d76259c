"""Launch plans of the sparse softmax and of the product with its Jacobian, from points of the
atomic-parallelism space (cuda/sparse_softmax/sparse_softmax.cuh)."""

import struct

from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.row_reduce import row_launch
from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.problem import Problem

_HEADER = "sparse_softmax.cuh"


def launch_plan(problem: Problem, schedule: AtomicParallelism, scale: float) -> KernelCall:
    """The launch of out = softmax(scale * values) over the entries of each row.

    Inputs: values [batch, nnz], row_offsets [m+1]. Output: [batch, nnz], zero in the padding.

    Args:
      problem: op "sparse_softmax" on "cuda".
      schedule: a point with a kernel that `AtomicParallelism.check` accepts.
      scale: an argument of the kernel, so that one program serves all scales.
    """
    scalars = [_bits(scale)]
    return row_launch(problem, schedule, _HEADER, "SparseSoftmaxKernel", inputs=1, scalars=scalars)


def jacobian_launch_plan(
    problem: Problem, schedule: AtomicParallelism, scale: float, batches: tuple[int, int]
) -> KernelCall:
    """The launch of out = scale p (t - sum over the row of p t), for probabilities p and tangents
    or cotangents t.

    Inputs: p [Bp, nnz], t [Bt, nnz], row_offsets [m+1]. Output: [batch, nnz], zero in the padding.

    Args:
      problem, schedule, scale: as for `launch_plan`.
      batches: (Bp, Bt), each 1 or the batch.
    """
    strides = [problem.nnz if batch > 1 else 0 for batch in batches]
    scalars = [*strides, _bits(scale)]
    kernel = "SparseSoftmaxJacobianKernel"
    return row_launch(problem, schedule, _HEADER, kernel, inputs=2, scalars=scalars)


def _bits(x: float) -> int:
    """The bits of a float64 as an int64, the type of a kernel's scalars."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])
