"""The papers' GPU schedules, lowered and printed as CUDA: exact sums, without spills."""

import jax.numpy as jnp
import numpy as np
import pytest
from compiler_chains import rows
from compiler_tensors import Problem
from cuda_sources import EACH_ARCHITECTURE, has_turn, require_nvrtc, resources
from emulated_launch import emulate, starts
from loop_interpreter.interp import run
from tolerance import DTYPES

from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, AtomicParallelism
from sgap_jax.compiler.cuda.print_cuda import launch_plan
from sgap_jax.compiler.loop_ir.loopir import GPU_BLOCK, GPU_THREAD
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.notation.cin import NO_RACES
from sgap_jax.compiler.notation.expr import assign
from sgap_jax.compiler.presets import spmm_point
from sgap_jax.compiler.transform.schedule import Schedule

CHAINS = {
    name: schedule
    for name, schedule in rows().items()
    if "GPUBlock" in str(schedule) and "bind" not in str(schedule)
}
SIZES = {"i": 37, "j": 29, "k": 23, "l": 7, "m": 5, "n": 3}
LOOPS = {"CSC": ("j", "i")}
EXTENTS = {"12": {"k": 128}, "14": {"j": 128}} | {
    name: {"k": 4} for name in ("S1", "S2", "S3", "S4")
}
NAMES = list(CHAINS)


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def check(schedule, dtype, sizes, **problem):
    problem = Problem(schedule.expression, sizes, dtype=dtype, **problem)
    function = lower(schedule, sizes, problem.positions, dtype, "kernel")
    given = {array.name: problem.inputs[array.name] for array in function.inputs}
    (out,) = function.outputs
    ours = run(function, given)[out.name]
    np.testing.assert_array_equal(np.float64(ours), np.float64(problem.want.astype(ours.dtype)))
    result = [((out.size,), jnp.dtype(out.dtype))]
    call = launch_plan(function)
    (theirs,) = emulate(call, [*given.values(), *starts(function)], result)
    np.testing.assert_array_equal(theirs, ours)
    return call


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_computes_exactly_the_sums(name):
    settings = [(SIZES, 0.3, 5), ({"i": 7, "j": 3, "k": 2, "l": 2}, 0.5, 0), (SIZES, 0, 3)]
    for i, (sizes, density, spare) in enumerate(settings):
        dtype = DTYPES[(NAMES.index(name) + i) % 4]
        sizes = sizes | EXTENTS.get(name, {})
        check(CHAINS[name], dtype, sizes, density=density, spare=spare, seed=i)


POINTS = ["{<2 nnz, 1 col>, 1}", "{<1 row, 2 col>, 1}", "{<1/4 row, 1 col>, 4}"]
POINTS += ["{<1/8 row, 1 col>, 2}", "{<1 nnz, 2 col>, 8}"]


@pytest.mark.parametrize("point", POINTS)
def test_maxima_and_minima_start_from_infinity(point):
    """By atomics, by threads that own elements, by groups and by segments; some rows have no
    entries."""
    for i, (reduction, dtype) in enumerate([("max", "float32"), ("min", "float64")]):
        expression = assign("ij,jk->ik", {"A": CSR}, reduction=reduction)
        schedule = spmm_point(expression, AtomicParallelism.parse(point), SIZES["k"])
        call = check(schedule, dtype, SIZES, spare=5, seed=i)
        arch = ("sm_80", "sm_90", "sm_100")[(POINTS.index(point) + i) % 3]
        assert resources(call.source, arch)[1:] == (0, 0), call.source


@pytest.mark.parametrize("point", ["{<2 nnz, 1 col>, 1}", "{<1/4 row, 1 col>, 4}"])
def test_maxima_that_start_from_zero_are_caught(point, monkeypatch):
    expression = assign("ij,jk->ik", {"A": CSR}, reduction="max")
    schedule = spmm_point(expression, AtomicParallelism.parse(point), SIZES["k"])
    check(schedule, "float32", SIZES)
    zeros = lambda function, starts=starts: [np.zeros_like(x) for x in starts(function)]
    monkeypatch.setitem(globals(), "starts", zeros)
    with pytest.raises(AssertionError):
        check(schedule, "float32", SIZES)


FORMATS = {"CSC": CSC, "COO": COO, "CSF(2)": CSF(2), "CVS(4)": CVS(4), "BCSR(2, 3)": BCSR(2, 3)}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name):
    """A thread for each column, which walks over all stored entries."""
    schedule = (
        Schedule(assign("ij,jk->ik", {"A": FORMATS[name]}))
        .split("k", "block", "thread", 8)
        .reorder("block", "thread", *LOOPS.get(name, ("i", "j")))
        .parallelize("block", GPU_BLOCK, NO_RACES)
        .parallelize("thread", GPU_THREAD, NO_RACES)
    )
    check(schedule, DTYPES[list(FORMATS).index(name) % 4], {"i": 21, "j": 21, "k": 11}, spare=4)


@pytest.mark.parametrize("arch", EACH_ARCHITECTURE)
def test_every_schedule_stays_in_registers(arch):
    for i, name in enumerate(NAMES):
        if has_turn(i, arch):
            schedule, dtype = CHAINS[name], DTYPES[i // 3 % 4]
            problem = Problem(schedule.expression, SIZES | EXTENTS.get(name, {}), dtype=dtype)
            function = lower(schedule, problem.sizes, problem.positions, dtype, "kernel")
            source = launch_plan(function).source
            _, stack, spills = resources(source, arch)
            assert (stack, spills) == (0, 0), source
