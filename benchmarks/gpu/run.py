"""All benchmarks of a GPU: python -m benchmarks.gpu.run [--results DIR] [--dry-run]

SGAP_GPU_SECONDS: no case starts after that many seconds; what was not started is listed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import pathlib
import time

from benchmarks import problems
from benchmarks.gpu import device, summary, timing
from benchmarks.gpu.bench import MOST_POINTS, OURS, Case, Row
from benchmarks.gpu.vectors import VectorCase
from sgap_jax.runtime.default_calls import OF_VECTORS

# In the order of the goals, so that a run that ends early has them.
PLAN = tuple(("spmm", n) for n in (4, 64, 1, 16, 128))
PLAN += (("sddmm", 64), ("sddmm", 128), ("softmax", 1))
PLAN += (("spmm_vectors", 64), ("spmm_vectors", 256), ("sddmm_vectors", 64))
DRY_PLAN = (("spmm", 4), ("sddmm", 4), ("softmax", 1), ("spmm", 1))
DRY_PLAN += (("spmm_vectors", 4), ("sddmm_vectors", 4))

VECTOR_TAGS = {"vectors", "vectors_ci"}  # of matrices made of column vectors


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--results", type=pathlib.Path, default=problems.ROOT / "benchmarks/results"
    )
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--dry-run", action="store_true", help="on the emulator, tiny problems")
    args = parser.parse_args(argv)
    start, seconds = time.monotonic(), float(os.environ.get("SGAP_GPU_SECONDS") or "inf")
    hardware = timing.DryRun() if args.dry_run else timing.Cuda()
    arch = "sm_90" if args.dry_run else _arch()
    bandwidth = hardware.bandwidth()
    folder = device.folder(args.results)
    matrices, skipped = _matrices(args)
    rows: dict[str, list[Row]] = {name: [] for name in ("spmm", "sddmm", "softmax", "points")}
    rows |= {name: [] for name in OF_VECTORS}
    not_started = []
    for op, n in DRY_PLAN if args.dry_run else PLAN:
        for problem, A in matrices:
            if op == "sddmm" and "gpu" in problem.tags:
                continue  # its oracle takes a minute
            if (op in OF_VECTORS) != bool(problem.tags & VECTOR_TAGS):
                continue
            if time.monotonic() - start > seconds:
                not_started.append(f"{op} {problem.name} n={n}")
                continue
            about = {"problem": problem.name, "family": problem.family}
            about |= {"m": A.shape[0], "k": A.shape[1], "nnz": A.nnz}
            make, of = (VectorCase, OF_VECTORS[op]) if op in OF_VECTORS else (Case, op)
            case = make(of, A, n, hardware, bandwidth, arch)
            rows[op] += [_said(op, about | row) for row in case.rows()]
            if op == "spmm" and n == 4:
                few = 3 if args.dry_run else MOST_POINTS
                rows["points"] += [about | row for row in case.search(few)]
            _write(folder, rows)
    about = device.stamp() | {"versions": device.versions(), "gb_per_s": 1e-9 * bandwidth}
    about |= {"dry_run": args.dry_run, "not_started": not_started, "skipped": skipped}
    about["seconds"] = round(time.monotonic() - start)
    (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")
    print(summary.write(folder).read_text())
    print(f"{folder}: {about['seconds']} s; {len(not_started)} cases not started")
    ours = [row for found in rows.values() for row in found if row["contender"] in OURS]
    if wrong := [row for row in ours if str(row.get("notes", "")).startswith("wrong")]:
        raise SystemExit(f"{len(wrong)} results of ours are wrong, the first: {wrong[0]}")


def _arch() -> str:
    from sgap_jax.runtime.launch import device_arch

    return device_arch()


def _matrices(args: argparse.Namespace) -> tuple[list, list[str]]:
    """(problem, matrix) of all that are there, and the names of those that are not."""
    found = problems.select("ci" if args.dry_run else "default", args.problems)
    if not (args.dry_run or args.problems):
        found += problems.select("gpu") + problems.select("vectors_quick")
    matrices, skipped = [], []
    for problem in found:
        try:
            matrices.append((problem, problem.build()))
        except problems.Unavailable as reason:
            skipped.append(f"{problem.name}: {reason}")
            print(f"skipped {problem.name}: {reason}", flush=True)
    return matrices, skipped


def _said(op: str, row: Row) -> Row:
    value = f"{row['us']:.1f} us" if "us" in row else row["notes"]
    print(f"{op} {row['problem']} n={row['n']} {row['contender']}: {value}", flush=True)
    return row


def _write(folder: pathlib.Path, rows: dict[str, list[Row]]) -> None:
    stamp = device.stamp()
    for name, found in rows.items():
        if not found:
            continue
        text = [
            {key: f"{x:.4g}" if isinstance(x, float) else x for key, x in (row | stamp).items()}
            for row in found
        ]
        columns = list(dict.fromkeys(key for row in text for key in row))
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(text)


if __name__ == "__main__":
    main()
