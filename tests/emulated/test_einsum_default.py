"""einsum on CUDA without a schedule: compiled loops for the product and its gradients, one launch
each."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import require_nvrtc, resources
from emulated_launch import emulate
from tolerance import assert_within, sum_bound
from unchecked_einsum import every, near
from unchecked_structures import KINDS

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    Reference,
    ScheduleError,
    SparseArray,
    einsum,
    explain,
    explain_einsum,
)
from sgap_jax.compiler import assign, presets_cuda
from sgap_jax.compiler.cuda.print_cuda import launch_plan
from sgap_jax.compiler.transform import text
from sgap_jax.formats.levels import require_stored
from sgap_jax.launch import nvrtc
from sgap_jax.schedules.emulated import Emulated

SIZES = {"i": 13, "j": 9, "k": 7, "l": 3, "r": 12, "s": 40}


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def operands(subscripts, format, dtype="float32", seed=0, sizes=SIZES):
    """The sparse operand, some of whose slices are empty, the dense ones, and all of them dense."""
    rng = np.random.default_rng(seed)
    word, *words = subscripts.partition("->")[0].split(",")
    x = rng.integers(1, 4, [sizes[i] for i in word]) * (rng.random([sizes[i] for i in word]) < 0.3)
    x[len(x) // 2] = x[-2] = 0  # the last row has entries, in a vector that reaches past it
    A = SparseArray.from_dense(x.astype(dtype), format=require_stored(format, x.ndim, "test"))
    dense = [rng.integers(-3, 4, [sizes[i] for i in word]) for word in words]
    return A, [jnp.asarray(y, dtype) for y in dense], [x, *dense]


class Launches:
    """Emulates launches, and keeps their grids."""

    def __init__(self):
        self.grids = []

    def __call__(self, call, *given):
        self.grids.append(call.grid)
        return emulate(call, *given)

    @property
    def schedule(self):
        return Emulated(self)


def result(subscripts, A, dense, schedule, **options):
    out = einsum(subscripts, A, *dense, schedule=schedule, **options)
    return out.values if isinstance(out, SparseArray) else out


# Each kind of schedule, in each kind of format. Values are small integers: all sums are exact.
PRODUCTS = {
    "MTTKRP": ("ijk,jr,kr->ir", CSF(3)),
    "MTTKRP of rank 40": ("ijk,js,ks->is", CSF(3)),
    "MTTKRP of the last mode": ("ijk,ir,jr->kr", COO),
    "TTM": ("ijk,kr->ijr", CSF(3, order=(0, 2, 1))),
    "TTV": ("ijk,k->ij", COO),
    "CP model": ("ijk,ir,jr,kr->ijk", CSF(3)),
    "sum of all": ("ijk,i,j,k->", CSF(3)),
    "two dense indices": ("ij,jkl->ikl", CSC),
    "chain of products": ("ij,i,jr,rs->is", CVS(4)),
    "blocks": ("ij,i,j->i", BCSR(2, 4)),
    "sampled blocks": ("ij,ir,jr,r->ij", BCSR(2, 4)),
    "scaling": ("ij,i->ij", CSR),
    "a vector": ("i,ir->ir", CSF(1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_product_and_its_gradients_are_a_launch_each(name):
    subscripts, format = PRODUCTS[name]
    A, dense, whole = operands(subscripts, format)
    launches = Launches()
    run = jax.jit(lambda A, *x: result(subscripts, A, x, launches.schedule))
    found = run(A, *dense)
    inputs, _, output = subscripts.partition("->")
    want = np.einsum(subscripts, *whole)
    if output == inputs.split(",")[0]:
        found = A.with_values(found).todense()
    np.testing.assert_array_equal(found, want)
    assert len(launches.grids) == 1

    launches.grids.clear()
    every = tuple(range(len(dense) + 1))

    def loss(values, *x, schedule=launches.schedule):
        out = result(subscripts, A.with_values(values), x, schedule)
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape))
        return jnp.sum(out * weights)

    found = jax.jit(jax.grad(loss, every))(A.values, *dense)
    # The product itself, whose value no gradient needs, is not computed.
    assert len(launches.grids) == len(every)
    plain = jax.jit(jax.grad(lambda *x: loss(*x, schedule=Reference()), every))(A.values, *dense)
    for ours, theirs in zip(found, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)
        assert np.abs(np.asarray(ours)).sum() > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int8", "int32"])
@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_dtypes_and_maxima(dtype, reduction):
    names = ["MTTKRP", "sum of all", "MTTKRP of the last mode", "sampled blocks"]
    for n, name in enumerate(names[reduction == "max" :: 2] + names[dtype == "int8" :: 3]):
        subscripts, format = PRODUCTS[name]
        A, dense, _ = operands(subscripts, format, dtype, seed=n)
        call = jax.jit(partial(result, subscripts, reduction=reduction), static_argnums=2)
        found, want = (call(A, dense, s) for s in (Launches().schedule, Reference()))
        assert found.dtype == want.dtype == dtype
        np.testing.assert_array_equal(found, want)


def test_sums_are_within_their_bound():
    A, dense, whole = operands("ijk,jr,kr->ir", CSF(3), "float16")
    rng = np.random.default_rng(5)
    dense = [jnp.asarray(rng.standard_normal(x.shape), "float16") for x in dense]
    wide = [whole[0].astype(float), *(np.asarray(x, np.float64) for x in dense)]
    found = result("ijk,jr,kr->ir", A, dense, Launches().schedule)
    want, size = (np.einsum("ijk,jr,kr->ir", *map(f, wide)) for f in (np.asarray, np.abs))
    assert_within(found, want, sum_bound(want, size, 70, "float16"))


@pytest.mark.parametrize("columns", [1, 40])
def test_results_by_fibers_and_their_gradients(columns):
    sizes = SIZES | {"r": columns}
    A, (X,), _ = operands("ijk,kr->ijr", CSF(3), sizes=sizes)
    launches = Launches()

    def loss(values, X, schedule):
        return jnp.sum(
            result("ijk,kr->ijr", A.with_values(values), [X], schedule, fibers=True) ** 2
        )

    value_and_grad = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    jax.tree.map(
        np.testing.assert_array_equal,
        value_and_grad(A.values, X, launches.schedule),
        value_and_grad(A.values, X, Reference()),
    )
    assert len(launches.grids) == 3


def test_a_batch_is_one_launch():
    A, (X, Y), _ = operands("ijk,jr,kr->ir", CSF(3))
    values, many = jnp.stack([A.values, -A.values]), jnp.stack([X, 2 * X])
    for axes in ((0, None, None), (None, 0, None), (0, 0, None)):
        given = [
            x if axis is None else m
            for axis, x, m in zip(axes, (A.values, X, Y), (values, many, Y), strict=True)
        ]
        launches = Launches()

        def loss(schedule, *given, axes=axes):
            one = lambda v, X, Y: result("ijk,jr,kr->ir", A.with_values(v), [X, Y], schedule)
            return jnp.sum(jax.vmap(one, axes)(*given) ** 2)

        grads = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
        jax.tree.map(
            np.testing.assert_array_equal,
            grads(launches.schedule, *given),
            grads(Reference(), *given),
        )
        assert len(launches.grids) == 4


def test_structures_that_nobody_checked():
    """Of each malformed kind; index arrays are looked at in the program, and put in order where
    neighbouring lanes reduce together."""
    for subscripts, format in (("ij,j,jr->ir", CSR), ("ijk,jr,kr->ir", CSF(3))):
        cases = every(subscripts, format)
        launches = Launches()
        emulated = partial(cases[0].call, schedule=launches.schedule)
        call = jax.jit(lambda v, a, d, emulated=emulated: emulated(v, *d, arrays=a))
        for kind, case in zip(KINDS, cases, strict=True):
            near(call(*case.given()), case.wanted(), kind)
        assert len(launches.grids) == len(cases)


def test_launches_in_the_program(monkeypatch):
    """What JAX lowers for a GPU; sizes of zero, complex numbers and symbols are plain JAX."""
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    A, dense, _ = operands("ijk,jr,kr->ir", CSF(3))

    def launches(f, *given):
        lowered = jax.jit(f).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        return lowered.count("@sgap_launch_v1"), lowered.count("stablehlo.scatter")

    loss = lambda v, *x: jnp.sum(result("ijk,jr,kr->ir", A.with_values(v), x, None) ** 2)
    assert launches(loss, A.values, *dense) == (1, 0)
    assert launches(jax.grad(loss, (0, 1, 2)), A.values, *dense) == (4, 0)
    numbers = [x.astype("complex64") for x in (A.values, *dense)]
    assert launches(lambda *x: loss(*x).real, *numbers)[0] == 0
    assert launches(loss, A.values, *(x[:, :0] for x in dense))[0] == 0


def test_without_a_compiler_it_is_plain_jax(monkeypatch):
    def missing():
        raise nvrtc.NvrtcMissing("NVRTC is not installed")

    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setattr(nvrtc, "version", missing)
    A, dense, _ = operands("ijk,jr,kr->ir", CSF(3))
    traced = jax.jit(lambda A, *x: einsum("ijk,jr,kr->ir", A, *x)).trace(A, *dense)
    with pytest.warns(RuntimeWarning, match="NVRTC is not installed; einsum runs in plain JAX"):
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "sgap_launch" not in lowered and "scatter" in lowered


@pytest.mark.skipif(any(d.platform == "gpu" for d in jax.devices()), reason="there is a GPU")
def test_without_a_gpu_it_is_plain_jax(monkeypatch):
    monkeypatch.delenv("SGAP_CUDA_ARCH", raising=False)
    A, dense, _ = operands("ijk,jr,kr->ir", CSF(3))
    traced = jax.jit(lambda A, *x: einsum("ijk,jr,kr->ir", A, *x)).trace(A, *dense)
    with pytest.warns(RuntimeWarning, match="no GPU here .*; einsum runs in plain JAX"):
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "sgap_launch" not in lowered and "scatter" in lowered


def chosen(expression, sizes, **options):
    """The schedule, and the function that it builds, of an expression with 10,000 entries."""
    lowered = lambda schedule: text.function(schedule, sizes, None, **options)
    schedule = presets_cuda.first(expression, sizes, lowered)
    return schedule, launch_plan(lowered(schedule))


def test_the_explanation():
    A, dense, _ = operands("ijk,jr,kr->ir", CSF(3))
    told = explain_einsum("ijk,jr,kr->ir", A, *dense)
    assert "GPUGroup, 8, Segment" in told and "for (int" in told
    assert "CPUThread" in explain_einsum("ijk,jr,kr->ir", A, *dense, platform="cpu")
    narrow = [x.astype("int16") for x in (A, *dense)]
    for platform in ("cpu", "cuda"):
        told = explain_einsum("ijk,jr,kr->ir", *narrow, platform=platform)
        assert (
            told.startswith("einsum: plain JAX: loops are compiled for float32") and "int16" in told
        )
    assert "size 0" in explain_einsum("ijk,jr,kr->ir", A, *(x[:, :0] for x in dense))
    M, (X,), _ = operands("ij,jr->ir", CSR)
    assert explain_einsum("ij,jr->ir", M, X).startswith("spmm: ")
    assert explain_einsum("ij,jr->ir", M, X) == explain(einsum, "ij,jr->ir", M, X, platform="cuda")
    assert "Segment" in explain_einsum("ij,jr->ir", M, X, reduction="max")
    with pytest.raises(ValueError, match='platform must be "cpu" or "cuda", got \'tpu\''):
        explain_einsum("ij,jr->ir", M, X, platform="tpu")


def test_segments_and_columns():
    """Up to 32 columns lanes have entries and reduce by segments, with more they have columns."""
    mttkrp = assign("ijk,jr,kr->ir", {"A": CSF(3)})
    sizes = {"i": 100, "j": 80, "k": 60}
    for rank, group in ((4, 32), (16, 8), (32, 8)):
        schedule, call = chosen(mttkrp, sizes | {"r": rank}, dtype="float32")
        assert f"parallelize(fpos1, GPUGroup, {group}, Segment)" in str(schedule)
        assert call.grid[0] == -(-10_000 // (256 // min(rank, 8)))
    schedule, call = chosen(mttkrp, sizes | {"r": 64}, dtype="float32")
    assert "Segment" not in str(schedule) and call.grid[0] == math.ceil(10_000 / 256)
    in_b = assign("ijk,ir,kr->jr", {"A": CSF(3)})  # j is no first level: no segments
    assert "Segment" not in str(chosen(in_b, sizes | {"r": 16}, dtype="float32")[0])


def test_what_has_no_schedule_is_refused_with_the_reasons():
    product = assign("ij,jk->ik", {"A": CSR})
    with pytest.raises(ScheduleError, match="no factor is sparse"):
        next(presets_cuda.cuda(assign("ij,jk->ik"), {"i": 2, "j": 2, "k": 2}))

    def refused(schedule):
        raise NotImplementedError("not here")

    with pytest.raises(NotImplementedError, match="segments: not here; .*entries: not here"):
        presets_cuda.first(product, {"i": 5, "j": 5, "k": 8}, refused)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_no_kernel_spills(arch):
    for n, (subscripts, format) in enumerate(PRODUCTS.values()):
        dtype = ("float32", "float64", "bfloat16")[n % 3]
        format = require_stored(format, len(subscripts.partition(",")[0]), "test")
        words, _, output = subscripts.partition("->")
        sparse = {"A": format}
        if output == words.split(",")[0]:
            sparse["ABCDEF"[words.count(",") + 1]] = format
        sizes = {index: SIZES[index] for index in words if index.isalpha()}
        blocks = format.block_shape or (1,)
        sizes = {index: -(-size // blocks[0]) * 4 for index, size in sizes.items()}
        _, call = chosen(assign(subscripts, sparse), sizes, dtype=dtype)
        assert resources(call.source, arch)[1:] == (0, 0), (subscripts, call.source)
