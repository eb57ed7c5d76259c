"""Does sharing a process slow any contender down? python -m benchmarks.alone

Times each SpMM peer in a process of its own, with its default thread settings, and in one process
with all others, as the benchmarks do. A ratio well above 1 would be unfair to a peer.
"""

import argparse
import json
import os
import subprocess
import sys

import benchmarks

CASES = (("weights_2048x1024_90pct", 1), ("weights_2048x1024_90pct", 32))
CASES += (("weights_2048x1024_90pct", 128), ("uniform_10k_0.1pct", 64))
PEERS = ("scipy", "jax_bcsr", "torch_csr", "sparse_dot_mkl", "mkl_inspector", "numba", "jax_dense")


def times(names: list[str]) -> dict[str, list[float]]:
    """Seconds of each case for each peer that is installed."""
    from benchmarks import harness, problems, timing
    from benchmarks.peers import spmm

    found: dict[str, list[float]] = {name: [] for name in names}
    for problem, n in CASES:
        A = problems.select(names=[problem])[0].build()
        B, calls = harness.dense(A.shape[1], n), {}
        for name in names:
            try:
                calls[name] = spmm.PEERS[name](A, B)
            except (ImportError, problems.Unavailable):
                continue
            calls[name]()  # compiles
        for name, timed in timing.measure(calls).items():
            found[name].append(timed.seconds)
    return found


def in_process(names: list[str], environment: dict[str, str]) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "benchmarks.alone", "--measure", *names]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs="+", metavar="PEER", help="print seconds as JSON")
    names = parser.parse_args().measure
    if names:
        print(json.dumps(times(names)))
        return
    own = {key: value for key, value in os.environ.items() if key not in benchmarks.SETTINGS}
    own["SGAP_BENCHMARK_THREADS"] = "default"
    together = in_process(list(PEERS), dict(os.environ))
    for name in PEERS:
        alone = in_process([name], own)[name]
        for (problem, n), a, t in zip(CASES, alone, together[name], strict=False):
            print(f"{name:15} {problem} n={n}: alone {1e6 * a:.0f} us, together {t / a:.2f} of it")


if __name__ == "__main__":
    main()
