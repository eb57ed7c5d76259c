// Dot products of kLanes nonzeros at a time, the inner loops of sddmm_kernel.cc: one vector of
// products per nonzero, and all of them summed by one tree of transpose-and-add steps.
#pragma once

#include "simd.h"

namespace sgap::SGAP_ISA {

// What fits the registers beside the sums: vectors of a left row held for all nonzeros of a group.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kMaxSteps = 4;
#else
constexpr int kMaxSteps = 8;
#endif

// kSize nonzeros: rows of x and rows of y by number.
template <typename T>
struct DotGroup {
  static constexpr int kSize = kLanes<T>;
  using Sum = Vector<Accumulator<T>, kSize>;

  const T* x;
  const T* y;
  int64_t x_pitch, y_pitch;  // elements from one row to the next
  const int32_t* rows;
  const int32_t* columns;
  const int32_t* ahead;  // columns of the next group, to prefetch

  const T* Left(int i) const { return x + size_t(rows[i]) * x_pitch; }
  const T* Right(int i) const { return y + size_t(columns[i]) * y_pitch; }
  const T* Ahead(int i) const { return y + size_t(ahead[i]) * y_pitch; }
};

// The first `width` elements of a row, less the `width - remainder` that whole vectors covered.
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

// kSteps vectors of each row from column `at` on. kOneRow: all nonzeros are of one row.
template <int kSteps, bool kOneRow, bool kPrefetch, typename T>
inline void AddSteps(const DotGroup<T>& group, int64_t at, typename DotGroup<T>::Sum* sums) {
  constexpr int kSize = DotGroup<T>::kSize;
  typename DotGroup<T>::Sum held[kSteps];
  if constexpr (kOneRow) {
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) held[s] = Load<T, kSize>(group.Left(0) + at + s * kSize);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSize; ++i) {
    const T* left = kOneRow ? nullptr : group.Left(i) + at;
    const T* right = group.Right(i) + at;
    const T* ahead = kPrefetch ? group.Ahead(i) + at : nullptr;
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
      const auto x = kOneRow ? held[s] : Load<T, kSize>(left + s * kSize);
      sums[i] += x * Load<T, kSize>(right + s * kSize);
      if (kPrefetch && s * kSize * sizeof(T) % 64 == 0) Prefetch(ahead + s * kSize);
    }
  }
}

template <bool kOneRow, bool kPrefetch, typename T>
inline void AddTail(const DotGroup<T>& group, int64_t width, int remainder,
                    typename DotGroup<T>::Sum* sums) {
  const auto held = LoadTail(group.Left(0), width, remainder);
#pragma GCC unroll 16
  for (int i = 0; i < DotGroup<T>::kSize; ++i) {
    const auto x = kOneRow ? held : LoadTail(group.Left(i), width, remainder);
    sums[i] += x * LoadTail(group.Right(i), width, remainder);
    if (kPrefetch) Prefetch(group.Ahead(i) + width - remainder);
  }
}

// Lane i of the result is the sum of the lanes of sums[i].
template <int kDistance, typename V>
inline V SumTransposed(V* sums) {
#pragma GCC unroll 16
  for (int i = 0; i < kDistance; ++i)
    sums[i] = AddPartners<kDistance>(sums[i], sums[i + kDistance]);
  if constexpr (kDistance > 1) {
    return SumTransposed<kDistance / 2>(sums);
  } else {
    return sums[0];
  }
}

// Lane i: the dot product of Left(i) and Right(i) over `width` columns.
template <bool kOneRow, bool kPrefetch, typename T>
inline typename DotGroup<T>::Sum Dots(const DotGroup<T>& group, int64_t width) {
  constexpr int kSize = DotGroup<T>::kSize;
  typename DotGroup<T>::Sum sums[kSize] = {};
  int64_t at = 0;
  for (; width - at >= kMaxSteps * kSize; at += kMaxSteps * kSize) {
    AddSteps<kMaxSteps, kOneRow, kPrefetch>(group, at, sums);
  }
  if (kMaxSteps > 4 && width - at >= 4 * kSize) {
    AddSteps<4, kOneRow, kPrefetch>(group, at, sums);
    at += 4 * kSize;
  }
  if (width - at >= 2 * kSize) {
    AddSteps<2, kOneRow, kPrefetch>(group, at, sums);
    at += 2 * kSize;
  }
  if (width - at >= kSize) {
    AddSteps<1, kOneRow, kPrefetch>(group, at, sums);
    at += kSize;
  }
  if (at < width) AddTail<kOneRow, kPrefetch>(group, width, static_cast<int>(width - at), sums);
  return SumTransposed<kSize / 2>(sums);
}

}  // namespace sgap::SGAP_ISA
