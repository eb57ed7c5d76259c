"""Measures the transformer of vectorSparse's section 7.4: Table 4's speed and memory, Figure 20.

    model    4 layers with 4 heads of 64, sequences of 4096 bytes, batch 8; the mask a band of 256
             and random 8 x 1 vectors, 90% sparse. Sequences/s and peak memory of the inference,
             dense-masked and sparse, in float32 and in half precision.
    layers   one layer, one sequence: the time of its parts, for dense-masked attention and for
             masks 90%, 95% and 98% sparse, at lengths 2048, 4096 and 8192. Attention is measured as
             the model runs it and in steps: scores, softmax, product.

Weights are random: times do not depend on them. Everything runs on JAX's default device. Rows are
appended to a file of JSON lines as they are measured; a second call measures only the missing rows.

Examples:
    python benchmark.py model --out model.jsonl --rss
    python benchmark.py layers --out layers.jsonl --plot layers.png
    python benchmark.py layers --out layers.jsonl --plot layers.png --dtype float16
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import figures
import jax
from flax import nnx
from layers import (
    HEAD_WIDTH,
    HEADS,
    LENGTHS,
    SPARSITIES,
    layer_table,
    measure_layer,
    paper_config,
    paper_mask,
)
from measure import (
    Results,
    difference,
    forward,
    grown_megabytes,
    in_fresh_process,
    interleaved_ms,
    megabytes,
)
from model import Classifier, variants
from text import VOCABULARY
from tqdm import tqdm

HALVES = ("float16", "bfloat16")
TOLERANCE = 1e-4  # relative to the largest logit, float32 through four layers


def model_steps(length: int, batch: int, half: str, seed: int = 0) -> dict:
    """{variant: function that makes (compiled, arguments)} of the model's inference."""
    model = Classifier(paper_config(length), paper_mask(length), rngs=nnx.Rngs(seed))
    tokens = jax.random.randint(jax.random.key(seed), (batch, length), 1, VOCABULARY)
    return {
        name: lambda one=one: forward(one, tokens) for name, one in variants(model, half).items()
    }


def measure_model(length: int, batch: int, half: str, seconds: float, rss: bool) -> dict:
    """Measures a row; raises ArithmeticError if sparse and dense logits disagree in float32."""
    steps = {name: make() for name, make in model_steps(length, batch, half).items()}
    logits = {name: compiled(*arguments) for name, (compiled, arguments) in steps.items()}
    apart = difference([logits["sparse float32"]], [logits["dense float32"]])
    if not apart < TOLERANCE:
        raise ArithmeticError(f"model, length {length}: sparse differs from dense by {apart:.1e}")
    del logits
    ms = interleaved_ms(steps, seconds)
    row = {
        "difference": apart,
        "ms": ms,
        "sequences_per_second": {name: 1e3 * batch / each for name, each in ms.items()},
        "MB": {name: megabytes(compiled) for name, (compiled, _) in steps.items()},
    }
    if rss:
        about = ("--lengths", length, "--batch", batch, "--half", half)
        row["resident_MB"] = {
            name: in_fresh_process(__file__, "model", *about, "--child", name) for name in steps
        }
    return row


def model_table(row: dict) -> str:
    """A row as text, a column for each variant."""
    titles = {"sequences_per_second": "sequences/s", "MB": "peak memory, MB"}
    titles |= {"resident_MB": "resident memory, MB"} if "resident_MB" in row else {}
    lines = ["".join([f"{'':21}", *(f"{name:>17}" for name in row["ms"])])]
    for key, title in titles.items():
        values = ("unknown" if x is None else f"{x:.4g}" for x in row[key].values())
        lines.append("".join([f"{title:21}", *(f"{x:>17}" for x in values)]))
    return "\n".join(lines)


def measured(results: Results, keys: list[dict], measure, again: bool) -> list[dict]:
    """A row for each key, read from the file or measured and added; a bar shows the progress."""
    rows = []
    with tqdm(keys, unit="row", dynamic_ncols=True) as bar:
        for key in bar:
            bar.set_postfix_str(", ".join(f"{name} {value}" for name, value in key.items()))
            row = None if again else results.find(key)
            rows.append(row or results.add(key | measure(key)))
    return rows


def run_model(given: argparse.Namespace) -> None:
    keys = [
        {"benchmark": "model", "length": length, "batch": given.batch, "half": given.half}
        for length in given.lengths or (4096,)
    ]

    def measure(key):
        return measure_model(key["length"], key["batch"], key["half"], given.seconds, given.rss)

    for row in measured(Results(given.out), keys, measure, given.again):
        print(f"\nlength {row['length']}, batch {row['batch']}, on {row['device']}")
        print(model_table(row))


def run_layers(given: argparse.Namespace) -> None:
    keys = [
        {"benchmark": "layers", "length": length, "sparsity": sparsity, "dtype": given.dtype}
        for length in given.lengths or LENGTHS
        for sparsity in (None, *given.sparsities)
    ]

    def measure(key):
        return measure_layer(key["length"], key["sparsity"], key["dtype"], given.seconds)

    rows = measured(Results(given.out), keys, measure, given.again)
    print(f"\nms of one layer, one sequence, {HEADS} heads of {HEAD_WIDTH}, on {rows[0]['device']}")
    print(layer_table(rows))
    if given.plot:
        figures.save_layers(rows, given.plot)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True)
    for name, run, seconds in (("model", run_model, 10.0), ("layers", run_layers, 1.0)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        add = command.add_argument
        add("--lengths", type=int, nargs="+", metavar="N", help="multiples of 8")
        add("--seconds", type=float, default=seconds, help=f"per row (default {seconds:g})")
        add("--again", action="store_true", help="measure what the file holds, too")
        add("--out", type=Path, default=Path(f"{name}.jsonl"), metavar="FILE", help="JSON lines")
        if name == "model":
            add("--batch", type=int, default=8, metavar="N")
            add("--half", choices=HALVES, default="float16")
            add("--rss", action="store_true", help="resident memory of fresh processes, too")
            add("--child", help=argparse.SUPPRESS)
        else:
            shares = dict(type=float, nargs="*", default=SPARSITIES)
            add("--sparsities", **shares, metavar="S")
            add("--dtype", choices=("float32", *HALVES), default="float32")
            add("--plot", type=Path, metavar="FILE", help="a picture like the paper's Figure 20")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    given = parser.parse_args(arguments)
    if getattr(given, "child", None):
        steps = model_steps(given.lengths[0], given.batch, given.half)
        print(json.dumps(grown_megabytes(*steps[given.child]())))
        return
    try:
        given.run(given)
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
