"""Attention over keys that the layer selects: against selections by loops and dense attention."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerance import close

from sgap_jax import nn
from sgap_jax.nn import linen as snn
from sgap_jax.nn import selection
from sgap_jax.schedules.machine import Machine, on_machine
from sgap_jax.select import scores as select_scores

L, H, IN, WIDTH = 13, 4, 8, 3
FLOAT64 = dict(param_dtype=jnp.float64)
X = jnp.asarray(np.random.default_rng(1).standard_normal((2, L, IN)))
BLOCKS = dict(block_size=3, num_blocks=3)
TOKENS = dict(top_k=4, index_heads=2, index_features=3)


@pytest.fixture(autouse=True)
def random_numbers_that_compile_quickly():
    with jax.default_prng_impl("unsafe_rbg"):
        yield


def softmax(scores, seen):
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def attention_by_hand(query, key, value, mask=None, **unused):
    """In float64, where Flax's own takes float32, and with zeros for a query without keys."""
    key, value = (jnp.repeat(x, query.shape[-2] // x.shape[-2], axis=-2) for x in (key, value))
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / np.sqrt(query.shape[-1])
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


def twin_of(kv_heads=2):
    return nnx.MultiHeadAttention(
        *(H, IN), qkv_features=H * WIDTH, num_kv_heads=kv_heads, decode=False, rngs=nnx.Rngs(0),
        attention_fn=attention_by_hand, bias_init=nnx.initializers.normal(), **FLOAT64,
    )  # fmt: skip


def block_layer(twin=None, **options):
    return nn.BlockSparseAttention.from_dense(twin or twin_of(), **(BLOCKS | options))


def token_layer(twin, **options):
    layer = nn.TopKSparseAttention(
        *(H, IN, H * WIDTH), num_kv_heads=twin.num_kv_heads, rngs=nnx.Rngs(3), **FLOAT64,
        **(TOKENS | options),
    )  # fmt: skip
    nnx.update(layer, nnx.state(twin, nnx.Param))
    return layer


LAYERS = {"blocks": block_layer, "tokens": token_layer}


def best(scores, count):
    """Of pairs (score, place): the places of the greatest, of equal ones the first."""
    return [place for _, place in sorted(scores, key=lambda pair: (-pair[0], pair[1]))[:count]]


def blocks_by_hand(layer, x, causal=True, lengths=None):
    """bool [B, H, L, L]: what `BlockSparseAttention` says of its scores, in loops."""
    q, k = np.asarray(layer.query(x)), np.asarray(layer.key(x))
    b, r, group = layer.block_size, layer.query_block, H // layer.num_kv_heads
    seen = np.zeros((len(x), H, L, L), bool)
    for s, g in np.ndindex(len(x), layer.num_kv_heads):
        end = L if lengths is None else int(lengths[s])
        heads = slice(g * group, (g + 1) * group)
        for i in range(L):
            first = i // r * r
            mine = q[s, first : first + r, heads].reshape(-1, WIDTH).mean(0)
            scores = []
            for J in range(-(-end // b)):
                if causal and J > i // b:
                    continue
                score = mine @ k[s, J * b : min((J + 1) * b, end), g].mean(0)
                scores.append((np.inf if J in (0, i // b) else score, J))
            for J in best(scores, layer.num_blocks):
                for j in range(J * b, min((J + 1) * b, end)):
                    seen[s, heads, i, j] = j <= i or not causal
    return seen


def tokens_by_hand(layer, x, causal=True, lengths=None):
    own = (layer.index_query, layer.index_key, layer.index_weight)
    q, k, w = (np.asarray(of(x).astype(layer.index_dtype or x.dtype), np.float64) for of in own)
    seen = np.zeros((len(x), H, L, L), bool)
    for s, i in np.ndindex(len(x), L):
        end = L if lengths is None else int(lengths[s])
        scores = [
            (sum(w[s, i, h] * max(q[s, i, h] @ k[s, j], 0.0) for h in range(q.shape[2])), j)
            for j in range(min(end, i + 1 if causal else L))
        ]
        seen[s, :, i, best(scores, layer.top_k)] = True
    return seen


SEEN = {"blocks": blocks_by_hand, "tokens": tokens_by_hand}


def stored(layer, x, **options):
    """bool [B, H, L, L]: the entries of the layer's own patterns."""
    pattern = layer.pattern(x, **options)
    lead = pattern.values.shape[:2]
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), pattern)
    dense = jax.vmap(lambda one: one.with_values(jnp.ones_like(one.values)).todense())(flat)
    dense = dense.reshape(*lead, L, L) != 0
    return np.repeat(np.asarray(dense), H // lead[1], axis=1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads, query_block", [(4, 1), (2, 3), (1, 1)])
def test_blocks_that_are_selected(kv_heads, query_block, causal):
    layer = block_layer(twin_of(kv_heads), query_block=query_block)
    for lengths in (None, np.array([L - 3, 5])):
        options = dict(is_causal=causal, key_value_seq_lengths=lengths)
        want = blocks_by_hand(layer, X, causal, lengths)
        inside = np.arange(L) < (np.full(2, L) if lengths is None else lengths)[:, None]
        got = stored(layer, X, **options) & inside[:, None, None]
        np.testing.assert_array_equal(got & np.tril(got) if causal else got, want)
        assert want.any(-1).all() and (want.sum(-1) <= 9).all()


def in_small_tiles(monkeypatch, count):
    """Tiles of about so many of the indexer's scores."""
    monkeypatch.setattr(select_scores, "_TILE_SCORES", count)
    monkeypatch.setattr(select_scores, "_LEAST_ROWS", 1)


@pytest.mark.parametrize("way", ["at once", "in tiles", "by the kernel"])
@pytest.mark.parametrize("causal", [True, False])
def test_tokens_that_are_selected(causal, way, monkeypatch):
    if way != "at once":  # as in longer sequences, in tiles where there is no kernel
        monkeypatch.setattr(selection, "_LEAST_ROWS", 1)
    if way == "in tiles":
        in_small_tiles(monkeypatch, 2 * L)
        dependent = lambda *operands, cpu, default: default(*operands)
        monkeypatch.setattr(jax.lax, "platform_dependent", dependent)
    layer = token_layer(twin_of())
    for lengths in (None, np.array([L - 3, 0])):
        options = dict(is_causal=causal, key_value_seq_lengths=lengths)
        want = tokens_by_hand(layer, X, causal, lengths)
        np.testing.assert_array_equal(stored(layer, X, **options), want)


@pytest.mark.parametrize("tiles", [True, False])
def test_an_indexer_in_bfloat16(tiles, monkeypatch):
    """The scores are those of rounded q, k and weights; decoding and linen select the same."""
    monkeypatch.setattr(selection, "_LEAST_ROWS", 1)
    options = TOKENS | dict(index_features=16, index_dtype=jnp.bfloat16)
    layer = token_layer(twin_of(), **options)
    with on_machine(Machine(matrix_tiles=tiles)):
        np.testing.assert_array_equal(stored(layer, X), tokens_by_hand(layer, X))
    whole, params = layer(X), nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    linen = snn.TopKSparseAttention(H, qkv_features=H * WIDTH, num_kv_heads=2, **options, **FLOAT64)
    close(linen.apply({"params": params}, X), whole)
    layer.init_cache(X.shape, jnp.float64)
    steps = [layer(x, decode=True) for x in jnp.split(X, [5], axis=1)]
    close(jnp.concatenate(steps, axis=1), whole)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("causal", [True, False])
def test_layers_are_dense_attention_with_the_selection_as_mask(name, causal):
    twin = twin_of()
    layer = LAYERS[name](twin)
    loss = lambda layer, x, options: jnp.sum(jnp.sin(layer(x, **options)))
    for lengths in (None, np.array([L - 3, 0])):
        seen = SEEN[name](layer, X, causal, lengths)
        call = lambda layer, x, given: loss(layer, x, dict(is_causal=causal, **given))
        given = {"key_value_seq_lengths": lengths}
        found = nnx.jit(nnx.value_and_grad(call, argnums=(0, 1)))(layer, X, given)
        mask = {"mask": jnp.asarray(seen)}
        want = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(twin, X, mask)
        of_layer = nnx.to_pure_dict(found[1][0])
        of_indexer = {key: of_layer.pop(key) for key in list(of_layer) if key.startswith("index")}
        # The selection has no gradient.
        assert not any(jnp.any(x != 0) for x in jax.tree.leaves(of_indexer))
        close(
            (found[0], of_layer, found[1][1]), (want[0], nnx.to_pure_dict(want[1][0]), want[1][1])
        )


@pytest.mark.parametrize("name", LAYERS)
def test_leading_axes(name):
    layer = LAYERS[name](twin_of(1))
    want = layer(X)
    close(layer(X[0]), want[0])
    close(layer(X[None]), want[None])
    assert layer(X[:, :0]).shape == (2, 0, IN) and layer(X[:0]).shape == (0, L, IN)


def dense_divergence(layer, one, x, seen, lengths):
    """The loss with dense arrays; `one` has the indexer."""
    q, k = np.asarray(layer.query(x)), np.asarray(layer.key(x))
    k = np.repeat(k, H // layer.num_kv_heads, axis=2)
    logits = np.where(seen, np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH), -1e300)
    p = softmax(logits, seen).mean(1)
    products = jnp.einsum("bqhd,bkd->bqhk", one.index_query(x), one.index_key(x))
    scores = jnp.sum(one.index_weight(x)[..., None] * jax.nn.relu(products), 2) / np.sqrt(6.0)
    logs = jax.nn.log_softmax(jnp.where(seen[:, 0], scores, -1e300))
    terms = jnp.where(p > 0, p * (jnp.log(jnp.where(p > 0, p, 1.0)) - logs), 0.0).sum(-1)
    inside = np.arange(L) < (np.full(2, L) if lengths is None else lengths)[:, None]
    return jnp.sum(jnp.where(inside, terms, 0.0)) / float(inside.sum())


def index_split(layer):
    names = ("index_query", "index_key", "index_weight")
    is_index = lambda path, _: path[0] in names
    return nnx.split(layer, is_index, ...)


@pytest.mark.parametrize("lengths", [None, np.array([L - 3, 0])])
def test_the_loss_of_the_indexer(lengths):
    layer = token_layer(twin_of())
    seen = tokens_by_hand(layer, X, True, lengths)
    graph, own, rest = index_split(layer)

    def loss(own, rest, x):
        one = nnx.merge(graph, own, rest)
        out, loss = one(x, key_value_seq_lengths=lengths, return_indexer_loss=True)
        return loss, out

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (got, out), (of_indexer, of_others, dx) = grad(own, rest, X)

    def by_hand(own):
        one = nnx.merge(graph, own, rest)
        return dense_divergence(layer, one, X, seen, lengths)

    want, gradient = jax.value_and_grad(by_hand)(own)
    close((got, nnx.to_pure_dict(of_indexer)), (want, nnx.to_pure_dict(gradient)))
    assert got > 0.01 and all(jnp.any(x != 0) for x in jax.tree.leaves(of_indexer))
    assert not any(jnp.any(x != 0) for x in jax.tree.leaves((of_others, dx)))
    close(out, layer(X, key_value_seq_lengths=lengths))


def test_the_loss_over_nothing_is_zero():
    graph, own, rest = index_split(token_layer(twin_of()))

    def loss(own, x):
        return nnx.merge(graph, own, rest)(x, return_indexer_loss=True)[1]

    grad = jax.value_and_grad(loss)
    found = jax.jit(grad)(own, X[:0]), jax.jit(loss)(own, X[:, :0])
    assert not any(np.any(np.asarray(x) != 0) for x in jax.tree.leaves(found))


# ---- decoding -----------------------------------------------------------------------------------


@nnx.jit
def step(layer, x):
    return layer(x, decode=True)


@pytest.mark.parametrize("name", LAYERS)
def test_positions_one_by_one_are_those_of_a_whole_pass(name):
    layer = LAYERS[name](twin_of())
    whole = layer(X)
    layer.init_cache(X.shape, jnp.float64)
    close(jnp.concatenate([step(layer, X[:, t : t + 1]) for t in range(L)], axis=1), whole)
    assert layer.cache_index[...] == L
    # Back by some positions, of which others come first.
    layer.cache_index[...] = jnp.int32(5)
    for t in range(4):
        step(layer, -X[:, t : t + 1])
    layer.cache_index[...] = jnp.int32(5)
    close(
        jnp.concatenate([step(layer, X[:, t : t + 1]) for t in range(5, L)], axis=1), whole[:, 5:]
    )


@pytest.mark.parametrize("name", LAYERS)
def test_the_last_index_of_all_stays(name):
    layer = LAYERS[name](twin_of())
    layer.init_cache(X.shape, jnp.float64)
    layer.cache_index[...] = jnp.int32(2**31 - 2)
    first, second = (step(layer, X[:, t : t + 2]) for t in (0, 0))
    assert layer.cache_index[...] == 2**31 - 1
    close(first, second)


@pytest.mark.parametrize("name", LAYERS)
def test_several_positions_at_a_time_and_past_the_end(name, monkeypatch):
    in_small_tiles(monkeypatch, 2 * L)
    layer = LAYERS[name](twin_of())
    whole = layer(X)
    for x, want in ((X, whole), (X[None], whole[None]), (X[0], whole[0])):
        layer.init_cache(x.shape, jnp.float64)
        parts = [step(layer, x[..., a:b, :]) for a, b in ((0, 7), (7, 8), (8, L))]
        close(jnp.concatenate(parts, axis=-2), want)
    assert step(layer, x[..., :0, :]).shape == (0, IN) and layer.cache_index[...] == L
    more = jnp.concatenate([X, 2 * X[:, :3]], axis=1)
    layer.init_cache(X.shape, jnp.float64)
    want = jnp.concatenate([step(layer, more[:, t : t + 1]) for t in range(L + 3)], axis=1)
    layer.init_cache(X.shape, jnp.float64)
    step(layer, more[:, :10])
    got = step(layer, more[:, 10:])
    close((got[:, :2], got[:, -1]), (want[:, 10:12], want[:, -1]))
    # What another overwrites sees no key.
    close(got[:, 2:-1], jnp.broadcast_to(layer.out.bias[...], got[:, 2:-1].shape))


@pytest.mark.parametrize("name", LAYERS)
def test_a_cache_of_bfloat16_and_gradients_of_decoding(name):
    layer = LAYERS[name](twin_of())
    layer.init_cache(X.shape, jnp.bfloat16)
    got = jnp.concatenate([step(layer, X[:, t : t + 1]) for t in range(3)], axis=1)
    assert got.dtype == jnp.float64
    close(got, layer(X)[:, :3], 0.05)  # all keys so far are selected
    layer.init_cache(X.shape, jnp.float64)
    apart = lambda layer, x: jnp.concatenate(
        [layer(x[:, :7], decode=True), layer(x[:, 7:], decode=True)], axis=1
    )
    found = []
    for of in (apart, lambda layer, x: layer(x)):
        loss = lambda layer, x, of=of: jnp.sum(jnp.sin(of(layer, x)))
        params, dx = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(layer, X)
        found.append((nnx.to_pure_dict(params), dx))
    close(*found)


# ---- linen, memory, errors ----------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_linen(name):
    kinds = {"blocks": snn.BlockSparseAttention, "tokens": snn.TopKSparseAttention}
    own = BLOCKS if name == "blocks" else TOKENS
    options = dict(qkv_features=H * WIDTH, num_kv_heads=2, **own, **FLOAT64)
    layer, decoder = (kinds[name](H, decode=decode, **options) for decode in (False, True))
    twin = LAYERS[name](twin_of())
    params = nnx.to_pure_dict(nnx.state(twin, nnx.Param))
    made = decoder.init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, made["params"]) == jax.tree.map(jnp.shape, params)
    more = dict(return_indexer_loss=True) if name == "tokens" else {}
    lengths = np.array([L - 3, 5])
    for given in (dict(is_causal=False, **more), dict(key_value_seq_lengths=lengths)):
        close(layer.apply({"params": params}, X, **given), twin(X, **given))

    @jax.jit
    def next_ones(cache, x):
        out, state = decoder.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return out, state["cache"]

    cache, whole = made["cache"], twin(X)
    first, cache = next_ones(cache, X[:, :6])
    second, cache = next_ones(cache, X[:, 6:])
    close(jnp.concatenate([first, second], axis=1), whole)
    twin.init_cache(X.shape, jnp.float64)
    step(twin, X)
    close(cache, nnx.to_pure_dict(nnx.state(twin, nnx.Cache)))


@pytest.mark.parametrize("name", LAYERS)
def test_the_greatest_length_leaves_out_none(name):
    layer = LAYERS[name](twin_of())
    close(layer(X, key_value_seq_lengths=np.int32(2**31 - 1)), layer(X))


@pytest.mark.parametrize("name", LAYERS)
def test_no_array_of_length_by_length(name, monkeypatch):
    length = 512
    in_small_tiles(monkeypatch, 2 * length)
    layer = LAYERS[name](twin_of())
    graph, state = nnx.split(layer)
    loss = lambda state, x: jnp.sum(nnx.merge(graph, state)(x))
    x = jax.ShapeDtypeStruct((1, length, IN), jnp.float64)
    gradient = jax.jit(jax.grad(loss)).trace(state, x)
    compiled = gradient.lower().compile().as_text()
    for text in (str(gradient.jaxpr), compiled):  # on every platform, and on this one
        shapes = re.findall(r"\[([\d,]+)\]", text)
        greatest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
        # For blocks: a score for each query and block, 512 x 171, in two groups.
        assert length * 8 <= greatest < length * length


def test_wrong_arguments_are_named():
    make = lambda **options: nn.BlockSparseAttention(2, 4, rngs=nnx.Rngs(0), **options)
    op = "BlockSparseAttention"
    for name, value, least in (("block_size", 0, 1), ("num_blocks", 1, 2), ("query_block", 0, 1)):
        with pytest.raises(ValueError, match=f"{op}: {name} must be at least {least}, got {value}"):
            make(**{name: value})
    with pytest.raises(TypeError, match=f"{op}: query_block must be an integer, got 2.0"):
        make(query_block=2.0)
    with pytest.raises(ValueError, match=f"{op}: query_block: expected a divisor of the block"):
        make(query_block=48)
    with pytest.raises(NotImplementedError, match=f"{op}: dropout_rate: the weights have no"):
        make(dropout_rate=0.1)
    with pytest.raises(NotImplementedError, match="dropout_rate"):
        nn.BlockSparseAttention.from_dense(
            nnx.MultiHeadAttention(2, 4, dropout_rate=0.1, decode=False, rngs=nnx.Rngs(0))
        )
    with pytest.raises(TypeError, match="from_dense: layer must be an nnx.MultiHeadAttention"):
        nn.BlockSparseAttention.from_dense(nnx.Linear(2, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=f"{op}: attention_fn is sparse_attention"):
        make(attention_fn=attention_by_hand)
    with pytest.raises(ValueError, match=f"{op}: in_kv_features: keys are of the same inputs"):
        make(in_kv_features=3)
    with pytest.raises(TypeError, match=f"{op}: schedule must be a Schedule"):
        make(schedule=3)
    for name in ("top_k", "index_heads", "index_features"):
        with pytest.raises(ValueError, match=f"TopKSparseAttention: {name} must be at least 1"):
            nn.TopKSparseAttention(2, 4, rngs=nnx.Rngs(0), **{name: 0})
    for dtype in ("int32", "float8_e4m3fn", "no dtype"):
        with pytest.raises(ValueError, match=f"index_dtype: expected None or one .* got '{dtype}'"):
            nn.TopKSparseAttention(2, 4, index_dtype=dtype, rngs=nnx.Rngs(0))
    for layer in (block_layer(), token_layer(twin_of())):
        op = type(layer).__name__
        with pytest.raises(ValueError, match=rf"{op}: inputs_q must have shape \[..., length, 8\]"):
            layer(X[..., :3])
        for lengths in (np.ones(3, int), np.ones(2)):
            with pytest.raises(ValueError, match=rf"{op}: key_value_seq_lengths must be .* \[2\]"):
                layer(X, key_value_seq_lengths=lengths)
        with pytest.raises(ValueError, match=f"{op}: decode: no cache yet"):
            layer(X, decode=True)
        layer.init_cache(X.shape, jnp.float64)
        for name, value in (("is_causal", False), ("key_value_seq_lengths", 3)):
            with pytest.raises(ValueError, match=f"{op}: decode: expected .* got {name}"):
                layer(X, decode=True, **{name: value})
        with pytest.raises(ValueError, match=rf"{op}: decode: the cache takes .* \[2, up to 13"):
            layer(X[:1], decode=True)
        assert layer.cache_index[...] == 0
    with pytest.raises(ValueError, match="return_indexer_loss: expected without decode"):
        layer(X, decode=True, return_indexer_loss=True)
    linen = partial(snn.BlockSparseAttention, 4)
    with pytest.raises(ValueError, match="3 heads of keys do not divide 4"):
        linen(num_kv_heads=3).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="num_blocks must be at least 2, got 1"):
        linen(num_blocks=1).init(jax.random.key(0), X)
