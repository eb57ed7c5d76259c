"""Derivatives of products of a matrix in parts, against those of the matrix as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from differentiable_ops import close, normal
from jax.sharding import AxisType

from sgap_jax import SparseArray, parallel, sparse_attention, spmm

RNG = np.random.default_rng(0)
D = np.where(RNG.random((15, 15)) < 0.2, RNG.standard_normal((15, 15)), 0)
WHOLE = SparseArray.from_dense(D)


@pytest.fixture(scope="module")
def A():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    return parallel.partition(WHOLE, mesh, "x")


def test_second_derivatives_and_scan(A):
    B = normal(15, 2)

    def layers(product):
        step = lambda x, _: (jnp.tanh(product(x)), None)
        return lambda B: jnp.sum(jax.lax.scan(jax.checkpoint(step), B, None, length=2)[0])

    along = lambda f: jax.jit(jax.grad(lambda B: jnp.sum(jax.grad(f)(B) ** 2)))(B)
    close(along(layers(lambda x: A @ x)), along(layers(lambda x: spmm(WHOLE, x))))


def test_explicit_axes():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    A, B = parallel.partition(WHOLE, mesh, "x"), normal(15, 3)
    with jax.set_mesh(mesh):
        loss = lambda B: jnp.sum(jnp.sin(A.from_parts(A @ B)))
        X = A.to_parts(B)
        assert jax.typeof(jax.jit(lambda X: A @ X)(X)).sharding.spec[0] == "x"
        got = jax.jit(lambda X: A.from_parts(jax.grad(loss)(X)))(X)
    close(got, jax.jit(jax.grad(lambda B: jnp.sum(jnp.sin(spmm(WHOLE, B)))))(B))
    with jax.set_mesh(mesh):  # an operand that is not split yet
        rows = A.to_parts(B, transpose=True)
        whole = jax.sharding.reshard(rows, jax.P())
        back = lambda X: A.from_parts(parallel.spmm(A, X, transpose=True), transpose=True)
        close(jax.jit(back)(whole), jax.jit(lambda B: spmm(WHOLE, B, transpose=True))(B))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_columns_over_another_axis(kind):
    """Of an array with a value, and under explicit axes, columns stay where they are; a second axis
    divides others, padded, too. One part: what travels is in test_parts_of_eight.py."""
    B = normal(15, 4 if kind == AxisType.Auto else 3)
    expected = jax.jit(jax.grad(lambda B: jnp.sum(jnp.sin(spmm(WHOLE, B)))))(B)
    mesh = jax.make_mesh((1, 2), ("x", "y"), axis_types=(kind,) * 2)
    over = jax.P("x", None, "y")
    with jax.set_mesh(mesh):
        if kind == AxisType.Auto:
            A = parallel.partition(WHOLE, mesh, "x")
            X = jax.device_put(A.to_parts(B), jax.NamedSharding(mesh, over))
            C = A @ X
            assert C.sharding.spec == over
            close(C[0], spmm(WHOLE, B))
            return
        A = parallel.partition(WHOLE, mesh, "x", second="y")
        loss = lambda X: jnp.sum(jnp.sin(A @ X))
        gradient = A.from_parts(jax.jit(jax.grad(loss))(A.to_parts(B)))
        assert jax.typeof(A @ jnp.ones((1, 15, 4))).sharding.spec == over
    close(gradient, expected)


# A token that sees all and is seen by all, of which the query travels.
TOKENS = np.eye(15) + np.eye(15, k=1) + (np.arange(15) == 6)[:, None] + (np.arange(15) == 6)


@pytest.mark.parametrize("dense, queries", [(D, 0), (TOKENS, 1)], ids=["keys", "queries"])
def test_second_derivatives_of_attention(A, dense, queries):
    q, k, v = normal(2, 15, 2, 3), normal(2, 15, 1, 3), normal(2, 15, 1, 3)
    whole = SparseArray.from_dense(dense)
    apart = parallel.partition(whole, A.mesh, "x")
    some = apart.global_rows
    assert (0 if some is None else sum(some.queries.to_all)) == queries

    def twice(attend, pattern):
        loss = lambda *x: jnp.sum(jnp.sin(attend(*x, pattern)))
        norm = lambda *x: sum(jnp.sum(y**2) for y in jax.grad(loss, (0, 1, 2))(*x))
        return jax.jit(jax.grad(norm, (0, 1, 2)))(q, k, v)

    close(twice(parallel.sparse_attention, apart), twice(sparse_attention, whole))


def test_nan_in_a_row_whose_query_travels(A):
    """It reaches the result and the log-sum-exp of that row, and no other row."""
    whole = SparseArray.from_dense(TOKENS - (np.arange(15) == 6) + np.eye(15))  # no token for all
    apart = parallel.partition(whole, A.mesh, "x")
    q, k = normal(15, 2, 3).at[6].set(np.nan), normal(15, 2, 3)
    attend = lambda function, pattern: jax.jit(lambda *x: function(*x, pattern, return_lse=True))(
        q, k, k
    )
    found = attend(parallel.sparse_attention, apart)
    expected = attend(sparse_attention, whole)
    assert sum(apart.global_rows.queries.to_all) == 1 and np.isnan(expected[1][6]).all()
    close(found, expected)
