// A vector of each stored entry, from the rows of its two ends, column by column:
//
//   out[q, l] = x[i, l] op y[j, l]   at entry q = (i, j)
//
// for the points {<g nnz, c col>, r} of Sgap, section 6. r lanes share the columns of an entry, c
// neighbouring ones at a time, and a group takes kNonzeros entries in turn. `add`: op is +, else *.
// Entries of the padding get zeros. (sddmm.cuh sums products over the columns instead.)
#pragma once

#include "group.cuh"
#include "row_search.cuh"

namespace sgap {

template <class T, int kNonzeros, int kGroup, int kColumns, int kBlock, bool kVector>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    GsddmmKernel(const Index* __restrict__ row_offsets, const Index* __restrict__ column_indices,
                 const T* __restrict__ x, const T* __restrict__ y, T* __restrict__ out, long long m,
                 long long nnz, long long n, long long x_stride, long long y_stride,
                 long long batches, long long add, long long sharing) {
  using A = Accumulator<T>;
  MoveToStructure(sharing, m, row_offsets, nnz, column_indices);
  const Group<kGroup> group;
  const Size first = (Size(blockIdx.x) * kBlock + threadIdx.x) / kGroup * kNonzeros;
  const Size stored = m > 0 ? row_offsets[m] : 0;
  const Index first_row =
      first < stored ? RowBetween(row_offsets, 0, unsigned(m), Index(first)) : 0;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    Index i = first_row;
#pragma unroll 1
    for (Size q = first; q < first + kNonzeros && q < nnz; ++q) {
      const bool valid = q < stored;  // the same in all lanes of the group
      if (valid) i = RowFrom(row_offsets, unsigned(i), unsigned(m), Index(q));
      const Index j = valid ? column_indices[q] : 0;
      const T* row = x + batch * x_stride + Size(unsigned(i)) * n;
      const T* column = y + batch * y_stride + Size(unsigned(j)) * n;
#pragma unroll 2
      for (Size l = group.lane * kColumns; l < n; l += kGroup * kColumns) {
        const unsigned left = unsigned(n - l), read = valid ? left : 0;
        const auto a = Load<kVector, kColumns>(row + l, read);
        const auto b = Load<kVector, kColumns>(column + l, read);
        A both[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const A p = Widen(a.at[c]), r = Widen(b.at[c]);
          both[c] = add ? p + r : p * r;
        }
        Store<kVector>(out + (batch * nnz + q) * n + l, left, both);
      }
    }
  }
}

}  // namespace sgap
