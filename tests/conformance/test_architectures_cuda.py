"""Every kernel compiles for every architecture, and the default ones without spills where wheels
bring no code; before sm_80 the default schedules are those that run there, others are refused."""

import dataclasses
import functools
import itertools
import re
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import HEADERS, require_nvrtc, resources_of
from emulated_launch import emulate

from sgap_jax import (
    CVS,
    AttentionTile,
    OctetTile,
    PaperOctetTile,
    Problem,
    Schedule,
    SparseArray,
    SubwarpTile,
    WarpTile,
    choose_schedule,
    spmm,
)
from sgap_jax.launch import attention, gspmm, launch, nvrtc
from sgap_jax.launch.attention_shapes import AttentionShapes, AttentionTerms
from sgap_jax.launch.defaults import NAMES, default_calls
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.launch.row_reduce import launch_plan as row_plan
from sgap_jax.launch.sddmm import launch_plan as sddmm_plan
from sgap_jax.launch.spmm import launch_plan as spmm_plan
from sgap_jax.launch.spmm import merge_plan
from sgap_jax.primitives import _define

# sm_90 and sm_100 have tests of their own, and sm_80 one of the kernels with tensor cores.
OTHERS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120")
EVERY = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
TENSOR_CORES = ("spmm_vectors", "sddmm_vectors", "attention")
OCTETS = Problem(
    "spmm", (1000, 900), 16_000, n=64, dtype="bfloat16", format=CVS(8), platform="cuda"
)


def in_the_sources():
    """The names of all kernels in cuda/. Kernels of compiled loops are printed for a schedule:
    tests/compiler compiles those."""
    bounds = r"__launch_bounds__\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
    kernel = re.compile(rf"__global__\s+void\s+(?:{bounds}\s+)?(\w+)\(")
    texts = [path.read_text() for path in HEADERS.rglob("*.cuh")]
    found = [name for text in texts for name in kernel.findall(text)]
    assert len(found) == sum(text.count("__global__ void") for text in texts)
    return set(found)


def besides_the_defaults():
    """Launches of the kernels that no default schedule of `default_calls` has."""
    entries = dataclasses.replace(OCTETS, format="CSR", dtype="float32")
    for text in ("{<32 nnz, 4 col>, 1}", "{<1 nnz, 4 col>, 32}"):
        yield spmm_plan(entries, Schedule.parse(text))
    pieces = Schedule.parse("{<1 row, 4 col>, 1} chunk=64")
    yield spmm_plan(entries, pieces)
    yield merge_plan(entries, pieces)
    messages, nonzeros = (
        dataclasses.replace(entries, op="gspmm"),
        Schedule.parse("{<32 nnz, 4 col>, 1}"),
    )
    yield gspmm.extremum_plan(messages, nonzeros, add=False, minimum=False)
    yield gspmm.arg_gather_to_x_plan(messages, nonzeros)
    yield gspmm.sums_plan(messages, nonzeros)
    yield gspmm.merge_plan(messages, nonzeros, minimum=False)
    yield gspmm.merge_plan(messages, nonzeros)
    sampled = dataclasses.replace(entries, op="sddmm")
    yield sddmm_plan(sampled, Schedule.parse("{<1 row, 4 col>, 8}"))
    half = dataclasses.replace(OCTETS, dtype="float16")
    for tile in (WarpTile(8), PaperOctetTile(8)):
        yield spmm_plan(half, tile)
        yield sddmm_plan(dataclasses.replace(half, op="sddmm"), tile)
    shapes = AttentionShapes(heads=4, key_heads=4, value_depth=64)
    for problem, octet in ((entries, False), (OCTETS, True)):
        problem = dataclasses.replace(problem, op="attention", batch=4)
        tile = AttentionTile(16, octet=octet, chunk=64)
        yield attention.forward_plan(problem, tile, shapes, 0.1)
        yield attention.merge_plan(problem, tile, shapes, 0.1)
        yield attention.rows_backward_plan(problem, tile, shapes, 0.1, False)
        yield attention.keys_backward_plan(problem, tile, shapes, 0.1)
    yield spmm_plan(OCTETS, OctetTile(8, chunk=64))
    asked = dataclasses.replace(entries, op="attention", batch=4)
    tile, terms = AttentionTile(16), AttentionTerms(frozenset(["slopes", "seeds"]), softcap=2.0)
    yield attention.forward_plan(asked, tile, shapes, 0.1, terms)
    yield attention.rows_backward_plan(asked, tile, shapes, 0.1, False, terms)
    yield attention.keys_backward_plan(asked, tile, shapes, 0.1, terms)


@functools.cache
def one_of_each():
    """{name: a launch of a kernel with this name}."""
    defaults = (call for name in NAMES for call in default_calls(name).values())
    found = {}
    for call in itertools.chain(besides_the_defaults(), defaults):
        found.setdefault(re.search(r"sgap::(\w+)<", call.source)[1], call)
    return found


def test_every_kernel_of_the_sources_is_compiled_below():
    assert set(one_of_each()) == in_the_sources()


@pytest.mark.tier("all")
@pytest.mark.parametrize("arch", EVERY)
@pytest.mark.seconds(all=30)
def test_every_kernel_compiles_for_every_architecture(arch):
    """Without spills; all that are left out say that they need a later one."""
    require_nvrtc()
    calls = [call for call in one_of_each().values() if not (call.requires and arch == "sm_75")]
    assert all(call.requires == "sm_80" for call in one_of_each().values() if call.requires)
    for kernel, (_, stack, spills) in resources_of([x.source for x in calls], arch).items():
        assert (stack, spills) == (0, 0), kernel


def on(problem, arch="sm_75"):
    return dataclasses.replace(problem, arch=arch)


@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.seconds(all=30)
def test_default_kernels_compile_without_spills_or_local_memory(name, arch):
    """Each kernel on one of these; those with tensor cores, which take most registers, on sm_120
    too, whose ptxas takes more of them than those before."""
    require_nvrtc()
    turn, octets = OTHERS.index(arch), name.startswith(TENSOR_CORES)
    sources = [
        source
        for source, call in default_calls(name).items()
        if zlib.crc32(source.encode()) % len(OTHERS) == turn or (octets and arch == "sm_120")
        if not (call.requires and arch == "sm_75")
    ]
    for kernel, (_, stack, spills) in resources_of(sources, arch).items():
        assert (stack, spills) == (0, 0), kernel


def test_before_tensor_cores_defaults_run_on_cuda_cores():
    assert isinstance(choose_schedule(OCTETS), OctetTile)
    assert choose_schedule(on(OCTETS, "sm_80")) == choose_schedule(OCTETS)
    for arch in ("sm_70", "sm_75"):
        assert isinstance(choose_schedule(on(OCTETS, arch)), SubwarpTile)
        sampled = dataclasses.replace(on(OCTETS, arch), op="sddmm")
        assert isinstance(choose_schedule(sampled), SubwarpTile)
        attention = dataclasses.replace(on(OCTETS, arch), op="attention")
        assert not choose_schedule(attention).octet
        assert choose_schedule(dataclasses.replace(attention, arch=None)).octet


@pytest.mark.parametrize("tile", [OctetTile(8), WarpTile(8)])
def test_tiles_for_tensor_cores_are_refused_before_sm_80(tile):
    tile.check(OCTETS)
    with pytest.raises(NotImplementedError, match="tensor cores of sm_80 and later, got sm_75"):
        tile.check(on(OCTETS))


def test_of_attention_and_of_volta():
    attention = dataclasses.replace(OCTETS, op="attention")
    AttentionTile(16).check(on(attention))
    with pytest.raises(NotImplementedError, match="tensor cores of sm_80 and later, got sm_75"):
        AttentionTile(16, octet=True).check(on(attention))
    volta = dataclasses.replace(OCTETS, dtype="float16")
    PaperOctetTile(8).check(on(volta))  # its instruction is older
    WarpTile(8).check(on(volta))


@pytest.mark.parametrize("arch", ["75", "sm_", 75, "compute_90"])
def test_a_problem_with_no_architecture(arch):
    with pytest.raises(ValueError, match="Problem: arch: expected None or a name like 'sm_90'"):
        on(OCTETS, arch)


def lowered_on(arch, monkeypatch):
    """The kernel that a product of column vectors is lowered to for a GPU of `arch`."""
    monkeypatch.setenv("SGAP_CUDA_ARCH", arch)
    monkeypatch.setenv("SGAP_CACHE_DIR", "")
    made = []
    jax.clear_caches()  # JAX does not know that the architecture has changed

    def compiled(call, *_):
        made.append(call)
        return launch.Cubin("kernel", b"code")

    monkeypatch.setattr(launch, "compile_call", compiled)
    A = SparseArray.from_dense(jnp.ones((16, 8), jnp.bfloat16), format=CVS(8))
    check = jax.export.DisabledSafetyCheck.custom_call(launch.TARGET)
    B = jnp.ones((8, 64), jnp.bfloat16)
    jax.export.export(jax.jit(spmm), platforms=("cuda",), disabled_checks=[check])(A, B)
    return [call.kernel for call in made]


def test_the_fallback_warns_once(monkeypatch):
    _define._warn_of_slower.cache_clear()
    with pytest.warns(RuntimeWarning, match="sm_75 lacks the tensor-core instructions"):
        assert lowered_on("sm_75", monkeypatch) == ["SpmmSubwarpKernel"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lowered_on("sm_75", monkeypatch) == ["SpmmSubwarpKernel"]
        assert lowered_on("sm_90", monkeypatch) == ["SpmmOctetKernel"]


def test_what_a_kernel_requires():
    call = KernelCall("source", "Kernel", (1,), (1,))
    assert call.target("sm_75") == "sm_75"
    newer = dataclasses.replace(call, requires="sm_80")
    assert [newer.target(arch) for arch in ("sm_80", "sm_120")] == ["sm_80", "sm_120"]
    with pytest.raises(NotImplementedError, match="Kernel has instructions of sm_80 and later"):
        newer.target("sm_75")
    own = dataclasses.replace(call, requires="sm_90a")
    assert own.target("sm_90") == own.target("sm_90a") == "sm_90a"
    for arch in ("sm_80", "sm_100"):
        with pytest.raises(NotImplementedError, match=f"sm_90a alone, got {arch}"):
            own.target(arch)
    octets = spmm_plan(OCTETS, OctetTile(8))
    with pytest.raises(NotImplementedError, match="SpmmOctetKernel has instructions of sm_80"):
        launch.compile_call(octets, nvrtc, "sm_75", launch.CubinCache(None))


# `setmaxnreg` is of sm_90a, and of no GPU after it without that letter.
OWN = 'extern "C" __global__ void k() { asm volatile("setmaxnreg.dec.sync.aligned.u32 64;"); }'


def test_a_kernel_may_ask_for_instructions_of_one_architecture():
    require_nvrtc()
    call, cubins = KernelCall(OWN, "k", (1,), (128,)), launch.CubinCache(None)
    with pytest.raises(nvrtc.CompilationError, match="setmaxnreg"):
        launch.compile_call(call, nvrtc, "sm_90", cubins)
    call = dataclasses.replace(call, requires="sm_90a")
    assert launch.compile_call(call, nvrtc, "sm_90", cubins).kernel == "k"


@pytest.mark.parametrize("op", ["row_sum", "row_max"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_replaces_missing_instructions_gives_the_same_bits(op, dtype):
    """Rounding to bfloat16, and a maximum that is NaN if a value is: from sm_80 on these are
    instructions."""
    require_nvrtc()
    rng, rows, length = np.random.default_rng(0), 64, 8
    values = rng.standard_normal((1, rows * length)).astype(dtype)
    values[0, :40:9] = [np.nan, np.inf, -np.inf, -0.0, 3e38]
    offsets = np.arange(0, rows * length + 1, length, dtype=np.int32)
    problem = Problem(op, (rows, 100), rows * length, dtype=dtype, platform="cuda")
    call = row_plan(problem, choose_schedule(problem))
    results = [
        emulate(call, [values, offsets], [((1, rows), dtype)], arch=arch)[0]
        for arch in ("compute_75", "compute_90")
    ]
    older, newer = (result.astype(np.float32) for result in results)  # exactly; NaN has many bits
    assert np.isnan(newer[0, 0]) and not np.isnan(newer[0, 5:]).any()
    np.testing.assert_array_equal(older, newer)
