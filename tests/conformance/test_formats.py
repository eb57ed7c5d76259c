"""Every stored format passes the same invariants, concrete and traced, on every named matrix."""

import copy
import math
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.io
import scipy.sparse
from battery import BATTERY, array

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    Compressed,
    Dense,
    Format,
    Singleton,
    SparseArray,
    read,
)

COO_BY_COLUMNS = COO.transposed
STORED = [CSR, CSC, COO, COO_BY_COLUMNS]
formats = pytest.mark.parametrize("format", STORED, ids=str)
cases = pytest.mark.parametrize("case", BATTERY.values(), ids=list(BATTERY))

SMALL = BATTERY["empty_rows_at_both_ends"]
PADDED = BATTERY["padded"]


def invariants(A, dense):
    """What holds for a SparseArray of any format that stands for `dense`."""
    A.checked()
    m, k = dense.shape
    assert A.shape == (m, k) and A.ndim == 2
    assert all(x.dtype == jnp.int32 for x in jax.tree.leaves((A.index_arrays, A.transposed)))
    np.testing.assert_array_equal(A.todense(), dense)
    np.testing.assert_array_equal(A.row_lengths, (dense != 0).sum(1))
    np.testing.assert_array_equal(A.T.row_lengths, (dense != 0).sum(0))
    assert math.isclose(A.density, A.nnz / (m * k) if m * k else 0.0)
    offsets, indices, permutation = (np.asarray(x) for x in A.transposed)
    used = int(offsets[-1])
    # Column order by its definition: a stable sort of the entries by the inner coordinate.
    outer, inner = (np.asarray(A.coordinates()[mode]) for mode in A.format.modes)
    np.testing.assert_array_equal(permutation, np.argsort(inner, kind="stable"))
    np.testing.assert_array_equal(indices[:used], outer[permutation[:used]])
    size = A.shape[A.format.modes[1]]
    np.testing.assert_array_equal(
        np.diff(offsets), np.bincount(inner[:used], minlength=size)[:size]
    )


@cases
@formats
def test_invariants(case, format):
    A = array(case, jnp.float64, format)
    assert A.format == format and A.nnz == case.nnz
    invariants(A, case.dense())
    invariants(A.T, case.dense().T)
    assert A.T.format == format.transposed and A.T.T.format == format


@cases
def test_conversions_between_all_formats(case):
    dense = case.dense()
    for first in STORED:
        A = array(case, jnp.float64, first)
        for second in STORED:
            invariants(A.asformat(second), dense)


@formats
@pytest.mark.parametrize("case", [SMALL, PADDED, BATTERY["only_padding"], BATTERY["no_rows"]])
def test_traced_conversions_are_the_concrete_ones(case, format):
    for second in STORED:
        A = array(case, jnp.float64, second)
        concrete, traced = A.asformat(format), jax.jit(lambda a: a.asformat(format))(A)
        used = case.stored
        for name in ("values", "index_arrays", "transposed"):
            for x, y in zip(
                jax.tree.leaves(getattr(concrete, name)),
                jax.tree.leaves(getattr(traced, name)),
                strict=True,
            ):
                np.testing.assert_array_equal(x[:used], y[:used])
        invariants(traced, case.dense())


@formats
def test_the_transpose_shares_every_array(format):
    A = array(SMALL, jnp.float32, format)
    assert all(x is y for x, y in zip(jax.tree.leaves(A), jax.tree.leaves(A.T), strict=True))


def test_csr_and_coo_keep_the_order_of_values():
    A = array(SMALL, jnp.float32)
    assert A.asformat(COO).values is A.values
    assert A.T.asformat(COO_BY_COLUMNS).values is A.values
    assert A.asformat(CSR) is A


@formats
def test_fields_exist_where_they_are_stored(format):
    A = array(SMALL, jnp.float32, format)
    rows, columns = np.nonzero(SMALL.dense())
    order = np.lexsort((rows, columns)) if format.modes == (1, 0) else slice(None)
    stored = {
        CSR: ("row_offsets", "column_indices"),
        CSC: ("column_offsets", "row_indices"),
    }.get(format, ("row_indices", "column_indices"))
    for name in ("row_offsets", "column_offsets", "row_indices", "column_indices"):
        if name not in stored:
            assert not hasattr(A, name)
            with pytest.raises(AttributeError, match=rf"{name}.*asformat\(\w+\)"):
                getattr(A, name)
            continue
        expected = {
            "row_indices": rows[order],
            "column_indices": columns[order],
            "row_offsets": np.searchsorted(rows, np.arange(SMALL.shape[0] + 1)),
            "column_offsets": np.searchsorted(np.sort(columns), np.arange(SMALL.shape[1] + 1)),
        }[name]
        np.testing.assert_array_equal(getattr(A, name), expected)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (CSR, "CSR"),
        (CSC, "CSC"),
        (COO, "COO"),
        (COO_BY_COLUMNS, "COO(order=(1, 0))"),
        (CSF(3), "CSF(3)"),
        (BCSR(2, 4), "BCSR(2, 4)"),
        (CVS(8), "CVS(8)"),
        (Format((Dense, Compressed, Compressed)), "Format((Dense, Compressed, Compressed))"),
    ],
)
def test_formats_are_values(format, text):
    assert str(format) == repr(format) == text
    assert (
        hash(format) == hash(copy.deepcopy(format)) and pickle.loads(pickle.dumps(format)) == format
    )


def test_spelling_of_formats():
    assert Format((Dense, Compressed)) == Format((Dense(), Compressed()), (0, 1)) == CSR != CSC
    assert Format((Compressed(unique=False), Singleton())) == COO
    assert CSR.transposed == CSC and CSC.transposed == CSR
    for format in (CSF(2), BCSR(1, 2), CVS(4), Format((Dense, Dense))):
        with pytest.raises(NotImplementedError, match="CSR"):
            SparseArray.from_dense(np.eye(2), format=format)
        with pytest.raises(NotImplementedError, match="CSR"):
            array(SMALL, jnp.float32).asformat(format)


DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "int32", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@formats
def test_every_dtype_survives_construction(dtype, format):
    rng = np.random.default_rng(3)
    dense = (rng.integers(1, 9, (6, 7)) * (rng.random((6, 7)) < 0.5)).astype(jnp.dtype(dtype))
    rows, columns = np.nonzero(dense)
    shuffle = rng.permutation(len(rows))
    A = SparseArray.from_coordinates(
        np.stack([rows, columns], 1)[shuffle], dense[rows, columns][shuffle], (6, 7), format=format
    )
    D = SparseArray.from_dense(dense, format=format)
    for array_ in (A, D, A.T.T, A.asformat(CSC), pickle.loads(pickle.dumps(A))):
        assert array_.dtype == jnp.dtype(dtype)
        array_.checked()
        np.testing.assert_array_equal(np.asarray(array_.todense()), dense)
    back = A.to_scipy()
    assert (back.toarray() == dense.astype(back.dtype)).all()
    assert back.dtype == (np.float32 if dtype in ("bfloat16", "float16") else dense.dtype)
    np.testing.assert_array_equal(
        SparseArray.from_bcoo(A.to_bcoo(), format=format).todense(), dense
    )


@formats
def test_peers_see_the_same_matrix(format):
    for case in (SMALL, PADDED, BATTERY["only_padding"], BATTERY["no_columns"]):
        A, dense = array(case, jnp.float64, format), case.dense()
        np.testing.assert_array_equal(A.to_scipy().toarray(), dense)
        np.testing.assert_array_equal(jax.jit(lambda a: a.to_bcoo().todense())(A), dense)
        for b in (A.to_bcsr(), jax.jit(lambda a: a.to_bcsr())(A)):
            invariants(SparseArray.from_bcsr(b, format=format), dense)
        traced = jax.jit(lambda b: SparseArray.from_bcsr(b, format=format))(A.to_bcsr())
        invariants(traced, dense)
        for b in (A.to_bcoo(), jax.jit(lambda a: a.to_bcoo())(A)):
            C = SparseArray.from_bcoo(b, format=format)
            assert C.nnz == case.stored  # BCOO's padding is recognised
            invariants(C, dense)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "lil", "dok", "dia"])
@formats
def test_from_every_scipy_kind(kind, format):
    dense = SMALL.dense()
    for a in (scipy.sparse.coo_array(dense), scipy.sparse.coo_matrix(dense)):
        invariants(SparseArray.from_scipy(a.asformat(kind), format=format), dense)


def test_from_scipy_sorts_sums_keeps_zeros_and_leaves_its_argument_alone():
    a = scipy.sparse.csr_array(
        (np.array([1.0, 2, 0, 4, 8]), np.array([3, 0, 1, 2, 2]), np.array([0, 3, 3, 5])),
        shape=(3, 4),
    )
    data, indices = a.data.copy(), a.indices.copy()
    A = SparseArray.from_scipy(a)
    np.testing.assert_array_equal(A.column_indices, [0, 1, 3, 2])
    np.testing.assert_array_equal(A.values, [2, 0, 1, 12])
    assert (a.data == data).all() and (a.indices == indices).all()
    canonical = scipy.sparse.csr_array(np.arange(6.0).reshape(2, 3))
    B = SparseArray.from_scipy(canonical)
    canonical.data[:], canonical.indices[:], canonical.indptr[:] = 9, 0, 0  # no alias
    np.testing.assert_array_equal(B.todense(), np.arange(6.0).reshape(2, 3))


def test_duplicates_add_up_in_float32_at_least():
    # 4096 times 1 + 2^-7 is far beyond what a bfloat16 or float16 accumulator can hold.
    n = 4096
    coordinates = np.tile([[1, 2]], (n, 1))
    for dtype in (ml_dtypes.bfloat16, np.float16):
        values = np.full(n, 1.0078125, dtype)
        A = SparseArray.from_coordinates(coordinates, values, (2, 3))
        assert A.nnz == 1 and A.dtype == dtype
        assert float(A.values[0]) == float(np.asarray(n * 1.0078125, dtype))
        traced = jax.jit(lambda v: SparseArray.from_coordinates(coordinates, v, (2, 3)))(values)
        assert float(traced.values[0]) == float(A.values[0])
    flags = SparseArray.from_coordinates(coordinates[:2], np.array([True, True]), (2, 3))
    assert flags.dtype == bool and bool(flags.values[0])


def test_tensors_are_coo_of_any_order():
    rng = np.random.default_rng(5)
    dense = rng.standard_normal((3, 4, 2, 5)) * (rng.random((3, 4, 2, 5)) < 0.3)
    A = SparseArray.from_dense(dense, format=COO).checked()
    coordinates = np.stack(np.nonzero(dense), 1)
    shuffle = rng.permutation(len(coordinates))
    values = dense[tuple(coordinates.T)]
    B = SparseArray.from_coordinates(
        coordinates[shuffle], values[shuffle], dense.shape, format=COO
    ).checked()
    for X in (A, B):
        assert X.format.levels == (Compressed(unique=False), *[Singleton()] * 3)
        assert X.transposed is None and X.ndim == 4
        np.testing.assert_array_equal(X.todense(), dense)
        np.testing.assert_array_equal(X.T.todense(), dense.T)
        np.testing.assert_array_equal(X.to_bcoo().todense(), dense)
    np.testing.assert_array_equal(np.stack(A.coordinates(), 1), np.stack(B.coordinates(), 1))
    vector = SparseArray.from_dense(np.array([0.0, 2, 3]), format=COO)
    np.testing.assert_array_equal(vector.todense(), [0, 2, 3])


def test_not_a_number_is_an_entry():
    A = SparseArray.from_dense(np.array([[0.0, np.nan], [-0.0, np.inf]]))
    np.testing.assert_array_equal(A.row_lengths, [1, 1])


@formats
def test_pytree(format):
    A = array(PADDED, jnp.float64, format)
    dense = PADDED.dense()
    leaves, tree = jax.tree.flatten(A)
    assert len(leaves) == {CSR: 6, CSC: 6}.get(format, 7)
    invariants(jax.tree.unflatten(tree, leaves), dense)
    assert tree == jax.tree.structure(copy.deepcopy(A)) != jax.tree.structure(A.T)
    assert hash(tree) == hash(jax.tree.structure(copy.copy(A)))
    invariants(pickle.loads(pickle.dumps(A)), dense)
    invariants(copy.deepcopy(A), dense)
    invariants(jax.tree.map(lambda x: x, A), dense)
    invariants(jax.device_put(A), dense)
    assert A == A and (A == copy.copy(A)) is False and hash(A) != hash(copy.copy(A))
    shapes = jax.eval_shape(lambda a: a, A)
    # Leaves may be anything: ShapeDtypeStruct, None, strings.
    for odd in (shapes, jax.tree.map(lambda x: None, A), jax.tree.map(str, A)):
        assert "shape=(5, 31)" in repr(odd)
    assert f"nnz={A.nnz}, density=" in repr(shapes) and "dtype=float64" in repr(shapes)
    seen = []
    jax.jit(lambda a: seen.append(repr(a)))(A)
    jax.vmap(lambda v: seen.append(repr(A.with_values(v))))(jnp.ones((3, A.nnz)))
    assert seen == [repr(A)] * 2
    batched = jax.vmap(A.with_values)(jnp.ones((3, A.nnz)))
    assert batched.nnz == A.nnz and "batch=(3,)" in repr(batched)


@formats
def test_todense_under_transformations(format):
    A, stored = array(PADDED, jnp.float64, format), PADDED.stored
    dense = PADDED.dense()
    np.testing.assert_array_equal(jax.jit(SparseArray.todense)(A), dense)
    real = (np.asarray(A.coordinates()[0]) < A.shape[0]).astype(float)
    assert real.sum() == stored
    grad = jax.grad(lambda v: (A.with_values(v).todense() * dense).sum())(A.values)
    np.testing.assert_array_equal(grad, np.where(real, np.asarray(A.values), 0))
    stack = jnp.stack([A.values, 2 * A.values])
    out = jax.vmap(lambda v: A.with_values(v).todense())(stack)
    np.testing.assert_array_equal(out, np.stack([dense, 2 * dense]))
    # vmap over structure, and an array carried through scan.
    both = jax.tree.map(lambda x: jnp.stack([x, x]), A)
    np.testing.assert_array_equal(jax.vmap(SparseArray.todense)(both), np.stack([dense, dense]))
    last, _ = jax.lax.scan(lambda a, _: (a * 2.0, None), A, None, length=3)
    np.testing.assert_array_equal(last.todense(), 8 * dense)


def test_values_may_be_traced_where_structure_is_not():
    coordinates = np.array([[2, 0], [0, 1], [2, 0]])

    def total(v):
        A = SparseArray.from_coordinates(coordinates, v, (3, 2))
        return (A.todense() * jnp.arange(1.0, 7).reshape(3, 2)).sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.ones(3)), [5, 2, 5])


@cases
@pytest.mark.parametrize("format", [CSR, CSC], ids=str)
def test_traced_structure(case, format):
    A = array(case, jnp.float64, format)
    build = jax.jit(lambda v, o, i: SparseArray.from_arrays(v, o, i, shape=A.shape, format=format))
    B = build(A.values, *A.index_arrays[1])
    invariants(B, case.dense())
    for x, y in zip(A.transposed, B.transposed, strict=True):
        np.testing.assert_array_equal(x[: case.stored], y[: case.stored])


def test_padding_indices_may_be_anything():
    indices = np.array([1, 0, 2, 2**40, -(2**40), 7])
    offsets = np.array([0, 1, 3])
    A = SparseArray.from_arrays(np.arange(1.0, 7), offsets, indices, shape=(2, 3))
    invariants(A, np.array([[0, 1.0, 0], [2, 0, 3]]))


def test_scalars_scale():
    A = array(SMALL, jnp.float32)
    scalars = (2, 2.0, np.float32(2), np.array(2, np.float32), jnp.float32(2))
    for s in scalars:
        for B in (A * s, s * A):
            assert isinstance(B, SparseArray) and B.dtype == jnp.float32
            np.testing.assert_array_equal(B.values, A.values * np.float32(s))
        np.testing.assert_array_equal((A / s).values, A.values / np.float32(s))
    np.testing.assert_array_equal((-A).todense(), -SMALL.dense().astype(np.float32))
    grad = jax.jit(jax.grad(lambda s: (A * s).values.sum()))(jnp.float32(3))
    np.testing.assert_allclose(grad, A.values.sum(), rtol=1e-6)
    assert A.astype(jnp.bfloat16).dtype == jnp.bfloat16
    for bad in (np.ones(2), jnp.ones((1, 1)), "2", None, [2], A, np.array("x")):
        with pytest.raises(ValueError, match="scalar|numeric"):
            A * bad
        with pytest.raises(ValueError, match="scalar|numeric"):
            bad * A


@formats
def test_matmul_from_both_sides(format):
    dense = SMALL.dense().astype(np.float32)
    A = array(SMALL, jnp.float32, format)
    m, k = SMALL.shape
    rng = np.random.default_rng(1)
    right, left = rng.integers(-4, 5, (k, 3)), rng.integers(-4, 5, (3, m))
    for convert in (np.asarray, jnp.asarray):
        B, C = convert(right.astype(np.float32)), convert(left.astype(np.float32))
        for got, expected in [
            (A @ B, dense @ B),
            (A @ B[:, 0], dense @ B[:, 0]),
            (C @ A, C @ dense),
            (C[0] @ A, C[0] @ dense),
            (jax.jit(lambda c: c @ A)(C), C @ dense),
        ]:
            assert isinstance(got, jax.Array) and got.shape == expected.shape
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert isinstance(np.float32(2) * A, SparseArray)
    with pytest.raises(NotImplementedError, match="todense"):
        A @ A
    for bad in (np.ones((2, 3, m), np.float32), jnp.ones((2, 3, m), jnp.float32)):
        with pytest.raises(ValueError, match="1-d or 2-d"):
            bad @ A


def test_x64_off_narrows_as_jnp_does():
    with jax.enable_x64(False):
        A = SparseArray.from_dense(np.eye(2))
        assert A.dtype == jnp.float32
        assert SparseArray.from_dense(np.eye(2, dtype=np.complex128)).dtype == jnp.complex64
        assert SparseArray.from_dense(np.eye(2, dtype=np.int64)).dtype == jnp.int32
        invariants(A, np.eye(2))


def manifest(data_dir):
    """(path, shape, nnz) of the matrix files that the data set's own table lists."""
    for line in (data_dir / "MANIFEST.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 5 or not cells[1].endswith((".smtx.gz", ".mtx.gz", ".npz", ".tns.gz")):
            continue
        path = data_dir / cells[1]
        path = path if path.exists() else data_dir / "dlmc" / cells[1]
        shape = tuple(int(n) for n in cells[2].split("x"))
        yield path, shape, int(cells[3])


def test_the_data_set_reads_as_its_manifest_says(data_dir):
    seen = 0
    for path, shape, nnz in manifest(data_dir):
        A = read(path)
        seen += 1
        assert A.nnz == nnz, path
        if path.name.endswith(".tns.gz"):  # no header: the shape is the largest coordinates
            assert all(a <= b for a, b in zip(A.shape, shape, strict=True)), path
        else:
            assert A.shape == shape, path
    assert seen > 100


@pytest.mark.parametrize(
    "name", ["bcsstk09", "west0479", "young1c", "dwg961b", "jazz", "rajat01", "lp_e226"]
)
def test_matrix_market_agrees_with_scipy(data_dir, name):
    path = data_dir / "matrices" / f"{name}.mtx.gz"
    A, expected = read(path).checked(), scipy.sparse.csr_array(scipy.io.mmread(path))
    got = A.to_scipy()
    expected.sort_indices()
    assert got.dtype == (np.float32 if name == "rajat01" else expected.dtype)  # a pattern: ones
    np.testing.assert_array_equal(got.indptr, expected.indptr)
    np.testing.assert_array_equal(got.indices, expected.indices)
    np.testing.assert_array_equal(got.data, expected.data)


def test_reading_a_graph_agrees_with_scipy(data_dir):
    path = data_dir / "graphs" / "as_caida.npz"
    with np.load(path) as arrays:
        expected = scipy.sparse.csr_array(
            (arrays["data"], arrays["indices"], arrays["indptr"]), shape=arrays["shape"]
        )
    assert (read(path, format=CSC).checked().to_scipy() != expected).nnz == 0
