"""Puts the parts of a matrix on the devices of a mesh axis: what the processes tell each other of
their parts, the plan of the messages, and the arrays of all parts as global ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.formats.vectors import tile
from sgap_jax.parallel.cover import CoverPlan, PaddedCover, cover, out_of, padded_cover
from sgap_jax.parallel.exchange import Exchange, swapped
from sgap_jax.parallel.global_columns import to_all
from sgap_jax.parallel.global_rows import (
    GlobalPlan,
    PaddedGlobal,
    entries_of,
    global_rows,
    padded_global,
)
from sgap_jax.parallel.part import Cover, GlobalRows, Share
from sgap_jax.parallel.partitioned import PartitionedArray
from sgap_jax.parallel.plan import (
    NONE,
    Compressed,
    Padded,
    Sizes,
    bounds_of,
    padded,
    piece,
    sent_rows,
)
from sgap_jax.parallel.second_axis import Shared, shared_exchange


@dataclass(frozen=True)
class Placement:
    """An axis of a mesh whose devices have a part each."""

    mesh: Mesh
    axis: str

    @classmethod
    def of(cls, op: str, mesh: Any, axis: Any, second: Any = None) -> Placement:
        """Of the arguments of `op`, or TypeError and ValueError that say what is wrong."""
        if not isinstance(mesh, Mesh):
            raise TypeError(f"{op}: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
        if axis not in mesh.axis_names:
            raise ValueError(f"{op}: axis: expected one of {list(mesh.axis_names)}, got {axis!r}")
        others = [name for name in mesh.axis_names if name != axis]
        if second is not None and second not in others:
            if second == axis:
                raise ValueError(
                    f"{op}: second: {axis!r} has the parts already; expected another axis of the "
                    f"mesh, of {others}, or None"
                )
            raise ValueError(f"{op}: second: expected one of {others} or None, got {second!r}")
        return cls(mesh, axis)

    @property
    def parts(self) -> int:
        count: int = self.mesh.shape[self.axis]
        return count

    @property
    def mine(self) -> list[int]:
        """The parts that devices of this process have."""
        sharding = NamedSharding(self.mesh, jax.P(self.axis))
        indices = sharding.addressable_devices_indices_map((self.parts,)).values()
        if not indices:
            raise ValueError(
                f"no device of the mesh {self.mesh} belongs to process {jax.process_index()}"
            )
        return sorted({_start(index) for index in indices})

    def stacked(self, each: Mapping[int, Any], *axes: str | None) -> Any:
        """Pytrees of NumPy arrays of the parts as one of arrays [parts, ...], split over the axis
        and, by the next dimensions, over other ones."""
        over = NamedSharding(self.mesh, jax.P(self.axis, *axes))
        leaves = {p: [np.asarray(x) for x in jax.tree.leaves(tree)] for p, tree in each.items()}
        (any_part, *_), structure = leaves, jax.tree.structure(next(iter(each.values())))

        def leaf(i: int) -> jax.Array:
            first = leaves[any_part][i]
            return jax.make_array_from_callback(
                (self.parts, *first.shape), over, lambda at: leaves[_start(at)][i][None][_rest(at)]
            )

        return jax.tree.unflatten(structure, [leaf(i) for i in range(len(leaves[any_part]))])

    def told(self, exchange: Exchange, mine: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """What the parts here are sent of the plan, by whom it concerns; it travels as the exchange
        does."""
        if jax.process_count() == 1:
            return dict(enumerate(swapped(exchange, [mine[p] for p in range(self.parts)])))

        def local(x: jax.Array) -> jax.Array:
            return exchange.swap(self.axis, x[0])[None]

        spec = jax.P(self.axis)
        swap = jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=spec, out_specs=spec))
        shards = swap(self.stacked(mine)).addressable_shards
        return {_start(x.index): np.asarray(x.data)[0] for x in shards}

    def places(self, bounds: np.ndarray, padded: int, permutation: np.ndarray | None) -> jax.Array:
        """Where each row is among the padded rows of all parts."""
        size = int(bounds[-1])
        position = np.arange(size)
        part = np.searchsorted(bounds, position, side="right") - 1
        places = np.zeros(size, np.int32)
        order = position if permutation is None else permutation
        places[order] = part * padded + position - bounds[part]
        return jax.make_array_from_callback(
            (size,), NamedSharding(self.mesh, jax.P()), lambda index: places[index]
        )


def _start(index: tuple[slice, ...] | None) -> int:
    """The part of an index into an array [parts, ...]."""
    assert index is not None
    return index[0].start or 0


def _rest(index: tuple[slice, ...] | None) -> tuple[slice, ...]:
    """An index into an array [parts, ...], without which part."""
    assert index is not None
    return (slice(None), *index[1:])


def from_all(mine: Mapping[int, np.ndarray], parts: int) -> np.ndarray:
    """[parts, n]: what the processes know of their parts, from int arrays [n] of each."""
    if jax.process_count() == 1:
        return np.stack([mine[p] for p in range(parts)])
    (width,) = {len(x) for x in mine.values()} or {0}
    width = int(np.max(multihost_utils.process_allgather(np.int32(width))))
    filled = np.full((parts, width), np.iinfo(np.int32).min, np.int32)
    for p, x in mine.items():
        filled[p] = x
    everything = np.asarray(multihost_utils.process_allgather(filled))
    return everything.max(0).astype(np.int64)


def placed(
    rows_of: Callable[[int], Compressed],
    row_bounds: np.ndarray,
    k: int,
    dtype: Any,
    at: Placement,
    permutation: np.ndarray | None,
    second: str | None,
    format: Format,
) -> PartitionedArray:
    """The array of parts whose rows, in a format, `rows_of` gives. Every process calls it: they
    tell each other of their parts, all of them the same things in the same order."""
    m, parts, size = int(row_bounds[-1]), len(row_bounds) - 1, tile(format)
    high, wide = size
    # Of the grid of vectors or blocks.
    column_bounds = bounds_of("even", np.zeros(k // wide), parts)
    column_bounds = row_bounds // wide if m == k else column_bounds
    pieces, covers = {}, {}
    for p in at.mine:
        arrays = rows_of(p)
        arrays = arrays._replace(values=arrays.values.astype(dtype))
        pieces[p] = piece(p, arrays, column_bounds)
        if format == CSR:  # a smallest cover of entries; blocks send rows of B
            covers[p] = cover(pieces[p], column_bounds)
    known = {p: [x.counts(column_bounds)] for p, x in pieces.items()}
    for p, of_part in covers.items():
        known[p] += [of_part.counts()]
    counts = from_all({p: np.concatenate(x) for p, x in known.items()}, parts)
    counts, of_covers = counts[:, : 4 + parts], counts[:, 4 + parts :]
    entries = tuple((counts[:, :2].sum(1) * high * wide).tolist())
    sizes = Sizes.of(counts, column_bounds, size)
    if parts * max(sizes.rows, sizes.columns) > np.iinfo(np.int32).max:
        raise ValueError(
            f"partition: rows: {parts} parts, each padded to {max(sizes.rows, sizes.columns):,} "
            "rows as the largest, have more than int32 counts; expected more even parts"
        )

    copies = 1 if second is None else at.mesh.shape[second]
    exchange, to_each = Exchange.of(counts[:, 4:], wide), NONE
    of_copy = None
    if copies > 1 and format == CSR:  # entries and messages are shared one by one
        of_copy = shared_exchange(exchange, copies, sizes.rows)
    if of_copy is None:
        exchange, to_each = to_all(pieces, counts[:, 4:], column_bounds, wide, at.told, from_all)
    plan = CoverPlan.of(of_covers, counts[:, 1]) if format == CSR else None
    grid_bounds = row_bounds // high
    queries = global_rows(pieces, exchange, grid_bounds, column_bounds, size, at.told, from_all)

    # By what decides which columns go to all, where some do.
    def rows(x: Exchange) -> tuple[int, ...]:
        return (x.sent, x.received) if len(to_each) else (x.total,)

    if plan is not None and rows(plan.exchange) >= rows(exchange):
        plan = None
    local, halves, shared, some = {}, {}, {}, {}
    for p in list(pieces):
        found = pieces.pop(p)
        local[p] = padded(found, sizes, exchange, column_bounds, size, to_each)
        if of_copy is not None:
            shared[p] = Shared(found, local[p], exchange, of_copy, copies)
        if queries is not None:
            some[p] = padded_global(
                found, local[p], queries, sizes, grid_bounds, column_bounds, size
            )
        if plan is not None:
            halves[p] = padded_cover(found, local[p], covers.pop(p), plan, sizes, column_bounds)

    def of_rows(name: str, columns: int) -> SparseArray:
        arrays = {p: getattr(x, name) for p, x in local.items()}
        return _matrices(at, arrays, (sizes.rows, columns), format)

    requests = at.told(exchange.back, {p: x.requests for p, x in local.items()})
    asked = {
        p: sent_rows(p, x, to_each, exchange, column_bounds, wide) for p, x in requests.items()
    }
    whole = PartitionedArray(
        own=of_rows("own", sizes.columns),
        foreign=of_rows("foreign", max(exchange.received, wide)),
        merged=of_rows("merged", sizes.table),
        table_places=at.stacked({p: arrays.table for p, arrays in local.items()}),
        table_names=at.stacked({p: arrays.names for p, arrays in local.items()}),
        sends=at.stacked(asked),
        row_places=at.places(row_bounds, sizes.rows, permutation),
        column_places=at.places(
            column_bounds * wide, sizes.columns, permutation if m == k else None
        ),
        shape=(m, k),
        mesh=at.mesh,
        axis=at.axis,
        exchange=exchange,
        entries=entries,
        row_bounds=tuple(row_bounds.tolist()),
        given=permutation is None,
        second=second,
    )
    if of_copy is not None:
        whole = replace(whole, share=_share(at, shared, of_copy, sizes, second))
    if queries is not None:
        found_rows = _global_rows(at, some, queries, sizes, column_bounds, format)
        whole = replace(whole, global_rows=found_rows)
    if plan is not None:
        whole = replace(whole, cover=_cover(at, local, halves, plan, sizes, dtype))
    return whole


def _made(x: Compressed, shape: tuple[int, int], format: Format) -> SparseArray:
    stored = (len(x.values), *format.block_shape)
    values = x.values if x.values.shape == stored else np.zeros(stored, bool)
    array = SparseArray.from_arrays(values, *x[1:], shape=shape, format=format)
    return replace(array, values=x.values)  # places of `merged` are one for each block


def _matrices(
    at: Placement, arrays: Mapping[int, Compressed], shape: tuple[int, int], format: Format
) -> SparseArray:
    """A matrix of each part, of one shape."""
    found: SparseArray = at.stacked({p: _made(x, shape, format) for p, x in arrays.items()})
    return found


def _share(
    at: Placement, shared: Mapping[int, Shared], of_copy: Exchange, sizes: Sizes, second: str | None
) -> Share:
    """What each of the devices with the same part takes of its entries and messages."""

    def of_copies(arrays: Mapping[int, list[Compressed]], columns: int) -> SparseArray:
        trees = {
            p: [_made(x, (sizes.rows, columns), CSR) for x in each] for p, each in arrays.items()
        }
        stacks = {p: jax.tree.map(lambda *x: np.stack(x), *each) for p, each in trees.items()}
        found: SparseArray = at.stacked(stacks, second)
        return found

    counts = from_all({p: x.counts() for p, x in shared.items()}, at.parts)
    shares = {p: x.padded(sizes, int(counts.max())) for p, x in shared.items()}
    sends = at.told(of_copy.back, {p: x.requests for p, x in shares.items()})
    return Share(
        own=of_copies({p: x.own for p, x in shares.items()}, sizes.columns),
        foreign=of_copies({p: x.foreign for p, x in shares.items()}, of_copy.received),
        sends=at.stacked({p: x.T for p, x in sends.items()}, second),
        exchange=of_copy,
    )


def _global_rows(
    at: Placement,
    some: Mapping[int, PaddedGlobal],
    plan: GlobalPlan,
    sizes: Sizes,
    column_bounds: np.ndarray,
    format: Format,
) -> GlobalRows:
    """What attention needs of rows that all parts compute a piece of."""
    high, wide = tile(format)
    entries_there = at.told(plan.biases, {p: x.entries.T for p, x in some.items()})
    requests = at.told(plan.keys.back, {p: x.other.requests for p, x in some.items()})
    keys = (plan.to_each, plan.keys, column_bounds, wide)
    entries = {p: entries_of(p, plan, x.own, entries_there[p].T, sizes) for p, x in some.items()}
    merged = {p: x.other.merged for p, x in some.items()}
    return GlobalRows(
        merged=_matrices(at, merged, (sizes.rows, plan.sizes.table), format),
        table_places=at.stacked({p: x.other.table for p, x in some.items()}),
        table_names=at.stacked({p: x.other.names for p, x in some.items()}),
        sends=at.stacked({p: sent_rows(p, x, *keys) for p, x in requests.items()}),
        entries=_matrices(at, entries, (len(plan.rows) * high, sizes.columns), format),
        row_names=at.stacked({p: x.row_names for p, x in some.items()}),
        column_names=at.stacked({p: x.column_names for p, x in some.items()}),
        query_sends=at.stacked({p: x.query_sends for p, x in some.items()}),
        bias_sends=at.stacked({p: x.bias_sends for p, x in some.items()}),
        exchange=plan.keys,
        queries=plan.queries,
        biases=plan.biases,
    )


def _cover(
    at: Placement,
    local: Mapping[int, Padded],
    halves: Mapping[int, PaddedCover],
    plan: CoverPlan,
    sizes: Sizes,
    dtype: Any,
) -> Cover:
    """The two halves of a cover: what a part sends it knows from the others."""
    of_out = at.told(plan.entries, {p: x.entries.T for p, x in halves.items()})
    out = {p: out_of(p, plan, x.T) for p, x in of_out.items()}
    travel = {}
    for p, half in halves.items():
        values = np.append(local[p].foreign.values, np.zeros(1, dtype))
        travel[p] = values[np.minimum(half.value_sends, len(values) - 1)]
    there = at.told(plan.values, travel)
    received = {p: np.append(x, np.ones(1, dtype)) for p, x in there.items()}
    multiplied = {
        p: x._replace(values=received[p][np.minimum(x.values, len(received[p]) - 1)])
        for p, x in out.items()
    }
    sent = max(plan.exchange.received, 1)
    return Cover(
        out=_matrices(at, multiplied, (sent, sizes.columns), CSR),
        out_places=at.stacked({p: x.values for p, x in out.items()}),
        into=_matrices(at, {p: x.into for p, x in halves.items()}, (sizes.rows, sent), CSR),
        value_sends=at.stacked({p: x.value_sends for p, x in halves.items()}),
        exchange=plan.exchange,
        values=plan.values,
    )
