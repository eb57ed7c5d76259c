"""Unions and intersections of two concrete matrices by the native kernels, against dictionaries."""

import threading

import jax
import numpy as np
import pytest
from battery import cast, from_row_lengths, rounded
from native_call import kernel_isas
from tolerance import DTYPES

from sgap_jax import CSC, CSR, SparseArray
from sgap_jax.runtime.native import native

SIGNS = {"+": np.add, "-": np.subtract, "*": np.multiply}


def two(rows=70, columns=97):
    """Two patterns with rows of every length, none in some, that have columns in common."""
    first = list(np.arange(rows) * 7 % 31 * (np.arange(rows) % 6 > 0))
    second = list(np.arange(rows) * 5 % 43 * (np.arange(rows) % 4 > 0))
    return from_row_lengths("A", columns, first, 1), from_row_lengths("B", columns, second, 2)


def places_of(case):
    rows = np.repeat(np.arange(case.shape[0]), np.diff(case.row_offsets))
    return list(zip(rows.tolist(), case.column_indices.tolist(), strict=False))


def merged(A, B, sign, dtype, isa="", threads=2):
    operands = []
    for case in (A, B):
        values = np.ascontiguousarray(cast(case.values, dtype))
        operands += [case.row_offsets, case.column_indices, values.view(np.uint8)]
    return native.merge(*operands, A.shape[1], sign, dtype, threads, isa)


@pytest.mark.parametrize("isa", kernel_isas())
def test_kernels(isa):
    A, B = two()
    of_a, of_b = (dict(zip(places_of(x), range(x.stored), strict=True)) for x in (A, B))
    for sign, combine in SIGNS.items():
        keys = of_a.keys() & of_b.keys() if sign == "*" else of_a.keys() | of_b.keys()
        want = sorted(keys)
        patterns = (A.row_offsets, A.column_indices, B.row_offsets, B.column_indices)
        found = native.merge_places(*patterns, A.shape[1], sign, 1, isa)
        rows = np.repeat(np.arange(A.shape[0]), np.diff(found[0]))
        assert list(zip(rows.tolist(), found[1].tolist(), strict=True)) == want
        assert found[2].tolist() == [of_a.get(place, -1) for place in want]
        assert found[3].tolist() == [of_b.get(place, -1) for place in want]
        for dtype in DTYPES:
            a, b = (rounded(x.values, dtype) for x in (A, B))
            exact = [
                combine(a[of_a[p]] if p in of_a else 0.0, b[of_b[p]] if p in of_b else 0.0)
                for p in want
            ]
            got = merged(A, B, sign, dtype, isa)
            for x, y in zip(got[:2], found, strict=False):
                np.testing.assert_array_equal(x, y)
            exact = np.asarray(exact, np.float64 if dtype == "float64" else np.float32)
            np.testing.assert_array_equal(got[2].view(cast([], dtype).dtype), cast(exact, dtype))


def test_the_same_for_any_number_of_threads_and_rows_that_do_not_ascend_are_left_to_others():
    A, B = two(9000)
    one = merged(A, B, "+", "float32", threads=1)
    for x, y in zip(one, merged(A, B, "+", "float32", threads=5), strict=True):
        np.testing.assert_array_equal(x, y)
    operands = []
    for case in (A, B):  # of columns that no vector has room for
        values = case.values.astype(np.float32)
        operands += [case.row_offsets, case.column_indices, values.view(np.uint8)]
    for columns in (2**26 - 1, 2**26, 2**31 - 1):
        for sign in SIGNS:
            moved = [
                x + np.int32(columns - 97) if i % 3 == 1 else x for i, x in enumerate(operands)
            ]
            found = native.merge(*moved, columns, sign, "float32", 1)
            want = merged(A, B, sign, "float32")
            np.testing.assert_array_equal(found[1] - np.int32(columns - 97), want[1])
            np.testing.assert_array_equal(found[2], want[2])
    for where in (0, A.stored // 2, A.stored - 2):
        spoiled = A.column_indices.copy()
        row = np.searchsorted(A.row_offsets, where, "right") - 1
        for p in (where, where + 1):  # the second of two in one row, or the first of a row
            if A.row_offsets[row] < p < A.row_offsets[row + 1]:
                spoiled[p] = spoiled[p - 1]
                arrays = (A.row_offsets, spoiled, B.row_offsets, B.column_indices)
                assert native.merge_places(*arrays, A.shape[1], "*", 2) is None
                break
    for hostile in (np.full(A.stored, 2**31 - 1, np.int32), np.full(A.stored, -5, np.int32)):
        arrays = (A.row_offsets, hostile, B.row_offsets, B.column_indices)
        assert native.merge_places(*arrays, A.shape[1], "+", 2) is None
    offsets = np.int32([0, 2**31 - 1] * 4500 + [7])
    arrays = (offsets, A.column_indices, B.row_offsets, B.column_indices)
    assert native.merge_places(*arrays, A.shape[1], "+", 2) is None


def test_any_column_that_does_not_ascend_is_found():
    """Rows of no, one and several entries: each column in turn, made wrong."""
    offsets, columns, values = np.int32([0, 0, 1, 4, 4, 5, 5, 7]), 9, np.ones(7, np.uint32)
    indices = np.int32([3, 0, 3, 8, 8, 2, 5])
    rows = np.repeat(np.arange(7), np.diff(offsets))
    for place in range(7):
        for column in range(-2, columns + 2):
            changed = indices.copy()
            changed[place] = column
            rises = (np.diff(changed) > 0) | (np.diff(rows) > 0)
            right = bool(rises.all()) and 0 <= column < columns
            for operands in (changed, indices), (indices, changed):
                arrays = [x for i in operands for x in (offsets, i, values.view(np.uint8))]
                found = native.merge(*arrays, columns, "+", "float32", 1)
                assert (found is not None) == right, (place, column)


def test_no_number_of_columns_out_of_range_is_taken_for_none():
    """2^24 times 2^40, as each was counted, is zero in 64 bits."""
    size = 2**24 - 2**24 // 1024 + 17  # of pieces that see a column of the one before again
    indices = np.arange(10, 10 + size, dtype=np.int32)
    many = np.int32([0, size]), indices, np.ones(size, np.float32).view(np.uint8)
    one = np.int32([0, 1]), np.int32([3]), np.ones(1, np.float32).view(np.uint8)
    assert native.merge(*many, *one, 11, "+", "float32", 1) is None


@pytest.mark.tier("all")
def test_a_row_that_does_not_ascend_stops_no_thread_that_waits():
    """In large results a thread waits for the rows before its own, also of tasks that give up."""
    rows = 125_000
    offsets = np.arange(0, 16 * rows + 1, 16, dtype=np.int32)
    indices = np.tile(np.arange(16, dtype=np.int32), rows)
    wrong, values = indices.copy(), np.ones(len(indices), np.float32).view(np.uint8)
    wrong[1_600_000:1_600_002] = 1, 0
    found = []

    def calls():
        for _ in range(400):
            operands = offsets, wrong, values, offsets, indices, values
            found.append(native.merge(*operands, 99, "+", "float32", 2))

    thread = threading.Thread(target=calls, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive() and found == [None] * 400


def test_operators_take_them():
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((40, 30)) * (rng.random((40, 30)) < 0.2) for _ in range(2))
    for format in (None, CSC):
        A, B = (SparseArray.from_dense(x) for x in (a, b))
        if format:
            A, B = A.asformat(format), B.asformat(format)
        for got, want in ((A + B, a + b), (A - B, a - b), (A * B, a * b)):
            assert got.format == A.format and got.is_checked
            np.testing.assert_array_equal(got.todense(), want)
            got.checked()
        with jax.numpy_dtype_promotion("standard"):
            assert (A.astype(np.float32) + B).dtype == np.float64


def test_dtypes_without_kernels_go_the_general_way():
    a, b = np.array([[1, 0], [0, 2]]), np.array([[0, 3], [0, 4]])
    for first, second in (("int32", "int32"), ("int8", "int8"), ("complex64", "complex64")):
        A, B = SparseArray.from_dense(a.astype(first)), SparseArray.from_dense(b.astype(second))
        for got, want in ((A + B, a + b), (A - B, a - b), (A * B, a * b)):
            assert got.dtype == first
            np.testing.assert_array_equal(got.todense(), want)


def test_unchecked_duplicates_add_up():
    offsets, indices = np.int32([0, 2, 3]), np.int32([0, 0, 1])
    twice = SparseArray(
        values=jax.numpy.asarray([1.0, 2.0, 5.0]),
        index_arrays=((), (jax.numpy.asarray(offsets), jax.numpy.asarray(indices))),
        transposed=None,
        shape=(2, 2),
        format=CSR,
    )
    other, dense = SparseArray.from_dense(np.array([[10.0, 0], [4, 0]])), np.diag([3.0, 5.0])
    np.testing.assert_array_equal((twice + other).todense(), dense + other.todense())
    np.testing.assert_array_equal((twice - other).todense(), dense - other.todense())


def test_where_memory_does_not_suffice_for_a_bound(monkeypatch):
    def none_left(*_, **__):
        raise MemoryError

    A = SparseArray.from_dense(np.eye(4))
    for name in ("merge", "product"):
        monkeypatch.setattr(native, name, none_left)
    B = SparseArray.from_dense(np.tri(4))
    np.testing.assert_array_equal((A + B).todense(), np.eye(4) + np.tri(4))
    np.testing.assert_array_equal((A @ B).todense(), np.tri(4))


def test_the_structure_of_the_transpose_is_made_once_for_all_who_share_it():
    A = SparseArray.from_dense(np.tri(5))
    product = A @ A
    first, second = product.with_values(product.values), product.astype(np.float32)
    assert first.transposed is second.transposed


def test_what_is_refused():
    A, B = two()
    other = from_row_lengths("B", 97, [1, 2], 2)
    with pytest.raises(ValueError, match="as many rows"):
        merged(A, other, "+", "float32")
    with pytest.raises(ValueError, match="one for each index"):
        arrays = (A.row_offsets, A.column_indices, np.zeros(4, np.uint8))
        native.merge(*arrays, *arrays, 97, "+", "float32", 1)
    with pytest.raises(ValueError, match=r"expected \+, - or \*"):
        merged(A, B, "/", "float32")
    with pytest.raises(ValueError, match="dtype"):
        native.merge(*arrays, *arrays, 97, "+", "int32", 1)
