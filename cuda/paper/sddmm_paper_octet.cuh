// SDDMM with column vectors on mma.m8n8k4, as in vectorSparse, sections 6.3 and 6.4 (TCU-based 1-D
// octet tiling; Figure 14): X Y^T (times factors.cuh) in tiles of V rows x 32 vectors, float16.
//
// One warp is a block and computes one tile: in each step 64 features of its V rows of X and of the
// rows of Y that the vectors name, 8 vectors at a time. The operands are swapped: rows of Y are the
// left one. With t = lane % 4 and g = lane / 4 a lane loads twice 16 bytes,
//
//   features 8g to 8g + 7 of row t, and features 8g' to 8g' + 7 of row t + 4 with g' = (g + 4) % 8,
//
// so eight lanes load a line of 128 bytes, of Y and of X alike. The lanes of high groups (g >= 4)
// then exchange their two loads (the high group switch): octet q has features 8q to 8q + 7 in the
// first as an mma needs them, and features 8(q + 4) to 8(q + 4) + 7 in the second with low and high
// group inverted, for both operands; its result is inverted too. The paper has two remedies:
//
// kShuffle       true: lanes l and l + 16 exchange the second half of both operands before the mma
//                ("mma (shfl)"); false: inverted results have sums of their own, which are
//                exchanged at the end ("mma (reg)"). The third, a switch within the tensor core,
//                was never built.
// kVectorLength  V; kVector: d is a multiple of 8
//
// Grid: x block rows, y windows of 32 vectors of one block row, z the batch (a stride of 0 for an
// operand that the batch shares); where y or z has fewer blocks, each takes several. Rows from m
// on, and entries from the last offset on, get zero. Deterministic.
#pragma once

#include "mma.cuh"
#include "mma_m8n8k4.cuh"
#include "sddmm.cuh"

namespace sgap {

// The features that a lane holds of an operand's rows t and t + 4, after the high group switch.
struct PaperOctetHalves {
  Pack<unsigned, 4> first, second;

  __device__ void ExchangeGroups() {
#pragma unroll
    for (int i = 0; i < 4; ++i) second.at[i] = __shfl_xor_sync(~0u, second.at[i], 16);
  }
};

// Loads both halves; the rows point at the step's first feature, from which `features` remain. An
// absent row gives zeros.
template <bool kVector>
__device__ inline PaperOctetHalves LoadHalves(const float16* near_row, bool near_exists,
                                              const float16* far_row, bool far_exists,
                                              Size features) {
  const unsigned near_start = threadIdx.x / 4 * 8, far_start = near_start ^ 32;
  const unsigned count = unsigned(features < 64 ? features : 64);
  const auto near = LoadWords<kVector, 4>(
      near_row + near_start, near_exists && near_start < count ? count - near_start : 0);
  const auto far = LoadWords<kVector, 4>(far_row + far_start,
                                         far_exists && far_start < count ? count - far_start : 0);
  PaperOctetHalves halves;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    halves.first.at[i] = threadIdx.x >= 16 ? far.at[i] : near.at[i];
    halves.second.at[i] = threadIdx.x >= 16 ? near.at[i] : far.at[i];
  }
  return halves;
}

// sums += 8 vectors x V rows, over the 16 features of this octet.
template <int kSets>
__device__ inline void MultiplyHalves(const PaperOctetHalves& y, const PaperOctetHalves& x,
                                      float (&sums)[kSets][8]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    MultiplyRowsByColumns(y.first.at[i], y.first.at[i + 1], x.first.at[i], x.first.at[i + 1],
                          sums[0]);
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    MultiplyRowsByColumns(y.second.at[i], y.second.at[i + 1], x.second.at[i], x.second.at[i + 1],
                          sums[kSets - 1]);
  }
}

// Reduces the sums of all octets (inverted ones in a second set) to one vector in each lane: lane l
// gets the vector at place l % 16 / 4 * 8 + l / 16 * 4 + l % 4, all its rows in order.
template <int kSets>
__device__ inline void ReduceOctets(float (&sums)[4][kSets][8], float (&vector)[8]) {
  const bool odd = threadIdx.x & 4, upper = threadIdx.x & 8, second = threadIdx.x & 2;
  if constexpr (kSets == 2) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[s][0][i] += __shfl_xor_sync(~0u, sums[s][1][i ^ 4], 16);
    }
  }
  float own[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float pair[2];  // one sum of each of the two sub-tiles that remain as octets halve
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const float low = sums[s][0][i], high = sums[s + 2][0][i];
      pair[s] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 8);
    }
    own[i] = (odd ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 4);
  }
  // Each lane has four values of two vectors: lanes t and t ^ 2 exchange halves, so that each has
  // one whole vector.
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int i = (j & 2) * 2 + (j & 1);
    const float kept = second ? own[i + 2] : own[i];
    const float other = __shfl_xor_sync(~0u, second ? own[i] : own[i + 2], 2);
    vector[i] = second ? other : kept;
    vector[i + 2] = second ? kept : other;
  }
}

template <int kVectorLength, bool kShuffle, bool kVector, bool kWeighted, bool kScaled>
__global__ void __launch_bounds__(32, 8)
    SddmmPaperOctetKernel(const Index* __restrict__ row_offsets,
                          const Index* __restrict__ column_indices, const float16* __restrict__ x,
                          const float16* __restrict__ y, const float16* __restrict__ weights,
                          const float* __restrict__ scale, float16* __restrict__ values,
                          long long m, long long nnz, long long d, long long x_stride,
                          long long y_stride, long long weights_stride, long long scale_stride,
                          long long batches, long long sharing) {
  enum { kTileN = 32, kTileK = 64, kSets = kShuffle ? 1 : 2 };
  const unsigned block_rows = unsigned((m + kVectorLength - 1) / kVectorLength);
  MoveToStructure(sharing, block_rows, row_offsets, nnz / kVectorLength, column_indices);
  const bool any = blockIdx.x < block_rows;
  const Size first_row = Size(blockIdx.x) * kVectorLength;
  const unsigned rows = unsigned(m - first_row < kVectorLength ? m - first_row : kVectorLength);
  const unsigned first = any ? row_offsets[blockIdx.x] : 0;
  const unsigned last = any ? row_offsets[blockIdx.x + 1] : 0;
  const Factors<float16, kWeighted, kScaled> all_factors{weights, scale};
  const unsigned t = threadIdx.x % 4, place = threadIdx.x % 16 / 4 * 8 + threadIdx.x / 16 * 4 + t;
  const float16* x_row = x + (first_row + t) * d;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    float16* out = values + batch * nnz;
    const auto factors = all_factors.Of(batch, weights_stride, scale_stride);
    if (blockIdx.y == 0) ClearPadding<32>(out, Size(row_offsets[block_rows]) * kVectorLength, nnz);
    for (Size window = first + Size(blockIdx.y) * kTileN; window < last;
         window += Size(gridDim.y) * kTileN) {
      const unsigned vectors = unsigned(last - window < kTileN ? last - window : kTileN);
      Index columns[8];
#pragma unroll
      for (unsigned j = 0; j < 8; ++j) {
        columns[j] = 4 * j + t < vectors ? column_indices[window + 4 * j + t] : 0;
      }
      float sums[4][kSets][8] = {};
#pragma unroll 1
      for (Size l = 0; l < d; l += kTileK) {
        const float16* x_at = x_row + batch * x_stride + l;
        const float16* y_at = y + batch * y_stride + l;
        auto x_part = LoadHalves<kVector>(x_at, t < rows, x_at + 4 * d, t + 4 < rows, d - l);
        if constexpr (kShuffle) x_part.ExchangeGroups();
#pragma unroll
        for (unsigned s = 0; s < 4; ++s) {
          auto y_part = LoadHalves<kVector>(
              y_at + Size(unsigned(columns[2 * s])) * d, 8 * s + t < vectors,
              y_at + Size(unsigned(columns[2 * s + 1])) * d, 8 * s + 4 + t < vectors, d - l);
          if constexpr (kShuffle) y_part.ExchangeGroups();
          MultiplyHalves(y_part, x_part, sums[s]);
        }
      }
      float found[8];
      ReduceOctets(sums, found);
      if (place < vectors) {
        const Size at = (window + place) * kVectorLength;
        float vector[kVectorLength];
#pragma unroll
        for (int v = 0; v < kVectorLength; ++v) vector[v] = found[v];
        factors.From(at).MultiplyRows(vector, rows);
        StoreTogether(out + at, vector);
      }
    }
  }
}

}  // namespace sgap
