"""The networks: GCN (Kipf and Welling, ICLR 2017), GAT (Velickovic et al., ICLR 2018), GraphSAGE
(Hamilton et al., NeurIPS 2017), GIN (Xu et al., ICLR 2019), GATv2 (Brody et al., ICLR 2022) and
R-GCN (Schlichtkrull et al., ESWC 2018).

The words are a sparse matrix, as stored: in GCN, GAT, GraphSAGE and GATv2 the first product is a
sparse one, and dropout of the input draws a random number for each stored word only.
"""

from __future__ import annotations

import jax
from flax import nnx

from sgap_jax import SparseArray, graphs, nn


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


class TwoLayers(nnx.Module):
    """Two layers with a ReLU between them, and dropout of what each reads."""

    def __init__(self, first: nnx.Module, second: nnx.Module, rate: float, rngs: nnx.Rngs):
        self.first, self.second = first, second
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    @staticmethod
    def prepare(graph: SparseArray) -> SparseArray:
        return graph

    def __call__(self, graph: SparseArray, features: SparseArray):
        x = features.with_values(self.dropout(features.values))
        x = jax.nn.relu(self.first(graph, x))
        return self.second(graph, self.dropout(x))


class SAGE(TwoLayers):
    """Means of neighbours: 64 features, dropout 0.5."""

    def __init__(self, words: int, classes: int, *, hidden: int = 64, rngs: nnx.Rngs):
        first = nn.SAGEConv(words, hidden, rngs=rngs)
        super().__init__(first, nn.SAGEConv(hidden, classes, rngs=rngs), 0.5, rngs)


class GIN(TwoLayers):
    """Sums of neighbours, each layer with one matrix; the words of a paper sum to one."""

    def __init__(self, words: int, classes: int, *, hidden: int = 64, rngs: nnx.Rngs):
        first = nn.GINConv(nnx.Linear(words, hidden, rngs=rngs), train_eps=True)
        second = nn.GINConv(nnx.Linear(hidden, classes, rngs=rngs), train_eps=True)
        super().__init__(first, second, 0.5, rngs)


class Whole(nnx.Module):
    """Classes of whole graphs: layers with ReLU, the sum over the nodes of each graph, a matrix."""

    def __init__(self, layers: list[nnx.Module], width: int, classes: int, rngs: nnx.Rngs):
        self.layers = nnx.List(layers)
        self.last = nnx.Linear(width, classes, rngs=rngs)

    @staticmethod
    def prepare(batch: graphs.GraphBatch) -> graphs.GraphBatch:
        return batch

    def __call__(self, batch: graphs.GraphBatch, features: SparseArray):
        x = features.todense()
        for layer in self.layers:
            x = jax.nn.relu(layer(batch.graph, x))
        return self.last(batch.readout(x))


class WholeGIN(Whole):
    """GIN with a perceptron of two layers and batch normalization in each layer: section 7 of the
    paper."""

    def __init__(
        self, words: int, classes: int, *, hidden: int = 16, layers: int = 2, rngs: nnx.Rngs
    ):
        sizes = (words, *[hidden] * layers)
        made = [
            nn.GINConv(
                nnx.Sequential(
                    nnx.Linear(size, hidden, rngs=rngs),
                    nnx.BatchNorm(hidden, momentum=0.9, rngs=rngs),
                    jax.nn.relu,
                    nnx.Linear(hidden, hidden, rngs=rngs),
                    nnx.BatchNorm(hidden, momentum=0.9, rngs=rngs),
                )
            )
            for size in sizes[:-1]
        ]
        super().__init__(made, hidden, classes, rngs)


class WholeSAGE(Whole):
    """The same with means of neighbours."""

    def __init__(self, words: int, classes: int, *, hidden: int = 16, rngs: nnx.Rngs):
        first, second = (nn.SAGEConv(size, hidden, rngs=rngs) for size in (words, hidden))
        super().__init__([first, second], hidden, classes, rngs)


class GATv2(TwoLayers):
    """Eight heads of eight features, then one head, as GAT."""

    def __init__(self, words: int, classes: int, *, hidden: int = 8, rngs: nnx.Rngs):
        options = dict(dropout_rate=0.6, share_weights=True, rngs=rngs)
        first = nn.GATv2Conv(words, hidden, heads=8, **options)
        second = nn.GATv2Conv(8 * hidden, classes, concat=False, **options)
        super().__init__(first, second, 0.6, rngs)

    @staticmethod
    def prepare(graph: SparseArray) -> SparseArray:
        return nn.add_self_loops(graph)


class RGCN(TwoLayers):
    """Means of the neighbours of each kind of edges: 16 features, dropout 0.5. A graph with edges
    of one kind is taken as two relations, there and back."""

    def __init__(
        self, words: int, classes: int, *, relations: int, hidden: int = 16, rngs: nnx.Rngs
    ):
        first = nn.RGCNConv(words, hidden, relations, rngs=rngs)
        second = nn.RGCNConv(hidden, classes, relations, rngs=rngs)
        super().__init__(first, second, 0.5, rngs)

    @staticmethod
    def prepare(graph: SparseArray | graphs.Relations) -> graphs.Relations:
        if isinstance(graph, graphs.Relations):
            return graph
        return graphs.join_relations({"cites": graph, "cited by": graph.T}, normalize=True)
