"""The GPU benchmarks run from end to end on the emulator; what their summary makes of figures."""

import contextlib
import csv
import json

import jax
import numpy as np
import pytest
from cuda_sources import require_nvrtc
from gpu_results import read

from benchmarks import problems
from benchmarks.gpu import (
    bench,
    ours,
    peers,
    run,
    session,
    summary,
    timing,
)
from benchmarks.problems import Unavailable
from sgap_jax.launch.defaults import OF_VECTORS

# One worker has all tests of the dry run, which so runs once.
of_the_dry_run = pytest.mark.xdist_group("dry_run")


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


@of_the_dry_run
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


@of_the_dry_run
def test_points_are_searched_and_right(dry_run):
    points = read(dry_run / "points.csv")
    assert len({row["schedule"] for row in points}) >= 3
    assert all(row["us"] and not row.get("notes") for row in points)


@of_the_dry_run
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


@of_the_dry_run
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


def test_a_kernel_that_loses_the_device_ends_the_run(tmp_path, monkeypatch):
    """What is measured then would be errors: the rows before are kept, the cases left listed."""
    error = "CUDA error: an illegal memory access was encountered"

    def faulty(*_):
        raise RuntimeError(error)

    monkeypatch.setattr(run, "DRY_PLAN", (("spmm", 1), ("spmm", 4)))
    monkeypatch.setattr(timing.DryRun, "kernel", faulty)
    monkeypatch.setattr(timing.DryRun, "check", lambda self: setattr(self, "lost", error))
    with pytest.raises(SystemExit, match="the device is lost: CUDA error: .*; 1 cases were not"):
        run.main(["--dry-run", "--problems", "small_weights", "--results", str(tmp_path)])
    (folder,) = tmp_path.iterdir()
    rows = read(folder / "spmm.csv")
    assert {row["n"] for row in rows} == {"1"}
    assert {row["notes"] for row in rows} == {f"the device is lost: {error}"}
    about = json.loads((folder / "run.json").read_text())
    assert (about["device_lost"], about["not_started"]) == (error, ["spmm small_weights n=4"])
    assert f"Not started, the device was lost ({error})" in (folder / "summary.md").read_text()


def test_a_lost_device_is_an_error_whoever_lost_it(tmp_path):
    started = session.Session("", "", ["--dry-run", "--results", str(tmp_path)])
    started.end([])
    started.where[0].lost = "an error of a peer"
    with pytest.raises(SystemExit, match="the device is lost: an error of a peer; 0 cases"):
        started.end([])


def test_a_device_that_answers_no_more_is_lost():
    device = object.__new__(timing.Cuda)
    device.torch = FakeTorch()
    device.check()
    assert device.lost == ""
    for error in ("an illegal memory access\nwas encountered", "another"):
        device.torch.synchronize = FakeTorch.failing(error)
        device.check()
        assert device.lost == "an illegal memory access"


def test_a_case_that_hangs_ends_the_run(tmp_path, monkeypatch):
    """Nothing returns from a kernel that has no end."""
    armed = []
    monkeypatch.setattr(timing, "gpu", type("Cuda", (timing.DryRun,), {"dry": False}))
    monkeypatch.setattr(session, "device_arch", lambda: "sm_90")
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(session.faulthandler, name, lambda *s, **k: armed.append((s, k)))
    started = session.Session("", "", ["--results", str(tmp_path)])
    assert started.starts("first")
    started.end([])
    limit = ((session.CASE_SECONDS,), {"exit": True})
    assert armed == [((), {}), limit, ((), {})]
    monkeypatch.setenv("SGAP_GPU_SECONDS", "90.5")
    monkeypatch.setenv("SGAP_GPU_RUNS", "2")
    assert session.Session("", "", ["--results", str(tmp_path)]).starts("first")
    assert 100 < armed[-1][0][0] < 45.25 + 60


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

    @staticmethod
    def failing(error):
        def synchronize():
            raise RuntimeError(error)

        return synchronize

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
