// Dot products of several rows of x with many rows of y, for sddmm_cvs_kernel.cc: rows of x are
// transposed once in each 16 bytes of a vector, so that its lanes belong to different rows and few
// sums over lanes are left.
#pragma once

#include "cpu/sddmm/sddmm.h"
#include "cpu/sddmm/sddmm_dots.h"
#include "cpu/simd/pairs.h"

namespace sgap::SGAP_ISA {

// The vectors [begin, end) of a block row, or those before column `limit`.
struct VectorRange {
  int64_t begin, end, limit;
};

// Sums that a run holds: the other registers have pieces of y, repeated ones, and x.
constexpr int kPackedSums = kVectorBytes == 64 ? 16 : 8;

// kGroups groups of kPart rows: each 16 bytes of a vector have one value of each row of a group.
template <typename T, int kGroups>
struct PackedRows {
  using Acc = Accumulator<T>;
  using Sum = DotSum<T>;
  using Piece = sgap::SGAP_ISA::Piece<T>;
  using Word = std::conditional_t<kInPairs<T>, uint32_t, Acc>;
  static constexpr int kSize = kLanes<T>, kWidth = kPieceElements<T>;
  static constexpr int kPart = 16 / sizeof(Acc), kParts = kSize / kPart;
  static constexpr int kRows = kGroups * kPart;
  using Lanes = std::make_integer_sequence<int, kSize>;

  static constexpr int64_t kMaxWidth = 512;  // of x: all its rows fit in the first-level cache
  // [width / kWidth][kPart][kGroups][kSize] values or pairs
  alignas(64) Word packed[kRows * kMaxWidth / (kWidth / kSize)];
  const T* y;
  int64_t width;

  // Of each 16 bytes of a and b: the first or second halves of kDistance lanes, a's beside b's.
  template <int kDistance, bool kSecond, int... i>
  static Piece Halves(Piece a, Piece b, std::integer_sequence<int, i...>) {
    constexpr int from = kSecond ? kDistance : 0;
    return Shuffle<((i & kDistance ? kSize - kDistance : 0) + i + from)...>(a, b);
  }

  // Lane r of part p of rows[j] becomes lane j of part p of rows[r].
  template <int kDistance>
  static void Transpose(Piece* rows) {
    if constexpr (kDistance > 0) {
#pragma GCC unroll 4
      for (int r = 0; r < kPart; ++r) {
        if (r & kDistance) continue;
        const Piece a = rows[r], b = rows[r + kDistance];
        rows[r] = Halves<kDistance, false>(a, b, Lanes());
        rows[r + kDistance] = Halves<kDistance, true>(a, b, Lanes());
      }
      Transpose<kDistance / 2>(rows);
    }
  }

  // kRows rows that follow each other.
  void Pack(const T* x) {
    Word* target = packed;
    for (int64_t at = 0; at < width; at += kWidth, target += kRows * kSize) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        Piece rows[kPart];
#pragma GCC unroll 4
        for (int r = 0; r < kPart; ++r) {
          const T* row = x + (g * kPart + r) * width;
          rows[r] =
              at + kWidth <= width ? LoadPiece(row + at) : LoadTail(row, width, int(width - at));
        }
        Transpose<kPart / 2>(rows);
#pragma GCC unroll 4
        for (int j = 0; j < kPart; ++j) {
          std::memcpy(target + (j * kGroups + g) * kSize, rows + j, sizeof(Piece));
        }
      }
    }
  }

  // Value kValue of each 16 bytes, throughout them.
  template <int kValue, int... i>
  static Piece Repeated(Piece y, std::integer_sequence<int, i...>) {
    return Shuffle<(i / kPart * kPart + kValue)...>(y, y);
  }

  // kWidth columns of x and y, from value or pair kValue of each 16 bytes on.
  template <int kColumns, int kValue = 0>
  static void Add(const Word* x, const Piece* y, Sum* sums) {
    if constexpr (kValue < kPart) {
      Piece rows[kGroups];
      std::memcpy(rows, x, sizeof(rows));
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) {
        const Piece repeated = Repeated<kValue>(y[c], Lanes());
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) {
          Sum& sum = sums[c * kGroups + g];
          sum = AddDots<T>(sum, rows[g], repeated);
        }
      }
      Add<kColumns, kValue + 1>(x + kGroups * kSize, y, sums);
    }
  }

  // results[c * kRows + r]: the dot product of row r of x and row columns[c] of y.
  template <int kColumns>
  __attribute__((noinline)) void Run(const int32_t* columns, Acc* results) const {
    const T* rows[kColumns];
    Sum sums[kColumns * kGroups];
    Piece pieces[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) rows[c] = y + size_t(columns[c]) * size_t(width);
#pragma GCC unroll 16
    for (int i = 0; i < kColumns * kGroups; ++i) sums[i] = Sum{};
    int64_t at = 0;
    const Word* x = packed;
    for (; at + kWidth <= width; at += kWidth, x += kRows * kSize) {
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) pieces[c] = LoadPiece(rows[c] + at);
      Add<kColumns>(x, pieces, sums);
    }
    if (at < width) {
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) {
        pieces[c] = LoadTail(rows[c], width, int(width - at));
      }
      Add<kColumns>(x, pieces, sums);
    }
    SumUnits<kColumns * kGroups, kPart, kParts>(sums);
#pragma GCC unroll 16
    for (int i = 0; i < kColumns * kGroups / kParts; ++i) {
      Store<Acc, kSize>(results + i * kSize, sums[i]);
    }
  }
};

// kRows rows of x from `x` on at all vectors of a range, and of each vector those from `row` on.
template <typename T, int kGroups, typename R, bool kPlain>
int64_t PackedDots(const SddmmArgs& args, const T* x, const T* y, int64_t row, VectorRange range,
                   Results<R, kPlain> target) {
  using Rows = PackedRows<T, kGroups>;
  using Acc = Accumulator<T>;
  constexpr int kRows = Rows::kRows, kMost = kPackedSums / kGroups;
  constexpr int kLeast = kGroups < Rows::kParts ? Rows::kParts / kGroups : 1;
  constexpr int kHalf = kMost / 2 > kLeast ? kMost / 2 : kLeast;
  Rows rows;
  rows.y = y;
  rows.width = args.d;
  rows.Pack(x);
  int64_t p = range.begin;
  const auto run = [&](auto columns_of_run) {
    constexpr int kColumns = decltype(columns_of_run)::value;
    const int32_t* columns = args.indices + p;
    auto at = target + (p * args.length + row);
    const int count = int(range.end - p < kColumns ? range.end - p : kColumns);
    p += kColumns;
    Acc results[kColumns * kRows];
    if (count == kColumns && args.length == kRows) {
      Acc* sums = results;
      if constexpr (std::is_same_v<R, Acc>) sums = at.out;
      rows.template Run<kColumns>(columns, sums);
      if constexpr (!kPlain || !std::is_same_v<R, Acc>) {
#pragma GCC unroll 16
        for (int i = 0; i < kColumns * kRows; i += Rows::kSize) {
          (at + i).template Put<Rows::kSize>(Load<Acc, Rows::kSize>(sums + i));
        }
      }
      return;
    }
    int32_t padded[kColumns];
    for (int c = 0; c < kColumns; ++c) padded[c] = columns[c < count ? c : 0];
    rows.template Run<kColumns>(padded, results);
    constexpr int kPiece = kRows < Rows::kSize ? kRows : Rows::kSize;
    for (int c = 0; c < count; ++c, at = at + args.length) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r += kPiece) {
        (at + r).template Put<kPiece>(Load<Acc, kPiece>(results + c * kRows + r));
      }
    }
  };
  while (p < range.end) {
    if (range.end - p >= kMost) {
      run(std::integral_constant<int, kMost>());
    } else if (range.end - p >= kHalf || kHalf == kLeast) {
      run(std::integral_constant<int, kHalf>());
    } else {
      run(std::integral_constant<int, kLeast>());
    }
  }
  return range.end;
}

// Columns of x whose transposition costs what it saves for one vector; measured. It saves most
// where rows of y are widened, as that is done once for all rows.
template <typename T>
constexpr double kPackedGain = std::is_same_v<T, BFloat16> ? 30
#if defined(__F16C__)
                               : std::is_same_v<T, Float16> ? 5.5
#endif
                               : sizeof(T) == 2     ? 30
                               : sizeof(T) == 8     ? (kVectorBytes == 64 ? 3 : 30)
                               : kVectorBytes == 64 ? 2.5
                               : kVectorBytes == 32 ? 1.3
                                                    : 7;

// Whether to transpose x for a block row of so many vectors of `length` rows. Of the results' type,
// also where rows of y have been widened: the bits must not depend on that.
template <typename T>
bool PackingPays(int64_t vectors, int64_t length, int64_t width) {
  if (length < PackedRows<T, 2>::kRows || width > PackedRows<T, 2>::kMaxWidth) return false;
  const double gain = kPackedGain<T> * (length < PackedRows<T, 4>::kRows ? 1 : 3);
  return double(vectors) * gain >= double(width + 10);
}

}  // namespace sgap::SGAP_ISA
