"""The studies of the TACO scheduling paper (8.4 to 8.6) on this CPU:
python -m benchmarks.bench_compiler_studies [--quick]

Each sets two schedules of one expression against each other: rows against positions as rows grow
uneven, as they grow few, and dense columns whole against tiled.
"""

import argparse
import csv
import datetime
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine, problems, timing
from benchmarks.peers import common
from sgap_jax import CSR, SparseArray, einsum
from sgap_jax.compiler import Schedule, assign

SPMV, SPMM = assign("ij,j->i", {"A": CSR}), assign("ij,jk->ik", {"A": CSR})
ROWS, ENTRIES = 1 << 15, 1 << 22
BASES = (1.0, 1.00002, 1.0001, 1.0005, 1.002, 1.01, 1.1)
FEW = (1, 2, 3, 8, 100)
WIDTHS = (32, 128, 512)


def by_rows() -> Schedule:
    """Each thread has as many rows as the others, as a GPU's warps have."""
    s = Schedule(SPMV).divide("i", "part", "row", machine.threads())
    return s.parallelize("part", "CPUThread", "NoRaces")


def by_positions(parts: int) -> Schedule:
    """Each thread has as many entries as the others."""
    s = Schedule(SPMV).fuse("i", "j", "f").pos("f", "p", "A").divide("p", "part", "entry", parts)
    return s.parallelize("part", "CPUThread", "Atomics")


def skewed(base: float, rows: int, entries: int):
    """Row i proportional to base^-i, `entries` in all. The paper shuffles the rows among thousands
    of warps; between a few threads shuffled rows would be even again, so these stay in order."""
    rng = np.random.default_rng(0)
    weights = np.exp(-np.arange(rows) * np.log(base))
    lengths = np.floor(weights / weights.sum() * entries).astype(np.int64)
    lengths[0] += entries - lengths.sum()
    lengths = np.minimum(lengths, 4 * rows)
    row = np.repeat(np.arange(rows), lengths)
    return csr(row, rng, (rows, 4 * rows))


def wide(rows: int, each: int):
    rng = np.random.default_rng(0)
    return csr(np.repeat(np.arange(rows), each), rng, (rows, 4 * each))


def csr(row: np.ndarray, rng, shape) -> SparseArray:
    """Columns of a row rise by random steps."""
    lengths = np.bincount(row, minlength=shape[0])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    place = np.arange(row.size) - offsets[row]
    stride = np.maximum(shape[1] // np.maximum(lengths, 1), 1)[row]
    columns = place * stride + rng.integers(0, stride)
    values = rng.standard_normal(row.size).astype(np.float32)
    return SparseArray.from_arrays(values, offsets, columns, shape=shape)


def call(schedule: Schedule, subscripts: str, *operands):
    return common.ready(jax.jit(lambda *x: einsum(subscripts, *x, schedule=schedule)), *operands)


def compared(study: str, case: str, calls: dict) -> dict:
    results = [np.asarray(call(), np.float64) for call in calls.values()]
    error = np.abs(results[0] - results[1]).max() / np.abs(results[0]).max()
    if not error < 1e-4:
        raise RuntimeError(f"{study} {case}: the schedules differ by {error:.2g}")
    times = timing.measure(calls)
    first, second = (1e3 * found.seconds for found in times.values())
    print(f"{study}, {case}: {' '.join(calls)}: {first:.2f} {second:.2f} ms", flush=True)
    return {"study": study, "case": case, "first_ms": first, "second_ms": second}


def balance(rows: int, entries: int):
    """8.4: the number of entries stays, their distribution over the rows grows uneven."""
    for base in BASES:
        A, x = skewed(base, rows, entries), jnp.asarray(harness.dense(4 * rows))
        calls = {
            "rows": call(by_rows(), "ij,j->i", A, x),
            "positions": call(by_positions(machine.threads()), "ij,j->i", A, x),
        }
        yield compared("load balance: rows, positions", f"base {base:g}", calls)


def parallelism(entries: int):
    """8.5: fewer rows than threads leave threads idle."""
    for rows in FEW:
        A = wide(rows, entries // rows)
        x = jnp.asarray(harness.dense(A.shape[1]))
        calls = {
            "rows": call(by_rows(), "ij,j->i", A, x),
            "positions": call(by_positions(machine.threads()), "ij,j->i", A, x),
        }
        yield compared("parallelism: rows, positions", f"{rows} rows", calls)


def locality(size: int, each: int):
    """8.6: tiles of dense columns keep the rows of B that a tile reads in the cache."""
    A = SparseArray.from_scipy(problems.uniform(size, size, each / size))
    whole = Schedule(SPMM).reorder("i", "j", "k").split("i", "i0", "i1", 16)
    whole = whole.parallelize("i0", "CPUThread", "NoRaces").parallelize("k", "CPUVector", "NoRaces")
    tiled = Schedule(SPMM).split("k", "k0", "k1", 32).split("i", "i0", "i1", 16)
    tiled = tiled.reorder("k0", "i0", "i1", "j", "k1").fuse("k0", "i0", "task")
    tiled = tiled.parallelize("task", "CPUThread", "NoRaces")
    tiled = tiled.parallelize("k1", "CPUVector", "NoRaces")
    for n in WIDTHS:
        B = jnp.asarray(harness.dense(size, n))
        calls = {
            "whole": call(whole, "ij,jk->ik", A, B),
            "tiled": call(tiled, "ij,jk->ik", A, B),
        }
        yield compared("locality: columns whole, in tiles of 32", f"n = {n}", calls)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small; writes no file")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    args = parser.parse_args(argv)
    scale = 16 if args.quick else 1
    stamp = {
        "commit": machine.commit(),
        "date": datetime.date.today().isoformat(),
        "device": machine.cpu_model(),
        "threads": machine.threads(),
        "load": machine.load_at_start(),
    }
    rows = [
        row | stamp
        for found in (
            balance(ROWS // scale, ENTRIES // scale),
            parallelism(ENTRIES // 4 // scale),
            locality(20_000 // scale, 100),
        )
        for row in found
    ]
    if args.out or not args.quick:
        path = (args.out or machine.results_dir()) / "compiler_studies.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
