#include <cstdint>

#include "cpu/simd/simd.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap::SGAP_ISA {
namespace {

// A place in `sums` for each entry of a row of C: column j of it has its sum at sums[places[j]].
// All other columns have place 0. Entries of one column share the last one's place.
template <typename T>
void MultiplyRow(const SpgemmArgs& args, int64_t row, const T* a, const T* b, T* out) {
  using Acc = Accumulator<T>;
  auto* places = reinterpret_cast<int32_t*>(args.scratch);
  auto* sums = reinterpret_cast<Acc*>(args.scratch + (args.columns * 4 + 63) / 64 * 64);
  const int32_t* columns = args.c.indices;
  const int64_t begin = args.c.offsets[row], end = args.c.offsets[row + 1];
  for (int64_t p = begin; p < end; ++p) {
    places[columns[p]] = int32_t(p - begin + 1);
    sums[p - begin + 1] = 0;
  }
  bool missing = false;
  for (int64_t e = args.a.offsets[row], last = args.a.offsets[row + 1]; e < last; ++e) {
    const Acc factor = LoadScalar(a + e);
    const int64_t k = args.a.indices[e];
    for (int64_t q = args.b.offsets[k], stop = args.b.offsets[k + 1]; q < stop; ++q) {
      const int32_t place = places[args.b.indices[q]];
      if (place == 0) {
        missing = true;
        continue;
      }
      sums[place] += factor * LoadScalar(b + q);
    }
  }
  const bool wrong = missing && args.complete;
  for (int64_t p = begin; p < end; ++p) {
    StoreScalar(out + p, wrong ? Acc(__builtin_nan("")) : sums[places[columns[p]]]);
  }
  for (int64_t p = begin; p < end; ++p) places[columns[p]] = 0;
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
    for (int64_t row = args.task_rows[index]; row < args.task_rows[index + 1]; ++row) {
      MultiplyRow<T>(args, row, a, b, out);
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
