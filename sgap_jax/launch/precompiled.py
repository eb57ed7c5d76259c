"""Kernels that come with the package: the default points, compiled when the wheel was built.

One archive per architecture: a zip file with an entry for each kernel, and the compiler's version
as its comment. An entry is found by all that its compilation depends on but the compiler, so that
none need be installed where the package runs. Which kernels there are: `default_calls`.
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
# Code of desktop GPUs does not run on these (CUDA programming guide, binary compatibility).
_EMBEDDED = ("sm_87", "sm_101")


def package_folder() -> Path:
    """Where the archives are, in a wheel that has them."""
    return Path(__file__).parents[1] / "cubins"


def key(call: KernelCall, headers: tuple[str, ...]) -> str:
    """The name of a call's entry in the archive of any architecture."""
    return content_key("precompiled", call.source, call.kernel, *headers)


def write(folder: Path, arch: str, compiler: str, cubins: Mapping[str, Cubin]) -> Path:
    """Makes the archive of one architecture; the same entries give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _archive(folder, arch)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.comment = compiler.encode()
        for name in sorted(cubins):
            info = zipfile.ZipInfo(name)  # of 1980, whenever it is made
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, encode_entry(cubins[name]))
    return path


def find(call: KernelCall, headers: tuple[str, ...], arch: str) -> Cubin | None:
    """The entry that runs on `arch`; None where there is none, or only a damaged one."""
    return _find(package_folder(), key(call, headers), arch)


@cache
def _find(folder: Path, name: str, arch: str) -> Cubin | None:
    for candidate in serving(arch):
        try:
            with zipfile.ZipFile(_archive(folder, candidate)) as archive:
                compiler, driver = archive.comment.decode().partition(".")[0], driver_major()
                # Code of CUDA 13 does not load into a driver of CUDA 12; the other way it does.
                if driver is not None and int(compiler) > driver:
                    continue
                cubin = decode_entry(archive.read(name))
        except Exception:  # absent, or damaged in any way: compile
            continue
        if cubin is not None:
            return cubin
    return None


def serving(arch: str) -> Iterator[str]:
    """Architectures whose code runs on `arch`: its major version, its minor one or an earlier."""
    version = re.fullmatch(r"sm_(\d+)(\d)", arch)
    if version is None:  # sm_90a has instructions that sm_90 has not
        return
    for minor in range(int(version[2]), -1, -1):
        other = f"sm_{version[1]}{minor}"
        if other in ARCHITECTURES and (other == arch or arch not in _EMBEDDED):
            yield other


def _archive(folder: Path, arch: str) -> Path:
    return folder / f"{arch}.zip"


@cache
def driver_major() -> int | None:
    """The CUDA version, without its minor part, of the driver here; None where there is none."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000 if status == 0 else None
