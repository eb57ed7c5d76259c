"""Clearing large arrays with stores that bypass the caches: in which loops, and what they store."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from compiled_loops import add, call, function, lanes, threads, times
from compiled_operands import own_cache  # noqa: F401

from sgap_jax import CSF, SparseArray, einsum
from sgap_jax.compiler import assign
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.llvm import stream_fill
from sgap_jax.compiler.llvm.print_llvm import print_llvm
from sgap_jax.compiler.loop_ir.loopir import Float, Int, Load, Store, Var
from sgap_jax.compiler.loop_ir.widths import accumulator_of
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.presets import cpu

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="plain stores there")

ROWS, WIDTH = 60, 85  # rows begin anywhere within a vector
BEGINS = np.arange(ROWS) % 19
LENGTHS = np.array([0, 1, 3, 15, 16, 17, 31, 32, 40, 66])[np.arange(ROWS) // 6]
NEVER = "  %there = icmp ne i8 0, 0"


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(stream_fill, "_STREAMED_BYTES", 0)
    llvm._keys.clear()
    yield
    llvm._keys.clear()


def cleared(dtype, index="int32"):
    """Each row is filled with 7, except for a part that is cleared."""
    row = times(Var("i"), Int(WIDTH))
    first, last = (add(row, Load(name, Var("i"))) for name in ("begin", "end"))
    part = lanes(last, Store("out", Var("e"), Float(0.0)), begin=first)
    body = threads(
        ROWS,
        lanes(WIDTH, Store("out", add(row, Var("e")), Float(7.0))),
        dataclasses.replace(part, stream=True),
    )
    places = [("begin", "int32", ROWS), ("end", "int32", ROWS)]
    f = function("cleared", places, [("out", ROWS * WIDTH)], (body,), dtype)
    return dataclasses.replace(f, accumulator=accumulator_of(dtype), index=index)


def check(*given):
    ends = BEGINS + LENGTHS
    operands = (x.astype(np.int32) for x in (BEGINS, ends))
    (found,) = call(cleared(*given), *operands, chunk=1, work=1 << 30)
    places = np.arange(WIDTH)
    inside = (BEGINS[:, None] <= places) & (places < ends[:, None])
    found = np.asarray(found).astype(np.float64).reshape(ROWS, WIDTH)
    np.testing.assert_array_equal(found, np.where(inside, 0.0, 7.0))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8"])
@pytest.mark.parametrize("vector_bytes", [16, None])
def test_parts_of_rows(dtype, vector_bytes, small, monkeypatch):
    if vector_bytes is not None:
        monkeypatch.setattr(llvm, "_vector_bytes", lambda: vector_bytes)
    text = print_llvm(cleared(dtype), llvm._vector_bytes()).text
    assert "!nontemporal" in text and "@mincore" in text and "fence seq_cst" in text
    check(dtype)


def test_positions_of_64_bits(small):
    check("float32", "int64")


def test_pages_that_are_not_there(small, monkeypatch):
    monkeypatch.setattr(stream_fill, "page_check", lambda *_: [NEVER])
    check("float32")


def test_planted_bug_is_caught(small, monkeypatch):
    monkeypatch.setattr(stream_fill, "last_lanes", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        check("float32")


def test_a_large_result_in_new_memory_and_in_memory_that_is_there():
    m, n, r = 2200, 500, 16
    rng = np.random.default_rng(0)
    row, column, last = np.arange(m), rng.integers(0, n, m), rng.integers(0, 9, m)
    A = SparseArray.from_coordinates(
        np.stack([row, column, last], 1), np.ones(m, np.float32), (m, n, 9), format=CSF(3)
    )
    B = rng.standard_normal((9, r), dtype=np.float32)
    want = np.zeros((m, n, r), np.float32)
    want[row, column] = B[last]
    product = lambda A, B, spare: einsum("ijk,kr->ijr", A, B)  # noqa: E731
    into = jax.jit(product, donate_argnums=2, keep_unused=True)
    assert "@mincore" in print_llvm(lower(*of_einsum(m, n, r))).text
    out = jax.jit(lambda A, B: product(A, B, None))(A, B)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(into(A, B, out + 1), want)


def of_einsum(m, n, r):
    sizes = {"i": m, "j": n, "k": 9, "r": r}
    return cpu(assign("ijk,kr->ijr", {"A": CSF(3)})), sizes, (m, m, m), "float32"


@pytest.mark.parametrize(
    "rows,fibers,streams",
    [(5000, 5000, True), (5000, 300_000, False), (500, 500, False)],
)
def test_large_results_of_few_fibers(rows, fibers, streams):
    e = assign("ijk,kr->ijr", {"A": CSF(3)})
    sizes = {"i": rows, "j": 300, "k": 50, "r": 16}
    f = lower(cpu(e), sizes, (rows, fibers, fibers), "float32")
    assert ("!nontemporal" in print_llvm(f).text) == streams


def test_rows_that_are_stored_whole():
    """Only the gaps between stored rows are cleared, which is little."""
    e = assign("ijk,jr,kr->ir", {"A": CSF(3)})
    sizes = {"i": 2_000_000, "j": 30, "k": 50, "r": 16}
    f = lower(cpu(e), sizes, (2_000_000, 2_000_000, 2_000_000), "float32")
    assert "!nontemporal" not in print_llvm(f).text
