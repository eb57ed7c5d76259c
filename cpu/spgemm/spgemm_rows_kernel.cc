// Structure and values of A B in one pass over the products.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/simd/simd.h"
#include "cpu/spgemm/sorted_rows.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap::SGAP_ISA {
namespace {

constexpr int64_t kInsertion = 48;  // columns at most that are sorted by insertion

// Sorts n columns; `other` has room for as many.
void SortColumns(int32_t* columns, int32_t* other, int64_t n, int64_t below) {
  if (n <= kInsertion) {
    for (int64_t i = 1; i < n; ++i) {
      const int32_t column = columns[i];
      int64_t place = i;
      for (; place > 0 && columns[place - 1] > column; --place) {
        columns[place] = columns[place - 1];
      }
      columns[place] = column;
    }
    return;
  }
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

  void Add(int32_t column, Accumulator<T> sum) {
    *indices++ = column;
    StoreScalar(values++, sum);
  }
};

#if defined(__AVX512F__) && defined(__AVX512VL__)
// The 64 columns from `base` on: those whose bits are set, and zeros in place of their sums. Writes
// up to 15 entries too many.
inline void AddWord(uint64_t bits, int32_t base, float* sums, Out<float>& out) {
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
#else
inline void AddWord(uint64_t, int32_t, float*, Out<float>&) {}
constexpr bool kAddsWords = false;
#endif

template <typename T>
class RowProduct {
  using Acc = Accumulator<T>;

 public:
  explicit RowProduct(const SpgemmRowsArgs& args)
      : args_(args),
        a_(static_cast<const T*>(args.a_values)),
        b_(static_cast<const T*>(args.b_values)) {
    const SpgemmRowsScratch at(args.columns, args.slots, args.longest, sizeof(Acc));
    sums_ = reinterpret_cast<Acc*>(args.scratch);
    flags_ = reinterpret_cast<uint8_t*>(args.scratch + at.flags);
    keys_ = reinterpret_cast<int32_t*>(args.scratch + at.flags);
    list_ = reinterpret_cast<int32_t*>(args.scratch + at.list);
    other_ = reinterpret_cast<int32_t*>(args.scratch + at.other);
  }

  void Run(int64_t row, Out<T>& out) {
    const int64_t begin = args_.a.offsets[row], end = args_.a.offsets[row + 1];
    if (begin == end || (end - begin == 1 && Scaled(begin, out))) return;
    if (args_.slots) return Hashed(begin, end, out);
    int64_t products = 0;
    for (int64_t e = begin; e < end; ++e) {
      const int64_t k = args_.a.indices[e];
      products += args_.b.offsets[k + 1] - args_.b.offsets[k];
    }
    // With few flags to look at for each product no list of the columns is kept.
    args_.columns / 64 <= 4 * products ? InColumns<false>(begin, end, out)
                                       : InColumns<true>(begin, end, out);
  }

 private:
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

  // Flags are bytes: with bits, each product would wait for the one before in the same word.
  template <bool kListed>
  void InColumns(int64_t begin, int64_t end, Out<T>& out) {
    uint32_t low = UINT32_MAX, high = 0;
    int64_t listed = 0;
    Products(begin, end, [&](Acc factor, int64_t q, uint32_t column) {
      sums_[column] = MultiplyAdd(factor, LoadScalar(b_ + q), sums_[column]);
      if (kListed) {
        list_[listed] = int32_t(column);
        listed += flags_[column] == 0;
      }
      flags_[column] = 0xff;
      low = column < low ? column : low;
      high = column > high ? column : high;
    });
    if (low > high) return;  // no products
    const int64_t first = low / 64, last = high / 64;
    if (kListed && last - first > (listed <= kInsertion ? 6 : 16) * listed + 16)
      return FromList(listed, out);
    for (int64_t part = first; part <= last; ++part) {
      if (const uint64_t bits = FlagBits(flags_ + part * 64)) {
        std::memset(flags_ + part * 64, 0, 64);
        AddBits(bits, part * 64, out);
      }
    }
  }

  void AddBits(uint64_t bits, int64_t base, Out<T>& out) {
    const int count = __builtin_popcountll(bits);
    if constexpr (kAddsWords && std::is_same_v<T, float>) {
      if (count > 8) return AddWord(bits, int32_t(base), sums_ + base, out);
    }
    // Four at once, for fewer too: a loop of as many steps as bits would be foreseen wrongly. What
    // is written behind the last one lies in the slack.
    Acc none = 0;
    for (int i = 0; i < 4; ++i) {
      const int64_t column = base + (bits ? __builtin_ctzll(bits) : 0);
      Acc* const sum = bits ? sums_ + column : &none;
      out.indices[i] = int32_t(column);
      StoreScalar(out.values + i, *sum);
      *sum = 0;
      bits &= bits - 1;
    }
    out.indices += count < 4 ? count : 4;
    out.values += count < 4 ? count : 4;
    for (; bits != 0; bits &= bits - 1) {
      const int64_t column = base + __builtin_ctzll(bits);
      out.Add(int32_t(column), sums_[column]);
      sums_[column] = 0;
    }
  }

  void FromList(int64_t listed, Out<T>& out) {
    SortColumns(list_, other_, listed, args_.columns);
    for (int64_t i = 0; i < listed; ++i) {
      const int32_t column = list_[i];
      out.Add(column, sums_[column]);
      sums_[column] = 0;
      flags_[column] = 0;
    }
  }

  // The slot of a column: its own, or the free one where it goes. Keys are columns + 1. At most
  // half of the slots are ever taken.
  uint32_t SlotOf(uint32_t column) const {
    const auto last = uint32_t(args_.slots - 1);
    uint32_t slot = SpgemmSlot(column, args_.slots);
    while (keys_[slot] != 0 && uint32_t(keys_[slot]) != column + 1) slot = (slot + 1) & last;
    return slot;
  }

  void Hashed(int64_t begin, int64_t end, Out<T>& out) {
    int64_t listed = 0;
    Products(begin, end, [&](Acc factor, int64_t q, uint32_t column) {
      const uint32_t slot = SlotOf(column);
      if (keys_[slot] == 0) {
        keys_[slot] = int32_t(column + 1);
        list_[listed++] = int32_t(column);
      }
      sums_[slot] = MultiplyAdd(factor, LoadScalar(b_ + q), sums_[slot]);
    });
    SortColumns(list_, other_, listed, args_.columns);
    for (int64_t i = 0; i < listed; ++i) {
      other_[i] = int32_t(SlotOf(uint32_t(list_[i])));
      out.Add(list_[i], sums_[other_[i]]);
    }
    for (int64_t i = 0; i < listed; ++i) keys_[other_[i]] = 0, sums_[other_[i]] = 0;
  }

  const SpgemmRowsArgs& args_;
  const T *a_, *b_;
  Acc* sums_;
  uint8_t* flags_;
  int32_t *keys_, *list_, *other_;
};

}  // namespace

void SpgemmRows(const SpgemmRowsArgs& args, int64_t task) {
  DispatchDtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RowProduct<T> product(args);
    Out<T> out = {args.indices, static_cast<T*>(args.values)};
    const int64_t end = args.task_rows[task + 1];
#if defined(SGAP_KEY_SORT)
    if constexpr (std::is_same_v<T, float>) {
      SortedRows sorted(args, task);
      for (int64_t row = args.task_rows[task]; row < end;) {
        row = sorted.Run(row, end, out);
        for (; row < end && !sorted.Takes(row); ++row) {
          const int32_t* before = out.indices;
          product.Run(row, out);
          args.counts[row] = int32_t(out.indices - before);
        }
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
