// Lanes of vectors, packed: those of a mask, or those from a bound on.
#pragma once

#include "cpu/simd/merge_lanes.h"
#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {

// Whether PackBits takes as long for 16 bits as for one.
#if defined(__AVX512VBMI2__)
constexpr bool kPacksBits = true;
#else
constexpr bool kPacksBits = false;
#endif

#if defined(__AVX512DQ__)
// The lanes of the mask, in order, in a register: stores that compress take several times as long
// on some processors. Into zeros of its own: on Zen 4 the instruction waits for what was in the
// register of its result, and GCC takes the same one each time.
template <typename T>
inline __m512i CompressLanes(uint32_t mask, __m512i x) {
  __m512i zeros;
  asm volatile("vpxord %0, %0, %0" : "=v"(zeros));
  if constexpr (sizeof(T) == 4) return _mm512_mask_compress_epi32(zeros, __mmask16(mask), x);
  return _mm512_mask_compress_epi64(zeros, __mmask8(mask), x);
}

#if defined(__AVX512VBMI2__)
// 0 to 63, of which PackBits takes some.
struct ByteNumbers {
  alignas(64) unsigned char of[64];
  constexpr ByteNumbers() : of() {
    for (int i = 0; i < 64; ++i) of[i] = static_cast<unsigned char>(i);
  }
};
constexpr ByteNumbers kByteNumbers;
#endif

template <typename T>
inline void StoreFirst(T* target, __m512i x, int count) {
  const uint32_t mask = (1u << count) - 1;
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_epi32(target, __mmask16(mask), x);
  _mm512_mask_storeu_epi64(target, __mmask8(mask), x);
}
#elif defined(SGAP_KEY_SORT)
// The same by a table of 256 masks, as there is no instruction for it.
template <typename T>
inline __m256i CompressLanes(uint32_t mask, __m256i x) {
  if (sizeof(T) == 8) mask = (mask & 1) * 3 + (mask & 2) * 6 + (mask & 4) * 12 + (mask & 8) * 24;
  const __m128i set = _mm_loadl_epi64((const __m128i*)kSetBits.of[mask]);
  return _mm256_permutevar8x32_epi32(x, _mm256_cvtepu8_epi32(set));
}

inline __m128i CompressLanes(uint32_t mask, __m128i x) {
  const __m128i set = _mm_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kSetBits.of[mask]));
  return _mm_castps_si128(_mm_permutevar_ps(_mm_castsi128_ps(x), set));
}
#endif

// Writes the lanes of x whose bit is set, in order; up to N may be written. Seldom more than eight
// of them are set.
template <typename T, int N>
inline void PackLanes(uint32_t mask, Vector<T, N> x, T* target) {
#if defined(__AVX512DQ__)
  if constexpr (N * sizeof(T) == 64) {
    const __m512i packed = CompressLanes<T>(mask, BitCast<__m512i>(x));
    if (sizeof(T) == 8 || __builtin_expect(__builtin_popcount(mask) > 8, 0)) {
      return _mm512_storeu_si512(target, packed);
    }
    return _mm256_storeu_si256((__m256i*)target, _mm512_castsi512_si256(packed));
  }
#elif defined(SGAP_KEY_SORT)
  if constexpr (N * sizeof(T) == 32) {
    const __m256i packed = CompressLanes<T>(mask, BitCast<__m256i>(x));
    return _mm256_storeu_si256((__m256i*)target, packed);
  }
#endif
  for (int count = 0; mask != 0; mask &= mask - 1, ++count) target[count] = x[__builtin_ctz(mask)];
}

// Writes these lanes and nothing behind them. Returns how many they are.
template <typename T, int N>
inline int PackOnly(uint32_t mask, Vector<T, N> x, T* target) {
  const int count = __builtin_popcount(mask);
#if defined(__AVX512DQ__)
  if constexpr (N * sizeof(T) == 64) {
    StoreFirst(target, CompressLanes<T>(mask, BitCast<__m512i>(x)), count);
    return count;
  }
#endif
  for (int i = 0; mask != 0; mask &= mask - 1, ++i) target[i] = x[__builtin_ctz(mask)];
  return count;
}

// Writes the numbers of a mask's bits, counted from `first`, in order; up to 64 may be written.
// Seldom more than 16 are set. Returns how many are.
inline int PackBits(uint64_t mask, int32_t first, int32_t* target) {
  const int count = __builtin_popcountll(mask);
#if defined(__AVX512VBMI2__)
  const __m512i from = _mm512_set1_epi32(first);
  __m512i numbers;  // zeros of its own, as for CompressLanes
  asm volatile("vpxord %0, %0, %0" : "=v"(numbers));
  numbers = _mm512_mask_compress_epi8(numbers, mask, _mm512_load_si512(kByteNumbers.of));
  for (int i = 0;;) {
    const __m512i lanes = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(numbers));
    _mm512_storeu_si512(target + i, _mm512_add_epi32(from, lanes));
    i += 16;
    if (__builtin_expect(i >= count, 1)) break;
    numbers = _mm512_shuffle_i32x4(numbers, numbers, 0x39);  // those of the next 16
  }
#else
  for (int i = 0; mask != 0; mask &= mask - 1) target[i++] = first + __builtin_ctzll(mask);
#endif
  return count;
}

// The same of the lanes of x where `tested` is at least `least`. Returns how many they are.
template <typename T, int N>
inline int PackLanesFrom(Vector<T, N> tested, T least, Vector<T, N> x, T* target) {
#if defined(__AVX512DQ__)
  if constexpr (std::is_same_v<T, int32_t> && N == 16) {
    const __mmask16 mask =
        _mm512_cmpge_epi32_mask(BitCast<__m512i>(tested), _mm512_set1_epi32(least));
    const int count = __builtin_popcount(InRegister(mask));
    const __m512i packed = CompressLanes<T>(mask, BitCast<__m512i>(x));
    if (__builtin_expect(count > 8, 0)) {
      _mm512_storeu_si512(target, packed);
    } else {
      _mm256_storeu_si256((__m256i*)target, _mm512_castsi512_si256(packed));
    }
    return count;
  }
#endif
  const uint32_t mask = LanesFrom<T, N>(tested, least);
  PackLanes<T, N>(mask, x, target);
  return __builtin_popcount(mask);
}

#if defined(__AVX512DQ__)
// PackLanes of a mask of `count` lanes in a register of masks. A store of all lanes takes less than
// one of some, as a mask of these has to be made.
template <typename T, int N, int kMostly>
inline void PackMasked(__mmask16 mask, int count, Vector<T, N> x, Vector<int32_t, N> numbers,
                       T* target, int32_t* target_numbers, int64_t room) {
  __m512i wide;
  if constexpr (N == 8) {
    wide = _mm512_castsi256_si512(BitCast<__m256i>(numbers));
  } else {
    wide = BitCast<__m512i>(numbers);
  }
  const __m512i packed = CompressLanes<T>(mask, BitCast<__m512i>(x));
  const __m512i packed_numbers = CompressLanes<int32_t>(mask, wide);
  if (kMostly >= N && room >= N) {
    _mm512_storeu_si512(target, packed);
    if constexpr (N == 16) {
      _mm512_storeu_si512(target_numbers, packed_numbers);
    } else {
      _mm256_storeu_si256((__m256i*)target_numbers, _mm512_castsi512_si256(packed_numbers));
    }
    return;
  }
  if (kMostly >= N || __builtin_expect(count > kMostly, 0)) {
    StoreFirst(target, packed, count);
    StoreFirst(target_numbers, packed_numbers, count);
    return;
  }
  // A store on two lines costs two.
  const __m256i low = _mm512_castsi512_si256(packed);
  const __m256i low_numbers = _mm512_castsi512_si256(packed_numbers);
  if constexpr (kMostly * sizeof(T) > 16) {
    _mm256_storeu_si256((__m256i*)target, low);
  } else {
    _mm_storeu_si128((__m128i*)target, _mm256_castsi256_si128(low));
  }
  if constexpr (kMostly > 4) {
    _mm256_storeu_si256((__m256i*)target_numbers, low_numbers);
  } else {
    _mm_storeu_si128((__m128i*)target_numbers, _mm256_castsi256_si128(low_numbers));
  }
}
#endif

// Writes the lanes of x and of `numbers` whose bit is set, in order, and up to N of each where
// there is room for so many, or anyhow where mostly at most kMostly < N of them are set. Returns
// how many are.
template <typename T, int N, int kMostly = N>
inline int PackLanes(uint32_t mask, Vector<T, N> x, Vector<int32_t, N> numbers, T* target,
                     int32_t* target_numbers, [[maybe_unused]] int64_t room = N) {
#if defined(__AVX512DQ__)
  if constexpr (N * sizeof(T) == 64) {
    const int count = __builtin_popcount(mask);
    PackMasked<T, N, kMostly>(__mmask16(mask), count, x, numbers, target, target_numbers, room);
    return count;
  }
#elif defined(SGAP_KEY_SORT)
  if constexpr (N * sizeof(T) == 32) {
    if (room >= N) {
      PackLanes<T, N>(mask, x, target);
      if constexpr (N == 8) {
        PackLanes<int32_t, N>(mask, numbers, target_numbers);
      } else {
        _mm_storeu_si128((__m128i*)target_numbers, CompressLanes(mask, BitCast<__m128i>(numbers)));
      }
      return __builtin_popcount(mask);
    }
  }
#endif
  int count = 0;
  for (; mask != 0; mask &= mask - 1, ++count) {
    const int lane = __builtin_ctz(mask);
    target[count] = x[lane];
    target_numbers[count] = numbers[lane];
  }
  return count;
}

// The same of the lanes that are at least `least`, where there is room for N.
template <typename T, int N, int kMostly>
inline int PackLanesFrom(Vector<T, N> x, T least, Vector<int32_t, N> numbers, T* target,
                         int32_t* target_numbers) {
#if defined(__AVX512DQ__)
  if constexpr (std::is_same_v<T, float> && N == 16) {
    const __mmask16 mask =
        _mm512_cmp_ps_mask(BitCast<__m512>(x), _mm512_set1_ps(least), _CMP_GE_OQ);
    const int count = __builtin_popcount(InRegister(mask));
    PackMasked<T, N, kMostly>(mask, count, x, numbers, target, target_numbers, N);
    return count;
  }
#endif
  return PackLanes<T, N, kMostly>(LanesFrom<T, N>(x, least), x, numbers, target, target_numbers);
}

// The same of four vectors, with numbers counted from `first`: up to 4 N of each may be written.
// Fast where seldom more than N lanes are at least `least`.
template <typename T, int N>
inline int PackLanesOfFour(const Vector<T, N>* x, T least, int32_t first, T* target,
                           int32_t* target_numbers) {
#if defined(__AVX512VBMI2__)
  if constexpr (std::is_floating_point_v<T> && N * sizeof(T) == 64) {
    __mmask64 mask;
    if constexpr (N == 16) {
      const __m512 bound = _mm512_set1_ps(least);
      const auto from = [&](int v) { return _mm512_cmp_ps_mask(x[v], bound, _CMP_GE_OQ); };
      mask = _mm512_kunpackd(_mm512_kunpackw(from(3), from(2)), _mm512_kunpackw(from(1), from(0)));
    } else {
      mask = 0;
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) mask |= uint64_t(LanesFrom<T, N>(x[v], least)) << (v * N);
    }
    const int count = __builtin_popcountll(mask);
    __m512i bytes;  // zeros of its own, as for CompressLanes
    asm volatile("vpxord %0, %0, %0" : "=v"(bytes));
    bytes = _mm512_mask_compress_epi8(bytes, mask, _mm512_load_si512(kByteNumbers.of));
    for (int i = 0;;) {
      const __m128i own = _mm512_castsi512_si128(bytes);
      if constexpr (N == 16) {
        const __m512i lanes = _mm512_cvtepu8_epi32(own);
        const __m512 low = _mm512_permutex2var_ps(x[0], lanes, x[1]);
        const __m512 high = _mm512_permutex2var_ps(x[2], lanes, x[3]);
        const __mmask16 from_high = _mm512_test_epi32_mask(lanes, _mm512_set1_epi32(2 * N));
        _mm512_storeu_ps(target + i, _mm512_mask_blend_ps(from_high, low, high));
        _mm512_storeu_si512(target_numbers + i, _mm512_add_epi32(_mm512_set1_epi32(first), lanes));
      } else {
        const __m512i lanes = _mm512_cvtepu8_epi64(own);
        const __m512d low = _mm512_permutex2var_pd(x[0], lanes, x[1]);
        const __m512d high = _mm512_permutex2var_pd(x[2], lanes, x[3]);
        const __mmask8 from_high = _mm512_test_epi64_mask(lanes, _mm512_set1_epi64(2 * N));
        _mm512_storeu_pd(target + i, _mm512_mask_blend_pd(from_high, low, high));
        _mm256_storeu_si256((__m256i*)(target_numbers + i),
                            _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_cvtepu8_epi32(own)));
      }
      i += N;
      if (__builtin_expect(i >= count, 1)) return count;
      bytes = _mm512_alignr_epi64(bytes, bytes, N / 8);  // those of the next N
    }
  }
#endif
  int count = 0;
  Vector<int32_t, N> numbers = LaneNumbers<int32_t, N>() + first;
  for (int v = 0; v < 4; ++v, numbers += N) {
    count += PackLanesFrom<T, N, N>(x[v], least, numbers, target + count, target_numbers + count);
  }
  return count;
}

}  // namespace sgap::SGAP_ISA
