"""Sparse against dense-masked attention, in one process: equality, time and memory of a step.

Three implementations of the same attention (one sequence, 4 heads of 64), forward + backward:

    sparse   sgap_jax.sparse_attention, the code of the model
    dense    written by hand: the full matrix, masked, softmax
    jax.nn   jax.nn.dot_product_attention with the mask

and then a training step of a 2-layer transformer with the first two. Times are medians of runs
taken in turn. Memory is XLA's account of the compiled step: arguments (with the mask) + results +
temporaries. `--rss` confirms the figures of the longest sequence by the resident memory of a fresh
process for each implementation.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from measure import (
    compile_step,
    difference,
    grown_megabytes,
    in_fresh_process,
    interleaved_ms,
    megabytes,
)
from model import (
    Classifier,
    ModelConfig,
    Structure,
    attend_dense,
    attend_sparse,
    default_mask,
    dense_twin,
)
from train import make_optimizer, update

HEADS, HEAD_WIDTH = 4, 64
LENGTHS = (1024, 2048, 4096)
TOLERANCE = 1e-5  # relative to the largest element: float32 sums of some hundred entries


def _jax_nn(mask, q, k, v, lengths):
    mask, options = mask[None, None], dict(key_value_seq_lengths=lengths)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, **options)


ATTENTION = {
    "sparse": attend_sparse,
    "dense": attend_dense,
    "jax.nn": _jax_nn,
}


def attention_step(name: str, length: int, seed: int = 0):
    """(compiled, arguments): an attention's output and its gradients with respect to q, k and v."""
    mask = default_mask(length, seed=seed)
    structure = mask if name == "sparse" else mask.todense() != 0
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (1, length, HEADS, HEAD_WIDTH)
    q, k, v, cotangent = (jax.random.normal(key, shape) for key in keys)
    lengths = jnp.full(1, length)

    def step(structure, lengths, q, k, v, cotangent):
        def attention(q, k, v):
            return ATTENTION[name](structure, q, k, v, lengths)

        out, pullback = jax.vjp(attention, q, k, v)
        return out, *pullback(cotangent)

    return compile_step(step, structure, lengths, q, k, v, cotangent)


def model_step(name: str, length: int, seed: int = 0):
    """(compiled, arguments): one update of a transformer with 2 layers of 4 heads of 64."""
    width = HEADS * HEAD_WIDTH
    config = ModelConfig(257, 2, length, width=width, heads=HEADS, layers=2, mlp=2 * width)
    model = Classifier(config, default_mask(length, seed=seed), rngs=nnx.Rngs(seed))
    model = dense_twin(model) if name == "dense" else model
    definition, state = nnx.split((model, make_optimizer(model, steps=100)))

    def step(state, tokens, labels):
        model, optimizer = nnx.merge(definition, state)
        loss, _ = update(model, optimizer, tokens, labels)
        return loss, nnx.state((model, optimizer), nnx.Not(Structure))

    tokens = jax.random.randint(jax.random.key(seed), (1, length), 1, 257)
    return compile_step(step, state, tokens, jnp.zeros(1, jnp.int32))


def compare(lengths=LENGTHS, *, seconds: float = 2.0, seed: int = 0) -> list[dict]:
    """One row per step and length. Raises ArithmeticError if sparse and dense disagree."""
    rows = []
    for what, make in (("attention", attention_step), ("training step", model_step)):
        names = ATTENTION if make is attention_step else ("sparse", "dense")
        for length in lengths:
            steps = {name: make(name, length, seed) for name in names}
            results = [compiled(*arguments) for compiled, arguments in steps.values()]
            if make is model_step:  # only the loss: Adam turns a zero's rounding into a step
                results = [result[:1] for result in results]
            apart = max(difference(results[0], other) for other in results[1:])
            if not apart < TOLERANCE:
                raise ArithmeticError(f"{what}, length {length}: dense differs by {apart:.1e}")
            del results
            ms = interleaved_ms(steps, seconds)
            memory = {name: megabytes(compiled) for name, (compiled, _) in steps.items()}
            row = {"step": what, "length": length, "difference": apart, "ms": ms, "MB": memory}
            rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    """The rows as text; ratios are over sparse."""
    names = "".join(f"{name:>8}" for name in ATTENTION)
    over = "".join(f"{name:>7}" for name in list(ATTENTION)[1:])
    lines = [
        f"{'':13}{'':7}{'largest':>11}{'ms':>24}{'ratio':>14}{'MB':>25}{'ratio':>14}",
        f"{'':13}{'length':>7}{'difference':>11}{names}{over} {names}{over}",
    ]
    for row in rows:
        line = f"{row['step']:13}{row['length']:7}{row['difference']:11.1e}"
        for unit in ("ms", "MB"):
            first, *others = (row[unit].get(name) for name in ATTENTION)
            line += f"{first:8.1f}" + "".join(f"{x:8.1f}" if x else f"{'-':>8}" for x in others)
            line += "".join(f"{x / first:6.1f}x" if x else f"{'-':>7}" for x in others) + " "
        lines.append(line.rstrip())
    return "\n".join(lines)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--seconds", type=float, default=2.0, help="time per row (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    parser.add_argument("--rss", action="store_true", help="resident memory of fresh processes")
    parser.add_argument("--child", choices=ATTENTION, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    longest, seed = max(arguments.lengths), arguments.seed
    if arguments.child:
        print(json.dumps(grown_megabytes(*attention_step(arguments.child, longest, seed))))
        return
    try:
        rows = compare(arguments.lengths, seconds=arguments.seconds, seed=seed)
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    for name in ATTENTION if arguments.rss else ():
        options = ("--child", name, "--lengths", longest, "--seed", seed)
        grown = in_fresh_process(__file__, *options)
        said = "unknown here" if grown is None else f"{grown:.0f} MB"
        print(f"resident memory of an attention step, length {longest}, {name}: {said}")


if __name__ == "__main__":
    main()
