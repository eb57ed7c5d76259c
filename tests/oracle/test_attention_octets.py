"""Attention and its gradients in bfloat16 on matrix tiles of the CPU: every instruction set,
against float64 loops."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import GRADIENTS, ROUGH, Attention, Setting
from battery import BATTERY, cast
from native_call import run

from sgap_jax import CVS, CpuTile, OctetTile, SparseArray, sparse_attention
from sgap_jax.runtime.native import native

isas = pytest.mark.parametrize("isa", native.supported_isas())
OPTIONS = dict(bias="heads", sinks=True, lengths=True, is_causal=True)
# Parts of 32 features that are full and that are not, more than two of them, and no features.
SETTINGS = {
    4: [("every_length", dict(depth=64, value_depth=64, heads=4, key_heads=2, **OPTIONS))],
    8: [
        ("every_length", dict(depth=32, value_depth=70, heads=3, **OPTIONS)),
        ("full", dict(depth=130, value_depth=3, batch=1, is_causal=True)),
        ("no_entries", dict(sinks=True)),
        ("padded", dict(depth=64, value_depth=64, shared=("k", "v", "dout"), lengths=True)),
    ],
    16: [("tall", dict(depth=7, value_depth=40, bias="shared", batch=1))],
    32: [("every_length", dict(depth=96, value_depth=32, heads=4, key_heads=4, **OPTIONS))],
}


@functools.cache
def attention(name, length, options):
    found = Attention(BATTERY[name], Setting(length, dtype="bfloat16", **dict(options)))
    expected = found.oracle()
    found.oracle = lambda: expected
    return found


def of(name, length, **options):
    return attention(name, length, tuple(options.items()))


def native_run(x, isa, threads=1, pieces=1, chunk=64, pack=True, kind="octet"):
    """{name: result} of the two kernels; the gradients are of the oracle's out and lse."""
    shared = dict(vector_length=x.of.length, scale=x.scale, is_causal=x.of.is_causal, pack=pack)
    q, k, v, dout = (cast(a, "bfloat16") for a in (x.q, x.k, x.v, x.dout))
    bias, sinks, ends = (a.astype(np.float32) for a in (x.bias, x.sinks, x.lengths))
    ends, structure = ends.astype(np.int32), (x.offsets, x.indices)
    rows = (x.of.batch, x.m, x.of.heads)
    kept = (((*rows, x.of.value_depth), q.dtype), (rows, np.float32))
    target = f"sgap_attention_{kind}_v1"
    given = (q, k, v, bias, sinks, ends, *structure)
    found = run(
        target, given, kept, shared | dict(chunk_nonzeros=chunk, key_pieces=1), isa, threads
    )
    out, lse, *_ = x.oracle()
    given = (dout, np.full((1, *rows[1:]), 0.3, np.float32), q, k, v, bias, ends)
    given += (cast(out, "bfloat16"), lse.astype(np.float32), *structure)
    stored = (x.of.batch, x.of.heads, x.vectors, x.of.length) if x.of.bias else (1, 0)
    results = [((x.of.batch, *a.shape[1:]), a.dtype) for a in (q, k, v)] + [(stored, np.float32)]
    more = dict(pieces=pieces, wrt_bias=x.of.bias is not None)
    target = f"sgap_attention_backward_{kind}_v1"
    found += run(target, given, results, shared | more, isa, threads)
    return dict(zip(("out", "lse", *GRADIENTS), found, strict=True))


def check(x, isa, **how):
    expected = dict(zip(("out", "lse", "delta", *GRADIENTS), x.oracle(), strict=True))
    if not x.of.bias:
        expected["dbias"] = np.zeros((1, 0))
    for name, a in native_run(x, isa, **how).items():
        rough = 1e-5 if name == "lse" else ROUGH["bfloat16"]
        a, b = np.asarray(a).astype(np.float64), expected[name]
        size = max(1.0, np.abs(np.where(np.isfinite(b), b, 0)).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=rough, atol=rough * size, err_msg=name)


@isas
@pytest.mark.parametrize("length", SETTINGS)
def test_octets(length, isa):
    for name, options in SETTINGS[length]:
        check(of(name, length, **options), isa)
        check(of(name, length, **options), isa, pieces=3, chunk=1 << 20)


@pytest.mark.parametrize("heads", [1, 4])
def test_keys_that_are_read_where_they_are(heads):
    x = of("tall", 8, depth=64, value_depth=32, heads=4, key_heads=heads, batch=1)
    check(x, native.isa(), pack=False)
    shared = dict(depth=64, value_depth=64, shared=("k", "v", "dout"), lengths=True)
    check(of("padded", 8, **shared), native.isa(), pack=False, pieces=heads)


@isas
def test_keys_that_follow_each_other(isa):
    """A tile of them is loaded from where they lie, but only if none is out of its place."""
    for depth in (32, 96):
        x = Attention(BATTERY["every_length"], Setting(8, depth, 33, dtype="bfloat16", batch=1))
        for row, (begin, end) in enumerate(zip(x.offsets, x.offsets[1:], strict=False)):
            x.indices[begin:end] = np.arange(end - begin) + (x.k.shape[1] - (end - begin)) // 2
            if row % 2:
                some = x.indices[begin + 3 : begin + 7]
                some[:] = some[::-1].copy()
        expected = x.oracle()
        x.oracle = lambda expected=expected: expected
        check(x, isa, chunk=1 << 20)


@isas
def test_threads_change_no_bits(isa):
    x = of("every_length", 8, depth=32, value_depth=70, heads=3, **OPTIONS)
    one, other = (native_run(x, isa, threads, pieces=2) for threads in (1, 3))
    for name, a in one.items():
        np.testing.assert_array_equal(a, other[name], err_msg=name)


@isas
def test_what_is_not_finite_in_keys_that_are_not_stored_reaches_nothing(isa):
    x = Attention(BATTERY["every_length"], Setting(8, 40, 33, dtype="bfloat16", batch=1))
    x.indices = x.indices // 2 * 2  # some are stored twice now
    expected = x.oracle()
    x.oracle = lambda: expected
    check(x, isa)
    clean = native_run(x, isa)
    x.k[:, 1::2], x.v[:, 1::2] = np.nan, np.inf
    for name, a in native_run(x, isa).items():
        np.testing.assert_array_equal(a, clean[name], err_msg=name)


@isas
def test_a_malformed_structure_reads_nothing_else(isa):
    """What other kernels leave out of a traced structure that nobody has checked."""
    x = Attention(BATTERY["every_length"], Setting(8, 33, 64, dtype="bfloat16", bias="heads"))
    expected = x.oracle()
    x.oracle = lambda: expected
    x.indices[::3] += np.int32(2**30)
    x.indices[1::7] = -1
    x.offsets[2] = x.offsets[-1] + 9
    found = native_run(x, isa, pieces=2)
    for name, a in native_run(x, isa, pieces=2, kind="cvs").items():
        a, b = (np.asarray(y).astype(np.float64) for y in (found[name], a))
        np.testing.assert_allclose(a, b, rtol=0.03, atol=0.03 * np.abs(b[np.isfinite(b)]).max())


def test_long_rows_whose_maxima_rise():
    """Several blocks of keys: what was summed before shrinks; runs of keys that follow each other
    and others; in vectors whose last rows are past the end."""
    rng = np.random.default_rng(0)
    mask = np.repeat(rng.random((3, 1300)) < 0.7, 16, 0)[:41]
    mask[:, 400:500] = True
    A = SparseArray.from_dense(mask.astype(np.float32), format=CVS(16))
    q, k, v = (cast(rng.standard_normal((1, n, 2, 32)), "bfloat16") for n in (41, 1300, 1300))
    k = k * jnp.linspace(0.1, 3, 1300, dtype=k.dtype)[None, :, None, None]
    tiled, other = (
        sparse_attention(*(x.astype(t) for x in (q, k, v)), A, return_lse=True, schedule=schedule)
        for t, schedule in (
            ("bfloat16", OctetTile(16, tile_n=32, tile_k=64)),
            ("float32", CpuTile()),
        )
    )
    np.testing.assert_allclose(tiled[0].astype("float32"), other[0], atol=0.02)
    np.testing.assert_allclose(tiled[1], other[1], rtol=1e-5)


def direct(q, k, v, isa, target="attention", more=()):
    """Results of a handler for one head of vectors of 8, all of which store each key."""
    keys = k.shape[1]
    none, structure = np.zeros((1, 0), np.float32), (np.int32([0, keys]), np.arange(keys))
    structure = tuple(x.astype(np.int32) for x in structure)
    rows, shared = (1, 8, 1), dict(vector_length=8, scale=0.125, is_causal=False, pack=True)
    if target == "attention":
        results = [((*rows, v.shape[3]), q.dtype), (rows, np.float32)]
        given = (q, k, v, none, none, none.astype(np.int32), *structure)
        shared |= dict(chunk_nonzeros=64, key_pieces=1)
        return run("sgap_attention_octet_v1", given, results, shared, isa)
    results = [(x.shape, x.dtype) for x in (q, k, v)] + [((1, 0), np.float32)]
    given = (*more[:2], q, k, v, none, none.astype(np.int32), *more[2:], *structure)
    attributes = shared | dict(pieces=1, wrt_bias=False)
    return run("sgap_attention_backward_octet_v1", given, results, attributes, isa)


@isas
def test_large_scores(isa):
    """The greatest score of a row counts as exactly 1, however large its rounding error is."""
    one = lambda value, keys: cast(np.full((1, keys, 1, 64), value), "bfloat16")
    for size in (1e3, 3e4, -3e4, 1e5):
        q, k, v = one(1e5 if abs(size) == 1e5 else abs(size), 8), one(size, 4), one(1, 4)
        out, lse = direct(q, k, v, isa)
        np.testing.assert_array_equal(out.astype(np.float32), 1)
        exact = float(q.flat[0]) * float(k.flat[0]) * 64 * 0.125
        np.testing.assert_allclose(lse, exact + np.log(4), rtol=1e-6)
        more = (out, np.zeros((1, 8, 1), np.float32), out, lse)
        *_, dv, _ = direct(q, k, v, isa, "backward", more)
        assert np.isfinite(dv.astype(np.float32)).all()


@isas
def test_no_features(isa):
    """Scores of no features are 0; values of none have gradients in lse alone."""
    ones = lambda *shape: cast(np.ones(shape), "bfloat16")
    direct(*(cast(np.full((1, n, 1, 64), np.nan), "bfloat16") for n in (8, 4, 4)), isa)
    out, lse = direct(ones(1, 8, 1, 0), ones(1, 4, 1, 0), ones(1, 4, 1, 64), isa)
    np.testing.assert_array_equal(out.astype(np.float32), 1)
    np.testing.assert_allclose(lse, np.log(4), rtol=1e-6)
    q, k, v = ones(1, 8, 1, 32), ones(1, 4, 1, 32), ones(1, 4, 1, 0)
    out, lse = direct(q, k, v, isa)
    more = (out, np.ones((1, 8, 1), np.float32), out, lse)
    dq, dk, *_ = direct(q, k, v, isa, "backward", more)
    np.testing.assert_allclose(dq.astype(np.float32), 0.125, rtol=0.01)
    np.testing.assert_allclose(dk.astype(np.float32), 8 / 4 * 0.125, rtol=0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(vector_length=2), "expected bfloat16 in vectors of 4, 8, 16 or 32 rows"),
        (dict(pack=False), "can be read only where they are packed"),
        (dict(chunk_nonzeros=0), "chunk_nonzeros"),
        (dict(key_pieces=0), "key_pieces"),
    ],
)
def test_the_handler_refuses_attributes(changes, words):
    q = cast(np.ones((1, 8, 1, 8)), "bfloat16")
    none, length = np.zeros((1, 0), np.float32), changes.get("vector_length", 8)
    structure = np.zeros(8 // length + 1, np.int32), np.zeros(0, np.int32)
    attributes = dict(vector_length=8, scale=1.0, is_causal=False, pack=True, chunk_nonzeros=64)
    attributes |= dict(key_pieces=1)
    results = [(q.shape, q.dtype), (q.shape[:3], np.float32)]
    given = (q, q, q, none, none, none.astype(np.int32), *structure)
    with pytest.raises(ValueError, match=words):
        run("sgap_attention_octet_v1", given, results, attributes | changes, native.isa())
