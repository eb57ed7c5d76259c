"""Evaluates a trained run as Table 4 of section 7.4 does: accuracy, throughput and peak memory.

The same weights answer all held-out examples in four ways: dense-masked and sparse, in float32 and
in half precision (weights and activations are rounded, without further training). Then a batch is
timed, the four in turn, on JAX's default device.

Examples:
    python evaluate.py --run runs/listops
    python evaluate.py --run runs/reviews --half bfloat16 --batch 4

Answers are kept in RUN/evaluation, so that a second call continues where the first was interrupted;
results go to RUN/evaluation/results.jsonl, a line for each of the four.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np
from data import Dataset
from flax import nnx
from measure import Results, forward, interleaved_ms, megabytes
from model import Classifier, dense_twin, variants
from runs import Config, Run
from tqdm import tqdm
from train import build, load, make_optimizer

BASELINE = "dense float32"


def trained(config: Config, data: Dataset, folder: str | Path) -> tuple[Classifier, int]:
    """The model with the weights of the newest checkpoint, sparse however it was trained."""
    sparse, _ = build(dataclasses.replace(config, attention="sparse"), data)
    model = dense_twin(sparse) if config.attention == "dense" else sparse
    run = Run(folder)
    step = run.restore(model, make_optimizer(model, config.steps))
    run.close()
    if not step:
        raise ValueError(f"{folder}: nothing to evaluate: there is no checkpoint")
    nnx.update(sparse, nnx.state(model, nnx.Param))
    return sparse, step


def answers(step, tokens: np.ndarray, file: Path, name: str) -> np.ndarray:
    """The classes that a compiled step predicts for the tokens; read from `file` if an earlier call
    wrote it."""
    if file.is_file():
        return np.load(file)
    compiled, (weights, one) = step
    batch = len(one)
    filled = np.resize(tokens, (-(-len(tokens) // batch) * batch, *tokens.shape[1:]))
    starts = range(0, len(filled), batch)
    bar = tqdm(starts, name, unit="batch", leave=False, dynamic_ncols=True)
    parts = [compiled(weights, filled[i : i + batch]).argmax(-1) for i in bar]
    found = np.concatenate(parts)[: len(tokens)]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial.npy")  # renamed when complete
    np.save(partial, found)
    partial.rename(file)
    return found


def evaluate(
    folder: str | Path,
    *,
    half: str = "float16",
    batch: int = 8,
    seconds: float = 10.0,
    limit: int | None = None,
    again: bool = False,
) -> list[dict]:
    """A row for each of the four variants, the baseline first.

    accuracy: the share of held-out examples that are right; points: its difference from the
    baseline's, times 100; same: the share of answers equal to the baseline's; ms: the median time
    of a batch; MB: its peak memory by XLA's account.
    """
    config = Run.read_config(folder)
    data = load(config)
    if limit is not None:
        held = data.held_out_tokens[:limit], data.held_out_labels[:limit]
        data = dataclasses.replace(data, held_out_tokens=held[0], held_out_labels=held[1])
    print(data.summary())
    model, step = trained(config, data, folder)
    kept = Path(folder) / "evaluation"
    found, steps = {}, {}
    for name, one in variants(model, half).items():
        file = kept / f"step_{step}_{name.replace(' ', '_')}_{len(data.held_out_labels)}.npy"
        if again:
            file.unlink(missing_ok=True)
        steps[name] = forward(one, np.resize(data.held_out_tokens, (batch, data.length)))
        found[name] = answers(steps[name], data.held_out_tokens, file, name)
    for compiled, arguments in steps.values():  # warm-up
        compiled(*arguments)
    ms = interleaved_ms(steps, seconds)
    baseline = found[BASELINE]
    right = {name: (answer == data.held_out_labels).mean() for name, answer in found.items()}
    results = Results(kept / "results.jsonl")
    about = {"data": data.name, "step": step, "examples": len(baseline), "length": data.length}
    return [
        results.add(
            {
                **about,
                "variant": name,
                "accuracy": float(right[name]),
                "points": float(100 * (right[name] - right[BASELINE])),
                "same": float((found[name] == baseline).mean()),
                "majority": data.majority,
                "batch": batch,
                "ms": ms[name],
                "sequences_per_second": 1e3 * batch / ms[name],
                "MB": megabytes(steps[name][0]),
            }
        )
        for name in found
    ]


def table(rows: list[dict]) -> str:
    """The rows as text, a column for each variant."""
    lines = [
        ("", "{}", "variant"),
        ("accuracy", "{:.2%}", "accuracy"),
        ("points over dense float32", "{:+.2f}", "points"),
        ("answers as dense float32", "{:.2%}", "same"),
        ("sequences/s", "{:.1f}", "sequences_per_second"),
        ("peak memory, MB", "{:.1f}", "MB"),
    ]
    return "\n".join(
        f"{title:26}" + "".join(f"{text.format(row[key]):>17}" for row in rows)
        for title, text, key in lines
    )


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--run", required=True, metavar="FOLDER", help="that train.py wrote")
    add("--half", choices=("float16", "bfloat16"), default="float16")
    add("--batch", type=int, default=8, metavar="N", help="sequences of a call (default 8)")
    add("--seconds", type=float, default=10.0, help="time spent timing (default 10)")
    add("--limit", type=int, metavar="N", help="only the first held-out examples")
    add("--again", action="store_true", help="do not read answers of an earlier call")
    given = vars(parser.parse_args(arguments))
    folder = given.pop("run")
    try:
        rows = evaluate(folder, **given)
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")
    print(f"on {rows[0]['device']}; in batches of {rows[0]['batch']}\n")
    print(table(rows))
    print(f"\nalso in {Path(folder) / 'evaluation' / 'results.jsonl'}")


if __name__ == "__main__":
    main()
