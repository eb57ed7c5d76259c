"""The launches of the default schedules, whose kernels a wheel carries as machine code.

For each operation with CUDA kernels, these are the schedules that `choose_schedule` picks for 1 to
256 dense columns (or features), rows of 1 to 32 entries on average (wider and longer ones have the
same kernels), float32, bfloat16 and float16, with and without a permutation if the operation has
one. Many problems share a kernel. Kernels for float64 and for schedules that a caller names are
compiled where they run.

Vectors of edges (values [nnz, n]): the same for n that are powers of two from 8 on.

For column vectors of 2, 4, 8 and 16 rows: spmm, its transpose (for whole vectors) and sddmm, with
one column or with 64 and more, a multiple of what one load brings, and block rows of some 32
vectors or more; and the softmax. Attention: over entries and over vectors of 8 and 16, for heads of
64 and 128 features, each with its own keys, and enough rows to fill a device. All other
combinations are too many. Selections of the greatest scores, and products of two sparse matrices,
have one kernel for each dtype, nuclei one for short rows and one for long ones; transposed
structures and bitmaps have one of each kind.

Imports no JAX: the build runs this module before the package can be imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from sgap_jax.formats.levels import CSR, CVS, Format
from sgap_jax.launch import attention as attention_cuda
from sgap_jax.launch import attention_shapes
from sgap_jax.launch import bitmap as bitmap_cuda
from sgap_jax.launch import gsddmm as gsddmm_cuda
from sgap_jax.launch import gspmm as gspmm_cuda
from sgap_jax.launch import nucleus as nucleus_cuda
from sgap_jax.launch import row_reduce as row_reduce_cuda
from sgap_jax.launch import sddmm as sddmm_cuda
from sgap_jax.launch import sparse_softmax as sparse_softmax_cuda
from sgap_jax.launch import spgemm as spgemm_cuda
from sgap_jax.launch import spmm as spmm_cuda
from sgap_jax.launch import top_k as top_k_cuda
from sgap_jax.launch import transpose_structure as transpose_cuda
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.schedules import AtomicParallelism, Problem, choose_schedule
from sgap_jax.schedules.problem import TILED

# For the name of each kernel, the operation whose schedules it takes, and its launch plan:
# (problem, point) -> launch.
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
    "gspmm_arg_gather_to_x": ("gspmm", gspmm_cuda.arg_gather_to_x_plan),
    "gspmm_arg_gather_to_values": ("sddmm", gspmm_cuda.arg_gather_to_values_plan),
    "gspmm_arg_gather": ("gspmm", lambda problem, _: gspmm_cuda.arg_gather_plan(problem)),
    "gspmm_vectors": (
        "gspmm",
        partial(gspmm_cuda.extremum_plan, add=False, minimum=False, vectors=True),
    ),
    "gspmm_sums": ("gspmm", gspmm_cuda.sums_plan),
    "gsddmm": ("sddmm", gsddmm_cuda.entries_plan),
}

# The names of vectors of edges, and their numbers of columns.
OF_EDGES = ("gspmm_vectors", "gspmm_sums", "gsddmm")
EDGE_COLUMNS = (8, 16, 32, 64, 128, 256)
# The names whose kernels take column vectors too.
ON_VECTORS = ("sparse_softmax", "sparse_softmax_jacobian")
# The names for tiles of column vectors, and the operation of each.
OF_VECTORS = {"spmm_vectors": "spmm", "sddmm_vectors": "sddmm"}
# Attention and its gradients: a plan takes (problem, tile, shapes).
OF_ATTENTION: dict[str, Callable[..., KernelCall]] = {
    "attention": partial(attention_cuda.forward_plan, scale=1.0),
    "attention_rows_backward": partial(
        attention_cuda.rows_backward_plan, scale=1.0, wrt_bias=False
    ),
    "attention_keys_backward": partial(attention_cuda.keys_backward_plan, scale=1.0),
}
# Of dense scores: a plan takes (dtype, shape, k), and the kernel depends on the dtype alone.
OF_SCORES: dict[str, Callable[..., KernelCall]] = {
    "top_k_select": top_k_cuda.select_plan,
    "top_k_write": top_k_cuda.write_plan,
}
_PRODUCT = "spgemm"  # of two sparse matrices: its values and its structure
_TRANSPOSE = "transpose_structure"  # of integers alone: one kernel of each kind
_BITMAP = "bitmap"  # likewise
_NUCLEUS = "nucleus"  # of dense scores, and of what is selected from these
_OF_STRUCTURES = _PRODUCT, _TRANSPOSE, _BITMAP, _NUCLEUS
NAMES = (*LAUNCH_PLANS, *OF_VECTORS, *OF_ATTENTION, *OF_SCORES, *_OF_STRUCTURES)

COLUMNS = range(1, 257)
DTYPES = ("float32", "bfloat16", "float16")
ROW_LENGTHS = (1, 2, 4, 8, 16, 32)  # a group has at most as many lanes as a row has entries
VECTOR_LENGTHS = (2, 4, 8, 16)
VECTOR_COLUMNS = {"spmm": (1, 256), "sddmm": (256,)}
# (rows, values in a row): of spmm many block rows, which share blocks, fewer (of 4, 8 and 16 rows
# each), and few, which several warps share; of sddmm long rows and short ones.
VECTOR_ROWS = {
    "spmm": tuple((rows, 512) for rows in (20_000, 12_000, 6_000, 3_000, 1_000)),
    "sddmm": ((10_000, 512), (10_000, 8)),
}
ATTENTION_FORMATS = (CSR, CVS(8), CVS(16))
ATTENTION_DEPTHS = (64, 128)
_ROWS = 10_000


def default_problems(
    op: str, formats: Sequence[Format] = (CSR,), columns: Sequence[int] = COLUMNS
) -> Iterator[Problem]:
    """Problems whose default points are, together, all that a wheel carries for an operation."""
    columns = columns if op in (*TILED, "sddmm") else (1,)
    permuted = (False, True) if op in TILED else (False,)
    sizes = (columns, DTYPES, ROW_LENGTHS, permuted, formats)
    for n, dtype, length, through, format in itertools.product(*sizes):
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


def vector_problems(op: str) -> Iterator[Problem]:
    """As `default_problems`, for tiles of column vectors."""
    sizes = (VECTOR_COLUMNS[op], DTYPES, VECTOR_LENGTHS, VECTOR_ROWS[op])
    permuted = (False, True) if op in TILED else (False,)
    for n, dtype, length, (rows, row), through in itertools.product(*sizes, permuted):
        yield Problem(
            op,
            (rows, rows),
            rows * row,
            n=n,
            dtype=dtype,
            format=CVS(length),
            platform="cuda",
            permuted=through,
        )


@cache
def default_calls(name: str) -> dict[str, KernelCall]:
    """For a name in NAMES: {source of a kernel: a launch of it} for each default kernel."""
    if name in OF_ATTENTION:
        made = _attention_calls(OF_ATTENTION[name])
    elif name in OF_SCORES:
        made = (OF_SCORES[name](dtype, (1, _ROWS, _ROWS), 256) for dtype in DTYPES)
    elif name == _PRODUCT:
        made = _product_calls()
    elif name == _TRANSPOSE:
        entries = 1, 16 * _ROWS
        plans = transpose_cuda.count_plan(*entries, 0), transpose_cuda.move_plan(*entries, 0)
        made = iter((*plans, transpose_cuda.start_plan(*entries)))
    elif name == _BITMAP:
        words = 1, _ROWS, -(-_ROWS // 32)
        plans = bitmap_cuda.of_mask_plan(_ROWS, _ROWS), bitmap_cuda.entries_plan(words, 16 * _ROWS)
        made = iter(plans)
    elif name == _NUCLEUS:
        made = _nucleus_calls()
    else:
        made = _vector_calls(OF_VECTORS[name]) if name in OF_VECTORS else _point_calls(name)
    return {call.source: call for call in made}


def _point_calls(name: str) -> Iterator[KernelCall]:
    op, plan = LAUNCH_PLANS[name]
    vectors = tuple(map(CVS, VECTOR_LENGTHS)) if name in ON_VECTORS else ()
    columns = EDGE_COLUMNS if name in OF_EDGES else COLUMNS
    for problem in default_problems(op, (CSR, *vectors), columns):
        point = choose_schedule(problem)
        assert isinstance(point, AtomicParallelism)
        yield plan(problem, point)


def _vector_calls(op: str) -> Iterator[KernelCall]:
    for problem in vector_problems(op):
        yield LAUNCH_PLANS[op][1](problem, choose_schedule(problem))


def _product_calls() -> Iterator[KernelCall]:
    shape, entries = (_ROWS,) * 3, (16 * _ROWS,) * 2
    for dtype in DTYPES:
        yield spgemm_cuda.launch_plan(dtype, _ROWS, (*entries, 16 * _ROWS))
    yield spgemm_cuda.count_plan(shape, entries, 1)
    yield spgemm_cuda.indices_plan(shape, entries, 16 * _ROWS, 1)


def _nucleus_calls() -> Iterator[KernelCall]:
    for most in (256, _ROWS):  # a warp has a row, or a block
        for dtype in DTYPES:
            yield nucleus_cuda.totals_plan(dtype, (1, _ROWS, most))
            yield nucleus_cuda.select_plan(dtype, (1, _ROWS), most, _ROWS)
        yield nucleus_cuda.write_plan((1, _ROWS), most)


def _attention_calls(plan: Callable[..., KernelCall]) -> Iterator[KernelCall]:
    for depth, dtype, format in itertools.product(ATTENTION_DEPTHS, DTYPES, ATTENTION_FORMATS):
        problem = Problem(
            "attention",
            (_ROWS, _ROWS),
            _ROWS * 512,
            n=depth,
            batch=8,
            dtype=dtype,
            format=format,
            platform="cuda",
        )
        shapes = attention_shapes.AttentionShapes(heads=8, key_heads=8, value_depth=depth)
        yield plan(problem, choose_schedule(problem), shapes)
