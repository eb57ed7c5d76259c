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

enum { kLoads = 4 };  // entries that a lane reads at once

// Entries of a row, kGroup apart, in a lane's registers: the loads are in flight together, which
// those of a loop that may end after each are not.
template <class T, int kGroup, int kKept>
struct Window {
  enum { kEntries = kGroup * kKept };

  Accumulator<T> at[kKept];

  // `left` entries from the first on belong to the row; `absent` stands for the others.
  __device__ void Read(const T* entries, unsigned left, Accumulator<T> absent) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      at[j] = j * kGroup < left ? Widen(entries[j * kGroup]) : absent;
    }
  }

  __device__ void Write(T* entries, unsigned left) const {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      if (j * kGroup < left) Narrow(at[j], entries[j * kGroup]);
    }
  }
};

// What a group owns: rows begin to end - 1.
template <int kGroup, int kRows, int kBlock>
struct GroupRows {
  Size begin, end;

  __device__ explicit GroupRows(Size m)
      : begin((Size(blockIdx.x) * kBlock + threadIdx.x) / kGroup * kRows),
        end(begin + kRows < m ? begin + kRows : m) {}
};

// A row as a lane sees it: its first entry, and how many there are from that one to the last.
struct LaneRow {
  unsigned first, left, length;

  __device__ LaneRow(const Index* row_offsets, Size row, unsigned lane) {
    const unsigned begin = row_offsets[row], end = row_offsets[row + 1];
    length = end - begin;
    first = begin + lane;
    left = first < end ? end - first : 0;
  }
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
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    RowReduceKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                    T* __restrict__ rows, long long m, long long nnz, long long products) {
  const Group<kGroup> group;
  const GroupRows<kGroup, kRows, kBlock> own(m);
  const auto identity = Identity<Accumulator<T>>(Combine());
  for (Size product = blockIdx.z; product < products; product += gridDim.z) {
#pragma unroll 1
    for (Size row = own.begin; row < own.end; ++row) {
      const LaneRow lane(row_offsets, row, group.lane);
      const T* entries = values + product * nnz + lane.first;
      Accumulator<T> total[1] = {identity};
      Window<T, kGroup, kLoads> window;
#pragma unroll 1
      for (unsigned p = 0; p < lane.left; p += window.kEntries) {
        window.Read(entries + p, lane.left - p, identity);
#pragma unroll
        for (auto entry : window.at) total[0] = Combine()(total[0], entry);
      }
      group.template Reduce<Combine>(total);
      if (group.lane == 0) Narrow(total[0], rows[product * m + row]);
    }
  }
}

// values[p] = rows[row of p]
template <class T, int kGroup, int kRows, int kBlock>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    RowBroadcastKernel(const T* __restrict__ rows, const Index* __restrict__ row_offsets,
                       T* __restrict__ values, long long m, long long nnz, long long products) {
  const Group<kGroup> group;
  const GroupRows<kGroup, kRows, kBlock> own(m);
  for (Size product = blockIdx.z; product < products; product += gridDim.z) {
    T* entries = values + product * nnz;
#pragma unroll 1
    for (Size row = own.begin; row < own.end; ++row) {
      const LaneRow lane(row_offsets, row, group.lane);
      const T value = rows[product * m + row];
      for (unsigned p = 0; p < lane.left; p += kGroup) entries[lane.first + p] = value;
    }
    ClearPadding(entries, row_offsets[m], nnz);
  }
}

}  // namespace sgap
