"""Attention and its derivatives as sddmm, softmax and spmm: the reference of the fused kernels.

In one head, with s the scores of the stored entries:

    s   = scale Q K^T + bias            -inf where masked
    lse = log(sum_row exp(s) + exp(sink))
    p   = exp(s - lse),  O = P V

The tangents dO and dlse, from (dQ, dK, dV, dbias, dsink):

    ds = scale (dQ K^T + Q dK^T) + dbias,  dlse = sum_row p ds + exp(sink - lse) dsink
    dO = (p ds) V + P dV - dlse O

The transpose, from cotangents dO and dlse, with delta = sum_row dO O - dlse:

    ds = p (dO V^T - delta),  dbias = ds,  dQ = scale ds K,  dK = scale ds^T Q,  dV = P^T dO

Every step is an operation with derivatives of its own, so these are differentiable to any order.
Arrays are [B|1, L or S, heads, width]; `bias` is [B|1, heads|1, ...values], `sinks` [B|1, heads],
`lengths` [B|1, 1]; an absent one of these three, or an absent tangent, is [1, 0].
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgap_jax.formats import vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, CVS
from sgap_jax.formats.structure import as_fields, positions, well_formed
from sgap_jax.primitives._define import accumulator, derived, joint_batch, row_of_entry
from sgap_jax.primitives._partition import Axes
from sgap_jax.primitives.row_reduce import row_max, row_sum
from sgap_jax.primitives.sddmm import sddmm
from sgap_jax.primitives.sparse_softmax import sparse_softmax
from sgap_jax.primitives.spmm import spmm
from sgap_jax.schedules import Schedule


class Forward(NamedTuple):
    """The operands of attention_p -> out, lse. Kernels take the fields up to `column_indices`."""

    q: Any
    k: Any
    v: Any
    bias: Any
    sinks: Any
    lengths: Any
    row_offsets: Any
    column_indices: Any
    column_offsets: Any
    row_indices: Any
    permutation: Any


class Tangent(NamedTuple):
    """The operands of attention_tangent_p -> dout, dlse, which is linear in the first five."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsinks: Any
    q: Any
    k: Any
    v: Any
    bias: Any
    sinks: Any
    lengths: Any
    out: Any
    lse: Any
    row_offsets: Any
    column_indices: Any
    column_offsets: Any
    row_indices: Any
    permutation: Any


class Backward(NamedTuple):
    """The operands of attention_backward_p -> dq, dk, dv, dbias, which is linear in the first two.
    Kernels take the fields up to `column_indices`."""

    dout: Any
    dlse: Any
    q: Any
    k: Any
    v: Any
    bias: Any
    lengths: Any
    out: Any
    lse: Any
    row_offsets: Any
    column_indices: Any
    column_offsets: Any
    row_indices: Any
    permutation: Any


STRUCTURE = 5  # index arrays at the end of each; the operands before them have a batch axis
LINEAR = {Tangent: 5, Backward: 2}  # the first operands, in which the results are linear


def data(operands: tuple) -> tuple:
    """The operands of one of the classes above without the five arrays of the structure."""
    return operands[:-STRUCTURE]


def of_kernel(operands: tuple) -> tuple:
    """The operands that the kernels take: the structure by rows, and not by columns."""
    return operands[:-3]


def absent(x: Any) -> bool:
    return x.ndim == 2 and x.shape[1] == 0


def no_array(dtype: Any) -> Any:
    return jnp.zeros((1, 0), dtype)


# Where the operands and results of the three primitives have their heads; lengths have none.
_HEADS = {"bias": 1, "sinks": 1, "dbias": 1, "dsinks": 1, "lengths": None}
RESULTS = {
    Forward: ("out", "lse"),
    Tangent: ("dout", "dlse"),
    Backward: ("dq", "dk", "dv", "dbias"),
}


def by_structure(function: Callable, of: Any) -> Callable:
    """`function` of operands that are an `of`, mapped over the structures where its index arrays
    are of several: [S, ...] with S a multiple of the batch, the same number of structures for each
    sequence and the same number of heads of keys for each structure."""

    def mapped(*operands: Any, **params: Any) -> list:
        own, arrays = operands[:-STRUCTURE], operands[-STRUCTURE:]
        if arrays[0].ndim == 1:
            return function(*operands, **params)
        batch = joint_batch(*(x.shape[0] for x in own))
        if batch == 0:
            return function(*own, *(jnp.zeros(x.shape[1:], x.dtype) for x in arrays), **params)
        count = arrays[0].shape[0] // batch
        named = dict(zip(of._fields, own, strict=False))
        split = [_apart(x, _HEADS.get(name, 2), count) for name, x in named.items()]
        structures = [x.reshape(batch, count, *x.shape[1:]) for x in arrays]

        def one(*operands: Any) -> list:
            data = [x if absent(x) else x[None] for x in operands[: len(own)]]
            return [x[0] for x in function(*data, *operands[len(own) :], **params)]

        found = over(batch, partial(over, count, one), *split, *structures)
        axes = [1 if name == "dbias" else 2 for name in RESULTS[of]]
        return [_together(x, axis) for x, axis in zip(found, axes, strict=True)]

    return mapped


def _apart(x: Any, axis: int | None, count: int) -> Any:
    """[B, ..., count H, ...] -> [B, count, ..., H, ...]; 1 for the count where all share heads."""
    if absent(x):
        return x[None, None]
    if axis is None or x.shape[axis] == 1:
        return x[:, None]
    shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 1)


def _together(x: Any, axis: int) -> Any:
    """The results [B, count, ..., H, ...] of each structure -> [B, ..., count H, ...]."""
    if x.ndim == 3:  # absent, of each structure
        return x[:1, 0]
    x = jnp.moveaxis(x, 1, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


# The axes of arrays, by which calls are split over devices: c structures for each sequence, g heads
# of keys for each structure, r heads of q for each of these.
_AXES = {"k": "b _ (c g) _", "v": "b _ (c g) _", "lengths": "b"}
_AXES |= {"lse": "b _ (c g r)", "bias": "b (c g r)", "sinks": "b (c g r)"}


def axes(of: Any, operands: Any, results: Any, params: dict) -> Axes:
    """The axes of a call whose operands are an `of`, from the avals."""
    named = of(*operands)
    batch = joint_batch(*(x.shape[0] for x in data(operands)))
    many = len(named.row_offsets.shape) > 1
    structures = named.row_offsets.shape[0] // max(batch, 1) if many else 1
    heads, key_heads = named.q.shape[2], named.k.shape[2]
    sizes = {"b": batch, "c": structures, "g": key_heads // max(structures, 1)}
    sizes["r"] = heads // max(key_heads, 1)
    given, made = (
        ", ".join(_AXES.get(name.removeprefix("d"), "b _ (c g r) _") for name in names)
        for names in (of._fields[:-STRUCTURE], RESULTS[of])
    )
    if many:
        given += ", (b c)" * STRUCTURE
    return Axes.of(f"{given} -> {made}", operands, results, sizes)


def over(size: int, function: Callable, *args: Any) -> Any:
    """`function` mapped over the first axis of all arrays, which is `size` or, where all share an
    array, 1."""
    axes = [None if x.shape[0] == 1 else 0 for x in args]
    own = [x[0] if axis is None else x for x, axis in zip(args, axes, strict=True)]
    if size == 1:
        return jax.tree.map(lambda x: x[None], function(*own))
    return jax.vmap(function, axes)(*own)


class Composition:
    """The steps of attention over one structure, on values [B, heads, ...] of its entries."""

    def __init__(
        self,
        arrays: Any,
        *,
        shape: tuple[int, int],
        vector_length: int | None,
        checked: bool,
        scale: float,
        is_causal: bool,
        schedule: Schedule | None,
        statistics: Any = None,
    ) -> None:
        row_offsets, column_indices, *transposed = arrays
        if not checked:
            row_offsets, column_indices = well_formed(row_offsets, column_indices, shape[1])
        count = column_indices.shape[0]
        self.stored = (count,) if vector_length is None else (count, vector_length)
        levels = ((), (row_offsets, column_indices))
        self.A = SparseArray(
            positions(count) if vector_length is None else jnp.zeros(self.stored, jnp.int32),
            **as_fields(levels, tuple(transposed), checked=checked),
            shape=shape,
            format=CSR if vector_length is None else CVS(vector_length),
        )
        if vector_length is None:
            self.rows, self.columns = row_of_entry(row_offsets, count), column_indices
        else:
            self.rows = vectors.positions(self.A)[1].reshape(self.stored)
            self.columns = jnp.broadcast_to(column_indices[:, None], self.stored)
        self.scale, self.is_causal, self.schedule = scale, is_causal, derived(schedule)

    def sampled(self, x: Any, y: Any, scale: float | None = None) -> Any:
        """(scale) X Y^T at the entries: [B, L, H, d] and [B, S, Hk, d] -> [B, H, ...]."""
        x, y = _heads(x), _heads(_repeated(y, x.shape[2]))
        batch = joint_batch(x.shape[0], y.shape[0])
        x, y = (jnp.broadcast_to(a, (batch, *a.shape[1:])) for a in (x, y))

        def one(x: Any, y: Any) -> Any:
            return sddmm(self.A, x, y, scale=scale, schedule=self.schedule).values

        return jax.vmap(jax.vmap(one))(x, y)

    def product(self, p: Any, y: Any, transpose: bool = False) -> Any:
        """P Y or P^T Y: [B, H, ...] and [B, S or L, H or Hk, d] -> [B, L or S, H, d]."""
        y = _heads(_repeated(y, p.shape[1]))
        y = jnp.broadcast_to(y, (p.shape[0], *y.shape[1:]))

        def one(p: Any, y: Any) -> Any:
            A = self.A.with_values(p)
            return spmm(A, y, transpose=transpose, schedule=self.schedule)

        return jnp.moveaxis(jax.vmap(jax.vmap(one))(p, y), 1, 2)

    def of_rows(self, reduction: Any, s: Any) -> Any:
        """A reduction over rows: [B, H, ...] -> [B, L, H]."""
        one = lambda s: reduction(self.A.with_values(s), schedule=self.schedule)  # noqa: E731
        return jnp.moveaxis(jax.vmap(jax.vmap(one))(s), 1, 2)

    def at_entries(self, x: Any) -> Any:
        """Broadcasts the value of each row to its entries: [B, L, H] -> [B, H, ...]."""
        if x.shape[1] == 0:
            return jnp.zeros((x.shape[0], x.shape[2], *self.stored), x.dtype)
        return jnp.moveaxis(x, 2, 1)[:, :, jnp.minimum(self.rows, x.shape[1] - 1)]

    def scores(self, q: Any, k: Any, bias: Any, lengths: Any) -> Any:
        """The scores s of the entries, -inf at masked entries and in the padding: [B, H, ...]."""
        s = self.sampled(q, k, self.scale)
        if not absent(bias):
            shape = (joint_batch(s.shape[0], bias.shape[0]), *s.shape[1:])
            s = jnp.broadcast_to(s, shape) + jnp.broadcast_to(bias, shape)
        kept = (self.rows < self.A.shape[0])[None]
        if not self.A.is_checked:
            kept = kept & (self.columns >= 0)[None]
        if self.is_causal:
            kept = kept & (self.columns <= self.rows)[None]
        if not absent(lengths):
            ends = lengths.reshape(-1, *(1 for _ in self.stored))
            kept = kept & (self.columns[None] < ends)
        kept = kept[:, None]
        shape = (joint_batch(s.shape[0], kept.shape[0]), *s.shape[1:])
        minus = jnp.asarray(-jnp.inf, s.dtype)
        return jnp.where(
            jnp.broadcast_to(kept, shape),
            jnp.broadcast_to(s, shape),
            jnp.broadcast_to(minus, shape),
        )

    def probabilities(self, s: Any, lse: Any) -> Any:
        """exp(s - lse); zero in a row whose lse is -infinity."""
        lse = jnp.where(jnp.isneginf(lse), jnp.asarray(jnp.inf, lse.dtype), lse)
        batch = joint_batch(s.shape[0], lse.shape[0])
        return jnp.exp(jnp.broadcast_to(s, (batch, *s.shape[1:])) - self.at_entries(lse))

    def log_sum_exp(self, s: Any) -> Any:
        """The log of each row's sum of exp(s): [B, L, H]; -inf in a row without entries."""
        peak = self.of_rows(row_max, jax.lax.stop_gradient(s))
        zero = jnp.zeros((), s.dtype)
        peak = jnp.where(jnp.isneginf(peak), zero, peak)
        total = self.of_rows(row_sum, jnp.exp(s - self.at_entries(peak)))
        empty = total == 0
        log = peak + jnp.log(jnp.where(empty, jnp.ones((), s.dtype), total))
        return jnp.where(empty, jnp.asarray(-jnp.inf, s.dtype), log)


def forward(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    sinks: Any,
    lengths: Any,
    *arrays: Any,
    weigh: Callable[[Any], Any] = lambda p: p,
    **params: Any,
) -> list:
    """[out [B, L, H, Dv], lse [B, L, H]]; `weigh` is applied to the probabilities before they are
    multiplied by v."""
    of, dtype = Composition(arrays, **params), q.dtype
    q, k, v = _widened(q, k, v)
    s = of.scores(q, k, bias, lengths)
    one = lambda s: sparse_softmax(of.A.with_values(s), schedule=of.schedule).values  # noqa: E731
    p = weigh(jax.vmap(jax.vmap(one))(s))
    p = jnp.broadcast_to(p, (joint_batch(p.shape[0], v.shape[0]), *p.shape[1:]))
    out, lse = of.product(p, v), of.log_sum_exp(s)
    if not absent(sinks):
        entries, sink = _alike(lse, sinks[:, None])
        finite, zero = ~jnp.isneginf(entries), jnp.zeros((), s.dtype)
        # With a sink of +inf the entries have no weight; a row with neither entries nor a sink has
        # lse = -inf. logaddexp gives both values, but its derivative there would be NaN.
        nothing = ~finite & jnp.isneginf(sink)
        beside = jnp.where(jnp.isposinf(sink), -jnp.inf, entries)
        lse = jnp.logaddexp(beside, jnp.where(nothing, zero, sink))
        lse = jnp.where(nothing, -jnp.inf, lse)
        share = jnp.exp(jnp.where(finite, entries, zero) - jnp.where(finite, lse, zero))
        share = jnp.where(finite, share, zero)[..., None]
        batch = joint_batch(out.shape[0], share.shape[0])
        out = jnp.broadcast_to(out, (batch, *out.shape[1:])) * jnp.broadcast_to(
            share, (batch, *out.shape[1:])
        )
    lse = jnp.broadcast_to(lse, (out.shape[0], *lse.shape[1:]))
    return [out.astype(dtype), lse]


def tangent(*operands: Any, **params: Any) -> list:
    """The tangents [dout, dlse], from the operands dq, dk, dv, dbias, dsinks, q, k, v, bias, sinks,
    lengths, out, lse and the index arrays."""
    dq, dk, dv, dbias, dsinks, q, k, v, bias, sinks, lengths, out, lse, *arrays = operands
    of, dtype = Composition(arrays, **params), q.dtype
    dq, dk, dv, q, k, v, out = _widened(dq, dk, dv, q, k, v, out)
    p = of.probabilities(of.scores(q, k, bias, lengths), lse)
    batch = joint_batch(*(x.shape[0] for x in data(operands)))
    p = jnp.broadcast_to(p, (batch, *p.shape[1:]))
    zero = jnp.zeros((), q.dtype)
    ds = jnp.zeros_like(p)
    if not absent(dq):
        ds = ds + of.sampled(dq, k, of.scale)
    if not absent(dk):
        ds = ds + of.sampled(q, dk, of.scale)
    if not absent(dbias):
        ds = ds + jnp.broadcast_to(dbias, p.shape)
    ds = jnp.where(p == 0, zero, p * ds)
    dlse = of.of_rows(row_sum, ds)
    if not absent(dsinks):
        dlse = dlse + jnp.broadcast_to(sink_share(sinks, lse) * dsinks[:, None], dlse.shape)
    dout = of.product(ds, v) - dlse[..., None] * out
    if not absent(dv):
        dout = dout + of.product(p, dv)
    return [dout.astype(dtype), dlse]


def backward(*operands: Any, wrt_bias: bool, **params: Any) -> list:
    """The cotangents [dq, dk, dv, dbias], dbias for each head, from the operands dout, dlse, q, k,
    v, bias, lengths, out, lse and the index arrays."""
    dout, dlse, q, k, v, bias, lengths, out, lse, *arrays = operands
    of, dtype, heads = Composition(arrays, **params), q.dtype, k.shape[2]
    deltas = delta(dout, out, dlse)
    dout, q, k, v = _widened(dout, q, k, v)
    p = of.probabilities(of.scores(q, k, bias, lengths), lse)
    batch = backward_batch(*operands)
    p = jnp.broadcast_to(p, (batch, *p.shape[1:]))
    ds = of.sampled(dout, v) - of.at_entries(deltas)
    ds = jnp.where(p == 0, jnp.zeros((), p.dtype), p * ds)
    scaled = ds * jnp.asarray(of.scale, q.dtype)
    grads = [
        of.product(scaled, k),
        _grouped(of.product(scaled, q, transpose=True), heads),
        _grouped(of.product(p, dout, transpose=True), heads),
    ]
    return [*(x.astype(dtype) for x in grads), ds if wrt_bias else no_array(p.dtype)]


def backward_batch(*operands: Any) -> int:
    return joint_batch(*(x.shape[0] for x in data(operands)))


def delta(dout: Any, out: Any, dlse: Any) -> Any:
    """delta = sum over features of dout out - dlse: [B, L, H], in the accumulator's dtype."""
    dout, out = _alike(*_widened(dout, out))
    total, dlse = _alike((dout * out).sum(-1), dlse)
    return total - dlse


def sink_share(sinks: Any, lse: Any) -> Any:
    """The sink's share of each row's probability, exp(sink - lse): [B, L, H]; 1 for a sink of
    +inf."""
    sinks, lse = _alike(sinks[:, None], lse)
    zero, one = (jnp.asarray(x, lse.dtype) for x in (0, 1))
    empty, whole = jnp.isneginf(lse), jnp.isposinf(sinks)
    share = jnp.exp(jnp.where(whole, zero, sinks) - jnp.where(empty, zero, lse))
    return jnp.where(whole, one, jnp.where(empty, zero, share))


def _alike(x: Any, y: Any) -> Any:
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    return jnp.broadcast_to(x, shape), jnp.broadcast_to(y, shape)


def _widened(*arrays: Any) -> list:
    return [x.astype(accumulator(x.dtype)) for x in arrays]


def _heads(x: Any) -> Any:
    return jnp.moveaxis(x, 2, 1)


def _repeated(x: Any, heads: int) -> Any:
    """Keys or values repeated to the heads of q: consecutive heads of q share one of theirs."""
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def _grouped(x: Any, heads: int) -> Any:
    """Sums gradients over the heads of q that share a head of keys or values."""
    if x.shape[2] == heads:
        return x
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads, x.shape[3]).sum(3)
