"""Compiled loops behind `einsum`: under jit, differentiated, mapped, on the CPU and emulated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from compiler_chains import rows
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from jax.test_util import check_grads
from tolerance import DTYPES

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    Compressed,
    Dense,
    Format,
    Reference,
    ScheduleError,
    SparseArray,
    einsum,
    spmm,
)
from sgap_jax.compiler import Schedule, assign
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.primitives import einsum_loops
from sgap_jax.primitives.einsum_expression import Expression
from sgap_jax.schedules.emulated import Emulated

SIZES = {"i": 16, "j": 10, "k": 7, "l": 5, "m": 3, "n": 2}
CHAINS = {name: s for name, s in rows().items() if "bind" not in str(s)}
EXTENTS = {"12": {"k": 128}, "14": {"j": 128}} | {n: {"k": 4} for n in ("S1", "S2", "S3", "S4")}


def problem(expression, sizes=SIZES, density=0.3, dtype="float32", seed=0):
    """Subscripts, operands and the exact result, all small integers."""
    rng = np.random.default_rng(seed)
    words, given, whole = [], [], []
    for access in expression.factors:
        x = rng.integers(-3, 4, [sizes[index.name] for index in access.indices]).astype(float)
        if access.format is not None:
            x *= rng.random(x.shape) < density
            x[1:2] = 0
            given.append(SparseArray.from_dense(x.astype(jnp.dtype(dtype)), format=access.format))
        else:
            given.append(jnp.asarray(x, jnp.dtype(dtype)))
        whole.append(x)
        words.append("".join(index.name for index in access.indices))
    output = "".join(index.name for index in expression.output.indices)
    subscripts = f"{','.join(words)}->{output}"
    return subscripts, given, np.einsum(subscripts, *whole)


def dense_of(x):
    return np.asarray(x.todense() if isinstance(x, SparseArray) else x, np.float64)


CPU_CHAINS = [name for name, s in CHAINS.items() if "GPU" not in str(s)]


@pytest.mark.parametrize("name", CPU_CHAINS)
def test_the_papers_schedules_run_on_the_cpu(name):
    schedule = CHAINS[name]
    dtype = DTYPES[CPU_CHAINS.index(name) % 4]
    subscripts, given, want = problem(schedule.expression, dtype=dtype)
    if subscripts == "ik,ij,jk->ik" and schedule.expression.output.format is None:
        # einsum gives a sparse result for these indices; a dense one is another expression.
        with pytest.raises(ScheduleError, match="the schedule is for"):
            einsum(subscripts, *given, schedule=schedule)
        return
    out = jax.jit(lambda *x: einsum(subscripts, *x, schedule=schedule))(*given)
    assert out.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(dense_of(out), want)


@pytest.mark.parametrize("name", ["10", "12", "15 MTTKRP", "S1", "S2", "S3", "S4"])
def test_the_papers_schedules_run_in_the_emulator(name):
    require_nvrtc()
    schedule, sizes = CHAINS[name], SIZES | EXTENTS.get(name, {})
    subscripts, given, want = problem(schedule.expression, sizes)
    emulated = Emulated(emulate, schedule=schedule)
    out = jax.jit(lambda *x: einsum(subscripts, *x, schedule=emulated))(*given)
    np.testing.assert_array_equal(dense_of(out), want)


MATRICES = [CSR, CSC, COO, CSF(2), CSF(2).transposed, CVS(5), BCSR(3, 4)]
TENSORS = [COO, CSF(3), CSF(3, order=(2, 0, 1)), Format((Dense, Compressed, Compressed))]
UNSCHEDULED = [
    *[(sub, f) for sub in ("ij,j->i", "ij,jk->ki", "ij,ik,jk->ij") for f in MATRICES],
    *[(sub, f) for sub in ("ijk,k->ij", "ijk,kl->ijl", "ijk,jl,kl->il") for f in TENSORS],
    ("ijkl,jm,km,lm->im", CSF(4)),
    ("ij,ij->", CSR),
    ("ij,ij->ij", CSF(2)),
]


@pytest.mark.parametrize(("subscripts", "format"), UNSCHEDULED, ids=str)
def test_without_a_schedule_the_loops_are_compiled(subscripts, format, monkeypatch):
    compiled = []
    attributes = llvm.call_attributes
    monkeypatch.setattr(
        llvm, "call_attributes", lambda *x, **y: compiled.append(x) or attributes(*x, **y)
    )
    given = problem(assign(subscripts, {"A": format}))[1]
    monkeypatch.setattr(
        "sgap_jax.primitives.einsum._kernel", lambda *x: None
    )  # nor the target of spmm or sddmm
    out = jax.jit(lambda *x: einsum(subscripts, *x))(*given)
    plain = einsum(subscripts, *given, schedule=Reference())
    np.testing.assert_array_equal(dense_of(out), dense_of(plain))
    assert len(compiled) == 1


@pytest.mark.parametrize("slices, rows", [(0, 1), (5, 1), (104, 6), (5000, 16)])
@pytest.mark.parametrize("output, fiber", [("ir", ("", 0)), ("fr", ("f", 2))])
def test_few_slices_are_several_tasks_all_the_same(slices, rows, output, fiber):
    sizes = {"*": 900, "i": slices, "j": 7, "k": 8, "r": 16, "f": 90}
    factors = ("*", "jr", "kr") if output == "ir" else ("*", "kr")
    used = "*ijkrf" if output == "fr" else "*ijkr"
    expression = Expression(
        "ijk", factors, output, tuple((x, sizes[x]) for x in used), CSF(3), fiber=fiber
    )
    found = einsum_loops.default_schedule(expression, "float32")
    assert f", row, {rows if output == 'ir' else 16})" in str(found)


def test_what_vectors_hold_beyond_the_matrix_reaches_nothing():
    expression = assign("ij,jk->ik", {"A": CVS(5)})  # for 16 rows
    _, (A, B), want = problem(expression)
    A = A.with_values(A.values.at[A.row_offsets[-2] :, 1:].set(jnp.nan))
    run = lambda A, B: (
        einsum("ij,jk->ik", A, B, schedule=Schedule(expression)),
        einsum("ij,jk->k", A, B),
    )
    product, sums = jax.jit(run)(A, B)
    np.testing.assert_array_equal(product, want)
    np.testing.assert_array_equal(sums, want.sum(0))


BALANCED = (
    Schedule(assign("ij,jk->ik", {"A": CSR}))
    .reorder("i", "j", "k")
    .fuse("i", "j", "f")
    .pos("f", "p", "A")
    .split("p", "p0", "p1", 8)
    .parallelize("p0", "CPUThread", "Atomics")
    .parallelize("k", "CPUVector", "NoRaces")
)


@pytest.mark.parametrize("name", ["no_rows", "no_columns", "no_entries", "padded", "only_padding"])
def test_empty_and_padded_matrices(name):
    A = array(BATTERY[name], jnp.float64)
    B = np.random.default_rng(0).standard_normal((A.shape[1], 3))
    out = jax.jit(lambda A, B: einsum("ij,jk->ik", A, B, schedule=BALANCED))(A, B)
    np.testing.assert_allclose(out, BATTERY[name].dense() @ B, rtol=1e-12, atol=1e-12)
    none = jax.jit(lambda A, B: einsum("ij,jk->ik", A, B, schedule=BALANCED))(A, B[:, :0])
    assert none.shape == (A.shape[0], 0)


DIFFERENTIATED = [
    ("ij,j->i", CSR),
    ("ij,jk->ik", COO),
    ("ij,ik,jk->ij", CSR),
    ("ijk,k->ij", CSF(3)),
    ("ijk,kl->ijl", CSF(3)),
    ("ijk,jl,kl->il", CSF(3)),
    ("ijkl,jm,km,lm->im", CSF(4)),
    ("ij,jk->ik", CVS(2)),
]


@pytest.mark.parametrize(("subscripts", "format"), DIFFERENTIATED, ids=str)
def test_derivatives_to_second_order(subscripts, format, monkeypatch):
    monkeypatch.setattr("sgap_jax.primitives.einsum._kernel", lambda *x: None)
    sizes = {"i": 4, "j": 3, "k": 3, "l": 2, "m": 2}
    _, (A, *dense), _ = problem(assign(subscripts, {"A": format}), sizes, 0.5, "float64")

    def function(values, *dense):
        out = einsum(subscripts, A.with_values(values), *dense)
        return out.values if isinstance(out, SparseArray) else out

    check_grads(jax.jit(function), (A.values, *dense), order=2, modes=["fwd", "rev"])


def test_derivatives_and_maps_of_a_schedule():
    _, (A, B), want = problem(BALANCED.expression, dtype="float64")
    dense = np.zeros(A.shape)
    rows = np.repeat(np.arange(A.shape[0]), np.diff(A.row_offsets))
    dense[rows, A.column_indices] = A.values

    def product(values, B):
        return einsum("ij,jk->ik", A.with_values(values), B, schedule=BALANCED)

    gradient = jax.grad(lambda values, B: jnp.sum(product(values, B) ** 2), (0, 1))
    dvalues, dB = jax.jit(gradient)(A.values, B)
    cotangent = 2 * want  # small integers: every sum is exact
    expected = (cotangent @ np.asarray(B).T)[rows, A.column_indices]
    np.testing.assert_array_equal(dvalues, expected)
    np.testing.assert_array_equal(dB, dense.T @ cotangent)
    both = jax.vmap(product, (None, 0))(A.values, jnp.stack([B, 2 * B]))
    np.testing.assert_array_equal(both, np.stack([want, 2 * want]))
    both = jax.vmap(product, (0, None))(jnp.stack([A.values, 3 * A.values]), B)
    np.testing.assert_array_equal(both, np.stack([want, 3 * want]))
    tangent = jax.jvp(lambda B: product(A.values, B), (B,), (3 * B,))[1]
    np.testing.assert_array_equal(tangent, 3 * want)


def test_the_sparse_operand_may_stand_anywhere_and_indices_may_have_any_name():
    _, (A, B), want = problem(BALANCED.expression)
    other = Schedule(assign("qr,pq->pr", {"M": CSR}, names="X M Y"))
    for schedule in (BALANCED, other):
        np.testing.assert_array_equal(einsum("bc,ab->ac", B, A, schedule=schedule), want)


def test_products_of_halves_that_overflow_do_so_in_no_sum(monkeypatch):
    """The derivative multiplies the values by their cotangent before it adds: no sum may get the
    overflow."""
    monkeypatch.setattr("sgap_jax.primitives.einsum._kernel", lambda *x: None)
    A = SparseArray.from_dense(np.full((2, 2), 300, np.float16), format=CSF(2))
    x, small = jnp.ones((2, 3), jnp.float16), jnp.full((2, 3), 1e-3, jnp.float16)
    _, pull = jax.vjp(lambda x: einsum("ij,ik,jk->ij", A, x, small).values, x)
    np.testing.assert_allclose(pull(jnp.full(4, 300, jnp.float16))[0], 180, rtol=2e-3)


def test_more_operands_than_letters():
    A = SparseArray.from_dense(np.eye(3, dtype=np.float32))
    subscripts = ",".join(["ij", *["j"] * 30]) + "->i"
    ones = jnp.ones(3, jnp.float32)
    np.testing.assert_array_equal(einsum(subscripts, A, *[ones] * 30), ones)


def test_schedules_of_something_else_are_refused():
    _, (A, B), _ = problem(BALANCED.expression)
    for subscripts, operands in (
        ("ij,kj->ik", (A, B.T)),
        ("ij,jk->ki", (A, B)),
        ("ij,jk->ik", (A.asformat(COO), B)),
        ("ij,j->i", (A, B[:, 0])),
    ):
        with pytest.raises(ScheduleError, match=r"the schedule is for C\(i,k\).*CSR, got"):
            einsum(subscripts, *operands, schedule=BALANCED)
    with pytest.raises(NotImplementedError, match="schedules einsum"):
        jax.jit(lambda A, B: spmm(A, B, schedule=BALANCED))(A, B)
    for dtype in ("int16", "complex64"):
        with pytest.raises(NotImplementedError, match=f"compiled for float32, .* got {dtype}"):
            einsum("ij,jk->ik", A.astype(dtype), B.astype(dtype), schedule=BALANCED)
    with pytest.raises(ValueError, match="'c', 'cuda', 'llvm'"):
        BALANCED.source("fortran")


def test_without_llvm_plain_jax_runs_and_a_schedule_says_what_is_missing(monkeypatch):
    sizes = SIZES | {"k": 11}  # not compiled before
    _, (A, B), want = problem(BALANCED.expression, sizes)

    def missing():
        raise llvm.LlvmMissing("pip install 'sgap_jax[compiler]'")

    monkeypatch.setattr(llvm, "_host", missing)
    monkeypatch.setattr(llvm, "available", lambda: False)
    out = jax.jit(lambda A, X: einsum("ij,jk->ki", A.asformat(COO), X, schedule=None))(A, B)
    np.testing.assert_array_equal(out.T, want)
    with pytest.raises(llvm.LlvmMissing, match="compiler"):
        jax.jit(lambda A, B: einsum("ij,jk->ik", A, B, schedule=BALANCED))(A, B)


def test_text_of_a_schedule_fits_what_it_bounds():
    for name, schedule in CHAINS.items():
        assert "for (" in schedule.loops(), name
    s = CHAINS["S4"]
    assert "__global__" in s.source("cuda") and "define" in BALANCED.source("llvm")
    assert dataclasses.replace(s) == s and hash(dataclasses.replace(s)) == hash(s)
