// The exponential, on vectors.
#pragma once

#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {

// exp(x) for x <= 0 or NaN, within 2 ulp; zero below -87, where it leaves the normal numbers.
template <int N>
inline Vector<float, N> ExpOfNegative(Vector<float, N> x) {
  using Floats = Vector<float, N>;
  using Ints = Vector<int32_t, N>;
  constexpr float kRound = 0x1.8p23f;  // the integer nearest to x / ln 2 moves to the low bits
  // What scales by powers of 2 needs no care: NaN stays, and of -inf comes NaN that is dropped.
  constexpr bool kScales = kScalesByPowers<float, N>;
  Floats inside = x;
  if constexpr (!kScales) inside = x < -87.0f ? Floats{} : x;
  const Floats rounded = inside * 0x1.715476p+0f + kRound;
  const Floats n = rounded - kRound;
  const Floats r = (inside - n * 0x1.62e400p-1f) - n * 0x1.7f7d1cp-20f;
  Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;  // Cephes expf
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  if constexpr (kScales) {
    return x < -87.0f ? Floats{} : ScaleByPowers<float, N>(p, n);
  } else {
    const Floats scaled = BitCast<Floats>(BitCast<Ints>(p) + (BitCast<Ints>(rounded) << 23));
    return x < -87.0f ? Floats{} : (x == x ? scaled : x);
  }
}

// 2^x for x <= 0 or NaN, within 2 ulp; zero where it leaves the normal numbers, or a little above.
template <int N>
inline Vector<float, N> Exp2OfNegative(Vector<float, N> x) {
  using Floats = Vector<float, N>;
  using Ints = Vector<int32_t, N>;
  constexpr float kRound = 0x1.8p23f;
  const Floats inside = x < -126.0f ? Floats{} - 126.0f : x;  // -inf - -inf would be NaN
  const Floats rounded = inside + kRound;
  const Floats n = rounded - kRound, r = inside - n;
  Floats p = 1.3264728652e-3f * r + 9.6715129220e-3f;  // fitted to the least relative error
  p = p * r + 5.5507337379e-2f;
  p = p * r + 2.4022242079e-1f;
  p = p * r + 6.9314697760e-1f;
  p = p * r + 1.0f;
  if constexpr (kScalesByPowers<float, N>) {
    p = ScaleByPowers<float, N>(p, n);
  } else {
    const Floats scaled = BitCast<Floats>(BitCast<Ints>(p) + (BitCast<Ints>(rounded) << 23));
    p = x == x ? scaled : x;
  }
  return x < -125.0f ? Floats{} : p;
}

template <int N>
inline Vector<double, N> ExpOfNegative(Vector<double, N> x) {
  for (int i = 0; i < N; ++i) x[i] = __builtin_exp(x[i]);
  return x;
}

}  // namespace sgap::SGAP_ISA
