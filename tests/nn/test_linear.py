"""`SparseLinear` against a dense matrix, in every transformation of JAX and Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from tolerance import assert_within, sum_bound

from sgap_jax import BCSR, COO, CSC, CSR, CVS, Reference, SparseArray, nn, prune
from sgap_jax.nn import linen as snn

# Vectors and blocks that do not divide the 20 outputs or the 12 inputs.
FORMATS = {"CSR": CSR, "CVS(8)": CVS(8), "BCSR(3, 5)": BCSR(3, 5)}


@pytest.fixture(params=FORMATS)
def format(request):
    return FORMATS[request.param]


def made(format=CSR, dtype=jnp.float64, seed=0, **options):
    options = dict(sparsity=0.6, format=format, param_dtype=dtype) | options
    return nn.SparseLinear(12, 20, rngs=nnx.Rngs(seed), **options)


def inputs(*leading, dtype=jnp.float64):
    x = np.random.default_rng(leading).standard_normal((*leading, 12))
    return jnp.asarray(x, dtype)


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), a, b)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_product_within_the_rounding_bound(format, dtype):
    layer = made(format, jnp.dtype(dtype), use_bias=False)
    x = inputs(7, dtype=layer.values.dtype)
    y = layer(x)
    assert y.dtype == dtype
    W = np.asarray(layer.weight.todense(), np.float64)
    x = np.asarray(x, np.float64)
    assert_within(y, x @ W.T, sum_bound(x @ W.T, abs(x) @ abs(W).T, 12, dtype))


@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (2, 0, 3), (2, 1, 4, 3)])
def test_any_leading_axes_and_bias(leading):
    layer = made(CVS(8), bias_init=nnx.initializers.normal())
    x = inputs(*leading)
    expected = x @ layer.weight.todense().T + layer.bias[...].reshape((1,) * len(leading) + (-1,))
    assert layer(x).shape == (*leading, 20)
    close(layer(x), expected)


def test_dtypes_are_those_of_nnx_linear():
    for dtype, param_dtype, x_dtype in (
        (None, jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.float32, jnp.float32),
        (jnp.float32, jnp.bfloat16, jnp.float16),
    ):
        options = dict(dtype=dtype, param_dtype=param_dtype)
        sparse = nn.SparseLinear(12, 4, sparsity=0.5, rngs=nnx.Rngs(0), **options)
        dense = nnx.Linear(12, 4, rngs=nnx.Rngs(0), **options)
        x = inputs(2, dtype=x_dtype)
        assert sparse(x).dtype == dense(x).dtype
        assert sparse.values.dtype == sparse.bias.dtype == dense.kernel.dtype


def test_gradients_are_those_of_the_dense_layer(format):
    layer, x = made(format), inputs(5)
    twin = layer.to_dense()
    loss = lambda layer, x: jnp.sum(jnp.sin(layer(x)))
    got, dx = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(layer, x)
    want, dense_dx = nnx.grad(loss, argnums=(0, 1))(twin, x)
    close((dx, got["bias"][...]), (dense_dx, want["bias"][...]))
    assert set(got) == {"values", "bias"}  # the structure has none
    sampled = layer.weight.with_values(got["values"][...]).todense()
    stored = layer.weight.with_values(jnp.ones_like(layer.values[...])).todense()
    close(sampled, want["kernel"][...].T * stored)


def test_gradients_to_order_2(format):
    graph, params, structure = nnx.split(made(format), nnx.Param, ...)

    def apply(params, x):
        return nnx.merge(graph, params, structure)(x)

    check_grads(jax.jit(apply), (params, inputs(3)), order=2, modes=["fwd", "rev"], eps=1e-5)


def test_vmap_over_a_batch_and_over_layers():
    layer, x = made(CVS(8)), inputs(4, 5)
    close(nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(layer, x), layer(x))

    @nnx.vmap
    def stacked(key):
        options = dict(sparsity=0.6, format=CVS(8), param_dtype=jnp.float64)
        return nn.SparseLinear(12, 20, rngs=nnx.Rngs(key), **options)

    layers = stacked(jax.random.split(jax.random.key(0), 3))
    y = nnx.vmap(lambda layer, x: layer(x))(layers, x[:3])
    graph, state = nnx.split(layers)
    for i in range(3):
        one = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
        close(y[i], one(x[i]))
        close(one(x[i]), x[i] @ one.weight.todense().T + one.bias[...][None])


def test_structure_is_an_argument_and_not_a_constant():
    layer = made()
    closed = jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))
    graph, state = nnx.split(layer)
    constants = closed(state, inputs(2)).consts
    assert max((np.size(c) for c in constants), default=0) < layer.weight.nnz


def test_random_places_are_as_many_as_prune_keeps(format):
    for sparsity in (0.31, 1.0):
        W = made(format, sparsity=sparsity).weight.checked()
        kept = prune(np.ones((20, 12), np.float32), format, sparsity=sparsity)
        assert (W.shape, W.format, W.values.shape) == (kept.shape, kept.format, kept.values.shape)
    a, b, c = (made(format, seed=seed).weight.column_indices for seed in (0, 0, 1))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


def test_new_layers_under_eval_shape_and_jit(format):
    layer = made(format)
    abstract = nnx.eval_shape(lambda: made(format))
    shapes = lambda layer: jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(layer))
    assert jax.tree.leaves(shapes(abstract)) == jax.tree.leaves(shapes(layer))
    jitted = nnx.jit(lambda: made(format))()
    jax.tree.map(np.testing.assert_array_equal, nnx.state(jitted), nnx.state(layer))


def test_variance_of_new_outputs_is_that_of_the_inputs():
    layer = nn.SparseLinear(400, 300, sparsity=0.9, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (500, 400))
    assert 0.9 < float(jnp.var(layer(x.astype(jnp.float32)))) < 1.1


@pytest.mark.parametrize("use_bias", [True, False])
def test_from_dense_keeps_what_prune_keeps(format, use_bias):
    options = dict(use_bias=use_bias, bias_init=nnx.initializers.normal(), dtype=jnp.float32)
    dense = nnx.Linear(12, 20, rngs=nnx.Rngs(3), **options)
    layer = nn.SparseLinear.from_dense(dense, 0.7, format=format)
    kept = prune(dense.kernel[...].T, format, sparsity=0.7)
    close(layer.weight.todense(), kept.todense())
    assert (layer.in_features, layer.out_features) == (12, 20)
    assert layer.dtype == jnp.float32 and layer.format == format
    assert (layer.bias is None) == (not use_bias)
    x = inputs(6, dtype=jnp.float32)
    back = layer.to_dense()
    np.testing.assert_allclose(layer(x), back(x), rtol=1e-5, atol=1e-6)
    # A copy: training one leaves the other.
    dense.kernel[...] *= 2
    close(layer.weight.todense(), kept.todense())


def test_from_dense_with_nothing_dropped_is_the_layer():
    dense = nnx.Linear(12, 20, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    close(nn.SparseLinear.from_dense(dense, 0.0)(inputs(4)), dense(inputs(4)))


def test_metadata_of_the_parameters():
    init = nnx.with_metadata(nnx.initializers.normal(), tag="i")
    layer = made(CVS(8), values_init=init, bias_metadata=dict(tag="b"))
    assert (layer.values.tag, layer.bias.tag) == ("i", "b")
    dense = nnx.Linear(12, 20, bias_metadata=dict(tag="b"), rngs=nnx.Rngs(0))
    assert nn.SparseLinear.from_dense(dense, 0.5).bias.tag == "b"
    close(layer(inputs(3)), inputs(3) @ layer.weight.todense().T)


def test_from_weight_and_a_schedule():
    W = prune(np.random.default_rng(0).standard_normal((20, 12)), CVS(8), sparsity=0.5)
    bias = jnp.arange(20.0)
    layer = nn.SparseLinear.from_weight(W, bias, schedule=Reference())
    close(layer(inputs(3)), inputs(3) @ W.todense().T + bias[None])
    assert layer.param_dtype == jnp.float64 and layer.schedule == Reference()
    # Copies: the layer may be donated.
    nnx.jit(lambda layers: layers[0](inputs(3)), donate_argnums=0)(
        nnx.List([layer, nn.SparseLinear.from_weight(W, bias)])
    )
    close(bias, np.arange(20.0))
    assert np.isfinite(W.checked().todense()).all()


def test_wrong_arguments_are_named():
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match="sparsity: expected a number from 0 to 1, got 1.5"):
        nn.SparseLinear(3, 4, sparsity=1.5, rngs=rngs)
    with pytest.raises(ValueError, match="SparseLinear: sparsity: expected a number .* got '0.9'"):
        nn.SparseLinear(3, 4, sparsity="0.9", rngs=rngs)
    for size, error, words in (
        (-24, ValueError, "not be negative, got -24"),
        (24.0, TypeError, "be an integer, got 24.0"),
    ):
        with pytest.raises(error, match=f"SparseLinear: in_features must {words}"):
            nn.SparseLinear(size, 4, sparsity=0.5, rngs=rngs)
        with pytest.raises(error, match=f"SparseLinear: out_features must {words}"):
            nn.SparseLinear(4, size, sparsity=0.5, rngs=rngs)
        with pytest.raises(error, match=f"SparseLinear: features must {words}"):
            snn.SparseLinear(size, 0.5).init(jax.random.key(0), np.ones(4, np.float32))
    for format in (CSC, COO, CVS(8).transposed, BCSR(2, 2).transposed):
        with pytest.raises(NotImplementedError, match="nearest are CSR, CVS"):
            nn.SparseLinear(3, 4, sparsity=0.5, format=format, rngs=rngs)
    with pytest.raises(ValueError, match="format: expected a Format or its text"):
        nn.SparseLinear(3, 4, sparsity=0.5, format="dense", rngs=rngs)
    with pytest.raises(TypeError, match="schedule must be a Schedule"):
        nn.SparseLinear(3, 4, sparsity=0.5, schedule=3, rngs=rngs)
    with pytest.raises(ValueError, match=r"inputs must have shape \[..., 12\], got \[5, 13\]"):
        made()(jnp.ones((5, 13)))
    dense = nnx.Linear(3, 4, rngs=rngs)
    with pytest.raises(ValueError, match="expected a number from 0 to 1 without a mask, got None"):
        nn.SparseLinear.from_dense(dense)
    with pytest.raises(TypeError, match="layer must be an nnx.Linear, got SparseLinear"):
        nn.SparseLinear.from_dense(made(), 0.5)
    with pytest.raises(ValueError, match="call it outside jit"):
        nnx.jit(lambda layer: nn.SparseLinear.from_dense(layer, 0.5))(dense)
    W = SparseArray.from_dense(np.eye(4))
    with pytest.raises(ValueError, match=r"bias must have shape \[4\]"):
        nn.SparseLinear.from_weight(W, jnp.ones(3))
    with pytest.raises(TypeError, match="W must be a SparseArray"):
        nn.SparseLinear.from_weight(np.eye(4))
