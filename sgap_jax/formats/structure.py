"""Computations on index arrays in jax.numpy: those that must also work on traced arrays.

The capacity nnz is static; the number of entries in use is offsets[-1] and may be less. Entries
from there on are padding: no function here lets one of them reach a result.

Index arrays that were checked are held in the tuples `CheckedLevel`, `CheckedIndices` and
`CheckedTranspose`. So whether they were checked is part of the pytree's structure: jit, vmap and
scan preserve it, and new arrays in plain tuples count as unchecked. Arrays in
`ValidLevel` and `ValidTranspose` are known to be in range, but may repeat: they count as unchecked,
but nothing in them is left out. An unchecked structure with offsets o has a meaning for any
contents of its arrays:

    offsets    o'[i] = max over l <= i of min(max(o[l], 0), nnz): segment i is o'[i] .. o'[i+1] - 1
    entry p    takes no part in any operation if its index is not in 0 .. size - 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats.stored import (
    CheckedIndices,
    CheckedLevel,
    CheckedTranspose,
    MadeTranspose,
    ValidLevel,
    ValidTranspose,
)

_LEVELS = {1: CheckedIndices, 2: CheckedLevel}


def as_fields(
    index_arrays: Any, transposed: Any, *, checked: bool, valid: bool = False
) -> dict[str, Any]:
    """The two fields of a SparseArray, marked as checked, or in CSR, CSC, vectors or blocks as
    valid, or not at all."""
    if checked:
        index_arrays = tuple(_LEVELS[len(x)](*x) if x else () for x in index_arrays)
        transposed = None if transposed is None else CheckedTranspose(*transposed)
    elif valid:
        index_arrays = tuple(ValidLevel(*x) if x else () for x in index_arrays)
        transposed = ValidTranspose(*transposed)
    return {"index_arrays": index_arrays, "transposed": transposed}


@contextmanager
def concrete() -> Iterator[None]:
    """A context in which operations on concrete arrays run at once and give concrete arrays, also
    under jit and in shard_map; the arrays are not on the mesh of shard_map."""
    none = jax.sharding.AbstractMesh((), ())
    with jax.core.eval_context(), jax.sharding.use_abstract_mesh(none):
        yield


def on_no_mesh(array: jax.Array) -> bool:
    empty: bool = jax.typeof(array).sharding.mesh.empty
    return empty


def placed(tree: Any) -> Any:
    """The concrete arrays of a pytree as JAX arrays that are on no mesh; NumPy arrays are copied.

    Under `jax.set_mesh` a new array would be on that mesh, and JAX refuses to index with it in
    shard_map, which has a mesh of its own."""

    def copied(x: Any) -> jax.Array:
        if isinstance(x, jax.Array):
            return x if on_no_mesh(x) else jax.device_put(np.array(x))
        return jax.device_put(np.array(x))  # jnp.array compiles a copy for each new shape

    return jax.tree.map(copied, tree)


def aligned(count: int, dtype: Any, *, zeros: bool = False) -> np.ndarray:
    """An array on the boundary of a cache line, as JAX wants those that it does not copy. Of zeros
    the system hands out the pages when something is written or read there."""
    size = count * np.dtype(dtype).itemsize
    memory = (np.zeros if zeros else np.empty)(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype)


def whole(values: jax.Array) -> jax.Array:
    """Replicates values that have an explicit sharding (`jax.sharding.AxisType.Explicit`), because
    JAX would demand the sharding of whatever is gathered from them. Other values are unchanged."""
    return whole_but_first(values, None)


def whole_but_first(values: jax.Array, parts: Any) -> jax.Array:
    """`whole`, but for the first axis, which these axes of the explicit mesh split."""
    sharding = jax.typeof(values).sharding
    if sharding.mesh.empty or not (parts or any(sharding.spec)):
        return values
    spec = jax.P(*[parts, *[None] * values.ndim][: values.ndim])
    return jax.sharding.reshard(values, sharding.update(spec=spec))


@partial(jax.jit, inline=True)
def moved(values: Any, source: Any) -> jax.Array:
    """The stored values at the positions `source`."""
    return whole(values)[source]


def in_auto_axes(function: Callable) -> Callable:
    """The function of pytrees of arrays, and of static keywords, whose explicit mesh axes are
    automatic while it runs: JAX would want the sharding of every gather and scatter stated. Under
    `vmap` the results are split as the mapped axis is, otherwise not at all."""

    def run(*operands: Any, **static: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        axes = tuple(name for name, kind in kinds if kind == jax.sharding.AxisType.Explicit)
        if not axes:
            return function(*operands, **static)
        bound = partial(function, **static)
        return jax.sharding.auto_axes(bound, axes=axes, out_sharding=jax.P())(*operands)

    return run


def unfolded(tree: Any) -> Any:
    """The same arrays behind an optimization barrier, so that XLA does not constant-fold the
    computations on the index arrays of a captured matrix. It would do so in an interpreter while it
    compiles: 10 s for a million entries. The barrier costs nothing when the program runs."""
    # One barrier for each array, so that XLA can still remove unused ones.
    return jax.tree.map(jax.lax.optimization_barrier, tree)


def unfolded_structure(A: Any) -> Any:
    """A with all its index arrays `unfolded`: for functions under `jax.jit`."""
    return replace(A, index_arrays=unfolded(A.index_arrays), transposed=unfolded(A.transposed))


def positions(nnz: int) -> jax.Array:
    """0 .. nnz-1 as int32."""
    return jnp.arange(nnz, dtype=jnp.int32)


_valid_offsets: Callable
_transpose: Callable
_nonzero: Callable


def computed_with(valid_offsets: Callable, transpose: Callable, nonzero: Callable) -> None:
    """Says what computes the functions of these names, `transpose_structure` for `transpose`:
    primitives, which are in a layer above this one."""
    global _valid_offsets, _transpose, _nonzero
    _valid_offsets, _transpose, _nonzero = valid_offsets, transpose, nonzero


def valid_offsets(offsets: jax.Array, nnz: int) -> jax.Array:
    """Non-decreasing offsets [..., n] in 0 .. nnz: the running maximum of the clamped offsets."""
    found: jax.Array = _valid_offsets(offsets, nnz)
    return found


def varying_axes(x: Any) -> frozenset:
    """The shard_map axes along which x differs between devices."""
    aval = jax.typeof(x)
    # JAX has renamed this attribute once; if neither name exists, fail: an empty set is wrong.
    return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying


def varying_like(x: jax.Array, *operands: Any) -> jax.Array:
    """x, the result of a custom call, marked as varying along every shard_map axis along which one
    of its operands varies. JAX marks the results of plain operations itself, and the branches of a
    choice between the two must agree."""
    axes = frozenset().union(*map(varying_axes, operands)) - varying_axes(x)
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def varying_together(tree: Any) -> Any:
    """The arrays of a pytree, each marked as varying along every shard_map axis along which one of
    them varies, for a function that JAX traces once and applies to all: what is not an array stays
    as it is."""
    arrays = [x for x in jax.tree.leaves(tree) if not callable(x)]
    return jax.tree.map(lambda x: x if callable(x) else varying_like(x, *arrays), tree)


def in_range(indices: jax.Array, size: int) -> jax.Array:
    """For each index, whether it is in 0 .. size - 1."""
    return (indices >= 0) & (indices < size)


@partial(jax.jit, static_argnames="nnz", inline=True)
def segment_of_entry(offsets: jax.Array, nnz: int) -> jax.Array:
    """[nnz]: the segment of each entry; padding gets the last segment, so all are in range."""
    if offsets.shape[0] == 2:  # a single segment, as in COO
        return jnp.zeros(nnz, jnp.int32)
    # Mark the start of each segment but the first, then a running sum: O(nnz), no search.
    offsets = unfolded(offsets)
    marks = jnp.zeros(nnz, jnp.int32).at[offsets[1:-1]].add(1, mode="drop")
    return jnp.cumsum(marks, dtype=jnp.int32)


@partial(jax.jit, static_argnames="size", inline=True)
def offsets_of_indices(indices: jax.Array, size: int, used: jax.Array) -> jax.Array:
    """[size + 1] offsets: the prefix sums of how often each index occurs among the first `used`
    entries. Indices out of range are not counted."""
    # A barrier on the scalar prevents folding too; outside jit, one on the indices would copy them.
    used = unfolded(used)
    real = (positions(indices.shape[0]) < used) & in_range(indices, size)
    counted = jnp.where(real, indices, size) + 1
    counts = jnp.zeros(size + 1, jnp.int32).at[counted].add(1, mode="drop")
    return jnp.cumsum(counts, dtype=jnp.int32)


@partial(jax.jit, inline=True)
def invert_permutation(permutation: jax.Array) -> jax.Array:
    """[nnz]: the inverse q of a permutation p, q[p[i]] = i."""
    nnz = permutation.shape[0]
    return jnp.zeros(nnz, jnp.int32).at[permutation].set(positions(nnz), unique_indices=True)


def transpose_structure(offsets: jax.Array, indices: jax.Array, size: int) -> MadeTranspose:
    """(offsets [size + 1], indices [nnz], permutation [nnz]) of the other orientation: a valid
    structure for any contents of the arguments.

    The order is stable, so segments stay ascending; padding, and entries that take no part, come
    last. On the CPU and on CUDA by counting, in linear time. Batches: `jax.vmap`.
    """
    return MadeTranspose(*_transpose(offsets, indices, size))


def nonzero(
    x: jax.Array, nse: int, *, transposed: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(values [nse], offsets [m + 1], columns [nse]) of the entries of x [m, n], or of its
    transpose, that are not 0. -0 counts as 0; subnormal numbers do not. The offsets count all of
    them, up to the greatest int32; the first nse are stored, and zeros behind the last one."""
    values, offsets, columns = _nonzero(x, nse, transposed)
    return values, offsets, columns


def transpose_by_comparing(
    offsets: jax.Array, indices: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`transpose_structure` in plain JAX, with a comparison sort."""
    offsets, keys = transpose_keys(offsets, indices, size)
    # JAX types a sort's results each by its own operand, and those that argsort moves vary nowhere.
    order = varying_like(jnp.argsort(keys, stable=True).astype(jnp.int32), keys)
    return transpose_in_order(offsets, keys, order, size)


def transpose_keys(
    offsets: jax.Array, indices: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Valid offsets, and the keys [nnz] by which a stable sort puts entries in the order of the
    transpose: the index, or `size` for padding and for entries that take no part."""
    offsets, indices = well_formed(offsets, indices, size)
    return offsets, jnp.where(indices >= 0, indices, size)


def transpose_in_order(
    offsets: jax.Array, keys: jax.Array, order: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The transposed structure of what `transpose_keys` gives and the order of the keys."""
    segments = segment_of_entry(offsets, keys.shape[0])
    return offsets_of_indices(keys, size, offsets[-1]), segments[order], order


@partial(jax.jit, static_argnames="size", inline=True)
def well_formed(offsets: jax.Array, indices: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Valid offsets that start at 0, and indices that are -1 for padding and for entries that take
    no part. Entries before the first offset become part of the first segment, with index -1."""
    offsets, indices = unfolded((offsets, indices))
    place = positions(indices.shape[0])
    offsets = valid_offsets(offsets, indices.shape[0])
    stored = (place >= offsets[0]) & (place < offsets[-1])
    indices = jnp.where(stored & in_range(indices, size), indices, -1)
    return offsets.at[0].set(0), indices


@partial(jax.jit, static_argnames="size", inline=True)
def well_formed_transpose(
    transposed: Iterable[jax.Array], size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`well_formed` for a transpose: (offsets, indices, permutation). An entry whose place in the
    permutation is out of range takes no part either."""
    offsets, indices, permutation = transposed
    known = in_range(permutation, permutation.shape[0])
    offsets, indices = well_formed(offsets, jnp.where(known, indices, -1), size)
    return offsets, indices, jnp.where(known, permutation, 0)


@partial(jax.jit, static_argnames="size", inline=True)
def compacted(
    offsets: jax.Array, indices: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The compact structure, with only the entries that take part: (offsets, indices, entry,
    place). entry [nnz] is the old position of the entry at each new position; place [nnz] is the
    new position of each old entry, -1 if it takes no part."""
    nnz = indices.shape[0]
    offsets, indices = well_formed(offsets, indices, size)
    real = indices >= 0
    before = jnp.append(jnp.zeros(1, jnp.int32), jnp.cumsum(real, dtype=jnp.int32))
    place = jnp.where(real, before[:-1], -1)
    target = jnp.where(real, before[:-1], nnz)
    entry = jnp.zeros(nnz, jnp.int32).at[target].set(positions(nnz), mode="drop")
    return before[offsets], jnp.where(positions(nnz) < before[-1], indices[entry], 0), entry, place
