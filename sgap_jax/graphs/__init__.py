"""Graphs as sparse matrices: from lists of edges, in batches, sampled, and with several kinds of
edges. Row i of a graph's matrix stores an entry (i, j) for each edge along which j sends to i."""

from sgap_jax.graphs.batches import GraphBatch as GraphBatch
from sgap_jax.graphs.batches import batch as batch
from sgap_jax.graphs.batches import pad_rows as pad_rows
from sgap_jax.graphs.edges import from_edges as from_edges
from sgap_jax.graphs.edges import induced_subgraph as induced_subgraph
from sgap_jax.graphs.relations import Relations as Relations
from sgap_jax.graphs.relations import join_relations as join_relations
from sgap_jax.graphs.sampling import NeighborSample as NeighborSample
from sgap_jax.graphs.sampling import NeighborSampler as NeighborSampler
