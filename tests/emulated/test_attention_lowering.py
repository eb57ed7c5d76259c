"""sparse_attention on the emulated CUDA kernels: launches, values and derivatives of any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from cuda_sources import require_nvrtc
from differentiable_ops import close, normal
from emulated_launch import emulate
from jax.test_util import check_grads

from sgap_jax import CVS, AttentionTile, CpuTile, Schedule, Unfused, sparse_attention
from sgap_jax.masks import from_function, intersection
from sgap_jax.schedules.emulated import Emulated

CASE = BATTERY["empty_rows_at_both_ends"]
(M, K), B, H = CASE.shape, 2, 4
Q, KEYS, VALUES = normal(B, M, H, 3), normal(B, K, 2, 3), normal(B, K, 2, 5)


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def pattern(length):
    A = array(CASE, jnp.float64)
    return A if length == 1 else A.asformat(CVS(length))


def attention(length, schedule, **given):
    return lambda q, k, v: sparse_attention(q, k, v, pattern(length), schedule=schedule, **given)


class Counted:
    """The emulator with a record of the kernels that it ran."""

    def __init__(self):
        self.kernels = []

    def __call__(self, call, inputs, outputs):
        self.kernels.append(call.kernel)
        return emulate(call, inputs, outputs)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("given", [{}, dict(is_causal=True, return_lse=True)], ids=str)
def test_one_launch_forward_and_two_backward(length, given):
    run = Counted()
    function = attention(length, Emulated(run), **given)
    expected = attention(length, Unfused(), **given)
    close(function(Q, KEYS, VALUES), expected(Q, KEYS, VALUES))
    assert run.kernels == ["AttentionKernel"]

    def loss(function):
        return lambda *x: sum(
            jnp.sum(jnp.sin(jnp.where(jnp.isinf(y), 0, y))) for y in jax.tree.leaves(function(*x))
        )

    run.kernels.clear()
    found = jax.grad(loss(function), (0, 1, 2))(Q, KEYS, VALUES)
    assert run.kernels == [
        "AttentionKernel",
        "AttentionRowsBackwardKernel",
        "AttentionKeysBackwardKernel",
    ]
    close(found, jax.jit(jax.grad(loss(expected), (0, 1, 2)))(Q, KEYS, VALUES))


def test_bias_sinks_and_lengths():
    A = pattern(4)
    bias, sinks = normal(H, *A.values.shape), normal(H)

    def loss(schedule):
        def function(q, bias, sinks):
            out = sparse_attention(
                q,
                KEYS,
                VALUES,
                A,
                bias=bias,
                sinks=sinks,
                key_value_seq_lengths=jnp.asarray([7, 3], jnp.int32),
                schedule=schedule,
            )
            return jnp.sum(jnp.sin(out))

        return jax.value_and_grad(function, (0, 1, 2))

    close(loss(Emulated(emulate))(Q, bias, sinks), loss(Unfused())(Q, bias, sinks))


def test_derivatives_to_order_2():
    few = (Q[:1, :, :1], KEYS[:1, :, :1], VALUES[:1, :, :1])
    function = jax.jit(attention(4, Emulated(emulate)))
    check_grads(function, few, order=2, modes=["fwd", "rev"], eps=1e-5)


def test_vmap_over_a_part_of_the_operands():
    emulated, expected = (attention(1, s) for s in (Emulated(emulate), Unfused()))
    many = normal(3, B, M, H, 3)
    wide = normal(3, B, K, 2, 5)
    for in_axes, args in (
        ((0, None, None), (many, KEYS, VALUES)),
        ((None, None, 0), (Q, KEYS, wide)),
    ):
        close(jax.vmap(emulated, in_axes)(*args), jax.vmap(expected, in_axes)(*args))


def test_named_tiles_and_what_they_do_not_take():
    q, k, v = (x.astype(jnp.bfloat16) for x in (normal(B, M, H, 16), normal(B, K, 2, 16), VALUES))
    tile = AttentionTile(8, 2, octet=True)
    assert Schedule.parse(str(tile)) == tile and Schedule.parse("Unfused()") == Unfused()
    run = Counted()
    got = sparse_attention(q, k, v, pattern(8), schedule=Emulated(run, tile))
    expected = sparse_attention(q, k, v, pattern(8), schedule=Unfused())
    np.testing.assert_allclose(got.astype(float), expected.astype(float), atol=0.03)
    assert run.kernels == ["AttentionOctetKernel"]
    with pytest.raises(NotImplementedError, match="8, 16 or 32 rows"):
        sparse_attention(q, k, v, pattern(1), schedule=Emulated(run, tile))
    with pytest.raises(NotImplementedError, match="not on cpu|platform cuda"):
        sparse_attention(q, k, v, pattern(8), schedule=tile)
    with pytest.raises(NotImplementedError, match="platform cpu"):
        sparse_attention(q, k, v, pattern(8), schedule=Emulated(run, CpuTile()))


def test_gradients_in_octets_with_a_pattern_for_each_head():
    """The default for 16-bit dtypes with vectors of 8."""
    A = pattern(8)
    fewer = intersection(A, from_function(lambda i, j: (i // 8 + j) % 3 > 0, *CASE.shape))
    q, k, v = (x.astype(jnp.bfloat16) for x in (normal(1, M, 2, 16), normal(1, K, 1, 16), VALUES))
    run, v = Counted(), v[:1, :, :1]

    def gradients(schedule, *x):
        def loss(*x):
            out = sparse_attention(*x, [A, fewer.asformat(CVS(8))], schedule=schedule)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*x)

    found = gradients(Emulated(run), q, k, v)
    expected = gradients(None, *(x.astype(jnp.float32) for x in (q, k, v)))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.03 * float(abs(b).max()))
    kernels = ("", "RowsBackward", "KeysBackward")
    assert sorted(set(run.kernels)) == sorted(f"AttentionOctet{name}Kernel" for name in kernels)


def test_lanes_are_those_of_the_wider_of_keys_and_values():
    run = Counted()
    v = normal(B, K, 2, 200)
    close(attention(1, Emulated(run))(Q, KEYS, v), attention(1, Unfused())(Q, KEYS, v))
    assert run.kernels == ["AttentionKernel"]


def test_heads_too_wide_for_the_kernels_are_unfused():
    run = Counted()
    v = normal(B, K, 2, 700)
    got = attention(1, Emulated(run))(Q, KEYS, v)
    close(got, attention(1, Unfused())(Q, KEYS, v))
    assert "SparseSoftmaxKernel" in run.kernels and "AttentionKernel" not in run.kernels
