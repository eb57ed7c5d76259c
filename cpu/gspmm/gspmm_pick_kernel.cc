#include "cpu/common/row_search.h"
#include "cpu/gspmm/gspmm_folds.h"
#include "cpu/gspmm/gspmm_pick.h"
#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {
namespace {

// Columns of the matrix.
int64_t ColumnsOf(const PickArgs& args) { return args.transposed ? args.m : args.sources; }

template <typename T>
void PickTask(const PickArgs& args, int64_t task) {
  const int64_t batch = task / args.chunks, begin = task % args.chunks * args.chunk_size;
  const int64_t end = args.m - begin < args.chunk_size ? args.m : begin + args.chunk_size;
  const T* values = static_cast<const T*>(args.values) + batch * args.values_stride;
  const T* x = static_cast<const T*>(args.x) + batch * args.x_stride;
  const int32_t* arg = args.arg + batch * args.arg_stride + begin * args.n;
  T* y = static_cast<T*>(args.y) + (batch * args.m + begin) * args.n;
  const int64_t stored = args.offsets[args.matrix_rows];
  const auto columns = uint32_t(ColumnsOf(args));
  for (int64_t r = begin; r < end; ++r, arg += args.n, y += args.n) {
    for (int64_t c = 0; c < args.n; ++c) {
      const int64_t q = arg[c];
      if (q < 0 || q >= stored || uint32_t(args.indices[q]) >= columns) {
        y[c] = T{};
        continue;
      }
      const int64_t source =
          args.transposed ? RowOfEntry(args.offsets, args.matrix_rows, q) : args.indices[q];
      StoreScalar(y + c, LoadScalar(values + q) * LoadScalar(x + source * args.n + c));
    }
  }
}

// The sum of x * d where arg is q, over n columns.
template <typename T>
Accumulator<T> PickedDot(const T* x, const T* d, const int32_t* arg, int64_t n, int32_t q) {
  const OneRow<T> all = {n};
  return Reduce(all, Accumulator<T>(0), Add(), [&](int64_t c, int count) {
    const auto picked = LoadPositions<T>(arg + c, count) == Lane<T>(q);
    const auto product = LoadCount(x + c, count) * LoadCount(d + c, count);
    return picked ? product : decltype(product){};
  })[0];
}

template <typename T>
void PickToValuesTask(const PickArgs& args, int64_t task) {
  const int64_t batch = task / args.chunks, begin = task % args.chunks * args.chunk_size;
  const int64_t stop = args.nnz - begin < args.chunk_size ? args.nnz : begin + args.chunk_size;
  const T* x = static_cast<const T*>(args.x) + batch * args.x_stride;
  const T* d = static_cast<const T*>(args.d) + batch * args.d_stride;
  const int32_t* arg = args.arg + batch * args.arg_stride;
  T* out = static_cast<T*>(args.out) + batch * args.nnz;
  const int64_t stored = args.offsets[args.matrix_rows];
  const int64_t end = stop < stored ? stop : stored > begin ? stored : begin;
  for (int64_t q = end; q < stop; ++q) out[q] = T{};
  if (begin == end) return;
  const auto columns = uint32_t(ColumnsOf(args));
  for (int64_t q = begin, i = RowOfEntry(args.offsets, args.matrix_rows, begin); q < end; ++i) {
    const int64_t row_end = args.offsets[i + 1] < end ? args.offsets[i + 1] : end;
    for (; q < row_end; ++q) {
      const int64_t j = args.indices[q];
      if (uint32_t(j) >= columns) {
        out[q] = T{};
        continue;
      }
      const int64_t row = (args.transposed ? j : i) * args.n;
      const int64_t source = (args.transposed ? i : j) * args.n;
      StoreScalar(out + q, PickedDot(x + source, d + row, arg + row, args.n, int32_t(q)));
    }
  }
}

}  // namespace

void GspmmPick(const PickArgs& args, int64_t task) {
  DispatchDtype(args.dtype, [&](auto tag) { PickTask<typename decltype(tag)::type>(args, task); });
}

void GspmmPickToValues(const PickArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { PickToValuesTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
