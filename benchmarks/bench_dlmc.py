"""Products, sampled products and softmax of column vectors: python -m benchmarks.bench_dlmc

    [--op spmm sddmm softmax] [--problems NAME ...] [--n N]

Patterns of pruned networks (DLMC); each entry of a pattern is a vector of V rows, as in section 7.1
of the vectorSparse paper. The bound of the products counts only multiply-adds, at the rate of the
machine's sgemm.
"""

import argparse
import functools

import jax.numpy as jnp
import numpy as np

from benchmarks import bench_sddmm, bench_softmax, bench_spmm, harness, machine, problems
from benchmarks.peers import dlmc, dlmc_sddmm, dlmc_softmax
from sgap_jax import CVS, Problem, SparseArray, choose_schedule

N = (32, 64, 128, 256)


def vector_length(A) -> int:
    """The longest of the measured lengths for which the rows of each vector store the same
    columns."""
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


def encoded(A, length: int):
    """A in CVS(length), and a function from an array of its values to an array of A's entries."""
    places = A.copy()
    places.data = np.arange(A.nnz, dtype=np.float64)
    places = np.asarray(SparseArray.from_scipy(places, format=CVS(length)).values).reshape(-1)
    places = places.astype(np.int64)  # float32 without x64: exact up to 2^24
    assert np.array_equal(np.sort(places), np.arange(A.nnz))

    def entries(values):
        values = np.asarray(values)
        if values.shape != (A.nnz // length, length):
            return values
        result = np.empty(A.nnz, values.dtype)
        result[places] = values.reshape(-1)
        return result

    return SparseArray.from_scipy(A, format=CVS(length)), entries


def label(op: str, A, length: int, n: int = 1) -> str:
    format = str(CVS(length))
    problem = Problem(op, shape=A.shape, nnz=A.nnz, n=n, format=format)
    return f"{choose_schedule(problem)}, {format}"


def fma_bound(flops: float) -> tuple[float, str]:
    return flops / (machine.probe().fma_gflops * 1e9), "FMA"


# The cases of each operation; no case for a matrix without vectors.


def spmm_cases(A, n: int):
    if (length := vector_length(A)) == 1:
        return
    (m, k), B = A.shape, harness.dense(A.shape[1], n)
    ours, dense = SparseArray.from_scipy(A, format=CVS(length)), jnp.asarray(B)
    yield harness.Case(
        n=n,
        schedule=label("spmm", A, length, n),
        ours=lambda: bench_spmm.product(ours, dense).block_until_ready(),
        peers={name: functools.partial(f, A, B) for name, f in dlmc.PEERS.items()},
        wrong=bench_spmm.checker(A, B),
        flops=2 * A.nnz * n,
        moved=4 * A.nnz + 4 * A.nnz // length + 4 * (m // length + 1) + 4 * n * (m + k),
        bound=fma_bound(2 * A.nnz * n),
    )


def sddmm_cases(A, d: int):
    if (length := vector_length(A)) == 1:
        return
    m, k = A.shape
    X, Y = harness.dense(m, d), harness.dense(k, d, seed=3)
    ours, entries = encoded(A, length)
    operands, wrong = (ours, jnp.asarray(X), jnp.asarray(Y)), bench_sddmm.checker(A, X, Y)
    yield harness.Case(
        n=d,
        schedule=label("sddmm", A, length, d),
        ours=lambda: bench_sddmm.sampled_product(*operands).block_until_ready(),
        peers={name: functools.partial(f, A, X, Y) for name, f in dlmc_sddmm.PEERS.items()},
        wrong=lambda result: wrong(entries(result)),
        flops=2 * A.nnz * d,
        moved=4 * A.nnz + 4 * A.nnz // length + 4 * (m // length + 1) + 4 * d * (m + k),
        bound=fma_bound(2 * A.nnz * d),
    )


def softmax_cases(A, n: int):
    if (length := vector_length(A)) == 1:
        return
    ours, entries = encoded(A, length)
    wrong = bench_softmax.checker(A)
    moved = 8 * A.nnz + 4 * (A.shape[0] // length + 1)  # values in, probabilities out, offsets
    yield harness.Case(
        n=n,
        schedule=label("sparse_softmax", A, length),
        ours=lambda: bench_softmax.softmax(ours).block_until_ready(),
        peers={name: functools.partial(f, A) for name, f in dlmc_softmax.PEERS.items()},
        wrong=lambda result: wrong(entries(result)),
        flops=4 * A.nnz,  # the same count as in bench_softmax
        moved=moved,
        bound=machine.probe().bound(4 * A.nnz, moved),
    )


# Operation -> name of the results, cases, peers that count, whether it has dense columns.
OPS = {
    "spmm": ("dlmc", spmm_cases, dlmc.GOAL, True),
    "sddmm": ("dlmc_sddmm", sddmm_cases, dlmc_sddmm.GOAL, True),
    "softmax": ("dlmc_softmax", softmax_cases, dlmc_softmax.GOAL, False),
}


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments(__doc__, N)
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS), help="default: all")
    args = parser.parse_args(argv)
    if args.quick and not args.tag:
        args.tag = "vectors_quick"
    alone = argparse.Namespace(**{name: x for name, x in vars(args).items() if name != "n"})
    for op in args.op:
        name, cases, goal, wide = OPS[op]
        widths = N if wide else (1,)
        harness.run(name, cases, goal, args if wide else alone, widths, tag="vectors")


if __name__ == "__main__":
    main()
