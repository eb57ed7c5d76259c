"""Soft cap, distances, segments, dropout and score_mod of sparse_attention, against dense
jax.numpy, with all derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_twin import dense_mask
from battery import cast

from sgap_jax import (
    BCSR,
    CSR,
    CVS,
    CpuTile,
    OctetTile,
    Reference,
    SparseArray,
    Unfused,
    masks,
    sparse_attention,
)

L, S, H, HK, D, DV = 26, 31, 4, 2, 8, 5
STORED = np.random.default_rng(0).random((L, S)) < 0.4
STORED[5], STORED[8:16] = False, False  # a row, and all rows of a vector
SEGMENTS = np.sort(np.random.default_rng(1).integers(-1, 3, (2, L)), axis=1)
KEY_SEGMENTS = np.sort(np.random.default_rng(2).integers(-1, 3, (2, S)), axis=1)


def pattern(format):
    return SparseArray.from_dense(STORED.astype(np.float32), format=format)


def operands(dtype="float32", seed=3):
    rng = np.random.default_rng(seed)
    sizes = ((2, L, H, D), (2, S, HK, D), (2, S, HK, DV))
    return [cast(2 * rng.standard_normal(size), dtype) for size in sizes]


def learned(dtype="float32", seed=4):
    """(slopes, table)"""
    rng = np.random.default_rng(seed)
    return cast(rng.random(H), dtype), cast(rng.standard_normal((H, 12)), dtype)


def dropout_factors(A, rng, rate, **options):
    """The factors [B, H, L, S] by which probabilities are multiplied, seen through values of one
    key each; 1 where nothing is stored."""
    q = jnp.zeros((2, L, H, 1), jnp.float32)
    k, v = jnp.zeros((2, S, H, 1), jnp.float32), jnp.eye(S, dtype=jnp.float32)[None, :, None]
    v = jnp.broadcast_to(v, (2, S, H, S))
    plain, out = jax.jit(
        lambda *x: (
            sparse_attention(*x, A),
            sparse_attention(*x, A, dropout_rate=rate, dropout_rng=rng, **options),
        )
    )(q, k, v)
    plain, out = np.asarray(plain, np.float64), np.asarray(out, np.float64)
    found = np.divide(out, plain, out=np.ones_like(plain), where=plain > 0)
    factor = 1 / (1 - rate) if rate < 1 else 0.0
    return jnp.asarray(np.moveaxis(np.where(abs(found - factor) < 1e-4, factor, found), 2, 1))


def dense(q, k, v, mask, slopes=None, table=None, *, cap=None, offset=0, same=None, m=None, f=None):
    """(O, lse) of the whole matrices; `f` is a score_mod of arrays."""
    k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("blhd,bshd->bhls", q, k) * q.shape[3] ** -0.5
    s = s if cap is None else cap * jnp.tanh(s / cap)
    d = jnp.arange(S) - jnp.arange(L)[:, None] - jnp.reshape(jnp.asarray(offset), (-1, 1, 1))
    if slopes is not None:
        s = s - slopes[None, :, None, None] * jnp.abs(d)[:, None]
    if table is not None:
        half = table.shape[1] // 2
        place = jnp.clip(d, -half, table.shape[1] - 1 - half) + half
        s = s + jnp.moveaxis(table[:, place], 0, 1)
    s = s if f is None else f(s)
    seen = jnp.broadcast_to(mask if same is None else mask & same[:, None], s.shape)
    s = jnp.where(seen, s, -jnp.inf)
    peak = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    e = jnp.where(seen, jnp.exp(s - jnp.where(jnp.isneginf(peak), 0, peak)), 0)
    total = e.sum(-1, keepdims=True)
    some = total > 0
    lse = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + peak, -jnp.inf)[..., 0]
    p = e / jnp.where(some, total, 1) * (1 if m is None else m)
    return jnp.einsum("bhls,bshd->blhd", p, v), jnp.moveaxis(lse, 1, 2)


SAME = jnp.asarray((SEGMENTS[:, :, None] == KEY_SEGMENTS[:, None]) & (SEGMENTS >= 0)[..., None])
ROUGH = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 6e-3, "float16": 8e-4}
VARIANTS = [
    *((format, "float32", None) for format in (CSR, CVS(4), CVS(8), CVS(20), BCSR(4, 3))),
    (CVS(8), "bfloat16", None),
    (CSR, "float16", None),
    (CVS(16), "float64", None),
    (CVS(2), "float32", CpuTile(nonzeros=32)),
    (CVS(8), "float32", Reference()),
    (CSR, "float32", Unfused()),
]


def everything(dtype, offset=None):
    """(arguments of sparse_attention that have no derivative, those of `dense`)."""
    options = dict(softcap=1.5, segment_ids=SEGMENTS, kv_segment_ids=KEY_SEGMENTS)
    options |= dict(query_offset=offset, dropout_rate=0.3, dropout_rng=7)
    return options, dict(cap=1.5, same=SAME, offset=0 if offset is None else offset)


@pytest.mark.parametrize(("format", "dtype", "schedule"), VARIANTS, ids=str)
def test_all_terms_and_their_gradients(format, dtype, schedule):
    A, x = pattern(format), operands(dtype)
    wide = "float64" if dtype == "float64" else "float32"
    options, twin = everything(dtype, offset=jnp.asarray([3, -2]))
    m = dropout_factors(A, 7, 0.3, schedule=Reference())
    terms, stored = learned(wide), jnp.asarray(dense_mask(A))

    def mine(q, k, v, slopes, table):
        more = dict(alibi_slopes=slopes, relative_bias=table, return_lse=True, schedule=schedule)
        out, lse = sparse_attention(q, k, v, A, **options, **more)
        return out.astype(wide), lse

    def whole(q, k, v, slopes, table):
        q, k, v = (one.astype(wide) for one in (q, k, v))
        return dense(q, k, v, stored, slopes, table, m=m.astype(wide), **twin)

    def loss(f):
        return lambda *x: sum(jnp.sum(jnp.sin(jnp.where(jnp.isinf(y), 0, y))) for y in f(*x))

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for a, b in zip(mine(*x, *terms), jax.jit(whole)(*x, *terms), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=4 * ROUGH[dtype])
        found, expected = (jax.jit(jax.grad(loss(f), range(5)))(*x, *terms) for f in (mine, whole))
    for a, b in zip(found, expected, strict=True):
        size = max(float(jnp.abs(b).astype("float32").max()), 1e-3)
        a, b = (np.asarray(one).astype(np.float64) for one in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * ROUGH[dtype] * size)


ONE_EACH = {
    "softcap": (dict(softcap=0.7), dict(cap=0.7)),
    "slopes": (dict(alibi_slopes=learned()[0]), dict(slopes=learned()[0])),
    "table": (dict(relative_bias=learned()[1][0]), dict(table=learned()[1][:1].repeat(H, 0))),
    "one number": (dict(relative_bias=jnp.ones((H, 1))), {}),
    "segments": (
        dict(segment_ids=SEGMENTS[1], kv_segment_ids=KEY_SEGMENTS[1].astype(np.int8)),
        dict(same=SAME[1:]),
    ),
}


@pytest.mark.parametrize("name", ONE_EACH)
def test_each_term_alone(name):
    A, x = pattern(CVS(8)), operands()
    options, twin = ONE_EACH[name]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected = dense(*x, jnp.asarray(dense_mask(A)), **twin)
        found = sparse_attention(*x, A, **options, return_lse=True)
    np.testing.assert_allclose(found[0], expected[0], atol=5e-6)
    if name != "one number":  # which only moves the scores
        np.testing.assert_allclose(found[1], expected[1], atol=5e-6)


@pytest.mark.parametrize("offset", [0, 4, [-3, 40]], ids=str)
def test_causal_from_an_offset_on(offset):
    A, x = pattern(CVS(8)), operands()
    d = np.arange(S) - np.arange(L)[:, None] - np.reshape(offset, (-1, 1, 1, 1))
    out = sparse_attention(*x, A, is_causal=True, query_offset=np.asarray(offset))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected = dense(*x, jnp.asarray(dense_mask(A) & (d <= 0)))[0]
    np.testing.assert_allclose(out, expected, atol=5e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64"])
def test_segments_that_are_none(dtype):
    A = SparseArray.from_dense(np.ones((3, 3), np.float32))
    x = [jnp.ones((3, 1, 4), jnp.float32)] * 3
    most = np.iinfo(dtype).max
    ids = np.asarray([1, 1, most], dtype)
    expected = [1, 1, 1 if dtype == "int8" else 0]
    np.testing.assert_allclose(sparse_attention(*x, A, segment_ids=ids)[:, 0, 0], expected)
    far = np.asarray(most, dtype)
    np.testing.assert_allclose(sparse_attention(*x, A, query_offset=far, is_causal=True), 1)


def test_traced_segments_are_the_mask_of_blocks():
    ids = np.repeat([0, 1, 2, 5], [10, 3, 20, 7])
    q, k, v = (
        cast(np.random.default_rng(i).standard_normal((40, 2, 8)), "float32") for i in range(3)
    )
    band = masks.band(40, 21, format=CVS(8))
    attend = jax.jit(lambda ids: sparse_attention(q, k, v, band, segment_ids=ids))
    exact = sparse_attention(q, k, v, band.asformat(CSR), segment_ids=ids)
    np.testing.assert_allclose(attend(jnp.asarray(ids)), exact, atol=2e-6)
    inside = SparseArray.from_dense((dense_mask(band) & (ids[:, None] == ids)).astype(np.float32))
    np.testing.assert_allclose(exact, sparse_attention(q, k, v, inside), atol=2e-6)
    assert attend(jnp.zeros(40, int)).shape == (40, 2, 8) and attend._cache_size() == 1


def test_dropout_keeps_its_share_and_differs_by_head():
    A = SparseArray.from_dense(np.ones((L, S), np.float32))
    m = np.asarray(dropout_factors(A, jax.random.key(0), 0.25))
    np.testing.assert_allclose(np.unique(m.round(4)), [0, 4 / 3], atol=1e-4)
    assert abs((m > 0).mean() - 0.75) < 0.02  # of 6448: a deviation of 0.0054
    kept = (m > 0).reshape(2 * H, -1).astype(float)
    assert abs(np.corrcoef(kept) - np.eye(2 * H)).max() < 0.15
    for axis in (2, 3):  # neighbours in rows and columns
        a, b = (np.delete(m > 0, i, axis).ravel() for i in (0, -1))
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.06
    other = np.asarray(dropout_factors(A, jax.random.key(1), 0.25))
    assert 0.3 < ((other > 0) != (m > 0)).mean() < 0.45
    shared = np.asarray(dropout_factors(A, 0, 0.25, broadcast_dropout=True))
    np.testing.assert_array_equal(shared, np.broadcast_to(shared[:1, :1], shared.shape))
    np.testing.assert_array_equal(dropout_factors(A, 0, 1.0), 0)
    fused = dropout_factors(pattern(CVS(8)), 5, 0.5), dropout_factors(pattern(CSR), 5, 0.5)
    both = np.broadcast_to(dense_mask(pattern(CSR)), fused[0].shape)
    np.testing.assert_allclose(*(np.asarray(one)[both] for one in fused), atol=1e-5)


def test_dropout_under_vmap_is_that_of_each_call():
    A, (q, k, v) = pattern(CVS(4)), operands()
    keys = jax.random.split(jax.random.key(0), 2)
    one = lambda q, k, v, key: sparse_attention(  # noqa: E731
        q, k, v, A, dropout_rate=0.5, dropout_rng=key, alibi_slopes=learned()[0]
    )
    found = jax.jit(jax.vmap(one))(*(jnp.stack([x, 2 * x]) for x in (q, k, v)), keys)
    alone = jax.jit(one)
    for i in range(2):
        np.testing.assert_allclose(
            found[i], alone(*((i + 1) * x for x in (q, k, v)), keys[i]), atol=2e-6
        )
    shared = jax.jit(jax.vmap(lambda q: one(q, k, v, keys[0])))(jnp.stack([q, q]))
    np.testing.assert_array_equal(shared[0], shared[1])


@pytest.mark.parametrize("each", ["heads", "sequences"])
def test_terms_with_a_pattern_for_each(each):
    (q, k, v), (slopes, table) = operands(), learned()
    options = dict(alibi_slopes=slopes, relative_bias=table, softcap=2.0, segment_ids=SEGMENTS)
    options |= dict(kv_segment_ids=KEY_SEGMENTS, dropout_rate=0.4, dropout_rng=3)
    same = [pattern(CVS(4))] * H
    shuffled = [one.with_values(one.values) for one in same]  # so that they are taken one by one
    together = lambda v, t: sparse_attention(q, k, v, same[0], **options | dict(relative_bias=t))  # noqa: E731
    if each == "heads":
        apart = lambda v, t: sparse_attention(q, k, v, shuffled, **options | dict(relative_bias=t))  # noqa: E731
    else:
        stacked = jax.tree.map(lambda x: jnp.stack([jnp.stack([x] * HK)] * 2), same[0])
        apart = lambda v, t: sparse_attention(q, k, v, stacked, **options | dict(relative_bias=t))  # noqa: E731
    for a, b in zip(
        *(
            jax.jit(jax.value_and_grad(lambda v, t, f=f: f(v, t).sum(), (0, 1)))(v, table)
            for f in (together, apart)
        ),
        strict=True,
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), a, b)


@pytest.mark.seconds(check=1, test=4)
def test_second_derivatives_and_forward_mode():
    A, x, terms = pattern(CSR), operands("float64"), learned("float64")
    options, twin = everything("float64")
    m = dropout_factors(A, 7, 0.3)
    f = (
        lambda *x: jnp.sum(  # noqa: E731
            sparse_attention(*x[:3], A, alibi_slopes=x[3], relative_bias=x[4], **options) ** 2
        )
    )
    g = lambda *x: jnp.sum(dense(*x[:3], jnp.asarray(STORED), *x[3:], m=m, **twin)[0] ** 2)  # noqa: E731
    along = [
        jnp.cos(jnp.arange(one.size, dtype="float64")).reshape(one.shape) for one in (*x, *terms)
    ]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        second = [
            jax.jit(lambda *x, h=h: jax.jvp(jax.grad(h, range(5)), x, tuple(along)))(*x, *terms)
            for h in (f, g)
        ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8), *second)


def test_a_function_of_scores():
    A, x = pattern(CVS(4)), operands()
    table = jnp.asarray(np.random.default_rng(0).standard_normal((H, L)), "float32")
    mod = lambda table: lambda s, b, h, i, j: jnp.sin(s) * (b + 1) + table[h, i] - 0.1 * (j > i)  # noqa: E731
    b, h, i, j = np.ogrid[:2, :H, :L, :S]
    stored = jnp.asarray(dense_mask(A))

    def mine(q, table):
        return sparse_attention(q, *x[1:], A, score_mod=mod(table)).sum(3)

    @jax.jit
    def whole(q, table):
        f = lambda s: jnp.sin(s) * (b + 1) + table[h, i] - 0.1 * (j > i)  # noqa: E731
        return dense(q, *x[1:], stored, f=f)[0].sum(3)

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(mine(x[0], table), whole(x[0], table), atol=2e-5)
        np.testing.assert_allclose(jax.jit(mine)(x[0], -table), whole(x[0], -table), atol=2e-5)
        grads = [
            jax.jit(jax.grad(lambda *x, f=f: jnp.sum(f(*x) ** 2), (0, 1)))(x[0], table)
            for f in (mine, whole)
        ]
        each = [A] * (H - 1) + [A.with_values(A.values)]
        apart = jax.jit(lambda *x: sparse_attention(*x, each, score_mod=mod(table)).sum(3))(*x)
        np.testing.assert_allclose(apart, whole(x[0], table), atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), *grads)


def test_nothing_of_the_size_of_the_pattern_is_formed():
    A = SparseArray.from_dense(np.ones((64, 64), np.float32), format=CVS(8))
    q, k, v = (jnp.ones((1, 64, 2, 16), jnp.float32) for _ in range(3))
    ids = jnp.zeros((1, 64), jnp.int32)

    def loss(q, slopes, table, key):
        options = dict(alibi_slopes=slopes, relative_bias=table, softcap=5.0, segment_ids=ids)
        return sparse_attention(q, k, v, A, dropout_rate=0.1, dropout_rng=key, **options).sum()

    given = (q, jnp.ones(2, jnp.float32), jnp.ones((2, 9), jnp.float32), jax.random.key(0))
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given).as_text()
    assert text.count("custom_call @sgap_attention_cvs_v2") == 1
    assert text.count("custom_call @sgap_attention_backward_cvs_v2") == 1
    assert "sddmm" not in text and "x4096" not in text and "x512x8" not in text


DROPPED = dict(dropout_rate=0.5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(softcap=-1.0), ValueError, "softcap must be a positive number of float32, got -1.0"),
        (dict(softcap=float("nan")), ValueError, "softcap must be a positive number"),
        (dict(softcap=1e39), ValueError, "softcap must be a positive number of float32, got 1e"),
        (dict(softcap="2"), ValueError, "softcap must be a positive number of float32, got '2'"),
        (dict(alibi_slopes=jnp.ones(3)), ValueError, r"alibi_slopes.*\[4\], got \[3\]"),
        (dict(relative_bias=jnp.ones((3, 5))), ValueError, r"relative_bias.*\[4, R\]"),
        (dict(relative_bias=jnp.ones((4, 0))), ValueError, "relative_bias"),
        (dict(relative_bias=jnp.arange(3)), ValueError, "relative_bias must be floats"),
        (dict(segment_ids=jnp.zeros(3, int)), ValueError, r"segment_ids.*\[2, 26\] or \[26\]"),
        (dict(segment_ids=SEGMENTS), ValueError, r"segment_ids of the keys.*\[2, 31\]"),
        (dict(kv_segment_ids=KEY_SEGMENTS), ValueError, "segment_ids: expected with"),
        (dict(query_offset=0.5), ValueError, "query_offset must be integers"),
        (dict(dropout_rate=1.5), ValueError, r"dropout_rate must be in \[0, 1\]"),
        (dict(relative_bias=jnp.ones((9, 4))), ValueError, r"\[9, 4\] of .*; relative_bias.T"),
        (
            dict(dropout_rate="0.5"),
            ValueError,
            r"dropout_rate must be a number in \[0, 1\], got '0",
        ),
        (dict(dropout_rate=None), ValueError, "dropout_rate must be a number"),
        (dict(dropout_rate=np.full(2, 0.5)), ValueError, "dropout_rate must be a number"),
        (dict(dropout_rate=0.5), ValueError, "dropout_rng: expected with a dropout_rate"),
        (DROPPED | dict(dropout_rng="key"), ValueError, "a PRNG key or an integer, got a str"),
        (DROPPED | dict(dropout_rng=0.5), ValueError, "a PRNG key or an integer, got a float"),
        (DROPPED | dict(dropout_rng=np.ones(2)), ValueError, r"got an array \[2\] of float64"),
        (DROPPED | dict(dropout_rng=np.ones(3, np.uint32)), ValueError, r"array \[3\] of uint32"),
        (
            DROPPED | dict(dropout_rng=jax.random.split(jax.random.key(0))),
            ValueError,
            r"got keys of shape \[2\]",
        ),
        (DROPPED | dict(dropout_rng=lambda: 0), ValueError, "a key where it is called"),
        (dict(score_mod=3), ValueError, "score_mod: expected a function .*, got a int"),
        (
            dict(score_mod=lambda s: s),
            ValueError,
            r"score_mod: .*\(score, b, h, i, j\), got one of",
        ),
        (dict(score_mod=lambda b, h, i, j: i >= j), ValueError, "mask_mod is for masks.from"),
        (dict(score_mod=lambda s, b, h, i, j: i >= j), ValueError, r"got \[\] of bool"),
        (dict(score_mod=lambda s, b, h, i, j: (s, s)), ValueError, "got a tuple"),
        (dict(score_mod=lambda s, *_: jnp.stack([s, s])), ValueError, r"got \[2\] of float"),
        (dict(score_mod=min, schedule=Reference()), NotImplementedError, "score_mod runs unfused"),
    ],
)
def test_errors(options, error, words):
    with pytest.raises(error, match=words):
        sparse_attention(*operands(), pattern(CSR), **options)


def test_matrix_tiles_have_no_terms():
    tile = OctetTile(8, tile_n=32, tile_k=64)
    with pytest.raises(NotImplementedError, match="matrix tiles have no soft cap"):
        sparse_attention(*operands("bfloat16"), pattern(CVS(8)), softcap=1.0, schedule=tile)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(slopes=(1, 3, 1)), "slopes"),
        (dict(table=(3, 2, 4)), "table: expected a batch"),
        (dict(table=(1, 2, 0), kept=1), "table"),
        (dict(query_segments=(1, 5)), "query_segments"),
        (dict(offset=(1, 2)), "offset"),
        (dict(seeds=(1, 2, 3)), "seeds"),
        (dict(kept=-1), "kept"),
        (dict(softcap=-1.0), "softcap"),
    ],
)
def test_a_handler_refuses_what_does_not_fit(change, words):
    sizes = dict(q=(1, 6, 2, 4), k=(1, 9, 1, 4), v=(1, 9, 1, 4), bias=(1, 0), sinks=(1, 0))
    sizes |= dict(lengths=(1, 0), slopes=(1, 2, 1), table=(1, 2, 5), query_segments=(1, 6))
    sizes |= dict(key_segments=(1, 9), offset=(1, 1), seeds=(1, 2, 2), offsets=4, indices=5)
    sizes |= {name: shape for name, shape in change.items() if isinstance(shape, tuple)}
    attrs = dict(vector_length=np.int64(2), scale=1.0, is_causal=False, chunk_nonzeros=np.int64(64))
    attrs |= dict(pack=True, softcap=0.0, kept=np.int64(9), keep_scale=1.0, key_pieces=np.int64(1))
    if "kept" in change:
        attrs["kept"] = np.int64(change["kept"])
    attrs["softcap"] = np.float64(change.get("softcap", 0.0))
    attrs |= {name: np.float64(attrs[name]) for name in ("scale", "keep_scale")}
    integers = ("lengths", "query_segments", "key_segments", "offset", "offsets", "indices")
    kinds = {name: jnp.int32 for name in integers} | {"seeds": jnp.uint32}
    arrays = [jnp.zeros(shape, kinds.get(name, jnp.float32)) for name, shape in sizes.items()]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 6, 2, 4), (1, 6, 2))]
    with pytest.raises(Exception, match=f"attention.*{words}"):
        jax.ffi.ffi_call("sgap_attention_cvs_v2", shapes)(*arrays, **attrs)


def test_segments_without_keys():
    q, kv = jnp.ones((1, 3, 1, 4)), jnp.ones((1, 0, 1, 4))
    none = SparseArray.from_dense(np.zeros((3, 0), np.float32))
    ids = dict(segment_ids=[0, 0, 0], kv_segment_ids=np.zeros(0, int))
    assert not np.any(sparse_attention(q, kv, kv, none, **ids))
