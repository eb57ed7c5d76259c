"""Sparse and masked linear layers for linen."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.nnx.nn.dtypes import promote_dtype
from flax.traverse_util import flatten_dict, unflatten_dict
from flax.typing import Dtype, Initializer, PrecisionLike

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_count
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.formats.vectors import grid
from sgap_jax.nn.linear import (
    LECUN,
    ZEROS,
    boxed_values,
    linear,
    pruned_weight,
    values_initializer,
    with_bias,
)
from sgap_jax.nn.pruning import kernel_mask
from sgap_jax.nn.rigl import regrown
from sgap_jax.nn.structure import check_format, index_arrays, of_index_arrays, random_structure
from sgap_jax.primitives._define import check_sparse
from sgap_jax.schedules import Schedule


class SparseLinear(linen.Module):
    """A linear layer with a sparse weight, y = x W^T + b: see `sgap_jax.nn.SparseLinear`.

    Parameters `values` and `bias`; variable `index_arrays` of the collection "structure". The
    number of inputs is that of the first call.
    """

    features: int
    sparsity: float
    format: Format | str = CSR
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = LECUN
    values_init: Initializer | None = None
    bias_init: Initializer = ZEROS
    schedule: Schedule | str | None = None

    @linen.compact
    def __call__(self, inputs: Any) -> jax.Array:
        inputs = jnp.asarray(inputs)
        shape = (check_count(self.features, "features", "SparseLinear"), inputs.shape[-1])
        format = check_format("SparseLinear", self.format)

        def places() -> dict[str, Any]:
            key = self.make_rng("params")
            return index_arrays(random_structure(key, shape, self.sparsity, format, "SparseLinear"))

        arrays = self.variable("structure", "index_arrays", places).value
        size = (arrays["column_indices"].shape[0], *format.block_shape)
        sizes = shape[1], shape[0]
        init = self.values_init or values_initializer(self.kernel_init, sizes, self.sparsity)
        values = self.param("values", init, size, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        inputs, values, bias = promote_dtype((inputs, values, bias), dtype=self.dtype)
        W = of_index_arrays(arrays, values, shape, format)
        return linear("SparseLinear", inputs, W, bias, self.schedule)

    @staticmethod
    def variables_from_dense(
        params: Any, sparsity: float | None = None, *, format: Format | str = CSR, mask: Any = None
    ) -> dict[str, Any]:
        """The variables of a SparseLinear with the largest weights of a `linen.Dense`, or with the
        weights that the mask of a `MaskedLinear` keeps.

        Args:
          params: of the dense layer: kernel [in_features, features] and perhaps bias, concrete. A
            bias in a box (`linen.with_partitioning`) stays in it, and so do values, with the name
            of the kernel's axis of outputs.
          sparsity, format: which weights to keep, see `sgap_jax.prune`; give the same ones to the
            layer.
          mask: bool [in_features, features], made of whole groups of `format`; without a sparsity
            all weights that it keeps are kept.

        Returns:
          {"params": {values, bias}, "structure": {index_arrays}}.

        Raises:
          ValueError: neither a sparsity nor a mask, a mask of another shape or of parts of groups,
            or traced arrays.
        """
        op = "SparseLinear.variables_from_dense"
        kernel = linen.meta.unbox(params["kernel"])
        W = pruned_weight(op, kernel, mask, sparsity, check_format(op, format))
        kept = {name: value for name, value in params.items() if name != "kernel"}
        structure = {"index_arrays": index_arrays(W)}
        values = boxed_values(params["kernel"], W.values, (1,), 2)
        return {"params": {**kept, "values": values}, "structure": structure}

    @staticmethod
    def set_weight(variables: Any, A: SparseArray) -> dict[str, Any]:
        """The variables of a SparseLinear with another weight [features, in_features] in the
        layer's format, copied, in the dtype of its values; boxes stay."""
        op = "SparseLinear.set_weight"
        check_sparse(op, "A", A)
        check_format(op, A.format)
        params, old = variables["params"], variables["structure"]["index_arrays"]
        held = linen.meta.unbox(params["values"])
        new = index_arrays(A)
        ends = [[x[name].shape for name in ("row_offsets", "column_offsets")] for x in (old, new)]
        if ends[0] != ends[1] or A.values.shape[1:] != held.shape[1:]:
            raise ValueError(
                f"{op}: A: expected the layer's shape and format, got {A.shape} in {A.format}"
            )
        values = linen.meta.replace_boxed(params["values"], jnp.array(A.values, held.dtype))
        arrays = {name: jnp.array(x) for name, x in new.items()}
        return {
            **variables,
            "params": {**params, "values": values},
            "structure": {**variables["structure"], "index_arrays": arrays},
        }


class MaskedLinear(linen.Module):
    """A dense linear layer whose weights a mask switches off: see `sgap_jax.nn.MaskedLinear`.

    Parameters `kernel` and `bias`, those of `linen.Dense`; variable `mask` of the collection
    "structure", which `prune_step` sets.
    """

    features: int
    format: Format | str = CSR
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = linen.initializers.lecun_normal()
    bias_init: Initializer = ZEROS

    @linen.compact
    def __call__(self, inputs: Any) -> jax.Array:
        check_format("MaskedLinear", self.format)
        inputs = jnp.asarray(inputs)
        shape = (inputs.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        mask = self.variable("structure", "mask", jnp.ones, shape, bool).value
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        kernel = jnp.where(mask, kernel, jnp.zeros((), kernel.dtype))
        inputs, kernel, bias = promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        return with_bias(jnp.matmul(inputs, kernel, precision=self.precision), bias)


def prune_step(
    variables: Any,
    sparsity: Any,
    *,
    format: Format | str = CSR,
    variable_axes: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """The variables of a model with a new mask for every `MaskedLinear`, each from its own
    magnitudes; see `sgap_jax.nn.prune_step`. Works under jit, where `sparsity` may be traced.
    Layers stacked by `linen.scan` or `linen.vmap` are pruned separately; parameters in boxes
    (`linen.with_partitioning`) stay in them.

    Args:
      variables: {"params": ..., "structure": ...}, of one layer or of a whole model.
      sparsity: share of the groups to drop, from 0 to 1.
      format: of the layers; it defines the groups.
      variable_axes: the axis along which layers are stacked, for each collection, as given to
        `linen.scan` or `linen.vmap` (nested ones must have the same axes). An axis None: that
        collection is not stacked. Default {"params": 0, "structure": 0}. A wrong axis is detected
        by shapes only: not in layers without a bias, or where sizes are equal.

    Raises:
      TypeError: `variable_axes` is no mapping of names of collections to integers or None.
      ValueError: no mask in `variables`, a sparsity out of range, `variable_axes` of other
        collections alone, or the shapes of a layer's variables are not those of layers stacked
        along these axes.
    """
    axes = _variable_axes(variable_axes)
    structure = flatten_dict(variables.get("structure", {}))
    params = flatten_dict(linen.meta.unbox(variables["params"]))
    masks = {}
    for path, mask in structure.items():
        kernel, bias = (params.get((*path[:-1], name)) for name in ("kernel", "bias"))
        if path[-1] == "mask" and kernel is not None:
            given = {"mask": mask.shape} | ({} if bias is None else {"bias": bias.shape})
            masks[path] = _stacked_masks("/".join(path[:-1]), kernel, given, sparsity, format, axes)
    if not masks:
        raise ValueError("prune_step: variables: expected the mask of a MaskedLinear, got none")
    return {**variables, "structure": unflatten_dict({**structure, **masks})}


def rigl_step(
    variables: Any, gradient_scores: Any, fraction: Any, *, format: Format | str = CSR
) -> tuple[dict[str, Any], Callable[[jax.Array], jax.Array]]:
    """(variables, moved): the variables of one `SparseLinear` after a step of RigL, and a function
    that maps an array with an element for each of its values, such as a moment of an optimizer; see
    `sgap_jax.nn.rigl_step`.

    Args:
      variables: {"params": {values, ...}, "structure": {index_arrays}} of the layer.
      gradient_scores: an array [features, in_features].
      fraction: share of the stored groups to move, from 0 to 1, may be traced.
      format: of the layer.
    """
    op, scores = "rigl_step", jnp.asarray(gradient_scores)
    params, arrays = variables["params"], variables["structure"]["index_arrays"]
    if scores.ndim != 2:
        raise ValueError(f"{op}: gradient_scores must have 2 dimensions, got {list(scores.shape)}")
    shape = (scores.shape[0], scores.shape[1])
    format = check_format(op, format)
    rows, columns = grid(shape, format)
    ends = [arrays[name].shape[0] - 1 for name in ("row_offsets", "column_offsets")]
    if ends != [rows, columns]:
        raise ValueError(
            f"{op}: gradient_scores: a weight {list(shape)} in {format} has {rows} x {columns} "
            f"groups, got a structure of {ends[0]} x {ends[1]}"
        )
    W = of_index_arrays(arrays, linen.meta.unbox(params["values"]), shape, format)
    W, moved = regrown(op, W, scores, fraction)
    params = {**params, "values": linen.meta.replace_boxed(params["values"], W.values)}
    return {**variables, "params": params, "structure": {"index_arrays": index_arrays(W)}}, moved


def _variable_axes(given: Any) -> dict[str, int | None]:
    """The axes of "params" and "structure", after checks; 0 where none is given."""
    if given is None:
        given = {}
    what = "prune_step: variable_axes"
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{what}: expected a mapping of collections to axes, got {type(given).__name__}"
        )
    odd = next((name for name in given if not isinstance(name, str)), None)
    if odd is not None:
        raise TypeError(f"{what}: expected names of collections, got the key {odd!r}")
    axes: dict[str, int | None] = {"params": 0, "structure": 0}
    if given and not any(name in given for name in axes):
        raise ValueError(f"{what}: expected 'params' or 'structure' in it, got {list(given)}")
    for name in axes:
        axis = given.get(name, 0)
        try:
            axes[name] = None if axis is None else operator.index(axis)
        except TypeError:
            raise TypeError(
                f"{what}: expected an integer or None for {name!r}, got {axis!r}"
            ) from None
        if axis not in (None, *range(-3, 3)):  # a stacked kernel has three axes
            raise ValueError(f"{what}: expected an integer in -3 .. 2 for {name!r}, got {axis}")
    return axes


def _stacked_masks(
    name: str,
    kernel: Any,
    given: dict,
    sparsity: Any,
    format: Format | str,
    axes: dict[str, int | None],
) -> jax.Array:
    """The new masks of a stacked kernel, stacked as the old mask is.

    The shapes `given` (of mask and bias) are checked, since the kernel's shape alone does not tell
    which of its axes is that of the layers.
    """
    if kernel.ndim == 2:
        axes = {"params": 0, "structure": 0}  # not stacked: the axes do not matter
    along, masks_along = axes["params"], axes["structure"]
    if along is None or masks_along is None:
        raise ValueError(
            f"prune_step: {name}: kernel: expected a matrix with variable_axes={axes}, got shape "
            f"{kernel.shape}; give the variable_axes of linen.scan or linen.vmap"
        )
    order = _layers_first(kernel.ndim, along)
    *layers, inputs, outputs = (kernel.shape[axis] for axis in order)
    expected = {
        "mask": _stacked([inputs, outputs], layers, masks_along),
        "bias": _stacked([outputs], layers, along),
    }
    for what, shape in given.items():
        if shape != expected[what]:
            raise ValueError(
                f"prune_step: {name}: {what}: expected shape {expected[what]} beside a kernel of "
                f"{kernel.shape} with variable_axes={axes}, got {shape}; give the "
                "variable_axes of linen.scan or linen.vmap"
            )
    masks = kernel_mask(jnp.transpose(kernel, order), sparsity, format)
    order = _layers_first(masks.ndim, masks_along)
    return jnp.transpose(masks, sorted(range(masks.ndim), key=order.__getitem__))  # the inverse


def _layers_first(ndim: int, axis: int) -> list[int]:
    """The permutation of a stacked kernel's axes that puts those of layers first.

    Each stacking transformation inserted its axis at `axis`, the outermost transformation last.
    """
    left = list(range(ndim))
    return [left.pop(axis) for _ in range(ndim - 2)] + left


def _stacked(shape: list[int], layers: list[int], axis: int) -> tuple[int, ...]:
    for size in reversed(layers):
        shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, size)
    return tuple(shape)
