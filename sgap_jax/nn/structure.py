"""The structure of a layer's sparse weight or pattern, as state beside its parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgap_jax.formats import vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, Format, as_format
from sgap_jax.formats.prune import kept_groups
from sgap_jax.formats.structure import offsets_of_indices

# Checkpoints have plain arrays with these names.
_NAMES = ("row_offsets", "column_indices", "column_offsets", "row_indices", "permutation")


class Structure(nnx.Variable):
    """State that says which entries exist: an index array, or a mask. It is saved and restored with
    the model, is an argument of `nnx.jit` rather than a constant of the program, and is not
    trained: `wrt=nnx.Param` leaves it out."""


def check_format(op: str, format: Any) -> Format:
    """Returns the format; weights and patterns may be in CSR, CVS(V) or BCSR(r, c)."""
    format = as_format(format, op)
    block = len(format.block_shape)
    by_rows = format.levels[: len(format.levels) - block] == CSR.levels and format.order is None
    if not by_rows or block > 2:
        raise NotImplementedError(
            f"{op}: no {format} here; the nearest are CSR, CVS(V) and BCSR(r, c)"
        )
    return format


def index_arrays(A: SparseArray) -> dict[str, Any]:
    """The index arrays of an array in such a format, by rows and by columns, with their names."""
    assert A.transposed is not None
    return dict(zip(_NAMES, (A.row_offsets, A.column_indices, *A.transposed), strict=True))


def structure_of(A: SparseArray) -> nnx.Dict:
    """The index arrays, each as a variable of its own in a dict, where tools that walk a state find
    it. They are copies, so that the layer can be donated while others use the same A."""
    return nnx.Dict({name: Structure(jnp.array(x)) for name, x in index_arrays(A).items()})


def stored_arrays(structure: nnx.Dict) -> dict[str, Any]:
    return {name: structure[name][...] for name in _NAMES}


def of_index_arrays(
    arrays: dict[str, Any], values: Any, shape: tuple[int, int], format: Format
) -> SparseArray:
    """The inverse of `index_arrays`: a SparseArray of these index arrays and values."""
    row_offsets, column_indices, *transposed = (arrays[name] for name in _NAMES)
    levels: Any = ((), (row_offsets, column_indices))
    return SparseArray(values, levels, tuple(transposed), shape, format)


def random_structure(
    key: Any, shape: tuple[int, int], sparsity: float, format: Format, op: str
) -> SparseArray:
    """An array with as many entries (vectors, blocks) as `prune` keeps, at uniformly random places,
    and zeros as values.

    Works under jit and eval_shape: the number of entries is static, their places are not.
    """
    kept = kept_groups(op, shape, format, sparsity)
    offsets, indices = _random_places(key, *vectors.grid(shape, format), kept)
    values = jnp.zeros((kept, *format.block_shape), jnp.float32)
    return SparseArray.from_arrays(values, offsets, indices, shape=shape, format=format)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _random_places(key: Any, rows: int, columns: int, kept: int) -> tuple[jax.Array, jax.Array]:
    places = jnp.sort(jax.random.permutation(key, rows * columns)[:kept]).astype(jnp.int32)
    row, column = jnp.divmod(places, max(columns, 1))
    return offsets_of_indices(row, rows, jnp.asarray(kept, jnp.int32)), column
