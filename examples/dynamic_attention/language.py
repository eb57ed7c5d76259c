"""Trains a language model of bytes three times, with attention over all keys and with both
selections, and compares how many bytes of held-out text each predicts.

Examples:
    python language.py                       # this checkout's own documents and Python files
    python language.py --data book.txt ...   # other text
    python language.py --tiny                # seconds: does everything run

The three models have the same sizes, start from the same seed and see the same windows in the same
order. A window is a text of 1,024 bytes; what it repeats, names above all, lies anywhere before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from sgap_jax import nn

CHECKOUT = Path(__file__).resolve().parents[2]
BYTES, HELD_OUT = 256, 0.1


@dataclasses.dataclass(frozen=True)
class Config:
    attention: str = "dense"  # or "tokens" or "blocks"
    length: int = 1024
    embedding: int = 32
    taps: int = 5  # how many bytes, the own one and those before, the input of a position has
    features: int = 128  # of queries and keys, all heads together
    heads: int = 2
    kv_heads: int = 1
    layers: int = 1
    mlp: int = 256
    top_k: int = 64
    index_heads: int = 4
    block_size: int = 4
    num_blocks: int = 48
    batch: int = 4
    steps: int = 150
    warmup: float = 0.25  # share of the steps in which the indexer watches attention over all keys
    learning_rate: float = 3e-3
    seed: int = 0

    @property
    def width(self) -> int:
        return self.embedding * self.taps


TINY = Config(length=128, embedding=16, features=32, mlp=32, steps=20)


def read(paths: Sequence[Path]) -> np.ndarray:
    """The bytes of some files, or of the checkout's documents and Python files."""
    folders = ("docs", "sgap_jax", "benchmarks", "tests")
    found = [p for folder in folders for p in sorted((CHECKOUT / folder).rglob("*.[mp][dy]"))]
    content = b"".join(path.read_bytes() for path in paths or found)
    return np.frombuffer(content, np.uint8)


def windows(text: np.ndarray, length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """[count, length + 1] bytes from random places."""
    if text.size <= length:
        raise ValueError(f"language: expected more than {length} bytes of text, got {text.size}")
    starts = rng.integers(0, text.size - length, count)
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)[starts].astype(np.int32)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        width = config.width
        self.norm, self.mlp_norm = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        sizes = dict(num_heads=config.heads, in_features=width, qkv_features=config.features)
        sizes |= dict(num_kv_heads=config.kv_heads)
        if config.attention == "tokens":
            indexer = dict(index_heads=config.index_heads, index_features=32)
            attention = nn.TopKSparseAttention(top_k=config.top_k, rngs=rngs, **indexer, **sizes)
        elif config.attention == "blocks":
            blocks = dict(block_size=config.block_size, num_blocks=config.num_blocks)
            attention = nn.BlockSparseAttention(rngs=rngs, **blocks, **sizes)
        else:
            attention = nnx.MultiHeadAttention(decode=False, rngs=rngs, **sizes)
        # Queries start as keys of the position behind: so attention begins by looking at what came
        # after the same bytes, which from random weights takes thousands of steps to find.
        key = attention.key.kernel[...]
        behind = jnp.zeros_like(key).at[config.embedding :].set(key[: -config.embedding])
        attention.query.kernel[...] = jnp.repeat(behind, config.heads // config.kv_heads, axis=1)
        self.attention = attention
        self.up = nnx.Linear(width, config.mlp, rngs=rngs)
        self.down = nnx.Linear(config.mlp, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the output, the loss of the indexer, zero where there is none)."""
        h, loss = self.norm(x), jnp.zeros(())
        if isinstance(self.attention, nn.TopKSparseAttention):
            y, loss = self.attention(h, return_indexer_loss=True)
        elif isinstance(self.attention, nn.BlockSparseAttention):
            y = self.attention(h)
        else:
            y = self.attention(h, mask=nnx.make_causal_mask(h[..., 0]))
        x = x + y
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x)))), loss


class Model(nnx.Module):
    """bytes [batch, length] -> (logits of the next bytes [batch, length, 256], indexers' loss)."""

    def __init__(self, config: Config) -> None:
        rngs, width = nnx.Rngs(config.seed), config.width
        self.taps = config.taps
        self.embed = nnx.Embed(BYTES, config.embedding, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, BYTES, rngs=rngs)

    def __call__(self, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        padded, length = jnp.pad(text, ((0, 0), (self.taps - 1, 0))), text.shape[1]
        taps = [padded[:, i : i + length] for i in range(self.taps)]  # the own byte is the last
        x = self.embed(jnp.stack(taps, axis=-1)).reshape(*text.shape, -1)
        losses = jnp.zeros(())
        for block in self.blocks:
            x, loss = block(x)
            losses = losses + loss
        return self.head(self.norm(x)), losses


def next_bytes(model: Model, text: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cross-entropy of the next bytes + the indexers' loss, share of them that is right)."""
    logits, indexers = model(text[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()
    return loss + indexers, (logits.argmax(-1) == text[:, 1:]).mean()


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, text: jax.Array):
    gradient = nnx.value_and_grad(next_bytes, has_aux=True)
    (loss, hits), gradient = gradient(model, text)
    optimizer.update(model, gradient)
    return loss, hits


@nnx.jit
def accuracy(model: Model, text: jax.Array) -> jax.Array:
    return next_bytes(model, text)[1]


def train(config: Config, text: np.ndarray, *, quiet: bool = False) -> tuple[Model, list[dict]]:
    """The trained model, and a line of metrics every twenty steps."""
    model = Model(config)
    steps = config.steps
    rate = optax.warmup_cosine_decay_schedule(0, config.learning_rate, steps // 10, steps)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    rng, lines = np.random.default_rng(config.seed), []
    for number in tqdm(range(steps), config.attention, disable=quiet):
        if config.attention == "tokens":
            warm = number < config.warmup * steps
            for block in model.blocks:
                block.attention.top_k = config.length if warm else config.top_k
        loss, hits = train_step(model, optimizer, windows(text, config.length, config.batch, rng))
        if number % 20 == 19:
            line = {"step": number + 1, "loss": float(loss), "accuracy": float(hits)}
            lines.append({"attention": config.attention} | line)
    return model, lines


def compare(
    configs: Sequence[Config], text: np.ndarray, folder: Path, *, count: int, quiet: bool = False
) -> list[dict]:
    """Trains each, and measures it on `count` windows of the last tenth; writes metrics.jsonl."""
    cut = round((1 - HELD_OUT) * text.size)
    rows, lines = [], []
    for config in configs:
        held_out = windows(text[cut:], config.length, count, np.random.default_rng(10**6))
        began = time.perf_counter()
        model, metrics = train(config, text[:cut], quiet=quiet)
        seconds, lines = time.perf_counter() - began, lines + metrics
        parts = [accuracy(model, held_out[i : i + 8]) for i in range(0, count, 8)]
        row = {"attention": config.attention, "seconds": seconds}
        rows.append(row | {"accuracy": float(np.mean(parts))})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return rows


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="files of text")
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="default runs/language")
    for name in ("length", "steps", "batch", "seed", "top_k", "block_size", "num_blocks"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--only", choices=("dense", "tokens", "blocks"), nargs="+")
    given = vars(parser.parse_args())
    data, tiny, folder, only = (given.pop(name) for name in ("data", "tiny", "run", "only"))
    changed = {name: value for name, value in given.items() if value is not None}
    base = dataclasses.replace(TINY if tiny else Config(), **changed)
    text, count = read(data), 8 if tiny else 32
    common = np.bincount(text[round((1 - HELD_OUT) * text.size) :]).max() / (HELD_OUT * text.size)
    print(
        f"{text.size} bytes of text, the last tenth held out; windows of {base.length}. The most "
        f"frequent byte is {common:.1%} of them."
    )
    names = only or ("dense", "tokens", "blocks")
    configs = [dataclasses.replace(base, attention=name) for name in names]
    folder = folder or Path("runs", "language_tiny" if tiny else "language")
    for row in compare(configs, text, folder, count=count):
        print(f"{row['attention']:7} accuracy {row['accuracy']:.2%}, {row['seconds']:.0f} s")
    print(f"In {folder}: metrics.jsonl")


if __name__ == "__main__":
    main()
