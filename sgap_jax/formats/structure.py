"""Structure arithmetic in jax.numpy: the conversions that must also work on traced index arrays.

The capacity nnz is static; the number of entries that count is offsets[-1] and may be less. Entries
from there on are padding: no function here lets one of them reach a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@contextmanager
def concrete() -> Iterator[None]:
    """In it arrays are made of concrete ones at once: under jit, and in shard_map, whose mesh they
    are not on."""
    none = jax.sharding.AbstractMesh((), ())
    with jax.core.eval_context(), jax.sharding.use_abstract_mesh(none):
        yield


def on_no_mesh(array: jax.Array) -> bool:
    empty: bool = jax.typeof(array).sharding.mesh.empty
    return empty


def placed(tree: Any) -> Any:
    """Concrete arrays as JAX's on no mesh; NumPy's are copied. Under `jax.set_mesh` a new array is
    on its mesh; in shard_map, which has a mesh of its own, JAX refuses to index with it."""

    def copied(x: Any) -> jax.Array:
        array = x if isinstance(x, jax.Array) else jnp.array(x)
        return array if on_no_mesh(array) else jax.device_put(np.array(array))

    return jax.tree.map(copied, tree)


def whole(values: jax.Array) -> jax.Array:
    """Values of explicit sharding (`jax.sharding.AxisType.Explicit`) on every device: of what is
    gathered from them JAX would ask where it lies. Others as they are."""
    sharding = jax.typeof(values).sharding
    if sharding.mesh.empty or not any(sharding.spec):
        return values
    return jax.sharding.reshard(values, sharding.update(spec=jax.P(*[None] * values.ndim)))


def unfolded(tree: Any) -> Any:
    """The same arrays, but XLA does not see that those of a captured matrix are constants. It would
    expand them while it compiles, in an interpreter: 10 s for a million entries. Costs nothing when
    the program runs."""
    # Each by itself: what nothing uses is still dropped.
    return jax.tree.map(jax.lax.optimization_barrier, tree)


def unfolded_structure(A: Any) -> Any:
    """A SparseArray over index arrays that are `unfolded`: for functions under `jax.jit`."""
    return replace(A, index_arrays=unfolded(A.index_arrays), transposed=unfolded(A.transposed))


def positions(nnz: int) -> jax.Array:
    """0 .. nnz-1 as int32."""
    return jnp.arange(nnz, dtype=jnp.int32)


def segment_of_entry(offsets: jax.Array, nnz: int) -> jax.Array:
    """[nnz]: the segment that each entry lies in; the last one for padding (so always in range)."""
    if offsets.shape[0] == 2:  # one segment, as of COO: nothing is summed
        return jnp.zeros(nnz, jnp.int32)
    # A mark at the start of each segment but the first, then a running sum: O(nnz), no search.
    offsets = unfolded(offsets)
    marks = jnp.zeros(nnz, jnp.int32).at[offsets[1:-1]].add(1, mode="drop")
    return jnp.cumsum(marks, dtype=jnp.int32)


def offsets_of_indices(indices: jax.Array, size: int, used: jax.Array) -> jax.Array:
    """[size + 1] offsets that count how often each index occurs among the first `used` entries."""
    used = unfolded(used)  # smaller than the indices, which are not copied where nothing is traced
    counted = jnp.where(positions(indices.shape[0]) < used, indices, size) + 1
    counts = jnp.zeros(size + 1, jnp.int32).at[counted].add(1, mode="drop")
    return jnp.cumsum(counts, dtype=jnp.int32)


def invert_permutation(permutation: jax.Array) -> jax.Array:
    """[nnz]: where each entry went."""
    nnz = permutation.shape[0]
    return jnp.zeros(nnz, jnp.int32).at[permutation].set(positions(nnz), unique_indices=True)


def transpose_structure(
    offsets: jax.Array, indices: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(offsets [size + 1], indices [nnz], permutation [nnz]) of the other orientation.

    A stable sort by index keeps the segments ascending; padding sorts behind everything.
    """
    nnz = indices.shape[0]
    used = unfolded(offsets[-1])
    key = jnp.where(positions(nnz) < used, indices, size)
    permutation = jnp.argsort(key, stable=True).astype(jnp.int32)
    segments = segment_of_entry(offsets, nnz)
    return offsets_of_indices(indices, size, used), segments[permutation], permutation
