"""The SDDMM kernels compile for every architecture without spills; launches are as planned."""

import dataclasses
import itertools
import zlib

import pytest
from cuda_sources import INCLUDE, require_nvrtc, resources
from tolerance import DTYPES

from sgap_jax import Problem, Schedule, choose_schedule, legal_points
from sgap_jax.launch import nvrtc
from sgap_jax.launch.sddmm import launch_plan
from sgap_jax.launch.sddmm_operands import PLAIN, OperandShapes
from sgap_jax.schedules.point import algorithm

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
PROBLEM = Problem("sddmm", (1000, 900), 20_000, n=128, platform="cuda")
POINTS = list(legal_points(PROBLEM))
# float32 in its most common variant, then the others.
VARIANTS = [("float32", 128), *itertools.product(DTYPES, (128, 127, 32, 513))]
WEIGHTED, SCALED = OperandShapes(weights=(1, 20_000)), OperandShapes(scale=(1, 1))
FACTORS = (PLAIN, WEIGHTED, SCALED, OperandShapes(weights=(1, 20_000), scale=(1, 1)))


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def check_registers(point, problem, arch, shapes=PLAIN):
    registers, stack, spills = resources(launch_plan(problem, point, shapes).source, arch)
    assert (stack, spills) == (0, 0), f"{point} for {problem}"
    assert registers <= 64, f"{point} for {problem}"


@pytest.mark.parametrize("family", ["row", "nnz"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.seconds(all=30)
def test_every_point_compiles_without_spills_or_local_memory(arch, family):
    # Each on one architecture and in one variant, since every one is compiled.
    points = [point for point in POINTS if algorithm(point, "sddmm") == family]
    assert points
    for point in points:
        i = zlib.crc32(str(point).encode())
        if ARCHITECTURES[i % 3] == arch:
            dtype, d = VARIANTS[i // 3 % len(VARIANTS)]
            problem = dataclasses.replace(PROBLEM, dtype=dtype, n=d)
            check_registers(point, problem, arch, FACTORS[i // 64 % 4])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_points_of_most_registers_stay_within_64(arch):
    # 64 bytes of X in each lane, and as many loads in flight as the plan allows.
    for text, d in (("{<1 row, 4 col>, 8}", 128), ("{<1/16 row, 4 col>, 16}", 128)):
        check_registers(Schedule.parse(text), dataclasses.replace(PROBLEM, n=d), arch)
    for d in (128, 127, 126, 8):
        problem = dataclasses.replace(PROBLEM, n=d)
        for shapes in (PLAIN, FACTORS[-1]):
            check_registers(choose_schedule(problem), problem, arch, shapes)


def test_vectors_where_the_features_allow_them():
    for text, d in itertools.product(("{<1/8 row, 4 col>, 8}", "{<4 nnz, 4 col>, 8}"), (128, 126)):
        source = launch_plan(dataclasses.replace(PROBLEM, n=d), Schedule.parse(text)).source
        assert ("ld.global.nc.v4.f32" in nvrtc.ptx(source, "compute_90", INCLUDE)) == (d == 128)


def test_a_row_of_x_is_loaded_once_where_it_fits():
    # 4 nonzeros of one step each a round: with X in registers only their 4 loads are in the loop.
    point = Schedule.parse("{<1 row, 4 col>, 32}")
    kept, again = (
        nvrtc.ptx(
            launch_plan(dataclasses.replace(PROBLEM, n=d), point).source, "compute_90", INCLUDE
        )
        for d in (128, 1024)
    )
    assert kept.count("ld.global.nc.v4.f32") == 1 + 4
    assert again.count("ld.global.nc.v4.f32") == 1 + 2


def constants(text, **changes):
    plan = launch_plan(dataclasses.replace(PROBLEM, **changes), Schedule.parse(text))
    return plan.kernel, plan.source.split("<", 1)[1].split(">(")[0].split(", ")[1:]


def test_constants():
    # nonzeros, columns, lanes, at once, block, vector, weighted, scaled
    assert constants("{<3 nnz, 2 col>, 2} worker_dim_r=1/2") == (
        "SddmmNnzKernel",
        ["6", "2", "2", "2", "256", "true", "false", "false"],
    )
    # rows, groups a row, columns, lanes, loads kept, at once, block, vector
    row = "{<2 row, 4 col>, 8} worker_dim_r=1/4 block_size=128"
    assert constants(row, n=33)[1] == ["8", "1", "4", "8", "2", "2", "128", *3 * ["false"]]
    assert constants("{<1/32 row, 1 col>, 8}", n=64)[1][1:6] == ["4", "1", "8", "8", "2"]
    assert constants("{<1/32 row, 1 col>, 8}", n=1000)[1][4] == "0"
    # Parameters that would overflow in the kernel are clamped below 2^31.
    assert constants(f"{{<{2**30} nnz, 1 col>, 2}} worker_dim_r=1/4")[1][0] == str(2**31 - 1)


def test_launches():
    nnz, row, split = (
        launch_plan(PROBLEM, Schedule.parse(text))
        for text in (
            "{<4 nnz, 4 col>, 8} worker_dim_r=1/2",
            "{<2 row, 4 col>, 8}",
            "{<1/32 row, 4 col>, 8} block_size=128",
        )
    )
    # 2500 groups of 8 windowed nonzeros, 32 of them in a block
    assert (nnz.grid, nnz.block, nnz.zero) == ((79, 1, 1), (256, 1, 1), ())
    assert (row.grid, row.zero) == ((16, 1, 1), ())  # 500 groups
    assert (split.grid, split.block) == ((250, 1, 1), (128, 1, 1))  # 4000 groups, 16 in a block
    assert nnz.scalars == (1000, 20_000, 128, 0, 0, 0, 0, 1, 0)
    many = dataclasses.replace(PROBLEM, batch=70_000)
    own = OperandShapes((70_000,), (70_000,), (70_000, 20_000), (70_000, 1))
    all = launch_plan(many, POINTS[0], own)
    assert all.grid[2] == 65535
    assert all.scalars[3:] == (1000 * 128, 900 * 128, 20_000, 1, 70_000, 0)
    assert launch_plan(many, POINTS[0], OperandShapes(y=(70_000,))).scalars[3:5] == (0, 900 * 128)
    assert launch_plan(many, POINTS[0], WEIGHTED).scalars[3:7] == (0, 0, 0, 0)


def test_what_multiplies_the_sums_is_a_constant_of_the_kernel():
    flags = [
        launch_plan(PROBLEM, POINTS[0], s).source.split(">(")[0].split(", ")[-2:] for s in FACTORS
    ]
    false, true = "false", "true"
    assert flags == [[false, false], [true, false], [false, true], [true, true]]
    loads = [
        nvrtc.ptx(launch_plan(PROBLEM, POINTS[0], s).source, "compute_90", INCLUDE).count("ld.")
        for s in FACTORS
    ]
    assert loads[0] < min(loads[1:3]) and max(loads[1:3]) < loads[3]


def test_an_empty_problem_has_a_launch_too():
    for shape, nnz, d in (((0, 5), 0, 3), ((5, 0), 0, 3), ((5, 5), 0, 3), ((5, 5), 7, 0)):
        problem = Problem("sddmm", shape, nnz, n=d, platform="cuda")
        for point in legal_points(problem):
            plan = launch_plan(problem, point)
            assert min(plan.grid) == 1 and plan.zero == ()


def test_the_default_takes_what_divides_the_features_and_no_more_lanes_than_they_fill():
    for d, text in (
        (128, "{<4 nnz, 4 col>, 8}"),
        (126, "{<4 nnz, 2 col>, 16}"),
        (127, "{<4 nnz, 1 col>, 32}"),
        (16, "{<4 nnz, 4 col>, 4}"),
        (5, "{<4 nnz, 1 col>, 4}"),
        (0, "{<4 nnz, 4 col>, 1}"),
    ):
        assert str(choose_schedule(dataclasses.replace(PROBLEM, n=d))) == text


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_explain_says_who_owns_and_who_writes(point):
    problem = dataclasses.replace(PROBLEM, batch=3)
    text = point.explain(problem)
    for part in ("grid:", "block:", "group:", "lane:", "write:", "column_indices", str(point)):
        assert part in text
    assert "atomic" not in text and f"{point.blocks(problem)} blocks" in text
    assert ("row_offsets" in text) == (algorithm(point, "sddmm") == "row")
    assert ("groups share each row" in text) == (point.workers_in_row > 1)
