"""Each way of writing a loop in LLVM IR (`llvm.loops.STRATEGIES`) alone, and all but it: loops that
a strategy does not take are written by the next one, and results are the same."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from compiled_loops import call, function, lanes, threads
from compiled_operands import own_cache  # noqa: F401
from compiler_tensors import Problem

from sgap_jax import CSF, CSR
from sgap_jax.compiler import assign
from sgap_jax.compiler.llvm import flatten_fibers, machine_code, prefetch, print_llvm, stream_fill
from sgap_jax.compiler.llvm.loops import STRATEGIES
from sgap_jax.compiler.loop_ir.loopir import Float, Store, Var
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.presets import cpu, cpu_entries

pytest.importorskip("llvmlite")

SIZES = {"i": 23, "j": 18, "k": 21, "r": 29}  # unroll_and_jam takes four vectors of AVX2
EXPRESSIONS = [  # and how they are scheduled
    (cpu, "ij,jr->ir", {"A": CSR}),
    (partial(cpu_entries, entries=100, staged=True), "ij,j->i", {"A": CSR}),
    (cpu, "ij,ir,jr->ij", {"A": CSR, "D": CSR}),
    (cpu, "ijk,jr,kr->ir", {"A": CSF(3)}),
]


@pytest.fixture(autouse=True)
def thresholds(monkeypatch):
    """No array or number of fibers is too small for a strategy."""
    monkeypatch.setattr(stream_fill, "_STREAMED_BYTES", 0)
    monkeypatch.setattr(flatten_fibers, "_PREDICTED_FIBERS", 0)
    monkeypatch.setattr(prefetch, "_FAR_BYTES", 0)
    machine_code._keys.clear()
    yield
    machine_code._keys.clear()


def used(strategies, monkeypatch):
    """Has loops written by these; returns the set of the names of those that took one."""
    taken = set()

    def noted(strategy):
        def attempt(builder, loop):
            before = list(builder.lines)
            if strategy(builder, loop):
                taken.add(strategy.__name__)
                return True
            assert builder.lines == before, f"{strategy.__name__} wrote a loop that it left"
            return False

        return attempt

    monkeypatch.setattr(print_llvm, "STRATEGIES", tuple(map(noted, strategies)))
    return taken


def check():
    for preset, subscripts, formats in EXPRESSIONS:
        expression = assign(subscripts, formats)
        problem = Problem(expression, SIZES, density=0.4, spare=3)
        f = lower(preset(expression), SIZES, problem.positions, "float32")
        (found,) = call(f, *(problem.inputs[array.name] for array in f.inputs))
        np.testing.assert_array_equal(np.asarray(found).astype(np.float64), problem.want)
    loop = dataclasses.replace(lanes(100, Store("out", Var("e"), Float(0.0))), stream=True)
    rows = threads(1, lanes(300, Store("out", Var("e"), Float(5.0))), loop)
    (found,) = call(function("cleared", [], [("out", 300)], [rows], "float32"))
    np.testing.assert_array_equal(found, np.repeat([0.0, 5.0], [100, 200]))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)
def test_one_alone(strategy, monkeypatch):
    *_, scalar = STRATEGIES
    within_lanes = {"prefetched_nest", "accumulators_in_lanes"}
    kept = [s for s in STRATEGIES if s in (strategy, scalar)]
    if strategy.__name__ in within_lanes:  # which `vectorize` makes
        kept = [s for s in STRATEGIES if s in kept or s.__name__ == "vectorize"]
    taken = used(kept, monkeypatch)
    check()
    assert strategy.__name__ in taken


@pytest.mark.parametrize("strategy", STRATEGIES[:-1], ids=lambda strategy: strategy.__name__)
def test_all_but_one(strategy, monkeypatch):
    kept = [s for s in STRATEGIES if s is not strategy]
    taken = used(kept, monkeypatch)
    check()
    assert strategy.__name__ not in taken and {"vectorize", "scalar"} - {strategy.__name__} <= taken


def test_all_of_them(monkeypatch):
    """These expressions use each."""
    taken = used(STRATEGIES, monkeypatch)
    check()
    assert taken == {strategy.__name__ for strategy in STRATEGIES}
