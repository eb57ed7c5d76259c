"""Attention over keys that are selected by scores of the inputs, for the layers of nnx and linen.

Blocks: a block of queries of one group of heads (those that share a head of k) sees whole blocks of
keys. Tokens: all heads of a query see the same keys, which a light indexer scores. Selections have
no derivative; the indexer learns from `indexer_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats import checks, structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import BCSR, CSR, Format
from sgap_jax.nn.decoding import next_index, next_positions
from sgap_jax.primitives._define import accumulator
from sgap_jax.primitives.attention import sparse_attention
from sgap_jax.primitives.row_reduce import row_max, row_sum
from sgap_jax.primitives.sddmm import sddmm
from sgap_jax.primitives.sparse_softmax import sparse_softmax
from sgap_jax.primitives.top_k import top_k_of_indexer
from sgap_jax.schedules import Schedule
from sgap_jax.select.rows import top_k

# Fewer rows, of a decoding step, are selected from all their scores at once on other platforms.
_LEAST_ROWS = 16


def flat_sequences(leading: Sequence[int], *arrays: jax.Array) -> list[jax.Array]:
    """Arrays [*leading, length, ...] with one leading axis."""
    return [x.reshape(math.prod(leading), *x.shape[len(leading) :]) for x in arrays]


def check_blocks(op: str, block_size: Any, num_blocks: Any, query_block: Any) -> None:
    checks.check_count(block_size, "block_size", op, 1)
    checks.check_count(num_blocks, "num_blocks", op, 2)  # the first block and the query's own
    if block_size % checks.check_count(query_block, "query_block", op, 1):
        raise ValueError(
            f"{op}: query_block: expected a divisor of the block size {block_size}, got "
            f"{query_block}"
        )


def key_lengths(op: str, lengths: Any, leading: Sequence[int]) -> jax.Array | None:
    """The lengths [B] int32 of B = prod(leading) sequences; None for None."""
    if lengths is None:
        return None
    lengths = checks.as_array(lengths)
    fits = lengths.shape in ((), tuple(leading))
    if not fits or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{op}: key_value_seq_lengths must be integers of shape {list(leading)}, got "
            f"{list(lengths.shape)} of {lengths.dtype}"
        )
    return jnp.broadcast_to(checks.saturated(lengths), tuple(leading)).reshape(-1)


# ---- blocks -------------------------------------------------------------------------------------


def attend_blocks(
    op: str,
    projected: Sequence[jax.Array],
    *,
    is_causal: bool,
    key_value_seq_lengths: Any,
    schedule: Schedule | None,
    **blocks: Any,
) -> jax.Array:
    """Attention of whole sequences: projected q, k, v [..., L, heads, D] -> like q; `blocks` are
    block_size, num_blocks and query_block."""
    shape = projected[0].shape
    lengths = key_lengths(op, key_value_seq_lengths, shape[:-3])
    q, k, v = flat_sequences(shape[:-3], *projected)
    options: Any = dict(is_causal=is_causal, schedule=schedule)
    return _attend_blocks(q, k, v, lengths, **options, **blocks).reshape(shape)


# Under jit, so that the values of the pattern, which nothing reads, are not made in eager calls.
@partial(
    jax.jit,
    static_argnames=("is_causal", "schedule", "block_size", "num_blocks", "query_block"),
    inline=True,
)
def _attend_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array | None,
    *,
    is_causal: bool,
    schedule: Schedule | None,
    **blocks: int,
) -> jax.Array:
    pattern = select_blocks(q, k, is_causal=is_causal, lengths=lengths, **blocks)
    options: Any = dict(is_causal=is_causal, key_value_seq_lengths=lengths, schedule=schedule)
    return sparse_attention(q, k, v, pattern, **options)


def select_blocks(
    q: jax.Array,
    k: jax.Array,
    *,
    block_size: int,
    num_blocks: int,
    query_block: int,
    is_causal: bool,
    lengths: jax.Array | None,
) -> SparseArray:
    """Patterns [L, S] in BCSR(query_block, block_size) with leading axes [B, Hk] of q [B, L, H, D]
    and k [B, S, Hk, D]: see `BlockSparseAttention`."""
    q, k = jax.lax.stop_gradient((q, k))
    (_, L, *_), S = q.shape, k.shape[1]
    means = _blocks(k, block_size, lengths)
    rows, blocks = -(-L // query_block), means.shape[1]
    queries = _blocks(_of_groups(q, k.shape[2]), query_block, None)
    own = structure.positions(rows) * query_block // block_size
    limits = jnp.full(rows, blocks, jnp.int32)
    if lengths is not None:
        present = (jnp.clip(lengths, 0, S) + block_size - 1) // block_size
        limits = jnp.minimum(limits[None], present[:, None])
    options: Any = dict(format=BCSR(query_block, block_size), shape=(L, S), causal=is_causal)
    # As a pair: of many rows the scores are computed a tile at a time, and never held as a whole.
    wide = jnp.result_type(queries, means)
    pair = queries.astype(wide), means.astype(wide)
    return _top_blocks(pair, num_blocks, limits, own, **options)


def _of_groups(q: jax.Array, groups: int) -> jax.Array:
    """[B, L, Hk, D]: the mean of q over the heads of each group."""
    q = q.astype(accumulator(q.dtype))
    if q.shape[2] == groups:  # XLA would write q once more
        return q
    return q.reshape(*q.shape[:2], groups, q.shape[2] // groups, q.shape[3]).mean(3)


def _blocks(x: jax.Array, size: int, lengths: jax.Array | None) -> jax.Array:
    """[B, blocks, heads, D]: the means of x [B, L, heads, D] over blocks of positions, as far as
    these are before L and before lengths [B]."""
    B, L, *rest = x.shape
    count, wide = -(-L // size), accumulator(x.dtype)
    ends = jnp.full(1, L, jnp.int32) if lengths is None else jnp.clip(lengths, 0, L)
    x = x.astype(wide)
    if size == 1 and lengths is None:
        return x
    if lengths is not None:  # XLA would write all of x once more
        inside = structure.positions(L)[None] < ends[:, None]
        x = jnp.where(inside[..., None, None], x, jnp.zeros((), wide))
    padded = jnp.pad(x, ((0, 0), (0, count * size - L), (0, 0), (0, 0)))
    sums = padded.reshape(B, count, size, *rest).sum(2)
    present = jnp.clip(ends[:, None] - structure.positions(count)[None] * size, 1, size)
    return sums / present[..., None, None].astype(wide)


def _block_scores(queries: jax.Array, means: jax.Array) -> jax.Array:
    """[B, Hk, rows, blocks] of [B, rows, Hk, D] and [B, blocks, Hk, D]."""
    return jnp.einsum("bmhd,bnhd->bhmn", queries, means)


def _top_blocks(
    scores: jax.Array | tuple[jax.Array, jax.Array],
    count: int,
    limits: jax.Array,
    own: jax.Array,
    **options: Any,
) -> SparseArray:
    """The first block, each row's own and the best of the others before limits [rows] or
    [B, rows]: of scores [B, Hk, rows, blocks], or of a pair [B, rows, Hk, D] and
    [B, blocks, Hk, D] whose products they are."""

    def of_sequence(scores: Any, limits: jax.Array) -> SparseArray:
        def of_group(scores: Any) -> SparseArray:
            return _top_of_group(scores, limits, own, count=count, **options)

        return jax.vmap(of_group, in_axes=1 if isinstance(scores, tuple) else 0)(scores)

    return jax.vmap(of_sequence, in_axes=(0, None if limits.ndim == 1 else 0))(scores, limits)


@structure.in_auto_axes
@partial(jax.jit, static_argnames=("count", "format", "shape", "causal"), inline=True)
def _top_of_group(
    scores: Any,
    limits: jax.Array,
    own: jax.Array,
    *,
    count: int,
    format: Format = CSR,
    shape: tuple[int, int] | None = None,
    causal: bool = False,
) -> SparseArray:
    def keep(rows: jax.Array, blocks: jax.Array) -> jax.Array:
        return (blocks == own[rows]) | (blocks == 0)

    options: Any = dict(format=format, shape=shape, causal=causal)
    return top_k(scores, count, lengths=limits, keep=keep, **options)


def decode_blocks(
    op: str,
    cache: Sequence[jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    block_size: int,
    num_blocks: int,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(out, cache): the next positions, each of which selects blocks of the cache (keys, values,
    means of whole blocks of keys [..., blocks, Hk, D], index) for itself."""
    *cached, means, index = cache
    (keys, values), position, seen = _written(op, cached, index, query, (key, value))
    means = _new_means(means, keys, position, block_size)
    B, leading = math.prod(query.shape[:-3]), query.shape[:-3]
    q, wide_keys, wide_values, of_blocks = (
        x.reshape(B, *x.shape[-3:])
        for x in (query, keys.astype(query.dtype), values.astype(query.dtype), means)
    )
    (_, T, *_), (_, S, Hk, _) = q.shape, wide_keys.shape
    # The last block is no whole one, or its query's own: what its score is does not matter.
    blocks = -(-S // block_size)
    of_blocks = jnp.pad(of_blocks, ((0, 0), (0, blocks - of_blocks.shape[1]), (0, 0), (0, 0)))
    queries = jax.lax.stop_gradient(_of_groups(q, Hk)).astype(of_blocks.dtype)
    own = position // block_size
    limits = jnp.where(seen, own + 1, 0)
    chosen = _top_blocks(_block_scores(queries, of_blocks), num_blocks, limits, own)
    offsets, of_row = _flat_rows(*chosen.index_arrays[1])
    # Of a row's blocks, which ascend, only the last is cut: at the query itself.
    width = min(num_blocks, blocks) * block_size
    stored, at = jnp.diff(offsets), structure.positions(B * Hk * T)
    last = position[at % T] % block_size + 1
    counts = jnp.where(stored > 0, (stored - 1) * block_size + last, 0)
    ends, row, inside = _rows_of(counts, B * Hk * T * width)
    entry = structure.positions(row.shape[0]) - ends[row]
    slot = jnp.where(inside, offsets[row] + entry // block_size, 0)
    token = of_row[slot] * block_size + entry % block_size
    group = row // T  # of sequence group // Hk, and of head group % Hk
    columns = jnp.where(inside, (group // Hk * S + token) * Hk + group % Hk, 0)
    out = _attend_rows(q, wide_keys, wide_values, ends, columns, Hk)
    after = next_index(index, query.shape[-3])
    return out.reshape(*leading, *out.shape[1:]), (keys, values, means, after)


def _new_means(means: jax.Array, keys: jax.Array, position: jax.Array, size: int) -> jax.Array:
    """The means of whole blocks of keys, where those that hold the new positions are computed anew:
    so it does not matter what was at positions from these on."""
    whole = means.shape[-3]
    count = min((position.shape[0] - 1) // size + 2, whole)
    if not count or not position.shape[0]:
        return means
    begin = jnp.clip(position[0] // size, 0, whole - count)
    axis = keys.ndim - 3
    window = jax.lax.dynamic_slice_in_dim(keys, begin * size, count * size, axis)
    window = jax.lax.stop_gradient(window).astype(means.dtype)
    new = window.reshape(*keys.shape[:axis], count, size, *keys.shape[-2:]).mean(axis + 1)
    return jax.lax.dynamic_update_slice_in_dim(means, new, begin, axis)


# ---- tokens -------------------------------------------------------------------------------------


def attend_tokens(
    op: str,
    projected: Sequence[jax.Array],
    indexed: Sequence[jax.Array],
    *,
    count: int,
    is_causal: bool,
    key_value_seq_lengths: Any,
    schedule: Schedule | None,
    with_loss: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """(attention of whole sequences like q, the indexer's loss or None): projected q, k, v
    [..., L, heads, D], and the indexer's q, k and weights."""
    shape = projected[0].shape
    lengths = key_lengths(op, key_value_seq_lengths, shape[:-3])
    q, k, v, *own = flat_sequences(shape[:-3], *projected, *indexed)
    index_query, index_key, index_weight = own
    pattern = select_tokens(
        index_query, index_key, index_weight, count=count, is_causal=is_causal, lengths=lengths
    )
    # The selection has left out what is not causal, or padding.
    out = sparse_attention(q, k, v, pattern, schedule=schedule).reshape(shape)
    return out, indexer_loss(q, k, own, pattern, lengths) if with_loss else None


def index_scores(q: jax.Array, k: jax.Array, weights: jax.Array) -> jax.Array:
    """I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]) / sqrt(h d) of q [T, h, d], k [S, d] and weights
    [T, h]."""
    wide, heads = accumulator(q.dtype), q.shape[1]
    products = jnp.einsum("thd,sd->ths", q, k, preferred_element_type=wide)
    scores = jnp.zeros((q.shape[0], k.shape[0]), wide)
    for h in range(heads):  # one loop over the products, where a sum over their axis takes two
        scores = scores + weights[:, h, None].astype(wide) * jax.nn.relu(products[:, h])
    return scores / math.sqrt(heads * q.shape[2])


def select_tokens(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    *,
    count: int,
    is_causal: bool,
    lengths: jax.Array | None,
) -> SparseArray:
    """Patterns [L, S] in CSR with leading axes [B, 1], of an indexer's q [B, L, h, d], k [B, S, d]
    and weights [B, L, h]: see `TopKSparseAttention`."""
    (B, L, *_), S = q.shape, k.shape[1]
    limits = structure.positions(L) + 1 if is_causal else jnp.full(L, S, jnp.int32)
    limits = jnp.broadcast_to(limits, (B, L))
    if lengths is not None:
        limits = jnp.minimum(limits, lengths[:, None])
    causal = is_causal and L == S
    offsets, columns = _top_tokens(q, k, weights, count, limits, causal)
    transposed = jax.vmap(partial(structure.transpose_structure, size=S))(offsets, columns)
    fields = structure.as_fields(((), (offsets, columns)), transposed, checked=True)
    values = jnp.zeros_like(columns, jnp.float32)  # split as these are
    pattern = SparseArray(values, **fields, shape=(L, S), format=CSR)
    return jax.tree.map(lambda x: x[:, None], pattern)


def _top_tokens(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    count: int,
    limits: jax.Array,
    causal: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(offsets [B, L + 1], columns [B, L count]): the greatest scores of the indexer in each row,
    before its limit. With `causal` the limits are not beyond the row itself."""
    q, k, weights = jax.lax.stop_gradient((q, k, weights))
    rows, keys = q.shape[1], k.shape[1]
    few = min(count, keys)

    def in_tiles(q: jax.Array, k: jax.Array, weights: jax.Array, limits: jax.Array) -> Any:
        def scores(rows: jax.Array, columns: jax.Array) -> jax.Array:
            return index_scores(q[rows], k[columns], weights[rows])

        found = top_k(scores, count, shape=(rows, keys), lengths=limits, causal=causal)
        return tuple(found.index_arrays[1])

    def at_once(q: jax.Array, k: jax.Array, weights: jax.Array, limits: jax.Array) -> Any:
        found = top_k(index_scores(q, k, weights), count, lengths=limits)
        return tuple(found.index_arrays[1])

    def of_sequence(*operands: jax.Array) -> Any:
        if any(map(jax.export.is_symbolic_dim, (rows, keys))):
            return in_tiles(*operands)
        if not keys:
            return at_once(*operands)
        kernel = partial(top_k_of_indexer, k=few)
        default = at_once if rows < _LEAST_ROWS else in_tiles
        return jax.lax.platform_dependent(*operands, cpu=kernel, default=default)

    dtype = jnp.result_type(q, k, weights)
    parts = jax.typeof(q).sharding.spec
    limits = structure.whole_but_first(limits, parts[0] if parts else None)  # as vmap wants them
    operands = (q.astype(dtype), k.astype(dtype), weights.astype(dtype), limits)
    offsets, columns = jax.vmap(of_sequence)(*operands)
    return offsets, columns


def decode_tokens(
    op: str,
    cache: Sequence[jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    index_query: jax.Array,
    index_key: jax.Array,
    index_weight: jax.Array,
    *,
    count: int,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(out, cache): the next positions, each of which selects keys of the cache (keys, values, keys
    of the indexer [..., S, d], index)."""
    *cached, index = cache
    cached[2] = cached[2][..., None, :]
    new = (key, value, index_key[..., None, :])
    (keys, values, index_keys), position, seen = _written(op, cached, index, query, new)
    index_keys = index_keys[..., 0, :]
    leading, B = query.shape[:-3], math.prod(query.shape[:-3])
    q, wide_keys, wide_values = (
        x.astype(query.dtype).reshape(B, *x.shape[-3:]) for x in (query, keys, values)
    )
    T, S = q.shape[1], wide_keys.shape[1]
    limits = jnp.broadcast_to(jnp.where(seen, position + 1, 0), (B, T))
    offsets, columns = _top_tokens(
        index_query.reshape(B, *index_query.shape[-3:]),
        index_keys.astype(index_query.dtype).reshape(B, *index_keys.shape[-2:]),
        index_weight.reshape(B, *index_weight.shape[-2:]),
        count,
        limits,
    )
    columns = columns + (structure.positions(B) * S)[:, None]
    out = _attend_rows(q, wide_keys, wide_values, *_flat_rows(offsets, columns), 1)
    after = next_index(index, query.shape[-3])
    return out.reshape(*leading, *out.shape[1:]), (keys, values, index_keys, after)


def indexer_loss(
    q: jax.Array,
    k: jax.Array,
    indexed: Sequence[jax.Array],
    pattern: SparseArray,
    lengths: jax.Array | None,
) -> jax.Array:
    """The mean over queries of KL(p || softmax(I)) over the selected keys, p the mean over heads of
    the attention weights, which are constants; `indexed` are the indexer's q, k and weights. See
    `TopKSparseAttention`."""
    q, k = jax.lax.stop_gradient((q, k))
    patterns = jax.tree.map(lambda x: x[:, 0], pattern)
    index_query, index_key, index_weight = indexed
    rows = jax.vmap(_divergence)(q, k, index_query, index_key, index_weight, patterns)
    if lengths is None:
        # Of nothing the mean would be NaN.
        return jnp.mean(rows) if rows.size else jnp.zeros((), rows.dtype)
    inside = structure.positions(rows.shape[1])[None] < lengths[:, None]
    total = jnp.sum(jnp.where(inside, rows, jnp.zeros((), rows.dtype)))
    return total / jnp.maximum(jnp.sum(inside), 1).astype(rows.dtype)


def _divergence(
    q: jax.Array,
    k: jax.Array,
    index_query: jax.Array,
    index_key: jax.Array,
    index_weight: jax.Array,
    pattern: SparseArray,
) -> jax.Array:
    """[L]: KL(p || softmax(I)) of each row of one sequence; 0 if it has no key."""
    wide, heads = accumulator(q.dtype), q.shape[1]
    scale = 1 / math.sqrt(q.shape[2])
    group = heads // k.shape[1]

    def head(x: jax.Array, h: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, h, 1, keepdims=False).astype(wide)

    def add(total: jax.Array, h: jax.Array) -> tuple[jax.Array, None]:
        scores = sddmm(pattern, head(q, h), head(k, h // group))
        return total + sparse_softmax(scores, scale=scale).values, None

    zeros = jnp.zeros(pattern.values.shape, wide)
    p, _ = jax.lax.scan(add, zeros, structure.positions(heads))
    p = p / heads
    offsets, columns = pattern.index_arrays[1]
    row = structure.segment_of_entry(offsets, columns.shape[0])
    inside = structure.positions(columns.shape[0]) < offsets[-1]

    def masked(values: jax.Array) -> SparseArray:
        return pattern.with_values(jnp.where(inside, values, jnp.zeros((), wide)))

    scores = zeros
    for h in range(index_query.shape[1]):
        products = sddmm(pattern, index_query[:, h].astype(wide), index_key.astype(wide)).values
        scores = scores + index_weight[row, h].astype(wide) * jax.nn.relu(products)
    scores = scores / math.sqrt(index_query.shape[1] * index_query.shape[2])
    highest = jax.lax.stop_gradient(row_max(masked(scores)))
    highest = jnp.where(jnp.isfinite(highest), highest, jnp.zeros((), wide))
    shifted = jnp.where(inside, scores - highest[row], jnp.zeros((), wide))
    normal = row_sum(masked(jnp.exp(shifted)))
    # sum p (log p - shifted + log normal), in which the weights p of a row sum to 1.
    logs = jnp.log(jnp.where(p > 0, p, jnp.ones((), wide)))
    stored = jnp.diff(offsets) > 0
    whole = jnp.log(jnp.where(stored, normal, jnp.ones((), wide)))
    return row_sum(masked(p * (logs - shifted))) + whole


# ---- rows of several sequences in one structure ------------------------------------------------


def _written(
    op: str,
    cached: Sequence[jax.Array],
    index: jax.Array,
    query: jax.Array,
    new: Sequence[jax.Array],
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """(caches, position [T], seen [T]): the caches with the new elements, the positions of the
    queries, and which of these see keys, as `next_positions` says."""
    written, _ = next_positions(op, cached, index, query, new, [], True)
    size, count = cached[0].shape[-3], query.shape[-3]
    place = structure.positions(count)
    position = jnp.minimum(jnp.minimum(index, size - 1) + place, size - 1)
    return written, position, (place == count - 1) | (position < size - 1)


def _rows_of(counts: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(offsets, row, inside) of rows with these counts: offsets [rows + 1], the row of each entry
    of the capacity, and whether it is no padding."""
    offsets = jnp.append(jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32))
    row = structure.segment_of_entry(offsets, capacity)
    return offsets, row, structure.positions(capacity) < offsets[-1]


def _flat_rows(offsets: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The structures with offsets [..., rows + 1] and columns [..., capacity] as one, whose rows
    are theirs one after another."""
    many, rows, capacity = math.prod(offsets.shape[:-1]), offsets.shape[-1] - 1, columns.shape[-1]
    counts, columns = jnp.diff(offsets).reshape(-1), columns.reshape(-1)
    if many == 1:
        return offsets.reshape(-1), columns
    first = (structure.positions(many) * capacity)[:, None]
    begin = (offsets[..., :-1].reshape(many, rows) + first).reshape(-1)
    ends, row, inside = _rows_of(counts, columns.shape[0])
    if not columns.shape[0]:
        return ends, columns
    source = begin[row] + structure.positions(columns.shape[0]) - ends[row]
    return ends, jnp.where(inside, columns[jnp.where(inside, source, 0)], 0)


def _attend_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, offsets: jax.Array, columns: jax.Array, groups: int
) -> jax.Array:
    """Attention of q [B, T, H, D] over k and v [B, S, Hk, D], of which all sequences are one: row
    (b, g, t) of the structure has positions (b, s, g) of a key, g one of `groups` 1 or Hk. So no
    sequence or head of a cache is copied."""
    (B, T, H, D), (_, S, Hk, _) = q.shape, k.shape
    shape = checks.check_shape((B * groups * T, B * S * groups), "decode")
    transposed = structure.transpose_structure(offsets, columns, shape[1])
    fields = structure.as_fields(((), (offsets, columns)), transposed, checked=True)
    zeros = jnp.zeros(columns.shape, jnp.float32)
    pattern = SparseArray(zeros, **fields, shape=(shape[0], shape[1]), format=CSR)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, pattern: SparseArray) -> jax.Array:
        rows = jnp.moveaxis(q.reshape(B, T, groups, H // groups, D), 2, 1)
        rows = rows.reshape(shape[0], H // groups, D)
        keys, values = (x.reshape(shape[1], Hk // groups, D) for x in (k, v))
        out = sparse_attention(rows, keys, values, pattern)
        return jnp.moveaxis(out.reshape(B, groups, T, H // groups, D), 1, 2).reshape(B, T, H, D)

    def nothing(q: jax.Array, *_: Any) -> jax.Array:
        return jnp.zeros_like(q)

    # In a branch of its own: XLA would write the cache once more for a reader in another shape.
    return jax.lax.cond(offsets[-1] > 0, attend, nothing, q, k, v, pattern)
