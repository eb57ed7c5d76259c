"""SpGEMM: the product of two sparse matrices, with a sparse result."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import capacity, checks, direct
from sgap_jax.formats import structure as structures
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import require_arrays
from sgap_jax.formats.levels import COO, CSC, CSR
from sgap_jax.formats.stored import CheckedLevel, StoredArray
from sgap_jax.launch.spgemm import global_slots, launch_plan, row_sizes, slots_of_block
from sgap_jax.primitives._batch import plain_lowering, structures_of_lowering
from sgap_jax.primitives._define import (
    accumulator,
    bind,
    check_schedule,
    check_sparse,
    define,
    ffi_lowering,
    is_linear_operand,
    joint_batch,
    launch_lowering,
    out_aval,
    row_of_entry,
)
from sgap_jax.primitives._vectors import as_listed
from sgap_jax.primitives.evaluate import evaluate
from sgap_jax.primitives.spgemm_pattern import (
    Rows,
    by_size,
    column_indices,
    each_product,
    pattern_in_capacity,
    row_offsets,
    rows_of,
)
from sgap_jax.primitives.spgemm_told import sizes, tell_structure, tell_values
from sgap_jax.schedules import HashRows, Reference, Schedule
from sgap_jax.schedules.families import failing, warn_once
from sgap_jax.schedules.select import keep_chosen

_OP = "spgemm"


def spgemm(
    A: SparseArray,
    B: SparseArray,
    *,
    mask: SparseArray | None = None,
    plan: SparseArray | None = None,
    nse: int | None = None,
    schedule: Schedule | str | None = None,
) -> SparseArray:
    """Sparse x sparse matrix product: C = A B with a sparse C, or (A B) sampled at a mask.

        C[i, j] = sum over l of A[i, l] B[l, j]

    C stores an entry wherever A[i, l] and B[l, j] are both stored for some l, also where the sum is
    zero. Its structure depends on theirs alone:

    - Of concrete structures it is computed at once, outside of the trace (the symbolic phase).
    - `plan` is such a structure, from `spgemm_plan` or of an earlier result: only values are
      computed (the numeric phase), inside jit too. Where A and B have a product without a place in
      it, that row of C (column, of a plan in CSC) is NaN; for integers the product is left out.
    - `mask` is any pattern: C is computed at its entries alone, as GraphBLAS's masked product.
    - Inside jit, for traced structures, `nse` is a capacity; `C.overflow` counts what did not fit.

    Differentiable to any order in `A.values` and `B.values`, forward and reverse: the gradients are
    products sampled at A and at B, (dC B^T) at A and (A^T dC) at B. Nothing dense is formed.

    Args:
      A: sparse [m, k]; vectors and blocks are expanded to their entries, in CSR. Numbers of any
        dtype: float32, float64, bfloat16 and float16 have kernels on the CPU and on CUDA; others
        and other platforms run in plain JAX.
      B: sparse [k, n], likewise.
      mask: sparse [m, n] in CSR, CSC, COO or CSF; its values are not read.
      plan: as mask.
      nse: how many entries C can store (static).
      schedule: `Reference()` for plain JAX; `HashRows()` for rows of C in hash tables, or
        `HashRows(sorted=False)`, of concrete structures on the CPU; None for the kernel where there
        is one.

    Returns:
      C [m, n] in the promoted dtype of A and B: with the structure and format of `mask` or `plan`,
      else in CSR, or in CSC if both are CSC; columns ascend in each row, but with
      `HashRows(sorted=False)`. Sums are carried in
      float32 (float64 for float64) in the order of A's entries, and rounded once: the same
      bits on the CPU, for any number of threads, and on CUDA.

    Raises:
      TypeError: A, B, mask or plan is not a SparseArray.
      ValueError: shapes do not match; structures are traced and there is neither mask, plan nor
        nse; more than one of these; nse is too small for concrete structures, or A B has 2^31
        entries or more.
      NotImplementedError: a mask or plan of vectors or blocks; an nse of 2^31 or more; `HashRows`
        with a mask, plan or nse, for traced structures or elsewhere than on the CPU, and schedules
        of other operations.

    Source: TACO scheduling, section 3 (iteration over products of sparse operands); Gustavson, "Two
    fast algorithms for sparse matrices" (1978); sampling as in Davis, "SuiteSparse:GraphBLAS".
    """
    A, B = _operands(A, B)
    schedule = check_schedule(_OP, schedule)
    inner = None if schedule is None else schedule._inner
    hashed = schedule if isinstance(schedule, HashRows) else None
    if inner is not None and hashed is None and not isinstance(inner, Reference):
        raise NotImplementedError(
            f"{_OP}: expected schedule=HashRows(), Reference() or None, got {schedule}"
        )
    given = {name: x for name, x in (("mask", mask), ("plan", plan), ("nse", nse)) if x is not None}
    if len(given) > 1:
        raise ValueError(f"{_OP}: expected one of mask, plan and nse, got {' and '.join(given)}")
    if hashed is not None:
        if given:
            raise NotImplementedError(
                f"{_OP}: {hashed} finds the structure of A B; leave it out with {', '.join(given)}"
            )
        return _hashed(A, B, hashed)
    pattern = mask if plan is None else plan
    if pattern is None:
        found = _at_once(A, B) if schedule is None and nse is None else None
        if found is not None:
            tell_structure(A, B, found, "structure and values in one native pass")
            return found
        made = _plan(A, B, nse, schedule if inner is None else None)
        tell_structure(A, B, made, "structure first, then values")
        return _sampled(A, B, made, schedule, complete=nse is None)
    name = "mask" if plan is None else "plan"
    _check_pattern(name, pattern)
    if pattern.shape != (A.shape[0], B.shape[1]):
        expected = (A.shape[0], B.shape[1])
        raise ValueError(f"{_OP}: {name}: expected shape {expected}, got {pattern.shape}")
    return _sampled(A, B, pattern, schedule, complete=plan is not None)


def spgemm_plan(A: SparseArray, B: SparseArray, *, nse: int | None = None) -> SparseArray:
    """The structure of C = A B: the symbolic phase of a sparse product, for calls of
    `spgemm(A, B, plan=...)` with other values, inside jit too.

    Args:
      A: sparse [m, k], as of `spgemm`; its values are not read.
      B: sparse [k, n], likewise.
      nse: how many entries it can store (static); None: as many as there are, for which the
        structures of A and B must be concrete.

    Returns:
      A SparseArray [m, n] with zeros as values, in the promoted dtype of A and B; CSR, or CSC if
      both are CSC. `overflow` counts entries that did not fit.

    Raises:
      TypeError, ValueError, NotImplementedError: as `spgemm`.
    """
    A, B = _operands(A, B)
    return _plan(A, B, nse, None)


def _plan(
    A: SparseArray, B: SparseArray, nse: int | None, schedule: Schedule | None
) -> SparseArray:
    if A.format == B.format == CSC:
        return _plan(B.T, A.T, nse, schedule).T
    nse = None if nse is None else checks.check_count(nse, "nse", _OP)
    checks.check_nnz(nse or 0, f"{_OP}: nse")
    dtype = jnp.result_type(A.values, B.values)
    left, right = (rows_of(X)[1] for X in (A, B))
    arrays = left.offsets, left.indices, right.offsets, right.indices
    shape = A.shape[0], B.shape[1]
    if checks.is_traced(*arrays):
        if nse is None:
            raise ValueError(
                f"{_OP}: the structure of A or B is traced, so that of A B is not known; pass a "
                "plan, made by spgemm_plan(A, B) outside of jit, a mask, or a capacity nse"
            )
        offsets, indices = pattern_in_capacity(
            *arrays, columns=shape[1], nse=nse, schedule=schedule
        )
        transposed = structures.transpose_structure(offsets, indices, shape[1])
        fields = structures.as_fields(((), (offsets, indices)), transposed, checked=False)
    else:
        fields, nse = _concrete_pattern(arrays, shape[1], nse)
    return SparseArray(values=jnp.zeros(nse, dtype), **fields, shape=shape, format=CSR)


def _hashed(A: SparseArray, B: SparseArray, rows: HashRows) -> SparseArray:
    """A B with rows in hash tables: structure and values at once, or where these are traced or of a
    dtype without kernels at the structure that was found."""
    keep_chosen(sizes(A, B), rows, False, rows.explain)
    found = _at_once(A, B, rows)
    if found is None:
        with structures.concrete():
            left, right = (X.with_values(np.ones(X.values.shape, np.float32)) for X in (A, B))
            pattern = _at_once(left, right, rows)
        if pattern is None:
            raise NotImplementedError(
                f"{_OP}: {rows} runs on the CPU and finds the structure of A B outside of the "
                "trace, from concrete structures of A and B, in memory for all of its products; "
                "leave the schedule out"
            )
        found = _sampled(A, B, pattern, None, complete=True)
    return found


def _at_once(A: SparseArray, B: SparseArray, rows: HashRows | None = None) -> SparseArray | None:
    """A B of concrete operands, structure and values in one pass; None where no kernel does it."""
    if A.format == B.format == CSC:
        other = _at_once(B.T, A.T, rows)
        return None if other is None else other.T
    dtype = jnp.result_type(A.values, B.values)
    if checks.is_traced(A.values, B.values) or dtype.name not in direct.KERNEL_DTYPES:
        return None
    matrices: list[tuple[Any, Any, Any]] = []
    for X in (A, B):
        if X.format == CSR:
            values, (offsets, indices) = X.values, require_arrays(X).index_arrays[1]
        else:
            values, (offsets, indices, *_) = rows_of(X)
        matrices.append((offsets, indices, values.astype(dtype)))
    sums = "" if rows is None else "hash" if rows.sorted else "hash, unsorted"
    found = direct.product(matrices[0], matrices[1], B.shape[1], sums)
    if found is None:
        return None
    offsets, indices, values = found
    later: Any = direct.later_transpose(offsets, indices, B.shape[1])
    ascending = rows is None or rows.sorted
    arrays = ((), CheckedLevel(offsets, indices) if ascending else (offsets, indices))
    return SparseArray(values, arrays, later, (A.shape[0], B.shape[1]), CSR)


def _concrete_pattern(arrays: tuple, columns: int, nse: int | None) -> tuple[dict[str, Any], int]:
    """The fields of A B, and its capacity; on the host, which every platform has."""
    host = jax.local_devices(backend="cpu")[0]
    with structures.concrete(), jax.default_device(host):
        arrays = tuple(jnp.asarray(np.asarray(x)) for x in arrays)
        offsets = row_offsets(*arrays, columns=columns)
        count = int(offsets[-1])
        if count == checks.INT32_MAX:
            raise ValueError(f"{_OP}: A B has {count} entries or more; index arrays are int32")
        if nse is not None and count > nse:
            raise ValueError(
                f"{_OP}: nse: expected at least {count}, the number of entries of A B, got {nse}"
            )
        indices = column_indices(*arrays, offsets, columns=columns, nse=count)
        fields: dict[str, Any] = {
            "index_arrays": ((), CheckedLevel(offsets, indices)),
            "transposed": direct.later_transpose(offsets, indices, columns),
        }
        if nse is not None and nse > count:
            transposed = structures.transpose_structure(offsets, indices, columns)
            fields = structures.as_fields(((), (offsets, indices)), transposed, checked=True)
            matrix = {
                "values": jnp.zeros(count),
                "shape": (len(offsets) - 1, columns),
                "format": CSR,
            }
            padded = capacity.padded(fields | matrix, nse, _OP)
            fields = {name: padded[name] for name in fields}
        return fields, count if nse is None else nse


def _sampled(
    A: SparseArray, B: SparseArray, pattern: SparseArray, schedule: Schedule | None, complete: bool
) -> SparseArray:
    if pattern.format.modes[0] == 1:  # (A B)^T = B^T A^T
        return _sampled(B.T, A.T, pattern.T, schedule, complete).T
    values = _values(A, B, pattern, schedule=schedule, complete=complete)
    return pattern.with_values(values)


@partial(jax.jit, static_argnames=("schedule", "complete"), inline=True)
def _values(
    A: SparseArray,
    B: SparseArray,
    pattern: SparseArray,
    *,
    schedule: Schedule | None,
    complete: bool,
) -> jax.Array:
    dtype = jnp.result_type(A.values, B.values)
    (a, a_rows), (b, b_rows) = rows_of(A), rows_of(B)
    _, c_rows = rows_of(pattern)
    shape = (*A.shape, B.shape[1])
    values = _bind(
        a[None].astype(dtype),
        b[None].astype(dtype),
        a_rows,
        b_rows,
        c_rows,
        shape=shape,
        complete=complete,
        schedule=schedule,
    )[0]
    return as_listed(pattern, values)


# Operands of the primitive: a [B|1, entries of A], b [B|1, entries of B], then the five arrays of
# `Rows` of each of A [m, k], B [k, n] and C [m, n]; those of the transposes serve the derivatives.
# Result: [B, entries of C].


def _bind(a: Any, b: Any, *rows: Rows, **params: Any) -> Any:
    return bind(spgemm_p, a, b, *(x for each in rows for x in each), **params)


def _split(arrays: Any) -> tuple[Rows, Rows, Rows]:
    return Rows(*arrays[:5]), Rows(*arrays[5:10]), Rows(*arrays[10:])


def _abstract_eval(
    a: Any, b: Any, *arrays: Any, shape: tuple[int, int, int], complete: bool, schedule: Any
) -> Any:
    of_a, of_b, of_c = _split(arrays)
    assert a.dtype == b.dtype and a.shape[1:] == of_a.indices.shape
    assert b.shape[1:] == of_b.indices.shape
    batch = joint_batch(a.shape[0], b.shape[0])
    return out_aval(a, (batch, *of_c.indices.shape), a.dtype)


class _Places:
    """Finds entries of a pattern, whose columns may be in any order and repeated."""

    def __init__(self, pattern: Rows) -> None:
        self.rows = row_of_entry(pattern.offsets, pattern.indices.shape[0])
        every = structures.positions(pattern.indices.shape[0])
        _, self.columns, self.order = jax.lax.sort(
            (self.rows, pattern.indices, every), num_keys=2, is_stable=True
        )
        self.offsets = pattern.offsets

    def first(self, row: Any, column: Any) -> tuple[Any, Any]:
        """For each (row, column): the first such entry in sorted order, and whether one exists."""
        end = self.offsets[row + 1]

        def halve(_: int, bounds: tuple) -> tuple:
            low, high = bounds
            middle = low + (high - low) // 2
            less = self.columns[middle] < column
            inside = low < high
            return jnp.where(inside & less, middle + 1, low), jnp.where(
                inside & ~less, middle, high
            )

        # 31 halvings end any search: entries are counted in int32.
        place, _ = jax.lax.fori_loop(0, 31, halve, (self.offsets[row], end))
        return place, (place < end) & (self.columns[place] == column)


def _reference(
    a: Any, b: Any, *arrays: Any, shape: tuple[int, int, int], complete: bool, schedule: Any
) -> Any:
    (m, k, n), dtype = shape, a.dtype
    left, right, pattern = (
        rows.well_formed(size) for rows, size in zip(_split(arrays), (k, n, n), strict=True)
    )
    batch, count = joint_batch(a.shape[0], b.shape[0]), pattern.indices.shape[0]
    if 0 in (m, k, n, count):
        return jnp.zeros((batch, count), dtype)
    wide = jnp.dtype(jnp.int32) if dtype == jnp.bool_ else accumulator(dtype)
    places = _Places(pattern)
    row = jnp.minimum(row_of_entry(left.offsets, left.indices.shape[0]), m - 1)

    def step(state: Any, entry: Any, column: Any) -> Any:
        sums, missing = state
        place, found = places.first(row, column)
        products = a.astype(wide) * b[:, entry].astype(wide)
        sums = sums.at[:, jnp.where((column >= 0) & found, place, count)].add(products, mode="drop")
        lost = jnp.where((column >= 0) & ~found, row, m)
        return sums, missing.at[lost].set(True, mode="drop")

    zeros = jnp.zeros((batch, count), wide), jnp.zeros(m, bool)
    state = tuple(structures.varying_like(x, a, b, *arrays) for x in zeros)
    sums, missing = each_product(left, right, step, state)
    own_row, own_column = jnp.minimum(places.rows, m - 1), places.columns
    first, _ = places.first(own_row, own_column)  # entries of one place have one sum
    part = (own_column >= 0) & (places.rows < m)
    values = jnp.where(part, sums[:, first], 0).astype(dtype)
    if complete and jnp.issubdtype(dtype, jnp.inexact):
        values = jnp.where(part & missing[own_row], jnp.nan, values)
    return jnp.zeros_like(values).at[:, places.order].set(values, unique_indices=True)


def _cpu(
    ctx: Any,
    a: Any,
    b: Any,
    *arrays: Any,
    shape: tuple[int, int, int],
    complete: bool,
    schedule: Schedule | None,
) -> Any:
    symbolic, dtype = jax.export.is_symbolic_dim(shape[2]), ctx.avals_in[0].dtype.name
    if schedule is not None or symbolic:
        return None
    kernels = dtype in direct.KERNEL_DTYPES
    counts = tuple(rows.indices.shape[0] for rows in _split(ctx.avals_in[2:]))
    tell_values("cpu", shape, counts, dtype, kernels)
    if not kernels:
        return None
    operands = [*(x for rows in _split(arrays) for x in rows[:2]), a, b]
    return ffi_lowering(
        "sgap_spgemm_csr_v1", ctx, operands, columns=np.int64(shape[2]), complete=complete
    )


def _cuda(
    ctx: Any,
    a: Any,
    b: Any,
    *arrays: Any,
    shape: tuple[int, int, int],
    complete: bool,
    schedule: Schedule | None,
) -> Any:
    aval, bval, *others = ctx.avals_in
    entries = tuple(rows.indices.shape[0] for rows in _split(others))
    dtype = aval.dtype.name
    every = (*shape, *entries, joint_batch(aval.shape[0], bval.shape[0]))
    symbolic = any(jax.export.is_symbolic_dim(n) for n in every)
    if schedule is not None or symbolic:
        return None
    tell_values("cuda", shape, entries, dtype, dtype in direct.KERNEL_DTYPES)
    if dtype not in direct.KERNEL_DTYPES:
        return None
    # Several structures: one after the other.
    if 0 in every or structures_of_lowering() > 1:
        return None
    if (why := failing().get(_OP)) is not None:
        warn_once(_OP, why, "sparse products run in plain JAX")
        return None
    slots = slots_of_block(dtype)
    (out,), int32 = ctx.avals_out, others[0]
    count = global_slots(entries[2], shape[2], slots)
    tables = [int32.update(shape=(count,)), out.update(shape=(count,), dtype=accumulator(dtype))]

    def prepared(*arrays: Any) -> tuple:
        a, b, c = (
            x.well_formed(n)
            for x, n in zip(_split(arrays), shape[1:2] + 2 * shape[2:], strict=True)
        )
        stored = jnp.minimum(jnp.diff(c.offsets), shape[2])
        return *a[:2], *b[:2], *c[:2], *by_size(a, b, stored, row_sizes(slots))

    valid = plain_lowering(prepared, True, ctx.replace(avals_in=others), arrays)
    avals = [x for rows in _split(others) for x in rows[:2]]
    avals += [int32.update(shape=(n,)) for n in (shape[0], len(row_sizes(slots).entries) + 1)]
    call = launch_plan(
        dtype, shape[0], entries, batches=(aval.shape[0], bval.shape[0]), complete=complete
    )
    return launch_lowering(ctx, call, [a, b, *valid], [aval, bval, *avals], [out, *tables])[:1]


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    (a, b, *arrays), (da, db, *_) = primals, tangents
    call = partial(bind, spgemm_p)
    return (
        call(a, b, *arrays, **params),
        None if da is None else call(da, b, *arrays, **params),
        None if db is None else call(a, db, *arrays, **params),
    )


def _transpose(
    cotangent: Any,
    a: Any,
    b: Any,
    *arrays: Any,
    shape: tuple[int, int, int],
    complete: bool,
    schedule: Any,
) -> tuple[int, Any]:
    (m, k, n), (of_a, of_b, of_c) = shape, _split(arrays)
    params = dict(complete=False, schedule=schedule)
    if is_linear_operand(a):  # (dC B^T) at A
        b = _permuted(b, of_b.permutation)
        return 0, _bind(cotangent, b, of_c, of_b.transpose(), of_a, shape=(m, n, k), **params)
    a = _permuted(a, of_a.permutation)  # (A^T dC) at B
    return 1, _bind(a, cotangent, of_a.transpose(), of_c, of_b, shape=(k, m, n), **params)


def _permuted(values: Any, permutation: Any) -> Any:
    """values [B, entries] in the order of the transpose; a split batch stays so."""
    split = jax.typeof(values).sharding.spec[1:]
    return (structures.whole(values) if any(split) else values)[:, permutation]


spgemm_p = define(
    "spgemm",
    data=2,
    axes="b, b -> b",
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=_cpu,
    cuda=_cuda,
    jvp=_jvp,
    transpose=_transpose,
)


def _check_pattern(name: str, x: Any) -> None:
    check_sparse(_OP, name, x)
    if x.format.block_shape or x.format.dense_modes:
        raise NotImplementedError(
            f"{_OP}: {name}: expected a format of entries, got {x.format}; the nearest is "
            f"{name}.asformat(CSR)"
        )


def _operands(A: Any, B: Any) -> tuple[SparseArray, SparseArray]:
    """A and B after their checks; of vectors and blocks the entries."""
    for name, x in (("A", A), ("B", B)):
        check_sparse(_OP, name, x)
    if A.shape[1] != B.shape[0]:
        raise ValueError(
            f"{_OP}: B: expected {A.shape[1]} rows, as A has columns, got shape {B.shape}"
        )
    entries = (not x.format.block_shape and not x.format.dense_modes for x in (A, B))
    A, B = (x if own else x.asformat(CSR) for x, own in zip((A, B), entries, strict=True))
    return A, B


# A product with a sparse vector, by how many dimensions both have.
_WITH_VECTORS = {
    (2, 1): "y(i) = A(i,j) * B(j)",
    (1, 2): "y(j) = A(i) * B(i,j)",
    (1, 1): "y = A(i) * B(i)",
}


def _sparse_product(A: Any, B: Any) -> Any:
    """A @ B for sparse matrices, or vectors in their place; of two vectors the inner product."""
    text = _WITH_VECTORS.get((A.ndim, B.ndim))
    if text is None:
        return spgemm(A, B)
    if A.shape[-1] != B.shape[0]:
        raise ValueError(
            f"SparseArray @ SparseArray: B: expected shape[0] = {A.shape[-1]}, as the last of A's "
            f"dimensions, got shape {B.shape}"
        )
    if A.ndim + B.ndim == 2:
        return evaluate(text, A=A, B=B)
    if checks.is_traced(*jax.tree.leaves((A.index_arrays, B.index_arrays))):
        raise ValueError(
            "SparseArray @ SparseArray: the structure of an operand is traced, and how much a "
            "sparse vector stores is a static size; A @ v.todense() is the dense vector"
        )
    return evaluate(text, A=A, B=B, format=COO)


StoredArray._sparse_product = _sparse_product
