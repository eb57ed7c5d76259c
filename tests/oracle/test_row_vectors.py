"""The row operations on column vectors: every length and dtype meets some matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, cast, from_row_lengths, rounded
from row_oracle import row_sum_oracle, softmax_jacobian_oracle, softmax_oracle
from tolerance import DTYPES, assert_within
from vector_cases import encoded, vectors

from sgap_jax import (
    CSR,
    CVS,
    CpuTile,
    Problem,
    Reference,
    reference,
    row_max,
    row_sum,
    sparse_softmax,
)
from sgap_jax.primitives.row_reduce import bind_row_broadcast, of_rows

LENGTHS = [1, 2, 3, 8, 16, 33]  # 33: the last row needs a register of its own
INF, NAN = np.inf, np.nan
lengths = pytest.mark.parametrize("length", LENGTHS)
# The CPU's kernels with whole rows and with pieces, and plain JAX; emulated kernels have other
# tests.
SCHEDULES = [None, CpuTile(nonzeros=64), Reference()]


def in_place(A, place, x, fill=0.0):
    """Places the values of the entries in the flat values; other places get `fill`."""
    out = np.full(A.nnz, fill)
    out[place] = x
    return out


def softmax_is_right(arrays, case, place, dtype, schedule, scale=1.0):
    A = vectors(arrays, case, dtype)
    P = sparse_softmax(A, scale=scale, schedule=schedule)
    assert P.dtype == dtype and P.format == A.format and P.values.shape == A.values.shape
    expected, bound = softmax_oracle(case, dtype, scale)
    expected, bound = in_place(A, place, expected), in_place(A, place, bound)
    assert_within(P.values.reshape(-1), expected, bound)  # exactly zero where there is no entry


def jacobian_is_right(arrays, case, place, dtype, schedule, scale=-0.5):
    A = vectors(arrays, case, dtype)
    t = np.random.default_rng(1).standard_normal(A.nnz)
    t = cast(in_place(A, place, t[place], NAN).reshape(A.values.shape), dtype)
    f = lambda v: sparse_softmax(A.with_values(v), scale=scale, schedule=schedule).values
    p, pullback = jax.vjp(f, A.values)
    (cotangent,) = pullback(t)  # the Jacobian is symmetric: forward and reverse share it
    p, t = np.asarray(p).reshape(-1)[place], np.asarray(t).reshape(-1)[place]
    expected, bound = softmax_jacobian_oracle(case, dtype, p, t, scale)
    expected, bound = in_place(A, place, expected), in_place(A, place, bound)
    assert_within(cotangent.reshape(-1), expected, bound)


def reductions_are_right(arrays, case, place, dtype, schedule):
    A = vectors(arrays, case, dtype)
    assert_within(row_sum(A, schedule=schedule), *row_sum_oracle(case, dtype))
    greatest = reference.row_max(rounded(case.values, dtype), case.row_offsets)
    s = row_max(A, schedule=schedule)
    assert s.dtype == dtype
    np.testing.assert_array_equal(np.asarray(s).astype(np.float64), greatest)


def broadcast_is_right(arrays, case, place, dtype, schedule):
    A = vectors(arrays, case, dtype)
    rows = cast(np.random.default_rng(2).standard_normal((1, case.shape[0])), dtype)
    params = dict(**of_rows(A), schedule=schedule)
    length = params["vector_length"]
    given = rows if case.shape[0] % length else rows.reshape(1, -1, length)
    (values,) = bind_row_broadcast(jnp.asarray(given), A.row_offsets, len(A.values), **params)
    expected = in_place(A, place, np.float64(rows[0])[case.rows])
    np.testing.assert_array_equal(np.float64(values).reshape(-1), expected)


CHECKS = [softmax_is_right, jacobian_is_right, reductions_are_right, broadcast_is_right]


@lengths
@pytest.mark.parametrize("name", BATTERY)
def test_battery(name, length):
    coded = encoded(BATTERY[name], length)
    turn = list(BATTERY).index(name) + LENGTHS.index(length)
    for i, check in enumerate(CHECKS):
        if (turn + i) % 2:
            check(*coded, DTYPES[(turn // 2 + i) % 4], SCHEDULES[(turn + i) // 2 % 3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", CHECKS)
@lengths
def test_every_dtype(length, check, dtype):
    # Rows of several registers and of part of a register; the last vectors end past the matrix.
    check(*encoded(BATTERY["every_length"], length), dtype, None)


@pytest.mark.parametrize("scale", [0.125, -3.0, 0.0])
@pytest.mark.parametrize("length", [3, 8])
def test_scales(length, scale):
    for schedule in SCHEDULES:
        softmax_is_right(*encoded(BATTERY["skewed"], length), "float32", schedule, scale)
        jacobian_is_right(*encoded(BATTERY["skewed"], length), "float32", schedule, scale)


@pytest.mark.parametrize("length", [2, 5, 32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_rows_in_pieces(length, dtype):
    coded = encoded(from_row_lengths("split", 20_000, [3, 20_000, 0, 9_000, 5_000]), length)
    for check in CHECKS:
        check(*coded, dtype, None)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("length", [2, 3, 4, 16])
def test_a_row_sees_nothing_of_its_neighbours(length, schedule):
    """Masked rows, NaN and infinities, in each row of a vector in turn, do not affect other
    rows."""
    rows = [[-INF] * 40, [NAN] + [0.0] * 39, [INF] + [0.0] * 39, [-INF] * 39 + [1.0], [1.0] * 40]
    full = from_row_lengths("full", 40, [40] * (length + 1))
    arrays, case, place = encoded(full, length)
    for shift in range(length + 1):
        values = np.array([rows[(i + shift) % 5] for i in range(length + 1)])
        stored = in_place(vectors(arrays, case, "float32"), place, values.reshape(-1), NAN)
        A = vectors((*arrays[:2], stored.reshape(arrays[2].shape)), case, "float32")
        P = np.asarray(sparse_softmax(A, schedule=schedule).values).reshape(-1)[place]
        with np.errstate(invalid="ignore"):
            expected = reference.sparse_softmax(values.reshape(-1), case.row_offsets)
        np.testing.assert_allclose(P, expected, rtol=1e-6)
        np.testing.assert_array_equal(row_max(A, schedule=schedule), values.max(1))
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(row_sum(A, schedule=schedule), values.sum(1), rtol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_batches_and_a_traced_scale(schedule):
    arrays, case, place = encoded(BATTERY["one_heavy_row"], 4)
    A = vectors(arrays, case, "float32")
    many = np.stack([np.where(np.isnan(arrays[2]), NAN, arrays[2] * s) for s in (1, -2, 3)])
    f = lambda v, c: sparse_softmax(A.with_values(v), scale=c, schedule=schedule).values
    P = jax.jit(jax.vmap(f))(cast(many, "float32"), jnp.asarray([1.0, 0.5, -0.25], jnp.float32))
    sums = jax.vmap(lambda v: row_sum(A.with_values(v), schedule=schedule))(cast(many, "float32"))
    for i, scale in enumerate((1.0, 0.5, -0.25)):
        own = many[i].reshape(-1)[place]
        expected, bound = softmax_oracle(case, "float32", scale, own)
        expected, bound = in_place(A, place, expected), in_place(A, place, 2 * bound)
        assert_within(P[i].reshape(-1), expected, bound)
        assert_within(sums[i], *row_sum_oracle(case, "float32", own))


@pytest.mark.parametrize("length", [1, 3, 8])
def test_the_bits_of_each_call_and_those_of_entries(length):
    """Vectors of length 1 are entries: the kernels are those of CSR."""
    arrays, case, _ = encoded(BATTERY["skewed"], length)
    A = vectors(arrays, case, "float32")
    softmax = jax.jit(lambda A: sparse_softmax(A).values)
    first = softmax(A)
    for _ in range(5):
        np.testing.assert_array_equal(first, softmax(A))
    if length == 1:
        entries = softmax(A.asformat(CSR))
        np.testing.assert_array_equal(first[:, 0], entries)
        np.testing.assert_array_equal(row_sum(A), row_sum(A.asformat(CSR)))


def test_vectors_along_the_columns():
    arrays, case, _ = encoded(BATTERY["skewed"], 4)
    A = vectors(arrays, case, "float32").T
    assert A.format == CVS(4).transposed
    P = sparse_softmax(A, scale=0.5)
    assert P.format == A.format
    entries = A.asformat(CSR)
    np.testing.assert_array_equal(P.todense(), sparse_softmax(entries, scale=0.5).todense())
    np.testing.assert_array_equal(row_sum(A), row_sum(entries))
    np.testing.assert_array_equal(row_max(A), row_max(entries))


def test_no_entries_are_formed():
    arrays, case, _ = encoded(BATTERY["skewed"], 4)
    A = vectors(arrays, case, "float32")
    f = jax.value_and_grad(lambda v: jnp.sum(sparse_softmax(A.with_values(v)).values ** 2))
    text = jax.jit(f).lower(A.values).as_text()
    assert text.count("custom_call @sgap_sparse_softmax_cvs_v1") == 1
    assert text.count("custom_call @sgap_sparse_softmax_jacobian_cvs_v1") == 1
    assert "gather" not in text and "csr" not in text
    text = jax.jit(jax.grad(lambda v: jnp.sum(row_max(A.with_values(v))))).lower(A.values).as_text()
    assert "gather" not in text and "csr" not in text
    problem = Problem("sparse_softmax", (500, 0), 4000, format="CVS(8)")
    assert "chunk of 1024 vectors" in CpuTile().explain(problem)


@pytest.mark.parametrize("op", ["sparse_softmax", "row_sum", "row_max"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(offsets=3), "offsets: expected one for each of the block rows of 6 rows"),
        (dict(rows=9), "offsets: expected one for each of the block rows of 9 rows"),
        (dict(rows=-1), "offsets"),
        (dict(shape=(1, 5)), "values: expected"),
        (dict(shape=(1, 5, 0)), "values: expected vectors of 1 to"),
        (dict(dtype="int32"), "values: expected float32"),
        (dict(chunk_nonzeros=0), "chunk_nonzeros"),
    ],
)
def test_a_handler_refuses_what_does_not_fit(op, change, words):
    given = dict(offsets=4, rows=6, shape=(1, 5, 2), dtype="float32", chunk_nonzeros=64) | change
    attrs = dict(rows=np.int64(given["rows"]), chunk_nonzeros=np.int64(given["chunk_nonzeros"]))
    attrs |= dict(scale=np.float64(1)) if op == "sparse_softmax" else {}
    shape = (1, 5, 2) if op == "sparse_softmax" else (1, 6)
    out = jax.ShapeDtypeStruct(shape, given["dtype"])
    call = jax.ffi.ffi_call(f"sgap_{op}_cvs_v1", out)
    with pytest.raises(Exception, match=f"{op}: {words}"):
        call(
            jnp.zeros(given["shape"], given["dtype"]),
            jnp.zeros(given["offsets"], jnp.int32),
            **attrs,
        )
