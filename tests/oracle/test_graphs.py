"""`sgap_jax.graphs` against dense NumPy: lists of edges, batches, subgraphs, samples, relations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSR,
    SparseArray,
    aggregate,
    graphs,
    gsddmm,
    gspmm,
    row_sum,
    sparse_softmax,
)
from sgap_jax.graphs import sampling

FORMATS = [CSR, CSC, COO]


def edges(n, count, seed=0):
    return np.random.default_rng(seed).integers(0, n, (2, count))


def random_graph(n, seed=0, density=0.3, format=CSR):
    rng = np.random.default_rng(seed)
    dense = np.where(rng.random((n, n)) < density, rng.standard_normal((n, n)), 0)
    return SparseArray.from_dense(dense, format=format)


# ---- lists of edges -----------------------------------------------------------------------------


def test_edges_are_summed():
    index, values = edges(7, 60), np.random.default_rng(1).standard_normal(60)
    A, perm = graphs.from_edges(index, values, return_perm=True)
    expected = np.zeros((7, 7))
    np.add.at(expected, (index[1], index[0]), values)
    np.testing.assert_allclose(A.todense(), expected)
    assert A.format == CSR and A.shape == (7, 7) and A.nnz == len(perm) == len(set(perm))
    rows, columns = A.coordinates()
    np.testing.assert_array_equal(index[:, perm], np.stack([columns, rows]))
    np.testing.assert_array_equal(graphs.from_edges(index).values.sum(), 60)
    A.checked()


def test_edges_are_kept():
    """Each edge of a multigraph is an entry: means are over edges, and each has a vector."""
    index, rng = edges(7, 60), np.random.default_rng(1)
    values, V = rng.standard_normal(60), rng.standard_normal((60, 3))
    A, perm = graphs.from_edges(
        index, values, num_nodes=9, duplicates="keep", return_perm=True, dtype=jnp.float64
    )
    assert A.shape == (9, 9) and A.nnz == 60 and len(np.unique(index, axis=1).T) < 60
    np.testing.assert_array_equal(A.values, values[perm])
    X = rng.standard_normal((9, 3))
    count = np.bincount(index[1], minlength=9)[:, None]
    total, of_vectors = np.zeros((9, 3)), np.zeros((9, 3))
    np.add.at(total, index[1], X[index[0]] * values[:, None])
    np.add.at(of_vectors, index[1], X[index[0]] * V)
    np.testing.assert_allclose(gspmm(A, X, reduce="mean"), total / np.maximum(count, 1))
    np.testing.assert_allclose(gspmm(A, X, values=V[perm]), of_vectors)
    np.testing.assert_allclose(A.todense(), graphs.from_edges(index, values, num_nodes=9).todense())
    back = np.zeros((9, 3))
    np.add.at(back, index[0], X[index[1]] * V)
    np.testing.assert_allclose(gspmm(A, X, values=V[perm], transpose=True), back)
    sums = np.zeros((9, 3))
    np.add.at(sums, index[1], V)
    np.testing.assert_allclose(aggregate(A, V[perm]), sums)
    np.testing.assert_allclose(row_sum(A), sums_of(values, index[1], 9))
    P = sparse_softmax(A, values=V[perm])
    np.testing.assert_allclose(aggregate(A, P), (count > 0) * np.ones((9, 3)))
    difference = gsddmm(A, X, X, op="sub", reduce=None)
    np.testing.assert_allclose(difference, (X[index[1]] - X[index[0]])[perm])
    gradient = jax.grad(lambda V: jnp.sum(gspmm(A, X, values=V, reduce="max") ** 2))(V[perm])
    assert np.isfinite(gradient).all() and gradient.shape == (60, 3)


def test_a_multigraph_runs_the_programs_of_a_simple_one():
    """Its entries are known to be in range, so none is looked for that takes no part."""
    index = edges(30, 200)
    simple = graphs.from_edges(index, num_nodes=30)
    places = np.stack(simple.coordinates())[::-1]
    places[:, 1] = places[:, 0]
    A = graphs.from_edges(places, num_nodes=30, duplicates="keep")
    assert A.nnz == simple.nnz and not A.is_checked
    M = jnp.asarray(np.random.default_rng(1).standard_normal((A.nnz, 3)), jnp.float32)
    functions = {
        "lengths": lambda A: (A.row_lengths, A.T.row_lengths),
        "sums": lambda A: aggregate(A, M, transpose=True),
        "means": lambda A: aggregate(A, M, "mean"),
        "largest": lambda A: aggregate(A, M, "max"),
        "softmax": lambda A: sparse_softmax(A, values=M),
        "of rows": lambda A: row_sum(A.T),
        "vectors": lambda A: gsddmm(A, None, M[:30], values=M, op="div", reduce=None),
    }
    for name, f in functions.items():
        assert str(jax.make_jaxpr(f)(A)) == str(jax.make_jaxpr(f)(simple)), name
    messages = lambda A: gspmm(A, M[:30], op="copy", reduce="mean")
    of_simple = str(jax.make_jaxpr(messages)(simple))
    same = str(jax.make_jaxpr(messages)(A)).replace("checked=False", "checked=True")
    assert same == of_simple
    # As of arrays that nobody knows.
    unknown = SparseArray(
        A.values, ((), tuple(A.index_arrays[1])), tuple(A.transposed), A.shape, A.format
    )
    found = jax.jit(lambda A: [f(A) for f in (*functions.values(), messages)])
    for a, b in zip(*(jax.tree.leaves(found(B)) for B in (A, unknown)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def sums_of(values, to, n):
    out = np.zeros(n)
    np.add.at(out, to, values)
    return out


def test_edges_between_two_kinds_of_nodes():
    index = np.array([[0, 4, 2], [1, 0, 1]])
    A = graphs.from_edges(index, num_nodes=(5, 2), duplicates="error")
    assert A.shape == (2, 5)
    np.testing.assert_array_equal(A.todense(), [[0, 0, 0, 0, 1], [1, 0, 1, 0, 0]])
    values = jax.jit(lambda v: graphs.from_edges(index, v, num_nodes=(5, 2)).todense())(
        jnp.arange(3.0)
    )
    np.testing.assert_array_equal(values, [[0, 0, 0, 0, 1], [0, 0, 2, 0, 0]])
    empty = graphs.from_edges(np.zeros((2, 0), int), num_nodes=3)
    assert empty.shape == (3, 3) and empty.nnz == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: graphs.from_edges([[0, 1], [1, 2], [0, 0]]), r"expected shape \[2, E\]"),
        (lambda: graphs.from_edges([[0, 3], [1, 0]], num_nodes=3), "sources"),
        (lambda: graphs.from_edges([[0, 0], [1, 1]], duplicates="error"), "from 0 to 1 more than"),
        (lambda: graphs.from_edges([[0], [1]], duplicates="max"), "duplicates: expected one of"),
        (lambda: graphs.from_edges([[0], [1]], [1.0, 2.0]), "values: expected shape"),
        (lambda: graphs.from_edges([[0], [1]], np.ones((1, 3))), r"return_perm=True.*attr\[perm\]"),
        (lambda: graphs.from_edges([[0], [1]], num_nodes=(1, 2, 3)), "num_nodes: expected n"),
        (lambda: jax.jit(graphs.from_edges)(jnp.zeros((2, 3), int)), "outside jit"),
        (lambda: graphs.from_edges([[0, 2**40], [1, 0]]), "sizes go up to 2147483647"),
        (lambda: graphs.from_edges([[0], [1]], num_nodes=2**33), "sizes go up to 2147483647"),
        (lambda: graphs.from_edges([[-3, -1], [-2, -1]]), "targets"),
        (
            lambda: graphs.induced_subgraph(random_graph(2), np.ones(3, bool)),
            r"mask of shape \[2\]",
        ),
        (lambda: graphs.induced_subgraph(random_graph(4), [1, 1]), "each node once"),
        (lambda: graphs.induced_subgraph(random_graph(4), [1, 4]), "nodes"),
        (lambda: graphs.induced_subgraph(random_graph(9), np.arange(9), nse=1), "nse: expected at"),
        (lambda: graphs.induced_subgraph(random_graph(4)[:3], [1]), "must be square"),
        (lambda: graphs.batch([random_graph(4)], num_nodes=3), "num_nodes: expected at least 4"),
        (lambda: graphs.batch([random_graph(4)[:2]]), "must be square"),
        (lambda: graphs.pad_rows([np.ones((3, 2))], 2), "size: expected at least 3"),
        (lambda: graphs.pad_rows([]), "pad_rows: arrays: expected at least one"),
        (lambda: graphs.NeighborSampler(random_graph(4), 2, 2), "expected a sequence .* got 2"),
        (lambda: graphs.NeighborSampler(random_graph(4), [1], 2).sample([2**32]), "seeds"),
        (lambda: graphs.NeighborSampler(random_graph(4), [], 2), "one for each layer"),
        (lambda: graphs.NeighborSampler(random_graph(4)[:3], [1], 2), r"square.*kind='target'"),
        (lambda: graphs.NeighborSampler({}, [1], 2), "at least one relation"),
        (
            lambda: graphs.NeighborSampler({("u", "a", "v"): random_graph(4)}, [1], 2),
            r"kind: expected one of \['u', 'v'\], got None",
        ),
        (
            lambda: graphs.NeighborSampler({"a": random_graph(4), "b": random_graph(3)}, [1], 2),
            "NeighborSampler: 'b': expected 4 nodes, as before, got 3",
        ),
        (
            lambda: graphs.NeighborSampler(graphs.join_relations({"a": random_graph(4)}), [1], 2),
            "matrices that join_relations got",
        ),
        (lambda: graphs.NeighborSampler(random_graph(4), [0], 2), "fanouts must be at least 1"),
        (lambda: graphs.NeighborSampler(random_graph(4), [1], 1).sample([0, 1]), "at most 1"),
        (lambda: next(graphs.NeighborSampler(random_graph(4), [1], 1).epoch([0, 0])), "each once"),
        (lambda: graphs.NeighborSampler(random_graph(4), [1], 3).sample([1, 1]), "each node once"),
        (lambda: graphs.join_relations([random_graph(4)]), "expected a mapping .* got list"),
        (lambda: graphs.join_relations({}), "at least one relation"),
        (
            lambda: graphs.join_relations({"a": random_graph(4), "b": random_graph(3)}),
            "expected 4 nodes, as before, got 3",
        ),
        (
            lambda: graphs.join_relations({"a": random_graph(4)}).sum({"b": np.ones((4, 2))}),
            "messages: expected those of",
        ),
        (
            lambda: graphs.join_relations({"a": random_graph(4)}).sum({"a": np.ones((3, 2))}),
            "expected shape",
        ),
        (lambda: graphs.batch([random_graph(4).asformat(BCSR(2, 2))]), "expected a matrix in CSR"),
        (lambda: graphs.batch([random_graph(4)]).spread(3.0), r"spread: Y: .*\[1, d\].* got \[\]"),
        (lambda: graphs.batch([random_graph(4)]).spread(np.ones(4)), r"spread: Y: .* got \[4\]"),
        (lambda: graphs.from_edges([[0], [1]], num_nodes=[3]), r"num_nodes: expected n .*\[3\]"),
        (lambda: graphs.from_edges([[0], [1]], num_nodes=2.5), "num_nodes must be an integer"),
        (lambda: graphs.from_edges([(0, 1)] * 3), r"got \[3, 2\]; .* np.transpose\(edges\)"),
        (lambda: graphs.batch(random_graph(4)), "batch: graphs must be a sequence of SparseArrays"),
        (lambda: graphs.pad_rows([np.ones((2, 3)), np.ones(2)]), r"pad_rows: arrays: .*\[2, 3\], "),
    ],
)
def test_errors(call, words):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
        call()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_unsigned_indices(dtype):
    index = np.array([[0, 1, 2, 2, 0], [1, 2, 0, 1, 1]])
    for of in ({}, {"num_nodes": 4}, {"num_nodes": [4, 4]}, {"num_nodes": np.array([4, 4])}):
        A, B = (graphs.from_edges(i, **of) for i in (index, index.astype(dtype)))
        assert A.shape == B.shape
        np.testing.assert_array_equal(A.todense(), B.todense())
    assert graphs.from_edges(np.zeros((2, 0), dtype)).shape == (0, 0)


# ---- batches ------------------------------------------------------------------------------------


def test_batches_of_one_capacity_compile_once():
    traced = []

    @jax.jit
    def step(batch, X):
        traced.append(None)
        H = gspmm(batch.graph, X)
        found = [batch.readout(H, reduce) for reduce in ("sum", "mean", "max", "min")]
        return H, found, batch.spread(found[0]), batch.graph_of_node

    sizes = dict(num_nodes=20, nse=150, num_graphs=4)
    for seed, counts in enumerate([(3, 5, 7), (6, 1, 2, 9), (8,)]):
        own = [random_graph(n, seed + i, format=FORMATS[i % 3]) for i, n in enumerate(counts)]
        X = [np.random.default_rng(i).standard_normal((n, 2)) for i, n in enumerate(counts)]
        batch = graphs.batch(own, **sizes)
        H, found, spread, of_node = step(batch, graphs.pad_rows(X, 20))
        first = 0
        for g, (A, x) in enumerate(zip(own, X, strict=True)):
            h = np.asarray(A.todense()) @ x
            np.testing.assert_allclose(H[first : first + len(x)], h, atol=1e-12)
            for reduce, y in zip(("sum", "mean", "max", "min"), found, strict=True):
                np.testing.assert_allclose(y[g], getattr(np, reduce)(h, axis=0), atol=1e-12)
            np.testing.assert_allclose(
                spread[first : first + len(x)], np.tile(h.sum(0), (len(x), 1)), atol=1e-12
            )
            np.testing.assert_array_equal(of_node[first : first + len(x)], g)
            first += len(x)
        assert not H[first:].any() and not spread[first:].any()
        assert (np.asarray(of_node[first:]) == 4).all()
        for y in found:
            assert not y[len(own) :].any()
        batch.graph.checked()
        positions = np.asarray(batch.positions)[: int(batch.graph.row_offsets[-1])]
        values = np.concatenate([A.values for A in own])[positions]  # as vectors of edges
        np.testing.assert_array_equal(values, batch.graph.values[: len(values)])
    assert len(traced) == 1
    exact = graphs.batch([random_graph(3), random_graph(4)])
    assert exact.graph.shape == (7, 7) and exact.membership.shape == (2, 7)
    np.testing.assert_array_equal(exact.spread([5.0, 6.0]), np.repeat([5, 6], [3, 4]))


@pytest.mark.parametrize("pair", [("bfloat16", "int32"), ("bfloat16", "float16"), ("f4", "i4")])
def test_values_of_a_batch_are_promoted_as_by_jax(pair):
    own = [random_graph(3).astype(dtype) for dtype in pair]
    with jax.numpy_dtype_promotion("standard"):
        joined = graphs.batch(own)
        assert joined.graph.dtype == jnp.promote_types(*pair)
    values = np.concatenate([np.asarray(A.values, np.float64) for A in own])
    np.testing.assert_array_equal(np.asarray(joined.graph.values, np.float64), values)


@pytest.mark.parametrize(
    "make",
    [
        lambda A: graphs.batch([A]).graph,
        lambda A: graphs.induced_subgraph(A, [1])[0],
        lambda A: graphs.NeighborSampler(A, [1], 1).sample([1]).blocks[0],
    ],
)
def test_traced_values_are_named(make):
    A = random_graph(3)
    with pytest.raises(ValueError, match="values: expected a concrete value, got a tracer; call"):
        jax.eval_shape(lambda values: make(A.with_values(values)).values, A.values)


# ---- subgraphs and samples ----------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_induced_subgraph(format):
    A = random_graph(12, format=format)
    nodes = np.array([7, 2, 11, 0, 5])
    B, entries = graphs.induced_subgraph(A, nodes)
    np.testing.assert_array_equal(B.todense(), np.asarray(A.todense())[np.ix_(nodes, nodes)])
    np.testing.assert_array_equal(B.values, np.asarray(A.values)[entries])
    mask = np.isin(np.arange(12), nodes)
    C, _ = graphs.induced_subgraph(A, mask)
    np.testing.assert_array_equal(C.todense(), np.asarray(A.todense())[np.ix_(mask, mask)])
    room, entries = graphs.induced_subgraph(A, nodes, nse=B.nnz + 3)
    assert room.nnz == len(entries) == B.nnz + 3
    np.testing.assert_array_equal(room.checked().todense(), B.todense())
    nothing, _ = graphs.induced_subgraph(A, np.zeros(0, int))
    assert nothing.shape == (0, 0)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_samples_are_of_the_graph(format):
    A = random_graph(40, format=format, density=0.25)
    dense = np.asarray(A.todense())
    sampler = graphs.NeighborSampler(A, (4, 20), 6, seed=3)
    assert sampler.capacities == (6, 30, 70)
    seeds = np.array([5, 39, 0, 17])
    sample = sampler.sample(seeds)
    np.testing.assert_array_equal(sample.is_seed, [True] * 4 + [False] * 2)
    assert [b.shape for b in sample.blocks] == [(30, 70), (6, 30)]
    nodes = np.asarray(sample.nodes)
    np.testing.assert_array_equal(nodes[:4], seeds)
    first, second = (np.asarray(b.checked().todense()) for b in sample.blocks)
    rows, columns = np.nonzero(second)
    np.testing.assert_array_equal(second[rows, columns], dense[nodes[rows], nodes[columns]])
    degree = (dense[seeds] != 0).sum(1)
    np.testing.assert_array_equal((second != 0).sum(1)[:4], np.minimum(degree, 4))
    assert not second[4:].any()
    # 20 is more than any node has: the first layer has all edges of its targets.
    targets = np.union1d(np.arange(4), np.nonzero(second.any(0))[0])
    for t in targets:
        own = np.zeros(40)
        own[nodes[np.nonzero(first[t])[0]]] = first[t][np.nonzero(first[t])[0]]
        np.testing.assert_array_equal(own, dense[nodes[t]])
    for block, entries in zip(sample.blocks, sample.positions, strict=True):
        used = int(block.row_offsets[-1])
        np.testing.assert_array_equal(block.values[:used], np.asarray(A.values)[entries[:used]])
        assert len(set(np.asarray(entries[:used]).tolist())) == used  # without replacement
    (every,) = graphs.NeighborSampler(A, [2**31 - 1], 2).sample([7]).blocks
    assert every.nnz == A.nnz and int(every.row_offsets[-1]) == np.count_nonzero(dense[7])
    every = graphs.NeighborSampler(A, (-1,), 8)
    assert every.fanouts == ((dense != 0).sum(1).max(),)
    for chosen, sample in every.epoch(np.arange(40) % 3 == 0, shuffle=False):
        count = int(sample.is_seed.sum())
        np.testing.assert_array_equal(chosen[:count] % 3, 0)
        found = np.asarray(sample.blocks[0].row_lengths)[:count]
        np.testing.assert_array_equal(found, (dense[chosen[:count]] != 0).sum(1))
    nothing = graphs.from_edges(np.zeros((2, 0), int), num_nodes=3)
    assert graphs.NeighborSampler(nothing, (-1,), 2).fanouts == (1,)


def test_samples_compile_once_and_are_uniform():
    A = SparseArray.from_dense(np.ones((10, 10)))
    sampler = graphs.NeighborSampler(A, (3,), 4)
    traced, counts, seen = [], np.zeros(10), []

    @jax.jit
    def layer(sample, X):
        traced.append(None)
        (block,) = sample.blocks
        return gspmm(block, X[sample.nodes], reduce="mean")

    X = np.eye(10)
    for _ in range(40):
        for seeds, sample in sampler.epoch(np.arange(10)):
            Y = layer(sample, X)
            own = np.asarray(sample.is_seed)
            np.testing.assert_allclose(Y.sum(1), own, atol=1e-12)
            counts += (np.asarray(Y) > 0).sum(0)
            seen += seeds[own].tolist()
    assert len(traced) == 1
    np.testing.assert_array_equal(np.bincount(seen), 40)
    assert abs(counts - 120).max() < 45  # 4 standard deviations of 400 draws of 3 among 10
    same = [graphs.NeighborSampler(A, (3,), 4, seed=7).sample([1, 2]).nodes for _ in range(2)]
    np.testing.assert_array_equal(*same)


def test_a_sample_that_fails_leaves_nothing_behind(monkeypatch):
    ring = graphs.from_edges([[0, 1, 2, 3], [1, 2, 3, 0]])
    sampler, fresh = (graphs.NeighborSampler(ring, (1, 2**40), 1) for _ in range(2))
    with monkeypatch.context() as patch:

        def fails(*_, **__):
            raise MemoryError

        patch.setattr(sampling, "of_capacity", fails)
        with pytest.raises(MemoryError):
            sampler.sample([1])
    np.testing.assert_array_equal(sampler.sample([1]).nodes, fresh.sample([1]).nodes)


def test_each_neighbour_is_sampled():
    lengths = np.repeat([3, 1], 20)  # all neighbours of a node are as likely, the last one too
    rows = np.repeat(np.arange(40), lengths)
    index = np.stack(
        [np.arange(rows.size) - np.repeat(np.cumsum(lengths) - lengths, lengths), rows]
    )
    sampler = graphs.NeighborSampler(graphs.from_edges(index, num_nodes=40), (1,), 40)
    counts = np.zeros(3)
    for _ in range(15):
        sample = sampler.sample(np.arange(40))
        used = int(sample.blocks[0].row_offsets[-1])
        neighbours = index[0][np.asarray(sample.positions[0])[:used]]
        counts += np.bincount(neighbours[:20], minlength=3)
        np.testing.assert_array_equal(neighbours[20:], 0)
    assert abs(counts - 100).max() < 33  # 4 standard deviations of 300 draws among 3


def test_samples_of_relations():
    """All neighbours of the seeds give what two layers over the whole graph give them; fewer are of
    the graph. One program for all samples."""
    rng, n = np.random.default_rng(0), {"user": 9, "item": 7}
    names = [("user", "buys", "item"), ("item", "of", "user"), ("user", "knows", "user")]
    names.append(("user", "sells", "item"))  # one hop adds users by it and by the first
    dense = {
        k: (rng.random((n[k[2]], n[k[0]])) < 0.4) * rng.random((n[k[2]], n[k[0]])) for k in names
    }
    of = {
        k: SparseArray.from_dense(v, format=f)
        for (k, v), f in zip(dense.items(), [*FORMATS, FORMATS[0]], strict=True)
    }
    X = {kind: rng.standard_normal((size, 2)) for kind, size in n.items()}

    def layer(matrices, H, product):
        """Each kind with what it receives; of a sample the targets are the first of the nodes."""
        rows = {k[2]: A.shape[0] for k, A in matrices.items()}
        out = {kind: 0.5 * H[kind][:count] for kind, count in rows.items()}
        for (source, _, target), A in matrices.items():
            out[target] = out[target] + product(A, H[source])
        return out

    expected = layer(dense, layer(dense, X, np.matmul), np.matmul)["item"]
    traced = []

    @jax.jit
    def both(sample):
        traced.append(None)
        H = {kind: jnp.asarray(X[kind])[nodes] for kind, nodes in sample.nodes.items()}
        for blocks in sample.blocks:
            H = layer(blocks, H, gspmm)
        return H["item"]

    every = graphs.NeighborSampler(of, (-1, -1), 3, kind="item")
    assert every.capacities[0] == {"user": 0, "item": 3} and every.num_nodes == 7
    for seeds, sample in every.epoch(np.arange(7)):
        assert [set(blocks) for blocks in sample.blocks] == [set(names), {names[0], names[3]}]
        own = np.asarray(sample.is_seed)
        np.testing.assert_allclose(both(sample)[own], expected[seeds[own]], atol=1e-12)
    assert len(traced) == 1
    few = graphs.NeighborSampler(of, (2, 1), 3, kind="item").sample([6, 1])
    nodes = {kind: np.asarray(place) for kind, place in few.nodes.items()}
    np.testing.assert_array_equal(nodes["item"][:2], [6, 1])
    for blocks, positions in zip(few.blocks, few.positions, strict=True):
        for key, block in blocks.items():
            offsets, columns = (np.asarray(x) for x in block.index_arrays[1])
            used, (source, _, target) = offsets[-1], key
            rows, columns = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)), columns[:used]
            there = dense[key][nodes[target][rows], nodes[source][columns]]
            np.testing.assert_array_equal(np.asarray(block.values)[:used], there)
            stored = np.asarray(of[key].values)[np.asarray(positions[key])[:used]]
            np.testing.assert_array_equal(there, stored)
            assert there.all() and len(set(zip(rows, columns, strict=True))) == used
    most = np.minimum((dense[names[0]][[6, 1]] != 0).sum(1), 2)
    lengths = np.diff(few.blocks[1][names[0]].row_offsets)
    np.testing.assert_array_equal(lengths, [*most, 0])


def test_samples_between_two_kinds_of_nodes():
    """As many of each: item 1 is not user 1."""
    index = np.array([[0, 1, 2, 2], [1, 1, 1, 0]])
    A = graphs.from_edges(index, num_nodes=(3, 3))
    key = ("user", "rates", "item")
    sample = graphs.NeighborSampler({key: A}, (-1,), 2, kind="item").sample([1])
    block = sample.blocks[0][key]
    assert block.shape == (2, 3) and sample.nodes["item"].shape == (2,)
    np.testing.assert_array_equal(sample.nodes["item"][:1], [1])
    users = np.asarray(sample.nodes["user"])[np.asarray(block.column_indices)[:3]]
    np.testing.assert_array_equal(np.sort(users), [0, 1, 2])
    assert int(block.row_offsets[-1]) == 3


# ---- relations ----------------------------------------------------------------------------------


def test_relations_are_one_product():
    rng = np.random.default_rng(0)
    shapes = {("u", "a", "v"): (4, 6), ("u", "b", "u"): (6, 6), ("v", "c", "u"): (6, 4)}
    dense = {k: np.where(rng.random(s) < 0.4, rng.random(s), 0) for k, s in shapes.items()}
    of = {
        k: SparseArray.from_dense(v, format=f)
        for (k, v), f in zip(dense.items(), FORMATS, strict=True)
    }
    relations = graphs.join_relations(of)
    H = {k: rng.standard_normal((shape[1], 3)) for k, shape in shapes.items()}
    sums = jax.jit(lambda relations, H: relations.sum(dict(zip(relations.keys, H, strict=True))))
    found = sums(relations, tuple(H.values()))
    expected = {k: dense[k] @ H[k] for k in shapes}
    keys = list(shapes)
    np.testing.assert_allclose(found["v"], expected[keys[0]])
    np.testing.assert_allclose(found["u"], expected[keys[1]] + expected[keys[2]])
    means = graphs.join_relations({"r": of[keys[1]], "s": of[keys[1]]}, normalize=True)
    weights = dense[keys[1]].sum(1, keepdims=True)
    X = rng.standard_normal((6, 3))
    (Y,) = means.sum({"r": X, "s": 2 * X}).values()
    np.testing.assert_allclose(Y, 3 * (dense[keys[1]] / np.where(weights == 0, 1, weights)) @ X)


def test_means_of_relations_are_over_edges():
    """Whether repeated edges are summed or kept; without NaN where the values of a row cancel."""
    index = np.array([[0, 0, 1, 2, 3], [0, 0, 0, 2, 2]])
    weights = np.array([1, 1, 1, -2, 2])

    def mean(weights, duplicates="sum", **of):
        A = graphs.from_edges(index, weights, num_nodes=4, duplicates=duplicates, **of)
        return graphs.join_relations({"r": A}, normalize=True).matrix

    expected = np.zeros((4, 4))
    expected[0, :2] = 2 / 3, 1 / 3
    for duplicates in ("sum", "keep"):
        np.testing.assert_allclose(mean(1.0 * weights, duplicates).todense(), expected)
        assert mean(weights, duplicates).dtype == jnp.result_type(float)
    np.testing.assert_allclose(mean(weights).todense(), expected)
    np.testing.assert_allclose(mean(weights > 0, "keep").todense()[0], expected[0])
    # Sums of 16 bits are carried in float32: 257 is not a bfloat16.
    many = graphs.from_edges(np.stack([np.arange(257), np.zeros(257, int)]), dtype=jnp.bfloat16)
    share = graphs.join_relations({"r": many}, normalize=True).matrix.values
    np.testing.assert_array_equal(share, jnp.full(257, 1 / 257, jnp.bfloat16))
    found = jax.jit(jax.grad(lambda w: (mean(w).values ** 2).sum()))(1.0 * weights)
    # d/dw of (w0^2 + w1^2) / (w0 + w1)^2 at (2, 1), for each of the edges that were summed
    np.testing.assert_allclose(found, np.array([2, 2, -4, 0, 0]) / 27, atol=1e-12)
