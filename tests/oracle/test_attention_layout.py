"""The layout of attention's work on the CPU: pieces of rows and keys, copies, groups of heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import cast
from native_call import kernel_isas, run

from sgap_jax import CVS, Problem, masks, sparse_attention
from sgap_jax.schedules.cpu import attention_plan
from sgap_jax.schedules.machine import Machine, on_machine


def plan(
    heads,
    key_heads,
    key_batch,
    batch,
    width=64,
    dtype="float32",
    nnz=512 * 64,
    rows=512,
    keys=512,
    **of,
):
    problem = Problem(
        "attention",
        (rows, keys),
        nnz,
        n=width,
        dtype=dtype,
        batch=batch * heads,
        platform="cpu",
        **of,
    )
    return attention_plan(problem, key_heads, key_batch, batch, (width, width))


def test_the_pieces_of_gradients_are_tasks_for_the_processors(monkeypatch):
    def pieces(processors, *heads):
        monkeypatch.setattr("os.cpu_count", lambda: processors)
        return [plan(n, n, 1, 1).pieces for n in heads]

    assert pieces(None, 1, 4) == pieces(1, 1, 4) == [1, 1]
    assert pieces(2, 1, 2, 3, 4, 64) == [2, 1, 2, 1, 1]
    assert pieces(64, 1, 2, 3, 4, 8, 64) == pieces(8, 1, 2, 3, 4, 8, 64) == [8, 4, 5, 2, 1, 1]
    assert plan(8, 1, 1, 1).pieces == 8 and plan(1, 1, 1, 64).pieces == 1
    assert plan(1, 1, 1, 1, rows=3).pieces == 3 and plan(1, 1, 1, 1, keys=3).pieces == 3
    assert plan(1, 1, 1, 1, rows=24, format="CVS(8)").pieces == 3


def test_keys_are_copied_where_that_is_needed_or_pays():
    def packed(heads, uses=64, **of):
        found = plan(heads, heads, 1, 1, nnz=512 * uses, **of)
        return found.packed, found.backward_packed

    assert {packed(n) for n in (1, 4, 12, 20)} == {(False, False)}
    # Strides of half a page and of a page; rows used often, and less often.
    assert packed(8) == packed(24) == packed(16, width=32) == packed(4, width=128) == (False, True)
    assert packed(16) == packed(8, width=128) == packed(16, width=256) == (True, True)
    assert packed(8, uses=12) == packed(16, uses=4) == (False, False) != packed(16, uses=12)
    assert packed(2, width=512) == (False, False)  # rows of half a page
    assert plan(4, 16, 1, 4).packed
    assert packed(4, width=40) == packed(4, dtype="bfloat16") == (True, True)
    assert packed(8, width=24, dtype="float64") == (False, False)


def test_copies_on_intel_pay_sooner_where_vectors_are_long():
    def packed(length, uses):
        shape = dict(rows=4096, keys=4096, nnz=4096 * length * uses, format=f"BCSR({length}, 64)")
        found = plan(8, 8, 1, 1, **shape)
        return found.packed and found.backward_packed

    with on_machine(Machine(intel=True)):
        assert [packed(length, 8) for length in (8, 16, 32, 64)] == [False, False, True, True]
        assert [packed(64, 7), packed(8, 31), packed(8, 32)] == [False, False, True]
    assert not packed(64, 32)


def test_keys_that_many_sequences_share_are_copied_once():
    """One copy for each sequence would take 550 GB."""
    count, keys = 1 << 16, 1 << 16
    A = masks.from_function(lambda i, j: j % (1 << 14) == 0, 1, keys)
    rng = np.random.default_rng(0)
    q = cast(rng.standard_normal((count, 1, 1, 1, 16)), "bfloat16")
    k, v = (cast(rng.standard_normal((1, keys, 1, 16)), "bfloat16") for _ in range(2))
    out = jax.jit(jax.vmap(lambda q, k, v: sparse_attention(q, k, v, A), (0, None, None)))(q, k, v)
    for i in (0, count - 1):
        np.testing.assert_array_equal(out[i], sparse_attention(q[i], k, v, A))


@pytest.mark.parametrize("shared", [False, True])
def test_groups_of_heads_are_as_each_alone(shared):
    """Copies take 2 MB a head, and only a few exist at a time."""
    A = masks.from_function(lambda i, j: (i * 61 + j * 7) % 64 < 4, 16, 4096, format=CVS(4))
    rng = np.random.default_rng(0)
    batch, heads = 3, 4
    sizes = [(batch, 16, heads, 64)] + [(1 if shared else batch, 4096, heads, 64)] * 2
    x = [cast(rng.standard_normal(size), "bfloat16") for size in sizes]

    @jax.jit
    def step(q, k, v):
        if k.shape[0] != q.shape[0]:
            f = jax.vmap(lambda q, k, v: sparse_attention(q, k, v, A), (0, None, None))
            k, v = k[0], v[0]
        else:
            f = lambda q, k, v: sparse_attention(q, k, v, A)
        out, pullback = jax.vjp(f, q, k, v)
        return out, pullback(out)

    out, (dq, dk, dv) = step(*x)
    assert float(jnp.abs(dk).max()) > 0
    for b in range(batch):
        for h in range(heads):
            mine = [y[b % y.shape[0], :, h : h + 1][None] for y in x]
            alone, (own_q, own_k, own_v) = step(*mine)
            np.testing.assert_array_equal(out[b, :, h], alone[0, :, 0])
            close = functools.partial(np.testing.assert_allclose, rtol=0.02, atol=1e-5)
            close(*(x.astype(jnp.float32) for x in (dq[b, :, h], own_q[0, :, 0])))
            if not shared:
                close(*(x.astype(jnp.float32) for x in (dk[b, :, h], own_k[0, :, 0])))
                close(*(x.astype(jnp.float32) for x in (dv[b, :, h], own_v[0, :, 0])))


@pytest.mark.parametrize("isa", kernel_isas())
def test_keys_in_pieces(isa):
    """In any order of the columns, with rows that see nothing in some pieces or in all."""
    rng = np.random.default_rng(0)
    rows, keys = 30, 60
    counts = rng.integers(0, 40, rows) * (np.arange(rows) % 5 > 0)
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    columns = rng.integers(-2, keys + 2, offsets[-1]).astype(np.int32)  # some do not exist
    columns[offsets[7] : offsets[8]].sort()
    none, lengths = np.zeros((1, 0), np.float32), np.int32([[50], [keys]])
    sinks = rng.standard_normal((1, 4))
    for dtype in ("float32", "float64", "bfloat16"):
        wide = "float64" if dtype == "float64" else "float32"
        q = cast(rng.standard_normal((2, rows, 4, 16)), dtype)
        k, v = (cast(rng.standard_normal((2, keys, 2, 16)), dtype) for _ in range(2))
        results = [(q.shape, q.dtype), (q.shape[:3], wide)]
        for sink in (none.astype(wide), sinks.astype(wide)):

            def call(pieces, chunk, q=q, k=k, v=v, sink=sink, wide=wide, results=results):
                given = (q, k, v, none.astype(wide), sink, lengths, offsets, columns)
                attributes = dict(vector_length=1, scale=0.25, is_causal=False, pack=True)
                attributes |= dict(chunk_nonzeros=chunk, key_pieces=pieces)
                found = run("sgap_attention_cvs_v1", given, results, attributes, isa)
                return [np.asarray(x, np.float64) for x in found]

            want = call(1, 10_000)
            assert np.isinf(want[1]).any() == (sink.size == 0) and np.isfinite(want[1]).any()
            for pieces, chunk in ((2, 10_000), (7, 60), (60, 10_000)):
                for got, expected in zip(call(pieces, chunk), want, strict=True):
                    tolerance = 1e-12 if dtype == "float64" else 1e-5
                    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_pieces_of_keys_fit_the_cache():
    def of(keys, entries=256, **more):
        found = plan(8, 8, 1, 1, rows=keys, keys=keys, nnz=entries * keys, **more)
        return found.key_pieces, found.nonzeros

    assert of(512) == of(2048, 16) == of(65536, dtype="bfloat16") == (1, 1)
    assert of(65536, format="CVS(4)") == (1, 1)
    pieces, nonzeros = of(16384)
    assert 2 <= pieces <= 16 and nonzeros == 16 * 16384
    assert of(65536)[0] == 16  # with 16 entries of a row in each
    assert plan(8, 8, 1, 1, rows=1, keys=65536, nnz=2048).key_pieces == 1  # a step of decoding


def test_keys_half_a_page_apart_are_copied_for_short_vectors():
    with on_machine(Machine(vector_bytes=32, l2_bytes=1 << 19)):
        found = plan(8, 8, 1, 1, rows=4096, keys=4096, nnz=256 * 4096)
        assert found.packed and found.key_pieces == 1
        assert not plan(4, 4, 1, 1, rows=4096, keys=4096, nnz=256 * 4096).packed
        long = plan(8, 8, 1, 1, rows=16384, keys=16384, nnz=256 * 16384)
        assert long.packed and long.key_pieces == 8


def test_block_rows_are_whole_where_rows_are_taken_in_groups():
    def nonzeros(length, heads, vector_bytes):
        with on_machine(Machine(vector_bytes=vector_bytes)):
            format = "CSR" if length == 1 else f"CVS({length})"
            more = dict(rows=4096, keys=4096, nnz=1024 * 4096, format=format)
            return plan(heads, heads, 1, 1, **more).nonzeros

    for vector_bytes in (32, 64):
        assert nonzeros(64, 8, vector_bytes) == 1024 * 64
        assert nonzeros(1024, 4, vector_bytes) == 1  # too few block rows to leave them whole
        assert nonzeros(1024, 8, vector_bytes) == 1024 * 1024
    assert nonzeros(32, 8, 64) == 1024 * 32
    assert nonzeros(16, 8, 64) == nonzeros(64, 8, 16) == 1  # other kernels
