"""Benchmarks: named problems, every installed peer in the same process, CSV per machine.

    python -m benchmarks.run            everything, then the table and the plot
    python -m benchmarks.bench_spmm     one operation
    python -m benchmarks.alone          does sharing the process slow a peer down?

The libraries' thread pools share the process. Idle workers must not spin during the next
contender's time, so the waiting times are set here, before any library starts. Each pool is warmed
up again after every switch (timing.py), so that no contender pays for waking its threads.
"""

import glob
import os
import sys

# One OpenMP runtime: MKL uses the GNU runtime that torch and numba bring. About 0.2 ms of spinning
# keeps back-to-back calls at full speed; the default of several ms does not make them faster.
SETTINGS = {
    "MKL_THREADING_LAYER": "GNU",
    "NUMBA_THREADING_LAYER": "omp",
    "GOMP_SPINCOUNT": "10000",
    "KMP_BLOCKTIME": "1",  # ms, for builds with LLVM's or Intel's runtime
}
if os.environ.get("SGAP_BENCHMARK_THREADS") != "default":
    for _name, _value in SETTINGS.items():
        os.environ.setdefault(_name, _value)

# sparse_dot_mkl does not search a virtual environment by itself.
_found = sorted(glob.glob(os.path.join(sys.prefix, "lib", "libmkl_rt.so*")))
if _found:
    os.environ.setdefault("MKL_RT", _found[-1])
