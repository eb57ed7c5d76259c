"""Planted bugs of asynchronous copies and ldmatrix: each source runs as it is, and with its bug."""

import numpy as np
import pytest

THREADS = 64

COPY = """
#define COPY(to, from) asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: \\
    "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory")
#define COMMIT() asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
extern "C" __global__ void k(const int4* x, int4* y, int steps) {
  __shared__ int4 tile[2][64];
  int t = threadIdx.x, b = blockIdx.x * 64;
  int4 sum = make_int4(0, 0, 0, 0);
  COPY(&tile[0][t], x + b + t);
  COMMIT();
  for (int i = 0; i < steps; ++i) {
    if (i + 1 < steps) COPY(&tile[(i + 1) % 2][t], x + (i + 1) * 128 + b + t);
    COMMIT();
    WAIT(KEPT);
    AFTER_WAIT;
    int4 v = tile[i % 2][(t + 1) % 64];
    sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
    AFTER_USE;
  }
  y[b + t] = sum;
}"""
PENDING = {
    "a wait that is too weak": (2, "__syncthreads()", "__syncthreads()", "no wait has covered"),
    "no barrier after the wait": (1, "", "__syncthreads()", "race on shared memory|no wait has"),
    "a buffer that is filled while others read it": (1, "__syncthreads()", "", "race on shared"),
}


@pytest.mark.parametrize("bug", PENDING)
def test_asynchronous_copies(launch, caught, bug):
    kept, after_wait, after_use, says = PENDING[bug]
    x = np.random.default_rng(0).integers(0, 99, (4, 128, 4), np.int32)
    y = np.zeros((128, 4), np.int32)
    define = "#define KEPT {}\n#define AFTER_WAIT {}\n#define AFTER_USE {}\n"
    right = define.format(1, "__syncthreads()", "__syncthreads()")
    expected = np.roll(x.sum(axis=0).reshape(2, 64, 4), -1, axis=1).reshape(128, 4)
    np.testing.assert_array_equal(launch(right + COPY, 2, THREADS, x, y, 4)[1], expected)
    wrong = define.format(kept, after_wait, after_use)
    caught(wrong + COPY, says, x, y, 4)


LOAD_MATRIX = """
extern "C" __global__ void k(const unsigned short* x, unsigned* y) {
  __shared__ __align__(16) unsigned short tile[8][8];
  int t = threadIdx.x;
  tile[t / 4][t % 4 * 2] = x[2 * t];
  tile[t / 4][t % 4 * 2 + 1] = x[2 * t + 1];
#ifndef BUG
  __syncwarp();
#endif
  unsigned r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1TRANS.shared.b16 {%0}, [%1];"
      : "=r"(r) : "r"((unsigned)__cvta_generic_to_shared(&tile[t % 8][0])) : "memory");
  y[t] = r;
}"""


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_without_syncwarp(launch, caught, trans):
    source = LOAD_MATRIX.replace("TRANS", trans)
    x, y = np.arange(64, dtype=np.uint16).reshape(8, 8), np.zeros(32, np.uint32)
    expected = x.T if trans else x
    result = launch(source, 1, 32, x, y)[1].view(np.uint16).reshape(8, 8)
    np.testing.assert_array_equal(result, expected)
    # Without .trans each lane gets its own words back, but the addresses are those of whole rows.
    caught(source, "race on shared memory", x, y, grid=1, block=32)


def test_ldmatrix_of_rows_by_the_lanes_that_give_their_addresses(launch, caught):
    source = """extern "C" __global__ void k(const uint4* x, unsigned* y) {
  __shared__ uint4 tile[8];
  int t = threadIdx.x;
  if (t < 8) tile[t] = x[t];
#ifndef BUG
  __syncwarp();
#endif
  unsigned r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
      : "=r"(r) : "r"((unsigned)__cvta_generic_to_shared(&tile[t % 8])) : "memory");
  y[t] = r;
}"""
    x, y = np.arange(64, dtype=np.uint16), np.zeros(32, np.uint32)
    np.testing.assert_array_equal(launch(source, 1, 32, x, y)[1].view(np.uint16), x)
    caught(source, "race on shared memory", x, y, grid=1, block=32)


def test_a_thread_reads_what_it_copies_before_the_wait(launch, caught):
    """Odd threads also commit an empty group after the copy, so wait_group 1 suffices for them
    only."""
    source = """
extern "C" __global__ void k(const int4* x, int4* y) {
  __shared__ int4 tile[64];
  int t = threadIdx.x;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::
    "r"((unsigned)__cvta_generic_to_shared(tile + t)), "l"(x + t) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  if (t % 2) asm volatile("cp.async.commit_group;" ::: "memory");
#ifdef BUG
  asm volatile("cp.async.wait_group 1;" ::: "memory");
#else
  if (t % 2) asm volatile("cp.async.wait_group 1;" ::: "memory");
  else asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
  y[t] = tile[t];
}"""
    x = np.random.default_rng(0).integers(0, 99, (64, 4), np.int32)
    np.testing.assert_array_equal(launch(source, 1, 64, x, np.zeros_like(x))[1], x)
    says = r"thread \(0, 0, 0\) .* that no wait has covered"
    caught(source, says, x, np.zeros_like(x), grid=1)


def test_what_is_copied_may_not_be_stored_to_by_others(launch, caught):
    source = """
extern "C" __global__ void k(longlong2* x) {
  __shared__ int tile[64];
  int t = threadIdx.x;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4; cp.async.wait_all;" ::
    "r"((unsigned)__cvta_generic_to_shared(tile + t)), "l"(x + t) : "memory");
#ifdef BUG
  x[(t + 1) % 64] = make_longlong2(tile[t], 0);
#else
  x[t] = make_longlong2(tile[t], 0);
#endif
}"""
    x = np.random.default_rng(0).integers(0, 99, (64, 4), np.int32)
    np.testing.assert_array_equal(launch(source, 1, 64, x)[0], x * [1, 0, 0, 0])
    caught(source, "race on global memory .* loaded it at `cp.async", x, grid=1)
