// SpMM on rows x one block of columns, the inner loops of spmm_kernel.cc: a register tile of
// kVectors vectors of y takes one broadcast and kVectors multiply-adds per entry.
#pragma once

#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {

// A run of consecutive rows and a block of consecutive columns; x and y point at the block's first
// column.
template <typename T>
struct RowBlock {
  const int32_t* offsets;  // of the rows, and one more
  int64_t rows;
  const int32_t* indices;
  int64_t last_entry;            // of the whole matrix: how far prefetching may look
  const Accumulator<T>* values;  // values[p - first_entry] is entry p's; products in NarrowTile
  int64_t first_entry;
  const T* x;
  T* y;
  int64_t x_stride, y_stride;  // from one row to the next
  int tail;                    // columns in the last vector, where it is not full
  Accumulator<T>* carry;  // not null: add to these sums of the only row instead of storing to y
};

template <typename T, int kWidth, int kVectors, bool kTail>
struct Tile {
  using Sum = Vector<Accumulator<T>, kWidth>;

  // Rows of x are asked for this many entries ahead: against 16, 32 gained up to 1.14x on blocks of
  // up to 8 vectors and lost on wider ones.
  static constexpr int64_t kPrefetchEntries = kVectors <= 8 ? 32 : 16;

  static Sum LoadX(const T* x, int vector, int tail) {
    if (kTail && vector == kVectors - 1) return LoadPartial<T, kWidth>(x + vector * kWidth, tail);
    return Load<T, kWidth>(x + vector * kWidth);
  }

  static void MultiplyAdd(Accumulator<T> value, const T* x, int tail, Sum* sums) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) sums[i] += value * LoadX(x, i, tail);
  }

  static void Finish(const RowBlock<T>& block, const Sum* sums, T* y) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      const int at = i * kWidth;
      if (block.carry) {
        Store<Accumulator<T>, kWidth>(block.carry + at,
                                      sums[i] + Load<Accumulator<T>, kWidth>(block.carry + at));
      } else if (kTail && i == kVectors - 1) {
        StorePartial<T, kWidth>(y + at, sums[i], block.tail);
      } else {
        Store<T, kWidth>(y + at, sums[i]);
      }
    }
  }

  // Asks for the row of x that comes kPrefetchEntries later; entries of following rows are next in
  // memory.
  static void PrefetchX(const RowBlock<T>& block, int64_t p, size_t stride) {
    const int64_t ahead =
        p + kPrefetchEntries < block.last_entry ? p + kPrefetchEntries : block.last_entry;
    const char* row =
        reinterpret_cast<const char*>(block.x + size_t(block.indices[ahead]) * stride);
#pragma GCC unroll 16
    for (size_t i = 0; i < kVectors * kWidth * sizeof(T); i += 64) Prefetch(row + i);
  }

  template <bool kPrefetch>
  static void Run(const RowBlock<T>& block) {
    // Chains of dependent additions short enough to hide the latency of a multiply-add (4 cycles,
    // two a cycle); rows too short for that overlap with their neighbours instead.
    constexpr int kChains = (kVectors <= 2 ? 4 : kVectors <= 4 ? 2 : 1);
    const T* const x = block.x;
    const int32_t* const indices = block.indices;
    const Accumulator<T>* const values = block.values - block.first_entry;
    const size_t stride = block.x_stride;
    const int tail = block.tail;
    T* y = block.y;
    int64_t p = block.offsets[0];
    for (int64_t r = 0; r < block.rows; ++r, y += block.y_stride) {
      const int64_t end = block.offsets[r + 1];
      Sum sums[kVectors] = {};
      if (kChains > 1 && end - p >= 4 * kChains) {
        Sum chains[kChains][kVectors] = {};
        for (; p + kChains <= end; p += kChains) {
#pragma GCC unroll 4
          for (int c = 0; c < kChains; ++c) {
            if (kPrefetch) PrefetchX(block, p + c, stride);
            MultiplyAdd(values[p + c], x + size_t(indices[p + c]) * stride, tail, chains[c]);
          }
        }
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) {
          sums[i] = chains[0][i];
#pragma GCC unroll 4
          for (int c = 1; c < kChains; ++c) sums[i] += chains[c][i];
        }
      }
      for (; p < end; ++p) {
        if (kPrefetch) PrefetchX(block, p, stride);
        MultiplyAdd(values[p], x + size_t(indices[p]) * stride, tail, sums);
      }
      Finish(block, sums, y);
    }
  }
};

}  // namespace sgap::SGAP_ISA
