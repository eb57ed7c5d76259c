"""The demo: trains a small sparse transformer on ListOps, and compares it with dense-masked
attention.

Examples:
    python demo.py              # minutes on two cores
    python demo.py --tiny       # seconds: does everything run
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import figures
import numpy as np
from compare import LENGTHS, compare, table
from data import Dataset
from listops import VOCABULARY
from model import Classifier, dense_twin
from runs import Config, Run
from train import held_out_logits, load, train

import sgap_jax

TINY = Config(
    max_length=129,
    train_examples=2000,
    held_out_examples=200,
    width=32,
    layers=1,
    mlp=64,
    batch=16,
    steps=200,
    learning_rate=5e-3,
)
TRAINING_SECONDS = 180  # so that the demo ends within five minutes on slow machines


def check_against_dense(logits: np.ndarray, model: Classifier, data: Dataset, batch: int) -> None:
    """Checks that dense-masked attention with the same weights gives the same answers; prints the
    difference."""
    dense = held_out_logits(dense_twin(model), data, batch)
    apart = float(np.abs(logits - dense).max() / np.abs(dense).max())
    same = int((logits.argmax(-1) == dense.argmax(-1)).sum())
    print(
        f"The same weights with dense-masked attention: {same} of {len(dense)} answers are the "
        f"same, logits differ by at most {apart:.1e} of the largest."
    )
    if not apart < 1e-4:
        raise ArithmeticError(f"sparse and dense-masked logits differ by {apart:.1e}")


def operator_rule(data: Dataset) -> float:
    """Held-out accuracy of the best answer to the first token, the outermost operator."""
    counts = np.zeros((data.vocabulary, len(data.classes)))
    np.add.at(counts, (data.tokens[:, 0], data.labels), 1)
    answers = counts.argmax(-1)[data.held_out_tokens[:, 0]]
    return float((answers == data.held_out_labels).mean())


def show_answers(logits: np.ndarray, data: Dataset, count: int = 5) -> None:
    """The shortest held-out expressions, with the value and the model's answer."""
    shortest = np.argsort((data.held_out_tokens != 0).sum(-1), kind="stable")[:count]
    for row, answer in zip(shortest, logits[shortest].argmax(-1), strict=True):
        words = " ".join(VOCABULARY[token] for token in data.held_out_tokens[row] if token)
        print(f"  {words}  =  {data.held_out_labels[row]}   (model: {answer})")


def run_demo(config: Config, folder: Path, lengths, seconds: float) -> tuple[float, float]:
    """Runs the whole demo; returns (held-out accuracy, share of the majority class)."""
    data = load(config)
    print(data.summary() + "\n")
    Run.clear(folder)
    model, metrics = train(
        config,
        data,
        folder,
        time_limit=TRAINING_SECONDS,
        evaluate_every=max(1, config.steps // 6),
    )
    first, last = metrics[0], metrics[-1]
    mask = model.mask.get_value()
    figures.save_mask(mask, folder / "mask.png")
    figures.save_curves(metrics, folder / "curves.png", data.name)
    reached = last["held_out_accuracy"]
    print(
        f"\nIn {last['step']} steps the loss fell from {first['loss']:.2f} to {last['loss']:.2f}.\n"
        f"Held-out accuracy {reached:.1%}; always the most frequent class {data.majority:.1%}, the "
        f"best guess from the outermost operator alone {operator_rule(data):.1%}. For example:"
    )
    logits = held_out_logits(model, data, config.batch)
    show_answers(logits, data)
    check_against_dense(logits, model, data, config.batch)
    print(
        f"\nForward + backward of a step, mask {1 - mask.density:.0%} sparse, ratios over sparse:"
    )
    rows = compare(lengths, seconds=seconds, seed=config.seed)
    print(table(rows))
    (folder / "comparison.json").write_text(json.dumps(rows, indent=1))
    figures.save_comparison(rows, folder / "comparison.png")
    return reached, data.majority


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--tiny", action="store_true", help="a small task and short lengths")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="default runs/demo")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    tiny = arguments.tiny
    folder = arguments.run or Path("runs", "demo_tiny" if tiny else "demo")
    config = TINY if tiny else Config()
    config = dataclasses.replace(config, seed=arguments.seed, steps=arguments.steps or config.steps)
    info = sgap_jax.info()
    print(f"sgap_jax {info['sgap_jax']}, jax {info['jax']}, CPU kernels for {info['cpu_isa']}\n")

    lengths, seconds = ((128, 256), 0.3) if tiny else (LENGTHS, 2.0)
    reached, majority = run_demo(config, folder, lengths, seconds)

    print(f"\n{time.perf_counter() - began:.0f} s in all. In {folder}:")
    print("  mask.png         the attention mask")
    print("  curves.png       loss and accuracy")
    print("  comparison.png   time and memory against length (comparison.json: the numbers)")
    print("  metrics.jsonl    a line every ten steps")
    print("  checkpoints      weights and optimizer")
    if not tiny and reached <= majority:
        sys.exit("demo: the model is no better than the majority class")


if __name__ == "__main__":
    main()
