// Sorts and merges keys of 32 bits in vectors, of 16 lanes with AVX-512 and of 8 with AVX2, by
// bitonic networks (Chhugani et al., "Efficient implementation of sorting on multi-core SIMD CPU
// architecture", VLDB 2008, section 4): no branch depends on a key. Where SGAP_KEY_SORT is defined,
// the instruction set has it.
#pragma once

#include <cstdint>

#include "cpu/simd/simd.h"

#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define SGAP_KEY_SORT 16
#elif defined(__AVX2__)
#define SGAP_KEY_SORT 8
#endif

#if defined(SGAP_KEY_SORT)
namespace sgap::SGAP_ISA {
namespace {

// A vector of keys, which are unsigned.
#if SGAP_KEY_SORT == 16
struct KeyLanes {
  static constexpr int kLanes = 16;
  using Keys = __m512i;

  static Keys Every(int32_t x) { return _mm512_set1_epi32(x); }
  static Keys Load(const uint32_t* keys) { return _mm512_loadu_si512(keys); }
  static void Store(uint32_t* keys, Keys x) { _mm512_storeu_si512(keys, x); }
  static Keys Reversed(Keys x) {
    const Keys down = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_permutexvar_epi32(down, x);
  }
  // The lesser key of each lane in x.
  static void Exchange(Keys& x, Keys& y) {
    const Keys least = _mm512_min_epu32(x, y);
    y = _mm512_max_epu32(x, y);
    x = least;
  }
  // A bitonic sequence of keys in order.
  static Keys Merged(Keys x) { return Step1(Step2(Step4(Step8(x)))); }
  static Keys Sorted(Keys x) {
    x = Step1(x);
    x = Step1(Pairs<0xcccc>(x, _mm512_shuffle_epi32(x, _MM_PERM_ENUM(0x1b))));
    const Keys down = _mm512_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8);
    x = Step1(Step2(Pairs<0xf0f0>(x, _mm512_permutexvar_epi32(down, x))));
    return Step1(Step2(Step4(Pairs<0xff00>(x, Reversed(x)))));
  }

 private:
  // The lesser of each pair stays below; `upper` lanes are above.
  template <int kUpper>
  static Keys Pairs(Keys x, Keys partner) {
    return _mm512_mask_max_epu32(_mm512_min_epu32(x, partner), __mmask16(kUpper), x, partner);
  }
  static Keys Step1(Keys x) {
    return Pairs<0xaaaa>(x, _mm512_shuffle_epi32(x, _MM_PERM_ENUM(0xb1)));
  }
  static Keys Step2(Keys x) {
    return Pairs<0xcccc>(x, _mm512_shuffle_epi32(x, _MM_PERM_ENUM(0x4e)));
  }
  static Keys Step4(Keys x) { return Pairs<0xf0f0>(x, _mm512_shuffle_i32x4(x, x, 0xb1)); }
  static Keys Step8(Keys x) { return Pairs<0xff00>(x, _mm512_shuffle_i32x4(x, x, 0x4e)); }
};
#else
struct KeyLanes {
  static constexpr int kLanes = 8;
  using Keys = __m256i;

  static Keys Every(int32_t x) { return _mm256_set1_epi32(x); }
  static Keys Load(const uint32_t* keys) { return _mm256_loadu_si256((const __m256i*)keys); }
  static void Store(uint32_t* keys, Keys x) { _mm256_storeu_si256((__m256i*)keys, x); }
  static Keys Reversed(Keys x) {
    return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0));
  }
  static void Exchange(Keys& x, Keys& y) {
    const Keys least = _mm256_min_epu32(x, y);
    y = _mm256_max_epu32(x, y);
    x = least;
  }
  static Keys Merged(Keys x) {
    return Step1(Step2(Pairs<0xf0>(x, _mm256_permute2x128_si256(x, x, 1))));
  }
  static Keys Sorted(Keys x) {
    x = Step1(x);
    x = Step1(Pairs<0xcc>(x, _mm256_shuffle_epi32(x, 0x1b)));
    return Step1(Step2(Pairs<0xf0>(x, Reversed(x))));
  }

 private:
  template <int kUpper>
  static Keys Pairs(Keys x, Keys partner) {
    return _mm256_blend_epi32(_mm256_min_epu32(x, partner), _mm256_max_epu32(x, partner), kUpper);
  }
  static Keys Step1(Keys x) { return Pairs<0xaa>(x, _mm256_shuffle_epi32(x, 0xb1)); }
  static Keys Step2(Keys x) { return Pairs<0xcc>(x, _mm256_shuffle_epi32(x, 0x4e)); }
};
#endif

class KeySort {
  using L = KeyLanes;
  using Keys = L::Keys;
  static constexpr int kLanes = L::kLanes;

 public:
  // The keys of x and y that come first in x, the others in y. Both ascend, also before.
  static void MergeTwo(Keys& x, Keys& y) {
    y = L::Reversed(y);
    L::Exchange(x, y);
    x = L::Merged(x), y = L::Merged(y);
  }

  // So many vectors of keys, the least first.
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
    for (int64_t v = 0; v + 4 <= vectors; v += 4) Block<4>(keys + v * kLanes);
    Sort(keys + vectors / 4 * 4 * kLanes, vectors % 4);
    for (int64_t width = 4; width < vectors; width *= 2) {
      for (int64_t begin = 0; begin + width < vectors; begin += 2 * width) {
        Merge(keys + begin * kLanes, width, vectors - begin);
      }
    }
  }

 private:
  template <int kVectors>
  static void Block(uint32_t* keys) {
    Keys x[4];
    for (int i = 0; i < 4; ++i) {
      x[i] = i < kVectors ? L::Sorted(L::Load(keys + i * kLanes)) : L::Every(-1);
    }
    for (int i = 0; i + 1 < kVectors; i += 2) MergeTwo(x[i], x[i + 1]);
    if (kVectors > 2) {
      Keys above[2] = {L::Reversed(x[3]), L::Reversed(x[2])};
      for (int i = 0; i < 2; ++i) L::Exchange(x[i], above[i]);
      L::Exchange(x[0], x[1]);
      L::Exchange(above[1], above[0]);
      x[0] = L::Merged(x[0]), x[1] = L::Merged(x[1]);
      x[2] = L::Merged(above[1]), x[3] = L::Merged(above[0]);
    }
    for (int i = 0; i < kVectors; ++i) L::Store(keys + i * kLanes, x[i]);
  }

  // The sorted vectors [0, width) and [width, min(2 width, vectors)). What is behind the last
  // vector is greater than all keys, and would stay where it is.
  static void Merge(uint32_t* keys, int64_t width, int64_t vectors) {
    const int64_t end = vectors < 2 * width ? vectors : 2 * width;
    const auto exchange = [&](int64_t i, int64_t j, bool reversed) {
      Keys x = L::Load(keys + i * kLanes), y = L::Load(keys + j * kLanes);
      if (reversed) y = L::Reversed(y);
      L::Exchange(x, y);
      L::Store(keys + i * kLanes, x), L::Store(keys + j * kLanes, y);
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
      Keys x[4];
      for (int i = 0; i < 4; ++i) {
        x[i] = begin + i < end ? L::Load(keys + (begin + i) * kLanes) : L::Every(-1);
      }
      L::Exchange(x[0], x[2]), L::Exchange(x[1], x[3]);
      L::Exchange(x[0], x[1]), L::Exchange(x[2], x[3]);
      for (int i = 0; i < 4 && begin + i < end; ++i) {
        L::Store(keys + (begin + i) * kLanes, L::Merged(x[i]));
      }
    }
  }
};

}  // namespace
}  // namespace sgap::SGAP_ISA

#endif
