"""Compiled kernels, kept by content: in memory, and on disk for the processes to come.

An entry is one file, named by the hash of all that its compilation depends on. Files appear by
rename and carry a checksum, so that processes may fill one folder at once, be killed, or find it
damaged: a reader sees a whole entry or none. A folder that cannot be written costs a compilation
per process, and one warning. A folder stays near MOST_BYTES: beyond, the entries that were used
longest ago go.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Some 20,000 kernels.
MOST_BYTES = 256 << 20
_KEPT = 0.75  # of that, when some go: the next are then a while away

# The first line of an entry. Another layout takes another line, which also makes other keys.
_FORMAT = b"sgap_jax cubin 1\n"


@dataclass(frozen=True)
class Cubin:
    """Machine code of one architecture, and the kernel's name in it."""

    kernel: str
    code: bytes


def content_key(*parts: str | bytes) -> str:
    """SHA-256 of the parts in order; their boundaries count."""
    digest = hashlib.sha256(_FORMAT)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def default_folder() -> Path | None:
    """SGAP_CACHE_DIR (empty: keep nothing on disk), else a folder in the user's cache."""
    named = os.environ.get("SGAP_CACHE_DIR")
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "sgap_jax" / "cubins"
    except RuntimeError:  # a user without a home
        return None


class CubinCache:
    """Cubins by key, in memory and in `folder` (None: in memory only). Thread-safe.

    Each process looks at the size of the folder when it first writes there, and again when it has
    filled what was free: several that write at once may exceed `most_bytes` for that long.
    """

    def __init__(self, folder: Path | None, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._free = 0
        self._memory: dict[str, Cubin] = {}
        self._warned = False

    def get(self, key: str, compile: Callable[[], Cubin]) -> Cubin:
        """The entry of `key`; where there is none or a damaged one, `compile()`, which is kept."""
        cubin = self._memory.get(key) or self._read(key)
        if cubin is None:
            cubin = compile()
            self._write(key, cubin)
        self._memory[key] = cubin
        return cubin

    def path(self, key: str) -> Path | None:
        """The file of an entry, present or not."""
        return None if self.folder is None else self.folder / f"{key}.cubin"

    def _read(self, key: str) -> Cubin | None:
        path = self.path(key)
        try:
            data = b"" if path is None else path.read_bytes()
        except OSError:  # absent, or not for us: compile
            return None
        if path is not None:
            with contextlib.suppress(OSError):  # someone else's folder
                os.utime(path)  # used now: see _make_room
        return decode_entry(data)

    def _write(self, key: str, cubin: Cubin) -> None:
        path = self.path(key)
        if path is None:
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._free -= len(cubin.code)
            if self._free < 0:
                self._make_room(path.parent)
            replace_file(path, encode_entry(cubin))
        except OSError as error:
            self._warn(error)

    def _make_room(self, folder: Path) -> None:
        """Removes what was used longest ago, were the folder beyond its size; what processes that
        were killed have left goes the same way. Others may do so at the same time."""
        found, total = [], 0
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # gone since
                    status = entry.stat()
                    left = entry.name.endswith(".new") and status.st_mtime < _abandoned()
                    if left or (entry.name.endswith(".cubin") and entry.is_file()):
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
                        total += status.st_size
        if total > self.most_bytes:
            for _, size, name in sorted(found):
                if total <= _KEPT * self.most_bytes:
                    break
                with contextlib.suppress(OSError):
                    os.unlink(name)
                total -= size
        self._free = self.most_bytes - total

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"sgap_jax: compiled kernels cannot be kept in {self.folder} ({error}), so every "
            "process compiles them again. SGAP_CACHE_DIR names another folder; empty, it asks for "
            "none.",
            RuntimeWarning,
            stacklevel=2,
        )


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file that readers see whole or not at all; OSError where that cannot be."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _abandoned() -> float:
    """Nobody has been writing a file since."""
    return time.time() - 3600


def encode_entry(cubin: Cubin) -> bytes:
    body = cubin.kernel.encode() + b"\n" + cubin.code
    return _FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode_entry(data: bytes) -> Cubin | None:
    """The entry, or None where the bytes are not one that was written whole."""
    if not data.startswith(_FORMAT):
        return None
    checksum, _, body = data[len(_FORMAT) :].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        return None
    kernel, _, code = body.partition(b"\n")
    return Cubin(kernel.decode(), code)
