"""The device code that every kernel includes."""

from __future__ import annotations

from functools import cache
from pathlib import Path


def header_folder() -> Path:
    """Where the device code is: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "cuda"
    return installed if installed.is_dir() else package.parent / "cuda"


@cache
def header_texts(folder: Path) -> tuple[str, ...]:
    """Names and texts in turn: a change in any header is another key for every kernel."""
    headers = sorted(folder.glob("*.cuh"))
    return tuple(text for path in headers for text in (path.name, path.read_text()))
