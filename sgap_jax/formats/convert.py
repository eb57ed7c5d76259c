"""Conversions of a `SparseArray`, traced or concrete: to another format, to coordinates, to dense.

The functions take the base class `StoredArray` and make new arrays with `dataclasses.replace`, so
that array.py can import this module.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from sgap_jax.formats import checks, construct, fibers, structure, vectors
from sgap_jax.formats.levels import CSC, CSR, Format, require_stored
from sgap_jax.formats.row_statistics import PatternStatistics
from sgap_jax.formats.stored import Array, StoredArray


def require_unbatched(A: StoredArray, what: str) -> None:
    batch = A.values.shape[: -1 - len(A.format.stored_shape(A.shape))]
    if batch:
        raise ValueError(f"{what} is batched, {batch}; map over it with jax.vmap")
    arrays = [*(x for level in A.index_arrays for x in level), *(A._made_transpose or ())]
    odd = next((x for x in arrays if x.ndim != 1), None)
    if odd is not None:
        raise ValueError(
            f"{what} has index arrays of {odd.ndim} dimensions, {odd.shape}, and values "
            f"{A.values.shape}; where a batch shares its values, map over it with jax.vmap, and "
            "dataclasses.replace(A, values=None, index_arrays=0, transposed=0) as its in_axes"
        )


def require_arrays(A: Array) -> Array:
    """A, if its index arrays have the dtypes and shapes that its format requires, which the bare
    constructor does not check. ValueError otherwise; symbolic sizes are not checked."""
    arrays: list[tuple[str, Any, Any]] = []
    above: Any = 1
    sizes = level_sizes(A.shape, A.format)
    stored = A.values.shape[0]
    for i, (level, size) in enumerate(zip(A.index_arrays, sizes, strict=False)):
        if len(level) == 2:
            arrays.append((f"offsets of level {i}", level[0], above + 1))
        last = i == len(A.index_arrays) - 1
        above = stored if last else level[-1].shape[0] if level else size
        if level:
            arrays.append((f"indices of level {i}", level[-1], above))
    if A._made_transpose is not None:
        names = ("offsets", "indices", "permutation")
        expected = (sizes[1] + 1, stored, stored)
        found = zip(names, A._made_transpose, expected, strict=True)
        arrays += [(f"transposed {name}", x, n) for name, x, n in found]
    for name, x, n in arrays:
        symbolic = any(export.is_symbolic_dim(d) for d in (n, *x.shape))
        if x.dtype != jnp.int32 or not (symbolic or x.shape == (n,)):
            raise ValueError(
                f"SparseArray: {name}: expected int32 of shape [{n}] for {A.format} of shape "
                f"{A.shape}, got {x.dtype} of shape {list(x.shape)}"
            )
    return A


def require_matrix(A: StoredArray, what: str) -> None:
    if A.ndim != 2:
        raise ValueError(f"SparseArray.{what}: expected a matrix, got shape {A.shape}")


def compressed(A: StoredArray) -> tuple[Any, Any]:
    """For a matrix in any format of entries: (offsets over the outer dimension, inner indices),
    made well-formed (see structure.py) if they are unchecked."""
    if A.format.levels[:2] == CSR.levels:
        offsets, inner = A.index_arrays[1]
        if A._every_entry_counts:
            return offsets, inner
        return structure.well_formed(offsets, inner, A.shape[A.format.modes[1]])
    assert A.is_checked  # callers pass an unchecked COO or CSF through _in_order first
    if A.format.is_fiber_tree:
        return fibers.outer_offsets(A), A.index_arrays[1][1]
    (bounds, outer), (inner,) = A.index_arrays
    size = A.shape[A.format.modes[0]]
    return structure.offsets_of_indices(outer, size, bounds[1]), inner


def _other_orientation(A: StoredArray) -> tuple[Any, Any, Any]:
    """The arrays `transposed` of a matrix of entries, which the bare constructor takes as None."""
    return structure.transpose_structure(*compressed(A), A.shape[A.format.modes[1]])


def _in_order(A: Array) -> Array:
    """Converts an unchecked matrix in COO or CSF to CSR, or to CSC if that is its order of modes.
    Its entries may be in any order: a stable sort by the outer coordinate puts those that take no
    part last."""
    outer, inner = A.format.modes
    found, size = coordinates(A), A.shape[outer]
    once = jnp.zeros(2, jnp.int32).at[1].set(A.nnz)
    offsets, _, order = structure.transpose_structure(once, found[outer], size)
    indices = jnp.where(found[outer][order] < size, found[inner][order], -1)
    return replace(
        A,
        values=structure.whole(A.values)[order],
        index_arrays=((), (offsets, indices)),
        transposed=structure.transpose_structure(offsets, indices, A.shape[inner]),
        format=vectors.entries_format(A.format),
    )


def coordinates(A: StoredArray) -> tuple[jax.Array, ...]:
    """One [nnz] index array per dimension; padding, and entries that take no part, get the size of
    the dimension."""
    require_unbatched(A, "SparseArray")
    require_arrays(A)
    # Values may be traced where the structure is not: they are no operand of this program.
    alone = A._replaced(values=None, transposed=None, statistics=PatternStatistics())
    return _coordinates(alone, A.values.shape)


@partial(jax.jit, static_argnames="stored", inline=True)
def _coordinates(A: StoredArray, stored: tuple[int, ...]) -> tuple[jax.Array, ...]:
    A = replace(A, values=jnp.zeros(stored, jnp.bool_))
    found = _stored_coordinates(A)
    if A.is_checked:
        return found
    real = [structure.in_range(x, n) for x, n in zip(found, A.shape, strict=True)]
    part = jnp.stack(real).all(0)
    return tuple(jnp.where(part, x, n) for x, n in zip(found, A.shape, strict=True))


def _stored_coordinates(A: StoredArray) -> tuple[jax.Array, ...]:
    if A.format.is_coordinate:
        bounds, first = A.index_arrays[0]
        if not A.is_checked:
            bounds, first = structure.well_formed(bounds, first, A.shape[A.format.modes[0]])
        used, levels = bounds[1], [first, *(level[-1] for level in A.index_arrays[1:])]
    elif A.format.block_shape:
        return _block_coordinates(A)
    elif A.format.dense_modes:
        return _fiber_coordinates(A)
    else:
        used, levels = fibers.entries(A)
    real = structure.positions(A.nnz) < structure.unfolded(used)
    by_mode = (levels[A.format.modes.index(mode)] for mode in range(A.ndim))
    return tuple(jnp.where(real, index, n) for index, n in zip(by_mode, A.shape, strict=True))


def entries(A: StoredArray, what: str) -> tuple[list[Any], Any]:
    """One index array for each mode, and the values [n], of all stored entries.

    Of a concrete structure NumPy indices without padding. Of a traced one all of the capacity, in
    which padding has the size of each dimension as its coordinate. Values are NumPy, or traced.
    """
    require_unbatched(A, what)
    values: Any = structure.whole(A.values).reshape(-1)
    values = values if checks.is_traced(values) else np.asarray(values)
    if checks.is_traced(*(x for level in A.index_arrays for x in level)):
        return list(coordinates(A)), values
    if A.is_checked and not A.format.block_shape and not A.format.dense_modes:
        levels = stored_levels(A, what)
        found = [levels[A.format.modes.index(mode)] for mode in range(A.ndim)]
        return found, values[: len(found[0])]
    with structure.concrete():  # under jit too
        found = [np.asarray(index) for index in coordinates(A)]
    stored = np.flatnonzero(found[0] < A.shape[0])
    if len(stored) == len(found[0]):
        return found, values
    return [index[stored] for index in found], values[stored]


def by_entries(A: Array) -> Array:
    """A, or its entries in CSR where A has vectors or blocks in a traced structure: how many of
    these a part of A, or a union with another matrix, has is no static size."""
    arrays = jax.tree.leaves(A.index_arrays)
    return asformat(A, CSR) if A.format.block_shape and checks.is_traced(*arrays) else A


def stored_levels(A: StoredArray, what: str) -> list[np.ndarray]:
    """For each level, the coordinates of all entries (vectors, blocks) without padding, in the
    order in which they are stored.

    Raises ValueError if the structure is traced or batched.
    """
    if checks.is_traced(*(x for level in A.index_arrays for x in level)):
        raise ValueError(
            f"{what}: the structure is traced, and how much the result stores is a static size; "
            "call it outside jit and use with_values inside"
        )
    require_unbatched(A, f"{what}: A")
    if A.format.dense_modes:
        raise NotImplementedError(f"{what}: {A.format}; the nearest is A.asformat(COO)")
    if A.format.block_shape:
        offsets, indices = (np.asarray(x) for x in A.index_arrays[1])
        levels = [construct.expand_offsets(offsets, indices.shape[0]), indices[: int(offsets[-1])]]
    elif A.format.is_coordinate:
        # In NumPy, because under jit even indexing a concrete JAX array is traced.
        used = int(np.asarray(A.index_arrays[0][0])[1])
        levels = [np.asarray(level[-1])[:used] for level in A.index_arrays]
    else:
        levels = fibers.numpy_entries(A)[1]
    # Callers, SciPy above all, trust these indices; they may be unchecked, or a NumPy array that
    # was changed after its check.
    for depth, (level, size) in enumerate(zip(levels, level_sizes(A.shape, A.format), strict=True)):
        checks.check_range(level, size, f"indices of level {depth}", what)
    return levels


def level_sizes(shape: tuple[int, ...], format: Format) -> list[int]:
    """The size of each level's dimension; for vectors and blocks, the sizes of their grid."""
    if format.block_shape:
        return vectors.grid(shape, format)
    return [shape[mode] for mode in format.modes]


def _fiber_coordinates(A: StoredArray) -> tuple[jax.Array, ...]:
    """`_stored_coordinates` of each of the flattened values, for formats with dense modes under
    the stored ones."""
    stored, modes = prefix(A), A.format.modes
    sizes = [A.shape[mode] for mode in modes]
    depth = len(sizes) - A.format.dense_modes
    shape = (stored.nnz, *sizes[depth:])
    used, levels = fibers.entries(stored)
    levels = [level.reshape(-1, *[1] * (len(shape) - 1)) for level in levels]
    levels += [
        structure.positions(size).reshape(-1, *[1] * (len(shape) - n - 2))
        for n, size in enumerate(shape[1:])
    ]
    real = structure.positions(stored.nnz) < structure.unfolded(used)
    real = real.reshape(levels[0].shape)
    found = [
        jnp.broadcast_to(jnp.where(real, level, size), shape).reshape(-1)
        for level, size in zip(levels, sizes, strict=True)
    ]
    return tuple(found[modes.index(mode)] for mode in range(A.ndim))


def prefix(A: Array) -> Array:
    """A without its trailing dense modes, and with its modes in the order of the levels. The values
    are placeholders: only their number matters."""
    depth = A.ndim - A.format.dense_modes
    return replace(
        A,
        values=jnp.zeros(A.values.shape[0], jnp.bool_),
        index_arrays=A.index_arrays[:depth],
        shape=tuple(A.shape[mode] for mode in A.format.modes[:depth]),
        format=Format(A.format.levels[:depth]),
    )


def _block_coordinates(A: StoredArray) -> tuple[jax.Array, ...]:
    """`_stored_coordinates` of each of the flattened values of vectors or blocks. Values outside
    the matrix count as padding."""
    offsets, indices = vectors.well_formed(A).index_arrays[1]
    (height, width), count = vectors.tile(A.format), indices.shape[0]
    first = structure.segment_of_entry(offsets, count) * height, indices * width
    row = first[0][:, None, None] + structure.positions(height)[None, :, None]
    column = first[1][:, None, None] + structure.positions(width)[None, None]
    outer, inner = (A.shape[mode] for mode in A.format.modes)
    stored = (structure.positions(count) < structure.unfolded(offsets[-1]))[:, None, None]
    real = stored & (row < outer) & (column < inner)
    levels = [jnp.where(real, x, n).reshape(-1) for x, n in ((row, outer), (column, inner))]
    return tuple(levels[A.format.modes.index(mode)] for mode in range(2))


def todense(A: StoredArray) -> jax.Array:
    return scattered(A.values, coordinates(A), A.shape)


@partial(jax.jit, static_argnames="k")
def diagonal(A: StoredArray, k: int) -> jax.Array:
    require_matrix(A, "diagonal")
    rows, columns = coordinates(A)
    k = max(-A.shape[0], min(k, A.shape[1]))  # diagonals beyond are empty; k may exceed int32
    length = max(min(A.shape[0] + min(k, 0), A.shape[1] - max(k, 0)), 0)
    at = jnp.where(columns - rows == k, jnp.minimum(rows, columns), length)
    return scattered(A.values, (at,), (length,))


@partial(jax.jit, static_argnames="shape", inline=True)
def scattered(values: Any, where: tuple[jax.Array, ...], shape: tuple[int, ...]) -> jax.Array:
    """Scatter-add of stored values to the coordinates `where` of a zero array of this shape: a
    traced structure may have duplicates. Coordinates outside `shape`, such as padding, are
    dropped."""
    values, zeros = structure.whole(values), jnp.zeros(shape, values.dtype)
    if 0 in shape:  # JAX's transpose of the scatter would gather from no elements
        return structure.varying_like(zeros, values, *where)
    target = zeros.at[where]
    return (target.max if values.dtype == jnp.bool_ else target.add)(
        values.reshape(-1), mode="drop"
    )


def row_lengths(A: StoredArray) -> jax.Array:
    require_matrix(A, "row_lengths")
    require_unbatched(A, "SparseArray.row_lengths: A")
    if not A._every_entry_counts and A.format == CSR:  # sums over entries in order, for no scatter
        offsets, columns = structure.well_formed(*compressed(A), A.shape[1])
        before = jnp.append(jnp.zeros(1, jnp.int32), jnp.cumsum(columns >= 0, dtype=jnp.int32))
        return jnp.diff(before[offsets])
    if not A._every_entry_counts:
        rows, columns = coordinates(A)
        stored = ((rows < A.shape[0]) & (columns < A.shape[1])).astype(jnp.int32)
        return jnp.zeros(A.shape[0], jnp.int32).at[rows].add(stored, mode="drop")
    if A.format.block_shape:
        A = vectors.expand(A)
    if A.format.modes[0] == 0:
        return jnp.diff(compressed(A)[0])
    transposed = A.transposed or _other_orientation(A)
    return jnp.diff(transposed[0])


def asformat(A: Array, format: Format | str, max_fill_in: Any = None) -> Array:
    """See `SparseArray.asformat`."""
    what = "SparseArray.asformat"
    limit = None if max_fill_in is None else checks.check_limit(max_fill_in, "max_fill_in", what)
    if format != A.format:
        format = require_stored(format, A.ndim, what)
    if format == A.format:
        return A
    require_unbatched(A, f"{what}: A")
    outer = A.shape[A.format.modes[0]]
    if A.format.is_coordinate and format in (CSR, CSC):
        if outer == checks.INT32_MAX:
            raise NotImplementedError(
                f"{what}: {format} of a matrix in {A.format} of shape {A.shape}: a size of {outer} "
                "is one more than int32 offsets allow; the nearest is A.asformat(COO)"
            )
    index_arrays = jax.tree.leaves((A.index_arrays, A.transposed))
    if checks.is_traced(*index_arrays):
        return _converted(structure.unfolded_structure(A), format, limit)
    # Index arrays that are on no mesh give a result on no mesh; those on a mesh stay on it.
    placed = structure.placed if all(map(structure.on_no_mesh, index_arrays)) else lambda tree: tree
    with structure.concrete():
        if not checks.is_traced(A.values) and structure.on_no_mesh(A.values):
            return placed(_converted(A, format, limit))
        # Convert the numbers 1 .. nnz instead of the values: in the result each says from which
        # position its value comes, and 0 marks fill-in. The values may then be traced.
        numbers = structure.positions(A.nnz) + 1
        found = _converted(replace(A, values=numbers.reshape(A.values.shape)), format, limit)
        source = np.asarray(found.values)
        found = placed(found)
    values = A.values
    if not (source.shape == values.shape and np.array_equal(source.reshape(-1), numbers)):
        taken = structure.whole(values).reshape(-1)[source - 1]
        values = taken if source.all() else jnp.where(source > 0, taken, jnp.zeros_like(taken))
    return replace(found, values=values)


def _converted(A: Array, format: Format, limit: float | None) -> Array:
    """A in `format`: CSR, CSC or COO of a matrix by way of the cached transpose, without a sort;
    other formats by sorting the entries, whose structure must be concrete (`_assembled`)."""
    require_arrays(A)
    if A.format.block_shape:
        split = vectors.split_blocks(A)
        if split.format == format:
            return split
        entries = vectors.expand(split)
        return entries if entries.format == format else _converted(entries, format, limit)
    of_matrices = format in (CSR, CSC) or format.is_coordinate
    spared = format.is_coordinate and construct.spares_offsets(A.format, A.shape, A.nnz)
    spared = spared and not checks.is_traced(*jax.tree.leaves(A.index_arrays))
    if A.ndim != 2 or A.format.dense_modes or not of_matrices or spared:
        return _assembled(A, format, limit)
    if not A.is_checked and A.format.levels[:2] != CSR.levels:
        A = _in_order(A)
        if A.format == format:
            return A
    (offsets, indices), values = compressed(A), A.values
    transposed = A.transposed or _other_orientation(A)
    if not A._every_entry_counts:
        outer = A.shape[A.format.modes[0]]
        transposed = structure.well_formed_transpose(transposed, outer)
    if format.modes != A.format.modes:
        other_offsets, other_indices, permutation = transposed
        inverse = structure.invert_permutation(permutation)
        values, transposed = structure.moved(values, permutation), (offsets, indices, inverse)
        offsets, indices = other_offsets, other_indices
    index_arrays: tuple[Any, ...] = ((), (offsets, indices))
    if format.is_coordinate:
        index_arrays = (_outer_coordinates(offsets, A.nnz), (indices,))
    valid = A._every_entry_counts and not format.is_coordinate
    fields = structure.as_fields(index_arrays, transposed, checked=A.is_checked, valid=valid)
    return replace(A, values=values, **fields, format=format)


@partial(jax.jit, static_argnames="nnz", inline=True)
def _outer_coordinates(offsets: Any, nnz: int) -> tuple[jax.Array, jax.Array]:
    """(bounds, coordinates [nnz]) of the first level of COO, from the offsets of CSR or CSC."""
    bounds = jnp.zeros(2, jnp.int32).at[1].set(offsets[-1])
    return bounds, structure.segment_of_entry(offsets, nnz)


def _assembled(A: Array, format: Format, max_fill_in: float | None) -> Array:
    what = "SparseArray.asformat"
    if checks.is_traced(*jax.tree.leaves(A.index_arrays)):
        raise ValueError(
            f"{what}: {format} of a traced structure: how much it stores is a static size; "
            "convert outside jit and use with_values inside"
        )
    with structure.concrete():  # the values and the transpose may be traced, the indices are not
        found = [np.asarray(index) for index in coordinates(A)]
    used = int((found[0] < A.shape[0]).sum())
    fields = construct.assemble(
        [index[:used] for index in found],
        structure.whole(A.values).reshape(-1)[:used],
        A.shape,
        format,
        duplicates="error",
        dtype=None,
        what=what,
        max_fill_in=max_fill_in,
    )
    return replace(A, **fields)
