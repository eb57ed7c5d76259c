"""Vectors of the entries of a matrix: their order, and the incidence matrix, by which sums over the
entries of each row, and copies to them, are products.

The incidence matrix of rows and entries has a one at (i, q) where entry q is in row i. It reuses
the offsets of the matrix, so that a sum of vectors [nnz, d] over rows is an `spmm` that reads them
once, in order, and its derivative one with the transpose.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR
from sgap_jax.formats.structure import (
    as_fields,
    invert_permutation,
    positions,
    segment_of_entry,
    unfolded,
)
from sgap_jax.primitives._define import compact_structure, structure
from sgap_jax.primitives._vectors import by_rows
from sgap_jax.primitives.spmm import spmm
from sgap_jax.schedules import Schedule


def entries_by_rows(A: SparseArray) -> tuple[SparseArray, bool, Any]:
    """(S, by_columns, order): S in CSR with ones as values, of A^T if `by_columns`. Entry p of S is
    entry order[p] of A; None if both have the same order."""
    if A.is_checked or A.format.levels[:2] == CSR.levels:
        S, by_columns = by_rows(replace(A, values=jnp.ones(A.nnz)))
        return S, by_columns, None
    S, by_columns = by_rows(replace(A, values=positions(A.nnz)))
    return replace(S, values=jnp.ones(A.nnz)), by_columns, S.values


def in_order(values: Any, order: Any) -> Any:
    return values if order is None else values[order]


def as_given(values: Any, order: Any) -> Any:
    """Undoes `in_order`."""
    if order is None:
        return values
    return jnp.zeros_like(values).at[order].set(values, unique_indices=True)


def incidence_of(
    arrays: Sequence, shape: tuple[int, int], transpose: bool, dtype: Any
) -> SparseArray:
    """The incidence matrix [m, nnz] of the rows of a matrix in CSR with these five valid index
    arrays, or [k, nnz] of its columns."""
    row_offsets, column_indices, column_offsets, _, permutation = unfolded(tuple(arrays))
    nnz = column_indices.shape[0]
    place = positions(nnz)
    stored = jnp.minimum(jnp.arange(nnz + 1, dtype=jnp.int32), row_offsets[-1])
    if transpose:
        offsets, entries, size = column_offsets, permutation, shape[1]
        other = (stored, column_indices, invert_permutation(permutation))
    else:
        offsets, entries, size = row_offsets, place, shape[0]
        other = (stored, segment_of_entry(row_offsets, nnz) if size else place, place)
    fields = as_fields(((), (offsets, entries)), other, checked=True)
    return SparseArray(values=jnp.ones(nnz, dtype), **fields, shape=(size, nnz), format=CSR)


def incidence(A: SparseArray, dtype: Any) -> SparseArray:
    """[m, nnz] in CSR: a one at (i, q) where entry q of A (in the order of its values) is in row
    i."""
    S, by_columns, order = entries_by_rows(A)
    arrays, (m, k) = structure(S), S.shape
    if not S._every_entry_counts:
        arrays, entry, _ = compact_structure((m, k), None, arrays)
        order = entry if order is None else order[entry]
    B = incidence_of(arrays, (m, k), by_columns, dtype)
    if order is None:
        return B
    shape = k if by_columns else m, A.nnz
    offsets, entries = B.row_offsets, order[B.column_indices]
    return SparseArray.from_arrays(B.values, offsets, entries, shape=shape)


def entry_sums(
    values: Any,
    arrays: Sequence,
    shape: tuple[int, int],
    transpose: bool,
    schedule: Schedule | None,
) -> Any:
    """Sums [B, m, n] of vectors [B, nnz, n] over the rows of a valid structure, or [B, k, n] over
    its columns."""
    B = incidence_of(arrays, shape, transpose, values.dtype)
    return jax.vmap(lambda v: spmm(B, v, schedule=schedule))(values)
