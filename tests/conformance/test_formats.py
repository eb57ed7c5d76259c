"""Every stored format passes the same invariants, concrete and traced, on every named matrix."""

import copy
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from battery import BATTERY, array
from format_invariants import COO_BY_COLUMNS, PADDED, SMALL, STORED, formats, invariants
from jax.experimental import sparse

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
    Reference,
    ScheduleError,
    Singleton,
    SparseArray,
    cluster_rows,
    fill_in,
    masks,
    select,
    spmm,
    tril,
)
from sgap_jax.graphs import from_edges

cases = pytest.mark.parametrize("case", BATTERY.values(), ids=list(BATTERY))


@cases
@formats
def test_invariants(case, format):
    A = array(case, jnp.float64, format)
    assert A.format == format and A.nnz == case.nnz
    invariants(A, case.dense())
    invariants(A.T, case.dense().T)
    assert A.T.format == format.transposed and A.T.T.format == format


@pytest.mark.tier("test")
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
        (CSF(2).transposed, "CSF(2, order=(1, 0))"),
        (BCSR(2, 4), "BCSR(2, 4)"),
        (CVS(8), "CVS(8)"),
        (BCSR(2, 4).transposed, "BCSR(2, 4).transposed"),
        (Format((Dense, Compressed, Compressed)), "Format((Dense, Compressed, Compressed))"),
    ],
)
def test_formats_are_values(format, text):
    assert str(format) == repr(format) == text
    assert Format.parse(text) == format
    assert (
        hash(format) == hash(copy.deepcopy(format)) and pickle.loads(pickle.dumps(format)) == format
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ELL",
        "CVS",
        "CSR.ndim",
        "Format((3,))",
        "(CSR,)",
        "1 +",
        b"CSR",
        "CVS(True)",
        "CVS(2**9)",
        "CVS(0)",
        "CVS(1, 2)",
        "Format((Dense, Compressed))",
    ],
)
def test_what_is_no_text_of_a_format_is_refused(text):
    with pytest.raises(ValueError, match="expected"):
        Format.parse(text)


def test_what_a_format_or_a_schedule_prints_stands_for_it():
    same = lambda *trees: jax.tree.map(np.testing.assert_array_equal, *trees)  # noqa: E731
    dense = np.arange(48.0).reshape(8, 6) % 4
    entries, B = SparseArray.from_dense(dense), np.eye(6)
    for text in ("CSR", "csr", "CSC", "coo", "CVS(4)", "cvs(2)", "BCSR(4, 2)", "bcsr(2, 3)"):
        format = Format.parse(text.upper())
        A = SparseArray.from_dense(dense, format=format)
        same(SparseArray.from_dense(dense, format=text), A)
        same(entries.asformat(text), A)
        same(tril(A, format=text), tril(A, format=format))
        if format == CSR or format.block_shape:
            given = A.values, *A.index_arrays[1]
            same(SparseArray.from_arrays(*given, shape=A.shape, format=text), A)
        if format.vector_length:
            same(select.top_k(B, 2, format=text), select.top_k(B, 2, format=format))
            same(masks.band(8, 4, format=text), masks.band(8, 4, format=format))
            assert fill_in(A, text) == fill_in(A, format)
            same(cluster_rows(A, text), cluster_rows(A, format))
    same(spmm(entries, B, schedule="Reference()"), spmm(entries, B, schedule=Reference()))
    with pytest.raises(ScheduleError, match="spmm: schedule: 'fast' is not a schedule"):
        spmm(entries, B, schedule="fast")
    with pytest.raises(ValueError, match="asformat: format: expected a Format or its text"):
        entries.asformat("dia")


def test_spelling_of_formats():
    assert Format((Dense, Compressed)) == Format((Dense(), Compressed()), (0, 1)) == CSR != CSC
    assert Format((Compressed(unique=False), Singleton())) == COO
    assert CSR.transposed == CSC and CSC.transposed == CSR
    for format in (Format((Dense, Dense)), Format((Dense, Compressed, *[Dense(2)] * 3))):
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


def test_a_tuple_has_the_coordinates_of_each_dimension():
    """Two entries of a matrix: the arrays of its rows and columns have the shape of its pairs."""
    dense = np.float32([[0, 2, 0], [0, 0, 0], [4, 0, 0]])
    A, (where, values) = SparseArray.from_dense(dense), (np.nonzero(dense), np.float32([2, 4]))
    for given in (where, A.coordinates(), ((0, 1), (2, 0)), [[0, 1], [2, 0]]):
        B = SparseArray.from_coordinates(given, values, (3, 3))
        np.testing.assert_array_equal(B.todense(), dense)
    traced = jax.jit(lambda i: SparseArray.from_coordinates(i, values, (3, 3)).todense())
    np.testing.assert_array_equal(traced(where), dense)
    columns = np.array([1, 2**33])  # the second is none, and would be 0 in 32 bits
    far = jax.jit(lambda i: SparseArray.from_coordinates((i, columns), values, (3, 3)).todense())
    with pytest.raises(ValueError, match="coordinates: expected an integer dtype, got float32"):
        far(np.float32(where[0]))
    np.testing.assert_array_equal(far(where[0]), dense * (dense == 2))
    with pytest.raises(
        ValueError, match=r"coordinates: .*one for each dimension, got .*\[2\], \[3\]"
    ):
        SparseArray.from_coordinates((where[0], np.arange(3)), values, (3, 3))


def test_the_arrays_of_a_tuple_of_coordinates_are_checked_one_by_one():
    """Concrete ones as traced ones, which NumPy would promote together."""
    values, rows, columns = np.float32([2, 4]), np.array([0, 2]), np.array([2, 0], np.uint64)
    of = lambda *given: SparseArray.from_coordinates(given, values, (3, 3))
    want = [[0, 0, 2], [0, 0, 0], [4, 0, 0]]
    narrow = rows.astype(jnp.int4)
    for given in ((rows, columns), (rows, [2, 0]), ([0, 2], columns), (narrow, columns)):
        np.testing.assert_array_equal(of(*given).todense(), want)
    with pytest.raises(ValueError, match=r"of dimension 1\[0\]: expected an index in 0 .. 2"):
        of(rows, np.array([2**63 + 1, 0], np.uint64))
    refused = "SparseArray.from_coordinates: coordinates: expected an integer dtype, got bool"
    for given in ((rows, columns == 2), (columns == 2, rows)):
        for make in (of, jax.jit(lambda *given: of(*given).todense())):
            with pytest.raises(ValueError, match=refused):
                make(*given)
    for ragged in ([[0], [1, 2]], ["0", [1]]):
        with pytest.raises(ValueError, match="from_coordinates: coordinates: .*for each dimension"):
            of(rows, ragged)


def test_peers_are_told_that_entries_repeat():
    A = from_edges(
        np.array([[0, 0, 1], [1, 1, 2]]), np.float32([1, 2, 4]), num_nodes=3, duplicates="keep"
    )
    dense = np.square(np.asarray(A.todense()))
    square = sparse.sparsify(jnp.square)  # of each value, where JAX is told that no index repeats
    found = jax.jit(lambda a: [square(b).todense() for b in (a.to_bcoo(), a.to_bcsr())])(A)
    for squares in found:
        np.testing.assert_array_equal(squares, dense)


@jax.jit
def to_bcsr(values, offsets, columns):
    A = SparseArray.from_arrays(values, offsets, columns, shape=(3, 4))
    return A.todense(), A.to_bcsr()


@pytest.mark.parametrize(
    "offsets", [(1, 2, 4, 6), (0, 4, 2, 5), (-3, 2, 9, 9)], ids=["later", "falls", "far"]
)
def test_bcsr_has_the_entries_that_take_part(offsets):
    values, columns = np.float32([1, 2, 4, 8, 16, np.nan]), np.array([1, 0, 2, 9, 0, -1])
    dense, b = to_bcsr(values, np.array(offsets), columns)
    assert np.count_nonzero(dense) >= 3
    np.testing.assert_array_equal(b.todense(), dense)
    np.testing.assert_array_equal(b @ np.eye(4, dtype=np.float32), dense)


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


def test_duplicates_add_up_in_float32_at_least():
    # A sum of 4096 times 1 + 2^-7 is far beyond what a bfloat16 or float16 accumulator can hold.
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
