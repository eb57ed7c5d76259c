"""Attention and its gradients with long rows in pieces, run by the emulator: launches, values and
gradients against the unfused operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, from_row_lengths
from cuda_sources import require_nvrtc
from emulated_launch import Counted

from sgap_jax import (
    CVS,
    AttentionTile,
    Problem,
    RowStatistics,
    Schedule,
    ScheduleError,
    SparseArray,
    Unfused,
    choose_schedule,
    sparse_attention,
)
from sgap_jax.launch import attention_octet, row_pieces
from sgap_jax.schedules.emulated import Emulated
from sgap_jax.schedules.families import with_failing

FORWARD = ["AttentionPiecesKernel", "AttentionMergeKernel"]
BY_ROWS = ["AttentionRowsBackwardPiecesKernel", "SumPiecesKernel"]
BY_KEYS = ["AttentionKeysBackwardPiecesKernel", "SumPiecesKernel", "SumPiecesKernel"]


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


# A mask with rows and a column that see everything: global tokens.
GLOBAL = from_row_lengths("global", 41, [41, 2, 1, 3, 0, 41, 2, 1, 1, 4, 0])

# A row that the lanes of the four warps that merge it have more than one piece of, each.
LONG = from_row_lengths("long", 270, [270, 2, 0, 3])


# Block rows of 8, 16 and 32 rows of which one sees everything.
OCTETS = from_row_lengths("octets", 90, [2] * 33 + [90] + [1] * 210)


def case_of(name):
    return GLOBAL if name == "global" else BATTERY[name]


def operands(case, dtype="float32", batch=2, heads=2, key_heads=1, depth=8, value_depth=12):
    m, keys = case.shape
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    return (
        draw(batch, m, heads, depth),
        draw(batch, keys, key_heads, depth),
        draw(batch, keys, key_heads, value_depth),
    )


def compare(case, tile, length=1, dtype="float32", run=None, sizes=None, **given):
    """out, lse and gradients of pieces against the unfused operations in float64."""
    wide = array(case, jnp.float64)
    wide = wide if length == 1 else wide.asformat(CVS(length))
    q, k, v = operands(case, dtype, **(sizes or {}))
    arrays = {}
    if "bias" in given:
        bias = np.random.default_rng(2).standard_normal((q.shape[2], *wide.values.shape))
        arrays["bias"] = jnp.asarray(bias, jnp.float32)
    if "sinks" in given:
        arrays["sinks"] = jnp.asarray([0.5, -1.0, 0.0, 2.0][: q.shape[2]], jnp.float32)
    if "lengths" in given:
        arrays["key_value_seq_lengths"] = jnp.asarray([case.shape[1] // 2, 999], jnp.int32)
    static = {"is_causal": given.get("is_causal", False)}

    def results(schedule, A, *x):
        def loss(q, k, v, more):
            out, lse = sparse_attention(
                q, k, v, A, return_lse=True, schedule=schedule, **static, **more
            )
            wide = out.astype(jnp.float64)
            return jnp.sum(jnp.sin(wide)), (out, lse)

        more = {n: a for n, a in arrays.items()}
        floats = {n: a for n, a in more.items() if n != "key_value_seq_lengths"}
        rest = {n: a for n, a in more.items() if n not in floats}
        of = lambda q, k, v, f: loss(q, k, v, {**f, **rest})
        return jax.grad(of, (0, 1, 2, 3), has_aux=True)(*x, floats)

    run = run or Counted()
    found = results(Emulated(run, tile), wide.astype(dtype), q, k, v)
    if dtype != "float64":
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        wide = wide.astype(jnp.float32)
    expected = results(Unfused(), wide, q, k, v)
    rough = {"float32": 3e-5, "float64": 1e-5, "bfloat16": 4e-2, "float16": 5e-3}[dtype]

    def close(a, b):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        size = max(1.0, np.abs(np.where(np.isfinite(b), b, 0)).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=rough, atol=rough * size)

    jax.tree.map(close, found, expected)
    return run


@pytest.mark.parametrize(
    ("name", "length"),
    [("global", 1), ("one_heavy_row", 4), ("every_length", 2), ("padded", 1), ("wide", 4)],
)
def test_values_and_gradients(name, length):
    compare(case_of(name), AttentionTile(8, chunk=4), length)


@pytest.mark.parametrize(
    "given",
    [
        dict(bias=True),
        dict(sinks=True),
        dict(lengths=True),
        dict(is_causal=True),
        dict(bias=True, sinks=True, lengths=True, is_causal=True),
    ],
    ids=str,
)
def test_bias_sinks_lengths_and_causality(given):
    """With lengths and causality whole pieces are masked: they leave a peak of -infinity."""
    compare(GLOBAL, AttentionTile(8, chunk=4), 2, **given)


@pytest.mark.parametrize("given", [{}, dict(lengths=True, is_causal=True, sinks=True)], ids=str)
def test_more_pieces_of_a_row_than_lanes_that_merge_them(given):
    """With lengths and causality the later pieces of a lane leave a peak of -infinity."""
    compare(LONG, AttentionTile(8, chunk=2), **given)


@pytest.mark.tier("test")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_every_dtype(dtype):
    compare(GLOBAL, AttentionTile(8, chunk=8), 8, dtype)


@pytest.mark.parametrize(
    ("tile", "length", "sizes"),
    [
        (AttentionTile(8, 4, chunk=8), 1, dict(depth=17, value_depth=33)),
        (AttentionTile(16, 8, chunk=1), 2, dict(depth=64, value_depth=40, heads=4, key_heads=2)),
        (AttentionTile(32, chunk=5), 1, dict(depth=3, value_depth=150, batch=1)),
    ],
    ids=str,
)
def test_lanes_shares_and_widths(tile, length, sizes):
    compare(GLOBAL, tile, length, sizes=sizes)


@pytest.mark.parametrize(
    ("tile", "length", "dtype", "sizes", "given"),
    [
        (AttentionTile(8, octet=True, chunk=3), 8, "bfloat16", {}, {}),
        (
            AttentionTile(8, 2, octet=True, chunk=5),
            16,
            "float16",
            dict(depth=7, value_depth=70),
            dict(bias=True),
        ),
        (
            AttentionTile(16, 4, octet=True, chunk=17),
            32,
            "float16",
            dict(depth=64, value_depth=64, heads=4, key_heads=2),
            dict(sinks=True, lengths=True, is_causal=True),
        ),
    ],
    ids=str,
)
def test_octets(tile, length, dtype, sizes, given):
    """By rows in pieces, both ways, and by sets of 8 or 16 keys."""
    run = compare(OCTETS, tile, length, dtype, sizes=sizes, **given)
    by_rows = ["AttentionOctetRowsBackwardPiecesKernel", "SumPiecesKernel"]
    merged = ["AttentionMergeKernel", "AttentionOctetPiecesKernel"]
    by_keys = ["AttentionOctetKeysBackwardPiecesKernel", "SumPiecesKernel", "SumPiecesKernel"]
    assert sorted(run.kernels) == sorted([*merged, *by_rows, *by_keys])


def test_neighbouring_rows_and_heads_that_share_a_block(monkeypatch):
    """As in large problems: 8 warps of a block, or with pieces that make few such blocks 2 or 4,
    have sets of rows and heads of their own, and rows of several pieces are merged in turn."""
    monkeypatch.setattr(attention_octet, "WARPS_UNDER_WAY", 1)
    monkeypatch.setattr(row_pieces, "_BLOCKS", 1)
    sizes = dict(depth=64, value_depth=64, heads=12, key_heads=2, batch=1)
    for chunk, blocks, warps in ((None, 2048, 8), (7, 1, 8), (7, 2048, 2)):
        monkeypatch.setattr(attention_octet, "_BLOCKS_OF_PIECES", blocks)
        tile = AttentionTile(8, octet=True, chunk=chunk)
        run = compare(OCTETS, tile, 16, "bfloat16", sizes=sizes)
        threads = [n for n, name in zip(run.threads, run.kernels, strict=True) if "Octet" in name]
        assert threads == [32 * warps] * 3


def test_launches():
    run = compare(GLOBAL, AttentionTile(8, chunk=4))
    assert sorted(run.kernels) == sorted([*FORWARD, *BY_ROWS, *BY_KEYS])
    run = compare(GLOBAL, AttentionTile(8, chunk=10_000))
    assert sorted(run.kernels) == [
        "AttentionKernel",
        "AttentionKeysBackwardKernel",
        "AttentionRowsBackwardKernel",
    ]


def test_the_same_bits_in_any_order_of_the_blocks():
    q, k, v = operands(GLOBAL)
    A = array(GLOBAL, "float32")

    def results(seed):
        schedule = Emulated(Counted(seed), AttentionTile(8, chunk=4))
        loss = lambda *x: jnp.sum(jnp.sin(sparse_attention(*x, A, schedule=schedule)))
        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    first = results(0)
    for seed in (1, 2):
        jax.tree.map(np.testing.assert_array_equal, results(seed), first)


def test_by_default_only_skewed_patterns_are_cut():
    """Global rows are, by rows; the columns, of even lengths, are not."""
    lengths = np.full(1200, 2)
    lengths[[3, 700]] = 1100
    case, run = from_row_lengths("rows", 1100, lengths), Counted()
    A = array(case, "float32")
    assert A.row_statistics is not None and A.T.row_statistics is None
    q, k, v = operands(case, batch=1, heads=1, depth=4, value_depth=4)

    def gradient(schedule):
        loss = lambda *x: jnp.sum(jnp.sin(sparse_attention(*x, A, schedule=schedule)))
        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    found, expected = gradient(Emulated(run)), gradient(Unfused())
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert sorted(run.kernels) == sorted([*FORWARD, *BY_ROWS, "AttentionKeysBackwardKernel"])


def test_the_choice_and_its_explanation():
    rows = RowStatistics(16.0, 64.0, 16_384)
    asked = Problem("attention", (16_384, 16_384), 300_000, n=64, platform="cuda", rows=rows)
    tile = choose_schedule(asked)
    assert str(tile) == "AttentionTile(lanes=16, chunk=64)"
    assert Schedule.parse(str(tile)) == tile
    text = tile.explain(asked)
    assert "pieces: of up to 64 vectors of a row" in text
    assert "the longest row, of 16384, has 256" in text


@pytest.mark.parametrize("wrong", [dict(chunk=0), dict(chunk=2.0), dict(chunk=True)])
def test_wrong_chunks_are_refused(wrong):
    with pytest.raises(ScheduleError, match="AttentionTile: chunk"):
        AttentionTile(8, **wrong)
    with pytest.raises(ScheduleError, match="more partial results than 2\\^31"):
        AttentionTile(8, chunk=1).check(Problem("attention", (9, 9), 2**30, platform="cuda"))


def compare_keys(seen):
    """Gradients of block rows of 8 that see keys where `seen` says, 64 features, against the
    unfused operations."""
    A = SparseArray.from_dense(np.repeat(seen, 8, 0)).asformat(CVS(8)).astype(jnp.bfloat16)
    rng = np.random.default_rng(0)
    draw = lambda tokens: jnp.asarray(rng.standard_normal((1, tokens, 2, 64)), jnp.bfloat16)
    q, k, v = map(draw, (A.shape[0], A.shape[1], A.shape[1]))

    def gradients(schedule):
        def loss(q, k, v):
            out = sparse_attention(q, k, v, A, schedule=schedule)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    run = Counted()
    found = gradients(Emulated(run, AttentionTile(16, octet=True)))
    assert "AttentionOctetKeysBackwardKernel" in run.kernels
    for x, expected in zip(found, gradients(Unfused()), strict=True):
        x, expected = (np.asarray(y, np.float32) for y in (x, expected))
        assert np.abs(x - expected).max() <= 0.02 * np.abs(expected).max()


def compare_tiles():
    """A step of two block rows stores one tile of 8 keys, each of them another."""
    compare_keys(np.kron(np.eye(4, dtype=np.float32), np.ones((1, 8), np.float32)))


def test_steps_that_store_keys_of_one_tile():
    compare_tiles()


def compare_ranges():
    """Block rows that see all keys, and others far from them, are one window; each key is in both
    ranges, or in one."""
    seen = np.zeros((20, 16), np.float32)
    seen[:2] = seen[15, ::2] = seen[18, ::3] = 1
    compare_keys(seen)


def test_windows_of_two_ranges_of_block_rows():
    compare_ranges()


@pytest.mark.parametrize(
    ("header", "right", "wrong"),
    [
        ("attention_pieces.cuh", "MergeOnline()(state.values, other.values);", "state = other;"),
        ("attention_pieces.cuh", "states[2 * at + 1] = state.peak();", "states[2 * at + 1] = 0;"),
        ("attention_pieces.cuh", "from += 32 * kShare", "from += 31 * kShare"),
        ("attention_pieces.cuh", "(peak);", "(total);"),
        ("attention_pieces.cuh", "from + i * kShare", "from + i"),
        ("attention_pieces.cuh", "total[0] *= weight;", ""),
        ("attention_pieces.cuh", "+= of_piece * sums", "+= sums"),
        ("attention_octet.cuh", "states[2 * at + 1] = state.peak();", "states[2 * at + 1] = 0;"),
        ("attention_octet_keys.cuh", "to < most ? row_indices[start + to] : far", "far"),
        ("attention_octet_keys.cuh", " || second - base < kNear", ""),
        ("attention_octet_keys.cuh", "bit < kNear ? base : far", "base"),
        ("attention_octet_keys.cuh", "step ^= left;", "step &= 0 - step;"),
        (
            "attention_octet_backward.cuh",
            "batch * places + unsigned(own.place)) * kLength + part",
            "batch * places + unsigned(own.place)) * kLength",
        ),
        ("attention_octet.cuh", "first = valid ? piece.first : 0;", "first = valid ? 0 : 0;"),
        ("attention_pieces.cuh", "part = turn % kLength", "part = 0 * kLength"),
        (
            "attention_pieces.cuh",
            "AllOfRow(own.place, places) ? batch * call.keys + own.column",
            "true ? batch * call.keys + own.column",
        ),
        (
            "attention.cuh",
            "first = valid ? piece.first : 0;",
            "first = valid ? piece.first + 1 : 0;",
        ),
    ],
)
def test_planted_bugs_are_caught(header, right, wrong, planted):
    def check():
        try:
            if "step" in right:
                compare_tiles()
            elif "base : far" in right:
                compare_ranges()
            elif "octet" in header:
                compare(OCTETS, AttentionTile(8, 2, octet=True, chunk=5), 16, "float16")
            else:
                compare(GLOBAL, AttentionTile(8, chunk=2), 2)
                compare(LONG, AttentionTile(8, chunk=2))
        except jax.errors.JaxRuntimeError as error:  # a fault of the emulator, within a callback
            raise AssertionError(str(error)) from None

    planted(header, right, wrong, check)


def test_gradients_without_the_kernels_by_keys_are_unfused(monkeypatch):
    """Rows that see everything are cut by rows and not by columns, whose kernel is listed."""
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    seen = np.zeros((600, 4000), np.float32)
    seen[0] = 1
    A, q, k = SparseArray.from_dense(seen), jnp.ones((600, 1, 4)), jnp.ones((4000, 1, 4))
    gradients = jax.jit(jax.grad(lambda q, k, v: sparse_attention(q, k, v, A).sum(), (0, 1, 2)))
    launches = lambda: (  # noqa: E731
        gradients.trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text().count("sgap_launch")
    )
    assert launches() > 0
    jax.clear_caches()
    with with_failing({"attention rows": "a reason"}), pytest.warns(RuntimeWarning):
        assert launches() > 0
