"""Random expressions, formats, schedules and batches: loops that are lowered compute the expression
in the interpreter, as machine code and as CUDA kernels; all others are refused. Expressions are
products with one sparse operand, or sums of products of several, whose coordinates are merged."""

import os
import random

import numpy as np
import pytest
from compiled_loops import call
from compiled_operands import own_cache  # noqa: F401
from cuda_sources import require_nvrtc
from emulated_launch import emulate, starts
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from loop_interpreter import interp
from random_chains import random_case
from random_merges import random_case as random_merge

from sgap_jax.compiler.cuda.print_cuda import launch_plan, padded_sizes
from sgap_jax.compiler.llvm import machine_code as llvm

SLOW = [HealthCheck.too_slow]


def law(part, examples, check, machines, draw=random_case):
    """`examples` cases: the same ones at each run, others with SGAP_SAMPLE_SEED."""
    lowered = 0

    @seed(f"{os.environ.get('SGAP_SAMPLE_SEED', '0')} {part}")
    @settings(max_examples=examples, deadline=None, suppress_health_check=SLOW, database=None)
    @given(st.integers(0, 2**32 - 1))
    def holds(number):
        nonlocal lowered
        case = draw(random.Random(number), machines)
        if case is not None:
            lowered += 1
            note(f"{case.schedule} of {case.function.inputs} to {case.function.outputs}")
            check(case)

    holds()
    assert lowered > examples // 4


def on_cpu(case):
    case.check(interp.run(case.function, case.inputs)[case.output.name])
    if llvm.available():
        (found,) = call(case.function, *case.inputs.values(), chunk=1, work=1 << 30)
        case.check(found)


def on_gpu(case):
    case.check(interp.run(case.function, case.inputs)[case.output.name])
    try:
        launch = launch_plan(case.function)
    except NotImplementedError:
        return  # no single launch does it
    result = [((room,), np.dtype(case.output.dtype)) for room in padded_sizes(case.function)]
    (found,) = emulate(launch, [*case.inputs.values(), *starts(case.function)], result)
    case.check(found)


@pytest.mark.parametrize("part", range(4))
def test_chains_for_the_cpu(part):
    law(part, 300, on_cpu, ("serial", "cpu", "cpu"))


@pytest.mark.parametrize("part", range(4))
def test_chains_for_a_gpu(part):
    require_nvrtc()
    law(part, 200, on_gpu, ("gpu",))


@pytest.mark.parametrize("part", range(3))
def test_merges_in_the_interpreter(part):
    def check(case):
        case.check(interp.run(case.function, case.inputs)[case.output.name])

    law(part, 400, check, ("serial", "cpu", "gpu"), random_merge)


def test_merges_for_the_cpu():
    law(0, 150, on_cpu, ("serial", "cpu", "cpu"), random_merge)


def test_merges_for_a_gpu():
    require_nvrtc()
    law(0, 60, on_gpu, ("gpu",), random_merge)
