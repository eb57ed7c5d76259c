"""Values and gradients in every storage order, against the dense twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from differentiable_ops import close, normal

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSR,
    CVS,
    SparseArray,
    einsum,
    gspmm,
    info,
    row_sum,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
)

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
        # Vectors also store zeros, and their elements outside the matrix are dropped.
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

    def infinite_where_padded(c):
        return jnp.sum(jnp.sqrt(sddmm(A, abs(X), abs(Y), scale=c).values))

    for f in (weighted, softmax, infinite_where_padded):
        assert np.isfinite(jax.grad(f)(jnp.asarray(0.5)))


@pytest.mark.parametrize("format", [CSR, CVS(8)], ids=str)
def test_programs_with_symbolic_sizes(format):
    A = array(CASE, jnp.float32).asformat(format)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in info()["ffi_targets"]]
    rows, columns = normal(M, 3).astype(jnp.float32), normal(K, 3).astype(jnp.float32)

    def f(A, X, Y):
        S = sparse_softmax(sddmm(A, X, Y, weighted=True))
        P = gspmm(A, Y, reduce="max") + gspmm(A, Y, op="copy", reduce="mean") + A @ Y
        both = jax.vmap(lambda y: einsum("ij,jr,jr->ir", A, y, Y))(jnp.stack([Y, 2 * Y]))
        return row_sum(S), P, A.T @ X, both

    def loss(v, A, X, Y):
        return sum(jnp.sum(jnp.sin(x)) for x in f(A.with_values(v), X, Y))

    def program(A, X, Y):
        return f(A, X, Y), jax.grad(loss, (0, 2, 3))(A.values, A, X, Y)

    n, z, b = jax.export.symbolic_shape("n, z, b")
    leaves, tree = jax.tree.flatten(A)
    count = A.values.shape[0]
    sizes = [tuple(z if size == count else size for size in x.shape) for x in leaves]
    some = jax.tree.unflatten(tree, map(jax.ShapeDtypeStruct, sizes, [x.dtype for x in leaves]))
    wide = [jax.ShapeDtypeStruct((x.shape[0], n), x.dtype) for x in (rows, columns)]
    exported = jax.export.export(jax.jit(program), disabled_checks=allowed)(some, *wide)
    got, expected = exported.call(A, rows, columns), program(A, rows, columns)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), got, expected)

    heads = jnp.stack([rows[:, None], 2 * rows[:, None]])
    square = SparseArray.from_dense(np.eye(M), dtype=jnp.float32).asformat(format)
    attend = jax.jit(jax.grad(lambda q: jnp.sum(jnp.sin(sparse_attention(q, q, q, square)))))
    any_batch = jax.ShapeDtypeStruct((b, *heads.shape[1:]), heads.dtype)
    exported = jax.export.export(attend, disabled_checks=allowed)(any_batch)
    np.testing.assert_allclose(exported.call(heads), attend(heads), rtol=1e-6)


def test_symbolic_sizes_of_a_structure_made_inside_and_of_heads():
    A, f32, i32 = array(CASE, jnp.float32), jnp.float32, jnp.int32
    n, z = jax.export.symbolic_shape("n, z")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in info()["ffi_targets"]]
    total = lambda v, o, i: row_sum(SparseArray.from_arrays(v, o, i, shape=CASE.shape))
    sizes = [jax.ShapeDtypeStruct(*x) for x in (((z,), f32), ((M + 1,), i32), ((z,), i32))]
    exported = jax.export.export(jax.jit(total), disabled_checks=allowed)(*sizes)
    arrays = A.values, A.row_offsets, A.column_indices
    np.testing.assert_allclose(exported.call(*arrays), row_sum(A), rtol=1e-6)
    square = SparseArray.from_dense(np.eye(M), dtype=f32)
    structure = jnp.arange(M + 1, dtype=i32), jnp.arange(M, dtype=i32)

    def of_length(q, offsets, columns):
        length = q.shape[1]
        arrays = ((), (offsets, columns))
        transposed = offsets, columns, columns  # the transpose of a diagonal matrix
        own = SparseArray(jnp.ones(columns.shape), arrays, transposed, (length, length), CSR)
        f = lambda q: jnp.sum(sparse_attention(q, q, q, own))
        return jax.grad(f)(q), own.sum(), own.diagonal()

    q = normal(1, M, 2, 16).astype(f32)
    sizes = [jax.ShapeDtypeStruct((1, n, 2, 16), f32)]
    sizes += [jax.ShapeDtypeStruct(size, i32) for size in ((n + 1,), (n,))]
    exported = jax.export.export(jax.jit(of_length), disabled_checks=allowed)(*sizes)
    for got, expected in zip(exported.call(q, *structure), of_length(q, *structure), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    attend = jax.jit(lambda q: sparse_attention(q, q, q, square))
    for shape in ((1, M, n, 8), (1, M, 2, n)):
        with pytest.raises(NotImplementedError, match="heads and features have the program's"):
            jax.export.export(attend)(jax.ShapeDtypeStruct(shape, f32))
