// SDDMM over column vectors of V rows on CUDA cores, values[p, v] = X[V b + v, :] . Y[column of p,
// :] (times factors.cuh) with b the block row of vector p: the 1-D subwarp tiling of vectorSparse,
// section 6.1. The lanes of a subwarp share the d features, kColumns consecutive ones of every
// kSubwarp * kColumns each. Each lane has partial sums of kAtOnce vectors, which are reduced by
// shuffles.
//
// kLength    V
// kRows      rows of X that a lane multiplies: V, or a divisor of V where all sums do not fit in
//            registers. Neighbouring subwarps then take the parts, and gather the same rows of Y
// kWindow    vectors of a subwarp, whatever their block rows
// kColumns   features of one load; kVector: d is a multiple of it, so they are one vector
// kSubwarp   lanes that reduce together
// kAtOnce    vectors whose sums are in registers together
//
// Grid: x over the sparse operand, z over the batch (a stride of 0 for an operand that the batch
// shares). Vectors from the last offset on are padding and get zeros, as do rows from m on.
// Accumulates in float32, float64 for float64. Deterministic.
#pragma once

#include "sddmm.cuh"

namespace sgap {

// A subwarp's sums for kAtOnce vectors of one block row.
template <class T, int kLength, int kRows, int kColumns, int kSubwarp, int kAtOnce, bool kVector>
struct VectorDots {
  using Pack = sgap::Pack<T, kColumns>;
  using Sums = Accumulator<T>[kAtOnce * kRows];
  Group<kSubwarp> group;
  unsigned d;

  // x is at the first row of X; only its first `rows` rows exist, and the last of these is loaded
  // in place of the others.
  __device__ void Add(const T* x, unsigned rows, const T* const (&y_rows)[kAtOnce],
                      Sums& sums) const {
#pragma unroll 1
    for (unsigned at = group.lane * kColumns; at < d; at += kSubwarp * kColumns) {
      const unsigned left = d - at;
      Pack y[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) y[i] = Features(y_rows[i] + at, left);
      const T* x_row = x + at;
#pragma unroll
      for (int v = 0; v < kRows; ++v) {
        const Pack features = Features(x_row, left);
        if (v + 1 < rows) x_row += d;  // one address at a time
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) AddProducts(features, y[i], sums[i * kRows + v]);
      }
    }
  }

  // Reduces over all lanes, which must call together, and stores out[v], out[V + v], ... of the
  // first `left` vectors; zeros in the rows that do not exist.
  template <class Factors>
  __device__ void StoreSums(Sums& sums, const Factors& factors, T* out, unsigned rows,
                            unsigned left) const {
    constexpr int kCount = kAtOnce * kRows;
    constexpr int kLanes = kSubwarp > kCount ? kSubwarp / kCount : 1;  // lanes with the same sums
    constexpr int kOwn = kSubwarp > kCount ? 1 : kCount / kSubwarp;
    constexpr int kWidth = kOwn < kRows ? kOwn : kRows;  // sums of a lane in one vector
    group.ReduceSpread(sums);
    if (group.lane % kLanes != 0) return;
#pragma unroll
    for (int s = 0; s < kOwn; s += kWidth) {
      const unsigned first = group.lane / kLanes * kOwn + s, v = first % kRows;
      if (first / kRows >= left) continue;
      const Size place = Size(first / kRows) * kLength + v;
      Accumulator<T> own[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) own[j] = sums[s + j];
      factors.From(place).MultiplyRows(own, rows > v ? rows - v : 0);
      Store<true>(out + place, unsigned(kWidth), own);
    }
  }

 private:
  __device__ static Pack Features(const T* row, unsigned left) {
    return Load<kVector, kColumns>(row, kVector ? unsigned(kColumns) : left);
  }
};

template <class T, int kLength, int kRows, int kWindow, int kColumns, int kSubwarp, int kAtOnce,
          int kBlock, bool kVector, bool kWeighted, bool kScaled>
__global__ void __launch_bounds__(kBlock, kTileThreads / kBlock)
    SddmmSubwarpKernel(const Index* __restrict__ row_offsets,
                       const Index* __restrict__ column_indices, const T* __restrict__ x,
                       const T* __restrict__ y, const T* __restrict__ weights,
                       const Accumulator<T>* __restrict__ scale, T* __restrict__ values,
                       long long m, long long vectors, long long d, long long x_stride,
                       long long y_stride, long long weights_stride, long long scale_stride,
                       long long batches, long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets, vectors, column_indices);
  constexpr unsigned kParts = kLength / kRows;
  using Lanes = VectorDots<T, kLength, kRows, kColumns, kSubwarp, kAtOnce, kVector>;
  const Lanes lanes{{}, unsigned(d)};
  const Factors<T, kWeighted, kScaled> all_factors{weights, scale};
  const Size subwarp = (Size(blockIdx.x) * kBlock + threadIdx.x) / kSubwarp;
  const unsigned part = unsigned(subwarp % kParts) * kRows;
  const unsigned blocks = unsigned((m + kLength - 1) / kLength);
  const Size first = subwarp / kParts * kWindow, stored = row_offsets[blocks];
  const bool any = blocks > 0 && first < stored;  // the same in all lanes of the subwarp
  const unsigned last = unsigned(stored - first < kWindow ? stored : first + kWindow);
  const Index first_block = any ? RowBetween(row_offsets, 0, blocks, Index(first)) : 0;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    T* out = values + batch * vectors * kLength;
    ClearPadding<kBlock>(out, stored * kLength, vectors * kLength);
    if (!any) continue;
    const T *x_batch = x + batch * x_stride, *y_batch = y + batch * y_stride;
    const auto factors = all_factors.Of(batch, weights_stride, scale_stride);
    unsigned block = first_block, p = unsigned(first);
#pragma unroll 1
    while (p < last) {
      block = RowFrom(row_offsets, block, blocks, Index(p));
      const unsigned block_end = row_offsets[block + 1];
      const unsigned end = block_end > p && block_end < last ? block_end : last;
      // A part may begin past the last row of the matrix.
      const Size row = Size(block) * kLength + part, place = row < m ? row : m - 1;
      const unsigned rows = m - place < kRows ? unsigned(m - place) : kRows;
      const T* x_rows = x_batch + place * d;
#pragma unroll 1
      for (; p < end; p += kAtOnce) {
        Index columns[kAtOnce];
        LoadOrLast(column_indices, p, end, columns);
        const T* y_rows[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) y_rows[i] = y_batch + Size(unsigned(columns[i])) * d;
        Accumulator<T> sums[kAtOnce * kRows] = {};
        lanes.Add(x_rows, rows, y_rows, sums);
        const Size at = Size(p) * kLength + part;
        lanes.StoreSums(sums, factors.From(at), out + at, row < m ? rows : 0, end - p);
      }
      p = end;
    }
  }
}

}  // namespace sgap
