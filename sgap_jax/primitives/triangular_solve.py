"""Solutions with a triangle of a sparse matrix, and incomplete factors of it: what
`sgap_jax.linalg` differentiates and checks."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import structure
from sgap_jax.primitives._define import row_of_entry


def triangular_solve(
    offsets: jax.Array,
    indices: jax.Array,
    values: jax.Array,
    b: jax.Array,
    *,
    lower: bool,
    unit_diagonal: bool,
) -> jax.Array:
    """x [n, k] with T x = b, T the lower or upper triangle of the CSR matrix [n, n].

        x[i] = (b[i] - sum_{j < i} A[i, j] x[j]) / A[i, i]      (j > i in the upper triangle)

    Entries of the other triangle take no part, nor, with `unit_diagonal`, those of the diagonal. A
    diagonal that is not stored is zero. Index arrays may have any contents; entries at one place
    are summed. Values and b are of one dtype, in which sums are carried: the CPU's kernel has
    float32 and float64. Levels are made once for each structure, of which the latest are kept; the
    bits depend on neither them nor threads. Has no derivative of its own.
    """
    from sgap_jax.runtime import native as native  # registers the FFI targets

    def kernel(*operands: Any) -> jax.Array:
        result = jax.ShapeDtypeStruct(b.shape, b.dtype)
        call = jax.ffi.ffi_call("sgap_triangular_solve_csr_v1", result, vmap_method="broadcast_all")
        flags = dict(lower=np.bool_(lower), unit_diagonal=np.bool_(unit_diagonal))
        return structure.varying_like(call(*operands, **flags), *operands)

    plain = partial(triangular_solve_by_levels, lower=lower, unit_diagonal=unit_diagonal)
    operands = offsets, indices, values, b
    if b.dtype not in (jnp.float32, jnp.float64):
        return plain(*operands)
    return jax.lax.platform_dependent(*operands, cpu=kernel, default=plain)


def triangular_solve_by_levels(
    offsets: Any, indices: Any, values: Any, b: Any, *, lower: bool, unit_diagonal: bool
) -> jax.Array:
    """`triangular_solve` in plain JAX: x <- D^-1 (b - N x) until nothing changes; each step makes
    one more level of rows right."""
    n, nnz = b.shape[0], values.shape[0]
    if not n:  # there may be entries all the same, which name rows that do not exist
        return b
    offsets, indices = structure.well_formed(offsets, indices, n)
    row = row_of_entry(offsets, nnz)
    beside = (indices < row) if lower else (indices > row)
    beside, on = beside & (indices >= 0) & (row < n), (indices == row) & (row < n)
    column = jnp.where(beside, indices, 0)
    zero = jnp.zeros((), values.dtype)
    summed = partial(jax.ops.segment_sum, segment_ids=row, num_segments=n)
    diagonal = summed(jnp.where(on, values, zero))[:, None]
    if unit_diagonal:
        diagonal = jnp.ones_like(diagonal)

    def step(x: jax.Array) -> jax.Array:
        terms = jnp.where(beside[:, None], values[:, None] * x[column], zero)
        return (b - summed(terms)) / diagonal

    def going(state: tuple) -> jax.Array:
        x, before, count = state
        same = (x == before) | ((x != x) & (before != before))
        return ~jnp.all(same) & (count < n)

    first = step(jnp.zeros_like(b))
    start = step(first), first, structure.varying_like(jnp.ones((), jnp.int32), first)
    if not nnz:
        return first
    return jax.lax.while_loop(going, lambda s: (step(s[0]), s[0], s[2] + 1), start)[0]


def incomplete_lu(offsets: jax.Array, indices: jax.Array, values: jax.Array, n: int) -> jax.Array:
    """[nnz]: the factors of level 0 of a CSR matrix [n, n], at its own entries: those of L, whose
    diagonal is one, below the diagonal, those of U on and above it.

    For each row i, and each k < i of its entries in ascending order:

        A[i, k] /= A[k, k],   A[i, j] -= A[i, k] A[k, j]   for the entries (i, j) of A with j > k

    Rows whose diagonal is not stored eliminate nothing. Index arrays may have any contents. The
    CPU's kernel has float32 and float64. Has no derivative.
    """
    from sgap_jax.runtime import native as native

    def kernel(*operands: Any) -> jax.Array:
        result = jax.ShapeDtypeStruct(values.shape, values.dtype)
        call = jax.ffi.ffi_call("sgap_incomplete_lu_csr_v1", result, vmap_method="broadcast_all")
        return structure.varying_like(call(*operands), *operands)

    plain = partial(incomplete_lu_by_entries, n=n)
    if values.dtype not in (jnp.float32, jnp.float64):
        return plain(offsets, indices, values)
    return jax.lax.platform_dependent(offsets, indices, values, cpu=kernel, default=plain)


def incomplete_lu_by_entries(offsets: Any, indices: Any, values: Any, *, n: int) -> jax.Array:
    """`incomplete_lu` in plain JAX, one entry after another; for rows that ascend, and others in
    the order of their entries."""
    nnz = values.shape[0]
    if not nnz or not n:
        return values
    offsets, indices = structure.well_formed(offsets, indices, n)
    row = row_of_entry(offsets, nnz)
    position = structure.positions(nnz)
    known = (indices >= 0) & (row < n)
    on = known & (indices == row)
    diagonal = jnp.full(n, nnz, jnp.int32).at[jnp.where(on, row, n)].min(position, mode="drop")

    def eliminate(p: jax.Array, state: tuple) -> tuple:
        a, at, held = state
        i, k = row[p], indices[p]
        # `at`: the position of each column in row `held`.
        own = jnp.where(known & (row == i), indices, n)

        def of_row() -> jax.Array:
            return jnp.full(n, nnz, jnp.int32).at[own].min(position, mode="drop")

        at = jax.lax.cond(held == i, lambda: at, of_row)
        below = known[p] & (k < i) & (diagonal[jnp.maximum(k, 0)] < nnz)

        def update(a: jax.Array) -> jax.Array:
            factor = a[p] / a[diagonal[k]]
            a = a.at[p].set(factor)

            def subtract(q: jax.Array, a: jax.Array) -> jax.Array:
                j = indices[q]
                target = jnp.where((j > k) & known[q], at[jnp.maximum(j, 0)], nnz)
                return a.at[target].add(-factor * a[q], mode="drop")

            return jax.lax.fori_loop(offsets[k], offsets[k + 1], subtract, a)

        return jax.lax.cond(below, update, lambda a: a, a), at, i

    at = structure.varying_like(jnp.full(n, nnz, jnp.int32), values)
    held = structure.varying_like(jnp.full((), -1, jnp.int32), values)
    return jax.lax.fori_loop(0, nnz, eliminate, (values, at, held))[0]
