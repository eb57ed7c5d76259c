"""Gradual magnitude pruning: its schedule, its mask, and a layer on its way to a sparse one."""

from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sgap_jax import BCSR, CSC, CSR, CVS, nn, prune
from sgap_jax.formats.checks import check_share
from sgap_jax.nn import linen as snn


def test_schedule_is_the_papers_equation():
    s = nn.sparsity_schedule(0.9, begin=100, steps=1000, every=50, initial=0.2)
    for t in range(100, 1101, 50):
        assert s(t) == pytest.approx(0.9 + (0.2 - 0.9) * (1 - (t - 100) / 1000) ** 3, rel=1e-14)
    assert s(0) == s(100) == s(149) == pytest.approx(0.2)
    assert s(1100) == s(5000) == 0.9
    assert s(199) == s(150) < s(200)
    values = [s(t) for t in range(1300)]
    assert values == sorted(values)
    traced = jax.jit(s)(jnp.arange(1300))
    np.testing.assert_allclose(traced, values, rtol=1e-6)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(final=1.1, steps=3), "final: expected a number from 0 to 1"),
        (dict(final=0.5, initial=-1, steps=3), "initial: expected a number from 0 to 1"),
        (dict(final=0.5, steps=0), "must be positive, got 0 and 1"),
        (dict(final=0.5, steps=3, every=0), "must be positive, got 3 and 0"),
    ],
)
def test_schedule_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        nn.sparsity_schedule(**options)


@pytest.mark.parametrize("format", [CSR, CVS(8), BCSR(3, 4)])
@pytest.mark.parametrize("sparsity", [0.0, 0.37, 0.9, 1.0])
def test_mask_is_what_prune_keeps(format, sparsity):
    W = np.random.default_rng(0).standard_normal((20, 15))
    kept = prune(W, format, sparsity=sparsity)
    expected = kept.with_values(jnp.ones_like(kept.values)).todense() != 0
    np.testing.assert_array_equal(nn.magnitude_mask(W, sparsity, format), expected)
    traced = jax.jit(nn.magnitude_mask, static_argnames="format")(W, sparsity, format=format)
    np.testing.assert_array_equal(traced, expected)


@pytest.mark.parametrize("format", [CSR, BCSR(3, 4)])
def test_mask_of_magnitudes_whose_squares_are_out_of_range(format):
    """Of float32, whose squares `prune` takes in float64."""
    W = np.random.default_rng(0).standard_normal((20, 15)).astype(np.float32)
    W *= np.float32(10.0) ** np.repeat([-30, 25, 0, -20], 5)[:, None]
    W[5, ::3] = 2e38  # near the greatest number
    kept = prune(W, format, sparsity=0.3)
    expected = kept.with_values(jnp.ones_like(kept.values)).todense() != 0
    np.testing.assert_array_equal(nn.magnitude_mask(W, 0.3, format), expected)


def test_mask_of_ties_and_nan():
    W = jnp.asarray([[1.0, jnp.nan, -1.0], [1.0, 0.0, 2.0]])
    np.testing.assert_array_equal(nn.magnitude_mask(W, 1 / 3), [[1, 0, 1], [1, 0, 1]])
    np.testing.assert_array_equal(nn.magnitude_mask(W, 0.5), [[1, 0, 1], [0, 0, 1]])


def test_mask_refuses():
    with pytest.raises(ValueError, match="expected a real matrix"):
        nn.magnitude_mask(jnp.ones(3), 0.5)
    with pytest.raises(NotImplementedError, match="nearest are CSR, CVS"):
        nn.magnitude_mask(jnp.ones((3, 3)), 0.5, CSC)


def masked(format=None, **options):
    format = format or CVS(4)
    options = dict(param_dtype=jnp.float64) | options
    return nn.MaskedLinear(16, 24, format=format, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("format", [CVS(4), BCSR(8, 3)])
def test_masked_layer_is_a_linear_layer_until_it_is_pruned(format):
    layer = masked(format)
    dense = nnx.Linear(16, 24, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 16)))
    np.testing.assert_array_equal(layer(x), dense(x))
    assert layer.sparsity == 0
    layer.prune_step(0.75)
    assert layer.sparsity == pytest.approx(0.75, abs=0.05)  # blocks at the edge are smaller
    kept = prune(dense.kernel[...].T, format, sparsity=0.75)
    stored = kept.with_values(jnp.ones_like(kept.values)).todense().T
    np.testing.assert_array_equal(layer.mask[...], stored)
    kernel = jnp.where(layer.mask[...], layer.kernel[...], 0)
    np.testing.assert_allclose(layer(x), x @ kernel + layer.bias[...].reshape(1, 1, -1), atol=1e-12)
    gradient = nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)
    assert set(gradient) == {"kernel", "bias"}
    np.testing.assert_array_equal(gradient["kernel"][...] != 0, layer.mask[...])
    twin = nnx.grad(lambda twin: jnp.sum(twin(x) ** 2))
    dense.kernel[...], dense.bias[...] = kernel, layer.bias[...]
    expected = twin(dense)["kernel"][...] * stored
    np.testing.assert_allclose(gradient["kernel"][...], expected, rtol=1e-12)
    sparse = nn.SparseLinear.from_dense(layer)
    assert sparse.format == format
    np.testing.assert_allclose(sparse(x), layer(x), atol=1e-12)
    sampled = sparse.weight.with_values(twin(sparse)["values"][...]).todense().T
    np.testing.assert_allclose(sampled, expected, rtol=1e-9, atol=1e-12)


def test_a_trained_layer_gets_a_mask():
    dense = nnx.Linear(16, 24, dtype=jnp.bfloat16, use_bias=False, rngs=nnx.Rngs(5))
    layer = nn.MaskedLinear.from_dense(dense, format=CVS(4))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 16)), jnp.float32)
    assert layer(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(layer(x), dense(x))
    layer.prune_step(0.5)
    expected = nn.SparseLinear.from_dense(dense, 0.5, format=CVS(4)).weight
    converted = nn.SparseLinear.from_dense(layer).weight
    np.testing.assert_array_equal(converted.todense(), expected.todense())
    asked = []

    def dot_general(*operands, **options):
        asked.append(options)
        return jax.lax.dot_general(*operands, **options)

    options = dict(precision="highest", preferred_element_type=jnp.float32)
    dense = nnx.Linear(
        *(16, 24), dot_general=dot_general, promote_dtype=lambda x, dtype: x, rngs=nnx.Rngs(0),
        **options,
    )  # fmt: skip
    layer = nn.MaskedLinear.from_dense(dense)
    np.testing.assert_array_equal(layer(x), dense(x))
    assert layer.promote_dtype is dense.promote_dtype
    assert [{name: one[name] for name in options} for one in asked] == 2 * [options]
    for name in ("kernel", "bias"):  # copies
        given, made = (getattr(one, name)[...].unsafe_buffer_pointer() for one in (dense, layer))
        assert given != made
    layer.prune_step(0.5)
    again = nn.MaskedLinear.from_dense(nn.MaskedLinear.from_dense(layer), format=CVS(4))
    assert again.format == CVS(4) and nn.MaskedLinear.from_dense(again).format == CVS(4)
    np.testing.assert_array_equal(again.mask[...], layer.mask[...])
    with pytest.raises(TypeError, match="from_dense: layer must be an nnx.Linear, got Sequential"):
        nn.MaskedLinear.from_dense(nnx.Sequential(layer))


def test_a_masked_weight_comes_back_when_the_others_fall_below_it():
    layer = masked(CSR, use_bias=False)
    layer.kernel[...] = jnp.arange(1.0, 385.0).reshape(16, 24)
    layer.prune_step(0.5)
    assert not layer.mask[...][:8].any() and layer.mask[...][8:].all()
    layer.kernel[...] = jnp.where(layer.mask[...], 0.5, layer.kernel[...])
    layer.prune_step(0.5)
    assert layer.mask[...][:8].all() and not layer.mask[...][8:].any()


def test_masked_weights_of_nan_do_not_reach_the_output():
    layer = masked(CSR)
    layer.prune_step(0.5)
    y = layer(jnp.ones((1, 16)))
    layer.kernel[...] = jnp.where(layer.mask[...], layer.kernel[...], jnp.nan)
    np.testing.assert_array_equal(layer(jnp.ones((1, 16))), y)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nn.MaskedLinear(16, 32, format=CVS(8), rngs=rngs)
        self.down = nn.MaskedLinear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


@pytest.fixture
def as_optax_wants():
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_train_prune_convert_and_train_on(as_optax_wants):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 16)).astype(np.float32)
    labels = (x[:, :2] > 0) @ np.array([1, 2])
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    sparsity = nn.sparsity_schedule(0.8, begin=20, steps=100, every=10)

    def loss(model):
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @nnx.jit
    def step(model, optimizer):
        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    @nnx.jit
    def prune_now(model, t):
        nn.prune_step(model, sparsity(t))

    for t in range(150):
        if t % 10 == 0:
            prune_now(model, jnp.asarray(t))
        dense_loss = step(model, optimizer)
    assert model.up.sparsity == pytest.approx(0.8, abs=0.01)

    before = model(x)
    model.up = nn.SparseLinear.from_dense(model.up)
    model.down = nn.SparseLinear.from_dense(model.down)
    assert model.up.format == CVS(8) and model.down.format == CSR
    assert model.up.weight.density == pytest.approx(0.2, abs=0.01)
    np.testing.assert_allclose(model(x), before, rtol=1e-4, atol=1e-5)

    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for _ in range(50):
        sparse_loss = step(model, optimizer)
    assert sparse_loss < dense_loss < 0.5


def test_conversion_keeps_zeros_that_the_mask_keeps():
    layer = masked(CVS(4))
    layer.prune_step(0.5)
    layer.kernel[...] = jnp.zeros_like(layer.kernel[...])
    sparse = nn.SparseLinear.from_dense(layer)
    assert sparse.weight.nnz == 16 * 24 // 2
    assert nn.SparseLinear.from_dense(layer, format=CSR).weight.nnz == 16 * 24 // 2
    with pytest.raises(ValueError, match=r"mask: expected whole groups of CVS\(8\), got parts"):
        nn.SparseLinear.from_dense(layer, format=CVS(8))


def test_conversion_at_a_sparsity_of_its_own():
    layer = masked(CSR)
    layer.prune_step(0.5)
    sparse = nn.SparseLinear.from_dense(layer, 0.75, format=CVS(4))
    expected = prune(jnp.where(layer.mask[...], layer.kernel[...], 0).T, CVS(4), sparsity=0.75)
    np.testing.assert_array_equal(sparse.weight.todense(), expected.todense())


def test_stacked_layers_are_pruned_each_by_itself():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = nnx.vmap(lambda key: nn.MaskedLinear(6, 8, format=CVS(4), rngs=nnx.Rngs(key)))(keys)
    nn.prune_step(layers, 0.5)
    for kernel, mask in zip(layers.kernel[...], layers.mask[...], strict=True):
        np.testing.assert_array_equal(mask, nn.magnitude_mask(kernel.T, 0.5, CVS(4)).T)
    axes = nnx.StateAxes({...: 1})
    make = lambda key: nn.MaskedLinear(6, 8, format=CVS(4), rngs=nnx.Rngs(key))
    within = nnx.vmap(make, out_axes=axes)(keys)
    nnx.vmap(lambda layer: nn.prune_step(layer, 0.5), in_axes=(axes,))(within)
    np.testing.assert_array_equal(jnp.moveaxis(within.mask[...], 1, 0), layers.mask[...])


def test_prune_step_refuses_a_model_without_masks():
    with pytest.raises(ValueError, match="Linear has no MaskedLinear"):
        nn.prune_step(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), 0.5)


@pytest.mark.parametrize("sparsity", [90, -0.1, float("nan"), "0.9", np.full(3, 0.5)], ids=repr)
def test_a_sparsity_out_of_range_masks_nothing(sparsity):
    """90 is no percentage: it would mask all weights."""
    layer, words = masked(), "sparsity: expected a number from 0 to 1"
    with pytest.raises(ValueError, match="prune_step: " + words):
        nn.prune_step(layer, sparsity)
    variables = {
        "params": {"kernel": np.ones((3, 4))},
        "structure": {"mask": np.ones((3, 4), bool)},
    }
    with pytest.raises(ValueError, match="prune_step: " + words):
        snn.prune_step(variables, sparsity)
    with pytest.raises(ValueError, match="magnitude_mask: " + words):
        nn.magnitude_mask(np.ones((3, 4)), sparsity)
    assert layer.mask[...].all()


def test_a_share_is_a_real_number_that_a_float_holds():
    words = "rigl_step: fraction: expected a number from 0 to 1"
    refused = (10**400, 10**5000, -Fraction(10**400), Decimal("sNaN"), b"0.5", np.array("0.5"))
    refused += (np.complex64(0.5), 0.5j, True, np.bool_(True), np.array(0.5, object), [0.5])
    for share in refused:
        with pytest.raises(ValueError, match=words):
            check_share(share, "fraction", "rigl_step")
    for dtype in (bool, "complex64"):
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(lambda x: check_share(x, "fraction", "rigl_step"), np.zeros((), dtype))
    W = np.arange(12.0).reshape(3, 4)
    for half in (Fraction(1, 2), Decimal("0.5"), np.float32(0.5)):
        np.testing.assert_array_equal(nn.magnitude_mask(W, half), W > 5)
