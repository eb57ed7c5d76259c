"""Sums over the products that attain an extremum, as in the gradients of maxima: every such sum of
a gradient, on every backend of the compiler, against its meaning in plain JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_operands import own_cache  # noqa: F401
from compiled_text import compiled
from cuda_sources import require_nvrtc, resources
from emulated_launch import emulate, starts
from jaxprs import equations
from loop_interpreter import interp

from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, Reference, SparseArray, einsum
from sgap_jax.compiler import Schedule, assign
from sgap_jax.compiler.cuda.print_cuda import launch_plan
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.loop_ir.loopir import GPU_BLOCK, GPU_THREAD
from sgap_jax.compiler.notation.cin import NO_RACES
from sgap_jax.compiler.notation.expr import Access, Assign, Attained, index_vars
from sgap_jax.compiler.presets import cpu
from sgap_jax.primitives import einsum_loops
from sgap_jax.primitives.einsum_plain import plain
from sgap_jax.schedules.schedule import ScheduleError

SIZES = {"i": 7, "j": 5, "k": 4, "l": 3, "r": 19}
CASES = [
    ("ij,jr->ir", CSR, "max"),
    ("ij,j->i", COO, "max"),
    ("ij,jr->", CVS(4), "max"),  # the last vector ends past the matrix
    ("ij,ir->jr", BCSR(3, 2), "min"),
    ("ij,ik,jk->ij", CSR, "max"),
    ("ij,kl->ki", CSC, "min"),  # an index that only one factor has
    ("ijk,jr,kr->ir", CSF(3), "max"),
    ("ijk,kr->ijr", CSF(3), "fibers"),
]


def operands(subscripts, format, dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    words = subscripts.partition("->")[0].split(",")
    draw = lambda word: random.integers(1, 4, [SIZES[i] for i in word]).astype(np.float32)
    dense = draw(words[0]) * (random.random([SIZES[i] for i in words[0]]) < 0.5)
    dense[2] = 0
    A = SparseArray.from_dense(dense, format=format)
    return A.astype(dtype), [jnp.asarray(draw(word), dtype) for word in words[1:]]


def loss(subscripts, format, reduction, schedule=None):
    options = {"reduction": reduction, "schedule": schedule}
    if reduction == "fibers":
        options |= {"reduction": "max", "fibers": True}

    def f(values, A, *dense):
        out = einsum(subscripts, A.with_values(values), *dense, **options)
        out = getattr(out, "values", out)
        return jnp.sum(jnp.where(jnp.isfinite(out), out**2, 0))

    return f


def sums(subscripts, format, reduction):
    """The sums over attaining products that make up a gradient, their index arrays, and the mask of
    stored entries."""
    A, dense = operands(subscripts, format)
    gradient = jax.grad(loss(subscripts, format, reduction), (0, *range(2, 2 + len(dense))))
    found = dict.fromkeys(
        equation.params["expression"]
        for equation in equations(gradient, A.values, A, *dense)
        if equation.primitive.name == "einsum"
    )
    stored = np.asarray(A.coordinates()[0]).reshape(-1) < A.shape[0]
    return [e for e in found if e.attained], jax.tree.leaves(A.index_arrays), stored


def data(expression, stored, seed=1):
    """Small integers, many of which attain; NaN in the extremum and past the stored entries."""
    random, given = np.random.default_rng(seed), []
    for place, word in enumerate(expression.words):
        x = random.integers(1, 4, expression.shape(word)).astype(np.float32)
        if place + 1 == len(expression.words):
            x = x * random.integers(1, 4, x.shape)
            x.reshape(-1)[-1:] = np.nan
        given.append(np.where(stored, x, np.nan) if word == "*" else x)
    return [jnp.asarray(x, jnp.float32) for x in given]


def lowered(expression, indices, chain=cpu, name="kernel"):
    schedule = chain(expression.assign)
    shapes = [x.shape for x in indices]
    function = einsum_loops.function_of(expression, schedule, shapes, "float32")
    return dataclasses.replace(function, name=name), schedule


def inputs(function, expression, schedule, given, indices):
    every = einsum_loops.inputs_of(expression, schedule.expression, [*given, *indices])
    flat = [np.asarray(x).reshape(-1) for x in every]
    return {array.name: x for array, x in zip(function.inputs, flat, strict=True)}


def meaning(expressions, given, indices):
    """The results of each expression by plain JAX and by machine code."""

    def each(given, indices):
        for e, x in zip(expressions, given, strict=True):
            schedule = cpu(e.assign)
            yield plain(*x, *indices, expression=e, schedule=None)
            yield einsum_loops.cpu_loops(*x, *indices, expression=e, schedule=schedule)

    found = iter(jax.jit(lambda *x: list(each(*x)))(given, indices))
    return [(np.asarray(want), np.asarray(next(found))) for want in found]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_that_runs_loops_agrees(case, tmp_path):
    """The interpreter (which finds races and faults), machine code and C agree."""
    pytest.importorskip("llvmlite")
    expressions, indices, stored = sums(*case)
    assert len(expressions) >= 2 + case[0].count(",")
    given = [data(e, stored) for e in expressions]
    made = [lowered(e, indices, name=f"loops{n}") for n, e in enumerate(expressions)]
    in_c = compiled(tmp_path, [function for function, _ in made])
    means = meaning(expressions, given, indices)
    for e, x, (function, schedule), (want, ours) in zip(
        expressions, given, made, means, strict=True
    ):
        arrays = inputs(function, e, schedule, x, indices)
        (read,), (text,) = interp.run(function, arrays).values(), in_c(function, arrays).values()
        if e.output == "*":
            want, ours, read, text = (x[stored] for x in (want, ours, read, text))
        assert np.any(want)
        for out in (ours, read, text):
            np.testing.assert_array_equal(out.reshape(want.shape), want)


def test_halves_are_compared_in_float32():
    """3 * 0.3332 rounds to 1 in bfloat16 and is less."""
    A = SparseArray.from_dense(np.array([[3.0, 1]]), format=CSF(2)).astype(jnp.bfloat16)
    x = jnp.array([0.33203125, 1], jnp.bfloat16)
    f = lambda x: einsum("ij,j->i", A, x, reduction="max")[0]
    np.testing.assert_array_equal(jax.jit(jax.grad(f))(x), [0, 1])


@pytest.mark.parametrize("wrong", ["ole", "ult"])
def test_a_comparison_that_is_wrong_is_caught(wrong, monkeypatch):
    pytest.importorskip("llvmlite")
    expressions, indices, stored = sums(*CASES[0])
    given, right = [data(e, stored) for e in expressions[:1]], llvm.print_llvm

    def changed(function, width):
        printed = right(function, width)
        assert "fcmp olt" in printed.text
        return dataclasses.replace(printed, text=printed.text.replace("fcmp olt", f"fcmp {wrong}"))

    monkeypatch.setattr(llvm, "print_llvm", changed)
    llvm._keys.clear()
    ((want, found),) = meaning(expressions[:1], given, indices)
    llvm._keys.clear()
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(found, want)


def columns(e):
    """A GPU schedule: a thread for each column, or for each row if columns are summed over."""
    (k,) = [index for index in e.indices if index not in e.sparse.indices]
    s, over = Schedule(e).reorder(k, *e.sparse.indices), k
    if k not in e.output.indices:
        s, over = Schedule(e).reorder(*e.sparse.indices, k), e.sparse.indices[0]
    s = s.split(over, "block", "thread", 8).parallelize("block", GPU_BLOCK, NO_RACES)
    return s.parallelize("thread", GPU_THREAD, NO_RACES)


def test_on_a_gpu():
    """The CUDA text gives the same results, without spills."""
    require_nvrtc()
    expressions, indices, stored = sums(*CASES[0])
    for expression, arch in zip(expressions, ("sm_80", "sm_90", "sm_100"), strict=True):
        function, schedule = lowered(expression, indices, columns)
        given = data(expression, stored)
        arrays = inputs(function, expression, schedule, given, indices)
        ((out,), call) = function.outputs, launch_plan(function)
        result = [((out.size,), np.dtype(out.dtype))]
        (found,) = emulate(call, [*arrays.values(), *starts(function)], result)
        np.testing.assert_array_equal(found, interp.run(function, arrays)[out.name])
        assert resources(call.source, arch)[1:] == (0, 0), call.source


def test_gradients_hold_no_product_of_each_entry():
    """n values for each entry would be more than all else; plain JAX holds them."""
    pytest.importorskip("llvmlite")
    random = np.random.default_rng(0)
    dense = random.standard_normal((64, 64)) * (random.random((64, 64)) < 0.5)
    A = SparseArray.from_dense(dense.astype(np.float32))
    x = jnp.asarray(random.standard_normal((64, 128)), jnp.float32)

    def gradient(schedule):
        f = loss("ij,jk->ik", CSR, "max", schedule)
        return jax.grad(lambda v, x: f(v, A, x), (0, 1))

    def held(function):
        compiled = jax.jit(function).lower(A.values, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    second = jax.grad(lambda *x: sum(jnp.sum(g**2) for g in gradient(None)(*x)), (0, 1))
    products = A.nnz * 128 * 4
    assert held(gradient(Reference())) > products
    assert 3 * held(gradient(None)) < products
    assert 2 * held(second) < products


def test_the_notation():
    e = assign("ij,jk->ik", {"A": CSR})
    A, B = e.factors
    best = Access("Y", e.output.indices)
    copy = dataclasses.replace(A, tensor="V")
    attained = Attained((dataclasses.replace(copy, along=True), B), best, "max")
    with pytest.raises(NotImplementedError, match="W and A are both sparse"):
        Assign(e.output, (dataclasses.replace(A, tensor="W"), A, attained))
    count = Assign(e.output, (dataclasses.replace(A, pattern=True), attained))
    assert str(count) == "C(i,k) += A(i,j) * [V(i,j) * B(j,k) >= Y(i,k)]"
    assert "[V(i,j) * B(j,k) <= Y(i,k)]" in str(dataclasses.replace(attained, reduction="min"))
    loops = Schedule(count).loops()
    assert "V[j_pos] * B[j * 1000 + k] < Y[i * 1000 + k] ? 0.0f : 1.0f" in loops
    elsewhere = dataclasses.replace(copy, indices=index_vars("j i"), along=True)
    with pytest.raises(NotImplementedError, match="the sparse factor V.* structure of its own"):
        Assign(e.output, (A, B, elsewhere))
    product = Assign(e.output, (A, Access("X", B.indices), attained))
    with pytest.raises(ScheduleError, match="attains an extremum; precompute all of it"):
        Schedule(product).precompute("A", (), (), "w")
