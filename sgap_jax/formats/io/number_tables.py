"""Reads tables of numbers from untrusted text: in blocks, with NumPy's C parser, and with line
numbers for errors.

Memory use is proportional to the file: declared counts are compared with the size of the file
before anything is allocated for them, and gzip streams that expand too much are cut off.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sgap_jax.formats.checks import INT32_MAX

BLOCK_BYTES = 1 << 23
LINE_BYTES = 1 << 16
HEADER_LINES = 1 << 20
# gzip shrinks the text of sparse matrices 2 to 30 times; a small file that grows a thousandfold is
# an attack. Up to 64 MiB of text are read at any ratio.
MAX_EXPANSION = 256
FREE_EXPANSION_BYTES = 1 << 26


class Contents(NamedTuple):
    """The contents of a file: one index array per dimension, and values (None: a pattern)."""

    shape: tuple[int, ...]
    coordinates: list[np.ndarray]
    values: np.ndarray | None
    dtype: Any = None  # the values' dtype if the file names one, for dtypes that NumPy lacks


class Source:
    """A text file that is being read, and the current line number, which errors name."""

    def __init__(self, stream: io.BufferedIOBase, path: str, capacity: int):
        self.stream, self.path, self.capacity = stream, path, capacity
        self.line_number = 0
        self._bytes = 0
        self._unread = b""

    def fail(self, expected: str, got: object, line: int | None = None) -> NoReturn:
        if isinstance(got, bytes):
            got = repr(got[:60].decode("latin1"))
        where = f"{self.path}:{line}" if line else self.path
        raise ValueError(f"{where}: expected {expected}, got {got}")

    def require_room(self, entries: int, bytes_each: int, what: str, line: int) -> None:
        """Refuses a declared count that the file is too small to hold."""
        most = self.capacity // bytes_each + 1
        if entries > most:
            self.fail(f"at most {most} {what} in a file of this size", entries, line)

    def _count(self, data: bytes) -> bytes:
        self._bytes += len(data)
        if self._bytes > self.capacity:
            self.fail(
                f"gzip to expand less than {MAX_EXPANSION} times",
                f"{self._bytes} bytes and more to come; decompress the file first if it is meant",
            )
        return data

    def line(self) -> bytes | None:
        """The next line of the header without its line end; None at the end of the file."""
        data = self._count(self.stream.readline(LINE_BYTES))
        if not data:
            return None
        self.line_number += 1
        if self.line_number > HEADER_LINES:
            self.fail(f"at most {HEADER_LINES} lines of comments", "more")
        if len(data) == LINE_BYTES and not data.endswith(b"\n"):
            self.fail(f"lines under {LINE_BYTES} bytes", "a longer one", self.line_number)
        return data.rstrip(b"\r\n")

    def unread(self, line: bytes) -> None:
        """Puts the line just read back, so that the blocks start with it."""
        self._unread = line + b"\n"
        self.line_number -= 1

    def header_line(self, comment: bytes) -> bytes | None:
        """The next line that is neither blank nor a comment."""
        while (data := self.line()) is not None:
            if data.strip() and not data.lstrip().startswith(comment):
                return data
        return None

    def _blocks(self, ends: bytes) -> Iterator[bytes]:
        """The rest of the file in blocks, each cut after one of the bytes in `ends`."""
        left, self._unread = self._unread, b""
        while data := self._count(self.stream.read(BLOCK_BYTES)):
            cut = max(data.rfind(end) for end in (ends[i : i + 1] for i in range(len(ends)))) + 1
            if not cut and len(left) + len(data) > 2 * BLOCK_BYTES:
                self.fail("numbers in short lines", "a line without end", self.line_number + 1)
            if cut:
                yield left + data[:cut]
                left = data[cut:]
            else:
                left += data
        if left:
            yield left

    def rows(self, width: int, comment: bytes, expected: str) -> Iterator[tuple[np.ndarray, bytes]]:
        """Yields the rest of the file as (float64 [rows, width], the block's bytes).

        Until the next block is requested, `line_number` is that of the line before the block.
        """
        comments = re.compile(rb"(?m)^[ \t]*" + re.escape(comment) + rb".*$")
        for block in self._blocks(b"\n"):
            if comment in block:
                block = comments.sub(b"", block)  # keeps the line ends, and so the line numbers
            if block.strip():
                yield self._parse(block, width, expected), block
            self.line_number += block.count(b"\n")

    def _parse(self, block: bytes, width: int, expected: str) -> np.ndarray:
        try:
            rows = _table(block)
            if rows.shape[1] == width:
                return rows
            problem = f"{rows.shape[1]} columns"
        except ValueError as error:
            problem = str(error)
        # Go through the lines in Python only to name the one that is wrong.
        for number, line in enumerate(block.split(b"\n"), self.line_number + 1):
            if line.strip() and not _is_row(line, width):
                self.fail(expected, line.strip(), number)
        self.fail(expected, problem, self.line_number + 1)

    def line_of_row(self, block: bytes, row: int) -> tuple[int, bytes]:
        """(line number, text) of a row of the current block."""
        full = [(i, x) for i, x in enumerate(block.split(b"\n"), self.line_number + 1) if x.strip()]
        return full[row]

    def coordinates(
        self, rows: np.ndarray, block: bytes, sizes: tuple[int, ...] | None, ndim: int
    ) -> list[np.ndarray]:
        """The first `ndim` columns as 0-based int32 indices; the file's are 1-based."""
        most = np.array(sizes if sizes is not None else (INT32_MAX,) * ndim, np.float64)
        index = rows[:, :ndim]
        good = (index >= 1) & (index <= most) & (index == np.floor(index))  # False for NaN
        if not good.all():
            row, mode = (int(i) for i in np.argwhere(~good)[0])
            number, text = self.line_of_row(block, row)
            token = text.split()[mode]
            self.fail(f"index {mode + 1} in 1 .. {int(most[mode])}", token, number)
        return [column.astype(np.int32) - 1 for column in index.T]

    def integers(self) -> Iterator[np.ndarray]:
        """Yields the rest of the file as int64 arrays; line breaks have no meaning."""
        for block in self._blocks(b" \n\t"):
            strange = block.translate(None, b"0123456789- \t\r\n")
            if strange:
                self.fail("integers", strange[:20], self.line_number + 1)
            if block.strip():
                column = io.StringIO(block.translate(_SPACE_TO_NEWLINE).decode("ascii"))
                try:
                    yield np.loadtxt(column, np.int64, ndmin=1, comments=None)
                except (ValueError, OverflowError) as error:
                    self.fail("integers", str(error).split(" at row")[0], self.line_number + 1)
            self.line_number += block.count(b"\n")


_SPACE_TO_NEWLINE = bytes.maketrans(b" \t\r", b"\n\n\n")
_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*([de][+-]?\d+)?|\.\d+([de][+-]?\d+)?|nan|inf(inity)?)", re.I)
_EXPONENT = re.compile(rb"(?<=[\d.])[dD](?=[+-]?\d)")  # as Fortran writes that of a double


def _table(block: bytes) -> np.ndarray:
    """The numbers of a block. Where exponents are Fortran's, which are rare, it is read again."""
    try:
        return np.loadtxt(io.StringIO(block.decode("ascii")), ndmin=2, comments=None)
    except ValueError:
        text, found = _EXPONENT.subn(b"e", block)
        if not found:
            raise
        return np.loadtxt(io.StringIO(text.decode("ascii")), ndmin=2, comments=None)


def _is_row(line: bytes, width: int) -> bool:
    tokens = line.split()
    return len(tokens) == width and all(_NUMBER.fullmatch(token) for token in tokens)


@contextmanager
def open_source(path: str) -> Iterator[Source]:
    """Opens plain or, by its suffix, gzip text. ValueError if the gzip stream is damaged."""
    size = os.path.getsize(path)
    with open(path, "rb") as raw:
        if not path.lower().endswith(".gz"):
            yield Source(raw, path, max(size, 1))
            return
        capacity = max(FREE_EXPANSION_BYTES, MAX_EXPANSION * size)
        try:
            with gzip.GzipFile(fileobj=raw) as stream:
                yield Source(io.BufferedReader(stream, 1 << 20), path, capacity)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: expected a whole gzip file, got {error}") from error
