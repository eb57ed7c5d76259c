"""A cache in pages against attention over each sequence by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sgap_jax import masks, nn, sparse_attention

B, SIZE, MOST, H, HK, D = 3, 4, 5, 4, 2, 8
RNG = np.random.default_rng(0)
TABLES = RNG.permutation(B * MOST + 2)[: B * MOST].reshape(B, MOST)  # pages in no order
LENGTHS = [3, 9, 1]  # of the prompts


def drawn(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def filled():
    """(a cache with prompts of different lengths, their keys, their values)"""
    cache = nn.PagedCache.empty(TABLES, SIZE, HK, D, pages=B * MOST + 2)
    k, v = drawn(B, max(LENGTHS), HK, D), drawn(B, max(LENGTHS), HK, D)
    cache = cache.append(k, v)
    return dataclasses.replace(cache, lengths=jnp.asarray(LENGTHS, jnp.int32)), k, v


@pytest.mark.parametrize("window", [None, 4])
def test_decoding_is_attention_over_each_sequence(window):
    cache, k, v = filled()
    slopes, table = drawn(H) ** 2, drawn(H, 6 if window else 5)
    options = dict(alibi_slopes=slopes, relative_bias=table, softcap=3.0)
    new_k, new_v, q = drawn(B, 2, HK, D), drawn(B, 2, HK, D), drawn(B, 2, H, D)

    @jax.jit
    def step(cache, q, k, v):
        cache = cache.append(k, v)
        return cache.attend(q, window=window, **options), cache

    out, after = step(cache, q, new_k, new_v)
    np.testing.assert_array_equal(after.lengths, np.add(LENGTHS, 2))
    for b, n in enumerate(LENGTHS):
        keys, values = (jnp.concatenate([x[b, :n], y[b]]) for x, y in ((k, new_k), (v, new_v)))
        whole = n + 2 if window is None else window
        near = masks.from_function(lambda i, j, w=whole: (j <= i) & (i - j < w), n + 2)
        every = jnp.concatenate([jnp.zeros((n, H, D), jnp.float32), q[b]])
        expected = sparse_attention(every, keys, values, near, **options)[n:]
        np.testing.assert_allclose(out[b], expected, atol=2e-6)
    assert step._cache_size() == 1 and step(after, q, new_k, new_v)[0].shape == out.shape
    assert step._cache_size() == 1


def test_pages_that_are_not_there_hold_nothing():
    cache, k, v = filled()
    bad = TABLES.copy()
    bad[0], bad[1, 1] = [-1, 99, 2**30, -(2**31), -7], 1000
    bad = dataclasses.replace(cache, tables=jnp.asarray(bad, jnp.int32))
    q = drawn(B, 1, H, D)
    out = jax.jit(lambda c: c.attend(q))(bad)
    np.testing.assert_array_equal(out[0], 0)
    kept = jnp.asarray([0, 1, 2, 3, 8])  # of sequence 1, whose second page is not there
    alone = sparse_attention(
        q[1], k[1, kept], v[1, kept], masks.from_function(lambda i, j: j >= 0, 1, 5)
    )
    np.testing.assert_allclose(out[1], alone, atol=2e-6)
    np.testing.assert_allclose(out[2], cache.attend(q)[2], atol=2e-6)
    own = dataclasses.replace(bad, tables=bad.tables.at[1, 1:].set(1000))
    np.testing.assert_array_equal(jax.jit(lambda c: c.attend(q))(own)[1], 0)
    same = own.append(drawn(B, 1, HK, D) * jnp.nan, drawn(B, 1, HK, D) * jnp.nan)
    assert np.isnan(same.keys).sum() == HK * D  # of sequence 2 alone
    full = dataclasses.replace(cache, lengths=jnp.full(B, SIZE * MOST, jnp.int32))
    past = jax.jit(lambda c: c.append(v[:, :2], v[:, :2]))(full)
    np.testing.assert_array_equal(past.keys, cache.keys)
    past = dataclasses.replace(cache, lengths=jnp.asarray([2**30, -5, 0], jnp.int32))
    assert np.isfinite(past.attend(q)).all()


def test_the_layer_decodes_over_pages():
    layer = nn.SparseSelfAttention(
        H,
        12,
        qkv_features=H * D,
        num_kv_heads=HK,
        rotary=True,
        alibi=True,
        softcap=4.0,
        scale=0.4,
        sinks=True,
        rngs=nnx.Rngs(0),
    )
    layer.sinks[...] = drawn(H)
    x = drawn(B, 6, 12)
    whole = layer(x, pattern=masks.causal(masks.band(6, 11)), is_causal=True)
    cache = nn.PagedCache.empty(TABLES, SIZE, HK, D)
    parts = []
    for begin, end in ((0, 3), (3, 4), (4, 6)):
        out, cache = layer(x[:, begin:end], paged_cache=cache)
        parts.append(out)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-5)
    # Past its pages a sequence loses those positions, and no others.
    step = nnx.jit(lambda layer, x, cache: layer(x, paged_cache=cache, window=3))
    near = layer(x, pattern=masks.causal(masks.band(6, 5)))
    short, parts = nn.PagedCache.empty(TABLES[:, :1], SIZE, HK, D), []
    for begin, end in ((0, 2), (2, 5), (5, 6)):
        out, short = step(layer, x[:, begin:end], short)
        parts.append(out)
    lost = jnp.broadcast_to(layer.out.bias[...], (B, 2, 12))
    expected = jnp.concatenate([near[:, :SIZE], lost], 1)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, atol=1e-5)
    # Lengths that int32 does not hold, which wrapped would be 1, or count on below zero.
    for length in (2**32 + 1, 2**31 - 1):
        far = dataclasses.replace(cache, lengths=np.full(B, length))
        np.testing.assert_allclose(step(layer, x[:, 4:], far)[0], lost, atol=1e-6)
    with pytest.raises(
        ValueError, match="sequence 0 has 4 positions of the 4 in 1 pages of 4: 1 more"
    ):
        layer(x[:, :1], paged_cache=short)
    with pytest.raises(NotImplementedError, match="paged_cache: .*mask"):
        layer(x, paged_cache=cache, mask=jnp.ones((1, 1, 1, 6)))


def test_errors():
    cache, k, v = filled()
    with pytest.raises(ValueError, match=r"k must have shape \[3, T, 2, 8\], got \[3, 9, 1, 8\]"):
        cache.append(k[:, :, :1], v)
    with pytest.raises(ValueError, match="as many values as keys"):
        cache.append(k, v[:, 1:])
    with pytest.raises(ValueError, match=r"q must have shape \[3, T, H, D\]"):
        cache.attend(drawn(2, 1, H, D))
    with pytest.raises(NotImplementedError, match="segment_ids: pages have none"):
        cache.attend(drawn(B, 1, H, D), segment_ids=0)
    with pytest.raises(ValueError, match=r"tables must have shape \[B, most\]"):
        nn.PagedCache.empty([1, 2], SIZE, HK, D)
    with pytest.raises(NotImplementedError, match="return_lse: pages have none"):
        cache.attend(jnp.ones((3, 1, 2, 4)), return_lse=True)


def test_a_cache_of_numpy_arrays():
    cache, _, _ = filled()
    kept = jax.device_get(cache)  # as checkpoints give it back
    wide = dataclasses.replace(kept, tables=TABLES.astype(np.int64))
    new = drawn(B, 1, HK, D)
    expected = cache.append(new, new)
    for each in (kept, wide):
        jax.tree.map(np.testing.assert_array_equal, each.append(new.tolist(), new), expected)
        q = jax.ShapeDtypeStruct((B, 1, H, D), jnp.float32)
        assert jax.eval_shape(each.attend, q).shape == q.shape
    # Pages that int32 does not count are out of range: wrapped they would be others' pages.
    far = nn.PagedCache.empty(TABLES + 2**32, SIZE, HK, D, pages=B * MOST + 2)
    assert not np.asarray(far.append(new, new).keys).any()
    unsigned = nn.PagedCache.empty(np.maximum(TABLES, 0).astype(np.uint32), SIZE, HK, D)
    assert unsigned.keys.shape[0] == TABLES.max() + 1
    with pytest.raises(ValueError, match="tables must be integers, got float64"):
        nn.PagedCache.empty(TABLES / 2, SIZE, HK, D)
    with pytest.raises(
        ValueError, match="tables: expected a concrete value, got a tracer; or pass"
    ):
        jax.eval_shape(lambda t: nn.PagedCache.empty(t, SIZE, HK, D), TABLES)
