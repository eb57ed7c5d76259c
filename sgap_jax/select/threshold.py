"""Selection of all scores from a threshold on."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import ArrayLike

from sgap_jax.formats import checks, structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, Format, as_format
from sgap_jax.primitives._define import accumulator
from sgap_jax.primitives.bitmap import WORD_COLUMNS, bind_of_scores, bind_reached, entries
from sgap_jax.select.scores import (
    Scores,
    Tile,
    as_array,
    bands,
    checked_per_row,
    checked_scores,
    function_at_entries,
    over_tiles,
)


def threshold(
    scores: ArrayLike | tuple[jax.Array, jax.Array] | Callable,
    at: ArrayLike,
    *,
    nse: int,
    causal: bool = False,
    lengths: ArrayLike | None = None,
    keep: ArrayLike | SparseArray | Callable | None = None,
    format: Format | str = CSR,
    shape: tuple[int, int] | None = None,
) -> SparseArray:
    """All scores of at least a threshold, as a sparse array with the scores as its values:

        (i, j) stored  <=>  scores[i, j] >= at[i], and scores[i, j] is not -infinity

    NaN is not at least anything. Works inside jit: the capacity `nse` is static, and what is left
    of it is padding. If more entries reach their thresholds, the array has the first `nse` of them,
    by rows; its last row offset counts all of them, and `checked()` raises, inside jit when the
    program runs; `A.overflow` is how many entries, vectors or blocks did not fit. For a bound on
    each row that keeps the greatest instead: `top_k` of the scores with -infinity in place
    of those below the threshold.

    Args:
      scores, causal, lengths, format, shape: as in `top_k`; a function's values are its scores
        computed again, at each selected entry alone, which also is where its derivative is taken.
      at: a number, or [m]; may be traced. Compared in float32 (float64 for float64 scores), where 0
        and -0 are equal. Has no derivative.
      nse: how many entries, vectors or blocks the result can store, static; m n if more than that.
      keep: as in `top_k`; kept columns are stored whatever their scores are.

    Returns:
      A SparseArray, checked only if nse is m n: `A.checked()` checks it.

    Raises:
      TypeError, ValueError: as `top_k`; `at` of another shape or not real.
      NotImplementedError: a symbolic number of rows (`jax.export`).

    Source: SpargeAttn (Zhang et al. 2025) and MInference (Jiang et al. 2024) select blocks of
    attention by thresholds. A pass over the scores leaves a bit for each.
    """
    what = "select.threshold"
    format = as_format(format, what)
    given, grid, shape = checked_scores(
        what, scores, causal=causal, lengths=lengths, keep=keep, format=format, shape=shape
    )
    if export.is_symbolic_dim(grid[0]):
        raise NotImplementedError(
            f"{what}: a symbolic number of rows; the nearest is select.top_k, or a program for each"
        )
    nse = min(checks.check_count(nse, "nse", what), math.prod(grid))
    checks.check_nnz(nse * math.prod(format.block_shape), what)
    at = checked_per_row(what, "at", at, grid[0])
    run = _threshold if given.has_functions else _jitted_threshold
    tiles = bands(given, grid, shape, format, causal)
    return run(given, at, grid=grid, nse=nse, tiles=tiles, shape=shape, format=format)


def _threshold(
    scores: Scores, at: jax.Array, *, grid: tuple[int, int], nse: int, tiles: Any, **result: Any
) -> SparseArray:
    what, (m, n) = "select.threshold", grid
    width = -(-n // WORD_COLUMNS)

    def operands(tile: Tile) -> list[jax.Array]:
        none, dtype = (tile.scores.shape[0], 0), tile.scores.dtype
        kept = jnp.zeros(none, bool) if scores.keep is None else tile.ranked == jnp.inf
        own = (tile.scores, at[tile.rows].astype(accumulator(dtype)), tile.limits, kept)
        return [x[None] for x in own]

    def words_of(tile: Tile) -> jax.Array:
        words = jnp.squeeze(bind_of_scores(*operands(tile)), 0)
        return jnp.pad(words, ((0, 0), (0, width - words.shape[1])))

    def entries_of(tile: Tile) -> list:
        return bind_reached(*operands(tile), nse=nse)

    values = None  # of a product: sddmm's
    if not scores.in_tiles:
        found = over_tiles(what, entries_of, scores, tiles[0], m)
        values, offsets, columns = (x[0, 0] for x in found)
    else:
        parts = [over_tiles(what, words_of, scores, band, m) for band in tiles]
        words = [jnp.reshape(x, (x.shape[0] * x.shape[1], x.shape[2])) for x in parts]
        offsets, rows, columns = entries(jnp.concatenate(words)[:m], nse)
    if callable(scores.source):
        if 0 in grid:
            like = jax.eval_shape(scores.source, structure.positions(m), structure.positions(n))
            values = jnp.zeros(nse, like.dtype)
        else:
            values = function_at_entries(what, scores.source, rows, columns)
        stored = structure.positions(nse) < offsets[-1]
        values = jnp.where(stored, values, jnp.zeros((), values.dtype))
    checked = nse == m * n
    return as_array(values, offsets, columns, scores, grid, checked=checked, **result)


_STATIC = ("grid", "nse", "tiles", "shape", "format")
_jitted_threshold = structure.in_auto_axes(
    jax.jit(_threshold, static_argnames=_STATIC, inline=True)
)
