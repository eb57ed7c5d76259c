"""Making masks of attention: python -m benchmarks.bench_masks

Seconds of the clock for each mask in CSR and in CVS(8), first call and best of `--rounds`; the
structure of the transpose, which is made when something needs it, in a column of its own. Prints a
table and writes no file. There is no peer: FlexAttention's `create_block_mask` says which blocks of
128 x 128 have entries, and evaluates the function for all pairs to do so.
"""

import argparse
import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks import machine
from sgap_jax import CSR, CVS, Format, SparseArray, masks


def cases(L: int) -> dict[str, Callable[[Format], SparseArray]]:
    documents = np.arange(L) // 512

    def window(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return (j <= i) & (i - j < 256)

    def dilated(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return (abs(i - j) <= 512) & ((i - j) % 4 == 0)

    def sinks(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return (j <= i) & ((i - j < 256) | (j < 4))

    def looked_up(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return (documents[i] == documents[j]) & (j <= i)

    draws = np.random.default_rng(0)
    ends = np.sort(draws.integers(1, L, max(L // 512, 1)))
    ragged, mixed = np.searchsorted(ends, np.arange(L), "right"), draws.permutation(documents)

    def other_lengths(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return (ragged[i] == ragged[j]) & (j <= i)

    def in_no_order(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return (mixed[i] == mixed[j]) & (j <= i)

    double = 2 * L
    a, b = (
        {f: make(f) for f in (CSR, CVS(8))}
        for make in (
            lambda f: masks.band(double, 257, format=f),
            lambda f: masks.longformer(double, 128, 16, format=f),
        )
    )
    return {
        "`band(L, 257)`": lambda f: masks.band(L, 257, format=f),
        "`longformer(L, 256, 16)`": lambda f: masks.longformer(L, 256, 16, format=f),
        "`longformer(L, 256, 16, dilation=4)`": lambda f: masks.longformer(L, 256, 16, 4, format=f),
        "`bigbird(L, 64)`": lambda f: masks.bigbird(L, 64, format=f),
        "`strided(L, 128)`": lambda f: masks.strided(L, 128, format=f),
        "`fixed(L, 128)`": lambda f: masks.fixed(L, 128, format=f),
        "`block_diagonal`, documents of 512": lambda f: masks.block_diagonal(documents, format=f),
        "`band_and_random(L, L // 128, 0.99)`": lambda f: masks.band_and_random(
            L, L // 128, 0.99, format=f
        ),
        "`causal(band(L, 513))`": lambda f: masks.causal(masks.band(L, 513, format=f)),
        "`causal` of documents": lambda f: masks.causal(masks.block_diagonal(documents, format=f)),
        "`from_function`, window": lambda f: masks.from_function(window, L, format=f),
        "`from_function`, dilated window": lambda f: masks.from_function(dilated, L, format=f),
        "`from_function`, window and sinks": lambda f: masks.from_function(sinks, L, format=f),
        "`from_function`, lookup of documents": lambda f: masks.from_function(
            looked_up, L, format=f
        ),
        "`from_function`, documents of other lengths": lambda f: masks.from_function(
            other_lengths, L, format=f
        ),
        "`from_function`, documents in no order": lambda f: masks.from_function(
            in_no_order, L, format=f
        ),
        "`causal`, documents in no order": lambda f: masks.causal(
            masks.block_diagonal(mixed, format=f)
        ),
        "`union` of band and longformer, 2 L": lambda f: masks.union(a[f], b[f]),
        "`intersection` of these": lambda f: masks.intersection(a[f], b[f]),
        "`union` in CSR and CVS(8)": lambda f: masks.union(a[f], b[CVS(8) if f == CSR else CSR]),
    }


def timed(make: Callable[[], SparseArray], rounds: int) -> tuple[list[float], list[float], int]:
    builds, transposes = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        mask = make()
        built = time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(mask))
        builds.append(built - start)
        transposes.append(time.perf_counter() - built)
        count = mask.nnz
        del mask
    return builds, transposes, count


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    print(f"# {machine.cpu_model()}, load average {machine.load_at_start():.1f}", flush=True)
    print("| mask | format | stored | first call | best | transpose, best |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, make in cases(args.positions).items():
        for format in (CSR, CVS(8)):
            builds, transposes, count = timed(lambda m=make, f=format: m(f), args.rounds)
            numbers = " | ".join(f"{x:.2f}" for x in (builds[0], min(builds), min(transposes)))
            print(f"| {name} | {format} | {count:,} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
