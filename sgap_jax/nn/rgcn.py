"""The relational graph convolution (R-GCN): a matrix for each kind of edges, in one product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_count
from sgap_jax.graphs.relations import Relations, ends_of
from sgap_jax.nn.adjacency import stored_values, with_stored_values
from sgap_jax.nn.graph_conv import GLOROT
from sgap_jax.nn.linear import ZEROS, with_bias
from sgap_jax.primitives._define import check_dense, check_schedule
from sgap_jax.schedules import Schedule


class RGCNConv(nnx.Module):
    """A relational graph convolution.

        y[i] = R x[i] + sum over r, and over the stored (i, j) of A_r, of A_r[i, j] W_r x[j] + b

    for relations r with matrices A_r, whose values are read. With
    `graphs.join_relations(..., normalize=True)` the messages of each relation are averaged,
    weighted by the values: the paper's mean over edges where these are ones or counts. All
    relations are one product with the sparse matrix. With `bases` the W_r are mixtures of so many
    matrices, W_r = sum_b c[r, b] V_b.

    Args:
      in_features, out_features: columns of X and of Y. A dict of in_features by the kind of nodes
        where these differ: each kind then has an R of its own, and V_b if there are `bases`.
      num_relations: how many W_r there are, in the order of the relations. With a dict of
        in_features the relations themselves, a `graphs.Relations` or its `keys`.
      bases: number of the V_b; None: each W_r is a parameter.
      use_bias, dtype, param_dtype, kernel_init, bias_init, promote_dtype: as in `nnx.Linear`, with
        Glorot's uniform distribution.
      schedule: of the product; None lets `choose_schedule` pick.
      rngs: of the parameters (stream `params`).

    Called with (relations, x): relations is a `graphs.Relations`, x is [..., n, in_features], dense
    or a SparseArray [n, in_features], where all nodes are of one kind, else a dict of such arrays
    for the kinds; leading axes share the relations, and broadcast. The parameters are `kernel`
    (W [relations, in, out], or V), `coefficients` (c), `root` (R) and `bias`. Of in_features by
    kind `kernel` and `root` are dicts: for each kind the W_r, or V, of the relations that lead from
    it, and its R.

    Returns:
      Y like x, with out_features columns and the leading axes of all kinds, in `dtype` or the
      promoted dtype of x and the parameters.

    Raises:
      TypeError: relations are not Relations. ValueError: they are not num_relations, x does not
        fit them, or kinds of nodes lack in_features.

    Source: Schlichtkrull et al., ESWC 2018, equations 2 and 3.
    """

    def __init__(
        self,
        in_features: int | Mapping[str, int],
        out_features: int,
        num_relations: int | Relations | Sequence[Any],
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
        given = num_relations.keys if isinstance(num_relations, Relations) else num_relations
        self.keys = tuple(given) if isinstance(given, list | tuple) else None
        count = given if self.keys is None else len(self.keys)
        num_relations = check_count(count, "num_relations", "RGCNConv", 1)
        bases = None if bases is None else check_count(bases, "bases", "RGCNConv", 1)

        def new(init: Initializer, *shape: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), shape, param_dtype))

        def mixture() -> Any:
            return nnx.data(None) if bases is None else new(kernel_init, num_relations, bases)

        self.kernel: Any
        self.root: Any
        if isinstance(in_features, Mapping):
            if self.keys is None:
                raise ValueError(
                    "RGCNConv: num_relations: expected Relations or their keys, as in_features is "
                    f"a dict, got {num_relations}"
                )
            sizes = {
                kind: check_count(size, f"in_features of {kind}", "RGCNConv", 1)
                for kind, size in in_features.items()
            }
            shapes = shapes_by_kind(self.keys, sizes, out_features, bases)
            kernel = {kind: new(stacked(kernel_init), *shape) for kind, shape in shapes.items()}
            self.kernel, self.coefficients = nnx.Dict(kernel), mixture()
            root = {kind: new(kernel_init, size, out_features) for kind, size in sizes.items()}
            self.root = nnx.Dict(root)
            self.in_features: Any = tuple(sizes.items())  # a dict has no hash
        else:
            matrices = num_relations if bases is None else bases
            size = check_count(in_features, "in_features", "RGCNConv", 1)
            self.kernel = new(stacked(kernel_init), matrices, size, out_features)
            self.coefficients = mixture()
            self.root = new(kernel_init, size, out_features)
            self.in_features = size
        self.bias = new(bias_init, out_features) if use_bias else nnx.data(None)
        self.out_features = out_features
        self.num_relations = num_relations
        self.bases = bases
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.schedule = check_schedule("RGCNConv", schedule)

    def __call__(self, relations: Relations, x: Any) -> Any:
        if self.keys is not None and isinstance(relations, Relations):
            if relations.keys != self.keys:
                raise ValueError(
                    f"RGCNConv: relations: expected {list(self.keys)}, got {list(relations.keys)}"
                )
        kernels = self.kernel, self.coefficients, self.root, self.bias
        return rgcn_conv(
            relations,
            x,
            [_arrays(kernel) for kernel in kernels],
            lambda arrays: self.promote_dtype(arrays, dtype=self.dtype),
            self.schedule,
        )


def _arrays(kernel: Any) -> Any:
    if isinstance(kernel, nnx.Dict):
        return {kind: kernel[kind][...] for kind in kernel}
    return None if kernel is None else kernel[...]


def shapes_by_kind(
    keys: Sequence[Any], sizes: Mapping[Any, int], out_features: int, bases: int | None
) -> dict[Any, tuple[int, int, int]]:
    """The shape of the matrices of each kind of nodes from which a relation leads."""
    for kind in {kind for key in keys for kind in ends_of(key)}:
        if kind not in sizes:
            raise ValueError(f"RGCNConv: in_features: expected those of {kind!r}, got {sizes}")
    sources = [ends_of(key)[0] for key in keys]
    return {
        kind: (sources.count(kind) if bases is None else bases, size, out_features)
        for kind, size in sizes.items()
        if kind in sources
    }


def stacked(init: Initializer) -> Initializer:
    """The initializer of a stack of matrices, each on its own."""

    def each(key: Any, shape: Any, dtype: Any) -> jax.Array:
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(keys)

    return each


def _features(name: str, x: Any, shape: tuple[int, int]) -> Any:
    sparse = isinstance(x, SparseArray)
    x = x if sparse else check_dense("RGCNConv", name, x, ("...",))
    if x.shape[-2:] != shape or (sparse and x.ndim != 2):
        want = f"{'' if sparse else '..., '}{shape[0]}, {shape[1]}"
        raise ValueError(f"RGCNConv: {name} must have shape [{want}], got {list(x.shape)}")
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
    root, names = kernels[2], list(of_kinds)
    roots = root if isinstance(root, Mapping) else dict.fromkeys(sizes, root)
    if set(roots) != set(sizes):
        raise ValueError(f"{op}: relations: expected nodes of {list(roots)}, got {list(sizes)}")
    of_kinds = {
        kind: _features(f"x of {kind}", of_kinds[kind], (size, roots[kind].shape[0]))
        for kind, size in sizes.items()
    }
    stored = [stored_values(of_kinds[name]) for name in names]
    leaves, tree = jax.tree.flatten((stored, kernels))
    arrays, (kernel, coefficients, root, bias) = jax.tree.unflatten(tree, promote(leaves))
    of_kinds = {
        name: with_stored_values(of_kinds[name], array)
        for name, array in zip(names, arrays, strict=True)
    }
    matrices = _of_relations(relations, kernel, coefficients)
    messages = {
        key: of_kinds[relations.source_of(key)] @ W
        for key, W in zip(relations.keys, matrices, strict=True)
    }
    sums = relations.sum(messages, schedule=schedule)
    roots = root if isinstance(root, Mapping) else dict.fromkeys(sizes, root)
    with jax.numpy_rank_promotion("allow"):  # of kinds with fewer leading axes
        y = {kind: with_bias(sums[kind] + of_kinds[kind] @ roots[kind], bias) for kind in names}
    return y if kinds else y[names[0]]


def _of_relations(relations: Relations, kernel: Any, coefficients: Any) -> list[jax.Array]:
    """W_r for each relation, of matrices [relations or bases, in, out] of all kinds of nodes, or of
    each kind for the relations that lead from it."""
    sources = [relations.source_of(key) for key in relations.keys]
    if not isinstance(kernel, Mapping):
        mixed = kernel if coefficients is None else jnp.einsum("rb,bio->rio", coefficients, kernel)
        if len(mixed) != len(sources):
            raise ValueError(
                f"RGCNConv: relations: expected {len(mixed)} (num_relations), got {len(sources)}"
            )
        return list(mixed)
    counts = Counter(sources)
    if coefficients is None:
        expected = {kind: len(stack) for kind, stack in kernel.items()}
    else:  # as many as there are, of the same kinds
        expected = counts if len(coefficients) == len(sources) else {}
        expected = {kind: expected.get(kind, 0) for kind in kernel}
    if counts != expected:
        raise ValueError(
            "RGCNConv: relations: expected other ones: by the kind from which they lead, "
            f"{dict(expected)}, got {dict(counts)}"
        )
    if coefficients is not None:
        pairs = zip(sources, coefficients, strict=True)
        return [jnp.einsum("b,bio->io", c, kernel[kind]) for kind, c in pairs]
    each = {kind: iter(stack) for kind, stack in kernel.items()}
    return [next(each[kind]) for kind in sources]
