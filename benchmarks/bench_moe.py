"""A mixture of experts: python -m benchmarks.bench_moe [--quick] [--out FOLDER]

Given the experts and weights of each token: dispatch, two matrix products and relu in each expert,
and the weighted sum, forward and with the gradients of everything. Ours is `select.route`, `sddmm`
and `spmm`; the peers are a loop over the experts that masks tokens, and `jax.lax.ragged_dot` over
tokens sorted by expert.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine
from sgap_jax import sddmm, select, spmm

# (tokens, experts, experts of a token, features, hidden features of an expert)
SIZES = [(2048, 8, 2, 256, 512), (2048, 64, 2, 256, 512)]


def ours(x, weights, W1, W2, chosen):
    experts, hidden, features = W1.shape
    routing = select.route(chosen, experts)
    h = sddmm(routing.topology(hidden), routing.gather(x), W1.reshape(-1, features))
    y = spmm(h.with_values(jax.nn.relu(h.values)), W2.reshape(-1, features))
    return routing.combine(y, weights)


def masked_loop(x, weights, W1, W2, chosen):
    out = jnp.zeros_like(x)
    for e in range(W1.shape[0]):
        own = jnp.sum(jnp.where(chosen == e, weights, 0), axis=1, keepdims=True)
        out += own * (jax.nn.relu(x @ W1[e].T) @ W2[e])
    return out


def ragged(x, weights, W1, W2, chosen):
    choices, flat = chosen.shape[1], chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    lengths = jnp.bincount(flat, length=W1.shape[0]).astype(jnp.int32)
    rows = x[order // choices]
    h = jax.nn.relu(jax.lax.ragged_dot(rows, W1, lengths))
    y = jax.lax.ragged_dot(h, W2, lengths) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // choices].add(y)


def operands(tokens, experts, choices, features, hidden):
    x, scores = harness.dense(tokens, features), harness.dense(tokens, experts, seed=3)
    W1, W2 = (harness.dense(experts, hidden, features, seed=seed) / 16 for seed in (4, 5))
    weights, chosen = jax.lax.top_k(jax.nn.softmax(jnp.asarray(scores)), choices)
    return jnp.asarray(x), weights, jnp.asarray(W1), jnp.asarray(W2), chosen


def contenders(kind, *sizes):
    given = operands(*sizes)
    calls, right = {}, None
    for layer in (ours, masked_loop, ragged):
        run, own = layer, list(given)
        if layer is ragged:  # its weights lie as it reads them
            own[2] = jnp.array(own[2].swapaxes(1, 2))
        if kind == "forward and backward":

            def loss(*given, layer=layer):
                return jnp.sum(layer(*given) ** 2)

            run = jax.value_and_grad(loss, (0, 1, 2, 3))
        run = jax.jit(run)
        found = jax.block_until_ready(run(*own))
        if layer is ragged and kind == "forward and backward":
            value, (dx, dweights, dW1, dW2) = found
            found = value, (dx, dweights, dW1.swapaxes(1, 2), dW2)
        right = found if right is None else right
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
            # By the norm: a relu near 0 may turn a rounding into a step of its gradient.
            if np.linalg.norm(one - other) > 1e-3 * np.linalg.norm(other):
                raise RuntimeError(f"{layer.__name__} computes something else")
        calls[layer.__name__] = lambda run=run, own=own: jax.block_until_ready(run(*own))
    return calls


def forward(*sizes):
    return contenders("forward", *sizes)


def backward(*sizes):
    return contenders("forward and backward", *sizes)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size; writes no file")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    args = parser.parse_args(argv)
    rows, about_run = [], harness.stamp()
    for sizes in SIZES[:1] if args.quick else SIZES:
        for kind in ("forward", "forward and backward"):
            problem = "{} tokens, {} experts, {} of them each, {} -> {}".format(*sizes)
            calls = contenders(kind, *sizes)
            rows.append(harness.beside_ours(f"{problem}: {kind}", calls, args.quick) | about_run)
    if args.out or not args.quick:
        harness.write((args.out or machine.results_dir()) / "moe.csv", rows, whole=True)


if __name__ == "__main__":
    main()
