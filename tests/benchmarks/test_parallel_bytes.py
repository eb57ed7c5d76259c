"""What products of graphs in parts send, counted: against small graphs that are counted by hand."""

import csv
import subprocess
import sys

import pytest
import scipy.sparse

from benchmarks import machine, parallel_bytes


def test_counts_of_a_path_and_of_a_star_in_four_parts():
    path = scipy.sparse.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(64, 64)).tocsr()
    found = parallel_bytes.counted(path, 4, "given")
    # Two neighbours for the parts in the middle, one at the ends: one row over each cut edge, or
    # two rows of B.
    assert found["cover"] == 6 // 4 and found["rows_of_b"] == 2 and found["one_d"] == 3 * 16
    # Vertex 0 with all others: its row goes to three parts, and one partial row comes back of each.
    star = scipy.sparse.lil_array((64, 64))
    star[0, 1:] = star[1:, 0] = 1
    found = parallel_bytes.counted(star.tocsr(), 4, "given")
    assert found["ours_most"] <= 3 and found["cover"] == 6 // 4
    assert found["rows_of_b"] > 3 * found["ours_most"]


def test_the_best_replication_of_cagnet():
    """Against the stages of gcn_distr_15d.py of its authors, in loops over devices: each receives
    the blocks that a column of the grid works on from who has them, and sums over its row."""
    for parts in (2, 4, 16, 36):
        k, sums = 4 * 36, {}
        for c in range(1, parts + 1):
            stages, left = divmod(parts, c * c)
            if left:
                continue
            block, received = k * c // parts, 0
            for rank in range(parts):
                column = rank % c
                for i in range(stages):
                    source = (column * stages + i) * c + column
                    received += block * (source != rank)
            sums[c] = received / parts + 2 * (c - 1) / c * block
        best = min(sums, key=sums.get)
        assert parallel_bytes.cagnet(k, parts) == (round(sums[best]), best)


def test_table_and_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("pymetis", reason="METIS is an extra, sgap_jax[metis]")
    monkeypatch.setattr(parallel_bytes, "PARTS", (2, 4))
    graph = parallel_bytes.rmat(6, 2)
    monkeypatch.setattr(parallel_bytes, "problems", lambda folder: [("a", graph + graph.T)])
    parallel_bytes.main(tmp_path, tmp_path / "a.csv", tmp_path / "a.svg")
    with open(tmp_path / "a.csv") as file:
        lines = list(csv.DictReader(file))
    assert [(x["parts"], x["order"]) for x in lines] == [
        (parts, order) for parts in "24" for order in ("given", "metis")
    ]
    assert all(0 < int(x["cover"]) <= int(x["ours_mean"]) <= int(x["ours_most"]) for x in lines)
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_the_tables_of_the_page_are_those_of_the_counts():
    """docs/parallel.md against docs/img/parallel_bytes.csv: of 64 parts, and of a second axis."""
    page = (machine.ROOT / "docs" / "parallel.md").read_text()
    with open(machine.ROOT / "docs" / "img" / "parallel_bytes.csv") as file:
        counts = {(x["graph"], int(x["parts"]), x["order"]): x for x in csv.DictReader(file)}
    for graph in {graph for graph, *_ in counts}:
        four, few, many = (counts[graph, parts, "metis"] for parts in (4, 16, 64))
        vertices, all_rows = int(many["vertices"]), int(many["one_d"])
        share = lambda rows, digits, of=all_rows: f"{100 * float(rows) / of:.{digits}f} %"
        bound = f"{int(many['ours_mean']) / int(many['cover']):.2f}"
        given = counts[graph, 64, "given"]
        found = share(many["ours_most"], 1), share(given["ours_most"], 1)
        found += share(many["rows_of_b"], 1), bound, share(many["cagnet"], 1)
        assert f"| `{graph}` | {vertices:,} | {all_rows:,} | {' | '.join(found)} |" in page
        # 4 and 16 devices divide the columns; of 4 copies each sends 1 / 4, and sums 16th parts.
        copies = int(few["rows_of_b"]) / 4 + 2 * 3 / 4 * vertices / 16
        products = int(many["ours_most"]), int(few["ours_most"]) / 4, int(four["ours_most"]) / 16
        found = [share(rows, 2) for rows in (*products, copies, many["cagnet"])]
        assert f"| `{graph}` | {' | '.join(found)} |" in page


@pytest.mark.tier("all")
def test_planning_is_timed():
    """In a process of its own, for one core and so many devices."""
    command = [sys.executable, "-m", "benchmarks.bench_planning", "--scale", "9", "--parts", "4"]
    done = subprocess.run(
        command, cwd=machine.ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    found = dict(line.split() for line in done.stdout.splitlines() if not line.startswith("#"))
    assert float(found["vertices"]) == 512 and float(found["parts"]) == 4
    assert float(found["seconds"]) > 0 and float(found["peak_growth_mb"]) >= 0
