"""Planted memory bugs: the right kernel gives the right result, the wrong one is caught.

Each source is compiled twice: as it is, and with BUG defined.
"""

import numpy as np
import pytest
from emulator import Fault

THREADS = 64

ROTATE = """
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ int tile[2][64];
  int t = threadIdx.x, b = blockIdx.x * 64;
"""

# name -> (source, text of the fault): out is x rotated by one lane in each block of 64 threads.
SHARED = {
    "load before the barrier after the store": (
        """
  tile[0][t] = x[b + t];
#ifndef BUG
  __syncthreads();
#endif
  y[b + t] = tile[0][(t + 1) % 64];
}""",
        "race on shared memory .* stored to it|never written",
    ),
    "store before the barrier after the load": (
        """
  int sum = 0;
  for (int i = 0; i < 3; ++i) {
    tile[0][t] = x[b + t] * (i + 1);
    __syncthreads();
    sum += tile[0][(t + 1) % 64];
#ifndef BUG
    __syncthreads();
#endif
  }
  y[b + t] = sum / 6;
}""",
        "race on shared memory .* loaded it",
    ),
    "two stores": (
        """
#ifdef BUG
  tile[0][t / 2] = 5;
#else
  tile[0][t] = 5;
#endif
  __syncthreads();
  tile[0][t] = x[b + t];
  __syncthreads();
  y[b + t] = tile[0][(t + 1) % 64];
}""",
        "race on shared memory .* stored to it",
    ),
    "a barrier of the warp where one of the block is needed": (
        """
  tile[0][t] = x[b + t];
  tile[1][t] = 0;
#ifdef BUG
  __syncwarp();
#else
  __syncthreads();
#endif
  y[b + t] = tile[0][(t + 1) % 64];
}""",
        "race on shared memory|never written",
    ),
    "a store that one warp orders and another does not": (
        """
  tile[0][t] = x[b + t];
  tile[1][t] = 1;
  __syncthreads();
  int one = tile[1][0], next = tile[0][(t + 1) % 64];
#ifdef BUG
  __syncwarp();
#else
  __syncthreads();
#endif
  if (t == 32) tile[1][0] = 2;
  y[b + t] = next * one;
}""",
        "race on shared memory .* loaded it",
    ),
    "a store by one of the lanes of a warp that loaded the word": (
        """
  tile[0][t] = x[b + t];
  tile[1][t] = 1;
  __syncthreads();
  int one = tile[1][t / 32 * 32], next = tile[0][(t + 1) % 64];
#ifndef BUG
  __syncwarp();
#endif
  if (t % 32 == 31) tile[1][t / 32 * 32] = 2;
  y[b + t] = next * one;
}""",
        "thread \\(31, 0, 0\\) .* race on shared memory .* loaded it",
    ),
    "a word that nobody wrote": (
        """
#ifdef BUG
  if (t != 3)
#endif
  tile[0][t] = x[b + t];
  __syncthreads();
  y[b + t] = tile[0][(t + 1) % 64];
}""",
        "thread \\(2, 0, 0\\) .* never written",
    ),
    "an index past the array": (
        """
  tile[0][t] = x[b + t];
  tile[1][t] = 0;
  __syncthreads();
#ifdef BUG
  y[b + t] = (&tile[1][0])[t + 1];
#else
  y[b + t] = tile[0][(t + 1) % 64];
#endif
}""",
        "thread \\(63, 0, 0\\) .* out of bounds: 4 bytes at shared",
    ),
    "a barrier that only some threads reach": (
        """
  tile[0][t] = x[b + t];
#ifdef BUG
  if (t < 32) __syncthreads();
  else __syncwarp();
  __syncthreads();
#else
  __syncthreads();
#endif
  y[b + t] = tile[0][(t + 1) % 64];
}""",
        "deadlock: it waits for thread .*, which waits at `bar.sync",
    ),
    "an exit before the barrier": (
        """
  tile[0][t] = x[b + t];
#ifdef BUG
  if (b + t == 127) return;
#endif
  __syncthreads();
  y[b + t] = tile[0][(t + 1) % 64];
}""",
        "deadlock: it waits for thread \\(63, 0, 0\\) of block \\(1, 0, 0\\), which has exited",
    ),
}


@pytest.mark.parametrize("bug", SHARED)
def test_shared_memory(launch, caught, bug):
    body, says = SHARED[bug]
    x = np.arange(128, dtype=np.int32)
    out = np.zeros_like(x)
    expected = np.roll(x.reshape(2, 64), -1, axis=1).reshape(-1)
    np.testing.assert_array_equal(launch(ROTATE + body, 2, THREADS, x, out)[1], expected)
    caught(ROTATE + body, says, x, out)


GLOBAL = {
    "an index past the buffer": (
        """extern "C" __global__ void k(const int* x, int* y) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef BUG
  y[t] = x[t + 1];
#else
  y[t] = x[t];
#endif
}""",
        "thread \\(63, 0, 0\\) of block \\(1, 0, 0\\) .* out of bounds: 4 bytes at global",
    ),
    "a store past the buffer": (
        """extern "C" __global__ void k(const int* x, int* y) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  y[t] = x[t];
#ifdef BUG
  if (t == 127) y[t + 1] = 0;
#endif
}""",
        "thread \\(63, 0, 0\\) .* out of bounds: 4 bytes at global",
    ),
    "a vector load that is not aligned": (
        """extern "C" __global__ void k(const int* x, int* y) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef BUG
  int2 p = *reinterpret_cast<const int2*>(x + (t & ~1) + 1);
#else
  int2 p = *reinterpret_cast<const int2*>(x + (t & ~1));
#endif
  y[t] = t & 1 ? p.y : p.x;
}""",
        "thread \\(0, 0, 0\\) of block \\(0, 0, 0\\) .* misaligned access of 8 bytes",
    ),
    "+= where an atomic is needed": (
        """extern "C" __global__ void k(const int* x, int* y) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef BUG
  y[t & ~1] += x[t] - (t & ~1);
#else
  atomicAdd(&y[t], x[t]);
#endif
}""",
        "race on global memory",
    ),
    "+= of threads in different blocks": (
        """extern "C" __global__ void k(const int* x, int* y) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef BUG
  y[threadIdx.x] += x[t];
#else
  atomicAdd(&y[t], x[t]);
#endif
}""",
        "of block \\(0, 0, 0\\) .* race on global memory .* of block \\(1, 0, 0\\)",
    ),
    "a plain store among atomics": (
        """extern "C" __global__ void k(const int* x, int* y) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef BUG
  if (t == 64) y[0] = 0;
  if (t > 70) atomicAdd(&y[0], x[t]);
#else
  atomicAdd(&y[t], x[t]);
#endif
}""",
        "race on global memory",
    ),
    "a plain store after atomics": (
        """extern "C" __global__ void k(const int* x, int* y) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef BUG
  if (t > 70) atomicAdd(&y[0], x[t]);
  if (t == 64) y[0] = 0;
#else
  atomicAdd(&y[t], x[t]);
#endif
}""",
        "race on global memory .* updated it atomically",
    ),
    "a store to what is read as constant": (
        """extern "C" __global__ void k(const int* x, int* y) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  int v;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(v) : "l"(x + t));
  y[t] = v;
#ifdef BUG
  const_cast<int*>(x)[127 - t] = v;
#endif
}""",
        "race on global memory .* read-only",
    ),
}


@pytest.mark.parametrize("bug", GLOBAL)
def test_global_memory(launch, caught, bug):
    source, says = GLOBAL[bug]
    x = np.arange(128, dtype=np.int32)
    np.testing.assert_array_equal(launch(source, 2, THREADS, x, np.zeros_like(x))[1], x)
    caught(source, says, x, np.zeros_like(x))


def test_a_vector_of_which_the_second_half_is_out(launch):
    source = """extern "C" __global__ void k(const int4* x, int4* y) {
  y[threadIdx.x] = x[threadIdx.x];
}"""
    y = np.zeros(8, np.int32)
    launch(source, 1, 2, np.zeros(8, np.int32), y)
    with pytest.raises(Fault, match=r"thread \(1, 0, 0\) .* out of bounds: 16 bytes at global"):
        launch(source, 1, 2, np.zeros(6, np.int32), y)


@pytest.mark.parametrize("offset", [-512, -1, 64, 200, 256, 512, 1024, 4096, 1 << 20])
def test_shared_memory_of_another_block(launch, offset):
    source = """extern "C" __global__ void k(int* y, int offset) {
  __shared__ int tile[64];
  tile[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x == 0 && blockIdx.x == 1) y[0] = tile[offset];
}"""
    with pytest.raises(Fault, match="out of bounds: 4 bytes at shared"):
        launch(source, 4, 64, np.zeros(4, np.int32), offset)
