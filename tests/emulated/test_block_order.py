"""Blocks in other orders: deterministic schedules give the same bits, the others may not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from cuda_sources import ptx, require_nvrtc
from differentiable_ops import OPS
from emulated_launch import emulate
from emulator import Memory, Program

from sgap_jax import Problem, Schedule, legal_points, spmm
from sgap_jax.schedules.emulated import Emulated

CASE = BATTERY["one_heavy_row"]
DETERMINISTIC = [
    point for point in legal_points(Problem("spmm", (100, 90), 1000, n=4)) if point.deterministic
]
OTHERS = ["{<1/32 row, 1 col>, 4}", "{<16 nnz, 1 col>, 1}", "{<1 nnz, 4 col>, 32}"]


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


def in_order(seed):
    """An emulated launch with its blocks one after another, in the random order of `seed`."""

    def run(call, inputs, outputs):
        order = np.random.default_rng(seed).permutation(np.prod(call.grid))
        return emulate(call, inputs, outputs, order=order.tolist())

    return run


def results(schedule):
    """A B with three orders of the blocks, of 32 threads each so that a row has many blocks."""
    A = array(CASE, "float32")
    B = np.random.default_rng(0).standard_normal((A.shape[1], 4)).astype(np.float32)
    point = Schedule.parse(f"{schedule} block_size=32")
    return [np.asarray(spmm(A, B, schedule=Emulated(in_order(seed), point))) for seed in range(3)]


@pytest.mark.parametrize("point", DETERMINISTIC, ids=str)
def test_deterministic_points_give_the_same_bits(point):
    first, *others = results(point)
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("point", OTHERS)
def test_points_that_add_atomically_may_not(point):
    assert not Schedule.parse(point).deterministic
    first, *others = results(point)
    assert any((other != first).any() for other in others)
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_every_default_gives_the_same_bits_and_so_do_its_derivatives(op):
    function, _, operands = OPS[op]

    def derivatives(schedule):
        loss = lambda *x: jnp.sum(jnp.sin(function(*x, schedule)))
        return jax.jit(jax.value_and_grad(loss, tuple(range(len(operands)))))(*operands)

    first = derivatives(Emulated(emulate))
    jax.tree.map(np.testing.assert_array_equal, derivatives(Emulated(in_order(1))), first)


def test_an_order_is_a_permutation_counted_along_x_first():
    source = """extern "C" __global__ void k(int* y, int* count) {
      if (threadIdx.x == 0) y[blockIdx.y * gridDim.x + blockIdx.x] = atomicAdd(count, 1);
    }"""
    program, memory = Program(ptx(source)), Memory()
    y, count = np.zeros(6, np.int32), np.zeros(1, np.int32)
    arguments = [memory.put(y), memory.put(count)]
    order = [4, 0, 5, 1, 3, 2]
    program.run("k", (3, 2), 32, arguments, memory, order=order)
    np.testing.assert_array_equal(memory.get(arguments[0], y), np.argsort(order))
    with pytest.raises(ValueError, match="k: order must be a permutation of 6 blocks"):
        program.run("k", (3, 2), 32, arguments, memory, order=[0, 1, 2, 3, 4, 4])
