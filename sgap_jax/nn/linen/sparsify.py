"""A linen model with sparse weights in place of the kernels of its dense layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.nnx.nn.dtypes import promote_dtype
from flax.traverse_util import flatten_dict, unflatten_dict

from sgap_jax.formats.checks import is_traced
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.nn.contraction import Contraction, patches
from sgap_jax.nn.linear import boxed_values, linear
from sgap_jax.nn.linen.linear import MaskedLinear
from sgap_jax.nn.sparsify import layer_filter, pruned_alike
from sgap_jax.nn.structure import check_format, index_arrays, of_index_arrays, on_diagonal
from sgap_jax.schedules import Schedule

_DENSE = (linen.Dense, MaskedLinear, linen.DenseGeneral, linen.Einsum, linen.Conv)


class Sparsified(linen.Module):
    """A model whose layers with an entry in the collection "structure" multiply by sparse weights:
    what `sparsify` returns. The variables have the paths of the model's own.

    Args:
      model: whose dense layers are replaced while it is called.
      format: of the weights.
      schedule: of the products; None lets `choose_schedule` pick.
    """

    model: linen.Module
    format: Format | str = CSR
    schedule: Schedule | str | None = None

    def setup(self) -> None:
        linen.share_scope(self, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        format = check_format("Sparsified", self.format)

        def call(next_call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
            layer = context.module
            own = context.method_name == "__call__" and type(layer) in _DENSE
            if not own or not layer.has_variable("structure", "index_arrays"):
                return next_call(*args, **kwargs)
            return _called(layer, format, self.schedule, *args, **kwargs)

        with linen.intercept_methods(call):
            return self.model(*args, **kwargs)  # type: ignore[operator]


def sparsify(
    model: linen.Module,
    variables: Any,
    sparsity: float,
    *args: Any,
    format: Format | str = CSR,
    where: Any = ...,
    scope: Literal["layer", "global"] = "layer",
    schedule: Schedule | str | None = None,
    **kwargs: Any,
) -> tuple[Sparsified, dict[str, Any]]:
    """(sparse model, its variables): the largest weights of a trained model's `Dense`,
    `DenseGeneral` (which Flax's attention is made of), `Einsum`, `Conv` and `MaskedLinear`; see
    `sgap_jax.nn.sparsify`::

        sparse, variables = snn.sparsify(model, variables, 0.9, x, where="mlp")
        y = sparse.apply(variables, x)

    Args:
      model, variables: concrete {"params": ...} and other collections.
      sparsity, format, scope: as there. where: with the path as a tuple of names.
      args, kwargs: of a call `model.apply(variables, *args, **kwargs)`, which is traced and not
        run: layers that it does not reach stay dense.
      schedule: of the products.

    Returns:
      A `Sparsified` of the model, and variables in which each chosen `kernel` is `values`, with
      `index_arrays` at the same path of the collection "structure". Boxes
      (`linen.with_partitioning`) stay, with the name of the kernel's first axis of outputs.

    Raises:
      ValueError: no such layer, traced parameters, layers that `linen.scan` or `linen.vmap`
        stacked, another scope, a sparsity out of range. NotImplementedError: a masked Conv, an
        Einsum that is no product with a matrix.
    """
    op = "sparsify"
    format = check_format(op, format)
    chosen, found = layer_filter(where), {}

    def watch(next_call: Callable, given: Any, options: Any, context: Any) -> Any:
        layer, path = context.module, tuple(context.module.path)
        own = context.method_name == "__call__" and type(layer) in _DENSE
        if own and layer.has_variable("params", "kernel") and chosen(path, layer):
            found[path] = _contraction(layer, *given, **options)[0]
        return next_call(*given, **options)

    with linen.intercept_methods(watch):
        jax.eval_shape(lambda v, *args: model.apply(v, *args, **kwargs), variables, *args)
    if not found:
        raise ValueError(
            f"{op}: model: expected a Dense, DenseGeneral, Einsum or Conv that `where` chooses, "
            f"got none in {type(model).__name__}"
        )
    params = flatten_dict(variables["params"])
    structure = flatten_dict(variables.get("structure", {}))
    stacked = []
    for path, contraction in found.items():
        kernel = linen.meta.unbox(params[(*path, "kernel")])
        name = "/".join(path)
        if is_traced(kernel):
            raise ValueError(f"{op}: {name}: expected concrete parameters; call it outside jit")
        if kernel.size != np.prod(contraction.kernel_shape):
            raise ValueError(
                f"{op}: {name}: kernel: expected {list(contraction.kernel_shape)}, got shape "
                f"{list(kernel.shape)}: layers that linen.scan or linen.vmap stacked stay dense, "
                "name others with `where`"
            )
        mask = structure.pop((*path, "mask"), None)
        kernel = np.asarray(kernel)
        kept = kernel if mask is None else np.where(mask, kernel, np.zeros((), kernel.dtype))
        stacked.append(contraction.stacked(kept))
    pruned = pruned_alike(op, stacked, format, sparsity, scope)
    for (path, contraction), W in zip(found.items(), pruned, strict=True):
        kernel = params.pop((*path, "kernel"))
        ndim = linen.meta.unbox(kernel).ndim
        outer = [i for i, k in enumerate(contraction.kernel) if k in contraction.outputs]
        outer = [min(i, ndim - 1) for i in outer]  # a Conv's outputs are one axis
        params[(*path, "values")] = boxed_values(kernel, W.values, outer, ndim)
        arrays = index_arrays(on_diagonal(f"{op}: {'/'.join(path)}", W, contraction.blocks))
        structure |= {(*path, "index_arrays", name): x for name, x in arrays.items()}
    made = {**variables, "params": unflatten_dict(params), "structure": unflatten_dict(structure)}
    return Sparsified(model, format, schedule), made


def _contraction(layer: Any, inputs: Any, *given: Any, **options: Any) -> tuple[Contraction, Any]:
    """How a layer's kernel is a matrix, and the inputs that it is multiplied by."""
    op, inputs = type(layer).__name__, jnp.asarray(inputs)
    if isinstance(layer, linen.Einsum):
        text = layer.einsum_str or options.get("einsum_str") or given[0]
        return Contraction.of_text(op, text, layer.shape), inputs
    if isinstance(layer, linen.Conv):
        return _convolution(op, layer, inputs)
    features = layer.features if isinstance(layer.features, tuple | list) else (layer.features,)
    axis = getattr(layer, "axis", -1)
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    batch = tuple(getattr(layer, "batch_dims", ()))
    own = [inputs.shape[a % inputs.ndim] for a in sorted(a % inputs.ndim for a in axes)]
    shape = (*(inputs.shape[a] for a in batch), *own, *features)
    return Contraction.of_axes(inputs.ndim, axes, batch, shape), inputs


def _convolution(op: str, layer: Any, inputs: jax.Array) -> tuple[Contraction, Any]:
    if layer.mask is not None:
        raise NotImplementedError(f"{op}: mask: none here; the nearest is a kernel times its mask")
    window = layer.kernel_size
    window = (window,) if isinstance(window, int) else tuple(window)
    groups, letters = layer.feature_group_count, "abcdefgh"[: len(window)]
    seen = patches(
        op,
        inputs,
        window,
        strides=layer.strides,
        padding=layer.padding,
        input_dilation=layer.input_dilation,
        kernel_dilation=layer.kernel_dilation,
    )
    own = inputs.shape[-1] // groups
    shape = (*window, own, groups, layer.features // groups)
    text = f"...{letters}xi,{letters}ixo->...xo"
    return Contraction.of_text(op, text, shape), seen.reshape(*seen.shape[:-1], groups, own)


def _called(
    layer: Any, format: Format, schedule: Any, inputs: Any, *given: Any, **options: Any
) -> jax.Array:
    """What the layer computes, with a sparse weight."""
    op = type(layer).__name__
    arrays = layer.get_variable("structure", "index_arrays")
    held = [layer.get_variable("params", name) for name in ("values", "bias")]
    inputs, values, bias = promote_dtype(
        (jnp.asarray(inputs), *map(linen.meta.unbox, held)), dtype=layer.dtype
    )
    contraction, inputs = _contraction(layer, inputs, *given, **options)
    rows, columns = contraction.stacked_shape
    W = of_index_arrays(arrays, values, (rows, columns * contraction.blocks), format)
    outputs = contraction.apply(op, inputs, lambda z: linear(op, z, W, None, schedule))
    if bias is not None:
        outputs += contraction.broadcast_bias(op, bias, inputs.ndim)
    if isinstance(layer, linen.Conv):  # the groups' own outputs follow each other
        *leading, groups, own = outputs.shape
        return outputs.reshape(*leading, groups * own)
    return outputs
