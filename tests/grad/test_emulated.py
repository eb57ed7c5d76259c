"""The derivatives of each operation, on CUDA kernels in the emulator.

The derivative rules are those of the CPU, which the other files of this folder test separately;
here all derivatives of an operation are one program, compiled once.
"""

import jax
import jax.numpy as jnp
import pytest
from conftest import backend_of
from differentiable_ops import OPS, close, normal

BACKENDS = ("emulated", "emulated-sampled")


# Blocks reach the kernels as vectors, so they have no kernel of their own to test.
@pytest.fixture(params=[name for name in OPS if not name.endswith("_blocks")])
def op(request):
    return OPS[request.param]


@pytest.fixture(params=BACKENDS)
def schedule(request):
    return backend_of(request.param, request.node.nodeid)


def gradient(function):
    def loss(*operands):
        return jnp.sum(jnp.sin(function(*operands)))

    return lambda *operands: jax.grad(loss, tuple(range(len(operands))))(*operands)


def test_two_orders_forward_and_reverse(op, schedule):
    function, twin, operands = op
    tangents = tuple(normal(*x.shape, seed=9) for x in operands)

    def derivatives(f):
        def along(*x):
            pairs = zip(gradient(f)(*x), tangents, strict=True)
            return sum(jnp.sum(jnp.sin(g) * t) for g, t in pairs)

        def all_of(*x):
            return jax.jvp(f, x, tangents), jax.jvp(gradient(f), x, tangents), gradient(along)(*x)

        return jax.jit(all_of)(*operands)

    close(derivatives(lambda *x: function(*x, schedule)), derivatives(twin))


def test_batches(op, schedule):
    function, twin, operands = op
    batches = tuple(jnp.stack([x, 1.1 * x + 0.01, 0.7 * x]) for x in operands)
    last = (*operands[:-1], batches[-1])

    def derivatives(f):
        axes = (None,) * (len(operands) - 1) + (0,)
        one, every = jax.vmap(gradient(f), axes), jax.vmap(gradient(f))
        return jax.jit(lambda x, y: (one(*x), every(*y)))(last, batches)

    close(derivatives(lambda *x: function(*x, schedule)), derivatives(twin))
