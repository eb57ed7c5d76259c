"""The loop IR printed as C: its text, and its results, which equal the interpreter's."""

import dataclasses
import math

import numpy as np
import pytest
from compiled_text import compiled
from loop_functions import (
    CPU,
    RANDOM_INPUTS,
    Sparse,
    add,
    at,
    expected,
    inputs,
    let,
    loop,
    mul,
    nonzeros_on_cpu,
    nonzeros_on_gpu,
    op,
    random_function,
    row_groups,
    rows_on_gpu,
    segments,
    store,
)
from loop_interpreter.interp import run
from tolerance import assert_within, sum_bound

from sgap_jax.compiler.loop_ir.loopir import (
    Array,
    Comment,
    Float,
    Function,
    If,
    Int,
    Search,
    Select,
    Var,
    While,
    Workspace,
)
from sgap_jax.compiler.loop_ir.print_c import PRELUDE, CText, headline, print_c

EMPTY = Function("f", (Array("x", "int32", 8), Array("v", "float32", 8)), (), ())
DOUBLE = dataclasses.replace(EMPTY, accumulator="float64", index="int64")


def cases(A, n):
    """Yields (combine, accumulator's dtype, function) for the functions of one translation unit."""
    for name, build in (
        CPU | {"rows_on_gpu": rows_on_gpu, "nonzeros_on_gpu": nonzeros_on_gpu}
    ).items():
        for dtype in ("float32", "float64"):
            yield "+", dtype, dataclasses.replace(build(A, dtype, n=n), name=f"{name}_{dtype}")
    for combine in ("max", "min"):
        function = nonzeros_on_gpu(A, n=n, op=combine, index="int64")
        yield combine, "float32", dataclasses.replace(function, name=f"{combine}_of_products")


def check(call, A, n):
    for combine, dtype, function in cases(A, n):
        arrays = inputs(A, dtype, n)
        exact, magnitude, terms = expected(A, arrays, n, combine)
        out = call(function, arrays)["C"].reshape(A.m, n)
        assert_within(out, exact, sum_bound(exact, magnitude, terms, dtype))
        np.testing.assert_allclose(run(function, arrays)["C"].reshape(A.m, n), out, 1e-4, 1e-5)


def test_a_c_compiler_makes_of_it_what_the_interpreter_does(tmp_path):
    A, n = Sparse(), 3
    check(compiled(tmp_path, [function for *_, function in cases(A, n)]), A, n)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("while (p ==", "if (p =="),
        ("C[i * 3 + k] = fmax(C[i * 3 + k], sum)", "C[i * 3 + k] = sum"),
        ("sums[3] = {0}", "sums[3] = {1}"),
        ("high = middle;", "high = middle - 1;"),
    ],
)
def test_planted_bugs_are_caught(tmp_path, right, wrong):
    A, n = Sparse(), 3
    functions = [function for *_, function in cases(A, n)]
    assert right in PRELUDE + "".join(map(print_c, functions))
    change = lambda text: text.replace(right, wrong)
    with pytest.raises(AssertionError):
        check(compiled(tmp_path, functions, change), A, n)


def test_the_text_of_a_function(golden):
    golden.text("nonzeros.c.txt", print_c(nonzeros_on_cpu(Sparse())))
    text = print_c(segments(Sparse()))
    assert "for (int p1 = 0; p1 < 64; p1++) {  // GPUThread" in text
    assert "segReduceGroup<16>(C, live ? i * 3 + k : -1, value);" in text
    assert "atomicAddGroup<8>(C, i * 3 + k, sum);" in print_c(row_groups(Sparse()))
    assert "atomicMaxGroup<8>(C, " in print_c(row_groups(Sparse(), op="max"))


def test_random_expressions_mean_the_same(tmp_path):
    functions = [
        random_function(f"random_{index}", 150, index, lambda body: (loop("t", 8, *body),), seed)
        for seed, index in enumerate(("int32", "int64"))
    ]
    call = compiled(tmp_path, functions, flags=("-O0",))  # comparisons of constants would warn
    for function in functions:
        ours = run(function, RANDOM_INPUTS)["y"]
        assert len(np.unique(ours)) > 20
        np.testing.assert_array_equal(call(function, RANDOM_INPUTS)["y"], ours)


@pytest.mark.parametrize(
    "expression, text",
    [
        (add("i", mul("j", 2), 1), "i + j * 2 + 1"),
        (mul(add("i", "j"), add("k", 1)), "(i + j) * (k + 1)"),
        (op("-", "i", op("-", "j", "k")), "i - (j - k)"),
        (op("//", "i", op("//", "j", 2)), "i / (j / 2)"),
        (op("%", mul("i", "j"), 4), "i * j % 4"),
        (op("//", op("%", "i", 8), 2), "i % 8 / 2"),
        (op("-", "i", -1), "i - -1"),
        (op("and", op("<", "i", 3), op("==", "j", add("k", 1))), "i < 3 && j == k + 1"),
        (op("or", op("<", "i", 3), op("and", op("<", 0, 1), op("<", 1, 2))),)
        + ("i < 3 || (0 < 1 && 1 < 2)",),
        (op("max", op("min", "i", 3), 0), "max(min(i, 3), 0)"),
        (add(1, Select(op("<", "i", 3), Var("i"), Int(3))), "1 + (i < 3 ? i : 3)"),
        (at("x", add("i", 1)), "x[i + 1]"),
        (Search("x", Int(0), Var("n"), Var("p")), "search(x, 0, n, p)"),
        (Float(1.0), "1.0f"),
        (Float(-math.inf), "-INFINITY"),
        (Float(math.nan), "NAN"),
    ],
)
def test_expressions_have_the_parentheses_that_they_need(expression, text):
    assert CText(EMPTY).expr(expression) == text


def test_what_is_narrower_is_widened():
    assert CText(DOUBLE).expr(mul(at("x", "i"), "n")) == "(long long)x[i] * n"
    assert CText(DOUBLE).expr(mul(at("v", "i"), at("v", "j"))) == "(double)v[i] * (double)v[j]"
    assert CText(DOUBLE).expr(mul(2**20, 2**20)) == "1048576LL * 1048576"
    half = dataclasses.replace(EMPTY, inputs=(Array("h", "float16", 8),))
    assert CText(half).expr(at("h", 0)) == "(float)h[0]"


def test_statements():
    body = (
        Comment("a note"),
        let("n", 0, mutable=True),
        Workspace("w", 4, -math.inf),
        loop("i", 7, store("w", "i", at("v", "i"), "max"), begin=1, step=2),
        While(op("<", "n", 3), (If(op("<", "n", 2), (let("live", op("<", "n", 1)),), ()),)),
        If(op("<", "n", 2), (store("w", 0, 1.0),), (store("w", 1, 1.0, "+"),)),
    )
    function = dataclasses.replace(EMPTY, body=body)
    assert (
        print_c(function)
        == """\
void f(const int* x, const float* v) {
  // a note
  int n = 0;
  float w[4];
  for (int at = 0; at < 4; at++) w[at] = -INFINITY;
  for (int i = 1; i < 7; i += 2) {
    w[i] = fmax(w[i], v[i]);
  }
  while (n < 3) {
    if (n < 2) {
      const bool live = n < 1;
    }
  }
  if (n < 2) {
    w[0] = 1.0f;
  } else {
    w[1] += 1.0f;
  }
}
"""
    )
    assert headline(function, body[3]) == "for (int i = 1; i < 7; i += 2)"
    assert headline(function, body[5]) == "if (n < 2)"


def test_what_is_no_loop_ir_is_an_error():
    with pytest.raises(TypeError, match="not an expression of the loop IR: 3"):
        CText(EMPTY).expr(3)
    with pytest.raises(TypeError, match="not a statement of the loop IR: 3"):
        print_c(dataclasses.replace(EMPTY, body=(3,)))
