"""value_and_grad of sum((A B)^2) in A's values and B: python -m benchmarks.bench_gradient"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine
from benchmarks.bench_sddmm import dots
from benchmarks.peers import gradient as peers
from sgap_jax import Problem, SparseArray, choose_schedule, spmm

N = (32, 128)


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1))
def gradient(values, B, A):
    return jnp.sum(spmm(A.with_values(values), B) ** 2)


def checker(A, B):
    """Checks the value, 2 (A B) B^T at A's entries and A^T 2 (A B). The error bound counts the
    terms of both nested products."""
    A64, B64 = A.astype(np.float64), B.astype(np.float64)
    twice, size = 2 * (A64 @ B64), 2 * (abs(A64) @ np.abs(B64))
    row_terms = int(np.diff(A.indptr).max(initial=0))
    column_terms = int(np.bincount(A.indices, minlength=1).max())
    wanted = (
        (np.sum(twice**2) / 4, twice.size, np.sum(size**2) / 4),
        (dots(A, twice, B64), B.shape[1], dots(A, size, np.abs(B64))),
        (A64.T @ twice, column_terms, abs(A64).T @ size),
    )

    def wrong(result):
        value, in_A, in_B = result
        found = (np.asarray(value), harness.sampled(A, in_A), in_B)
        return max(
            harness.excess(x, np.asarray(expected), terms + row_terms, magnitude)
            for x, (expected, terms, magnitude) in zip(found, wanted, strict=True)
        )

    return wrong


def cases(A, n: int):
    (m, k), B = A.shape, harness.dense(A.shape[1], n)
    sparse, dense = SparseArray.from_scipy(A), jnp.asarray(B)
    schedule = choose_schedule(Problem("spmm", shape=(m, k), nnz=A.nnz, n=n))

    def ours():
        value, (in_A, in_B) = jax.block_until_ready(gradient(sparse.values, dense, sparse))
        return value, in_A, in_B

    yield harness.Case(
        n=n,
        schedule=str(schedule),
        ours=ours,
        peers={name: functools.partial(f, A, B) for name, f in peers.PEERS.items()},
        wrong=checker(A, B),
        flops=6 * A.nnz * n,
        moved=3 * (8 * A.nnz + 4 * (m + 1) + 4 * n * (m + k)),
        bound=machine.probe().product_bound(A, n, products=3),
    )


def main(argv: list[str] | None = None) -> None:
    args = harness.arguments(__doc__, N).parse_args(argv)
    harness.run("gradient", cases, peers.GOAL, args, N)


if __name__ == "__main__":
    main()
