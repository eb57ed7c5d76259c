"""The launches of the default schedules: what a wheel carries as machine code.

For each operation with CUDA kernels, what `choose_schedule` picks for 1 to 256 dense columns (or
features), rows of 1 to 32 entries on average (wider and longer ones have the same kernels),
float32, bfloat16 and float16, with and without a permutation where the operation has one. Many
problems share a kernel. float64 and points that a caller names are compiled where they run.

For column vectors of 2, 4, 8 and 16 the kernels of one column and of many, a multiple of what one
load brings: spmm, its transpose (of whole vectors) and sddmm. The others are too many.

Imports no JAX: the build runs it before the package can be imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial

from sgap_jax.runtime import (
    gspmm_cuda,
    row_reduce_cuda,
    sddmm_cuda,
    sparse_softmax_cuda,
    spmm_cuda,
)
from sgap_jax.runtime.kernel_call import KernelCall
from sgap_jax.runtime.vector_plans import VECTOR_PLANS
from sgap_jax.schedules import AtomicParallelism, Problem, choose_schedule
from sgap_jax.schedules.kernels import TILED

# What a kernel's launch plan adds: a name, the operation whose points it takes, (problem, point) ->
# launch.
LAUNCH_PLANS: dict[str, tuple[str, Callable[..., KernelCall]]] = {
    "spmm": ("spmm", spmm_cuda.launch_plan),
    "sddmm": ("sddmm", sddmm_cuda.launch_plan),
    "row_sum": ("row_sum", row_reduce_cuda.launch_plan),
    "row_max": ("row_max", row_reduce_cuda.launch_plan),
    "row_broadcast": ("row_broadcast", row_reduce_cuda.launch_plan),
    "sparse_softmax": ("sparse_softmax", partial(sparse_softmax_cuda.launch_plan, scale=1.0)),
    "sparse_softmax_jacobian": (
        "sparse_softmax",
        partial(sparse_softmax_cuda.jacobian_launch_plan, scale=1.0, batches=(1, 1)),
    ),
    "gspmm": ("gspmm", partial(gspmm_cuda.extremum_plan, add=False, minimum=False)),
    "gspmm_pick_to_x": ("gspmm", gspmm_cuda.pick_to_x_plan),
    "gspmm_pick_to_values": ("sddmm", gspmm_cuda.pick_to_values_plan),
    "gspmm_pick": ("gspmm", lambda problem, _: gspmm_cuda.pick_plan(problem)),
}

# The operations that have kernels of column vectors, each by the name of these.
OF_VECTORS = {"spmm_vectors": "spmm", "sddmm_vectors": "sddmm"}
NAMES = (*LAUNCH_PLANS, *OF_VECTORS)

COLUMNS = range(1, 257)
DTYPES = ("float32", "bfloat16", "float16")
ROW_LENGTHS = (1, 2, 4, 8, 16, 32)  # a group has at most as many lanes as a row has entries
VECTOR_LENGTHS = (2, 4, 8, 16)
VECTOR_COLUMNS = {"spmm": (1, 256), "sddmm": (256,)}
_ROWS = 10_000


def default_problems(op: str) -> Iterator[Problem]:
    """Problems that between them have every default point of an operation that a wheel carries."""
    columns = COLUMNS if op in (*TILED, "sddmm") else (1,)
    permuted = (False, True) if op in TILED else (False,)
    for n, dtype, length, through in itertools.product(columns, DTYPES, ROW_LENGTHS, permuted):
        yield Problem(
            op,
            (_ROWS, _ROWS),
            _ROWS * length,
            n=n,
            dtype=dtype,
            platform="cuda",
            permuted=through,
        )


def vector_problems(op: str) -> Iterator[Problem]:
    """The same of column vectors."""
    sizes = (VECTOR_COLUMNS[op], DTYPES, VECTOR_LENGTHS, (False, True)[: 2 if op in TILED else 1])
    for n, dtype, length, through in itertools.product(*sizes):
        yield Problem(
            op,
            (_ROWS, _ROWS),
            _ROWS * 32 * length,
            n=n,
            dtype=dtype,
            format=f"CVS({length})",
            platform="cuda",
            permuted=through,
        )


@cache
def default_calls(name: str) -> dict[str, KernelCall]:
    """A launch for each kernel among the defaults, by its source; `name` of NAMES."""
    made = _vector_calls(OF_VECTORS[name]) if name in OF_VECTORS else _point_calls(name)
    return {call.source: call for call in made}


def _point_calls(name: str) -> Iterator[KernelCall]:
    op, plan = LAUNCH_PLANS[name]
    for problem in default_problems(op):
        point = choose_schedule(problem)
        assert isinstance(point, AtomicParallelism)
        yield plan(problem, point)


def _vector_calls(op: str) -> Iterator[KernelCall]:
    for problem in vector_problems(op):
        tile = choose_schedule(problem)
        yield VECTOR_PLANS[op][type(tile)](problem, tile)
