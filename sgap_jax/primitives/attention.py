"""Attention over the stored entries of a sparse pattern."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag
from sgap_jax.formats.convert import require_arrays
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.formats.stored import PreparedTranspose
from sgap_jax.formats.vectors import split_blocks
from sgap_jax.primitives import attention_unfused as unfused
from sgap_jax.primitives._define import (
    accumulator,
    bind,
    check_scale,
    check_schedule,
    check_sparse,
    static_of,
    structure,
)
from sgap_jax.primitives._kept_lists import lists_of
from sgap_jax.primitives.attention_arguments import (
    AttentionOptions,
    as_bias,
    as_dropout_rate,
    as_lengths,
    as_sinks,
    as_softcap,
    as_terms,
    by_structures,
    check_heads,
    check_score_mod,
    leading_axes,
    of_entries,
    of_head,
)
from sgap_jax.primitives.attention_primitives import attention_p
from sgap_jax.primitives.attention_unfused import Forward, absent
from sgap_jax.schedules import Schedule, Unfused
from sgap_jax.schedules.cpu import meets_blocks


@overload
def sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: SparseArray | Sequence[SparseArray],
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> jax.Array: ...
@overload
def sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: SparseArray | Sequence[SparseArray],
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...
def sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: SparseArray | Sequence[SparseArray],
    *,
    scale: Any = None,
    bias: Any = None,
    sinks: Any = None,
    is_causal: bool = False,
    key_value_seq_lengths: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    relative_bias: Any = None,
    segment_ids: Any = None,
    kv_segment_ids: Any = None,
    query_offset: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    broadcast_dropout: bool = False,
    score_mod: Callable | None = None,
    return_lse: bool = False,
    schedule: Schedule | str | None = None,
) -> Any:
    """Attention in which query i sees the keys j that `pattern` stores in row i.

        s[i, j] = cap(scale Q[i, :] . K[j, :]) + bias[i, j] - slope abs(d) + relative_bias[d]
        O[i, :] = sum_j m[i, j] exp(s[i, j] - lse[i]) V[j, :]
        lse[i]  = log(sum_j exp(s[i, j]) + exp(sink))         the sink's term only with `sinks`

    over the stored entries (i, j), with d = j - i - query_offset, cap(x) = softcap
    tanh(x / softcap) and m from dropout, each term only with its argument; for each sequence and
    head. Arguments are named and laid out as in `jax.nn.dot_product_attention`. A row without
    entries, or with all of them masked, gives zeros, zero gradients and lse = -infinity (the sink,
    where there is one). Differentiable to any order, forward and reverse, in q, k, v, bias, sinks,
    alibi_slopes, relative_bias and in `scale` if it is an array. On the CPU and on CUDA one kernel
    computes it, and one or two the gradients: no array of the size of the pattern is made for a
    head, except the gradient of a bias. On other platforms, and where CUDA has no kernel, as for
    the arguments from softcap to score_mod, it runs as `Unfused` does.

    Args:
      q: [B, L, H, D], or [L, H, D]; float32, float64, bfloat16 or float16.
      k: [B, S, Hk, D]; each of its heads serves H / Hk consecutive heads of q.
      v: [B, S, Hk, Dv].
      pattern: sparse [L, S] in CSR, CVS(V) or, without a bias, BCSR(r, c), whose values are not
        read. In CVS(V) all V rows of a vector see its key. Or a pattern for each head: a sequence
        of H patterns; or one SparseArray whose values and index arrays have leading axes [H, ...]
        or [B, H, ...], as `jax.vmap` returns it, where H may also be Hk (a pattern for each head of
        keys) or 1, and B may be 1. One call or launch then computes all heads.
      scale: scalar factor of the scores, 1 / sqrt(D) if None. An array multiplies q before, and the
        product is rounded to the dtype of q; a number multiplies the scores and is not rounded.
      bias: a value for each stored entry, added to the scores: of the shape of `pattern.values`, or
        with leading axes [H, ...] or [B, H, ...], where H or B may be 1. -infinity masks an entry.
        With a sequence of patterns: a sequence of H biases.
      sinks: [H], a logit for each head that only takes part in the normalisation of its rows.
      is_causal: leave out entries (i, j) with d > 0, those within a vector too. They still cost
        as much as other stored entries: `masks.causal` makes a pattern that stores few of them.
      key_value_seq_lengths: integers [B] or a scalar; leave out keys from this one on (padding).
        A length beyond the keys leaves out none, a negative one all.
      softcap: a positive number: products become softcap tanh(product / softcap), before all else
        is added (Gemma 2, section 2.1; FlexAttention's and jax.nn's order).
      alibi_slopes: floats [H]; subtracts slope abs(d) (ALiBi, Press et al. 2022, section 3).
        `nn.alibi_slopes(H)` are the paper's.
      relative_bias: floats [H, R] or [R]; adds to d the number at d + R // 2, or the first or last
        one for distances beyond (relative positions, T5, Raffel et al. 2020, section 2.1).
      segment_ids: integers [B, L] or [L]: an entry takes part only where the segments of its query
        and its key are the same; a negative one, or one beyond int32, sees and is seen by nothing.
        May be traced, unlike `masks.block_diagonal`.
      kv_segment_ids: integers [B, S] or [S], the keys' segments; segment_ids if None.
      query_offset: integer [B] or a scalar, the position of query 0 among the keys, for d.
      dropout_rate: static share of the entries that are left out of O (not of lse), in [0, 1]; the
        others count 1 / (1 - rate) times. Each entry is drawn by a hash of (rng, sequence, head,
        i, j): the same in the backward pass, for any schedule, format and platform.
      dropout_rng: a PRNG key or an integer, required with a rate above 0.
      broadcast_dropout: all sequences and heads leave out the same entries, as Flax's default.
      score_mod: a function (score, b, h, i, j) -> score of scalars in jax.numpy, as
        FlexAttention's, applied to finished scores s of entries that take part. It runs as
        `Unfused` does, keeps a score for each stored entry, and may use arrays from outside, which
        get derivatives. Not for a pattern with leading axes.
      return_lse: return (O, lse).
      schedule: None for the default, which on the CPU takes BCSR(r, c) with few rows r block after
        block, and else as column vectors; `Unfused()`, `Reference()`, a `CpuTile` of some
        nonzeros, for bfloat16 in vectors of 4 to 32 rows an `OctetTile` (`tile_n=32, tile_k=64`) on
        the CPU, or on CUDA an `AttentionTile`. No schedule names block after block: to `tune` it is
        the candidate None.

    Returns:
      O [B, L, H, Dv] ([L, H, Dv] as q) in the promoted dtype of q, k and v. Scores, probabilities
      and sums are float32 (float64 for float64), and so is lse [B, L, H], the natural logarithm.
      The same bits at each call, on the CPU for any number of threads; so are gradients.

    Raises:
      TypeError: a pattern is not a SparseArray, or schedule is not a Schedule.
      ValueError: shapes that do not fit.
      NotImplementedError: no kernel for this dtype, format or platform with this schedule.

    Source: vectorSparse, section 7.4, eq. 1; the softmax in one pass after Milakov and Gimelshein
    2018, the backward pass from lse after FlashAttention-2 (Dao 2023), sections 3.1 and 3.2.
    """
    op = "sparse_attention"
    schedule = check_schedule(op, schedule)
    dropout_rate = as_dropout_rate(op, dropout_rate)
    is_causal = check_flag(is_causal, "is_causal", op)
    return_lse = check_flag(return_lse, "return_lse", op)
    heads = list(pattern) if isinstance(pattern, Sequence) else [pattern]
    leading = leading_axes(pattern) if isinstance(pattern, SparseArray) else ()
    for one in heads:
        if not leading:
            check_sparse(op, "pattern", one)
        blocks = one.format.modes[0] == 0 and len(one.format.block_shape) == 2
        columns = one.format == CSR or one.format == CVS(one.format.vector_length or 1)
        if not columns and not (blocks and bias is None):
            nearest = CVS(one.format.block_shape[0]) if blocks else CSR
            raise NotImplementedError(
                f"{op}: pattern: no kernel for {one.format}{' with a bias' if blocks else ''}; "
                f"pattern.asformat({nearest}) has one"
            )
    q, k, v, batched = check_heads(op, q, k, v, heads)
    if leading:
        heads[0], apart = by_structures(op, heads[0], q.shape[0], q.shape[2], k.shape[2])
        if apart > k.shape[2]:
            k, v = (jnp.repeat(x, apart // x.shape[2], axis=2) for x in (k, v))
    if scale is None:
        scale = 1 / math.sqrt(max(q.shape[3], 1))
    factor, number = check_scale(op, scale), 1.0
    if isinstance(scale, jax.Array):
        wide = accumulator(q.dtype)  # also for the sum that is the gradient of scale
        q = (q.astype(wide) * factor.astype(wide)).astype(q.dtype)
    else:
        number = float(scale)
    sinks = as_sinks(op, sinks, q.shape[2], accumulator(q.dtype))
    softcap = as_softcap(op, softcap)
    terms = as_terms(
        op,
        q,
        k,
        alibi_slopes=alibi_slopes,
        relative_bias=relative_bias,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        query_offset=query_offset,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
    )
    plain = schedule is None and score_mod is None and not softcap
    plain = plain and all(map(absent, terms.values()))
    heads = _of_kernels(heads, plain, max(q.shape[3], v.shape[3]), q.dtype.name)
    terms["lengths"] = as_lengths(op, key_value_seq_lengths, q.shape[0])
    params = dict(scale=number, is_causal=is_causal, schedule=schedule)
    params |= dict(softcap=softcap, dropout=dropout_rate)
    compute: Any = _attention
    if score_mod is not None:
        check_score_mod(op, score_mod)
        if leading or not isinstance(schedule, Unfused | None):
            raise NotImplementedError(
                f"{op}: score_mod runs unfused: expected schedule=None or Unfused(), and one "
                "pattern or a sequence of one for each head"
            )
        params["schedule"] = Unfused()
    if len(heads) == 1 or all(one is heads[0] for one in heads):
        if isinstance(bias, Sequence) and len(heads) > 1:
            bias = jnp.stack([jnp.asarray(one) for one in bias], axis=-1 - heads[0].values.ndim)
        bias = as_bias(op, bias, heads[0].values.shape[len(leading_axes(heads[0])) :], q)
        if score_mod is not None:
            compute = partial(_computed, score_mod=of_entries(score_mod, 0))
        out, lse = compute(q, k, v, heads[0], bias, sinks, terms, **params)
    else:
        each: Sequence = [None] * len(heads) if bias is None else bias
        if not isinstance(each, Sequence) or len(each) != len(heads):
            raise ValueError(f"{op}: bias: expected a sequence of {len(heads)}, one for each head")
        group = q.shape[2] // k.shape[2]
        results = []
        for h, one in enumerate(heads):
            mine = [q[:, :, h : h + 1], *(x[:, :, h // group : h // group + 1] for x in (k, v))]
            own = as_bias(op, each[h], one.values.shape, mine[0])
            sink = sinks if absent(sinks) else sinks[:, h : h + 1]
            if score_mod is not None:
                compute = partial(_computed, score_mod=of_entries(score_mod, h))
            results.append(compute(*mine, one, own, sink, of_head(terms, h), **params))
        out, lse = (jnp.concatenate(parts, axis=2) for parts in zip(*results, strict=True))
    if not batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _of_kernels(
    patterns: Sequence[SparseArray], plain: bool, width: int, dtype: str
) -> list[SparseArray]:
    """The patterns in the formats that a call has kernels for: blocks become column vectors, but
    where they are taken block after block, in `plain` calls without further terms."""
    found: dict[int, SparseArray] = {}
    for one in patterns:
        block, stored = one.format.block_shape, one.index_arrays[1][1].shape[-1]
        listed = isinstance(one.transposed, PreparedTranspose) and one.transposed.lists
        kept = len(block) < 2 or (
            plain and not listed and meets_blocks(one.shape, block, stored, width, dtype)
        )
        if kept:
            found[id(one)] = one
        elif id(one) not in found:
            split = split_blocks
            for _ in leading_axes(one):
                split = jax.vmap(split)
            found[id(one)] = split(one)
    return [found[id(one)] for one in patterns]


def _computed(
    q: Any,
    k: Any,
    v: Any,
    pattern: SparseArray,
    bias: Any,
    sinks: Any,
    terms: dict[str, Any],
    *,
    scale: float,
    is_causal: bool,
    softcap: float,
    dropout: float,
    schedule: Schedule | None,
    **score_mod: Any,
) -> list:
    arrays: Any = lambda pattern: structure(require_arrays(pattern))  # noqa: E731
    arrays = jax.vmap(arrays) if leading_axes(pattern) else arrays
    names = Forward._fields[-unfused.STRUCTURE :]
    index_arrays = dict(zip(names, arrays(pattern), strict=True))
    operands = Forward(q=q, k=k, v=v, bias=bias, sinks=sinks, **terms, **index_arrays)
    params: dict = dict(shape=pattern.shape, vector_length=pattern.format.vector_length)
    if len(pattern.format.block_shape) == 2:
        length, width = pattern.format.block_shape
        params |= dict(vector_length=length, block_width=width)
    params |= dict(checked=pattern.is_checked, scale=scale, is_causal=is_causal, schedule=schedule)
    params |= dict(softcap=softcap, dropout=dropout) | static_of(pattern)
    if isinstance(schedule, Unfused):
        forward = unfused.by_structure(unfused.forward, Forward)
        return forward(*operands, **params | dict(schedule=None), **score_mod)
    # Launches for several structures have no lists.
    lists, named = ((), {}) if leading_axes(pattern) else lists_of(pattern)
    return bind(attention_p, *operands, *lists, **params, **named)


_STATIC = ("scale", "is_causal", "softcap", "dropout", "schedule")
_attention = jax.jit(_computed, static_argnames=_STATIC, inline=True)
