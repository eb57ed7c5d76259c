"""What products of graphs in parts send, counted: against small graphs that are counted by hand."""

import csv

import pytest
import scipy.sparse

from benchmarks import parallel_bytes


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
    assert parallel_bytes.cagnet(64, 2) == (32, 1)  # an all-gather
    assert parallel_bytes.cagnet(64, 4) == (48, 1)
    assert parallel_bytes.cagnet(64, 16) == (36, 2)  # 3.5 block rows of 8, and 1 of the all-reduce


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
