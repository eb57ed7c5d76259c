"""Predicted times of the default kernels: python -m benchmarks.gpu.predict [--gpu h100] [--op spmm]
[--problem attention_1024_90pct]

Needs no GPU: the emulator of the tests counts what a launch does (benchmarks/gpu/model.py says how,
and what a prediction leaves out). Writes benchmarks/gpu/predicted.csv, where every row says
"predicted", and its tables into docs/predicted.md. Needs the test group (NVRTC, and nvdisasm for
the machine code).

An operation with several launches, such as attention and its gradients, has a row for each.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, problems
from benchmarks.bench_dlmc import vector_length
from benchmarks.gpu import model, ours
from benchmarks.problems import ROOT, Unavailable
from benchmarks.summary import put, table
from sgap_jax import (
    CSR,
    CVS,
    SparseArray,
    gspmm,
    row_max,
    row_sum,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
)

FILE = ROOT / "benchmarks/gpu/predicted.csv"
PAGE = ROOT / "docs/predicted.md"
HEADS = 8  # of attention
MERGES = ("AttentionMergeKernel", "SumPiecesKernel")  # of pieces of rows
WEIGHTS, GRAPH = "weights_2048x1024_90pct", "rmat_131k_1m"

# (operation, problem, n, dtype): n is dense columns, features, or those of a head.
CASES: tuple[tuple[str, str, int, str], ...] = (
    *(("spmm", WEIGHTS, n, "float32") for n in (1, 4, 8, 16, 32, 64, 128, 256)),
    *(("spmm", WEIGHTS, n, "bfloat16") for n in (32, 128)),
    *(("spmm transposed", WEIGHTS, n, "float32") for n in (32, 128)),
    *(("spmm", "uniform_10k_0.1pct", n, "float32") for n in (4, 32, 128)),
    *(("spmm", GRAPH, n, "float32") for n in (4, 16)),
    ("spmm", "rmat_32k_500k", 128, "float32"),
    *(("sddmm", WEIGHTS, n, "float32") for n in (32, 64, 128)),
    ("sddmm", WEIGHTS, 128, "bfloat16"),
    *((op, WEIGHTS, 1, "float32") for op in ("softmax", "row_sum", "row_max")),
    *(("gspmm max", WEIGHTS, n, "float32") for n in (4, 64)),
    *(("gspmm max", GRAPH, n, "float32") for n in (4, 16)),
    *(
        ("spmm", f"weights_2048x1024_{percent}pct_v{length}", 256, "bfloat16")
        for percent, length in ((70, 8), (80, 8), (90, 8), (95, 8), (80, 16), (90, 4), (90, 2))
    ),
    ("spmm", "weights_4096_90pct_v8", 256, "bfloat16"),
    ("spmm", "weights_2048x1024_90pct_v8", 256, "float32"),
    ("spmm", "rmat_32kx4k_v8", 256, "bfloat16"),
    *(("sddmm", "weights_2048x1024_90pct_v8", n, "bfloat16") for n in (64, 256)),
    ("sddmm", "weights_2048x1024_90pct_v4", 256, "bfloat16"),
    ("softmax", "weights_2048x1024_90pct_v8", 1, "bfloat16"),
    *(("attention", f"attention_{size}_90pct", 64, "bfloat16") for size in (1024, 4096)),
    ("attention", "attention_4096_global", 64, "bfloat16"),
)
FIELDS = (
    *("kind", "gpu", "op", "problem", "n", "dtype", "kernel", "us", "bound_by"),
    *(f"{term}_us" for term in model.TERMS),
    *("blocks", "emulated", "resident", "registers", "spill_bytes", "instructions"),
    *("loop_instructions", "loop_loads", "loop_tensor"),
    *("load_sectors", "load_lines", "load_lanes", "store_sectors", "l2_mb", "memory_mb"),
)


def function(op: str, A, n: int, dtype: str) -> Callable:
    """schedule -> the operation's results; A is a SciPy matrix."""
    m, k = A.shape
    length = vector_length(A)
    pattern = SparseArray.from_scipy(A, format=CSR if length == 1 else CVS(length)).astype(dtype)

    def dense(*shape: int, seed: int = 0):
        return jnp.asarray(harness.dense(*shape, seed=seed)).astype(dtype)

    def attention(schedule):
        q, k, v, out = (dense(1, m, HEADS, n, seed=seed) for seed in range(4))

        def total(q, k, v):
            attended = sparse_attention(q, k, v, pattern, schedule=schedule)
            return jnp.sum((attended * out).astype(jnp.float32))

        return jax.grad(total, (0, 1, 2))(q, k, v)

    return {
        "spmm": lambda s: spmm(pattern, dense(k, n), schedule=s),
        "spmm transposed": lambda s: spmm(pattern, dense(m, n), transpose=True, schedule=s),
        "sddmm": lambda s: sddmm(pattern, dense(m, n), dense(k, n, seed=1), schedule=s).values,
        "softmax": lambda s: sparse_softmax(pattern, schedule=s).values,
        "row_sum": lambda s: row_sum(pattern, schedule=s),
        "row_max": lambda s: row_max(pattern, schedule=s),
        "gspmm max": lambda s: gspmm(pattern, dense(k, n), reduce="max", schedule=s),
        "attention": attention,
    }[op]


def longest_row(A, transposed: bool) -> float:
    """Where the longest row is, as a fraction of all rows."""
    lengths = np.bincount(A.indices, minlength=A.shape[1]) if transposed else np.diff(A.indptr)
    return float(np.argmax(lengths)) / max(len(lengths), 1)


def rows(
    gpu: model.Gpu, case: tuple[str, str, int, str], most: int | None = None
) -> Iterator[dict]:
    """A row for each launch of a case; `most` multiprocessors are emulated: by default few, but all
    in launches that merge pieces of rows, of which few blocks have work."""
    op, name, n, dtype = case
    (problem,) = problems.select(names=[name])
    A = problem.build()
    longest = longest_row(A, "transposed" in op)
    for launch in ours.launches_of(function(op, A, n, dtype)):
        few = gpu.multiprocessors if launch.call.kernel in MERGES else model.SAMPLE
        found = model.predict(gpu, launch, longest, few if most is None else most)
        yield row_of(gpu, case, launch.call.kernel, found)


def row_of(gpu: model.Gpu, case: tuple, kernel: str, found: model.Prediction) -> dict:
    op, name, n, dtype = case
    row = {"kind": "predicted", "gpu": gpu.name, "op": op, "problem": name, "n": n, "dtype": dtype}
    row |= {"kernel": kernel, "us": f"{1e6 * found.total:.2f}", "bound_by": found.bound}
    row |= {f"{term}_us": f"{1e6 * found.seconds[term]:.2f}" for term in model.TERMS}
    row |= {field: getattr(found, field) for field in ("blocks", "emulated", "resident")}
    row |= {"registers": found.registers, "spill_bytes": found.spill_bytes}
    for what in ("instructions", "loads", "tensor"):
        row[f"loop_{what}"] = getattr(found.loop, what, "")
    row |= {"instructions": round(found.instructions), "l2_mb": f"{1e-6 * found.l2_bytes:.2f}"}
    row |= {f"load_{what}": f"{found.load[what]:.2f}" for what in ("sectors", "lines", "lanes")}
    row |= {"store_sectors": f"{found.store['sectors']:.2f}"}
    return row | {"memory_mb": f"{1e-6 * found.memory_bytes:.2f}"}


def constants() -> list[str]:
    """The constants of the GPUs, as a table."""
    names = ["", *(gpu.name for gpu in model.GPUS.values())]
    lines = {
        "multiprocessors": lambda gpu: f"{gpu.multiprocessors}",
        "clock, GHz": lambda gpu: f"{1e-9 * gpu.clock:.2f}",
        "L1 and shared memory, KiB": lambda gpu: f"{gpu.l1_bytes >> 10}",
        "L2, MiB": lambda gpu: f"{gpu.l2_bytes >> 20}",
        "bytes from L2 a clock": lambda gpu: f"{gpu.l2_per_clock}",
        "memory, TB/s": lambda gpu: f"{1e-12 * gpu.memory:.2f}",
        "multiply-adds of 16-bit numbers a clock": lambda gpu: f"{gpu.tensor['f16']:.0f}",
        "clocks of a load from L2": lambda gpu: f"{gpu.memory_latency}",
    }
    return table(names, [[name, *map(of, model.GPUS.values())] for name, of in lines.items()])


def page(rows: Sequence[dict]) -> list[str]:
    """The tables of the page: the constants, and a line for each launch."""
    header = ["operation", "problem", "n", "dtype", "kernel"]
    gpus = list(dict.fromkeys(row["gpu"] for row in rows))
    for gpu in gpus:
        header += [f"{gpu}: predicted us", "bound by"]
    key = ("op", "problem", "n", "dtype", "kernel")
    found: dict[tuple, dict] = {}
    for row in rows:
        names, nth = tuple(str(row[name]) for name in key), 0
        while row["gpu"] in found.get((*names, nth), {}):  # such as the sums of dK and of dV
            nth += 1
        found.setdefault((*names, nth), {})[row["gpu"]] = row
    header += ["sectors", "lines", "lanes of a load", "registers"]
    body = []
    for (*names, _), of in found.items():
        cells = [*names]
        for gpu in gpus:
            cells += [of[gpu]["us"], of[gpu]["bound_by"]] if gpu in of else ["left out", ""]
        first = of[next(iter(of))]
        fields = ("load_sectors", "load_lines", "load_lanes", "registers")
        body.append([*cells, *(str(first[field]) for field in fields)])
    return [*constants(), "", *table(header, body)]


def kept(file: pathlib.Path) -> dict[tuple[str, tuple], list[dict]]:
    """The rows of a file by GPU and case, of the cases that there are."""
    found: dict[tuple[str, tuple], list[dict]] = {}
    if file.exists():
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                case = row["op"], row["problem"], int(row["n"]), row["dtype"]
                if case in CASES:
                    found.setdefault((row["gpu"], case), []).append(row)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", choices=model.GPUS, action="append", help="default: h100")
    parser.add_argument("--op", action="append", help="these operations alone")
    parser.add_argument("--problem", action="append", help="these problems alone")
    parser.add_argument("--out", type=pathlib.Path, default=FILE, help="other rows of it stay")
    arguments = parser.parse_args(argv)
    sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    written = kept(arguments.out)
    for gpu in (model.GPUS[name] for name in arguments.gpu or ["h100"]):
        for case in CASES:
            if case[0] not in (arguments.op or case) or case[1] not in (arguments.problem or case):
                continue
            start = time.monotonic()
            written.pop((gpu.name, case), None)
            try:
                found = list(rows(gpu, case))
            except (Unavailable, NotImplementedError) as why:
                print(f"{' '.join(map(str, case))}: left out: {why}", flush=True)
                continue
            for row in found:
                print(
                    f"predicted, {gpu.name}: {' '.join(map(str, case))}, {row['kernel']}: "
                    f"{row['us']} us ({row['bound_by']}); {time.monotonic() - start:.0f} s here",
                    flush=True,
                )
            written[gpu.name, case] = found
    gpus = list(dict.fromkeys(name for name, _ in written))
    of = lambda key: (gpus.index(key[0]), CASES.index(key[1]))  # noqa: E731
    lines = [row for key in sorted(written, key=of) for row in written[key]]
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    if arguments.out == FILE:
        put(PAGE, page(lines))


if __name__ == "__main__":
    main()
