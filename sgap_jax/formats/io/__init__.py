"""`read` and `write` of sparse arrays: the file's suffix chooses the file format. Bad content is a
ValueError that names the file and the line."""

from __future__ import annotations

import contextlib
import gzip
import operator
import os
import uuid
from typing import Any, BinaryIO

import numpy as np
from jax.typing import DTypeLike

from sgap_jax.formats import checks, construct, interop
from sgap_jax.formats.array import Duplicates, SparseArray
from sgap_jax.formats.io import matrix_market, npz, smtx, tns
from sgap_jax.formats.io.number_tables import Contents, open_source
from sgap_jax.formats.levels import COO, CSR, Format, require_stored

_TEXT: dict[str, Any] = {".mtx": matrix_market, ".smtx": smtx, ".tns": tns}


def read(
    path: str | bytes | os.PathLike[Any],
    format: Format | str | None = None,
    dtype: DTypeLike | None = None,
    *,
    duplicates: Duplicates = "sum",
    rows: tuple[int, int] | None = None,
) -> SparseArray:
    """Reads .mtx, .smtx, .tns (each also .gz) and .npz; pattern files get values of one (float32).

    Args:
      path: its suffix chooses the file format. .mtx: Matrix Market coordinate files of any field
        (also SciPy's unsigned-integer) and symmetry. .npz: arrays data, indices, indptr, shape, or
        those of `scipy.sparse.save_npz`; never pickles.
      format: of the result; None is CSR for matrices and COO for tensors of any other order.
      dtype: of the values; None keeps the file's as `jnp.asarray` would (float32 without x64).
      duplicates: "sum" adds entries with equal coordinates, "error" refuses them.
      rows: (begin, end): only these rows of a matrix, [end - begin, k]. No more than their entries
        is in memory at once; a .mtx file is read to its end, of a CSR .npz archive their bytes and
        the offsets of all rows.

    Raises:
      ValueError: unknown suffix; truncated, corrupt or contradictory content, or a decompression
        bomb; rows that the matrix does not have.
      NotImplementedError: `rows` of other files than .mtx and CSR archives.
      OSError: the file cannot be opened.
    """
    path = _path(path, "read")
    suffix = _suffix(path, "read")
    if rows is not None:
        contents = _read_rows(path, suffix, rows)
    elif suffix == ".npz":
        contents = npz.read(path)
    else:
        with open_source(path) as source:
            contents = _TEXT[suffix].read(source)
    return _assemble(path, contents, format, dtype, duplicates)


def outline(
    path: str | bytes | os.PathLike[Any], op: str, *, count: bool
) -> tuple[tuple[int, int], np.ndarray | None]:
    """(shape, entries of each row) of a matrix in a .mtx file or a CSR .npz archive, whose entries
    are not kept in memory; without `count` the entries of rows may be None, and a .mtx file is not
    read past its header."""
    path = _path(path, op)
    suffix = _suffix(path, op)
    if suffix == ".npz":
        return npz.outline(path)
    if suffix != ".mtx":
        raise NotImplementedError(f"{op}: no rows of {suffix} files; .mtx and .npz have them")
    with open_source(path) as source:
        return matrix_market.outline(source, count)


def _read_rows(path: str, suffix: str, rows: tuple[int, int]) -> Contents:
    try:
        begin, end = (operator.index(x) for x in rows)
    except (TypeError, ValueError) as error:
        raise ValueError(f"read: rows: expected (begin, end), got {rows!r}") from error
    (m, _), _ = outline(path, "read", count=False)
    if not 0 <= begin <= end <= m:
        raise ValueError(f"read: rows: expected 0 <= begin <= end <= {m}, got {begin}, {end}")
    if suffix == ".npz":
        return npz.read_rows(path, begin, end)
    with open_source(path) as source:
        return matrix_market.read_rows(source, begin, end)


def write(path: str | bytes | os.PathLike[Any], A: SparseArray) -> None:
    """Writes A, without padding, in the file format that the suffix names (see `read`).

    Text files hold enough digits to read the same float32 and float64 back. bfloat16 and float16
    become float32 there; .npz keeps them. The file appears complete or not at all.

    Raises ValueError for an unknown suffix, traced arrays, and arrays that the file format cannot
    hold: .mtx and .smtx hold only matrices, .smtx only values of one, .tns only real values.
    """
    path = _path(path, "write")
    suffix = _suffix(path, "write")
    if not isinstance(A, SparseArray):
        raise ValueError(f"write: A: expected a SparseArray, got {type(A).__name__}")
    if suffix in (".mtx", ".smtx") and A.ndim != 2:
        raise ValueError(
            f"write: A: {suffix} holds matrices, got shape {A.shape}; use .tns or .npz"
        )
    if suffix == ".smtx" or (A.format.block_shape and not interop.is_bsr(A)):
        A = A.asformat(CSR)
    values, coordinates = interop.to_numpy(A, "write")
    # Written under a temporary name and renamed: a reader never sees half a file, and a failure
    # leaves the old one.
    temporary = f"{path}.{uuid.uuid4().hex}.part"
    try:
        with open(temporary, "xb") as stream:
            if suffix == ".npz":
                npz.write(stream, A)
            elif path.lower().endswith(".gz"):
                with gzip.GzipFile("", "wb", 6, stream, mtime=0) as packed:
                    _write_text(suffix, packed, values, coordinates, A.shape)
            else:
                _write_text(suffix, stream, values, coordinates, A.shape)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _write_text(
    suffix: str,
    stream: BinaryIO | gzip.GzipFile,
    values: np.ndarray,
    coordinates: list[np.ndarray],
    shape: tuple[int, ...],
) -> None:
    _TEXT[suffix].write(stream, interop.widen(values), coordinates, shape)


def _path(path: Any, op: str) -> str:
    try:
        return os.fsdecode(path)
    except TypeError:
        raise TypeError(
            f"{op}: path must be a str, bytes or os.PathLike, got {type(path).__name__}"
        ) from None


def _suffix(path: str, op: str) -> str:
    name = os.path.basename(path).lower()
    root = name.removesuffix(".gz")
    suffix = os.path.splitext(root)[1]
    if suffix in _TEXT or (suffix == ".npz" and root == name):
        return suffix
    known = ", ".join(f"{s}, {s}.gz" for s in _TEXT)
    raise ValueError(
        f"{op}: path: expected a suffix of {known}, .npz, got {os.path.basename(path)!r}"
    )


def _assemble(
    path: str, contents: Contents, format: Format | str | None, dtype: Any, duplicates: Duplicates
) -> SparseArray:
    what = f"read {path}"
    shape, coordinates, values, asked = contents
    nnz = coordinates[0].shape[0]
    format = require_stored(format or (CSR if len(shape) == 2 else COO), len(shape), what)
    # A line of text can declare any shape.
    nearest = "format=COO has none, and SparseArray.from_coordinates takes it"
    construct.check_proportion(shape, nnz, format, what, nearest)
    if values is None:
        values = np.ones(nnz, np.float32)
    fields = construct.assemble(
        coordinates,
        checks.check_values(values, nnz, what),
        shape,
        format,
        duplicates=duplicates,
        dtype=asked if dtype is None else dtype,
        what=what,
    )
    return SparseArray(**fields)
