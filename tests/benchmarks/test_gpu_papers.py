"""The programs that repeat what the papers measured on a GPU run on the emulator."""

import json
from fractions import Fraction

import numpy as np
import pytest
from cuda_sources import require_nvrtc
from gpu_results import read, timed

from benchmarks import problems
from benchmarks.gpu import figures, octets, octets_sddmm, tables, taco, timing, tuned
from sgap_jax import CVS, Problem, SparseArray, sddmm


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


@pytest.mark.parametrize("wrong", [0, 1])
def test_tuned_points_run_and_wrong_results_end_them(wrong, tmp_path, monkeypatch):
    require_nvrtc()
    monkeypatch.setattr(timing.DryRun, "get", lambda self, array: np.asarray(array) + wrong)
    monkeypatch.setattr(tuned, "COLUMNS", (4, 16))
    few = lambda n: [tuned.original(n), tuned.reduction(8, 256, 4, Fraction(1, 2))]
    monkeypatch.setattr(tuned, "tunables", few)
    monkeypatch.setattr(tables, "BEFORE", tables.BEFORE[-1:])
    monkeypatch.setattr(tables, "NEW", tables.NEW[-1:])
    command = ["--dry-run", "--problems", "small_weights", "--results", str(tmp_path)]
    if wrong:
        with pytest.raises(SystemExit, match="8 results of ours are wrong, the first: .*point"):
            tuned.main(command)
        return
    tuned.main(command)
    (folder,) = tmp_path.iterdir()
    found = read(folder / "tuned.csv")
    assert len(found) == 8 and all(row["us"] for row in found)
    figure = read(folder / "figure11.csv")
    assert [row["n"] for row in figure] == ["4", "16"]
    assert all(0 < float(row["density"]) < 1 and float(row["speedup"]) > 0 for row in figure)
    text = (folder / "tuned.md").read_text()
    assert "no figure here says anything about a GPU" in text and "not measured" not in text


def test_tunables_are_legal_and_tables_4_and_5_take_the_best():
    for n in tuned.COLUMNS:
        points = tuned.tunables(n)
        assert points[0] == tuned.original(n) and len(points) == len(set(points)) > 20
        for point in points:
            point.check(Problem("spmm", (100, 100), 500, n=n, platform="cuda"))
    assert tuned.parameters(tuned.original(64)) == "<32, 256, 32, 1>"
    eight, four = (tuned.reduction(r, 256, 8, Fraction(1, 2)) for r in (8, 4))
    us = {str(point): 8.0 for point in [*tuned.tunables(64), *tables.BEFORE, *tables.NEW]}
    times = {"a": us | {str(eight): 2.0, str(four): 4.0}, "b": us | {str(four): 2.0}}
    rows = [
        {"problem": name, "contender": "point", "schedule": schedule, "us": str(time)}
        | {"n": 64, "m": 10, "k": 20, "nnz": 50}
        for name, of in times.items()
        for schedule, time in of.items()
    ]
    found = tuned._times(rows, 64)
    assert tuned.gains(found, 64) == [4.0, 4.0]
    single, over = tuned.static(found, 64)  # 4 and 2 over two matrices beat 2 and 8
    assert single == four and over == [2.0, 1.0]
    assert tuned.static({}, 64) == (None, [])
    figure = tuned.figure_11(rows)
    assert [(row["problem"], row["density"], row["speedup"]) for row in figure] == [
        ("a", 0.25, 1.0),
        ("b", 0.25, 1.0),
    ]
    about = dict.fromkeys(("device", "driver", "commit", "date", "dry_run", "not_started"))
    text = tuned.summary(rows, about)
    assert "| 64 | 4.000 (2) | 4.000 |" in text
    assert "| 64 | 1.414 (2) | <4, 256, 8, 1/2> |" in text
    assert "| 128 | not measured | not measured |" in text


@pytest.mark.parametrize("length", [2, 8])
def test_the_values_of_vectors_are_checked_where_they_stand(length):
    A = problems.vectors(lambda: problems.uniform(5, 30, 0.2), length)
    X, Y = (np.random.default_rng(i).standard_normal((size, 4)) for i, size in enumerate(A.shape))
    exact = sddmm(SparseArray.from_scipy(A, format=CVS(length)), X, Y).values
    wrong = octets_sddmm.checker(A, length, X, Y)
    assert wrong(exact) <= 1 and wrong(X @ Y.T) <= 1
    assert wrong(np.asarray(exact)[::-1]) > 1 and wrong(X @ Y[::-1].T) > 1


def test_octets_are_measured_where_they_are_to_pass_dense_products():
    cases = {(x.name, *octets.widths(x)) for x in problems.select("octets")}
    layers = ("85pct_v8", "90pct_v8", "80pct_v16")
    assert cases >= {(f"weights_2048x1024_{layer}", 256) for layer in layers}
    assert cases >= {(f"weights_4096_{layer}", 4096) for layer in ("90pct_v8", "80pct_v16")}


def test_blocks_have_as_many_numbers_as_the_vectors():
    A = problems.vectors(lambda: problems.uniform(16, 128, 0.1), 8)
    blocks = octets.in_blocks(A, 8)
    assert abs(blocks.nnz - A.nnz) <= 64 * 8 and blocks.shape == A.shape
    values, indices = octets.blocked_ell(blocks, 8)
    dense = np.zeros(blocks.shape, np.float16)
    for row, columns in enumerate(indices):
        for i, column in enumerate(columns):
            block = values[8 * row : 8 * row + 8, 8 * i : 8 * i + 8]
            dense[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = block
    np.testing.assert_array_equal(dense, octets.half(blocks.toarray()))


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
        contenders = [figures.DENSE, *figures.SCHEDULES[op], *figures.PEERS[op]]
        assert [row["contender"] for row in rows] == contenders
        names = timed(rows)
        assert {"cublas", "wmma"} < names and any(name.startswith("mma") for name in names)
        for row in rows:
            assert bool(row["us"]) != bool(row.get("notes")) and row["device"], row
    text = (folder / "figures.md").read_text()
    assert "no figure here says anything about a GPU" in text and "### Figure 19, sddmm" in text
    assert "| pattern | fpu | wmma | mma | octet | blocked-ELL |" in text
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


@pytest.mark.parametrize("wrong", [0, 1])
def test_tacos_schedules_run_and_wrong_results_end_them(wrong, tmp_path, monkeypatch):
    require_nvrtc()
    monkeypatch.setattr(timing.DryRun, "get", lambda self, array: np.asarray(array) + wrong)
    names = ["small_weights", "random_small"]
    command = ["--dry-run", "--problems", *names, "--results", str(tmp_path)]
    if wrong:
        with pytest.raises(SystemExit, match="10 results of ours are wrong"):
            taco.main(command)
        return
    taco.main(command)
    (folder,) = tmp_path.iterdir()
    own = {taco.DEFAULT, taco.COMPILED}
    for name, (_, n) in taco.FIGURES.items():
        rows = read(folder / f"{name}.csv")
        assert {row["n"] for row in rows} == {str(n)}
        assert own <= timed(rows), name
    assert timed(read(folder / "study83.csv")) == set(taco.STUDY)
    text = (folder / "taco.md").read_text()
    assert "no figure here says anything about a GPU" in text and "not measured" in text


def test_tacos_speedups_are_means_of_the_best_of_each_side():
    times = {"a": {"x": 8.0, "y": 6.0, "ours": 2.0}, "b": {"x": 4.0, "ours": 1.0}, "c": {"x": 1.0}}
    rows = [
        {"problem": name, "contender": contender, "us": us}
        for name, of in times.items()
        for contender, us in of.items()
    ]
    rows.append({"problem": "c", "contender": "ours", "notes": "failed"})
    assert taco.ratios(rows, taco.is_a("x", "y"), taco.is_a("ours")) == [3.0, 4.0]
