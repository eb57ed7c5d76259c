"""Builds masks from the columns of rows, as slices of a table, or from a boolean function."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_callable, check_concrete, check_nnz
from sgap_jax.formats.levels import CSR, CVS, Format, as_format
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
        raise ValueError(f"masks.{op}: format must be CSR or CVS(V), got {format}")
    return format, length or 1


def of_block_rows(
    op: str, counts: Any, columns: np.ndarray, shape: tuple[int, int], format: Format
) -> SparseArray:
    """The mask whose block row b stores the next `counts[b]` of `columns`, sorted and distinct."""
    format, length = rows_of_vectors(op, format)
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    check_nnz(int(offsets[-1]) * length, f"masks.{op}")
    ones = np.ones(len(columns) if format == CSR else (len(columns), length), np.float32)
    return SparseArray.from_arrays(
        ones, offsets.astype(np.int32), columns.astype(np.int32), shape=shape, format=format
    )


def of_slices(
    op: str,
    slices: Sequence[tuple[Any, Any]],
    shape: tuple[int, int],
    format: Format | str,
    table: np.ndarray | None = None,
) -> SparseArray:
    """The mask whose row i stores the columns that its slices of a table hold: `table[a[i]:b[i]]`
    for each pair of arrays (a, b) of `slices`. Without a table a slice is the columns from a[i] on,
    below b[i]. Slices may be empty, in any order, and hold a column twice.

    Linear in the entries where the columns of each row ascend from slice to slice; else it sorts.
    """
    (format, length), (m, k) = rows_of_vectors(op, format), shape
    pairs = [np.broadcast_arrays(first, stop, np.arange(m))[:2] for first, stop in slices]
    first = np.stack([first for first, _ in pairs], 1).astype(np.int64)
    counts = np.maximum(np.stack([stop for _, stop in pairs], 1) - first, 0)
    check_nnz(int(counts.sum()), f"masks.{op}")
    starts = np.cumsum(counts.ravel()) - counts.ravel()
    columns = np.arange(counts.sum(), dtype=np.int32)
    columns += np.repeat((first.ravel() - starts).astype(np.int32), counts.ravel())
    columns = columns if table is None else table.astype(np.int32)[columns]
    of_row = counts.sum(1)
    if length == 1:
        ascends = np.diff(columns, prepend=-1) > 0
        ends = np.cumsum(of_row)[of_row > 0]
        ascends[ends[:-1]] = True
        if ascends.all():
            return of_block_rows(op, of_row, columns, shape, format)
    blocks = -(-m // length)
    narrow = blocks * k < 2**31  # half the time of a sort
    dtype = np.int32 if narrow else np.int64
    keys = np.repeat((np.arange(m) // length * k).astype(dtype), of_row) + columns
    keys.sort()  # np.unique hashes, and takes many times as long
    keys = keys[np.diff(keys, prepend=-1) > 0]
    ends = np.searchsorted(keys, np.arange(1, blocks + 1) * k)
    counts = np.diff(ends, prepend=0)
    return of_block_rows(op, counts, keys - np.repeat(np.arange(blocks) * k, counts), shape, format)


def from_function(
    f: Callable[[np.ndarray, np.ndarray], np.ndarray],
    L: int,
    S: int | None = None,
    *,
    format: Format | str = CSR,
    block: int = 512,
) -> SparseArray:
    """The mask that stores (i, j) where f(i, j) is true.

    f is evaluated in blocks, so that no array of L S booleans is allocated. First it is called once
    with ranges of rows and columns in the place of integers: where `+`, `-`, `*`, `//` and `%` by a
    positive number, abs, minimum, maximum, comparisons and `&`, `|`, `~` of these say that a block
    is full or empty, its entries are not evaluated. A function that does anything else, such as
    looking up segments in an array (`block_diagonal` is for that), is evaluated for all L S pairs.

    Args:
      f: maps rows [r, 1] and columns [1, c], NumPy integers, to booleans [r, c] or what broadcasts
        to that shape; like FlexAttention's `mask_mod` of (q_idx, kv_idx), but for arrays.
      L: number of queries.
      S: number of keys, L if None.
      format: CSR or CVS(V).
      block: rows and columns of a block for functions that are evaluated for all pairs.

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
    step = min(block, _KNOWN_BLOCK)
    height = -(-step // length) * length
    known = of_blocks(f, L, S, height, step)
    if known is None:
        height, step = -(-block // length) * length, block
    counts: list[np.ndarray] = []
    columns: list[np.ndarray] = [np.zeros(0, np.int64)]
    for b, first in enumerate(range(0, L, height)):
        rows = np.arange(first, min(first + height, L))[:, None]
        full = empty = np.zeros(-(-S // step), bool)
        if known is not None:
            full, empty = (x[b] for x in known)
        own = [np.zeros(-(-len(rows) // length), np.int64)]
        # A run of blocks that are not empty at a time, no wider than `block`.
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for keys, whole in _runs(full, empty, step, S, block):
            seen = np.True_ if whole else _evaluated(f, rows, keys[None])
            padded = np.zeros((len(own[0]) * length, len(keys)), bool)
            padded[: len(rows)] = seen
            vectors = padded.reshape(-1, length, len(keys)).any(1) if length > 1 else padded
            blocks, places = np.nonzero(vectors)
            parts.append((blocks, keys[places]))
        if parts:
            blocks, found = (np.concatenate(x) for x in zip(*parts, strict=True))
            if len(parts) > 1:
                order = np.argsort(blocks, kind="stable")
                blocks, found = blocks[order], found[order]
            own = [np.bincount(blocks, minlength=len(own[0]))]
            columns.append(found)
        counts += own
    every = np.concatenate([*counts, np.zeros(0, np.int64)])
    return of_block_rows(op, every, np.concatenate(columns), (L, S), format)


_KNOWN_BLOCK = 64  # rows and columns of a block about which ranges say something


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
    seen = f(rows, keys)
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
