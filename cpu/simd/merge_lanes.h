// Vectors of sorted keys (key_sort.h) with a float32 value beside each: shifted by a lane, and
// stored without the lanes that do not count. Where SGAP_KEY_SORT is defined, the instruction set
// has them. The lowest bits of a key are free: while two vectors are merged they say which of their
// lanes a key comes from.
#pragma once

#include <cstdint>

#include "cpu/simd/key_sort.h"
#include "cpu/simd/simd.h"

#if defined(SGAP_KEY_SORT)
namespace sgap::SGAP_ISA {
namespace {

#if SGAP_KEY_SORT == 16

struct MergeLanes : KeyLanes {
  using Values = __m512;
  using Mask = __mmask16;

  static Mask First(int64_t count) { return Mask((1u << count) - 1); }
  using KeyLanes::Load, KeyLanes::Store;
  static Keys Load(Mask mask, const int32_t* from) { return _mm512_maskz_loadu_epi32(mask, from); }
  static Values Load(Mask mask, const float* from) { return _mm512_maskz_loadu_ps(mask, from); }
  static Keys Or(Keys x, Keys y) { return _mm512_or_si512(x, y); }
  static Keys AndNot(Keys x, Keys y) { return _mm512_andnot_si512(x, y); }
  template <int kBits>
  static Keys Up(Keys x) {
    return _mm512_slli_epi32(x, kBits);
  }
  template <int kBits>
  static Keys Down(Keys x) {
    return _mm512_srli_epi32(x, kBits);
  }
  static Keys Up(Keys x, int bits) { return _mm512_sll_epi32(x, _mm_cvtsi32_si128(bits)); }
  static Keys Down(Keys x, int bits) { return _mm512_srl_epi32(x, _mm_cvtsi32_si128(bits)); }
  static Keys Numbers() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  static Keys NumbersFrom(int32_t first) { return _mm512_add_epi32(Every(first), Numbers()); }
  static Values Taken(Values first, Keys keys, Values second) {
    return _mm512_permutex2var_ps(first, keys, second);
  }
  // Each lane's neighbour above, or below: of the last and the first lane in the other vector.
  static Keys Above(Keys x, Keys next) { return _mm512_alignr_epi32(next, x, 1); }
  static Values Above(Values x, Values next) {
    return _mm512_castsi512_ps(Above(_mm512_castps_si512(x), _mm512_castps_si512(next)));
  }
  static Keys Below(Keys x, Keys last) { return _mm512_alignr_epi32(x, last, 15); }
  static Mask Equal(Keys x, Keys y) { return _mm512_cmpeq_epi32_mask(x, y); }
  template <int kBit>
  static Mask HasBit(Keys x) {
    return _mm512_test_epi32_mask(x, Every(1 << kBit));
  }
  static Mask And(Mask x, Mask y) { return x & y; }
  static Mask ButNot(Mask x, Mask y) { return x & Mask(~y); }
  static Keys Chosen(Mask mask, Keys yes, Keys no) { return _mm512_mask_mov_epi32(no, mask, yes); }
  static Values Chosen(Mask mask, Values yes, Values no) {
    return _mm512_mask_mov_ps(no, mask, yes);
  }
  static Values OrZero(Mask mask, Values x) { return _mm512_maskz_mov_ps(mask, x); }
  static Values Zero() { return _mm512_setzero_ps(); }
  static Values Add(Values x, Values y) { return _mm512_add_ps(x, y); }
  static Values Subtract(Values x, Values y) { return _mm512_sub_ps(x, y); }
  static Values Multiply(Values x, Values y) { return _mm512_mul_ps(x, y); }
  static Values Same(float x) { return _mm512_set1_ps(x); }
  // x y + 0, as the first product of a sum is rounded.
  static Values Product(Values x, Values y) { return _mm512_fmadd_ps(x, y, Zero()); }
  static void Store(float* to, Values x) { _mm512_storeu_ps(to, x); }
  // from[i] for the lanes of the mask; others are not read.
  static Values Gather(Mask mask, Keys i, const float* from) {
    return _mm512_mask_i32gather_ps(Zero(), mask, i, from, 4);
  }
  static uint32_t Bits(Mask mask) { return mask; }

  // The lanes of the mask, and how many these are; all lanes may be written.
  static int Store(Mask mask, Keys x, Values values, int32_t* to, float* values_to) {
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, x));
    _mm512_storeu_ps(values_to, _mm512_maskz_compress_ps(mask, values));
    return __builtin_popcount(mask);
  }
};

#else

// For each byte the numbers of its bits that are set, ascending.
struct SetBits {
  uint8_t of[256][8] = {};
  constexpr SetBits() {
    for (int byte = 0; byte < 256; ++byte) {
      for (int bit = 0, n = 0; bit < 8; ++bit) {
        if (byte >> bit & 1) of[byte][n++] = uint8_t(bit);
      }
    }
  }
};
constexpr SetBits kSetBits;

struct MergeLanes : KeyLanes {
  using Values = __m256;
  using Mask = __m256i;

  static Mask First(int64_t count) { return _mm256_cmpgt_epi32(Every(int32_t(count)), Numbers()); }
  using KeyLanes::Load, KeyLanes::Store;
  static Keys Load(Mask mask, const int32_t* from) { return _mm256_maskload_epi32(from, mask); }
  static Values Load(Mask mask, const float* from) { return _mm256_maskload_ps(from, mask); }
  static Keys Or(Keys x, Keys y) { return _mm256_or_si256(x, y); }
  static Keys AndNot(Keys x, Keys y) { return _mm256_andnot_si256(x, y); }
  template <int kBits>
  static Keys Up(Keys x) {
    return _mm256_slli_epi32(x, kBits);
  }
  template <int kBits>
  static Keys Down(Keys x) {
    return _mm256_srli_epi32(x, kBits);
  }
  static Keys Up(Keys x, int bits) { return _mm256_sll_epi32(x, _mm_cvtsi32_si128(bits)); }
  static Keys Down(Keys x, int bits) { return _mm256_srl_epi32(x, _mm_cvtsi32_si128(bits)); }
  static Keys Numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static Keys NumbersFrom(int32_t first) { return _mm256_add_epi32(Every(first), Numbers()); }
  static Values Taken(Values first, Keys keys, Values second) {
    const Values of_second = _mm256_castsi256_ps(_mm256_slli_epi32(keys, 28));  // the bit for 8
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, keys),
                            _mm256_permutevar8x32_ps(second, keys), of_second);
  }
  static Keys Above(Keys x, Keys next) {
    return _mm256_permutevar8x32_epi32(_mm256_blend_epi32(x, next, 1),
                                       _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 0));
  }
  static Values Above(Values x, Values next) {
    return _mm256_castsi256_ps(Above(_mm256_castps_si256(x), _mm256_castps_si256(next)));
  }
  static Keys Below(Keys x, Keys last) {
    return _mm256_permutevar8x32_epi32(_mm256_blend_epi32(x, last, 0x80),
                                       _mm256_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6));
  }
  static Mask Equal(Keys x, Keys y) { return _mm256_cmpeq_epi32(x, y); }
  template <int kBit>
  static Mask HasBit(Keys x) {
    return _mm256_srai_epi32(_mm256_slli_epi32(x, 31 - kBit), 31);
  }
  static Mask And(Mask x, Mask y) { return _mm256_and_si256(x, y); }
  static Mask ButNot(Mask x, Mask y) { return _mm256_andnot_si256(y, x); }
  static Keys Chosen(Mask mask, Keys yes, Keys no) { return _mm256_blendv_epi8(no, yes, mask); }
  static Values Chosen(Mask mask, Values yes, Values no) {
    return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(mask));
  }
  static Values OrZero(Mask mask, Values x) { return _mm256_and_ps(_mm256_castsi256_ps(mask), x); }
  static Values Zero() { return _mm256_setzero_ps(); }
  static Values Add(Values x, Values y) { return _mm256_add_ps(x, y); }
  static Values Subtract(Values x, Values y) { return _mm256_sub_ps(x, y); }
  static Values Multiply(Values x, Values y) { return _mm256_mul_ps(x, y); }
  static Values Same(float x) { return _mm256_set1_ps(x); }
  static Values Product(Values x, Values y) { return _mm256_fmadd_ps(x, y, Zero()); }
  static void Store(float* to, Values x) { _mm256_storeu_ps(to, x); }
  static Values Gather(Mask mask, Keys i, const float* from) {
    return _mm256_mask_i32gather_ps(Zero(), from, i, _mm256_castsi256_ps(mask), 4);
  }
  static uint32_t Bits(Mask mask) {
    return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
  }

  static int Store(Mask mask, Keys x, Values values, int32_t* to, float* values_to) {
    return StoreBits(Bits(mask), x, values, to, values_to);
  }
  // As Store, of a mask of 8 bits.
  static int StoreBits(uint32_t bits, Keys x, Values values, int32_t* to, float* values_to) {
    const Keys set = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kSetBits.of[bits]));
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(x, set));
    _mm256_storeu_ps(values_to, _mm256_permutevar8x32_ps(values, set));
    return __builtin_popcount(bits);
  }
};

#endif

}  // namespace
}  // namespace sgap::SGAP_ISA
#endif
