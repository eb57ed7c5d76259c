"""Matrix tiles of the CPU: python -m benchmarks.bench_octets [--quick] [--out FOLDER]

Products of generated weights [2048, 1024] in vectors of bfloat16, n = 256, and attention over
a band and random keys in vectors of 8: the default schedule, which is `OctetTile` where the
processor has a matrix unit. Beside it torch's dense product of bfloat16, or its SDPA with the mask
(the faster of a boolean and an added mask), and the same operation of ours in float32. `layers` is
spmm as models call it: eight such layers, [2048, 1024] and [1024, 2048] by turns, are one program,
and the time is that of a layer. A call of one product has the dispatch by JAX in it.
"""

import argparse
import functools
import operator
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine, timing
from benchmarks.problems import attention, pruned, vectors
from sgap_jax import CVS, SparseArray, sddmm, sparse_attention, spmm

M, K, N = 2048, 1024, 256
LENGTHS, SPARSITIES = (4, 8, 16, 32), (70, 80, 90, 95)
LAYERS = 8  # of one program
KEYS, WIDTH = 4096, 64


def both_dtypes(function: Callable, *operands) -> dict[str, Callable]:
    """The default schedule in bfloat16 and in float32."""
    run = jax.jit(function)
    found = {}
    for name, dtype in (("ours", jnp.bfloat16), ("float32", jnp.float32)):
        x = jax.tree.map(
            lambda a, to=dtype: a.astype(to) if a.dtype == jnp.float32 else a, operands
        )
        jax.block_until_ready(run(*x))
        found[name] = lambda x=x: jax.block_until_ready(run(*x))
    return found


def in_torch(*arrays):
    import torch

    return [torch.from_numpy(np.array(x, np.float32)).bfloat16() for x in arrays]


def products(length: int, percent: int) -> dict[str, dict[str, Callable]]:
    """{operation: contenders}"""
    matrices = [
        vectors(functools.partial(pruned, m // length, k, percent / 100), length)
        for m, k in ((M, K), (K, M))
    ]
    A, back = (
        SparseArray.from_scipy(layer.astype(np.float32), format=CVS(length)) for layer in matrices
    )
    B, C = (jnp.asarray(harness.dense(rows, N)) for rows in (K, M))
    dense, dense_back, b, c = in_torch(*(layer.toarray() for layer in matrices), B, C)

    def layers(times: Callable, x, *weights):
        for i in range(LAYERS):
            x = times(weights[i % 2], x)
        return x

    calls = {
        "spmm": (spmm, (A, B), lambda: dense @ b),
        "transposed": (lambda A, C: spmm(A, C, transpose=True), (A, C), lambda: dense.T @ c),
        "sddmm": (lambda A, C, B: sddmm(A, C, B).values, (A, C, B), lambda: c @ b.T),
        "layers": (
            lambda *operands: layers(spmm, *operands),
            (B, A, back),
            lambda: layers(operator.matmul, b, dense, dense_back),
        ),
    }
    return {
        op: both_dtypes(function, *operands) | {"torch": peer}
        for op, (function, operands, peer) in calls.items()
    }


def attentions(heads: int, keys: int = KEYS) -> dict[str, dict[str, Callable]]:
    """{operation: contenders}"""
    import torch

    mask = attention(keys, 0.9)
    pattern = SparseArray.from_scipy(mask.astype(np.float32), format=CVS(8))
    x = [jnp.asarray(harness.dense(1, keys, heads, WIDTH, seed=seed)) for seed in range(4)]
    q, k, v, cotangent = (t.transpose(1, 2).contiguous() for t in in_torch(*x))
    boolean = torch.from_numpy(mask.toarray() != 0)[None, None]
    added = torch.zeros(boolean.shape).masked_fill(~boolean, -torch.inf).bfloat16()
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def gradients(given):
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(sdpa(*inputs, given), inputs, cotangent)

    def loss(q, k, v, cotangent, pattern):
        out, pullback = jax.vjp(lambda *x: sparse_attention(*x, pattern), q, k, v)
        return pullback(cotangent)

    forward = both_dtypes(
        lambda q, k, v, _, pattern: sparse_attention(q, k, v, pattern), *x, pattern
    )
    both = both_dtypes(loss, *x, pattern)
    for name, given in (("torch", added), ("torch_boolean", boolean)):
        forward[name] = lambda given=given: sdpa(q, k, v, given)
        both[name] = lambda given=given: gradients(given)
    return {"attention": forward, "attention and gradients": both}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="V = 8, 90%%; writes no file")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    args = parser.parse_args(argv)
    cases = [
        (
            f"weights_{M}x{K}_{percent}pct_v{length}",
            f"CVS({length})",
            N,
            products,
            (length, percent),
        )
        for length in ((8,) if args.quick else LENGTHS)
        for percent in ((90,) if args.quick else SPARSITIES)
    ]
    cases += [
        (f"attention_{KEYS}_90pct, {heads} heads", "CVS(8)", WIDTH, attentions, (heads,))
        for heads in ((4,) if args.quick else (4, 8))
    ]
    rows, about_run = [], harness.stamp()
    for name, format, n, make, sizes in cases:
        for op, contenders in make(*sizes).items():
            found = timing.measure(contenders)
            ours = found.pop("ours").seconds
            times = LAYERS if op == "layers" else 1
            row = {"problem": f"{op}: {name}", "n": n, "schedule": format, "us": 1e6 * ours / times}
            row |= {f"x_{peer}": time.seconds / ours for peer, time in found.items()}
            ratios = ", ".join(f"{peer} {time.seconds / ours:.2f}x" for peer, time in found.items())
            print(f"{op} {name}: {row['us']:.0f} us | {ratios}", flush=True)
            rows.append(row | about_run)
    if args.out or not args.quick:
        harness.write((args.out or machine.results_dir()) / "octets.csv", rows, whole=False)


if __name__ == "__main__":
    main()
