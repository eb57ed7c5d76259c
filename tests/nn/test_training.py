"""Models of sparse layers as one trains them: optimizers, devices, checkpoints, and no Flax."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgap_jax import CVS, masks, nn
from sgap_jax.nn import linen as snn
from sgap_jax.nn import selection

ROOT = Path(__file__).resolve().parents[2]

MODEL = """
import jax, jax.numpy as jnp
from flax import nnx
from sgap_jax import CVS, nn

class Model(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.up = nn.SparseLinear(8, 16, sparsity=0.5, format=CVS(8), rngs=rngs)
        self.down = nn.SparseLinear(16, 4, sparsity=0.75, rngs=rngs)
        self.masked = nn.MaskedLinear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.masked(self.down(jax.nn.relu(self.up(x))))
"""
exec(MODEL)


@pytest.fixture(autouse=True)
def _as_optax_wants():
    with jax.numpy_dtype_promotion("standard"):
        yield


def batch(n=6):
    return jnp.asarray(np.random.default_rng(0).standard_normal((n, 8)), jnp.float32)


def loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


@nnx.jit
def train_step(model, optimizer, x):
    value, gradient = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, gradient)
    return value


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), a, b)


# ---- optimizers ---------------------------------------------------------------------------------


def test_values_are_trained_and_the_structure_is_not():
    model = Model(0)  # noqa: F821
    optimizer = nnx.Optimizer(model, optax.adamw(3e-2), wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.state(model, nn.Structure))
    first, *_, last = [train_step(model, optimizer, batch()) for _ in range(100)]
    assert last < 0.1 * first
    same(nnx.state(model, nn.Structure), before)
    moments = nnx.state(optimizer, nnx.optimizer.OptState)
    sizes = {leaf.size for leaf in jax.tree.leaves(moments)}
    assert model.up.weight.nnz in sizes and 8 * 16 not in sizes


def test_weight_decay_by_a_mask_over_the_parameters():
    model = Model(0)  # noqa: F821
    matrices = lambda params: jax.tree.map_with_path(
        lambda path, _: "bias" not in jax.tree_util.keystr(path), params
    )
    decay = optax.add_decayed_weights(0.5, mask=matrices)
    model.up.bias[...] = jnp.ones(16, jnp.float32)
    optimizer = nnx.Optimizer(model, optax.chain(decay, optax.sgd(1.0)), wrt=nnx.Param)
    values, bias = jnp.copy(model.up.values[...]), jnp.copy(model.up.bias[...])
    zero = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    optimizer.update(model, zero)
    close((model.up.values[...], model.up.bias[...]), (values / 2, bias))


# ---- devices ------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def test_batch_over_devices_by_shard_map(mesh):
    graph, params, rest = nnx.split(Model(0), nnx.Param, ...)  # noqa: F821

    def local(params, rest, x):
        return jax.lax.pmean(loss(nnx.merge(graph, params, rest), x), "x")

    over = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=P())
    whole = lambda params, rest, x: loss(nnx.merge(graph, params, rest), x)
    got = jax.jit(jax.value_and_grad(over))(params, rest, batch())
    close(got, jax.value_and_grad(whole)(params, rest, batch()))


def test_sharded_parameters(mesh):
    model, twin = Model(0), Model(0)  # noqa: F821
    x = batch()
    spread = lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("x")))
    for layer in (model.up, model.down):
        assert layer.values.shape[0] % 2 == 0
        layer.values[...] = spread(layer.values[...])
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    other = nnx.Optimizer(twin, optax.adam(1e-2), wrt=nnx.Param)
    for _ in range(3):
        close(train_step(model, optimizer, spread(x)), train_step(twin, other, x))
    close(nnx.state(model), nnx.state(twin))
    assert len(model.up.values[...].sharding.device_set) == 2


BAND = masks.band(16, 4)
WIDTHS = dict(qkv_features=8, out_features=8)


def test_heads_over_devices_by_annotations(mesh):
    """Flax's annotations of nnx parameters: one all-reduce, that of the output projection."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 16, 8)), jnp.float32)

    def made(**options):
        size = dict(num_heads=2, in_features=8, decode=False, pattern=BAND, **WIDTHS)
        return nnx.split(nn.SparseMultiHeadAttention(**size, rngs=nnx.Rngs(0), **options))

    loss = lambda graph: lambda state, x: jnp.mean(nnx.merge(graph, state)(x) ** 2)
    graph, state = made()
    expected = loss(graph)(state, x)
    with jax.set_mesh(mesh):
        graph, state = made(
            kernel_metadata={"out_sharding": (None, "x", None)},
            bias_metadata={"out_sharding": ("x", None)},
            out_kernel_metadata={"out_sharding": ("x", None, None)},
            out_bias_metadata={"out_sharding": (None,)},
        )
        assert state["query"]["kernel"][...].sharding.spec == P(None, "x", None)
        run = jax.jit(loss(graph))
        close(run(state, x), expected)
        text = run.lower(state, x).compile().as_text()
    assert text.count(" all-reduce(") == 1 and "all-gather" not in text


def test_keys_selected_in_a_split_batch(monkeypatch):
    """Each device selects for its sequences, by the kernel of long ones; gradients alone travel."""
    monkeypatch.setattr(selection, "_LEAST_ROWS", 1)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 16, 8)), jnp.float32)
    size = dict(num_heads=2, in_features=8, top_k=4, index_heads=2, index_features=4, **WIDTHS)
    layer = nn.TopKSparseAttention(**size, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    loss = lambda params, x: jnp.mean(nnx.merge(graph, params, rest)(x) ** 2)
    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spread = jax.device_put(x, P("x"))
        compiled = jax.jit(jax.value_and_grad(loss)).lower(params, spread).compile()
        close(compiled(params, spread), expected)
    text = compiled.as_text()
    assert "top_k_indexer" in text and " all-reduce(" in text
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)


def test_heads_over_devices_by_linens_partitioning(mesh):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 16, 8)), jnp.float32)
    init = linen.initializers.lecun_normal()
    layer = snn.SparseMultiHeadAttention(num_heads=2, **WIDTHS, use_bias=False)
    expected = layer.apply(layer.init(jax.random.key(0), x, pattern=BAND), x, pattern=BAND)
    layer = layer.clone(
        kernel_init=linen.with_partitioning(init, (None, "x", None)),
        out_kernel_init=linen.with_partitioning(init, ("x", None, None)),
    )
    boxed = layer.init(jax.random.key(0), x, pattern=BAND)
    specs = linen.get_partition_spec(boxed)
    assert specs["params"]["query"]["kernel"] == P(None, "x", None)
    put = lambda value, spec: jax.device_put(value, NamedSharding(mesh, spec))
    variables = jax.tree.map(put, linen.unbox(boxed), specs)
    run = jax.jit(lambda variables, x: layer.apply(variables, x, pattern=BAND))
    close(run(variables, x), expected)
    text = run.lower(variables, x).compile().as_text()
    assert text.count(" all-reduce(") == 1 and "all-gather" not in text


def test_outputs_over_devices_by_shard_map(mesh):
    """Each device has its own rows of W: layers stacked along a mapped axis."""

    @nnx.vmap
    def stacked(key):
        return nn.SparseLinear(8, 16, sparsity=0.5, format=CVS(8), rngs=nnx.Rngs(key))

    graph, state = nnx.split(stacked(jax.random.split(jax.random.key(0), 2)))

    def local(state, x):
        return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))(x)

    specs = dict(in_specs=(P("x"), P()), out_specs=P(None, "x"))
    over = jax.shard_map(local, mesh=mesh, **specs)
    parts = [nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], state))(batch()) for i in (0, 1)]
    close(jax.jit(over)(state, batch()), jnp.concatenate(parts, axis=1))


# ---- checkpoints --------------------------------------------------------------------------------


def in_a_new_process(script, folder):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_checkpoint_restored_in_a_new_process(tmp_path):
    model = Model(0)  # noqa: F821
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for _ in range(3):
        train_step(model, optimizer, batch())
    model.masked.prune_step(0.5)
    # Entries elsewhere than where a new layer of that seed has them.
    model.up = nn.SparseLinear.from_dense(nnx.Linear(8, 16, rngs=nnx.Rngs(9)), 0.5, format=CVS(8))
    state = nnx.to_pure_dict(nnx.state(model))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", state)
    np.save(tmp_path / "x.npy", batch())
    script = f"""{MODEL}
import numpy as np, orbax.checkpoint as ocp
model = nnx.eval_shape(lambda: Model(1))
graph, abstract = nnx.split(model)
with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore({str(tmp_path / "model")!r}, nnx.to_pure_dict(abstract))
nnx.replace_by_pure_dict(abstract, restored)
model = nnx.merge(graph, abstract)
np.save({str(tmp_path / "y.npy")!r}, model(np.load({str(tmp_path / "x.npy")!r})))
model.up.weight.checked(), model.down.weight.checked()
print(float(model.masked.sparsity))
"""
    assert in_a_new_process(script, tmp_path) == "0.5\n"
    same(np.load(tmp_path / "y.npy"), np.asarray(model(batch())))


ATTENTION = """
from sgap_jax import CSR, masks

def attention(seed):
    # As many entries for any seed, elsewhere; a pattern for each head.
    some = [lambda i, j: (i + j + seed) % 3 == 0, lambda i, j: (i // 8 + j + seed) % 3 == 0]
    formats = zip(some, (CSR, CVS(8)), strict=True)
    patterns = [masks.from_function(f, 24, format=format) for f, format in formats]
    return nn.SparseSelfAttention(2, 8, pattern=patterns, rngs=nnx.Rngs(seed))
"""


def test_patterns_of_attention_are_restored_in_a_new_process(tmp_path):
    exec(MODEL + ATTENTION, names := {})
    layer, x = names["attention"](0), np.asarray(batch(24))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.to_pure_dict(nnx.state(layer)))
    np.save(tmp_path / "x.npy", x)
    script = f"""{MODEL}{ATTENTION}
import numpy as np, orbax.checkpoint as ocp
new = attention(1)
graph, state = nnx.split(new)
with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore({str(tmp_path / "layer")!r}, nnx.to_pure_dict(state))
nnx.replace_by_pure_dict(state, restored)
x, layer = np.load({str(tmp_path / "x.npy")!r}), nnx.merge(graph, state)
np.save({str(tmp_path / "y.npy")!r}, layer(x))
for pattern in layer.pattern:
    pattern.checked()
"""
    in_a_new_process(script, tmp_path)
    same(np.load(tmp_path / "y.npy"), np.asarray(layer(x)))
    assert (np.asarray(names["attention"](1)(x)) != np.asarray(layer(x))).any()


# ---- without Flax -------------------------------------------------------------------------------


def test_the_package_does_without_flax():
    script = """
import sys
sys.modules["flax"] = None  # as where it is not installed
import sgap_jax
try:
    import sgap_jax.nn
except ImportError as error:
    assert type(error) is ImportError
    print(error)
try:
    import sgap_jax.nn.linen
except ImportError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    message = "sgap_jax.nn needs flax: pip install 'sgap_jax[nn]'\n"
    assert done.stdout == 2 * message


def test_importing_the_package_does_not_import_flax():
    script = "import sys, sgap_jax; sys.exit('flax' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=environment)
    assert done.returncode == 0
