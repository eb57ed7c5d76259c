"""Loops over integers compute in the operands' dtype; sums and products wrap like NumPy's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_operands import own_cache  # noqa: F401
from compiled_text import compiled
from cuda_sources import require_nvrtc, resources
from emulated_launch import emulate, starts
from loop_interpreter import interp

from sgap_jax import COO, CSF, CSR, CVS, AtomicParallelism, Reference, SparseArray, einsum
from sgap_jax.compiler import assign
from sgap_jax.compiler.cuda.print_cuda import launch_plan, padded_sizes
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.loop_ir.loopir import INTEGERS
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.lowering.storage import capacities
from sgap_jax.compiler.presets import cpu, cpu_entries, spmm_point
from sgap_jax.launch.kernel_call import header_folder, header_texts
from sgap_jax.schedules.emulated import Emulated

SIZES = {"i": 11, "j": 26, "k": 19, "r": 5}
SPMV = assign("ij,j->i", {"A": CSR})
CASES = [
    ("ij,jk->ik", CSR, "sum", None),
    ("ij,jk->ik", COO, "max", None),
    ("ij,ik,jk->ij", CSR, "min", None),
    ("ijk,jr,kr->ir", CSF(3), "sum", None),
    ("ij,jk->", CVS(4), "max", None),
    ("ij,j->i", CSR, "sum", cpu_entries(SPMV, 64)),
    ("ij,j->i", CSR, "sum", cpu_entries(SPMV, 64, staged=True)),
    ("ij,j->i", CSR, "min", cpu_entries(dataclasses.replace(SPMV, reduction="min"), 64)),
]
OF = {dtype: CASES[n % 2 :: 2] for n, dtype in enumerate(INTEGERS)}


def problem(subscripts, format, dtype, seed=0):
    """Operands over the whole range of the dtype: nearly every product wraps. Row 3 is empty."""
    random, limits = np.random.default_rng(seed), np.iinfo(dtype)
    words = subscripts.partition("->")[0].split(",")
    whole = [
        random.integers(limits.min, limits.max, [SIZES[i] for i in word], dtype, endpoint=True)
        for word in words
    ]
    whole[0][random.random(whole[0].shape) < 0.5] = 0
    whole[0][3] = 0
    A = SparseArray.from_dense(whole[0], format=format)
    return A, [jnp.asarray(x) for x in whole[1:]], whole


def meaning(subscripts, format, whole, reduction):
    words, _, output = subscripts.partition("->")
    words, dtype = words.split(","), whole[0].dtype
    every = sorted(set("".join(words)))

    def spread(word, x):
        there = [i for i in every if i in word]
        x = np.transpose(x, [word.index(i) for i in there])
        return x.reshape([SIZES[i] if i in word else 1 for i in every])

    product = functools.reduce(np.multiply, map(spread, words, whole)).astype(dtype)
    stored = whole[0] != 0
    if format == CVS(4):  # vectors with stored zeros too
        starts = np.arange(0, len(stored), 4)
        stored = np.repeat(np.logical_or.reduceat(stored, starts), 4, 0)[: len(stored)]
    there = np.broadcast_to(spread(words[0], stored), product.shape)
    axes = tuple(n for n, i in enumerate(every) if i not in output)
    if reduction == "sum":
        found = np.where(there, product, 0).sum(axes, dtype=dtype)
    else:
        limits = np.iinfo(dtype)
        end = limits.min if reduction == "max" else limits.max
        masked = np.where(there, product, np.array(end, dtype))
        found = getattr(np, reduction)(masked, axes, initial=end)
    found = np.transpose(found, [[i for i in every if i in output].index(i) for i in output])
    return found[stored] if output == words[0] else found


@pytest.mark.parametrize("dtype", INTEGERS)
def test_machine_code(dtype):
    pytest.importorskip("llvmlite")
    problems = [problem(subscripts, format, dtype) for subscripts, format, _, _ in OF[dtype]]

    def every(given):
        of = zip(OF[dtype], given, strict=True)
        for (subscripts, _, reduction, schedule), (A, dense) in of:
            yield einsum(subscripts, A, *dense, reduction=reduction, schedule=schedule)

    found = jax.jit(lambda given: list(every(given)))([(A, dense) for A, dense, _ in problems])
    for case, (_, _, whole), out in zip(OF[dtype], problems, found, strict=True):
        out = out.values if isinstance(out, SparseArray) else out
        assert out.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(out, meaning(*case[:2], whole, case[2]))


def lowered(subscripts, format, reduction, schedule, dtype, name):
    """A function and its inputs."""
    A, dense, whole = problem(subscripts, format, dtype)
    e = assign(subscripts, {"A": format}, reduction=reduction.replace("sum", "+"))
    lengths = [arrays[-1].shape[0] for arrays in A.index_arrays if arrays]
    room = capacities(format, A.shape, lengths)
    function = lower(cpu(e) if schedule is None else schedule, SIZES, room, dtype, name)
    given = [np.asarray(x).reshape(-1) for x in jax.tree.leaves((A.index_arrays, A.values, dense))]
    inputs = {array.name: x for array, x in zip(function.inputs, given, strict=True)}
    return function, inputs, meaning(subscripts, format, whole, reduction).reshape(-1)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_plain_jax_wraps_what_it_compares(dtype):
    """XLA may let products of 8 bits saturate."""
    A, (x, y), whole = problem("ij,ik,jk->ij", CSR, dtype)
    run = lambda v, reduction, schedule=None: einsum(
        "ij,ik,jk->ij", A.with_values(v), x, y, reduction=reduction, schedule=schedule
    )
    each = lambda v, *rest: jax.vmap(lambda v: run(v, *rest).values)(jnp.stack([v, v]))[1]

    @functools.partial(jax.jit, static_argnums=1)
    def every(v, reduction):
        plain = run(v, reduction, Reference()).values
        return each(v, reduction), each(v, reduction, Reference()), plain

    for reduction in ("max", "min"):
        want = meaning("ij,ik,jk->ij", CSR, whole, reduction)
        for found in every(A.values, reduction):
            np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_interpreter_and_the_text_agree(dtype, tmp_path):
    cases = [case for case in OF[dtype] if not case[0].endswith("->ij")]
    made = [lowered(*case, dtype, f"loops{n}") for n, case in enumerate(cases)]
    flags = ("-O1", "-Wall", "-Werror", "-fwrapv")
    in_c = compiled(tmp_path, [function for function, _, _ in made], flags=flags)
    for function, given, want in made:
        assert function.accumulator == function.outputs[0].dtype == dtype
        for found in (interp.run(function, given), in_c(function, given)):
            np.testing.assert_array_equal(*found.values(), want)


def test_a_comparison_with_a_sign_is_caught(monkeypatch):
    pytest.importorskip("llvmlite")
    A, dense, whole = problem("ij,jk->ik", CSR, "uint8")
    printed = llvm.print_llvm

    def changed(function, width):
        module = printed(function, width)
        assert "icmp ugt <" in module.text
        text = module.text.replace("icmp ugt <", "icmp sgt <")
        return dataclasses.replace(module, text=text)

    monkeypatch.setattr(llvm, "print_llvm", changed)
    llvm._keys.clear()
    found = jax.jit(lambda A, x: einsum("ij,jk->ik", A, x, reduction="max"))(A, *dense)
    llvm._keys.clear()
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(found, meaning("ij,jk->ik", CSR, whole, "max"))


def test_other_integers_run_in_plain_jax_and_a_schedule_for_them_is_refused(monkeypatch):
    A, (x,), whole = problem("ij,j->i", CSR, "int16")
    monkeypatch.setattr(llvm, "call_attributes", None)  # no machine code
    found = jax.jit(lambda A, x: einsum("ij,j->i", A, x))(A, x)
    np.testing.assert_array_equal(found, meaning("ij,j->i", CSR, whole, "sum"))
    with pytest.raises(NotImplementedError, match="float16, int8, uint8, int32, int64, got int16"):
        einsum("ij,j->i", A, x, schedule=cpu_entries(SPMV))


ROWS = ("{<1 row, 2 col>, 1}", "{<1/4 row, 1 col>, 4}")  # points that store each element once
ENTRIES = ("{<2 nnz, 1 col>, 1}", "{<1 nnz, 2 col>, 8}")  # atomics, by threads or segments


def on_a_gpu(dtype, reduction, point, change=lambda source: source):
    """The kernel of a point for SpMM, its result and the expected one."""
    require_nvrtc()
    e = assign("ij,jk->ik", {"A": CSR}, reduction=reduction.replace("sum", "+"))
    schedule = spmm_point(e, AtomicParallelism.parse(point), SIZES["k"])
    function, inputs, want = lowered("ij,jk->ik", CSR, reduction, schedule, dtype, "kernel")
    call, (out,) = launch_plan(function), function.outputs
    call = dataclasses.replace(call, source=change(call.source))
    result = [(padded_sizes(function), np.dtype(out.dtype))]
    (found,) = emulate(call, [*inputs.values(), *starts(function)], result)
    return call, found[: out.size], want


@pytest.mark.parametrize("dtype", INTEGERS)
def test_on_a_gpu(dtype):
    """Exact results, without spills."""
    for n, point in enumerate((*ROWS, *ENTRIES)):
        for reduction in ("sum", ("max", "min")[n % 2]):
            call, found, want = on_a_gpu(dtype, reduction, point)
            np.testing.assert_array_equal(found, want)
            arch = ("sm_80", "sm_90", "sm_100")[(n + INTEGERS.index(dtype)) % 3]
            assert resources(call.source, arch)[1:] == (0, 0), call.source


@pytest.mark.parametrize(
    "right, wrong, reduction, dtype",
    [
        ("Size(x) * Size(y)", "Size(x) * Size(y) / 2 * 2", "sum", "int32"),
        ("x > A(y) ? x : A(y)", "x < A(y) ? x : A(y)", "max", "int32"),
        ("Bits(Combine()(before, value))", "Bits(value)", "sum", "int32"),
        ("A(before >> shift)", "A(before)", "sum", "uint8"),
        ("(before & ~(255u << shift)) | byte", "byte", "sum", "int8"),
        ("A(before >> shift)", "before >> shift & 255", "max", "int8"),
        (
            "const unsigned byte = (unsigned char)(",
            "const unsigned byte = unsigned(",
            "sum",
            "int8",
        ),
    ],
)
def test_planted_bugs_of_kernels_are_caught(right, wrong, reduction, dtype):
    text = header_texts(header_folder())["loops_integers.cuh"]
    assert right in text
    changed = text.replace("#pragma once", "").replace(right, wrong)
    change = lambda source: source.replace('#include "loops_integers.cuh"', changed)
    _, found, want = on_a_gpu(dtype, reduction, ENTRIES[0], change)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtype", ["int32", "int8"])
def test_launches_start_from_the_ends_of_a_dtype(dtype):
    """8-bit outputs are allocated in whole words, more than the result has."""
    require_nvrtc()
    A, (x,), whole = problem("ij,jk->ik", CSR, dtype)
    e = assign("ij,jk->ik", {"A": CSR}, reduction="max")
    schedule = spmm_point(e, AtomicParallelism.parse(ENTRIES[0]), SIZES["k"])
    emulated = Emulated(emulate, schedule)
    run = jax.jit(lambda A, x: einsum("ij,jk->ik", A, x, reduction="max", schedule=emulated))
    want = meaning("ij,jk->ik", CSR, whole, "max")
    np.testing.assert_array_equal(run(A, x), want)
    assert (want[3] == np.iinfo(dtype).min).all() and want.size % 4
