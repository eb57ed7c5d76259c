"""Machine code from loops: LLVM IR with vectors, run by XLA's threads."""

import dataclasses
import math
import re

import compiled_loops as loops
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_loops import add, call, lanes, threads, times
from compiled_operands import PADDING, K, M, matrix, own_cache, random_values, wide  # noqa: F401
from loop_interpreter import interp
from random_loops import SIZE, Loops
from tolerance import DTYPES, assert_within, sum_bound

from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.llvm.print_llvm import print_llvm
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_VECTOR,
    GPU_BLOCK,
    Array,
    Binary,
    Float,
    For,
    Function,
    GroupReduce,
    If,
    Int,
    Let,
    Load,
    Search,
    Select,
    Set,
    Store,
    Var,
    While,
    Workspace,
)

pytest.importorskip("llvmlite")


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels(dtype):
    """SpMV, SpMM, SDDMM: rows over threads; vector lanes over columns, entries or features."""
    operands, A, terms = matrix(M, K, dtype)
    x = random_values(2, K, dtype)
    for unit in (None, CPU_VECTOR):
        (y,) = call(loops.spmv(M, K, operands[1].size, dtype, unit), *operands, x)
        bound = sum_bound(A @ wide(x), np.abs(A) @ np.abs(wide(x)), terms, dtype)
        assert_within(y, A @ wide(x), bound)
    n = 37
    B = random_values(3, (K, n), dtype)
    (C,) = call(loops.spmm(M, K, n, operands[1].size, dtype), *operands, B.ravel())
    product, magnitude = A @ wide(B), np.abs(A) @ np.abs(wide(B))
    assert_within(C.reshape(M, n), product, sum_bound(product, magnitude, terms[:, None], dtype))
    d = 43
    X, Y = random_values(4, (M, d), dtype), random_values(5, (K, d), dtype)
    (got,) = call(loops.sddmm(M, K, d, operands[1].size, dtype), *operands, X.ravel(), Y.ravel())
    rows, columns = np.nonzero(A)
    factors = A[rows, columns]
    dots = factors * (wide(X)[rows] * wide(Y)[columns]).sum(1)
    sizes = np.abs(factors) * np.abs(wide(X)[rows] * wide(Y)[columns]).sum(1)
    assert_within(got[: rows.size], dots, sum_bound(dots, sizes, d + 1, dtype))
    assert not np.asarray(got[rows.size :]).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 8, 13])
def test_entries_with_atomics(dtype, n):
    operands, A, terms = matrix(M, K, dtype)
    B = random_values(3, (K, n), dtype)
    loop = loops.spmm_by_entries(M, K, n, operands[1].size, dtype)
    (C,) = call(loop, *operands, B.ravel(), chunk=1, work=1 << 30)
    product, magnitude = A @ wide(B), np.abs(A) @ np.abs(wide(B))
    assert_within(C.reshape(M, n), product, sum_bound(product, magnitude, terms[:, None], dtype))


@pytest.mark.parametrize("lanes", [1, 8])
def test_atomics_that_meet(lanes):
    """No update is lost if threads add to the same elements at once."""
    n, element = 1 << 18, Store("y", Var("e"), Float(1.0), "+", atomic=True)
    body = (loops.threads(n, loops.lanes(lanes, element)),)
    f = Function("meet", (), (Array("y", "float32", lanes, 0.0),), body)
    (counts,) = call(f, chunk=1 << 14, work=1 << 30)
    np.testing.assert_array_equal(counts, n)
    assert "cmpxchg" in print_llvm(f).text  # the threads may not have collided in this run


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_mttkrp(dtype):
    shape, rank = (9, 7, 11), 21
    rng = np.random.default_rng(0)
    A = rng.standard_normal(shape) * (rng.random(shape) < 0.2)
    A[4] = A[:, 2] = 0
    A = wide(jnp.asarray(A).astype(dtype))
    i, j, k = np.nonzero(A)
    first = np.unique(i)
    pairs = np.unique(np.stack([i, j], 1), axis=0)
    pos2 = np.searchsorted(pairs[:, 0], [*first, shape[0]])
    pos3 = np.searchsorted(i * shape[1] + j, [*(pairs @ [shape[1], 1]), math.prod(shape)])
    pad = lambda x, last: np.concatenate([x, np.full(2, last)]).astype(np.int32)
    index = (
        np.array([0, first.size], np.int32),
        pad(first, 1 << 30),
        pad(pos2, pos2[-1]),
        pad(pairs[:, 1], 1 << 30),
        pad(pos3, pos3[-1]),
        pad(k, 1 << 30),
    )
    X, Y = random_values(1, (shape[1], rank), dtype), random_values(2, (shape[2], rank), dtype)
    values = jnp.asarray(np.concatenate([A[i, j, k], [7, 7]])).astype(dtype)
    capacities = first.size + 2, len(pairs) + 2, i.size + 2
    loop = loops.mttkrp(shape, capacities, rank, dtype)
    (D,) = call(loop, *index, values, X.ravel(), Y.ravel())
    expected = np.einsum("ijk,jr,kr->ir", A, wide(X), wide(Y))
    sizes = np.einsum("ijk,jr,kr->ir", np.abs(A), np.abs(wide(X)), np.abs(wide(Y)))
    assert_within(D.reshape(-1, rank), expected, sum_bound(expected, sizes, 80, dtype))


@pytest.mark.parametrize("m,k,n", [(0, 3, 4), (3, 4, 0), (5, 6, 3), (1, 1, 1)])
def test_empty_and_single(m, k, n):
    """No rows, no columns, no entries."""
    density = 1.0 if m == 1 else 0.0
    operands, A, _ = matrix(m, k, "float32", density)
    B = random_values(3, (k, n), "float32")
    for kernel in (loops.spmm, loops.spmm_by_entries):
        (C,) = call(kernel(m, k, n, operands[1].size, "float32"), *operands, B.ravel())
        np.testing.assert_allclose(C.reshape(m, n), A @ wide(B), rtol=1e-6)


@pytest.mark.parametrize("n", [1, 3, 7, 8, 13, 16, 31, 100, 255, 300])
def test_widths(n):
    """Loops over lanes of any extent: whole vectors, several at once, parts of a vector."""
    i = Var("e")
    sum_up = Set("sum", add(Var("sum"), Load("x", i)))
    body = (
        Let("sum", Float(1.0), mutable=True),
        lanes(n, Store("y", i, times(Load("x", i), Float(2.0)))),
        lanes(n, sum_up),
        lanes(Load("ends", Int(1)), sum_up, begin=Load("ends", Int(0))),
        Store("s", Int(0), Var("sum")),
    )
    inputs = (Array("x", "float32", n), Array("ends", "int32", 2))
    outputs = (Array("y", "float32", n), Array("s", "float32", 1))
    x = np.arange(1, n + 1, dtype=np.float32)
    ends = np.array([n // 3, n], np.int32)
    y, s = call(Function("widths", inputs, outputs, body), x, ends)
    np.testing.assert_array_equal(y, 2 * x)
    assert s[0] == 1 + x.sum() + x[n // 3 :].sum()


def test_lanes_that_differ():
    """Branches, loops and selects that differ between lanes; gathers, scatters, int division."""
    n, e, t, acc, count = 23, Var("e"), Var("t"), Var("acc"), Var("count")
    before = Load("x", Binary("-", t, Int(1)))
    large = Binary("and", Binary(">", t, Int(0)), Binary(">", before, Float(3.0)))
    other = Binary("min", Float(9.0), Load("x", Binary("//", e, Int(4))))
    to = times(e, Int(2))
    lane = (
        Let("t", Load("turns", e)),
        Let("count", Int(0), mutable=True),
        Let("acc", Float(0.0), mutable=True),
        While(  # as many iterations as the lane's value
            Binary("<", count, t),
            (Set("acc", add(acc, Load("x", count))), Set("count", add(count, Int(1)))),
        ),
        For("q", t, add(t, Binary("%", e, Int(3))), (Set("acc", add(acc, Float(100.0))),)),
        If(
            Binary("==", Binary("%", e, Int(2)), Int(0)),
            (Store("y", to, acc),),
            (Store("y", to, times(acc, Float(-1.0))),),
        ),
        Store("y", add(to, Int(1)), Select(large, before, Binary("max", Float(0.5), other))),
    )
    body = (lanes(n, *lane),)
    inputs = (Array("turns", "int32", n), Array("x", "float32", 8))
    f = Function("lanes", inputs, (Array("y", "float32", 2 * n),), body)
    turns = np.random.default_rng(0).integers(0, 9, n).astype(np.int32)
    x = np.arange(1, 9, dtype=np.float32)
    expected = np.zeros((n, 2))
    for i, t in enumerate(turns):
        total = x[:t].sum() + 100 * (i % 3)
        expected[i, 0] = total if i % 2 == 0 else -total
        expected[i, 1] = x[t - 1] if t > 0 and x[t - 1] > 3 else max(0.5, min(9, x[i // 4]))
    (y,) = call(f, turns, x)
    np.testing.assert_array_equal(y.reshape(n, 2), expected)
    assert "masked.gather" in print_llvm(f).text


@pytest.mark.parametrize("vector_bytes", [16, 64])
def test_random_loops(vector_bytes, monkeypatch):
    """Loops over lanes with everything that a body may have: results equal the interpreter's."""
    f = Loops(vector_bytes, 6).function
    rng = np.random.default_rng(0)
    x = rng.integers(-5, 9, SIZE).astype(np.float32)
    t = rng.integers(0, SIZE + 1, SIZE).astype(np.int32)
    t[1] = 2  # where some begin
    monkeypatch.setattr(llvm, "_vector_bytes", lambda: vector_bytes)
    expected = interp.run(f, {"x": x, "t": t})
    for output, got in zip(f.outputs, call(f, x, t), strict=True):
        np.testing.assert_array_equal(got, expected[output.name], output.name)


def test_what_lanes_cannot_do_is_done_one_by_one():
    """A running sum, and a search for each lane."""
    n, e = 19, Var("e")
    lane = (
        Set("run", add(Var("run"), Load("x", e))),
        Store("y", e, Var("run")),
        Store("z", e, Load("x", Search("table", Int(0), Int(4), Binary("%", e, Int(7))))),
    )
    body = (
        Let("run", Float(0.0), mutable=True),
        lanes(n, *lane),
    )
    inputs = (Array("x", "float32", n), Array("table", "int32", 4))
    f = Function("serial", inputs, (Array("y", "float32", n), Array("z", "float32", n)), body)
    assert "x float>" not in print_llvm(f).text
    x, table = np.arange(n, dtype=np.float32), np.array([0, 2, 2, 5], np.int32)
    y, z = call(f, x, table)
    np.testing.assert_array_equal(y, np.cumsum(x))
    np.testing.assert_array_equal(z, x[np.searchsorted(table, np.arange(n) % 7, side="right") - 1])


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("atomic", [False, True])
def test_extremes_keep_nan(op, atomic):
    """Reduced over lanes into one element, and lane by lane into elements that may coincide."""
    n, e = 37, Var("e")
    lane = (
        Store("one", Int(0), Load("x", e), op, atomic),
        Store("some", Load("where", e), Load("x", e), op, atomic),
    )
    body = (threads(1, lanes(n, *lane)),)
    fill = -math.inf if op == "max" else math.inf
    f = Function(
        "extremes",
        (Array("x", "float32", n), Array("where", "int32", n)),
        (Array("one", "float32", 1, fill), Array("some", "float32", 3, fill)),
        body,
    )
    where = np.random.default_rng(1).integers(0, 3, n).astype(np.int32)
    for bad in (None, 0, 20, 36):
        x = np.array(random_values(0, n, "float32"))
        if bad is not None:
            x[bad] = np.nan
        one, some = call(f, x, where)
        reduce = getattr(np, op)
        np.testing.assert_array_equal(one[0], reduce(x))
        np.testing.assert_array_equal(some, [reduce(x[where == w]) for w in range(3)])


@pytest.mark.parametrize("size", [64, 1 << 15])
def test_workspaces(size):
    """Workspaces of each thread iteration: on the stack; large ones in memory of the call."""
    e, i = Var("e"), Var("i")
    body = (
        Workspace("w", size, fill=1.0),
        lanes(size, Store("w", e, Load("x", e), "+")),
        Let("sum", Float(0.0), mutable=True),
        lanes(size, Set("sum", add(Var("sum"), Load("w", e)))),
        Store("y", i, Var("sum")),
    )
    loop = (threads(64, *body),)
    f = Function("workspaces", (Array("x", "float32", size),), (Array("y", "float32", 64),), loop)
    assert (print_llvm(f).scratch_bytes > 0) == (size > 64)
    (y,) = call(f, np.ones(size, np.float32), chunk=1, work=1 << 30)
    np.testing.assert_array_equal(y, np.full(64, 2.0 * size))


def test_phases_in_order():
    """Loops of threads one after another, statements between them, scalars before them all."""
    n, i = 4000, Var("i")
    reverse = Binary("-", Binary("-", Int(n), Int(1)), i)
    body = (
        Let("scale", Load("x", Int(0))),
        threads(n, Store("y", i, times(Load("x", i), Var("scale")))),
        Store("y", Int(0), Float(-1.0)),
        threads(n, Store("z", i, Load("y", reverse))),
    )
    outputs = (Array("y", "float32", n), Array("z", "float32", n))
    f = Function("phases", (Array("x", "float32", n),), outputs, body)
    assert print_llvm(f).iterations == (n, 1, n)
    x = np.arange(3, n + 3, dtype=np.float32)
    y, z = call(f, x, chunk=16, work=1 << 30)
    expected = 3 * x
    expected[0] = -1
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(z, expected[::-1])


def test_wide_indices():
    """index="int64" is the same kernel with wider scalars."""
    operands, A, _ = matrix(M, K, "float32")
    B = random_values(3, (K, 20), "float32")
    f = loops.spmm_by_entries(M, K, 20, operands[1].size, "float32")
    (C,) = call(dataclasses.replace(f, index="int64"), *operands, B.ravel())
    np.testing.assert_allclose(C.reshape(M, 20), A @ wide(B), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding(dtype):
    """To nearest, ties to even; subnormals, overflow, infinities and NaN as by a cast."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4000, dtype=np.uint32)
    ties = (np.arange(2000, dtype=np.uint32) << 20) | 0x8000 | (0x1000 if dtype == "float16" else 0)
    x = np.concatenate([bits, ties, np.arange(100, dtype=np.uint32) << 15]).view(np.float32)
    x = np.concatenate(
        [x, np.float32([0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519, 65520, 1e-8])]
    )
    store = (Store("y", Var("e"), Load("x", Var("e"))),)
    back = (Store("z", Var("e"), Load("h", Var("e"))),)
    body = tuple(For("e", Int(0), Int(x.size), s, unit=CPU_VECTOR) for s in (store, back))
    half = jnp.asarray(x).astype(dtype)
    f = Function(
        "rounding",
        (Array("x", "float32", x.size), Array("h", dtype, x.size)),
        (Array("y", dtype, x.size), Array("z", "float32", x.size)),
        body,
    )
    y, z = call(f, x, half)
    np.testing.assert_array_equal(wide(y), wide(half))
    np.testing.assert_array_equal(wide(z), wide(half))


@pytest.mark.parametrize(
    "right, wrong",
    [
        (r"fadd contract <16 x float>", "fsub contract <16 x float>"),  # a partial sum
        (r"add nsw i32 (%v\d+), 3\b", r"add nsw i32 \1, 2"),  # the offset of an entry
        (r"(icmp) slt (<16 x i32> %v\d+), %v\d+", r"\1 eq \2, zeroinitializer"),  # a mask
    ],
)
def test_planted_bugs_are_caught(right, wrong, monkeypatch):
    """A kernel with one wrong instruction fails the oracle."""
    operands, A, terms = matrix(M, K + 40, "float32", 0.8)
    n = 13
    f = loops.spmm(M, K + 40, n, operands[1].size, "float32")
    monkeypatch.setattr(llvm, "_vector_bytes", lambda: 64)
    module = print_llvm(f)
    text, count = re.subn(right, wrong, module.text)
    assert count > 0
    changed = dataclasses.replace(module, text=text)
    monkeypatch.setattr(llvm, "print_llvm", lambda *_: changed)
    B = random_values(3, (K + 40, n), "float32")
    llvm._keys.clear()
    (C,) = call(f, *operands, B.ravel(), work=0)
    llvm._keys.clear()
    product, magnitude = A @ wide(B), np.abs(A) @ np.abs(wide(B))
    bound = sum_bound(product, magnitude, terms[:, None], "float32")
    with pytest.raises(AssertionError, match="out of bound"):
        assert_within(C.reshape(M, n), product, bound)


def test_functions_that_are_refused():
    y = (Array("y", "float32", 4),)
    with pytest.raises(NotImplementedError, match="threads of a GPU reduce together"):
        print_llvm(Function("f", (), y, (GroupReduce("y", Int(0), Float(1.0), 4),)))
    with pytest.raises(NotImplementedError, match="a GPUBlock loop does not run on a CPU"):
        print_llvm(Function("f", (), y, (For("b", Int(0), Int(4), (), unit=GPU_BLOCK),)))
    half = (Array("y", "float16", 4),)
    with pytest.raises(NotImplementedError, match="a float16 output takes a float32 accumulator"):
        print_llvm(Function("f", (), half, (Store("y", Int(0), Float(1.0)),), "float64"))
