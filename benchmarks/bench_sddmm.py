"""values = (X Y^T) at A's entries: python -m benchmarks.bench_sddmm [--n D ...] [--quick]"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine
from benchmarks.peers import sddmm as peers
from sgap_jax import Problem, SparseArray, choose_schedule, sddmm

N = (32, 64, 128, 256)

sampled_product = jax.jit(lambda A, X, Y: sddmm(A, X, Y).values)
ENTRIES_AT_ONCE = 1 << 16


def dots(A, X, Y) -> np.ndarray:
    """X[i] . Y[j] in float64 for each entry (i, j)."""
    return dots_at(np.repeat(np.arange(A.shape[0]), np.diff(A.indptr)), A.indices, X, Y)


def dots_at(rows, columns, X, Y) -> np.ndarray:
    """The same at given (row, column) pairs, in slices that bound the memory."""
    result, X, Y = np.empty(rows.size), X.astype(np.float64), Y.astype(np.float64)
    for start in range(0, rows.size, ENTRIES_AT_ONCE):
        part = slice(start, start + ENTRIES_AT_ONCE)
        np.einsum("pd,pd->p", X[rows[part]], Y[columns[part]], out=result[part])
    return result


def checker(A, X, Y):
    expected, magnitude = dots(A, X, Y), dots(A, np.abs(X), np.abs(Y))

    def wrong(result):
        values = harness.sampled(A, result)
        return harness.excess(values, expected, X.shape[1], magnitude)

    return wrong


def cases(A, d: int):
    m, k = A.shape
    X, Y = harness.dense(m, d), harness.dense(k, d, seed=3)
    operands = (SparseArray.from_scipy(A), jnp.asarray(X), jnp.asarray(Y))
    schedule = choose_schedule(Problem("sddmm", shape=(m, k), nnz=A.nnz, n=d))
    yield harness.Case(
        n=d,
        schedule=str(schedule),
        ours=lambda: sampled_product(*operands).block_until_ready(),
        peers={name: functools.partial(f, A, X, Y) for name, f in peers.PEERS.items()},
        wrong=checker(A, X, Y),
        flops=2 * A.nnz * d,
        moved=8 * A.nnz + 4 * (m + 1) + 4 * d * (m + k),
        bound=machine.probe().product_bound(A, d),
    )


def main(argv: list[str] | None = None) -> None:
    args = harness.arguments(__doc__, N).parse_args(argv)
    harness.run("sddmm", cases, peers.GOAL, args, N)


if __name__ == "__main__":
    main()
