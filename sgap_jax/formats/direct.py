"""Native operations on two concrete matrices, outside of XLA: nothing is compiled for a new size,
and a result has as many entries as it has. `None` where they do not apply: the caller then goes the
general way.

They apply on the CPU, to arrays on its first device; values must be concrete too and of a dtype
that the kernels have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from sgap_jax.formats import checks, structure
from sgap_jax.formats.stored import LaterTranspose

KERNEL_DTYPES = ("float32", "float64", "bfloat16", "float16")

# Row offsets, column indices and values of a matrix.
Rows = tuple[Any, Any, Any]


def product(a: Rows, b: Rows, columns: int, sums: str = "") -> Rows | None:
    """A B for values of one dtype; columns ascend. With `sums` "hash" or "hash, unsorted" those of
    each row are in a hash table. ValueError for 2^31 - 1 entries or more."""
    if not _applies(a, b):
        return None
    from sgap_jax.runtime.native import native, threads

    dtype = a[2].dtype
    operands = *_with_bytes(a), *_with_bytes(b)
    try:
        found = native.product(*operands, columns, dtype.name, threads(), sums=sums)
    except MemoryError:  # it reserves a bound for each thread
        return None
    if found is None:
        raise ValueError(
            f"spgemm: A B has {checks.INT32_MAX} entries or more; index arrays are int32"
        )
    return _placed((*found[:2], found[2].view(dtype)), (*a, *b))


def merged(a: Rows, b: Rows, columns: int, sign: str) -> Rows | None:
    """A + B, A - B or A * B (`sign`) for values of one dtype; None also where a row of one of them
    does not ascend."""
    if not _applies(a, b):
        return None
    from sgap_jax.runtime.native import native, threads

    dtype = a[2].dtype
    try:
        found = native.merge(*_with_bytes(a), *_with_bytes(b), columns, sign, dtype.name, threads())
    except MemoryError:
        return None
    return found and _placed((*found[:2], found[2].view(dtype)), (*a, *b))


def places(
    a: Sequence[Any], b: Sequence[Any], columns: int, sign: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Offsets and indices of the union of the entries ("+") or of the intersection ("*") of two
    patterns given by theirs, and for each entry which one of A and of B it is, -1 for none. None
    where a row of one of them does not ascend."""
    from sgap_jax.runtime.native import native, threads

    arrays = [np.ascontiguousarray(x, np.int32) for x in (*a, *b)]
    found: tuple | None = native.merge_places(*arrays, columns, sign, threads())
    return found


def merged_pattern(
    a: Sequence[Any], b: Sequence[Any], columns: int, sign: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """The first two of `places`, alone."""
    from sgap_jax.runtime.native import native, threads

    arrays = [np.ascontiguousarray(x, np.int32) for x in (*a, *b)]
    found: tuple | None = native.merge_places(*arrays, columns, sign, threads(), places=False)
    return found


def later_transpose(offsets: Any, indices: Any, size: int) -> LaterTranspose:
    """The index arrays of the transpose of a checked structure, made when something needs them."""
    return LaterTranspose(partial(_transpose, offsets, indices, size))


def _transpose(offsets: Any, indices: Any, size: int) -> tuple[Any, Any, Any]:
    host = jax.local_devices(backend="cpu")[0]
    with structure.concrete(), jax.default_device(host):
        found = structure.transpose_structure(offsets, indices, size)
        # Under `jax.set_mesh` the results are on the mesh, and shard_map refuses to capture them.
        return tuple(jax.device_put(np.asarray(x)) for x in found)  # does not copy


def _applies(a: Rows, b: Rows) -> bool:
    if checks.is_traced(*a, *b) or jax.default_backend() != "cpu":
        return False
    dtype, first = a[2].dtype, {jax.devices()[0]}
    if dtype.name not in KERNEL_DTYPES:
        return False
    for arrays in (a, b):
        for x, expected in zip(arrays, (np.int32, np.int32, dtype), strict=True):
            if x.ndim != 1 or x.dtype != expected:
                return False
            if isinstance(x, jax.Array) and x.devices() != first:
                return False
    return True


def _with_bytes(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of a matrix in NumPy, its values as bytes."""
    offsets, indices, values = (np.ascontiguousarray(x) for x in rows)
    return offsets, indices, values.view(np.uint8)


def _placed(arrays: Sequence[np.ndarray], operands: Sequence[Any]) -> Any:
    """The arrays of a result on the device of the operands, committed if one of these is."""
    device = jax.devices()[0]
    where = device if any(getattr(x, "committed", False) for x in operands) else None
    with structure.concrete(), jax.default_device(device):
        return jax.device_put(tuple(arrays), where)  # does not copy
