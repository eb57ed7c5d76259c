"""The cache of compiled kernels: in memory, and on disk for later processes.

An entry is one file, named by the hash of everything that its compilation depends on. Files appear
by rename and contain a checksum, so a reader sees a whole entry or none, even if several processes
write to the folder, a writer is killed, or a file is damaged. If the folder cannot be written, each
process compiles again and warns once. The folder stays near MOST_BYTES: the least recently used
entries are removed.
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
_KEPT = 0.75  # the share of MOST_BYTES that a clean-up leaves, so that clean-ups are rare

# The first line of an entry. Change it with the layout of entries: it is part of their keys.
_FORMAT = b"sgap_jax cubin 1\n"


@dataclass(frozen=True)
class Cubin:
    """Machine code of one architecture, and the kernel's name in it."""

    kernel: str
    code: bytes


def content_key(*parts: str | bytes) -> str:
    """SHA-256 of the parts, in order; ("ab", "c") and ("a", "bc") have different keys."""
    digest = hashlib.sha256(_FORMAT)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def default_folder() -> Path | None:
    """The folder SGAP_CACHE_DIR, None (nothing on disk) if that is empty; without it a folder in
    the user's cache."""
    named = os.environ.get("SGAP_CACHE_DIR")
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "sgap_jax" / "cubins"
    except RuntimeError:  # the user has no home directory
        return None


class CubinCache:
    """Cubins by key, in memory and in `folder` (None: in memory only). Thread-safe.

    Each process measures the folder when it first writes there, and again when it has written as
    much as was free then. In between, several processes together may exceed `most_bytes`.
    """

    def __init__(self, folder: Path | None, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._free = 0
        self._memory: dict[str, Cubin] = {}
        self._warned = False

    def get(self, key: str, compile: Callable[[], Cubin]) -> Cubin:
        """The entry of `key`; if there is none or it is damaged, stores and returns `compile()`."""
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
            # A pipe of that name would wait for a writer.
            data = path.read_bytes() if path is not None and path.is_file() else b""
        except OSError:  # absent, or not readable: compile
            return None
        if path is not None:
            with contextlib.suppress(OSError):  # the folder belongs to another user
                os.utime(path)  # marks the entry as used now, for _make_room
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
        """If the folder is larger than `most_bytes`, removes the least recently used entries, and
        temporary files that killed processes left. Other processes may do so at the same time."""
        found, total = [], 0
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # removed in the meantime
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
    """Writes a file by rename, so that readers see it whole or not at all; OSError on failure."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _abandoned() -> float:
    """A time; temporary files that are older have no writer any more."""
    return time.time() - 3600


def encode_entry(cubin: Cubin) -> bytes:
    body = cubin.kernel.encode() + b"\n" + cubin.code
    return _FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode_entry(data: bytes) -> Cubin | None:
    """The entry, or None if the bytes are not a whole entry with a matching checksum."""
    if not data.startswith(_FORMAT):
        return None
    checksum, _, body = data[len(_FORMAT) :].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        return None
    kernel, _, code = body.partition(b"\n")
    return Cubin(kernel.decode(), code)
