"""Mixtures of experts: equal to a loop over the experts, also in the gradients and in training."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sgap_jax import info, nn, select
from sgap_jax.nn import linen as snn

ROOT = Path(__file__).resolve().parents[2]
X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 11, 6)), jnp.float32)
SIZES = dict(num_experts=5, num_selected=2)


def layer_of(seed=0, features=6, hidden=10, **options):
    return nn.MoE(features, hidden, rngs=nnx.Rngs(seed), **(SIZES | options))


def loop(layer, x):
    """The same from the layer's parameters: every expert for every token, times its weight."""
    tokens = x.reshape(-1, x.shape[-1])
    share = jax.nn.softmax(tokens @ layer.router[...], axis=-1)
    greatest, chosen = jax.lax.top_k(share, layer.num_selected)
    if layer.normalize_weights:
        greatest = greatest / greatest.sum(1, keepdims=True)
    out = jnp.zeros_like(tokens)
    for e in range(layer.num_experts):
        own = jnp.sum(jnp.where(chosen == e, greatest, 0), axis=1, keepdims=True)
        if layer.capacity_factor is not None:
            most = int(np.ceil(layer.capacity_factor * chosen.size / layer.num_experts))
            own = jnp.where(jnp.cumsum(own > 0, axis=0) <= most, own, 0)
        h = tokens @ layer.w_in[e].T
        gate = h if layer.w_gate is None else tokens @ layer.w_gate[e].T
        h = layer.activation(gate) * (1 if layer.w_gate is None else h)
        out += own * (h @ layer.w_out[e])
    return out.reshape(x.shape)


def close(found, right, tolerance=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, right
    )


def gradients(apply, layer, x):
    def loss(layer, x):
        return jnp.sum(jnp.sin(apply(layer, x)))

    value, (of_layer, of_x) = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(layer, x)
    return value, nnx.to_pure_dict(of_layer), of_x


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(gated=True, activation=jax.nn.silu, normalize_weights=False, block=8),
        dict(num_selected=1, capacity_factor=0.8),
        dict(num_selected=5, block=1),
    ],
    ids=["plain", "gated", "capacity", "all experts"],
)
def test_a_loop_over_experts(options):
    layer = layer_of(**options)
    close(layer(X), loop(layer, X))
    close(gradients(lambda layer, x: layer(x), layer, X), gradients(loop, layer, X), 1e-4)


def test_a_router_of_one_expert_learns_from_the_task():
    """Switch Transformer: the weight of a token's only expert is its probability, not 1."""
    layer = layer_of(num_selected=1, capacity_factor=0.5)

    def loss(layer):
        y, routing = layer(X, return_routing=True)
        return jnp.sum(y**2), routing

    gradient, routing = nnx.jit(nnx.grad(loss, has_aux=True))(layer)
    assert jnp.abs(gradient["router"][...]).max() > 0.1
    counts = np.bincount(np.asarray(routing.experts).reshape(-1), minlength=5)
    assert int(routing.dropped) == np.maximum(counts - 4, 0).sum() > 0
    assert layer_of().normalize_weights and not layer.normalize_weights


def test_tokens_that_do_not_count_and_the_routing():
    layer, mask = layer_of(), np.random.default_rng(2).random((3, 11)) < 0.7

    @nnx.jit
    @nnx.value_and_grad(has_aux=True)
    def run(layer, x):
        y, losses, routing = layer(x, mask=mask, return_losses=True, return_routing=True)
        return jnp.sum(jnp.sin(y)) + sum(losses), (y, losses, routing)

    (_, (y, losses, routing)), gradient = run(layer, jnp.where(mask[..., None], X, jnp.nan))
    (_, found), right = run(layer, X)
    close((y, losses, routing, gradient), (*found, right))
    few, expected, own = nnx.jit(
        lambda layer, x: layer(x, return_losses=True, return_routing=True)
    )(layer, X[mask])
    close((y[mask], losses), (few, expected))
    assert (y[~mask] == 0).all() and (routing.experts[~mask] == -1).all()
    np.testing.assert_array_equal(routing.experts[mask], own.experts)
    close(routing.weights[mask], own.weights)
    assert (routing.weights[~mask] == 0).all() and routing.dropped == 0
    share = np.asarray(X[mask] @ layer.router[...])
    np.testing.assert_array_equal(own.experts, np.sort(np.argsort(-share, 1)[:, :2], axis=1))
    close(own.weights.sum(1), np.ones(mask.sum()))
    with pytest.raises(ValueError, match=r"MoE: mask must have shape \[3, 11\], got \[11\]"):
        layer(X, mask=mask[0])
    with pytest.raises(TypeError, match="MoE: mask must be bool, got float"):
        layer(X, mask=np.ones((3, 11)))


def test_shapes_dtypes_and_no_tokens():
    layer = layer_of()
    close(layer(X[0, 0]), loop(layer, X[0, :1])[0])
    assert layer(X[:0]).shape == (0, 11, 6)
    assert layer_of(capacity_factor=np.inf)(X[:0]).shape == (0, 11, 6)
    _, losses = layer(X[:0], return_losses=True)
    assert losses.load_balancing == 0 and losses.z == 0
    half = layer_of(dtype=jnp.bfloat16)
    y = half(X)
    assert y.dtype == jnp.bfloat16 and half.w_in.dtype == jnp.float32
    close(y.astype(jnp.float32), loop(layer, X), 0.1)


def test_a_capacity_without_an_end_drops_nothing():
    layers = [layer_of(capacity_factor=factor) for factor in (None, np.inf, 1e30)]
    params = nnx.to_pure_dict(nnx.state(layers[0], nnx.Param))

    @jax.jit
    def outputs(x):
        twin = snn.MoE(10, capacity_factor=np.inf, **SIZES)
        return [layer(x) for layer in layers], twin.apply({"params": params}, x)

    (want, *found), linens = outputs(X)
    close([*found, linens], [want] * 3)
    assert select.route(np.array([[0], [1], [0]]), 2, capacity=2**40).dropped == 0


def test_linen_twin():
    options = dict(gated=True, capacity_factor=1.0, num_experts=5, num_selected=1)
    twin, layer = layer_of(**options), snn.MoE(10, **options)
    params = layer.init(jax.random.key(0), X)["params"]
    shapes = {name: x.shape for name, x in params.items()}
    assert shapes == {
        name: x.shape for name, x in nnx.to_pure_dict(nnx.state(twin, nnx.Param)).items()
    }
    nnx.update(twin, params)
    y, losses = layer.apply({"params": params}, X, return_losses=True)
    close((y, losses), twin(X, return_losses=True), 1e-6)
    found = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(layer.apply({"params": p}, X)))))(params)
    close(found, gradients(lambda layer, x: layer(x), twin, X)[1])


def test_initial_values_have_the_variance_of_lecun():
    layer = nn.MoE(64, 100, num_experts=4, rngs=nnx.Rngs(0))
    for weights, inputs in ((layer.w_in, 64), (layer.w_out, 100)):
        assert abs(float(jnp.std(weights[...])) * inputs**0.5 - 1) < 0.05
    ones = nn.MoE(6, 10, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0), **SIZES)
    assert (ones.w_in[...] == 1).all() and (ones.w_out[...] == 1).all()


def test_losses_of_the_router():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((20, 4))
    chosen = rng.integers(-1, 5, (20, 2))
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = 4 * sum(np.mean(chosen == e) * share[:, e].mean() for e in range(4))
    np.testing.assert_allclose(nn.load_balancing_loss(logits, chosen), expected, rtol=1e-6)
    z = np.mean(np.log(np.exp(logits).sum(1)) ** 2)
    np.testing.assert_allclose(nn.router_z_loss(logits), z, rtol=1e-6)
    even = np.arange(20) % 4
    np.testing.assert_allclose(nn.load_balancing_loss(np.zeros((20, 4)), even), 1, rtol=1e-6)
    # One expert alone: the gradient pushes its logits down.
    alone = jax.grad(nn.load_balancing_loss)(jnp.asarray(logits), jnp.zeros(20, jnp.int32))
    assert (alone[:, 0] > 0).all() and (alone[:, 1:] < 0).all()
    layer = layer_of()
    _, losses = layer(X, return_losses=True)
    found = X.reshape(-1, 6) @ layer.router[...]
    balance = nn.load_balancing_loss(found, jax.lax.top_k(found, 2)[1])
    close(tuple(losses), (balance, nn.router_z_loss(found)))


@pytest.mark.tier("all")
def test_any_number_of_tokens_in_an_exported_program():
    (b,) = jax.export.symbolic_shape("b")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in info()["ffi_targets"]]
    layer = layer_of(num_selected=1, activation=jnp.tanh)
    tokens = jax.ShapeDtypeStruct((b, 6), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: layer(x)), disabled_checks=allowed)(tokens)
    x, router, w_in, w_out = map(np.asarray, (X[0], layer.router, layer.w_in, layer.w_out))
    share = np.exp(x @ router)
    share /= share.sum(1, keepdims=True)
    outputs = np.tanh(x @ w_in.swapaxes(1, 2)) @ w_out  # [experts, tokens, features]
    chosen = share.argmax(1), np.arange(len(x))
    close(exported.call(x), share.max(1)[:, None] * outputs[chosen])
    with pytest.raises(NotImplementedError, match="MoE: capacity_factor: none for a symbolic"):
        jax.export.export(jax.jit(layer_of(capacity_factor=1.0)))(tokens)


def test_errors():
    for options, words in (
        (dict(num_selected=6), "num_selected: expected at most 5 experts, got 6"),
        (dict(num_experts=0), "num_experts must be at least 1, got 0"),
        (dict(block=0), "block must be at least 1, got 0"),
        (dict(capacity_factor=-1.0), "capacity_factor must not be negative, got -1.0"),
        (dict(capacity_factor=np.nan), "capacity_factor must not be negative, got nan"),
    ):
        with pytest.raises(ValueError, match=f"MoE: {words}"):
            layer_of(**options)
    with pytest.raises(TypeError, match="hidden_features must be an integer, got 2.5"):
        layer_of(hidden=2.5)
    with pytest.raises(TypeError, match="schedule must be a Schedule, its text or None, got int"):
        layer_of(schedule=3)
    with pytest.raises(ValueError, match=r"inputs must have shape \[..., 6\], got \[11, 5\]"):
        layer_of()(X[0, :, :5])
    with pytest.raises(ValueError, match="num_selected: expected at most 2 experts, got 3"):
        snn.MoE(10, 2, 3).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"logits must be floats \[tokens, experts\], got \[4\]"):
        nn.router_z_loss(jnp.ones(4))
    with pytest.raises(ValueError, match=r"chosen must have shape \[4\] or \[4, choices\]"):
        nn.load_balancing_loss(jnp.ones((4, 2)), jnp.ones(3, jnp.int32))
    with pytest.raises(TypeError, match="chosen must be integers, got float"):
        nn.load_balancing_loss(jnp.ones((4, 2)), jnp.ones(4))


CONTEXT, WIDTH = 4, 16


class Bytes(nnx.Module):
    """The next byte from those before it."""

    def __init__(self, apply):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(128, WIDTH, rngs=rngs)
        self.experts = nn.MoE(CONTEXT * WIDTH, 64, num_experts=8, rngs=rngs)
        self.head = nnx.Linear(CONTEXT * WIDTH, 128, rngs=rngs)
        self.apply = apply

    def __call__(self, text):
        x = self.embed(text).reshape(len(text), -1)
        y, losses = self.experts(x, return_losses=True)
        return self.head(x + (y if self.apply is None else self.apply(self.experts, x))), losses


@pytest.mark.tier("all")
@pytest.mark.seconds(test=12)
def test_trains_as_its_dense_twin_does():
    """Eight experts on byte text, the documentation of this package."""
    with jax.numpy_dtype_promotion("standard"):
        text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
        text = np.minimum(np.frombuffer(text, np.uint8), 127).astype(np.int32)
        windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
        order = np.random.default_rng(0).permutation(len(windows))
        held, rest = windows[order[:4000]], windows[order[4000:]]

        def trained(apply):
            model = Bytes(apply)
            optimizer = nnx.Optimizer(model, optax.adam(4e-3), wrt=nnx.Param)

            def loss(model, batch):
                logits, losses = model(batch[:, :-1])
                entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1])
                return entropy.mean() + 0.01 * losses.load_balancing + 0.001 * losses.z, losses

            @nnx.jit
            def step(model, optimizer, batch):
                (_, losses), gradient = nnx.value_and_grad(loss, has_aux=True)(model, batch)
                optimizer.update(model, gradient)
                return losses

            for i in range(150):
                losses = step(model, optimizer, rest[512 * i : 512 * (i + 1)])
            logits, _ = nnx.jit(lambda model, x: model(x))(model, held[:, :-1])
            return float(np.mean(np.argmax(logits, 1) == held[:, -1])), losses

        (ours, losses), (twin, _) = trained(None), trained(loop)
        assert abs(ours - twin) < 0.01
        assert ours > 0.35 and 1 <= losses.load_balancing < 2
