// y[b, r, :] = sum over the entries p of row r of values[b, q(p)] * x[b, indices[p], :].
#pragma once

#include <cstdint>

#include "cpu/common/column_tiles.h"
#include "cpu/common/dtype.h"

namespace sgap {

struct SpmmArgs : ColumnTiles {
  Dtype dtype;
  const void* values;          // [batch or 1, nnz]
  const int32_t* offsets;      // [m + 1]
  const int32_t* indices;      // [nnz]
  const int32_t* permutation;  // [nnz], or null: q(p) = p
  void* y;                     // [batch, m, n]
  int64_t m, nnz;
  int64_t values_stride;  // elements from one batch to the next, 0 where shared

  // partials: [batch, pieces, n]; remaining: [walks, split_rows]
};

namespace SGAP_ISA {
void Spmm(const SpmmArgs& args, int64_t task);
}

}  // namespace sgap
