"""Soft cap, distances, segments, offsets and dropout in the CUDA kernels, run by the emulator and
compared with the steps in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax import CSR, CVS, AttentionTile, Reference, SparseArray, sparse_attention
from sgap_jax.schedules.emulated import Emulated

L, S, H, HK, D, DV = 26, 31, 4, 2, 8, 5
STORED = np.random.default_rng(0).random((L, S)) < 0.4
STORED[5], STORED[8:16] = False, False  # a row, and all rows of a vector
IDS = np.sort(np.random.default_rng(1).integers(-1, 3, (2, L)), axis=1)
KEY_IDS = np.sort(np.random.default_rng(2).integers(-1, 3, (2, S)), axis=1)
EACH = {
    "softcap": dict(softcap=0.7),
    "offset": dict(query_offset=jnp.asarray([3, -2]), is_causal=True),
    "segments": dict(segment_ids=IDS[1], kv_segment_ids=KEY_IDS[1]),
    "dropout": dict(dropout_rate=0.4, dropout_rng=3),
    "all": dict(
        softcap=1.5,
        segment_ids=IDS,
        kv_segment_ids=KEY_IDS,
        query_offset=jnp.asarray([3, -2]),
        dropout_rate=0.3,
        dropout_rng=7,
        key_value_seq_lengths=jnp.asarray([31, 20]),
    ),
}
CASES = [
    ("softcap", CSR, "float64"),
    ("offset", CVS(4), "float32"),
    ("segments", CVS(8), "float32"),
    ("dropout", CSR, "float16"),
    ("all", CSR, "float32"),
    ("all", CVS(8), "bfloat16"),
    ("all", CVS(2), "float64"),
]
ROUGH = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2, "float16": 2e-3}


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


def operands(dtype, wide):
    rng = np.random.default_rng(3)
    q, k, v = (
        jnp.asarray(2 * rng.standard_normal((2, *size)), dtype)
        for size in ((L, H, D), (S, HK, D), (S, HK, DV))
    )
    slopes, table = rng.random(H), rng.standard_normal((H, 12))
    return q, k, v, jnp.asarray(slopes, wide), jnp.asarray(table, wide)


def results(format, dtype, schedule, learned, options):
    """(out, lse, gradients of q, k, v and, if `learned`, of slopes and table)."""
    A = SparseArray.from_dense(STORED.astype(np.float32), format=format)
    wide = "float64" if dtype == "float64" else "float32"
    x = operands(dtype, wide)[: 5 if learned else 3]

    def f(q, k, v, *more):
        own = dict(zip(("alibi_slopes", "relative_bias"), more, strict=False))
        out, lse = sparse_attention(
            q, k, v, A, return_lse=True, schedule=schedule, **own, **options
        )
        return out.astype(wide), jnp.where(jnp.isinf(lse), 0, lse)

    loss = lambda *x: sum(jnp.sum(jnp.sin(y)) for y in f(*x))
    found = jax.jit(lambda *x: (f(*x), jax.grad(loss, tuple(range(len(x))))(*x)))(*x)
    return jax.tree.map(lambda y: np.asarray(y, np.float64), jax.tree.leaves(found))


def check(name, format, dtype):
    with jax.enable_x64(dtype == "float64"):
        learned = name == "all"
        run = lambda schedule: results(format, dtype, schedule, learned, EACH[name])
        for a, b in zip(run(Emulated(emulate)), run(Reference()), strict=True):
            size = max(np.abs(b).max(), 1)
            np.testing.assert_allclose(a, b, rtol=0, atol=ROUGH[dtype] * size)


@pytest.mark.parametrize(("name", "format", "dtype"), CASES, ids=str)
def test_terms_and_their_gradients(name, format, dtype):
    check(name, format, dtype)


@pytest.mark.tier("test")
def test_dropout_drops_the_same_entries_as_on_the_cpu():
    """Each key's value is a column of its own: where the result is zero, the entry is dropped."""
    A = SparseArray.from_dense(STORED.astype(np.float32))
    q, k = jnp.zeros((2, L, H, 4)), jnp.zeros((2, S, H, 4))
    v = jnp.broadcast_to(jnp.eye(S)[None, :, None], (2, S, H, S))
    drop = dict(dropout_rate=0.5, dropout_rng=11)
    found, expected = (
        np.asarray(sparse_attention(q, k, v, A, schedule=schedule, **drop))
        for schedule in (Emulated(emulate), None)
    )
    np.testing.assert_array_equal(found == 0, expected == 0)
    assert abs((found != 0).mean() / STORED.mean() - 0.5) < 0.05


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("curb = 1 - t * t", "curb = 1"),
        ("unsigned(column) - unsigned(row) - unsigned(offset)", "unsigned(column) - unsigned(row)"),
        ("query_segments[row] != key_segments[column]", "false"),
        ("column <= (long long)row + offset", "true"),
        ("Mixed(own + seeds[1], 0)", "Mixed(own + seeds[0], 0)"),
        ("Of(kManyKeySegments, batch)", "Of(kManyTable, batch)"),
    ],
)
def test_planted_bugs_are_caught(right, wrong, planted):
    name = "offset" if "long long" in right else "all"
    planted("attention_terms.cuh", right, wrong, lambda: check(name, CSR, "float32"))


def test_tiles_without_terms_say_so():
    A = SparseArray.from_dense(STORED.astype(np.float32))
    q, k, v, *_ = operands("float32", "float32")
    schedule = Emulated(emulate, AttentionTile(8, chunk=2))
    with pytest.raises(NotImplementedError, match="pieces of rows have no soft cap"):
        sparse_attention(q, k, v, A, softcap=2.0, schedule=schedule)
