"""Self-attention over keys that the layer selects while it runs, for linen."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen

from sgap_jax.formats import checks
from sgap_jax.nn.dynamic_attention import check_decode, check_index_dtype, check_options
from sgap_jax.nn.linen.attention import ProjectedAttention
from sgap_jax.nn.selection import (
    attend_blocks,
    attend_tokens,
    check_blocks,
    decode_blocks,
    decode_tokens,
)
from sgap_jax.primitives._define import accumulator, check_schedule


class SelectedAttention(ProjectedAttention):
    """What the two layers share."""

    num_kv_heads: int | None = None

    def _decoded(self, decode: Any, cached: dict, *projected: Any, **options: Any) -> Any:
        """The attention of the next positions; None where the cache is made for them."""
        if not self.has_variable("cache", "cached_key"):
            self._cache(**cached)
            return None
        variables = self._cache(**cached)
        cache = tuple(one.value for one in variables)
        x, cache = decode(type(self).__name__, cache, *projected, **options)
        for variable, now in zip(variables, cache, strict=True):
            variable.value = now
        return x


class BlockSparseAttention(SelectedAttention):
    """Self-attention over the blocks of keys that score best: see
    `sgap_jax.nn.BlockSparseAttention`, with the options of `SparseMultiHeadAttention` and its ways
    of decoding."""

    block_size: int = 64
    num_blocks: int = 16
    query_block: int = 1

    @linen.compact
    def __call__(
        self, inputs: Any, *, is_causal: bool = True, key_value_seq_lengths: Any = None
    ) -> jax.Array:
        op = type(self).__name__
        check_options(op, dict(dropout_rate=self.dropout_rate))
        check_blocks(op, self.block_size, self.num_blocks, self.query_block)
        projected = self._project(inputs, inputs, inputs, self.num_kv_heads)
        blocks: Any = dict(block_size=self.block_size, num_blocks=self.num_blocks)
        x = None
        if self.decode:
            check_decode(op, is_causal, key_value_seq_lengths)
            key, value = projected[1:]
            *leading, length, heads, width = key.shape
            shape = (*leading, length // self.block_size, heads, width)
            means = jax.ShapeDtypeStruct(shape, accumulator(key.dtype))
            cached = dict(cached_key=key, cached_value=value, cached_block=means)
            x = self._decoded(decode_blocks, cached, *projected, **blocks)
        if x is None:
            options: Any = dict(is_causal=is_causal, key_value_seq_lengths=key_value_seq_lengths)
            options |= blocks | dict(query_block=self.query_block, schedule=self.schedule)
            x = attend_blocks(op, projected, **options)
        return self._output(x, inputs.shape[-1])


class TopKSparseAttention(SelectedAttention):
    """Self-attention over the keys that a light indexer scores highest: see
    `sgap_jax.nn.TopKSparseAttention`, with the options of `SparseMultiHeadAttention` and its ways
    of decoding. `decode` is the layer's, so `return_indexer_loss` needs one without."""

    top_k: int = 2048
    index_heads: int = 4
    index_features: int = 32
    index_dtype: Any = None

    @linen.compact
    def __call__(
        self,
        inputs: Any,
        *,
        is_causal: bool = True,
        key_value_seq_lengths: Any = None,
        return_indexer_loss: bool = False,
    ) -> Any:
        op = type(self).__name__
        check_options(op, dict(dropout_rate=self.dropout_rate))
        for name in ("top_k", "index_heads", "index_features"):
            checks.check_count(getattr(self, name), name, op, 1)
        check_index_dtype(op, self.index_dtype)
        projected = self._project(inputs, inputs, inputs, self.num_kv_heads)
        indexed = self._indexed(jax.lax.stop_gradient(inputs))
        x, loss = None, None
        if self.decode:
            check_decode(op, is_causal, key_value_seq_lengths)
            if return_indexer_loss:
                raise ValueError(f"{op}: return_indexer_loss: expected without decode")
            cached = dict(
                cached_key=projected[1], cached_value=projected[2], cached_index_key=indexed[1]
            )
            x = self._decoded(decode_tokens, cached, *projected, *indexed, count=self.top_k)
        if x is None:
            x, loss = attend_tokens(
                op,
                projected,
                indexed,
                count=self.top_k,
                is_causal=is_causal,
                key_value_seq_lengths=key_value_seq_lengths,
                schedule=check_schedule(op, self.schedule),
                with_loss=return_indexer_loss,
            )
        out = self._output(x, inputs.shape[-1])
        return (out, loss) if return_indexer_loss else out

    def _indexed(self, inputs: Any) -> Any:
        options: Any = dict(use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
        query = (self.index_heads, self.index_features)
        found = [
            linen.DenseGeneral(features, name=name, **options)(inputs)
            for name, features in (
                ("index_query", query),
                ("index_key", self.index_features),
                ("index_weight", self.index_heads),
            )
        ]
        return [x if self.index_dtype is None else x.astype(self.index_dtype) for x in found]
