"""Dense outputs of which only some elements are stored: cleared row by row, or filled
beforehand."""

import compiler_tensors
import numpy as np
import pytest
from compiled_loops import call
from compiled_operands import own_cache  # noqa: F401
from compiler_chains import TTV
from compiler_tensors import Problem
from loop_interpreter import evaluate, interp

from sgap_jax import COO, CSF, CSR, Format
from sgap_jax.compiler import assign
from sgap_jax.compiler.loop_ir.loopir import CPU_VECTOR, For
from sgap_jax.compiler.lowering import clearing
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.presets import cpu
from sgap_jax.compiler.transform.schedule import Schedule
from sgap_jax.formats.levels import Compressed, Dense

SIZES = {"i": 12, "j": 6, "k": 7, "r": 19}
DCC = Format((Dense, Compressed, Compressed))
CASES = {
    "rows": ("ijk,jr,kr->ir", CSF(3), {}),
    "largest rows": ("ijk,jr,kr->ir", CSF(3), {"reduction": "max"}),
    "fibers": ("ijk,kr->ijr", CSF(3), {}),
    "largest fibers": ("ijk,kr->ijr", CSF(3), {"reduction": "max"}),
    "fibers of all rows": ("ijk,kr->ijr", DCC, {"reduction": "min"}),
    "a matrix": ("ij,jr->ir", CSF(2), {"reduction": "max"}),
    "a vector": ("ij,j->i", CSF(2), {"reduction": "min"}),
    "entries": ("ij->ij", CSR, {"reduction": "max"}),
}
# Rows with entries: gaps before, between and after them; no gaps; no rows with entries.
ROWS = {"gaps": [2, 3, 5, 6, 7, 10], "none": range(12), "all": []}


def problem_of(expression, rows, monkeypatch, **options):
    shape = [SIZES[index.name] for index in expression.sparse.indices]
    pattern = np.random.default_rng(0).random(shape) < 0.4
    pattern[[i for i in range(SIZES["i"]) if i not in rows]] = False
    monkeypatch.setattr(compiler_tensors, "_pattern", lambda *_: pattern)
    return Problem(expression, SIZES, **options)


def both(schedule, problem, fill=None):
    """The results of the interpreter and of machine code, on memory that is cleared only where
    `fill` says so."""
    f = lower(schedule, SIZES, problem.positions, "float32")
    (output,) = f.outputs
    assert output.fill == fill
    first = interp.run(f, problem.inputs)[output.name]
    inputs = [problem.inputs[array.name] for array in f.inputs]
    return first, np.asarray(*call(f, *inputs, chunk=1, work=1 << 30))


@pytest.mark.parametrize("name", CASES)
def test_gaps(name, monkeypatch):
    subscripts, format, options = CASES[name]
    expression = assign(subscripts, {"A": format}, **options)
    for there, rows in ROWS.items():
        spare = {"gaps": 3, "none": 0, "all": 9}[there]  # so that rows do not count as few
        problem = problem_of(expression, rows, monkeypatch, spare=spare)
        for found in both(cpu(expression, 4), problem):
            np.testing.assert_array_equal(found, problem.want)


def rows_in_lanes():
    s = Schedule(assign("ijk->ij", {"A": CSF(3)})).pos("i", "rows", "A").split("rows", "a", "b", 4)
    return s.parallelize("a", "CPUThread", "NoRaces").parallelize("b", "CPUVector", "NoRaces")


def columns_outside():
    s = Schedule(assign("ijk,kr->ijr", {"A": CSF(3)})).split("r", "r0", "r1", 8)
    s = s.reorder("r0", "i", "j", "r1", "k")
    return s.parallelize("r0", "CPUThread", "NoRaces")


def runs_of_rows():
    s = Schedule(TTV).fuse("i", "j", "f").pos("f", "fp", "B").split("fp", "ch", "f2", 16)
    return s.reorder("ch", "f2", "k").parallelize("ch", "CPUThread", "NoRaces")


def rows_with_columns(subscripts, format):
    """One loop over pairs of a row and a dense index: each row spans several iterations."""
    expression = assign(subscripts, {"A": format})
    stored = [index for index in expression.sparse.indices if index.name != "i"]
    s = Schedule(expression).reorder("i", "r", *stored).fuse("i", "r", "f")
    return s.parallelize("f", "CPUThread", "NoRaces")


@pytest.mark.parametrize("subscripts,format", [("ij,ir->ijr", CSR), ("ijk,kr->ijr", DCC)])
def test_rows_fused_with_a_dense_index(subscripts, format, monkeypatch):
    s = rows_with_columns(subscripts, format)
    problem = problem_of(s.expression, ROWS["gaps"], monkeypatch)
    for found in both(s, problem, fill=0.0):
        np.testing.assert_array_equal(found, problem.want)


@pytest.mark.parametrize(
    "schedule,positions",
    [
        (cpu(assign("ijk,kr->ijr", {"A": CSF(3)})), (5, 20, 40)),  # few rows
        (cpu(assign("ij->ij", {"A": COO})), (20, 20)),  # rows that occur again later
        (rows_in_lanes(), (12, 20, 40)),
        (columns_outside(), (12, 20, 40)),
        (runs_of_rows(), (12, 20, 40)),
        (Schedule(assign("ijk,kr->ijr", {"A": CSF(3)})), (12, 20, 40)),  # one thread
    ],
)
def test_filled_beforehand(schedule, positions):
    f = lower(schedule, SIZES, positions, "float32")
    assert f.outputs[0].fill == 0.0
    assert not any(isinstance(s, For) and s.unit == CPU_VECTOR for s in f.body)


@pytest.mark.parametrize("bug", ["a row too few", "a row too many"])
def test_planted_bugs_are_caught(bug, monkeypatch):
    expression = assign("ijk,kr->ijr", {"A": CSF(3)}, reduction="max")
    problem = problem_of(expression, ROWS["gaps"], monkeypatch)
    right = clearing._end_before
    step = {"a row too few": 1, "a row too many": -1}[bug]

    def wrong(ctx, place):
        begin = right(ctx, place)
        shifted = clearing.add(begin.true, clearing.Int(step * clearing._row_size(ctx)))
        return clearing.Select(begin.condition, shifted, begin.false)

    monkeypatch.setattr(clearing, "_end_before", wrong)
    with pytest.raises((AssertionError, evaluate.LoopFault)):
        first, _ = both(cpu(expression, 4), problem)
        np.testing.assert_array_equal(first, problem.want)
