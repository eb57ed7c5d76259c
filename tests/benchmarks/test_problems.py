"""Problems build, we and the peers are right on the small ones, and rows are written."""

import csv
import dataclasses
import functools
import math

import numpy as np
import pytest

from benchmarks import (
    attention_memory,
    attention_table,
    bench_attention,
    bench_dlmc,
    bench_formats,
    bench_gradient,
    bench_messages,
    bench_moe,
    bench_rigl,
    bench_sampling,
    bench_sddmm,
    bench_select,
    bench_softmax,
    bench_spgemm,
    bench_spmm,
    harness,
    machine,
    problems,
    summary,
    vector_goals,
)
from sgap_jax import CVS

BENCHES = {
    "spmm": (bench_spmm.cases, (1, 5, 32)),
    "sddmm": (bench_sddmm.cases, (5, 32)),
    "gradient": (bench_gradient.cases, (32,)),
    "softmax": (bench_softmax.cases, (1,)),
    "dlmc": (bench_dlmc.spmm_cases, (5, 32)),
    "dlmc_sddmm": (bench_dlmc.sddmm_cases, (5, 32)),
    "dlmc_softmax": (bench_dlmc.softmax_cases, (1,)),
    "messages_max": (functools.partial(bench_messages.cases, "max"), (5, 32)),
    "messages_mean": (functools.partial(bench_messages.cases, "mean"), (5, 32)),
    "messages_edges": (bench_messages.edge_cases, (5,)),
}
SMALL = {problem.name: problem for problem in problems.select("ci")}


@pytest.fixture(autouse=True)
def fixed_peaks(monkeypatch):
    """Peaks of a machine: the bound is a figure in the table here, not something to measure."""
    bandwidth = {"L2": 400.0, "L3": 200.0, "DRAM": 50.0}
    peaks = machine.Machine(2, 400.0, bandwidth, {"L1": 1 << 15, "L2": 1 << 20, "L3": 1 << 24})
    monkeypatch.setattr(machine, "probe", lambda: peaks)


def build(problem):
    try:
        return problem.build()
    except problems.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", SMALL)
def test_problem_is_canonical_csr_and_the_same_every_time(name):
    A = build(SMALL[name])
    assert A.data.dtype == np.float32 and A.indices.dtype == A.indptr.dtype == np.int32
    assert A.has_canonical_format and np.all(A.data != 0)
    again = SMALL[name].build()
    np.testing.assert_array_equal(A.indices, again.indices)
    np.testing.assert_array_equal(A.data, again.data)


def test_generators_have_the_sizes_they_promise():
    assert problems.uniform(70, 50, 0.1).nnz == 350
    assert problems.pruned(64, 50, 0.7).nnz == 960
    graph = problems.rmat(8, 8)
    lengths = np.sort(np.diff(graph.indptr))
    assert graph.shape == (256, 256) and 1000 < graph.nnz < 8 << 8
    assert lengths[-26:].sum() > 0.3 * graph.nnz  # a tenth of the vertices has most of the edges


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown problems \\['nobody'\\]; known: uniform_10k"):
        problems.select(names=["nobody"])
    with pytest.raises(
        ValueError, match="unknown tag 'none'; known: attention, attention_gpu, attention_quick, b"
    ):
        problems.select("none")


def test_attention_and_its_gradients_are_checked():
    A = problems.attention(64, 0.8)
    assert A.shape == (64, 64) and abs(A.nnz / 64**2 - 0.2) < 0.01
    for case in bench_attention.cases(A, 64):
        result = case.ours()
        assert case.wrong(result) <= 1
        parts = result if isinstance(result, tuple) else (result,)
        for i, part in enumerate(parts):
            spoilt = [*parts[:i], part.at[0, 5, 1, 3].add(0.01), *parts[i + 1 :]]
            assert case.wrong(tuple(spoilt) if len(spoilt) > 1 else spoilt[0]) > 1
        for name in ("jax_nn", "unfused"):
            assert case.wrong(case.peers[name]()()) <= 1


@pytest.mark.skipif(not attention_memory.resident_is_known(), reason="Linux only")
def test_growth_counts_what_a_call_gives_back():
    attention_memory.growth(lambda: None)
    taken = attention_memory.growth(lambda: np.ones(8 << 20).sum())
    assert abs(taken - (64 << 20)) < 4 << 20
    assert attention_memory.growth(lambda: None) < 4 << 20


def test_the_growth_of_processes_is_in_the_table_once_it_is_measured(tmp_path):
    row = {"problem": "attention_64_90pct", "schedule": "forward, CVS(8)", "us": "1000"}
    path = tmp_path / "attention_memory.csv"
    known = "problem,backward,ours,unfused,jax_nn"
    path.write_text(f"{known}\nattention_64_90pct,False,0.03,2,134\n")
    head, body = attention_table.table([row], tmp_path)
    assert len(head) == len(body[0]) and body[0][-1] == "0.0 / 134"
    peaks = "ours_peak,jax_nn_peak,torch_sdpa_peak"
    path.write_text(f"{known},{peaks}\nattention_64_90pct,False,0.03,2,134,0.08,140,\n")
    head, body = attention_table.table([row], tmp_path)
    assert len(head) == len(body[0]) and body[0][-2:] == ["0.0 / 134", "0.1 / 140 / -"]


def test_attention_at_95_percent_is_timed_in_turns_with_90():
    A = problems.attention(512, 0.95)
    case = next(iter(bench_attention.cases(A, 64)))
    assert list(case.beside) == ["at_90pct"]
    case = dataclasses.replace(case, peers={})
    row = harness.compare(case, (), rounds=1)
    assert row["at_90pct"] > 0 and "x_at_90pct" not in row
    assert not next(iter(bench_attention.cases(problems.attention(512, 0.9), 64))).beside


def test_vectors_are_recognized():
    A = build(SMALL["small_vectors"])
    assert bench_dlmc.vector_length(A) == 4 and A.shape == (160, 96)
    assert bench_dlmc.vector_length(build(SMALL["small_weights"])) == 1
    A.indices[0] += 1
    assert bench_dlmc.vector_length(A) == 1
    assert len(problems.select("vectors")) == 48


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("op", BENCHES)
def test_everybody_is_right(op, name):
    A = build(SMALL[name])
    cases, widths = BENCHES[op]
    for width in widths:
        for case in cases(A, width):
            calls = {"ours": case.ours}
            for peer, plan in case.peers.items():
                try:
                    calls[peer] = plan()
                except (ImportError, problems.Unavailable):
                    continue
            wrong = {
                who: error for who, call in calls.items() if not (error := case.wrong(call())) <= 1
            }
            assert not wrong, f"{op} n={width}: errors in units of the rounding bound"
            assert case.bound[0] > 0 and case.flops > 0 and case.moved > 0


def test_samplers_take_the_edges_of_the_seeds():
    A = problems.BenchmarkProblem("", "", "", lambda: problems.rmat(8, 8)).build()
    (case,) = bench_sampling.cases(A, 32)
    assert case.more["edges"] > A.nnz / 4 and case.wrong(case.ours()) == 0
    (other,) = bench_sampling.cases(A[::-1].tocsr(), 32)
    assert case.wrong(other.ours()) == np.inf
    for plan in case.peers.values():
        try:
            call = plan()
        except (ImportError, problems.Unavailable):
            continue
        assert case.wrong(call()) == 0


def test_peers_can_write_into_memory_that_exists():
    A = build(SMALL["small_uniform"])
    B = harness.dense(A.shape[1], 8)
    wrong = bench_spmm.checker(A, B)
    for plan in bench_spmm.peers.PEERS.values():
        try:
            call = plan(A, B, reuse=True)
        except (ImportError, problems.Unavailable):
            continue
        first, second = call(), call()
        assert np.shares_memory(np.asarray(first), np.asarray(second))
        assert wrong(second) <= 1


def test_a_wrong_result_is_noticed():
    A = build(SMALL["small_uniform"])
    (case,) = bench_spmm.cases(A, 8)
    C = np.array(case.ours())
    C[3, 2] += 1e-3
    assert case.wrong(C) > 1
    C[3, 2] = np.nan
    assert not case.wrong(C) <= 1
    row = harness.compare(
        dataclasses.replace(case, peers={"liar": lambda: lambda: C}), ("liar",), rounds=1
    )
    assert row["x_liar"] == row["x_best"] == "" and row["notes"].startswith("liar: wrong, error")
    with pytest.raises(RuntimeError, match="our result is wrong"):
        harness.compare(dataclasses.replace(case, ours=lambda: C), (), rounds=1)


def test_rows_are_written_and_replaced(tmp_path, capsys):
    words = ["--problems", "small_weights", "--out", str(tmp_path)]
    for widths in (["4", "32"], ["4"]):
        bench_spmm.main([*words, "--n", *widths])
        with (tmp_path / "spmm.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert sorted(row["n"] for row in rows) == ["32", "4"]
    assert all(math.isfinite(float(row["x_best"])) and row["commit"] for row in rows)
    assert (tmp_path / "machine.json").exists()
    assert "small_weights n=4 CpuTile" in capsys.readouterr().out


def test_conversions_are_timed(capsys):
    bench_formats.main(["--nonzeros", "1000"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(" s, SciPy " in line for line in lines)


PAGES_OF_RESULTS = ("performance", "results")


def test_summary_fills_the_marked_places(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    bench_spmm.main(["--problems", "small_weights", "--n", "4", "--out", str(tmp_path)])
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(summary, "DOCS", tmp_path / "docs")
    pages = [tmp_path / "README.md", *(tmp_path / "docs" / f"{x}.md" for x in PAGES_OF_RESULTS)]
    begin, end = "<!-- benchmarks:begin (why) -->\n", "<!-- benchmarks:end -->\n"
    (tmp_path / "docs").mkdir()
    for page in pages:
        page.write_text(f"before\n{begin}old\n{end}after\n")
    for _ in range(2):  # filling in twice is filling in once
        summary.main(["--results", str(tmp_path)])
        readme, performance, results = (page.read_text() for page in pages)
        for text in (readme, performance, results):
            assert text.startswith(f"before\n{begin}") and "old" not in text
            assert text.endswith(f"{end}after\n")
        for text in (readme, performance):
            assert text.count("| SpMM | 1 | **") == 1
        assert "docs/img/overview.svg" in readme and "(img/overview.svg" in performance
        assert "`jax_bcsr` | yes | 1 |" in results
    for name in ("overview", "performance"):
        assert (tmp_path / "docs" / "img" / f"{name}.svg").stat().st_size > 1000


def test_column_vectors_have_a_picture_of_their_own(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    small = dataclasses.replace(SMALL["small_vectors"], family="V=4 90%")
    monkeypatch.setattr(problems, "PROBLEMS", (small,))
    words = ["--problems", small.name, "--n", "8", "--out", str(tmp_path)]
    bench_dlmc.main(words)
    assert sorted(path.stem for path in tmp_path.glob("*.csv")) == sorted(summary.VECTORS)
    pages = [tmp_path / f"{x}.md" for x in PAGES_OF_RESULTS]
    for page in pages:
        page.write_text("<!-- benchmarks:begin -->\n<!-- benchmarks:end -->\n")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(summary, "DOCS", tmp_path)
    summary.main(["--results", str(tmp_path)])
    assert (tmp_path / "img" / "vectors.svg").stat().st_size > 1000
    text, tables = (page.read_text() for page in pages)
    assert "img/vectors.svg" in text and "performance.svg" not in text
    for title in ("SpMM", "SDDMM", "sparse softmax"):
        assert text.count(f"| {title} with column vectors | 1 | **") == 1
    assert tables.count("| x best peer, V = 2, 4, 8, from 70% to 98% (mean) | 3 | 1 | **") == 1


def test_goals_of_column_vectors_are_those_of_their_rows():
    def row(length, percent, n, best, dense, share):
        operations = 2 * 1000 * n
        return {
            "family": f"V={length} {percent}%",
            "n": str(n),
            "nnz": "1000",
            "x_best": str(best),
            "x_jax_dense": str(dense),
            "bound_us": str(operations / 400e3),  # 400 GFLOP/s
            "fraction_of_bound": str(share),
        }

    rows = [row(2, 70, 32, 2, 9, 0.1), row(4, 98, 32, 8, 9, 0.1), row(16, 90, 32, 100, 9, 0.1)]
    rows += [row(8, 90, 32, 4, 9, 0.9), row(8, 90, 256, 4, 9, 0.4)]
    rows += [row(8, 50, 64, 1, 1.5, 0.1), row(8, 50, 32, 1, 6, 0.1), row(4, 50, 32, 1, 0.9, 0.1)]
    _, body = vector_goals.table(rows)
    assert [line[1:] for line in body] == [
        ["3", "4", "**4.00** (V=2: 2.00, V=4: 8.00, V=8: 4.00; least 2.00)"],
        ["80%", "2", "**60%** (n=32: 90%, n=256: 40%; least 40%)"],
        ["1", "2", "**1.50** (mean 3.00)"],
        ["1", "1", "**0.90** (mean 0.90)"],
    ]
    assert "sgemm (400 GFLOP/s in that run)" in body[1][0]
    assert vector_goals.table(rows[2:3])[1] == []


@pytest.mark.parametrize("length", [2, 4, 8])
@pytest.mark.parametrize("percent", [70, 98])
def test_pruned_weights_come_in_column_vectors_too(length, percent):
    (problem,) = (
        problem
        for problem in problems.select("vectors_weights")
        if problem.family == f"V={length} {percent}%"
    )
    A = problem.build()
    assert A.shape == (2048, 1024) and bench_dlmc.same_columns(A, length)
    assert A.nnz == length * round(2048 // length * 1024 * (100 - percent) / 100)
    assert not bench_dlmc.vector_length(A) % length


def test_bound_names_what_limits():
    peaks = machine.probe()
    A = problems.uniform(4000, 4000, 0.01)
    seconds, by = peaks.product_bound(A, 64)  # a slab of 64 bytes x 4000 rows stays in L2
    assert by == "gather L2" and math.isclose(seconds, 4 * A.nnz * 64 / 400e9)
    assert peaks.bound(flops=1e9, moved=1e3)[1] == "FMA"
    assert peaks.bound(flops=1, moved=1e9)[1] == "stream DRAM"


@pytest.mark.parametrize(
    ("build", "sizes"),
    [
        (bench_select.selection, (20, 60, 5)),
        (bench_select.transposition, (30, 200)),
        (bench_select.gradient, (30, 200, 4)),
        (functools.partial(bench_select.own_patterns, "attention"), (2, 20, 8, 5)),
        (functools.partial(bench_select.own_patterns, "spmm"), (2, 20, 8, 5)),
        (bench_moe.backward, (40, 3, 2, 8, 12)),
        pytest.param(
            *(bench_rigl.contenders, (6, 16, 24, 0.8, CVS(4))), marks=pytest.mark.tier("all")
        ),
    ],
)
def test_contenders_for_structures_made_inside_jit_agree(build, sizes):
    calls = build(*sizes)  # compares their results
    assert "ours" in calls and len(calls) > 1
    for call in calls.values():
        call()


@pytest.mark.parametrize("kind", [*bench_spgemm.KINDS, *bench_spgemm.MERGES])
def test_contenders_of_sparse_products_agree(kind):
    A = bench_spgemm.built(bench_spgemm.poisson(6))
    if kind in bench_spgemm.MERGES:
        calls = bench_spgemm.MERGES[kind](A, bench_spgemm._at_random(36, 36, 99, 0).astype("f4"))
    else:
        calls = bench_spgemm.KINDS[kind](A, bench_spgemm.built(bench_spgemm.interpolation(6)))
    # The peers of these two are torch and TACO, which need not be installed.
    assert "ours" in calls and ("scipy" in calls or kind in ("gradients", "compiled"))
    for call in calls.values():
        call()


@pytest.mark.tier("all")
def test_masks_are_timed(capsys):
    from benchmarks import bench_masks

    bench_masks.main(["--positions", "1024", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[3:]]
    assert len(rows) == 2 * len(bench_masks.cases(1024)) and {len(row) for row in rows} == {6}
    assert rows[0][:3] == ["`band(L, 257)`", "CSR", f"{1024 * 257 - 128 * 129:,}"]
