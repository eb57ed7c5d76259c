"""Shared by tests/gpu: a GPU for tests, or its emulation.

SGAP_GPU_RESULTS   a folder: <device>/gpu_tests.json is written there
SGAP_GPU_SECONDS   no test starts after that many seconds
SGAP_GPU_TEST_SECONDS  the process of a test that takes longer is ended; 300 on a GPU
SGAP_GPU_DRY_RUN   runs a few cases of each test on the emulator; tests that need a device skip
"""

import functools
import os
import time

import jax
import numpy as np
import pytest
from emulated_launch import emulate

from sgap_jax.schedules.emulated import Emulated

DRY_RUN = bool(os.environ.get("SGAP_GPU_DRY_RUN"))
SECONDS = float(os.environ.get("SGAP_GPU_SECONDS") or "inf")
TEST_SECONDS = float(os.environ.get("SGAP_GPU_TEST_SECONDS") or ("inf" if DRY_RUN else 300))
START = time.monotonic()


@functools.cache
def missing() -> str:
    """Why there is no GPU for JAX; empty where there is one."""
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"no GPU for JAX: {str(error).splitlines()[0]}"
    return ""


def require_gpu():
    if missing():
        pytest.skip(missing())


def lost():
    """Whether the device has stopped responding, as after a fault in a kernel of this process."""
    if DRY_RUN or missing():
        return False
    try:
        jax.block_until_ready(jax.device_put(np.ones(1), jax.devices("cuda")[0]) + 1)
    except Exception:
        return True
    return False


def on_gpu(schedule=None):
    """The schedule, to run on the GPU; in a dry run, its emulation."""
    return Emulated(emulate, schedule) if DRY_RUN else schedule


def some(cases, few=2):
    """All cases; in a dry run a few of them, spread evenly."""
    cases = list(cases)
    return cases[:: -(-len(cases) // few)] if DRY_RUN and len(cases) > few else cases


def time_left():
    return START + SECONDS - time.monotonic()


def seconds_of_a_test():
    """The time limit of a test in seconds: a call whose kernel never ends does not return."""
    return min(TEST_SECONDS, max(time_left(), 0) + 60)
