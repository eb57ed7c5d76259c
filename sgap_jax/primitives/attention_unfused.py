"""Attention and its derivatives as sddmm, softmax and spmm: the reference of the fused kernels.

In one head, with s the scores of the stored entries:

    s   = cap(scale Q K^T) + bias - slope |d| + table[d]      -inf where masked
    lse = log(sum_row exp(s) + exp(sink))
    p   = exp(s - lse),  O = (m P) V

where cap(x) = softcap tanh(x / softcap), d = j - i - offset, and m is 0 at entries that dropout
leaves out and 1 / (1 - rate) elsewhere. The tangents dO and dlse, from (dQ, dK, dV, dbias, dsink,
dslope, dtable):

    ds = cap' scale (dQ K^T + Q dK^T) + dbias - dslope |d| + dtable[d]
    dlse = sum_row p ds + exp(sink - lse) dsink,  dO = (m p ds) V + (m P) dV - dlse O

The transpose, from cotangents dO and dlse, with delta = sum_row dO O - dlse:

    ds = p (m dO V^T - delta),  dbias = ds,  dslope = -sum |d| ds,  dtable[d] = sum ds
    dQ = scale cap' ds K,  dK = scale (cap' ds)^T Q,  dV = (m P)^T dO

Every step is an operation with derivatives of its own, so these are differentiable to any order.
Arrays are [B|1, L or S, heads, width]; `bias` is [B|1, heads|1, ...values], `sinks` [B|1, heads],
`slopes` [B|1, heads, 1], `table` [B|1, heads, range], `lengths` and `offset` [B|1, 1],
`query_segments` [B|1, L], `key_segments` [B|1, S], `seeds` [B|1, heads, 2] uint32; an absent one
of these, or an absent tangent, is [1, 0].
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgap_jax.formats import vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import BCSR, CSR, CVS
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
    slopes: Any
    table: Any
    lengths: Any
    query_segments: Any
    key_segments: Any
    offset: Any
    seeds: Any
    row_offsets: Any
    column_indices: Any
    column_offsets: Any
    row_indices: Any
    permutation: Any


class Tangent(NamedTuple):
    """The operands of attention_tangent_p -> dout, dlse, which is linear in the first seven."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsinks: Any
    dslopes: Any
    dtable: Any
    q: Any
    k: Any
    v: Any
    bias: Any
    sinks: Any
    slopes: Any
    table: Any
    lengths: Any
    query_segments: Any
    key_segments: Any
    offset: Any
    seeds: Any
    out: Any
    lse: Any
    row_offsets: Any
    column_indices: Any
    column_offsets: Any
    row_indices: Any
    permutation: Any


class Backward(NamedTuple):
    """The operands of attention_backward_p -> dq, dk, dv, dbias, dslopes, dtable, linear in the
    first two. Kernels take the fields up to `column_indices`."""

    dout: Any
    dlse: Any
    q: Any
    k: Any
    v: Any
    bias: Any
    slopes: Any
    table: Any
    lengths: Any
    query_segments: Any
    key_segments: Any
    offset: Any
    seeds: Any
    out: Any
    lse: Any
    row_offsets: Any
    column_indices: Any
    column_offsets: Any
    row_indices: Any
    permutation: Any


STRUCTURE = 5  # index arrays at the end of each; the operands before them have a batch axis
LINEAR = {Tangent: 7, Backward: 2}  # the first operands, in which the results are linear


def data(operands: tuple) -> tuple:
    """The operands of one of the classes above without the five arrays of the structure."""
    return operands[:-STRUCTURE]


# What only some calls have, and only the CPU's kernels of version 2 take, after the others.
TERMS = ("slopes", "table", "query_segments", "key_segments", "offset", "seeds")


def of_kernel(of: Any, operands: tuple, terms: bool = False) -> tuple:
    """The operands that the kernels take: those of the class `of` without `TERMS`, these if asked
    for, and the structure by rows."""
    named = dict(zip(of._fields, operands, strict=True))
    own = [named[name] for name in of._fields[:-STRUCTURE] if name not in TERMS]
    further = [named[name] for name in TERMS] if terms else []
    return (*own, *further, named["row_offsets"], named["column_indices"])


def has_terms(operands: Any, softcap: float) -> bool:
    """Whether a call has a soft cap or one of `TERMS`."""
    return softcap != 0 or any(not absent(getattr(operands, name)) for name in TERMS)


# Multiplies numbers so that neighbours lie far apart: 2^32 over the golden ratio.
_GOLDEN = 0x9E3779B9


def mixed(x: Any, between: Any) -> Any:
    """uint32 numbers each bit of which depends on all of x and `between`: a bijection in x. As
    cpu/attention/attention_terms.h computes it."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D) + between
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def scattered(x: Any, seed: Any) -> Any:
    return jnp.asarray(x).astype(jnp.uint32) * jnp.uint32(_GOLDEN) + seed


def kept_numbers(rate: float) -> tuple[int, float]:
    """(how many of 2^32 random numbers keep an entry, the factor of kept ones) for dropout."""
    kept = min(round((1 - rate) * 2**32), 2**32 - 1)
    return kept, 0.0 if rate == 1 else 1 / (1 - rate)


def absent(x: Any) -> bool:
    return x.ndim == 2 and x.shape[1] == 0


def no_array(dtype: Any) -> Any:
    return jnp.zeros((1, 0), dtype)


# Where the operands and results of the three primitives have their heads; None: they have none.
_HEADS: dict[str, int | None] = {
    name: 1 for name in ("bias", "sinks", "slopes", "table", "dbias", "dsinks", "dslopes", "dtable")
}
_HEADS |= {"seeds": 1, "lengths": None, "query_segments": None, "key_segments": None}
_HEADS |= {"offset": None}
RESULTS = {
    Forward: ("out", "lse"),
    Tangent: ("dout", "dlse"),
    Backward: ("dq", "dk", "dv", "dbias", "dslopes", "dtable"),
}


def by_structure(function: Callable, of: Any) -> Callable:
    """`function` of operands that are an `of`, mapped over the structures where its index arrays
    are of several: [S, ...] with S a multiple of the batch, the same number of structures for each
    sequence and the same number of heads of keys for each structure."""

    def mapped(*operands: Any, **params: Any) -> list:
        own, arrays, params = in_columns(operands, params)
        if arrays[0].ndim == 1:
            return function(*own, *arrays, **params)
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
        axes = [_HEADS.get(name) or 2 for name in RESULTS[of]]
        return [_together(x, axis) for x, axis in zip(found, axes, strict=True)]

    return mapped


def in_columns(operands: tuple, params: dict) -> tuple[tuple, tuple, dict]:
    """(the operands without the structure, its index arrays, the parameters), where a structure of
    blocks, `block_width` keys each, has become one of column vectors."""
    own, arrays = operands[:-STRUCTURE], tuple(operands[-STRUCTURE:])
    width = params.get("block_width")
    if width is None:
        return own, arrays, params
    params = {name: x for name, x in params.items() if name != "block_width"}
    block = params["vector_length"], width
    split: Any = partial(_split, shape=params["shape"], block=block, checked=params["checked"])
    return own, (split if arrays[0].ndim == 1 else jax.vmap(split))(*arrays), params


@partial(jax.jit, static_argnames=("shape", "block", "checked"), inline=True)
def _split(
    *arrays: Any, shape: tuple[int, int], block: tuple[int, int], checked: bool
) -> tuple[Any, ...]:
    offsets, indices, *transposed = arrays
    fields = as_fields(((), (offsets, indices)), tuple(transposed), checked=checked)
    values = jnp.zeros((indices.shape[0], *block), jnp.int8)  # nothing reads them
    split = vectors.split_blocks(SparseArray(values, **fields, shape=shape, format=BCSR(*block)))
    assert split.transposed is not None
    return (*split.index_arrays[1], *split.transposed)


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
# of keys for each structure, r heads of q for each of these, f features of v.
_AXES = {"k": "b _ (c g) _", "v": "b _ (c g) f", "out": "b _ (c g r) f", "lengths": "b"}
_AXES |= {"lse": "b _ (c g r)", "offset": "b", "query_segments": "b", "key_segments": "b"}
_AXES |= {name: "b (c g r)" for name in ("bias", "sinks", "slopes", "table", "seeds")}


def axes(of: Any, operands: Any, results: Any, params: dict) -> Axes:
    """The axes of a call whose operands are an `of`, from the avals.

    Devices that split the features of v all have the whole scores, and so lse and its tangent. The
    gradients of q, k and of what scores are made of are sums over these features, in which dlse is
    one more term."""
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
    found = Axes.of(f"{given} -> {made}", operands, results, sizes)
    if of is Backward:
        return replace(found, once={of._fields.index("dlse"): ("f",)})
    return replace(found, held=frozenset("f"))


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
        softcap: float,
        dropout: float,
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
        self.softcap, self.dropout = softcap, dropout

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

    def scores(self, q: Any, k: Any, x: Any) -> tuple[Any, Any]:
        """(s, curb): the scores of the entries, -inf at masked entries and in the padding, and the
        derivatives of the soft cap, or None: [B, H, ...]. `x` has all operands by name."""
        s, curb = self.sampled(q, k, self.scale), None
        if self.softcap:
            cap = jnp.asarray(self.softcap, s.dtype)
            t = jnp.tanh(s / cap)
            s, curb = cap * t, 1 - t * t
        for more in (x.bias, self.of_distances(x.slopes, x.table, x.offset)):
            if more is not None and not absent(more):
                shape = (joint_batch(s.shape[0], more.shape[0]), *s.shape[1:])
                s = jnp.broadcast_to(s, shape) + jnp.broadcast_to(more, shape)
        kept = (self.rows < self.A.shape[0])[None]
        if not self.A.is_checked:
            kept = kept & (self.columns >= 0)[None]
        if self.is_causal:
            kept = kept & (self.distances(x.offset) <= 0)
        if not absent(x.lengths):
            ends = x.lengths.reshape(-1, *(1 for _ in self.stored))
            kept = kept & (self.columns[None] < ends)
        if not absent(x.query_segments) and not absent(x.key_segments):
            own = x.query_segments.at[:, self.rows].get(mode="clip")
            kept = kept & (own == x.key_segments.at[:, self.columns].get(mode="clip"))
        kept = kept[:, None]
        shape = (joint_batch(s.shape[0], kept.shape[0]), *s.shape[1:])
        minus = jnp.asarray(-jnp.inf, s.dtype)
        s, kept = jnp.broadcast_to(s, shape), jnp.broadcast_to(kept, shape)
        return jnp.where(kept, s, jnp.broadcast_to(minus, shape)), curb

    def distances(self, offset: Any) -> Any:
        """d = j - i - offset: [B|1, ...]."""
        d = (self.columns - self.rows)[None]
        return d if absent(offset) else d - offset.reshape(-1, *(1 for _ in self.stored))

    def places(self, offset: Any, table: Any) -> Any:
        """Where the distances are in a table: [B|1, ...]."""
        half, size = table.shape[2] // 2, table.shape[2]
        return jnp.clip(self.distances(offset), -half, size - 1 - half) + half

    def of_distances(self, slopes: Any, table: Any, offset: Any) -> Any:
        """-slope |d| + table[d]: [B|1, heads, ...]; None where both are absent. Linear in these."""
        found = None
        if not absent(slopes):
            far = jnp.abs(self.distances(offset)).astype(slopes.dtype)[:, None]
            found = -slopes.reshape(*slopes.shape[:2], *(1 for _ in self.stored)) * far
        if not absent(table):
            places = self.places(offset, table)
            batch = joint_batch(table.shape[0], places.shape[0])
            taken = over(batch, lambda one, place: one[:, place], table, places)
            found = taken if found is None else found + taken
        return found

    def of_terms(self, ds: Any, x: Any) -> list:
        """The gradients [dslopes, dtable] from those of the scores; [1, 0] for an absent one."""
        found = [no_array(ds.dtype)] * 2
        if not absent(x.slopes):
            far = jnp.abs(self.distances(x.offset)).astype(ds.dtype)[:, None]
            total = ds * jnp.broadcast_to(far, (far.shape[0], *ds.shape[1:]))
            found[0] = -total.sum(tuple(range(2, ds.ndim)))[..., None]
        if not absent(x.table):
            empty = jnp.zeros(x.table.shape[1:], ds.dtype)
            one = lambda ds, place: empty.at[:, place].add(ds)  # noqa: E731
            found[1] = over(ds.shape[0], one, ds, self.places(x.offset, x.table))
        return found

    def dropped(self, p: Any, seeds: Any) -> Any:
        """m p: p at the entries that dropout keeps, times 1 / (1 - rate), else 0."""
        if absent(seeds):
            return p
        kept, factor = kept_numbers(self.dropout)
        one = seeds.reshape(*seeds.shape[:2], *(1 for _ in self.stored), 2)
        rows, columns = self.rows[None, None], self.columns[None, None]
        first, second = (mixed(scattered(rows, one[..., i]), jnp.uint32(0)) for i in range(2))
        numbers = mixed(scattered(columns, first), second)
        m = jnp.where(numbers < jnp.uint32(kept), jnp.asarray(factor, p.dtype), 0)
        batch = joint_batch(p.shape[0], m.shape[0])
        return jnp.broadcast_to(p, (batch, *p.shape[1:])) * jnp.broadcast_to(
            m, (batch, *m.shape[1:])
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


def forward(*operands: Any, score_mod: Callable | None = None, **params: Any) -> list:
    """[out [B, L, H, Dv], lse [B, L, H]]; `score_mod`, a function of (scores, rows, columns), makes
    scores of finished ones, before masks that leave out entries."""
    x = Forward(*operands)
    of, dtype, sinks = Composition(operands[-STRUCTURE:], **params), x.q.dtype, x.sinks
    q, k, v = _widened(x.q, x.k, x.v)
    s, _ = of.scores(q, k, x)
    if score_mod is not None:
        masked = jnp.isneginf(s)
        # Not of -inf: a derivative there may be NaN, and NaN times zero is NaN.
        modified = score_mod(jnp.where(masked, 0, s), of.rows, of.columns)
        s = jnp.where(masked, s, modified.astype(s.dtype))
    one = lambda s: sparse_softmax(of.A.with_values(s), schedule=of.schedule).values  # noqa: E731
    p = of.dropped(jax.vmap(jax.vmap(one))(s), x.seeds)
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
    """The tangents [dout, dlse], from the operands of `Tangent`."""
    x = Tangent(*operands)
    of, dtype = Composition(operands[-STRUCTURE:], **params), x.q.dtype
    dq, dk, dv, q, k, v, out = _widened(x.dq, x.dk, x.dv, x.q, x.k, x.v, x.out)
    s, curb = of.scores(q, k, x)
    p = of.probabilities(s, x.lse)
    batch = joint_batch(*(x.shape[0] for x in data(operands)))
    p = jnp.broadcast_to(p, (batch, *p.shape[1:]))
    zero = jnp.zeros((), q.dtype)
    ds = jnp.zeros_like(p)
    if not absent(dq):
        ds = ds + of.sampled(dq, k, of.scale)
    if not absent(dk):
        ds = ds + of.sampled(q, dk, of.scale)
    if curb is not None:
        ds = ds * jnp.broadcast_to(curb, p.shape)
    for more in (x.dbias, of.of_distances(x.dslopes, x.dtable, x.offset)):
        if more is not None and not absent(more):
            ds = ds + jnp.broadcast_to(more, p.shape)
    ds = jnp.where(p == 0, zero, p * ds)
    dlse = of.of_rows(row_sum, ds)
    if not absent(x.dsinks):
        share = sink_share(x.sinks, x.lse) * x.dsinks[:, None]
        dlse = dlse + jnp.broadcast_to(share, dlse.shape)
    dout = of.product(of.dropped(ds, x.seeds), v) - dlse[..., None] * out
    if not absent(dv):
        dout = dout + of.product(of.dropped(p, x.seeds), dv)
    return [dout.astype(dtype), dlse]


def backward(*operands: Any, wrt_bias: bool, wrt_terms: bool, **params: Any) -> list:
    """The cotangents [dq, dk, dv, dbias, dslopes, dtable], dbias for each head, from the operands
    of `Backward`."""
    x = Backward(*operands)
    of, dtype, heads = Composition(operands[-STRUCTURE:], **params), x.q.dtype, x.k.shape[2]
    deltas = delta(x.dout, x.out, x.dlse)
    dout, q, k, v = _widened(x.dout, x.q, x.k, x.v)
    s, curb = of.scores(q, k, x)
    p = of.probabilities(s, x.lse)
    batch = backward_batch(*operands)
    p = jnp.broadcast_to(p, (batch, *p.shape[1:]))
    zero = jnp.zeros((), p.dtype)
    ds = of.dropped(of.sampled(dout, v), x.seeds) - of.at_entries(deltas)
    ds = jnp.where(p == 0, zero, p * ds)
    scaled = ds * jnp.asarray(of.scale, q.dtype)
    if curb is not None:
        scaled = jnp.where(ds == 0, zero, scaled * jnp.broadcast_to(curb, p.shape))
    grads = [
        of.product(scaled, k),
        _grouped(of.product(scaled, q, transpose=True), heads),
        _grouped(of.product(of.dropped(p, x.seeds), dout, transpose=True), heads),
    ]
    none = no_array(p.dtype)
    terms = of.of_terms(ds, x) if wrt_terms else [none, none]
    return [*(x.astype(dtype) for x in grads), ds if wrt_bias else none, *terms]


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
