"""einsum over index arrays that may hold anything: made under jit, or put in the place of checked
ones.

Segment i of a level is [o[i], o[i + 1]) of its offsets, clamped to the level and made monotone by
a running maximum. An entry with a coordinate out of range takes no part, nor does what is under
such a node; every other entry counts, in any order and as often as it is stored.

Compiled loops need valid index arrays, so these are checked when the program runs: one pass, whose
cost is small beside most calls. Valid ones go to the loops unchanged. Others are first rebuilt,
which costs more: the entries that take part come first, and each node occurs once. Arrays that
count as checked are looked at too, and the call is refused where something changed them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.compiler.loop_ir.loopir import Function, Search, SegReduce
from sgap_jax.compiler.loop_ir.patterns import parts
from sgap_jax.formats import structure
from sgap_jax.formats.levels import Compressed, Dense, Format, Singleton
from sgap_jax.formats.structure import positions
from sgap_jax.primitives.einsum_expression import ENTRY, Expression, nothing

_KINDS = {Dense: "d", Compressed: "c", Singleton: "s"}


@dataclasses.dataclass(frozen=True)
class _Nodes:
    """The nodes of a level: for each its coordinate, its parent node (`parents` is None for a dense
    level, which has all coordinates), and whether it takes part (`there`)."""

    coordinates: jax.Array
    parents: jax.Array | None
    there: jax.Array

    @property
    def count(self) -> int:
        return self.there.shape[0]


def stored_levels(format: Format) -> int:
    """The number of levels without the trailing dense ones: those inside a block, or whole
    modes."""
    return format.ndim - format.dense_modes


def _tail(expression: Expression) -> tuple[int, ...]:
    """The shape of the values stored at each position: () or that of a vector, block or slice."""
    return expression.format.stored_shape(expression.shape(expression.sparse))


def _sizes(expression: Expression) -> list[int]:
    """The number of coordinates of each stored level: of vectors and blocks, that of block rows
    and block columns."""
    format, sizes = expression.format, dict(expression.sizes)
    sides = (*format.block_shape, *[1] * format.ndim)
    extents = (sizes[expression.sparse[mode]] for mode in format.modes)
    found = [-(-extent // side) for extent, side in zip(extents, sides, strict=False)]
    return found[: stored_levels(format)]


def _levels(expression: Expression, index_arrays: Sequence) -> list[_Nodes]:
    left, found = iter(index_arrays), list[_Nodes]()
    for level, size in zip(expression.format.levels, _sizes(expression), strict=False):
        if isinstance(level, Dense):
            found.append(_Nodes(positions(size), None, jnp.ones(size, jnp.bool_)))
            continue
        offsets = next(left) if isinstance(level, Compressed) else None
        indices = next(left)
        place, there = positions(indices.shape[0]), structure.in_range(indices, size)
        parents = place
        if offsets is not None:
            offsets = structure.valid_offsets(offsets, indices.shape[0])
            parents = structure.segment_of_entry(offsets, indices.shape[0])
            there &= (place >= offsets[0]) & (place < offsets[-1])
        if found:
            there &= found[-1].there.at[parents].get(mode="fill", fill_value=False)
        found.append(_Nodes(indices, parents, there))
    return found


def _paths(levels: Sequence[_Nodes]) -> tuple[list[jax.Array], list[jax.Array]]:
    """For each node of the last level its coordinates, and its ancestors (nodes), on each level."""
    node, coordinates, nodes = positions(levels[-1].count), [], []
    for level in reversed(levels):
        coordinates.append(level.coordinates.at[node].get(mode="fill", fill_value=0))
        nodes.append(node)
        node = node if level.parents is None else level.parents[node]
    return coordinates[::-1], nodes[::-1]


def coordinates(expression: Expression, index_arrays: Sequence) -> dict[str, jax.Array]:
    """The coordinates [nnz] along each index of the sparse operand (and the nodes of the fiber
    index); the index's size, which is out of range, where an entry takes no part."""
    format, sizes = expression.format, dict(expression.sizes)
    levels = _levels(expression, index_arrays)
    found, nodes = _paths(levels)
    tail, depth = _tail(expression), stored_levels(format)
    shape = (levels[-1].count, *tail)
    there = jnp.broadcast_to(levels[-1].there.reshape(-1, *[1] * len(tail)), shape)
    by_index = {}
    for n, mode in enumerate(format.modes):
        index = expression.sparse[mode]
        place = found[n].reshape(-1, *[1] * len(tail)) if n < depth else jnp.int32(0)
        axis = n if format.block_shape else n - depth  # of the tail
        if 0 <= axis < len(tail):
            side = [size if m == axis else 1 for m, size in enumerate(tail)]
            within = positions(tail[axis]).reshape(1, *side)
            place = within if n >= depth else place * tail[axis] + within
        by_index[index] = place
        there &= place < sizes[index]
    if expression.fiber[0]:
        by_index[expression.fiber[0]] = nodes[expression.fiber[1] - 1].reshape(
            shape[0], *[1] * len(tail)
        )
    return {
        index: jnp.where(there, place, sizes[index]).reshape(-1)
        for index, place in by_index.items()
    }


def stored(expression: Expression, index_arrays: Sequence) -> jax.Array:
    """Which entries take part, or where the expression has a fiber index, which fibers."""
    index, depth = expression.fiber
    if index:
        return _levels(expression, index_arrays)[depth - 1].there
    first = expression.sparse[0]
    return coordinates(expression, index_arrays)[first] < dict(expression.sizes)[first]


def trusted(expression: Expression) -> Expression:
    """The expression for index arrays that are valid or have been rebuilt."""
    return dataclasses.replace(expression, checked=True, repeats=True)


def bounded(
    *operands: Any, expression: Expression, run: Callable, in_order: bool = False
) -> jax.Array:
    """`run` on the operands if their index arrays are valid, else on rebuilt ones.

    `in_order`: the loops of `run` need sorted coordinates (`needs_order`).
    """
    count = len(expression.words)
    mended = partial(_mended, expression=expression, run=run, in_order=in_order)
    orders = _orders(expression, in_order)
    hold = levels_hold(operands[count:], expression.format, _sizes(expression), orders)
    return jax.lax.cond(hold, run, mended, *operands)


def held_on_cpu(index_arrays: Sequence, expression: Expression, function: Function) -> jax.Array:
    """Whether these index arrays are as the loops of `function` need them: a bool scalar, found on
    the CPU when the program runs."""
    orders = _orders(expression, needs_order(function))
    sizes = tuple(_sizes(expression))
    return _hold_natively(*index_arrays, format=expression.format, sizes=sizes, orders=orders)


def levels_hold(
    index_arrays: Sequence, format: Format, sizes: Sequence[int], orders: str
) -> jax.Array:
    """Whether index arrays are valid: a bool scalar, found when the program runs.

    `sizes` are those of the stored levels, `orders` the order of each one's coordinates among the
    children of a node: "<" increasing, "=" non-decreasing, "." any. "t" for the last level of COO:
    the tuples of all levels' coordinates are non-decreasing.
    """
    params: dict = dict(format=format, sizes=tuple(sizes), orders=orders)
    look, otherwise = partial(_hold_natively, **params), partial(_hold, **params)
    return jax.lax.platform_dependent(*index_arrays, cpu=look, default=otherwise)


def needs_order(function: Function) -> bool:
    """Whether loops search in the coordinates, or a segment reduction relies on equal ones being
    neighbours."""
    return any(
        isinstance(part, SegReduce) or (isinstance(part, Search) and part.array.endswith("_crd"))
        for part in parts(function.body)
    )


def _orders(expression: Expression, in_order: bool) -> str:
    """The order that each level's coordinates must have, one character for each level, as
    `levels_hold` reads them."""
    format = expression.format
    if format.is_coordinate:
        return "." * (format.ndim - 1) + ("t" if in_order else ".")
    own = {
        stored_levels(format) - 1,
        expression.fiber[1] - 1,
    }  # coordinates of these levels may repeat
    loose = "=" if in_order else "."
    dense = [isinstance(level, Dense) for level in format.levels]
    return "".join(
        "." if dense[n] else loose if n in own else "<" for n in range(stored_levels(format))
    )


def _hold_natively(
    *index_arrays: Any, format: Format, sizes: tuple[int, ...], orders: str
) -> jax.Array:
    from sgap_jax.runtime import native as native  # registers the FFI targets

    levels = format.levels[: stored_levels(format)]
    call = jax.ffi.ffi_call("sgap_check_levels_v1", jax.ShapeDtypeStruct((), jnp.bool_))
    hold: jax.Array = call(
        *index_arrays,
        kinds="".join(_KINDS[type(level)] for level in levels),
        orders=orders,
        sizes=np.asarray(sizes, np.int64),
    )
    return structure.varying_like(hold, *index_arrays)


def _hold(*index_arrays: Any, format: Format, sizes: tuple[int, ...], orders: str) -> jax.Array:
    """The same check in plain JAX as that of cpu/check_levels/check_levels_ffi.cc."""
    left, hold = iter(index_arrays), jnp.asarray(True)
    levels = format.levels[: stored_levels(format)]
    stored_above, used = False, jnp.int32(1)
    # Comparison of each tuple of coordinates with the one before, up to the current level.
    falls, equal = jnp.asarray(False), jnp.asarray(True)
    starts = jnp.zeros(0, jnp.bool_)
    for n, (level, size) in enumerate(zip(levels, sizes, strict=True)):
        if isinstance(level, Dense):
            used = jnp.int32(size)
            continue
        if isinstance(level, Compressed):
            offsets, indices = next(left), next(left)
            last = offsets[used]
            rise = offsets[1:] > offsets[:-1] if stored_above else offsets[1:] >= offsets[:-1]
            rise |= positions(offsets.shape[0] - 1) >= used
            hold &= (offsets[0] == 0) & (last <= indices.shape[0]) & jnp.all(rise)
            begins = jnp.where(positions(offsets.shape[0]) <= used, offsets, indices.shape[0])
            starts = jnp.zeros(indices.shape[0], jnp.bool_)
            starts = starts.at[jnp.maximum(begins, 0)].set(True, mode="drop")
            used, stored_above = last, True
        else:
            indices = next(left)
        counts = positions(indices.shape[0]) < used
        hold &= jnp.all((indices >= 0) & (indices < size) | ~counts)
        below, same = indices[1:] < indices[:-1], indices[1:] == indices[:-1]
        if orders[n] in "<=":
            fall = below | same if orders[n] == "<" else below
            hold &= ~jnp.any(fall & counts[1:] & ~starts[1:])
        if format.is_coordinate:
            falls |= equal & below
            equal &= same
        if orders[n] == "t":
            hold &= ~jnp.any(falls & counts[1:])
    return hold


def _mended(*operands: Any, expression: Expression, run: Callable, in_order: bool) -> jax.Array:
    count, index = len(expression.words), expression.fiber[0]
    there = _Order(expression, operands[count:], in_order)
    block = math.prod(_tail(expression))

    def taken(word: str, x: Any, entries: Any, fibers: Any, fill: Any) -> Any:
        """Gathers a word's array along its entry and fiber axes; `fill` where a place is out of
        range."""
        for letter, places, each in ((ENTRY, entries, block), (index, fibers, 1)):
            if letter and letter in word:
                axis, shape = word.index(letter), x.shape
                x = x.reshape(*shape[:axis], places.shape[0], each, *shape[axis + 1 :])
                found = (places < x.shape[axis]).reshape(-1, *[1] * (x.ndim - axis - 1))
                found = found.reshape(*[1] * axis, *found.shape)
                x = jnp.where(found, jnp.take(x, places, axis, mode="clip"), fill).reshape(shape)
        return x

    data = [
        taken(word, x, there.order, there.fibers, 0)
        for word, x in zip(expression.words, operands[:count], strict=True)
    ]
    out = run(*data, *there.index_arrays)
    fill: Any = 0
    if index in expression.output and expression.reduction != "+":
        fill = nothing(expression.reduction, out.dtype)
    return taken(expression.output, out, there.rank, there.fiber_rank, fill)


class _Order:
    """Valid index arrays of the entries that take part; nodes occur once, except those of the
    fibers' level, which are kept as they are.

    Attributes:
      index_arrays: the new arrays, of the same lengths as the old ones.
      order, fibers: for each place in the new arrays, the old entry or fiber that moves there.
      rank, fiber_rank: for each old entry or fiber, its place in the new arrays; out of range if it
        takes no part.
    """

    def __init__(self, expression: Expression, index_arrays: Sequence, in_order: bool):
        format = expression.format
        self._levels = _levels(expression, index_arrays)
        self._coordinates, self._nodes = _paths(self._levels)
        self._fiber = expression.fiber[1] - 1
        self._last = stored_levels(format) - 1
        there, count = self._levels[-1].there, self._levels[-1].count
        above = sum(not isinstance(level, Dense) for level in format.levels[: self._last])
        if in_order or (above and not format.is_coordinate):
            keys = self._keys(format.is_coordinate or in_order)
            self.order = jnp.lexsort((*keys[::-1], ~there)).astype(jnp.int32)
            rank = structure.invert_permutation(self.order)
        else:  # the order stays: segments follow one another
            rank = jnp.cumsum(there, dtype=jnp.int32) - 1
            empty = jnp.zeros(count, jnp.int32)
            self.order = empty.at[jnp.where(there, rank, count)].set(positions(count), mode="drop")
        self.rank = jnp.where(there, rank, count)
        self._real = positions(count) < jnp.sum(there, dtype=jnp.int32)
        self.fibers: Any = None
        self.fiber_rank: Any = None
        found = self._coordinate_levels() if format.is_coordinate else self._tree()
        self.index_arrays = found

    def _keys(self, last: bool) -> list[jax.Array]:
        keys = []
        for n, coordinates in enumerate(self._coordinates[: None if last else -1]):
            keys.append(coordinates)
            if n == self._fiber:
                keys.append(self._nodes[n])
        return keys

    def _coordinate_levels(self) -> list[jax.Array]:
        bounds = jnp.stack([jnp.int32(0), jnp.sum(self._real, dtype=jnp.int32)])
        return [bounds, *(coordinates[self.order] for coordinates in self._coordinates)]

    def _tree(self) -> list[jax.Array]:
        arrays: list[jax.Array] = []
        changed = positions(self._real.shape[0]) == 0
        above, parents = jnp.zeros_like(self.order), 1
        for n, level in enumerate(self._levels):
            coordinates, count = self._coordinates[n][self.order], level.count
            changed |= _differs(coordinates)
            if level.parents is None:
                above, parents = coordinates, count
                continue
            node = self._nodes[n][self.order]
            if n == self._fiber:
                changed |= _differs(node)
            new = self._real & changed if n < self._last else self._real
            number = jnp.cumsum(new, dtype=jnp.int32) - 1
            place = jnp.where(new, number, count)
            slot = jnp.where(new, above, parents) + 1
            counts = jnp.zeros(parents + 1, jnp.int32).at[slot].add(1, mode="drop")
            indices = jnp.zeros(count, jnp.int32).at[place].set(coordinates, mode="drop")
            arrays += [jnp.cumsum(counts, dtype=jnp.int32), indices]
            if n == self._fiber:
                none = jnp.full(count, count, jnp.int32)
                self.fibers = none.at[place].set(node, mode="drop")
                self.fiber_rank = none.at[jnp.where(new, node, count)].set(number, mode="drop")
            above, parents = number, count
        return arrays


def _differs(x: jax.Array) -> jax.Array:
    """Where an element differs from the one before; True for the first."""
    return jnp.concatenate([jnp.ones(1, jnp.bool_), x[1:] != x[:-1]])[: x.shape[0]]
