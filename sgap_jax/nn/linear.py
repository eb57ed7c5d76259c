"""A linear layer whose weight is a sparse matrix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from flax.nnx import reprlib
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_concrete, check_count, is_traced
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.formats.prune import prune
from sgap_jax.formats.structure import concrete
from sgap_jax.formats.vectors import grid, tile
from sgap_jax.nn.structure import (
    check_format,
    index_arrays,
    of_index_arrays,
    random_structure,
    stored_arrays,
    structure_of,
    with_room,
)
from sgap_jax.primitives._define import check_schedule, check_sparse
from sgap_jax.primitives.spmm import spmm
from sgap_jax.primitives.zero_product import of_rows, zero_product
from sgap_jax.schedules import Schedule

ZEROS = nnx.initializers.zeros_init()
LECUN = nnx.initializers.lecun_normal()
# Ends messages about layers that are sparse already.
PRUNED_FURTHER = (
    "a sparse layer is pruned further by layer.set_weight(prune(layer.weight.todense(), "
    "layer.format, sparsity=...)), and to_dense() gives the dense one"
)
NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class SparseWeight(nnx.Module):
    """What layers with a sparse weight have in common: the parameter `values`, the structure, a
    bias perhaps, and products with the weight [outputs, inputs]."""

    values: nnx.Param
    bias: nnx.Param | None
    dtype: Any
    param_dtype: Any
    promote_dtype: Any
    schedule: Schedule | None
    watched: nnx.Variable | None = None  # of `dense_gradients`
    blocks = 1  # on the diagonal of the weight, where it is made of several

    def _initialize(
        self,
        shape: tuple[int, int],
        bias_shape: tuple[int, ...] | None,
        *,
        sparsity: float,
        format: Format | str,
        kernel_init: Initializer,
        values_init: Initializer | None,
        bias_init: Initializer,
        rngs: nnx.Rngs,
        values_metadata: Mapping[str, Any],
        kernel_metadata: Mapping[str, Any],
        bias_metadata: Mapping[str, Any],
        outer: Sequence[int] = (1,),
        kernel_ndim: int = 2,
    ) -> None:
        """A new weight at random places, of blocks of `shape` one below the other. `outer` are the
        axes of outputs of the dense kernel."""
        op = type(self).__name__
        format = check_format(op, format)
        # Random keys are drawn in the order of nnx.Linear: values, bias; then the places.
        value_key = rngs.params()
        bias = (
            None if bias_shape is None else bias_init(rngs.params(), bias_shape, self.param_dtype)
        )
        W = random_structure(rngs.params(), shape, sparsity, format, op, self.blocks)
        sizes = shape[1], shape[0] // self.blocks
        init = values_init or values_initializer(kernel_init, sizes, sparsity, outer, kernel_ndim)
        # An initializer may wrap what it returns in metadata, a sharding for example.
        values = init(value_key, W.values.shape, self.param_dtype)
        block = len(format.block_shape)
        of_kernel = metadata_of_values(kernel_metadata, outer, kernel_ndim, block)
        self._store(W, values, bias, {**of_kernel, **values_metadata}, bias_metadata)

    def _store(
        self,
        W: SparseArray,
        values: Any,
        bias: Any,
        values_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        self.weight_shape = (W.shape[0], W.shape[1])
        self.use_bias = bias is not None
        self.format = W.format
        self.values = nnx.Param(values, **values_metadata)
        self.structure = structure_of(W)
        self.bias = nnx.data(None) if bias is None else nnx.Param(bias, **bias_metadata)

    @property
    def weight(self) -> SparseArray:
        """W as a SparseArray: the parameter and the structure, not copied."""
        return self._with(self.values[...])

    def set_weight(self, A: SparseArray) -> None:
        """Replaces the weight, values and places, in place::

            layer.set_weight(sgap_jax.prune(W, layer.format, sparsity=0.95))

        Args:
          A: sparse [outputs, inputs] as `weight`, of any format and number of entries: converted to
            the layer's format and the dtype of its values, and copied. With another number of
            entries an optimizer has to be made anew.

        Raises:
          TypeError: A is not a SparseArray. ValueError: another shape, or, of a weight of several
            blocks on the diagonal, entries outside of them, or a traced A.
        """
        op = f"{type(self).__name__}.set_weight"
        check_sparse(op, "A", A)
        if A.shape != self.weight_shape:
            raise ValueError(f"{op}: A: expected shape {self.weight_shape}, got {A.shape}")
        if self.blocks > 1:
            self._check_diagonal(op, A)
        A = with_room(A.asformat(self.format))
        values = jnp.array(A.values, self.values.dtype)
        self.values.set_value(values)
        for name, array in index_arrays(A).items():
            self.structure[name].set_value(jnp.array(array))

    def _check_diagonal(self, op: str, A: SparseArray) -> None:
        check_concrete(
            A.index_arrays,
            "A",
            op,
            f"set it outside jit, where its entries are seen to be in the {self.blocks} blocks",
        )
        with concrete():
            coordinates = [np.asarray(x) for x in A.coordinates()]
        inside = coordinates[0] < A.shape[0]
        row, column = (
            x[inside] // (size // self.blocks) for x, size in zip(coordinates, A.shape, strict=True)
        )
        if (row != column).any():
            raise ValueError(
                f"{op}: A: expected entries in the {self.blocks} blocks on the diagonal"
            )

    def _with(self, values: Any) -> SparseArray:
        return of_index_arrays(
            stored_arrays(self.structure), values, self.weight_shape, self.format
        )

    def _product(self, inputs: jax.Array, values: jax.Array) -> jax.Array:
        """inputs W^T, over the last axis of the inputs."""
        op = type(self).__name__
        outputs = linear(op, inputs, self._with(values), None, self.schedule)
        if self.watched is not None:
            outputs += zero_product(inputs, self.watched[...])
        return outputs

    def __nnx_repr__(self) -> Iterator[Any]:
        """The weight in a line, in place of its arrays."""
        for item in super().__nnx_repr__():
            key = getattr(item, "key", None)
            if key == "values":
                held = {name: self.structure[name].get_value() for name in self.structure}
                W = of_index_arrays(held, self.values.get_value(), self.weight_shape, self.format)
                yield reprlib.Attr("weight", repr(W), use_raw_value=True)
            elif key != "structure":
                yield item


class SparseLinear(SparseWeight):
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
      kernel_init: initializer as of `nnx.Linear`, called with the shape (inputs that an output has,
        outputs that an input has) on average, as often as it takes to fill the values: its fans
        are those of the sparse weight.
      values_init: in place of kernel_init, an initializer that is called with the shape of the
        values.
      schedule: of the product; None lets `choose_schedule` pick.
      rngs: of the places and the values (stream `params`).
      kernel_metadata: as of `nnx.Linear`; of a sharding by names of the kernel's axes (inputs,
        outputs), also one that `nnx.with_partitioning` adds to kernel_init, the values have that of
        the outputs along their first axis.
      values_metadata, bias_metadata: of the parameters, a sharding of their own axes for example.

    Returns (called with x): y [..., out_features] in `dtype`, or if that is None in the promoted
    dtype of x and the parameters. Sums are carried in float32 at least and rounded once before the
    bias.

    Raises:
      ValueError: a negative size, sparsity is out of range, or x has another last axis than
        in_features. TypeError: a size that is no integer.
      NotImplementedError: another format.

    Source: Gale et al., SC20 (sparse weights in deep learning); vectorSparse, sections 7 (CVS) and
    8 (blocks).
    """

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
        kernel_init: Initializer = LECUN,
        values_init: Initializer | None = None,
        bias_init: Initializer = ZEROS,
        promote_dtype: PromoteDtypeFn = flax_promote_dtype,
        schedule: Schedule | str | None = None,
        rngs: nnx.Rngs,
        values_metadata: Mapping[str, Any] = NO_METADATA,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        self.schedule = check_schedule("SparseLinear", schedule)
        in_features = check_count(in_features, "in_features", "SparseLinear")
        out_features = check_count(out_features, "out_features", "SparseLinear")
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self._initialize(
            (out_features, in_features),
            (out_features,) if use_bias else None,
            sparsity=sparsity,
            format=format,
            kernel_init=kernel_init,
            values_init=values_init,
            bias_init=bias_init,
            rngs=rngs,
            values_metadata=values_metadata,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )

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
            what = type(layer).__name__
            if isinstance(layer, SparseWeight):
                what += f"; {PRUNED_FURTHER}"
            raise TypeError(f"{op}: layer must be an nnx.Linear, got {what}")
        mask, own = getattr(layer, "mask", None), getattr(layer, "format", CSR)
        format = check_format(op, own if format is None else format)
        given = None if mask is None else mask[...]
        return cls.of_stacked(layer, pruned_weight(op, layer.kernel[...], given, sparsity, format))

    @classmethod
    def of_stacked(cls, layer: nnx.Linear, W: SparseArray) -> SparseLinear:
        """A layer with this weight, and the bias and dtypes of a dense one."""
        bias = None if layer.bias is None else layer.bias[...]
        promote = layer.promote_dtype
        made = cls.from_weight(W, bias, dtype=layer.dtype, promote_dtype=promote)
        copy_metadata(layer, made, outer=(1,))
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
        made.out_features, made.in_features = W.shape
        made._store(W, jnp.array(W.values), None if bias is None else jnp.array(bias))
        return made

    def to_dense(self, *, rngs: nnx.Rngs | None = None) -> nnx.Linear:
        """An `nnx.Linear` with the same weights, and zeros where none is stored."""
        dense = nnx.Linear(
            *reversed(self.weight_shape),
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

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        inputs, values, bias = self.promote_dtype(
            (inputs, self.values[...], bias), dtype=self.dtype
        )
        return resharded(with_bias(self._product(inputs, values), bias), out_sharding)


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
        kept_values = np.where(kept, W, np.zeros((), W.dtype))
        return with_room(prune(kept_values, format, sparsity=sparsity))
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
    return with_room(SparseArray.from_coordinates(places, W[kept], W.shape, format=format))


def values_initializer(
    kernel_init: Initializer,
    sizes: tuple[int, int],
    sparsity: float,
    outer: Sequence[int] = (1,),
    kernel_ndim: int = 2,
) -> Initializer:
    """The initializer of stored values, from that of a kernel of `sizes` (inputs, outputs). Axes of
    the kernel that its metadata names: `outer`, of `kernel_ndim`, are those of outputs."""
    fans = tuple(max(round((1 - sparsity) * size), 1) for size in sizes)

    def init(key: Any, shape: Any, dtype: Any) -> Any:
        boxes: list[Any] = []

        def draw(key: Any) -> jax.Array:
            made: Any = kernel_init(key, fans, dtype)
            boxes.append(made)
            boxed = isinstance(made, nnx.VariableMetadata)
            return jnp.asarray(made.raw_value if boxed else meta.unbox(made))

        count = -(-math.prod(shape) // math.prod(fans))
        keys = jax.random.split(key, max(count, 1))
        values = jax.vmap(draw)(keys).reshape(-1)[: math.prod(shape)].reshape(shape)
        return boxed_values(boxes[0], values, outer, kernel_ndim)

    return init


def boxed_values(kernel: Any, values: Any, outer: Sequence[int], kernel_ndim: int) -> Any:
    """The values in such a box as the kernel is in, if it is, with names of their axes."""
    block = values.ndim - 1
    if isinstance(kernel, nnx.VariableMetadata):
        names = metadata_of_values(kernel.metadata, outer, kernel_ndim, block)
        return dataclasses.replace(kernel, raw_value=values, metadata=names)
    box = meta.replace_boxed(kernel, values)
    if isinstance(box, meta.Partitioned):
        names = metadata_of_values({"sharding": box.names}, outer, kernel_ndim, block)
        box = box.replace(names=names["sharding"])
    return box


def metadata_of_values(
    metadata: Mapping[str, Any], outer: Sequence[int], kernel_ndim: int, block: int
) -> dict[str, Any]:
    """The metadata of a kernel for its stored values: of names of the kernel's axes, the first of
    the axes of outputs `outer` is that of the values' first axis."""
    found = dict(metadata)
    for key in ("out_sharding", "sharding", "sharding_names"):
        names = found.get(key)
        if isinstance(names, (tuple, list, jax.sharding.PartitionSpec)):
            padded = [*names, *[None] * kernel_ndim]
            own = next((padded[axis] for axis in outer if padded[axis] is not None), None)
            found[key] = type(names)(*_unpacked(names, [own, *[None] * block]))
    return found


def _unpacked(names: Any, new: list[Any]) -> list[Any]:
    """Arguments of the type of `names` for these."""
    return new if isinstance(names, jax.sharding.PartitionSpec) else [new]


def copy_metadata(layer: Any, made: SparseWeight, outer: Sequence[int]) -> None:
    """Gives the parameters of a layer made of a dense one that one's metadata."""
    kernel = layer.kernel
    block = len(made.format.block_shape)
    found = metadata_of_values(kernel.get_metadata(), outer, kernel.ndim, block)
    made.values.set_metadata(**found)
    if made.bias is not None and layer.bias is not None:
        made.bias.set_metadata(**layer.bias.get_metadata())


def resharded(y: jax.Array, out_sharding: Any) -> jax.Array:
    """y with the sharding that the call asks for, if any: of a mesh of explicit axes."""
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def linear(
    op: str, x: jax.Array, W: SparseArray, bias: jax.Array | None, schedule: Schedule | str | None
) -> jax.Array:
    """x W^T + b over the last axis of x."""
    if x.ndim < 1 or x.shape[-1] != W.shape[1]:
        raise ValueError(f"{op}: inputs must have shape [..., {W.shape[1]}], got {list(x.shape)}")
    y = of_rows(lambda rows: spmm(W, rows.T, schedule=schedule).T, x)
    return with_bias(y, bias)


def with_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))
