// Loads of elements that do not lie as the lanes do: repeated in several lanes, or gathered.
#pragma once

#include "cpu/simd/lane_sums.h"
#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {

// Whether 16 bits are repeated in a register and widened there by an instruction each.
#if defined(__AVX2__) && defined(__F16C__)
constexpr bool kWidensInLanes = true;
#else
constexpr bool kWidensInLanes = false;
#endif

// *source, of 16 bits in each of N lanes.
template <typename T, int N>
inline auto LoadInLanes(const T* source) {
  if constexpr (sizeof(T) >= 4) {
    return *source;
  } else {
    const auto halves = Vector<uint16_t, 2 * N>{} + source->bits;
    if constexpr (std::is_same_v<T, BFloat16>) {
      return WidenBFloat16<N>(BitCast<Vector<uint32_t, N>>(halves));
    } else {
      return Load<T, N>(reinterpret_cast<const T*>(&halves));
    }
  }
}

// kPart elements, again and again: lane i has source[i % kPart].
template <typename T, int N, int kPart>
inline Vector<T, N> LoadRepeated(const T* source) {
  constexpr int kBytes = kPart * sizeof(T);
#if defined(__AVX__)
  if constexpr (N * sizeof(T) == 32 && kBytes == 16) {
    return BitCast<Vector<T, N>>(_mm256_broadcast_ps((const __m128*)source));
  }
#endif
#if defined(__AVX512F__)
  if constexpr (N * sizeof(T) == 64) {
    if constexpr (kBytes == 4) return BitCast<Vector<T, N>>(_mm512_set1_ps(*(const float*)source));
    if constexpr (kBytes == 8) {
      double pair;
      std::memcpy(&pair, source, sizeof(pair));
      return BitCast<Vector<T, N>>(_mm512_set1_pd(pair));
    }
    if constexpr (kBytes == 16) {
      return BitCast<Vector<T, N>>(_mm512_broadcast_f32x4(_mm_loadu_ps((const float*)source)));
    }
    if constexpr (kBytes == 32) {
      return BitCast<Vector<T, N>>(_mm512_broadcast_f64x4(_mm256_loadu_pd((const double*)source)));
    }
  }
#endif
  if constexpr (kPart == N) return Load<T, N>(source);
  Vector<T, N> result;
  char* bytes = reinterpret_cast<char*>(&result);
  for (int i = 0; i < N / kPart; ++i) std::memcpy(bytes + i * kBytes, source, kBytes);
  return result;
}

// Lane i of x in lanes 4i to 4i + 3 of the result.
template <typename T, int N>
inline Vector<T, 4 * N> RepeatLanes4(Vector<T, N> x) {
  if constexpr (N == 1) {
    return Vector<T, 4>{} + x[0];
  } else {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4 && N == 4) {
      const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
      return BitCast<Vector<T, 16>>(
          _mm512_permutevar_ps(_mm512_broadcast_f32x4(BitCast<__m128>(x)), which));
    }
#endif
    Vector<T, N / 2> low, high;
    for (int i = 0; i < N / 2; ++i) low[i] = x[i], high[i] = x[N / 2 + i];
    return Concat<T, 2 * N>(RepeatLanes4<T, N / 2>(low), RepeatLanes4<T, N / 2>(high));
  }
}

// The same of N elements in memory. Four of bfloat16 are repeated by the load, and a shuffle of
// bytes widens them too.
template <typename T, int N>
inline Vector<Accumulator<T>, 4 * N> LoadLanes4(const T* source) {
#if defined(__AVX512BW__)
  if constexpr (std::is_same_v<T, BFloat16> && N == 4) {
    int64_t four;
    std::memcpy(&four, source, sizeof(four));
    const __m512i which =
        _mm512_set_epi32(0x07068080, 0x07068080, 0x07068080, 0x07068080, 0x05048080, 0x05048080,
                         0x05048080, 0x05048080, 0x03028080, 0x03028080, 0x03028080, 0x03028080,
                         0x01008080, 0x01008080, 0x01008080, 0x01008080);
    return BitCast<Vector<float, 4 * N>>(_mm512_shuffle_epi8(_mm512_set1_epi64(four), which));
  }
#endif
#if defined(__AVX512DQ__)
  if constexpr (std::is_same_v<T, float> && N == 2) {
    const __m256i which = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    const __m256d pairs = _mm256_broadcast_sd(reinterpret_cast<const double*>(source));
    return BitCast<Vector<float, 8>>(_mm256_permutevar_ps(_mm256_castpd_ps(pairs), which));
  }
#endif
  return RepeatLanes4<Accumulator<T>, N>(Load<T, N>(source));
}

// Four elements, each kTimes (2, 4 or 8) one after another, in one register or, kTimes = 8, two.
template <typename T, int kTimes>
inline void LoadFourRepeated(const T* source,
                             Vector<Accumulator<T>, kTimes == 8 ? 16 : 4 * kTimes>* lanes) {
  using Acc = Accumulator<T>;
  if constexpr (kTimes == 4) {
    lanes[0] = LoadLanes4<T, 4>(source);
  } else {
    const Vector<Acc, 4> four = Load<T, 4>(source);
#if defined(__AVX512VL__)
    if constexpr (sizeof(Acc) == 4 && kTimes == 2) {
      const __m256i which = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
      const __m256 low = _mm256_castps128_ps256(BitCast<__m128>(four));
      lanes[0] = BitCast<Vector<Acc, 8>>(_mm256_permutevar8x32_ps(low, which));
      return;
    }
    if constexpr (sizeof(Acc) == 4 && kTimes == 8) {
      const __m512 low = _mm512_castps128_ps512(BitCast<__m128>(four));
      const __m512i second = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
      const __m512i fourth = _mm512_set_epi32(3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2);
      lanes[0] = BitCast<Vector<Acc, 16>>(_mm512_permutexvar_ps(second, low));
      lanes[1] = BitCast<Vector<Acc, 16>>(_mm512_permutexvar_ps(fourth, low));
      return;
    }
#endif
    auto* lane = reinterpret_cast<Acc*>(lanes);
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < kTimes; ++j) *lane++ = four[i];
    }
  }
}

// Eight elements. Those of bfloat16 are repeated by the load, and a shuffle of bytes widens them.
template <typename T>
inline Vector<Accumulator<T>, 8> LoadEight(const T* source) {
#if defined(__AVX2__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    const __m256i which = _mm256_set_epi32(0x0f0e8080, 0x0d0c8080, 0x0b0a8080, 0x09088080,
                                           0x07068080, 0x05048080, 0x03028080, 0x01008080);
    return BitCast<Vector<float, 8>>(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all), which));
  }
#endif
  return Load<T, 8>(source);
}

// Four elements, as accumulators, again and again.
template <typename T, int N>
inline Vector<Accumulator<T>, N> LoadRowRepeated(const T* source) {
  if constexpr (sizeof(T) >= 4) {
    return LoadRepeated<T, N, 4>(source);
  } else if constexpr (N == 4) {
    return Load<T, 4>(source);
  } else {
    const auto half = LoadRowRepeated<T, N / 2>(source);
    return Concat<Accumulator<T>, N / 2>(half, half);
  }
}

// Element kWhich of these four, in all lanes.
template <int kWhich, typename V, int... i>
inline V OneOfFour(V repeated, std::integer_sequence<int, i...>) {
  return Shuffle<(i / 4 * 4 + kWhich)...>(repeated, repeated);
}
template <int kWhich, typename V>
inline V OneOfFour(V repeated) {
  constexpr int n = sizeof(V) / sizeof(repeated[0]);
  return OneOfFour<kWhich>(repeated, std::make_integer_sequence<int, n>());
}

// 16 lanes, half of either.
template <typename T>
inline Vector<Accumulator<T>, 16> LoadTwoRowsRepeated(const T* low, const T* high) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m512 both = _mm512_broadcast_f32x4(_mm_loadu_ps((const float*)low));
    return BitCast<Vector<float, 16>>(
        _mm512_mask_broadcast_f32x4(both, 0xff00, _mm_loadu_ps((const float*)high)));
  }
#endif
  return Concat<Accumulator<T>, 8>(LoadRowRepeated<T, 8>(low), LoadRowRepeated<T, 8>(high));
}

// LoadLanes4 of four elements kParts times; those of float16 are widened together.
template <typename T, int kParts>
inline void LoadLanes4(const T* source, Vector<Accumulator<T>, 16>* lanes) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, Float16> && kParts > 1) {
    __m512 all;
    if constexpr (kParts == 4) {
      all = BitCast<__m512>(Load<T, 16>(source));
    } else {
      all = _mm512_castps256_ps512(BitCast<__m256>(Load<T, 8>(source)));
    }
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      const int at = 4 * i;
      const __m512i which =
          _mm512_set_epi32(at + 3, at + 3, at + 3, at + 3, at + 2, at + 2, at + 2, at + 2, at + 1,
                           at + 1, at + 1, at + 1, at, at, at, at);
      lanes[i] = BitCast<Vector<float, 16>>(_mm512_permutexvar_ps(which, all));
    }
    return;
  }
#endif
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) lanes[i] = LoadLanes4<T, 4>(source + 4 * i);
}

// source[index_of(i)] in lane i: one load each, which is faster than the gather instruction
// (measured on Zen 5: 0.18 against 0.30 ns an element). Four of bfloat16 are loaded into the high
// halves of lanes, where they need no widening.
template <typename T, int N, typename IndexOf>
[[gnu::always_inline]] inline Vector<Accumulator<T>, N> GatherOf(const T* source,
                                                                 IndexOf index_of) {
  if constexpr (sizeof(T) >= 4) {
    Vector<T, N> result;
    for (int i = 0; i < N; ++i) result[i] = source[index_of(i)];
    return result;
  } else if constexpr (N < 4) {
    Vector<Accumulator<T>, N> result;
    for (int i = 0; i < N; ++i) result[i] = LoadScalar(source + index_of(i));
    return result;
  } else if constexpr (std::is_same_v<T, BFloat16> && N == 4) {
    Vector<uint16_t, 2 * N> bits{};
    for (int i = 0; i < N; ++i) bits[2 * i + 1] = source[index_of(i)].bits;
    return BitCast<Vector<float, N>>(bits);
  } else {
    Vector<uint16_t, N> bits;
    for (int i = 0; i < N; ++i) bits[i] = source[index_of(i)].bits;
    return Load<T, N>(reinterpret_cast<const T*>(&bits));
  }
}

template <typename T, int N>
inline Vector<Accumulator<T>, N> Gather(const T* source, const int32_t* indices) {
  return GatherOf<T, N>(source, [=](int i) { return size_t(indices[i]); });
}

// The same with the indices loaded two by two: 0.93 of the time in a loop of sums, 1.03 where
// products are stored (measured there); of 16 bits 0.9 in a loop of sums (Zen 4).
template <typename T, int N>
inline Vector<Accumulator<T>, N> GatherByPairs(const T* source, const int32_t* indices) {
  return GatherOf<T, N>(source, [=](int i) -> size_t {
    uint64_t pair;
    std::memcpy(&pair, indices + i / 2 * 2, sizeof(pair));
    return i % 2 ? pair >> 32 : uint32_t(pair);
  });
}

// Elements that fill eight lanes, kTimes of them each. Where a mask is cheap, each is repeated by
// its load and blended: on Intel one unit alone inserts elements, and two or three blend.
template <typename T, int kTimes>
inline Vector<Accumulator<T>, 8> GatherEight(const T* source, const int32_t* indices) {
  static_assert(kTimes == 1 || kTimes == 2);
#if defined(__AVX512VL__)
  if constexpr (std::is_same_v<T, float>) {
    constexpr int kCount = 8 / kTimes;
    uint64_t pairs[kCount / 2];
    std::memcpy(pairs, indices, sizeof(pairs));
    const auto at = [&](int i) {
      return _mm_load_ss(source + (i % 2 ? pairs[i / 2] >> 32 : uint32_t(pairs[i / 2])));
    };
    __m256 x = _mm256_broadcastss_ps(at(0));
#pragma GCC unroll 8
    for (int i = 1; i < kCount; ++i) {
      x = _mm256_mask_broadcastss_ps(x, __mmask8((1 << kTimes) - 1) << (i * kTimes), at(i));
    }
    return BitCast<Vector<float, 8>>(x);
  }
#endif
  const auto low = GatherByPairs<T, 4>(source, indices);
  if constexpr (kTimes == 1) {
    return Concat<Accumulator<T>, 4>(low, GatherByPairs<T, 4>(source, indices + 4));
  } else {
    Vector<Accumulator<T>, 8> result;
    for (int i = 0; i < 8; ++i) result[i] = low[i / 2];
    return result;
  }
}

// Eight elements by the instruction.
inline Vector<float, 8> GatherAtOnce(const float* source, const int32_t* indices) {
#if defined(__AVX512F__)
  const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indices));
  return BitCast<Vector<float, 8>>(_mm256_i32gather_ps(source, all, sizeof(float)));
#else
  return Gather<float, 8>(source, indices);
#endif
}

}  // namespace sgap::SGAP_ISA
