"""Launches our kernels through NVIDIA's driver on any stream, as the FFI handler does.

The handler itself (cuda/launch/launch_core.cc) runs on XLA's streams, on which we cannot record
events. Here the same machine code is launched with the same arguments on a stream of our own,
around which events and graphs can be put.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from sgap_jax.launch.cache import Cubin
from sgap_jax.launch.kernel_call import KernelCall

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class Driver:
    """libcuda, in a thread whose context is current (torch.cuda.init makes it so)."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def kernel(self, call: KernelCall, cubin: Cubin) -> Callable[..., None]:
        """launch(stream, inputs, outputs) for a call; inputs are addresses, outputs (address, size)
        pairs."""
        library, kernel, function = (ctypes.c_void_p() for _ in range(3))
        none = ctypes.c_void_p()
        self._call(
            "cuLibraryLoadData", ctypes.byref(library), cubin.code, none, none, 0, none, none, 0
        )
        self._call("cuLibraryGetKernel", ctypes.byref(kernel), library, cubin.kernel.encode())
        self._call("cuKernelGetFunction", ctypes.byref(function), kernel)
        if call.shared_bytes:
            attribute = _MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, attribute, call.shared_bytes)
        grid, block = (sizes + (1,) * (3 - len(sizes)) for sizes in (call.grid, call.block))

        def launch(stream: int, inputs: Sequence[int], outputs: Sequence[tuple[int, int]]) -> None:
            queue = ctypes.c_void_p(stream)
            for i in call.zero:
                address, size = outputs[i]
                self._call(
                    "cuMemsetD8Async", ctypes.c_uint64(address), 0, ctypes.c_size_t(size), queue
                )
            values = [ctypes.c_void_p(pointer) for pointer in inputs]
            values += [ctypes.c_void_p(address) for address, _ in outputs]
            values += [ctypes.c_int64(scalar) for scalar in call.scalars]
            arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            sizes = (*grid, *block, call.shared_bytes)
            self._call("cuLaunchKernel", function, *sizes, queue, arguments, none)

        return launch
