"""Neighbour sampling on the host, in blocks of fixed size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sgap_jax.formats import checks, construct
from sgap_jax.formats.array import SparseArray
from sgap_jax.graphs.edges import check_nodes, of_capacity, padded, rows_on_host, values_on_host
from sgap_jax.graphs.relations import NODES, Relations, ends_of, sizes_of_kinds


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("nodes", "blocks", "positions", "is_seed"),
    meta_fields=(),
)
@dataclass(frozen=True)
class NeighborSample:
    """What a minibatch needs, made by `NeighborSampler`; a pytree, of one type for all minibatches.

    Of relations, nodes are a dict by kind, and of each layer blocks and positions are dicts by the
    relations that reach the seeds; what is said below holds of each kind. With H = X[kind][nodes]
    of each kind, a layer of the relation (source, name, target) takes (H[source],
    H[target][: block.shape[0]]).

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

    nodes: Any
    blocks: tuple[Any, ...]
    positions: tuple[Any, ...]
    is_seed: jax.Array


class NeighborSampler:
    """Samples the neighbours of seeds, and theirs, without replacement and uniformly.

    Args:
      graph: square, in CSR, CSC or COO; concrete. Row i has the edges that arrive at i, which are
        sampled. Or relations, a mapping as of `join_relations`, {(kind of source, name, kind of
        target): matrix}; a graph between two kinds of nodes is one relation.
      fanouts: how many edges of a node are taken at most, of each relation, for each hop from the
        seeds on, as in PyG: the last one is of the first layer. -1 takes all: as many as any node
        has.
      num_seeds: how many seeds a minibatch has room for; with the fanouts this gives the size of
        all arrays, so that a jitted step compiles once.
      seed: of the random numbers: same seed, same samples.
      kind: of the seeds, where relations have several kinds of nodes.

    NumPy on the host, in time linear in the sample. One sampler may not be used by several threads
    at once.

    Raises:
      TypeError: graph is not a SparseArray or a mapping of them, or fanouts not a sequence.
      ValueError: a graph is traced, or not square; matrices of relations do not agree; kind is
        none of theirs; num_seeds is not positive, or a fanout neither that nor -1.

    Source: Hamilton et al., NeurIPS 2017, algorithm 2; of relations as PyG's HeteroData.
    """

    def __init__(
        self,
        graph: SparseArray | Mapping[Any, SparseArray],
        fanouts: Sequence[int],
        num_seeds: int,
        *,
        seed: int = 0,
        kind: str | None = None,
    ) -> None:
        what = "NeighborSampler"
        if isinstance(graph, Relations):
            raise TypeError(
                f"{what}: graph: expected the matrices that join_relations got, as a mapping, and "
                "kind= of the seeds; Relations have joined them"
            )
        self._typed = isinstance(graph, Mapping)
        relations: Mapping[Any, Any] = graph if isinstance(graph, Mapping) else {NODES: graph}
        self._relations = {
            key: _Relation(A, what if not self._typed else f"{what}: {key!r}")
            for key, A in relations.items()
        }
        if not isinstance(graph, Mapping) and graph.shape[0] != graph.shape[1]:
            raise ValueError(
                f"{what}: graph must be square, got shape {graph.shape}; of a graph between two "
                "kinds of nodes give the relation, {('source', 'to', 'target'): graph}, and "
                "kind='target'"
            )
        sizes = sizes_of_kinds(relations, what)
        if kind is None and len(sizes) == 1:
            (kind,) = sizes
        if kind not in sizes:
            raise ValueError(f"{what}: kind: expected one of {list(sizes)}, got {kind!r}")
        self.kind: str = kind
        if not hasattr(fanouts, "__len__"):
            raise TypeError(
                f"{what}: fanouts: expected a sequence with one for each layer, got {fanouts!r}"
            )
        if not len(fanouts):
            raise ValueError(f"{what}: fanouts: expected one for each layer, got none")
        most = max(relation.longest for relation in self._relations.values())
        self.fanouts = tuple(
            most if f == -1 else min(checks.check_count(f, "fanouts", what, 1), checks.INT32_MAX)
            for f in fanouts
        )
        self.num_seeds = checks.check_count(num_seeds, "num_seeds", what, 1)
        self.num_nodes = sizes[kind]
        self._random = np.random.default_rng(seed)
        self._local = {name: np.full(n, -1, np.int32) for name, n in sizes.items()}
        self._seen = {name: np.zeros(n, bool) for name, n in sizes.items()}
        rooms = [{name: self.num_seeds * (name == kind) for name in sizes}]
        for fanout in self.fanouts:  # nodes that are not known yet, and room for padding
            more, last = dict.fromkeys(sizes, 0), rooms[-1]
            for key in self._relations:
                source, target = ends_of(key)
                more[source] += last[target] * fanout
            rooms.append({name: last[name] + min(more[name], n) for name, n in sizes.items()})
        self._rooms = rooms
        self.capacities: tuple[Any, ...] = tuple(self._given(room, NODES) for room in rooms)
        """How many nodes there is room for, of relations by kind: seeds, then with each hop."""

    def _given(self, parts: dict, key: Any) -> Any:
        """What is there of each kind or relation, for one graph that of the one."""
        return parts if self._typed else parts[key]

    def sample(self, seeds: ArrayLike) -> NeighborSample:
        """The sample of these nodes: [s] integers, each once, s at most `num_seeds`, or a mask of
        all nodes."""
        what = "NeighborSampler.sample"
        chosen = check_nodes(seeds, self.num_nodes, "seeds", what).astype(np.int32)
        count, own = chosen.shape[0], self._local[self.kind]
        if count > self.num_seeds:
            raise ValueError(f"{what}: seeds: expected at most {self.num_seeds}, got {count}")
        try:
            own[chosen] = np.arange(count, dtype=np.int32)
            if not np.array_equal(own[chosen], np.arange(count)):
                raise ValueError(f"{what}: seeds: expected each node once")
            # Places of nodes: the seeds' from 0 on, those that hop h adds from its room on.
            none = np.zeros(0, np.int32)
            found = {name: chosen if name == self.kind else none for name in self._local}
            rows = {
                name: np.arange(nodes.shape[0], dtype=np.int32) for name, nodes in found.items()
            }
            blocks, entries = [], []
            for hop, fanout in enumerate(self.fanouts):
                block, entry, new = self._hop(found, rows, hop, fanout)
                for name, nodes in new.items():
                    place = self._rooms[hop][name] + np.arange(nodes.shape[0], dtype=np.int32)
                    found[name] = np.concatenate([found[name], nodes])
                    rows[name] = np.concatenate([rows[name], place])
                blocks.append(block)
                entries.append(entry)
            for name, nodes in found.items():
                self._local[name][nodes] = -1
        except BaseException:  # wherever it came from: the next sample starts anew
            for name in self._local:
                self._local[name][:], self._seen[name][:] = -1, False
            raise
        places = {name: np.zeros(room, np.int32) for name, room in self._rooms[-1].items() if room}
        for name, place in places.items():
            place[rows[name]] = found[name]
        device = {name: jnp.asarray(place) for name, place in places.items()}
        return NeighborSample(
            nodes=self._given(device, NODES),
            blocks=tuple(self._given(each, NODES) for each in blocks[::-1]),
            positions=tuple(self._given(each, NODES) for each in entries[::-1]),
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

    def _hop(self, found: dict, rows: dict, hop: int, fanout: int) -> tuple[dict, dict, dict]:
        """The blocks of targets that are at these rows, their entries, and the nodes that are new,
        by relation and kind."""
        blocks, entries = {}, {}
        new: dict[Any, np.ndarray] = {}
        for key, relation in self._relations.items():
            source, target = ends_of(key)
            m, k, local = (
                self._rooms[hop][target],
                self._rooms[hop + 1][source],
                self._local[source],
            )
            if m == 0:  # no target of this relation is known yet
                continue
            picked, lengths = relation.picked(found[target], fanout, self._random)
            nodes = relation.columns[picked]
            before = new.get(source, np.zeros(0, np.int32))
            added = self._distinct(nodes[local[nodes] < 0], source)
            first = self._rooms[hop][source] + before.shape[0]
            local[added] = first + np.arange(added.shape[0], dtype=np.int32)
            new[source] = np.concatenate([before, added])
            offsets = np.zeros(m + 1, np.int32)
            offsets[rows[target] + 1] = lengths
            np.cumsum(offsets, out=offsets)
            order, column, transposed = construct.sort_rows(offsets, local[nodes], k)
            entry = relation.entries[picked[order]]
            room = min(m * fanout, relation.entries.shape[0])  # each node is a target once
            blocks[key] = of_capacity(
                *(relation.values[entry], offsets, column, (m, k), room, transposed),
                checked=relation.once,
            )
            entries[key] = jnp.asarray(padded(entry, room))
        return blocks, entries, new

    def _distinct(self, nodes: np.ndarray, kind: str) -> np.ndarray:
        """Each of these nodes once, ascending; by flags where all nodes are not far more."""
        seen = self._seen[kind]
        if nodes.shape[0] < seen.shape[0] // 64:
            return np.unique(nodes)
        seen[nodes] = True
        found = np.flatnonzero(seen).astype(np.int32)
        seen[found] = False
        return found


class _Relation:
    """The edges of one relation by their targets, in NumPy."""

    def __init__(self, A: Any, what: str) -> None:
        self.offsets, self.columns, self.entries = rows_on_host(A, what)
        self.values, self.once = values_on_host(A, what), A.is_checked
        self.longest = max(1, int(np.diff(self.offsets).max(initial=0)))

    def picked(
        self, targets: np.ndarray, fanout: int, random: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """(positions of the edges taken of each target in turn, how many there are of each). By
        Floyd's algorithm for a sample without replacement, for all targets at once."""
        start = self.offsets[targets]
        degree = self.offsets[targets + 1] - start
        lengths = np.minimum(degree, fanout)
        first = np.cumsum(lengths, dtype=np.int32) - lengths
        picked = np.arange(int(lengths.sum()), dtype=np.int32) + np.repeat(start - first, lengths)
        (many,) = np.nonzero(degree > fanout)
        if many.size:
            own = np.empty((fanout, many.shape[0]), np.int32)
            for j in range(fanout):
                last = degree[many] - fanout + j
                pick = (random.random(many.shape[0]) * (last + 1)).astype(np.int32)
                taken = (own[:j] == pick).any(0)
                own[j] = np.where(taken, last, pick)
                picked[first[many] + j] = start[many] + own[j]
        return picked, lengths
