"""Attention with a sparse mask: python -m benchmarks.bench_attention [--problems NAME ...]

One sequence, 4 heads of 64 features (the column n), 8 x 1 vectors; the column schedule says
forward, or forward and backward. A band of 128 x 128 blocks is FlexAttention's best case, forward
only. The bound counts only multiply-adds at the machine's rate. Temporary memory goes to
attention_memory.csv: by XLA's analysis of the compiled program, which misses what the kernel
allocates and frees within a call (copies of K and V, sums for dK and dV, where it makes them); and
in columns *_peak by the growth of a process (attention_memory.py), which counts everything. The
latter takes a minute and is left out with --quick.
"""

import csv
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import attention_memory, harness, machine, problems
from benchmarks.peers import attention as peers
from benchmarks.peers.attention import HEADS, WIDTH, operands
from sgap_jax import sparse_attention

EXTRA = 64  # extra terms of the error bound, for exponentials and nested products


def exact(A, x) -> tuple[list, list]:
    """(O, dQ, dK, dV) in float64, head by head, and for each the magnitude of its summands."""
    q, k, v, cotangent = (np.asarray(a, np.float64)[0] for a in x)
    mask, scale = A.toarray() != 0, WIDTH**-0.5
    results = [np.zeros_like(q) for _ in range(4)]
    sizes = [np.zeros_like(q) for _ in range(4)]
    for h in range(HEADS):
        s = np.where(mask, scale * (q[:, h] @ k[:, h].T), -np.inf)
        p = np.exp(s - s.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        out = p @ v[:, h]
        delta = (cotangent[:, h] * out).sum(1, keepdims=True)
        dp = cotangent[:, h] @ v[:, h].T
        ds, size = scale * p * (dp - delta), scale * p * (abs(cotangent[:, h]) @ abs(v[:, h].T))
        found = (out, ds @ k[:, h], ds.T @ q[:, h], p.T @ cotangent[:, h])
        bounds = (p @ abs(v[:, h]), size @ abs(k[:, h]), size.T @ abs(q[:, h]))
        bounds = (*bounds, p.T @ abs(cotangent[:, h]))
        for target, value in zip((*results, *sizes), (*found, *bounds), strict=True):
            target[:, h] = value
    return results, sizes


def checker(A, x, expected, backward: bool):
    terms = int(np.diff(A.indptr).max(initial=0)) + EXTRA * WIDTH

    def wrong(result) -> float:
        found = result if backward else (result,)
        return max(
            harness.excess(np.asarray(got)[0], want, terms, size)
            for got, want, size in zip(found, *expected, strict=False)
        )

    return wrong


def cases(A, n: int):
    L, x = A.shape[0], operands(A.shape[0])
    mask, expected = peers.vectors(A), exact(A, x)
    # The two are timed in turns: the speed of a virtual machine changes from second to second.
    sparser = round(A.nnz / L**2, 2) == 0.05
    denser = peers.vectors(problems.attention(L, 0.9)) if sparser else None
    # The block mask is for FlexAttention, which has no backward pass.
    for backward in (False, True) if peers.block_radius(A) is None else (False,):
        ours = peers.step(lambda q, k, v, mask: sparse_attention(q, k, v, mask), backward)
        products = 7 if backward else 2  # the backward pass computes the scores again
        flops = 2 * products * HEADS * WIDTH * A.nnz
        beside = {} if denser is None else {"at_90pct": functools.partial(_ready, ours, x, denser)}
        for call in beside.values():
            call()
        yield harness.Case(
            n=WIDTH,
            schedule=f"{'forward and backward' if backward else 'forward'}, CVS({peers.V})",
            ours=functools.partial(_ready, ours, x, mask),
            peers={
                name: functools.partial(plan, A, x, backward) for name, plan in peers.PEERS.items()
            },
            wrong=checker(A, x, expected, backward),
            flops=flops,
            moved=4 * HEADS * L * WIDTH * (8 if backward else 4) + 4 * A.nnz // peers.V,
            beside=beside,
            bound=(flops / (machine.probe().fma_gflops * 1e9), "FMA"),
        )


def _ready(step, x, mask):
    return jax.block_until_ready(step(*x, mask))


def temporaries(problem: problems.BenchmarkProblem, peaks: bool) -> list[dict[str, object]]:
    """MB that each compiled step in JAX allocates beyond its arguments and results; with `peaks`
    also the growth of a process."""
    A = problem.build()
    x, rows = operands(A.shape[0]), []
    dense = jnp.asarray(A.toarray() != 0)[None, None]
    sparse = peers.vectors(A)
    ways = {
        "ours": (lambda *x: sparse_attention(*x), sparse),
        "unfused": (peers.unfused, sparse),
        "jax_nn": (peers.dot_product, dense),
    }
    for backward in (False, True):
        row: dict[str, object] = {"problem": problem.name, "backward": backward}
        for name, (attention, mask) in ways.items():
            compiled = peers.step(attention, backward).lower(*x, mask).compile()
            row[name] = compiled.memory_analysis().temp_size_in_bytes / 1e6
        rows.append(row)
    for way in attention_memory.WAYS if peaks else ():
        try:
            grown = attention_memory.measure(way, problem.name)
        except problems.Unavailable as reason:
            print(f"{problem.name}: {reason}", flush=True)
            grown = {False: "", True: ""}
        for row in rows:
            row[f"{way}_peak"] = grown[bool(row["backward"])]
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--memory", action="store_true", help="only the temporary memory")
    args = parser.parse_args(argv)
    args.tag = args.tag or ("attention_quick" if args.quick else "attention")
    rows = []
    for problem in problems.select(args.tag, args.problems):
        for row in temporaries(problem, peaks=args.memory or not args.quick):
            rows.append(row)
            print(row, flush=True)
    if args.out or not args.quick:
        folder = args.out or machine.results_dir()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "attention_memory.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if not args.memory:
        harness.run("attention", cases, peers.GOAL, args, tag="attention")


if __name__ == "__main__":
    main()
