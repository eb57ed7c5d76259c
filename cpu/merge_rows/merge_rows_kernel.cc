#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/merge_rows/merge_rows.h"
#include "cpu/simd/merge_lanes.h"
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

template <typename X>
inline X Chosen(bool which, X yes, X no) {
  std::conditional_t<sizeof(X) == 8, uint64_t, uint32_t> y, n;
  std::memcpy(&y, &yes, sizeof(y)), std::memcpy(&n, &no, sizeof(n));
  n ^= (n ^ y) & (0 - decltype(n)(which));
  std::memcpy(&no, &n, sizeof(n));
  return no;
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
// Rows of float32 in vectors of 8 or 16 entries. A key is the column, whether the entry is B's, and
// in the lowest bits which lane of the two vectors that are merged it comes from.
template <Merge kMerge>
class VectorMerge {
  using L = MergeLanes;

 public:
  static bool Takes(const MergeRowsArgs& args) { return args.columns < int64_t(1) << kColumnBits; }

  explicit VectorMerge(const MergeRowsArgs& args)
      : indices_(args.indices), values_(static_cast<float*>(args.values)) {}

  // Appends the row, and returns how many entries it has.
  int64_t Run(const MergeRowsArgs& args, int64_t row) {
    const int32_t *const before = indices_, *const a = args.a.indices, *const b = args.b.indices;
    const float* const a_values = static_cast<const float*>(args.a_values);
    const float* const b_values = static_cast<const float*>(args.b_values);
    int64_t i = args.a.offsets[row], j = args.b.offsets[row];
    const int64_t a_end = args.a.offsets[row + 1], b_end = args.b.offsets[row + 1];
    if (i == a_end && j == b_end) return 0;
    last_ = None().keys;
    Entries high = None(), waiting = None();
    for (int64_t step = 0; i < a_end || j < b_end; ++step) {
      // The side whose next column comes first: what is left of both is behind what comes out.
      // Without a branch, which would go either way.
      const int32_t next_a = i < a_end ? a[i] : INT32_MAX, next_b = j < b_end ? b[j] : INT32_MAX;
      const bool of_b = next_b < next_a;
      const int64_t place = Chosen(of_b, j, i), left = Chosen(of_b, b_end - j, a_end - i);
      const int64_t count = left < L::kLanes ? left : L::kLanes;
      Entries low = Next(Chosen(of_b, b, a) + place, Chosen(of_b, b_values, a_values) + place,
                         count, int32_t(of_b) << kOfB);
      i += Chosen(of_b, int64_t(0), count), j += Chosen(of_b, count, int64_t(0));
      if (step == 0) {
        high = low;
        continue;
      }
      SortBoth(low, high);
      if (step > 1) Put(waiting, low);
      waiting = low;
    }
    Put(waiting, high);
    Put(high, None());
    return indices_ - before;
  }

 private:
  static constexpr int kColumnBits = 26, kShift = 32 - kColumnBits, kOfB = 5;
  static constexpr int kNoColumn = (1 << kColumnBits) - 1;  // that of a key of ones

  struct Entries {
    L::Keys keys;  // all ones for none
    L::Values values;
  };

  static Entries Next(const int32_t* indices, const float* values, int64_t count, int32_t of) {
    const L::Mask mask = L::First(count);
    const L::Keys keys = L::Or(L::Up<kShift>(L::Load(mask, indices)), L::Every(of));
    return {L::Chosen(mask, keys, L::Every(-1)), L::Load(mask, values)};
  }

  static Entries None() { return {L::Every(-1), L::Zero()}; }

  // The entries that come first in `low`, the others in `high`. Both are sorted, also before.
  static void SortBoth(Entries& low, Entries& high) {
    constexpr int kFrom = 2 * L::kLanes - 1;
    L::Keys x = L::Or(L::AndNot(L::Every(kFrom), low.keys), L::Numbers());
    L::Keys y =
        L::Or(L::AndNot(L::Every(kFrom), high.keys), L::Or(L::Numbers(), L::Every(L::kLanes)));
    KeySort::MergeTwo(x, y);
    const L::Values first = low.values, second = high.values;
    low = {x, L::Taken(first, x, second)};
    high = {y, L::Taken(first, y, second)};
  }

  // Adds what comes of the entries; `next` are those behind them.
  void Put(const Entries& entries, const Entries& next) {
    const L::Keys columns = L::Down<kShift>(entries.keys);
    const L::Mask none = L::Equal(columns, L::Every(kNoColumn));
    const L::Keys above = L::Down<kShift>(L::Above(entries.keys, next.keys));
    const L::Mask both = L::ButNot(L::Equal(columns, above), none);
    const L::Values value_above = L::Above(entries.values, next.values);
    L::Mask added = both;
    L::Values values;
    if constexpr (kMerge == Merge::kMultiply) {
      values = L::Multiply(entries.values, value_above);
    } else {
      const L::Keys below = L::Down<kShift>(L::Below(entries.keys, last_));
      added = L::ButNot(L::ButNot(L::First(L::kLanes), none), L::Equal(columns, below));
      const L::Mask of_b = L::HasBit<kOfB>(entries.keys);
      const L::Values a = L::OrZero(L::ButNot(L::First(L::kLanes), of_b), entries.values);
      const L::Values b = L::Chosen(both, value_above, L::OrZero(of_b, entries.values));
      values = kMerge == Merge::kAdd ? L::Add(a, b) : L::Subtract(a, b);
      last_ = entries.keys;
    }
    const int count = L::Store(added, columns, values, indices_, values_);
    indices_ += count;
    values_ += count;
  }

  int32_t* indices_;
  float* values_;
  L::Keys last_;  // of the entries before
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

template <bool kPlaces>
void Patterns(const MergeRowsArgs& args, int64_t task) {
  int64_t n = 0;
  const auto put = [&](int32_t column, int64_t i, int64_t j) {
    args.indices[n] = column;
    if constexpr (kPlaces) {
      args.a_places[n] = int32_t(i);
      args.b_places[n] = int32_t(j);
    }
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
  if (!args.a_values) {
    return args.a_places ? Patterns<true>(args, task) : Patterns<false>(args, task);
  }
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
