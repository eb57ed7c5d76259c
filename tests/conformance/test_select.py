"""The schedule that a problem gets on CUDA when the caller names none."""

import dataclasses
import itertools
import pathlib
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerance import DTYPES

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    Compressed,
    CpuTile,
    Dense,
    Format,
    OctetTile,
    PaperOctetTile,
    Problem,
    Reference,
    Schedule,
    ScheduleError,
    SubwarpTile,
    WarpTile,
    choose_schedule,
    einsum,
    explain,
    explain_choice,
    eye,
    random,
    sparse_softmax,
    spgemm,
    spgemm_plan,
    spmm,
)
from sgap_jax.launch import spmm as spmm_cuda
from sgap_jax.launch.spmm import launch_plan
from sgap_jax.runtime.native import info, machine
from sgap_jax.schedules.machine import Machine, on_machine, this_machine
from sgap_jax.schedules.problem import ROW_OPS, TILED

MOST = 2**31 - 1
ROWS = (0, 1, 7, 1000, MOST)
NONZEROS = (0, 1, 20_000, MOST)
WIDE = (0, 1, 2, 3, 4, 5, 6, 8, 31, 32, 33, 34, 64, 65, 127, 128, 1000, 2**20 + 1, 10**7, 10**7 + 1)
COLUMNS = {**dict.fromkeys((*TILED, "sddmm"), WIDE), **dict.fromkeys(ROW_OPS, (1,))}


def problems(op, dtypes=DTYPES):
    for m, nnz, n, dtype in itertools.product(ROWS, NONZEROS, COLUMNS[op], dtypes):
        for permuted in (False, True):
            yield Problem(op, (m, 1000), nnz, n=n, dtype=dtype, platform="cuda", permuted=permuted)


def test_dtypes_and_formats_may_be_given_as_values():
    named = Problem("spmm", (64, 64), 99, 64, dtype="bfloat16", format="CVS(8)", platform="cuda")
    assert Problem("spmm", (64, 64), 99, 64, 1, jnp.bfloat16, CVS(8), "cuda") == named
    blocks = dataclasses.replace(named, format=BCSR(8, 4))
    assert choose_schedule(blocks) == choose_schedule(named) == OctetTile(8, stages=2)


def test_a_problem_that_an_earlier_version_pickled_holds_its_format():
    problem = Problem("spmm", (64, 64), 99, 64, format=CVS(8))
    earlier = object.__new__(Problem)
    vars(earlier).update(vars(problem) | {"format": "CVS(8)"})  # it held the text
    assert pickle.loads(pickle.dumps(earlier)) == pickle.loads(pickle.dumps(problem)) == problem


def test_every_name_of_a_dtype_and_a_format_is_taken():
    of = partial(Problem, "spmm", (64, 64), np.int64(99))
    for dtype in (bool, jnp.int4, jnp.uint8, jnp.float8_e4m3fn, jnp.bfloat16, jnp.complex128):
        assert of(dtype=dtype) == of(dtype=jnp.dtype(dtype).name)
    some = (CSR, CSC, COO, CVS(16), BCSR(2, 4), CSF(2), Format((Compressed, Dense)))
    for format in (*some, *(format.transposed for format in some)):
        assert of(format=format) == of(format=str(format))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "sparse_attention"}, "op: expected one of .* attention, got 'sparse_attention'"),
        ({"platform": "gpu"}, "platform: expected one of cpu, cuda, rocm, tpu, got 'gpu'"),
        ({"platform": "CUDA"}, "platform: expected one of cpu, cuda, rocm, tpu, got 'CUDA'"),
        ({"dtype": "f4"}, "dtype: expected a dtype that JAX has, .*, got 'f4'"),
        ({"dtype": "float"}, "dtype: .* got 'float'"),
        ({"dtype": object}, "dtype: .* got 'object'"),
        ({"dtype": 32}, "dtype: expected a dtype or its name, got 32"),
        ({"format": "csr"}, "format: expected a Format or what it prints as, got 'csr'"),
        ({"format": "CVS(0)"}, "format: .* got 'CVS"),
        ({"format": "BCSR(8)"}, "format: .* got 'BCSR"),
        ({"nnz": -1}, "nnz: expected an integer from 0 on, got -1"),
        ({"n": 1.5}, "n: expected an integer from 0 on, got 1.5"),
        ({"batch": None}, "batch: expected an integer from 0 on, got None"),
        ({"n": (64,)}, r"n: expected an integer from 0 on, got \(64,\)"),
        ({"n": np.array(64)}, "n: expected an integer from 0 on"),
        ({"n": object()}, "n: expected an integer from 0 on"),
        ({"dtype": None}, "dtype: expected a dtype or its name, got None"),
        ({"permuted": "no"}, "permuted: expected a bool, got 'no'"),
        ({"shape": (64, -1)}, r"shape: expected \(m, k\), got \(64, -1\)"),
        ({"shape": (64,)}, r"shape: expected \(m, k\), got \(64,\)"),
    ],
)
def test_names_and_sizes_that_no_rule_knows_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Problem(**{"op": "spmm", "shape": (64, 64), "nnz": 99, **changes})


@pytest.mark.parametrize(
    ("schedule", "format", "factors"),
    [
        (Reference(), "CSR", "weights * scale"),
        (CpuTile(), "CSR", "weights[p] * scale"),
        (CpuTile(), "CVS(8)", "weights[p, v] * scale"),
        (Schedule.parse("{<1 nnz, 4 col>, 8}"), "CSR", "weights[p] * scale"),
        (Schedule.parse("{<1/8 row, 4 col>, 8}"), "CSR", "weights[p] * scale"),
        (SubwarpTile(8), "CVS(8)", "weights[p, :] * scale"),
        (OctetTile(8), "CVS(8)", "weights[p, v] * scale"),
        (WarpTile(8), "CVS(8)", "weights[q, v] * scale"),
        (PaperOctetTile(8), "CVS(8)", "weights[q, v] * scale"),
    ],
    ids=str,
)
def test_sddmm_is_explained_with_weights_and_scale(schedule, format, factors):
    platform = "cpu" if isinstance(schedule, CpuTile) else "cuda"
    problem = Problem("sddmm", (64, 64), 96, n=8, dtype="float16", format=format, platform=platform)
    store = schedule.explain(problem).splitlines()[-1]
    assert store.lstrip().startswith("values") and f" * {factors} " in store


@pytest.mark.parametrize("op", COLUMNS)
def test_every_problem_gets_a_point_that_runs_it(op):
    for problem in problems(op):
        point = choose_schedule(problem)
        point.check(problem)
        assert choose_schedule(problem) == point
        # sddmm adds nothing up across groups, whatever the point
        assert point.deterministic or op == "sddmm"
        if op == "spmm":
            grid = launch_plan(problem, point).grid
            assert 1 <= grid[0] <= MOST and 1 <= grid[1] <= 65535


def test_columns_beyond_the_tiles_of_a_grid_are_refused_by_name():
    most = Problem("spmm", (1, 1), 1, n=4096 * 65535, platform="cuda")
    choose_schedule(most).check(most)
    beyond = Problem("spmm", (1, 1), 1, n=4096 * 65535 + 1, platform="cuda")
    with pytest.raises(ScheduleError, match="exceeds the 65535 tiles of a launch"):
        choose_schedule(beyond).check(beyond)


# How many kernels the defaults need, except dtypes and permutations: a wheel has them compiled.
@pytest.mark.parametrize(
    ("op", "count"),
    {**dict.fromkeys(TILED, 27), "spmm": 31, "sddmm": 11, **dict.fromkeys(ROW_OPS, 4)}.items(),
)
def test_the_defaults_are_few(op, count):
    kernels = set()
    columns = (*range(600), 10**7, 10**7 + 2) if COLUMNS[op] is WIDE else (1,)
    for n, length in itertools.product(columns, (0, 1, 2, 3, 5, 9, 20, 99)):
        problem = Problem(op, (1000, 1000), 1000 * length, n=n, platform="cuda")
        p = choose_schedule(problem)
        tile = p.columns_of_block(n) if op in TILED else None
        kernels.add((p.nnz, p.row, p.col, p.group, p.block_size, tile, p.walk))
    assert len(kernels) == count


GOLDEN = {
    # spmm: (nonzeros of a row on average, n)
    ("spmm", 40, 1): "{<1/32 row, 1 col>, 32}",
    ("spmm", 10, 1): "{<1/8 row, 1 col>, 8}",
    ("spmm", 5, 4): "{<1/4 row, 4 col>, 4}",
    ("spmm", 20, 4): "{<1/8 row, 4 col>, 8}",
    ("spmm", 2, 2): "{<1 row, 2 col>, 1}",
    ("spmm", 20, 16): "{<1/2 row, 4 col>, 2}",
    ("spmm", 3, 32): "{<1/2 row, 4 col>, 2}",
    ("spmm", 40, 32): "{<1/4 row, 4 col>, 4}",
    ("spmm", 20, 7): "{<1/8 row, 1 col>, 8} tile_size=8 worker_dim_r=1/2",
    ("spmm", 20, 64): "{<1 row, 4 col>, 1}",
    ("spmm", 1000, 128): "{<1 row, 4 col>, 1}",
    ("spmm", 20, 129): "{<1 row, 1 col>, 1}",
    ("spmm", 20, 10**7): "{<1 row, 4 col>, 1} block_size=1024 tile_size=4096",
    ("gspmm", 20, 16): "{<1/8 row, 4 col>, 8} tile_size=8 worker_dim_r=1/2",
    ("sddmm", 20, 64): "{<4 nnz, 4 col>, 8}",
    ("sddmm", 20, 3): "{<4 nnz, 1 col>, 1}",
    ("sddmm", 20, 127): "{<4 nnz, 1 col>, 32}",
    ("sparse_softmax", 20, 1): "{<1/8 row, 1 col>, 8}",
    ("row_sum", 200, 1): "{<1/32 row, 1 col>, 32}",
    ("row_max", 2, 1): "{<1 row, 1 col>, 1}",
}


@pytest.mark.parametrize(("op", "row_length", "n"), GOLDEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_typical_problems(op, row_length, n, dtype):
    for m in (2048, 100_000):
        problem = Problem(op, (m, 1024), m * row_length, n=n, dtype=dtype, platform="cuda")
        assert str(choose_schedule(problem)) == GOLDEN[op, row_length, n]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 8, 16, 32])
def test_every_product_of_vectors_gets_a_schedule_that_runs_it(length):
    for problem in problems("spmm"):
        vectors = dataclasses.replace(
            problem, nnz=problem.nnz // length * length, format=f"CVS({length})"
        )
        schedule = choose_schedule(vectors)
        schedule.check(vectors)
        assert schedule.deterministic
        tensor_cores = (
            vectors.dtype in ("float16", "bfloat16")
            and length in (4, 8, 16, 32)
            and not vectors.permuted
            and vectors.n <= 64 * 65535
        )
        assert isinstance(schedule, OctetTile) == tensor_cores
        if tensor_cores:
            grid = spmm_cuda.launch_plan(vectors, schedule).grid
            assert 1 <= grid[0] <= MOST and 1 <= grid[1] <= 65535


def test_typical_products_of_vectors():
    def chosen(m, row, n, length=8, batch=1):
        shape, nnz = (m, 1024), m * row
        problem = Problem("spmm", shape, nnz, n, batch, "bfloat16", f"CVS({length})", "cuda")
        return str(choose_schedule(problem))

    plain = "OctetTile(vector_length=8, stages=2)"
    shared = "OctetTile(vector_length=8, stages=2, row_warps=4)"
    assert chosen(2048, 102, 256) == plain  # DLMC at 90%: rows of six steps
    assert chosen(2048, 307, 256) == shared  # at 70%: 1024 blocks, rows of 19 steps
    assert chosen(2048, 307, 256, batch=8) == chosen(4096, 409, 4096) == plain
    assert chosen(2048, 307, 256, 4) == "OctetTile(vector_length=4, stages=2)"
    assert chosen(2048, 307, 64, 4) == "OctetTile(vector_length=4, stages=2, row_warps=4)"


INTEL = Machine(l2_bytes=2 << 20, intel=True)


def chosen_on(machine, k, nnz, n, m=5000, **more):
    with on_machine(machine):
        return choose_schedule(Problem("spmm", (m, k), nnz, n=n, **more))


@pytest.mark.parametrize(
    ("k", "uses", "n", "schedule"),
    [
        (1024, 300, 64, CpuTile()),  # B within L2
        (1024, 300, 256, CpuTile()),
        (2048, 100, 256, CpuTile(columns=32, packed=True)),  # of L2's size, rows of 1024 bytes
        (4900, 30, 256, CpuTile()),  # few uses, and less than four times L2
        (5200, 40, 128, CpuTile()),
        (5200, 40, 256, CpuTile(columns=64, packed=True)),  # such a slab fits in L2
        (10_000, 100, 64, CpuTile()),  # rows too narrow
        (10_000, 100, 128, CpuTile(columns=32, packed=True)),
        (10_000, 14, 128, CpuTile(columns=64)),  # few uses
        (10_000, 14, 256, CpuTile(columns=32, packed=True)),
        (20_481, 8, 128, CpuTile()),  # slabs beyond L2
        (20_481, 8, 256, CpuTile()),
        (20_000, 7, 256, CpuTile()),
    ],
)
def test_tiles_on_intel(k, uses, n, schedule):
    assert chosen_on(INTEL, k, k * uses, n) == schedule
    wide = dataclasses.replace(schedule, columns=schedule.columns // 2)
    assert chosen_on(INTEL, k, k * uses, n // 2, dtype="float64") == wide
    assert chosen_on(INTEL, k, k * uses, n, dtype="bfloat16") == CpuTile()


def test_the_packed_tiles_of_intel_are_those_of_the_transpose_too():
    for k, uses, n in ((2048, 100, 256), (5200, 40, 256), (10_000, 100, 128), (10_000, 14, 256)):
        packed = chosen_on(INTEL, k, k * uses, n)
        assert packed.packed and chosen_on(INTEL, k, k * uses, n, permuted=True) == packed
    few = dict(k=10_000, nnz=140_000, n=128)  # tiles that are not packed
    assert chosen_on(INTEL, **few).columns and chosen_on(INTEL, permuted=True, **few) == CpuTile()
    wide = dict(k=4000, nnz=20 * 4000, n=256)  # as on other machines
    assert chosen_on(INTEL, permuted=True, **wide) == CpuTile(columns=128, packed=True)


def test_packed_tiles_of_16_bits_on_intel():
    """As those of float32, for a B of as many bytes: float16 counts twice."""
    tile, of = CpuTile(columns=32, packed=True), dict(k=10_000, nnz=10**6)
    for dtype, least in (("float16", 128), ("bfloat16", 256)):
        assert chosen_on(INTEL, n=least, dtype=dtype, **of) == tile
        assert chosen_on(INTEL, n=least // 2, dtype=dtype, **of) == CpuTile()
        assert chosen_on(Machine(l2_bytes=2 << 20), n=256, dtype=dtype, **of) == CpuTile()
        few = of | dict(nnz=140_000)  # tiles that are not packed
        assert chosen_on(INTEL, n=least, dtype=dtype, **few) == CpuTile()
        assert chosen_on(INTEL, n=256, dtype=dtype, permuted=True, **of) == CpuTile()


def test_small_products_on_intel_take_small_chunks():
    small, large = CpuTile(nonzeros=2048), CpuTile()
    assert chosen_on(INTEL, 512, 120_000, 128) == small != chosen_on(INTEL, 512, 130_000, 128)
    assert chosen_on(INTEL, 512, 120_000, 64) == chosen_on(Machine(), 512, 120_000, 64) == large


def test_an_sddmm_on_intel_takes_rows_of_y_in_blocks():
    of = dict(op="sddmm", shape=(10_000, 10_000), nnz=10**6, n=128)  # Y is 2.4 times L2
    blocks = CpuTile(columns=2560, nonzeros=125_000)

    def chosen(machine=INTEL, **other):
        with on_machine(machine):
            return choose_schedule(Problem(**of | other))

    assert chosen() == blocks
    assert (
        chosen(n=256) == chosen(n=128, dtype="float64") == dataclasses.replace(blocks, columns=1280)
    )
    assert chosen(n=256, dtype="float16") == chosen(format="COO") == blocks
    assert chosen(batch=2).nonzeros == 250_000 and chosen(batch=9).nonzeros == 10**6
    for other in (
        dict(machine=Machine(l2_bytes=2 << 20)),
        dict(machine=dataclasses.replace(INTEL, cores=9)),  # chunks that use a row of Y seldom
        dict(n=78),  # Y is 3/2 of L2 or less
        dict(nnz=200_000),
        dict(shape=(100_000, 10_000), nnz=300_000),  # few entries in a row
        dict(shape=(10_000, 30_000), n=64, nnz=200_000),
        dict(format="CVS(8)"),
    ):
        assert chosen(**other) == CpuTile()


def test_blocks_of_rows_are_of_dtypes_with_kernels_and_of_sizes_that_a_chunk_may_have():
    of = Problem("sddmm", (10_000, 10_000), 10**6, n=128)
    with on_machine(INTEL):
        assert choose_schedule(dataclasses.replace(of, dtype="int32")) == CpuTile()
        with pytest.raises(NotImplementedError, match="sddmm: no kernel for dtype int32"):
            explain_choice(dataclasses.replace(of, dtype="int32"))
        most = CpuTile(columns=2560, nonzeros=2**31 - 1)
        assert choose_schedule(dataclasses.replace(of, nnz=2**40)) == most


def test_sizes_may_be_numpy_integers():
    """Which overflow in a product of sizes, and are no fields of a schedule."""
    sizes = dict(shape=(10_000, 10_000), nnz=10**6, batch=9)
    others = dict(shape=tuple(np.int16(sizes["shape"])), nnz=np.int32(10**6), batch=np.int8(9))
    with on_machine(INTEL):
        for op, dtype, n in (("sddmm", "float32", 128), ("spmm", "float16", 2)):
            of = Problem(op, n=n, dtype=dtype, **sizes)
            other = Problem(op, n=np.int64(n), dtype=dtype, **others)
            assert other == of and repr(other) == repr(of)
            assert choose_schedule(other) == choose_schedule(of)


def test_caches_are_counted_in_those_of_the_machine():
    # (columns of A, n) at a bound of the default machine, that is kept where all sizes are doubled.
    twice = Machine(l1_bytes=96 << 10, l2_bytes=2 << 20)
    for k, n in ((512, 64), (1024, 64), (1025, 64), (768, 128), (769, 128), (2048, 128)):
        for dense in (k, k + 1):
            doubled = chosen_on(twice, 2 * dense, 10**6, n, m=500)
            assert chosen_on(Machine(), dense, 10**6, n, m=500) == doubled
    over = dict(nnz=10**6, n=256)
    packed = CpuTile(columns=32, packed=True)
    assert chosen_on(Machine(), 10_240, **over) == chosen_on(twice, 20_480, **over) == packed
    assert chosen_on(Machine(), 10_241, **over) == chosen_on(twice, 20_481, **over) == CpuTile()


def test_measured_constants_decide_what_is_packed():
    packed, whole = CpuTile(columns=32, packed=True), CpuTile()
    long = dict(k=10_241, nnz=10**6, n=256)  # a slab of a little more than 1.25 MB
    assert chosen_on(Machine(), **long) == chosen_on(Machine(slab=1.0), **long) == whole
    assert chosen_on(Machine(slab=2.5), **long) == packed
    short = dict(k=1024, nnz=100_000, n=256, m=5000)  # rows of 20 nonzeros
    assert chosen_on(Machine(), **short) == whole
    assert chosen_on(Machine(row_length=20), **short) == packed
    assert chosen_on(dataclasses.replace(INTEL, slab=2.5), 40_000, 2 * 10**6, 256) == packed


def test_few_columns_of_16_bits_are_widened_for_the_transpose_of_vectors():
    narrow = Machine(vector_bytes=32)
    of = dict(k=2048, nnz=200_000, m=1024, permuted=True, dtype="bfloat16", format="CVS(8)")
    assert chosen_on(narrow, n=7, **of) == CpuTile(columns=7, packed=True)
    assert chosen_on(narrow, n=1, **of | {"format": "CVS(2)"}) == CpuTile(columns=1, packed=True)
    whole = [chosen_on(narrow, n=n, **of) for n in (1, 8)]  # a dot product, and whole registers
    whole += [chosen_on(narrow, n=7, **of | {"nnz": 16 * 2048 - 8})]
    whole += [chosen_on(narrow, n=7, **of | {"dtype": "float32"}), chosen_on(Machine(), n=7, **of)]
    assert set(whole) == {CpuTile()}
    assert chosen_on(INTEL, n=4, **of) == CpuTile(columns=4, packed=True)
    assert chosen_on(INTEL, n=1, **of) == chosen_on(INTEL, n=5, **of) == CpuTile()


def test_pairs_of_vectors_of_two_are_not_widened():
    """But for one column and four, which have a loop without pairs."""
    of = dict(k=1024, nnz=200_000, m=2048, dtype="bfloat16", format="CVS(2)")
    pairs = dataclasses.replace(INTEL, pair_dots=True)
    assert {chosen_on(pairs, n=n, **of) for n in (2, 3, 5, 16)} == {CpuTile()}
    assert chosen_on(pairs, n=4, **of) == CpuTile(columns=4, packed=True)
    assert chosen_on(INTEL, n=16, **of) == CpuTile(columns=16, packed=True)
    assert chosen_on(pairs, n=16, **of | {"dtype": "float16"}) == CpuTile(columns=16, packed=True)
    with on_machine(pairs):
        shown = explain_choice(
            Problem("spmm", (2048, 1024), 200_000, 2, dtype="bfloat16", format="CVS(2)")
        )
    assert "pair_dots True\n" in shown


@pytest.mark.parametrize("format", ["CVS(4)", "CVS(8)"])
def test_float16_with_long_vectors_is_widened_on_intel(format):
    of = dict(k=1024, nnz=200_000, m=2048, dtype="float16", format=format)
    for n in (32, 64):
        assert chosen_on(INTEL, n=n, **of) == CpuTile(columns=n, packed=True)
        for other in (dict(dtype="float32"), dict(dtype="bfloat16"), dict(nnz=50_000)):
            assert chosen_on(INTEL, n=n, **of | other) == CpuTile()
    assert chosen_on(INTEL, n=31, **of) == chosen_on(INTEL, n=65, **of) == CpuTile()


def test_rows_are_widened_up_to_half_of_a_second_level_cache():
    of = dict(k=65_536, nnz=16 * 65_536, m=65_536, n=4, dtype="bfloat16")  # 1 MiB of float32
    for l2, chosen in ((1, CpuTile()), (2, CpuTile(columns=4, packed=True))):
        assert chosen_on(Machine(l2_bytes=l2 << 20, intel=True), **of) == chosen


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_are_widened_elsewhere_than_on_intel(dtype):
    """With registers of 64 bytes: entries with a B that fits in the first-level cache, vectors of
    2 rows with one column and four."""
    of, near = dict(k=8192, nnz=200_000, dtype=dtype), CpuTile(columns=1, packed=True)
    zen = Machine(l1_bytes=32 << 10, whole=False)
    for found, n, chosen in ((zen, 1, near), (zen, 2, CpuTile()), (Machine(), 4, CpuTile())):
        assert chosen_on(found, n=n, **of) == chosen
    for found, n in ((INTEL, 2), (Machine(), 2), (Machine(), 3)):
        assert chosen_on(found, n=n, **of) == CpuTile(columns=n, packed=True)
    twos = of | dict(k=1024, format="CVS(2)")
    assert chosen_on(zen, n=2, **twos) == CpuTile()
    for found in (zen, INTEL, Machine(vector_bytes=32)):
        assert chosen_on(found, n=1, **twos) == near
    eights = of | dict(format="CVS(8)", nnz=8 * 200_000)
    assert chosen_on(zen, n=4, **eights) == CpuTile(columns=4, packed=True)
    # Of 1024 rows 128 columns take half of the second-level cache.
    for k, n, columns in ((1024, 31, 0), (1024, 32, 32), (1024, 129, 128), (2048, 129, 64)):
        many = columns and dtype == "float16"
        expected = CpuTile(columns=columns, packed=True) if many else CpuTile()
        assert chosen_on(zen, n=n, **twos | dict(k=k)) == expected


def test_tiles_of_float16_where_widening_a_register_takes_two_instructions():
    of, zen = dict(k=1024, nnz=200_000, dtype="float16"), Machine(l1_bytes=32 << 10, whole=False)
    tile = lambda columns: CpuTile(columns=columns, packed=True)  # noqa: E731
    for n, chosen in ((16, CpuTile()), (32, tile(32)), (47, tile(47)), (48, CpuTile())):
        assert chosen_on(zen, n=n, **of) == chosen
    eights = of | dict(format="CVS(8)", nnz=8 * 200_000)
    for n, columns in ((16, 0), (40, 40), (64, 64), (256, 128)):
        assert chosen_on(zen, n=n, **eights) == (tile(columns) if columns else CpuTile())
    wide = dict(k=8192, n=128)  # 32 columns take a whole cache
    assert chosen_on(zen, **eights | wide) == chosen_on(zen, **of | dict(k=8192, n=32)) == CpuTile()
    for found in (Machine(vector_bytes=32), Machine()):
        assert chosen_on(found, n=32, **of) == chosen_on(found, n=40, **eights) == CpuTile()


def test_the_machine_is_read_and_shown():
    found = Machine(**machine())
    assert 4 << 10 <= found.l1_bytes <= 1 << 20 and 64 << 10 <= found.l2_bytes <= 1 << 30
    assert found.cores >= 1 and found.vector_bytes in (16, 32, 64)
    assert f"l2_bytes {found.l2_bytes}" in info()["cpu_machine"]
    shared = pathlib.Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    if shared.exists():  # not the sum over a package of several
        assert f"{found.l3_bytes >> 10}K" == shared.read_text().strip()


def test_a_choice_is_explained_by_its_rule_and_what_that_reads():
    wide = Problem("spmm", (5000, 10_000), 10**6, n=128)
    with on_machine(INTEL):
        text = explain_choice(wide)
        plain = explain_choice(dataclasses.replace(wide, n=64))
    assert text.startswith(
        "CpuTile(columns=32, nonzeros=8192, packed=True)\nrule:    rows of B are"
    )
    assert "(200 for each row, 100 for each column), n = 128, B of 5120000 bytes" in text
    told = "machine: l1_bytes 49152, l2_bytes 2097152, intel True, slab 1.25, row_length 24\n"
    assert told in text
    assert text.endswith(choose_schedule(wide).explain(wide).splitlines()[-1])
    assert "rule:    B is near, or its rows are used too seldom" in plain
    with pytest.raises(NotImplementedError, match="no kernel for dtype int32"):
        explain_choice(dataclasses.replace(wide, dtype="int32"))


def test_each_call_of_a_function_is_explained():
    A, X = random((256, 32), density=0.25), jnp.ones((32, 8), jnp.float32)
    text = explain(spmm, A, X)
    lines = text.splitlines()
    choice = explain_choice(Problem("spmm", (256, 32), 2048, n=8)).splitlines()
    assert lines[:2] == [f"spmm: {choice[0]}", choice[1]] and lines[4:] == choice[2:]
    # 2048 values and columns, 257 offsets, B [32, 8] and C [256, 8], of 4 bytes each
    assert lines[2].startswith(f"bytes:   {4 * (2 * 2048 + 257 + 288 * 8):,} ")
    assert "CpuTile(columns=0, nonzeros=1024)" in lines[3] and "tune" in lines[3]
    named = explain(spmm, A, X, schedule="CpuTile(nonzeros=2048)").splitlines()
    assert named[0] == "spmm: CpuTile(columns=0, nonzeros=2048)"
    assert named[1] == f"rule:    the call names it; the default is {choice[0]}"

    def loss(values, X):
        B = A.with_values(values)
        return jnp.sum(sparse_softmax(B).values ** 2) + jnp.sum(spmm(B, X) ** 2)

    told = explain(jax.grad(loss, (0, 1)), A.values, X, platform="cuda").split("\n\n")
    of_ops = sorted(call.partition(":")[0] for call in told)
    assert set(of_ops) == {"sddmm", "sparse_softmax", "spmm"} and of_ops.count("spmm") == 2
    assert all("grid:" in call for call in told if call.startswith("spmm"))
    blocks = random((256, 32), density=0.25, format=BCSR(4, 8))
    told = explain(spmm, blocks, jnp.ones((256, 8), jnp.float32), transpose=True, platform="cuda")
    assert told.count("rule:") == 1  # that octets would not do is no call
    tensor = random((8, 6), density=0.5).asformat("coo")
    told = explain(einsum, "ij,jr,jr->ir", tensor, X[:6], X[:6])
    assert told.startswith("D(i,r) += A(i,j) * B(j,r) * C(j,r)") and "CPUThread" in told
    assert explain(spmm, A.astype(int), X.astype(int)).startswith("spmm: no call with a schedule")
    with pytest.raises(TypeError, match=r"explain\(spmm, A, B\), got ndarray"):
        explain(np.ones(3))
    with pytest.raises(ValueError, match='platform must be "cpu" or "cuda", got \'tpu\''):
        explain(spmm, A, X, platform="tpu")


def test_explain_of_sparse_products():
    """Of structures that are not traced, of a plan, and in a capacity; what runs, and why."""
    A = random((64, 32), density=0.25)
    structure, values = explain(spgemm, A, A.T).split("\n\n")
    pattern = A.to_scipy() != 0
    products = np.asarray(pattern @ pattern.sum(0))
    C = spgemm_plan(A, A.T)
    assert structure.startswith(f"spgemm: [64, 32] with {A.nnz} entries times [32, 64] with ")
    told = f"{products.sum():,} products, {products.max():,} of a row at most, for {C.nnz:,} ent"
    assert told in structure and "HashRows(sorted=False)" in structure
    assert f"values at {C.nnz} entries" in values and "the kernel" in values
    assert "an array over all 64 columns" in structure
    assert "a row in a hash table" in explain(spgemm, eye(1), eye(1, 1 << 21))
    assert "a launch" in explain(spgemm, A, A.T, platform="cuda")
    assert "plain JAX" in explain(spgemm, A.astype(int), A.T.astype(int))
    at_plan = lambda v: spgemm(A.with_values(v), A.T, plan=C).values
    assert explain(at_plan, A.values) == values
    traced = explain(lambda A: spgemm(A, A.T, nse=99).values, A)
    assert "traced" in traced and "capacity of 99" in traced
    S = A[:32]
    assert "in one native pass" in explain(lambda x: (S @ S) @ x, jnp.ones(32, A.dtype))
    assert explain(spgemm, A, A.T, schedule="HashRows()").splitlines()[1] == "HashRows(sorted=True)"
    with pytest.raises(ValueError, match=r"explain\(spgemm, A, B\) says how .*, got 'spgemm'"):
        Problem("spgemm", (64, 32), 512)


def test_a_choice_depends_on_the_machine_as_it_says():
    """A field that is not named has no influence, and each one is named and has one somewhere."""
    changes = dict(l1_bytes=12 << 10, l2_bytes=8 << 20, intel=True, matrix_tiles=True)
    changes |= dict(cores=64, vector_bytes=32, l3_bytes=0, slab=0.1, row_length=1000, whole=False)
    influence, named = set(), set()
    sizes = ((5000, 10_000, 10**6), (512, 512, 120_000), (1000, 1024, 10**6), (2048, 2048, 10**5))
    for op, dtype, format, (m, k, nnz), n, permuted, platform in itertools.product(
        ("spmm", "sddmm", "sparse_softmax", "attention"),
        ("float32", "bfloat16", "float16"),
        ("CSR", "CVS(8)"),
        sizes,
        (2, 4, 64, 128, 256),
        (False, True),
        ("cpu", "cuda", "tpu"),
    ):
        problem = Problem(op, (m, k), nnz, n, 1, dtype, format, platform, permuted and op == "spmm")
        with on_machine(Machine()):
            text, schedule = explain_choice(problem), choose_schedule(problem)
        assert text.startswith(f"{schedule}\nrule:    ")
        line = next((line for line in text.splitlines() if line.startswith("machine: ")), "")
        for field, value in changes.items():
            with on_machine(Machine(**{field: value})):
                if explain_choice(problem).splitlines()[:2] != text.splitlines()[:2]:
                    influence.add(field)
                    assert f" {field} " in line
            named |= {field} if f" {field} " in line else set()
    read = {"l1_bytes", "l2_bytes", "cores", "intel", "slab", "row_length", "vector_bytes", "whole"}
    assert influence == named == {*read, "matrix_tiles"}


def test_a_machine_lasts_as_long_as_its_context():
    before = this_machine()
    with pytest.raises(KeyError), on_machine(INTEL):
        assert this_machine() == INTEL
        raise KeyError
    assert this_machine() == before
