"""Graphs with several kinds of nodes and edges: all relations in one matrix, so that a layer is one
product."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.graphs.edges import from_pairs, rows_on_host
from sgap_jax.primitives._define import accumulator
from sgap_jax.primitives.spmm import spmm
from sgap_jax.schedules import Schedule

NODES = "nodes"  # the kind of all nodes where relations name none


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("matrix",),
    meta_fields=("keys", "num_nodes"),
)
@dataclass(frozen=True)
class Relations:
    """The relations of a graph side by side, made by `join_relations`; a pytree.

    Attributes:
      matrix: SparseArray [all nodes, sources of all relations]: the rows are the nodes of each kind
        in turn, the columns the sources of each relation in turn.
      keys: the relations in the order of the columns, as they were given (static).
      num_nodes: pairs (kind, number of nodes) in the order of the rows (static).
    """

    matrix: SparseArray
    keys: tuple[Hashable, ...]
    num_nodes: tuple[tuple[str, int], ...]

    def source_of(self, key: Any) -> str:
        """The kind of the nodes that a relation leads from."""
        return ends_of(key)[0]

    def sum(
        self, messages: Mapping[Any, Any], *, schedule: Schedule | str | None = None
    ) -> dict[str, jax.Array]:
        """Y[t] = sum over the relations r that end at kind t of A_r H_r, in one product.

        `messages` has for each relation H_r [..., sources of r, d]; leading axes share the
        relations, and broadcast. Returns a dict of [..., nodes, d] for each kind of nodes.
        Differentiable as `spmm`. ValueError for messages of other relations or shapes."""
        if set(messages) != set(self.keys):
            raise ValueError(
                f"Relations.sum: messages: expected those of {list(self.keys)}, "
                f"got {list(messages)}"
            )
        sizes = dict(self.num_nodes)
        found = [jnp.asarray(messages[key]) for key in self.keys]
        width = found[0].shape[-1:]
        for key, H in zip(self.keys, found, strict=True):
            want = sizes[ends_of(key)[0]]
            if H.ndim < 2 or H.shape[-2:] != (want, *width):
                d = "d" if H.ndim < 2 or H.shape[-2] != want else width[0]
                raise ValueError(
                    f"Relations.sum: messages of {key!r}: expected shape [..., {want}, {d}], "
                    f"got {list(H.shape)}"
                )
        leading = jnp.broadcast_shapes(*(H.shape[:-2] for H in found))
        found = [jnp.broadcast_to(H, (*leading, *H.shape[-2:])) for H in found]
        H = jnp.concatenate(found, -2)
        product = partial(spmm, self.matrix, schedule=schedule)
        if leading:
            Y = jax.vmap(product)(H.reshape(math.prod(leading), *H.shape[-2:]))
            Y = Y.reshape(*leading, *Y.shape[1:])
        else:
            Y = product(H)
        ends = np.cumsum([n for _, n in self.num_nodes])[:-1]
        kinds = (kind for kind, _ in self.num_nodes)
        return dict(zip(kinds, jnp.split(Y, ends, axis=-2), strict=True))


def ends_of(key: Any) -> tuple[str, str]:
    """The kinds of nodes that a relation leads from and to."""
    if isinstance(key, tuple) and len(key) == 3:
        return key[0], key[2]
    return NODES, NODES


def sizes_of_kinds(relations: Mapping[Any, SparseArray], what: str) -> dict[str, int]:
    """How many nodes there are of each kind; ValueError where matrices do not agree."""
    if not relations:
        raise ValueError(f"{what}: expected at least one relation")
    sizes: dict[str, int] = {}
    for key, A in relations.items():
        for kind, size in zip(ends_of(key), A.shape[::-1], strict=True):
            if sizes.setdefault(kind, size) != size:
                raise ValueError(
                    f"{what}: {key!r}: expected {sizes[kind]} {kind}, as before, got {size}"
                )
    return sizes


def join_relations(relations: Mapping[Any, SparseArray], *, normalize: bool = False) -> Relations:
    """Joins the matrices of all relations in one, so that a layer is one product (on a GPU one
    launch) whatever their number. Runs on the host.

    Args:
      relations: for each relation its matrix [targets, sources], concrete, in CSR, CSC or COO. Keys
        are triples (kind of source, name, kind of target) as in PyG, or any names where all nodes
        are of one kind. Matrices that name one kind have as many nodes of it.
      normalize: divide each row of each relation by the sum of its values: the messages of a
        relation are averaged, weighted by the values. Of values of one, and of edges that
        `from_edges` has summed, that is the mean over the edges, the 1 / c[i, r] of R-GCN. A row
        whose sum is zero gets zeros; sums are in float32 at least, of integers the result is
        floating.

    Returns:
      Relations. Values are differentiable, with `normalize` too, and may be traced.

    Raises:
      TypeError: not SparseArrays. ValueError: no relation, a matrix that is traced, or shapes that
        do not agree.

    Source: Schlichtkrull et al., ESWC 2018, equation 2 (`normalize`).
    """
    what = "join_relations"
    if not isinstance(relations, Mapping):
        raise TypeError(
            f"{what}: relations: expected a mapping from names to SparseArrays, got "
            f"{type(relations).__name__}"
        )
    parts = [rows_on_host(A, f"{what}: {key!r}") for key, A in relations.items()]
    sizes = sizes_of_kinds(relations, what)
    first_rows = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    rows, columns, values, before = [], [], [], 0
    for (key, A), (offsets, own, entries) in zip(relations.items(), parts, strict=True):
        source, target = ends_of(key)
        lengths = np.diff(offsets)
        rows.append(first_rows[target] + np.repeat(np.arange(A.shape[0]), lengths))
        columns.append(own.astype(np.int64) + before)
        v = structure.moved(A.values, entries)
        if normalize:
            v = _shares(v, np.repeat(np.arange(A.shape[0], dtype=np.int32), lengths), A.shape[0])
        values.append(v)
        before += sizes[source]
    shape = (sum(sizes.values()), before)
    joined = jnp.concatenate(values)
    matrix, _ = from_pairs(
        np.concatenate(rows), np.concatenate(columns), joined, shape, "keep", what
    )
    assert math.prod(matrix.values.shape) == sum(part[1].size for part in parts)
    return Relations(matrix, tuple(relations), tuple(sizes.items()))


@partial(jax.jit, static_argnames="count", inline=True)
def _shares(values: Any, rows: Any, count: int) -> jax.Array:
    """Each value over the sum of those of its row."""
    dtype = values.dtype
    dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)
    wide = values.astype(accumulator(dtype))
    sums = jax.ops.segment_sum(wide, rows, count, indices_are_sorted=True)[rows]
    # The inner where keeps zeros from the quotient: its derivative there would be NaN.
    shares = jnp.where(sums == 0, 0, wide / jnp.where(sums == 0, 1, sums))
    return shares.astype(dtype)
