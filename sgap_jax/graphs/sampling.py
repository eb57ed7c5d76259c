"""Neighbour sampling on the host, in blocks of fixed size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sgap_jax.formats import checks, construct
from sgap_jax.formats.array import SparseArray
from sgap_jax.graphs.edges import check_nodes, of_capacity, padded, rows_on_host


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("nodes", "blocks", "positions", "is_seed"),
    meta_fields=(),
)
@dataclass(frozen=True)
class NeighborSample:
    """What a minibatch needs, made by `NeighborSampler`; a pytree, of one type for all minibatches.

    Attributes:
      nodes: [sources of blocks[0]] int32: `X[nodes]` are the features that the first layer reads.
        The seeds come first; padding is node 0, and no edge leaves it.
      blocks: a SparseArray [targets, sources] for each layer, the first layer's first. The targets
        are the first of the sources, and the targets of the last block are the seeds: with
        X = layer(block, X) for each block in turn, X has a row for each seed at the end, and
        X[: block.shape[0]] are the targets' own features.
      positions: for each block those of its entries in the graph's values, int32; 0 in the
        padding.
      is_seed: [num_seeds] bool: False where the minibatch had fewer seeds.
    """

    nodes: jax.Array
    blocks: tuple[SparseArray, ...]
    positions: tuple[jax.Array, ...]
    is_seed: jax.Array


class NeighborSampler:
    """Samples the neighbours of seeds, and theirs, without replacement and uniformly.

    Args:
      graph: square, in CSR, CSC or COO; concrete. Row i has the edges that arrive at i, which are
        sampled.
      fanouts: how many edges of a node are taken at most, for each hop from the seeds on, as in
        PyG: the last one is of the first layer. -1 takes all: as many as any node has.
      num_seeds: how many seeds a minibatch has room for; with the fanouts this gives the size of
        all arrays, so that a jitted step compiles once.
      seed: of the random numbers: same seed, same samples.

    NumPy on the host, in time linear in the sample. One sampler may not be used by several threads
    at once.

    Raises:
      TypeError: graph is not a SparseArray, or fanouts not a sequence. ValueError: graph is traced
        or not square; num_seeds is not positive, or a fanout neither that nor -1.

    Source: Hamilton et al., NeurIPS 2017, algorithm 2.
    """

    def __init__(
        self, graph: SparseArray, fanouts: Sequence[int], num_seeds: int, *, seed: int = 0
    ) -> None:
        what = "NeighborSampler"
        self._offsets, self._columns, self._entries = rows_on_host(graph, what)
        self._once = graph.is_checked
        n, k = graph.shape
        if n != k:
            raise ValueError(f"{what}: graph must be square, got shape {graph.shape}")
        if not hasattr(fanouts, "__len__"):
            raise TypeError(
                f"{what}: fanouts: expected a sequence with one for each layer, got {fanouts!r}"
            )
        if not len(fanouts):
            raise ValueError(f"{what}: fanouts: expected one for each layer, got none")
        self._values = np.asarray(graph.values)
        most = max(1, int(np.diff(self._offsets).max(initial=0)))
        self.fanouts = tuple(
            most if f == -1 else min(checks.check_count(f, "fanouts", what, 1), checks.INT32_MAX)
            for f in fanouts
        )
        self.num_seeds = checks.check_count(num_seeds, "num_seeds", what, 1)
        self.num_nodes = n
        self._random = np.random.default_rng(seed)
        self._local = np.full(n, -1, np.int32)
        self._seen = np.zeros(n, bool)
        sizes = [self.num_seeds]
        for fanout in self.fanouts:  # nodes that are not known yet, and room for padding
            sizes.append(sizes[-1] + min(sizes[-1] * fanout, n))
        self.capacities = tuple(sizes)
        """How many nodes there is room for: seeds, then with each hop."""

    def sample(self, seeds: ArrayLike) -> NeighborSample:
        """The sample of these nodes: [s] integers, each once, s at most `num_seeds`, or a mask of
        all nodes."""
        what = "NeighborSampler.sample"
        found = check_nodes(seeds, self.num_nodes, "seeds", what).astype(np.int32)
        count = found.shape[0]
        if count > self.num_seeds:
            raise ValueError(f"{what}: seeds: expected at most {self.num_seeds}, got {count}")
        try:
            self._local[found] = np.arange(count, dtype=np.int32)
            if not np.array_equal(self._local[found], np.arange(count)):
                raise ValueError(f"{what}: seeds: expected each node once")
            # Places of nodes: the seeds' from 0 on, those that hop h adds from capacities[h] on.
            places = np.full(self.capacities[-1], 0, np.int32)
            places[:count] = found
            rows = np.arange(count, dtype=np.int32)
            blocks, entries = [], []
            for hop, fanout in enumerate(self.fanouts):
                block, entry, new = self._hop(found, rows, hop, fanout)
                first = self.capacities[hop]
                places[first : first + new.shape[0]] = new
                found = np.concatenate([found, new])
                rows = np.concatenate([rows, first + np.arange(new.shape[0], dtype=np.int32)])
                blocks.append(block)
                entries.append(entry)
            self._local[found] = -1
        except BaseException:  # wherever it came from: the next sample starts anew
            self._local[:], self._seen[:] = -1, False
            raise
        return NeighborSample(
            nodes=jnp.asarray(places),
            blocks=tuple(blocks[::-1]),
            positions=tuple(jnp.asarray(x) for x in entries[::-1]),
            is_seed=jnp.asarray(np.arange(self.num_seeds) < count),
        )

    def epoch(self, nodes: ArrayLike, *, shuffle: bool = True) -> Iterator[tuple[Any, Any]]:
        """Pairs (seeds, sample) until each of `nodes`, integers or a mask of all nodes, was a seed
        once; the last minibatch may have fewer. `seeds` [num_seeds] are padded with node 0.
        ValueError: a node is there twice."""
        what = "NeighborSampler.epoch"
        order = np.array(check_nodes(nodes, self.num_nodes, "nodes", what))
        if np.unique(order).shape != order.shape:
            raise ValueError(f"{what}: nodes: expected each once")
        if shuffle:
            self._random.shuffle(order)
        for first in range(0, order.shape[0], self.num_seeds):
            own = order[first : first + self.num_seeds]
            yield np.pad(own, (0, self.num_seeds - own.shape[0])), self.sample(own)

    def _hop(
        self, targets: np.ndarray, rows: np.ndarray, hop: int, fanout: int
    ) -> tuple[SparseArray, np.ndarray, np.ndarray]:
        """The block of targets that are at these rows, its entries, and the nodes that are new."""
        picked, lengths = self._picked(targets, fanout)
        source = self._columns[picked]
        new = self._distinct(source[self._local[source] < 0])
        first, (m, k) = self.capacities[hop], self.capacities[hop : hop + 2]
        self._local[new] = first + np.arange(new.shape[0], dtype=np.int32)
        offsets = np.zeros(m + 1, np.int32)
        offsets[rows + 1] = lengths
        np.cumsum(offsets, out=offsets)
        order, column, transposed = construct.sort_rows(offsets, self._local[source], k)
        entry = self._entries[picked[order]]
        room = min(m * fanout, self._entries.shape[0])  # each node is a target once
        block = of_capacity(
            self._values[entry], offsets, column, (m, k), room, transposed, checked=self._once
        )
        return block, padded(entry, room), new

    def _distinct(self, nodes: np.ndarray) -> np.ndarray:
        """Each of these nodes once, ascending; by flags where all nodes are not far more."""
        if nodes.shape[0] < self.num_nodes // 64:
            return np.unique(nodes)
        self._seen[nodes] = True
        found = np.flatnonzero(self._seen).astype(np.int32)
        self._seen[found] = False
        return found

    def _picked(self, targets: np.ndarray, fanout: int) -> tuple[np.ndarray, np.ndarray]:
        """(positions of the edges taken of each target in turn, how many there are of each). By
        Floyd's algorithm for a sample without replacement, for all targets at once."""
        start = self._offsets[targets]
        degree = self._offsets[targets + 1] - start
        lengths = np.minimum(degree, fanout)
        first = np.cumsum(lengths, dtype=np.int32) - lengths
        picked = np.arange(int(lengths.sum()), dtype=np.int32) + np.repeat(start - first, lengths)
        (many,) = np.nonzero(degree > fanout)
        if many.size:
            own = np.empty((fanout, many.shape[0]), np.int32)
            for j in range(fanout):
                last = degree[many] - fanout + j
                pick = (self._random.random(many.shape[0]) * (last + 1)).astype(np.int32)
                taken = (own[:j] == pick).any(0)
                own[j] = np.where(taken, last, pick)
                picked[first[many] + j] = start[many] + own[j]
        return picked, lengths
