"""Softmax over the stored entries of each row: python -m benchmarks.bench_softmax"""

import functools

import jax
import numpy as np

from benchmarks import harness, machine
from benchmarks.peers import softmax as peers
from sgap_jax import Problem, SparseArray, choose_schedule, sparse_softmax

softmax = jax.jit(lambda A: sparse_softmax(A).values)


def checker(A):
    lengths = np.diff(A.indptr)
    starts, lengths = A.indptr[:-1][lengths > 0], lengths[lengths > 0]
    values = A.data.astype(np.float64)
    exponentials = np.exp(values - np.repeat(np.maximum.reduceat(values, starts), lengths))
    expected = exponentials / np.repeat(np.add.reduceat(exponentials, starts), lengths)
    terms = np.repeat(lengths, lengths)
    return lambda result: harness.excess(harness.sampled(A, result), expected, terms, expected)


def cases(A, n: int):
    sparse, m = SparseArray.from_scipy(A), A.shape[0]
    schedule = choose_schedule(Problem("sparse_softmax", shape=A.shape, nnz=A.nnz))
    moved = 8 * A.nnz + 4 * (m + 1)  # values in, probabilities out, offsets
    yield harness.Case(
        n=n,
        schedule=str(schedule),
        ours=lambda: softmax(sparse).block_until_ready(),
        peers={name: functools.partial(f, A) for name, f in peers.PEERS.items()},
        wrong=checker(A),
        flops=4 * A.nnz,  # maximum, subtraction, sum, division; exp counted as none
        moved=moved,
        bound=machine.probe().bound(4 * A.nnz, moved),
    )


def main(argv: list[str] | None = None) -> None:
    args = harness.arguments(__doc__).parse_args(argv)
    harness.run("softmax", cases, peers.GOAL, args)


if __name__ == "__main__":
    main()
