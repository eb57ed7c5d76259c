"""BCSR(r, c): its arrays, elements outside the matrix, peers and files, and limits on fill-in."""

import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from battery import BATTERY, array
from jax.experimental import sparse as jsparse
from jax.sharding import PartitionSpec as P
from vector_cases import encoded, same, vectors

from sgap_jax import (
    BCSR,
    COO,
    CSR,
    CVS,
    SparseArray,
    cluster_rows,
    fill_in,
    prune,
    random,
    read,
    row_max,
    row_sum,
    sddmm,
    sparse_softmax,
    spmm,
    write,
)

DENSE = np.zeros((5, 6), np.float32)
DENSE[[0, 1, 2, 4, 4], [1, 4, 5, 0, 5]] = [1, 2, 3, 4, 5]


def test_arrays_are_as_the_documentation_draws_them():
    A = SparseArray.from_dense(DENSE, format=BCSR(2, 3))
    np.testing.assert_array_equal(A.row_offsets, [0, 2, 3, 5])
    np.testing.assert_array_equal(A.column_indices, [0, 1, 1, 0, 1])
    np.testing.assert_array_equal(A.values[1], [[0, 0, 0], [0, 2, 0]])
    np.testing.assert_array_equal(A.values[4], [[0, 0, 5], [0, 0, 0]])  # row 5 is outside
    assert A.values.shape == (5, 2, 3) and A.nnz == 30
    assert repr(A) == (
        "SparseArray(shape=(5, 6), format=BCSR(2, 3), nnz=30, density=1, dtype=float32)"
    )
    assert repr(jax.tree.map(lambda x: x[None], A)).endswith("batch=(1,))")
    assert A.T.row_indices is A.column_indices and A.T.column_offsets is A.row_offsets
    assert not hasattr(A, "row_indices") and not hasattr(A.T, "row_offsets")
    assert all(x is y for x, y in zip(jax.tree.leaves(A), jax.tree.leaves(A.T), strict=True))
    same(pickle.loads(pickle.dumps(A)).T, DENSE.T, BCSR(2, 3).transposed)


def test_from_a_mask_of_blocks():
    mask = np.array([[1, 0, 0], [0, 0, 0], [0, 1, 1]], bool)
    blocks = np.random.default_rng(0).standard_normal((mask.sum(), 2, 4)).astype(np.float32)
    pattern = scipy.sparse.csr_array(mask)
    A = SparseArray.from_arrays(
        blocks, pattern.indptr, pattern.indices, shape=(6, 12), format=BCSR(2, 4)
    )
    dense = np.zeros((3, 2, 3, 4), np.float32)
    dense[*np.nonzero(mask)[:1], :, np.nonzero(mask)[1]] = blocks
    same(A, dense.reshape(6, 12), BCSR(2, 4))


@pytest.mark.parametrize("shape", [(3, 2), (4, 4)], ids=str)
def test_what_is_outside_reaches_nothing(shape):
    arrays, case, _ = encoded(BATTERY["empty_rows_at_both_ends"], shape[0], width=shape[1])
    A, dense = vectors(arrays, case, "float64"), case.dense()
    outside = np.isnan(np.asarray(A.values))
    assert outside.any()
    same(A, dense, BCSR(*shape))
    rng = np.random.default_rng(1)
    X, Y = (jnp.asarray(rng.standard_normal((n, 3))) for n in A.shape)
    zeros = A.with_values(np.where(outside, 0.0, A.values))
    outside = outside.reshape(-1)

    def everything(A):
        S, Q = sddmm(A, X, Y, weighted=True), sparse_softmax(A)
        rows = row_sum(A), row_max(A), spmm(A, Y), spmm(A, X, transpose=True), A.T @ X
        return S.values, Q.values, *rows, A.asformat(CSR).todense(), A.T.asformat(COO).todense()

    clean, dirty = jax.jit(everything)(zeros), jax.jit(everything)(A)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert not dirty[0].reshape(-1)[outside].any() and not dirty[1].reshape(-1)[outside].any()
    gradient = jax.jit(
        jax.grad(lambda v: sum(jnp.sum(jnp.sin(x)) for x in everything(A.with_values(v))[2:3]))
    )(A.values)
    assert np.isfinite(gradient).all() and not gradient.reshape(-1)[outside].any()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.int8, np.complex64, bool])
def test_dtypes(dtype):
    dense = np.array([[1, 0, 2], [0, 0, 3], [0, 5, 0]]).astype(dtype)
    A = SparseArray.from_dense(dense, format=BCSR(2, 2))
    assert A.dtype == dtype
    np.testing.assert_array_equal(A.todense(), dense)
    np.testing.assert_array_equal(A.asformat(CSR).todense(), dense)


def test_scipy_has_the_same_arrays():
    A = random((24, 12), density=0.3, format=BCSR(4, 3), dtype=jnp.float64)
    a = A.to_scipy()
    assert a.format == "bsr" and a.blocksize == (4, 3)
    for mine, theirs in zip(
        (A.values, A.column_indices, A.row_offsets), (a.data, a.indices, a.indptr), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    a.data[0] = 0  # zeros of a stored block stay stored
    B = SparseArray.from_scipy(a, format=BCSR(4, 3)).checked()
    np.testing.assert_array_equal(B.values, a.data)
    np.testing.assert_array_equal(B.column_indices, A.column_indices)
    empty = SparseArray.from_dense(np.zeros((4, 6)), format=BCSR(2, 3)).to_scipy()
    assert empty.blocksize == (2, 3) and empty.nnz == 0
    ragged = random((9, 7), density=0.5, format=BCSR(4, 3), dtype=jnp.float64)
    assert ragged.to_scipy().format == "csr" and ragged.T.to_scipy().format == "csc"
    np.testing.assert_array_equal(ragged.to_scipy().toarray(), ragged.todense())
    assert SparseArray.from_dense(DENSE, format=BCSR(1, 2)).astype("bfloat16").to_scipy().nnz == 10


def test_the_peers_of_jax():
    A = random((9, 7), density=0.4, format=BCSR(2, 3), dtype=jnp.float64)
    dense = np.asarray(A.todense())
    np.testing.assert_array_equal(A.to_bcoo().todense(), dense)
    same(SparseArray.from_bcsr(A.to_bcsr(), format=BCSR(2, 3)), dense, BCSR(2, 3))
    same(SparseArray.from_bcoo(A.to_bcoo(), format=BCSR(2, 3)), dense, BCSR(2, 3))
    # The blocks as dense dimensions of JAX's BCSR have the same arrays as ours.
    x = np.zeros((2, 3, 4, 5))
    x[0, 2], x[1, 0] = 1, 2
    b = jsparse.BCSR.fromdense(jnp.asarray(x), n_dense=2)
    B = SparseArray.from_arrays(b.data, b.indptr, b.indices, shape=(8, 15), format=BCSR(4, 5))
    same(B, x.swapaxes(1, 2).reshape(8, 15), BCSR(4, 5))


@pytest.mark.parametrize("shape", [(24, 12), (23, 11)], ids=str)
def test_files(tmp_path, shape):
    A = random(shape, density=0.3, format=BCSR(4, 3), dtype=jnp.float64)
    for name in ("a.npz", "a.mtx", "a.tns.gz"):
        write(tmp_path / name, A)
        B = read(tmp_path / name, format=BCSR(4, 3), dtype=jnp.float64)
        same(B, np.asarray(A.todense()), BCSR(4, 3))
    theirs = scipy.sparse.load_npz(tmp_path / "a.npz")
    assert theirs.format == ("bsr" if shape[1] == 12 else "csr")
    np.testing.assert_array_equal(theirs.toarray(), A.todense())
    scipy.sparse.save_npz(tmp_path / "b.npz", theirs)
    np.testing.assert_array_equal(read(tmp_path / "b.npz").todense(), A.todense())
    narrow = A.astype(jnp.bfloat16)
    write(tmp_path / "c.npz", narrow)
    back = read(tmp_path / "c.npz", format=BCSR(4, 3))
    assert back.dtype == jnp.bfloat16
    np.testing.assert_array_equal(back.todense(), narrow.todense())


def test_pruned_blocks_train_on_the_kernels_of_vectors():
    weights = np.random.default_rng(0).standard_normal((32, 24))
    W = prune(weights, BCSR(8, 8), sparsity=0.5)
    assert W.values.shape == (6, 8, 8)
    norms = (weights.reshape(4, 8, 3, 8) ** 2).sum((1, 3))
    kept = np.kron(norms >= np.sort(norms, axis=None)[6], np.ones((8, 8)))
    X = jnp.asarray(np.random.default_rng(1).standard_normal((24, 16)))
    step = jax.grad(lambda v, X: jnp.sum(jnp.sin(W.with_values(v) @ X)), (0, 1))
    text = jax.jit(step).lower(W.values, X).as_text()
    for op, times in (("spmm", 2), ("sddmm", 1)):  # W X, W^T dY and dY X^T
        assert text.count(f"custom_call @sgap_{op}_cvs_v1") == times
    assert "csr" not in text
    dW, dX = step(W.values, X)
    dense, X = weights * kept, np.asarray(X)
    dY = np.cos(dense @ X)
    np.testing.assert_allclose(dX, dense.T @ dY, atol=1e-12)
    np.testing.assert_allclose(W.with_values(dW).todense(), kept * (dY @ X.T), atol=1e-12)


def test_structure_made_inside_jit():
    A = SparseArray.from_dense(DENSE, format=BCSR(2, 4))

    @jax.jit
    def product(offsets, indices, B):
        return (
            SparseArray.from_arrays(
                A.values, offsets, indices, shape=(5, 6), format=BCSR(2, 4)
            ).checked()
            @ B
        )

    B = jnp.asarray(np.random.default_rng(0).standard_normal((6, 3)), jnp.float32)
    np.testing.assert_allclose(product(*A.index_arrays[1], B), DENSE @ B, rtol=1e-6)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="got 2"):
        product(A.row_offsets, A.column_indices.at[1].set(2), B).block_until_ready()


def test_a_program_of_blocks_is_exported_and_sharded():
    A, X = SparseArray.from_dense(DENSE, format=BCSR(2, 4)), jnp.ones((6, 4), jnp.float32)
    allowed = [jax.export.DisabledSafetyCheck.custom_call("sgap_spmm_cvs_v1")]
    leaves, tree = jax.tree.flatten(A)
    f = jax.jit(lambda leaves, X: jax.tree.unflatten(tree, leaves) @ X)
    exported = jax.export.export(f, disabled_checks=allowed)(leaves, X)
    np.testing.assert_array_equal(exported.call(leaves, X), DENSE @ X)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(spmm, mesh=mesh, in_specs=(P(), P(None, "x")), out_specs=P(None, "x"))
    np.testing.assert_array_equal(jax.jit(sharded)(A, X), DENSE @ X)


def test_random_blocks_and_clustered_rows():
    A = random((70, 50), density=0.25, format=BCSR(8, 5), seed=3)
    assert A.values.shape == (round(0.25 * 9 * 10), 8, 5)
    blocks = random((64, 512), density=0.1, format=BCSR(8, 4))
    shuffled = blocks.to_scipy().tocsr()[np.random.default_rng(0).permutation(64)]
    S = SparseArray.from_scipy(shuffled)
    p = cluster_rows(S, BCSR(8, 4))
    assert sorted(p) == list(range(64))
    assert fill_in(S, BCSR(8, 4)) > 4
    assert fill_in(SparseArray.from_scipy(shuffled[p]), BCSR(8, 4)) == 1


@pytest.mark.parametrize("format", [CVS(3), CVS(4).transposed, BCSR(2, 3), BCSR(4, 4)], ids=str)
def test_a_limit_on_fill_in_is_on_what_fill_in_says(format):
    A = array(BATTERY["every_length"], jnp.float32, COO)
    ratio = fill_in(A, format)
    assert ratio > 1
    B = A.asformat(format, max_fill_in=ratio)
    assert B.nnz == round(ratio * A.nnz)
    with pytest.raises(ValueError) as caught:
        A.asformat(format, max_fill_in=np.nextafter(ratio, 0))
    for word in ("asformat", str(format), f"{ratio:.4g}", "max_fill_in", "cluster_rows"):
        assert word in str(caught.value)
    # Vectors and blocks first become entries and then other blocks: stored zeros count as entries.
    assert B.asformat(CSR, max_fill_in=1).format == CSR
    assert B.asformat(format, max_fill_in=1) is B
    with pytest.raises(ValueError, match="max_fill_in"):
        B.asformat(format, max_fill_in=0.5)
    entries = int(B.row_lengths.sum())
    assert B.asformat(BCSR(5, 2)).nnz == round(fill_in(B, BCSR(5, 2)) * entries)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda A: A.asformat(BCSR(4, 4), max_fill_in=0.5), ValueError, "max_fill_in.*at least 1"),
        (lambda A: A.asformat(BCSR(4, 4), max_fill_in="x"), ValueError, "max_fill_in.*'x'"),
        (
            lambda A: A.asformat(BCSR(4, 4), max_fill_in=-(10**400)),
            ValueError,
            "max_fill_in.*-1000",
        ),
        (lambda A: A.asformat(CSR, max_fill_in=float("nan")), ValueError, "max_fill_in.*nan"),
        (lambda A: jax.jit(lambda a: a.asformat(BCSR(2, 2)))(A), ValueError, "traced structure"),
        (lambda A: A.asformat(BCSR(2, 2000)), ValueError, "up to 1024 rows and columns"),
        (lambda A: A.asformat(BCSR(4, 2)).with_values(A.values), ValueError, r"\[\d+, 4, 2\]"),
        (lambda A: cluster_rows(A, BCSR(4, 2).transposed), ValueError, "expected CVS.*BCSR"),
        (lambda A: fill_in(A, COO), ValueError, "expected CVS.*BCSR"),
        (lambda A: BCSR(0, 2), ValueError, "positive"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call(array(BATTERY["every_length"], jnp.float32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(values=np.ones((2, 3, 2))), r"values: expected shape \[2, 2, 3\], got \[2, 3, 2\]"),
        (dict(values=np.ones((2, 6))), r"values: expected shape \[2, 2, 3\]"),
        (dict(row_offsets=[0, 1]), r"row_offsets: expected shape \[3\]"),
        (dict(column_indices=[0, 2]), r"column_indices\[1\]: expected an index in 0 .. 1, got 2"),
        (dict(row_offsets=[0, 2, 2], column_indices=[1, 1]), "sorted, no duplicates"),
        (dict(format=BCSR(2, 3).transposed), r"column_offsets: expected shape \[4\]"),
    ],
)
def test_arrays_that_do_not_fit(change, words):
    good = dict(values=np.ones((2, 2, 3)), row_offsets=[0, 1, 2], column_indices=[0, 1])
    good |= dict(shape=(4, 5), format=BCSR(2, 3))
    SparseArray.from_arrays(**good).checked()
    with pytest.raises(ValueError, match=words):
        SparseArray.from_arrays(**good | change)
