"""Associative recall, and a layer for it whose attention selects its keys.

A sequence is a stream of events: it tells pairs of a key and a value, then it asks for values:

    (17, 3) (5, 8) (90, 3) ...   (5, ?) (17, ?) ...
    -------- pairs ---------     ---- asked -----

Which pair answers a question depends on the sequence alone: no pattern that is fixed beforehand has
it, and attention over all keys spends nearly everything on pairs that do not matter.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sgap_jax import SparseArray, nn


@dataclasses.dataclass(frozen=True)
class Task:
    keys: int = 512
    values: int = 16
    pairs: int = 192
    asked: int = 64

    @property
    def length(self) -> int:
        return self.pairs + self.asked

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(events [count, length, 2] of a key and a value, which is `values` where it is asked for;
        where [count, asked]: the pair that answers each question)."""
        keys = np.argsort(rng.random((count, self.keys)), axis=1)[:, : self.pairs]
        values = rng.integers(0, self.values, (count, self.pairs))
        where = np.argsort(rng.random((count, self.pairs)), axis=1)[:, : self.asked]
        asked = np.stack([np.take_along_axis(keys, where, 1), np.full_like(where, self.values)], 2)
        events = np.concatenate([np.stack([keys, values], 2), asked], axis=1)
        return events.astype(np.int32), where.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Config:
    attention: str = "tokens"  # or "blocks" or "dense"
    width: int = 128
    heads: int = 2
    kv_heads: int = 1
    top_k: int = 16
    block_size: int = 2
    num_blocks: int = 24
    steps: int = 120
    warmup: int = 60  # steps in which the indexer watches attention over all keys
    batch: int = 16
    learning_rate: float = 3e-3
    seed: int = 0


class Model(nnx.Module):
    """One layer of attention between an embedding and the logits of the values."""

    def __init__(self, task: Task, config: Config) -> None:
        rngs, width = nnx.Rngs(config.seed), config.width
        self.key = nnx.Embed(task.keys, width, rngs=rngs)
        self.value = nnx.Embed(task.values + 1, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        sizes = dict(num_heads=config.heads, in_features=width, num_kv_heads=config.kv_heads)
        if config.attention == "tokens":
            self.attention = nn.TopKSparseAttention(top_k=config.top_k, rngs=rngs, **sizes)
        elif config.attention == "blocks":
            blocks = dict(block_size=config.block_size, num_blocks=config.num_blocks)
            self.attention = nn.BlockSparseAttention(rngs=rngs, **blocks, **sizes)
        else:
            self.attention = nnx.MultiHeadAttention(decode=False, rngs=rngs, **sizes)
        # Queries start as keys, so that events of one key agree: training takes off at once.
        query, key = self.attention.query.kernel, self.attention.key.kernel
        query[...] = jnp.repeat(key[...], config.heads // config.kv_heads, axis=1)
        self.head = nnx.Linear(width, task.values, rngs=rngs)

    def inputs(self, events: jax.Array) -> jax.Array:
        """The inputs of the attention layer [batch, length, width]."""
        return self.norm(self.key(events[..., 0]) + self.value(events[..., 1]))

    def __call__(self, events: jax.Array, *, decode: bool = False) -> tuple[jax.Array, jax.Array]:
        """(logits [batch, length, values], loss of the indexer, zero where there is none)."""
        x, loss = self.inputs(events), jnp.zeros(())
        if isinstance(self.attention, nn.TopKSparseAttention) and not decode:
            y, loss = self.attention(x, return_indexer_loss=True)
        elif isinstance(self.attention, nn.TopKSparseAttention | nn.BlockSparseAttention):
            y = self.attention(x, decode=decode)
        else:
            y = self.attention(x, mask=nnx.make_causal_mask(events[..., 0]))
        return self.head(y), loss

    def chosen(self, events: jax.Array) -> SparseArray:
        """The patterns of the layer for these events."""
        return self.attention.pattern(self.inputs(events))
