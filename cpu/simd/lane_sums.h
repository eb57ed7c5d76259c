// Shuffles of lanes and sums over them, in GCC vector arithmetic.
#pragma once

#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {

// The sums of lanes that are equal modulo M.
template <int M, typename T, int N>
inline Vector<T, M> FoldLanes(Vector<T, N> x) {
  if constexpr (N == M) {
    return x;
  } else {
    return FoldLanes<M, T, N / 2>(Half<T, N>(x, 0) + Half<T, N>(x, 1));
  }
}

// The greatest lane.
template <typename T, int N>
inline T GreatestLane(Vector<T, N> x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    const auto a = Half<T, N>(x, 0), b = Half<T, N>(x, 1);
    return GreatestLane<T, N / 2>(a > b ? a : b);
  }
}

template <int... kFrom, typename V>
inline V Shuffle(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, kFrom...);
#else
  using Index = std::conditional_t<sizeof(a[0]) == 8, int64_t,
                                   std::conditional_t<sizeof(a[0]) == 2, int16_t, int32_t> >;
  return __builtin_shuffle(a, b, Vector<Index, sizeof...(kFrom)>{kFrom...});
#endif
}

template <typename V, int... i>
inline void Interleave(V* x, std::integer_sequence<int, i...>) {
  constexpr int n = sizeof...(i);
  const V even = x[0], odd = x[1];
  x[0] = Shuffle<(i % 2 * n + i / 2)...>(even, odd);
  x[1] = Shuffle<(i % 2 * n + (n + i) / 2)...>(even, odd);
}

// What belongs to the kVectors vectors that LoadApart loaded of T, to their places.
template <typename T, int kVectors, typename V>
inline void InOrder(V* x) {
  constexpr int n = sizeof(V) / sizeof(x[0][0]);
  constexpr int kPaired = std::is_same_v<T, BFloat16> ? kVectors / 2 * 2 : 0;
#pragma GCC unroll 16
  for (int i = 0; i < kPaired; i += 2) Interleave(x + i, std::make_integer_sequence<int, n>());
}

// Lane i: a[i] + a[i ^ kDistance], of b instead where i has the bit kDistance.
template <int kDistance, typename V, int... i>
inline V AddPartners(V a, V b, std::integer_sequence<int, i...>) {
  constexpr int n = sizeof...(i);
  const V own = Shuffle<((i & kDistance) ? n + i : i)...>(a, b);
  const V partner = Shuffle<((i & kDistance) ? n + (i ^ kDistance) : (i ^ kDistance))...>(a, b);
  return own + partner;
}

template <int kDistance, typename V>
inline V AddPartners(V a, V b) {
  constexpr int n = sizeof(V) / sizeof(a[0]);
  return AddPartners<kDistance>(a, b, std::make_integer_sequence<int, n>());
}

// kCount vectors, seen as groups of kSpan units of kUnit lanes, to kCount / kSpan: unit u of a
// group of result j is the sum of that group's units of sums[kSpan * j + u], halves first. kLeft:
// units that are left of each sum.
template <int kCount, int kUnit, int kSpan, int kLeft = kSpan, typename V>
inline void SumUnits(V* sums);

template <int kUnit, int kSpan, int kLeft, typename V, int... i>
inline V AddHalves(V a, V b, std::integer_sequence<int, i...>) {
  constexpr auto first = [](int lane) {
    constexpr int n = sizeof...(i), kHalf = kLeft / 2, kOfA = kSpan / kLeft;
    const int group = lane / (kUnit * kSpan), unit = lane / kUnit % kSpan;
    const int sum = unit / kHalf, from = sum % kOfA * kLeft + unit % kHalf;
    return (sum < kOfA ? 0 : n) + (group * kSpan + from) * kUnit + lane % kUnit;
  };
  return Shuffle<first(i)...>(a, b) + Shuffle<(first(i) + kLeft / 2 * kUnit)...>(a, b);
}

template <int kCount, int kUnit, int kSpan, int kLeft, typename V>
inline void SumUnits(V* sums) {
  constexpr int n = sizeof(V) / sizeof(sums[0][0]);
  if constexpr (kLeft > 1) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount / 2; ++i) {
      sums[i] = AddHalves<kUnit, kSpan, kLeft>(sums[2 * i], sums[2 * i + 1],
                                               std::make_integer_sequence<int, n>());
    }
    SumUnits<kCount / 2, kUnit, kSpan, kLeft / 2>(sums);
  }
}

// Lane i of the result is the sum of the lanes of sums[i], 2 * kDistance of them; where there are
// fewer than lanes, the sums are those of as many neighbours and come again for the next ones.
// Within 16 bytes first: shuffles across them are slower.
template <int kDistance, typename V>
inline V SumTransposed(V* sums) {
  constexpr int kCount = 2 * kDistance, kPart = 16 / sizeof(sums[0][0]);
  constexpr int kNear = kCount < kPart ? kCount : kPart;
  SumUnits<kCount, 1, kNear>(sums);
  SumUnits<kCount / kNear, kNear, kCount / kNear>(sums);
  return sums[0];
}

}  // namespace sgap::SGAP_ISA
