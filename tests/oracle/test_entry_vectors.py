"""Values [nnz, d], a vector of each entry: messages, aggregates, sums, maxima and softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast, from_row_lengths, rounded
from conftest import row_schedule
from gspmm_oracle import PAIRS, away_from_zero
from jax.test_util import check_grads
from native_call import kernel_isas, run
from spmm_oracle import dense_operand
from tolerance import DTYPES, assert_within, sum_bound

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSR,
    CpuTile,
    Reference,
    SparseArray,
    aggregate,
    gsddmm,
    gspmm,
    row_max,
    row_sum,
    sparse_softmax,
    spmm,
)
from sgap_jax.primitives.gspmm import OPS, REDUCTIONS

NAMES = ["no_entries", "every_length", "one_heavy_row", "skewed", "padded", "only_padding"]
FORMATS = [CSR, CSC, COO]
NONE = np.zeros(0, np.int32)


def vectors(case, n, seed=11):
    """[nnz, n], NaN in the padding."""
    v = away_from_zero(np.random.default_rng(seed).standard_normal((case.nnz, n)))
    v[case.stored :] = np.nan
    return v


def reduced(case, M, reduce, transpose=False):
    """(the reductions [m, n] of messages [stored, n], the number of terms [m, 1])."""
    to = case.column_indices[: case.stored] if transpose else case.rows
    m = case.shape[1 if transpose else 0]
    terms = np.bincount(to, minlength=m)[:, None]
    if reduce in ("sum", "mean"):
        out = np.zeros((m, M.shape[1]))
        np.add.at(out, to, M)
        return (out / np.maximum(terms, 1) if reduce == "mean" else out), terms
    ufunc, start = (np.maximum, -np.inf) if reduce == "max" else (np.minimum, np.inf)
    out = np.full((m, M.shape[1]), start)
    ufunc.at(out, to, M)
    return np.where(terms > 0, out, 0), terms


def bounds(case, M, size, reduce, transpose, dtype):
    expected, terms = reduced(case, M, reduce, transpose)
    largest, _ = reduced(case, size, {"min": "max"}.get(reduce, reduce), transpose)
    terms = 2 * terms if reduce in ("sum", "mean") else 0
    return expected, sum_bound(expected, largest, terms + 3, dtype)


def gspmm_oracle(case, dtype, V, X, op, reduce, transpose):
    source = case.rows if transpose else case.column_indices[: case.stored]
    v, x = rounded(V, dtype)[: case.stored], rounded(X, dtype)[source]
    M = {"mul": x * v, "add": x + v, "sub": x - v, "div": x / v, "copy": x}[op]
    size = abs(x) + abs(v) if op in ("add", "sub") else abs(M)
    return bounds(case, M, size, reduce, transpose, dtype)


# ---- the kernels, on each instruction set -------------------------------------------------------


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_vectors(dtype, isa):
    for i, name in enumerate(NAMES):
        case = BATTERY[name]
        for n in (1, 5, 8, 67):
            V, X, Y = vectors(case, n), dense_operand(case, n), dense_operand(case, n, True)
            v, x, y = (cast(a, dtype)[None] for a in (V, X, Y))
            shape = (1, case.shape[0], n)
            minimum, add = (i + n) % 2 == 1, n in (1, 8)
            ops = [(True, False, False), (False, add, minimum)]
            for sums, add, minimum in ops:
                attrs = dict(sum=sums, add=add, minimum=minimum, chunk_nonzeros=64)
                arrays = (v, case.row_offsets, case.column_indices, NONE, x)
                places = ((0,) if sums else shape, np.int32)
                results = [(shape, v.dtype), places]
                found, arg = run("sgap_gspmm_vectors_csr_v1", arrays, results, attrs, isa)
                reduce = "sum" if sums else "min" if minimum else "max"
                of = (V, X, "add" if add else "mul", reduce, False)
                assert_within(found[0], *gspmm_oracle(case, dtype, *of))
                if not sums and case.stored:
                    rows, q = np.arange(shape[1])[:, None], arg[0]
                    attained = rounded(V, dtype)[q, np.arange(n)[None]]
                    other = rounded(X, dtype)[case.column_indices[q], np.arange(n)[None]]
                    message = attained + other if add else attained * other
                    np.testing.assert_allclose(
                        np.where(q < 0, 0, message), found[0].astype(float), rtol=1e-2, atol=1e-6
                    )
                    assert ((q < 0) | (case.row_offsets[rows] <= q)).all()
                    assert (q < case.row_offsets[rows + 1]).all()
            attrs = dict(rows=shape[1] * n, chunk_nonzeros=64)
            arrays, result = (v, case.row_offsets), (shape, v.dtype)
            (found,) = run("sgap_row_sum_one_pass_cvs_v1", arrays, [result], attrs, isa)
            own = rounded(V, dtype)[: case.stored]
            assert_within(found[0], *bounds(case, own, abs(own), "sum", False, dtype))
            for add in (False, True):
                attrs, arrays = dict(add=add, chunk_nonzeros=64), (y, x)
                arrays = (case.row_offsets, case.column_indices, *arrays)
                result = ((1, case.nnz, n), v.dtype)
                (found,) = run("sgap_gsddmm_csr_v1", arrays, [result], attrs, isa)
                left = rounded(Y, dtype)[case.rows]
                right = rounded(X, dtype)[case.column_indices[: case.stored]]
                expected = np.zeros((case.nnz, n))
                expected[: case.stored] = left + right if add else left * right
                assert_within(found[0], expected, sum_bound(expected, abs(expected), 1, dtype))


@pytest.mark.parametrize("isa", kernel_isas())
def test_threads_change_no_bits(isa):
    case = from_row_lengths("large", 500, [40, 3, 500, 0, 17] * 60)
    n = 64
    v, x = cast(vectors(case, n), "float32")[None], cast(dense_operand(case, n), "float32")[None]
    arrays = (v, case.row_offsets, case.column_indices, NONE, x)
    results = [((1, case.shape[0], n), v.dtype), ((0,), np.int32)]
    attrs = dict(sum=True, add=False, minimum=False, chunk_nonzeros=64)
    every = [
        run("sgap_gspmm_vectors_csr_v1", arrays, results, attrs, isa, threads)[0]
        for threads in (1, 2, 5)
    ]
    np.testing.assert_array_equal(every[0], every[1])
    np.testing.assert_array_equal(every[0], every[2])


@pytest.mark.parametrize("isa", kernel_isas())
def test_kernels_survive_any_index_arrays(isa):
    """What does not take part gives zeros, and nothing is read out of bounds."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        m, k, nnz, n = 7, 5, 23, 9
        offsets = rng.integers(-3, nnz + 5, m + 1).astype(np.int32)
        columns = rng.integers(-2, k + 2, nnz).astype(np.int32)
        y, x = (rng.standard_normal((1, size, n)).astype(np.float32) for size in (m, k))
        v = rng.standard_normal((1, nnz, n)).astype(np.float32)
        valid = np.maximum.accumulate(np.clip(offsets, 0, nnz))
        expected, of_entries = np.zeros((m, n)), np.zeros((nnz, n))
        ends = [0, *valid[1:]]  # row operations begin at entry 0
        sums = np.stack([v[0, ends[i] : ends[i + 1]].sum(0) for i in range(m)])
        attrs, result = dict(rows=m * n, chunk_nonzeros=20), ((1, m, n), np.float32)
        (found,) = run("sgap_row_sum_one_pass_cvs_v1", (v, offsets), [result], attrs, isa)
        np.testing.assert_allclose(found[0], sums, rtol=1e-5, atol=1e-5)
        for i in range(m):
            for p in range(valid[i], valid[i + 1]):
                if 0 <= columns[p] < k:
                    expected[i] += v[0, p] * x[0, columns[p]]
                    of_entries[p] = y[0, i] * x[0, columns[p]]
        attrs = dict(sum=True, add=False, minimum=False, chunk_nonzeros=4)
        results = [((1, m, n), np.float32), ((0,), np.int32)]
        arrays = (v, offsets, columns, NONE, x)
        (found, _) = run("sgap_gspmm_vectors_csr_v1", arrays, results, attrs, isa)
        np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)
        arrays, result = (offsets, columns, y, x), ((1, nnz, n), np.float32)
        (found,) = run(
            "sgap_gsddmm_csr_v1", arrays, [result], dict(add=False, chunk_nonzeros=4), isa
        )
        np.testing.assert_allclose(found[0], of_entries, rtol=1e-5, atol=1e-5)


# ---- the operations -----------------------------------------------------------------------------


@pytest.mark.parametrize("turn", range(10))
def test_gspmm_of_vectors(turn):
    """All pairs of op and reduction, with matrices, dtypes, formats and schedules in turn."""
    name, dtype = NAMES[turn % 6], DTYPES[turn % 4]
    case = BATTERY[name]
    for i, (op, reduce) in enumerate(PAIRS[turn::10]):
        n, transpose = (3, 16, 17)[(turn + i) % 3], (turn + i) % 2 == 1
        V, X = vectors(case, n), dense_operand(case, n, transpose)
        A = array(case, dtype, FORMATS[(turn + i) % 3] if name != "only_padding" else None)
        V = V[np.asarray(in_format(case, A))]
        schedule = (None, CpuTile(nonzeros=64), Reference())[turn % 3]
        C = gspmm(
            *(A, cast(X, dtype)),
            values=cast(V, dtype),
            **dict(op=op, reduce=reduce, transpose=transpose, schedule=schedule),
        )
        assert C.dtype == dtype
        of = (vectors(case, n), X, op, reduce, transpose)
        assert_within(C, *gspmm_oracle(case, dtype, *of))


def in_format(case, A):
    """Which entry of the case each one of A is."""
    S = array(case, "float32").with_values(np.arange(case.nnz, dtype=np.int32))
    return S.values if A.format == CSR else S.asformat(A.format).values


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_aggregate(reduce, backend):
    for i, name in enumerate(("every_length", "padded")):
        case, dtype = BATTERY[name], ("float32", "bfloat16")[i]
        format = FORMATS[(REDUCTIONS.index(reduce) + i) % 3]
        A, transpose = array(case, dtype, format), i == 0
        M = vectors(case, 6 + i)
        given = cast(M[np.asarray(in_format(case, A))], dtype)
        schedule = row_schedule(backend)
        Y = aggregate(A, given, reduce, transpose=transpose, schedule=schedule)
        assert Y.dtype == dtype
        own = rounded(M, dtype)[: case.stored]
        assert_within(Y, *bounds(case, own, abs(own), reduce, transpose, dtype))


def test_aggregate_of_integers():
    case = BATTERY["every_length"]
    A, M = array(case, "float32"), np.arange(case.nnz * 2).reshape(-1, 2)
    np.testing.assert_array_equal(aggregate(A, M), reduced(case, M, "sum")[0])
    np.testing.assert_array_equal(aggregate(A, M[:, 1]), aggregate(A, M)[:, 1])
    heads = aggregate(A, M[:, :, None, None] * np.ones((3, 1), int))
    np.testing.assert_array_equal(heads, aggregate(A, M)[:, :, None, None].repeat(3, 2))
    np.testing.assert_array_equal(aggregate(A, M, "max"), reduced(case, M, "max")[0])
    np.testing.assert_allclose(aggregate(A, M, "mean"), reduced(case, M, "mean")[0])


@pytest.mark.parametrize("op", OPS)
def test_gsddmm_gives_vectors(op):
    case, d = BATTERY["padded"], 5
    for i, dtype in enumerate(("float32", "bfloat16")):
        format = FORMATS[(OPS.index(op) + i) % 3]
        A, order = array(case, dtype, format), in_format(case, array(case, dtype, format))
        X, Y = away_from_zero(dense_operand(case, d, True)), away_from_zero(dense_operand(case, d))
        V = vectors(case, d)
        left, right = rounded(X, dtype)[case.rows], rounded(Y, dtype)[case.column_indices]
        right, own = right[: case.stored], rounded(V, dtype)[: case.stored]
        x, y, v = cast(X, dtype), cast(Y, dtype), cast(V[np.asarray(order)], dtype)
        f = {"mul": np.multiply, "add": np.add, "sub": np.subtract, "div": np.divide}
        f = f.get(op, lambda a, b: a)
        for found, a, b in (
            (gsddmm(A, x, y, op=op, reduce=None), left, right),
            (gsddmm(A, x, None, values=v, op=op, reduce=None), left, own),
            (gsddmm(A, None, y, values=v, op=op, reduce=None), own, right),
        ):
            expected = np.zeros((case.nnz, d))
            expected[: case.stored] = f(a, b)
            size = np.zeros_like(expected)
            size[: case.stored] = abs(a) + abs(b) if op in ("add", "sub") else abs(f(a, b))
            stored = np.asarray(order) < case.stored
            np.testing.assert_array_equal(np.asarray(found)[~stored], 0)
            assert found.dtype == dtype and found.shape == (case.nnz, d)
            expected, size = expected[np.asarray(order)], size[np.asarray(order)]
            bound = sum_bound(expected, size, 3, dtype)
            assert_within(np.asarray(found)[stored], expected[stored], bound[stored])


def test_an_edge_vector_of_one_feature():
    case = BATTERY["every_length"]
    A = array(case, "float64")
    x, y = dense_operand(case, 1, True)[:, 0], dense_operand(case, 1)[:, 0]
    found = gsddmm(A, x, y, op="sub", reduce=None)
    np.testing.assert_allclose(found, x[case.rows] - y[case.column_indices[: case.stored]])


@pytest.mark.parametrize(("name", "dtype"), [("skewed", "float32"), ("padded", "float16")])
def test_rows_and_softmax_of_vectors(name, dtype, backend):
    case = BATTERY[name]
    A, schedule = array(case, dtype), row_schedule(backend)
    for d in (8, 19):
        V = vectors(case, d)
        own = rounded(V, dtype)[: case.stored]
        found = row_sum(A, values=cast(V, dtype), schedule=schedule)
        assert_within(found, *bounds(case, own, abs(own), "sum", False, dtype))
        expected, terms = reduced(case, own, "max")
        found = row_max(A, values=cast(V, dtype), schedule=schedule)
        np.testing.assert_array_equal(found, np.where(terms > 0, expected, -np.inf))
        P = np.asarray(sparse_softmax(A, values=cast(V, dtype), scale=0.5, schedule=schedule))
        e = np.exp(0.5 * (own - expected[case.rows]))
        expected = np.zeros((case.nnz, d))
        expected[: case.stored] = e / reduced(case, e, "sum")[0][case.rows]
        assert P.dtype == dtype
        np.testing.assert_allclose(
            P, expected, rtol=1e-5 if dtype == "float32" else 2e-3, atol=1e-6
        )


@pytest.mark.parametrize("format", [CSC, COO], ids=str)
def test_softmax_of_vectors_in_other_formats(format):
    case = BATTERY["every_length"]
    A = array(case, "float64", format)
    V = vectors(case, 3)
    order = np.asarray(in_format(case, A))
    expected = sparse_softmax(array(case, "float64"), values=V)
    np.testing.assert_allclose(sparse_softmax(A, values=V[order]), expected[order])
    scalars = sparse_softmax(A.with_values(V[order, 1])).values
    np.testing.assert_allclose(sparse_softmax(A, values=V[order, 1]), scalars)
    np.testing.assert_allclose(sparse_softmax(A, values=V[order])[:, 1], scalars)


# ---- derivatives --------------------------------------------------------------------------------

SMALL = from_row_lengths("small", 6, [2, 0, 4, 1, 6], padding=2)


@pytest.mark.parametrize(
    ("op", "reduce", "transpose"),
    [
        ("mul", "sum", False),
        ("mul", "mean", True),
        ("add", "sum", True),
        ("div", "sum", False),
        ("mul", "max", True),
        ("sub", "min", False),
    ],
)
def test_gradients_of_gspmm_of_vectors(op, reduce, transpose):
    A, n = array(SMALL, "float64", CSC if reduce == "mean" else CSR), 3
    X = dense_operand(SMALL, n, transpose)
    V = np.nan_to_num(vectors(SMALL, n), nan=1.0)
    f = lambda V, X: gspmm(A, X, values=V, op=op, reduce=reduce, transpose=transpose)
    check_grads(jax.jit(f), (V, X), order=2, rtol=1e-5, atol=1e-5, eps=1e-5)


@pytest.mark.parametrize(("reduce", "transpose"), [("mean", True), ("sum", False), ("max", True)])
def test_gradients_of_aggregate(reduce, transpose):
    A, M = array(SMALL, "float64"), np.nan_to_num(vectors(SMALL, 3))
    f = lambda M: aggregate(A, M, reduce, transpose=transpose)
    check_grads(jax.jit(f), (M,), order=2, rtol=1e-5, atol=1e-5, eps=1e-5)


@pytest.mark.parametrize("op", ["mul", "add", "div"])
def test_gradients_of_vectors_of_edges(op):
    A = array(SMALL, "float64", CSC)
    X, Y = away_from_zero(dense_operand(SMALL, 3, True)), away_from_zero(dense_operand(SMALL, 3))
    V = np.nan_to_num(vectors(SMALL, 3), nan=1.0)
    of = dict(op=op, reduce=None)
    tolerance = dict(order=2, rtol=1e-5, atol=1e-5, eps=1e-5)
    check_grads(jax.jit(lambda X, Y: gsddmm(A, X, Y, **of)), (X, Y), **tolerance)
    both = lambda X, Y, V: gsddmm(A, X, None, values=gsddmm(A, None, Y, values=V, **of), **of)
    check_grads(jax.jit(both), (X, Y, V), **tolerance | dict(order=1))


def test_gradients_of_rows_and_softmax():
    A, V = array(SMALL, "float64"), np.nan_to_num(vectors(SMALL, 3))
    tolerance = dict(order=2, rtol=1e-5, atol=1e-5, eps=1e-5)
    check_grads(jax.jit(lambda V: row_sum(A, values=V)), (V,), **tolerance)
    finite = lambda V: jnp.where(A.row_lengths[:, None] > 0, row_max(A, values=V), 0)
    check_grads(jax.jit(finite), (V,), **tolerance)
    check_grads(jax.jit(lambda V: sparse_softmax(A, values=V)), (V,), **tolerance)


def test_vmap_of_vectors():
    A, V, X = array(SMALL, "float64"), vectors(SMALL, 3), dense_operand(SMALL, 3)
    Vs, Xs = np.stack([V, 2 * V]), np.stack([X, X + 1])
    for reduce in ("sum", "max"):
        f = lambda V, X, reduce=reduce: gspmm(A, X, values=V, reduce=reduce)
        for axes in ((0, 0), (0, None) if reduce == "sum" else (None, 0)):
            given = [s if axis == 0 else s[0] for s, axis in zip((Vs, Xs), axes, strict=True)]
            every = jax.vmap(f, axes)(*given)
            for b in range(2):
                one = f(
                    *(s[b] if axis == 0 else s[0] for s, axis in zip((Vs, Xs), axes, strict=True))
                )
                np.testing.assert_allclose(every[b], one)


# ---- structures that nobody checked -------------------------------------------------------------


def test_traced_structures_with_wrong_entries():
    """Entries that do not take part have no message, no weight and no gradient."""
    offsets = np.array([0, 2, 2, 5], np.int32)
    columns = np.array([1, 3, 0, 9, 2], np.int32)  # 9 is no column
    rng = np.random.default_rng(0)
    V, X, Y = (rng.standard_normal((n, 2)) for n in (5, 4, 3))
    right = np.array([True, True, True, False, True])
    A = SparseArray.from_arrays(np.ones(4), np.array([0, 2, 2, 4]), columns[right], shape=(3, 4))

    def results(A, V):
        return (
            *(gspmm(A, X, values=V, op=o, reduce=r) for o, r in (("mul", "sum"), ("add", "max"))),
            gspmm(A, Y, values=V, transpose=True),
            *(aggregate(A, V, reduce) for reduce in ("mean", "max")),
            aggregate(A, V, "sum", transpose=True),
            *(row_sum(A, values=V), row_max(A, values=V)),
        )

    def of_entries(A, V):
        return sparse_softmax(A, values=V), gsddmm(A, Y, X, op="add", reduce=None)

    @jax.jit
    def traced(offsets, columns, V):
        A = SparseArray.from_arrays(jnp.ones(5), offsets, columns, shape=(3, 4))
        return results(A, V), of_entries(A, V), jax.grad(loss, 1)(A, V)

    def loss(A, V):
        return jnp.sum(jnp.sin(aggregate(A, V, "max") + gspmm(A, X, values=V)))

    found, vectors_of, gradient = traced(offsets, columns, V)
    for a, b in zip(found, results(A, V[right]), strict=True):
        np.testing.assert_allclose(a, b)
    for a, b in zip(vectors_of, of_entries(A, V[right]), strict=True):
        np.testing.assert_allclose(np.asarray(a)[right], b)
        np.testing.assert_array_equal(np.asarray(a)[~right], 0)
    np.testing.assert_allclose(gradient[right], jax.grad(loss, 1)(A, V[right]))
    np.testing.assert_array_equal(gradient[~right], 0)


@pytest.mark.parametrize("op", ["add", "mul"])
def test_gradients_of_ends_with_wrong_entries_in_between(op):
    """Entries after one that takes no part keep their own gradients."""
    offsets, columns = np.array([0, 2, 2, 5], np.int32), np.array([1, 9, 0, 7, 2], np.int32)
    right = np.array([True, False, True, False, True])
    A = SparseArray.from_arrays(np.ones(3), np.array([0, 1, 1, 3]), columns[right], shape=(3, 4))
    rng = np.random.default_rng(0)
    X, Y, d = (rng.standard_normal((n, 2)) for n in (3, 4, 5))

    def gradients(A, d):
        loss = lambda X, Y: jnp.sum(d * gsddmm(A, X, Y, op=op, reduce=None))
        return jax.grad(loss, (0, 1))(X, Y)

    @jax.jit
    def traced(offsets, columns):
        return gradients(SparseArray.from_arrays(jnp.ones(5), offsets, columns, shape=(3, 4)), d)

    for a, b in zip(traced(offsets, columns), gradients(A, d[right]), strict=True):
        np.testing.assert_allclose(a, b)


# ---- heads and other axes -----------------------------------------------------------------------

AXES = [  # of nodes and of entries; how they are paired with ops is of no importance
    ((2, 3), (2, 1), "mul", "sum"),
    ((2, 3), (1, 3), "add", "mean"),
    ((3,), (2, 1), "mul", "max"),
    ((1, 2, 1), (3, 1, 2), "sub", "sum"),
    ((), (2,), "div", "mean"),
    ((2, 3), (), "mul", "min"),
    ((4,), (1,), "mul", "sum"),
    ((2, 0), (2, 1), "mul", "max"),
]


@pytest.mark.parametrize(("nodes", "entries", "op", "reduce"), AXES)
def test_axes_broadcast(nodes, entries, op, reduce):
    """X [k, ...] and values [nnz, ...] give what they give repeated, padding of NaN or not."""
    case, place = BATTERY["padded"], AXES.index((nodes, entries, op, reduce))
    A, transpose = array(case, "float64", FORMATS[place % 3]), place % 2 == 1
    tail, order = np.broadcast_shapes(nodes, entries), np.asarray(in_format(case, A))
    size = case.shape[0 if transpose else 1]
    X = away_from_zero(np.random.default_rng(1).standard_normal((size, *nodes)))
    V = vectors(case, int(np.prod(entries)))[order].reshape(case.nnz, *entries)
    repeated = (
        np.broadcast_to(
            x.reshape(len(x), *[1] * (len(tail) + 1 - x.ndim), *x.shape[1:]), (len(x), *tail)
        )
        for x in (X, V)
    )
    X_all, V_all = (x.reshape(len(x), int(np.prod(tail))) for x in repeated)
    options = dict(op=op, reduce=reduce, transpose=transpose)
    found = gspmm(A, X, values=V, **options)
    expected = gspmm(A, X_all, values=V_all, **options)
    assert found.shape == (case.shape[1 if transpose else 0], *tail)
    np.testing.assert_allclose(found, expected.reshape(found.shape), rtol=1e-12, atol=1e-12)
    given = X if not transpose else away_from_zero(np.ones((case.shape[1], *nodes)))
    pairs = gsddmm(A, None, given, values=V, op=op, reduce=None)
    assert pairs.shape == (case.nnz, *tail) and not np.isnan(pairs).any()
    softmax = sparse_softmax(A, values=V)
    flat = sparse_softmax(A, values=V.reshape(case.nnz, -1))
    np.testing.assert_array_equal(softmax, np.asarray(flat).reshape(V.shape))


def test_heads_of_graph_attention_as_dgl_has_them():
    """u_dot_v, edge_softmax, u_mul_e of [n, heads, d] and [nnz, heads, 1]; derivatives and vmap."""
    rng, n, H, D = np.random.default_rng(0), 7, 2, 3
    dense = (rng.random((n, n)) < 0.4) | np.eye(n, dtype=bool)
    A = SparseArray.from_dense(1.0 * dense).asformat(CSC)
    Q, K, V = rng.standard_normal((3, 4, n, H, D))

    def attention(Q, K, V):
        logits = gsddmm(A, Q, K, reduce="last")
        assert logits.shape == (A.nnz, H, 1)
        return gspmm(A, V, values=sparse_softmax(A, values=logits))

    def by_hand(Q, K, V):
        logits = jnp.einsum("ihd,jhd->hij", Q, K)
        return jnp.einsum("hij,jhd->ihd", jax.nn.softmax(logits, where=dense, axis=-1), V)

    def results(f):
        def loss(*x):
            y = f(*x)
            return (y**2).sum(), y

        return jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2), has_aux=True)))

    jaxpr = str(jax.make_jaxpr(attention)(Q[0], K[0], V[0]))
    assert f"[{A.nnz},{H},{D}]" not in jaxpr and f"[{A.nnz},{H * D}]" not in jaxpr
    for a, b in zip(
        *(jax.tree.leaves(results(f)(Q, K, V)) for f in (attention, by_hand)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    rows, columns = (np.asarray(x) for x in A.coordinates())
    both = gsddmm(A, Q[0], K[0, :, :1], op="add", reduce=None)
    np.testing.assert_allclose(both, Q[0][rows] + K[0, :, :1][columns])
    sums = gsddmm(A, Q[0, :, :, :1], K[0, :, :1], op="sub", reduce="last")
    expected = (Q[0, :, :, :1][rows] - K[0, :, :1][columns]).sum(-1, keepdims=True)
    np.testing.assert_allclose(sums, expected)
    np.testing.assert_allclose(gspmm(A, V[0], op="copy"), np.einsum("ij,jhd->ihd", dense, V[0]))


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda A, X: gspmm(A, X, values=np.ones((3, 2))), ValueError, "values must have shape"),
        (lambda A, X: gspmm(A, X, values=np.ones((7, 3))), ValueError, r"\[9, 2\], got \[7, 3\]"),
        (lambda A, X: gspmm(A, X, values=np.ones((7, 1))), ValueError, r"\[9, 1\], got \[7, 1\]"),
        (
            lambda A, X: gspmm(A, np.ones((7, 2, 4)), values=np.ones((9, 2))),
            ValueError,
            r"\[9, 2, 4\], or axes .* got \[9, 2\]; values\[..., None\] is one for all 4 columns",
        ),
        (
            lambda A, X: gspmm(A, np.ones((7, 2, 4)), values=np.ones((9, 3, 1))),
            ValueError,
            r"values must have shape \[9, 2, 4\], got \[9, 3, 1\]",
        ),
        (lambda A, X: gspmm(A, np.ones((6, 2, 4))), ValueError, r"\[7, ...\], got \[6, 2, 4\]"),
        (
            lambda A, X: gsddmm(A, X, np.ones((7, 3, 4)), reduce=None),
            ValueError,
            r"axes of X and Y after .* broadcast, got \[2\] and \[3, 4\]",
        ),
        (lambda A, X: gsddmm(A, X[:, None], X), ValueError, "reduce='last' sums over the last"),
        (lambda A, X: gsddmm(A, X[:, 0], X[:, 0], reduce="last"), ValueError, r"X \[m, ..., d\]"),
        (lambda A, X: gsddmm(A, X, X, values=X, reduce="last"), ValueError, "expected reduce=None"),
        (lambda A, X: spmm(A, X[:, None]), ValueError, r"gspmm\(A, B\) takes \[7, ...\]"),
        (lambda A, X: spmm(A, X[None], transpose=True), ValueError, r"A.T @ B has a product for"),
        (lambda A, X: gspmm(A, X, values=np.ones((8, 2)), op="copy"), ValueError, r"\[9, 2\], got"),
        (lambda A, X: gspmm(A, X, values=np.ones(8), op="copy"), ValueError, "values"),
        (lambda A, X: gspmm(A, X, reduce="add"), ValueError, "the name here is 'sum'"),
        (lambda A, X: gspmm(A, X, op="u_sub_e"), ValueError, "the name here is 'sub'"),
        (lambda A, X: gspmm(A, X, op="sum"), ValueError, "copy, got 'sum'$"),
        (lambda A, X: row_sum(A, values=np.ones(9, int)), NotImplementedError, "use aggregate"),
        (lambda A, X: gsddmm(A, None, X, op="copy", reduce=None), ValueError, "None for both"),
        (lambda A, X: aggregate(A, X), ValueError, "M must have shape"),
        (lambda A, X: aggregate(A, np.ones(7), "prod"), ValueError, "reduce must be one of"),
        (lambda A, X: aggregate(X, X), TypeError, "A must be a SparseArray"),
        (lambda A, X: gsddmm(A, X, X, reduce="max"), ValueError, "reduce must be one of"),
        (lambda A, X: gsddmm(A, None, None, reduce=None), ValueError, "expected X and Y"),
        (lambda A, X: gsddmm(A, X, X, values=X, reduce=None), ValueError, "and one of them"),
        (lambda A, X: gsddmm(A, X, X, values=X), ValueError, "expected reduce=None"),
        (lambda A, X: row_sum(A, values=X), ValueError, "row_sum: values must have shape"),
        (lambda A, X: row_max(A, values=X), ValueError, "row_max: values must have shape"),
        (lambda A, X: sparse_softmax(A, values=X), ValueError, "sparse_softmax: values must have"),
        (
            lambda A, X: aggregate(A.asformat(BCSR(2, 2)), np.ones((16, 2))),
            NotImplementedError,
            "use A.asformat",
        ),
    ],
)
def test_errors(call, error, words):
    A = SparseArray.from_dense(np.eye(7) + np.eye(7, k=5))
    with pytest.raises(error, match=words):
        call(A, np.ones((7, 2)))
