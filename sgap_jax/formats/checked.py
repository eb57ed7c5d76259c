"""`SparseArray.checked`: validates all index arrays, in NumPy if they are concrete, else with a CPU
kernel that fails when the compiled function runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import checks, construct, convert, fibers, structure
from sgap_jax.formats.levels import CSC, CSR, require_stored
from sgap_jax.formats.stored import Array, StoredArray


def checked(A: Array, in_order: bool = True) -> Array:
    """See `SparseArray.checked`."""
    leaves = jax.tree.leaves((A.index_arrays, A.transposed))
    if not in_order:
        return _in_range(A, checks.is_traced(*leaves))
    if not checks.is_traced(*leaves):
        with structure.concrete():  # under jit too
            _check_concrete(A)
        if A.is_checked:
            return A
        return replace(A, **structure.as_fields(A.index_arrays, A.transposed, checked=True))
    what = "SparseArray.checked"
    compressed = A.format.levels[:2] == CSR.levels and A.ndim == 2
    if not compressed and not A.format.is_coordinate:
        raise NotImplementedError(
            f"{what}: traced {A.format}; the nearest are CSR and COO, or to check it outside jit"
        )
    if jax.default_backend() != "cpu":
        raise NotImplementedError(
            f"{what}: traced structure is checked on cpu, not on {jax.default_backend()}; the "
            "nearest is to check it outside jit"
        )
    return _check_when_run(A, compressed, what)


def _in_range(A: Array, traced: bool) -> Array:
    """A, whose rows may be in any order, after a check that offsets and indices are in range."""
    what = "SparseArray.checked"
    if A.format.levels[:2] != CSR.levels or A.ndim != 2:
        raise NotImplementedError(
            f"{what}: sorted=False: expected CSR, CSC, vectors or blocks, got {A.format}; "
            "from_coordinates sorts the coordinates of others"
        )
    if A.is_checked and not traced:
        return A
    sizes, (offsets, indices) = convert.level_sizes(A.shape, A.format), A.index_arrays[1]
    stored = A.values.shape[0]
    if offsets.shape != (sizes[0] + 1,) or indices.shape != (stored,):
        raise ValueError(
            f"{what}: offsets and indices: expected shapes [{sizes[0] + 1}] and [{stored}], got "
            f"{list(offsets.shape)} and {list(indices.shape)}"
        )
    values = A.values
    if traced:
        # The kernel's check of the order says nothing of columns that count up, and of rows that
        # have one entry each.
        position = structure.positions(stored)
        offsets = _kernel_check(offsets, position, stored)
        single = jnp.minimum(jnp.append(position, jnp.int32(stored)), offsets[-1])
        offsets = offsets + _kernel_check(single, indices, sizes[1])[0]  # which is 0
        indices = indices + offsets[0]
        values = jnp.where(offsets[0] == 0, values, jnp.zeros((), A.dtype))
    else:
        with structure.concrete():
            checks.check_offsets(np.asarray(offsets), sizes[0], stored, "offsets", what)
            used = int(offsets[-1])
            checks.check_range(np.asarray(indices)[:used], sizes[1], "indices", what)
    transposed = structure.transpose_structure(offsets, indices, sizes[1])
    # Of traced arrays the transpose may be spared: `MadeTranspose`.
    levels = ((), (offsets, indices))
    fields = structure.as_fields(levels, transposed, checked=False, valid=not traced)
    return replace(A, values=values, **fields)


def _kernel_check(offsets: jax.Array, indices: jax.Array, columns: int) -> jax.Array:
    """The offsets, in a program that fails where they or the indices are not valid."""
    from sgap_jax.runtime import native as native  # registers the FFI targets

    like = jax.ShapeDtypeStruct(offsets.shape, jnp.int32)  # type: ignore[no-untyped-call]
    check = jax.ffi.ffi_call("sgap_check_csr_v1", like, vmap_method="sequential")
    return _used(check(offsets, indices, columns=np.int64(columns)), indices.shape[0])


def _used(offsets: jax.Array, stored: int) -> jax.Array:
    """The offsets of a check that runs although a program may use nothing of an array without
    entries. `has_side_effect` would say the same, but `jax.checkpoint` refuses it in gradients."""
    if stored == 0:
        jax.debug.callback(lambda _: None, offsets[0])
    return offsets


def _check_when_run(A: Array, compressed: bool, what: str) -> Array:
    """A, whose program fails before it computes anything from a structure that is not valid."""
    from sgap_jax.runtime import native as native  # registers the FFI targets

    sizes, stored = convert.level_sizes(A.shape, A.format), A.values.shape[0]
    rows = sizes[0] if compressed else 1
    offsets, *levels = (x for level in A.index_arrays for x in level)
    names = ("offsets", "indices") if compressed else ("bounds", "coordinates")
    got = [list(level.shape) for level in levels]
    if offsets.shape != (rows + 1,) or any(shape != [stored] for shape in got):
        raise ValueError(
            f"{what}: {names[0]} and {names[1]}: expected shapes [{rows + 1}] and [{stored}], "
            f"got {list(offsets.shape)} and {', '.join(map(str, got))}"
        )
    target = "sgap_check_csr_v1" if compressed else "sgap_check_coo_v1"
    like = jax.ShapeDtypeStruct(offsets.shape, jnp.int32)  # type: ignore[no-untyped-call]
    check = jax.ffi.ffi_call(target, like, vmap_method="sequential")
    # The kernel returns the offsets, of which the first is 0. All that the result has depends on
    # these, so that XLA cannot remove the check as dead code whatever a program uses.
    of: Any = {"columns": np.int64(sizes[1])} if compressed else {"sizes": np.array(sizes)}
    offsets = _used(check(offsets, *levels, **of), stored)
    levels = [level + offsets[0] for level in levels]
    values = jnp.where(offsets[0] == 0, A.values, jnp.zeros((), A.dtype))
    begins = offsets if compressed else None
    index_arrays: tuple = ((), (offsets, *levels))
    if not compressed:
        index_arrays = ((offsets, levels[0]), *((level,) for level in levels[1:]))
    transposed = None
    if A.ndim == 2:
        if begins is None:
            begins = structure.offsets_of_indices(levels[0], sizes[0], offsets[1])
        transposed = structure.transpose_structure(begins, levels[-1], sizes[1])
    fields = structure.as_fields(index_arrays, transposed, checked=True)
    return replace(A, values=values, **fields)


def _check_concrete(A: StoredArray) -> None:
    what = "SparseArray.checked"
    checks.check_shape(A.shape, what)
    if A.format.dense_modes:
        checks.check_values(A.values, A.values.shape[0], what, A._tail)
        return fibers.check(convert.prefix(A), what)
    require_stored(A.format, A.ndim, what)
    block = A.format.block_shape
    checks.check_values(A.values, None, what, block)
    sizes = convert.level_sizes(A.shape, A.format)
    if A.format.is_coordinate:
        used, levels = _check_coordinates(A, sizes, what)
        if A.ndim != 2 or A.transposed is None:
            return
        offsets, indices = construct.count_offsets(levels[0][:used], sizes[0]), levels[1]
    elif A.format.is_fiber_tree and A.format not in (CSR, CSC):
        fibers.check(A, what)
        if A.ndim != 2 or A.transposed is None:
            return
        offsets, indices = (np.asarray(x) for x in convert.compressed(A))
    else:
        offsets = checks.check_indices(A.index_arrays[1][0], "offsets", 1, what)
        indices = checks.check_indices(A.index_arrays[1][1], "indices", 1, what)
        checks.check_values(A.values, indices.shape[0], what, block)
        checks.check_compressed(offsets, indices, sizes, ("offsets", "indices"), what)
    expected = construct.transpose_structure(offsets, indices, sizes[1])
    names = ("transposed offsets", "transposed indices", "permutation")
    got = A.transposed if A.transposed is not None else (None,) * 3
    used = int(offsets[-1])
    for name, want, have in zip(names, expected, got, strict=True):
        have = np.asarray(have)
        keep = slice(None) if name == names[0] else slice(used)
        if have.shape != want.shape or not np.array_equal(have[keep], want[keep]):
            raise ValueError(
                f"{what}: {name}: expected the transpose of the structure, got other contents; "
                "SparseArray.from_arrays computes it"
            )
    if not np.array_equal(np.sort(np.asarray(got[2])), np.arange(A.values.shape[0])):
        raise ValueError(f"{what}: permutation: expected a permutation of 0 .. nnz-1")


def _check_coordinates(A: StoredArray, sizes: list[int], what: str) -> tuple[int, list[np.ndarray]]:
    """Checks COO; returns how many entries are not padding, and the indices of each level."""
    bounds = checks.check_indices(A.index_arrays[0][0], "bounds", 1, what)
    levels = [
        checks.check_indices(level[-1], f"level {i}", 1, what)
        for i, level in enumerate(A.index_arrays)
    ]
    for index in levels:
        checks.check_values(A.values, index.shape[0], what)
    checks.check_offsets(bounds, 1, A.nnz, "bounds", what)
    used = int(bounds[1])
    for i, (index, size) in enumerate(zip(levels, sizes, strict=True)):
        checks.check_range(index[:used], size, f"level {i}", what)
    if not construct.strictly_sorted([index[:used] for index in levels]):
        raise ValueError(f"{what}: coordinates: expected them sorted and each once")
    return used, levels
