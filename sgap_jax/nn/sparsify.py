"""A model with sparse layers in place of its dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np
from flax import nnx

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import is_traced
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.formats.prune import prune_together
from sgap_jax.nn.general import SparseConv, SparseEinsum, SparseLinearGeneral
from sgap_jax.nn.linear import SparseLinear, SparseWeight
from sgap_jax.nn.pruning import MaskedLinear
from sgap_jax.nn.structure import check_format

M = TypeVar("M", bound=nnx.Module)

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
      model: with concrete parameters, or one such layer itself.
      sparsity: share of the entries (vectors, blocks) to drop, from 0 to 1.
      format: CSR, CVS(V) or BCSR(r, c), see `SparseLinear`.
      where: which layers: a name in the path, a function `(path, layer) -> bool` with paths as of
        `nnx.iter_modules`, or another nnx filter of both, `nnx.Not(nnx.PathContains("head"))`. All
        by default.
      scope: "layer": each layer has this sparsity. "global": all layers together, so that those of
        larger weights keep more of them.

    Returns:
      The model; the new layer where `model` is a layer itself.

    Raises:
      ValueError: no such layer, traced or stacked parameters, another scope, a sparsity out of
        range. NotImplementedError: an Einsum that is no product with a matrix, a masked Conv.

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
        raise ValueError(
            f"{op}: model: expected a Linear, LinearGeneral, Einsum or Conv that `where` chooses, "
            f"got none in {type(model).__name__}"
        )
    stacked = [_stacked(op, path, layer) for path, layer in found]
    pruned = pruned_alike(op, stacked, format, sparsity, scope)
    sparse = {id(layer): _made(layer, W) for (_, layer), W in zip(found, pruned, strict=True)}
    if id(model) in sparse:
        return sparse[id(model)]
    for node in [node for _, node in nnx.iter_graph(model) if not isinstance(node, nnx.Variable)]:
        if isinstance(node, (nnx.Module, list, dict)) and id(node) not in sparse:
            _replace_children(node, lambda child: sparse.get(id(child)))
    return model


def layer_filter(where: Any) -> Callable[[Any, Any], bool]:
    """The argument `where` as a function of a path and a layer."""
    where = nnx.PathContains(where) if isinstance(where, str) else where
    return nnx.filterlib.to_predicate(where)


def pruned_alike(
    op: str, matrices: list[np.ndarray], format: Format, sparsity: float, scope: str
) -> list[SparseArray]:
    """The matrices pruned one by one, or together."""
    if scope not in ("layer", "global"):
        raise ValueError(f"{op}: scope: expected 'layer' or 'global', got {scope!r}")
    if scope == "global":
        return prune_together(op, matrices, format, sparsity)
    return [prune_together(op, [W], format, sparsity)[0] for W in matrices]


def _stacked(op: str, path: tuple[Any, ...], layer: Any) -> np.ndarray:
    """The layer's kernel as a matrix [outputs, inputs], of blocks one below the other."""
    name = "/".join(map(str, path)) or type(layer).__name__
    kernel = layer.kernel[...]
    if is_traced(kernel):
        raise ValueError(
            f"{op}: {name}: expected concrete parameters, got tracers; call it outside jit"
        )
    if isinstance(layer, nnx.Linear):
        if kernel.ndim != 2:
            raise ValueError(
                f"{op}: {name}: kernel: expected a matrix, got shape {kernel.shape}; "
                "layers that nnx.vmap has stacked have no sparse form; a list of layers, called in "
                "a loop, has"
            )
        mask = layer.mask[...] if isinstance(layer, MaskedLinear) else None
        kept = kernel if mask is None else np.where(mask, kernel, np.zeros((), kernel.dtype))
        return np.asarray(kept).T
    return np.asarray(_SPARSE[type(layer)].stacked_kernel(op, layer))


def _made(layer: Any, W: SparseArray) -> SparseWeight:
    return _SPARSE[type(layer)].of_stacked(layer, W)


def _replace_children(node: Any, replaced: Callable[[Any], Any]) -> None:
    if isinstance(node, list):
        items: Any = enumerate(node)
    else:
        items = node.items() if isinstance(node, dict) else vars(node).items()
    for key, child in list(items):
        new = replaced(child)
        if new is None:
            continue
        if isinstance(node, nnx.Module):
            setattr(node, key, new)
        else:
            node[key] = new
