"""Classifies the papers of a citation graph by their words and their citations.

Examples:
    python train.py                                # GCN on Cora, ten seeds
    python train.py --network gat --dataset citeseer
    python train.py --data mine.npz --run runs/mine --seeds 3
    python train.py --synthetic                    # needs no data
    python train.py --synthetic --network rgcn     # edges of several kinds
    python train.py --synthetic --network whole-gin    # classes of whole graphs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import citations
import jax
import jax.numpy as jnp
import numpy as np
import optax
from citations import Citations
from flax import nnx
from networks import GAT, GCN, GIN, RGCN, SAGE, GATv2, WholeGIN, WholeSAGE
from tqdm import tqdm

from sgap_jax.graphs import Relations


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the paper trains its network."""

    network: type[nnx.Module]
    learning_rate: float
    decayed: tuple[str, ...]  # layers with weight decay 5e-4
    epochs: int
    patience: int | None  # epochs without progress in validation; None: the last epoch counts


RECIPES = {
    "gcn": Recipe(GCN, 0.01, ("first",), 200, None),
    "gat": Recipe(GAT, 0.005, ("first", "second"), 1000, 100),
    "sage": Recipe(SAGE, 0.01, ("first",), 200, None),
    "gin": Recipe(GIN, 0.01, ("first",), 200, None),
    "gatv2": Recipe(GATv2, 0.005, ("first", "second"), 1000, 100),
    "rgcn": Recipe(RGCN, 0.01, ("first",), 200, None),
    "whole-gin": Recipe(WholeGIN, 0.01, (), 200, None),
    "whole-sage": Recipe(WholeSAGE, 0.01, (), 200, None),
}
MADE_UP = {  # of others citations.synthetic
    "rgcn": citations.relational,
    "whole-gin": citations.wired,
    "whole-sage": citations.wired,
}
CHUNK = 20  # epochs in one call


def optimizer_of(recipe: Recipe) -> optax.GradientTransformation:
    """Adam with L2 regularization that, as in the papers, is part of the loss (not AdamW)."""

    def decayed(params):
        def of(path, _):
            name = jax.tree_util.keystr(path)
            return "bias" not in name and any(f"'{layer}'" in name for layer in recipe.decayed)

        return jax.tree.map_with_path(of, params)

    decay = optax.add_decayed_weights(5e-4, mask=decayed)
    return optax.chain(decay, optax.adam(recipe.learning_rate))


def measure(logits: Any, labels: Any, nodes: Any) -> tuple[Any, Any]:
    """Mean cross-entropy and accuracy over some of the nodes."""
    logits, labels = logits[nodes], labels[nodes]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean(dtype=jnp.float32)


# The graph and the words are arguments: if captured, they would be constants of the program.
@partial(jax.jit, static_argnames=("definition", "optimizer", "patience"))
def run_chunk(
    state, graph, features, labels, train, validation, *, definition, optimizer, patience
):
    """Runs CHUNK epochs; returns the state after them, and the metrics of each."""

    def loss_of(params, rest):
        model = nnx.merge(definition, params, rest, copy=True)
        loss, accuracy = measure(model(graph, features), labels, train)
        return loss, (accuracy, nnx.split(model, nnx.Param, ...)[2])  # the new dropout state

    def predict(params, rest):
        model = nnx.merge(definition, params, rest, copy=True)
        model.eval()
        return model(graph, features)

    def epoch(state, _):
        params, rest, memory, best = state
        (loss, (accuracy, rest)), gradient = jax.value_and_grad(loss_of, has_aux=True)(params, rest)
        updates, memory = optimizer.update(gradient, memory, params)
        params = optax.apply_updates(params, updates)
        held_loss, held = measure(predict(params, rest), labels, validation)
        if patience is None:
            best = best | {"params": params}
        else:
            best = better(best, params, held_loss, held, patience)
        line = {"loss": loss, "accuracy": accuracy}
        line |= {"validation_loss": held_loss, "validation_accuracy": held, "done": best["done"]}
        return (params, rest, memory, best), line

    return jax.lax.scan(epoch, state, length=CHUNK)


def better(best: dict, params: Any, loss: Any, accuracy: Any, patience: int) -> dict:
    """GAT's early stopping: weights are kept if neither validation loss nor accuracy is worse than
    the best so far; if neither has improved for `patience` epochs, training stops."""
    either = (loss <= best["loss"]) | (accuracy >= best["accuracy"])
    both = (loss <= best["loss"]) & (accuracy >= best["accuracy"]) & ~best["done"]
    stale = jnp.where(either, 0, best["stale"] + 1)
    return {
        "params": jax.tree.map(lambda new, old: jnp.where(both, new, old), params, best["params"]),
        "loss": jnp.minimum(loss, best["loss"]),
        "accuracy": jnp.maximum(accuracy, best["accuracy"]),
        "stale": stale,
        "done": best["done"] | (stale >= patience),
    }


@partial(jax.jit, static_argnames="definition")
def test_accuracy(params, rest, graph, features, labels, nodes, *, definition):
    model = nnx.merge(definition, params, rest, copy=True)
    model.eval()
    return measure(model(graph, features), labels, nodes)[1]


def train(
    data: Citations, name: str, seed: int, *, epochs: int | None = None, quiet: bool = False
) -> tuple[nnx.Module, list[dict], dict]:
    """Trains one network; returns (the model, a line of metrics per epoch, the summary line)."""
    recipe = RECIPES[name]
    began = time.perf_counter()
    graph = recipe.network.prepare(data.graph)
    kinds = {"relations": len(graph.keys)} if isinstance(graph, Relations) else {}
    model = recipe.network(data.features.shape[1], data.classes, **kinds, rngs=nnx.Rngs(seed))
    definition, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = OPTIMIZERS[name]
    worst = {"loss": jnp.asarray(jnp.inf, jnp.float32), "accuracy": jnp.zeros((), jnp.float32)}
    best = worst | {"params": params, "stale": jnp.zeros((), jnp.int32), "done": jnp.asarray(False)}
    state = (params, rest, optimizer.init(params), best)
    operands = (graph, data.features, data.labels, data.train, data.validation)
    static = dict(definition=definition, optimizer=optimizer, patience=recipe.patience)
    lines: list[dict] = []
    last = -(-(epochs or recipe.epochs) // CHUNK) * CHUNK
    bar = tqdm(total=last, unit="epoch", desc=f"seed {seed}", disable=quiet, leave=False)
    with bar:
        while len(lines) < last:
            state, found = run_chunk(state, *operands, **static)
            found = jax.tree.map(np.asarray, found)
            done = found.pop("done")
            kept = CHUNK if not done.any() else int(done.argmax()) + 1
            for i in range(kept):
                numbers = {key: round(float(value[i]), 5) for key, value in found.items()}
                lines.append({"seed": seed, "epoch": len(lines) + 1, **numbers})
            bar.update(kept)
            bar.set_postfix(validation=f"{lines[-1]['validation_accuracy']:.3f}")
            if done.any():
                break
    params, rest = state[3]["params"], state[1]
    of = (graph, data.features, data.labels, data.test)
    accuracy = float(test_accuracy(params, rest, *of, definition=definition))
    seconds = round(time.perf_counter() - began, 2)
    nnx.update(model, params, rest)
    model.eval()
    total = {"seed": seed, "epochs": len(lines), "test_accuracy": accuracy, "seconds": seconds}
    return model, lines, total


OPTIMIZERS = {name: optimizer_of(recipe) for name, recipe in RECIPES.items()}


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--network", choices=tuple(RECIPES), default="gcn")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--dataset", choices=("cora", "citeseer"), default="cora")
    source.add_argument("--data", metavar="FILE", help="an .npz as README.md describes it")
    source.add_argument("--synthetic", action="store_true", help="a made-up graph")
    add("--seeds", type=int, default=10, metavar="N", help="runs to average (default 10)")
    add("--first-seed", type=int, default=0, metavar="N", help="seed of the first (default 0)")
    add("--epochs", type=int, metavar="N", help="at most (default: as in the paper)")
    add("--run", metavar="FOLDER", help="write metrics.jsonl there")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        if given.synthetic:
            data = MADE_UP.get(given.network, citations.synthetic)()
        else:
            data = citations.read(given.data or citations.find(given.dataset))
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")
    print(data.summary())
    totals, lines = [], []
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        _, each, total = train(data, given.network, seed, epochs=given.epochs)
        totals.append(total)
        lines += [*each, total]
        print(
            f"seed {seed}: test accuracy {100 * total['test_accuracy']:.1f} "
            f"after {total['epochs']} epochs, {total['seconds']:.1f} s"
        )
    found = [100 * total["test_accuracy"] for total in totals]
    print(f"{given.network} on {data.name}: {np.mean(found):.1f} +- {np.std(found):.1f}")
    if given.run:
        folder = Path(given.run)
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)


if __name__ == "__main__":
    main()
