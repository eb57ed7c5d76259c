"""The three primitives of attention: shapes of results, calls of the CPU kernels, derivatives and
`vmap`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from sgap_jax.formats.structure import varying_like
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
    compact_structure,
    define,
    ffi_lowering,
    is_linear_operand,
    joint_batch,
    out_aval,
    resolve,
)
from sgap_jax.primitives.attention_arguments import attention_problem
from sgap_jax.primitives.attention_unfused import Backward, Forward, Tangent, absent, no_array
from sgap_jax.schedules import CpuTile, OctetTile, Schedule
from sgap_jax.schedules.cpu import AttentionPlan, attention_plan, block_pieces
from sgap_jax.schedules.select import keep_chosen
from sgap_jax.schedules.tiles import CPU_DEPTH, CPU_TASK, check_depth

# The operands of the three primitives are `Forward`, `Tangent` and `Backward` of
# attention_unfused.py, which has their shapes. Their index arrays are of one structure, or of
# several, [S, ...]: see `by_structure` there; with the parameter `block_width` they are those of
# BCSR(vector_length, block_width), which only the CPU has kernels for: elsewhere calls are on
# column vectors. attention_tangent_p is the derivative of
# attention_p; its transpose is attention_backward_p, which has a kernel. Other derivatives are
# computed unfused.

_MOST_WIDE = 4096  # cpu/attention/attention.h: kMostDepth


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
    block_width: int | None = None,
    **of: Any,
) -> Any:
    avals = Forward(*ctx.avals_in)
    if block_width is not None:
        _tell_blocks(avals, ctx.avals_out[0].shape[0], shape, (vector_length, block_width))
        given, attrs = unfused.of_kernel(Forward, operands), dict(vector_length=vector_length)
        return ffi_lowering(
            "sgap_attention_blocks_v1", ctx, given, block_width=block_width, **attrs, **of
        )
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


def _tell_blocks(
    of: Forward | Backward, batch: Any, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    """Says to `explain` that a call runs block after block."""
    stored, heads = of.column_indices.shape[-1], of.q.shape[2]
    keep_chosen(
        f"problem: attention of {list(shape)}, BCSR{block}, {of.q.dtype.name}, {stored} blocks, "
        f"n = {of.q.shape[3]}, batch of {batch * heads}",
        "rule:    schedule None: so many rows see a block that its keys are loaded once for all",
        True,
        lambda: (
            "others:  CpuTile(), Unfused(): column vectors, row after row; `tune` measures "
            "this one as the candidate None\n"
            "parallel for rows of task:\n"
            "  for block of keys:\n"
            "    for up to 64 rows of task that see the block: attention"
        ),
    )


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
    block_width: int | None = None,
    **of: Any,
) -> Any:
    avals = Backward(*ctx.avals_in)
    terms, batch = unfused.has_terms(avals, softcap), ctx.avals_out[0].shape[0]
    if block_width is None:
        tile, plan = _plan(avals, batch, shape, vector_length, schedule, terms)
        attrs: dict = dict(pieces=plan.pieces, pack=plan.backward_packed)
        kind = "octet" if isinstance(tile, OctetTile) else "cvs"
    else:
        _tell_blocks(avals, batch, shape, (vector_length, block_width))
        calls = batch * structures_of_lowering()
        pieces = block_pieces(shape, (vector_length, block_width), calls, avals.k.shape[2])
        attrs = dict(pieces=pieces, block_width=block_width)
        kind = "blocks"
    attrs |= dict(vector_length=vector_length or 1)
    target, given = f"sgap_attention_backward_{kind}_v1", unfused.of_kernel(Backward, operands)
    if not terms:
        *results, _, _ = ctx.avals_out
        found = ffi_lowering(target, ctx.replace(avals_out=results), given, **attrs, **of)
        return [*found, *launches.nothing(ctx, map(of_all_structures, ctx.avals_out[-2:]))]
    target, given = "sgap_attention_backward_cvs_v2", unfused.of_kernel(Backward, operands, terms)
    attrs |= _term_attributes(softcap, dropout)
    return ffi_lowering(target, ctx, given, **attrs, **of)


def _of_each_structure(primitive: Any, plain: Any, of: type) -> Any:
    """`plain`, a lowering in plain JAX; for several structures the primitive, mapped over them, and
    for blocks the primitive of column vectors."""

    def lowered(*operands: Any, **params: Any) -> Any:
        if operands[-1].ndim == 1 and "block_width" not in params:
            return plain(*operands, **params)
        return unfused.by_structure(partial(bind, primitive), of)(*operands, **params)

    return lowered


def _of_one_structure(launch: Any) -> Any:
    """`launch`, a lowering to CUDA, for one structure only, and not for blocks."""

    def cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
        if len(ctx.avals_in[-1].shape) > 1 or "block_width" in params:
            return None
        return launch(ctx, *operands, **params)

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


def _grid(params: dict) -> tuple[int, int]:
    """The rows, and the columns that indices are of: keys, or blocks of them."""
    (rows, keys), width = params["shape"], params.get("block_width", 1)
    return rows, -(-keys // width)


def _compact(*operands: Any, **params: Any) -> list:
    x, arrays = Forward(*operands), operands[-unfused.STRUCTURE :]
    compact, entry, _ = compact_structure(_grid(params), params["vector_length"], arrays)
    x = x if absent(x.bias) else x._replace(bias=x.bias[:, :, entry])
    return bind(attention_p, *unfused.data(x), *compact, **params | {"checked": True})


def _backward_compact(*operands: Any, **params: Any) -> list:
    x, arrays = Backward(*operands), operands[-unfused.STRUCTURE :]
    compact, entry, place = compact_structure(_grid(params), params["vector_length"], arrays)
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
    whole_batch=True,
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
    whole_batch=True,
)
