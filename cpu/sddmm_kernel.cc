#include <cstdlib>

#include "row_search.h"
#include "sddmm.h"
#include "sddmm_dots.h"
#include "simd.h"

namespace sgap::SGAP_ISA {
namespace {

// Rows are looked up for this many entries at a time.
constexpr int64_t kBlockEntries = 1024;

// One batch of the operands, or a tile of their columns.
template <typename T>
struct Operands {
  const T* x;
  const T* y;
  int64_t x_pitch, y_pitch;  // elements from one row to the next
  int64_t width;             // columns
};

// Where the dot products go: out, or sums[p - first] while tiles of columns are to come; sums so
// far are added.
template <typename T>
struct Sink {
  T* out;
  Accumulator<T>* sums;
  int64_t first;
  bool add, store;

  void Put(int64_t p, int64_t count, typename DotGroup<T>::Sum dots) const {
    constexpr int kSize = DotGroup<T>::kSize;
    if (add) dots += Load<Accumulator<T>, kSize>(sums + (p - first));
    if (!store) {
      Store<Accumulator<T>, kSize>(sums + (p - first), dots);
    } else if (count >= kSize) {
      Store<T, kSize>(out + p, dots);
    } else {
      StorePartial<T, kSize>(out + p, dots, static_cast<int>(count));
    }
  }
};

// Entries [begin, end); rows[p - begin] is p's row.
template <bool kPrefetch, typename T>
void BlockDots(const SddmmArgs& args, const Operands<T>& operands, int64_t begin, int64_t end,
               const int32_t* rows, const Sink<T>& sink) {
  constexpr int kSize = DotGroup<T>::kSize;
  const int64_t last = args.offsets[args.m] - 1;
  DotGroup<T> group;
  group.x = operands.x;
  group.y = operands.y;
  group.x_pitch = operands.x_pitch;
  group.y_pitch = operands.y_pitch;
  for (int64_t p = begin; p < end; p += kSize) {
    group.rows = rows + (p - begin);
    group.columns = group.ahead = args.indices + p;
    if (p + 2 * kSize - 1 <= last) group.ahead += kSize;
    int32_t columns[kSize];
    if (end - p < kSize) {
      for (int i = 0; i < kSize; ++i) columns[i] = args.indices[p + i < end ? p + i : end - 1];
      group.columns = group.ahead = columns;
    }
    const auto dots = group.rows[0] == group.rows[kSize - 1]
                          ? Dots<true, kPrefetch>(group, operands.width)
                          : Dots<false, kPrefetch>(group, operands.width);
    sink.Put(p, end - p, dots);
  }
}

template <typename T>
void RangeDots(const SddmmArgs& args, const Operands<T>& operands, int64_t begin, int64_t end,
               const Sink<T>& sink) {
  constexpr int kSize = DotGroup<T>::kSize;
  int32_t rows[kBlockEntries + kRowSlack];
  int64_t row = RowOfEntry(args.offsets, args.m, begin);
  for (int64_t p = begin; p < end; p += kBlockEntries) {
    const int64_t stop = end - p > kBlockEntries ? p + kBlockEntries : end;
    row = ExpandRows(args.offsets, row, p, stop, rows);
    for (int i = 0; i < kSize; ++i) rows[stop - p + i] = rows[stop - p - 1];
    if (args.prefetch) {
      BlockDots<true>(args, operands, p, stop, rows, sink);
    } else {
      BlockDots<false>(args, operands, p, stop, rows, sink);
    }
  }
}

// y's columns [at, at + width) of every row, next to each other: a slab that stays in the cache.
template <typename T>
void PackColumns(const T* y, int64_t rows, int64_t pitch, int64_t at, int64_t width, T* packed) {
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_memcpy(packed + r * width, y + r * pitch + at, size_t(width) * sizeof(T));
  }
}

template <typename T>
bool TiledDots(const SddmmArgs& args, const Operands<T>& whole, int64_t begin, int64_t end,
               T* out) {
  using Acc = Accumulator<T>;
  const int64_t tile = args.tile_columns;
  const auto aligned = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
  const size_t sums_size = aligned(size_t(end - begin + DotGroup<T>::kSize) * sizeof(Acc));
  const size_t packed_size = aligned(size_t(args.k) * tile * sizeof(T));
  char* scratch = static_cast<char*>(std::aligned_alloc(64, sums_size + packed_size));
  if (!scratch) return false;
  Acc* sums = reinterpret_cast<Acc*>(scratch);
  T* packed = reinterpret_cast<T*>(scratch + sums_size);
  for (int64_t at = 0; at < args.d; at += tile) {
    const int64_t width = args.d - at < tile ? args.d - at : tile;
    PackColumns(whole.y, args.k, args.d, at, width, packed);
    const Operands<T> operands = {whole.x + at, packed, args.d, width, width};
    RangeDots<T>(args, operands, begin, end, {out, sums, begin, at > 0, at + width >= args.d});
  }
  std::free(scratch);
  return true;
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
  const Operands<T> operands = {x, y, args.d, args.d, args.d};
  if (args.tile_columns < args.d && TiledDots<T>(args, operands, begin, end, out)) return;
  RangeDots<T>(args, operands, begin, end, {out, nullptr, begin, false, true});
}

}  // namespace

void Sddmm(const SddmmArgs& args, int64_t task) {
  DispatchDtype(args.dtype, [&](auto tag) { SddmmTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
