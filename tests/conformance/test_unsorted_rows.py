"""Rows in any order: every operation takes them, and `checked(sorted=False)` lets them pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgap_jax import (
    CVS,
    SparseArray,
    einsum,
    gsddmm,
    gspmm,
    linalg,
    row_max,
    row_sum,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
    spmv,
)

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


@jax.jit
def every_operation(offsets, indices, values):
    A = SparseArray.from_arrays(values, offsets, indices, shape=SHAPE).checked(sorted=False)
    q, k, v = (x[:, None] for x in (X, X[::-1], 2 * X))
    found = {
        "spmm": spmm(A, X),
        "transposed": A.T @ X,
        "spmv": spmv(A, X[:, 0]),
        "sddmm": sddmm(A, X, X).todense(),
        "gsddmm": gsddmm(A, X, X, op="add").todense(),
        "softmax": sparse_softmax(A).todense(),
        "attention": sparse_attention(q, k, v, A),
        "gradient": jax.grad(lambda X: jnp.sum(jnp.sin(spmm(A, X))))(X),
        "of values": A.with_values(
            jax.grad(lambda v: jnp.sum(jnp.sin(spmm(A.with_values(v), X))))(values)
        ).todense(),
        "row_sum": row_sum(A),
        "row_max": row_max(A),
        "max": A.max(axis=0),
        "sum": A.sum(axis=0),
        "diagonal": A.diagonal(),
        "einsum": einsum("ij,jk->ik", A, X, reduction="max"),
        "plus": (A + 2 * A).todense(),
        "times": (A * A).todense(),
        "csc": A.asformat("CSC") @ X,
        "coo": A.asformat("COO") @ X,
        "triangular": linalg.triangular_solve(A, X),
        "ilu": linalg.ilu(A)(X[:, 0]),
        "merged": A.sum_duplicates().values,
    }
    for reduce in ("sum", "max", "mean"):
        found[f"gspmm {reduce}"] = gspmm(A, X, reduce=reduce)
    return found


def test_every_operation_takes_them():
    wanted, found = (every_operation(*arrays(reverse)) for reverse in (False, True))
    np.testing.assert_allclose(wanted["spmm"], DENSE @ X, rtol=1e-12, atol=1e-12)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-10, atol=1e-12, err_msg=name)


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
