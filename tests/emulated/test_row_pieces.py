"""Long rows in pieces: the work list, and the kernels of spmm that take it, run by the emulator."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, from_row_lengths
from cuda_sources import require_nvrtc
from emulated_launch import Counted, emulate
from spmm_oracle import dense_operand, oracle
from tolerance import DTYPES, assert_within

from sgap_jax import CSR, Problem, Schedule, ScheduleError, SparseArray, spmm
from sgap_jax.launch.row_pieces import WorkList, sum_plan
from sgap_jax.launch.spmm import launch_plan, merge_plan, work_of
from sgap_jax.primitives._row_pieces import work_list
from sgap_jax.schedules.emulated import Emulated

POINTS = [
    "{<1 row, 4 col>, 1} chunk=8",
    "{<1 row, 1 col>, 1} tile_size=4 chunk=1",
    "{<1 row, 2 col>, 1} block_size=32 chunk=33",
    "{<1/8 row, 2 col>, 8} chunk=16",
    "{<1/32 row, 4 col>, 32} chunk=7",
]
TWO = ["SpmmPiecesKernel", "SumPiecesKernel"]


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def by_loops(work, offsets, chunk=None):
    """The work list as its docstring says, with pieces of `chunk` entries in place of its own."""
    chunk = chunk or work.chunk
    nothing = (work.rows, 0, 0, -1)
    full, tails, merged, before = [], [], [], 0
    for row, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        cuts = list(range(start, end, chunk)) or [start]
        pieces = [(row, cut, min(cut + chunk, end)) for cut in cuts]
        whole = [piece for piece in pieces if piece[2] - piece[1] == chunk]
        alone, tail = len(pieces) == 1, nothing
        for i, piece in enumerate(pieces):
            element = (*piece, -1 if alone else 2 * before + i)
            if piece in whole:
                full.append(element)
            else:
                tail = element
        tails.append(tail)
        if not alone:
            merged.append((row, 2 * before, 2 * before + len(pieces), -1))
        before += len(whole)
    full += [nothing] * (work.whole - len(full))
    groups = lambda tail: sum(part * (tail[2] - tail[1]) < chunk for part in (2, 8, 32))
    tails.sort(key=groups)  # the long ones first
    merged += [nothing] * (work.merged - len(merged))
    return np.array([*full, *tails, *merged])


@pytest.mark.parametrize("chunk", [1, 8, 33])
def test_the_work_list_is_that_of_plain_loops(chunk):
    """Each entry is in one piece, no place in two, and the bounds hold."""
    made = jax.jit(work_list, static_argnums=0)
    for case in list(BATTERY.values())[chunk % 2 :: 2]:
        work = WorkList(case.shape[0], case.nnz, chunk)
        if work.merged == 0:
            continue
        found = np.asarray(made(work, jnp.asarray(case.row_offsets)))
        np.testing.assert_array_equal(found, by_loops(work, case.row_offsets.tolist()))
        assert found.shape == (work.elements, 4)
        own = found[: work.pieces]
        own = own[own[:, 0] < work.rows]
        entries = [p for _, first, last, _ in own for p in range(first, last)]
        assert sorted(entries) == list(range(case.stored)), case.name
        assert set(range(work.rows)) == set(own[:, 0])
        places = own[own[:, 3] >= 0, 3]
        assert len(set(places)) == len(places) and places.max(initial=-1) < work.places
        assert (own[:, 2] - own[:, 1]).max() <= chunk


def test_pieces_are_as_short_as_the_list_holds():
    """Of 128, 64, 32 and 16 entries: those that exceed the mean by a quarter, and make no more full
    chunks than the sizes have."""
    made = jax.jit(work_list, static_argnums=0)
    for lengths, capacity, chunk in (
        ([700, *[1] * 63], 1200, 128),  # at most 9 full chunks, and 700 entries have 10 of 64
        ([700, *[1] * 63], 1400, 64),
        ([700, *[1] * 63], 2816, 32),  # the mean is 11
        ([700, *[1] * 29], 9999, 32),  # 24
        ([700, *[10] * 29], 9999, 64),  # 33
        ([700, *[1] * 99], 9999, 16),
        ([100] * 9, 9999, 128),
        ([0] * 9, 9999, 16),
    ):
        work = WorkList(len(lengths), capacity, 128, 16)
        offsets = np.cumsum([0, *lengths])
        found = np.asarray(made(work, jnp.asarray(offsets, jnp.int32)))
        np.testing.assert_array_equal(found, by_loops(work, offsets.tolist(), chunk))


def test_the_list_stays_in_bounds_whatever_the_offsets_hold():
    """A checked structure may have been changed since; the kernels trust the list."""
    several = [90, 75, 60, 45, 30, 15, 0, 90], [-5, 2**31 - 1, -(2**31), 9, 8, 7, 200, 3]
    for offsets, least in itertools.product(several, (None, 1)):
        work = WorkList(7, 90, 7, least)
        found = np.asarray(work_list(work, jnp.asarray(offsets, jnp.int32)))
        own, rows = found[: work.pieces], found[work.pieces :]
        assert own[:, 1:3].min() >= 0 and own[:, 1:3].max() <= 90
        assert own[:, 3].max() < work.places and rows[:, 2].max() <= work.places


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_battery(point, dtype):
    i = POINTS.index(point) + DTYPES.index(dtype)
    for name in list(BATTERY)[i % 3 :: 3]:
        case, transpose = BATTERY[name], bool((i // 2 + len(name)) % 2)
        n = (8, 5)[(i + len(name)) // 2 % 2] if dtype != "float64" else 2
        B = dense_operand(case, n, transpose)
        schedule = Emulated(emulate, Schedule.parse(point))
        C = spmm(array(case, dtype), jnp.asarray(B, dtype), transpose=transpose, schedule=schedule)
        assert_within(np.asarray(C, np.float64), *oracle(case, dtype, B, transpose))


def launched(case, text, values, B, run=emulate):
    """C of the two launches, without JAX: faults of the emulator are raised as they are."""
    (batch, _, n), (m, k), point = B.shape, case.shape, Schedule.parse(text)
    problem = Problem("spmm", (m, k), case.nnz, n, batch, platform="cuda")
    work = work_of(problem, point)
    elements = by_loops(work, case.row_offsets.tolist()).astype(np.int32)
    given = (values, elements, case.column_indices, np.zeros(0, np.int32), B)
    results = [((batch, m, n), np.float32), ((batch, work.places, n), np.float32)]
    C, sums = run(launch_plan(problem, point, (batch, batch)), given, results)
    return run(merge_plan(problem, point), (sums, elements, C), results[:1])[0]


def integers(case, *shape, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape or case.nnz).astype(np.float32)


def test_two_launches_and_one_where_no_row_is_long():
    case, run = BATTERY["one_heavy_row"], Counted()
    A, B = array(case, "float32"), jnp.ones((case.shape[1], 8), jnp.float32)
    A = A.with_values(jnp.asarray(integers(case)))

    def loss(schedule):
        return jax.value_and_grad(
            lambda v, B: jnp.sum(spmm(A.with_values(v), B, schedule=schedule) ** 2), (0, 1)
        )

    found = loss(Emulated(run, Schedule.parse(POINTS[0])))(A.values, B)
    assert run.kernels[:2] == TWO
    assert run.kernels.count("SpmmPiecesKernel") == 2  # A B, and A^T dC
    jax.tree.map(np.testing.assert_array_equal, found, loss(None)(A.values, B))
    run.kernels.clear()
    spmm(A, B, schedule=Emulated(run, Schedule.parse("{<1 row, 4 col>, 1} chunk=1000")))
    assert run.kernels == ["SpmmRowKernel"]


def test_batches_and_several_structures_are_two_launches():
    case, run = BATTERY["heavy_first_and_last"], Counted()
    schedule = Emulated(run, Schedule.parse(POINTS[0]))
    A = array(case, "float32")
    values, B = integers(case, 3, case.nnz), integers(case, 3, case.shape[1], 4, seed=1)
    every = jax.vmap(lambda v, B, s: spmm(A.with_values(v), B, schedule=s), (0, 0, None))
    np.testing.assert_array_equal(every(values, B, schedule), every(values, B, None))
    assert run.kernels == TWO
    run.kernels.clear()
    lengths = np.diff(case.row_offsets)
    others = [from_row_lengths("other", case.shape[1], np.roll(lengths, r)) for r in (0, 1, 5)]
    made = [array(c, "float32").with_values(jnp.asarray(integers(c))) for c in others]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *made)
    product = jax.vmap(lambda A, B, s: spmm(A, B, schedule=s), (0, 0, None))
    np.testing.assert_array_equal(
        product(stacked, B, schedule), [spmm(A, b) for A, b in zip(made, B, strict=True)]
    )
    assert run.kernels == TWO


@pytest.mark.parametrize("point", [POINTS[0], POINTS[3]])
def test_the_same_bits_in_any_order_of_the_blocks(point):
    case = BATTERY["one_heavy_row"]
    A, B = array(case, "float32"), dense_operand(case, 4).astype(np.float32)
    of = lambda seed: Emulated(Counted(seed), Schedule.parse(f"{point} block_size=32"))
    first, *others = [np.asarray(spmm(A, B, schedule=of(seed))) for seed in range(3)]
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("offsets", [[0, 900, 3, 7], [5, -2, 2**31 - 1, 9], [0, 20, 20, 40]])
def test_offsets_made_in_a_program_may_hold_anything(offsets):
    """They are made valid before the list is made, as for other kernels."""
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.integers(-3, 4, 40), jnp.float32)
    indices = jnp.asarray(rng.integers(-5, 30, 40), jnp.int32)
    B = jnp.asarray(rng.integers(-3, 4, (25, 4)), jnp.float32)

    def product(offsets, schedule):
        A = SparseArray.from_arrays(values, offsets, indices, shape=(3, 25), format=CSR)
        return spmm(A, B, schedule=schedule)

    product = jax.jit(product, static_argnums=1)
    given = jnp.asarray(offsets, jnp.int32)
    run = Counted()
    found = product(given, Emulated(run, Schedule.parse("{<1 row, 4 col>, 1} chunk=4")))
    np.testing.assert_array_equal(found, product(given, None))
    assert run.kernels == TWO


@pytest.mark.parametrize(
    "text",
    [
        "{<2 row, 4 col>, 1} chunk=8",
        "{<4 nnz, 4 col>, 1} chunk=8",
        "{<1/8 row, 4 col>, 4} chunk=8",
        "{<1/8 row, 4 col>, 8} worker_dim_r=1/2 chunk=8",
        "{<1 row, 4 col>, 1} chunk=1/2",
        "{<1 row, 4 col>, 1} chunk=4294967296",
    ],
)
def test_points_without_pieces_are_refused(text):
    with pytest.raises(ScheduleError, match="chunk"):
        Schedule.parse(text)


def test_other_operations_and_too_many_sums_are_refused():
    point = Schedule.parse("{<1/8 row, 1 col>, 8} chunk=1")
    for op in ("gspmm", "sddmm", "row_sum"):
        with pytest.raises(ScheduleError, match="only spmm has kernels for pieces.* leave chunk"):
            point.check(Problem(op, (9, 9), 20, platform="cuda"))
    with pytest.raises(ScheduleError, match="more sums than 2\\^31; give a larger chunk"):
        point.check(Problem("spmm", (9, 9), 2**30, platform="cuda"))


@pytest.mark.parametrize(
    ("header", "right", "wrong"),
    [
        ("spmm_pieces.cuh", "AllOfRow(own.place, places)", "true"),
        ("spmm_pieces.cuh", "first = own.first + group.lane", "first = own.first"),
        ("spmm_pieces.cuh", "batch * places + unsigned(own.place)", "unsigned(own.place)"),
        ("spmm_pieces.cuh", "place.worker < pieces", "place.worker < pieces - 1"),
        ("row_pieces.cuh", "pieces + blockIdx.x", "blockIdx.x"),
        ("row_pieces.cuh", "from += kShare * width", "from += width"),
        ("row_pieces.cuh", "batch * places + start", "start"),
        ("row_pieces.cuh", "each[i] += each[i + half];", ";"),
    ],
)
def test_planted_bugs_are_caught(header, right, wrong, planted):
    case = BATTERY["heavy_first_and_last"]
    values, B = integers(case, 2, case.nnz), integers(case, 2, case.shape[1], 8, seed=1)
    expected = [
        spmm(array(case, "float32").with_values(v), b) for v, b in zip(values, B, strict=True)
    ]

    def check():
        for point in (POINTS[0], POINTS[3]):
            np.testing.assert_array_equal(launched(case, point, values, B), expected)

    planted(header, right, wrong, check)


def test_a_launch_has_blocks_for_what_the_capacity_bounds():
    problem = Problem("spmm", (100, 90), 1000, n=128, platform="cuda")
    point = Schedule.parse("{<1 row, 4 col>, 1} chunk=64")
    work, call = work_of(problem, point), launch_plan(problem, point)
    assert (work.pieces, work.merged, work.places) == (115, 15, 30)
    assert call.grid == (-(-115 // 8), 1, 1) and call.scalars[-4:] == (115, 130, 30, 0)
    whole = Schedule.parse("{<1 row, 4 col>, 1} chunk=1000")
    assert "second launch" not in whole.explain(problem)


def test_symbolic_sizes_are_refused_in_a_sentence():
    (size,) = jax.export.symbolic_shape("size")
    for n, nnz in ((size, 20), (4, size)):
        with pytest.raises(NotImplementedError, match="spmm: a launch on CUDA has the program's"):
            Schedule.parse(POINTS[0]).check(Problem("spmm", (9, 9), nnz, n, platform="cuda"))


def test_more_tiles_of_sums_than_a_grid_has():
    """The sums of columns, or of dQ, beyond 65535 tiles of 128: blocks take tiles in turn, and rows
    where there are more than run at once."""
    wide = sum_plan(WorkList(4, 1000, 8), "float32", 2**24, 2**26, 1, 4)
    assert wide.grid == (1, 65535, 1)
    work = WorkList(9000, 90_000, 8)
    assert [sum_plan(work, "float32", n, 9000 * n, 1, 4).grid[0] for n in (4, 640)] == [1280, 256]
    case = BATTERY["one_heavy_row"]
    values, B = integers(case, 1, case.nnz), integers(case, 1, case.shape[1], 300, seed=1)
    merging = lambda call: replace(call, grid=(call.grid[0], min(call.grid[1], 2), 1))
    few = lambda call, *rest: emulate(merging(call) if "Sum" in call.kernel else call, *rest)
    found = launched(case, "{<1 row, 4 col>, 1} chunk=8", values, B, few)
    expected = spmm(array(case, "float32").with_values(values[0]), B[0])
    np.testing.assert_array_equal(found[0], expected)
