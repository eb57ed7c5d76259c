"""The atomic-parallelism space: its points, which are legal, and their notation."""

import dataclasses
import itertools
import pathlib
import pickle
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgap_jax import (
    AtomicParallelism,
    CpuTile,
    Problem,
    Reference,
    Schedule,
    ScheduleError,
    legal_points,
)
from sgap_jax.launch.spmm import launch_plan
from sgap_jax.schedules.point import COLUMNS, algorithm, for_kernels
from sgap_jax.schedules.schedule import GRID_Y, THREADS

PROBLEM = Problem("spmm", (100, 50), 400, n=33, platform="cuda")
AMOUNTS = [Fraction(1, 12), Fraction(1, 8), Fraction(1, 3), Fraction(1, 2), 1, 2, 3, 16]
GROUPS = [1, 2, 4, 8, 16, 32]


def broken_rule(kind, x, col, group):
    """The rule of Sgap, section 3.3, that a point breaks, implemented independently; or None."""
    divided = x < 1
    if kind == "nnz":
        return "rule 1" if divided or col < 1 else None
    if divided and col < 1:
        return "rule 3"
    lanes_of_a_row = 1 / Fraction(x)
    return "rule 2" if divided and (lanes_of_a_row / group).denominator != 1 else None


@pytest.mark.parametrize("kind", ["nnz", "row"])
def test_every_point_is_legal_or_refused_by_its_rule(kind):
    refused = set()
    for x, col, group in itertools.product(AMOUNTS, AMOUNTS, GROUPS):
        rule = broken_rule(kind, x, col, group)
        text = f"{{<{x} {kind}, {col} col>, {group}}}"
        if rule is None:
            point = AtomicParallelism(**{kind: x}, col=col, group=group)
            assert str(point) == text and Schedule.parse(text) == point
            continue
        refused.add(rule)
        with pytest.raises(ScheduleError, match=re.escape(f"{text} is illegal by {rule}")) as error:
            Schedule.parse(text)
        nearest = Schedule.parse(str(error.value).split("nearest legal point: ")[1])
        assert str(nearest) != text
        assert nearest.group <= group
    assert refused == ({"rule 1"} if kind == "nnz" else {"rule 2", "rule 3"})


def test_enumerated_points_are_values_that_parse_back():
    points = list(legal_points(PROBLEM, tunables=True))
    assert len(set(points)) == len(points)
    untuned = dict(block_size=256, tile_size=None, worker_dim_r=1)
    assert {dataclasses.replace(p, **untuned) for p in points} == set(legal_points(PROBLEM))
    for point in points:
        assert Schedule.parse(str(point)) == point
        point.check(PROBLEM)
    assert pickle.loads(pickle.dumps(points)) == points


def test_the_enumeration_has_each_family_and_what_the_paper_tuned():
    points = set(legal_points(PROBLEM))
    assert {algorithm(p, "spmm") for p in points} == {"row", "row_group", "nnz", "nnz_group"}
    # DA-SpMM's algorithms, section 3.3, and Table 1: g = 32 with r = 8 and 4.
    for text in ("{<1 row, 4 col>, 1}", "{<1/32 row, 4 col>, 32}", "{<32 nnz, 4 col>, 1}"):
        assert Schedule.parse(text) in points
    for text in ("{<1 nnz, 4 col>, 32}", "{<1/32 row, 1 col>, 8}", "{<1/32 row, 1 col>, 4}"):
        assert Schedule.parse(text) in points
    assert not any(p.col > 1 for p in legal_points(dataclasses.replace(PROBLEM, n=1)))
    # Table 5: <groupSz, blockSz, tileSz, workerDimR> = <8, 256, 8, 1/2>
    best = AtomicParallelism(
        row=Fraction(1, 8), col=4, group=8, tile_size=8, worker_dim_r=Fraction(1, 2)
    )
    assert best in set(legal_points(PROBLEM, tunables=True))
    assert str(best) == "{<1/8 row, 4 col>, 8} tile_size=8 worker_dim_r=1/2"


def parallel_reduction(g, r, rows=12):
    """Sums of rows of g values, one in each lane: groups of r lanes reduce, and their first lane
    adds the sum to the row. Exactly what {<1/g row, 1 col>, r} says."""
    numbers = np.random.default_rng(0).integers(1, 100, (rows, g))
    lanes = np.pad(numbers.reshape(-1), (0, -(rows * g) % r))
    out = np.zeros(rows, int)
    for first in range(0, len(lanes), r):
        if first // g < rows:
            out[first // g] += lanes[first : first + r].sum()
    return out, numbers.sum(axis=1)


@pytest.mark.parametrize("r", GROUPS)
@pytest.mark.parametrize("g", [2, 3, 4, 8, 12, 32])
def test_rule_2_refuses_exactly_the_points_that_compute_wrong_sums(g, r):
    out, expected = parallel_reduction(g, r)
    try:
        AtomicParallelism(row=Fraction(1, g), group=r)
        legal = True
    except ScheduleError:
        legal = False
    assert legal == np.array_equal(out, expected)


@given(st.text(alphabet="{}<>/, 0123456789rownzcl=_", max_size=40))
def test_any_text_is_a_schedule_or_a_schedule_error(text):
    try:
        schedule = Schedule.parse(text)
    except ScheduleError:
        return
    assert Schedule.parse(str(schedule)) == schedule


def test_parsing_is_lenient_in_spaces_and_strict_in_the_rest():
    point = AtomicParallelism(row=Fraction(1, 8), col=4, group=8, block_size=128)
    for text in (
        "{<1/8 row,4 col>,8},block_size=128",
        " { < 1/8row , 4 col > , 8 } block_size=128",
    ):
        assert Schedule.parse(text) == point
    assert point == AtomicParallelism(row=Fraction(2, 16), col=Fraction(4), group=8, block_size=128)
    for schedule in (CpuTile(columns=16, nonzeros=64, packed=True), CpuTile(), Reference()):
        assert Schedule.parse(str(schedule)) == schedule
    for text in (
        "",
        "{<1 nnz, 4 col>}",
        "{<1 nnz, 4 col>, 4} warps=3",
        "{<1/0 row, 1 col>, 1}",
        "{<-1 row, 1 col>, 1}",
        "CpuTile(columns=n)",
        "CpuTile(rows=1)",
        "VectorTile(vector_length=8)",  # an abstract base class
        "AtomicParallelism(nnz=1)",
        "open('x')",
        "CpuTile(columns=1, columns=2)",
        "-" * 100_000 + "1",  # nested deeper than Python's parser allows
        f"{{<1 row, 1 col>, {'9' * 5000}}}",  # more digits than Python reads
    ):
        with pytest.raises(ScheduleError):
            Schedule.parse(text)


def test_a_text_with_no_such_field_is_told_so():
    with pytest.raises(ScheduleError, match="unexpected keyword argument 'rows'"):
        Schedule.parse("CpuTile(rows=1)")


def test_the_text_of_a_derived_class_is_its_own():
    @dataclasses.dataclass(frozen=True)
    class WideTile(CpuTile):
        pass

    assert Schedule.parse("WideTile(columns=16)") == WideTile(columns=16)
    assert type(Schedule.parse("CpuTile(columns=16)")) is CpuTile
    namesake = dataclasses.dataclass(frozen=True)(type("CpuTile", (CpuTile,), {}))
    assert type(Schedule.parse("CpuTile(columns=16)")) is CpuTile is not namesake


def test_a_row_of_b_fits_in_32_bits():
    """cuda/common/types.cuh multiplies a row's number by its bytes, 32 by 32 bits."""
    assert GRID_Y * THREADS * max(COLUMNS) * 8 < 2**32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(), "either nnz= or row="),
        (dict(nnz=1, row=1), "either nnz= or row="),
        (dict(nnz=0), "nnz must be"),
        (dict(row=0.5), "row must be"),
        (dict(row=True), "row must be"),
        (dict(row=Fraction(2, 3)), "row must be"),
        (dict(nnz=1, col=None), "col must be"),
        (dict(nnz=1, group=64), "group must be one of"),
        (dict(nnz=1, group=3), "group must be one of"),
        (dict(nnz=1, block_size=100), "block_size"),
        (dict(nnz=1, block_size=2048), "block_size"),
        (dict(nnz=1, col=4, tile_size=6), "tile_size must be a power of two times col"),
        (dict(nnz=1, col=4, tile_size=2), "tile_size must be a power of two times col"),
        (dict(nnz=1, group=32, tile_size=16), "more than block_size"),
        (dict(nnz=1, group=4, worker_dim_r=2), "worker_dim_r"),
        (dict(nnz=1, group=4, worker_dim_r=Fraction(1, 3)), "worker_dim_r"),
        (dict(nnz=1, group=4, worker_dim_r=Fraction(1, 2048)), "up to 1024"),
        (dict(nnz=1, group=4, worker_dim_r=Fraction(1, 2**32)), "up to 1024"),
        (dict(nnz=4, worker_dim_r=Fraction(1, 2)), "more rows or nonzeros instead"),
    ],
)
def test_illegal_fields(fields, words):
    with pytest.raises(ScheduleError, match=words):
        AtomicParallelism(**fields)


@pytest.mark.parametrize(
    ("text", "why", "nearest"),
    [
        ("{<3 row, 64 col>, 1}", "64 columns do not fit in the registers", "{<3 row, 4 col>, 1}"),
        ("{<2 row, 1/8 col>, 32}", "sums of different columns", "{<1/8 row, 1 col>, 8}"),
        ("{<4 nnz, 17 col>, 8}", "does not fit in its registers", "{<4 nnz, 4 col>, 8}"),
        ("{<1/8 row, 8 col>, 8} chunk=64", "8} chunk=64 .pieces", "{<1/8 row, 4 col>, 8} chunk=64"),
    ],
)
def test_a_legal_point_without_a_kernel_says_why_and_names_one_that_has(text, why, nearest):
    with pytest.raises(NotImplementedError, match=why) as error:
        Schedule.parse(text).check(PROBLEM)
    assert nearest in str(error.value)
    Schedule.parse(nearest).check(PROBLEM)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("{<3 row, 3 col>, 8}", "{<3 row, 3 col>, 1}"),
        ("{<2 row, 4 col>, 8} worker_dim_r=1/2", "{<4 row, 4 col>, 1}"),
        ("{<1 row, 1/8 col>, 8}", "{<1/8 row, 1 col>, 8}"),
        ("{<2 row, 1/8 col>, 4} tile_size=8", "{<1/8 row, 1 col>, 4} tile_size=8 worker_dim_r=1/2"),
        ("{<3 row, 1/32 col>, 32}", "{<1/32 row, 1 col>, 32} worker_dim_r=1/3"),
    ],
)
def test_a_point_that_is_another_one_by_name(text, same):
    point = Schedule.parse(text)
    run = for_kernels(point, "spmm")
    assert str(run) == same and point.deterministic == run.deterministic
    point.check(PROBLEM)
    assert launch_plan(PROBLEM, point) == launch_plan(PROBLEM, run)
    assert point.explain(PROBLEM).startswith(f"{text}: the same lanes as\n{same}: spmm")
    assert point not in set(legal_points(PROBLEM, tunables=True))


def part_of_a_column(share, group, columns=6):
    """Sums of columns of `share` parts, one in each lane: groups reduce, and their first lane adds
    the sum to its column. What {<1 row, 1/share col>, group} says of a row."""
    numbers = np.random.default_rng(0).integers(1, 100, (columns, share))
    lanes = np.pad(numbers.reshape(-1), (0, -(columns * share) % group))
    out = np.zeros(columns, int)
    for first in range(0, len(lanes), group):
        if first // share < columns:
            out[first // share] += lanes[first : first + group].sum()
    return np.array_equal(out, numbers.sum(axis=1))


@pytest.mark.parametrize("r", GROUPS)
@pytest.mark.parametrize("g", [2, 3, 4, 8, 12, 32])
def test_parts_of_columns_run_exactly_where_their_sums_are_right(g, r):
    point = AtomicParallelism(row=1, col=Fraction(1, g), group=r)
    assert (algorithm(point, "spmm") is not None) == part_of_a_column(g, r)
    assert algorithm(point, "sddmm") is None  # a feature's product has no parts


OPS = ("spmm", "gspmm", "sddmm", "row_sum", "row_max", "row_broadcast", "sparse_softmax")


def refusals(op):
    """What is said of the legal points of an operation that do not run, numbers left out: {reason:
    how many}; and how many run."""
    columns, found, ran = 33 if op in ("spmm", "gspmm", "sddmm") else 1, {}, 0
    amounts, of_columns = [Fraction(1, 64), *AMOUNTS], [Fraction(1, 64), *AMOUNTS, 5, 8, 17, 64]
    for kind, x, col, group in itertools.product(("nnz", "row"), amounts, of_columns, GROUPS):
        if broken_rule(kind, x, col, group):
            continue
        point = AtomicParallelism(**{kind: x}, col=col, group=group)
        for dtype in ("float32", "float64"):
            asked = dataclasses.replace(PROBLEM, op=op, n=columns, dtype=dtype)
            try:
                point.check(asked)
                ran += 1
            except (NotImplementedError, ScheduleError) as error:
                assert str(point) in str(error), error
                reason = re.search(r"for the legal point .*?\} \((.*)\); the nearest", str(error))
                reason = re.sub(r"\d+", "N", reason[1]) if reason else str(error)
                found[reason] = found.get(reason, 0) + 1
    return found, ran


def test_every_legal_point_runs_or_is_refused_for_a_reason_of_the_table():
    """docs/schedules.md has all reasons, with the operations that each is of."""
    page = pathlib.Path(__file__).parents[2].joinpath("docs/schedules.md").read_text()
    table = dict(re.findall(r"^\| \*(.+?)\* \| ([^|]+) \|", page, re.MULTILINE))
    said = {}
    for op in OPS:
        found, ran = refusals(op)
        assert ran > 100
        for reason in found:
            said.setdefault(reason, []).append(op)
    assert {reason: ", ".join(f"`{op}`" for op in ops) for reason, ops in said.items()} == table


@pytest.mark.parametrize("op", ["gspmm", "row_max", "sparse_softmax"])
def test_groups_of_a_row_that_cannot_combine_are_one_group(op):
    """{<1/g row, c col>, r} with r < g: sums are added atomically, nothing else is."""
    n = 33 if op == "gspmm" else 1
    problem = dataclasses.replace(PROBLEM, op=op, n=n)
    point, same = map(Schedule.parse, ("{<1/32 row, 1 col>, 8}", "{<1/32 row, 1 col>, 32}"))
    assert for_kernels(point, op) == same == for_kernels(same, op)
    assert for_kernels(Schedule.parse("{<3 row, 1/8 col>, 2}"), op).group == 8
    assert point.explain(problem).startswith(f"{point}: the same lanes as\n{same}: {op}")
    point.check(problem)
    assert for_kernels(point, "spmm") == for_kernels(point, "sddmm") == point


def test_blocks_leave_registers_for_the_sums_of_many_columns():
    wide = "{<1 row, 12 col>, 1}"
    for size, text, dtype in ((512, wide, "float32"), (256, wide, "float64")):
        problem = dataclasses.replace(PROBLEM, dtype=dtype)
        Schedule.parse(f"{text} block_size={size}").check(problem)
        with pytest.raises(ScheduleError, match=f"blocks have up to {size} threads here"):
            Schedule.parse(f"{text} block_size={2 * size}").check(problem)


def test_a_tunable_is_said_once():
    with pytest.raises(ScheduleError, match="twice"):
        Schedule.parse("{<1 row, 4 col>, 1} tile_size=4 tile_size=8")


def test_a_row_is_shared_by_so_many_groups():
    Schedule.parse("{<1/8192 row, 1 col>, 8}").check(PROBLEM)
    with pytest.raises(ScheduleError, match="share a row; kernels go up to 1024"):
        Schedule.parse("{<1/2147483647 row, 1 col>, 1}").check(PROBLEM)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (dict(platform="cpu"), NotImplementedError, "cuda"),
        (dict(dtype="int32"), NotImplementedError, "int32"),
        (dict(n=10**7), ScheduleError, "tile_size"),
        (dict(shape=(2**31 - 1, 5), n=512), ScheduleError, "blocks"),
    ],
)
def test_problems_that_a_point_does_not_fit(changes, error, words):
    point = Schedule.parse("{<1/32 row, 1 col>, 8}")
    with pytest.raises(error, match=words):
        point.check(dataclasses.replace(PROBLEM, **changes))


@pytest.mark.parametrize("point", list(legal_points(PROBLEM)), ids=str)
def test_explain_says_who_owns_and_who_writes(point):
    text = point.explain(PROBLEM)
    for part in ("grid:", "block:", "group:", "lane:", "write:", "column_indices", str(point)):
        assert part in text
    assert ("atomic" in text) != point.deterministic
    assert f"{point.block_size} threads" in text
