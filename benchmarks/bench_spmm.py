"""C = A B: python -m benchmarks.bench_spmm [--problems NAME ...] [--n N ...] [--quick]

Ours is timed as users call it, jax.jit(lambda A, B: spmm(A, B)). Results above 16 MiB get a second
row, in which all contenders write into existing memory: by donation for ours, by `out=` for peers
that have it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine
from benchmarks.peers import spmm as peers
from sgap_jax import Problem, SparseArray, choose_schedule, spmm

N = (1, 4, 32, 64, 128, 256)
DONATE_BYTES = 16 << 20

product = jax.jit(lambda A, B: spmm(A, B))
into = jax.jit(lambda A, B, C: spmm(A, B), donate_argnums=2, keep_unused=True)


def donating(A, B, m: int, n: int):
    """A call that donates the memory of its last result to the next call."""
    last = [jnp.zeros((m, n), jnp.float32)]

    def call():
        last[0] = into(A, B, last[0])
        return last[0].block_until_ready()

    return call


def checker(A, B):
    expected = A.astype(np.float64) @ B.astype(np.float64)
    magnitude = abs(A).astype(np.float64) @ np.abs(B).astype(np.float64)
    terms = np.diff(A.indptr)[:, None]
    return lambda result: harness.excess(result, expected, terms, magnitude)


def cases(A, n: int):
    (m, k), B = A.shape, harness.dense(A.shape[1], n)
    ours, dense = SparseArray.from_scipy(A), jnp.asarray(B)
    schedule = choose_schedule(Problem("spmm", shape=(m, k), nnz=A.nnz, n=n))
    case = functools.partial(
        harness.Case,
        n=n,
        wrong=checker(A, B),
        flops=2 * A.nnz * n,
        moved=8 * A.nnz + 4 * (m + 1) + 4 * n * (m + k),
        bound=machine.probe().product_bound(A, n),
    )

    def plans(reuse: bool):
        return {name: functools.partial(f, A, B, reuse) for name, f in peers.PEERS.items()}

    call = lambda: product(ours, dense).block_until_ready()  # noqa: E731
    yield case(schedule=str(schedule), ours=call, peers=plans(False))
    if 4 * m * n > DONATE_BYTES:
        call, schedule = donating(ours, dense, m, n), f"{schedule}, donated"
        yield case(schedule=schedule, ours=call, peers=plans(True))


def main(argv: list[str] | None = None) -> None:
    args = harness.arguments(__doc__, N).parse_args(argv)
    harness.run("spmm", cases, peers.GOAL, args, N)


if __name__ == "__main__":
    main()
