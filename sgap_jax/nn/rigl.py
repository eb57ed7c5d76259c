"""RigL: a sparse weight whose entries move while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgap_jax.formats import checks, structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.vectors import grid, tile
from sgap_jax.nn.linear import SparseWeight
from sgap_jax.nn.pruning import norms_of_tiles
from sgap_jax.nn.structure import index_arrays
from sgap_jax.primitives.regrow import regrow

_TILE = 1 << 20  # scores that a function of rows computes at a time

Scores = jax.Array | Callable[[jax.Array], jax.Array]


def dense_gradients(
    loss: Callable[..., Any], model: nnx.Module, *args: Any
) -> dict[tuple[Any, ...], jax.Array]:
    """The gradient in the dense weight of each sparse layer, stored entries and others::

        scores = nn.dense_gradients(loss, model, x, y)
        nn.rigl_step(model.up, scores["up",], rate(step), model=model, optimizer=optimizer)

        G = dy^T x   [out_features, in_features], for a layer's inputs x and the gradient dy in its
                     outputs, summed over leading axes and calls

    The passes are those of the sparse model: of each layer's dense products only dy^T x is
    computed, of the dtype of its values. Of a dense twin (`to_dense`) all three are.

    Args:
      loss: a function of `(model, *args)` that returns a scalar; it may change the model, of which
        it gets a copy, and take derivatives, forward too. Inside `shard_map` the gradient of a
        model that is the same on all devices is the sum of theirs, as that of `jax.grad`.
      model: holds the layers; it is not changed. Under `nnx.jit` too.

    Returns:
      {path of the layer, a tuple as in `nnx.iter_modules`: its gradient}, with the leading axes of
      layers that `nnx.vmap` has stacked.

    Raises:
      ValueError: the model has no SparseLinear.

    Source: RigL (Evci et al. 2020), section 3, algorithm 1.
    """
    graph, state = nnx.split(model)
    weights: dict[tuple[Any, ...], jax.Array] = {}
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, SparseWeight):
            stacked = layer.values.shape[: -1 - len(layer.format.block_shape)]
            shape = (*stacked, *layer.weight_shape)
            weights[path] = jnp.zeros(shape, layer.values.dtype)
    if not weights:
        raise ValueError("dense_gradients: model: expected one with an nn.SparseLinear, got none")

    def watched(weights: dict[tuple[Any, ...], jax.Array]) -> Any:
        copy = nnx.merge(graph, state, copy=True)
        for path, layer in list(nnx.iter_modules(copy)):
            if isinstance(layer, SparseWeight):
                layer.watched = nnx.Variable(weights[path])
        return loss(copy, *args)

    keys = list(weights)
    found = jax.grad(lambda listed: watched(dict(zip(keys, listed, strict=True))))(
        list(weights.values())
    )
    return dict(zip(keys, found, strict=True))


def rigl_step(
    layer: SparseWeight,
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
    first in row-major order are kept and grown; NaN counts as smaller than every number, and an
    infinite score as the greatest finite one. A group
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
      TypeError: layer is not a SparseLinear, or no scores. ValueError: scores of another shape, a
        fraction out of range, an optimizer without its model, or a model without the layer.

    Source: RigL (Evci et al. 2020), section 3, algorithm 1.
    """
    op = "rigl_step"
    if not isinstance(layer, SparseWeight):
        raise TypeError(f"{op}: layer must be an nn.SparseLinear, got {type(layer).__name__}")
    if layer.blocks > 1:
        raise NotImplementedError(
            f"{op}: layer: a weight of {layer.blocks} blocks on the diagonal, outside of which "
            "entries would grow; the nearest are layers without groups and batch axes"
        )
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
    (down, across), groups = grid(W.shape, W.format), W.column_indices.shape[0]
    checks.check_nnz(down * across, f"{op}: the grid of groups")
    arrays = W.row_offsets, W.column_indices
    share = jnp.asarray(checks.check_share(fraction, "fraction", op), jnp.float32)
    norms, growth = _norms_of_groups(W), _growth(op, scores, W)
    offsets, column, source = regrow(*arrays, norms, growth, share)
    transposed = structure.transpose_structure(offsets, column, across)
    known, position = source >= 0, jnp.maximum(source, 0)

    def moved(x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim < 1 or x.shape[0] != groups:
            raise ValueError(
                f"{op}: expected an array with one element for each of {groups} groups, got shape "
                f"{list(x.shape)}"
            )
        take = known.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(take, x[position], jnp.zeros((), x.dtype))

    fields = structure.as_fields(((), (offsets, column)), transposed, checked=True)
    return SparseArray(moved(W.values), **fields, shape=W.shape, format=W.format), moved


def _norms_of_groups(W: SparseArray) -> jax.Array:
    """[groups]: the norms of W's vectors or blocks, of what lies inside the matrix; its entries."""
    if W.values.ndim == 1:
        return W.values
    (height, width), (m, k) = tile(W.format), W.shape
    values = W.values.reshape(-1, height, width)
    row = structure.segment_of_entry(W.row_offsets, values.shape[0])[:, None, None] * height
    column = W.column_indices[:, None, None] * width
    down = row + structure.positions(height)[None, :, None] < m
    inside = down & (column + structure.positions(width)[None, None] < k)
    values = jnp.where(inside, values, jnp.zeros((), values.dtype))
    return norms_of_tiles(values[:, :, None])[:, 0]


def _growth(op: str, scores: Any, W: SparseArray) -> jax.Array:
    """[groups down, groups across]: the norm of the scores of each group; of entries themselves."""
    (m, k), (height, width), (down, across) = W.shape, tile(W.format), grid(W.shape, W.format)

    def norms(x: jax.Array) -> jax.Array:
        if height * width == 1:
            return x
        rows = -(-x.shape[0] // height)
        x = jnp.pad(x, ((0, rows * height - x.shape[0]), (0, across * width - k)))
        # Else XLA reads scores that a product has left transposed across its rows.
        x = jax.lax.optimization_barrier(x)
        return norms_of_tiles(x.reshape(rows, height, across, width))

    if scores is None or isinstance(scores, dict):
        raise TypeError(
            f"{op}: gradient_scores must be an array or a function of rows, got "
            f"{type(scores).__name__}; nn.dense_gradients(loss, model) gives that of each layer by "
            'its path, a tuple: scores["up",] of model.up'
        )
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


def _moments(
    op: str, layer: SparseWeight, model: nnx.Module | None, optimizer: nnx.Optimizer
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
