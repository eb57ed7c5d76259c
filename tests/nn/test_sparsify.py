"""`sparsify` and the layers that it makes, against the dense ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from sgap_jax import BCSR, CSR, CVS, SparseArray, nn, prune
from sgap_jax.nn import linen as snn

FLOAT64 = dict(param_dtype=jnp.float64)
RNG = np.random.default_rng(0)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape))


BIAS = dict(bias_init=nnx.initializers.normal(), **FLOAT64)
# The dense layer, and the shape of inputs.
LAYERS = {
    "general": (nnx.LinearGeneral, ((4, 3), (5, 2)), dict(axis=(-2, -1)), (2, 6, 4, 3)),
    "general blocks": (nnx.LinearGeneral, (3, 8), dict(batch_axis={0: 4}), (4, 2, 3)),
    "einsum": (nnx.Einsum, ("nta,hab->nthb", (8, 2, 4), (8, 4)), {}, (3, 5, 2)),
    "einsum blocks": (nnx.Einsum, ("...bd,bdf->...fb", (4, 3, 8), (8, 4)), {}, (2, 4, 3)),
    "einsum sum": (nnx.Einsum, ("bti,io->bo", (6, 8)), {}, (2, 3, 6)),
    "conv": (nnx.Conv, (6, 8, (3, 2)), dict(strides=(2, 1), padding="VALID"), (2, 7, 5, 6)),
    "conv groups": (nnx.Conv, (6, 8, 3), dict(feature_group_count=2, padding="CAUSAL"), (7, 6)),
    "conv spread": (
        nnx.Conv,
        (3, 4, (3,)),
        dict(kernel_dilation=2, input_dilation=2, padding=2),
        (2, 2, 9, 3),
    ),
    "conv circular": (nnx.Conv, (3, 4, (4,)), dict(padding="CIRCULAR", use_bias=False), (1, 9, 3)),
    "conv short": (nnx.Conv, (3, 4, (4,)), dict(padding="VALID"), (1, 2, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_the_dense_ones_with_dropped_weights(name):
    dense, args, options, shape = LAYERS[name]
    layer = dense(*args, rngs=nnx.Rngs(0), **options, **BIAS)
    x = normal(*shape)
    close(nn.sparsify(layer, 0.0)(x), layer(x))
    sparse = nn.sparsify(layer, 0.5, format=CVS(2) if "blocks" in name else CSR)
    assert type(sparse).__name__ == f"Sparse{dense.__name__}"
    twin = sparse.to_dense()
    kept = twin.kernel[...] != 0
    assert abs(kept.mean() - 0.5) < 0.1
    close(twin.kernel[...], jnp.where(kept, layer.kernel[...], 0))
    close(sparse(x), twin(x))


@pytest.mark.parametrize("name", ["general blocks", "conv"])
def test_gradients_are_those_of_the_dense_layer(name):
    dense, args, options, shape = LAYERS[name]
    sparse = nn.sparsify(dense(*args, rngs=nnx.Rngs(0), **options, **BIAS), 0.5)
    gradients, x = nnx.jit(nnx.grad(loss, argnums=(0, 1))), normal(*shape)
    (got, dx), (want, dense_dx) = (gradients(m, x) for m in (sparse, sparse.to_dense()))
    close(dx, dense_dx)
    close(got["bias"][...], want["bias"][...])
    # Both list the places in row-major order.
    kept, every = (
        sparse._contraction().stacked(np.asarray(k[...]))
        for k in (sparse.to_dense().kernel, want["kernel"])
    )
    close(got["values"][...], every[kept != 0])


def loss(layer, x):
    return jnp.sum(jnp.sin(layer(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(6, 8, rngs=rngs)
        self.again = self.up
        self.list = nnx.List([nnx.Linear(8, 8, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.head = nnx.Sequential(jnp.tanh, nnx.Linear(8, 4, rngs=rngs))

    def __call__(self, x):
        return self.head(self.attention(self.list[0](self.up(x) + self.again(x))))


def sparse_layers(model):
    return {path: m for path, m in nnx.iter_modules(model) if hasattr(m, "weight_shape")}


def test_models_are_changed_in_place():
    model, x = Net(nnx.Rngs(0)), jnp.asarray(normal(3, 5, 6), jnp.float32)
    y = model(x)
    assert nn.sparsify(model, 0.0, where="attention") is model
    assert len(sparse_layers(model)) == 4
    np.testing.assert_allclose(model(x), y, atol=1e-5)
    nn.sparsify(model, 0.75, format="CVS(4)", where=lambda path, layer: "head" not in path)
    assert model.up is model.again and type(model.up) is nn.SparseLinear
    assert type(model.head.layers[1]) is nnx.Linear
    density = {path[0]: m.weight.density for path, m in sparse_layers(model).items()}
    assert density == {"attention": 1.0, "again": 0.25, "list": 0.25}
    assert nnx.jit(lambda model, x: model(x))(model, x).shape == (3, 5, 4)
    with pytest.raises(ValueError, match="expected a Linear, LinearGeneral, Einsum or Conv"):
        nn.sparsify(model, 0.5, where="attention")
    with pytest.raises(TypeError, match=r"where: expected a name .*, got \{'up'\}"):
        nn.sparsify(model, 0.5, where={"up"})


class Held(NamedTuple):
    layer: Any
    scale: float


class InTuples(nnx.Module):
    def __init__(self, rngs):
        first, second = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))
        self.pair = nnx.data((first, [(second, jnp.tanh)]))
        self.held = nnx.data({"again": Held(first, 2.0)})


def test_layers_in_tuples_are_replaced():
    model = nn.sparsify(InTuples(nnx.Rngs(0)), 0.5)
    first, [(second, function)] = model.pair
    assert type(first) is type(second) is nn.SparseLinear and function is jnp.tanh
    assert model.held == {"again": Held(first, 2.0)}
    assert len(jax.tree.leaves(nnx.state(model, nnx.Param))) == 4


def test_global_scope_compares_all_layers():
    model = Net(nnx.Rngs(0))
    model.up.kernel[...] = model.up.kernel[...] * 100.0
    weights = [model.up.kernel[...].T, model.list[0].kernel[...].T]
    nn.sparsify(model, 0.5, scope="global", where=["up", "list"])
    up, inner = model.up.weight, model.list[0].weight
    assert up.nnz == 48 and inner.nnz == round(0.5 * (48 + 64)) - 48
    close(up.todense(), weights[0])
    close(inner.todense(), prune(weights[1], sparsity=1 - inner.nnz / 64).todense())


@pytest.mark.parametrize("format", [CVS(4), BCSR(2, 3)])
def test_sizes_of_layers_are_known_where_parameters_are_traced(format):
    def made():
        layers = [
            nnx.Linear(6, 10, rngs=nnx.Rngs(0)),
            nnx.Conv(6, 8, (3,), feature_group_count=2, rngs=nnx.Rngs(0)),
        ]
        return nn.sparsify(nnx.Sequential(*layers), 0.7, format=format)

    expected, found = (jax.tree.leaves(nnx.state(f())) for f in (made, nnx.jit(made)))
    abstract = jax.tree.leaves(nnx.state(nnx.eval_shape(made)))
    assert [x.shape for x in abstract] == [x.shape for x in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("format", [CSR, CVS(4)])
def test_no_array_of_a_layer_without_entries_is_empty(format):
    """Orbax saves none of size zero."""
    model = nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2)))
    model.layers[0].kernel[...] = model.layers[0].kernel[...] * 1e-3
    nn.sparsify(model, 0.5, format=format, scope="global")
    pruned = model.layers[0]
    assert pruned.weight.row_offsets[-1] == 0 and (pruned(np.ones((2, 8), np.float32)) == 0).all()
    assert type(nn.SparseLinear.from_dense(pruned.to_dense(), 1.0, format=format)) is type(pruned)
    new = nn.SparseLinear(8, 8, sparsity=1.0, format=format, rngs=nnx.Rngs(0))
    new.set_weight(prune(np.ones((8, 8), np.float32), format, sparsity=1.0))
    for layer in (pruned, new):
        assert all(x.size for x in jax.tree.leaves(nnx.state(layer)))
        assert (layer.weight.todense() == 0).all()


def test_of_a_mask_what_it_keeps_is_pruned():
    masked = nn.MaskedLinear(6, 8, rngs=nnx.Rngs(0), **FLOAT64)
    masked.prune_step(0.5)
    sparse = nn.sparsify(masked, 0.75)
    close(sparse.weight.todense(), prune(masked.kernel[...].T, sparsity=0.75).todense())


@pytest.mark.parametrize("name", ["general blocks", "einsum", "conv groups"])
def test_new_layers(name):
    dense, args, options, shape = LAYERS[name]
    made = getattr(nn, f"Sparse{dense.__name__}")
    new = lambda: made(*args, sparsity=0.5, rngs=nnx.Rngs(0), **options, **BIAS)
    layer, x = new(), normal(*shape)
    assert layer.weight.checked().nnz == round(0.5 * np.prod(layer.kernel_shape))
    close(layer(x), layer.to_dense()(x))
    abstract = nnx.eval_shape(new)
    sizes = lambda layer: [x.shape for x in jax.tree.leaves(nnx.state(layer))]
    assert sizes(abstract) == sizes(layer)


def test_set_weight():
    layer = nn.SparseLinear(6, 8, sparsity=0.5, format=CVS(4), rngs=nnx.Rngs(0))
    W = SparseArray.from_dense(RNG.standard_normal((8, 6)) * (RNG.random((8, 6)) < 0.2))
    layer.set_weight(W)
    assert layer.weight.dtype == jnp.float32 and layer.weight.format == CVS(4)
    x = jnp.asarray(normal(3, 6), jnp.float32)
    np.testing.assert_allclose(layer(x), x @ W.todense().T.astype(np.float32), atol=1e-5)
    with pytest.raises(ValueError, match=r"A: expected shape \(8, 6\), got \(6, 8\)"):
        layer.set_weight(W.T)
    with pytest.raises(TypeError, match="A must be a SparseArray"):
        layer.set_weight(W.todense())
    options = dict(batch_axis={0: 2}, sparsity=0.5, rngs=nnx.Rngs(0), **FLOAT64)
    blocks = nn.SparseLinearGeneral(3, 2, **options)
    with pytest.raises(ValueError, match="entries in the 2 blocks on the diagonal"):
        blocks.set_weight(SparseArray.from_dense(np.ones((4, 6))))
    blocks.set_weight(SparseArray.from_dense(np.kron(np.eye(2), np.ones((2, 3)))))
    close(blocks(jnp.ones((2, 5, 3))), jnp.full((2, 5, 2), 3.0))
    conv = nn.SparseConv(4, 4, 1, feature_group_count=2, sparsity=0.5, rngs=nnx.Rngs(0))
    W = SparseArray.from_dense(np.kron(np.eye(2), np.ones((2, 2), np.float32)))
    with pytest.raises(ValueError, match="got a tracer; set it outside jit"):
        nnx.jit(lambda layer, W: layer.set_weight(W))(conv, W)
    conv.set_weight(W)
    nnx.jit(lambda layer: layer.set_weight(W * 2))(conv)
    close(conv.weight.todense(), 2 * W.todense())
    with pytest.raises(NotImplementedError, match="2 blocks on the diagonal"):
        nn.rigl_step(blocks, jnp.ones((4, 6)), 0.3)


def test_kernel_init_has_the_fans_of_the_sparse_weight():
    options = dict(kernel_init=nnx.initializers.he_normal(), rngs=nnx.Rngs(0))
    layer = nn.SparseLinear(200, 300, sparsity=0.9, **options)
    assert float(layer.values[...].var()) == pytest.approx(2 / 20, rel=0.1)
    # One set of distinct places, each equally likely; most of them, and all.
    for sparsity in (0.9, 0.3, 0.0):
        layer = nn.SparseLinear(30, 20, sparsity=sparsity, rngs=nnx.Rngs(1))
        assert layer.weight.checked().nnz == round((1 - sparsity) * 600)
    drawn = jax.jit(jax.vmap(lambda key: _places(key, 3, 4, 3)))
    places = drawn(jax.random.split(jax.random.key(0), 4000))
    count = np.bincount(np.asarray(places).reshape(-1), minlength=12)
    assert np.square(count - 1000).sum() / 1000 < 31  # chi-squared of 11 degrees, 1 in 1000


def _places(key, rows, columns, kept):
    offsets, indices = nn.structure._random_places(key, rows, columns, kept)
    return (jnp.searchsorted(offsets, jnp.arange(kept, dtype=jnp.int32), side="right") - 1).astype(
        jnp.int32
    ) * columns + indices


def test_a_layer_of_two_to_the_32_places():
    layer = nn.SparseLinear(1 << 16, 1 << 16, sparsity=1 - 2.0**-22, rngs=nnx.Rngs(0))
    assert layer.weight.checked().nnz == 1024
    assert int(layer.weight.column_indices.max()) > 1 << 15


def test_partitioning_of_the_kernel():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"))
    with jax.set_mesh(jax.make_mesh((1, 1), ("in", "out"))):
        layer = nn.SparseLinear(
            6, 8, sparsity=0.5, format=CVS(4), kernel_init=init, rngs=nnx.Rngs(0)
        )
        assert layer.values.out_sharding == ("out", None)
        options = dict(kernel_metadata={"out_sharding": (None, "out"), "tag": 1}, rngs=nnx.Rngs(0))
        dense = nnx.Linear(6, 8, **options)
        for made in (nn.SparseLinear(6, 8, sparsity=0.5, **options), nn.sparsify(dense, 0.5)):
            assert made.values.out_sharding == ("out",) and made.values.tag == 1
        dense = nnx.Conv(
            6, 8, 3, kernel_metadata={"out_sharding": (None, "in", "out")}, rngs=nnx.Rngs(0)
        )
        assert nn.sparsify(dense, 0.5).values.out_sharding == ("out",)
    boxed = linen.with_partitioning(linen.initializers.lecun_normal(), ("in", "out"))
    params = snn.SparseLinear(8, 0.5, kernel_init=boxed).init(
        jax.random.key(0), jnp.ones((2, 6), jnp.float32)
    )
    assert params["params"]["values"].names == ("out",)


def test_layers_print_their_weight_and_variables_hold_arrays():
    layer = nn.SparseLinear(6, 8, sparsity=0.5, rngs=nnx.Rngs(0))
    text = repr(layer)
    assert "weight=SparseArray(shape=(8, 6), format=CSR, nnz=24, density=0.5" in text
    assert "row_offsets" not in text and "bias=Param" in text
    assert "nnz=24" in repr(nnx.eval_shape(lambda: layer))
    A = SparseArray.from_dense(np.eye(3))
    variable = nnx.Param(A)
    close(variable[...].todense(), A.todense())
    variable.set_value(2 * A)
    close(nnx.jit(lambda v, x: v[...] @ x)(variable, jnp.ones(3)), jnp.full(3, 2.0))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(8, name="up", **FLOAT64)(x)
        options = dict(feature_group_count=2, strides=2, padding="CIRCULAR", **FLOAT64)
        x = linen.Conv(8, (3,), **options)(x)
        x = linen.Einsum((8, 2, 4), "...d,dhk->...hk", **FLOAT64)(x)
        return linen.DenseGeneral(4, axis=(-2, -1), name="head", **FLOAT64)(x)


def test_linen_models():
    x, model = normal(2, 6, 8), LinenNet()
    variables = model.init(jax.random.key(0), x)
    sparse, own = snn.sparsify(model, variables, 0.0, x)
    assert "kernel" not in own["params"]["up"]
    close(sparse.apply(own, x), model.apply(variables, x))
    assert jax.eval_shape(sparse.apply, own, x[:0]).shape == model.apply(variables, x[:0]).shape
    twin = nnx.Linear(8, 8, rngs=nnx.Rngs(0), **FLOAT64)
    nnx.update(twin, variables["params"]["up"])
    sparse, own = snn.sparsify(model, variables, 0.5, x, where="up")
    close(own["params"]["up"]["values"], nn.sparsify(twin, 0.5).values[...])
    assert set(own["structure"]) == {"up"} and "kernel" in own["params"]["head"]
    loss = lambda params: jnp.sum(sparse.apply({**own, "params": params}, x))
    assert jax.jit(jax.grad(loss))(own["params"])["up"]["values"].shape == (32,)
    with pytest.raises(ValueError, match="expected a Dense, DenseGeneral, Einsum or Conv"):
        snn.sparsify(model, variables, 0.5, x, where="none")
    layer = snn.SparseLinear(8, 0.5, format=CVS(4), **FLOAT64)
    W = prune(normal(8, 8), CVS(4), sparsity=0.8)
    made = layer.set_weight(layer.init(jax.random.key(0), x), W)
    close(layer.apply(made, x), x @ W.todense().T)
    with pytest.raises(ValueError, match="A: expected the layer's shape and format"):
        layer.set_weight(made, prune(normal(8, 6), CVS(4), sparsity=0.5))


def test_wrong_arguments_are_named():
    layer = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="model must be an nnx.Module, got int"):
        nn.sparsify(3, 0.5)
    with pytest.raises(ValueError, match="scope: expected 'layer' or 'global', got 'all'"):
        nn.sparsify(layer, 0.5, scope="all")
    with pytest.raises(ValueError, match="sparsity: expected a number from 0 to 1, got 2"):
        nn.sparsify(layer, 2)
    with pytest.raises(ValueError, match="size of a layer depends on them; call it outside jit"):
        nnx.jit(lambda layer: nn.sparsify(layer, 0.5, scope="global"))(layer)
    further = r"layer.set_weight\(prune\(.* and to_dense\(\) gives the dense one"
    with pytest.raises(ValueError, match=f"got none in SparseLinear; .*{further}"):
        nn.sparsify(nn.sparsify(layer, 0.5), 0.8)
    with pytest.raises(TypeError, match=f"got SparseLinear; .*{further}"):
        nn.SparseLinear.from_dense(nn.sparsify(layer, 0.5), 0.8)
    for arguments in ((None, (8, 2)), (None, (8, 2), (2,))):
        with pytest.raises(NotImplementedError, match="einsum_str: expected its text .* got None"):
            nn.SparseEinsum(*arguments, sparsity=0.5, rngs=nnx.Rngs(0))
    odd = nnx.Einsum("ai,ij->a", (6, 8), rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="no product of a matrix"):
        nn.sparsify(odd, 0.5)
    masked = nnx.Conv(2, 2, 3, mask=jnp.ones((3, 2, 2)), rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="mask"):
        nn.sparsify(masked, 0.5)
    grouped = nnx.Conv(6, 8, 3, feature_group_count=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"BCSR\(2, 2\) does not divide the 2 blocks of \[4, 9\]"):
        nn.sparsify(grouped, 0.5, format=BCSR(2, 2))
    stem = nnx.Sequential(layer, grouped)
    words = r"sparsify: layers/1: format: CVS\(8\) does not divide .* where=lambda path, layer"
    with pytest.raises(ValueError, match=words):
        nn.sparsify(stem, 0.5, format=CVS(8))
    assert type(stem.layers[0]) is nnx.Linear
    with pytest.raises(ValueError, match=r"inputs must have shape \[..., 6\], got \[5, 7\]"):
        nn.sparsify(grouped, 0.5)(jnp.ones((5, 7), jnp.float32))
    general = nn.SparseLinearGeneral((4, 3), 5, axis=(-2, -1), sparsity=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"inputs must have shape \[\?, 4, 3\], got \[2, 3, 4\]"):
        general(jnp.ones((2, 3, 4), jnp.float32))
    with pytest.raises(TypeError, match="layer must be an nnx.Conv, got Linear"):
        nn.SparseConv.from_dense(layer, 0.5)
