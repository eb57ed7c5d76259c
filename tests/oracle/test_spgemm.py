"""Products of two sparse matrices against loops over pairs of their entries."""

import collections
import os
import pathlib
import pickle
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from battery import BATTERY, array, cast, from_row_lengths, rounded
from native_call import direct_product, kernel_isas, run
from tolerance import DTYPES, assert_within, sum_bound
from unchecked_structures import KINDS, entries, spoiled

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    CpuTile,
    HashRows,
    Reference,
    ScheduleError,
    SparseArray,
    evaluate,
    explain,
    random,
    spgemm,
    spgemm_plan,
    spmm,
)
from sgap_jax.formats.levels import Compressed, Dense, Format
from sgap_jax.formats.stored import LaterTranspose
from sgap_jax.primitives.spgemm_pattern import _saturating_offsets
from sgap_jax.runtime.native import native

SCHEDULES = [None, Reference()]


def second(case, n=37):
    """A matrix to multiply a case by: rows of every length, some of them empty."""
    lengths = (np.arange(case.shape[1]) * 7) % min(n, 11) * (np.arange(case.shape[1]) % 5 > 0)
    return from_row_lengths("second", n, list(lengths), seed=3)


def products(A, B, dtype="float64"):
    """{(i, j): [sum, sum of magnitudes, number of products]} of two cases."""
    a, b = (rounded(case.values, dtype) for case in (A, B))
    found = collections.defaultdict(lambda: np.zeros(3))
    for e, (i, k) in enumerate(zip(A.rows, A.column_indices, strict=False)):
        for q in range(B.row_offsets[k], B.row_offsets[k + 1]):
            term = a[e] * b[q]
            found[int(i), int(B.column_indices[q])] += term, abs(term), 1
    return found


def structure_of(found, rows):
    """Offsets and column indices of the places of products, in order."""
    places = sorted(found)
    counts = np.bincount([i for i, _ in places], minlength=rows) if places else np.zeros(rows)
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    return offsets, np.int32([j for _, j in places])


def assert_values(values, places, found, dtype):
    sums, magnitudes, terms = np.reshape([found.get(p, np.zeros(3)) for p in places], (-1, 3)).T
    assert_within(values, sums, sum_bound(sums, magnitudes, terms, dtype))


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATTERY)
def test_kernels(name, dtype, isa):
    """Offsets, indices and values by the handlers, on every instruction set."""
    A = BATTERY[name]
    B = second(A)
    found, (m, n) = products(A, B, dtype), (A.shape[0], B.shape[1])
    arrays, columns = [A.row_offsets, A.column_indices, B.row_offsets, B.column_indices], n
    want = structure_of(found, m)
    result = ((m + 1,), np.int32)
    (offsets,) = run("sgap_spgemm_offsets_v1", arrays, [result], dict(columns=columns), isa)
    np.testing.assert_array_equal(offsets, want[0])
    for capacity in (len(want[1]), len(want[1]) + 3):
        result = ((capacity,), np.int32)
        operands = [*arrays, offsets]
        (indices,) = run("sgap_spgemm_indices_v1", operands, [result], dict(columns=columns), isa)
        np.testing.assert_array_equal(indices[: len(want[1])], want[1])
        assert not indices[len(want[1]) :].any()
    values = [cast(x.values, dtype)[None] for x in (A, B)]
    mask = from_row_lengths("mask", n, list(np.arange(m) * 3 % 31), seed=5, padding=4)
    for complete, (offsets, indices) in enumerate(
        [(mask.row_offsets, mask.column_indices), (want[0], want[1])]
    ):
        result = ((1, len(indices)), values[0].dtype)
        operands = [*arrays, offsets, indices, *values]
        attributes = dict(columns=columns, complete=bool(complete))
        (out,) = run("sgap_spgemm_csr_v1", operands, [result], attributes, isa)
        rows = np.repeat(np.arange(m), np.diff(offsets))
        places = list(zip(rows.tolist(), indices.tolist(), strict=False))
        assert_values(out[0][: len(places)], places, found, dtype)
        assert not out[0][len(places) :].any()
    for threads in (1, 2):  # structure and values at once: the same bits as with a plan
        got = direct_product(A, values[0], B, values[1], n, isa, threads)
        for x, expected in zip(got, (*want, out[0]), strict=True):
            np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("rows", [40, 300])
def test_rows_in_place_and_in_pieces(rows):
    """A row of many products among short ones: tasks of very different work, written to the result
    or, where those before them are not done, to pieces that are copied, for any number of threads;
    few entries (40 rows) are put together at the end."""
    rng = np.random.default_rng(rows)
    dense = rng.random((rows, 400)) * (rng.random((rows, 400)) < 0.02)
    dense[7::40] = 1
    right = rng.random((400, 3000)) * (rng.random((400, 3000)) < 0.05)
    A, B = (scipy.sparse.csr_array(X.astype(np.float32)) for X in (dense, right))
    want = (A.astype(np.float64) @ B).toarray()
    operands = [x for X in (A, B) for x in (X.indptr, X.indices, X.data.view(np.uint8))]
    found = [native.product(*operands, 3000, "float32", threads) for threads in (1, 2, 3, 8)]
    for each in found[1:]:
        for x, y in zip(each, found[0], strict=True):
            np.testing.assert_array_equal(x, y)
    offsets, indices, values = found[0]
    made = scipy.sparse.csr_array((values.view(np.float32), indices, offsets), (rows, 3000))
    np.testing.assert_allclose(made.toarray(), want, rtol=1e-4, atol=1e-4)


def test_results_of_many_entries():
    """Each task's rows are written, or copied, to their places when those are known."""
    rng = np.random.default_rng(0)
    column, row = (np.float32(rng.standard_normal(n)) for n in (2500, 1000))
    A = scipy.sparse.csr_array(column[:, None])
    B = scipy.sparse.csr_array(row[None])
    operands = [x for X in (A, B) for x in (X.indptr, X.indices, X.data.view(np.uint8))]
    for threads in (1, 2, 3):
        offsets, indices, values = native.product(*operands, 1000, "float32", threads)
        np.testing.assert_array_equal(offsets, np.arange(0, 2_500_001, 1000))
        np.testing.assert_array_equal(indices.reshape(2500, 1000) - np.arange(1000), 0)
        np.testing.assert_array_equal(values.view(np.float32), np.outer(column, row).reshape(-1))
    operands = [offsets, indices, values, A.indptr, A.indices, A.data.view(np.uint8)]
    offsets, indices, values = native.merge(*operands, 1000, "+", "float32", 2)
    want = np.outer(column, row)
    want[:, 0] += column
    np.testing.assert_array_equal(offsets, np.arange(0, 2_500_001, 1000))
    np.testing.assert_array_equal(values.view(np.float32), want.reshape(-1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif("libtsan" in os.environ.get("LD_PRELOAD", ""), reason="its shadow is resident")
def test_small_results_do_not_keep_the_memory_of_large_ones():
    """Results of 80 KB each, while larger ones come and go whose memory the next call has."""
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((2, 2000, 2000), np.float32) * (rng.random((2, 2000, 2000)) < 0.05)
    X, Y = map(SparseArray.from_dense, dense)

    def resident():
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    X + Y, X * Y
    before, kept = resident(), []
    for _ in range(100):
        X + Y
        kept.append(X * Y)
    assert resident() - before <= 64 << 20  # 170 MB with the memory of the sums


@pytest.mark.seconds(check=3, test=4)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["cpu", "reference"])
@pytest.mark.parametrize("name", ["empty_rows_at_both_ends", "every_length", "padded", "no_rows"])
def test_operator_formats_and_dtypes(name, schedule):
    A, turn = BATTERY[name], list(BATTERY).index(name)
    B = second(A)
    dtype = DTYPES[turn % 4]
    found = products(A, B, dtype)
    formats = [(CSC, CSF(2)), (CSC, CSC), (CSR, CSR), (COO, CSC)]
    for of_a, of_b in formats[: 2 if schedule else 4]:  # both have the same way from the formats
        left, right = array(A, dtype, of_a), array(B, dtype, of_b)
        C = spgemm(left, right, schedule=schedule)
        assert C.format == (CSC if of_a == of_b == CSC else CSR) and C.is_checked
        assert C.shape == (A.shape[0], B.shape[1]) and C.dtype == dtype
        places = [tuple(map(int, place)) for place in np.transpose(C.coordinates())]
        assert sorted(places) == sorted(found) and len(set(places)) == len(places)
        assert_values(C.values, places, found, dtype)
    again = array(A, dtype) @ array(B, dtype)
    np.testing.assert_array_equal(again.values, spgemm(array(A, dtype), array(B, dtype)).values)


@pytest.mark.parametrize("schedule", [HashRows(), HashRows(sorted=False)], ids=str)
def test_rows_in_hash_tables(schedule):
    """The same sums as without a schedule, in any format and dtype, and under jit; unsorted rows
    are what every operation takes, and sorting them gives the sorted result."""
    A = BATTERY["every_length"]
    B = second(A)
    for dtype, format in (("bfloat16", CSR), ("int32", CSC)):
        left, right = (array(x, "float32", format).astype(dtype) for x in (A, B))
        C, want = spgemm(left, right, schedule=schedule), spgemm(left, right)
        assert C.format == want.format and C.is_checked == schedule.sorted
        for x, y in ((C.sum_duplicates(), want), *([(C, want)] if schedule.sorted else [])):
            np.testing.assert_array_equal(x.index_arrays[1][1], y.index_arrays[1][1])
            np.testing.assert_array_equal(x.values, y.values)
    left, right = array(A, "float64"), array(B, "float64")
    told = explain(spgemm, left, right, schedule=schedule)
    assert str(schedule) in told and "table = {}" in told

    def loss(a, schedule):
        C = spgemm(left.with_values(a), right, schedule=schedule)
        return jnp.sum(jnp.cos(C @ jnp.ones(C.shape[1])))

    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    got, want = (step(left.values, x) for x in (schedule, None))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["cpu", "reference"])
def test_masks_in_any_format_and_a_plan_inside_jit(schedule):
    A = BATTERY["every_length"]
    B = second(A)
    found, left, right = products(A, B), array(A, "float64"), array(B, "float64")
    mask = from_row_lengths("mask", B.shape[1], list(np.arange(A.shape[0]) % 23), 7, padding=5)
    for format in (CSR, CSC, COO):
        sampled = array(mask, "float64", format)
        C = jax.jit(lambda a, b, m: spgemm(a, b, mask=m, schedule=schedule))(left, right, sampled)
        assert C.format == format and C.nnz == sampled.nnz
        i, j = map(np.asarray, C.coordinates())
        inside = i < A.shape[0]
        places = list(zip(i[inside].tolist(), j[inside].tolist(), strict=True))
        assert len(places) == mask.stored
        assert_values(np.asarray(C.values)[inside], places, found, "float64")
        assert not np.asarray(C.values)[~inside].any()
    plan = spgemm_plan(left, right)
    step = jax.jit(lambda a, b, p: spgemm(a, b, plan=p, schedule=schedule))
    for scale in (1.0, -3.0):
        C = step(left.with_values(scale * left.values), right, plan)
        places = list(zip(*(x.tolist() for x in map(np.asarray, C.coordinates())), strict=True))
        scaled = {
            place: np.array([scale * s, abs(scale) * m, n]) for place, (s, m, n) in found.items()
        }
        assert sorted(places) == sorted(found)
        assert_values(C.values, places, scaled, "float64")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["cpu", "reference"])
def test_a_plan_of_other_structures_gives_nan_and_no_wrong_row(schedule):
    A = SparseArray.from_dense(np.float32([[1, 0, 2], [0, 3, 0], [0, 0, 4]]))
    B = SparseArray.from_dense(np.float32([[1, 0], [0, 2], [5, 6]]))
    plan = SparseArray.from_dense(np.float32([[1, 0], [0, 1], [1, 1]]))
    got = np.asarray(spgemm(A, B, plan=plan, schedule=schedule).todense())
    np.testing.assert_array_equal(got, [[np.nan, 0], [0, 6], [20, 24]])
    masked = np.asarray(spgemm(A, B, mask=plan, schedule=schedule).todense())
    np.testing.assert_array_equal(masked, [[11, 0], [0, 6], [20, 24]])
    whole = spgemm(A, B, plan=spgemm_plan(A, B), schedule=schedule).todense()
    np.testing.assert_array_equal(whole, [[11, 12], [0, 6], [20, 24]])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_values_of_a_plan_that_are_a_nan_of_all_ones_or_zeros(dtype):
    # Sums of a NaN of all ones are what columns without a sum hold in the kernel.
    ones = np.frombuffer(b"\xff" * 8, dtype)[0]
    A = np.array([[1, 1, 0], [1, -1, 0], [0, 0, 2], [0, 1, 1]], dtype)
    B = np.array([[3, 0, 4, 0], [3, 5, 0, 0], [0, 0, 7, -0.0]], dtype)
    left, right = map(SparseArray.from_dense, (A, B))
    plan = spgemm_plan(left, right)
    data = np.array(left.values)
    data[1] = ones  # A[0, 1]
    got = np.asarray(spgemm(left.with_values(data), right, plan=plan).todense(), np.float64)
    np.testing.assert_array_equal(
        got, [[np.nan, np.nan, 4, 0], [0, -5, 4, 0], [0, 0, 14, 0], [3, 5, 7, 0]]
    )
    less = plan.with_values(np.ones(plan.nnz, dtype)).to_scipy().tolil()
    less[0, 1] = 0  # and a product without a place
    got = spgemm(left.with_values(data), right, plan=SparseArray.from_scipy(less.tocsr()))
    np.testing.assert_array_equal(
        np.asarray(got.todense(), np.float64)[:2], [[np.nan, 0, np.nan, 0], [0, -5, 4, 0]]
    )


def test_a_capacity_inside_jit():
    A = BATTERY["empty_rows_at_both_ends"]
    B = second(A)
    found, (left, right) = products(A, B), (array(x, "float64") for x in (A, B))
    for nse in (len(found), len(found) + 4, len(found) - 3):
        C = jax.jit(lambda a, b, nse=nse: spgemm(a, b, nse=nse))(left, right)
        assert C.nnz == nse and int(C.overflow) == max(len(found) - nse, 0)
        i, j = map(np.asarray, C.coordinates())
        kept = sorted(found)[:nse]
        assert list(zip(i.tolist(), j.tolist(), strict=True))[: len(kept)] == kept
        assert_values(np.asarray(C.values)[: len(kept)], kept, found, "float64")
        assert not np.asarray(C.values)[len(kept) :].any()
    with pytest.raises(ValueError, match=f"{len(found)}"):
        C.checked()
    padded = spgemm(left, right, nse=len(found) + 4)
    assert padded.nnz == len(found) + 4 and padded.is_checked
    np.testing.assert_allclose(padded.todense(), left.todense() @ right.todense(), rtol=1e-12)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 4, 0)])
def test_a_capacity_for_no_elements_has_a_gradient(shape):
    """A scatter to no places, whose transpose JAX refuses."""
    m, k, n = shape
    A, B = (SparseArray.from_dense(np.ones(s, np.float32)) for s in ((m, k), (k, n)))

    @jax.jit
    def gradients(A, B):
        def total(a, b):
            C = spgemm(A.with_values(a), B.with_values(b), nse=4)
            return C.todense().sum() + C.diagonal().sum()

        return jax.grad(total, argnums=(0, 1))(A.values, B.values)

    for found, of in zip(gradients(A, B), (A, B), strict=True):
        np.testing.assert_array_equal(found, np.zeros(of.nnz))


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex128"])
def test_values_without_kernels(dtype):
    rng = np.random.default_rng(2)
    x, y = (rng.integers(-2, 3, shape) * (1 + (dtype[0] == "c") * 1j) for shape in [(9, 7), (7, 8)])
    A, B = (SparseArray.from_dense(cast(z, dtype)) for z in (x, y))
    C = A @ B
    assert C.dtype == dtype
    np.testing.assert_array_equal(C.todense(), cast(x, dtype) @ cast(y, dtype))


def test_the_same_bits_for_any_number_of_threads():
    A, B = random((900, 700), density=0.02, seed=1), random((700, 800), density=0.03, seed=2)
    C = spgemm(A, B)
    arrays = [np.asarray(x) for S in (A, B, C) for x in (S.row_offsets, S.column_indices)]
    operands = [*arrays, np.stack([A.values, -A.values]), np.asarray(B.values)[None]]
    attributes, result = dict(columns=800, complete=True), ((2, C.nnz), np.float32)
    for threads in (1, 2, 5):
        (out,) = run("sgap_spgemm_csr_v1", operands, [result], attributes, native.isa(), threads)
        np.testing.assert_array_equal(out, np.stack([C.values, -C.values]))
        (offsets,) = run(
            "sgap_spgemm_offsets_v1",
            arrays[:4],
            [((901,), np.int32)],
            dict(columns=800),
            native.isa(),
            threads,
        )
        np.testing.assert_array_equal(offsets, C.row_offsets)


def test_a_large_number_of_columns():
    """Three levels of the set of columns, and rows next to none; a hash table of columns."""
    for n in (3 << 18, 3 << 20):
        _product_of_columns(n)


def _product_of_columns(n):
    columns = np.int32([0, 63, 64, 4095, 4096, (1 << 18) - 1, 1 << 18, n - 1])
    B = SparseArray.from_coordinates(
        np.stack([np.arange(8) % 3, columns], 1), np.arange(1.0, 9), (3, n)
    )
    A = SparseArray.from_dense(np.float64([[1, 0, 0], [2, 3, 4], [0, 0, 0], [0, 0, 5]]))
    C = A @ B
    want = np.asarray(A.todense()) @ B.to_scipy().toarray()
    np.testing.assert_array_equal(C.to_scipy().toarray(), want)
    assert C.nnz == np.count_nonzero(want)
    # A second column for each, in any order and repeated: longer than what is sorted by insertion.
    rng = np.random.default_rng(0)
    index, data = rng.integers(0, n, (3, 100)).astype(np.int32), rng.standard_normal((3, 100))
    index[:, 50:] = index[:, :50][:, ::-1]
    offsets = np.arange(0, 301, 100, dtype=np.int32)
    right = types.SimpleNamespace(row_offsets=offsets, column_indices=index.reshape(-1))
    left = types.SimpleNamespace(
        row_offsets=np.int32([0, 1, 4, 4, 5]), column_indices=np.int32([0, 0, 1, 2, 2])
    )
    a = np.float64([1, 2, 3, 4, 5])
    offsets, indices, values = direct_product(left, a, right, data, n)
    C = scipy.sparse.csr_array((values, indices, offsets), shape=(4, n))
    assert C.has_canonical_format
    A, B = (
        scipy.sparse.csr_array((v.reshape(-1), x.column_indices, x.row_offsets), shape=shape)
        for v, x, shape in ((a, left, (4, 3)), (data, right, (3, n)))
    )
    np.testing.assert_allclose(C.toarray(), (A @ B).toarray(), atol=1e-14)
    # With a plan, some of whose columns are given twice, in the array of columns or the hash table.
    planned = np.concatenate([indices, indices[-5:]]), offsets + np.int32([0, 0, 0, 0, 5])
    arrays = [X.astype(np.int32) for Y in (A, B) for X in (Y.indptr, Y.indices)]
    operands = [*arrays, planned[1], planned[0], A.data[None], B.data[None]]
    result, attributes = ((1, len(planned[0])), np.float64), dict(columns=n, complete=True)
    for isa in kernel_isas():
        (out,) = run("sgap_spgemm_csr_v1", operands, [result], attributes, isa)
        same = direct_product(left, a, right, data, n, isa)[2]
        np.testing.assert_array_equal(out[0], np.concatenate([same, same[-5:]]))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_unchecked_structures(kind, schedule):
    shapes = [(6, 5), (5, 7), (6, 7)]
    for seed in range(3):
        made = [spoiled(CSR, shape, kind, seed + 10 * i) for i, shape in enumerate(shapes)]
        arrays = [a[0] for a in made]
        rng = np.random.default_rng(seed)
        values = [rng.standard_normal(index[1].shape[0]) for index in arrays]
        of = [entries(CSR, index, shape) for index, shape in zip(arrays, shapes, strict=True)]

        def product(values, arrays, complete=False):
            A, B, C = (
                SparseArray.from_arrays(v, *x, shape=shape)
                for v, x, shape in zip(values, arrays, shapes, strict=True)
            )
            return spgemm(A, B, mask=C, schedule=schedule).values

        want = np.zeros(len(values[2]))
        for p, (i, j), _ in of[2]:
            for e, (row, k), _ in of[0]:
                for q, (inner, column), _ in of[1]:
                    if (row, inner, column) == (i, k, j):
                        want[p] += values[0][e] * values[1][q]
        got = jax.jit(product)(values, arrays)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        if schedule is None:
            dense = np.zeros((6, 7))
            for e, (row, k), _ in of[0]:
                for q, (inner, column), _ in of[1]:
                    if inner == k:
                        dense[row, column] += values[0][e] * values[1][q]
            operands = []
            for v, index in zip(values[:2], arrays, strict=False):
                operands += [*(np.int32(x) for x in index), v.view(np.uint8)]
            offsets, indices, found = native.product(*operands, 7, "float64", 2)
            made = scipy.sparse.csr_array((found.view(np.float64), indices, offsets), (6, 7))
            np.testing.assert_allclose(made.toarray(), dense, rtol=1e-12, atol=1e-12)


def test_the_structure_of_the_transpose_is_made_when_it_is_needed():
    A = random((30, 30), density=0.1, seed=1)
    C = A @ A
    assert isinstance(vars(C.T.with_values(2 * C.values))["transposed"], LaterTranspose)
    assert (C @ C).is_checked and isinstance(vars(C)["transposed"], LaterTranspose)
    again = SparseArray.from_scipy(C.to_scipy())
    assert isinstance(vars(C)["transposed"], LaterTranspose)
    copied = pickle.loads(pickle.dumps(C))
    assert jax.tree.structure(C) == jax.tree.structure(again) == jax.tree.structure(copied)
    for x, y, z in zip(*map(jax.tree.leaves, (C, again, copied)), strict=True):
        np.testing.assert_array_equal(x, z)
        np.testing.assert_allclose(x, y, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda C: C.T.todense())(A @ A), C.todense().T)


def test_structures_along_a_mapped_axis():
    """Each element has structures of its own: one call for all of them."""
    A, B = (np.random.default_rng(seed).random((3, 6, 6)) for seed in (0, 1))
    A, B = A * (A > 0.6), B * (B > 0.5)

    def product(a, b):
        S, T = (SparseArray.from_dense(x, nse=36) for x in (a, b))
        return spgemm(S, T, mask=SparseArray.from_dense(jnp.ones_like(a), nse=36)).todense()

    got = jax.jit(jax.vmap(product))(A, B)
    np.testing.assert_allclose(got, A @ B, rtol=1e-12)
    slopes = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(jax.vmap(product)(a, B)))))(A)
    dense = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(a @ B))))(A)
    np.testing.assert_allclose(slopes, np.where(A != 0, dense, 0), rtol=1e-10)


def test_structures_along_a_mapped_axis_on_all_threads():
    """Large enough for several threads, all of which may work on one structure."""
    rng = np.random.default_rng(4)
    made = [
        SparseArray.from_dense(np.float32(rng.random((300, 300)) < 0.15), nse=20_000)
        for _ in range(3)
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *made)
    product = jax.jit(jax.vmap(lambda A: spgemm(A, A, mask=A).values))
    want = [spgemm(A, A, mask=A).values for A in made]
    for _ in range(30):
        np.testing.assert_array_equal(product(stacked), want)


def test_vectors_and_blocks_are_multiplied_by_their_entries():
    rng = np.random.default_rng(0)
    a, b = (np.where(rng.random(n) < 0.3, rng.integers(1, 9, n), 0.0) for n in ((5, 7), (7, 4)))
    A = SparseArray.from_dense(a, format=BCSR(2, 3))
    B = SparseArray.from_dense(b, format=CVS(4).transposed)

    def total(v, A, B):
        C = spgemm(A.with_values(v), B, nse=20)
        return C.values.sum(), C

    (_, C), slope = jax.jit(jax.value_and_grad(total, has_aux=True))(A.values, A, B)
    np.testing.assert_array_equal(C.to_scipy().toarray(), a @ b)
    found = A.with_values(slope).todense()  # zeros within a block have a slope too
    np.testing.assert_array_equal(np.where(a, found, 0), (a != 0) * b.sum(1))


def test_fibers_are_multiplied_by_their_entries():
    a = np.diag([1.0, 0.0, 2.0, 3.0])
    A = SparseArray.from_dense(a)
    rows = Format((Compressed(), Dense()))  # those with an entry, whole
    fibers = evaluate("C(i,j) = A(i,j)", A=A, format=rows)
    assert fibers.format == rows
    np.testing.assert_array_equal(fibers.asformat("CSC").todense(), a)
    np.testing.assert_array_equal(spgemm(fibers, A).todense(), a @ a)
    with pytest.raises(ValueError, match="CSR of a traced structure"):
        jax.jit(lambda F, A: spgemm(F, A, nse=16))(fibers, A)


def test_what_is_refused():
    A, B = random((5, 4), density=0.5), random((4, 6), density=0.5)
    with pytest.raises(ValueError, match="B: expected 4 rows"):
        spgemm(A, A)
    with pytest.raises(ValueError, match="4 rows"):
        A @ A
    with pytest.raises(TypeError, match="B must be a SparseArray, got"):
        spgemm(A, jnp.ones((4, 6)))
    with pytest.raises(ValueError, match="one of mask, plan and nse, got mask and nse"):
        spgemm(A, B, mask=A, nse=3)
    with pytest.raises(ValueError, match=r"mask: expected shape \(5, 6\), got \(5, 4\)"):
        spgemm(A, B, mask=A)
    with pytest.raises(ValueError, match="pass a plan"):
        jax.jit(lambda a, b: a @ b)(A, B)
    with pytest.raises(ValueError, match="nse: expected at least"):
        spgemm(A, B, nse=1)
    with pytest.raises(NotImplementedError, match="nnz goes up to 2147483647"):
        spgemm(A, B, nse=2**31)
    with pytest.raises(ValueError, match="nse must not be negative"):
        spgemm_plan(A, B, nse=-1)
    with pytest.raises(NotImplementedError, match="mask.asformat"):
        spgemm(A, B, mask=(A @ B).asformat(CVS(2)))
    with pytest.raises(NotImplementedError, match="Reference"):
        spgemm(A, B, schedule=CpuTile())
    with pytest.raises(ScheduleError, match="sorted must be a bool, got 0"):
        spgemm(A, B, schedule="HashRows(sorted=0)")
    with pytest.raises(ScheduleError, match="only spgemm has rows of sparse results, not spmm"):
        spmm(A, jnp.ones((4, 2), A.dtype), schedule=HashRows())
    with pytest.raises(NotImplementedError, match=r"HashRows\(.* leave it out with nse"):
        spgemm(A, B, nse=30, schedule=HashRows())
    with pytest.raises(NotImplementedError, match="from concrete structures of A and B"):
        jax.jit(lambda A, B: spgemm(A, B, schedule=HashRows()))(A, B)


def test_offsets_saturate():
    most = 2**31 - 1
    counts = np.array([[0, most, 0, 1, most, most], [5, 2**30, 2**30, 0, 7, 9], [1, 2, 3, 4, 5, 6]])
    found = _saturating_offsets(jnp.asarray(counts, jnp.int32))
    expected = np.minimum(np.cumsum(np.pad(counts, ((0, 0), (1, 0))), axis=1), most)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.tier("all")
def test_more_entries_than_int32_counts_are_refused_before_memory_is_taken():
    column = SparseArray.from_dense(np.ones((50_000, 1), np.float32))
    with pytest.raises(ValueError, match="2147483647 entries or more"):
        column @ column.T
