"""FROSTT tensor files (Smith et al., 2017): a line per entry, 1-based coordinates and a value.

The format has no header: the shape is the largest coordinate in each mode, unless a comment
`# shape: 3 4 5`, which `write` adds, gives it.
"""

from __future__ import annotations

import re
from typing import BinaryIO

import numpy as np

from sgap_jax.formats.checks import INT32_MAX
from sgap_jax.formats.io.number_tables import Contents, Source

_SHAPE = re.compile(rb"#\s*shape:((?:\s+\d{1,19})+)\s*")
_WRITE_BLOCK = 1 << 17
MAX_MODES = 32


def read(source: Source) -> Contents:
    shape: tuple[int, ...] | None = None
    first: bytes | None = None
    while (line := source.line()) is not None:
        if match := _SHAPE.fullmatch(line.strip()):
            shape = tuple(int(size) for size in match[1].split())
            if max(shape) > INT32_MAX:
                source.fail(f"sizes up to {INT32_MAX}", shape, source.line_number)
        elif line.strip() and not line.lstrip().startswith(b"#"):
            first = line
            break
    if first is None:
        if shape is None:
            source.fail("lines of coordinates and a value", "none")
        return Contents(shape, [np.zeros(0, np.int32) for _ in shape], np.zeros(0))
    ndim = len(first.split()) - 1 if shape is None else len(shape)
    if not 1 <= ndim <= MAX_MODES:
        source.fail(f"1 to {MAX_MODES} coordinates and a value", first, source.line_number)
    expected = f"{ndim} coordinates and a value"
    source.unread(first)
    parts = []
    for rows, block in source.rows(ndim + 1, b"#", expected):
        parts.append((source.coordinates(rows, block, shape, ndim), rows[:, ndim].copy()))
    coordinates = [np.concatenate([part[0][mode] for part in parts]) for mode in range(ndim)]
    values = np.concatenate([part[1] for part in parts])
    if shape is None:
        shape = tuple(int(index.max()) + 1 for index in coordinates)
    return Contents(shape, coordinates, values)


def write(
    stream: BinaryIO, values: np.ndarray, coordinates: list[np.ndarray], shape: tuple[int, ...]
) -> None:
    if np.iscomplexobj(values):
        raise ValueError(f"write: A: .tns holds real values, got {values.dtype}")
    digits = {"f": "%.9g" if values.dtype == np.float32 else "%.17g"}.get(values.dtype.kind, "%d")
    row = "%d " * len(shape) + digits
    stream.write(f"# shape: {' '.join(map(str, shape))}\n".encode())
    for start in range(0, values.shape[0], _WRITE_BLOCK):
        block = slice(start, start + _WRITE_BLOCK)
        columns = [(index[block].astype(np.int64) + 1).tolist() for index in coordinates]
        lines = map(row.__mod__, zip(*columns, values[block].tolist(), strict=True))
        stream.write(("\n".join(lines) + "\n").encode())
