// Sorts and merges keys of 32 bits in vectors of 16, by bitonic networks (Chhugani et al.,
// "Efficient implementation of sorting on multi-core SIMD CPU architecture", VLDB 2008, section 4):
// no branch depends on a key. Where SGAP_KEY_SORT is defined, the instruction set has it.
#pragma once

#include <cstdint>

#include "cpu/simd/simd.h"

#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define SGAP_KEY_SORT 1

namespace sgap::SGAP_ISA {
namespace {

class KeySort {
 public:
  // So many vectors of 16 keys, the least first.
  static void Sort(uint32_t* keys, int64_t vectors) {
    switch (vectors) {
      case 0:
        return;
      case 1:
        return Block<1>(keys);
      case 2:
        return Block<2>(keys);
      case 3:
        return Block<3>(keys);
      case 4:
        return Block<4>(keys);
    }
    for (int64_t v = 0; v + 4 <= vectors; v += 4) Block<4>(keys + v * 16);
    Sort(keys + vectors / 4 * 64, vectors % 4);
    for (int64_t width = 4; width < vectors; width *= 2) {
      for (int64_t begin = 0; begin + width < vectors; begin += 2 * width) {
        Merge(keys + begin * 16, width, vectors - begin);
      }
    }
  }

  static __m512i Reversed(__m512i x) {
    const __m512i down = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_permutexvar_epi32(down, x);
  }
  // The lesser key of each lane in x.
  static void Exchange(__m512i& x, __m512i& y) {
    const __m512i least = _mm512_min_epu32(x, y);
    y = _mm512_max_epu32(x, y);
    x = least;
  }
  // A bitonic sequence of 16 keys in order.
  static __m512i Merged(__m512i x) { return Step1(Step2(Step4(Step8(x)))); }

 private:
  static __m512i Load(const uint32_t* keys) { return _mm512_loadu_si512(keys); }
  static void Store(uint32_t* keys, __m512i x) { _mm512_storeu_si512(keys, x); }

  // The lesser of each pair stays below; `upper` lanes are above.
  template <int kUpper>
  static __m512i Pairs(__m512i x, __m512i partner) {
    return _mm512_mask_max_epu32(_mm512_min_epu32(x, partner), __mmask16(kUpper), x, partner);
  }
  static __m512i Step1(__m512i x) {
    return Pairs<0xaaaa>(x, _mm512_shuffle_epi32(x, _MM_PERM_ENUM(0xb1)));
  }
  static __m512i Step2(__m512i x) {
    return Pairs<0xcccc>(x, _mm512_shuffle_epi32(x, _MM_PERM_ENUM(0x4e)));
  }
  static __m512i Step4(__m512i x) { return Pairs<0xf0f0>(x, _mm512_shuffle_i32x4(x, x, 0xb1)); }
  static __m512i Step8(__m512i x) { return Pairs<0xff00>(x, _mm512_shuffle_i32x4(x, x, 0x4e)); }

  static __m512i Sorted(__m512i x) {
    x = Step1(x);
    x = Step1(Pairs<0xcccc>(x, _mm512_shuffle_epi32(x, _MM_PERM_ENUM(0x1b))));
    const __m512i down = _mm512_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8);
    x = Step1(Step2(Pairs<0xf0f0>(x, _mm512_permutexvar_epi32(down, x))));
    return Step1(Step2(Step4(Pairs<0xff00>(x, Reversed(x)))));
  }

  template <int kVectors>
  static void Block(uint32_t* keys) {
    __m512i x[4];
    for (int i = 0; i < 4; ++i) {
      x[i] = i < kVectors ? Sorted(Load(keys + i * 16)) : _mm512_set1_epi32(-1);
    }
    for (int i = 0; i + 1 < kVectors; i += 2) {
      __m512i above = Reversed(x[i + 1]);
      Exchange(x[i], above);
      x[i] = Merged(x[i]), x[i + 1] = Merged(above);
    }
    if (kVectors > 2) {
      __m512i above[2] = {Reversed(x[3]), Reversed(x[2])};
      for (int i = 0; i < 2; ++i) Exchange(x[i], above[i]);
      Exchange(x[0], x[1]);
      Exchange(above[1], above[0]);
      x[0] = Merged(x[0]), x[1] = Merged(x[1]);
      x[2] = Merged(above[1]), x[3] = Merged(above[0]);
    }
    for (int i = 0; i < kVectors; ++i) Store(keys + i * 16, x[i]);
  }

  // The sorted vectors [0, width) and [width, min(2 width, vectors)). What is behind the last
  // vector is greater than all keys, and would stay where it is.
  static void Merge(uint32_t* keys, int64_t width, int64_t vectors) {
    const int64_t end = vectors < 2 * width ? vectors : 2 * width;
    const auto exchange = [&](int64_t i, int64_t j, bool reversed) {
      __m512i x = Load(keys + i * 16), y = Load(keys + j * 16);
      if (reversed) y = Reversed(y);
      Exchange(x, y);
      Store(keys + i * 16, x), Store(keys + j * 16, y);
    };
    for (int64_t j = width; j < end; ++j) exchange(2 * width - 1 - j, j, true);
    for (int64_t distance = width / 2; distance > 2; distance /= 2) {
      for (int64_t begin = 0; begin < end; begin += 2 * distance) {
        for (int64_t i = begin; i < begin + distance && i + distance < end; ++i) {
          exchange(i, i + distance, false);
        }
      }
    }
    for (int64_t begin = 0; begin < end; begin += 4) {
      __m512i x[4];
      for (int i = 0; i < 4; ++i) {
        x[i] = begin + i < end ? Load(keys + (begin + i) * 16) : _mm512_set1_epi32(-1);
      }
      Exchange(x[0], x[2]), Exchange(x[1], x[3]);
      Exchange(x[0], x[1]), Exchange(x[2], x[3]);
      for (int i = 0; i < 4 && begin + i < end; ++i) Store(keys + (begin + i) * 16, Merged(x[i]));
    }
  }
};

}  // namespace
}  // namespace sgap::SGAP_ISA

#endif
