"""`prepare`: a sparse array that keeps what calls on CUDA would otherwise make of its structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import is_traced
from sgap_jax.formats.stored import ListKey, PreparedTranspose
from sgap_jax.formats.structure import concrete, on_no_mesh, placed
from sgap_jax.launch import launch
from sgap_jax.launch.row_pieces import WorkList
from sgap_jax.primitives._define import check_sparse, structure
from sgap_jax.primitives._kept_lists import asked
from sgap_jax.primitives._row_pieces import work_list
from sgap_jax.primitives._vectors import by_rows

_made = jax.jit(work_list, static_argnums=(0, 2))


def prepare(A: SparseArray, function: Callable, *args: Any, **kwargs: Any) -> SparseArray:
    """A, with the work lists that `function(A, *args, **kwargs)` takes on a GPU.

    Where rows are skewed, products and attention on CUDA cut long rows into pieces, which a work
    list names: int32 (row, first entry, last entry, place of its sums) for each piece. Without this
    function a program makes the list of the row offsets at each call. A prepared array has it as
    leaves, in `jit` and through derivatives, `with_values`, `.T`, `vmap` and `scan`; results have
    the same bits. Whatever has another structure has no lists, and calls of other sizes make theirs
    as before. The lists of a product have 4 (m + nnz / chunk) numbers and a few more.

    The function is lowered for CUDA as `explain` does, with a GPU here or not; it is not run.
    Prepare for gradients with a function that takes them, by arrays: A has integer leaves. For
    `loss(A, values, B)` that is `prepare(A, jax.grad(loss, (1, 2)), A.values, B)`. Lists that A has
    already stay.

    Args:
      A: a matrix in CSR, CSC, CVS or BCSR whose index arrays are concrete and were checked.
      function: of A, as its first argument, and others that `jax.jit` takes.

    Returns:
      An array that shares all arrays with A; A itself if the function takes no list of it.

    Raises:
      TypeError: A is not a SparseArray.
      ValueError: A is traced, unchecked or in another format. Also what the function raises.
    """
    check_sparse("prepare", "A", A)
    index_arrays = jax.tree.leaves((A.index_arrays, A.transposed))
    if is_traced(*index_arrays):
        raise ValueError(
            "prepare: A: expected concrete index arrays, got traced ones; programs make the lists "
            "of what they make themselves"
        )
    if A.transposed is None or A.format.is_coordinate or not A.is_checked:
        raise ValueError(
            f"prepare: A: expected a checked array in CSR, CSC, CVS or BCSR, got {A.format}"
            f"{'' if A.is_checked else ' from the bare constructor; A.checked() checks it'}"
        )
    with launch.collected(), asked() as wanted:
        program = jax.jit(lambda A, *args: function(A, *args, **kwargs))
        program.trace(A, *args).lower(lowering_platforms=("cuda",))
    before = A.transposed
    assert before is not None
    kept = {}
    if isinstance(before, PreparedTranspose):
        kept = dict(zip(before.keys, before.lists, strict=True))
    with concrete():  # under jit and in shard_map too
        # The values, which may be traced, are not looked at.
        no_values = dataclasses.replace(A, values=np.zeros(A.values.shape, bool))
        arrays = structure(by_rows(no_values)[0])
        made = {key: _list(key, arrays) for key in wanted if key not in kept}
        # As in `asformat`: lists of index arrays that are on no mesh are on none.
        if all(map(on_no_mesh, index_arrays)):
            made = placed(made)
    found = kept | {key: work for key, work in made.items() if work is not None}
    if found.keys() == kept.keys():
        return A
    found = dict(sorted(found.items()))  # pytrees do not differ by what was asked first
    offsets, indices, permutation = before
    keys, lists = tuple(found.keys()), tuple(found.values())
    transposed = PreparedTranspose(offsets, indices, permutation, lists, keys)
    return dataclasses.replace(A, transposed=transposed)


def _list(key: ListKey, arrays: tuple) -> Any:
    """The list of a key, flat, of the index arrays by rows and by columns; None if its sizes are
    those of another matrix."""
    axis, group, rows, capacity, chunk, least = key
    offsets, indices = arrays[2 * axis : 2 * axis + 2]
    if -(-(offsets.shape[0] - 1) // group) != rows or indices.shape[0] != capacity:
        return None
    work = WorkList(rows, capacity, chunk, least or None)
    return jax.device_put(_made(work, offsets, group).reshape(-1))
