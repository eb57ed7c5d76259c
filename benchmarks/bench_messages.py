"""Messages x * a, reduced by maximum and by mean, and vectors of edges:
python -m benchmarks.bench_messages

Graphs only, unless problems are named.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine
from benchmarks.peers import common, edges
from benchmarks.peers import messages as peers
from sgap_jax import (
    Problem,
    SparseArray,
    aggregate,
    choose_schedule,
    gsddmm,
    gspmm,
    sparse_softmax,
)

N = (32, 128)
REDUCTIONS = ("max", "mean")
HEADS = 8
MOST_MESSAGES = 1 << 26  # numbers in the vectors of all edges
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


def edge_cases(A, n: int):
    """Vectors of edges [nnz, n] against the same with gather and jax.ops.segment_*, and against the
    libraries of graph networks."""
    if A.nnz * n > MOST_MESSAGES:
        return
    m, k = A.shape
    sparse, X, Y = SparseArray.from_scipy(A), harness.dense(k, n), harness.dense(m, n, seed=3)
    V, logits = harness.dense(A.nnz, n, seed=4), harness.dense(A.nnz, HEADS, seed=5)
    messages = lambda V, X, A: gspmm(A, X, values=V)  # noqa: E731
    every = {
        "sum": (lambda V, _, A: aggregate(A, V), V, X),
        "max": (lambda V, _, A: aggregate(A, V, "max"), V, X),
        "u_mul_e": (messages, V, X),
        "u_mul_e, gradients": (edges.loss(messages), V, X),
        "u_add_v": (lambda Y, X, A: gsddmm(A, Y, X, op="add", reduce=None), Y, X),
        f"softmax of {HEADS}": (lambda V, _, A: sparse_softmax(A, values=V), logits, X),
    }
    for name, (ours, first, second) in every.items():
        operands = jnp.asarray(first), jnp.asarray(second), sparse
        expected = [
            np.asarray(x, np.float64)
            for x in jax.tree.leaves(edges.with_jax_segments(A, name, first, second)())
        ]
        bytes_moved, gathered, flops = edge_work(A, name, second.shape[1])
        yield harness.Case(
            n=second.shape[1] if first.shape[1] != HEADS else HEADS,
            schedule=name,
            ours=common.ready(jax.jit(ours), *operands),
            peers={
                of: functools.partial(plan, A, name, first, second)
                for of, plan in edges.PEERS.items()
            },
            wrong=functools.partial(error, expected=expected),
            flops=flops,
            moved=bytes_moved,
            bound=machine.probe().bound(flops, bytes_moved, gathered, k * machine.TILE_BYTES),
        )


def edge_work(A, name: str, n: int) -> tuple[int, int, int]:
    """(bytes of operands and results, bytes of gathered rows, flops) of an operation on vectors of
    edges; indices are counted, temporaries not."""
    (m, k), nnz = A.shape, A.nnz
    edges, index = 4 * nnz * n, 4 * (nnz + m + 1)
    if name.startswith("softmax"):
        return 8 * nnz * HEADS, 0, 10 * nnz * HEADS
    if name in ("sum", "max"):
        return edges + 4 * m * n + index, 0, nnz * n
    if name == "u_add_v":
        return edges + 4 * (m + k) * n + index, edges, nnz * n
    # Read by the sum and once more by the gradient of x, and the gradient of the edges written.
    passes = 3 if name.endswith("gradients") else 1
    return passes * (edges + 4 * (m + k) * n + index), passes * edges, passes * 2 * nnz * n


def error(result, expected) -> float:
    """Largest difference over what two orders of a float32 sum may differ by."""
    found = zip(jax.tree.leaves(result), expected, strict=True)
    return max(
        float(
            np.max(np.abs(np.asarray(x) - y), initial=0) / (1e-4 * np.max(np.abs(y), initial=1e-30))
        )
        for x, y in found
    )


def main(argv: list[str] | None = None) -> None:
    args = harness.arguments(__doc__, N).parse_args(argv)
    for reduce in REDUCTIONS:
        make = functools.partial(cases, reduce)
        harness.run(f"messages_{reduce}", make, peers.GOAL, args, N, tag="graphs")
    harness.run("messages_edges", edge_cases, edges.GOAL, args, (64,), tag="graphs")


if __name__ == "__main__":
    main()
