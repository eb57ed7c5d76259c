// The inner loops of spmm_cvs_kernel.cc. VectorTile: kRows x kVectors vectors of y stay in
// registers while each loaded vector of x serves kRows multiply-adds, the register blocking of a
// dense product; TransposedTile: the same for the transpose. LaneTile and DotTile: few columns,
// which would leave most lanes of a vector empty, so the V rows of a vector are the lanes instead.
#pragma once

#include "cpu/common/machine.h"
#include "cpu/simd/pairs.h"
#include "cpu/spmm/spmm.h"

namespace sgap::SGAP_ISA {

// Registers for sums: the rest hold vectors of x and a broadcast value.
constexpr int kSumRegisters = kVectorBytes == 64 ? 24 : 12;

// How many vectors ahead rows of x are prefetched.
constexpr int64_t kAheadVectors = 8;

// Rows of few columns are not prefetched where all of x has so few bytes: on Zen 4 those of one
// vector of pairs (8 and 16 columns take 0.7 to 0.9 of the time then), on Zen 5 those of up to two
// vectors (8 to 32 columns: V = 2 0.81 to 1.0, V = 4 0.88 to 0.98, V = 8 0.92 to 1.01; 64 up to
// 1.07), on Intel all (32 to 128 columns, 0.86 to 1.0; with 1 MB of x it would be 1.1). With V = 2
// Zen 5 does without prefetching whatever x has, in one vector, or two of pairs (0.85 to 0.95; more
// columns, or V >= 4, took up to 1.6).
constexpr int64_t kNearBytes = 256 << 10;

inline bool Prefetches(int64_t length, int64_t columns, int64_t lanes, bool in_pairs,
                       int64_t bytes) {
  const Machine& machine = ThisMachine();
  if (OnZen5() && length == 2 && columns <= (in_pairs ? 2 : 1) * lanes) return false;
  const bool whole = kVectorBytes == 64 && machine.whole;
  const bool few = whole ? columns <= 2 * lanes : in_pairs && columns <= lanes;
  return (!few && !machine.intel) || bytes > kNearBytes;
}

// Multiply-adds in flight that hide the latency of one (4 cycles, two a cycle).
constexpr int kSumsInFlight = 8;

// A pass takes so many rows of a vector or, if fewer are left, the largest power of two that fits.
constexpr int kMaxRows = 8;

// How many vectors have their 16-bit values widened in one go, for one pass over the columns and
// for several that share them, and how many have them paired. Multiples of the sets of sums.
constexpr int kStagedVectors = 128, kSharedVectors = 512;
constexpr int kPairedVectors = 64;

template <typename T, int kMost>
struct StagedValues;

// The vectors [begin, end) of one row of tasks, some of its rows of y and a block of columns. X:
// the type of x, T or Accumulator<T>.
template <typename T, typename X>
struct VectorBlock {
  const int32_t* indices;
  const int32_t* permutation;  // of the transpose, else null
  int64_t begin, end;
  int64_t last;     // of all vectors: how far prefetching may look
  const T* values;  // of vector 0, at the first of the rows
  int64_t length;   // V, from one vector to the next
  const X* x;       // at the block's first column
  int64_t x_rows, x_stride;
  bool prefetches;       // rows of x, as Prefetches() says
  int tail;              // columns in the last vector, where it is not full
  int64_t rows;          // to store: the rest is past the end of the matrix
  T* y;                  // the first row at the first column, or null:
  Accumulator<T>* sums;  // then here
  int64_t out_stride;
  StagedValues<T, kSharedVectors>* staged;
};

// The values of a vector as accumulators, each read, and widened, where it is used.
template <typename T>
struct ScalarValues {
  const T* at;
  explicit ScalarValues(const T* values) : at(values) {}
  Accumulator<T> operator[](int v) const { return LoadScalar(at + v); }
};

// The 16-bit values of kRows rows of a vector, all widened before they are used.
template <typename T, int kRows>
struct WidenedValues {
  using Acc = Accumulator<T>;
  Acc buffer[kRows < 4 ? 4 : kRows];

  explicit WidenedValues(const T* values) {
    if constexpr (kRows == 1) {
      buffer[0] = LoadScalar(values);
    } else if constexpr (kRows < 4) {
      Store<Acc, 4>(buffer, LoadPartial<T, 4>(values, kRows));
    } else {
      Store<Acc, kRows>(buffer, Load<T, kRows>(values));
    }
    // Else the compiler repeats each value by shuffles; a load repeats it for nothing.
    if constexpr (kRows > 1) asm("" : "+m"(buffer));
  }
  Acc operator[](int v) const { return buffer[v]; }
};

template <typename T, int kRows>
using WideValues = std::conditional_t<sizeof(T) == 2, WidenedValues<T, kRows>, ScalarValues<T>>;

// `count` values as accumulators, of which as many as fill a register may be written. Those `ahead`
// are prefetched: of loads in bursts the processor sees no stream.
template <typename T, int kWidth = kLanes<T>>
void WidenNeighbours(const T* values, int64_t count, int64_t ahead, Accumulator<T>* wide) {
  using Acc = Accumulator<T>;
  if (count < kWidth) {
    if (count > 0) Store<Acc, kWidth>(wide, LoadPartial<T, kWidth>(values, int(count)));
    return;
  }
  const auto widen = [&](int64_t i) { Store<Acc, kWidth>(wide + i, Load<T, kWidth>(values + i)); };
  constexpr int kLine = 64 / sizeof(T);
  int64_t i = 0;
  for (; i + kLine <= count; i += kLine) {
    Prefetch(values + i + ahead);
#pragma GCC unroll 8
    for (int j = 0; j < kLine; j += kWidth) widen(i + j);
  }
  for (; i + kWidth <= count; i += kWidth) widen(i);
  if (i < count) widen(count - kWidth);  // the last ones, some for the second time
}

// Of `count` vectors, each `length` after the one before, kRows values as accumulators. Where they
// follow each other, as many as fill whole registers may be written.
template <typename T, int kRows>
void WidenValues(const T* values, int64_t length, int64_t count, Accumulator<T>* wide) {
  using Acc = Accumulator<T>;
  const int64_t ahead = kStagedVectors * length;
  if (length == kRows) return WidenNeighbours(values, count * kRows, ahead, wide);
  for (int64_t i = 0; i < count; ++i, values += length, wide += kRows) {
    Prefetch(values + ahead);
    if constexpr (kRows >= 4) {
      Store<Acc, kRows>(wide, Load<T, kRows>(values));
    } else {
      for (int v = 0; v < kRows; ++v) wide[v] = LoadScalar(values + v);
    }
  }
}

// A window of 16-bit values that are widened ahead, in one go for as many block rows as it reaches:
// always of equally many vectors, because how many a row has is hard to predict. There is room for
// kMost of them.
template <typename T, int kMost>
struct StagedValues {
  bool shared = false;    // by several passes: it then takes kMost vectors, else kStagedVectors
  const T* of = nullptr;  // value 0
  int rows = 0;           // of a vector
  int64_t begin = 0, end = 0;
  alignas(64) Accumulator<T> wide[sizeof(T) < 4 ? kMost * kMaxRows : 1];

  // Those of vector p. Returns how many of the vectors [p, stop) are there; all, if they are few.
  // There are `vectors` in all, more than p.
  template <int kRows>
  int64_t Reach(const T* values, int64_t length, int64_t vectors, int64_t p, int64_t stop) {
    if (of != values || rows != kRows || p < begin || stop > end) {
      const int64_t most = shared ? kMost : kStagedVectors, left = vectors - p;
      const int64_t count = left < most ? left : most;
      WidenValues<T, kRows>(values + p * length, length, count, wide);
      of = values;
      rows = kRows;
      begin = p;
      end = p + count;
    }
    return (stop < end ? stop : end) - p;
  }
  template <int kRows>
  const Accumulator<T>* At(int64_t p) const {
    return wide + (p - begin) * kRows;
  }
};

// Whether a pass over kRows rows and kVectors registers of columns takes 16-bit values from the
// window. Else it widens those of each vector where it uses them.
// - Registers of less than 64 bytes: always. Loads that repeat a value wait where the vector that
//   holds it has just been stored: without, products with vectors of 8 rows took 1.6 to 1.9 times
//   as long as those of float32 (measured on Zen 3).
// - Fewer than 8 rows: always, as a register has the values of several vectors. In float16 products
//   of V = 2 with 1 and 4 columns took 0.8 of the time, with 32 0.95 (Zen 4).
// - 8 rows: with one register of columns (V = 8 and 16, 0.87 of the time; with two 1.06), where
//   passes share the window (V = 8, 128 columns, 0.98; all on Zen 4), and elsewhere: on Intel
//   (V = 8, 32 to 256 columns, 0.9 to 0.97; Granite Rapids) and on Zen 5 (V = 8, 32 columns, 0.9;
//   V = 16, 32 and 64, 0.86).
template <typename T, int kRows, int kVectors>
bool WidensAhead(bool shared) {
  if constexpr (sizeof(T) != 2) return false;
  if constexpr (kVectorBytes < 64 || kRows < 8 || kVectors == 1) return true;
  return shared || ThisMachine().whole;
}

// A row of kVectors vectors of x or y; where products go in pairs, two rows of x.
template <typename T, typename X, int kVectors, bool kTail>
struct VectorRow {
  static constexpr int kWidth = kLanes<T>;
  static constexpr bool kPaired = kInPairs<X>;
  static constexpr int kRowsOfX = kPaired ? 2 : 1;
  using Sum = Vector<Accumulator<T>, kWidth>;
  using Value = std::conditional_t<kPaired, uint32_t, Accumulator<T>>;
  using Piece = std::conditional_t<kPaired, Pairs, Sum>;

  static Sum LoadX(const X* x, int i, int tail) {
    if (kTail && i == kVectors - 1) return LoadPartial<X, kWidth>(x + i * kWidth, tail);
    return Load<X, kWidth>(x + i * kWidth);
  }

  // A row of x, in the order of LoadApart.
  static constexpr int kWhole = kTail ? kVectors - 1 : kVectors;
  static void LoadRow(const X* x, int tail, Sum* row) {
    LoadApart<X, kWidth, kWhole>(x, row);
    if (kTail) row[kWhole] = LoadX(x, kWhole, tail);
  }

  // What stands for the second row of x where there is none.
  static const X* NoRow() {
    if constexpr (kPaired) return kZeroRow;
    return nullptr;
  }

  // One row of x or, in pairs, two. Their sums are in order after Finish.
  static void LoadRows(const X* x, [[maybe_unused]] const X* second, int tail, Piece* row) {
    if constexpr (kPaired) {
      LoadPairs<kVectors, kTail, /*kInOrder=*/false>(x, second, tail, row);
    } else {
      LoadRow(x, tail, row);
    }
  }

  [[gnu::always_inline]] static Sum PlusProduct(Sum sum, Value value, Piece x) {
    if constexpr (kPaired) {
      return DotPairs(sum, Pairs{} + value, x);
    } else {
      return sum + value * x;
    }
  }

  [[gnu::always_inline]] static void AddProducts(Value value, const Piece* row, Sum* sums) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) sums[i] = PlusProduct(sums[i], value, row[i]);
  }

  template <typename Out>
  static void StoreRow(Out* out, const Sum* sums, int tail) {
    if constexpr (kPaired && kVectors % 2 == 0 && !kTail) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i += 2) StoreTwo<Out>(out + i * kWidth, sums[i], sums[i + 1]);
      return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      if (kTail && i == kVectors - 1) {
        StorePartial<Out, kWidth>(out + i * kWidth, sums[i], tail);
      } else {
        Store<Out, kWidth>(out + i * kWidth, sums[i]);
      }
    }
  }

  // Row v of the block.
  static void Finish(const VectorBlock<T, X>& block, int v, Sum* sums) {
    if constexpr (kPaired) {
      PanelsInOrder<kVectors>(sums);
    } else {
      InOrder<X, kWhole>(sums);
    }
    if (block.y) {
      StoreRow(block.y + v * block.out_stride, sums, block.tail);
    } else {
      StoreRow(block.sums + v * block.out_stride, sums, block.tail);
    }
  }
};

// y = A x: kRows rows of each vector.
template <typename T, typename X, int kVectors, bool kTail>
struct VectorTile : VectorRow<T, X, kVectors, kTail> {
  using Row = VectorRow<T, X, kVectors, kTail>;
  using typename Row::Sum;
  static constexpr int kStep = Row::kRowsOfX;  // vectors whose products are added at once

  static void PrefetchX(const VectorBlock<T, X>& block, int64_t p) {
    const int64_t ahead = p + kAheadVectors < block.last ? p + kAheadVectors : block.last;
    const char* row = reinterpret_cast<const char*>(block.x + size_t(block.indices[ahead]) *
                                                                  size_t(block.x_stride));
#pragma GCC unroll 16
    for (size_t i = 0; i < kVectors * Row::kWidth * sizeof(X); i += 64) Prefetch(row + i);
  }

  // Vectors p up to p + kStep; not kWhole: there may be fewer.
  template <int kRows, bool kWhole, typename Values>
  static void Add(const VectorBlock<T, X>& block, int64_t p, const Values& value,
                  Sum (*sums)[kVectors]) {
    const bool prefetch = block.prefetches;
    const auto row_of = [&](int64_t p) {
      return block.x + size_t(block.indices[p]) * size_t(block.x_stride);
    };
    const X* second = Row::NoRow();
    if (prefetch) PrefetchX(block, p);
    if (kStep == 2 && (kWhole || p + 1 < block.end)) {
      if (prefetch) PrefetchX(block, p + 1);
      second = row_of(p + 1);
    }
    typename Row::Piece row[kVectors];
    Row::LoadRows(row_of(p), second, block.tail, row);
#pragma GCC unroll 8
    for (int v = 0; v < kRows; ++v) Row::AddProducts(value[v], row, sums[v]);
  }

  template <int kRows>
  static constexpr int kChains =
      kRows * kVectors >= kSumsInFlight        ? 1
      : kSumsInFlight / (kRows * kVectors) > 4 ? 4
                                               : kSumsInFlight / (kRows * kVectors);

  // Adds `count` vectors from p on; value_of(i) is what number i of them multiplies with.
  template <int kRows, typename ValueOf>
  [[gnu::always_inline]] static inline void AddAll(const VectorBlock<T, X>& block, int64_t p,
                                                   int64_t count, ValueOf value_of,
                                                   Sum (*sums)[kRows][kVectors]) {
    constexpr int kSets = kChains<kRows>, kStride = kSets * kStep;
    int64_t i = 0;
    for (; i + kStride <= count; i += kStride) {
#pragma GCC unroll 4
      for (int c = 0; c < kSets; ++c) {
        Add<kRows, true>(block, p + i + c * kStep, value_of(i + c * kStep), sums[c]);
      }
    }
    for (; kStride > 1 && i < count; i += kStep) {
      Add<kRows, false>(block, p + i, value_of(i), sums[0]);
    }
  }

  template <int kRows>
  static void Run(const VectorBlock<T, X>& shared) {
    const VectorBlock<T, X> block = shared;  // a copy: stores cannot change it
    Sum sums[kChains<kRows>][kRows][kVectors] = {};
    if constexpr (Row::kPaired) {
      alignas(64) typename Row::Value paired[kPairedVectors / kStep * kRows];
      for (int64_t p = block.begin; p < block.end; p += kPairedVectors) {
        const int64_t left = block.end - p, count = left < kPairedVectors ? left : kPairedVectors;
        PairValues<kRows>(block.values + p * block.length, block.length, count, paired);
        const auto value_of = [&](int64_t i) { return paired + i / kStep * kRows; };
        AddAll<kRows>(block, p, count, value_of, sums);
      }
    } else if (WidensAhead<T, kRows, kVectors>(block.staged->shared)) {
      for (int64_t p = block.begin; p < block.end;) {
        const int64_t count = block.staged->template Reach<kRows>(block.values, block.length,
                                                                  block.last + 1, p, block.end);
        const Accumulator<T>* values = block.staged->template At<kRows>(p);
        AddAll<kRows>(block, p, count, [&](int64_t i) { return values + i * kRows; }, sums);
        p += count;
      }
    } else {
      const auto value_of = [&](int64_t i) {
        return WideValues<T, kRows>(block.values + (block.begin + i) * block.length);
      };
      AddAll<kRows>(block, block.begin, block.end - block.begin, value_of, sums);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kRows; ++v) {
#pragma GCC unroll 4
      for (int c = 1; c < kChains<kRows>; ++c) {
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) sums[0][v][i] += sums[c][v][i];
      }
      if (v < block.rows) Row::Finish(block, v, sums[0][v]);
    }
  }
};

// y = A^T x: each vector is a row vector, and meets V rows of x that follow each other.
template <typename T, typename X, int kVectors, bool kTail>
struct TransposedTile : VectorRow<T, X, kVectors, kTail> {
  using Row = VectorRow<T, X, kVectors, kTail>;
  using typename Row::Sum;

  // To each of kSums sums the product of one row, or of a pair, of `rows` that are left.
  template <int kSums>
  static void Add(const VectorBlock<T, X>& block, const T* values, const X* x,
                  [[maybe_unused]] int64_t rows, Sum (*sums)[kVectors]) {
    if constexpr (Row::kPaired) {
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i, values += 2, x += 2 * block.x_stride, rows -= 2) {
        typename Row::Piece row[kVectors];
        Row::LoadRows(x, rows > 1 ? x + block.x_stride : Row::NoRow(), block.tail, row);
        Row::AddProducts(LoadPair(values, rows), row, sums[i]);
      }
    } else {
      // One by one where a stored vector of them would be waited for.
      constexpr bool kOneByOne = sizeof(T) == 2 && kVectorBytes < 64;
      const std::conditional_t<kOneByOne, ScalarValues<T>, WideValues<T, kSums>> value(values);
#pragma GCC unroll 4
      for (int v = 0; v < kSums; ++v, x += block.x_stride) {
        Sum row[kVectors];
        Row::LoadRow(x, block.tail, row);
        Row::AddProducts(value[v], row, sums[v]);
      }
    }
  }

  static constexpr int kChains = kVectors <= 2 ? 4 : kVectors == 4 ? 2 : 1;
  static constexpr int kRows = kChains * Row::kRowsOfX;

  // A vector, and the rows of x that it meets.
  struct Met {
    const T* values;
    const X* x;
    int64_t rows;

    Met(const VectorBlock<T, X>& block, int64_t p) {
      const int64_t first = block.indices[p] * block.length, left = block.x_rows - first;
      rows = block.length < left ? block.length : left;
      x = block.x + size_t(first) * size_t(block.x_stride);
      values = block.values + size_t(block.permutation[p]) * size_t(block.length);
    }
  };

  // Short vectors of 16-bit values, as many at a time as there are sums, each to one of them; of
  // one value in pairs, where products go in pairs. Returns where it stopped.
  static int64_t AddShort(const VectorBlock<T, X>& block, Sum (*sums)[kVectors]) {
    int64_t p = block.begin;
    if constexpr (Row::kPaired) {
      if (block.length == 1) {
        for (; p + 2 * kChains <= block.end; p += 2 * kChains) {
#pragma GCC unroll 4
          for (int c = 0; c < kChains; ++c) {
            const Met first(block, p + 2 * c), second(block, p + 2 * c + 1);
            typename Row::Piece row[kVectors];
            Row::LoadRows(first.x, second.x, block.tail, row);
            const uint32_t pair = first.values->bits | uint32_t(second.values->bits) << 16;
            Row::AddProducts(pair, row, sums[c]);
          }
        }
        return p;
      }
    }
    for (; p + kChains <= block.end; p += kChains) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        const Met met(block, p + c);
        for (int64_t v = 0; v < met.rows; v += Row::kRowsOfX) {
          Add<1>(block, met.values + v, met.x + v * block.x_stride, met.rows - v, sums + c);
        }
      }
    }
    return p;
  }

  static void Run(const VectorBlock<T, X>& shared) {
    const VectorBlock<T, X> block = shared;
    Sum sums[kChains][kVectors] = {};
    int64_t p = block.begin;
    if constexpr (sizeof(T) == 2) {
      if (block.length < kRows) p = AddShort(block, sums);
    }
    for (; p < block.end; ++p) {
      const Met met(block, p);
      int64_t v = 0;
      for (; v + kRows <= met.rows; v += kRows) {
        Add<kChains>(block, met.values + v, met.x + v * block.x_stride, kRows, sums);
      }
      for (; kRows > 1 && v < met.rows; v += Row::kRowsOfX) {
        Add<1>(block, met.values + v, met.x + v * block.x_stride, met.rows - v, sums);
      }
    }
#pragma GCC unroll 4
    for (int c = 1; c < kChains; ++c) {
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) sums[0][i] += sums[c][i];
    }
    Row::Finish(block, 0, sums[0]);
  }
};

// Adds the pieces of a split row in their order, so that bits do not depend on which thread came
// last.
template <typename T>
void CombinePieces(const SpmmArgs& args, const SplitRow& split, int64_t batch, int64_t column,
                   int64_t columns) {
  using Acc = Accumulator<T>;
  const int64_t first = split.row * args.piece_rows, piece = args.piece_rows * args.n;
  for (int64_t v = 0; v < args.piece_rows && first + v < args.m; ++v) {
    const Acc* partials = static_cast<const Acc*>(args.partials) +
                          (batch * args.pieces + split.first_piece) * piece + v * args.n + column;
    T* y = static_cast<T*>(args.y) + (batch * args.m + first + v) * args.n + column;
    for (int64_t c = 0; c < columns; ++c) {
      Acc sum = 0;
      for (int64_t i = 0; i < split.pieces; ++i) sum += partials[i * piece + c];
      StoreScalar<T>(y + c, sum);
    }
  }
}

}  // namespace sgap::SGAP_ISA
