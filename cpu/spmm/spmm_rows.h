// The inner loop of spmm_kernel.cc on some rows and one block of columns. Tile: a register tile of
// kVectors vectors of y takes one broadcast and kVectors multiply-adds per entry.
#pragma once

#include "cpu/simd/gather.h"
#include "cpu/spmm/column_tiles.h"

namespace sgap::SGAP_ISA {

// A run of consecutive rows and a block of consecutive columns; x and y point at the block's first
// column. X: the type of x, T or Accumulator<T>.
template <typename T, typename X>
struct RowBlock {
  const int32_t* offsets;  // of the rows, and one more
  int64_t rows;
  const int32_t* indices;
  int64_t last_entry;            // of the whole matrix: how far prefetching may look
  const Accumulator<T>* values;  // values[p - first_entry] is entry p's
  int64_t first_entry;
  const T* own_values;  // of entry 0, for loops that read them as they are
  const X* x;
  T* y;
  int64_t x_stride, y_stride;  // from one row to the next
  int tail;                    // columns in the last vector, where it is not full
  Accumulator<T>* carry;  // not null: add to these sums of the only row instead of storing to y

  // Of loops that look at indices themselves: they are to be below `size`, of entries before
  // `entry_end`. Where one is not, `wrong` is set, and the results mean nothing.
  uint32_t size;
  int64_t entry_end;
  bool* wrong;
};

// How rows of x that are not in the second-level cache are prefetched.
enum class Ahead {
  kNothing,
  kRows,    // every line
  kStarts,  // the first quarter of the lines: the processor goes on by itself
};

template <typename T, typename X, int kWidth, int kVectors, bool kTail>
struct Tile {
  using Sum = Vector<Accumulator<T>, kWidth>;

  // How many entries ahead rows of x are prefetched: against 16, 32 gained up to 1.14x on blocks of
  // up to 8 vectors and lost on wider ones. Starts of rows are always 16 ahead: measured on Intel
  // Xeon (family 6 model 167), products of graphs took 0.80 to 0.95 of the time of every line.
  template <Ahead kAhead>
  static constexpr int64_t kPrefetchEntries = kAhead == Ahead::kRows && kVectors <= 8 ? 32 : 16;

  static constexpr int kWhole = kTail ? kVectors - 1 : kVectors;  // vectors

  // Row `index` of x; kAdjacent: rows are next to each other and have no other columns.
  template <bool kAdjacent>
  static const X* RowOf(const X* x, size_t index, size_t stride) {
    if constexpr (kAdjacent) return x + index * (kVectors * kWidth);
    // With an index in their addresses, Intel splits each multiply-add in two.
    return KeptPointer(x + index * stride);
  }

  // The value may be in all lanes of a vector.
  template <typename Value>
  static void MultiplyAdd(Value value, const X* x, int tail, Sum* sums) {
    Sum row[kVectors];
    LoadApart<X, kWidth, kWhole>(x, row);
    if (kTail) row[kWhole] = LoadPartial<X, kWidth>(x + kWhole * kWidth, tail);
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) sums[i] += value * row[i];
  }

  static void Finish(const RowBlock<T, X>& block, Sum* sums, T* y) {
    InOrder<X, kWhole>(sums);
    FinishInOrder(block, sums, y);
  }

  static void FinishInOrder(const RowBlock<T, X>& block, const Sum* sums, T* y) {
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

  // Prefetches the row of x of the entry kPrefetchEntries later, be it of a following row of A.
  template <Ahead kAhead>
  static void PrefetchX(const RowBlock<T, X>& block, int64_t p, size_t stride) {
    if (kAhead == Ahead::kNothing) return;
    constexpr int64_t kEntries = kPrefetchEntries<kAhead>;
    constexpr size_t kBytes = kVectors * kWidth * sizeof(X) / (kAhead == Ahead::kRows ? 1 : 4);
    const int64_t ahead = p + kEntries < block.last_entry ? p + kEntries : block.last_entry;
    const char* row =
        reinterpret_cast<const char*>(block.x + size_t(block.indices[ahead]) * stride);
#pragma GCC unroll 16
    for (size_t i = 0; i < kBytes; i += 64) Prefetch(row + i);
  }

  // Independent chains of sums, so that some 8 multiply-adds are under way (a latency of 4
  // cycles, two begin in each). Rows of fewer entries than 4 * kChains have one chain: there the
  // processor overlaps neighbouring rows.
  static constexpr int kChains = kVectors <= 2 ? 4 : kVectors <= 4 ? 2 : 1;

  template <Ahead kAhead>
  static void Run(const RowBlock<T, X>& block) {
    RunRows<kAhead, false, false>(block, block.rows);
  }
  // Long rows, of one register without a tail.
  static void RunAdjacent(const RowBlock<T, X>& block) {
    RunRows<Ahead::kNothing, false, true>(block, block.rows);
  }

  // The same sums where row lengths are hard to predict: of the last kMaskedEntries of a row those
  // after its end are read and dropped. That a row has more is easier to predict than how many it
  // has.
  static constexpr int kMaskedEntries = 8;
  static void RunMasked(const RowBlock<T, X>& block) {
    int64_t inside = block.carry ? 0 : block.rows;  // after these, what is read ends in the task
    while (inside > 0 && block.entry_end - block.offsets[inside] < kMaskedEntries) --inside;
    RunRows<Ahead::kNothing, true, false>(block, inside);
    RowBlock<T, X> rest = block;
    rest.offsets += inside, rest.rows -= inside, rest.y += inside * block.y_stride;
    Run<Ahead::kNothing>(rest);
  }

 private:
  template <Ahead kAhead, bool kMasked, bool kAdjacent>
  static void RunRows(const RowBlock<T, X>& block, int64_t rows) {
    const X* const x = block.x;
    const int32_t* const indices = block.indices;
    const Accumulator<T>* const values = block.values - block.first_entry;
    const size_t stride = block.x_stride;
    const int tail = block.tail;
    T* y = block.y;
    int64_t p = block.offsets[0];
    const auto add = [=, &block](int64_t p, Sum* sums) __attribute__((always_inline)) {
      PrefetchX<kAhead>(block, p, stride);
      MultiplyAdd(values[p], RowOf<kAdjacent>(x, uint32_t(indices[p]), stride), tail, sums);
    };
    // The entries p to p + 3, with two loads of indices and one of values.
    const auto add_four = [=](int64_t p, Sum(*chains)[kVectors]) __attribute__((always_inline)) {
      static_assert(!kAdjacent || (kChains == 4 && kAhead == Ahead::kNothing));
      uint64_t pairs[2];
      __builtin_memcpy(pairs, indices + p, sizeof(pairs));
      const auto four = Kept(LoadRepeated<Accumulator<T>, kWidth, 4>(values + p));
      const auto row = [&](size_t index) { return RowOf<true>(x, index, stride); };
      MultiplyAdd(OneOfFour<0>(four), row(uint32_t(pairs[0])), tail, chains[0]);
      MultiplyAdd(OneOfFour<1>(four), row(pairs[0] >> 32), tail, chains[1]);
      MultiplyAdd(OneOfFour<2>(four), row(uint32_t(pairs[1])), tail, chains[2]);
      MultiplyAdd(OneOfFour<3>(four), row(pairs[1] >> 32), tail, chains[3]);
    };
    for (int64_t r = 0; r < rows; ++r, y += block.y_stride) {
      const int64_t end = block.offsets[r + 1];
      Sum sums[kVectors] = {};
      if (kChains > 1 && end - p >= 4 * kChains) {
        Sum chains[kChains][kVectors] = {};
        for (; p + kChains <= end; p += kChains) {
          if constexpr (kAdjacent) {
            add_four(p, chains);
          } else {
#pragma GCC unroll 4
            for (int c = 0; c < kChains; ++c) add(p + c, chains[c]);
          }
        }
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) {
          sums[i] = chains[0][i];
#pragma GCC unroll 4
          for (int c = 1; c < kChains; ++c) sums[i] += chains[c][i];
        }
      }
      if constexpr (kMasked) {
        for (; end - p > kMaskedEntries; p += 4) {
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) add(p + i, sums);
        }
        using Index = std::conditional_t<sizeof(Accumulator<T>) == 4, int32_t, int64_t>;
        const auto left = Vector<Index, kWidth>{} + Index(end - p);
#pragma GCC unroll 8
        for (int i = 0; i < kMaskedEntries; ++i) {
          Sum more[kVectors];
#pragma GCC unroll 16
          for (int j = 0; j < kVectors; ++j) more[j] = sums[j];
          add(p + i, more);
#pragma GCC unroll 16
          for (int j = 0; j < kVectors; ++j) sums[j] = left > i ? more[j] : sums[j];
        }
        p = end;
      }
      for (; p < end; ++p) add(p, sums);
      Finish(block, sums, y);
    }
  }
};

}  // namespace sgap::SGAP_ISA
