"""Structures made inside jit: python -m benchmarks.bench_select [--quick] [--out FOLDER]

Selection (`select.top_k` in its structure, without the transpose) beside peers that give the same
columns in ascending order, and beside the maximum of each row, which reads the scores once, at the
bandwidth of the memory that holds them. The transposed structure beside XLA's
stable argsort of the same columns. The scores from a threshold on, and the entries of a dense
matrix, beside what gives the same in JAX (`nonzero`, `BCOO.fromdense`), both with a capacity inside
`jit`. The gradient of sum((A B)^2) in B beside the same with a
structure that was passed in with its transpose. The selection of causal scores q k^T in tiles, and
its gradient, beside selections of the same scores held as a whole; the nucleus and the threshold in
tiles beside top_k of that product. Heads with a pattern each, in one call, beside the same heads
that share one; values are each head's own in both, as the weights of attention are.
"""

import argparse
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse as jsparse

from benchmarks import harness, machine, timing
from sgap_jax import SparseArray, random, sddmm, select, sparse_attention, spmm
from sgap_jax.formats.structure import transpose_structure

# (rows, columns, k): tokens of a prompt, of a longer one, one decoded token, blocks of 64
SELECTIONS = [(2048, 2048, 128), (4096, 4096, 256), (1, 131_072, 2048), (256, 256, 16)]
SELECTIONS += [(4096, 1024, 16), (1024, 16_384, 256), (1024, 16_384, 2048), (128, 131_072, 2048)]
CONDITIONS = [(4096, 4096, 16), (1024, 16_384, 64)]  # (rows, columns, of which one is stored)
TRANSPOSES = [(4096, 335_000), (4096, 1_000_000), (100_000, 1_000_000)]  # (rows and columns, nnz)
GRADIENTS = [(4096, 335_000, 64)]
PATTERNS = [(8, 2048, 64, 128), (8, 4096, 64, 256)]  # (heads, tokens, features, k)
PRODUCTS = [(4096, 64, 256), (16_384, 64, 256)]  # (tokens, features, k)


def with_torch(scores, k):
    import torch

    torch.set_num_threads(machine.threads())
    x = torch.from_numpy(np.asarray(scores))
    return lambda: torch.topk(x, k, dim=1).indices.sort(dim=1).values


def with_numpy(scores, k):
    x = -np.asarray(scores)
    return lambda: np.sort(np.argpartition(x, k - 1, axis=1)[:, :k], axis=1)


def selection(m, n, k, zeros=False):
    scores = jnp.asarray(harness.dense(m, n))
    if zeros:  # 3% are not, as behind a ReLU: the k-th greatest is one of many equal ones
        scores = jnp.maximum(scores - np.quantile(scores, 0.97), 0)
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


def condition(m, n, each, dense=False):
    """The greatest in `each` scores, by a threshold or as what is not zero in a dense matrix."""
    scores = jnp.asarray(harness.dense(m, n))
    at = float(np.quantile(np.asarray(scores[:64]), 1 - 1 / each))
    nse = m * n // each + m * n // (8 * each)
    if dense:
        scores = jnp.where(scores >= at, scores, 0)
        ours = jax.jit(lambda x: SparseArray.from_dense(x, nse=nse).values)
        xla = jax.jit(lambda x: jsparse.BCOO.fromdense(x, nse=nse).data)
    else:
        ours = jax.jit(lambda x: select.threshold(x, at, nse=nse).values)
        xla = jax.jit(lambda x: x[jnp.nonzero(x >= at, size=nse, fill_value=0)])
    read = jax.jit(lambda x: jnp.max(x, axis=1))
    stored = int(jnp.sum(scores >= at))
    np.testing.assert_array_equal(ours(scores)[:stored], xla(scores)[:stored])
    calls = {"ours": ours, "jax": xla, "reading": read}
    return {name: lambda f=f: f(scores).block_until_ready() for name, f in calls.items()}


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
    np.testing.assert_allclose(made(B, *arrays), passed(B, A), rtol=1e-5, atol=1e-3)
    return {
        "ours": lambda: made(B, *arrays).block_until_ready(),
        "passed_in": lambda: passed(B, A).block_until_ready(),
    }


def product(m, d, k, differentiate=False):
    q, keys = jnp.asarray(harness.dense(m, d)), jnp.asarray(harness.dense(m + 1, d)[1:])

    def in_tiles(q, keys):
        return select.top_k((q, keys), k, causal=True).values

    def of_function(q, keys):
        scores = lambda rows, columns: q[rows] @ keys[columns].T  # noqa: E731
        return select.top_k(scores, k, causal=True, shape=(m, m)).values

    def whole(q, keys):
        return select.top_k(q @ keys.T, k, causal=True).values

    def xla(q, keys):
        scores = jnp.where(jnp.tril(jnp.ones((m, m), bool)), q @ keys.T, -jnp.inf)
        columns = jnp.sort(jax.lax.top_k(scores, k)[1], axis=1)
        values = jnp.take_along_axis(scores, columns, axis=1)
        return jnp.where(values > -jnp.inf, values, 0)

    found = {"ours": in_tiles, "ours_function": of_function, "ours_whole": whole, "jax_top_k": xla}
    if m > 4096:  # the scores as a whole are 1 GiB, and XLA's selection takes a minute
        found = {"ours": in_tiles, "ours_function": of_function}
    if differentiate:
        loss = {name: lambda *x, f=f: jnp.sum(f(*x) ** 2) for name, f in found.items()}
        found = {name: jax.grad(f, (0, 1)) for name, f in loss.items()}
    compiled = {name: jax.jit(f) for name, f in found.items()}
    sums = {name: float(jnp.sum(jnp.abs(f(q, keys)[0]))) for name, f in compiled.items()}
    np.testing.assert_allclose(list(sums.values()), sums["ours"], rtol=1e-3)
    return {name: lambda f=f: jax.block_until_ready(f(q, keys)) for name, f in compiled.items()}


def own_patterns(of, heads, tokens, d, k):
    make = lambda seed: jnp.asarray(harness.dense(heads * tokens + seed, d)[seed:])  # noqa: E731
    q, keys, v = (make(seed).reshape(heads, tokens, d) for seed in range(3))
    pick = jax.jit(lambda q, k_: select.top_k((q, k_), k, causal=True))
    every = jax.jit(jax.vmap(pick))(q, keys)
    first = jax.tree.map(lambda x: x[0], every)

    def attention(q, keys, v, A):
        return sparse_attention(*(jnp.moveaxis(x, 0, 1)[None] for x in (q, keys, v)), A)

    def attention_gradient(*operands):
        return jax.grad(lambda *x: jnp.sum(attention(*x) ** 2), (0, 1, 2))(*operands)

    def mapped(function):
        def of_heads(q, keys, v, A):
            if A.index_arrays[1][1].ndim > 1:
                return jax.vmap(function)(q, keys, v, A)
            own_values = lambda *x: function(*x[:-1], A.with_values(x[-1]))  # noqa: E731
            return jax.vmap(own_values)(q, keys, v, every.values)

        return of_heads

    functions = {
        "attention": attention,
        "attention_gradient": attention_gradient,
        "spmm": mapped(lambda q, keys, v, A: spmm(A, v)),
        "sddmm": mapped(lambda q, keys, v, A: sddmm(A, q, keys).values),
    }
    compiled = jax.jit(functions[of])
    alike = jax.vmap(lambda values: first.with_values(values))(every.values)
    left, right = (jax.tree.leaves(compiled(q, keys, v, A)) for A in (alike, first))
    for x, y in zip(left, right, strict=True):
        np.testing.assert_allclose(x, jnp.broadcast_to(y, x.shape), rtol=1e-3, atol=1e-3)
    calls = {"ours": every, "shared": first}
    return {
        name: lambda A=A: jax.block_until_ready(compiled(q, keys, v, A))
        for name, A in calls.items()
    }


def by_rule(m, d, k):
    q, keys = jnp.asarray(harness.dense(m, d)) / d**0.5, jnp.asarray(harness.dense(m + 1, d)[1:])
    top_p = jax.jit(lambda q, keys: select.top_p((q, keys), 0.5, most=k, causal=True).values)
    reached = jax.jit(
        lambda q, keys: select.threshold((q, keys), 1.0, nse=m * k, causal=True).values
    )
    top_k = jax.jit(lambda q, keys: select.top_k((q, keys), k, causal=True).values)
    names = {"ours": top_k, "ours_top_p": top_p, "ours_threshold": reached}
    return {name: lambda f=f: f(q, keys).block_until_ready() for name, f in names.items()}


KINDS = {
    "top_k": (selection, SELECTIONS, "{} x {}, k = {}"),
    "top_k_zeros": (partial(selection, zeros=True), SELECTIONS[:1], "{} x {}, k = {}"),
    "threshold": (condition, CONDITIONS, "{} x {}, one in {}"),
    "from_dense": (partial(condition, dense=True), CONDITIONS, "{} x {}, one in {}"),
    "transpose": (transposition, TRANSPOSES, "{0} x {0}, {1} entries"),
    "product": (product, PRODUCTS, "{0} x {0}, d = {1}, k = {2}"),
    "product_gradient": (
        partial(product, differentiate=True),
        PRODUCTS,
        "{0} x {0}, d = {1}, k = {2}",
    ),
    "rules": (by_rule, PRODUCTS[:1], "{0} x {0}, d = {1}, at most {2} each"),
    "gradient": (gradient, GRADIENTS, "{0} x {0}, {1} entries, n = {2}"),
}
for _name in ("attention", "attention_gradient", "spmm", "sddmm"):
    KINDS[f"own_patterns_{_name}"] = (
        partial(own_patterns, _name),
        PATTERNS,
        "{} heads, {} tokens, d = {}, k = {}",
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size of each; writes no file")
    parser.add_argument("--kind", choices=KINDS, help="this kind only")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    args = parser.parse_args(argv)
    rows, about_run = [], harness.stamp()
    for kind, (build, sizes, text) in KINDS.items():
        if args.kind not in (None, kind):
            continue
        for size in sizes[:1] if args.quick else sizes:
            found = timing.measure(build(*size), 3 if args.quick else timing.ROUNDS)
            ours = found.pop("ours").seconds
            row = {"problem": f"{kind}: {text.format(*size)}", "us": 1e6 * ours}
            row |= {f"x_{name}": x.seconds / ours for name, x in found.items()}
            ratios = ", ".join(f"{name} {x.seconds / ours:.2f}" for name, x in found.items())
            print(f"{row['problem']}: {row['us']:.0f} us | {ratios}", flush=True)
            rows.append({"n": "", "schedule": ""} | row | about_run)
    if args.out or not args.quick:  # a kind alone replaces its rows
        path = (args.out or machine.results_dir()) / "select.csv"
        harness.write(path, rows, whole=not args.kind)


if __name__ == "__main__":
    main()
