// Rows of A B with few products: all of them are written down (expanded), sorted by column, and
// those of one column added up (Dalton, Olson, Bell, "Optimizing sparse matrix-matrix
// multiplication for the GPU", 2015, section 3), in the first-level cache and without a branch that
// depends on a column. Sorting is bitonic in vectors (key_sort.h).
#pragma once

#include <cstdint>

#include "cpu/simd/key_sort.h"
#include "cpu/simd/merge_lanes.h"
#include "cpu/simd/simd.h"
#include "cpu/spgemm/spgemm.h"

#if defined(SGAP_KEY_SORT)

namespace sgap::SGAP_ISA {
namespace {

// Takes rows of up to `most_` products.
class SortedRows {
  using L = MergeLanes;
  using Keys = L::Keys;
  using Values = L::Values;
  using Mask = L::Mask;
  static constexpr int kLanes = L::kLanes;

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
        entries_(factors_ + kSortedRowRoom),
        products_(entries_ + kSortedRowRoom) {
    L::Store(keys_, L::Every(-1));
    // In longer rows an array of all columns, which has to be looked through, costs less.
    const int64_t few = args.columns / kLeastColumns < 64 ? 64 : args.columns / kLeastColumns;
    const int64_t counted = int64_t(1) << bits_;
    most_ = counted < 64 ? -1 : few < counted ? few : counted;
  }

  bool Takes(int64_t row) const { return Products(row) <= most_; }

  // Writes the rows from `row` on that it takes, up to `end`, the first one after it for which
  // `stop` holds, and as many as have room. Returns the first one that is left. Each step is done
  // for all rows before the next one begins: what one has stored in pieces the next one loads
  // whole, which has to wait if it comes at once.
  template <typename Out, typename Stop>
  int64_t Run(int64_t row, int64_t end, Out& out, Stop stop) {
    const int64_t first = row;
    int64_t place = kLanes;
    for (; row < end; ++row) {
      const int64_t products = Products(row), room = Room(products);
      if (!Takes(row) || (row > first && (place + room > kGroup || stop(row)))) break;
      Expand(row, products, place);
      place += room;
    }
    place = kLanes;
    for (int64_t r = first; r < row; ++r) {
      const int64_t products = Products(r);
      const bool one = args_.a.offsets[r + 1] - args_.a.offsets[r] == 1;
      if (!one || !Ascend(place, products)) KeySort::Sort(keys_ + place, Vectors(products));
      place += Room(products);
    }
    place = kLanes;
    for (int64_t r = first; r < row; ++r) {
      const int64_t products = Products(r);
      const int32_t* before = out.indices;
      Add(place, products, out);
      args_.counts[r] = int32_t(out.indices - before);
      place += Room(products);
    }
    return row;
  }

 private:
  static constexpr int64_t kGroup = 1024;  // keys, unless a row alone has more
  static constexpr int64_t kAhead = 8;
  static constexpr int64_t kLeastColumns = 32;  // for each product

  static int64_t Vectors(int64_t products) { return (products + kLanes - 1) / kLanes; }
  static int64_t Room(int64_t products) { return (Vectors(products) + 1) * kLanes; }
  static Mask Below(int64_t count) { return L::First(count < kLanes ? count : kLanes); }
  int64_t Products(int64_t row) const { return args_.products[row + 1] - args_.products[row]; }
  Keys Columns(const uint32_t* keys) const { return L::Down(L::Load(keys), bits_); }

  // Keys are columns, and in the lower bits which product of the row it is.
  void Expand(int64_t row, int64_t products, int64_t place) {
    const int32_t *offsets = args_.b.offsets, *indices = args_.b.indices;
    const int32_t* of_a = args_.a.indices;
    int64_t done = 0;
    for (int64_t e = args_.a.offsets[row], end = args_.a.offsets[row + 1]; e < end; ++e) {
      if (e + kAhead < a_end_) {
        const int64_t next = offsets[of_a[e + kAhead]];
        Prefetch(indices + next);
        Prefetch(b_ + next);
      }
      const Values factor = L::Same(a_[e]);
      const int64_t k = of_a[e], stop = offsets[k + 1];
      int64_t q = offsets[k];
      do {  // once for a row of B without entries too: whether it has some is not foreseen
        const Mask mask = Below(stop - q);
        const Keys which = L::NumbersFrom(int32_t(done));
        const Values entries = L::Load(mask, b_ + q);
        const int64_t at = place + done;
        L::Store(keys_ + at, L::Or(L::Up(L::Load(mask, indices + q), bits_), which));
        L::Store(factors_ + at, factor);
        L::Store(entries_ + at, entries);
        if constexpr (!kInRegisters) L::Store(products_ + at, L::Product(factor, entries));
        done += stop - q < kLanes ? stop - q : kLanes;
        q += kLanes;
      } while (q < stop);
    }
    // Up to the next vector, and one more: the last row's or one that is greater than all keys.
    L::Store(keys_ + place + products, L::Every(-1));
    L::Store(keys_ + place + Vectors(products) * kLanes, L::Every(-1));
  }
  // Whether the keys of a row are in order.
  bool Ascend(int64_t place, int64_t products) const {
    uint32_t all = ~0u;
    for (int64_t v = 0; v < Vectors(products); ++v) {
      const Keys x = L::Load(keys_ + place + v * kLanes);
      Keys least = x, next = L::Load(keys_ + place + v * kLanes + 1);
      L::Exchange(least, next);
      all &= L::Bits(L::Equal(least, x));
    }
    return (all & kAll) == kAll;
  }

#if SGAP_KEY_SORT == 16
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
  void AddInRegisters(int64_t place, int64_t products, Out& out) const {
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
      const int count = L::Store(begins, columns, sums, out.indices, out.values);
      out.indices += count;
      out.values += count;
    }
  }

  template <typename Out>
  void Add(int64_t place, int64_t products, Out& out) const {
    switch (Vectors(products)) {
      case 0:
        return;
      case 1:
        return AddInRegisters<1>(place, products, out);
      case 2:
        return AddInRegisters<2>(place, products, out);
      case 3:
      case 4:
        return AddInRegisters<4>(place, products, out);
      default:
        return AddMany(place, products, out);
    }
  }
#else
  template <typename Out>
  void Add(int64_t place, int64_t products, Out& out) const {
    AddMany(place, products, out);
  }
#endif

  // Few of the products share a column: those are added one by one.
  template <typename Out>
  void AddMany(int64_t place, int64_t products, Out& out) const {
    const uint32_t* keys = keys_ + place;
    const float *factors = factors_ + place, *entries = entries_ + place;
    const float* first = products_ + place;
    const uint32_t low = (1u << bits_) - 1;
    for (int64_t left = products; left > 0; left -= kLanes, keys += kLanes) {
      const Keys which = L::AndNot(L::Every(int32_t(~low)), L::Load(keys)), columns = Columns(keys);
      const Mask used = Below(left);
      const Mask begins = L::ButNot(used, L::Equal(columns, Columns(keys - 1)));
      Values sums;
      if constexpr (kInRegisters) {
        sums = L::Product(L::Gather(begins, which, factors), L::Gather(begins, which, entries));
      } else {
        sums = L::Gather(begins, which, first);
      }
      const uint32_t bits = L::Bits(begins);
      const int count = L::Store(begins, columns, sums, out.indices, out.values);
      for (uint32_t rest = L::Bits(used) & ~bits; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        const uint32_t p = keys[lane] & low;
        float& sum = out.values[__builtin_popcount(bits & ((2u << lane) - 1)) - 1];
        sum = __builtin_fmaf(factors[p], entries[p], sum);
      }
      out.indices += count;
      out.values += count;
    }
  }

  static constexpr bool kInRegisters = kLanes == 16;  // whether products are where they are added
  static constexpr uint32_t kAll = (1u << kLanes) - 1;

  const SpgemmRowsArgs& args_;
  const float *const a_, *const b_;
  const int64_t a_end_;  // of the task
  const int bits_;
  int64_t most_;
  uint32_t* const keys_;
  float *const factors_, *const entries_, *const products_;
};

}  // namespace
}  // namespace sgap::SGAP_ISA

#endif
