"""Sums over vector lanes, one for each entry: the sums of several entries are reduced at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_loops import add, at, call, function, lanes, times
from compiled_operands import own_cache  # noqa: F401
from loop_interpreter import interp
from tolerance import assert_within, sum_bound

from sgap_jax import BCSR, COO, CSF, CSR, SparseArray, einsum
from sgap_jax.compiler import Schedule, assign
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.llvm import unroll_and_jam
from sgap_jax.compiler.llvm.builder import Builder
from sgap_jax.compiler.llvm.print_llvm import print_llvm
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_VECTOR,
    Float,
    For,
    Int,
    Let,
    Load,
    Search,
    Set,
    Store,
    Var,
)
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.presets import cpu

pytest.importorskip("llvmlite")

LENGTHS = (0, 1, 4, 2, 0, 3, 5, 9, 0, 0, 8, 7, 1, 12, 6, 0, 4, 11, 0, 3)  # of the rows of two tasks
SAMPLED = "ij,ik,jk->ij"
PADDING = 3


def sampled(format=CSR, reduction="+", subscripts=SAMPLED):
    output = "ABCDEFG"[subscripts.count(",") + 1]
    return cpu(assign(subscripts, {"A": format, output: format}, reduction=reduction))


def operands(d, dtype, seed=0):
    """Rows of these lengths with padding, dense rows, and all operands as float64 or int64."""
    rng = np.random.default_rng(seed)
    m, k = len(LENGTHS), 13
    crd = np.concatenate([np.sort(rng.permutation(k)[:n]) for n in LENGTHS])
    rows, nnz = np.repeat(np.arange(m), LENGTHS), crd.size
    pos = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
    integers = jnp.issubdtype(dtype, jnp.integer)
    draw = (lambda *n: rng.integers(0, 99, n)) if integers else (lambda *n: rng.standard_normal(n))
    given = [jnp.asarray(draw(*shape)).astype(dtype) for shape in ((nnz,), (m, d), (k, d), (k,))]
    values = jnp.concatenate([given[0], jnp.ones(PADDING, dtype)])
    # Coordinates of the padding must not be followed: a group that did would read far away.
    crd = jnp.asarray(np.concatenate([crd, [1 << 30] * PADDING]), jnp.int32)
    A = SparseArray.from_arrays(values, pos, crd, shape=(m, k))
    exact = np.int64 if integers else np.float64
    return (A, *given[1:]), (rows, crd[:nnz]), [np.asarray(x).astype(exact) for x in given]


def check(d, dtype, subscripts="ij,ik,jk,j->ij", reduction="sum", seed=0):
    """x(j) is gathered, and a factor that all terms of a sum share, as A is."""
    given, (rows, columns), (values, X, Y, x) = operands(d, dtype, seed)
    schedule = sampled(CSR, {"sum": "+"}.get(reduction, reduction), subscripts)
    options = {"schedule": schedule, "reduction": reduction}
    out = jax.jit(lambda *given: einsum(subscripts, *given, **options).values)(*given)
    terms = (values * x[columns])[:, None] * X[rows] * Y[columns]
    found, padding = np.asarray(out)[: rows.size], np.asarray(out)[rows.size :]
    if jnp.issubdtype(dtype, jnp.integer):
        np.testing.assert_array_equal(found, terms.sum(1).astype(dtype))
    elif reduction == "max":
        want = terms.max(1)
        assert_within(found, want, sum_bound(want, np.abs(want), 4, dtype))
    else:
        want = terms.sum(1)
        assert_within(found, want, sum_bound(want, np.abs(terms).sum(1), d + 3, dtype))
    assert not padding.any()


@pytest.mark.parametrize(
    "d, dtype",
    [
        (4, "float32"),
        (16, "float32"),
        (32, "float32"),
        (100, "float32"),
        (11, "float64"),
        (37, "bfloat16"),
        (130, "float16"),
        (16, "int8"),
        (33, "uint8"),
        (5, "int32"),
        (24, "int64"),
    ],
)
def test_rows_of_any_length(d, dtype):
    """Groups of four entries, remainders, empty rows; full vectors and parts of one."""
    check(d, dtype)


def test_maxima():
    check(21, "float32", reduction="max")


@pytest.mark.parametrize("vector_bytes", [16, 32])
@pytest.mark.parametrize("d, dtype", [(23, "float32"), (9, "float64"), (40, "bfloat16")])
def test_narrower_vectors(vector_bytes, d, dtype, monkeypatch):
    monkeypatch.setattr(llvm, "_vector_bytes", lambda: vector_bytes)
    check(d, dtype)


def lowered(schedule, d=32, shape=(20, 13), positions=(20, 99)):
    sizes = dict(zip("ij", shape, strict=True)) | {"k": d, "r": d}
    return lower(schedule, sizes, positions, "float32")


def grouped(schedule, *about, **options):
    return "group" in print_llvm(lowered(schedule, *about, **options)).text


def test_which_sums_are_added_up_together():
    assert grouped(sampled()) and grouped(sampled(reduction="max"))
    assert grouped(sampled(COO), positions=(99, 99)) and grouped(sampled(CSF(2)), positions=(9, 99))
    assert [grouped(sampled(), d) for d in (3, 4, 256, 257)] == [False, True, True, False]
    assert [grouped(sampled(), d, (20, 20_000)) for d in (64, 65)] == [True, False]  # far rows
    serial = Schedule(assign(SAMPLED, {"A": CSR, "D": CSR}))
    assert not grouped(serial)  # no lanes
    entries = serial.fuse("i", "j", "f").pos("f", "p", "A")
    assert not grouped(entries.parallelize("k", CPU_VECTOR, "ParallelReduction"))  # rows advance
    assert not grouped(sampled(BCSR(2, 2)), positions=(10, 9, 18, 36))  # an entry is in two loops
    assert not grouped(cpu(assign("ij,jk->ik", {"A": CSR})))  # no sums over lanes


def test_what_all_terms_share_is_multiplied_with_their_sum():
    """Not for a maximum: a negative factor would turn it into a minimum."""
    text = [print_llvm(lowered(sampled(CSR, reduction))).text for reduction in ("+", "max")]
    found = [len([s for s in t.splitlines() if "fmul contract <16 x float>" in s]) for t in text]
    # Two groups of four sums of two vectors each, where each term is a product of three factors.
    assert found == [2 * 4 * 2, 2 * 2 * 4 * 2]


def test_an_entry_is_the_same_in_any_place():
    """Bitwise equal: first or last in a group, in a group or not; a NaN in another entry does not
    spread."""
    (A, X, Y, _), (rows, columns), _ = operands(50, "float32")
    product = jax.jit(lambda *x: einsum(SAMPLED, *x, schedule=sampled()).values)
    A = A.with_values(jnp.ones_like(A.values))
    alike = np.asarray(product(A, X, jnp.broadcast_to(Y[:1], Y.shape)))[: rows.size]
    np.testing.assert_array_equal(alike, alike[np.searchsorted(rows, rows)])
    assert len(np.unique(alike)) == len(set(rows))
    clean, spoiled = (np.asarray(product(A, X, y))[: rows.size] for y in (Y, Y.at[3].set(jnp.nan)))
    np.testing.assert_array_equal(np.isnan(spoiled), columns == 3)
    np.testing.assert_array_equal(spoiled[columns != 3], clean[columns != 3])


def test_as_the_interpreter():
    """Like the interpreter's; small integers, so that sums are exact in any order."""
    (A, X, Y, _), (rows, columns), _ = operands(20, "int32")
    arrays = [*jax.tree.leaves(A.index_arrays), A.values, X, Y]
    f = lower(sampled(), {"i": 20, "j": 13, "k": 20}, (20, A.nnz), "int32")
    given = {a.name: np.asarray(x).reshape(-1) for a, x in zip(f.inputs, arrays, strict=True)}
    found = jax.jit(lambda *x: einsum(SAMPLED, *x, schedule=sampled()).values)(A, X, Y)
    np.testing.assert_array_equal(found, interp.run(f, given)["D"])


# (the loop over sums, bytes of a vector): sums that are not reduced in groups of four.
OTHERS = {
    "lanes from another": (For("p", Int(1), Int(5), (), unit=CPU_VECTOR), 64),
    "lanes in steps": (For("p", Int(0), Int(4), (), 2, CPU_VECTOR), 64),
    "three lanes": (For("p", Int(0), Int(3), (), unit=CPU_VECTOR), 64),
    "more lanes than a vector has": (For("p", Int(0), Int(8), (), unit=CPU_VECTOR), 16),
    "steps": (For("p", Int(0), Int(7), (), 2), 64),
    "copies": (For("p", Int(0), Int(7), (), unit="unroll"), 64),
    "in lanes": (For("p", Int(0), Int(6), ()), 64),
    "searched": (For("p", Int(0), Int(7), ()), 64),
    "far apart": (For("p", Int(0), Int(7), ()), 64),
}


@pytest.mark.parametrize("name", OTHERS)
def test_sums_of_other_loops_are_right(name, monkeypatch):
    """out[p] = <X[p], y>, or with the row found by a search, or at every second place; in lanes
    rows are shifted by the lane."""
    loop, width = OTHERS[name]
    monkeypatch.setattr(llvm, "_vector_bytes", lambda: width)
    d, row, place, lane = Int(24), Var("p"), Var("p"), Var("r")
    lets = ()
    if name == "searched":
        lets, row = (Let("i", Search("offsets", Int(0), Int(6), Var("p"))),), Var("i")
    elif name == "far apart":
        place = times(Int(2), Var("p"))
    elif name == "in lanes":
        row, place = add(lane, Var("p")), add(times(lane, Int(6)), Var("p"))
    term = times(at("X", times(row, d), Var("k")), Load("y", Var("k")))
    terms = lanes(d, Set("sum", add(Var("sum"), term)), var="k")
    body = (*lets, Let("sum", Float(0.0), mutable=True), terms, Store("out", place, Var("sum")))
    loop = dataclasses.replace(loop, body=body)
    nest = lanes(4, loop, var="r") if name == "in lanes" else loop
    inputs = [("offsets", "int32", 7), ("X", 9 * 24), ("y", 24)]
    f = function("sums", inputs, [("out", 24, 0.0)], [nest], "float32")
    draw = np.random.default_rng(0).integers(-3, 4, 9 * 24 + 24).astype(np.float32)
    offsets = np.array([0, 1, 3, 3, 4, 6, 9], np.int32)
    given = {"offsets": offsets, "X": draw[24:], "y": draw[:24]}
    (found,) = call(f, *given.values())
    np.testing.assert_array_equal(found, interp.run(f, given)["out"])
    assert "group" not in print_llvm(f, width).text


def shared_by_none(loop, name):
    return right_factored(loop, name)[0], None


right_factored = unroll_and_jam.factored
BUGS = {
    "a lane of another": ("fold_each", lambda right: lambda self, op, x: right(self, op, x[::-1])),
    "a store too few": (
        "first_lanes",
        lambda right: lambda self, n: right(self, self.binary("-", n, self.value(Int(1)))),
    ),
}


@pytest.mark.parametrize("where", ["a factor", *BUGS])
def test_planted_bugs_are_caught(where, monkeypatch):
    if where == "a factor":
        monkeypatch.setattr(unroll_and_jam, "factored", shared_by_none)
    else:
        name, wrong = BUGS[where]
        right = getattr(Builder, name)
        monkeypatch.setattr(Builder, name, wrong(right))
    llvm._keys.clear()
    with pytest.raises(AssertionError, match="out of bound"):
        check(32, "float32", seed=7)  # so that stale memory has other operands' values
    llvm._keys.clear()
