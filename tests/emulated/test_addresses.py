"""Kernels at the limits of their operands: much padding, and addresses beyond 32 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import array, from_row_lengths
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from emulator import Fault

from sgap_jax import Problem, Schedule, row_sum, sddmm, sparse_softmax
from sgap_jax.launch import sddmm as sddmm_cuda
from sgap_jax.launch import spmm as spmm_cuda
from sgap_jax.schedules.emulated import Emulated

# More padding than a launch for so few rows has threads.
PADDED = from_row_lengths("much_padding", 31, [3, 0, 7], padding=1500)


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


def entrywise(A, X, Y, schedule):
    """The operations with one result for each entry, as the operation itself or as a gradient."""
    yield sddmm(A, X, Y, schedule=schedule).values
    yield sparse_softmax(A, schedule=schedule).values
    loss = lambda v: jnp.sum(row_sum(A.with_values(v), schedule=schedule) ** 2)
    yield jax.grad(loss)(A.values)


@pytest.mark.parametrize("point", [None, "{<1 row, 1 col>, 1}", "{<1/8 row, 1 col>, 8}"])
def test_all_of_much_padding_gets_zeros(point):
    A = array(PADDED, jnp.float32)
    X, Y = jnp.ones((3, 2), jnp.float32), jnp.ones((31, 2), jnp.float32)
    schedule = Emulated(emulate, None if point is None else Schedule.parse(point))
    expected = entrywise(A, X, Y, None)
    for mine, other in zip(entrywise(A, X, Y, schedule), expected, strict=True):
        assert not np.asarray(mine)[PADDED.stored :].any()
        np.testing.assert_allclose(mine, other, rtol=1e-5)


@pytest.mark.parametrize(
    "point",
    ["{<1 row, 4 col>, 1}", "{<1/8 row, 1 col>, 8}", "{<4 nnz, 2 col>, 1}", "{<1 nnz, 4 col>, 8}"],
)
def test_a_far_row_of_b_is_not_a_near_one(point):
    """Row 2^30 of 8 columns is 2^33 values away: in 32 bits this would be 0, where there is
    memory."""
    problem = Problem("spmm", (1, 2**30 + 1), 1, n=8, platform="cuda")
    call = spmm_cuda.launch_plan(problem, Schedule.parse(point))
    arrays = [np.ones(1, np.float32), np.array([0, 1], np.int32), np.array([2**30], np.int32)]
    arrays += [np.zeros(0, np.int32), np.ones((4, 8), np.float32)]
    with pytest.raises(Fault, match="out of bounds"):
        emulate(call, arrays, [((1, 8), np.float32)])


@pytest.mark.parametrize("point", ["{<1 nnz, 4 col>, 2}", "{<1 row, 4 col>, 2}"])
def test_a_far_row_of_y_is_not_a_near_one(point):
    problem = Problem("sddmm", (1, 2**30 + 1), 1, n=8, platform="cuda")
    call = sddmm_cuda.launch_plan(problem, Schedule.parse(point))
    arrays = [np.array([0, 1], np.int32), np.array([2**30], np.int32)]
    arrays += [np.ones((1, 8), np.float32), np.ones((4, 8), np.float32)]
    arrays += 2 * [np.zeros(0, np.float32)]
    with pytest.raises(Fault, match="out of bounds"):
        emulate(call, arrays, [((1,), np.float32)])
