#include "row_search.h"
#include "sddmm_cvs.h"
#include "sddmm_dots.h"
#include "simd.h"

namespace sgap::SGAP_ISA {
namespace {

// Rows of y are asked for this many vectors ahead.
constexpr int64_t kAheadVectors = 8;

// Rows of a vector that one pass takes: with fewer a piece of y, with more one of x would be loaded
// too often for the kLanes sums that one tree adds up.
template <typename T>
constexpr int kMaxRows = kLanes<T> >= 16  ? 8
                         : kLanes<T> >= 8 ? 4
                         : kLanes<T> >= 4 ? 2
                                          : 1;

// kRows rows of x against the rows of y that kColumns vectors name: kLanes dot products.
template <typename T, int kRows>
struct VectorDots {
  static constexpr int kSize = kLanes<T>, kColumns = kSize / kRows;
  using Sum = Vector<Accumulator<T>, kSize>;

  const T* x[kRows];
  const T* y[kColumns];
  const T* ahead[kColumns];  // rows of y to come
  int64_t width;

  // sums[c * kRows + r] += x[r] * y[c], one vector of each.
  template <typename LoadPart>
  static void Add(LoadPart load, const VectorDots& dots, Sum* sums) {
    Sum right[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) right[c] = load(dots.y[c]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Sum left = load(dots.x[r]);
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) sums[c * kRows + r] += left * right[c];
    }
  }

  // Lane c * kRows + r: the dot product of x[r] and y[c].
  Sum Run() const {
    const VectorDots dots = *this;
    Sum sums[kSize] = {};
    int64_t at = 0;
    for (; at + kSize <= dots.width; at += kSize) {
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) Prefetch(dots.ahead[c] + at);
      Add([at](const T* row) { return Load<T, kSize>(row + at); }, dots, sums);
    }
    const int rest = int(dots.width - at);
    if (rest > 0) {
      const int64_t width = dots.width;
      Add([=](const T* row) { return LoadTail(row, width, rest); }, dots, sums);
    }
    return SumTransposed<kSize / 2>(sums);
  }
};

// kRows rows of the vectors [begin, end) of block row `block`, from row `row` of the vector on.
template <typename T, int kRows>
void BlockDots(const SddmmCvsArgs& args, const T* x, const T* y, int64_t block, int64_t row,
               int64_t begin, int64_t end, T* out) {
  using Dots = VectorDots<T, kRows>;
  using Acc = Accumulator<T>;
  const int64_t first = block * args.length + row;
  const int64_t rows = args.m - first < kRows ? args.m - first : kRows;
  Dots dots;
  dots.width = args.d;
  for (int r = 0; r < kRows; ++r) {  // of rows past the end another one: read, and not stored
    dots.x[r] = x + size_t(first + r < args.m ? first + r : args.m - 1) * size_t(args.d);
  }
  for (int64_t p = begin; p < end; p += Dots::kColumns) {
    for (int c = 0; c < Dots::kColumns; ++c) {
      const int64_t at = p + c < end ? p + c : end - 1;
      const int64_t ahead = at + kAheadVectors < end ? at + kAheadVectors : end - 1;
      dots.y[c] = y + size_t(args.indices[at]) * size_t(args.d);
      dots.ahead[c] = y + size_t(args.indices[ahead]) * size_t(args.d);
    }
    const auto sums = dots.Run();
    T* target = out + p * args.length + row;
    if (args.length == kRows && rows == kRows && p + Dots::kColumns <= end) {
      Store<T, Dots::kSize>(target, sums);
      continue;
    }
    for (int c = 0; c < Dots::kColumns && p + c < end; ++c, target += args.length) {
      for (int r = 0; r < kRows; ++r) {
        StoreScalar<T>(target + r, r < rows ? sums[c * kRows + r] : Acc{});
      }
    }
  }
}

template <typename T>
void VectorRange(const SddmmCvsArgs& args, const T* x, const T* y, int64_t block, int64_t begin,
                 int64_t end, T* out) {
  for (int64_t row = 0, taken = 0; row < args.length; row += taken) {
    const int64_t left = args.length - row;
    const auto run = [&](auto rows) {
      taken = decltype(rows)::value;
      BlockDots<T, decltype(rows)::value>(args, x, y, block, row, begin, end, out);
    };
    if (kMaxRows<T> >= 8 && left >= 8) {
      run(std::integral_constant<int, kMaxRows<T> >= 8 ? 8 : 1>());
    } else if (kMaxRows<T> >= 4 && left >= 4) {
      run(std::integral_constant<int, kMaxRows<T> >= 4 ? 4 : 1>());
    } else if (kMaxRows<T> >= 2 && left >= 2) {
      run(std::integral_constant<int, kMaxRows<T> >= 2 ? 2 : 1>());
    } else {
      run(std::integral_constant<int, 1>());
    }
  }
}

template <typename T>
void SddmmCvsTask(const SddmmCvsArgs& args, int64_t task) {
  const int64_t batch = task / args.chunks, chunk = task % args.chunks;
  const T* x = static_cast<const T*>(args.x) + batch * args.x_stride;
  const T* y = static_cast<const T*>(args.y) + batch * args.y_stride;
  T* out = static_cast<T*>(args.out) + batch * args.vectors * args.length;
  const int64_t blocks = (args.m + args.length - 1) / args.length;
  const int64_t begin = chunk * args.chunk_vectors;
  const int64_t stop =
      args.vectors - begin < args.chunk_vectors ? args.vectors : begin + args.chunk_vectors;
  const int64_t stored = args.d == 0 ? 0 : args.offsets[blocks];
  const int64_t end = stop < stored ? stop : stored > begin ? stored : begin;
  for (int64_t i = end * args.length; i < stop * args.length; ++i) out[i] = T{};
  if (begin == end) return;
  int64_t block = RowOfEntry(args.offsets, blocks, begin);
  for (int64_t p = begin; p < end; ++block) {
    const int64_t next = args.offsets[block + 1] < end ? args.offsets[block + 1] : end;
    if (p < next) VectorRange(args, x, y, block, p, next, out);
    p = next;
  }
}

}  // namespace

void SddmmCvs(const SddmmCvsArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { SddmmCvsTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
