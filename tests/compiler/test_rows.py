"""Every row of the conformance list: its loops as specified, and exact sums on the battery and on
real tensors, by the interpreter, machine code and CUDA kernels."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY
from compiled_loops import call
from compiled_operands import own_cache  # noqa: F401
from compiler_tensors import Problem
from cuda_sources import require_nvrtc
from emulated_launch import emulate, starts
from loop_interpreter import interp
from lowered_chains import LISTED_SIZES, ROWS

from sgap_jax import COO, ScheduleError, read
from sgap_jax.compiler.cuda.print_cuda import launch_plan
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.loop_ir.loopir import CPU_THREAD
from sgap_jax.compiler.loop_ir.print_c import print_c
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.transform.schedule import Schedule

TENSORS = [name for name in ROWS if len(ROWS[name].expression.sparse.indices) in (3, 4)]
MATRICES = [name for name in ROWS if len(ROWS[name].expression.sparse.indices) == 2]


def test_golden(golden):
    found = ""
    for name, schedule in ROWS.items():
        sizes = LISTED_SIZES[name]
        problem = Problem(schedule.expression, sizes, density=0.2)
        function = lower(schedule, sizes, problem.positions, "float32")
        found += f"# {name}\n{print_c(function)}\n"
    golden.text("loops.txt", found)


def on_cpu(schedule):
    """The loops of a GPU's schedule in their order, with the outermost one over CPU threads."""

    def serial(body):
        match body:
            case cin.Forall():
                plain = {"unit": None, "race": None, "group": None}
                return dataclasses.replace(body, body=serial(body.body), **plain)
            case cin.Where():
                return cin.Where(serial(body.consumer), serial(body.producer))
        return body

    if "GPU" not in str(schedule):
        return schedule
    body = serial(schedule.statement.body)
    statement = cin.SuchThat(body, schedule.statement.relations)
    loops = Schedule(schedule.expression, statement)
    try:
        return loops.parallelize(body.var, CPU_THREAD, cin.NO_RACES)
    except ScheduleError:
        return loops.parallelize(body.var, CPU_THREAD, cin.ATOMICS)


def exact(schedule, problem, sizes, run):
    function = lower(schedule, sizes, problem.positions, "float32", "kernel")
    given = {array.name: problem.inputs[array.name] for array in function.inputs}
    np.testing.assert_array_equal(run(function, given), problem.want)


def interpreted(function, given):
    return interp.run(function, given)[function.outputs[0].name]


def machine_code(function, given):
    return call(function, *given.values(), chunk=1, work=1 << 30)[0]


def emulated(function, given):
    (out,) = function.outputs
    result = [((out.size,), jnp.dtype(out.dtype))]
    return emulate(launch_plan(function), [*given.values(), *starts(function)], result)[0]


@pytest.mark.parametrize("name", ROWS)
def test_machine_code(name):
    pytest.importorskip("llvmlite")
    schedule, sizes = on_cpu(ROWS[name]), LISTED_SIZES[name]
    for density, spare in ((0.2, 7), (0, 3)):
        problem = Problem(schedule.expression, sizes, density, spare)
        exact(schedule, problem, sizes, machine_code)


CASES = list(BATTERY)


@pytest.mark.parametrize("name", MATRICES)
def test_battery(name):
    """A third of the named matrices for each row of the list."""
    schedule, turn = ROWS[name], MATRICES.index(name) % 3
    for case in map(BATTERY.get, CASES[turn::3]):
        indices = [index.name for index in schedule.expression.sparse.indices]
        sizes = LISTED_SIZES[name] | dict(zip(indices, case.shape, strict=True))
        spare = case.nnz - case.stored
        problem = Problem(schedule.expression, sizes, spare=spare, pattern=case.dense() != 0)
        exact(schedule, problem, sizes, interpreted)
        if llvm.available():
            exact(on_cpu(schedule), problem, sizes, machine_code)


@functools.cache
def pattern(file, most):
    """The pattern of a tensor of the data set, restricted to its first coordinates."""
    A = read(file, format=COO)
    shape = [min(size, n) for size, n in zip(A.shape, most, strict=True)]
    there = np.zeros(shape, bool)
    coordinates = np.stack([np.asarray(x) for x in A.coordinates()])
    there[tuple(coordinates[:, (coordinates < np.array(shape)[:, None]).all(0)])] = True
    return there


# name of the file -> the sizes that machine code runs, and that the others run
REAL = {
    3: ("parti_3D_12031", (100, 80, 60), (40, 16, 16)),
    4: ("splatt_small4", (9,) * 4, (9,) * 4),
}


@pytest.mark.parametrize("name", TENSORS)
def test_real_tensors(name, data_dir):
    schedule = ROWS[name]
    indices = schedule.expression.sparse.indices
    file, *parts = REAL[len(indices)]
    for part, compiled in zip(parts, (True, False), strict=True):
        there = pattern(data_dir / "tensors" / f"{file}.tns.gz", part)
        sizes = LISTED_SIZES[name] | {i.name: n for i, n in zip(indices, there.shape, strict=True)}
        problem = Problem(schedule.expression, sizes, pattern=there)
        if compiled:
            pytest.importorskip("llvmlite")
            exact(on_cpu(schedule), problem, sizes, machine_code)
            continue
        exact(schedule, problem, sizes, interpreted)
        if "GPU" in str(schedule):
            require_nvrtc()
            exact(schedule, problem, sizes, emulated)
