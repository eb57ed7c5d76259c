"""The SDDMM kernels of octet tiles compile without spills; launches, defaults and errors."""

import dataclasses
import functools
import itertools
import zlib

import pytest
from cuda_sources import INCLUDE, require_nvrtc, resources

from sgap_jax import OctetTile, Problem, Schedule, ScheduleError, choose_schedule
from sgap_jax.launch import nvrtc
from sgap_jax.launch.sddmm import launch_plan
from sgap_jax.launch.sddmm_operands import PLAIN, OperandShapes
from sgap_jax.schedules.tiles import sddmm_registers

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
LENGTHS = (2, 4, 8, 16, 32)
DTYPES = ("float16", "bfloat16", "float32")
PROBLEM = Problem(
    "sddmm", (1000, 900), 160_000, n=64, dtype="bfloat16", format="CVS(8)", platform="cuda"
)


def problem_of(tile, **changes):
    return dataclasses.replace(PROBLEM, format=f"CVS({tile.vector_length})", **changes)


@functools.cache
def legal():
    """Every tile that the kernel takes, each with a dtype."""
    found = []
    sizes = (range(16, 513, 16), range(16, 129, 16), range(1, 5), DTYPES)
    for length, (n, k, stages, dtype) in itertools.product(LENGTHS, itertools.product(*sizes)):
        tile = OctetTile(length, tile_n=n, tile_k=k, stages=stages, tf32=dtype == "float32")
        try:
            tile.check(problem_of(tile, dtype=dtype))
            found.append((tile, dtype))
        except ScheduleError:
            pass
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_sample_of_the_tiles_compiles_without_spills_or_local_memory(arch):
    require_nvrtc()
    # Tiles that just fit into 128 registers (80) and into 255, and others.
    full = [pair for pair in legal() if sddmm_registers(*pair) in (78, 80, 158, 160)]
    rank = lambda pair: zlib.crc32(f"{pair} {arch}".encode())
    for i, (tile, dtype) in enumerate(sorted(full, key=rank)[:5] + sorted(legal(), key=rank)[:5]):
        shapes = (PLAIN, OperandShapes(weights=(1, 20_000, 8), scale=(1, 1)))[i % 2]
        problem = problem_of(tile, dtype=dtype, n=(64, 36, 31)[i % 3])
        source = launch_plan(problem, tile, shapes).source
        used, stack, spills = resources(source, arch)
        assert (stack, spills) == (0, 0), f"{tile} for {dtype}"
        assert used <= (128 if sddmm_registers(tile, dtype) <= 80 else 255), f"{tile} for {dtype}"


def test_loads_are_of_16_bytes_and_nothing_is_shuffled_but_indices():
    require_nvrtc()
    for tile, d, load in (
        (OctetTile(8, tile_n=32, tile_k=64), 64, "v4.u32"),
        (OctetTile(8, tile_n=32, tile_k=48), 36, "v2.u32"),
        (OctetTile(8, tile_n=32, tile_k=64), 63, "u16"),
    ):
        text = nvrtc.ptx(launch_plan(problem_of(tile, n=d), tile).source, "compute_90", INCLUDE)
        features = 64 if load != "v2.u32" else 48
        loops = 2 - (load == "u16")  # of features in whole steps, and of others
        steps = 2 * loops  # before a loop, and in it
        words = 5 * features // {"v4.u32": 32, "v2.u32": 16, "u16": 4}[load]  # 4 rows of Y, 1 of X
        assert text.count(f"ld.global.nc.{load}") == steps * words
        assert text.count("mma.sync") == loops * 2 * features // 16
        assert text.count("shfl") == 4 and "ld.shared" not in text


def test_launches():
    plan = launch_plan(PROBLEM, OctetTile(8, tile_n=32, tile_k=64))
    # 20000 vectors in windows of 32, four of them in a block
    assert (plan.grid, plan.block, plan.zero) == ((157, 1, 1), (128, 1, 1), ())
    assert plan.scalars == (1000, 20_000, 64, 0, 0, 0, 0, 1, 0)
    assert "SddmmOctetKernel<sgap::bfloat16, 8, 32, 64, 1, 128, true, false, false>" in plan.source
    odd = dataclasses.replace(PROBLEM, n=63, dtype="float32")
    tile = OctetTile(8, tile_n=16, tile_k=16, stages=2, tf32=True)
    assert "<float, 8, 16, 16, 2, 128, false, false, false>" in launch_plan(odd, tile).source
    many = dataclasses.replace(PROBLEM, batch=70_000)
    own = OperandShapes((70_000,), (70_000,), (70_000, 20_000, 8), (70_000, 1))
    all = launch_plan(many, OctetTile(8), own)
    assert all.grid[2] == 65535
    assert all.scalars[3:] == (1000 * 64, 900 * 64, 160_000, 1, 70_000, 0)
    assert launch_plan(many, OctetTile(8), OperandShapes(y=(70_000,))).scalars[3:5] == (0, 900 * 64)


@pytest.mark.parametrize(("tile_k", "d", "vector"), [(16, 4, True), (32, 4, False), (48, 12, True)])
def test_a_load_is_one_vector_where_the_features_are_a_multiple_of_it(tile_k, d, vector):
    source = launch_plan(dataclasses.replace(PROBLEM, n=d), OctetTile(8, tile_k=tile_k)).source
    assert (", true, false, false>" in source) == vector


def test_an_empty_problem_has_a_launch_too():
    for shape, nnz, d in (((0, 5), 0, 3), ((5, 0), 0, 3), ((5, 5), 0, 3), ((5, 5), 56, 0)):
        problem = dataclasses.replace(PROBLEM, shape=shape, nnz=nnz, n=d)
        plan = launch_plan(problem, choose_schedule(problem))
        assert min(plan.grid) == 1 and plan.zero == ()


@pytest.mark.parametrize(
    ("length", "d", "row_length", "text"),
    [
        (8, 64, 100, "OctetTile(vector_length=8, tile_n=32, tile_k=64)"),
        (8, 64, 20, "OctetTile(vector_length=8, tile_n=16, tile_k=64)"),
        (16, 36, 100, "OctetTile(vector_length=16, tile_n=32, tile_k=48)"),
        (4, 63, 100, "OctetTile(vector_length=4, tile_n=32, tile_k=32)"),
        (32, 64, 100, "OctetTile(vector_length=32, tile_n=32, tile_k=32)"),
        (32, 36, 20, "OctetTile(vector_length=32, tile_n=16)"),
    ],
)
def test_the_default_of_16_bit_numbers(length, d, row_length, text):
    for dtype, m in itertools.product(("float16", "bfloat16"), (2048, 100_000)):
        problem = Problem("sddmm", (m, 1024), m * row_length, d, 1, dtype, f"CVS({length})", "cuda")
        tile = choose_schedule(problem)
        assert str(tile) == text and tile.deterministic
        tile.check(problem)
        assert Schedule.parse(text) == tile
        assert sddmm_registers(tile, dtype) <= 80


@pytest.mark.parametrize(
    "changes",
    [dict(dtype="float32"), dict(dtype="float64"), dict(format="CVS(3)"), dict(format="CSR")],
)
def test_other_problems_have_other_defaults(changes):
    assert not isinstance(choose_schedule(dataclasses.replace(PROBLEM, **changes)), OctetTile)


ERRORS = [
    (OctetTile(8), dict(platform="tpu"), NotImplementedError, ["sddmm", "cuda", "not on tpu"]),
    (OctetTile(8), dict(format="CSR"), NotImplementedError, ["column vectors", "CVS(8)"]),
    (OctetTile(4), dict(), ScheduleError, ["vectors of 4, got CVS(8)"]),
    (OctetTile(8), dict(dtype="float64"), NotImplementedError, ["float64", "bfloat16"]),
    (OctetTile(8), dict(dtype="int32"), NotImplementedError, ["int32", "Reference()"]),
    (OctetTile(8), dict(dtype="float32"), ScheduleError, ["10 bits", "tf32=True"]),
    (OctetTile(8, row_warps=2), dict(), ScheduleError, ["row_warps", "are of spmm", "tile_n"]),
    (OctetTile(8, swizzle=True), dict(), ScheduleError, ["swizzle", "are of spmm", "tile_n"]),
    (OctetTile(8, tile_n=144), dict(), ScheduleError, ["tile_n", "up to 128"]),
    (OctetTile(8, tile_n=128, tile_k=64), dict(), ScheduleError, ["202 registers", "160", "fewer"]),
    (
        OctetTile(8),
        dict(op="row_sum"),
        NotImplementedError,
        ["row_sum", "of spmm and sddmm"],
    ),
]


@pytest.mark.parametrize(("tile", "changes", "kind", "words"), ERRORS)
def test_what_no_kernel_does_is_refused_by_name(tile, changes, kind, words):
    problem = dataclasses.replace(PROBLEM, **changes)
    with pytest.raises(kind) as error:
        tile.check(problem)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(vector_length=3), "vector_length must be one of 2, 4, 8, 16, 32, got 3"),
        (dict(tile_n=24), "tile_n must be a multiple of 16 from 16 to 512, got 24"),
        (dict(tile_k=0), "tile_k must be a multiple of 16 from 16 to 128, got 0"),
        (dict(stages=5), "stages must be an int from 1 to 4, got 5"),
        (dict(tf32=1), "tf32 must be a bool, got 1"),
    ],
)
def test_illegal_fields_are_refused_by_name(fields, words):
    with pytest.raises(ScheduleError) as error:
        OctetTile(**fields)
    assert words in str(error.value)


@pytest.mark.parametrize("length", LENGTHS)
def test_explain_says_who_owns_and_who_writes(length):
    tile = OctetTile(length, tile_n=16, tile_k=32, stages=2)
    problem = problem_of(tile, batch=3)
    text = tile.explain(problem)
    blocks = -(-160_000 // length // 64)
    for part in ("grid:", "block:", "warp:", "lane:", "write:", "column_indices", str(tile)):
        assert part in text
    assert f"{blocks} blocks" in text and f"{160_000 // length} vectors of {length}" in text
    assert f"{min(length // 2, 4)} lanes for each vector" in text
    assert ("idle" in text) == (length < 8) and "2 such steps" in text
