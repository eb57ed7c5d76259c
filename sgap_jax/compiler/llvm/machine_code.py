"""Loop IR to machine code of this CPU with LLVM (llvmlite), and its name for XLA.

A program names what it runs by content (`sgap_compiled_v1`, cpu/compiled/compiled_ffi.cc): the hash
of the LLVM IR, of the CPU and of LLVM itself. Machine code is cached on disk beside CUDA kernels.

In memory it belongs to the executables of XLA that run it, and is freed with them. The functions
compiled last stay in memory for executables to come: `SGAP_COMPILED_IN_MEMORY` of them, or 256.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from sgap_jax.compiler.llvm.print_llvm import print_llvm
from sgap_jax.compiler.loop_ir.loopir import Function
from sgap_jax.launch.cache import Cubin, CubinCache, content_key, default_folder
from sgap_jax.runtime import native as native_library  # registers the target

TARGET = "sgap_compiled_v1"

_BYTES = {"int8": 1, "uint8": 1, "int32": 4, "int64": 8}
_BYTES |= {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
# A function that no executable has taken yet may belong to a program on its way to XLA, which may
# have many of them. So many times more of these stay in memory than of the others.
_WAITING = 16


class _Recent(NamedTuple):
    """A function that was compiled or found lately."""

    hold: Any  # an object of the native library: while it lives, programs find the machine code
    taken: int  # by how many executables, at that time

    @property
    def waits(self) -> bool:
        """Whether the program that has it may still be on its way to XLA."""
        return bool(self.hold.taken == self.taken)


_lock = threading.Lock()
_recent: OrderedDict[str, _Recent] = OrderedDict()  # by key, the latest at the end
_keys: OrderedDict[Function, str] = OrderedDict()  # of functions compiled lately
_engines: dict[int, Any] = {}  # machine code by number, while the native library uses it
_engine_numbers = itertools.count()


class LlvmMissing(ImportError):
    """llvmlite is not installed, or does not load."""


def call_attributes(function: Function, *, chunk: int = 0, work: int | None = None) -> dict:
    """Compiles `function`, where this process has not, and returns the attributes of its call.

    The call is `jax.ffi.ffi_call("sgap_compiled_v1", results)(*inputs, **attributes)` with inputs
    and results in the order of the function; any shape of the right size will do. A bool scalar
    after the inputs says whether their index arrays are valid; the call fails where it is false.

    Args:
      chunk: iterations of a CPUThread loop that one task runs; 0 lets the handler choose.
      work: multiply-adds of a call, about: small ones stay on the thread that calls. None takes
        the elements of all arrays.

    Raises:
      LlvmMissing: names the extra that brings llvmlite. What `print_llvm` raises.
    """
    if work is None:
        work = sum(array.size for array in (*function.inputs, *function.outputs))
    return {"key": compile(function), "chunk": np.int64(chunk), "work": np.int64(work)}


def compile(function: Function, cache: CubinCache | None = None) -> str:
    """The key of `function`, which this process can run from now on.

    Args:
      cache: of machine code on disk; None for the user's.

    Raises:
      LlvmMissing, NotImplementedError: as `call_attributes`.
    """
    with _lock:
        key = _keys.get(function, "")
        found = native_library.native.find_compiled(key)
        if found is None:
            key, found = _found_or_made(function, _user_cache() if cache is None else cache)
        _keys[function] = key
        _keys.move_to_end(function)
        _recent[key] = _Recent(found, found.taken)
        _recent.move_to_end(key)
        _free()
        return key


def in_memory() -> int:
    """How many functions have their machine code in memory."""
    with _lock:
        _free()
        return len(_engines)


def assembly(function: Function) -> str:
    """The assembly that this CPU runs, to be read."""
    _, machine, _ = _host()
    return machine.emit_assembly(_optimized(print_llvm(function, _vector_bytes()).text))


@functools.cache
def available() -> bool:
    """Whether llvmlite is installed and loads."""
    try:
        _host()
    except LlvmMissing:
        return False
    return True


def _found_or_made(function: Function, cache: CubinCache) -> tuple[str, Any]:
    """The key of a function and its hold (`_Recent.hold`). Its machine code is in memory, or comes
    from the cache, or from LLVM."""
    arrays = (*function.inputs, *function.outputs)
    _check_conversions({array.dtype for array in arrays})
    module = print_llvm(function, _vector_bytes())
    _, _, target = _host()
    key = content_key("cpu", module.text, target)
    found = native_library.native.find_compiled(key)
    if found is not None:
        return key, found
    code = cache.get(key, lambda: Cubin(function.name, _machine_code(module.text))).code
    engine, number = _load(code), next(_engine_numbers)
    hold = native_library.native.register_compiled(
        key,
        [engine.get_function_address(kernel) for kernel in module.kernels],
        list(module.iterations),
        [array.size * _BYTES[array.dtype] for array in arrays],
        module.scratch_bytes,
        number,
    )
    _engines[number] = engine
    return key, hold


def _free() -> None:
    """Forgets the functions that were used longest ago, beyond the limit, and frees machine code
    that no executable runs any more."""
    limit = _limit()
    if len(_recent) > limit:
        idle = [key for key, recent in _recent.items() if not recent.waits]
        for key in idle[: len(_recent) - limit]:
            del _recent[key]
    while len(_recent) > _WAITING * limit:
        _recent.popitem(last=False)
    while len(_keys) > limit:
        _keys.popitem(last=False)
    for number in native_library.native.take_unused():
        _engines.pop(number).close()


def _limit() -> int:
    """How many functions stay in memory that no executable may run any more."""
    text = os.environ.get("SGAP_COMPILED_IN_MEMORY", "256")
    if not text.isdecimal():
        raise ValueError(f"SGAP_COMPILED_IN_MEMORY: expected a number of kernels, got {text!r}")
    return int(text)


def _check_conversions(dtypes: set[str]) -> None:
    """Without an instruction for it, LLVM calls a function of a library that may not be loaded."""
    llvm, machine, _ = _host()
    x86 = machine.triple.startswith(("x86_64", "i686"))
    if "float16" in dtypes and x86 and not llvm.get_host_cpu_features().get("f16c"):
        raise NotImplementedError(
            "llvm: this CPU does not convert float16 (F16C); bfloat16 and float32 run here"
        )


@functools.cache
def _user_cache() -> CubinCache:
    return CubinCache(default_folder())


def _machine_code(text: str) -> bytes:
    _, machine, _ = _host()
    return machine.emit_object(_optimized(text))


def _optimized(text: str) -> Any:
    llvm, machine, _ = _host()
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    passes = builder.getModulePassManager()
    passes.run(module, builder)
    dispose = getattr(llvm.ffi.lib, "LLVMPY_DisposeNewModulePassManger", None)
    if dispose is not None:  # llvmlite 0.50 does not call it: 70 kB for each kernel
        dispose(passes)
        passes.detach()
    return module


def _load(code: bytes) -> Any:
    llvm, _, _ = _host()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(llvm))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


@functools.cache
def _vector_bytes() -> int:
    llvm, _, _ = _host()
    features = llvm.get_host_cpu_features()
    return 64 if features.get("avx512f") else 32 if features.get("avx2") else 16


def _machine(llvm: Any) -> Any:
    """An LLVM target machine for this CPU."""
    cpu, features = _cpu(llvm)
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3, jit=True
    )


@functools.cache
def _cpu(llvm: Any) -> tuple[str, str]:
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


@functools.cache
def _host() -> tuple[Any, Any, str]:
    """llvmlite, the target machine, and what machine code depends on beside the LLVM IR."""
    try:
        import llvmlite
        import llvmlite.binding as llvm
    except ImportError as error:
        raise LlvmMissing(
            "sgap_jax: expressions are compiled for the CPU with llvmlite, which does not load "
            f"({error}); pip install 'sgap_jax[compiler]' brings it"
        ) from error
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = _machine(llvm)
    target = (
        f"{machine.triple} {' '.join(_cpu(llvm))} "
        f"LLVM {llvm.llvm_version_info} llvmlite {llvmlite.__version__}"
    )
    return llvm, machine, target
