"""Kernels of vectorSparse and Sputnik as their authors published them, run by the emulator.

SGAP_VECTORSPARSE and SGAP_SPUTNIK are the folders of clones of github.com/apuaaChen/vectorSparse
and github.com/google-research/sputnik. Their sources are compiled when a test runs, and no part of
them is kept. Host functions, which launch the kernels, are cut off.
"""

import math
import os
import pathlib
import re
import types
from dataclasses import dataclass

import numpy as np
import pytest
from cuda_sources import disassembled, parse_sass, reports, require_nvrtc, toolkit_headers
from emulator import Latencies, Memory, Program, Timeline, Traffic

from benchmarks.gpu import model
from sgap_jax.launch import nvrtc

# What NVRTC does not have of the C and C++ libraries, as far as the kernels need it.
STUBS = {
    "cstdint": "typedef unsigned uint32_t; typedef long long int64_t; typedef int int32_t;",
    "cmath": "",
    "stdio.h": "",
    "cuda_runtime.h": "",
    "cstring": "namespace std { using ::memcpy; }",
    **dict.fromkeys(("functional", "string", "unordered_map"), ""),
}
M, K = 2048, 1024  # the size that the paper profiles
ARCH = "compute_75"  # the oldest that NVRTC 13 knows; the paper's GPU, a V100, is sm_70


@dataclass(frozen=True)
class Kernel:
    """A kernel of vectorSparse: its file, the host function before which the device code ends, its
    name and template arguments, and the columns of a block's tile."""

    file: str
    ends: str
    name: str
    arguments: str
    tile: int


@dataclass(frozen=True)
class Published:
    """A translation unit of one kernel: its text, the options of NVRTC, and what it is for the
    emulator."""

    text: str
    options: tuple
    program: Program

    def machine_code(self, arch):
        """(registers of a thread, bytes of spills, `MachineCode`)."""
        options = (*self.options, "--ptxas-options=-v")
        _, log = nvrtc._compile(self.text, arch, options, "CUBIN")
        ((registers, _, spills),) = reports(log).values()
        return registers, spills, parse_sass(disassembled(self.text, arch, self.options))


def require_clone(variable, file):
    """The folder that an environment variable names, in which there is this file."""
    require_nvrtc()
    folder = pathlib.Path(os.environ.get(variable, "missing"))
    if not (folder / file).exists():
        pytest.skip(f"{variable} is no folder with {file} (tests/helpers/published_kernels.py)")
    if not toolkit_headers():
        pytest.skip("cuda_fp16.h is not installed")
    return folder


def compiled(source, instance, folders, stubs):
    """The kernel that `instance` instantiates, inside the source's last namespace; `stubs` is a
    folder to write in."""
    for name, text in STUBS.items():
        (stubs / name).write_text(text)
    options = [f"--include-path={path}" for path in (stubs, *folders, *toolkit_headers())]
    closed = "}" * (source.count("namespace {") + 1)
    options.append("--generate-line-info")
    text = f"#include <cuda_fp16.h>\n{source}\n{instance}\n{closed}"
    return Published(text, tuple(options), Program(nvrtc.ptx(text, ARCH, options)))


def of_vectorsparse(kernel, stubs):
    """One of vectorSparse's kernels."""
    folder = require_clone("SGAP_VECTORSPARSE", "src/wmma_spmm.cu") / "src"
    source = (folder / kernel.file).read_text()
    source = source[: source.index(kernel.ends)]
    source = source[: source.rindex("template <")]
    # The headers with declarations of host functions, and functions that print.
    source = re.sub(r'#include "\.\./include/\w+\.cuh"|#include <mma\.h>', "", source)
    source = re.sub(r"__device__ void print_val_\w\(.*?\n}\n", "", source, flags=re.DOTALL)
    source = source.replace("using namespace nvcuda;", "")
    types = "int,int,int,const int*,const int*,const int*,const half*,const half*,half*"
    instance = f"template __global__ void {kernel.name}<{kernel.arguments}>({types});"
    return compiled(source, instance, [folder], stubs)


def of_sputnik(config, kernel, value, index, stubs):
    """Sputnik's SpMM with a configuration; `value` and `index` are the types of its elements."""
    folder = require_clone("SGAP_SPUTNIK", "sputnik/spmm/cuda_spmm.cu.cc")
    source = (folder / "sputnik/spmm/cuda_spmm.cu.cc").read_text()
    source = source[: source.index("typedef std::function")]
    source = source.replace('#include "sputnik/spmm/cuda_spmm.h"', "")
    types = f"int,int,int,const int*,const {value}*,const int*,const {index}*,const {value}*"
    instance = f"typedef SpmmConfig<{config}> Config;\n"
    instance += f"template __global__ void {kernel}<Config>({types},const float*,{value}*);"
    return compiled(source, instance, [folder], stubs)


def pattern(length, density=0.1, seed=0):
    """(offsets, indices, order of the block rows) of vectors of `length` at random places, this
    share of all; the longest rows come first, as in the paper."""
    rng = np.random.default_rng(seed)
    rows = M // length
    stored = rng.permutation(rows * K)[: round(rows * K * density)]
    mask = np.zeros(rows * K, bool)
    mask[stored] = True
    mask = mask.reshape(rows, K)
    offsets = np.r_[0, np.cumsum(mask.sum(axis=1))].astype(np.int32)
    order = np.argsort(-np.diff(offsets), kind="stable").astype(np.int32)
    return offsets, np.nonzero(mask)[1].astype(np.int32), order


def blocks(length, density, seed=0):
    """The same of square blocks at random places, equally many in each block row, as the paper
    makes blocked-ELL (section 7.1.1)."""
    rng, rows, columns = np.random.default_rng(seed), M // length, K // length
    each = math.ceil(columns * density)
    chosen = np.sort(np.argsort(rng.random((rows, columns)), axis=1)[:, :each])
    indices = chosen[:, :, None] * length + np.arange(length)
    offsets = np.arange(rows + 1) * each * length
    order = np.arange(rows)
    return tuple(x.reshape(-1).astype(np.int32) for x in (offsets, indices, order))


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float16)


@dataclass(frozen=True)
class Launch:
    """Sizes that a kernel is told, grid, operands, an array for the result, block, and an argument
    between operands and result."""

    sizes: tuple
    grid: tuple
    arrays: tuple
    result: np.ndarray
    block: tuple = (32, 1, 1)
    bias: tuple = ()


def run(published, launch, chosen=None, latencies=None):
    """(result, Traffic, Timeline, [(address, bytes) of operands and result]) of a launch, or of
    some of its blocks."""
    memory, traffic, timeline = Memory(), Traffic(), Timeline(latencies or Latencies())
    arrays = *launch.arrays, launch.result
    pointers = [memory.put(array) for array in arrays]
    (entry,) = published.program.entries
    arguments = [*launch.sizes, *pointers[:-1], *launch.bias, pointers[-1]]
    published.program.run(
        entry,
        launch.grid,
        launch.block,
        arguments,
        memory,
        blocks=chosen,
        traffic=traffic,
        timeline=timeline,
    )
    buffers = [(p, array.nbytes) for p, array in zip(pointers, arrays, strict=True)]
    return memory.get(pointers[-1], launch.result), traffic, timeline, buffers


def predicted(published, launch, gpu=model.V100):
    """(the `Prediction` of benchmarks/gpu/model.py, `MachineCode`) of a launch."""
    total = math.prod(launch.grid)
    chosen = model.sample(gpu, total)
    latencies = Latencies(memory=gpu.memory_latency)
    _, traffic, timeline, buffers = run(published, launch, chosen, latencies)
    shared = published.program.shared_bytes(published.program.entries[0])
    ran = model.Emulated(total, chosen, traffic, timeline, buffers, 1, shared)
    moved = model.moved_bytes(types.SimpleNamespace(zero=(), in_place=()), buffers, 1, traffic)
    registers, spills, code = published.machine_code(gpu.arch)
    threads = math.prod(launch.block)
    return model.time_of(gpu, ran, threads, moved, registers, spills, code), code


def spmm_launch(kernel, length, found, n=256):
    """C = A B for A of M x K, with the structure of `pattern` or `blocks`."""
    offsets, indices, order = found
    arrays = order, offsets, indices, integers(len(indices), length), integers(K, n, seed=1)
    grid = M // length, n // kernel.tile, 1
    return Launch((M // length, n, K), grid, arrays, np.zeros((M, n), np.float16))


def spmm(published, kernel, length, n=256):
    """C = A B for A of M x K, checked; (Traffic, Timeline)."""
    launch = spmm_launch(kernel, length, pattern(length), n)
    C, traffic, timeline, _ = run(published, launch)
    _, offsets, indices, values, B = launch.arrays
    np.testing.assert_array_equal(C, expanded(offsets, indices, values) @ B.astype(np.float32))
    return traffic, timeline


def sddmm(published, kernel, length, k=256):
    """Values of X Y^T at vectors of an M x K matrix, checked; (Traffic, Timeline)."""
    offsets, indices, order = pattern(length)
    X, Y = integers(M, k), integers(K, k, seed=1)
    grid = M // length, -(-K // kernel.tile), 1
    result = np.zeros((len(indices), length), np.float16)
    arrays = order, offsets, indices, X, Y
    values, *counted, _ = run(published, Launch((M // length, k, K), grid, arrays, result))
    dense = X.astype(np.float32) @ Y.astype(np.float32).T
    rows = np.repeat(np.arange(M // length), np.diff(offsets))
    expected = dense.reshape(M // length, length, K)[rows, :, indices]
    np.testing.assert_array_equal(values, expected)
    return counted


def sputnik_launch(dtype, index, density=0.1, n=256):
    """C = A B by Sputnik, in tiles of 4 rows and 64 columns. Rows have an even number of entries,
    which its half precision needs."""
    offsets, indices, _ = pattern(1, density)
    rows = np.split(indices, offsets[1:-1])
    rows = [row[: len(row) // 2 * 2] for row in rows]
    offsets = np.r_[0, np.cumsum([len(row) for row in rows])].astype(np.int32)
    indices = np.concatenate(rows)
    order = np.argsort(-np.diff(offsets), kind="stable").astype(np.int32)
    values, B = integers(len(indices)).astype(dtype), integers(K, n, seed=1).astype(dtype)
    arrays, result = (order, values, offsets, indices.astype(index), B), np.zeros((M, n), dtype)
    return Launch((M, K, n), (M // 4, n // 64, 1), arrays, result, (8, 4, 1), (0,))


def sputnik_spmm(published, dtype, index):
    """The product checked; its Traffic."""
    launch = sputnik_launch(dtype, index)
    C, traffic, *_ = run(published, launch)
    _, values, offsets, indices, B = launch.arrays
    dense = expanded(offsets, indices, values[:, None])
    np.testing.assert_array_equal(C, dense @ B.astype(np.float32))
    return traffic


def expanded(offsets, indices, values):
    """A dense matrix of vectors."""
    rows, length = len(offsets) - 1, values.shape[1]
    dense = np.zeros((rows, length, K), np.float32)
    dense[np.repeat(np.arange(rows), np.diff(offsets)), :, indices] = values
    return dense.reshape(rows * length, K)
