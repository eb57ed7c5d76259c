#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/merge_rows/merge_rows.h"
#include "cpu/simd/key_sort.h"
#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {
namespace {

// x where `kept`, else zero; without a branch.
template <typename Acc>
inline Acc OrZero(Acc x, bool kept) {
  std::conditional_t<sizeof(Acc) == 8, uint64_t, uint32_t> bits;
  std::memcpy(&bits, &x, sizeof(x));
  bits &= 0 - decltype(bits)(kept);
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

template <Merge kMerge, typename Acc>
inline Acc Merged(Acc a, Acc b) {
  return kMerge == Merge::kAdd ? a + b : kMerge == Merge::kSubtract ? a - b : a * b;
}

// both(column, i, whether A has it, j, whether B has it) for the entries i of A and j of B that
// come next; then of_a(column, i) or of_b(column, j) for what is left of one of them. No branch
// depends on which one comes first: it is as good as random.
template <typename Both, typename OfA, typename OfB>
inline void UnionOfRow(const MergeRowsArgs& args, int64_t row, Both both, OfA of_a, OfB of_b) {
  const int32_t *a = args.a.indices, *b = args.b.indices;
  int64_t i = args.a.offsets[row], j = args.b.offsets[row];
  const int64_t a_end = args.a.offsets[row + 1], b_end = args.b.offsets[row + 1];
  while (i < a_end && j < b_end) {
    const int32_t next_a = a[i], next_b = b[j];
    const bool from_a = next_a <= next_b, from_b = next_b <= next_a;
    both(next_a < next_b ? next_a : next_b, i, from_a, j, from_b);
    i += from_a;
    j += from_b;
  }
  for (; i < a_end; ++i) of_a(a[i], i);
  for (; j < b_end; ++j) of_b(b[j], j);
}

// add(column, i, j, both) where `both` says whether it counts.
template <typename Add>
inline void IntersectionOfRow(const MergeRowsArgs& args, int64_t row, Add add) {
  const int32_t *a = args.a.indices, *b = args.b.indices;
  int64_t i = args.a.offsets[row], j = args.b.offsets[row];
  const int64_t a_end = args.a.offsets[row + 1], b_end = args.b.offsets[row + 1];
  while (i < a_end && j < b_end) {
    const int32_t of_a = a[i], of_b = b[j];
    add(of_a, i, j, of_a == of_b);
    i += of_a <= of_b;
    j += of_b <= of_a;
  }
}

#if defined(SGAP_KEY_SORT)
// Rows of float32 in vectors of 16 entries. A key is the column, whether the entry is B's, and in
// the lowest bits which lane of the two vectors that are merged it comes from.
template <Merge kMerge>
class VectorMerge {
 public:
  static bool Takes(const MergeRowsArgs& args) { return args.columns < int64_t(1) << kColumnBits; }

  explicit VectorMerge(const MergeRowsArgs& args)
      : indices_(args.indices), values_(static_cast<float*>(args.values)) {}

  // Appends the row, and returns how many entries it has.
  int64_t Run(const MergeRowsArgs& args, int64_t row) {
    const int32_t* const before = indices_;
    Side a(args.a, args.a_values, row, 0), b(args.b, args.b_values, row, kOfB);
    if (a.left + b.left == 0) return 0;
    last_ = None().keys;
    Entries high = a.left > 0 ? a.Next() : b.Next(), waiting = None();
    for (bool begun = false; a.left > 0 || b.left > 0; begun = true) {
      // The side whose next column comes first: what is left of both is behind what comes out.
      Side& side = b.left == 0 || (a.left > 0 && a.Column() <= b.Column()) ? a : b;
      Entries low = side.Next();
      SortBoth(low, high);
      if (begun) Put(waiting, low);
      waiting = low;
    }
    Put(waiting, high);
    Put(high, None());
    return indices_ - before;
  }

 private:
  static constexpr int kColumnBits = 26, kShift = 32 - kColumnBits, kOfB = 32;
  static constexpr int kNoColumn = (1 << kColumnBits) - 1;  // that of a key of ones

  struct Entries {
    __m512i keys;  // all ones for none
    __m512 values;
  };

  // What is left of one operand's row.
  struct Side {
    const int32_t* indices;
    const float* values;
    int64_t left;
    int of;

    Side(const SparseRows& x, const void* all, int64_t row, int of)
        : indices(x.indices + x.offsets[row]),
          values(static_cast<const float*>(all) + x.offsets[row]),
          left(x.offsets[row + 1] - x.offsets[row]),
          of(of) {}

    int32_t Column() const { return *indices; }
    Entries Next() {
      const int64_t count = left < 16 ? left : 16;
      const auto mask = __mmask16((1u << count) - 1);
      const __m512i columns = _mm512_maskz_loadu_epi32(mask, indices);
      const __m512i keys =
          _mm512_or_si512(_mm512_slli_epi32(columns, kShift), _mm512_set1_epi32(of));
      const Entries found = {_mm512_mask_mov_epi32(_mm512_set1_epi32(-1), mask, keys),
                             _mm512_maskz_loadu_ps(mask, values)};
      indices += count, values += count, left -= count;
      return found;
    }
  };

  static Entries None() { return {_mm512_set1_epi32(-1), _mm512_setzero_ps()}; }

  // The 16 entries that come first in `low`, the others in `high`. Both are sorted, also before.
  static void SortBoth(Entries& low, Entries& high) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i from = _mm512_set1_epi32(31);
    __m512i x = _mm512_or_si512(low.keys, lanes);
    __m512i y = _mm512_or_si512(high.keys, _mm512_or_si512(lanes, _mm512_set1_epi32(16)));
    y = KeySort::Reversed(y);
    KeySort::Exchange(x, y);
    x = KeySort::Merged(x), y = KeySort::Merged(y);
    const __m512 first = low.values, second = high.values;
    low = {_mm512_andnot_si512(from, x), _mm512_permutex2var_ps(first, x, second)};
    high = {_mm512_andnot_si512(from, y), _mm512_permutex2var_ps(first, y, second)};
  }

  // Adds what comes of the entries; `next` are those behind them.
  void Put(const Entries& entries, const Entries& next) {
    const __m512i columns = _mm512_srli_epi32(entries.keys, kShift);
    const __m512i above =
        _mm512_srli_epi32(_mm512_alignr_epi32(next.keys, entries.keys, 1), kShift);
    const __mmask16 there = _mm512_cmplt_epu32_mask(columns, _mm512_set1_epi32(kNoColumn));
    const __mmask16 both = _mm512_mask_cmpeq_epi32_mask(there, columns, above);
    const __m512 value_above = _mm512_castsi512_ps(_mm512_alignr_epi32(
        _mm512_castps_si512(next.values), _mm512_castps_si512(entries.values), 1));
    __mmask16 added = both;
    __m512 values;
    if constexpr (kMerge == Merge::kMultiply) {
      values = _mm512_mul_ps(entries.values, value_above);
    } else {
      const __m512i below = _mm512_alignr_epi32(entries.keys, last_, 15);
      added = _mm512_mask_cmpneq_epi32_mask(there, columns, _mm512_srli_epi32(below, kShift));
      const __mmask16 of_b = _mm512_test_epi32_mask(entries.keys, _mm512_set1_epi32(kOfB));
      const __m512 a = _mm512_maskz_mov_ps(__mmask16(~of_b), entries.values);
      const __m512 b =
          _mm512_mask_mov_ps(_mm512_maskz_mov_ps(of_b, entries.values), both, value_above);
      values = kMerge == Merge::kAdd ? _mm512_add_ps(a, b) : _mm512_sub_ps(a, b);
      last_ = entries.keys;
    }
    _mm512_storeu_si512(indices_, _mm512_maskz_compress_epi32(added, columns));
    _mm512_storeu_ps(values_, _mm512_maskz_compress_ps(added, values));
    indices_ += __builtin_popcount(added);
    values_ += __builtin_popcount(added);
  }

  int32_t* indices_;
  float* values_;
  __m512i last_;  // keys of the entries before
};
#endif

template <typename T, Merge kMerge>
void Values(const MergeRowsArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const T *a = static_cast<const T*>(args.a_values), *b = static_cast<const T*>(args.b_values);
  T* values = static_cast<T*>(args.values);
#if defined(SGAP_KEY_SORT)
  if constexpr (std::is_same_v<T, float>) {
    if (VectorMerge<kMerge>::Takes(args)) {
      VectorMerge<kMerge> merge(args);
      for (int64_t row = args.task_rows[task]; row < args.task_rows[task + 1]; ++row) {
        args.counts[row] = int32_t(merge.Run(args, row));
      }
      return;
    }
  }
#endif
  int64_t n = 0;
  for (int64_t row = args.task_rows[task]; row < args.task_rows[task + 1]; ++row) {
    const int64_t before = n;
    if constexpr (kMerge == Merge::kMultiply) {
      IntersectionOfRow(args, row, [&](int32_t column, int64_t i, int64_t j, bool both) {
        args.indices[n] = column;
        StoreScalar(values + n, Merged<kMerge, Acc>(LoadScalar(a + i), LoadScalar(b + j)));
        n += both;
      });
    } else {
      const auto put = [&](int32_t column, Acc x, Acc y) {
        args.indices[n] = column;
        StoreScalar(values + n, Merged<kMerge, Acc>(x, y));
        ++n;
      };
      UnionOfRow(
          args, row,
          [&](int32_t column, int64_t i, bool from_a, int64_t j, bool from_b) {
            put(column, OrZero<Acc>(LoadScalar(a + i), from_a),
                OrZero<Acc>(LoadScalar(b + j), from_b));
          },
          [&](int32_t column, int64_t i) { put(column, LoadScalar(a + i), 0); },
          [&](int32_t column, int64_t j) { put(column, 0, LoadScalar(b + j)); });
    }
    args.counts[row] = int32_t(n - before);
  }
}

void Places(const MergeRowsArgs& args, int64_t task) {
  int64_t n = 0;
  const auto put = [&](int32_t column, int64_t i, int64_t j) {
    args.indices[n] = column;
    args.a_places[n] = int32_t(i);
    args.b_places[n] = int32_t(j);
  };
  for (int64_t row = args.task_rows[task]; row < args.task_rows[task + 1]; ++row) {
    const int64_t before = n;
    if (args.merge == Merge::kMultiply) {
      IntersectionOfRow(args, row, [&](int32_t column, int64_t i, int64_t j, bool both) {
        put(column, i, j);
        n += both;
      });
    } else {
      const auto next = [&](int32_t column, int64_t i, int64_t j) {
        put(column, i, j);
        ++n;
      };
      UnionOfRow(
          args, row,
          [&](int32_t column, int64_t i, bool from_a, int64_t j, bool from_b) {
            next(column, i | -int64_t(!from_a), j | -int64_t(!from_b));
          },
          [&](int32_t column, int64_t i) { next(column, i, -1); },
          [&](int32_t column, int64_t j) { next(column, -1, j); });
    }
    args.counts[row] = int32_t(n - before);
  }
}

}  // namespace

void MergeRows(const MergeRowsArgs& args, int64_t task) {
  if (!args.a_values) return Places(args, task);
  DispatchDtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (args.merge) {
      case Merge::kAdd:
        return Values<T, Merge::kAdd>(args, task);
      case Merge::kSubtract:
        return Values<T, Merge::kSubtract>(args, task);
      case Merge::kMultiply:
        return Values<T, Merge::kMultiply>(args, task);
    }
  });
}

}  // namespace sgap::SGAP_ISA
