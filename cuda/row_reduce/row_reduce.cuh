// Sums, maxima and copies over the entries of each row, and what all operations on rows share: the
// points {<x row, 1 col>, 1} and {<1/r row, 1 col>, r} of Sgap, section 3.
//
// kGroup   r, lanes that share a row, each taking every r-th entry: neighbours read neighbours
// kRows    rows that a group takes one after the other
// kLength  V of column vectors, 1 for entries
//
// Values of column vectors are [vectors, V], number j of a vector of block row b being of row
// b V + j; the offsets are those of block rows. As many rows of a block as fit in a warp lie side
// by side (SideBySide): lanes that differ in the row read consecutive numbers of a vector.
//
// Grid: x over the rows, z over products that share the structure. Vectors from the last offset on
// are padding, as are rows past the end of the matrix: never read, and zeros in an output of
// values. Accumulates in float32, float64 for float64, in an order that the structure fixes: the
// same bits at each call.
#pragma once

#include "group.cuh"

namespace sgap {

enum { kLoads = 4 };  // entries that a lane reads at once

// Rows of a vector that groups of a warp take side by side: a power of two that divides V.
__device__ constexpr int SideBySide(int length, int group) {
  int side = 1;
  while (2 * side * group <= 32 && length % (2 * side) == 0) side *= 2;
  return side;
}

template <int kGroup, int kLength>
using RowGroup = Group<kGroup, SideBySide(kLength, kGroup)>;

// Entries of a row, kGroup vectors apart, in a lane's registers: the loads are in flight together,
// which those of a loop that may end after each are not.
template <class T, int kGroup, int kKept, int kLength>
struct Window {
  enum { kEntries = kGroup * kKept, kStride = kGroup * kLength };

  Accumulator<T> at[kKept];

  // `left` entries from the first on belong to the row; `absent` stands for the others.
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

// What groups side by side own: so many rows each, from row begin * kSide to end * kSide - 1.
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

// A row as a lane sees it: its first number, and how many there are from that one to the last; none
// of a row past the end of the matrix.
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

// Zeros in the padding, which all threads along x share. A launch that zeroed the whole output
// would write it twice.
template <int kLength, class T>
__device__ inline void ClearPadding(T* out, const Index* row_offsets, Size m, Size numbers) {
  const Size threads = Size(gridDim.x) * blockDim.x;
  const Size thread = Size(blockIdx.x) * blockDim.x + threadIdx.x;
  const Size block_rows = (m + kLength - 1) / kLength;
  const Size stored = Size(unsigned(row_offsets[block_rows])) * kLength;
  for (Size p = stored + thread; p < numbers; p += threads) out[p] = T{};
  const unsigned last = m % kLength;  // rows of the last vectors, 0 where all of them exist
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
                    T* __restrict__ rows, long long m, long long nnz, long long products) {
  const RowGroup<kGroup, kLength> group;
  const GroupRows<kGroup, kRows, kBlock, kLength> own(m);
  const auto identity = Identity<Accumulator<T>>(Combine());
  for (Size product = blockIdx.z; product < products; product += gridDim.z) {
#pragma unroll 1
    for (Size rows_at = own.begin; rows_at < own.end; ++rows_at) {
      const LaneRow<kLength> lane(row_offsets, rows_at, m, group);
      const T* entries = values + product * nnz + lane.first;
      Accumulator<T> total[1] = {identity};
      Window<T, kGroup, kLoads, kLength> window;
#pragma unroll 1
      for (unsigned p = 0; p < lane.left; p += window.kEntries) {
        window.Read(entries + Size(p) * kLength, lane.left - p, identity);
#pragma unroll
        for (auto entry : window.at) total[0] = Combine()(total[0], entry);
      }
      group.template Reduce<Combine>(total);
      if (group.lane == 0 && lane.Exists(m)) Narrow(total[0], rows[product * m + lane.row]);
    }
  }
}

// values[p] = rows[row of p]
template <class T, int kGroup, int kRows, int kBlock, int kLength>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    RowBroadcastKernel(const T* __restrict__ rows, const Index* __restrict__ row_offsets,
                       T* __restrict__ values, long long m, long long nnz, long long products) {
  const RowGroup<kGroup, kLength> group;
  const GroupRows<kGroup, kRows, kBlock, kLength> own(m);
  for (Size product = blockIdx.z; product < products; product += gridDim.z) {
    T* entries = values + product * nnz;
#pragma unroll 1
    for (Size rows_at = own.begin; rows_at < own.end; ++rows_at) {
      const LaneRow<kLength> lane(row_offsets, rows_at, m, group);
      const T value = lane.Exists(m) ? rows[product * m + lane.row] : T{};
      for (unsigned p = 0; p < lane.left; p += kGroup) {
        entries[lane.first + Size(p) * kLength] = value;
      }
    }
    ClearPadding<kLength>(entries, row_offsets, m, nnz);
  }
}

}  // namespace sgap
