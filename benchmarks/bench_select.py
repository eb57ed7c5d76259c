"""Structures made inside jit: python -m benchmarks.bench_select [--quick] [--out FOLDER]

Selection (`select.top_k` in its structure, without the transpose) beside peers that give the same
columns in ascending order, and beside the maximum of each row, which reads the scores once. The
transposed structure beside XLA's stable argsort of the same columns. The gradient of sum((A B)^2)
in B beside the same with a structure that was passed in with its transpose.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine, timing
from sgap_jax import SparseArray, random, select, spmm
from sgap_jax.formats.structure import transpose_structure

# (rows, columns, k): tokens of a prompt, of a longer one, one decoded token, blocks of 64
SELECTIONS = [(2048, 2048, 128), (4096, 4096, 256), (1, 131_072, 2048), (256, 256, 16)]
TRANSPOSES = [(4096, 335_000), (4096, 1_000_000), (100_000, 1_000_000)]  # (rows and columns, nnz)
GRADIENTS = [(4096, 335_000, 64)]


def with_torch(scores, k):
    import torch

    torch.set_num_threads(machine.threads())
    x = torch.from_numpy(np.asarray(scores))
    return lambda: torch.topk(x, k, dim=1).indices.sort(dim=1).values


def with_numpy(scores, k):
    x = -np.asarray(scores)
    return lambda: np.sort(np.argpartition(x, k - 1, axis=1)[:, :k], axis=1)


def selection(m, n, k):
    scores = jnp.asarray(harness.dense(m, n))
    ours = jax.jit(lambda x: select.top_k(x, k).index_arrays[1][1])
    xla = jax.jit(lambda x: jnp.sort(jax.lax.top_k(x, k)[1], axis=1))
    read = jax.jit(lambda x: jnp.max(x, axis=1))
    contenders = {
        "ours": lambda: ours(scores).block_until_ready(),
        "jax_top_k_sort": lambda: xla(scores).block_until_ready(),
        "numpy_argpartition_sort": with_numpy(scores, k),
    }
    try:
        contenders["torch_topk_sort"] = with_torch(scores, k)
    except ImportError as reason:
        print(f"# torch_topk_sort: {reason}")
    taken = {
        name: np.take_along_axis(np.asarray(scores), np.asarray(call()).reshape(m, k), axis=1)
        for name, call in contenders.items()
    }
    for name, values in taken.items():  # of equal scores NumPy takes any
        if not np.array_equal(np.sort(values), np.sort(taken["jax_top_k_sort"])):
            raise RuntimeError(f"{name} selects others")
    return contenders | {"reading": lambda: read(scores).block_until_ready()}


def transposition(m, nnz):
    A = random((m, m), density=nnz / m / m, seed=1)
    offsets, columns = A.index_arrays[1]
    ours = jax.jit(lambda o, c: transpose_structure(o, c, m)[2])
    sort = jax.jit(lambda c: jnp.argsort(c, stable=True).astype(jnp.int32))
    np.testing.assert_array_equal(ours(offsets, columns), sort(columns))
    return {
        "ours": lambda: ours(offsets, columns).block_until_ready(),
        "jax_argsort": lambda: sort(columns).block_until_ready(),
    }


def gradient(m, nnz, n):
    A = random((m, m), density=nnz / m / m, seed=1)
    B = jnp.asarray(harness.dense(m, n))

    def loss(B, A):
        return jnp.sum(spmm(A, B) ** 2)

    def of_made(B, values, offsets, columns):
        return loss(B, SparseArray.from_arrays(values, offsets, columns, shape=A.shape))

    made, passed = jax.jit(jax.grad(of_made)), jax.jit(jax.grad(loss))
    arrays = (A.values, *A.index_arrays[1])
    np.testing.assert_allclose(made(B, *arrays), passed(B, A), rtol=1e-5)
    return {
        "ours": lambda: made(B, *arrays).block_until_ready(),
        "passed_in": lambda: passed(B, A).block_until_ready(),
    }


KINDS = {
    "top_k": (selection, SELECTIONS, "{} x {}, k = {}"),
    "transpose": (transposition, TRANSPOSES, "{0} x {0}, {1} entries"),
    "gradient": (gradient, GRADIENTS, "{0} x {0}, {1} entries, n = {2}"),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size of each; writes no file")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    args = parser.parse_args(argv)
    rows, about_run = [], harness.stamp()
    for kind, (build, sizes, text) in KINDS.items():
        for size in sizes[:1] if args.quick else sizes:
            found = timing.measure(build(*size), 3 if args.quick else timing.ROUNDS)
            ours = found.pop("ours").seconds
            row = {"problem": f"{kind}: {text.format(*size)}", "us": 1e6 * ours}
            row |= {f"x_{name}": x.seconds / ours for name, x in found.items()}
            ratios = ", ".join(f"{name} {x.seconds / ours:.2f}" for name, x in found.items())
            print(f"{row['problem']}: {row['us']:.0f} us | {ratios}", flush=True)
            rows.append({"n": "", "schedule": ""} | row | about_run)
    if args.out or not args.quick:
        harness.write((args.out or machine.results_dir()) / "select.csv", rows, whole=True)


if __name__ == "__main__":
    main()
