"""Every op on blocks against float64: each matrix of the battery in some shape of block, on some
backend, in all dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, from_row_lengths, rounded
from conftest import backend_of, row_schedule
from row_oracle import row_sum_oracle, softmax_oracle
from spmm_oracle import dense_operand, oracle
from tolerance import DTYPES, assert_within
from vector_cases import encoded, sddmm_is_right, spmm_is_right, vectors

import sgap_jax
from sgap_jax import (
    BCSR,
    CSR,
    CVS,
    SparseArray,
    gsddmm,
    gspmm,
    reference,
    row_max,
    row_sum,
    sddmm,
    sparse_softmax,
    spmm,
    spmv,
)

SHAPES = [(1, 2), (2, 2), (4, 4), (3, 5), (8, 3), (16, 16)]
ON = ["cpu", "cpu-tiled", "reference"]


def rows_are_right(arrays, case, place, dtype, schedule):
    A, own = vectors(arrays, case, dtype), row_schedule(schedule)
    assert_within(row_sum(A, schedule=own), *row_sum_oracle(case, dtype))
    maximum = reference.row_max(rounded(case.values, dtype), case.row_offsets)
    np.testing.assert_array_equal(np.asarray(row_max(A, schedule=own)).astype(np.float64), maximum)
    P = sparse_softmax(A, scale=0.5, schedule=own)
    assert P.dtype == dtype and P.format == A.format and P.values.shape == A.values.shape
    expected, bound = np.zeros(A.nnz), np.zeros(A.nnz)
    expected[place], bound[place] = softmax_oracle(case, dtype, 0.5)
    assert_within(P.values.reshape(-1), expected, bound)


@pytest.mark.seconds(check=3, test=6)
@pytest.mark.parametrize("name", BATTERY)
def test_battery(name):
    i = list(BATTERY).index(name)
    draw, (height, width) = np.random.default_rng(i), SHAPES[i % len(SHAPES)]
    arrays, case, place = encoded(BATTERY[name], height, width=width)
    schedule = backend_of(ON[(i + i // len(SHAPES)) % len(ON)], "")
    dtypes = [str(dtype) for dtype in draw.permutation(DTYPES)]
    n, d = (int(size) for size in draw.choice([0, 1, 2, 5, 16, 33], 2))
    spmm_is_right(arrays, case, dtypes[0], n, False, schedule)
    spmm_is_right(arrays, case, dtypes[1], n, True, schedule)
    sddmm_is_right(arrays, case, place, dtypes[2], d, schedule, weighted=i % 2 == 1)
    rows_are_right(arrays, case, place, dtypes[3], schedule)


def test_in_the_emulator(request):
    schedule = backend_of("emulated", request.node.nodeid)
    arrays, case, place = encoded(BATTERY["padded"], 4, width=4)
    spmm_is_right(arrays, case, "float32", 5, False, schedule)
    spmm_is_right(arrays, case, "float32", 5, True, schedule)
    sddmm_is_right(arrays, case, place, "float32", 5, schedule, weighted=True)
    rows_are_right(arrays, case, place, "float32", schedule)


def test_operators_and_the_other_ops():
    arrays, case, place = encoded(BATTERY["empty_rows_at_both_ends"], 3, width=2)
    A, dense = vectors(arrays, case, "float64"), case.dense()
    (m, k), rng = A.shape, np.random.default_rng(0)
    B, x, X = rng.standard_normal((k, 4)), rng.standard_normal(k), rng.standard_normal((4, m))
    close = lambda actual, expected: np.testing.assert_allclose(actual, expected, atol=1e-12)
    close(A @ B, dense @ B)
    close(A @ x, dense @ x)
    close(X @ A, X @ dense)
    close(X[0] @ A, X[0] @ dense)
    close(A.T @ X.T, dense.T @ X.T)
    close(spmv(A, X[0], transpose=True), dense.T @ X[0])
    close((2 * A / 4).todense(), dense / 2)
    close(row_sum(A.T), dense.sum(0))
    # A block's zeros are messages too; its elements outside the matrix are not.
    stored = np.zeros(A.shape, bool)
    stored[case.rows, case.column_indices] = True
    messages = np.where(stored[:, :, None], dense[:, :, None] + B[None], -np.inf).max(1)
    C = np.asarray(gspmm(A, B, op="add", reduce="max"))
    close(C[stored.any(1)], messages[stored.any(1)])
    E = gsddmm(A, jnp.asarray(X[0]), jnp.asarray(x), op="sub")
    assert E.format == A.format
    close(E.todense(), np.where(stored, X[0][:, None] - x, 0))


def test_the_transpose_of_an_array():
    arrays, case, _ = encoded(BATTERY["skewed"], 4, width=8)
    A, X = vectors(arrays, case, "float32"), dense_operand(case, 9, True).astype(np.float32)
    np.testing.assert_array_equal(spmm(A.T, X), spmm(A, X, transpose=True))
    Y = dense_operand(case, 9).astype(np.float32)
    C = sddmm(A.T, Y, X)
    assert C.format == A.T.format
    np.testing.assert_array_equal(C.values, sddmm(A, X, Y).values)
    P = sparse_softmax(A.T)
    np.testing.assert_allclose(row_sum(P), np.asarray(A.T.row_lengths) > 0, rtol=1e-5)


@pytest.mark.parametrize("k", [12, 13])
def test_infinity_meets_only_the_blocks_of_its_column(k):
    case = from_row_lengths("two_of_k", k, [2] * 20)
    arrays, entries, _ = encoded(case, 2, width=5)
    A, B = vectors(arrays, entries, "float64"), np.ones((k, 3))
    B[k - 1] = np.inf  # its block has columns past the end, which must not give inf - inf
    dense = entries.dense()
    expected = np.where(dense[:, k - 1 :] != 0, np.sign(dense[:, k - 1 :]) * np.inf, 0)
    C = np.asarray(spmm(A, B))
    np.testing.assert_array_equal(np.isinf(C), np.broadcast_to(np.isinf(expected), C.shape))
    assert not np.isnan(C).any()


def test_rounding_does_not_depend_on_the_encoding():
    arrays, case, _ = encoded(BATTERY["skewed"], 8, width=4)
    A, B = vectors(arrays, case, "bfloat16"), dense_operand(case, 20)
    C = spmm(A, jnp.asarray(B, jnp.bfloat16))
    split = A.asformat(type(A.format)(A.format.levels[:3]))
    np.testing.assert_array_equal(C, spmm(split, jnp.asarray(B, jnp.bfloat16)))
    assert_within(C, *oracle(case, "bfloat16", B))


REPEATED = {CVS(2): (2, 1), BCSR(2, 3): (2, 3), BCSR(2, 3).transposed: (2, 3)}


def repeated(format):
    """Values and index arrays of a matrix [4, 6] whose first block is stored twice (its transpose
    [6, 4] in the transposed format), and the dense matrix."""
    height, width = REPEATED[format]
    values = np.arange(-5.0, -5 + 4 * height * width).reshape(4, height, width)
    columns = np.array([0, 0, 1, 1])
    dense = np.zeros((4, 6))
    for (row, column), block in zip([(0, 0), (0, 0), (0, 1), (1, 1)], values, strict=True):
        rows, across = slice(row * height, None), slice(column * width, (column + 1) * width)
        dense[rows][:height, across] += block
    arrays = values.reshape(4, *format.block_shape), np.array([0, 3, 4]), columns
    return arrays, dense if format.order is None else dense.T


EYE = SparseArray.from_dense(np.eye(2, 6), format=CVS(2))

# What is done to a matrix and to its dense twin, on each of these formats: what acts on entries is
# the same program for all.
OF_TRACED = [
    (CVS(2), lambda A: A[1:3], lambda x: x[1:3]),
    (BCSR(2, 3), lambda A: A[:, 1:4:2], lambda x: x[:, 1:4:2]),
    (BCSR(2, 3).transposed, lambda A: A[2], lambda x: x[2]),
    (BCSR(2, 3), lambda A: A.max(axis=0), lambda x: x.max(axis=0)),
    (CVS(2), lambda A: A.argmin(axis=1), lambda x: x.argmin(axis=1)),
    (BCSR(2, 3).transposed, lambda A: A.count_nonzero(), np.count_nonzero),
    (BCSR(2, 3), lambda A: sgap_jax.tril(A, -1), lambda x: np.tril(x, -1)),
    (BCSR(2, 3).transposed, sgap_jax.triu, np.triu),
    (BCSR(2, 3).transposed, lambda A: sgap_jax.vstack([A, A]), lambda x: np.vstack([x, x])),
    (CVS(2), lambda A: sgap_jax.vstack([EYE, A]), lambda x: np.vstack([EYE.todense(), x])),
    (CVS(2), lambda A: sgap_jax.kron(A, np.eye(2)), lambda x: np.kron(x, np.eye(2))),
    (BCSR(2, 3), lambda A: A - A.asformat(CSR), lambda x: 0 * x),
    (CVS(2), lambda A: A + jax.tree.map(jnp.copy, A), lambda x: 2 * x),
]


@pytest.mark.parametrize("case", range(len(OF_TRACED)))
def test_a_traced_structure_acts_as_its_entries(case):
    """Of index arrays made inside jit a place may be in two blocks; what has a structure of its own
    is in CSR."""
    format, call, of_dense = OF_TRACED[case]
    arrays, dense = repeated(format)

    @jax.jit
    def traced(values, offsets, columns):
        A = SparseArray.from_arrays(values, offsets, columns, shape=dense.shape, format=format)
        found = call(A)
        assert not A.is_checked
        if isinstance(found, SparseArray):
            assert found.ndim == 1 or found.format == CSR
            return found.todense()
        return found

    np.testing.assert_array_equal(traced(*arrays), of_dense(dense))


def test_what_a_traced_structure_refuses_has_the_name_of_the_call():
    arrays, dense = repeated(CVS(2))
    for name, call in (
        ("abs", abs),
        ("sum_duplicates", lambda A: A.sum_duplicates()),
        ("eliminate_zeros", lambda A: A.eliminate_zeros()),
        ("vstack: CVS", lambda A: sgap_jax.vstack([A, A], format=CVS(2))),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}.* the nearest .*CSR"):
            jax.eval_shape(
                lambda *x, call=call: call(
                    SparseArray.from_arrays(*x, shape=dense.shape, format=CVS(2))
                ),
                *arrays,
            )
