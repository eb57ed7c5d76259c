"""NVIDIA's driver through ctypes: what a GPU is, and launches of our kernels outside of XLA.

The FFI handler (cuda/launch/launch_core.cc) launches on XLA's streams. Here the same machine code
is launched with the same arguments where there is no XLA: by the doctor, and by benchmarks, which
put events and graphs around launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sgap_jax.launch.cache import Cubin
from sgap_jax.launch.kernel_call import KernelCall

OLDEST = (12, 0)  # the CUDA version of the oldest driver that has what a launch needs
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
_ATTRIBUTES = {"registers": 4, "local_bytes": 3, "shared_bytes": 1, "binary_version": 6}
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: of the compute capability


class DriverError(RuntimeError):
    """A call of the driver that failed; `call` is its name and `status` CUDA's number."""

    def __init__(self, call: str, status: int, meaning: str = "") -> None:
        super().__init__(f"{call}: CUDA error {status}{f' ({meaning})' if meaning else ''}")
        self.call, self.status = call, status


class NoDriver(RuntimeError):
    """The driver's library does not load, or lacks a function."""


@dataclass(frozen=True)
class Device:
    """A GPU: its number in this process, name, compute capability ("9.0") and bytes of memory."""

    index: int
    name: str
    capability: str
    memory: int


class Driver:
    """libcuda. Launches and memory are those of the thread's current context: see `enter`."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NoDriver(f"{library} does not load ({error})") from error

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the driver by its name in the library."""
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise NoDriver(f"the driver has no {name}") from error
        status = function(*arguments)
        if status != 0:
            raise DriverError(name, status, self._meaning(status))

    def _meaning(self, status: int) -> str:
        found = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            function = getattr(self._library, name, None)
            if function is not None and function(status, ctypes.byref(text)) == 0 and text.value:
                found.append(text.value.decode(errors="replace"))
        return ": ".join(found)

    def _integer(self, name: str, *arguments: object) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports, such as (13, 0)."""
        found = self._integer("cuDriverGetVersion")
        return found // 1000, found % 1000 // 10

    def start(self) -> None:
        self.call("cuInit", 0)

    def devices(self) -> list[Device]:
        """The GPUs that the driver shows to this process; CUDA_VISIBLE_DEVICES limits them."""
        return [self._device(i) for i in range(self._integer("cuDeviceGetCount"))]

    def _device(self, index: int) -> Device:
        handle = self._integer("cuDeviceGet", index)
        name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
        self.call("cuDeviceGetName", name, 256, handle)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        major, minor = (self._integer("cuDeviceGetAttribute", a, handle) for a in (_MAJOR, _MINOR))
        text = name.value.decode(errors="replace")
        return Device(index, text, f"{major}.{minor}", memory.value)

    def enter(self, index: int) -> None:
        """Makes the primary context of a GPU current: the one that XLA and torch use."""
        context = ctypes.c_void_p()
        handle = self._integer("cuDeviceGet", index)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self.call("cuCtxSetCurrent", context)

    def free_bytes(self) -> int:
        """The free memory of the current context's GPU."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, nbytes: int) -> int:
        """The address of new memory, of 16 bytes at least."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 16)))
        return address.value

    def release(self, address: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, address: int, data: Any) -> None:
        """Copies a contiguous NumPy array to the GPU."""
        if data.nbytes:
            host = ctypes.c_void_p(data.ctypes.data)
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), host, _size(data.nbytes))

    def read(self, address: int, data: Any) -> None:
        """Copies to a contiguous NumPy array, after all that was launched before."""
        if data.nbytes:
            host = ctypes.c_void_p(data.ctypes.data)
            self.call("cuMemcpyDtoH_v2", host, ctypes.c_uint64(address), _size(data.nbytes))

    def wait(self) -> None:
        """Waits for all that was launched in the current context; raises what failed there."""
        self.call("cuCtxSynchronize")

    def load(self, cubin: Cubin) -> ctypes.c_void_p:
        """The function of a kernel, loaded into the current context."""
        library, kernel, function = (ctypes.c_void_p() for _ in range(3))
        none = ctypes.c_void_p()
        self.call(
            "cuLibraryLoadData", ctypes.byref(library), cubin.code, none, none, 0, none, none, 0
        )
        self.call("cuLibraryGetKernel", ctypes.byref(kernel), library, cubin.kernel.encode())
        self.call("cuKernelGetFunction", ctypes.byref(function), kernel)
        return function

    def attributes(self, function: ctypes.c_void_p) -> dict[str, int]:
        """Registers and local bytes of a thread, static shared bytes of a block, and the
        architecture of the code (90)."""
        return {
            name: self._integer("cuFuncGetAttribute", attribute, function)
            for name, attribute in _ATTRIBUTES.items()
        }

    def kernel(self, call: KernelCall, cubin: Cubin) -> Callable[..., None]:
        """launch(stream, inputs, outputs) for a call; inputs are addresses, outputs (address, size)
        pairs."""
        return self.launcher(call, self.load(cubin))

    def launcher(self, call: KernelCall, function: ctypes.c_void_p) -> Callable[..., None]:
        """As `kernel`, for a function of `load`."""
        if call.shared_bytes:
            attribute = _MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", function, attribute, call.shared_bytes)
        grid, block = (sizes + (1,) * (3 - len(sizes)) for sizes in (call.grid, call.block))

        def launch(stream: int, inputs: Sequence[int], outputs: Sequence[tuple[int, int]]) -> None:
            queue = ctypes.c_void_p(stream)
            for i in call.zero:
                address, size = outputs[i]
                self.call("cuMemsetD8Async", ctypes.c_uint64(address), 0, _size(size), queue)
            values: list = [ctypes.c_void_p(pointer) for pointer in inputs]
            values += [ctypes.c_void_p(address) for address, _ in outputs]
            values += [ctypes.c_int64(scalar) for scalar in call.scalars]
            arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            sizes = (*grid, *block, call.shared_bytes)
            self.call("cuLaunchKernel", function, *sizes, queue, arguments, ctypes.c_void_p())

        return launch


def _size(nbytes: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(nbytes)
