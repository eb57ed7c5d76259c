// The inner loops of spmm_kernel.cc for up to 4 columns, where one entry does not fill a vector, so
// several entries share one, kSlots lanes each.
#pragma once

#include "cpu/common/machine.h"
#include "cpu/simd/gather.h"
#include "cpu/simd/lane_sums.h"
#include "cpu/spmm/spmm_rows.h"

namespace sgap::SGAP_ISA {

// Whether a lane of x is at least `least`, both unsigned.
template <int N>
inline bool AnyFrom(Vector<uint32_t, N> x, uint32_t least) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    return _mm512_cmpge_epu32_mask(BitCast<__m512i>(x), _mm512_set1_epi32(int(least))) != 0;
  }
#endif
#if defined(__AVX2__)
  if constexpr (N == 8) {
    const auto all = BitCast<__m256i>(x);
    const __m256i most = _mm256_max_epu32(all, _mm256_set1_epi32(int(least)));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(most, all)) != 0;
  }
#endif
  uint32_t any = 0;
  for (int i = 0; i < N; ++i) any |= x[i] >= least;
  return any != 0;
}

// Whether N indices from `indices` on are all in 0 .. size - 1. Read as unsigned, negative ones are
// the greatest.
template <int N>
inline bool AllBelow(const int32_t* indices, uint32_t size) {
  constexpr int kWidth = N < kLanes<float> ? N : kLanes<float>;
  using Lanes = Vector<uint32_t, kWidth>;
  Lanes greatest{};
#pragma GCC unroll 4
  for (int i = 0; i < N; i += kWidth) {
    Lanes x;
    __builtin_memcpy(&x, indices + i, sizeof(x));
    greatest = greatest > x ? greatest : x;
  }
  return !AnyFrom<kWidth>(greatest, size);
}

// kSlots = 1 for a single column that is the whole of x (its rows are then next to each other),
// else 4. kAdjacent: so are rows of four float32.
template <typename T, typename X, int kSlots, bool kAdjacent = false>
struct NarrowTile {
  using Acc = Accumulator<T>;
  static constexpr int kWidth = kLanes<Acc> < 4 ? 4 : kLanes<Acc>;
  static constexpr int kGroup = kSlots == 1 ? 4 : kWidth / 4;  // entries multiplied together
  using Group = Vector<Acc, kGroup>;
  using Products = Vector<Acc, kGroup * kSlots>;

  // SumProducts may read this much past the last product.
  static constexpr int kPadding = 4 * kWidth;

  static constexpr int kChains = 4;  // independent sums

  // Four elements of x at entry p; with kTail those past the last column are zero.
  template <bool kTail>
  static Vector<Acc, 4> Row(const RowBlock<T, X>& block, int64_t p) {
    const X* at = block.x + size_t(block.indices[p]) * size_t(block.x_stride);
    return kTail ? LoadPartial<X, 4>(at, block.tail) : Load<X, 4>(at);
  }

  // Those of kRows entries.
  template <bool kTail, int kRows>
  static Vector<Acc, 4 * kRows> Rows(const RowBlock<T, X>& block, int64_t p) {
    if constexpr (kRows == 1) {
      return Row<kTail>(block, p);
    } else if constexpr (kRows == 2 && kAdjacent) {
      // Two indices with one load, each doubled: an address takes that times 8.
      static_assert(sizeof(X) == 4 && !kTail);
      uint64_t pair;
      std::memcpy(&pair, block.indices + p, sizeof(pair));
      const auto row = [&](uint64_t doubled) { return Load<X, 4>(block.x + doubled * 2); };
      return Concat<Acc, 4>(row(uint32_t(pair) * 2), row(pair >> 31));
    } else if constexpr (sizeof(X) == 2) {  // put together first, to be widened at once
      const auto bits = Bits<kTail, kRows>(block, p);
      return Load<X, 4 * kRows>(reinterpret_cast<const X*>(&bits));
    } else {
      return Concat<Acc, 2 * kRows>(Rows<kTail, kRows / 2>(block, p),
                                    Rows<kTail, kRows / 2>(block, p + kRows / 2));
    }
  }

  template <bool kTail, int kRows>
  static Vector<uint64_t, kRows> Bits(const RowBlock<T, X>& block, int64_t p) {
    if constexpr (kRows == 2) {
      const auto row = [&](int64_t p) {
        const X* at = block.x + size_t(block.indices[p]) * size_t(block.x_stride);
        return LoadHalves(at, kTail ? block.tail : 4);
      };
      return Vector<uint64_t, 2>{row(p), row(p + 1)};
    } else {
      return Concat<uint64_t, kRows / 2>(Bits<kTail, kRows / 2>(block, p),
                                         Bits<kTail, kRows / 2>(block, p + kRows / 2));
    }
  }

  // value[i] * x[indices[p + i], c] in lane i * kSlots + c.
  template <bool kTail, bool kAdded>
  static Products Multiply(const RowBlock<T, X>& block, Group value, int64_t p) {
    if constexpr (kSlots == 1 && kAdded) {
      return value * GatherByPairs<X, 4>(block.x, block.indices + p);
    } else if constexpr (kSlots == 1) {
      return value * Gather<X, 4>(block.x, block.indices + p);
    } else {
      return RepeatLanes4<Acc, kGroup>(value) * Rows<kTail, kGroup>(block, p);
    }
  }

  // One entry's product; with one slot in lane 0, the others zero.
  template <bool kTail>
  static Vector<Acc, 4> MultiplyOne(const RowBlock<T, X>& block, Acc value, int64_t p) {
    if constexpr (kSlots == 1) {
      return Vector<Acc, 4>{value * LoadScalar(block.x + size_t(block.indices[p]))};
    } else {
      return value * Row<kTail>(block, p);
    }
  }

  // `four` holds one sum per column, or with one slot four parts of the only one.
  static void Finish(const RowBlock<T, X>& block, Vector<Acc, 4> four, T* y) {
    if constexpr (kSlots == 1) {
      const Acc total = (four[0] + four[2]) + (four[1] + four[3]);
      if (block.carry) {
        *block.carry += total;
      } else {
        StoreScalar(y, total);
      }
    } else if (block.carry) {
      Store<Acc, 4>(block.carry, four + Load<Acc, 4>(block.carry));
    } else if (block.tail) {
      StorePartial<T, 4>(y, four, block.tail);
    } else {
      Store<T, 4>(y, four);
    }
  }

  // Groups of neighbouring entries from p on, each number of which is a constant.
  struct OwnValues {
    static constexpr int kTogether = 0;
    const T* values;

    Group Of(int64_t p, int number) const {
      if constexpr (kGroup == 2) {  // half of what one instruction widens
        return Half<Acc, 4>(Load<T, 4>(values + p + number / 2 * 4), number % 2);
      } else if constexpr (kGroup == 1) {
        return Group{LoadScalar(values + p + number)};
      } else {
        return Four(values + p + number * kGroup);
      }
    }
    // Where zeros and values are interleaved, these are widened.
    static Group Four(const T* values) {
#if defined(__AVX2__)
      if constexpr (std::is_same_v<T, BFloat16> && kGroup == 4) {
        const __m128i four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
        return BitCast<Group>(_mm_unpacklo_epi16(_mm_setzero_si128(), four));
      }
#endif
      return Load<T, kGroup>(values);
    }
    Group Last(int64_t p) const {
      if constexpr (kGroup == 2) {
        return Group{LoadScalar(values + p), LoadScalar(values + p + 1)};
      } else {
        return Of(p, 0);
      }
    }
    Acc One(int64_t p) const { return LoadScalar(values + p); }
    void Repeated(int64_t p, Products* lanes) const {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) lanes[c] = LoadLanes4<T, kGroup>(values + p + c * kGroup);
    }
  };
  // More at a time, on Intel: with one column eight entries in a register, with four columns 16
  // values widened together.
  struct TogetherValues : OwnValues {
    static constexpr int kTogether = kSlots == 1 ? 8 : 0;

    Vector<Acc, 8> Together(int64_t p) const { return LoadEight(OwnValues::values + p); }
    static Vector<Acc, 8> Elements(const X* x, const int32_t* indices) {
      return GatherEight<X, 1>(x, indices);
    }
    void Repeated(int64_t p, Products* lanes) const {
      LoadLanes4<T, 4>(OwnValues::values + p, lanes);
    }
  };
  struct WidenedValues {
    static constexpr int kTogether = 0;
    const Acc* values;

    Group Of(int64_t p, int number) const {
      return Load<Acc, kGroup>(values + p + number * kGroup);
    }
    Group Last(int64_t p) const { return Of(p, 0); }
    Acc One(int64_t p) const { return values[p]; }
    void Repeated(int64_t p, Products* lanes) const {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) lanes[c] = LoadLanes4<Acc, kGroup>(values + p + c * kGroup);
    }
  };
  // Eight entries of an x of float32, gathered by an instruction. Of float64 that took 0.93 to 1.05
  // of the time.
  template <typename Values>
  struct GatheredValues : Values {
    static constexpr int kTogether = 8;

    Vector<Acc, kTogether> Together(int64_t p) const { return LoadEight(Values::values + p); }
    static Vector<Acc, kTogether> Elements(const X* x, const int32_t* indices) {
      return GatherAtOnce(x, indices);
    }
  };
  // Whether such instructions may take the place of loads.
  static constexpr bool kGathered = kVectorBytes == 64 && kSlots == 1 && std::is_same_v<X, Acc>;

  // Eight entries of one column whose elements are loaded one by one, and values together: Zen 5
  // loads two registers of numbers in a cycle, which bounds this loop.
  template <typename Values>
  struct InsertedValues : Values {
    static constexpr int kTogether = 8;

    Vector<Acc, kTogether> Together(int64_t p) const { return LoadEight(Values::values + p); }
    static Vector<Acc, kTogether> Elements(const X* x, const int32_t* indices) {
      return GatherByPairs<X, 8>(x, indices);
    }
  };

  template <bool kTail, bool kLooks = false>
  static void RunLong(const RowBlock<T, X>& block) {
    const WidenedValues values{block.values - block.first_entry};
    if constexpr (kGathered && sizeof(T) == 4) {
      if (ThisMachine().gathers) {
        return SumLong<kTail, kLooks>(block, GatheredValues<WidenedValues>{values});
      }
      if (OnZen5()) return SumLong<kTail, kLooks>(block, InsertedValues<WidenedValues>{values});
    }
    SumLong<kTail, kLooks>(block, values);
  }
  template <bool kTail, bool kLooks = false>
  static void RunLongOwn(const RowBlock<T, X>& block) {
    if constexpr (kGathered && sizeof(T) == 2) {
      if (ThisMachine().gathers) {
        return SumLong<kTail, kLooks>(block, GatheredValues<OwnValues>{{block.own_values}});
      }
    }
    if constexpr (sizeof(T) == 2 && kVectorBytes == 64) {
      if (ThisMachine().intel) {
        return SumLong<kTail, kLooks>(block, TogetherValues{{block.own_values}});
      }
      if constexpr (kSlots == 1) {
        if (OnZen5()) {
          return SumLong<kTail, kLooks>(block, InsertedValues<OwnValues>{{block.own_values}});
        }
      }
    }
    SumLong<kTail, kLooks>(block, OwnValues{block.own_values});
  }

  // So many indices are looked at together.
  static constexpr int kLooked = kChains * kGroup;

  // Whether the indices of the entries [p, end), fewer than kLooked, hold. Those that follow in the
  // task are looked at too, in place of branches on how many there are.
  static bool RestHolds(const RowBlock<T, X>& block, int64_t p, int64_t end) {
    if (p + kLooked <= block.entry_end) return AllBelow<kLooked>(block.indices + p, block.size);
#pragma GCC unroll 1
    for (; p < end; ++p) {
      if (uint32_t(block.indices[p]) >= block.size) return false;
    }
    return true;
  }

  // Long rows: sums straight from x.
  template <bool kTail, bool kLooks, typename Values>
  static void SumLong(const RowBlock<T, X>& shared, const Values values) {
    const RowBlock<T, X> block = shared;  // a copy: stores cannot change it
    T* y = block.y;
    int64_t p = block.offsets[0];
    for (int64_t r = 0; r < block.rows; ++r, y += block.y_stride) {
      const int64_t end = block.offsets[r + 1];
      Products sums[kChains] = {};
      constexpr int kTogether = Values::kTogether ? Values::kTogether : kLooked;
      [[maybe_unused]] Vector<Acc, kTogether> together[kLooked / kTogether] = {};
      for (; p + kLooked <= end; p += kLooked) {
        if constexpr (kLooks) {
          if (!AllBelow<kLooked>(block.indices + p, block.size)) return void(*block.wrong = true);
        }
        if constexpr (Values::kTogether) {
#pragma GCC unroll 2
          for (int i = 0; i < kLooked / kTogether; ++i) {
            const int64_t at = p + i * kTogether;
            together[i] += values.Together(at) * Values::Elements(block.x, block.indices + at);
          }
        } else if constexpr (kSlots == 4 && kGroup == 4) {
          Products lanes[kChains];
          values.Repeated(p, lanes);
#pragma GCC unroll 4
          for (int c = 0; c < kChains; ++c) {
            sums[c] += lanes[c] * Rows<kTail, kGroup>(block, p + c * kGroup);
          }
        } else {
#pragma GCC unroll 4
          for (int c = 0; c < kChains; ++c) {
            sums[c] += Multiply<kTail, true>(block, values.Of(p, c), p + c * kGroup);
          }
        }
      }
      if constexpr (Values::kTogether) {
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) {
          sums[c] = Half<Acc, 8>(together[c / 2], c % 2);
        }
      }
      if (kLooks && !RestHolds(block, p, end)) return void(*block.wrong = true);
#pragma GCC unroll 1
      for (; p + kGroup <= end; p += kGroup) {
        sums[0] += Multiply<kTail, true>(block, values.Last(p), p);
      }
      auto four = FoldLanes<4, Acc, kGroup * kSlots>((sums[0] + sums[1]) + (sums[2] + sums[3]));
#pragma GCC unroll 1
      for (; p < end; ++p) four += MultiplyOne<kTail>(block, values.One(p), p);
      Finish(block, four, y);
    }
  }

  // Short rows of 2 to 4 columns, straight from x. The only branches that depend on the data are
  // those on row lengths.
  template <bool kTail>
  static void RunPredicted(const RowBlock<T, X>& shared) {
    if (shared.carry) return RunLong<kTail>(shared);
    const RowBlock<T, X> block = shared;
    const Acc* values = block.values - block.first_entry;
    const auto product = [&](int64_t p) { return values[p] * Row<kTail>(block, p); };
    T* y = block.y;
    int64_t p = block.offsets[0];
    for (int64_t r = 0; r < block.rows; ++r, y += block.y_stride) {
      const int64_t end = block.offsets[r + 1];
      Vector<Acc, 4> even{}, odd{};
      for (; p + 2 <= end; p += 2) even += product(p), odd += product(p + 1);
      if (p < end) even += product(p++);
      if constexpr (kTail) {
        StorePartial<T, 4>(y, even + odd, block.tail);
      } else {
        Store<T, 4>(y, even + odd);
      }
    }
  }

  // The same sums, of groups: of the last eight entries of a row those after its end are read and
  // dropped. That a row has more than eight is easier to predict than how many it has.
  template <bool kTail>
  static void RunMasked(const RowBlock<T, X>& block) {
    if (block.carry) return RunLong<kTail>(block);
    int64_t inside = block.rows;  // after these rows what is read ends in the task
    while (inside > 0 && block.entry_end - block.offsets[inside] < 8) --inside;
    SumMasked<kTail>(block, inside);
    RowBlock<T, X> rest = block;
    rest.offsets += inside, rest.rows -= inside, rest.y += inside * block.y_stride;
    RunPredicted<kTail>(rest);
  }

  template <bool kTail>
  static void SumMasked(const RowBlock<T, X>& shared, int64_t rows) {
    using Pair = Vector<Acc, 8>;
    const RowBlock<T, X> block = shared;
    const Acc* values = block.values - block.first_entry;
    T* y = block.y;
    int64_t p = block.offsets[0];
    for (int64_t r = 0; r < rows; ++r, y += block.y_stride) {
      const int64_t end = block.offsets[r + 1];
      Pair sums{};  // of even entries, then of odd ones
      const auto add = [&](int64_t p) __attribute__((always_inline)) {
        return sums + LoadLanes4<Acc, 2>(values + p) * Rows<kTail, 2>(block, p);
      };
      for (; end - p > 8; p += 4) sums = add(p), sums = add(p + 2);
      const auto entry = LaneNumbers<int32_t, 8>() / 4, left = Vector<int32_t, 8>{} + int(end - p);
#pragma GCC unroll 4
      for (int i = 0; i < 8; i += 2) sums = entry + i < left ? add(p + i) : sums;
      p = end;
      const auto total = Half<Acc, 8>(sums, 0) + Half<Acc, 8>(sums, 1);
      if constexpr (kTail) {
        StorePartial<T, 4>(y, total, block.tail);
      } else {
        Store<T, 4>(y, total);
      }
    }
  }

  // Short rows of one column, straight from x, in groups of four entries: of the last one those
  // after the row's end are read and dropped. How many groups a row has is easier to predict than
  // how many entries.
  static void RunGroups(const RowBlock<T, X>& block) {
    if (block.carry) return RunLong<false>(block);
    int64_t inside = block.rows;  // after these rows no group ends outside of the task
    while (inside > 0 && block.entry_end - block.offsets[inside] < 4) --inside;
    SumGroups<true>(block, 0, inside);
    SumGroups<false>(block, inside, block.rows);
  }

  // Of more entries than this a row is summed in four chains first, but for the last 4 to 19.
  static constexpr int64_t kChainedRow = 64;

  template <bool kInside>
  static void SumGroups(const RowBlock<T, X>& block, int64_t row, int64_t rows) {
    const int32_t* const offsets = block.offsets;
    const int32_t* const indices = block.indices;
    const Acc* const values = block.values - block.first_entry;
    const X* const x = block.x;
    T* const y = block.y;
    int64_t p = offsets[row];
    const auto next = [=, &p](int64_t end) __attribute__((always_inline)) {
      Vector<Acc, 4> sums{};
      if (end - p > kChainedRow) {
        sums = SumChains(indices + p, values + p, x, end - p);
        p += (end - p - 4) / 16 * 16;
      }
      for (; p + 4 < end; p += 4) {
        sums += Load<Acc, 4>(values + p) * GatherByPairs<X, 4>(x, indices + p);
      }
      Vector<Acc, 4> value{}, last{};
      if constexpr (kInside) {
        value = Load<Acc, 4>(values + p);
        last = GatherByPairs<X, 4>(x, indices + p);
      } else {
        for (int i = 0; i < end - p; ++i) {
          value[i] = values[p + i], last[i] = x[size_t(indices[p + i])];
        }
      }
      using Index = std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>;
      const auto left = Vector<Index, 4>{} + Index(end - p);
      p = end;
      return LaneNumbers<Index, 4>() < left ? sums + value * last : sums;
    };
    for (; row + 4 <= rows; row += 4) {
      Vector<Acc, 4> sums[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[i] = next(offsets[row + i + 1]);
      Store<T, 4>(y + row, SumTransposed<2>(sums));
    }
    for (; row < rows; ++row) Finish(block, next(offsets[row + 1]), y + row);
  }

  [[gnu::noinline]] static Vector<Acc, 4> SumChains(const int32_t* indices, const Acc* values,
                                                    const X* x, int64_t count) {
    Vector<Acc, 4> sums[4] = {};
    for (int64_t p = 0; p + 20 <= count; p += 16) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        sums[i] += Load<Acc, 4>(values + p + 4 * i) * GatherByPairs<X, 4>(x, indices + p + 4 * i);
      }
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  template <bool kPermuted>
  static Group LoadValues(const T* values, const int32_t* permutation, int64_t p) {
    if constexpr (kPermuted) return Gather<T, kGroup>(values, permutation + p);
    return Load<T, kGroup>(values + p);
  }

  // Short rows, first step: all products of the entries [begin, end), without a branch on row ends.
  template <bool kTail, bool kPermuted, bool kLooks>
  static void MultiplyAll(const RowBlock<T, X>& shared, const T* values, const int32_t* permutation,
                          int64_t begin, int64_t end, Acc* products) {
    const RowBlock<T, X> block = shared;
    int64_t p = begin;
    const auto multiply = [&]() __attribute__((always_inline)) {
      Store<Acc, kGroup * kSlots>(
          products,
          Multiply<kTail, false>(block, LoadValues<kPermuted>(values, permutation, p), p));
      p += kGroup, products += kGroup * kSlots;
    };
    if constexpr (kLooks) {
      while (p + kLooked <= end) {
        if (!AllBelow<kLooked>(block.indices + p, block.size)) return void(*block.wrong = true);
#pragma GCC unroll 4
        for (int i = 0; i < kLooked; i += kGroup) multiply();
      }
      if (!RestHolds(block, p, end)) return void(*block.wrong = true);
    }
    while (p + kGroup <= end) multiply();
    for (; p < end; ++p, products += kSlots) {
      const auto product =
          MultiplyOne<kTail>(block, LoadScalar(values + (kPermuted ? permutation[p] : p)), p);
      if constexpr (kSlots == 1) {
        *products = product[0];
      } else {
        Store<Acc, 4>(products, product);
      }
    }
  }

  // The sum of the vectors at `at`, of which the first `lanes` lanes count. Parts past the end are
  // read and dropped: cheaper than a branch that is hard to predict. So where a vector has less
  // than 64 bytes, rows of one and of two take the same steps, with the bits of either.
  static Vector<Acc, kWidth> SumProducts(const Acc* at, int64_t lanes) {
    if constexpr (kWidth * sizeof(Acc) < 64) {
      if (lanes <= 2 * kWidth) {
        using Index = std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>;
        // Adding -0.0 changes nothing.
        const auto none = (lanes <= kWidth ? Acc(-0.0) : Acc(0)) - Vector<Acc, kWidth>{};
        const auto lane = LaneNumbers<Index, kWidth>() + Index(kWidth);
        const auto second = Load<Acc, kWidth>(at + kWidth);
        const auto first = LoadFirst<Acc, kWidth>(at, lanes);
        return (first + (lane < Vector<Index, kWidth>{} + Index(lanes) ? second : none)) + none;
      }
    } else if (lanes <= kWidth) {
      return LoadFirst<Acc, kWidth>(at, lanes);
    }
    Vector<Acc, kWidth> sums[4] = {};
    for (; lanes > 4 * kWidth; lanes -= 4 * kWidth, at += 4 * kWidth) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[i] += Load<Acc, kWidth>(at + i * kWidth);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      sums[i] += FirstLanes<Acc, kWidth>(Load<Acc, kWidth>(at + i * kWidth), lanes - i * kWidth);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  // Lane i: the sum of the lanes of rows[i], in the order of FoldLanes and Finish.
  static Vector<Acc, 4> SumFour(Vector<Acc, kWidth>* rows) {
    if constexpr (kWidth == 16) {
      const auto low = AddPartners<8>(rows[0], rows[2]), high = AddPartners<8>(rows[1], rows[3]);
      auto quads = AddPartners<4>(low, high);  // row i in lanes 4i to 4i + 3
      quads = AddPartners<2>(quads, quads);
      quads = AddPartners<1>(quads, quads);
      quads = Shuffle<0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12>(quads, quads);
      return Half<Acc, 8>(Half<Acc, 16>(quads, 0), 0);
    } else {
      Vector<Acc, 4> four[4];
      for (int i = 0; i < 4; ++i) four[i] = FoldLanes<4, Acc, kWidth>(rows[i]);
      return SumTransposed<2>(four);
    }
  }

  // Short rows, second step: block.values holds the products.
  static void RunShort(const RowBlock<T, X>& shared) {
    const RowBlock<T, X> block = shared;
    const Acc* products = block.values - block.first_entry * kSlots;
    T* y = block.y;
    int64_t p = block.offsets[0], r = 0;
    if (kSlots == 1 && !block.carry) {
      for (; r + 4 <= block.rows; r += 4, y += 4) {
        Vector<Acc, kWidth> rows[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const int64_t end = block.offsets[r + i + 1];
          rows[i] = SumProducts(products + p, end - p);
          p = end;
        }
        Store<T, 4>(y, SumFour(rows));
      }
    }
    for (; r < block.rows; ++r, y += block.y_stride) {
      const int64_t end = block.offsets[r + 1];
      const Acc* at = products + p * kSlots;
      Finish(block, FoldLanes<4, Acc, kWidth>(SumProducts(at, (end - p) * kSlots)), y);
      p = end;
    }
  }
};

}  // namespace sgap::SGAP_ISA
