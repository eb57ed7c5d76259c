"""select.top_k: what it stores, on every instruction set, and its derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import cast
from jax.test_util import check_grads
from native_call import described, kernel_isas, run
from selection_oracle import KINDS, expected, normal, same, scores_of
from tolerance import DTYPES

from sgap_jax import (
    BCSR,
    COO,
    CSR,
    CVS,
    CpuTile,
    Reference,
    reference,
    select,
    sparse_softmax,
    spmm,
)
from sgap_jax.primitives.top_k import _indexer_reference, top_k_of_indexer
from sgap_jax.runtime.native import native

INF, NAN = np.inf, np.nan
# Those whose kernels differ: with AVX512-VBMI2 columns are packed as bytes.
ISAS = kernel_isas() + [isa for isa in native.supported_isas() if isa == "avx512_bf16"]


def selected(scores, k, limits, isa, threads=1):
    batch, m, _ = scores.shape
    results = [
        ((batch, m * k), scores.dtype),
        ((batch, m + 1), np.int32),
        ((batch, m * k), np.int32),
    ]
    return run("sgap_top_k_csr_v1", [scores, limits], results, dict(k=k), isa, threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scores(kind, dtype, isa):
    for m, n in ((3, 1), (4, 30), (3, 300), (2, 5000)):
        scores = cast(scores_of(kind, m, n), dtype)
        for k in sorted({0, 1, min(7, n), n // 16, n // 3, n}):
            for limits in (np.full(m, n, np.int32), np.int32([n // 2, -3, n + 9, n - 1])[:m]):
                found = selected(scores[None], k, limits[None], isa)
                want = expected(scores, k, np.clip(limits, 0, n))
                same([x[0] for x in found], want, f"{m} x {n}, k = {k}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_tasks_is_free(dtype, isa):
    """What a row writes behind its end is overwritten by rows of its own task alone."""
    m, n = 900, 150
    scores = cast(scores_of("masked", m, n), dtype)
    limits = np.int32(np.arange(m) * 7 % (n + 1))
    for k in (3, 40):
        forward, backward = (selected(scores[None], k, limits[None], isa, t) for t in (1, -1))
        same([x[0] for x in backward], [x[0] for x in forward], f"k = {k}")


def test_an_indexer_on_other_platforms():
    """Whole numbers, whose sums are exact in any order; two sequences that share their keys."""
    rng, k = np.random.default_rng(3), 5
    q, keys, weights = (
        jnp.asarray(rng.integers(-3, 4, size), jnp.float32)
        for size in ((2, 6, 2, 3), (9, 3), (2, 6, 2))
    )
    limits = jnp.int32([[1, 2, 3, 9, 7, 0], [9, -2, 12, 4, 5, 6]])
    chosen = jax.vmap(partial(top_k_of_indexer, k=k), (0, None, 0, 0))(q, keys, weights, limits)
    both = jnp.broadcast_to(keys, (2, *keys.shape))
    plain = _indexer_reference(q, both, weights, limits, k=k, schedule=None)
    for b in range(2):
        used = chosen[0][b, -1]
        np.testing.assert_array_equal(plain[0][b], chosen[0][b])
        np.testing.assert_array_equal(plain[1][b, :used], chosen[1][b, :used])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_like_the_one_before_and_others(dtype, isa):
    """The threshold of the row before is tried: it may leave too few scores, and too many."""
    like = normal(160, 600)
    like[20:30, 64:150] += 9  # many neighbours
    like[40:80] *= 10.0 ** (np.arange(40) % 3 - 1)[:, None]
    like[80:120:2] = like[80:120:2] > 1
    like[90:100, ::2] = NAN
    like[100:103], like[103:106] = -INF, INF
    scores = cast(like, dtype)
    limits = np.where(np.arange(160) < 130, 600, 600 - np.arange(160)).astype(np.int32)
    for n, k in ((600, 3), (600, 40), (600, 200), (100, 3), (100, 40)):  # few are not sampled
        own, last = scores[:, :n], np.minimum(limits, n)
        found = selected(own[None], k, last[None], isa)
        same([x[0] for x in found], expected(own, k, last), f"n = {n}, k = {k}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_of_rows_that_follow_no_pattern(dtype, isa):
    """The k-th greatest is looked for where it was in rows before, then between a few of the row's
    scores, on straight lines and in equal parts: here it is elsewhere, or on none of the lines, or
    one of many equal ones."""
    rng = np.random.default_rng(3)
    rows = normal(48, 900)
    rows[:12] *= 2.0 ** rng.integers(-6, 7, (12, 1))
    rows[12:20] += rng.choice([-50, 50], (8, 1))
    rows[20:28] *= 10.0 ** rng.integers(-44, 4, (8, 900))
    rows[28:36] = np.round(2 * rows[28:36])
    rows[36:42] = np.exp(-40 * abs(rows[36:42]))
    rows[42:] = np.where(rows[42:] > 2, rows[42:], -1e-42)
    scores = cast(rows, dtype)
    limits = np.full(48, 900, np.int32)
    for k in (20, 60):
        found = selected(scores[None], k, limits[None], isa)
        same([x[0] for x in found], expected(scores, k, limits), f"k = {k}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_behind_the_last_row(dtype, isa):
    for n, k in ((40, 5), (2000, 17), (2000, 40)):
        scores, limits = cast(normal(1, 3, n), dtype), np.full((1, 3), n, np.int32)
        values, indices = np.zeros((1, 3 * k + 64), dtype), np.full((1, 3 * k + 64), 7, np.int32)
        offsets = np.zeros((1, 4), np.int32)
        results = [(values, (1, 3 * k)), (offsets, offsets.shape), (indices, (1, 3 * k))]
        native._test_call(
            native.targets()["sgap_top_k_csr_v1"],
            [described(x) for x in (scores, limits)],
            [described(x, shape) for x, shape in results],
            dict(k=k),
            isa,
            1,
        )
        assert offsets[0, -1] == 3 * k and values[0, : 3 * k].all()
        assert not values[0, 3 * k :].any() and (indices[0, 3 * k :] == 7).all()


def test_the_same_for_any_number_of_threads_and_batch():
    scores = np.float32(normal(3, 90, 3000))
    scores[1, ::3] = -INF
    limits = np.int32(np.arange(90) * 40)[None]
    one, *others = (selected(scores, 50, limits, native.isa(), threads) for threads in (1, 2, 5))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, one)
    for b in range(3):
        right = expected(scores[b], 50, np.minimum(limits[0], 3000))
        jax.tree.map(np.testing.assert_array_equal, [x[b] for x in one], list(right))


@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_arrays(kind, dtype, schedule):
    scores = cast(scores_of(kind, 5, 40), dtype)
    lengths = np.int32([40, 7, 0, 99, 20])
    A = jax.jit(lambda x, n: select.top_k(x, 6, lengths=n, schedule=schedule))(scores, lengths)
    assert A.is_checked and A.format == CSR and A.shape == (5, 40) and A.dtype == dtype
    want = expected(scores, 6, lengths)
    same([A.values, A.row_offsets, A.column_indices], want)
    A.checked()  # valid, its transpose too


@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
@pytest.mark.parametrize(("m", "n"), [(30, 30), (10, 30), (30, 10)])
def test_causal_and_kept(m, n, schedule):
    scores = np.float32(normal(m, n))
    seen = np.arange(n) <= np.arange(m)[:, None] + n - m
    A = select.top_k(scores, 4, causal=True, schedule=schedule)
    offsets, indices = reference.top_k(np.where(seen, scores, -INF), 4)
    np.testing.assert_array_equal(A.row_offsets, offsets)
    np.testing.assert_array_equal(A.column_indices[: len(indices)], indices)

    own = np.arange(n) == np.arange(m)[:, None] + n - m
    keep = own | (np.arange(n) == 0)
    low = np.where(keep, -INF, scores)
    A = select.top_k(low, 4, causal=True, keep=keep, schedule=schedule)
    dense = np.zeros((m, n), bool)
    rows = np.repeat(np.arange(m), np.diff(A.row_offsets))
    dense[rows, A.column_indices[: len(rows)]] = True
    assert (dense[keep & seen]).all() and not dense[~seen].any()
    offsets, indices = reference.top_k(np.where(seen, np.where(keep, INF, low), -INF), 4)
    np.testing.assert_array_equal(A.column_indices[: len(indices)], indices)
    np.testing.assert_array_equal(A.values[: len(rows)], low[rows, indices])


@pytest.mark.parametrize(("format", "shape"), [(CVS(4), (18, 12)), (BCSR(2, 3), None)], ids=str)
def test_vectors_and_blocks(format, shape):
    scores = normal(5, 12)
    A = jax.jit(lambda x: select.top_k(x, 3, format=format, shape=shape))(scores)
    height, width = (4, 1) if format == CVS(4) else (2, 3)
    assert A.format == format and A.shape == (shape or (10, 36))
    of_blocks = np.where(select.top_k(scores, 3).todense() != 0, scores, 0)
    whole = np.kron(of_blocks, np.ones((height, width)))[: A.shape[0]]
    np.testing.assert_array_equal(A.todense(), whole)
    B = jnp.asarray(normal(A.shape[1], 5))
    np.testing.assert_allclose(spmm(A, B), whole @ B, rtol=1e-9, atol=1e-9)


def attention(scores, v, **options):
    return spmm(sparse_softmax(select.top_k(scores, 4, causal=True, **options)), v)


@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
def test_derivatives_are_those_of_the_dense_mask(schedule):
    scores, v = jnp.asarray(normal(12, 12)), jnp.asarray(normal(12, 3))

    def dense(scores, v):
        seen = jnp.tril(jnp.ones((12, 12), bool))
        kth = jnp.sort(jnp.where(seen, scores, -jnp.inf), axis=1)[:, -4][:, None]
        weights = jnp.where(seen & (scores >= kth), scores, -jnp.inf)
        return jax.nn.softmax(weights) @ v

    sparse = lambda scores, v: attention(scores, v, schedule=schedule)
    loss = lambda f: lambda *x: jnp.sum(jnp.sin(f(*x)))
    close = lambda a, b: jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), a, b
    )
    tangents = jnp.cos(scores), jnp.cos(v)

    def every(f):
        """Result, gradient, Hessian, derivative along the tangents, as one program."""
        derivatives = [transform(loss(f), (0, 1)) for transform in (jax.grad, jax.hessian)]
        found = lambda *x: (f(*x), *(of(*x) for of in derivatives), jax.jvp(f, x, tangents))
        return jax.jit(found)(scores, v)

    close(every(sparse), every(dense))
    check_grads(jax.jit(sparse), (scores, v), order=2, eps=1e-5)


def test_rows_without_scores_give_zeros_and_no_gradient():
    scores = jnp.asarray(normal(6, 6)).at[jnp.array([0, 3])].set(-jnp.inf)
    v = jnp.asarray(normal(6, 2))
    out, grad = jax.jit(jax.value_and_grad(lambda s: jnp.sum(attention(s, v) ** 2)))(scores)
    assert np.isfinite(out) and np.isfinite(grad).all() and not grad[jnp.array([0, 3])].any()
    assert not np.asarray(attention(scores, v))[[0, 3]].any()


@pytest.mark.tier("all")
def test_batches():
    scores, lengths = jnp.asarray(normal(3, 8, 20)), jnp.int32([20, 5, 0])
    each = [select.top_k(x, 4, lengths=n) for x, n in zip(scores, lengths, strict=True)]
    for axes in ((0, 0), (0, None), (None, 0)):
        args = [x if a == 0 else x[0] for x, a in zip((scores, lengths), axes, strict=True)]
        many = jax.jit(jax.vmap(lambda x, n: select.top_k(x, 4, lengths=n), axes))(*args)
        for b in range(3):
            own = [x[b] if a == 0 else x for x, a in zip(args, axes, strict=True)]
            one = select.top_k(own[0], 4, lengths=own[1])
            jax.tree.map(lambda x, y, b=b: np.testing.assert_array_equal(x[b], y), many, one)
            if axes == (0, 0):
                np.testing.assert_array_equal(one.values, each[b].values)
    v = jnp.asarray(normal(8, 2))
    of = lambda s: jnp.sum(spmm(select.top_k(s, 4), jnp.ones((20, 2))) * v)
    grads = jax.jit(jax.vmap(jax.grad(of)))(scores)
    np.testing.assert_allclose(grads, jnp.stack([jax.grad(of)(s) for s in scores]))
    empty = jax.vmap(lambda x: select.top_k(x, 4))(jnp.zeros((0, 8, 20)))
    assert empty.values.shape == (0, 32)


def test_degenerate_sizes():
    for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 4, 0), (0, 0, 0), (3, 4, 99)):
        for schedule in (None, Reference()):
            A = select.top_k(jnp.ones((m, n)), k, schedule=schedule)
            assert A.shape == (m, n) and A.nnz == m * min(k, n)
            assert int(A.row_offsets[-1]) == m * min(k, n)
            assert spmm(A, jnp.ones((n, 2))).shape == (m, 2)


def test_errors():
    x = jnp.ones((4, 6))
    with pytest.raises(ValueError, match=r"top_k: scores must have shape \[m, n\], got \[4\]"):
        select.top_k(x[:, 0], 2)
    with pytest.raises(TypeError, match="select.top_k: scores must be one of .*got int32"):
        select.top_k(x.astype(jnp.int32), 2)
    with pytest.raises(TypeError, match="select.top_k: k must be an integer, got 2.5"):
        select.top_k(x, 2.5)
    with pytest.raises(TypeError, match="select.top_k: k must be an integer, got True"):
        select.top_k(x, True)
    with pytest.raises(ValueError, match="select.top_k: k must not be negative, got -1"):
        select.top_k(x, -1)
    with pytest.raises((TypeError, ValueError), match="select.top_k: .*k.* how much"):
        jax.jit(select.top_k)(x, 2)
    with pytest.raises(ValueError, match=r"must be CSR, CVS\(V\) or BCSR\(r, c\), got COO"):
        select.top_k(x, 2, format=COO)
    with pytest.raises(ValueError, match=r"scores \[4, 6\] in CVS\(8\) are those of at most"):
        select.top_k(x, 2, format=CVS(8), shape=(40, 6))
    with pytest.raises(ValueError, match=r"lengths must be integers \[4\] or one, got \[3\]"):
        select.top_k(x, 2, lengths=jnp.ones(3, jnp.int32))
    with pytest.raises(TypeError, match="keep must be boolean, got float"):
        select.top_k(x, 2, keep=jnp.ones((4, 6)))
    with pytest.raises(TypeError, match="schedule must be a Schedule, its text or None, got int"):
        select.top_k(x, 2, schedule=3)
    with pytest.raises(NotImplementedError, match="top_k: no kernel for"):
        select.top_k(x, 2, schedule=CpuTile(nonzeros=64))


def test_the_handler_refuses_other_shapes():
    scores, limits = np.zeros((2, 3, 8), np.float32), np.zeros((1, 3), np.int32)
    for operands, k, shapes in (
        ((scores, limits), 9, [(2, 27), (2, 4), (2, 27)]),
        ((scores, limits), 2, [(2, 5), (2, 4), (2, 6)]),
        ((scores, limits), 2, [(2, 6), (2, 3), (2, 6)]),
        ((scores, limits), 2, [(2, 6), (2, 4), (1, 6)]),
        ((scores[:1], np.zeros((2, 3), np.int32)), 2, [(1, 6), (1, 4), (1, 6)]),
        ((scores, limits[:, :2]), 2, [(2, 6), (2, 4), (2, 6)]),
        ((scores[0], limits), 2, [(2, 6), (2, 4), (2, 6)]),
    ):
        results = list(zip(shapes, (np.float32, np.int32, np.int32), strict=True))
        with pytest.raises(ValueError, match="top_k: "):
            run("sgap_top_k_csr_v1", operands, results, dict(k=k), native.isa())


def small_integers(*shape):
    return np.random.default_rng(shape).integers(-3, 4, shape).astype(np.float64)


INDEXER, INDEXER_OCTET = "sgap_top_k_indexer_v1", "sgap_top_k_indexer_octet_v1"


# Those that score bytes first: by products of vectors, or of matrix tiles.
BYTE_KERNELS = [
    (INDEXER, "avx512_bf16"),
    (INDEXER, "amx"),
    (INDEXER_OCTET, "avx512_bf16"),
    (INDEXER_OCTET, "amx"),
]


def selected_by_indexer(q, keys, weights, limits, k, isa, threads=1, target=INDEXER):
    *leading, m = limits.shape
    results = [((*leading, m + 1), np.int32), ((*leading, m * k), np.int32)]
    arrays = [q, keys, weights, limits]
    return run(target, arrays, results, dict(k=k), isa, threads)


INDEXERS = [(INDEXER, dtype) for dtype in DTYPES]
INDEXERS += [(INDEXER_OCTET, "float32"), (INDEXER_OCTET, "bfloat16")]


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("target,dtype", INDEXERS)
def test_scores_of_an_indexer(target, dtype, isa):
    """Of integers, whose sums are exact in any order, and tie."""
    # Of up to 16 rows the columns are divided, into tasks of 1536.
    sizes = [(3, 1, 1, 1), (2, 3200, 3, 4), (20, 300, 4, 32), (17, 700, 11, 5), (40, 97, 1, 8)]
    if target == INDEXER_OCTET:
        sizes += [(7, 130, 20, 40), (33, 64, 1, 100)]
    for m, n, heads, depth in sizes:
        q, keys = small_integers(2, m, heads, depth), small_integers(2, n, depth)
        weights = small_integers(2, m, heads)
        scores = np.zeros((2, m, n))
        for h in range(heads):
            products = np.einsum("bmd,bnd->bmn", q[:, :, h], keys)
            scores += weights[:, :, h, None] * np.maximum(products, 0)
        limits = np.int32(np.arange(2 * m).reshape(2, m) * n // m - 2)
        operands = [cast(x, dtype) for x in (q, keys, weights)]
        for k in sorted({0, 1, min(7, n), n // 3, n}):
            found = selected_by_indexer(*operands, limits, k, isa, threads=3, target=target)
            for b in range(2):
                want = expected(scores[b], k, np.clip(limits[b], 0, n))[1:]
                same([x[b] for x in found], want, f"{m} x {n}, {heads} x {depth}, k = {k}")


@pytest.mark.parametrize("target,dtype", [INDEXERS[0], INDEXERS[-1]])
def test_an_indexer_with_scores_that_are_no_numbers(target, dtype):
    q, keys = np.ones((1, 3, 2, 1), np.float32), np.ones((1, 5, 1), np.float32)
    keys[0, :3, 0] = NAN, -INF, INF
    weights = np.float32([[[1, 1], [-1, -1], [0, 1]]])
    limits, operands = np.full((1, 3), 5, np.int32), [cast(x, dtype) for x in (q, keys, weights)]

    def of(k):
        return selected_by_indexer(*operands, limits, k, native.isa(), target=target)

    offsets, columns = of(5)
    # Of row 1 column 2 has -infinity, which is never stored; of row 2 that of 0 * infinity is NaN.
    np.testing.assert_array_equal(offsets, [[0, 5, 9, 14]])
    np.testing.assert_array_equal(columns[0], [0, 1, 2, 3, 4, 0, 1, 3, 4, 0, 1, 2, 3, 4, 0])
    for k, first in ((1, [2, 1, 3]), (4, [1, 2, 3, 4, 0, 1, 3, 4, 0, 1, 3, 4])):
        np.testing.assert_array_equal(of(k)[1][0], first)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("integers", "float32"),
        ("integers", "float16"),
        ("a far key", "bfloat16"),
        ("no numbers", "float32"),
        ("zeros", "float32"),
        ("great q, small keys", "float32"),
        ("far above the others", "float32"),
        ("keys off one way", "float32"),
    ],
)
def test_an_indexer_that_rounds_selects_the_same(kind, dtype):
    """Some kernels score rounded values first, and again what is close to the k-th greatest score.
    The sums of these integers are exact in float32, and in 13 bits they are off by more than 1."""
    rng, m, n, heads, depth, k = np.random.default_rng(5), 40, 700, 4, 32, 60
    q, keys, weights = (
        rng.integers(-high, high + 1, size).astype(np.float32)
        for high, size in ((200, (m, heads, depth)), (200, (n, depth)), (3, (m, heads)))
    )
    keys[100:140] = keys[100]  # equal scores
    limits = np.where(np.arange(m) % 2, n, np.arange(m) * 18).astype(np.int32)
    if kind == "a far key":  # the bound of most rows leaves all columns open
        keys[650] = 1e12
    elif kind == "no numbers":  # rows without a bound
        q[30], weights[35, 0] = NAN, INF
    elif kind == "zeros":
        q[::3], weights[1::3] = 0, -3
    elif kind == "great q, small keys":  # where sums of integers times weights overflow
        q, keys, weights = np.ldexp(q, 48), np.ldexp(keys, -40), np.ldexp(weights, 60)
    elif kind == "far above the others":  # k of them: none is scored again
        q, keys[::2][:k], weights = abs(q), 1e4, abs(weights)
    elif kind == "keys off one way":  # in steps of 4: 401 loses 1, 399 and 403 gain 1
        q, keys, weights[:] = np.ones_like(q), np.zeros_like(keys), 1
        keys[::3, :11], keys[::3, 11:], keys[1::9] = 403, 399, 401
        keys[:, 0] = 4 * 8189.5
    operands = [cast(x, dtype) for x in (q, keys, weights)]
    q, keys, weights = (np.float64(x) for x in operands)
    with np.errstate(invalid="ignore"):
        products = np.maximum(np.einsum("mhd,nd->mhn", q, keys), 0)
        scores = np.einsum("mh,mhn->mn", weights, products)
    want = expected(scores, k, limits)[1:]
    for isa in native.supported_isas():
        for threads in (1, 3):
            arrays = (x[None] for x in (*operands, limits))
            found = selected_by_indexer(*arrays, k, isa, threads)
            same([x[0] for x in found], want, isa)


@pytest.mark.parametrize(
    ("kind", "dtype", "heads", "depth"),
    [
        ("integers", "float32", 4, 32),
        ("integers", "bfloat16", 3, 20),
        ("integers", "float32", 6, 7),
        ("integers", "float32", 12, 12),
        ("negative weights", "float32", 4, 32),
        ("a far key", "float32", 4, 32),
        ("no numbers", "float32", 4, 32),
        ("zeros", "float32", 7, 32),
        ("keys off one way", "float32", 4, 32),
        ("keys off two ways", "float32", 4, 32),
        ("only keys off", "float32", 4, 32),
        ("keys off, heads apart", "float32", 4, 32),
        ("keys off, a heavy head without products", "float32", 4, 32),
        ("nearly the bound", "float32", 4, 32),
        ("nearly the bound, negative weights", "float32", 4, 32),
        ("others are raised", "float32", 4, 32),
        ("only q off", "float32", 4, 32),
        ("other columns in the sample", "float32", 4, 32),
        ("zeros, rounded keys", "float32", 4, 32),
        ("zeros, rounded q", "float32", 4, 32),
        ("zeros, margins of some heads", "float32", 4, 32),
    ],
)
def test_an_indexer_of_bytes_selects_the_same(kind, dtype, heads, depth):
    """Of rows with many columns, some kernels score bytes of q and keys first. Here bytes are off
    by more than the distance of neighbouring scores, which are exact in float32 and tie."""
    rng, m, n, k = np.random.default_rng(6), 37, 2100, 24
    q, keys, weights = (
        rng.integers(-high, high + 1, size).astype(np.float32)
        for high, size in ((200, (m, heads, depth)), (200, (n, depth)), (3, (m, heads)))
    )
    keys[100:140] = keys[100]
    limits = np.where(np.arange(m) % 4, n, np.arange(m) * 56).astype(np.int32)
    if kind == "negative weights":  # most scores of some columns are 0, the greatest
        weights = -abs(weights)
    elif kind == "a far key":
        keys[650] *= 2.0**60
    elif kind == "no numbers":
        q[30], weights[35, 0] = NAN, INF
    elif kind == "zeros":
        q[::3], weights[1::3], keys[::7] = 0, -3, 0
    elif kind == "keys off one way":  # in steps of 64: 28 more columns round down than up
        q, keys, weights[:] = abs(q), np.full_like(keys, 32 * 64 - 33), 1
        keys[:, 0], keys[::50, 1:] = 126.5 * 64, 32 * 64 - 31
    elif kind == "keys off two ways":  # 31 up reach the sample's; 31 down, greater, do not
        k, q, weights[:] = 100, np.ones_like(q), 1
        keys[::2], keys[1::2], keys[1::2, 5] = 32 * 64 - 31, 32 * 64 - 33, 33 * 64 - 33
        keys[::16], keys[: 30 * 16 : 16] = 0, 32 * 64
        keys[:, 0] = 126.5 * 64
    elif kind == "nearly the bound":  # 20 lose 0.8 of what rounding may take
        weights[:], q[:], keys[:], keys[:, 0] = 1, 1, 0, 126.5 * 64
        keys[:, 31], keys[::20, 1:], keys[::20, 1:16] = -60 * 64, 0, 64
        keys[1:2000:200, 1:], keys[4:2000:200, 1:] = 31, 31
    elif kind == "nearly the bound, negative weights":  # 0.9 of it
        weights[:], q[:], q[..., 0], q[..., 1], keys[:], keys[:, 0] = -1, 252, 0, 253, 0, 126.5 * 64
        keys[:, 31], keys[::20, 2:], keys[::20, 2:18] = 60 * 64, 0, 64
        keys[1:2000:200, 2:], keys[4:2000:200, 2:] = 33, 33
    elif kind == "others are raised":  # 20 exact columns; of others the greater are less in bytes
        weights[:], q[:], q[..., 0], keys[:], keys[:, 0] = 1, 252, 253, 0, 126.5 * 64
        keys[:320:16, 1:], keys[:320:16, 1:13] = 32 * 64, 33 * 64
        keys[1::100, 1:], keys[3::100, 1:9], keys[3::100, 9:] = 32 * 64 - 31, 31 * 64 + 31, 2079
    elif "keys off" in kind:  # some are greater, and less in bytes, than exact ones
        weights[:], q[:], q[..., 0], keys[:], keys[:, 0] = 1, 252, 253, 0, 126.5 * 64
        q[:, 1::2] *= -1 if "apart" in kind else 1
        if "heavy" in kind:  # 2^100 times the others: their squares beside it are 0
            weights, q[:, 0], weights[:, 0] = weights * 2.0**-60, -1, -(2.0**40)
            keys[:, 0], keys[np.r_[:480:8, 1:2100:200], 0] = 0, 126.5 * 64
        keys[:480:8, 1:] = 32 * 64
        keys[1::200, 1:31], keys[1::200, 31] = 32 * 64 + 31, 31 * 64 + 31
    elif kind == "only q off":  # half of its features lose, half of them gain
        weights[:], q[..., 0], q[..., 1::2], q[..., 2::2] = (
            1,
            126.5 * 64,
            32 * 64 + 31,
            32 * 64 - 31,
        )
        keys[:], keys[:, 0], keys[:480:8, 1:] = 0, 253, 64
        keys[1::200, 1:30:2], keys[1::200, 2::2], keys[1::200, 1] = 124, 4, 114
        keys[1::200, 31] = 64
    elif kind == "other columns in the sample":  # its threshold leaves fewer than k columns
        keys[::16] = abs(keys[::16]) * 64
        q, weights = abs(q), abs(weights)
    elif "zeros, " in kind:  # 0 is the greatest score
        place, weights[:] = rng.random(n)[:, None], -1
        off = np.full(32, 31 - 64 * 264.0)  # in steps of 64: adds up to 0.5 of them, rounded to -14
        off[0], off[1:21] = 64 * 8189.5, 31 - 64 * 265
        ones, first = np.full(32, 64.0), 64.0 * (np.arange(32) == 0)
        if kind == "zeros, rounded keys":
            q[:], q[..., 0] = 8189, 8189.5
            keys = np.where(place < 0.06, -ones, np.where(place < 0.16, off, ones))
        elif kind == "zeros, rounded q":
            q[:], keys = off, np.where(place < 0.06, -first, np.where(place < 0.16, ones, first))
        else:  # sums of 0 in one head, or in all: both have the score 0, and not the same margin
            q[:], q[..., 1:3], q[..., 3] = 1, -1, 0
            q[:, 0, 2] = 0
            feature = np.where(place < 0.16, 2 + (place < 0.08), 0) - (place < 0.003) * 2
            keys = 1.0 * (feature == np.arange(32))
    operands = [cast(x, dtype) for x in (q, keys, weights)]
    q, keys, weights = (np.float64(x) for x in operands)
    with np.errstate(invalid="ignore"):
        products = np.maximum(np.einsum("mhd,nd->mhn", q, keys), 0)
        scores = np.einsum("mh,mhn->mn", weights, products)
    want = [
        expected(scores, k, limits)[1:],
        expected(scores[::-1, ::-1], k, limits[::-1])[1:],
    ]
    for target, isa in [(INDEXER, "avx512"), *BYTE_KERNELS]:
        if isa in native.supported_isas() and (target == INDEXER or dtype != "bfloat16"):
            arrays = (np.stack([x, x[::-1]]) for x in (*operands, limits))  # other keys for each
            found = selected_by_indexer(*arrays, k, isa, threads=2, target=target)
            for element in range(2):
                same([x[element] for x in found], want[element], f"{target}, {isa}, {element}")


@pytest.mark.skipif("avx512_bf16" not in native.supported_isas(), reason="no kernel of bytes")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("last bits", "float32"),
        ("last bits", "bfloat16"),
        ("zeros", "float32"),
        ("zeros of small keys", "bfloat16"),
        ("zeros of small q", "float32"),
        ("zeros of small weights", "float32"),
        ("few zeros", "float32"),
    ],
)
def test_bytes_decide_nothing_that_floats_would_not(kind, dtype):
    """Scores that differ in their last bits, or not at all, in floats: the kernel that scores bytes
    first computes these to the bits of the one that does not."""
    rng, m, n, k = np.random.default_rng(7), 33, 1500, 16
    q, weights = rng.standard_normal((m, 4, 32)), abs(rng.standard_normal((m, 4)))
    keys = rng.standard_normal(32) * (1 + 2.0**-23 * rng.integers(0, 4, (n, 1)))
    keys += rng.standard_normal((n, 32)) * (np.arange(n) % 5 == 0)[:, None]
    if "zeros" in kind:  # few sums are below 0, or nearly 0: of the latter half
        q, weights = np.float32(q[:1, :1].repeat(m, 0).repeat(4, 1)), -weights
        keys, place = rng.standard_normal((n, 32)), rng.random(n)
        sums = rng.choice([-1, 1], n) * 10.0 ** -rng.uniform(3, 7, n)
        sums[place < (0.02 if "few" in kind else 0.06)], sums[place > 0.2] = -10, 10
        k = 70 if "few" in kind else k
        keys += (sums - keys @ q[0, 0])[:, None] * q[0, 0] / (q[0, 0] @ q[0, 0])
        keys = keys * (2.0**-85 if "keys" in kind else 1)
        q = q * (2.0**-84 if "q" in kind else 1)
        weights = weights * (2.0**-116 if "weights" in kind else 1)
    operands = [cast(x, dtype)[None] for x in (q, keys, weights)]
    limits = np.full((1, m), n, np.int32)
    plain = selected_by_indexer(*operands, limits, k, "avx512", threads=2)
    for target, isa in BYTE_KERNELS:
        if isa in native.supported_isas() and (target == INDEXER or dtype != "bfloat16"):
            found = selected_by_indexer(*operands, limits, k, isa, threads=2, target=target)
            for a, b in zip(plain, found, strict=True):
                np.testing.assert_array_equal(a, b)


def test_an_indexer_refuses_what_does_not_fit():
    good = [np.ones(s, np.float32) for s in ((2, 3, 4, 5), (2, 6, 5), (2, 3, 4))]
    limits = np.full((2, 3), 6, np.int32)

    def of(operands, limits=limits, k=2):
        return selected_by_indexer(*operands, limits, k, native.isa())

    of(good)
    for place, shape in ((1, (2, 6, 4)), (1, (1, 6, 5)), (2, (2, 3, 5)), (0, (2, 3, 0, 5))):
        bad = [*good]
        bad[place] = np.ones(shape, np.float32)
        with pytest.raises(ValueError, match="top_k: "):
            of(bad)
    with pytest.raises(ValueError, match="k: expected 0 to the number of columns"):
        of(good, k=7)
    with pytest.raises(ValueError, match="limits"):
        of(good, np.float32(limits))
