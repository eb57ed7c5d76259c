"""Trains attention that selects its keys on associative recall, decodes with it, and draws which
keys it chose.

Examples:
    python train.py             # about a minute on two cores
    python train.py --tiny      # seconds: does everything run
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import chosen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from recall import Config, Model, Task
from tqdm import tqdm

TINY = (Task(keys=32, values=8, pairs=24, asked=8), dict(steps=40, warmup=20, batch=8, top_k=8))
HELD_OUT = 64


def answers_loss(model: Model, events: jax.Array, where: jax.Array):
    """(cross-entropy of the answers + the indexer's loss, accuracy)."""
    logits, indexer = model(events)
    logits = logits[:, -where.shape[1] :]
    answers = jnp.take_along_axis(events[..., 1], where, axis=1)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, answers).mean()
    return loss + indexer, (logits.argmax(-1) == answers).mean()


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, events: jax.Array, where: jax.Array):
    grad = nnx.value_and_grad(answers_loss, has_aux=True)
    (loss, hits), gradient = grad(model, events, where)
    optimizer.update(model, gradient)
    return loss, hits


def train(config: Config, task: Task, *, quiet: bool = False) -> tuple[Model, list[dict]]:
    """The trained model, and a line of metrics every ten steps. While an indexer warms up,
    attention sees all keys, as in DeepSeek's first stage."""
    model = Model(task, config)
    rate = optax.cosine_decay_schedule(config.learning_rate, config.steps)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    rng, lines = np.random.default_rng(config.seed), []
    for number in tqdm(range(config.steps), config.attention, disable=quiet):
        if config.attention == "tokens":
            warm = number < config.warmup
            model.attention.top_k = task.length if warm else config.top_k
        loss, hits = train_step(model, optimizer, *task.draw(config.batch, rng))
        if number % 10 == 9:
            line = {"step": number + 1, "loss": float(loss), "accuracy": float(hits)}
            lines.append({"attention": config.attention} | line)
    return model, lines


@nnx.jit
def accuracy(model: Model, events: jax.Array, where: jax.Array) -> jax.Array:
    return answers_loss(model, events, where)[1]


@nnx.jit
def decode_step(model: Model, events: jax.Array) -> jax.Array:
    return model(events, decode=True)[0]


def decode(model: Model, events: np.ndarray, prompt: int) -> np.ndarray:
    """Logits [batch, length - prompt, values] of the events after a prompt, one at a time with the
    layer's cache."""
    model.attention.init_cache((*events.shape[:2], model.attention.in_features))
    decode_step(model, events[:, :prompt])
    steps = range(prompt, events.shape[1])
    return np.concatenate([decode_step(model, events[:, t : t + 1]) for t in steps], axis=1)


def answers_seen(model: Model, events: np.ndarray, where: np.ndarray) -> float:
    """The share of questions that see the pair which answers them."""
    questions = chosen.seen_keys(model, events)[:, -where.shape[1] :]
    return float(np.take_along_axis(questions, where[..., None], axis=2).mean())


def run(task: Task, configs: list[Config], folder: Path, *, quiet: bool = False) -> list[dict]:
    """Trains each configuration; writes metrics.jsonl, curves.png and a picture of chosen keys for
    each selection. Returns a row for each."""
    folder.mkdir(parents=True, exist_ok=True)
    events, where = task.draw(HELD_OUT, np.random.default_rng(10**6))
    rows, lines = [], []
    for config in configs:
        began = time.perf_counter()
        model, metrics = train(config, task, quiet=quiet)
        lines += metrics
        row = {"attention": config.attention, "seconds": time.perf_counter() - began}
        row["accuracy"] = float(accuracy(model, events, where))
        if config.attention != "dense":
            few = events[:4]
            whole = np.asarray(nnx.jit(lambda model, x: model(x)[0])(model, few))[:, task.pairs :]
            apart = np.abs(decode(model, few, task.pairs) - whole).max() / np.abs(whole).max()
            row |= {"decoded_apart": float(apart), "seen": answers_seen(model, events, where)}
            chosen.save_seen(model, events[0], where[0], folder / f"{config.attention}.png")
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen.save_curves(lines, folder / "curves.png")
    return rows


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--tiny", action="store_true", help="a small task and few steps")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="default runs/recall")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    task, options = TINY if given.tiny else (Task(), {})
    options = options | {"seed": given.seed} | ({"steps": given.steps} if given.steps else {})
    base = Config(**options)
    configs = [dataclasses.replace(base, attention=name) for name in ("dense", "tokens", "blocks")]
    folder = given.run or Path("runs", "recall_tiny" if given.tiny else "recall")
    print(
        f"{task.pairs} pairs of {task.keys} keys and {task.values} values, {task.asked} questions. "
        f"Chance: {1 / task.values:.1%}."
    )
    for row in run(task, configs, folder):
        line = f"{row['attention']:7} accuracy {row['accuracy']:.1%}, {row['seconds']:.0f} s"
        if "seen" in row:
            line += f"; {row['seen']:.1%} of the questions see the pair that answers them"
            line += f"; decoded logits differ by {row['decoded_apart']:.1e} of the largest"
        print(line)
    print(f"In {folder}: curves.png, tokens.png and blocks.png (keys seen), metrics.jsonl")


if __name__ == "__main__":
    main()
