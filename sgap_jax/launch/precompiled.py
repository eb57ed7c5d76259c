"""Kernels that come with the package: those of the default schedules (`default_calls`), compiled
when the wheel was built.

There is one archive per architecture: a zip file with an entry for each kernel, and the compiler's
version as its comment. The key of an entry is a hash of everything that its compilation depends on
except the compiler, so that no compiler is needed where the package runs.
"""

from __future__ import annotations

import ctypes
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from sgap_jax.launch.cache import Cubin, content_key, decode_entry, encode_entry
from sgap_jax.launch.kernel_call import KernelCall

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# Embedded GPUs, which do not run code for desktop GPUs of the same major version (CUDA programming
# guide, binary compatibility).
_EMBEDDED = ("sm_87", "sm_101")


def package_folder() -> Path:
    """The folder of the archives, in a wheel that has them."""
    return Path(__file__).parents[1] / "cubins"


def key(call: KernelCall, headers: tuple[str, ...]) -> str:
    """The name of a call's entry in the archive of any architecture."""
    return content_key("precompiled", call.source, call.kernel, *headers)


def write(folder: Path, arch: str, compiler: str, cubins: Mapping[str, Cubin]) -> Path:
    """Writes the archive of one architecture; the same entries give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _archive(folder, arch)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.comment = compiler.encode()
        for name in sorted(cubins):
            info = zipfile.ZipInfo(name)  # its date is always 1980
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, encode_entry(cubins[name]))
    return path


def find(call: KernelCall, headers: tuple[str, ...], arch: str) -> Cubin | None:
    """The entry that runs on `arch`; None if there is none, or only a damaged one."""
    return _find(package_folder(), key(call, headers), arch)


@cache
def _find(folder: Path, name: str, arch: str) -> Cubin | None:
    for candidate in serving(arch):
        try:
            with zipfile.ZipFile(_archive(folder, candidate)) as archive:
                compiler, driver = archive.comment.decode().partition(".")[0], driver_major()
                # A driver of CUDA 12 does not load code of CUDA 13; newer drivers load older code.
                if driver is not None and int(compiler) > driver:
                    continue
                cubin = decode_entry(archive.read(name))
        except Exception:  # absent, or damaged in any way: compile
            continue
        if cubin is not None:
            return cubin
    return None


def serving(arch: str) -> Iterator[str]:
    """Architectures whose code runs on `arch`: of its major version, up to its minor version, the
    latest first."""
    version = re.fullmatch(r"sm_(\d+)(\d)", arch)
    if version is None:  # such as sm_90a, which has instructions that sm_90 lacks
        return
    for minor in range(int(version[2]), -1, -1):
        other = f"sm_{version[1]}{minor}"
        if other in ARCHITECTURES and (other == arch or arch not in _EMBEDDED):
            yield other


def _archive(folder: Path, arch: str) -> Path:
    return folder / f"{arch}.zip"


@cache
def driver_major() -> int | None:
    """The major CUDA version of the installed driver; None if there is no driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000 if status == 0 else None
