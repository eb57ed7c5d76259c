"""Products of integers, bool and complex numbers, which have no kernel and run in plain JAX by
default, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_invariants import integers
from jax.test_util import check_grads

from sgap_jax import BCSR, COO, CSC, CSR, CVS, SparseArray, sddmm, spmm, spmv

DTYPES = [np.int8, np.uint8, np.int32, np.int64, np.bool_, np.complex64, np.complex128]


def operands(dtype):
    rng = np.random.default_rng(0)
    a, b = integers(7, 6), rng.integers(-40, 41, (6, 3))
    if np.issubdtype(dtype, np.complexfloating):
        a, b = a * (1 + 2j), b * (2 - 1j)
    return a.astype(dtype), b.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [CSR, CSC, CVS(2)], ids=str)
def test_products(dtype, format):
    a, b = operands(dtype)
    A = SparseArray.from_dense(a, format=format)
    assert (A @ b).dtype == dtype
    np.testing.assert_array_equal(A @ b, a @ b)  # integers wrap; bool is an or of ands
    np.testing.assert_array_equal(spmv(A, b[:, 0]), a @ b[:, 0])
    np.testing.assert_array_equal(b.T @ A.T, b.T @ a.T)
    np.testing.assert_array_equal(jax.jit(lambda A, b: spmm(A, b, transpose=True))(A.T, b), a @ b)
    X, Y = a[:, :2], b[:, :2]
    full = np.where(a != 0, X @ Y.T, np.zeros((), dtype))
    sampled = np.asarray(sddmm(A, X, Y).todense())  # zeros in vectors are entries too
    np.testing.assert_array_equal(np.where(a != 0, sampled, np.zeros((), dtype)), full)
    weighted = sddmm(A, X, Y, weighted=True).todense()
    np.testing.assert_array_equal(weighted, (full * a).astype(dtype))


@pytest.mark.parametrize("format", [COO, BCSR(2, 3)], ids=str)
def test_other_formats_under_vmap(format):
    a, b = operands(np.int32)
    A = SparseArray.from_dense(a, format=format)
    B = np.stack([b, 2 * b])
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda b: A @ b))(B), a @ B)


def test_a_structure_that_nobody_checked():
    a, b = operands(np.int32)
    offsets, columns = np.array([0, 2, 1, 9, 3]), np.array([1, -4, 5, 77, 0])
    product = lambda values, offsets, columns, b: (
        SparseArray.from_arrays(values, offsets, columns, shape=(4, 6)) @ b
    )
    values = np.arange(1, 6)
    ours = jax.jit(product)(values.astype(np.int32), offsets, columns, b)
    floats = jax.jit(product)(values.astype(float), offsets, columns, b.astype(float))
    np.testing.assert_array_equal(ours, floats)


def test_complex_derivatives():
    a, b = operands(np.complex128)
    A = SparseArray.from_dense(a)
    f = lambda v, b: A.with_values(v) @ b
    check_grads(jax.jit(f), (A.values, jnp.asarray(b)), order=2, modes=("fwd", "rev"), rtol=1e-4)
