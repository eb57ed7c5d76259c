"""The kernels of gspmm compile for every architecture without spills; launches are as planned."""

import dataclasses
import itertools

import pytest
from cuda_sources import require_nvrtc, resources_of
from tolerance import DTYPES

from sgap_jax import Problem, Schedule, legal_points
from sgap_jax.launch.gspmm import (
    arg_gather_plan,
    arg_gather_to_values_plan,
    arg_gather_to_x_plan,
    extremum_plan,
    merge_plan,
)

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
PROBLEM = Problem("gspmm", (1000, 900), 20_000, n=128, platform="cuda")
LEGAL = list(legal_points(PROBLEM))
# Every eighteenth of the many points of nonzeros, which are one kernel.
POINTS = [p for p in LEGAL if p.nnz is None] + [p for p in LEGAL if p.nnz is not None][::18]
ENTRIES = dataclasses.replace(PROBLEM, op="sddmm")


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def check(calls, arch):
    sources = [call.source for call in calls]
    for kernel, (registers, stack, spills) in resources_of(sources, arch).items():
        assert (stack, spills) == (0, 0) and registers <= 64, kernel


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.seconds(all=30)
def test_every_point_compiles_without_spills_or_local_memory(arch):
    """float32 in its most common variant, and another variant for each point."""
    rest = list(itertools.product(DTYPES, (128, 127), (False, True)))[1:]
    calls = []
    for i, point in enumerate(POINTS):
        dtype, n, permuted = rest[i % len(rest)]
        other = dataclasses.replace(PROBLEM, dtype=dtype, n=n, permuted=permuted)
        calls += [
            extremum_plan(PROBLEM, point, add=False, minimum=False),
            arg_gather_to_x_plan(other, point)
            if i % 2
            else extremum_plan(other, point, add=i % 4 < 2, minimum=i % 8 < 4),
        ]
        if point.nnz is not None:
            calls += [merge_plan(other, point), merge_plan(other, point, minimum=False)]
    check(calls, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_other_derivatives_compile_so_too(dtype, arch):
    calls = []
    for permuted in (False, True):
        problem = dataclasses.replace(ENTRIES, dtype=dtype, permuted=permuted)
        calls.append(arg_gather_plan(problem))
        for point in ("{<1 nnz, 4 col>, 32}", "{<4 nnz, 2 col>, 8}", "{<1 nnz, 1 col>, 1}"):
            calls.append(arg_gather_to_values_plan(problem, Schedule.parse(point)))
    check(calls, arch)


def test_launches():
    rows = extremum_plan(PROBLEM, Schedule.parse("{<2 row, 4 col>, 1}"), add=True, minimum=False)
    # 32 lanes cover the columns; 8 workers of 2 rows in a block
    assert (rows.grid, rows.block, rows.zero) == ((63, 1, 1), (256, 1, 1), ())
    assert rows.scalars == (1000, 128, 0, 0, 1, 1, 0, 20_000, 0)
    point = Schedule.parse("{<1/8 row, 4 col>, 8} tile_size=32 worker_dim_r=1/2")
    # 8 groups of 8 lanes cover a tile of 32 columns; 4 workers of 2 rows in a block
    group = arg_gather_to_x_plan(
        dataclasses.replace(PROBLEM, batch=70_000), point, (70_000, 1, 70_000)
    )
    assert group.grid == (125, 4, 65535)
    assert group.scalars == (1000, 128, 20_000, 0, 900 * 128, 70_000, 20_000, 0)
    gather = arg_gather_plan(dataclasses.replace(PROBLEM, permuted=True), (1, 1, 1))
    assert gather.grid == (450, 1, 1) and gather.scalars[:3] == (1000, 900, 128)
    values = arg_gather_to_values_plan(ENTRIES, Schedule.parse("{<4 nnz, 4 col>, 32}"))
    assert values.grid == (625, 1, 1) and values.scalars[:3] == (1000, 20_000, 128)


def test_an_empty_problem_has_a_launch_too():
    for shape, nnz, n in (((0, 5), 0, 3), ((5, 0), 0, 3), ((5, 5), 0, 3), ((5, 5), 7, 0)):
        problem = Problem("gspmm", shape, nnz, n=n, platform="cuda")
        for point in legal_points(problem):
            assert min(extremum_plan(problem, point, add=False, minimum=False).grid) == 1
            assert min(arg_gather_to_x_plan(problem, point).grid) == 1
        assert min(arg_gather_plan(problem).grid) == 1
        entries = dataclasses.replace(problem, op="sddmm")
        assert (
            min(arg_gather_to_values_plan(entries, Schedule.parse("{<1 nnz, 1 col>, 1}")).grid) == 1
        )
