"""A GPU for tests, or its emulation: what tests/gpu share.

SGAP_GPU_RESULTS   a folder: <device>/gpu_tests.json is written there
SGAP_GPU_SECONDS   no test starts after that many seconds
SGAP_GPU_DRY_RUN   runs a few cases of each test on the emulator; what needs a device skips
"""

import functools
import os
import time

import jax
import pytest
from emulated_launch import emulate

from sgap_jax.schedules.emulated import Emulated

DRY_RUN = bool(os.environ.get("SGAP_GPU_DRY_RUN"))
SECONDS = float(os.environ.get("SGAP_GPU_SECONDS") or "inf")
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


def on_gpu(schedule=None):
    """The schedule that runs on the GPU; in a dry run, its emulation."""
    return Emulated(emulate, schedule) if DRY_RUN else schedule


def some(cases, few=2):
    """The cases; in a dry run a few of them, spread evenly."""
    cases = list(cases)
    return cases[:: -(-len(cases) // few)] if DRY_RUN and len(cases) > few else cases


def time_left():
    return START + SECONDS - time.monotonic()
