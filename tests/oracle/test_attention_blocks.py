"""Attention block after block, BCSR(r, c) with few rows r, against the same entries row by row and
against dense attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_twin import dense_mask, twin
from battery import cast
from jax import export
from native_call import kernel_isas, run

from sgap_jax import BCSR, CpuTile, Reference, SparseArray, explain, sparse_attention
from sgap_jax.schedules.machine import Machine, on_machine

HEADS, KEY_HEADS = 4, 2
NONE = np.zeros((1, 0), np.float32)
TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 2e-2, "float16": 4e-3}


def structure(rows, length, keys, width, rng):
    """(offsets, blocks), and (offsets, columns) of the same entries. Blocks come in any order, some
    twice, and some do not exist: nobody has checked a traced structure."""
    count = -(-rows // length)
    blocks = [rng.integers(0, -(-keys // width), n) for n in rng.integers(1, 6, count)]
    blocks[2], blocks[3] = blocks[2][:0], np.append(blocks[3], blocks[3][0])
    blocks[5][0], blocks[6][-1] = -1, 2**31 - 1
    offsets = np.append(0, np.cumsum([len(x) for x in blocks])).astype(np.int32)
    inside = [x[(x >= 0) & (x < 2**20)] for x in blocks]
    columns = [(x[:, None] * width + np.arange(width)).reshape(-1) for x in inside]
    columns = [x[x < keys] for x in columns]
    ends = np.append(0, np.cumsum([len(x) for x in columns])).astype(np.int32)
    joined = lambda parts: np.concatenate(parts).astype(np.int32)  # noqa: E731
    return (offsets, joined(blocks)), (ends, joined(columns))


def given(rows, keys, widths, dtype, rng):
    """q, k, v, sinks, lengths, dout, dlse."""
    wide = np.dtype("float64" if dtype == "float64" else "float32")
    normal = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    depth, value_depth = widths
    return (
        cast(normal(2, rows, HEADS, depth), dtype),
        cast(normal(2, keys, KEY_HEADS, depth), dtype),
        cast(normal(2, keys, KEY_HEADS, value_depth), dtype),
        normal(1, HEADS).astype(wide),
        np.int32([[keys - 9], [keys + 5]]),
        cast(normal(2, rows, HEADS, value_depth), dtype),
        normal(2, rows, HEADS).astype(wide),
    )


def both_ways(target, attributes, more, structure, x, isa, threads=1, forward=None):
    """[out, lse, dq, dk, dv]; the gradients are those of the results `forward`, else of its own."""
    q, k, v, sinks, lengths, dout, dlse = x
    bias, common = NONE.astype(sinks.dtype), dict(scale=0.3, is_causal=True) | attributes
    results = [(dout.shape, q.dtype), (q.shape[:3], sinks.dtype)]
    operands = (q, k, v, bias, sinks, lengths, *structure)
    attrs = common | more[0]
    own = run(f"sgap_attention_{target}_v1", operands, results, attrs, isa, threads)
    results = [*((a.shape, a.dtype) for a in (q, k, v)), ((1, 0), sinks.dtype)]
    operands = (dout, dlse, q, k, v, bias, lengths, *(forward or own), *structure)
    attrs = common | dict(wrt_bias=False) | more[1]
    *found, _ = run(f"sgap_attention_backward_{target}_v1", operands, results, attrs, isa, threads)
    return own, [*own, *found]


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("length", "width", "rows", "keys", "widths"),
    [
        (1, 16, 300, 130, (16, 48)),
        (1, 64, 200, 200, (64, 64)),
        (3, 100, 131, 250, (20, 256)),
        (16, 7, 250, 50, (256, 24)),
        (32, 20, 320, 90, (0, 8)),
    ],
)
def test_as_row_by_row(length, width, rows, keys, widths, dtype, isa):
    rng = np.random.default_rng(length + width)
    blocks, entries = structure(rows, length, keys, width, rng)
    x = given(rows, keys, widths, dtype, rng)
    attrs, packed = dict(vector_length=length), dict(pack=True)
    more = packed | dict(chunk_nonzeros=10**6), packed | dict(pieces=2)
    forward, want = both_ways("cvs", attrs, more, entries, x, isa)
    attrs |= dict(block_width=width)
    of = partial(both_ways, "blocks", attrs, ({}, dict(pieces=2)), blocks, x, isa)
    _, got = of(forward=forward)
    empty = (np.asarray(want[0], np.float64) == 0).all(-1)
    assert empty.any() and not empty.all()
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        a, b = (np.asarray(y, np.float64) for y in (a, b))
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b), name)
        a, b = (np.where(np.isfinite(y), y, 0) for y in (a, b))
        np.testing.assert_allclose(a, b, atol=TOLERANCE[dtype] * np.abs(b).max(initial=1e-9))
    # Tasks have fewer rows where there are more threads.
    for a, b in zip(of(forward=forward, threads=4)[1], got, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("isa", kernel_isas())
def test_rows_before_a_key_do_not_see_that_it_is_nan(isa):
    """Several rows are taken together, and zero times NaN is NaN."""
    rows, key, width = 90, 39, 16
    q, k, v, sinks, _, dout, dlse = given(rows, rows, (20, 20), "float32", np.random.default_rng(5))
    k[:, key], v[:, key] = np.nan, np.nan
    count = -(-rows // width)
    every = np.arange(rows + 1, dtype=np.int32) * count, np.tile(np.arange(count), rows)
    x = q, k, v, sinks, np.full((1, 1), rows, np.int32), dout, dlse
    attrs, blocks = dict(vector_length=1, block_width=width), (every[0], np.int32(every[1]))
    _, (out, lse, dq, *_) = both_ways("blocks", attrs, ({}, dict(pieces=1)), blocks, x, isa)
    for found in (out, lse, dq):
        finite = np.isfinite(found).all((0, *range(2, found.ndim)))
        np.testing.assert_array_equal(finite, np.arange(rows) < key)


@pytest.mark.parametrize("threads", [1, 5])
def test_many_rows_have_the_same_bits_as_few(threads):
    rng = np.random.default_rng(4)
    rows, keys, width = 9000, 400, 50
    blocks, _ = structure(rows, 1, keys, width, rng)
    x = given(rows, keys, (32, 16), "float32", rng)
    attrs = dict(vector_length=1, block_width=width)
    _, (out, lse, dq, *_) = both_ways("blocks", attrs, ({}, dict(pieces=3)), blocks, x, "", threads)
    part = (blocks[0][:401], blocks[1][: blocks[0][400]])
    few = [a[:, :400] if a.shape[1:2] == (rows,) else a for a in x]
    _, found = both_ways("blocks", attrs, ({}, dict(pieces=1)), part, few, "")
    for a, b in zip((out, lse, dq), found, strict=False):
        np.testing.assert_array_equal(a[:, :400], b)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(block_width=0), "block_width: expected at least 1"),
        (dict(block_width=-(2**63)), "block_width: expected at least 1"),
        (dict(vector_length=33), "expected blocks of at most 32 rows"),
        (dict(widths=(257, 8)), "expected heads of at most 256 numbers"),
        (dict(widths=(8, 257)), "expected heads of at most 256 numbers"),
        (dict(bias=True), "bias: expected none"),
    ],
)
def test_wrong_operands_are_refused(change, words):
    rng, length = np.random.default_rng(0), change.get("vector_length", 1)
    widths = change.get("widths", (8, 8))
    offsets = np.zeros(-(-70 // length) + 1, np.int32)
    indices = np.zeros(0 if "bias" not in change else 3, np.int32)
    q, k, v, sinks, lengths, dout, dlse = given(70, 40, widths, "float32", rng)
    bias = np.zeros((1, 1, 3, 1), np.float32) if "bias" in change else NONE
    named = dict(vector_length=1, block_width=16, scale=1.0, is_causal=False)
    attrs = {name: change.get(name, x) for name, x in named.items()}
    results = [(dout.shape, "float32"), (q.shape[:3], "float32")]
    operands = (q, k, v, bias, sinks, lengths, offsets, indices)
    with pytest.raises(ValueError, match=words if "width" in words else f"attention: {words}"):
        run("sgap_attention_blocks_v1", operands, results, attrs, "")
    forward = [np.zeros(*x) for x in results]
    results = [*((x.shape, "float32") for x in (q, k, v)), ((1, 0), "float32")]
    operands = (dout, dlse, q, k, v, bias, lengths, *forward, offsets, indices)
    attrs |= dict(wrt_bias=False, pieces=1)
    words = "blocks: expected a width" if change.get("block_width", 1) < 1 else words
    with pytest.raises(ValueError, match=f"attention_backward: {words}"):
        run("sgap_attention_backward_blocks_v1", operands, results, attrs, "")


def test_a_gradient_of_a_bias_is_refused():
    q, k, v, *_, lengths, dout, dlse = given(70, 40, (8, 8), "float32", np.random.default_rng(0))
    forward = np.zeros_like(dout), np.zeros_like(dlse)
    operands = (dout, dlse, q, k, v, NONE, lengths, *forward, np.zeros(71, np.int32))
    attrs = dict(vector_length=1, block_width=16, scale=1.0, is_causal=False, pieces=1)
    results = [*((x.shape, "float32") for x in (q, k, v)), ((2, HEADS, 0, 1), "float32")]
    with pytest.raises(ValueError, match="no gradient of a bias"):
        attrs |= dict(wrt_bias=True)
        operands = (*operands, np.zeros(0, np.int32))
        run("sgap_attention_backward_blocks_v1", operands, results, attrs, "")


# ---- sparse_attention ---------------------------------------------------------------------------


def pattern(shape, block, density, seed=0):
    rng = np.random.default_rng(seed)
    grid = rng.random([-(-n // side) for n, side in zip(shape, block, strict=True)]) < density
    mask = grid.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]
    return SparseArray.from_dense(mask.astype(np.float32), format=BCSR(*block))


def arrays(shape, widths=(16, 24), dtype="float64", batch=(2,)):
    rng, (L, S) = np.random.default_rng(7), shape
    sizes = ((L, HEADS, widths[0]), (S, KEY_HEADS, widths[0]), (S, KEY_HEADS, widths[1]))
    return [cast(rng.standard_normal((*batch, *size)), dtype) for size in sizes]


def with_gradients(function, *operands):
    """(results, their gradients for fixed cotangents, the gradient of those along a direction)."""

    def gradients(*operands):
        results, back = jax.vjp(function, *operands)
        cotangents = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size)).reshape(x.shape), results)
        return results, back(cotangents)

    along = tuple(jnp.cos(x) for x in operands)
    return jax.jit(lambda *x: jax.jvp(gradients, x, along))(*operands)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "block"), [((300, 270), (1, 16)), ((256, 256), (4, 64)), ((310, 100), (8, 70))]
)
def test_derivatives(shape, block, is_causal):
    A = pattern(shape, block, 0.5)
    operands, sinks = arrays(shape), jnp.linspace(-1, 1, HEADS)
    mask = dense_mask(A, is_causal)
    options = dict(sinks=sinks, is_causal=is_causal)
    ours = lambda q, k, v: sparse_attention(q, k, v, A, return_lse=True, **options)  # noqa: E731
    assert "sgap_attention_blocks_v1" in jax.jit(ours).lower(*operands).as_text()
    dense = lambda *x: twin(*x, mask, sinks=sinks)  # noqa: E731
    got, want = (with_gradients(f, *operands) for f in (ours, dense))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), got, want)
    forward = jax.jvp(ours, operands, [jnp.cos(x) for x in operands])[1]
    expected = jax.jvp(dense, operands, [jnp.cos(x) for x in operands])[1]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), forward, expected)


def test_structures_of_their_own():
    shape, block = (256, 256), (1, 32)
    own = [pattern(shape, block, 0.4, seed) for seed in range(4)]
    capacity = max(one.nnz for one in own) // 32

    def padded(one):
        offsets, indices = one.index_arrays[1]
        more = capacity - len(indices)
        values, indices = np.ones((capacity, *block)), np.pad(np.asarray(indices), (0, more))
        return SparseArray.from_arrays(values, offsets, indices, shape=shape, format=BCSR(*block))

    each = jax.tree.map(lambda *x: jnp.stack(x), *(padded(one) for one in own))
    leading = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), each)
    q, k, v = arrays(shape)
    attend = jax.jit(lambda q, k, v, A: sparse_attention(q, k, v, A))
    assert "sgap_attention_blocks_v1" in attend.lower(q, k, v, leading).as_text()
    got = with_gradients(lambda *x: sparse_attention(*x, leading), q, k, v)
    masks = np.stack([dense_mask(one) for one in own]).reshape(2, 2, *shape).repeat(2, 1)
    want = with_gradients(lambda *x: twin(*x, masks)[0], q, k, v)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), got, want)
    mapped = jax.vmap(lambda q, k, v, A: sparse_attention(q, k, v, A))
    pairs = jax.tree.map(lambda x: x[::2], each)
    masks = np.stack([dense_mask(one) for one in own[::2]])[:, None]
    np.testing.assert_allclose(mapped(q, k, v, pairs), twin(q, k, v, masks)[0], atol=1e-9)


@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
def test_traced_structures(schedule):
    rng, (length, width, rows, keys) = np.random.default_rng(1), (2, 64, 300, 100)
    (offsets, indices), (ends, columns) = structure(rows, length, keys, width, rng)
    q, k, v = arrays((rows, keys))

    @jax.jit
    def attend(q, k, v, offsets, indices):
        values = jnp.ones((indices.shape[0], length, width))
        A = SparseArray.from_arrays(
            values, offsets, indices, shape=(rows, keys), format=BCSR(length, width)
        )
        return sparse_attention(q, k, v, A, schedule=schedule)

    counts = np.zeros((rows, keys))  # how often an entry is stored
    for block, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        for lane in range(length):
            np.add.at(counts, (block * length + lane, columns[begin:end]), 1)
    with np.errstate(divide="ignore"):
        want, _ = twin(q, k, v, counts > 0, bias=np.log(counts))
    np.testing.assert_allclose(attend(q, k, v, offsets, indices), want, atol=1e-9)


def test_rows_that_do_not_see_a_block_are_not_reached_by_what_it_holds():
    shape, block = (300, 320), (1, 32)
    A = pattern(shape, block, 0.3)
    q, k, v = arrays(shape, dtype="float32")
    k[:, 40, 1, 3], v[:, 70, 1, 2] = np.inf, np.nan
    sees = dense_mask(A)[:, 40] | dense_mask(A)[:, 70]
    out, back = jax.vjp(lambda *x: sparse_attention(*x, A), q, k, v)
    assert np.isfinite(out[:, ~sees]).all() and not np.isfinite(out[:, sees, 2:]).all()
    want = sparse_attention(q, np.where(np.isfinite(k), k, 0), np.where(np.isfinite(v), v, 0), A)
    np.testing.assert_allclose(out[:, ~sees], want[:, ~sees], atol=1e-5)
    dq, dk, dv = back(jnp.ones_like(out))
    assert np.isfinite(dq[:, ~sees]).all() and np.isfinite(dk[:, :, 0]).all()
    far = ~dense_mask(A)[sees].any(0)  # keys that no such row sees
    assert np.isfinite(dk[:, far]).all() and np.isfinite(dv[:, far]).all()


def test_which_calls_run_block_after_block():
    def target(shape=(256, 256), block=(1, 16), widths=(16, 24), **options):
        q, k, v = arrays(shape, widths, "float32")
        A = pattern(shape, block, 0.5)
        attend = lambda q, k, v: sparse_attention(q, k, v, A, **options)  # noqa: E731
        text = jax.jit(attend).lower(q, k, v).as_text()
        return "blocks" if "sgap_attention_blocks_v1" in text else "vectors"

    lengths = jnp.asarray([3, 400])
    assert target(is_causal=True, key_value_seq_lengths=lengths) == "blocks"
    assert target(block=(8, 64)) == target(widths=(256, 256)) == "blocks"
    assert target(sinks=jnp.ones(HEADS)) == target(shape=(300, 20)) == "blocks"
    for options in (
        dict(shape=(120, 8192)),  # 60 rows see a block
        dict(block=(1, 15)),
        dict(block=(2, 63)),
        dict(block=(9, 64)),
        dict(widths=(257, 8)),
        dict(widths=(8, 257)),
        dict(softcap=3.0),
        dict(alibi_slopes=jnp.ones(HEADS)),
        dict(schedule=CpuTile()),
    ):
        assert target(**options) == "vectors", options
    with on_machine(Machine(cores=2, matrix_tiles=True)):
        assert target() == target(block=(8, 64)) == "blocks"
        q, k, v = arrays((256, 256), (32, 32), "bfloat16")
        A = pattern((256, 256), (8, 64), 0.5)
        attend = jax.jit(lambda q, k, v: sparse_attention(q, k, v, A))
        assert "sgap_attention_octet_v1" in attend.lower(q, k, v).as_text()


def test_other_platforms_have_column_vectors():
    A = pattern((256, 256), (2, 64), 0.5)
    q, k, v = arrays((256, 256), (16, 16), "float32")

    def attend(q, k, v):
        return jax.grad(lambda q: sparse_attention(q, k, v, A).sum())(q)

    exported = export.export(jax.jit(attend), platforms=["tpu"])(q, k, v)
    assert "custom_call" not in exported.mlir_module().replace("@Sharding", "")


def test_explain_says_so():
    A = pattern((256, 256), (1, 16), 0.5)
    q, k, v = arrays((256, 256), (16, 16), "float32")
    text = explain(lambda q, k, v: sparse_attention(q, k, v, A), q, k, v)
    assert "BCSR(1, 16)" in text and "for block of keys" in text and "CpuTile()" in text
