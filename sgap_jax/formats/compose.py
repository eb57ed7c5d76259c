"""Matrices made of others, as SciPy makes them: identity, diagonals, Kronecker products, blocks,
triangles.

Where the structures of all operands are concrete, so is that of the result, whatever the values
are: zeros are stored as others are. Where one is traced, the result has a capacity that always
suffices, the sum (for `kron` the product) of those of its operands, and is in CSR where they are of
vectors or blocks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from sgap_jax.formats import checks, convert, interop
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, Format

Operand = SparseArray | ArrayLike


def eye(
    m: int,
    n: int | None = None,
    k: int = 0,
    *,
    dtype: DTypeLike = jnp.float32,
    format: Format | str = CSR,
) -> SparseArray:
    """Ones on the k-th diagonal of a matrix [m, n]: A[i, i + k] = 1. `scipy.sparse.eye_array`.

    Args:
      m: the number of rows; n: of columns, None for m.
      k: which diagonal, below the main one if negative; one beyond the matrix is empty.

    Raises ValueError for a negative size or a tracer.
    """
    what = "eye"
    m = checks.check_count(m, "m", what)
    n = m if n is None else checks.check_count(n, "n", what)
    checks.check_concrete(k, "k", what, "it says where the entries are")
    k = max(-m, min(operator.index(k), n))
    rows, columns = _diagonal(m, n, k)
    return _of_entries(
        [(rows, columns, np.ones(len(rows), jnp.dtype(dtype)))], (m, n), format, dtype, what
    )


def diags(
    diagonals: Any,
    offsets: int | Sequence[int] = 0,
    *,
    shape: tuple[int, int] | None = None,
    format: Format | str = CSR,
    dtype: DTypeLike | None = None,
) -> SparseArray:
    """A matrix of its diagonals: A[i, i + offsets[d]] = diagonals[d][p].

    As `scipy.sparse.diags_array`. p counts the places of that diagonal from its upper left end. A
    diagonal of one number fills all its places, and what is longer than its places is cut.
    Differentiable in the diagonals.

    Args:
      diagonals: one array [length] for an integer `offsets`, else as many arrays or scalars as
        offsets.
      offsets: 0 is the main diagonal, k > 0 are above it.
      shape: (m, n); None: square, as large as the first diagonal needs.
      dtype: None: that of the diagonals, a float for integers, as in SciPy.

    Raises ValueError for offsets that repeat, lie outside of the matrix, are traced or do not match
    the diagonals, and for a diagonal that is too short.
    """
    what = "diags"
    checks.check_concrete(offsets, "offsets", what, "they say where the entries are")
    if np.ndim(offsets) == 0:
        if not hasattr(diagonals, "ndim") and any(np.ndim(d) for d in diagonals):
            raise ValueError(
                f"{what}: offsets: expected one for each diagonal, got {offsets}; a list of "
                "diagonals has a list of offsets"
            )
        diagonals, offsets = [checks.as_array(diagonals)], [operator.index(offsets)]  # type: ignore[arg-type]
    places = [operator.index(offset) for offset in offsets]  # type: ignore[union-attr]
    given = [_at_least_1d(d) for d in diagonals]
    if len(given) != len(places) or not given:
        raise ValueError(
            f"{what}: diagonals: expected one for each of {len(places)} offsets, got {len(given)}"
        )
    if len(set(places)) < len(places):
        raise ValueError(f"{what}: offsets: expected each once, got {places}")
    for d, diagonal in enumerate(given):
        if diagonal.ndim != 1:
            raise ValueError(
                f"{what}: diagonals[{d}]: expected 1-d, got shape {list(diagonal.shape)}"
            )
    if shape is None:
        size = given[0].shape[0] + abs(places[0])
        shape = size, size
    m, n = _matrix_shape(shape, what)
    parts = []
    for d, (diagonal, offset) in enumerate(zip(given, places, strict=True)):
        if not -m <= offset <= n:
            raise ValueError(f"{what}: offsets[{d}]: expected {-m} .. {n}, got {offset}")
        rows, columns = _diagonal(m, n, offset)
        count = len(rows)
        if diagonal.shape[0] not in (1, count) and diagonal.shape[0] < count:
            raise ValueError(
                f"{what}: diagonals[{d}]: expected {count} numbers at offset {offset} of a matrix "
                f"of shape {(m, n)}, or one, got {diagonal.shape[0]}"
            )
        values = diagonal[:count]
        if values.shape[0] != count:
            values = (np if isinstance(values, np.ndarray) else jnp).broadcast_to(values, (count,))
        parts.append((rows, columns, values))
    if dtype is None:
        dtype = _promoted(given)
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.result_type(float)
    return _of_entries(parts, (m, n), format, dtype, what)


def kron(A: Operand, B: Operand, *, format: Format | str | None = None) -> SparseArray:
    """The Kronecker product of two matrices. `scipy.sparse.kron`.

        C[i p + r, j q + s] = A[i, j] B[r, s]    for A [m, n] and B [p, q]

    Stores a product for each pair of stored entries. A dense operand has its entries that are not
    zero, all of them if it is traced. Differentiable in the values of both.

    `format`: None is that of both operands, CSR where they differ or have vectors or blocks in a
    traced structure. ValueError for an operand that is not a matrix, NotImplementedError for a
    result beyond int32 indices, and for vectors and blocks as the format of a traced one.
    """
    what = "kron"
    left, right = (_entries(x, what, name) for x, name in ((A, "A"), (B, "B")))
    (m, n), (p, q) = left[3], right[3]
    shape = checks.check_shape((m * p, n * q), what)
    checks.check_nnz(left[2].shape[0] * right[2].shape[0], what)
    traced = checks.is_traced(left[0], right[0])
    if not traced:
        rows, columns = (
            (a.astype(np.int64)[:, None] * size + b).reshape(-1)
            for a, b, size in ((left[0], right[0], p), (left[1], right[1], q))
        )
    else:
        (row, column), (inner_row, inner_column) = (
            [jnp.asarray(x, jnp.int32) for x in side[:2]] for side in (left, right)
        )
        real = (row < m)[:, None] & (inner_row < p)[None]
        rows, columns = (
            jnp.where(real, a[:, None] * size + b[None], -1).reshape(-1)
            for a, b, size in ((row, inner_row, p), (column, inner_column, q))
        )
    dtype = _promoted([left[2], right[2]])
    values = left[2].astype(dtype)[:, None] * right[2].astype(dtype)[None]
    parts = [(rows, columns, values.reshape(-1))]
    return _of_entries(parts, shape, _common(format, (A, B)), None, what)


def vstack(
    blocks: Sequence[Operand], *, format: Format | str | None = None, dtype: DTypeLike | None = None
) -> SparseArray:
    """Matrices of as many columns, one below the other: as `block([[b] for b in blocks])`."""
    return _of_grid([[b] for b in _several(blocks, "vstack")], format, dtype, "vstack")


def hstack(
    blocks: Sequence[Operand], *, format: Format | str | None = None, dtype: DTypeLike | None = None
) -> SparseArray:
    """Matrices of as many rows, side by side: as `block([blocks])`."""
    return _of_grid([_several(blocks, "hstack")], format, dtype, "hstack")


def block(
    blocks: Sequence[Sequence[Operand | None]],
    *,
    format: Format | str | None = None,
    dtype: DTypeLike | None = None,
) -> SparseArray:
    """A matrix of a grid of matrices, sparse or dense, where None is a block of zeros.
    `scipy.sparse.block_array`.

    A dense block has its entries that are not zero, all of them if it is traced. Differentiable in
    the values of all blocks.

    Args:
      blocks: rows of blocks. The blocks of a row are equally high, those of a column equally wide.
      format: None is that of all blocks, CSR where they differ or one is of vectors or blocks in a
        traced structure.
      dtype: None is the promoted one of all blocks.

    Raises ValueError for blocks that do not fit, and for a row or column of which all are None;
    NotImplementedError for vectors and blocks as the format of a traced structure.
    """
    rows = [_several(row, "block") for row in _several(blocks, "block")]
    return _of_grid(rows, format, dtype, "block")


def block_diag(
    blocks: Sequence[Operand], *, format: Format | str | None = None, dtype: DTypeLike | None = None
) -> SparseArray:
    """Matrices along the diagonal, and zeros elsewhere; of graphs, the graph of all of them.
    Arguments as of `block`. `scipy.sparse.block_diag`."""
    what = "block_diag"
    blocks = _several(blocks, what)
    if not blocks:
        raise ValueError(f"{what}: expected at least one block")
    entries = [_entries(x, what, f"blocks[{i}]") for i, x in enumerate(blocks)]
    heights, widths = ([e[3][axis] for e in entries] for axis in range(2))
    corners = zip(_starts(heights), _starts(widths), strict=True)
    parts = [_moved(e, *corner) for e, corner in zip(entries, corners, strict=True)]
    shape = checks.check_shape((sum(heights), sum(widths)), what)
    return _of_entries(parts, shape, _common(format, blocks), dtype, what)


def tril(A: SparseArray, k: int = 0, *, format: Format | str | None = None) -> SparseArray:
    """The entries (i, j) of a matrix with j - i <= k: on and below the k-th diagonal.
    `scipy.sparse.tril`. `format`: None is A's, CSR for vectors and blocks of a traced structure, of
    which the result has A's capacity. Differentiable in the values."""
    return _triangle("tril", A, k, format)


def triu(A: SparseArray, k: int = 0, *, format: Format | str | None = None) -> SparseArray:
    """The entries (i, j) of a matrix with j - i >= k: on and above the k-th diagonal; else as
    `tril`. `scipy.sparse.triu`."""
    return _triangle("triu", A, k, format)


def _triangle(what: str, A: Any, k: Any, format: Format | str | None) -> SparseArray:
    if not isinstance(A, SparseArray):
        raise TypeError(f"{what}: A must be a SparseArray, got {type(A).__name__}")
    checks.check_concrete(k, "k", what, "it says what is stored")
    rows, columns, values, (m, n) = _entries(A, what, "A")
    k = max(-m - 1, min(operator.index(k), n + 1))  # may be beyond int32
    if checks.is_traced(rows):
        kept: Any = (columns - k <= rows) if what == "tril" else (columns - k >= rows)
        rows = jnp.where(kept, rows, -1)
    else:
        above = columns.astype(np.int64) - rows
        kept = np.flatnonzero(above <= k if what == "tril" else above >= k)
        rows, columns, values = rows[kept], columns[kept], values[kept]
    parts = [(rows, columns, values)]
    return _of_entries(parts, (m, n), _common(format, (A,)), None, what)


def _several(blocks: Any, what: str) -> list[Any]:
    if hasattr(blocks, "todense") or not isinstance(blocks, Iterable):
        of = "rows of matrices" if what == "block" else "matrices"
        raise TypeError(f"{what}: blocks must be a sequence of {of}, got a {type(blocks).__name__}")
    return list(blocks)


def _matrix_shape(shape: Any, what: str) -> tuple[int, int]:
    sizes = checks.check_shape(shape, what)
    if len(sizes) != 2:
        raise ValueError(f"{what}: shape: expected (m, n), got {shape}")
    return sizes  # type: ignore[return-value]


def _diagonal(m: int, n: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the places of a diagonal."""
    count = max(min(m + min(offset, 0), n - max(offset, 0)), 0)
    along = np.arange(count, dtype=np.int64)
    return along + max(-offset, 0), along + max(offset, 0)


def _at_least_1d(x: Any) -> Any:
    """x as a traced or NumPy array of at least one dimension."""
    if checks.is_traced(*jax.tree.leaves(x)):
        return jnp.atleast_1d(x)
    return np.atleast_1d(np.asarray(x))


def _entries(x: Any, what: str, name: str) -> tuple[Any, Any, Any, tuple[int, int]]:
    """(rows, columns, values, shape) of a matrix, sparse or dense; padding has rows >= shape[0]."""
    if isinstance(x, SparseArray):
        if x.ndim != 2:
            raise ValueError(f"{what}: {name}: expected a matrix, got shape {x.shape}")
        (rows, columns), values = convert.entries(x, f"{what}: {name}")
        return rows, columns, values, (x.shape[0], x.shape[1])
    if hasattr(x, "todense"):
        raise TypeError(
            f"{what}: {name} must be a SparseArray or dense, got a {type(x).__name__}; "
            "SparseArray.from_scipy, from_bcoo and from_bcsr take those of others"
        )
    x = checks.as_array(x)
    checks.check_numeric(x.dtype, what, name)
    if x.ndim != 2:
        raise ValueError(f"{what}: {name}: expected a matrix, got shape {list(x.shape)}")
    if checks.is_traced(x):
        rows, columns = (np.reshape(i, -1) for i in np.indices(x.shape))
        return rows, columns, x.reshape(-1), x.shape
    x = np.asarray(x)
    rows, columns = np.nonzero(x)
    return rows, columns, x[rows, columns], x.shape  # type: ignore[return-value]


def _promoted(arrays: Sequence[Any]) -> np.dtype:
    return jnp.result_type(*(jax.dtypes.canonicalize_dtype(x.dtype) for x in arrays))


def _common(format: Format | str | None, operands: Sequence[Any]) -> Format | str:
    if format is not None:
        return format
    sparse = [x for x in operands if isinstance(x, SparseArray)]
    formats = {x.format for x in sparse}
    format = formats.pop() if len(formats) == 1 else CSR
    # How many vectors or blocks a traced structure comes to is no static size.
    traced = checks.is_traced(*jax.tree.leaves([x.index_arrays for x in sparse]))
    return CSR if traced and format.block_shape else format


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes[:-1], initial=0))


def _moved(entries: tuple, first_row: int, first_column: int) -> tuple[Any, Any, Any]:
    """Entries of a block that begins there; padding gets row -1."""
    rows, columns, values, (m, _) = entries
    if checks.is_traced(rows):
        return jnp.where(rows < m, rows + first_row, -1), columns + first_column, values
    return rows.astype(np.int64) + first_row, columns.astype(np.int64) + first_column, values


def _of_grid(
    grid: list[list[Any]], format: Format | str | None, dtype: Any, what: str
) -> SparseArray:
    wide = len(grid[0]) if grid else 0
    if not wide or any(len(row) != wide for row in grid):
        lengths = [len(row) for row in grid]
        raise ValueError(f"{what}: expected as many blocks in each row, got {lengths}")
    heights: list[int | None] = [None] * len(grid)
    widths: list[int | None] = [None] * wide
    found = {}
    for i, row in enumerate(grid):
        for j, x in enumerate(row):
            if x is None:
                continue
            name = f"blocks[{i}][{j}]" if what == "block" else f"blocks[{i + j}]"
            found[i, j] = _entries(x, what, name)
            for sizes, at, size, side in (
                (heights, i, found[i, j][3][0], "rows"),
                (widths, j, found[i, j][3][1], "columns"),
            ):
                if sizes[at] is None:
                    sizes[at] = size
                elif sizes[at] != size:
                    raise ValueError(
                        f"{what}: {name}: expected {sizes[at]} {side}, as those beside it have, "
                        f"got {size}"
                    )
    for side, sizes in (("row", heights), ("column", widths)):
        if None in sizes:
            raise ValueError(
                f"{what}: {side} {sizes.index(None)} of the blocks: all are None, and its size is "
                "not known"
            )
    tall, broad = [h or 0 for h in heights], [w or 0 for w in widths]
    shape = checks.check_shape((sum(tall), sum(broad)), what)
    top, left = _starts(tall), _starts(broad)
    parts = [_moved(entries, top[i], left[j]) for (i, j), entries in found.items()]
    return _of_entries(parts, shape, _common(format, [x for row in grid for x in row]), dtype, what)


def _of_entries(
    parts: Sequence[tuple], shape: tuple[int, ...], format: Format | str, dtype: Any, what: str
) -> SparseArray:
    """The matrix of these (rows, columns, values); entries out of range, of traced ones, are
    padding."""
    together = _promoted([values for *_, values in parts])

    def joined(arrays: Sequence[Any]) -> Any:
        return (jnp if checks.is_traced(*arrays) else np).concatenate(arrays)

    def indices(axis: int) -> Any:
        arrays = [part[axis] for part in parts]
        return joined(
            [x.astype(jnp.int32) for x in arrays] if checks.is_traced(*arrays) else arrays
        )

    rows, columns = indices(0), indices(1)
    values = joined([values.astype(together) for *_, values in parts])
    stack: Any = jnp if checks.is_traced(rows, columns) else np
    fields = interop.from_coordinates(
        stack.stack([rows, columns], axis=1),
        values,
        shape,
        format=format,
        dtype=dtype,
        duplicates="sum",
        what=what,
    )
    return SparseArray(**fields)
