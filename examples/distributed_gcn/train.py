"""Trains a GCN on all vertices of a graph that is spread over processes: the program of each.

Examples:
    python launch.py --processes 4 --graph mine.npz        # four of these on this machine
    python train.py --graph mine.npz                       # one process
    srun python train.py --cluster --rmat 20 --run runs/a  # JAX finds the others by Slurm
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import graphs
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding

from sgap_jax import parallel

AXIS = "parts"
LOST = 3  # the exit status of a process that has lost another one


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained: losses depend on this and the graph, and on the processes by rounding."""

    features: int = 256  # of the input and of the two hidden layers
    classes: int = 16
    rate: float = 0.01
    seed: int = 0


def inputs(recipe: Recipe, graph: parallel.PartitionedArray) -> tuple[Any, Any, Any]:
    """(X, labels, fold), each in parts: normal features for each vertex, drawn from its number; the
    class that a random linear function of two hops of them has; and its group for the split, of
    ten, or -1 for padding."""
    keys = jax.random.split(jax.random.key(recipe.seed), 3)
    vertex = graph.to_parts(jnp.arange(1, graph.shape[0] + 1)) - 1

    def drawn(i):
        key = jax.random.fold_in(keys[0], i)
        x = jax.random.normal(key, (recipe.features,), jnp.float32)
        return x, jax.random.randint(jax.random.fold_in(key, 1), (), 0, 10)

    X, fold = jax.vmap(jax.vmap(drawn))(vertex)
    teacher = jax.random.normal(keys[1], (recipe.features, recipe.classes), jnp.float32)
    labels = jnp.argmax(graph @ (graph @ (X @ teacher)), axis=-1)
    return X, labels, jnp.where(vertex < 0, -1, fold)


def initial(recipe: Recipe) -> list[dict]:
    sizes = [recipe.features] * 3 + [recipe.classes]
    keys = jax.random.split(jax.random.key(recipe.seed + 1), 3)
    glorot = jax.nn.initializers.glorot_uniform()
    return [
        {"kernel": glorot(key, (a, b), jnp.float32), "bias": jnp.zeros(b, jnp.float32)}
        for key, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def logits(params: list[dict], graph: Any, X: Any) -> Any:
    """Three graph convolutions. A layer keeps its input and makes the rest again in the gradient.

    `graph @ H` is all that differs from one device: with a SparseArray this is the same network."""

    @jax.checkpoint
    def layer(params, X):
        return graph @ (X @ params["kernel"]) + params["bias"]

    for each in params[:-1]:
        X = jax.nn.relu(layer(each, X))
    return layer(params[-1], X)


def measured(params: list[dict], graph: Any, X: Any, labels: Any, fold: Any) -> tuple[Any, dict]:
    """The loss of six tenths of the vertices, and the accuracy of those and of the others."""
    found = logits(params, graph, X)
    each = optax.softmax_cross_entropy_with_integer_labels(found, labels)
    right = found.argmax(-1) == labels
    train, held = (fold >= 0) & (fold < 6), fold >= 6
    mean = lambda x, where: jnp.sum(jnp.where(where, x, 0)) / jnp.sum(where)  # noqa: E731
    loss = mean(each, train)
    return loss, {"loss": loss, "accuracy": mean(right, train), "held_out": mean(right, held)}


@partial(jax.jit, static_argnames="recipe", donate_argnums=0)
def step(state: dict, graph: Any, data: tuple, *, recipe: Recipe) -> tuple[dict, dict]:
    gradient, line = jax.grad(measured, has_aux=True)(state["params"], graph, *data)
    updates, memory = optax.adam(recipe.rate).update(gradient, state["memory"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "memory": memory, "epoch": state["epoch"] + 1}, line


def started(recipe: Recipe) -> dict:
    params = initial(recipe)
    memory = optax.adam(recipe.rate).init(params)
    return {"params": params, "memory": memory, "epoch": jnp.int32(0)}


class Run:
    """A folder with metrics.jsonl and checkpoints/, which all processes share."""

    def __init__(self, folder: str | Path | None, every: int):
        self.folder = None if folder is None else Path(folder).resolve()
        self.manager = None
        if self.folder is not None:
            options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=every)
            self.manager = ocp.CheckpointManager(self.folder / "checkpoints", options=options)

    def restored(self, fresh: dict) -> dict:
        """The newest checkpoint, in the sharding that `fresh` has; `fresh` if there is none. The
        processes that wrote it may have been more or fewer."""
        if self.manager is None or self.manager.latest_step() is None:
            return fresh
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
        return self.manager.restore(self.manager.latest_step(), args=ocp.args.StandardRestore(like))

    def save(self, epoch: int, state: dict, last: bool) -> None:
        if self.manager is not None:
            self.manager.save(epoch, args=ocp.args.StandardSave(state), force=last)

    def write(self, line: dict) -> None:
        if self.folder is not None and jax.process_index() == 0:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self.manager is not None:
            self.manager.wait_until_finished()
            self.manager.close()


def train(graph: parallel.PartitionedArray, recipe: Recipe, epochs: int, run: Run) -> None:
    data = jax.jit(inputs, static_argnums=0)(recipe, graph)
    everywhere = NamedSharding(graph.mesh, jax.P())
    state = run.restored(jax.jit(started, static_argnums=0, out_shardings=everywhere)(recipe))
    begin = int(state["epoch"])
    say(f"epoch {begin}: {'resumed' if begin else 'begins'}")
    for epoch in range(begin + 1, epochs + 1):
        began = time.perf_counter()
        state, found = step(state, graph, data, recipe=recipe)
        line = {"epoch": epoch, **{name: float(x) for name, x in found.items()}}
        line["seconds"] = round(time.perf_counter() - began, 3)
        run.save(epoch, state, epoch == epochs)
        run.write(line)
        say(" ".join(f"{name} {value:.4g}" for name, value in line.items()))
    run.close()
    print(memory(graph), flush=True)


def memory(graph: parallel.PartitionedArray) -> str:
    """What this process has of the graph, and how much memory it has had at once."""
    parts = [d.process_index == jax.process_index() for d in graph.mesh.devices.flat]
    own = sum(count for count, mine in zip(graph.entries, parts, strict=True) if mine)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux: KiB
    return (
        f"process {jax.process_index()}: {own:,} of {sum(graph.entries):,} entries, "
        f"{peak:,.0f} MiB at its peak"
    )


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def join(given: argparse.Namespace) -> None:
    """Joins the other processes, if there are any. One that has sent no sign of life for
    `--timeout` seconds is dead for the others, which end then."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    options = dict(heartbeat_timeout_seconds=given.timeout, shutdown_timeout_seconds=given.timeout)
    if given.cluster:
        jax.distributed.initialize(**options)
    elif given.processes > 1:
        jax.distributed.initialize(given.coordinator, given.processes, given.process, **options)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--graph", metavar="FILE", help="a symmetric matrix, .npz or .mtx")
    source.add_argument("--rmat", type=int, metavar="SCALE", help="an R-MAT of 2^SCALE vertices")
    add("--order", choices=("given", "metis"), default="given", help="of the vertices")
    for field in dataclasses.fields(Recipe):
        kind = float if field.name == "rate" else int
        add(f"--{field.name}", type=kind, default=field.default, metavar="N")
    add("--epochs", type=int, default=100, metavar="N")
    add("--run", metavar="FOLDER", help="metrics and checkpoints; goes on where they end")
    add("--every", type=int, default=10, metavar="N", help="epochs between checkpoints")
    add("--cluster", action="store_true", help="the cluster says which process this is")
    add("--processes", type=int, default=1, metavar="N")
    add("--process", type=int, default=0, metavar="I", help="which of them this is")
    add("--coordinator", metavar="HOST:PORT", help="an address of process 0")
    add("--timeout", type=int, default=60, metavar="SECONDS", help="after which one is dead")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    given = parser.parse_args(arguments)
    join(given)
    recipe = Recipe(**{f.name: getattr(given, f.name) for f in dataclasses.fields(Recipe)})
    try:
        mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
        size, rows = graphs.stored(given.graph) if given.graph else graphs.rmat(given.rmat)
        graph = graphs.in_parts(size, rows, mesh, AXIS, given.order)
        say(f"{graph}\n{graph.explain(recipe.features)}")
        train(graph, recipe, given.epochs, Run(given.run, given.every))
    except Exception as error:
        if jax.process_count() == 1 or not _is_of_network(error):
            if isinstance(error, (OSError, ValueError, ImportError)):
                _end(f"{parser.prog}: {error}", 1)
            raise
        _end(
            f"process {jax.process_index()}: another process has ended, or the network to it: "
            f"{str(error).splitlines()[0]}\n"
            + ("Start all again: they go on from the last checkpoint." if given.run else ""),
            LOST,
        )


def _is_of_network(error: BaseException | None) -> bool:
    """Whether JAX has failed, or Gloo, by which processes talk on CPUs and whose errors come as
    others too; or what another error was raised for."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _end(message: str, status: int) -> None:
    """Ends the process now: the usual way waits for the others, of which one may be gone."""
    print(message, file=sys.stderr, flush=True)
    if jax.process_count() == 1:
        sys.exit(status)
    os._exit(status)


if __name__ == "__main__":
    main()
