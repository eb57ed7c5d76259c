"""A transformer classifier with sparse attention, in Flax nnx, and its dense-masked twin.

Attention, with Q, K, V [length, d] of one head of one sequence and a fixed mask C (vectorSparse,
section 7.4, eq. 1):

    Attention(Q, K, V) = A V,   A = softmax((Q K^T o C) / sqrt(d))

is `sgap_jax.sparse_attention`: scores only where C stores an entry, their softmax and the product
with V in one pass. No array of size length x length, or of the size of the mask, is made.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from sgap_jax import SparseArray, masks, parallel, sparse_attention

PADDING = 0
VECTOR_LENGTH = 8


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocabulary: int
    classes: int
    length: int
    width: int = 64
    heads: int = 4
    layers: int = 2
    mlp: int = 128
    heads_axis: str = ""  # the axis of the mesh (`jax.set_mesh`) that splits heads, if one does

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"model: {self.heads} heads do not divide a width of {self.width}")


def default_mask(
    length: int, *, density: float = 0.1, band: int | None = None, seed: int = 0
) -> SparseArray:
    """The mask of section 7.4 in 8 x 1 vectors: a band (if None 1/16 of the length, 256 of 4096
    keys), and as many random keys as make up the density."""
    if band is None:
        band = max(VECTOR_LENGTH, length // 16 // VECTOR_LENGTH * VECTOR_LENGTH)
    return masks.band_and_random(length, band, 1 - density, VECTOR_LENGTH, seed)


def attend_sparse(mask: SparseArray, q, k, v, lengths):
    """q, k, v [batch, length, heads, d], lengths int [batch] without the padding -> shaped like
    q."""
    return sparse_attention(q, k, v, mask, key_value_seq_lengths=lengths)


def attend_in_parts(mask: parallel.PartitionedArray, q, k, v, lengths, batch_axis=None):
    """The same with the sequence split over devices, which receive the keys that they see."""
    return parallel.sparse_attention(
        q, k, v, mask, key_value_seq_lengths=lengths, batch_axis=batch_axis
    )


def attend_dense(mask: jax.Array, q, k, v, lengths):
    """The same for a mask bool [length, length]; here too a row without any key gives zeros."""
    scores = jnp.einsum("blhd,bshd->bhls", q / math.sqrt(q.shape[-1]), k)
    present = jnp.arange(k.shape[1]) < lengths[:, None]
    scores = jnp.where(mask & present[:, None, None], scores, -jnp.inf)
    highest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0))
    total = jnp.moveaxis(weights.sum(axis=-1, keepdims=True, dtype=jnp.float32), 1, 2)
    # Divided after the product: before it, XLA computes the exponentials more than once.
    out = jnp.einsum("bhls,bshd->blhd", weights, v, preferred_element_type=jnp.float32)
    return (out / jnp.where(total == 0, 1, total)).astype(q.dtype)


class Structure(nnx.Variable):
    """The mask as state that is not trained: `jit` takes it as an argument, not as a constant."""


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(x), an MLP of norm(x)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width, heads = config.width, (config.heads, config.width // config.heads)
        axis = config.heads_axis
        qkv_axes, out_axes = (None, None, axis, None), (axis, None, None)
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.LinearGeneral(
            width,
            (3, *heads),
            use_bias=False,
            kernel_metadata={"out_sharding": qkv_axes} if axis else {},
            rngs=rngs,
        )
        self.out = nnx.LinearGeneral(
            heads,
            width,
            axis=(-2, -1),
            kernel_metadata={"out_sharding": out_axes} if axis else {},
            rngs=rngs,
        )
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, config.mlp, rngs=rngs)
        self.down = nnx.Linear(config.mlp, width, rngs=rngs)

    def __call__(self, x, lengths, mask, attention: Callable):
        q, k, v = jnp.moveaxis(self.qkv(self.attention_norm(x)), 2, 0)  # [batch, length, heads, d]
        x = x + self.out(attention(mask, q, k, v, lengths))
        return x + self.feed_forward(x)

    def feed_forward(self, x):
        return self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Classifier(nnx.Module):
    """tokens int [batch, length], padded with zeros -> logits [batch, classes]."""

    def __init__(self, config: ModelConfig, mask: SparseArray, *, rngs: nnx.Rngs):
        if mask.shape != (config.length, config.length):
            raise ValueError(f"model: mask of shape {mask.shape} for sequences of {config.length}")
        self.mask = Structure(mask)
        self.attention = attend_sparse
        scale = jax.nn.initializers.normal(0.02)
        embed = functools.partial(nnx.Embed, features=config.width, embedding_init=scale, rngs=rngs)
        self.token = embed(config.vocabulary)
        self.position = embed(config.length)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.pool = nnx.Linear(config.width, 1, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(config.width, config.classes, rngs=rngs)

    def __call__(self, tokens):
        present = tokens != PADDING
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x, present.sum(axis=-1), self.mask.get_value(), self.attention)
        x = self.norm(x)
        # Pooling: a weighted mean over the tokens that are present, the weights learned.
        share = jax.nn.softmax(self.pool(x), axis=-2, where=present[..., None])
        return self.head(jnp.sum(share * x, axis=-2))


def in_parts(model: Classifier, mesh: jax.sharding.Mesh, axis: str, batch_axis=None) -> Classifier:
    """A copy with the same weights whose sequences are split over an axis of the mesh: tokens are
    jax.P(batch_axis, axis)."""
    copy = nnx.clone(model)
    copy.mask = Structure(parallel.partition(model.mask.get_value(), mesh, axis, rows="even"))
    copy.attention = functools.partial(attend_in_parts, batch_axis=batch_axis)
    return copy


def dense_twin(model: Classifier) -> Classifier:
    """A copy with the same weights that computes and masks the full length x length matrix."""
    twin = nnx.clone(model)
    twin.mask = Structure(model.mask.get_value().todense() != 0)
    twin.attention = attend_dense
    return twin


def in_precision(model: nnx.Module, dtype: str):
    """A copy whose weights, and thus its activations, are rounded to the dtype."""
    copy = nnx.clone(model)
    weights = nnx.state(copy, nnx.Param)
    nnx.update(copy, jax.tree.map(lambda x: x.astype(dtype), weights))
    for _, module in nnx.iter_modules(copy):
        if isinstance(
            module, nnx.Embed
        ):  # gives the type it was made with, not that of its weights
            module.dtype = dtype
    return copy


def variants(model: Classifier, half: str) -> dict[str, Classifier]:
    """The columns of Table 4 in section 7.4, plus sparse in float32: the same weights in four ways;
    `half` is "float16" or "bfloat16"."""
    ways = {"dense": dense_twin(model), "sparse": model}
    return {
        f"{way} {dtype}": in_precision(one, dtype)
        for way, one in ways.items()
        for dtype in ("float32", half)
    }
