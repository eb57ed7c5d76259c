"""Attention over the stored entries of a sparse pattern."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag
from sgap_jax.formats.convert import require_arrays
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.formats.structure import varying_like
from sgap_jax.formats.vectors import split_blocks
from sgap_jax.primitives import attention_launches as launches
from sgap_jax.primitives import attention_unfused as unfused
from sgap_jax.primitives._batch import (
    as_cotangent,
    joined,
    mapped_first,
    of_all_structures,
    structures_of_lowering,
)
from sgap_jax.primitives._define import (
    accumulator,
    at_places,
    batch_rule,
    bind,
    check_scale,
    check_schedule,
    check_sparse,
    compact_structure,
    define,
    ffi_lowering,
    is_linear_operand,
    joint_batch,
    out_aval,
    resolve,
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
    attention_problem,
    by_structures,
    check_heads,
    check_score_mod,
    leading_axes,
    of_entries,
    of_head,
)
from sgap_jax.primitives.attention_unfused import Backward, Forward, Tangent, absent, no_array
from sgap_jax.schedules import CpuTile, OctetTile, Schedule, Unfused
from sgap_jax.schedules.cpu import AttentionPlan, attention_plan
from sgap_jax.schedules.tiles import CPU_DEPTH, CPU_TASK, check_depth

_MOST_WIDE = 4096  # cpu/attention/attention.h: kMostDepth


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
      schedule: None for the default; `Unfused()`, `Reference()`, a `CpuTile` of some nonzeros, for
        bfloat16 in vectors of 4 to 32 rows an `OctetTile` (`tile_n=32, tile_k=64`) on the CPU, or
        on CUDA an `AttentionTile`.

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
    for i, one in enumerate(heads):
        if not leading:
            check_sparse(op, "pattern", one)
        blocks = one.format.modes[0] == 0 and len(one.format.block_shape) == 2
        if blocks and bias is None:
            split = split_blocks
            for _ in leading:
                split = jax.vmap(split)
            one = heads[i] = split(one)
        if one.format != CSR and one.format != CVS(one.format.vector_length or 1):
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
    terms["lengths"] = as_lengths(op, key_value_seq_lengths, q.shape[0])
    params = dict(scale=number, is_causal=is_causal, schedule=schedule)
    params |= dict(softcap=as_softcap(op, softcap), dropout=dropout_rate)
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


# The operands of the three primitives are `Forward`, `Tangent` and `Backward` of
# attention_unfused.py, which has their shapes. Their index arrays are of one structure, or of
# several, [S, ...]: see `by_structure` there. attention_tangent_p is the derivative of
# attention_p; its transpose is attention_backward_p, which has a kernel. Other derivatives are
# computed unfused.


def _abstract_eval(*operands: Any, **params: Any) -> list:
    q, k, v = operands[:3]
    assert (
        q.dtype == k.dtype == v.dtype and q.shape[3] == k.shape[3] and q.shape[2] % k.shape[2] == 0
    )
    assert (q.shape[1], k.shape[1]) == params["shape"] and k.shape[1:3] == v.shape[1:3]
    batch = joint_batch(*(x.shape[0] for x in unfused.data(operands)))
    rows = (batch, *q.shape[1:3])
    wide = jnp.dtype(accumulator(q.dtype))
    return [out_aval(q, (*rows, v.shape[3]), q.dtype), out_aval(q, rows, wide)]


def _tangent_abstract_eval(*operands: Any, **params: Any) -> list:
    of = Tangent(*operands)
    batch = joint_batch(*(x.shape[0] for x in unfused.data(of)))
    return [out_aval(x, (batch, *x.shape[1:]), x.dtype) for x in (of.out, of.lse)]


def _backward_abstract_eval(*operands: Any, wrt_bias: bool, wrt_terms: bool, **params: Any) -> list:
    of = Backward(*operands)
    batch, length = unfused.backward_batch(*of), params["vector_length"]
    dense = [out_aval(x, (batch, *x.shape[1:]), x.dtype) for x in (of.q, of.k, of.v)]
    vector = () if length is None else (length,)
    stored = (batch, of.q.shape[2], of.column_indices.shape[-1], *vector)
    shapes = [stored if wrt_bias else (1, 0)]
    for term in (of.slopes, of.table):
        shapes.append((batch, *term.shape[1:]) if wrt_terms and not absent(term) else (1, 0))
    return [*dense, *(out_aval(of.lse, shape, of.lse.dtype) for shape in shapes)]


def _plan(
    of: Forward | Backward,
    batch: int,
    shape: tuple[int, int],
    vector_length: int | None,
    schedule: Schedule | None,
    terms: bool,
) -> tuple[CpuTile | OctetTile, AttentionPlan]:
    """The schedule of the CPU kernels and the layout of their work, from the operands' avals; those
    of matrix tiles know no `terms`."""
    q, k, v = of.q, of.k, of.v
    problem = attention_problem(q, of.column_indices, batch, shape, vector_length, "cpu")
    tile = resolve(schedule, problem, CpuTile, OctetTile)
    assert isinstance(tile, CpuTile | OctetTile)
    key_batch = joint_batch(k.shape[0], v.shape[0])
    widths = (q.shape[3], v.shape[3])
    if isinstance(tile, OctetTile) and (v.shape[3] > CPU_DEPTH or terms):  # not part of a problem
        if schedule is not None:
            check_depth(tile, v.shape[3])
        if schedule is not None and terms:
            raise NotImplementedError(
                "sparse_attention: matrix tiles have no soft cap, distances, segments or dropout; "
                "schedule=None or a CpuTile has them"
            )
        tile = CpuTile()
    if max(widths) > _MOST_WIDE:
        raise NotImplementedError(
            f"sparse_attention: the CPU's kernels take heads of up to {_MOST_WIDE} features, got "
            f"{max(widths)}; schedule=Unfused() takes all"
        )
    octets, calls = isinstance(tile, OctetTile), batch * structures_of_lowering()
    return tile, attention_plan(problem, k.shape[2], key_batch, calls, widths, octets)


def _cpu(
    ctx: Any,
    *operands: Any,
    shape: Any,
    vector_length: Any,
    checked: bool,
    schedule: Any,
    softcap: float,
    dropout: float,
    statistics: Any = None,
    **of: Any,
) -> Any:
    avals = Forward(*ctx.avals_in)
    terms = unfused.has_terms(avals, softcap)
    tile, plan = _plan(avals, ctx.avals_out[0].shape[0], shape, vector_length, schedule, terms)
    if isinstance(tile, OctetTile):
        target, attrs = "sgap_attention_octet_v1", dict(chunk_nonzeros=CPU_TASK, pack=plan.packed)
    else:
        target = "sgap_attention_cvs_v1"
        attrs = dict(chunk_nonzeros=tile.nonzeros, pack=plan.packed)
    attrs |= dict(vector_length=vector_length or 1)
    if schedule is None:
        attrs |= dict(chunk_nonzeros=max(attrs["chunk_nonzeros"], plan.nonzeros))
        attrs |= dict(key_pieces=plan.key_pieces) if plan.key_pieces > 1 else {}
    if terms:
        target = "sgap_attention_cvs_v2"
        attrs = dict(key_pieces=1) | attrs | _term_attributes(softcap, dropout)
    given = unfused.of_kernel(Forward, operands, terms)
    return ffi_lowering(target, ctx, given, **attrs, **of)


def _term_attributes(softcap: float, dropout: float) -> dict:
    kept, factor = unfused.kept_numbers(dropout)
    return dict(softcap=softcap, kept=kept, keep_scale=factor)


def _backward_cpu(
    ctx: Any,
    *operands: Any,
    shape: Any,
    vector_length: Any,
    checked: bool,
    schedule: Any,
    softcap: float,
    dropout: float,
    wrt_terms: bool,
    statistics: Any = None,
    **of: Any,
) -> Any:
    avals = Backward(*ctx.avals_in)
    terms = unfused.has_terms(avals, softcap)
    tile, plan = _plan(avals, ctx.avals_out[0].shape[0], shape, vector_length, schedule, terms)
    attrs = dict(vector_length=vector_length or 1, pieces=plan.pieces)
    attrs |= dict(pack=plan.backward_packed)
    kind = "octet" if isinstance(tile, OctetTile) else "cvs"
    target, given = f"sgap_attention_backward_{kind}_v1", unfused.of_kernel(Backward, operands)
    if not terms:
        *results, _, _ = ctx.avals_out
        found = ffi_lowering(target, ctx.replace(avals_out=results), given, **attrs, **of)
        return [*found, *launches.nothing(ctx, map(of_all_structures, ctx.avals_out[-2:]))]
    target, given = "sgap_attention_backward_cvs_v2", unfused.of_kernel(Backward, operands, terms)
    attrs |= _term_attributes(softcap, dropout)
    return ffi_lowering(target, ctx, given, **attrs, **of)


def _of_each_structure(primitive: Any, plain: Any, of: type) -> Any:
    """`plain`, a lowering in plain JAX; for several structures the primitive, mapped over them."""

    def lowered(*operands: Any, **params: Any) -> Any:
        if operands[-1].ndim == 1:
            return plain(*operands, **params)
        return unfused.by_structure(partial(bind, primitive), of)(*operands, **params)

    return lowered


def _of_one_structure(launch: Any) -> Any:
    """`launch`, a lowering to CUDA, for one structure only."""

    def cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
        return None if len(ctx.avals_in[-1].shape) > 1 else launch(ctx, *operands, **params)

    return cuda


def _batch(primitive: Any, data: int, args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    arrays, axes = args[data:], dims[data:]
    if all(x.ndim == 1 + (d is not None) for x, d in zip(arrays, axes, strict=True)):
        return batch_rule(primitive, data, args, dims, **params)
    # The structures of the mapped elements follow each other, as their sequences do.
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    every = [joined(mapped_first(x, d, size)) for x, d in zip(arrays, axes, strict=True)]
    own, axes = list(args[:data]), list(dims[:data])
    if all(d is None for d in axes):
        own[0], axes[0] = jnp.broadcast_to(own[0], (size, *own[0].shape)), 0
    return batch_rule(primitive, data, [*own, *every], [*axes, *[None] * len(every)], **params)


def _compact(*operands: Any, **params: Any) -> list:
    x, arrays = Forward(*operands), operands[-unfused.STRUCTURE :]
    compact, entry, _ = compact_structure(params["shape"], params["vector_length"], arrays)
    x = x if absent(x.bias) else x._replace(bias=x.bias[:, :, entry])
    return bind(attention_p, *unfused.data(x), *compact, **params | {"checked": True})


def _backward_compact(*operands: Any, **params: Any) -> list:
    x, arrays = Backward(*operands), operands[-unfused.STRUCTURE :]
    compact, entry, place = compact_structure(params["shape"], params["vector_length"], arrays)
    x = x if absent(x.bias) else x._replace(bias=x.bias[:, :, entry])
    checked = params | {"checked": True}
    *grads, dbias, dslopes, dtable = bind(
        attention_backward_p, *unfused.data(x), *compact, **checked
    )
    if params["wrt_bias"]:
        dbias = at_places(joined(dbias), place).reshape(dbias.shape)
    return [*grads, dbias, dslopes, dtable]


def _or_absent(tangents: Sequence, like: Sequence) -> list:
    return [no_array(x.dtype) if t is None else t for t, x in zip(tangents, like, strict=True)]


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    results = bind(attention_p, *primals, **params)
    count = unfused.LINEAR[Tangent]
    tangents = tangents[:count]  # the others are integers
    if all(t is None for t in tangents):
        return results, None
    own, structure = unfused.data(primals), primals[-unfused.STRUCTURE :]
    of = Tangent(*_or_absent(tangents, own[:count]), *own, *results, *structure)
    return results, bind(attention_tangent_p, *of, **params)


def _tangent_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    results, terms = bind(attention_tangent_p, *primals, **params), []
    count = unfused.LINEAR[Tangent]
    linear = tangents[:count]
    if any(t is not None for t in linear):
        given = _or_absent(linear, primals[:count])
        terms.append(bind(attention_tangent_p, *given, *primals[count:], **params))
    tangent = unfused.by_structure(unfused.tangent, Tangent)
    terms.append(_along(tangent, primals, tangents, count, params))
    return results, *terms


def _backward_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    results, terms = bind(attention_backward_p, *primals, **params), []
    count = unfused.LINEAR[Backward]
    linear = tangents[:count]
    if any(t is not None for t in linear):
        given = [
            jnp.zeros_like(x) if t is None else t for t, x in zip(linear, primals, strict=False)
        ]
        terms.append(bind(attention_backward_p, *given, *primals[count:], **params))
    backward = unfused.by_structure(unfused.backward, Backward)
    terms.append(_along(backward, primals, tangents, count, params))
    return results, *terms


def _along(function: Any, primals: Any, tangents: Any, first: int, params: dict) -> Any:
    """The tangents of `function`'s results for the tangents of the operands from `first` on; None
    where all of these are None."""
    moving = [i for i, t in enumerate(tangents) if i >= first and t is not None]
    moving = [i for i in moving if jnp.issubdtype(primals[i].dtype, jnp.floating)]
    if not moving:
        return None

    def of(*moved: Any) -> list:
        operands = list(primals)
        for i, x in zip(moving, moved, strict=True):
            operands[i] = x
        return function(*operands, **params)

    at, along = ([x[i] for i in moving] for x in (primals, tangents))
    return jax.jvp(of, at, along)[1]


def _tangent_transpose(cotangents: Any, *operands: Any, **params: Any) -> dict:
    dout, dlse = cotangents
    x, linear = Tangent(*operands), operands[: unfused.LINEAR[Tangent]]
    wide = accumulator(x.out.dtype)
    wrt = [i for i, one in enumerate(linear) if is_linear_operand(one)]
    of = {
        name: i in wrt and not absent(operands[i].aval)
        for i, name in enumerate(Tangent._fields[: len(linear)])
    }
    own = {name: getattr(x, name) for name in Backward._fields if name not in ("dout", "dlse")}
    given = Backward(dout=dout, dlse=dlse, **own)
    asked = dict(wrt_bias=of["dbias"], wrt_terms=of["dslopes"] or of["dtable"])
    dq, dk, dv, dbias, *terms = bind(attention_backward_p, *given, **asked, **params)
    dsinks = no_array(wide)
    if of["dbias"]:
        dbias = dbias if x.bias.shape[1] == x.q.shape[2] else dbias.sum(1, keepdims=True)
    if of["dsinks"]:
        share = unfused.sink_share(x.sinks, x.lse)
        dsinks = -(share * unfused.delta(dout, x.out, dlse)).sum(1)
    found = [dq, dk, dv, dbias, dsinks, *terms]
    return {
        i: no_array(x.dtype) if absent(operands[i].aval) else x
        for i, x in enumerate(found)
        if i in wrt
    }


def _backward_transpose(cotangents: Any, *operands: Any, **params: Any) -> dict:
    linear = [i for i in (0, 1) if is_linear_operand(operands[i])]
    avals = [x.aval if i in linear else jax.typeof(x) for i, x in enumerate(operands[:2])]
    # Split as the operands are: so results are split as their cotangents.
    zeros = [as_cotangent(jnp.zeros(x.shape, x.dtype), x) for x in avals]
    # Inside shard_map: of one device, as the cotangents are, or they would be summed over devices.
    zeros = [varying_like(x, *cotangents, *operands[2:]) for x in zeros]
    backward = unfused.by_structure(unfused.backward, Backward)

    def of(*x: Any) -> list:
        results = backward(*x, *operands[2:], **params)
        return [varying_like(y, c) for y, c in zip(results, cotangents, strict=True)]

    found = jax.vjp(of, *zeros)[1](list(cotangents))
    return {i: found[i] for i in linear}


attention_p, attention_tangent_p, attention_backward_p = map(
    Primitive, ("attention", "attention_tangent", "attention_backward")
)
define(
    attention_p,
    data=len(Forward._fields) - unfused.STRUCTURE,
    axes=partial(unfused.axes, Forward),
    batch=partial(_batch, attention_p, len(Forward._fields) - unfused.STRUCTURE),
    abstract_eval=_abstract_eval,
    reference=_of_each_structure(attention_p, unfused.forward, Forward),
    cpu=_cpu,
    cuda=_of_one_structure(launches.forward),
    compact=_of_each_structure(attention_p, _compact, Forward),
    jvp=_jvp,
    transpose=None,
    multiple_results=True,
    lists=True,
)
define(
    attention_tangent_p,
    data=len(Tangent._fields) - unfused.STRUCTURE,
    axes=partial(unfused.axes, Tangent),
    batch=partial(_batch, attention_tangent_p, len(Tangent._fields) - unfused.STRUCTURE),
    abstract_eval=_tangent_abstract_eval,
    reference=_of_each_structure(attention_tangent_p, unfused.tangent, Tangent),
    cpu=None,
    jvp=_tangent_jvp,
    transpose=_tangent_transpose,
    multiple_results=True,
    lists=True,
)
define(
    attention_backward_p,
    data=len(Backward._fields) - unfused.STRUCTURE,
    axes=partial(unfused.axes, Backward),
    batch=partial(_batch, attention_backward_p, len(Backward._fields) - unfused.STRUCTURE),
    abstract_eval=_backward_abstract_eval,
    reference=_of_each_structure(attention_backward_p, unfused.backward, Backward),
    cpu=_backward_cpu,
    cuda=_of_one_structure(launches.backward),
    compact=_of_each_structure(attention_backward_p, _backward_compact, Backward),
    jvp=_backward_jvp,
    transpose=_backward_transpose,
    multiple_results=True,
    lists=True,
)
