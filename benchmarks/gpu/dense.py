"""From which sparsity on a sparse product is predicted to be faster than a dense one.

The dense product (cuBLAS comes without source) is the best tiling by the same model as ours: the
longest of arithmetic at the peak, bytes from L2 and bytes of memory. Neither bound is reached. By
how much real dense products are further from theirs than real sparse ones is taken from published
crossings, where both take equally long: `FACTORS`. So what is predicted for an H100 is

    predicted sparse time <= factor x bound of the dense product

`most_stored` gives the part of a matrix that may be stored for that, from predicted.csv;
sgap_jax/schedules/explain.py has these figures, and a test derives them again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

from benchmarks.gpu.model import H100, V100, Gpu

_TILES = tuple(itertools.product((32, 64, 128, 256), repeat=2))
_SPLITS = (1, 2, 4, 8)  # of the sums over k, added by way of L2
_LARGEST = 256 * 128  # elements of a tile whose sums fit in the registers
_BYTES = {"f16": 2, "f32": 4}

# Where sparse products were published as fast as cuBLAS's on a V100, for [2048, 1024] times [1024,
# 256]: the time that the model predicts for the sparse ones (docs/predicted.md). vectorSparse,
# section 7.2.1 (its kernels with 80%, 70% and 50% of zeros, V = 2, 4 and 8), and Figure 4 (Sputnik
# in float32, 80%).
CROSSINGS = {"f16": (19.7e-6, 18.4e-6, 26.7e-6), "f32": (53.0e-6,)}


def dense_bound(gpu: Gpu, m: int, k: int, n: int, kind: str) -> float:
    """Seconds of C = A B, dense, with A of m x k and B of k x n, at least; `kind` is "f16" or
    "f32" (in full precision, not TF32)."""
    size, found = _BYTES[kind], math.inf
    moved = (m * k + k * n + m * n) * size / gpu.memory * gpu.clock
    for (rows, columns), splits in itertools.product(_TILES, _SPLITS):
        if rows * columns > _LARGEST:
            continue
        tiles = -(-m // rows) * -(-n // columns)
        waves = -(-tiles * splits // gpu.multiprocessors)
        arithmetic = waves * rows * columns * k / splits / gpu.dense[kind]
        partial = 2 * 4 * m * n * splits if splits > 1 else 0
        passed = tiles * (rows + columns) * k * size + m * n * size + partial
        found = min(found, max(arithmetic, passed / gpu.l2_per_clock, moved))
    return found / gpu.clock


def factors() -> dict[str, float]:
    """{kind: published times at the crossings over the bound, where the sparse product's time is
    the predicted one}."""
    means = {kind: math.prod(times) ** (1 / len(times)) for kind, times in CROSSINGS.items()}
    return {kind: mean / dense_bound(V100, 2048, 1024, 256, kind) for kind, mean in means.items()}


# (operation, 16-bit operands, vector length): (problem, n, part that is stored) of a row of
# predicted.csv; problems are of 2048 x 1024.
ROWS = {
    ("spmm", True, 1): ("weights_2048x1024_90pct", 128, 0.1),
    ("spmm", True, 2): ("weights_2048x1024_90pct_v2", 256, 0.1),
    ("spmm", True, 4): ("weights_2048x1024_90pct_v4", 256, 0.1),
    ("spmm", True, 8): ("weights_2048x1024_70pct_v8", 256, 0.3),
    ("spmm", True, 16): ("weights_2048x1024_80pct_v16", 256, 0.2),
    ("spmm", False, 1): ("weights_2048x1024_90pct", 256, 0.1),
    ("spmm", False, 8): ("weights_2048x1024_90pct_v8", 256, 0.1),
    ("sddmm", True, 1): ("weights_2048x1024_90pct", 128, 0.1),
    ("sddmm", True, 4): ("weights_2048x1024_90pct_v4", 256, 0.1),
    ("sddmm", True, 8): ("weights_2048x1024_90pct_v8", 256, 0.1),
    ("sddmm", False, 1): ("weights_2048x1024_90pct", 128, 0.1),
}
ROWS_OF_FEW = {("spmm", False, 1): ("weights_2048x1024_90pct", 4, 0.1)}


def most_stored(
    predicted: Iterable[dict], rows: Mapping[tuple[str, bool, int], tuple[str, int, float]]
) -> dict[tuple[str, bool, int], float]:
    """{(operation, 16-bit operands, vector length): the part of a matrix that may be stored for the
    sparse product to be predicted as no slower on an H100}, as if its time grew with what is
    stored.

    Args:
      predicted: the rows of predicted.csv.
      rows: ROWS, or ROWS_OF_FEW.
    """
    times = {
        (row["op"], row["dtype"], row["problem"], int(row["n"])): 1e-6 * float(row["us"])
        for row in predicted
        if row["gpu"] == H100.name
    }
    found = {}
    for (op, half, length), (problem, n, stored) in rows.items():
        kind, dtype = ("f16", "bfloat16") if half else ("f32", "float32")
        size = (2048, 1024, n) if op == "spmm" else (2048, n, 1024)
        dense = factors()[kind] * dense_bound(H100, *size, kind)
        found[op, half, length] = stored * dense / times[op, dtype, problem, n]
    return found
