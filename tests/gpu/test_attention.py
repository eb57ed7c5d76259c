"""Fused attention on the device, forward and backward, against its steps on the CPU in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, cast, rounded
from gpu_session import on_gpu, some
from tolerance import DTYPES
from vector_cases import encoded, vectors

from sgap_jax import AttentionTile, Unfused, sparse_attention

# Of the greatest number of a result: rounding of operands' products, and of probabilities.
ROUGH = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 3e-2, "float16": 4e-3}
TILES = (None, AttentionTile(8), AttentionTile(32), AttentionTile(16, 8))
WIDTHS = ((64, 64), (40, 72), (7, 5), (16, 128), (90, 33))
OCTETS = (AttentionTile(16, octet=True), AttentionTile(8, 4, octet=True))


def check(name, length, dtype, tile, widths, with_bias=False, **given):
    arrays, case, _ = encoded(BATTERY[name], length)
    A, rng, (D, Dv) = vectors(arrays, case, "float32"), np.random.default_rng(5), widths
    sizes = ((2, case.shape[0], 4, D), (2, case.shape[1], 2, D), (2, case.shape[1], 2, Dv))
    x = [rounded(rng.standard_normal(size), dtype) for size in sizes]
    bias = [rng.standard_normal((4, *A.values.shape))] if with_bias else []
    cotangent = rounded(rng.standard_normal((*sizes[0][:3], Dv)), dtype)

    def results(dtype, schedule):
        wide = "float64" if dtype == "float64" else "float32"
        operands = [cast(a, dtype) for a in x] + [cast(a, wide) for a in bias]

        def of(q, k, v, bias=None):
            return sparse_attention(q, k, v, A, bias=bias, schedule=schedule, **given)

        out, pullback = jax.vjp(of, *operands)
        return [np.asarray(a).astype(np.float64) for a in (out, *pullback(cast(cotangent, dtype)))]

    with jax.default_device(jax.devices("cpu")[0]):
        expected = results("float64", Unfused())
    for a, b in zip(results(dtype, on_gpu(tile)), expected, strict=True):
        bound = ROUGH[dtype] * max(1.0, np.abs(b).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=ROUGH[dtype], atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype):
    for i, name in enumerate(some(BATTERY)):
        length, tile = (1, 2, 4, 8, 32)[i % 5], TILES[i % 4]
        widths = ((16, 8), (7, 33), (64, 64))[i % 3]
        check(name, length, dtype, tile, widths, is_causal=bool(i % 2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_octets(dtype):
    # Periods 3, 4 and 5: each V meets each tile and, over the matrices, most widths.
    tiles, widths = (*OCTETS, AttentionTile(8, 16, octet=True), None), WIDTHS
    for i, name in enumerate(some(BATTERY)):
        lengths = jnp.asarray([20, 3], jnp.int32) if i // 2 % 2 else None
        given = dict(key_value_seq_lengths=lengths, is_causal=i % 7 < 3, with_bias=i // 3 % 2 == 1)
        check(name, (8, 16, 32)[i % 3], dtype, tiles[i % 4], widths[i % 5], **given)


def test_gradients_of_attention_in_float16_have_the_same_bits_each_time():
    """In vectors of 8: octet tiles, of which four warps share rows and keys."""
    arrays, case, _ = encoded(BATTERY["tall"], 8)
    A, rng = vectors(arrays, case, "float32"), np.random.default_rng(5)
    sizes = ((1, case.shape[0], 2, 64), *[(1, case.shape[1], 1, 64)] * 2)
    operands = [cast(rng.standard_normal(size), "float16") for size in sizes]

    def loss(*x):
        out = sparse_attention(*x, A, schedule=on_gpu(OCTETS[1]))
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
    first = gradients(*operands)
    for _ in some(range(20), 1):
        for a, b in zip(gradients(*operands), first, strict=True):
            np.testing.assert_array_equal(np.asarray(a).view("u2"), np.asarray(b).view("u2"))
