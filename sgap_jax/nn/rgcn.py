"""The relational graph convolution (R-GCN): a matrix for each kind of edges, in one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_count
from sgap_jax.graphs.relations import Relations
from sgap_jax.nn.adjacency import stored_values, with_stored_values
from sgap_jax.nn.graph_conv import GLOROT
from sgap_jax.nn.linear import ZEROS, with_bias
from sgap_jax.primitives._define import check_dense, check_schedule
from sgap_jax.schedules import Schedule


class RGCNConv(nnx.Module):
    """A relational graph convolution.

        y[i] = R x[i] + sum over r, and over the stored (i, j) of A_r, of A_r[i, j] W_r x[j] + b

    for relations r with matrices A_r. With `graphs.join_relations(..., normalize=True)` the
    messages of each relation are averaged, as in the paper. All relations are one
    product with the sparse matrix. With `bases` the W_r are mixtures of so many matrices,
    W_r = sum_b c[r, b] V_b.

    Args:
      in_features, out_features: columns of X and of Y.
      num_relations: how many W_r there are, in the order of the relations.
      bases: number of the V_b; None: each W_r is a parameter.
      use_bias, dtype, param_dtype, kernel_init, bias_init, promote_dtype: as in `nnx.Linear`, with
        Glorot's uniform distribution.
      schedule: of the product; None lets `choose_schedule` pick.
      rngs: of the parameters (stream `params`).

    Called with (relations, x): relations is a `graphs.Relations`, x is [n, in_features],
    dense or a SparseArray, where all nodes are of one kind, else a dict of such arrays for the
    kinds. The parameters are `kernel`
    (W [relations, in, out], or V), `coefficients` (c), `root` (R) and `bias`.

    Returns:
      Y like x, with out_features columns, in `dtype` or the promoted dtype of x and the parameters.

    Raises:
      TypeError: relations are not Relations. ValueError: they are not num_relations, or x does not
        fit them.

    Source: Schlichtkrull et al., ESWC 2018, equations 2 and 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_relations: int,
        *,
        bases: int | None = None,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = GLOROT,
        bias_init: Initializer = ZEROS,
        promote_dtype: PromoteDtypeFn = flax_promote_dtype,
        schedule: Schedule | str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        num_relations = check_count(num_relations, "num_relations", "RGCNConv", 1)

        def new(init: Initializer, *shape: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), shape, param_dtype))

        matrices = num_relations
        if bases is not None:
            matrices = check_count(bases, "bases", "RGCNConv", 1)
        none = nnx.data(None)
        self.kernel = new(stacked(kernel_init), matrices, in_features, out_features)
        mixed = bases is not None
        self.coefficients = new(kernel_init, num_relations, matrices) if mixed else none
        self.root = new(kernel_init, in_features, out_features)
        self.bias = new(bias_init, out_features) if use_bias else none
        self.in_features = in_features
        self.out_features = out_features
        self.num_relations = num_relations
        self.bases = bases
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.schedule = check_schedule("RGCNConv", schedule)

    def __call__(self, relations: Relations, x: Any) -> Any:
        kernels = self.kernel, self.coefficients, self.root, self.bias
        return rgcn_conv(
            relations,
            x,
            [None if kernel is None else kernel[...] for kernel in kernels],
            lambda arrays: self.promote_dtype(arrays, dtype=self.dtype),
            self.schedule,
        )


def stacked(init: Initializer) -> Initializer:
    """The initializer of a stack of matrices, each on its own."""

    def each(key: Any, shape: Any, dtype: Any) -> jax.Array:
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(keys)

    return each


def _features(name: str, x: Any, shape: tuple[int, int]) -> Any:
    if not isinstance(x, SparseArray):
        return check_dense("RGCNConv", name, x, shape)
    if x.shape != shape:
        raise ValueError(f"RGCNConv: {name} must have shape {list(shape)}, got {list(x.shape)}")
    return x


def rgcn_conv(
    relations: Any, x: Any, kernels: Any, promote: Callable, schedule: Schedule | str | None
) -> Any:
    op = "RGCNConv"
    if not isinstance(relations, Relations):
        raise TypeError(f"{op}: relations must be Relations, got {type(relations).__name__}")
    sizes, kinds = dict(relations.num_nodes), isinstance(x, dict)
    if not kinds and len(sizes) != 1:
        raise ValueError(f"{op}: x: expected a dict of arrays for {list(sizes)}, got an array")
    of_kinds = x if kinds else dict.fromkeys(sizes, x)
    if set(of_kinds) != set(sizes):
        raise ValueError(f"{op}: x: expected arrays for {list(sizes)}, got {list(of_kinds)}")
    in_features = kernels[2].shape[0]
    of_kinds = {
        kind: _features(f"x of {kind}", of_kinds[kind], (size, in_features))
        for kind, size in sizes.items()
    }
    names, stored = list(of_kinds), map(stored_values, of_kinds.values())
    *arrays, kernel, coefficients, root, bias = promote((*stored, *kernels))
    of_kinds = {
        name: with_stored_values(of_kinds[name], array)
        for name, array in zip(names, arrays, strict=True)
    }
    if coefficients is not None:
        kernel = jnp.einsum("rb,bio->rio", coefficients, kernel)
    if kernel.shape[0] != len(relations.keys):
        raise ValueError(
            f"{op}: relations: expected {kernel.shape[0]} (num_relations), "
            f"got {len(relations.keys)}"
        )
    messages = {
        key: of_kinds[relations.source_of(key)] @ kernel[r] for r, key in enumerate(relations.keys)
    }
    sums = relations.sum(messages, schedule=schedule)
    y = {kind: with_bias(sums[kind] + of_kinds[kind] @ root, bias) for kind in names}
    return y if kinds else y[names[0]]
