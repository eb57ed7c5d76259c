"""Several graphs as one: a block-diagonal matrix of fixed size, and what each graph has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats.array import SparseArray
from sgap_jax.graphs.edges import check_capacity, of_capacity, padded, rows_on_host, values_on_host
from sgap_jax.primitives.gspmm import Reduction, gspmm
from sgap_jax.primitives.spmm import spmm


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("graph", "membership", "positions"),
    meta_fields=(),
)
@dataclass(frozen=True)
class GraphBatch:
    """Graphs side by side, made by `batch`; a pytree, whose type depends on the capacities alone.

    Attributes:
      graph: SparseArray [nodes, nodes], block-diagonal. Layers take it as any graph. Nodes past
        those of the last graph are padding and have no edges.
      membership: SparseArray [graphs, nodes] with a one where a node belongs to a graph.
      positions: [nse] int32, of each entry its position in the values of all graphs, one after the
        other: `E[positions]` are the vectors of its edges. 0 in the padding.
    """

    graph: SparseArray
    membership: SparseArray
    positions: jax.Array

    def readout(self, X: Any, reduce: Reduction = "sum") -> jax.Array:
        """Reduces the features X [nodes, d] of each graph's nodes: [graphs, d]. `reduce` is "sum",
        "mean", "max" or "min"; a graph without nodes gets zero. Differentiable as `gspmm`."""
        return gspmm(self.membership, X, op="copy", reduce=reduce)

    def spread(self, Y: Any) -> jax.Array:
        """[nodes, d]: to each node the row of Y [graphs, d] of its graph; zero to padding. Of a
        number for each graph, Y [graphs], it is [nodes]."""
        Y, graphs = jnp.asarray(Y), self.membership.shape[0]
        if Y.ndim not in (1, 2) or Y.shape[0] != graphs:
            raise ValueError(
                f"GraphBatch.spread: Y: expected shape [{graphs}] or [{graphs}, d], a row for each "
                f"graph, got {list(Y.shape)}"
            )
        if Y.ndim == 1:
            return self.spread(Y[:, None])[:, 0]
        return spmm(self.membership.astype(Y.dtype), Y, transpose=True)

    @property
    def graph_of_node(self) -> jax.Array:
        """[nodes] int32: the graph of each node; for padding the number of graphs."""
        graphs, nodes = self.membership.shape
        own = self.membership.row_offsets
        place = jnp.arange(nodes, dtype=jnp.int32)
        return jnp.searchsorted(own[1:], place, side="right").astype(jnp.int32).clip(0, graphs)


def batch(
    graphs: Sequence[SparseArray],
    *,
    num_nodes: int | None = None,
    nse: int | None = None,
    num_graphs: int | None = None,
) -> GraphBatch:
    """Puts graphs in one block-diagonal matrix, padded to fixed sizes: batches of one capacity
    compile once. Runs on the host.

    Args:
      graphs: square matrices in CSR, CSC or COO; concrete. Their values are promoted to one dtype,
        as JAX promotes them.
      num_nodes, nse, num_graphs: how many nodes, entries and graphs there is room for; None: as
        many as there are.

    Returns:
      A GraphBatch. Features of the nodes, one array for each graph, go with it as
      `pad_rows(features, num_nodes)`, those of the edges, in the order of each graph's values, as
      `np.concatenate(features)[positions]`: as `pad_rows(features, nse)` where all graphs are in
      CSR, which the batch is.

    Raises:
      TypeError: not SparseArrays. ValueError: a graph is traced or not square; there is not enough
        room.
    """
    what = "batch"
    if isinstance(graphs, SparseArray):
        raise TypeError(f"{what}: graphs must be a sequence of SparseArrays, got one")
    offsets, columns, values, firsts = [np.zeros(1, np.int32)], [], [], [0]
    positions, entries, before, once = [np.zeros(0, np.int32)], 0, 0, True
    for graph in graphs:
        own_offsets, own_columns, order = rows_on_host(graph, what)
        n = graph.shape[0]
        if graph.shape != (n, n):
            raise ValueError(f"{what}: graphs must be square, got shape {graph.shape}")
        offsets.append(own_offsets[1:] + entries)
        columns.append(own_columns + firsts[-1])
        values.append(values_on_host(graph, what)[order])
        positions.append(order + before)
        firsts.append(firsts[-1] + n)
        entries, before = entries + own_columns.shape[0], before + graph.nnz
        once &= graph.is_checked
    nodes = check_capacity(num_nodes, firsts[-1], "num_nodes", what)
    room = check_capacity(nse, entries, "nse", what)
    count = check_capacity(num_graphs, len(values), "num_graphs", what)
    rows = np.concatenate(offsets).astype(np.int32)
    rows = np.pad(rows, (0, nodes - firsts[-1]), mode="edge")
    dtype = jnp.result_type(*(x.dtype for x in values)) if values else np.dtype(np.float32)
    joined = np.concatenate([np.zeros(0, dtype), *(x.astype(dtype) for x in values)])
    all_columns = np.concatenate(columns) if columns else np.zeros(0, np.int32)
    of_graphs = np.pad(np.array(firsts, np.int32), (0, count - len(values)), mode="edge")
    ones = np.ones(firsts[-1], np.float32)
    members = np.arange(firsts[-1], dtype=np.int32)
    return GraphBatch(
        graph=of_capacity(joined, rows, all_columns, (nodes, nodes), room, checked=once),
        membership=of_capacity(ones, of_graphs, members, (count, nodes), nodes),
        positions=jnp.asarray(padded(np.concatenate(positions).astype(np.int32), room)),
    )


def pad_rows(arrays: Sequence[Any], size: int | None = None) -> np.ndarray:
    """The rows of arrays [n_i, ...] one after the other, with zeros up to `size` rows. Runs on the
    host; ValueError if there are more rows."""
    if not len(arrays):
        raise ValueError("pad_rows: arrays: expected at least one, got none")
    rows = [np.asarray(x) for x in arrays]
    if any(x.shape[1:] != rows[0].shape[1:] or not x.ndim for x in rows):
        shapes = ", ".join(str(list(x.shape)) for x in rows[:8])
        raise ValueError(f"pad_rows: arrays: expected rows of one shape, got {shapes}")
    joined = np.concatenate(rows)
    size = check_capacity(size, joined.shape[0], "size", "pad_rows")
    return np.pad(joined, [(0, size - joined.shape[0]), *[(0, 0)] * (joined.ndim - 1)])
