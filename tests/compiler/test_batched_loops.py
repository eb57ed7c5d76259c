"""Scheduled loops for all elements of a batch, as vmap makes them: each element has its own sums,
or the sums are added up over the batch; by the interpreter, machine code and CUDA kernels."""

import dataclasses
from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
import pytest
from compiled_loops import call
from compiled_operands import own_cache  # noqa: F401
from compiler_chains import octets_on_gpu, rows
from compiler_tensors import Problem
from cuda_sources import require_nvrtc, resources
from emulated_launch import emulate, starts
from loop_interpreter import interp

from sgap_jax import CSR, CVS
from sgap_jax.compiler import Schedule, assign
from sgap_jax.compiler.cuda.print_cuda import launch_plan
from sgap_jax.compiler.llvm import builder as llvm_builder
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.llvm.print_llvm import print_llvm
from sgap_jax.compiler.loop_ir import batches
from sgap_jax.compiler.loop_ir.batches import of_batch
from sgap_jax.compiler.loop_ir.loopir import GPU_BLOCK, Binary, Int, SegReduce, Select, Var
from sgap_jax.compiler.loop_ir.patterns import statements
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.lowering.storage import array_name
from sgap_jax.compiler.presets import cpu, cpu_entries

CHAINS = rows()
ON_GPU = ("11", "13", "15 MTTKRP", "S1", "S3", "S4")
SIZES = {"i": 17, "j": 6, "k": 5, "l": 3, "m": 2, "n": 2}
EXTENTS = {"12": {"k": 128}, "14": {"j": 128}} | {
    name: {"k": 4} for name in ("S1", "S2", "S3", "S4")
}
EXTENTS |= {name: {"i": 16, "k": 66} for name in ("V1", "V2")}
SUMS = cpu(assign("ik,ij,jk->ik", {"A": CSR, "D": CSR}))
FACTORS = (1, -2, 3, 4)  # batch elements differ by these factors only
LENGTH = len(FACTORS)


def batched(schedule, name, summed, dtype="float32", turns=1):
    """A function of batched values, its inputs, and the right result."""
    sizes = SIZES | EXTENTS.get(name, {})
    problem = Problem(schedule.expression, sizes, density=0.4, spare=3, dtype=dtype)
    function = lower(schedule, sizes, problem.positions, dtype, "kernel")
    own = array_name(schedule.expression.sparse, schedule.expression)
    inputs = {array.name: problem.inputs[array.name] for array in function.inputs}
    inputs[own] = np.concatenate([n * inputs[own] for n in FACTORS]).astype(inputs[own].dtype)
    (output,) = function.outputs
    function = of_batch(function, LENGTH, {own} if summed else {own, output.name}, turns)
    want = problem.want
    if schedule.expression.reduction != "+":
        want = np.concatenate([want, *(n * want for n in FACTORS[1:])])
    elif summed:
        want = sum(FACTORS) * want
    else:
        want = np.concatenate([n * want for n in FACTORS])
    return function, inputs, want


def interpreted(*about):
    function, inputs, want = batched(*about)
    (output,) = function.outputs
    np.testing.assert_array_equal(np.float64(interp.run(function, inputs)[output.name]), want)


@pytest.mark.parametrize("summed", [False, True])
def test_every_chain_of_the_conformance_list(summed):
    for n, (name, schedule) in enumerate(CHAINS.items()):
        interpreted(schedule, name, summed, "float32", (1, 2, LENGTH)[n % 3])


@pytest.mark.parametrize("summed", [False, True])
def test_machine_code(summed):
    """Entries in tasks with atomics, vectors, workspaces; sums over lanes that are reduced
    together."""
    pytest.importorskip("llvmlite")
    for n, name in enumerate(("2", "3 positions", "4", "8 workspace", "sums")):
        turns = (1, 2, LENGTH)[n % 3]
        function, inputs, want = batched(CHAINS.get(name, SUMS), name, summed, turns=turns)
        (found,) = call(function, *inputs.values())
        np.testing.assert_array_equal(np.float64(found), want)
    assert ("group" in print_llvm(function).text) != summed  # together, or one by one


@pytest.mark.parametrize("summed", [False, True])
def test_on_a_gpu(summed):
    """One launch, without spills."""
    require_nvrtc()
    octets = {name: octets_on_gpu()[name] for name in ("V1 columns", "V2 rows")}
    gpu = {name: CHAINS[name] for name in ON_GPU} | octets
    for n, (name, schedule) in enumerate(gpu.items()):
        dtype = ("bfloat16" if name in octets else "float32") if n else "float64"
        function, inputs, want = batched(
            schedule, name[:2] if name in octets else name, summed, dtype, 1 + n % 2
        )
        (out,) = function.outputs
        call = launch_plan(function)
        result = [((out.size,), jnp.dtype(out.dtype))]
        (found,) = emulate(call, [*inputs.values(), *starts(function)], result)
        np.testing.assert_array_equal(np.float64(found), np.float64(want.astype(found.dtype)))
        if n % 3 == summed:
            arch = ("sm_80", "sm_90", "sm_100")[n // 3]
            assert resources(call.source, arch)[1:] == (0, 0), call.source


def test_tasks_and_blocks_are_of_all_elements():
    function, _, _ = batched(CHAINS["S4"], "S4", False)
    one, _, _ = batched(CHAINS["S4"], "S4", True)
    blocks = lambda f: next(s for s in f.body if getattr(s, "unit", None) == GPU_BLOCK)
    assert blocks(function).end.value == LENGTH * blocks(one).end.value
    (store,) = (s for s in statements(function.body) if isinstance(s, SegReduce))
    assert isinstance(store.index, Select)  # a lane that takes no part belongs to no element
    plain = dataclasses.replace(store, index=store.index.true)
    moved = batches._Moved(store.index.false, {"C": 8}, None)(plain)
    assert isinstance(moved.index.condition, Binary) and moved.index.condition.op == "<"


def test_extrema_and_batches_of_batches():
    schedule = cpu(assign("ij,jk->ik", {"A": CVS(4)}, reduction="max"))
    problem = Problem(schedule.expression, SIZES, dtype="float64")
    one = lower(schedule, SIZES, problem.positions, "float64")
    several = of_batch(of_batch(one, 2, {"A_vals", "C"}), 3, {"B", "C"})
    pairs = of_batch(of_batch(one, 2, {"A_vals", "C"}), 3, {"A_vals", "B", "C"})
    given = problem.inputs
    scaled = lambda x, *factors: np.concatenate([n * x for n in factors])
    inputs = given | {"A_vals": scaled(given["A_vals"], 1, 2), "B": scaled(given["B"], 1, 2, 4)}
    want = scaled(problem.want, 1, 2, 2, 4, 4, 8)
    np.testing.assert_array_equal(interp.run(several, inputs)["C"], want)
    inputs |= {"A_vals": np.tile(inputs["A_vals"], 3)}
    np.testing.assert_array_equal(interp.run(pairs, inputs)["C"], want)


def test_indices_are_as_wide_as_all_elements_need():
    function, _, _ = batched(CHAINS["2"], "2", False)
    assert function.index == "int32"
    assert of_batch(function, 2**26, {"A_vals", "y"}).index == "int64"
    # Few values and many tasks: 2**16 for one element.
    schedule = cpu_entries(assign("ij,j->i", {"A": CSR}), entries=64)
    function = lower(schedule, {"i": 1, "j": 4}, (1, 2**22), "float32")
    assert of_batch(function, 2**15, {"B", "C"}).index == "int64"
    assert of_batch(function, 2**15, {"B"}).index == "int32"  # each task covers all elements


def test_how_many_take_turns():
    """The largest divisor of the batch up to eight; fewer if each element has large operands of its
    own."""
    function = lower(SUMS, {"i": 64, "j": 64, "k": 256}, (64, 300), "float32")
    turns = lambda length, *dense: batches.in_turns(function, length, dense)
    assert [turns(n) for n in (1, 6, 8, 11, 12, 64)] == [1, 6, 8, 1, 6, 8]
    assert [turns(n, "C") for n in (4, 9, 64)] == [4, 3, 4]  # 16,384 values each
    wide = lower(SUMS, {"i": 64, "j": 64, "k": 2048}, (64, 300), "float32")
    assert [batches.in_turns(wide, 64, names) for names in ((), ("B",), ("B", "C"))] == [8, 8, 1]


def test_a_part_is_an_array_of_its_own():
    """Machine code computes the part's address once, and prefetches gathered rows only if a part is
    large."""
    schedule = cpu(assign("ij,jk->ik", {"A": CSR}))

    def text(rows):
        one = lower(schedule, {"i": 64, "j": rows, "k": 64}, (64, 300), "float32")
        parts = of_batch(one, 64, {"B", "C"})
        pairs = of_batch(of_batch(one, 4, {"B", "C"}), 16, {"B", "C"})
        for made in (parts, pairs):
            assert [a.parts for a in (*made.inputs, *made.outputs)] == [1, 1, 1, 64, 64]
        return print_llvm(parts).text, print_llvm(pairs).text

    for near, far in zip(text(1000), text(10_000), strict=True):
        assert "llvm.prefetch" in far and "llvm.prefetch" not in near
    index = Binary("+", Binary("*", Var("e"), Int(64_000)), Binary("*", Var("j"), Int(64)))
    index = Binary("+", Binary("+", Binary("*", Var("f"), Int(256_000)), index), Var("k"))
    part, rest = llvm_builder._split_index(index, 64_000)
    assert str(part).count("Var") == 2 and "'j'" in str(rest) and "'k'" in str(rest)
    assert llvm_builder._split_index(rest, 64_000) == (Int(0), rest)


@pytest.mark.parametrize(
    "right, wrong, summed",
    [
        ("_index", lambda self, array, index: index, False),  # all elements use the first
        ("_part", batches._Moved._index, False),  # lanes that take no part belong to an element
        ("__call__", lambda self, node: node, True),  # the last element overwrites the others
    ],
)
def test_planted_bugs_are_caught(right, wrong, summed, monkeypatch):
    monkeypatch.setattr(batches._Moved, right, wrong)
    with pytest.raises((AssertionError, interp.LoopFault)):
        interpreted(CHAINS["S4"], "S4", summed)
        interpreted(CHAINS["4"], "4", summed)


def test_a_planted_bug_of_machine_code_is_caught(monkeypatch):
    """All elements use the first part."""
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(llvm, "_keys", OrderedDict())  # no cached code
    right, first = llvm_builder._split_index, Binary("+", Int(0), Int(0))
    monkeypatch.setattr(llvm_builder, "_split_index", lambda *of: (first, right(*of)[1]))
    with pytest.raises(AssertionError):
        test_machine_code(False)


def test_the_text_of_a_batch():
    s = Schedule(assign("ij,j->i", {"A": CSR})).split("i", "i0", "i1", 2)
    s = s.parallelize("i0", "CPUThread", "NoRaces")
    text = s.loops({"i": 4, "j": 3}, nnz=5, batch={"A": 8})
    for line in (
        "for (int i0_element = 0; i0_element < 16; i0_element++) {  // CPUThread",
        "const int i0 = i0_element / 8;",
        "const int element = i0_element % 8;",
        "sum += A_vals[element * 5 + j_pos] * B[j];",
        "C[element * 4 + i] = sum;",
    ):
        assert line in text
    # Each element has its own B. Only two run interleaved, so that few of these are read at a time.
    text = s.loops({"i": 4, "j": 1 << 15}, nnz=5, batch={"A": 8, "B": 8})
    for line in (
        "const int element = element_i0 / 2 / 2 * 2 + element_i0 % 2;",
        "const int i0 = element_i0 / 2 % 2;",
        "sum += A_vals[element * 5 + j_pos] * B[element * 32768 + j];",
    ):
        assert line in text
    with pytest.raises(ValueError, match="batch: no operand 'D'; there are A, B"):
        s.loops(batch={"D": 8})
    for wrong in ({"A": 8, "B": 4}, {"A": 0}):
        with pytest.raises(ValueError, match="batch: expected one length from 1 on"):
            s.source("llvm", batch=wrong)
