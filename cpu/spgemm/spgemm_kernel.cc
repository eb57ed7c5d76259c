#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/simd/simd.h"
#include "cpu/spgemm/repeated_rows.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap::SGAP_ISA {
namespace {

// Places of the columns of one row, from 1 on; 0 for all others. In a hash table: keys are columns
// + 1.
class HashedPlaces {
 public:
  explicit HashedPlaces(const SpgemmArgs& args)
      : keys_(reinterpret_cast<int32_t*>(args.scratch)),
        places_(keys_ + args.slots),
        slots_(args.slots) {}
  int32_t Of(int32_t column) const { return places_[Slot(column)]; }
  void Set(int32_t column, int32_t place) {
    const uint32_t slot = Slot(column);
    keys_[slot] = column + 1;
    places_[slot] = place;
  }
  // All slots are found before the first one is free: searches would end there. `other` has room
  // for `count` numbers of 4 bytes.
  void Clear(const int32_t* columns, int64_t count, void* other) {
    auto* const slots = static_cast<char*>(other);
    for (int64_t p = 0; p < count; ++p) {
      const uint32_t slot = Slot(columns[p]);
      std::memcpy(slots + p * 4, &slot, 4);
    }
    for (int64_t p = 0; p < count; ++p) {
      uint32_t slot;
      std::memcpy(&slot, slots + p * 4, 4);
      keys_[slot] = places_[slot] = 0;
    }
  }

 private:
  uint32_t Slot(int32_t column) const {
    uint32_t slot = SpgemmSlot(uint32_t(column), slots_);
    while (keys_[slot] != 0 && keys_[slot] != column + 1) slot = (slot + 1) & uint32_t(slots_ - 1);
    return slot;
  }

  int32_t *const keys_, *const places_;
  const int64_t slots_;
};

// each(factor, column, entry of B) for the products of a row, in order. Rows of B that come soon
// are prefetched.
template <typename T, typename Each>
inline void EachProduct(const SpgemmArgs& args, int64_t row, const T* a, const T* b, Each each) {
  constexpr int64_t kAhead = 8, kUnrolled = 4;
  const int32_t *offsets = args.b.offsets, *indices = args.b.indices, *of_a = args.a.indices;
  const int64_t known = args.a.offsets[args.task_rows[args.row_tasks]];
  for (int64_t e = args.a.offsets[row], last = args.a.offsets[row + 1]; e < last; ++e) {
    if (e + kAhead < known) {
      const int64_t next = offsets[of_a[e + kAhead]];
      Prefetch(indices + next);
      Prefetch(b + next);
    }
    const Accumulator<T> factor = LoadScalar(a + e);
    const int64_t k = of_a[e];
    int64_t q = offsets[k];
    const int64_t stop = offsets[k + 1];
    for (; q + kUnrolled <= stop; q += kUnrolled) {
      for (int i = 0; i < kUnrolled; ++i) each(factor, indices[q + i], q + i);
    }
    for (; q < stop; ++q) each(factor, indices[q], q);
  }
}

// With a mask: sums in an array of all columns. Those of the row begin as zero and those of others,
// which are never read, as anything.
template <typename T>
void MultiplyMasked(const SpgemmArgs& args, int64_t row, const T* a, const T* b, T* out) {
  using Acc = Accumulator<T>;
  auto* const sums = reinterpret_cast<Acc*>(args.scratch);
  const int32_t* columns = args.c.indices;
  const int64_t begin = args.c.offsets[row], end = args.c.offsets[row + 1];
  for (int64_t p = begin; p < end; ++p) sums[columns[p]] = 0;
  EachProduct(args, row, a, b, [&](Acc factor, int32_t column, int64_t q) {
    sums[column] = MultiplyAdd(factor, LoadScalar(b + q), sums[column]);
  });
  for (int64_t p = begin; p < end; ++p) StoreScalar(out + p, sums[columns[p]]);
}

// With a plan: sums in an array of all columns, in which those that have none yet are a NaN of all
// ones (SpgemmScratch::kFree). A row begins as many sums as it finds at the columns of C, or has a
// product without a place: the columns of C need no pass before the products, nor flags.
template <typename T>
class PlannedRows {
  using Acc = Accumulator<T>;
  using Bits = std::conditional_t<sizeof(Acc) == 8, uint64_t, uint32_t>;
  static constexpr Bits kFree = ~Bits(0);

 public:
  explicit PlannedRows(const SpgemmArgs& args)
      : args_(args), sums_(reinterpret_cast<Acc*>(args.scratch)) {}

  void Multiply(int64_t row, const T* a, const T* b, T* out) const {
    Acc* const sums = sums_;
    const int32_t* const columns = args_.c.indices;
    const int64_t begin = args_.c.offsets[row], end = args_.c.offsets[row + 1];
    int unordered = 0;
    for (int64_t p = begin + 1; p < end; ++p) unordered |= columns[p - 1] >= columns[p];
    // In a vector's first lane, where a comparison is a mask: there is no branch on a sum.
    constexpr int kLanes = int(16 / sizeof(Acc));
    using Lanes = Vector<Bits, kLanes>;
    Lanes begun = {};
    EachProduct(args_, row, a, b, [&](Acc factor, int32_t column, int64_t q) {
      const Lanes sum = {Load(sums + column)};
      const auto free = Lanes(sum == kFree);
      begun -= free;
      const auto value = Vector<Acc, kLanes>(sum & ~free);
      sums[column] = MultiplyAdd(factor, LoadScalar(b + q), Acc(value[0]));
    });
    Bits stored = 0;
    if (unordered) {  // a column may be there several times
      for (int64_t p = begin; p < end; ++p) Put(Load(sums + columns[p]), out + p);
      for (int64_t p = begin; p < end; ++p) stored += Take(columns[p]) != kFree;
    } else {
      for (int64_t p = begin; p < end; ++p) {
        const Bits sum = Take(columns[p]);
        stored += sum != kFree;
        Put(sum, out + p);
      }
    }
    if (stored != begun[0]) Exactly(row, a, b, out);
  }

 private:
  static Bits Load(const Acc* sum) {
    Bits bits;
    std::memcpy(&bits, sum, sizeof(bits));
    return bits;
  }
  // The sum of a column, which has none from now on.
  Bits Take(int32_t column) const {
    const Bits bits = Load(sums_ + column);
    std::memcpy(sums_ + column, &kFree, sizeof(kFree));
    return bits;
  }
  static void Put(Bits bits, T* out) {
    bits = bits == kFree ? 0 : bits;
    Acc sum;
    std::memcpy(&sum, &bits, sizeof(sum));
    StoreScalar(out, sum);
  }

  // A row with a product without a place, or with values that are a NaN of all ones.
  void Exactly(int64_t row, const T* a, const T* b, T* out) const {
    const int32_t* const columns = args_.c.indices;
    const int64_t begin = args_.c.offsets[row], end = args_.c.offsets[row + 1];
    EachProduct(args_, row, a, b, [&](Acc, int32_t column, int64_t) { Take(column); });
    for (int64_t p = begin; p < end; ++p) sums_[columns[p]] = 0;
    bool missing = false;
    EachProduct(args_, row, a, b,
                [&](Acc, int32_t column, int64_t) { missing |= Load(sums_ + column) == kFree; });
    if (!missing) {
      EachProduct(args_, row, a, b, [&](Acc factor, int32_t column, int64_t q) {
        sums_[column] = MultiplyAdd(factor, LoadScalar(b + q), sums_[column]);
      });
    }
    const Acc wrong = Acc(__builtin_nan(""));
    for (int64_t p = begin; p < end; ++p) {
      StoreScalar(out + p, missing ? wrong : sums_[columns[p]]);
    }
    for (int64_t p = begin; p < end; ++p) Take(columns[p]);
  }

  const SpgemmArgs& args_;
  Acc* const sums_;
};

// A place in `sums` for each entry of a row of C. Entries of one column share the last one's place.
template <typename T>
void MultiplyHashed(const SpgemmArgs& args, int64_t row, const T* a, const T* b, T* out) {
  using Acc = Accumulator<T>;
  HashedPlaces places(args);
  const SpgemmScratch parts(args.columns, args.slots, 0, sizeof(Acc));
  auto* sums = reinterpret_cast<Acc*>(args.scratch + parts.Sums());
  sums[0] = 0;
  const int32_t* columns = args.c.indices;
  const int64_t begin = args.c.offsets[row], end = args.c.offsets[row + 1];
  for (int64_t p = begin; p < end; ++p) {
    places.Set(columns[p], int32_t(p - begin + 1));
    sums[p - begin + 1] = 0;
  }
  bool missing = false;
  EachProduct(args, row, a, b, [&](Acc factor, int32_t column, int64_t q) {
    const int32_t place = places.Of(column);
    missing |= place == 0;
    sums[place] =
        MultiplyAdd(factor, LoadScalar(b + q), sums[place]);  // that of no place is never read
  });
  const bool wrong = missing && args.complete;
  for (int64_t p = begin; p < end; ++p) {
    StoreScalar(out + p, wrong ? Acc(__builtin_nan("")) : sums[places.Of(columns[p])]);
  }
  places.Clear(columns + begin, end - begin, sums);
}

class ColumnSet {
 public:
  ColumnSet(uint64_t* scratch, int64_t columns)
      : words_(scratch),
        above_(words_ + columns / 64 + 1),
        top_(above_ + (columns / 64 + 1) / 64 + 1),
        top_words_(((columns / 64 + 1) / 64 + 1) / 64 + 1) {}

  void Add(uint32_t column) {
    words_[column >> 6] |= uint64_t(1) << (column & 63);
    uint64_t& above = above_[column >> 12];
    if (above == 0) top_[column >> 18] |= uint64_t(1) << ((column >> 12) & 63);
    above |= uint64_t(1) << ((column >> 6) & 63);
  }

  // Calls each(word, bits) for the words that have columns, ascending, and empties the set.
  template <typename Each>
  void Drain(Each each) {
    for (int64_t t = 0; t < top_words_; ++t) {
      for (uint64_t top = top_[t]; top != 0; top &= top - 1) {
        const int64_t i = t * 64 + __builtin_ctzll(top);
        for (uint64_t above = above_[i]; above != 0; above &= above - 1) {
          const int64_t word = i * 64 + __builtin_ctzll(above);
          each(word, words_[word]);
          words_[word] = 0;
        }
        above_[i] = 0;
      }
      top_[t] = 0;
    }
  }

 private:
  uint64_t *const words_, *const above_, *const top_;
  const int64_t top_words_;
};

}  // namespace

void Spgemm(const SpgemmArgs& args, int64_t task) {
  const int64_t batch = task / args.row_tasks, index = task % args.row_tasks;
  DispatchDtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* a = static_cast<const T*>(args.a_values) + batch * args.a_stride;
    const T* b = static_cast<const T*>(args.b_values) + batch * args.b_stride;
    T* out = static_cast<T*>(args.out) + batch * args.out_stride;
    const auto multiply = args.slots ? MultiplyHashed<T> : MultiplyMasked<T>;
    const PlannedRows<T> planned(args);
    const int64_t first = args.task_rows[index];
    const SpgemmScratch parts(args.columns, args.slots, args.longest, sizeof(Accumulator<T>));
    RepeatedRows<T> repeated(args.a, args.b, a, b, first, args.scratch + parts.repeated);
    const int64_t last = args.task_rows[index + 1], end = args.c.offsets[last];
    for (int64_t row = first; row < last; ++row) {
      const int64_t begin = args.c.offsets[row], count = args.c.offsets[row + 1] - begin;
      const int32_t* const columns = args.c.indices + begin;
      if (const auto rows = repeated.FindEight(row, last, out + begin, end - begin, &args.c)) {
        row += rows - 1;
        continue;
      }
      if (repeated.Find(row, out + begin, columns, count)) continue;
      if (args.complete && !args.slots) {
        planned.Multiply(row, a, b, out);
      } else {
        multiply(args, row, a, b, out);
      }
      repeated.Note(row, columns, count);
    }
  });
}

void SpgemmPattern(const SpgemmPatternArgs& args, int64_t task) {
  ColumnSet set(args.scratch, args.columns);
  for (int64_t row = args.task_rows[task]; row < args.task_rows[task + 1]; ++row) {
    for (int64_t e = args.a.offsets[row]; e < args.a.offsets[row + 1]; ++e) {
      const int64_t k = args.a.indices[e];
      for (int64_t q = args.b.offsets[k]; q < args.b.offsets[k + 1]; ++q) {
        set.Add(args.b.indices[q]);
      }
    }
    if (args.counts) {
      int64_t count = 0;
      set.Drain([&](int64_t, uint64_t bits) { count += __builtin_popcountll(bits); });
      args.counts[row] = int32_t(count);
      continue;
    }
    int64_t place = args.offsets[row];
    const int64_t end = args.offsets[row + 1];
    set.Drain([&](int64_t word, uint64_t bits) {
      for (; bits != 0 && place < end; bits &= bits - 1) {
        args.indices[place++] = int32_t(word * 64 + __builtin_ctzll(bits));
      }
    });
    for (; place < end; ++place) args.indices[place] = 0;
  }
}

}  // namespace sgap::SGAP_ISA
