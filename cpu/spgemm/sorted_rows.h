// Rows of A B with few products: all of them are written down (expanded), sorted by column, and
// those of one column added up (Dalton, Olson, Bell, "Optimizing sparse matrix-matrix
// multiplication for the GPU", 2015, section 3), in the first-level cache and without a branch that
// depends on a column. Sorting is bitonic in vectors of 16 (Chhugani et al., VLDB 2008, section 4).
#pragma once

#include <cstdint>

#include "cpu/simd/key_sort.h"
#include "cpu/simd/simd.h"
#include "cpu/spgemm/spgemm.h"

#if defined(SGAP_KEY_SORT)

namespace sgap::SGAP_ISA {
namespace {

// Takes rows of up to `most_` products.
class SortedRows {
 public:
  SortedRows(const SpgemmRowsArgs& args, int64_t task)
      : args_(args),
        a_(static_cast<const float*>(args.a_values)),
        b_(static_cast<const float*>(args.b_values)),
        a_end_(args.a.offsets[args.task_rows[task + 1]]),
        bits_(SortedRowBits(args.columns)),
        keys_(reinterpret_cast<uint32_t*>(
            args.scratch + SpgemmRowsScratch(args.columns, args.slots, args.longest, 4).sorted)),
        factors_(reinterpret_cast<float*>(keys_ + kSortedRowRoom)),
        entries_(factors_ + kSortedRowRoom) {
    _mm512_storeu_si512(keys_, _mm512_set1_epi32(-1));
    // In longer rows an array of all columns, which has to be looked through, costs less.
    const int64_t few = args.columns / 32 < 64 ? 64 : args.columns / 32;
    const int64_t counted = int64_t(1) << bits_;
    most_ = counted < 64 ? -1 : few < counted ? few : counted;
  }

  bool Takes(int64_t row) const { return Products(row) <= most_; }

  // Writes the rows from `row` on that it takes, up to `end` and as many as have room. Returns the
  // first one that is left. Each step is done for all rows before the next one begins: what one has
  // stored in pieces the next one loads whole, which has to wait if it comes at once.
  template <typename Out>
  int64_t Run(int64_t row, int64_t end, Out& out) {
    const int64_t first = row;
    int64_t place = 16;
    for (; row < end; ++row) {
      const int64_t products = Products(row), room = (products + 15) / 16 * 16 + 16;
      if (!Takes(row) || (place > 16 && place + room > kGroup)) break;
      Expand(row, products, place);
      place += room;
    }
    place = 16;
    for (int64_t r = first; r < row; ++r) {
      const int64_t vectors = (Products(r) + 15) / 16;
      KeySort::Sort(keys_ + place, vectors);
      place += vectors * 16 + 16;
    }
    place = 16;
    for (int64_t r = first; r < row; ++r) {
      const int64_t products = Products(r), vectors = (products + 15) / 16;
      const int32_t* before = out.indices;
      switch (vectors) {
        case 0:
          break;
        case 1:
          Add<1>(place, products, out);
          break;
        case 2:
          Add<2>(place, products, out);
          break;
        case 3:
        case 4:
          Add<4>(place, products, out);
          break;
        default:
          AddMany(place, products, out);
      }
      args_.counts[r] = int32_t(out.indices - before);
      place += vectors * 16 + 16;
    }
    return row;
  }

 private:
  static constexpr int64_t kGroup = 1024;  // keys, unless a row alone has more

  int64_t Products(int64_t row) const { return args_.products[row + 1] - args_.products[row]; }
  static __mmask16 Below(int64_t count) {
    return count >= 16 ? __mmask16(0xffff) : __mmask16((1 << count) - 1);
  }
  __m512i Columns(const uint32_t* keys) const {
    return _mm512_srl_epi32(_mm512_loadu_si512(keys), _mm_cvtsi32_si128(bits_));
  }

  // Keys are columns, and in the lower bits which product of the row it is.
  void Expand(int64_t row, int64_t products, int64_t place) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i shift = _mm_cvtsi32_si128(bits_);
    const int32_t *offsets = args_.b.offsets, *indices = args_.b.indices;
    const int32_t* of_a = args_.a.indices;
    int64_t done = 0;
    for (int64_t e = args_.a.offsets[row], end = args_.a.offsets[row + 1]; e < end; ++e) {
      if (e + kAhead < a_end_) {
        const int64_t next = offsets[of_a[e + kAhead]];
        Prefetch(indices + next);
        Prefetch(b_ + next);
      }
      const __m512 factor = _mm512_set1_ps(a_[e]);
      const int64_t k = of_a[e], stop = offsets[k + 1];
      for (int64_t q = offsets[k]; q < stop; q += 16) {
        const __mmask16 mask = Below(stop - q);
        const __m512i which = _mm512_add_epi32(_mm512_set1_epi32(int(done)), lanes);
        const __m512i column = _mm512_maskz_loadu_epi32(mask, indices + q);
        const __m512i key = _mm512_or_si512(_mm512_sll_epi32(column, shift), which);
        _mm512_storeu_si512(keys_ + place + done, key);
        _mm512_storeu_ps(factors_ + place + done, factor);
        _mm512_storeu_ps(entries_ + place + done, _mm512_maskz_loadu_ps(mask, b_ + q));
        done += stop - q < 16 ? stop - q : 16;
      }
    }
    // Up to the next vector, and one more: the last row's or one that is greater than all keys.
    const __m512i most = _mm512_set1_epi32(-1);
    _mm512_storeu_si512(keys_ + place + products, most);
    _mm512_storeu_si512(keys_ + place + (products + 15) / 16 * 16, most);
  }

  template <int kVectors>
  static __m512 Taken(const __m512* from, __m512i which) {
    if constexpr (kVectors == 1) return _mm512_permutexvar_ps(which, from[0]);
    const __m512 low = _mm512_permutex2var_ps(from[0], which, from[1]);
    if constexpr (kVectors == 2) return low;
    const __m512 high = _mm512_permutex2var_ps(from[2], which, from[3]);
    return _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(which, _mm512_set1_epi32(32)), high);
  }

  // Each lane that begins a column goes over its products, which are in the order of A's entries.
  template <int kVectors, typename Out>
  void Add(int64_t place, int64_t products, Out& out) const {
    const uint32_t* keys = keys_ + place;
    __m512 factors[kVectors], entries[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      factors[v] = _mm512_loadu_ps(factors_ + place + v * 16);
      entries[v] = _mm512_loadu_ps(entries_ + place + v * 16);
    }
    for (int v = 0; v < kVectors; ++v, keys += 16) {
      if (kVectors == 4 && v * 16 >= products) break;
      const __m512i which = _mm512_loadu_si512(keys), columns = Columns(keys);
      const __mmask16 begins =
          _mm512_mask_cmpneq_epi32_mask(Below(products - v * 16), columns, Columns(keys - 1));
      __m512 sums = _mm512_fmadd_ps(Taken<kVectors>(factors, which),
                                    Taken<kVectors>(entries, which), _mm512_setzero_ps());
      __mmask16 more = begins;
      for (int next = 1;; ++next) {
        more = _mm512_mask_cmpeq_epi32_mask(more, columns, Columns(keys + next));
        if (!more) break;
        const __m512i other = _mm512_loadu_si512(keys + next);
        sums = _mm512_mask3_fmadd_ps(Taken<kVectors>(factors, other),
                                     Taken<kVectors>(entries, other), sums, more);
      }
      _mm512_storeu_si512(out.indices, _mm512_maskz_compress_epi32(begins, columns));
      _mm512_storeu_ps(out.values, _mm512_maskz_compress_ps(begins, sums));
      out.indices += __builtin_popcount(begins);
      out.values += __builtin_popcount(begins);
    }
  }

  // Few of the products of longer rows share a column: those are added one by one.
  template <typename Out>
  void AddMany(int64_t place, int64_t products, Out& out) const {
    const uint32_t* keys = keys_ + place;
    const float *factors = factors_ + place, *entries = entries_ + place;
    const __m512i low = _mm512_set1_epi32((1 << bits_) - 1);
    for (int64_t v = 0; v * 16 < products; ++v, keys += 16) {
      const __m512i which = _mm512_and_si512(_mm512_loadu_si512(keys), low);
      const __m512i columns = Columns(keys);
      const __mmask16 used = Below(products - v * 16);
      const __mmask16 begins = _mm512_mask_cmpneq_epi32_mask(used, columns, Columns(keys - 1));
      const __m512 none = _mm512_setzero_ps();
      const __m512 sums =
          _mm512_fmadd_ps(_mm512_mask_i32gather_ps(none, begins, which, factors, 4),
                          _mm512_mask_i32gather_ps(none, begins, which, entries, 4), none);
      _mm512_storeu_si512(out.indices, _mm512_maskz_compress_epi32(begins, columns));
      _mm512_storeu_ps(out.values, _mm512_maskz_compress_ps(begins, sums));
      for (uint32_t rest = used & ~begins; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        const uint32_t p = keys[lane] & uint32_t((1 << bits_) - 1);
        float& sum = out.values[__builtin_popcount(begins & ((2u << lane) - 1)) - 1];
        sum = __builtin_fmaf(factors[p], entries[p], sum);
      }
      out.indices += __builtin_popcount(begins);
      out.values += __builtin_popcount(begins);
    }
  }

  static constexpr int64_t kAhead = 8;

  const SpgemmRowsArgs& args_;
  const float *const a_, *const b_;
  const int64_t a_end_;  // of the task
  const int bits_;
  int64_t most_;
  uint32_t* const keys_;
  float *const factors_, *const entries_;
};

}  // namespace
}  // namespace sgap::SGAP_ISA

#endif
