"""The linen layers: the same numbers as the nnx ones with the same parameters."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx, serialization

from sgap_jax import BCSR, CSC, CSR, CVS, SparseArray, nn
from sgap_jax.nn import linen as snn

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 10, 6)))
GRAPH = SparseArray.from_dense(np.where(np.random.default_rng(1).random((10, 10)) < 0.3, 1.0, 0.0))
KEY = jax.random.key(0)
FLOAT64 = dict(param_dtype=jnp.float64)


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), a, b)


def pure(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


@pytest.mark.parametrize("format", [CSR, BCSR(2, 4)])
@pytest.mark.parametrize("use_bias", [True, False])
def test_sparse_linear(format, use_bias):
    options = dict(sparsity=0.5, format=format, use_bias=use_bias, **FLOAT64)
    layer = snn.SparseLinear(7, **options)
    variables = layer.init(KEY, X)
    assert set(variables) == {"params", "structure"}
    twin = nn.SparseLinear(6, 7, rngs=nnx.Rngs(0), **options)
    nnx.update(twin, {**variables["params"], "structure": variables["structure"]["index_arrays"]})
    close(layer.apply(variables, X), twin(X))
    params = variables["params"]
    loss = lambda params: jnp.sum(layer.apply({**variables, "params": params}, X) ** 2)
    close(jax.jit(jax.grad(loss))(params), pure(nnx.grad(lambda t: jnp.sum(t(X) ** 2))(twin)))
    # Plain arrays by name: any serialization takes them.
    written = serialization.to_bytes(variables)
    restored = serialization.from_bytes(layer.init(jax.random.key(5), X), written)
    close(layer.apply(restored, X), twin(X))


@pytest.mark.parametrize("format", [CSR, CVS(4)])
def test_from_dense(format):
    dense = linen.Dense(7, **FLOAT64)
    params = dense.init(KEY, X)["params"]
    variables = snn.SparseLinear.variables_from_dense(params, 0.6, format=format)
    layer = snn.SparseLinear(7, 0.6, format, **FLOAT64)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(layer.init(KEY, X)) == shapes(variables)
    twin = nnx.Linear(6, 7, rngs=nnx.Rngs(0), **FLOAT64)
    nnx.update(twin, params)
    close(layer.apply(variables, X), nn.SparseLinear.from_dense(twin, 0.6, format=format)(X))
    with pytest.raises(ValueError, match="call it outside jit"):
        jax.jit(lambda p: snn.SparseLinear.variables_from_dense(p, 0.6))(params)
    with pytest.raises(NotImplementedError, match="nearest are CSR, CVS"):
        snn.SparseLinear.variables_from_dense(params, 0.6, format=CSC)


@pytest.mark.parametrize(
    "own, twin",
    [
        (snn.SparseMultiHeadAttention, linen.MultiHeadDotProductAttention),
        (snn.MaskedLinear, linen.Dense),
        (snn.SparseLinear, linen.Dense),
    ],
)
def test_options_are_linens_in_name_order_and_default(own, twin):
    own, twin = ({field.name: field.default for field in fields(one)} for one in (own, twin))
    assert [name for name in own if name in twin] == [name for name in twin if name in own]
    for name in (own.keys() & twin.keys()) - {"parent", "name"}:
        if name.endswith("_init") and own[name] is not None:
            close(*(one[name](KEY, (3, 4), jnp.float64) for one in (own, twin)))
        else:
            assert own[name] is twin[name] or own[name] == twin[name], name


def test_dtype_and_precision_of_masked_linear():
    layer = snn.MaskedLinear(3, dtype=jnp.bfloat16, precision="highest")
    variables = layer.init(KEY, X)
    assert variables["params"]["kernel"].dtype == jnp.float32
    product = jax.make_jaxpr(layer.apply)(variables, X)
    assert product.out_avals[0].dtype == jnp.bfloat16
    assert "Precision.HIGHEST" in str(product)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = snn.MaskedLinear(8, BCSR(4, 3), name="up", **FLOAT64)(x)
        return snn.MaskedLinear(4, BCSR(4, 3), use_bias=False, **FLOAT64)(x)


def test_masked_linear_and_pruning():
    variables = Net().init(KEY, X)
    pruned = jax.jit(lambda v, s: snn.prune_step(v, s, format=BCSR(4, 3)))(variables, 0.5)
    assert pruned["params"].keys() == variables["params"].keys()
    up, x = nn.MaskedLinear(6, 8, format=BCSR(4, 3), rngs=nnx.Rngs(0), **FLOAT64), X
    down = nn.MaskedLinear(8, 4, format=BCSR(4, 3), use_bias=False, rngs=nnx.Rngs(0), **FLOAT64)
    for name, twin in (("up", up), ("MaskedLinear_0", down)):
        nnx.update(twin, variables["params"][name])
        twin.prune_step(0.5)
        close(pruned["structure"][name]["mask"], twin.mask[...])
    close(Net().apply(pruned, x), down(up(x)))
    loss = lambda params: jnp.sum(jnp.sin(Net().apply({**pruned, "params": params}, x)))
    twins = nnx.grad(lambda up, down: jnp.sum(jnp.sin(down(up(x)))), argnums=(0, 1))(up, down)
    got = jax.grad(loss)(variables["params"])
    close((got["up"], got["MaskedLinear_0"]), tuple(nnx.to_pure_dict(twin) for twin in twins))
    # What the mask keeps becomes the structure.
    params, mask = pruned["params"]["up"], pruned["structure"]["up"]["mask"]
    sparse = snn.SparseLinear.variables_from_dense(params, format=BCSR(4, 3), mask=mask)
    close(snn.SparseLinear(8, 0.5, BCSR(4, 3), **FLOAT64).apply(sparse, x), up(x))
    with pytest.raises(ValueError, match="prune_step: variables: expected the mask of a Masked"):
        snn.prune_step({"params": variables["params"]}, 0.5)
    with pytest.raises(ValueError, match=r"mask must be bool of shape \[6, 8\], got \[8, 6\]"):
        snn.SparseLinear.variables_from_dense(params, mask=mask.T)
    partly = mask.at[0].set(jnp.arange(8) == 0)
    with pytest.raises(ValueError, match=r"mask: expected whole groups of BCSR\(4, 3\), got parts"):
        snn.SparseLinear.variables_from_dense(params, format=BCSR(4, 3), mask=partly)
    with pytest.raises(ValueError, match="sparsity: expected a number from 0 to 1 without a mask"):
        snn.SparseLinear.variables_from_dense(params)
    with pytest.raises(NotImplementedError, match="MaskedLinear: no CSC here"):
        snn.MaskedLinear(3, CSC).init(KEY, X)


def test_pruning_of_boxed_and_of_stacked_layers():
    boxed = linen.with_partitioning(linen.initializers.normal(), ("in", "out"))
    options = dict(kernel_init=boxed, bias_init=linen.with_partitioning(linen.zeros, ("out",)))

    class Stack(linen.Module):
        @linen.compact
        def __call__(self, x):
            axes = dict(params=0, structure=0)
            over = linen.scan(
                lambda layer, x, _: (layer(x), None), axes, length=3, split_rngs=dict(params=True),
                metadata_params={linen.PARTITION_NAME: "layer"},
            )  # fmt: skip
            return over(snn.MaskedLinear(6, CVS(4), **options), x, None)[0]

    x = X.astype(jnp.float32)
    variables = Stack().init(KEY, x)
    pruned = snn.prune_step(variables, 0.5, format=CVS(4))
    close(pruned["params"], variables["params"])
    box = pruned["params"]["MaskedLinear_0"]["kernel"]
    assert box.names == ("layer", "in", "out")
    mask = pruned["structure"]["MaskedLinear_0"]["mask"]
    for kernel, one in zip(box.value, mask, strict=True):
        np.testing.assert_array_equal(one, nn.magnitude_mask(kernel.T, 0.5, CVS(4)).T)
    params = linen.Dense(7, **options).init(KEY, x)["params"]
    made = snn.SparseLinear.variables_from_dense(params, 0.5)
    plain = snn.SparseLinear.variables_from_dense(linen.meta.unbox(params), 0.5)
    assert made["params"]["bias"].names == ("out",)
    close(linen.meta.unbox(made), plain)


@pytest.mark.parametrize("params, structure", [(1, -2), (-1, 0)])
def test_pruning_of_layers_stacked_along_other_axes(params, structure):
    axes = dict(params=params, structure=structure)
    each = dict(variable_axes=axes, split_rngs=dict(params=True))

    class Stack(linen.Module):
        @linen.compact
        def __call__(self, x):
            heads = linen.vmap(snn.MaskedLinear, in_axes=None, axis_size=2, **each)
            over = lambda layer, x, _: (layer(x).mean(0), None)
            return linen.scan(over, axes, length=3, split_rngs=each["split_rngs"])(
                heads(6, CVS(2), name="heads"), snn.MaskedLinear(6, CVS(2), name="one")(x), None
            )[0]

    variables = jax.jit(Stack().init)(KEY, X[0].astype(jnp.float32))
    prune = lambda v, axes: snn.prune_step(v, 0.5, format=CVS(2), variable_axes=axes)
    pruned = jax.jit(lambda v: prune(v, {**axes, "cache": 0}))(variables)
    kernel, mask = variables["params"]["heads"]["kernel"], pruned["structure"]["heads"]["mask"]
    for i in range(3):
        for j in range(2):
            one = jnp.take(jnp.take(kernel, i, axis=params), j, axis=params)
            got = jnp.take(jnp.take(mask, i, axis=structure), j, axis=structure)
            np.testing.assert_array_equal(got, nn.magnitude_mask(one.T, 0.5, CVS(2)).T)
    one = variables["params"]["one"]["kernel"]
    got = pruned["structure"]["one"]["mask"]
    np.testing.assert_array_equal(got, nn.magnitude_mask(one.T, 0.5, CVS(2)).T)
    with pytest.raises(ValueError, match=r"prune_step: heads: (mask|bias): expected shape .* give"):
        prune(variables, None)


def test_variable_axes_of_one_stack():
    kernel = jax.random.normal(KEY, (3, 4, 6))
    stacked = lambda mask, bias: {
        "params": {"kernel": kernel, "bias": jnp.zeros(bias)},
        "structure": {"mask": jnp.ones(mask, bool)},
    }
    prune = lambda v, axes: snn.prune_step(v, 0.5, variable_axes=axes)
    # There and back differ: neither permutation of the axes is its own inverse.
    for axis, mask in ((-1, (4, 6, 3)), (np.int64(2), (4, 6, 3)), (0, (3, 4, 6))):
        got = prune(stacked(mask, (3, 6)), dict(params=0, structure=axis))["structure"]["mask"]
        for i in range(3):
            want = nn.magnitude_mask(kernel[i].T, 0.5).T
            np.testing.assert_array_equal(jnp.take(got, i, axis=axis), want)
    with pytest.raises(ValueError, match="bias: expected shape .3, 6. beside"):
        prune(stacked((3, 4, 6), (6, 3)), None)
    with pytest.raises(ValueError, match="kernel: expected a matrix with variable_axes"):
        prune(stacked((3, 4, 6), (3, 6)), dict(params=0, structure=None))
    for axes, error, match in (
        (dict(params=3), ValueError, "-3 .. 2 for 'params', got 3"),
        (dict(parms=1), ValueError, r"expected 'params' or 'structure' in it, got \['parms'\]"),
        (dict(structure=1.0), TypeError, "an integer or None for 'structure', got 1.0"),
        ({"params": 0, 1: 0}, TypeError, "names of collections, got the key 1"),
        (0, TypeError, "a mapping of collections to axes, got int"),
    ):
        with pytest.raises(error, match=f"prune_step: variable_axes: .*{match}"):
            prune(stacked((3, 4, 6), (3, 6)), axes)
    one = {"params": {"kernel": kernel[0]}, "structure": {"mask": jnp.ones((4, 6), bool)}}
    got = prune(one, dict(params=None, structure=None))["structure"]["mask"]
    np.testing.assert_array_equal(got, nn.magnitude_mask(kernel[0].T, 0.5).T)


def test_graph_conv():
    layer = snn.GraphConv(5, **FLOAT64)
    variables = layer.init(KEY, GRAPH, X)
    twin = nn.GraphConv(6, 5, rngs=nnx.Rngs(0), **FLOAT64)
    nnx.update(twin, variables["params"])
    close(layer.apply(variables, GRAPH, X), twin(GRAPH, X))
    sparse = SparseArray.from_dense(X[0])
    close(layer.apply(layer.init(KEY, GRAPH, sparse), GRAPH, sparse), twin(GRAPH, X[0]))


@pytest.mark.parametrize("concat", [True, False])
def test_graph_attention(concat):
    options = dict(heads=3, concat=concat, negative_slope=0.1, **FLOAT64)
    layer = snn.GraphAttention(5, **options)
    variables = layer.init(KEY, GRAPH, X)
    twin = nn.GraphAttention(6, 5, rngs=nnx.Rngs(0), **options)
    nnx.update(twin, variables["params"])
    close(layer.apply(variables, GRAPH, X), twin(GRAPH, X))


def test_dropout_of_graph_attention():
    layer = snn.GraphAttention(5, dropout_rate=0.5, feature_dropout_rate=0.5, **FLOAT64)
    variables = layer.init(KEY, GRAPH, X, deterministic=True)
    plain = snn.GraphAttention(5, **FLOAT64).apply(variables, GRAPH, X)
    close(layer.apply(variables, GRAPH, X, deterministic=True), plain)
    drawn = [
        layer.apply(variables, GRAPH, X, deterministic=False, rngs={"dropout": jax.random.key(i)})
        for i in (1, 1, 2)
    ]
    close(drawn[0], drawn[1])
    assert not np.allclose(drawn[0], drawn[2]) and not np.allclose(drawn[0], plain)


def test_wrong_arguments_are_named():
    with pytest.raises(NotImplementedError, match="nearest are CSR, CVS"):
        snn.SparseLinear(3, 0.5, CSC).init(KEY, X)
    for layer in (snn.GraphConv(3), snn.GraphAttention(3)):
        with pytest.raises(ValueError, match=r"x must have shape \[..., 10, features\]"):
            layer.init(KEY, GRAPH, X[:, :4])
        with pytest.raises(TypeError, match="must be a SparseArray"):
            layer.init(KEY, GRAPH.todense(), X)
