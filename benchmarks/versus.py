"""Compares this installation with another: python -m benchmarks.versus OTHER_PYTHON --out results

Two interpreters, each with its own sgap_jax, take turns at the same calls: blocks of about 30 ms in
alternating order; a time is the median over rounds of a block's median. The addresses of the
operands can change a time by a factor of two, and are fixed for the life of a process: each of the
two is started `PROCESSES` times. The ratio is the time here over the time there. For comparisons
that need two processes, such as kernels before and after a change.
"""

import argparse
import csv
import dataclasses
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time

from benchmarks import problems

N = (1, 32, 128)
OPS = ("spmm", "spmm_transpose", "sddmm", "gradient", "einsum", "sentinels")
BLOCK_SECONDS = 0.03
PROCESSES = 2
ROUNDS = 3


def unchecked(A, sentinels: bool):
    """A on unchecked index arrays; with `sentinels`, one index out of range at the end of each
    row."""
    (*first, (offsets, indices)) = A.index_arrays
    if sentinels and hasattr(A, "is_checked"):  # older installations crash at such an index
        last = offsets[1:][offsets[1:] > offsets[:-1]] - 1
        indices = indices.at[last].set(A.shape[1])
    return dataclasses.replace(A, index_arrays=(*map(tuple, first), (offsets, indices)))


def calls(op: str, name: str, n: int):
    """A call of `op` on a problem, without arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgap_jax import SparseArray, einsum, sddmm, spmm

    # With asynchronous dispatch XLA runs programs that contain operations of its own on another
    # thread, 50 to 100 us later. einsum's programs contain some, for structures that fail its
    # checks.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    (problem,) = problems.select(names=[name])
    A = SparseArray.from_scipy(problem.build())
    draw = np.random.default_rng(2).standard_normal
    X, B = (jnp.asarray(draw((size, n)), jnp.float32) for size in A.shape)
    total = lambda v, B, A: jnp.sum(spmm(A.with_values(v), B) ** 2)  # noqa: E731
    function, operands = {
        "spmm": (lambda A, B: spmm(A, B), (A, B)),
        "spmm_transpose": (lambda A, X: spmm(A, X, transpose=True), (A, X)),
        "sddmm": (lambda A, X, B: sddmm(A, X, B).values, (A, X, B)),
        "einsum": (
            lambda A, B, X: einsum("ij,jk,ik->ik", A, B, X),
            (unchecked(A, sentinels=False), B, X),
        ),
        "sentinels": (lambda A, B: spmm(A, B), (unchecked(A, sentinels=True), B)),
        "gradient": (jax.value_and_grad(total, argnums=(0, 1)), (A.values, B, A)),
    }[op]
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*operands))


def work() -> None:
    """Times the case of each line of the input for a block, and answers with the median."""
    held, call = None, None
    for line in sys.stdin:
        case = json.loads(line)
        if case != held:
            held, call = case, calls(*case)
            call()
        times, end = [], time.perf_counter() + BLOCK_SECONDS
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        print(statistics.median(times), flush=True)


def start(python: str) -> subprocess.Popen:
    command = [python, "-m", "benchmarks.versus", "--worker"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=problems.ROOT, **pipes)


def ask(worker: subprocess.Popen, case: list) -> float:
    worker.stdin.write(json.dumps(case) + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", nargs="?", help="a Python with another sgap_jax")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--problems", nargs="+")
    parser.add_argument("--n", nargs="+", type=int, default=N)
    parser.add_argument("--ops", nargs="+", default=OPS, choices=OPS)
    parser.add_argument("--out", type=pathlib.Path, help="a folder: writes versus.csv")
    args = parser.parse_args()
    if args.worker:
        return work()
    if not args.other:
        parser.error("OTHER_PYTHON is missing")
    names = [problem.name for problem in problems.select(names=args.problems)]
    cases = [(op, name, n) for op in args.ops for n in args.n for name in names]
    times = {case: ([], []) for case in cases}
    for _ in range(PROCESSES):
        workers = [start(sys.executable), start(args.other)]
        for case in cases:
            for turn in (0, 1):
                ask(workers[turn], case)  # compiles
            for i in range(ROUNDS):
                for turn in (0, 1) if i % 2 else (1, 0):
                    times[case][turn].append(ask(workers[turn], case))
        for worker in workers:
            worker.communicate()
    rows = []
    for (op, name, n), both in times.items():
        here, there = (statistics.median(found) * 1e6 for found in both)
        rows.append(
            dict(op=op, problem=name, n=n, here_us=here, there_us=there, ratio=here / there)
        )
        print(f"{op} {name} n={n}: {here:.1f} us, {there:.1f} us, {here / there:.3f}", flush=True)
    for n in args.n:
        for op in args.ops:
            logs = [math.log(row["ratio"]) for row in rows if (row["op"], row["n"]) == (op, n)]
            print(f"{op} n={n}: mean ratio {math.exp(statistics.mean(logs)):.3f} of {len(logs)}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        with open(args.out / "versus.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
