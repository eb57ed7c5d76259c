// Dot products of a few rows of x with the rows of y that column vectors name, for
// sddmm_cvs_kernel.cc: as many sums as a vector has lanes, which one tree adds up. Without a name
// for the linker, so that they are inlined as what is in that file is.
#pragma once

#include "cpu/common/results.h"
#include "cpu/sddmm/sddmm_dots.h"

namespace sgap::SGAP_ISA {
namespace {

// Vectors of x that are held in registers beside kLanes sums.
#if defined(__AVX512F__)
constexpr int kHeld = 8;
#else
constexpr int kHeld = 4;
#endif

// kRows rows of x against the rows of y that kColumns vectors name: kLanes dot products.
template <typename T, int kRows>
struct VectorDots {
  static constexpr int kSize = kLanes<T>, kColumns = kSize / kRows;
  static constexpr bool kHoldX = kRows <= kColumns;
  static constexpr int kFew = kHoldX ? kRows : kColumns, kMany = kSize / kFew;
  static constexpr int kSteps = kHeld / kFew > 1 ? kHeld / kFew : 1;
  using Sum = Vector<Accumulator<T>, kSize>;

  const T* x[kRows];
  const T* y;
  int64_t width;

  // sums[c * kRows + r] += x[r] * y[columns[c]], kCount vectors of each from column `at` on. Those
  // of the side with fewer rows stay in registers, so that each one is loaded once.
  template <int kCount>
  void Add(const int32_t* columns, int64_t at, Sum* sums) const {
    const auto row = [&](bool of_x, int i) {
      return (of_x ? x[i] : y + size_t(columns[i]) * size_t(width)) + at;
    };
    Sum held[kFew][kCount];
#pragma GCC unroll 16
    for (int i = 0; i < kFew; ++i) {
#pragma GCC unroll 16
      for (int s = 0; s < kCount; ++s) held[i][s] = Load<T, kSize>(row(kHoldX, i) + s * kSize);
    }
#pragma GCC unroll 16
    for (int j = 0; j < kMany; ++j) {
      const T* other = row(!kHoldX, j);
#pragma GCC unroll 16
      for (int s = 0; s < kCount; ++s) {
        const Sum piece = Kept(Load<T, kSize>(other + s * kSize));
#pragma GCC unroll 16
        for (int i = 0; i < kFew; ++i) {
          sums[kHoldX ? j * kRows + i : i * kRows + j] += held[i][s] * piece;
        }
      }
    }
  }

  void AddTail(const int32_t* columns, int remainder, Sum* sums) const {
    Sum right[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      right[c] = LoadTail(y + size_t(columns[c]) * size_t(width), width, remainder);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Sum left = LoadTail(x[r], width, remainder);
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) sums[c * kRows + r] += left * right[c];
    }
  }

  // `count` columns, the first of them again in the place of those that lack.
  static const int32_t* Padded(const int32_t* columns, int count, int32_t* padded) {
    for (int c = 0; c < kColumns; ++c) padded[c] = columns[c < count ? c : 0];
    return padded;
  }

  // Lane c * kRows + r: the dot product of x[r] and y[columns[c]], rows of kWidth vectors.
  // Addresses are computed first: among the multiply-adds they cost up to 1.4x.
  template <int kWidth>
  __attribute__((always_inline)) Sum ShortDots(const int32_t* columns) const {
    const T* rows[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      const T* row = y + size_t(columns[c]) * (kWidth * kSize);
      asm volatile("" : "+r"(row));
      rows[c] = row;
    }
    Sum sums[kSize];
#pragma GCC unroll 16
    for (int s = 0; s < kWidth; ++s) {
      const auto row = [&](bool of_x, int i) {
        return Kept(Load<T, kSize>((of_x ? x[0] + i * kWidth * kSize : rows[i]) + s * kSize));
      };
      Sum held[kFew];
#pragma GCC unroll 16
      for (int i = 0; i < kFew; ++i) held[i] = row(kHoldX, i);
#pragma GCC unroll 16
      for (int j = 0; j < kMany; ++j) {
        const Sum piece = row(!kHoldX, j);
#pragma GCC unroll 16
        for (int i = 0; i < kFew; ++i) {
          Sum& sum = sums[kHoldX ? j * kRows + i : i * kRows + j];
          sum = s == 0 ? held[i] * piece : sum + held[i] * piece;
        }
      }
    }
    return SumTransposed<kSize / 2>(sums);
  }

  // The vectors of [columns, end) up to the first at a column from `limit` on, to `target`, kRows
  // numbers each. Returns where it stopped.
  template <int kWidth, bool kPlain>
  __attribute__((noinline)) const int32_t* RunShort(const int32_t* columns, const int32_t* end,
                                                    int64_t limit,
                                                    Results<T, kPlain> target) const {
    const VectorDots dots = *this;  // a copy: stores cannot change it
    for (; columns < end && *columns < limit; columns += kColumns, target = target + kSize) {
      int32_t padded[kColumns];
      const int32_t* from = columns;
      if (end - columns < kColumns) from = Padded(columns, int(end - columns), padded);
      const Sum sums = dots.template ShortDots<kWidth>(from);
      if (from == padded) {
        target.template PutPartial<kSize>(sums, int(end - columns) * kRows);
        return end;
      }
      target.template Put<kSize>(sums);
    }
    return columns;
  }

  // As ShortDots for any width. Inlined, it was up to 1.3x slower: too few registers.
  __attribute__((noinline)) Sum Run(const int32_t* columns) const {
    Sum sums[kSize];
#pragma GCC unroll 16
    for (int i = 0; i < kSize; ++i) sums[i] = Sum{};
    int64_t at = 0;
    for (; at + kSteps * kSize <= width; at += kSteps * kSize) Add<kSteps>(columns, at, sums);
    if constexpr (kSteps > 1) {
      for (; at + kSize <= width; at += kSize) Add<1>(columns, at, sums);
    }
    if (at < width) AddTail(columns, int(width - at), sums);
    return SumTransposed<kSize / 2>(sums);
  }
};

}  // namespace
}  // namespace sgap::SGAP_ISA
