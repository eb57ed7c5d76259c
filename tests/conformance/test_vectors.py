"""Column vectors and blocks: they store the matrix that they are made from, and every op accepts
them."""

import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from battery import BATTERY, array
from hypothesis import given, settings
from hypothesis import strategies as st
from vector_cases import same, stored_mask

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSR,
    CVS,
    SparseArray,
    cluster_rows,
    fill_in,
    gsddmm,
    gspmm,
    prune,
    random,
    read,
    write,
)

ENTRIES = [CSR, CSC, COO]
VECTORS = [CVS(1), CVS(3), CVS(8), CVS(4).transposed, CVS(3).transposed]
BLOCKS = [BCSR(3, 2), BCSR(2, 9), BCSR(2, 4).transposed]
# Each pair needs a dozen compilations: every format meets an ordinary matrix, every matrix a
# format.
PAIRS = [(name, CVS(3)) for name in ("no_rows", "no_columns", "no_entries", "padded", "tall")]
PAIRS += [(name, CVS(4).transposed) for name in ("only_padding", "one_heavy_row", "padded")]
PAIRS += [(name, BCSR(2, 3)) for name in ("no_rows", "no_columns", "no_entries", "tall")]
PAIRS += [(name, BCSR(4, 5).transposed) for name in ("only_padding", "padded")]
PAIRS += [("empty_rows_at_both_ends", format) for format in (*VECTORS, *BLOCKS)]
pairs = pytest.mark.parametrize(("name", "format"), PAIRS, ids=lambda x: str(x))


@pairs
def test_a_matrix_stays_what_it_was(name, format):
    case = BATTERY[name]
    dense = case.dense()
    A = array(case, jnp.float64, format)
    same(A, dense, format)
    same(A.T, dense.T, format.transposed)
    assert A.T.values is A.values
    same(SparseArray.from_dense(dense, format=format), dense, format)
    np.testing.assert_array_equal(A.to_scipy().toarray(), dense)
    np.testing.assert_array_equal(A.to_bcoo().todense(), dense)
    traced = jax.jit(lambda a: a.asformat(CSR))(A)
    for entries, B in [(f, A.asformat(f)) for f in ENTRIES] + [(CSR, traced)]:
        B.checked()
        assert B.format == entries
        np.testing.assert_array_equal(B.todense(), dense)
    same(traced.asformat(format), dense, format)


def test_arrays_are_as_the_paper_draws_them():
    dense = np.zeros((6, 4), np.float32)
    dense[[0, 2, 5], [3, 0, 0]] = [1, 2, 3]
    A = SparseArray.from_dense(dense, format=CVS(2))
    np.testing.assert_array_equal(A.row_offsets, [0, 1, 2, 3])
    np.testing.assert_array_equal(A.column_indices, [3, 0, 0])
    np.testing.assert_array_equal(A.values, [[1, 0], [2, 0], [0, 3]])
    B = SparseArray.from_arrays(
        A.values, A.row_offsets, A.column_indices, shape=(6, 4), format=CVS(2)
    )
    np.testing.assert_array_equal(B.todense(), dense)
    assert not hasattr(A, "row_indices") and A.T.row_indices is A.column_indices
    assert repr(A) == (
        "SparseArray(shape=(6, 4), format=CVS(2), nnz=6, density=0.25, dtype=float32)"
    )
    assert pickle.loads(pickle.dumps(A)).format == CVS(2)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.int8, np.complex64, bool])
def test_dtypes(dtype):
    dense = np.array([[1, 0, 2], [0, 0, 3], [0, 5, 0]]).astype(dtype)
    A = SparseArray.from_dense(dense, format=CVS(2))
    assert A.dtype == dtype
    np.testing.assert_array_equal(A.todense(), dense)


def test_files_and_peers(tmp_path):
    A = random((24, 10), density=0.3, format=CVS(4), dtype=jnp.float64)
    dense = A.todense()
    for name in ("a.npz", "a.mtx.gz", "a.tns"):
        write(tmp_path / name, A)
        same(read(tmp_path / name, format=CVS(4), dtype=jnp.float64), np.asarray(dense), CVS(4))
    bsr = A.to_scipy()
    assert bsr.format == "bsr" and bsr.blocksize == (4, 1) and bsr.data.size == A.nnz
    blocks = scipy.sparse.coo_array(np.asarray(dense)).tobsr((4, 2))
    from_blocks = SparseArray.from_scipy(blocks, format=CVS(4)).checked()
    np.testing.assert_array_equal(from_blocks.todense(), dense)
    np.testing.assert_array_equal(SparseArray.from_bcsr(A.to_bcsr()).todense(), dense)


@pytest.mark.parametrize(("m", "length"), [(2, 3), (4, 3), (6, 3), (0, 2)])
def test_padding_vectors_count_for_nothing(m, length):
    blocks = -(-m // length)
    offsets = np.arange(blocks + 1)
    indices = np.array([1, 0, 3, 2, 2, 1][: blocks + 3])
    values = np.arange(1.0, len(indices) * length + 1).reshape(-1, length)
    values[blocks:] = np.nan
    A = SparseArray.from_arrays(values, offsets, indices, shape=(m, 4), format=CVS(length))
    dense = np.zeros((m, 4))
    for b in range(blocks):
        rows = slice(b * length, min((b + 1) * length, m))
        dense[rows, indices[b]] = values[b, : rows.stop - rows.start]
    np.testing.assert_array_equal(A.checked().todense(), dense)
    for B in (A.asformat(CSR), A.asformat(CSC), jax.jit(lambda a: a.asformat(CSC))(A)):
        np.testing.assert_array_equal(B.checked().todense(), dense)
    np.testing.assert_array_equal(A @ jnp.eye(4), dense)
    np.testing.assert_array_equal(A.T @ jnp.eye(m), dense.T)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([CVS(1), CVS(3), CVS(8), BCSR(2, 2), BCSR(3, 4)]),
    st.sampled_from([(1, 1), (7, 5), (16, 4)]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_entries_come_back_as_they_went(format, shape, flip, seed):
    rng = np.random.default_rng(seed)
    dense = rng.integers(-9, 9, shape) * (rng.random(shape) < rng.choice([0.1, 0.5]))
    format = format.transposed if flip else format
    A = SparseArray.from_dense(dense, format=format)
    same(A, dense, format)
    B = A.asformat(CSR).checked()
    np.testing.assert_array_equal(B.todense(), dense)
    stored = stored_mask(dense, format).sum()
    assert int(B.row_offsets[-1]) == stored
    nnz = np.count_nonzero(dense)
    whole = A.nnz / nnz if nnz else 1.0
    assert fill_in(SparseArray.from_dense(dense), format) == pytest.approx(whole)


@pytest.mark.parametrize("format", [CVS(4).transposed, BCSR(4, 3)], ids=str)
def test_messages_along_the_numbers_of_vectors(format):
    A = random((10, 7), density=0.3, format=format, dtype=jnp.float64)
    X = jnp.asarray(np.random.default_rng(0).standard_normal((7, 5)))
    for op, reduce in (("copy", "max"), ("add", "sum"), ("div", "mean"), ("mul", "min")):
        expected = gspmm(A.asformat(CSR), X, op=op, reduce=reduce)
        np.testing.assert_allclose(gspmm(A, X, op=op, reduce=reduce), expected, rtol=1e-12)
    C = gsddmm(A, jnp.ones((10, 2)), X[:, :2], op="add")
    assert C.format == format and C.values.shape == A.values.shape
    sums = 2 + X[:, :2].sum(1)
    inside = np.asarray(A.coordinates()[0]) < 10
    got = np.asarray(C.values).reshape(-1)[inside]
    np.testing.assert_allclose(got, sums[np.asarray(A.coordinates()[1])[inside]])


def test_values_and_gradients_pass_through_the_encoding():
    entries = array(BATTERY["every_length"], jnp.float64)

    def loss(v, format):
        return jnp.sum(jnp.sin(entries.with_values(v).asformat(format).todense()))

    expected = jnp.cos(entries.values)
    for format in (CVS(3), CVS(4).transposed, BCSR(3, 2)):
        np.testing.assert_allclose(jax.grad(loss)(entries.values, format), expected)
        A = entries.asformat(format)
        back = jax.jit(jax.grad(lambda v, A=A: jnp.sum(A.with_values(v).asformat(CSR).values ** 2)))
        inside = np.asarray(A.coordinates()[0]) < A.shape[0]
        np.testing.assert_allclose(
            back(A.values).reshape(-1)[inside], 2 * A.values.reshape(-1)[inside]
        )


@pytest.mark.parametrize(
    "format", [CSR, CSC, CVS(8), CVS(4).transposed, BCSR(4, 4), BCSR(8, 3).transposed], ids=str
)
def test_prune_keeps_the_largest(format):
    rng = np.random.default_rng(1)
    W = rng.standard_normal((44, 30)).astype(np.float32)
    A = prune(W, format, sparsity=0.75)
    A.checked()
    dense = np.asarray(A.todense())
    kept = stored_mask(dense, format)
    np.testing.assert_array_equal(dense[kept], W[kept])
    height, width = (*format.block_shape, 1, 1)[:2]

    def norms(x):
        x = np.transpose(x, format.modes).astype(np.float64) ** 2
        down, across = -(-x.shape[0] // height), -(-x.shape[1] // width)
        whole = np.zeros((down * height, across * width))
        whole[: x.shape[0], : x.shape[1]] = x
        return whole.reshape(down, height, across, width).sum((1, 3))

    mine, every = norms(np.where(kept, W, 0)), norms(W)
    assert np.count_nonzero(mine) == round(0.25 * every.size)
    assert mine[mine > 0].min() >= every[mine == 0].max()
    assert prune(W, format, sparsity=1).nnz == 0
    np.testing.assert_array_equal(prune(W, format, sparsity=0).todense(), W)


def test_prune_of_equal_norms_keeps_the_first_and_drops_nan():
    W = np.ones((2, 4), np.float16)
    np.testing.assert_array_equal(prune(W, sparsity=0.5).todense(), [[1] * 4, [0] * 4])
    W[0, 0] = np.nan
    assert np.isfinite(prune(W, sparsity=0.5).values).all()
    big = np.full((4, 2), 60000, np.float16)  # the square overflows a float16
    assert prune(big, CVS(2), sparsity=0.5).nnz == 4


@pytest.mark.parametrize("unit", [1e200, 5e307, 1e-200, 1e-307])
def test_prune_beyond_the_squares_of_float64(unit):
    W = np.array([[1, 2, 1], [3, 0, -2]]) * unit
    for format, kept in (("CSR", [[0, 0, 0], [3, 0, 0]]), (CVS(2), [[1, 0, 0], [3, 0, 0]])):
        A = prune(W, format, sparsity=5 / 6 if format == "CSR" else 2 / 3)
        np.testing.assert_array_equal(A.todense(), np.array(kept) * unit)
    W[0, 1], W[1, 2] = -np.inf, np.nan
    np.testing.assert_array_equal(np.isinf(prune(W, sparsity=5 / 6).values), [True])


def test_random_structure():
    A = random((70, 50), density=0.2, format=CVS(8), seed=3)
    assert A.values.shape == (round(0.2 * 9 * 50), 8) and A.dtype == jnp.float32
    B = random((70, 50), density=0.2, format=CVS(8), seed=3)
    np.testing.assert_array_equal(A.todense(), B.todense())
    assert (random((70, 50), density=0.2, format=CVS(8), seed=4).todense() != A.todense()).any()
    assert random((5, 0), density=1.0).nnz == 0 and random((3, 4), density=1.0).nnz == 12
    # Uniform: each of 12 places is taken in half of the draws.
    counts = sum(
        (random((3, 4), density=0.5, seed=s).todense() != 0).astype(int) for s in range(400)
    )
    assert (abs(counts - 200) < 60).all()


def test_similar_rows_become_neighbours():
    blocks = random((64, 256), density=0.1, format=CVS(8)).to_scipy().tocsr()
    shuffle = np.random.default_rng(0).permutation(64)
    A = SparseArray.from_scipy(blocks[shuffle])
    p = cluster_rows(A, CVS(8))
    assert sorted(p) == list(range(64))
    B = SparseArray.from_scipy(A.to_scipy()[p])
    assert fill_in(A, CVS(8)) > 4 and fill_in(B, CVS(8)) == 1
    X = np.random.default_rng(1).standard_normal((256, 3)).astype(np.float32)
    np.testing.assert_allclose((B.asformat(CVS(8)) @ X), (A @ X)[p], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(cluster_rows(SparseArray.from_scipy(blocks), CVS(8)), range(64))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda A: jax.jit(lambda a: a.asformat(CVS(2)))(A), ValueError, "traced structure"),
        (lambda A: fill_in(A, CSR), ValueError, "expected CVS"),
        (lambda A: cluster_rows(A, CSR), ValueError, "expected CVS"),
        (lambda A: cluster_rows(A, CVS(2).transposed), ValueError, "expected CVS"),
        (lambda A: fill_in(np.eye(3), CVS(2)), ValueError, "expected a SparseArray"),
        (lambda A: cluster_rows(A.to_scipy(), CVS(2)), ValueError, "2 dimensions, got csr_array"),
        (lambda A: A.asformat(CVS(10**10)), ValueError, "up to 1024 rows"),
        (lambda A: random((3, 3), density=0.5, seed="x"), ValueError, "dtype or seed"),
        (lambda A: A.asformat(CVS(4)).with_values(A.values), ValueError, r"\[\d+, 4\]"),
        (lambda A: prune(np.ones(3), sparsity=0.5), ValueError, "a real matrix"),
        (lambda A: prune(np.ones((3, 3), int), sparsity=0.5), ValueError, "a real matrix"),
        (lambda A: prune(np.ones((3, 3)), sparsity=1.5), ValueError, "from 0 to 1"),
        (lambda A: prune(np.ones((3, 3)), sparsity=float("nan")), ValueError, "from 0 to 1"),
        (
            lambda A: jax.jit(lambda W: prune(W, sparsity=0.5))(np.ones((3, 3))),
            ValueError,
            "concrete",
        ),
        (lambda A: random((3,), density=0.5), ValueError, "dimensions"),
        (lambda A: random((3, 3), density=-1), ValueError, "from 0 to 1"),
        (lambda A: random((3, 3), density=0.5, dtype=int), ValueError, "floating"),
        (
            lambda A: SparseArray.from_arrays(
                np.ones((1, 2)), [0, 1], [9], shape=(2, 3), format=CVS(2)
            ),
            ValueError,
            "column_indices",
        ),
        (
            lambda A: SparseArray.from_arrays(
                np.ones((1, 2)), [0, 1], [0], shape=(3, 3), format=CVS(2)
            ),
            ValueError,
            r"row_offsets: expected shape \[3\]",
        ),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call(array(BATTERY["every_length"], jnp.float32))
