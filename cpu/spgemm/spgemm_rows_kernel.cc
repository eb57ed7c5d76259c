// Structure and values of A B in one pass over the products.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/simd/merge_lanes.h"
#include "cpu/simd/simd.h"
#include "cpu/spgemm/repeated_rows.h"
#include "cpu/spgemm/sorted_rows.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap::SGAP_ISA {
namespace {

// Products at most of a row whose columns are listed: each goes where so many others are less.
constexpr int64_t kRanked = 64;

// Sorts n columns; `other` has room for as many.
void SortColumns(int32_t* columns, int32_t* other, int64_t n, int64_t below) {
  constexpr int kBits = 8, kBins = 1 << kBits;
  for (int shift = 0; (below - 1) >> shift > 0; shift += kBits) {
    int32_t places[kBins + 1] = {};
    for (int64_t i = 0; i < n; ++i) ++places[((columns[i] >> shift) & (kBins - 1)) + 1];
    for (int bin = 0; bin < kBins; ++bin) places[bin + 1] += places[bin];
    for (int64_t i = 0; i < n; ++i)
      other[places[(columns[i] >> shift) & (kBins - 1)]++] = columns[i];
    std::memcpy(columns, other, size_t(n) * 4);
  }
}

// each(i, how many of the n different columns are less than columns[i]): no branch depends on a
// column. There is room to read kLane columns more.
template <typename Each>
inline void EachRank(const int32_t* columns, int64_t n, Each each) {
  constexpr int kLane = 8;
  for (int64_t i = 0; i < n; i += kLane) {
    int32_t own[kLane], ranks[kLane] = {};
    std::memcpy(own, columns + i, sizeof(own));
    for (int64_t j = 0; j < n; ++j) {
      for (int lane = 0; lane < kLane; ++lane) ranks[lane] += columns[j] < own[lane];
    }
    const int64_t stop = n - i < kLane ? n - i : kLane;
    for (int64_t lane = 0; lane < stop; ++lane) each(i + lane, ranks[lane]);
  }
}

// Which of 64 flags are set: each is 0 or 0xff.
inline uint64_t FlagBits(const uint8_t* flags) {
#if defined(__AVX512BW__)
  return _mm512_movepi8_mask(_mm512_loadu_si512(flags));
#elif defined(__AVX2__)
  const auto half = [&](int i) {
    return uint32_t(_mm256_movemask_epi8(_mm256_loadu_si256((const __m256i*)(flags + i))));
  };
  return half(0) | uint64_t(half(32)) << 32;
#else
  uint64_t bits = 0;
  for (int i = 0; i < 64; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, flags + i, 8);
    // Gathers the lowest bit of each byte in the highest byte.
    const uint64_t gathered = (eight & 0x0101010101010101u) * 0x0102040810204080u >> 56;
    bits |= gathered << i;
  }
  return bits;
#endif
}

// Where the entries of a row go.
template <typename T>
struct Out {
  int32_t* indices;
  T* values;
};

#if defined(__AVX512F__) && defined(__AVX512VL__)
// The 64 columns from `base` on: those whose bits are set, and zeros in place of their sums. Writes
// up to 15 entries too many.
__attribute__((always_inline)) inline void AddWord(uint64_t bits, int32_t base, float* sums,
                                                   Out<float>& out) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int part = 0; part < 64; part += 16) {
    const auto mask = __mmask16(bits >> part);
    const __m512i columns = _mm512_add_epi32(_mm512_set1_epi32(base + part), lanes);
    _mm512_storeu_si512(out.indices, _mm512_maskz_compress_epi32(mask, columns));
    _mm512_storeu_ps(out.values, _mm512_maskz_compress_ps(mask, _mm512_loadu_ps(sums + part)));
    _mm512_storeu_ps(sums + part, _mm512_setzero_ps());
    out.indices += __builtin_popcount(mask);
    out.values += __builtin_popcount(mask);
  }
}
constexpr bool kAddsWords = true;
#elif defined(__AVX2__)
// As above, in vectors of 8: up to 7 entries too many.
__attribute__((always_inline)) inline void AddWord(uint64_t bits, int32_t base, float* sums,
                                                   Out<float>& out) {
  for (int part = 0; part < 64; part += 8, bits >>= 8) {
    const __m256i columns = MergeLanes::NumbersFrom(base + part);
    const int count = MergeLanes::StoreBits(bits & 0xff, columns, _mm256_loadu_ps(sums + part),
                                            out.indices, out.values);
    _mm256_storeu_ps(sums + part, _mm256_setzero_ps());
    out.indices += count;
    out.values += count;
  }
}
constexpr bool kAddsWords = true;
#else
inline void AddWord(uint64_t, int32_t, float*, Out<float>&) {}
constexpr bool kAddsWords = false;
#endif

template <typename T>
class RowProduct {
  using Acc = Accumulator<T>;

 public:
  RowProduct(const SpgemmRowsArgs& args, int64_t task)
      : RowProduct(args, task, {args.columns, args.slots, args.longest, sizeof(Acc)}) {}

  void Run(int64_t row, Out<T>& out) {
    const int64_t begin = args_.a.offsets[row], end = args_.a.offsets[row + 1];
    if (begin == end || (end - begin == 1 && Scaled(begin, out)) || Repeats(row, out)) return;
    const int32_t* const columns = out.indices;
    Added(row, begin, end, out);
    Note(row, out.indices - columns, out);
  }

  // Whether the row has a shape that was noted, and was added up so.
  bool Repeats(int64_t row, Out<T>& out) {
    const auto* const shape = repeated_.Find(row, out.values);
    if (!shape) return false;
    const int32_t base = repeated_.Base(row), count = shape->count;
    for (int32_t i = 0; i < count; ++i) out.indices[i] = base + shape->distinct[i];
    out.indices += count;
    out.values += count;
    return true;
  }
  // How many rows from `row` on, below `end`, were added up in vectors at once.
  int64_t RepeatsEight(int64_t row, int64_t end, Out<T>& out) {
    const int64_t found = repeated_.FindEight(row, end, out.values, 8 * kRepeatedRowMost);
    for (int64_t i = 0; i < found; ++i) {
      const auto& shape = repeated_.ShapeOf(i, found);
      const int32_t base = repeated_.Base(row + i), count = shape.count;
      for (int32_t from = 0; from < count; from += 8) {  // behind the row is the next one's place
        for (int32_t j = from; j < from + 8; ++j) out.indices[j] = base + shape.distinct[j];
      }
      args_.counts[row + i] = count;
      out.indices += count;
      out.values += count;
    }
    return found;
  }
  bool MayRepeat(int64_t row) { return repeated_.Fits(row); }
  // Notes the shape of a row whose entries are the last `count` that were written.
  void Note(int64_t row, int64_t count, const Out<T>& out) {
    repeated_.Note(row, out.indices - count, count);
  }

 private:
  RowProduct(const SpgemmRowsArgs& args, int64_t task, const SpgemmRowsScratch& at)
      : args_(args),
        a_(static_cast<const T*>(args.a_values)),
        b_(static_cast<const T*>(args.b_values)),
        repeated_(args.a, args.b, a_, b_, args.task_rows[task], args.scratch + at.repeated) {
    sums_ = reinterpret_cast<Acc*>(args.scratch);
    flags_ = reinterpret_cast<uint8_t*>(args.scratch + at.flags);
    groups_ = reinterpret_cast<uint8_t*>(args.scratch + at.groups);
    keys_ = reinterpret_cast<int32_t*>(args.scratch + at.flags);
    list_ = reinterpret_cast<int32_t*>(args.scratch + at.list);
    other_ = reinterpret_cast<int32_t*>(args.scratch + at.other);
  }

  void Added(int64_t row, int64_t begin, int64_t end, Out<T>& out) {
    const int64_t products = args_.products[row + 1] - args_.products[row];
    if (args_.slots) {
      const int64_t most = products < args_.columns ? products : args_.columns;
      return Hashed(begin, end, SpgemmSlotsOf(most), out);
    }
    const int64_t words = args_.columns / 64;
    if (words <= 2 * products) return InColumns<kFlags>(begin, end, out);
    products <= kRanked ? InColumns<kList>(begin, end, out) : InColumns<kGroups>(begin, end, out);
  }

  // each(factor, entry of B, its column), in order. Rows of B that come next are prefetched.
  template <typename Each>
  void Products(int64_t begin, int64_t end, Each each) const {
    const int32_t *offsets = args_.b.offsets, *indices = args_.b.indices;
    for (int64_t e = begin; e < end; ++e) {
      if (e + 2 < end) {
        const int64_t next = offsets[args_.a.indices[e + 2]];
        Prefetch(indices + next);
        Prefetch(b_ + next);
      }
      const Acc factor = LoadScalar(a_ + e);
      const int64_t k = args_.a.indices[e];
      for (int64_t q = offsets[k], stop = offsets[k + 1]; q < stop; ++q) {
        each(factor, q, uint32_t(indices[q]));
      }
    }
  }

  // A row with one entry is a scaled row of B. False, and nothing added, if that is not ascending.
  bool Scaled(int64_t e, Out<T>& out) const {
    const int64_t k = args_.a.indices[e], begin = args_.b.offsets[k];
    const int64_t count = args_.b.offsets[k + 1] - begin;
    const int32_t* columns = args_.b.indices + begin;
    int unordered = 0;
    for (int64_t i = 1; i < count; ++i) unordered |= columns[i - 1] >= columns[i];
    if (unordered) return false;
    const Acc factor = LoadScalar(a_ + e);
    for (int64_t i = 0; i < count; ++i) {
      out.indices[i] = columns[i];
      StoreScalar(out.values + i, Acc(0) + factor * LoadScalar(b_ + begin + i));
    }
    out.indices += count;
    out.values += count;
    return true;
  }

  // How the columns of a row are found: from all flags, from a list of them, or from the flags of
  // those 64 that have one.
  enum Found { kFlags, kList, kGroups };

  // Flags are bytes: with bits, each product would wait for the one before in the same word.
  template <Found kFound>
  void InColumns(int64_t begin, int64_t end, Out<T>& out) {
    // In locals: a flag is a byte, which the compiler takes to change what lies in memory.
    Acc* const sums = sums_;
    uint8_t *const flags = flags_, *const groups = groups_;
    int32_t* const list = list_;
    const T* const b = b_;
    uint32_t low = UINT32_MAX, high = 0;
    int64_t listed = 0;
    Products(begin, end, [&](Acc factor, int64_t q, uint32_t column) {
      sums[column] = MultiplyAdd(factor, LoadScalar(b + q), sums[column]);
      if (kFound == kList) {
        list[listed] = int32_t(column);
        listed += flags[column] == 0;
      }
      if (kFound == kGroups) groups[column / 64] = 0xff;
      flags[column] = 0xff;
      low = column < low ? column : low;
      high = column > high ? column : high;
    });
    if (low > high) return;  // no products
    const int64_t first = low / 64, last = high / 64;
    if (kFound == kList && last - first > listed / 4) return FromList(listed, out);
    Out<T> own = out;
    if (kFound != kGroups) {
      for (int64_t word = first; word <= last; ++word) AddFlags(flags, sums, word, own);
    } else {
      for (int64_t part = first / 64; part <= last / 64; ++part) {
        uint64_t bits = FlagBits(groups + part * 64);
        std::memset(groups + part * 64, 0, 64);
        for (; bits != 0; bits &= bits - 1) {
          AddFlags(flags, sums, part * 64 + __builtin_ctzll(bits), own);
        }
      }
    }
    out = own;
  }

  // The columns among 64 that have a flag. Two at once also where there are fewer, since a loop of
  // as many steps as bits would be foreseen wrongly: of columns without a flag the sums are zero,
  // and what is written behind the last one lies in the slack.
  __attribute__((always_inline)) static inline void AddFlags(uint8_t* flags, Acc* sums,
                                                             int64_t word, Out<T>& out) {
    const int64_t base = word * 64;
    uint64_t bits = FlagBits(flags + base);
    std::memset(flags + base, 0, 64);
    const int count = __builtin_popcountll(bits);
    if constexpr (kAddsWords && std::is_same_v<T, float>) {
      if (count > 8) return AddWord(bits, int32_t(base), sums + base, out);
    }
    const auto put = [&](int64_t place, int64_t column) {
      out.indices[place] = int32_t(column);
      StoreScalar(out.values + place, sums[column]);
      sums[column] = 0;
    };
    const uint64_t one = bits | uint64_t(bits == 0);
    const uint64_t rest = one & (one - 1);
    const uint64_t other = rest | (one & (0 - uint64_t(rest == 0)));
    put(0, base + __builtin_ctzll(one));
    put(1, base + __builtin_ctzll(other));
    bits = rest & (rest - 1);
    for (int64_t i = 2; bits != 0; bits &= bits - 1) put(i++, base + __builtin_ctzll(bits));
    out.indices += count;
    out.values += count;
  }

  void FromList(int64_t listed, Out<T>& out) {
    Acc* const sums = sums_;
    uint8_t* const flags = flags_;
    const int32_t* const list = list_;
    const Out<T> own = out;
    EachRank(list, listed, [&](int64_t i, int64_t rank) {
      const int32_t column = list[i];
      own.indices[rank] = column;
      StoreScalar(own.values + rank, sums[column]);
      sums[column] = 0;
      flags[column] = 0;
    });
    out.indices += listed;
    out.values += listed;
  }

  // The slot of a column: its own, or the free one where it goes. Keys are columns + 1. At most
  // half of the slots are ever taken.
  uint32_t SlotOf(uint32_t column, int64_t slots) const {
    const auto last = uint32_t(slots - 1);
    uint32_t slot = SpgemmSlot(column, slots);
    while (keys_[slot] != 0 && uint32_t(keys_[slot]) != column + 1) slot = (slot + 1) & last;
    return slot;
  }

  // In the first `slots` of the table.
  void Hashed(int64_t begin, int64_t end, int64_t slots, Out<T>& out) {
    int64_t listed = 0;
    Products(begin, end, [&](Acc factor, int64_t q, uint32_t column) {
      const uint32_t slot = SlotOf(column, slots);
      if (keys_[slot] == 0) {
        keys_[slot] = int32_t(column + 1);
        other_[listed] = int32_t(slot);
        list_[listed++] = int32_t(column);
      }
      sums_[slot] = MultiplyAdd(factor, LoadScalar(b_ + q), sums_[slot]);
    });
    if (args_.sums == RowSums::kHashUnsorted) {
      std::memcpy(out.indices, list_, size_t(listed) * 4);
      for (int64_t i = 0; i < listed; ++i) StoreScalar(out.values + i, sums_[other_[i]]);
    } else if (listed <= kRanked) {
      EachRank(list_, listed, [&](int64_t i, int64_t rank) {
        out.indices[rank] = list_[i];
        StoreScalar(out.values + rank, sums_[other_[i]]);
      });
    } else {
      SortColumns(list_, other_, listed, args_.columns);
      for (int64_t i = 0; i < listed; ++i) {
        other_[i] = int32_t(SlotOf(uint32_t(list_[i]), slots));
        out.indices[i] = list_[i];
        StoreScalar(out.values + i, sums_[other_[i]]);
      }
    }
    for (int64_t i = 0; i < listed; ++i) keys_[other_[i]] = 0, sums_[other_[i]] = 0;
    out.indices += listed;
    out.values += listed;
  }

  const SpgemmRowsArgs& args_;
  const T *a_, *b_;
  RepeatedRows<T> repeated_;
  Acc* sums_;
  uint8_t *flags_, *groups_;
  int32_t *keys_, *list_, *other_;
};

}  // namespace

void SpgemmRows(const SpgemmRowsArgs& args, int64_t task) {
  DispatchDtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RowProduct<T> product(args, task);
    Out<T> out = {args.indices, static_cast<T*>(args.values)};
    const int64_t end = args.task_rows[task + 1];
#if defined(SGAP_KEY_SORT)
    if constexpr (std::is_same_v<T, float>) {
      SortedRows sorted(args, task);
      // Rows of a shape that was noted are not sorted.
      const auto shaped = [&](int64_t row) { return product.MayRepeat(row); };
      for (int64_t row = args.task_rows[task]; row < end;) {
        if (args.sums == RowSums::kAny) {
          if (const int64_t found = product.RepeatsEight(row, end, out)) {
            row += found;
            continue;
          }
        }
        const int32_t* before = out.indices;
        if (args.sums != RowSums::kAny || !sorted.Takes(row)) {
          product.Run(row, out);
        } else if (!product.Repeats(row, out)) {
          row = sorted.Run(row, end, out, shaped);
          product.Note(row - 1, args.counts[row - 1], out);
          continue;
        }
        args.counts[row++] = int32_t(out.indices - before);
      }
      return;
    }
#endif
    for (int64_t row = args.task_rows[task]; row < end; ++row) {
      const int32_t* before = out.indices;
      product.Run(row, out);
      args.counts[row] = int32_t(out.indices - before);
    }
  });
}

}  // namespace sgap::SGAP_ISA
