"""A model with sparse layers in place of its dense ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import is_traced
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.formats.prune import kept_groups, prune_together
from sgap_jax.formats.vectors import grid, tile
from sgap_jax.nn.general import SparseConv, SparseEinsum, SparseLinearGeneral
from sgap_jax.nn.linear import PRUNED_FURTHER, SparseLinear, SparseWeight
from sgap_jax.nn.pruning import MaskedLinear, magnitude_mask
from sgap_jax.nn.structure import check_blocks, check_format, with_room

M = TypeVar("M", bound=nnx.Module)

# Ends messages about a layer that a format does not fit.
LEFT_OUT = "; where=lambda path, layer: ... may leave this layer out, or CSR stores it"
# Subclasses that others wrote may compute something else: they are left alone.
_SPARSE: dict[type, Any] = {
    nnx.Linear: SparseLinear,
    MaskedLinear: SparseLinear,
    nnx.LinearGeneral: SparseLinearGeneral,
    nnx.Einsum: SparseEinsum,
    nnx.Conv: SparseConv,
}


def sparsify(
    model: M,
    sparsity: float,
    *,
    format: Format | str = CSR,
    where: Any = ...,
    scope: Literal["layer", "global"] = "layer",
) -> M | SparseWeight:
    """Replaces the linear layers and convolutions of a trained model by sparse ones with their
    largest weights, in place::

        nn.sparsify(model, 0.9, format="CVS(8)", where=lambda path, layer: "head" not in path)

    `nnx.Linear` becomes a `SparseLinear`, `LinearGeneral` (which Flax's attention is made of)
    a `SparseLinearGeneral`, `Einsum` a `SparseEinsum`, `Conv` a `SparseConv`, a `MaskedLinear`
    a `SparseLinear` of what its mask keeps. A layer that the model has at several places is
    replaced at all of them by one. Parameters are copies; make a new optimizer afterwards.

    Args:
      model: or one such layer itself. With scope "layer" its parameters may be traced, so that
        `nnx.eval_shape` of a function that makes and sparsifies a model is what a checkpoint is
        restored into; under jit the norms of vectors and blocks are compared in float32 at least.
      sparsity: share of the entries (vectors, blocks) to drop, from 0 to 1.
      format: CSR, CVS(V) or BCSR(r, c), see `SparseLinear`.
      where: which layers: a name in the path, a list of which any holds, a function
        `(path, layer) -> bool` with paths as of `nnx.iter_modules`, or another nnx filter of both,
        `nnx.Not(nnx.PathContains("head"))`. All by default.
      scope: "layer": each layer has this sparsity. "global": all layers together, so that those of
        larger weights keep more of them. A layer that keeps none has room for one entry.

    Returns:
      The model; the new layer where `model` is a layer itself.

    Raises:
      ValueError: no such layer (sparse ones stay as they are), stacked parameters or, with scope
        "global", traced ones, another scope, a sparsity out of range, a format that does not divide
        a layer's diagonal blocks. NotImplementedError: an Einsum that is no product with a matrix,
        a masked Conv.

    Source: Gale et al., "The State of Sparsity" (2019), magnitude pruning per layer; Frankle and
    Carbin (2019), section 4, for the global one.
    """
    op = "sparsify"
    if not isinstance(model, nnx.Module):
        raise TypeError(f"{op}: model must be an nnx.Module, got {type(model).__name__}")
    format = check_format(op, format)
    chosen = layer_filter(where)
    # A layer at several places is chosen by any of them.
    places: dict[int, list[tuple[Any, ...]]] = {}
    for path, node in nnx.iter_modules(model):
        for key, child in [(None, node), *vars(node).items()]:
            own = path if key is None else (*path, key)
            places.setdefault(id(child), []).append(own)
    found = [
        (path, layer)
        for path, layer in nnx.iter_modules(model)
        if type(layer) in _SPARSE and any(chosen(own, layer) for own in places[id(layer)])
    ]
    if not found:
        sparse_too = any(
            isinstance(layer, SparseWeight) and any(chosen(own, layer) for own in places[id(layer)])
            for _, layer in nnx.iter_modules(model)
        )
        raise ValueError(
            f"{op}: model: expected a Linear, LinearGeneral, Einsum or Conv that `where` chooses, "
            f"got none in {type(model).__name__}" + (f"; {PRUNED_FURTHER}" if sparse_too else "")
        )
    stacked = [_stacked(op, path, layer, scope) for path, layer in found]
    for (path, layer), W in zip(found, stacked, strict=True):
        if not isinstance(layer, nnx.Linear):
            blocks = _SPARSE[type(layer)].diagonal_blocks(layer)
            check_blocks(f"{op}: {_name(path, layer)}", W.shape, format, blocks, LEFT_OUT)
    pruned = pruned_alike(op, stacked, format, sparsity, scope)
    sparse = {id(layer): _made(layer, W) for (_, layer), W in zip(found, pruned, strict=True)}
    if id(model) in sparse:
        return sparse[id(model)]
    for node in [node for _, node in nnx.iter_graph(model) if not isinstance(node, nnx.Variable)]:
        if isinstance(node, (nnx.Module, list, dict)) and id(node) not in sparse:
            _replace_children(node, sparse)
    return model


def layer_filter(where: Any) -> Callable[[Any, Any], bool]:
    """The argument `where` as a function of a path and a layer."""
    if isinstance(where, list | tuple):
        return nnx.filterlib.to_predicate(nnx.Any(*map(layer_filter, where)))
    where = nnx.PathContains(where) if isinstance(where, str) else where
    try:
        return nnx.filterlib.to_predicate(where)
    except (TypeError, ValueError) as failure:  # Flax's message of some types fails itself
        raise TypeError(
            "sparsify: where: expected a name in the path, a list of names, a function "
            f"(path, layer) -> bool or an nnx filter, got {where!r}"
        ) from failure


def pruned_alike(
    op: str, matrices: list[Any], format: Format, sparsity: float, scope: str
) -> list[SparseArray]:
    """The matrices pruned one by one, or together."""
    if scope not in ("layer", "global"):
        raise ValueError(f"{op}: scope: expected 'layer' or 'global', got {scope!r}")
    if scope == "global":
        return list(map(with_room, prune_together(op, matrices, format, sparsity)))
    return [
        _pruned_traced(op, W, format, sparsity)
        if is_traced(W)
        else with_room(prune_together(op, [W], format, sparsity)[0])
        for W in matrices
    ]


def _pruned_traced(op: str, W: Any, format: Format, sparsity: float) -> SparseArray:
    """W pruned under jit or eval_shape: how many groups are kept is static, which ones is not."""
    kept = kept_groups(op, W.shape, format, sparsity)
    (height, width), (down, across) = tile(format), grid(W.shape, format)
    mask = magnitude_mask(W, float(sparsity), format)[::height, ::width]
    row, column = jnp.nonzero(mask, size=kept)
    beyond = down * height - W.shape[0], across * width - W.shape[1]
    tiles = jnp.pad(W, [(0, size) for size in beyond]).reshape(down, height, across, width)
    values = tiles[row, :, column].reshape(kept, *format.block_shape)
    lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
    offsets = jnp.append(jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32))
    columns = column.astype(jnp.int32)
    made = SparseArray.from_arrays(values, offsets, columns, shape=W.shape, format=format)
    return with_room(made)


def _name(path: tuple[Any, ...], layer: Any) -> str:
    return "/".join(map(str, path)) or type(layer).__name__


def _stacked(op: str, path: tuple[Any, ...], layer: Any, scope: str) -> Any:
    """The layer's kernel as a matrix [outputs, inputs], of blocks one below the other."""
    name = _name(path, layer)
    kernel = layer.kernel[...]
    traced = is_traced(kernel)
    if traced and scope == "global":
        raise ValueError(
            f"{op}: {name}: expected concrete parameters, got tracers: with scope='global' the "
            "size of a layer depends on them; call it outside jit, and restore a checkpoint into "
            "the shapes that are stored, without a target"
        )
    if isinstance(layer, nnx.Linear):
        if kernel.ndim != 2:
            raise ValueError(
                f"{op}: {name}: kernel: expected a matrix, got shape {kernel.shape}; "
                "layers that nnx.vmap has stacked have no sparse form; a list of layers, called in "
                "a loop, has"
            )
        mask = layer.mask[...] if isinstance(layer, MaskedLinear) else None
        kept = kernel if mask is None else jnp.where(mask, kernel, jnp.zeros((), kernel.dtype))
        return kept.T if is_traced(kept) else np.asarray(kept).T
    return _SPARSE[type(layer)].stacked_kernel(op, layer)


def _made(layer: Any, W: SparseArray) -> SparseWeight:
    return _SPARSE[type(layer)].of_stacked(layer, W)


def _replace_children(node: Any, sparse: Mapping[int, Any]) -> None:
    """Puts the sparse layers, by the id of the dense ones, where a module, list or dict has these
    itself or in a tuple or another pytree, which is made anew."""

    def is_node(x: Any) -> bool:
        return id(x) in sparse or isinstance(x, (nnx.Module, nnx.Variable, list, dict))

    if isinstance(node, list):
        items: Any = enumerate(node)
    else:
        items = node.items() if isinstance(node, dict) else vars(node).items()
    for key, child in list(items):
        leaves, tree = jax.tree.flatten(child, is_leaf=is_node)
        if not any(id(leaf) in sparse for leaf in leaves):
            continue
        new = jax.tree.unflatten(tree, [sparse.get(id(leaf), leaf) for leaf in leaves])
        if isinstance(node, nnx.Module):
            setattr(node, key, new)
        else:
            node[key] = new
