"""Loads the native library, raises ImportError if the installed jax cannot run it, and registers
its FFI targets."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import jax


def _installed_ffi_version() -> tuple[int, int]:
    """(major, minor) of the installed jaxlib's FFI API, read from its header."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text(encoding="utf-8")
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if None in found:
        raise ImportError(f"sgap_jax: no XLA_FFI_API_MAJOR / MINOR in {header}")
    major, minor = (int(match[1]) for match in found if match is not None)
    return major, minor


def check_ffi_version(built: tuple[int, int], installed: tuple[int, int]) -> None:
    """Raises ImportError if a library built with FFI API `built` cannot run on `installed`.

    A library for an older minor version runs on a newer one. Registering a library for a newer one
    would break the whole CPU backend of the process, so this check comes before any registration.
    """
    if built[0] == installed[0] and built[1] <= installed[1]:
        return
    raise ImportError(
        f"sgap_jax was built with XLA FFI API {built[0]}.{built[1]} but jaxlib "
        f"{metadata.version('jaxlib')} offers {installed[0]}.{installed[1]}. Upgrade jax and "
        "jaxlib, or rebuild sgap_jax from source against the oldest supported jax: "
        "pip install --force-reinstall --no-cache-dir --no-deps --no-binary sgap_jax sgap_jax"
    )


def _load() -> Any:
    try:
        from sgap_jax import _native  # type: ignore[attr-defined]  # a compiled module
    except ImportError as error:
        if "SGAP_CPU_" in str(error):
            raise
        raise ImportError(
            f"sgap_jax: the native library does not load ({error}); "
            "build it with `pip install .` in the repository root"
        ) from error
    check_ffi_version(tuple(_native.ffi_api_version()), _installed_ffi_version())
    return _native


native = _load()
TARGETS: tuple[str, ...] = tuple(sorted(native.targets()))
for _name, _handler in native.targets().items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")
# JAX holds these until a CUDA plugin starts, if one does. They are registered at import, not at
# lowering, because an exported program runs without being lowered.
for _name, _stages in native.cuda_targets().items():
    jax.ffi.register_ffi_target(_name, _stages, platform="CUDA")


def machine() -> dict[str, Any]:
    """What the native library has read of the processor: the fields of `schedules.Machine`."""
    isa = native.isa()
    width = 32 if isa == "avx2" else 16 if isa == "baseline" else 64
    units = {"matrix_tiles": isa == "amx", "pair_dots": isa == "avx512_bf16"}
    return {**native.machine(), "vector_bytes": width, **units}


def keep_memory(most_bytes: int = 1 << 30) -> bool:
    """Keeps the memory of results that are no longer used in the process, up to `most_bytes` for a
    result, so that the pages of a large result are not faulted in anew at every call. By default
    the C library returns blocks of more than 32 MiB to the system.

    Call it once, before large arrays are made. It is a setting of the whole process (`mallopt` of
    glibc), which then holds as much memory as it ever had in use at once. Returns whether the C
    library has the setting; without it nothing is changed.

    Raises:
      ValueError: `most_bytes` is not an int from 0 on.
    """
    if type(most_bytes) is not int or most_bytes < 0:
        raise ValueError(f"keep_memory: most_bytes must be an int from 0 on, got {most_bytes!r}")
    kept: bool = native.keep_freed_memory(min(most_bytes, 2**62))
    return kept


def threads() -> int:
    """How many threads this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def info() -> dict[str, Any]:
    """The environment: versions, instruction sets (chosen and supported), the machine that
    schedules are chosen for, devices, threads.

    Starts the JAX backend (to list the devices).
    """
    return {
        "sgap_jax": _version("sgap_jax"),
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "python": platform.python_version(),
        "cpu_isa": native.isa(),
        "cpu_isas_supported": list(native.supported_isas()),
        "cpu_machine": [f"{name} {value}" for name, value in machine().items()],
        "ffi_api_built": ".".join(map(str, native.ffi_api_version())),
        "ffi_api_installed": ".".join(map(str, _installed_ffi_version())),
        "ffi_targets": list(TARGETS),
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()],
        "cpu_threads": threads(),
    }
