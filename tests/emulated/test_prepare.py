"""Work lists that a structure keeps (`prepare`): programs that make none, with the same bits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import array, from_row_lengths
from cuda_sources import require_nvrtc
from emulated_launch import Counted, emulate
from emulator.blocks import Blocks

from sgap_jax import (
    COO,
    CSC,
    CSR,
    CVS,
    AttentionTile,
    OctetTile,
    Schedule,
    SparseArray,
    prepare,
    sddmm,
    sparse_attention,
    spmm,
)
from sgap_jax.formats.stored import PreparedTranspose
from sgap_jax.launch import launch
from sgap_jax.schedules.emulated import Emulated

CASE = from_row_lengths("heavy", 90, [1, 3, 90, 0, 2, 5])
POINT = Schedule.parse("{<1 row, 4 col>, 1} chunk=8")
OCTET = OctetTile(8, stages=2, chunk=4)
# Rows and columns that see all.
MASK = np.random.default_rng(0).random((24, 24)) < 0.05
MASK[3] = MASK[:, 5] = True
# What XLA makes a list with, and nothing else of these programs has.
MAKING = ("scatter", "reduce_window", "gather", "cumsum", "cummax")


def product(A, v, B, schedule):
    return jnp.sum(jnp.sin(spmm(A.with_values(v), B, schedule=schedule).astype(jnp.float32)))


def attended(A, q, k, schedule):
    out = sparse_attention(q, k, k, A, schedule=schedule)
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


def sampled(A, X, Y, schedule):
    return jnp.sum(jnp.sin(sddmm(A, X, Y).values)) + 0 * product(A, A.values, Y, schedule)


def drawn(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), dtype)


def programs():
    """{name: (loss of a structure, two arrays and a schedule, structure, arrays, schedule)}"""
    entries = array(CASE, "float32")
    long = from_row_lengths("octets", 64, [2] * 17 + [64] + [1] * 30)
    vectors = array(long, "bfloat16").asformat(CVS(8))
    mask = SparseArray.from_dense(MASK.astype(np.float32))
    features = drawn(24, 2, 16), drawn(24, 1, 16)
    half = [x.astype(jnp.bfloat16) for x in features]
    B = drawn(CASE.shape[1], 8)
    return {
        "spmm": (product, entries, (entries.values, B), POINT),
        "spmm CSC": (product, entries.asformat(CSC), (entries.asformat(CSC).values, B), POINT),
        "spmm vectors": (product, vectors, (vectors.values, drawn(64, 8, dtype="bfloat16")), OCTET),
        "attention": (attended, mask, features, AttentionTile(8, chunk=4)),
        "attention vectors": (
            attended,
            mask.asformat(CVS(8)),
            half,
            AttentionTile(8, octet=True, chunk=4),
        ),
    }


PROGRAMS = programs()


def gradients(loss, A, arrays, schedule):
    return jax.value_and_grad(partial(loss, schedule=schedule), (1, 2))(A, *arrays)


def prepared(name):
    loss, A, arrays, schedule = PROGRAMS[name]
    return prepare(A, lambda A, *x: gradients(loss, A, x, schedule), *arrays)


def lowered(function, *args):
    """The program for CUDA, and how many launches it has."""
    with launch.collected() as calls:
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text, len(calls)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_makes_no_list(name):
    """Forward and with gradients, under vmap and scan, with the launches that there were."""
    loss, A, arrays, schedule = PROGRAMS[name]
    P, grads = prepared(name), partial(gradients, loss, schedule=schedule)
    assert isinstance(P.transposed, PreparedTranspose) and P.is_checked
    before, launches = lowered(lambda A, *x: grads(A, x), A, *arrays)
    assert all(before.count(word) for word in MAKING)

    def in_turn(A, *x):
        return jax.lax.scan(lambda carry, x: (carry, grads(A, x)), 0, x)[1]

    many = [jnp.stack([x, x]) for x in arrays]
    for function, given in (
        (jax.vmap(lambda A, *x: grads(A, x), (None, 0, 0)), many),
        (in_turn, many),
    ):
        text, found = lowered(function, P, *given)
        assert found == launches
        assert not [word for word in MAKING if word in text]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_bits(name):
    require_nvrtc()
    loss, A, arrays, schedule = PROGRAMS[name]
    run = Counted()
    grads = jax.jit(partial(gradients, loss, schedule=Emulated(run, schedule)))
    found = grads(prepared(name), arrays)
    once = len(run.kernels)
    jax.tree.map(np.testing.assert_array_equal, found, grads(A, arrays))
    assert len(run.kernels) == 2 * once


def test_several_structures_and_shard_map():
    """Stacked structures have stacked lists; in shard_map all devices share one."""
    require_nvrtc()
    run = Counted()
    schedule, lengths = Emulated(run, POINT), np.diff(CASE.row_offsets)
    cases = [from_row_lengths("other", CASE.shape[1], np.roll(lengths, r)) for r in (0, 1)]
    B = drawn(2, CASE.shape[1], 4)
    asked = lambda A: spmm(A, B[0], schedule=POINT)
    made = [prepare(array(case, "float32"), asked) for case in cases]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *made)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def each(A, B):
        return jax.vmap(lambda A, b: spmm(A, b, schedule=schedule))(A, B)

    expected = [spmm(A, b, schedule=schedule) for A, b in zip(made, B, strict=True)]
    run.kernels.clear()
    np.testing.assert_array_equal(each(stacked, B), expected)
    assert run.kernels == ["SpmmPiecesKernel", "SumPiecesKernel"]
    specs = dict(mesh=mesh, in_specs=(jax.P(), jax.P("x")), out_specs=jax.P("x"))
    shared = jax.shard_map(lambda A, B: spmm(A, B[0], schedule=schedule)[None], **specs)
    np.testing.assert_array_equal(shared(made[0], B)[0], expected[0])


def test_prepared_under_a_mesh_and_under_jit():
    """The lists are on no mesh and of no trace, as the other index arrays are."""
    A, B = array(CASE, "float32"), drawn(CASE.shape[1], 8)
    asked = lambda A: spmm(A, B, schedule=POINT)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        P = prepare(A, asked)
        captured = jax.shard_map(
            lambda B: spmm(P, B[0])[None], mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x")
        )
        many = jax.device_put(np.stack([B, B]), jax.P("x"))
        assert jax.eval_shape(captured, many).shape == (2, CASE.shape[0], 8)
    keep = []
    jax.eval_shape(lambda v: keep.append(prepare(A.with_values(v), asked)), A.values)
    jax.tree.map(np.testing.assert_array_equal, keep[0].with_values(A.values), P)


def test_the_order_of_preparing_is_of_no_matter():
    A, B, C = array(CASE, "float32"), drawn(CASE.shape[1], 8), drawn(CASE.shape[0], 8)
    f = lambda A: spmm(A, B, schedule=POINT)
    g = lambda A: spmm(A, C, transpose=True, schedule=POINT)
    one, other = prepare(A, lambda A: (f(A), g(A))), prepare(prepare(A, g), f)
    assert len(one.transposed.keys) == 2
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_lists_that_no_launch_takes():
    A, B = array(CASE, "float32"), drawn(CASE.shape[1], 8)
    P = prepare(A, lambda A: spmm(A, B, schedule=POINT))
    (made,), named = P.transposed.lists, P.transposed.keys
    for lists, keys, words in (
        ((made.astype(jnp.float32),), named, r"expected int32 \[96\], got float32 \[96\]"),
        ((made.astype(jnp.int16),), named, r"expected int32 \[96\], got int16 \[96\]"),
        ((made[:8],), named, r"expected int32 \[96\], got int32 \[8\]"),
        ((None,), named, r"expected int32 \[96\], got NoneType"),
        ((), named, "expected 1, one for each key, got 0"),
        ((made,), (), "expected 0, one for each key, got 1"),
    ):
        wrong = replace(P, transposed=replace(P.transposed, lists=lists, keys=keys))
        with pytest.raises(ValueError, match=f"SparseArray: lists of pieces: {words}"):
            spmm(wrong, B)
    none = replace(P, transposed=replace(P.transposed, lists=(), keys=()))
    np.testing.assert_array_equal(none @ B, A @ B)


def test_gradients_of_sampled_products_too():
    loss, A, arrays = sampled, array(CASE, "float32"), (drawn(CASE.shape[0], 8), drawn(90, 8))
    grads = jax.grad(lambda A, X, Y: sampled(A, X, Y, POINT), (1, 2))
    P = prepare(A, grads, *arrays)
    assert len(P.transposed.keys) == 2 and loss is sampled
    assert prepare(P, grads, *arrays) is P


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "spmm CSC"])
def test_lists_that_hold_anything_stay_in_bounds(name, monkeypatch):
    """The emulator raises on an address outside of an operand; the leaves of a pytree may be
    anything, and a place of which several pieces have sums is a race."""
    require_nvrtc()
    monkeypatch.setattr(Blocks, "check_race", lambda *_: None)
    loss, _, arrays, schedule = PROGRAMS[name]
    P, rng = prepared(name), np.random.default_rng(3)

    def anything(x):
        wide = rng.integers(-(2**31), 2**31 - 1, x.shape)
        return jnp.asarray(
            np.where(rng.random(x.shape) < 0.3, wide, rng.integers(-9, 99, x.shape)), x.dtype
        )

    lists = tuple(map(anything, P.transposed.lists))
    wrong = replace(P, transposed=replace(P.transposed, lists=lists))
    gradients(loss, wrong, arrays, Emulated(emulate, schedule))


def test_what_keeps_the_lists_and_what_does_not():
    A, B = array(CASE, "float32"), drawn(CASE.shape[1], 8)
    P = prepare(A, lambda A: spmm(A, B, schedule=POINT))
    kept = lambda A: isinstance(A.transposed, PreparedTranspose)
    assert jax.tree.structure(A) != jax.tree.structure(P) and not kept(A)
    for same in (
        P.T,
        P.astype("bfloat16"),
        2 * P,
        P.with_values(P.values),
        jax.jit(lambda A: A)(P),
    ):
        assert kept(same)
    for other in (P[:3], P[:, :9], P.asformat(COO), P.T.asformat(CSR)):
        assert not kept(other), other
    np.testing.assert_array_equal((P[:3] @ B), (A @ B)[:3])
    # Other sizes make their lists: here pieces of 9.
    other = replace(POINT, chunk=9)
    text, _ = lowered(lambda A, B: spmm(A, B, schedule=other), P, B)
    assert "cummax" in text
    both = prepare(P, lambda A: spmm(A, B, schedule=other))
    assert len(both.transposed.keys) == 2 and both.transposed.keys[0] == P.transposed.keys[0]
    exported = jax.export.export(jax.jit(lambda A: 2 * A.values))(P)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(P), 2 * A.values)


def test_what_cannot_be_prepared():
    A, B = array(CASE, "float32"), drawn(CASE.shape[1], 8)
    asked = lambda A: spmm(A, B, schedule=POINT)
    assert prepare(A, lambda A: spmm(A, B, schedule=replace(POINT, chunk=None))) is A
    with pytest.raises(TypeError, match="prepare: A must be a SparseArray, got ndarray"):
        prepare(np.ones((3, 3)), asked)
    with pytest.raises(ValueError, match="prepare: A: expected concrete index arrays"):
        jax.jit(lambda A: prepare(A, asked).values)(A)
    with pytest.raises(ValueError, match="expected a checked array in CSR.* got COO"):
        prepare(A.asformat(COO), asked)
    bare = SparseArray(A.values, ((), tuple(A.index_arrays[1])), tuple(A.transposed), A.shape, CSR)
    with pytest.raises(ValueError, match=r"A.checked\(\) checks it"):
        prepare(bare, asked)
    # The lists of an array that is changed so are not looked at.
    P = prepare(A, asked)
    changed = replace(P, index_arrays=((), tuple(P.index_arrays[1])))
    assert "cummax" in lowered(lambda A: spmm(A, B, schedule=POINT), changed)[0]
