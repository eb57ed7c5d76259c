// The exponential, on vectors.
#pragma once

#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {

// Added to a number it leaves the nearest integer in the low bits, with an exponent's bias.
constexpr float kRoundToPower = 0x1.8p23f + 127;

// p 2^n for n of -126 or more, where `rounded` is n + kRoundToPower. NaN stays.
template <int N>
inline Vector<float, N> TimesPower(Vector<float, N> p, Vector<float, N> rounded) {
  if constexpr (kScalesByPowers<float, N>) {
    return ScaleByPowers<float, N>(p, rounded - kRoundToPower);
  } else {
    return p * BitCast<Vector<float, N>>(BitCast<Vector<int32_t, N>>(rounded) << 23);
  }
}

// x = exp(x) of kCount vectors, for x <= 0 or NaN, within 2 ulp; zero below -87, where it leaves
// the normal numbers. Each step is done for all vectors: one alone waits for itself, and what comes
// after it does not fit into the processor's queues.
template <int N, int kCount>
inline void ExpOfNegatives(Vector<float, N>* x) {
  using Floats = Vector<float, N>;
  Floats rounded[kCount], r[kCount], p[kCount];
  const auto each = [](auto step) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) step(i);
  };
  each([&](int i) { rounded[i] = x[i] * 0x1.715476p+0f + kRoundToPower; });
  each([&](int i) {
    const Floats n = rounded[i] - kRoundToPower;
    r[i] = (x[i] - n * 0x1.62e400p-1f) - n * 0x1.7f7d1cp-20f;
  });
  each([&](int i) { p[i] = 1.9875691500e-4f * r[i] + 1.3981999507e-3f; });  // Cephes expf
  each([&](int i) { p[i] = p[i] * r[i] + 8.3334519073e-3f; });
  each([&](int i) { p[i] = p[i] * r[i] + 4.1665795894e-2f; });
  each([&](int i) { p[i] = p[i] * r[i] + 1.6666665459e-1f; });
  each([&](int i) { p[i] = p[i] * r[i] + 5.0000001201e-1f; });
  each([&](int i) { p[i] = p[i] * (r[i] * r[i]) + r[i] + 1.0f; });
  // What becomes of the lanes below -87, which -inf makes NaN, is dropped.
  each([&](int i) { x[i] = x[i] < -87.0f ? Floats{} : TimesPower<N>(p[i], rounded[i]); });
}

template <int N>
inline Vector<float, N> ExpOfNegative(Vector<float, N> x) {
  ExpOfNegatives<N, 1>(&x);
  return x;
}

// x = 2^x of kCount vectors, for x <= 0 or NaN, within 2 ulp; zero where it leaves the normal
// numbers, or a little above.
template <int N, int kCount>
inline void Exp2OfNegatives(Vector<float, N>* x) {
  using Floats = Vector<float, N>;
  Floats rounded[kCount], r[kCount], p[kCount];
  const auto each = [](auto step) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) step(i);
  };
  each([&](int i) { rounded[i] = x[i] + kRoundToPower; });
  each([&](int i) { r[i] = x[i] - (rounded[i] - kRoundToPower); });
  // Fitted to the least relative error.
  each([&](int i) { p[i] = 1.3264728652e-3f * r[i] + 9.6715129220e-3f; });
  each([&](int i) { p[i] = p[i] * r[i] + 5.5507337379e-2f; });
  each([&](int i) { p[i] = p[i] * r[i] + 2.4022242079e-1f; });
  each([&](int i) { p[i] = p[i] * r[i] + 6.9314697760e-1f; });
  each([&](int i) { p[i] = p[i] * r[i] + 1.0f; });
  each([&](int i) { x[i] = x[i] < -125.0f ? Floats{} : TimesPower<N>(p[i], rounded[i]); });
}

template <int N>
inline Vector<float, N> Exp2OfNegative(Vector<float, N> x) {
  Exp2OfNegatives<N, 1>(&x);
  return x;
}

template <int N>
inline Vector<double, N> ExpOfNegative(Vector<double, N> x) {
  for (int i = 0; i < N; ++i) x[i] = __builtin_exp(x[i]);
  return x;
}

template <int N, int kCount>
inline void ExpOfNegatives(Vector<double, N>* x) {
  for (int i = 0; i < kCount; ++i) x[i] = ExpOfNegative<N>(x[i]);
}

}  // namespace sgap::SGAP_ISA
