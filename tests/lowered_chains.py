"""Chains that are lowered and interpreted, against the exact sums."""

import numpy as np
from compiler_chains import SPMM, SPMV, positions
from compiler_tensors import Problem

from sgap_jax.compiler import interp
from sgap_jax.compiler.lower import lower
from sgap_jax.compiler.schedule import Schedule

SMALL = {"i": 12, "j": 8, "k": 5, "l": 3}


def result(schedule, problem, dtype="float32"):
    function = lower(schedule, problem.sizes, problem.positions, dtype)
    output = problem.expression.output.tensor
    return interp.run(function, problem.inputs)[output].astype(np.float64)


def check(schedule, sizes, dtype="float32", **options):
    problem = Problem(schedule.expression, sizes, dtype=dtype, **options)
    np.testing.assert_array_equal(result(schedule, problem, dtype), problem.want)


def over(schedule, outer, inner):
    """The position space of two levels of A."""
    return schedule.fuse(outer, inner, "f").pos("f", "fpos", "A")


POSITIONS = positions(SPMV, "A", "i", "j")
COORDINATES = Schedule(SPMM).split("j", "j0", "j1", 3)
