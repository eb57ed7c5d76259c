"""The schedules that derivatives run by."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from jaxprs import equations

from sgap_jax import (
    CSF,
    CSR,
    Compressed,
    Dense,
    Format,
    Reference,
    ScheduleError,
    SparseArray,
    einsum,
)
from sgap_jax.compiler import Schedule, assign, gradient
from sgap_jax.schedules.emulated import Emulated

SPMM = assign("ij,jk->ik", {"A": CSR})
ROWS = Schedule(SPMM).split("i", "i0", "i1", 4).parallelize("i0", "CPUThread", "NoRaces")
IN_A = Schedule(gradient(SPMM, "A")).split("i", "i0", "i1", 8)
IN_A = IN_A.parallelize("i0", "CPUThread", "NoRaces")
IN_B = Schedule(gradient(SPMM, "B")).reorder("k", "i", "j").split("k", "k0", "k1", 2)
IN_B = IN_B.parallelize("k0", "CPUThread", "NoRaces")


@pytest.fixture(scope="module")
def given():
    random = np.random.default_rng(0)
    dense = random.integers(-3, 4, (13, 9)).astype(np.float32) * (random.random((13, 9)) < 0.5)
    x = random.integers(-3, 4, (9, 5)).astype(np.float32)
    return SparseArray.from_dense(dense), jnp.asarray(x), dense


def product(A, schedule):
    return lambda v, x: einsum("ij,jk->ik", A.with_values(v), x, schedule=schedule)


def schedules(function, *operands):
    """For each einsum in a function: its expression's output, and its schedule."""
    of = [e.params for e in equations(function, *operands) if e.primitive.name == "einsum"]
    return [(p["expression"].output, p["schedule"]) for p in of]


def test_gradients_of_expressions():
    assert str(gradient(SPMM, "B")) == "B(j,k) += A(i,j) * C(i,k)"
    in_a = gradient(SPMM, "A")
    assert str(in_a) == "A(i,j) += A_(i,j) * C(i,k) * B(j,k)" and in_a.factors[0].pattern
    assert (in_a.output.format, in_a.sparse.format) == (CSR, CSR)
    sampled = assign("ik,ij,jk->ik", {"A": CSR, "D": CSR})
    assert str(gradient(sampled, "B")) == "B(i,j) += D(i,k) * A(i,k) * C(j,k)"
    assert [x.along for x in gradient(sampled, "B").factors] == [True, False, False]
    assert not any(x.along or x.pattern for x in gradient(sampled, "A").factors)
    fibers = Format((Compressed, Compressed, Dense))
    ttm = assign("ijk,kr->ijr", {"A": CSF(3), "C": fibers})
    assert str(gradient(ttm, "B")) == "B(k,r) += C(i,j,r) * A(i,j,k)"
    again = gradient(gradient(SPMM, "B"), "C")
    assert str(again) == str(SPMM)
    with pytest.raises(ValueError, match="no operand 'C'; there are A, B"):
        gradient(SPMM, "C")
    with pytest.raises(NotImplementedError, match="several sums over the products that attain"):
        gradient(dataclasses.replace(SPMM, reduction="max"), "B")


def test_tangents_run_by_the_schedule_and_gradients_by_those_it_has_for_them(given):
    A, x, dense = given
    for family in ((), (IN_B,), (IN_A, IN_B)):
        f = product(A, ROWS.with_derivatives(*family))
        tangent = lambda v, x, f=f: jax.jvp(f, (v, x), (v, x))[1]
        chains = [s.statement for _, s in schedules(tangent, A.values, x)]
        assert chains == 3 * [ROWS.statement]  # the result, and a tangent of each operand
        loss = lambda v, x, f=f: jnp.sum(f(v, x) ** 2)
        of = dict(schedules(jax.grad(loss, (0, 1)), A.values, x))
        by_name = {chain.expression: chain.statement for chain in family}
        for output, expression in (("jk", IN_B.expression), ("*", IN_A.expression)):
            found = None if of[output] is None else of[output].statement
            assert found == by_name.get(expression)
    dv, dx = jax.jit(jax.grad(loss, (0, 1)))(A.values, x)
    cotangent = 2 * dense @ np.asarray(x)
    np.testing.assert_array_equal(dx, dense.T @ cotangent)
    want = cotangent @ np.asarray(x).T
    np.testing.assert_array_equal(A.with_values(dv).todense(), want * (dense != 0))


def test_the_gradient_of_a_gradient_is_of_the_expression_again(given):
    A, x, _ = given
    f = product(A, ROWS.with_derivatives(IN_A, IN_B))
    loss = lambda x: jnp.sum(f(A.values, x) ** 2)
    second = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))
    found = [s for output, s in schedules(second, x) if output == "ik"]
    assert len(found) > 1 and {s.statement for s in found} == {ROWS.statement}


def test_gradients_where_the_sparse_operand_is_not_the_first(given):
    A, x, dense = given
    e = assign("jk,ij->ik", {"B": CSR})
    assert str(gradient(e, "B")) == "B(i,j) += B_(i,j) * C(i,k) * A(j,k)"
    family = [Schedule(gradient(e, name)) for name in ("A", "B")]
    s = Schedule(e).with_derivatives(*family)
    f = lambda v, x: einsum("jk,ij->ik", x, A.with_values(v), schedule=s)
    loss = lambda v, x: jnp.sum(f(v, x) ** 2)
    of = dict(schedules(jax.grad(loss, (0, 1)), A.values, x))
    assert [of[output].statement for output in ("jk", "*")] == [s.statement for s in family]
    dv, dx = jax.jit(jax.grad(loss, (0, 1)))(A.values, x)
    cotangent = 2 * dense @ np.asarray(x)
    np.testing.assert_array_equal(dx, dense.T @ cotangent)
    np.testing.assert_array_equal(dv, (cotangent @ np.asarray(x).T)[np.nonzero(dense)])


def test_an_operand_whose_gradient_is_no_expression_does_not_hinder_others():
    e = assign("ij,jk,l->ik", {"A": CSR})
    with pytest.raises(ValueError, match="no factor has the index l of the output"):
        gradient(e, "C")
    in_b = Schedule(gradient(e, "B"))
    assert Schedule(e).with_derivatives(in_b).derivatives == (in_b,)
    alone = assign("i->")
    with pytest.raises(ScheduleError, match="these are: none"):
        Schedule(alone).with_derivatives(Schedule(alone))


ENTRIES = Schedule(SPMM).reorder("i", "j", "k").fuse("i", "j", "f").pos("f", "p", "A")
ENTRIES = ENTRIES.split("p", "p0", "p1", 8).parallelize("p0", "CPUThread", "Atomics")


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_runs_each_element_by_the_schedule_and_by_those_of_its_gradients(given, axes):
    """Operands that batch elements share have gradients that are sums over the batch, up to order
    2."""
    A, x, dense = given
    given = [
        y if axis is None else jnp.stack([y, 2 * y, -y])
        for y, axis in zip((A.values, x), axes, strict=True)
    ]
    both = lambda s: jax.vmap(product(A, s), axes)
    loss = lambda s: lambda v, x: jnp.sum(both(s)(v, x) ** 3)
    slope = lambda s: lambda v, x: sum(map(jnp.sum, jax.grad(loss(s), (0, 1))(v, x)))
    second = lambda s: lambda *given: (both(s)(*given), *jax.grad(slope(s), (0, 1))(*given))
    chain = ENTRIES.with_derivatives(IN_A, IN_B)
    found = {s.statement for _, s in schedules(second(chain), *given) if s is not None}
    assert found == {ENTRIES.statement, IN_A.statement, IN_B.statement}
    for ours, theirs in zip(
        *(jax.jit(second(s))(*given) for s in (chain, Reference())), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_gradient_without_a_chain_runs_as_one_expression_under_vmap(given):
    A, x, _ = given
    f = lambda v, x: jnp.sum(jax.vmap(product(A, ROWS), (None, 0))(v, x) ** 2)
    many = jnp.stack([x, 2 * x])
    every = [e.params for e in equations(jax.grad(f, (0, 1)), A.values, many)]
    every = [p for p in every if "expression" in p]
    assert {p["schedule"] is None: p["expression"].batch for p in every} == {False: "a", True: ""}


def test_a_gpu_launches_the_gradients_that_have_a_schedule(given):
    require_nvrtc()
    A, x, dense = given
    blocks = lambda s, i: s.split(i, "b", "t", 8).parallelize("b", "GPUBlock", "NoRaces")
    threads = lambda s, i: blocks(s, i).parallelize("t", "GPUThread", "NoRaces")
    in_b = threads(Schedule(IN_B.expression).reorder("k", "i", "j"), "k")
    launched = []
    run = lambda call, *rest: launched.append(call.kernel) or emulate(call, *rest)
    schedule = threads(Schedule(SPMM), "i").with_derivatives(in_b)
    f = product(A, Emulated(run, schedule))
    loss = lambda v, x: jnp.sum(f(v, x) ** 2)
    dv, dx = jax.jit(jax.grad(loss, (0, 1)))(A.values, x)
    cotangent = 2 * dense @ np.asarray(x)
    np.testing.assert_array_equal(dx, dense.T @ cotangent)
    want = (cotangent @ np.asarray(x).T)[np.nonzero(dense)]
    np.testing.assert_array_equal(dv, want)
    assert len(launched) == 3  # the gradient in A has the schedule of a call without one

    each = lambda v, x: jnp.sum(jax.vmap(f)(v, x) ** 2)
    slopes = jax.jit(jax.grad(each, (0, 1)))(jnp.stack([A.values, A.values]), jnp.stack([x, 2 * x]))
    for n, (slope, want) in enumerate([(slopes[0], dv), (slopes[1], dx)]):
        np.testing.assert_array_equal(slope, jnp.stack([want, [4, 2][n] * want]))
    assert len(launched) == 6  # one launch for all elements


def test_chains_that_are_of_no_gradient_are_refused():
    for other in (ROWS, Schedule(assign("ij,kj->ik", {"A": CSR}))):
        with pytest.raises(ScheduleError, match=r"is no gradient of C.*these are: A\(i,j\) \+="):
            ROWS.with_derivatives(other)
    with pytest.raises(ScheduleError, match="with_derivatives: expected schedules, got 'fast'"):
        ROWS.with_derivatives("fast")
    s = ROWS.with_derivatives(IN_A).with_derivatives(IN_B).unroll("i1")
    other = IN_B.unroll("k1")
    for twice in (lambda: ROWS.with_derivatives(IN_B, other), lambda: s.with_derivatives(other)):
        with pytest.raises(ScheduleError, match=r"with_derivatives: two chains for B\(j,k\) \+="):
            twice()
    with pytest.raises(TypeError, match="gradient: expected an Assign.*, got 'ij'"):
        gradient("ij", "A")
    assert s.derivatives == (IN_A, IN_B) and hash(s) == hash(dataclasses.replace(s))
    assert str(s).count("\nderivative: ") == 2
