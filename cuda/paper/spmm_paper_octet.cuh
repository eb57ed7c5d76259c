// SpMM with column vectors on mma.m8n8k4, as in vectorSparse, sections 5.3 and 5.4 (TCU-based 1-D
// octet tiling; Figure 11): C = A B in tiles of V rows x 64 columns, float16.
//
// One warp is a block and computes one tile. The operands are swapped: the gathered rows of B are
// the left operand, 64 columns of C x 4 vectors a step, and the vectors the right one. With t =
// lane % 4 and g = lane / 4 a lane loads 16 bytes, columns 8g to 8g + 7 of the row that vector t of
// the step names: eight lanes load one line of 128 bytes. Without any rearrangement these are the
// lane's operands of two mma, columns 8g to 8g + 3 and 8g + 4 to 8g + 7. The vectors, which all
// lanes use, go through shared memory, kTileK at once. V < 8 leaves columns of zeros; for V <= 4
// half of the instructions could be skipped, but only with an assembler, as the paper says.
//
// kVectorLength  V; kTileK: vectors of a tile, a multiple of 4; kVector: n is a multiple of 8
//
// Grid: x block rows, y tiles of 64 columns, z the batch (a stride of 0 for an operand that the
// batch shares); where y or z has fewer blocks, each takes several. Entries from the last offset on
// are padding. Deterministic.
#pragma once

#include "mma.cuh"
#include "mma_m8n8k4.cuh"

namespace sgap {

template <int kVectorLength, int kTileK>
struct PaperOctetVectors {
  unsigned words[kTileK][4];  // for each vector its V values, then zeros
  Index columns[kTileK];

  // Loads vectors `first` to first + kTileK - 1; those from `last` on do not exist and become
  // zeros.
  __device__ void LoadFrom(const float16* values, const Index* column_indices, unsigned first,
                           unsigned last) {
    for (unsigned k = threadIdx.x; k < kTileK; k += 32) {
      const bool exists = first + k < last;
      const auto found = LoadWords<true, kVectorLength / 2>(
          values + Size(first + k) * kVectorLength, exists ? kVectorLength : 0);
      Pack<unsigned, 4> padded = {};
#pragma unroll
      for (int i = 0; i < kVectorLength / 2; ++i) padded.at[i] = found.at[i];
      *reinterpret_cast<Pack<unsigned, 4>*>(words[k]) = padded;
      columns[k] = exists ? column_indices[first + k] : 0;
    }
  }
};

// The part of a lane: its columns of four rows of B, and of the tile of C.
template <int kVectorLength, int kTileK, bool kVector>
struct PaperOctetLane {
  using Vectors = PaperOctetVectors<kVectorLength, kTileK>;
  enum { kColumns = 8 };
  const float16* b;  // at the lane's first column
  Size n;
  unsigned left;  // number of columns from the lane's first to the last
  unsigned t = threadIdx.x % 4;

  // The lane's columns of the row that vector k names; zeros where there is no such vector.
  __device__ Pack<unsigned, 4> Row(const Vectors& vectors, unsigned k, bool exists) const {
    const Size row = unsigned(vectors.columns[k]);
    return LoadWords<kVector, 4>(b + row * n, exists ? left : 0);
  }

  // d += four rows of B, one in each lane of a group, times the vectors from k - t on
  __device__ static void Multiply(const Vectors& vectors, unsigned k, const Pack<unsigned, 4>& row,
                                  float (&d)[2][8]) {
    const unsigned half = threadIdx.x / 16;  // values 0 to 3 of a vector, or 4 to 7
    const auto vector = *reinterpret_cast<const Pack<unsigned, 2>*>(vectors.words[k] + 2 * half);
    MultiplyColumnsByRows(row.at[0], row.at[1], vector.at[0], vector.at[1], d[0]);
    MultiplyColumnsByRows(row.at[2], row.at[3], vector.at[0], vector.at[1], d[1]);
  }

  // A lane has every second column of four rows of C, and its neighbour the other columns: after an
  // exchange each has eight consecutive columns of two rows. c is at the tile's first row and the
  // lane's column.
  __device__ void StoreRows(float16* c, unsigned rows, const float (&d)[2][8]) const {
    const bool odd = t & 1;
    float out[2][kColumns];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float own = odd ? d[j][4 + i] : d[j][i];
        const float other = __shfl_xor_sync(~0u, odd ? d[j][i] : d[j][4 + i], 1);
        out[i & 1][4 * j + (i & 2)] = odd ? other : own;
        out[i & 1][4 * j + (i & 2) + 1] = odd ? own : other;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned row = (odd ? 4 : 0) + (t & 2) + i;
      if (row < rows && left > 0) StoreWords<kVector>(c + row * n, left, out[i]);
    }
  }
};

template <int kVectorLength, int kTileK, bool kVector>
__global__ void __launch_bounds__(32, 8)
    SpmmPaperOctetKernel(const float16* __restrict__ values, const Index* __restrict__ row_offsets,
                         const Index* __restrict__ column_indices, const float16* __restrict__ b,
                         float16* __restrict__ c, long long m, long long n, long long values_stride,
                         long long b_stride, long long batches, long long capacity,
                         long long sharing) {
  const Size block_rows = (m + kVectorLength - 1) / kVectorLength;
  MoveToStructure(sharing, block_rows, row_offsets, capacity, column_indices);
  using Lane = PaperOctetLane<kVectorLength, kTileK, kVector>;
  __shared__ __align__(16) typename Lane::Vectors vectors;
  const Size first_row = Size(blockIdx.x) * kVectorLength;
  if (first_row >= m) return;
  const unsigned rows = unsigned(m - first_row < kVectorLength ? m - first_row : kVectorLength);
  const unsigned first = row_offsets[blockIdx.x], last = row_offsets[blockIdx.x + 1];
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    for (Size tile = blockIdx.y; tile * 64 < n; tile += gridDim.y) {
      const Size column = tile * 64 + threadIdx.x / 4 * Lane::kColumns;
      const Lane lane{b + batch * b_stride + column, Size(n),
                      unsigned(column < n ? n - column : 0)};
      float d[2][8] = {};
#pragma unroll 1
      for (unsigned p = first; p < last; p += kTileK) {
        __syncwarp();
        vectors.LoadFrom(values + batch * values_stride, column_indices, p, last);
        __syncwarp();
        if (p + kTileK <= last) {
          Pack<unsigned, 4> found[kTileK / 4];
#pragma unroll
          for (int s = 0; s < kTileK / 4; ++s) found[s] = lane.Row(vectors, 4 * s + lane.t, true);
          __threadfence_block();  // issues all loads before the first mma
#pragma unroll
          for (int s = 0; s < kTileK / 4; ++s) {
            Lane::Multiply(vectors, 4 * s + lane.t, found[s], d);
          }
        } else {
#pragma unroll 1
          for (unsigned k = lane.t; p + k - lane.t < last; k += 4) {
            Lane::Multiply(vectors, k, lane.Row(vectors, k, p + k < last), d);
          }
        }
      }
      lane.StoreRows(c + (batch * m + first_row) * n + column, rows, d);
    }
  }
}

}  // namespace sgap
