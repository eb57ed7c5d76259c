"""Lowers a KernelCall to a custom call that contains the kernel's cubin. All CUDA kernels are
launched this way.

The target `sgap_launch_v1` (cuda/launch/launch_ffi.cc) loads the cubin when the executable is
loaded; at run time it only zeroes results and launches. A program needs nothing but itself to run:
exported programs and JAX's persistent cache contain the machine code.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from sgap_jax.launch import precompiled
from sgap_jax.launch.cache import Cubin, CubinCache, content_key, default_folder
from sgap_jax.launch.kernel_call import KernelCall, header_folder, include_options, included_headers
from sgap_jax.runtime import native as native  # registers the target
from sgap_jax.schedules import schedule as grid

TARGET = "sgap_launch_v1"

_stand_in: ContextVar[Callable | None] = ContextVar("stand_in", default=None)


class Compiled(Protocol):
    @property
    def cubin(self) -> bytes: ...
    @property
    def name(self) -> str: ...


class Compiler(Protocol):
    """The interface of a compiler of CUDA C++, which the module `launch.nvrtc` implements."""

    def version(self) -> str: ...
    def compile(self, source: str, *, arch: str, options: Sequence[str] = ()) -> Compiled: ...


def lower(
    ctx: Any,
    call: KernelCall,
    operands: Sequence[Any],
    avals: Sequence[Any] | None = None,
    results: Sequence[Any] | None = None,
    *,
    compiler: Compiler,
    arch: str | None = None,
    cubins: CubinCache | None = None,
) -> Any:
    """Lowers a primitive to one launch; the body of a lowering rule for platform "cuda".

    Args:
      ctx: the rule's context.
      call: the launch.
      operands: the kernel's inputs, in its order: the primitive's operands or some of them.
      avals: shapes and dtypes of `operands`, if they are not those of all the primitive's operands.
      results: shapes and dtypes of the kernel's outputs, if they are not the primitive's results,
        such as accumulators of a wider dtype, or scratch.
      compiler: compiles the kernel if no cache has it.
      arch: such as "sm_90"; None is `device_arch()`.
      cubins: the cache of compiled kernels; None is the user's cache.

    Returns:
      The results of the custom call, in the kernel's order.

    Raises:
      ValueError: sizes that a launch cannot have. Also what the compiler and `device_arch` raise.
    """
    if avals is not None:
        ctx = ctx.replace(avals_in=list(avals))
    if results is not None:
        ctx = ctx.replace(avals_out=list(results))
    check_call(call, ctx.avals_in, ctx.avals_out)
    if (stand_in := _stand_in.get()) is not None:
        return stand_in(ctx, call, operands)
    attributes = call_attributes(call, compile_call(call, compiler, arch or device_arch(), cubins))
    aliases = dict(call.in_place) or None
    rule = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=aliases)
    return rule(ctx, *operands, **attributes)


@contextlib.contextmanager
def handed_to(stand_in: Callable) -> Iterator[None]:
    """A context in which `lower` only checks a call, and returns what
    `stand_in(ctx, call, operands)` does."""
    token = _stand_in.set(stand_in)
    try:
        yield
    finally:
        _stand_in.reset(token)


@contextlib.contextmanager
def collected() -> Iterator[dict[KernelCall, None]]:
    """A context in which `lower` compiles no kernel and keeps the calls, each once, in the order in
    which they come. What is lowered in it is no program that can run."""
    calls: dict[KernelCall, None] = {}

    def keep(ctx: Any, call: KernelCall, operands: Sequence) -> Any:
        calls[call] = None
        attributes = call_attributes(call, Cubin(call.kernel, b""))
        return jax.ffi.ffi_lowering(TARGET)(ctx, *operands, **attributes)

    with handed_to(keep):
        yield calls


def check_call(call: KernelCall, operands: Sequence, results: Sequence) -> None:
    """Raises ValueError for a call that the handler would refuse, or that makes no sense."""
    for name, sizes in (("grid", call.grid), ("block", call.block)):
        if not 1 <= len(sizes) <= 3:
            raise ValueError(f"launch: {name} must have one to three sizes, got {sizes}")
    most = (grid.GRID_X, grid.GRID_Y, grid.GRID_Z)
    if min(call.grid) < 0 or any(size > by for size, by in zip(call.grid, most, strict=False)):
        raise ValueError(f"launch: grid must have sizes from 0 to {most}, got {call.grid}")
    if min(call.block) < 1 or math.prod(call.block) > grid.THREADS:
        raise ValueError(f"launch: block must have 1 to {grid.THREADS} threads, got {call.block}")
    if len(call.block) == 3 and call.block[2] > grid.THREADS_Z:
        raise ValueError(f"launch: block must have up to {grid.THREADS_Z} in z, got {call.block}")
    if not 0 <= call.shared_bytes < 2**31:
        raise ValueError(f"launch: shared_bytes must be in [0, 2^31), got {call.shared_bytes}")
    if not all(-(2**63) <= scalar < 2**63 for scalar in call.scalars):
        raise ValueError(f"launch: scalars must be 64-bit integers, got {call.scalars}")
    if not set(call.zero) <= set(range(len(results))):
        raise ValueError(f"launch: zero must name some of {len(results)} results, got {call.zero}")
    for operand, result in call.in_place:
        found = [*operands[operand : operand + 1], *results[result : result + 1]]
        if len(found) < 2 or len({(x.shape, x.dtype) for x in found}) > 1:
            raise ValueError(
                f"launch: in_place must name operands and results of one shape and dtype, got "
                f"{(operand, result)}"
            )


def compile_call(
    call: KernelCall, compiler: Compiler, arch: str, cubins: CubinCache | None = None
) -> Cubin:
    """The machine code of a call: from the package, from memory, from disk, or from the compiler.

    If the package has the kernel, the compiler is not used at all, not even for its version.
    Raises NotImplementedError if a GPU of `arch` lacks the kernel's instructions.
    """
    arch = call.target(arch)
    folder = header_folder()
    headers = included_headers(call.source, folder)
    if (found := precompiled.find(call, headers, arch)) is not None:
        return found
    key = content_key(call.source, call.kernel, arch, compiler.version(), *headers)

    def compile() -> Cubin:
        compiled = compiler.compile(call.source, arch=arch, options=include_options(folder))
        return Cubin(compiled.name, compiled.cubin)

    return (user_cache(default_folder()) if cubins is None else cubins).get(key, compile)


def call_attributes(call: KernelCall, cubin: Cubin) -> dict[str, Any]:
    """The attributes of target sgap_launch_v1; their names and types are ABI."""

    def three(sizes: tuple[int, ...]) -> np.ndarray:
        return np.array(sizes + (1,) * (3 - len(sizes)), np.int64)

    return {
        "cubin": cubin.code,
        "kernel": cubin.kernel,
        "grid": three(call.grid),
        "block": three(call.block),
        "shared_bytes": np.int64(call.shared_bytes),
        "scalars": np.array(call.scalars, np.int64),
        "zero": np.array(call.zero, np.int64),
    }


def device_arch() -> str:
    """The architecture to compile for: SGAP_CUDA_ARCH, else `common_arch` of this process's GPUs.

    Raises:
      ValueError: SGAP_CUDA_ARCH is not the name of an architecture.
      NotImplementedError: there is no GPU.
    """
    named = os.environ.get("SGAP_CUDA_ARCH")
    if named:
        if not re.fullmatch(r"sm_\d+[af]?", named, re.ASCII):
            raise ValueError(f"SGAP_CUDA_ARCH: expected a name like sm_90, got {named!r}")
        return named
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise NotImplementedError(
            "sgap_jax: there is no GPU here whose architecture a kernel could be compiled for; "
            "to lower for one elsewhere set SGAP_CUDA_ARCH, for example to sm_90"
        ) from error
    return common_arch([device.compute_capability for device in devices])


def arch_of_schedules() -> str | None:
    """`device_arch()` for the choice of a schedule; None where there is no such GPU, or where
    something else runs the launches, which has all instructions."""
    if _stand_in.get() is not None:
        return None
    try:
        return device_arch().replace("compute_", "sm_")
    except NotImplementedError:  # `lower` says so, if it comes to a launch
        return None


def common_arch(capabilities: Sequence[str]) -> str:
    """The architecture to compile for, to run on GPUs of these compute capabilities ("9.0").

    A cubin runs on GPUs of its major version with its own minor version or a later one ("sm_90").
    For several major versions the code is PTX of the oldest ("compute_80"), which the driver
    compiles for each GPU that runs it, if it is as new as NVRTC.
    """
    versions = sorted({(int(major), int(minor)) for major, minor in map(_split, capabilities)})
    kind = "sm" if versions[0][0] == versions[-1][0] else "compute"
    return "{}_{}{}".format(kind, *versions[0])


def _split(capability: str) -> tuple[str, str]:
    major, _, minor = capability.partition(".")
    return major, minor


@cache
def user_cache(folder: Path | None) -> CubinCache:
    """The cache of a folder; one object for the process, so that it warns only once."""
    return CubinCache(folder)
