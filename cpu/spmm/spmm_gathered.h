// Products with one column of long rows, where the processor gathers fast: the same sums as of
// NarrowTile::SumLong, without a branch on how many entries a row has after its whole steps. With
// more rows than the processor remembers, that took 0.68 to 0.95 of the time (Intel Xeon, family 6
// model 167); where it remembers them, 0.83 to 0.94 with rows of 60 to 460 float32 (float64 0.94 to
// 1.0, and 1.06 of whole calls), and 1.25 with those of 20. Values of 16 bits are widened where
// they are used, x before.
#pragma once

#include "cpu/spmm/spmm_narrow_rows.h"

#if defined(__AVX512F__)
#define SGAP_GATHERED_COLUMN 1

namespace sgap::SGAP_ISA {

// Eight entries a register: sixteen of float32 took 1.05 to 1.15 times as long.
template <typename T>
struct GatheredColumn {
  using Acc = Accumulator<T>;
  using Narrow = NarrowTile<T, Acc, 1>;
  static constexpr int kStep = Narrow::kLooked;  // entries
  static constexpr int kWidth = 8;               // of a register
  static constexpr int kRegisters = kStep / kWidth;
  using Wide = Vector<Acc, kWidth>;
  using Four = Vector<Acc, 4>;

  template <bool kLooks>
  static void Run(const RowBlock<T, Acc>& shared) {
    const RowBlock<T, Acc> block = shared;
    const T* const values = OwnValues(block);
    T* y = block.y;
    int64_t p = block.offsets[0];
    for (int64_t r = 0; r < block.rows; ++r, y += block.y_stride) {
      const int64_t end = block.offsets[r + 1];
      Wide sums[kRegisters] = {};
      for (; p + kStep <= end; p += kStep) {
        const __m256i indices[] = {Indices(block.indices + p), Indices(block.indices + p + 8)};
        if (kLooks && !AllBelow(indices, block.size)) return void(*block.wrong = true);
#pragma GCC unroll 2
        for (int i = 0; i < kRegisters; ++i) {
          sums[i] += LoadEight(values + p + i * kWidth) * GatherAll(block.x, indices[i]);
        }
      }
      const uint32_t there = (1u << (end - p)) - 1;
      const __m256i indices[] = {SomeIndices(block.indices + p, there),
                                 SomeIndices(block.indices + p + 8, there >> 8)};
      if (kLooks && !AllBelow(indices, block.size)) return void(*block.wrong = true);
      Narrow::Finish(block, WithRest(sums, block.x, indices, values + p, there, end - p), y);
      p = end;
    }
  }

 private:
  static const T* OwnValues(const RowBlock<T, Acc>& block) {
    if constexpr (std::is_same_v<T, Acc>) {
      return block.values - block.first_entry;
    } else {
      return block.own_values;
    }
  }
  static __m256i Indices(const int32_t* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  }
  static bool AllBelow(const __m256i* indices, uint32_t size) {
    const __m256i greatest = _mm256_max_epu32(indices[0], indices[1]);
    return _mm256_cmpge_epu32_mask(greatest, _mm256_set1_epi32(int(size))) == 0;
  }
  static Wide GatherAll(const Acc* x, __m256i indices) {
    if constexpr (sizeof(Acc) == 4) {
      return BitCast<Wide>(_mm256_i32gather_ps(x, indices, 4));
    } else {
      return BitCast<Wide>(_mm512_i32gather_pd(indices, x, 8));
    }
  }

  // The same of the lanes that `there` has a bit for; zeros in others.
  static __m256i SomeIndices(const int32_t* at, __mmask8 there) {
    return _mm256_maskz_loadu_epi32(there, at);
  }
  static Wide GatherSome(const Acc* x, __m256i indices, __mmask8 there) {
    if constexpr (sizeof(Acc) == 4) {
      return BitCast<Wide>(_mm256_mmask_i32gather_ps(_mm256_setzero_ps(), there, indices, x, 4));
    } else {
      return BitCast<Wide>(_mm512_mask_i32gather_pd(_mm512_setzero_pd(), there, indices, x, 8));
    }
  }
  static Wide LoadSome(const T* values, __mmask8 there) {
    if constexpr (sizeof(T) == 2) {
      const auto some = BitCast<Vector<uint16_t, 8>>(_mm_maskz_loadu_epi16(there, values));
      return LoadEight(reinterpret_cast<const T*>(&some));
    } else if constexpr (sizeof(T) == 4) {
      return BitCast<Wide>(_mm256_maskz_loadu_ps(there, values));
    } else {
      return BitCast<Wide>(_mm512_maskz_loadu_pd(there, values));
    }
  }

  // The row's four partial sums, its last `left` entries added, fewer than kStep: groups of four to
  // the first chain, the others to the first lane of the chains' sum.
  [[gnu::always_inline]] static Four WithRest(const Wide* sums, const Acc* x,
                                              const __m256i* indices, const T* values,
                                              uint32_t there, int64_t left) {
    using Index = std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>;
    Wide value[kRegisters], element[kRegisters];
    Acc products[kStep];
#pragma GCC unroll 2
    for (int i = 0; i < kRegisters; ++i) {
      value[i] = LoadSome(values + i * kWidth, there >> i * kWidth);
      element[i] = GatherSome(x, indices[i], there >> i * kWidth);
      Store<Acc, kWidth>(products + i * kWidth, value[i] * element[i]);
    }
    const auto chain = [](const Wide* registers, int c) {
      return Half<Acc, 8>(registers[c / 2], c % 2);
    };
    Four first = chain(sums, 0);
    const auto count = Vector<Index, 4>{} + Index(left);
#pragma GCC unroll 4
    for (int g = 0; g < 3; ++g) {
      const Four sum = first + chain(value, g) * chain(element, g);
      first = count >= Index(4 * g + 4) ? sum : first;
    }
    Four total = (first + chain(sums, 1)) + (chain(sums, 2) + chain(sums, 3));
    const Acc* const others = products + left / 4 * 4;
    const auto number = Vector<Index, 4>{} + Index(left % 4);
#pragma GCC unroll 4
    for (int i = 0; i < 3; ++i) total = number > Index(i) ? total + Four{others[i]} : total;
    return total;
  }
};

}  // namespace sgap::SGAP_ISA
#endif
