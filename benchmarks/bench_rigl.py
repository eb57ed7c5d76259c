"""Entries of a weight that move: python -m benchmarks.bench_rigl [--quick] [--out FOLDER]

A step of training (loss, gradients, Adam) of a perceptron whose weights are `nn.SparseLinear` that
`nn.rigl_step` has moved, beside the same step at the places of initialization, beside weights that
are dense and multiplied by a mask (as implementations of RigL by masks do), and beside a whole step
of RigL: the gradient in the dense weights, and `rigl_step` of each layer with Adam's moments. RigL
moves entries every 100 steps: then the share of that is a hundredth of `x_update`.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import harness, machine
from sgap_jax import BCSR, CSR, CVS, nn

# (examples of a batch, features in and out, hidden features, sparsity, format)
SIZES = [
    (128, 1024, 4096, 0.9, CSR),
    (128, 1024, 4096, 0.9, CVS(8)),
    (128, 1024, 4096, 0.9, BCSR(8, 8)),
]
FRACTION = 0.3


class Perceptron(nnx.Module):
    def __init__(self, features, hidden, sparsity, format):
        rngs, options = nnx.Rngs(0), dict(sparsity=sparsity, format=format)
        self.up = nn.SparseLinear(features, hidden, rngs=rngs, **options)
        self.down = nn.SparseLinear(hidden, features, rngs=rngs, **options)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def stored(layer):
    return layer.weight.with_values(jnp.ones_like(layer.values)).todense().T


class Masked(nnx.Module):
    """The same weights, dense: each product has as many terms as if nothing were pruned."""

    def __init__(self, model):
        self.up, self.down = model.up.to_dense(), model.down.to_dense()
        self.masks = nnx.Variable([stored(model.up), stored(model.down)])

    def __call__(self, x):
        up, down = self.masks.get_value()
        h = jax.nn.relu(x @ (self.up.kernel[...] * up) + self.up.bias[...])
        return h @ (self.down.kernel[...] * down) + self.down.bias[...]


def squares(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def update(model, optimizer, x, y):
    """A step of RigL."""
    scores = nn.dense_gradients(squares, model, x, y)
    for name in ("up", "down"):
        layer = getattr(model, name)
        nn.rigl_step(layer, scores[name,], FRACTION, model=model, optimizer=optimizer)
    return jnp.zeros(())


def step(model, optimizer, x, y):
    loss, gradient = nnx.value_and_grad(squares)(model, x, y)
    optimizer.update(model, gradient)
    return loss


def program(function, model, *operands):
    """(the compiled function of the state and operands, which returns the next state and the loss;
    the state)."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    @jax.jit
    def run(state, *operands):
        model, optimizer = nnx.merge(graph, state)
        loss = function(model, optimizer, *operands)
        return nnx.state((model, optimizer)), loss

    return run, state


def contenders(examples, features, hidden, sparsity, format):
    x, y = (jnp.asarray(harness.dense(examples, features, seed=seed)) for seed in (2, 3))
    model = Perceptron(features, hidden, sparsity, format)
    train, fixed = program(step, model)
    move, _ = program(update, model)
    state, _ = move(train(fixed, x, y)[0], x, y)  # with moments to move
    if jax.tree.structure(state) != jax.tree.structure(fixed):
        raise RuntimeError("a step of RigL changes the structure of the state")
    moved = nnx.clone(model)
    nnx.update((moved, nnx.Optimizer(moved, optax.adam(1e-3), wrt=nnx.Param)), state)
    masked, dense = program(step, Masked(moved))
    _, fresh = program(step, moved)  # moments of zero, as those of the masked one
    for _ in range(3):
        (fresh, ours), (dense, other) = train(fresh, x, y), masked(dense, x, y)
        np.testing.assert_allclose(ours, other, rtol=1e-3)
    calls = {
        "ours": (train, state),
        "fixed": (train, fixed),
        "masked_dense": (masked, dense),
        "update": (move, state),
    }
    return {
        name: lambda run=run, given=given: jax.block_until_ready(run(given, x, y))
        for name, (run, given) in calls.items()
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size; writes no file")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    args = parser.parse_args(argv)
    rows, about_run = [], harness.stamp()
    for sizes in SIZES[:1] if args.quick else SIZES:
        problem = "{} examples, {} -> {} features and back, sparsity {}, {}".format(*sizes)
        rows.append(harness.beside_ours(problem, contenders(*sizes), args.quick) | about_run)
    if args.out or not args.quick:
        harness.write((args.out or machine.results_dir()) / "rigl.csv", rows, whole=True)


if __name__ == "__main__":
    main()
