// Vector types, and bfloat16 and float16 to and from float32 in vector arithmetic.
#pragma once

#include <cstdint>
#include <cstring>

namespace sgap::SGAP_ISA {

template <typename T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <typename T, int N>
using Vector = typename VectorOf<T, N>::type;

template <typename V, typename S>
inline V BitCast(const S& source) {
  static_assert(sizeof(V) == sizeof(S));
  V result;
  std::memcpy(&result, &source, sizeof(V));
  return result;
}

// Widen and narrow 16-bit floats held in the low half of 32-bit lanes. Integer steps, because XLA's
// threads flush subnormals.
template <int N>
inline Vector<float, N> WidenBFloat16(Vector<uint32_t, N> bits) {
  return BitCast<Vector<float, N>>(bits << 16);
}

// In the high halves; the low ones hold anything.
template <int N>
inline Vector<uint32_t, N> RoundToBFloat16(Vector<float, N> x) {
  const auto bits = BitCast<Vector<uint32_t, N>>(x);
  const auto half = bits + 0x7fff;
  const auto rounded = (bits & 0x10000) != 0 ? half + 1 : half;
  return x == x ? rounded : bits | 0x400000;
}

template <int N>
inline Vector<float, N> WidenFloat16(Vector<uint32_t, N> bits) {
  using Floats = Vector<float, N>;
  using Ints = Vector<int32_t, N>;
  const auto magnitude = bits & 0x7fff;
  const auto subnormal = BitCast<Vector<uint32_t, N>>(
      __builtin_convertvector(BitCast<Ints>(magnitude), Floats) * 0x1p-24f);
  const auto normal = (magnitude << 13) + (112u << 23);
  const auto infinite = (magnitude << 13) | 0x7f800000u;
  const auto widened = magnitude < 0x400 ? subnormal : (magnitude < 0x7c00 ? normal : infinite);
  return BitCast<Floats>(widened | ((bits & 0x8000) << 16));
}

template <int N>
inline Vector<uint32_t, N> NarrowToFloat16(Vector<float, N> x) {
  using Floats = Vector<float, N>;
  using Words = Vector<uint32_t, N>;
  const auto bits = BitCast<Words>(x);
  const auto magnitude = bits & 0x7fffffff;
  // Adding 0.5 leaves multiples of 2^-24, the spacing of subnormals, rounded to even.
  const auto subnormal = BitCast<Words>(BitCast<Floats>(magnitude) + 0.5f) - 0x3f000000u;
  const auto normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const auto infinite =
      magnitude > 0x7f800000u ? ((magnitude >> 13) & 0x3ff) | 0x7e00u : Words{} + 0x7c00u;
  const auto narrowed =
      magnitude < 0x38800000u ? subnormal : (magnitude < 0x47800000u ? normal : infinite);
  return narrowed | ((bits >> 16) & 0x8000);
}

}  // namespace sgap::SGAP_ISA
