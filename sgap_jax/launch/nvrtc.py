"""Compiles CUDA source to a cubin with NVRTC, which needs neither a CUDA toolkit nor a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from ctypes.util import find_library
from pathlib import Path

from sgap_jax.launch.precompiled import driver_major

# Folders of NVRTC in NVIDIA's wheels, in the namespace package `nvidia`, by major version.
_WHEEL_FOLDERS = {13: "cu13/lib", 12: "cuda_nvrtc/lib"}
_LANGUAGE = "--std=c++17"


class NvrtcMissing(ImportError):
    """NVRTC is not installed, or does not load."""


class CompilationError(RuntimeError):
    """CUDA source that does not compile; the message carries the compiler's log."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled translation unit of one kernel.

    Attributes:
      cubin: device code for one architecture; for a GPU newer than the compiler PTX, which the
        driver compiles when it loads it.
      log: the compiler's log, which may be empty.
      name: the mangled name of the kernel.
    """

    cubin: bytes
    log: str
    name: str


def compile(source: str, *, arch: str, options: Sequence[str] = ()) -> Compiled:
    """Compiles a translation unit that instantiates one kernel.

    Args:
      source: CUDA C++; `options` say where its headers are.
      arch: a real architecture, such as "sm_90", rather than a virtual one: a cubin runs on every
        driver of the compiler's major version, PTX only on drivers as new as the compiler. For
        one that is newer than the compiler the code is PTX all the same: a driver that knows such a
        GPU is newer than the compiler too.
      options: of NVRTC, such as "--include-path=FOLDER"; they come after the defaults.

    Raises:
      NvrtcMissing: NVRTC is not installed; names the extra that brings it.
      CompilationError: with the log.
    """
    target = target_of(arch, architectures())
    code, log = _compile(source, target, options, "PTX" if _is_virtual(target) else "CUBIN")
    # Each kernel has a section of its own in the ELF file, and an entry in PTX.
    entry = rb"\.entry ([\w$]+)\(" if _is_virtual(target) else rb"\.text\.([A-Za-z_$][\w$]*)\0"
    names = set(re.findall(entry, code))
    if len(names) != 1:
        raise CompilationError(
            f"a translation unit must have one kernel, got {len(names)}: "
            f"{', '.join(sorted(name.decode() for name in names))}\n{source}"
        )
    return Compiled(code, log, names.pop().decode())


def target_of(arch: str, known: Sequence[int]) -> str:
    """What to compile for to run on `arch`: the architecture itself if the compiler knows it (90
    for sm_90), else the virtual one of the newest before it, whose PTX later GPUs run.

    Raises CompilationError for an architecture that is older than all that the compiler knows.
    """
    number = re.fullmatch(r"(?:sm|compute)_(\d+)[af]?", arch)
    if number is None or not known or int(number[1]) in known:
        return arch
    older = [one for one in known if one < int(number[1])]
    if not older:
        raise CompilationError(
            f"NVRTC {version()} compiles for sm_{min(known)} and later, not for {arch}; the NVRTC "
            "of an earlier CUDA version does (pip install 'sgap_jax[cuda12]')"
        )
    return f"compute_{max(older)}"


def _is_virtual(target: str) -> bool:
    return target.startswith("compute_")


@functools.cache
def architectures() -> tuple[int, ...]:
    """The architectures that the installed NVRTC compiles for, such as (75, 80, 90)."""
    library, count = _library(), ctypes.c_int()
    _check(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
    found = (ctypes.c_int * count.value)()
    _check(library.nvrtcGetSupportedArchs(found), "nvrtcGetSupportedArchs")
    return tuple(found)


def ptx(source: str, arch: str, options: Sequence[str] = ()) -> str:
    """The PTX of a translation unit for a virtual architecture, such as "compute_90"."""
    text, _ = _compile(source, arch, options, "PTX")
    return text.rstrip(b"\0").decode()


def version() -> str:
    """The version of the installed NVRTC, such as "13.0"; raises NvrtcMissing if there is none."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def _compile(source: str, arch: str, options: Sequence[str], kind: str) -> tuple[bytes, str]:
    library, program = _library(), ctypes.c_void_p()
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    )
    _check(status, "nvrtcCreateProgram")
    try:
        flags = [f"--gpu-architecture={arch}", _LANGUAGE, *options]
        argv = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = library.nvrtcCompileProgram(program, len(flags), argv)
        log = _text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status != 0:
            raise CompilationError(f"NVRTC, {' '.join(flags)}: {_error(status)}\n{log}\n{source}")
        return _text(program, kind), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    library, size = _library(), ctypes.c_size_t()
    name = f"nvrtcGet{what}"
    _check(getattr(library, f"{name}Size")(program, ctypes.byref(size)), f"{name}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, name)(program, buffer), name)
    return buffer.raw


def _error(status: int) -> str:
    return str(_library().nvrtcGetErrorString(status).decode())


def _check(status: int, call: str) -> None:
    if status != 0:
        raise CompilationError(f"NVRTC: {call} failed: {_error(status)}")


@functools.cache
def _library() -> ctypes.CDLL:
    problems = []
    for path in _candidates():
        try:
            # NVRTC opens libnvrtc-builtins by its name, which works only if the process has loaded
            # it; without it every compilation fails with error 7.
            if Path(path).is_absolute():
                for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            library = ctypes.CDLL(path)
        except OSError as error:
            problems.append(f"{path}: {error}")
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise NvrtcMissing(
        "sgap_jax: CUDA kernels are compiled with NVRTC, which is not installed; "
        "pip install 'sgap_jax[cuda13]' (or 'sgap_jax[cuda12]') brings it"
        + "".join(f"\n  {problem}" for problem in problems)
    )


def _candidates() -> Iterator[str]:
    """Paths of NVRTC to try: in NVIDIA's wheels, in a toolkit, then where the linker finds it."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    # A driver does not load code of a newer major version: compilers of such versions come last.
    driver = driver_major() or max(_WHEEL_FOLDERS)
    majors = sorted(_WHEEL_FOLDERS, key=lambda major: (major > driver, -major))
    folders = [Path(root) / _WHEEL_FOLDERS[major] for major in majors for root in roots]
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders.append(Path(toolkit or "/usr/local/cuda") / "lib64")
    for folder in folders:
        yield from (str(path) for path in sorted(folder.glob("libnvrtc.so*"), reverse=True))
    if (system := find_library("nvrtc")) is not None:
        yield system
