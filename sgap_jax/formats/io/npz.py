"""NumPy archives: the arrays data, indices, indptr, shape of CSR, or scipy.sparse.save_npz's layout
(csr, csc, coo; bsr for vectors and blocks; dia is read).

Pickles are refused. The size that each member's header declares is compared with the member's
actual size before its data are read.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NoReturn

import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import checks, construct, interop
from sgap_jax.formats.io.number_tables import FREE_EXPANSION_BYTES, MAX_EXPANSION, Contents
from sgap_jax.formats.levels import CSC, CSR


def read(path: str) -> Contents:
    with _opened(path) as (archive, names):
        return _contents(path, {n: _array(path, archive, n) for n in _wanted(path, names)})


def outline(path: str) -> tuple[tuple[int, int], np.ndarray]:
    """The shape, and the entries of each row [m], of a CSR archive."""
    with _opened(path) as (archive, names):
        shape, offsets, _ = _row_offsets(path, archive, names)
        return shape, np.diff(offsets)


def read_rows(path: str, begin: int, end: int) -> Contents:
    """The contents of rows begin to end of a CSR archive: no more than their entries, and the
    offsets of all rows, is in memory."""
    with _opened(path) as (archive, names):
        shape, offsets, rest = _row_offsets(path, archive, names)
        span = int(offsets[begin]), int(offsets[end])
        arrays = {n: _array(path, archive, n, span) for n in ("data", "indices")}
        rows = {"indptr": offsets[begin : end + 1] - offsets[begin]}
        return _contents(path, rest | arrays | rows | {"shape": np.array([end - begin, shape[1]])})


def _row_offsets(
    path: str, archive: zipfile.ZipFile, names: set[str]
) -> tuple[tuple[int, int], np.ndarray, dict[str, np.ndarray]]:
    """(shape, row offsets, the arrays format and dtype) of a CSR archive."""
    wanted = _wanted(path, names)
    rest = {n: _array(path, archive, n) for n in wanted if n in ("format", "dtype")}
    format = _text(rest.get("format"), "csr" if "indptr" in wanted else "coo")
    if format != "csr" or "indptr" not in wanted:
        raise NotImplementedError(f"{path}: rows of an archive in format csr, got {format}")
    m, k = _shape(path, _array(path, archive, "shape"), 2)
    offsets = checks.check_indices(_array(path, archive, "indptr"), "indptr", 1, path)
    entries = _length(path, archive, "indices")
    checks.check_offsets(offsets, m, entries, "indptr", path)
    for what, count in (("data", _length(path, archive, "data")), ("indptr[-1]", int(offsets[-1]))):
        if count != entries:
            _fail(path, f"{what} of {entries} entries as in indices", count)
    return (m, k), offsets.astype(np.int64), rest


@contextmanager
def _opened(path: str) -> Iterator[tuple[zipfile.ZipFile, set[str]]]:
    """(the archive, the names of its arrays); whatever is wrong in it is a ValueError."""
    size = os.path.getsize(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
            total = sum(info.file_size for info in archive.infolist())
            if total > max(FREE_EXPANSION_BYTES, MAX_EXPANSION * size):
                _fail(path, f"an archive that expands less than {MAX_EXPANSION} times", total)
            yield archive, names
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # zipfile raises a dozen exception types for hostile bytes
        if isinstance(error, ValueError | NotImplementedError) and path in str(error):
            raise
        raise ValueError(f"{path}: expected a whole .npz archive, got {error!r}") from error


def _fail(path: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{path}: expected {expected}, got {got}")


def _wanted(path: str, names: set[str]) -> list[str]:
    for arrays in (("indices", "indptr"), ("row", "col"), ("coords",), ("offsets",)):
        wanted = {"data", "shape", *arrays}
        if wanted <= names:
            return sorted(wanted | (names & {"format", "dtype"}))
    got = ", ".join(sorted(names)[:12]) or "nothing"
    _fail(path, "arrays data, indices, indptr, shape (or data, row, col, shape)", got)


def _array(
    path: str, archive: zipfile.ZipFile, name: str, span: tuple[int, int] | None = None
) -> np.ndarray:
    """An array, or elements begin to end of one with one axis."""
    info = archive.getinfo(name + ".npy")
    with archive.open(info) as member:
        shape, dtype = _header(path, name, member, info.file_size)
        if span is not None:
            if len(shape) != 1:
                _fail(path, f"{name}: one axis", f"shape {shape}")
            _skip(member, span[0] * dtype.itemsize)
            data = member.read((span[1] - span[0]) * dtype.itemsize)
            return np.frombuffer(data, dtype, span[1] - span[0])
    with archive.open(info) as member:
        try:
            return np.lib.format.read_array(member, allow_pickle=False)
        except (ValueError, MemoryError) as error:
            raise ValueError(f"{path}: {name}: expected a .npy array, got {error}") from error


def _skip(member: Any, count: int) -> None:
    """Reads past bytes, few at a time: `seek` of a member would have 16 MiB of them in memory."""
    while count and (data := member.read(min(count, 1 << 18))):
        count -= len(data)


def _length(path: str, archive: zipfile.ZipFile, name: str) -> int:
    info = archive.getinfo(name + ".npy")
    with archive.open(info) as member:
        shape, _ = _header(path, name, member, info.file_size)
    return shape[0] if len(shape) == 1 else _fail(path, f"{name}: one axis", f"shape {shape}")


def _header(path: str, name: str, member: Any, size: int) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of a member of `size` bytes, which is read up to its data."""
    try:
        version = np.lib.format.read_magic(member)
        header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if header is None:
            _fail(path, f"{name}: version 1 or 2 of the .npy format", version)
        shape, _, dtype = header(member)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path}: {name}: expected a .npy header, got {error}") from error
    if dtype.hasobject:
        _fail(path, f"{name}: plain numbers", f"dtype {dtype} (a pickle)")
    expected = member.tell() + math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or expected != size:
        _fail(path, f"{name}: {expected} bytes for shape {shape}", size)
    return shape, dtype


def _text(array: np.ndarray | None, default: str) -> str:
    if array is None:
        return default
    item = array.item() if array.size == 1 else array
    return item.decode("latin1") if isinstance(item, bytes) else str(item)


def _shape(path: str, array: np.ndarray, ndim: int | None = None) -> tuple[int, ...]:
    declared = checks.check_indices(array, "shape", 1, path)
    if not 1 <= declared.size <= 64 or declared.min() < 0 or declared.max() > checks.INT32_MAX:
        _fail(path, f"shape: sizes of 0 .. {checks.INT32_MAX}", declared[:8])
    if ndim is not None and declared.size != ndim:
        _fail(path, f"shape: {ndim} sizes", declared[:8])
    return tuple(int(size) for size in declared)


def _contents(path: str, arrays: dict[str, np.ndarray]) -> Contents:
    shape = _shape(path, arrays["shape"])
    format = _text(arrays.get("format"), "csr")
    if "indptr" in arrays and format == "bsr":
        coordinates, values = _bsr_entries(path, arrays, shape)
        return Contents(shape, coordinates, values, _dtype(path, arrays))
    if "offsets" in arrays:
        coordinates, values = _diagonals(path, arrays, shape)
        return Contents(shape, coordinates, values, _dtype(path, arrays))
    values = checks.check_values(arrays["data"], None, path)
    if "indptr" in arrays:
        if format not in ("csr", "csc") or len(shape) != 2:
            _fail(path, "a matrix in format csr, csc, bsr or coo", f"{format} of shape {shape}")
        modes = (0, 1) if format == "csr" else (1, 0)
        offsets, indices = arrays["indptr"], arrays["indices"]
        names = ("indptr", "indices")
        coordinates = construct.expand_compressed(offsets, indices, shape, modes, names, path)
        if len(values) != len(indices) or len(coordinates[0]) != len(indices):
            _fail(path, f"data and indptr[-1] of {len(indices)} entries as in indices", len(values))
    elif "coords" in arrays:
        coordinates = list(checks.check_indices(arrays["coords"], "coords", 2, path))
    else:
        coordinates = [checks.check_indices(arrays[n], n, 1, path) for n in ("row", "col")]
    if len(coordinates) != len(shape) or any(len(c) != len(values) for c in coordinates):
        _fail(path, f"{len(shape)} coordinates for each of {len(values)} values", "other counts")
    return Contents(shape, coordinates, values, _dtype(path, arrays))


def _dtype(path: str, arrays: dict[str, np.ndarray]) -> Any:
    asked = arrays.get("dtype")
    try:
        return None if asked is None else jnp.dtype(_text(asked, ""))
    except TypeError as error:
        raise ValueError(f"{path}: dtype: expected the name of a dtype, got {error}") from error


def _bsr_entries(
    path: str, arrays: dict[str, np.ndarray], shape: tuple[int, ...]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Coordinates (rows, columns) and values of all elements of the blocks of a BSR archive."""
    data, names = arrays["data"], ("indptr", "indices")
    sides = data.shape[1:]
    if len(sides) != 2 or len(shape) != 2 or 0 in sides or np.any(np.array(shape) % sides):
        _fail(path, f"data: blocks [blocks, r, c] that divide {shape}", f"shape {data.shape}")
    blocks = tuple(n // side for n, side in zip(shape, sides, strict=True))
    values = checks.check_values(data, None, path, sides)
    offsets, indices = arrays["indptr"], arrays["indices"]
    corners = construct.expand_compressed(offsets, indices, blocks, (0, 1), names, path)
    if not len(values) == len(indices) == len(corners[0]):
        _fail(path, f"data and indptr[-1] of {len(indices)} blocks as in indices", len(values))
    checks.check_range(corners[1], blocks[1], "indices", path)
    # An empty array of blocks [0, r, c] can declare any r and c: do not allocate by them.
    lanes = np.ogrid[: sides[0], : sides[1]] if data.size else np.ogrid[:1, :1]
    places = [
        corner[:, None, None] * side + lane.astype(np.int32)
        for corner, side, lane in zip(corners, sides, lanes, strict=True)
    ]
    return [np.broadcast_to(x, data.shape).reshape(-1) for x in places], values.reshape(-1)


def _diagonals(
    path: str, arrays: dict[str, np.ndarray], shape: tuple[int, ...]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Coordinates (rows, columns) and values of a DIA archive: data[d, j] is in column j and row
    j - offsets[d]. Zeros are padding, as in SciPy."""
    offsets = checks.check_indices(arrays["offsets"], "offsets", 1, path).astype(np.int64)
    data = arrays["data"]
    if len(shape) != 2 or data.ndim != 2 or len(data) != len(offsets):
        _fail(path, f"data [{len(offsets)}, columns] of a matrix", f"{data.shape} of {shape}")
    if len(np.unique(offsets)) != len(offsets):
        _fail(path, "offsets: each once", offsets[:8])
    data = checks.check_values(data[:, : shape[1]], None, path, (min(data.shape[1], shape[1]),))
    rows = np.arange(data.shape[1]) - offsets[:, None]
    d, columns = np.nonzero((rows >= 0) & (rows < shape[0]) & (data != 0))
    places = rows[d, columns].astype(np.int32), columns.astype(np.int32)
    return list(places), data[d, columns]


def write(stream: BinaryIO, A: Any) -> None:
    """Writes the layout of scipy.sparse.save_npz. Floats narrower than float32 are widened to it,
    and a member `dtype` names their dtype."""
    values, coordinates = interop.to_numpy(A, "write")
    arrays: dict[str, Any] = {"data": interop.widen(values), "shape": np.array(A.shape, np.int64)}
    if A.format in (CSR, CSC):
        arrays["format"] = b"csr" if A.format == CSR else b"csc"
        offsets, indices = A.index_arrays[1]
        arrays |= {"indptr": np.asarray(offsets), "indices": np.asarray(indices)[: len(values)]}
    elif interop.is_bsr(A):
        names = ("data", "indices", "indptr")
        arrays |= dict(zip(names, interop.bsr_arrays(A), strict=True), format=b"bsr")
    else:
        arrays["format"] = b"coo"
        if A.ndim == 2:
            arrays |= dict(zip(("row", "col"), coordinates, strict=True))
        else:
            arrays["coords"] = np.stack(coordinates)
    if arrays["data"].dtype != values.dtype:
        arrays["dtype"] = str(values.dtype)
    np.savez_compressed(stream, **arrays)
