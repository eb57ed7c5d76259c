"""Results of several CPUs side by side: the cells, and the marks where pages are filled."""

import csv
import json

import pytest

pytest.importorskip("numba")
from benchmarks import every_cpu, pattern_tables, summary  # noqa: E402

COLUMNS = ("problem", "n", "schedule", "x_scipy", "x_torch_csr", "x_bfloat16", "x_float16")
COLUMNS += ("x_jax_top_k_sort", "x_reading")


def folder(tmp_path, name, **files):
    path = tmp_path / name
    path.mkdir()
    sizes = {"L1": 32 << 10, "L2": 512 << 10, "L3": 32 << 20}
    about = {"device": name, "cores": 2, "fma_gflops": 150.4, "gb_per_s": {}, "cache_bytes": sizes}
    (path / "machine.json").write_text(json.dumps(about))
    for stem, rows in files.items():
        with (path / f"{stem}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([COLUMNS, *rows])


@pytest.fixture
def found(tmp_path):
    product = [["a", 1, "CpuTile()", 4, 2, "", ""], ["b", 1, "CpuTile()", 0.5, 9, "", ""]]
    halves = [
        ["spmm: weights_x", 32, "CSR", "", "", 0.5, 1.5],
        ["spmm: u_x", 4, "CSR", "", "", 2, 1.5],
    ]
    picked = [[f"top_k: {n} x 8", "", "", "", "", "", "", 30, 0.5] for n in (1024, 256)]
    picked += [["transpose: 8 x 8", *[""] * 8]]
    folder(tmp_path, "first", spmm=product, half=halves, select=picked)
    folder(tmp_path, "second", spmm=product[:1])
    (tmp_path / "no results").mkdir()
    return {x: every_cpu.read(x, ("spmm", "half", "select")) for x in every_cpu.folders(tmp_path)}


def test_each_cpu_has_a_column(found):
    head, _, line, _ = every_cpu.beside_peers(found)
    assert head == "| x best peer: mean (worst; cases) | first, 2 threads | second, 2 threads |"
    # case by case the fastest peer: 2 and 0.5
    assert line == "| SpMM | **1.00** (worst 0.50; 2) | **2.00** (worst 2.00; 1 of 2) |"
    assert every_cpu.range_of_means(found, ("SpMM", "SDDMM"))[2] == "| SpMM | 2 | 1.00 to 2.00 |"
    first = {folder: rows for folder, rows in found.items() if folder.name == "first"}
    assert every_cpu.range_of_means(first, ("SpMM",)) == []
    assert every_cpu.fullest(found).name == "first"


def test_limits_name_what_was_measured(found):
    first, second = every_cpu.limits(found)[2:4]
    assert first == "| first, 2 threads | 150 | - | 32/512/32768 | half 2, select 3, spmm 2 |"
    assert second.endswith("| spmm 1 |")


def test_halves_stand_beside_float32(found):
    head, _, line, _ = every_cpu.beside_float32(found)
    assert head.endswith("| bfloat16: first, 2 threads | float16: first, 2 threads |")
    assert line == "| spmm | CSR | 1.00, 2.00 (u, n = 4) | 1.50, 1.50 (weights, n = 32) |"


def test_narrow_products_stand_beside_the_fastest_peer(tmp_path):
    (tmp_path / "machine.json").write_text('{"device": "one", "cores": 2}')
    names = ("problem", "n", "x_scipy", "x_torch_csr", "x_mkl_inspector")
    measured = [
        ("product: a", "4", "3", "2", ""),
        ("product: b", "4", "0.5", "1", "2"),
        ("product: b", "8", "", "", ""),
        ("loop: b", "1", "1.5", "", ""),
    ]
    rows = [dict(zip(names, row, strict=True)) for row in measured]
    found = {tmp_path: {"narrow": rows}, tmp_path / "other": {}}
    assert every_cpu.narrow_products(found)[2:-1] == [
        "| A B | 4 | 1.00, 0.50 (b) |",
        "| 100 products in a loop inside `jit` | 1 | 1.50, 1.50 (b) |",
    ]
    assert len(every_cpu.narrow_products({tmp_path: {}})) == len(every_cpu.table([], []))


def test_matrix_tiles_stand_beside_dense_products(tmp_path):
    (tmp_path / "machine.json").write_text('{"device": "one", "cores": 2}')
    row = {"schedule": "CVS(8)", "us": "1500", "x_torch": "2.5", "x_float32": "2"}
    products = [
        {**row, "problem": f"{op}: weights_2048x1024_90pct_v8"} for op in every_cpu.TILE_OPS
    ]
    heads = {**row, "problem": "attention: attention_4096_90pct, 4 heads", "x_torch_boolean": "12"}
    found = {tmp_path: {"octets": [*products, heads]}}
    lines = every_cpu.matrix_tiles(found)
    assert lines[0] == "one, 2 threads:"
    assert lines[4] == "| CVS(8) | 90% |" + 4 * " 2.50 | 2.00 |"
    assert "| attention, 4 heads | 1.50 | 2.50 | 12 | 2.00 |" in lines
    assert every_cpu.matrix_tiles({tmp_path: {}}) == []


def test_selections_stand_side_by_side(found):
    head, _, *lines, _ = pattern_tables.side_by_side(found, pattern_tables.SHOWN["top-k"])
    assert head == "|  | first, 2 threads |"
    # ours takes two readings; by the number of rows
    assert lines == [f"| {n} x 8 | `jax.lax` 30, readings 2.00 |" for n in (256, 1024)]


def test_a_page_is_filled_at_its_mark(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- half:begin (x) -->\nold\n<!-- half:end -->\n<!-- b:begin -->\n<!-- b:end -->"
    )
    summary.put(page, ["new", ""], "half")
    assert page.read_text().startswith(
        "<!-- half:begin (x) -->\nnew\n<!-- half:end -->\n<!-- b:begin"
    )
    summary.put(page, ["new"], "absent")
    assert "no absent:begin / absent:end in page.md" in capsys.readouterr().out
