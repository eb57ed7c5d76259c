"""Messages x * a, reduced by maximum and by mean: python -m benchmarks.bench_messages

Graphs only, unless problems are named.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine
from benchmarks.peers import messages as peers
from sgap_jax import Problem, SparseArray, choose_schedule, gspmm

N = (32, 128)
REDUCTIONS = ("max", "mean")
CHECKED_COLUMNS = 8  # columns per check: nnz x n float64 messages would be large


@functools.partial(jax.jit, static_argnames="reduce")
def passed(A, X, reduce):
    return gspmm(A, X, reduce=reduce)


def checker(A, X, reduce: str):
    lengths = np.diff(A.indptr)
    starts = A.indptr[:-1][lengths > 0]
    expected, size = np.zeros((A.shape[0], X.shape[1])), np.zeros((A.shape[0], X.shape[1]))
    combine = np.maximum if reduce == "max" else np.add
    terms = np.ones_like(lengths) if reduce == "max" else np.maximum(lengths, 1)
    for first in range(0, X.shape[1], CHECKED_COLUMNS):
        part = slice(first, first + CHECKED_COLUMNS)
        messages = A.data[:, None].astype(np.float64) * X[A.indices, part]
        expected[lengths > 0, part] = combine.reduceat(messages, starts, axis=0)
        size[lengths > 0, part] = combine.reduceat(np.abs(messages), starts, axis=0)
    divisor = 1 if reduce == "max" else terms[:, None]
    return lambda result: harness.excess(result, expected / divisor, terms[:, None], size / divisor)


def cases(reduce: str, A, n: int):
    (m, k), X = A.shape, harness.dense(A.shape[1], n)
    sparse, dense = SparseArray.from_scipy(A), jnp.asarray(X)
    op = "gspmm" if reduce == "max" else "spmm"
    yield harness.Case(
        n=n,
        schedule=str(choose_schedule(Problem(op, shape=(m, k), nnz=A.nnz, n=n))),
        ours=lambda: passed(sparse, dense, reduce).block_until_ready(),
        peers={name: functools.partial(f, A, X, reduce) for name, f in peers.PEERS.items()},
        wrong=checker(A, X, reduce),
        flops=2 * A.nnz * n,
        moved=8 * A.nnz + 4 * (m + 1) + 4 * n * (m + k),
        bound=machine.probe().product_bound(A, n),
    )


def main(argv: list[str] | None = None) -> None:
    args = harness.arguments(__doc__, N).parse_args(argv)
    for reduce in REDUCTIONS:
        make = functools.partial(cases, reduce)
        harness.run(f"messages_{reduce}", make, peers.GOAL, args, N, tag="graphs")


if __name__ == "__main__":
    main()
