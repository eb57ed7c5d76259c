"""Byte-level text classification from files that the user names.

A table (.tsv, .tsv.gz): one column holds the text, another its class, quoted as CSV or not.
Several plain files: windows of bytes, the class is the file that they come from.
One plain file: windows of bytes, the class is the byte that follows.

Plain files may be gzipped. Held-out windows come from the last tenth of each file, so that none
overlaps a training window.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from data import Dataset, padded

HELD_OUT = 0.1
MOST_CLASSES = 64
VOCABULARY = 257  # padding and the 256 bytes


def dataset(
    paths: Sequence[str | Path], *, length: int = 1000, windows: int = 20000, seed: int = 0
) -> Dataset:
    """A task from one table, one plain file or several; `windows` is for plain files.

    Raises ValueError naming the file where it is missing, unreadable, malformed or too short.
    """
    files = [Path(path) for path in paths]
    if not files:
        raise ValueError("text: no file given")
    tables = [path for path in files if path.name.removesuffix(".gz").endswith(".tsv")]
    if tables and len(files) > 1:
        raise ValueError(
            f"text: give one table alone, or plain files; got {', '.join(map(str, files))}"
        )
    contents = [_bytes(path) for path in files]
    if tables:
        return _from_table(files[0], contents[0], length, seed)
    return _from_plain(files, contents, length, windows, seed)


def _bytes(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"text: no such file: {path}") from None
    except (OSError, EOFError) as error:  # a folder, no permission, not gzip or truncated
        raise ValueError(f"text: cannot read {path}: {error}") from None


def _from_table(path: Path, content: bytes, length: int, seed: int) -> Dataset:
    csv.field_size_limit(2**31 - 1)
    # Latin-1 maps each byte to one character and back, whatever the file's encoding.
    lines = io.StringIO(content.decode("latin-1"), newline="")
    rows = [row for row in csv.reader(lines, delimiter="\t") if row]
    width = len(rows[0]) if rows else 0
    for number, row in enumerate(rows, 1):
        if len(row) != width or width < 2:
            raise ValueError(
                f"{path}: record {number} has {len(row)} columns, separated by tabs; "
                f"expected {max(width, 2)}"
            )
    columns = [list(column) for column in zip(*rows, strict=True)]
    text = max(range(width), key=lambda c: sum(map(len, columns[c])), default=None)
    label = min(
        (c for c in range(width) if c != text), key=lambda c: len(set(columns[c])), default=None
    )
    if text is None or len(rows) < 3:
        raise ValueError(
            f"{path}: {len(rows)} records; expected a column of texts and a column of classes"
        )
    if columns[label][0] not in columns[label][1:]:  # a header
        columns = [column[1:] for column in columns]
    names = tuple(sorted(set(columns[label])))
    if not 2 <= len(names) <= MOST_CLASSES:
        raise ValueError(
            f"{path}: column {label + 1} has {len(names)} classes; expected 2 to {MOST_CLASSES}"
        )
    kept = [
        (t.encode("latin-1"), c) for t, c in zip(columns[text], columns[label], strict=True) if t
    ]
    tokens = padded([t for t, _ in kept], length)
    labels = np.asarray([names.index(c) for _, c in kept], np.int32)
    order = np.random.default_rng(seed).permutation(len(kept))
    held, rest = np.split(order, [max(1, round(HELD_OUT * len(kept)))])
    return Dataset(
        path.name, tokens[rest], labels[rest], tokens[held], labels[held], VOCABULARY, names
    )


def _from_plain(
    files: list[Path], contents: list[bytes], length: int, windows: int, seed: int
) -> Dataset:
    rng = np.random.default_rng(seed)
    follow = len(files) == 1
    parts: dict[bool, list] = {False: [], True: []}
    for number, (path, content) in enumerate(zip(files, contents, strict=True)):
        data = np.frombuffer(content, np.uint8)
        cut = data.size - max(round(HELD_OUT * data.size), length + 2)
        if cut < length + 1:
            raise ValueError(
                f"{path}: {data.size} bytes are too few for windows of {length} bytes, some held "
                f"out; give --length {max(data.size // 2 - 2, 1)} or less"
            )
        for held, region in ((False, data[:cut]), (True, data[cut:])):
            count = max(windows // len(files) // (10 if held else 1), 1)
            starts = rng.integers(0, region.size - length, count)
            spans = np.lib.stride_tricks.sliding_window_view(region, length)[starts]
            labels = region[starts + length] if follow else np.full(count, number)
            parts[held].append((spans.astype(np.int16) + 1, labels.astype(np.int32)))
    (tokens, labels), (held_tokens, held_labels) = (
        tuple(map(np.concatenate, zip(*parts[held], strict=True))) for held in (False, True)
    )
    names = tuple(f"byte {b}" for b in range(256)) if follow else tuple(map(str, files))
    name = ", ".join(path.name for path in files)
    return Dataset(name, tokens, labels, held_tokens, held_labels, VOCABULARY, names)
