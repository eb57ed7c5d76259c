"""The schedules of the papers for GPUs, lowered and printed as CUDA: exact sums, in registers."""

import numpy as np
import pytest
from compiler_chains import rows
from compiler_tensors import Problem, numbers
from cuda_sources import require_nvrtc, resources
from emulated_launch import emulate
from tolerance import DTYPES

from sgap_jax.compiler.interp import run
from sgap_jax.compiler.lower import lower
from sgap_jax.compiler.print_cuda import launch_plan

CHAINS = {
    name: schedule
    for name, schedule in rows().items()
    if "GPUBlock" in str(schedule) and "bind" not in str(schedule)
}
SIZES = {"i": 37, "j": 29, "k": 23, "l": 7, "m": 5, "n": 3}
EXTENTS = {"12": {"k": 128}, "14": {"j": 128}} | {
    name: {"k": 4} for name in ("S1", "S2", "S3", "S4")
}
NAMES = list(CHAINS)


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def lowered(name, dtype, sizes, **problem):
    schedule = CHAINS[name]
    problem = Problem(schedule.expression, sizes | EXTENTS.get(name, {}), dtype=dtype, **problem)
    return problem, lower(schedule, problem.sizes, problem.positions, dtype, "kernel")


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_computes_exactly_the_sums(name):
    settings = [(SIZES, 0.3, 5), ({"i": 7, "j": 3, "k": 2, "l": 2}, 0.5, 0), (SIZES, 0, 3)]
    for i, (sizes, density, spare) in enumerate(settings):
        dtype = DTYPES[(NAMES.index(name) + i) % 4]
        problem, function = lowered(name, dtype, sizes, density=density, spare=spare, seed=i)
        given = {array.name: problem.inputs[array.name] for array in function.inputs}
        (out,) = function.outputs
        ours = run(function, given)[out.name]
        np.testing.assert_array_equal(np.float64(ours), np.float64(problem.want.astype(ours.dtype)))
        result = [((out.size,), numbers(out.dtype))]
        (theirs,) = emulate(launch_plan(function), given.values(), result)
        np.testing.assert_array_equal(theirs, ours)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_schedule_stays_in_registers(arch):
    for i, name in enumerate(NAMES):
        if i % 3 == ("sm_80", "sm_90", "sm_100").index(arch):
            _, function = lowered(name, DTYPES[i // 3 % 4], SIZES)
            source = launch_plan(function).source
            _, stack, spills = resources(source, arch)
            assert (stack, spills) == (0, 0), source
