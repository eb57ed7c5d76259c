// The inner loops of spmm_cvs_kernel.cc: kRows x kVectors vectors of y stay in registers while each
// loaded vector of x serves kRows multiply-adds, the register blocking of a dense product.
#pragma once

#include "simd.h"

namespace sgap::SGAP_ISA {

// Registers for sums: the rest hold vectors of x and a broadcast value.
constexpr int kSumRegisters = kVectorBytes == 64 ? 24 : 12;

// Rows of x are asked for this many vectors ahead.
constexpr int64_t kAheadVectors = 8;

// The vectors [begin, end) of one block row, kRows of their rows and a block of columns.
template <typename T>
struct VectorBlock {
  const int32_t* indices;
  int64_t begin, end;
  int64_t last;     // of all vectors: how far prefetching may look
  const T* values;  // of vector `begin`, at the first of the rows
  int64_t length;   // V, from one vector to the next
  const T* x;       // at the block's first column
  int64_t x_stride;
  int tail;              // columns in the last vector, where it is not full
  int64_t rows;          // to store: the rest is past the end of the matrix
  T* y;                  // the first row at the first column, or null:
  Accumulator<T>* sums;  // then here
  int64_t out_stride;
};

template <typename T, int kVectors, bool kTail>
struct VectorTile {
  static constexpr int kWidth = kLanes<T>;
  using Acc = Accumulator<T>;
  using Sum = Vector<Acc, kWidth>;

  static Sum LoadX(const T* x, int i, int tail) {
    if (kTail && i == kVectors - 1) return LoadPartial<T, kWidth>(x + i * kWidth, tail);
    return Load<T, kWidth>(x + i * kWidth);
  }

  static void PrefetchX(const VectorBlock<T>& block, int64_t p) {
    const int64_t ahead = p + kAheadVectors < block.last ? p + kAheadVectors : block.last;
    const char* row = reinterpret_cast<const char*>(block.x + size_t(block.indices[ahead]) *
                                                                  size_t(block.x_stride));
#pragma GCC unroll 16
    for (size_t i = 0; i < kVectors * kWidth * sizeof(T); i += 64) Prefetch(row + i);
  }

  template <int kRows>
  static void Run(const VectorBlock<T>& block) {
    Sum sums[kRows][kVectors] = {};
    const T* values = block.values;
    const size_t stride = block.x_stride;
    for (int64_t p = block.begin; p < block.end; ++p, values += block.length) {
      PrefetchX(block, p);
      const T* x = block.x + size_t(block.indices[p]) * stride;
      Sum row[kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) row[i] = LoadX(x, i, block.tail);
      const Wide<kRows> value(values);
#pragma GCC unroll 8
      for (int v = 0; v < kRows; ++v) {
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) sums[v][i] += value[v] * row[i];
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kRows; ++v) {
      if (v >= block.rows) break;
      if (block.y) {
        StoreRow(block.y + v * block.out_stride, sums[v], block.tail);
      } else {
        StoreRow(block.sums + v * block.out_stride, sums[v], block.tail);
      }
    }
  }

 private:
  // The values of a vector as accumulators: in memory as they are, or widened at once.
  template <int kRows>
  struct Wide {
    Acc buffer[sizeof(T) < 4 ? kRows : 1];
    const Acc* at;

    explicit Wide(const T* values) {
      if constexpr (sizeof(T) >= 4) {
        at = values;
      } else if constexpr (kRows == 1) {
        buffer[0] = LoadScalar(values);
        at = buffer;
      } else {
        Store<Acc, kRows>(buffer, Load<T, kRows>(values));
        at = buffer;
      }
    }
    Acc operator[](int v) const { return at[v]; }
  };

  template <typename Out>
  static void StoreRow(Out* out, const Sum* sums, int tail) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      if (kTail && i == kVectors - 1) {
        StorePartial<Out, kWidth>(out + i * kWidth, sums[i], tail);
      } else {
        Store<Out, kWidth>(out + i * kWidth, sums[i]);
      }
    }
  }
};

}  // namespace sgap::SGAP_ISA
