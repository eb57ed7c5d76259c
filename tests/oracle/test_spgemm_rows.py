"""The kernel of products of two sparse matrices, row by row: rows with any number of products, and
rows that repeat the shape of one before, alone and many at once."""

import types

import numpy as np
import pytest
import scipy.sparse
from battery import cast
from native_call import direct_product, kernel_isas, run
from tolerance import DTYPES


@pytest.mark.parametrize("columns", [90, 5000, 1 << 17, 1 << 27, 2**31 - 1])
def test_rows_of_every_number_of_products(columns):
    """Those that are sorted, up to four vectors and more, and those that are not: columns in any
    order, near each other and repeated, the same sums in the same order as with a plan."""
    rng = np.random.default_rng(columns % 97)
    lengths = np.r_[0:40, 63:66, 120, 300, 17]
    near = np.minimum(rng.integers(1, 3, len(lengths)) * lengths + 1, columns)
    first = rng.integers(0, columns - near + 1)
    chosen = [f + rng.integers(0, n, c) for f, n, c in zip(first, near, lengths, strict=True)]
    chosen += [np.int64([columns - 1, 0, columns - 1])]
    right = types.SimpleNamespace(
        row_offsets=np.append(0, np.cumsum([len(x) for x in chosen])).astype(np.int32),
        column_indices=np.concatenate(chosen).astype(np.int32),
    )
    terms = [1] * len(chosen) + [0, 2, 3, 4, 9, 20, 46, 300]
    of_a = [np.int32([i]) for i in range(len(chosen))]
    of_a += [rng.integers(0, len(chosen), n, np.int32) for n in terms[len(chosen) :]]
    left = types.SimpleNamespace(
        row_offsets=np.append(0, np.cumsum(terms)).astype(np.int32),
        column_indices=np.concatenate(of_a),
    )
    a, b = (
        rng.standard_normal((1, len(x.column_indices))).astype(np.float32) for x in (left, right)
    )
    want = [np.unique(np.concatenate([chosen[k] for k in row] or [[]])) for row in of_a]
    arrays = [left.row_offsets, left.column_indices, right.row_offsets, right.column_indices]
    for isa in kernel_isas():
        offsets, indices, values = direct_product(left, a, right, b, columns, isa)
        np.testing.assert_array_equal(np.diff(offsets), [len(x) for x in want])
        np.testing.assert_array_equal(indices, np.concatenate(want))
        operands, result = [*arrays, offsets, indices, a, b], ((1, len(values)), np.float32)
        attributes = dict(columns=columns, complete=True)
        (planned,) = run("sgap_spgemm_csr_v1", operands, [result], attributes, isa)
        np.testing.assert_array_equal(values, planned[0])
        for sums in ("hash", "hash, unsorted"):
            hashed = direct_product(left, a, right, b, columns, isa, sums=sums)
            np.testing.assert_array_equal(hashed[0], offsets)
            rows = np.repeat(np.arange(len(of_a)), np.diff(offsets))
            order = np.lexsort((hashed[1], rows))
            assert (np.diff(order) == 1).all() == (sums == "hash")
            np.testing.assert_array_equal(hashed[1][order], indices)
            np.testing.assert_array_equal(hashed[2][order], values)
        met = [dict.fromkeys(column for k in row for column in chosen[k].tolist()) for row in of_a]
        assert hashed[1].tolist() == [column for row in met for column in row]
    exact = np.concatenate([row_sums(left, a[0], right, b[0], i) for i in range(len(of_a))])
    np.testing.assert_allclose(values, exact, rtol=1e-4, atol=1e-3)


def row_sums(left, a, right, b, row):
    """The sums of a row of the product, in the order of its columns."""
    columns, terms = [], []
    for e in range(*left.row_offsets[row : row + 2]):
        own = slice(*right.row_offsets[left.column_indices[e] :][:2])
        columns.append(right.column_indices[own])
        terms.append(np.float64(a[e]) * b[own])
    _, places = np.unique(np.concatenate(columns or [[]]), return_inverse=True)
    return np.bincount(places, np.concatenate(terms or [[]]))


def repeated(rows, shapes, seed=0, step=2, every=9):
    """Index arrays of a matrix whose row i has the columns of shapes[i % len(shapes)], `step` i
    further; one of `every` rows is longer, shorter or has a column elsewhere."""
    rng = np.random.default_rng(seed)
    made = [shapes[i % len(shapes)] + step * i for i in range(rows)]
    for i in rng.integers(0, rows, rows // every):
        change = rng.integers(3)
        row = made[i].copy()
        row[rng.integers(len(row))] += change == 0
        made[i] = row[1:] if change == 1 else np.append(row, row[0]) if change == 2 else row
    offsets = np.append(0, np.cumsum([len(row) for row in made]))
    return types.SimpleNamespace(
        row_offsets=offsets.astype(np.int32), column_indices=np.concatenate(made).astype(np.int32)
    )


SHAPES = {  # of A's rows, of B's rows
    "stencil": ([np.int64([8, 1, 9, 10, 17])], [np.int64([0, 3, 4, 5, 8])]),
    "two parities": ([np.int64([0, 1]), np.int64([0, 1, 2])], [np.int64([7, 2]), np.int64([1])]),
    "three unknowns": ([np.arange(9), np.arange(9) - 1, np.arange(9) - 2], [np.arange(6)]),
    "longer than what is noted": ([np.arange(40)], [np.arange(0, 120, 4)]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_rows_like_those_before(name):
    """Their bits are those of the same rows among others that are unlike them, whatever is between
    them; with a plan too, and with masks that have more or less than each row's columns."""
    turn, rng = list(SHAPES).index(name), np.random.default_rng(1)
    step = 3 if name == "three unknowns" else 1
    of_a, of_b = SHAPES[name]
    rows = 48 if "longer" in name else 300
    left = repeated(rows, [x + 2 for x in of_a], step=1)
    inner = int(left.column_indices.max()) + 1
    right = repeated(inner, of_b, seed=2, step=step)
    for columns in (int(right.column_indices.max()) + 1, 3 << 20):  # arrays, a hash table
        dtype = DTYPES[(turn + (columns > 1 << 20)) % 4]
        a, b = (cast(rng.standard_normal((1, len(x.column_indices))), dtype) for x in (left, right))
        order = rng.permutation(rows)
        places = np.concatenate([np.arange(*left.row_offsets[i : i + 2]) for i in order])
        lengths = np.diff(left.row_offsets)[order]
        mixed = types.SimpleNamespace(
            row_offsets=np.append(0, np.cumsum(lengths)).astype(np.int32),
            column_indices=left.column_indices[places],
        )
        arrays = [left.row_offsets, left.column_indices, right.row_offsets, right.column_indices]
        for isa in kernel_isas():
            offsets, indices, values = direct_product(left, a, right, b, columns, isa, 1)
            other = direct_product(mixed, a[:, places], right, b, columns, isa, 1)
            back = [np.arange(*other[0][i : i + 2]) for i in np.argsort(order)]
            np.testing.assert_array_equal(indices, other[1][np.concatenate(back)])
            np.testing.assert_array_equal(values, other[2][np.concatenate(back)])
            for mask in _masks(offsets, indices, columns):
                operands, result = [*arrays, *mask, a, b], ((1, len(mask[1])), a.dtype)
                attributes = dict(columns=columns, complete=False)
                (got,) = run("sgap_spgemm_csr_v1", operands, [result], attributes, isa)
                np.testing.assert_array_equal(got[0], at(offsets, indices, values, *mask))
    exact = np.concatenate(
        [
            row_sums(left, a[0].astype(np.float64), right, b[0].astype(np.float64), i)
            for i in range(rows)
        ]
    )
    np.testing.assert_allclose(values.astype(np.float64), exact, rtol=2e-2, atol=1e-2)


IN_TURN = {  # of A's rows, of B's rows
    "one": ([np.int64([0, 7, 8, 9, 16])], [np.int64([0, 7, 8, 9, 16])]),
    "two": ([np.int64([0, 3, 4]), np.int64([1, 2, 4, 9])], [np.int64([0, 2]), np.int64([0, 1, 5])]),
    "long": ([np.arange(11)], [np.arange(0, 20, 2)]),
}


@pytest.mark.parametrize("name", IN_TURN)
def test_many_rows_of_one_shape_or_of_two_in_turn(name):
    """Eight at once, or sixteen, unless one of them is unlike the others in A, in B or in C: the
    bits of single rows, nothing behind the last one, and NaN where a product has no place."""
    rng, (of_a, of_b), rows = np.random.default_rng(2), IN_TURN[name], 260
    left = repeated(rows, of_a, step=1, every=50)
    right = repeated(int(left.column_indices.max()) + 1, of_b, seed=3, step=1, every=90)
    columns = int(right.column_indices.max()) + 1
    a, b = (rng.standard_normal((1, len(x.column_indices))).astype("f4") for x in (left, right))
    single = rng.permutation(rows)
    places = np.concatenate([np.arange(*left.row_offsets[i : i + 2]) for i in single])
    mixed = types.SimpleNamespace(
        row_offsets=np.append(0, np.cumsum(np.diff(left.row_offsets)[single])).astype(np.int32),
        column_indices=left.column_indices[places],
    )
    arrays = [left.row_offsets, left.column_indices, right.row_offsets, right.column_indices]
    for isa in kernel_isas():
        offsets, indices, values = direct_product(mixed, a[:, places], right, b, columns, isa, 1)
        back = [np.arange(*offsets[i : i + 2]) for i in np.argsort(single)]
        offsets = np.append(0, np.cumsum([len(x) for x in back])).astype(np.int32)
        indices, values = indices[np.concatenate(back)], values[np.concatenate(back)]
        at_once = direct_product(left, a, right, b, columns, isa, 1)
        for found, expected in zip(at_once, (offsets, indices, values), strict=True):
            np.testing.assert_array_equal(found, expected)
        for wrong in (None, *range(80, 100, 3)):  # a row of C, one of whose columns is another
            of_c, right_values, bad = indices.copy(), values.copy(), slice(0)
            if wrong is not None:
                bad = slice(*offsets[wrong : wrong + 2])
                of_c[bad.stop - 1] += 1
                right_values[bad] = np.nan
            result = ((1, len(of_c)), np.float32)
            attributes = dict(columns=columns + 1, complete=True)
            (got,) = run(
                "sgap_spgemm_csr_v1", [*arrays, offsets, of_c, a, b], [result], attributes, isa
            )
            np.testing.assert_array_equal(got[0], right_values)


@pytest.mark.parametrize("columns", [10, 1 << 27])
def test_rows_without_a_shape_between_rows_of_two_in_turn(columns):
    """A row of one entry over an empty row of B, of one over a row of entries, and an empty row
    between rows that are added up sixteen at once, against NumPy."""
    rows = [[1, 0, 1] if i % 2 else [0, 1] for i in range(60)]
    rows[7:7], rows[20:20], rows[33:33] = [[2]], [[]], [[0]]
    left = types.SimpleNamespace(
        row_offsets=np.append(0, np.cumsum([len(row) for row in rows])).astype(np.int32),
        column_indices=np.int32(sum(rows, [])),
    )
    right = types.SimpleNamespace(
        row_offsets=np.int32([0, 2, 5, 5]), column_indices=np.int32([5, 9, 7, 8, 9])
    )
    a = np.random.default_rng(0).integers(1, 5, (1, len(left.column_indices))).astype("f4")
    b = np.float32([[1, 2, 3, 4, 5]])
    dense = np.zeros((len(rows), 10))
    of_b = np.zeros((3, 10))
    of_b[[0, 0, 1, 1, 1], right.column_indices] = b[0]
    for i, k, value in zip(
        np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
        left.column_indices,
        a[0],
        strict=True,
    ):
        dense[i] += value * of_b[k]
    for isa in kernel_isas():
        offsets, indices, values = direct_product(left, a, right, b, columns, isa, 1)
        found = scipy.sparse.csr_matrix((values, indices, offsets), (len(rows), 10)).toarray()
        np.testing.assert_array_equal(found, dense)


def at(offsets, indices, values, of_mask, columns):
    """The values of a matrix whose columns ascend in each row at the entries of a mask."""
    keys = lambda of, to: np.repeat(np.arange(len(of) - 1) << 32, np.diff(of)) + to
    there, asked = keys(offsets, indices), keys(of_mask, columns)
    places = np.minimum(np.searchsorted(there, asked), len(there) - 1)
    return np.where(there[places] == asked, values[places], np.zeros(1, values.dtype))


def _masks(offsets, indices, columns):
    """The structure itself, and with a column more and a column less in some rows."""
    yield offsets, indices
    for every in (1, 7):
        made = []
        for i in range(len(offsets) - 1):
            row = indices[offsets[i] : offsets[i + 1]]
            if i % every == 0 and i % 2:
                row = np.union1d(row, [(row[-1] + 3) % columns])
            made.append(row[1:] if i % every == 0 and i % 2 == 0 else row)
        yield (
            np.append(0, np.cumsum([len(x) for x in made])).astype(np.int32),
            np.concatenate(made).astype(np.int32),
        )
