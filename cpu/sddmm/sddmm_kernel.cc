#include "cpu/common/partition.h"
#include "cpu/sddmm/sddmm.h"
#include "cpu/sddmm/sddmm_dots.h"
#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {
namespace {

// Entries [begin, end) of a row of x. Few sums at a time: with as many as a vector has lanes, over
// rows of x as they come, each entry would load its own row of x (measured: a quarter slower). Of
// bfloat16, whose rounding takes as many instructions for 16 results as for four, four groups are
// rounded together: with 32 features 0.83 to 0.90 of the time, with more 0.92 to 0.97 (Intel Xeon,
// family 6 model 167). Not where pairs are multiplied, whose rounding of 16 drops subnormal
// numbers.
template <bool kPrefetch, typename Row, typename Rows, typename R, bool kPlain>
[[gnu::always_inline]] inline void DotsOfRow(const SddmmArgs& args, const Row& row,
                                             const Rows& rows, int64_t begin, int64_t end,
                                             int64_t stored, Results<R, kPlain> results) {
  using T = typename Rows::Number;
  constexpr int kGroup = DotGroup<T>::kSize;
  using Sums = Vector<Accumulator<T>, kGroup>;
  const int32_t* const columns = args.indices;
  const auto dots_of = [&](int64_t p, int count) __attribute__((always_inline)) {
    DotGroup<T> group{rows.y, columns + p, columns + p, count};
    if (p + args.prefetch_entries + kGroup <= stored) group.ahead += args.prefetch_entries;
    DotSum<T> dots[kGroup];
    row.template Dots<kPrefetch>(group, dots);
    return AddLanes<T>(dots);
  };
  int64_t p = begin;
  if constexpr (std::is_same_v<R, BFloat16> && kVectorBytes == 64 && !kInPairs<R>) {
    constexpr int kTogether = 4 * kGroup;
    for (; p + kTogether <= end; p += kTogether) {
      Sums sums[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[i] = dots_of(p + i * kGroup, kGroup);
      using Acc = Accumulator<T>;
      const auto all = Concat<Acc, 2 * kGroup>(Concat<Acc, kGroup>(sums[0], sums[1]),
                                               Concat<Acc, kGroup>(sums[2], sums[3]));
      (results + p).template Put<kTogether>(all);
    }
  }
  for (; p < end; p += kGroup) {
    const int count = end - p < kGroup ? int(end - p) : kGroup;
    const Sums sums = dots_of(p, count);
    if (count == kGroup) {
      (results + p).template Put<kGroup>(sums);
    } else {
      (results + p).template PutPartial<kGroup>(sums, count);
    }
  }
}

// Entries [begin, end), row by row. With cursors, one for each row of x, several times: each time
// all rows of x go on from their cursor through the entries that name the next block_rows rows of
// y. Where the columns of a row do not ascend, an entry is computed with a later block than its
// own.
template <typename Row, bool kPrefetch, typename Rows, typename Out>
__attribute__((noinline)) void RowDots(const SddmmArgs& args, const Rows rows, int64_t begin,
                                       int64_t end, int32_t* cursors, Out results) {
  const int32_t *const offsets = args.offsets, *const columns = args.indices;
  const int64_t width = Row::Width(args.d), stored = offsets[args.m];
  const int64_t first_row = RowOfEntry(offsets, args.m, begin);
  for (int64_t block = 0;; block += args.block_rows) {
    const bool last = !cursors || args.k - block <= args.block_rows;
    int64_t p = begin;
    for (int64_t r = first_row; p < end; ++r) {
      const int64_t next = offsets[r + 1] < end ? offsets[r + 1] : end;
      const int64_t from = block > 0 ? cursors[r - first_row] : p;
      int64_t stop = next;
      if (!last) {
        for (stop = from; stop < next && columns[stop] < block + args.block_rows;) ++stop;
        cursors[r - first_row] = int32_t(stop);
      }
      if (from < stop) {
        DotsOfRow<kPrefetch>(args, Row(rows.OfX(r, 1), width), rows, from, stop, stored, results);
      }
      p = next;
    }
    if (last) return;
  }
}

// Where d is one of kPieces... whole pieces, does all entries and returns true.
template <int... kPieces, typename Rows, typename Out>
bool HeldRowDots(std::integer_sequence<int, kPieces...>, const SddmmArgs& args, const Rows& rows,
                 int64_t begin, int64_t end, int32_t* cursors, Out results) {
  using T = typename Rows::Number;
  const auto run = [&](auto pieces) {
    using Row = HeldRow<decltype(pieces)::value, T>;
    if (args.prefetch_entries > 0 && !cursors) {
      RowDots<Row, true>(args, rows, begin, end, cursors, results);
    } else {
      RowDots<Row, false>(args, rows, begin, end, cursors, results);
    }
    return true;
  };
  return ((args.d == kPieces * kPieceElements<T> && run(std::integral_constant<int, kPieces>())) ||
          ...);
}

// d of 1 to 4: there is more to gain from short code than from vectors.
template <int kWidth, typename T, typename Out>
void NarrowDots(const SddmmArgs& args, const OwnRows<T>& rows, int64_t begin, int64_t end,
                Out results) {
  for (int64_t p = begin, r = RowOfEntry(args.offsets, args.m, begin); p < end; ++r) {
    const int64_t stop = args.offsets[r + 1] < end ? args.offsets[r + 1] : end;
    const T* left = rows.x + r * kWidth;
    for (; p < stop; ++p) {
      const T* right = rows.y + size_t(args.indices[p]) * kWidth;
      T sum = left[0] * right[0];
      for (int c = 1; c < kWidth; ++c) sum += left[c] * right[c];
      results.PutScalar(p, sum);
    }
  }
}

// Entries [begin, end), none of which is padding.
template <typename Rows, typename Out>
void EntryDots(const SddmmArgs& args, const Rows& rows, int64_t begin, int64_t end,
               int32_t* cursors, Out results) {
  using T = typename Rows::Number;
  if constexpr (sizeof(T) >= 4 && std::is_same_v<Rows, OwnRows<T>>) {
    if (args.d == 1) return NarrowDots<1>(args, rows, begin, end, results);
    if (args.d == 2) return NarrowDots<2>(args, rows, begin, end, results);
    if (args.d == 3) return NarrowDots<3>(args, rows, begin, end, results);
    if (args.d == 4) return NarrowDots<4>(args, rows, begin, end, results);
  }
  using Held = std::conditional_t<kInPairs<T>, std::integer_sequence<int, 1, 2, 3, 4, 5, 6, 8>,
                                  std::integer_sequence<int, 2, 3, 4, 5, 6, 8, 10, 12, 16>>;
  if (HeldRowDots(Held(), args, rows, begin, end, cursors, results)) return;
  RowDots<AnyRow<T>, false>(args, rows, begin, end, cursors, results);
}

template <typename T>
void SddmmTask(const SddmmArgs& args, int64_t task) {
  const int64_t batch = task / args.chunks, chunk = task % args.chunks;
  T* out = static_cast<T*>(args.out) + batch * args.entries;
  const int64_t begin = chunk * args.chunk_entries;
  const int64_t stop =
      args.entries - begin < args.chunk_entries ? args.entries : begin + args.chunk_entries;
  const int64_t stored = args.d == 0 ? 0 : args.offsets[args.m];
  const int64_t end = stop < stored ? stop : stored > begin ? stored : begin;
  for (int64_t p = end; p < stop; ++p) out[p] = T{};
  if (begin == end) return;
  Slab* const slab = args.block_rows > 0 ? FreeSlab(args.cursors) : nullptr;
  auto* const cursors = slab ? static_cast<int32_t*>(slab->memory) : nullptr;
  WithRows<T>(args, batch, [&](const auto& rows) {
    WithResults(args, out, args.entries, batch,
                [&](auto results) { EntryDots(args, rows, begin, end, cursors, results); });
  });
  if (slab) GiveBack(slab);
}

}  // namespace

void Sddmm(const SddmmArgs& args, int64_t task) {
  DispatchOwnDtype(args.dtype,
                   [&](auto tag) { SddmmTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
