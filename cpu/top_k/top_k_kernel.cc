// Rows of the selection, one after another.
#include "cpu/top_k/top_k.h"
#include "cpu/top_k/top_k_rows.h"

namespace sgap::SGAP_ISA {

constexpr int64_t kMostPrefetched = 1 << 17;  // bytes of a row

void TopK(const TopKArgs& args, int64_t task) {
  const int64_t batch = task / args.row_tasks;
  const int64_t begin = task % args.row_tasks * args.task_rows;
  const int64_t end = args.rows - begin < args.task_rows ? args.rows : begin + args.task_rows;
  DispatchDtype(args.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    RowScratch<T> scratch(args.scratch, args.columns);
    const int32_t* limits = args.limits + batch * args.limits_stride;
    const int32_t* offsets = args.offsets + batch * (args.rows + 1);
    int32_t* indices = args.indices + batch * args.rows * args.k;
    // Of longer rows as much is prefetched by the processor, and the next one would push out this
    // one.
    const bool prefetch = args.columns * int64_t(sizeof(T)) <= kMostPrefetched;
    T* values = static_cast<T*>(args.values) + batch * args.rows * args.k;
    for (int64_t r = begin; r < end; ++r) {
      const T* scores = static_cast<const T*>(args.scores) + (batch * args.rows + r) * args.columns;
      args.counts[batch * args.rows + r] =
          SelectRow(scores, TopKLimit(limits[r], args.columns), args.k, prefetch ? args.columns : 0,
                    scratch, offsets[end] - offsets[r], indices + offsets[r], values + offsets[r]);
    }
  });
}

}  // namespace sgap::SGAP_ISA
