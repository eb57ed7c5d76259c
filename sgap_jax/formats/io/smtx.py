""".smtx, the pattern files of the Deep Learning Matrix Collection (Gale et al., SC20).

% comments
m, k, nnz
row offsets        (m + 1)
column indices     (nnz, 0-based)
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from sgap_jax.formats import checks, construct
from sgap_jax.formats.io.number_tables import Contents, Source

_WRITE_BLOCK = 1 << 20


def read(source: Source) -> Contents:
    line = source.header_line(b"%")
    if line is None:
        source.fail("a line of sizes 'm, k, nnz'", "the end of the file")
    number = source.line_number
    words = line.replace(b",", b" ").split()
    if len(words) != 3 or not all(word.isdigit() for word in words):
        source.fail("three non-negative integers 'm, k, nnz'", line, number)
    # int() refuses thousands of digits.
    if max(map(len, words)) >= 20 or max(map(int, words)) > checks.INT32_MAX:
        source.fail(f"sizes up to {checks.INT32_MAX}", line, number)
    m, k, nnz = (int(word) for word in words)
    if nnz > m * k:
        source.fail(f"at most {m} x {k} = {m * k} entries", nnz, number)
    total = m + 1 + nnz
    source.require_room(total, 2, "numbers", number)
    parts, count = [], 0
    for part in source.integers():
        parts.append(part)
        count += len(part)
        if count > total:
            break
    if count != total:
        many = "more" if count > total else count
        source.fail(f"{m + 1} row offsets and {nnz} column indices, {total} numbers", many)
    numbers = np.concatenate(parts)
    offsets, indices = numbers[: m + 1], numbers[m + 1 :]
    if offsets[-1] != nnz:
        source.fail(f"the last row offset to be nnz = {nnz}", offsets[-1], number + 1)
    names = ("row offsets", "column indices")
    coordinates = construct.expand_compressed(offsets, indices, (m, k), (0, 1), names, source.path)
    checks.check_range(coordinates[1], k, "column indices", source.path)
    return Contents((m, k), coordinates, None)


def write(
    stream: BinaryIO, values: np.ndarray, coordinates: list[np.ndarray], shape: tuple[int, ...]
) -> None:
    """Writes coordinates that are sorted in row-major order. All values must be 1, as the file
    format does not store them."""
    if not (values == 1).all():
        raise ValueError(
            "write: A: .smtx holds a pattern only, expected values of one, got others; "
            "use another suffix or A.asformat(CSR).with_values(jnp.ones(A.nnz))"
        )
    offsets = construct.count_offsets(coordinates[0], shape[0])
    stream.write(f"{shape[0]}, {shape[1]}, {values.shape[0]}\n".encode())
    for numbers in (offsets, coordinates[1]):
        for start in range(0, numbers.shape[0], _WRITE_BLOCK):
            block = numbers[start : start + _WRITE_BLOCK].tolist()
            stream.write(b" " * (start > 0) + " ".join(map(str, block)).encode())
        stream.write(b"\n")
