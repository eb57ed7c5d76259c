"""Column vectors as operands of spmm_p and sddmm_p, and as entries where no kernel takes them.

A block of BCSR(r, c) is c vectors of length r: no primitive knows of blocks.

The primitives keep vectors as they are, derivatives included. What has no kernels for them, the
reference and on CUDA some lengths, expands them while it is lowered: gradients there run that
platform's kernels.
"""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from sgap_jax.formats import structure, vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import require_arrays
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.formats.structure import positions


def by_rows(A: SparseArray) -> tuple[SparseArray, bool]:
    """CSR or CVS(V) with A's values in A's order, and whether it is A^T rather than A.

    BCSR(r, c) is given as CVS(r); `join_blocks` takes values in that order back. Unchecked COO and
    CSF are put in order; `as_listed` takes values back.
    """
    by_columns = require_arrays(A).format.modes[0] == 1
    A = vectors.split_blocks(A.T if by_columns else A)
    return (A.asformat(CSR) if A.format.vector_length is None else A), by_columns


def as_stored(A: SparseArray, values: Any) -> Any:
    """The values of A's entries, in the order of CSR or CSC, as A stores them."""
    return vectors.collect(A, values) if A.format.block_shape else as_listed(A, values)


def as_listed(A: SparseArray, values: Any) -> Any:
    """Those of an unchecked COO or CSF, which may list its entries in any order; of others as they
    are."""
    if A.is_checked or A.format.levels[:2] == CSR.levels:
        return values
    places = replace(A, values=positions(A.nnz)).asformat(vectors.entries_format(A.format)).values
    return jnp.zeros_like(values).at[places].set(values, unique_indices=True)


class Entries:
    """The structure of vectors with every number an entry, and the ways there and back."""

    def __init__(
        self, arrays: Any, shape: tuple[int, int], vector_length: int, checked: bool
    ) -> None:
        row_offsets, column_indices, *transposed = arrays
        count = column_indices.shape[0]
        numbers = positions(count * vector_length).reshape(count, vector_length)
        fields = structure.as_fields(
            ((), (row_offsets, column_indices)), tuple(transposed), checked=checked
        )
        format = CVS(vector_length)
        self._stored = SparseArray(values=numbers, **fields, shape=shape, format=format)
        self.array = vectors.expand(self._stored)  # its values are places in the flat numbers

    def values(self, values: Any) -> Any:
        """[B, nnz] of [B, vectors, V]."""
        flat = values.reshape(values.shape[0], math.prod(values.shape[1:]))  # -1 is unknown of none
        return flat[:, self.array.values]

    def vectors(self, values: Any) -> Any:
        """[B, vectors, V] of [B, nnz]."""
        place, _ = vectors.positions(self._stored)
        return values[:, place].reshape(values.shape[0], *self._stored.values.shape)
