// SDDMM with column vectors on tensor cores by the classic mapping: X Y^T in tiles of V rows x 32
// vectors (times factors.cuh), as in vectorSparse, section 6.2 (TCU-based 1-D warp tiling; Figures
// 12 (b) and 13).
//
// One warp is a block and computes one tile: in each step 64 features of its V rows of X, the left
// operand of wmma m8n32k16, and of the rows of Y that 32 vectors name, the right one. Both go
// through shared memory: if fragments were loaded directly, each lane would read 16 bytes of a line
// of its own.
//
// kVectorLength  V; kVector: d is a multiple of 8
//
// Grid: x block rows, y windows of 32 vectors of one block row, z the batch (a stride of 0 for an
// operand that the batch shares); where y or z has fewer blocks, each takes several. Rows from m
// on, and entries from the last offset on, get zero. Deterministic.
#pragma once

#include "mma.cuh"
#include "sddmm.cuh"
#include "wmma.cuh"

namespace sgap {

template <class T, int kVectorLength>
struct SddmmWarpTile {
  enum { kRows = 8, kTileN = 32, kTileK = 64, kChunk = 8, kDepth = 16 };
  enum { kPitch = kTileK + 8, kSumPitch = kTileN + 4 };  // rows begin at different banks

  T left[kRows * kPitch];
  T right[kTileN * kPitch];
  float sums[kRows * kSumPitch];  // the tile of the result, at the end

  // Loads the step's features of the rows of x, of which the first `rows` exist; x is at the step's
  // first feature, from which `features` remain.
  template <bool kVector>
  __device__ void LoadX(const T* x, Size d, unsigned rows, unsigned features) {
    const unsigned start = threadIdx.x % 8 * kChunk;
#pragma unroll
    for (int step = 0; step < kRows / 4; ++step) {
      const unsigned row = threadIdx.x / 8 + 4 * step;
      const bool valid = row < rows && start < features;
      const auto found =
          Load<kVector, kChunk>(x + (valid ? row : 0) * d + start, valid ? features - start : 0);
      *reinterpret_cast<Pack<T, kChunk>*>(left + row * kPitch + start) = found;
    }
  }

  // The same for the rows of y that the window names; lane l has the index of vector l.
  template <bool kVector>
  __device__ void LoadY(const T* y, Size d, Index index, unsigned vectors, unsigned features) {
    const unsigned start = threadIdx.x % 8 * kChunk;
#pragma unroll
    for (int step = 0; step < kTileN / 4; ++step) {
      const unsigned j = threadIdx.x / 8 + 4 * step;
      const Size row = unsigned(__shfl_sync(~0u, index, j));
      const bool valid = j < vectors && start < features;
      const auto found =
          Load<kVector, kChunk>(y + (valid ? row : 0) * d + start, valid ? features - start : 0);
      *reinterpret_cast<Pack<T, kChunk>*>(right + j * kPitch + start) = found;
    }
  }

  __device__ void Multiply(float (&d)[8]) const {
#pragma unroll
    for (int k = 0; k < kTileK; k += kDepth) {
      WmmaA<T, Along::kRow> a;
      WmmaB<T, Along::kColumn> b;
      LoadFragment(left + k, kPitch, a);
      LoadFragment(right + k, kPitch, b);
      MultiplyAdd(a, b, d);
    }
  }

  // Stores the vector of this lane.
  template <class Factors>
  __device__ void StoreVector(const Factors& factors, T* values, unsigned rows) const {
    float vector[kVectorLength];
#pragma unroll
    for (int v = 0; v < kVectorLength; ++v) vector[v] = sums[v * kSumPitch + threadIdx.x];
    factors.MultiplyRows(vector, rows);
    StoreTogether(values, vector);
  }
};

template <class T, int kVectorLength, bool kVector, bool kWeighted, bool kScaled>
__global__ void __launch_bounds__(32, 16)
    SddmmWarpKernel(const Index* __restrict__ row_offsets, const Index* __restrict__ column_indices,
                    const T* __restrict__ x, const T* __restrict__ y, const T* __restrict__ weights,
                    const Accumulator<T>* __restrict__ scale, T* __restrict__ values, long long m,
                    long long nnz, long long d, long long x_stride, long long y_stride,
                    long long weights_stride, long long scale_stride, long long batches,
                    long long sharing) {
  using Tile = SddmmWarpTile<T, kVectorLength>;
  __shared__ __align__(32) Tile tile;
  const Factors<T, kWeighted, kScaled> all_factors{weights, scale};
  const unsigned block_rows = unsigned((m + kVectorLength - 1) / kVectorLength);
  MoveToStructure(sharing, block_rows, row_offsets, nnz / kVectorLength, column_indices);
  const bool any = blockIdx.x < block_rows;
  const Size first_row = Size(blockIdx.x) * kVectorLength;
  const unsigned rows = unsigned(m - first_row < kVectorLength ? m - first_row : kVectorLength);
  const unsigned first = any ? row_offsets[blockIdx.x] : 0;
  const unsigned last = any ? row_offsets[blockIdx.x + 1] : 0;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    T* out = values + batch * nnz;
    const auto factors = all_factors.Of(batch, weights_stride, scale_stride);
    if (blockIdx.y == 0) ClearPadding<32>(out, Size(row_offsets[block_rows]) * kVectorLength, nnz);
    for (Size window = first + Size(blockIdx.y) * Tile::kTileN; window < last;
         window += Size(gridDim.y) * Tile::kTileN) {
      const unsigned vectors =
          unsigned(last - window < Tile::kTileN ? last - window : Tile::kTileN);
      const Index index = threadIdx.x < vectors ? column_indices[window + threadIdx.x] : 0;
      float sums[8] = {};
#pragma unroll 1
      for (Size l = 0; l < d; l += Tile::kTileK) {
        const unsigned features = unsigned(d - l < Tile::kTileK ? d - l : Tile::kTileK);
        tile.template LoadX<kVector>(x + batch * x_stride + first_row * d + l, d, rows, features);
        tile.template LoadY<kVector>(y + batch * y_stride + l, d, index, vectors, features);
        __syncwarp();
        tile.Multiply(sums);
        __syncwarp();
      }
      StoreFragment(tile.sums, Tile::kSumPitch, sums);
      __syncwarp();
      if (threadIdx.x < vectors) {
        const Size at = (window + threadIdx.x) * kVectorLength;
        tile.StoreVector(factors.From(at), out + at, rows);
      }
      __syncwarp();
    }
  }
}

}  // namespace sgap
