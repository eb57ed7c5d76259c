// Products with one column of long rows, where the processor gathers fast: the same sums as of
// NarrowTile::SumLong, without a branch on how many entries a row has after its whole steps. With
// more rows than the processor remembers, that took 0.68 to 0.95 of the time (Intel Xeon, family 6
// model 167), and up to 1.12 where it remembers them.
#pragma once

#include "cpu/spmm/spmm_narrow_rows.h"

#if defined(__AVX512F__)
#define SGAP_GATHERED_COLUMN 1

namespace sgap::SGAP_ISA {

template <typename T>
struct GatheredColumn {
  using Narrow = NarrowTile<T, T, 1>;
  static constexpr int kStep = Narrow::kLooked;  // entries
  static constexpr int kWidth = kLanes<T>;       // of a register
  static constexpr int kRegisters = kStep / kWidth;
  static constexpr int kChainsEach = kWidth / 4;
  using Wide = Vector<T, kWidth>;
  using Four = Vector<T, 4>;

  template <bool kLooks>
  static void Run(const RowBlock<T, T>& shared) {
    const RowBlock<T, T> block = shared;
    const T* const values = block.values - block.first_entry;
    const __m512i size = _mm512_set1_epi32(int(block.size));
    T* y = block.y;
    int64_t p = block.offsets[0];
    for (int64_t r = 0; r < block.rows; ++r, y += block.y_stride) {
      const int64_t end = block.offsets[r + 1];
      Wide sums[kRegisters] = {};
      for (; p + kStep <= end; p += kStep) {
        const __m512i indices = _mm512_loadu_si512(block.indices + p);
        if (kLooks && _mm512_cmpge_epu32_mask(indices, size)) return void(*block.wrong = true);
#pragma GCC unroll 2
        for (int i = 0; i < kRegisters; ++i) {
          const Wide x = GatherSome(block.x, indices, i, __mmask16(-1));
          sums[i] += Load<T, kWidth>(values + p + i * kWidth) * x;
        }
      }
      const int left = int(end - p);
      const __mmask16 there = __mmask16((1u << left) - 1);
      const __m512i indices = _mm512_maskz_loadu_epi32(there, block.indices + p);
      if (kLooks && _mm512_mask_cmpge_epu32_mask(there, indices, size)) {
        return void(*block.wrong = true);
      }
      Narrow::Finish(block, WithRest(sums, block.x, indices, values + p, left), y);
      p = end;
    }
  }

 private:
  // The elements of x that the i-th register's indices name, where `there` has a bit; zeros
  // elsewhere.
  static Wide GatherSome(const T* x, __m512i indices, int i, __mmask16 there) {
    if constexpr (sizeof(T) == 4) {
      return BitCast<Wide>(_mm512_mask_i32gather_ps(_mm512_setzero_ps(), there, indices, x, 4));
    } else {
      const __m256i half =
          i == 0 ? _mm512_castsi512_si256(indices) : _mm512_extracti64x4_epi64(indices, 1);
      const __mmask8 mask = __mmask8(there >> 8 * i);
      return BitCast<Wide>(_mm512_mask_i32gather_pd(_mm512_setzero_pd(), mask, half, x, 8));
    }
  }

  static Wide LoadSome(const T* values, int i, __mmask16 there) {
    if constexpr (sizeof(T) == 4) {
      return BitCast<Wide>(_mm512_maskz_loadu_ps(there, values));
    } else {
      return BitCast<Wide>(_mm512_maskz_loadu_pd(__mmask8(there >> 8 * i), values + 8 * i));
    }
  }

  // The row's four partial sums, its last `left` entries added, fewer than kStep: groups of four to
  // the first chain, the others to the first lane of the chains' sum.
  [[gnu::always_inline]] static Four WithRest(const Wide* sums, const T* x, __m512i indices,
                                              const T* values, int left) {
    using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
    const __mmask16 there = __mmask16((1u << left) - 1);
    Wide value[kRegisters], element[kRegisters];
    T products[kStep];
#pragma GCC unroll 2
    for (int i = 0; i < kRegisters; ++i) {
      value[i] = LoadSome(values, i, there);
      element[i] = GatherSome(x, indices, i, there);
      Store<T, kWidth>(products + i * kWidth, value[i] * element[i]);
    }
    const auto chain = [](const Wide* registers, int c) {
      return Part(registers[c / kChainsEach], c % kChainsEach);
    };
    Four first = chain(sums, 0);
    const auto count = Vector<Index, 4>{} + Index(left);
#pragma GCC unroll 4
    for (int g = 0; g < 3; ++g) {
      const Four sum = first + chain(value, g) * chain(element, g);
      first = count >= Index(4 * g + 4) ? sum : first;
    }
    Four total = (first + chain(sums, 1)) + (chain(sums, 2) + chain(sums, 3));
    const T* const others = products + left / 4 * 4;
    const auto number = Vector<Index, 4>{} + Index(left % 4);
#pragma GCC unroll 4
    for (int i = 0; i < 3; ++i) total = number > Index(i) ? total + Four{others[i]} : total;
    return total;
  }

  static Four Part(Wide x, int which) {
    if constexpr (kChainsEach == 4) {
      return Half<T, 8>(Half<T, 16>(x, which / 2), which % 2);
    } else {
      return Half<T, 8>(x, which);
    }
  }
};

}  // namespace sgap::SGAP_ISA
#endif
