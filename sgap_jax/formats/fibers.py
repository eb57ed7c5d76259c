"""Trees of fibers: formats whose levels but the first are all compressed, such as CSF (Smith and
Karypis, IA3 2015) and DCSR, which is CSF for a matrix.

A level has one node for each distinct prefix of coordinates. Its offsets delimit, for each node of
the level above, the segment of that node's children. The nodes of the last level are the entries.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import checks, construct, structure
from sgap_jax.formats.levels import Compressed
from sgap_jax.formats.stored import StoredArray


def _levels(A: StoredArray) -> list[tuple[Any, ...]]:
    """The index arrays of each level, made well-formed (see structure.py) if unchecked."""
    if A.is_checked:
        return list(A.index_arrays)
    sizes = [A.shape[mode] for mode in A.format.modes]
    return [
        structure.well_formed(level[0], level[1], size) if level else ()
        for level, size in zip(A.index_arrays, sizes, strict=True)
    ]


def used_nodes(A: StoredArray) -> list[Any]:
    """For each level, how many of its nodes are not padding."""
    used: list[Any] = []
    above: Any = 1
    for i, (level, mode) in enumerate(zip(_levels(A), A.format.modes, strict=True)):
        if level:  # a dense level, the other case, has no padding, and its size may be symbolic
            above = level[0][above if i == 0 or A.index_arrays[i - 1] else -1]
        else:
            above = A.shape[mode]
        used.append(above)
    return used


def entries(A: StoredArray) -> tuple[Any, list[jax.Array]]:
    """(used, levels): how many entries are not padding, and for each level the coordinates [nnz] of
    all entries."""
    node, coordinates = structure.positions(A.nnz), []
    for depth, level in enumerate(reversed(_levels(A))):
        if not level:
            coordinates.append(node)
            break
        offsets, indices = level
        # On the last level, depth 0, the nodes are the entries.
        coordinates.append(indices[node] if depth else indices)
        node = structure.segment_of_entry(offsets, indices.shape[0])[node]
    return used_nodes(A)[-1], coordinates[::-1]


def ancestors(A: StoredArray, depth: int) -> jax.Array:
    """[nnz]: for each entry, its ancestor node on level depth - 1; arbitrary for padding."""
    node = structure.positions(A.nnz)
    for offsets, indices in reversed(_levels(A)[depth:]):
        node = structure.segment_of_entry(offsets, indices.shape[0])[node]
    return node


def numpy_entries(A: StoredArray) -> tuple[int, list[np.ndarray]]:
    """`entries` in NumPy, for a concrete structure, and without padding."""
    # found: for each node of the level reached, the coordinates on the path to it, level by level.
    used, found = 1, []
    for level, mode in zip(A.index_arrays, A.format.modes, strict=True):
        if not level:
            used = A.shape[mode]
            found = [np.arange(used, dtype=np.int32)]
            continue
        offsets, indices = (np.asarray(x) for x in level)
        parent = construct.expand_offsets(offsets[: used + 1], indices.shape[0])
        used = int(offsets[used])
        found = [*(x[parent] for x in found), indices[:used]]
    return used, found


def outer_offsets(A: StoredArray) -> jax.Array:
    """[size + 1]: for a matrix with a compressed first level, offsets over all indices of the outer
    dimension, empty ones included."""
    (bounds, outer), (offsets, _) = A.index_arrays
    return _over_all(bounds, outer, offsets, A.shape[A.format.modes[0]])


@partial(jax.jit, static_argnames="size", inline=True)
def _over_all(bounds: Any, outer: Any, offsets: Any, size: int) -> jax.Array:
    lengths = jnp.diff(offsets)
    used = structure.unfolded(bounds[1])
    row = jnp.where(structure.positions(outer.shape[0]) < used, outer, size)
    counts = jnp.zeros(size + 1, jnp.int32).at[row + 1].add(lengths, mode="drop")
    return jnp.cumsum(counts, dtype=jnp.int32)


def check(A: StoredArray, what: str) -> None:
    """Checks the concrete index arrays of a fiber tree: ValueError if they are corrupt."""
    capacity, used = 1, 1
    for i, (level, mode) in enumerate(zip(A.index_arrays, A.format.modes, strict=True)):
        size = A.shape[mode]
        if not level:
            capacity = used = size
            continue
        names = (f"offsets of level {i}", f"indices of level {i}")
        offsets = checks.check_indices(level[0], names[0], 1, what)
        indices = checks.check_indices(level[1], names[1], 1, what)
        if offsets.shape[0] != capacity + 1:
            got = list(offsets.shape)
            raise ValueError(f"{what}: {names[0]}: expected shape [{capacity + 1}], got {got}")
        offsets = offsets[: used + 1]  # the offsets of padding nodes are arbitrary
        checks.check_compressed(offsets, indices, (used, size), names, what)
        childless = np.flatnonzero(offsets[1:] == offsets[:-1])
        if i and A.format.levels[i - 1] == Compressed() and childless.size:
            node = childless[0]
            raise ValueError(
                f"{what}: {names[0]}[{node + 1}]: expected more than {offsets[node]} (no node is "
                f"without an entry), got {offsets[node + 1]}"
            )
        capacity, used = indices.shape[0], int(offsets[-1])
    checks.check_values(A.values, capacity, what)
