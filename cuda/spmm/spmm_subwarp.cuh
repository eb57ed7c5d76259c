// SpMM over column vectors of V rows on CUDA cores, C = A B and C = A^T B: the 1-D subwarp tiling
// of vectorSparse, section 5.1. A subwarp of lanes owns a tile of C: V rows (of A^T B one row)
// times some columns. Each lane loads its columns of a gathered row of B at once and keeps its part
// of the tile in registers.
//
// All lanes of a subwarp read values and indices of A from the same addresses: one load from the L1
// cache serves them all. The paper's copy in shared memory needs as many loads from there, plus the
// copying; shuffles take one instruction a value, where a load brings four.
//
// kLength    V
// kRows      rows that a lane computes: V, or a divisor where the sums of all V do not fit in
//            registers. Neighbouring subwarps then take the parts, and gather the same rows in the
//            same loads
// kColumns   dense columns of a lane; kVector: n is a multiple of it, so they are one vector
// kSplit     neighbouring lanes that share their columns: each takes every kSplit-th vector
// kSubwarp   lanes of a tile, kSubwarp / kSplit * kColumns columns wide
// kAtOnce    vectors whose loads a lane has in flight together
//
// Grid: x over the sparse operand, with 2^tile_bits tiles of a row side by side, y over groups of
// that many tiles, z over the batch (a stride of 0 for an operand that the batch shares). Vectors
// from the last offset on are padding; rows of A from m on do not exist. Accumulates in float32,
// float64 for float64. Each element of C is written by one group: deterministic.
#pragma once

#include "group.cuh"

namespace sgap {

// The place of a lane: its tile of C, its columns in the tile, and its share of the vectors.
template <int kParts, int kColumns, int kSplit, int kSubwarp, int kBlock>
struct TilePlace {
  unsigned tile_bits;
  Size subwarp = (Size(blockIdx.x) * kBlock + threadIdx.x) / kSubwarp;
  unsigned lane = threadIdx.x % kSubwarp;
  unsigned part = unsigned(subwarp % kParts);
  Size row = (subwarp / kParts) >> tile_bits;  // in units of tile rows
  unsigned tile =
      (blockIdx.y << tile_bits) + (unsigned(subwarp / kParts) & ((1u << tile_bits) - 1));
  unsigned column = (tile * (kSubwarp / kSplit) + lane / kSplit) * kColumns;
  unsigned share = lane % kSplit;
};

// Loads entries p, p + kStride, ...; past the end it repeats the last one.
template <int kStride, int kCount>
__device__ inline void LoadStrided(const Index* entries, unsigned p, unsigned last,
                                   Index (&found)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    found[i] = entries[p + i * kStride < last ? p + i * kStride : last - 1];
  }
}

// Reduces the sums of kRows rows over the kSplit lanes of a group, which must call together, and
// stores them; rows from `rows` on and columns from `left` on do not exist. c is at the first row
// and column.
template <bool kVector, int kRows, int kColumns, int kSplit, class T>
__device__ inline void StoreTile(T* c, unsigned n, Size rows, unsigned left,
                                 Accumulator<T> (&sums)[kRows * kColumns]) {
  constexpr int kCount = kRows * kColumns;
  constexpr int kLanes = kSplit > kCount ? kSplit / kCount : 1;  // lanes with the same sums
  constexpr int kOwn = kSplit > kCount ? 1 : kCount / kSplit;
  constexpr int kWidth = kOwn < kColumns ? kOwn : kColumns;  // sums of a lane in one row
  const Group<kSplit> group;
  group.ReduceSpread(sums);
  if (group.lane % kLanes != 0) return;
#pragma unroll
  for (int s = 0; s < kOwn; s += kWidth) {
    const unsigned first = group.lane / kLanes * kOwn + s;
    const unsigned row = first / kColumns, column = first % kColumns;
    if (row >= rows || column >= left) continue;
    Accumulator<T> own[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) own[j] = sums[s + j];
    Store<kVector>(c + Size(row) * n + column, left - column, own);
  }
}

// The loads and sums of a lane for its vectors of a block row.
template <class T, int kLength, int kRows, int kColumns, int kSplit, int kAtOnce, bool kVector>
struct BlockRow {
  const T* values;  // at the lane's first row of vector 0
  const Index* column_indices;
  const T* b;  // at the lane's first column
  unsigned n;
  unsigned left;  // number of columns from the lane's first to the last

  // Adds vectors p, p + kSplit, ..., whose columns are `columns`. With kAll all of them are below
  // `last`; otherwise those from `last` on count as zeros.
  template <bool kAll>
  __device__ void AddSome(unsigned p, unsigned last, const Index (&columns)[kAtOnce],
                          Accumulator<T> (&sums)[kRows * kColumns]) const {
    Pack<T, kColumns> rows[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned width = kAll && kVector ? unsigned(kColumns) : left;
      const T* row = b + Size(unsigned(columns[i])) * n;
      rows[i] = Load<kVector, kColumns>(row, kAll || p + i * kSplit < last ? width : 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      Pack<T, kRows> vector = {};
      if (kAll || p + i * kSplit < last) {
        const T* at = values + Size(p + i * kSplit) * kLength;
        vector = *reinterpret_cast<const Pack<T, kRows>*>(at);
      }
#pragma unroll
      for (int v = 0; v < kRows; ++v) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          sums[v * kColumns + j] += Widen(vector.at[v]) * Widen(rows[i].at[j]);
        }
      }
    }
  }

  // Adds vectors p, p + kSplit, ... below `last`.
  __device__ void Add(unsigned p, unsigned last, Accumulator<T> (&sums)[kRows * kColumns]) const {
    constexpr unsigned kStep = kAtOnce * kSplit;
    if (p >= last) return;
    Index columns[kAtOnce], next[kAtOnce];
    LoadStrided<kSplit>(column_indices, p, last, columns);
#pragma unroll 1
    for (; p + (kAtOnce - 1) * kSplit < last; p += kStep) {
      // The columns of the next step are loaded during this one.
      LoadStrided<kSplit>(column_indices, p + kStep, last, next);
      AddSome<true>(p, last, columns, sums);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) columns[i] = next[i];
    }
    if (kAtOnce > 1 && p < last) AddSome<false>(p, last, columns, sums);
  }
};

// C = A B. `permutation` is not read.
template <class T, int kLength, int kRows, int kColumns, int kSplit, int kSubwarp, int kAtOnce,
          int kBlock, bool kVector>
__global__ void __launch_bounds__(kBlock, kTileThreads / kBlock)
    SpmmSubwarpKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                      const Index* __restrict__ column_indices,
                      const Index* __restrict__ permutation, const T* __restrict__ b,
                      T* __restrict__ c, long long m, long long n, long long values_stride,
                      long long b_stride, long long tile_bits, long long batches,
                      long long capacity, long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets, capacity, column_indices);
  const TilePlace<kLength / kRows, kColumns, kSplit, kSubwarp, kBlock> place{unsigned(tile_bits)};
  const Size row = place.row * kLength + place.part * kRows;
  const bool inside = place.column < n && row < m;  // the same in all lanes of a group
  const unsigned first = inside ? row_offsets[place.row] + place.share : 0;
  const unsigned last = inside ? row_offsets[place.row + 1] : 0;
  const unsigned left = inside ? unsigned(n) - place.column : 0;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const BlockRow<T, kLength, kRows, kColumns, kSplit, kAtOnce, kVector> lane{
        values + batch * values_stride + place.part * kRows, column_indices,
        b + batch * b_stride + place.column, unsigned(n), left};
    Accumulator<T> sums[kRows * kColumns] = {};
    lane.Add(first, last, sums);
    StoreTile<kVector, kRows, kColumns, kSplit>(c + (batch * m + row) * n + place.column,
                                                unsigned(n), inside ? m - row : 0, left, sums);
  }
}

// C = A^T B. m and the offsets are those of A^T; k columns of A^T (rows of A) exist. Vector q of a
// row of A^T multiplies V neighbouring rows of B. kWhole: k is a multiple of V.
template <class T, int kLength, int kColumns, int kSplit, int kSubwarp, int kAtOnce, int kBlock,
          bool kVector, bool kWhole>
__global__ void __launch_bounds__(kBlock, kTileThreads / kBlock)
    SpmmSubwarpTransposedKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                                const Index* __restrict__ block_indices,
                                const Index* __restrict__ permutation, const T* __restrict__ b,
                                T* __restrict__ c, long long m, long long n, long long k,
                                long long values_stride, long long b_stride, long long tile_bits,
                                long long batches, long long capacity, long long sharing) {
  MoveToStructure(sharing, m, row_offsets, capacity, block_indices, permutation);
  // Rows of B of one vector that are loaded together.
  constexpr int kPiece = kLength < 8 ? kLength : 8;
  constexpr unsigned kStep = kAtOnce * kSplit;
  const TilePlace<1, kColumns, kSplit, kSubwarp, kBlock> place{unsigned(tile_bits)};
  const bool inside = place.column < n && place.row < m;  // the same in all lanes of a group
  const unsigned first = inside ? row_offsets[place.row] + place.share : 0;
  const unsigned last = inside ? row_offsets[place.row + 1] : 0;
  const unsigned left = inside ? unsigned(n) - place.column : 0;
  const unsigned width = kVector ? unsigned(kColumns) : left;  // without columns: no vectors
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const T *own_values = values + batch * values_stride,
            *rows = b + batch * b_stride + place.column;
    Accumulator<T> sums[kColumns] = {};
#pragma unroll 1
    for (unsigned q = first; q < last; q += kStep) {
      Index blocks[kAtOnce], places[kAtOnce];
      LoadStrided<kSplit>(block_indices, q, last, blocks);
      LoadStrided<kSplit>(permutation, q, last, places);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool valid = q + i * kSplit < last;
        const unsigned row = unsigned(blocks[i]) * kLength;
        const T* vector = own_values + Size(unsigned(places[i])) * kLength;
#pragma unroll 1
        for (int piece = 0; piece < kLength; piece += kPiece) {
          const auto scales = Load<true, kPiece>(vector + piece, valid ? unsigned(kPiece) : 0);
#pragma unroll
          for (int v = 0; v < kPiece; ++v) {
            const bool exists = valid && (kWhole || row + piece + v < unsigned(k));
            const auto pack = Load<kVector, kColumns>(rows + Size(row + piece + v) * unsigned(n),
                                                      exists ? width : 0);
            // A value past the end of the matrix may be NaN.
            const Accumulator<T> scale = exists ? Widen(scales.at[v]) : 0;
#pragma unroll
            for (int j = 0; j < kColumns; ++j) sums[j] += scale * Widen(pack.at[j]);
          }
        }
      }
    }
    StoreTile<kVector, 1, kColumns, kSplit>(c + (batch * m + place.row) * n + place.column,
                                            unsigned(n), inside, left, sums);
  }
}

}  // namespace sgap
