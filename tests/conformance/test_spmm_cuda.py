"""The SpMM kernels compile for every architecture without spills; launches are as planned."""

import dataclasses
import gc
import itertools
import re
import zlib
from fractions import Fraction

import pytest
from cuda_sources import INCLUDE, require_nvrtc, resources, resources_of
from tolerance import DTYPES

from sgap_jax import AtomicParallelism, Problem, Schedule, choose_schedule, legal_points
from sgap_jax.launch import nvrtc, sddmm
from sgap_jax.launch.spmm import launch_plan, merge_plan, output_dtype
from sgap_jax.schedules.point import algorithm

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
PROBLEM = Problem("spmm", (1000, 900), 20_000, n=128, platform="cuda")
POINTS = list(legal_points(PROBLEM))


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def variants(point):
    """float32 in its most common variant, and another variant for each point."""
    yield PROBLEM
    rest = list(itertools.product(DTYPES, (128, 127), (False, True)))[1:]
    dtype, n, permuted = rest[POINTS.index(point) % len(rest)]
    yield dataclasses.replace(PROBLEM, dtype=dtype, n=n, permuted=permuted)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("family", ["row", "row_group", "nnz", "nnz_group"])
@pytest.mark.seconds(all=30)
def test_every_point_compiles_without_spills_or_local_memory(family, arch):
    points = [point for point in POINTS if algorithm(point, "spmm") == family]
    sources = []
    for point in points:
        # Windows of several nonzeros a lane: each on one architecture.
        several = family == "nnz_group" and point.nnz > 1
        turn = zlib.crc32(str(point).encode()) % 3
        if several and turn != ARCHITECTURES.index(arch):
            continue
        if arch == "sm_80" and turn:  # as many registers as for sm_90, see test_default_points
            continue
        sources += [launch_plan(problem, point).source for problem in variants(point)]
    assert sources
    for kernel, (registers, stack, spills) in resources_of(sources, arch).items():
        assert (stack, spills) == (0, 0), kernel
        assert registers <= 64, kernel


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "sm_75", "sm_86", "sm_89", "sm_120"])
@pytest.mark.seconds(all=30)
def test_pieces_of_rows_and_their_sums_compile_without_spills(arch):
    calls = []
    for dtype, n, permuted in itertools.product(DTYPES, (128, 127), (False, True)):
        problem = dataclasses.replace(PROBLEM, dtype=dtype, n=n, permuted=permuted)
        for group in (1, 8):
            for col in (4, 1):
                row = 1 if group == 1 else Fraction(1, group)
                point = AtomicParallelism(row=row, col=col, group=group, chunk=64)
                calls += [launch_plan(problem, point), merge_plan(problem, point)]
    sources = {call.source for call in calls}
    turn = [arch == "sm_80" or zlib.crc32(f"{x}{arch}".encode()) % 2 == 0 for x in sources]
    sources = [x for x, mine in zip(sources, turn, strict=True) if mine]
    for kernel, (registers, stack, spills) in resources_of(sources, arch).items():
        assert (stack, spills) == (0, 0), kernel
        assert registers <= 64, kernel


def test_local_memory_is_noticed():
    source = """
    extern "C" __global__ void Kernel(int* p, int i) {
      int many[64];
      for (int j = 0; j < 64; ++j) many[p[j] & 63] = j;
      p[0] = many[i];
    }"""
    _, stack, _ = resources(source, "sm_90")
    assert stack >= 256


def test_a_cubin_has_the_kernel_under_its_mangled_name():
    call = launch_plan(PROBLEM, Schedule.parse("{<1/8 row, 4 col>, 8}"))
    compiled = nvrtc.compile(call.source, arch="sm_90", options=INCLUDE)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.name.startswith("_ZN4sgap") and call.kernel in compiled.name


def test_vectors_where_the_columns_allow_them():
    point = Schedule.parse("{<1/8 row, 4 col>, 8}")
    for n, vector in ((128, True), (126, False), (4, True), (1, False)):
        source = launch_plan(dataclasses.replace(PROBLEM, n=n), point).source
        text = nvrtc.ptx(source, "compute_90", INCLUDE)
        assert ("ld.global.nc.v4.f32" in text) == ("st.global.v4.f32" in text) == vector


@pytest.mark.parametrize(
    "text", ["{<1 row, 4 col>, 1}", "{<1/8 row, 1 col>, 8}", "{<4 nnz, 1 col>, 1}"]
)
def test_four_entries_of_a_row_are_in_flight_together(text):
    """A loop that may end after each entry waits for its load before it starts the next."""
    source = launch_plan(PROBLEM, Schedule.parse(text)).source
    pieces = nvrtc.ptx(source, "compute_90", INCLUDE).split("bra ")
    assert max(piece.count("fma.rn.f32") for piece in pieces) >= 4 * Schedule.parse(text).col
    assert max(piece.count("ld.global.nc.u32") for piece in pieces) >= 4


def spmv_loads(text, **changes):
    """Vector loads (of values, of indices) in a kernel of one column."""
    problem = dataclasses.replace(PROBLEM, n=1, **changes)
    products = (problem.batch, 1)
    source = launch_plan(problem, Schedule.parse(text), products).source
    code = nvrtc.ptx(source, "compute_90", INCLUDE)
    return tuple(
        max((int(v) for v in re.findall(rf"ld\.global\.nc\.v(\d)\.{kind}", code)), default=1)
        for kind in ("f32", "u32")
    )


def test_spmv_reads_as_many_values_and_indices_at_once_as_are_aligned():
    assert spmv_loads("{<4 nnz, 1 col>, 32}") == (4, 4)
    assert spmv_loads("{<32 nnz, 1 col>, 2}") == (4, 4)
    assert spmv_loads("{<2 nnz, 1 col>, 32}") == (2, 2)
    assert spmv_loads("{<3 nnz, 1 col>, 32}") == (1, 1)
    assert spmv_loads("{<4 nnz, 1 col>, 32}", permuted=True) == (1, 4)
    # The values of the next batch member start where those of the first end.
    assert spmv_loads("{<4 nnz, 1 col>, 32}", batch=2, nnz=20_002) == (2, 2)
    assert spmv_loads("{<4 nnz, 1 col>, 32}", batch=2, nnz=20_001) == (1, 1)


def test_a_schedule_of_a_derived_class_has_the_launch_of_its_class():
    class Named(AtomicParallelism):
        pass

    try:
        for op, plan in (("spmm", launch_plan), ("sddmm", sddmm.launch_plan)):
            problem = dataclasses.replace(PROBLEM, op=op)
            point = choose_schedule(problem)
            named = Named(
                **{field.name: getattr(point, field.name) for field in dataclasses.fields(point)}
            )
            assert plan(problem, named) == plan(problem, point)
    finally:
        del Named, named
        gc.collect()  # `Schedule.parse` reads a text as a class of the caller's, while there is one


def test_launches():
    row, group, split, nnz, segments = (
        launch_plan(PROBLEM, Schedule.parse(text))
        for text in (
            "{<2 row, 4 col>, 1}",
            "{<1/8 row, 4 col>, 8} tile_size=32 worker_dim_r=1/2",
            "{<1/32 row, 4 col>, 8}",
            "{<16 nnz, 4 col>, 1}",
            "{<1 nnz, 2 col>, 16} block_size=128",
        )
    )
    # 32 lanes cover the columns; 8 workers of 2 rows in a block
    assert (row.grid, row.block, row.zero) == ((63, 1, 1), (256, 1, 1), ())
    # 8 groups of 8 lanes cover a tile of 32 columns; 4 workers of 2 rows in a block
    assert (group.grid, group.zero) == ((125, 4, 1), ())
    assert (split.grid, split.zero) == ((4000, 1, 1), (0,))
    assert (nnz.grid, nnz.zero) == ((157, 1, 1), (0,))
    assert (segments.grid, segments.block) == ((1250, 8, 1), (128, 1, 1))
    assert row.scalars == (1000, 128, 0, 0, 1, 20_000, 0)
    batched = dataclasses.replace(PROBLEM, batch=70_000)
    many = launch_plan(batched, Schedule.parse("{<1 row, 1 col>, 1}"), (70_000, 1))
    assert many.grid[2] == 65535 and many.scalars == (1000, 128, 20_000, 0, 70_000, 20_000, 0)
    assert launch_plan(batched, POINTS[0], (1, 70_000)).scalars[2:4] == (0, 900 * 128)


def test_an_empty_problem_has_a_launch_too():
    for shape, nnz, n in (((0, 5), 0, 3), ((5, 0), 0, 3), ((5, 5), 0, 3), ((5, 5), 7, 0)):
        problem = Problem("spmm", shape, nnz, n=n, platform="cuda")
        for point in legal_points(problem):
            assert min(launch_plan(problem, point).grid) == 1


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_16_bit_outputs_are_never_added_to(point):
    for dtype in DTYPES:
        out = output_dtype(point, dtype)
        assert out == dtype or (out == "float32" and not point.deterministic)
        call = launch_plan(dataclasses.replace(PROBLEM, dtype=dtype), point)
        assert (call.zero == ()) == point.deterministic
