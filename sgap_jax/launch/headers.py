"""The device code that kernels include."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def header_folder() -> Path:
    """Where the device code is: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "cuda"
    return installed if installed.is_dir() else package.parent / "cuda"


@cache
def header_paths(folder: Path) -> dict[str, Path]:
    """The headers below a folder by their file names, by which they include each other."""
    return {path.name: path for path in sorted(folder.rglob("*.cuh"))}


@cache
def header_texts(folder: Path) -> dict[str, str]:
    """The text of each header, by its name."""
    return {name: path.read_text() for name, path in header_paths(folder).items()}


def include_options(folder: Path) -> tuple[str, ...]:
    """The options by which NVRTC finds the headers below a folder."""
    folders = sorted({path.parent for path in header_paths(folder).values()})
    return tuple(f"--include-path={path}" for path in folders)


def included_headers(source: str, folder: Path) -> tuple[str, ...]:
    """Names and texts in turn of the headers that a source includes, itself or through others.

    They belong to what a kernel's compilation depends on: a change in one of them is another key,
    for the kernels that include it.
    """
    texts = header_texts(folder)
    found, left = set[str](), _INCLUDE.findall(source)
    while left:
        name = left.pop()
        if name in texts and name not in found:
            found.add(name)
            left += _INCLUDE.findall(texts[name])
    return tuple(text for name in sorted(found) for text in (name, texts[name]))
