"""`GraphConv` and `GraphAttention` against NumPy, in every transformation of JAX and Flax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

from sgap_jax import BCSR, COO, CSC, CSR, CVS, SparseArray, graphs, nn

N, IN, OUT = 11, 6, 5


def directed(seed=0):
    rng = np.random.default_rng(seed)
    A = np.where(rng.random((N, N)) < 0.3, rng.random((N, N)) + 0.5, 0)
    A[4] = 0  # no neighbours
    return A


def features(*leading, seed=1):
    return np.random.default_rng(seed).standard_normal((*leading, N, IN))


def bag_of_words():
    X = features(seed=2)
    return np.where(np.random.default_rng(3).random(X.shape) < 0.4, X, 0)


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), a, b)


# ---- adjacency matrices -------------------------------------------------------------------------


@pytest.mark.parametrize("format", [CSR, CSC, COO, CVS(2), BCSR(3, 2)])
@pytest.mark.parametrize("self_loops", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_normalized_adjacency(format, self_loops, symmetric):
    A = directed()
    A = A + A.T if symmetric else A
    whole = A + np.eye(N) if self_loops else A
    rows, columns = whole.sum(1), whole.sum(0)
    with np.errstate(divide="ignore"):
        left, right = (np.where(d > 0, d**-0.5, 0) for d in (rows, columns))
    G = nn.normalize_adjacency(SparseArray.from_dense(A, format=format), self_loops=self_loops)
    assert G.format == CSR and G.dtype == np.float64
    G.checked()
    close(G.todense(), left[:, None] * whole * right)
    if symmetric and self_loops:  # the eigenvalues lie in (-1, 1]
        assert np.linalg.eigvalsh(G.todense()).max() == pytest.approx(1)


def test_self_loops():
    A = directed()
    A[2, 2] = 3
    looped = nn.add_self_loops(SparseArray.from_dense(A))
    close(looped.todense(), A + np.eye(N))
    assert looped.nnz == np.count_nonzero(A + np.eye(N))
    B = SparseArray.from_dense(A)
    gradient = jax.grad(lambda v, B: jnp.sum(nn.add_self_loops(B.with_values(v)).values ** 2))
    rows, columns = B.coordinates()
    expected = 2 * (B.values + (rows == columns).astype(B.dtype))
    close(jax.jit(gradient)(B.values, B), expected)
    close(jax.jit(lambda v: gradient(v, B))(B.values), expected)
    bools = SparseArray.from_dense(A != 0)
    for function in (nn.add_self_loops, jax.jit(nn.add_self_loops)):
        close(function(bools).todense(), (A != 0) | np.eye(N, dtype=bool))
    ints = nn.add_self_loops(SparseArray.from_dense((A != 0).astype(np.int32)))
    assert ints.dtype == np.int32
    close(ints.todense(), (A != 0) + np.eye(N))


def test_edges_follow_self_loops():
    """Vectors of edges and of loops in the order of the result; edges that repeat stay apart."""
    edge_index = np.array([[0, 1, 1, 2, 0, 3], [1, 1, 0, 3, 1, 0]])  # 0 -> 1 twice, a loop at 1
    A, order = graphs.from_edges(edge_index, num_nodes=4, duplicates="keep", return_perm=True)
    ids = np.concatenate([np.arange(6)[order], 10 + np.arange(4)])  # of edges, then of loops
    ends = {e: (t, s) for e, (s, t) in enumerate(edge_index.T)} | {10 + i: (i, i) for i in range(4)}
    add = functools.partial(nn.add_self_loops, return_perm=True)
    for looped, perm in (add(A), add(A, remaining=True), jax.jit(add)(A)):
        assert perm.dtype == np.int32 and perm.shape == (looped.nnz,)
        count = 6 + 3  # node 1 has a loop
        found = ids[np.asarray(perm)[:count]]
        assert sorted(found) == [*range(6), 10, 12, 13]
        rows, columns = (np.asarray(x)[:count] for x in looped.coordinates())
        assert [ends[e] for e in found] == list(zip(rows, columns, strict=True))
    with pytest.raises(ValueError, match="return_perm"):
        add(A, return_perm="yes")


def test_normalization_of_pyg():
    """`gcn_norm` as PyG has it, on edges: a directed graph with loops and edges that repeat."""
    sources, targets = np.random.default_rng(3).integers(0, 9, (2, 40))
    weights = np.random.default_rng(4).random(40) + 0.1
    A = graphs.from_edges([sources, targets], weights, num_nodes=9, duplicates="keep", dtype=float)
    missing = np.setdiff1d(np.arange(9), sources[sources == targets])
    assert 0 < len(missing) < 9
    sources, targets = np.append(sources, missing), np.append(targets, missing)
    weights = np.append(weights, np.ones(len(missing)))
    root = np.bincount(targets, weights, 9) ** -0.5
    expected = np.zeros((9, 9))
    np.add.at(expected, (targets, sources), root[sources] * weights * root[targets])
    own = lambda A: nn.normalize_adjacency(A, self_loops="remaining", degrees="rows")
    close(own(A).todense(), expected)
    close(jax.jit(own)(A).todense(), expected)
    assert own(A).nnz == 40 + len(missing)
    for wrong in ({"self_loops": "all"}, {"degrees": "columns"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
            nn.normalize_adjacency(A, **wrong)


def test_adjacency_under_jit():
    """Of a traced structure with room for every loop, of one that is captured as it is outside."""
    A = directed()
    A[2, 2] = 3
    A = SparseArray.from_dense(A, format=CVS(2))
    stored = A.asformat(CSR)

    def both(A):
        return nn.add_self_loops(A), nn.normalize_adjacency(A)

    outside = both(A)
    for traced, want in zip(jax.jit(both)(A), outside, strict=True):
        assert traced.format == CSR and traced.nnz == stored.nnz + N
        close(traced.checked().todense(), want.todense())
        close(traced.T.asformat(CSC).todense(), want.todense().T)
    captured = jax.jit(lambda values: both(A.with_values(values)))(A.values)
    for inside, want in zip(captured, outside, strict=True):
        close(jax.tree.leaves(inside.checked()), jax.tree.leaves(want))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    scaled = lambda s: nn.add_self_loops(A * s[0]).todense()[None]
    sharded = jax.shard_map(scaled, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    alone = nn.add_self_loops(A).todense()
    close(sharded(jnp.ones(2)), jnp.stack([alone, alone]))  # eagerly


@pytest.mark.parametrize("self_loops", [True, False])
def test_edge_weights_of_explicit_sharding(self_loops):
    A = SparseArray.from_coordinates([(0, 1), (1, 1), (2, 0), (2, 3)], jnp.arange(1.0, 5), (4, 4))
    f = lambda A: nn.normalize_adjacency(A, self_loops=self_loops).todense()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        B = A.with_values(jax.device_put(A.values, jax.P("x")))
        close(f(B), f(A))
        close(jax.jit(f)(B), f(A))  # of a structure that is traced
        close(jax.jit(lambda v: f(A.with_values(v)))(B.values), f(A))


def test_normalization_is_differentiable_in_the_edge_weights():
    A = SparseArray.from_dense(directed())
    normalized = jax.jit(lambda v: nn.normalize_adjacency(A.with_values(v)).values)
    check_grads(normalized, (A.values,), order=2, eps=1e-5)


def test_padding_stays_out():
    A = SparseArray.from_dense(directed())
    index = lambda x: jnp.append(x, jnp.zeros(3, x.dtype))
    padded = SparseArray.from_arrays(
        jnp.append(A.values, jnp.full(3, jnp.nan)),
        A.row_offsets,
        index(A.column_indices),
        shape=A.shape,
    )
    for options in (dict(), dict(self_loops=False)):
        normalize = lambda A, options=options: nn.normalize_adjacency(A, **options)
        close(normalize(padded).todense(), normalize(A).todense())
    inside = jax.jit(nn.normalize_adjacency)(padded)
    close(inside.todense(), nn.normalize_adjacency(A).todense())


def test_half_precision_sums_in_float32():
    # In float16 a sum of ones stays at 2048.
    star = np.stack([np.zeros(3000, int), np.arange(3000)], axis=1)
    A = SparseArray.from_coordinates(star, np.ones(3000, np.float16), (3000, 3000))
    G = nn.normalize_adjacency(A, self_loops=False)
    assert G.dtype == jnp.float16
    np.testing.assert_allclose(G.values.astype(np.float32), 3000**-0.5, rtol=1e-3)


# ---- graph convolution --------------------------------------------------------------------------


def graph():
    return nn.normalize_adjacency(SparseArray.from_dense(directed()))


def convolution(outputs=OUT, **options):
    options = dict(param_dtype=jnp.float64, bias_init=nnx.initializers.normal()) | options
    return nn.GraphConv(IN, outputs, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("outputs", [3, 9])  # W first, G first
@pytest.mark.parametrize("leading", [(), (4,), (2, 0), (2, 3)])
def test_convolution(outputs, leading):
    layer, X = convolution(outputs), features(*leading)
    expected = np.asarray(graph().todense()) @ (X @ np.asarray(layer.kernel[...]))
    close(layer(graph(), X), expected + np.asarray(layer.bias[...]))


@pytest.mark.parametrize("format", [CSR, CSC, CVS(4)])
def test_convolution_of_sparse_features(format):
    layer, X = convolution(), bag_of_words()
    close(layer(graph(), SparseArray.from_dense(X, format=format)), layer(graph(), X))


def test_convolution_from_one_set_of_nodes_to_another():
    G = SparseArray.from_dense(directed()[:4])
    close(convolution(use_bias=False)(G, features()).shape, (4, OUT))


@pytest.mark.parametrize("outputs", [3, 9])
def test_gradients_of_the_convolution(outputs):
    split, params = nnx.split(convolution(outputs))
    G = graph()

    def apply(params, edges, x):
        return nnx.merge(split, params)(G.with_values(edges), x)

    operands = (params, G.values, jnp.asarray(features()))
    check_grads(jax.jit(apply), operands, order=2, modes=["fwd", "rev"], eps=1e-5)


def test_dtypes_of_the_convolution():
    G, X = graph().astype(jnp.float32), jnp.asarray(features(), jnp.float32)
    assert convolution(param_dtype=jnp.float32)(G, X).dtype == jnp.float32
    half = convolution(param_dtype=jnp.float32, dtype=jnp.bfloat16)(G, X)
    assert half.dtype == jnp.bfloat16
    want = convolution(param_dtype=jnp.float32)(G, X)
    np.testing.assert_allclose(half.astype(np.float32), want, atol=abs(want).max() / 64)


# ---- graph attention ----------------------------------------------------------------------------


def attention(**options):
    options = dict(heads=3, param_dtype=jnp.float64, bias_init=nnx.initializers.normal()) | options
    return nn.GraphAttention(IN, OUT, rngs=nnx.Rngs(0), **options)


def attention_by_hand(layer, A, X):
    """Loops over heads, nodes and neighbours."""
    kernel, to, frm, bias = (
        np.asarray(p[...])
        for p in (layer.kernel, layer.to_attention, layer.from_attention, layer.bias)
    )
    heads = []
    for head in range(layer.heads):
        h = X @ kernel[:, head * OUT : (head + 1) * OUT]
        y = np.zeros((N, OUT))
        for i in range(N):
            near = np.flatnonzero(A[i])
            e = h[i] @ to[head] + h[near] @ frm[head]
            e = np.where(e > 0, e, layer.negative_slope * e)
            p = np.exp(e - e.max(initial=0))
            y[i] = p / (p.sum() or 1) @ h[near]
        heads.append(y)
    return (np.concatenate(heads, 1) if layer.concat else np.mean(heads, 0)) + bias


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention(concat, heads):
    layer, A = attention(concat=concat, heads=heads, negative_slope=0.3), directed()
    S = SparseArray.from_dense(A)
    expected = attention_by_hand(layer, A, features())
    close(layer(S, features()), expected)
    close(layer(S.with_values(jnp.full(S.nnz, jnp.nan)), features()), expected)  # structure only
    close(layer(S.asformat(CSC), features()), expected)
    batch = features(2, 3)
    each = [[attention_by_hand(layer, A, x) for x in row] for row in batch]
    close(layer(S, batch), np.array(each))
    X = bag_of_words()
    close(layer(S, SparseArray.from_dense(X)), attention_by_hand(layer, A, X))


@pytest.mark.parametrize("make", [convolution, attention])
def test_features_of_explicit_sharding(make):
    S, x, layer = SparseArray.from_dense(np.eye(6) + np.eye(6, k=2)), features()[:6], make()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    expected = layer(S, x)
    with jax.set_mesh(mesh):
        close(layer(S, jax.device_put(x, jax.P("x"))), expected)


@pytest.mark.parametrize("leading", [(), (2,), (0,), (2, 0)])
@pytest.mark.parametrize("nodes", [0, 3])
def test_batches_of_none_and_graphs_without_nodes(leading, nodes):
    empty, x = SparseArray.from_dense(np.eye(nodes)), jnp.zeros((*leading, nodes, IN))
    assert convolution()(empty, x).shape == (*leading, nodes, OUT)
    layer = attention(concat=True, heads=2)
    width = layer.bias[...].shape[0]
    assert layer(empty, x).shape == (*leading, nodes, width)


def test_gradients_of_the_attention():
    split, params, rest = nnx.split(attention(concat=False), nnx.Param, ...)
    S = SparseArray.from_dense(directed())
    apply = lambda params, x: nnx.merge(split, params, rest)(S, x)
    operands = (params, jnp.asarray(features()))
    check_grads(jax.jit(apply), operands, order=2, modes=["fwd", "rev"], eps=1e-5)


def test_dropout_of_weights_and_features():
    S = SparseArray.from_dense(np.ones((N, N)))
    X = features()
    layer = attention(heads=1, use_bias=False, dropout_rate=0.5, bias_init=None)
    layer.to_attention[...] = layer.from_attention[...] = jnp.zeros((1, OUT))  # weights 1 / N
    h = X @ layer.kernel[...]
    y = np.asarray(layer(S, X))
    shares = np.linalg.lstsq(np.asarray(h).T, y.T, rcond=None)[0]
    assert np.isfinite(shares).all() and not np.allclose(y, y[0])
    assert not np.allclose(layer(S, X), y)  # another draw
    close(layer(S, X, deterministic=True), np.broadcast_to(h.mean(0), (N, OUT)))
    close(layer(S, X, rngs=nnx.Rngs(7)), layer(S, X, rngs=nnx.Rngs(7)))
    layer.eval()
    close(layer(S, X), layer(S, X, deterministic=True))
    # The mean over many draws is the layer without dropout.
    draw = jax.vmap(lambda key: layer(S, X, deterministic=False, rngs=nnx.Rngs(key)))
    draws, plain = draw(jax.random.split(jax.random.key(0), 4000)), layer(S, X)
    allowed = np.minimum(6 * draws.std(0) / np.sqrt(len(draws)), 0.15)  # six standard errors
    assert (abs(draws.mean(0) - plain) <= allowed).all() and abs(plain).max() > 2 * allowed.max()

    layer = attention(feature_dropout_rate=0.5)
    for x in (X, SparseArray.from_dense(bag_of_words())):
        y = layer(S, x)
        assert not np.allclose(layer(S, x), y)
        assert not np.allclose(layer(S, x, deterministic=True), y)


# ---- both ---------------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs, dropout=0.3):
        options = dict(param_dtype=jnp.float64, rngs=rngs)
        self.first = nn.GraphAttention(IN, 4, heads=2, dropout_rate=dropout, **options)
        self.second = nn.GraphConv(8, 3, **options)

    def __call__(self, graph, x):
        return self.second(graph, jax.nn.elu(self.first(graph, x)))


def test_metadata_and_state():
    options = dict(kernel_metadata=dict(tag="k"), bias_metadata=dict(tag="b"))
    for layer in (convolution(**options), attention(**options)):
        assert (layer.kernel.tag, layer.bias.tag) == ("k", "b")
        # Without dropout there are no keys, which few serializations take.
        leaves = jax.tree.leaves(nnx.state(layer))
        assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float64)}


def test_jit_grad_and_vmap_of_a_network():
    net, G, X = Net(nnx.Rngs(0), dropout=0.0), graph(), jnp.asarray(features())
    loss = lambda net, graph, x: jnp.sum(net(graph, x) ** 2)
    expected = nnx.value_and_grad(loss)(net, G, X)
    close(nnx.jit(nnx.value_and_grad(loss))(net, G, X), expected)
    batch = jnp.stack([X, 2 * X])
    over = nnx.vmap(lambda net, x: net(G, x), in_axes=(None, 0))
    close(over(net, batch), net(G, batch))
    net = Net(nnx.Rngs(0))
    draws = [nnx.jit(lambda net: net(G, X))(net) for _ in range(2)]
    assert not np.allclose(*draws)  # the state of the dropout goes on inside jit


def test_wrong_arguments_are_named():
    A, X = SparseArray.from_dense(directed()), features()
    wide = SparseArray.from_dense(directed()[:4])
    for layer in (convolution(), attention()):
        op = type(layer).__name__
        with pytest.raises(TypeError, match=f"{op}: graph must be a SparseArray"):
            layer(directed(), X)
        with pytest.raises(ValueError, match=rf"{op}: x must have shape \[..., 11, 6\]"):
            layer(A, X[:, :4])
        with pytest.raises(ValueError, match=rf"{op}: x must have shape \[..., 11, 6\]"):
            layer(A, X[:4])
        with pytest.raises(ValueError, match="x must have shape"):
            layer(A, X[0])
    with pytest.raises(ValueError, match=r"expected a pair \(x of those that send"):
        attention()(wide.T, X[:4])
    with pytest.raises(ValueError, match="normalize_adjacency: A must be square"):
        nn.normalize_adjacency(wide)
    with pytest.raises(ValueError, match="add_self_loops: A: expected a square graph, or a block"):
        nn.add_self_loops(wide.T)
    for function in (nn.add_self_loops, nn.normalize_adjacency):
        with pytest.raises(TypeError, match=f"{function.__name__}: A must be a SparseArray"):
            function(directed())
    with pytest.raises(ValueError, match="expected a floating dtype, got int"):
        nn.normalize_adjacency(A.astype(jnp.int32))
    with pytest.raises(ValueError, match="heads must be positive"):
        attention(heads=0)
    for layer in (nn.GraphConv, nn.GraphAttention):
        with pytest.raises(TypeError, match="schedule must be a Schedule"):
            layer(3, 4, schedule=3, rngs=nnx.Rngs(0))
