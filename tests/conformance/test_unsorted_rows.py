"""Rows in any order: `checked(sorted=False)` lets them pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgap_jax import CVS, SparseArray

RNG = np.random.default_rng(0)
N = 9
SHAPE = (N, N)
DENSE = RNG.standard_normal(SHAPE) * (RNG.random(SHAPE) < 0.4) + 2 * np.eye(N)
X = jnp.asarray(RNG.standard_normal((N, 4)))


def arrays(reverse):
    """(offsets, indices, values), with the entries of each row from right to left."""
    A = SparseArray.from_dense(DENSE)
    offsets = np.asarray(A.row_offsets)
    order = np.arange(A.nnz)
    if reverse:
        order = np.concatenate(
            [order[a:b][::-1] for a, b in zip(offsets, offsets[1:], strict=False)]
        )
    return offsets, np.asarray(A.column_indices)[order], np.asarray(A.values)[order]


def test_what_is_checked():
    offsets, indices, values = arrays(True)
    make = lambda o, i, v: SparseArray.from_arrays(v, o, i, shape=SHAPE)
    A = jax.jit(make)(offsets, indices, values)
    np.testing.assert_array_equal(A.checked(sorted=False).todense(), DENSE)
    assert not A.checked(sorted=False).is_checked
    B = SparseArray.from_dense(DENSE)
    assert B.checked(sorted=False) is B
    with pytest.raises(ValueError, match="expected"):
        A.checked()
    beyond = indices.copy()
    beyond[3] = N
    broken = offsets.copy()
    broken[2] = 99
    run = jax.jit(lambda o, i, v: make(o, i, v).checked(sorted=False) @ X)
    for o, i in ((offsets, beyond), (broken, indices)):
        with pytest.raises(ValueError, match="expected"):
            jax.jit(make)(o, i, values).checked(sorted=False)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="expected"):
            jax.block_until_ready(run(o, i, values))
    with pytest.raises(NotImplementedError, match="sorted=False: expected CSR"):
        B.asformat("COO").checked(sorted=False)
    vectors = SparseArray.from_dense(DENSE, format=CVS(2))
    assert vectors.checked(sorted=False) is vectors
