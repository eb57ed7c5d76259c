"""Several structures in one call: what a call for each gives, and on the CPU one custom call."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from native_call import kernel_isas, run

from sgap_jax import (
    BCSR,
    CSR,
    CVS,
    OctetTile,
    Reference,
    SparseArray,
    Unfused,
    gspmm,
    row_max,
    row_sum,
    sddmm,
    select,
    sparse_attention,
    sparse_softmax,
    spmm,
)
from sgap_jax.runtime.native import native

COUNT, M, K, D = 3, 24, 20, 8
NONE = np.zeros(0, np.int32)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


def structures(format, dtype="float32", grid=None):
    """Structures of one capacity, which fill it differently; the last one stores nothing."""
    height, width = format.block_shape + (1,) * (2 - len(format.block_shape))
    scores = normal(COUNT, -(-M // height), -(-K // width))
    lengths = jnp.asarray([scores.shape[2], scores.shape[2] // 2, 0], jnp.int32)
    pick = lambda x, n: select.top_k(x, 5, lengths=n, format=format, shape=(M, K))
    A = jax.vmap(pick)(scores, lengths)
    values = normal(*A.values.shape, seed=1).astype(dtype)
    return jax.vmap(lambda A, v: A.with_values(v))(A, values)


def one(A, i):
    return jax.tree.map(lambda x: x[i], A)


HEADS = lambda x: x[:, None, :]
# Functions of an array, of X [M, D] and of Y [K, D].
OPS = {
    "spmm": lambda A, X, Y: spmm(A, Y),
    "spmm transposed": lambda A, X, Y: spmm(A, X, transpose=True),
    "sddmm": lambda A, X, Y: sddmm(A, X, Y, scale=X[0, 0], weighted=True).values,
    "softmax": lambda A, X, Y: sparse_softmax(A, scale=0.5).values,
    "row_sum": lambda A, X, Y: row_sum(A),
    "row_max": lambda A, X, Y: jnp.where(jnp.isneginf(row_max(A)), 0, row_max(A)),
    "gspmm max": lambda A, X, Y: gspmm(A, Y, op="add", reduce="max"),
    "attention": lambda A, X, Y: sparse_attention(HEADS(X), HEADS(Y), HEADS(2 * Y), A),
}
CASES = [(op, CSR) for op in OPS] + [(op, CVS(4)) for op in OPS] + [("spmm", BCSR(4, 2))]


@pytest.mark.parametrize(("op", "format"), CASES, ids=str)
def test_results_and_gradients(op, format):
    A, X, Y = structures(format), normal(COUNT, M, D), normal(K, D)

    def value_and_gradients(A, X, Y, weights):
        of = lambda v, X, Y: jnp.vdot(OPS[op](A.with_values(v), X, Y), weights)
        return OPS[op](A, X, Y), jax.grad(of, (0, 1, 2))(A.values, X, Y)

    shape = jax.eval_shape(OPS[op], one(A, 0), X[0], Y).shape
    weights = normal(COUNT, *shape, seed=2)
    program = jax.jit(jax.vmap(value_and_gradients, (0, 0, None, 0)))
    found = program(A, X, Y, weights)
    alone = jax.jit(value_and_gradients)
    for i in range(COUNT):
        right = alone(one(A, i), X[i], Y, weights[i])
        for x, y in zip(jax.tree.leaves(one(found, i)), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)

    def tangents(A, X):
        of = lambda v, X: OPS[op](A.with_values(v), X, Y)
        return jax.jvp(of, (A.values, X), (A.values, X))

    forward = jax.jit(jax.vmap(tangents))
    first = jax.tree.map(lambda x: x[:1], (A, X))
    for several, single in (
        (program.lower(A, X, Y, weights), alone.lower(one(A, 0), X[0], Y, weights[0])),
        (forward.lower(A, X), forward.lower(*first)),
    ):
        several, single = several.as_text(), single.as_text()
        assert "stablehlo.while" not in several
        assert several.count("custom_call @sgap_") == single.count("custom_call @sgap_") > 0


def test_shared_operands_get_the_sum_of_the_gradients():
    A, X, Y = structures(CSR), normal(M, D), normal(K, D)

    def total(v, X, Y):
        products = jax.vmap(lambda A, v: spmm(A.with_values(v), Y) * X, (0, None))(A, v)
        return jnp.sum(products**2)

    def twin(v, X, Y):
        dense = jnp.stack([one(A, i).with_values(v).todense() for i in range(COUNT)])
        return jnp.sum((dense @ Y * X[None]) ** 2)

    operands = (A.values[0], X, Y)
    found, right = (jax.jit(jax.hessian(f, 2))(*operands) for f in (total, twin))
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-3)
    for f, g in zip(
        *(jax.jit(jax.grad(f, (0, 1, 2)))(*operands) for f in (total, twin)), strict=True
    ):
        np.testing.assert_allclose(f, g, rtol=1e-4, atol=1e-3)


def test_more_maps_around_and_inside():
    # Several elements for each structure; structures that other maps share; both.
    A, Y = structures(CSR), normal(2, COUNT, 4, K, D)
    inner = jax.vmap(spmm, (None, 0))
    found = jax.jit(jax.vmap(jax.vmap(inner), (None, 0)))(A, Y)
    dense = jnp.stack([one(A, i).todense() for i in range(COUNT)])
    right = jnp.einsum("sij,bsejk->bseik", dense, Y, precision="highest")
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    twice = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), A)
    found = jax.jit(jax.vmap(jax.vmap(spmm, (0, None))))(twice, Y[:, 0, 0])
    right = jnp.einsum("bsij,bjk->bsik", jnp.stack([dense, dense[::-1]]), Y[:, 0, 0])
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def test_other_schedules_and_none():
    A, Y = structures(CVS(4)), normal(K, D)
    plain = lambda A: spmm(A, Y, schedule=Reference())
    np.testing.assert_allclose(jax.vmap(plain)(A), jax.vmap(lambda A: spmm(A, Y))(A), atol=1e-5)
    nothing = jax.tree.map(lambda x: x[:0], A)
    assert jax.vmap(lambda A: spmm(A, Y))(nothing).shape == (0, M, D)
    k = normal(COUNT, K, 1, D)  # no element along a mapped axis, and sequences inside
    attend = lambda q, A: sparse_attention(q, k, k, A)
    for pattern in (one(A, 0), jax.tree.map(lambda x: x[:, None], A)):
        q = jnp.zeros((0, COUNT, M, 1, D), jnp.float32)
        assert jax.vmap(attend, (0, None))(q, pattern).shape == q.shape


PATTERNS = [
    ((4,), 2, CSR, "float32", None),
    ((2,), 2, CVS(4), "float64", Unfused()),
    ((3, 4), 2, CSR, "float32", None),
    ((3, 2), 2, CVS(4), "bfloat16", OctetTile(4, tile_n=32, tile_k=64)),
    ((1, 2), 2, CVS(4), "bfloat16", None),
    ((3, 1), 4, CSR, "float32", None),
    ((1, 1), 4, BCSR(4, 2), "float32", None),
]


@pytest.mark.parametrize(("lead", "key_heads", "format", "dtype", "schedule"), PATTERNS, ids=str)
def test_attention_with_patterns_of_heads(lead, key_heads, format, dtype, schedule):
    B, H = 3, 4
    sizes = [(M, H), (K, key_heads), (K, key_heads)]
    q, k, v = (normal(B, *size, D, seed=i).astype(dtype) for i, size in enumerate(sizes))
    A = structures(format)
    pick = lambda i: one(A, i % COUNT)
    every = [pick(i) for i in range(np.prod(lead))]
    A = jax.tree.map(lambda *x: jnp.stack(x).reshape(*lead, *x[0].shape), *every)
    wide = "float64" if dtype == "float64" else "float32"
    operands = dict(q=q, k=k, v=v, sinks=normal(H).astype(wide))
    if len(format.block_shape) < 2:
        operands["bias"] = normal(B, H, *every[0].values.shape, seed=3).astype(wide)
    lengths = jnp.asarray([K, 7, 0])
    weights = normal(B, M, H, D, seed=4).astype(wide)

    def whole(of):
        options = dict(key_value_seq_lengths=lengths, return_lse=True, schedule=schedule)
        out, lse = sparse_attention(**of, pattern=A, **options)
        return jnp.vdot(out.astype(wide), weights) + jnp.where(lse > -9, lse, 0).sum(), (out, lse)

    def in_turn(of):
        outs = np.empty((B, H), object)
        for b, h in np.ndindex(B, H):
            own = [0 if n == 1 else i for n, i in zip((1, *lead)[-2:], (b, h), strict=True)]
            at = own[0] * lead[-1] + (own[1] * lead[-1] // H if own[1] else 0)
            g = h // (H // key_heads)
            part = dict(key_value_seq_lengths=lengths[b], return_lse=True, schedule=schedule)
            part["sinks"] = of["sinks"][h : h + 1]
            if "bias" in of:
                part["bias"] = of["bias"][b, h]
            heads = (of["q"][b, :, h : h + 1], *(of[n][b, :, g : g + 1] for n in "kv"))
            outs[b, h] = sparse_attention(*heads, every[at], **part)
        out, lse = (
            jnp.stack([jnp.concatenate([outs[b, h][i] for h in range(H)], 1) for b in range(B)])
            for i in (0, 1)
        )
        return jnp.vdot(out.astype(wide), weights) + jnp.where(lse > -9, lse, 0).sum(), (out, lse)

    found, right = (
        jax.jit(jax.value_and_grad(f, has_aux=True))(operands) for f in (whole, in_turn)
    )
    bound = 2e-2 if dtype == "bfloat16" else 1e-4
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(
            x, y, rtol=bound, atol=bound * max(1, np.abs(y[np.isfinite(y)]).max())
        )


def test_attention_with_a_pattern_for_several_sequences_each():
    A, attend = structures(CSR), lambda A, q, k, v: sparse_attention(q, k, v, A)
    q, k, v = (normal(COUNT, 2, n, 1, D, seed=i) for i, n in enumerate((M, K, K)))

    def value_and_gradients(A, *operands):
        loss = lambda *x: jnp.sum(attend(A, *x) ** 2)
        return attend(A, *operands), jax.grad(loss, (0, 1, 2))(*operands)

    found = jax.jit(jax.vmap(value_and_gradients))(A, q, k, v)
    alone = jax.jit(value_and_gradients)
    for i in range(COUNT):
        right = alone(one(A, i), q[i], k[i], v[i])
        for x, y in zip(jax.tree.leaves(one(found, i)), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_attention_with_patterns_of_heads_to_order_2_and_mapped():
    B, H = 2, 2
    q, k = normal(B, M, H, 3), normal(B, K, H, 3)
    A = jax.vmap(jax.vmap(lambda x: select.top_k(x, 4)))(normal(B, H, M, K))
    mask = jnp.stack([one(one(A, b), h).todense() != 0 for b, h in np.ndindex(B, H)])
    mask = mask.reshape(B, H, M, K)

    def twin(q, k):
        s = jnp.where(mask, jnp.einsum("bihd,bjhd->bhij", q, k) / 3**0.5, -jnp.inf)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), k)

    def second(f):
        first = jax.grad(lambda q, k: jnp.sum(f(q, k) ** 2), (0, 1))
        return lambda q, k: jax.jvp(first, (q, k), (q, -k))[1]

    ours = lambda q, k: sparse_attention(q, k, k, A)
    for f, g in zip(*(jax.jit(second(f))(q, k) for f in (ours, twin)), strict=True):
        np.testing.assert_allclose(f, g, rtol=1e-4, atol=1e-4)
    qs = jnp.stack([q, 2 * q])
    found = jax.jit(jax.vmap(ours, (0, None)))(qs, k)
    np.testing.assert_allclose(found, jax.vmap(twin, (0, None))(qs, k), rtol=1e-4, atol=1e-4)


HOSTILE = np.asarray([-(2**31), -1, 0, 1, 5, 11, 12, 13, 2**31 - 1], np.int32)


@pytest.mark.parametrize("lead", [(2, 4), (2, 2)], ids=str)
def test_attention_with_arbitrary_index_arrays(lead):
    (B, own), H, Hk, L, S, n = lead, 4, 2, 6, 5, 12
    rng = np.random.default_rng(lead)
    offsets = np.sort(rng.integers(0, n + 1, (*lead, L + 1)), -1).astype(np.int32)
    offsets[..., 0] = 0
    indices = rng.integers(0, S, (*lead, n)).astype(np.int32)
    indices.reshape(-1, n)[::2, ::3] = rng.choice(HOSTILE, indices.reshape(-1, n)[::2, ::3].shape)
    offsets.reshape(-1, L + 1)[1::3] = rng.choice(HOSTILE, offsets.reshape(-1, L + 1)[1::3].shape)
    q, k, v = (normal(B, *size, 3) for size in ((L, H), (S, Hk), (S, Hk)))
    lengths = jnp.asarray([5, 3])

    @jax.jit
    def gradients(offsets, indices, q, k, v, bias, sinks, lengths):
        make = lambda o, i: SparseArray.from_arrays(jnp.zeros(n), o, i, shape=(L, S))
        for _ in range(offsets.ndim - 1):
            make = jax.vmap(make)
        options = dict(key_value_seq_lengths=lengths, return_lse=True)

        def loss(q, k, v, bias, sinks):
            A = make(offsets, indices)
            out, lse = sparse_attention(q, k, v, A, bias=bias, sinks=sinks, **options)
            return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), out

        return jax.grad(loss, (0, 1, 2, 3, 4), has_aux=True)(q, k, v, bias, sinks)

    bias, sinks = normal(B, H, n), normal(H)
    (dq, dk, dv, dbias, dsinks), out = gradients(offsets, indices, q, k, v, bias, sinks, lengths)
    sums = [np.zeros(x.shape) for x in (k, v, sinks)]
    for b, h in np.ndindex(B, H):
        s, g = h * own // H, h // (H // Hk)
        heads = (q[b, :, h : h + 1], k[b, :, g : g + 1], v[b, :, g : g + 1])
        alone = (*heads, bias[b, h], sinks[h : h + 1], lengths[b])
        right, mine = gradients(offsets[b, s], indices[b, s], *alone)
        pairs = [(out[b, :, h], mine[:, 0]), (dq[b, :, h], right[0][:, 0]), (dbias[b, h], right[3])]
        for x, y in pairs:
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        sums[0][b, :, g] += np.asarray(right[1][:, 0])
        sums[1][b, :, g] += np.asarray(right[2][:, 0])
        sums[2][h] += np.asarray(right[4][0])
    for x, y in zip((dk, dv, dsinks), sums, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_attention_with_patterns_that_threads_look_at_together():
    """Several threads do where the patterns have many entries (kFewEntries)."""
    H, L, D, per_row = 5, 480, 16, 70
    rng = np.random.default_rng(0)
    indices = np.sort(rng.integers(0, L, (H, L, per_row)), -1).reshape(H, -1).astype(np.int32)
    assert indices.size > 1 << 17
    indices[1, ::7] = L
    indices[3, 5] = -1
    offsets = np.broadcast_to(np.arange(L + 1, dtype=np.int32) * per_row, (H, L + 1)).copy()
    offsets[4, 2] = 2**31 - 1
    q, k, v = (normal(L, H, D) for _ in range(3))

    @jax.jit
    def gradients(offsets, indices, q, k, v):
        make = lambda o, i: SparseArray.from_arrays(jnp.zeros(L * per_row), o, i, shape=(L, L))
        A = jax.vmap(make)(offsets, indices)
        return jax.grad(lambda *x: jnp.sum(sparse_attention(*x, A) ** 2), (0, 1, 2))(q, k, v)

    found = gradients(offsets, indices, q, k, v)
    for h in range(H):
        alone = gradients(
            offsets[h : h + 1], indices[h : h + 1], *(x[:, h : h + 1] for x in (q, k, v))
        )
        for x, y in zip(found, alone, strict=True):
            np.testing.assert_array_equal(x[:, h : h + 1], y)


@pytest.mark.parametrize("entries", [100, 100_000])
def test_attention_of_several_patterns_that_finds_no_memory(entries):
    """Few entries are looked at by the calling thread, many by several threads."""
    B, L, R = 1 << 14, 4, 1 << 16  # sums for a gradient of the table: more than any memory holds
    rows, logs = np.zeros((1, L, 1, 16), np.float32), np.zeros((1, L, 1), np.float32)
    none, no_ints = np.zeros((1, 0), np.float32), np.zeros((1, 0), np.int32)
    offsets = np.tile(np.linspace(0, entries, L + 1).astype(np.int32), (2, 1))
    terms = (np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, R), np.float32), *[no_ints] * 3)
    operands = (rows, logs, *[rows] * 3, none, no_ints, rows, logs, *terms)
    shapes = [*[(B, L, 1, 16)] * 3, (1, 0), (B, 1, 1), (1, 0)]
    call = jax.ffi.ffi_call(
        "sgap_attention_backward_cvs_v2", [jax.ShapeDtypeStruct(x, np.float32) for x in shapes]
    )
    attributes = dict(vector_length=np.int64(1), scale=1.0, is_causal=False, wrt_bias=False)
    attributes |= dict(pieces=np.int64(2**31 - 1), softcap=0.0, kept=np.int64(0), keep_scale=1.0)
    operands += (np.zeros((1, 0), np.uint32), offsets, np.zeros((2, entries), np.int32))
    for _ in range(5):
        # A ValueError where the computation has failed by the time the call returns.
        kinds = jax.errors.JaxRuntimeError, ValueError
        with pytest.raises(kinds, match="FFI call failed: .*(vector|alloc)"):
            jax.block_until_ready(call(*operands, pack=False, **attributes))


@pytest.mark.parametrize("nested", [False, True])
def test_gradients_of_attention_whose_structures_are_sharded(nested):
    """By explicit axes, and with several sequences of each structure."""
    dense = np.stack([np.tri(4), np.eye(4)])
    A = jax.tree.map(lambda *x: jnp.stack(x), *(SparseArray.from_dense(x, nse=10) for x in dense))
    x = normal(2, *[3] * nested, 2, 4, 1, 2)
    loss = lambda x, A: jnp.sum(sparse_attention(x, x, x, A) ** 2)
    gradient = jax.grad(loss)
    if nested:
        gradient = jax.vmap(gradient, (0, None))
    gradient = jax.jit(jax.vmap(gradient))
    right = gradient(x, A)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, A = jax.device_put((x, A), jax.NamedSharding(mesh, jax.P("x")))
        np.testing.assert_allclose(gradient(x, A), right, rtol=1e-5, atol=1e-6)


def test_structures_that_are_sharded_and_exported():
    A, Y = structures(CSR), normal(COUNT, K, D)
    loss = lambda A, Y: jnp.sum(jax.vmap(spmm)(A, Y) ** 2)
    right = jax.grad(loss, 1)(A, Y)
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = jax.NamedSharding(mesh, jax.P("x"))
        A, Y = jax.device_put((A, Y), split)
        np.testing.assert_allclose(jax.jit(jax.grad(loss, 1))(A, Y), right, rtol=1e-5)

    def attention(offsets, indices, x):
        A = SparseArray.from_arrays(jnp.zeros(4), offsets, indices, shape=(2, 2))
        return sparse_attention(x, x, x, A)

    (s,) = jax.export.symbolic_shape("s")
    shapes = [
        jax.ShapeDtypeStruct((s, *n), t)
        for n, t in (((3,), "int32"), ((4,), "int32"), ((2, 1, 3), "float32"))
    ]
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in native.targets()]
    program = jax.export.export(jax.jit(jax.vmap(attention)), disabled_checks=allowed)(*shapes)
    offsets = np.asarray([[0, 2, 4], [0, 1, 1]], np.int32)
    indices, x = np.asarray([[0, 1] * 2] * 2, np.int32), normal(2, 2, 1, 3)
    alone = attention(offsets[0], indices[0], x[0])
    np.testing.assert_allclose(program.call(offsets, indices, x)[0], alone, rtol=1e-5)


def test_attention_refuses_other_leading_axes():
    q = normal(2, M, 4, D)
    A = jax.vmap(lambda x: select.top_k(x, 5))(normal(3, M, M))
    with pytest.raises(ValueError, match=r"leading axes \[H\] or \[B, H\] .* got \[3\]"):
        sparse_attention(q, q, q, A)


def spmm_call(values, arrays, x, isa, threads=1, batch=None):
    tiles = dict(tile_columns=0, chunk_nonzeros=16, pack=True)
    batch = batch or max(
        values.shape[0], x.shape[0], arrays[0].shape[0] if arrays[0].ndim == 2 else 1
    )
    result = ((batch, arrays[0].shape[-1] - 1, x.shape[2]), x.dtype)
    (y,) = run("sgap_spmm_csr_v1", (values, *arrays, NONE, x), [result], tiles, isa, threads)
    return y


@pytest.mark.parametrize("isa", kernel_isas())
def test_arbitrary_index_arrays(isa):
    rng = np.random.default_rng(0)
    near = np.asarray([-(2**31), -1, 0, 1, 5, 39, 40, 41, 2**31 - 1], np.int32)
    offsets = np.stack([np.linspace(0, 40, M + 1).astype(np.int32)] * 6)
    offsets[1:3] = rng.choice(near, (2, M + 1))
    indices = rng.integers(0, K, (6, 40)).astype(np.int32)
    indices[2:4, ::7] = rng.choice(near, indices[2:4, ::7].shape)
    values, x = rng.standard_normal((12, 40)), rng.standard_normal((1, K, 9))
    for threads in (1, 3):
        found = spmm_call(values, (offsets, indices), x, isa, threads)
        for i in range(6):
            own = values[2 * i : 2 * i + 2]
            right = spmm_call(own, (offsets[i], indices[i]), x, isa)
            np.testing.assert_array_equal(found[2 * i : 2 * i + 2], right)


def test_the_handler_refuses_what_does_not_belong_together():
    offsets, indices = np.zeros((2, M + 1), np.int32), np.zeros((2, 4), np.int32)
    values, x = np.ones((2, 4)), np.ones((1, K, 1))
    isa = native.isa()
    assert not spmm_call(values, (offsets, indices), x, isa).any()
    with pytest.raises(ValueError, match="expected all of them for each structure"):
        spmm_call(values, (offsets, indices[0]), x, isa)
    with pytest.raises(ValueError, match="expected all of them for each structure"):
        spmm_call(values, (offsets, np.zeros((3, 4), np.int32)), x, isa)
    with pytest.raises(ValueError, match="a multiple of the 2 structures, got 3"):
        spmm_call(np.ones((3, 4)), (offsets, indices), x, isa)
    with pytest.raises(ValueError, match="results: expected a batch of a multiple of the 2 st"):
        spmm_call(values, (offsets, indices), x, isa, batch=1)
