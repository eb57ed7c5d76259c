"""Lowers schedules, runs them in the loop interpreter, and compares with the exact sums."""

import numpy as np
from compiler_chains import SPMM, SPMV, positions, rows
from compiler_tensors import Problem
from loop_interpreter import interp

from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.transform.schedule import Schedule

ROWS = rows()
LISTED_SIZES = {
    **dict.fromkeys(ROWS, {"i": 37, "j": 29, "k": 11}),
    **dict.fromkeys([name for name in ROWS if name[0] in "678"], {"i": 35, "j": 6, "k": 5, "l": 9}),
    **dict.fromkeys(["15 TTM", "15 MTTKRP", "16"], {"i": 9, "j": 6, "k": 5, "l": 7}),
    **dict.fromkeys(["8 order 4", "8 order 5"], {"i": 19, "j": 6, "k": 3, "l": 2, "m": 2, "n": 2}),
    **dict.fromkeys(["S1", "S2", "S3", "S4"], {"i": 37, "j": 29, "k": 4}),
    **dict.fromkeys(["V1", "V2"], {"i": 32, "j": 4, "k": 66}),
    "12": {"i": 37, "j": 29, "k": 97},
    "14": {"i": 19, "j": 100, "k": 13},
}
SMALL = {"i": 12, "j": 8, "k": 5, "l": 3}


def result(schedule, problem, dtype="float32"):
    function = lower(schedule, problem.sizes, problem.positions, dtype)
    output = problem.expression.output.tensor
    return interp.run(function, problem.inputs)[output].astype(np.float64)


def check(schedule, sizes, dtype="float32", **options):
    problem = Problem(schedule.expression, sizes, dtype=dtype, **options)
    np.testing.assert_array_equal(result(schedule, problem, dtype), problem.want)


def over(schedule, outer, inner):
    """Fuses two levels of A and moves them to their position space."""
    return schedule.fuse(outer, inner, "f").pos("f", "fpos", "A")


POSITIONS = positions(SPMV, "A", "i", "j")
COORDINATES = Schedule(SPMM).split("j", "j0", "j1", 3)
