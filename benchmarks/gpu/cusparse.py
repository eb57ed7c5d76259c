"""cuSPARSE's SpMM called directly: every algorithm for CSR, with its own preprocessing, and
blocked-ELL.

Libraries built on cuSPARSE choose one algorithm for their users; this module finds the best.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import pathlib
from ctypes.util import find_library

from benchmarks.problems import Unavailable

ALGORITHMS = {"default": 0, "csr_alg1": 4, "csr_alg2": 6, "csr_alg3": 12}  # cusparseSpMMAlg_t
BLOCKED_ELL = 13
_INT32, _FLOAT32, _ROW_MAJOR = 2, 0, 2  # CUSPARSE_INDEX_32I, CUDA_R_32F, CUSPARSE_ORDER_ROW
_TYPES = {4: _FLOAT32, 2: 2}  # cudaDataType by itemsize: CUDA_R_32F, CUDA_R_16F


@functools.cache
def library() -> ctypes.CDLL:
    """cuSPARSE from NVIDIA's wheels (which torch and JAX use), else from a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    found = []
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for folder in ("cu13/lib", "cusparse/lib"):
            found += sorted(map(str, pathlib.Path(root, folder).glob("libcusparse.so*")))
    if (system := find_library("cusparse")) is not None:
        found.append(system)
    for path in found:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise Unavailable("no cuSPARSE library")


def call(name: str, *arguments: object) -> None:
    if (status := getattr(library(), name)(*arguments)) != 0:
        raise RuntimeError(f"{name}: cuSPARSE status {status}")


@functools.cache
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    call("cusparseCreate", ctypes.byref(handle))
    return handle


def _pointer(tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class Product:
    """C = A B for one set of torch tensors: values, offsets, indices, B [k, n], C [m, n], all of
    float32, or of float16 with float32 sums. Blocked-ELL: values [m, columns stored], indices [m /
    block, blocks stored]."""

    def __init__(self, torch, algorithm: str, operands, B, C) -> None:
        (k, n), m, int64 = B.shape, C.shape[0], ctypes.c_int64
        values, kind = operands[0], _TYPES[B.element_size()]
        self._torch, self._algorithm = torch, ALGORITHMS.get(algorithm, BLOCKED_ELL)
        self._kept = (*operands, B, C)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._A, self._B, self._C = (ctypes.c_void_p() for _ in range(3))
        if algorithm in ALGORITHMS:
            _, offsets, indices = operands
            call(
                "cusparseCreateCsr", ctypes.byref(self._A), int64(m), int64(k), int64(len(values)),
                _pointer(offsets), _pointer(indices), _pointer(values), _INT32, _INT32, 0, kind,
            )  # fmt: skip
        else:
            _, indices = operands
            call(
                "cusparseCreateBlockedEll", ctypes.byref(self._A), int64(m), int64(k),
                int64(m // indices.shape[0]), int64(values.shape[1]), _pointer(indices),
                _pointer(values), _INT32, 0, kind,
            )  # fmt: skip
        for matrix, dense, rows in ((self._B, B, k), (self._C, C, m)):
            call(
                "cusparseCreateDnMat", ctypes.byref(matrix), int64(rows), int64(n), int64(n),
                _pointer(dense), kind, _ROW_MAJOR,
            )  # fmt: skip
        size = ctypes.c_size_t()
        self._use("cusparseSpMM_bufferSize", ctypes.byref(size))
        self._buffer = torch.empty(max(size.value, 1), dtype=torch.uint8, device="cuda")
        if algorithm in ALGORITHMS:
            self._use("cusparseSpMM_preprocess", _pointer(self._buffer))

    def _use(self, name: str, last: object) -> None:
        stream = ctypes.c_void_p(self._torch.cuda.current_stream().cuda_stream)
        call("cusparseSetStream", _handle(), stream)
        call(
            name, _handle(), 0, 0, ctypes.byref(self._one), self._A, self._B,
            ctypes.byref(self._zero), self._C, _FLOAT32, self._algorithm, last,
        )  # fmt: skip

    def enqueue(self) -> None:
        self._use("cusparseSpMM", _pointer(self._buffer))
