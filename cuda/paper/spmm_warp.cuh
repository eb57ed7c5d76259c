// SpMM with column vectors on tensor cores by the classic mapping: C = A B in tiles of V rows x 64
// columns, as in vectorSparse, section 5.2 (TCU-based 1-D warp tiling; Figures 9 (b) and 10).
//
// One warp is a block and computes one tile: in each step kTileK vectors of its block row, the left
// operand of wmma m8n32k16, times the 64 columns of the rows of B that they name, the right one. A
// fragment needs its rows of B at a constant stride, and gathered rows have none: they go through
// shared memory, which the octet tiling avoids. V < 8 leaves rows of zeros.
//
// kVectorLength  V; kTileK: vectors of a step; kVector: n is a multiple of 8
//
// Grid: x block rows, y tiles of 64 columns, z the batch (a stride of 0 for an operand that the
// batch shares); where y or z has fewer blocks, each takes several. Entries from the last offset on
// are padding. Deterministic.
#pragma once

#include "mma.cuh"
#include "wmma.cuh"

namespace sgap {

template <class T, int kVectorLength, int kTileK>
struct SpmmWarpTile {
  enum { kRows = 8, kTileN = 64, kChunk = 8, kHalf = 32, kDepth = 16 };
  enum { kRowPitch = kTileN + 8, kSumPitch = kTileN + 4 };  // rows begin at different banks

  T left[kTileK * kRows];  // the vectors, one after the other
  union {
    T right[kTileK * kRowPitch];
    float sums[kRows * kSumPitch];  // the tile of C, at the end
  };

  // Loads vectors `first` to first + kTileK - 1; those from `last` on, and rows from V on, become
  // zeros.
  __device__ void LoadVectors(const T* values, unsigned first, unsigned last) {
    using Vector = Pack<T, kVectorLength>;
    for (unsigned k = threadIdx.x; k < kTileK; k += 32) {
      Pack<T, kRows> padded = {};
      if (first + k < last) {
        const auto vector = reinterpret_cast<const Vector*>(values)[first + k];
#pragma unroll
        for (int v = 0; v < kVectorLength; ++v) padded.at[v] = vector.at[v];
      }
      *reinterpret_cast<Pack<T, kRows>*>(left + k * kRows) = padded;
    }
  }

  // Loads the rows of b that these vectors name; b is at the tile's first column, from which
  // `columns` remain.
  template <bool kVector>
  __device__ void LoadRows(const T* b, const Index* column_indices, unsigned first, unsigned last,
                           Size n, unsigned columns) {
    const unsigned start = threadIdx.x % 8 * kChunk;
#pragma unroll
    for (int step = 0; step < kTileK / 4; ++step) {
      const unsigned k = threadIdx.x / 8 + 4 * step;
      const bool valid = first + k < last && start < columns;
      const Size row = valid ? unsigned(column_indices[first + k]) : 0;
      const auto found = Load<kVector, kChunk>(b + row * n + start, valid ? columns - start : 0);
      *reinterpret_cast<Pack<T, kChunk>*>(right + k * kRowPitch + start) = found;
    }
  }

  __device__ void Multiply(float (&d)[2][8]) const {
#pragma unroll
    for (int k = 0; k < kTileK; k += kDepth) {
      WmmaA<T, Along::kColumn> a;
      LoadFragment(left + k * kRows, kRows, a);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        WmmaB<T, Along::kRow> b;
        LoadFragment(right + k * kRowPitch + half * kHalf, kRowPitch, b);
        MultiplyAdd(a, b, d[half]);
      }
    }
  }

  // Stores `rows` rows of c, which is at the tile's first element; 8 columns a lane.
  template <bool kVector>
  __device__ void StoreRows(T* c, Size n, unsigned rows, unsigned columns) const {
    const unsigned start = threadIdx.x % 8 * kChunk;
    for (unsigned row = threadIdx.x / 8; row < rows && start < columns; row += 4) {
      float own[kChunk];
#pragma unroll
      for (int j = 0; j < kChunk; ++j) own[j] = sums[row * kSumPitch + start + j];
      StoreWords<kVector>(c + row * n + start, columns - start, own);
    }
  }
};

template <class T, int kVectorLength, int kTileK, bool kVector>
__global__ void __launch_bounds__(32, 16)
    SpmmWarpKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                   const Index* __restrict__ column_indices, const T* __restrict__ b,
                   T* __restrict__ c, long long m, long long n, long long values_stride,
                   long long b_stride, long long batches, long long capacity, long long sharing) {
  const Size block_rows = (m + kVectorLength - 1) / kVectorLength;
  MoveToStructure(sharing, block_rows, row_offsets);
  using Tile = SpmmWarpTile<T, kVectorLength, kTileK>;
  __shared__ __align__(32) Tile tile;
  const Size first_row = Size(blockIdx.x) * kVectorLength;
  if (first_row >= m) return;
  const unsigned rows = unsigned(m - first_row < kVectorLength ? m - first_row : kVectorLength);
  // Vectors are counted from the first structure's on: a pointer to this structure's would spill.
  const unsigned before = unsigned(StructureOfBlock(sharing) * capacity);
  const unsigned first = before + row_offsets[blockIdx.x],
                 last = before + row_offsets[blockIdx.x + 1];
  values -= Size(before) * kVectorLength;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    for (Size column = Size(blockIdx.y) * Tile::kTileN; column < n;
         column += Size(gridDim.y) * Tile::kTileN) {
      const unsigned columns = unsigned(n - column < Tile::kTileN ? n - column : Tile::kTileN);
      float d[2][8] = {};
#pragma unroll 1
      for (unsigned p = first; p < last; p += kTileK) {
        tile.LoadVectors(values + batch * values_stride, p, last);
        tile.template LoadRows<kVector>(b + batch * b_stride + column, column_indices, p, last, n,
                                        columns);
        __syncwarp();
        tile.Multiply(d);
        __syncwarp();
      }
      StoreFragment(tile.sums, Tile::kSumPitch, d[0]);
      StoreFragment(tile.sums + Tile::kHalf, Tile::kSumPitch, d[1]);
      __syncwarp();
      tile.template StoreRows<kVector>(c + (batch * m + first_row) * n + column, n, rows, columns);
      __syncwarp();
    }
  }
}

}  // namespace sgap
