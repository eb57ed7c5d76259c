#include "row_search.h"
#include "sddmm.h"
#include "sddmm_dots.h"
#include "simd.h"

namespace sgap::SGAP_ISA {
namespace {

// Rows are looked up for this many entries at a time.
constexpr int64_t kBlockEntries = 1024;

// Entries [begin, end); rows[p - begin] is p's row, and kLanes more elements hold any row.
template <DotOrder kOrder, bool kPrefetch, typename T>
void BlockDots(const SddmmArgs& args, const T* x, const T* y, int64_t begin, int64_t end,
               const int32_t* rows, T* out) {
  constexpr int kSize = DotGroup<T>::kSize;
  const int64_t last = args.offsets[args.m] - 1;
  DotGroup<T> group;
  group.x = x;
  group.y = y;
  group.width = args.d;
  for (int64_t p = begin; p < end; p += kSize) {
    group.rows = rows + (p - begin);
    group.columns = group.ahead = args.indices + p;
    if (p + kSize - 1 + args.prefetch_entries <= last) group.ahead += args.prefetch_entries;
    int32_t columns[kSize];
    if (end - p < kSize) {
      for (int i = 0; i < kSize; ++i) columns[i] = args.indices[p + i < end ? p + i : end - 1];
      group.columns = group.ahead = columns;
    }
    const auto dots = group.rows[0] == group.rows[kSize - 1]
                          ? GroupDots<kOrder, true, kPrefetch>(group)
                          : GroupDots<kOrder, false, kPrefetch>(group);
    if (end - p >= kSize) {
      Store<T, kSize>(out + p, dots);
    } else {
      StorePartial<T, kSize>(out + p, dots, static_cast<int>(end - p));
    }
  }
}

template <typename T>
void RangeDots(const SddmmArgs& args, const T* x, const T* y, int64_t begin, int64_t end, T* out) {
  constexpr int kSize = DotGroup<T>::kSize;
  int32_t rows[kBlockEntries + kRowSlack];
  int64_t row = RowOfEntry(args.offsets, args.m, begin);
  for (int64_t p = begin; p < end; p += kBlockEntries) {
    const int64_t stop = end - p > kBlockEntries ? p + kBlockEntries : end;
    row = ExpandRows(args.offsets, row, p, stop, rows);
    for (int i = 0; i < kSize; ++i) rows[stop - p + i] = rows[stop - p - 1];
    if (args.y_is_far) {
      BlockDots<DotOrder::kInTurn, true>(args, x, y, p, stop, rows, out);
    } else if (args.prefetch_entries > 0) {
      BlockDots<DotOrder::kTogether, true>(args, x, y, p, stop, rows, out);
    } else {
      BlockDots<DotOrder::kTogether, false>(args, x, y, p, stop, rows, out);
    }
  }
}

// d of 1 to 4: there is more to gain from short code than from vectors.
template <int kWidth, typename T>
void NarrowDots(const SddmmArgs& args, const T* x, const T* y, int64_t begin, int64_t end, T* out) {
  for (int64_t p = begin, r = RowOfEntry(args.offsets, args.m, begin); p < end; ++r) {
    const int64_t stop = args.offsets[r + 1] < end ? args.offsets[r + 1] : end;
    const T* left = x + r * kWidth;
    for (; p < stop; ++p) {
      const T* right = y + size_t(args.indices[p]) * kWidth;
      T sum = left[0] * right[0];
      for (int c = 1; c < kWidth; ++c) sum += left[c] * right[c];
      out[p] = sum;
    }
  }
}

template <typename T>
void SddmmTask(const SddmmArgs& args, int64_t task) {
  const int64_t batch = task / args.chunks, chunk = task % args.chunks;
  const T* x = static_cast<const T*>(args.x) + batch * args.x_stride;
  const T* y = static_cast<const T*>(args.y) + batch * args.y_stride;
  T* out = static_cast<T*>(args.out) + batch * args.nnz;
  const int64_t begin = chunk * args.chunk_nonzeros;
  const int64_t stop =
      args.nnz - begin < args.chunk_nonzeros ? args.nnz : begin + args.chunk_nonzeros;
  const int64_t stored = args.d == 0 ? 0 : args.offsets[args.m];
  const int64_t end = stop < stored ? stop : stored > begin ? stored : begin;
  for (int64_t p = end; p < stop; ++p) out[p] = T{};
  if (begin == end) return;
  if constexpr (sizeof(T) >= 4) {
    if (args.d == 1) return NarrowDots<1>(args, x, y, begin, end, out);
    if (args.d == 2) return NarrowDots<2>(args, x, y, begin, end, out);
    if (args.d == 3) return NarrowDots<3>(args, x, y, begin, end, out);
    if (args.d == 4) return NarrowDots<4>(args, x, y, begin, end, out);
  }
  RangeDots(args, x, y, begin, end, out);
}

}  // namespace

void Sddmm(const SddmmArgs& args, int64_t task) {
  DispatchDtype(args.dtype, [&](auto tag) { SddmmTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
