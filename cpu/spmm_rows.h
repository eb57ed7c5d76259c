// SpMM on rows x one block of columns, the inner loops of spmm_kernel.cc: a register tile of
// kVectors vectors of y takes one broadcast and kVectors multiply-adds per entry.
#pragma once

#include "simd.h"

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
  int64_t stride;         // of x and y: the number of columns of the whole
  int tail;               // columns in the last vector, where it is not full
  Accumulator<T>* carry;  // not null: add to these sums of the only row instead of storing to y
};

// Rows of x are asked for this many entries ahead.
constexpr int64_t kPrefetchEntries = 16;

template <typename T, int kWidth, int kVectors, bool kTail>
struct Tile {
  using Sum = Vector<Accumulator<T>, kWidth>;

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
    const size_t stride = block.stride;
    const int tail = block.tail;
    T* y = block.y;
    int64_t p = block.offsets[0];
    for (int64_t r = 0; r < block.rows; ++r, y += stride) {
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

// Up to 4 columns: first the products of a run of entries, kSlots each, without a branch on row
// ends; then the rows' sums from that buffer, in vectors of several entries.
template <typename T, int kSlots>
struct NarrowTile {
  using Acc = Accumulator<T>;
  static constexpr int kWidth = kLanes<Acc> < 4 ? 4 : kLanes<Acc>;
  static constexpr int kEntries = kWidth / kSlots;  // in one vector

  // Entries multiplied together.
  static constexpr int kGroup = kSlots == 1 ? 4 : kEntries;

  template <bool kPermuted>
  static Vector<Acc, kGroup> Values(const T* values, const int32_t* permutation, int64_t p) {
    if constexpr (kPermuted) return Gather<T, kGroup>(values, permutation + p);
    return Load<T, kGroup>(values + p);
  }

  // products[i * kSlots + c] = value(begin + i) * x[indices[begin + i], c]
  template <bool kPermuted>
  static void Multiply(const RowBlock<T>& block, const T* values, const int32_t* permutation,
                       int64_t begin, int64_t end, Acc* products) {
    const int32_t* indices = block.indices;
    const T* x = block.x;
    const size_t stride = block.stride;
    const int tail = block.tail;
    int64_t p = begin;
    const auto row = [&](int64_t entry) {
      const T* at = x + size_t(indices[entry]) * stride;
      return tail ? LoadPartial<T, 4>(at, tail) : Load<T, 4>(at);
    };
    for (; p + kGroup <= end; p += kGroup, products += kGroup * kSlots) {
      const auto value = Values<kPermuted>(values, permutation, p);
      if constexpr (kSlots == 1) {
        Store<Acc, 4>(products, value * Gather<T, 4>(x, indices + p));
      } else if constexpr (kGroup == 4) {
        const auto low = Concat<Acc, 4>(row(p), row(p + 1));
        const auto high = Concat<Acc, 4>(row(p + 2), row(p + 3));
        Store<Acc, 16>(products, RepeatLanes4<Acc, 4>(value) * Concat<Acc, 8>(low, high));
      } else if constexpr (kGroup == 2) {
        Store<Acc, 8>(products, RepeatLanes4<Acc, 2>(value) * Concat<Acc, 4>(row(p), row(p + 1)));
      } else {
        Store<Acc, 4>(products, value[0] * row(p));
      }
    }
    for (; p < end; ++p, products += kSlots) {
      const Acc value = LoadScalar(values + (kPermuted ? permutation[p] : p));
      if constexpr (kSlots == 1) {
        *products = value * LoadScalar(x + size_t(indices[p]));
      } else {
        Store<Acc, 4>(products, value * row(p));
      }
    }
  }

  // The sum of the vectors at `at`, of which the first `lanes` lanes count.
  static Vector<Acc, kWidth> Sum(const Acc* at, int64_t lanes) {
    if (lanes <= kWidth) return FirstLanes<Acc, kWidth>(Load<Acc, kWidth>(at), lanes);
    Vector<Acc, kWidth> sums[4] = {};
    for (; lanes > 4 * kWidth; lanes -= 4 * kWidth, at += 4 * kWidth) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[i] += Load<Acc, kWidth>(at + i * kWidth);
    }
    // Parts past the end are read and dropped: cheaper than a branch that is hard to predict.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      sums[i] += FirstLanes<Acc, kWidth>(Load<Acc, kWidth>(at + i * kWidth), lanes - i * kWidth);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  static void Run(const RowBlock<T>& block) {
    T* y = block.y;
    int64_t p = block.offsets[0];
    for (int64_t r = 0; r < block.rows; ++r, y += block.stride) {
      const int64_t end = block.offsets[r + 1];
      const auto sum = Sum(block.values + (p - block.first_entry) * kSlots, (end - p) * kSlots);
      p = end;
      const auto four = FoldLanes<4, Acc, kWidth>(sum);
      if constexpr (kSlots == 1) {
        const Acc total = (four[0] + four[2]) + (four[1] + four[3]);
        if (block.carry) {
          *block.carry += total;
        } else {
          StoreScalar(y, total);
        }
      } else if (block.carry) {
        Store<Acc, 4>(block.carry, four + Load<Acc, 4>(block.carry));
      } else if (block.tail) {
        StorePartial<T, 4>(y, four, block.tail);
      } else {
        Store<T, 4>(y, four);
      }
    }
  }

  // What Sum may read past the last product.
  static constexpr int kPadding = 4 * kWidth;
};

}  // namespace sgap::SGAP_ISA
