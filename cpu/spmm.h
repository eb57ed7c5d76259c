// y[b, r, :] = sum over the entries p of row r of values[b, q(p)] * x[b, indices[p], :].
#pragma once

#include <cstdint>

#include "dtype.h"
#include "pack.h"
#include "partition.h"

namespace sgap {

struct SpmmArgs : RowTasks {
  Dtype dtype;
  const void* values;          // [batch or 1, nnz]
  const int32_t* offsets;      // [m + 1]
  const int32_t* indices;      // [nnz]
  const int32_t* permutation;  // [nnz], or null: q(p) = p
  const void* x;               // [batch or 1, k, n]
  void* y;                     // [batch, m, n]
  int64_t m, k, n, nnz;
  int64_t values_stride, x_stride;  // elements from one batch to the next, 0 where shared
  int64_t tile_columns;
  int64_t tiles;
  Packing packing;     // of x
  int64_t pack_tasks;  // 0: x is not packed

  // task = pack task, then pack_tasks + (batch * tiles + tile) * row_tasks + row task
  // partials: [batch, pieces, n]; remaining: [batch, tiles, split_rows]
};

namespace SGAP_ISA {
void Spmm(const SpmmArgs& args, int64_t task);
}

}  // namespace sgap
