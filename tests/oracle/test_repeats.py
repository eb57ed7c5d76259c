"""Matrices that store a coordinate more than once, as graphs that keep repeated edges do: what
works on elements sees their sum, what works on entries each; eagerly and under jit alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgap_jax import SparseArray, aggregate, evaluate, eye, graphs, linalg, nn

EDGES = np.array([[0, 0, 1, 2, 2], [1, 1, 2, 2, 2]])  # 0 -> 1 and 2 -> 2 twice
WEIGHTS = np.array([1.0, -3.0, 2.0, 0.5, 1.5], np.float32)
DENSE = np.array([[0, 0, 0], [-2, 0, 0], [0, 2, 2]], np.float32)
OTHER = np.array([[1, 0, 0], [5, 0, 0], [0, 0, 3]], np.float32)


def multigraph():
    return graphs.from_edges(EDGES, WEIGHTS, num_nodes=3, duplicates="keep")


def dense(found):
    return np.asarray(found.todense() if isinstance(found, SparseArray) else found)


ELEMENTS = {
    "K + Z": (lambda K, Z: K + Z, DENSE + OTHER),
    "Z - K": (lambda K, Z: Z - K, OTHER - DENSE),
    "K + K.T": (lambda K, Z: K + K.T, DENSE + DENSE.T),
    "K * Z": (lambda K, Z: K * Z, DENSE * OTHER),
    "K * K": (lambda K, Z: K * K, DENSE * DENSE),
    "K**2": (lambda K, Z: K**2, DENSE**2),
    "abs": (lambda K, Z: abs(K), abs(DENSE)),
    "maximum": (lambda K, Z: K.maximum(Z), np.maximum(DENSE, OTHER)),
    "max": (lambda K, Z: K.max(1), DENSE.max(1)),
    "argmin": (lambda K, Z: K.argmin(), DENSE.argmin()),
    "norm": (lambda K, Z: linalg.norm(K), np.linalg.norm(DENSE)),
    "K[1, 0]": (lambda K, Z: K[1, 0], DENSE[1, 0]),
    "K[1:3]": (lambda K, Z: K[1:3], DENSE[1:3]),
    "rows": (lambda K, Z: K.rows(np.array([2, 0]), nse=5), DENSE[[2, 0]]),
    "K[1:3] @ x": (lambda K, Z: K[1:3] @ np.ones(3, np.float32), DENSE[1:3].sum(1)),
    "add_self_loops": (lambda K, Z: nn.add_self_loops(K), DENSE + np.eye(3)),
    "ilu": (
        lambda K, Z: linalg.ilu(K + 4 * eye(3))(jnp.ones(3, jnp.float32)),
        np.linalg.solve(DENSE + 4 * np.eye(3), np.ones(3)),  # a triangle
    ),
}
# Of a traced structure these need a plan or a capacity.
OF_CONCRETE = {
    "K @ K": (lambda K, Z: K @ K, DENSE @ DENSE),
    "K @ K[1]": (lambda K, Z: K @ K[1], DENSE @ DENSE[1]),
    "K.rows": (lambda K, Z: K.rows(slice(1, 3)), DENSE[1:3]),
    "K[mask]": (lambda K, Z: K[np.array([False, True, True])], DENSE[1:]),
    "CVS": (lambda K, Z: K.asformat("CVS(2)"), DENSE),
    "evaluate": (lambda K, Z: evaluate("C(i,j) = A(i,j) * B(i,j)", A=K, B=Z), DENSE * OTHER),
}


@pytest.mark.parametrize("name", [*ELEMENTS, *OF_CONCRETE])
def test_elements_are_sums(name):
    call, expected = (ELEMENTS | OF_CONCRETE)[name]
    K, Z = multigraph(), SparseArray.from_dense(OTHER)
    if name in ELEMENTS:
        under_jit = jax.jit(call)(K, Z)
    else:
        under_jit = jax.jit(lambda v: call(K.with_values(v), Z))(K.values)
    for x in (call(K, Z), under_jit):
        np.testing.assert_allclose(dense(x), expected, rtol=1e-6)


def test_gradients_of_sums_reach_each_entry():
    K = multigraph()

    def loss(v, A):
        return jnp.sum((A.with_values(v) + eye(3)).todense() ** 2)

    rows, columns = K.coordinates()
    expected = 2 * (DENSE + np.eye(3))[rows, columns]
    np.testing.assert_allclose(jax.grad(loss)(K.values, K), expected)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(K.values, K), expected)


def test_entries_stay_apart():
    """Self-loops, subgraphs, samples and batches have an entry for each edge, as the graph has."""
    K = multigraph()
    assert K.nnz == 5 and not K.is_checked
    assert graphs.from_edges([[0, 1], [1, 2]], duplicates="keep").is_checked
    for found in (nn.add_self_loops(K), jax.jit(nn.add_self_loops)(K)):
        assert found.row_lengths.tolist() == [1, 3, 3]  # 2 -> 2 is a loop already
        stored = found.asformat("COO").values[:7]
        np.testing.assert_array_equal(stored, [1, 1, -3, 1, 2, 1.5, 1.5])
    part, entries = graphs.induced_subgraph(K, [1, 0])
    assert part.nnz == 2 and not part.is_checked
    np.testing.assert_array_equal(part.values, K.values[entries])
    np.testing.assert_array_equal(dense(part + part), 2 * DENSE[np.ix_([1, 0], [1, 0])])
    both = graphs.batch([K, K]).graph
    assert both.nnz == 10 and not both.is_checked
    np.testing.assert_array_equal(dense(both + eye(6)), np.kron(np.eye(2), DENSE) + np.eye(6))
    block = graphs.NeighborSampler(K, [5], 3).sample([0, 1, 2]).blocks[0]
    assert int(block.row_lengths.sum()) == 5 and not block.is_checked
    np.testing.assert_array_equal(dense(K.rows(np.arange(3))), DENSE)
    assert int(K.rows(np.arange(3)).row_lengths.sum()) == 5


def test_maxima_and_lengths_of_whatever_arrays_hold():
    """Where all entries take part nothing is masked: edges that repeat; else what is out of range
    is left out. One program for both."""
    m, n, nnz, rng = 7, 6, 20, np.random.default_rng(0)

    @jax.jit
    def found(offsets, columns, M):
        A = SparseArray.from_arrays(jnp.ones(nnz, M.dtype), offsets, columns, shape=(m, n))
        of = jax.value_and_grad(lambda M: (aggregate(A, M, "max") ** 2).sum() / 2)
        return A.row_lengths, aggregate(A, M, "max"), of(M)[1]

    for draw in range(24):
        low, high = ((0, n), (-2, n + 2))[draw % 2]
        columns = rng.integers(low, high, nnz).astype(np.int32)
        offsets = rng.integers(-3, nnz + 5, m + 1).astype(np.int32)
        offsets = np.sort(offsets.clip(0, nnz)) if draw % 3 else offsets
        M = rng.standard_normal((nnz, 3))
        ends = np.maximum.accumulate(offsets.clip(0, nnz))
        lengths, maxima, gradient = np.zeros(m), np.zeros((m, 3)), np.zeros_like(M)
        for i in range(m):
            own = [p for p in range(ends[i], ends[i + 1]) if 0 <= columns[p] < n]
            lengths[i] = len(own)
            for d in range(3 if own else 0):
                p = own[int(M[own, d].argmax())]
                maxima[i, d] = gradient[p, d] = M[p, d]
        for got, want in zip(found(offsets, columns, M), (lengths, maxima, gradient), strict=True):
            np.testing.assert_array_equal(got, want)
