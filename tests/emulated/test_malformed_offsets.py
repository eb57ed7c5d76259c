"""Unchecked row offsets: the promises of docs/in_jax.md for CUDA."""

import itertools

import numpy as np
import pytest
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from emulator import Fault

from sgap_jax import Problem, Schedule
from sgap_jax.launch.spmm import launch_plan

M, K, N, NNZ = 7, 5, 3, 90
POINTS = ["{<2 row, 1 col>, 1}", "{<1/8 row, 1 col>, 4}", "{<4 nnz, 2 col>, 1}"]
POINTS += ["{<1 nnz, 1 col>, 8} worker_dim_r=1/2"]
FIXED = {
    "falling": [90, 75, 60, 45, 30, 15, 0, 0],
    "falling to all": [90, 75, 60, 45, 30, 15, 0, 90],
    "up and down": [0, 90, 0, 90, 0, 90, 0, 90],
    "none before the last": [90] * 8,
    "not from zero": [40, 41, 41, 50, 60, 70, 80, 90],
    "fewer in the end": [0, 90, 90, 90, 90, 90, 90, 10],
}


@pytest.mark.parametrize("point", POINTS)
def test_offsets_in_any_order_end_and_stay_within_bounds(point):
    require_nvrtc()
    call = launch_plan(Problem("spmm", (M, K), NNZ, N, platform="cuda"), Schedule.parse(point))
    rng, ended = np.random.default_rng(0), 0
    values, B = np.ones(NNZ, np.float32), np.ones((K, N), np.float32)
    columns, nothing = rng.integers(0, K, NNZ).astype(np.int32), np.zeros(0, np.int32)
    for offsets in (*FIXED.values(), *rng.integers(0, NNZ + 1, (24, M + 1))):
        inputs = (values, offsets, columns, nothing, B)
        inputs = [np.asarray(x, np.int32) if x is offsets else x for x in inputs]
        try:
            # With valid offsets a problem of this size takes about 1000 steps.
            emulate(call, inputs, [((1, M, N), np.float32)], step_limit=30_000)
            ended += 1
        except Fault as fault:
            # Two groups may both treat a row as theirs only.
            assert str(fault).partition(": ")[2].startswith("race on global memory"), fault
    assert ended > 5


@pytest.mark.parametrize("point", POINTS)
def test_offsets_of_one_structure_do_not_reach_another(point):
    require_nvrtc()
    problem = Problem("spmm", (M, K), NNZ, N, batch=3, platform="cuda")
    call = launch_plan(problem, Schedule.parse(point), (3, 1), structures=3).of_structures(3)
    rng, ended = np.random.default_rng(0), 0
    values = rng.integers(-3, 4, (3, NNZ)).astype(np.float32)
    values[1] = np.nan
    B = rng.integers(-3, 4, (K, N)).astype(np.float32)
    columns, nothing = rng.integers(0, K, (3, NNZ)).astype(np.int32), np.zeros(0, np.int32)
    valid = np.sort(rng.integers(0, NNZ + 1, (2, M + 1)).astype(np.int32))
    valid[:, 0] = 0
    right = np.zeros((2, M, N))
    for i, structure in enumerate((0, 2)):
        for row, (first, last) in enumerate(itertools.pairwise(valid[i])):
            own = slice(first, last)
            right[i, row] = values[structure, own] @ B[columns[structure, own]]
    for offsets in FIXED.values():
        three = np.asarray([valid[0], offsets, valid[1]], np.int32)
        try:
            (C,) = emulate(
                call,
                (values, three, columns, nothing, B),
                [((3, M, N), np.float32)],
                step_limit=90_000,
            )
        except Fault as fault:
            assert str(fault).partition(": ")[2].startswith("race on global memory"), fault
            continue
        np.testing.assert_array_equal(C[[0, 2]], right)
        ended += 1
    assert ended > 1
