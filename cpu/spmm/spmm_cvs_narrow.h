// The inner loops of spmm_cvs_kernel.cc for few columns, which would leave most lanes of a vector
// empty: rows of a vector are lanes too.
#pragma once

#include "cpu/simd/gather.h"
#include "cpu/simd/lane_sums.h"
#include "cpu/spmm/spmm_cvs_rows.h"

namespace sgap::SGAP_ISA {

// Up to how many columns a lane for each row takes fewer multiply-adds than one for each column.
constexpr int64_t kNarrowColumns = 4;

// How far ahead values are prefetched: eight lines of 16 bits. A load of a part of a line that is
// on its way from the second-level cache is tried again, and with it what waits for it: on Intel
// (Xeon, family 6 model 167) products with vectors of 8 rows and one column took 0.7 of the time on
// one core, and those of float32, with half as many loads for each line, no less.
constexpr int64_t kAheadValues = 256;

// y = A x: kColumns columns, kRows rows of each vector in the lanes.
template <typename T, typename X, int kRows, int kColumns, bool kAhead>
struct LaneTile {
  using Acc = Accumulator<T>;
  using Sum = Vector<Acc, kRows>;

  static void Add(const VectorBlock<T, X>& block, int64_t p, Sum* sums) {
    const Sum value = Load<T, kRows>(block.values + p * block.length);
    const X* x = block.x + size_t(block.indices[p]) * size_t(block.x_stride);
    const WideValues<X, kColumns> columns(x);
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) sums[c] += value * columns[c];
  }

  template <typename Out>
  static void StoreColumns(const VectorBlock<T, X>& block, const Sum* sums, Out* out) {
    if (kColumns == 1 && block.out_stride == 1 && block.rows >= kRows) {
      return Store<Out, kRows>(out, sums[0]);
    }
    Out rounded[kColumns][kRows];  // those of a row are rounded together
    for (int c = 0; c < kColumns; ++c) Store<Out, kRows>(rounded[c], sums[c]);
    for (int v = 0; v < kRows && v < block.rows; ++v, out += block.out_stride) {
      for (int c = 0; c < kColumns; ++c) out[c] = rounded[c][v];
    }
  }

  static void Run(const VectorBlock<T, X>& shared) {
    const VectorBlock<T, X> block = shared;
    constexpr int kChains = kSumsInFlight / kColumns > 4 ? 4 : kSumsInFlight / kColumns;
    Sum sums[kChains][kColumns] = {};
    int64_t p = block.begin;
    for (; p + kChains <= block.end; p += kChains) {
      if (kAhead) Prefetch(block.values + p * block.length + kAheadValues);
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) Add(block, p + c, sums[c]);
    }
    for (; p < block.end; ++p) Add(block, p, sums[0]);
    for (int chain = 1; chain < kChains; ++chain) {
      for (int c = 0; c < kColumns; ++c) sums[0][c] += sums[chain][c];
    }
    if (block.y) {
      StoreColumns(block, sums[0], block.y);
    } else {
      StoreColumns(block, sums[0], block.sums);
    }
  }
};

// y = A x with four columns: registers that hold four rows of them, value i of a vector in the
// lanes 4i to 4i + 3, beside the row of x again and again. kRows is a multiple of 4. With vectors
// of 8 rows that took 0.87 of the time of LaneTile (float16 0.89, bfloat16 0.82; one core of an
// Intel Xeon, family 6 model 167), with its bits.
template <typename T, typename X, int kRows>
struct QuadTile {
  static constexpr int kParts = kRows / 4;
  static constexpr int kChains = kSumsInFlight / 4;
  using Acc = Accumulator<T>;
  using Sum = Vector<Acc, 16>;

  static void Add(const VectorBlock<T, X>& block, int64_t p, Sum* sums) {
    const Sum row = LoadRowRepeated<X, 16>(block.x + size_t(block.indices[p]) * 4);
    Sum values[kParts];
    LoadLanes4<T, kParts>(block.values + p * block.length, values);
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) sums[i] += values[i] * row;
  }

  // Rows of four columns follow each other.
  template <typename Out>
  static void StoreRows(const Sum* sums, int64_t rows, Out* out) {
    if (rows >= kRows) {
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) Store<Out, 16>(out + 16 * i, sums[i]);
      return;
    }
    const auto* sum = reinterpret_cast<const Acc*>(sums);
    for (int64_t v = 0; v < rows; ++v) Store<Out, 4>(out + 4 * v, Load<Acc, 4>(sum + 4 * v));
  }

  static void Run(const VectorBlock<T, X>& shared) {
    const VectorBlock<T, X> block = shared;
    Sum sums[kChains][kParts] = {};
    int64_t p = block.begin;
    for (; p + kChains <= block.end; p += kChains) {
#pragma GCC unroll 2
      for (int c = 0; c < kChains; ++c) Add(block, p + c, sums[c]);
    }
    for (; p < block.end; ++p) Add(block, p, sums[0]);
    for (int c = 1; c < kChains; ++c) {
      for (int i = 0; i < kParts; ++i) sums[0][i] += sums[c][i];
    }
    if (block.y) {
      StoreRows(sums[0], block.rows, block.y);
    } else {
      StoreRows(sums[0], block.rows, block.sums);
    }
  }
};

// y = A x with one column or four and vectors of two rows, four of which are added at once: a
// register holds all of them or, of four columns, half. Against one at a time, the columns in the
// lanes, that took 0.33 to 0.37 of the time with one column and 0.42 to 0.47 with four (the same
// Xeon) and 0.4 to 0.85 of whole calls on Zen 4, with the bits of the same float32 sums.
template <typename T, typename X, int kColumns>
struct TwoRowTile {
  static constexpr int kSets = kColumns == 1 ? 1 : 2;
  // Whether each second four has a sum of its own. Of 16 bits and one column that took 0.76 to 0.80
  // of the time; float32 keeps its bits.
  static constexpr bool kTwice = sizeof(T) == 2 && kColumns == 1;
  using Acc = Accumulator<T>;
  using Sum = Vector<Acc, 8 * kColumns / kSets>;
  using Rows = Vector<Acc, kColumns == 1 ? 4 : 8>;  // of one vector, and with one column two more

  // Adds the products of four vectors.
  static void AddFour(const VectorBlock<T, X>& block, const T* values, int64_t p, Sum* sums) {
    if constexpr (kColumns == 1) {
      sums[0] += LoadEight(values) * GatherEight<X, 2>(block.x, block.indices + p);
    } else {
      const auto row = [&](int i) { return block.x + size_t(block.indices[p + i]) * 4; };
      Sum lanes[2];
      LoadLanes4<T, 2>(values, lanes);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        sums[i] += lanes[i] * LoadTwoRowsRepeated<X>(row(2 * i), row(2 * i + 1));
      }
    }
  }

  template <typename Out>
  static void StoreRows(Rows total, int64_t rows, Out* out) {
    if constexpr (kColumns == 1) {
      StorePartial<Out, 4>(out, total, rows < 2 ? 1 : 2);
    } else if (rows < 2) {
      Store<Out, 4>(out, Half<Acc, 8>(total, 0));
    } else {
      Store<Out, 8>(out, total);
    }
  }

  static void Run(const VectorBlock<T, X>& shared) {
    const VectorBlock<T, X> block = shared;
    Sum sums[kSets] = {};
    int64_t p = block.begin;
    const T* values = block.values + 2 * p;
    if constexpr (kTwice) {
      Sum others{};
      for (; p + 8 <= block.end; p += 8, values += 16) {
        AddFour(block, values, p, sums);
        AddFour(block, values + 8, p + 4, &others);
      }
      sums[0] += others;
    }
    for (; p + 4 <= block.end; p += 4, values += 8) {
      AddFour(block, values, p, sums);
    }
    Rows parts[4];  // of four vectors
    if constexpr (kColumns == 1) {
      for (int i = 0; i < 2; ++i) {
        parts[2 * i] = Half<Acc, 8>(sums[0], i);
        parts[2 * i + 1] = Shuffle<2, 3, 0, 1>(parts[2 * i], parts[2 * i]);
      }
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) parts[i] = Half<Acc, 16>(sums[i / 2], i % 2);
    }
    for (; p < block.end; ++p, values += 2) {
      const X* x = block.x + size_t(block.indices[p]) * kColumns;
      const Acc first = LoadScalar(values), second = LoadScalar(values + 1);
      if constexpr (kColumns == 1) {
        parts[0] += Rows{first, second} * LoadScalar(x);
      } else {
        parts[0] += Concat<Acc, 4>(first - Vector<Acc, 4>{}, second - Vector<Acc, 4>{}) *
                    LoadRowRepeated<X, 8>(x);
      }
    }
    const Rows total = ((parts[0] + parts[1]) + parts[2]) + parts[3];
    if (block.y) {
      StoreRows(total, block.rows, block.y);
    } else {
      StoreRows(total, block.rows, block.sums);
    }
  }
};

// y = A^T x with 2, 4 or 8 columns and vectors of 4 * kParts rows: four rows of x, which follow
// each other, in one register or two, each beside its value. The lanes are the sums of
// TransposedTile, in the same order where that takes no pairs. Of its time on Zen 4, with vectors
// of 8 and 16 rows at 90% sparsity: 0.35 to 0.55 with two columns and with four, 0.6 to 0.95 with
// eight; of 4 rows 0.55 to 0.85, and 1.0 to 1.3 with eight, which go without it. On the same Xeon
// four columns took 0.31 to 0.34 with vectors of 8 rows; two and eight were not measured there.
template <typename T, typename X, int kColumns, int kParts>
struct TransposedFourTile {
  static constexpr int kRegisters = kColumns == 8 ? 2 : 1;
  static constexpr int kWidth = 4 * kColumns / kRegisters;
  using Acc = Accumulator<T>;
  using Sum = Vector<Acc, kWidth>;
  using Row = Vector<Acc, kColumns>;

  static void AddFour(const T* values, const X* x, Sum* sums) {
    Sum lanes[kRegisters];
    LoadFourRepeated<T, kColumns>(values, lanes);
#pragma GCC unroll 2
    for (int i = 0; i < kRegisters; ++i) sums[i] += lanes[i] * Load<X, kWidth>(x + i * kWidth);
  }

  // Adds the products of a whole vector. With four columns LoadLanes4 takes all of its values at
  // once, and widens those of float16 together.
  static void AddVector(const T* values, const X* x, Sum* sums) {
    if constexpr (kColumns == 4) {
      Sum lanes[kParts];
      LoadLanes4<T, kParts>(values, lanes);
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) sums[0] += lanes[i] * Load<X, 16>(x + 16 * i);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) AddFour(values + 4 * i, x + 4 * kColumns * i, sums);
    }
  }

  static void Run(const VectorBlock<T, X>& shared) {
    const VectorBlock<T, X> block = shared;
    Sum sums[kRegisters] = {};
    Row quarters[4] = {};
    for (int64_t p = block.begin; p < block.end; ++p) {
      const typename TransposedTile<T, X, 1, true>::Met met(block, p);
      if (__builtin_expect(met.rows == 4 * kParts, true)) {
        AddVector(met.values, met.x, sums);
        continue;
      }
      int64_t v = 0;  // the last block row is short
      for (; v + 4 <= met.rows; v += 4) AddFour(met.values + v, met.x + kColumns * v, sums);
      __builtin_memcpy(quarters, &sums, sizeof(sums));
      for (; v < met.rows; ++v) {
        quarters[0] += LoadScalar(met.values + v) * Load<X, kColumns>(met.x + kColumns * v);
      }
      __builtin_memcpy(&sums, quarters, sizeof(sums));
    }
    __builtin_memcpy(quarters, &sums, sizeof(sums));
    const Row total = ((quarters[0] + quarters[1]) + quarters[2]) + quarters[3];
    if (block.y) {
      Store<T, kColumns>(block.y, total);
    } else {
      Store<Acc, kColumns>(block.sums, total);
    }
  }
};

// y = A^T x on the only column of x: a vector and its rows of x are both contiguous. V is a
// multiple of kRows.
template <typename T, typename X, int kRows>
struct DotTile {
  using Acc = Accumulator<T>;
  using Sum = Vector<Acc, kRows>;

  static void Add(const VectorBlock<T, X>& block, int64_t p, Sum* sum, Acc* rest) {
    const int64_t first = block.indices[p] * block.length, left = block.x_rows - first;
    const X* x = block.x + first;
    const T* values = block.values + size_t(block.permutation[p]) * size_t(block.length);
    if (left < block.length) {  // the last block row is short
      for (int64_t v = 0; v < left; ++v) *rest += LoadScalar(values + v) * LoadScalar(x + v);
      return;
    }
    for (int64_t v = 0; v < block.length; v += kRows) {
      *sum += Load<T, kRows>(values + v) * Load<X, kRows>(x + v);
    }
  }

  static void Run(const VectorBlock<T, X>& shared) {
    const VectorBlock<T, X> block = shared;
    Sum sums[4] = {};
    Acc rest = 0;
    int64_t p = block.begin;
    for (; p + 4 <= block.end; p += 4) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) Add(block, p + c, sums + c, &rest);
    }
    for (; p < block.end; ++p) Add(block, p, sums, &rest);
    const auto four = FoldLanes<4, Acc, kRows>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    const Acc total = ((four[0] + four[2]) + (four[1] + four[3])) + rest;
    if (block.y) {
      StoreScalar(block.y, total);
    } else {
      *block.sums = total;
    }
  }
};

}  // namespace sgap::SGAP_ISA
