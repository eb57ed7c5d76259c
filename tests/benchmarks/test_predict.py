"""Predicted times against ones that are worked out by hand, and how many sectors the requests of
default kernels touch."""

import csv
import dataclasses

import numpy as np
import pytest
from cuda_sources import require_nvdisasm, require_nvrtc
from emulated_launch import placed, program, ptx
from emulator import Traffic

from benchmarks import problems
from benchmarks.gpu import dense, model, ours, predict, summary
from benchmarks.gpu.model import GPUS, H100, TERMS
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.schedules.explain import MOST_STORED, MOST_STORED_OF_FEW

COPY = """extern "C" __global__ void k(const float* x, float* y, long long n) {
  long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i < n) y[i] = x[i];
}"""


def launch(source, blocks, inputs, outputs, scalars=(), threads=256, **fields):
    call = KernelCall(source, "k", (blocks, 1, 1), (threads, 1, 1), scalars=scalars, **fields)
    return ours.Launch(call, inputs, outputs)


def copying(blocks):
    x = np.zeros(256 * blocks, np.float32)
    return launch(COPY, blocks, [x], [(x.shape, "float32")], (x.size,))


def test_a_copy_moves_its_bytes_once():
    """Each block: 8 loads and 8 stores of one wavefront each, 1 KiB read and written."""
    require_nvdisasm()
    blocks = 8 * H100.multiprocessors
    found = model.predict(H100, copying(blocks))
    nbytes, clock = 1024 * blocks, H100.clock
    assert found.memory_bytes == found.l2_bytes == 2 * nbytes
    assert found.load == {"sectors": 4, "lines": 1, "lanes": 32, "bytes": 128} == found.store
    assert found.seconds["L1"] == pytest.approx(8 * 16 / clock)
    assert found.seconds["L2"] == pytest.approx(2 * nbytes / H100.l2_per_clock / clock)
    assert found.seconds["memory"] == pytest.approx(2 * nbytes / H100.memory)
    assert found.seconds["tensor"] == 0
    # All eight blocks fit at once: the time of one chain, a load and some arithmetic.
    assert found.resident == 8 and (found.blocks, found.emulated) == (blocks, 4 * 8)
    assert H100.memory_latency < found.seconds["latency"] * clock < H100.memory_latency + 100
    a_warp = found.instructions / blocks / 8
    assert 10 <= a_warp <= 25
    assert found.seconds["issue"] == pytest.approx(a_warp * 8 * 8 / 4 / clock)
    assert found.total == max(found.seconds.values()) == found.seconds[found.bound]


def test_few_blocks_take_a_part_of_the_gpu():
    """With one block alone, its multiprocessor reads 64 bytes a clock."""
    require_nvdisasm()
    found = model.predict(H100, copying(1))
    assert found.seconds["L2"] == pytest.approx(2 * 1024 / 64 / H100.clock)
    assert found.emulated == found.blocks == 1


ROWS = """extern "C" __global__ void k(const int* rows, const int* next, int* y) {
  int row = blockIdx.x * 32 + threadIdx.x, i = 0;
  #pragma unroll 1
  for (int n = rows[row]; n > 0; --n) i = next[i];
  y[row] = i;
}"""


def test_the_longest_row_sets_the_latency_wherever_it_is():
    require_nvdisasm()
    blocks, longest = 2000, 1234
    rows = np.full(32 * blocks, 2, np.int32)
    rows[32 * longest + 5] = 500
    chained = launch(ROWS, blocks, [rows, np.zeros(8, np.int32)], [(rows.shape, "int32")], (), 32)
    found = model.predict(H100, chained, (longest + 0.5) / blocks)
    latency = H100.memory_latency
    assert 501 * latency < found.seconds["latency"] * H100.clock < 501 * (latency + 15)
    assert found.bound == "latency"
    rows[:] = 2
    even = model.predict(H100, chained)
    # 16 blocks on the fullest multiprocessors: all at once.
    assert 3 * latency < even.seconds["latency"] * H100.clock < 3 * (latency + 15)


def test_blocks_that_do_not_fit_wait():
    require_nvdisasm()
    chained = copying(132 * 64)
    few = dataclasses.replace(H100, blocks=2)
    at_once, in_turn = (model.predict(gpu, chained) for gpu in (H100, few))
    assert (at_once.resident, in_turn.resident) == (8, 2)
    assert in_turn.seconds["latency"] == pytest.approx(4 * at_once.seconds["latency"])


UNROLLED = """extern "C" __global__ void k(const float* x, float* y, long long n) {
  float found = x[threadIdx.x];
  #pragma unroll 1
  for (int i = 0; i < n; ++i) {
    #pragma unroll
    for (int j = 0; j < 400; ++j) found = found * found + 1.5f;
  }
  y[blockIdx.x * 32 + threadIdx.x] = found;
}"""


def test_a_loop_beyond_the_instruction_cache_is_fetched_again_each_time():
    """400 instructions are 50 lines, a wait of 78 / 8 clocks each. Of 8 blocks four fit at a time,
    and wait together."""
    require_nvdisasm()
    x, y = np.zeros(32, np.float32), ((132 * 8 * 32,), "float32")
    small, large = (dataclasses.replace(H100, code=code, blocks=4) for code in (300, 500))
    looped = launch(UNROLLED, 132 * 8, [x], [y], (5,), threads=32)
    missed, fits = (model.predict(gpu, looped).seconds["fetch"] for gpu in (small, large))
    assert fits == 0
    in_turn = 2
    assert missed * H100.clock == pytest.approx(in_turn * 5 * 50 * 78 / 8, rel=0.1)


@pytest.mark.parametrize(
    "registers, threads, shared, blocks",
    [
        (16, 32, 0, 32),  # blocks
        (32, 256, 0, 8),  # threads
        (33, 256, 0, 6),  # registers: 40 x 32 of a warp
        (255, 256, 0, 1),
        (64, 1024, 0, 1),
        (32, 33, 0, 32),  # two warps
        (32, 128, 50 << 10, 5),  # 51 KiB of 256
        (32, 128, 227 << 10, 1),
    ],
)
def test_blocks_of_a_multiprocessor(registers, threads, shared, blocks):
    assert model.resident_blocks(H100, registers, threads, shared) == blocks


def test_a_sample_holds_whole_multiprocessors_and_the_longest_row():
    chosen = model.sample(H100, 1000, longest=701)
    assert set(chosen % 132) == {0, 43, 87, 131, 701 % 132}
    assert len(chosen) == sum(b % 132 in {0, 43, 87, 131, 41} for b in range(1000))
    assert model.sample(H100, 3).tolist() == [0, 1, 2]


def test_a_sample_says_about_what_all_blocks_say():
    require_nvdisasm()
    case = "spmm", "small_rmat", 32, "float32"
    few = dataclasses.replace(H100, multiprocessors=16)
    (some,), (all_of_it,) = (list(predict.rows(few, case, most)) for most in (4, 16))
    assert int(some["emulated"]) < int(all_of_it["emulated"]) == int(all_of_it["blocks"])
    for field in ("us", "l2_mb", "memory_mb", "instructions"):
        assert float(some[field]) == pytest.approx(float(all_of_it[field]), rel=0.25), field


def test_operands_beyond_l2_are_refused():
    require_nvdisasm()
    with pytest.raises(NotImplementedError, match="do not fit in the L2 of H100 SXM"):
        model.predict(dataclasses.replace(H100, l2_bytes=1 << 20), copying(2000))


def test_results_that_are_zeroed_are_written_twice():
    require_nvrtc()
    call, traffic = dataclasses.replace(copying(2).call, zero=(0,)), Traffic()
    memory, pointers, results = placed(call, [np.zeros(512, np.float32)], [((512,), "float32")])
    module = program(ptx(COPY))
    module.run("k", 2, 256, [*pointers, 512], memory, traffic=traffic)
    buffers = [(address, 2048) for address in pointers]
    assert model.moved_bytes(call, buffers, 1, traffic) == 3 * 2048
    assert model.moved_bytes(dataclasses.replace(call, zero=()), buffers, 1, traffic) == 2 * 2048
    unread = [*buffers[:1], (pointers[-1] + 4096, 1 << 20), *buffers[1:]]
    assert model.moved_bytes(call, unread, 1, traffic) == 3 * 2048


def test_of_a_result_in_place_only_the_lines_that_are_written_count():
    require_nvrtc()
    call, traffic = dataclasses.replace(copying(2).call, in_place=((1, 0),)), Traffic()
    x, y = np.zeros(512, np.float32), np.zeros(4096, np.float32)
    memory, pointers, results = placed(call, [x, y], [(y.shape, "float32")])
    module = program(ptx(COPY))
    module.run("k", 2, 256, [pointers[0], pointers[2], 512], memory, traffic=traffic)
    buffers = list(zip(pointers, (2048, 4 * 4096, 4 * 4096), strict=True))
    assert model.moved_bytes(call, buffers, 1, traffic) == 2048 + 2048
    assert model.moved_bytes(call, buffers, 1, traffic, part=3) == 2048 + 3 * 2048
    assert model.moved_bytes(call, buffers, 1, traffic, part=30) == 2048 + 4 * 4096


def test_rows_are_written_and_say_what_they_are(tmp_path, monkeypatch, capsys):
    require_nvdisasm()
    cases = (("row_sum", "small_weights", 1, "float32"), ("spmm", "nothing", 1, "float32"))
    monkeypatch.setattr(predict, "CASES", cases[:1])
    predict.main(["--gpu", "a100", "--gpu", "h100", "--out", str(tmp_path / "a.csv")])
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["gpu"] for row in rows] == [GPUS["a100"].name, GPUS["h100"].name]
    assert all(row["kind"] == "predicted" and float(row["us"]) > 0 for row in rows)
    assert capsys.readouterr().out.count("predicted") == 2


def test_the_file_is_of_these_cases():
    """Every row is labelled, its time is that of the slowest term, no kernel spills, and the page
    of the docs says the same."""
    with predict.FILE.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == predict.FIELDS
    cases = {(row["op"], row["problem"], int(row["n"]), row["dtype"]) for row in rows}
    assert cases == set(predict.CASES)
    for row in rows:
        terms = {term: float(row[f"{term}_us"]) for term in TERMS}
        assert row["kind"] == "predicted" and row["spill_bytes"] == "0"
        assert float(row["us"]) == terms[row["bound_by"]] == max(terms.values())
    assert "\n".join(predict.page(rows)) in predict.PAGE.read_text(), "out of date: make predict"


def test_dense_products_are_said_to_be_faster_from_where_the_model_says_so():
    """What `explain` and a warning go by follows from the file, to the second digit."""
    with predict.FILE.open() as file:
        rows = list(csv.DictReader(file))
    for table, of in ((MOST_STORED, dense.ROWS), (MOST_STORED_OF_FEW, dense.ROWS_OF_FEW)):
        found = dense.most_stored(rows, of)
        assert {(*key, length) for key, each in table.items() for length in each} == set(found)
        for (op, half, length), most in found.items():
            assert table[op, half][length] == pytest.approx(most, abs=0.0051), (op, half, length)


def test_a_dense_product_by_hand():
    """[2048, 1024] times [1024, 256] on a V100: in float32 128 tiles of 64 x 64 take two turns of
    80 multiprocessors, 64 of 128 x 64 one; halves of the latter's sums pass L2 once more."""
    clocks = model.V100.clock * dense.dense_bound(model.V100, 2048, 1024, 256, "f32")
    assert 2048 * 256 * 1024 / 64 / 80 <= clocks <= 128 * 64 * 1024 / 64
    few = dataclasses.replace(model.V100, memory=1e9)
    moved = 2 * (2048 * 1024 + 1024 * 256 + 2048 * 256)
    assert dense.dense_bound(few, 2048, 1024, 256, "f16") == pytest.approx(moved / 1e9)
    assert 1.5 < dense.factors()["f16"] < 2.5 and 0.5 < dense.factors()["f32"] < 1


def test_measured_times_are_put_beside_the_predicted_ones(tmp_path):
    kept = [row for row in summary.load(predict.FILE) if row["op"] == "spmm"]
    (row,) = [
        row
        for row in kept
        if (row["gpu"], row["problem"], row["n"], row["dtype"])
        == (H100.name, "weights_2048x1024_90pct", "64", "float32")
    ]
    us = 3 * float(row["us"])
    fields = ["problem", "n", "contender", "us"]
    with (tmp_path / "spmm.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        writer.writerow([row["problem"], 64, "ours", us])
        writer.writerow([row["problem"], 128, "cusparse_csr", us])
    device = "NVIDIA H100 80GB HBM3"
    lines = summary.beside_predictions(tmp_path, device)
    assert H100.name in lines[0] and device in lines[0]
    assert f"| {row['us']} | {row['bound_by']} | {us:.2f} | 3.00 |" in "\n".join(lines)
    assert sum("weights_2048x1024_90pct" in line for line in lines) == 1
    assert any("mean" in line and "3.00" in line for line in lines)
    assert summary.beside_predictions(tmp_path, "dry run on some CPU") == []


# The cheapest rows of the file, computed again: within a tenth of what it says, or it is out of
# date (`make predict`).
@pytest.mark.parametrize(
    "case", [c for c in predict.CASES if c[0] in ("row_sum", "softmax") and c[3] == "float32"]
)
def test_rows_of_the_file_are_up_to_date(case):
    require_nvdisasm()
    with predict.FILE.open() as file:
        kept = [row for row in csv.DictReader(file) if row["gpu"] == H100.name]
    (row,) = [r for r in kept if (r["op"], r["problem"], int(r["n"]), r["dtype"]) == case]
    (found,) = predict.rows(H100, case)
    for field in ("us", "instructions", "load_sectors", "l2_mb", "memory_mb"):
        assert float(found[field]) == pytest.approx(float(row[field]), rel=0.1), field


# Default kernels on one small pattern: (operation, whether it is of vectors of 8, n, dtype).
HELD = [
    *(("spmm", 1, n, "float32") for n in (1, 2, 3, 4, 8, 16, 32, 33, 64, 128, 256)),
    *(("spmm", 1, n, "bfloat16") for n in (1, 4, 32, 64, 128)),
    *(("spmm transposed", 1, n, "float32") for n in (4, 64)),
    *(("sddmm", 1, n, "float32") for n in (3, 32, 64, 128)),
    *(("sddmm", 1, n, "bfloat16") for n in (64,)),
    *((op, 1, 1, "float32") for op in ("softmax", "row_sum", "row_max")),
    *(("gspmm max", 1, n, "float32") for n in (1, 4, 64)),
    *(("spmm", length, 64, "bfloat16") for length in (2, 4, 8, 16)),
    ("spmm", 8, 64, "float32"),
    *(("sddmm", length, 64, "bfloat16") for length in (2, 8)),
    ("softmax", 8, 1, "bfloat16"),
    *(("attention", length, 64, "bfloat16") for length in (1, 8)),
]


@pytest.mark.parametrize("op, length", sorted({case[:2] for case in HELD}))
def test_requests_of_default_kernels(op, length, golden):
    """Sectors, lines and lanes of a mean request are what they were, within a twentieth: other
    versions of the compiler may load other things once more."""
    require_nvrtc()
    A = problems.vectors(lambda: problems.pruned(256 // length, 256, 0.9), length).tocsr()
    found = {}
    for _, _, n, dtype in (case for case in HELD if case[:2] == (op, length)):
        for recorded in ours.launches_of(predict.function(op, A, n, dtype)):
            for what, count in requests(recorded):
                for field in ("sectors", "lines", "lanes"):
                    label = f"{recorded.call.kernel}, n = {n}, {dtype}: {field} of a {what}"
                    found[label] = round(count.per_request()[field], 2)
    golden.numbers("requests.json", f"{op}, V = {length}", found, lambda before: 0.05 * before)


def requests(recorded):
    """("load" or "store", Count) of a launch."""
    call, given = recorded.call, recorded.inputs
    memory, pointers, _ = placed(call, given, recorded.outputs)
    module, traffic = program(ptx(call.source)), Traffic()
    (entry,) = module.entries
    arguments = [*pointers, *call.scalars]
    shared = call.shared_bytes
    module.run(entry, call.grid, call.block, arguments, memory, shared, traffic=traffic)
    return ("load", traffic.load), ("store", traffic.store + traffic.atomic)
