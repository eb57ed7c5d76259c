"""The attention layers against Flax's own with the pattern as a dense mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_twin import attention_of_flax
from flax import linen, nnx

from sgap_jax import BCSR, COO, CSR, CVS, SparseArray, Unfused, masks, nn, sparse_attention
from sgap_jax.nn import linen as snn

L, S, H, IN = 12, 10, 4, 8
FLOAT64 = dict(param_dtype=jnp.float64)
BIASED = dict(bias_init=nnx.initializers.normal(), **FLOAT64)


def mask(rows=L, columns=S, seed=0, format=CSR):
    """(pattern, dense mask) without empty rows: there Flax has another answer."""
    stored = np.random.default_rng(seed).random((rows, columns)) < 0.4
    stored[:, 0] = True
    pattern = SparseArray.from_dense(stored.astype(np.float32), format=format)
    whole = pattern.with_values(jnp.ones_like(pattern.values))
    return pattern, whole.todense() != 0


def inputs(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), a, b)


def dense(**options):
    options = dict(decode=False, attention_fn=attention_of_flax) | BIASED | options
    return nnx.MultiHeadAttention(H, IN, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("format", [CSR, CVS(8)])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_layer_is_flax_with_the_pattern_as_its_mask(format, leading):
    twin = dense(qkv_features=12, out_features=5, in_kv_features=6)
    pattern, seen = mask(format=format)
    layer = nn.SparseMultiHeadAttention.from_dense(twin, pattern)
    q, k, v = inputs(*leading, L, IN), inputs(*leading, S, 6), inputs(*leading, S, 6, seed=2)
    full = seen.reshape((1,) * (len(leading) + 1) + seen.shape)
    close(layer(q, k, v), twin(q, k, v, mask=full))
    close(layer(q, k), twin(q, k, mask=full))
    shared = nn.SparseMultiHeadAttention.from_dense(twin)
    assert not shared.pattern
    again = nn.SparseMultiHeadAttention.from_dense(layer)
    assert again.kinds == layer.kinds and not nn.SparseMultiHeadAttention.from_dense(shared).pattern
    close(again(q, k), layer(q, k))
    close(shared(q, k, v, pattern=pattern), layer(q, k, v))


@pytest.mark.parametrize(
    "options", [dict(num_kv_heads=2), dict(normalize_qk=True), dict(use_bias=False)]
)
def test_options_of_flax(options):
    twin = dense(**options)
    pattern, seen = mask(L, L)
    layer = nn.SparseMultiHeadAttention.from_dense(twin, pattern, schedule=Unfused())
    states = [nnx.to_pure_dict(nnx.state(one, nnx.Param)) for one in (layer, twin)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    x = inputs(2, L, IN)
    with jax.numpy_dtype_promotion("standard"):  # for Flax's LayerNorm
        close(layer(x), twin(x, mask=seen[None, None]))


def test_masks_and_causality():
    twin = dense()
    pattern, seen = mask(L, L, format=BCSR(4, 3))
    layer = nn.SparseMultiHeadAttention.from_dense(twin, pattern)
    x, full = inputs(2, L, IN), seen[None, None]
    for shape in ((2, 1, 1, L), (2, H, L, L), (1, H, 1, L), (L, L), (L,), (2, 1, L, 1)):
        given = np.random.default_rng(3).random(shape) < 0.8
        given[..., 0] = True
        both = jnp.logical_and(jnp.asarray(given).reshape((1,) * (4 - len(shape)) + shape), full)
        close(layer(x, mask=given), twin(x, mask=jnp.broadcast_to(both, (2, H, L, L))))
    causal = nnx.make_causal_mask(jnp.ones((2, L)))
    close(layer(x, is_causal=True), twin(x, mask=(causal != 0) & full))
    close(layer(x, mask=causal), layer(x, is_causal=True))


def test_a_mask_of_numbers_to_add_is_refused():
    pattern, _ = mask(L, L)
    layer = nn.SparseSelfAttention(H, IN, pattern=pattern, rngs=nnx.Rngs(0), **FLOAT64)
    twin = snn.SparseSelfAttention(H, **FLOAT64)
    x, keep = inputs(1, L, IN), np.arange(L) < 5
    added = np.where(keep, 0.0, -np.inf)
    initial = partial(twin.init, jax.random.key(0), x, pattern=pattern)
    for one in (partial(layer, x), initial):
        wrongs = [added, jnp.asarray(added, jnp.bfloat16), np.where(keep, np.nan, 1.0)]
        for wrong in (*wrongs, np.where(keep, 0, -10000), np.int8([*keep[1:], -1])):
            with pytest.raises(ValueError, match="Attention: mask: expected bools.*pass bias= for"):
                one(mask=wrong)
    given = (keep, keep.astype(int))
    want, *found = jax.jit(lambda m: [layer(x, mask=m) for m in (*given, m)])(keep.astype(float))
    close(found, [want] * 2)


def test_a_query_without_keys_gets_the_bias():
    layer = nn.SparseSelfAttention(H, IN, rngs=nnx.Rngs(0), **BIASED)
    empty = SparseArray.from_dense(np.zeros((L, L)))
    x = inputs(L, IN)
    close(layer(x, pattern=empty), jnp.broadcast_to(layer.out.bias[...], (L, IN)))
    close(layer(x, pattern=mask(L, L)[0], mask=jnp.zeros((1, L, L))), layer(x, pattern=empty))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_one_pattern_for_each_head(kv_heads):
    twin = dense(num_kv_heads=kv_heads)
    patterns, seen = zip(*[mask(L, L, seed=h) for h in range(H)], strict=True)
    layer = nn.SparseMultiHeadAttention.from_dense(twin, patterns)
    x, full = inputs(2, L, IN), jnp.stack(seen)[None]
    close(layer(x), twin(x, mask=full))
    for shape in ((2, 1, 1, L), (2, H, L, L)):
        given = (np.random.default_rng(3).random(shape) < 0.8) | (np.arange(L) == 0)
        close(layer(x, mask=given), twin(x, mask=jnp.asarray(given) & full))


def test_gradients():
    twin = dense()
    pattern, seen = mask(L, L, format=CVS(8))
    layer = nn.SparseMultiHeadAttention.from_dense(twin, pattern)
    x = inputs(2, L, IN)
    loss = lambda layer, x, options: jnp.sum(jnp.sin(layer(x, **options)))
    grad = nnx.jit(nnx.grad(loss, argnums=(0, 1)))
    got, dx = grad(layer, x, {})
    want, dense_dx = grad(twin, x, {"mask": seen[None, None]})
    close(dx, dense_dx)
    close(nnx.to_pure_dict(got), nnx.to_pure_dict(want))


@pytest.mark.seconds(test=4)
@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout(broadcast):
    options = dict(dropout_rate=0.4, broadcast_dropout=broadcast, deterministic=False) | FLOAT64
    layer = nn.SparseSelfAttention(H, IN, pattern=mask(L, L)[0], rngs=nnx.Rngs(0), **options)
    x = inputs(2, L, IN)
    draw = jax.jit(lambda key: layer(x, rngs=nnx.Rngs(key)))
    keys = jax.random.split(jax.random.key(0), 800)
    close(draw(keys[0]), draw(keys[0]))
    assert not np.allclose(draw(keys[0]), draw(keys[1]))
    assert not np.allclose(layer(x), layer(x))  # its own stream goes on
    same = jnp.broadcast_to(x[:1], x.shape)
    rows = layer(same, rngs=nnx.Rngs(0))
    assert np.allclose(rows[0], rows[1]) == broadcast
    plain = layer(x, deterministic=True)
    # The mean of the draws is the layer without dropout, within six standard errors.
    draws = jax.lax.map(draw, keys)
    allowed = np.minimum(6 * draws.std(0) / np.sqrt(len(keys)), 0.1)
    assert (abs(draws.mean(0) - plain) <= allowed).all() and abs(plain).max() > 2 * allowed.max()
    layer.eval()
    close(layer(x), plain)


@pytest.mark.parametrize("each", [False, True])
def test_the_steps_of_dropout_are_the_fused_operation(each):
    """At a rate of nearly nothing."""
    pattern = [mask(L, L, seed=h)[0] for h in range(H)] if each else mask(L, L)[0]
    options = dict(dropout_rate=1e-12, num_kv_heads=2, deterministic=False) | FLOAT64
    layer = nn.SparseSelfAttention(H, IN, pattern=pattern, rngs=nnx.Rngs(0), **options)
    x = inputs(2, L, IN)
    for shape in ((2, 1, 1, L), (1, H, L, L)):
        given = np.random.default_rng(3).random(shape) < 0.8
        for more in (dict(mask=given, is_causal=True), dict(mask=given)):
            close(layer(x, **more), layer(x, deterministic=True, **more))


def test_pattern_is_state_and_parameters_are_flax_s():
    pattern, _ = mask(L, L)
    layer = nn.SparseSelfAttention(H, IN, pattern=pattern, rngs=nnx.Rngs(0), **FLOAT64)
    graph, params, structure = nnx.split(layer, nnx.Param, nn.Structure)
    assert jax.tree.structure(params) == jax.tree.structure(nnx.state(dense(), nnx.Param))
    assert {leaf.dtype for leaf in jax.tree.leaves(structure)} == {np.dtype(np.int32)}
    x = inputs(2, L, IN)
    again = nnx.merge(graph, params, structure)
    close(again(x), layer(x))
    close(again.pattern[0].checked().column_indices, pattern.column_indices)
    closed = jax.make_jaxpr(lambda s, x: nnx.merge(graph, *s)(x))((params, structure), x)
    assert max((np.size(c) for c in closed.consts), default=0) < pattern.nnz
    over = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))
    close(over(layer, x), layer(x))


def test_layers_of_one_pattern_are_donated_and_leave_it():
    pattern, _ = mask(L, L)
    layers = [
        nn.SparseSelfAttention(H, IN, pattern=given, rngs=nnx.Rngs(0), **FLOAT64)
        for given in (pattern, pattern, H * [pattern])
    ]
    total = nnx.jit(
        lambda layers: sum(one.query.bias[...].sum() for one in layers), donate_argnums=0
    )
    assert total(nnx.List(layers)) == 0
    assert pattern.checked().nnz == pattern.column_indices.size  # its arrays are there


@pytest.mark.parametrize("each", [False, True])
def test_linen_layer_is_linens_own(each):
    options = dict(num_heads=H, qkv_features=12, out_features=5, **BIASED)
    twin = linen.MultiHeadDotProductAttention(attention_fn=attention_of_flax, **options)
    patterns, seen = zip(*[mask(seed=h) for h in range(H)], strict=True)
    pattern, full = (patterns, jnp.stack(seen)) if each else (patterns[0], seen[0][None])
    q, k = inputs(2, L, IN), inputs(2, S, 6)
    variables = twin.init(jax.random.key(0), q, k, mask=full[None])
    layer = snn.SparseMultiHeadAttention(**options)
    assert jax.tree.structure(variables) == jax.tree.structure(
        layer.init(jax.random.key(0), q, k, pattern=pattern)
    )
    apply = jax.jit(lambda v, q, k, pattern: layer.apply(v, q, k, pattern=pattern))
    close(apply(variables, q, k, pattern), twin.apply(variables, q, k, mask=full[None]))
    one = snn.SparseSelfAttention(H, dropout_rate=0.5, **FLOAT64)
    square, _ = mask(L, L)
    variables = one.init(jax.random.key(0), q, pattern=square, deterministic=True)
    draw = lambda seed: one.apply(
        variables, q, pattern=square, deterministic=False, rngs={"dropout": jax.random.key(seed)}
    )
    close(draw(1), draw(1))
    assert not np.allclose(draw(1), draw(2))


def test_rotary_embeddings_turn_pairs_of_features():
    """Feature c and c + D / 2 as a complex number, times e^(i position base^(-2 c / D))."""
    x, positions = (
        np.random.default_rng(0).standard_normal((2, 5, 3, 8)),
        np.array([0, 1, 2, 7, 40]),
    )
    turned = np.exp(1j * positions[:, None] * 100.0 ** (-np.arange(4) / 4))[:, None]
    expected = (x[..., :4] + 1j * x[..., 4:]) * turned
    found = nn.rotary_embedding(jnp.asarray(x), jnp.asarray(positions), base=100.0)
    expected = np.concatenate([expected.real, expected.imag], -1)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_rotary_embeddings_are_not_lost_silently(monkeypatch):
    """Also under versions of Flax that have none."""
    name = "dot_product_attention_with_rope"
    monkeypatch.setattr(nnx, name, getattr(nnx, name, attention_of_flax), raising=False)
    rotated = dense(attention_fn=partial(getattr(nnx, name), rope=None))
    with pytest.raises(NotImplementedError, match="from_dense: layer has rotary embeddings"):
        nn.SparseMultiHeadAttention.from_dense(rotated)
    nn.SparseMultiHeadAttention.from_dense(
        dense(attention_fn=partial(jax.nn.dot_product_attention))
    )


SEGMENTS = np.array([[0] * 5 + [1] * 7, [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4]])


def rotated_by_hand(x, positions):
    """Pairs of features as complex numbers."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[..., None, None] * 10000.0 ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("format", [CSR, CVS(4)])
def test_terms_of_the_scores(format):
    """Soft cap, slopes, a table, segments and rotary embeddings, as `sparse_attention` has them."""
    pattern, seen = mask(L, L, format=format)
    options = dict(softcap=2.0, alibi=True, relative_bias=5, rotary=True)
    layer = nn.SparseMultiHeadAttention.from_dense(dense(num_kv_heads=2), pattern, **options)
    assert layer.relative_bias.shape == (H, 5) and not layer.relative_bias[...].any()
    table = inputs(H, 5, seed=5)
    layer.relative_bias[...] = table
    x, near = inputs(2, L, IN), np.arange(L) - np.arange(L)[:, None]

    def by_hand(query, key, value, **unused):
        query, key = (rotated_by_hand(one, np.arange(L)) for one in (query, key))
        key, value = (jnp.repeat(one, 2, axis=2) for one in (key, value))
        s = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
        slopes = np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])[None, :, None, None]
        s = 2 * jnp.tanh(s / 2) - slopes * abs(near) + table[:, jnp.clip(near, -2, 2) + 2][None]
        same = SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None]
        weights = jax.nn.softmax(s, where=jnp.broadcast_to(same & seen[None, None], s.shape))
        weights = jnp.where((same & seen[None, None]).any(-1, keepdims=True), weights, 0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    twin = dense(num_kv_heads=2, attention_fn=by_hand)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        close(layer(x, segment_ids=SEGMENTS), twin(x))
        close(nnx.jit(lambda m, x, ids: m(x, segment_ids=ids))(layer, x, SEGMENTS), twin(x))
    moved = layer(x, segment_ids=SEGMENTS, input_positions=jnp.arange(L) + 7)
    close(moved, layer(x, segment_ids=SEGMENTS))  # only differences count
    again = nn.SparseMultiHeadAttention.from_dense(layer)
    close(again(x), layer(x))
    without = nn.SparseMultiHeadAttention.from_dense(layer, relative_bias=None)
    assert without.relative_bias is None and not np.allclose(without(x), layer(x))
    grads = nnx.grad(lambda m: m(x, segment_ids=SEGMENTS).sum())(layer)
    assert abs(grads["relative_bias"][...]).max() > 0

    thin = snn.SparseMultiHeadAttention(
        H,
        **{k: v for k, v in options.items() if k != "alibi"},
        alibi=(0.25, 1 / 16, 1 / 64, 1 / 256),
        **FLOAT64,
    )
    variables = thin.init(jax.random.key(0), x, pattern=pattern)
    assert variables["params"]["relative_bias"].shape == (H, 5)
    out, sown = thin.apply(
        variables,
        x,
        pattern=pattern,
        segment_ids=SEGMENTS,
        sow_weights=True,
        mutable="intermediates",
    )
    (weights,) = sown["intermediates"]["attention_weights"]
    assert out.shape == x.shape and weights.shape == (2, H, *pattern.values.shape)


def test_scale_sinks_and_a_function_of_the_scores():
    pattern, _ = mask(L, L)
    options = dict(scale=0.3, sinks=True, score_mod=lambda s, b, h, i, j: s + h.astype(s.dtype) / 4)
    layer = nn.SparseSelfAttention.from_dense(dense(num_kv_heads=2), pattern, **options)
    assert layer.sinks.shape == (H,) and not layer.sinks[...].any()
    assert nn.SparseSelfAttention.from_dense(dense(), pattern, sinks=np.False_).sinks is None
    layer.sinks[...] = inputs(H, seed=5)
    x = inputs(2, L, IN)
    q, k, v = (getattr(layer, name)(x) for name in ("query", "key", "value"))
    shift = jnp.broadcast_to(np.arange(H)[:, None] / 4, (H, pattern.nnz))
    own = sparse_attention(q, k, v, pattern, scale=0.3, sinks=layer.sinks[...], bias=shift)
    close(layer(x), layer.out(own))
    again = nn.SparseSelfAttention.from_dense(layer)
    assert (again.scale, again.score_mod) == (0.3, options["score_mod"])
    np.testing.assert_array_equal(again.sinks[...], layer.sinks[...])
    with pytest.raises(NotImplementedError, match="decode: no score_mod"):
        layer.init_cache(x.shape, jnp.float64)
        layer(x, decode=True, is_causal=True)
    with pytest.raises(NotImplementedError, match="pages takes no score_mod"):
        layer(x, paged_cache=nn.PagedCache.empty(np.zeros((2, 1), int), L, 2, 2))
    thin = snn.SparseSelfAttention(H, **options, **FLOAT64)
    made = jax.eval_shape(lambda: thin.init_with_output(jax.random.key(0), x, pattern=pattern))
    assert made[0].shape == x.shape and made[1]["params"]["sinks"].shape == (H,)
    with pytest.raises(TypeError, match="sinks: expected True or False, got 1.5"):
        nn.SparseSelfAttention.from_dense(dense(), pattern, sinks=1.5)
    with pytest.raises(TypeError, match="sinks: expected True or False, got 1.5"):
        snn.SparseSelfAttention(H, sinks=1.5).init(jax.random.key(0), x, pattern=pattern)


@pytest.mark.parametrize("each", [False, True])
def test_weights_are_sown(each):
    patterns, seen = zip(*[mask(L, L, seed=h * each) for h in range(H)], strict=True)
    layer = nn.SparseSelfAttention(
        H, IN, pattern=patterns if each else patterns[0], rngs=nnx.Rngs(0), **BIASED
    )
    x = inputs(2, L, IN)
    out = layer(x, sow_weights=True)
    close(out, layer(x))
    (found,) = nnx.pop(layer, nnx.Intermediate)["attention_weights"].get_value()
    query, key = layer.query(x), layer.key(x)
    s = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    full = jnp.broadcast_to(jnp.stack(seen)[None], s.shape)
    weights = jax.nn.softmax(s, where=full)
    for h in range(H):
        rows, columns = patterns[h * each].coordinates()
        own = found[h][:, 0] if each else found[:, h]
        close(own, weights[:, h, rows, columns])


def test_a_bias_beside_a_mask():
    pattern, _ = mask(L, L)
    layer = nn.SparseSelfAttention(H, IN, pattern=pattern, rngs=nnx.Rngs(0), **BIASED)
    x, bias = inputs(2, L, IN), inputs(H, pattern.nnz, seed=3)
    given = (np.random.default_rng(3).random((2, 1, 1, L)) < 0.8) | (np.arange(L) == 0)
    rows, columns = pattern.coordinates()
    left_out = jnp.where(jnp.asarray(given)[:, 0, 0, columns], 0, -jnp.inf)[:, None]
    close(layer(x, bias=bias, mask=given), layer(x, bias=bias[None] + left_out))
    close(layer(x, bias=bias * 0), layer(x))


def test_slopes_of_alibi():
    np.testing.assert_allclose(nn.alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(nn.alibi_slopes(1), [2.0**-8])
    of_head = jax.jit(lambda h: nn.alibi_slopes(8)[h])  # as a score_mod reads it
    assert of_head(2) == nn.alibi_slopes(8)[2]
    twelve = [*(2.0 ** -np.arange(1, 9)), *(2.0 ** -np.arange(0.5, 4))]
    np.testing.assert_allclose(nn.alibi_slopes(12), twelve, rtol=1e-6)
    with pytest.raises(ValueError, match="heads must be at least 1"):
        nn.alibi_slopes(0)
    with pytest.raises(TypeError, match="alibi_slopes: heads must be an integer, got 2.5"):
        nn.alibi_slopes(2.5)
    with pytest.raises(ValueError, match="an even D"):
        nn.rotary_embedding(jnp.ones((3, 2, 5)), jnp.arange(3))


def test_wrong_arguments_are_named():
    pattern, _ = mask(L, L)
    rngs = nnx.Rngs(0)
    op = "SparseMultiHeadAttention"
    layer = nn.SparseMultiHeadAttention(H, IN, pattern=pattern, rngs=rngs, **FLOAT64)
    x = inputs(2, L, IN)
    bare = nn.SparseMultiHeadAttention(H, IN, rngs=rngs, **FLOAT64)
    with pytest.raises(ValueError, match=f"{op}: pattern: expected with the layer or"):
        bare(x)
    with pytest.raises(ValueError, match=rf"{op}: pattern must have shape \[11, 11\]"):
        layer(x[:, 1:])
    with pytest.raises(ValueError, match=f"{op}: pattern: expected one or 4, got 2"):
        layer(x, pattern=[pattern, pattern])
    with pytest.raises(TypeError, match=f"{op}: pattern must be a SparseArray"):
        layer(x, pattern=np.ones((L, L)))
    with pytest.raises(NotImplementedError, match="nearest are CSR, CVS"):
        layer(x, pattern=pattern.asformat(COO))
    with pytest.raises(ValueError, match=r"mask must broadcast to \[2, 4, 12, 12\]"):
        layer(x, mask=jnp.ones((3, 1, 1, L)))
    vectors = masks.band(L, 3, format=CVS(4))
    heads = np.ones((1, L, 2, 8), np.float32)
    with pytest.raises(ValueError, match=r"in this shape by .reshape\(\*bias.shape\[:-2\], \*patt"):
        sparse_attention(heads, heads, heads, vectors, bias=np.zeros((2, L, L), np.float32))
    with pytest.raises(ValueError, match="inputs_k: expected with inputs_v"):
        layer(x, None, x)
    with pytest.raises(ValueError, match=rf"{op}: inputs_q must have shape \[..., length, 8\]"):
        layer(x[..., 1:])
    with pytest.raises(ValueError, match=r"inputs_v must have .* got \[2, 12, 7\]"):
        layer(x, x, x[..., 1:])
    with pytest.raises(ValueError, match=f"{op}: input_positions: the layer has no rotary"):
        layer(x, input_positions=jnp.arange(L))
    with pytest.raises(ValueError, match=rf"{op}: segment_ids must have shape \[2, length\]"):
        layer(x, segment_ids=jnp.zeros((3, L), int))
    with pytest.raises(ValueError, match=f"{op}: alibi must be a bool or 4 slopes"):
        nn.SparseMultiHeadAttention(H, IN, alibi=[0.5], rngs=rngs)
    with pytest.raises(ValueError, match="attention_fn is sparse_attention"):
        nn.SparseMultiHeadAttention(H, IN, attention_fn=lambda: 0, rngs=rngs)
    with pytest.raises(TypeError, match="schedule must be a Schedule"):
        nn.SparseMultiHeadAttention(H, IN, schedule=1, rngs=rngs)
    with pytest.raises(TypeError, match="layer must be an nnx.MultiHeadAttention"):
        nn.SparseMultiHeadAttention.from_dense(nnx.Linear(3, 4, rngs=rngs), pattern)
    with pytest.raises(ValueError, match="rngs: expected, for the dropout"):
        nn.SparseMultiHeadAttention.from_dense(dense(dropout_rate=0.5), pattern)
    drops = nn.SparseSelfAttention(
        H, IN, pattern=pattern, dropout_rate=0.5, keep_rngs=False, rngs=rngs
    )
    with pytest.raises(ValueError, match="deterministic: expected with the layer or the call"):
        drops(x.astype(jnp.float32))
    with pytest.raises(ValueError, match="rngs: expected, for the dropout"):
        drops(x.astype(jnp.float32), deterministic=False)
    with pytest.raises(ValueError, match=f"{op}: pattern: expected with the call, got None"):
        snn.SparseMultiHeadAttention(4).init(jax.random.key(0), x, pattern=None)
    with pytest.raises(ValueError, match="3 heads do not divide 8 features"):
        snn.SparseMultiHeadAttention(3).init(jax.random.key(0), x, pattern=pattern)
