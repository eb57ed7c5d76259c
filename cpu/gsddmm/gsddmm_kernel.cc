// Vectors of the entries of a chunk, row by row. Rows of y that are not in the second-level cache
// are prefetched, as for gspmm.
#include "cpu/common/partition.h"
#include "cpu/gsddmm/gsddmm.h"
#include "cpu/row_reduce/row_reduce_loops.h"
#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {
namespace {

constexpr int64_t kPrefetchBytes = 1 << 20;
constexpr int64_t kPrefetchEntries = 16;

template <typename T, bool kAdd>
void EntryVector(const T* x, const T* y, int64_t n, T* out) {
  constexpr int kSize = kLanes<T>;
  const auto combined = [&](int64_t c, int count) {
    const auto a = LoadCount(x + c, count), b = LoadCount(y + c, count);
    if constexpr (kAdd) {
      return a + b;
    } else {
      return a * b;
    }
  };
  int64_t c = 0;
  for (; c + kSize <= n; c += kSize) StoreCount(out + c, combined(c, kSize), kSize);
  if (c < n) StoreCount(out + c, combined(c, int(n - c)), int(n - c));
}

template <typename T, bool kAdd>
void GsddmmTask(const GsddmmArgs& args, int64_t task) {
  const int64_t n = args.n, batch = task / args.chunks;
  const int64_t begin = task % args.chunks * args.chunk_size;
  const int64_t stop = args.nnz - begin < args.chunk_size ? args.nnz : begin + args.chunk_size;
  const T* x = static_cast<const T*>(args.x) + batch * args.x_stride;
  const T* y = static_cast<const T*>(args.y) + batch * args.y_stride;
  T* out = static_cast<T*>(args.out) + (batch * args.nnz + begin) * n;
  const int64_t stored = args.offsets[args.m];
  const int64_t end = stop < stored ? stop : stored > begin ? stored : begin;
  const auto clear = [&](T* to) {
    for (int64_t c = 0; c < n; ++c) to[c] = T{};
  };
  const auto columns = uint32_t(args.k);
  const bool prefetch = args.k * n * int64_t(sizeof(T)) > kPrefetchBytes;
  int64_t q = begin;
  for (; q < args.first && q < stop; ++q, out += n) clear(out);
  for (int64_t i = q < end ? RowOfEntry(args.offsets, args.m, q) : 0; q < end; ++i) {
    const int64_t row_end = args.offsets[i + 1] < end ? args.offsets[i + 1] : end;
    for (; q < row_end; ++q, out += n) {
      if (prefetch) {
        const int64_t ahead = q + kPrefetchEntries < end ? q + kPrefetchEntries : end - 1;
        const uint32_t row = uint32_t(args.indices[ahead]);
        const char* from = reinterpret_cast<const char*>(y + size_t(row < columns ? row : 0) * n);
        for (int64_t byte = 0; byte < n * int64_t(sizeof(T)); byte += 64) Prefetch(from + byte);
      }
      const uint32_t j = uint32_t(args.indices[q]);
      if (j >= columns) {
        clear(out);
      } else {
        EntryVector<T, kAdd>(x + i * n, y + size_t(j) * n, n, out);
      }
    }
  }
  for (; q < stop; ++q, out += n) clear(out);
}

}  // namespace

void Gsddmm(const GsddmmArgs& args, int64_t task) {
  DispatchDtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return args.add ? GsddmmTask<T, true>(args, task) : GsddmmTask<T, false>(args, task);
  });
}

}  // namespace sgap::SGAP_ISA
