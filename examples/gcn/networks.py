"""The two networks: GCN (Kipf and Welling, ICLR 2017) and GAT (Velickovic et al., ICLR 2018).

Both take the words as a sparse matrix, as stored: the first product is a sparse one, and dropout of
the input draws a random number for each stored word only.
"""

from __future__ import annotations

import jax
from flax import nnx

from sgap_jax import SparseArray, nn


class GCN(nnx.Module):
    """Two graph convolutions, ReLU between them: section 3.1 of the paper."""

    def __init__(self, words: int, classes: int, *, hidden: int = 16, rngs: nnx.Rngs):
        self.first = nn.GraphConv(words, hidden, use_bias=False, rngs=rngs)
        self.second = nn.GraphConv(hidden, classes, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    @staticmethod
    def prepare(graph: SparseArray) -> SparseArray:
        return nn.normalize_adjacency(graph)

    def __call__(self, graph: SparseArray, features: SparseArray):
        x = features.with_values(self.dropout(features.values))
        x = jax.nn.relu(self.first(graph, x))
        return self.second(graph, self.dropout(x))


class GAT(nnx.Module):
    """Eight heads of eight features, ELU, then one head: section 3.3 of the paper."""

    def __init__(
        self, words: int, classes: int, *, hidden: int = 8, heads: int = 8, rngs: nnx.Rngs
    ):
        dropout = dict(dropout_rate=0.6, feature_dropout_rate=0.6, rngs=rngs)
        self.first = nn.GraphAttention(words, hidden, heads=heads, **dropout)
        self.second = nn.GraphAttention(hidden * heads, classes, concat=False, **dropout)

    @staticmethod
    def prepare(graph: SparseArray) -> SparseArray:
        return nn.add_self_loops(graph)

    def __call__(self, graph: SparseArray, features: SparseArray):
        return self.second(graph, jax.nn.elu(self.first(graph, features)))
