"""The studies of the TACO scheduling paper (8.4 to 8.6) on this CPU:
python -m benchmarks.bench_compiler_studies [--quick]

Each study compares two schedules of one expression: rows against positions as row lengths grow
uneven, and as rows become few; and products of a sparse and a dense matrix without tiles and with
tiles, which keep rows of the dense matrix in a cache until they have been used several times.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine, timing
from benchmarks.peers import common
from sgap_jax import CSR, SparseArray, einsum
from sgap_jax.compiler import Schedule, assign

SPMV, SPMM = assign("ij,j->i", {"A": CSR}), assign("ij,jk->ik", {"A": CSR})
ROWS, ENTRIES = 1 << 15, 1 << 22
BASES = (1.0, 1.000005, 1.00001, 1.00002, 1.00005, 1.0001, 1.0005, 1.002, 1.01, 1.1)
FEW = (1, 2, 3, 4, 5, 8, 16, 100)
WIDTHS = (32, 64, 128, 256, 512)
COLUMNS, EACH = 100_000, 1000  # of the paper's matrix in 8.6; here with fewer rows


def by_rows() -> Schedule:
    """Every thread gets the same number of rows, as every warp does on a GPU."""
    s = Schedule(SPMV).divide("i", "part", "row", machine.threads())
    return s.parallelize("part", "CPUThread", "NoRaces")


def by_positions(parts: int) -> Schedule:
    """Every thread gets the same number of entries."""
    s = Schedule(SPMV).fuse("i", "j", "f").pos("f", "p", "A").divide("p", "part", "entry", parts)
    return s.parallelize("part", "CPUThread", "Atomics")


def skewed(base: float, rows: int, entries: int):
    """Row lengths proportional to base^-i, `entries` in all. The paper shuffles the rows among
    thousands of warps; among a few threads shuffling would even out the load, so rows stay in
    order."""
    rng = np.random.default_rng(0)
    weights = np.exp(-np.arange(rows) * np.log(base))
    lengths = np.floor(weights / weights.sum() * entries).astype(np.int64)
    lengths[0] += entries - lengths.sum()
    lengths = np.minimum(lengths, 4 * rows)
    row = np.repeat(np.arange(rows), lengths)
    return csr(row, rng, (rows, 4 * rows))


def wide(rows: int, each: int, columns: int | None = None):
    rng = np.random.default_rng(0)
    return csr(np.repeat(np.arange(rows), each), rng, (rows, columns or 4 * each))


def csr(row: np.ndarray, rng, shape) -> SparseArray:
    """A matrix whose columns rise by random steps in each row."""
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
    """8.4: the number of entries is fixed, their distribution over the rows grows uneven."""
    for base in BASES:
        A, x = skewed(base, rows, entries), jnp.asarray(harness.dense(4 * rows))
        calls = {
            "rows": call(by_rows(), "ij,j->i", A, x),
            "positions": call(by_positions(machine.threads()), "ij,j->i", A, x),
        }
        yield compared("load balance: rows, positions", f"base {base:.10g}", calls)


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


def reuse(rows: int, each: int, columns: int):
    """8.6 with the paper's schedules (A.10 and A.11), on one thread as in the paper: an entry's row
    of B is read for one column at a time, or tiles of 8 entries keep their rows until all columns
    are done."""
    A = wide(rows, each, columns)
    one = Schedule(SPMM).reorder("i", "k", "j")
    tiled = Schedule(SPMM).pos("j", "jpos", "A").split("jpos", "jpos0", "jpos1", 8)
    tiled = tiled.reorder("i", "jpos0", "k", "jpos1")
    for n in WIDTHS:
        B = jnp.asarray(harness.dense(columns, n))
        calls = {"entries": call(one, "ij,jk->ik", A, B), "tiles": call(tiled, "ij,jk->ik", A, B)}
        yield compared("reuse: all entries, tiles of 8 entries", f"n = {n}", calls)


def locality(rows: int, each: int, columns: int, tile: int = 2048):
    """8.6 between the caches, with vectors and all threads: either each row of A goes over all of
    B, or over tiles of B's rows, each of which stays in the cache for all rows of A."""
    A = wide(rows, each, columns)

    def by_parts(schedule: Schedule) -> Schedule:
        schedule = schedule.parallelize("part", "CPUThread", "NoRaces")
        return schedule.parallelize("k", "CPUVector", "NoRaces")

    parts = Schedule(SPMM).divide("i", "part", "row", machine.threads())
    whole = by_parts(parts.reorder("part", "row", "j", "k"))
    tiled = by_parts(parts.split("j", "j0", "j1", tile).reorder("part", "j0", "row", "j1", "k"))
    for n in WIDTHS:
        B = jnp.asarray(harness.dense(columns, n))
        calls = {"whole": call(whole, "ij,jk->ik", A, B), "tiles": call(tiled, "ij,jk->ik", A, B)}
        yield compared(f"locality: all of B, tiles of {tile} rows", f"n = {n}", calls)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small; writes no file")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    args = parser.parse_args(argv)
    scale = 16 if args.quick else 1
    about_run = harness.stamp()
    rows = [
        row | about_run
        for found in (
            balance(ROWS // scale, ENTRIES // scale),
            parallelism(ENTRIES // 4 // scale),
            reuse(400 // scale, EACH, COLUMNS // scale),
            locality(4000 // scale, EACH, COLUMNS // scale),
        )
        for row in found
    ]
    if args.out or not args.quick:
        path = (args.out or machine.results_dir()) / "compiler_studies.csv"
        harness.write(path, rows, whole=True)


if __name__ == "__main__":
    main()
