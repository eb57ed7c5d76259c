// The extremum of the messages of each row of CSR, and the entry that attains it: gspmm with a
// maximum or minimum, for the points {<x row, c col>, 1} and {<1/r row, c col>, r} of Sgap, section
// 6.
//
// add        messages are x + value, else x * value
// minimum    the result is the minimum, else the maximum; a NaN counts as the extremum
// kGroup     r, lanes that share a row, each taking every r-th entry
// kWalk      rows that a group takes in turn: x, or worker_dim_r
// kColumns, kChunks, kBlock, kVector, kPermuted and the grid: see spmm.cuh
//
// `add` and `minimum` are arguments of the kernel, not template parameters, so that one program
// serves all messages. Reported positions are places in the values, also where these are permuted;
// -1 in a row without entries.
#pragma once

#include "spmm.cuh"

namespace sgap {

template <bool kVector, class T, int kColumns>
__device__ inline void StoreColumns(T* row, unsigned left, const Pack<T, kColumns>& pack) {
  if constexpr (kVector) {
    *reinterpret_cast<Pack<T, kColumns>*>(row) = pack;
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (j < left) row[j] = pack.at[j];
    }
  }
}

// A message and the position of its entry; a negative position means that there is none yet.
template <class A>
struct Found {
  A message = 0;
  Index at = -1;
};

// Whether `other` replaces `found`: it is better, or equal and earlier. The result does not depend
// on the order in which the entries of a row are compared.
template <class A>
__device__ inline bool TakesPlace(const Found<A>& other, const Found<A>& found, bool minimum) {
  if (other.at < 0 || found.at < 0) return other.at >= 0;
  const bool nan = other.message != other.message;
  if (nan != (found.message != found.message)) return nan;
  if (nan || other.message == found.message) return other.at < found.at;
  return minimum ? other.message < found.message : other.message > found.message;
}

template <class T, int kGroup, int kWalk, int kColumns, int kChunks, int kBlock, bool kVector,
          bool kPermuted>
__global__ void __launch_bounds__(kBlock, BlocksOfSums(kBlock, SumBytes<T, kColumns, true>()))
    GspmmRowKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                   const Index* __restrict__ column_indices, const Index* __restrict__ permutation,
                   const T* __restrict__ x, T* __restrict__ y, Index* __restrict__ arg, long long m,
                   long long n, long long values_stride, long long x_stride, long long batches,
                   long long add, long long minimum, long long capacity, long long sharing) {
  MoveToStructure(sharing, m, row_offsets, capacity, column_indices, permutation);
  using A = Accumulator<T>;
  const Place<kGroup, kColumns, kChunks, kBlock> place;
  const Group<kGroup> group;
  const bool inside = place.column < n;
  const unsigned left = unsigned(n) - place.column;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const T* own_values = values + batch * values_stride;
    const T* own_x = x + batch * x_stride + place.column;
#pragma unroll 1
    for (int step = 0; step < kWalk; ++step) {
      const Size row = place.worker * kWalk + step;
      const bool valid = inside && row < m;  // the same in all lanes of the group
      const unsigned last = valid ? row_offsets[row + 1] : 0;
      Found<A> found[kColumns];
#pragma unroll 2
      for (unsigned p = (valid ? row_offsets[row] : 0) + group.lane; p < last; p += kGroup) {
        const Index at = kPermuted ? permutation[p] : Index(p);
        const A value = Widen(own_values[at]);
        const auto pack =
            Load<kVector, kColumns>(own_x + Size(unsigned(column_indices[p])) * n, left);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const A number = Widen(pack.at[j]), message = add ? number + value : number * value;
          const Found<A> other{message, at};
          if (TakesPlace(other, found[j], minimum)) found[j] = other;
        }
      }
#pragma unroll
      for (int distance = kGroup / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const Found<A> other{__shfl_xor_sync(group.mask, found[j].message, distance, kGroup),
                               __shfl_xor_sync(group.mask, found[j].at, distance, kGroup)};
          if (TakesPlace(other, found[j], minimum)) found[j] = other;
        }
      }
      if (!valid || group.lane != 0) continue;
      Pack<T, kColumns> messages;
      Pack<Index, kColumns> positions;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        Narrow(found[j].message, messages.at[j]);
        positions.at[j] = found[j].at;
      }
      const Size to = (batch * m + row) * n + place.column;
      StoreColumns<kVector>(y + to, left, messages);
      StoreColumns<kVector>(arg + to, left, positions);
    }
  }
}

}  // namespace sgap
