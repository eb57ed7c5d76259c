"""CPU kernels without XLA: any instruction set that the processor has, and nothing to compile."""

import ctypes
import mmap

import numpy as np

from sgap_jax.runtime.native import native

# XLA_FFI_DataType of the FFI's C API.
TYPES = {"bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7}
TYPES |= {"uint32": 8, "uint64": 9, "float16": 10, "float32": 11, "float64": 12, "complex64": 15}
TYPES |= {"bfloat16": 16, "complex128": 18}

# These have the kernels of avx512, but for those of matrix tiles (cpu/simd/tiles.h), of selections
# (SGAP_INTEGER_KERNEL in cpu/kernels.def) and those that round to bfloat16; both share the latter.
# avx512_bf16 has, in bfloat16, those of pairs too (cpu/simd/pairs.h).
TILE_ISAS = ("avx512_bf16", "amx")


def described(array, shape=None):
    """An array as a handler sees it; of its first elements where they have a shape of their own."""
    return array.ctypes.data, TYPES[str(array.dtype)], list(shape or array.shape)


def run(target, operands, results, attributes, isa, threads=1):
    """The results of an FFI target, as arrays of these (shape, dtype), filled with ones before.

    ValueError where the handler refuses. More threads than one share the work of large calls only;
    -1 is one that takes the tasks of each phase backwards.
    """
    operands = [np.ascontiguousarray(x) for x in operands]
    results = [np.ones(shape, dtype) for shape, dtype in results]
    native._test_call(
        native.targets()[target],
        [described(x) for x in operands],
        [described(x) for x in results],
        attributes,
        isa,
        threads,
    )
    return results


def at_the_end_of_memory(array):
    """A copy behind which nothing may be read or written: the process would die."""
    page = mmap.PAGESIZE
    size = -(-max(array.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + size), page, 0) == 0
    copy = np.frombuffer(memory, np.uint8, array.nbytes, size - array.nbytes).view(array.dtype)
    copy = copy.reshape(array.shape)
    copy[...] = array
    return copy


def kernel_isas():
    """The instruction sets that differ in other kernels than those of TILE_ISAS."""
    return [isa for isa in native.supported_isas() if isa not in TILE_ISAS]


def typed_isas(dtypes):
    """(dtype, instruction set) of kernels that differ, those of pairs of bfloat16 among them."""
    found = [(dtype, isa) for isa in kernel_isas() for dtype in dtypes]
    pairs = [isa for isa in native.supported_isas() if isa == "avx512_bf16"]
    return found + [("bfloat16", isa) for isa in pairs]


def direct_product(A, a, B, b, columns, isa="", threads=2, sums=""):
    """Offsets, indices and values of A B from `native.product`; a [1, entries], b likewise."""
    operands = []
    for index, values in ((A, a), (B, b)):
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        operands += [index.row_offsets, index.column_indices, flat]
    name = np.asarray(a).dtype.name
    offsets, indices, found = native.product(*operands, columns, name, threads, isa, sums)
    return offsets, indices, found.view(np.asarray(a).dtype)
