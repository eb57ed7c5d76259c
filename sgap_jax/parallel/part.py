"""What one device has of a matrix in parts: `Part`, and the forms of it that some operations
take."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.parallel.exchange import Exchange


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("out", "out_places", "into", "value_sends"),
    meta_fields=("exchange", "values"),
)
@dataclasses.dataclass(frozen=True)
class Cover:
    """The foreign matrix as a product, `into` times what a part receives of the others' `out`: of
    an entry either the row of B travels, or its part of a row of the result (cover.py).

    Attributes:
      out: [rows that a part sends, own columns]: a one for each row of B, and the entries that
        others have in its columns for the partial rows.
      out_places: where the values of `out` are among those that were received; beyond them ones.
      into: the structure of [rows, rows that a part receives]; its values say where an entry is
        among those of the foreign matrix; beyond them ones, which add partial rows.
      value_sends: which foreign values travel, when they change.
      exchange, values: of rows, and of those values.
    """

    out: SparseArray
    out_places: jax.Array
    into: SparseArray
    value_sends: jax.Array
    exchange: Exchange
    values: Exchange


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("own", "foreign", "sends"),
    meta_fields=("exchange",),
)
@dataclasses.dataclass(frozen=True)
class Share:
    """What one copy of a part multiplies and receives where copies share a product
    (second_axis.py); its leaves have axes for the parts and for the copies.

    Attributes:
      own, foreign: the structure of its entries; their values say where an entry is among those of
        the part's own and foreign matrices.
      sends: which of its rows it sends, message after message.
      exchange: what travels between the devices of one copy.
    """

    own: SparseArray
    foreign: SparseArray
    sends: jax.Array
    exchange: Exchange

    def matrices(self, part: Part) -> tuple[SparseArray, SparseArray]:
        """With the values of the part."""
        own, foreign = (
            mine.with_values(_at(whole.values, mine.values, 0))
            for mine, whole in ((self.own, part.own), (self.foreign, part.foreign))
        )
        return own, foreign


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "merged",
        "table_places",
        "table_names",
        "sends",
        "entries",
        "row_names",
        "column_names",
        "query_sends",
        "bias_sends",
    ),
    meta_fields=("exchange", "queries", "biases"),
)
@dataclasses.dataclass(frozen=True)
class GlobalRows:
    """How attention goes over a pattern of which some rows name so many columns that their queries
    travel instead of the keys (global_rows.py).

    Attributes:
      merged, table_places, table_names, sends, exchange: of all other rows, as those of
        `PartitionedArray`.
      entries: [global rows, own columns] of all parts' global rows; its values say where the bias
        of an entry is among those of own entries and then of the ones received (`biases`).
      row_names, column_names: of its rows and columns, in the order of the parts.
      query_sends: which of its rows a part sends to all, as `queries` says.
      bias_sends: which of the foreign entries' biases a part sends, as `biases` says.
    """

    merged: SparseArray
    table_places: jax.Array
    table_names: jax.Array
    sends: jax.Array
    entries: SparseArray
    row_names: jax.Array
    column_names: jax.Array
    query_sends: jax.Array
    bias_sends: jax.Array
    exchange: Exchange
    queries: Exchange
    biases: Exchange

    def bias_of(self, axis: str, own: jax.Array, foreign: jax.Array, block: int) -> jax.Array:
        """The bias of `entries`, from that of a part's own and foreign entries, [..., entries] with
        `block` axes of vectors or blocks behind."""
        inner = (slice(None),) * block
        dimension = own.ndim - 1 - block
        found = [own]
        if self.biases.received:
            sent = foreign[(..., self.bias_sends, *inner)]
            found.append(self.biases.swap(axis, sent, dimension))
        every = jnp.concatenate(found, axis=dimension)
        return every.at[(..., self.entries.values, *inner)].get(mode="fill", fill_value=0)


def _at(x: jax.Array, places: jax.Array, otherwise: int) -> jax.Array:
    """x at these places of its first axis, `otherwise` at those beyond the last one."""
    if x.shape[0] == 0:  # a gather takes nothing from an empty array
        return jnp.full((*places.shape, *x.shape[1:]), otherwise, x.dtype)
    return x.at[places].get(mode="fill", fill_value=otherwise)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "own",
        "foreign",
        "merged",
        "table_places",
        "table_names",
        "sends",
        "cover",
        "share",
        "global_rows",
    ),
    meta_fields=("axis", "second", "exchange"),
)
@dataclasses.dataclass(frozen=True)
class Part:
    """What one device has of a matrix: the fields of `PartitionedArray` of the same names, without
    their leading axis. For functions that run on each device (`PartitionedArray._on_each`)."""

    own: SparseArray
    foreign: SparseArray
    merged: SparseArray
    table_places: jax.Array
    table_names: jax.Array
    sends: jax.Array
    cover: Cover | None
    share: Share | None
    global_rows: GlobalRows | None
    axis: str
    second: str | None
    exchange: Exchange

    @property
    def alone(self) -> bool:
        """Whether nothing travels between any parts."""
        return self.exchange.received == 0

    def received(self, x: jax.Array, dimension: int = 0) -> jax.Array:
        """The rows of a dense operand that foreign columns name; its rows are along `dimension`."""
        return self.exchange.swap(
            self.axis, x[(slice(None),) * dimension + (self.sends,)], dimension
        )

    def values_of_others(self, foreign: jax.Array) -> jax.Array:
        """The values of `cover.out`, from the foreign ones of all parts."""
        assert self.cover is not None
        sent = _at(foreign, self.cover.value_sends, 0)
        return _at(self.cover.values.swap(self.axis, sent), self.cover.out_places, 1)

    def into(self) -> SparseArray:
        """`cover.into` with the values of the foreign matrix."""
        assert self.cover is not None
        into = self.cover.into
        return into.with_values(_at(self.foreign.values, into.values, 1))

    def table(self, x: jax.Array, dimension: int = 0) -> jax.Array:
        """Own and received rows of a dense operand, in the order of the columns of `matrix`."""
        if not self.alone:
            x = jnp.concatenate([x, self.received(x, dimension)], axis=dimension)
        return x[(slice(None),) * dimension + (self.table_places,)]

    def to_owners(self, x: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
        """Sends partial results back to the parts that own their columns.

        `x` has a row of numbers for each column of `matrix`, which other parts may own. Returned
        are the rows that all parts have for the `columns` of this one, first its own, then what the
        others sent, and for each row the column of this part that it is for. Rows that nobody sent
        are zero, and those of columns in which the sender has no entry."""
        offsets = self.merged.transposed[0]  # type: ignore[index]
        wide = x.shape[0] // (offsets.shape[0] - 1)
        there = jnp.repeat(jnp.diff(offsets) > 0, wide, total_repeat_length=x.shape[0])
        exchange, ours = self.exchange, columns + self.exchange.between_two
        size = columns + exchange.received
        placed = jnp.zeros((size, *x.shape[1:]), x.dtype)
        placed = placed.at[jnp.where(there, self.table_places, size)].set(x, mode="drop")
        own, between, shared = jnp.split(placed, [columns, ours])
        found, rows = [own], [jnp.arange(columns, dtype=jnp.int32)]
        if exchange.between_two:
            found.append(exchange.back.swap(self.axis, between))
            rows.append(self.sends[: exchange.between_two])
        if exchange.to_all:
            mine = exchange.owner_of_shared == jax.lax.axis_index(self.axis)
            everything = jax.lax.all_gather(shared, self.axis, tiled=True)
            to = jnp.where(mine, self.sends[exchange.between_two :], columns)
            found.append(everything)
            rows.append(jnp.tile(to, exchange.parts))
        return jnp.concatenate(found), jnp.concatenate(rows)

    def matrix(self) -> SparseArray:
        """All entries of the rows of this part, in the order of the whole matrix."""
        values = jnp.concatenate([self.own.values, self.foreign.values])
        return dataclasses.replace(self.merged, values=self.in_matrix(values))

    def pattern(self) -> SparseArray:
        """`matrix` without its values."""
        return self.structure_of(self.merged)

    def structure_of(self, places: SparseArray) -> SparseArray:
        """Without the values, which are a place for each vector or block."""
        block = self.own.format.block_shape
        none = jnp.zeros((places.values.shape[0], *block), bool)
        return dataclasses.replace(places, values=none) if block else places

    def in_matrix(self, values: jax.Array) -> jax.Array:
        """[..., own and then foreign entries] -> [..., entries of `matrix`]; of vectors and blocks
        with their axes behind."""
        inner = (slice(None),) * len(self.own.format.block_shape)
        return values.at[..., self.merged.values, *inner].get(mode="fill", fill_value=0)

    def other_rows(self) -> Part:
        """The part without the rows that are global for attention."""
        if self.global_rows is None:
            return self
        of = ("merged", "table_places", "table_names", "sends", "exchange")
        return dataclasses.replace(self, **{name: getattr(self.global_rows, name) for name in of})

    def apart(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Values of `matrix` -> those of own and of foreign entries."""
        own, foreign = (x.values.shape[0] for x in (self.own, self.foreign))
        both = jnp.zeros((own + foreign, *values.shape[1:]), values.dtype)
        both = both.at[self.merged.values].set(values, mode="drop", unique_indices=True)
        return both[:own], both[own:]
