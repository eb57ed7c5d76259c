"""C = A B for A of column vectors: python -m benchmarks.bench_dlmc [--problems NAME ...] [--n N]

Patterns of pruned networks (DLMC); each position of one is a vector of V rows, as in section 7.1 of
the vectorSparse paper. The bound is the machine's rate of multiply-adds alone: that of its sgemm.
"""

import functools

import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine, problems
from benchmarks.bench_spmm import checker, product
from benchmarks.peers import dlmc as peers
from sgap_jax import CVS, Problem, SparseArray, choose_schedule

N = (32, 64, 128, 256)


def vector_length(A) -> int:
    """The longest of the lengths measured such that the rows of each vector store equal columns."""
    lengths = np.diff(A.indptr)
    for length in sorted(problems.VECTOR_LENGTHS, reverse=True):
        if A.shape[0] % length:
            continue
        rows = lengths.reshape(-1, length)
        if A.nnz and (rows == rows[:, :1]).all() and same_columns(A, length):
            return length
    return 1


def same_columns(A, length: int) -> bool:
    first = A.indptr[:-1].reshape(-1, length)[:, :1]
    within = np.arange(A.nnz) - np.repeat(A.indptr[:-1], np.diff(A.indptr))
    expected = np.repeat(np.repeat(first[:, 0], length), np.diff(A.indptr)) + within
    return bool((A.indices == A.indices[expected]).all())


def cases(A, n: int):
    """Nothing for a matrix without vectors."""
    length = vector_length(A)
    if length == 1:
        return
    (m, k), B = A.shape, harness.dense(A.shape[1], n)
    format = CVS(length)
    ours, dense = SparseArray.from_scipy(A, format=format), jnp.asarray(B)
    problem = Problem("spmm", shape=(m, k), nnz=A.nnz, n=n, format=str(format))
    flops = 2 * A.nnz * n
    yield harness.Case(
        n=n,
        schedule=f"{choose_schedule(problem)}, {format}",
        ours=lambda: product(ours, dense).block_until_ready(),
        peers={name: functools.partial(f, A, B) for name, f in peers.PEERS.items()},
        wrong=checker(A, B),
        flops=flops,
        moved=4 * A.nnz + 4 * A.nnz // length + 4 * (m // length + 1) + 4 * n * (m + k),
        bound=(flops / (machine.probe().fma_gflops * 1e9), "FMA"),
    )


def main(argv: list[str] | None = None) -> None:
    args = harness.arguments(__doc__, N).parse_args(argv)
    if args.quick and not args.tag:
        args.tag = "vectors_quick"
    harness.run("dlmc", cases, peers.GOAL, args, N, tag="vectors")


if __name__ == "__main__":
    main()
