"""Attention over the stored entries of a sparse pattern."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag
from sgap_jax.formats.convert import require_arrays
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.formats.vectors import split_blocks
from sgap_jax.primitives import attention_launches as launches
from sgap_jax.primitives import attention_unfused as unfused
from sgap_jax.primitives._batch import structures_of_lowering
from sgap_jax.primitives._define import (
    accumulator,
    at_places,
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
    structure,
)
from sgap_jax.primitives.attention_arguments import (
    as_bias,
    as_lengths,
    as_sinks,
    attention_problem,
    by_sequence_and_head,
    check_heads,
    leading_axes,
)
from sgap_jax.primitives.attention_unfused import Backward, Forward, Tangent, absent, no_array
from sgap_jax.schedules import CpuTile, OctetTile, Schedule, Unfused
from sgap_jax.schedules.cpu import AttentionPlan, attention_plan
from sgap_jax.schedules.tiles import CPU_DEPTH, CPU_TASK, check_depth

_MOST_WIDE = 4096  # cpu/attention/attention.h: kMostDepth


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
    return_lse: bool = False,
    schedule: Schedule | None = None,
) -> Any:
    """Attention in which query i sees the keys j that `pattern` stores in row i.

        s[i, j] = scale Q[i, :] . K[j, :] + bias[i, j]        at stored entries (i, j)
        O[i, :] = sum_j exp(s[i, j] - lse[i]) V[j, :]
        lse[i]  = log(sum_j exp(s[i, j]) + exp(sink))         the sink's term only with `sinks`

    for each sequence and head. Arguments are named and laid out as in
    `jax.nn.dot_product_attention`. A row without entries, or with all of them masked, gives zeros,
    zero gradients and lse = -infinity (the sink, where there is one). Differentiable to any order,
    forward and reverse, in q, k, v, bias, sinks and in `scale` if it is an array. On the CPU
    and on CUDA one kernel computes it, and one or two the gradients: no array of the size of the
    pattern is made for a head, except the gradient of a bias. On other platforms, and where CUDA
    has no kernel, it runs as `Unfused` does.

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
      is_causal: leave out entries (i, j) with j > i, those within a vector too. They still cost
        as much as other stored entries: `masks.causal` makes a pattern that stores few of them.
      key_value_seq_lengths: integers [B] or a scalar; leave out keys from this one on (padding).
        A length beyond the keys leaves out none, a negative one all.
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
    check_schedule(op, schedule)
    is_causal = check_flag(is_causal, "is_causal", op)
    return_lse = check_flag(return_lse, "return_lse", op)
    if isinstance(pattern, SparseArray) and leading_axes(pattern):
        options = dict(scale=scale, is_causal=is_causal, schedule=schedule)
        lengths = key_value_seq_lengths
        out, lse = _of_each_pattern(op, q, k, v, pattern, bias, sinks, lengths, options)
        return (out, lse) if return_lse else out
    heads = list(pattern) if isinstance(pattern, Sequence) else [pattern]
    for i, one in enumerate(heads):
        check_sparse(op, "pattern", one)
        blocks = one.format.modes[0] == 0 and len(one.format.block_shape) == 2
        if blocks and bias is None:
            one = heads[i] = split_blocks(one)
        if one.format != CSR and one.format != CVS(one.format.vector_length or 1):
            nearest = CVS(one.format.block_shape[0]) if blocks else CSR
            raise NotImplementedError(
                f"{op}: pattern: no kernel for {one.format}{' with a bias' if blocks else ''}; "
                f"pattern.asformat({nearest}) has one"
            )
    q, k, v, batched = check_heads(op, q, k, v, heads)
    if scale is None:
        scale = 1 / math.sqrt(max(q.shape[3], 1))
    factor, number = check_scale(op, scale), 1.0
    if isinstance(scale, jax.Array):
        wide = accumulator(q.dtype)  # also for the sum that is the gradient of scale
        q = (q.astype(wide) * factor.astype(wide)).astype(q.dtype)
    else:
        number = float(scale)
    lengths = as_lengths(op, key_value_seq_lengths, q.shape[0])
    sinks = as_sinks(op, sinks, q.shape[2], accumulator(q.dtype))
    params = dict(scale=number, is_causal=is_causal, schedule=schedule)
    if len(heads) == 1 or all(one is heads[0] for one in heads):
        if isinstance(bias, Sequence) and len(heads) > 1:
            bias = jnp.stack([jnp.asarray(one) for one in bias], axis=-1 - heads[0].values.ndim)
        bias = as_bias(op, bias, heads[0].values.shape, q)
        out, lse = _attention(q, k, v, heads[0], bias, sinks, lengths, **params)
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
            results.append(_attention(*mine, one, own, sink, lengths, **params))
        out, lse = (jnp.concatenate(parts, axis=2) for parts in zip(*results, strict=True))
    if not batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _of_each_pattern(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    pattern: SparseArray,
    bias: Any,
    sinks: Any,
    lengths: Any,
    options: dict,
) -> tuple[Any, Any]:
    """(O, lse) with a pattern that has leading axes: attention with one pattern, mapped over
    sequences and over the heads that have patterns of their own."""
    q, k, v, batched = check_heads(op, q, k, v, [pattern])
    B, L, H, _ = q.shape
    pattern, own = by_sequence_and_head(op, pattern, B, H, k.shape[2])
    if own > k.shape[2]:
        k, v = (jnp.repeat(x, own // x.shape[2], axis=2) for x in (k, v))
    heads = [
        jnp.moveaxis(x.reshape(*x.shape[:2], own, x.shape[2] // own, x.shape[3]), 2, 1)
        for x in (q, k, v)
    ]
    if bias is not None:
        bias = as_bias(op, bias, pattern.values.shape[2:], q)
        bias = bias.reshape(
            bias.shape[0], *((1, 1) if bias.shape[1] == 1 else (own, H // own)), *bias.shape[2:]
        )
    if sinks is not None:
        sinks = as_sinks(op, sinks, H, accumulator(q.dtype)).reshape(1, own, H // own)
    if lengths is not None:
        lengths = as_lengths(op, lengths, B)

    def one(q: Any, k: Any, v: Any, pattern: SparseArray, bias: Any, sinks: Any, n: Any) -> Any:
        given = dict(bias=bias, sinks=sinks, key_value_seq_lengths=n, return_lse=True)
        return sparse_attention(q, k, v, pattern, **given, **options)

    found = _over(B, partial(_over, own, one), *heads, pattern, bias, sinks, lengths)
    out, lse = (jnp.moveaxis(x, 1, 2) for x in found)
    out, lse = out.reshape(B, L, H, out.shape[-1]), lse.reshape(B, L, H)
    return (out, lse) if batched else (out[0], lse[0])


def _over(size: int, function: Any, *args: Any) -> Any:
    """`function` mapped over the first axis of all arrays, which is `size` or, where all share an
    array, 1."""
    leaves, tree = jax.tree.flatten(args)
    axes = [None if x.shape[0] == 1 else 0 for x in leaves]
    leaves = [x[0] if axis is None else x for x, axis in zip(leaves, axes, strict=True)]
    call = lambda *leaves: function(*jax.tree.unflatten(tree, leaves))  # noqa: E731
    if size == 1:
        return jax.tree.map(lambda x: x[None], call(*leaves))
    return jax.vmap(call, axes)(*leaves)


@partial(jax.jit, static_argnames=("scale", "is_causal", "schedule"), inline=True)
def _attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: SparseArray,
    bias: Any,
    sinks: Any,
    lengths: Any,
    *,
    scale: float,
    is_causal: bool,
    schedule: Schedule | None,
) -> list:
    operands = (q, k, v, bias, sinks, lengths, *structure(require_arrays(pattern)))
    params: dict = dict(shape=pattern.shape, vector_length=pattern.format.vector_length)
    params |= dict(checked=pattern.is_checked, scale=scale, is_causal=is_causal, schedule=schedule)
    if isinstance(schedule, Unfused):
        return unfused.forward(*operands, **params | dict(schedule=None))
    return bind(attention_p, *operands, **params)


# The operands of the three primitives are `Forward`, `Tangent` and `Backward` of
# attention_unfused.py, which has their shapes. attention_tangent_p is the derivative of
# attention_p; its transpose is attention_backward_p, which has a kernel. Other derivatives are
# computed unfused.


def _abstract_eval(
    q: Any, k: Any, v: Any, bias: Any, sinks: Any, lengths: Any, *arrays: Any, **params: Any
) -> list:
    assert (
        q.dtype == k.dtype == v.dtype and q.shape[3] == k.shape[3] and q.shape[2] % k.shape[2] == 0
    )
    assert (q.shape[1], k.shape[1]) == params["shape"] and k.shape[1:3] == v.shape[1:3]
    batch = joint_batch(*(x.shape[0] for x in (q, k, v, bias, sinks, lengths)))
    rows = (batch, *q.shape[1:3])
    wide = jnp.dtype(accumulator(q.dtype))
    return [out_aval(q, (*rows, v.shape[3]), q.dtype), out_aval(q, rows, wide)]


def _tangent_abstract_eval(*operands: Any, **params: Any) -> list:
    of = Tangent(*operands)
    batch = joint_batch(*(x.shape[0] for x in unfused.data(of)))
    return [out_aval(x, (batch, *x.shape[1:]), x.dtype) for x in (of.out, of.lse)]


def _backward_abstract_eval(*operands: Any, wrt_bias: bool, **params: Any) -> list:
    of = Backward(*operands)
    batch, length = unfused.backward_batch(*of), params["vector_length"]
    dense = [out_aval(x, (batch, *x.shape[1:]), x.dtype) for x in (of.q, of.k, of.v)]
    vector = () if length is None else (length,)
    stored = (batch, of.q.shape[2], of.column_indices.shape[0], *vector)
    return [*dense, out_aval(of.lse, stored if wrt_bias else (1, 0), of.lse.dtype)]


def _plan(
    of: Forward | Backward,
    batch: int,
    shape: tuple[int, int],
    vector_length: int | None,
    schedule: Schedule | None,
) -> tuple[CpuTile | OctetTile, AttentionPlan]:
    """The schedule of the CPU kernels and the layout of their work, from the operands' avals."""
    q, k, v = of.q, of.k, of.v
    problem = attention_problem(q, of.column_indices, batch, shape, vector_length, "cpu")
    tile = resolve(schedule, problem, CpuTile, OctetTile)
    assert isinstance(tile, CpuTile | OctetTile)
    key_batch = joint_batch(k.shape[0], v.shape[0])
    widths = (q.shape[3], v.shape[3])
    if isinstance(tile, OctetTile) and v.shape[3] > CPU_DEPTH:  # not part of a problem
        if schedule is not None:
            check_depth(tile, v.shape[3])
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
    **of: Any,
) -> Any:
    avals = Forward(*ctx.avals_in)
    tile, plan = _plan(avals, ctx.avals_out[0].shape[0], shape, vector_length, schedule)
    if isinstance(tile, OctetTile):
        target, attrs = "sgap_attention_octet_v1", dict(chunk_nonzeros=CPU_TASK, pack=plan.packed)
    else:
        target = "sgap_attention_cvs_v1"
        attrs = dict(chunk_nonzeros=tile.nonzeros, pack=plan.packed)
    attrs |= dict(vector_length=vector_length or 1)
    return ffi_lowering(target, ctx, unfused.of_kernel(operands), **attrs, **of)


def _backward_cpu(
    ctx: Any,
    *operands: Any,
    shape: Any,
    vector_length: Any,
    checked: bool,
    schedule: Any,
    **of: Any,
) -> Any:
    avals = Backward(*ctx.avals_in)
    tile, plan = _plan(avals, ctx.avals_out[0].shape[0], shape, vector_length, schedule)
    attrs = dict(vector_length=vector_length or 1, pieces=plan.pieces)
    attrs |= dict(pack=plan.backward_packed)
    kind = "octet" if isinstance(tile, OctetTile) else "cvs"
    target = f"sgap_attention_backward_{kind}_v1"
    return ffi_lowering(target, ctx, unfused.of_kernel(operands), **attrs, **of)


def _compact(q: Any, k: Any, v: Any, bias: Any, *operands: Any, **params: Any) -> list:
    sinks, lengths, *arrays = operands
    shape, length = params["shape"], params["vector_length"]
    compact, entry, _ = compact_structure(shape, length, arrays)
    bias = bias if absent(bias) else bias[:, :, entry]
    return bind(attention_p, q, k, v, bias, sinks, lengths, *compact, **params | {"checked": True})


def _backward_compact(*operands: Any, **params: Any) -> list:
    dout, dlse, q, k, v, bias, lengths, out, lse, *arrays = operands
    shape, length = params["shape"], params["vector_length"]
    compact, entry, place = compact_structure(shape, length, arrays)
    bias = bias if absent(bias) else bias[:, :, entry]
    operands = (dout, dlse, q, k, v, bias, lengths, out, lse)
    *grads, dbias = bind(attention_backward_p, *operands, *compact, **params | {"checked": True})
    if params["wrt_bias"]:
        heads = dbias.reshape(-1, *dbias.shape[2:])
        dbias = at_places(heads, place).reshape(dbias.shape)
    return [*grads, dbias]


def _or_absent(tangents: Sequence, like: Sequence) -> list:
    return [no_array(x.dtype) if t is None else t for t, x in zip(tangents, like, strict=True)]


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    results = bind(attention_p, *primals, **params)
    tangents = tangents[:5]  # lengths have none
    if all(t is None for t in tangents):
        return results, None
    own, structure = unfused.data(primals), primals[-unfused.STRUCTURE :]
    of = Tangent(*_or_absent(tangents, own[:5]), *own, *results, *structure)
    return results, bind(attention_tangent_p, *of, **params)


def _tangent_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    results, terms = bind(attention_tangent_p, *primals, **params), []
    count = unfused.LINEAR[Tangent]
    linear = tangents[:count]
    if any(t is not None for t in linear):
        given = _or_absent(linear, primals[:count])
        terms.append(bind(attention_tangent_p, *given, *primals[count:], **params))
    terms.append(_along(unfused.tangent, primals, tangents, count, params))
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
    terms.append(_along(unfused.backward, primals, tangents, count, params))
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
    *linear, q, k, v, bias, sinks, lengths, out, lse = unfused.data(operands)
    arrays = operands[-unfused.STRUCTURE :]
    wide = accumulator(out.dtype)
    wrt = [i for i, x in enumerate(linear) if is_linear_operand(x)]
    bias_is, sinks_are = (i in wrt and not absent(operands[i].aval) for i in (3, 4))
    given = (dout, dlse, q, k, v, bias, lengths, out, lse, *arrays)
    grads = bind(attention_backward_p, *given, wrt_bias=bias_is, **params)
    dbias, dsinks = no_array(wide), no_array(wide)
    if bias_is:
        dbias = grads[3] if bias.shape[1] == q.shape[2] else grads[3].sum(1, keepdims=True)
    if sinks_are:
        share = unfused.sink_share(sinks, lse)
        dsinks = -(share * unfused.delta(dout, out, dlse)).sum(1)
    found = [*grads[:3], dbias, dsinks]
    return {
        i: no_array(x.dtype) if absent(operands[i].aval) else x
        for i, x in enumerate(found)
        if i in wrt
    }


def _backward_transpose(cotangents: Any, *operands: Any, **params: Any) -> dict:
    linear = [i for i in (0, 1) if is_linear_operand(operands[i])]
    zeros = [
        jnp.zeros(
            x.aval.shape if i in linear else x.shape, x.aval.dtype if i in linear else x.dtype
        )
        for i, x in enumerate(operands[:2])
    ]
    of = lambda *x: unfused.backward(*x, *operands[2:], **params)  # noqa: E731
    found = jax.vjp(of, *zeros)[1](list(cotangents))
    return {i: found[i] for i in linear}


attention_p = define(
    "attention",
    data=len(Forward._fields) - unfused.STRUCTURE,
    abstract_eval=_abstract_eval,
    reference=unfused.forward,
    cpu=_cpu,
    cuda=launches.forward,
    compact=_compact,
    jvp=_jvp,
    transpose=None,
    multiple_results=True,
)
attention_tangent_p = define(
    "attention_tangent",
    data=len(Tangent._fields) - unfused.STRUCTURE,
    abstract_eval=_tangent_abstract_eval,
    reference=unfused.tangent,
    cpu=None,
    jvp=_tangent_jvp,
    transpose=_tangent_transpose,
    multiple_results=True,
)
attention_backward_p = define(
    "attention_backward",
    data=len(Backward._fields) - unfused.STRUCTURE,
    abstract_eval=_backward_abstract_eval,
    reference=unfused.backward,
    cpu=_backward_cpu,
    cuda=launches.backward,
    compact=_backward_compact,
    jvp=_backward_jvp,
    transpose=_backward_transpose,
    multiple_results=True,
)
