"""Wrong input to a constructor or conversion: a ValueError that names the argument, what was
expected and what came; and structure that turns out wrong only when the compiled program runs."""

import pickle
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from battery import BATTERY, array
from jax.experimental import sparse as jsparse

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
    SparseArray,
    random,
    row_sum,
    spmm,
)

VALUES = np.arange(1.0, 5)
OFFSETS = np.array([0, 2, 2, 4])
INDICES = np.array([0, 3, 1, 2])
SHAPE = (3, 4)
# JAX raises one or the other, as the program is dispatched at once or later.
RUN_TIME_ERRORS = (ValueError, jax.errors.JaxRuntimeError)


def build(values=VALUES, offsets=OFFSETS, indices=INDICES, shape=SHAPE, **options):
    return SparseArray.from_arrays(values, offsets, indices, shape=shape, **options)


def changed(array_, position, value):
    array_ = array_.copy()
    array_[position] = value
    return array_


STRUCTURE = [
    (dict(offsets=changed(OFFSETS, 1, 5)), ["row_offsets[2]", "5", "2"]),
    (dict(offsets=changed(OFFSETS, 0, 1)), ["row_offsets[0]", "expected 0", "got 1"]),
    (dict(offsets=changed(OFFSETS, 3, 5)), ["row_offsets[3]", "nnz = 4", "got 5"]),
    (dict(offsets=OFFSETS[:-1]), ["row_offsets", "[4]", "[3]"]),
    (dict(offsets=OFFSETS[None]), ["row_offsets", "1-d", "[1, 4]"]),
    (dict(offsets=OFFSETS.astype(float)), ["row_offsets", "integer", "float64"]),
    (dict(offsets=OFFSETS.astype(bool)), ["row_offsets", "integer", "bool"]),
    (dict(indices=INDICES.astype(np.float32)), ["column_indices", "integer", "float32"]),
    (dict(indices=["0", "1", "2", "3"]), ["column_indices", "integer"]),
    (dict(indices=changed(INDICES, 1, 4)), ["column_indices[1]", "0 .. 3", "got 4"]),
    (dict(indices=changed(INDICES, 2, -1)), ["column_indices[2]", "0 .. 3", "got -1"]),
    (dict(indices=changed(INDICES, 0, 2**33)), ["column_indices[0]", str(2**33)]),
    (
        dict(indices=changed(INDICES, 3, 0)),
        ["column_indices[3]", "more than 1", "got 0", "segment 2"],
    ),
    (dict(indices=changed(INDICES, 3, 1)), ["column_indices[3]", "duplicates", "from_coordinates"]),
    (dict(values=VALUES[:-1]), ["values", "[4]", "[3]"]),
    (dict(values=VALUES[:, None]), ["values", "[4]", "[4, 1]"]),
    (dict(values=VALUES.astype(str)), ["values", "numeric"]),
    (dict(values=VALUES.astype(object)), ["values", "numeric", "object"]),
    (dict(values=VALUES.astype("datetime64[s]")), ["values", "numeric"]),
    (dict(values=[[1.0], [2.0, 3.0]]), ["values"]),
    (dict(values=VALUES.astype(np.longdouble)), ["values", "JAX"]),
    (dict(shape=(3, -4)), ["shape", "non-negative", "-4"]),
    (dict(shape=(3, 4.5)), ["shape", "integers", "4.5"]),
    (dict(shape=3), ["shape", "tuple"]),
    (dict(shape=(3, 4, 5)), ["format", "CSR is for 2 dimensions", "got 3"]),
    (dict(shape=(0, 4)), ["row_offsets", "[1]", "[4]"]),
    (dict(shape=(3, 0)), ["column_indices[0]", "size 0"]),
    (dict(format=COO), ["format", "CSR, CSC, CVS(V) or BCSR(r, c)", "from_coordinates"]),
    (dict(format="dia"), ["format", "'dia'"]),
    (dict(format=CSC, shape=(4, 3), offsets=OFFSETS[:-1]), ["column_offsets", "[4]"]),
    (dict(format=CSC, shape=(4, 3), indices=changed(INDICES, 1, 4)), ["row_indices[1]", "0 .. 3"]),
]


@pytest.mark.parametrize(("wrong", "words"), STRUCTURE)
def test_from_arrays(wrong, words):
    with pytest.raises(ValueError) as caught:
        build(**wrong)
    for word in ["SparseArray.from_arrays", *words]:
        assert word in str(caught.value)


def test_the_right_arguments_pass():
    assert build().checked().nnz == 4
    assert build(format=CSC, shape=(4, 3)).checked().nnz == 4
    assert SparseArray.from_arrays([], [0], [], shape=(0, 7)).checked().nnz == 0


COORDINATES = np.array([[0, 1], [2, 3]])
BATCHED = jax.tree.map(lambda x: jnp.stack([x, x]), build())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: SparseArray.from_coordinates(COORDINATES, VALUES[:2], (3, 3)),
            ["3", "0 .. 2", "[1]"],
        ),
        (
            lambda: SparseArray.from_coordinates(-COORDINATES, VALUES[:2], SHAPE),
            ["dimension 0", "-2"],
        ),
        (
            lambda: SparseArray.from_coordinates(COORDINATES, VALUES, SHAPE),
            ["values", "[2]", "[4]"],
        ),
        (
            lambda: SparseArray.from_dense(scipy.sparse.csr_array(np.eye(3))),
            ["x", "dense", "csr_array", "from_scipy"],
        ),
        (lambda: BATCHED.asformat(CSC), ["asformat", "batched, (2,)", "jax.vmap"]),
        (lambda: BATCHED.todense(), ["batched, (2,)"]),
        (lambda: BATCHED.to_scipy(), ["to_scipy", "batched, (2,)"]),
        (lambda: BATCHED.to_bcsr(), ["to_bcsr", "batched, (2,)"]),
        (lambda: SparseArray.from_coordinates(COORDINATES.T[0], VALUES, SHAPE), ["2-d", "[2]"]),
        (lambda: SparseArray.from_coordinates(COORDINATES, VALUES[:2], (3, 4, 5)), ["CSR", "COO"]),
        (
            lambda: SparseArray.from_coordinates(COORDINATES, VALUES[:2], (3, 4, 5), format=COO),
            ["[nnz, 3]", "[2, 2]"],
        ),
        (lambda: SparseArray.from_coordinates(COORDINATES * 1.0, VALUES[:2], SHAPE), ["integer"]),
        (
            lambda: SparseArray.from_coordinates(COORDINATES, VALUES[:2], SHAPE, duplicates="max"),
            ["duplicates", "'sum', 'error'", "'max'"],
        ),
        (
            lambda: SparseArray.from_coordinates(
                COORDINATES[[1, 0, 1]], VALUES[:3], SHAPE, duplicates="error"
            ),
            ["(2, 3)", "more than once", "1 duplicates"],
        ),
        (
            lambda: SparseArray.from_coordinates(
                COORDINATES[[1, 0, 1]], VALUES[:3], SHAPE, duplicates="error", format=CSC
            ),
            ["(2, 3)", "more than once"],
        ),
        (
            lambda: jax.jit(
                lambda c: SparseArray.from_coordinates(c, VALUES[:2], SHAPE, duplicates="keep")
            )(COORDINATES),
            ["duplicates", "keep"],
        ),
        (
            lambda: jax.jit(SparseArray.from_dense)(np.eye(3)),
            ["from_dense", "tracer", "with_values"],
        ),
        (lambda: SparseArray.from_dense(np.array([["a"]])), ["from_dense", "numeric"]),
        (lambda: SparseArray.from_dense(np.ones((2, 2, 2))), ["CSR", "2 dimensions", "COO"]),
        (lambda: SparseArray.from_dense(np.float32(1)), ["shape"]),
        (lambda: SparseArray.from_dense(np.eye(2) * 1j, dtype=np.float32), ["dtype", "complex"]),
        (lambda: SparseArray.from_dense(np.eye(2), dtype="nonsense"), ["dtype", "nonsense"]),
        (lambda: SparseArray.from_dense(np.eye(2), dtype="O"), ["dtype"]),
        (lambda: SparseArray.from_dense(np.array([[300]]), dtype="int8"), ["int8", "300", "dtype"]),
        (lambda: SparseArray.from_scipy(np.eye(3)), ["from_scipy", "ndarray", "from_dense"]),
        (lambda: SparseArray.from_bcoo(np.eye(3)), ["from_bcoo", "BCOO", "ndarray"]),
        (lambda: SparseArray.from_bcsr(np.eye(3)), ["from_bcsr", "BCSR", "ndarray"]),
        (lambda: build().with_values(np.ones(3)), ["with_values", "[4]", "[3]"]),
        (lambda: build().with_values(np.ones((4, 1))), ["with_values", "[4]", "[4, 1]"]),
        (lambda: build().with_values("text"), ["with_values", "numeric"]),
        (lambda: build().with_values(jax.random.split(jax.random.key(0), 4)), ["numeric", "key"]),
        (lambda: jax.jit(lambda a: a.to_scipy())(build()), ["to_scipy", "tracers", "jit"]),
        (lambda: Format(()), ["levels"]),
        (lambda: Format((Dense, "Compressed")), ["levels", "Compressed"]),
        (lambda: Format((Dense(2), Compressed())), ["levels", "trailing", "Dense(2)"]),
        (lambda: Format((Dense, Compressed), (0, 2)), ["order", "(0, 1)", "(0, 2)"]),
        (lambda: Dense(0), ["Dense", "size", "positive", "0"]),
        (lambda: CVS(0), ["CVS: vector_length", "positive", "got 0"]),
        (lambda: BCSR(2, 0.5), ["BCSR: columns", "positive integer", "0.5"]),
        (lambda: SparseArray.from_dense([[1], [2, 3]]), ["from_dense: x: expected an array, got"]),
        (lambda: CSF(-1), ["CSF", "positive"]),
    ],
)
def test_message(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_corrupt_scipy_structure_is_caught():
    for name, position, value in [("indptr", 1, 9), ("indptr", 0, -1), ("indices", 0, 7)]:
        for kind in ("csr", "csc"):
            a = scipy.sparse.coo_array(np.eye(4)).asformat(kind)
            getattr(a, name)[position] = value
            with pytest.raises(ValueError, match=r"from_scipy: .*expected .*got"):
                SparseArray.from_scipy(a)
    a = scipy.sparse.coo_array(np.eye(3))
    a.coords[0][1] = -5
    with pytest.raises(ValueError, match="dimension 0.*-5"):
        SparseArray.from_scipy(a)


def test_batched_peers_are_not_taken():
    batched = jsparse.BCOO.fromdense(jnp.ones((2, 3, 3)), n_batch=1)
    with pytest.raises(NotImplementedError, match="n_batch = 1"):
        SparseArray.from_bcoo(batched)
    with pytest.raises(NotImplementedError, match="n_batch = 1"):
        SparseArray.from_bcsr(jsparse.BCSR.from_bcoo(batched))


def test_sizes_beyond_int32_are_not_implemented():
    for build_ in (
        lambda: SparseArray.from_coordinates(COORDINATES, VALUES[:2], (3, 2**31)),
        lambda: build(shape=(3, 2**40)),
        lambda: SparseArray.from_coordinates(COORDINATES, VALUES[:2], (2**31, 4), format=COO),
    ):
        with pytest.raises(NotImplementedError, match=r"int32.*2147483647"):
            build_()
    # The largest size itself is fine where no array of that length is needed.
    A = SparseArray.from_coordinates([[2**31 - 2, 0, 1]], [1.0], (2**31 - 1, 1, 2), format=COO)
    assert int(A.checked().coordinates()[0][0]) == 2**31 - 2


@pytest.mark.parametrize("format", [COO, CSF(2)], ids=str)
def test_a_few_entries_of_any_shape_take_no_memory_for_it(format):
    """Offsets over rows or columns would be gigabytes."""
    shape, places, values = (2**31 - 2,) * 2, np.array([[5, 2**31 - 3], [2**31 - 3, 7]]), [2.0, 3.0]
    tracemalloc.start()
    A = SparseArray.from_coordinates(places, values, shape, format=format)
    B = SparseArray.from_coordinates(places[:, ::-1] - 1, values, shape, format=format)
    assert A.is_checked and A.checked() is A
    assert (A + B).nnz == 4 and (A * B).nnz == 0 and (A.T * B).nnz == 0 and A.T.T.nnz == 2
    np.testing.assert_array_equal(A[places[:, 0], places[:, 1]], values)
    assert A[5, 2**31 - 3] == 2 and A[5, 6] == 0 and A[4:6].nnz == 1 and A.sum() == 5
    assert abs(A.asformat(COO)).max() == 3 and pickle.loads(pickle.dumps(A)).nnz == 2
    if format == COO:
        B = random((10**9, 10**9), density=1e-15, format=COO)
        assert B.nnz == 1000
        assert SparseArray.from_coordinates(places, values, shape, format=COO, nse=3).nnz == 3
        assert SparseArray.from_scipy(A.to_scipy(), format=COO).nnz == 2
        with pytest.raises(ValueError, match=r"random: .*1000 entries.*GiB of offsets in CSR.*COO"):
            random((10**9, 10**9), density=1e-15)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


def test_few_entries_of_a_capacity_have_the_type_of_many():
    """Inside jit or not."""
    shape, many = (2**24, 2**14), np.arange(600_000) % 2**24

    def made(rows, nse):
        entries = (rows, rows % 2**14), jnp.ones(len(rows))
        return SparseArray.from_coordinates(*entries, shape, format=COO, nse=nse)

    for nse in (600_000, 1000):
        few = made(many[:100], nse)
        types = jax.tree.structure(made(many[:nse], nse)), jax.tree.structure(few)
        assert types[0] == types[1] and (few.transposed is None) == (nse == 1000)
        again = jax.jit(lambda nse=nse: made(jnp.arange(100), nse))()
        assert (again.transposed is None) == (few.transposed is None)
        np.testing.assert_array_equal(again.T @ jnp.ones(2**24), few.T @ jnp.ones(2**24))


def test_tensors_have_no_matrix_views():
    T = SparseArray.from_dense(np.ones((2, 2, 2)), format=COO)
    for call in (lambda: T.row_lengths, T.to_bcsr):
        with pytest.raises(ValueError, match="matrix"):
            call()
    for name in ("row_indices", "column_indices", "row_offsets"):
        assert not hasattr(T, name)
    with pytest.raises(ValueError, match="CSR"):
        T.asformat(CSR)


def damage(A, leaf, position, value):
    """A with one number of one index array replaced, behind the constructors' back."""
    leaves, tree = jax.tree.flatten(A)
    leaves[leaf] = leaves[leaf].at[position].set(value)
    return jax.tree.unflatten(tree, leaves)


@pytest.mark.parametrize("format", [CSR, CSC, COO, COO.transposed], ids=str)
def test_checked_finds_any_damage(format):
    A = array(BATTERY["padded"], jnp.float32, format)
    used = BATTERY["padded"].stored
    leaves = jax.tree.leaves(A)
    for leaf in range(1, len(leaves)):
        n = min(len(leaves[leaf]), used)
        for position in (0, n // 2, n - 1):
            for value in (-1, 10**6, int(leaves[leaf][position]) + 1):
                with pytest.raises(ValueError, match=r"checked: .*expected"):
                    damage(A, leaf, position, value).checked()
    assert A.checked() is A


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (jnp.zeros(2, jnp.int32), "indices of level 1: expected int32 of shape"),
        (jnp.zeros(3, jnp.uint32), "got uint32"),
    ],
)
@pytest.mark.parametrize("use", [lambda A: spmm(A, jnp.ones((4, 1))), row_sum, SparseArray.todense])
def test_index_arrays_of_another_length_or_dtype_are_refused_by_name(columns, words, use):
    arrays = ((), (jnp.int32([0, 1, 3]), columns))
    transposed = (jnp.zeros(5, jnp.int32), *[jnp.zeros(3, jnp.int32)] * 2)
    A = SparseArray(jnp.ones(3), arrays, transposed, (2, 4), CSR)
    with pytest.raises(ValueError, match=words):
        use(A)


@pytest.mark.parametrize(
    ("leaf", "position", "value", "words"),
    [
        (1, 0, 1, ["offsets[0]: expected 0, got 1"]),
        (1, 4, 0, ["offsets[4]: expected at least 3", "got 0"]),
        (1, 8, 99, ["offsets[8]: expected at most nnz=13, got 99"]),
        (2, 5, 9, ["indices[5]", "< 9, got 9"]),
        (2, 12, -1, ["indices[12]", "got -1"]),
    ],
)
@pytest.mark.parametrize("format", [CSR, CSC], ids=str)
def test_checked_fails_at_run_time_when_traced(leaf, position, value, words, format):
    case = BATTERY["empty_rows_at_both_ends"]
    A = array(case, jnp.float32)
    A = A if format == CSR else A.T
    run = jax.jit(lambda a: a.checked().todense())
    expected = case.dense().astype(np.float32)
    np.testing.assert_array_equal(run(A), expected if format == CSR else expected.T)
    with pytest.raises(RUN_TIME_ERRORS) as caught:
        run(damage(A, leaf, position, value)).block_until_ready()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
def test_traced_structure_saturates(dtype):
    # Cast to int32 these would be offsets of 2 and -1, and an index of 1.
    run = jax.jit(lambda o, i: build(offsets=o, indices=i).checked().todense())
    offsets, indices = (jnp.asarray(x, dtype) for x in (OFFSETS, INDICES))
    np.testing.assert_array_equal(run(offsets, indices), build().todense())
    for huge in (2**32 - 1, *([2**32 + 2] if dtype.endswith("64") else [])):
        made = jax.jit(lambda o: build(offsets=o, indices=INDICES).row_offsets)
        assert int(made(offsets.at[3].set(huge))[3]) == 2**31 - 1
        with pytest.raises(RUN_TIME_ERRORS, match=r"offsets\[3\]: expected at most nnz"):
            run(offsets.at[3].set(huge), indices).block_until_ready()
        with pytest.raises(RUN_TIME_ERRORS, match=r"indices\[1\].*got 2147483647"):
            run(offsets, indices.at[1].set(huge)).block_until_ready()
        with pytest.raises(ValueError, match=rf"row_offsets\[3\].*got {huge}"):
            build(offsets=offsets.at[3].set(huge))


def test_checked_under_vmap_and_with_a_stale_transpose():
    A = array(BATTERY["padded"], jnp.float32)
    stale = damage(A, 5, 0, 10**6)  # the permutation, which checked() does not take on trust
    fresh = jax.jit(lambda a: a.checked())(stale)
    np.testing.assert_array_equal(fresh.transposed[2], A.transposed[2])
    both = jax.tree.map(lambda x: jnp.stack([x, x]), A)
    out = jax.jit(jax.vmap(lambda a: a.checked().todense()))(both)
    np.testing.assert_array_equal(out[1], A.todense())
    with pytest.raises(RUN_TIME_ERRORS):
        bad = jax.tree.map(lambda x, y: jnp.stack([x, y]), A, damage(A, 2, 0, 99))
        jax.jit(jax.vmap(lambda a: a.checked().todense()))(bad).block_until_ready()
    with pytest.raises(NotImplementedError, match="CSF.*CSR and COO"):
        jax.jit(lambda a: a.checked())(A.asformat(CSF(2)))
