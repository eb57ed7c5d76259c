"""SpMM and SpMV: C[i, :] = sum_j A[i, j] B[j, :]."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.formats.stored import MadeTranspose, StoredArray
from sgap_jax.formats.structure import unfolded
from sgap_jax.launch.spmm import PLANS, launch_plan, merge_plan, output_dtype, work_of
from sgap_jax.primitives._batch import structures_of_lowering
from sgap_jax.primitives._define import (
    accumulator,
    as_numbers,
    batch_rule,
    bind,
    by_default,
    cast_lowering,
    check_dense,
    check_schedule,
    check_sparse,
    compact_structure,
    define,
    derived,
    empty_index,
    ffi_lowering,
    is_linear_operand,
    jax_lowering,
    joint_batch,
    launch_lowering,
    out_aval,
    resolve,
    row_of_entry,
    static_of,
    structure,
    transposed,
)
from sgap_jax.primitives._kept_lists import lists_of
from sgap_jax.primitives._row_pieces import lowered_work_list
from sgap_jax.primitives._vectors import (
    Entries,
    as_vectors_of_transpose,
    blocks_of,
    by_rows,
    values_of_transpose,
)
from sgap_jax.primitives.sddmm import bind_sddmm, spmm_p
from sgap_jax.schedules import (
    AtomicParallelism,
    CpuTile,
    OctetTile,
    Problem,
    Schedule,
)
from sgap_jax.schedules.cpu import octet_pieces, scatter, scatter_entries
from sgap_jax.schedules.paper import PaperTile
from sgap_jax.schedules.select import chosen
from sgap_jax.schedules.tiles import CPU_TASK

# Below this many columns a batch of dense operands becomes one wider product: the kernel then
# fills its vector registers, which pays for the two transposes (one AVX-512 register of float32).
_FOLD_COLUMNS = 16


def spmm(
    A: SparseArray, B: Any, *, transpose: bool = False, schedule: Schedule | str | None = None
) -> jax.Array:
    """Sparse x dense matrix product: C = A B, or C = A^T B with `transpose`.

        C[i, j] = sum over the stored entries (i, l) of A[i, l] B[l, j]

    Differentiable to any order in `A.values` and B, forward and reverse. The gradient in B is the
    product with the transpose, which gathers through index arrays kept with A (where `from_arrays`
    made a CSR or CSC inside jit, the CPU may go by rows and sort nothing); the gradient in the
    values is an SDDMM: no scatter, and nothing of size nnz x n.

    Args:
      A: sparse [m, k] in CSR, CSC, COO, CVS or BCSR; float32, float64, bfloat16 and float16 have
        kernels. Integers, bool (or of ands) and complex numbers run in plain JAX: right and
        differentiable, but slower, and with an array of nnz x n.
      B: dense [k, n], or [m, n] with `transpose`; any n, zero included.
      transpose: multiply by A^T.
      schedule: how to run, or its text; None lets `choose_schedule` pick.

    Returns:
      C [m, n] ([k, n] with `transpose`) in the promoted dtype of A and B. Sums are carried in
      float32 (float64 for float64) and rounded once, those of integers wrap in their own dtype; on
      the CPU the result is the same bits for any number of threads. Rows without entries are zero.
      NaN or infinity in a row of B reaches only the rows of C that store an entry for it (with
      CVS(V) a zero inside a vector is one).

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      ValueError: B has the wrong shape; ScheduleError for an illegal schedule.
      NotImplementedError: no kernel for this dtype, format or platform with this schedule.

    Source: Sgap, section 2.1 (SpMM); vectorSparse, section 4 (CVS). The CUDA schedules are
    `AtomicParallelism` and, with CVS(V), `OctetTile`, `SubwarpTile`, `WarpTile` and
    `PaperOctetTile`; the CPU schedules are `CpuTile` and, with CVS(V) of bfloat16,
    `OctetTile`.
    """
    if isinstance(B, SparseArray) and not isinstance(A, SparseArray):
        raise TypeError("spmm: expected a SparseArray A and a dense B; B @ A is dense times sparse")
    check_sparse("spmm", "A", A)
    schedule = check_schedule("spmm", schedule)
    transpose = check_flag(transpose, "transpose", "spmm")
    rows = A.shape[0] if transpose else A.shape[1]
    if isinstance(B, np.ndarray | jax.Array) and B.ndim > 2 and rows in (B.shape[0], B.shape[-2]):
        nearest = f"gspmm(A, B{', transpose=True' * transpose}) takes [{rows}, ...]"
        if B.shape[0] != rows:
            nearest = f"A{'.T' * transpose} @ B has a product for each of the leading axes"
        raise ValueError(f"spmm: B must have shape [{rows}, n], got {list(B.shape)}; {nearest}")
    B = check_dense("spmm", "B", B, (rows, "n"))
    return _spmm(A, B, transpose=transpose, schedule=schedule)


@partial(jax.jit, static_argnames=("transpose", "schedule"), inline=True)
def _spmm(A: SparseArray, B: jax.Array, *, transpose: bool, schedule: Schedule | None) -> jax.Array:
    dtype, blocks = jnp.result_type(A.values, B), blocks_of(A)
    A, swapped = by_rows(A)
    made = dict(made=True) if isinstance(A.transposed, MadeTranspose) else {}
    lists, named = lists_of(A)
    return _bind(
        A.values[None].astype(dtype),
        B[None].astype(dtype),
        *structure(A),
        *lists,
        shape=A.shape,
        transpose=transpose != swapped,
        vector_length=A.format.vector_length,
        checked=A.is_checked,
        schedule=by_default(schedule, dtype),
        **static_of(A),
        **blocks,
        **made,
        **named,
    )[0]


def spmv(
    A: SparseArray, x: Any, *, transpose: bool = False, schedule: Schedule | str | None = None
) -> jax.Array:
    """Sparse x dense vector product: y = A x, or y = A^T x with `transpose`.

        y[i] = sum over the stored entries (i, l) of A[i, l] x[l]

    SpMM with one column, for which the kernel has a separate path; under vmap over x the vectors
    become the columns of one product. Dtypes, accumulation, derivatives and errors as for `spmm`.

    Args:
      A: sparse [m, k].
      x: dense [k], or [m] with `transpose`.

    Returns:
      y [m] ([k] with `transpose`).
    """
    check_sparse("spmv", "A", A)
    schedule = check_schedule("spmv", schedule)
    transpose = check_flag(transpose, "transpose", "spmv")
    x = check_dense("spmv", "x", x, (A.shape[0] if transpose else A.shape[1],))
    return _spmv(A, x, transpose=transpose, schedule=schedule)


def _products(A: StoredArray, B: Any, transpose: bool = False) -> jax.Array:
    """A B, or A^T B with `transpose`, for the operators A @ B and B @ A of a SparseArray; of a B
    with leading axes a product for each."""
    array, shape = cast(SparseArray, A), np.shape(B)
    if len(shape) == 1:
        return spmv(array, B, transpose=transpose)
    if len(shape) < 3:
        return spmm(array, B, transpose=transpose)
    flat = as_numbers("A @ B", "B", B).reshape(math.prod(shape[:-2]), *shape[-2:])
    products = jax.vmap(lambda b: spmm(array, b, transpose=transpose))(flat)
    return products.reshape(*shape[:-2], *products.shape[1:])


StoredArray._products = _products


@partial(jax.jit, static_argnames=("transpose", "schedule"), inline=True)
def _spmv(A: SparseArray, x: jax.Array, *, transpose: bool, schedule: Schedule | None) -> jax.Array:
    return _spmm(A, x[:, None], transpose=transpose, schedule=schedule)[:, 0]


# Operands of the primitive: values [B|1, nnz], x [B|1, k, n], row_offsets [m+1],
# column_indices [nnz], column_offsets [k+1], row_indices [nnz], permutation [nnz]; with
# `vector_length` V the arrays of CVS(V): values [B|1, vectors, V], row_offsets [ceil(m/V)+1], ...
# `checked`: whether the index arrays were validated; formats/structure.py defines which entries of
# unchecked ones take part. `statistics`, which may be left out: of the lengths of rows and of
# columns, for the choice of a schedule. `width`, likewise: c, if each c neighbouring vectors are
# a block, and all blocks are whole. `made`, where given: whether the program makes the last three
# arrays, by a sort that it need not run if nothing reads them.


def _bind(*operands: Any, **params: Any) -> Any:
    return bind(spmm_p, *operands, **params)


def direction(shape: tuple[int, int], transpose: bool, arrays: Sequence) -> tuple:
    """(m, k), offsets, indices, permutation (or None) of the multiplied matrix: A or A^T."""
    row_offsets, column_indices, column_offsets, row_indices, permutation = arrays
    if transpose:
        return shape[::-1], column_offsets, row_indices, permutation
    return shape, row_offsets, column_indices, None


def _abstract_eval(
    values: Any,
    x: Any,
    *arrays: Any,
    shape: tuple[int, int],
    transpose: bool,
    vector_length: int | None,
    checked: bool,
    schedule: Any,
    statistics: tuple | None = None,
    width: int | None = None,
    made: bool = False,
) -> Any:
    (m, k), *_ = direction(shape, transpose, arrays)
    assert values.dtype == x.dtype and x.ndim == 3 and x.shape[1] == k
    assert values.shape[2:] == (() if vector_length is None else (vector_length,))
    return out_aval(x, (joint_batch(values.shape[0], x.shape[0]), m, x.shape[2]), x.dtype)


def _reference(
    values: Any, x: Any, *arrays: Any, shape: tuple[int, int], transpose: bool, **_: Any
) -> Any:
    shape, offsets, indices, permutation = direction(shape, transpose, arrays)
    if permutation is not None:
        values = values[:, permutation]
    if values.shape[1] == 0 or x.shape[1] == 0:
        batch = joint_batch(values.shape[0], x.shape[0])
        return jnp.zeros((batch, shape[0], x.shape[2]), x.dtype)
    rows = row_of_entry(offsets, values.shape[1])
    wide = jnp.dtype(jnp.int32) if x.dtype == jnp.bool_ else accumulator(x.dtype)
    products = values[:, :, None].astype(wide) * x[:, indices].astype(wide)
    segments = jax.vmap(
        lambda p: jax.ops.segment_sum(p, rows, num_segments=shape[0], indices_are_sorted=True)
    )
    return segments(products).astype(x.dtype)


def _entries(
    values: Any, x: Any, *arrays: Any, shape: tuple[int, int], vector_length: int, **params: Any
) -> Any:
    entries = Entries(arrays, shape, vector_length, params["checked"])
    arrays = structure(entries.array)
    return _bind(entries.values(values), x, *arrays, shape=shape, vector_length=None, **params)


def _compact(
    values: Any,
    x: Any,
    *arrays: Any,
    shape: tuple[int, int],
    vector_length: int | None,
    **params: Any,
) -> Any:
    arrays, entry, _ = compact_structure(shape, vector_length, arrays)
    params |= dict(shape=shape, vector_length=vector_length, checked=True)
    return _bind(values[:, entry], x, *arrays, **params)


def kernel_operands(
    op: str,
    avals: Any,
    operands: Any,
    shape: tuple[int, int],
    transpose: bool,
    platform: str,
    statistics: tuple | None = None,
) -> tuple[Problem, tuple, tuple]:
    """The problem, the operands that the kernels of all platforms take, and their avals.

    The arguments `operands` and `avals` are the primitive's: values, x and the index arrays.
    """
    (values, x, *arrays), (values_aval, x_aval, *array_avals) = operands, avals
    _, *avals = direction(shape, transpose, array_avals)
    shape, offsets, indices, permutation = direction(shape, transpose, arrays)
    problem = Problem(
        op,
        shape,
        nnz=math.prod(values_aval.shape[1:]),
        n=x_aval.shape[2],
        batch=joint_batch(values_aval.shape[0], x_aval.shape[0]),
        dtype=values_aval.dtype.name,
        format=CSR if values_aval.ndim == 2 else CVS(values_aval.shape[2]),
        platform=platform,
        permuted=permutation is not None,
        rows=None if statistics is None else statistics[int(transpose)],
    )
    if permutation is None:
        permutation, avals[2] = empty_index()
    return problem, (values, offsets, indices, permutation, x), (values_aval, *avals, x_aval)


def _cpu(
    ctx: Any,
    *operands: Any,
    shape: tuple[int, int],
    transpose: bool,
    vector_length: int | None,
    checked: bool,
    schedule: Schedule | None,
    statistics: tuple | None = None,
    width: int | None = None,
    made: bool = False,
) -> Any:
    values, x, row_offsets, column_indices, *_ = operands
    problem, operands, _ = kernel_operands("spmm", ctx.avals_in, operands, shape, transpose, "cpu")
    tile = resolve(schedule, problem, CpuTile, OctetTile)
    walked = (values, row_offsets, column_indices, x)  # by rows of A, also for A^T B
    # The sums of all structures are held at once.
    whole = replace(problem, batch=problem.batch * structures_of_lowering())
    if isinstance(tile, OctetTile):
        if not transpose:
            attrs = dict(tile_columns=tile.tile_n, chunk_nonzeros=CPU_TASK, step=tile.tile_k)
            return ffi_lowering("sgap_spmm_octet_v1", ctx, operands, **attrs)
        attrs = dict(tile_columns=tile.tile_n, pieces=octet_pieces(whole, tile.tile_n))
        return ffi_lowering("sgap_spmm_octet_scatter_v1", ctx, walked, **attrs)
    assert isinstance(tile, CpuTile)
    attrs = dict(tile_columns=tile.columns, chunk_nonzeros=tile.nonzeros, pack=tile.packed)
    if vector_length is None:
        # What unchecked arrays say of columns need not be what they say of rows.
        by_rows = transpose and schedule is None and (checked or made)
        columns, pieces = scatter_entries(whole, made) if by_rows else (0, 0)
        if pieces:  # then nothing needs the transposed structure
            attrs = dict(tile_columns=columns, pieces=pieces)
            return ffi_lowering("sgap_spmm_csr_scatter_v1", ctx, walked, **attrs)
        return ffi_lowering("sgap_spmm_csr_v1", ctx, operands, **attrs)
    columns, pieces = scatter(whole, tile)
    if not pieces:
        return ffi_lowering("sgap_spmm_cvs_v1", ctx, operands, transpose=transpose, **attrs)
    attrs = dict(tile_columns=columns, pieces=pieces)
    return ffi_lowering("sgap_spmm_cvs_scatter_v1", ctx, walked, **attrs)


def _cuda(
    ctx: Any,
    *operands: Any,
    shape: tuple[int, int],
    transpose: bool,
    vector_length: int | None,
    checked: bool,
    schedule: Schedule | None,
    statistics: tuple | None = None,
    width: int | None = None,
    made: bool = False,
) -> Any:
    problem, operands, avals = kernel_operands(
        "spmm", ctx.avals_in, operands, shape, transpose, "cuda", statistics
    )
    if transpose and width and structures_of_lowering() == 1 and problem.nnz:
        turned = _transposed_blocks(ctx, operands, avals, problem, width, schedule)
        if turned is not None:
            return turned
    found = resolve(schedule, problem, *PLANS)
    if isinstance(found, AtomicParallelism) and vector_length is not None:
        return None  # AtomicParallelism has kernels for entries only
    batches = (avals[0].shape[0], avals[-1].shape[0])
    if work_of(problem, found) is not None:
        return _in_pieces(ctx, problem, found, operands, avals)
    call = launch_plan(problem, found, batches, structures_of_lowering())
    if not isinstance(found, AtomicParallelism):
        operands, avals = _operands_of(found, ctx, operands, avals)
        return launch_lowering(ctx, call, operands, avals)
    (out,) = ctx.avals_out
    # Where several groups add to one element, they do so in the accumulator's dtype; the result is
    # rounded once.
    wide = out.update(dtype=jnp.dtype(output_dtype(found, problem.dtype)))
    (result,) = launch_lowering(ctx, call, operands, avals, [wide])
    return [result] if wide.dtype == out.dtype else cast_lowering(ctx, result, wide, out.dtype)


def _transposed_blocks(
    ctx: Any,
    operands: tuple,
    avals: tuple,
    problem: Problem,
    width: int,
    schedule: Schedule | None,
) -> Any:
    """A^T B of blocks on tensor cores: A^T has blocks too (vectorSparse, section 8), which are made
    vectors of `width` rows with a copy of the values. None where there is no octet tile for them.

    The arguments are those of `kernel_operands` for A^T.
    """
    length = problem.vector_length
    asked = replace(problem, format=CVS(width), permuted=False)
    named = isinstance(schedule, OctetTile)
    if length is None or (isinstance(schedule, tuple(PLANS)) and not named):
        return None
    with chosen():  # a question, of which `explain` tells nothing
        usual = None if named else resolve(None, asked, *PLANS)
    if not named and not isinstance(usual, OctetTile):
        return None
    found = resolve(schedule, asked, *PLANS)
    assert isinstance(found, OctetTile)
    values, *arrays, x = operands
    values_aval, *array_avals, x_aval = avals
    of_blocks = partial(as_vectors_of_transpose, length=length, width=width)

    def turned_values(values: Any, *arrays: Any) -> Any:
        return values_of_transpose(values, of_blocks(arrays)[2], width)

    (offsets,) = jax_lowering(ctx, lambda *x: of_blocks(x)[0], arrays, array_avals)
    (indices,) = jax_lowering(ctx, lambda *x: of_blocks(x)[1], arrays, array_avals)
    all_avals = [values_aval, *array_avals]
    (turned,) = jax_lowering(ctx, turned_values, [values, *arrays], all_avals)
    batch, vectors, _ = values_aval.shape
    count = vectors // width * length
    index = array_avals[1]
    none, none_aval = empty_index()
    operands = turned, offsets, indices, none, x
    avals = (
        values_aval.update(shape=(batch, count, width)),
        index.update(shape=(asked.shape[0] // width + 1,)),
        index.update(shape=(count,)),
        none_aval,
        x_aval,
    )
    if work_of(asked, found) is not None:
        return _in_pieces(ctx, asked, found, operands, avals)
    call = launch_plan(asked, found, (batch, x_aval.shape[0]))
    operands, avals = _operands_of(found, ctx, operands, avals)
    return launch_lowering(ctx, call, operands, avals)


def _in_pieces(
    ctx: Any, problem: Problem, schedule: Schedule, operands: tuple, avals: tuple
) -> Any:
    """A product whose long rows are cut: the launch over pieces, and the one that adds their sums
    to its result. The operands are those of `kernel_operands`."""
    work, (out,) = work_of(problem, schedule), ctx.avals_out
    assert work is not None
    batches = (avals[0].shape[0], avals[-1].shape[0])
    call = launch_plan(problem, schedule, batches, structures_of_lowering())
    (values, offsets, indices, permutation, x), (of_values, of_offsets, *of_rest) = operands, avals
    made, of_made = lowered_work_list(ctx, work, offsets, of_offsets)
    operands, avals = (values, made, indices, permutation, x), (of_values, of_made, *of_rest)
    if isinstance(schedule, OctetTile):  # which has no permutation
        operands, avals = (*operands[:3], x), (*avals[:3], avals[4])
    shape = (problem.batch, work.places, (problem.vector_length or 1) * problem.n)
    of_sums = out.update(shape=shape, dtype=jnp.dtype(accumulator(out.dtype)))
    C, sums = launch_lowering(ctx, call, operands, avals, [out, of_sums])
    merge = merge_plan(problem, schedule)
    return launch_lowering(ctx, merge, (sums, made, C), (of_sums, of_made, out), [out])


def _operands_of(tile: Schedule, ctx: Any, operands: tuple, avals: tuple) -> tuple[tuple, tuple]:
    """The operands of a CUDA kernel for vectors, and their avals, selected from those of
    `kernel_operands`."""
    if isinstance(tile, PaperTile):
        return (*operands[:3], operands[4]), (*avals[:3], avals[4])  # no permutation
    if isinstance(tile, OctetTile) and tile.swizzle:
        # The order of the rows takes the place of the permutation, which a product with A lacks.
        values, offsets, indices, _, x = operands
        count, rows = structures_of_lowering(), avals[1].shape[0] - 1
        every = avals[1].update(shape=(count * (rows + 1),))
        (order,) = jax_lowering(ctx, partial(_longest_first, count), [offsets], [every])
        rows = avals[1].update(shape=(rows,))
        return (values, offsets, indices, order, x), (*avals[:3], rows, avals[4])
    return operands, avals


def _longest_first(structures: int, offsets: Any) -> Any:
    lengths = jnp.diff(unfolded(offsets).reshape(structures, -1))
    return jnp.argsort(lengths, descending=True).astype(offsets.dtype).reshape(-1)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    # d(A B) = dA B + A dB
    values, x, *arrays = primals
    dvalues, dx = tangents
    return (
        _bind(values, x, *arrays, **params),
        None if dvalues is None else _bind(dvalues, x, *arrays, **params),
        None if dx is None else _bind(values, dx, *arrays, **params),
    )


def _transpose(
    cotangent: Any, values: Any, x: Any, *arrays: Any, transpose: bool, schedule: Any, **of: Any
) -> tuple[int, Any]:
    # dB = A^T dC;  dvalues = (dC B^T) at A's entries, (B dC^T) for a product with A^T
    made = {name: of.pop(name) for name in ("made",) if name in of}
    if is_linear_operand(x):
        params = dict(transpose=not transpose, schedule=transposed(schedule), **made)
        return 1, _bind(values, cotangent, *arrays, **of, **params)
    left, right = (x, cotangent) if transpose else (cotangent, x)
    params = dict(schedule=derived(schedule))
    return 0, bind_sddmm(left, right, None, None, *arrays, **of, **params)


def _batch(args: Any, dims: Any, **params: Any) -> tuple[Any, int]:
    values, x, *arrays = args
    only_x = dims[1] is not None and all(d is None for i, d in enumerate(dims) if i != 1)
    x_moved = jnp.moveaxis(x, dims[1], 2) if only_x else x  # [1, k, size, n]
    narrow = only_x and not export.is_symbolic_dim(x_moved.shape[3])
    # With explicit mesh axes, split dimensions cannot be joined.
    narrow = narrow and x_moved.shape[3] < _FOLD_COLUMNS and not any(jax.typeof(x).sharding.spec)
    if narrow and values.shape[0] == x_moved.shape[0] == 1 and x_moved.shape[2] > 0:
        # The mapped axis is the outer one: where devices split it, they split the columns.
        _, k, size, n = x_moved.shape
        wide = x_moved.reshape(1, k, size * n)
        y = _bind(values, wide, *arrays, **params)
        return y.reshape(y.shape[:2] + x_moved.shape[2:]), 2
    return batch_rule(spmm_p, 2, args, dims, **params)


define(
    spmm_p,
    data=2,
    axes="b, b _ n -> b _ n",
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=_cpu,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    cuda=_cuda,
    entries=_entries,
    compact=_compact,
    lists=True,
)
