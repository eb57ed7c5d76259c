"""Converts operands to the formats that spmm_p and sddmm_p take (CSR and CVS(V)), and column
vectors to entries where there is no kernel for vectors.

A block of BCSR(r, c) is given as c vectors of length r: no primitive has blocks.

The primitives and their derivatives are calls on vectors. Vectors become entries only in a lowering
without kernels for them (the reference, and on CUDA some lengths), so gradients are lowered by the
same rules.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats import structure, vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import require_arrays
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.formats.structure import positions


def by_rows(A: SparseArray) -> tuple[SparseArray, bool]:
    """(S, by_columns): S in CSR or CVS(V), with A's values in A's order; S is A^T if `by_columns`.

    BCSR(r, c) becomes CVS(r); `join_blocks` puts values back in the order of blocks. Unchecked COO
    and CSF are sorted; `as_listed` puts values back in A's order.
    """
    by_columns = require_arrays(A).format.modes[0] == 1
    A = vectors.split_blocks(A.T if by_columns else A)
    return (A.asformat(CSR) if A.format.vector_length is None else A), by_columns


def blocks_of(A: SparseArray) -> dict[str, Any]:
    """The parameter `width` of spmm_p and sddmm_p: c, if `by_rows(A)` is of whole blocks of
    BCSR(r, c), each c neighbouring vectors. Not for unchecked arrays, which may be compacted."""
    if len(A.format.block_shape) < 2 or not A.is_checked:
        return {}
    sides, (rows, columns) = A.format.block_shape, vectors.grid(A.shape, A.format)
    outer, inner = (A.shape[mode] for mode in A.format.modes)
    whole = (outer, inner) == (rows * sides[0], columns * sides[1])
    return {"width": sides[1]} if whole else {}


def as_vectors_of_transpose(
    arrays: Any, length: int, width: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For A in BCSR(r, c) as vectors of r = `length` rows, with the index arrays of its transpose
    (`arrays`), and c = `width`: A^T in vectors of c rows.

    Returns the row offsets [k / c + 1] and column indices [blocks r] of the vectors, and the block
    of A that each block of A^T is, [blocks]. No sort: in A^T the vectors of a block column come
    column after column, and the first column has those of its blocks in order.
    """
    column_offsets, block_rows, numbers = map(structure.unfolded, arrays)
    offsets, count = column_offsets[::width] // width, numbers.shape[0] // width
    place = positions(count)
    column = jnp.minimum(structure.segment_of_entry(offsets, count), offsets.shape[0] - 2)
    first = jnp.where(place < offsets[-1], place + offsets[column] * (width - 1), 0)
    lane = positions(length)[None]
    indices = (block_rows[first][:, None] * length + lane).reshape(-1)
    return offsets * length, indices, numbers[first] // width


def values_of_transpose(values: Any, blocks: Any, width: int) -> jax.Array:
    """The values [B, blocks r, c] of A^T, whose blocks are those of A with numbers `blocks`, from
    those of A, [B, blocks c, r]."""
    batch, _, length = values.shape
    whole = values.reshape(batch, blocks.shape[0], width, length)[:, blocks]
    return jnp.swapaxes(whole, 2, 3).reshape(batch, blocks.shape[0] * length, width)


def as_stored(A: SparseArray, values: Any) -> Any:
    """Puts values of A's entries, given in the order of CSR or CSC, in the order and shape in which
    A stores them."""
    return vectors.collect(A, values) if A.format.block_shape else as_listed(A, values)


def as_listed(A: SparseArray, values: Any) -> Any:
    """Puts values from the order of CSR or CSC in that of an unchecked COO or CSF array, which may
    list its entries in any order; returns them unchanged for other arrays."""
    if A.is_checked or A.format.levels[:2] == CSR.levels:
        return values
    places = replace(A, values=positions(A.nnz)).asformat(vectors.entries_format(A.format)).values
    return jnp.zeros_like(values).at[places].set(values, unique_indices=True)


class Entries:
    """A structure of vectors as one of entries (`array`), in which each element of a vector is an
    entry; `values` and `vectors` convert values to and from it."""

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
        self.array = vectors.expand(self._stored)  # its values: positions in the flattened vectors

    def values(self, values: Any) -> Any:
        """Values of vectors [B, vectors, V] -> values of entries [B, nnz]."""
        flat = values.reshape(values.shape[0], math.prod(values.shape[1:]))  # -1 fails if B is 0
        return flat[:, self.array.values]

    def vectors(self, values: Any) -> Any:
        """Values of entries [B, nnz] -> values of vectors [B, vectors, V]."""
        place, _ = vectors.positions(self._stored)
        return values[:, place].reshape(values.shape[0], *self._stored.values.shape)
