"""Citation graphs with words as features, from a file in the Planetoid split; made-up graphs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse

from sgap_jax import SparseArray, graphs

ARRAYS = (
    *("adj_indptr", "adj_indices", "feat_indptr", "feat_indices", "feat_data", "feat_shape"),
    *("labels", "train", "val", "test"),
)


@dataclasses.dataclass(frozen=True)
class Citations:
    name: str
    # [nodes, nodes], ones where one cites the other, no self loops; or edges of several kinds, or
    # many graphs, each of a class
    graph: SparseArray | graphs.Relations | graphs.GraphBatch
    features: SparseArray  # [nodes, words], each row a distribution over its words
    labels: Any  # [nodes], -1 for nodes without a label; of a batch of graphs [graphs]
    train: Any  # numbers of nodes, or of graphs
    validation: Any
    test: Any

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    def summary(self) -> str:
        nodes, words = self.features.shape
        what = "graphs" if isinstance(self.graph, graphs.GraphBatch) else "nodes"
        if isinstance(self.graph, graphs.Relations):
            edges = f"{self.graph.matrix.nnz} edges of {len(self.graph.keys)} kinds"
        elif isinstance(self.graph, graphs.GraphBatch):
            count = self.graph.membership.shape[0]
            edges = f"{self.graph.graph.nnz // 2} edges in {count} graphs"
        else:
            edges = f"{self.graph.nnz // 2} edges"
        return (
            f"{self.name}: {nodes} nodes, {edges}, {words} words "
            f"({100 * self.features.density:.1f}% stored), {self.classes} classes; "
            f"{len(self.train)} {what} train, {len(self.validation)} validate, "
            f"{len(self.test)} test"
        )


def find(name: str) -> Path:
    """The file of a dataset in the folder that SGAP_DATA_DIR names; ValueError without one."""
    folder = Path(os.environ.get("SGAP_DATA_DIR", Path(__file__).parents[3] / "shared" / "data"))
    path = folder / "graphs" / f"{name}_planetoid.npz"
    if not path.is_file():
        raise ValueError(
            f"no {path}: name a file with --data, a folder with SGAP_DATA_DIR, or try --synthetic"
        )
    return path


def read(path: str | Path) -> Citations:
    """An .npz with the arrays of `ARRAYS`: CSR of the graph and of the words, labels, the split."""
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in ARRAYS}
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: expected an .npz with {', '.join(ARRAYS)}: {error}") from None
    nodes = len(arrays["labels"])
    ones = np.ones(len(arrays["adj_indices"]), np.float32)
    graph = scipy.sparse.csr_array(
        (ones, arrays["adj_indices"], arrays["adj_indptr"]), shape=(nodes, nodes)
    )
    words = scipy.sparse.csr_array(
        (arrays["feat_data"].astype(np.float32), arrays["feat_indices"], arrays["feat_indptr"]),
        shape=tuple(arrays["feat_shape"]),
    )
    split = (arrays[name] for name in ("train", "val", "test"))
    return _made(Path(path).stem, graph, words, arrays["labels"], *split)


def synthetic(nodes: int = 600, classes: int = 3, words: int = 200, seed: int = 0) -> Citations:
    """A graph whose nodes cite their own class eight times in ten, and use its words three times as
    often as others. Words or citations alone predict the class poorly, both together well."""
    rng = np.random.default_rng(seed)
    labels = np.arange(nodes) % classes
    cited = rng.integers(0, nodes // classes, (nodes, 3)) * classes
    own = rng.random((nodes, 3)) < 0.7  # others by chance
    cited += np.where(own, labels[:, None], rng.integers(0, classes, (nodes, 3)))
    rows = np.repeat(np.arange(nodes), 3)
    other = np.minimum(cited.reshape(-1), nodes - 1)
    pattern = scipy.sparse.coo_array((np.ones(rows.size), (rows, other)), shape=(nodes, nodes))
    pattern = (pattern + pattern.T).tolil()
    pattern.setdiag(0)
    graph = (pattern.tocsr() > 0).astype(np.float32)
    return _made("synthetic", graph, *_words(rng, labels, classes, words))


def relational(nodes: int = 600, classes: int = 4, words: int = 200, seed: int = 0) -> Citations:
    """Edges of as many kinds as there are classes: of kind r three arrive at each node of class c,
    nine in ten of them from class c + r. So what arrives says nothing to one who does not see the
    kinds: nodes of each class get as much from each class."""
    rng = np.random.default_rng(seed)
    labels = np.arange(nodes) % classes
    targets, kinds = np.repeat(np.arange(nodes), 3), {}
    for kind in range(classes):
        shift = np.where(
            rng.random(targets.size) < 0.9, kind, rng.integers(0, classes, targets.size)
        )
        sources = rng.integers(0, nodes // classes, targets.size) * classes
        sources += (labels[targets] + shift) % classes
        kinds[f"kind {kind}"] = graphs.from_edges(np.stack([sources, targets]), num_nodes=nodes)
    relations = graphs.join_relations(kinds, normalize=True)
    return _made("relational", relations, *_words(rng, labels, classes, words))


def wired(count: int = 300, seed: int = 0) -> Citations:
    """Graphs of 8 nodes with three edges and 12 with two, without words. The class says whether
    most edges are between nodes of one degree or of two; the degrees are those of every graph."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    own = []
    for label in labels:
        ends = [rng.permutation(np.repeat(*x)) for x in ((range(8), 3), (range(8, 20), 2))]
        across = 2 * rng.integers(*((7, 11) if label else (2, 6)))  # of 24 edges
        pairs = [np.stack([x[:across] for x in ends], 1)]
        pairs += [x[across:].reshape(-1, 2) for x in ends]
        edges = np.concatenate(pairs).T
        both = np.concatenate([edges, edges[::-1]], 1)
        own.append(graphs.from_edges(both, num_nodes=20, duplicates="keep"))
    ones = scipy.sparse.csr_array(np.ones((20 * count, 1), np.float32))
    parts = np.split(rng.permutation(count), [count // 3, count // 2])
    return _made("wired", graphs.batch(own), ones, labels, *parts)


def _words(rng: np.random.Generator, labels: np.ndarray, classes: int, words: int) -> tuple:
    """(words of each node, labels, ten nodes of each class to train with, others)"""
    nodes = len(labels)
    topic = np.arange(words) % classes == labels[:, None]
    used = rng.random((nodes, words)) < np.where(topic, 0.09, 0.03)
    features = scipy.sparse.csr_array(used.astype(np.float32))
    order = rng.permutation(nodes)
    train = np.concatenate([order[labels[order] == c][:10] for c in range(classes)])
    rest = np.setdiff1d(order, train, assume_unique=True)
    return features, labels, train, rest[: nodes // 4], rest[nodes // 4 :]


def _made(name: str, graph: Any, words: Any, labels: Any, *split: Any) -> Citations:
    total = np.asarray(words.sum(1)).reshape(-1)
    # Some documents have no words.
    words = scipy.sparse.csr_array(words.multiply(1 / np.maximum(total, 1e-30)[:, None]))
    if not isinstance(graph, graphs.Relations | graphs.GraphBatch):
        graph = SparseArray.from_scipy(graph, dtype=jnp.float32)
    features = SparseArray.from_scipy(words, dtype=jnp.float32)
    numbers = (jnp.asarray(x, jnp.int32) for x in (labels, *split))
    return Citations(name, graph, features, *numbers)
