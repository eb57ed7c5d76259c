"""einsum into the fibers of a tensor: the result stores the fibers that the operand's outer levels
store."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from jax.test_util import check_grads
from loop_interpreter import interp
from tolerance import assert_within, sum_bound

from sgap_jax import COO, CSF, Format, Reference, ScheduleError, SparseArray, einsum
from sgap_jax.compiler import Schedule, assign
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.lowering.storage import capacities
from sgap_jax.compiler.presets import cpu
from sgap_jax.formats.levels import Compressed, Dense
from sgap_jax.schedules.emulated import Emulated

SIZES = {"i": 7, "j": 6, "k": 5, "l": 4, "r": 19, "s": 3}
TTM = "ijk,kr->ijr"
FIBERS = Format((Compressed, Compressed, Dense))
CASES = [
    (TTM, CSF(3), "bfloat16"),
    ("ijk,jr->kir", CSF(3, order=(2, 0, 1)), "float32"),
    ("ijk,jr,ks->irs", CSF(3), "float64"),
    ("ijkl,lr->ijkr", CSF(4), "float16"),
]


def operands(subscripts, format, dtype="float32", seed=0):
    """A with padding at each level, whose coordinates are out of range; the dense operands; and all
    of them dense in float64."""
    rng = np.random.default_rng(seed)
    word, *words = subscripts.partition("->")[0].split(",")
    x = rng.standard_normal([SIZES[i] for i in word])
    x *= rng.random(x.shape) < 0.15
    x[2] = x[:, 4] = 0
    A = SparseArray.from_dense(x.astype(jnp.dtype(dtype)), format=format)
    far = lambda a, what: jnp.concatenate([a, jnp.full(2, what, a.dtype)])
    levels, last = [], None
    for offsets, indices in A.index_arrays:
        offsets = offsets if last is None else far(offsets, offsets[-1])
        levels.append((offsets, far(indices, 1 << 30)))
        last = offsets
    A = dataclasses.replace(A, values=far(A.values, jnp.nan), index_arrays=tuple(levels))
    dense = [jnp.asarray(rng.standard_normal([SIZES[i] for i in w])).astype(dtype) for w in words]
    wide = [np.asarray(a).astype(np.float64) for a in (A.todense(), *dense)]
    return A, dense, wide


def stored(A, depth):
    """The mask of the prefixes, in stored order, that have an entry."""
    coordinates = np.stack([np.asarray(c) for c in A.coordinates()])
    coordinates = coordinates[:, coordinates[0] < A.shape[0]]
    return np.unique(coordinates[list(A.format.modes[:depth])], axis=1)


@pytest.mark.parametrize("subscripts, format, dtype", CASES)
def test_against_dense(subscripts, format, dtype):
    A, dense, wide = operands(subscripts, format, dtype)
    output = subscripts.partition("->")[2]
    depth = sum(i in subscripts.partition(",")[0] for i in output)
    want, size = (np.einsum(subscripts, *map(f, wide)) for f in (np.asarray, np.abs))
    bound = sum_bound(want, size, 30, dtype)
    for schedule in (None, Reference()):
        call = jax.jit(lambda A, *x, s=schedule: einsum(subscripts, A, *x, fibers=True, schedule=s))
        found = call(A, *dense)
        assert found.format == Format((*[Compressed()] * depth, *[Dense()] * (len(output) - depth)))
        assert found.dtype == jnp.dtype(dtype) and found.shape == want.shape
        fibers = stored(A, depth)
        assert found.values.shape[0] == fibers.shape[1] + 2
        assert not np.asarray(found.values[-2:]).any()
        assert_within(found.todense(), want, bound)
        assert_within(found.values[:-2], want[tuple(fibers)], bound[tuple(fibers)])


def test_the_interpreter_agrees():
    A, (B,), (_, right) = operands(TTM, CSF(3))
    e = assign(TTM, {"A": CSF(3), "C": FIBERS})
    sizes = {i: SIZES[i] for i in "ijkr"}
    lengths = [len(indices) for _, indices in A.index_arrays]
    function = lower(cpu(e, rows=2), sizes, capacities(CSF(3), [7, 6, 5], lengths), "float32")
    arrays = [np.asarray(x) for level in A.index_arrays for x in level]
    arrays += [np.asarray(A.values), np.asarray(B).ravel()]
    names = [array.name for array in function.inputs]
    found = interp.run(function, dict(zip(names, arrays, strict=True)))["C"]
    np.testing.assert_allclose(
        found.reshape(-1, 19), einsum(TTM, A, B, fibers=True).values, rtol=1e-5, atol=1e-6
    )
    assert "fuse(i, j, fiber)" in str(cpu(e)) and "A1_crd[" not in cpu(e).loops()


def test_gradients():
    """They equal those of the dense result where that is stored."""
    A, (B,), _ = operands(TTM, CSF(3))
    A = A.with_values(jnp.nan_to_num(A.values))
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((7, 6, 19)), jnp.float32)

    def loss(v, B, fibers):
        C = einsum(TTM, A.with_values(v), B, fibers=fibers)
        return jnp.sum((C.todense() if fibers else C) ** 2 * weights)

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    for found, want in zip(gradient(A.values, B, True), gradient(A.values, B, False), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.tier("all")
def test_derivatives_to_order_2_and_vmap():
    A, (B,), _ = operands(TTM, CSF(3))
    A = A.with_values(jnp.nan_to_num(A.values))
    values = jax.jit(lambda v, B: einsum(TTM, A.with_values(v), B, fibers=True).values)
    exact = A.values.astype(jnp.float64), B.astype(jnp.float64)
    check_grads(values, exact, 2, atol=1e-6, rtol=1e-6)
    many = jax.vmap(values, (None, 0))(A.values, jnp.stack([B, 2 * B]))
    np.testing.assert_allclose(many[1], 2 * many[0], rtol=1e-6)


def test_a_nan_that_no_entry_meets():
    A, (B,), (_, right) = operands(TTM, CSF(3))
    B = B.at[4].set(jnp.nan)
    assert not np.isfinite(np.asarray(einsum(TTM, A, B, fibers=True).values)).all()
    A = SparseArray.from_dense(A.todense().at[:, :, 4].set(0), format=CSF(3))
    assert np.isfinite(np.asarray(einsum(TTM, A, B, fibers=True).values)).all()


def test_a_result_is_a_sparse_array():
    A, (B,), (left, right) = operands(TTM, CSF(3))
    C = einsum(TTM, A, B, fibers=True)
    want = np.einsum(TTM, left, right).astype(np.float32)
    nodes = A.index_arrays[1][1].shape[0]
    assert (C.checked() is C) == A.is_checked and C.nnz == 19 * nodes and f"nnz={C.nnz}" in repr(C)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    for format in (COO, CSF(3, order=(2, 0, 1))):
        close(C.asformat(format).todense(), want)
    close(C.T.todense(), want.T)
    close((2 * C).to_bcoo().todense(), 2 * want)
    close(C.with_values(-C.values).todense(), -want)
    w = jnp.asarray(np.random.default_rng(2).standard_normal((6, 2)), jnp.float32)
    for schedule in (None, Reference()):
        found = einsum("ijr,js->irs", C, w, schedule=schedule)
        close(found, np.einsum("ijr,js->irs", want, w))
    with pytest.raises(ValueError, match=rf"values: expected shape \[{nodes}, 19\]"):
        C.with_values(C.values[:, :3])
    (bounds, rows), (offsets, columns) = C.index_arrays
    wrong = dataclasses.replace(C, index_arrays=((bounds, rows), (offsets, columns.at[0].set(9))))
    with pytest.raises(ValueError, match=r"indices of level 1\[0\]: expected an index in 0 .. 5"):
        wrong.checked()


def test_schedules():
    """einsum accepts a schedule of the expression with this output format, and no other
    schedule."""
    A, (B,), (left, right) = operands(TTM, CSF(3))
    e = assign(TTM, {"A": CSF(3), "C": FIBERS})
    chain = Schedule(e).pos("i", "p", "A").split("p", "c", "p1", 2)
    chain = chain.parallelize("c", "CPUThread", "NoRaces")
    want = np.einsum(TTM, left, right)
    found = einsum(TTM, A, B, fibers=True, schedule=chain)
    np.testing.assert_allclose(found.todense(), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ScheduleError, match="the schedule is for"):
        einsum(TTM, A, B, schedule=chain)
    with pytest.raises(ScheduleError, match="the schedule is for"):
        einsum(TTM, A, B, fibers=True, schedule=cpu(assign(TTM, {"A": CSF(3)})))
    entries = Schedule(e).reorder("i", "j", "k", "r").fuse("i", "j", "f").fuse("f", "k", "g")
    found = einsum(TTM, A, B, fibers=True, schedule=entries.pos("g", "p", "A"))
    np.testing.assert_allclose(found.todense(), want, rtol=1e-5, atol=1e-5)


def test_on_a_gpu():
    require_nvrtc()
    A, (B,), (left, right) = operands(TTM, CSF(3))
    e = assign(TTM, {"A": CSF(3), "C": FIBERS})
    chain = Schedule(e).reorder("i", "j", "r", "k").fuse("i", "j", "f").pos("f", "p", "A")
    chain = chain.split("p", "block", "fiber", 8).parallelize("block", "GPUBlock", "NoRaces")
    emulated = Emulated(emulate, schedule=chain.parallelize("fiber", "GPUThread", "NoRaces"))
    call = jax.jit(lambda A, B: einsum(TTM, A, B, fibers=True, schedule=emulated))
    want = np.einsum(TTM, left, right)
    np.testing.assert_allclose(call(A, B).todense(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "subscripts, format, error, message",
    [
        (TTM, COO, NotImplementedError, "outer levels of a CSF operand"),
        ("ijk,k->ij", CSF(3), NotImplementedError, "three or more in all; got 'ij'"),
        ("ijk,kr->r", CSF(3), NotImplementedError, "got 'r' for 'ijk'"),
        ("ijk,kr->ijkr", CSF(3), NotImplementedError, "but not all"),
        ("ijk,jr->ikr", CSF(3), ValueError, "expected an output that begins with 'ij'"),
        ("ijk,kr->irj", CSF(3), ValueError, "expected an output that begins with 'ij'"),
    ],
)
def test_errors(subscripts, format, error, message):
    A = SparseArray.from_dense(np.ones((7, 6, 5), np.float32), format=format)
    x = jnp.ones([SIZES[i] for i in subscripts.split("->")[0].split(",")[1]], jnp.float32)
    with pytest.raises(error, match=message):
        einsum(subscripts, A, x, fibers=True)


@pytest.mark.parametrize(
    "subscripts, levels",
    [
        (TTM, (Compressed, Dense, Dense)),  # j of the fibers, and of the dense modes
        ("ijk,kr->irj", (Compressed, Compressed, Dense)),
        ("ijk,kr->ijr", (Dense, Compressed, Dense)),
        ("ijk,jr->ikr", (Compressed, Compressed, Dense)),
    ],
)
def test_outputs_of_another_structure(subscripts, levels):
    with pytest.raises(NotImplementedError, match="would need a structure of its own"):
        assign(subscripts, {"A": CSF(3), "C": Format(levels)})


@pytest.mark.tier("all")
@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_extrema_of_fibers_and_their_gradients_are_those_of_the_dense_result(reduction, schedule):
    A, (X,), _ = operands(TTM, CSF(3))
    i, j = stored(A, 2)

    def by_fibers(values, X):
        kept = dataclasses.replace(A, values=values)
        return einsum(TTM, kept, X, reduction=reduction, fibers=True, schedule=schedule).values

    def dense(values, X):
        kept = dataclasses.replace(A, values=values)
        return einsum(TTM, kept, X, reduction=reduction, schedule=schedule)[i, j]

    found, want = by_fibers(A.values, X), dense(A.values, X)
    np.testing.assert_array_equal(found[: i.size], want)
    np.testing.assert_array_equal(found[i.size :], 0)  # the padding
    cotangent = np.random.default_rng(1).standard_normal(want.shape).astype(np.float32)
    gradient = lambda f: jax.grad(lambda v, x: jnp.vdot(f(v, x)[: i.size], cotangent), (0, 1))
    both = jax.jit(lambda *x: (gradient(by_fibers)(*x), gradient(dense)(*x)))
    for got, right in zip(*both(A.values, X), strict=True):
        assert np.any(right)
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)
