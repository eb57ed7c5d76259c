"""RigL: a sparse weight whose entries move while it trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgap_jax.formats import checks, structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.vectors import grid, tile
from sgap_jax.nn.linear import SparseLinear
from sgap_jax.nn.structure import index_arrays
from sgap_jax.primitives._define import accumulator
from sgap_jax.select.rows import top_k

_TILE = 1 << 20  # scores that a function of rows computes at a time
_COLUMNS = 256

Scores = jax.Array | Callable[[jax.Array], jax.Array]


def dense_gradients(
    loss: Callable[..., Any], model: nnx.Module, *args: Any
) -> dict[tuple[Any, ...], jax.Array]:
    """The gradient in the dense weight of each `SparseLinear`, stored entries and others::

        scores = nn.dense_gradients(loss, model, x, y)
        nn.rigl_step(model.up, scores["up",], rate(step), model=model, optimizer=optimizer)

        G = dy^T x   [out_features, in_features], for a layer's inputs x and the gradient dy in its
                     outputs, summed over leading axes and calls

    The passes are those of the sparse model: of each layer's dense products only dy^T x is
    computed, of the dtype of its values. Of a dense twin (`to_dense`) all three are.

    Args:
      loss: a function of `(model, *args)` that returns a scalar; it may change the model, of which
        it gets a copy.
      model: holds the layers; it is not changed. Under `nnx.jit` too.

    Returns:
      {path of the layer, as in `nnx.iter_modules`: its gradient}, with the leading axes of layers
      that `nnx.vmap` has stacked.

    Raises:
      ValueError: the model has no SparseLinear.

    Source: RigL (Evci et al. 2020), section 3, algorithm 1.
    """
    graph, state = nnx.split(model)
    weights: dict[tuple[Any, ...], jax.Array] = {}
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, SparseLinear):
            stacked = layer.values.shape[: -1 - len(layer.format.block_shape)]
            shape = (*stacked, layer.out_features, layer.in_features)
            weights[path] = jnp.zeros(shape, layer.values.dtype)
    if not weights:
        raise ValueError("dense_gradients: model: expected one with an nn.SparseLinear, got none")

    def watched(weights: dict[tuple[Any, ...], jax.Array]) -> Any:
        copy = nnx.merge(graph, state, copy=True)
        for path, layer in list(nnx.iter_modules(copy)):
            if isinstance(layer, SparseLinear):
                layer.watched = nnx.Variable(weights[path])
        return loss(copy, *args)

    keys = list(weights)
    found = jax.grad(lambda listed: watched(dict(zip(keys, listed, strict=True))))(
        list(weights.values())
    )
    return dict(zip(keys, found, strict=True))


def rigl_step(
    layer: SparseLinear,
    gradient_scores: Any,
    fraction: Any,
    *,
    model: nnx.Module | None = None,
    optimizer: nnx.Optimizer | None = None,
) -> Callable[[jax.Array], jax.Array]:
    """Moves a share of a sparse weight's entries to where the gradient is largest, in place::

        scores = nn.dense_gradients(loss, model)["layer",]  # d loss / d W, stored or not
        nn.rigl_step(model.layer, scores, rate(step), model=model, optimizer=optimizer)

        drop   the round(fraction nnz) stored groups of smallest norm(W[g])
        grow   as many of all groups not kept, of largest norm(scores[g]), with zeros as values

    A group is an entry, for CVS(V) a vector and for BCSR(r, c) a block. Of equal norms the groups
    first in row-major order are kept and grown; NaN counts as smaller than every number. A group
    that was dropped may grow again, at zero. The number of stored groups does not change: under
    `nnx.jit` one program makes every step, with a traced fraction too. A weight with padding is
    filled up to its capacity. Layers stacked by `nnx.vmap`: call this in an `nnx.vmap`.

    Args:
      layer: `SparseLinear`; its values and structure are replaced.
      gradient_scores: [out_features, in_features], the gradient in the dense weight or another
        score of it, whose sign does not matter; or a function of row numbers, int32 [rows], that
        gives [rows, in_features] of them, `lambda rows: dy[:, rows].T @ x` for the gradient dy in
        the outputs: then one array of that size is made, and not two.
      fraction: share of the stored groups to move, from 0 to 1: a number or a scalar array, such as
        `optax.cosine_decay_schedule(0.3, steps)(step)`, the paper's.
      model, optimizer: an `nnx.Optimizer` of this model, which has the layer: what it holds for
        each of the layer's values (moments) moves along, and is zero for new ones.

    Returns:
      A function that maps an array with an element (of any shape) for each of the old groups, such
      as a moment in another optimizer's state, to the new ones, with zeros for those that grew.

    Raises:
      TypeError: layer is not a SparseLinear. ValueError: scores of another shape, a fraction out of
        range, an optimizer without its model, or a model without the layer.

    Source: RigL (Evci et al. 2020), section 3, algorithm 1.
    """
    op = "rigl_step"
    if not isinstance(layer, SparseLinear):
        raise TypeError(f"{op}: layer must be an nn.SparseLinear, got {type(layer).__name__}")
    moments = [] if optimizer is None else _moments(op, layer, model, optimizer)
    W, moved = regrown(op, layer.weight, gradient_scores, fraction)
    layer.values[...] = W.values
    for name, array in index_arrays(W).items():
        layer.structure[name][...] = array
    for variable in moments:
        variable[...] = moved(variable[...])
    return moved


def regrown(
    op: str, W: SparseArray, scores: Any, fraction: Any
) -> tuple[SparseArray, Callable[[jax.Array], jax.Array]]:
    """(W after a step of RigL, the function of `rigl_step` that maps arrays of its groups)."""
    down, across = grid(W.shape, W.format)
    cells, groups = down * across, W.column_indices.shape[0]
    checks.check_nnz(cells, f"{op}: the grid of groups")
    place, entry = _places(W, down, across)
    stored = place < cells
    count = jnp.sum(stored, dtype=jnp.int32)
    kept = _greatest(_norms_of_groups(W)[entry], stored, count - _dropped(op, fraction, count))
    ranked = _growth(op, scores, W).reshape(-1)
    infinity = jnp.asarray(jnp.inf, ranked.dtype)
    ranked = ranked.at[jnp.where(kept, place, cells)].set(infinity, mode="drop")
    # What is kept comes first, and as many of the others as there is room for; all ascending.
    found = top_k(ranked[None], groups)
    old, flat = (jnp.pad(x, (0, groups - x.shape[0])) for x in (found.values, found.column_indices))
    used = jnp.asarray(min(groups, cells), jnp.int32)
    row, column = jnp.divmod(flat, max(across, 1))
    offsets = structure.offsets_of_indices(row, down, used)
    transposed = structure.transpose_structure(offsets, column, across)
    # The kept groups are in the same order before and after.
    at = jnp.where(kept, _rank(kept), groups)
    before = jnp.zeros(groups, jnp.int32).at[at].set(entry, mode="drop")
    known = old == infinity
    source = before[jnp.where(known, _rank(known), 0)] if groups else before

    def moved(x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim < 1 or x.shape[0] != groups:
            raise ValueError(
                f"{op}: expected an array with one element for each of {groups} groups, got shape "
                f"{list(x.shape)}"
            )
        take = known.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(take, x[source], jnp.zeros((), x.dtype))

    fields = structure.as_fields(((), (offsets, column)), transposed, checked=True)
    return SparseArray(moved(W.values), **fields, shape=W.shape, format=W.format), moved


def _places(W: SparseArray, down: int, across: int) -> tuple[jax.Array, jax.Array]:
    """(place, entry): the cell of each stored group in the grid, in row-major order, and the
    group's position in W. Padding, groups that take no part and second ones in a cell come with
    the place down * across."""
    offsets, indices = structure.well_formed(W.row_offsets, W.column_indices, across)
    groups, none = indices.shape[0], down * across

    def placed(offsets: jax.Array, indices: jax.Array) -> jax.Array:
        row = structure.segment_of_entry(offsets, groups)
        stored = (structure.positions(groups) < offsets[-1]) & (indices >= 0)
        return jnp.where(stored, row * across + indices, none)

    def in_order(place: jax.Array) -> tuple[jax.Array, jax.Array]:
        return place, structure.varying_like(structure.positions(groups), place)

    def sorted_(_: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Unchecked columns may be in any order; two stable counting sorts bring them into that of
        # rows.
        columns, rows, first = structure.transpose_structure(offsets, indices, across)
        ends, again, second = structure.transpose_structure(columns, rows, down)
        place = placed(ends, again)
        twice = jnp.append(jnp.zeros(1, bool), place[1:] == place[:-1])[:groups]
        return jnp.where(twice, none, place), first[second]

    place = placed(offsets, indices)
    rises = (place[1:] > place[:-1]) | (place[:-1] == none) & (place[1:] == none)
    return jax.lax.cond(jnp.all(rises), in_order, sorted_, place)


def _rank(mask: jax.Array) -> jax.Array:
    return jnp.cumsum(mask, dtype=jnp.int32) - 1


def _dropped(op: str, fraction: Any, count: jax.Array) -> jax.Array:
    """How many groups a fraction of `count` are."""
    if not checks.is_traced(fraction):
        known = jnp.shape(fraction) == () and not isinstance(fraction, str | bool)
        if not known or not 0 <= float(fraction) <= 1:
            raise ValueError(f"{op}: fraction: expected a number from 0 to 1, got {fraction!r}")
    elif fraction.shape != ():
        raise ValueError(f"{op}: fraction: expected a scalar, got shape {list(fraction.shape)}")
    share = jnp.clip(jnp.asarray(fraction, jnp.float32), 0, 1)
    dropped = jnp.round(share * count.astype(jnp.float32)).astype(jnp.int32)
    return jnp.clip(dropped, 0, count)


def _norms_of_groups(W: SparseArray) -> jax.Array:
    """[groups]: the norms of W's entries, vectors or blocks, of what lies inside the matrix."""
    values = W.values.astype(accumulator(W.dtype))
    if values.ndim == 1:
        return jnp.abs(values)
    (height, width), (m, k) = tile(W.format), W.shape
    values = values.reshape(-1, height, width)
    row = structure.segment_of_entry(W.row_offsets, values.shape[0])[:, None, None] * height
    column = W.column_indices[:, None, None] * width
    down = row + structure.positions(height)[None, :, None] < m
    inside = down & (column + structure.positions(width)[None, None] < k)
    squares = jnp.where(inside, jnp.square(values), jnp.zeros((), values.dtype))
    return jnp.sqrt(squares.sum((1, 2)))


def _growth(op: str, scores: Any, W: SparseArray) -> jax.Array:
    """[groups down, groups across]: the norm of the scores of each group, finite or NaN."""
    (m, k), (height, width), (down, across) = W.shape, tile(W.format), grid(W.shape, W.format)

    def norms(x: jax.Array) -> jax.Array:
        x = x.astype(accumulator(x.dtype))
        if height * width == 1:
            found = jnp.abs(x)
        else:
            rows = -(-x.shape[0] // height)
            x = jnp.pad(x, ((0, rows * height - x.shape[0]), (0, across * width - k)))
            squares = jnp.square(x).reshape(rows, height, across, width)
            found = jnp.sqrt(squares.sum((1, 3)))
        return jnp.minimum(found, jnp.finfo(found.dtype).max)

    if not callable(scores):
        scores = jnp.asarray(scores)
        _check_scores(op, scores, (m, k))
        return norms(scores)
    count = min(max(_TILE // max(height * k, 1), 1), max(down, 1))  # rows of groups at a time
    rows = structure.positions(count * height)
    _check_scores(op, jax.eval_shape(scores, rows), (count * height, k))

    def of_tile(number: jax.Array) -> jax.Array:
        at = number * (count * height) + rows
        found = scores(jnp.minimum(at, m - 1))
        return norms(jnp.where((at < m)[:, None], found, jnp.zeros((), found.dtype)))

    tiles = jax.lax.map(of_tile, structure.positions(-(-down // count)))
    return tiles.reshape(-1, across)[:down]


def _check_scores(op: str, scores: Any, shape: tuple[int, int]) -> None:
    if scores.shape != shape or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(
            f"{op}: gradient_scores must be floats of shape {list(shape)}, got "
            f"{list(scores.shape)} of {scores.dtype}"
        )


def _greatest(norms: jax.Array, among: jax.Array, count: jax.Array) -> jax.Array:
    """Which are the `count` greatest of the norms in `among`, of equal ones the first."""
    integer = jnp.dtype(jnp.int32 if norms.dtype == jnp.float32 else jnp.int64)
    # Bits of numbers that are not negative are in their order. One: of NaN; zero: of the others.
    keys = jax.lax.bitcast_convert_type(norms, integer) + jnp.asarray(2, integer)
    keys = jnp.where(jnp.isnan(norms), jnp.ones((), integer), keys)
    keys = jnp.where(among, keys, jnp.zeros((), integer))
    # XLA sums columns in vectors, and a long row number by number.
    lines = jnp.pad(keys, (0, -keys.size % _COLUMNS)).reshape(-1, _COLUMNS)

    def reach(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sum(lines >= threshold, axis=0, dtype=jnp.int32), dtype=jnp.int32)

    Ends = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def narrow(step: int, ends: Ends) -> Ends:
        """At least `count` keys reach `low`, and fewer than that exceed `high`."""
        low, high, from_low, above_high = ends
        if step == 0:
            middle = low + (high - low + 1) // 2
        else:  # on a straight line between the counts
            numbers = from_low - count, from_low - above_high, high - low
            too_many, between, span = (x.astype(norms.dtype) for x in numbers)
            middle = jnp.clip(low + (too_many / between * span).astype(integer), low + 1, high)
        found = reach(middle)
        enough = found >= count
        # Where just `count` keys reach it, it is the threshold.
        low, high = jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)
        high = jnp.where(found == count, low, high)
        return low, high, jnp.where(enough, found, from_low), jnp.where(enough, above_high, found)

    def narrow_twice(ends: Ends) -> Ends:
        ends = narrow(0, ends)
        return jax.lax.cond(ends[0] < ends[1], partial(narrow, 1), lambda ends: ends, ends)

    one = structure.varying_like(jnp.ones((), integer), keys)
    none = structure.varying_like(jnp.zeros((), jnp.int32), keys)
    ends = one, jnp.maximum(jnp.max(keys, initial=0), one), reach(one), none
    threshold = jax.lax.while_loop(lambda ends: ends[0] < ends[1], narrow_twice, ends)[0]
    above, equal = keys > threshold, keys == threshold
    left = count - jnp.sum(above, dtype=jnp.int32)
    ties = jnp.sum(equal, dtype=jnp.int32) > left
    first = jax.lax.cond(ties, lambda x: x & (_rank(x) < left), lambda x: x, equal)
    return above | first


def _moments(
    op: str, layer: SparseLinear, model: nnx.Module | None, optimizer: nnx.Optimizer
) -> list[Any]:
    """The variables of an optimizer that belong to the layer's values."""
    if model is None:
        raise ValueError(f"{op}: model: expected with the optimizer, got None")
    found = [path for path, module in nnx.iter_modules(model) if module is layer]
    if not found:
        raise ValueError(f"{op}: model: expected one that has the layer, got another")
    own = (*map(str, found[0]), "values")
    parameters = {tuple(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
    moments = []
    for path, variable in _variables(optimizer.opt_state):
        # Of the model's paths that end this one, the longest is the parameter it belongs to.
        ends = [path[at:] for at in range(len(path)) if path[at:] in parameters]
        if ends and ends[0] == own and variable.shape == layer.values.shape:
            moments.append(variable)
    return moments


def _variables(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """(path, variable) of each variable in an optimizer's state."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    names = ("key", "name", "idx")

    def text(step: Any) -> str:
        return next(str(getattr(step, name)) for name in names if hasattr(step, name))

    return [
        (tuple(map(text, path)), leaf) for path, leaf in flat[0] if isinstance(leaf, nnx.Variable)
    ]
