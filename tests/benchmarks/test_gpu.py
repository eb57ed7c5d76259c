"""The GPU benchmarks run from end to end on the emulator; what their summary makes of figures."""

import contextlib
import csv
import importlib.util
import json

import jax
import numpy as np
import pytest
from cuda_sources import require_nvrtc

from benchmarks import problems
from benchmarks.gpu import (
    bench,
    figures,
    octets,
    octets_sddmm,
    ours,
    peers,
    run,
    summary,
    tables,
    timing,
)
from benchmarks.problems import Unavailable
from sgap_jax import CVS, SparseArray, sddmm
from sgap_jax.runtime.default_calls import OF_VECTORS


@pytest.fixture(autouse=True)
def users_settings():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def timed(rows):
    """The contenders with a time, and those that say that torch is missing where it is."""
    installed = importlib.util.find_spec("torch") is not None

    def missing(row):
        return not installed and row.get("notes") == "No module named 'torch'"

    return {row["contender"] for row in rows if row["us"] or missing(row)}


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """The folder of the results of a dry run."""
    require_nvrtc()
    results = tmp_path_factory.mktemp("results")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        names = ["small_weights", "small_vectors"]
        run.main(["--dry-run", "--problems", *names, "--results", str(results)])
    (folder,) = results.iterdir()
    return folder


def test_every_row_has_a_time_or_a_reason_and_the_stamp(dry_run):
    rows = [row for op in ("spmm", "sddmm", "softmax") for row in read(dry_run / f"{op}.csv")]
    assert {(row["n"], row["contender"]) for row in rows} >= {
        ("4", name) for name in ("ours", *peers.KERNELS["spmm"], *peers.PROGRAMS["spmm"])
    }
    for row in rows:
        assert bool(row["us"]) != bool(row.get("notes")), row
        assert row["device"] and row["driver"] and row["commit"] and row["date"]
        assert "wrong" not in row.get("notes", "")
    timed = {row["contender"] for row in rows if row["us"]}
    assert {"ours", "ours_jax", "jax_bcoo", "jax_segment_sum", "jax_dense"} <= timed


def test_points_are_searched_and_right(dry_run):
    points = read(dry_run / "points.csv")
    assert len({row["schedule"] for row in points}) >= 3
    assert all(row["us"] and not row.get("notes") for row in points)


@pytest.mark.parametrize("op", OF_VECTORS)
def test_column_vectors_are_measured_beside_their_entries(dry_run, op):
    rows = {row["contender"]: row for row in read(dry_run / f"{op}.csv")}
    assert {row["problem"] for row in rows.values()} == {"small_vectors"}
    assert rows["vectors"]["schedule"].startswith("SubwarpTile(vector_length=4")
    assert rows["vectors"]["schedule"].endswith("CVS(4)")
    assert rows["ours"]["schedule"].startswith("{<")
    for name in ("vectors", "ours", "ours_jax"):
        assert rows[name]["us"] and not rows[name].get("notes")
    # One column index for each vector: less to read.
    entries = 8 * int(rows["ours"]["nnz"])
    assert float(rows["vectors"]["bound_us"]) < 1e6 * (entries + 4 * 161 + 16 * 256) / 1e10
    assert (
        "of column vectors, kernels: time over that of the vectors"
        in (dry_run / "summary.md").read_text()
    )


def test_the_summary_says_that_it_was_a_dry_run(dry_run):
    text = (dry_run / "summary.md").read_text()
    assert "no figure here says anything about a GPU" in text
    assert "| SpMM over the best cuSPARSE algorithm" in text and "| not measured |" in text
    assert json.loads((dry_run / "run.json").read_text())["not_started"] == []


def test_no_case_starts_when_the_time_is_over(tmp_path, monkeypatch):
    require_nvrtc()
    monkeypatch.setenv("SGAP_GPU_SECONDS", "-1")
    run.main(["--dry-run", "--problems", "small_weights", "--results", str(tmp_path)])
    (folder,) = tmp_path.iterdir()
    planned = [op for op, _ in run.DRY_PLAN if op not in OF_VECTORS]  # it has no vectors
    assert len(json.loads((folder / "run.json").read_text())["not_started"]) == len(planned)
    assert (
        "Not started, the time was over: spmm small_weights n=4"
        in (folder / "summary.md").read_text()
    )


def test_a_wrong_result_of_ours_ends_the_run_with_an_error(tmp_path, monkeypatch):
    require_nvrtc()
    monkeypatch.setattr(run, "DRY_PLAN", (("spmm", 1),))
    monkeypatch.setattr(timing.DryRun, "get", lambda self, array: np.asarray(array) + 1)
    with pytest.raises(SystemExit, match="1 results of ours are wrong, the first: .*small_weights"):
        run.main(["--dry-run", "--problems", "small_weights", "--results", str(tmp_path)])


@pytest.mark.parametrize("wrong", [0, 1])
def test_octet_tiles_run_and_wrong_results_end_them(wrong, tmp_path, monkeypatch):
    require_nvrtc()
    monkeypatch.setattr(timing.DryRun, "get", lambda self, array: np.asarray(array) + wrong)
    command = ["--dry-run", "--results", str(tmp_path)]
    if wrong:
        monkeypatch.setattr(octets, "FIELDS", ())
        with pytest.raises(SystemExit, match="1 results of ours are wrong, the first: .*small_v8"):
            octets.main(command)
        return
    octets.main(command)
    (folder,) = tmp_path.iterdir()
    rows = read(folder / "octets.csv")
    tiles = [row for row in rows if row["contender"] in ("ours", "tile")]
    assert len(tiles) == 1 + len(octets.FIELDS) and all(row["us"] for row in tiles)
    assert {"cublas", "jax_dense"} < timed(rows)
    for row in rows:
        assert bool(row["us"]) != bool(row.get("notes")) and row["device"], row
    text = (folder / "octets.md").read_text()
    assert "no figure here says anything about a GPU" in text and "not measured" in text
    assert json.loads((folder / "octets.json").read_text())["not_started"] == []


@pytest.mark.parametrize("wrong", [0, 1])
def test_octet_tiles_of_sddmm_run_and_wrong_results_end_them(wrong, tmp_path, monkeypatch):
    require_nvrtc()
    monkeypatch.setattr(timing.DryRun, "get", lambda self, array: np.asarray(array) + wrong)
    command = ["--dry-run", "--results", str(tmp_path)]
    if wrong:
        monkeypatch.setattr(octets_sddmm, "FIELDS", ())
        with pytest.raises(SystemExit, match="1 results of ours are wrong, the first: .*small_v8"):
            octets_sddmm.main(command)
        return
    octets_sddmm.main(command)
    (folder,) = tmp_path.iterdir()
    rows = read(folder / "octets_sddmm.csv")
    names = ["ours", *["tile"] * len(octets_sddmm.FIELDS), "entries", "cublas", "jax_dense"]
    assert [row["contender"] for row in rows] == names and timed(rows) == set(names)
    assert "no figure here says anything about a GPU" in (folder / "octets_sddmm.md").read_text()
    assert json.loads((folder / "octets_sddmm.json").read_text())["not_started"] == []


@pytest.mark.parametrize("wrong", [0, 1])
def test_sgaps_points_and_compiled_chains_run_and_wrong_results_end_them(
    wrong, tmp_path, monkeypatch
):
    require_nvrtc()
    monkeypatch.setattr(timing.DryRun, "get", lambda self, array: np.asarray(array) + wrong)
    monkeypatch.setattr(tables, "POINTS", tuple(tables.CHAINS.values()))
    command = ["--dry-run", "--problems", "small_weights", "--results", str(tmp_path)]
    if wrong:
        monkeypatch.setattr(tables, "CHAINS", {"S2": tables.CHAINS["S2"]})
        monkeypatch.setattr(tables, "POINTS", ())
        with pytest.raises(SystemExit, match="1 results of ours are wrong, the first: .*compiled"):
            tables.main(command)
        return
    tables.main(command)
    (folder,) = tmp_path.iterdir()
    found = read(folder / "tables.csv")
    assert all(row["us"] for row in found)
    expected = [(name, str(p)) for name in ("point", "compiled") for p in tables.CHAINS.values()]
    assert [(row["contender"], row["schedule"]) for row in found] == expected
    text = (folder / "tables.md").read_text()
    assert "no figure here says anything about a GPU" in text
    assert "| 1 | not measured | not measured |" in text and "| S4 | {<1 nnz, 2 col>, 32} |" in text


def test_sgaps_tables_take_the_best_of_a_family_and_normalize():
    us = {str(point): 8.0 for point in tables.POINTS}
    us |= {str(tables.shared(32, 1, 8)): 2.0, str(tables.segments(1, 8)): 1.0}
    rows = [
        {"problem": name, "contender": "point", "schedule": schedule, "us": str(time * slower)}
        for name, slower in (("a", 1), ("b", 3))
        for schedule, time in us.items()
    ]
    rows.append({"problem": "a", "contender": "compiled", "schedule": "{<4 row, 2 col>, 1}"})
    rows[-1]["us"] = "4"
    about = dict.fromkeys(("device", "driver", "commit", "date", "dry_run", "not_started"))
    text = tables.summary(rows, about)
    assert "| 1 | 4.000 (2) | 4.000 (2) | 1.000 (2) | 1.000 (2) |" in text
    assert "| 1 | 1.000 (2) | 2.000 (2) | 1.000 (2) | 1.000 (2) |" in text  # 2 over 1, r = 8
    assert "| 8.000 (2) | 8.000 (2) |" in text
    assert "| S2 | {<4 row, 2 col>, 1} | 2.000 (1) |" in text
    only_compiled = [row for row in rows if row["contender"] == "compiled"]
    assert "| S2 | {<4 row, 2 col>, 1} | not measured |" in tables.summary(only_compiled, about)
    slow = tables.ratio(tables.times(rows, "point"), [tables.segments(1, 8)], [tables.BEFORE[0]])
    assert slow == [0.125, 0.125] and tables.normalized(slow) == [1.0, 1.0]


@pytest.mark.parametrize("length", [2, 8])
def test_the_values_of_vectors_are_checked_where_they_stand(length):
    A = problems.vectors(lambda: problems.uniform(5, 30, 0.2), length)
    X, Y = (np.random.default_rng(i).standard_normal((size, 4)) for i, size in enumerate(A.shape))
    exact = sddmm(SparseArray.from_scipy(A, format=CVS(length)), X, Y).values
    wrong = octets_sddmm.checker(A, length, X, Y)
    assert wrong(exact) <= 1 and wrong(X @ Y.T) <= 1
    assert wrong(np.asarray(exact)[::-1]) > 1 and wrong(X @ Y[::-1].T) > 1


def test_blocks_have_as_many_numbers_as_the_vectors():
    A = problems.vectors(lambda: problems.uniform(16, 128, 0.1), 8)
    blocks = octets.in_blocks(A, 8)
    assert abs(blocks.nnz - A.nnz) <= 64 * 8 and blocks.shape == A.shape
    recorded = {}
    case = octets.Case(blocks, 4, timing.DryRun(), 1e10, "sm_90")
    case._library = lambda name, values, indices: recorded.update(values=values, indices=indices)
    case.blocked_ell()
    values, indices = recorded["values"], recorded["indices"]
    dense = np.zeros(blocks.shape, np.float16)
    for row, columns in enumerate(indices):
        for i, column in enumerate(columns):
            block = values[8 * row : 8 * row + 8, 8 * i : 8 * i + 8]
            dense[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = block
    np.testing.assert_array_equal(dense, octets.half(blocks.toarray()))


class FakeTorch:
    """Streams, events and graphs on a clock of its own: a call takes a microsecond."""

    def __init__(self, capturable=True):
        self.now, self.capturing, self.cuda, self.capturable = 0, None, self, capturable
        self.replays = 0
        self.CUDAGraph, self.Stream = lambda: FakeGraph(self), lambda: self
        self.Event = lambda enable_timing: FakeEvent(self)

    def enqueue(self, i):
        if self.capturing is None:
            self.now += 1e-3
        elif self.capturable:
            self.capturing.append(i)
        else:
            raise RuntimeError("operation not permitted when stream is capturing")

    wait_stream = lambda self, other: None
    synchronize = lambda self: None
    current_stream = lambda self: self
    stream = lambda self, stream: contextlib.nullcontext()


class FakeEvent:
    def __init__(self, torch):
        self.torch = torch

    def record(self):
        self.at = self.torch.now

    synchronize = lambda self: None
    elapsed_time = lambda self, other: other.at - self.at


class FakeGraph:
    def __init__(self, torch):
        self.torch = torch

    def capture_begin(self, capture_error_mode):
        self.torch.capturing = self.calls = []

    def capture_end(self):
        self.torch.capturing = None

    def replay(self):
        self.torch.replays += 1
        self.torch.now += 1e-3 * len(self.calls)


@pytest.mark.parametrize("capturable", [True, False])
def test_a_call_is_timed_by_replays_of_a_graph_or_by_events(capturable):
    device = timing.Cuda.__new__(timing.Cuda)
    device.torch = FakeTorch(capturable)
    timed = device.measure(device.torch.enqueue, sets=5)
    np.testing.assert_allclose(timed.seconds, 1e-6)
    assert timed.method == ("graph" if capturable else "events") and timed.spread < 1e-6
    assert device.torch.replays == (timing.ROUNDS + 1 if capturable else 0)
    assert device.torch.capturing is None


def case(A, n=4):
    return bench.Case("spmm", A, n, timing.DryRun(), 1e10, "sm_90")


def test_a_wrong_contender_gets_no_time():
    A = problems.uniform(40, 30, 0.2)
    measured = case(A)
    B = measured.sets.dense[0]
    right = measured._row("right", lambda: (lambda i: None, lambda: A @ B))
    wrong = measured._row("wrong", lambda: (lambda i: None, lambda: A @ B + 1))
    assert right["us"] > 0 and "us" not in wrong and wrong["notes"].startswith("wrong, error")


def test_large_results_are_checked_by_a_sample_with_the_longest_row(monkeypatch):
    A = problems.heavy_row(400, 3000, 1000)
    monkeypatch.setattr(bench, "MOST_CHECKED", 40 * 4)
    B = bench.operands("spmm", A, 4)[0]
    C, wrong = A @ B, bench.spmm_checker(A, B)
    assert wrong(C) <= 1
    C[200] += 1
    assert wrong(C) > 1


def test_what_no_kernel_launches_is_unavailable():
    with pytest.raises(Unavailable, match="0 launches"):
        ours.launch_of(lambda schedule: jax.numpy.ones(3))


def test_sets_are_larger_than_the_cache():
    sets = timing.Cuda.sets(None, 1e6)
    assert sets * 1e6 > 180e6 and timing.Cuda.sets(None, 1e9) == 2
    assert timing.Cuda.sets(None, 10) == timing.MOST_SETS


def rows(*figures):
    names = ("problem", "n", "contender", "us", "nnz", "bound_us", "schedule")
    return [dict(zip(names, map(str, figure), strict=False)) for figure in figures]


def test_ratios_take_the_best_peer_of_each_case():
    cases = summary.times(
        rows(("a", 4, "ours", 2), ("a", 4, "x", 8), ("a", 4, "y", 4), ("b", 4, "ours", 1))
        + rows(("b", 4, "x", 3), ("c", 4, "x", 9), ("a", 1, "ours", 1), ("a", 1, "x", 100))
    )
    assert summary.ratios(cases, ("x", "y")) == [2.0, 3.0]
    np.testing.assert_allclose(summary.mean([2.0, 8.0]), 4.0)


def test_dynamic_choice_against_the_best_static_point():
    points = [
        {"problem": p, "n": "4", "schedule": s, "us": str(us)}
        for p, s, us in (("a", "s", 1), ("a", "t", 2), ("b", "s", 8), ("b", "t", 1), ("b", "u", 1))
    ]
    gain, static = summary.dynamic_over_static(points)
    assert static == "t"  # means 1.41 against 2.83; u was not measured everywhere
    np.testing.assert_allclose(gain, 2**0.5)


def test_goals_that_were_not_measured_say_so(tmp_path):
    values = [value for value, _ in summary.measured(tmp_path)]
    assert values == ["not measured"] * len(summary.GOALS)


def test_each_goal_is_computed_from_its_rows(tmp_path):
    def write(name, *figures):
        found = rows(*figures)
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(
                file, ["problem", "n", "contender", "us", "nnz", "bound_us", "schedule"]
            )
            writer.writeheader()
            writer.writerows(found)

    write(
        "spmm.csv",
        ("a", 4, "ours", 2, 10, 1), ("a", 4, "cusparse_csr_alg2", 6, 10, 1),
        ("a", 4, "ours_jax", 5, 10, 1), ("a", 4, "jax_bcoo", 100, 10, 1),
        ("b", 1, "ours", 3, 2_000_000, 2), ("c", 1, "ours", 9, 1000, 1),
    )  # fmt: skip
    write("points.csv", ("a", 4, "point", 1, 10, 1, "s"), ("a", 4, "point", 2, 10, 1, "t"))
    assert [value for value, _ in summary.measured(tmp_path)] == [
        "3.00",  # 6 / 2
        "1.00",  # one matrix: its best point is the static one
        "6.00",  # 6 / 1
        "20.00",
        "1.50",  # c has too few nonzeros to count
    ]


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_figures_of_the_paper_run_and_wrong_results_end_them(wrong, tmp_path, monkeypatch):
    require_nvrtc()
    monkeypatch.setattr(timing.DryRun, "get", lambda self, array: np.asarray(array) + wrong)
    command = ["--dry-run", "--results", str(tmp_path)]
    if wrong:
        monkeypatch.setattr(figures, "FIGURES", {"figure17": "spmm"})
        with pytest.raises(SystemExit, match="results of ours are wrong, the first: .*small_v8"):
            figures.main(command)
        return
    figures.main(command)
    (folder,) = tmp_path.iterdir()
    for name, op in figures.FIGURES.items():
        rows = read(folder / f"{name}.csv")
        assert [row["contender"] for row in rows] == [figures.DENSE, *figures.SCHEDULES[op]]
        names = timed(rows)
        assert {"cublas", "wmma"} < names and any(name.startswith("mma") for name in names)
        for row in rows:
            assert bool(row["us"]) != bool(row.get("notes")) and row["device"], row
    text = (folder / "figures.md").read_text()
    assert "no figure here says anything about a GPU" in text and "### Figure 19, sddmm" in text
    assert json.loads((folder / "figures.json").read_text())["not_started"] == []


def test_speedups_are_over_the_dense_product_of_the_same_case():
    found = figures.speedups(
        [
            {"problem": p, "family": "f", "n": n, "contender": c, "us": us}
            for p, n, c, us in (
                ("a", 64, "cublas", 8.0),
                ("a", 64, "mma", 2.0),
                ("a", 128, "cublas", 9.0),
                ("a", 128, "mma", 18.0),
                ("b", 64, "mma", 1.0),
            )
        ]
    )
    assert found == {("f", "mma"): [4.0, 0.5]}


def test_a_matrix_without_vectors_has_no_figure():
    A = problems.uniform(40, 30, 0.2)
    with pytest.raises(ValueError, match="figures: the matrix has no column vectors"):
        figures.Case("spmm", A, 4, timing.DryRun(), 1e10, "sm_90")
