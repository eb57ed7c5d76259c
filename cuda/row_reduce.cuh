// Sums, maxima and copies over the entries of each row, and what all operations on rows share: the
// points {<x row, 1 col>, 1} and {<1/r row, 1 col>, r} of Sgap, section 3.
//
// kGroup  r, lanes that share a row, each taking every r-th entry: neighbours read neighbours
// kRows   rows that a group takes one after the other
//
// Grid: x over the rows, z over products that share the structure. Entries from row_offsets[m] on
// are padding: never read, and zeros in an output of entries. Accumulates in float32, float64 for
// float64, in an order that the structure fixes: the same bits at each call.
#pragma once

#include "group.cuh"

namespace sgap {

// What a group owns: rows begin to end - 1.
template <int kGroup, int kRows, int kBlock>
struct GroupRows {
  Size begin, end;

  __device__ explicit GroupRows(Size m)
      : begin((Size(blockIdx.x) * kBlock + threadIdx.x) / kGroup * kRows),
        end(begin + kRows < m ? begin + kRows : m) {}
};

// Zeros in the padding, which all threads along x share. A launch that zeroed the whole output
// would write it twice.
template <class T>
__device__ inline void ClearPadding(T* out, Size stored, Size nnz) {
  const Size threads = Size(gridDim.x) * blockDim.x;
  for (Size p = stored + Size(blockIdx.x) * blockDim.x + threadIdx.x; p < nnz; p += threads) {
    out[p] = T{};
  }
}

template <class A>
__device__ inline A Least() {
  return -A(__longlong_as_double(0x7ff0000000000000));  // -infinity
}

template <class A>
__device__ inline A Identity(Add) {
  return 0;
}
template <class A>
__device__ inline A Identity(Greater) {
  return Least<A>();
}

// rows[i] = the entries of row i, combined; the identity for an empty row.
template <class T, class Combine, int kGroup, int kRows, int kBlock>
__global__ void __launch_bounds__(kBlock)
    RowReduceKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                    T* __restrict__ rows, long long m, long long nnz, long long products) {
  const Group<kGroup> group;
  const GroupRows<kGroup, kRows, kBlock> own(m);
  for (Size product = blockIdx.z; product < products; product += gridDim.z) {
    const T* entries = values + product * nnz;
#pragma unroll 1
    for (Size row = own.begin; row < own.end; ++row) {
      const unsigned last = row_offsets[row + 1];
      Accumulator<T> total[1] = {Identity<Accumulator<T>>(Combine())};
#pragma unroll 4
      for (unsigned p = row_offsets[row] + group.lane; p < last; p += kGroup) {
        total[0] = Combine()(total[0], Widen(entries[p]));
      }
      group.template Reduce<Combine>(total);
      if (group.lane == 0) Narrow(total[0], rows[product * m + row]);
    }
  }
}

// values[p] = rows[row of p]
template <class T, int kGroup, int kRows, int kBlock>
__global__ void __launch_bounds__(kBlock)
    RowBroadcastKernel(const T* __restrict__ rows, const Index* __restrict__ row_offsets,
                       T* __restrict__ values, long long m, long long nnz, long long products) {
  const Group<kGroup> group;
  const GroupRows<kGroup, kRows, kBlock> own(m);
  for (Size product = blockIdx.z; product < products; product += gridDim.z) {
    T* entries = values + product * nnz;
#pragma unroll 1
    for (Size row = own.begin; row < own.end; ++row) {
      const T value = rows[product * m + row];
      const unsigned last = row_offsets[row + 1];
      for (unsigned p = row_offsets[row] + group.lane; p < last; p += kGroup) entries[p] = value;
    }
    ClearPadding(entries, row_offsets[m], nnz);
  }
}

}  // namespace sgap
