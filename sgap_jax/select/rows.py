"""Selection in each row of scores: the k greatest, and the most probable ones."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from sgap_jax.formats import checks, structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, Format, as_format
from sgap_jax.primitives._define import check_schedule
from sgap_jax.primitives.nucleus import bind_nucleus, bind_totals
from sgap_jax.primitives.top_k import bind_top_k, scores_at
from sgap_jax.schedules import Schedule
from sgap_jax.select.scores import (
    SELECTED,
    Band,
    Scores,
    Tile,
    as_array,
    bands,
    checked_per_row,
    checked_scores,
    over_tiles,
)


def top_k(
    scores: ArrayLike | tuple[jax.Array, jax.Array] | Callable,
    k: int,
    *,
    causal: bool = False,
    lengths: ArrayLike | None = None,
    keep: ArrayLike | SparseArray | Callable | None = None,
    format: Format | str = CSR,
    shape: tuple[int, int] | None = None,
    schedule: Schedule | str | None = None,
) -> SparseArray:
    """The k greatest scores of each row, as a sparse array with the scores as its values:

        (i, j) stored  <=>  fewer than k columns of row i come before j,

    where greater scores come first, and of equal ones (0 and -0 are) the lower column; NaN comes
    after every number, and -infinity is never stored. A row with fewer scores stores those. Columns
    ascend in each row, as in any CSR array. Works inside jit: the capacity is m min(k, n), and what
    rows leave of it is padding. Differentiable in scores, as `jax.lax.top_k` is; the pattern itself
    is piecewise constant.

    Args:
      scores: [m, n], float32, float64, bfloat16 or float16; for CVS(V) and BCSR(r, c) one score for
        each vector or block of the pattern. Batches: `jax.vmap`. Or scores that are never held as a
        whole, but computed and selected in tiles of rows, of about a million scores each:
        a pair (q [m, d], k [n, d]) of one dtype stands for q k^T, accumulated in float32 (float64
        for float64), where `sddmm` gives the values and the derivatives at what is selected;
        a function of rows (int32 [r]) and columns (int32 [c]) gives [r, c] scores of these dtypes,
        such as `lambda rows, columns: q[rows] @ k[columns].T`. It needs `shape`, is differentiable
        in what it closes over, a tile at a time, and belongs under `jax.jit`.
      k: how many at most, static; all if more than n.
      causal: only entries (i, j) with j <= i + N - M of the result [M, N]: the last row sees all.
        Of vectors and blocks those with such an entry. Tiles leave out most of the other columns.
      lengths: int32 [m] or scalar, may be traced: only columns j < lengths[i].
      keep: columns that come before all others, such as the own and the first block; those with a
        score of -infinity too. They count among the k; with it the two least finite numbers of the
        dtype count as equal. bool that broadcasts to [m, n]; or a
        SparseArray such as `masks.band(n, 64)`, of which the stored entries, vectors or blocks are
        kept; or a function of rows [r, 1] and columns [1, c] that gives bools, as that of
        `masks.from_function`. The last two are read in tiles where the scores are.
      format: CSR; CVS(V) or BCSR(r, c), whose numbers are all the score of their vector or block.
      shape: of the result; by default [m, n], or for vectors and blocks [m r, n c].
      schedule: None; `Reference()` for plain JAX.

    Returns:
      A SparseArray whose structure is checked. The same bits for any number of threads.

    Raises:
      TypeError: scores of another dtype, or k not an integer.
      ValueError: wrong shapes, a negative k, or another format.

    Source: DeepSeek-V3.2-Exp (2025), section 2, for tokens; MoBA (Lu et al. 2025) for blocks. On
    the CPU one pass over the scores: a threshold from a sample leaves a few more than k candidates,
    and a search over these finds the k-th. In time O(m n).
    """
    what = "select.top_k"
    schedule = check_schedule(what, schedule)
    format = as_format(format, what)
    given, grid, shape = checked_scores(
        what, scores, causal=causal, lengths=lengths, keep=keep, format=format, shape=shape
    )
    k = _checked_capacity(what, "k", k, grid, format)
    run = _top_k if given.has_functions else _jitted_top_k
    return run(
        given,
        what=what,
        grid=grid,
        k=k,
        tiles=bands(given, grid, shape, format, causal),
        shape=shape,
        format=format,
        schedule=schedule,
    )


def top_p(
    scores: ArrayLike | tuple[jax.Array, jax.Array] | Callable,
    p: ArrayLike,
    *,
    most: int,
    causal: bool = False,
    lengths: ArrayLike | None = None,
    keep: ArrayLike | SparseArray | Callable | None = None,
    format: Format | str = CSR,
    shape: tuple[int, int] | None = None,
    schedule: Schedule | str | None = None,
) -> SparseArray:
    """The most probable columns of each row that together have probability p (its nucleus), at most
    `most` of them, as a sparse array with the scores as its values:

        (i, j) stored  <=>  the columns of row i before j have, together, a probability below p[i],
                            and are fewer than `most`,

    with the probabilities P[i, :] = softmax(scores[i, :]) over the columns that exist, and the
    order of `top_k`. So the last one stored is the one that reaches p. From 1 on p stores all
    columns, up to `most`; 0 stores none. NaN has probability 0, and of infinite scores each has the
    same. Scores that are logarithms of probabilities have these as P.

    Args:
      scores, causal, lengths, format, shape, schedule: as in `top_k`.
      p: a number, or [m]; may be traced. Has no derivative.
      most: how many columns a row stores at most, static; all if more than n. A nucleus that has
        more is cut to its most probable ones.
      keep: as in `top_k`; kept columns are stored whatever p is, and their probabilities count.

    Returns:
      A SparseArray of capacity m min(most, n) whose structure is checked; padding after the last
      entry. Sums of probabilities accumulate in float32 (float64 for float64).

    Raises:
      TypeError, ValueError: as `top_k`; p of another shape or not real.

    Source: Holtzman et al. 2020, section 3.1 (nucleus sampling). On top of `top_k`, with sums over
    each row and a bisection over what that selects: kernels on the CPU and on CUDA.
    """
    what = "select.top_p"
    schedule = check_schedule(what, schedule)
    format = as_format(format, what)
    given, grid, shape = checked_scores(
        what, scores, causal=causal, lengths=lengths, keep=keep, format=format, shape=shape
    )
    most = _checked_capacity(what, "most", most, grid, format)
    p = checked_per_row(what, "p", p, grid[0])
    run = _top_p if given.has_functions else _jitted_top_p
    return run(
        given,
        p,
        what=what,
        grid=grid,
        k=most,
        tiles=bands(given, grid, shape, format, causal),
        shape=shape,
        format=format,
        schedule=schedule,
    )


def _checked_capacity(what: str, name: str, k: Any, grid: tuple[int, int], format: Format) -> int:
    k = min(checks.check_count(k, name, what), grid[1])
    checks.check_nnz(grid[0] * k * math.prod(format.block_shape), what)
    return k


def _top_k(
    scores: Scores, *, what: str, grid: Any, k: int, tiles: Any, schedule: Any, **result: Any
) -> SparseArray:
    found = _greatest(what, scores, grid, k, tiles, schedule)
    return as_array(
        found.values, found.offsets, found.indices, scores, grid, schedule=schedule, **result
    )


def _top_p(
    scores: Scores,
    p: jax.Array,
    *,
    what: str,
    grid: Any,
    k: int,
    tiles: Any,
    schedule: Any,
    **result: Any,
) -> SparseArray:
    found = _greatest(what, scores, grid, k, tiles, schedule, probable=True)
    values, offsets, indices = found.values, found.offsets, found.indices
    if indices.shape[0]:
        kept = found.ranked is not None
        ranked = found.ranked if kept else values
        operands = (values, ranked, found.greatest, found.total, p.astype(found.total.dtype))
        own = (x[None] for x in (*operands, offsets, indices))
        found_of_one = bind_nucleus(*own, k=k, n=grid[1], kept=kept, schedule=schedule)
        offsets, indices, entry = (jnp.squeeze(x, 0) for x in found_of_one)
        stored = structure.positions(entry.shape[0]) < offsets[-1]
        values = jnp.where(stored, values[entry], jnp.zeros((), values.dtype))
    return as_array(values, offsets, indices, scores, grid, schedule=schedule, **result)


_STATIC = ("what", "grid", "k", "tiles", "shape", "format", "schedule")
_jitted_top_k = structure.in_auto_axes(jax.jit(_top_k, static_argnames=_STATIC, inline=True))
_jitted_top_p = structure.in_auto_axes(jax.jit(_top_p, static_argnames=_STATIC, inline=True))


class _Found(NamedTuple):
    """The k greatest of each row: a structure, padded to m k entries.

    values, ranked [m k] are the scores and what ranks them, which is infinite for kept columns, and
    None where none is kept. greatest, total [m] are the greatest score of each row and the sum of
    exp(score - greatest).
    """

    values: Any
    ranked: Any
    indices: Any
    offsets: Any
    greatest: Any
    total: Any


def _greatest(
    what: str,
    scores: Scores,
    grid: tuple[int, int],
    k: int,
    tiles: tuple[Band, ...],
    schedule: Schedule | None,
    probable: bool = False,
) -> _Found:
    def of_tile(tile: Tile, k: int) -> _Found:
        # The values of the primitive are the scores that it ranked.
        direct = scores.keep is None and not callable(scores.source)
        by = (tile.scores if direct else tile.ranked)[None]
        ranked, offsets, indices = bind_top_k(by, tile.limits[None], k, schedule)
        offsets, indices = (checkpoint_name(x, SELECTED) for x in (offsets, indices))
        values = ranked if direct else scores_at(tile.scores[None], offsets, indices)
        sums: tuple = (None, None)
        if probable:
            own = jax.lax.stop_gradient(tile.scores)[None]
            sums = tuple(x[0] for x in bind_totals(own, tile.limits[None], schedule))
        kept = probable and scores.keep is not None
        order = jax.lax.stop_gradient(ranked)[0] if kept else None
        return _Found(values[0], order, indices[0], offsets[0], *sums)

    found = [
        over_tiles(what, partial(of_tile, k=min(k, band.columns)), scores, band, grid[0])
        for band in tiles
    ]
    return _joined(found, grid[0], k)


def _joined(parts: list[_Found], m: int, k: int) -> _Found:
    """One structure of those of all tiles, which are stacked in each part. Rows from m on, of the
    last tile, have no entries."""
    if len(parts) == 1 and parts[0].offsets.shape[0] == 1:
        return _Found(*(x if x is None else x[0] for x in parts[0]))
    counts = jnp.concatenate([jnp.diff(part.offsets).reshape(-1) for part in parts])
    offsets = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
    first, rows = 0, parts[0].offsets.shape[1] - 1
    joined: Any = None
    for part in parts:
        tiles = (part.values, part.ranked, part.indices)
        if joined is None:
            joined = jax.tree.map(
                lambda x: structure.varying_like(jnp.zeros(len(counts) * k, x.dtype), x), tiles
            )
        starts = offsets[first : first + len(part.offsets) * rows : rows]
        joined = _written(joined, tiles, starts)
        first += len(part.offsets) * rows
    values, ranked, indices = jax.tree.map(lambda x: x[: m * k], joined)
    sums = jax.tree.map(
        lambda *xs: jnp.concatenate([x.reshape(-1) for x in xs])[:m],
        *((part.greatest, part.total) for part in parts),
    )
    return _Found(values, ranked, indices, offsets[: m + 1], *sums)


def _written(joined: Any, tiles: Any, starts: jax.Array) -> Any:
    """Writes the entries of each tile from its start on; the next tile overwrites the padding."""

    def write(joined: Any, tile: tuple) -> tuple:
        start, entries = tile
        put = partial(jax.lax.dynamic_update_slice, start_indices=(start,))
        return jax.tree.map(put, joined, entries), None

    return jax.lax.scan(write, joined, (starts, tiles))[0]
