"""Builds masks from the columns of rows, as slices of a table, or from a boolean function."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sgap_jax.formats import row_statistics, structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_callable, check_concrete, check_nnz
from sgap_jax.formats.direct import later_transpose
from sgap_jax.formats.levels import CSR, CVS, Format, as_format
from sgap_jax.formats.stored import CheckedLevel
from sgap_jax.masks.diagonals import stored_diagonals
from sgap_jax.masks.pieces import pieces_of_rows
from sgap_jax.masks.ranges import of_blocks

TRACED_MASK = (
    "how much a mask stores is a static size: make it outside jit and pass it as an argument. What "
    "is traced goes to sparse_attention beside it: key_value_seq_lengths, or a bias of -inf"
)

_LARGEST = 1 << 62  # sums of two fit in int64


def check_size(op: str, name: str, size: Any, least: int = 0) -> int:
    check_concrete(size, name, f"masks.{op}", TRACED_MASK)
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < least:
        named = "; the format is given by name, format=" if isinstance(size, Format | str) else ""
        raise ValueError(
            f"masks.{op}: {name} must be an integer of at least {least}, got {size!r}{named}"
        )
    if size > _LARGEST:
        raise ValueError(f"masks.{op}: {name} must be at most 2^62, got {size}")
    return int(size)


def rows_of_vectors(op: str, format: Any) -> tuple[Format, int]:
    """The format, and V for CVS(V), 1 for CSR; ValueError for others, which masks do not have."""
    format = as_format(format, f"masks.{op}")
    length = format.vector_length
    if format != CSR and (length is None or format != CVS(length)):
        raise ValueError(
            f"masks.{op}: format must be CSR or CVS(V), got {format}; others by asformat"
        )
    return format, length or 1


def of_block_rows(
    op: str,
    chunks: Iterable[tuple[Any, np.ndarray]],
    shape: tuple[int, int],
    format: Format | str,
) -> SparseArray:
    """The mask whose block rows come in chunks: how much each stores, and all their columns, which
    are distinct and ascend in each block row."""
    format, length = rows_of_vectors(op, format)
    return of_arrays(*joined(op, chunks, length), shape, format)


def joined(
    op: str, chunks: Iterable[tuple[Any, np.ndarray]], length: int, most: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The offsets and the columns of all chunks of block rows of `length` rows, `most` at most if
    that is known."""
    indices, used = structure.aligned(most, np.int32), 0
    parts: list[np.ndarray] = []  # a copy of all takes less than the pages of arrays that grow
    stored: list[Any] = [np.zeros(1, np.int64)]
    for counts, columns in chunks:
        end = used + len(columns)
        check_nnz(end * length, f"masks.{op}")
        if most:
            indices[used:end] = columns
        else:
            parts.append(columns.astype(np.int32, copy=False))
        used = end
        stored.append(counts)
    if parts:
        indices = structure.aligned(used, np.int32)
        np.concatenate(parts, out=indices)
    offsets = np.cumsum(np.concatenate(stored), dtype=np.int64).astype(np.int32)
    return offsets, indices[:used]


def of_arrays(
    offsets: np.ndarray, indices: np.ndarray, shape: tuple[int, int], format: Format
) -> SparseArray:
    """The mask with these int32 arrays, which are valid and are not copied."""
    (m, k), used = shape, len(indices)
    values = structure.aligned(used * math.prod(format.block_shape), np.float32)
    values.fill(1)
    of_column = np.zeros(k + 1, np.int64)
    step = max(1 << 17, 4 * k)  # np.bincount copies, and its result is as long as a row
    for first in range(0, used, step):
        of_column[1:] += np.bincount(indices[first : first + step], minlength=k)
    statistics = row_statistics.of_pattern(offsets, np.cumsum(of_column))
    with structure.concrete():  # under jit too
        arrays = [jax.device_put(x) for x in (offsets, indices)]  # not copied
        held = jax.device_put(values.reshape(used, *format.block_shape))
    transposed: Any = later_transpose(offsets, indices, k)
    level = CheckedLevel(*arrays)
    return SparseArray(held, ((), level), transposed, (m, k), format, statistics)


def row_chunks(ends: np.ndarray, length: int = 1) -> Iterator[slice]:
    """Consecutive rows that have about as many entries as a cache holds, by the number of entries
    up to the end of each; but for the last ones a multiple of `length` rows."""
    rows, first = len(ends), 0
    while first < rows:
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + (1 << 17)))
        last = min(max(-(-last // length) * length, first + length), rows)
        yield slice(first, last)
        first = last


def of_slices(
    op: str,
    slices: Sequence[tuple[Any, Any]],
    shape: tuple[int, int],
    format: Format | str,
    table: np.ndarray | None = None,
    moved: bool = False,
) -> SparseArray:
    """The mask of `rows_of_slices`."""
    format, length = rows_of_vectors(op, format)
    arrays = rows_of_slices(op, slices, shape, length, table, moved)
    return of_arrays(*arrays, shape, format)


def rows_of_slices(
    op: str,
    slices: Sequence[tuple[Any, Any]],
    shape: tuple[int, int],
    length: int,
    table: np.ndarray | None = None,
    moved: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and columns of the mask whose row i stores the columns that its slices of a table
    hold: `table[a[i]:b[i]]` for each pair of arrays (a, b) of `slices`, and i more if `moved`.
    Without a table a slice is the columns from a[i] on, below b[i]. Slices may be empty, in any
    order, and hold a column twice.

    Linear in the entries of all rows where the columns of each row ascend from slice to slice; else
    it marks or sorts them. Each `length` rows together are a block row.
    """
    m, k = shape
    pairs = [np.broadcast_arrays(first, stop, np.arange(m))[:2] for first, stop in slices]
    first = np.stack([first for first, _ in pairs], 1).astype(np.int64)
    counts = np.maximum(np.stack([stop for _, stop in pairs], 1) - first, 0)
    ends = np.cumsum(counts.sum(1))
    total = int(ends[-1]) if m else 0
    check_nnz(total, f"masks.{op}")
    table = None if table is None else table.astype(np.int32, copy=False)

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for rows in row_chunks(ends, length):
            count, of_row = counts[rows].ravel(), counts[rows].sum(1)
            starts = np.cumsum(count) - count
            columns = np.arange(of_row.sum(), dtype=np.int32)
            columns += np.repeat((first[rows].ravel() - starts).astype(np.int32), count)
            columns = columns if table is None else table[columns]
            if moved:
                columns += np.repeat(np.arange(rows.start, rows.stop, dtype=np.int32), of_row)
            if length > 1 or not _ascends(of_row, columns):
                of_row, columns = _distinct(of_row, columns, length, k)
            yield of_row, columns

    return joined(op, chunks(), length, total)


def _ascends(of_row: np.ndarray, columns: np.ndarray) -> bool:
    """Whether the columns of each row do."""
    rises = columns[1:] > columns[:-1]
    ends = np.cumsum(of_row)
    rises[ends[(ends > 0) & (ends < len(columns))] - 1] = True
    return bool(rises.all())


def _distinct(
    of_row: np.ndarray, columns: np.ndarray, length: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The columns of each `length` rows together, ascending, each once; and their numbers."""
    blocks = -(-len(of_row) // length)
    dtype = np.int32 if blocks * k < 2**31 else np.int64  # half the time
    keys = np.repeat((np.arange(len(of_row)) // length * k).astype(dtype), of_row) + columns
    if blocks * k <= 64 * len(keys):
        seen = np.zeros(blocks * k, bool)
        seen[keys] = True
        keys = np.flatnonzero(seen)
    else:
        keys.sort()  # np.unique hashes, and takes many times as long
        keys = keys[np.diff(keys, prepend=-1) > 0]
    counts = np.diff(np.searchsorted(keys, np.arange(1, blocks + 1) * k), prepend=0)
    return counts, keys - np.repeat(np.arange(blocks) * k, counts)


def from_function(
    f: Callable[[np.ndarray, np.ndarray], np.ndarray],
    L: int,
    S: int | None = None,
    *,
    format: Format | str = CSR,
    block: int = 512,
) -> SparseArray:
    """The mask that stores (i, j) where f(i, j) is true.

    f is evaluated in blocks, so that no array of L S booleans is allocated. First it is called with
    objects in the place of integers, which tell how it uses them. What depends on j - i alone, such
    as windows and dilated ones, is evaluated once for each diagonal. What is made of comparisons of
    linear functions of rows and columns (`+`, `-`, `*` by a number, abs, minimum, maximum, `&`,
    `|`, `~`; of rows also `//`, `%` and lookups in an array), such as a window and the first keys
    or `j < lengths[i]`, is evaluated once for each piece of a row in which it does not change, for
    all rows at once, where that is at most a quarter of the pairs and 4 million evaluations.
    Else, where these operations, `//` and `%` by a positive number, and lookups in arrays of ranges
    of rows and columns say that a block is full or empty, its entries are not evaluated: of
    `documents[i] == documents[j]` the blocks of two documents are empty. For that f is also called
    with stand-ins for the arrays in its closure, its globals and its default values. What does
    anything else is evaluated for all L S pairs, and so is a function of which the ranges of blocks
    say nothing, as of documents in no order (`block_diagonal` is for these).

    Args:
      f: maps rows [r, 1] and columns [1, c] or [r, c], NumPy integers, to booleans [r, c] or what
        broadcasts to that shape; like FlexAttention's `mask_mod` of (q_idx, kv_idx), but for
        arrays.
      L: number of queries.
      S: number of keys, L if None.
      format: CSR or CVS(V).
      block: f is evaluated for so many pairs at a time as a block of so many rows and columns has.

    Returns:
      A SparseArray of ones, of shape [L, S].

    Raises:
      ValueError: invalid sizes or format, or f does not give booleans [r, c].
    """
    op = "from_function"
    if callable(L) and not callable(f):
        raise ValueError(f"masks.{op}: f comes first: from_function(f, {f!r})")
    L, S = check_size(op, "L", L), check_size(op, "S", L if S is None else S)
    (format, length), block = rows_of_vectors(op, format), check_size(op, "block", block, 1)
    mask_mod = "; of a mask_mod that is lambda i, j: f(0, 0, i, j)"
    check_callable(f, "ij", f"masks.{op}: f: expected a function of rows and columns", mask_mod)
    kept = stored_diagonals(f, L, S)
    if kept is not None:
        first, stop = (np.searchsorted(kept, x) for x in (-np.arange(L), S - np.arange(L)))
        return of_slices(op, [(first, stop)], (L, S), format, kept, moved=True)
    ends = pieces_of_rows(f, L, S) if S else None
    if ends is not None:
        first, stop = ends[:, :-1], ends[:, 1:]
        seen = _evaluated(f, np.arange(L)[:, None], np.minimum(first, S - 1))
        stop = np.where(seen, stop, first)
        return of_slices(op, list(zip(first.T, stop.T, strict=True)), (L, S), format)
    step = min(block, _KNOWN_BLOCK)
    height = -(-step // length) * length
    known = of_blocks(f, L, S, height, step)
    if known is not None and not _spares(known[0], known[1], height * step):
        known = None
    if known is None:  # few long rows: in NumPy's loops each row takes a start
        height = -(-max(block // 8, 1) // length) * length
    width = max(block * block // height, 1)  # of what is evaluated at a time
    step = step if known is not None else width

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for b, first in enumerate(range(0, L, height)):
            rows = np.arange(first, min(first + height, L))[:, None]
            full = empty = np.zeros(-(-S // step), bool)
            if known is not None:
                full, empty = (x[b] for x in known)
            # A run of blocks that are not empty at a time, no wider than `width`.
            runs: Iterable[tuple[np.ndarray, Any]] = (
                (keys, True if whole else _evaluated(f, rows, keys[None]))
                for keys, whole in _runs(full, empty, step, S, width)
            )
            if known is not None:
                runs = _joined(list(runs), len(rows))
            parts = [_of_block(seen, rows, keys, length) for keys, seen in runs]
            blocks = -(-len(rows) // length)
            counts = np.sum([count for count, _ in parts], 0) if parts else np.zeros(blocks, int)
            columns = np.concatenate([found for _, found in parts]) if parts else np.arange(0)
            if len(parts) > 1:
                number = np.arange(blocks, dtype=np.min_scalar_type(blocks))  # sorts by digits
                order = np.concatenate([np.repeat(number, count) for count, _ in parts])
                columns = columns[np.argsort(order, kind="stable")]
            yield counts, columns

    return of_block_rows(op, chunks(), (L, S), format)


def _joined(runs: list[tuple[np.ndarray, Any]], rows: int) -> list[tuple[np.ndarray, Any]]:
    """Runs of one row of blocks as one where they are near: else their columns are sorted."""
    if len(runs) < 2:
        return runs
    first, last = runs[0][0][0], runs[-1][0][-1]
    if last - first >= 2 * sum(len(keys) for keys, _ in runs):
        return runs
    seen = np.zeros((rows, last - first + 1), bool)
    for keys, found in runs:
        seen[:, keys[0] - first : keys[-1] - first + 1] = found
    return [(np.arange(first, last + 1), seen)]


def _of_block(
    seen: Any, rows: np.ndarray, keys: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """How many columns each `length` rows of a block store, and which."""
    blocks, width = -(-len(rows) // length), len(keys)
    if seen is True:
        return np.full(blocks, width), np.tile(keys, blocks)
    if length == 1:
        vectors: Any = np.broadcast_to(seen, (blocks, width))
    else:
        padded = np.zeros((blocks * length, width), bool)
        padded[: len(rows)] = seen
        vectors = padded.reshape(blocks, length, width).any(1)
    places = np.flatnonzero(vectors)  # np.nonzero and sums of rows take several times as long
    first = np.arange(blocks + 1) * width
    ends = np.searchsorted(places, first)
    counts = ends[1:] - ends[:-1]
    return counts, keys[places - np.repeat(first[:-1], counts)]


_KNOWN_BLOCK = 64  # rows and columns of a block about which ranges say something
_PAIRS_OF_RUN = 1 << 15  # a run of blocks takes as long as the evaluation of so many pairs


def _spares(full: np.ndarray, empty: np.ndarray, pairs: int) -> bool:
    """Whether it pays to know which blocks, of so many pairs, are full and which are empty."""
    kind = np.where(empty, 0, np.where(full, 2, 1))
    begins = np.diff(kind, axis=1, prepend=0) != 0
    runs, evaluated = np.count_nonzero(begins & (kind > 0)), np.count_nonzero(kind == 1)
    return bool(runs * _PAIRS_OF_RUN + evaluated * pairs < kind.size * pairs)


def _runs(
    full: np.ndarray, empty: np.ndarray, step: int, S: int, most: int
) -> Iterator[tuple[np.ndarray, bool]]:
    """(columns, whether all are stored) of blocks that are not empty: neighbours of one kind
    together, those that are evaluated up to `most` columns at a time."""
    kind = np.where(empty, 0, np.where(full, 2, 1))
    ends = np.flatnonzero(np.diff(kind, append=-1)) + 1
    for first, end in zip([0, *ends[:-1]], ends, strict=len(ends) > 0):
        if kind[first] == 0:
            continue
        whole = bool(kind[first] == 2)
        left, right = int(first) * step, min(int(end) * step, S)
        size = right - left if whole else max(most, step)
        for begin in range(left, right, size):
            yield np.arange(begin, min(begin + size, right)), whole


def _evaluated(f: Callable, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """f as booleans that broadcast to [r, c]."""
    op = "from_function"
    try:
        seen = f(rows.copy(), keys.copy())  # f may work in place
    except ValueError as error:
        if "truth value of an array" not in str(error):
            raise
        raise ValueError(
            f"masks.{op}: f: expected an expression of arrays: `a & b`, `a | b`, `~a` in place "
            "of `a and b`, `a or b`, `not a`, `(a <= b) & (b < c)` of `a <= b < c`, np.where of if"
        ) from error
    check_concrete(seen, "f(rows, columns)", f"masks.{op}", TRACED_MASK)
    seen = np.asarray(seen)
    if seen.dtype != np.bool_:
        raise ValueError(f"masks.{op}: f must give booleans, got {seen.dtype}")
    want = (len(rows), keys.shape[1])
    fits = seen.ndim <= 2 and all(
        got in (1, size) for got, size in zip(seen.shape[::-1], want[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"masks.{op}: f must give booleans that broadcast to {list(want)} for rows "
            f"[{want[0]}, 1] and columns [1, {want[1]}], got {list(seen.shape)}"
        )
    return seen
