"""Cutting and planning a graph for many parts, on one core: python -m benchmarks.bench_planning

Draws an R-MAT graph with the parameters of Graph500, and spreads it over as many virtual devices as
there are parts, in the given order of its vertices (METIS apart). Prints the seconds of the call,
of the clock and of the processor, and the peak growth of the resident set during it, which the
parts are in; writes no file. Linux only.
"""

import argparse
import os
import time


def measure(scale: int, degree: int, parts: int) -> dict[str, float]:
    """Runs on one core, which all threads that start later inherit."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={parts}"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

    import jax  # now that the devices are known

    from benchmarks.attention_memory import growth
    from benchmarks.parallel_bytes import rmat
    from sgap_jax import SparseArray, parallel

    mesh = jax.make_mesh((parts,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def spread(A: SparseArray) -> tuple:
        begin = time.perf_counter(), time.process_time()
        found = jax.block_until_ready(parallel.partition(A, mesh, "x"))
        return time.perf_counter() - begin[0], time.process_time() - begin[1], found

    def symmetric(scale: int) -> SparseArray:
        half = rmat(scale, degree)
        return SparseArray.from_scipy((half + half.T).tocsr())

    spread(symmetric(8))  # loads code, starts threads
    A, row = symmetric(scale), {}

    def measured() -> object:
        row["seconds"], row["processor_seconds"], found = spread(A)
        return found

    row["peak_growth_mb"] = growth(measured) / 1e6
    return {"vertices": A.shape[0], "entries": A.nnz, "parts": parts, **row}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=20, help="2^SCALE vertices")
    parser.add_argument("--degree", type=int, default=10, help="edges drawn for each vertex")
    parser.add_argument("--parts", type=int, default=64)
    args = parser.parse_args(argv)
    from benchmarks import machine

    print(f"# {machine.cpu_model()}, load average {machine.load_at_start():.1f}", flush=True)
    for name, value in measure(args.scale, args.degree, args.parts).items():
        print(f"{name:18} {value:15,.3f}", flush=True)


if __name__ == "__main__":
    main()
