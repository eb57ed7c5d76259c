"""Operators, sums and slices of a sparse array that are refused, and what they say instead."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgap_jax import COO, CSC, CSR, CVS, SparseArray

DENSE = np.arange(20.0).reshape(5, 4) % 3
A = SparseArray.from_dense(DENSE)
OTHER = SparseArray.from_dense(np.eye(5, 4))
OFFSETS = jnp.flip(A.nnz - A.row_offsets)
T = SparseArray.from_dense(np.ones((2, 2, 3)), format=COO)


def batch(A):
    return replace(A, values=jnp.ones((2, A.nnz)))


def of_shared_columns(A, offsets):
    """Two patterns of which only the columns are the same arrays."""
    return (A + SparseArray.from_arrays(A.values, offsets, A.column_indices, shape=A.shape)).values


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: A + DENSE, NotImplementedError, ["+ ndarray", "A.todense() + x", "with_values"]),
        (lambda: DENSE - A, NotImplementedError, ["ndarray -", " x - A.todense()", "x - A.values"]),
        (lambda: 1 - A, NotImplementedError, ["int -", " x - A.todense()"]),
        (lambda: A * A.to_scipy(), NotImplementedError, ["* csr_array", "from_scipy"]),
        (lambda: A / A.to_bcoo(), NotImplementedError, ["/ BCOO"]),
        (lambda: A + 1.0, NotImplementedError, ["+ float", "A.todense() + x"]),
        (lambda: jnp.float32(0) + A, NotImplementedError, ["+ ArrayImpl"]),
        (lambda: A - A.to_scipy(), NotImplementedError, ["- csr_array", "from_scipy"]),
        (lambda: A + A.asformat(CSC), ValueError, ["CSR and CSC", "B.asformat(CSR)"]),
        (lambda: A * A.T.asformat(CSR), ValueError, ["one shape", "(5, 4) and (4, 5)"]),
        (lambda: A / A, NotImplementedError, ["with_values(A.values / B.values)"]),
        (lambda: A * DENSE, ValueError, ["scalar", "'ij,ij->ij'"]),
        (lambda: jax.jit(lambda A, B: A + B)(A, A), ValueError, ["traced", "A.with_values(v)"]),
        (lambda: jax.jit(lambda A: A + OTHER)(A), ValueError, ["traced", "A.with_values(v)"]),
        (lambda: jax.jit(of_shared_columns)(A, OFFSETS), ValueError, ["traced"]),
        (lambda: A + batch(A), ValueError, ["second", "jax.vmap"]),
        (lambda: A[2], IndexError, ["A[i:j]", "int", "A[i:i + 1]", "A.T[i:j].T"]),
        (lambda: A[1:3, 0], IndexError, ["tuple", "A.todense()"]),
        (lambda: A[DENSE > 0], IndexError, ["ndarray"]),
        (lambda: A[::2], IndexError, ["step 1", "step 2"]),
        (lambda: A[::-1], IndexError, ["step 1", "step -1"]),
        (lambda: A[::0], IndexError, ["step cannot be zero"]),
        (lambda: A[0.5:], IndexError, ["known", "integers"]),
        (lambda: jax.jit(lambda i: A[i:])(1), IndexError, ["known"]),
        (lambda: jax.jit(lambda A: A[1:])(A), ValueError, ["[i:j]", "traced", "outside jit"]),
        (lambda: A.asformat(CVS(2))[1:], IndexError, ["multiples of 2", "1:5", "asformat(CSR)"]),
        (lambda: A.asformat(CVS(2))[:1], IndexError, ["multiples of 2", "0:1"]),
        (lambda: list(A), TypeError, ["not iterable"]),
        (lambda: A.sum(2), ValueError, ["axis", "-2 .. 1", "got 2"]),
        (lambda: A.sum((0, -2)), ValueError, ["SparseArray.sum", "each once", "(0, -2)"]),
        (lambda: A.mean(1.0), ValueError, ["SparseArray.mean: axis", "got 1.0"]),
        (lambda: T.sum((0, 3)), ValueError, ["axis", "-3 .. 2", "(0, 3)"]),
        (lambda: np.sum(A, out=DENSE), NotImplementedError, ["SparseArray.sum: out"]),
        (lambda: np.mean(A, out=DENSE), NotImplementedError, ["SparseArray.mean: out"]),
        (lambda: batch(A).sum((0, 1)), ValueError, ["sum: A is batched", "jax.vmap"]),
        (lambda: T.diagonal(), ValueError, ["diagonal", "matrix", "(2, 2, 3)"]),
    ],
)
def test_message(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
