"""Matrix Market coordinate files (Boisvert, Pozo, Remington: NISTIR 5935).

%%MatrixMarket matrix coordinate real general      field and symmetry
% comments
m k nnz
i j value                                          1-based; re im for complex; none for pattern
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import scipy.io
import scipy.sparse

from sgap_jax.formats.checks import INT32_MAX
from sgap_jax.formats.io.number_tables import Contents, Source

# How many numbers follow the two indices, by field.
_WIDTH = {"real": 1, "double": 1, "integer": 1, "unsigned-integer": 1, "complex": 2, "pattern": 0}
_INTEGERS = {"integer": np.int64, "unsigned-integer": np.uint64}  # the second is SciPy's
_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")
_EXACT = 2.0**53  # float64 holds every integer up to here


def outline(source: Source, count: bool) -> tuple[tuple[int, int], np.ndarray | None]:
    """The shape, and with `count` the entries of each row [m], both triangles."""
    if not count:
        _, symmetry = _banner(source)
        return _sizes(source, symmetry, bytes_each=4)[:2], None
    lengths: list[np.ndarray] = []

    def counted(i: np.ndarray, m: int) -> None:
        each = np.bincount(i, minlength=m)
        lengths[:] = [each if not lengths else lengths[0] + each]

    m, k = _scan(source, lambda shape, i, j, values: counted(i, shape[0]))
    return (m, k), lengths[0] if lengths else np.zeros(m, np.int64)


def read_rows(source: Source, begin: int, end: int) -> Contents:
    """The contents of rows begin to end, in memory for those; all others are read past."""
    parts: list[tuple[Any, ...]] = []

    def kept(shape: tuple[int, int], i: np.ndarray, j: np.ndarray, values: Any) -> None:
        here = (i >= begin) & (i < end)
        parts.append((i[here] - begin, j[here], None if values is None else values[here]))

    _, k = _scan(source, kept)
    i, j = (_join([part[n] for part in parts], np.int32) for n in (0, 1))
    pattern = bool(parts) and parts[0][2] is None
    values = None if pattern else _join([part[2] for part in parts], np.float64)
    return Contents((end - begin, k), [i, j], values)


def _scan(source: Source, visit: Callable[..., None]) -> tuple[int, int]:
    """Calls visit(shape, rows, columns, values) for each block of entries, both triangles; the
    shape."""
    field, symmetry = _banner(source)
    m, k, blocks = _entries(source, field, symmetry)
    for i, j, values in blocks:
        if symmetry != "general":
            i, j, values = _expand(source, symmetry, i, j, values)
        visit((m, k), i, j, values)
    return m, k


def read(source: Source) -> Contents:
    """The contents of a file; symmetric, skew-symmetric and Hermitian ones are expanded to both
    triangles."""
    field, symmetry = _banner(source)
    m, k, blocks = _entries(source, field, symmetry)
    parts = list(blocks)
    i, j = (_join([part[n] for part in parts], np.int32) for n in (0, 1))
    empty = _INTEGERS.get(field, np.complex128 if field == "complex" else np.float64)
    values = None if field == "pattern" else _join([part[2] for part in parts], empty)
    if symmetry != "general":
        i, j, values = _expand(source, symmetry, i, j, values)
    return Contents((m, k), [i, j], values)


def _entries(source: Source, field: str, symmetry: str) -> tuple[int, int, Iterator[tuple]]:
    """(m, k, the stored entries in blocks: rows, columns and values, None of a pattern)."""
    m, k, nnz = _sizes(source, symmetry, bytes_each=4 + 2 * _WIDTH[field])
    expected = "two indices" + ("", " and a number", " and two numbers")[_WIDTH[field]]

    def blocks() -> Iterator[tuple]:
        count = 0
        for rows, block in source.rows(2 + _WIDTH[field], b"%", expected):
            if count + len(rows) > nnz:
                line, text = source.line_of_row(block, nnz - count)
                source.fail(
                    f"{nnz} entries as declared", f"one more: {text.decode('latin1')}", line
                )
            count += len(rows)
            i, j = source.coordinates(rows, block, (m, k), 2)
            yield i, j, _values(source, rows, block, field)
        if count != nnz:
            source.fail(f"{nnz} entries as declared", f"{count}; is the file truncated?")

    return m, k, blocks()


def _join(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _banner(source: Source) -> tuple[str, str]:
    line = source.line() or b""
    words = line.decode("latin1").split()
    lower = [word.lower() for word in words]
    if len(words) != 5 or lower[:2] != ["%%matrixmarket", "matrix"]:
        source.fail("'%%MatrixMarket matrix coordinate <field> <symmetry>'", line, 1)
    if lower[2] != "coordinate":
        source.fail("'coordinate' (scipy.io.mmread reads dense 'array' files)", words[2], 1)
    field, symmetry = lower[3:]
    if field not in _WIDTH:
        source.fail(f"a field of {', '.join(_WIDTH)}", words[3], 1)
    if symmetry not in _SYMMETRIES:
        source.fail(f"a symmetry of {', '.join(_SYMMETRIES)}", words[4], 1)
    if (symmetry == "hermitian" and field != "complex") or (
        symmetry == "skew-symmetric" and field in ("pattern", "unsigned-integer")
    ):
        source.fail("a field that this symmetry allows", f"{field} {symmetry}", 1)
    return field, symmetry


def _sizes(source: Source, symmetry: str, bytes_each: int) -> tuple[int, int, int]:
    line = source.header_line(b"%")
    if line is None:
        source.fail("a line of sizes 'm k nnz'", "the end of the file")
    number = source.line_number
    words = line.split()
    if len(words) != 3 or not all(word.isdigit() for word in words):
        source.fail("three non-negative integers 'm k nnz'", line, number)
    if max(map(len, words)) >= 20:  # int() refuses thousands of digits
        source.fail(f"sizes up to {INT32_MAX}", line, number)
    m, k, nnz = (int(word) for word in words)
    if max(m, k) > INT32_MAX:
        source.fail(f"sizes up to {INT32_MAX}", f"{m} x {k}", number)
    if symmetry != "general" and m != k:
        source.fail(f"a square matrix for {symmetry}", f"{m} x {k}", number)
    if nnz > m * k:
        source.fail(f"at most {m} x {k} = {m * k} entries", nnz, number)
    source.require_room(nnz, bytes_each, "entries", number)
    return m, k, nnz


def _values(source: Source, rows: np.ndarray, block: bytes, field: str) -> np.ndarray | None:
    if field == "pattern":
        return None
    if field == "complex":
        return rows[:, 2] + 1j * rows[:, 3]
    values = rows[:, 2]
    if field not in _INTEGERS:
        return values.copy()  # not a view that keeps the indices alive
    dtype = np.dtype(_INTEGERS[field])
    good = (values == np.floor(values)) & np.isfinite(values)
    if dtype.kind == "u":
        good &= values >= 0
    if not good.all():
        line, text = source.line_of_row(block, int(np.argmin(good)))
        source.fail(f"an {field.replace('-', ' ')} value", text.split()[2], line)
    if (np.abs(values) < _EXACT).all():
        return values.astype(dtype)
    try:  # rare: parse again as integers, because float64 rounds those that are this large
        words = [line.split()[2] for line in block.split(b"\n") if line.strip()]
        return np.array([int(word) for word in words], dtype)
    except (ValueError, OverflowError) as error:
        source.fail(f"integer values within {dtype}", error, source.line_number + 1)


def _expand(
    source: Source, symmetry: str, i: np.ndarray, j: np.ndarray, values: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    off = i != j
    if symmetry == "skew-symmetric" and not off.all():
        source.fail("no diagonal entries in a skew-symmetric matrix", int((~off).sum()))
    rows, columns = np.concatenate([i, j[off]]), np.concatenate([j, i[off]])
    if values is not None:
        mirror = values[off]
        if symmetry == "skew-symmetric":
            mirror = -mirror
        elif symmetry == "hermitian":
            mirror = mirror.conj()
        values = np.concatenate([values, mirror])
    return rows, columns, values


def write(
    stream: BinaryIO, values: np.ndarray, coordinates: list[np.ndarray], shape: tuple[int, ...]
) -> None:
    """Writes a file `coordinate <field> general`, with enough digits to read the same values
    back."""
    if values.dtype == bool:
        values = values.astype(np.int32)
    matrix = scipy.sparse.coo_array((values, tuple(coordinates)), shape=shape)
    precision = 9 if values.dtype in (np.float32, np.complex64) else 17
    scipy.io.mmwrite(stream, matrix, symmetry="general", precision=precision)
