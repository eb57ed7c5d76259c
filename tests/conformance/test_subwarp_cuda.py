"""SubwarpTile as a value; its kernels compile for every architecture without spills; launches."""

import dataclasses
import itertools
import pickle

import pytest
from cuda_sources import INCLUDE, require_nvrtc, resources_of
from tolerance import DTYPES

from sgap_jax import AtomicParallelism, Problem, Schedule, ScheduleError, SubwarpTile
from sgap_jax import choose_schedule as choose
from sgap_jax.launch import nvrtc, sddmm, spmm
from sgap_jax.launch.defaults import default_calls
from sgap_jax.launch.precompiled import ARCHITECTURES
from sgap_jax.launch.sddmm_operands import OperandShapes
from sgap_jax.schedules.subwarp import LENGTHS

OPS = (("spmm", False), ("spmm", True), ("sddmm", False))
MOST = 2**31 - 1


def of(length, op="spmm", permuted=False, n=128, dtype="float32", m=1000, vectors=20_000, **rest):
    return Problem(
        op,
        (m, 900),
        vectors * length,
        n=n,
        dtype=dtype,
        format=f"CVS({length})",
        platform="cuda",
        permuted=permuted,
        **rest,
    )


def plan(problem, tile=None, *operands):
    """`operands`: the batch of spmm, or the shapes of sddmm."""
    tile = choose(problem) if tile is None else tile
    launch_plan = (spmm if problem.op == "spmm" else sddmm).launch_plan
    return launch_plan(problem, tile, *operands)


def stay_in_registers(sources, arch):
    require_nvrtc()
    for kernel, (registers, stack, spills) in resources_of(sources, arch).items():
        assert (stack, spills) == (0, 0), kernel
        assert registers <= 128, kernel


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.seconds(all=30)
def test_every_length_and_dtype_compiles_without_spills_or_local_memory(arch):
    # Each on one architecture, with vector loads or loads of single values.
    sources = []
    for i, ((op, permuted), length, dtype) in enumerate(itertools.product(OPS, LENGTHS, DTYPES)):
        if ARCHITECTURES[i % 3] != arch:
            continue
        other = (127, 2, 12)[i // 3 % 3]
        sources.append(plan(of(length, op, permuted, 128, dtype), SubwarpTile(length)).source)
        tile = SubwarpTile(length, subwarp=32, block_size=512)
        sources.append(plan(of(length, op, permuted, other, dtype), tile).source)
        if op == "sddmm":
            factors = OperandShapes(weights=(1, 20_000, length), scale=(1, 1))
            problem = of(length, op, permuted, 128, dtype)
            sources.append(plan(problem, SubwarpTile(length), factors).source)
    stay_in_registers(sources, arch)


def test_the_defaults_of_wide_products_are_in_the_wheel():
    for (op, permuted), length, dtype, n in itertools.product(
        OPS, (2, 4, 8, 16), ("float32", "bfloat16", "float16"), (64, 96, 512, 4096, 1)
    ):
        if n == 1 and op == "sddmm":
            continue
        problem = of(length, op, permuted, n, dtype, m=1600, vectors=100_000)
        problem = dataclasses.replace(problem, shape=(1600, 1600))
        assert plan(problem).source in default_calls(f"{op}_vectors")


def test_vector_loads_where_the_columns_allow_them():
    require_nvrtc()
    for (op, permuted), (n, vector) in itertools.product(OPS, ((128, True), (126, False))):
        # Vectors of two rows: their values are too short for a load of 16 bytes.
        text = nvrtc.ptx(plan(of(2, op, permuted, n)).source, "compute_90", INCLUDE)
        assert ("ld.global.nc.v4.f32" in text) == vector
        assert ("st.global.v4.f32" in text) == (vector and op == "spmm")


def test_launches():
    tile = SubwarpTile(8)
    # 125 block rows x 4 tiles of 32 columns side by side, 8 lanes each
    wide = plan(of(8), tile)
    assert (wide.grid, wide.block, wide.zero) == ((32, 1, 1), (128, 1, 1), ())
    assert wide.scalars == (1000, 128, 0, 0, 2, 1, 20_000, 0)
    # of 32 rows a lane has 4, times 8 columns; 2 subwarps share vectors of 8
    half = of(8, dtype="float16")
    assert tile.lane_rows(half) == 4 and tile.parts(half) == 2 and tile.tile_columns(half) == 64
    assert plan(half, tile).grid == (32, 1, 1)
    # 1000 rows of A^T, 8 tiles of 16 columns in two warps' width
    narrow = plan(of(8, permuted=True), SubwarpTile(8, tile_n=16, block_size=64))
    assert narrow.grid == (500, 2, 1) and narrow.scalars == (1000, 128, 900, 0, 0, 2, 1, 20_000, 0)
    # 1250 windows of 16 vectors, two halves of 4 rows each
    sampled = plan(of(8, "sddmm"), tile)
    assert sampled.grid == (157, 1, 1) and sampled.scalars == (1000, 20_000, 128, 0, 0, 0, 0, 1, 0)
    many = of(8, batch=70_000)
    batched = plan(many, tile, (70_000, 1))
    assert batched.grid[2] == 65535 and batched.scalars[2:] == (160_000, 0, 2, 70_000, 20_000, 0)
    assert plan(many, tile, (1, 70_000)).scalars[2:4] == (0, 900 * 128)
    both = plan(of(8, "sddmm", batch=3), tile, OperandShapes((3,), (3,), (3, 20_000, 8)))
    assert both.scalars[3:] == (1000 * 128, 900 * 128, 160_000, 0, 3, 0)


def constants(problem, tile):
    """The template arguments between the type and the block size: V, rows where there are any,
    columns, ..."""
    text = plan(problem, tile).source.split("<", 1)[1].split(">(")[0]
    return [int(word) for word in text.split(", ")[1:] if word.isdigit()][:-1]


def test_constants():
    # V, rows, columns, split, subwarp, at once
    assert constants(of(8), SubwarpTile(8)) == [8, 8, 4, 1, 8, 4]
    assert constants(of(8), SubwarpTile(8, tile_k=2)) == [8, 8, 4, 1, 8, 2]
    assert constants(of(8), SubwarpTile(8, tile_k=64)) == [8, 8, 4, 1, 8, 4]
    assert constants(of(8), SubwarpTile(8, tile_k=8, split=4)) == [8, 8, 4, 4, 8, 2]
    assert constants(of(32, dtype="float64"), SubwarpTile(32, tile_n=16)) == [32, 8, 2, 1, 8, 2]
    # the same without rows: each vector brings V rows of B
    assert constants(of(2, permuted=True), SubwarpTile(2)) == [2, 4, 1, 8, 2]
    assert constants(of(8, permuted=True), SubwarpTile(8)) == [8, 4, 1, 8, 1]
    # V, rows, window, columns, subwarp, at once
    assert constants(of(8, "sddmm"), SubwarpTile(8)) == [8, 4, 16, 4, 8, 4]
    assert constants(of(2, "sddmm"), SubwarpTile(2, tile_n=2, tile_k=16)) == [2, 2, 2, 2, 8, 2]


def test_an_empty_problem_has_a_launch_too():
    for (op, permuted), (m, vectors, n) in itertools.product(
        OPS, ((0, 0, 3), (5, 0, 3), (5, 0, 0), (5, 7, 0))
    ):
        assert min(plan(of(4, op, permuted, n, m=m, vectors=vectors)).grid) == 1


@pytest.mark.parametrize("op", ["spmm", "sddmm"])
def test_every_problem_gets_a_schedule_that_runs_it(op):
    sizes = (0, 1, 2, 3, 5, 12, 31, 64, 127, 2**19, 2**19 + 16, 10**7)
    for length, m, vectors, n, dtype, permuted in itertools.product(
        (*LENGTHS, 3, 64), (0, 7, 1000, MOST), (0, 20_000, MOST), sizes, DTYPES, (False, True)
    ):
        permuted = permuted and op == "spmm"
        problem = of(length, op, permuted, n, dtype, m, min(vectors, MOST // length))
        tile = choose(problem)
        tile.check(problem)
        assert tile.deterministic or op == "sddmm"
        octets = dtype in ("float16", "bfloat16") and length in (4, 8, 16, 32) and not permuted
        if not octets:  # octet tiles are tested with their kernels
            point = length not in LENGTHS or n > 2**19
            assert isinstance(tile, AtomicParallelism if point else SubwarpTile)


GOLDEN = {
    # (op, permuted, n, dtype): vectors of 8, 20 in a row on average
    ("spmm", False, 128, "float32"): "SubwarpTile(vector_length=8)",
    ("spmm", True, 128, "float32"): "SubwarpTile(vector_length=8)",
    ("spmm", True, 128, "bfloat16"): "SubwarpTile(vector_length=8)",
    ("spmm", False, 126, "float32"): "SubwarpTile(vector_length=8, subwarp=16)",
    ("spmm", False, 127, "float32"): "SubwarpTile(vector_length=8, subwarp=32)",
    ("spmm", False, 16, "float32"): "SubwarpTile(vector_length=8, split=2)",
    ("spmm", False, 128, "float64"): "SubwarpTile(vector_length=8)",
    ("spmm", False, 1, "float32"): "SubwarpTile(vector_length=8, subwarp=16, split=16)",
    ("sddmm", False, 64, "float32"): "SubwarpTile(vector_length=8)",
    ("sddmm", False, 16, "float32"): "SubwarpTile(vector_length=8, subwarp=4)",
    ("sddmm", False, 33, "float32"): "SubwarpTile(vector_length=8, subwarp=32)",
}


@pytest.mark.parametrize(("op", "permuted", "n", "dtype"), GOLDEN)
def test_typical_problems(op, permuted, n, dtype):
    rows = 2048 if permuted else 256
    problem = of(8, op, permuted, n, dtype, m=2048, vectors=20 * rows)
    assert str(choose(problem)) == GOLDEN[op, permuted, n, dtype]


def test_a_tile_is_a_value():
    tile = SubwarpTile(16, tile_n=32, tile_k=8, subwarp=16, split=2, block_size=64)
    text = "SubwarpTile(vector_length=16, tile_n=32, tile_k=8, subwarp=16, split=2, block_size=64)"
    assert str(tile) == text and Schedule.parse(text) == tile == pickle.loads(pickle.dumps(tile))
    assert Schedule.parse(str(SubwarpTile())) == SubwarpTile() and hash(tile) != hash(SubwarpTile())
    assert tile.transposed() is tile and tile.derived() is None and tile.deterministic


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(vector_length=3), "vector_length must be one of 1, 2, 4, 8, 16, 32, got 3"),
        (dict(vector_length=None), "vector_length"),
        (dict(tile_n=24), "tile_n"),
        (dict(tile_k=0), "tile_k"),
        (dict(subwarp=64), "subwarp"),
        (dict(subwarp=True), "subwarp"),
        (dict(split=16), "split=16 lanes share a column, more than the 8"),
        (dict(block_size=1024), "block_size"),
        (dict(block_size=8.0), "block_size"),
    ],
)
def test_illegal_tiles(fields, words):
    with pytest.raises(ScheduleError, match=words):
        SubwarpTile(**fields)
    with pytest.raises(ScheduleError, match=words):
        Schedule.parse(f"SubwarpTile({', '.join(f'{k}={v}' for k, v in fields.items())})")


def test_problems_that_a_tile_is_not_for():
    with pytest.raises(NotImplementedError, match="row_sum: .* kernels of spmm and sddmm"):
        SubwarpTile(8).check(of(8, "row_sum"))
    with pytest.raises(ScheduleError, match="exceed the 2147483647 x 65535"):
        SubwarpTile(8, subwarp=1).check(of(8, n=2**31 - 1))
    with pytest.raises(ScheduleError, match="exceed the 2147483647 x 65535"):
        SubwarpTile(8, tile_n=1, subwarp=32, block_size=32).check(of(8, "sddmm", vectors=MOST))
    SubwarpTile(8).check(of(8, "sddmm", vectors=MOST))


@pytest.mark.parametrize(("op", "permuted"), OPS)
def test_explain_says_who_owns_and_who_writes(op, permuted):
    for tile in (SubwarpTile(8), SubwarpTile(8, split=4)):
        if op == "sddmm" and tile.split > 1:
            continue
        problem = of(8, op, permuted, batch=3, dtype="float16")
        text = tile.explain(problem)
        along, across = tile.blocks(problem)
        for part in (
            "grid:",
            "block:",
            "lane:",
            "write:",
            "20000 vectors",
            "3 products",
            str(tile),
        ):
            assert part in text
        assert f"{along} x {across} blocks" in text and f"{128 // 8} subwarps" in text
        assert ("permutation[q]" in text) == permuted
        assert ("every 4-th vector" in text) == ("4 lanes reduce" in text) == (tile.split == 4)
        assert ("2 subwarps share the 8 rows" in text) == (not permuted)
