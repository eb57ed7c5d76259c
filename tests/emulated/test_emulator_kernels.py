"""A whole kernel in the emulator: SpMM, one nonzero a lane, segment reduction in a group of 32."""

import numpy as np
import pytest
import scipy.sparse
from emulator import Memory, Program

SPMM = """
extern "C" __global__ void __launch_bounds__(256) spmm(
    const float* __restrict__ values, const int* __restrict__ column_indices,
    const int* __restrict__ row_offsets, const float* __restrict__ B, float* C,
    int m, int n, int nnz) {
  int tiles = (n + 3) / 4, lane = threadIdx.x % 32;
  int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  int entry = warp / tiles * 32 + lane, column = warp % tiles * 4;
  bool valid = entry < nnz;
  int key = min(entry, nnz - 1), low = 0, high = m;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (row_offsets[middle] <= key) low = middle; else high = middle;
  }
  float value = valid ? values[entry] : 0.f, sum[4];
  int row = low, k = valid ? column_indices[entry] : 0;
  for (int j = 0; j < 4; ++j)
    sum[j] = valid && column + j < n ? value * B[(long long)k * n + column + j] : 0.f;
  for (int d = 1; d < 32; d *= 2) {
    int other = __shfl_down_sync(0xffffffffu, row, d);
    for (int j = 0; j < 4; ++j) {
      float further = __shfl_down_sync(0xffffffffu, sum[j], d);
      if (lane + d < 32 && other == row) sum[j] += further;
    }
  }
  int before = __shfl_up_sync(0xffffffffu, row, 1);
  if (valid && (lane == 0 || before != row))
    for (int j = 0; j < 4; ++j)
      if (column + j < n) atomicAdd(&C[(long long)row * n + column + j], sum[j]);
}
"""


def random_sparse(m, k, density, empty_rows=()):
    random = np.random.default_rng(m)
    dense = random.integers(-4, 5, (m, k)) * (random.random((m, k)) < density)
    dense[list(empty_rows)] = 0
    return scipy.sparse.csr_array(dense.astype(np.float32))


@pytest.mark.parametrize("n", [1, 4, 7, 32])
@pytest.mark.parametrize(
    "m, k, density, empty_rows",
    [(1, 40, 1.0, ()), (100, 64, 0.1, (0, 1, 50, 99)), (300, 50, 0.02, range(0, 300, 2))],
)
def test_spmm(launch, m, k, density, empty_rows, n):
    A = random_sparse(m, k, density, empty_rows)
    B = np.random.default_rng(1).integers(-4, 5, (k, n)).astype(np.float32)
    grid = -(-(-(-A.nnz // 32) * -(-n // 4)) // 8)
    arguments = A.data, A.indices.astype(np.int32), A.indptr.astype(np.int32), B
    C = launch(SPMM, grid, 256, *arguments, np.zeros((m, n), np.float32), m, n, A.nnz)[-1]
    np.testing.assert_array_equal(C, A @ B)


def test_what_a_gpu_would_not_launch_is_refused(launch):
    nothing = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="512 threads a block, at most 256"):
        launch(SPMM, 1, 512, *[nothing] * 5, 1, 1, 1)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        launch(SPMM, 1, 256, *[nothing] * 5, 1, 1, 1, shared_bytes=1 << 20)


def test_hints_and_fences_change_nothing(launch):
    source = """extern "C" __global__ void k(const float* x, float* y) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(x + 1000000));
  asm volatile("prefetch.global.L1 [%0];" :: "l"(x));
  __threadfence(); __threadfence_block(); __nanosleep(10);
  float v; asm volatile("ld.global.nc.L1::no_allocate.L2::128B.f32 %0, [%1];" : "=f"(v) : "l"(x));
  __stcs(y + threadIdx.x, v + __ldcg(x + threadIdx.x));
}"""
    x = np.arange(32, dtype=np.float32) + 1
    np.testing.assert_array_equal(launch(source, 1, 32, x, np.zeros_like(x))[1], x + 1)


def test_branches_by_a_table():
    text = """.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 k_param_0) {
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [k_param_0];
  mov.u32 %r1, %tid.x;
  and.b32 %r2, %r1, 1;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  $table: .branchtargets $even, $odd;
  brx.idx %r2, $table;
$even:
  st.global.u32 [%rd3], 10;
  ret;
$odd:
  st.global.u32 [%rd3], 20;
  ret;
}"""
    memory = Memory()
    y = np.zeros(32, np.int32)
    address = memory.put(y)
    Program(text).run("k", 1, 32, [address], memory)
    np.testing.assert_array_equal(memory.get(address, y), np.tile([10, 20], 16))
