"""RigL: entries that move, against loops over the groups; moments, and one program for all."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sgap_jax import BCSR, CSR, CVS, SparseArray, nn
from sgap_jax.nn import linen as snn
from sgap_jax.nn import rigl
from sgap_jax.primitives import regrow

M, K = 10, 9  # neither vectors nor blocks divide these
FORMATS = [CSR, CVS(4), BCSR(4, 2)]


def layer_of(format=CSR, sparsity=0.7, seed=0):
    options = dict(sparsity=sparsity, format=format, param_dtype=jnp.float64)
    return nn.SparseLinear(K, M, rngs=nnx.Rngs(seed), **options)


def scores(seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((M, K)))


def groups_of(W):
    """{place in the grid of groups: values}, from the index arrays."""
    offsets, columns = (np.asarray(x) for x in W.index_arrays[1])
    values = np.asarray(W.values).reshape(len(columns), *W.format.block_shape)
    return {
        (row, int(columns[p])): values[p]
        for row in range(len(offsets) - 1)
        for p in range(offsets[row], offsets[row + 1])
    }


def tile_of(format):
    return (*format.block_shape, 1, 1)[:2]


def norm(values):
    if np.isnan(values).any():
        return -np.inf
    return abs(values).item() if values.size == 1 else np.linalg.norm(values)


def by_hand(W, G, fraction):
    """The groups after a step, in loops."""
    height, width = tile_of(W.format)
    before = groups_of(W)
    drop = round(fraction * len(before))

    def magnitude(at):
        values = before[at].reshape(height, width)
        return norm(values[: M - at[0] * height, : K - at[1] * width])

    order = sorted(sorted(before), key=lambda at: -magnitude(at))
    kept = set(order[: len(before) - drop])
    cells = [(i, j) for i in range(-(-M // height)) for j in range(-(-K // width))]
    of = lambda at: norm(
        np.asarray(G)[at[0] * height : (at[0] + 1) * height, at[1] * width : (at[1] + 1) * width]
    )
    grown = sorted((at for at in cells if at not in kept), key=lambda at: -of(at))[:drop]
    zeros = np.zeros(W.format.block_shape)
    return {at: before[at] if at in kept else zeros for at in sorted([*kept, *grown])}


def same(W, want):
    """W has these groups, and valid arrays with its own transpose."""
    found = groups_of(W)
    assert list(found) == list(want)
    for at, values in want.items():
        np.testing.assert_array_equal(found[at], values)
    again = SparseArray.from_arrays(
        W.values, *(np.asarray(x) for x in W.index_arrays[1]), shape=W.shape, format=W.format
    )
    jax.tree.map(np.testing.assert_array_equal, tuple(again.transposed), tuple(W.transposed))


@pytest.mark.parametrize("format", FORMATS)
def test_groups_are_dropped_and_grown_in_one_program(format):
    layer, programs = layer_of(format), []

    @nnx.jit
    def step(layer, G, fraction):
        programs.append(None)
        moved = nn.rigl_step(layer, G, fraction)
        count = layer.values.shape[0]
        return moved(jnp.arange(1, count + 1)), moved(jnp.ones((count, 2)))

    for seed, fraction in enumerate((0.3, 0.0, 1.0, 0.5)):
        before, want = groups_of(layer.weight), by_hand(layer.weight, scores(seed), fraction)
        number, twice = step(layer, scores(seed), jnp.float32(fraction))
        same(layer.weight, want)
        places = list(before)
        for at, old in zip(want, np.asarray(number), strict=True):
            assert old == 0 or places[old - 1] == at
        grown = sum(at not in before or not np.any(values) for at, values in want.items())
        assert (number == 0).sum() == round(fraction * len(before)) and grown >= (number == 0).sum()
        np.testing.assert_array_equal(twice, np.stack(2 * [number > 0], axis=1))
    assert len(programs) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_scores_by_rows_are_those_of_the_whole(format, monkeypatch):
    monkeypatch.setattr(rigl, "_TILE", 5 * K)  # one row of groups, or five, at a time
    whole, rows = layer_of(format), layer_of(format)
    rng = np.random.default_rng(2)
    x, dy = (jnp.asarray(rng.standard_normal((6, size))) for size in (K, M))
    nn.rigl_step(whole, dy.T @ x, 0.4)
    nn.rigl_step(rows, lambda at: dy[:, at].T @ x, 0.4)
    same(rows.weight, groups_of(whole.weight))
    assert list(groups_of(whole.weight)) != list(groups_of(layer_of(format).weight))


def test_ties_nan_and_infinity():
    values = np.zeros((M, K))
    values[0, :4] = [2, np.nan, -2, 2]
    values[1, :2] = [np.inf, 1e-40]
    dense = np.where(np.isnan(values), 1.0, values)
    W = SparseArray.from_dense(dense)
    layer = nn.SparseLinear.from_weight(W.with_values(jnp.asarray(values[dense != 0])))
    G = np.zeros((M, K))
    G[5, 5], G[5, 6], G[6, 0] = np.nan, -np.inf, 1e-300
    want = by_hand(layer.weight, G, 0.5)
    # NaN, the least and the last of equals go; of those without a gradient the first in order grow.
    assert list(want) == [(0, 0), (0, 1), (0, 2), (1, 0), (5, 6), (6, 0)]
    nn.rigl_step(layer, G, 0.5)
    same(layer.weight, want)


def test_norms_of_groups_whose_squares_are_out_of_range():
    @jax.jit
    def step(values, offsets, columns, G, fraction):
        options = dict(shape=(M, K), format=CVS(4))
        W = SparseArray.from_arrays(values, offsets, columns, **options)
        return rigl.regrown("rigl_step", W, G, fraction)[0]

    norms = np.asarray([1e-24, 3e-24, 2e25], np.float32)
    values, zeros, G = np.repeat(norms[:, None], 4, 1), np.zeros((3, 4)), np.zeros((M, K))
    (G[:4, 1], G[4:8, 2], G[4:8, 5]), G[8:, 7] = norms, 4e25
    values, zeros, G = (np.asarray(x, np.float32) for x in (values, zeros, G))
    first = np.asarray([0, 3, 3, 3], np.int32), np.asarray([0, 3, 4], np.int32)
    assert set(groups_of(step(zeros, *first, G, 1 / 3))) == {(0, 0), (0, 3), (2, 7)}
    assert set(groups_of(step(zeros, *first, G, 1.0))) == {(1, 2), (1, 5), (2, 7)}
    places = np.asarray([0, 1, 3, 3], np.int32), np.asarray([1, 2, 5], np.int32)
    assert set(groups_of(step(values, *places, 0 * G, 1 / 3))) == {(0, 0), (1, 2), (1, 5)}


def test_the_greatest_of_any_norms():
    """Against a stable sort; NaN is less than every number."""
    rng, greatest = np.random.default_rng(5), jax.jit(regrow._greatest)
    drawn = [np.abs(rng.standard_normal(700)), rng.integers(0, 4, 700), np.zeros(700)]
    drawn += [np.where(rng.random(700) < 0.3, np.nan, x) for x in drawn]
    drawn += [10.0 ** rng.integers(-44, 38, 700), np.full(700, np.inf), np.full(700, np.nan)]
    for norms, dtype in itertools.product(drawn, (np.float32, np.float64)):
        norms, among = norms.astype(dtype), rng.random(700) < 0.8
        order = np.flatnonzero(among)
        order = order[
            np.argsort(-np.nan_to_num(norms[order], nan=-1.0, posinf=np.inf), stable=True)
        ]
        for count in (0, 1, 2, 200, len(order) - 1, len(order)):
            found = greatest(norms, among, np.int32(count))
            np.testing.assert_array_equal(np.flatnonzero(found), np.sort(order[:count]))


class TwoCalls(nnx.Module):
    """A layer that is called twice, with leading axes and without, and one within a list."""

    def __init__(self, dense=False):
        layers = [layer_of(CSR), layer_of(BCSR(4, 2), seed=2)]
        layers = [layer.to_dense() for layer in layers] if dense else layers
        self.own, self.others = layers[0], nnx.List(layers[1:])
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.tanh(self.own(x)).sum() + (self.own(x[0, 1]) * self.others[0](x[0, 0])).sum()


def test_gradients_in_dense_weights_are_those_of_a_dense_twin():
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 3, K)))
    loss, model = lambda model, x: model(x), TwoCalls()
    want = nnx.grad(loss)(TwoCalls(dense=True), x)
    for of in (nn.dense_gradients, nnx.jit(nn.dense_gradients, static_argnums=0)):
        found = of(loss, model, x)
        assert found.keys() == {("own",), ("others", 0)}
        np.testing.assert_allclose(found["own",], want["own"].kernel[...].T, rtol=1e-12)
        np.testing.assert_allclose(found["others", 0], want["others"][0].kernel[...].T, rtol=1e-12)
    assert model.calls[...] == 0 and model.own.watched is None
    # A penalty of a gradient: the dense weight's part in the gradient in x counts too.
    penalty = lambda model, x: jnp.square(jax.grad(lambda x: loss(model, x))(x)).sum()
    layer, x = layer_of(CSR), x[0]
    loss = lambda layer, x: jnp.tanh(layer(x)).sum()
    want = nnx.grad(penalty)(layer.to_dense(), x).kernel[...].T
    np.testing.assert_allclose(nn.dense_gradients(penalty, layer, x)[()], want, rtol=1e-12)
    # Layers that are stacked, and scanned over.
    make = nnx.vmap(lambda key: nn.SparseLinear(4, 4, sparsity=0.5, rngs=nnx.Rngs(key)))
    scan = nnx.scan(lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    layers, x = make(jax.random.split(jax.random.key(0), 3)), jnp.ones((2, 4), jnp.float32)
    found = nn.dense_gradients(lambda layers, x: scan(layers, x).sum(), layers, x)[()]
    dense = lambda weights: jax.lax.scan(lambda x, W: (jnp.tanh(x @ W.T), None), x, weights)[0]
    weights = jax.vmap(lambda A: A.todense())(layers.weight)
    np.testing.assert_allclose(found, jax.grad(lambda W: dense(W).sum())(weights), rtol=1e-5)
    with pytest.raises(ValueError, match="dense_gradients: model: expected one with an nn.Sparse"):
        nn.dense_gradients(loss, model.own.to_dense(), x)


class Mapped(nnx.Module):
    def __init__(self):
        self.one, options = layer_of(), dict(sparsity=0.7, param_dtype=jnp.float64)
        make = nnx.vmap(lambda key: nn.SparseLinear(K, M, rngs=nnx.Rngs(key), **options))
        self.layers = make(jax.random.split(jax.random.key(0), 3))


def test_gradients_in_dense_weights_where_the_loss_maps():
    """Over the inputs, over gradients in them, and over layers that share their inputs."""
    rng = np.random.default_rng(3)
    shapes = (5, K), (5, K), (5, M), (3, 5, M)
    x, t, u, v = (jax.device_put(rng.standard_normal(shape)) for shape in shapes)
    share = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))

    def loss(model):
        slopes = jax.vmap(lambda x, u: jax.grad(lambda x: jnp.vdot(u, model.one(x)))(x))(x, u)
        of_one = jnp.vdot(u, jax.vmap(model.one)(x)) + jnp.vdot(t, slopes)
        return of_one + jnp.vdot(v, share(model.layers, x))

    found = nnx.jit(lambda: nn.dense_gradients(loss, Mapped()))()
    np.testing.assert_allclose(found["one",], u.T @ (x + t), rtol=1e-12)
    np.testing.assert_allclose(found["layers",], np.moveaxis(v, 1, 2) @ x, rtol=1e-12)


def test_gradients_in_dense_weights_of_forward_derivatives():
    """Which custom_vjp refuses; and the passes are those of the sparse model: of the products with
    a dense weight only that of its gradient is computed."""
    rng = np.random.default_rng(3)
    layer, x, dx = layer_of(), *(jax.device_put(rng.standard_normal((5, K))) for _ in range(2))

    def loss(layer, x):
        return jnp.square(jax.jvp(lambda x: jnp.tanh(layer(x)), (x,), (dx,))[1]).sum()

    found = nnx.jit(nn.dense_gradients, static_argnums=0)(loss, layer, x)[()]
    dense = lambda W: loss(lambda x: x @ W.T + layer.bias[...][None], x)
    want = jax.jit(jax.grad(dense))(layer.weight.todense())
    np.testing.assert_allclose(found, want, rtol=1e-10)
    once = lambda x: nn.dense_gradients(lambda layer, x: jnp.sin(layer(x)).sum(), layer, x)[()]
    assert jax.jit(once).lower(x).as_text().count("dot_general") == 1


def test_gradients_in_dense_weights_inside_shard_map():
    """Of a loss on each device's rows: the sum, as `jax.grad` in what is the same on all."""
    layer, x = layer_of(), jax.device_put(np.random.default_rng(3).standard_normal((6, K)))
    loss = lambda layer, x: jnp.tanh(layer(x)).sum()
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    graph, state = nnx.split(layer)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(jax.P(), jax.P("rows")), out_specs=jax.P())
    def found(state, x):
        return nn.dense_gradients(loss, nnx.merge(graph, state), x)[()]

    want = nnx.grad(loss)(layer.to_dense(), x).kernel[...].T
    np.testing.assert_allclose(found(state, x), want, rtol=1e-10)


@pytest.mark.parametrize(
    "spec",
    [jax.P("x"), jax.P(None, "x"), jax.P("y", "x"), jax.P(None, "x", "y"), jax.P(None, "y", "x")],
)
def test_inputs_that_explicit_mesh_axes_split(spec):
    """A layer and gradients in it and in its dense weight: split by any leading axes, of which
    none is gathered."""
    shape = (3, 2, 2, K)[3 - max(len(spec), 2) :]
    layer, x = layer_of(CVS(4)), np.random.default_rng(3).standard_normal(shape)
    loss = lambda layer, x: jnp.tanh(layer(x)).sum()
    want = jax.grad(loss, 1)(layer, jnp.asarray(x)), nnx.grad(loss)(layer.to_dense(), x)
    mesh = jax.make_mesh((2, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, jax.P(*spec))
        found = jax.jit(jax.grad(loss, 1))(layer, split)
        dense = nn.dense_gradients(loss, layer, split)[()]
        outputs = jax.eval_shape(lambda x: layer(x), split)
    assert outputs.sharding.spec[: len(spec)] == tuple(spec)
    assert found.sharding.spec[: len(spec)] == tuple(spec)
    np.testing.assert_allclose(found, want[0], rtol=1e-10)
    np.testing.assert_allclose(dense, want[1].kernel[...].T, rtol=1e-10)


def test_padding_is_filled_and_unchecked_arrays_take_part_as_they_should():
    @jax.jit
    def step(values, offsets, columns):
        W = SparseArray.from_arrays(values, offsets, columns, shape=(2, 4))
        return rigl.regrown("rigl_step", W, jnp.arange(8.0).reshape(2, 4), 0.0)[0]

    # Columns that are not ascending, twice there or out of range, and an entry of padding.
    columns = jnp.asarray([3, 0, 0, 9, 1, 2], jnp.int32)
    W = step(jnp.arange(1.0, 7.0), jnp.asarray([0, 4, 5], jnp.int32), columns)
    same(W, {(0, 0): 2.0, (0, 3): 1.0, (1, 0): 0.0, (1, 1): 5.0, (1, 2): 0.0, (1, 3): 0.0})


class Model(nnx.Module):
    def __init__(self):
        self.up, self.block = layer_of(CVS(4)), nnx.Dict(up=layer_of(CVS(4), seed=1))


@pytest.mark.parametrize(
    "made, count", [(optax.adam(0.1), 2), (optax.sgd(0.1, momentum=0.9), 1)], ids=["adam", "sgd"]
)
def test_moments_move_along(made, count):
    model = Model()
    with jax.numpy_dtype_promotion("standard"):
        optimizer = nnx.Optimizer(model, made, wrt=nnx.Param)
        loss = lambda model: (
            jnp.sum(jnp.sin(3 * model.up.values[...]))
            + jnp.sum(jnp.sin(3 * model.block["up"].values[...]))
        )
        optimizer.update(model, nnx.grad(loss)(model))
    before = jax.tree.map(jnp.copy, nnx.state(optimizer))
    step = nnx.jit(
        lambda model, optimizer, G: nn.rigl_step(
            model.block["up"], G, 0.5, model=model, optimizer=optimizer
        )(jnp.arange(1, model.up.values.shape[0] + 1))
    )
    places = np.asarray(step(model, optimizer, scores()))
    old, new = (nnx.to_flat_state(state) for state in (before, nnx.state(optimizer)))
    moved = 0
    for (path, a), (_, b) in zip(old, new, strict=True):
        a, b = np.asarray(a[...]), np.asarray(b[...])
        if path[-3:] == ("block", "up", "values"):
            want = np.where((places > 0)[:, None], a[places - 1], 0)
            np.testing.assert_array_equal(b, want)
            assert a.any() and (a != b).any()
            moved += 1
        else:
            np.testing.assert_array_equal(a, b)
    assert moved == count


@pytest.mark.parametrize("format", FORMATS)
def test_linen(format):
    layer = layer_of(format)
    arrays = nnx.to_pure_dict(nnx.state(layer, nn.Structure))["structure"]
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    variables = {"params": params, "structure": {"index_arrays": arrays}}
    step = jax.jit(lambda v, G, f: snn.rigl_step(v, G, f, format=format)[0])
    got = step(variables, scores(), 0.4)
    moved = nn.rigl_step(layer, scores(), 0.4)
    want = nnx.to_pure_dict(nnx.state(layer))
    jax.tree.map(
        np.testing.assert_array_equal,
        (got["params"], got["structure"]["index_arrays"]),
        ({name: want[name] for name in params}, want["structure"]),
    )
    other = snn.rigl_step(variables, scores(), 0.4, format=format)[1]
    x = jnp.arange(layer.values.shape[0])
    np.testing.assert_array_equal(other(x), moved(x))
    with pytest.raises(ValueError, match="gradient_scores must have 2 dimensions"):
        snn.rigl_step(variables, jnp.ones(3), 0.4, format=format)
    with pytest.raises(ValueError, match=r"has 2 x \d+ groups, got a structure of"):
        snn.rigl_step(variables, jnp.ones((2 * tile_of(format)[0], K)), 0.4, format=format)


def test_layers_without_entries_and_full_ones():
    for sparsity in (1.0, 0.0):
        layer = layer_of(sparsity=sparsity)
        nn.rigl_step(layer, scores(), 0.5)
        assert layer.weight.nnz == round((1 - sparsity) * M * K)
        layer.weight.checked()


def test_wrong_arguments_are_named():
    layer = layer_of()
    with pytest.raises(TypeError, match="rigl_step: layer must be an nn.SparseLinear, got Linear"):
        nn.rigl_step(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), scores(), 0.1)
    for G in (jnp.ones((K, M)), jnp.ones((M, K), int)):
        with pytest.raises(ValueError, match=r"gradient_scores must be floats of shape \[10, 9\]"):
            nn.rigl_step(layer, G, 0.1)
    for none in (None, {("up",): scores()}):
        with pytest.raises(TypeError, match=r'its path, a tuple: scores\["up",\] of model.up'):
            nn.rigl_step(layer, none, 0.1)
    with pytest.raises(ValueError, match=r"floats of shape \[10, 9\], got \[10, 3\]"):
        nn.rigl_step(layer, lambda rows: jnp.ones((rows.shape[0], 3)), 0.1)
    for fraction in (-0.1, 1.5, "all", float("nan")):
        with pytest.raises(ValueError, match="rigl_step: fraction: expected a number from 0 to 1"):
            nn.rigl_step(layer, scores(), fraction)
    with pytest.raises(ValueError, match="fraction: expected a scalar, got shape"):
        nnx.jit(lambda layer, f: nn.rigl_step(layer, scores(), f)(jnp.ones(27)))(layer, jnp.ones(2))
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match="model: expected with the optimizer, got None"):
        nn.rigl_step(model.up, scores(), 0.1, optimizer=optimizer)
    with pytest.raises(ValueError, match="model: expected one that has the layer"):
        nn.rigl_step(layer, scores(), 0.1, model=model, optimizer=optimizer)
    moved = nn.rigl_step(layer, scores(), 0.1)
    with pytest.raises(ValueError, match=r"one element for each of 27 groups, got shape \[3\]"):
        moved(jnp.ones(3))


def test_training_reaches_the_dense_accuracy():
    """Classes depend on 8 of 128 inputs: of 1% of the weights at random places few read these."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4096 + 1024, 128)), jnp.float32)
    directions = jnp.asarray(rng.standard_normal((8, 5)), jnp.float32)
    labels = jnp.argmax(jnp.matmul(x[:, 3:67:8], directions), -1)
    train, held = (x[:4096], labels[:4096]), (x[4096:], labels[4096:])

    class Network(nnx.Module):
        def __init__(self, sparse):
            rngs = nnx.Rngs(0)
            sizes = (128, 64)
            self.up = (
                nn.SparseLinear(*sizes, sparsity=0.99, rngs=rngs)
                if sparse
                else nnx.Linear(*sizes, rngs=rngs)
            )
            self.down = nnx.Linear(64, 5, rngs=rngs)

        def __call__(self, x):
            return self.down(jax.nn.relu(self.up(x)))

    def loss(model, x, labels):
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def accuracy(model):
        return float(jnp.mean(model(held[0]).argmax(-1) == held[1], dtype=jnp.float32))

    @nnx.jit
    def update(model, optimizer, x, labels):
        optimizer.update(model, nnx.grad(loss)(model, x, labels))

    @nnx.jit
    def move(model, optimizer, fraction, x, labels):
        dense = Network(False)
        dense.up, dense.down = model.up.to_dense(), model.down
        scores = nnx.grad(loss)(dense, x, labels).up.kernel[...].T
        nn.rigl_step(model.up, scores, fraction, model=model, optimizer=optimizer)

    fraction, found = optax.cosine_decay_schedule(0.5, 150), {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for name in ("dense", "fixed", "moved"):
            model = Network(name != "dense")
            optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
            for t in range(200):
                at = slice(t % 16 * 256, (t % 16 + 1) * 256)
                batch = [part[at] for part in train]
                if name == "moved" and t % 10 == 0 and t < 150:
                    move(model, optimizer, fraction(t), *batch)
                update(model, optimizer, *batch)
            found[name] = accuracy(model)
        assert model.up.weight.nnz == 82
    assert found["moved"] > found["dense"] - 0.01
    assert found["fixed"] < found["dense"] - 0.1
