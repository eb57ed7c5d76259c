"""Graphs as sparse matrices: from lists of edges, in batches, sampled, and with several kinds of
edges. Row i of a graph's matrix stores an entry (i, j) for each edge along which j sends to i."""

import typing as _typing

from sgap_jax.formats.checks import no_attribute as _no_attribute
from sgap_jax.graphs.batches import GraphBatch as GraphBatch
from sgap_jax.graphs.batches import batch as batch
from sgap_jax.graphs.batches import pad_rows as pad_rows
from sgap_jax.graphs.edges import from_edges as from_edges
from sgap_jax.graphs.edges import induced_subgraph as induced_subgraph
from sgap_jax.graphs.relations import Relations as Relations
from sgap_jax.graphs.relations import join_relations as join_relations
from sgap_jax.graphs.sampling import NeighborSample as NeighborSample
from sgap_jax.graphs.sampling import NeighborSampler as NeighborSampler

_INSTEAD = {
    "Batch": "batch(graphs)",
    "NeighborLoader": "NeighborSampler(A, fanouts, num_seeds).epoch(nodes)",
    "from_edge_index": "from_edges(edge_index, num_nodes=n)",
    "subgraph": "induced_subgraph(A, nodes)",
}

if not _typing.TYPE_CHECKING:  # of names that are not here, type checkers say so
    __getattr__ = _no_attribute(__name__, _INSTEAD)
