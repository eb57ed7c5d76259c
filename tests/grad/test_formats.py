"""Values and gradients in every storage order, against the dense twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from differentiable_ops import close, normal

from sgap_jax import BCSR, COO, CSC, CVS, SparseArray, row_sum, sddmm, sparse_softmax, spmm

CASE = BATTERY["empty_rows_at_both_ends"]
M, K = CASE.shape
STORAGE = {
    "CSR": lambda A: A,
    "CSC": lambda A: A.asformat(CSC),
    "COO": lambda A: A.asformat(COO),
    "CSR of the transpose": lambda A: SparseArray.from_scipy(A.to_scipy().T).T,
    "COO of the transpose": lambda A: A.asformat(CSC).T.asformat(COO).T,
    "CVS": lambda A: A.asformat(CVS(3)),
    "CVS of the transpose": lambda A: A.T.asformat(CVS(4)).T,
    "BCSR": lambda A: A.asformat(BCSR(3, 2)),
    "BCSR of the transpose": lambda A: A.T.asformat(BCSR(3, 4)).T,
}


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("weighted", [False, True])
def test_every_op_in_every_storage_order(storage, weighted):
    A = STORAGE[storage](array(CASE, jnp.float64))
    assert A.shape == CASE.shape
    np.testing.assert_array_equal(A.todense(), CASE.dense())
    rows, columns = A.coordinates()
    X, Y, B = normal(M, 3), normal(K, 3), normal(K, 2)

    def f(v, X, Y, B):
        S = sddmm(A.with_values(v), X, Y, weighted=weighted)
        P = sparse_softmax(S, scale=0.5)
        return P.todense(), spmm(P, B), row_sum(S), spmm(S, X, transpose=True), S.T @ X

    def twin(v, X, Y, B):
        # Vectors store zeros too, and their ends outside the matrix are dropped.
        weights = jnp.zeros((M, K)).at[rows, columns].set(v.reshape(-1) if weighted else 1.0)
        S = (X @ Y.T) * weights
        mask = jnp.zeros((M, K), bool).at[rows, columns].set(True)
        e = jnp.where(mask, jnp.exp(0.5 * S), 0)
        P = e / jnp.maximum(e.sum(1, keepdims=True), 1e-300)
        return P, P @ B, S.sum(1), S.T @ X, S.T @ X

    def scalar(f):
        return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in f(*args))

    args = (A.values, X, Y, B)
    close(jax.jit(f)(*args), twin(*args))
    every = (0, 1, 2, 3)
    close(jax.jit(jax.grad(scalar(f), every))(*args), jax.grad(scalar(twin), every)(*args))


def test_nan_in_the_padding_reaches_nothing():
    case = BATTERY["padded"]
    A = array(case, jnp.float64)
    assert np.isnan(A.values[case.stored :]).all()
    X, Y = normal(case.shape[0], 3), normal(case.shape[1], 3)
    C = sddmm(A, X, Y, weighted=True)
    assert not C.values[case.stored :].any()

    def weighted(c):
        return jnp.sum(sddmm(A, X, Y, weighted=True, scale=c).values)

    def softmax(c):
        return jnp.sum(sparse_softmax(A, scale=c).values ** 2)

    for f in (weighted, softmax):
        assert np.isfinite(jax.grad(f)(jnp.asarray(0.5)))
