"""The launches of the default schedules: what a wheel carries as machine code.

For each operation with CUDA kernels, what `choose_schedule` picks for 1 to 256 dense columns (or
features), rows of 1 to 32 entries on average (wider and longer ones have the same kernels),
float32, bfloat16 and float16, with and without a permutation where the operation has one, and for
the softmax column vectors of the usual lengths. Many problems share a kernel. float64 and points
that a caller names are compiled where they run.

Imports no JAX: the build runs it before the package can be imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from sgap_jax.runtime import (
    gspmm_cuda,
    row_reduce_cuda,
    sddmm_cuda,
    sparse_softmax_cuda,
    spmm_cuda,
)
from sgap_jax.runtime.kernel_call import KernelCall
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

# Those of them that have column vectors too.
ON_VECTORS = ("sparse_softmax", "sparse_softmax_jacobian")

COLUMNS = range(1, 257)
DTYPES = ("float32", "bfloat16", "float16")
ROW_LENGTHS = (1, 2, 4, 8, 16, 32)  # a group has at most as many lanes as a row has entries
VECTORS = ("CVS(2)", "CVS(4)", "CVS(8)", "CVS(16)")
_ROWS = 10_000


def default_problems(op: str, formats: Sequence[str] = ("CSR",)) -> Iterator[Problem]:
    """Problems that between them have every default point of an operation that a wheel carries."""
    columns = COLUMNS if op in (*TILED, "sddmm") else (1,)
    permuted = (False, True) if op in TILED else (False,)
    for n, dtype, length, through, format in itertools.product(
        columns, DTYPES, ROW_LENGTHS, permuted, formats
    ):
        yield Problem(
            op,
            (_ROWS, _ROWS),
            _ROWS * length,
            n=n,
            dtype=dtype,
            format=format,
            platform="cuda",
            permuted=through,
        )


@cache
def default_calls(name: str) -> dict[str, KernelCall]:
    """A launch for each kernel among the default points, by its source; `name` of LAUNCH_PLANS."""
    (op, plan), calls = LAUNCH_PLANS[name], {}
    for problem in default_problems(op, ("CSR", *VECTORS) if name in ON_VECTORS else ("CSR",)):
        point = choose_schedule(problem)
        assert isinstance(point, AtomicParallelism)
        call = plan(problem, point)
        calls[call.source] = call
    return calls
