"""Self-attention over keys that the layer selects while it runs: blocks, or single tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgap_jax.formats import checks
from sgap_jax.formats.array import SparseArray
from sgap_jax.nn.attention import ProjectedAttention
from sgap_jax.nn.selection import (
    attend_blocks,
    attend_tokens,
    check_blocks,
    decode_blocks,
    decode_tokens,
    flat_sequences,
    key_lengths,
    select_blocks,
    select_tokens,
)
from sgap_jax.primitives._define import accumulator, check_schedule
from sgap_jax.schedules import Schedule
from sgap_jax.schedules.schedule import KERNEL_DTYPES


def check_options(op: str, options: dict[str, Any]) -> None:
    """Refuses options of Flax's layer that selected attention does not have."""
    if "attention_fn" in options:
        raise ValueError(f"{op}: attention_fn is sparse_attention; nnx.MultiHeadAttention asks")
    if options.get("dropout_rate"):
        raise NotImplementedError(
            f"{op}: dropout_rate: the weights have no dropout; the nearest is dropout of the output"
        )


def check_decode(op: str, is_causal: bool, lengths: Any) -> None:
    if not is_causal or lengths is not None:
        given = "key_value_seq_lengths" if is_causal else "is_causal=False"
        raise ValueError(f"{op}: decode: expected a causal sequence without padding, got {given}")


def check_index_dtype(op: str, dtype: Any) -> Any:
    """`dtype`, if it is None or one of the kernels' dtypes."""
    try:
        known = dtype is None or jnp.dtype(dtype).name in KERNEL_DTYPES
    except TypeError:
        known = False
    if not known:
        expected = f"None or one of {', '.join(KERNEL_DTYPES)}"
        raise ValueError(f"{op}: index_dtype: expected {expected}, got {dtype!r}")
    return dtype


class SelectedAttention(ProjectedAttention):
    """What the two layers share: self-attention over a selection of its own."""

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None,
        out_features: int | None,
        num_kv_heads: int | None,
        schedule: Schedule | str | None,
        rngs: nnx.Rngs,
        options: dict[str, Any],
    ) -> None:
        op = type(self).__name__
        check_options(op, options)
        schedule = check_schedule(op, schedule)
        sizes = (num_heads, in_features, qkv_features, out_features, num_kv_heads)
        super().__init__(*sizes, rngs=rngs, **({"decode": False} | options))
        if self.in_kv_features != in_features:
            raise ValueError(
                f"{op}: in_kv_features: keys are of the same inputs, of {in_features} features, "
                f"got {self.in_kv_features}"
            )
        self.schedule = schedule

    def _decoded(self, decode: Any, more: nnx.Cache | None, *projected: Any, **options: Any) -> Any:
        """The output for the next positions; the cache is written where nothing was refused."""
        key, value, index = self._cache()
        assert more is not None
        variables = (key, value, more, index)
        cache = tuple(one[...] for one in variables)
        x, cache = decode(type(self).__name__, cache, *projected, **options)
        for variable, now in zip(variables, cache, strict=True):
            variable[...] = now
        return self.out(x)


class BlockSparseAttention(SelectedAttention):
    """Self-attention in which queries see the blocks of keys that score best.

        score[i, J] = (mean of q over block I of i and the heads of its group) . (mean of k over J)
        seen[i] = block 0, the own block and the best of the others, num_blocks in all
        out = concat over heads of softmax(q K^T / sqrt(D) over the keys seen) V  W_out + b_out

    A group are the heads of q that share a head of k (GQA). Parameters are those of
    `nnx.MultiHeadAttention`, by name and shape. Scores are float32 at least and have no gradient:
    keys and queries learn through the attention only, as in MoBA. Attention over the chosen blocks
    is `sparse_attention`: no array of length x length is made.

    Args:
      num_heads, in_features, qkv_features, out_features, num_kv_heads, rngs and the options of
        `nnx.MultiHeadAttention`, among them normalize_qk and decode, without dropout.
      block_size: keys of a block.
      num_blocks: how many blocks a query sees at most, at least 2.
      query_block: how many queries select together, a divisor of the block size. With 1 each query
        selects for itself, as in MoBA and NSA: causal, and decoding gives the outputs of a whole
        pass. With more, a pattern of blocks (`BCSR(query_block, block_size)`) is selected faster
        and has fewer indices, but what a query sees depends on the later queries of its block: for
        encoders and prompts.
      schedule: of `sparse_attention` over whole sequences.

    Called with (inputs [..., length, in_features]) and the keywords is_causal (default True: keys
    up to the query, blocks up to its own), key_value_seq_lengths (integers [...], or one: keys from
    there on are padding) and decode. NaN or infinity in a key or value of a block reaches all
    queries that see the block, also those before it, as in `sparse_attention`.

    With `decode` (of the layer or of a call) a call takes the next positions, one or several, and
    adds them to a cache that `init_cache(shape of the whole input, dtype)` makes: keys, values, and
    means of whole blocks of keys, `cached_block`. Each position selects for itself, as with
    query_block = 1. Positions past the end behave as in `SparseMultiHeadAttention`. Setting
    `cache_index` back takes positions back.

    Returns:
      [..., length, out_features] in the dtype of Flax's layer.

    Raises:
      ValueError: sizes that do not fit, num_blocks < 2, a query_block that does not divide the
        block; when decoding, no cache, or an argument for whole sequences only.
      NotImplementedError: dropout.

    Source: MoBA (Lu et al. 2025), section 2.2; NSA (Yuan et al. 2025), section 3.3.2, of which this
    is the selection branch, with means in place of a learned compression.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        *,
        block_size: int = 64,
        num_blocks: int = 16,
        query_block: int = 1,
        schedule: Schedule | str | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        check_blocks("BlockSparseAttention", block_size, num_blocks, query_block)
        sizes = (num_heads, in_features, qkv_features, out_features, num_kv_heads)
        super().__init__(*sizes, schedule, rngs, options)
        self.block_size, self.num_blocks, self.query_block = block_size, num_blocks, query_block
        self.cached_block: nnx.Cache[jax.Array] | None = nnx.data(None)

    @classmethod
    def from_dense(
        cls,
        layer: nnx.MultiHeadAttention,
        *,
        block_size: int = 64,
        num_blocks: int = 16,
        query_block: int = 1,
        schedule: Schedule | str | None = None,
    ) -> BlockSparseAttention:
        """A layer with the options of `layer`, which has no dropout, and copies of its
        parameters."""
        blocks = dict(block_size=block_size, num_blocks=num_blocks, query_block=query_block)
        return cls._from_dense(layer, nnx.Rngs(0), schedule=schedule, **blocks)

    def init_cache(self, input_shape: Any, dtype: Any = jnp.float32) -> None:
        super().init_cache(input_shape, dtype)
        *leading, length, _ = input_shape
        shape = (*leading, length // self.block_size, self.num_kv_heads, self.head_dim)
        self.cached_block = nnx.Cache(jnp.zeros(shape, accumulator(jnp.dtype(dtype))))

    def pattern(
        self, inputs: Any, *, is_causal: bool = True, key_value_seq_lengths: Any = None
    ) -> SparseArray:
        """The blocks that are selected: patterns [length, length] with leading axes [..., Hk], one
        for each group of heads; its values are the scores."""
        query, key, _ = self._project(inputs, inputs, inputs)
        leading = inputs.shape[:-2]
        lengths = key_lengths(type(self).__name__, key_value_seq_lengths, leading)
        q, k = flat_sequences(leading, query, key)
        found = select_blocks(q, k, is_causal=is_causal, lengths=lengths, **self._blocks())
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), found)

    def _blocks(self) -> dict[str, Any]:
        return dict(
            block_size=self.block_size, num_blocks=self.num_blocks, query_block=self.query_block
        )

    def __call__(  # type: ignore[override]
        self,
        inputs: Any,
        *,
        is_causal: bool = True,
        key_value_seq_lengths: Any = None,
        decode: bool | None = None,
    ) -> jax.Array:
        """The attention of inputs [..., length, in_features]: see the class."""
        op = type(self).__name__
        projected = self._project(inputs, inputs, inputs)
        if self.decode if decode is None else decode:
            check_decode(op, is_causal, key_value_seq_lengths)
            options: Any = dict(block_size=self.block_size, num_blocks=self.num_blocks)
            return self._decoded(decode_blocks, self.cached_block, *projected, **options)
        options = dict(is_causal=is_causal, key_value_seq_lengths=key_value_seq_lengths)
        x = attend_blocks(op, projected, schedule=self.schedule, **options, **self._blocks())
        return self.out(x)


class TopKSparseAttention(SelectedAttention):
    """Self-attention in which a query sees the keys that a light indexer scores highest.

        I[t, s] = sum_h w[t, h] relu(q_I[t, h] . k_I[s]) / sqrt(index_heads index_features)
        query t sees   the top_k keys of greatest I[t, s], of those s <= t if causal
        out = concat over heads of softmax(q K^T / sqrt(D) over the keys seen) V  W_out + b_out

    with q_I, k_I and w linear in the inputs: parameters `index_query`, `index_key` and
    `index_weight`, beside those of `nnx.MultiHeadAttention`. All heads of a query see the same keys
    (num_kv_heads=1, multi-query attention, reads them once). Scores are float32 at least, computed
    for some rows at a time: no array of length x length is made.

    The selection has no gradient, so the loss of a model does not reach the indexer, which learns
    from the layer's attention (`return_indexer_loss`):

        loss = mean over queries t of KL(p[t] || softmax(I[t])),   both over the selected keys,

    with p[t] the sum over the heads of the attention weights, scaled to sum 1, a constant; the
    indexer's inputs are constants too, so the loss trains its parameters and nothing else: add it
    to the model's. (DeepSeek sums over queries.)

    Args:
      num_heads, in_features, qkv_features, out_features, num_kv_heads, rngs and the options of
        `nnx.MultiHeadAttention`, among them normalize_qk and decode, without dropout.
      top_k: how many keys a query sees at most.
      index_heads, index_features: heads of the indexer, and the features of each.
      index_dtype: what q_I, k_I and w are rounded to before the scores, by default the layer's
        dtype (DeepSeek's indexer has 8 bits). With bfloat16 the selection takes less time where a
        processor has matrix tiles (0.6 to 0.7 at a length of 4,096, 0.95 at 16,384).
      schedule: of `sparse_attention` over whole sequences.

    Called with (inputs [..., length, in_features]) and the keywords is_causal (default True),
    key_value_seq_lengths (integers [...], or one: keys from there on are padding; in the mean of
    the loss these queries do not count), return_indexer_loss and decode.

    With `decode` (of the layer or of a call) a call takes the next positions, one or several, and
    adds them to a cache that `init_cache(shape of the whole input, dtype)` makes: keys, values and
    keys of the indexer, `cached_index_key`. Outputs are those of a causal call over the whole
    sequence. Positions past the end behave as in `SparseMultiHeadAttention`.

    Returns:
      [..., length, out_features] in the dtype of Flax's layer; with return_indexer_loss (that, a
      scalar).

    Raises:
      ValueError: sizes that do not fit; when decoding, no cache, or an argument for whole sequences
        only. NotImplementedError: dropout.

    Source: DeepSeek-V3.2-Exp (2025), section 2, equations 1 to 4; its rotary embeddings and the
    normalisation of k_I are left to the caller.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        *,
        top_k: int = 2048,
        index_heads: int = 4,
        index_features: int = 32,
        index_dtype: Any = None,
        schedule: Schedule | str | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        op = "TopKSparseAttention"
        counts = dict(top_k=top_k, index_heads=index_heads, index_features=index_features)
        for name, count in counts.items():
            checks.check_count(count, name, op, 1)
        sizes = (num_heads, in_features, qkv_features, out_features, num_kv_heads)
        super().__init__(*sizes, schedule, rngs, options)
        self.top_k, self.index_heads, self.index_features = top_k, index_heads, index_features
        self.index_dtype = check_index_dtype(op, index_dtype)
        own: Any = dict(use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype, rngs=rngs)
        self.index_query = nnx.LinearGeneral(in_features, (index_heads, index_features), **own)
        self.index_key = nnx.Linear(in_features, index_features, **own)
        self.index_weight = nnx.Linear(in_features, index_heads, **own)
        self.cached_index_key: nnx.Cache[jax.Array] | None = nnx.data(None)

    def init_cache(self, input_shape: Any, dtype: Any = jnp.float32) -> None:
        super().init_cache(input_shape, dtype)
        shape = (*input_shape[:-1], self.index_features)
        self.cached_index_key = nnx.Cache(jnp.zeros(shape, dtype))

    def pattern(
        self, inputs: Any, *, is_causal: bool = True, key_value_seq_lengths: Any = None
    ) -> SparseArray:
        """The keys that are selected: patterns [length, length] with leading axes [..., 1], the
        same for all heads."""
        leading = inputs.shape[:-2]
        lengths = key_lengths(type(self).__name__, key_value_seq_lengths, leading)
        own: Any = flat_sequences(leading, *self._indexed(inputs))
        found = select_tokens(*own, count=self.top_k, is_causal=is_causal, lengths=lengths)
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), found)

    def _indexed(self, inputs: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q_I [..., length, index_heads, index_features], k_I and w."""
        inputs = jax.lax.stop_gradient(inputs)
        found = self.index_query(inputs), self.index_key(inputs), self.index_weight(inputs)
        q, k, w = (x if self.index_dtype is None else x.astype(self.index_dtype) for x in found)
        return q, k, w

    def __call__(  # type: ignore[override]
        self,
        inputs: Any,
        *,
        is_causal: bool = True,
        key_value_seq_lengths: Any = None,
        return_indexer_loss: bool = False,
        decode: bool | None = None,
    ) -> Any:
        """The attention of inputs [..., length, in_features]: see the class."""
        op = type(self).__name__
        projected, indexed = self._project(inputs, inputs, inputs), self._indexed(inputs)
        if self.decode if decode is None else decode:
            check_decode(op, is_causal, key_value_seq_lengths)
            if return_indexer_loss:
                raise ValueError(f"{op}: return_indexer_loss: expected without decode")
            options: Any = dict(count=self.top_k)
            cached = self.cached_index_key
            return self._decoded(decode_tokens, cached, *projected, *indexed, **options)
        out, loss = attend_tokens(
            op,
            projected,
            indexed,
            count=self.top_k,
            is_causal=is_causal,
            key_value_seq_lengths=key_value_seq_lengths,
            schedule=self.schedule,
            with_loss=return_indexer_loss,
        )
        return (self.out(out), loss) if return_indexer_loss else self.out(out)
