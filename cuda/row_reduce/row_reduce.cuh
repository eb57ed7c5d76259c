// Sums and maxima over the entries of each row, copies of a row's value to its entries, and the
// helpers that all row operations share, for the points {<x row, 1 col>, 1} and {<1/r row, 1 col>,
// r} of Sgap, section 3.
//
// kGroup   r, lanes that share a row, each taking every r-th entry: neighbours read neighbours
// kRows    rows that a group takes one after the other
// kLength  V of column vectors, 1 for entries
//
// Values of column vectors are [vectors, V], where value j of a vector of block row b belongs to
// row b V + j; the offsets are those of block rows. As many rows of a block row as fit in a warp
// are interleaved (SideBySide): lanes of different rows read consecutive values of a vector.
//
// Grid: x over the rows, z over the batch. Vectors from the last offset on, and rows past the end
// of the matrix, are padding: never read, and zero in an output of values. Accumulates in float32,
// float64 for float64, in an order that the structure fixes: deterministic.
#pragma once

#include "group.cuh"

namespace sgap {

enum { kLoads = 4 };  // entries that a lane reads at once

// Rows of a vector that the groups of a warp take, interleaved: a power of two that divides V.
__device__ constexpr int SideBySide(int length, int group) {
  int side = 1;
  while (2 * side * group <= 32 && length % (2 * side) == 0) side *= 2;
  return side;
}

template <int kGroup, int kLength>
using RowGroup = Group<kGroup, SideBySide(kLength, kGroup)>;

// Entries of a row, kGroup vectors apart, in a lane's registers: the trip count is fixed, so that
// all loads are in flight together. In a loop that may end after each entry they would not be.
template <class T, int kGroup, int kKept, int kLength>
struct Window {
  enum { kEntries = kGroup * kKept, kStride = kGroup * kLength };

  Accumulator<T> at[kKept];

  // Reads the window; `left` entries belong to the row, and the others become `absent`.
  __device__ void Read(const T* entries, unsigned left, Accumulator<T> absent) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      at[j] = j * kGroup < left ? Widen(entries[j * kStride]) : absent;
    }
  }

  __device__ void Write(T* entries, unsigned left) const {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      if (j * kGroup < left) Narrow(at[j], entries[j * kStride]);
    }
  }
};

// The rows that interleaved groups own: begin * kSide to end * kSide - 1.
template <int kGroup, int kRows, int kBlock, int kLength>
struct GroupRows {
  enum { kSide = SideBySide(kLength, kGroup) };
  Size begin, end;

  __device__ explicit GroupRows(Size m)
      : begin((Size(blockIdx.x) * kBlock + threadIdx.x) / (kGroup * kSide) * kRows) {
    const Size rows = (m + kSide - 1) / kSide;
    end = begin + kRows < rows ? begin + kRows : rows;
  }
};

// A row as a lane sees it: the position of its first value, and how many remain from there; none
// for a row past the end of the matrix.
template <int kLength>
struct LaneRow {
  Size row, first;
  unsigned left, length;

  template <int kGroup, int kSide>
  __device__ LaneRow(const Index* row_offsets, Size rows, Size m, const Group<kGroup, kSide>& group)
      : row(rows * kSide + group.side) {
    const unsigned begin = row_offsets[row / kLength], end = row_offsets[row / kLength + 1];
    const unsigned vector = begin + group.lane;
    length = end - begin;
    first = Size(vector) * kLength + row % kLength;
    left = vector < end && Exists(m) ? end - vector : 0;
  }

  __device__ bool Exists(Size m) const { return kLength == 1 || row < m; }
};

// Zeroes the padding, with all threads along x. If the launch zeroed the whole output, it would be
// written twice.
template <int kLength, class T>
__device__ inline void ClearPadding(T* out, const Index* row_offsets, Size m, Size capacity) {
  const Size threads = Size(gridDim.x) * blockDim.x;
  const Size thread = Size(blockIdx.x) * blockDim.x + threadIdx.x;
  const Size block_rows = (m + kLength - 1) / kLength;
  const Size stored = Size(unsigned(row_offsets[block_rows])) * kLength;
  for (Size p = stored + thread; p < capacity; p += threads) out[p] = T{};
  const unsigned last = m % kLength;  // rows that the last block row has, 0 if all V exist
  if (last == 0) return;
  Size p = Size(unsigned(row_offsets[block_rows - 1])) * kLength + thread;
  for (; p < stored; p += threads) {
    if (p % kLength >= last) out[p] = T{};
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
template <class T, class Combine, int kGroup, int kRows, int kBlock, int kLength>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    RowReduceKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                    T* __restrict__ rows, long long m, long long nnz, long long batches,
                    long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets);
  const RowGroup<kGroup, kLength> group;
  const GroupRows<kGroup, kRows, kBlock, kLength> own(m);
  const auto identity = Identity<Accumulator<T>>(Combine());
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
#pragma unroll 1
    for (Size rows_at = own.begin; rows_at < own.end; ++rows_at) {
      const LaneRow<kLength> lane(row_offsets, rows_at, m, group);
      const T* entries = values + batch * nnz + lane.first;
      Accumulator<T> total[1] = {identity};
      Window<T, kGroup, kLoads, kLength> window;
#pragma unroll 1
      for (unsigned p = 0; p < lane.left; p += window.kEntries) {
        window.Read(entries + Size(p) * kLength, lane.left - p, identity);
#pragma unroll
        for (auto entry : window.at) total[0] = Combine()(total[0], entry);
      }
      group.template Reduce<Combine>(total);
      if (group.lane == 0 && lane.Exists(m)) Narrow(total[0], rows[batch * m + lane.row]);
    }
  }
}

// values[p] = rows[row of p]
template <class T, int kGroup, int kRows, int kBlock, int kLength>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    RowBroadcastKernel(const T* __restrict__ rows, const Index* __restrict__ row_offsets,
                       T* __restrict__ values, long long m, long long nnz, long long batches,
                       long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets);
  const RowGroup<kGroup, kLength> group;
  const GroupRows<kGroup, kRows, kBlock, kLength> own(m);
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    T* entries = values + batch * nnz;
#pragma unroll 1
    for (Size rows_at = own.begin; rows_at < own.end; ++rows_at) {
      const LaneRow<kLength> lane(row_offsets, rows_at, m, group);
      const T value = lane.Exists(m) ? rows[batch * m + lane.row] : T{};
      for (unsigned p = 0; p < lane.left; p += kGroup) {
        entries[lane.first + Size(p) * kLength] = value;
      }
    }
    ClearPadding<kLength>(entries, row_offsets, m, nnz);
  }
}

}  // namespace sgap
