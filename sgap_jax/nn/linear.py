"""A linear layer whose weight is a sparse matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import is_traced
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.formats.prune import prune
from sgap_jax.formats.vectors import grid, tile
from sgap_jax.nn.structure import (
    check_format,
    of_index_arrays,
    random_structure,
    stored_arrays,
    structure_of,
)
from sgap_jax.primitives._define import check_schedule, check_sparse
from sgap_jax.primitives.spmm import spmm
from sgap_jax.schedules import Schedule

ZEROS = nnx.initializers.zeros_init()
NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class SparseLinear(nnx.Module):
    """A linear layer with a sparse weight, the counterpart of `nnx.Linear`.

        y = x W^T + b,   W [out_features, in_features] sparse, x [..., in_features]

    W's stored entries are the parameter `values` ([nnz], [vectors, V] for CVS(V), [blocks, r, c]
    for BCSR(r, c)). Their places are state of the type `Structure`: saved with the layer and not
    trained. The product is an `spmm`, the gradient in `values` an `sddmm`: training makes no array
    of W's dense size.

    A new layer has its entries at random places. To prune a trained layer see `from_dense`, and to
    prune while training `MaskedLinear`. A checkpoint can be restored into any new layer of the same
    shape, sparsity and format, which then has the checkpoint's places.

    Args:
      in_features: size of the last axis of x.
      out_features: size of the last axis of y.
      sparsity: share of the entries (vectors, blocks) that are not stored, from 0 to 1.
      format: of W: CSR, CVS(V), whose vectors are V consecutive outputs of one input, or
        BCSR(r, c), whose blocks are r consecutive outputs of c consecutive inputs.
      use_bias, dtype, param_dtype, bias_init, promote_dtype: as in `nnx.Linear`.
      values_init: initializer, called with the shape of the values; None is LeCun's normal
        distribution for the (1 - sparsity) in_features inputs that an output has on average.
      schedule: of the product; None lets `choose_schedule` pick.
      rngs: of the places and the values (stream `params`).
      values_metadata, bias_metadata: of the parameters, a sharding for example.

    Returns (called with x): y [..., out_features] in `dtype`, or if that is None in the promoted
    dtype of x and the parameters. Sums are carried in float32 at least and rounded once before the
    bias.

    Raises:
      ValueError: sparsity is out of range, or x has another last axis than in_features.
      NotImplementedError: another format.

    Source: Gale et al., SC20 (sparse weights in deep learning); vectorSparse, sections 7 (CVS) and
    8 (blocks).
    """

    values: nnx.Param
    bias: nnx.Param | None
    watched: nnx.Variable | None = None  # of `dense_gradients`

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sparsity: float,
        format: Format | str = CSR,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        values_init: Initializer | None = None,
        bias_init: Initializer = ZEROS,
        promote_dtype: PromoteDtypeFn = flax_promote_dtype,
        schedule: Schedule | str | None = None,
        rngs: nnx.Rngs,
        values_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        schedule = check_schedule("SparseLinear", schedule)
        format = check_format("SparseLinear", format)
        shape = (out_features, in_features)
        # Random keys are drawn in the order of nnx.Linear: values, bias; then the places.
        value_key = rngs.params()
        bias = bias_init(rngs.params(), (out_features,), param_dtype) if use_bias else None
        W = random_structure(rngs.params(), shape, sparsity, format, "SparseLinear")
        init = values_init or scaled_normal(in_features, sparsity)
        # An initializer may wrap what it returns in metadata, a sharding for example.
        values = init(value_key, W.values.shape, param_dtype)
        self._store(W, values, bias, values_metadata, bias_metadata)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.schedule = schedule

    def _store(
        self,
        W: SparseArray,
        values: Any,
        bias: Any,
        values_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        self.out_features, self.in_features = W.shape
        self.use_bias = bias is not None
        self.format = W.format
        self.values = nnx.Param(values, **values_metadata)
        self.structure = structure_of(W)
        self.bias = nnx.data(None) if bias is None else nnx.Param(bias, **bias_metadata)

    @classmethod
    def from_dense(
        cls, layer: nnx.Linear, sparsity: float | None = None, *, format: Format | str | None = None
    ) -> SparseLinear:
        """A layer with the largest weights of a trained dense one, see `sgap_jax.prune`.

        From a `MaskedLinear` without a sparsity it keeps the weights that the mask keeps. Bias
        (with its metadata) and dtypes are those of `layer`; the parameters are copies.

        Args:
          layer: `nnx.Linear` with concrete parameters (kernel [in_features, out_features]).
          sparsity: share of the entries (vectors, blocks) to drop.
          format: CSR, CVS(V) or BCSR(r, c); None is the MaskedLinear's, or CSR.

        Raises:
          TypeError: layer is not an `nnx.Linear`.
          ValueError: no sparsity for a layer without a mask, one out of range, traced parameters,
            or a mask that keeps parts of the format's groups.
        """
        op = "SparseLinear.from_dense"
        if not isinstance(layer, nnx.Linear):
            raise TypeError(f"{op}: layer must be an nnx.Linear, got {type(layer).__name__}")
        mask, own = getattr(layer, "mask", None), getattr(layer, "format", CSR)
        format = check_format(op, own if format is None else format)
        given = None if mask is None else mask[...]
        pruned = pruned_weight(op, layer.kernel[...], given, sparsity, format)
        bias = None if layer.bias is None else layer.bias[...]
        promote = layer.promote_dtype
        made = cls.from_weight(pruned, bias, dtype=layer.dtype, promote_dtype=promote)
        if made.bias is not None and layer.bias is not None:
            made.bias.set_metadata(**layer.bias.get_metadata())
        return made

    @classmethod
    def from_weight(
        cls,
        W: SparseArray,
        bias: Any = None,
        *,
        dtype: Dtype | None = None,
        promote_dtype: PromoteDtypeFn = flax_promote_dtype,
        schedule: Schedule | str | None = None,
    ) -> SparseLinear:
        """A layer with this weight [out_features, in_features] in CSR, CVS(V) or BCSR(r, c), and
        this bias [out_features] or none; all arrays are copied."""
        op = "SparseLinear.from_weight"
        check_sparse(op, "W", W)
        check_format(op, W.format)
        schedule = check_schedule(op, schedule)
        if bias is not None and jnp.shape(bias) != W.shape[:1]:
            raise ValueError(f"{op}: bias must have shape [{W.shape[0]}], got {jnp.shape(bias)}")
        made = cls(
            1,
            1,
            sparsity=1,
            dtype=dtype,
            param_dtype=W.dtype,
            promote_dtype=promote_dtype,
            schedule=schedule,
            rngs=nnx.Rngs(0),
        )
        made._store(W, jnp.array(W.values), None if bias is None else jnp.array(bias))
        return made

    @property
    def weight(self) -> SparseArray:
        """W as a SparseArray: the parameter and the structure, not copied."""
        return of_index_arrays(
            stored_arrays(self.structure), self.values[...], self._shape, self.format
        )

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def to_dense(self, *, rngs: nnx.Rngs | None = None) -> nnx.Linear:
        """An `nnx.Linear` with the same weights, and zeros where none is stored."""
        dense = nnx.Linear(
            *reversed(self._shape),
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            promote_dtype=self.promote_dtype,
            rngs=rngs or nnx.Rngs(0),
        )
        dense.kernel[...] = self.weight.todense().T
        if dense.bias is not None and self.bias is not None:
            dense.bias[...] = self.bias[...]
        return dense

    def __call__(self, inputs: Any) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        inputs, values, bias = self.promote_dtype(
            (inputs, self.values[...], bias), dtype=self.dtype
        )
        W = of_index_arrays(stored_arrays(self.structure), values, self._shape, self.format)
        outputs = linear("SparseLinear", inputs, W, bias, self.schedule)
        if self.watched is not None:
            outputs += zero_product(inputs, self.watched[...])
        return outputs


@jax.custom_vjp
def zero_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x weight^T of a dense weight of zeros, of which only the gradient is computed."""
    return jnp.zeros((*x.shape[:-1], weight.shape[0]), x.dtype)


def _zero_product_forward(x: Any, weight: Any) -> tuple[jax.Array, tuple]:
    return zero_product(x, weight), (x, weight)


def _zero_product_backward(saved: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    axes = tuple(range(x.ndim - 1))
    gradient = jnp.tensordot(cotangent, x, (axes, axes)).astype(weight.dtype)
    return zero_product(cotangent, weight.T), gradient


zero_product.defvjp(_zero_product_forward, _zero_product_backward)


def pruned_weight(
    op: str, kernel: Any, mask: Any, sparsity: float | None, format: Format
) -> SparseArray:
    """K^T [out_features, in_features], pruned to a sparsity, or to the entries of a mask."""
    if is_traced(kernel, mask):
        raise ValueError(f"{op}: expected concrete parameters, got tracers; call it outside jit")
    if sparsity is None and mask is None:
        raise ValueError(f"{op}: sparsity: expected a number from 0 to 1 without a mask, got None")
    W = np.asarray(kernel).T
    kept = np.ones(W.shape, bool) if mask is None else np.asarray(mask).T
    if kept.shape != W.shape or kept.dtype != bool:
        raise ValueError(
            f"{op}: mask must be bool of shape {list(W.shape[::-1])}, got "
            f"{list(kept.shape[::-1])} of {kept.dtype}"
        )
    if sparsity is not None:
        return prune(np.where(kept, W, np.zeros((), W.dtype)), format, sparsity=sparsity)
    (height, width), (down, across) = tile(format), grid(W.shape, format)
    padded = np.pad(kept, ((0, down * height - W.shape[0]), (0, across * width - W.shape[1])))
    groups = padded.reshape(down, height, across, width).any((1, 3))
    whole = np.repeat(np.repeat(groups, height, 0), width, 1)[: W.shape[0], : W.shape[1]]
    if (whole != kept).any():
        raise ValueError(
            f"{op}: mask: expected whole groups of {format}, got parts of some, which zeros would "
            "fill up; CSR keeps entries"
        )
    places = np.argwhere(kept)
    return SparseArray.from_coordinates(places, W[kept], W.shape, format=format)


def scaled_normal(in_features: int, sparsity: float) -> Initializer:
    """LeCun's normal initializer, of variance 1 / fan_in with fan_in = (1 - sparsity) in_features,
    the mean number of inputs of an output."""
    fan_in = max((1 - sparsity) * in_features, 1.0)

    def init(key: Any, shape: Any, dtype: Any, out_sharding: Any = None) -> jax.Array:
        # The standard deviation of a normal distribution truncated to [-2, 2].
        scale = 1 / math.sqrt(fan_in) / 0.87962566103423978
        normal = jax.random.truncated_normal(key, -2, 2, shape, dtype)
        return normal * jnp.asarray(scale, dtype)

    return init


def linear(
    op: str, x: jax.Array, W: SparseArray, bias: jax.Array | None, schedule: Schedule | str | None
) -> jax.Array:
    """x W^T + b over the last axis of x, in one product for all leading axes."""
    if x.ndim < 1 or x.shape[-1] != W.shape[1]:
        raise ValueError(f"{op}: inputs must have shape [..., {W.shape[1]}], got {list(x.shape)}")
    columns = x.reshape(math.prod(x.shape[:-1]), W.shape[1]).T
    y = spmm(W, columns, schedule=schedule).T.reshape(*x.shape[:-1], W.shape[0])
    return with_bias(y, bias)


def with_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))
