"""Derivatives of every operation on the device against automatic ones of its dense twin."""

import jax
import jax.numpy as jnp
import pytest
from differentiable_ops import OPS, close, normal, scalar
from gpu_session import on_gpu, some

NAMES = some(OPS)


@pytest.fixture(params=NAMES)
def op(request):
    """(function of the operands, dense twin, operands), float64."""
    function, twin, operands = OPS[request.param]
    return (lambda *x: function(*x, on_gpu())), twin, operands


def test_value_and_gradient(op):
    function, twin, operands = op
    every = tuple(range(len(operands)))
    close(function(*operands), twin(*operands))
    expected = jax.jit(jax.grad(scalar(twin), every))(*operands)
    close(jax.grad(scalar(function), every)(*operands), expected)
    close(jax.jit(jax.grad(scalar(function), every))(*operands), expected)


def test_second_order(op):
    function, twin, operands = op
    tangents = tuple(normal(*x.shape, seed=9) for x in operands)

    def along(f):
        every = tuple(range(len(operands)))
        return jax.jit(lambda *x: jax.jvp(jax.grad(scalar(f), every), x, tangents)[1])

    close(along(function)(*operands), along(twin)(*operands))


def test_vmap_over_every_operand(op):
    function, twin, operands = op
    batched = [jnp.stack([x, 2 * x, -x]) for x in operands]
    close(jax.vmap(function)(*batched), jax.vmap(twin)(*batched))
    gradient = jax.vmap(jax.grad(scalar(function)))
    close(gradient(*batched), jax.vmap(jax.grad(scalar(twin)))(*batched))
