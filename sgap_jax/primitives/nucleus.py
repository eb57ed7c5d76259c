"""The primitives behind `select.top_p`: of the k greatest scores of each row, which are a CSR
structure, those before which the row has less than p of its probability; and the totals of rows
that probabilities are relative to."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats import structure
from sgap_jax.launch import launch, nvrtc
from sgap_jax.launch.nucleus import select_plan, totals_plan, write_plan
from sgap_jax.primitives._batch import mapped_first
from sgap_jax.primitives._define import (
    accumulator,
    batch_rule,
    bind,
    define,
    ffi_lowering,
    is_launched,
    jax_lowering,
    out_aval,
)
from sgap_jax.primitives.top_k import keys_of, offsets_of
from sgap_jax.schedules import Schedule

_FAMILY = "nucleus", "the most probable entries are selected in plain JAX"

# values [B, m k], ranked [B, m k] of one dtype, greatest, total, p [B, m] of its accumulator,
# offsets [B, m + 1], indices [B, m k] -> offsets [B, m + 1], indices [B, m k], entry [B, m k].
# The probability of an entry is exp(value - greatest) / total of its row. With `kept`, entries that
# are ranked as infinite come first, whatever p is. entry is where each new entry was; from
# offsets[m] on it is 0, as the index is. Entries whose index is not in 0 .. n - 1 are left out.


def bind_nucleus(*operands: Any, k: int, n: int, kept: bool, schedule: Schedule | None) -> list:
    params: dict[str, Any] = dict(k=k, n=n, kept=kept, schedule=schedule)
    return bind(nucleus_p, *operands, **params)


def _weights(scores: jax.Array, greatest: jax.Array) -> jax.Array:
    """exp(scores - greatest): 0 for NaN and -infinity, 1 for infinity."""
    weights = jnp.where(scores == greatest, 1, jnp.exp(scores - greatest))
    return jnp.where(scores > -jnp.inf, weights, 0)


def _abstract_eval(*operands: Any, k: int, n: int, kept: bool, schedule: Any) -> list:
    values, ranked, greatest, total, p, offsets, indices = operands
    (batch, m), int32 = p.shape, jnp.dtype(jnp.int32)
    assert values.shape == ranked.shape == indices.shape == (batch, m * k)
    assert greatest.shape == total.shape == p.shape and offsets.shape == (batch, m + 1)
    assert ranked.dtype == values.dtype and offsets.dtype == indices.dtype == int32
    assert {x.dtype for x in (greatest, total, p)} == {accumulator(values.dtype)}
    return [out_aval(values, shape, int32) for shape in (offsets.shape, *[indices.shape] * 2)]


def _reference(*operands: Any, k: int, n: int, kept: bool, schedule: Any) -> list:
    return list(jax.vmap(partial(_of_one, k=k, n=n, kept=kept))(*operands))


def _of_one(*operands: Any, k: int, n: int, kept: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    values, ranked, greatest, total, p, offsets, indices = operands
    counts, capacity = jnp.diff(offsets), indices.shape[0]
    stored = structure.positions(k)[None] < counts[:, None]
    at = jnp.where(stored, offsets[:-1, None] + structure.positions(k)[None], 0)
    scores = values[at].astype(total.dtype)
    weights = jnp.where(stored, _weights(scores, greatest[:, None]), 0)
    p = p[:, None]
    reach, always = p * total[:, None], jnp.broadcast_to(p >= 1, stored.shape)
    first = jnp.zeros_like(stored)
    if kept:  # these come before all others
        first = (ranked[at] == jnp.inf) & stored
        always |= first
        reach -= jnp.sum(jnp.where(first, weights, 0), axis=1, keepdims=True)
        weights = jnp.where(first, 0, weights)
    keys = keys_of(scores)
    keys = jnp.where(stored, keys, jnp.iinfo(keys.dtype).min)
    last = _least_key(keys, weights, reach)
    ties = (keys == last) & ~first
    weight = jnp.max(jnp.where(ties, weights, 0), axis=1, keepdims=True)
    rank = jnp.cumsum(ties, axis=1, dtype=jnp.int32) - 1
    room = reach - _weight_above(keys, weights, last)
    inside = always | (keys > last) | (ties & (weight * rank.astype(weight.dtype) < room))
    at = jnp.where(stored, at, capacity)
    part = jnp.zeros(capacity, bool).at[at].set(inside, mode="drop")
    return structure.compacted(offsets, jnp.where(part, indices, -1), n)[:3]


def _weight_above(keys: jax.Array, weights: jax.Array, least: jax.Array) -> jax.Array:
    """[m, 1]: the sum of the weights of keys above `least` [m, 1]."""
    return jnp.sum(jnp.where(keys > least, weights, 0), axis=1, keepdims=True)


def _least_key(keys: jax.Array, weights: jax.Array, reach: jax.Array) -> jax.Array:
    """[m, 1]: the least key above which the weights sum to less than `reach`, among those from a
    row's least to its greatest key. By bisection: a sort takes several times as long."""

    def halve(bounds: tuple) -> tuple:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # low + high may overflow
        below = _weight_above(keys, weights, middle) < reach
        return jnp.where(below | (low == high), low, middle + 1), jnp.where(below, middle, high)

    bounds = (jnp.min(keys, axis=1, keepdims=True), jnp.max(keys, axis=1, keepdims=True))
    low, _ = jax.lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, bounds)
    return low


def _cpu(ctx: Any, *operands: Any, k: int, n: int, kept: bool, schedule: Any) -> Any:
    if schedule is not None:
        return None
    return ffi_lowering("sgap_nucleus_csr_v1", ctx, operands, k=k, columns=n, kept=kept)


def _cuda(ctx: Any, *operands: Any, k: int, n: int, kept: bool, schedule: Any) -> Any:
    if schedule is not None or not is_launched(ctx, *_FAMILY):
        return None
    values, *_, indices = ctx.avals_in
    of_offsets, *of_entries = ctx.avals_out
    batch, m = ctx.avals_in[2].shape
    counts, chosen = (of_offsets.update(shape=shape) for shape in ((batch, m), (batch, m, k)))
    call = select_plan(values.dtype.name, (batch, m), k, n, kept=kept)
    found = launch.lower(ctx, call, operands, results=[counts, chosen], compiler=nvrtc)
    (offsets,) = jax_lowering(ctx, offsets_of, found[:1], [counts])
    given, avals = [operands[-1], found[1], offsets], [indices, chosen, of_offsets]
    call = write_plan((batch, m), k)
    return [offsets, *launch.lower(ctx, call, given, avals, of_entries, compiler=nvrtc)]


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    return bind(nucleus_p, *primals, **params), None  # piecewise constant


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    every = [mapped_first(a, d, size) for a, d in zip(args, dims, strict=True)]
    return batch_rule(nucleus_p, _DATA, every, (0,) * _DATA, **params)


_DATA = 7

nucleus_p = define(
    "nucleus",
    data=_DATA,
    axes="b, b, b, b, b, b, b -> b, b, b",
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=_cpu,
    cuda=_cuda,
    jvp=_jvp,
    transpose=None,
    batch=_batch,
    multiple_results=True,
)


# scores [B, m, n], limits [B|1, m] int32 -> greatest, total [B, m] of the accumulator: of the
# columns before limits[i] the greatest score of row i and the sum of exp(score - greatest);
# -infinity and 0 where there is no number.


def bind_totals(scores: Any, limits: Any, schedule: Schedule | None) -> list:
    return bind(nucleus_totals_p, scores, limits, schedule=schedule)


def _totals_eval(scores: Any, limits: Any, *, schedule: Any) -> list:
    (batch, m, _), wide = scores.shape, accumulator(scores.dtype)
    assert limits.shape[0] in (1, batch) and limits.shape[1] == m and limits.dtype == jnp.int32
    return [out_aval(scores, (batch, m), wide) for _ in range(2)]


def _totals_reference(scores: Any, limits: Any, *, schedule: Any) -> list:
    x = scores.astype(accumulator(scores.dtype))
    exists = structure.positions(x.shape[2])[None, None] < limits[..., None]
    x = jnp.where(exists & ~jnp.isnan(x), x, -jnp.inf)
    greatest = jnp.max(x, axis=2, initial=-jnp.inf)
    return [greatest, jnp.sum(_weights(x, greatest[..., None]), axis=2)]


def _totals_cpu(ctx: Any, *operands: Any, schedule: Schedule | None) -> Any:
    if schedule is not None:
        return None
    return ffi_lowering("sgap_nucleus_totals_v1", ctx, operands)


def _totals_cuda(ctx: Any, *operands: Any, schedule: Schedule | None) -> Any:
    if schedule is not None or not is_launched(ctx, *_FAMILY):
        return None
    scores, limits = ctx.avals_in
    call = totals_plan(scores.dtype.name, scores.shape, shared_limits=limits.shape[0] == 1)
    return launch.lower(ctx, call, operands, compiler=nvrtc)


def _totals_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    return bind(nucleus_totals_p, *primals, **params), None  # of a selection, which has none


def _totals_batch(args: Any, dims: Any, **params: Any) -> Any:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    scores = mapped_first(args[0], dims[0], size)
    return batch_rule(nucleus_totals_p, 2, (scores, args[1]), (0, dims[1]), **params)


nucleus_totals_p = define(
    "nucleus_totals",
    data=2,
    axes="b, b -> b, b",
    abstract_eval=_totals_eval,
    reference=_totals_reference,
    cpu=_totals_cpu,
    cuda=_totals_cuda,
    jvp=_totals_jvp,
    transpose=None,
    batch=_totals_batch,
    multiple_results=True,
)
