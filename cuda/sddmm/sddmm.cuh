// SDDMM over CSR, values[p] = X[row of p, :] . Y[column_indices[p], :] (times factors.cuh), for the
// points {<x nnz|row, c col>, r}: r lanes share the d features, c consecutive ones of every r * c
// each, and reduce in parallel. Each value is written by one group: deterministic.
//
// kColumns   c, features of one load; kVector: d is a multiple of it, so they are one vector
// kGroup     r, lanes that reduce together
// kAtOnce    nonzeros whose loads are in flight together, to hide the latency of gathers
//
// Grid: x over the sparse operand, z over the batch (a stride of 0 for an operand that the batch
// shares). Entries from row_offsets[m] on are padding and get zero. Accumulates in float32, float64
// for float64.
#pragma once

#include "factors.cuh"
#include "group.cuh"
#include "row_search.cuh"

namespace sgap {

template <class T, int kColumns>
__device__ inline void AddProducts(const Pack<T, kColumns>& x, const Pack<T, kColumns>& y,
                                   Accumulator<T>& sum) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) sum += Widen(x.at[j]) * Widen(y.at[j]);
}

// Zeroes the values of the padding, with all threads of the launch.
template <int kBlock, class T>
__device__ inline void ClearPadding(T* values, Size stored, Size nnz) {
  const Size thread = Size(blockIdx.x) * kBlock + threadIdx.x;
  for (Size p = stored + thread; p < nnz; p += Size(gridDim.x) * kBlock) values[p] = {};
}

// Loads entries p, p + 1, ...; past the end it repeats the last one.
template <int kCount>
__device__ inline void LoadOrLast(const Index* entries, unsigned p, unsigned last,
                                  Index (&found)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) found[i] = entries[p + i < last ? p + i : last - 1];
}

// The dot products of a group for kAtOnce consecutive nonzeros.
template <class T, int kColumns, int kGroup, int kAtOnce, bool kVector>
struct Dots {
  using Pack = sgap::Pack<T, kColumns>;
  enum { kStep = kGroup * kColumns };
  // Loads in flight: at most 4 pairs of x and y, and 64 bytes.
  enum { kPairs = sizeof(Pack) <= 8 ? 4 : 32 / sizeof(Pack) };
  enum { kInFlight = kPairs > kAtOnce ? kPairs / kAtOnce : 1 };
  Group<kGroup> group;
  unsigned d;
  unsigned start = group.lane * kColumns;  // the lane's first feature

  __device__ Pack Features(const T* row, unsigned at) const {
    return Load<kVector, kColumns>(row + at, at < d ? d - at : 0);
  }

  // The lane's features of load s of kKept; d ends within the last load.
  template <int kKept>
  __device__ Pack FeaturesOf(int s, const T* row) const {
    const unsigned at = start + s * kStep;
    return s + 1 < kKept ? Load<kVector, kColumns>(row + at, unsigned(kColumns))
                         : Features(row, at);
  }

  // sums[i] += the lane's part of x_row(i) . y_rows[i]
  template <class Rows>
  __device__ void Add(Rows x_row, const T* const (&y_rows)[kAtOnce],
                      Accumulator<T> (&sums)[kAtOnce]) const {
#pragma unroll(kInFlight)
    for (unsigned at = start; at < d; at += kStep) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        AddProducts(Features(x_row(i), at), Features(y_rows[i], at), sums[i]);
      }
    }
  }

  // The same where the lane's features of one row of X are in registers.
  template <int kKept>
  __device__ void AddKept(const Pack (&x)[kKept], const T* const (&y_rows)[kAtOnce],
                          Accumulator<T> (&sums)[kAtOnce]) const {
#pragma unroll
    for (int s = 0; s < kKept; ++s) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        AddProducts(x[s], FeaturesOf<kKept>(s, y_rows[i]), sums[i]);
      }
    }
  }

  // Reduces over all lanes, which must call together, and stores values[0] to values[left - 1], at
  // most kAtOnce of them.
  template <class Factors>
  __device__ void StoreSums(Accumulator<T> (&sums)[kAtOnce], const Factors& factors, T* values,
                            unsigned left) const {
    enum { kLanes = kGroup < kAtOnce ? 1 : kGroup / kAtOnce };  // lanes that end with the same sum
    enum { kSums = kGroup < kAtOnce ? kAtOnce / kGroup : 1 };   // sums that a lane ends with
    group.ReduceSpread(sums);
    if (group.lane % kLanes != 0) return;
#pragma unroll
    for (unsigned j = 0; j < kSums; ++j) {
      const unsigned i = group.lane / kLanes * kSums + j;
      if (i < left) {
        Accumulator<T> own[1] = {sums[j]};
        factors.From(i).Multiply(own);
        Narrow(own[0], values[i]);
      }
    }
  }
};

// {<g nnz, c col>, r}: a group owns kNonzeros consecutive nonzeros, whatever their rows.
template <class T, int kNonzeros, int kColumns, int kGroup, int kAtOnce, int kBlock, bool kVector,
          bool kWeighted, bool kScaled>
__global__ void __launch_bounds__(kBlock, BlocksAtOnce(kThreads / kBlock))
    SddmmNnzKernel(const Index* __restrict__ row_offsets, const Index* __restrict__ column_indices,
                   const T* __restrict__ x, const T* __restrict__ y, const T* __restrict__ weights,
                   const Accumulator<T>* __restrict__ scale, T* __restrict__ values, long long m,
                   long long nnz, long long d, long long x_stride, long long y_stride,
                   long long weights_stride, long long scale_stride, long long batches,
                   long long sharing) {
  MoveToStructure(sharing, m, row_offsets, nnz, column_indices);
  const Dots<T, kColumns, kGroup, kAtOnce, kVector> dots{{}, unsigned(d)};
  const Factors<T, kWeighted, kScaled> all_factors{weights, scale};
  const Size first = (Size(blockIdx.x) * kBlock + threadIdx.x) / kGroup * kNonzeros;
  const Size stored = row_offsets[m];
  const bool any = m > 0 && first < stored;  // the same in all lanes of the group
  const unsigned last = unsigned(stored - first < kNonzeros ? stored : first + kNonzeros);
  const Index first_row = any ? RowBetween(row_offsets, 0, unsigned(m), Index(first)) : 0;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    T* out = values + batch * nnz;
    ClearPadding<kBlock>(out, stored, nnz);
    if (!any) continue;
    const T *x_batch = x + batch * x_stride, *y_batch = y + batch * y_stride;
    const auto factors = all_factors.Of(batch, weights_stride, scale_stride);
    unsigned row = first_row;
#pragma unroll 1
    for (unsigned p = unsigned(first); p < last; p += kAtOnce) {
      Index columns[kAtOnce];
      LoadOrLast(column_indices, p, last, columns);
      const T *x_rows[kAtOnce], *y_rows[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const unsigned entry = p + i < last ? p + i : last - 1;
        row = RowFrom(row_offsets, row, unsigned(m), Index(entry));
        x_rows[i] = x_batch + Size(row) * d;
        y_rows[i] = y_batch + Size(unsigned(columns[i])) * d;
      }
      Accumulator<T> sums[kAtOnce] = {};
      dots.Add([&](int i) { return x_rows[i]; }, y_rows, sums);
      dots.StoreSums(sums, factors.From(p), out + p, last - p);
    }
  }
}

// {<x row, c col>, r} and {<1/g row, c col>, r}: kShare groups take the nonzeros of kRows rows, row
// after row. A lane's features of X stay in registers, as kKept loads, for all nonzeros of a row;
// with kKept = 0 they do not fit and are loaded again.
template <class T, int kRows, int kShare, int kColumns, int kGroup, int kKept, int kAtOnce,
          int kBlock, bool kVector, bool kWeighted, bool kScaled>
__global__ void __launch_bounds__(kBlock, BlocksAtOnce(kThreads / kBlock))
    SddmmRowKernel(const Index* __restrict__ row_offsets, const Index* __restrict__ column_indices,
                   const T* __restrict__ x, const T* __restrict__ y, const T* __restrict__ weights,
                   const Accumulator<T>* __restrict__ scale, T* __restrict__ values, long long m,
                   long long nnz, long long d, long long x_stride, long long y_stride,
                   long long weights_stride, long long scale_stride, long long batches,
                   long long sharing) {
  MoveToStructure(sharing, m, row_offsets);
  using Lanes = Dots<T, kColumns, kGroup, kAtOnce, kVector>;
  const Lanes dots{{}, unsigned(d)};
  const Factors<T, kWeighted, kScaled> all_factors{weights, scale};
  const Size group = (Size(blockIdx.x) * kBlock + threadIdx.x) / kGroup;
  const unsigned stride = unsigned(kShare) * kAtOnce, start = unsigned(group % kShare) * kAtOnce;
  const Size first_row = group / kShare * kRows;
  const unsigned end_row = unsigned(first_row + kRows < m ? first_row + kRows : m);
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    T* out = values + batch * nnz;
    ClearPadding<kBlock>(out, row_offsets[m], nnz);
    const T* y_batch = y + batch * y_stride;
    const auto factors = all_factors.Of(batch, weights_stride, scale_stride);
#pragma unroll 1
    for (unsigned row = unsigned(first_row < m ? first_row : m); row < end_row; ++row) {
      const unsigned last = row_offsets[row + 1];
      unsigned p = row_offsets[row] + start;
      if (p >= last) continue;  // the same in all lanes of the group
      const T* x_row = x + batch * x_stride + Size(row) * d;
      typename Lanes::Pack kept[kKept > 0 ? kKept : 1];
#pragma unroll
      for (int s = 0; s < kKept; ++s) kept[s] = dots.template FeaturesOf<kKept>(s, x_row);
      const Index* own_columns = column_indices + StructureHere(sharing) * nnz;
      Index columns[kAtOnce];
      LoadOrLast(own_columns, p, last, columns);
      while (p < last) {
        const T* y_rows[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) y_rows[i] = y_batch + Size(unsigned(columns[i])) * d;
        // The columns of the next round are loaded during this one.
        if constexpr (kKept == 0) own_columns = column_indices + StructureHere(sharing) * nnz;
        LoadOrLast(own_columns, p + stride, last, columns);
        Accumulator<T> sums[kAtOnce] = {};
        if constexpr (kKept > 0) {
          dots.AddKept(kept, y_rows, sums);
        } else {
          dots.Add([&](int) { return x_row; }, y_rows, sums);
        }
        dots.StoreSums(sums, factors.From(p), out + p, last - p);
        p += stride;
      }
    }
  }
}

}  // namespace sgap
