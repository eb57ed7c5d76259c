"""Machine code for runs of consecutive entries: rows of different lengths, in lanes, staged,
several at a time."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_loops import call
from compiled_operands import own_cache  # noqa: F401
from loop_interpreter import interp
from tolerance import DTYPES

from sgap_jax import CSF, CSR, SparseArray, einsum
from sgap_jax.compiler import assign
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.llvm.print_llvm import print_llvm
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.presets import cpu, cpu_entries, cpu_fibers

pytest.importorskip("llvmlite")

M, K = 61, 700
SPMV = assign("ij,j->i", {"A": CSR})


def operands():
    """Lengths with whole vectors, several partial sums, remainders, and no entries."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(0, 5, 31), rng.integers(0, 90, 26), [600, 0, 333, 1]])
    A, x = np.zeros((M, K)), rng.integers(-2, 3, K).astype(float)
    for row, length in zip(A, rng.permutation(lengths), strict=True):
        row[rng.permutation(K)[:length]] = rng.choice([-1, 1, 2], length)
    return A, x


def schedules(expression):
    """Schedules with tasks within a row, of several rows, and of all rows."""
    staged = [cpu_entries(expression, size, staged=True) for size in (64, 1000, 4096)]
    return [cpu(expression, 7), cpu_entries(expression, 100), *staged]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_unlike_lengths(dtype):
    A, x = operands()
    every = schedules(SPMV)
    given = SparseArray.from_dense(A.astype(jnp.dtype(dtype))), jnp.asarray(x, jnp.dtype(dtype))
    found = jax.jit(lambda *x: [einsum("ij,j->i", *x, schedule=s) for s in every])(*given)
    for y in found:
        np.testing.assert_array_equal(np.asarray(y), (A @ x).astype(jnp.dtype(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_unlike_lengths(dtype):
    """Tasks within a slice, of several slices, and of all; also for a matrix with empty rows."""
    rng = np.random.default_rng(0)
    A = rng.choice([-1, 1], (9, 30, 7)) * (rng.random((9, 30, 7)) < 0.05)
    A[4], A[6] = rng.integers(-1, 2, (30, 7)), 0
    factors = [rng.integers(-2, 3, (n, 37)) for n in A.shape[1:]]
    numbers = jnp.dtype(dtype)
    dense = [jnp.asarray(x, numbers) for x in factors]
    matrix = SparseArray.from_dense(A[:, :, 0].astype(numbers))
    tensor = SparseArray.from_dense(A.astype(numbers), format=CSF(3))

    def both(tensor, matrix, B, C):
        for subscripts, X, *given in [("ijk,jr,kr->ir", tensor, B, C), ("ij,jk->ik", matrix, B)]:
            e = assign(subscripts, {"A": X.format})
            for size in (3, 16, 1000):
                yield einsum(subscripts, X, *given, schedule=cpu_fibers(e, size))

    found = jax.jit(lambda *x: list(both(*x)))(tensor, matrix, *dense)
    want = np.einsum("ijk,jr,kr->ir", A, *factors), A[:, :, 0] @ factors[0]
    for n, y in enumerate(found):
        np.testing.assert_array_equal(np.asarray(y), want[n // 3].astype(numbers))


def function(schedule, A, x, dtype):
    """A lowered function, and its inputs by name."""
    stored = SparseArray.from_dense(A.astype(dtype))
    ((), (offsets, columns)) = stored.index_arrays
    sizes, room = {"i": M, "j": K}, (M, stored.nnz)
    arrays = {"A2_pos": offsets, "A2_crd": columns, "A_vals": stored.values, "B": x.astype(dtype)}
    f = lower(schedule, sizes, room, dtype)
    return f, {array.name: np.asarray(arrays[array.name]) for array in f.inputs}


@pytest.mark.parametrize("vector_bytes,dtype", [(16, "float32"), (32, "float64"), (64, "float32")])
@pytest.mark.parametrize("reduction", ["+", "max"])
def test_vectors_of_any_size(vector_bytes, dtype, reduction, monkeypatch):
    """Results equal the interpreter's."""
    A, x = operands()
    monkeypatch.setattr(llvm, "_vector_bytes", lambda: vector_bytes)
    llvm._keys.clear()
    for schedule in schedules(assign("ij,j->i", {"A": CSR}, reduction=reduction))[1::2]:
        f, inputs = function(schedule, A, x, dtype)
        expected = interp.run(f, inputs)[f.outputs[0].name]
        (found,) = call(f, *inputs.values(), chunk=1, work=1 << 30)
        np.testing.assert_array_equal(found, expected)
    llvm._keys.clear()


BUGS = {
    "the other one of two places": (r"lshr i64 (%v\d+), 32", r"and i64 \1, 4294967295"),
    "a mask of no lanes": (r"icmp slt (<16 x i32>) (%v\d+), %v\d+", r"icmp ne \1 \2, \2"),
    "sums in another order": (r"<i32 0, i32 4, i32 8, i32 12>", "<i32 0, i32 4, i32 12, i32 8>"),
    "halves that are not added": (r"<i32 2, i32 3, i32 0, i32 1,", "<i32 0, i32 3, i32 0, i32 1,"),
    "a run too many": (r"add nsw i32 (%v\d+), 4\b", r"add nsw i32 \1, 5"),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(name, monkeypatch):
    A, x = operands()
    monkeypatch.setattr(llvm, "_vector_bytes", lambda: 64)
    f, inputs = function(cpu_entries(SPMV, 1000, staged=True), A, x, "float32")
    module = print_llvm(f)
    text, count = re.subn(*BUGS[name], module.text)
    assert count > 0
    changed = dataclasses.replace(module, text=text)
    monkeypatch.setattr(llvm, "print_llvm", lambda *_: changed)
    llvm._keys.clear()
    (found,) = call(f, *inputs.values(), work=0)
    llvm._keys.clear()
    with pytest.raises(AssertionError, match="not equal"):
        np.testing.assert_array_equal(found, A @ x)
