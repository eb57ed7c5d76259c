"""Decoding with a cache: row by row what the attention layers give for a whole sequence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_twin import attention_of_flax
from flax import linen, nnx
from tolerance import close

from sgap_jax import BCSR, CSR, CVS, SparseArray, masks, nn
from sgap_jax.nn import linen as snn

L, H, IN = 12, 4, 8
FLOAT64 = dict(param_dtype=jnp.float64)
X = jnp.asarray(np.random.default_rng(1).standard_normal((2, L, IN)))


@pytest.fixture(autouse=True)
def random_numbers_that_compile_quickly():
    with jax.default_prng_impl("unsafe_rbg"):
        yield


def stored(seed=0):
    return np.random.default_rng(seed).random((L, L)) < 0.3


def patterns(format, each=False):
    """(pattern, dense causal mask): entries above the diagonal too, where vectors have them; the
    diagonal, as Flax has another answer for empty rows."""
    made, seen = [], []
    for seed in range(H if each else 1):
        causal = np.tril(stored(seed) | np.eye(L, dtype=bool))
        made.append(SparseArray.from_dense(causal.astype(np.float32), format=format))
        height, width = (*format.block_shape, 1, 1)[:2]
        tiles = np.zeros((L, L), bool)
        tiles[tuple(np.argwhere(causal).T // [[height], [width]])] = True
        seen.append(np.tril(tiles.repeat(height, 0).repeat(width, 1)[:L, :L]))
    return made if each else made[0], jnp.asarray(np.stack(seen))[None]


def as_flax_wants(function):
    """Its decoding compares int64 with int32, its LayerNorm multiplies by Python's numbers."""

    def run(*args, **options):
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **options)

    return run


def at_once(layer, x, **options):
    """A call of a layer in one program: each of its steps would be one."""
    return nnx.jit(lambda layer, x: layer(x, **options))(layer, x)


def one_by_one(layer, x, masks=None, **options):
    """[batch, length, ...]: each position in turn, in one compiled scan."""
    graph, cache, rest = nnx.split(layer, nnx.Cache, ...)

    @jax.jit
    def run(cache, rest, x):
        def step(cache, now):
            layer = nnx.merge(graph, cache, rest)
            y = layer(now[0][:, None], mask=now[1], **options)
            return nnx.state(layer, nnx.Cache), y[:, 0]

        rows = jnp.ones((x.shape[1], 1, 1, 1, 1), bool) if masks is None else masks
        return jax.lax.scan(step, cache, (jnp.swapaxes(x, 0, 1), rows))

    cache, y = run(cache, rest, x)
    nnx.update(layer, cache)
    return jnp.swapaxes(y, 0, 1)


@nnx.jit
def step(layer, x):
    return layer(x)


def steps(layer, x):
    """As `one_by_one`, in a program for one position that more than one test can use."""
    return jnp.concatenate([step(layer, x[:, t : t + 1]) for t in range(x.shape[1])], axis=1)


def layer_of(pattern, **options):
    options = dict(decode=True, rngs=nnx.Rngs(0)) | FLOAT64 | options
    return nn.SparseSelfAttention(H, IN, pattern=pattern, **options)


@pytest.mark.parametrize("format, each, kv_heads", [(CSR, True, 2), (CVS(5), False, 4)])
def test_positions_are_rows_of_the_whole(format, each, kv_heads):
    pattern, seen = patterns(format, each)
    twin = nnx.MultiHeadAttention(
        *(H, IN), num_kv_heads=kv_heads, decode=True, rngs=nnx.Rngs(0), **FLOAT64,
        attention_fn=attention_of_flax, bias_init=nnx.initializers.normal(),
    )  # fmt: skip
    layer = nn.SparseMultiHeadAttention.from_dense(twin, pattern)
    assert layer.decode
    layer.init_cache(X.shape, jnp.float64)
    whole = at_once(twin, X, mask=seen, decode=False)
    close(at_once(layer, X, is_causal=True, decode=False), whole)
    close(one_by_one(layer, X, is_causal=True), whole)


def test_several_positions_at_a_time():
    layer = layer_of(patterns(BCSR(3, 2))[0])
    whole = at_once(layer, X, is_causal=True, decode=False)
    # Two batch axes, none, and one.
    for x, want in ((X[None], whole[None]), (X[0], whole[0]), (X, whole)):
        layer.init_cache(x.shape, jnp.float64)
        decode = nnx.jit(lambda layer, x: layer(x, is_causal=True))
        parts = [decode(layer, x[..., a : a + 6, :]) for a in (0, 6)]
        close(jnp.concatenate(parts, axis=-2), want)
        assert layer.cache_index[...] == L
    assert decode(layer, X[:, :0]).shape == (2, 0, IN) and layer.cache_index[...] == L


def test_the_cache_is_flaxs_and_past_its_end_the_last_position_is_overwritten():
    pattern, seen = patterns(CSR)
    twin = nnx.MultiHeadAttention(
        H, IN, decode=True, rngs=nnx.Rngs(0), attention_fn=attention_of_flax, **FLOAT64
    )
    layer = nn.SparseMultiHeadAttention.from_dense(twin, pattern)
    x = jnp.concatenate([X, 2 * X[:, :3]], axis=1)
    rows = jnp.moveaxis(seen, 2, 0)[:, :, :, None]  # [L, 1, 1, 1, L]
    rows = jnp.concatenate([rows, *3 * [rows[-1:]]])
    for one in (layer, twin):
        one.init_cache(X.shape, jnp.float64)
    close(one_by_one(layer, x), as_flax_wants(one_by_one)(twin, x, rows))
    assert layer.cache_index[...] == twin.cache_index[...] == L + 3
    for name in ("cached_key", "cached_value"):
        close(getattr(layer, name)[...], getattr(twin, name)[...])


def test_the_last_index_of_all_stays():
    layer = nn.SparseSelfAttention(H, IN, pattern=patterns(CSR)[0], decode=True, rngs=nnx.Rngs(0))
    layer.init_cache(X.shape)
    layer.cache_index[...] = jnp.int32(2**31 - 2)
    for _ in range(2):
        at_once(layer, X[:, :1].astype(jnp.float32))
        assert layer.cache_index[...] == 2**31 - 1


@pytest.mark.parametrize("prompt", [10, L])
def test_several_positions_over_the_end(prompt):
    layer = layer_of(patterns(CSR)[0], bias_init=nnx.initializers.normal())
    x = jnp.concatenate([X, 2 * X], axis=1)[:, : prompt + 5]
    layer.init_cache(X.shape, jnp.float64)
    want = steps(layer, x)
    cache = [getattr(layer, name)[...] for name in ("cached_key", "cached_value", "cache_index")]
    layer.init_cache(X.shape, jnp.float64)
    steps(layer, x[:, :prompt])
    got = layer(x[:, prompt:])  # eagerly
    fit = L - 1 - prompt
    if fit > 0:
        close(got[:, :fit], want[:, prompt : prompt + fit])
    close(got[:, -1], want[:, -1])
    # What another overwrites sees no key.
    between = got[:, max(fit, 0) : -1]
    close(between, jnp.broadcast_to(layer.out.bias[...], between.shape))
    close([layer.cached_key[...], layer.cached_value[...], layer.cache_index[...]], cache)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_cache_of_bfloat16(compute):
    pattern, _ = patterns(CVS(4))
    layer = layer_of(pattern, dtype=jnp.dtype(compute), param_dtype=jnp.float32)
    x = X.astype(compute)
    layer.init_cache(x.shape, jnp.bfloat16)
    got = one_by_one(layer, x, is_causal=True)
    assert got.dtype == compute and layer.cached_key[...].dtype == jnp.bfloat16
    close(got, at_once(layer, x, is_causal=True, decode=False), 0.03)


def test_masks_and_dropout():
    pattern, _ = patterns(CVS(4))
    layer = layer_of(pattern, dropout_rate=1e-12, deterministic=True, num_kv_heads=2)
    layer.init_cache(X.shape, jnp.float64)
    padding = jnp.asarray(np.random.default_rng(2).random((2, 1, 1, L)) < 0.7)
    whole = at_once(layer, X, mask=padding, is_causal=True, decode=False)
    close(at_once(layer, X[:, :7], mask=padding, is_causal=True), whole[:, :7])
    layer.init_cache(X.shape, jnp.float64)
    # The steps of dropout, at a rate of nearly nothing.
    rows = jnp.stack(L * [padding])
    dropping = dict(deterministic=False, rngs=lambda: jax.random.key(0))
    close(one_by_one(layer, X, rows, is_causal=True, **dropping), whole)
    layer.init_cache(X.shape, jnp.float64)
    layer.dropout_rate = 0.5
    draw = nnx.jit(lambda layer: layer(X[:, :7], is_causal=True, deterministic=False))
    assert not np.allclose(*(draw(layer)[:, 0] for _ in range(2)))


def test_gradients():
    pattern, _ = patterns(CSR)
    layer = layer_of(pattern)
    layer.init_cache(X.shape, jnp.float64)
    # In two calls, the second of which attends to keys that the first has made.
    apart = lambda layer, x: jnp.concatenate([layer(x[:, :7]), layer(x[:, 7:])], axis=1)
    together = lambda layer, x: layer(x, decode=False)
    found = []
    for of in (apart, together):
        loss = lambda layer, x, of=of: jnp.sum(jnp.sin(of(layer, x)))
        params, dx = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(layer, X)
        found.append((nnx.to_pure_dict(params), dx))
    close(*found)


def test_structures_that_are_traced_are_read_up_to_the_query():
    whole = SparseArray.from_dense((stored() | np.eye(L, dtype=bool)).astype(np.float32))
    layer = layer_of(None)
    layer.init_cache(X.shape, jnp.float64)
    decode = nnx.jit(lambda layer, x, pattern: layer(x, pattern=pattern))
    got = jnp.concatenate([decode(layer, X[:, t : t + 1], whole) for t in range(L)], axis=1)
    close(got, at_once(layer, X, pattern=masks.causal(whole), decode=False))
    # Rows without keys, and no entries at all, give the bias of the output.
    empty = SparseArray.from_dense(np.zeros((L, L), np.float32))
    close(at_once(layer, X[:, :2], pattern=empty), jnp.zeros((2, 2, IN)))


def test_linen():
    pattern, seen = patterns(CVS(4))
    options = dict(normalize_qk=True, decode=True, **FLOAT64)
    twin = linen.MultiHeadDotProductAttention(H, attention_fn=attention_of_flax, **options)
    layer = snn.SparseSelfAttention(H, **options)
    variables = as_flax_wants(jax.jit(twin.init))(jax.random.key(0), X, mask=seen)
    init = lambda: layer.init(jax.random.key(0), X, pattern=pattern)
    own = as_flax_wants(jax.eval_shape)(init)
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, variables)
    empty = as_flax_wants(jax.jit(lambda: init()["cache"]))()
    params, caches = variables["params"], [empty, variables["cache"]]

    @as_flax_wants
    @jax.jit
    def both(caches, x, pattern, mask):
        given = [dict(pattern=pattern, is_causal=True), dict(mask=mask)]
        made = [
            one.apply({"params": params, "cache": cache}, x, mutable=["cache"], **options)
            for one, cache, options in zip((layer, twin), caches, given, strict=True)
        ]
        return [y for y, _ in made], [state["cache"] for _, state in made]

    rows = []
    for t in range(L):
        outs, caches = both(caches, X[:, t : t + 1], pattern, seen[:, :, t : t + 1])
        close(*outs)
        rows.append(outs[0])
    close(*caches)

    @as_flax_wants
    @partial(jax.jit, static_argnames="is_causal")
    def several(cache, x, **options):
        variables = {"params": params, "cache": cache}
        y, state = layer.apply(variables, x, pattern=pattern, mutable=["cache"], **options)
        return y, state["cache"]

    first, cache = several(empty, X[:, :6], is_causal=True)
    second, cache = several(cache, X[:, 6:], is_causal=True)
    close([jnp.concatenate([first, second], axis=1), cache], [jnp.concatenate(rows, 1), caches[0]])
    with pytest.raises(ValueError, match="decode: pattern: expected no key after its query"):
        several(empty, X[:, :1])
    halves = {name: x if x.ndim == 0 else x.astype(jnp.bfloat16) for name, x in cache.items()}
    halves["cache_index"] = jnp.int32(6)
    y, cache = several(halves, X[:, 6:], is_causal=True)
    assert y.dtype == jnp.float64 and cache["cached_key"].dtype == jnp.bfloat16
    close(y, second, 0.05)


def test_wrong_arguments_are_named():
    op = "SparseSelfAttention: decode"
    pattern, _ = patterns(CSR)
    layer = layer_of(pattern)
    x = X[:, :1]
    with pytest.raises(ValueError, match=rf"{op}: no cache yet; init_cache\(inputs.shape\)"):
        at_once(layer, x)
    layer.init_cache(X.shape, jnp.float64)
    with pytest.raises(ValueError, match=rf"{op}: the cache takes .* \[2, up to 12, 4, 2\], got"):
        at_once(layer, X[:1, :1])
    with pytest.raises(ValueError, match=r"got \[2, 15, 4, 2\] for 15 queries"):
        at_once(layer, jnp.zeros((2, L + 3, IN)))
    cross = nn.SparseMultiHeadAttention(H, IN, decode=True, rngs=nnx.Rngs(0), **FLOAT64)
    cross.init_cache(X.shape, jnp.float64)
    with pytest.raises(ValueError, match=r"got \[2, 2, 4, 2\] for 1 queries"):
        nnx.jit(lambda cross: cross(x, X[:, :2], pattern=pattern))(cross)
    with pytest.raises(ValueError, match=rf"{op}: pattern must have shape \[12, 12\] .* \[3, 3\]"):
        at_once(layer, x, pattern=masks.band(3, 1))
    for wide in (masks.band(L, 3), patterns(CVS(4))[0]):
        with pytest.raises(ValueError, match=f"{op}: pattern: expected no key after its query"):
            at_once(layer, x, pattern=wide)
        at_once(layer, x, pattern=wide, is_causal=True)
    before = jnp.copy(layer.cached_key[...])
    with pytest.raises(ValueError, match=r"mask must broadcast to \[2, 4, 1, 12\]"):
        layer(2 * x, mask=jnp.ones((3, 1, 1, L)))
    with pytest.raises(ValueError, match="pattern: expected one or 4, got 2"):
        layer(2 * x, pattern=[pattern, pattern])
    # What is refused leaves the cache as it is.
    assert layer.cache_index[...] == 2
    close(layer.cached_key[...], before)
