"""The kernels of the row operations, of top_k and top_p, of the transposed structure and of bitmaps
compile for every architecture; launches are as planned."""

import dataclasses
import itertools
import re
import struct

import pytest
from cuda_sources import INCLUDE, require_nvrtc, resources, resources_of
from tolerance import DTYPES

from sgap_jax import Problem, Schedule, ScheduleError, choose_schedule, legal_points
from sgap_jax.launch import bitmap as bitmap_cuda
from sgap_jax.launch import nucleus as nucleus_cuda
from sgap_jax.launch import nvrtc
from sgap_jax.launch import row_reduce as row_reduce_cuda
from sgap_jax.launch import sparse_softmax as sparse_softmax_cuda
from sgap_jax.launch import transpose_structure as transpose_cuda
from sgap_jax.launch.top_k import select_plan, write_plan
from sgap_jax.schedules.schedule import GRID_Z

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
PROBLEM = Problem("row_sum", (1000, 0), 20_000, platform="cuda")
POINTS = list(legal_points(PROBLEM))
EIGHT = Schedule.parse("{<1/8 row, 1 col>, 8} worker_dim_r=1/2")


def softmax_plan(problem, point, scale=0.5):
    return sparse_softmax_cuda.launch_plan(problem, point, scale)


def jacobian_plan(problem, point, batches=(1, 1), scale=0.5):
    return sparse_softmax_cuda.jacobian_launch_plan(problem, point, scale, batches)


PLANS = {
    "row_sum": row_reduce_cuda.launch_plan,
    "row_max": row_reduce_cuda.launch_plan,
    "row_broadcast": row_reduce_cuda.launch_plan,
    "sparse_softmax": softmax_plan,
    "sparse_softmax_jacobian": jacobian_plan,
}


def problem_of(op, **changes):
    return dataclasses.replace(PROBLEM, op=op.removesuffix("_jacobian"), **changes)


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", PLANS)
def test_every_point_compiles_without_spills_or_local_memory(op, arch):
    for i, point in enumerate(POINTS):
        # float32 in its most common variant; other dtypes in turn, in another order for each
        # architecture.
        for dtype in {"float32", DTYPES[(i + ARCHITECTURES.index(arch)) % 4]}:
            call = PLANS[op](problem_of(op, dtype=dtype), point)
            registers, stack, spills = resources(call.source, arch)
            assert (stack, spills) == (0, 0), f"{point} in {dtype}"
            # At least 1024 such threads fit on a multiprocessor.
            assert registers <= 64, f"{point} in {dtype}"


@pytest.mark.parametrize("op", PLANS)
def test_no_block_spills_in_float64(op):
    for text in ("{<1 row, 1 col>, 1}", "{<1/16 row, 1 col>, 16} worker_dim_r=1/2"):
        for size in (32, 128, 512, 1024):
            point = Schedule.parse(f"{text} block_size={size}")
            call = PLANS[op](problem_of(op, dtype="float64"), point)
            assert resources(call.source, "sm_100")[1:] == (0, 0), str(point)


@pytest.mark.parametrize("op", ["row_sum", "sparse_softmax"])
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_the_loads_of_a_window_are_in_flight_together(op, point):
    """An unrolled loop that may end after each entry waits for each before it loads the next."""
    text = nvrtc.ptx(PLANS[op](problem_of(op), point).source, "compute_90", INCLUDE)
    before_arithmetic = text[: re.search(r"\b(add|sub)(\.rn)?\.f32", text).start()]
    assert before_arithmetic.count("ld.global.nc.f32") == 4


def test_the_points_are_those_of_rows():
    found = {str(point) for point in POINTS}
    groups = {f"{{<1/{r} row, 1 col>, {r}}}" for r in (2, 4, 8, 16, 32)}
    assert found == groups | {f"{{<{x} row, 1 col>, 1}}" for x in (1, 2, 4)}
    for op in PLANS:
        assert list(legal_points(problem_of(op))) == POINTS
        for text in ("{<1 nnz, 1 col>, 8}", "{<1/64 row, 1 col>, 8}", "{<1 row, 2 col>, 1}"):
            with pytest.raises(NotImplementedError, match="no kernel for the legal point"):
                Schedule.parse(text).check(problem_of(op))
        with pytest.raises(ScheduleError, match="leave tile_size out"):
            Schedule.parse("{<1/8 row, 1 col>, 8} tile_size=2").check(problem_of(op))


@pytest.mark.parametrize("op", PLANS)
def test_launches(op):
    # 32 groups of 8 lanes, 2 rows each; a lane for every 2 rows
    group, row = PLANS[op](problem_of(op), EIGHT), PLANS[op](problem_of(op), POINTS[1])
    assert (group.grid, group.block, group.zero) == ((16, 1, 1), (256, 1, 1), ())
    assert (row.grid, row.block, row.zero) == ((2, 1, 1), (256, 1, 1), ())
    assert group.scalars[:3] == (1000, 20_000, 1)
    many = PLANS[op](problem_of(op, batch=70_000), EIGHT)
    assert many.grid == (16, 1, 65535) and many.scalars[2] == 70_000


def test_the_scale_is_an_argument_and_an_operand_of_one_product_has_no_stride():
    problem = problem_of("sparse_softmax", batch=4)
    for scale in (0.5, -3.0, float("inf")):
        call = softmax_plan(problem, EIGHT, scale)
        assert struct.unpack("<d", struct.pack("<q", call.scalars[3])) == (scale,)
        assert call.source == softmax_plan(problem, EIGHT).source
    assert jacobian_plan(problem, EIGHT, (4, 1)).scalars[3:5] == (20_000, 0)
    assert jacobian_plan(problem, EIGHT, (1, 4)).scalars[3:5] == (0, 20_000)
    assert jacobian_plan(problem, EIGHT, (4, 1), -1.0).scalars[5] == -(1025 << 52)


@pytest.mark.parametrize("op", PLANS)
def test_an_empty_problem_has_a_launch_too(op):
    for m, nnz, batch in ((0, 0, 1), (0, 7, 1), (5, 0, 1), (5, 7, 0)):
        problem = problem_of(op, shape=(m, 0), nnz=nnz, batch=batch)
        for point in POINTS:
            assert PLANS[op](problem, point).grid == (1, 1, 1)


@pytest.mark.parametrize("op", PLANS)
def test_the_default_has_no_more_lanes_than_a_row_has_entries(op):
    for mean in (0, 0.5, 1.9, 2, 20, 500):
        point = choose_schedule(problem_of(op, nnz=int(1000 * mean)))
        assert point in POINTS
        assert point.group <= max(mean, 1) <= 500 / 32 * point.group


@pytest.mark.parametrize("op", list(PLANS)[:4])
def test_explain(op):
    text = EIGHT.explain(problem_of(op, batch=3))
    for part in (str(EIGHT), "1000 rows", "16 blocks", "3 products", "8 lanes share a row"):
        assert part in text
    assert "2 rows in turn" in text and "row_offsets[i] + lane, row_offsets[i + 1], 8" in text
    assert ("lane 0 of each group" in text) == (op in ("row_sum", "row_max"))
    assert "one lane has a row" in POINTS[0].explain(problem_of(op))


LENGTHS = [2, 3, 4, 8, 16, 32]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", PLANS)
def test_vectors_compile_without_spills_or_local_memory(op, arch):
    for i, (length, point) in enumerate(itertools.product(LENGTHS, POINTS)):
        # Each architecture takes a quarter; every length meets every dtype, and every point each
        # architecture.
        turn = i + i // len(POINTS) + ARCHITECTURES.index(arch) + list(PLANS).index(op)
        if turn % 4 and length != 8:
            continue
        problem = problem_of(op, dtype=DTYPES[turn // 4 % 4], format=f"CVS({length})")
        registers, stack, spills = resources(PLANS[op](problem, point).source, arch)
        assert (stack, spills) == (0, 0), f"{point} of {problem.format} in {problem.dtype}"
        assert registers <= 64, f"{point} of {problem.format} in {problem.dtype}"


@pytest.mark.parametrize("op", PLANS)
def test_launches_on_vectors(op):
    def grid(m, length, point):
        problem = problem_of(op, shape=(m, 0), format=f"CVS({length})")
        call = PLANS[op](problem, Schedule.parse(point))
        assert call.scalars[:3] == (m, 20_000, 1) and f", {length}>(" in call.source
        return call.grid

    # 8 rows of 4 lanes in each warp, 8 warps a block; the same for 2 sets of rows in turn
    assert grid(1000, 8, "{<1/4 row, 1 col>, 4}") == (16, 1, 1)
    assert grid(1000, 8, "{<1/4 row, 1 col>, 4} worker_dim_r=1/2") == (8, 1, 1)
    # the last 4 of 12 rows take lanes of their own, the last of 1001 rows those of 8
    assert grid(1000, 12, "{<1/8 row, 1 col>, 8}") == (32, 1, 1)
    assert grid(1001, 8, "{<1 row, 1 col>, 1} block_size=32") == (32, 1, 1)
    # rows of vectors of 3 are not interleaved, nor are rows whose group is a warp
    assert grid(1000, 3, "{<1/8 row, 1 col>, 8}") == grid(1000, 1, "{<1/8 row, 1 col>, 8}")
    assert grid(1000, 8, "{<1/32 row, 1 col>, 32}") == (125, 1, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_default_fills_a_warp_with_rows_side_by_side(length):
    for mean in (0.5, 3, 20, 500):
        problem = problem_of("sparse_softmax", nnz=int(1000 * mean), format=f"CVS({length})")
        point = choose_schedule(problem)
        assert point in POINTS and point.group * length <= 32
        assert point.group <= max(mean, 1)


@pytest.mark.parametrize("op", list(PLANS)[:4])
def test_explain_vectors(op):
    text = EIGHT.explain(problem_of(op, format="CVS(2)"))
    for part in (
        "vectors of 2",
        "8 lanes share a row",
        "2 rows of a vector",
        "16 lanes",
        "in turn",
    ):
        assert part in text
    assert "row_offsets[b] + lane, row_offsets[b + 1], 8" in text
    assert "values[p, v]" in text
    assert ("lane 0 of each group" in text) == (op in ("row_sum", "row_max"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_of_top_k_spills(arch):
    require_nvrtc()
    plans = [plan(dtype, (2, 90, 70), 8) for plan in (select_plan, write_plan) for dtype in DTYPES]
    for kernel, (registers, stack, spills) in resources_of([p.source for p in plans], arch).items():
        assert (stack, spills) == (0, 0), kernel
        assert registers <= 64, kernel


def test_top_k_has_a_block_for_each_row_and_z_for_the_batch():
    call = select_plan("float32", (3, 90, 70), 8)
    assert call.grid == (90, 1, 3) and call.scalars == (90, 70, 8, 3, 90)
    assert select_plan("float32", (3, 90, 70), 8, shared_limits=True).scalars[-1] == 0
    call = write_plan("float32", (1 << 20, 90, 70), 8)
    assert call.grid == (90, 1, GRID_Z) and call.scalars == (90, 70, 8, 1 << 20)
    # The kernel is the same for all sizes.
    assert call.source == write_plan("float32", (1, 2, 3), 1).source


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_of_the_transposed_structure_spills(arch):
    count, start = transpose_cuda.count_plan(1, 90, 0), transpose_cuda.start_plan(1, 90)
    sources = [plan.source for plan in (count, start, transpose_cuda.move_plan(1, 90, 0))]
    for kernel, (registers, stack, spills) in resources_of(sources, arch).items():
        assert (stack, spills) == (0, 0), kernel
        assert registers <= 64, kernel


def test_the_transposed_structure_has_a_block_for_each_tile_and_z_for_the_batch():
    tile = transpose_cuda.TILE
    for entries, tiles in ((1, 1), (tile, 1), (tile + 1, 2), (2**31 - 1, 2**31 // tile)):
        for plan in (transpose_cuda.count_plan, transpose_cuda.move_plan):
            call = plan(1 << 20, entries, 8)
            assert call.grid == (tiles, 1, GRID_Z) and call.scalars == (entries, 8, 1 << 20)
            assert call.source == plan(1, 3, 0).source
        start = transpose_cuda.start_plan(3, entries)
        assert start.grid == (256, 1, 3) and start.scalars == (tiles, 3)
    for size, digits in ((0, 1), (1, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 3)):
        assert len(transpose_cuda.shifts(size)) == digits
    assert list(transpose_cuda.shifts(2**31 - 1)) == [0, 8, 16, 24]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_of_bitmaps_spills(arch):
    plans = bitmap_cuda.of_mask_plan(90, 70), bitmap_cuda.entries_plan((1, 90, 3), 40)
    for kernel, (registers, stack, spills) in resources_of([p.source for p in plans], arch).items():
        assert (stack, spills) == (0, 0), kernel
        assert registers <= 64, kernel


def test_bitmaps_have_a_thread_for_each_word_and_z_for_the_batch():
    for rows, columns, blocks in ((1, 1, 1), (256, 32, 1), (256, 33, 2), (2**20, 2**20, 2**27)):
        call = bitmap_cuda.of_mask_plan(rows, columns)
        assert call.grid == (blocks, 1, 1) and call.scalars == (rows, columns)
        row_words = -(-columns // 32)
        call = bitmap_cuda.entries_plan((1 << 20, rows, row_words), 40)
        assert call.grid == (blocks, 1, GRID_Z)
        assert call.scalars == (rows * row_words, row_words, 40, 1 << 20)
        # The kernel is the same for all sizes.
        assert call.source == bitmap_cuda.entries_plan((1, 2, 3), 4).source


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_of_nuclei_spills(arch):
    sources = []
    for size in (70, 3000):  # a warp has a row, or a block
        for dtype in DTYPES:
            sources.append(nucleus_cuda.totals_plan(dtype, (2, 90, size)).source)
            sources.append(nucleus_cuda.select_plan(dtype, (2, 90), size, 4000).source)
        sources.append(nucleus_cuda.write_plan((2, 90), size).source)
    found = resources_of(sources, arch)
    assert len(found) == len(sources)
    for kernel, (registers, stack, spills) in found.items():
        assert (stack, spills) == (0, 0), kernel
        # Selecting ones hold 32 bytes of weights and as many of keys.
        assert registers <= (128 if "Select" in kernel else 64), kernel


def test_nuclei_have_a_warp_or_a_block_for_each_row_and_z_for_the_batch():
    for size, blocks in ((1, 12), (256, 12), (257, 90), (1024, 90), (1025, 90)):
        shape = 1 << 20, 90
        totals = nucleus_cuda.totals_plan("float32", (*shape, size))
        select = nucleus_cuda.select_plan("float32", shape, size, 4000, kept=True)
        write = nucleus_cuda.write_plan(shape, size)
        assert totals.grid == (12 if size <= 1024 else 90, 1, GRID_Z)
        assert select.grid == write.grid == (blocks, 1, GRID_Z)
        assert totals.scalars == (90, size, 1 << 20, 90)
        assert select.scalars == (90, size, 4000, 1 << 20, 1)
        assert write.scalars == (90, size, 1 << 20)
        # The kernel is the same for all sizes of one kind.
        lower = size - 1 if size in (256, 1024) else size
        assert select.source == nucleus_cuda.select_plan("float32", (1, 2), lower, 4).source
    assert nucleus_cuda.select_plan("float64", (1, 9), 128, 4).grid[0] == 2
    assert nucleus_cuda.select_plan("float64", (1, 9), 129, 4).grid[0] == 9
    assert nucleus_cuda.totals_plan("float16", (3, 9, 70), shared_limits=True).scalars[-1] == 0
