"""One layer of section 7.4's model, and the time of its parts, dense-masked and sparse: Figure
20."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from measure import compile_step, difference, interleaved_ms, megabytes
from model import (
    VECTOR_LENGTH,
    Block,
    ModelConfig,
    attend_dense,
    attend_sparse,
    default_mask,
    in_precision,
)
from text import VOCABULARY

from sgap_jax import sddmm, sparse_softmax, spmm

HEADS, HEAD_WIDTH, LAYERS = 4, 64, 4
WIDTH, MLP, CLASSES = HEADS * HEAD_WIDTH, 1024, 2  # LRA's byte-level text classification
LENGTHS, SPARSITIES = (2048, 4096, 8192), (0.9, 0.95, 0.98)
SCALE = 1 / math.sqrt(HEAD_WIDTH)
ROUNDING = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}  # scores are rounded between steps
PARTS = ("projections", "scores", "softmax", "product", "others")


def paper_config(length: int) -> ModelConfig:
    return ModelConfig(VOCABULARY, CLASSES, length, WIDTH, HEADS, LAYERS, MLP)


def paper_mask(length: int, sparsity: float = 0.9):
    """A band of 256 keys and random ones; if a row has far fewer keys than in the paper's mask (400
    of 4000), the band is two thirds of them."""
    stored = (1 - sparsity) * length
    band = min(256, int(2 / 3 * stored) // VECTOR_LENGTH * VECTOR_LENGTH)
    return default_mask(length, density=1 - sparsity, band=max(band, VECTOR_LENGTH))


def sparse_steps(mask):
    """(scores, softmax, product) of q, k, v [heads, length, d], at the stored entries."""
    scores = jax.vmap(lambda q, k: sddmm(mask, q, k).values)
    softmax = jax.vmap(lambda s: sparse_softmax(mask.with_values(s), scale=SCALE).values)
    product = jax.vmap(lambda p, v: spmm(mask.with_values(p), v))
    return scores, softmax, product


def dense_steps(mask):
    """The same for a mask bool [length, length]; scores and probabilities are full matrices."""

    def scores(q, k):
        s = jnp.einsum("hld,hsd->hls", q, k)
        return jnp.where(mask, s, jnp.asarray(-jnp.inf, s.dtype))

    def softmax(s):
        return jax.nn.softmax(s * SCALE, axis=-1)

    def product(p, v):
        return jnp.einsum("hls,hsd->hld", p, v)

    return scores, softmax, product


def layer_steps(length: int, sparsity: float | None, dtype: str, seed: int = 0) -> dict:
    """{part: (compiled, arguments)} of one layer and one sequence; dense-masked if sparsity is
    None."""
    mask = paper_mask(length, sparsity or 0.9)
    mask, steps, attend = (
        (mask, sparse_steps, attend_sparse)
        if sparsity is not None
        else (mask.todense() != 0, dense_steps, attend_dense)
    )
    definition, weights = nnx.split(
        in_precision(Block(paper_config(length), nnx.Rngs(seed)), dtype)
    )
    keys = jax.random.split(jax.random.key(seed), 3)
    x, y = (jax.random.normal(key, (1, length, WIDTH)).astype(dtype) for key in keys[:2])
    q, k, v = jax.random.normal(keys[2], (3, HEADS, length, HEAD_WIDTH)).astype(dtype)
    lengths = jnp.full(1, length)

    def projections(weights, x, y):
        block = nnx.merge(definition, weights)
        return block.qkv(x), block.out(y.reshape(*y.shape[:-1], HEADS, HEAD_WIDTH))

    def others(weights, x, y):
        block = nnx.merge(definition, weights)
        normal, x = block.attention_norm(x), x + y
        return normal, x + block.feed_forward(x)

    def layer(weights, mask, x, lengths):
        return nnx.merge(definition, weights)(x, lengths, mask, attend)

    made = {"scores": compile_step(lambda mask, q, k: steps(mask)[0](q, k), mask, q, k)}
    made["softmax"] = compile_step(lambda mask, s: steps(mask)[1](s), mask, _run(made["scores"]))
    made["product"] = compile_step(
        lambda mask, p, v: steps(mask)[2](p, v), mask, _run(made["softmax"]), v
    )
    wide = [jnp.moveaxis(each, 0, 1)[None] for each in (q, k, v)]
    return {
        "projections": compile_step(projections, weights, x, y),
        **made,
        "others": compile_step(others, weights, x, y),
        "attention": compile_step(attend, mask, *wide, lengths),
        "layer": compile_step(layer, weights, mask, x, lengths),
    }


def _run(step):
    compiled, arguments = step
    return jax.block_until_ready(compiled(*arguments))


def measure_layer(length: int, sparsity: float | None, dtype: str, seconds: float) -> dict:
    """Measures a row; raises ArithmeticError if the steps disagree with the model's attention."""
    steps = layer_steps(length, sparsity, dtype)
    whole, apart = (_run(steps[name]) for name in ("attention", "product"))
    apart = difference([jnp.moveaxis(apart, 0, 1)[None]], [whole])
    if not apart < ROUNDING[dtype]:
        raise ArithmeticError(f"layer, length {length}: steps differ from attention by {apart:.1e}")
    del whole
    for name in ("projections", "others", "layer"):  # warm-up
        _run(steps[name])
    memory = {name: megabytes(steps[name][0]) for name in ("attention", "layer")}
    return {"difference": apart, "ms": interleaved_ms(steps, seconds), "MB": memory}


def layer_table(rows: list[dict]) -> str:
    """The rows as text; speedups are of the whole layer over the dense-masked one of the same
    length."""
    names = (*PARTS, "attention", "layer")
    head = "".join(f"{name:>12}" for name in names)
    lines = [f"{'length':>6}{'sparsity':>9}{head}{'speedup':>9}{'layer, MB':>11}"]
    dense = {row["length"]: row["ms"]["layer"] for row in rows if row["sparsity"] is None}
    for row in rows:
        sparsity = "dense" if row["sparsity"] is None else f"{row['sparsity']:.0%}"
        line = f"{row['length']:6}{sparsity:>9}"
        line += "".join(f"{row['ms'][name]:12.2f}" for name in names)
        over = dense.get(row["length"])
        line += f"{over / row['ms']['layer']:8.1f}x" if over else f"{'-':>9}"
        lines.append(line + f"{row['MB']['layer']:11.1f}")
    return "\n".join(lines)
