"""Trains the sparse transformer on ListOps or on text, with checkpoints, and resumes.

Examples:
    python train.py --run runs/listops                                      # as in the demo
    python train.py --run runs/lra --min-length 500 --max-length 2000       # the lengths of LRA
    python train.py --run runs/reviews --task text --data reviews.tsv       # your own text
    python train.py --run runs/listops --resume                             # after an interruption
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import figures
import listops
import numpy as np
import optax
import text
from data import Dataset, batch_indices
from flax import nnx
from model import Classifier, ModelConfig, default_mask, dense_twin
from runs import Config, Run
from tqdm import tqdm


def load(config: Config) -> Dataset:
    """The dataset that a configuration names."""
    if config.task == "text":
        length, windows = config.length, config.train_examples
        return text.dataset(config.data, length=length, windows=windows, seed=config.seed)
    if config.data:
        raise ValueError("train: --data is for --task text; ListOps expressions are generated")
    held = config.held_out_examples
    tokens, labels = listops.generate(
        held + config.train_examples,
        min_length=config.min_length,
        max_length=config.max_length,
        seed=config.seed,
    )
    tokens = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % 8)))  # whole 8 x 1 vectors
    return Dataset(
        name=f"ListOps, lengths {config.min_length + 1} to {config.max_length - 1}",
        tokens=tokens[held:],
        labels=labels[held:],
        held_out_tokens=tokens[:held],
        held_out_labels=labels[:held],
        vocabulary=len(listops.VOCABULARY),
        classes=tuple("0123456789"),
    )


def build(config: Config, data: Dataset) -> tuple[Classifier, nnx.Optimizer]:
    """The model and its optimizer at step 0."""
    mask = default_mask(data.length, density=config.density, band=config.band, seed=config.seed)
    shape = ModelConfig(
        vocabulary=data.vocabulary,
        classes=len(data.classes),
        length=data.length,
        width=config.width,
        heads=config.heads,
        layers=config.layers,
        mlp=config.mlp,
    )
    model = Classifier(shape, mask, rngs=nnx.Rngs(config.seed))
    if config.attention == "dense":
        model = dense_twin(model)
    return model, make_optimizer(model, config.steps, config.learning_rate)


def make_optimizer(model: Classifier, steps: int, learning_rate: float = 1e-3) -> nnx.Optimizer:
    """AdamW over the parameters; the rate rises for up to 100 steps, then falls along a cosine."""
    rate = optax.warmup_cosine_decay_schedule(0, learning_rate, min(100, steps // 10), steps)
    return nnx.Optimizer(model, optax.adamw(rate, weight_decay=0.01), wrt=nnx.Param)


def update(model: Classifier, optimizer: nnx.Optimizer, tokens, labels):
    """One training step, in place; returns loss and accuracy on the batch."""

    def loss_and_logits(model):
        logits = model(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (loss, logits), gradient = nnx.value_and_grad(loss_and_logits, has_aux=True)(model)
    optimizer.update(model, gradient)
    return loss, (logits.argmax(-1) == labels).mean()


train_step = nnx.jit(update)  # the mask is part of the model's state: an argument, not a constant


@nnx.jit
def predict(model: Classifier, tokens):
    """The logits of one batch."""
    return model(tokens)


def held_out_logits(model: Classifier, data: Dataset, batch: int) -> np.ndarray:
    """The logits of all held-out examples, batch by batch; the last batch is padded."""
    tokens = data.held_out_tokens
    filled = np.resize(tokens, (-(-len(tokens) // batch) * batch, data.length))
    parts = [predict(model, filled[i : i + batch]) for i in range(0, len(filled), batch)]
    return np.concatenate(parts)[: len(tokens)]


def accuracy(model: Classifier, data: Dataset, batch: int) -> float:
    """The share of held-out examples that are classified correctly."""
    predicted = held_out_logits(model, data, batch).argmax(-1)
    return float((predicted == data.held_out_labels).mean())


def train(
    config: Config,
    data: Dataset,
    folder: str | Path,
    *,
    resume: bool = False,
    stop_at: int | None = None,
    time_limit: float | None = None,
    log_every: int = 10,
    evaluate_every: int = 250,
    quiet: bool = False,
) -> tuple[Classifier, list[dict]]:
    """Trains to config.steps, to stop_at or for time_limit seconds; returns (model, lines of
    metrics.jsonl).

    A checkpoint is written at every evaluation and where training stops, Ctrl-C included. Raises
    ValueError if the folder holds an earlier run and `resume` is not set.
    """
    run = Run(folder)
    if not resume and run.checkpoints.latest_step() is not None:
        raise ValueError(f"train: {folder} holds an earlier run: give --resume, or another folder")
    model, optimizer = build(config, data)
    step = start = run.restore(model, optimizer) if resume else 0
    run.forget_after(step)
    run.write_config(config)
    last = min(config.steps, stop_at or config.steps)
    began = since = time.perf_counter()
    losses, hits = [], []
    bar = tqdm(total=last, initial=start, unit="step", disable=quiet, dynamic_ncols=True)
    with bar, run.metrics_path.open("a") as metrics:
        try:
            while step < last:
                chosen = batch_indices(len(data.labels), config.batch, step, config.seed)
                loss, hit = train_step(model, optimizer, data.tokens[chosen], data.labels[chosen])
                losses.append(loss)
                hits.append(hit)
                step += 1
                bar.update()
                if step % log_every and step < last:
                    continue
                line = {
                    "step": step,
                    "loss": np.mean(losses).item(),
                    "accuracy": np.mean(hits).item(),
                }
                now = time.perf_counter()
                line["examples_per_second"] = round(len(losses) * config.batch / (now - since), 1)
                if time_limit is not None and now - began > time_limit:
                    last = step
                if step % evaluate_every == 0 or step == last:
                    line["held_out_accuracy"] = accuracy(model, data, config.batch)
                    line["majority"] = data.majority
                    run.save(step, model, optimizer)
                    if not quiet:
                        tqdm.write(_said(line))
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()
                bar.set_postfix(loss=f"{line['loss']:.3f}", accuracy=f"{line['accuracy']:.3f}")
                losses, hits, since = [], [], time.perf_counter()
        except KeyboardInterrupt:
            run.save(step, model, optimizer)
            tqdm.write(f"stopped at step {step}; --resume --run {folder} goes on from there")
    run.close()
    return model, run.metrics()


def _said(line: dict) -> str:
    return (
        f"step {line['step']:5d}  loss {line['loss']:.3f}  held-out accuracy "
        f"{line['held_out_accuracy']:.3f}, majority class {line['majority']:.3f}"
    )


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    default = Config()
    add("--run", required=True, metavar="FOLDER", help="config, metrics, checkpoints, curves")
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint, as configured there",
    )
    add("--stop-at", type=int, metavar="STEP", help="stop before the last step, to be resumed")
    add("--task", choices=("listops", "text"), default=default.task)
    add("--data", nargs="+", default=[], metavar="FILE", help="text: one .tsv, or plain files")
    for name, what in (
        ("min_length", "listops: expressions are longer than this"),
        ("max_length", "listops: expressions are shorter than this"),
        ("length", "text: bytes that the model sees"),
        ("train_examples", "expressions, or windows of plain files"),
        ("held_out_examples", "listops: expressions never trained on"),
        ("width", "width of the embedding and the layers"),
        ("heads", "attention heads per layer"),
        ("layers", "transformer layers"),
        ("mlp", "hidden width of the MLP"),
        ("batch", "examples per step"),
        ("steps", "training steps"),
        ("seed", "of data, mask, weights and order"),
    ):
        value, flag = getattr(default, name), f"--{name.replace('_', '-')}"
        add(flag, type=int, default=value, metavar="N", help=f"{what} (default {value})")
    add("--density", type=float, default=default.density, help="share of the mask that is stored")
    add("--band", type=int, help="columns of the dense band (default a sixteenth of the length)")
    add("--learning-rate", type=float, default=default.learning_rate, help="the highest")
    add("--attention", choices=("sparse", "dense"), default=default.attention)
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    folder, resume, stop_at = (given.pop(name) for name in ("run", "resume", "stop_at"))
    given["data"] = tuple(given["data"])
    try:
        config = Run.read_config(folder) if resume else Config(**given)
        data = load(config)
        print(data.summary())
        model, metrics = train(config, data, folder, resume=resume, stop_at=stop_at)
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")
    figures.save_curves(metrics, Path(folder) / "curves.png", data.name)
    print(f"config, metrics, checkpoints and curves.png are in {folder}")


if __name__ == "__main__":
    main()
