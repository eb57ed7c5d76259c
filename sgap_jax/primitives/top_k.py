"""The primitive behind `select.top_k`: the k greatest scores of each row, as a CSR structure. And
the CPU's kernel that computes an indexer's scores and selects from them while they are in the
cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats.structure import positions, segment_of_entry, whole
from sgap_jax.launch import launch, nvrtc
from sgap_jax.launch.top_k import select_plan, write_plan
from sgap_jax.primitives._batch import mapped_first
from sgap_jax.primitives._define import (
    accumulator,
    batch_rule,
    bind,
    define,
    ffi_lowering,
    jax_lowering,
    out_aval,
)
from sgap_jax.schedules import Schedule
from sgap_jax.schedules.families import failing, warn_once
from sgap_jax.schedules.machine import this_machine

_LEAST_OCTET_DEPTH = 16  # features of an indexer's head: a matrix tile has 32
_LEAST_OCTET_ROWS = 17  # of fewer the keys are read once, which is what takes the time

# scores [B, m, n], limits [B|1, m] int32 -> values [B, m k], offsets [B, m+1], indices [B, m k].
# Of row i the columns before limits[i] exist, if their score is not -infinity. Entries from
# offsets[m] on are padding: index 0, value 0. k is in 0 .. n.


def bind_top_k(scores: Any, limits: Any, k: int, schedule: Schedule | None) -> list:
    return bind(top_k_p, scores, limits, k=k, schedule=schedule)


def _abstract_eval(scores: Any, limits: Any, *, k: int, schedule: Any) -> list:
    (batch, m, n), int32 = scores.shape, jnp.dtype(jnp.int32)
    assert limits.shape[0] in (1, batch) and limits.shape[1] == m and limits.dtype == int32
    assert 0 <= k <= n
    return [
        out_aval(scores, (batch, m * k), scores.dtype),
        out_aval(scores, (batch, m + 1), int32),
        out_aval(scores, (batch, m * k), int32),
    ]


def keys_of(scores: Any) -> Any:
    """Integers in the order of the scores: the least one for -infinity, then NaN, then numbers."""
    wide = scores.astype(accumulator(scores.dtype))
    integer = jnp.int32 if wide.dtype == jnp.float32 else jnp.int64
    least, greatest = jnp.iinfo(integer).min, jnp.iinfo(integer).max
    bits = jax.lax.bitcast_convert_type(wide, integer)
    # -0 is 0. In integers: XLA takes subnormal numbers for 0.
    numbers = jnp.where(bits == least, 0, jnp.where(bits < 0, bits ^ greatest, bits))
    numbers = jnp.where(wide == -jnp.inf, least, numbers)
    return jnp.where(jnp.isnan(wide), least + 1, numbers)


def _reference(scores: Any, limits: Any, *, k: int, schedule: Any) -> list:
    batch, m, n = scores.shape
    columns = jnp.arange(n, dtype=jnp.int32)
    limits = jnp.clip(jnp.broadcast_to(limits, (batch, m)), 0, n)
    keys = keys_of(scores)
    least = jnp.iinfo(keys.dtype).min
    keys = jnp.where(columns[None, None] < limits[..., None], keys, least)
    kept, where = jax.lax.top_k(keys, k)  # of equal keys the lower column
    found = jnp.sort(jnp.where(kept > least, where.astype(jnp.int32), n), axis=-1)
    counts = jnp.sum(found < n, axis=-1, dtype=jnp.int32)
    offsets = offsets_of(counts)
    place = offsets[:, :-1, None] + positions(k)[None, None]
    place = jnp.where(found < n, place, m * k).reshape(batch, m * k)
    each = jnp.arange(batch)[:, None]
    found = found.reshape(batch, m * k)
    indices = jnp.zeros((batch, m * k), jnp.int32).at[each, place].set(found, mode="drop")
    return [scores_at(scores, offsets, indices), offsets, indices]


def scores_at(scores: Any, offsets: Any, indices: Any) -> Any:
    """[B, m k]: scores [B, m, n] at the selected entries, zero in the padding."""
    capacity = indices.shape[1]

    def of_one(scores: Any, offsets: Any, indices: Any) -> Any:
        if scores.size == 0 or capacity == 0:
            return jnp.zeros(capacity, scores.dtype)
        rows = segment_of_entry(offsets, capacity)
        inside = positions(capacity) < offsets[-1]
        return jnp.where(inside, scores[rows, indices], jnp.zeros((), scores.dtype))

    return jax.vmap(of_one)(whole(scores), offsets, indices)


def _cpu(ctx: Any, *operands: Any, k: int, schedule: Schedule | None) -> Any:
    if schedule is not None:
        return None
    return ffi_lowering("sgap_top_k_csr_v1", ctx, operands, k=k)


def _cuda(ctx: Any, *operands: Any, k: int, schedule: Schedule | None) -> Any:
    scores, limits = ctx.avals_in
    batch, m, _ = scores.shape
    if schedule is not None or batch * m * k == 0:
        return None
    if (why := failing().get("top_k")) is not None:
        warn_once("top_k", why, "the greatest scores are selected in plain JAX")
        return None
    dtype, of_values, int32 = scores.dtype.name, ctx.avals_out[0], ctx.avals_out[1]
    counts, columns = int32.update(shape=(batch, m)), int32.update(shape=(batch, m, k))
    call = select_plan(dtype, scores.shape, k, shared_limits=limits.shape[0] == 1)
    found = launch.lower(ctx, call, operands, results=[counts, columns], compiler=nvrtc)
    (offsets,) = jax_lowering(ctx, offsets_of, found[:1], [counts])
    call, avals = write_plan(dtype, scores.shape, k), [scores, columns, int32]
    inputs, results = [operands[0], found[1], offsets], [of_values, ctx.avals_out[2]]
    values, indices = launch.lower(ctx, call, inputs, avals, results, compiler=nvrtc)
    return [values, offsets, indices]


def offsets_of(counts: Any) -> Any:
    """[B, m + 1] of counts [B, m]."""
    return jnp.pad(jnp.cumsum(counts, axis=-1, dtype=jnp.int32), ((0, 0), (1, 0)))


def _jvp(primals: Any, tangents: Any, *, k: int, schedule: Schedule | None) -> tuple:
    # Which entries are selected does not change: d values = d scores at these.
    (scores, limits), (dscores, _) = primals, tangents
    out = bind_top_k(scores, limits, k, schedule)
    return out, None if dscores is None else scores_at(dscores, *out[1:])


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    (scores, limits), (axis, of_limits) = args, dims
    if axis is None:  # each element of the batch has scores of its own
        scores = jnp.broadcast_to(scores, (limits.shape[of_limits], *scores.shape))
        axis = 0
    return batch_rule(top_k_p, 2, (scores, limits), (axis, of_limits), **params)


top_k_p = define(
    "top_k",
    data=2,
    axes="b, b -> b, b, b",
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=_cpu,
    cuda=_cuda,
    jvp=_jvp,
    transpose=None,
    batch=_batch,
    multiple_results=True,
)


# q [B, m, h, d], keys [B, n, d], weights [B, m, h] of one dtype, limits [B, m] int32 -> offsets
# [B, m + 1], indices [B, m k].


def _indexer_eval(q: Any, keys: Any, weights: Any, limits: Any, *, k: int, schedule: None) -> list:
    batch, m = limits.shape
    assert q.shape[:2] == weights.shape[:2] == (batch, m) and keys.shape[0] == batch
    assert 0 <= k <= keys.shape[1]
    return [out_aval(q, (batch, size), limits.dtype) for size in (m + 1, m * k)]


def _indexer_reference(
    q: Any, keys: Any, weights: Any, limits: Any, *, k: int, schedule: None
) -> list:
    wide = dict(preferred_element_type=accumulator(q.dtype))
    products = jax.nn.relu(jnp.einsum("bthd,bsd->bths", q, keys, **wide))
    scores = jnp.einsum("bth,bths->bts", weights, products, **wide)
    return _reference(scores, limits, k=k, schedule=None)[1:]


def _indexer_cpu(ctx: Any, *operands: Any, k: int, schedule: None) -> Any:
    q = ctx.avals_in[0]
    # Of other dtypes bytes are products of tiles, if they are scored at all.
    deep = q.dtype != jnp.bfloat16 or q.shape[-1] >= _LEAST_OCTET_DEPTH
    octets = this_machine().matrix_tiles and deep and q.shape[1] >= _LEAST_OCTET_ROWS
    target = "sgap_top_k_indexer_octet_v1" if octets else "sgap_top_k_indexer_v1"
    return ffi_lowering(target, ctx, operands, k=np.int64(k))


def _indexer_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    return bind(top_k_of_indexer_p, *primals, **params), None


def _indexer_batch(args: Any, dims: Any, **params: Any) -> Any:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    every = [mapped_first(a, d, size) for a, d in zip(args, dims, strict=True)]
    return batch_rule(top_k_of_indexer_p, 4, every, (0,) * 4, **params)


top_k_of_indexer_p = define(
    "top_k_of_indexer",
    data=4,
    axes="b, b, b, b -> b, b",
    abstract_eval=_indexer_eval,
    reference=_indexer_reference,
    cpu=_indexer_cpu,
    jvp=_indexer_jvp,
    transpose=None,
    batch=_indexer_batch,
    multiple_results=True,
)


def top_k_of_indexer(q: Any, keys: Any, weights: Any, limits: Any, *, k: int) -> tuple[Any, Any]:
    """(offsets [m + 1], indices [m k]): as `top_k_p`, of the scores

        I[t, s] = sum over h of weights[t, h] relu(q[t, h] . keys[s])

    of q [m, h, d], keys [n, d] and weights [m, h] of one dtype, summed in accumulators, and limits
    [m] int32. On the CPU a row's scores are gone when it is selected; elsewhere [m, h, n] of them
    are held. k is in 0 .. n. Where the machine has matrix tiles, products of bfloat16 (16 features
    and more) and of the bytes that are scored before other floats are theirs, from 17 rows on.
    Without a derivative."""
    operands = (x[None] for x in (q, keys, weights, limits))
    offsets, indices = bind(top_k_of_indexer_p, *operands, k=k, schedule=None)
    return jnp.squeeze(offsets, 0), jnp.squeeze(indices, 0)
