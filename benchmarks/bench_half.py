"""16-bit floats beside float32: python -m benchmarks.bench_half [--ops OP ...] [--quick]

For each operation, problem and width the time in float32 and, of bfloat16 and float16, their time
over it: 1 is as fast, below 1 faster. Every operand has the type.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp

from benchmarks import harness, machine, problems, timing
from benchmarks.peers import attention as operands
from sgap_jax import CVS, SparseArray, gspmm, row_sum, sddmm, sparse_attention, sparse_softmax, spmm

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
MATRICES = ("uniform_10k_1pct", "weights_2048x1024_90pct", "rmat_131k_1m")
VECTORS = {2: "weights_2048x1024_90pct_v2", 8: "weights_2048x1024_90pct_v8"}
ATTENTION = ("attention_2048_90pct",)
WIDTHS = (32, 128, 256)


def dense(rows, n, dtype):
    return jnp.asarray(harness.dense(rows, n), dtype)


def of_columns(op):
    return lambda A, n, dtype: (op, A, dense(A.shape[1], n, dtype))


def transposed(A, n, dtype):
    return lambda A, X: spmm(A.T, X), A, dense(A.shape[0], n, dtype)


def dots(A, d, dtype):
    return sddmm, A, dense(A.shape[0], d, dtype), dense(A.shape[1], d, dtype)


def forward(A, heads, dtype):
    x = (jnp.asarray(x, dtype) for x in operands.operands(A.shape[0])[:3])
    return lambda A, *x: sparse_attention(*x, A), A, *x


def backward(A, heads, dtype):
    def loss(*x):
        return jnp.sum(sparse_attention(*x[:3], x[4]).astype(jnp.float32) * x[3])

    x = (jnp.asarray(x, dtype) for x in operands.operands(A.shape[0]))
    return lambda A, *x: jax.grad(loss, (0, 1, 2))(*x, A), A, *x


OPS = {  # op -> (its call, problems, widths)
    "spmm": (of_columns(spmm), MATRICES, (1, 4, *WIDTHS)),
    "spmm_transposed": (transposed, MATRICES, (1, 4, *WIDTHS)),
    "sddmm": (dots, MATRICES, WIDTHS),
    "gspmm_max": (of_columns(lambda A, X: gspmm(A, X, reduce="max")), MATRICES, WIDTHS),
    "softmax": (lambda A, n, dtype: (lambda A: sparse_softmax(A).values, A), MATRICES, (1,)),
    "row_sum": (lambda A, n, dtype: (row_sum, A), MATRICES, (1,)),
    "attention": (forward, ATTENTION, (operands.WIDTH,)),
    "attention_backward": (backward, ATTENTION, (operands.WIDTH,)),
}
IN_VECTORS = ("spmm", "spmm_transposed", "sddmm", "softmax", "row_sum")


def cases(names: list[str], ops: list[str]):
    """(op, problem, V, width, its call)"""
    for op in ops:
        call, found, widths = OPS[op]
        lengths = (0, 8) if found is ATTENTION else (0,)
        chosen = [(name, V) for name in found for V in lengths]
        if op in IN_VECTORS:
            chosen += [(name, V) for V, name in VECTORS.items()]
        for name, V in chosen:
            if not names or name in names:
                for n in widths:
                    yield op, name, V, n, call


def contenders(call, A, V: int, n: int):
    sparse = SparseArray.from_scipy(A, **({"format": CVS(V)} if V else {}))
    found = {}
    for dtype in DTYPES:
        f, *x = call(sparse.astype(dtype), n, dtype)
        run = jax.jit(f)
        jax.block_until_ready(run(*x))
        found[jnp.dtype(dtype).name] = lambda run=run, x=x: jax.block_until_ready(run(*x))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--problems", nargs="+", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="few rounds; writes no file")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    args = parser.parse_args(argv)
    rows, built, about_run = [], {}, harness.stamp()
    for op, name, V, n, call in cases(args.problems, args.ops):
        if name not in built:
            built = {name: problems.select(names=[name])[0].build()}
        found = timing.measure(contenders(call, built[name], V, n), 3 if args.quick else 5)
        seconds = found.pop("float32").seconds
        row = {"problem": f"{op}: {name}", "n": n, "schedule": f"CVS({V})" if V else "CSR"}
        row |= {"us": 1e6 * seconds} | {f"x_{k}": x.seconds / seconds for k, x in found.items()}
        ratios = ", ".join(f"{k} {x.seconds / seconds:.2f}" for k, x in found.items())
        print(f"{op} {name} {row['schedule']} n={n}: {row['us']:.0f} us | {ratios}", flush=True)
        rows.append(row | about_run)
    if args.out or not args.quick:
        harness.write((args.out or machine.results_dir()) / "half.csv", rows, whole=False)


if __name__ == "__main__":
    main()
