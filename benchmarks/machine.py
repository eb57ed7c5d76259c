"""The machine's description, and its peak rates, measured in the same run."""

import dataclasses
import functools
import os
import pathlib
import platform
import re
import subprocess
import time
from collections.abc import Callable
from importlib import metadata

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "torch", "numba", "sparse_dot_mkl", "mkl")
TILE_BYTES = 64  # of a row of the dense operand: one cache line, the narrowest useful tile


def threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def load_at_start() -> float:
    """The load average at the first call, before our own work counts: the use of the cores by
    others."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


@functools.cache
def cpu_model() -> str:
    """Model name; family and model numbers too, as virtual machines shorten the name."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    name = found.get("model name", platform.machine())
    numbers = [f"{key.split()[-1]} {found[key]}" for key in ("cpu family", "model") if key in found]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def results_dir() -> pathlib.Path:
    slug = re.sub(r"[^a-z0-9]+", "_", f"{cpu_model()} {threads()} cores".lower()).strip("_")
    return ROOT / "benchmarks" / "results" / slug


def commit() -> str:
    """Short id of the commit, with "+" if the measured sources differ from it.

    SGAP_COMMIT gives it if the sources are a copy without their history.
    """
    if named := os.environ.get("SGAP_COMMIT"):
        return named

    def git(*words: str) -> str:
        try:
            return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True).stdout
        except FileNotFoundError:
            return ""

    sources = ("sgap_jax", "cpu", "cuda", "benchmarks/*.py", "benchmarks/**/*.py")
    changed = git("status", "--porcelain", "--", *sources)
    name = git("rev-parse", "--short", "HEAD").strip() or "none"
    return name + ("+" if changed.strip() else "")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def caches() -> dict[str, int]:
    """Bytes of L1d and L2 of one core and of L3; typical sizes if the system does not report
    them."""
    sizes = {"L1": 32 << 10, "L2": 1 << 20, "L3": 16 << 20}
    for index in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            kind, level, size = ((index / x).read_text().strip() for x in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction" and f"L{level}" in sizes:
            unit = {"K": 10, "M": 20, "G": 30}.get(size[-1].upper(), 0)
            sizes[f"L{level}"] = int(size.rstrip("KMGkmg")) << unit
    return sizes


def _fastest(call: Callable[[], object], seconds: float = 0.15) -> float:
    call()
    end, best = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _sgemm_gflops(size: int = 2048) -> float:
    """The rate of the best sgemm installed: the practical peak of multiply-adds."""
    import jax

    a = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    on_device, product = jax.numpy.asarray(a), jax.jit(lambda x: x @ x)
    calls = [lambda: a @ a, lambda: product(on_device).block_until_ready()]
    try:
        import torch

        tensor = torch.from_numpy(a)
        calls.append(lambda: tensor @ tensor)
    except ImportError:
        pass
    return max(2e-9 * size**3 / _fastest(call) for call in calls)


def _read_gb_per_s(nbytes: int, cores: int) -> float:
    """The bandwidth of reading `nbytes` repeatedly, split over the cores. Needs numba."""
    from benchmarks.numba_loops import read_repeatedly

    data = np.ones(max(nbytes, 4096) // 4, np.float32)
    repeats = max(1, (64 << 20) // data.nbytes)
    seconds = _fastest(lambda: read_repeatedly(data, repeats, cores))
    return data.nbytes * repeats / seconds * 1e-9


@dataclasses.dataclass(frozen=True)
class Machine:
    """Peaks of all cores together. `gb_per_s` has L2, L3 and DRAM, or is empty without numba."""

    cores: int
    fma_gflops: float
    gb_per_s: dict[str, float]
    cache_bytes: dict[str, int]

    def describe(self) -> str:
        reads = ", ".join(f"{level} {rate:.0f}" for level, rate in self.gb_per_s.items())
        return f"sgemm {self.fma_gflops:.0f} GFLOP/s" + (f", reads GB/s: {reads}" if reads else "")

    def level(self, shared: float, private: float = 0.0) -> str:
        """The cache level that holds `shared` bytes (spread over the cores) plus `private` bytes
        per core."""
        if shared / self.cores + private <= self.cache_bytes["L1"]:
            return "L1"
        if shared / self.cores + private <= self.cache_bytes["L2"]:
            return "L2"
        return "L3" if shared + private <= self.cache_bytes["L3"] else "DRAM"

    def bound(self, flops: float, moved: float, gathered: float = 0, slab: float = 0):
        """(seconds, limiting resource): a lower bound for every implementation of this kind.

        The largest of: `flops` at the sgemm rate; `moved` bytes (each operand and the result once)
        at the bandwidth of the level that holds them all; `gathered` bytes (a row of the dense
        operand for each nonzero, none reused between nonzeros) at the bandwidth of the level that
        holds the `slab` of the dense operand that one column tile reads. If that is L1 the gather
        is free: a multiply-add needs one load.
        """
        terms = {"FMA": flops / (self.fma_gflops * 1e9)}
        for name, nbytes, level in (
            ("stream", moved, self.level(shared=moved)),
            ("gather", gathered, self.level(shared=0, private=slab)),
        ):
            if nbytes and level in self.gb_per_s:
                terms[f"{name} {level}"] = nbytes / (self.gb_per_s[level] * 1e9)
        name = max(terms, key=terms.get)
        return terms[name], name

    def product_bound(self, A, columns: int, products: int = 1):
        """Bound of `products` passes over A's nonzeros with `columns` dense columns, float32."""
        m, k = A.shape
        moved = 8 * A.nnz + 4 * (m + 1) + 4 * columns * (m + k)
        slab = k * min(4 * columns, TILE_BYTES)
        seconds, by = self.bound(2 * A.nnz * columns, moved, 4 * A.nnz * columns, slab)
        return products * seconds, by


@functools.cache
def probe() -> Machine:
    """Measures the peaks (about three seconds)."""
    cores, sizes = threads(), caches()
    bandwidth = {}
    try:
        for level, nbytes in (
            ("L2", cores * sizes["L2"] // 2),
            ("L3", (cores * sizes["L2"] + sizes["L3"]) // 2),
            ("DRAM", max(8 * sizes["L3"], 256 << 20)),
        ):
            bandwidth[level] = _read_gb_per_s(nbytes, cores)
    except ImportError:
        bandwidth = {}
    return Machine(cores, _sgemm_gflops(), bandwidth, sizes)
