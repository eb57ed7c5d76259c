"""The loop IR printed as CUDA: the emulator's results equal the interpreter's."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import EACH_ARCHITECTURE, require_nvrtc, resources
from emulated_launch import emulate, starts
from emulator import Fault
from loop_functions import (
    GPU,
    RANDOM_INPUTS,
    Sparse,
    add,
    at,
    change,
    expected,
    inputs,
    let,
    loop,
    mul,
    nonzeros_on_gpu,
    op,
    random_function,
    row_groups,
    rows_on_gpu,
    segments,
    store,
    wide,
)
from loop_interpreter.interp import run
from tolerance import DTYPES, assert_within, sum_bound

from sgap_jax.compiler.cuda.print_cuda import launch_plan, print_cuda
from sgap_jax.compiler.loop_ir.loopir import (
    Array,
    Float,
    Function,
    GroupReduce,
    If,
    Int,
    SegReduce,
    Select,
    Var,
    Workspace,
)
from sgap_jax.launch import launch, nvrtc
from sgap_jax.launch.cache import CubinCache
from sgap_jax.launch.kernel_call import header_folder, header_texts

BLOCK, WARP, THREAD = "GPUBlock", "GPUWarp", "GPUThread"


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def emulated(function, arrays, change=None, **where):
    """All outputs, by name."""
    outputs = [((array.size,), jnp.dtype(array.dtype)) for array in function.outputs]
    given = [*(arrays[array.name] for array in function.inputs), *starts(function)]
    call = launch_plan(function)
    if change is not None:
        call = dataclasses.replace(call, source=change(call.source))
    results = emulate(call, given, outputs, **where)
    return {array.name: result for array, result in zip(function.outputs, results, strict=True)}


def check(function, A, dtype, n, op="+", **where):
    arrays = inputs(A, dtype, n)
    exact, magnitude, terms = expected(A, arrays, n, op)
    out = function.outputs[0].dtype
    bound = sum_bound(exact, magnitude, terms, dtype if out == dtype else wide(dtype))
    C = emulated(function, arrays, **where)["C"].reshape(A.m, n)
    assert_within(C, exact, bound)
    assert_within(run(function, arrays)["C"].reshape(A.m, n), exact, bound)


@pytest.mark.parametrize("build", GPU.values(), ids=GPU)
def test_every_schedule_and_dtype(build):
    for dtype in DTYPES:
        check(build(Sparse(), dtype, n=3), Sparse(), dtype, 3)
    one = Sparse(m=1, k=1)
    check(build(one, n=1), one, "float32", 1)


@pytest.mark.parametrize("build", GPU.values(), ids=GPU)
def test_maxima_minima_wide_indices_and_older_architectures(build):
    for combine, dtype in (("max", "float32"), ("min", "float64"), ("max", "float64")):
        check(build(Sparse(), dtype, n=2, op=combine), Sparse(), dtype, 2, combine)
    where = {"arch": "compute_80"}
    check(build(Sparse(), n=2, index="int64"), Sparse(), "float32", 2, **where)


@pytest.mark.parametrize("lanes, group", [(1, 1), (2, 2), (8, 4), (24, 8), (32, 32)])
def test_groups_and_warps_that_threads_fill_or_do_not(lanes, group):
    A = Sparse(seed=3)
    check(row_groups(A, lanes=lanes, group=group, warps=3), A, "float32", 3)
    check(segments(A, threads=3 * group, group=group), A, "float32", 3)


@pytest.mark.parametrize("build", GPU.values(), ids=GPU)
def test_nothing_stored_and_nothing_to_store(build):
    A = Sparse(m=5, padding=3)
    arrays = inputs(A, "float32", 3) | {"A2_pos": np.zeros(6, np.int32)}
    assert not emulated(build(A, n=3), arrays)["C"].any()
    assert emulated(build(Sparse(m=0), n=3), inputs(Sparse(m=0), "float32", 3))["C"].size == 0


@pytest.mark.parametrize("arch", EACH_ARCHITECTURE)
def test_kernels_compile_in_registers(arch):
    A = Sparse(m=1000, k=900)
    for i, build in enumerate(GPU.values()):
        for index, combine in (("int32", "+"), ("int64", "max")):
            dtype = DTYPES[(i + len(arch) + (index == "int64")) % 4]
            source = print_cuda(build(A, dtype, n=40, index=index, op=combine))
            registers, stack, spills = resources(source, arch)
            assert (stack, spills) == (0, 0) and registers <= 64, source


def test_launches():
    call = launch_plan(nonzeros_on_gpu(Sparse(padding=30), warps=4, chunk=4))
    capacity = len(Sparse(padding=30).arrays("float32")["A2_crd"])
    assert (call.grid, call.block, call.zero) == ((-(-capacity // 16), 1, 1), (128, 1, 1), (0,))
    call = launch_plan(row_groups(Sparse(), lanes=16, warps=3))
    assert (call.grid, call.block) == ((13, 1, 1), (48, 1, 1))
    assert launch_plan(row_groups(Sparse(), lanes=24, warps=3)).block == (96, 1, 1)
    call = launch_plan(rows_on_gpu(Sparse(), n=5))
    assert (call.grid, call.block, call.zero) == ((2, 1, 1), (64, 1, 1), ())
    assert launch_plan(rows_on_gpu(Sparse(m=0))).grid == (1, 1, 1)
    cubin = launch.compile_call(call, nvrtc, "sm_90", CubinCache(None))
    assert cubin.kernel == call.kernel == "rows" and cubin.code[:4] == b"\x7fELF"
    call = launch_plan(kernel(threads(store("y", "t", 1.0, "max", True)), fill=-np.inf))
    assert (call.zero, call.in_place) == ((), ((2, 0),)) and "const float* /* y */" in call.source


def kernel(*body, fill=0.0, dtype="float32", **keywords):
    arrays = (Array("x", "int32", 8), Array("v", "float32", 8))
    return Function("f", arrays, (Array("y", dtype, 8, fill),), body, **keywords)


def threads(*body, extent=8, **around):
    return loop("b", 1, loop("t", extent, *body, unit=THREAD), unit=BLOCK)


VALUES = {"x": np.int32([3, 1, 0, 2, 7, 5, 6, 4]), "v": np.float32(np.arange(8) - 2.5)}


def statements(y):
    """Statements by name; each stores its result in the output y."""
    return {
        "a maximum of integers": store(y, op("max", op("min", at("x", "t"), 6), 1), 1.0, "+", True),
        "integers": store(y, op("%", op("//", add(mul("t", 9), 2), 3), 8), at("v", "t"), "+", True),
        "numbers": store(y, "t", op("min", op("max", at("v", "t"), -1.0), float("inf"))),
        "infinity": store(y, "t", op("max", at("v", "t"), -float("inf"))),
        "NaN": store(y, "t", op("max", op("min", float("nan"), at("v", "t")), at("v", "t"))),
        "a truth value": If(
            op("or", op("and", op("<", "t", 5), op("!=", "t", 2)), op("==", "t", 7)),
            (store(y, "t", 1.0),),
            (store(y, "t", op("-", 2.0, op("-", at("v", "t"), 1.0))),),
        ),
        "a choice": store(y, "t", op("*", Select(op(">=", "t", 4), Float(1.0), Float(2.0)), 3.0)),
        "a workspace": If(
            op("<", 0, 1),
            (
                Workspace("w", 3, 1.0),
                loop("s", 3, store("w", "s", at("v", "s"), "+"), unit="unroll"),
                store(y, "t", add(at("w", 0), at("w", 1), at("w", 2))),
                loop("s", at("x", "t"), store(y, "t", -1.0, "min"), begin=1, step=2),
            ),
        ),
        "a group that owns its element": GroupReduce(
            y, op("//", "t", 4), at("v", "t"), 4, "min", atomic=False
        ),
        "segments with gaps": SegReduce(
            y, Select(op("==", op("%", "t", 3), 0), Int(-1), op("//", "t", 3)), at("v", "t"), 8
        ),
    }


@pytest.mark.parametrize("index, accumulator", [("int32", "float64"), ("int64", "float32")])
def test_statements(index, accumulator):
    names = list(statements("y"))
    body = [statements(f"y{i}")[name] for i, name in enumerate(names)]
    function = dataclasses.replace(
        kernel(threads(*body), index=index, accumulator=accumulator),
        outputs=tuple(Array(f"y{i}", accumulator, 8, 0.0) for i in range(len(names))),
    )
    ours, theirs = run(function, VALUES), emulated(function, VALUES)
    for i, name in enumerate(names):
        np.testing.assert_array_equal(theirs[f"y{i}"], ours[f"y{i}"], name)
        assert (theirs[f"y{i}"] != 0).any(), name


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_random_expressions_mean_the_same(index):
    function = random_function("random", 60, index, lambda body: (threads(*body),), seed=2)
    ours = run(function, RANDOM_INPUTS)["y"]
    np.testing.assert_array_equal(emulated(function, RANDOM_INPUTS)["y"], ours)


def test_sums_of_wide_integers_do_not_overflow():
    far = op("//", mul(mul(2**20, add("t", 1)), 2**20), 2**40)
    function = kernel(threads(store("y", op("-", far, 1), 1.0)), index="int64")
    assert emulated(function, VALUES)["y"].all() and run(function, VALUES)["y"].all()


def with_header(source):
    header = header_texts(header_folder())["loops.cuh"].replace("#pragma once\n", "")
    return source.replace('#include "loops.cuh"', header)


@pytest.mark.parametrize(
    "build, right, wrong",
    [
        (rows_on_gpu, "p < A2_pos[i + 1]", "p <= A2_pos[i + 1]"),
        (rows_on_gpu, "if (f < 39)", "if (f < 40)"),
        (rows_on_gpu, "float sum = 0.0f", "float sum"),
        (rows_on_gpu, "threadIdx.x", "threadIdx.x % 32"),
        (nonzeros_on_gpu, "while (p ==", "if (p =="),
        (nonzeros_on_gpu, "              sum = 0.0f;\n", ""),
        (nonzeros_on_gpu, "threadIdx.x / 32", "threadIdx.x / 64"),
        (nonzeros_on_gpu, "}\n        atomicAdd(&C[i * 3 + k], sum)", "}\nC[i * 3 + k] += sum"),
        (nonzeros_on_gpu, "if (p < A2_pos[13])", ""),
        (row_groups, "blockIdx.x", "blockIdx.x / 2"),
        (row_groups, "Reduce<sgap::Add, 8>", "Reduce<sgap::Add, 8, sgap::Alone<sgap::Add>>"),
        (row_groups, "Reduce<sgap::Add, 8>", "Reduce<sgap::Add, 32>"),
        (row_groups, "if (f < 39)", "if (f < 39 && jp1 != 3)"),
        (row_groups, "group.lane == 0", "group.lane <= 1"),
        (row_groups, "group.template Reduce<Combine>(all);", ""),
        (segments, "first && index >= 0", "first"),
        (segments, "first && index >= 0", "index >= 0"),
        (segments, "target < most ? target : most", "most"),
    ],
)
def test_planted_bugs_are_caught(build, right, wrong):
    function = build(Sparse(), n=3)
    assert with_header(print_cuda(function)).count(right) == 1
    broken = lambda source: with_header(source).replace(right, wrong)
    with pytest.raises((Fault, AssertionError)):
        check(function, Sparse(), "float32", 3, change=broken)


@pytest.mark.parametrize("right", ["Combine()(__int_as_float(before), value)", "seen != before"])
def test_planted_bugs_of_atomic_maxima_are_caught(right):
    wrong = "value" if "Combine" in right else "false"
    function, arrays = nonzeros_on_gpu(Sparse(), op="max"), inputs(Sparse(), "float32", 3)
    ours = run(function, arrays)["C"]
    np.testing.assert_allclose(emulated(function, arrays)["C"], ours, rtol=1e-6)
    broken = lambda source: with_header(source).replace(right, wrong, 1)
    assert np.abs(emulated(function, arrays, broken)["C"] - ours).max() > 1e-3


REFUSED = [
    (kernel(store("y", 0, 1.0)), "one loop of GPUBlock, got 0"),
    (kernel(threads(), threads()), "one loop of GPUBlock, got 2"),
    (kernel(loop("s", 2, threads())), "one loop of GPUBlock, got 0"),
    (kernel(threads(loop("s", 2, unit="CPUVector"))), "a loop of CPUVector on a GPU, at `for"),
    (kernel(loop("i", 2, unit="CPUThread"), threads()), "a loop of CPUThread on a GPU"),
    (kernel(loop("b", 1, loop("t", 2, unit=THREAD), loop("t", 3, unit=THREAD), unit=BLOCK)),)
    + ("loops of GPUThread with 2 and 3 iterations",),
    (kernel(threads(loop("w", 2, unit=WARP))), "that is not where one can be, at `for"),
    (kernel(store("y", 0, 1.0), threads()), "a store beside the loops of threads, at `y[0] = 1"),
    (kernel(loop("b", 1, store("y", 0, 1.0), loop("t", 2, unit=THREAD), unit=BLOCK)),)
    + ("a store beside the loops of threads",),
    (kernel(loop("b", 1, Workspace("w", 2), loop("t", 2, unit=THREAD), unit=BLOCK)),)
    + ("a workspace that threads share, at `float w[2]",),
    (kernel(threads(Workspace("w", 2), GroupReduce("w", Int(0), Float(1.0), 2))),)
    + ("a group that adds to a workspace",),
]
WRONG = [
    (kernel(threads(extent=1025)), "1 warps of 1025 threads"),
    (kernel(loop("b", 1, loop("w", 2, loop("t", 64, unit=THREAD), unit=WARP), unit=BLOCK)),)
    + ("2 warps of 64 threads",),
    (kernel(threads(GroupReduce("y", Int(0), Float(1.0), 4), extent=6)), "groups of 4 in 6"),
    (kernel(threads(store("y", "t", 1.0, "+")), dtype="float16"), "y, which is float16; expected"),
    (kernel(threads(store("y", "t", 1.0, atomic=True))), "an atomic store without op to y"),
    (kernel(let("n", 1), loop("b", Var("n"), unit=BLOCK)), "expected 0 to a constant"),
    (kernel(threads(let("new", 1))), "new is a word of CUDA C++"),
    (kernel(let("n", 1, mutable=True), threads(change("n", 2))), "n is of outside of a parallel"),
]


@pytest.mark.parametrize(
    "error, function, says",
    [(NotImplementedError, *case) for case in REFUSED] + [(ValueError, *case) for case in WRONG],
)
def test_what_is_no_kernel_is_refused(error, function, says):
    with pytest.raises(error) as raised:
        launch_plan(function)
    assert says in str(raised.value) and str(raised.value).startswith(
        function.name if "GPUBlock loop" not in str(raised.value) else "GPUBlock"
    )


def test_the_text_of_a_kernel(golden):
    golden.text("row_groups.cu.txt", print_cuda(row_groups(Sparse(), "bfloat16")))
