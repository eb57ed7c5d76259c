// SpMM with column vectors of V rows: for a block row b and each of its vectors p,
//   y[batch, b V + v, :] += values[batch, p, v] * x[batch, indices[p], :]       v = 0 .. V - 1
// and the product with the transpose, whose rows j hold vectors of V columns:
//   y[batch, j, :] += sum over v of values[batch, q(p), v] * x[batch, indices[p] V + v, :]
#pragma once

#include <cstdint>

#include "cpu/common/column_tiles.h"
#include "cpu/common/dtype.h"

namespace sgap {

struct SpmmCvsArgs : ColumnTiles {
  Dtype dtype;
  const void* values;          // [batch or 1, vectors, V]
  const int32_t* offsets;      // [block rows + 1], of the transpose [rows of y + 1]
  const int32_t* indices;      // [vectors]
  const int32_t* permutation;  // [vectors], q(p) of the transpose; else not read
  void* y;                     // [batch, m, n]
  bool transpose;
  int64_t m, vectors, length;
  int64_t values_stride;  // elements from one batch to the next, 0 where shared

  // partials: [batch, pieces, piece_rows, n]; remaining: [walks, split_rows]
  int64_t piece_rows;  // V, of the transpose one
};

namespace SGAP_ISA {
void SpmmCvs(const SpmmCvsArgs& args, int64_t task);
}

}  // namespace sgap
