"""Sparse counterparts of Flax's layers with a kernel of several axes: `LinearGeneral`, `Einsum` and
`Conv`, each a product with a sparse matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Initializer

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import is_traced
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.nn.contraction import Contraction, patches
from sgap_jax.nn.linear import (
    LECUN,
    NO_METADATA,
    PRUNED_FURTHER,
    ZEROS,
    SparseWeight,
    copy_metadata,
    pruned_weight,
    resharded,
)
from sgap_jax.nn.structure import check_blocks, check_format, on_diagonal
from sgap_jax.primitives._define import check_schedule
from sgap_jax.schedules import Schedule


class _SparseContraction(SparseWeight):
    """What the layers below share: arguments of the dense layer, and those of the sparse weight."""

    _dense: ClassVar[Any]  # the class of the dense layer
    _arguments: ClassVar[tuple[str, ...]]
    # Some of the arguments, as the dense layer has them.
    in_features: Any
    kernel_size: tuple[int, ...]
    strides: Any
    padding: Any
    input_dilation: Any
    kernel_dilation: Any
    feature_group_count: int

    def __init__(
        self,
        *args: Any,
        sparsity: float,
        format: Format | str = CSR,
        kernel_init: Initializer = LECUN,
        values_init: Initializer | None = None,
        bias_init: Initializer = ZEROS,
        schedule: Schedule | str | None = None,
        rngs: nnx.Rngs,
        values_metadata: Mapping[str, Any] = NO_METADATA,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        **options: Any,
    ) -> None:
        self.schedule = check_schedule(type(self).__name__, schedule)
        self._check_arguments(*args, **options)
        layer: Any = nnx.eval_shape(lambda: self._dense(*args, **options, rngs=nnx.Rngs(0)))
        self._take_arguments(layer)
        contraction = self._contraction()
        self._initialize(
            contraction.stacked_shape,
            self.bias_shape,
            sparsity=sparsity,
            format=format,
            kernel_init=kernel_init,
            values_init=values_init,
            bias_init=bias_init,
            rngs=rngs,
            values_metadata=values_metadata,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            outer=self._outer,
            kernel_ndim=len(self.kernel_shape),
        )

    def _check_arguments(self, *args: Any, **options: Any) -> None:
        """Refuses what the dense layer takes and the sparse one does not."""

    def _take_arguments(self, layer: Any) -> None:
        for name in self._arguments:
            setattr(self, name, getattr(layer, name))
        self.kernel_shape = tuple(layer.kernel.shape)
        self.bias_shape = None if layer.bias is None else tuple(layer.bias.shape)
        self.blocks = self._contraction().blocks

    @staticmethod
    def _contraction_of(layer: Any, kernel_shape: tuple[int, ...], ndim: int | None) -> Contraction:
        """Of a dense or sparse layer, for inputs of `ndim` dimensions; None is of what does not
        depend on them."""
        raise NotImplementedError

    def _contraction(self, ndim: int | None = None) -> Contraction:
        return self._contraction_of(self, self.kernel_shape, ndim)

    @property
    def _outer(self) -> list[int]:
        """The axes of the dense kernel that are axes of the outputs."""
        contraction = self._contraction()
        return [i for i, k in enumerate(contraction.kernel) if k in contraction.outputs]

    def _inputs(self, inputs: jax.Array) -> jax.Array:
        return inputs

    def _outputs(self, outputs: jax.Array) -> jax.Array:
        return outputs

    @classmethod
    def from_dense(cls, layer: Any, sparsity: float, *, format: Format | str = CSR) -> Self:
        """A layer with the largest weights of a trained dense one, see `sgap_jax.prune`: of its
        kernel as a matrix [outputs, inputs]. Parameters are copies, with their metadata.

        Raises TypeError for another layer, ValueError for traced parameters, a sparsity out of
        range, and vectors or blocks of `format` that do not divide the weight's diagonal blocks.
        """
        op = f"{cls.__name__}.from_dense"
        if not isinstance(layer, cls._dense):
            what = type(layer).__name__
            if isinstance(layer, SparseWeight):
                what += f"; {PRUNED_FURTHER}"
            raise TypeError(f"{op}: layer must be an nnx.{cls._dense.__name__}, got {what}")
        format = check_format(op, format)
        stacked = cls.stacked_kernel(op, layer)
        check_blocks(op, stacked.shape, format, cls.diagonal_blocks(layer))
        return cls.of_stacked(layer, pruned_weight(op, stacked.T, None, sparsity, format))

    @classmethod
    def stacked_kernel(cls, op: str, layer: Any) -> Any:
        """The kernel as a matrix, its diagonal blocks one below the other."""
        kernel = layer.kernel[...]
        if getattr(layer, "mask", None) is not None:
            raise NotImplementedError(
                f"{op}: mask: none here; the nearest is a kernel times its mask"
            )
        kernel = kernel if is_traced(kernel) else np.asarray(kernel)
        return cls._contraction_of(layer, kernel.shape, None).stacked(kernel)

    @classmethod
    def diagonal_blocks(cls, layer: Any) -> int:
        """How many blocks the matrix of a dense layer's kernel has on its diagonal."""
        return cls._contraction_of(layer, layer.kernel.shape, None).blocks

    @classmethod
    def _empty(cls, layer: Any) -> Self:
        """A layer with the arguments of a dense one, and no entries."""
        given = {name: getattr(layer, name) for name in cls._arguments}
        return cls(**given, sparsity=1.0, rngs=nnx.Rngs(0))

    @classmethod
    def of_stacked(cls, layer: Any, stacked: SparseArray) -> Self:
        """A layer with the arguments and the bias of a dense one, and the weight whose diagonal
        blocks lie one below the other in `stacked`."""
        made = cls._empty(layer)
        bias = None if layer.bias is None else jnp.array(layer.bias[...])
        made._store(on_diagonal(cls.__name__, stacked, made.blocks), stacked.values, bias)
        copy_metadata(layer, made, made._outer)
        return made

    def to_dense(self, *, rngs: nnx.Rngs | None = None) -> Any:
        """The dense layer with the same weights, and zeros where none is stored."""
        given = {name: getattr(self, name) for name in self._arguments}
        dense: Any = self._dense(**given, rngs=rngs or nnx.Rngs(0))
        contraction = self._contraction()
        W, (rows, columns) = self.weight.todense(), contraction.stacked_shape
        of_blocks = W.reshape(self.blocks, rows // self.blocks, self.blocks, columns)
        diagonal = np.arange(self.blocks)
        stacked = of_blocks[diagonal, :, diagonal].reshape(rows, columns)
        dense.kernel[...] = contraction.kernel_of(stacked).reshape(self.kernel_shape)
        if self.bias is not None:
            dense.bias[...] = self.bias[...]
        return dense

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        op = type(self).__name__
        bias = None if self.bias is None else self.bias[...]
        inputs, values, bias = self.promote_dtype(
            (inputs, self.values[...], bias), dtype=self.dtype
        )
        inputs = self._inputs(jnp.asarray(inputs))
        contraction = self._contraction(inputs.ndim)
        outputs = contraction.apply(op, inputs, lambda z: self._product(z, values))
        if bias is not None:
            outputs += contraction.broadcast_bias(op, bias, inputs.ndim)
        return resharded(self._outputs(outputs), out_sharding)


class SparseLinearGeneral(_SparseContraction):
    """A linear layer over any axes with a sparse weight, the counterpart of `nnx.LinearGeneral`.

        y[b, ..., o] = sum_i x[b, ..., i] K[b, i, o] + bias[b, o]

    i runs over `axis` together, o over `out_features`, b over `batch_axis`. K is stored as a sparse
    matrix of (b, o) x (b, i), block-diagonal where there are batch axes.

    Args: those of `nnx.LinearGeneral`, but for `precision`, `dot_general` and such; `sparsity`,
    `format`, `values_init`, `schedule`, `values_metadata` as of `SparseLinear`.

    Errors, dtypes and accumulation as of `SparseLinear`. Source: Gale et al., SC20.
    """

    _dense = nnx.LinearGeneral
    _arguments = (
        *("in_features", "out_features", "axis", "batch_axis", "use_bias"),
        *("dtype", "param_dtype", "promote_dtype"),
    )

    @staticmethod
    def _contraction_of(layer: Any, kernel_shape: tuple[int, ...], ndim: int | None) -> Contraction:
        axes = (*layer.axis, *layer.batch_axis)
        least = len(axes) + max(map(abs, axes), default=0) + 1
        ndim = least if ndim is None else ndim
        return Contraction.of_axes(ndim, layer.axis, layer.batch_axis, kernel_shape)


class SparseEinsum(_SparseContraction):
    """An einsum with a sparse weight, the counterpart of `nnx.Einsum`::

        nn.SparseEinsum("nta,hab->nthb", (8, 2, 4), (8, 4), sparsity=0.5, rngs=nnx.Rngs(0))

    The kernel is stored as a sparse matrix of (blocks, outer) x (blocks, inner) axes: those also of
    inputs and outputs, of outputs alone, of inputs alone.

    Args: those of `nnx.Einsum` (the text is given here, not in the call), but for `precision`,
    `einsum_op` and such; `sparsity`, `format`, `values_init`, `schedule`, `values_metadata` as of
    `SparseLinear`. NotImplementedError for a text in which a letter repeats within an operand, or
    is the kernel's alone.

    Errors, dtypes and accumulation as of `SparseLinear`. Source: Gale et al., SC20.
    """

    _dense = nnx.Einsum
    _arguments = (
        *("einsum_str", "kernel_shape", "bias_shape"),
        *("dtype", "param_dtype", "promote_dtype"),
    )

    def _check_arguments(self, *args: Any, **options: Any) -> None:
        text = args[0] if args else options.get("einsum_str", "")
        if not isinstance(text, str):
            raise NotImplementedError(
                f"SparseEinsum: einsum_str: expected its text with the layer, got {text!r}"
            )

    @staticmethod
    def _contraction_of(layer: Any, kernel_shape: tuple[int, ...], ndim: int | None) -> Contraction:
        if layer.einsum_str is None:
            raise NotImplementedError("SparseEinsum: einsum_str: expected with the layer, got None")
        return Contraction.of_text("SparseEinsum", layer.einsum_str, kernel_shape)


class SparseConv(_SparseContraction):
    """A convolution with a sparse weight, the counterpart of `nnx.Conv`: y = patches(x) W^T + b.

    W [out_features, window in_features] is a sparse matrix, block-diagonal with feature groups. A
    patch is copied for each output, `[..., *spatial, *kernel_size, in_features]`: the layer pays
    for itself where few weights are stored.

    Args: those of `nnx.Conv`, but for `mask`, `precision`, `conv_general_dilated` and such;
    `sparsity`, `format`, `values_init`, `schedule`, `values_metadata` as of `SparseLinear`. Vectors
    of CVS(V) are V consecutive output features of one place of the window.

    Errors, dtypes and accumulation as of `SparseLinear`. Source: Elsen et al., Fast Sparse ConvNets
    (2019).
    """

    _dense = nnx.Conv
    _arguments = (
        *("in_features", "out_features", "kernel_size", "strides", "padding", "input_dilation"),
        *("kernel_dilation", "feature_group_count", "use_bias"),
        *("dtype", "param_dtype", "promote_dtype"),
    )

    @staticmethod
    def _contraction_of(layer: Any, kernel_shape: tuple[int, ...], ndim: int | None) -> Contraction:
        *window, inputs, outputs = kernel_shape
        groups, letters = layer.feature_group_count, "abcdefgh"[: len(window)]
        text = f"...{letters}xi,{letters}ixo->...xo"
        shape = (*window, inputs, groups, outputs // groups)
        return Contraction.of_text("SparseConv", text, shape)

    @property
    def _outer(self) -> list[int]:
        return [len(self.kernel_shape) - 1]

    def _inputs(self, inputs: jax.Array) -> jax.Array:
        if inputs.ndim < 1 or inputs.shape[-1] != self.in_features:
            raise ValueError(
                f"SparseConv: inputs must have shape [..., {self.in_features}], got "
                f"{list(inputs.shape)}"
            )
        found = patches(
            "SparseConv",
            inputs,
            self.kernel_size,
            strides=self.strides,
            padding=self.padding,
            input_dilation=self.input_dilation,
            kernel_dilation=self.kernel_dilation,
        )
        groups = self.feature_group_count
        return found.reshape(*found.shape[:-1], groups, self.in_features // groups)

    def _outputs(self, outputs: jax.Array) -> jax.Array:
        return outputs.reshape(*outputs.shape[:-2], math.prod(outputs.shape[-2:]))
