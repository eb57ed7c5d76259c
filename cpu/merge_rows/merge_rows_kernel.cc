#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/merge_rows/merge_rows.h"
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

template <typename T, Merge kMerge>
void Values(const MergeRowsArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const T *a = static_cast<const T*>(args.a_values), *b = static_cast<const T*>(args.b_values);
  T* values = static_cast<T*>(args.values);
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
