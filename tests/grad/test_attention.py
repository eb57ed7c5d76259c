"""Properties of sparse_attention's derivatives beyond those that every operation has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_twin import dense_mask, scatter, twin
from battery import cast, rounded
from jax import export
from jax.sharding import PartitionSpec as P

from sgap_jax import (
    CSR,
    CVS,
    CpuTile,
    OctetTile,
    Reference,
    SparseArray,
    Unfused,
    sparse_attention,
)

MASK = np.random.default_rng(0).random((42, 37)) < 0.3
MASK[5], MASK[16:24] = False, False  # a row, and all rows of a vector
SCHEDULES = [None, CpuTile(nonzeros=32), Reference(), Unfused()]


def pattern(length, mask=MASK):
    format = CSR if length is None else CVS(length)
    return SparseArray.from_dense(mask.astype(np.float32), format=format)


def operands(dtype, heads=4, key_heads=2, widths=(8, 5), seed=0):
    rng, (L, S), (D, Dv) = np.random.default_rng(seed), MASK.shape, widths
    sizes = ((2, L, heads, D), (2, S, key_heads, D), (2, S, key_heads, Dv))
    return [cast(rng.standard_normal(size), dtype) for size in sizes]


def loss(attention):
    return lambda *x: sum(jnp.sum(jnp.sin(jnp.where(jnp.isinf(y), 0, y))) for y in attention(*x))


def close(actual, expected, tolerance):
    for a, b in zip(actual, expected, strict=True):
        size = max(float(jnp.abs(b).max(initial=0)), 1e-3)
        np.testing.assert_allclose(
            np.asarray(a).astype(np.float64), b, rtol=0, atol=tolerance * size
        )


GRADIENTS = [
    *((length, "float32", None) for length in (None, 4, 8, 20)),
    *((8, dtype, None) for dtype in ("bfloat16", "float16")),
    (16, "float64", None),
    *((V, "bfloat16", OctetTile(V, tile_n=32, tile_k=64)) for V in (4, 16)),
    (2, "float32", SCHEDULES[1]),
    *((8, "float32", schedule) for schedule in SCHEDULES[2:]),
]


@pytest.mark.seconds(test=5)
@pytest.mark.parametrize(("length", "dtype", "schedule"), GRADIENTS, ids=str)
def test_gradients_in_every_dtype(length, dtype, schedule):
    A = pattern(length)
    sizes = {None: (16, 16), 2: (5, 3), 4: (9, 80), 8: (32, 64), 16: (17, 16), 20: (48, 8)}
    widths = sizes[length]
    x = operands(dtype, widths=widths)
    wide = "float64" if dtype == "float64" else "float32"
    rng = np.random.default_rng(1)
    bias, sinks = (cast(rng.standard_normal(s), wide) for s in ((4, *A.values.shape), (4,)))

    def mine(q, k, v, bias, sinks):
        options = dict(bias=bias, sinks=sinks, return_lse=True, schedule=schedule)
        out, lse = sparse_attention(q, k, v, A, **options)
        return out.astype(wide), lse

    mask = dense_mask(A)[None, None]

    def dense(q, k, v, bias, sinks):
        return twin(q, k, v, mask, bias=scatter(A, bias)[None], sinks=sinks)

    alone = lambda *x: mine(*x, bias, sinks)  # without the bias's gradient
    found = jax.jit(jax.grad(loss(mine), range(5)))(*x, bias, sinks)
    of_keys = jax.jit(jax.grad(loss(alone), 1))(*x)  # of a program of its own
    assert [g.dtype for g in found] == [jnp.dtype(dtype)] * 3 + [jnp.dtype(wide)] * 2
    exact = [jnp.asarray(rounded(np.asarray(a, np.float64), "float64")) for a in (*x, bias, sinks)]
    expected = jax.jit(jax.grad(loss(dense), range(5)))(*exact)
    eps = float(jnp.finfo(dtype).eps)
    close(found, expected, 20 * max(eps, float(jnp.finfo(wide).eps)))
    np.testing.assert_array_equal(of_keys, found[1])


@pytest.mark.parametrize("length", [None, 8, 16])
def test_rows_of_several_blocks_of_keys(length):
    rng = np.random.default_rng(3)
    A = pattern(length, rng.random((32, 700)) < (0.8 if length is None else 0.1))
    assert np.diff(A.row_offsets).min() > 256
    q, k, v = (cast(rng.standard_normal((1, n, 1, 16)), "float32") for n in (32, 700, 700))
    k = k * jnp.linspace(0.1, 3, 700, dtype="float32")[None, :, None, None]  # maxima rise
    mask = dense_mask(A)[None, None]
    both = (
        jax.jit(jax.value_and_grad(loss(f), (0, 1, 2)))
        for f in (
            lambda *x: sparse_attention(*x, A, return_lse=True),
            lambda *x: twin(*x, mask),
        )
    )
    (value, found), (exact, expected) = (f(q, k, v) for f in both)
    np.testing.assert_allclose(value, exact, rtol=1e-4)
    close(found, expected, 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_of_rows_and_keys_whatever_the_order_of_columns(dtype):
    """A traced structure is not checked: its columns may come in any order."""
    rng, (L, S, H, D, V) = np.random.default_rng(4), (64, 90, 2, 16, 2)
    A = pattern(V, rng.random((L, S)) < 0.3)
    offsets, columns = np.asarray(A.row_offsets), np.asarray(A.column_indices)
    order = np.concatenate(
        [i + rng.permutation(j - i) for i, j in zip(offsets, offsets[1:], strict=False)]
    )
    q, k, v, dout = (cast(rng.standard_normal((1, n, H, D)), dtype) for n in (L, S, S, L))
    out, lse = sparse_attention(q, k, v, A, return_lse=True)
    absent = jnp.zeros((1, 0), "float32"), jnp.zeros((1, 0), jnp.int32)
    sizes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    sizes.append(jax.ShapeDtypeStruct((1, H, len(columns), V), jnp.float32))
    call = jax.ffi.ffi_call("sgap_attention_backward_cvs_v1", sizes)
    attrs = dict(vector_length=np.int64(V), scale=0.25, is_causal=False, wrt_bias=True)

    def gradients(columns, pieces):
        operands = (dout, jnp.zeros_like(lse), q, k, v, *absent, out, lse, A.row_offsets)
        pack = dtype == "bfloat16"
        return call(*operands, jnp.asarray(columns), **attrs, pieces=np.int64(pieces), pack=pack)

    *expected, dbias = gradients(columns, 1)
    for pieces in (2, 3, 7):
        *found, of_entries = gradients(columns[order], pieces)
        close(found, [x.astype("float32") for x in expected], 1e-2 if dtype == "bfloat16" else 1e-5)
        np.testing.assert_allclose(of_entries, np.asarray(dbias)[:, :, order], atol=1e-6)


@pytest.mark.parametrize(("length", "schedule"), [(None, None), (8, None), (8, Unfused())])
def test_masked_rows_have_zero_gradients(length, schedule):
    A = pattern(length)
    x = operands("float64")
    bias = jnp.asarray(
        np.where(np.random.default_rng(2).random(A.values.shape) < 0.3, -np.inf, 0.5)
    )
    lengths = jnp.asarray([37, 0], jnp.int32)
    options = dict(bias=bias, is_causal=True, key_value_seq_lengths=lengths, schedule=schedule)
    f = loss(lambda *x: sparse_attention(*x, A, return_lse=True, **options))
    dq, dk, dv = map(np.asarray, jax.jit(jax.grad(f, (0, 1, 2)))(*x))
    assert all(np.isfinite(g).all() for g in (dq, dk, dv))
    assert not dq[:, 16:24].any() and not dq[1].any() and not dk[1].any() and not dv[1].any()
    assert dq[0].any() and dk[0].any() and dv[0].any()
    kept = dense_mask(A, is_causal=True) & ~np.isneginf(
        np.where(dense_mask(A), scatter(A, bias), -np.inf)
    )
    kept = np.stack([kept, np.zeros_like(kept)])[:, None]
    b = jnp.where(jnp.isneginf(scatter(A, bias)), 0, scatter(A, bias))[None, None]
    expected = jax.jit(jax.grad(loss(lambda *x: twin(*x, kept, bias=b)), (0, 1, 2)))(*x)
    close((dq, dk, dv), expected, 1e-12)


def test_gradients_of_shared_biases():
    A, x, rng = pattern(8), operands("float64"), np.random.default_rng(3)
    leads = ((), (1,), (1, 1), (2, 1), (1, 4))
    biases = [jnp.asarray(rng.standard_normal((*lead, *A.values.shape))) for lead in leads]
    mask = dense_mask(A)[None, None]

    @jax.jit
    def both(biases):
        mine = lambda b: sparse_attention(*x, A, bias=b, return_lse=True)
        found = [jax.grad(loss(mine))(b) for b in biases]

        def dense(b):
            b = b.reshape(*(1,) * (2 + A.values.ndim - b.ndim), *b.shape)
            return twin(*x, mask, bias=scatter(A, b))

        return found, [jax.grad(loss(dense))(b) for b in biases]

    found, expected = both(biases)
    assert [g.shape for g in found] == [b.shape for b in biases]
    close(found, expected, 1e-12)


@pytest.mark.parametrize("schedule", [None, Unfused()], ids=str)
def test_a_sink_of_infinity_takes_everything(schedule):
    A, x = pattern(8), operands("float64")
    sinks = jnp.asarray([jnp.inf, 0.5, -jnp.inf, 1e3])

    def f(q, k, v, sinks):
        return sparse_attention(q, k, v, A, sinks=sinks, return_lse=True, schedule=schedule)

    @jax.jit
    def results(sinks):
        gradients = jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x)[0])), range(4))(*x, sinks)
        # Only head 1 contributes to the gradient of the keys that heads 0 and 1 share.
        rest = jax.grad(lambda k: jnp.sum(jnp.sin(f(x[0], k, x[2], sinks)[0][:, :, 1:])))(x[1])
        return f(*x, sinks), gradients, rest, jax.jvp(lambda s: f(*x, s)[1], (sinks,), (ones,))[1]

    ones = jnp.ones(4)
    (out, lse), (dq, dk, dv, dsinks), rest, along = results(sinks)
    assert not out[:, :, 0].any() and np.isposinf(lse[:, :, 0]).all() and out[:, :, 1].any()
    assert all(np.isfinite(g).all() for g in (dq, dk, dv, dsinks))
    assert not dq[:, :, 0].any() and dsinks[0] == 0 and dsinks[1] != 0
    close([dk], [rest], 1e-12)
    np.testing.assert_array_equal(along[:, :, 0], 1)  # lse is the sink there
    assert np.isfinite(along).all()


def test_scale_and_a_pattern_for_each_head():
    A, B = pattern(8), pattern(None, ~MASK)
    q, k, v = operands("float64", heads=2, key_heads=1)
    masks = np.stack([dense_mask(A), dense_mask(B)])[None]

    def mine(q, k, v, scale):
        return sparse_attention(q, k, v, (A, B), scale=scale, return_lse=True)

    def dense(q, k, v, scale):
        return twin(q, k, v, masks, scale=scale)

    x = (q, k, v, jnp.asarray(0.7))
    close(*(jax.jit(jax.grad(loss(f), range(4)))(*x) for f in (mine, dense)), 1e-11)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_a_scale_is_summed_in_float32(dtype):
    rng, A = np.random.default_rng(6), pattern(8, np.ones((256, 64), bool))
    q, k, v = (cast(rng.standard_normal((2, n, 4, 16)), dtype) for n in (256, 64, 64))
    # The gradient of lse in the scale: terms of one sign, most of which a 16-bit sum would lose.
    f = lambda scale, *x: jnp.sum(sparse_attention(*x, A, scale=scale, return_lse=True)[1])
    found = jax.grad(f)(jnp.float32(0.3), q, k, v)
    expected = jax.grad(f)(jnp.float32(0.3), *(x.astype("float32") for x in (q, k, v)))
    np.testing.assert_allclose(found, expected, rtol=20 * float(jnp.finfo(dtype).eps))
    # A factor with few significant digits in float16: only the product is rounded.
    near = sparse_attention(q, k, v, A, scale=jnp.float32(1e-3))
    tiny = sparse_attention(q * 4096, k, v, A, scale=jnp.float32(1e-3 / 4096))
    np.testing.assert_array_equal(tiny, near)


def test_the_transposes_of_the_linear_maps():
    # <J t, c> = <t, J^T c>, and the same for the backward pass, which is linear in the cotangent.
    A, x = pattern(8), operands("float64")
    f = lambda *x: sparse_attention(*x, A)
    t = operands("float64", seed=5)

    @jax.jit
    def maps(x, t):
        out, jvp = jax.linearize(f, *x)
        c = jnp.cos(out)
        back = jax.linear_transpose(jax.vjp(f, *x)[1], c)
        return c, jvp(*t), jax.linear_transpose(jvp, *t)(c), back(tuple(t))[0]

    c, forward, pulled, again = maps(x, t)
    np.testing.assert_allclose(np.vdot(forward, c), sum(map(np.vdot, t, pulled)), rtol=1e-12)
    np.testing.assert_allclose(again, forward, atol=1e-12)


def test_vmap_of_every_operand_and_of_the_structure():
    A, (q, k, v) = pattern(8), operands("float64")
    sinks = jnp.arange(4.0)
    f = jax.jit(
        jax.grad(lambda *x: jnp.sum(jnp.sin(sparse_attention(*x[:3], A, sinks=x[3]))), range(4))
    )
    many = [jnp.stack([x, 2 * x, x - 1]) for x in (q, k, v, sinks)]
    for axes in ((0, 0, 0, 0), (0, None, None, None), (None, 0, None, 0), (None, None, 0, None)):
        given = [
            x if a is None else m for a, x, m in zip(axes, (q, k, v, sinks), many, strict=True)
        ]
        found = jax.tree.map(np.asarray, jax.jit(jax.vmap(f, axes))(*given))
        for i in range(3):
            one = [
                x if a is None else m[i]
                for a, x, m in zip(axes, (q, k, v, sinks), many, strict=True)
            ]
            close([g[i] for g in found], f(*one), 1e-12)
    patterns = jax.tree.map(lambda *x: jnp.stack(x), A, A)
    close(
        jax.vmap(lambda A: sparse_attention(q, k, v, A))(patterns),
        [sparse_attention(q, k, v, A)] * 2,
        1e-12,
    )
    # Op by op all results of a call must have their shapes, also the gradients that it lacks.
    of_q = lambda A: jax.grad(lambda q: jnp.sum(jnp.sin(sparse_attention(q, k, v, A))))(q)
    close(jax.vmap(of_q)(patterns), [of_q(A)] * 2, 1e-12)


def test_vmap_of_patterns_with_what_their_sequences_share():
    """Models of a pattern each: what a call has one of for its two sequences is mapped too."""
    A, (q, k, v) = pattern(None), operands("float64")
    x = jnp.arange(4.0), jnp.linspace(-1, 1, 20).reshape(4, 5), jnp.ones(A.nnz)

    def loss(x, A, lengths):
        sinks, table, bias = x
        options = dict(sinks=sinks, relative_bias=table, bias=bias)
        options |= dict(key_value_seq_lengths=lengths)
        return jnp.sum(jnp.sin(sparse_attention(q, k, v, A, **options)))

    stack = lambda x, y: jax.tree.map(lambda *pair: jnp.stack(pair), x, y)

    @jax.jit
    def both(x):
        each, y = jax.value_and_grad(loss), jax.tree.map(lambda x: x / 2, x)
        lengths = jnp.asarray([30, 20], jnp.int32)
        found = jax.vmap(each)(stack(x, y), stack(A, A), lengths)
        of_patterns = jax.vmap(each, (None, 0, None))  # within: of each x, and of each length
        nested = jax.vmap(of_patterns, (0, None, 0))(stack(x, y), stack(A, A), lengths)
        nested = jax.tree.map(lambda x: x[:, 1], nested)
        return (found, nested), (stack(each(x, A, lengths[0]), each(y, A, lengths[1])),) * 2

    found, want = map(jax.tree.leaves, both(x))
    close(found, want, 1e-12)


def test_a_bias_of_no_entries_has_a_gradient():
    q, offsets, none = jnp.ones((1, 4, 1, 8)), jnp.zeros(5, jnp.int32), jnp.zeros(0, jnp.int32)

    def loss(bias, offsets, columns):
        A = SparseArray.from_arrays(jnp.ones(0), offsets, columns, shape=(4, 4))
        return jnp.sum(sparse_attention(q, q, q, A, bias=bias, schedule=Reference()))

    assert jax.jit(jax.grad(loss))(jnp.zeros((1, 0)), offsets, none).shape == (1, 0)


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_shard_map(spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    A, (q, k, v) = pattern(8), operands("float64", heads=4, key_heads=4)
    f = lambda q, k, v: sparse_attention(q, k, v, A)
    g = jax.shard_map(f, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    close([jax.jit(g)(q, k, v)], [f(q, k, v)], 1e-12)
    step = lambda f: jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)))(q, k, v)
    close(step(g), step(f), 1e-12)
    shared = jax.shard_map(  # one sequence of keys for all devices: its gradient is a sum over them
        lambda q, k, v: sparse_attention(q, k, v, A), mesh=mesh,
        in_specs=(P("x"), P(), P()), out_specs=P("x"),
    )  # fmt: skip
    whole = lambda q, k, v: jnp.concatenate([f(q[i : i + 1], k, v) for i in range(2)])
    k, v = k[:1], v[:1]
    step = lambda f: jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)))(q, k, v)
    close(step(shared), step(whole), 1e-12)


def test_second_derivatives_of_values_that_explicit_axes_split_by_features():
    """Types alone: the rules did not hold for them."""
    q, k, v = operands("float32")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    attend = lambda *x: jnp.sum(jnp.sin(sparse_attention(*x, pattern(None))))
    first = lambda q: jnp.sum(jax.grad(attend, 1)(q, k, v) ** 2)
    with jax.set_mesh(mesh):
        v = jax.device_put(v, P(None, None, None, "x"))
        assert jax.eval_shape(jax.grad(first), q).shape == q.shape


def test_export_and_remat():
    A, (q, k, v) = pattern(8), operands("float32")
    f = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(sparse_attention(*x, A) ** 2)))
    names = ("sgap_attention_cvs_v1", "sgap_attention_backward_cvs_v1")
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    restored = export.deserialize(export.export(f, disabled_checks=allowed)(q, k, v).serialize())
    jax.tree.map(np.testing.assert_array_equal, restored.call(q, k, v), f(q, k, v))
    # The pattern as an argument.
    g = jax.jit(lambda q, k, v, A: jax.grad(lambda q: jnp.sum(sparse_attention(q, k, v, A)))(q))
    text = export.export(g, disabled_checks=allowed)(q, k, v, A).serialize()
    np.testing.assert_array_equal(export.deserialize(text).call(q, k, v, A), g(q, k, v, A))
    remat = jax.value_and_grad(jax.checkpoint(lambda *x: jnp.sum(sparse_attention(*x, A) ** 2)))
    close(jax.tree.leaves(remat(q, k, v)), jax.tree.leaves(f(q, k, v)), 1e-6)


def test_other_platforms_run_the_steps():
    A, (q, k, v) = pattern(8), operands("float32")
    f = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(sparse_attention(*x, A))))
    text = f.trace(q, k, v).lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call" not in text or "sgap" not in text
