"""Bad input of matrices in parts: the type of the error, and that it says what to write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from sgap_jax import SparseArray, parallel


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


@pytest.fixture(scope="module")
def A():
    return SparseArray.from_dense(np.eye(6))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(axis="y"), r"axis: expected one of \['x'\], got 'y'"),
        (dict(rows="odd"), "rows: expected 'balanced', 'even' or 2 numbers of rows"),
        (dict(rows=[1, 2, 3]), "2 numbers of rows"),
        (dict(rows=[1.0, 5.0]), "2 numbers of rows"),
        (dict(rows=[3, 4]), "expected 6 in all"),
        (dict(rows=[7, -1]), "expected 6 in all"),
        (dict(order="metis"), "expected 'given' or a function"),
        (dict(order=lambda A: [0, 1, 2, 3, 4, 4]), "a permutation of 0 .. 5"),
    ],
)
def test_partition(A, mesh, options, message):
    options = dict(axis="x") | options
    with pytest.raises(ValueError, match=message):
        parallel.partition(A, mesh, options.pop("axis"), **options)


def test_what_is_no_array_no_mesh_and_no_concrete_matrix(A, mesh):
    with pytest.raises(TypeError, match="A must be a SparseArray"):
        parallel.partition(np.eye(6), mesh, "x")
    with pytest.raises(TypeError, match="mesh must be"):
        parallel.partition(A, "x", "x")
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda v: parallel.partition(A.with_values(v), mesh, "x").values)(A.values)


def test_products(A, mesh):
    P = parallel.partition(A, mesh, "x")
    with pytest.raises(TypeError, match="parallel.partition spreads it"):
        parallel.spmm(A, jnp.ones((6, 2)))
    with pytest.raises(ValueError, match=r"expected \[6, n\], got \[5, 2\]"):
        P @ jnp.ones((5, 2))
    with pytest.raises(ValueError, match=r"expected \[2, 3, n\], got \[2, 4, 2\]"):
        P @ jnp.ones((2, 4, 2))
    with pytest.raises(ValueError, match="of own columns"):
        P.with_values((jnp.ones(3), P.values[1]))
    with pytest.raises(ValueError, match="of foreign columns"):
        P.with_values((P.values[0], jnp.ones(3)))
