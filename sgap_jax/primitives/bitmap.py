"""The primitives behind selections by a condition: where it holds, in bits, the entries of the bits
that are set, and both at once for a matrix that is held as a whole."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats import checks, structure
from sgap_jax.launch import launch, nvrtc
from sgap_jax.launch.bitmap import entries_plan, of_mask_plan
from sgap_jax.primitives._batch import mapped_first, plain_lowering
from sgap_jax.primitives._define import (
    accumulator,
    batch_rule,
    bind,
    define,
    ffi_lowering,
    is_launched,
    out_aval,
)
from sgap_jax.primitives.top_k import keys_of, scores_at
from sgap_jax.schedules import Schedule
from sgap_jax.schedules.schedule import KERNEL_DTYPES

WORD_COLUMNS = 32  # of a word of a bitmap
_FAMILY = "bitmap", "bitmaps are made and read in plain JAX"

# mask [B, m, n] bool -> words [B, m, ceil(n / 32)] uint32: lower columns in lower bits, and 0
# behind the last one.


def _words_eval(mask: Any, *, schedule: Schedule | None) -> Any:
    return _words_aval(mask)


def _words_aval(x: Any) -> Any:
    batch, m, n = x.shape
    return out_aval(x, (batch, m, -(-n // WORD_COLUMNS)), jnp.dtype(jnp.uint32))


def _words_reference(mask: Any, *, schedule: Schedule | None) -> Any:
    batch, m, n = mask.shape
    count = -(-n // WORD_COLUMNS)
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, count * WORD_COLUMNS - n)))
    bits = bits.reshape(batch, m, count, WORD_COLUMNS).astype(jnp.uint32)
    places = jnp.arange(WORD_COLUMNS, dtype=jnp.uint32)[None, None, None]
    return jnp.sum(bits << places, axis=3, dtype=jnp.uint32)


def _words_cpu(ctx: Any, mask: Any, *, schedule: Schedule | None) -> Any:
    if schedule is not None:
        return None
    return ffi_lowering("sgap_bitmap_of_mask_v1", ctx, [mask])


def _words_cuda(ctx: Any, mask: Any, *, schedule: Schedule | None) -> Any:
    if schedule is not None or not is_launched(ctx, *_FAMILY):
        return None
    batch, m, n = ctx.avals_in[0].shape
    return launch.lower(ctx, of_mask_plan(batch * m, n), [mask], compiler=nvrtc)


def _words_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    return bind(bitmap_of_mask_p, *primals, **params), None


bitmap_of_mask_p = define(
    "bitmap_of_mask",
    data=1,
    axes="b -> b",
    abstract_eval=_words_eval,
    reference=_words_reference,
    cpu=_words_cpu,
    cuda=_words_cuda,
    jvp=_words_jvp,
    transpose=None,
)

# scores [B|1, m, n], least [B, m] of their accumulator, limits [B, m] int32, kept [B|1, m, n or 0]
# bool -> words as above: a bit where scores[i, j] >= least[i], or kept[i, j], in the columns
# j < limits[i]. -infinity reaches no bound, nor does NaN, and nothing reaches one that is NaN.


def bind_of_scores(*operands: Any) -> Any:
    return bind(bitmap_of_scores_p, *operands, schedule=None)


def _of_scores_eval(scores: Any, least: Any, limits: Any, kept: Any, *, schedule: Any) -> Any:
    (batch, m), n = least.shape, scores.shape[2]
    assert limits.shape == least.shape and limits.dtype == jnp.int32 and kept.dtype == jnp.bool_
    assert least.dtype == accumulator(scores.dtype) and scores.shape[1] == kept.shape[1] == m
    assert scores.shape[0] in (1, batch) and kept.shape[0] in (1, batch) and kept.shape[2] in (0, n)
    return _words_aval(scores.update(shape=(batch, m, n)))


def _of_scores_reference(scores: Any, least: Any, limits: Any, kept: Any, *, schedule: Any) -> Any:
    keys, least = keys_of(scores), keys_of(least)[..., None]
    absent = jnp.iinfo(keys.dtype).min  # of -infinity, and NaN has the next one
    inside = (keys >= least) & (keys > absent + 1) & (least != absent + 1)
    if kept.shape[2]:
        inside |= kept
    inside &= structure.positions(scores.shape[2])[None, None] < limits[..., None]
    return bind(bitmap_of_mask_p, inside, schedule=schedule)


def _of_scores_cpu(ctx: Any, *operands: Any, schedule: Schedule | None) -> Any:
    if schedule is not None:
        return None
    return ffi_lowering("sgap_bitmap_of_scores_v1", ctx, operands)


def _of_scores_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    return bind(bitmap_of_scores_p, *primals, **params), None


def _of_scores_batch(args: Any, dims: Any, **params: Any) -> Any:
    return batch_rule(bitmap_of_scores_p, 4, *_bounds_mapped(args, dims), **params)


def _bounds_mapped(args: Any, dims: Any) -> tuple[list, list]:
    """(operands, mapped axes) of which bounds and limits are mapped; scores and what is kept may be
    shared."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    scores, *_, kept = args
    of_rows = [mapped_first(a, d, size) for a, d in zip(args[1:3], dims[1:3], strict=True)]
    return [scores, *of_rows, kept], [dims[0], 0, 0, dims[3]]


bitmap_of_scores_p = define(
    "bitmap_of_scores",
    data=4,
    axes="b, b, b, b -> b",
    abstract_eval=_of_scores_eval,
    reference=_of_scores_reference,
    cpu=_of_scores_cpu,
    jvp=_of_scores_jvp,
    transpose=None,
    batch=_of_scores_batch,
)

# words [B, m, w] uint32 -> offsets [B, m + 1], rows and columns [B, nse] int32 of the bits that are
# set, by rows and ascending columns. The offsets count all of them, INT32_MAX at most; the entries
# are the first nse, and zeros behind the last one.


def _entries_eval(words: Any, *, nse: int, schedule: Schedule | None) -> list:
    batch, m, _ = words.shape
    int32 = jnp.dtype(jnp.int32)
    return [out_aval(words, (batch, size), int32) for size in (m + 1, nse, nse)]


def _entries_reference(words: Any, *, nse: int, schedule: Schedule | None) -> list:
    return list(jax.vmap(partial(_entries_of_one, nse=nse))(words))


def _entries_of_one(words: jax.Array, *, nse: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    m, width = words.shape
    if 0 in (m, width):
        empty = jnp.zeros(nse, jnp.int32)
        return jnp.zeros(m + 1, jnp.int32), empty, empty
    begins = _begins(words)
    word = structure.segment_of_entry(begins, nse)
    rank = structure.positions(nse) - begins[word]
    column = word % width * WORD_COLUMNS + _nth_bit(words.reshape(-1)[word], rank)
    stored = structure.positions(nse) < begins[-1]
    row, column = (jnp.where(stored, x, 0) for x in (word // width, column))
    return begins[::width], row, column


def _begins(words: jax.Array) -> jax.Array:
    """[m w + 1]: how many bits are set before each of the words [m, w], and in all; INT32_MAX at
    most."""
    m, width = words.shape
    counts = jax.lax.population_count(words).astype(jnp.int32).reshape(-1)
    if m * width * WORD_COLUMNS <= checks.INT32_MAX:
        sums = jnp.cumsum(counts, dtype=jnp.int32)
    else:
        sums = jax.lax.associative_scan(_saturating_sum, counts)
    return jnp.pad(sums, (1, 0))


def _saturating_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    total = x.astype(jnp.uint32) + y.astype(jnp.uint32)
    return jnp.minimum(total, jnp.uint32(checks.INT32_MAX)).astype(jnp.int32)


def _nth_bit(word: jax.Array, rank: jax.Array) -> jax.Array:
    """The position of the bit that is set with `rank` others below it; 31 if there is none."""
    position = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        low = jax.lax.population_count(word & jnp.uint32((1 << width) - 1)).astype(jnp.int32)
        above = rank >= low
        rank = jnp.where(above, rank - low, rank)
        word = jnp.where(above, word >> jnp.uint32(width), word)
        position = jnp.where(above, position + width, position)
    return position


def _entries_cpu(ctx: Any, words: Any, *, nse: int, schedule: Schedule | None) -> Any:
    if schedule is not None:
        return None
    return ffi_lowering("sgap_bitmap_entries_v1", ctx, [words])


def _entries_cuda(ctx: Any, words: Any, *, nse: int, schedule: Schedule | None) -> Any:
    if schedule is not None or not is_launched(ctx, *_FAMILY):
        return None
    (of_words,), (of_offsets, *of_entries) = ctx.avals_in, ctx.avals_out
    batch, m, width = of_words.shape

    def sums(words: jax.Array) -> tuple[jax.Array, jax.Array]:
        begins = jax.vmap(_begins)(words)
        return begins, begins[:, ::width]

    begins, offsets = plain_lowering(sums, True, ctx, [words])
    avals = [of_words, of_offsets.update(shape=(batch, m * width + 1))]
    call = entries_plan(of_words.shape, nse)
    found = launch.lower(ctx, call, [words, begins], avals, of_entries, compiler=nvrtc)
    return [offsets, *found]


def _entries_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    return bind(bitmap_entries_p, *primals, **params), None


bitmap_entries_p = define(
    "bitmap_entries",
    data=1,
    axes="b -> b, b, b",
    abstract_eval=_entries_eval,
    reference=_entries_reference,
    cpu=_entries_cpu,
    cuda=_entries_cuda,
    jvp=_entries_jvp,
    transpose=None,
    multiple_results=True,
)

# The operands of bitmap_of_scores_p -> values [B, nse] of the dtype of scores, offsets [B, m + 1],
# columns [B, nse]: the entries of the bits that it makes, with what scores has there. The offsets
# count all; zeros are behind the last one.


def bind_reached(*operands: Any, nse: int) -> list:
    return bind(reached_p, *operands, nse=nse, schedule=None)


def _reached_eval(*operands: Any, nse: int, schedule: Schedule | None) -> list:
    words = _of_scores_eval(*operands, schedule=schedule)
    return _dense_entries_aval(operands[0], words.shape[0], nse)


def _dense_entries_aval(x: Any, batch: Any, nse: int) -> list:
    int32 = jnp.dtype(jnp.int32)
    sizes = [(nse, x.dtype), (x.shape[1] + 1, int32), (nse, int32)]
    return [out_aval(x, (batch, size), dtype) for size, dtype in sizes]


def _reached_reference(*operands: Any, nse: int, schedule: Schedule | None) -> list:
    words = bind(bitmap_of_scores_p, *operands, schedule=schedule)
    return _entries_at(operands[0], words, nse, schedule)


def _entries_at(x: Any, words: Any, nse: int, schedule: Schedule | None) -> list:
    offsets, rows, columns = bind(bitmap_entries_p, words, nse=nse, schedule=schedule)

    def of_one(x: jax.Array, rows: jax.Array, columns: jax.Array, stored: jax.Array) -> jax.Array:
        values = x[rows, columns] if x.size else jnp.zeros(nse, x.dtype)
        inside = structure.positions(nse) < stored
        return jnp.where(inside, values, jnp.zeros((), x.dtype))

    shared = x.shape[0] == 1
    each = jax.vmap(of_one, (None if shared else 0, 0, 0, 0))
    return [each(x[0] if shared else x, rows, columns, offsets[:, -1]), offsets, columns]


def _reached_cpu(ctx: Any, *operands: Any, nse: int, schedule: Schedule | None) -> Any:
    if schedule is not None:
        return None
    return ffi_lowering("sgap_reached_csr_v1", ctx, operands)


def _reached_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    # Which entries are stored does not change: d values = d scores at these.
    out, dscores = bind(reached_p, *primals, **params), tangents[0]
    return out, None if dscores is None else _tangents_at(dscores, out)


def _tangents_at(dx: Any, out: Any) -> Any:
    values, offsets, columns = out
    return scores_at(jnp.broadcast_to(dx, (values.shape[0], *dx.shape[1:])), offsets, columns)


def _reached_batch(args: Any, dims: Any, **params: Any) -> Any:
    return batch_rule(reached_p, 4, *_bounds_mapped(args, dims), **params)


reached_p = define(
    "reached",
    data=4,
    axes="b, b, b, b -> b, b, b",
    abstract_eval=_reached_eval,
    reference=_reached_reference,
    cpu=_reached_cpu,
    jvp=_reached_jvp,
    transpose=None,
    batch=_reached_batch,
    multiple_results=True,
)

# x [B, m, n] of any dtype -> values [B, nse], offsets [B, m + 1], columns [B, nse]: the entries
# that are not 0, as above. -0 counts as 0; subnormal numbers do not.


def _nonzero_eval(x: Any, *, nse: int, schedule: Schedule | None) -> list:
    return _dense_entries_aval(x, x.shape[0], nse)


def _nonzero_reference(x: Any, *, nse: int, schedule: Schedule | None) -> list:
    words = bind(bitmap_of_mask_p, _is_not_zero(x), schedule=schedule)
    return _entries_at(x, words, nse, schedule)


def _is_not_zero(x: jax.Array) -> jax.Array:
    """x != 0, of subnormal numbers too, which XLA takes for 0 in comparisons of floats."""
    if jnp.iscomplexobj(x):
        return _is_not_zero(x.real) | _is_not_zero(x.imag)
    if x.dtype.name not in KERNEL_DTYPES:  # of 8 bits and fewer some have no sign, or NaN as -0
        return x.astype(bool)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return (bits << 1) != 0  # but for the sign


def _nonzero_cpu(ctx: Any, x: Any, *, nse: int, schedule: Schedule | None) -> Any:
    if schedule is not None or ctx.avals_in[0].dtype.name not in _OF_NONZERO:
        return None
    return ffi_lowering("sgap_nonzero_csr_v1", ctx, [x])


def _nonzero_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    out, dx = bind(nonzero_p, *primals, **params), tangents[0]
    return out, None if dx is None else _tangents_at(dx, out)


_INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
_OF_NONZERO = (*KERNEL_DTYPES, *_INTEGERS, "bool", "complex64", "complex128")

nonzero_p = define(
    "nonzero",
    data=1,
    axes="b -> b, b, b",
    abstract_eval=_nonzero_eval,
    reference=_nonzero_reference,
    cpu=_nonzero_cpu,
    jvp=_nonzero_jvp,
    transpose=None,
    multiple_results=True,
)


@partial(jax.jit, static_argnames="schedule", inline=True)
def bitmap(mask: jax.Array, schedule: Schedule | None = None) -> jax.Array:
    """A mask [m, n] in bits: uint32 [m, ceil(n / 32)], lower columns in lower bits."""
    return jnp.squeeze(bind(bitmap_of_mask_p, mask[None], schedule=schedule), 0)


@partial(jax.jit, static_argnames=("nse", "schedule"), inline=True)
def entries(words: jax.Array, nse: int, schedule: Schedule | None = None) -> tuple:
    """(offsets [m + 1], rows [nse], columns [nse]) of the bits that are set. The offsets count all
    of them, up to the greatest int32; the first nse are stored, and zeros behind the last one."""
    out = bind(bitmap_entries_p, words[None], nse=nse, schedule=schedule)
    return tuple(jnp.squeeze(x, 0) for x in out)


@partial(jax.jit, static_argnames=("nse", "transposed"), inline=True)
def nonzero(x: jax.Array, nse: int, transposed: bool) -> tuple:
    if transposed:  # a kernel would read a copy; bits are made of x as it is
        out = _nonzero_reference(x.T[None], nse=nse, schedule=None)
    else:
        out = bind(nonzero_p, x[None], nse=nse, schedule=None)
    return tuple(jnp.squeeze(x, 0) for x in out)
