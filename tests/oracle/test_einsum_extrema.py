"""einsum reduced by maximum and minimum, against NumPy over the products of stored entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast, rounded
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
    AtomicParallelism,
    CpuTile,
    Reference,
    ScheduleError,
    SparseArray,
    einsum,
    gspmm,
    row_max,
)
from sgap_jax.compiler import Schedule, assign
from sgap_jax.compiler.presets import spmm_point
from sgap_jax.schedules.emulated import Emulated

SIZES = {"i": 6, "j": 5, "k": 4, "l": 3}
NOTHING = {"max": -np.inf, "min": np.inf}


def problem(subscripts, format, dtype="float64", seed=0):
    """A and the dense operands; the same in float64; and the mask of A's entries. Row 1 is
    empty."""
    rng = np.random.default_rng(seed)
    words = subscripts.partition("->")[0].split(",")
    shapes = [[SIZES[index] for index in word] for word in words]
    dense = rounded(rng.standard_normal(shapes[0]) * (rng.random(shapes[0]) < 0.4), dtype)
    dense[1] = 0
    A = SparseArray.from_dense(dense, format=format)
    stored = np.asarray(A.with_values(jnp.ones_like(A.values)).todense()) > 0
    others = [rounded(rng.standard_normal(shape), dtype) for shape in shapes[1:]]
    given = [A.with_values(cast(np.asarray(A.values), dtype)), *(cast(x, dtype) for x in others)]
    return given, [dense, *others], stored


def expected(subscripts, whole, stored, reduction):
    words, _, output = subscripts.partition("->")
    words = words.split(",")
    every = "".join(sorted(set("".join(words))))
    products = np.einsum(f"{','.join(words)}->{every}", *whole)
    spread = np.einsum(f"{words[0]},{every}->{every}", stored * 1.0, np.ones_like(products))
    axes = tuple(n for n, index in enumerate(every) if index not in output)
    nothing = NOTHING[reduction]
    found = getattr(np, reduction)(np.where(spread > 0, products, nothing), axes, initial=nothing)
    left = [index for index in every if index in output]
    found = np.transpose(found, [left.index(index) for index in output])
    return np.where(stored, found, 0) if output == words[0] else found


CASES = [
    ("ij,j->i", CSR),
    ("ij,jk->ik", CSR),
    ("ij,jk->ki", COO),
    ("ij,jk->ik", CSC),
    ("ij,jk->ik", CVS(4)),  # 4 does not divide 6
    ("ij,i->j", BCSR(3, 2)),
    ("ij,ik,jk->ij", CSR),
    ("ij,jk->ijk", CSR),
    ("ij,kl->ik", CSF(2)),
    ("ij,jk->", CSR),
    ("ij->j", COO),
    ("ijk,jl,kl->il", CSF(3)),
    ("ijk,k->ij", COO),
]


@pytest.mark.seconds(check=1.3, test=8)
@pytest.mark.parametrize(("subscripts", "format"), CASES, ids=str)
def test_extrema_of_products(subscripts, format):
    """By compiled loops and by plain JAX; the dtypes take turns."""
    dtype = DTYPES[CASES.index((subscripts, format)) % 4]
    given, whole, stored = problem(subscripts, format, dtype)
    runs = [(reduction, schedule) for reduction in NOTHING for schedule in (None, Reference())]
    run = lambda *x: [einsum(subscripts, *x, reduction=r, schedule=s) for r, s in runs]
    for (reduction, _), out in zip(runs, jax.jit(run)(*given), strict=True):
        out = out.todense() if isinstance(out, SparseArray) else out
        assert out.dtype == jnp.dtype(dtype)
        want, eps = expected(subscripts, whole, stored, reduction), float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.float64(out), want, rtol=3 * eps, atol=1e-30)


@pytest.mark.parametrize("name", ["no_rows", "no_columns", "no_entries", "padded", "only_padding"])
def test_rows_without_entries_are_those_of_row_max(name):
    A = array(BATTERY[name], jnp.float32)
    x = jnp.ones(A.shape[1], jnp.float32)
    out, plain = jax.jit(
        lambda A, x: [
            einsum("ij,j->i", A, x, reduction="max", schedule=s) for s in (None, Reference())
        ]
    )(A, x)
    np.testing.assert_array_equal(out, row_max(A))
    np.testing.assert_array_equal(plain, row_max(A))
    if 0 not in A.shape:
        stored = np.asarray(A.row_lengths)[:, None] > 0
        messages = gspmm(A, x[:, None], reduce="max")
        np.testing.assert_array_equal(np.where(stored, out[:, None], 0), messages)


def test_integers():
    A = SparseArray.from_dense(np.array([[3, 0, -2], [0, 0, 0], [-1, 5, 0]], np.int32))
    x = jnp.array([2, -1, 1], jnp.int32)
    limits = np.iinfo(np.int32)
    np.testing.assert_array_equal(einsum("ij,j->i", A, x, reduction="max"), [6, limits.min, -2])
    np.testing.assert_array_equal(einsum("ij,j->i", A, x, reduction="min"), [-2, limits.max, -5])


def test_nan_reaches_its_row_and_its_gradient():
    A = SparseArray.from_dense(np.array([[1.0, 2, 0], [0, 3, 1], [4, 0, 0]]))
    x = jnp.array([1.0, jnp.nan, 2.0])
    for schedule in (None, Reference()):
        f = lambda v, s=schedule: einsum(
            "ij,j->i", A.with_values(v), x, reduction="max", schedule=s
        )
        out, pull = jax.vjp(jax.jit(f), A.values)
        np.testing.assert_array_equal(out, [np.nan, np.nan, 4])
        np.testing.assert_array_equal(pull(jnp.array([0.0, 0.0, 1.0]))[0][-1], 1)
        assert np.isnan(pull(jnp.ones(3))[0][:4]).all()


def test_ties_share_the_gradient_as_in_jnp_max():
    dense = np.array([[1.0, 2, 2, 0], [3, 3, 3, 3], [0, 0, 0, 0], [5, 0, 1, 5]], np.float32)
    A = SparseArray.from_dense(dense)
    B = jnp.asarray(np.array([[1, 1], [1, 2], [1, 1], [1, 0.5]], np.float32))
    C = jnp.asarray(np.arange(1, 9, dtype=np.float32).reshape(4, 2))

    def ours(values, B):
        out = einsum("ij,jk->ik", A.with_values(values), B, reduction="max")
        return jnp.sum(jnp.where(jnp.isfinite(out), out * C, 0))

    def theirs(A, B):
        products = jnp.where((dense != 0)[:, :, None], A[:, :, None] * B[None], -jnp.inf)
        out = jnp.max(products, 1)
        return jnp.sum(jnp.where(jnp.isfinite(out), out * C, 0))

    values, dB = jax.jit(jax.grad(ours, (0, 1)))(A.values, B)
    dense_values, dense_B = jax.jit(jax.grad(theirs, (0, 1)))(jnp.asarray(dense), B)
    np.testing.assert_allclose(values, dense_values[dense != 0], rtol=1e-6)
    np.testing.assert_allclose(dB, dense_B, rtol=1e-6)


def test_ties_of_halves_are_counted_beyond_their_range():
    A = SparseArray.from_dense(np.ones((1, 4096), np.float16))
    f = lambda v: einsum("ij->i", A.with_values(v), reduction="max")[0] * jnp.float16(4096)
    np.testing.assert_array_equal(jax.jit(jax.grad(f))(A.values), np.ones(4096))


DIFFERENTIATED = [
    ("ij,j->i", CSR, "max"),
    ("ij,jk->ik", COO, "min"),
]


@pytest.mark.parametrize(("subscripts", "format", "reduction"), DIFFERENTIATED, ids=str)
def test_derivatives_to_second_order(subscripts, format, reduction):
    (A, *dense), _, _ = problem(subscripts, format, seed=1)

    def function(values, *dense):
        out = einsum(subscripts, A.with_values(values), *dense, reduction=reduction)
        out = getattr(out, "values", out)
        return jnp.where(jnp.isfinite(out), out, 0)

    check_grads(jax.jit(function), (A.values, *dense), order=2, modes=["fwd", "rev"])


def test_maps():
    (A, B), _, _ = problem("ij,jk->ik", CSR)
    f = lambda v, B: einsum("ij,jk->ik", A.with_values(v), B, reduction="max")
    Bs, vs = jnp.stack([B, -B]), jnp.stack([A.values, 2 * A.values])
    total = lambda *x: jnp.sum(jnp.where(jnp.isfinite(out := f(*x)), out, 0))
    both = lambda *x: (f(*x), *jax.grad(total, (0, 1))(*x))
    one = jax.jit(both)
    for values, dims in ((A.values, (None, 0)), (vs, (0, 0))):
        got = jax.jit(jax.vmap(both, dims))(values, Bs)
        for n in range(2):
            want = one(values if dims[0] is None else values[n], Bs[n])
            for mapped, single in zip(got, want, strict=True):
                np.testing.assert_allclose(mapped[n], single, rtol=1e-12)


def test_products_that_plain_jax_and_loops_compare_are_rounded_alike():
    """Also the tangents' products under vmap, whose values have one more index."""
    rng = np.random.default_rng(0)
    dense, x, z = (rng.standard_normal(s).astype(np.float32) for s in ((9, 11), (11, 7), (9,)))
    A, given = SparseArray.from_dense(dense), (jnp.asarray(x), jnp.asarray(z))

    def run(values, schedule=None):
        A_ = A.with_values(values)
        return einsum("ij,jk,i->ik", A_, *given, reduction="max", schedule=schedule)

    at = (dense[:, :, None] * x[None] * z[:, None, None]).argmax(1)
    want = np.zeros((9, 7, 9, 11), np.float32)
    rows, columns = np.indices(at.shape)
    want[rows, columns, rows, at] = x[at, columns] * z[:, None]
    found = jax.jit(lambda v: (jax.jacfwd(run)(v), run(v), run(v, Reference())))(A.values)
    np.testing.assert_allclose(found[0].reshape(want.shape), want, rtol=1e-6)
    np.testing.assert_array_equal(found[1], found[2])


LARGEST = assign("ij,jk->ik", {"A": CSR}, reduction="max")


@pytest.mark.parametrize("point", ["{<1 nnz, 1 col>, 8}", "{<1 row, 1 col>, 1}"])
def test_launches_fill_update_and_keep_nan(point, monkeypatch):
    require_nvrtc()
    (A, B), whole, stored = problem("ij,jk->ik", CSR, "float32")
    whole[1][2, 1] = np.nan
    B = jnp.asarray(whole[1], jnp.float32)
    schedule = spmm_point(LARGEST, AtomicParallelism.parse(point), SIZES["k"])

    def f(values, B, s):
        return einsum("ij,jk->ik", A.with_values(values), B, reduction="max", schedule=s)

    emulated = Emulated(emulate, schedule)
    out, pull = jax.vjp(jax.jit(lambda v, B: f(v, B, emulated)), A.values, B)
    want = expected("ij,jk->ik", whole, stored, "max")
    np.testing.assert_allclose(out, want, rtol=1e-6)
    assert np.isnan(want).any() and np.isinf(want).any()
    dvalues, dB = pull(jnp.where(jnp.isnan(out), 0, 1).astype(out.dtype))
    assert dvalues.shape == A.values.shape and dB.shape == B.shape
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    traced = jax.jit(lambda v, B: f(v, B, schedule)).trace(A.values, B)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("output_operand_alias<") == ("nnz" in point)  # rows are stored whole


def test_the_schedule_must_be_of_the_reduction():
    (A, B), whole, stored = problem("ij,jk->ik", CSR)
    schedule = Schedule(LARGEST).parallelize("i", "CPUThread", "NoRaces")
    out = jax.jit(lambda A, B: einsum("ij,jk->ik", A, B, reduction="max", schedule=schedule))(A, B)
    np.testing.assert_array_equal(out, expected("ij,jk->ik", whole, stored, "max"))
    with pytest.raises(ScheduleError, match=r"is for C\(i,k\) max= .* got C\(i,k\) \+="):
        einsum("ij,jk->ik", A, B, schedule=schedule)
    with pytest.raises(ScheduleError, match="got .* min="):
        einsum("ij,jk->ik", A, B, reduction="min", schedule=schedule)


def test_errors():
    (A, B), _, _ = problem("ij,jk->ik", CSR)
    for wrong in ("+", "mean", None):
        with pytest.raises(ValueError, match="reduction must be one of sum, max, min, got"):
            einsum("ij,jk->ik", A, B, reduction=wrong)
    with pytest.raises(ValueError, match="max of complex128: complex numbers have no order"):
        einsum("ij,jk->ik", A.astype(jnp.complex128), B.astype(jnp.complex128), reduction="max")
    with pytest.raises(ValueError, match=r"einsum: reduction must be one of .* got \['max'\]"):
        einsum("ij,jk->ik", A, B, reduction=["max"])
    for reduction in ("sum", "max"):
        with pytest.raises(ValueError, match="einsum: expected numbers, got bool"):
            einsum("ij,jk->ik", A.astype(bool), B.astype(bool), reduction=reduction)
    with pytest.raises(NotImplementedError, match="no kernel that obeys CpuTile"):
        einsum("ij,jk->ik", A, B, reduction="max", schedule=CpuTile())


@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
def test_the_padding_of_sparse_results_is_zero(schedule):
    indices = ((), (jnp.int32([0, 1, 2]), jnp.int32([0, 1, 9, 9])))
    P = SparseArray(jnp.array([2.0, 3, jnp.nan, jnp.nan]), indices, None, (2, 2), CSR)
    X = jnp.ones((2, 2))
    C = einsum("ij,jk->ij", P, X, reduction="min", schedule=schedule)
    np.testing.assert_array_equal(C.values, [2, 3, 0, 0])
