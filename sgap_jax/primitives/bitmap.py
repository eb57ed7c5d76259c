"""The primitives behind `bitmap` and `entries_of_bitmap` of formats/structure.py: a mask in bits,
and the entries of the bits that are set."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats import checks, structure
from sgap_jax.formats.structure import WORD_COLUMNS
from sgap_jax.launch import launch, nvrtc
from sgap_jax.launch.bitmap import entries_plan, of_mask_plan
from sgap_jax.primitives._batch import plain_lowering
from sgap_jax.primitives._define import bind, define, ffi_lowering, is_launched, out_aval
from sgap_jax.schedules import Schedule

_FAMILY = "bitmap", "bitmaps are made and read in plain JAX"

# mask [B, m, n] bool -> words [B, m, ceil(n / 32)] uint32: lower columns in lower bits, and 0
# behind the last one.


def _words_eval(mask: Any, *, schedule: Schedule | None) -> Any:
    batch, m, n = mask.shape
    return out_aval(mask, (batch, m, -(-n // WORD_COLUMNS)), jnp.dtype(jnp.uint32))


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


@partial(jax.jit, static_argnames="schedule", inline=True)
def bitmap(mask: jax.Array, schedule: Schedule | None = None) -> jax.Array:
    return jnp.squeeze(bind(bitmap_of_mask_p, mask[None], schedule=schedule), 0)


@partial(jax.jit, static_argnames=("nse", "schedule"), inline=True)
def entries(words: jax.Array, nse: int, schedule: Schedule | None = None) -> tuple:
    out = bind(bitmap_entries_p, words[None], nse=nse, schedule=schedule)
    return tuple(jnp.squeeze(x, 0) for x in out)
