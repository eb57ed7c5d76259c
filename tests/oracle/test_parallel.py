"""A matrix in parts: the plan against loops in NumPy for many parts, products on two devices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from jax.sharding import AxisType

from sgap_jax import CVS, SparseArray, parallel
from sgap_jax.parallel.plan import bounds_of, cut

NAMES = ("skewed", "empty_rows_at_both_ends", "no_entries", "no_rows", "one_row", "wide")


def dense(case):
    return np.asarray(array(case, jnp.float64).todense())


def loops(D, B):
    out = np.zeros((D.shape[0], B.shape[1]))
    for i, j in zip(*np.nonzero(D), strict=True):
        out[i] += D[i, j] * B[j]
    return out


def product_by_plan(D, B, parts, rows):
    """What the devices do, in loops: gathers, messages, products of own and foreign columns."""
    S = array_of(D)
    row_bounds = bounds_of(rows, np.diff(S[0]), parts)
    column_bounds = bounds_of("even", np.zeros(D.shape[1]), parts)
    found = cut(*S, row_bounds, column_bounds)
    mine = np.zeros((parts, found.columns, B.shape[1]))
    for p in range(parts):
        a, b = column_bounds[p : p + 2]
        mine[p, : b - a] = B[a:b]
    out = []
    for p in range(parts):
        exchange, buffer = found.exchange, []
        if exchange.width:
            buffer = [mine[q][found.sends[0][q, p]] for q in range(parts)]
        for (shift, _), rows_sent in zip(exchange.shifts, found.sends, strict=False):
            owner = (p - shift) % parts
            buffer.append(mine[owner][rows_sent[owner]])
        received = np.concatenate([*buffer, np.zeros((0, B.shape[1]))])
        assert len(received) == exchange.received
        C = np.zeros((found.rows, B.shape[1]))
        for (values, offsets, indices), source in (
            (found.own[p], mine[p]),
            (found.foreign[p], received),
        ):
            for i in range(found.rows):
                for e in range(offsets[i], offsets[i + 1]):
                    C[i] += values[e] * source[indices[e]]
        out.append(C[: row_bounds[p + 1] - row_bounds[p]])
    return np.concatenate(out), found


def array_of(D):
    A = SparseArray.from_dense(D)
    return tuple(np.asarray(x) for x in (A.row_offsets, A.column_indices, A.values))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_the_plan_moves_what_is_needed(name, parts):
    D = dense(BATTERY[name])
    B = np.random.default_rng(0).standard_normal((D.shape[1], 3))
    for rows in ("balanced", "even"):
        got, found = product_by_plan(D, B, parts, rows)
        np.testing.assert_allclose(got, loops(D, B), rtol=1e-12, atol=1e-12)
        # Each row travels once to each part that needs it, and padding never exceeds all rows.
        assert found.exchange.sent <= (parts - 1) * found.columns


def test_a_band_sends_the_rows_at_its_edges_alone():
    D = np.eye(64) + np.eye(64, k=1) + np.eye(64, k=-1)
    _, found = product_by_plan(D, np.ones((64, 1)), 8, "even")
    assert found.exchange.shifts == ((1, 1), (7, 1)) and found.exchange.sent == 2


def test_all_to_all_where_every_pair_exchanges_as_much():
    _, found = product_by_plan(np.ones((12, 12)), np.ones((12, 1)), 4, "even")
    assert found.exchange.width == 3 and found.exchange.sent == 9


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


def graph(m=23, k=23, seed=0):
    rng = np.random.default_rng(seed)
    return np.where(rng.random((m, k)) < 0.15, rng.standard_normal((m, k)), 0)


@pytest.mark.parametrize(
    "shape, options",
    [
        ((23, 23), {}),
        ((23, 23), dict(order=lambda A: np.random.default_rng(3).permutation(23))),
        ((23, 23), dict(rows=[23, 0])),
        ((9, 14), dict(rows="even")),
    ],
    ids=["balanced", "ordered", "a part without rows", "rectangular"],
)
def test_products_of_parts(mesh, shape, options):
    D = graph(*shape)
    A = parallel.partition(SparseArray.from_dense(D), mesh, "x", **options)
    rng = np.random.default_rng(1)
    B, X = rng.standard_normal((shape[1], 4)), rng.standard_normal((shape[0], 4))
    both = jax.jit(lambda A, B, X: (A @ B, parallel.spmm(A, X, transpose=True)))
    for got, expected in zip(both(A, B, X), (loops(D, B), loops(D.T, X)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(A.from_parts(A.to_parts(X, transpose=True)), X)
    assert sum(A.entries) == np.count_nonzero(D)
    assert A.own.values.sharding.shard_shape(A.own.values.shape)[0] == 1


def test_only_needed_rows_are_in_the_program(mesh):
    """A path in two halves: one row each way, and no gather of the operand."""
    D = np.eye(32) + np.eye(32, k=1) + np.eye(32, k=-1)
    A = parallel.partition(SparseArray.from_dense(D), mesh, "x", rows="even")
    B = A.to_parts(np.random.default_rng(0).standard_normal((32, 5)))
    run = jax.jit(lambda A, B: A @ (A @ B))
    expected = D @ D @ np.asarray(A.from_parts(B))
    np.testing.assert_allclose(A.from_parts(run(A, B)), expected, rtol=1e-12, atol=1e-12)
    text = run.lower(A, B).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    sent = f"{A.exchange.sent * 5 * 8:,} bytes for 5 columns"
    assert A.exchange.sent == 1 and sent in A.explain(5, jnp.float64)


def test_vectors_are_expanded_and_duplicates_summed(mesh):
    D = graph()
    A = parallel.partition(SparseArray.from_dense(D, format=CVS(4)), mesh, "x")
    B = np.ones((23, 2))
    np.testing.assert_allclose(A @ B, loops(D, B), rtol=1e-12, atol=1e-12)
    other = replace(A, own=A.own)  # a pytree that jit takes and gives back
    np.testing.assert_array_equal(jax.jit(lambda A: A)(other) @ B, A @ B)
