"""The scores of a selection, whole or in tiles of rows, and the arguments that say which count."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from sgap_jax.formats import checks, structure, vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.primitives._define import accumulator, as_numbers
from sgap_jax.primitives.sddmm import sddmm
from sgap_jax.schedules import Schedule
from sgap_jax.schedules.schedule import KERNEL_DTYPES

SELECTED = "sgap_jax.select"  # names structures that derivatives use again
_TILE_SCORES, _LEAST_ROWS = 1 << 20, 16  # of a tile
# With few columns a tile has fewer scores, a quarter or those of so many rows: several selections
# may be mapped, and share the cache then.
_FEW, _ROWS_OF_FEW = 1 << 18, 1024
# Rows under a diagonal are cut into so many bands, each as wide as its last row; every band is a
# loop of its own in the program.
_CAUSAL_BANDS = 4
_CHUNK = 4096  # entries whose scores are computed together


class Scores(NamedTuple):
    """Scores of a grid of rows and columns, which columns exist, and which come first.

    Attributes:
      source: scores [m, n]; (q [m, d], keys [n, d]) for q keys^T; or a function of rows [r] and
        columns [c], both int32, which gives scores [r, c].
      limits: int32 [m]: in row i the columns j < limits[i] exist.
      keep: which columns come first: None, bool [m or 1, n or 1], a function of rows [r, 1] and
        columns [1, c] that gives bools, or (offsets [m + 1], columns) of a structure.
    """

    source: Any
    limits: jax.Array
    keep: Any

    @property
    def in_tiles(self) -> bool:
        return callable(self.source) or isinstance(self.source, tuple)

    @property
    def has_functions(self) -> bool:
        return callable(self.source) or callable(self.keep)


class Band(NamedTuple):
    """Consecutive tiles of one size, from a row on; columns beyond `columns` do not exist there."""

    first: int
    tiles: int
    rows: int  # of a tile; the last tile may end past the last row
    columns: int


class Tile(NamedTuple):
    """A tile of scores, as a selection ranks them: kept ones are infinite, and no derivative is
    taken. Rows past the last one repeat it, with limits of 0."""

    scores: jax.Array  # [r, c]
    ranked: jax.Array  # [r, c]
    limits: jax.Array  # [r]
    rows: jax.Array  # [r], which rows they are


def checked_scores(
    what: str,
    scores: Any,
    *,
    causal: bool,
    lengths: Any,
    keep: Any,
    format: Format,
    shape: Any,
) -> tuple[Scores, tuple[int, int], tuple[int, int]]:
    """(scores, their grid (m, n), the shape of the result) from a selection's arguments."""
    if callable(scores):
        if shape is None:
            raise ValueError(f"{what}: shape: scores that a function computes need shape=(m, n)")
        source, given = scores, None
    elif isinstance(scores, tuple) and len(scores) == 2 and all(map(_is_matrix, scores)):
        source = _checked_product(what, *scores)
        given = (source[0].shape[0], source[1].shape[0])
    else:
        source = as_numbers(what, "scores", scores)
        if source.ndim != 2:
            raise ValueError(
                f"{what}: scores must have shape [m, n], got {list(source.shape)}; a batch is a "
                "vmap"
            )
        _check_dtype(what, "scores", source.dtype)
        given = (source.shape[0], source.shape[1])
    grid, shape = _checked_shape(what, shape, given, format)
    m, n = grid
    limits = jnp.full(m, n, jnp.int32)
    if causal:
        seen = _columns_seen(jnp.arange(m, dtype=jnp.int32), shape, format)
        limits = jnp.clip(seen, 0, n)
    if lengths is not None:
        lengths = checks.as_array(lengths)
        if lengths.shape not in ((), (m,)) or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ValueError(
                f"{what}: lengths must be integers [{m}] or one, got {list(lengths.shape)} of "
                f"{lengths.dtype}"
            )
        limits = jnp.minimum(limits, checks.saturated(lengths))
    return Scores(source, limits, _checked_keep(what, keep, grid)), grid, shape


def _columns_seen(row: Any, shape: tuple[int, int], format: Format) -> Any:
    """How many columns of the grid have an entry that the last row in row `row` of the grid sees
    under a causal mask; may be negative, or more than there are."""
    height, width = vectors.tile(format)
    return (row * height + (height - 1 + shape[1] - shape[0])) // width + 1


def bands(
    scores: Scores, grid: tuple[int, int], shape: tuple[int, int], format: Format, causal: bool
) -> tuple[Band, ...]:
    """The tiles of all rows; given scores are one tile, and so are those of a symbolic number of
    rows."""
    m, n = grid
    if not scores.in_tiles or export.is_symbolic_dim(m):
        return (Band(0, 1, m, n),)
    rows, few = (max(size // max(n, 1), _LEAST_ROWS) for size in (_TILE_SCORES, _FEW))
    count = max(-(-m // min(rows, max(few, _ROWS_OF_FEW))), 1)
    rows, parts = -(-m // count), min(count, _CAUSAL_BANDS) if causal else 1
    found = []
    for part in range(parts):
        begin, end = count * part // parts, count * (part + 1) // parts
        columns = n
        if causal:
            seen = _columns_seen(min(end * rows, m) - 1, shape, format)
            columns = min(max(seen, 1), n)
        found.append(Band(begin * rows, end - begin, rows, columns))
    return tuple(found)


def over_tiles(what: str, function: Callable, scores: Scores, band: Band, m: int) -> Any:
    """The results of function(tile) for each tile of a band, stacked along a new first axis."""

    symbolic = export.is_symbolic_dim(m)
    whole = not symbolic and band.first + band.tiles * band.rows <= m  # no tile ends past row m

    def of_tile(first: Any) -> Any:
        row = first + structure.positions(band.rows)
        rows = jnp.minimum(row, m - 1)
        limits = jnp.where(row < m, scores.limits[rows], 0) if m else scores.limits
        columns = structure.positions(band.columns)
        own = _scores_of(what, scores.source, rows, columns, first if whole else None)
        ranked = jax.lax.stop_gradient(own)
        if scores.keep is not None:
            kept = _kept(what, scores.keep, first, rows, columns, band.tiles)
            ranked = jnp.where(kept, jnp.asarray(jnp.inf, ranked.dtype), _below_infinity(ranked))
        return function(Tile(own, ranked, limits, rows))

    if callable(scores.source):
        # The derivative computes the scores of a tile again, if it needs them, but selects nothing.
        policy = jax.checkpoint_policies.save_only_these_names(SELECTED)
        of_tile = jax.checkpoint(of_tile, policy=policy, prevent_cse=band.tiles == 1)
    if band.tiles == 1:
        return jax.tree.map(lambda x: x[None], of_tile(jnp.int32(band.first)))
    if isinstance(scores.source, tuple):
        return _looped(of_tile, band)
    return jax.lax.map(of_tile, band.first + band.rows * structure.positions(band.tiles))


def _looped(of_tile: Callable, band: Band) -> Any:
    """`lax.map` of what has no derivative, as the scores of a product, which are there to be
    ranked. A mapped `scan` first copies all that it reads with the mapped axis in front, a `while`
    reads it where it is: the heads of q, here."""

    def room(x: jax.ShapeDtypeStruct) -> jax.Array:
        return structure.varying_like(jnp.zeros((band.tiles, *x.shape), x.dtype), x)

    def step(state: tuple) -> tuple:
        tile, found = state
        own = of_tile(band.first + band.rows * tile)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=tile, axis=0)
        return tile + 1, jax.tree.map(put, found, own)

    found = jax.tree.map(room, jax.eval_shape(of_tile, jnp.int32(band.first)))
    return jax.lax.while_loop(lambda state: state[0] < band.tiles, step, (jnp.int32(0), found))[1]


def _below_infinity(scores: jax.Array) -> jax.Array:
    """Each score lowered to the next lesser number of its dtype: the order stays, and no score is
    infinite, so that kept columns, which rank as infinity, come before all. The least finite number
    stays where it is, equal to the one above it then; -infinity and NaN stay too."""
    least = jnp.finfo(scores.dtype).min
    downward = jnp.nextafter(scores, jnp.asarray(-jnp.inf, scores.dtype))
    return jnp.where(scores > least, downward, scores)


def as_array(
    values: Any,
    offsets: jax.Array,
    indices: jax.Array,
    scores: Scores,
    grid: tuple[int, int],
    *,
    shape: tuple[int, int],
    format: Format,
    schedule: Schedule | None = None,
    checked: bool = True,
) -> SparseArray:
    """The selected structure with its scores, those of a product by sddmm, in blocks of one value
    each if the format has blocks."""
    transposed = structure.transpose_structure(offsets, indices, grid[1])
    fields = structure.as_fields(((), (offsets, indices)), transposed, checked=checked)
    if isinstance(scores.source, tuple):
        q, keys = scores.source
        pattern = jnp.zeros(indices.shape, q.dtype)
        A = SparseArray(values=pattern, **fields, shape=grid, format=CSR)
        values = sddmm(A, q, keys, schedule=schedule).values
    block = format.block_shape
    values = jnp.broadcast_to(values.reshape(-1, *[1] * len(block)), (indices.shape[0], *block))
    return SparseArray(values=values, **fields, shape=shape, format=format)


def checked_per_row(what: str, name: str, number: Any, m: int) -> jax.Array:
    """A real number, or one for each row, as [m]."""
    number = as_numbers(what, name, number)
    real = jnp.issubdtype(number.dtype, jnp.floating) or jnp.issubdtype(number.dtype, jnp.integer)
    if number.shape not in ((), (m,)) or not real:
        raise ValueError(
            f"{what}: {name} must be a real number or [{m}], got {list(number.shape)} of "
            f"{number.dtype}"
        )
    return jnp.broadcast_to(number, (m,))


def _is_matrix(x: Any) -> bool:
    return getattr(x, "ndim", None) == 2


def _check_dtype(what: str, name: str, dtype: Any) -> None:
    if dtype.name not in KERNEL_DTYPES:
        raise TypeError(f"{what}: {name} must be one of {KERNEL_DTYPES}, got {dtype}")


def _checked_product(what: str, q: Any, keys: Any) -> tuple[jax.Array, jax.Array]:
    q, keys = jnp.asarray(q), jnp.asarray(keys)
    _check_dtype(what, "scores of a product", q.dtype)
    if q.dtype != keys.dtype or q.shape[1] != keys.shape[1]:
        raise ValueError(
            f"{what}: scores (q, k) must have shapes [m, d] and [n, d] and one dtype, got "
            f"{list(q.shape)} of {q.dtype} and {list(keys.shape)} of {keys.dtype}"
        )
    return q, keys


def _checked_shape(
    what: str, shape: Any, grid: tuple[int, ...] | None, format: Format
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(the grid, the shape of an array whose entries, vectors or blocks are those of the grid)."""
    stored = format.levels[:2] == CSR.levels
    if not stored or format.order is not None or format.dense_modes or len(format.levels) > 4:
        raise ValueError(f"{what}: format must be CSR, CVS(V) or BCSR(r, c), got {format}")
    expected, most = "expected (m, n)", shape
    if grid is not None:
        most = [size * side for size, side in zip(grid, vectors.tile(format), strict=True)]
        expected = f"scores {list(grid)} in {format} are those of at most {most}"
    given: tuple[Any, ...] = most if shape is None else shape
    if shape is None and export.is_symbolic_dim(most[0]):  # rows of a program for any batch
        given = (most[0], *checks.check_shape(most[1:], what))
    else:
        given = checks.check_shape(given, what)
    own = vectors.grid(given, format) if len(given) == 2 else None
    if own is None or (grid is not None and own != list(grid)):
        raise ValueError(f"{what}: shape: {expected}, got {list(given)}")
    return (own[0], own[1]), (given[0], given[1])


def _checked_keep(what: str, keep: Any, grid: tuple[int, int]) -> Any:
    if keep is None or callable(keep):
        return keep
    if isinstance(keep, SparseArray):
        plain = keep.format.levels[:2] == CSR.levels and keep.format.order is None
        if keep.ndim != 2 or not plain or vectors.grid(keep.shape, keep.format) != list(grid):
            raise ValueError(
                f"{what}: keep must be a pattern in CSR, CVS(V) or BCSR(r, c) with the rows and "
                f"columns of the scores, {list(grid)}, got {list(keep.shape)} in {keep.format}"
            )
        offsets, indices = keep.index_arrays[1]
        return structure.well_formed(offsets, indices, grid[1])
    keep = jnp.asarray(keep)
    if keep.dtype != jnp.bool_:
        raise TypeError(f"{what}: keep must be boolean, got {keep.dtype}")
    return _broadcast_to_grid(what, "keep", keep, grid)


def _broadcast_to_grid(what: str, name: str, x: Any, grid: tuple[int, ...]) -> jax.Array:
    """x with two axes, each of size 1 or that of the grid."""
    fits = x.ndim <= 2 and all(
        got in (1, size) for got, size in zip(x.shape[::-1], grid[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"{what}: {name} must broadcast to {list(grid)}, got {list(x.shape)}")
    return jnp.reshape(x, (1,) * (2 - x.ndim) + x.shape)


def _scores_of(
    what: str, source: Any, rows: jax.Array, columns: jax.Array, first: jax.Array | None = None
) -> jax.Array:
    """[r, c]; `first` is that of rows that follow each other, else None."""
    if callable(source):
        got = as_numbers(what, "scores(rows, columns)", source(rows, columns))
        if got.shape != (rows.shape[0], columns.shape[0]):
            raise ValueError(
                f"{what}: scores(rows [r], columns [c]) must have shape [r, c], here "
                f"{[rows.shape[0], columns.shape[0]]}, got {list(got.shape)}"
            )
        _check_dtype(what, "scores(rows, columns)", got.dtype)
        return got
    if isinstance(source, tuple):
        q, keys = source
        # A slice where there can be one: XLA gathers from a copy of all rows.
        count = rows.shape[0]
        q = q[rows] if first is None else jax.lax.dynamic_slice_in_dim(q, first, count)
        # Only to rank: sddmm gives the values and their derivatives.
        q, keys = jax.lax.stop_gradient((q, keys[: columns.shape[0]]))
        return jax.lax.dot_general(
            q, keys, (((1,), (1,)), ((), ())), preferred_element_type=accumulator(q.dtype)
        )
    return source


def function_at_entries(
    what: str, source: Callable, rows: jax.Array, columns: jax.Array
) -> jax.Array:
    """A function's scores at entries [nnz], each computed alone, in chunks."""
    nnz = rows.shape[0]

    def one(row: jax.Array, column: jax.Array) -> jax.Array:
        return _scores_of(what, source, row[None], column[None])[0, 0]

    if nnz <= _CHUNK:
        return jax.vmap(one)(rows, columns)
    chunks = [jnp.pad(x, (0, -nnz % _CHUNK)).reshape(-1, _CHUNK) for x in (rows, columns)]
    of_chunk = jax.checkpoint(lambda entries: jax.vmap(one)(*entries), prevent_cse=False)
    return jax.lax.map(of_chunk, chunks).reshape(-1)[:nnz]


def _kept(
    what: str, keep: Any, first: jax.Array, rows: jax.Array, columns: jax.Array, tiles: int
) -> jax.Array:
    """bool, broadcasts to the tile: which columns come first."""
    tile = (rows.shape[0], columns.shape[0])
    if callable(keep):
        kept = jnp.asarray(keep(rows[:, None], columns[None]))
        if kept.dtype != jnp.bool_:
            raise TypeError(f"{what}: keep(rows, columns) must be boolean, got {kept.dtype}")
        return _broadcast_to_grid(what, "keep(rows [r, 1], columns [1, c])", kept, tile)
    if isinstance(keep, tuple):
        offsets, indices = keep
        return _marked(offsets, indices, first, tile, tiles)
    kept = keep if keep.shape[0] == 1 or tile[0] == 0 else keep[rows]
    return kept if kept.shape[1] == 1 else kept[:, : tile[1]]


def _marked(
    offsets: jax.Array, indices: jax.Array, first: jax.Array, tile: tuple[int, int], tiles: int
) -> jax.Array:
    """bool [r, c]: the entries of a structure in the rows from `first` on, read in chunks. How many
    there are is known at run time only."""
    nnz, m = indices.shape[0], offsets.shape[0] - 1
    marks = structure.varying_like(jnp.zeros(tile, bool), offsets, indices, first)
    if nnz == 0 or math.prod(tile) == 0:
        return marks
    own = offsets[jnp.minimum(first + structure.positions(tile[0] + 1), m)]
    chunk = -(-nnz // tiles)

    def mark(state: tuple) -> tuple:
        begin, marks = state
        entry = begin + structure.positions(chunk)
        column = jnp.where(entry < own[-1], indices[jnp.minimum(entry, nnz - 1)], -1)
        row = jnp.searchsorted(own, entry, side="right").astype(jnp.int32) - 1
        column = jnp.where(column >= 0, column, tile[1])
        return begin + chunk, marks.at[row, column].set(True, mode="drop")

    return jax.lax.while_loop(lambda state: state[0] < own[-1], mark, (own[0], marks))[1]
