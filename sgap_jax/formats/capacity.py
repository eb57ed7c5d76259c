"""Matrices with a capacity: made of traced coordinates or of a traced dense matrix, inside jit.

The capacity `nse` is static. How many entries there are is known when the program runs: the last
offset is that number, also where it is more than the capacity. Such offsets are not valid: so
`checked()` fails and names both numbers, and operations see only what is stored, as
formats/structure.py defines. If the capacity suffices for any contents, the structure counts as
checked.

Sorting is by counting, one mode after the other: linear in the entries and in the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from sgap_jax.formats import checks, construct, structure
from sgap_jax.formats.levels import CSC, CSR, Format
from sgap_jax.formats.stored import StoredArray


def require_sortable(format: Format, ndim: int, what: str) -> None:
    """NotImplementedError for a format that is not made of entries in a static capacity."""
    if ndim != 2:
        raise NotImplementedError(
            f"{what}: a tensor of {ndim} dimensions with nse or inside jit; the nearest is a matrix"
        )
    if format not in (CSR, CSC) and not format.is_coordinate:
        raise NotImplementedError(
            f"{what}: {format} with nse or inside jit; the nearest are CSR, CSC and COO, and for "
            "vectors and blocks select.top_k or from_arrays"
        )


@structure.in_auto_axes
@partial(jax.jit, static_argnames=("shape", "format", "nse", "merge"), inline=True)
def of_coordinates(
    coordinates: Sequence[jax.Array],
    values: jax.Array,
    *,
    shape: tuple[int, ...],
    format: Format,
    nse: int,
    merge: bool,
) -> dict[str, Any]:
    """Values and index arrays of these entries, in any order; those out of range are left out.

    With `merge` equal coordinates are summed in `accumulator(dtype)`, otherwise each is an entry.
    """
    found = _sorted(coordinates, shape, format, nse, merge)
    count, wide = values.shape[0], construct.accumulator(values.dtype)
    each = structure.whole(values)[found.source].astype(wide)
    sums = jnp.zeros(nse, wide)
    if nse != 0:  # the transpose of the sum is a gather, which JAX refuses from an empty array
        sums = sums.at[found.to].add(each, mode="drop")
    symbolic = export.is_symbolic_dim(count)
    fits = merge and (nse == count if symbolic else nse >= count)
    return of_offsets(sums.astype(values.dtype), found.offsets, found.indices, shape, format, fits)


class _Sorted(NamedTuple):
    """Entries in order: at each position the entry that comes there (`source`), and its place among
    those that are stored (`to`, the capacity where it takes no part); the structure of these."""

    source: jax.Array
    to: jax.Array
    offsets: jax.Array
    indices: jax.Array


def _sorted(
    coordinates: Sequence[jax.Array], shape: tuple[int, ...], format: Format, nse: int, merge: bool
) -> _Sorted:
    count, sizes = coordinates[0].shape[0], [shape[mode] for mode in format.modes]
    outer, inner = (checks.saturated(coordinates[mode]) for mode in format.modes)
    real = structure.in_range(outer, sizes[0]) & structure.in_range(inner, sizes[1])
    # By the inner mode, then by the outer: each sort is stable.
    once = jnp.asarray([0, count], jnp.int32)
    by_inner = structure.transpose_structure(once, jnp.where(real, inner, -1), sizes[1])
    order = by_inner[2]
    offsets, indices, permutation = structure.transpose_structure(
        by_inner[0], outer[order], sizes[0]
    )
    used = offsets[-1]
    place = structure.positions(count)
    if merge and count:
        rows = structure.segment_of_entry(offsets, count)
        again = (rows[1:] == rows[:-1]) & (indices[1:] == indices[:-1])
        first = (place < used) & jnp.append(True, ~again)
        # How many entries there are before each position, equal ones counted once.
        before = jnp.append(0, jnp.cumsum(first, dtype=jnp.int32)).astype(jnp.int32)
        offsets, place = before[offsets], before[1:] - 1
    # To the first places: several to one where they are equal, and none beyond the capacity.
    to = jnp.where(structure.positions(count) < used, place, nse)
    indices = jnp.zeros(nse, jnp.int32).at[to].set(indices, mode="drop")
    return _Sorted(order[permutation], to, offsets, indices)


@structure.in_auto_axes
@partial(jax.jit, static_argnames=("shape", "format", "combine"), inline=True)
def of_both(
    first: tuple[Sequence[jax.Array], jax.Array],
    second: tuple[Sequence[jax.Array], jax.Array],
    *,
    shape: tuple[int, ...],
    format: Format,
    combine: Callable,
) -> dict[str, Any]:
    """Values and index arrays of the union of two lists of entries, (coordinates, values) each, in
    a capacity for all of them. Equal coordinates of one list are summed in `accumulator(dtype)`;
    then `combine(a, b)` has the values of both, 0 where one stores none, and which of them store
    an entry: `combine(a, b, a_stored, b_stored)`."""
    pairs = zip(first[0], second[0], strict=True)
    coordinates = [jnp.concatenate(pair) for pair in pairs]
    count = coordinates[0].shape[0]
    found = _sorted(coordinates, shape, format, count, merge=True)
    place = jnp.zeros(count, jnp.int32).at[found.source].set(found.to, unique_indices=True)

    def spread(values: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = construct.accumulator(values.dtype)
        each = structure.whole(values).astype(wide)
        sums = jnp.zeros(count, wide).at[place].add(each, mode="drop").astype(values.dtype)
        return sums, jnp.zeros(count, jnp.bool_).at[place].set(True, mode="drop")

    (a, in_a), (b, in_b) = (
        spread(values, part)
        for values, part in (
            (first[1], place[: len(first[1])]),
            (second[1], place[len(first[1]) :]),
        )
    )
    values = combine(a, b, in_a, in_b)
    return of_offsets(values, found.offsets, found.indices, shape, format, checked=True)


@structure.in_auto_axes
@partial(jax.jit, static_argnames=("shape", "format", "nse"), inline=True)
def of_dense(x: jax.Array, *, shape: tuple[int, ...], format: Format, nse: int) -> dict[str, Any]:
    """Values and index arrays of the entries of x that are != 0."""
    found = structure.nonzero(structure.whole(x), nse, transposed=format.modes == (1, 0))
    return of_offsets(*found, shape, format, nse >= x.size)


def of_offsets(
    values: jax.Array,
    offsets: jax.Array,
    indices: jax.Array,
    shape: tuple[int, ...],
    format: Format,
    checked: bool,
) -> dict[str, Any]:
    """Values and index arrays of a matrix by its outer mode, from offsets whose last one may be
    more than the capacity."""
    inner = shape[format.modes[1]]
    spared = _spared(shape, format, indices.shape[0])
    transposed = None if spared else structure.transpose_structure(offsets, indices, inner)
    levels: tuple[Any, ...] = ((), (offsets, indices))
    if format.is_coordinate:
        bounds = jnp.append(0, offsets[-1]).astype(jnp.int32)
        levels = (bounds, structure.segment_of_entry(offsets, indices.shape[0])), (indices,)
    fields = structure.as_fields(levels, transposed, checked=checked)
    return {"values": values, **fields}


def padded(fields: dict[str, Any], nse: int, what: str) -> dict[str, Any]:
    """These fields of a concrete matrix, its values, shape and format among them, with the capacity
    `nse`; ValueError if it is too small."""
    values = fields["values"]
    stored = values.shape[0]
    if stored > nse:
        raise ValueError(
            f"{what}: nse: expected at least {stored}, as many as there are entries, got {nse}"
        )

    def longer(array: Any) -> np.ndarray:
        return np.pad(np.asarray(array), (0, nse - stored))

    with structure.concrete():  # under jit too, as in construct.index_fields
        levels = tuple((*x[:-1], longer(x[-1])) if x else () for x in fields["index_arrays"])
        transposed = None
        if not _spared(fields["shape"], fields["format"], nse):
            offsets, indices, permutation = fields["transposed"] or _transposed(fields)
            rest = np.arange(stored, nse, dtype=np.int32)
            transposed = offsets, longer(indices), np.append(np.asarray(permutation), rest)
        made = structure.placed(structure.as_fields(levels, transposed, checked=True))
    if isinstance(values, np.ndarray):  # JAX would compile a program for each number of entries
        return fields | {"values": checks.to_device(longer(values)), **made}
    return fields | {"values": jnp.pad(values, (0, nse - stored)), **made}


def _spared(shape: tuple[int, ...], format: Format, nse: int) -> bool:
    """Whether a matrix of this capacity has no transpose of its own, inside jit or not, whatever it
    stores: arrays of one capacity are of one type."""
    known = not any(map(export.is_symbolic_dim, (nse, *shape)))
    return known and construct.spares_offsets(format, shape, nse)


def _transposed(fields: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The transpose of a matrix in COO that was made without one, of fewer entries."""
    (_, outer), (inner,) = (map(np.asarray, level) for level in fields["index_arrays"])
    sizes = [fields["shape"][mode] for mode in fields["format"].modes]
    return construct.transpose_structure(construct.count_offsets(outer, sizes[0]), inner, sizes[1])


def overflow(A: StoredArray) -> jax.Array:
    """See `SparseArray.overflow`."""
    level = next(level for level in A.index_arrays if level)
    if A.is_checked:
        return jnp.zeros(level[0].shape[:-1], jnp.int32)
    return jnp.maximum(level[0][..., -1] - level[-1].shape[-1], 0)
