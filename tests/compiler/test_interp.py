"""The interpreter of the loop IR: right results, and a fault for every forbidden action."""

import dataclasses

import numpy as np
import pytest
from loop_functions import (
    CPU,
    GPU,
    Sparse,
    add,
    at,
    change,
    expected,
    inputs,
    let,
    loop,
    mul,
    op,
    store,
    wide,
)
from loop_interpreter.independence import independent
from loop_interpreter.interp import LoopFault, run
from tolerance import DTYPES, assert_within, sum_bound

from sgap_jax.compiler.loop_ir.loopir import (
    Array,
    Binary,
    Float,
    Function,
    GroupReduce,
    If,
    Int,
    Search,
    SegReduce,
    Select,
    Store,
    Var,
    While,
    Workspace,
)


def check(function, A, dtype, n, op="+", seed=0):
    arrays = inputs(A, dtype, n)
    C = run(function, arrays, seed)["C"].reshape(A.m, n)
    exact, magnitude, terms = expected(A, arrays, n, op)
    out = function.outputs[0].dtype
    bound = sum_bound(exact, magnitude, terms, dtype if out == dtype else wide(dtype))
    assert_within(C, exact, bound)


@pytest.mark.parametrize("build", (GPU | CPU).values(), ids=GPU | CPU)
def test_every_schedule(build):
    for dtype in DTYPES:
        check(build(Sparse(), dtype, n=3), Sparse(), dtype, 3)
    for A in (Sparse(m=1, k=1), Sparse(m=3, padding=0, seed=4), Sparse(m=70, k=3, seed=2)):
        check(build(A, n=2), A, "float32", 2)


@pytest.mark.parametrize("build", GPU.values(), ids=GPU)
def test_maxima_minima_and_wide_indices(build):
    for combine in ("max", "min"):
        check(build(Sparse(), op=combine, n=2), Sparse(), "float32", 2, combine)
    check(build(Sparse(), index="int64", n=2), Sparse(), "float32", 2)


def test_nothing_stored_and_nothing_to_store():
    empty = Sparse(m=3, k=2, padding=2, seed=4)
    arrays = inputs(empty, "float32", 2) | {"A2_pos": np.zeros(4, np.int32)}
    for build in (GPU | CPU).values():
        full = inputs(empty, "float32", 2)
        assert not run(build(empty, n=2), full | {"A2_pos": arrays["A2_pos"]})["C"].any()
        assert run(build(Sparse(m=0), n=2), inputs(Sparse(m=0), "float32", 2))["C"].size == 0


def small(*body, size=8, fill=0.0, dtype="float32", **keywords):
    arrays = (Array("x", "int32", size), Array("v", "float32", size))
    return Function("f", arrays, (Array("y", dtype, size, fill),), body, **keywords)


def ran(*body, x=None, **keywords):
    function = small(*body, **keywords)
    x = np.arange(8) if x is None else x
    return run(function, {"x": np.int32(x), "v": np.float32(np.arange(8))})["y"]


def threads(*body, extent=8, unit="GPUThread"):
    return loop("b", 1, loop("t", extent, *body, unit=unit), unit="GPUBlock")


def test_group_and_segment_reductions():
    y = ran(threads(GroupReduce("y", op("//", "t", 4), at("v", "t"), 4)))
    np.testing.assert_array_equal(y, [6, 22, 0, 0, 0, 0, 0, 0])
    y = ran(threads(SegReduce("y", at("x", "t"), at("v", "t"), 4)), x=[1, 1, 3, 3, 3, 5, -1, -1])
    np.testing.assert_array_equal(y, [0, 1, 0, 9, 0, 5, 0, 0])
    y = ran(
        threads(SegReduce("y", at("x", "t"), at("v", "t"), 8, "max")), x=[0, 0, -1, 2, 2, 2, 3, 3]
    )
    np.testing.assert_array_equal(y, [1, 0, 5, 7, 0, 0, 0, 0])


def test_searches_pass_over_rows_without_entries():
    search = Search("x", Int(0), Int(8), Var("t"))
    y = ran(threads(store("y", "t", at("v", search))), x=[0, 0, 0, 2, 2, 5, 6, 9])
    np.testing.assert_array_equal(y, [2, 2, 4, 4, 4, 5, 6, 6])
    nowhere = ran(threads(store("y", "t", at("v", Search("x", Int(3), Int(3), Int(0))))))
    np.testing.assert_array_equal(nowhere, 3)


def test_only_the_chosen_side_is_evaluated():
    beyond = op("<", "t", 4)
    value = Select(beyond, at("v", "t"), at("v", op("-", "t", 4)))
    y = ran(threads(store("y", "t", value)))
    np.testing.assert_array_equal(y, [0, 1, 2, 3] * 2)
    safe = If(op("and", beyond, op("<", at("v", add("t", 4)), 6.0)), (store("y", "t", 1.0),))
    np.testing.assert_array_equal(ran(threads(safe)), [1, 1] + [0] * 6)
    either = If(
        op("or", op(">=", "t", 4), op("<", at("v", add("t", 4)), 6.0)), (store("y", "t", 1.0),)
    )
    np.testing.assert_array_equal(ran(threads(either)), [1, 1, 0, 0] + [1] * 4)


def test_threads_whose_loops_differ_and_workspaces_of_their_own():
    own = (
        Workspace("w", 2, 1.0),
        loop("s", at("x", "t"), store("w", 1, at("v", "s"), op="+")),
        store("y", "t", at("w", 1)),
    )
    np.testing.assert_array_equal(ran(threads(*own)), 1 + np.cumsum([0, *range(7)]))
    shared = (Workspace("w", 8), loop("t", 8, store("w", "t", at("v", "t")), unit="CPUThread"))
    back = loop("s", 8, store("y", "s", at("w", op("-", 7, "s"))))
    np.testing.assert_array_equal(ran(*shared, back), np.arange(8)[::-1])


def test_numbers_are_rounded_once():
    third = mul(Float(1 / 3), 3.0)
    y = ran(loop("s", 8, store("y", "s", op("-", third, 1 / 3))), dtype="bfloat16", fill=None)
    assert (np.float64(y) == 0.66796875).all()


MUTABLE = let("n", 0, mutable=True)
FAULTS = {
    "out of bounds": [threads(store("y", add("t", 1), 0.0))],
    "out of bounds, of 8 at `y[0] =": [store("y", 0, at("v", -1))],
    "out of bounds, of 8 at `for": [loop("s", at("x", 8))],
    "race for y[0]: stored by two": [threads(store("y", 0, 1.0))],
    "race for y[3]: stored by one iteration, loaded": [
        threads(store("y", "t", 1.0), If(op("==", "t", 4), (store("y", "t", at("y", 3)),)))
    ],
    "race for y[4]: loaded by one iteration, stored": [
        threads(
            If(op("==", "t", 3), (store("y", "t", at("y", 4)),)),
            If(op("==", "t", 4), (store("y", "t", 1.0, op="+"),)),
        )
    ],
    "updated by one iteration, loaded": [
        threads(store("y", 0, 1.0, "+", True), let("z", at("y", 0)))
    ],
    "updated by one iteration, stored": [
        threads(store("y", 0, 1.0, "+", True), If(op("==", "t", 4), (store("y", 0, 1.0),)))
    ],
    "race for w[0]": [
        loop(
            "b",
            1,
            Workspace("w", 1),
            loop("t", 2, store("w", 0, 1.0), unit="GPUThread"),
            unit="GPUBlock",
        )
    ],
    "race for y[0]: stored by two iterations at": [
        loop("t", 4, store("y", op("//", "t", 4), 1.0, op="+"), unit="CPUThread")
    ],
    "not all threads of a group": [
        threads(If(op("<", "t", 7), (GroupReduce("y", Int(0), Float(1.0), 8),)))
    ],
    "not all threads of a group are there at `segReduceGroup": [
        threads(loop("s", "t", SegReduce("y", Int(0), Float(1.0), 2)))
    ],
    "groups of 4 in a loop of 6": [threads(GroupReduce("y", Int(0), Float(1.0), 4), extent=6)],
    "for CPUThread": [loop("t", 8, GroupReduce("y", Int(0), Float(1.0), 4), unit="CPUThread")],
    "more than one index": [threads(GroupReduce("y", Var("t"), Float(1.0), 4))],
    "indices that decrease": [threads(SegReduce("y", op("-", 7, "t"), Float(1.0), 4))],
    "meet again": [threads(SegReduce("y", at("x", "t"), Float(1.0), 8))],
    "a group of 3": [threads(GroupReduce("y", Int(0), Float(1.0), 3))],
    "beyond int32": [let("z", mul(2**16, 2**15))],
    "at `const float z = u + v[8]": [let("u", 1.0), let("z", add("u", at("v", 8)))],
    "with a negative": [let("z", op("//", -1, 2))],
    "by zero": [let("z", op("%", 1, 0))],
    "of two kinds": [let("z", Binary("+", Int(1), Float(1.0)))],
    "not an integer": [store("y", 1.0, 1.0)],
    "not a number": [store("y", 1, 1)],
    "not a truth value": [If(Int(1), ())],
    "there is no z": [If(op("<", 0, 1), (let("z", 1),)), store("y", "z", 1.0)],
    "t is there already at `const int t": [threads(let("t", 1))],
    "s is there already at `for": [loop("s", 2, loop("s", 2))],
    "w is there already at `float w[2]": [Workspace("w", 2), Workspace("w", 2)],
    "there is no q": [store("q", 0, 1.0)],
    "n is constant": [let("n", 0), change("n", 1)],
    "outside of a parallel loop": [MUTABLE, loop("t", 2, change("n", 1), unit="CPUThread")],
    "of another kind": [MUTABLE, change("n", 1.0)],
    "an input": [store("v", 0, 1.0)],
    "atomic store without op": [Store("y", Int(0), Float(1.0), atomic=True)],
    "which decreases": [let("z", Search("x", Int(0), Int(8), Int(3)))],
    "in one of None": [loop("t", 2, unit="GPUThread")],
    "expected 0 to a constant": [loop("t", at("x", 0), unit="CPUThread")],
    "64 threads in a warp": [
        loop("b", 1, loop("w", 1, loop("t", 64, unit="GPUThread"), unit="GPUWarp"), unit="GPUBlock")
    ],
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults(message):
    with pytest.raises(LoopFault) as fault:
        ran(*FAULTS[message], x=[4, 4, 2, 4, 5, 6, 7, 8])
    assert message in str(fault.value)


def test_elements_that_nobody_stores_and_rounded_arrays():
    with pytest.raises(LoopFault, match=r"y\[1\] is never stored"):
        ran(store("y", 0, 1.0), fill=None)
    with pytest.raises(LoopFault, match="nobody stored"):
        ran(store("y", 0, 1.0, op="+"), fill=None)
    with pytest.raises(LoopFault, match="rounded to float16 and then read at `y"):
        ran(store("y", 0, 1.0, op="+"), dtype="float16")


def test_a_while_loop_without_end(monkeypatch):
    monkeypatch.setattr("loop_interpreter.interp.MOST_TURNS", 100)
    with pytest.raises(LoopFault, match="more than 100 turns at `while"):
        ran(While(op("<", 0, 1), ()))


def test_inputs_are_as_the_function_says():
    function = small()
    good = {"x": np.zeros(8, np.int32), "v": np.zeros(8, np.float32)}
    for name, wrong in (("x", np.zeros(8, np.int64)), ("v", np.zeros(7, np.float32))):
        with pytest.raises(ValueError, match=f"f: expected 8 of .* for {name}"):
            run(function, good | {name: wrong})
    with pytest.raises(ValueError, match="expected an input v"):
        run(function, {"x": good["x"]})
    twice = dataclasses.replace(function, outputs=(Array("v", "float32", 8),))
    with pytest.raises(ValueError, match="v is there twice"):
        run(twice, good)


def test_atomic_updates_meet_in_any_order():
    body = loop(
        "t",
        8,
        store("y", 0, Select(op("==", "t", 0), Float(2.0**24), Float(1.0)), "+", True),
        unit="CPUThread",
    )
    sums = {
        run(small(body), {"x": np.zeros(8, np.int32), "v": np.zeros(8, np.float32)}, s)["y"][0]
        for s in range(20)
    }
    assert len(sums) > 1


DEPENDENT = {
    "loads what another stored": store("y", add("a", 1), at("y", "a"), "+"),
    "two statements, of which the last counts": If(
        op("==", op("%", "a", 2), 0),
        (store("y", 0, at("v", "a")),),
        (store("y", 0, at("v", add("a", 1))),),
    ),
    "a sum and a product": If(
        op("<", 0, 1), (store("y", 0, at("v", "a"), "+"), store("y", 0, 2.0, "max"))
    ),
    "a scalar of outside": change("n", "a"),
    "turns of an inner loop": If(
        op("<", 0, 1),
        (
            let("s", 0, mutable=True),
            While(
                op("<", "s", 3),
                (store("y", add("a", "s"), at("v", "s")), change("s", add("s", 1))),
            ),
        ),
    ),
}
TOGETHER = {
    "one statement, of which the last counts": store("y", op("//", "a", 2), at("v", "a")),
    "a nest": loop("b", 3, store("y", add("a", "b"), at("v", "b"))),
    "a sum of its own": If(
        op("<", 0, 1),
        (
            let("s", 0.0, mutable=True),
            Workspace("w", 2),
            loop("b", "a", change("s", add("s", at("v", "b"))), store("w", 1, 1.0, "+")),
            store("y", op("//", "a", 2), add("s", at("w", 1)), "+"),
        ),
    ),
}


@pytest.mark.parametrize("name", DEPENDENT | TOGETHER)
def test_serial_loops_at_once_or_not(name, monkeypatch):
    nest = loop("a", 6, (DEPENDENT | TOGETHER)[name])
    assert independent(nest) == (name in TOGETHER)
    body = (let("n", 0, mutable=True), nest)
    at_once = ran(*body)
    monkeypatch.setattr("loop_interpreter.interp.independent", lambda loop: False)
    np.testing.assert_array_equal(at_once, ran(*body))


@pytest.mark.parametrize("build", (GPU | CPU).values(), ids=GPU | CPU)
def test_at_once_or_one_by_one_is_the_same_sum(build, monkeypatch):
    function, arrays = build(Sparse(), n=3), inputs(Sparse(), "float32", 3)
    at_once = run(function, arrays)["C"]
    monkeypatch.setattr("loop_interpreter.interp.independent", lambda loop: False)
    np.testing.assert_allclose(at_once, run(function, arrays)["C"], 1e-5, 1e-6)
