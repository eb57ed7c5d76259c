// Vectors of accumulators: loads that widen, stores that narrow, parts of a vector. The only file
// with code for one instruction set; everything else is GCC vector arithmetic.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/common/dtype.h"
#include "cpu/common/machine.h"
#include "cpu/simd/half.h"

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

// Whether choices that were measured on Zen 5 apply.
inline bool OnZen5() { return kVectorBytes == 64 && ThisMachine().zen5(); }

// Lanes of the widest vector of T's accumulators.
template <typename T>
constexpr int kLanes = kVectorBytes / sizeof(Accumulator<T>);

// x y + sum, with one rounding where the instruction set can: whether the compiler would fuse an
// expression depends on its options, and the bits of sums must not.
template <typename T>
inline T MultiplyAdd(T x, T y, T sum) {
#if defined(__FMA__)
  if constexpr (std::is_same_v<T, float>) return __builtin_fmaf(x, y, sum);
  if constexpr (std::is_same_v<T, double>) return __builtin_fma(x, y, sum);
#endif
  return sum + x * y;
}

inline void Prefetch(const void* address) { __builtin_prefetch(address); }

// N 16-bit floats as words, and back. GCC makes of __builtin_convertvector up to six instructions
// where there is one.
template <int N>
inline Vector<uint32_t, N> WidenWords(const void* source) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    return BitCast<Vector<uint32_t, N>>(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)source)));
  }
#endif
#if defined(__AVX2__)
  if constexpr (N == 8) {
    return BitCast<Vector<uint32_t, N>>(
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)source)));
  } else if constexpr (N == 4) {
    return BitCast<Vector<uint32_t, N>>(
        _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)source)));
  }
#endif
  Vector<uint16_t, N> bits;
  std::memcpy(&bits, source, sizeof(bits));
  return __builtin_convertvector(bits, Vector<uint32_t, N>);
}

template <int N>
inline Vector<uint16_t, N> NarrowWords(Vector<uint32_t, N> words) {
#if defined(__AVX512VL__)
  if constexpr (N == 16) {
    return BitCast<Vector<uint16_t, N>>(_mm512_cvtepi32_epi16(BitCast<__m512i>(words)));
  } else if constexpr (N == 8) {
    return BitCast<Vector<uint16_t, N>>(_mm256_cvtepi32_epi16(BitCast<__m256i>(words)));
  } else if constexpr (N == 4) {
    const __m128i narrow = _mm_cvtepi32_epi16(BitCast<__m128i>(words));
    return BitCast<Vector<uint16_t, N>>(_mm_cvtsi128_si64(narrow));
  }
#elif defined(__AVX2__)
  if constexpr (N == 8) {
    const __m256i bits = BitCast<__m256i>(words);
    const __m128i high = _mm256_extracti128_si256(bits, 1);
    return BitCast<Vector<uint16_t, N>>(_mm_packus_epi32(_mm256_castsi256_si128(bits), high));
  } else if constexpr (N == 4) {
    const __m128i bits = BitCast<__m128i>(words);
    return BitCast<Vector<uint16_t, N>>(_mm_cvtsi128_si64(_mm_packus_epi32(bits, bits)));
  }
#endif
  return __builtin_convertvector(words, Vector<uint16_t, N>);
}

template <int N>
inline Vector<uint16_t, N> HighHalves(Vector<uint32_t, N> words) {
#if defined(__AVX512BW__)
  if constexpr (N == 16) {
    const __m512i odd = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 31, 29, 27,
                                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m512i halves = _mm512_permutexvar_epi16(odd, BitCast<__m512i>(words));
    return BitCast<Vector<uint16_t, N>>(_mm512_castsi512_si256(halves));
  } else if constexpr (N == 8) {
    const __m256i odd = _mm256_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m256i halves = _mm256_permutexvar_epi16(odd, BitCast<__m256i>(words));
    return BitCast<Vector<uint16_t, N>>(_mm256_castsi256_si128(halves));
  }
#endif
#if defined(__AVX2__)
  if constexpr (N == 4) {
    const __m128i odd = _mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i halves = _mm_shuffle_epi8(BitCast<__m128i>(words), odd);
    return BitCast<Vector<uint16_t, N>>(_mm_cvtsi128_si64(halves));
  }
#endif
  return NarrowWords<N>(words >> 16);
}

template <typename T, int N>
inline Vector<Accumulator<T>, N> Load(const T* source) {
  if constexpr (sizeof(T) >= 4) {
    Vector<T, N> result;
    std::memcpy(&result, source, sizeof(result));
    return result;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return WidenBFloat16<N>(WidenWords<N>(source));
  } else {
#if defined(__AVX512F__)
    if constexpr (N == 16) {
      return BitCast<Vector<float, N>>(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source)));
    }
#endif
#if defined(__F16C__)
    if constexpr (N == 8) {
      return BitCast<Vector<float, N>>(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source)));
    } else if constexpr (N == 4) {
      return BitCast<Vector<float, N>>(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)source)));
    }
#endif
    return WidenFloat16<N>(WidenWords<N>(source));
  }
}

// kVectors vectors from `source` on, of as many neighbours the even elements and then the odd ones
// where that is cheaper: of bfloat16 it takes one instruction for each. InOrder undoes it.
template <typename T, int N, int kVectors>
inline void LoadApart(const T* source, Vector<Accumulator<T>, N>* x) {
  constexpr int kPaired = std::is_same_v<T, BFloat16> ? kVectors / 2 * 2 : 0;
  if constexpr (kPaired > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kPaired; i += 2) {
      Vector<uint32_t, N> pairs;
      std::memcpy(&pairs, source + i * N, sizeof(pairs));
      x[i] = WidenBFloat16<N>(pairs);
      x[i + 1] = BitCast<Vector<float, N>>(pairs & 0xffff0000u);
    }
  }
#pragma GCC unroll 16
  for (int i = kPaired; i < kVectors; ++i) x[i] = Load<T, N>(source + i * N);
}

// Rounds to nearest even whatever the thread's mode. The instructions for float16 know subnormal
// results in any mode.
template <typename T, int N>
inline Vector<uint16_t, N> Narrow(Vector<float, N> x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return HighHalves<N>(RoundToBFloat16<N>(x));
  } else {
    using Halves [[maybe_unused]] = Vector<uint16_t, N>;
#if defined(__AVX512F__)
    if constexpr (N == 16) {
      return BitCast<Halves>(_mm512_cvtps_ph(BitCast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
#if defined(__F16C__)
    if constexpr (N == 8) {
      return BitCast<Halves>(_mm256_cvtps_ph(BitCast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
    } else if constexpr (N == 4) {
      const __m128i bits = _mm_cvtps_ph(BitCast<__m128>(x), _MM_FROUND_TO_NEAREST_INT);
      return BitCast<Halves>(_mm_cvtsi128_si64(bits));
    }
#endif
    return NarrowWords<N>(NarrowToFloat16<N>(x));
  }
}

template <typename T, int N>
inline void Store(T* target, Vector<Accumulator<T>, N> x) {
  if constexpr (sizeof(T) >= 4) {
    std::memcpy(target, &x, sizeof(x));
  } else {
    const Vector<uint16_t, N> bits = Narrow<T, N>(x);
    std::memcpy(target, &bits, sizeof(bits));
  }
}

// x, which the compiler now keeps in a register: it would load it once more for each use.
template <typename V>
inline V Kept(V x) {
  if constexpr (sizeof(V) > kVectorBytes) {
    asm("" : "+m"(x));  // wider than a register
  } else {
#if defined(__AVX512VL__)
    asm("" : "+v"(x));
#elif defined(__x86_64__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
  }
  return x;
}

// The first `count` (0 to N) of up to 4 16-bit elements, in a register: a vector loaded from memory
// where its elements have just been stored one by one waits for all of them.
inline uint64_t LoadHalves(const void* source, int count) {
  uint64_t bits = 0;
  if (count == 4) {
    std::memcpy(&bits, source, 8);
    return bits;
  }
  if (count < 2) {
    if (count == 1) std::memcpy(&bits, source, 2);
    return bits;
  }
  uint32_t first, last;
  std::memcpy(&first, source, 4);
  if (count == 2) return first;
  std::memcpy(&last, static_cast<const char*>(source) + 2, 4);  // the second element once more
  return first | uint64_t(last) << 16;
}

inline void StoreHalves(void* target, uint64_t bits, int count) {
  if (count == 4) {
    std::memcpy(target, &bits, 8);
    return;
  }
  if (count & 2) std::memcpy(target, &bits, 4);
  if (count & 1) {
    const auto last = uint16_t(bits >> (16 * (count - 1)));
    std::memcpy(static_cast<char*>(target) + 2 * (count - 1), &last, 2);
  }
}

#if defined(__AVX2__)
// The same of 1 to 8, without a branch: pairs by a masked load, then the last one by itself.
inline __m128i LoadHalvesMasked(const void* source, int count) {
  const __m128i pairs = _mm_cmpgt_epi32(_mm_set1_epi32(count / 2), _mm_setr_epi32(0, 1, 2, 3));
  const __m128i last =
      _mm_cmpeq_epi16(_mm_set1_epi16(int16_t(count - 1)), _mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7));
  int16_t bits;
  std::memcpy(&bits, static_cast<const char*>(source) + 2 * (count - 1), 2);
  return _mm_blendv_epi8(_mm_maskload_epi32(static_cast<const int*>(source), pairs),
                         _mm_set1_epi16(bits), last);
}
#endif

// The same of an address.
template <typename T>
inline const T* KeptPointer(const T* x) {
  asm("" : "+r"(x));
  return x;
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
  } else if constexpr (sizeof(T) == 2 && N == 4) {
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
  } else if constexpr (sizeof(T) == 2 && (N == 4 || N == 8)) {
    const __m128i bits = LoadHalvesMasked(source, count);
    return Load<T, N>(reinterpret_cast<const T*>(&bits));
  }
#endif
  if constexpr (sizeof(T) == 2 && N % 4 == 0) {
    // In a register: a load of a vector whose parts have just been stored waits for all of them.
    Vector<uint64_t, N / 4> parts;
    for (int i = 0; i < N / 4; ++i, count -= 4) {
      parts[i] = LoadHalves(source + 4 * i, count < 0 ? 0 : count < 4 ? count : 4);
    }
    return Load<T, N>(reinterpret_cast<const T*>(&parts));
  }
  T elements[N] = {};
  for (int i = 0; i < count; ++i) elements[i] = source[i];
  return Load<T, N>(elements);
}

template <typename T, int N>
inline void StorePartial(T* target, Vector<Accumulator<T>, N> x, int count) {
#if defined(__AVX512VL__) && defined(__AVX512BW__)
  const uint32_t mask = (1u << count) - 1;
  if constexpr (std::is_same_v<T, float> && N == 16) {
    return _mm512_mask_storeu_ps(target, __mmask16(mask), BitCast<__m512>(x));
  } else if constexpr (std::is_same_v<T, float> && N == 8) {
    return _mm256_mask_storeu_ps(target, __mmask8(mask), BitCast<__m256>(x));
  } else if constexpr (std::is_same_v<T, float> && N == 4) {
    return _mm_mask_storeu_ps(target, __mmask8(mask), BitCast<__m128>(x));
  } else if constexpr (std::is_same_v<T, double> && N == 8) {
    return _mm512_mask_storeu_pd(target, __mmask8(mask), BitCast<__m512d>(x));
  } else if constexpr (std::is_same_v<T, double> && N == 4) {
    return _mm256_mask_storeu_pd(target, __mmask8(mask), BitCast<__m256d>(x));
  } else if constexpr (sizeof(T) == 2 && N == 16) {
    return _mm256_mask_storeu_epi16(target, __mmask16(mask), BitCast<__m256i>(Narrow<T, N>(x)));
  } else if constexpr (sizeof(T) == 2 && N == 8) {
    return _mm_mask_storeu_epi16(target, __mmask8(mask), BitCast<__m128i>(Narrow<T, N>(x)));
  } else if constexpr (sizeof(T) == 2 && N == 4) {
    const auto bits = BitCast<int64_t>(Narrow<T, N>(x));
    return _mm_mask_storeu_epi16(target, __mmask8(mask), _mm_cvtsi64_si128(bits));
  }
#endif
  if constexpr (sizeof(T) == 2 && N % 4 == 0) {
    const auto parts = BitCast<Vector<uint64_t, N / 4>>(Narrow<T, N>(x));
    for (int i = 0; i < N / 4; ++i, count -= 4) {
      StoreHalves(target + 4 * i, parts[i], count < 0 ? 0 : count < 4 ? count : 4);
    }
    return;
  }
  T elements[N];
  Store<T, N>(elements, x);
  for (int i = 0; i < count; ++i) target[i] = elements[i];
}

// The first `count` (0 to N) 16-bit elements; the others are zero and their memory is not read.
template <int N>
inline Vector<uint16_t, N> LoadBits(const uint16_t* source, int count) {
#if defined(__AVX512VL__) && defined(__AVX512BW__)
  if constexpr (N == 32) {
    const uint32_t mask = count >= N ? ~0u : (1u << count) - 1;
    return BitCast<Vector<uint16_t, N>>(_mm512_maskz_loadu_epi16(mask, source));
  }
#endif
  uint16_t elements[N] = {};
  for (int i = 0; i < count; ++i) elements[i] = source[i];
  return BitCast<Vector<uint16_t, N>>(elements);
}

// Stores 32 values.
template <typename T>
inline void StoreTwo(T* target, Vector<float, 16> low, Vector<float, 16> high) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = _mm512_cvtne2ps_pbh(BitCast<__m512>(high), BitCast<__m512>(low));
    return std::memcpy(target, &bits, sizeof(bits)), void();
  }
#endif
  Store<T, 16>(target, low);
  Store<T, 16>(target + 16, high);
}

// sums + a_even * b_even + a_odd * b_odd, for pairs of bfloat16 in 32 bits, the even one below.
inline Vector<float, 16> DotPairs(Vector<float, 16> sums, Vector<uint32_t, 16> a,
                                  Vector<uint32_t, 16> b) {
#if defined(__AVX512BF16__)
  return BitCast<Vector<float, 16>>(
      _mm512_dpbf16_ps(BitCast<__m512>(sums), BitCast<__m512bh>(a), BitCast<__m512bh>(b)));
#else
  using Floats = Vector<float, 16>;
  sums += BitCast<Floats>(a << 16) * BitCast<Floats>(b << 16);
  return sums + BitCast<Floats>(a & 0xffff0000u) * BitCast<Floats>(b & 0xffff0000u);
#endif
}

// Whether there is an instruction for x * 2^n, and it.
#if defined(__AVX512F__)
template <typename T, int N>
constexpr bool kScalesByPowers = std::is_same_v<T, float> && N == 16;
#else
template <typename T, int N>
constexpr bool kScalesByPowers = false;
#endif

template <typename T, int N>
inline Vector<T, N> ScaleByPowers([[maybe_unused]] Vector<T, N> x,
                                  [[maybe_unused]] Vector<T, N> n) {
  static_assert(kScalesByPowers<T, N>);
#if defined(__AVX512F__)
  return BitCast<Vector<T, N>>(_mm512_scalef_ps(BitCast<__m512>(x), BitCast<__m512>(n)));
#endif
}

// 0, 1, ... N - 1.
template <typename T, int N>
inline Vector<T, N> LaneNumbers() {
  Vector<T, N> lanes;
  for (int i = 0; i < N; ++i) lanes[i] = T(i);
  return lanes;
}

// x with all but the first `count` lanes zero, whatever they held.
template <typename T, int N>
inline Vector<T, N> FirstLanes(Vector<T, N> x, int64_t count) {
  using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  return LaneNumbers<Index, N>() < Vector<Index, N>{} + Index(count) ? x : Vector<T, N>{};
}

// As LoadPartial for a count from 0 on, where all N elements may be read.
template <typename T, int N>
inline Vector<T, N> LoadFirst(const T* source, int64_t count) {
#if defined(__AVX512VL__)
  return LoadPartial<T, N>(source, int(count));
#else
  return FirstLanes<T, N>(Load<T, N>(source), count);
#endif
}

// Halves of a vector and back. Written out where GCC would go through memory.
template <typename T, int N>
inline Vector<T, N / 2> Half(Vector<T, N> x, int which) {
  using V = Vector<T, N / 2>;
#if defined(__AVX512DQ__)
  if constexpr (N * sizeof(T) == 64) {
    const __m512i bits = BitCast<__m512i>(x);
    return BitCast<V>(which ? _mm512_extracti64x4_epi64(bits, 1) : _mm512_castsi512_si256(bits));
  }
#endif
#if defined(__AVX2__)
  if constexpr (N * sizeof(T) == 32) {
    const __m256i bits = BitCast<__m256i>(x);
    return BitCast<V>(which ? _mm256_extracti128_si256(bits, 1) : _mm256_castsi256_si128(bits));
  }
#endif
  V half;
  std::memcpy(&half, reinterpret_cast<const char*>(&x) + which * sizeof(half), sizeof(half));
  return half;
}

template <typename T, int N>
inline Vector<T, 2 * N> Concat(Vector<T, N> low, Vector<T, N> high) {
  using V = Vector<T, 2 * N>;
#if defined(__AVX512DQ__)
  if constexpr (N * sizeof(T) == 32) {
    const __m512i wide = _mm512_zextsi256_si512(BitCast<__m256i>(low));
    return BitCast<V>(_mm512_inserti64x4(wide, BitCast<__m256i>(high), 1));
  }
#endif
#if defined(__AVX2__)
  if constexpr (N * sizeof(T) == 16) {
    return BitCast<V>(_mm256_set_m128i(BitCast<__m128i>(high), BitCast<__m128i>(low)));
  }
#endif
  V result;
  std::memcpy(&result, &low, sizeof(low));
  std::memcpy(reinterpret_cast<char*>(&result) + sizeof(low), &high, sizeof(high));
  return result;
}

template <typename T>
inline Accumulator<T> LoadScalar(const T* source) {
  if constexpr (sizeof(T) >= 4) {
    return *source;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return BitCast<float>(uint32_t(source->bits) << 16);
  } else {
#if defined(__F16C__)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(source->bits)));
#else
    return WidenFloat16<4>(Vector<uint32_t, 4>{source->bits})[0];
#endif
  }
}

#if defined(__AVX512DQ__)
// A mask of lanes as an integer. GCC 12 may keep a __mmask8 in one byte of the stack and read four
// where it was converted to an integer; not one that it must have in a register.
inline uint32_t InRegister(uint32_t mask) {
  asm("" : "+r"(mask));
  return mask;
}
#endif

// Bit i: whether lane i of x is at least `least`.
template <typename T, int N>
inline uint32_t LanesFrom(Vector<T, N> x, T least) {
#if defined(__AVX512DQ__)
  if constexpr (std::is_same_v<T, float> && N == 16) {
    return InRegister(_mm512_cmp_ps_mask(BitCast<__m512>(x), _mm512_set1_ps(least), _CMP_GE_OQ));
  } else if constexpr (std::is_same_v<T, int32_t> && N == 16) {
    return InRegister(_mm512_cmpge_epi32_mask(BitCast<__m512i>(x), _mm512_set1_epi32(least)));
  } else if constexpr (std::is_same_v<T, double> && N == 8) {
    return InRegister(_mm512_cmp_pd_mask(BitCast<__m512d>(x), _mm512_set1_pd(least), _CMP_GE_OQ));
  } else if constexpr (std::is_same_v<T, int64_t> && N == 8) {
    return InRegister(_mm512_cmpge_epi64_mask(BitCast<__m512i>(x), _mm512_set1_epi64(least)));
  }
#endif
#if defined(__AVX2__)
  if constexpr (N * sizeof(T) == 32 && sizeof(T) == 4) {
    return uint32_t(_mm256_movemask_ps(BitCast<__m256>(x >= least)));
  } else if constexpr (N * sizeof(T) == 32 && sizeof(T) == 8) {
    return uint32_t(_mm256_movemask_pd(BitCast<__m256d>(x >= least)));
  }
#endif
  uint32_t mask = 0;
  for (int i = 0; i < N; ++i) mask |= uint32_t(x[i] >= least) << i;
  return mask;
}

template <typename T>
inline void StoreScalar(T* target, Accumulator<T> x) {
  if constexpr (sizeof(T) >= 4) {
    *target = x;
  } else {
    target->bits = Narrow<T, 4>(Vector<float, 4>{x})[0];
  }
}

}  // namespace sgap::SGAP_ISA
