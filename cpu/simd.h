// Vectors of accumulators: loads that widen, stores that narrow, parts of a vector. The only file
// with code for one instruction set; everything else is GCC vector arithmetic.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dtype.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace sgap::SGAP_ISA {

#if defined(__AVX512VL__) && defined(__AVX512BW__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <typename T, int N>
using Vector = typename VectorOf<T, N>::type;

// Lanes of the widest vector of T's accumulators.
template <typename T>
constexpr int kLanes = kVectorBytes / sizeof(Accumulator<T>);

inline void Prefetch(const void* address) { __builtin_prefetch(address); }

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

template <int N>
inline Vector<uint32_t, N> NarrowToBFloat16(Vector<float, N> x) {
  const auto bits = BitCast<Vector<uint32_t, N>>(x);
  const auto rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? rounded : (bits >> 16) | 0x40;
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

template <typename T, int N>
inline Vector<Accumulator<T>, N> Load(const T* source) {
  if constexpr (sizeof(T) >= 4) {
    Vector<T, N> result;
    std::memcpy(&result, source, sizeof(result));
    return result;
  } else {
    Vector<uint16_t, N> bits;
    std::memcpy(&bits, source, sizeof(bits));
#if defined(__F16C__)
    if constexpr (std::is_same_v<T, Float16> && N == 4) {
      return BitCast<Vector<float, 4>>(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)&bits)));
    } else if constexpr (std::is_same_v<T, Float16> && N == 8) {
      return BitCast<Vector<float, 8>>(_mm256_cvtph_ps(BitCast<__m128i>(bits)));
    }
#endif
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, Float16> && N == 16) {
      return BitCast<Vector<float, 16>>(_mm512_maskz_cvtph_ps(0xffff, BitCast<__m256i>(bits)));
    }
#endif
    using Words = Vector<uint32_t, N>;
    if constexpr (std::is_same_v<T, BFloat16>) {
      return WidenBFloat16<N>(__builtin_convertvector(bits, Words));
    } else {
      return WidenFloat16<N>(__builtin_convertvector(bits, Words));
    }
  }
}

template <typename T, int N>
inline void Store(T* target, Vector<Accumulator<T>, N> x) {
  if constexpr (sizeof(T) >= 4) {
    std::memcpy(target, &x, sizeof(x));
  } else {
    using Halves = Vector<uint16_t, N>;
    Halves bits;
    if constexpr (std::is_same_v<T, BFloat16>) {
      bits = __builtin_convertvector(NarrowToBFloat16<N>(x), Halves);
    } else {
      bits = __builtin_convertvector(NarrowToFloat16<N>(x), Halves);
    }
    std::memcpy(target, &bits, sizeof(bits));
  }
}

// The first `count` (1 to N) elements; the other lanes are zero and their memory is not read.
template <typename T, int N>
inline Vector<Accumulator<T>, N> LoadPartial(const T* source, int count) {
#if defined(__AVX512VL__) && defined(__AVX512BW__)
  const uint32_t mask = (1u << count) - 1;
  if constexpr (std::is_same_v<T, float> && N == 16) {
    return BitCast<Vector<float, N>>(_mm512_maskz_loadu_ps(__mmask16(mask), source));
  } else if constexpr (std::is_same_v<T, float> && N == 8) {
    return BitCast<Vector<float, N>>(_mm256_maskz_loadu_ps(__mmask8(mask), source));
  } else if constexpr (std::is_same_v<T, float> && N == 4) {
    return BitCast<Vector<float, N>>(_mm_maskz_loadu_ps(__mmask8(mask), source));
  } else if constexpr (std::is_same_v<T, double> && N == 8) {
    return BitCast<Vector<double, N>>(_mm512_maskz_loadu_pd(__mmask8(mask), source));
  } else if constexpr (std::is_same_v<T, double> && N == 4) {
    return BitCast<Vector<double, N>>(_mm256_maskz_loadu_pd(__mmask8(mask), source));
  } else if constexpr (sizeof(T) == 2 && N == 16) {
    const __m256i bits = _mm256_maskz_loadu_epi16(__mmask16(mask), source);
    return Load<T, N>(reinterpret_cast<const T*>(&bits));
  } else if constexpr (sizeof(T) == 2 && N == 8) {
    const __m128i bits = _mm_maskz_loadu_epi16(__mmask8(mask), source);
    return Load<T, N>(reinterpret_cast<const T*>(&bits));
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float> && N == 8) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes);
    return BitCast<Vector<float, N>>(_mm256_maskload_ps(source, mask));
  } else if constexpr (std::is_same_v<T, float> && N == 4) {
    const __m128i mask = _mm_cmpgt_epi32(_mm_set1_epi32(count), _mm_setr_epi32(0, 1, 2, 3));
    return BitCast<Vector<float, N>>(_mm_maskload_ps(source, mask));
  } else if constexpr (std::is_same_v<T, double> && N == 4) {
    const __m256i lanes = _mm256_setr_epi64x(0, 1, 2, 3);
    const __m256i mask = _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), lanes);
    return BitCast<Vector<double, N>>(_mm256_maskload_pd(source, mask));
  }
#endif
  T elements[N] = {};
  for (int i = 0; i < count; ++i) elements[i] = source[i];
  return Load<T, N>(elements);
}

template <typename T, int N>
inline void StorePartial(T* target, Vector<Accumulator<T>, N> x, int count) {
  T elements[N];
  Store<T, N>(elements, x);
  for (int i = 0; i < count; ++i) target[i] = elements[i];
}

template <typename T>
inline Accumulator<T> LoadScalar(const T* source) {
  if constexpr (sizeof(T) >= 4) {
    return *source;
  } else {
    T elements[4] = {*source};
    return Load<T, 4>(elements)[0];
  }
}

}  // namespace sgap::SGAP_ISA
