// Dot products of kLanes nonzeros at a time, the inner loops of sddmm_kernel.cc: one vector of
// products per nonzero, and all of them summed by one tree of transpose-and-add steps.
#pragma once

#include "simd.h"

namespace sgap::SGAP_ISA {

// How the nonzeros of a group are gone through.
enum class DotOrder {
  kTogether,  // unrolled, all sums in registers: for rows of y in the second-level cache
  kInTurn,    // a loop, sums in memory: where rows of y come from farther, this was up to twice as
              // fast
};

// How many vectors of a row of x are held in registers for all nonzeros of a group.
#if defined(__AVX512F__)
template <DotOrder kOrder>
constexpr int kMaxSteps = kOrder == DotOrder::kTogether ? 8 : 16;
#else
template <DotOrder kOrder>
constexpr int kMaxSteps = kOrder == DotOrder::kTogether ? 4 : 8;
#endif

// kSize nonzeros: rows of x and rows of y by number.
template <typename T>
struct DotGroup {
  static constexpr int kSize = kLanes<T>;
  using Sum = Vector<Accumulator<T>, kSize>;

  const T* x;
  const T* y;
  int64_t width;  // columns of both
  const int32_t* rows;
  const int32_t* columns;
  const int32_t* ahead;  // columns of nonzeros to come, to prefetch

  const T* Left(int i) const { return x + size_t(rows[i]) * width; }
  const T* Right(int i) const { return y + size_t(columns[i]) * width; }
  const T* Ahead(int i) const { return y + size_t(ahead[i]) * width; }
};

// The last `remainder` elements of a row of `width`.
template <typename T>
inline typename DotGroup<T>::Sum LoadTail(const T* row, int64_t width, int remainder) {
  constexpr int kSize = DotGroup<T>::kSize;
#if !defined(__AVX512F__)
  if (width >= kSize) {  // the last whole vector, without what was counted already
    const auto last = Load<T, kSize>(row + width - kSize);
    return LaneNumbers<Accumulator<T>, kSize>() < Accumulator<T>(kSize - remainder)
               ? typename DotGroup<T>::Sum{}
               : last;
  }
#endif
  return LoadPartial<T, kSize>(row + width - remainder, remainder);
}

template <int kSteps, typename T>
inline void PrefetchSteps(const T* row) {
#pragma GCC unroll 16
  for (int s = 0; s < kSteps; ++s) {
    if (s * DotGroup<T>::kSize * sizeof(T) % 64 == 0) Prefetch(row + s * DotGroup<T>::kSize);
  }
}

// What AddSteps does for nonzero i; `held` is its row of x where that is held.
template <int kSteps, bool kOneRow, bool kPrefetch, bool kFirst, typename T>
inline typename DotGroup<T>::Sum AddNonzero(const DotGroup<T>& group, int64_t at, int i,
                                            const typename DotGroup<T>::Sum* held,
                                            typename DotGroup<T>::Sum sum) {
  constexpr int kSize = DotGroup<T>::kSize;
  const T* left = kOneRow ? nullptr : group.Left(i) + at;
  const T* right = group.Right(i) + at;
  if constexpr (kPrefetch) PrefetchSteps<kSteps>(group.Ahead(i) + at);
#pragma GCC unroll 16
  for (int s = 0; s < kSteps; ++s) {
    const auto x = kOneRow ? held[s] : Load<T, kSize>(left + s * kSize);
    const auto y = Load<T, kSize>(right + s * kSize);
    if (kFirst && s == 0) {
      sum = x * y;
    } else {
      sum += x * y;
    }
  }
  return sum;
}

// kSteps vectors of each row from column `at` on, to new sums where kFirst. kOneRow: all nonzeros
// are of one row, whose vectors are held in registers.
template <int kSteps, DotOrder kOrder, bool kOneRow, bool kPrefetch, bool kFirst = false,
          typename T>
inline void AddSteps(const DotGroup<T>& group, int64_t at, typename DotGroup<T>::Sum* sums) {
  constexpr int kSize = DotGroup<T>::kSize;
  typename DotGroup<T>::Sum held[kSteps];
  if constexpr (kOneRow) {
#pragma GCC unroll 16
    for (int s = 0; s < kSteps; ++s) held[s] = Load<T, kSize>(group.Left(0) + at + s * kSize);
  }
  if constexpr (kOrder == DotOrder::kTogether) {
#pragma GCC unroll 16
    for (int i = 0; i < kSize; ++i) {
      sums[i] = AddNonzero<kSteps, kOneRow, kPrefetch, kFirst>(group, at, i, held, sums[i]);
    }
  } else {
#pragma GCC unroll 1
    for (int i = 0; i < kSize; ++i) {
      sums[i] = AddNonzero<kSteps, kOneRow, kPrefetch, kFirst>(group, at, i, held, sums[i]);
    }
  }
}

template <bool kOneRow, bool kPrefetch, typename T>
inline void AddTail(const DotGroup<T>& group, int remainder, typename DotGroup<T>::Sum* sums) {
  const auto held = LoadTail(group.Left(0), group.width, remainder);
#pragma GCC unroll 16
  for (int i = 0; i < DotGroup<T>::kSize; ++i) {
    const auto x = kOneRow ? held : LoadTail(group.Left(i), group.width, remainder);
    sums[i] += x * LoadTail(group.Right(i), group.width, remainder);
    if (kPrefetch) Prefetch(group.Ahead(i) + group.width - remainder);
  }
}

// Lane i: the dot product of Left(i) and Right(i).
template <DotOrder kOrder, bool kOneRow, bool kPrefetch, typename T>
inline typename DotGroup<T>::Sum GroupDots(const DotGroup<T>& group) {
  constexpr int kSize = DotGroup<T>::kSize, kMax = kMaxSteps<kOrder>;
  typename DotGroup<T>::Sum sums[kSize];
  if (group.width == 2 * kSize) {
    AddSteps<2, kOrder, kOneRow, kPrefetch, true>(group, 0, sums);
    return SumTransposed<kSize / 2>(sums);
  }
  if (group.width == 4 * kSize) {
    AddSteps<4, kOrder, kOneRow, kPrefetch, true>(group, 0, sums);
    return SumTransposed<kSize / 2>(sums);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSize; ++i) sums[i] = typename DotGroup<T>::Sum{};
  int64_t at = 0;
  for (; group.width - at >= kMax * kSize; at += kMax * kSize) {
    AddSteps<kMax, kOrder, kOneRow, kPrefetch>(group, at, sums);
  }
  const auto rest = [&](auto steps) {
    constexpr int kSteps = decltype(steps)::value;
    if constexpr (kSteps < kMax) {
      if (group.width - at < kSteps * kSize) return;
      AddSteps<kSteps, kOrder, kOneRow, kPrefetch>(group, at, sums);
      at += kSteps * kSize;
    }
  };
  rest(std::integral_constant<int, 8>());
  rest(std::integral_constant<int, 4>());
  rest(std::integral_constant<int, 2>());
  rest(std::integral_constant<int, 1>());
  if (at < group.width) AddTail<kOneRow, kPrefetch>(group, int(group.width - at), sums);
  return SumTransposed<kSize / 2>(sums);
}

}  // namespace sgap::SGAP_ISA
