"""`SAGEConv`, `GINConv`, `GATv2Conv` and `RGCNConv` against dense NumPy, in nnx and in linen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.test_util import check_grads

from sgap_jax import BCSR, COO, CSC, CSR, SparseArray, aggregate, graphs, info, nn
from sgap_jax.nn import linen as snn

N, IN, OUT = 9, 5, 4
FLOAT64 = dict(param_dtype=jnp.float64)
KEY = jax.random.key(1)


def directed(m=N, n=N, seed=0, density=0.35):
    A = np.random.default_rng(seed).random((m, n)) < density
    A[2] = False  # no neighbours
    return A


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


def close(a, b, **tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 1e-9, "atol": 1e-11} | tolerance),
        a,
        b,
    )


def pure(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def check(layer, twin, graph, x, expected, *more):
    """The layer in nnx, under jit, its gradients, and its linen twin with the same parameters."""
    y = layer(graph, x, *more)
    close(y, expected)
    close(nnx.jit(lambda layer, graph, x: layer(graph, x, *more))(layer, graph, x), expected)
    definition, params = nnx.split(layer, nnx.Param)
    f = lambda params, x: nnx.merge(definition, params)(graph, x, *more)
    check_grads(jax.jit(f), (params, x), order=1, modes=("rev",), rtol=1e-4, atol=1e-4, eps=1e-5)
    shapes = jax.tree.map(jnp.shape, twin.init(KEY, graph, x, *more)["params"])
    own = pure(layer)
    assert jax.tree.map(jnp.shape, own) == shapes
    close(twin.apply({"params": own}, graph, x, *more), expected)


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("shape", [(N, N), (6, N)], ids=["square", "block"])
def test_sage(reduce, shape):
    A, x = directed(*shape), normal(shape[1], IN)
    out = {"mean": 3, "max": 7}.get(reduce, OUT)  # W before and after the messages
    options = dict(reduce=reduce, normalize=reduce == "sum", **FLOAT64)
    layer = nn.SAGEConv(IN, out, rngs=nnx.Rngs(0), **options)
    layer.bias[...] = normal(out, seed=3)
    received = np.zeros((shape[0], IN))
    for i in range(shape[0]):
        if A[i].any():
            received[i] = getattr(np, reduce)(x[A[i]], axis=0)
    W, R, b = (np.asarray(p[...]) for p in (layer.kernel, layer.root, layer.bias))
    y = received @ W + x[: shape[0]] @ R + b
    if reduce == "sum":
        y = y / np.linalg.norm(y, axis=1, keepdims=True)
    graph = SparseArray.from_dense(A.astype(float))
    check(layer, snn.SAGEConv(out, **options), graph, x, y)
    pair = (x, x[: shape[0]])
    close(layer(graph, pair), y)
    batched = layer(graph, np.stack([x, 2 * x]))
    close(batched[0], y)


@pytest.mark.parametrize("train_eps", [False, True])
def test_gin(train_eps):
    A, x = directed(), normal(N, IN)
    network = nnx.Linear(IN, OUT, rngs=nnx.Rngs(0), **FLOAT64)
    options = dict(eps=0.25, train_eps=train_eps)
    layer = nn.GINConv(network, param_dtype=jnp.float64, **options)
    y = (1.25 * x + A @ x) @ np.asarray(network.kernel[...]) + np.asarray(network.bias[...])
    dense = linen.Dense(OUT, **FLOAT64)
    twin = snn.GINConv(dense, param_dtype=jnp.float64, **options)
    check(layer, twin, SparseArray.from_dense(A.astype(float)), x, y)


@pytest.mark.parametrize("format", [CSR, COO], ids=str)
@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("edges", [False, True])
def test_gatv2(edges, concat, format):
    A, x, heads = directed(), normal(N, IN), 3
    of_edges = 2 if edges else None
    options = dict(heads=heads, concat=concat, **FLOAT64)
    shared = not concat
    layer = nn.GATv2Conv(
        *(IN, OUT), edge_features=of_edges, share_weights=shared, rngs=nnx.Rngs(0), **options
    )
    graph = SparseArray.from_dense(A.astype(float), format=format)
    rows, columns = np.nonzero(A)
    f = normal(len(rows), 2, seed=4)
    left = x @ np.asarray(layer.to_kernel[...])
    right = left if shared else x @ np.asarray(layer.from_kernel[...])
    hidden = left[rows] + right[columns]
    if edges:
        hidden = hidden + f @ np.asarray(layer.edge_kernel[...])
    hidden = np.where(hidden > 0, hidden, 0.2 * hidden).reshape(-1, heads, OUT)
    logits = (hidden * np.asarray(layer.attention[...])).sum(-1)
    y = np.zeros((N, heads, OUT))
    for i in range(N):
        own = rows == i
        if own.any():
            p = np.exp(logits[own] - logits[own].max(0))
            p /= p.sum(0)
            y[i] = np.einsum("eh,ehf->hf", p, right[columns[own]].reshape(-1, heads, OUT))
    y = y.reshape(N, -1) if concat else y.mean(1)
    twin = snn.GATv2Conv(OUT, share_weights=shared, **options)
    check(layer, twin, graph, x, y, *([f] if edges else []))


def attention_of_edges(layer, A, x, f, own=None):
    """Loops over nodes and heads of GAT with vectors f of the edges, as PyG's GATConv has it."""
    parameters = {name: np.asarray(p) for name, p in pure(layer).items()}
    kernel, heads = parameters["kernel"], layer.heads
    split = lambda x: x.reshape(*x.shape[:-1], heads, -1)
    h = split(x @ kernel)
    left = h if own is None else split(own @ parameters.get("to_kernel", kernel))
    of_edges = (split(f @ parameters["edge_kernel"]) * parameters["edge_attention"]).sum(-1)
    rows, columns = np.nonzero(A)
    y = np.zeros((len(A), heads, OUT))
    for i in range(len(A)):
        e = (left[i] * parameters["to_attention"]).sum(-1) + of_edges[rows == i]
        e = e + (h[columns[rows == i]] * parameters["from_attention"]).sum(-1)
        p = np.exp(np.where(e > 0, e, 0.2 * e))
        y[i] = np.einsum("eh,ehf->hf", p / np.maximum(p.sum(0), 1e-30), h[columns[rows == i]])
    return y.reshape(len(A), -1) if layer.concat else y.mean(1)


@pytest.mark.parametrize(
    ("format", "concat", "shape"), [(COO, False, (6, N)), (CSC, True, (N, N))], ids=str
)
def test_gat_with_edges(format, concat, shape):
    A, x, options = directed(*shape), normal(shape[1], IN), dict(heads=3, concat=concat, **FLOAT64)
    layer = nn.GraphAttention(IN, OUT, edge_features=2, rngs=nnx.Rngs(0), **options)
    graph = SparseArray.from_dense(A * 1.0, format=format)
    rows, columns = np.nonzero(A)
    f = normal(len(rows), 2, seed=4)
    order = np.lexsort((rows, columns)) if format == CSC else slice(None)
    expected = attention_of_edges(layer, A, x, f)
    check(layer, snn.GraphAttention(OUT, **options), graph, x, expected, f[order])
    others = (x, x[: shape[0]]), SparseArray.from_dense(x)
    run = nnx.jit(lambda layer, f: [layer(graph, x, f) for x in others])
    close(run(layer, f[order]), [expected, expected])


def test_gat_of_a_pair_with_leading_axes():
    """Nodes that send and nodes that receive have other features, and batches share the graph."""
    A = directed(6, N)
    graph, x, own = SparseArray.from_dense(A * 1.0), normal(2, 3, N, IN), normal(3, 6, 2, seed=5)
    layer = nn.GraphAttention((IN, 2), OUT, heads=2, edge_features=1, rngs=nnx.Rngs(0), **FLOAT64)
    f = normal(2, 1, graph.nnz, 1, seed=4)
    run = nnx.jit(lambda layer, *x: layer(graph, x[:2], x[2]))
    y = run(layer, x, own, f)
    for i, j in np.ndindex(2, 3):
        close(y[i, j], attention_of_edges(layer, A, x[i, j], f[i, 0], own[j]))
    close(run(layer, x[0, 0], own[0], f[0, 0, :, 0]), y[0, 0])  # [nnz], as PyG's edge_attr
    twin = snn.GraphAttention(OUT, heads=2, **FLOAT64)
    close(jax.jit(twin.apply)({"params": pure(layer)}, graph, (x, own), f), y)


@pytest.mark.parametrize("kind", [nn.GraphAttention, nn.GATv2Conv])
def test_dtypes_of_layers_with_edges(kind):
    graph, x = SparseArray.from_dense(directed() * 1.0), normal(N, IN).astype(np.float32)
    f = normal(graph.nnz, 2).astype(np.float32)

    def of(param, dtype):
        options = dict(edge_features=2, param_dtype=param, dtype=dtype)
        return lambda x, f: kind(IN, OUT, rngs=nnx.Rngs(0), **options)(graph, x, f)

    y, half = (jax.jit(of(jnp.float32, dtype))(x, f) for dtype in (None, jnp.bfloat16))
    assert (y.dtype, half.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(half.astype(np.float32), y, atol=abs(y).max() / 32)
    wide = jax.eval_shape(of(jnp.float64, None), x.astype(float), f.astype(float))
    assert wide.dtype == jnp.float64


@pytest.mark.parametrize("kind", [nn.GraphAttention, nn.GATv2Conv])
def test_edges_of_samples(kind):
    """The vectors of a sample's edges, with loops whose vectors are means as in PyG, compile once
    and give what the whole graph does."""
    A = directed() & ~np.eye(N, dtype=bool)
    graph, order = graphs.from_edges(np.nonzero(A)[::-1], num_nodes=N, return_perm=True)
    x, f = normal(N, IN), normal(graph.nnz, 2, seed=4)[order]
    layer = kind(IN, OUT, heads=2, edge_features=2, rngs=nnx.Rngs(0), **FLOAT64)

    def with_loops(graph, f):
        looped, perm = nn.add_self_loops(graph, return_perm=True)
        return looped, jnp.concatenate([f, aggregate(graph, f, "mean")])[perm]

    @nnx.jit
    def of_sample(layer, x, f, sample):
        (block,), (entries,) = sample.blocks, sample.positions
        looped, f = with_loops(block, f[entries])
        return layer(looped, x[sample.nodes], f)

    looped, of_all = with_loops(graph, jnp.asarray(f))
    rows, columns = (np.asarray(i) for i in looped.coordinates())
    assert looped.nnz == graph.nnz + N
    for i in range(N):  # PyG's fill_value="mean"
        own = np.asarray(of_all)[(rows == i) & (columns == i)][0]
        near = f[np.asarray(graph.coordinates()[0]) == i]
        close(own, near.mean(0) if len(near) else np.zeros(2))
    expected = nnx.jit(lambda layer, *given: layer(*given))(layer, looped, x, of_all)
    sampler = graphs.NeighborSampler(graph, [-1], 4)
    for seeds, sample in sampler.epoch(np.arange(N)):
        y = of_sample(layer, jnp.asarray(x), jnp.asarray(f), sample)
        close(y[sample.is_seed], expected[seeds][sample.is_seed])


@pytest.mark.parametrize("reduce", ["mean", "max", None])
def test_sparse_features(reduce):
    """A bag of words gives what its dense array does, parameter by parameter."""
    graph = SparseArray.from_dense(directed().astype(float))
    x = np.where(normal(N, IN, seed=2) > 0.3, normal(N, IN), 0)
    words = SparseArray.from_dense(x)
    if reduce is None:
        layer = nn.GATv2Conv(IN, OUT, heads=2, share_weights=True, rngs=nnx.Rngs(0), **FLOAT64)
    else:
        layer = nn.SAGEConv(IN, 7, reduce=reduce, rngs=nnx.Rngs(0), **FLOAT64)
        block = graph[:4]
        close(layer(block, words), layer(block, x))
        close(layer(block, words.asformat("CVS(4)")), layer(block, x))
        network = nn.GINConv(lambda x: x, eps=0.5, param_dtype=jnp.float64)
        close(network(graph, words), network(graph, x))
        close(network(block, (words, words[:4])), network(block, (x, x[:4])))
        counts = (100 * (x > 0)).astype(np.int8)
        close(network(graph, SparseArray.from_dense(counts)), network(graph, counts * 1.0))
    loss = nnx.jit(nnx.value_and_grad(lambda layer, x: (layer(graph, x) ** 2).sum()))
    close(jax.tree.leaves(loss(layer, words)), jax.tree.leaves(loss(layer, x)))


@pytest.mark.parametrize(("concat", "leading"), [(True, (2, 2)), (False, (3,)), (False, (2, 0))])
def test_gatv2_of_leading_axes(concat, leading):
    """Features [..., n, in] over one graph: those of each in turn, of a pair and with edges too."""
    graph = SparseArray.from_dense(directed().astype(float))
    options = dict(heads=2, edge_features=3, concat=concat, rngs=nnx.Rngs(0), **FLOAT64)
    layer, f = nn.GATv2Conv((IN, IN), OUT, **options), normal(graph.nnz, 3, seed=4)
    x, own = normal(*leading, N, IN), normal(N, IN, seed=5)  # which broadcasts
    y = nnx.jit(lambda layer, x: layer(graph, (x, own), f))(layer, x)
    assert y.shape == (*leading, N, 2 * OUT if concat else OUT)
    for place in np.ndindex(leading):
        close(y[place], layer(graph, (x[place], own), f))


def test_gatv2_of_any_batch_in_an_exported_program():
    graph, (b,) = SparseArray.from_dense(directed().astype(float)), jax.export.symbolic_shape("b")
    layer = nn.GATv2Conv(IN, OUT, heads=2, rngs=nnx.Rngs(0), **FLOAT64)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in info()["ffi_targets"]]
    call = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(layer(graph, x))))
    batch = jax.ShapeDtypeStruct((b, N, IN), jnp.float64)
    exported = jax.export.export(jax.jit(call), disabled_checks=allowed)(batch)
    close(*jax.jit(lambda x: (exported.call(x), call(x)))(normal(3, N, IN)))


def test_gatv2_returns_the_vectors_of_edges():
    """What DGL's EGATConv hands on: LeakyReLU(L x[i] + R x[j] + E f[i, j])."""
    A, x, heads = directed(), normal(2, N, IN), 2
    graph, (rows, columns) = SparseArray.from_dense(A * 1.0), np.nonzero(A)
    f = normal(2, graph.nnz, 3, seed=4)
    layer = nn.GATv2Conv(IN, OUT, heads=heads, edge_features=3, rngs=nnx.Rngs(0), **FLOAT64)
    run = nnx.jit(lambda layer, x, f: layer(graph, x, f, return_edges=True))
    y, found = run(layer, x, f)
    L, R, E = (np.asarray(layer.__dict__[f"{name}_kernel"][...]) for name in ("to", "from", "edge"))
    expected = (x @ L)[:, rows] + (x @ R)[:, columns] + f @ E
    close(found, np.where(expected > 0, expected, 0.2 * expected))
    for i in range(2):
        close(run(layer, x[i], f[i]), (y[i], found[i]))
    twin = snn.GATv2Conv(OUT, heads=heads, **FLOAT64)
    apply = jax.jit(lambda params, *given: twin.apply(params, *given, return_edges=True))
    close(apply({"params": pure(layer)}, graph, x, f), (y, found))


@pytest.mark.parametrize(
    ("kind", "twin"), [(nn.GraphAttention, snn.GraphAttention), (nn.GATv2Conv, snn.GATv2Conv)]
)
def test_attention_weights_are_returned(kind, twin):
    """[..., nnz, heads] in the order of the values: Y is the messages that they weigh."""
    A, x, heads = directed(), normal(2, N, IN), 3
    graph = SparseArray.from_dense(A * 1.0, format=CSC)
    rows, columns = (np.asarray(i) for i in graph.coordinates())
    layer = kind(IN, OUT, heads=heads, dropout_rate=0.5, rngs=nnx.Rngs(0), **FLOAT64)
    run = nnx.jit(lambda layer, x: layer(graph, x, return_attention_weights=True))
    sent = layer.kernel if kind is nn.GraphAttention else layer.from_kernel
    for train in (True, False):
        layer.train() if train else layer.eval()
        y, p = run(layer, x)
        assert p.shape == (2, graph.nnz, heads) and bool((p == 0).any()) == train
        messages = p[..., None] * (x @ sent[...])[:, columns].reshape(2, -1, heads, OUT)
        expected = np.zeros((2, N, heads, OUT))
        np.add.at(expected, (slice(None), rows), messages)
        close(y, expected.reshape(2, N, -1))
    sums = np.zeros((2, N, heads))
    np.add.at(sums, (slice(None), rows), p)
    close(sums, np.broadcast_to((A.any(1) * 1.0)[:, None], sums.shape))
    returned = dict(return_attention_weights=True)
    same = jax.jit(
        lambda params: twin(OUT, heads=heads, **FLOAT64).apply(params, graph, x, **returned)
    )
    close(same({"params": pure(layer)}), (y, p))
    if kind is nn.GATv2Conv:
        every = nnx.jit(lambda layer, x: layer(graph, x, return_edges=True, **returned))
        all_three = every(layer, x)
        close((all_three[0], all_three[2]), (y, p))
        assert all_three[1].shape == (2, graph.nnz, heads * OUT)
        return
    with pytest.raises(NotImplementedError, match="return_attention_weights: .*asformat"):
        layer(SparseArray.from_dense(A * 1.0, format=BCSR(3, 3)), x, **returned)


@pytest.mark.parametrize("kind", [nn.GraphAttention, nn.GATv2Conv])
def test_edges_do_not_read_the_padding(kind):
    graph = graphs.from_edges([[0, 1, 2], [1, 2, 0]])
    batch = graphs.batch([graph], nse=6, num_nodes=5).graph
    layer = kind(3, 4, heads=2, edge_features=2, rngs=nnx.Rngs(0), **FLOAT64)
    f = jnp.ones((batch.nnz, 2))
    gradient = nnx.jit(nnx.grad(lambda layer, f: (layer(batch, jnp.ones((5, 3)), f) ** 2).sum()))
    with_nan = jax.tree.leaves(gradient(layer, f.at[3:].set(jnp.nan)))
    for x, y in zip(with_nan, jax.tree.leaves(gradient(layer, f)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_gatv2_drops_weights():
    graph, x = SparseArray.from_dense(directed().astype(float)), normal(N, IN)
    layer = nn.GATv2Conv(IN, OUT, heads=2, dropout_rate=0.5, rngs=nnx.Rngs(0), **FLOAT64)
    dropped = layer(graph, x)
    layer.eval()
    assert not np.allclose(dropped, layer(graph, x))
    close(layer(graph, x), layer(graph, x))


@pytest.mark.parametrize("bases", [None, 2])
def test_rgcn(bases):
    names = ["likes", "knows", "cites"]
    matrices = {name: directed(seed=i) * 1.0 for i, name in enumerate(names)}
    x = normal(N, IN)
    relations = graphs.join_relations(
        {name: SparseArray.from_dense(A) for name, A in matrices.items()}, normalize=True
    )
    layer = nn.RGCNConv(IN, OUT, 3, bases=bases, rngs=nnx.Rngs(0), **FLOAT64)
    W = np.asarray(layer.kernel[...])
    if bases:
        W = np.einsum("rb,bio->rio", np.asarray(layer.coefficients[...]), W)
    y = x @ np.asarray(layer.root[...])
    for r, name in enumerate(names):
        A = matrices[name]
        y = y + A / np.maximum(A.sum(1, keepdims=True), 1) @ x @ W[r]
    check(layer, snn.RGCNConv(OUT, bases=bases, **FLOAT64), relations, x, y)
    products = str(jax.make_jaxpr(lambda x: layer(relations, x))(x)).count("spmm[")
    assert products == 1
    close(layer(relations, SparseArray.from_dense(x)), y)


def test_rgcn_of_leading_axes():
    """Features [..., n, in] of each kind over the same relations, which broadcast: one product."""
    A = {("user", "likes", "item"): directed(4, 7), ("item", "liked", "user"): directed(7, 4)}
    relations = graphs.join_relations({k: SparseArray.from_dense(v * 1.0) for k, v in A.items()})
    layer = nn.RGCNConv({"user": IN, "item": 3}, OUT, relations, rngs=nnx.Rngs(0), **FLOAT64)
    x = {"user": normal(2, 3, 7, IN), "item": normal(3, 4, 3, seed=5)}
    run = nnx.jit(lambda layer, x: layer(relations, x))
    y = run(layer, x)
    close(jax.jit(snn.RGCNConv(OUT, **FLOAT64).apply)({"params": pure(layer)}, relations, x), y)
    for i, j in np.ndindex(2, 3):
        one = run(layer, {"user": x["user"][i, j], "item": x["item"][j]})
        close({kind: y[kind][i, j] for kind in y}, one)
    assert str(jax.make_jaxpr(lambda x: layer(relations, x))(x)).count("spmm[") == 1
    none = run(layer, {"user": x["user"][:0, 0], "item": x["item"][0]})
    assert none["item"].shape == (0, 4, OUT)
    loss = lambda x: sum((v**2).sum() for v in layer(relations, x).values())
    check_grads(jax.jit(loss), (x,), order=1, modes=("rev",), rtol=1e-4, atol=1e-4, eps=1e-5)
    with pytest.raises(ValueError, match=r"x of item must have shape \[..., 4, 3\]"):
        layer(relations, x | {"item": x["item"][:, :2]})
    with pytest.raises(ValueError, match=r"messages of .*: expected shape \[..., 7, d\]"):
        relations.sum(dict.fromkeys(relations.keys, jnp.ones((2, 4, 3))))


def test_rgcn_of_several_kinds_of_nodes():
    likes, liked = directed(4, 7), directed(7, 4, seed=2)
    A = {("user", "likes", "item"): likes, ("item", "liked by", "user"): liked}
    relations = graphs.join_relations({k: SparseArray.from_dense(v * 1.0) for k, v in A.items()})
    x = {"user": normal(7, IN), "item": normal(4, IN, seed=5)}
    layer = nn.RGCNConv(IN, OUT, 2, rngs=nnx.Rngs(0), **FLOAT64)
    W, R = np.asarray(layer.kernel[...]), np.asarray(layer.root[...])
    y = {
        "user": liked @ x["item"] @ W[1] + x["user"] @ R,
        "item": likes @ x["user"] @ W[0] + x["item"] @ R,
    }
    check(layer, snn.RGCNConv(OUT, **FLOAT64), relations, x, y)


def test_rgcn_of_features_by_kind():
    likes, liked, rated = directed(4, 7), directed(7, 4, seed=2), directed(4, 7, seed=3)
    A = {
        ("user", "likes", "item"): likes,
        ("item", "liked by", "user"): liked,
        ("user", "rated", "item"): rated,
    }
    relations = graphs.join_relations({k: SparseArray.from_dense(v * 1.0) for k, v in A.items()})
    x = {"user": normal(7, 6), "item": normal(4, 3, seed=5)}
    for bases in (None, 2):
        layer = nn.RGCNConv(
            {"user": 6, "item": 3}, OUT, relations, bases=bases, rngs=nnx.Rngs(0), **FLOAT64
        )
        V, R = ({k: np.asarray(v[...]) for k, v in m.items()} for m in (layer.kernel, layer.root))
        W = V["user"][0], V["item"][0], V["user"][1]
        if bases:
            c = np.asarray(layer.coefficients[...])
            W = [np.tensordot(c[r], V[k], 1) for r, k in enumerate(("user", "item", "user"))]
        y = {
            "user": liked @ x["item"] @ W[1] + x["user"] @ R["user"],
            "item": likes @ x["user"] @ W[0] + rated @ x["user"] @ W[2] + x["item"] @ R["item"],
        }
        twin = snn.RGCNConv(OUT, bases=bases, **FLOAT64)
        if bases is None:
            check(layer, twin, relations, x, y)
        else:
            close(layer(relations, x), y)
            close(twin.apply({"params": pure(layer)}, relations, x), y)
    assert str(jax.make_jaxpr(lambda x: layer(relations, x))(x)).count("spmm[") == 1
    swapped = graphs.join_relations({k: SparseArray.from_dense(A[k] * 1.0) for k in reversed(A)})
    with pytest.raises(ValueError, match="relations: expected .*'likes'.* got .*'rated'"):
        layer(swapped, x)


def test_pairs_of_features():
    """Nodes that send and nodes that receive have other numbers of features."""
    A = directed(6, N)
    graph, x = SparseArray.from_dense(A * 1.0), (normal(N, IN), normal(6, 3, seed=4))
    layer = nn.SAGEConv((IN, 3), OUT, reduce="sum", rngs=nnx.Rngs(0), **FLOAT64)
    y = A @ x[0] @ np.asarray(layer.kernel[...]) + x[1] @ np.asarray(layer.root[...])
    check(layer, snn.SAGEConv(OUT, reduce="sum", **FLOAT64), graph, x, y)
    layer = nn.GATv2Conv((IN, 3), OUT, rngs=nnx.Rngs(0), **FLOAT64)
    L, R, a = (
        np.asarray(each[...]) for each in (layer.to_kernel, layer.from_kernel, layer.attention)
    )
    hidden = (x[1] @ L)[:, None] + (x[0] @ R)[None]
    weights = np.where(A, np.exp(np.where(hidden > 0, hidden, 0.2 * hidden) @ a[0]), 0)
    y = weights / np.maximum(weights.sum(1, keepdims=True), 1e-30) @ (x[0] @ R)
    check(layer, snn.GATv2Conv(OUT, **FLOAT64), graph, x, y)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda g, x: nn.SAGEConv((3, 4, 5), 2, rngs=nnx.Rngs(0)), ValueError, "or a pair"),
        (lambda g, x: nn.SAGEConv((IN, 3), 2, rngs=nnx.Rngs(0))(g, x), ValueError, "of 5 and 3"),
        (
            lambda g, x: nn.GATv2Conv((IN, 3), 2, share_weights=True, rngs=nnx.Rngs(0)),
            ValueError,
            "share_weights",
        ),
        (
            lambda g, x: nn.RGCNConv({"a": 1}, 2, 3, rngs=nnx.Rngs(0)),
            ValueError,
            "Relations or their keys",
        ),
        (
            lambda g, x: nn.RGCNConv({"a": 1}, 2, [("a", "r", "b")], rngs=nnx.Rngs(0)),
            ValueError,
            "in_features: expected those of 'b'",
        ),
        (lambda g, x: nn.SAGEConv(IN, 2, reduce="prod", rngs=nnx.Rngs(0)), ValueError, "reduce"),
        (lambda g, x: nn.SAGEConv(4, 2, rngs=nnx.Rngs(0))(g, x), ValueError, "x must have shape"),
        (lambda g, x: nn.SAGEConv(IN, 2, rngs=nnx.Rngs(0))(x, x), TypeError, "graph must be"),
        (lambda g, x: nn.SAGEConv(IN, 2, rngs=nnx.Rngs(0))(x, g), TypeError, "the graph first"),
        (lambda g, x: nn.GraphAttention(IN, 2, rngs=nnx.Rngs(0))(x, g), TypeError, "graph first"),
        (
            lambda g, x: nn.GraphConv(IN, 2, rngs=nnx.Rngs(0))(x, np.zeros((2, 7), int)),
            TypeError,
            "graphs.from_edges",
        ),
        (
            lambda g, x: nn.SAGEConv(IN, 2, rngs=nnx.Rngs(0))(g[:, :4], x[:4]),
            ValueError,
            "expected a pair",
        ),
        (lambda g, x: nn.GINConv(lambda x: x)(g, x[:3]), ValueError, "x must have shape"),
        (lambda g, x: nn.GINConv(lambda x: x)(g, g.to_scipy()), TypeError, "from_scipy"),
        (lambda g, x: nn.GATv2Conv(IN, 2, heads=0, rngs=nnx.Rngs(0)), ValueError, "heads must be"),
        (
            lambda g, x: nn.GATv2Conv(IN, 2, rngs=nnx.Rngs(0))(g, x, x),
            ValueError,
            "edges and edge_features",
        ),
        (
            lambda g, x: nn.GraphAttention(IN, 2, edge_features=3, rngs=nnx.Rngs(0))(g, x),
            ValueError,
            "edges and edge_features: expected both",
        ),
        (
            lambda g, x: nn.GraphAttention(IN, 2, edge_features=3, rngs=nnx.Rngs(0))(g, x, x[:, 3]),
            ValueError,
            r"edges must have shape \[..., \d+, 3\], got \[9\]",
        ),
        (
            lambda g, x: nn.GraphAttention(IN, 2, edge_features=1, rngs=nnx.Rngs(0))(
                g.asformat("CVS(3)"), x, x
            ),
            NotImplementedError,
            r"a graph in CSR, CSC or COO, got CVS\(3\)",
        ),
        (
            lambda g, x: nn.GraphAttention(IN, 2, edge_features=0, rngs=nnx.Rngs(0)),
            ValueError,
            "edge_features must be at least 1",
        ),
        (lambda g, x: nn.RGCNConv(IN, 2, 2, rngs=nnx.Rngs(0))(g, x), TypeError, "be Relations"),
        (
            lambda g, x: nn.RGCNConv(IN, 2, 2, rngs=nnx.Rngs(0), **FLOAT64)(
                graphs.join_relations({"a": g}), x
            ),
            ValueError,
            "relations: expected 2",
        ),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call(SparseArray.from_dense(directed() * 1.0), normal(N, IN))
