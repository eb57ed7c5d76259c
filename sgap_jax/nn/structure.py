"""The structure of a layer's sparse weight or pattern, as state beside its parameters."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgap_jax.formats import vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, Format, as_format
from sgap_jax.formats.prune import kept_groups
from sgap_jax.formats.structure import offsets_of_indices, positions, segment_of_entry

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
    A = vectors.with_transpose(A)
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
    key: Any, shape: tuple[int, int], sparsity: float, format: Format, op: str, blocks: int = 1
) -> SparseArray:
    """An array with as many entries (vectors, blocks) as `prune` keeps, at uniformly random places,
    and zeros as values, in time and memory in proportion to what it stores. Of several `blocks` on
    the diagonal, `shape` is that of the blocks one below the other.

    Works under jit and eval_shape: the number of entries is static, their places are not.
    """
    kept = kept_groups(op, shape, format, sparsity)
    offsets, indices = _random_places(key, *vectors.grid(shape, format), kept)
    values = jnp.zeros((kept, *format.block_shape), jnp.float32)
    W = SparseArray.from_arrays(values, offsets, indices, shape=shape, format=format)
    return on_diagonal(op, W, blocks)


def with_room(W: SparseArray) -> SparseArray:
    """W; with one entry of padding if it stores nothing, as Orbax saves no empty arrays."""
    if W.column_indices.shape[0] or not math.prod(vectors.grid(W.shape, W.format)):
        return W
    values, none = jnp.zeros((1, *W.values.shape[1:]), W.dtype), jnp.zeros(1, jnp.int32)
    shape = (W.shape[0], W.shape[1])
    return SparseArray.from_arrays(values, W.row_offsets, none, shape=shape, format=W.format)


def on_diagonal(op: str, W: SparseArray, blocks: int) -> SparseArray:
    """The block-diagonal matrix whose `blocks` lie one below the other in W."""
    if blocks == 1:
        return W
    check_blocks(op, W.shape, W.format, blocks)
    (rows, columns), (height, width) = W.shape, vectors.tile(W.format)
    row = segment_of_entry(W.row_offsets, W.column_indices.shape[0])
    moved = W.column_indices + row // (rows // blocks // height) * (columns // width)
    shape = (rows, blocks * columns)
    return SparseArray.from_arrays(W.values, W.row_offsets, moved, shape=shape, format=W.format)


def check_blocks(
    op: str, shape: tuple[int, ...], format: Format, blocks: int, instead: str = ""
) -> None:
    """ValueError unless the format divides the `blocks` that lie one below the other in `shape`;
    `instead` ends the message."""
    (rows, columns), (height, width) = shape, vectors.tile(format)
    if blocks > 1 and (rows // blocks % height or columns % width):
        raise ValueError(
            f"{op}: format: {format} does not divide the {blocks} blocks of "
            f"[{rows // blocks}, {columns}] that this weight is made of{instead}"
        )


@partial(jax.jit, static_argnums=(1, 2, 3))
def _random_places(key: Any, rows: int, columns: int, kept: int) -> tuple[jax.Array, jax.Array]:
    """(offsets, column indices) of `kept` distinct places, each set of them equally likely."""
    used = jnp.asarray(kept, jnp.int32)
    if kept == 0:
        return jnp.zeros(rows + 1, jnp.int32), jnp.zeros(0, jnp.int32)
    if rows * columns <= 2 * kept:
        places = jnp.sort(jax.random.permutation(key, rows * columns)[:kept]).astype(jnp.int32)
        row, column = jnp.divmod(places, columns)
        return offsets_of_indices(row, rows, used), column

    # The first `kept` distinct of as many draws as have them almost surely: N ln(N / (N - kept))
    # on average, and eight standard deviations more. If they do not, others are drawn.
    mean = -rows * columns * math.log1p(-kept / (rows * columns))
    draws = math.ceil(mean + 8 * math.sqrt(mean) + 8)

    def draw(state: tuple) -> tuple:
        key, *_ = state
        key, of_rows, of_columns = jax.random.split(key, 3)
        row = jax.random.randint(of_rows, (draws,), 0, rows, jnp.int32)
        column = jax.random.randint(of_columns, (draws,), 0, columns, jnp.int32)
        small = rows * columns < 2**31  # one sort key is faster than two
        keys: tuple = (row * columns + column,) if small else (row, column)
        *sorted_, turn = jax.lax.sort((*keys, positions(draws)), num_keys=len(keys), is_stable=True)
        row, column = jnp.divmod(sorted_[0], columns) if small else sorted_
        new = jnp.append(True, (row[1:] != row[:-1]) | (column[1:] != column[:-1]))
        rank = jnp.cumsum(jnp.zeros(draws, jnp.int32).at[turn].set(new.astype(jnp.int32)))
        chosen = new & (rank[turn] <= kept)
        place = jnp.where(chosen, jnp.cumsum(chosen) - 1, kept)
        row, column = (
            jnp.zeros(kept, jnp.int32).at[place].set(x, mode="drop") for x in (row, column)
        )
        return key, row, column, rank[-1]

    none = jnp.zeros(kept, jnp.int32)
    start = (key, none, none, jnp.zeros((), jnp.int32))
    _, row, column, _ = jax.lax.while_loop(lambda state: state[-1] < kept, draw, start)
    return offsets_of_indices(row, rows, used), column
