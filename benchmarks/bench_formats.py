"""Conversions of large structures, against SciPy: python -m benchmarks.bench_formats [--nonzeros N]

Prints the seconds of a conversion (the faster of two, since the first compiles), and of SciPy's
equivalent; writes no file.
"""

import argparse
import pathlib
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
import scipy.io
import scipy.sparse as sp

from sgap_jax import COO, CSC, CSR, SparseArray, read, write


def seconds(call: Callable[[], object]) -> float:
    found = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - start)
    return min(found)


def measure(nonzeros: int, folder: pathlib.Path) -> list[tuple[str, float, float]]:
    """(what, our seconds, SciPy's), for uniform coordinates in random order, some of them twice."""
    rng = np.random.default_rng(0)
    size = max(1, nonzeros // 10)
    coordinates = rng.integers(0, size, (nonzeros, 2), dtype=np.int32)
    values = rng.standard_normal(nonzeros, dtype=np.float32)
    coo = sp.coo_array((values, (coordinates[:, 0], coordinates[:, 1])), shape=(size, size))
    csr = coo.tocsr()
    A = SparseArray.from_scipy(csr)
    path = folder / "matrix.mtx"
    write(path, A)
    other = folder / "scipy.mtx"
    cases = (
        ("from_coordinates", lambda: SparseArray.from_coordinates(coordinates, values, coo.shape),
         lambda: (coo.tocsr(), coo.tocsc())),
        ("from_scipy", lambda: SparseArray.from_scipy(csr), lambda: (csr.copy(), csr.tocsc())),
        ("CSR to COO", lambda: A.asformat(COO), csr.tocoo),
        ("CSR to CSC", lambda: A.asformat(CSC), csr.tocsc),
        ("transpose", lambda: A.T.asformat(CSR), lambda: csr.T.tocsr()),
        ("to_scipy", A.to_scipy, csr.copy),
        ("read .mtx", lambda: read(path), lambda: scipy.io.mmread(path, spmatrix=False).tocsr()),
        ("write .mtx", lambda: write(path, A), lambda: scipy.io.mmwrite(other, csr)),
    )  # fmt: skip
    return [(name, seconds(ours), seconds(theirs)) for name, ours, theirs in cases]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nonzeros", type=int, default=10_000_000)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for name, ours, theirs in measure(args.nonzeros, pathlib.Path(folder)):
            print(f"{name:17} {ours:6.2f} s, SciPy {theirs:6.2f} s", flush=True)


if __name__ == "__main__":
    main()
