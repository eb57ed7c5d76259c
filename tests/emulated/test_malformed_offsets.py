"""Unchecked row offsets: the promises of docs/in_jax.md for CUDA."""

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
